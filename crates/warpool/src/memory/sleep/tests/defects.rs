//! Deliberate defects are found by the random programs within few seeds.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::program::{Tally, defect_of};
use crate::defect::Defect;

/// The first seed whose program shows the defect: as a lost value or a hazard, or by a check of the program.
fn first_seed(defect: Defect) -> Option<(u64, String)> {
    (0..60).find_map(|seed| {
        let run = || defect.with(|| defect_of(seed, &mut Tally::default()));
        let seen = catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
            let text = panic.downcast_ref::<String>().cloned();
            Some(text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned())).unwrap_or_default())
        });
        Some((seed, seen?))
    })
}

#[test]
fn deliberate_defects_are_found() {
    let defects =
        [Defect::SleepDoesNotWait, Defect::SleepForgetsBlocks, Defect::WakeDoesNotZero, Defect::FailedWakeKeepsMemory];
    for defect in defects {
        let found = first_seed(defect);
        println!("{defect:?}: {found:?}");
        assert!(found.is_some(), "{defect:?}");
    }
}
