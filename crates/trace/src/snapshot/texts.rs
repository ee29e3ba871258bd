//! The texts of a pickle, each stored once. Keywords, actions and states are interned first, at fixed numbers.

use std::collections::HashMap;
use std::sync::Arc;

use super::schema;
use crate::budget::{Budget, Exceeded};
use crate::printable;

/// The maximum number of distinct texts.
const TEXTS_MAX: usize = 1 << 31;
/// The memory of a text beside its own bytes: the allocation, and its places in the list and the map while they grow.
const BYTES_EACH: u64 = 160;

/// Texts by number, and numbers by text.
pub(super) struct TextTable {
    texts: Vec<Arc<str>>,
    /// Not iterated over. The standard hasher, since the author of the file chooses the texts.
    numbers: HashMap<Arc<str>, u32>,
    budget: Budget,
}

impl TextTable {
    pub(super) fn new(budget: &Budget) -> Self {
        let mut table = Self { texts: Vec::new(), numbers: HashMap::new(), budget: Budget::new(Some(u64::MAX)) };
        for (number, text) in schema::fixed_texts().enumerate() {
            assert_eq!(table.intern(text), Ok(number as u32), "the fixed texts are all different");
        }
        table.budget = budget.clone();
        table
    }

    /// The number of a text; a new one if it is new.
    fn intern(&mut self, text: &str) -> Result<u32, &'static str> {
        if let Some(&number) = self.numbers.get(text) {
            return Ok(number);
        }
        if self.texts.len() >= TEXTS_MAX {
            return Err("too many different texts");
        }
        self.budget.take(BYTES_EACH + text.len() as u64).map_err(|Exceeded| "the memory limit was reached")?;
        let number = self.texts.len() as u32;
        let text: Arc<str> = text.into();
        self.texts.push(Arc::clone(&text));
        self.numbers.insert(text, number);
        Ok(number)
    }

    /// The number of a text of a pickle, or what is wrong with its bytes.
    ///
    /// Python writes lone surrogates, which stand for undecodable bytes in file names, as if they were characters. They
    /// become U+FFFD.
    pub(super) fn intern_bytes(&mut self, bytes: &[u8]) -> Result<u32, &'static str> {
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
    pub(super) fn get(&self, number: u32) -> &str {
        &self.texts[number as usize]
    }

    /// The text of that number, for messages.
    pub(super) fn shortened(&self, number: u32) -> String {
        printable::shortened(self.get(number))
    }

    pub(super) fn len(&self) -> usize {
        self.texts.len()
    }
}
