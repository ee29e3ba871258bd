//! Few machines with many short-lived objects: pools, graphs, streams, events, pinned blocks. Dropped objects must not
//! accumulate, neither in the driver nor in the memory of this process.

use std::sync::Arc;

use warpool::Error;
use warpool::graph::{CaptureOptions, Graph, GraphOptions};
use warpool::memory::pools::PoolOptions;
use warpool::memory::{
    Allocate as _, CachingAllocator, DeviceAllocator, HostAllocator, MemPool, MemPoolId, PinnedSettings, Settings,
};

use crate::allocators::draw_settings;
use crate::context::Context;
use crate::machine::{Machine, device_id};
use crate::resident;

const ROUNDS: u64 = 6000;
/// How much resident memory may grow from a quarter of the rounds to the end. A leak of a hundred bytes per round stays
/// below this, but adds up over the programs of a run if it outlives the machine.
const BYTES_GROWTH: u64 = 8 << 20;

/// Runs one program.
pub fn run(context: &mut Context) {
    let machine = Machine::new(context, 1, 3);
    // Memory of dropped pools is released when a request needs it, but not if the request is refused at once.
    let settings = Settings { throw_on_cudamalloc_oom: false, ..draw_settings(&mut context.rng) };
    context.step(settings.to_conf_string());
    let caching = Arc::new(CachingAllocator::new(&machine.instance, settings));
    let allocator: Arc<dyn DeviceAllocator> = caching.clone();
    let host = HostAllocator::new(&machine.instance, PinnedSettings::default());
    let kinds = context.rng.u64();
    let (mut warm, mut objects) = (0, None);
    for round in 0..ROUNDS {
        context.counts.operations += 1;
        // Each program has its own mixture of kinds, so that one of them can dominate.
        match (kinds >> (4 * (round % 16))) % 5 {
            0 | 1 => capture(context, &machine, &allocator),
            2 => pool(context, &machine, &allocator),
            3 => events(context, &machine, &allocator),
            _ => pinned(context, &machine, &host),
        }
        if round % 512 == 511 {
            machine.synchronize();
            allocator.trim(device_id(0), MemPoolId::DEFAULT).unwrap();
            host.process_pending().unwrap();
            machine.device(0).event_pool().trim().unwrap();
            caching.check();
            let counts = machine.sim.object_counts();
            let (streams, events, graphs) = (counts.streams, counts.events, counts.graphs + counts.graph_execs);
            let first = *objects.get_or_insert((streams, events, graphs));
            // Streams of a pool are created at its first use, 32 at a time.
            assert!(
                streams <= first.0 + 96 && events <= first.1 + 64 && graphs <= first.2 + 8,
                "{first:?}: {counts:?}"
            );
        }
        if round == ROUNDS / 4 {
            warm = resident::in_use().unwrap_or_default().0;
        }
    }
    let end = resident::in_use().unwrap_or_default().0;
    assert!(end <= warm + BYTES_GROWTH, "{warm} bytes were resident after {} rounds, {end} after {ROUNDS}", ROUNDS / 4);
    let pools = allocator.stats(device_id(0)).unwrap().reserved_bytes_by_private_pools.len();
    assert!(pools <= 1024, "statistics of {pools} private pools, all of which are gone");
    allocator.trim(device_id(0), MemPoolId::DEFAULT).unwrap();
    assert_eq!(caching.stats(device_id(0)).unwrap().reserved_bytes.all.current, 0, "reserved at the end");
    host.close().unwrap();
    drop((allocator, caching));
    machine.close(false);
}

fn capture(context: &mut Context, machine: &Machine, allocator: &Arc<dyn DeviceAllocator>) {
    let stream = machine.stream(0, context.rng.below(2));
    let mut graph = Graph::new(allocator, &machine.device(0), GraphOptions::default()).unwrap();
    let tag = context.rng.u64() as u32;
    let captured = graph.capture(stream, CaptureOptions::default(), |capture| {
        let block = allocator.allocate(1 + context.rng.u64() % (1 << 20), stream)?;
        machine.write_tag(block.ptr(), block.bytes(), tag, stream);
        drop(block);
        capture.allocate(4096)
    });
    match captured {
        Ok(_) => context.counts.captures += 1,
        Err(Error::OutOfMemory(_)) => {
            // In a capture, memory of earlier graphs is not returned while replays may still use it.
            context.counts.out_of_memory += 1;
            machine.synchronize();
            allocator.trim(device_id(0), MemPoolId::DEFAULT).unwrap();
            return;
        }
        Err(error) => panic!("{error}"),
    }
    for index in 0..2 {
        let on = machine.stream(0, index);
        // Replays of one graph do not overlap, but the captured stream's own work has to be over.
        machine.wait(on, machine.stream(0, 1 - index));
        graph.replay(on).unwrap();
        context.counts.replays += 1;
    }
}

fn pool(context: &mut Context, machine: &Machine, allocator: &Arc<dyn DeviceAllocator>) {
    let pool = MemPool::new(allocator, &machine.device(0), PoolOptions::default()).unwrap();
    let stream = machine.stream(0, context.rng.below(3));
    let block = allocator.allocate_in(&pool, 1 + context.rng.u64() % (4 << 20), stream).unwrap();
    context.counts.allocations += 1;
    block.record_use(machine.stream(0, context.rng.below(3))).unwrap();
    if context.rng.one_in(2) {
        drop(block);
        pool.close().unwrap();
    } else {
        drop(pool);
        drop(block);
    }
}

fn events(context: &mut Context, machine: &Machine, allocator: &Arc<dyn DeviceAllocator>) {
    let (one, two) = (machine.device(0).pool_stream().unwrap(), machine.device(0).lease_stream().unwrap());
    let mut event = machine.instance.event();
    event.record(&one).unwrap();
    event.wait(&two).unwrap();
    let block = allocator.allocate(1 + context.rng.u64() % 4096, &one).unwrap();
    context.counts.allocations += 1;
    block.record_use(&two).unwrap();
}

fn pinned(context: &mut Context, machine: &Machine, host: &HostAllocator) {
    let block = host.allocate(1 + context.rng.u64() % (1 << 18)).unwrap();
    context.counts.allocations += 1;
    block.record_use(machine.stream(0, context.rng.below(3))).unwrap();
    if context.rng.one_in(2) {
        block.free().unwrap();
    }
}
