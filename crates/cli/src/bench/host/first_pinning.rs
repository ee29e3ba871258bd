//! First pinning: allocating pages and registering them with the driver, with a new allocator each time, compared with
//! the driver's own pinned allocation.
//!
//! On the simulated GPU the driver's part is the time of its cost model, and the host's part (mapping and touching
//! pages) is measured; the sum is reported. Sizes are smaller there, since pages are really touched.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::json;
use warpool::memory::{HostAllocator, PinnedSettings};
use warpool::{Device, Instance};
use warpool_driver::{DeviceId, Driver, HostOptions};

use super::MIB;
use crate::bench::measure::{Measurement, fastest};
use crate::bench::{Report, Row};
use crate::output::Result;

/// The target for registering, as a part of the driver's own allocation.
const RATIO_MAX: f64 = 1.0 / 6.0;

/// Rounds per case; the fastest counts.
const ROUNDS: u64 = 9;

const BASELINE: &str = "the driver's host_alloc";

/// The name of a case, its bytes, and the number of threads that touch pages.
type Case = (&'static str, u64, u64);

const REAL: &[Case] = &[
    ("first pinning of 64 MiB, 16 threads", 64 * MIB, 16),
    ("first pinning of 64 MiB, 8 threads", 64 * MIB, 8),
    ("first pinning of 64 MiB, 1 thread", 64 * MIB, 1),
    ("first pinning of 1 GiB, 16 threads", 1024 * MIB, 16),
    ("first pinning of 1 GiB, 8 threads", 1024 * MIB, 8),
    ("first pinning of 1 GiB, 1 thread", 1024 * MIB, 1),
];

const SIMULATED: &[Case] = &[
    ("first pinning of 16 MiB, 8 threads, driver modelled", 16 * MIB, 8),
    ("first pinning of 16 MiB, 1 thread, driver modelled", 16 * MIB, 1),
    ("first pinning of 64 MiB, 8 threads, driver modelled", 64 * MIB, 8),
    ("first pinning of 64 MiB, 1 thread, driver modelled", 64 * MIB, 1),
];

pub fn measure(driver: &Arc<dyn Driver>, device: DeviceId, report: &mut Report<'_>) -> Result<()> {
    let device = &Instance::new(Arc::clone(driver))?.device(device.0)?;
    if !device.properties().host_registration {
        report.remark("skipped: first pinning, since the device cannot register host memory".to_owned());
        return Ok(());
    }
    let simulated = driver.kind() == "sim";
    // By size, the ratio with the best number of threads.
    let mut best: BTreeMap<u64, f64> = BTreeMap::new();
    for &(case, bytes, threads) in if simulated { SIMULATED } else { REAL } {
        let measurement = first_pinning(device, bytes, threads, simulated)?;
        let fields = vec![("threads", json!(threads)), ("bytes", json!(bytes))];
        let details = format!("the driver alone: {:.1} ms", measurement.baseline_ns / 1e6);
        report.add(Row { baseline: BASELINE, fields, details, ..Row::new(case, measurement) })?;
        let ratio = best.entry(bytes).or_insert(f64::INFINITY);
        *ratio = ratio.min(measurement.ratio());
    }
    let worst = best.into_values().fold(0.0, f64::max);
    report.remark(format!(
        "first pinning by registration, with the best number of threads, is at least {:.1} times as fast as the \
         driver's own allocation; target{}: {:.0}",
        1.0 / worst,
        if simulated { " on a real device" } else { "" },
        1.0 / RATIO_MAX,
    ));
    if simulated {
        let remark = "first pinning is the measured time of mapping and touching pages plus the modelled driver time";
        report.remark(remark.to_owned());
    }
    Ok(())
}

/// Registration, next to the driver's own allocation.
fn first_pinning(device: &Device, bytes: u64, threads: u64, simulated: bool) -> warpool::Result<Measurement> {
    let driver = &**device.instance().driver();
    let settings =
        PinnedSettings { use_cuda_host_register: true, num_register_threads: threads, ..PinnedSettings::default() };
    let driver_alone = || {
        let clock = Stopwatch::start(driver, simulated);
        let ptr = driver.host_alloc(device.id(), bytes, HostOptions::default())?;
        let ns = clock.stop();
        driver.host_free(ptr)?;
        Ok(ns)
    };
    let registration = || {
        let allocator = HostAllocator::new(device.instance(), settings.clone());
        let clock = Stopwatch::start(driver, simulated);
        let block = allocator.allocate_for(bytes, device)?;
        let ns = clock.stop();
        drop(block);
        allocator.close()?;
        Ok(ns)
    };
    fastest(ROUNDS, driver_alone, registration)
}

/// Measures elapsed time; on the simulated GPU plus the modelled time.
struct Stopwatch<'a> {
    start: Instant,
    modelled: Option<(&'a dyn Driver, Duration)>,
}

impl<'a> Stopwatch<'a> {
    fn start(driver: &'a dyn Driver, simulated: bool) -> Self {
        Self { modelled: simulated.then(|| (driver, driver.now())), start: Instant::now() }
    }

    /// Nanoseconds since the start.
    fn stop(self) -> f64 {
        let elapsed = self.start.elapsed();
        let modelled = self.modelled.map_or(Duration::ZERO, |(driver, start)| driver.now().saturating_sub(start));
        (elapsed + modelled).as_secs_f64() * 1e9
    }
}
