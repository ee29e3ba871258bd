//! Threads on one allocator of device memory and one of pinned memory, with streams of their own and shared ones,
//! blocks and typed vectors that are passed between threads, captures, little memory, faults and trims at any time.
//! Some programs fork meanwhile. The interleaving differs from run to run; the checks hold for all.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use warpool::driver::decorate::FaultPlan;
use warpool::driver::sim::{SimConfig, SimDriver};
use warpool::driver::{Call, CaptureMode, CaptureState, Captures as _, ErrorCode, HostMemory as _, HostPtr};
use warpool::graph::{CaptureOptions, Graph, GraphOptions};
use warpool::memory::pools::PoolOptions;
use warpool::memory::{
    Allocate as _, CachingAllocator, DeviceAllocator, DeviceBlock, DriverPoolAllocator, HostAllocator, HostBlock,
    MemPool, MemPoolId, PagedAllocator, PinnedSettings, Settings,
};
use warpool::typed::BufferError;
use warpool::{DeviceVec, Error, Instance, Stream};

use crate::allocators::{draw_paged, draw_settings};
use crate::caught::{Caught, caught};
use crate::contention;
use crate::context::Context;
use crate::counts::Counts;
use crate::machine::{Machine, device_id, is_counted};
use crate::racing;
use crate::replays;
use crate::rng::Rng;
use crate::unsafe_calls::in_child;

const THREADS: usize = 4;
/// Streams for work. Each thread has one more for captures, since work of another thread in it would be captured too.
const STREAMS_EACH: usize = 2;
/// Streams that all threads put work into.
const STREAMS_SHARED: usize = 2;
const MIB: u64 = 1 << 20;
/// How long a capture may take to end, with faults.
const END_TIMEOUT: Duration = Duration::from_secs(60);

/// The state shared by the threads.
struct Shared {
    machine: Machine,
    allocator: Arc<dyn DeviceAllocator>,
    caching: Option<Arc<CachingAllocator>>,
    paged: Option<Arc<PagedAllocator>>,
    host: HostAllocator,
    exchange: Mutex<Vec<Tagged>>,
    vectors: Mutex<Vec<Filled>>,
    allocated: AtomicU64,
    out_of_memory: AtomicU64,
    /// The most that may ever be reserved.
    reserved_max: u64,
    /// Whether driver calls are made to fail: then errors are not violations.
    faults: bool,
    has_vectors: bool,
    /// Whether it is not known how many blocks were allocated.
    unknown: AtomicBool,
}

/// A block with a tag, which may be passed to another thread.
struct Tagged {
    block: DeviceBlock,
    tag: u32,
    stream: Stream,
}

/// A typed vector, and the value of all its elements.
struct Filled {
    vector: DeviceVec<u32>,
    value: u32,
}

