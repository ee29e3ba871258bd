//! `warpool bench alloc`: host time of allocating and freeing device memory. An operation is an allocate-free pair, or
//! in the random cases one allocation or one free. Everything is cached before it is timed, so only the driver-pool
//! cases call the driver. The memory is not used. With `--recording`, an operation is one event of the recorded
//! program.

use std::hint::black_box;
use std::path::Path;
use std::sync::{Arc, Barrier, Mutex};
use std::time::{Duration, Instant};

use indicatif::ProgressBar;
use warpool::memory::raw::{Allocation, Request};
use warpool::memory::report::HistoryOptions;
use warpool::memory::{
    CachingAllocator, DeviceAllocator, DeviceBlock, DriverPoolAllocator, MemPoolId, PagedAllocator, Settings,
};
use warpool::{Instance, Stream};
use warpool_driver::{DeviceId, StreamId};
use warpool_trace::replay::Program;

use super::measure::{Measurement, fastest, fastest_of_cores, mutex_round, ns_each, timed, warm_up};
use super::{Args, Report, Row};
use crate::driver;
use crate::inputs;
use crate::output::{CommandError, Result, Verdict};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// The targets for a cached pair of the caching and of the paged allocator, in baselines.
const CACHING_PAIR_MAX: f64 = 15.0;
const PAGED_PAIR_MAX: f64 = 2.0;

/// Rounds per case; the fastest counts.
const ROUNDS: u64 = 25;

/// A case of one thread is then measured on all cores for this long, unless the number of operations is given.
const CASE_DURATION: Duration = Duration::from_millis(500);

/// Without it the first case was often the slowest, whichever it was.
const WARM_UP: Duration = Duration::from_secs(1);

/// Lock-unlock pairs per round of the baseline.
const LOCKS: u32 = 40_000;

/// Pairs of the driver's pools that are timed at once; the stream is synchronized in between, untimed.
const BATCH: u64 = 500;

/// Entries of the history where it is recorded.
const HISTORY_ENTRIES: usize = 100_000;

pub fn run(args: &Args, report: &mut Report<'_>) -> Result<Verdict> {
    let driver = args.open_driver()?;
    let device = driver::device(&*driver, args.device)?;
    driver.set_current_device(device)?;
    let instance = Instance::new(driver)?;
    let stream = instance.device(device.0)?.pool_stream()?;
    let (ops, duration) = args.ops.map_or((1_000_000, CASE_DURATION), |ops| (ops, Duration::ZERO));
    let context = BenchContext { instance, device, stream, ops, duration };
    let programs = args.recordings.iter().map(|file| program(file)).collect::<Result<Vec<_>>>()?;
    if !programs.is_empty() {
        context.replay(programs, report)?;
        return Ok(Verdict::Success);
    }
    context.measure(report)?;
    Ok(Verdict::Success)
}

/// The setup of the cases.
struct BenchContext {
    instance: Instance,
    device: DeviceId,
    stream: Stream,
    /// Operations of a case, in [`ROUNDS`] rounds.
    ops: u64,
    /// How long a case of one thread is repeated on all cores.
    duration: Duration,
}

type SharedAllocator = Arc<dyn DeviceAllocator>;

impl BenchContext {
    /// Runs every case.
    fn measure(&self, report: &mut Report<'_>) -> Result<()> {
        let properties = self.stream.device().properties().clone();
        let allocator = self.caching(Settings::default());
        warm_up(WARM_UP, || pair(&*allocator, self.request(64 * KIB)))?;
        self.slowest_mutex_of_many(report)?;
        let worst = self.cached("", &|| Ok(self.caching(Settings::default())), report)?;
        report.remark(remark("caching", worst, CACHING_PAIR_MAX));
        if properties.virtual_memory {
            let worst = self.cached("paged, ", &|| self.paged(), report)?;
            report.remark(remark("paged", worst, PAGED_PAIR_MAX));
            let expandable = self.caching(Settings { expandable_segments: true, ..Settings::default() });
            report.add(Row::new("expandable, pair of 64 KiB", self.pairs(&expandable, 64 * KIB)?))?;
            report.add(Row::new("expandable, pair of 8 MiB", self.pairs(&expandable, 8 * MIB)?))?;
            let random = self.random(&expandable, 1024)?;
            report.add(Row::new("expandable, random sizes in 1,024 slots, per call", random))?;
            self.empty_cache(&expandable)?;
        } else {
            report.remark("skipped: paged and expandable, since the device has no virtual memory".to_owned());
        }
        if properties.async_pools {
            let pool = Arc::new(DriverPoolAllocator::new(&self.instance)) as SharedAllocator;
            report.add(Row::new("driver-pool, pair of 64 KiB", self.driver_pairs(&pool, 64 * KIB)?))?;
            report.add(Row::new("driver-pool, pair of 8 MiB", self.driver_pairs(&pool, 8 * MIB)?))?;
            self.empty_cache(&pool)?;
        } else {
            report.remark("skipped: driver-pool, since the device has no stream-ordered pools".to_owned());
        }
        Ok(())
    }

