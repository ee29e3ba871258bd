//! `warpool bench typed`: host time of typed memory and typed launches, next to the raw calls that they replace.
//!
//! Three sides take turns in short groups, in every order: typed calls, raw calls, and the same raw calls once more on
//! memory of their own. The last is the control: it shows how far two measurements of the same calls differ in this
//! run. The median of the groups of each is reported. Only host time is measured; the stream is synchronized in
//! between, untimed.

use std::hint::black_box;
use std::sync::Arc;

use warpool::graph::{CaptureOptions, Graph, GraphOptions};
use warpool::memory::{Allocate, CachingAllocator, DeviceAllocator, DeviceBlock, MemPoolId, Settings};
use warpool::typed::{Kernel, PointerMut};
use warpool::{Device, DeviceVec, Instance, Stream};
use warpool_driver::{Driver, LaunchShape, Pattern};

use super::kernels::KERNELS;
use super::measure::{Measurement, ns_each, timed};
use super::{Args, Report, Row};
use crate::driver;
use crate::output::{Result, Verdict};

/// Operations of a group: fewer than a stream's queue holds, and many more than the clock's resolution needs.
const GROUP: u64 = 100;
/// Elements of the vectors. Small, so that the device's time does not dominate.
const LEN: usize = 1024;

const BASELINE: &str = "the raw calls";

/// The orders in which the sides take turns.
const ORDERS: [[usize; 3]; 6] = [[0, 1, 2], [2, 1, 0], [1, 2, 0], [0, 2, 1], [2, 0, 1], [1, 0, 2]];

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
        groups: args.ops.unwrap_or(100_000).div_ceil(GROUP),
    };
    let cases: [(&'static str, warpool::Result<Compared>); 5] = [
        ("allocate and free", context.allocate()),
        ("fill", context.fill()),
        ("copy on the device", context.copy()),
        ("kernel of two arguments", context.launch()),
        ("replay of a graph with 4 vectors", context.replay()),
    ];
    let (mut worst, mut noise) = (0.0_f64, 0.0_f64);
    for (case, compared) in cases {
        let Compared { typed, control } = compared?;
        worst = worst.max(typed.ratio() - 1.0);
        noise = noise.max((control.ratio() - 1.0).abs());
        for (case, measurement) in [(case.to_owned(), typed), (format!("{case}, raw against raw"), control)] {
            let details = format!("raw {:.1} ns", measurement.baseline_ns);
            report.add(Row { baseline: BASELINE, details, ..Row::new(case, measurement) })?;
        }
    }
    report.remark(format!(
        "typed calls cost at most {:.1} % more than the raw ones; the raw ones themselves differ by up to {:.1} %",
        worst * 100.0,
        noise * 100.0
    ));
    allocator.trim(device.id(), MemPoolId::DEFAULT)?;
    Ok(Verdict::Success)
}

/// Typed calls, and the control, each next to the same raw calls.
struct Compared {
    typed: Measurement,
    control: Measurement,
}

struct BenchContext<'a> {
    device: &'a Device,
    allocator: &'a Arc<dyn DeviceAllocator>,
    stream: &'a Stream,
    /// How many groups of each side.
    groups: u64,
}

