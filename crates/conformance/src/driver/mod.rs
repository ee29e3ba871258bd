//! One suite of checks for every driver.
//!
//! A check is a small program that uses nothing but the contract, does real work on real streams, and compares exactly
//! what came out. The same checks run on CUDA and on the simulated device; that both pass is what makes the simulated
//! one worth trusting.
//!
//! - A check says what it expected, what came and where ([`Stop`]); it skips only where the device lacks something, and
//!   names that.
//! - Whatever a check makes through its [`Bench`] is taken away behind it, also after a failure, and no stream is left
//!   capturing.
//! - No check depends on real time: where one thing must still be running while another is done, it waits for the other
//!   and then looks.
//!
//! Not here: how results are printed. [`run`] reports each check to a closure.

mod bench;
mod capture;
mod capture_rules;
mod conditionals;
mod copies;
mod devices;
mod errors;
mod events;
mod granules;
mod graphs;
mod host;
mod kernels;
mod launches;
mod lent;
mod libraries;
mod luck;
mod memory;
mod new_arguments;
mod owned;
mod pools;
mod streams;
mod virtual_memory;

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

pub use crate::expect::{Checked, Stop};
pub use bench::Bench;
pub use granules::Granules;

use warpool_driver::{DeviceId, Driver};

/// What to run.
#[derive(Clone, Debug)]
pub struct Options {
    /// The device that the checks work on. Checks that need two take another beside it.
    pub device: DeviceId,
    /// Where the checks' random sizes, contents and programs come from.
    pub seed: u64,
    /// The suites to run, by name. Empty means all.
    pub suites: Vec<String>,
    /// Also the suite that breaks the device on purpose. It runs last, and the device is of no use to this process
    /// afterwards.
    pub destructive: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self { device: DeviceId(0), seed: 0, suites: Vec::new(), destructive: false }
    }
}

/// One named program and its expectations.
#[derive(Clone, Copy, Debug)]
pub struct Check {
    /// Its name, unique in its suite.
    pub name: &'static str,
    /// Whether it does on purpose what a careful driver logs as a hazard, such as using what it destroyed.
    pub provokes_hazard: bool,
    run: fn(&Bench<'_>) -> Checked,
}

impl Check {
    /// A check of a suite that stands elsewhere, for [`run_with`]. It provokes no hazard.
    #[must_use]
    pub const fn new(name: &'static str, run: fn(&Bench<'_>) -> Checked) -> Self {
        Self { name, provokes_hazard: false, run }
    }
}

/// The checks of one subject.
#[derive(Clone, Copy, Debug)]
pub struct Suite {
    /// Its name.
    pub name: &'static str,
    /// Its checks, in the order in which they run.
    pub checks: &'static [Check],
    /// Whether it leaves the device broken.
    pub destructive: bool,
}

/// How a check ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Everything was as expected.
    Passed,
    /// What was expected, what came, and where.
    Failed(String),
    /// What the device lacks.
    Skipped(String),
}

/// One check's result.
#[derive(Clone, Debug)]
pub struct Report {
    /// The suite it belongs to.
    pub suite: &'static str,
    /// Its name.
    pub check: &'static str,
    /// How it ended.
    pub outcome: Outcome,
    /// How long it took, in real time.
    pub elapsed: Duration,
}

/// How many checks ended how.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// As expected.
    pub passed: usize,
    /// Otherwise.
    pub failed: usize,
    /// Not run, since the device lacks something.
    pub skipped: usize,
}

impl Summary {
    /// Counts one more check.
    pub const fn count(&mut self, outcome: &Outcome) {
        match outcome {
            Outcome::Passed => self.passed += 1,
            Outcome::Failed(_) => self.failed += 1,
            Outcome::Skipped(_) => self.skipped += 1,
        }
    }
}

impl std::ops::AddAssign for Summary {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

/// Declares a suite's checks: functions of the file, whose names become the checks' names.
macro_rules! checks {
    ($($check:ident,)* $(; provoking: $($wrong:ident,)*)?) => {
        &[
            $($crate::driver::Check { name: stringify!($check), provokes_hazard: false, run: $check },)*
            $($($crate::driver::Check { name: stringify!($wrong), provokes_hazard: true, run: $wrong },)*)?
        ]
    };
}
use checks;

const SUITES: &[Suite] = &[
    suite("devices", devices::CHECKS),
    suite("streams", streams::CHECKS),
    suite("events", events::CHECKS),
    suite("memory", memory::CHECKS),
    suite("virtual_memory", virtual_memory::CHECKS),
    suite("pools", pools::CHECKS),
    suite("host_memory", host::CHECKS),
    suite("copies", copies::CHECKS),
    suite("capture", capture::CHECKS),
    suite("capture_rules", capture_rules::CHECKS),
    suite("graphs", graphs::CHECKS),
    suite("conditionals", conditionals::CHECKS),
    suite("kernels", launches::CHECKS),
    suite("libraries", libraries::CHECKS),
    Suite { name: "errors", checks: errors::CHECKS, destructive: true },
];

const fn suite(name: &'static str, checks: &'static [Check]) -> Suite {
    Suite { name, checks, destructive: false }
}

/// Every suite that stands here, in the order in which they run; the destructive one is the last.
#[must_use]
pub const fn suites() -> &'static [Suite] {
    SUITES
}

