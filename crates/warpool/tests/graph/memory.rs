//! Memory of graphs: where it comes from, how long it is kept, and when it is reused.

use std::sync::Arc;

use warpool::Stream;
use warpool::driver::sim::SimConfig;
use warpool::driver::{Copies as _, ForeignStream, Pattern, StreamOptions, Streams as _};
use warpool::graph::{CaptureOptions, Graph, GraphError};
use warpool::memory::pools::PoolOptions;
use warpool::memory::{Allocate as _, CachingAllocator, DeviceAllocator, MemPool, MemPoolId, Settings};

use crate::common::memory::{FIRST, GIB, KIB, MIB, TestContext};
use crate::fixture::{CaptureFixture, graph_error};

#[test]
fn ten_graphs_share_a_pool() {
    let fixture = CaptureFixture::new();
    let (mut graphs, mut pool, mut reserved) = (Vec::new(), None::<MemPool>, Vec::new());
    for value in 0..10 {
        let mut graph = fixture.graph();
        let key = graph
            .capture(&fixture.side, CaptureOptions { pool: pool.as_ref(), ..Default::default() }, |capture| {
                let stream = capture.stream().clone();
                // Freed in the capture: the next graph reuses it.
                let scratch = fixture.context.any().allocate(4 * MIB, &stream)?;
                fixture.context.sim.fill(scratch.ptr(), Pattern::U32(value), 1, stream.id())?;
                let key = capture.allocate(4)?;
                let word = capture.buffer(key)?.ptr();
                fixture.context.sim.copy(word.into(), scratch.ptr().into(), 4, stream.id())?;
                Ok(key)
            })
            .unwrap();
        pool = Some(graph.pool().unwrap().clone());
        reserved.push(fixture.context.bytes_reserved());
        graphs.push((graph, key));
    }
    assert!(reserved.windows(2).all(|pair| pair[0] == pair[1]), "all of them fit where the first did: {reserved:?}");
    let pool = pool.take().unwrap().id();
    assert_eq!(fixture.context.pools().pool_uses(FIRST, pool).unwrap(), 10);
    for _ in 0..3 {
        for (value, (graph, key)) in graphs.iter().enumerate() {
            fixture.expect(graph, *key, value as u32);
        }
    }
    for left in (0..10).rev() {
        drop(graphs.pop());
        let uses = fixture.context.pools().pool_uses(FIRST, pool);
        assert_eq!(uses.unwrap_or(0), left);
        let (trimmed, kept) = (fixture.context.trim(), fixture.context.bytes_reserved());
        assert_eq!((trimmed > 0, kept > 0), (left == 0, left > 0), "a pool stays as long as one graph uses it");
    }
    fixture.finish();
}

#[test]
fn a_pool_serves_one_capture_at_a_time() {
    let fixture = CaptureFixture::new();
    let pool = MemPool::new(&fixture.context.any(), &fixture.context.device(), PoolOptions::default()).unwrap();
    let options = CaptureOptions::default().with_pool(&pool);
    let (mut first, mut second) = (fixture.graph(), fixture.graph());
    let other = fixture.context.device().lease_stream().unwrap();
    first
        .capture(&fixture.side, options, |_| {
            let outcome = second.capture_begin(&other, options);
            assert_eq!(outcome, Err(warpool::Error::AlreadyRouting { pool: pool.id() }));
            Ok(())
        })
        .unwrap();
    fixture.fill_into(&mut second, options, 1);
    assert_eq!(pool.uses().unwrap(), 3);
    drop((first, second, pool));
    fixture.finish();
}