    /// The cases of an allocator that caches. Returns the largest ratio of a raw pair.
    fn cached(
        &self,
        kind: &str,
        make: &dyn Fn() -> warpool::Result<SharedAllocator>,
        report: &mut Report<'_>,
    ) -> Result<f64> {
        let mut worst: f64 = 0.0;
        let allocator = make()?;
        for (case, bytes) in [
            ("pair of 512 B", 512),
            ("pair of 64 KiB", 64 * KIB),
            ("pair of 1 MiB", MIB),
            ("pair of 8 MiB", 8 * MIB),
            ("pair of 64 MiB", 64 * MIB),
        ] {
            let measurement = self.pairs(&allocator, bytes)?;
            report.add(Row::new(format!("{kind}{case}"), measurement))?;
            worst = worst.max(measurement.ratio());
        }
        for (case, bytes) in [("owned pair of 64 KiB", 64 * KIB), ("owned pair of 8 MiB", 8 * MIB)] {
            report.add(Row::new(format!("{kind}{case}"), self.owned_pairs(&allocator, bytes)?))?;
        }
        let of_four = self.pairs_on_threads(&allocator, 64 * KIB)?;
        report.add(Row::new(format!("{kind}pair of 64 KiB, 4 threads on own streams"), of_four))?;
        self.empty_cache(&allocator)?;
        // Ended threads affect an allocator: its locks adapt to the threads that use them.
        let allocator = make()?;
        self.slowest_of_many(kind, std::slice::from_ref(&allocator), report)?;
        self.empty_cache(&allocator)?;
        let own = (0..threads()).map(|_| make()).collect::<warpool::Result<Vec<_>>>()?;
        self.slowest_of_many(kind, &own, report)?;
        own.iter().try_for_each(|allocator| self.empty_cache(allocator))?;
        self.longest_of_many(kind, make, report)?;
        for (case, slots) in [
            ("random sizes in 64 slots, per call", 64),
            ("random sizes in 1,024 slots, per call", 1024),
            ("random sizes in 8,192 slots, per call", 8192),
        ] {
            let allocator = make()?;
            report.add(Row::new(format!("{kind}{case}"), self.random(&allocator, slots)?))?;
            self.empty_cache(&allocator)?;
        }
        let recording = make()?;
        let options = HistoryOptions { entries_max: HISTORY_ENTRIES, ..HistoryOptions::default() };
        recording.record_history(Some(options))?;
        let measurement = self.pairs(&recording, 64 * KIB)?;
        report.add(Row::new(format!("{kind}pair of 64 KiB, history of 100,000 entries"), measurement))?;
        self.empty_cache(&recording)?;
        Ok(worst)
    }

    /// Runs recorded programs with each allocator.
    fn replay(&self, mut programs: Vec<(String, Program)>, report: &mut Report<'_>) -> Result<()> {
        let allocator = self.caching(Settings::default());
        warm_up(WARM_UP, || pair(&*allocator, self.request(64 * KIB)))?;
        let properties = self.stream.device().properties().clone();
        let expandable = Settings { expandable_segments: true, ..Settings::default() };
        let mut allocators = vec![("", allocator)];
        if properties.virtual_memory {
            allocators.push(("expandable, ", self.caching(expandable)));
        }
        if properties.virtual_memory {
            allocators.push(("paged, ", self.paged()?));
        }
        if properties.async_pools {
            allocators.push(("driver-pool, ", Arc::new(DriverPoolAllocator::new(&self.instance))));
        }
        for (kind, allocator) in allocators {
            for (name, program) in &mut programs {
                let measurement = self.run_program(&allocator, program)?;
                let case = format!("{kind}replay of {name}, per event");
                let details = format!("{} events", program.events());
                report.add(Row { details, ..Row::new(case, measurement) })?;
                self.empty_cache(&allocator)?;
            }
        }
        Ok(())
    }

