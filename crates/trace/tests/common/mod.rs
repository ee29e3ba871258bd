//! Files beside the tests, and shorthands.

#![allow(dead_code, clippy::allow_attributes, reason = "each test uses some of them")]

use std::path::PathBuf;

use warpool::memory::{Action, TraceEntry};
use warpool_trace::{ReadError, ReadOptions, Recording};

/// Where a file of `tests/data` is.
pub fn path(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

/// The bytes of a file of `tests/data`.
pub fn bytes(name: &str) -> Vec<u8> {
    std::fs::read(path(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// Reads bytes, with stacks.
pub fn read(bytes: &[u8]) -> Result<Recording, ReadError> {
    warpool_trace::read(bytes, &ReadOptions { stacks: true, progress: None })
}

/// Reads a file of `tests/data`, with stacks.
pub fn recording(name: &str) -> Recording {
    read(&bytes(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// An entry with nothing but numbers.
pub fn entry(action: Action, addr: u64, size: u64, stream: u64, time_us: i64) -> TraceEntry {
    TraceEntry {
        action,
        addr,
        size,
        stream,
        time_us,
        pool: None,
        compile_context: None,
        user_metadata: None,
        stack: None,
        forward_stack: None,
    }
}
