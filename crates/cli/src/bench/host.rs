//! `warpool bench host`: what pinned host memory costs the host: cached, in `host.rs`; pinned for the first time, in
//! `host_cold.rs`.
//!
//! Cached pairs are taken from one thread and from as many as the machine runs at once, all of them on one allocator.
//! Every thread times itself over a number of pairs; the slowest one's time per pair is what the round took. The
//! baseline is taken by the same threads in the same way, right before, each with a mutex of its own. Of both the
//! quickest round counts. Before, all threads at once had one block of every size: what is cached beside the size in
//! question is part of the case.
//!
//! A cached pair must make no driver call. That is counted in a second pass, with a driver that counts.

use std::hint::black_box;
use std::sync::{Arc, Barrier, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;
use warpool::memory::{HostAllocator, HostBlock, PinnedSettings};
use warpool::{Device, Instance};
use warpool_driver::Driver;
use warpool_driver::decorate::Counting;
use warpool_driver::sim::SimDriver;

use super::measure::{Baseline, ns_each};
use super::{Args, Row, Rows, host_cold};
use crate::driver::{self, NAMES};
use crate::output::{CommandError, Result, Verdict};

pub const KIB: u64 = 1 << 10;
pub const MIB: u64 = 1 << 20;

/// What a cached pair should stay within, in baselines.
const PAIR_RATIO_MAX: f64 = 5.0;

/// Time is taken so often.
const ROUNDS: u64 = 25;

/// How long it works before time is taken.
const WARM_UP: Duration = Duration::from_millis(500);

/// How many pairs are timed in one go where their spread is shown: taking the time costs about as much as a pair.
const SPREAD_BATCH: u64 = 10;

/// How many such goes there are.
const SPREAD_BATCHES: usize = 10_000;

/// How many pairs each thread does while calls are counted, per round.
const COUNTED_OPS: u64 = 100;

/// How many blocks a random program has at a time, and how many steps it takes until it begins anew.
const SLOTS: u64 = 64;
const STEPS: usize = 1 << 14;

pub fn run(args: &Args, rows: &mut Rows<'_>) -> Result<Verdict> {
    let Some(name) = args.driver.as_deref() else {
        return Err(CommandError::Usage(format!("'bench host' needs --driver: one of {}", NAMES.join(", "))));
    };
    let driver: Arc<dyn Driver> = match name {
        // As in `bench alloc`: a real driver does not listen to notes either.
        "sim" => Arc::new(SimDriver::new(args.sim.config(0).without_suballocation_tracking())),
        _ => driver::open(name, &args.sim, 0)?,
    };
    let device = driver::device(&*driver, args.device)?;
    // Pinning makes no context, so there must be one.
    driver.context_retain(device)?;
    driver.set_current_device(device)?;
    let counting = Arc::new(Counting::new(Arc::clone(&driver)));
    let counted = Instance::new(Arc::clone(&counting) as Arc<dyn Driver>)?;
    let instance = Instance::new(driver)?;
    let threads = thread::available_parallelism().map_or(1, usize::from);
    let device = instance.device(device.0)?;
    let bench = Bench { instance, counted, counting, device, threads, ops: args.ops.unwrap_or(1_000_000) };
    let called = bench.cached(rows)?;
    let mutex = (rows.baseline.ns, rows.baseline_name);
    host_cold::measure(&bench.device, rows)?;
    // The title names the baseline of the first rows.
    (rows.baseline.ns, rows.baseline_name) = mutex;
    bench.instance.driver().context_release(bench.device.id())?;
    if called.is_empty() {
        return Ok(Verdict::Success);
    }
    rows.remark(format!("these called the driver, and must not: {}", called.join(", ")));
    Ok(Verdict::Failure)
}

/// What the cases work with.
struct Bench {
    instance: Instance,
    /// The same devices, with every call counted.
    counted: Instance,
    counting: Arc<Counting>,
    device: Device,
    threads: usize,
    ops: u64,
}

/// A size, and what its rows are called.
struct Size {
    bytes: u64,
    alone: &'static str,
    together: &'static str,
}

const SIZES: &[Size] = &[
    Size { bytes: 4 * KIB, alone: "cached pair of 4 KiB", together: "cached pair of 4 KiB, all threads" },
    Size { bytes: 64 * KIB, alone: "cached pair of 64 KiB", together: "cached pair of 64 KiB, all threads" },
    Size { bytes: MIB, alone: "cached pair of 1 MiB", together: "cached pair of 1 MiB, all threads" },
    Size { bytes: 64 * MIB, alone: "cached pair of 64 MiB", together: "cached pair of 64 MiB, all threads" },
];

impl Bench {
    /// Measures what is cached. Returns the cases that called the driver and should not have.
    fn cached(&self, rows: &mut Rows<'_>) -> Result<Vec<&'static str>> {
        let allocator = HostAllocator::new(&self.instance, PinnedSettings::default());
        let counted = HostAllocator::new(&self.counted, PinnedSettings::default());
        let (mut called, mut worst) = (Vec::new(), [0.0_f64; 2]);
        warm_up(&allocator)?;
        for size in SIZES {
            for (many, case, threads) in [(0, size.alone, 1), (1, size.together, self.threads)] {
                let pairs = |allocator: &HostAllocator, ops| pairs(allocator, size.bytes, ops);
                let calls = self.calls(&counted, threads, COUNTED_OPS, one_of_each, pairs)?;
                let ops = (self.ops / ROUNDS).max(1);
                let (ns, baseline) =
                    together(threads, ops, || one_of_each(&allocator), || (), |ops| pairs(&allocator, ops))?;
                let besides = if many == 0 {
                    let (p50, p99) = spread(&allocator, size.bytes)?;
                    format!("{calls} driver calls; p50 {p50:.0} ns, p99 {p99:.0} ns, in tens")
                } else {
                    format!("{calls} driver calls; {threads} threads")
                };
                worst[many] = worst[many].max(ns / baseline);
                show(case, (ns, baseline), threads, calls, besides, rows)?;
                if calls > 0 {
                    called.push(case);
                }
            }
        }
        rows.remark(format!(
            "a cached pair costs at most {:.1} times the baseline from one thread and {:.1} times from {}; {PAIR_RATIO_MAX} is the aim",
            worst[0], worst[1], self.threads
        ));
        let program = Program::new();
        for (case, threads) in [("random sizes, per call", 1), ("random sizes, per call, all threads", self.threads)] {
            let passes = (self.ops / ROUNDS / STEPS as u64).max(1);
            // Several threads may meet so that more memory is needed than ever before; so the calls are shown, not
            // judged.
            let calls =
                self.calls(&counted, threads, 1, |_| Ok(Vec::new()), |allocator, ops| program.run(allocator, ops))?;
            let (ns, baseline) =
                together(threads, passes, || Ok(Vec::new()), || (), |passes| program.run(&allocator, passes))?;
            let besides = format!("{calls} driver calls; 4 KiB to 16 MiB in {SLOTS} slots of each thread");
            show(case, (ns / STEPS as f64, baseline), threads, calls, besides, rows)?;
        }
        allocator.close().and(counted.close())?;
        Ok(called)
    }

    /// How many driver calls `work` makes once everything is cached.
    fn calls(
        &self,
        allocator: &HostAllocator,
        threads: usize,
        ops: u64,
        first: impl Fn(&HostAllocator) -> warpool::Result<Vec<HostBlock>> + Sync,
        work: impl Fn(&HostAllocator, u64) -> warpool::Result<()> + Sync,
    ) -> warpool::Result<u64> {
        together(threads, ops, || first(allocator), || self.counting.reset(), |ops| work(allocator, ops))?;
        Ok(self.counting.counts().iter().map(|count| count.calls).sum())
    }
}

/// Runs `work` on several threads at once, `ROUNDS` times, each time with the baseline before it; as described at the
/// top. What `first` gives all threads have at once, and then give back; one more round comes before all others, for
/// everything that is done only once, and behind it `warmed` is called. Returns nanoseconds of one operation, and of
/// one of the baseline.
fn together(
    threads: usize,
    ops: u64,
    first: impl Fn() -> warpool::Result<Vec<HostBlock>> + Sync,
    warmed: impl Fn() + Sync,
    work: impl Fn(u64) -> warpool::Result<()> + Sync,
) -> warpool::Result<(f64, f64)> {
    let (barrier, failed) = (Barrier::new(threads), Mutex::new(None));
    // The time of the slowest thread, per round: the work's and the baseline's.
    let slowest = Mutex::new([(0.0_f64, 0.0_f64); ROUNDS as usize]);
    let thread = || {
        let mut times = [(0.0, 0.0); ROUNDS as usize];
        // A thread that failed goes on meeting the others: they wait for it.
        let note = |outcome: warpool::Result<()>| {
            if let Err(error) = outcome {
                failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
            }
        };
        let go = |ops| {
            barrier.wait();
            let begun = Instant::now();
            let outcome = work(ops);
            let elapsed = begun.elapsed();
            note(outcome);
            ns_each(elapsed, ops)
        };
        // All at once: nobody's block must serve for two, or one is missing when they want them at the same moment.
        let blocks = first();
        barrier.wait();
        note(blocks.map(drop));
        go(ops);
        if barrier.wait().is_leader() {
            warmed();
        }
        for (took, baseline) in &mut times {
            barrier.wait();
            *baseline = Baseline::round(u32::try_from(ops).unwrap_or(u32::MAX).max(1_000));
            *took = go(ops);
        }
        let mut slowest = slowest.lock().unwrap_or_else(PoisonError::into_inner);
        for (slowest, own) in slowest.iter_mut().zip(times) {
            *slowest = (slowest.0.max(own.0), slowest.1.max(own.1));
        }
    };
    thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(thread))));
    if let Some(error) = failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
        return Err(error);
    }
    let rounds = slowest.into_inner().unwrap_or_else(PoisonError::into_inner);
    let quickest = |least: (f64, f64), round: (f64, f64)| (least.0.min(round.0), least.1.min(round.1));
    Ok(rounds.into_iter().fold((f64::INFINITY, f64::INFINITY), quickest))
}

