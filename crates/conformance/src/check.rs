//! Checks and suites: named functions over a [`TestContext`].

use crate::context::TestContext;
use crate::expect::CheckResult;

/// A named function that tests one statement.
#[derive(Clone, Copy, Debug)]
pub struct Check {
    /// Its name, unique in its suite.
    pub name: &'static str,
    /// Whether it does on purpose what the simulated GPU reports as a hazard, such as using a destroyed stream.
    pub provokes_hazards: bool,
    pub(crate) run: fn(&TestContext) -> CheckResult,
}

impl Check {
    /// A check that provokes no hazards.
    #[must_use]
    pub const fn new(name: &'static str, run: fn(&TestContext) -> CheckResult) -> Self {
        Self { name, provokes_hazards: false, run }
    }

    /// A check that provokes hazards on purpose.
    #[must_use]
    pub const fn provoking_hazards(name: &'static str, run: fn(&TestContext) -> CheckResult) -> Self {
        Self { name, provokes_hazards: true, run }
    }
}

/// What the checks of a suite use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// The driver contract only.
    Driver,
    /// The crate `warpool` over the driver: [`TestContext::instance`] and [`TestContext::device`] are there.
    Resources,
}

/// The checks of one subject.
#[derive(Clone, Copy, Debug)]
pub struct Suite {
    /// Its name.
    pub name: &'static str,
    /// What its checks use.
    pub level: Level,
    /// Its checks, in the order in which they run.
    pub checks: &'static [Check],
    /// Whether it leaves the device unusable for this process.
    pub destructive: bool,
}

impl Suite {
    /// A suite that leaves the device usable.
    #[must_use]
    pub const fn new(name: &'static str, level: Level, checks: &'static [Check]) -> Self {
        Self { name, level, checks, destructive: false }
    }

    /// A suite that leaves the device unusable.
    #[must_use]
    pub const fn destructive(name: &'static str, level: Level, checks: &'static [Check]) -> Self {
        Self { name, level, checks, destructive: true }
    }
}

/// Lists a suite's checks: functions in scope, each named as its function. Those after `; provoking hazards:` do on
/// purpose what the simulated GPU reports as a hazard.
#[macro_export]
macro_rules! checks {
    ($($check:ident,)* $(; provoking hazards: $($hazardous:ident,)*)?) => {
        &[
            $($crate::Check::new(stringify!($check), $check),)*
            $($($crate::Check::provoking_hazards(stringify!($hazardous), $hazardous),)*)?
        ]
    };
}
