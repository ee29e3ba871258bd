//! Recordings that no real program makes, and what-ifs that fail at their start: a result or an error, never an endless
//! replay.

use warpool::memory::report::{Action, Snapshot, TraceEntry};
use warpool_trace::replay::{Outcome, ReplayError, ReplayOptions, replay};

use crate::common::{entry, recording};

fn event(action: Action, addr: u64, size: u64, stream: u64) -> TraceEntry {
    entry(action, addr, size, stream, 0)
}

fn snapshot_of(events: Vec<TraceEntry>) -> Snapshot {
    Snapshot { traces: vec![events], ..Snapshot::default() }
}

fn expect_refused(snapshot: &Snapshot, part: &str) {
    let error = replay(snapshot, &ReplayOptions::default()).expect_err("not a real program");
    assert!(matches!(error, ReplayError::Implausible { .. }) && error.to_string().contains(part), "{error}");
}

#[test]
fn more_memory_or_streams_than_a_device_has_is_refused() {
    let base = 0x7f00_0000_0000;
    expect_refused(&snapshot_of(vec![event(Action::SegmentMap, base, 1 << 47, 0)]), "bytes were reserved at once");
    let endless = vec![event(Action::SegmentAlloc, base, u64::MAX, 0); 3];
    expect_refused(&snapshot_of(endless), "bytes were reserved at once");
    let streams = (0..70_000).map(|stream| event(Action::Alloc, base + stream * 512, 512, stream)).collect();
    expect_refused(&snapshot_of(streams), "70000 streams");
}

#[test]
fn recording_without_events_is_an_error() {
    for snapshot in [Snapshot::default(), snapshot_of(Vec::new())] {
        let error = replay(&snapshot, &ReplayOptions::default()).expect_err("nothing to replay");
        assert!(matches!(error, ReplayError::NoHistory), "{error}");
        assert!(error.to_string().contains("_record_memory_history"), "{error}");
    }
}

#[test]
fn requests_of_zero_bytes_take_no_memory() {
    let events = vec![event(Action::Alloc, 0, 0, 0), event(Action::FreeRequested, 0, 0, 0)];
    let report = replay(&snapshot_of(events), &ReplayOptions::default()).expect("a report");
    assert_eq!((report.peak_live_bytes, report.peak_reserved_bytes), (0, 0));
}

#[test]
fn initial_state_that_does_not_fit_is_out_of_memory_at_event_0() {
    let recording = recording("ring.late_native.pickle.xz");
    let options = ReplayOptions { capacity: Some(1 << 30), ..ReplayOptions::default() };
    let report = replay(&recording.snapshot, &options).expect("a report");
    let Outcome::OutOfMemory { event, .. } = report.outcome else { panic!("it does not fit") };
    assert_eq!((event, report.ooms), (0, 1));
    assert!(report.fidelity.exact, "the model is proven on a device that is large enough");
}

#[test]
fn initial_state_that_cannot_be_restored_is_a_difference() {
    let mut recording = recording("ring.late_native.pickle.xz");
    // Two segments at one address are impossible.
    let double = recording.snapshot.segments[0].clone();
    recording.snapshot.segments.insert(1, double);
    let report = replay(&recording.snapshot, &ReplayOptions::default()).expect("a report");
    assert!(!report.fidelity.exact);
    assert!(report.fidelity.first_difference.is_some());
    assert!(report.peak_reserved_bytes > 0, "there are figures, as estimates");
}
