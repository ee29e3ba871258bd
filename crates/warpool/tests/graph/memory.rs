//! Where a graph's memory comes from, how long it stays, and who gets it afterwards.

use std::sync::Arc;

use warpool::Stream;
use warpool::driver::sim::SimConfig;
use warpool::driver::{Copies as _, ForeignStream, Pattern, StreamOptions, Streams as _};
use warpool::graph::{CaptureOptions, Graph, GraphError};
use warpool::memory::{Allocate as _, CachingAllocator, DeviceAllocator, MemPool, MemPoolId, PoolOptions, Settings};

use crate::common::memory::{FIRST, GIB, KIB, MIB, TestContext};
use crate::lab::{Lab, graph_error};

#[test]
fn ten_graphs_share_a_pool() {
    let lab = Lab::new();
    let (mut graphs, mut options, mut reserved) = (Vec::new(), CaptureOptions::default(), Vec::new());
    for value in 0..10 {
        let mut graph = lab.graph();
        let key = graph
            .capture(&lab.side, options, |capture| {
                let stream = capture.stream().clone();
                // Freed in the capture: the next graph uses it as well.
                let scratch = lab.context.any().allocate(4 * MIB, &stream)?;
                lab.context.sim.fill(scratch.ptr(), Pattern::U32(value), 1, stream.id())?;
                let key = capture.allocate(4)?;
                let word = capture.buffer(key)?.ptr();
                lab.context.sim.copy(word.into(), scratch.ptr().into(), 4, stream.id())?;
                Ok(key)
            })
            .unwrap();
        options = options.with_pool(graph.pool().unwrap());
        reserved.push(lab.context.bytes_reserved());
        graphs.push((graph, key));
    }
    assert!(reserved.windows(2).all(|pair| pair[0] == pair[1]), "all of them fit where the first did: {reserved:?}");
    let pool = options.pool.unwrap();
    assert_eq!(lab.context.pools().pool_uses(FIRST, pool).unwrap(), 10);
    for _ in 0..3 {
        for (value, (graph, key)) in graphs.iter().enumerate() {
            lab.expect(graph, *key, value as u32);
        }
    }
    for left in (0..10).rev() {
        drop(graphs.pop());
        let uses = lab.context.pools().pool_uses(FIRST, pool);
        assert_eq!(uses.unwrap_or(0), left);
        let (trimmed, kept) = (lab.context.trim(), lab.context.bytes_reserved());
        assert_eq!((trimmed > 0, kept > 0), (left == 0, left > 0), "a pool stays as long as one graph uses it");
    }
    lab.finish();
}

#[test]
fn a_pool_serves_one_capture_at_a_time() {
    let lab = Lab::new();
    let pool = MemPool::new(&lab.context.any(), &lab.context.device(), PoolOptions::default()).unwrap();
    let options = CaptureOptions::default().with_pool(pool.id());
    let (mut first, mut second) = (lab.graph(), lab.graph());
    let other = lab.context.device().lease_stream().unwrap();
    first
        .capture(&lab.side, options, |_| {
            let refused = second.capture_begin(&other, options);
            assert_eq!(refused, Err(warpool::Error::AlreadyRouting { pool: pool.id() }));
            Ok(())
        })
        .unwrap();
    lab.fill_into(&mut second, options, 1);
    assert_eq!(pool.uses().unwrap(), 3);
    drop((first, second, pool));
    lab.finish();
}

#[test]
fn further_pools_are_retained_until_the_reset() {
    let lab = Lab::new();
    let [more, most] =
        [0, 1].map(|_| MemPool::new(&lab.context.any(), &lab.context.device(), PoolOptions::default()).unwrap());
    let mut graph = lab.graph();
    assert_eq!(graph_error(graph.retain_pool(more.id())), GraphError::NotCapturing);
    let (own, key) = graph
        .capture(&lab.side, CaptureOptions::default(), |capture| {
            assert_eq!(graph_error(capture.retain_pool(MemPoolId::DEFAULT)), GraphError::DefaultPool);
            let gone = MemPoolId { graph: 0, user: 99 };
            assert_eq!(capture.retain_pool(gone), Err(warpool::Error::UnknownPool { pool: gone, device: FIRST }));
            capture.retain_pool(more.id())?;
            capture.retain_pool(more.id())?;
            let key = {
                let _scope = capture.enter_pool(&most)?;
                capture.allocate(4)?
            };
            let stream = capture.stream().clone();
            capture.fill(key, Pattern::U32(3), 1, &stream)?;
            Ok((capture.pool(), key))
        })
        .unwrap();
    assert_eq!(graph.pools(), [own, more.id(), most.id()]);
    assert_eq!((more.uses().unwrap(), most.uses().unwrap()), (2, 2));
    assert_eq!((lab.context.segments_of(own).len(), lab.context.segments_of(most.id()).len()), (0, 1));
    assert_eq!(graph_error(graph.retain_pool(more.id())), GraphError::NotCapturing);
    let id = most.id();
    drop(most);
    lab.expect(&graph, key, 3);
    assert_eq!(lab.context.pools().pool_uses(FIRST, id).unwrap(), 1, "the graph keeps it");
    graph.reset().unwrap();
    assert_eq!(more.uses().unwrap(), 1);
    assert!(graph.pools().is_empty());
    drop((graph, more));
    lab.finish();
}