/// A block, and back, so many times.
fn pairs(allocator: &HostAllocator, bytes: u64, ops: u64) -> warpool::Result<()> {
    for _ in 0..ops {
        drop(black_box(allocator.allocate(bytes)?));
    }
    Ok(())
}

/// One block of every size.
fn one_of_each(allocator: &HostAllocator) -> warpool::Result<Vec<HostBlock>> {
    SIZES.iter().map(|size| allocator.allocate(size.bytes)).collect()
}

/// Half of the pairs take less than the first, in nanoseconds, and all but one in a hundred less than the second; by
/// means of ten pairs.
fn spread(allocator: &HostAllocator, bytes: u64) -> warpool::Result<(f64, f64)> {
    let mut times = Vec::with_capacity(SPREAD_BATCHES);
    for _ in 0..SPREAD_BATCHES {
        let begun = Instant::now();
        pairs(allocator, bytes, SPREAD_BATCH)?;
        times.push(ns_each(begun.elapsed(), SPREAD_BATCH));
    }
    times.sort_by(f64::total_cmp);
    Ok((times[SPREAD_BATCHES / 2], times[SPREAD_BATCHES * 99 / 100]))
}

/// Works until the processor has come to its pace.
fn warm_up(allocator: &HostAllocator) -> warpool::Result<()> {
    let begun = Instant::now();
    while begun.elapsed() < WARM_UP {
        pairs(allocator, 64 * KIB, 1_000)?;
    }
    Ok(())
}

