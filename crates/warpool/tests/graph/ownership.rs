//! Memory that a graph owns cannot be freed before the graph, by any call that safe code can make.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use warpool::Error;
use warpool::driver::{Copies as _, Pattern};
use warpool::graph::{BufferKey, CaptureOptions, Graph, GraphOptions};
use warpool::memory::decorate::{AllocatorCall, Limited, Traced};
use warpool::memory::pools::{Checkpoints as _, PoolOptions, Route};
use warpool::memory::{Allocate as _, CachingAllocator, DeviceAllocator, DeviceBlock, MemPool, MemPoolId, Settings};

use crate::common::memory::{FIRST, MIB};
use crate::fixture::CaptureFixture;

/// A graph whose replays use memory that was freed in its capture, and write the result to a buffer of the graph.
fn with_scratch(fixture: &CaptureFixture, options: CaptureOptions<'_>, value: u32) -> (Graph, BufferKey) {
    let mut graph = fixture.graph();
    let key = graph
        .capture(&fixture.side, options, |capture| {
            let scratch = fixture.context.any().allocate(4 * MIB, capture.stream())?;
            fixture.context.sim.fill(scratch.ptr(), Pattern::U32(value), 1, capture.stream().id())?;
            let key = capture.allocate(4)?;
            let word = capture.buffer(key)?.ptr();
            fixture.context.sim.copy(word.into(), scratch.ptr().into(), 4, capture.stream().id())?;
            Ok(key)
        })
        .unwrap();
    (graph, key)
}

/// Returns all cached memory to the driver, allocates as much as possible, and replays.
fn expect_intact(fixture: &CaptureFixture, graph: &Graph, key: BufferKey, value: u32) {
    fixture.context.trim();
    let others =
        [4, 2 * MIB, 4 * MIB, 30 * MIB].map(|bytes| fixture.context.any().allocate(bytes, &fixture.side).unwrap());
    for other in &others {
        fixture.context.sim.fill(other.ptr(), Pattern::U32(0xDEAD), 1, fixture.side.id()).unwrap();
    }
    fixture.context.device().synchronize().unwrap();
    fixture.expect(graph, key, value);
}

/// Issue 12: `release_pool` with the pool of a graph, a trim, and the replay accessed memory that was gone.
#[test]
fn a_raw_release_does_not_end_the_use_of_a_graph() {
    for settings in ["", "expandable_segments:True"] {
        let fixture = CaptureFixture::with(settings);
        let (graph, key) = with_scratch(&fixture, CaptureOptions::default(), 5);
        let pool = graph.pool().unwrap().id();
        for _ in 0..3 {
            let refused = fixture.context.pools().release_pool(FIRST, pool);
            assert_eq!(refused, Err(Error::PoolNotRetained { pool }));
            expect_intact(&fixture, &graph, key, 5);
        }
        // Raw calls can end the uses that raw calls began, and no others.
        fixture.context.pools().retain_pool(FIRST, pool).unwrap();
        fixture.context.pools().release_pool(FIRST, pool).unwrap();
        assert_eq!(fixture.context.pools().release_pool(FIRST, pool), Err(Error::PoolNotRetained { pool }));
        assert_eq!(fixture.context.pools().pool_uses(FIRST, pool), Ok(1));
        expect_intact(&fixture, &graph, key, 5);
        drop(graph);
        fixture.finish();
    }
}

