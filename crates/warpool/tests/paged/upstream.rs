//! Pools with an upstream of their own, and pools whose blocks are whole segments.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use warpool::driver::sim::SimDriver;
use warpool::driver::{DeviceId, DevicePtr, Memory as _, StreamId};
use warpool::memory::pools::{PoolOptions, Upstream};
use warpool::memory::report::{SegmentInfo, SnapshotOptions};
use warpool::memory::{Allocate as _, DeviceAllocator, DeviceBlock, MemPool, MemPoolId, OomCause};
use warpool::{Error, Result, Stream};
use warpool_testing::{Rng, seeds};

use crate::{DEVICE, MIB, Machine};

/// The behaviour of an upstream at its next calls.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mood {
    Works,
    Fails,
    Panics,
    /// Returns this address.
    Returns(u64),
}

/// An upstream that counts its calls, with a limited amount of memory.
struct Source {
    sim: Arc<SimDriver>,
    room: AtomicU64,
    mood: Mutex<Mood>,
    log: Mutex<Vec<String>>,
    /// Runs in every call.
    hook: Mutex<Option<Box<dyn FnMut() + Send>>>,
}

impl Source {
    fn new(machine: &Machine, room: u64) -> Arc<Self> {
        Arc::new(Self {
            sim: machine.sim.clone(),
            room: AtomicU64::new(room),
            mood: Mutex::new(Mood::Works),
            log: Mutex::default(),
            hook: Mutex::default(),
        })
    }

    fn set(&self, mood: Mood) {
        *self.mood.lock().unwrap() = mood;
    }

    fn take_log(&self) -> Vec<String> {
        std::mem::take(&mut self.log.lock().unwrap())
    }

    fn call(&self, text: String) -> Result<Option<DevicePtr>> {
        if let Some(hook) = &mut *self.hook.lock().unwrap() {
            hook();
        }
        let mood = *self.mood.lock().unwrap();
        match mood {
            Mood::Works => {}
            Mood::Fails => return Err(Error::UnknownPointer { ptr: DevicePtr(1) }),
            Mood::Panics => resume_unwind(Box::new("on purpose")),
            Mood::Returns(addr) => return Ok(Some(DevicePtr(addr))),
        }
        self.log.lock().unwrap().push(text);
        Ok(None)
    }
}

impl Upstream for Source {
    fn allocate(&self, device: DeviceId, bytes: u64, _: StreamId) -> Result<Option<DevicePtr>> {
        if let Some(ptr) = self.call(format!("allocate {}", bytes / MIB))? {
            return Ok(Some(ptr));
        }
        if self.room.load(Ordering::Relaxed) < bytes {
            return Ok(None);
        }
        self.room.fetch_sub(bytes, Ordering::Relaxed);
        Ok(Some(self.sim.mem_alloc(device, bytes)?))
    }

    fn free(&self, ptr: DevicePtr, bytes: u64, _: DeviceId, _: StreamId) -> Result<()> {
        self.call(format!("free {}", bytes / MIB))?;
        self.room.fetch_add(bytes, Ordering::Relaxed);
        Ok(self.sim.mem_free(ptr)?)
    }
}

impl Machine {
    fn pool_of(&self, options: PoolOptions) -> MemPool {
        MemPool::new(&self.allocator, &self.device, options).unwrap()
    }

    fn upstream_pool(&self, source: &Arc<Source>) -> MemPool {
        self.pool_of(PoolOptions { upstream: Some(source.clone()), ..PoolOptions::default() })
    }

    fn block_in(&self, pool: &MemPool, bytes: u64, stream: &Stream) -> DeviceBlock {
        let block = self.allocator.allocate_in(pool, bytes, stream).unwrap();
        self.paged.check();
        block
    }

    fn segments_of(&self, pool: MemPoolId) -> Vec<SegmentInfo> {
        let options = SnapshotOptions { pool: Some(pool), ..SnapshotOptions::default() };
        self.paged.snapshot(options).unwrap().segments
    }

    fn bytes_reserved(&self) -> u64 {
        self.paged.check();
        self.paged.stats(DEVICE).unwrap().reserved_bytes.all.current
    }

    fn trim(&self) -> u64 {
        let trimmed = self.paged.trim(DEVICE, MemPoolId::DEFAULT).unwrap();
        self.paged.check();
        trimmed
    }
}

