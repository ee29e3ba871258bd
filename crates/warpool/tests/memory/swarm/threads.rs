//! Threads on one allocator, each with streams of its own, blocks that are passed between threads, little memory, and
//! trims at any time. The interleaving differs from run to run; the assertions hold for all.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use warpool::driver::{CaptureMode, CaptureState, Captures as _, DeviceId, Graphs as _, InstantiateOptions};
use warpool::memory::{
    Allocate as _, CachingAllocator, DeviceAllocator, DeviceBlock, MemPool, MemPoolId, PoolOptions, PrivatePools,
    Route, Settings,
};
use warpool::{Error, Stream};

use super::machine::Machine;
use crate::common::rng::Rng;

const DEVICE: DeviceId = DeviceId(0);
const THREADS: usize = 4;
/// For work; one more per thread is for captures, since work of another thread in it would be captured too.
const STREAMS_EACH: usize = 2;
const CAP: u64 = 100 << 20;
const CHUNK: u64 = 20 << 20;

/// What the threads count.
#[derive(Default)]
struct Counts {
    allocations: AtomicU64,
    ooms: AtomicU64,
}

/// A block with a tag, which may be passed to another thread.
struct TaggedBlock {
    block: DeviceBlock,
    tag: u32,
    stream: Stream,
}

pub fn run(seed: u64, rounds: usize) {
    let machine = Machine::new(seed, 1, THREADS * (STREAMS_EACH + 1));
    let mut settings = Settings::parse("garbage_collection_threshold:0.6,memory_cap_mb:2").unwrap();
    settings.memory_cap_bytes = Some(CAP);
    settings.expandable_segments = seed % 2 == 1;
    let expandable = settings.expandable_segments;
    let allocator = Arc::new(CachingAllocator::new(&machine.instance, settings));
    let counts = Counts::default();
    let exchange: Mutex<Vec<TaggedBlock>> = Mutex::default();
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (machine, allocator, counts, exchange) = (&machine, &allocator, &counts, &exchange);
            scope.spawn(move || {
                worker(thread, Rng::new(seed * 100 + thread as u64), machine, allocator, counts, exchange, rounds);
            });
        }
    });
    drop(exchange);
    allocator.trim(DEVICE, MemPoolId::DEFAULT).unwrap();
    allocator.check();
    let stats = allocator.stats(DEVICE).unwrap();
    let allocations = counts.allocations.load(Ordering::Relaxed);
    assert_eq!((stats.allocation.all.allocated, stats.allocation.all.freed), (allocations, allocations), "seed {seed}");
    assert_eq!(stats.num_ooms, counts.ooms.load(Ordering::Relaxed), "seed {seed}");
    assert_eq!(stats.active_bytes.all.allocated, stats.active_bytes.all.freed, "seed {seed}");
    assert_eq!(stats.reserved_bytes.all.current, 0, "seed {seed}");
    // The limit is compared with the request, but an expandable segment grows by whole chunks.
    let most = if expandable { CAP + CHUNK } else { CAP };
    assert!(stats.reserved_bytes.all.peak <= most, "seed {seed}: more than the cap was reserved");
    let bytes = &stats.allocated_bytes;
    assert_eq!(bytes.small_pool.allocated + bytes.large_pool.allocated, bytes.all.allocated, "seed {seed}");
    machine.expect_clean();
}

