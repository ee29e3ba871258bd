//! Private pools: ids and uses, routing, sources of their own, lifetimes in every order. After PyTorch's TestMemPool
//! where a test is named.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;

use crate::common::memory::{Bench, FIRST, GIB, MIB};
use warpool::driver::sim::SimDriver;
use warpool::driver::{Call, DeviceId, DevicePtr, Memory, StreamId};
use warpool::memory::{
    Allocate, DeviceAllocator, DeviceBlock, MemPool, MemPoolId, OomCause, PoolOptions, PoolScope, Request, Route,
    Upstream,
};
use warpool::{Error, Result};

/// A source of memory that counts, and that can have less than the device.
struct Source {
    sim: Arc<SimDriver>,
    room: AtomicU64,
    allocated: AtomicU64,
    freed: AtomicU64,
}

impl Source {
    fn new(bench: &Bench, room: u64) -> Arc<Self> {
        let (allocated, freed) = (AtomicU64::new(0), AtomicU64::new(0));
        Arc::new(Self { sim: bench.sim.clone(), room: AtomicU64::new(room), allocated, freed })
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

fn pool_with(bench: &Bench, options: PoolOptions) -> MemPool {
    MemPool::new(&bench.any(), &bench.device(), options).unwrap()
}

fn plain_pool(bench: &Bench) -> MemPool {
    pool_with(bench, PoolOptions::default())
}

fn block(bench: &Bench, bytes: u64) -> DeviceBlock {
    let block = bench.allocator.allocate(bytes, &bench.main).unwrap();
    bench.allocator.check();
    block
}

/// TestMemPool.test_mempool_id and test_mempool_multithread.
#[test]
fn ids_are_pairs_and_never_come_twice() {
    let bench = Bench::new("");
    let graph = bench.pools().create_graph_pool(FIRST).unwrap();
    let user = plain_pool(&bench).id();
    assert!(graph.graph > 0 && graph.user == 0);
    assert!(user.graph == 0 && user.user > 0);
    let ids: BTreeSet<MemPoolId> = thread::scope(|scope| {
        let makers: Vec<_> =
            (0..4).map(|_| scope.spawn(|| (0..50).map(|_| plain_pool(&bench).id()).collect::<Vec<_>>())).collect();
        makers.into_iter().flat_map(|maker| maker.join().unwrap()).collect()
    });
    assert_eq!((ids.len(), ids.contains(&user)), (200, false));
    bench.finish();
}

/// TestMemPool.test_mempool_with_allocator.
#[test]
fn a_pool_can_have_a_source_of_its_own() {
    for settings in ["", "expandable_segments:True"] {
        let bench = Bench::new(settings);
        let source = Source::new(&bench, GIB);
        let pool = pool_with(&bench, PoolOptions { upstream: Some(source.clone()), ..PoolOptions::default() });
        assert_eq!((pool.uses().unwrap(), source.calls()), (1, (0, 0)));
        let scope = pool.enter().unwrap();
        assert_eq!(pool.uses().unwrap(), 2);
        let one = block(&bench, MIB);
        assert_eq!((source.calls(), bench.segments_of(pool.id()).len()), ((1, 0), 1));
        drop(scope);
        assert_eq!(pool.uses().unwrap(), 1);
        // Out of the scope the default pool serves.
        let other = block(&bench, MIB);
        assert_eq!(bench.segments_of(pool.id()).len(), 1);
        let scope = pool.enter().unwrap();
        let two = block(&bench, MIB);
        assert_eq!(bench.segments_of(pool.id()).len(), 1, "what is left of the first segment");
        let three = block(&bench, MIB);
        drop(scope);
        assert_eq!((source.calls(), bench.segments_of(pool.id()).len()), ((2, 0), 2));
        assert!(bench.segments_of(pool.id()).iter().all(|segment| !segment.is_expandable));
        drop((one, two, three, other));
        pool.close().unwrap();
        assert_eq!(source.calls(), (2, 2));
        bench.allocator.check();
        bench.finish();
    }
}

/// TestMemPool.test_mempool_empty_cache, test_mempool_empty_cache_inactive and
/// test_tensor_delete_after_allocator_delete.
#[test]
fn blocks_and_pools_can_go_in_any_order() {
    for block_first in [true, false] {
        let bench = Bench::new("");
        let source = Source::new(&bench, GIB);
        let pool = pool_with(&bench, PoolOptions { upstream: Some(source.clone()), ..PoolOptions::default() });
        let id = pool.id();
        let scope = pool.enter().unwrap();
        let live = block(&bench, 30 * MIB);
        drop(scope);
        assert_eq!((bench.trim(), source.calls()), (0, (1, 0)), "a pool in use is left alone");
        if block_first {
            drop(live);
            bench.allocator.check();
            assert_eq!((bench.trim(), source.calls()), (0, (1, 0)), "also what is free in it");
            drop(pool);
        } else {
            drop(pool);
            bench.allocator.check();
            assert_eq!((bench.trim(), source.calls()), (0, (1, 0)), "the block still works");
            bench.sim_fill(live.ptr().0, 1);
            drop(live);
        }
        assert_eq!((bench.trim(), source.calls()), (30 * MIB, (1, 1)));
        assert!(matches!(bench.pools().pool_uses(FIRST, id), Err(Error::UnknownPool { .. })));
        bench.finish();
    }
}

/// TestMemPool.test_mempool_limited_memory_with_allocator and test_deleted_mempool_not_used_on_oom.
#[test]
fn a_marked_pool_helps_in_need_until_it_is_gone() {
    let bench = Bench::with_capacity(GIB, "");
    let source = Source::new(&bench, 400 * MIB);
    let options = PoolOptions { upstream: Some(source.clone()), use_on_oom: true, no_split: false };
    let pool = pool_with(&bench, options);
    let scope = pool.enter().unwrap();
    let spare = block(&bench, 200 * MIB);
    let place = spare.ptr();
    let outcome = bench.try_alloc(300 * MIB);
    assert!(matches!(&outcome, Err(Error::OutOfMemory(report)) if report.cause == OomCause::Upstream), "{outcome:?}");
    drop(scope);
    let most = block(&bench, 800 * MIB);
    assert!(bench.try_alloc(200 * MIB).is_err(), "nothing is free in the pool");
    drop(spare);
    let helped = block(&bench, 200 * MIB);
    assert_eq!((helped.ptr(), pool.uses().unwrap()), (place, 1));
    drop(helped);
    pool.close().unwrap();
    assert_eq!(source.calls(), (1, 1));
    bench.sim.mem_info(FIRST).unwrap();
    let fits = block(&bench, 200 * MIB);
    drop((fits, most));
    bench.finish();
}

/// TestMemPool.test_mempool_no_split and test_mempool_no_split_erased_on_release.
#[test]
fn blocks_can_be_whole_segments() {
    let bench = Bench::new("");
    let pool = pool_with(&bench, PoolOptions { no_split: true, ..PoolOptions::default() });
    let scope = pool.enter().unwrap();
    let blocks = [0; 3].map(|_| block(&bench, MIB));
    drop(scope);
    let segments = bench.segments_of(pool.id());
    assert_eq!(segments.len(), 3);
    assert!(segments.iter().all(|segment| segment.blocks.len() == 1 && segment.total_size == 2 * MIB));
    assert_eq!((blocks[0].bytes(), blocks[0].bytes_usable()), (MIB, 2 * MIB));
    let id = pool.id();
    drop(pool);
    drop(blocks);
    bench.trim();
    let next = plain_pool(&bench);
    assert_ne!(next.id(), id);
    let _scope = next.enter().unwrap();
    let _blocks = [0; 2].map(|_| block(&bench, MIB));
    assert_eq!(bench.segments_of(next.id()).len(), 1);
    bench.allocator.check();
    bench.finish();
}

/// TestMemPool.test_nested_mempool.
#[test]
fn the_innermost_scope_counts() {
    let bench = Bench::new("");
    let [one, two, three] = [0; 3].map(|_| plain_pool(&bench));
    let counts = || [&one, &two, &three].map(|pool| bench.segments_of(pool.id()).len());
    let mut kept = Vec::new();
    let outer = one.enter().unwrap();
    kept.push(block(&bench, 12 * MIB));
    assert_eq!(counts(), [1, 0, 0]);
    {
        let _middle = two.enter().unwrap();
        kept.push(block(&bench, 12 * MIB));
        let _inner = three.enter().unwrap();
        kept.push(block(&bench, 12 * MIB));
        assert_eq!(counts(), [1, 1, 1]);
        assert_eq!(one.enter().unwrap_err(), Error::AlreadyRouting { pool: one.id() });
    }
    kept.push(block(&bench, 12 * MIB));
    assert_eq!(counts(), [2, 1, 1]);
    drop(outer);
    kept.push(block(&bench, 12 * MIB));
    assert_eq!((counts(), bench.segments().len()), ([2, 1, 1], 5));
    bench.finish();
}

/// A scope can end before one that was opened later.
#[test]
fn scopes_may_end_in_any_order() {
    let bench = Bench::new("");
    let (one, two) = (plain_pool(&bench), plain_pool(&bench));
    let (outer, inner) = (one.enter().unwrap(), two.enter().unwrap());
    drop(outer);
    let kept = block(&bench, 12 * MIB);
    assert_eq!(bench.segments_of(two.id()).len(), 1);
    drop(inner);
    assert_eq!((one.uses().unwrap(), two.uses().unwrap()), (1, 1));
    drop(kept);
    bench.finish();
}

/// TestMemPool.test_mempool_ctx_multithread: a scope is its thread's.
#[test]
fn scopes_are_per_thread() {
    let bench = Bench::new("");
    let (mine, theirs) = (plain_pool(&bench), plain_pool(&bench));
    let barrier = Barrier::new(2);
    let _scope = mine.enter().unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            let _outside = block(&bench, 12 * MIB);
            let _scope = theirs.enter().unwrap();
            let _inside = block(&bench, 14 * MIB);
            assert!(mine.enter().is_err(), "one scope per pool, whoever has it");
            barrier.wait();
            barrier.wait();
        });
        barrier.wait();
        let _inside = block(&bench, 16 * MIB);
        let sizes = |pool| bench.segments_of(pool).iter().map(|segment| segment.total_size / MIB).collect::<Vec<_>>();
        assert_eq!((sizes(mine.id()), sizes(theirs.id()), sizes(MemPoolId::DEFAULT)), (vec![16], vec![14], vec![12]));
        barrier.wait();
    });
    bench.allocator.check();
    bench.finish();
}