#[test]
fn a_raw_call_does_not_end_the_routing_of_a_capture() {
    let fixture = CaptureFixture::new();
    let mut graph = fixture.graph();
    let (key, scratch) = graph
        .capture(&fixture.side, CaptureOptions::default(), |capture| {
            let (pools, pool) = (fixture.context.pools(), capture.pool().id());
            assert_eq!(pools.end_routing(FIRST, pool), Err(Error::ForeignScope { pool }));
            assert_eq!(pools.reroute(FIRST, pool, &[]), Err(Error::ForeignScope { pool }));
            assert_eq!(pools.begin_routing(FIRST, pool, Route::Everything), Err(Error::AlreadyRouting { pool }));
            assert_eq!(pools.release_pool(FIRST, pool), Err(Error::PoolNotRetained { pool }));
            let (stream, key) = (capture.stream().clone(), capture.allocate(4)?);
            let scratch = fixture.context.any().allocate(4 * MIB, &stream)?;
            fixture.context.sim.fill(scratch.ptr(), Pattern::U32(6), 1, stream.id())?;
            fixture.context.sim.copy(capture.buffer(key)?.ptr().into(), scratch.ptr().into(), 4, stream.id())?;
            Ok((key, scratch.ptr()))
        })
        .unwrap();
    let segments = fixture.context.segments_of(graph.pool().unwrap().id());
    assert!(
        segments.iter().any(|segment| (segment.address..segment.address + segment.total_size).contains(&scratch.0))
    );
    expect_intact(&fixture, &graph, key, 6);
    drop(graph);
    // Nor that of a scope; and a scope does not end that of a raw call.
    let pool = MemPool::new(&fixture.context.any(), &fixture.context.device(), PoolOptions::default()).unwrap();
    let scope = pool.enter().unwrap();
    assert_eq!(fixture.context.pools().end_routing(FIRST, pool.id()), Err(Error::ForeignScope { pool: pool.id() }));
    drop(scope);
    fixture.context.pools().begin_routing(FIRST, pool.id(), Route::Everything).unwrap();
    assert!(pool.enter().is_err());
    fixture.context.pools().end_routing(FIRST, pool.id()).unwrap();
    drop(pool);
    fixture.finish();
}

/// The pool lives as long as any handle or graph uses it, in any order.
#[test]
fn a_pool_lives_as_long_as_its_last_handle_or_graph() {
    let fixture = CaptureFixture::new();
    let (any, device) = (fixture.context.any(), fixture.context.device());
    let pool = MemPool::new(&any, &device, PoolOptions { use_on_oom: true, ..PoolOptions::default() }).unwrap();
    let clone = pool.clone();
    let (first, key) = with_scratch(&fixture, CaptureOptions::default().with_pool(&pool), 7);
    assert_eq!((pool.uses(), clone.uses()), (Ok(2), Ok(2)), "the handle and the graph");
    pool.close().unwrap();
    expect_intact(&fixture, &first, key, 7);
    clone.close().unwrap();
    expect_intact(&fixture, &first, key, 7);
    // The handle of a graph's pool keeps it, and can be given to the next graph.
    let kept = first.pool().unwrap().clone();
    drop(first);
    let reserved = fixture.context.segments_of(kept.id()).len();
    fixture.context.trim();
    assert_eq!(fixture.context.segments_of(kept.id()).len(), reserved, "the handle keeps the memory");
    let (second, key) = with_scratch(&fixture, CaptureOptions::default().with_pool(&kept), 8);
    assert_eq!(fixture.context.segments_of(kept.id()).len(), reserved, "and it is used again");
    assert_eq!(kept, *second.pool().unwrap());
    drop(kept);
    expect_intact(&fixture, &second, key, 8);
    let id = second.pool().unwrap().id();
    drop(second);
    fixture.context.trim();
    assert_eq!(fixture.context.pools().pool_uses(FIRST, id), Err(Error::UnknownPool { pool: id, device: FIRST }));
    drop(any);
    fixture.finish();
}

/// Two allocators number their pools alike.
#[test]
fn a_pool_of_another_allocator_is_refused() {
    let fixture = CaptureFixture::new();
    let (any, device) = (fixture.context.any(), fixture.context.device());
    let other: Arc<dyn DeviceAllocator> =
        Arc::new(CachingAllocator::new(&fixture.context.instance, Settings::default()));
    let [mine, foreign] = [&any, &other].map(|one| MemPool::new(one, &device, PoolOptions::default()).unwrap());
    assert_eq!(mine.id(), foreign.id());
    assert_ne!(mine, foreign);
    let refused = Error::ForeignAllocator { pool: foreign.id() };
    let mut graph = fixture.graph();
    let outcome = graph.capture_begin(&fixture.side, CaptureOptions::default().with_pool(&foreign));
    assert_eq!(outcome, Err(refused.clone()));
    graph
        .capture(&fixture.side, CaptureOptions::default(), |capture| {
            assert_eq!(capture.retain_pool(&foreign), Err(refused.clone()));
            assert_eq!(capture.enter_pool(&foreign).map(drop), Err(refused.clone()));
            Ok(())
        })
        .unwrap();
    assert_eq!(any.allocate_in(&foreign, 512, &fixture.side).map(drop), Err(refused.clone()));
    let far = fixture.context.instance.device(1).unwrap().pool_stream().unwrap();
    let elsewhere = Error::PoolDevice { pool: mine.id(), owner: FIRST, device: far.device_id() };
    assert_eq!(any.allocate_in(&mine, 512, &far).map(drop), Err(elsewhere));
    // Seen through a decorator, it is the same pool.
    let limited: Arc<dyn DeviceAllocator> = Arc::new(Limited::new(&any, MIB));
    drop(limited.allocate_in(&mine, 512, &fixture.side).unwrap());
    assert_eq!(limited.allocate_in(&foreign, 512, &fixture.side).map(drop), Err(refused));
    let mut through = Graph::new(&limited, &device, GraphOptions::default()).unwrap();
    let key = fixture.fill_into(&mut through, CaptureOptions::default().with_pool(&mine), 3);
    fixture.expect(&through, key, 3);
    assert_eq!(*through.pool().unwrap(), mine);
    drop((graph, through, mine, foreign, limited, other, any));
    fixture.finish();
}

