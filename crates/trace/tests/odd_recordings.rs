//! Recordings that no real program makes, and what-ifs that fail before they begin: answers or errors, never a wait
//! without end.

mod common;

use warpool::memory::{Action, Snapshot, TraceEntry};
use warpool_trace::replay::{Outcome, ReplayError, ReplayOptions, replay};

fn event(action: Action, addr: u64, size: u64, stream: u64) -> TraceEntry {
    common::entry(action, addr, size, stream, 0)
}

fn of_events(events: Vec<TraceEntry>) -> Snapshot {
    Snapshot { traces: vec![events], ..Snapshot::default() }
}

fn refused(snapshot: &Snapshot, part: &str) {
    let error = replay(snapshot, &ReplayOptions::default()).expect_err("no real program");
    assert!(matches!(error, ReplayError::Implausible { .. }) && error.to_string().contains(part), "{error}");
}

#[test]
fn what_no_device_has_is_refused() {
    let base = 0x7f00_0000_0000;
    refused(&of_events(vec![event(Action::SegmentMap, base, 1 << 47, 0)]), "bytes were held at once");
    refused(&of_events(vec![event(Action::SegmentAlloc, base, u64::MAX, 0); 3]), "bytes were held at once");
    let streams = (0..70_000).map(|stream| event(Action::Alloc, base + stream * 512, 512, stream)).collect();
    refused(&of_events(streams), "70000 streams");
}

#[test]
fn nothing_to_replay_is_an_error() {
    for snapshot in [Snapshot::default(), of_events(Vec::new())] {
        let error = replay(&snapshot, &ReplayOptions::default()).expect_err("nothing to replay");
        assert!(matches!(error, ReplayError::NoHistory), "{error}");
    }
}

#[test]
fn requests_of_nothing_are_nothing() {
    let events = vec![event(Action::Alloc, 0, 0, 0), event(Action::FreeRequested, 0, 0, 0)];
    let report = replay(&of_events(events), &ReplayOptions::default()).expect("an answer");
    assert_eq!((report.peak_live_bytes, report.peak_reserved_bytes), (0, 0));
}

#[test]
fn what_does_not_fit_at_the_beginning_is_out_of_memory_at_once() {
    let recording = common::recording("ring.late_native.pickle.xz");
    let options = ReplayOptions { capacity: Some(1 << 30), ..ReplayOptions::default() };
    let report = replay(&recording.snapshot, &options).expect("an answer");
    let Outcome::OutOfMemory { event, .. } = report.outcome else { panic!("it does not fit") };
    assert_eq!((event, report.ooms), (0, 1));
    assert!(report.fidelity.exact, "what it is an answer about is proven");
}

#[test]
fn a_beginning_that_cannot_be_rebuilt_is_said() {
    let mut recording = common::recording("ring.late_native.pickle.xz");
    // Two segments at one place cannot be.
    let double = recording.snapshot.segments[0].clone();
    recording.snapshot.segments.insert(1, double);
    let report = replay(&recording.snapshot, &ReplayOptions::default()).expect("an answer");
    assert!(!report.fidelity.exact);
    assert!(report.fidelity.first_difference.is_some());
    assert!(report.peak_reserved_bytes > 0, "there are figures, if estimates");
}
