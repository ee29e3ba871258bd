//! Sixteen threads on one allocator of pinned memory, a hundred thousand allocations each (times `WARPOOL_TEST_SCALE`):
//! no block is leaked, and none has two owners.
//!
//! Threads end all the time while their blocks are alive, and other threads free those. A set of live ranges finds
//! overlaps; some blocks also get a tag at both ends, or are copied from by a stream. (Only some: contents go through
//! the simulated device, which has one lock.) The operating system decides the interleaving, so runs differ.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::time::Instant;

use crate::common::rng::{Rng, scaled};
use rustc_hash::FxHashMap;
use warpool::driver::decorate::{Arguments, Counting, Hook, Hooked, Outcome};
use warpool::driver::sim::{SimConfig, SimDriver};
use warpool::driver::{Call, Copies as _, DeviceId, DevicePtr, Driver, Memory as _};
use warpool::memory::{HostAllocator, HostBlock, PinnedSettings};
use warpool::{Instance, StreamLease};

const THREADS: u64 = 16;
/// By each of the sixteen, in successive threads.
const ALLOCATIONS: u64 = 100_000;
const GENERATIONS: u64 = 10;
const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
/// One block in `STAMPED` gets a tag, one in `USED` is used by a stream.
const STAMPED: u64 = 128;
const USED: u64 = 4096;

/// The ranges of allocated blocks. A range is stored in every chunk of addresses that it touches.
struct LiveRanges {
    shards: Vec<Mutex<Chunks>>,
}

/// The live ranges of each chunk.
type Chunks = FxHashMap<u64, Vec<(u64, u64)>>;

const CHUNK: u64 = 64 * KIB;

impl LiveRanges {
    fn new() -> Self {
        Self { shards: (0..256).map(|_| Mutex::default()).collect() }
    }

    fn with(&self, range: (u64, u64), mut act: impl FnMut(&mut Vec<(u64, u64)>)) {
        for chunk in range.0 / CHUNK..=(range.1 - 1) / CHUNK {
            let shard = &self.shards[(chunk % self.shards.len() as u64) as usize];
            act(shard.lock().unwrap().entry(chunk).or_default());
        }
    }

    fn insert(&self, range: (u64, u64)) {
        self.with(range, |live| {
            let met = live.iter().find(|other| range.0 < other.1 && other.0 < range.1);
            assert_eq!(met, None, "{range:x?} overlaps an allocated block");
            live.push(range);
        });
    }

    /// Called before the block is freed.
    fn remove(&self, range: (u64, u64)) {
        self.with(range, |live| {
            let at = live.iter().position(|other| *other == range).expect("it was inserted");
            live.swap_remove(at);
        });
    }

    fn is_empty(&self) -> bool {
        self.shards.iter().all(|shard| shard.lock().unwrap().values().all(Vec::is_empty))
    }
}

/// An allocated block, with its tag if it has one.
struct StampedBlock {
    block: HostBlock,
    stamp: Option<u64>,
}

impl StampedBlock {
    fn range(&self) -> (u64, u64) {
        let start = self.block.ptr().0;
        (start, start + self.block.bytes_usable())
    }

    /// The offsets of its tags.
    fn ends(&self) -> [u64; 2] {
        [0, self.block.bytes() - 8]
    }
}

struct TestContext {
    sim: Arc<SimDriver>,
    host: HostAllocator,
    live: LiveRanges,
    /// Blocks for other threads to free.
    handed_over: Mutex<Vec<StampedBlock>>,
    allocated: AtomicU64,
    streams: Vec<StreamLease>,
    buffers: Vec<DevicePtr>,
}

