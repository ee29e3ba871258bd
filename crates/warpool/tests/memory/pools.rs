//! Private pools: ids and uses, routing, upstreams, lifetimes in every order. A named test is the one of PyTorch that
//! it follows.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;

use crate::common::memory::{FIRST, GIB, MIB, TestContext};
use warpool::driver::sim::SimDriver;
use warpool::driver::{Call, DeviceId, DevicePtr, Memory, StreamId};
use warpool::memory::pools::{PoolOptions, Route, Upstream};
use warpool::memory::raw::Request;
use warpool::memory::{Allocate, DeviceAllocator, DeviceBlock, MemPool, MemPoolId, OomCause};
use warpool::{Error, Result};

/// An upstream that counts its calls, with a limited amount of memory.
struct Source {
    sim: Arc<SimDriver>,
    room: AtomicU64,
    allocated: AtomicU64,
    freed: AtomicU64,
}

impl Source {
    fn new(context: &TestContext, room: u64) -> Arc<Self> {
        let (allocated, freed) = (AtomicU64::new(0), AtomicU64::new(0));
        Arc::new(Self { sim: context.sim.clone(), room: AtomicU64::new(room), allocated, freed })
    }

    fn calls(&self) -> (u64, u64) {
        (self.allocated.load(Ordering::Relaxed), self.freed.load(Ordering::Relaxed))
    }
}

impl Upstream for Source {
    fn allocate(&self, device: DeviceId, bytes: u64, _: StreamId) -> Result<Option<DevicePtr>> {
        if self.room.load(Ordering::Relaxed) < bytes {
            return Ok(None);
        }
        self.room.fetch_sub(bytes, Ordering::Relaxed);
        self.allocated.fetch_add(1, Ordering::Relaxed);
        Ok(Some(self.sim.mem_alloc(device, bytes)?))
    }

    fn free(&self, ptr: DevicePtr, bytes: u64, _: DeviceId, _: StreamId) -> Result<()> {
        self.room.fetch_add(bytes, Ordering::Relaxed);
        self.freed.fetch_add(1, Ordering::Relaxed);
        Ok(self.sim.mem_free(ptr)?)
    }
}

fn pool_with(context: &TestContext, options: PoolOptions) -> MemPool {
    MemPool::new(&context.any(), &context.device(), options).unwrap()
}

fn plain_pool(context: &TestContext) -> MemPool {
    pool_with(context, PoolOptions::default())
}

fn block(context: &TestContext, bytes: u64) -> DeviceBlock {
    let block = context.allocator.allocate(bytes, &context.main).unwrap();
    context.allocator.check();
    block
}

/// TestMemPool.test_mempool_id and test_mempool_multithread.
#[test]
fn ids_are_pairs_and_never_reused() {
    let context = TestContext::new("");
    let graph = context.pools().create_graph_pool(FIRST).unwrap();
    let user = plain_pool(&context).id();
    assert!(graph.graph > 0 && graph.user == 0);
    assert!(user.graph == 0 && user.user > 0);
    let ids: BTreeSet<MemPoolId> = thread::scope(|scope| {
        let makers: Vec<_> =
            (0..4).map(|_| scope.spawn(|| (0..50).map(|_| plain_pool(&context).id()).collect::<Vec<_>>())).collect();
        makers.into_iter().flat_map(|maker| maker.join().unwrap()).collect()
    });
    assert_eq!((ids.len(), ids.contains(&user)), (200, false));
    context.finish();
}

