//! Checks of this crate on any driver, for machines where its tests cannot be built: `warpool selftest` runs them on
//! real GPUs.
//!
//! They come above the driver's own suite ([`conformance`]) and share its reports. Each check has a [`Instance`] of its own,
//! and must leave nothing of it in use.

mod allocator;
mod blas;
mod current;
mod events;
mod generator;
mod graph;
mod graph_failures;
mod graph_use;
mod handles;
mod host;
mod kit;
mod pluggable;
mod streams;

use std::sync::Arc;

use crate::driver::{self as conformance, Checked, Options, Report, Stop, Summary};
use warpool_driver::{DeviceId, DevicePtr, Driver, Pattern};

use warpool::{Device, Error, Instance, Stream};

/// The checks of one subject.
pub struct Suite {
    /// Its name.
    pub name: &'static str,
    checks: &'static [Check],
}

/// One named program and its expectations.
struct Check {
    name: &'static str,
    run: fn(&Bench) -> Checked,
}

/// All suites, in the order in which they run.
pub const SUITES: &[Suite] = &[
    Suite { name: "current", checks: current::CHECKS },
    Suite { name: "stream_pool", checks: streams::CHECKS },
    Suite { name: "event_pool", checks: events::CHECKS },
    Suite { name: "allocator", checks: allocator::CHECKS },
    Suite { name: "pluggable", checks: pluggable::CHECKS },
    Suite { name: "generator", checks: generator::CHECKS },
    Suite { name: "handles", checks: handles::CHECKS },
    Suite { name: "blas", checks: blas::CHECKS },
    Suite { name: "graph", checks: graph::CHECKS },
    Suite { name: "host", checks: host::CHECKS },
];

/// What a check works with.
struct Bench {
    instance: Instance,
    device: Device,
}

/// Runs the suites that `options` chooses on `driver`, and reports each check as it ends.
pub fn run(driver: &Arc<dyn Driver>, options: &Options, on_report: &mut dyn FnMut(&Report)) -> Summary {
    let mut summary = Summary::default();
    let chosen = |suite: &&Suite| options.suites.is_empty() || options.suites.iter().any(|name| name == suite.name);
    for suite in SUITES.iter().filter(chosen) {
        for check in suite.checks {
            let report = conformance::watch(suite.name, check.name, || run_one(driver, options.device, check));
            summary.count(&report.outcome);
            on_report(&report);
        }
    }
    summary
}

/// Runs one check with a `Instance` of its own, and closes that: so every check also shows that nothing is left in use.
fn run_one(driver: &Arc<dyn Driver>, device: DeviceId, check: &Check) -> Checked {
    let instance = Instance::new(Arc::clone(driver))?;
    let bench = Bench { device: instance.device(device.0)?, instance };
    (check.run)(&bench)?;
    let Bench { instance, device } = bench;
    device.synchronize()?;
    drop(device);
    Ok(instance.close()?)
}

impl Bench {
    /// Another device, or a skip.
    fn second_device(&self) -> Checked<Device> {
        match self.instance.devices().find(|device| *device != self.device) {
            Some(device) => Ok(device),
            None => crate::expect::skip("there is only one device"),
        }
    }

    /// Runs `body` with memory of `bytes` bytes.
    fn with_memory(&self, bytes: u64, body: impl FnOnce(DevicePtr) -> Checked) -> Checked {
        let ptr = self.instance.driver().mem_alloc(self.device.id(), bytes)?;
        let outcome = body(ptr);
        self.instance.driver().mem_free(ptr)?;
        outcome
    }

    fn fill(&self, ptr: DevicePtr, value: u8, bytes: u64, stream: &Stream) -> Checked {
        Ok(self.instance.driver().fill(ptr, Pattern::U8(value), bytes, stream.id())?)
    }

    fn bytes_at(&self, ptr: DevicePtr, n: usize) -> Checked<Vec<u8>> {
        let mut bytes = vec![0; n];
        self.instance.driver().download(self.device.id(), ptr, &mut bytes)?;
        Ok(bytes)
    }
}

impl From<Error> for Stop {
    #[track_caller]
    fn from(error: Error) -> Self {
        match error {
            Error::Driver(error) => error.into(),
            other => Self::Failed(other.to_string()),
        }
    }
}

/// Declares a suite's checks: functions of the file, whose names become the checks' names.
macro_rules! checks {
    ($($check:ident,)*) => { &[$(Check { name: stringify!($check), run: $check },)*] };
}
use checks;