/// TestMemPool.test_multi_threads_alloc_in_same_order: the same requests get the same addresses again.
#[test]
fn the_same_requests_get_the_same_addresses() {
    let bench = Bench::new("");
    let pool = plain_pool(&bench);
    let run = |sizes: &[u64]| {
        let _scope = pool.enter().unwrap();
        let blocks: Vec<DeviceBlock> = sizes.iter().map(|&bytes| block(&bench, bytes)).collect();
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
    bench.finish();
}

/// TestMemPool.test_mempool_release_cached_blocks_during_diversion and
/// test_mempool_oom_recovery_releases_cached_blocks.
#[test]
fn inside_a_scope_the_default_pool_is_trimmed_as_ever() {
    let bench = Bench::with_capacity(GIB, "");
    let pool = plain_pool(&bench);
    drop(block(&bench, 600 * MIB));
    let scope = pool.enter().unwrap();
    assert_eq!(bench.trim(), 600 * MIB);
    drop(scope);
    drop(block(&bench, 600 * MIB));
    let _scope = pool.enter().unwrap();
    let inside = block(&bench, 700 * MIB);
    assert_eq!((bench.stats().num_alloc_retries, bench.stats().num_ooms, bench.bytes_reserved()), (1, 0, 700 * MIB));
    drop(inside);
    bench.finish();
}

/// TestMemPool.test_mempool_block_free_not_deferred: a scope is no capture.
#[test]
fn frees_in_a_scope_are_marked_at_once() {
    let bench = Bench::new("");
    let (pool, side) = (plain_pool(&bench), bench.side_stream());
    let _scope = pool.enter().unwrap();
    let shared = bench.alloc(4 * MIB);
    side.wait_stream(&bench.main).unwrap();
    bench.fill(shared, 1, &side);
    bench.record_use(shared, &side);
    let records = bench.sim.call_count(Call::EventRecord);
    bench.free(shared);
    assert_eq!(bench.sim.call_count(Call::EventRecord), records + 1);
    side.synchronize().unwrap();
    assert_eq!(bench.alloc(4 * MIB).ptr, shared.ptr);
    bench.finish();
}

/// TestMemPool.test_mempool_expandable and test_reserved_bytes_by_private_pools(_expandable).
#[test]
fn every_pools_bytes_are_counted() {
    for settings in ["", "expandable_segments:True"] {
        let bench = Bench::new(settings);
        let (one, two) = (plain_pool(&bench), plain_pool(&bench));
        let of = |pool: MemPoolId| {
            let stats = bench.stats();
            stats.reserved_bytes_by_private_pools.get(&pool).map_or(0, |by_kind| by_kind.all.current)
        };
        let (a, b) = (bench.alloc_in(one.id(), 20 * MIB), bench.alloc_in(two.id(), 40 * MIB));
        let small = bench.alloc_in(two.id(), 100);
        bench.alloc(20 * MIB);
        assert_eq!((of(one.id()), of(two.id()), bench.bytes_reserved()), (20 * MIB, 42 * MIB, 82 * MIB));
        let growing = !settings.is_empty();
        assert!(bench.segments().iter().all(|segment| segment.is_expandable == growing));
        bench.free_all([a, b, small]);
        let (id, other) = (one.id(), two.id());
        one.close().unwrap();
        drop(two);
        assert_eq!((of(id), of(other)), (0, 42 * MIB));
        bench.trim();
        assert_eq!(of(other), 0);
        let stats = bench.stats();
        let entry = stats.reserved_bytes_by_private_pools[&other];
        assert_eq!((entry.all.peak, entry.small_pool.peak, entry.all.freed), (42 * MIB, 2 * MIB, 42 * MIB));
        bench.finish();
    }
}

#[test]
fn uses_are_counted_and_a_released_pool_stays_so() {
    let bench = Bench::new("");
    let pools = bench.pools();
    let pool = pools.create_graph_pool(FIRST).unwrap();
    pools.retain_pool(FIRST, pool).unwrap();
    let held = bench.alloc_in(pool, MIB);
    pools.release_pool(FIRST, pool).unwrap();
    pools.release_pool(FIRST, pool).unwrap();
    assert_eq!(pools.pool_uses(FIRST, pool).unwrap(), 0);
    let released = Err(Error::PoolReleased { pool });
    assert_eq!(pools.release_pool(FIRST, pool), released);
    assert_eq!(pools.retain_pool(FIRST, pool), released);
    assert_eq!(pools.begin_routing(FIRST, pool, Route::Everything), released);
    assert_eq!(pools.set_use_on_oom(FIRST, pool, true), released);
    let request = Request::new(FIRST, bench.main.id(), MIB).in_pool(pool);
    assert_eq!(bench.allocator.allocate_raw(request), Err(Error::PoolReleased { pool }));
    assert_eq!(pools.end_routing(FIRST, pool), Err(Error::NotRouting { pool }));
    let unknown = MemPoolId { graph: 7, user: 7 };
    assert!(matches!(pools.retain_pool(FIRST, unknown), Err(Error::UnknownPool { .. })));
    assert!(matches!(pools.has_exactly(FIRST, unknown, &[]), Err(Error::UnknownPool { .. })));
    assert!(PoolScope::open(&bench.any(), FIRST, unknown, Route::Everything).is_err());
    assert_eq!(bench.allocator.trim(FIRST, unknown).unwrap(), 0);
    assert!(pools.release_pool(FIRST, MemPoolId::DEFAULT).is_err());
    bench.free(held);
    assert_eq!(bench.allocator.trim(FIRST, pool).unwrap(), 2 * MIB);
    bench.finish();
}

/// TestBlockStateAbsorption.test_check_pool_live_allocations.
#[test]
fn a_pool_knows_exactly_what_is_given_out() {
    let bench = Bench::new("");
    let pool = plain_pool(&bench);
    let [a, b] = [0; 2].map(|_| bench.alloc_in(pool.id(), MIB));
    bench.alloc(MIB);
    let has = |live: &[DevicePtr]| bench.pools().has_exactly(FIRST, pool.id(), live).unwrap();
    assert!(has(&[b.ptr, a.ptr]) && !has(&[a.ptr]) && !has(&[a.ptr, b.ptr, DevicePtr(512)]));
    bench.free(a);
    assert!(has(&[b.ptr]) && !has(&[a.ptr]));
    bench.finish();
}

/// Routes by stream, and for everything of a device.
#[test]
fn requests_can_be_routed_by_stream() {
    let bench = Bench::new("");
    let (pool, side) = (plain_pool(&bench), bench.side_stream());
    let scope = PoolScope::open(&bench.any(), FIRST, pool.id(), Route::Stream(side.id())).unwrap();
    bench.alloc_on(&side, MIB);
    bench.alloc(MIB);
    assert_eq!(bench.segments_of(pool.id()).len(), 1);
    drop(scope);
    let _scope = PoolScope::open(&bench.any(), FIRST, pool.id(), Route::Everything).unwrap();
    bench.alloc(MIB);
    assert_eq!((bench.segments_of(pool.id()).len(), bench.segments().len()), (2, 3));
    // A pool that is named counts before every scope.
    bench.alloc_in(MemPoolId::DEFAULT, MIB);
    assert_eq!(bench.segments().len(), 3);
    bench.finish();
}