impl TestContext {
    fn new(settings: PinnedSettings) -> Self {
        let sim = Arc::new(SimDriver::new(SimConfig::default()));
        let instance = Instance::new(sim.clone()).unwrap();
        let device = instance.device(0).unwrap();
        let streams = (0..THREADS).map(|_| device.lease_stream().unwrap()).collect();
        let buffers = (0..THREADS).map(|_| sim.mem_alloc(DeviceId(0), 4 * KIB).unwrap()).collect();
        let host = HostAllocator::new(&instance, settings);
        Self {
            sim,
            host,
            live: LiveRanges::new(),
            handed_over: Mutex::default(),
            allocated: AtomicU64::new(0),
            streams,
            buffers,
        }
    }

    fn allocate(&self, rng: &mut Rng) -> StampedBlock {
        let bytes = size(rng);
        let block = self.host.allocate(bytes).unwrap();
        self.allocated.fetch_add(1, Ordering::Relaxed);
        assert!(block.bytes() == bytes && block.bytes_usable() >= bytes);
        let mut stamped = StampedBlock { block, stamp: None };
        self.live.insert(stamped.range());
        if bytes >= 16 && rng.u64().is_multiple_of(STAMPED) {
            let stamp = rng.u64();
            for end in stamped.ends() {
                stamped.block.write(end, &stamp.to_le_bytes()).unwrap();
            }
            stamped.stamp = Some(stamp);
        }
        stamped
    }

    fn free(&self, stamped: StampedBlock, thread: u64, rng: &mut Rng) {
        if let Some(stamp) = stamped.stamp {
            for end in stamped.ends() {
                let mut seen = [0; 8];
                stamped.block.read(end, &mut seen).unwrap();
                assert_eq!(u64::from_le_bytes(seen), stamp, "{} bytes, at {end}", stamped.block.bytes());
            }
        }
        if rng.u64().is_multiple_of(USED) {
            let (stream, to) = (self.streams[thread as usize].stream(), self.buffers[thread as usize]);
            let bytes = stamped.block.bytes().min(64);
            self.sim.copy(to.into(), stamped.block.ptr().into(), bytes, stream.id()).unwrap();
            stamped.block.record_use(stream).unwrap();
        }
        self.live.remove(stamped.range());
        if rng.one_in(2) { drop(stamped.block) } else { stamped.block.free().unwrap() }
    }

    /// The work of one thread. Blocks that it still has at its end are handed over.
    fn run_thread(&self, thread: u64, mut rng: Rng, allocations: u64) {
        let mut blocks: Vec<StampedBlock> = Vec::new();
        for _ in 0..allocations {
            blocks.push(self.allocate(&mut rng));
            match rng.below(64) {
                0 => self.handed_over.lock().unwrap().push(blocks.swap_remove(rng.below(blocks.len()))),
                1 => {
                    let stamped = self.handed_over.lock().unwrap().pop();
                    stamped.into_iter().for_each(|stamped| self.free(stamped, thread, &mut rng));
                }
                _ => {}
            }
            while blocks.len() > rng.below(24) {
                let at = rng.below(blocks.len());
                self.free(blocks.swap_remove(at), thread, &mut rng);
            }
            if rng.u64().is_multiple_of(100_000) {
                self.host.trim(16 * MIB).unwrap();
            }
        }
        self.handed_over.lock().unwrap().append(&mut blocks);
    }

    /// Frees everything. Nothing is left.
    fn finish(self) {
        let mut rng = Rng::new(0);
        let handed_over = std::mem::take(&mut *self.handed_over.lock().unwrap());
        handed_over.into_iter().for_each(|stamped| self.free(stamped, 0, &mut rng));
        assert!(self.live.is_empty(), "live ranges are left");
        for stream in &self.streams {
            stream.synchronize().unwrap();
        }
        for _ in 0..2 {
            self.host.process_pending().unwrap();
            self.streams[0].synchronize().unwrap();
        }
        self.host.check();
        let stats = self.host.stats();
        let allocated = self.allocated.load(Ordering::Relaxed);
        let requests = stats.active_requests;
        assert_eq!((requests.allocated, requests.freed, requests.current), (allocated, allocated, 0));
        assert_eq!((stats.active_bytes.current, stats.cached_bytes), (0, stats.allocated_bytes.current));
        self.host.trim(0).unwrap();
        let counts = self.sim.object_counts();
        assert_eq!((counts.pinned, counts.bytes_pinned), (0, 0), "left pinned");
        assert_eq!(self.host.stats().allocated_bytes.current, 0);
        assert_eq!(self.sim.hazards(), []);
        self.host.close().unwrap();
    }
}