/// TestMemPool.test_mempool_with_allocator.
#[test]
fn a_pool_can_have_an_upstream() {
    for settings in ["", "expandable_segments:True"] {
        let context = TestContext::new(settings);
        let source = Source::new(&context, GIB);
        let pool = pool_with(&context, PoolOptions { upstream: Some(source.clone()), ..PoolOptions::default() });
        assert_eq!((pool.uses().unwrap(), source.calls()), (1, (0, 0)));
        let scope = pool.enter().unwrap();
        assert_eq!(pool.uses().unwrap(), 2);
        let one = block(&context, MIB);
        assert_eq!((source.calls(), context.segments_of(pool.id()).len()), ((1, 0), 1));
        drop(scope);
        assert_eq!(pool.uses().unwrap(), 1);
        // After the scope the default pool serves requests.
        let other = block(&context, MIB);
        assert_eq!(context.segments_of(pool.id()).len(), 1);
        let scope = pool.enter().unwrap();
        let two = block(&context, MIB);
        assert_eq!(context.segments_of(pool.id()).len(), 1, "the rest of the first segment serves it");
        let three = block(&context, MIB);
        drop(scope);
        assert_eq!((source.calls(), context.segments_of(pool.id()).len()), ((2, 0), 2));
        assert!(context.segments_of(pool.id()).iter().all(|segment| !segment.is_expandable));
        drop((one, two, three, other));
        pool.close().unwrap();
        assert_eq!(source.calls(), (2, 2));
        context.allocator.check();
        context.finish();
    }
}

/// TestMemPool.test_mempool_empty_cache, test_mempool_empty_cache_inactive and
/// test_tensor_delete_after_allocator_delete.
#[test]
fn blocks_and_pools_can_be_dropped_in_any_order() {
    for block_first in [true, false] {
        let context = TestContext::new("");
        let source = Source::new(&context, GIB);
        let pool = pool_with(&context, PoolOptions { upstream: Some(source.clone()), ..PoolOptions::default() });
        let id = pool.id();
        let scope = pool.enter().unwrap();
        let live = block(&context, 30 * MIB);
        drop(scope);
        assert_eq!((context.trim(), source.calls()), (0, (1, 0)), "a pool in use is not trimmed");
        if block_first {
            drop(live);
            context.allocator.check();
            assert_eq!((context.trim(), source.calls()), (0, (1, 0)), "not even its free blocks");
            drop(pool);
        } else {
            drop(pool);
            context.allocator.check();
            assert_eq!((context.trim(), source.calls()), (0, (1, 0)), "the block is still allocated");
            context.sim_fill(live.ptr().0, 1);
            drop(live);
        }
        assert_eq!((context.trim(), source.calls()), (30 * MIB, (1, 1)));
        assert!(matches!(context.pools().pool_uses(FIRST, id), Err(Error::UnknownPool { .. })));
        context.finish();
    }
}

/// TestMemPool.test_mempool_limited_memory_with_allocator and test_deleted_mempool_not_used_on_oom.
#[test]
fn a_use_on_oom_pool_serves_the_default_pool_until_it_is_released() {
    let context = TestContext::with_capacity(GIB, "");
    let source = Source::new(&context, 400 * MIB);
    let options = PoolOptions { upstream: Some(source.clone()), use_on_oom: true, ..PoolOptions::default() };
    let pool = pool_with(&context, options);
    let scope = pool.enter().unwrap();
    let spare = block(&context, 200 * MIB);
    let place = spare.ptr();
    let outcome = context.try_alloc(300 * MIB);
    assert!(matches!(&outcome, Err(Error::OutOfMemory(report)) if report.cause == OomCause::External), "{outcome:?}");
    drop(scope);
    let most = block(&context, 800 * MIB);
    assert!(context.try_alloc(200 * MIB).is_err(), "nothing is free in the pool");
    drop(spare);
    let helped = block(&context, 200 * MIB);
    assert_eq!((helped.ptr(), pool.uses().unwrap()), (place, 1));
    drop(helped);
    pool.close().unwrap();
    assert_eq!(source.calls(), (1, 1));
    context.sim.mem_info(FIRST).unwrap();
    let fits = block(&context, 200 * MIB);
    drop((fits, most));
    context.finish();
}

