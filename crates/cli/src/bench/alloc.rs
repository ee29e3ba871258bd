//! `warpool bench alloc`: what allocating and freeing device memory costs the host. An operation is a pair, or in the
//! random cases one allocation or one free. Everything that is asked for is cached before time is taken, so no case but
//! those of the driver's own pools calls the driver. Nothing is done with the memory.

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use warpool::memory::{
    Allocation, Block, CachingAllocator, DeviceAllocator, DriverPoolAllocator, HistoryOptions, MemPoolId, Request,
    Settings,
};
use warpool::{Instance, Stream};
use warpool_driver::sim::SimDriver;
use warpool_driver::{DeviceId, Driver};

use super::measure::{Baseline, ns_each};
use super::{Args, Row, Rows};
use crate::driver::{self, NAMES};
use crate::output::{CommandError, Result, Verdict};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// What a cached pair should stay within, in baselines.
const PAIR_RATIO_MAX: f64 = 15.0;

/// Time is taken so often, each time of the baseline too, right before: on a machine with other work both are disturbed
/// alike. Of each the quickest round counts.
const ROUNDS: u64 = 25;

/// How long it works before time is taken.
const WARM_UP: Duration = Duration::from_secs(1);

/// How many locks a round of the baseline takes.
const LOCKS: u32 = 40_000;

/// How many pairs of the driver's own pools are timed in one go; the device catches up in between, outside the time.
const BATCH: u64 = 500;

/// How many entries the history's ring has where one is recorded.
const HISTORY_ENTRIES: usize = 100_000;

pub fn run(args: &Args, rows: &mut Rows<'_>) -> Result<Verdict> {
    let Some(name) = args.driver.as_deref() else {
        return Err(CommandError::Usage(format!("'bench alloc' needs --driver: one of {}", NAMES.join(", "))));
    };
    let driver: Arc<dyn Driver> = match name {
        // A real driver does not listen to notes either; who reads them pays for hazards, not for allocating.
        "sim" => Arc::new(SimDriver::new(args.sim.config(0).without_suballocation_tracking())),
        _ => driver::open(name, &args.sim, 0)?,
    };
    let device = driver::device(&*driver, args.device)?;
    driver.set_current_device(device)?;
    let instance = Instance::new(driver)?;
    let ops = args.ops.unwrap_or(1_000_000);
    let bench = Bench { stream: instance.device(device.0).and_then(|it| it.pool_stream())?, instance, device, ops };
    let worst = measure(&bench, rows)?;
    rows.remark(format!(
        "a pair of a cached block through the raw interface costs at most {worst:.1} times the baseline; {PAIR_RATIO_MAX} is the aim"
    ));
    Ok(Verdict::Success)
}

/// What the cases work with.
struct Bench {
    instance: Instance,
    device: DeviceId,
    stream: Stream,
    ops: u64,
}

type Shared = Arc<dyn DeviceAllocator>;