#[test]
fn segments_come_from_the_upstream_and_return_to_it() {
    let machine = Machine::new();
    let (source, stream) = (Source::new(&machine, 1 << 30), machine.stream());
    let pool = machine.upstream_pool(&source);
    let small = machine.block_in(&pool, 1000, &stream);
    let large = machine.block_in(&pool, 3 * MIB, &stream);
    let other = machine.block(1000, &stream);
    assert_eq!(source.take_log(), ["allocate 2", "allocate 20"], "segments of the pool only");
    for (value, block) in [(1, &small), (2, &large), (3, &other)] {
        machine.fill(block, value, &stream);
    }
    for (value, block) in [(1, &small), (2, &large), (3, &other)] {
        machine.expect(block, value, &stream);
    }
    let again = machine.block_in(&pool, 500, &stream);
    assert_eq!(source.take_log().len(), 0, "the rest of the first segment serves it");
    let segments = machine.segments_of(pool.id());
    assert_eq!(segments.iter().map(|segment| segment.total_size).sum::<u64>(), 22 * MIB);
    assert!(segments.iter().all(|segment| !segment.is_expandable));
    let stats = machine.paged.stats(DEVICE).unwrap();
    assert_eq!(stats.reserved_bytes_by_private_pools[&pool.id()].all.current, 22 * MIB);
    assert_eq!((stats.reserved_bytes.all.current, stats.segment.all.current), (24 * MIB, 3));
    assert_eq!(machine.reserved(), 2 * MIB, "of pages");
    assert_eq!(machine.trim(), 0, "a pool in use is not trimmed");
    machine.allocator.free_raw(again.into_raw().ptr).unwrap();
    drop((small, large));
    assert_eq!(machine.trim(), 0, "not even its free blocks");
    pool.close().unwrap();
    assert_eq!(source.take_log(), ["free 2", "free 20"]);
    assert_eq!(machine.bytes_reserved(), 2 * MIB);
    drop(other);
    assert_eq!(machine.trim(), 2 * MIB);
    assert_eq!(Arc::strong_count(&source), 1, "the upstream is dropped with its pool");
    machine.expect_no_hazard();
}

#[test]
fn blocks_outlive_their_pool() {
    let machine = Machine::new();
    let (source, stream) = (Source::new(&machine, 1 << 30), machine.stream());
    let pool = machine.upstream_pool(&source);
    let live = machine.block_in(&pool, 30 * MIB, &stream);
    drop(pool);
    assert_eq!((machine.trim(), source.take_log()), (0, vec!["allocate 30".to_owned()]));
    machine.fill(&live, 1, &stream);
    machine.expect(&live, 1, &stream);
    drop(live);
    assert_eq!((machine.trim(), source.take_log()), (30 * MIB, vec!["free 30".to_owned()]));
    assert_eq!(Arc::strong_count(&source), 1);
}

#[test]
fn pages_are_never_taken_from_segments_nor_mapped_into_them() {
    let machine = Machine::new();
    let (source, stream) = (Source::new(&machine, 1 << 30), machine.stream());
    let pool = machine.upstream_pool(&source);
    drop(machine.block_in(&pool, 64 * MIB, &stream));
    let outside = machine.block(64 * MIB, &stream);
    assert_eq!(machine.bytes_reserved(), 128 * MIB);
    machine.fill(&outside, 1, &stream);
    machine.expect(&outside, 1, &stream);
    machine.expect_no_hazard();
}

#[test]
fn an_upstream_that_is_full_is_the_cause() {
    let machine = Machine::new();
    let (source, stream) = (Source::new(&machine, 100 * MIB), machine.stream());
    let pool =
        machine.pool_of(PoolOptions { upstream: Some(source.clone()), use_on_oom: true, ..PoolOptions::default() });
    let spare = machine.block_in(&pool, 60 * MIB, &stream);
    let refused = machine.allocator.allocate_in(&pool, 60 * MIB, &stream);
    assert!(matches!(&refused, Err(Error::OutOfMemory(report)) if report.cause == OomCause::External), "{refused:?}");
    machine.paged.set_memory_cap(DEVICE, Some(100 * MIB)).unwrap();
    let refused = machine.allocator.allocate_in(&pool, 60 * MIB, &stream);
    assert!(matches!(&refused, Err(Error::OutOfMemory(report)) if report.cause == OomCause::Limit), "{refused:?}");
    assert!(machine.try_block(60 * MIB, &stream).is_err(), "nothing is free in the pool");
    let place = spare.ptr();
    drop(spare);
    let helped = machine.block(60 * MIB, &stream);
    assert_eq!(helped.ptr(), place, "before the default pool runs out of memory, the pool serves it");
    drop(helped);
    pool.close().unwrap();
    drop(machine.block(60 * MIB, &stream));
    machine.paged.check();
}

