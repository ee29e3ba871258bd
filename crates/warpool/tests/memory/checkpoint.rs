//! Checkpoints of private pools, after PyTorch's TestBlockStateAbsorption.

use std::ops::Range;
use std::thread;

use crate::common::memory::{FIRST, KIB, MIB, TestContext};
use warpool::Error;
use warpool::driver::DevicePtr;
use warpool::memory::pools::{Checkpoints as _, PoolOptions, PrivatePools as _, Restored};
use warpool::memory::raw::{Allocation, Request};
use warpool::memory::report::BlockState;
use warpool::memory::{Allocate as _, CachingAllocator, DeviceAllocator, DeviceBlock, MemPool, MemPoolId, Settings};

/// The address, size and state of every block of a pool.
fn layout(context: &TestContext, pool: MemPoolId) -> Vec<(u64, u64, BlockState)> {
    let segments = context.segments_of(pool);
    let blocks = segments.iter().flat_map(|segment| &segment.blocks);
    blocks.map(|block| (block.address, block.size, block.state)).collect()
}

fn pool(context: &TestContext) -> MemPoolId {
    context.pools().create_graph_pool(FIRST).unwrap()
}

fn ptrs(blocks: &[Allocation]) -> Vec<DevicePtr> {
    let mut ptrs: Vec<DevicePtr> = blocks.iter().map(|block| block.ptr).collect();
    ptrs.sort_unstable();
    ptrs
}

/// Takes a checkpoint after `before`, runs `after`, and restores it: every block is as it was.
fn check(
    before: impl Fn(&TestContext, MemPoolId) -> Vec<Allocation>,
    after: impl Fn(&TestContext, MemPoolId, Vec<Allocation>) -> Vec<Allocation>,
) {
    for settings in ["", "expandable_segments:True", "max_split_size_mb:20"] {
        let context = TestContext::new(settings);
        let pool = pool(&context);
        let live = before(&context, pool);
        let kept = layout(&context, pool);
        let ranges =
            context.segments_of(pool).into_iter().map(|segment| segment.address..segment.address + segment.total_size);
        let segments: Vec<Range<u64>> = ranges.collect();
        let checkpoint = context.allocator.checkpoint(FIRST, pool).unwrap();
        assert_eq!((checkpoint.pool(), checkpoint.live().collect::<Vec<_>>()), (pool, ptrs(&live)));
        let live_since = after(&context, pool, live.clone());
        for round in 0..2 {
            let Restored { freed, allocated } = context.allocator.restore(&checkpoint).unwrap();
            context.allocator.check();
            let expected = if round == 0 { ptrs(&live_since) } else { ptrs(&live) };
            assert_eq!(freed, expected, "round {round} with {settings:?}");
            assert_eq!(ptrs(&allocated), ptrs(&live));
            // Without segments allocated since.
            let made_since = |address: u64| !segments.iter().any(|segment| segment.contains(&address));
            let mut now = layout(&context, pool);
            now.retain(|&(address, _, state)| !made_since(address) || state != BlockState::Inactive);
            assert_eq!(now, kept, "round {round} with {settings:?}");
            assert!(context.pools().has_exactly(FIRST, pool, &ptrs(&live)).unwrap());
            for (block, value) in allocated.iter().zip(1..) {
                context.fill(*block, value, &context.main);
            }
            for (block, value) in allocated.iter().zip(1..) {
                context.assert_holds(*block, value);
            }
            if round == 1 {
                context.free_all(allocated);
            }
        }
        context.pools().release_pool(FIRST, pool).unwrap();
        context.trim();
        assert_eq!((context.bytes_reserved(), context.stats().active.all.current), (0, 0));
        context.finish();
    }
}

fn several(context: &TestContext, pool: MemPoolId, sizes: &[u64]) -> Vec<Allocation> {
    sizes.iter().map(|&bytes| context.alloc_in(pool, bytes)).collect()
}

/// test_simple.
#[test]
fn restore_of_an_unchanged_pool() {
    check(|context, pool| several(context, pool, &[10 * MIB, 512, 3 * MIB, 700 * KIB]), |_, _, live| live);
}

