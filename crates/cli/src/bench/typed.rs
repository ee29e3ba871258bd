//! `warpool bench typed`: host time of typed memory and typed launches, next to the raw calls that they replace, in
//! turns in the same run. Only host time is measured; the stream is synchronized in between, untimed.

use std::hint::black_box;
use std::sync::Arc;

use warpool::graph::{CaptureOptions, Graph, GraphOptions};
use warpool::memory::{Allocate, CachingAllocator, DeviceAllocator, DeviceBlock, MemPoolId, Settings};
use warpool::typed::{Kernel, PointerMut};
use warpool::{Device, DeviceVec, Instance, Stream};
use warpool_driver::{Driver, LaunchShape, Pattern};

use super::kernels::KERNELS;
use super::measure::{Measurement, fastest, ns_each, timed};
use super::{Args, Report, Row};
use crate::driver;
use crate::output::{Result, Verdict};

/// The target: what is within the noise of a run.
const RATIO_MAX: f64 = 1.05;
/// Operations per round: fewer than a stream's queue holds.
const BATCH: u64 = 200;
/// Elements of the vectors. Small, so that the device is not what is measured.
const LEN: usize = 1024;

const BASELINE: &str = "the raw calls";

pub fn run(args: &Args, report: &mut Report<'_>) -> Result<Verdict> {
    let instance = Instance::new(args.open_driver()?)?;
    let device = driver::device(&**instance.driver(), args.device)?;
    instance.driver().set_current_device(device)?;
    let device = instance.device(device.0)?;
    let allocator: Arc<dyn DeviceAllocator> = Arc::new(CachingAllocator::new(&instance, Settings::default()));
    let stream = device.lease_stream()?;
    let context = BenchContext {
        device: &device,
        allocator: &allocator,
        stream: &stream,
        rounds: args.ops.unwrap_or(100_000).div_ceil(BATCH),
    };
    let mut worst = 0.0_f64;
    let cases: [(&'static str, warpool::Result<Measurement>); 5] = [
        ("allocate and free", context.allocate()),
        ("fill", context.fill()),
        ("copy on the device", context.copy()),
        ("kernel of two arguments", context.launch()),
        ("replay of a graph with 4 vectors", context.replay()),
    ];
    for (case, measured) in cases {
        let measurement = measured?;
        worst = worst.max(measurement.ratio());
        let details = format!("raw {:.1} ns", measurement.baseline_ns);
        report.add(Row { baseline: BASELINE, details, ..Row::new(case, measurement) })?;
    }
    report.remark(format!(
        "typed calls cost at most {worst:.3} times the raw ones; target on a real device: {RATIO_MAX}"
    ));
    allocator.trim(device.id(), MemPoolId::DEFAULT)?;
    Ok(Verdict::Success)
}

struct BenchContext<'a> {
    device: &'a Device,
    allocator: &'a Arc<dyn DeviceAllocator>,
    stream: &'a Stream,
    rounds: u64,
}

impl BenchContext<'_> {
    fn driver(&self) -> &dyn Driver {
        &**self.device.instance().driver()
    }

    fn vector(&self) -> warpool::Result<DeviceVec<u32>> {
        DeviceVec::zeroed(self.allocator, LEN, self.stream)
    }

    fn block(&self) -> warpool::Result<DeviceBlock> {
        self.allocator.allocate((LEN * 4) as u64, self.stream)
    }

    /// Rounds of both in turns.
    fn compare(
        &self,
        mut raw: impl FnMut() -> warpool::Result<()>,
        mut typed: impl FnMut() -> warpool::Result<()>,
    ) -> warpool::Result<Measurement> {
        let mut round = |operation: &mut dyn FnMut() -> warpool::Result<()>| {
            let elapsed = timed(BATCH, operation)?;
            self.stream.synchronize()?;
            Ok(ns_each(elapsed, BATCH))
        };
        let round = std::cell::RefCell::new(&mut round);
        fastest(self.rounds, || (round.borrow_mut())(&mut raw), || (round.borrow_mut())(&mut typed))
    }

    fn allocate(&self) -> warpool::Result<Measurement> {
        self.compare(
            || {
                drop(black_box(self.block()?));
                Ok(())
            },
            || {
                drop(black_box(DeviceVec::<u32>::uninit(self.allocator, LEN, self.stream)?));
                Ok(())
            },
        )
    }

    fn fill(&self) -> warpool::Result<Measurement> {
        let (block, mut vector) = (self.block()?, self.vector()?);
        self.compare(
            || Ok(self.driver().fill(block.ptr(), Pattern::U32(7), LEN as u64, self.stream.id())?),
            || self.stream.fill(&mut vector, 7),
        )
    }

    fn copy(&self) -> warpool::Result<Measurement> {
        let (from, to, source, mut target) = (self.block()?, self.block()?, self.vector()?, self.vector()?);
        let bytes = (LEN * 4) as u64;
        self.compare(
            || Ok(self.driver().copy(to.ptr().into(), from.ptr().into(), bytes, self.stream.id())?),
            || self.stream.copy(&source, &mut target),
        )
    }

    fn launch(&self) -> warpool::Result<Measurement> {
        const NAME: &str = "warpool_bench_set";
        let (block, mut vector) = (self.block()?, self.vector()?);
        // SAFETY: these are its parameters, and it writes the first element.
        let kernel: Kernel<(PointerMut<u32>, u32)> = unsafe { Kernel::load(self.device, &KERNELS, NAME)? };
        let module = self.driver().module_load(self.device.id(), &KERNELS)?;
        let function = self.driver().function_get(module, NAME)?;
        let shape = LaunchShape::ONE;
        let measurement = self.compare(
            || {
                let args = [block.ptr().into(), 7_u32.into()];
                // SAFETY: these are its parameters, and the block has room for the number.
                Ok(unsafe { self.driver().kernel_launch(function, shape, &args, self.stream.id()) }?)
            },
            || kernel.launch(self.stream, shape, (&mut vector, 7)),
        )?;
        self.driver().module_unload(module)?;
        Ok(measurement)
    }

    /// Four fills: of vectors that each replay is ordered with, and of blocks that the graph shares.
    fn replay(&self) -> warpool::Result<Measurement> {
        let new = || Graph::new(self.allocator, self.device, GraphOptions::default());
        let (mut raw, mut typed) = (new()?, new()?);
        raw.capture(self.stream, CaptureOptions::default(), |capture| {
            let stream = capture.stream().clone();
            for _ in 0..4 {
                let key = capture.allocate((LEN * 4) as u64)?;
                capture.fill(key, Pattern::U32(7), LEN as u64, &stream)?;
            }
            Ok(())
        })?;
        let mut vectors = (0..4).map(|_| self.vector()).collect::<warpool::Result<Vec<_>>>()?;
        typed.capture(self.stream, CaptureOptions::default(), |capture| {
            let stream = capture.stream().clone();
            vectors.iter_mut().try_for_each(|vector| stream.fill(vector, 7))
        })?;
        self.compare(|| raw.replay(self.stream), || typed.replay(self.stream))
    }
}
