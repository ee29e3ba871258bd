//! Graphs that are dropped or reset, including in the middle of a capture; a drop makes no driver call.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};

use warpool::driver::decorate::{Arguments, Hook, Hooked, Outcome};
use warpool::driver::sim::{SimConfig, SimDriver};
use warpool::driver::{Call, Captures as _, Copies as _, Driver, Graphs as _, Pattern};
use warpool::graph::{CaptureOptions, Graph, GraphError, GraphOptions};
use warpool::memory::{Allocate as _, CachingAllocator, DeviceAllocator, Settings};
use warpool::{Instance, Stream};

use crate::fixture::{CaptureFixture, graph_error};

/// Drops it, and checks that the driver was not called.
fn drop_without_driver_calls(fixture: &CaptureFixture, graph: Graph) {
    let calls = fixture.context.sim.calls_made();
    drop(graph);
    assert_eq!(fixture.context.sim.calls_made(), calls, "a destructor called the driver");
}

#[test]
fn a_dropped_graph_is_destroyed_by_the_next_capture() {
    let fixture = CaptureFixture::new();
    for keep_graph in [false, true] {
        let mut graph = fixture.graph_with(GraphOptions { keep_graph });
        let key = fixture.fill_into(&mut graph, CaptureOptions::default(), 5);
        fixture.expect(&graph, key, 5);
        drop_without_driver_calls(&fixture, graph);
        let left = fixture.context.sim.object_counts();
        assert_eq!((left.graphs, left.graph_execs), (usize::from(keep_graph), 1));
        let mut next = fixture.graph();
        next.capture(&fixture.side, CaptureOptions::default(), |_| {
            let left = fixture.context.sim.object_counts();
            assert_eq!((left.graphs, left.graph_execs), (0, 0));
            Ok(())
        })
        .unwrap();
        next.reset().unwrap();
    }
    fixture.finish();
}

#[test]
fn the_capture_of_a_dropped_graph_is_ended_by_the_next_one() {
    let fixture = CaptureFixture::new();
    let mut graph = fixture.graph();
    graph.capture_begin(&fixture.side, CaptureOptions::default()).unwrap();
    let pool = graph.pools()[0].id();
    let key = graph.scope().unwrap().allocate(64).unwrap();
    graph.scope().unwrap().fill(key, Pattern::U8(1), 64, &fixture.side).unwrap();
    drop_without_driver_calls(&fixture, graph);
    assert!(fixture.side.is_capturing().unwrap(), "the driver's capture was not ended yet");
    assert!(fixture.context.instance.is_capturing(&fixture.side).unwrap(), "and it is still counted");
    assert!(fixture.context.pools().pool_uses(crate::common::memory::FIRST, pool).unwrap_or(0) == 0);
    // Memory that the stream uses meanwhile waits for the end of that capture; no event is recorded in it.
    let block = fixture.context.any().allocate(512, &fixture.context.main).unwrap();
    block.record_use(&fixture.side).unwrap();
    drop(block);
    drop(fixture.context.any().allocate(512, &fixture.context.main).unwrap());
    let mut next = fixture.graph();
    fixture.expect_usable(&mut next);
    drop(next);
    fixture.finish();
}

#[test]
fn another_capture_on_the_stream_of_a_dropped_graph_is_left_alone() {
    let fixture = CaptureFixture::new();
    let mut graph = fixture.graph();
    graph.capture_begin(&fixture.side, CaptureOptions::default()).unwrap();
    drop_without_driver_calls(&fixture, graph);
    let template = fixture.context.sim.capture_end(fixture.side.id()).unwrap();
    warpool::driver::Graphs::graph_destroy(&*fixture.context.sim, template).unwrap();
    // Another capture on the same stream, begun without a graph: it is left alone.
    fixture.context.sim.capture_begin(fixture.side.id(), warpool::driver::CaptureMode::Relaxed).unwrap();
    let other = fixture.context.device().lease_stream().unwrap();
    let mut next = fixture.graph();
    next.capture(&other, CaptureOptions::default(), |_| Ok(())).unwrap();
    assert!(fixture.side.is_capturing().unwrap());
    let template = fixture.context.sim.capture_end(fixture.side.id()).unwrap();
    warpool::driver::Graphs::graph_destroy(&*fixture.context.sim, template).unwrap();
    drop((next, other));
    fixture.finish();
}

#[test]
fn a_reset_in_the_middle_of_a_capture_ends_it() {
    let fixture = CaptureFixture::new();
    let mut graph = fixture.graph();
    graph.capture_begin(&fixture.side, CaptureOptions::default()).unwrap();
    graph.scope().unwrap().allocate(64).unwrap();
    graph.reset().unwrap();
    assert!(!fixture.side.is_capturing().unwrap() && !fixture.context.instance.is_capturing(&fixture.side).unwrap());
    assert_eq!(graph_error(graph.capture_end(&fixture.side)), GraphError::NotCapturing);
    fixture.expect_usable(&mut graph);
    drop(graph);
    fixture.finish();
}