/// test_allocated_in_middle_of_segment, test_multiple_middle_allocations and test_middle_allocations_contiguous.
#[test]
fn blocks_in_the_middle_of_a_segment_are_restored() {
    for kept in [vec![2], vec![1, 4, 6], vec![3, 4, 5], vec![0, 7], vec![]] {
        let before = |context: &TestContext, pool| {
            let all = several(context, pool, &[100 * KIB; 8]);
            let (live, freed): (Vec<_>, Vec<_>) = (0..8).partition(|at| kept.contains(at));
            context.free_all(freed.into_iter().map(|at: usize| all[at]));
            live.into_iter().map(|at| all[at]).collect()
        };
        check(before, |_, _, live| live);
        check(before, |context, _, live| {
            context.free_all(live);
            Vec::new()
        });
        check(before, |context, pool, live| {
            let more = several(context, pool, &[50 * KIB; 5]);
            live.into_iter().chain(more).collect()
        });
    }
}

/// test_additional_free_following_checkpoint and test_tensor_dies_after_checkpoint.
#[test]
fn blocks_freed_since_are_restored() {
    check(
        |context, pool| several(context, pool, &[MIB, MIB, 12 * MIB, 4 * MIB]),
        |context, _, live| {
            context.free_all(live[1..3].iter().copied());
            vec![live[0], live[3]]
        },
    );
}

#[test]
fn blocks_split_differently_since_are_restored() {
    check(
        |context, pool| several(context, pool, &[4 * MIB, 2 * MIB, 4 * MIB]),
        |context, pool, live| {
            context.free_all(live);
            several(context, pool, &[3 * MIB, 5 * MIB, 2 * MIB])
        },
    );
}

#[test]
fn segments_allocated_since_stay_free() {
    let context = TestContext::new("");
    let pool = pool(&context);
    let live = several(&context, pool, &[12 * MIB]);
    let checkpoint = context.allocator.checkpoint(FIRST, pool).unwrap();
    let more = several(&context, pool, &[14 * MIB, MIB]);
    let restored = context.allocator.restore(&checkpoint).unwrap();
    assert_eq!(restored.freed, ptrs(&[live[0], more[0], more[1]]));
    assert_eq!(context.bytes_reserved(), 28 * MIB);
    let free = layout(&context, pool).iter().filter(|block| block.2 == BlockState::Inactive).count();
    assert_eq!(free, 2);
    assert_eq!(context.alloc_in(pool, 14 * MIB).ptr, more[0].ptr);
    context.finish();
}

/// test_expandable_segment_checkpoint_growth: a segment that has grown since, at its end or into a hole.
#[test]
fn a_segment_that_grew_since_can_be_restored() {
    let context = TestContext::new("expandable_segments:True");
    let pool = pool(&context);
    let live = several(&context, pool, &[20 * MIB, 20 * MIB]);
    let checkpoint = context.allocator.checkpoint(FIRST, pool).unwrap();
    several(&context, pool, &[60 * MIB]);
    let restored = context.allocator.restore(&checkpoint).unwrap();
    assert_eq!(ptrs(&restored.allocated), ptrs(&live));
    context.allocator.check();
    let blocks: Vec<_> = layout(&context, pool).iter().map(|block| (block.1 / MIB, block.2)).collect();
    let (taken, free) = (BlockState::ActiveAllocated, BlockState::Inactive);
    assert_eq!(blocks, [(20, taken), (20, taken), (60, free)]);
    context.finish();
}

/// test_allocate_in_thread_to_pool, with the restore on another thread than the rest.
#[test]
fn another_thread_can_restore() {
    let context = TestContext::new("");
    let pool = pool(&context);
    let live = thread::scope(|scope| scope.spawn(|| several(&context, pool, &[3 * MIB, MIB])).join().unwrap());
    let checkpoint = context.allocator.checkpoint(FIRST, pool).unwrap();
    context.free_all(live.clone());
    let restored =
        thread::scope(|scope| scope.spawn(|| context.allocator.restore(&checkpoint)).join().unwrap()).unwrap();
    assert_eq!((restored.freed.len(), ptrs(&restored.allocated)), (0, ptrs(&live)));
    // The allocations from before are not valid any more.
    assert!(
        context.allocator.free(live[0]).is_err() || restored.allocated.iter().any(|block| block.slot == live[0].slot)
    );
    context.finish();
}

