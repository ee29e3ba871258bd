//! The memory that a recording takes: limited for hostile files, and a small multiple of the size for real ones. The
//! estimates of the budget are not exceeded. The memory is counted by the allocator of this binary.

#[path = "../common/mod.rs"]
mod common;

mod counting;
mod examples;
mod generated;
mod growth;
mod pickles;

use warpool_trace::replay::{ReplayError, ReplayOptions, ReplayReport, replay};
use warpool_trace::{ReadError, ReadOptions, default_memory_limit, read};

#[global_allocator]
static ALLOCATOR: counting::Counting = counting::Counting;

/// Memory that is not counted: buffers, errors, one more step.
const SLACK: u64 = 4 << 20;

/// How reading and replaying a file ended.
#[derive(Debug)]
enum End {
    Read(ReadError),
    Replay(ReplayError),
    Report(Box<ReplayReport>),
}

impl End {
    fn is_memory_limit(&self) -> bool {
        matches!(self, Self::Read(ReadError::MemoryLimit { .. }) | Self::Replay(ReplayError::MemoryLimit { .. }))
    }
}

/// Reads and replays a file within a limit, or the default one. Returns how that ended and the most memory it took, in
/// bytes, which is asserted to be within the limit.
fn run(file: &[u8], memory_limit: Option<u64>) -> (End, u64) {
    let mut limit = memory_limit.unwrap_or(default_memory_limit(0));
    let (peak, end) = counting::peak(|| {
        let recording = match read(file, &ReadOptions { memory_limit, ..ReadOptions::default() }) {
            Ok(recording) => recording,
            Err(error) => {
                if let ReadError::MemoryLimit { limit: allowed, .. } = error {
                    limit = limit.max(allowed);
                }
                return End::Read(error);
            }
        };
        limit = memory_limit.unwrap_or(default_memory_limit(recording.bytes_needed));
        let options = ReplayOptions { memory_limit: Some(limit), ..ReplayOptions::default() };
        match replay(&recording.snapshot, &options) {
            Ok(report) => End::Report(Box::new(report)),
            Err(error) => End::Replay(error),
        }
    });
    assert!(peak <= limit + SLACK, "{peak} bytes were allocated, with a limit of {limit}: {end:?}");
    (end, peak)
}