/// TestMemPool.test_mempool_no_split and test_mempool_no_split_erased_on_release.
#[test]
fn no_split_blocks_are_whole_segments() {
    let context = TestContext::new("");
    let pool = pool_with(&context, PoolOptions { no_split: true, ..PoolOptions::default() });
    let scope = pool.enter().unwrap();
    let blocks = [0; 3].map(|_| block(&context, MIB));
    drop(scope);
    let segments = context.segments_of(pool.id());
    assert_eq!(segments.len(), 3);
    assert!(segments.iter().all(|segment| segment.blocks.len() == 1 && segment.total_size == 2 * MIB));
    assert_eq!((blocks[0].bytes(), blocks[0].bytes_usable()), (MIB, 2 * MIB));
    let id = pool.id();
    drop(pool);
    drop(blocks);
    context.trim();
    let next = plain_pool(&context);
    assert_ne!(next.id(), id);
    let _scope = next.enter().unwrap();
    let _blocks = [0; 2].map(|_| block(&context, MIB));
    assert_eq!(context.segments_of(next.id()).len(), 1);
    context.allocator.check();
    context.finish();
}

/// TestMemPool.test_nested_mempool.
#[test]
fn the_newest_scope_counts() {
    let context = TestContext::new("");
    let [one, two, three] = [0; 3].map(|_| plain_pool(&context));
    let counts = || [&one, &two, &three].map(|pool| context.segments_of(pool.id()).len());
    let mut kept = Vec::new();
    let outer = one.enter().unwrap();
    kept.push(block(&context, 12 * MIB));
    assert_eq!(counts(), [1, 0, 0]);
    {
        let _middle = two.enter().unwrap();
        kept.push(block(&context, 12 * MIB));
        let _inner = three.enter().unwrap();
        kept.push(block(&context, 12 * MIB));
        assert_eq!(counts(), [1, 1, 1]);
        assert_eq!(one.enter().unwrap_err(), Error::AlreadyRouting { pool: one.id() });
    }
    kept.push(block(&context, 12 * MIB));
    assert_eq!(counts(), [2, 1, 1]);
    drop(outer);
    kept.push(block(&context, 12 * MIB));
    assert_eq!((counts(), context.segments().len()), ([2, 1, 1], 5));
    context.finish();
}

/// A scope can end before one that was opened later.
#[test]
fn scopes_may_end_in_any_order() {
    let context = TestContext::new("");
    let (one, two) = (plain_pool(&context), plain_pool(&context));
    let (outer, inner) = (one.enter().unwrap(), two.enter().unwrap());
    drop(outer);
    let kept = block(&context, 12 * MIB);
    assert_eq!(context.segments_of(two.id()).len(), 1);
    drop(inner);
    assert_eq!((one.uses().unwrap(), two.uses().unwrap()), (1, 1));
    drop(kept);
    context.finish();
}

/// TestMemPool.test_mempool_ctx_multithread.
#[test]
fn scopes_are_per_thread() {
    let context = TestContext::new("");
    let (mine, theirs) = (plain_pool(&context), plain_pool(&context));
    let barrier = Barrier::new(2);
    let _scope = mine.enter().unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            let _outside = block(&context, 12 * MIB);
            let _scope = theirs.enter().unwrap();
            let _inside = block(&context, 14 * MIB);
            assert!(mine.enter().is_err(), "one scope per pool, of any thread");
            barrier.wait();
            barrier.wait();
        });
        barrier.wait();
        let _inside = block(&context, 16 * MIB);
        let sizes = |pool| context.segments_of(pool).iter().map(|segment| segment.total_size / MIB).collect::<Vec<_>>();
        assert_eq!((sizes(mine.id()), sizes(theirs.id()), sizes(MemPoolId::DEFAULT)), (vec![16], vec![14], vec![12]));
        barrier.wait();
    });
    context.allocator.check();
    context.finish();
}