/// The statistics count every block as freed and allocated.
#[test]
fn statistics_follow_a_restore() {
    let context = TestContext::new("");
    let pool = pool(&context);
    several(&context, pool, &[3 * MIB, 1000]);
    let before = context.stats();
    let checkpoint = context.allocator.checkpoint(FIRST, pool).unwrap();
    assert_eq!(context.stats(), before);
    let restored = context.allocator.restore(&checkpoint).unwrap();
    let stats = context.stats();
    assert_eq!(stats.requested_bytes.all.current, 3 * MIB + 1000);
    assert_eq!(stats.allocated_bytes.all.current, before.allocated_bytes.all.current);
    assert_eq!(stats.allocation.all.freed, before.allocation.all.freed + 2);
    assert_eq!(restored.allocated.iter().map(|block| block.bytes_requested).max(), Some(3 * MIB));
    context.finish();
}

#[test]
fn a_checkpoint_needs_a_pool_in_use_without_pending_frees() {
    let context = TestContext::new("");
    let (pool, side) = (pool(&context), context.side_stream());
    let unknown = MemPoolId { graph: 99, user: 0 };
    let error = context.allocator.checkpoint(FIRST, unknown).unwrap_err();
    assert!(error.to_string().contains("could not find pool of id"), "{error}");
    assert!(context.allocator.checkpoint(FIRST, MemPoolId::DEFAULT).is_err(), "the default pool is not a private one");
    let [block, other] = [0; 2].map(|_| context.alloc_in(pool, 4 * MIB));
    let checkpoint = context.allocator.checkpoint(FIRST, pool).unwrap();
    context.pause_stream(&side);
    side.wait_stream(&context.main).unwrap();
    context.fill(block, 1, &side);
    context.record_use(block, &side);
    context.free(block);
    let stats = context.stats();
    assert!(matches!(context.allocator.checkpoint(FIRST, pool), Err(Error::Checkpoint { .. })));
    assert!(matches!(context.allocator.restore(&checkpoint), Err(Error::Checkpoint { .. })));
    assert_eq!(context.stats(), stats);
    context.resume_stream(&side);
    context.allocator.checkpoint(FIRST, pool).unwrap();
    context.pools().release_pool(FIRST, pool).unwrap();
    assert!(context.allocator.checkpoint(FIRST, pool).is_err(), "it is released");
    assert!(context.allocator.restore(&checkpoint).is_err());
    context.free(other);
    context.trim();
    assert!(matches!(context.allocator.restore(&checkpoint), Err(Error::UnknownPool { .. })));
    context.finish();
}

/// A restored block waits, after its free, for streams that had used the block before the checkpoint.
#[test]
fn recorded_uses_are_restored() {
    let context = TestContext::new("");
    let (pool, side) = (pool(&context), context.side_stream());
    let block = context.alloc_in(pool, 4 * MIB);
    context.record_use(block, &side);
    let checkpoint = context.allocator.checkpoint(FIRST, pool).unwrap();
    let restored = context.allocator.restore(&checkpoint).unwrap().allocated[0];
    context.pause_stream(&side);
    side.wait_stream(&context.main).unwrap();
    context.fill(restored, 1, &side);
    context.free(restored);
    assert_ne!(context.alloc_in(pool, 4 * MIB).ptr, block.ptr);
    context.resume_stream(&side);
    assert_eq!(context.alloc_in(pool, 4 * MIB).ptr, block.ptr);
    context.finish();
}

