//! Counterparts of PyTorch's tests of graph memory: each test names them, and states where our behaviour differs on
//! purpose. The sizes follow from the allocator's rules (`memory/size_rules.rs`): small segments of 2 MiB, shared ones
//! of 20, own ones in steps of 2.

use crate::common::graphs::{GraphFixture, graph_error};
use crate::common::memory::{GIB, KIB, MIB};
use warpool::driver::sim::{HazardKind, SimConfig};
use warpool::driver::{Copies as _, DevicePtr, Pattern};
use warpool::graph::{CaptureOptions, Fork, Graph, GraphError};
use warpool::memory::pools::PoolOptions;
use warpool::memory::report::{StatByKind, Stats};
use warpool::memory::{Allocate as _, DeviceBlock, MemPool};
use warpool::{Error, Result, Stream};

const PLAIN: CaptureOptions<'_> =
    CaptureOptions { pool: None, mode: warpool::driver::CaptureMode::Global, poller_timeout: None };
const REUSE: &str = "graph_capture_record_stream_reuse:True";

/// test_graph_memory_stats_and_use_result_after_destroy_graph: five sizes, with the exact bytes that are reserved while
/// the graph lives, after it is dropped, and after its result is dropped. A round of the capture needs three blocks at
/// once. The caller owns the result, not the graph: it stays when the graph is dropped.
#[test]
fn the_bytes_of_a_graph_are_exact_and_results_outlive_it() {
    struct Case {
        bytes: u64,
        small: bool,
        /// Segments and bytes with the graph, and without it.
        with: (u64, u64),
        without: (u64, u64),
    }
    let case = |bytes, small, with, without| Case { bytes, small, with, without };
    let cases = [
        // All in one small segment.
        case(512, true, (1, 2 * MIB), (1, 2 * MIB)),
        // Two fill a small segment, and the third needs another.
        case(MIB, true, (2, 4 * MIB), (1, 2 * MIB)),
        // All in one shared segment.
        case(MIB + 512, false, (1, 20 * MIB), (1, 20 * MIB)),
        // Two fill a shared segment.
        case(10 * MIB - 512, false, (2, 40 * MIB), (1, 20 * MIB)),
        // Each has its own, rounded up to 12 MiB.
        case(10 * MIB + 512, false, (3, 36 * MIB), (1, 12 * MIB)),
    ];
    for Case { bytes, small, with, without } in cases {
        let fixture = GraphFixture::new("");
        let now = |by_kind: fn(&Stats) -> StatByKind| {
            let by_kind = by_kind(&fixture.context.stats());
            let (ours, others) =
                if small { (by_kind.small_pool, by_kind.large_pool) } else { (by_kind.large_pool, by_kind.small_pool) };
            assert_eq!((by_kind.all.current, others.current), (ours.current, 0), "{bytes}: only one kind of memory");
            ours.current
        };
        let held = || (now(|stats| stats.segment), now(|stats| stats.reserved_bytes));
        let live = || (now(|stats| stats.active), now(|stats| stats.active_bytes));
        assert_eq!((held(), live()), ((0, 0), (0, 0)));
        let mut graph = fixture.graph();
        let result = graph
            .capture(&fixture.side, PLAIN, |_| {
                let mut last: Option<DeviceBlock> = None;
                for round in 0..4 {
                    let (first, second) = (fixture.block(bytes, &fixture.side), fixture.block(bytes, &fixture.side));
                    fixture.context.sim.fill(first.ptr(), Pattern::U32(round), 1, fixture.side.id())?;
                    fixture.sum(second.ptr(), last.as_ref().map_or(first.ptr(), DeviceBlock::ptr), 10, &fixture.side);
                    drop(last.take());
                    let result = fixture.block(bytes, &fixture.side);
                    fixture.sum(result.ptr(), second.ptr(), round, &fixture.side);
                    last = Some(result);
                }
                Ok(last.expect("four rounds"))
            })
            .unwrap();
        let one = (1, result.bytes_usable());
        if bytes == 10 * MIB - 512 {
            // The rest of a shared segment is too small to be split: the second block gets it all.
            assert!([bytes, bytes + KIB].contains(&one.1));
        } else {
            assert_eq!(one.1, bytes);
        }
        assert_eq!((held(), live()), (with, one), "{bytes}: after the capture");
        for stream in [&fixture.context.main, &*fixture.side] {
            graph.replay(stream).unwrap();
            assert_eq!(fixture.word(result.ptr()), 46, "{bytes}");
        }
        fixture.context.trim();
        assert_eq!((held(), live()), (with, one), "{bytes}: a trim takes nothing from a graph");
        drop(graph);
        assert_eq!((held(), live()), (with, one), "{bytes}: nothing happens by itself");
        fixture.clean();
        assert_eq!((held(), live()), (without, one), "{bytes}: only the result's segment is left");
        assert_eq!(fixture.word(result.ptr()), 46, "{bytes}: the result outlives its graph");
        fixture.add(result.ptr(), 1, &fixture.side);
        assert_eq!(fixture.word(result.ptr()), 47);
        drop(result);
        fixture.clean();
        assert_eq!((held(), live()), ((0, 0), (0, 0)));
        fixture.finish();
    }
}