#[test]
fn a_graph_captures_again_after_a_reset() {
    let lab = Lab::new();
    let mut graph = lab.graph();
    let mut pools = Vec::new();
    for value in 1..=5 {
        let key = lab.fill_into(&mut graph, CaptureOptions::default(), value);
        lab.expect(&graph, key, value);
        pools.push(graph.pool().unwrap());
        graph.reset().unwrap();
        graph.reset().unwrap();
        assert_eq!(graph_error(graph.replay(&lab.side)), GraphError::NotCaptured);
        assert_eq!(graph_error(graph.pool()), GraphError::NotCaptured);
        lab.context.trim();
        assert_eq!(lab.context.bytes_reserved(), 0);
    }
    pools.dedup();
    assert_eq!(pools.len(), 5, "each with a pool of its own");
    drop(graph);
    lab.finish();
}

/// PyTorch's strictest test of graph memory, in our terms: what a capture holds, to the byte, before and after the
/// graph goes, while its result is still in use.
#[test]
fn memory_is_accounted_for_to_the_byte() {
    const SMALL: u64 = 2 * MIB;
    // Size of each of three blocks, and what the pool takes from the device for them.
    for (bytes, segments, reserved) in
        [(512, 1, SMALL), (MIB, 2, 2 * SMALL), (2 * MIB, 1, 20 * MIB), (9 * MIB, 2, 40 * MIB), (20 * MIB, 3, 60 * MIB)]
    {
        let lab = Lab::new();
        let (allocator, mut graph) = (lab.context.any(), lab.graph());
        let picture = || {
            let stats = lab.context.stats();
            (stats.segment.all.current, stats.reserved_bytes.all.current, stats.active_bytes.all.current)
        };
        let result = graph
            .capture(&lab.side, CaptureOptions::default(), |capture| {
                let stream = capture.stream().clone();
                let [a, b, result] = [
                    allocator.allocate(bytes, &stream)?,
                    allocator.allocate(bytes, &stream)?,
                    allocator.allocate(bytes, &stream)?,
                ];
                lab.context.sim.fill(a.ptr(), Pattern::U8(3), bytes, stream.id())?;
                lab.context.sim.copy(b.ptr().into(), a.ptr().into(), bytes, stream.id())?;
                lab.context.sim.copy(result.ptr().into(), b.ptr().into(), bytes, stream.id())?;
                Ok(result)
            })
            .unwrap();
        assert_eq!(picture(), (segments, reserved, bytes), "{bytes}: after the capture");
        graph.replay(&lab.side).unwrap();
        lab.context.device().synchronize().unwrap();
        lab.context.trim();
        assert_eq!(picture(), (segments, reserved, bytes), "{bytes}: a live graph keeps all of it");
        drop(graph);
        lab.context.trim();
        let rest = if bytes >= 20 * MIB { 20 * MIB } else { picture().1 };
        assert_eq!(picture().2, bytes, "{bytes}: the result is in use");
        assert_eq!((picture().0, picture().1), (1, rest), "{bytes}: the rest went back");
        assert_eq!(lab.word(result.ptr()), 0x0303_0303, "a result outlives its graph");
        drop(result);
        lab.context.trim();
        assert_eq!(picture(), (0, 0, 0), "{bytes}: nothing is left");
        drop(allocator);
        lab.finish();
    }
}

