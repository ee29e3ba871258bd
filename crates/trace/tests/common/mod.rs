//! Files for the tests, and shorthands.

#![allow(dead_code, clippy::allow_attributes, reason = "each test uses some of them")]

use std::path::PathBuf;

use warpool::memory::{Action, TraceEntry};
use warpool_trace::{ReadError, ReadOptions, Recording};

/// Recordings of real programs.
pub const RECORDINGS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../recordings");

/// Where a file is: one of `tests/data`, or else a recording of a real program.
pub fn path(name: &str) -> PathBuf {
    let beside = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name);
    if beside.exists() { beside } else { PathBuf::from(RECORDINGS).join(name) }
}

/// The bytes of such a file.
pub fn bytes(name: &str) -> Vec<u8> {
    std::fs::read(path(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// Reads bytes, with stacks.
pub fn read(bytes: &[u8]) -> Result<Recording, ReadError> {
    warpool_trace::read(bytes, &ReadOptions { stacks: true, progress: None })
}

/// Reads such a file, with stacks.
pub fn recording(name: &str) -> Recording {
    read(&bytes(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// An entry with nothing but numbers.
pub fn entry(action: Action, addr: u64, size: u64, stream: u64, time_us: i64) -> TraceEntry {
    TraceEntry::new(action, addr, size, stream, time_us)
}
