//! Sixteen threads on one allocator of pinned memory, a million allocations each: nothing is lost, and nothing is
//! handed out twice.
//!
//! Threads end all the time while blocks of theirs are alive: those go to other threads, which give them back. Every
//! block is entered in a register of live ranges that compares it with its neighbours; every so often one also gets a
//! stamp at both ends, or is copied from by a stream. (Only so often: contents go through the simulated device, which
//! has one lock.) The interleaving is the system's, so no run is like another.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::time::Instant;

use crate::common::rng::Rng;
use rustc_hash::FxHashMap;
use warpool::driver::decorate::{Arguments, Counting, Hook, Hooked, Outcome};
use warpool::driver::sim::{SimConfig, SimDriver};
use warpool::driver::{Call, Copies as _, DeviceId, DevicePtr, Driver, Memory as _};
use warpool::memory::{HostAllocator, HostBlock, PinnedSettings};
use warpool::{Instance, StreamLease};

const THREADS: u64 = 16;
/// For each of the sixteen; the lives of its threads share them.
const ALLOCATIONS: u64 = 1_000_000;
const LIVES: u64 = 10;
const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
/// One block in so many is stamped, and one in so many is used by a stream.
const STAMPED: u64 = 128;
const USED: u64 = 4096;

/// The ranges that somebody has. A range is entered in every chunk of addresses that it touches.
struct Register {
    shards: Vec<Mutex<Chunks>>,
}

/// The live ranges of each chunk.
type Chunks = FxHashMap<u64, Vec<(u64, u64)>>;

const CHUNK: u64 = 64 * KIB;

impl Register {
    fn new() -> Self {
        Self { shards: (0..256).map(|_| Mutex::default()).collect() }
    }

    fn with(&self, range: (u64, u64), mut act: impl FnMut(&mut Vec<(u64, u64)>)) {
        for chunk in range.0 / CHUNK..=(range.1 - 1) / CHUNK {
            let shard = &self.shards[(chunk % self.shards.len() as u64) as usize];
            act(shard.lock().unwrap().entry(chunk).or_default());
        }
    }

    /// Somebody has it now.
    fn enter(&self, range: (u64, u64)) {
        self.with(range, |live| {
            let met = live.iter().find(|other| range.0 < other.1 && other.0 < range.1);
            assert_eq!(met, None, "somebody has a part of {range:x?}");
            live.push(range);
        });
    }

    /// Nobody has it any more. To be called before it goes back.
    fn leave(&self, range: (u64, u64)) {
        self.with(range, |live| {
            let at = live.iter().position(|other| *other == range).expect("it was entered");
            live.swap_remove(at);
        });
    }

    fn is_empty(&self) -> bool {
        self.shards.iter().all(|shard| shard.lock().unwrap().values().all(Vec::is_empty))
    }
}

/// A block that somebody has, with its stamp if it got one.
struct Parcel {
    block: HostBlock,
    stamp: Option<u64>,
}

impl Parcel {
    fn range(&self) -> (u64, u64) {
        let start = self.block.ptr().0;
        (start, start + self.block.bytes_usable())
    }

    /// Where its stamps are: at both ends.
    fn ends(&self) -> [u64; 2] {
        [0, self.block.bytes() - 8]
    }
}

struct Lab {
    sim: Arc<SimDriver>,
    host: HostAllocator,
    register: Register,
    /// Blocks on their way to whoever takes them.
    post: Mutex<Vec<Parcel>>,
    given: AtomicU64,
    streams: Vec<StreamLease>,
    buffers: Vec<DevicePtr>,
}

