//! `warpool bench graph`: what replaying a graph costs the host, beside the launch alone. The baseline is the driver's
//! own launch of the very same executable: on CUDA nothing but `cuGraphLaunch`, on the simulated device the contract's
//! call. Only the host's time is taken; the device catches up in between, outside the time.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::json;
use warpool::generator::Generator;
use warpool::graph::{CaptureOptions, Graph, GraphOptions};
use warpool::memory::{Allocate, Block, CachingAllocator, DeviceAllocator, MemPoolId, Settings};
use warpool::{Device, Instance, Stream};
use warpool_cuda::CudaDriver;
use warpool_driver::sim::SimDriver;
use warpool_driver::{Driver, FunctionId, KernelMirror, KernelSource, LaunchShape};

use super::measure::ns_each;
use super::{Args, Row, Rows};
use crate::driver::{self, NAMES};
use crate::output::{CommandError, Result, Verdict};

/// What a replay without generators should stay within, in launches.
const PLAIN_MAX: f64 = 1.05;
/// What one with a generator should.
const GENERATOR_MAX: f64 = 2.0;

/// Launches and replays take turns, so many of each: fewer than a queue holds. Of each the quickest turn counts, since
/// a host runs at several paces and changes between them when it likes.
const BATCH: u64 = 200;

const BASELINE: &str = "bare launch";

/// A kernel that does nothing.
static NOTHING: KernelSource = KernelSource {
    name: "warpool bench graph",
    cuda: r#"extern "C" __global__ void nothing() {}"#,
    mirrors: &[KernelMirror { name: "nothing", run: |_| Ok(()), nanos: None }],
};

pub fn run(args: &Args, rows: &mut Rows<'_>) -> Result<Verdict> {
    let Some(name) = args.driver.as_deref() else {
        return Err(CommandError::Usage(format!("'bench graph' needs --driver: one of {}", NAMES.join(", "))));
    };
    let machine = Machine::open(name, args)?;
    let instance = Instance::new(machine.driver())?;
    let number = driver::device(&**instance.driver(), args.device)?;
    instance.driver().set_current_device(number)?;
    let device = instance.device(number.0)?;
    rows.baseline_name = BASELINE;
    let ops = args.ops.unwrap_or(100_000);
    let (plain, generator) = measure(&machine, &device, ops, rows)?;
    rows.remark(format!(
        "a replay costs at most {plain:.3} launches, with a generator {generator:.3}; {PLAIN_MAX} and {GENERATOR_MAX} are the aims on a real device"
    ));
    Ok(Verdict::Success)
}

/// The driver, by its kind: the bare launch is not of the contract.
enum Machine {
    Sim(Arc<SimDriver>),
    Cuda(Arc<CudaDriver>),
}

impl Machine {
    fn open(name: &str, args: &Args) -> Result<Self> {
        Ok(match name {
            "cuda" => Self::Cuda(driver::open_cuda(&args.sim)?),
            "sim" => Self::Sim(Arc::new(SimDriver::new(args.sim.config(0).without_suballocation_tracking()))),
            _ => return Err(driver::unknown(name)),
        })
    }

    fn driver(&self) -> Arc<dyn Driver> {
        match self {
            Self::Sim(driver) => Arc::clone(driver) as _,
            Self::Cuda(driver) => Arc::clone(driver) as _,
        }
    }

    /// How long `times` bare launches take.
    fn launches(&self, graph: &Graph, stream: &Stream, times: u64) -> warpool::Result<Duration> {
        let exec = graph.exec_id()?;
        match self {
            Self::Sim(driver) => timed(times, || Ok(driver.graph_launch(exec, stream.id())?)),
            Self::Cuda(driver) => {
                // SAFETY: the graph owns what it was captured with, and is alive.
                let mut bare = unsafe { driver.bare_launcher(exec, stream.id()) }?;
                timed(times, || Ok(bare.launch()?))
            }
        }
    }
}

fn timed(times: u64, mut act: impl FnMut() -> warpool::Result<()>) -> warpool::Result<Duration> {
    let begun = Instant::now();
    for _ in 0..times {
        act()?;
    }
    Ok(begun.elapsed())
}

/// Runs every case. Returns the largest ratio without and with generators.
fn measure(machine: &Machine, device: &Device, ops: u64, rows: &mut Rows<'_>) -> Result<(f64, f64)> {
    let allocator = Arc::new(CachingAllocator::new(device.instance(), Settings::default())) as Arc<dyn DeviceAllocator>;
    let stream = device.pool_stream()?;
    let driver = device.instance().driver();
    let module = driver.module_load(device.id(), &NOTHING)?;
    let kernel = driver.function_get(module, "nothing")?;
    let bench = Bench { machine, device, allocator: &allocator, stream: &stream, kernel, ops };
    let mut worst = (0.0_f64, 0.0_f64);
    for (case, kernels, generators) in [
        ("replay, 1 kernel", 1, 0),
        ("replay, 10 kernels", 10, 0),
        ("replay, 100 kernels", 100, 0),
        ("replay, 1 kernel, 1 generator", 1, 1),
        ("replay, 100 kernels, 1 generator", 100, 1),
        ("replay, 1 kernel, 2 generators", 1, 2),
    ] {
        let (ns, baseline) = bench.case(kernels, generators)?;
        rows.baseline.ns = baseline;
        let extra = vec![("kernels", json!(kernels)), ("generators", json!(generators))];
        rows.add(Row { case, ns, extra, besides: format!("launch {baseline:.1} ns") })?;
        match generators {
            0 => worst.0 = worst.0.max(ns / baseline),
            1 => worst.1 = worst.1.max(ns / baseline),
            _ => {}
        }
    }
    stream.synchronize()?;
    driver.module_unload(module)?;
    allocator.trim(device.id(), MemPoolId::DEFAULT)?;
    Ok(worst)
}

struct Bench<'a> {
    machine: &'a Machine,
    device: &'a Device,
    allocator: &'a Arc<dyn DeviceAllocator>,
    stream: &'a Stream,
    kernel: FunctionId,
    ops: u64,
}

impl Bench<'_> {
    /// What a replay takes, and a launch of the same executable.
    fn case(&self, kernels: u32, generators: usize) -> warpool::Result<(f64, f64)> {
        let numbers = Arc::new(self.allocator.allocate(1024, self.stream)?);
        let mut graph = self.graph(kernels, generators, &numbers)?;
        let mut least = (f64::INFINITY, f64::INFINITY);
        for _ in 0..self.ops.div_ceil(BATCH) {
            let replays = timed(BATCH, || graph.replay(self.stream))?;
            self.stream.synchronize()?;
            let launches = self.machine.launches(&graph, self.stream, BATCH)?;
            self.stream.synchronize()?;
            least = (least.0.min(ns_each(replays, BATCH)), least.1.min(ns_each(launches, BATCH)));
        }
        graph.reset()?;
        Ok(least)
    }

    fn graph(&self, kernels: u32, generators: usize, numbers: &Arc<Block>) -> warpool::Result<Graph> {
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
