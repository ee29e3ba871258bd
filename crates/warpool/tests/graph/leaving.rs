//! Graphs that go: dropped, reset or abandoned in the middle of a capture, without a driver call where none is allowed.

use std::sync::Arc;

use warpool::driver::sim::{SimConfig, SimDriver};
use warpool::driver::{Captures as _, Copies as _, Graphs as _, Pattern};
use warpool::graph::{CaptureOptions, Graph, GraphError, GraphOptions};
use warpool::memory::{Allocate as _, CachingAllocator, DeviceAllocator, Settings};
use warpool::{Instance, Stream};

use crate::lab::{Lab, graph_error};

/// Drops it, and makes sure that no driver was called.
fn drop_quietly(lab: &Lab, graph: Graph) {
    let calls = lab.context.sim.calls_made();
    drop(graph);
    assert_eq!(lab.context.sim.calls_made(), calls, "a destructor called the driver");
}

#[test]
fn a_drop_calls_no_driver_and_the_next_capture_clears_up() {
    let lab = Lab::new();
    for keep_graph in [false, true] {
        let mut graph = lab.graph_with(GraphOptions { keep_graph });
        let key = lab.fill_into(&mut graph, CaptureOptions::default(), 5);
        lab.expect(&graph, key, 5);
        drop_quietly(&lab, graph);
        let left = lab.context.sim.object_counts();
        assert_eq!((left.graphs, left.graph_execs), (usize::from(keep_graph), 1));
        let mut next = lab.graph();
        next.capture(&lab.side, CaptureOptions::default(), |_| {
            let left = lab.context.sim.object_counts();
            assert_eq!((left.graphs, left.graph_execs), (0, 0));
            Ok(())
        })
        .unwrap();
        next.reset().unwrap();
    }
    lab.finish();
}

#[test]
fn a_graph_dropped_in_a_capture_leaves_it_to_the_next() {
    let lab = Lab::new();
    let mut graph = lab.graph();
    graph.capture_begin(&lab.side, CaptureOptions::default()).unwrap();
    let pool = graph.pools()[0];
    let key = graph.scope().unwrap().allocate(64).unwrap();
    graph.scope().unwrap().fill(key, Pattern::U8(1), 64, &lab.side).unwrap();
    drop_quietly(&lab, graph);
    assert!(lab.side.is_capturing().unwrap(), "the driver was not told yet");
    assert!(lab.context.instance.is_capturing(&lab.side).unwrap(), "and it still counts");
    assert!(lab.context.pools().pool_uses(crate::common::memory::FIRST, pool).unwrap_or(0) == 0);
    // Memory that the stream used meanwhile must wait for the end of that capture, not put a mark into it.
    let block = lab.context.any().allocate(512, &lab.context.main).unwrap();
    block.record_use(&lab.side).unwrap();
    drop(block);
    drop(lab.context.any().allocate(512, &lab.context.main).unwrap());
    let mut next = lab.graph();
    lab.still_works(&mut next);
    drop(next);
    lab.finish();
}

#[test]
fn an_abandoned_capture_that_somebody_else_ended_is_left_alone() {
    let lab = Lab::new();
    let mut graph = lab.graph();
    graph.capture_begin(&lab.side, CaptureOptions::default()).unwrap();
    drop_quietly(&lab, graph);
    let template = lab.context.sim.capture_end(lab.side.id()).unwrap();
    warpool::driver::Graphs::graph_destroy(&*lab.context.sim, template).unwrap();
    // Another capture on the same stream, by hand: not ours to end.
    lab.context.sim.capture_begin(lab.side.id(), warpool::driver::CaptureMode::Relaxed).unwrap();
    let other = lab.context.device().lease_stream().unwrap();
    let mut next = lab.graph();
    next.capture(&other, CaptureOptions::default(), |_| Ok(())).unwrap();
    assert!(lab.side.is_capturing().unwrap());
    let template = lab.context.sim.capture_end(lab.side.id()).unwrap();
    warpool::driver::Graphs::graph_destroy(&*lab.context.sim, template).unwrap();
    drop((next, other));
    lab.finish();
}

