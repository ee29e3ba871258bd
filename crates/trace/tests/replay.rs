//! Replays: what is concluded and said, what-ifs, histories that start late, and recordings that cannot be.
//! `recordings.rs` goes over whole recordings.

mod common;

use common::{entry, recording};
use warpool::memory::{Action, Settings, Snapshot};
use warpool_trace::replay::{AllocatorChoice, Outcome, ReplayError, ReplayOptions, ReplayReport, replay};

const MIB: u64 = 1 << 20;

fn snapshot(name: &str) -> Snapshot {
    recording(&format!("{name}.pickle.xz")).snapshot
}

fn replayed(snapshot: &Snapshot, options: &ReplayOptions<'_>) -> ReplayReport {
    replay(snapshot, options).unwrap_or_else(|error| panic!("{error}"))
}

fn with_settings(string: &str) -> ReplayOptions<'static> {
    let settings = Settings::parse(string).unwrap_or_else(|error| panic!("{error}"));
    ReplayOptions { settings: Some(settings), ..ReplayOptions::default() }
}

fn expect_exact(report: &ReplayReport, what: &str) {
    let fidelity = &report.fidelity;
    let first = fidelity.first_difference.as_ref().map(ToString::to_string);
    assert!(fidelity.checked && fidelity.exact, "{what}: {first:?}, {:?}", report.inferred);
    assert_eq!(fidelity.addresses_equal, fidelity.addresses_total, "{what}");
    assert_eq!(fidelity.recorded_peak_reserved_bytes, report.peak_reserved_bytes, "{what}");
    assert_eq!(fidelity.recorded_segments_allocated, report.segments_allocated, "{what}");
}

#[test]
fn what_was_concluded_about_pools_is_said() {
    let report = replayed(&snapshot("mempool.native"), &ReplayOptions::default());
    assert_eq!((report.inferred.pools_inferred, report.inferred.segments_inferred), (1, 15));
    assert!(
        report.inferred.notes.iter().any(|note| note.contains("15 segments must have been in 1 other")),
        "{:?}",
        report.inferred
    );
    let report = replayed(&snapshot("graphs.expandable"), &ReplayOptions::default());
    assert_eq!((report.inferred.pools_recorded.len(), report.inferred.pools_inferred), (2, 0));
}

#[test]
fn a_history_that_starts_late_comes_out_too() {
    for name in
        ["mempool.native", "graphs.expandable", "prefetch_streams_train.native", "prefetch_streams_train.expandable"]
    {
        let whole = snapshot(name);
        let length = whole.traces[0].len();
        for tenth in [1, 4, 7, 9] {
            let mut late = whole.clone();
            late.traces[0].drain(..length * tenth / 10 + tenth);
            let report = replayed(&late, &ReplayOptions::default());
            expect_exact(&report, &format!("{name} from {tenth} tenths on"));
            assert!(report.inferred.bytes_unknown_origin > 0 && report.inferred.bytes_reserved_at_start > 0, "{name}");
        }
    }
}

#[test]
fn a_device_that_is_too_small_runs_out() {
    let options = ReplayOptions { capacity: Some(6000 * MIB), ..ReplayOptions::default() };
    let report = replayed(&snapshot("resnet_train.native"), &options);
    assert!(report.fidelity.exact, "the model is proven on a device that is large enough");
    let Outcome::OutOfMemory { event, report: why } = &report.outcome else { panic!("6000 MiB are too few") };
    assert!(*event > 0 && why.bytes_total == 6000 * MIB);
    assert_eq!(report.ooms, 1);
}

#[test]
fn the_driver_pool_can_be_asked_too() {
    let options = ReplayOptions { allocator: AllocatorChoice::DriverPool, ..ReplayOptions::default() };
    let report = replayed(&snapshot("prefetch_streams_train.native"), &options);
    assert!(report.fidelity.exact);
    assert_eq!(report.outcome.name(), "completed");
    assert!(report.peak_reserved_bytes >= report.peak_live_bytes && report.driver_calls > report.allocations);
}

#[test]
fn a_recording_that_cannot_be_is_not_proven_and_says_where() {
    let mut snapshot = snapshot("mempool.native");
    let at = snapshot.traces[0].iter().rposition(|entry| entry.action == Action::Alloc).unwrap();
    let segment = snapshot.traces[0].iter().rposition(|entry| entry.action == Action::SegmentAlloc).unwrap();
    assert_eq!(segment + 1, at);
    snapshot.traces[0][segment].size += 2 * MIB;
    let report = replayed(&snapshot, &with_settings("expandable_segments:True"));
    assert!(report.fidelity.checked && !report.fidelity.exact);
    let first = report.fidelity.first_difference.as_ref().expect("a difference");
    assert_eq!(first.event, Some(segment as u64));
    assert!(first.to_string().contains("recorded a new segment: 33554432 bytes"), "{first}");
    assert!(report.warnings[0].contains("not proven"), "{:?}", report.warnings);
}