#[test]
fn a_hundred_captures_do_not_grow_memory() {
    let lab = Lab::new();
    let mut graph = lab.graph();
    let mut reserved = Vec::new();
    for value in 0..100 {
        let key = lab.fill_into(&mut graph, CaptureOptions::default(), value);
        lab.expect(&graph, key, value);
        graph.reset().unwrap();
        lab.context.trim();
        reserved.push((lab.context.bytes_reserved(), lab.context.sim.object_counts().bytes_used));
    }
    reserved.dedup();
    assert_eq!(reserved.len(), 1, "{reserved:?}");
    drop(graph);
    lab.finish();
}

/// A block that was the graph's is given out again only behind the replays that are under way, on whatever stream they
/// are.
#[test]
fn memory_of_a_graph_that_is_gone_waits_for_its_replays() {
    let lab = Lab::new();
    let (replays, owner) = (lab.context.side_stream(), lab.context.side_stream());
    for shared in [false, true] {
        for by_reset in [false, true] {
            let mut graph = lab.graph();
            let block = lab.context.any().allocate(4 * KIB, &owner).unwrap();
            let ptr = block.ptr();
            graph
                .capture(&lab.side, CaptureOptions::default(), |capture| {
                    let stream = capture.stream().clone();
                    let key = if shared { capture.share(Arc::new(block))? } else { capture.keep(block)? };
                    capture.fill(key, Pattern::U8(1), 4 * KIB, &stream)
                })
                .unwrap();
            lab.context.pause_stream(&replays);
            graph.replay(&replays).unwrap();
            graph.replay(&replays).unwrap();
            if by_reset {
                graph.reset().unwrap();
            } else {
                drop(graph);
            }
            let next = lab.context.any().allocate(4 * KIB, &owner).unwrap();
            assert_ne!(next.ptr(), ptr, "a replay still writes there");
            lab.context.sim.fill(next.ptr(), Pattern::U8(2), 4 * KIB, owner.id()).unwrap();
            lab.context.resume_stream(&replays);
            drop(next);
            owner.synchronize().unwrap();
            let [one, two] = [0, 1].map(|_| lab.context.any().allocate(4 * KIB, &owner).unwrap());
            assert!(one.ptr() == ptr || two.ptr() == ptr, "now it is free");
        }
    }
    lab.finish();
}

/// Unmapping waits for no stream by itself, and the pool's memory was never allocated for the stream that replays.
#[test]
fn growing_memory_of_a_graph_that_is_gone_waits_for_its_replays() {
    for settings in ["", "expandable_segments:True"] {
        let lab = Lab::with(settings);
        let replays = lab.context.side_stream();
        let mut graph = lab.graph();
        graph
            .capture(&lab.side, CaptureOptions::default(), |capture| {
                // Freed in the capture: nobody owns it, but every replay writes there.
                let scratch = lab.context.any().allocate(4, capture.stream())?;
                Ok(lab.context.sim.fill(scratch.ptr(), Pattern::U32(5), 1, capture.stream().id())?)
            })
            .unwrap();
        lab.context.pause_stream(&replays);
        graph.replay(&replays).unwrap();
        drop(graph);
        assert!(lab.context.trim() > 0);
        assert_eq!(lab.context.sim.paused_work(replays.id()).unwrap(), 0, "{settings}: the trim waited for the replay");
        lab.context.resume_stream(&replays);
        lab.finish();
    }
}

#[test]
fn uses_are_recorded_at_the_first_replay_on_a_stream_only() {
    let lab = Lab::new();
    let (graph, _) = lab.filled(5);
    let streams = [lab.context.side_stream(), lab.context.side_stream()];
    for stream in &streams {
        graph.replay(stream).unwrap();
    }
    let calls = lab.context.sim.calls_made();
    for _ in 0..10 {
        for stream in &streams {
            graph.replay(stream).unwrap();
        }
    }
    assert_eq!(lab.context.sim.calls_made() - calls, 20, "a replay is one driver call");
    drop(graph);
    lab.finish();
}

/// A wrong program on the raw interface: the simulated device names what it did.
#[test]
fn memory_freed_under_a_graph_is_noticed() {
    let lab = Lab::new();
    let mut graph = lab.graph();
    let block = lab.context.any().allocate(30 * MIB, &lab.side).unwrap();
    graph
        .capture(&lab.side, CaptureOptions::default(), |capture| {
            Ok(lab.context.sim.fill(block.ptr(), Pattern::U8(1), 64, capture.stream().id())?)
        })
        .unwrap();
    graph.replay(&lab.side).unwrap();
    lab.side.synchronize().unwrap();
    drop(block);
    lab.context.trim();
    graph.replay(&lab.side).unwrap();
    let _ = lab.side.synchronize();
    let hazards = lab.context.sim.hazards();
    assert!(hazards.iter().any(|hazard| hazard.to_string().contains("graph")), "{hazards:?}");
    drop::<Graph>(graph);
}

