//! Cached pinned memory: allocate-free pairs on one thread, and on one thread per core, all with one allocator.
//!
//! Every thread times itself; the time of the slowest is the time of the round. The baseline is measured by the same
//! threads, right before, each with its own mutex. The fastest round of each counts. Before, all threads at once
//! allocate one block of every size, so that blocks of other sizes are cached too.
//!
//! A cached pair must make no driver call. That is checked in a separate pass, with a driver that counts calls.

use std::hint::black_box;
use std::sync::{Arc, Barrier, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;
use warpool::Instance;
use warpool::memory::{HostAllocator, HostBlock, PinnedSettings};
use warpool_driver::Driver;
use warpool_driver::decorate::Counting;

use super::{KIB, MIB};
use crate::bench::measure::{Measurement, mutex_round, ns_each, timed, warm_up};
use crate::bench::{Report, Row};
use crate::output::Result;

/// The target for a cached pair, in baselines.
const PAIR_RATIO_MAX: f64 = 5.0;

/// Rounds per case; the fastest counts.
const ROUNDS: u64 = 25;

const WARM_UP: Duration = Duration::from_millis(500);

/// Pairs per sample of the percentiles: reading the clock takes about as long as one pair.
const SAMPLE_PAIRS: u64 = 10;

/// Samples of the percentiles.
const SAMPLES: usize = 10_000;

/// Pairs per thread and round while calls are counted.
const COUNTED_OPS: u64 = 100;

/// Blocks of the random program per thread, and its length.
const SLOTS: usize = 64;
const STEPS: usize = 1 << 14;

/// A size, and the names of its cases.
struct Size {
    bytes: u64,
    one_thread: &'static str,
    all_threads: &'static str,
}

const SIZES: &[Size] = &[
    Size { bytes: 4 * KIB, one_thread: "cached pair of 4 KiB", all_threads: "cached pair of 4 KiB, all threads" },
    Size { bytes: 64 * KIB, one_thread: "cached pair of 64 KiB", all_threads: "cached pair of 64 KiB, all threads" },
    Size { bytes: MIB, one_thread: "cached pair of 1 MiB", all_threads: "cached pair of 1 MiB, all threads" },
    Size { bytes: 64 * MIB, one_thread: "cached pair of 64 MiB", all_threads: "cached pair of 64 MiB, all threads" },
];

/// Measures every case. Returns those that made driver calls but must not.
pub fn measure(driver: &Arc<dyn Driver>, ops: u64, report: &mut Report<'_>) -> Result<Vec<&'static str>> {
    let counting = Arc::new(Counting::new(Arc::clone(driver)));
    let counted = Instance::new(Arc::clone(&counting) as Arc<dyn Driver>)?;
    let instance = Instance::new(Arc::clone(driver))?;
    let context = BenchContext {
        allocator: HostAllocator::new(&instance, PinnedSettings::default()),
        counted: HostAllocator::new(&counted, PinnedSettings::default()),
        counting,
        threads: thread::available_parallelism().map_or(1, usize::from),
        ops_per_round: ops / ROUNDS,
    };
    let unexpected = context.fixed_sizes(report)?;
    context.random_sizes(report)?;
    context.allocator.close().and(context.counted.close())?;
    Ok(unexpected)
}

/// The setup of the cases.
struct BenchContext {
    allocator: HostAllocator,
    /// Another allocator, whose driver calls are counted.
    counted: HostAllocator,
    counting: Arc<Counting>,
    threads: usize,
    ops_per_round: u64,
}

impl BenchContext {
    fn fixed_sizes(&self, report: &mut Report<'_>) -> Result<Vec<&'static str>> {
        let (mut unexpected, mut worst_one, mut worst_all) = (Vec::new(), 0.0_f64, 0.0_f64);
        warm_up(WARM_UP, || pairs(&self.allocator, 64 * KIB, 1))?;
        let ops = self.ops_per_round.max(1);
        for size in SIZES {
            for (case, threads) in [(size.one_thread, 1), (size.all_threads, self.threads)] {
                let pairs = |allocator: &HostAllocator, ops| pairs(allocator, size.bytes, ops);
                let calls = self.calls(threads, COUNTED_OPS, one_of_each, pairs)?;
                let first = || one_of_each(&self.allocator);
                let measurement = on_threads(threads, ops, first, || (), |ops| pairs(&self.allocator, ops))?;
                let details = if case == size.one_thread {
                    worst_one = worst_one.max(measurement.ratio());
                    let (p50, p99) = percentiles(&self.allocator, size.bytes)?;
                    format!("{calls} driver calls; p50 {p50:.0} ns, p99 {p99:.0} ns (means of {SAMPLE_PAIRS} pairs)")
                } else {
                    worst_all = worst_all.max(measurement.ratio());
                    format!("{calls} driver calls; {threads} threads")
                };
                add(case, measurement, threads, calls, details, report)?;
                if calls > 0 {
                    unexpected.push(case);
                }
            }
        }
        report.remark(format!(
            "a cached pair costs at most {worst_one:.1} times the baseline on one thread and {worst_all:.1} times on \
             {}; target: {PAIR_RATIO_MAX}",
            self.threads
        ));
        Ok(unexpected)
    }

    /// Several threads together may need more memory than ever before, so driver calls are reported, not judged.
    fn random_sizes(&self, report: &mut Report<'_>) -> Result<()> {
        let program = Program::new();
        let passes = (self.ops_per_round / STEPS as u64).max(1);
        for (case, threads) in [("random sizes, per call", 1), ("random sizes, per call, all threads", self.threads)] {
            let calls =
                self.calls(threads, 1, |_| Ok(Vec::new()), |allocator, passes| program.run(allocator, passes))?;
            let work = |passes| program.run(&self.allocator, passes);
            let measurement = on_threads(threads, passes, || Ok(Vec::new()), || (), work)?.per(STEPS);
            let details = format!("{calls} driver calls; 4 KiB to 16 MiB, {SLOTS} slots per thread");
            add(case, measurement, threads, calls, details, report)?;
        }
        Ok(())
    }

    /// The number of driver calls of `work` once everything is cached.
    fn calls(
        &self,
        threads: usize,
        ops: u64,
        first: impl Fn(&HostAllocator) -> warpool::Result<Vec<HostBlock>> + Sync,
        work: impl Fn(&HostAllocator, u64) -> warpool::Result<()> + Sync,
    ) -> warpool::Result<u64> {
        let reset = || self.counting.reset();
        on_threads(threads, ops, || first(&self.counted), reset, |ops| work(&self.counted, ops))?;
        Ok(self.counting.counts().iter().map(|count| count.calls).sum())
    }
}

/// Runs `work` on several threads at once, [`ROUNDS`] times, each with the baseline before it. Before that, all threads
/// at once hold the blocks of `first` and free them, run one round that is not measured, and one thread calls `warmed`.
fn on_threads(
    threads: usize,
    ops: u64,
    first: impl Fn() -> warpool::Result<Vec<HostBlock>> + Sync,
    warmed: impl Fn() + Sync,
    work: impl Fn(u64) -> warpool::Result<()> + Sync,
) -> warpool::Result<Measurement> {
    const ZERO: Measurement = Measurement { ns: 0.0, baseline_ns: 0.0 };
    let (barrier, first_error) = (Barrier::new(threads), Mutex::new(None));
    // Per round, the times of the slowest thread.
    let slowest = Mutex::new([ZERO; ROUNDS as usize]);
    let thread = || {
        let mut rounds = [ZERO; ROUNDS as usize];
        // After an error a thread continues to the barriers, where the others wait for it.
        let keep_error = |result: warpool::Result<()>| {
            if let Err(error) = result {
                first_error.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
            }
        };
        let round = || {
            barrier.wait();
            let start = Instant::now();
            let result = work(ops);
            let elapsed = start.elapsed();
            keep_error(result);
            ns_each(elapsed, ops)
        };
        // All threads hold their blocks at once: otherwise one cached block could serve two threads here, and be
        // missing when both need one at the same time.
        let blocks = first();
        barrier.wait();
        keep_error(blocks.map(drop));
        round();
        if barrier.wait().is_leader() {
            warmed();
        }
        for measurement in &mut rounds {
            barrier.wait();
            let baseline_ns = mutex_round(u32::try_from(ops).unwrap_or(u32::MAX).max(1_000));
            *measurement = Measurement { ns: round(), baseline_ns };
        }
        let mut slowest = slowest.lock().unwrap_or_else(PoisonError::into_inner);
        for (slowest, own) in slowest.iter_mut().zip(rounds) {
            *slowest = slowest.max(own);
        }
    };
    thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(thread))));
    if let Some(error) = first_error.into_inner().unwrap_or_else(PoisonError::into_inner) {
        return Err(error);
    }
    let rounds = slowest.into_inner().unwrap_or_else(PoisonError::into_inner);
    Ok(rounds.into_iter().fold(Measurement::MAX, Measurement::min))
}

