//! PyTorch's tests of what graphs do with memory, in our terms: each test names those that it stands for. Where our
//! behaviour differs on purpose, it says so. The sizes follow from the allocator's rules (`caching/size.rs`): small
//! segments of 2 MiB, shared ones of 20, own ones in steps of 2.

use crate::common::graphs::{GraphLab, graph_error};
use crate::common::memory::{GIB, KIB, MIB};
use warpool::driver::sim::{HazardKind, SimConfig};
use warpool::driver::{Copies as _, DevicePtr, Pattern};
use warpool::graph::{CaptureOptions, Fork, Graph, GraphError};
use warpool::memory::{Allocate as _, DeviceBlock, MemPool, MemPoolId, PoolOptions, StatByKind, Stats};
use warpool::{Error, Result, Stream};

const PLAIN: CaptureOptions =
    CaptureOptions { pool: None, mode: warpool::driver::CaptureMode::Global, poller_timeout: None };
const REUSE: &str = "graph_capture_record_stream_reuse:True";

/// test_graph_memory_stats_and_use_result_after_destroy_graph: five sizes, with exactly what is held while the graph
/// lives, when it is gone, and when its result is. A round of the capture needs three blocks at once. The result is the
/// caller's own, not the graph's: it stays when the graph goes.
#[test]
fn memory_is_held_to_the_byte_and_results_outlive_their_graph() {
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
        let lab = GraphLab::new("");
        let now = |by_kind: fn(&Stats) -> StatByKind| {
            let by_kind = by_kind(&lab.context.stats());
            let (ours, others) =
                if small { (by_kind.small_pool, by_kind.large_pool) } else { (by_kind.large_pool, by_kind.small_pool) };
            assert_eq!((by_kind.all.current, others.current), (ours.current, 0), "{bytes}: only one kind of memory");
            ours.current
        };
        let held = || (now(|stats| stats.segment), now(|stats| stats.reserved_bytes));
        let live = || (now(|stats| stats.active), now(|stats| stats.active_bytes));
        assert_eq!((held(), live()), ((0, 0), (0, 0)));
        let mut graph = lab.graph();
        let result = graph
            .capture(&lab.side, PLAIN, |_| {
                let mut last: Option<DeviceBlock> = None;
                for round in 0..4 {
                    let (first, second) = (lab.block(bytes, &lab.side), lab.block(bytes, &lab.side));
                    lab.context.sim.fill(first.ptr(), Pattern::U32(round), 1, lab.side.id())?;
                    lab.sum(second.ptr(), last.as_ref().map_or(first.ptr(), DeviceBlock::ptr), 10, &lab.side);
                    drop(last.take());
                    let result = lab.block(bytes, &lab.side);
                    lab.sum(result.ptr(), second.ptr(), round, &lab.side);
                    last = Some(result);
                }
                Ok(last.expect("four rounds"))
            })
            .unwrap();
        let one = (1, result.bytes_usable());
        if bytes == 10 * MIB - 512 {
            // What is left of a shared segment is too little to be cut: the second block gets it all.
            assert!([bytes, bytes + KIB].contains(&one.1));
        } else {
            assert_eq!(one.1, bytes);
        }
        assert_eq!((held(), live()), (with, one), "{bytes}: after the capture");
        for stream in [&lab.context.main, &*lab.side] {
            graph.replay(stream).unwrap();
            assert_eq!(lab.word(result.ptr()), 46, "{bytes}");
        }
        lab.context.trim();
        assert_eq!((held(), live()), (with, one), "{bytes}: a trim takes nothing from a graph");
        drop(graph);
        assert_eq!((held(), live()), (with, one), "{bytes}: nothing happens by itself");
        lab.clean();
        assert_eq!((held(), live()), (without, one), "{bytes}: only the result's segment is left");
        assert_eq!(lab.word(result.ptr()), 46, "{bytes}: the result outlives its graph");
        lab.add(result.ptr(), 1, &lab.side);
        assert_eq!(lab.word(result.ptr()), 47);
        drop(result);
        lab.clean();
        assert_eq!((held(), live()), ((0, 0), (0, 0)));
        lab.finish();
    }
}

