//! Checkpoints of private pools of the paged allocator: the same guarantees as those of the caching allocator
//! (`memory/checkpoint.rs`).

use warpool::driver::DevicePtr;
use warpool::memory::pools::{Checkpoints as _, PoolCheckpoint, PoolOptions, PrivatePools as _};
use warpool::memory::raw::{Allocation, Request};
use warpool::memory::report::{BlockState, SnapshotOptions};
use warpool::memory::{CachingAllocator, DeviceAllocator as _, MemPoolId, Settings};
use warpool::{Error, Stream};
use warpool_testing::{Rng, seeds};

use crate::{DEVICE, MIB, Machine};

impl Machine {
    fn graph_pool(&self) -> MemPoolId {
        self.paged.create_graph_pool(DEVICE).unwrap()
    }

    fn in_pool(&self, pool: MemPoolId, bytes: u64, stream: &Stream) -> Allocation {
        self.paged.allocate_raw(Request::new(DEVICE, stream.id(), bytes).in_pool(pool)).unwrap()
    }

    fn checkpoint(&self, pool: MemPoolId) -> PoolCheckpoint {
        self.paged.checkpoint(DEVICE, pool).unwrap()
    }

    /// The address, size and state of every block of a pool.
    fn layout(&self, pool: MemPoolId) -> Vec<(u64, u64, BlockState)> {
        self.paged.check();
        let options = SnapshotOptions { pool: Some(pool), ..SnapshotOptions::default() };
        let segments = self.paged.snapshot(options).unwrap().segments;
        let blocks = segments.iter().flat_map(|segment| &segment.blocks);
        blocks.map(|block| (block.address, block.size, block.state)).collect()
    }

    fn raw_fill(&self, block: Allocation, value: u8, stream: &Stream) {
        use warpool::driver::{Copies as _, Pattern};
        self.sim.fill(block.ptr, Pattern::U8(value), block.bytes, stream.id()).unwrap();
    }
}

fn ptrs(blocks: &[Allocation]) -> Vec<DevicePtr> {
    let mut ptrs: Vec<DevicePtr> = blocks.iter().map(|block| block.ptr).collect();
    ptrs.sort_unstable();
    ptrs
}

/// A request would need the fewest pages at old mappings whose pages are free in the pool. But the pages of a pool with
/// a checkpoint are not moved.
#[test]
fn pages_of_a_checkpoint_are_not_taken_back() {
    let machine = Machine::new();
    let (stream, other) = (machine.stream(), machine.stream());
    let pool = machine.graph_pool();
    let allocate = |mib: u64| machine.in_pool(pool, mib * MIB, &stream);
    let (_first, second, _third) = (allocate(5), allocate(11), allocate(2));
    machine.paged.free(second).unwrap();
    // It gets the pages of the second block; after its free, the next two blocks have them.
    let large = allocate(12);
    machine.paged.free(large).unwrap();
    let (saved, _last) = (allocate(4), allocate(8));
    stream.synchronize().unwrap();
    let checkpoint = machine.checkpoint(pool);
    machine.paged.free(saved).unwrap();
    // Enough pages for the second block's window, and one page too few for any other.
    drop(machine.block(10 * MIB, &other));
    let reserved = machine.reserved();
    let place = allocate(11).ptr;
    assert_eq!((place, machine.reserved()), (second.ptr, reserved));
    let restored = machine.paged.restore(&checkpoint).unwrap();
    assert!(restored.allocated.iter().any(|block| block.ptr == saved.ptr));
    machine.paged.check();
    machine.expect_no_hazard();
}