#[test]
fn further_pools_are_retained_until_the_reset() {
    let fixture = CaptureFixture::new();
    let [more, most] = [0, 1]
        .map(|_| MemPool::new(&fixture.context.any(), &fixture.context.device(), PoolOptions::default()).unwrap());
    let mut graph = fixture.graph();
    assert_eq!(graph_error(graph.retain_pool(&more)), GraphError::NotCapturing);
    let (own, key) = graph
        .capture(&fixture.side, CaptureOptions::default(), |capture| {
            let default = MemPool::from_id(&fixture.context.any(), &fixture.context.device(), MemPoolId::DEFAULT)?;
            assert_eq!(graph_error(capture.retain_pool(&default)), GraphError::DefaultPool);
            capture.retain_pool(&more)?;
            capture.retain_pool(&more)?;
            let key = {
                let _scope = capture.enter_pool(&most)?;
                capture.allocate(4)?
            };
            let stream = capture.stream().clone();
            capture.fill(key, Pattern::U32(3), 1, &stream)?;
            Ok((capture.pool().id(), key))
        })
        .unwrap();
    assert_eq!(graph.pools().iter().map(MemPool::id).collect::<Vec<_>>(), [own, more.id(), most.id()]);
    assert_eq!((more.uses().unwrap(), most.uses().unwrap()), (2, 2));
    assert_eq!((fixture.context.segments_of(own).len(), fixture.context.segments_of(most.id()).len()), (0, 1));
    assert_eq!(graph_error(graph.retain_pool(&more)), GraphError::NotCapturing);
    let id = most.id();
    drop(most);
    fixture.expect(&graph, key, 3);
    assert_eq!(fixture.context.pools().pool_uses(FIRST, id).unwrap(), 1, "the graph keeps it");
    graph.reset().unwrap();
    assert_eq!(more.uses().unwrap(), 1);
    assert!(graph.pools().is_empty());
    drop((graph, more));
    fixture.finish();
}

#[test]
fn a_graph_captures_again_after_a_reset() {
    let fixture = CaptureFixture::new();
    let mut graph = fixture.graph();
    let mut pools = Vec::new();
    for value in 1..=5 {
        let key = fixture.fill_into(&mut graph, CaptureOptions::default(), value);
        fixture.expect(&graph, key, value);
        pools.push(graph.pool().unwrap().id());
        graph.reset().unwrap();
        graph.reset().unwrap();
        assert_eq!(graph_error(graph.replay(&fixture.side)), GraphError::NotCaptured);
        assert_eq!(graph_error(graph.pool()), GraphError::NotCaptured);
        fixture.context.trim();
        assert_eq!(fixture.context.bytes_reserved(), 0);
    }
    pools.dedup();
    assert_eq!(pools.len(), 5, "each with a pool of its own");
    drop(graph);
    fixture.finish();
}

/// After PyTorch's strictest test of graph memory: the exact bytes of a capture before and after the graph is dropped,
/// while its result is still in use.
#[test]
fn the_bytes_of_a_graph_are_exact() {
    const SMALL: u64 = 2 * MIB;
    // Size of each of three blocks, and what the pool reserves for them.
    for (bytes, segments, reserved) in
        [(512, 1, SMALL), (MIB, 2, 2 * SMALL), (2 * MIB, 1, 20 * MIB), (9 * MIB, 2, 40 * MIB), (20 * MIB, 3, 60 * MIB)]
    {
        let fixture = CaptureFixture::new();
        let (allocator, mut graph) = (fixture.context.any(), fixture.graph());
        let picture = || {
            let stats = fixture.context.stats();
            (stats.segment.all.current, stats.reserved_bytes.all.current, stats.active_bytes.all.current)
        };
        let result = graph
            .capture(&fixture.side, CaptureOptions::default(), |capture| {
                let stream = capture.stream().clone();
                let [a, b, result] = [
                    allocator.allocate(bytes, &stream)?,
                    allocator.allocate(bytes, &stream)?,
                    allocator.allocate(bytes, &stream)?,
                ];
                fixture.context.sim.fill(a.ptr(), Pattern::U8(3), bytes, stream.id())?;
                fixture.context.sim.copy(b.ptr().into(), a.ptr().into(), bytes, stream.id())?;
                fixture.context.sim.copy(result.ptr().into(), b.ptr().into(), bytes, stream.id())?;
                Ok(result)
            })
            .unwrap();
        assert_eq!(picture(), (segments, reserved, bytes), "{bytes}: after the capture");
        graph.replay(&fixture.side).unwrap();
        fixture.context.device().synchronize().unwrap();
        fixture.context.trim();
        assert_eq!(picture(), (segments, reserved, bytes), "{bytes}: a live graph keeps all of it");
        drop(graph);
        fixture.context.trim();
        let rest = if bytes >= 20 * MIB { 20 * MIB } else { picture().1 };
        assert_eq!(picture().2, bytes, "{bytes}: the result is in use");
        assert_eq!((picture().0, picture().1), (1, rest), "{bytes}: the rest is freed");
        assert_eq!(fixture.word(result.ptr()), 0x0303_0303, "a result outlives its graph");
        drop(result);
        fixture.context.trim();
        assert_eq!(picture(), (0, 0, 0), "{bytes}: nothing is left");
        drop(allocator);
        fixture.finish();
    }
}