/// A block that `fork` uses too, freed in the capture; whether a block of the same size then gets its place.
fn is_reused(lab: &GraphLab, capture: &mut warpool::graph::Capture<'_>, forks: usize, joins: bool) -> Result<bool> {
    let block = lab.block(4 * MIB, &lab.side);
    lab.context.sim.fill(block.ptr(), Pattern::U32(0), 64, lab.side.id())?;
    let mut open: Vec<Fork> = Vec::new();
    for at in 0..forks as u64 {
        let fork = capture.fork()?;
        lab.add(block.ptr().offset(4 * at), 1, &fork);
        block.record_use(&fork)?;
        open.push(fork);
    }
    let place = block.ptr();
    if joins {
        open.drain(..).try_for_each(|fork| capture.join(fork))?;
    }
    drop(block);
    let next = lab.block(4 * MIB, &lab.side);
    lab.context.sim.fill(next.ptr(), Pattern::U32(9), 64, lab.side.id())?;
    let reused = next.ptr() == place;
    open.into_iter().try_for_each(|fork| capture.join(fork))?;
    Ok(reused)
}

/// test_graph_record_stream, TestMemPool.test_graph_capture_reclaim_2_streams, _4_streams: a block that other streams
/// of the capture used is free again in the capture only by the setting, and only if the graph puts all of those uses
/// first.
#[test]
fn uses_on_other_streams_of_a_capture_are_joined_before_reuse() {
    for (forks, joins, settings) in
        [(1, true, REUSE), (3, true, REUSE), (1, false, REUSE), (3, false, REUSE), (1, true, ""), (3, true, "")]
    {
        let lab = GraphLab::new(settings);
        let mut graph = lab.graph();
        let reused = graph.capture(&lab.side, PLAIN, |capture| is_reused(&lab, capture, forks, joins)).unwrap();
        assert_eq!(reused, joins && settings == REUSE, "{forks} forks, joined {joins}, {settings:?}");
        graph.replay(&lab.context.main).unwrap();
        graph.replay(&lab.side).unwrap();
        lab.context.device().synchronize().unwrap();
        let pool = graph.pool().unwrap();
        // In any case it is free when the capture is over: everything was joined by then.
        let mut next = lab.graph();
        let fits = next.capture(&lab.side, PLAIN.with_pool(pool), |_| {
            let before = lab.context.bytes_reserved();
            let blocks = [0; 5].map(|_| lab.block(4 * MIB, &lab.side));
            Ok(blocks.len() == 5 && lab.context.bytes_reserved() == before)
        });
        assert!(fits.unwrap(), "five blocks fit into the segment that is there");
        drop((graph, next));
        lab.finish();
    }
}

/// TestMemPool.test_graph_capture_reclaim_shared_pool: what the first graph's capture left is the second's from the
/// start.
#[test]
fn a_second_graph_reuses_what_the_first_has_freed() {
    for settings in ["", REUSE] {
        let lab = GraphLab::new(settings);
        let (mut first, mut second) = (lab.graph(), lab.graph());
        let used = |capture: &mut warpool::graph::Capture<'_>| -> Result<DevicePtr> {
            let block = lab.block(12 * MIB, &lab.side);
            let fork = capture.fork()?;
            lab.context.sim.fill(block.ptr(), Pattern::U32(3), 1, fork.id())?;
            block.record_use(&fork)?;
            capture.join(fork)?;
            Ok(block.ptr())
        };
        let place = first.capture(&lab.side, PLAIN, used).unwrap();
        let again = second.capture(&lab.side, PLAIN.with_pool(first.pool().unwrap()), used).unwrap();
        assert_eq!(again, place, "{settings:?}");
        assert_eq!(lab.context.bytes_reserved(), 12 * MIB);
        for graph in [&first, &second, &first] {
            graph.replay(&lab.context.main).unwrap();
        }
        assert_eq!(lab.word(place), 3);
        drop((first, second));
        lab.finish();
    }
}