/// Frees a block in the capture that `fork` uses too. Returns whether a block of the same size then reuses it.
fn is_reused(
    fixture: &GraphFixture,
    capture: &mut warpool::graph::Capture<'_>,
    forks: usize,
    joins: bool,
) -> Result<bool> {
    let block = fixture.block(4 * MIB, &fixture.side);
    fixture.context.sim.fill(block.ptr(), Pattern::U32(0), 64, fixture.side.id())?;
    let mut open: Vec<Fork> = Vec::new();
    for at in 0..forks as u64 {
        let fork = capture.fork()?;
        fixture.add(block.ptr().offset(4 * at), 1, &fork);
        block.record_use(&fork)?;
        open.push(fork);
    }
    let place = block.ptr();
    if joins {
        open.drain(..).try_for_each(|fork| capture.join(fork))?;
    }
    drop(block);
    let next = fixture.block(4 * MIB, &fixture.side);
    fixture.context.sim.fill(next.ptr(), Pattern::U32(9), 64, fixture.side.id())?;
    let reused = next.ptr() == place;
    open.into_iter().try_for_each(|fork| capture.join(fork))?;
    Ok(reused)
}

/// test_graph_record_stream, TestMemPool.test_graph_capture_reclaim_2_streams, _4_streams: a block that other streams
/// of the capture used is reused in the capture only with the setting, and only if the graph orders all of those uses
/// before the next one.
#[test]
fn uses_on_other_streams_of_a_capture_are_joined_before_reuse() {
    for (forks, joins, settings) in
        [(1, true, REUSE), (3, true, REUSE), (1, false, REUSE), (3, false, REUSE), (1, true, ""), (3, true, "")]
    {
        let fixture = GraphFixture::new(settings);
        let mut graph = fixture.graph();
        let reused = graph.capture(&fixture.side, PLAIN, |capture| is_reused(&fixture, capture, forks, joins)).unwrap();
        assert_eq!(reused, joins && settings == REUSE, "{forks} forks, joined {joins}, {settings:?}");
        graph.replay(&fixture.context.main).unwrap();
        graph.replay(&fixture.side).unwrap();
        fixture.context.device().synchronize().unwrap();
        let pool = graph.pool().unwrap();
        // After the capture it is free with or without the setting: everything was joined.
        let mut next = fixture.graph();
        let fits = next.capture(&fixture.side, PLAIN.with_pool(pool), |_| {
            let before = fixture.context.bytes_reserved();
            let blocks = [0; 5].map(|_| fixture.block(4 * MIB, &fixture.side));
            Ok(blocks.len() == 5 && fixture.context.bytes_reserved() == before)
        });
        assert!(fits.unwrap(), "five blocks fit into the segment that is there");
        drop((graph, next));
        fixture.finish();
    }
}

/// TestMemPool.test_graph_capture_reclaim_shared_pool: the second capture reuses what the first has freed.
#[test]
fn a_second_graph_reuses_what_the_first_has_freed() {
    for settings in ["", REUSE] {
        let fixture = GraphFixture::new(settings);
        let (mut first, mut second) = (fixture.graph(), fixture.graph());
        let used = |capture: &mut warpool::graph::Capture<'_>| -> Result<DevicePtr> {
            let block = fixture.block(12 * MIB, &fixture.side);
            let fork = capture.fork()?;
            fixture.context.sim.fill(block.ptr(), Pattern::U32(3), 1, fork.id())?;
            block.record_use(&fork)?;
            capture.join(fork)?;
            Ok(block.ptr())
        };
        let place = first.capture(&fixture.side, PLAIN, used).unwrap();
        let again = second.capture(&fixture.side, PLAIN.with_pool(first.pool().unwrap()), used).unwrap();
        assert_eq!(again, place, "{settings:?}");
        assert_eq!(fixture.context.bytes_reserved(), 12 * MIB);
        for graph in [&first, &second, &first] {
            graph.replay(&fixture.context.main).unwrap();
        }
        assert_eq!(fixture.word(place), 3);
        drop((first, second));
        fixture.finish();
    }
}

