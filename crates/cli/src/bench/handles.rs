//! `warpool bench handles`: what it costs the host to come by a library's handle. All but the last row find a handle
//! that is there already, and must make no call, neither of the library nor of the driver: that is counted, beside the
//! time.

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::json;
use warpool::blas::{Blas, BlasSettings};
use warpool::handle::{Cublas, HandlePool, LibraryKind};
use warpool::memory::{CachingAllocator, DeviceAllocator, Settings};
use warpool::{Device, Instance, Stream};
use warpool_driver::decorate::Counting;
use warpool_driver::{Devices, Driver};

use super::measure::{Baseline, ns_each};
use super::{Args, Row, Rows};
use crate::driver::{self, NAMES};
use crate::output::{CommandError, Result, Verdict};

/// What a repeated fetch of the current cuBLAS handle should stay within, in baselines.
const FETCH_RATIO_MAX: f64 = 5.0;

/// Time is taken so often, each time of the baseline too, right before. Of each the quickest round counts.
const ROUNDS: u64 = 25;

/// How long it works before time is taken.
const WARM_UP: Duration = Duration::from_millis(500);

/// How many locks a round of the baseline takes.
const LOCKS: u32 = 40_000;

/// The most handles that are made and destroyed in one round: on a real device each takes a fifth of a millisecond.
const MADE_MAX: u64 = 20;

pub fn run(args: &Args, rows: &mut Rows<'_>) -> Result<Verdict> {
    let Some(name) = args.driver.as_deref() else {
        return Err(CommandError::Usage(format!("'bench handles' needs --driver: one of {}", NAMES.join(", "))));
    };
    let counting = Arc::new(Counting::new(driver::open(name, &args.sim, 0)?));
    let device = driver::device(&*counting, args.device)?;
    counting.set_current_device(device)?;
    let instance = Instance::new(Arc::clone(&counting) as Arc<dyn Driver>)?;
    let device = instance.device(device.0)?;
    let stream = device.pool_stream()?;
    let bench = Bench { device, stream, counting, ops: args.ops.unwrap_or(1_000_000) };
    let called = bench.cases(&instance, rows)?;
    if called.is_empty() {
        return Ok(Verdict::Success);
    }
    rows.remark(format!("these made calls, and must not: {}", called.join(", ")));
    Ok(Verdict::Failure)
}

/// Workspaces as the environment wants them, as PyTorch reads it.
fn blas_settings() -> BlasSettings {
    let text = |name| std::env::var(name).ok();
    let [config, lt, unified] =
        ["CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "TORCH_CUBLASLT_UNIFIED_WORKSPACE"].map(text);
    let (settings, warnings) = BlasSettings::from_texts(config.as_deref(), lt.as_deref(), unified.as_deref());
    for warning in warnings {
        eprintln!("warning: {warning}");
    }
    settings
}

/// What the cases work with.
struct Bench {
    device: Device,
    stream: Stream,
    counting: Arc<Counting>,
    ops: u64,
}

impl Bench {
    /// Measures every case. Returns those that made calls and should not have.
    fn cases(&self, instance: &Instance, rows: &mut Rows<'_>) -> Result<Vec<&'static str>> {
        let (device, stream) = (&self.device, &self.stream);
        let pool = HandlePool::new(instance, Cublas);
        let allocator: Arc<dyn DeviceAllocator> = Arc::new(CachingAllocator::new(instance, Settings::default()));
        let blas = Blas::new(&allocator, blas_settings());
        let _current = stream.enter();

        let fetch = || pool.current(device).map(drop);
        let fetch_and_set = || pool.current(device)?.set_stream(stream);
        let lease = || pool.lease(device).map(drop);
        let fetch_blas = || blas.handle(device).map(drop);
        let make = || Cublas.destroy(device, &Cublas.create(device)?);
        warm_up(fetch_and_set)?;

        let mut called = Vec::new();
        let ratio = self.quiet("current cuBLAS handle", fetch_blas, rows, &mut called)?;
        self.quiet("current handle of a pool", fetch, rows, &mut called)?;
        self.quiet("current handle of a pool, and its stream", fetch_and_set, rows, &mut called)?;
        self.quiet("lease of a handle, and back", lease, rows, &mut called)?;
        self.noisy("cuBLAS handle made and destroyed", make, rows)?;
        rows.remark(format!(
            "the current cuBLAS handle, with stream, workspace and math mode, costs {ratio:.2} times the baseline; {FETCH_RATIO_MAX} is the aim"
        ));
        blas.close().and(pool.close())?;
        Ok(called)
    }

    /// A case that must make no call. Returns its ratio to the baseline.
    fn quiet(
        &self,
        case: &'static str,
        mut act: impl FnMut() -> warpool::Result<()>,
        rows: &mut Rows<'_>,
        called: &mut Vec<&'static str>,
    ) -> Result<f64> {
        // The first time may make something.
        act()?;
        self.counting.reset();
        let measured = least(self.ops / ROUNDS, &mut act)?;
        let calls: u64 = self.counting.counts().iter().map(|count| count.calls).sum();
        if calls > 0 {
            called.push(case);
        }
        show(case, measured, calls, rows)?;
        Ok(measured.0 / measured.1)
    }

    /// A case that is there to be called.
    fn noisy(&self, case: &'static str, act: impl FnMut() -> warpool::Result<()>, rows: &mut Rows<'_>) -> Result<()> {
        self.counting.reset();
        let measured = least((self.ops / ROUNDS).min(MADE_MAX), act)?;
        show(case, measured, self.counting.counts().iter().map(|count| count.calls).sum(), rows)
    }
}

/// What one operation took, and the baseline beside it, in nanoseconds.
fn least(ops: u64, mut act: impl FnMut() -> warpool::Result<()>) -> warpool::Result<(f64, f64)> {
    let ops = ops.max(1);
    let mut least = (f64::INFINITY, f64::INFINITY);
    for _ in 0..ROUNDS {
        let baseline = Baseline::round(LOCKS);
        let begun = Instant::now();
        for _ in 0..ops {
            black_box(&mut act)()?;
        }
        least = (least.0.min(ns_each(begun.elapsed(), ops)), least.1.min(baseline));
    }
    Ok(least)
}

/// Works until the processor has come to its pace.
fn warm_up(act: impl Fn() -> warpool::Result<()>) -> warpool::Result<()> {
    let begun = Instant::now();
    while begun.elapsed() < WARM_UP {
        (0..10_000).try_for_each(|_| act())?;
    }
    Ok(())
}

fn show(case: &'static str, (ns, baseline): (f64, f64), calls: u64, rows: &mut Rows<'_>) -> Result<()> {
    rows.baseline.ns = baseline;
    let besides = format!("{calls} calls");
    rows.add(Row { case, ns, extra: vec![("library_calls", json!(calls))], besides })
}
