//! Costs that do not grow with the number of existing objects: driver calls and steps are counted at one size and at
//! ten times that size.

use std::sync::Arc;
use std::thread::ThreadId;

use crate::common::memory::{FIRST, MIB, TestContext};
use warpool::Stream;
use warpool::driver::{Copies as _, Pattern, StreamId, StreamOptions, Streams as _};
use warpool::memory::pools::{PoolOptions, Route};
use warpool::memory::raw::Request;
use warpool::memory::{DeviceAllocator, MemPool};

/// `count` streams, none of them shared.
fn streams(context: &TestContext, count: usize) -> Vec<StreamId> {
    let options = StreamOptions { non_blocking: true, priority: 0 };
    (0..count).map(|_| context.sim.stream_create(FIRST, options).unwrap()).collect()
}

/// Driver calls of an allocation and a free.
fn calls_of_pair(context: &TestContext, stream: &Stream, bytes: u64) -> u64 {
    let request = Request::new(FIRST, stream.id(), bytes);
    let before = context.sim.calls_made();
    let block = context.allocator.allocate_raw(request).unwrap();
    context.allocator.free(block).unwrap();
    context.sim.calls_made() - before
}

/// For each of `streams`, which hold work, frees a block of the default stream that the stream used.
fn free_on_all(context: &TestContext, streams: &[StreamId]) {
    for &stream in streams {
        context.sim.pause_stream(stream).unwrap();
        let block = context.allocator.allocate_raw(Request::new(FIRST, context.main.id(), 600)).unwrap();
        context.sim.fill(block.ptr, Pattern::U8(1), 8, stream).unwrap();
        context.allocator.record_use(block, stream).unwrap();
        context.allocator.free(block).unwrap();
    }
}

/// PyTorch queries the oldest event of every stream at every request.
#[test]
fn a_pair_beside_pending_frees_on_many_streams() {
    let calls = [300, 3000].map(|count| {
        let context = TestContext::new("");
        let other = context.side_stream();
        calls_of_pair(&context, &other, MIB);
        calls_of_pair(&context, &context.main, 5 * MIB);
        let used = streams(&context, count);
        free_on_all(&context, &used);
        let unrelated = calls_of_pair(&context, &other, MIB);
        let same_stream = calls_of_pair(&context, &context.main, 5 * MIB);
        assert_eq!(context.stats().active.all.current, count as u64, "all are pending");
        // Once the streams are done, one request completes all frees.
        for &stream in &used {
            context.sim.run_paused(stream, u64::MAX).unwrap();
        }
        calls_of_pair(&context, &other, MIB);
        assert_eq!(context.stats().active.all.current, 0);
        context.sim.clear_hazards();
        context.finish();
        (unrelated, same_stream)
    });
    assert_eq!(calls[0], calls[1]);
    assert!(calls[0].0 < 100, "{calls:?}");
}

/// A request that finds no block polls all fences that its stream's blocks wait for, and only those.
#[test]
fn a_request_finds_its_block_among_pending_frees_on_many_streams() {
    let context = TestContext::new("");
    let (own, side) = (context.side_stream(), context.side_stream());
    let used = streams(&context, 500);
    let (before, after) = used.split_at(250);
    free_on_all(&context, before);
    let block = context.alloc_on(&own, 30 * MIB);
    context.record_use(block, &side);
    context.free(block);
    side.synchronize().unwrap();
    free_on_all(&context, after);
    let calls = context.sim.calls_made();
    let again = context.allocator.allocate_raw(Request::new(FIRST, own.id(), 30 * MIB)).unwrap();
    assert_eq!(again.ptr, block.ptr, "its free is complete");
    assert!(context.sim.calls_made() - calls < 150, "{} calls", context.sim.calls_made() - calls);
    context.free(again);
    for &stream in &used {
        context.sim.run_paused(stream, u64::MAX).unwrap();
    }
    context.sim.clear_hazards();
    context.finish();
}