impl Lab {
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
            register: Register::new(),
            post: Mutex::default(),
            given: AtomicU64::new(0),
            streams,
            buffers,
        }
    }

    fn allocate(&self, rng: &mut Rng) -> Parcel {
        let bytes = size(rng);
        let block = self.host.allocate(bytes).unwrap();
        self.given.fetch_add(1, Ordering::Relaxed);
        assert!(block.bytes() == bytes && block.bytes_usable() >= bytes);
        let mut parcel = Parcel { block, stamp: None };
        self.register.enter(parcel.range());
        if bytes >= 16 && rng.u64().is_multiple_of(STAMPED) {
            let stamp = rng.u64();
            for end in parcel.ends() {
                parcel.block.write(end, &stamp.to_le_bytes()).unwrap();
            }
            parcel.stamp = Some(stamp);
        }
        parcel
    }

    fn give_back(&self, parcel: Parcel, thread: u64, rng: &mut Rng) {
        if let Some(stamp) = parcel.stamp {
            for end in parcel.ends() {
                let mut seen = [0; 8];
                parcel.block.read(end, &mut seen).unwrap();
                assert_eq!(u64::from_le_bytes(seen), stamp, "{} bytes, at {end}", parcel.block.bytes());
            }
        }
        if rng.u64().is_multiple_of(USED) {
            let (stream, to) = (self.streams[thread as usize].stream(), self.buffers[thread as usize]);
            let bytes = parcel.block.bytes().min(64);
            self.sim.copy(to.into(), parcel.block.ptr().into(), bytes, stream.id()).unwrap();
            parcel.block.record_use(stream).unwrap();
        }
        self.register.leave(parcel.range());
        if rng.one_in(2) { drop(parcel.block) } else { parcel.block.free().unwrap() }
    }

    /// One life of one thread. What it still has at its end goes to others.
    fn live(&self, thread: u64, mut rng: Rng, allocations: u64) {
        let mut mine: Vec<Parcel> = Vec::new();
        for _ in 0..allocations {
            mine.push(self.allocate(&mut rng));
            match rng.below(64) {
                0 => self.post.lock().unwrap().push(mine.swap_remove(rng.below(mine.len()))),
                1 => {
                    let parcel = self.post.lock().unwrap().pop();
                    parcel.into_iter().for_each(|parcel| self.give_back(parcel, thread, &mut rng));
                }
                _ => {}
            }
            while mine.len() > rng.below(24) {
                let at = rng.below(mine.len());
                self.give_back(mine.swap_remove(at), thread, &mut rng);
            }
            if rng.u64().is_multiple_of(100_000) {
                self.host.trim(16 * MIB).unwrap();
            }
        }
        self.post.lock().unwrap().append(&mut mine);
    }

    /// Everything goes back: nothing was lost.
    fn finish(self) {
        let mut rng = Rng::new(0);
        let post = std::mem::take(&mut *self.post.lock().unwrap());
        post.into_iter().for_each(|parcel| self.give_back(parcel, 0, &mut rng));
        assert!(self.register.is_empty(), "ranges are left in the register");
        for stream in &self.streams {
            stream.synchronize().unwrap();
        }
        for _ in 0..2 {
            self.host.process_pending().unwrap();
            self.streams[0].synchronize().unwrap();
        }
        self.host.check();
        let stats = self.host.stats();
        let given = self.given.load(Ordering::Relaxed);
        let requests = stats.active_requests;
        assert_eq!((requests.allocated, requests.freed, requests.current), (given, given, 0));
        assert_eq!((stats.active_bytes.current, stats.cached_bytes), (0, stats.allocated_bytes.current));
        self.host.trim(0).unwrap();
        let census = self.sim.object_counts();
        assert_eq!((census.pinned, census.bytes_pinned), (0, 0), "something stays pinned");
        assert_eq!(self.host.stats().allocated_bytes.current, 0);
        assert_eq!(self.sim.hazards(), []);
        self.host.close().unwrap();
    }
}

/// Small ones mostly, and all of them random.
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
fn sixteen_threads_a_million_allocations_each() {
    let lab = Lab::new(PinnedSettings::default());
    let begun = Instant::now();
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let lab = &lab;
            // The sixteen only wait for the threads that do the work, one after the other.
            scope.spawn(move || {
                for life in 0..LIVES {
                    let rng = Rng::new(thread << 32 | life);
                    scope.spawn(move || lab.live(thread, rng, ALLOCATIONS / LIVES)).join().unwrap();
                }
            });
        }
    });
    println!("{} allocations in {:.1?}", THREADS * ALLOCATIONS, begun.elapsed());
    assert_eq!(lab.given.load(Ordering::Relaxed), THREADS * ALLOCATIONS);
    lab.finish();
}

/// The same with little room: threads run into the cap all the time, and whoever does gives something up and goes on.
#[test]
fn threads_at_the_cap_neither_hang_nor_exceed_it() {
    const CAP: u64 = 16 * MIB;
    let lab = Lab::new(PinnedSettings { cap_bytes: Some(CAP), ..PinnedSettings::default() });
    let refused = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (lab, refused) = (&lab, &refused);
            scope.spawn(move || {
                let mut rng = Rng::new(thread);
                let mut mine: Vec<Parcel> = Vec::new();
                for _ in 0..4000 {
                    let bytes = 1 + rng.u64() % (2 * MIB);
                    match lab.host.allocate(bytes) {
                        Ok(block) => {
                            lab.given.fetch_add(1, Ordering::Relaxed);
                            let parcel = Parcel { block, stamp: None };
                            lab.register.enter(parcel.range());
                            mine.push(parcel);
                        }
                        Err(warpool::Error::PinnedCap(report)) => {
                            assert!(report.bytes_pinned <= CAP, "{report}");
                            refused.fetch_add(1, Ordering::Relaxed);
                            mine.drain(..).for_each(|parcel| lab.give_back(parcel, thread, &mut Rng::new(1)));
                        }
                        Err(error) => panic!("{error}"),
                    }
                    if mine.len() > 3 {
                        lab.give_back(mine.swap_remove(0), thread, &mut rng);
                    }
                }
                mine.drain(..).for_each(|parcel| lab.give_back(parcel, thread, &mut rng));
            });
        }
    });
    assert!(refused.load(Ordering::Relaxed) > 0, "the cap was never in the way");
    let peak = lab.host.stats().allocated_bytes.peak;
    assert!(peak <= CAP, "{peak} bytes were pinned, {CAP} may be");
    lab.finish();
}