/// TestMemPool.test_graph_capture_pre_capture_stream_use: a use from before the capture is none of the graph's, and is
/// still waited for after it.
#[test]
fn a_use_from_before_the_capture_is_still_waited_for() {
    for settings in ["", REUSE] {
        let lab = GraphLab::new(settings);
        let other = lab.context.device().lease_stream().unwrap();
        let pool = MemPool::new(&lab.context.any(), &lab.context.device(), PoolOptions::default()).unwrap();
        let take = || lab.context.any().allocate_in(pool.id(), 4 * MIB, &lab.side).unwrap();
        let block = take();
        lab.context.pause_stream(&other);
        lab.context.sim.fill(block.ptr(), Pattern::U32(1), 1, other.id()).unwrap();
        block.record_use(&other).unwrap();
        let place = block.ptr();
        let mut graph = lab.graph();
        graph
            .capture(&lab.side, PLAIN.with_pool(pool.id()), |_| {
                drop(block);
                let next = lab.block(4 * MIB, &lab.side);
                assert_ne!(next.ptr(), place, "{settings:?}: in the capture");
                lab.add(next.ptr(), 1, &lab.side);
                Ok(())
            })
            .unwrap();
        let after = take();
        assert_ne!(after.ptr(), place, "{settings:?}: still busy there");
        lab.context.resume_stream(&other);
        let places = [0; 4].map(|_| take()).map(|block| block.ptr());
        assert!(places.contains(&place), "{settings:?}");
        drop((after, graph, other, pool));
        lab.finish();
    }
}

/// test_graph_capture_oom and test_graph_capture_error_releases_reserved_segments: what a capture took before it failed
/// goes back.
#[test]
fn a_capture_that_runs_out_of_memory_gives_back_what_it_had() {
    let lab = GraphLab::on(SimConfig::default().with_capacity(GIB), "");
    let mut graph = lab.graph();
    let outcome = graph.capture(&lab.side, PLAIN, |capture| {
        capture.allocate(300 * MIB)?;
        assert_eq!(lab.context.bytes_reserved(), 300 * MIB);
        capture.allocate(2 * GIB)
    });
    let Err(Error::OutOfMemory(report)) = outcome else { panic!("{outcome:?}") };
    assert!(report.capturing);
    assert_eq!((graph.pools(), graph.is_capturing()), (Vec::new(), false));
    assert_eq!(lab.context.trim(), 300 * MIB, "nobody uses the pool any more");
    assert_eq!(lab.context.bytes_reserved(), 0);
    let all = lab.block(900 * MIB, &lab.context.main);
    drop(all);
    lab.context.trim();
    // Broken by a forbidden call instead: the same.
    let outcome = graph.capture(&lab.side, PLAIN, |capture| {
        capture.allocate(300 * MIB)?;
        let _ = lab.context.device().synchronize();
        Ok(())
    });
    assert!(matches!(graph_error(outcome), GraphError::CaptureFailed { .. }));
    lab.forgive(HazardKind::CaptureInvalidated);
    assert_eq!((lab.context.trim(), lab.context.bytes_reserved()), (300 * MIB, 0));
    graph.capture(&lab.side, PLAIN, |capture| capture.allocate(900 * MIB)).unwrap();
    drop(graph);
    lab.finish();
}

/// test_graph_two_successive, test_graph_three_successive: what one graph leaves, the next ones use; with pools of
/// their own and with one for all.
#[test]
fn graphs_that_follow_each_other_may_share_a_pool() {
    let held = [false, true].map(|shares| {
        let lab = GraphLab::new("");
        let main = lab.context.main.clone();
        let input = lab.block(4, &main);
        lab.set(input.ptr(), 0);
        let (mut graphs, mut outputs) = (Vec::<Graph>::new(), Vec::<DevicePtr>::new());
        for step in 0..3 {
            let mut graph = lab.graph();
            let pool = graphs.first().filter(|_| shares).map(|first| first.pool().unwrap());
            let from = outputs.last().copied().unwrap_or(input.ptr());
            let key = graph
                .capture(&lab.side, CaptureOptions { pool, ..PLAIN }, |capture| {
                    // Memory of its own that is gone when the capture ends: the next graph's, if they share.
                    let between = lab.block(30 * MIB, &lab.side);
                    lab.sum(between.ptr(), from, 1, &lab.side);
                    let key = capture.allocate(4)?;
                    lab.sum(capture.buffer(key)?.ptr(), between.ptr(), 10 << step, &lab.side);
                    Ok(key)
                })
                .unwrap();
            outputs.push(lab.at(&graph, key));
            graphs.push(graph);
        }
        for round in 0..4 {
            lab.set(input.ptr(), 100 * round);
            for graph in &graphs {
                graph.replay(&main).unwrap();
            }
            let got: Vec<u32> = outputs.iter().map(|&output| lab.word(output)).collect();
            let start = 100 * round;
            assert_eq!(got, [start + 11, start + 32, start + 73], "sharing {shares}");
        }
        let held = lab.context.bytes_reserved();
        // The first to go takes nothing from the others but what it held itself.
        graphs.remove(0);
        lab.clean();
        lab.set(outputs[1], 1000);
        graphs[1].replay(&main).unwrap();
        assert_eq!(lab.word(outputs[2]), 1041);
        drop((graphs, input));
        lab.finish();
        held
    });
    assert_eq!(held, [2 * MIB + 3 * 32 * MIB, 2 * MIB + 32 * MIB]);
}