/// TestMemPool.test_graph_capture_pre_capture_stream_use: a use from before the capture does not belong to the graph,
/// and the block still waits for it after the capture.
#[test]
fn a_use_from_before_the_capture_is_still_waited_for() {
    for settings in ["", REUSE] {
        let fixture = GraphFixture::new(settings);
        let other = fixture.context.device().lease_stream().unwrap();
        let pool = MemPool::new(&fixture.context.any(), &fixture.context.device(), PoolOptions::default()).unwrap();
        let take = || fixture.context.any().allocate_in(&pool, 4 * MIB, &fixture.side).unwrap();
        let block = take();
        fixture.context.pause_stream(&other);
        fixture.context.sim.fill(block.ptr(), Pattern::U32(1), 1, other.id()).unwrap();
        block.record_use(&other).unwrap();
        let place = block.ptr();
        let mut graph = fixture.graph();
        graph
            .capture(&fixture.side, PLAIN.with_pool(&pool), |_| {
                drop(block);
                let next = fixture.block(4 * MIB, &fixture.side);
                assert_ne!(next.ptr(), place, "{settings:?}: in the capture");
                fixture.add(next.ptr(), 1, &fixture.side);
                Ok(())
            })
            .unwrap();
        let after = take();
        assert_ne!(after.ptr(), place, "{settings:?}: still busy there");
        fixture.context.resume_stream(&other);
        let places = [0; 4].map(|_| take()).map(|block| block.ptr());
        assert!(places.contains(&place), "{settings:?}");
        drop((after, graph, other, pool));
        fixture.finish();
    }
}

/// test_graph_capture_oom and test_graph_capture_error_releases_reserved_segments: memory of a failed capture is
/// freed.
#[test]
fn a_capture_that_runs_out_of_memory_frees_what_it_had() {
    let fixture = GraphFixture::on(SimConfig::default().with_capacity(GIB), "");
    let mut graph = fixture.graph();
    let outcome = graph.capture(&fixture.side, PLAIN, |capture| {
        capture.allocate(300 * MIB)?;
        assert_eq!(fixture.context.bytes_reserved(), 300 * MIB);
        capture.allocate(2 * GIB)
    });
    let Err(Error::OutOfMemory(report)) = outcome else { panic!("{outcome:?}") };
    assert!(report.capturing);
    assert!(graph.pools().is_empty() && !graph.is_capturing());
    assert_eq!(fixture.context.trim(), 300 * MIB, "the pool has no users");
    assert_eq!(fixture.context.bytes_reserved(), 0);
    let all = fixture.block(900 * MIB, &fixture.context.main);
    drop(all);
    fixture.context.trim();
    // Invalidated by a forbidden call: the same.
    let outcome = graph.capture(&fixture.side, PLAIN, |capture| {
        capture.allocate(300 * MIB)?;
        let _ = fixture.context.device().synchronize();
        Ok(())
    });
    assert!(matches!(graph_error(outcome), GraphError::CaptureFailed { .. }));
    fixture.expect_hazards(HazardKind::CaptureInvalidated);
    assert_eq!((fixture.context.trim(), fixture.context.bytes_reserved()), (300 * MIB, 0));
    graph.capture(&fixture.side, PLAIN, |capture| capture.allocate(900 * MIB)).unwrap();
    drop(graph);
    fixture.finish();
}

/// test_graph_two_successive, test_graph_three_successive: later graphs use the output of earlier ones, with separate
/// pools and with one shared pool.
#[test]
fn successive_graphs_can_share_a_pool() {
    let held = [false, true].map(|shares| {
        let fixture = GraphFixture::new("");
        let main = fixture.context.main.clone();
        let input = fixture.block(4, &main);
        fixture.set(input.ptr(), 0);
        let (mut graphs, mut outputs) = (Vec::<Graph>::new(), Vec::<DevicePtr>::new());
        for step in 0..3 {
            let mut graph = fixture.graph();
            let pool = graphs.first().filter(|_| shares).map(|first| first.pool().unwrap());
            let from = outputs.last().copied().unwrap_or(input.ptr());
            let key = graph
                .capture(&fixture.side, CaptureOptions { pool, ..PLAIN }, |capture| {
                    // Freed when the capture ends: reused by the next graph, if they share the pool.
                    let between = fixture.block(30 * MIB, &fixture.side);
                    fixture.sum(between.ptr(), from, 1, &fixture.side);
                    let key = capture.allocate(4)?;
                    fixture.sum(capture.buffer(key)?.ptr(), between.ptr(), 10 << step, &fixture.side);
                    Ok(key)
                })
                .unwrap();
            outputs.push(fixture.at(&graph, key));
            graphs.push(graph);
        }
        for round in 0..4 {
            fixture.set(input.ptr(), 100 * round);
            for graph in &graphs {
                graph.replay(&main).unwrap();
            }
            let got: Vec<u32> = outputs.iter().map(|&output| fixture.word(output)).collect();
            let start = 100 * round;
            assert_eq!(got, [start + 11, start + 32, start + 73], "sharing {shares}");
        }
        let held = fixture.context.bytes_reserved();
        // The first reset frees only what the graph itself held.
        graphs.remove(0);
        fixture.clean();
        fixture.set(outputs[1], 1000);
        graphs[1].replay(&main).unwrap();
        assert_eq!(fixture.word(outputs[2]), 1041);
        drop((graphs, input));
        fixture.finish();
        held
    });
    assert_eq!(held, [2 * MIB + 3 * 32 * MIB, 2 * MIB + 32 * MIB]);
}