    /// A recorded program, after it has run once, so that every segment that it needs is cached.
    fn run_program(&self, allocator: &SharedAllocator, program: &mut Program) -> warpool::Result<Measurement> {
        const PROGRAM_ROUNDS: u64 = 10;
        let device = self.stream.device();
        let leases = (0..=program.streams()).map(|_| device.lease_stream()).collect::<warpool::Result<Vec<_>>>()?;
        let streams: Vec<StreamId> = leases.iter().map(|stream| stream.id()).collect();
        let mut round = || {
            let start = Instant::now();
            program.run(&**allocator, self.device, &streams[1..], streams[0])?;
            let elapsed = start.elapsed();
            program.free_rest(&**allocator)?;
            // So that the driver's pools release memory, and uses on other streams end.
            device.synchronize()?;
            Ok(ns_each(elapsed, program.events()))
        };
        round()?;
        self.fastest_of_one_thread(PROGRAM_ROUNDS, round)
    }

    fn caching(&self, settings: Settings) -> SharedAllocator {
        Arc::new(CachingAllocator::new(&self.instance, settings))
    }

    fn paged(&self) -> warpool::Result<SharedAllocator> {
        Ok(Arc::new(PagedAllocator::new(&self.instance, Settings::default())?))
    }

    fn request(&self, bytes: u64) -> Request {
        Request::new(self.device, self.stream.id(), bytes)
    }

    /// The fastest round of `round`, which takes a number of operations, makes them on this thread, and returns their
    /// time. The first one is not counted.
    fn fastest(&self, mut round: impl FnMut(u64) -> warpool::Result<Duration>) -> warpool::Result<Measurement> {
        let ops = self.round_ops();
        round(ops)?;
        self.fastest_of_one_thread(ROUNDS, || Ok(ns_each(round(ops)?, ops)))
    }

    /// The fastest of some rounds here, and of those on all cores. `round` returns nanoseconds per operation.
    fn fastest_of_one_thread(
        &self,
        rounds: u64,
        mut round: impl FnMut() -> warpool::Result<f64>,
    ) -> warpool::Result<Measurement> {
        let mutex = || Ok(mutex_round(LOCKS));
        let here = fastest(rounds, mutex, &mut round)?;
        Ok(here.min(fastest_of_cores(self.duration, mutex, round)?))
    }

    fn round_ops(&self) -> u64 {
        (self.ops / ROUNDS).max(1)
    }

    fn pairs(&self, allocator: &SharedAllocator, bytes: u64) -> warpool::Result<Measurement> {
        let request = self.request(bytes);
        self.fastest(|ops| timed(ops, || pair(&**allocator, request)))
    }

    fn owned_pairs(&self, allocator: &SharedAllocator, bytes: u64) -> warpool::Result<Measurement> {
        let request = self.request(bytes);
        self.fastest(|ops| {
            timed(ops, || {
                drop(black_box(DeviceBlock::allocate(allocator, request)?));
                Ok(())
            })
        })
    }