/// A random size, mostly small.
fn size(rng: &mut Rng) -> u64 {
    let most = match rng.below(64) {
        0..40 => 4 * KIB,
        40..58 => 64 * KIB,
        58..63 => 256 * KIB,
        _ => MIB,
    };
    1 + rng.u64() % most
}

#[test]
fn sixteen_threads_share_pinned_memory() {
    let allocations = scaled(ALLOCATIONS);
    let context = TestContext::new(PinnedSettings::default());
    let begun = Instant::now();
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let context = &context;
            // The sixteen run the threads that do the work one after the other.
            scope.spawn(move || {
                for generation in 0..GENERATIONS {
                    let rng = Rng::new(thread << 32 | generation);
                    scope.spawn(move || context.run_thread(thread, rng, allocations / GENERATIONS)).join().unwrap();
                }
            });
        }
    });
    println!("{} allocations in {:.1?}", THREADS * allocations, begun.elapsed());
    assert_eq!(context.allocated.load(Ordering::Relaxed), THREADS * allocations);
    context.finish();
}

/// A thread whose request a cap refuses frees its blocks and continues.
#[test]
fn threads_at_the_cap_neither_hang_nor_exceed_it() {
    const CAP: u64 = 16 * MIB;
    let context = TestContext::new(PinnedSettings { cap_bytes: Some(CAP), ..PinnedSettings::default() });
    let refused = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (context, refused) = (&context, &refused);
            scope.spawn(move || {
                let mut rng = Rng::new(thread);
                let mut blocks: Vec<StampedBlock> = Vec::new();
                for _ in 0..4000 {
                    let bytes = 1 + rng.u64() % (2 * MIB);
                    match context.host.allocate(bytes) {
                        Ok(block) => {
                            context.allocated.fetch_add(1, Ordering::Relaxed);
                            let stamped = StampedBlock { block, stamp: None };
                            context.live.insert(stamped.range());
                            blocks.push(stamped);
                        }
                        Err(warpool::Error::PinnedCap(report)) => {
                            assert!(report.bytes_pinned <= CAP, "{report}");
                            refused.fetch_add(1, Ordering::Relaxed);
                            blocks.drain(..).for_each(|stamped| context.free(stamped, thread, &mut Rng::new(1)));
                        }
                        Err(error) => panic!("{error}"),
                    }
                    if blocks.len() > 3 {
                        context.free(blocks.swap_remove(0), thread, &mut rng);
                    }
                }
                blocks.drain(..).for_each(|stamped| context.free(stamped, thread, &mut rng));
            });
        }
    });
    assert!(refused.load(Ordering::Relaxed) > 0, "the cap never refused a request");
    let peak = context.host.stats().allocated_bytes.peak;
    assert!(peak <= CAP, "{peak} bytes were pinned, the cap is {CAP}");
    context.finish();
}