/// Runs one program.
pub fn run(context: &mut Context) {
    if context.rng.one_in(3) {
        return match context.rng.below(3) {
            0 => contention::run(context),
            1 => racing::run(context),
            _ => replays::threads::run(context),
        };
    }
    let machine = Machine::new(context, 1, THREADS * (STREAMS_EACH + 1) + STREAMS_SHARED);
    let mut settings = draw_settings(&mut context.rng);
    let cap = 100 * MIB;
    settings.memory_cap_bytes = Some(cap);
    // The limit is compared with the request, but an expandable segment grows by whole chunks.
    let chunk = if settings.expandable_segments { settings.large_segment_bytes } else { 0 };
    context.step(settings.to_conf_string());
    let mut pinned = PinnedSettings { use_background_threads: context.rng.one_in(3), ..PinnedSettings::default() };
    pinned.cap_bytes = context.rng.one_in(2).then_some(64 * MIB);
    let host = HostAllocator::new(&machine.instance, pinned);
    let mut paged = None;
    let (caching, allocator): (_, Arc<dyn DeviceAllocator>) = if context.rng.one_in(6) {
        (None, Arc::new(DriverPoolAllocator::with_settings(&machine.instance, settings)))
    } else if context.rng.one_in(3) {
        let made = Arc::new(draw_paged(&mut context.rng, &machine.instance, settings));
        paged = Some(made.clone());
        (None, made)
    } else {
        let caching = Arc::new(CachingAllocator::new(&machine.instance, settings));
        (Some(caching.clone()), caching)
    };
    let (faults, has_vectors) = (context.rng.one_in(2), !context.rng.one_in(3));
    let shared = Shared {
        machine,
        allocator,
        caching,
        paged,
        host,
        exchange: Mutex::default(),
        vectors: Mutex::default(),
        allocated: AtomicU64::new(0),
        out_of_memory: AtomicU64::new(0),
        reserved_max: cap + chunk,
        faults,
        has_vectors,
        unknown: AtomicBool::new(false),
    };
    if faults {
        let code = context.rng.pick(&[ErrorCode::OutOfMemory, ErrorCode::NotPermitted, ErrorCode::Unknown(999)]);
        let fraction = context.rng.pick(&[0.002, 0.02, 0.1]);
        context.step(format!("{fraction} of the driver calls fail with {code:?}, typed vectors {has_vectors}"));
        // If the capture state of a stream is not known, typed memory that may be in a capture is leaked.
        let may_fail = |call: &Call| !has_vectors || *call != Call::CaptureState;
        let calls: Vec<Call> = Call::ALL.iter().copied().filter(may_fail).collect();
        shared.machine.faulty.set_plan(FaultPlan::new().fail_fraction(&calls, fraction, context.rng.u64(), code));
    }
    let (rounds, seed) = (100 + context.rng.below(300), context.seed);
    let forks = if context.rng.one_in(6) { 1 + context.rng.below(4) } else { 0 };
    let outcomes: Vec<Result<Counts, Caught>> = std::thread::scope(|scope| {
        let shared = &shared;
        let threads: Vec<_> = (0..THREADS)
            .map(|thread| {
                let rng = Rng::new(seed ^ (thread as u64 + 1).wrapping_mul(0x9e37_79b9));
                scope.spawn(move || caught(|| Worker::new(shared, thread, rng).run(rounds)))
            })
            .collect();
        for _ in 0..forks {
            fork(shared);
        }
        // Joined explicitly, so that the threads' destructors, above all of their front caches, have run.
        threads.into_iter().map(|thread| thread.join().expect("panics are caught")).collect()
    });
    shared.machine.suspend();
    context.counts.faults += shared.machine.faulty.injected().len() as u64;
    for outcome in outcomes {
        match outcome {
            Ok(counts) => context.counts += counts,
            Err(Caught::Failed(message)) => panic!("{message}"),
            Err(Caught::Injected) => panic!("a panic that nobody injected"),
        }
    }
    close(shared);
}

/// A child of the process, while other threads hold locks: it gets errors, frees nothing, does not hang, and can have
/// an allocator of its own.
fn fork(shared: &Shared) {
    let stream = shared.machine.stream(0, 0);
    let passed = in_child(|| {
        let refused = is_forked(shared.allocator.allocate(5000, stream))
            && is_forked(shared.host.allocate(5000))
            && is_forked(shared.allocator.stats(device_id(0)))
            && is_forked(stream.synchronize())
            && is_forked(DeviceVec::<u32>::zeroed(&shared.allocator, 10, stream));
        let own = Instance::new(Arc::new(SimDriver::new(SimConfig::default())));
        let works = own.and_then(|own| {
            let caching = Arc::new(CachingAllocator::new(&own, Settings::default()));
            let stream = own.device(0)?.pool_stream()?;
            DeviceVec::<u32>::zeroed(&caching, 10, &stream)?.to_vec(&stream)
        });
        refused && works == Ok(vec![0; 10])
    });
    assert!(passed, "a forked child hung, or used what its parent has");
}

fn is_forked<T>(result: warpool::Result<T>) -> bool {
    result.is_err_and(|error| error.driver().is_some_and(|error| error.code == ErrorCode::NotInitialized))
}

/// Closes everything, and checks that nothing is left.
fn close(shared: Shared) {
    let Shared { machine, allocator, caching, paged, host, exchange, vectors, allocated, unknown, .. } = shared;
    let (faults, out_of_memory, reserved_max) = (shared.faults, shared.out_of_memory, shared.reserved_max);
    drop((exchange, vectors));
    machine.synchronize();
    // Releases what dropped graphs still have.
    if allocator.pools().is_ok() {
        Graph::new(&allocator, &machine.device(0), GraphOptions::default()).unwrap().reset().unwrap();
    }
    allocator.trim(device_id(0), MemPoolId::DEFAULT).unwrap();
    if let Some(caching) = &caching {
        caching.check();
    }
    if let Some(paged) = &paged {
        paged.check();
    }
    let stats = allocator.stats(device_id(0)).unwrap();
    let allocated = allocated.into_inner();
    let counted = (stats.allocation.all.allocated, stats.allocation.all.freed);
    let expected = if unknown.into_inner() { (counted.0, counted.0) } else { (allocated, allocated) };
    assert_eq!(counted, expected, "blocks allocated and freed");
    assert_eq!(stats.active_bytes.all.current, 0, "active at the end");
    assert_eq!(stats.active_bytes.all.allocated, stats.active_bytes.all.freed, "bytes allocated and freed");
    if caching.is_some() || paged.is_some() {
        assert_eq!(stats.reserved_bytes.all.current, 0, "reserved at the end");
    }
    if !faults {
        assert_eq!(stats.num_ooms, out_of_memory.into_inner(), "requests that ran out of memory");
    }
    let bytes = &stats.allocated_bytes;
    if caching.is_some() {
        let peak = stats.reserved_bytes.all.peak;
        assert!(peak <= reserved_max, "{peak} bytes were reserved, {reserved_max} may be");
        assert_eq!(bytes.small_pool.allocated + bytes.large_pool.allocated, bytes.all.allocated);
    }
    host.check();
    host.close().unwrap();
    let keeps_addresses = paged.is_some();
    drop((allocator, caching, paged));
    machine.close(keeps_addresses);
}