/// Issue 12: a restore forgot which streams use the blocks that it frees, and the memory was allocated again while they
/// did.
#[test]
fn what_a_restore_frees_waits_for_the_streams_that_use_it() {
    let context = TestContext::new("");
    let (pool, side) = (pool(&context), context.side_stream());
    let empty = context.allocator.checkpoint(FIRST, pool).unwrap();
    let block = context.alloc_in(pool, 4 * MIB);
    context.pause_stream(&side);
    context.fill(block, 1, &side);
    context.record_use(block, &side);
    assert_eq!(context.allocator.restore(&empty).unwrap().freed, [block.ptr]);
    context.allocator.check();
    let next = context.alloc_in(pool, 4 * MIB);
    assert_ne!(next.ptr, block.ptr, "a stream still writes there");
    context.fill(next, 2, &context.main);
    assert!(matches!(context.allocator.restore(&empty), Err(Error::Checkpoint { .. })), "it waits");
    context.resume_stream(&side);
    assert_eq!(context.alloc_in(pool, 4 * MIB).ptr, block.ptr, "free once the stream is done");
    context.finish();
}

#[test]
fn a_restored_block_waits_for_the_streams_that_used_its_memory_since() {
    // The same block; a larger one around it; two adjacent ones; one that begins before it.
    for (before, since) in [(vec![4], vec![4]), (vec![4], vec![8]), (vec![8], vec![4, 4]), (vec![2, 4], vec![5])] {
        let context = TestContext::new("");
        let (pool, side) = (pool(&context), context.side_stream());
        let saved: Vec<Allocation> = before.iter().map(|&mib| context.alloc_in(pool, mib * MIB)).collect();
        let checkpoint = context.allocator.checkpoint(FIRST, pool).unwrap();
        context.free_all(saved.iter().copied());
        let later: Vec<Allocation> = since.iter().map(|&mib| context.alloc_in(pool, mib * MIB)).collect();
        context.pause_stream(&side);
        for &block in &later {
            context.fill(block, 1, &side);
            context.record_use(block, &side);
        }
        let used = later[0].ptr.0..later.last().map(|last| last.ptr.0 + last.bytes).unwrap();
        let restored = context.allocator.restore(&checkpoint).unwrap();
        context.allocator.check();
        assert_eq!(ptrs(&restored.allocated), ptrs(&saved));
        context.free_all(restored.allocated);
        let is_used = |block: &Allocation| block.ptr.0 < used.end && used.start < block.ptr.0 + block.bytes;
        let mut others = Vec::new();
        for mib in [2, 2, 4, 4, 8] {
            let other = context.alloc_in(pool, mib * MIB);
            assert!(!is_used(&other), "{before:?}, {since:?}: {mib} MiB at {}", other.ptr);
            context.fill(other, 2, &context.main);
            others.push(other);
        }
        context.resume_stream(&side);
        context.free_all(others);
        context.main.synchronize().unwrap();
        context.alloc_in(pool, 2 * MIB);
        let snapshot = layout(&context, pool);
        assert!(snapshot.iter().all(|block| block.2 != BlockState::ActivePendingFree), "{snapshot:?}");
        context.finish();
    }
}

/// Uses in a capture count as uses too, as long as the capture is active.
#[test]
fn what_a_capture_uses_is_not_reused_after_a_restore_in_it() {
    let context = TestContext::new("");
    let (pool, side) = (pool(&context), context.side_stream());
    let capturing = context.device().lease_stream().unwrap();
    let empty = context.allocator.checkpoint(FIRST, pool).unwrap();
    context.begin_capture(&capturing);
    side.wait_stream(&capturing).unwrap();
    let block = context.alloc_in_on(pool, &capturing, 4 * MIB);
    context.fill(block, 1, &side);
    context.record_use(block, &side);
    context.allocator.restore(&empty).unwrap();
    context.allocator.check();
    let next = context.alloc_in_on(pool, &capturing, 4 * MIB);
    assert_ne!(next.ptr, block.ptr, "the other stream's work is not ordered before");
    capturing.wait_stream(&side).unwrap();
    let exec = context.end_capture(&capturing);
    warpool::driver::Graphs::graph_exec_destroy(&*context.sim, exec).unwrap();
    assert_eq!(context.alloc_in_on(pool, &capturing, 4 * MIB).ptr, block.ptr, "free after the capture");
    context.finish();
}