/// Runs every case. Returns the largest ratio of a raw pair.
fn measure(bench: &Bench, rows: &mut Rows<'_>) -> Result<f64> {
    let caching = || Arc::new(CachingAllocator::new(&bench.instance, Settings::default())) as Shared;
    let mut worst: f64 = 0.0;
    let allocator = caching();
    bench.warm_up(&allocator)?;
    for (case, bytes) in [
        ("pair of 512 B", 512),
        ("pair of 64 KiB", 64 * KIB),
        ("pair of 1 MiB", MIB),
        ("pair of 8 MiB", 8 * MIB),
        ("pair of 64 MiB", 64 * MIB),
    ] {
        worst = worst.max(bench.pairs(&allocator, bytes).show(case, rows)?);
    }
    for (case, bytes) in [("owned pair of 64 KiB", 64 * KIB), ("owned pair of 8 MiB", 8 * MIB)] {
        bench.owned_pairs(&allocator, bytes).show(case, rows)?;
    }
    bench.pairs_on_threads(&allocator, 64 * KIB).show("pair of 64 KiB, 4 threads on own streams", rows)?;
    bench.give_back(&allocator)?;
    for (case, slots) in [
        ("random sizes in 64 slots, per call", 64),
        ("random sizes in 1,024 slots, per call", 1024),
        ("random sizes in 8,192 slots, per call", 8192),
    ] {
        let allocator = caching();
        bench.random(&allocator, slots).show(case, rows)?;
        bench.give_back(&allocator)?;
    }

    let recording = caching();
    let options = HistoryOptions { entries_max: HISTORY_ENTRIES, ..HistoryOptions::default() };
    recording.record_history(Some(options))?;
    bench.pairs(&recording, 64 * KIB).show("pair of 64 KiB, history of 100,000 entries", rows)?;
    bench.give_back(&recording)?;

    let properties = bench.stream.device().properties().clone();
    if properties.virtual_memory {
        let settings = Settings { expandable_segments: true, ..Settings::default() };
        let growing = Arc::new(CachingAllocator::new(&bench.instance, settings)) as Shared;
        bench.pairs(&growing, 64 * KIB).show("expandable, pair of 64 KiB", rows)?;
        bench.pairs(&growing, 8 * MIB).show("expandable, pair of 8 MiB", rows)?;
        bench.random(&growing, 1024).show("expandable, random sizes in 1,024 slots, per call", rows)?;
        bench.give_back(&growing)?;
    } else {
        rows.remark("left out: expandable, since the device has no virtual memory".to_owned());
    }
    if properties.async_pools {
        let pool = Arc::new(DriverPoolAllocator::new(&bench.instance)) as Shared;
        bench.driver_pairs(&pool, 64 * KIB).show("driver-pool, pair of 64 KiB", rows)?;
        bench.driver_pairs(&pool, 8 * MIB).show("driver-pool, pair of 8 MiB", rows)?;
        bench.give_back(&pool)?;
    } else {
        rows.remark("left out: driver-pool, since the device has no stream-ordered pools".to_owned());
    }
    Ok(worst)
}

/// What one operation took, and the baseline beside it, in nanoseconds; or why it could not be measured.
type Measured = warpool::Result<(f64, f64)>;

/// Makes a row of what was measured.
trait Show {
    /// Adds the row, and returns the ratio to the baseline.
    fn show(self, case: &'static str, rows: &mut Rows<'_>) -> Result<f64>;
}

impl Show for Measured {
    fn show(self, case: &'static str, rows: &mut Rows<'_>) -> Result<f64> {
        let (ns, baseline) = self?;
        rows.baseline.ns = baseline;
        rows.add(Row { case, ns, extra: Vec::new(), besides: String::new() })?;
        Ok(ns / baseline)
    }
}

impl Bench {
    fn request(&self, bytes: u64) -> Request {
        Request::new(self.device, self.stream.id(), bytes)
    }

    /// Runs `round` with a number of operations, several times, with the baseline in between.
    fn least(&self, mut round: impl FnMut(u64) -> warpool::Result<Duration>) -> Measured {
        let ops = (self.ops / ROUNDS).max(1);
        round(ops)?;
        let mut least = (f64::INFINITY, f64::INFINITY);
        for _ in 0..ROUNDS {
            let baseline = Baseline::round(LOCKS);
            least = (least.0.min(ns_each(round(ops)?, ops)), least.1.min(baseline));
        }
        Ok(least)
    }

    /// Works until the processor has come to its pace: the first case of a run was often the slowest, whichever it was.
    fn warm_up(&self, allocator: &Shared) -> warpool::Result<()> {
        let begun = Instant::now();
        while begun.elapsed() < WARM_UP {
            (0..10_000).try_for_each(|_| pair(&**allocator, self.request(64 * KIB)))?;
        }
        Ok(())
    }

    fn pairs(&self, allocator: &Shared, bytes: u64) -> Measured {
        let request = self.request(bytes);
        self.least(|ops| {
            let begun = Instant::now();
            for _ in 0..ops {
                pair(&**allocator, request)?;
            }
            Ok(begun.elapsed())
        })
    }