impl BenchContext<'_> {
    fn driver(&self) -> &dyn Driver {
        &**self.device.instance().driver()
    }

    fn vector(&self) -> warpool::Result<DeviceVec<u32>> {
        DeviceVec::zeroed(self.allocator, LEN, self.stream)
    }

    /// The untyped equivalent of a vector: allocated for the same stream, so that its uses need not be recorded.
    fn block(&self) -> warpool::Result<DeviceBlock> {
        let block = self.allocator.allocate((LEN * 4) as u64, self.stream)?;
        self.driver().fill(block.ptr(), Pattern::U32(0), LEN as u64, self.stream.id())?;
        Ok(block)
    }

    /// Groups of all three sides in turns.
    fn compare(
        &self,
        mut typed: impl FnMut() -> warpool::Result<()>,
        mut raw: impl FnMut() -> warpool::Result<()>,
        mut control: impl FnMut() -> warpool::Result<()>,
    ) -> warpool::Result<Compared> {
        let mut groups = [(); 3].map(|()| Vec::with_capacity(self.groups as usize));
        for order in ORDERS.iter().cycle().take(self.groups as usize) {
            for &side in order {
                let elapsed = match side {
                    0 => timed(GROUP, &mut typed),
                    1 => timed(GROUP, &mut raw),
                    _ => timed(GROUP, &mut control),
                }?;
                self.stream.synchronize()?;
                groups[side].push(ns_each(elapsed, GROUP));
            }
        }
        let [typed, raw, control] = groups.map(median);
        let next_to_raw = |ns| Measurement { ns, baseline_ns: raw };
        Ok(Compared { typed: next_to_raw(typed), control: next_to_raw(control) })
    }

    fn allocate(&self) -> warpool::Result<Compared> {
        let raw = || {
            move || {
                drop(black_box(self.allocator.allocate((LEN * 4) as u64, self.stream)?));
                Ok(())
            }
        };
        let typed = || {
            drop(black_box(DeviceVec::<u32>::uninit(self.allocator, LEN, self.stream)?));
            Ok(())
        };
        self.compare(typed, raw(), raw())
    }

    fn fill(&self) -> warpool::Result<Compared> {
        let mut vector = self.vector()?;
        let raw = || {
            let block = self.block()?;
            Ok::<_, warpool::Error>(move || {
                Ok(self.driver().fill(block.ptr(), Pattern::U32(7), LEN as u64, self.stream.id())?)
            })
        };
        self.compare(|| self.stream.fill(&mut vector, 7), raw()?, raw()?)
    }

    fn copy(&self) -> warpool::Result<Compared> {
        let (source, mut target) = (self.vector()?, self.vector()?);
        let raw = || {
            let (from, to, bytes) = (self.block()?, self.block()?, (LEN * 4) as u64);
            Ok::<_, warpool::Error>(move || {
                Ok(self.driver().copy(to.ptr().into(), from.ptr().into(), bytes, self.stream.id())?)
            })
        };
        self.compare(|| self.stream.copy(&source, &mut target), raw()?, raw()?)
    }

    fn launch(&self) -> warpool::Result<Compared> {
        const NAME: &str = "warpool_bench_set";
        let shape = LaunchShape::ONE;
        let mut vector = self.vector()?;
        // SAFETY: these are its parameters, and it writes the first element.
        let kernel: Kernel<(PointerMut<u32>, u32)> = unsafe { Kernel::load(self.device, &KERNELS, NAME)? };
        let module = self.driver().module_load(self.device.id(), &KERNELS)?;
        let function = self.driver().function_get(module, NAME)?;
        let raw = || {
            let block = self.block()?;
            Ok::<_, warpool::Error>(move || {
                let args = [block.ptr().into(), 7_u32.into()];
                // SAFETY: these are its parameters, and the block has room for the number.
                Ok(unsafe { self.driver().kernel_launch(function, shape, &args, self.stream.id()) }?)
            })
        };
        let compared = self.compare(|| kernel.launch(self.stream, shape, (&mut vector, 7)), raw()?, raw()?)?;
        self.driver().module_unload(module)?;
        Ok(compared)
    }

    /// Four fills: of vectors that each replay is ordered with, and of blocks that the graph shares.
    fn replay(&self) -> warpool::Result<Compared> {
        let new = || Graph::new(self.allocator, self.device, GraphOptions::default());
        let raw = || {
            let blocks = (0..4).map(|_| self.block().map(Arc::new)).collect::<warpool::Result<Vec<_>>>()?;
            let mut graph = new()?;
            graph.capture(self.stream, CaptureOptions::default(), |capture| {
                let stream = capture.stream().clone();
                blocks.iter().try_for_each(|block| {
                    let key = capture.share(Arc::clone(block))?;
                    capture.fill(key, Pattern::U32(7), LEN as u64, &stream)
                })
            })?;
            Ok::<_, warpool::Error>(move || graph.replay(self.stream))
        };
        let mut vectors = (0..4).map(|_| self.vector()).collect::<warpool::Result<Vec<_>>>()?;
        let mut typed = new()?;
        typed.capture(self.stream, CaptureOptions::default(), |capture| {
            let stream = capture.stream().clone();
            vectors.iter_mut().try_for_each(|vector| stream.fill(vector, 7))
        })?;
        self.compare(|| typed.replay(self.stream), raw()?, raw()?)
    }
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