/// Issue 12: a block from before a restore, dropped after it, freed the restored one, which was then allocated twice.
#[test]
fn a_stale_block_frees_nothing() {
    let context = TestContext::new("");
    let pool = MemPool::new(&context.any(), &context.device(), PoolOptions::default()).unwrap();
    let stale = context.any().allocate_in(&pool, 4 * MIB, &context.main).unwrap();
    let ptr = stale.ptr();
    let checkpoint = context.allocator.checkpoint(FIRST, pool.id()).unwrap();
    let restored = context.allocator.restore(&checkpoint).unwrap().allocated[0];
    assert_eq!(restored.ptr, ptr);
    drop(stale);
    assert_eq!(context.allocator.find(ptr), Ok(restored), "it is still allocated");
    assert_ne!(context.alloc_in(pool.id(), 4 * MIB).ptr, ptr);
    // Nor does it free an allocation of another owner there.
    // SAFETY: no typed memory is built on it. It is freed below, and the drop finds nothing.
    let stale = unsafe { DeviceBlock::from_raw(&context.any(), restored) };
    context.free(restored);
    let next = context.alloc_in(pool.id(), 4 * MIB);
    assert_eq!(next.ptr, ptr);
    assert_eq!(context.allocator.free(restored), Err(Error::UnknownPointer { ptr }));
    drop(stale);
    assert_eq!(context.allocator.find(ptr), Ok(next));
    context.free(next);
    context.finish();
}

/// Two allocators number their pools alike.
#[test]
fn a_checkpoint_of_another_allocator_is_refused() {
    let context = TestContext::new("");
    let other = CachingAllocator::new(&context.instance, Settings::default());
    let pool = pool(&context);
    assert_eq!(other.create_graph_pool(FIRST), Ok(pool));
    context.alloc_in(pool, MIB);
    let checkpoint = context.allocator.checkpoint(FIRST, pool).unwrap();
    assert_eq!(other.restore(&checkpoint), Err(Error::ForeignAllocator { pool }));
    context.allocator.restore(&checkpoint).unwrap();
    context.finish();
}

/// A checkpoint examines only its own pool, whatever else there is.
#[test]
fn a_checkpoint_takes_as_long_as_its_pool_is_large() {
    let mut steps = Vec::new();
    for others in [100, 1_000, 10_000] {
        let context = TestContext::new("");
        let pool = pool(&context);
        let block = context.alloc_in(pool, MIB);
        for at in 0..others {
            let bytes = if at % 10 == 0 { 2 * MIB } else { 1_000 };
            context.allocator.allocate_raw(Request::new(FIRST, context.main.id(), bytes)).unwrap();
        }
        let before = warpool::steps_taken();
        let checkpoint = context.allocator.checkpoint(FIRST, pool).unwrap();
        let restored = context.allocator.restore(&checkpoint).unwrap();
        assert_eq!((restored.freed, ptrs(&restored.allocated)), (vec![block.ptr], vec![block.ptr]));
        assert!(context.pools().has_exactly(FIRST, pool, &[block.ptr]).unwrap());
        steps.push(warpool::steps_taken() - before);
        context.finish();
    }
    assert!(steps.iter().all(|&count| count == steps[0] && count < 50), "{steps:?}");
}

#[test]
fn memory_that_a_capture_uses_is_not_restored_during_it() {
    let context = TestContext::new("");
    let (pool, side) = (pool(&context), context.side_stream());
    let capturing = context.device().lease_stream().unwrap();
    let block = context.alloc_in_on(pool, &capturing, 4 * MIB);
    let checkpoint = context.allocator.checkpoint(FIRST, pool).unwrap();
    context.begin_capture(&capturing);
    side.wait_stream(&capturing).unwrap();
    context.fill(block, 1, &side);
    context.record_use(block, &side);
    let stats = context.stats();
    assert!(matches!(context.allocator.restore(&checkpoint), Err(Error::Checkpoint { .. })));
    assert_eq!(context.stats(), stats, "nothing has changed");
    capturing.wait_stream(&side).unwrap();
    let exec = context.end_capture(&capturing);
    warpool::driver::Graphs::graph_exec_destroy(&*context.sim, exec).unwrap();
    assert_eq!(context.allocator.restore(&checkpoint).unwrap().freed, [block.ptr]);
    context.finish();
}