    fn owned_pairs(&self, allocator: &Shared, bytes: u64) -> Measured {
        let request = self.request(bytes);
        self.least(|ops| {
            let begun = Instant::now();
            for _ in 0..ops {
                drop(black_box(Block::allocate(allocator, request)?));
            }
            Ok(begun.elapsed())
        })
    }

    /// The time for all threads, per pair: with as many cores, a quarter of one thread's.
    fn pairs_on_threads(&self, allocator: &Shared, bytes: u64) -> Measured {
        const THREADS: u64 = 4;
        let device = self.stream.device();
        let streams = (0..THREADS).map(|_| device.lease_stream()).collect::<warpool::Result<Vec<_>>>()?;
        self.least(|ops| {
            let begun = Instant::now();
            std::thread::scope(|scope| {
                let work = |stream| {
                    let request = Request::new(self.device, stream, bytes);
                    scope.spawn(move || (0..ops / THREADS).try_for_each(|_| pair(&**allocator, request)))
                };
                let threads: Vec<_> = streams.iter().map(|stream| work(stream.id())).collect();
                threads
                    .into_iter()
                    .try_for_each(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            })?;
            Ok(begun.elapsed())
        })
    }

    /// Slots that are filled and emptied at random, with sizes from 512 B to 16 MiB, as many of each magnitude.
    fn random(&self, allocator: &Shared, slots: usize) -> Measured {
        let mut luck = Luck(slots as u64);
        let program: Vec<(usize, Request)> = (0..1 << 16)
            .map(|_| {
                let (slot, magnitude) = (luck.below(slots as u64) as usize, 9 + luck.below(15));
                (slot, self.request((1 << magnitude) + luck.below(1 << magnitude)))
            })
            .collect();
        let mut held: Vec<Option<Allocation>> = vec![None; slots];
        // Once through the whole program, until every segment that it needs is there.
        for &(slot, request) in &program {
            step(&**allocator, &mut held[slot], request)?;
        }
        let mut steps = program.iter().cycle();
        let ns = self.least(|ops| {
            let begun = Instant::now();
            for &(slot, request) in steps.by_ref().take(ops as usize) {
                step(&**allocator, &mut held[slot], request)?;
            }
            Ok(begun.elapsed())
        })?;
        held.into_iter().flatten().try_for_each(|given| allocator.free(given))?;
        Ok(ns)
    }

    /// Pairs that call the driver.
    fn driver_pairs(&self, allocator: &Shared, bytes: u64) -> Measured {
        let request = self.request(bytes);
        self.least(|ops| {
            let mut elapsed = Duration::ZERO;
            let mut left = ops;
            while left > 0 {
                let batch = left.min(BATCH);
                let begun = Instant::now();
                for _ in 0..batch {
                    pair(&**allocator, request)?;
                }
                elapsed += begun.elapsed();
                self.stream.synchronize()?;
                left -= batch;
            }
            Ok(elapsed)
        })
    }

    /// Ends an allocator's cases: what it has cached goes back.
    fn give_back(&self, allocator: &Shared) -> Result<()> {
        Ok(allocator.trim(self.device, MemPoolId::DEFAULT).map(drop)?)
    }
}

/// An allocation and its free, by address.
fn pair(allocator: &dyn DeviceAllocator, request: Request) -> warpool::Result<()> {
    let given = black_box(allocator.allocate_raw(request)?);
    allocator.free_raw(given.ptr)
}

/// Empties a slot that is full, fills one that is empty.
fn step(allocator: &dyn DeviceAllocator, slot: &mut Option<Allocation>, request: Request) -> warpool::Result<()> {
    match slot.take() {
        Some(given) => allocator.free_raw(given.ptr),
        None => {
            *slot = Some(allocator.allocate_raw(request)?);
            Ok(())
        }
    }
}

/// Random numbers from a seed (`SplitMix64`).
pub struct Luck(pub u64);

impl Luck {
    pub fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % n
    }
}
