//! The second half of the recorded time.

use warpool::memory::Settings;
use warpool::memory::report::{Action, Snapshot, TraceEntry};
use warpool_trace::replay::{AllocatorChoice, ReplayOptions, ReplayReport, Steady, replay};

use crate::common::{MIB, entry, recording};

const BASE: u64 = 0x7f00_0000_0000;
/// The time of `cuMemAlloc` for 30 MiB by the cost model, in seconds.
const ALLOC_SECONDS: f64 = 50_436e-9;
/// The time of the query that an allocator makes once for each device.
const QUERY_SECONDS: f64 = 100e-9;

fn replayed(snapshot: &Snapshot) -> ReplayReport {
    replay(snapshot, &ReplayOptions::default()).unwrap_or_else(|error| panic!("{error}"))
}

/// A program that allocates a segment of 30 MiB at each of these times, on one device.
fn allocating_at(times_us: &[i64]) -> Vec<TraceEntry> {
    let at = |(number, &time_us): (u64, &i64)| {
        let addr = BASE + number * 64 * MIB;
        [Action::SegmentAlloc, Action::Alloc].map(|action| entry(action, addr, 30 * MIB, 0, time_us))
    };
    (0..).zip(times_us).flat_map(at).collect()
}

#[test]
fn calls_count_by_the_time_of_their_events() {
    let traces = vec![allocating_at(&[1_000_000, 1_200_000, 1_999_999, 2_000_000, 3_000_000])];
    let report = replayed(&Snapshot { traces, ..Snapshot::default() });
    assert_eq!((report.recorded_seconds, report.driver_calls), (Some(2.0), 6));
    let steady = report.steady.expect("it has time stamps");
    assert_eq!((steady.recorded_seconds, steady.driver_calls), (1.0, 2));
    let times = [steady.driver_seconds_modelled, report.driver_seconds_modelled];
    let expected = [2.0 * ALLOC_SECONDS, 5.0 * ALLOC_SECONDS + QUERY_SECONDS];
    assert!(times.iter().zip(expected).all(|(time, expected)| (time - expected).abs() < 1e-8), "{times:?}");
    assert_eq!((steady.remap_seconds_modelled, steady.bytes_remapped), (0.0, 0));
}

#[test]
fn devices_share_one_time() {
    let traces = vec![allocating_at(&[0, 1_000_000]), allocating_at(&[2_000_000, 2_500_000, 4_000_000])];
    let report = replayed(&Snapshot { traces, ..Snapshot::default() });
    assert_eq!((report.recorded_seconds, report.driver_calls), (Some(4.0), 7));
    assert_eq!(report.steady.map(|steady| (steady.recorded_seconds, steady.driver_calls)), Some((2.0, 4)));
}

#[test]
fn without_time_stamps_there_is_none() {
    let traces = vec![allocating_at(&[0, 0, 0])];
    let report = replayed(&Snapshot { traces, ..Snapshot::default() });
    assert_eq!((report.recorded_seconds, report.steady), (None, None));
    assert_eq!(report.driver_calls, 4);
}

/// Also with time stamps as a damaged file may have them.
#[test]
fn extreme_times_are_no_problem() {
    let traces = vec![allocating_at(&[i64::MIN, 5, i64::MAX])];
    let report = replayed(&Snapshot { traces, ..Snapshot::default() });
    assert!(report.recorded_seconds.is_some_and(|seconds| seconds > 1e12), "{report:?}");
    let traces = vec![allocating_at(&[3_000_000, 2_000_000])];
    assert_eq!(replayed(&Snapshot { traces, ..Snapshot::default() }).steady, None);
}

#[test]
fn every_allocator_reports_it() {
    let snapshot = recording("prefetch_streams_train.native.pickle.xz").snapshot;
    let events = &snapshot.traces[0];
    let micros = events[events.len() - 1].time_us - events[0].time_us;
    let expandable = Settings::parse("expandable_segments:True").expect("good settings");
    let all = AllocatorChoice::ALL.map(|allocator| ReplayOptions { allocator, ..ReplayOptions::default() });
    for options in all.into_iter().chain([ReplayOptions { settings: Some(expandable), ..ReplayOptions::default() }]) {
        let name = options.allocator.name();
        let report = replay(&snapshot, &options).unwrap_or_else(|error| panic!("{error}"));
        let recorded_seconds = report.recorded_seconds.expect("it has time stamps");
        assert_eq!((recorded_seconds * 1e6).round(), micros as f64, "{name}");
        let steady @ Steady { driver_calls, .. } = report.steady.expect("it has time stamps");
        assert_eq!(steady.recorded_seconds, recorded_seconds / 2.0, "{name}");
        assert!(driver_calls <= report.driver_calls, "{name}: {steady:?}");
        assert!(steady.driver_seconds_modelled <= report.driver_seconds_modelled, "{name}: {steady:?}");
        assert!(steady.remap_seconds_modelled <= steady.driver_seconds_modelled, "{name}: {steady:?}");
        if options.allocator == AllocatorChoice::Paged {
            assert!(steady.bytes_remapped > 0 && steady.remap_seconds_modelled > 0.0, "{steady:?}");
        } else {
            // None of the others maps memory twice: expandable segments release what they unmap.
            assert_eq!((steady.bytes_remapped, steady.remap_seconds_modelled), (0, 0.0), "{name}");
        }
    }
}

/// Recordings of whole programs, and how much the paged allocator may reserve beyond the live bytes, in per mille of
/// these. It is more in a small program, where a page is a larger share.
const PROGRAMS: [(&str, u64); 6] = [
    ("gnn_train.expandable.pickle.xz", 30),
    ("prefetch_streams_train.expandable.pickle.xz", 20),
    ("prefetch_streams_train.native.pickle.xz", 20),
    ("resnet_train.expandable.pickle.xz", 20),
    ("resnet_train.native.pickle.xz", 20),
    ("serve.native.pickle.xz", 20),
];

#[test]
fn the_paged_allocator_reserves_little_more_than_is_live() {
    for (file, per_mille) in PROGRAMS {
        let options = ReplayOptions { allocator: AllocatorChoice::Paged, ..ReplayOptions::default() };
        let report = replay(&recording(file).snapshot, &options).unwrap_or_else(|error| panic!("{file}: {error}"));
        let (live, reserved) = (report.peak_live_bytes, report.peak_reserved_bytes);
        assert!(
            reserved >= live && reserved - live < live / 1000 * per_mille,
            "{file}: {live} live, {reserved} reserved"
        );
    }
}