#[test]
fn a_hundred_captures_do_not_grow_memory() {
    let fixture = CaptureFixture::new();
    let mut graph = fixture.graph();
    let mut reserved = Vec::new();
    for value in 0..100 {
        let key = fixture.fill_into(&mut graph, CaptureOptions::default(), value);
        fixture.expect(&graph, key, value);
        graph.reset().unwrap();
        fixture.context.trim();
        reserved.push((fixture.context.bytes_reserved(), fixture.context.sim.object_counts().bytes_used));
    }
    reserved.dedup();
    assert_eq!(reserved.len(), 1, "{reserved:?}");
    drop(graph);
    fixture.finish();
}

/// A block of a dropped graph is reused only after the replays that are under way, on any stream.
#[test]
fn memory_of_a_dropped_graph_waits_for_its_replays() {
    let fixture = CaptureFixture::new();
    let (replays, owner) = (fixture.context.side_stream(), fixture.context.side_stream());
    for shared in [false, true] {
        for by_reset in [false, true] {
            let mut graph = fixture.graph();
            let block = fixture.context.any().allocate(4 * KIB, &owner).unwrap();
            let ptr = block.ptr();
            graph
                .capture(&fixture.side, CaptureOptions::default(), |capture| {
                    let stream = capture.stream().clone();
                    let key = if shared { capture.share(Arc::new(block))? } else { capture.keep(block)? };
                    capture.fill(key, Pattern::U8(1), 4 * KIB, &stream)
                })
                .unwrap();
            fixture.context.pause_stream(&replays);
            graph.replay(&replays).unwrap();
            graph.replay(&replays).unwrap();
            if by_reset {
                graph.reset().unwrap();
            } else {
                drop(graph);
            }
            let next = fixture.context.any().allocate(4 * KIB, &owner).unwrap();
            assert_ne!(next.ptr(), ptr, "a replay still writes there");
            fixture.context.sim.fill(next.ptr(), Pattern::U8(2), 4 * KIB, owner.id()).unwrap();
            fixture.context.resume_stream(&replays);
            drop(next);
            owner.synchronize().unwrap();
            let [one, two] = [0, 1].map(|_| fixture.context.any().allocate(4 * KIB, &owner).unwrap());
            assert!(one.ptr() == ptr || two.ptr() == ptr, "reused once the replay is done");
        }
    }
    fixture.finish();
}

/// Replays of one graph are under way on several streams when it is dropped.
#[test]
fn memory_of_a_dropped_graph_waits_for_replays_on_all_streams() {
    let fixture = CaptureFixture::new();
    let owner = fixture.context.side_stream();
    let streams = [0; 3].map(|_| fixture.context.side_stream());
    for by_reset in [false, true] {
        let mut graph = fixture.graph();
        let block = fixture.context.any().allocate(4 * KIB, &owner).unwrap();
        let ptr = block.ptr();
        graph
            .capture(&fixture.side, CaptureOptions::default(), |capture| {
                let stream = capture.stream().clone();
                let key = capture.keep(block)?;
                capture.fill(key, Pattern::U8(1), 4 * KIB, &stream)
            })
            .unwrap();
        for (at, stream) in streams.iter().enumerate() {
            fixture.context.pause_stream(stream);
            if at > 0 {
                stream.wait_stream(&streams[at - 1]).unwrap();
            }
            graph.replay(stream).unwrap();
        }
        if by_reset {
            graph.reset().unwrap();
        } else {
            drop(graph);
        }
        for stream in &streams {
            let next = fixture.context.any().allocate(4 * KIB, &owner).unwrap();
            assert_ne!(next.ptr(), ptr, "the replay on {stream} still writes there");
            fixture.context.resume_stream(stream);
            stream.synchronize().unwrap();
        }
        let [one, two] = [0, 1].map(|_| fixture.context.any().allocate(4 * KIB, &owner).unwrap());
        assert!(one.ptr() == ptr || two.ptr() == ptr, "reused once the replays are done");
    }
    fixture.finish();
}

