//! The estimates of the budget against what is really allocated, with recordings of many objects of one kind.

use warpool_trace::growth::GrowthCase;
use warpool_trace::replay::{ReplayOptions, replay};

use crate::counting;

#[test]
fn recordings_of_growing_size_stay_within_the_least_limit_that_allows_them() {
    for case in GrowthCase::ALL {
        let snapshot = case.recording(2_000);
        let least = (1..).map(|mib| mib << 20).find(|&limit| {
            let options = ReplayOptions { memory_limit: Some(limit), ..ReplayOptions::default() };
            let (peak, result) = counting::peak(|| replay(&snapshot, &options));
            assert!(peak < limit + crate::SLACK, "{}: {peak} bytes with a limit of {limit}", case.name());
            result.is_ok()
        });
        println!("{}: {least:?}", case.name());
    }
}

/// The steps of a replay, in this crate, in the allocator and in the simulated device, and the most memory it took.
fn cost(case: GrowthCase, n: u64) -> (u64, u64) {
    let snapshot = case.recording(n);
    let steps = || warpool_trace::steps_taken() + warpool::steps_taken() + warpool::driver::sim::steps_taken();
    let before = steps();
    let (peak, report) = counting::peak(|| replay(&snapshot, &ReplayOptions::default()));
    assert!(report.expect("a report").fidelity.exact, "{} {n}", case.name());
    (steps() - before, peak)
}

#[test]
fn replay_takes_steps_and_memory_in_proportion_to_the_recording() {
    // Before: 64 times the steps or the memory for 8 times the size.
    for case in GrowthCase::ALL {
        let ((steps, bytes), (steps_8, bytes_8)) = (cost(case, 500), cost(case, 4_000));
        println!("{}: {steps} to {steps_8} steps, {bytes} to {bytes_8} bytes", case.name());
        assert!(steps_8 <= 12 * steps + 1_000, "{}: {steps} to {steps_8} steps", case.name());
        assert!(bytes_8 <= 12 * bytes, "{}: {bytes} to {bytes_8} bytes", case.name());
    }
}

#[test]
fn recordings_of_growing_size_are_reproduced() {
    for case in GrowthCase::ALL {
        for n in [1, 7, 100] {
            let report = replay(&case.recording(n), &ReplayOptions::default()).expect("a report");
            assert!(report.fidelity.exact, "{} {n}: {:?}", case.name(), report.fidelity.first_difference);
        }
    }
}
