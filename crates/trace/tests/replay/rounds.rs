//! Several runs of a recorded program, one after another on the same device.

use std::cell::Cell;

use warpool_trace::replay::{AllocatorChoice, ReplayOptions, ReplayProgress, ReplayReport, replay};

use crate::common::recording;

fn rounds(name: &str, options: &ReplayOptions<'_>) -> ReplayReport {
    replay(&recording(&format!("{name}.pickle.xz")).snapshot, options).expect("a good recording")
}

/// Every round needs the same memory, and the first one is the reported run: for programs whose streams use each
/// other's blocks, that release pools, that have blocks from before the first event, and that change settings.
#[test]
fn every_round_is_the_whole_program() {
    let names = [
        "prefetch_streams_train.native",
        "mempool.native",
        "graphs.expandable",
        "pools.native",
        "ring.late_streams",
        "churn.switched_expandable",
    ];
    for name in names {
        for allocator in AllocatorChoice::ALL {
            let options = ReplayOptions { allocator, address_orders: Some(1), rounds: 3, ..ReplayOptions::default() };
            let report = rounds(name, &options);
            assert_eq!(report.rounds.len(), 3, "{name}, {allocator:?}");
            let first = report.rounds[0].peak_reserved_bytes;
            assert_eq!(first, report.peak_reserved_bytes, "{name}, {allocator:?}");
            for round in &report.rounds {
                assert_eq!(round.peak_live_bytes, report.peak_live_bytes, "{name}, {allocator:?}");
                assert_eq!(round.ooms, 0, "{name}, {allocator:?}");
            }
        }
    }
}

#[test]
fn progress_goes_over_all_rounds() {
    let last = Cell::new(None);
    let progress = |progress: ReplayProgress| last.set(Some(progress));
    let report = rounds("pools.native", &ReplayOptions { rounds: 3, progress: Some(&progress), ..Default::default() });
    let total = 3 * report.events;
    assert_eq!(last.get(), Some(ReplayProgress { done: total, total }));
}

#[test]
fn without_being_asked_for_there_are_none() {
    assert!(rounds("pools.native", &ReplayOptions::default()).rounds.is_empty());
}

/// Fragmentation of pages grows by at most a percent or two, however often the program begins again.
#[test]
fn pages_do_not_grow_from_round_to_round() {
    for name in ["prefetch_streams_train.native", "resnet_train.native"] {
        let allocator = AllocatorChoice::Paged;
        let report = rounds(name, &ReplayOptions { allocator, rounds: 30, ..ReplayOptions::default() });
        for (number, round) in (1..).zip(&report.rounds) {
            let (live, reserved) = (round.peak_live_bytes, round.peak_reserved_bytes);
            assert!(reserved * 1000 <= live * 1015, "{name}, round {number}: {reserved} reserved, {live} live");
        }
    }
}

/// The rounds end at a request that runs out of memory and did not in the recording.
#[test]
fn rounds_end_where_memory_does() {
    let capacity = Some(6 << 30);
    let report = rounds("resnet_train.native", &ReplayOptions { capacity, rounds: 3, ..ReplayOptions::default() });
    let [round] = report.rounds.as_slice() else { panic!("one round, not {:?}", report.rounds) };
    assert_eq!(round.ooms, 1);
    // A request that failed in the recording too fails in every round, and the program goes on.
    let report = rounds("verdict.limit", &ReplayOptions { rounds: 3, ..ReplayOptions::default() });
    assert_eq!(report.rounds.iter().map(|round| round.ooms).collect::<Vec<_>>(), [1, 1, 1]);
}