/// Slots that are filled and emptied at random, with sizes from 4 KiB to 16 MiB, as many of each magnitude, as the
/// batches of a data loader come and go.
struct Program(Vec<(usize, u64)>);

impl Program {
    fn new() -> Self {
        let mut luck = super::alloc::Luck(SLOTS);
        let step = |_| {
            let (slot, magnitude) = (luck.below(SLOTS) as usize, 12 + luck.below(12));
            (slot, (1 << magnitude) + luck.below(1 << magnitude))
        };
        Self((0..STEPS).map(step).collect())
    }

    /// Runs it from the beginning, so many times. Empties every slot behind it: the next pass finds what this one
    /// found.
    fn run(&self, allocator: &HostAllocator, passes: u64) -> warpool::Result<()> {
        let mut slots: [Option<HostBlock>; SLOTS as usize] = [const { None }; SLOTS as usize];
        for _ in 0..passes {
            for &(slot, bytes) in &self.0 {
                slots[slot] = match slots[slot].take() {
                    Some(_freed) => None,
                    None => Some(allocator.allocate(bytes)?),
                };
            }
            slots.fill_with(|| None);
        }
        Ok(())
    }
}

fn show(
    case: &'static str,
    (ns, baseline): (f64, f64),
    threads: usize,
    calls: u64,
    besides: String,
    rows: &mut Rows<'_>,
) -> Result<()> {
    rows.baseline.ns = baseline;
    rows.add(Row { case, ns, extra: vec![("threads", json!(threads)), ("driver_calls", json!(calls))], besides })
}
