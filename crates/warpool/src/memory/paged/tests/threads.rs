//! Threads on one allocator, each with streams of its own, blocks that are passed between threads, little memory, and
//! trims at any time. The interleaving differs from run to run; what is asserted holds for all.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use warpool_driver::{
    CaptureMode, CaptureState, Captures as _, Graphs as _, InstantiateOptions, StreamId, Streams as _,
};
use warpool_testing::Rng;

use super::machine::{DEVICE, MIB, Machine};
use crate::memory::{
    Allocation, DeviceAllocator as _, MemPoolId, PoolOptions, PrivatePools as _, Request, Route, Settings,
};
use crate::{Error, Stream};

const THREADS: usize = 4;
/// For work; one more per thread is for captures, since work of another thread in it would be captured too.
const STREAMS_EACH: usize = 2;

/// What the threads share.
struct Shared<'a> {
    machine: &'a Machine,
    allocations: AtomicU64,
    ooms: AtomicU64,
    exchange: Mutex<Vec<Tagged>>,
    next_tag: AtomicU64,
}

/// A block with a tag, which may be passed to another thread.
struct Tagged {
    block: Allocation,
    tag: u32,
    stream: Stream,
}

pub fn run(seed: u64, rounds: usize) {
    let machine = Machine::new(seed, THREADS * (STREAMS_EACH + 1), Settings::default());
    let shared = Shared {
        machine: &machine,
        allocations: AtomicU64::new(0),
        ooms: AtomicU64::new(0),
        exchange: Mutex::default(),
        next_tag: AtomicU64::new(1),
    };
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let shared = &shared;
            scope.spawn(move || shared.work(thread, Rng::new(seed * 100 + thread as u64), rounds));
        }
    });
    for tagged in shared.exchange.lock().unwrap().drain(..) {
        shared.free(&tagged);
    }
    let paged = &machine.paged;
    paged.check();
    paged.trim(DEVICE, MemPoolId::DEFAULT).unwrap();
    paged.check();
    let stats = paged.stats(DEVICE).unwrap();
    let allocations = shared.allocations.load(Ordering::Relaxed);
    assert_eq!((stats.allocation.all.allocated, stats.allocation.all.freed), (allocations, allocations), "seed {seed}");
    assert_eq!(stats.num_ooms, shared.ooms.load(Ordering::Relaxed), "seed {seed}");
    let left = (stats.active_bytes.all.current, stats.reserved_bytes.all.current);
    assert_eq!(left, (0, 0), "seed {seed}: active and reserved");
    assert_eq!(machine.finish(), None, "seed {seed}");
}