/// `ops` allocate-free pairs.
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

/// The median and the 99th percentile of the time of a pair, in nanoseconds, from means of [`SAMPLE_PAIRS`] pairs.
fn percentiles(allocator: &HostAllocator, bytes: u64) -> warpool::Result<(f64, f64)> {
    let mut samples = Vec::with_capacity(SAMPLES);
    for _ in 0..SAMPLES {
        samples.push(ns_each(timed(SAMPLE_PAIRS, || pairs(allocator, bytes, 1))?, SAMPLE_PAIRS));
    }
    samples.sort_by(f64::total_cmp);
    Ok((samples[SAMPLES / 2], samples[SAMPLES * 99 / 100]))
}

/// Slots that are filled and emptied at random, with sizes from 4 KiB to 16 MiB, uniform in magnitude, like the batches
/// of a data loader.
struct Program(Vec<(usize, u64)>);

impl Program {
    fn new() -> Self {
        let mut rng = fastrand::Rng::with_seed(SLOTS as u64);
        let step = |_| {
            let (slot, magnitude) = (rng.usize(..SLOTS), rng.u32(12..24));
            (slot, (1 << magnitude) + rng.u64(..1 << magnitude))
        };
        Self((0..STEPS).map(step).collect())
    }

    /// Runs the whole program `passes` times. Each pass frees all blocks at its end, so that every pass is the same.
    fn run(&self, allocator: &HostAllocator, passes: u64) -> warpool::Result<()> {
        let mut slots: [Option<HostBlock>; SLOTS] = [const { None }; SLOTS];
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

fn add(
    case: &'static str,
    measurement: Measurement,
    threads: usize,
    calls: u64,
    details: String,
    report: &mut Report<'_>,
) -> Result<()> {
    let fields = vec![("threads", json!(threads)), ("driver_calls", json!(calls))];
    report.add(Row { fields, details, ..Row::new(case, measurement) })
}