fn worker(
    thread: usize,
    mut rng: Rng,
    machine: &Machine,
    allocator: &Arc<CachingAllocator>,
    counts: &Counts,
    exchange: &Mutex<Vec<TaggedBlock>>,
    rounds: usize,
) {
    let mine = thread * (STREAMS_EACH + 1);
    let streams = &machine.streams[0][mine..mine + STREAMS_EACH];
    let for_captures = machine.stream(0, mine + STREAMS_EACH);
    let device = machine.instance.device(0).unwrap();
    let shared: Arc<dyn DeviceAllocator> = allocator.clone();
    let pool = MemPool::new(&shared, &device, PoolOptions { use_on_oom: true, ..PoolOptions::default() }).unwrap();
    let default = MemPool::from_id(&shared, &device, MemPoolId::DEFAULT).unwrap();
    let mut mine: Vec<TaggedBlock> = Vec::new();
    for round in 0..rounds {
        let stream = &streams[rng.below(STREAMS_EACH)];
        match rng.below(16) {
            0..7 => {
                let bytes = rng.request_bytes();
                let pool = if rng.one_in(4) { &pool } else { &default };
                match allocator.allocate_in(pool, bytes, stream) {
                    Ok(block) => {
                        counts.allocations.fetch_add(1, Ordering::Relaxed);
                        let tag = u32::try_from(thread << 24 | round).expect("few rounds");
                        machine.write_tag(block.ptr(), bytes, tag, stream);
                        mine.push(TaggedBlock { block, tag, stream: stream.clone() });
                    }
                    Err(Error::OutOfMemory(_)) => {
                        counts.ooms.fetch_add(1, Ordering::Relaxed);
                        mine.truncate(mine.len() / 2);
                    }
                    Err(error) => panic!("{error}"),
                }
            }
            7 | 8 if !mine.is_empty() => {
                let tagged = &mine[rng.below(mine.len())];
                if tagged.stream != *stream {
                    stream.wait_stream(&tagged.stream).unwrap();
                    machine.check_tag(tagged.block.ptr(), tagged.block.bytes(), tagged.tag, stream);
                    tagged.block.record_use(stream).unwrap();
                }
            }
            9..12 if !mine.is_empty() => {
                let tagged = mine.swap_remove(rng.below(mine.len()));
                machine.check_tag(tagged.block.ptr(), tagged.block.bytes(), tagged.tag, &tagged.stream);
                if rng.one_in(2) { tagged.block.free().unwrap() } else { drop(tagged.block) }
            }
            12 if !mine.is_empty() => exchange.lock().unwrap().push(mine.swap_remove(rng.below(mine.len()))),
            13 => {
                let tagged = exchange.lock().unwrap().pop();
                if let Some(tagged) = tagged {
                    machine.check_tag(tagged.block.ptr(), tagged.block.bytes(), tagged.tag, &tagged.stream);
                    drop(tagged.block);
                }
            }
            14 if rng.one_in(4) => drop(allocator.trim(DEVICE, MemPoolId::DEFAULT).unwrap()),
            14 if rng.one_in(4) => drop(device.event_pool().trim().unwrap()),
            15 if rng.one_in(4) => capture(&mut rng, machine, allocator, counts, for_captures),
            _ => {}
        }
    }
    drop(mine);
    pool.close().unwrap();
}

/// A graph with a pool of its own, captured, launched and destroyed, while the other threads continue.
fn capture(rng: &mut Rng, machine: &Machine, allocator: &Arc<CachingAllocator>, counts: &Counts, stream: &Stream) {
    let sim = &machine.sim;
    let pool = allocator.create_graph_pool(DEVICE).unwrap();
    // Before the driver's call: every thread must check for captures from the beginning.
    allocator.capture_began(DEVICE).unwrap();
    sim.capture_begin(stream.id(), CaptureMode::ThreadLocal).unwrap();
    let CaptureState::Active(capture) = sim.capture_state(stream.id()).unwrap() else {
        panic!("the stream should capture")
    };
    allocator.begin_routing(DEVICE, pool, Route::Capture(capture)).unwrap();
    let mut kept = Vec::new();
    for round in 0..3 + rng.below(3) {
        let bytes = rng.request_bytes().div_ceil(4);
        match allocator.allocate(bytes, stream) {
            Ok(block) => {
                counts.allocations.fetch_add(1, Ordering::Relaxed);
                let tag = u32::try_from(round).expect("few") | 1 << 30;
                machine.write_tag(block.ptr(), bytes, tag, stream);
                machine.check_tag(block.ptr(), bytes, tag, stream);
                if rng.one_in(2) {
                    kept.push(block);
                }
            }
            Err(Error::OutOfMemory(_)) => drop(counts.ooms.fetch_add(1, Ordering::Relaxed)),
            Err(error) => panic!("{error}"),
        }
    }
    let graph = sim.capture_end(stream.id()).unwrap();
    allocator.end_routing(DEVICE, pool).unwrap();
    allocator.capture_ended(DEVICE).unwrap();
    let exec = sim.graph_instantiate(graph, InstantiateOptions::default()).unwrap();
    for _ in 0..2 {
        sim.graph_launch(exec, stream.id()).unwrap();
    }
    stream.synchronize().unwrap();
    sim.graph_exec_destroy(exec).unwrap();
    sim.graph_destroy(graph).unwrap();
    drop(kept);
    allocator.release_pool(DEVICE, pool).unwrap();
}