/// Streams whose replays are done are removed; the memory waits for those that are busy.
#[test]
fn memory_of_a_graph_that_saw_many_streams_waits_for_the_busy_ones() {
    let fixture = CaptureFixture::new();
    let owner = fixture.context.side_stream();
    let leases: Vec<_> = (0..400).map(|_| fixture.context.device().lease_stream().unwrap()).collect();
    let mut graph = fixture.graph();
    let block = fixture.context.any().allocate(4 * KIB, &owner).unwrap();
    let ptr = block.ptr();
    graph
        .capture(&fixture.side, CaptureOptions::default(), |capture| {
            let (stream, key) = (capture.stream().clone(), capture.keep(block)?);
            capture.fill(key, Pattern::U8(1), 4 * KIB, &stream)
        })
        .unwrap();
    let busy = &leases[37];
    for (round, stream) in leases.iter().enumerate() {
        graph.replay(stream).unwrap();
        stream.synchronize().unwrap();
        if round == 350 {
            fixture.context.pause_stream(busy);
            graph.replay(busy).unwrap();
            // The replays of one graph follow each other.
            break;
        }
    }
    let calls = fixture.context.sim.calls_made();
    drop(graph);
    assert_eq!(fixture.context.sim.calls_made(), calls, "a destructor calls no driver");
    let next = fixture.context.any().allocate(4 * KIB, &owner).unwrap();
    assert_ne!(next.ptr(), ptr, "a replay still writes there");
    fixture.context.resume_stream(busy);
    busy.synchronize().unwrap();
    drop(next);
    let [one, two] = [0, 1].map(|_| fixture.context.any().allocate(4 * KIB, &owner).unwrap());
    assert!(one.ptr() == ptr || two.ptr() == ptr, "reused once the replay is done");
    drop((one, two, leases));
    fixture.finish();
}

/// A replay costs the same however many streams the graph has seen: one driver call.
#[test]
fn a_replay_is_one_driver_call_after_many_streams() {
    let fixture = CaptureFixture::new();
    let (graph, key) = fixture.filled(3);
    for streams in [20, 200, 2_000] {
        let leases: Vec<_> = (0..streams).map(|_| fixture.context.device().lease_stream().unwrap()).collect();
        leases.iter().for_each(|stream| graph.replay(stream).unwrap());
        fixture.context.device().synchronize().unwrap();
        let last = leases.last().unwrap();
        graph.replay(last).unwrap();
        let calls = fixture.context.sim.calls_made();
        (0..10).for_each(|_| graph.replay(last).unwrap());
        assert_eq!(fixture.context.sim.calls_made() - calls, 10);
    }
    fixture.expect(&graph, key, 3);
    drop(graph);
    fixture.finish();
}

/// Unmapping does not wait for any stream, and the pool's memory was not allocated for the stream of the replays.
#[test]
fn expandable_memory_of_a_dropped_graph_waits_for_its_replays() {
    for settings in ["", "expandable_segments:True"] {
        let fixture = CaptureFixture::with(settings);
        let replays = fixture.context.side_stream();
        let mut graph = fixture.graph();
        graph
            .capture(&fixture.side, CaptureOptions::default(), |capture| {
                // Freed in the capture, but every replay writes there.
                let scratch = fixture.context.any().allocate(4, capture.stream())?;
                Ok(fixture.context.sim.fill(scratch.ptr(), Pattern::U32(5), 1, capture.stream().id())?)
            })
            .unwrap();
        fixture.context.pause_stream(&replays);
        graph.replay(&replays).unwrap();
        drop(graph);
        assert!(fixture.context.trim() > 0);
        assert_eq!(
            fixture.context.sim.paused_work(replays.id()).unwrap(),
            0,
            "{settings}: the trim waited for the replay"
        );
        fixture.context.resume_stream(&replays);
        fixture.finish();
    }
}

#[test]
fn uses_are_recorded_at_the_first_replay_on_a_stream_only() {
    let fixture = CaptureFixture::new();
    let (graph, _) = fixture.filled(5);
    let streams = [fixture.context.side_stream(), fixture.context.side_stream()];
    for stream in &streams {
        graph.replay(stream).unwrap();
    }
    let calls = fixture.context.sim.calls_made();
    for _ in 0..10 {
        for stream in &streams {
            graph.replay(stream).unwrap();
        }
    }
    assert_eq!(fixture.context.sim.calls_made() - calls, 20, "a replay is one driver call");
    drop(graph);
    fixture.finish();
}

/// A wrong program on the raw interface: the simulated device reports the hazard.
#[test]
fn a_replay_over_freed_memory_is_a_hazard() {
    let fixture = CaptureFixture::new();
    let mut graph = fixture.graph();
    let block = fixture.context.any().allocate(30 * MIB, &fixture.side).unwrap();
    graph
        .capture(&fixture.side, CaptureOptions::default(), |capture| {
            Ok(fixture.context.sim.fill(block.ptr(), Pattern::U8(1), 64, capture.stream().id())?)
        })
        .unwrap();
    graph.replay(&fixture.side).unwrap();
    fixture.side.synchronize().unwrap();
    drop(block);
    fixture.context.trim();
    graph.replay(&fixture.side).unwrap();
    let _ = fixture.side.synchronize();
    let hazards = fixture.context.sim.hazards();
    assert!(hazards.iter().any(|hazard| hazard.to_string().contains("graph")), "{hazards:?}");
    drop::<Graph>(graph);
}