/// Blocks that the program allocated in the capture belong to the program; their memory stays with the graph.
#[test]
fn dropped_blocks_trims_and_settings_leave_a_graph_its_memory() {
    let fixture = CaptureFixture::new();
    let mut graph = fixture.graph();
    let (key, block) = graph
        .capture(&fixture.side, CaptureOptions::default(), |capture| {
            let (stream, key) = (capture.stream().clone(), capture.allocate(4)?);
            let block = fixture.context.any().allocate(4 * MIB, &stream)?;
            fixture.context.sim.fill(block.ptr(), Pattern::U32(9), 1, stream.id())?;
            fixture.context.sim.copy(capture.buffer(key)?.ptr().into(), block.ptr().into(), 4, stream.id())?;
            Ok((key, block))
        })
        .unwrap();
    drop(block);
    expect_intact(&fixture, &graph, key, 9);
    fixture.context.allocator.trim(FIRST, graph.pool().unwrap().id()).unwrap();
    expect_intact(&fixture, &graph, key, 9);
    for settings in ["expandable_segments:True", "garbage_collection_threshold:0.1,max_split_size_mb:20", ""] {
        fixture.context.allocator.set_settings(Settings::parse(settings).unwrap()).unwrap();
        expect_intact(&fixture, &graph, key, 9);
    }
    fixture.context.allocator.set_caching(false).unwrap();
    expect_intact(&fixture, &graph, key, 9);
    fixture.context.allocator.set_caching(true).unwrap();
    fixture.context.trim();
    let instance = fixture.context.instance.clone();
    assert!(matches!(instance.close(), Err(Error::StillInUse { .. })), "a graph keeps its Instance");
    expect_intact(&fixture, &graph, key, 9);
    drop(graph);
    assert!(fixture.context.trim() > 0);
    assert!(fixture.context.segments().iter().all(|segment| segment.pool == MemPoolId::DEFAULT));
    fixture.finish();
}

/// Blocks of a graph: allocated in its capture, moved into it, shared with it.
#[test]
fn raw_frees_do_not_free_the_blocks_of_a_graph() {
    let fixture = CaptureFixture::new();
    let allocator = fixture.context.any();
    fixture.context.allocator.set_caching(false).unwrap();
    let direct = allocator.allocate(4 * MIB, &fixture.side).unwrap();
    fixture.context.allocator.set_caching(true).unwrap();
    let [kept, shared] = [0, 1].map(|_| allocator.allocate(4 * MIB, &fixture.side).unwrap());
    let mut graph = fixture.graph();
    let keys = graph
        .capture(&fixture.side, CaptureOptions::default(), |capture| {
            let stream = capture.stream().clone();
            let direct = capture.keep(direct)?;
            let keys = [capture.allocate(4 * MIB)?, capture.keep(kept)?, capture.share(Arc::new(shared))?, direct];
            for (key, value) in keys.into_iter().zip(11..) {
                capture.fill(key, Pattern::U32(value), 1, &stream)?;
            }
            Ok(keys)
        })
        .unwrap();
    let ptrs = keys.map(|key| graph.buffer(key).unwrap().ptr());
    for ptr in ptrs {
        let held = Err(Error::HeldByGraph { ptr });
        assert_eq!(allocator.free_raw(ptr), held);
        assert!(!allocator.free_cached(FIRST, ptr));
        // `find` does not find uncached memory.
        if let Ok(found) = allocator.find(ptr) {
            assert_eq!(allocator.free(found), held);
            // SAFETY: its owner does not free it: a graph holds it, and the drop frees nothing.
            drop(unsafe { DeviceBlock::from_raw(&allocator, found) });
            assert_eq!(allocator.find(ptr), Ok(found), "it is still allocated");
        }
    }
    for (key, value) in keys.into_iter().zip(11..) {
        expect_intact(&fixture, &graph, key, value);
    }
    drop(graph);
    assert!(ptrs.iter().all(|&ptr| allocator.find(ptr).is_err()), "the graph has freed them");
    drop(allocator);
    fixture.finish();
}