/// One thread.
struct Worker<'a> {
    shared: &'a Shared,
    thread: usize,
    rng: Rng,
    streams: Vec<Stream>,
    for_captures: Stream,
    tagged: Vec<Tagged>,
    pinned: Vec<(HostBlock, u8)>,
    counts: Counts,
    next_tag: u32,
}

impl<'a> Worker<'a> {
    fn new(shared: &'a Shared, thread: usize, rng: Rng) -> Self {
        let first = thread * (STREAMS_EACH + 1);
        let streams = shared.machine.streams[0][first..first + STREAMS_EACH].to_vec();
        let for_captures = shared.machine.stream(0, first + STREAMS_EACH).clone();
        let (tagged, pinned, counts) = (Vec::new(), Vec::new(), Counts::default());
        Self { shared, thread, rng, streams, for_captures, tagged, pinned, counts, next_tag: 0 }
    }

    /// The result of a call under test, if it succeeded.
    fn settle<T>(&mut self, outcome: warpool::Result<T>) -> Option<T> {
        self.counts.operations += 1;
        match outcome {
            Ok(result) => Some(result),
            Err(Error::OutOfMemory(report)) => {
                let counted = u64::from(is_counted(report.cause));
                self.shared.out_of_memory.fetch_add(counted, Ordering::Relaxed);
                self.counts.out_of_memory += 1;
                None
            }
            Err(Error::PinnedCap(_)) => {
                self.counts.out_of_memory += 1;
                None
            }
            Err(_) if self.shared.faults => None,
            Err(error) => panic!("thread {}: an error without a fault: {error}", self.thread),
        }
    }

    fn tag(&mut self) -> u32 {
        self.next_tag += 1;
        (self.thread as u32) << 28 | self.next_tag
    }

    fn run(mut self, rounds: usize) -> Counts {
        let mut pool = self.new_pool();
        for _ in 0..rounds {
            self.step(pool.as_ref());
            if self.rng.one_in(100) {
                // Blocks of the last one live on.
                pool = self.new_pool();
            }
        }
        self.tagged.clear();
        self.pinned.clear();
        self.end_capture();
        if let Some(pool) = pool
            && self.rng.one_in(2)
        {
            let closed = pool.close();
            self.settle(closed);
        }
        self.counts
    }

    fn new_pool(&mut self) -> Option<MemPool> {
        let options = PoolOptions { use_on_oom: self.rng.one_in(2), ..PoolOptions::default() };
        let (allocator, device) = (&self.shared.allocator, self.shared.machine.device(0));
        allocator.pools().is_ok().then(|| MemPool::new(allocator, &device, options).unwrap())
    }

    fn step(&mut self, pool: Option<&MemPool>) {
        let stream = self.any_stream();
        match self.rng.below(24) {
            20..24 if self.shared.has_vectors => self.use_vector(),
            0..7 => self.allocate(pool, &stream),
            7 | 8 if !self.tagged.is_empty() => {
                let at = self.rng.below(self.tagged.len());
                self.use_elsewhere(at, &stream);
            }
            9..12 if !self.tagged.is_empty() => {
                let tagged = self.tagged.swap_remove(self.rng.below(self.tagged.len()));
                self.free(tagged);
            }
            12 if !self.tagged.is_empty() => {
                let tagged = self.tagged.swap_remove(self.rng.below(self.tagged.len()));
                self.exchange().push(tagged);
            }
            13 => {
                let tagged = self.exchange().pop();
                if let Some(tagged) = tagged {
                    self.free(tagged);
                }
            }
            14 if self.rng.one_in(4) => {
                let outcome = self.shared.allocator.trim(device_id(0), MemPoolId::DEFAULT);
                self.settle(outcome);
            }
            14 if self.rng.one_in(4) => {
                let outcome = self.shared.machine.device(0).event_pool().trim();
                self.settle(outcome);
            }
            14 => {
                let stats = self.shared.allocator.stats(device_id(0));
                self.settle(stats);
            }
            15 if pool.is_some() && self.rng.one_in(2) => self.capture(),
            16 | 17 => self.pin(&stream),
            18 => {
                let count = self.pinned.len();
                if count > 0 {
                    let (block, value) = self.pinned.swap_remove(self.rng.below(count));
                    expect_value(&block, value);
                    if self.rng.one_in(2) {
                        let freed = block.free();
                        self.settle(freed);
                    }
                }
            }
            19 if self.rng.one_in(6) => {
                let outcome = self.shared.host.trim(0);
                self.settle(outcome);
            }
            _ => {}
        }
    }