/// test_graph_concurrent_replay: graphs with pools of their own run side by side. With one pool they must not, and the
/// simulated device says so.
#[test]
fn graphs_with_their_own_pools_replay_at_the_same_time() {
    for shares in [false, true] {
        let lab = GraphLab::new("");
        let other = lab.context.device().lease_stream().unwrap();
        let (mut first, mut second) = (lab.graph(), lab.graph());
        let capture = |graph: &mut Graph, pool: Option<MemPoolId>, value: u32| {
            graph
                .capture(&lab.side, CaptureOptions { pool, ..PLAIN }, |capture| {
                    let between = lab.block(MIB, &lab.side);
                    lab.context.sim.fill(between.ptr(), Pattern::U32(value), 1, lab.side.id())?;
                    let key = capture.allocate(4)?;
                    lab.sum(capture.buffer(key)?.ptr(), between.ptr(), 1, &lab.side);
                    Ok(key)
                })
                .unwrap()
        };
        let one = capture(&mut first, None, 10);
        let pool = shares.then(|| first.pool().unwrap());
        let two = capture(&mut second, pool, 20);
        for _ in 0..3 {
            first.replay(&lab.side).unwrap();
            second.replay(&other).unwrap();
        }
        if shares {
            lab.context.device().synchronize().unwrap();
            assert!(!lab.context.sim.hazards().is_empty());
            lab.forgive(HazardKind::Race);
        } else {
            assert_eq!((lab.word(lab.at(&first, one)), lab.word(lab.at(&second, two))), (11, 21));
        }
        drop((first, second, other));
        lab.finish();
    }
}

/// TestMemPool: test_graph_mem_pool_arg_and_nested_use_mem_pool, test_cuda_graph_allocator_propagates_stream.
#[test]
fn memory_comes_from_the_pools_that_were_named() {
    let lab = GraphLab::new("");
    let pool = || MemPool::new(&lab.context.any(), &lab.context.device(), PoolOptions::default()).unwrap();
    let (outer, inner) = (pool(), pool());
    let mut graph = lab.graph();
    let within = |pool: &MemPool, ptr: DevicePtr| {
        let segments = lab.context.segments_of(pool.id());
        segments.iter().any(|it| (it.address..it.address + it.total_size).contains(&ptr.0))
    };
    let place = |stream: &Stream| -> Result<DevicePtr> { Ok(lab.context.any().allocate(4 * KIB, stream)?.ptr()) };
    graph
        .capture(&lab.side, PLAIN.with_pool(outer.id()), |capture| {
            assert!(within(&outer, place(&lab.side)?));
            {
                let _scope = capture.enter_pool(&inner)?;
                assert!(within(&inner, place(&lab.side)?), "the innermost scope counts");
            }
            assert!(within(&outer, place(&lab.side)?));
            let fork = capture.fork()?;
            assert!(within(&outer, place(&fork)?), "streams that join the capture use its pool");
            let key = capture.allocate_on(4, &fork)?;
            assert!(within(&outer, capture.buffer(key)?.ptr()));
            lab.add(capture.buffer(key)?.ptr(), 1, &fork);
            assert!(!within(&outer, place(&lab.context.main)?), "others do not");
            capture.join(fork)
        })
        .unwrap();
    assert!(!within(&outer, place(&lab.side).unwrap()), "nor does the stream after the capture");
    assert_eq!(graph.pools(), [outer.id(), inner.id()]);
    assert_eq!((outer.uses().unwrap(), inner.uses().unwrap()), (2, 2), "the owner and the graph");
    let ids = [outer.id(), inner.id()];
    drop((outer, inner));
    lab.clean();
    assert!(ids.iter().all(|&id| !lab.context.segments_of(id).is_empty()), "the graph keeps them");
    graph.replay(&lab.context.main).unwrap();
    graph.reset().unwrap();
    lab.clean();
    assert_eq!(lab.context.bytes_reserved(), 0);
    lab.finish();
}