#[test]
fn after_warm_up_a_million_pairs_from_sixteen_threads_make_no_driver_call() {
    const PAIRS: usize = 1_000_000 / THREADS as usize;
    const SIZES: [u64; 6] = [100, 3000, 20_000, 100_000, 260_000, 700_000];
    const LIVE: usize = 8;
    let sim = Arc::new(SimDriver::new(SimConfig::default()));
    let counting = Arc::new(Counting::new(sim.clone()));
    let instance = Instance::new(counting.clone()).unwrap();
    let host = HostAllocator::new(&instance, PinnedSettings::default());
    let barrier = Barrier::new(THREADS as usize);
    let p99s: Mutex<Vec<u128>> = Mutex::default();
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (host, counting, barrier, p99s) = (&host, &counting, &barrier, &p99s);
            scope.spawn(move || {
                let mut rng = Rng::new(thread);
                // As many of each size as will be live at once.
                let warm: Vec<HostBlock> =
                    (0..LIVE).flat_map(|_| SIZES).map(|bytes| host.allocate(bytes).unwrap()).collect();
                barrier.wait();
                drop(warm);
                if barrier.wait().is_leader() {
                    counting.reset();
                }
                barrier.wait();
                let mut blocks: Vec<HostBlock> = Vec::with_capacity(LIVE);
                let mut nanos = Vec::with_capacity(PAIRS);
                for round in 0..PAIRS {
                    let begun = Instant::now();
                    blocks.push(host.allocate(rng.pick(&SIZES)).unwrap());
                    if blocks.len() == LIVE {
                        let block = blocks.swap_remove(rng.below(LIVE));
                        if round % 2 == 0 { drop(block) } else { block.free().unwrap() }
                    }
                    nanos.push(begun.elapsed().as_nanos());
                }
                drop(blocks);
                nanos.sort_unstable();
                p99s.lock().unwrap().push(nanos[PAIRS * 99 / 100]);
            });
        }
    });
    println!("the 99th percentile of a pair, by thread: {:?} ns", p99s.lock().unwrap());
    assert_eq!(counting.counts(), [], "driver calls after warm-up");
    host.check();
    host.trim(0).unwrap();
    assert_eq!(sim.object_counts().pinned, 0);
}

/// Large enough to be mapped by itself, so that its address is likely to be reused next.
const REUSED: u64 = 40 * MIB;

/// Allocates right after the driver has unpinned a segment, as another thread may.
#[derive(Default)]
struct AllocateAfterUnpin {
    host: Mutex<Option<HostAllocator>>,
    block: Mutex<Option<HostBlock>>,
}

impl Hook for AllocateAfterUnpin {
    type CallState = ();

    fn before(&self, _: &dyn Driver, _: Call, _: Arguments<'_>) -> warpool::driver::Result<()> {
        Ok(())
    }

    fn after(&self, _: &dyn Driver, call: Call, (): (), _: Outcome<'_>) {
        if call == Call::HostFree
            && let Some(host) = self.host.lock().unwrap().take()
        {
            *self.block.lock().unwrap() = Some(host.allocate(REUSED).unwrap());
        }
    }

    fn suballocation(&self, _: Call, _: Arguments<'_>) {}
}

/// Found by the first test here: an address may be reused before the call that unpinned it has returned.
#[test]
fn an_address_may_be_reused_during_the_unpin_call() {
    let sim = Arc::new(SimDriver::new(SimConfig::default()));
    let hooked = Arc::new(Hooked::with_hook(sim.clone(), AllocateAfterUnpin::default()));
    let instance = Instance::new(hooked.clone()).unwrap();
    let host = HostAllocator::new(&instance, PinnedSettings::default());
    let first = host.allocate(REUSED).unwrap();
    let ptr = first.ptr();
    drop(first);
    *hooked.hook().host.lock().unwrap() = Some(host.clone());
    assert_eq!(host.trim(0).unwrap(), REUSED);
    let block = hooked.hook().block.lock().unwrap().take().expect("the hook ran");
    println!("{ptr} was unpinned, {} is pinned", block.ptr());
    block.write(0, &[1; 64]).unwrap();
    host.check();
    let stats = host.stats();
    assert_eq!((stats.allocations.current, stats.allocated_bytes.current), (1, REUSED));
    assert_eq!(sim.object_counts().bytes_pinned, REUSED);
    drop(block);
    host.trim(0).unwrap();
    assert_eq!(sim.object_counts().pinned, 0);
}