/// TestMemPool.test_multi_threads_alloc_in_same_order: the same requests get the same addresses again.
#[test]
fn the_same_requests_get_the_same_addresses() {
    let context = TestContext::new("");
    let pool = plain_pool(&context);
    let run = |sizes: &[u64]| {
        let _scope = pool.enter().unwrap();
        let blocks: Vec<DeviceBlock> = sizes.iter().map(|&bytes| block(&context, bytes)).collect();
        blocks.iter().map(DeviceBlock::ptr).collect::<Vec<_>>()
    };
    let equal = [12 * MIB; 6];
    let mixed = [1, 300_000, 2 * MIB, 2 * MIB, 700, 11 * MIB, 11 * MIB, 5 * MIB];
    let first = run(&equal);
    run(&mixed);
    let settled = run(&mixed);
    for _ in 0..3 {
        thread::scope(|scope| {
            scope.spawn(|| {
                assert_eq!(run(&equal), first);
                assert_eq!(run(&mixed), settled);
            });
        });
    }
    context.finish();
}

/// TestMemPool.test_mempool_release_cached_blocks_during_diversion and
/// test_mempool_oom_recovery_releases_cached_blocks.
#[test]
fn the_default_pool_can_be_trimmed_in_a_scope() {
    let context = TestContext::with_capacity(GIB, "");
    let pool = plain_pool(&context);
    drop(block(&context, 600 * MIB));
    let scope = pool.enter().unwrap();
    assert_eq!(context.trim(), 600 * MIB);
    drop(scope);
    drop(block(&context, 600 * MIB));
    let _scope = pool.enter().unwrap();
    let inside = block(&context, 700 * MIB);
    assert_eq!(
        (context.stats().num_alloc_retries, context.stats().num_ooms, context.bytes_reserved()),
        (1, 0, 700 * MIB)
    );
    drop(inside);
    context.finish();
}

/// TestMemPool.test_mempool_block_free_not_deferred: a scope is not a capture.
#[test]
fn frees_in_a_scope_are_not_deferred() {
    let context = TestContext::new("");
    let (pool, side) = (plain_pool(&context), context.side_stream());
    let _scope = pool.enter().unwrap();
    let shared = context.alloc(4 * MIB);
    side.wait_stream(&context.main).unwrap();
    context.fill(shared, 1, &side);
    context.record_use(shared, &side);
    let records = context.sim.call_count(Call::EventRecord);
    context.free(shared);
    assert_eq!(context.sim.call_count(Call::EventRecord), records + 1);
    side.synchronize().unwrap();
    assert_eq!(context.alloc(4 * MIB).ptr, shared.ptr);
    context.finish();
}

/// TestMemPool.test_mempool_expandable and test_reserved_bytes_by_private_pools(_expandable).
#[test]
fn reserved_bytes_are_counted_by_pool() {
    for settings in ["", "expandable_segments:True"] {
        let context = TestContext::new(settings);
        let (one, two) = (plain_pool(&context), plain_pool(&context));
        let of = |pool: MemPoolId| {
            let stats = context.stats();
            stats.reserved_bytes_by_private_pools.get(&pool).map_or(0, |by_kind| by_kind.all.current)
        };
        let three = plain_pool(&context);
        let (large, small) = (context.alloc_in(three.id(), 20 * MIB), context.alloc_in(three.id(), 100));
        let id = three.id();
        context.free(large);
        three.close().unwrap();
        context.trim();
        assert_eq!(of(id), 2 * MIB, "what was released does not count");
        context.free(small);
        context.trim();
        let (a, b) = (context.alloc_in(one.id(), 20 * MIB), context.alloc_in(two.id(), 40 * MIB));
        let small = context.alloc_in(two.id(), 100);
        context.alloc(20 * MIB);
        assert_eq!((of(one.id()), of(two.id()), context.bytes_reserved()), (20 * MIB, 42 * MIB, 82 * MIB));
        let growing = !settings.is_empty();
        assert!(context.segments().iter().all(|segment| segment.is_expandable == growing));
        context.free_all([a, b, small]);
        let (id, other) = (one.id(), two.id());
        one.close().unwrap();
        drop(two);
        assert_eq!((of(id), of(other)), (0, 42 * MIB));
        let entry = context.stats().reserved_bytes_by_private_pools[&other];
        assert_eq!((entry.all.peak, entry.small_pool.peak, entry.all.freed), (42 * MIB, 2 * MIB, 0));
        context.trim();
        assert_eq!(context.stats().reserved_bytes_by_private_pools.len(), 0, "removed with their pools");
        context.finish();
    }
}