#[test]
fn a_capture_ended_outside_of_its_graph_is_over() {
    let fixture = CaptureFixture::new();
    let mut graph = fixture.graph();
    let outcome = graph.capture(&fixture.side, CaptureOptions::default(), |_| {
        let template = fixture.context.sim.capture_end(fixture.side.id())?;
        Ok(warpool::driver::Graphs::graph_destroy(&*fixture.context.sim, template)?)
    });
    assert!(matches!(graph_error(outcome), GraphError::CaptureFailed { .. }));
    fixture.expect_usable(&mut graph);
    drop(graph);
    fixture.finish();
}

#[test]
fn closing_the_instance_destroys_what_graphs_left() {
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
fn a_replay_under_way_completes_when_its_graph_is_dropped() {
    let fixture = CaptureFixture::new();
    let block = Arc::new(fixture.context.any().allocate(4, &fixture.side).unwrap());
    for by_reset in [false, true] {
        fixture.context.sim.fill(block.ptr(), Pattern::U32(0), 1, fixture.side.id()).unwrap();
        let mut graph = fixture.graph();
        graph
            .capture(&fixture.side, CaptureOptions::default(), |capture| {
                let (stream, key) = (capture.stream().clone(), capture.share(Arc::clone(&block))?);
                capture.fill(key, Pattern::U32(9), 1, &stream)
            })
            .unwrap();
        fixture.context.pause_stream(&fixture.side);
        graph.replay(&fixture.side).unwrap();
        if by_reset {
            graph.reset().unwrap();
        } else {
            drop(graph);
        }
        fixture.graph().reset().unwrap();
        fixture.context.resume_stream(&fixture.side);
        assert_eq!(fixture.word(block.ptr()), 9);
    }
    drop(block);
    fixture.finish();
}

#[test]
fn an_end_ends_only_its_own_capture() {
    let fixture = CaptureFixture::new();
    let (mut first, mut second) = (fixture.graph(), fixture.graph());
    first.capture_begin(&fixture.side, CaptureOptions::default()).unwrap();
    let stray = fixture.context.sim.capture_end(fixture.side.id()).unwrap();
    second.capture_begin(&fixture.side, CaptureOptions::default()).unwrap();
    assert!(matches!(graph_error(first.capture_end(&fixture.side)), GraphError::CaptureFailed { .. }));
    assert!(second.is_capturing() && !first.is_captured());
    second.capture_end(&fixture.side).unwrap();
    drop((first, second));
    // The capture that was ended outside of its graph is over.
    fixture.context.sim.graph_destroy(stray).unwrap();
    fixture.finish();
}

/// A driver whose first call that ends a capture waits twice before it is made.
struct WaitAtEnd {
    waits: AtomicBool,
    barrier: Barrier,
}

impl Hook for WaitAtEnd {
    type CallState = ();

    fn before(&self, _: &dyn Driver, call: Call, _: Arguments<'_>) -> warpool::driver::Result<()> {
        if call == Call::CaptureEnd && self.waits.swap(false, Ordering::Relaxed) {
            self.barrier.wait();
            self.barrier.wait();
        }
        Ok(())
    }

    fn after(&self, _: &dyn Driver, _: Call, (): (), _: Outcome<'_>) {}

    fn suballocation(&self, _: Call, _: Arguments<'_>) {}
}

/// A reset ends the captures of dropped graphs even while another thread is ending one of them.
#[test]
fn a_thread_that_ends_one_capture_leaves_the_others_to_other_threads() {
    let sim = Arc::new(SimDriver::new(SimConfig::default()));
    let hook = WaitAtEnd { waits: AtomicBool::new(true), barrier: Barrier::new(2) };
    let driver = Arc::new(Hooked::with_hook(sim.clone(), hook));
    let instance = Instance::new(driver.clone()).unwrap();
    let device = instance.device(0).unwrap();
    let allocator: Arc<dyn DeviceAllocator> = Arc::new(CachingAllocator::new(&instance, Settings::default()));
    let graph = || Graph::new(&allocator, &device, GraphOptions::default()).unwrap();
    let streams = [(); 3].map(|()| device.lease_stream().unwrap());
    let graphs = streams.each_ref().map(|stream| {
        let mut graph = graph();
        graph.capture_begin(stream, CaptureOptions::default()).unwrap();
        graph
    });
    drop(graphs);
    let under_way = || sim.object_counts().captures;
    std::thread::scope(|scope| {
        scope.spawn(|| graph().reset().unwrap());
        driver.hook().barrier.wait();
        assert_eq!(under_way(), 3, "the other thread is about to end one");
        graph().reset().unwrap();
        let left = under_way();
        driver.hook().barrier.wait();
        assert_eq!(left, 1, "only that one is left");
    });
    assert_eq!(under_way(), 0);
    drop((allocator, streams, device));
    instance.close().unwrap();
}
