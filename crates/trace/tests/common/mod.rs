//! Files for the tests, and shorthands.

#![allow(dead_code, clippy::allow_attributes, reason = "each test binary uses some of them")]

use std::path::PathBuf;

use warpool::memory::report::{Action, Snapshot, TraceEntry};
use warpool_trace::{ReadError, ReadOptions, Recording, write_snapshot};

pub const MIB: u64 = 1 << 20;

/// Recordings of real programs.
pub const RECORDINGS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../recordings");

/// The factor for the length of the longest tests: `WARPOOL_TEST_SCALE`, 1 by default.
pub fn scale() -> u64 {
    match std::env::var("WARPOOL_TEST_SCALE") {
        Ok(factor) => factor.parse().expect("WARPOOL_TEST_SCALE is a whole number"),
        Err(_) => 1,
    }
}

/// The path of a file in `tests/data`, or else of a recording of a real program.
pub fn path(name: &str) -> PathBuf {
    let data = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name);
    if data.exists() { data } else { PathBuf::from(RECORDINGS).join(name) }
}

/// The bytes of such a file.
pub fn bytes(name: &str) -> Vec<u8> {
    std::fs::read(path(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// Reads bytes, with stacks.
pub fn read(bytes: &[u8]) -> Result<Recording, ReadError> {
    warpool_trace::read(bytes, &ReadOptions { stacks: true, ..ReadOptions::default() })
}

/// Reads such a file, with stacks.
pub fn recording(name: &str) -> Recording {
    read(&bytes(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// The snapshot as a file.
pub fn written(snapshot: &Snapshot) -> Vec<u8> {
    let mut file = Vec::new();
    write_snapshot(snapshot, &mut file).expect("writing to memory succeeds");
    file
}

/// An entry with nothing but numbers.
pub fn entry(action: Action, addr: u64, size: u64, stream: u64, time_us: i64) -> TraceEntry {
    TraceEntry::new(action, addr, size, stream, time_us)
}