#[test]
fn a_reset_in_the_middle_of_a_capture_ends_it() {
    let lab = Lab::new();
    let mut graph = lab.graph();
    graph.capture_begin(&lab.side, CaptureOptions::default()).unwrap();
    graph.scope().unwrap().allocate(64).unwrap();
    graph.reset().unwrap();
    assert!(!lab.side.is_capturing().unwrap() && !lab.context.instance.is_capturing(&lab.side).unwrap());
    assert_eq!(graph_error(graph.capture_end(&lab.side)), GraphError::NotCapturing);
    lab.still_works(&mut graph);
    drop(graph);
    lab.finish();
}

#[test]
fn a_capture_that_is_ended_behind_our_back_is_over() {
    let lab = Lab::new();
    let mut graph = lab.graph();
    let outcome = graph.capture(&lab.side, CaptureOptions::default(), |_| {
        let template = lab.context.sim.capture_end(lab.side.id())?;
        Ok(warpool::driver::Graphs::graph_destroy(&*lab.context.sim, template)?)
    });
    assert!(matches!(graph_error(outcome), GraphError::CaptureFailed { .. }));
    lab.still_works(&mut graph);
    drop(graph);
    lab.finish();
}

#[test]
fn closing_the_gpu_destroys_what_graphs_left() {
    let sim = Arc::new(SimDriver::new(SimConfig::default()));
    let instance = Instance::new(sim.clone()).unwrap();
    let device = instance.device(0).unwrap();
    let allocator: Arc<dyn DeviceAllocator> = Arc::new(CachingAllocator::new(&instance, Settings::default()));
    let lease = device.lease_stream().unwrap();
    let stream: &Stream = &lease;
    let mut graph = Graph::new(&allocator, &device, GraphOptions { keep_graph: true }).unwrap();
    graph
        .capture(stream, CaptureOptions::default(), |capture| {
            let (stream, key) = (capture.stream().clone(), capture.allocate(64)?);
            capture.fill(key, Pattern::U8(1), 64, &stream)
        })
        .unwrap();
    graph.replay(stream).unwrap();
    stream.synchronize().unwrap();
    let mut abandoned = Graph::new(&allocator, &device, GraphOptions::default()).unwrap();
    abandoned.capture_begin(stream, CaptureOptions::default()).unwrap();
    drop((graph, abandoned));
    drop((allocator, lease, device));
    instance.close().unwrap();
    let left = sim.object_counts();
    assert_eq!((left.graphs, left.graph_execs, left.captures, left.streams, left.events), (0, 0, 0, 0, 0));
}

#[test]
fn a_replay_under_way_completes_when_its_graph_goes() {
    let lab = Lab::new();
    let block = Arc::new(lab.context.any().allocate(4, &lab.side).unwrap());
    for by_reset in [false, true] {
        lab.context.sim.fill(block.ptr(), Pattern::U32(0), 1, lab.side.id()).unwrap();
        let mut graph = lab.graph();
        graph
            .capture(&lab.side, CaptureOptions::default(), |capture| {
                let (stream, key) = (capture.stream().clone(), capture.share(Arc::clone(&block))?);
                capture.fill(key, Pattern::U32(9), 1, &stream)
            })
            .unwrap();
        lab.context.pause_stream(&lab.side);
        graph.replay(&lab.side).unwrap();
        if by_reset {
            graph.reset().unwrap();
        } else {
            drop(graph);
        }
        lab.graph().reset().unwrap();
        lab.context.resume_stream(&lab.side);
        assert_eq!(lab.word(block.ptr()), 9);
    }
    drop(block);
    lab.finish();
}

#[test]
fn an_end_takes_only_its_own_capture() {
    let lab = Lab::new();
    let (mut first, mut second) = (lab.graph(), lab.graph());
    first.capture_begin(&lab.side, CaptureOptions::default()).unwrap();
    let stray = lab.context.sim.capture_end(lab.side.id()).unwrap();
    second.capture_begin(&lab.side, CaptureOptions::default()).unwrap();
    assert!(matches!(graph_error(first.capture_end(&lab.side)), GraphError::CaptureFailed { .. }));
    assert!(second.is_capturing() && !first.is_captured());
    second.capture_end(&lab.side).unwrap();
    drop((first, second));
    // What was ended past us is nobody's.
    lab.context.sim.graph_destroy(stray).unwrap();
    lab.finish();
}