#[test]
fn a_released_pool_cannot_be_retained() {
    let context = TestContext::new("");
    let pools = context.pools();
    let pool = pools.create_graph_pool(FIRST).unwrap();
    pools.retain_pool(FIRST, pool).unwrap();
    let held = context.alloc_in(pool, MIB);
    pools.release_pool(FIRST, pool).unwrap();
    pools.release_pool(FIRST, pool).unwrap();
    assert_eq!(pools.pool_uses(FIRST, pool).unwrap(), 0);
    let released = Err(Error::PoolReleased { pool });
    assert_eq!(pools.release_pool(FIRST, pool), released);
    assert_eq!(pools.retain_pool(FIRST, pool), released);
    assert_eq!(pools.begin_routing(FIRST, pool, Route::Everything), released);
    assert_eq!(pools.set_use_on_oom(FIRST, pool, true), released);
    let request = Request::new(FIRST, context.main.id(), MIB).in_pool(pool);
    assert_eq!(context.allocator.allocate_raw(request), Err(Error::PoolReleased { pool }));
    assert_eq!(pools.end_routing(FIRST, pool), Err(Error::NotRouting { pool }));
    let unknown = MemPoolId { graph: 7, user: 7 };
    assert!(matches!(pools.retain_pool(FIRST, unknown), Err(Error::UnknownPool { .. })));
    assert!(matches!(pools.has_exactly(FIRST, unknown, &[]), Err(Error::UnknownPool { .. })));
    assert!(MemPool::from_id(&context.any(), &context.device(), unknown).is_err());
    assert_eq!(context.allocator.trim(FIRST, unknown).unwrap(), 0);
    assert!(pools.release_pool(FIRST, MemPoolId::DEFAULT).is_err());
    context.free(held);
    assert_eq!(context.allocator.trim(FIRST, pool).unwrap(), 2 * MIB);
    context.finish();
}

/// TestBlockStateAbsorption.test_check_pool_live_allocations.
#[test]
fn has_exactly_compares_allocated_addresses() {
    let context = TestContext::new("");
    let pool = plain_pool(&context);
    let [a, b] = [0; 2].map(|_| context.alloc_in(pool.id(), MIB));
    context.alloc(MIB);
    let has = |live: &[DevicePtr]| context.pools().has_exactly(FIRST, pool.id(), live).unwrap();
    assert!(has(&[b.ptr, a.ptr]) && !has(&[a.ptr]) && !has(&[a.ptr, b.ptr, DevicePtr(512)]));
    context.free(a);
    assert!(has(&[b.ptr]) && !has(&[a.ptr]));
    context.finish();
}

/// Routes by stream, and for all requests of a device.
#[test]
fn requests_can_be_routed_by_stream() {
    let context = TestContext::new("");
    let (pool, side) = (plain_pool(&context), context.side_stream());
    let scope = pool.route(Route::Stream(side.id())).unwrap();
    context.alloc_on(&side, MIB);
    context.alloc(MIB);
    assert_eq!(context.segments_of(pool.id()).len(), 1);
    drop(scope);
    let _scope = pool.route(Route::Everything).unwrap();
    context.alloc(MIB);
    assert_eq!((context.segments_of(pool.id()).len(), context.segments().len()), (2, 3));
    // A request that names a pool is not routed.
    context.alloc_in(MemPoolId::DEFAULT, MIB);
    assert_eq!(context.segments().len(), 3);
    context.finish();
}
