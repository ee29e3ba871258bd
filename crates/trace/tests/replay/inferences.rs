//! What a replay infers and reports: pools, limits, histories that start late, what-ifs, and recordings that contradict
//! themselves. `recordings.rs` replays all recordings as they are.

use warpool::memory::Settings;
use warpool::memory::report::{Action, SegmentInfo, Snapshot};
use warpool_trace::replay::{AllocatorChoice, Outcome, ReplayOptions, ReplayProgress, ReplayReport, replay};

use crate::common::{MIB, entry, recording};

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
fn inferred_pools_are_reported() {
    let report = replayed(&snapshot("mempool.native"), &ReplayOptions::default());
    assert_eq!((report.inferred.pools_inferred, report.inferred.segments_inferred), (1, 15));
    let is_expected = |remark: &String| remark.contains("15 segments were inferred to be in 1 private pools");
    assert!(report.inferred.remarks.iter().any(is_expected), "{:?}", report.inferred);
    let report = replayed(&snapshot("graphs.expandable"), &ReplayOptions::default());
    assert_eq!((report.inferred.pools_recorded.len(), report.inferred.pools_inferred), (2, 0));
}

#[test]
fn history_that_starts_late_is_reproduced() {
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
fn device_that_is_too_small_runs_out_of_memory() {
    let options = ReplayOptions { capacity: Some(6000 * MIB), ..ReplayOptions::default() };
    let report = replayed(&snapshot("resnet_train.native"), &options);
    assert!(report.fidelity.exact, "the model is proven on a device that is large enough");
    let Outcome::OutOfMemory { event, report: why } = &report.outcome else { panic!("6000 MiB are too few") };
    assert!(*event > 0 && why.bytes_total == 6000 * MIB);
    assert_eq!(report.ooms, 1);
}

#[test]
fn driver_pool_can_be_replayed() {
    let options = ReplayOptions { allocator: AllocatorChoice::DriverPool, ..ReplayOptions::default() };
    let report = replayed(&snapshot("prefetch_streams_train.native"), &options);
    assert!(report.fidelity.exact);
    assert_eq!(report.outcome.name(), "completed");
    assert!(report.peak_reserved_bytes >= report.peak_live_bytes && report.driver_calls > report.allocations);
}

#[test]
fn recording_that_contradicts_itself_is_not_proven() {
    let mut snapshot = snapshot("mempool.native");
    let at = snapshot.traces[0].iter().rposition(|entry| entry.action == Action::Alloc).unwrap();
    let segment = snapshot.traces[0].iter().rposition(|entry| entry.action == Action::SegmentAlloc).unwrap();
    assert_eq!(segment + 1, at);
    snapshot.traces[0][segment].size += 2 * MIB;
    let report = replayed(&snapshot, &with_settings("expandable_segments:True"));
    assert!(report.fidelity.checked && !report.fidelity.exact);
    let first = report.fidelity.first_difference.as_ref().expect("a difference");
    assert_eq!(first.event, Some(segment as u64));
    assert!(first.to_string().contains("recorded segment_alloc of 33554432 bytes"), "{first}");
    assert!(report.warnings[0].contains("not proven"), "{:?}", report.warnings);
}

#[test]
fn log_without_segments_is_replayed_unchecked() {
    let report = replayed(&recording("rmm.csv").snapshot, &ReplayOptions::default());
    assert!(!report.fidelity.checked && !report.fidelity.exact);
    assert!(report.allocations > 0 && report.peak_reserved_bytes > 0);
}

#[test]
fn replay_continues_behind_a_recorded_failure() {
    // Under a limit of 40 MiB: 30 MiB, then 30 MiB more, which fail, then 28 MiB.
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
    let limit = report.inferred.memory_limit.expect("a limit");
    assert_eq!((limit.at_least, limit.below), (30 * MIB, 60 * MIB));
}

#[test]
fn devices_are_replayed_one_after_another() {
    let mut snapshot = snapshot("mempool.native");
    snapshot.traces.push(snapshot.traces[0].clone());
    let second = snapshot.segments.clone().into_iter().map(|segment| SegmentInfo { device: 1, ..segment });
    snapshot.segments.extend(second);
    let report = replayed(&snapshot, &ReplayOptions::default());
    expect_exact(&report, "two devices");
    assert_eq!((report.events, report.allocations, report.segments_allocated), (2 * 839, 2 * 356, 2 * 65));
    assert_eq!(report.peak_reserved_bytes, 2 * 1_130_364_928);
}

#[test]
fn what_if_of_a_history_that_starts_late() {
    let mut late = snapshot("prefetch_streams_train.native");
    let length = late.traces[0].len();
    late.traces[0].drain(..length / 2);
    let report = replayed(&late, &with_settings("expandable_segments:True"));
    assert!(report.fidelity.exact && report.warnings.is_empty());
    assert_eq!(report.outcome.name(), "completed");
    // The whole program, recorded with these settings, reserved 5163 MB.
    assert!((4_700_000_000..5_300_000_000).contains(&report.peak_reserved_bytes), "{}", report.peak_reserved_bytes);
}

#[test]
fn trim_by_the_program_is_not_a_retry() {
    // 30 MiB, freed and released, then 40 MiB: the 30 MiB would not have served it, but one such case proves no limit.
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
    assert_eq!((report.retries, report.inferred.memory_limit), (0, None));
}

#[test]
fn progress_reaches_the_end() {
    let last = std::cell::Cell::new(None);
    let progress = |progress: ReplayProgress| last.set(Some(progress));
    let options = ReplayOptions { progress: Some(&progress), ..ReplayOptions::default() };
    let snapshot = snapshot("mempool.native");
    replayed(&snapshot, &options);
    let last = last.get().expect("some progress");
    assert_eq!((last.done, last.total), (839, 839));
}