#[test]
fn a_log_without_segments_is_replayed_unchecked() {
    let report = replayed(&recording("rmm.csv").snapshot, &ReplayOptions::default());
    assert!(!report.fidelity.checked && !report.fidelity.exact);
    assert!(report.allocations > 0 && report.peak_reserved_bytes > 0);
}

#[test]
fn a_failure_that_was_recorded_is_no_end() {
    // Under a limit of 40 MiB: 30 MiB, then 30 MiB more, which fail, then 8 MiB.
    let base = 0x7f00_0000_0000;
    let events = [
        entry(Action::SegmentAlloc, base, 30 * MIB, 0, 1),
        entry(Action::Alloc, base, 30 * MIB, 0, 2),
        entry(Action::Oom, 100 * MIB, 30 * MIB, 0, 3),
        entry(Action::FreeRequested, base, 30 * MIB, 0, 4),
        entry(Action::FreeCompleted, base, 30 * MIB, 0, 4),
        entry(Action::Alloc, base, 28 * MIB, 0, 5),
        entry(Action::FreeRequested, base, 28 * MIB, 0, 6),
        entry(Action::FreeCompleted, base, 28 * MIB, 0, 6),
        entry(Action::SegmentFree, base, 30 * MIB, 0, 7),
    ];
    let snapshot = Snapshot { traces: vec![events.to_vec()], ..Snapshot::default() };
    let report = replayed(&snapshot, &ReplayOptions::default());
    expect_exact(&report, "a failure");
    assert!(matches!(report.outcome, Outcome::OutOfMemory { event: 2, .. }), "{:?}", report.outcome);
    assert_eq!((report.retries, report.ooms), (1, 1));
    let cap = report.inferred.cap.expect("a limit");
    assert_eq!((cap.least, cap.below), (30 * MIB, 60 * MIB));
}

#[test]
fn devices_are_replayed_one_by_one() {
    let mut snapshot = snapshot("mempool.native");
    snapshot.traces.push(snapshot.traces[0].clone());
    let of_second =
        snapshot.segments.clone().into_iter().map(|segment| warpool::memory::SegmentInfo { device: 1, ..segment });
    snapshot.segments.extend(of_second);
    let report = replayed(&snapshot, &ReplayOptions::default());
    expect_exact(&report, "two devices");
    assert_eq!((report.events, report.allocations, report.segments_allocated), (2 * 839, 2 * 356, 2 * 65));
    assert_eq!(report.peak_reserved_bytes, 2 * 1_130_364_928);
}

#[test]
fn a_what_if_can_start_late_too() {
    let mut late = snapshot("prefetch_streams_train.native");
    let length = late.traces[0].len();
    late.traces[0].drain(..length / 2);
    let report = replayed(&late, &with_settings("expandable_segments:True"));
    assert!(report.fidelity.exact && report.warnings.is_empty());
    assert_eq!(report.outcome.name(), "completed");
    // The whole of it, recorded with these settings, had 5163 MB.
    assert!((4_700_000_000..5_300_000_000).contains(&report.peak_reserved_bytes), "{}", report.peak_reserved_bytes);
}

#[test]
fn what_the_program_gave_back_itself_is_no_retry() {
    // 30 MiB, freed and given back, then 40 MiB: the 30 would not have served, but one such case proves no limit.
    let (one, two) = (0x7f00_0000_0000, 0x7f00_4000_0000);
    let events = [
        entry(Action::SegmentAlloc, one, 30 * MIB, 0, 1),
        entry(Action::Alloc, one, 30 * MIB, 0, 2),
        entry(Action::FreeRequested, one, 30 * MIB, 0, 4),
        entry(Action::FreeCompleted, one, 30 * MIB, 0, 4),
        entry(Action::SegmentFree, one, 30 * MIB, 0, 90_000),
        entry(Action::SegmentAlloc, two, 40 * MIB, 0, 90_200),
        entry(Action::Alloc, two, 40 * MIB, 0, 90_200),
        entry(Action::FreeRequested, two, 40 * MIB, 0, 90_300),
        entry(Action::FreeCompleted, two, 40 * MIB, 0, 90_300),
        entry(Action::SegmentFree, two, 40 * MIB, 0, 190_000),
    ];
    let snapshot = Snapshot { traces: vec![events.to_vec()], ..Snapshot::default() };
    let report = replayed(&snapshot, &ReplayOptions::default());
    expect_exact(&report, "a trim");
    assert_eq!((report.retries, report.inferred.cap), (0, None));
}

#[test]
fn progress_reaches_the_end() {
    let last = std::cell::Cell::new(None);
    let progress = |progress: warpool_trace::replay::ReplayProgress| last.set(Some(progress));
    let options = ReplayOptions { progress: Some(&progress), ..ReplayOptions::default() };
    let snapshot = snapshot("mempool.native");
    replayed(&snapshot, &options);
    let last = last.get().expect("some progress");
    assert_eq!((last.done, last.total), (839, 839));
}

#[test]
fn nothing_to_replay_is_said() {
    let error = replay(&Snapshot::default(), &ReplayOptions::default()).unwrap_err();
    assert!(matches!(error, ReplayError::NoHistory) && error.to_string().contains("_record_memory_history"));
}