/// test_graph_concurrent_replay: graphs with pools of their own can run in parallel. With one pool they must not, and
/// the simulated device reports it.
#[test]
fn graphs_with_their_own_pools_replay_in_parallel() {
    for shares in [false, true] {
        let fixture = GraphFixture::new("");
        let other = fixture.context.device().lease_stream().unwrap();
        let (mut first, mut second) = (fixture.graph(), fixture.graph());
        let capture = |graph: &mut Graph, pool: Option<&MemPool>, value: u32| {
            graph
                .capture(&fixture.side, CaptureOptions { pool, ..PLAIN }, |capture| {
                    let between = fixture.block(MIB, &fixture.side);
                    fixture.context.sim.fill(between.ptr(), Pattern::U32(value), 1, fixture.side.id())?;
                    let key = capture.allocate(4)?;
                    fixture.sum(capture.buffer(key)?.ptr(), between.ptr(), 1, &fixture.side);
                    Ok(key)
                })
                .unwrap()
        };
        let one = capture(&mut first, None, 10);
        let pool = shares.then(|| first.pool().unwrap());
        let two = capture(&mut second, pool, 20);
        for _ in 0..3 {
            first.replay(&fixture.side).unwrap();
            second.replay(&other).unwrap();
        }
        if shares {
            fixture.context.device().synchronize().unwrap();
            assert!(!fixture.context.sim.hazards().is_empty());
            fixture.expect_hazards(HazardKind::Race);
        } else {
            assert_eq!((fixture.word(fixture.at(&first, one)), fixture.word(fixture.at(&second, two))), (11, 21));
        }
        drop((first, second, other));
        fixture.finish();
    }
}

/// TestMemPool: test_graph_mem_pool_arg_and_nested_use_mem_pool, test_cuda_graph_allocator_propagates_stream.
#[test]
fn memory_comes_from_the_pool_in_scope() {
    let fixture = GraphFixture::new("");
    let pool = || MemPool::new(&fixture.context.any(), &fixture.context.device(), PoolOptions::default()).unwrap();
    let (outer, inner) = (pool(), pool());
    let mut graph = fixture.graph();
    let within = |pool: &MemPool, ptr: DevicePtr| {
        let segments = fixture.context.segments_of(pool.id());
        segments.iter().any(|it| (it.address..it.address + it.total_size).contains(&ptr.0))
    };
    let place = |stream: &Stream| -> Result<DevicePtr> { Ok(fixture.context.any().allocate(4 * KIB, stream)?.ptr()) };
    graph
        .capture(&fixture.side, PLAIN.with_pool(&outer), |capture| {
            assert!(within(&outer, place(&fixture.side)?));
            {
                let _scope = capture.enter_pool(&inner)?;
                assert!(within(&inner, place(&fixture.side)?), "the innermost scope counts");
            }
            assert!(within(&outer, place(&fixture.side)?));
            let fork = capture.fork()?;
            assert!(within(&outer, place(&fork)?), "streams that join the capture use its pool");
            let key = capture.allocate_on(4, &fork)?;
            assert!(within(&outer, capture.buffer(key)?.ptr()));
            fixture.add(capture.buffer(key)?.ptr(), 1, &fork);
            assert!(!within(&outer, place(&fixture.context.main)?), "others do not");
            capture.join(fork)
        })
        .unwrap();
    assert!(!within(&outer, place(&fixture.side).unwrap()), "nor does the stream after the capture");
    assert!(graph.pools().iter().eq([&outer, &inner]));
    assert_eq!((outer.uses().unwrap(), inner.uses().unwrap()), (2, 2), "the owner and the graph");
    let ids = [outer.id(), inner.id()];
    drop((outer, inner));
    fixture.clean();
    assert!(ids.iter().all(|&id| !fixture.context.segments_of(id).is_empty()), "the graph keeps them");
    graph.replay(&fixture.context.main).unwrap();
    graph.reset().unwrap();
    fixture.clean();
    assert_eq!(fixture.context.bytes_reserved(), 0);
    fixture.finish();
}