    fn exchange(&self) -> std::sync::MutexGuard<'a, Vec<Tagged>> {
        self.shared.exchange.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One of its own, or a shared one.
    fn any_stream(&mut self) -> Stream {
        if self.rng.one_in(4) {
            let first = THREADS * (STREAMS_EACH + 1);
            return self.shared.machine.stream(0, first + self.rng.below(STREAMS_SHARED)).clone();
        }
        self.streams[self.rng.below(STREAMS_EACH)].clone()
    }

    fn vectors(&self) -> std::sync::MutexGuard<'a, Vec<Filled>> {
        self.shared.vectors.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A vector that another thread used, or a new one.
    fn take_vector(&mut self, stream: &Stream) -> Option<Filled> {
        let known = self.vectors().pop();
        if known.is_some() {
            return known;
        }
        let len = 1 + self.rng.below(500);
        let outcome = DeviceVec::zeroed(&self.shared.allocator, len, stream);
        // It was allocated even if it could not be filled.
        let vector = match outcome {
            Err(_) if self.shared.faults => {
                self.shared.unknown.store(true, Ordering::Relaxed);
                None
            }
            outcome => self.settle(outcome),
        };
        let vector = vector?;
        self.count_allocation();
        Some(Filled { vector, value: 0 })
    }

    /// Uses a vector in a stream, possibly one in which this thread captures at other times, and passes it on.
    fn use_vector(&mut self) {
        let stream = if self.rng.one_in(3) { self.for_captures.clone() } else { self.any_stream() };
        let Some(mut filled) = self.take_vector(&stream) else { return };
        for _ in 0..1 + self.rng.below(3) {
            let value = self.rng.u32();
            let (outcome, read) = match self.rng.one_in(2) {
                true => (stream.fill(&mut filled.vector, value).map(|()| filled.value = value), None),
                false => match stream.to_vec(&filled.vector) {
                    Ok(read) => (Ok(()), Some(read)),
                    Err(error) => (Err(error), None),
                },
            };
            match outcome {
                Ok(()) => {}
                // The thread that used it last captures in that stream.
                Err(Error::Buffer(BufferError::LastUseCaptures { .. })) => break,
                // Its contents are not known any more.
                Err(_) if self.shared.faults => return,
                Err(error) => panic!("thread {}: an error without a fault: {error}", self.thread),
            }
            self.counts.operations += 1;
            if let Some(other) = read.iter().flatten().find(|&&element| element != filled.value) {
                panic!("thread {}: a vector of {:#x} contains {other:#x}", self.thread, filled.value);
            }
        }
        self.vectors().push(filled);
    }

    fn allocate(&mut self, pool: Option<&MemPool>, stream: &Stream) {
        let bytes = self.rng.request_bytes();
        let outcome = match pool.filter(|_| self.rng.one_in(4)) {
            Some(pool) => self.shared.allocator.allocate_in(pool, bytes, stream),
            None => self.shared.allocator.allocate(bytes, stream),
        };
        let Some(block) = self.settle(outcome) else {
            self.tagged.truncate(self.tagged.len() / 2);
            return;
        };
        self.count_allocation();
        let tag = self.tag();
        self.shared.machine.write_tag(block.ptr(), bytes, tag, stream);
        self.tagged.push(Tagged { block, tag, stream: stream.clone() });
    }

    fn count_allocation(&mut self) {
        self.shared.allocated.fetch_add(1, Ordering::Relaxed);
        self.counts.allocations += 1;
    }