#[test]
fn a_restore_brings_back_every_block() {
    for seed in seeds(30) {
        println!("seed: {seed}");
        let (machine, mut rng) = (Machine::new(), Rng::new(seed));
        let streams = [machine.stream(), machine.stream()];
        let options = [PoolOptions::default(), PoolOptions { no_split: true, ..PoolOptions::default() }];
        let pool = machine.paged.create_pool(DEVICE, options[rng.below(2)].clone()).unwrap();
        // Leaves free pages that the pool may take.
        drop(machine.block(MIB * (1 + rng.u64_below(64)), &streams[0]));
        let mut live: Vec<Allocation> = Vec::new();
        let run = |rng: &mut Rng, live: &mut Vec<Allocation>| {
            for _ in 0..40 {
                if live.is_empty() || rng.below(3) > 0 {
                    let magnitude = 9 + rng.below(15);
                    live.push(machine.in_pool(pool, 1 + rng.u64_below(1 << magnitude), &streams[rng.below(2)]));
                } else {
                    machine.paged.free(live.swap_remove(rng.below(live.len()))).unwrap();
                }
            }
        };
        run(&mut rng, &mut live);
        let (checkpoint, saved) = (machine.checkpoint(pool), live.clone());
        assert_eq!(checkpoint.live().collect::<Vec<_>>(), ptrs(&saved));
        for round in 0..3 {
            run(&mut rng, &mut live);
            let stale = live.clone();
            let restored = machine.paged.restore(&checkpoint).unwrap();
            machine.paged.check();
            assert_eq!((&restored.freed, ptrs(&restored.allocated)), (&ptrs(&stale), ptrs(&saved)), "round {round}");
            let sizes = |blocks: &[Allocation]| {
                let mut sizes: Vec<_> = blocks.iter().map(|block| (block.ptr, block.bytes, block.stream)).collect();
                sizes.sort_unstable();
                sizes
            };
            assert_eq!(sizes(&restored.allocated), sizes(&saved));
            for old in stale {
                assert_eq!(machine.paged.free(old), Err(Error::UnknownPointer { ptr: old.ptr }), "it is stale");
                machine.paged.free_later(old);
            }
            assert!(machine.paged.has_exactly(DEVICE, pool, &ptrs(&saved)).unwrap());
            let stats = machine.paged.stats(DEVICE).unwrap();
            assert_eq!(stats.allocation.all.current, saved.len() as u64);
            assert_eq!(stats.requested_bytes.all.current, saved.iter().map(|block| block.bytes_requested).sum::<u64>());
            live = restored.allocated;
        }
        live.into_iter().for_each(|block| machine.paged.free(block).unwrap());
        machine.paged.release_pool(DEVICE, pool).unwrap();
        machine.paged.trim(DEVICE, MemPoolId::DEFAULT).unwrap();
        assert_eq!(machine.paged.stats(DEVICE).unwrap().reserved_bytes.all.current, 0);
        machine.expect_no_hazard();
    }
}

#[test]
fn what_cannot_be_restored_changes_nothing() {
    let machine = Machine::new();
    let (stream, side) = (machine.stream(), machine.stream());
    let pool = machine.graph_pool();
    let block = machine.in_pool(pool, 4 * MIB, &stream);
    let checkpoint = machine.checkpoint(pool);
    assert!(matches!(machine.paged.checkpoint(DEVICE, MemPoolId::DEFAULT), Err(Error::Checkpoint { .. })));
    let unknown = MemPoolId { graph: 99, user: 0 };
    assert!(matches!(machine.paged.checkpoint(DEVICE, unknown), Err(Error::UnknownPool { .. })));
    let caching = CachingAllocator::new(machine.paged.instance(), Settings::default());
    assert!(matches!(caching.restore(&checkpoint), Err(Error::ForeignAllocator { .. })));
    // A freed block that waits for a stream.
    machine.sim.pause_stream(side.id()).unwrap();
    machine.raw_fill(block, 1, &side);
    machine.paged.record_use(block, side.id()).unwrap();
    machine.paged.free(block).unwrap();
    let layout = machine.layout(pool);
    assert!(matches!(machine.paged.checkpoint(DEVICE, pool), Err(Error::Checkpoint { .. })));
    assert!(matches!(machine.paged.restore(&checkpoint), Err(Error::Checkpoint { .. })));
    assert_eq!(machine.layout(pool), layout);
    machine.sim.resume_stream(side.id()).unwrap();
    side.synchronize().unwrap();
    assert_eq!(machine.paged.restore(&checkpoint).unwrap().allocated.len(), 1);
    // The pool is released.
    machine.paged.release_pool(DEVICE, pool).unwrap();
    assert!(matches!(machine.paged.restore(&checkpoint), Err(Error::Checkpoint { .. })));
}