/// A capture in which `count` blocks are freed that another stream used. Returns driver calls and steps of a pair on a
/// third stream.
fn beside_deferred_frees(count: usize, streams_used: usize) -> (u64, u64) {
    let context = TestContext::new("");
    let stream = context.side_stream();
    let other = context.device().lease_stream().unwrap();
    calls_of_pair(&context, &other, MIB);
    let sides = streams(&context, streams_used);
    let pool = context.pools().create_graph_pool(FIRST).unwrap();
    let capture = context.begin_capture(&stream);
    context.pools().begin_routing(FIRST, pool, Route::Capture(capture)).unwrap();
    for at in 0..count {
        let block = context.allocator.allocate_raw(Request::new(FIRST, stream.id(), 600)).unwrap();
        context.allocator.record_use(block, sides[at % streams_used]).unwrap();
        context.allocator.free(block).unwrap();
    }
    assert_eq!(context.stats().active.all.current, count as u64, "all are deferred");
    calls_of_pair(&context, &other, MIB);
    let steps = context.allocator.deferred_steps();
    let calls = calls_of_pair(&context, &other, MIB);
    let steps = context.allocator.deferred_steps() - steps;
    context.end_capture(&stream);
    context.pools().end_routing(FIRST, pool).unwrap();
    calls_of_pair(&context, &other, MIB);
    calls_of_pair(&context, &other, MIB);
    assert_eq!(context.stats().active.all.current, 0, "one request after the capture completes all frees");
    context.finish();
    (calls, steps)
}

#[test]
fn a_pair_beside_frees_that_a_capture_deferred() {
    let costs = [200, 2000].map(|count| beside_deferred_frees(count, 2));
    assert_eq!(costs[0], costs[1]);
    assert!(costs[0].1 < 10, "{costs:?}");
    assert!(beside_deferred_frees(1000, 300).0 < 100);
}

/// The status of a capture is read once, not once per scope.
#[test]
fn a_pair_beside_many_scopes() {
    let other_thread: ThreadId = std::thread::spawn(|| std::thread::current().id()).join().unwrap();
    let calls = [50, 500].map(|count| {
        let context = TestContext::new("");
        let (stream, other) = (context.side_stream(), context.side_stream());
        calls_of_pair(&context, &other, MIB);
        let capture = context.begin_capture(&stream);
        let any: Arc<dyn DeviceAllocator> = context.any();
        let pools: Vec<MemPool> =
            (0..count).map(|_| MemPool::new(&any, &context.device(), PoolOptions::default()).unwrap()).collect();
        let scopes: Vec<_> = pools
            .iter()
            .enumerate()
            .map(|(at, pool)| {
                let route = if at % 2 == 0 { Route::Capture(capture) } else { Route::Thread(other_thread) };
                pool.route(route).unwrap()
            })
            .collect();
        let calls = calls_of_pair(&context, &other, MIB);
        drop(scopes);
        context.end_capture(&stream);
        context.finish();
        calls
    });
    assert_eq!(calls[0], calls[1]);
    assert!(calls[0] < 10, "{calls:?}");
}

/// A removed private pool leaves no state: statistics do not grow with pools that are gone.
#[test]
fn statistics_do_not_grow_with_pools() {
    let context = TestContext::new("");
    for _ in 0..200 {
        let pool = MemPool::new(&context.any(), &context.device(), PoolOptions::default()).unwrap();
        let block = context.alloc_in(pool.id(), MIB);
        assert_eq!(context.stats().reserved_bytes_by_private_pools.len(), 1);
        context.free(block);
        pool.close().unwrap();
    }
    let empty = context.stats();
    assert_eq!(empty.reserved_bytes_by_private_pools.len(), 0);
    // A pool that is released with a block is removed with it.
    let pool = MemPool::new(&context.any(), &context.device(), PoolOptions::default()).unwrap();
    let block = context.alloc_in(pool.id(), MIB);
    drop(pool);
    assert_eq!(context.stats().reserved_bytes_by_private_pools.len(), 1);
    context.free(block);
    context.trim();
    assert_eq!(context.stats().reserved_bytes_by_private_pools.len(), 0);
    context.finish();
}

/// Streams with blocks are ordered by id; a new one is inserted among them.
#[test]
fn a_first_allocation_beside_many_streams() {
    let costs = [300, 3000].map(|count| {
        let context = TestContext::new("");
        for stream in streams(&context, count) {
            let block = context.allocator.allocate_raw(Request::new(FIRST, stream, 600)).unwrap();
            context.allocator.free(block).unwrap();
        }
        let new = context.device().lease_stream().unwrap();
        let steps = warpool::steps_taken();
        let calls = calls_of_pair(&context, &new, 600);
        let steps = warpool::steps_taken() - steps;
        assert_eq!(context.stats().segment.all.current, 1 + count as u64);
        drop(new);
        context.finish();
        (calls, steps)
    });
    assert_eq!(costs[0], costs[1]);
    assert!(costs[0].0 < 10 && costs[0].1 < 10, "{costs:?}");
}