#[test]
fn errors_and_panics_of_an_upstream_leave_everything_usable() {
    let machine = Machine::new();
    let (source, stream) = (Source::new(&machine, 1 << 30), machine.stream());
    let pool = machine.upstream_pool(&source);
    let kept = machine.block_in(&pool, 4 * MIB, &stream);
    let elsewhere = machine.block(4 * MIB, &stream);
    for mood in [Mood::Fails, Mood::Panics] {
        source.set(mood);
        let call = || machine.allocator.allocate_in(&pool, 40 * MIB, &stream).map(drop);
        let outcome = catch_unwind(AssertUnwindSafe(call));
        assert!(!matches!(outcome, Ok(Ok(()))));
        machine.paged.check();
        drop(machine.block(4 * MIB, &stream));
    }
    for wrong in [0, u64::MAX - 5, kept.ptr().0, kept.ptr().0 - 512, elsewhere.ptr().0, elsewhere.ptr().0 + (1 << 30)] {
        source.set(Mood::Returns(wrong));
        let outcome = machine.allocator.allocate_in(&pool, 40 * MIB, &stream);
        let refused = matches!(outcome, Err(Error::ExternalAddress { .. } | Error::ExternalOverlap { .. }));
        assert!(refused, "{wrong:#x}: {outcome:?}");
        machine.paged.check();
    }
    drop(kept);
    drop(pool);
    for mood in [Mood::Fails, Mood::Panics] {
        source.set(mood);
        let outcome = catch_unwind(AssertUnwindSafe(|| machine.paged.trim(DEVICE, MemPoolId::DEFAULT)));
        assert!(!matches!(outcome, Ok(Ok(_))));
        assert!(machine.bytes_reserved() >= 20 * MIB, "the segment stays");
    }
    source.set(Mood::Works);
    drop(elsewhere);
    machine.trim();
    assert_eq!(machine.bytes_reserved(), 0);
    assert_eq!(Arc::strong_count(&source), 1);
}

/// Its requested bytes count against the limit meanwhile.
#[test]
fn an_upstream_is_called_without_a_lock() {
    let machine = Machine::new();
    machine.paged.set_memory_cap(DEVICE, Some(100 * MIB)).unwrap();
    let (source, stream) = (Source::new(&machine, 1 << 30), machine.stream());
    let (other, on) = (machine.allocator.clone(), stream.clone());
    *source.hook.lock().unwrap() = Some(Box::new(move || {
        let (other, on) = (other.clone(), on.clone());
        let helper = std::thread::spawn(move || {
            let within = other.allocate(20 * MIB, &on).unwrap();
            assert!(other.allocate(40 * MIB, &on).is_err(), "50 + 20 + 40 MiB");
            drop(within);
            other.trim(DEVICE, MemPoolId::DEFAULT).unwrap();
        });
        helper.join().unwrap();
    }));
    let pool = machine.upstream_pool(&source);
    drop(machine.block_in(&pool, 50 * MIB, &stream));
    *source.hook.lock().unwrap() = None;
    pool.close().unwrap();
    machine.trim();
    assert_eq!(machine.bytes_reserved(), 0);
}

