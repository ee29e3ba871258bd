//! `warpool bench graph`: host time of replaying a graph, next to the driver's launch of the same executable: on CUDA
//! `cuGraphLaunch` alone, on the simulated GPU the contract's call. Only host time is measured; the stream is
//! synchronized in between, untimed.

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use warpool::generator::Generator;
use warpool::graph::{CaptureOptions, Graph, GraphOptions};
use warpool::memory::{Allocate, CachingAllocator, DeviceAllocator, DeviceBlock, MemPoolId, Settings};
use warpool::{Device, Instance, Stream};
use warpool_cuda::CudaDriver;
use warpool_driver::sim::SimDriver;
use warpool_driver::{Driver, FunctionId, LaunchShape};

use super::kernels::KERNELS;
use super::measure::{Measurement, ns_each, timed};
use super::{Args, Report, Row};
use crate::driver;
use crate::output::{Result, Verdict};

/// The target for a replay without generators, in launches.
const PLAIN_RATIO_MAX: f64 = 1.05;
/// The target for a replay with one generator.
const GENERATOR_RATIO_MAX: f64 = 2.0;

/// Launches and replays per round: fewer than a stream's queue holds. The fastest round of each counts.
const BATCH: u64 = 200;

const BASELINE: &str = "bare launch";

pub fn run(args: &Args, report: &mut Report<'_>) -> Result<Verdict> {
    let launcher = Launcher::open(args)?;
    let instance = Instance::new(launcher.driver())?;
    let device = driver::device(&**instance.driver(), args.device)?;
    instance.driver().set_current_device(device)?;
    let device = instance.device(device.0)?;
    let (plain, generator) = measure(&launcher, &device, args.ops.unwrap_or(100_000), report)?;
    report.remark(format!(
        "a replay costs at most {plain:.3} launches, with a generator {generator:.3}; targets on a real device: \
         {PLAIN_RATIO_MAX} and {GENERATOR_RATIO_MAX}"
    ));
    Ok(Verdict::Success)
}

/// The driver by its concrete type: on CUDA the bare launch is not in the contract.
enum Launcher {
    Sim(Arc<SimDriver>),
    Cuda(Arc<CudaDriver>),
}

impl Launcher {
    fn open(args: &Args) -> Result<Self> {
        Ok(match args.driver_name()? {
            "cuda" => Self::Cuda(driver::open_cuda(&args.sim)?),
            "sim" => Self::Sim(Arc::new(SimDriver::new(args.untracked_sim()))),
            name => return Err(driver::unknown(name)),
        })
    }

    fn driver(&self) -> Arc<dyn Driver> {
        match self {
            Self::Sim(driver) => Arc::clone(driver) as _,
            Self::Cuda(driver) => Arc::clone(driver) as _,
        }
    }

    /// The time of `times` bare launches.
    fn launches(&self, graph: &Graph, stream: &Stream, times: u64) -> warpool::Result<Duration> {
        let exec = graph.exec_id()?;
        match self {
            Self::Sim(driver) => timed(times, || Ok(driver.graph_launch(exec, stream.id())?)),
            Self::Cuda(driver) => {
                // SAFETY: the graph owns what it was captured with, and is alive.
                let mut launcher = unsafe { driver.bare_launcher(exec, stream.id()) }?;
                timed(times, || Ok(launcher.launch()?))
            }
        }
    }
}

/// Runs every case. Returns the largest ratio without and with a generator.
fn measure(launcher: &Launcher, device: &Device, ops: u64, report: &mut Report<'_>) -> Result<(f64, f64)> {
    let allocator = Arc::new(CachingAllocator::new(device.instance(), Settings::default())) as Arc<dyn DeviceAllocator>;
    let stream = device.pool_stream()?;
    let driver = device.instance().driver();
    let module = driver.module_load(device.id(), &KERNELS)?;
    let kernel = driver.function_get(module, "warpool_bench_empty")?;
    let context = BenchContext { launcher, device, allocator: &allocator, stream: &stream, kernel, ops };
    let mut worst = (0.0_f64, 0.0_f64);
    for (case, kernels, generators) in [
        ("replay, 1 kernel", 1, 0),
        ("replay, 10 kernels", 10, 0),
        ("replay, 100 kernels", 100, 0),
        ("replay, 1 kernel, 1 generator", 1, 1),
        ("replay, 100 kernels, 1 generator", 100, 1),
        ("replay, 1 kernel, 2 generators", 1, 2),
    ] {
        let measurement = context.replays(kernels, generators)?;
        let fields = vec![("kernels", json!(kernels)), ("generators", json!(generators))];
        let details = format!("launch {:.1} ns", measurement.baseline_ns);
        report.add(Row { baseline: BASELINE, fields, details, ..Row::new(case, measurement) })?;
        match generators {
            0 => worst.0 = worst.0.max(measurement.ratio()),
            1 => worst.1 = worst.1.max(measurement.ratio()),
            _ => {}
        }
    }
    stream.synchronize()?;
    driver.module_unload(module)?;
    allocator.trim(device.id(), MemPoolId::DEFAULT)?;
    Ok(worst)
}

/// The setup of the cases.
struct BenchContext<'a> {
    launcher: &'a Launcher,
    device: &'a Device,
    allocator: &'a Arc<dyn DeviceAllocator>,
    stream: &'a Stream,
    kernel: FunctionId,
    ops: u64,
}

impl BenchContext<'_> {
    /// Replays, next to launches of the same executable.
    fn replays(&self, kernels: u32, generators: usize) -> warpool::Result<Measurement> {
        let numbers = Arc::new(self.allocator.allocate(1024, self.stream)?);
        let mut graph = self.graph(kernels, generators, &numbers)?;
        let mut fastest = Measurement::MAX;
        for _ in 0..self.ops.div_ceil(BATCH) {
            let replays = timed(BATCH, || graph.replay(self.stream))?;
            self.stream.synchronize()?;
            let launches = self.launcher.launches(&graph, self.stream, BATCH)?;
            self.stream.synchronize()?;
            let (ns, baseline_ns) = (ns_each(replays, BATCH), ns_each(launches, BATCH));
            fastest = fastest.min(Measurement { ns, baseline_ns });
        }
        graph.reset()?;
        Ok(fastest)
    }

    fn graph(&self, kernels: u32, generators: usize, numbers: &Arc<DeviceBlock>) -> warpool::Result<Graph> {
        let generators: Vec<Generator> =
            (0..generators).map(|_| Generator::new(self.device)).collect::<warpool::Result<_>>()?;
        let mut graph = Graph::new(self.allocator, self.device, GraphOptions::default())?;
        graph.capture(self.stream, CaptureOptions::default(), |capture| {
            capture.share(Arc::clone(numbers))?;
            for generator in &generators {
                generator.fill_bits(&**numbers, self.stream)?;
            }
            for _ in 0..kernels {
                // SAFETY: the kernel is empty and takes nothing.
                unsafe { capture.launch(self.kernel, LaunchShape::ONE, &[], self.stream) }?;
            }
            Ok(())
        })?;
        Ok(graph)
    }
}