impl Shared<'_> {
    fn work(&self, thread: usize, mut rng: Rng, rounds: usize) {
        let first = thread * (STREAMS_EACH + 1);
        let streams = &self.machine.streams[first..first + STREAMS_EACH];
        let for_captures = &self.machine.streams[first + STREAMS_EACH];
        let paged = &self.machine.paged;
        let mut pool = self.create_pool(&mut rng);
        let mut mine: Vec<Tagged> = Vec::new();
        for _ in 0..rounds {
            let stream = &streams[rng.below(STREAMS_EACH)];
            match rng.below(16) {
                0..7 => {
                    let pool = if rng.one_in(4) { pool } else { MemPoolId::DEFAULT };
                    match self.allocate(&mut rng, stream, Some(pool)) {
                        Some(tagged) => mine.push(tagged),
                        None => {
                            let kept = mine.len() / 2;
                            mine.drain(kept..).for_each(|tagged| self.free(&tagged));
                        }
                    }
                }
                7 if !mine.is_empty() => {
                    let tagged = &mine[rng.below(mine.len())];
                    if tagged.stream != *stream {
                        self.machine.wait(stream, &tagged.stream);
                        self.machine.check_tag(&tagged.block, tagged.tag, stream);
                        paged.record_use(tagged.block, stream.id()).unwrap();
                    }
                }
                8..12 if !mine.is_empty() => self.free(&mine.swap_remove(rng.below(mine.len()))),
                12 if !mine.is_empty() => {
                    let tagged = mine.swap_remove(rng.below(mine.len()));
                    self.exchange.lock().unwrap().push(tagged);
                }
                13 => {
                    let tagged = self.exchange.lock().unwrap().pop();
                    tagged.iter().for_each(|tagged| self.free(tagged));
                }
                14 if rng.one_in(4) => drop(paged.trim(DEVICE, MemPoolId::DEFAULT).unwrap()),
                14 if rng.one_in(4) => {
                    // Its blocks live on.
                    paged.release_pool(DEVICE, pool).unwrap();
                    pool = self.create_pool(&mut rng);
                }
                15 if rng.one_in(4) => self.capture(&mut rng, for_captures),
                _ => {}
            }
        }
        mine.iter().for_each(|tagged| self.free(tagged));
        paged.release_pool(DEVICE, pool).unwrap();
    }

    fn create_pool(&self, rng: &mut Rng) -> MemPoolId {
        let options = PoolOptions { use_on_oom: rng.one_in(2), ..PoolOptions::default() };
        self.machine.paged.create_pool(DEVICE, options).unwrap()
    }

    fn allocate(&self, rng: &mut Rng, stream: &Stream, pool: Option<MemPoolId>) -> Option<Tagged> {
        let bytes = if rng.one_in(3) { rng.u64_in(1..=MIB) } else { rng.u64_in(MIB..=12 * MIB) };
        let request = Request { pool, ..Request::new(DEVICE, stream.id(), bytes) };
        match self.machine.paged.allocate_raw(request) {
            Ok(block) => {
                self.allocations.fetch_add(1, Ordering::Relaxed);
                let tag = u32::try_from(self.next_tag.fetch_add(1, Ordering::Relaxed)).expect("few blocks");
                self.machine.write_tag(&block, tag, stream);
                Some(Tagged { block, tag, stream: stream.clone() })
            }
            Err(Error::OutOfMemory(_)) => {
                self.ooms.fetch_add(1, Ordering::Relaxed);
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    fn free(&self, tagged: &Tagged) {
        self.machine.check_tag(&tagged.block, tagged.tag, &tagged.stream);
        self.machine.paged.free(tagged.block).unwrap();
    }

    /// A graph with a pool of its own, captured, launched and destroyed, while the other threads go on.
    fn capture(&self, rng: &mut Rng, stream: &Stream) {
        let (sim, paged, id): (_, _, StreamId) = (&self.machine.sim, &self.machine.paged, stream.id());
        let pool = paged.create_graph_pool(DEVICE).unwrap();
        // Before the driver's call: every thread must check for captures from the beginning.
        paged.capture_began(DEVICE).unwrap();
        sim.capture_begin(id, CaptureMode::ThreadLocal).unwrap();
        let CaptureState::Active(capture) = sim.capture_state(id).unwrap() else { panic!("the stream should capture") };
        paged.begin_routing(DEVICE, pool, Route::Capture(capture)).unwrap();
        let mut kept = Vec::new();
        for _ in 0..3 + rng.below(3) {
            let Some(tagged) = self.allocate(rng, stream, None) else { continue };
            self.machine.check_tag(&tagged.block, tagged.tag, stream);
            if rng.one_in(2) { kept.push(tagged) } else { paged.free(tagged.block).unwrap() }
        }
        let graph = sim.capture_end(id).unwrap();
        paged.end_routing(DEVICE, pool).unwrap();
        paged.capture_ended(DEVICE).unwrap();
        let exec = sim.graph_instantiate(graph, InstantiateOptions::default()).unwrap();
        for _ in 0..2 {
            sim.graph_launch(exec, id).unwrap();
        }
        sim.stream_synchronize(id).unwrap();
        sim.graph_exec_destroy(exec).unwrap();
        sim.graph_destroy(graph).unwrap();
        kept.iter().for_each(|tagged| self.free(tagged));
        paged.release_pool(DEVICE, pool).unwrap();
    }
}