#[test]
fn an_upstream_may_own_blocks_of_its_allocator() {
    struct Owner(#[expect(dead_code, reason = "it is dropped")] DeviceBlock, Arc<Source>);
    impl Upstream for Owner {
        fn allocate(&self, device: DeviceId, bytes: u64, stream: StreamId) -> Result<Option<DevicePtr>> {
            self.1.allocate(device, bytes, stream)
        }

        fn free(&self, ptr: DevicePtr, bytes: u64, device: DeviceId, stream: StreamId) -> Result<()> {
            self.1.free(ptr, bytes, device, stream)
        }
    }
    let machine = Machine::new();
    let (source, stream) = (Source::new(&machine, 1 << 30), machine.stream());
    for uses_it in [true, false] {
        let owner = Owner(machine.block(10 * MIB, &stream), source.clone());
        let pool = machine.pool_of(PoolOptions { upstream: Some(Arc::new(owner)), ..PoolOptions::default() });
        if uses_it {
            drop(machine.block_in(&pool, MIB, &stream));
        }
        drop(pool);
        machine.trim();
        assert_eq!(machine.paged.stats(DEVICE).unwrap().allocation.all.current, 0, "the upstream is dropped");
    }
}

#[test]
fn no_split_blocks_are_whole_segments() {
    let machine = Machine::new();
    let stream = machine.stream();
    let pool = machine.pool_of(PoolOptions { no_split: true, ..PoolOptions::default() });
    let blocks = [0; 3].map(|_| machine.block_in(&pool, MIB, &stream));
    let segments = machine.segments_of(pool.id());
    assert_eq!(segments.len(), 3);
    assert!(segments.iter().all(|segment| segment.blocks.len() == 1 && segment.total_size == 2 * MIB));
    assert_eq!((blocks[0].bytes(), blocks[0].bytes_usable()), (MIB, 2 * MIB));
    let first = blocks[0].ptr();
    drop(blocks);
    let again = machine.block_in(&pool, 1000, &stream);
    assert_eq!((again.ptr(), again.bytes_usable()), (first, 2 * MIB), "a whole one again");
    let large = machine.block_in(&pool, 5 * MIB, &stream);
    assert_eq!(large.bytes_usable(), 20 * MIB);
    drop((again, large));
    pool.close().unwrap();
    assert_eq!(machine.bytes_reserved(), 0);
}

#[test]
fn random_programs_over_pools_with_segments() {
    for seed in seeds(8) {
        println!("seed: {seed}");
        let (machine, mut rng) = (Machine::new(), Rng::new(seed));
        let (source, streams) = (Source::new(&machine, 1 << 30), [machine.stream(), machine.stream()]);
        let mut pools = Vec::new();
        let mut live: Vec<(DeviceBlock, u8, usize)> = Vec::new();
        for step in 0..150 {
            match rng.below(12) {
                0 if pools.len() < 4 => pools.push(machine.pool_of(PoolOptions {
                    upstream: (rng.below(2) == 0).then(|| source.clone() as Arc<dyn Upstream>),
                    use_on_oom: rng.below(2) == 0,
                    no_split: rng.below(2) == 0,
                    ..PoolOptions::default()
                })),
                1 if !pools.is_empty() => drop(pools.swap_remove(rng.below(pools.len()))),
                2 => {
                    source.set([Mood::Works, Mood::Fails][rng.below(2)]);
                    // This fails if the upstream does.
                    let _ = machine.paged.trim(DEVICE, MemPoolId::DEFAULT);
                }
                3..8 => {
                    let magnitude = 9 + rng.below(15);
                    let (bytes, on) = (1 + rng.u64_below(1 << magnitude), rng.below(2));
                    let block = if pools.is_empty() || rng.below(3) == 0 {
                        machine.allocator.allocate(bytes, &streams[on])
                    } else {
                        let pool = &pools[rng.below(pools.len())];
                        machine.allocator.allocate_in(pool, bytes, &streams[on])
                    };
                    if let Ok(block) = block {
                        machine.fill(&block, step, &streams[on]);
                        live.push((block, step, on));
                    }
                }
                _ if !live.is_empty() => {
                    let (block, value, on) = live.swap_remove(rng.below(live.len()));
                    machine.expect(&block, value, &streams[on]);
                }
                _ => {}
            }
            machine.paged.check();
        }
        source.set(Mood::Works);
        for (block, value, on) in live {
            machine.expect(&block, value, &streams[on]);
        }
        drop(pools);
        machine.trim();
        assert_eq!((machine.bytes_reserved(), Arc::strong_count(&source)), (0, 1));
        machine.expect_no_hazard();
    }
}

/// A pool with segments serves a request for the default pool: the peak includes it, in addition to the memory of
/// another heap.
#[test]
fn peaks_have_what_another_pool_served_before_running_out() {
    let machine = Machine::new();
    let stream = machine.stream();
    let source = Source::new(&machine, 64 * MIB);
    let pool = machine.pool_of(PoolOptions { upstream: Some(source), use_on_oom: true, ..PoolOptions::default() });
    drop(machine.block_in(&pool, 20 * MIB, &stream));
    let first = machine.block(16 * MIB, &stream);
    machine.paged.set_memory_cap(DEVICE, Some(machine.bytes_reserved())).unwrap();
    let second = machine.block(20 * MIB, &stream);
    drop(first);
    drop(machine.block(512, &machine.stream()));
    assert_eq!(machine.allocator.stats(DEVICE).unwrap().allocated_bytes.all.peak, 36 * MIB);
    drop(second);
}