#[test]
fn a_restore_leaves_a_graph_its_blocks() {
    let fixture = CaptureFixture::new();
    let (any, device) = (fixture.context.any(), fixture.context.device());
    let caching = &fixture.context.allocator;
    let pool = MemPool::new(&any, &device, PoolOptions::default()).unwrap();
    let empty = caching.checkpoint(FIRST, pool.id()).unwrap();
    let before = any.allocate_in(&pool, 12 * MIB, &fixture.side).unwrap();
    let with_before = caching.checkpoint(FIRST, pool.id()).unwrap();
    drop(before);
    // The graph's block is where the other was.
    let mut graph = fixture.graph();
    let key = graph
        .capture(&fixture.side, CaptureOptions::default().with_pool(&pool), |capture| {
            let (stream, key) = (capture.stream().clone(), capture.allocate(8 * MIB)?);
            capture.fill(key, Pattern::U32(21), 1, &stream)?;
            Ok(key)
        })
        .unwrap();
    let own = caching.checkpoint(FIRST, pool.id()).unwrap();
    let refused = caching.restore(&with_before);
    assert!(matches!(refused, Err(Error::Checkpoint { .. })), "{refused:?}");
    for checkpoint in [&empty, &own, &empty] {
        let program = any.allocate_in(&pool, 2 * MIB, &fixture.side).unwrap();
        let restored = caching.restore(checkpoint).unwrap();
        assert_eq!((restored.freed, restored.allocated), (vec![program.ptr()], vec![]), "the program's block alone");
        caching.check();
        drop(program);
        expect_intact(&fixture, &graph, key, 21);
    }
    drop(graph);
    caching.restore(&with_before).unwrap().allocated.into_iter().for_each(|block| caching.free(block).unwrap());
    drop((pool, any));
    fixture.finish();
}

/// Found by random programs: a decorator that panicked over the first buffer of a graph kept the uses of the others
/// from being recorded.
#[test]
fn a_panic_while_a_graph_is_dropped_loses_no_use() {
    let fixture = CaptureFixture::new();
    let panics = Arc::new(AtomicBool::new(false));
    let on_call = {
        let panics = panics.clone();
        move |call: &AllocatorCall, _: Option<&Error>| {
            let is_use = matches!(call, AllocatorCall::RecordUse { .. });
            assert!(!is_use || !panics.swap(false, Ordering::Relaxed), "on purpose");
        }
    };
    let traced: Arc<dyn DeviceAllocator> = Arc::new(Traced::new(&fixture.context.any(), on_call));
    let (owner, replays) = (fixture.context.side_stream(), fixture.context.side_stream());
    let blocks = [0; 3].map(|_| traced.allocate(4 * MIB, &owner).unwrap());
    let ptrs = [0, 1, 2].map(|at: usize| blocks[at].ptr());
    let mut graph = Graph::new(&traced, &fixture.context.device(), GraphOptions::default()).unwrap();
    graph
        .capture(&fixture.side, CaptureOptions::default(), |capture| {
            let stream = capture.stream().clone();
            for block in blocks {
                let key = capture.keep(block)?;
                capture.fill(key, Pattern::U8(1), 4 * MIB, &stream)?;
            }
            Ok(())
        })
        .unwrap();
    fixture.context.pause_stream(&replays);
    graph.replay(&replays).unwrap();
    panics.store(true, Ordering::Relaxed);
    assert!(catch_unwind(AssertUnwindSafe(|| drop(graph))).is_err(), "the panic goes on");
    let next = [0; 3].map(|_| traced.allocate(4 * MIB, &owner).unwrap());
    assert!(next.iter().all(|block| !ptrs.contains(&block.ptr())), "a replay still writes there");
    fixture.context.resume_stream(&replays);
    drop((next, traced));
    fixture.finish();
}
