//! Reads any bytes as a recording and replays it: no panic, no abort, and no more memory than allowed. What is read is
//! written and read again, and must be the same.

#![no_main]

use libfuzzer_sys::fuzz_target;
use warpool_trace::replay::{ReplayOptions, replay};
use warpool_trace::{ReadOptions, read, write_snapshot};

/// `scripts/fuzz` lets the process have more than this, but not much more.
const MEMORY_LIMIT: u64 = 64 << 20;

fuzz_target!(|data: &[u8]| {
    let options = ReadOptions { stacks: true, memory_limit: Some(MEMORY_LIMIT), ..ReadOptions::default() };
    let Ok(recording) = read(data, &options) else { return };
    let mut written = Vec::new();
    write_snapshot(&recording.snapshot, &mut written).expect("writing to memory succeeds");
    if let Ok(again) = read(written.as_slice(), &options) {
        // A number that is not a number differs from itself.
        let threshold = recording.snapshot.settings.garbage_collection_threshold;
        if threshold.is_none_or(|threshold| !threshold.is_nan()) {
            assert!(again.snapshot == recording.snapshot, "written and read again, it differs");
        }
    }
    // Replaying takes time for each event, and a few events are enough.
    if recording.snapshot.traces.iter().map(Vec::len).sum::<usize>() <= 2_000 {
        let options = ReplayOptions { memory_limit: Some(MEMORY_LIMIT), ..ReplayOptions::default() };
        let _ = replay(&recording.snapshot, &options);
    }
});
