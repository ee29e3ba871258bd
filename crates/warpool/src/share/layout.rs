//! Where the words of a page are. A page is a head and one section per device of the process. Only places here; what is
//! in them is in `values.rs`.
//!
//! | words of the head | |
//! |---|---|
//! | 0 | the magic number, written last |
//! | 1 to 3 | version of the layout, words of the page, process id |
//! | 4 to 6 | the number that identifies the page, the time of its making, devices |
//! | 8 to 15 | the command, in UTF-8 |
//! | 16 | when a reader last asked for fresh values |
//!
//! | words of a section | |
//! |---|---|
//! | 0 to 3 | UUID (two), ordinal in the process, bytes in total |
//! | 4 to 11 | the name of the device, in UTF-8 |
//! | 16 to 767 | values, under a sequence number |
//! | 768 to 895 | the ledger |
//! | 896 to 911 | the request for another limit, its answer (`limit.rs`) |

use std::sync::atomic::{AtomicU64, Ordering};

use crate::sync::sequence;

pub(super) const MAGIC: u64 = u64::from_le_bytes(*b"warpool\n");
/// Another version is not read: whoever changes a place changes the number.
pub(super) const VERSION: u64 = 1;

pub(super) const HEAD_WORDS: usize = 64;
pub(super) const MAGIC_AT: usize = 0;
pub(super) const VERSION_AT: usize = 1;
pub(super) const WORDS_AT: usize = 2;
pub(super) const PID_AT: usize = 3;
pub(super) const NUMBER_AT: usize = 4;
pub(super) const SINCE_AT: usize = 5;
pub(super) const DEVICES_AT: usize = 6;
pub(super) const COMMAND: std::ops::Range<usize> = 8..16;
pub(super) const ASKED_AT: usize = 16;

pub(super) const SECTION_WORDS: usize = 1024;
/// CUDA lists no more devices than that to a process.
pub(super) const DEVICES_MAX: usize = 64;
pub(super) const UUID: std::ops::Range<usize> = 0..2;
pub(super) const ORDINAL_AT: usize = 2;
pub(super) const TOTAL_AT: usize = 3;
pub(super) const NAME: std::ops::Range<usize> = 4..12;
pub(super) const VALUES: std::ops::Range<usize> = 16..768;
pub(super) const LEDGER: std::ops::Range<usize> = 768..768 + LEDGER_WORDS;

/// The request for another limit, its answer: the same word, and what came of it.
pub(super) const LIMIT_REQUEST_AT: usize = 896;
pub(super) const LIMIT_ANSWERED_AT: usize = 897;
pub(super) const LIMIT_OUTCOME_AT: usize = 898;

/// The words of a device's ledger.
pub const LEDGER_WORDS: usize = 128;

/// The values under the sequence number.
pub(super) const VALUE_WORDS: usize = VALUES.end - VALUES.start - sequence::OVERHEAD;

/// How many words a page of `devices` devices has.
pub(super) const fn words(devices: usize) -> usize {
    HEAD_WORDS + devices * SECTION_WORDS
}

/// The section of a device.
pub(super) fn section(words: &[AtomicU64], device: usize) -> &[AtomicU64] {
    &words[HEAD_WORDS + device * SECTION_WORDS..][..SECTION_WORDS]
}

/// Writes a text, cut where it does not fit.
pub(super) fn store_text(words: &[AtomicU64], text: &str) {
    let bytes = cut(text, words.len() * 8);
    for (index, word) in words.iter().enumerate() {
        word.store(packed(bytes, index), Ordering::Relaxed);
    }
}

pub(super) fn load_text(words: &[AtomicU64]) -> String {
    unpacked(words.iter().map(|word| word.load(Ordering::Relaxed)))
}

/// The bytes of a text, at most `bytes_max`, and no part of a character.
pub(super) fn cut(text: &str, bytes_max: usize) -> &[u8] {
    let end = (0..=bytes_max.min(text.len())).rev().find(|&end| text.is_char_boundary(end));
    &text.as_bytes()[..end.unwrap_or(0)]
}

/// The bytes of a text that are in its word of that number.
pub(super) fn packed(bytes: &[u8], index: usize) -> u64 {
    let mut word = [0; 8];
    for (to, &from) in word.iter_mut().zip(bytes.iter().skip(index * 8)) {
        *to = from;
    }
    u64::from_le_bytes(word)
}

/// The text up to its first 0. Whatever the words are, it is one.
pub(super) fn unpacked(words: impl Iterator<Item = u64>) -> String {
    let bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).take_while(|&byte| byte != 0).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}