#[test]
fn a_pool_for_need_keeps_what_graphs_use() {
    let lab = Lab::on(SimConfig::default().with_capacity(GIB), "");
    let options = PoolOptions { use_on_oom: true, ..PoolOptions::default() };
    let pool = MemPool::new(&lab.context.any(), &lab.context.device(), options).unwrap();
    let (mut graph, allocator) = (lab.graph(), lab.context.any());
    graph
        .capture(&lab.side, CaptureOptions::default().with_pool(pool.id()), |capture| {
            // Free for the next capture there, and written to by every replay of this one.
            let scratch = allocator.allocate(600 * MIB, capture.stream())?;
            lab.context.sim.fill(scratch.ptr(), Pattern::U8(1), 1, capture.stream().id()).map_err(warpool::Error::from)
        })
        .unwrap();
    let refused = allocator.allocate(500 * MIB, &lab.side);
    assert!(matches!(refused, Err(warpool::Error::OutOfMemory(_))), "{refused:?} is the graph's");
    drop((graph, pool, refused, allocator));
    lab.finish();
}

#[test]
fn an_allocator_knows_of_captures_with_another() {
    let lab = Lab::new();
    let other: Arc<dyn DeviceAllocator> = Arc::new(CachingAllocator::new(&lab.context.instance, Settings::default()));
    let (mut graph, plain) = (lab.graph(), lab.context.side_stream());
    graph
        .capture(&lab.side, CaptureOptions::default(), |capture| {
            let block = other.allocate(KIB, &plain)?;
            block.record_use(capture.stream())?;
            block.free()?;
            // It looks after what was given back: a mark in the capture, and asking about it, would break that.
            other.allocate(KIB, &plain).map(drop)
        })
        .unwrap();
    drop(graph);
    other.trim(FIRST, MemPoolId::DEFAULT).unwrap();
    lab.finish();
}

/// A stream that the default stream waits for, as others make them.
fn blocking(context: &TestContext) -> Stream {
    let id = context.sim.stream_create(FIRST, StreamOptions { non_blocking: false, priority: 0 }).unwrap();
    let raw = context.sim.stream_handle(id).unwrap().raw;
    // SAFETY: a simulated driver follows no handle.
    Stream::external(&context.device(), unsafe { ForeignStream::new(raw) }).unwrap()
}

#[test]
fn memory_used_on_the_default_stream_goes_while_a_blocking_stream_captures() {
    let lab = Lab::new();
    let stream = blocking(&lab.context);
    let (replayed, _) = lab.filled(3);
    replayed.replay(&lab.context.main).unwrap();
    let mut graph = lab.graph();
    let plain = lab.context.side_stream();
    let outcome = graph.capture(&stream, CaptureOptions::default(), |_| {
        drop(replayed);
        // Another thread goes on as usual.
        std::thread::scope(|threads| {
            threads.spawn(|| lab.context.any().allocate(KIB, &plain).map(drop)).join().unwrap()
        })?;
        lab.context.allocator.trim(FIRST, MemPoolId::DEFAULT).map(drop)
    });
    assert_eq!(outcome, Ok(()));
    drop(graph);
    lab.finish();
}

#[test]
fn a_pool_of_another_allocator_is_refused() {
    let lab = Lab::new();
    let other: Arc<dyn DeviceAllocator> = Arc::new(CachingAllocator::new(&lab.context.instance, Settings::default()));
    let own = MemPool::new(&lab.context.any(), &lab.context.device(), PoolOptions::default()).unwrap();
    let foreign = MemPool::new(&other, &lab.context.device(), PoolOptions::default()).unwrap();
    let mut graph = lab.graph();
    let entered = graph.capture(&lab.side, CaptureOptions::default(), |capture| capture.enter_pool(&foreign).map(drop));
    assert_eq!((own.id(), entered), (foreign.id(), Err(warpool::Error::ForeignAllocator { pool: own.id() })));
    assert_eq!(own.uses().unwrap(), 1);
    drop((graph, own, foreign));
    lab.finish();
}