#[test]
fn pages_that_were_taken_since_are_an_error() {
    let machine = Machine::new();
    machine.paged.set_memory_cap(DEVICE, Some(64 * MIB)).unwrap();
    let stream = machine.stream();
    let options = PoolOptions { use_on_oom: true, ..PoolOptions::default() };
    let pool = machine.paged.create_pool(DEVICE, options).unwrap();
    let block = machine.in_pool(pool, 40 * MIB, &stream);
    let checkpoint = machine.checkpoint(pool);
    machine.paged.free(block).unwrap();
    let other = machine.block(50 * MIB, &stream);
    let refused = machine.paged.restore(&checkpoint).unwrap_err();
    assert!(refused.to_string().contains("the memory was released since"), "{refused}");
    machine.paged.check();
    drop(other);
}

#[test]
fn recorded_uses_are_kept() {
    let machine = Machine::new();
    let (stream, side) = (machine.stream(), machine.stream());
    let pool = machine.graph_pool();
    let block = machine.in_pool(pool, 4 * MIB, &stream);
    machine.paged.record_use(block, side.id()).unwrap();
    let checkpoint = machine.checkpoint(pool);
    let restored = machine.paged.restore(&checkpoint).unwrap().allocated[0];
    machine.sim.pause_stream(side.id()).unwrap();
    side.wait_stream(&stream).unwrap();
    machine.raw_fill(restored, 1, &side);
    machine.paged.free(restored).unwrap();
    assert_ne!(machine.in_pool(pool, 4 * MIB, &stream).ptr, block.ptr, "the other stream uses it");
    machine.sim.resume_stream(side.id()).unwrap();
    side.synchronize().unwrap();
    assert_eq!(machine.in_pool(pool, 4 * MIB, &stream).ptr, block.ptr);
    machine.expect_no_hazard();
}

#[test]
fn what_a_restore_frees_waits_for_the_streams_that_use_it() {
    let machine = Machine::new();
    let (stream, side) = (machine.stream(), machine.stream());
    let pool = machine.graph_pool();
    let empty = machine.checkpoint(pool);
    let block = machine.in_pool(pool, 4 * MIB, &stream);
    machine.sim.pause_stream(side.id()).unwrap();
    machine.raw_fill(block, 1, &side);
    machine.paged.record_use(block, side.id()).unwrap();
    assert_eq!(machine.paged.restore(&empty).unwrap().freed, [block.ptr]);
    let next = machine.in_pool(pool, 4 * MIB, &stream);
    assert_ne!(next.ptr, block.ptr, "a stream still writes there");
    machine.raw_fill(next, 2, &stream);
    machine.sim.resume_stream(side.id()).unwrap();
    side.synchronize().unwrap();
    assert_eq!(machine.in_pool(pool, 4 * MIB, &stream).ptr, block.ptr, "free once the stream is done");
    machine.expect_no_hazard();
}

#[test]
fn a_restored_block_is_ordered_after_the_streams_that_used_its_memory_since() {
    // The same block; a larger one around it; two adjacent ones; one that begins before it.
    for (before, since) in [(vec![4], vec![4]), (vec![4], vec![8]), (vec![8], vec![4, 4]), (vec![2, 4], vec![5])] {
        let machine = Machine::new();
        let (stream, side) = (machine.stream(), machine.stream());
        let pool = machine.graph_pool();
        let saved: Vec<Allocation> = before.iter().map(|&mib| machine.in_pool(pool, mib * MIB, &stream)).collect();
        let checkpoint = machine.checkpoint(pool);
        saved.iter().for_each(|&block| machine.paged.free(block).unwrap());
        let later: Vec<Allocation> = since.iter().map(|&mib| machine.in_pool(pool, mib * MIB, &stream)).collect();
        for &block in &later {
            side.wait_stream(&stream).unwrap();
            machine.raw_fill(block, 1, &side);
            machine.paged.record_use(block, side.id()).unwrap();
        }
        let restored = machine.paged.restore(&checkpoint).unwrap();
        machine.paged.check();
        assert_eq!(ptrs(&restored.allocated), ptrs(&saved));
        for (block, value) in restored.allocated.iter().zip(2..) {
            machine.raw_fill(*block, value, &stream);
        }
        // Other free parts of that memory are safe for their stream, too.
        for _ in 0..4 {
            machine.raw_fill(machine.in_pool(pool, 2 * MIB, &stream), 9, &stream);
        }
        restored.allocated.into_iter().for_each(|block| machine.paged.free(block).unwrap());
        machine.paged.check();
        machine.expect_no_hazard();
    }
}