/// Runs the chosen suites on `driver` and reports each check as it ends.
///
/// Checks run one after another on the calling thread, which ends with the current device and capture mode that it came
/// with. Nothing else should use the device meanwhile.
pub fn run(driver: &dyn Driver, options: &Options, on_report: &mut dyn FnMut(&Report)) -> Summary {
    run_with(driver, &[], options, on_report)
}

/// The same with suites that cannot stand here, such as those that start a second process. They come after the harmless
/// ones and before the destructive one, and are chosen by name like all others.
pub fn run_with(driver: &dyn Driver, more: &[Suite], options: &Options, on_report: &mut dyn FnMut(&Report)) -> Summary {
    let mut summary = Summary::default();
    let kit = kernels::Kit::new(driver, options.device);
    for suite in in_order(more) {
        let asked_for = options.suites.is_empty() || options.suites.iter().any(|name| name == suite.name);
        if !asked_for || (suite.destructive && !options.destructive) {
            continue;
        }
        for check in suite.checks {
            let begun = Instant::now();
            let outcome = run_one(driver, options, &kit, suite, check);
            summary.count(&outcome);
            on_report(&Report { suite: suite.name, check: check.name, outcome, elapsed: begun.elapsed() });
        }
    }
    summary
}

/// The suites of a run: those that stand here and `more`, in the order in which they run.
pub fn in_order(more: &[Suite]) -> impl Iterator<Item = &Suite> {
    let (harmless, destructive) = SUITES.split_at(SUITES.partition_point(|suite| !suite.destructive));
    harmless.iter().chain(more).chain(destructive)
}

/// Runs one check on a bench of its own and clears the bench, whatever happened.
fn run_one(driver: &dyn Driver, options: &Options, kit: &kernels::Kit<'_>, suite: &Suite, check: &Check) -> Outcome {
    let bench = Bench::new(driver, options, kit, &[suite.name, check.name]);
    let ended = catch_unwind(AssertUnwindSafe(|| (check.run)(&bench)));
    let cleared = catch_unwind(AssertUnwindSafe(|| bench.clear()));
    match (outcome_of(ended), outcome_of(cleared)) {
        // What broke the device cannot be taken away any more.
        (Outcome::Passed, _) if suite.destructive => Outcome::Passed,
        (Outcome::Passed, Outcome::Failed(text)) => Outcome::Failed(format!("clearing up: {text}")),
        (outcome, _) => outcome,
    }
}

/// Runs a check that is not one of this module's own, such as those of the layers above, and says how it ended.
pub fn watch(suite: &'static str, check: &'static str, body: impl FnOnce() -> Checked) -> Report {
    let begun = Instant::now();
    let outcome = outcome_of(catch_unwind(AssertUnwindSafe(body)));
    Report { suite, check, outcome, elapsed: begun.elapsed() }
}

fn outcome_of(ended: std::thread::Result<Checked>) -> Outcome {
    match ended {
        Ok(Ok(())) => Outcome::Passed,
        Ok(Err(Stop::Skipped(reason))) => Outcome::Skipped(reason),
        Ok(Err(stop)) => Outcome::Failed(stop.to_string()),
        Err(panic) => Outcome::Failed(format!("panicked: {}", panic_text(panic.as_ref()))),
    }
}

fn panic_text(panic: &(dyn Any + Send)) -> &str {
    panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("(no text)")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_there_are_enough() {
        let mut seen = std::collections::BTreeSet::new();
        for suite in suites() {
            for check in suite.checks {
                assert!(seen.insert((suite.name, check.name)), "{}.{} twice", suite.name, check.name);
            }
        }
        assert!(seen.len() >= 110, "{} checks", seen.len());
    }

    #[test]
    fn what_breaks_the_device_comes_last() {
        assert!(suites().is_sorted_by_key(|suite| suite.destructive));
        let more = [suite("more", &[])];
        let names: Vec<&str> = in_order(&more).map(|suite| suite.name).collect();
        assert_eq!(names[names.len() - 3..], ["libraries", "more", "errors"]);
    }
}
