//! Pickles written byte by byte, with whatever content.

use std::io::Write as _;

/// A pickle that is being written.
#[derive(Default)]
pub struct Pickle(pub Vec<u8>);

impl Pickle {
    pub fn new() -> Self {
        Self(b"\x80\x04".to_vec())
    }

    pub fn raw(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.extend_from_slice(bytes);
        self
    }

    pub fn text(&mut self, text: &str) -> &mut Self {
        match u8::try_from(text.len()) {
            Ok(length) => self.raw(&[0x8c, length]),
            Err(_) => self.raw(b"X").raw(&(text.len() as u32).to_le_bytes()),
        };
        self.raw(text.as_bytes())
    }

    pub fn number(&mut self, number: u64) -> &mut Self {
        // Nine bytes, so that it is not negative.
        self.raw(&[0x8a, 9]).raw(&number.to_le_bytes()).raw(&[0])
    }

    /// A dict of numbers and texts.
    pub fn dict(&mut self, items: &[(&str, Item<'_>)]) -> &mut Self {
        self.raw(b"}(");
        for (key, item) in items {
            self.text(key);
            match *item {
                Item::Number(number) => self.number(number),
                Item::Negative(number) => self.raw(&[0x8a, 8]).raw(&number.to_le_bytes()),
                Item::Text(text) => self.text(text),
                Item::Bool(value) => self.raw(if value { b"\x88" } else { b"\x89" }),
                Item::Pool(graph, user) => self.number(graph).number(user).raw(b"\x86"),
                Item::Raw(bytes) => self.raw(bytes),
            };
        }
        self.raw(b"u")
    }
}

#[derive(Clone, Copy)]
pub enum Item<'a> {
    Number(u64),
    Negative(i64),
    Text(&'a str),
    Bool(bool),
    Pool(u64, u64),
    Raw(&'a [u8]),
}

/// An entry of a trace.
pub fn entry(action: &str, addr: u64, size: u64, stream: u64, time_us: i64) -> Vec<u8> {
    let mut entry = Pickle::default();
    entry.dict(&[
        ("action", Item::Text(action)),
        ("addr", Item::Number(addr)),
        ("size", Item::Number(size)),
        ("stream", Item::Number(stream)),
        ("time_us", Item::Negative(time_us)),
    ]);
    entry.0
}

/// A segment with one block for each address, size and state.
pub fn segment(address: u64, bytes: u64, kind: &str, expandable: bool, blocks: &[(u64, u64, &str)]) -> Vec<u8> {
    let mut list = Pickle::default();
    list.raw(b"](");
    for &(address, size, state) in blocks {
        let number = Item::Number;
        list.dict(&[
            ("address", number(address)),
            ("size", number(size)),
            ("requested_size", number(size)),
            ("state", Item::Text(state)),
        ]);
    }
    list.raw(b"e");
    let mut segment = Pickle::default();
    segment.dict(&[
        ("device", Item::Number(0)),
        ("address", Item::Number(address)),
        ("total_size", Item::Number(bytes)),
        ("allocated_size", Item::Number(0)),
        ("active_size", Item::Number(0)),
        ("stream", Item::Number(0)),
        ("segment_type", Item::Text(kind)),
        ("segment_pool_id", Item::Pool(0, 0)),
        ("is_expandable", Item::Bool(expandable)),
        ("blocks", Item::Raw(&list.0)),
    ]);
    segment.0
}

/// A snapshot of these segments and events, with further items of its root.
pub fn snapshot(segments: &[Vec<u8>], events: &[Vec<u8>], more: &[u8]) -> Vec<u8> {
    let mut pickle = Pickle::new();
    pickle.raw(b"}(").text("segments").raw(b"](").raw(&segments.concat()).raw(b"e");
    pickle.text("device_traces").raw(b"](](").raw(&events.concat()).raw(b"ee").raw(more).raw(b"u.");
    pickle.0
}

/// The same, compressed.
pub fn gzip(file: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(file).expect("writing to memory succeeds");
    encoder.finish().expect("writing to memory succeeds")
}
