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

#[test]
fn recordings_of_growing_size_are_reproduced() {
    for case in GrowthCase::ALL {
        for n in [1, 7, 100] {
            let report = replay(&case.recording(n), &ReplayOptions::default()).expect("a report");
            assert!(report.fidelity.exact, "{} {n}: {:?}", case.name(), report.fidelity.first_difference);
        }
    }
}
