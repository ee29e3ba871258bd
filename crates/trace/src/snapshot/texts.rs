//! The texts of a pickle, each once. Keys, actions and states are among them from the start, at known numbers.

use std::collections::HashMap;
use std::sync::Arc;

use super::schema;
use crate::error;

/// Different texts: more than one per event of any recording that fits into memory.
const TEXTS_MAX: usize = 1 << 27;
/// Bytes of different texts. Well compressed, a small file could ask for any amount of them.
const BYTES_MAX: usize = 1 << 30;

/// Texts by number, and numbers by text.
pub(crate) struct TextTable {
    list: Vec<Arc<str>>,
    /// Only ever asked, never gone through; the standard hasher, since whoever wrote the file chose the texts.
    places: HashMap<Arc<str>, u32>,
    bytes: usize,
}

impl TextTable {
    pub(crate) fn new() -> Self {
        let mut table = Self { list: Vec::new(), places: HashMap::new(), bytes: 0 };
        for (number, text) in schema::known_texts().enumerate() {
            assert_eq!(table.intern(text), Ok(number as u32), "the known texts differ from one another");
        }
        table
    }

    /// The number of a text; a new one if it is new.
    fn intern(&mut self, text: &str) -> Result<u32, &'static str> {
        if let Some(&place) = self.places.get(text) {
            return Ok(place);
        }
        if self.list.len() >= TEXTS_MAX {
            return Err("too many different texts");
        }
        if text.len() > BYTES_MAX - self.bytes {
            return Err("more than 1 GiB of different texts");
        }
        self.bytes += text.len();
        let place = self.list.len() as u32;
        let text: Arc<str> = text.into();
        self.list.push(Arc::clone(&text));
        self.places.insert(text, place);
        Ok(place)
    }

    /// The same from the bytes of a pickle, or what is wrong with them.
    ///
    /// Python writes half surrogates, which stand for undecodable bytes in file names, as if they were characters. They
    /// become U+FFFD here.
    pub(crate) fn intern_bytes(&mut self, bytes: &[u8]) -> Result<u32, &'static str> {
        if let Ok(text) = std::str::from_utf8(bytes) {
            return self.intern(text);
        }
        let mut repaired = Vec::with_capacity(bytes.len());
        let mut rest = bytes;
        while let [first, ..] = rest {
            if let [0xed, 0xa0..=0xbf, 0x80..=0xbf, after @ ..] = rest {
                repaired.extend_from_slice("\u{fffd}".as_bytes());
                rest = after;
            } else {
                repaired.push(*first);
                rest = &rest[1..];
            }
        }
        match std::str::from_utf8(&repaired) {
            Ok(text) => self.intern(text),
            Err(_) => Err("a text that is not UTF-8"),
        }
    }

    /// The text of that number.
    pub(crate) fn get(&self, place: u32) -> &str {
        &self.list[place as usize]
    }

    /// The same for messages.
    pub(crate) fn short(&self, place: u32) -> String {
        error::short(self.get(place))
    }

    pub(crate) fn len(&self) -> usize {
        self.list.len()
    }
}
