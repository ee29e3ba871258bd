//! Runs suites: selects checks, runs each with its own [`TestContext`], catches panics, cleans up and reports.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use warpool_driver::{DeviceId, Driver};

use crate::check::{Check, Level, Suite};
use crate::context::{KernelCache, TestContext};
use crate::expect::{CheckError, CheckResult};
use crate::suites::suites;

/// The options of a run.
#[derive(Clone, Debug)]
pub struct Options {
    /// The device that the checks work on. Checks that need two devices use another one as well.
    pub device: DeviceId,
    /// Seed of the checks' random sizes, contents and programs.
    pub seed: u64,
    /// Run only the suites of this level.
    pub level: Option<Level>,
    /// Run only the suites of these names. Empty: all.
    pub suites: Vec<String>,
    /// Suites of the caller, run after those of this crate that leave the device usable.
    pub extra: &'static [Suite],
    /// Also run suites that leave the device unusable for this process. They run last.
    pub destructive: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self { device: DeviceId(0), seed: 0, level: None, suites: Vec::new(), extra: &[], destructive: false }
    }
}

impl Options {
    fn selects(&self, suite: &Suite) -> bool {
        self.level.is_none_or(|level| level == suite.level)
            && (self.suites.is_empty() || self.suites.iter().any(|name| name == suite.name))
            && (self.destructive || !suite.destructive)
    }
}

/// How a check ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Everything was as expected.
    Passed,
    /// What was expected, what happened instead, the source line and the seed.
    Failed(String),
    /// What the device lacks.
    Skipped(String),
}

/// The result of one check.
#[derive(Clone, Debug)]
pub struct Report {
    /// The name of its suite.
    pub suite: &'static str,
    /// Its name.
    pub check: &'static str,
    /// How it ended.
    pub outcome: Outcome,
    /// How long it took, in real time.
    pub elapsed: Duration,
}

/// Counts of checks by outcome.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Checks that passed.
    pub passed: usize,
    /// Checks that failed.
    pub failed: usize,
    /// Checks that were skipped because the device lacks something.
    pub skipped: usize,
}

impl Summary {
    const fn count(&mut self, outcome: &Outcome) {
        match outcome {
            Outcome::Passed => self.passed += 1,
            Outcome::Failed(_) => self.failed += 1,
            Outcome::Skipped(_) => self.skipped += 1,
        }
    }
}

/// Runs the selected suites on `driver` and reports each check when it ends.
///
/// Checks run one after another on the calling thread; afterwards that thread has its previous current device and
/// capture mode. Nothing else should use the device meanwhile.
pub fn run(driver: &Arc<dyn Driver>, options: &Options, on_report: &mut dyn FnMut(&Report)) -> Summary {
    let mut summary = Summary::default();
    let kernels = Arc::new(KernelCache::new(Arc::clone(driver), options.device));
    for suite in suites(options.extra).filter(|suite| options.selects(suite)) {
        for check in suite.checks {
            let start = Instant::now();
            let outcome = run_check(driver, options, &kernels, suite, check);
            summary.count(&outcome);
            on_report(&Report { suite: suite.name, check: check.name, outcome, elapsed: start.elapsed() });
        }
    }
    summary
}

/// Runs one check in a context of its own and cleans up, however the check ended.
fn run_check(
    driver: &Arc<dyn Driver>,
    options: &Options,
    kernels: &Arc<KernelCache>,
    suite: &Suite,
    check: &Check,
) -> Outcome {
    let rng = check_rng(options.seed, suite.name, check.name);
    let mut context = TestContext::new(Arc::clone(driver), options.device, Arc::clone(kernels), rng);
    let result = catch_unwind(AssertUnwindSafe(|| {
        if suite.level == Level::Resources {
            context.open_instance()?;
        }
        (check.run)(&context)
    }));
    let passed = matches!(result, Ok(Ok(())));
    let cleaned = catch_unwind(AssertUnwindSafe(|| context.cleanup(passed)));
    match (outcome_of(result, options.seed), outcome_of(cleaned, options.seed)) {
        // On an unusable device nothing can be destroyed.
        (Outcome::Passed, _) if suite.destructive => Outcome::Passed,
        (Outcome::Passed, Outcome::Failed(text)) => Outcome::Failed(format!("cleanup: {text}")),
        (outcome, _) => outcome,
    }
}

/// Every check has a generator of its own, so that a suite run alone behaves as it does among others.
fn check_rng(seed: u64, suite: &str, check: &str) -> fastrand::Rng {
    let mix = |seed, byte| fastrand::Rng::with_seed(seed).u64(..) ^ u64::from(byte);
    fastrand::Rng::with_seed(suite.bytes().chain(check.bytes()).fold(seed, mix))
}

fn outcome_of(result: std::thread::Result<CheckResult>, seed: u64) -> Outcome {
    match result {
        Ok(Ok(())) => Outcome::Passed,
        Ok(Err(CheckError::Skipped(reason))) => Outcome::Skipped(reason),
        Ok(Err(error)) => Outcome::Failed(format!("{error}, seed {seed}")),
        Err(panic) => Outcome::Failed(format!("panicked: {}, seed {seed}", panic_text(panic.as_ref()))),
    }
}

fn panic_text(panic: &(dyn Any + Send)) -> &str {
    panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("(no text)")
}
