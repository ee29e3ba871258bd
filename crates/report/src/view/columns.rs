//! Columns of numbers, as `page/decode.js` reads them: variable-length integers, deflated, in base64.

use std::io::Write as _;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use flate2::Compression;
use flate2::write::DeflateEncoder;

/// Columns, one after the other.
#[derive(Default)]
pub struct Columns(Vec<u8>);

impl Columns {
    /// A column of numbers, its length first.
    pub fn column(&mut self, values: impl ExactSizeIterator<Item = u64>) -> &mut Self {
        self.number(values.len() as u64);
        values.for_each(|value| self.number(value));
        self
    }

    /// A column of differences, each to the one before.
    pub fn sums(&mut self, values: impl ExactSizeIterator<Item = u64>) -> &mut Self {
        self.number(values.len() as u64);
        let mut before = 0;
        for value in values {
            self.signed(value.wrapping_sub(before).cast_signed());
            before = value;
        }
        self
    }

    /// Bytes as they are.
    pub fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.extend_from_slice(bytes);
        self
    }

    /// Seven bits in each byte, the lowest first.
    fn number(&mut self, mut value: u64) {
        while value >= 128 {
            self.0.push((value & 127) as u8 | 128);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    /// The sign in the lowest bit.
    fn signed(&mut self, value: i64) {
        self.number(((value << 1) ^ (value >> 63)).cast_unsigned());
    }

    /// Deflated, as text for the page.
    pub fn pack(&self) -> String {
        let mut encoder = DeflateEncoder::new(Vec::new(), Compression::new(6));
        let written = encoder.write_all(&self.0).and_then(|()| encoder.finish());
        STANDARD.encode(written.expect("writing to memory succeeds"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_seven_bits_in_each_byte() {
        let mut columns = Columns::default();
        columns.column([0, 127, 128, 300].into_iter());
        assert_eq!(columns.0, [4, 0, 127, 128, 1, 172, 2]);
        let mut columns = Columns::default();
        columns.sums([5, 3, 3, 1000].into_iter());
        // +5, -2, 0, +997 with the sign in the lowest bit.
        assert_eq!(columns.0, [4, 10, 3, 0, 202, 15]);
        let mut largest = Columns::default();
        largest.sums([u64::MAX, 0].into_iter());
        assert_eq!(largest.0, [2, 1, 2], "a difference of one, around the end");
    }
}
