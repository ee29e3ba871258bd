//! `warpool bench handles`: host time of getting a library handle. All cases but the last find an existing handle and
//! must make no library or driver call; calls are counted next to the time.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use warpool::blas::{Blas, BlasSettings};
use warpool::handle::{Cublas, HandlePool, LibraryKind};
use warpool::memory::{CachingAllocator, DeviceAllocator, Settings};
use warpool::{Device, Instance, Stream};
use warpool_driver::decorate::Counting;
use warpool_driver::{Devices, Driver};

use super::measure::{Measurement, fastest, mutex_round, ns_each, timed, warm_up};
use super::{Args, Report, Row};
use crate::driver;
use crate::output::{self, Result, Verdict};

/// The target for getting the current cuBLAS handle again, in baselines.
const CURRENT_RATIO_MAX: f64 = 5.0;

/// Rounds per case; the fastest counts.
const ROUNDS: u64 = 25;

const WARM_UP: Duration = Duration::from_millis(500);

/// Lock-unlock pairs per round of the baseline.
const LOCKS: u32 = 40_000;

/// The most handles that are created and destroyed per round: on a real device each takes 0.2 ms.
const CREATED_MAX: u64 = 20;

pub fn run(args: &Args, report: &mut Report<'_>) -> Result<Verdict> {
    let counting = Arc::new(Counting::new(driver::open(args.driver_name()?, &args.sim, 0)?));
    let device = driver::device(&*counting, args.device)?;
    counting.set_current_device(device)?;
    let instance = Instance::new(Arc::clone(&counting) as Arc<dyn Driver>)?;
    let device = instance.device(device.0)?;
    let stream = device.pool_stream()?;
    let context = BenchContext { device, stream, counting, ops: args.ops.unwrap_or(1_000_000) };
    let unexpected = context.measure(&instance, report)?;
    if unexpected.is_empty() {
        return Ok(Verdict::Success);
    }
    report.remark(format!("made calls, but must not: {}", unexpected.join(", ")));
    Ok(Verdict::Failure)
}

/// Workspace settings from the environment, with PyTorch's variables.
fn blas_settings() -> BlasSettings {
    let text = |name| std::env::var(name).ok();
    let [config, lt, unified] =
        ["CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "TORCH_CUBLASLT_UNIFIED_WORKSPACE"].map(text);
    let (settings, warnings) = BlasSettings::from_texts(config.as_deref(), lt.as_deref(), unified.as_deref());
    for warning in warnings {
        output::message(format_args!("warning: {warning}"));
    }
    settings
}

/// The setup of the cases.
struct BenchContext {
    device: Device,
    stream: Stream,
    counting: Arc<Counting>,
    ops: u64,
}

impl BenchContext {
    /// Measures every case. Returns those that made calls but must not.
    fn measure(&self, instance: &Instance, report: &mut Report<'_>) -> Result<Vec<&'static str>> {
        let (device, stream) = (&self.device, &self.stream);
        let pool = HandlePool::new(instance, Cublas);
        let allocator: Arc<dyn DeviceAllocator> = Arc::new(CachingAllocator::new(instance, Settings::default()));
        let blas = Blas::new(&allocator, blas_settings());
        let _current = stream.enter();

        let current = || pool.current(device).map(drop);
        let current_with_stream = || pool.current(device)?.set_stream(stream);
        let lease = || pool.lease(device).map(drop);
        let current_blas = || blas.handle(device).map(drop);
        let create = || Cublas.destroy(device, &Cublas.create(device)?);
        warm_up(WARM_UP, current_with_stream)?;

        let mut unexpected = Vec::new();
        let ratio = self.without_calls("current cuBLAS handle", current_blas, report, &mut unexpected)?;
        self.without_calls("current handle of a pool", current, report, &mut unexpected)?;
        self.without_calls("current handle of a pool, and its stream", current_with_stream, report, &mut unexpected)?;
        self.without_calls("lease of a handle, and back", lease, report, &mut unexpected)?;
        self.with_calls("cuBLAS handle made and destroyed", create, report)?;
        report.remark(format!(
            "the current cuBLAS handle, with stream, workspace and math mode, costs {ratio:.2} times the baseline; \
             target: {CURRENT_RATIO_MAX}"
        ));
        blas.close().and(pool.close())?;
        Ok(unexpected)
    }

    /// A case that must make no calls. Returns its ratio to the baseline.
    fn without_calls(
        &self,
        case: &'static str,
        mut operation: impl FnMut() -> warpool::Result<()>,
        report: &mut Report<'_>,
        unexpected: &mut Vec<&'static str>,
    ) -> Result<f64> {
        // The first time may create something.
        operation()?;
        self.counting.reset();
        let measurement = measure(self.ops / ROUNDS, operation)?;
        let calls = self.calls();
        if calls > 0 {
            unexpected.push(case);
        }
        add(case, measurement, calls, report)?;
        Ok(measurement.ratio())
    }

    /// A case that makes calls.
    fn with_calls(
        &self,
        case: &'static str,
        operation: impl FnMut() -> warpool::Result<()>,
        report: &mut Report<'_>,
    ) -> Result<()> {
        self.counting.reset();
        let measurement = measure((self.ops / ROUNDS).min(CREATED_MAX), operation)?;
        add(case, measurement, self.calls(), report)
    }

    fn calls(&self) -> u64 {
        self.counting.counts().iter().map(|count| count.calls).sum()
    }
}

fn measure(ops: u64, mut operation: impl FnMut() -> warpool::Result<()>) -> warpool::Result<Measurement> {
    let ops = ops.max(1);
    fastest(ROUNDS, || Ok(mutex_round(LOCKS)), || Ok(ns_each(timed(ops, || black_box(&mut operation)())?, ops)))
}

fn add(case: &'static str, measurement: Measurement, calls: u64, report: &mut Report<'_>) -> Result<()> {
    let (fields, details) = (vec![("library_calls", json!(calls))], format!("{calls} calls"));
    report.add(Row { fields, details, ..Row::new(case, measurement) })
}