#[test]
fn a_use_on_oom_pool_keeps_what_graphs_use() {
    let fixture = CaptureFixture::on(SimConfig::default().with_capacity(GIB), "");
    let options = PoolOptions { use_on_oom: true, ..PoolOptions::default() };
    let pool = MemPool::new(&fixture.context.any(), &fixture.context.device(), options).unwrap();
    let (mut graph, allocator) = (fixture.graph(), fixture.context.any());
    graph
        .capture(&fixture.side, CaptureOptions::default().with_pool(&pool), |capture| {
            // It is free for the next capture of the pool, but every replay of this one writes to it.
            let scratch = allocator.allocate(600 * MIB, capture.stream())?;
            fixture
                .context
                .sim
                .fill(scratch.ptr(), Pattern::U8(1), 1, capture.stream().id())
                .map_err(warpool::Error::from)
        })
        .unwrap();
    let outcome = allocator.allocate(500 * MIB, &fixture.side);
    assert!(matches!(outcome, Err(warpool::Error::OutOfMemory(_))), "{outcome:?} is the graph's");
    drop((graph, pool, outcome, allocator));
    fixture.finish();
}

#[test]
fn an_allocator_sees_captures_of_another_allocator() {
    let fixture = CaptureFixture::new();
    let other: Arc<dyn DeviceAllocator> =
        Arc::new(CachingAllocator::new(&fixture.context.instance, Settings::default()));
    let (mut graph, plain) = (fixture.graph(), fixture.context.side_stream());
    graph
        .capture(&fixture.side, CaptureOptions::default(), |capture| {
            let block = other.allocate(KIB, &plain)?;
            block.record_use(capture.stream())?;
            block.free()?;
            // This processes pending frees: recording an event in the capture, or querying it, would invalidate the
            // capture.
            other.allocate(KIB, &plain).map(drop)
        })
        .unwrap();
    drop(graph);
    other.trim(FIRST, MemPoolId::DEFAULT).unwrap();
    fixture.finish();
}

/// A blocking stream of another library: the default stream waits for it.
fn blocking(context: &TestContext) -> Stream {
    let id = context.sim.stream_create(FIRST, StreamOptions { non_blocking: false, priority: 0 }).unwrap();
    let raw = context.sim.stream_handle(id).unwrap().raw;
    // SAFETY: a simulated driver follows no handle.
    Stream::external(&context.device(), unsafe { ForeignStream::new(raw) }).unwrap()
}

#[test]
fn memory_used_on_the_default_stream_is_freed_while_a_blocking_stream_captures() {
    let fixture = CaptureFixture::new();
    let stream = blocking(&fixture.context);
    let (replayed, _) = fixture.filled(3);
    replayed.replay(&fixture.context.main).unwrap();
    let mut graph = fixture.graph();
    let plain = fixture.context.side_stream();
    let outcome = graph.capture(&stream, CaptureOptions::default(), |_| {
        drop(replayed);
        // Another thread allocates and frees.
        std::thread::scope(|threads| {
            threads.spawn(|| fixture.context.any().allocate(KIB, &plain).map(drop)).join().unwrap()
        })?;
        fixture.context.allocator.trim(FIRST, MemPoolId::DEFAULT).map(drop)
    });
    assert_eq!(outcome, Ok(()));
    drop(graph);
    fixture.finish();
}

#[test]
fn a_pool_of_another_allocator_is_an_error() {
    let fixture = CaptureFixture::new();
    let other: Arc<dyn DeviceAllocator> =
        Arc::new(CachingAllocator::new(&fixture.context.instance, Settings::default()));
    let own = MemPool::new(&fixture.context.any(), &fixture.context.device(), PoolOptions::default()).unwrap();
    let foreign = MemPool::new(&other, &fixture.context.device(), PoolOptions::default()).unwrap();
    let mut graph = fixture.graph();
    let entered =
        graph.capture(&fixture.side, CaptureOptions::default(), |capture| capture.enter_pool(&foreign).map(drop));
    assert_eq!((own.id(), entered), (foreign.id(), Err(warpool::Error::ForeignAllocator { pool: own.id() })));
    assert_eq!(own.uses().unwrap(), 1);
    drop((graph, own, foreign));
    fixture.finish();
}