    /// The elapsed time of all threads, per pair: with enough cores, a quarter of one thread's.
    fn pairs_on_threads(&self, allocator: &SharedAllocator, bytes: u64) -> warpool::Result<Measurement> {
        const THREADS: u64 = 4;
        let device = self.stream.device();
        let streams = (0..THREADS).map(|_| device.lease_stream()).collect::<warpool::Result<Vec<_>>>()?;
        let ops = self.round_ops();
        let round = || -> warpool::Result<f64> {
            let start = Instant::now();
            std::thread::scope(|scope| {
                let spawn = |stream| {
                    let request = Request::new(self.device, stream, bytes);
                    scope.spawn(move || (0..ops / THREADS).try_for_each(|_| pair(&**allocator, request)))
                };
                let threads: Vec<_> = streams.iter().map(|stream| spawn(stream.id())).collect();
                threads
                    .into_iter()
                    .try_for_each(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            })?;
            Ok(ns_each(start.elapsed(), ops))
        };
        round()?;
        let mutex = || Ok(mutex_round(LOCKS));
        let here = fastest(ROUNDS, mutex, round)?;
        // The threads were on several cores, the baseline on one.
        Ok(here.min(fastest_of_cores(self.duration, mutex, || Ok(f64::INFINITY))?))
    }

    /// Pairs of threads with a stream of their own each, next to one thread. They share an allocator, or have one each:
    /// the slowdown of the latter is the machine's own, for threads that share nothing.
    fn slowest_of_many(&self, kind: &str, allocators: &[SharedAllocator], report: &mut Report<'_>) -> Result<()> {
        let (device, threads) = (self.stream.device(), threads());
        let streams = (0..threads).map(|_| device.lease_stream()).collect::<warpool::Result<Vec<_>>>()?;
        let requests: Vec<_> = streams.iter().map(|stream| Request::new(self.device, stream.id(), 64 * KIB)).collect();
        let allocator = |thread: usize| &*allocators[thread % allocators.len()];
        let measurement = self.slowest_of(threads, &|thread| pair(allocator(thread), requests[thread]))?;
        let own = if allocators.len() > 1 { "with an allocator each" } else { "on own streams" };
        let case = format!("{kind}pair of 64 KiB, the slowest of {threads} threads {own}");
        report.add(Row { baseline: SLOWEST_ALONE, ..Row::new(case, measurement) })
    }

    /// The longest pair of many threads on one stream, which is how long a call waits, next to the same threads with a
    /// mutex around each pair.
    fn longest_of_many(
        &self,
        kind: &str,
        make: &dyn Fn() -> warpool::Result<SharedAllocator>,
        report: &mut Report<'_>,
    ) -> Result<()> {
        const THREADS: u64 = 32;
        const LONGEST_ROUNDS: u64 = 9;
        let (contended, serialized, mutex) = (make()?, make()?, Mutex::new(()));
        let (request, ops) = (self.request(64 * KIB), (self.round_ops() / THREADS).max(1));
        let longest = |operation: &(dyn Fn() -> warpool::Result<()> + Sync)| -> warpool::Result<f64> {
            let run = || -> warpool::Result<Duration> {
                (0..ops).try_fold(Duration::ZERO, |longest, _| Ok(longest.max(timed(1, operation)?)))
            };
            std::thread::scope(|scope| {
                let running: Vec<_> = (0..THREADS).map(|_| scope.spawn(run)).collect();
                running.into_iter().try_fold(0.0_f64, |longest, thread| -> warpool::Result<f64> {
                    let own = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
                    Ok(longest.max(ns_each(own, 1)))
                })
            })
        };
        let with_mutex = || {
            longest(&|| {
                let _held = mutex.lock();
                pair(&*serialized, request)
            })
        };
        let measurement = fastest(LONGEST_ROUNDS, with_mutex, || longest(&|| pair(&*contended, request)))?;
        let case = format!("{kind}longest pair of 64 KiB, {THREADS} threads on one stream");
        report.add(Row { baseline: "the same with a mutex around each pair", ..Row::new(case, measurement) })?;
        self.empty_cache(&contended)?;
        self.empty_cache(&serialized)
    }

    /// The machine's own slowdown for this number of threads that share nothing: two threads on one core are slower
    /// than one.
    fn slowest_mutex_of_many(&self, report: &mut Report<'_>) -> Result<()> {
        /// Two cache lines: processors fetch them in pairs.
        #[repr(align(128))]
        struct Own(Mutex<u64>);
        let threads = threads();
        let own: Vec<Own> = (0..threads).map(|_| Own(Mutex::new(0))).collect();
        let measurement = self.slowest_of(threads, &|thread| {
            if let Ok(mut value) = black_box(&own[thread].0).lock() {
                *value += 1;
            }
            Ok(())
        })?;
        let case = format!("an uncontended mutex, the slowest of {threads} threads with one each");
        report.add(Row { baseline: SLOWEST_ALONE, ..Row::new(case, measurement) })
    }

    /// The slowest of several threads at once, next to the slowest of the same threads run one at a time: the cores of
    /// a machine are not equally fast at the same time, especially virtual ones. The threads are the same in all
    /// rounds, as in a program. `operation` gets the number of the thread.
    fn slowest_of(
        &self,
        threads: usize,
        operation: &(dyn Fn(usize) -> warpool::Result<()> + Sync),
    ) -> warpool::Result<Measurement> {
        let ops = self.round_ops();
        let barrier = &Barrier::new(threads);
        let run = move |thread: usize| {
            // A failed thread still waits for the others at the barriers.
            let mut failed = operation(thread).err();
            let mut time = |takes_part: bool| {
                barrier.wait();
                if !takes_part || failed.is_some() {
                    return 0.0;
                }
                match timed(ops, || operation(thread)) {
                    Ok(elapsed) => ns_each(elapsed, ops),
                    Err(error) => {
                        failed = Some(error);
                        f64::INFINITY
                    }
                }
            };
            let round = |_| {
                let alone = (0..threads).map(|turn| time(thread == turn)).sum();
                Measurement { baseline_ns: alone, ns: time(true) }
            };
            let rounds: Vec<_> = (0..ROUNDS).map(round).collect();
            failed.map_or(Ok(rounds), Err)
        };
        let mut slowest = [Measurement { ns: 0.0, baseline_ns: 0.0 }; ROUNDS as usize];
        std::thread::scope(|scope| {
            let running: Vec<_> = (0..threads).map(|thread| scope.spawn(move || run(thread))).collect();
            for thread in running {
                let own = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
                slowest.iter_mut().zip(own).for_each(|(slowest, own)| *slowest = slowest.max(own));
            }
            Ok(slowest.into_iter().fold(Measurement::MAX, Measurement::min))
        })
    }

    /// Slots that are filled and emptied at random, with sizes from 512 B to 16 MiB, uniform in magnitude.
    fn random(&self, allocator: &SharedAllocator, slots: usize) -> warpool::Result<Measurement> {
        let mut rng = fastrand::Rng::with_seed(slots as u64);
        let program: Vec<(usize, Request)> = (0..1 << 16)
            .map(|_| {
                let (slot, magnitude) = (rng.usize(..slots), rng.u32(9..24));
                (slot, self.request((1 << magnitude) + rng.u64(..1 << magnitude)))
            })
            .collect();
        let mut allocated: Vec<Option<Allocation>> = vec![None; slots];
        // The whole program once, so that every segment that it needs is cached.
        for &(slot, request) in &program {
            step(&**allocator, &mut allocated[slot], request)?;
        }
        let mut steps = program.iter().cycle();
        let measurement = self.fastest(|ops| {
            let start = Instant::now();
            for &(slot, request) in steps.by_ref().take(ops as usize) {
                step(&**allocator, &mut allocated[slot], request)?;
            }
            Ok(start.elapsed())
        })?;
        allocated.into_iter().flatten().try_for_each(|allocation| allocator.free(allocation))?;
        Ok(measurement)
    }

    /// Pairs that call the driver.
    fn driver_pairs(&self, allocator: &SharedAllocator, bytes: u64) -> warpool::Result<Measurement> {
        let request = self.request(bytes);
        self.fastest(|ops| {
            let (mut elapsed, mut left) = (Duration::ZERO, ops);
            while left > 0 {
                let batch = left.min(BATCH);
                elapsed += timed(batch, || pair(&**allocator, request))?;
                self.stream.synchronize()?;
                left -= batch;
            }
            Ok(elapsed)
        })
    }

    /// Returns the cached memory of an allocator to the driver.
    fn empty_cache(&self, allocator: &SharedAllocator) -> Result<()> {
        Ok(allocator.trim(self.device, MemPoolId::DEFAULT).map(drop)?)
    }
}

/// The baseline of rows of many threads.
const SLOWEST_ALONE: &str = "one thread, the slowest of them alone";

/// The number of threads that the machine runs at once, at most 16.
fn threads() -> usize {
    const THREADS_MAX: usize = 16;
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get).min(THREADS_MAX)
}