/// After warm-up the driver is not needed: not for a block, not for its way back, whatever thread it is.
#[test]
fn a_million_pairs_from_sixteen_threads_make_no_driver_call() {
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
                // As many of each size as there will ever be.
                let warm: Vec<HostBlock> =
                    (0..LIVE).flat_map(|_| SIZES).map(|bytes| host.allocate(bytes).unwrap()).collect();
                barrier.wait();
                drop(warm);
                if barrier.wait().is_leader() {
                    counting.reset();
                }
                barrier.wait();
                let mut mine: Vec<HostBlock> = Vec::with_capacity(LIVE);
                let mut nanos = Vec::with_capacity(PAIRS);
                for round in 0..PAIRS {
                    let begun = Instant::now();
                    mine.push(host.allocate(rng.pick(&SIZES)).unwrap());
                    if mine.len() == LIVE {
                        let block = mine.swap_remove(rng.below(LIVE));
                        if round % 2 == 0 { drop(block) } else { block.free().unwrap() }
                    }
                    nanos.push(begun.elapsed().as_nanos());
                }
                drop(mine);
                nanos.sort_unstable();
                p99s.lock().unwrap().push(nanos[PAIRS * 99 / 100]);
            });
        }
    });
    println!("the 99th percentile of a pair, by thread: {:?} ns", p99s.lock().unwrap());
    assert_eq!(counting.counts(), [], "calls of the driver after warm-up");
    host.check();
    host.trim(0).unwrap();
    assert_eq!(sim.object_counts().pinned, 0);
}

/// Large enough to be mapped and unmapped by itself, so that the same address is the likeliest to come next.
const LATE: u64 = 40 * MIB;

/// Pins the moment that the driver has given something up: as another thread would that comes just then.
#[derive(Default)]
struct Latecomer {
    host: Mutex<Option<HostAllocator>>,
    block: Mutex<Option<HostBlock>>,
}

impl Hook for Latecomer {
    type CallState = ();

    fn before(&self, _: &dyn Driver, _: Call, _: Arguments<'_>) -> warpool::driver::Result<()> {
        Ok(())
    }

    fn after(&self, _: &dyn Driver, call: Call, (): (), _: Outcome<'_>) {
        if call == Call::HostFree
            && let Some(host) = self.host.lock().unwrap().take()
        {
            *self.block.lock().unwrap() = Some(host.allocate(LATE).unwrap());
        }
    }

    fn suballocation(&self, _: Call, _: Arguments<'_>) {}
}

/// Found by the first test here: the driver may give an address out again before the thread that gave it up is back
/// from the call.
#[test]
fn an_address_may_come_again_at_once() {
    let sim = Arc::new(SimDriver::new(SimConfig::default()));
    let tapped = Arc::new(Hooked::with_hook(sim.clone(), Latecomer::default()));
    let instance = Instance::new(tapped.clone()).unwrap();
    let host = HostAllocator::new(&instance, PinnedSettings::default());
    let first = host.allocate(LATE).unwrap();
    let ptr = first.ptr();
    drop(first);
    *tapped.hook().host.lock().unwrap() = Some(host.clone());
    assert_eq!(host.trim(0).unwrap(), LATE);
    let block = tapped.hook().block.lock().unwrap().take().expect("it came just then");
    println!("{ptr} was given up, {} came", block.ptr());
    block.write(0, &[1; 64]).unwrap();
    host.check();
    let stats = host.stats();
    assert_eq!((stats.allocations.current, stats.allocated_bytes.current), (1, LATE));
    assert_eq!(sim.object_counts().bytes_pinned, LATE);
    drop(block);
    host.trim(0).unwrap();
    assert_eq!(sim.object_counts().pinned, 0);
}