    fn use_elsewhere(&mut self, at: usize, stream: &Stream) {
        let Tagged { block, tag, stream: owner } = &self.tagged[at];
        if owner == stream {
            return;
        }
        let machine = &self.shared.machine;
        machine.wait(stream, owner);
        machine.check_tag(block.ptr(), block.bytes(), *tag, stream);
        let recorded = block.record_use(stream);
        if recorded.is_err() {
            machine.wait(owner, stream);
        }
        self.settle(recorded);
    }

    fn free(&mut self, tagged: Tagged) {
        let Tagged { block, tag, stream } = tagged;
        self.shared.machine.check_tag(block.ptr(), block.bytes(), tag, &stream);
        if self.rng.one_in(2) {
            let freed = block.free();
            self.settle(freed);
        }
    }

    /// A graph with a pool of its own, captured, replayed and dropped, while the other threads go on.
    fn capture(&mut self) {
        let device = self.shared.machine.device(0);
        let mut graph = Graph::new(&self.shared.allocator, &device, GraphOptions::default()).unwrap();
        let mode = self.rng.pick(&[CaptureMode::ThreadLocal, CaptureMode::Relaxed]);
        let stream = self.for_captures.clone();
        let mut left = Vec::new();
        let mut filled = if self.rng.one_in(2) { self.vectors().pop() } else { None };
        let value = self.rng.u32();
        let outcome = graph.capture(&stream, CaptureOptions::default().with_mode(mode), |capture| {
            if let Some(filled) = &mut filled {
                stream.fill(&mut filled.vector, value)?;
            }
            for _ in 0..2 + self.rng.below(4) {
                let bytes = self.rng.request_bytes().div_ceil(4);
                let allocated = capture.allocator().allocate(bytes, &stream);
                let Some(block) = self.settle(allocated) else { continue };
                self.count_allocation();
                let tag = self.tag();
                self.shared.machine.write_tag(block.ptr(), bytes, tag, &stream);
                self.shared.machine.check_tag(block.ptr(), bytes, tag, &stream);
                if self.rng.one_in(2) {
                    left.push(block);
                }
            }
            Ok(())
        });
        if self.settle(outcome).is_some() {
            self.counts.captures += 1;
            for _ in 0..self.rng.below(3) {
                let replayed = graph.replay(&stream);
                match replayed {
                    Err(Error::Buffer(BufferError::LastUseCaptures { .. })) => continue,
                    replayed => {
                        let is_done = self.settle(replayed).is_some();
                        self.counts.replays += u64::from(is_done);
                        if let Some(filled) = filled.as_mut().filter(|_| is_done) {
                            filled.value = value;
                        }
                    }
                }
            }
        } else {
            self.counts.captures_failed += 1;
        }
        // Replays may still run.
        drop(graph);
        drop(left);
        if let Some(filled) = filled {
            self.vectors().push(filled);
        }
    }

    /// Ends a capture that could not be ended because of faults, before the thread ends.
    fn end_capture(&mut self) {
        let machine = &self.shared.machine;
        let begin = Instant::now();
        while begin.elapsed() < END_TIMEOUT {
            if machine.sim.capture_state(self.for_captures.id()).unwrap() == CaptureState::None {
                return;
            }
            let graph = Graph::new(&self.shared.allocator, &machine.device(0), GraphOptions::default());
            let _ = graph.unwrap().reset();
            // Another thread may be ending it.
            std::thread::yield_now();
        }
        panic!("thread {}: the capture on {} does not end", self.thread, self.for_captures.id());
    }

    /// Pinned memory, written by the host and read by a copy.
    fn pin(&mut self, stream: &Stream) {
        let bytes = 64 + self.rng.request_bytes() % (2 * MIB);
        let outcome = self.shared.host.allocate(bytes);
        let Some(block) = self.settle(outcome) else {
            self.pinned.truncate(self.pinned.len() / 2);
            return;
        };
        let value = self.rng.u64() as u8;
        for offset in [0, bytes - 64] {
            // By the simulation itself: the program's own calls do not fail.
            self.shared.machine.sim.host_write(HostPtr(block.ptr().0 + offset), &[value; 64]).unwrap();
        }
        if self.rng.one_in(2) {
            let recorded = block.record_use(stream);
            self.settle(recorded);
        }
        self.pinned.push((block, value));
        if self.pinned.len() > 20 {
            self.pinned.truncate(10);
        }
    }
}

/// The host reads a block's ends. Nothing but this thread writes it.
fn expect_value(block: &HostBlock, value: u8) {
    for offset in [0, block.bytes() - 64] {
        let mut read = [0; 64];
        if block.read(offset, &mut read).is_ok() {
            assert_eq!(read, [value; 64], "pinned memory at {}, offset {offset}", block.ptr());
        }
    }
}