/// The program of a recording, with the name of the file.
fn program(file: &Path) -> Result<(String, Program)> {
    let opened = inputs::open(file, false, None, &ProgressBar::hidden()).map_err(CommandError::Usage)?;
    let refused = |error| CommandError::Usage(inputs::replay_error(file, &error));
    let program = Program::new(&opened.recording.snapshot).map_err(refused)?;
    let name = file.file_name().unwrap_or(file.as_os_str()).to_string_lossy();
    Ok((name.split('.').take(2).collect::<Vec<_>>().join("."), program))
}

fn remark(allocator: &str, worst: f64, target: f64) -> String {
    format!(
        "{allocator}: a cached pair through the raw interface costs at most {worst:.1} times the baseline; \
         target: {target}"
    )
}

/// An allocation and its free, by address.
fn pair(allocator: &dyn DeviceAllocator, request: Request) -> warpool::Result<()> {
    // Without a copy of the allocation, which would be measured too.
    let ptr = allocator.allocate_raw(request)?.ptr;
    allocator.free_raw(black_box(ptr))
}

/// Frees the slot's allocation if it has one; allocates if not.
fn step(allocator: &dyn DeviceAllocator, slot: &mut Option<Allocation>, request: Request) -> warpool::Result<()> {
    match slot.take() {
        Some(allocation) => allocator.free_raw(allocation.ptr),
        None => {
            *slot = Some(allocator.allocate_raw(request)?);
            Ok(())
        }
    }
}
