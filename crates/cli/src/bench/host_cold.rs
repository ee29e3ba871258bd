//! The part of `warpool bench host` about pinning for the first time: the register way, through a new allocator each
//! time, beside the driver's own allocation.
//!
//! On the simulated GPU the driver's part is what its cost model says, and the host's part (mapping pages, touching
//! them) is the machine's own time; the sum is shown. Sizes are smaller there: pages are touched for real.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde_json::json;
use warpool::Device;
use warpool::memory::{HostAllocator, PinnedSettings};
use warpool_driver::{Driver, HostOptions};

use super::host::MIB;
use super::{Row, Rows};
use crate::output::Result;

/// What the register way is to take of the driver's own allocation, at most.
const RATIO_MAX: f64 = 1.0 / 6.0;

/// Time is taken so often, each time of the baseline too, right before. Of each the quickest round counts.
const ROUNDS: usize = 9;

/// How many bytes are pinned, by how many threads, and what that is called.
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

pub fn measure(device: &Device, rows: &mut Rows<'_>) -> Result<()> {
    if !device.properties().host_registration {
        rows.remark("left out: first pinning, since the device pins no memory where it is".to_owned());
        return Ok(());
    }
    let simulated = device.instance().driver().kind() == "sim";
    // By size, the best number of threads.
    let mut best: BTreeMap<u64, f64> = BTreeMap::new();
    for &(case, bytes, threads) in if simulated { SIMULATED } else { REAL } {
        let (ns, baseline) = first_pinning(device, bytes, threads, simulated)?;
        rows.baseline.ns = baseline;
        rows.baseline_name = "the driver's host_alloc";
        let besides = format!("the driver alone: {:.1} ms", baseline / 1e6);
        rows.add(Row { case, ns, extra: vec![("threads", json!(threads)), ("bytes", json!(bytes))], besides })?;
        let least = best.entry(bytes).or_insert(f64::INFINITY);
        *least = least.min(ns / baseline);
    }
    let worst = best.into_values().fold(0.0, f64::max);
    rows.remark(format!(
        "first pinning: by registering, with the best number of threads, at least {:.1} times as fast as the driver's own allocation; {:.0} is the aim{}",
        1.0 / worst,
        1.0 / RATIO_MAX,
        if simulated { " on a real device" } else { "" }
    ));
    if simulated {
        let remark = "first pinning is the machine's own time for mapping and touching pages, plus what the simulated driver would take";
        rows.remark(remark.to_owned());
    }
    Ok(())
}

/// What it takes by registration, and what the driver takes alone, in nanoseconds.
fn first_pinning(device: &Device, bytes: u64, threads: u64, simulated: bool) -> warpool::Result<(f64, f64)> {
    let driver = &**device.instance().driver();
    let settings =
        PinnedSettings { use_cuda_host_register: true, num_register_threads: threads, ..PinnedSettings::default() };
    let mut least = (f64::INFINITY, f64::INFINITY);
    for _ in 0..ROUNDS {
        let watch = Watch::start(driver, simulated);
        let ptr = driver.host_alloc(device.id(), bytes, HostOptions::default())?;
        least.1 = least.1.min(watch.stop());
        driver.host_free(ptr)?;

        let allocator = HostAllocator::new(device.instance(), settings.clone());
        let watch = Watch::start(driver, simulated);
        let block = allocator.allocate_for(bytes, device)?;
        least.0 = least.0.min(watch.stop());
        drop(block);
        allocator.close()?;
    }
    Ok(least)
}

/// Takes the time; on a simulated device that of its model besides.
struct Watch<'a> {
    begun: Instant,
    modelled: Option<(&'a dyn Driver, Duration)>,
}

impl<'a> Watch<'a> {
    fn start(driver: &'a dyn Driver, simulated: bool) -> Self {
        Self { modelled: simulated.then(|| (driver, driver.now())), begun: Instant::now() }
    }

    fn stop(self) -> f64 {
        let elapsed = self.begun.elapsed();
        let modelled = self.modelled.map_or(Duration::ZERO, |(driver, begun)| driver.now().saturating_sub(begun));
        (elapsed + modelled).as_secs_f64() * 1e9
    }
}
