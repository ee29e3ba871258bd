//! The scope of a capture: its operations and their errors.

use std::sync::Arc;

use warpool::driver::sim::HazardKind;
use warpool::driver::{CaptureMode, ErrorCode, Pattern};
use warpool::generator::Generator;
use warpool::graph::{CaptureOptions, Graph, GraphError, capture_mode};
use warpool::memory::{Allocate as _, DeviceAllocator, DriverPoolAllocator};
use warpool::{Error, Instance};

use crate::common::launch::capture_kernel;
use crate::fixture::{CaptureFixture, graph_error};

#[test]
fn capture_modes_are_parsed_by_name() {
    for (name, mode) in
        [("global", CaptureMode::Global), ("thread_local", CaptureMode::ThreadLocal), ("relaxed", CaptureMode::Relaxed)]
    {
        assert_eq!(capture_mode(name), Ok(mode));
    }
    let unknown = capture_mode("Global").unwrap_err();
    assert_eq!(unknown.to_string(), "unknown capture mode \"Global\"; there are global, thread_local and relaxed");
}

#[test]
fn the_mode_decides_what_invalidates_a_capture() {
    let fixture = CaptureFixture::new();
    for (mode, by_other, by_itself) in [
        (CaptureMode::Global, true, true),
        (CaptureMode::ThreadLocal, false, true),
        (CaptureMode::Relaxed, false, false),
    ] {
        for (itself, breaks) in [(false, by_other), (true, by_itself)] {
            let mut graph = fixture.graph();
            let idle = fixture.context.side_stream();
            let outcome = graph.capture(&fixture.side, CaptureOptions::default().with_mode(mode), |_| {
                if itself {
                    let _ = idle.query();
                } else {
                    let _ = std::thread::scope(|threads| threads.spawn(|| idle.query()).join().unwrap());
                }
                Ok(())
            });
            assert_eq!(outcome.is_err(), breaks, "{mode:?}, by itself: {itself}");
        }
    }
    fixture.expect_hazards(&[HazardKind::CaptureInvalidated]);
    fixture.finish();
}

#[test]
fn forks_run_in_parallel_and_are_joined() {
    let fixture = CaptureFixture::new();
    let mut graph = fixture.graph_with(warpool::graph::GraphOptions { keep_graph: true });
    let (left, right) = graph
        .capture(&fixture.side, CaptureOptions::default(), |capture| {
            let stream = capture.stream().clone();
            let left = capture.allocate(4)?;
            capture.fill(left, Pattern::U32(1), 1, &stream)?;
            let fork = capture.fork()?;
            let right = capture.allocate_on(4, &fork)?;
            capture.copy(right, left, 4, &fork)?;
            capture_kernel(capture, fixture.add, &[right.into(), 1_u32.into(), 10_u32.into()], &fork)?;
            let other = capture.allocate(4)?;
            capture.fill(other, Pattern::U32(2), 1, &stream)?;
            capture.join(fork)?;
            capture.copy(left, right, 4, &stream)?;
            Ok((left, right))
        })
        .unwrap();
    let shape = graph.topology().unwrap();
    assert_eq!((shape.nodes.len(), shape.edges.len()), (5, 5), "{shape:?}");
    fixture.expect(&graph, left, 11);
    fixture.expect(&graph, right, 11);
    drop(graph);
    fixture.finish();
}

#[test]
fn a_fork_that_is_not_joined_fails_the_capture() {
    let fixture = CaptureFixture::new();
    let mut graph = fixture.graph();
    let outcome = graph.capture(&fixture.side, CaptureOptions::default(), |capture| {
        let (stream, key) = (capture.stream().clone(), capture.allocate(4)?);
        capture.fill(key, Pattern::U32(1), 1, &stream)?;
        let fork = capture.fork()?;
        capture.fill(key, Pattern::U32(2), 1, &fork)
    });
    match graph_error(outcome) {
        GraphError::CaptureFailed { error } => assert_eq!(error.code, ErrorCode::StreamCaptureUnjoined),
        other => panic!("{other}"),
    }
    fixture.expect_hazards(&[HazardKind::CaptureUnjoined]);
    fixture.expect_usable(&mut graph);
    drop(graph);
    fixture.finish();
}

#[test]
fn work_on_a_stream_outside_of_the_capture_is_an_error() {
    let fixture = CaptureFixture::new();
    let mut graph = fixture.graph();
    let outside = fixture.context.side_stream();
    graph
        .capture(&fixture.side, CaptureOptions::default(), |capture| {
            let key = capture.allocate(64)?;
            let error = GraphError::StreamNotInCapture { stream: outside.id() };
            assert_eq!(graph_error(capture.fill(key, Pattern::U8(1), 1, &outside)), error);
            assert_eq!(graph_error(capture.copy(key.at(32), key, 32, &outside)), error);
            assert_eq!(graph_error(capture_kernel(capture, fixture.add, &[], &outside)), error);
            assert_eq!(graph_error(capture.allocate_on(64, &outside)), error);
            Ok(())
        })
        .unwrap();
    assert!(graph.is_empty().unwrap());
    drop(graph);
    fixture.finish();
}

#[test]
fn bounds_and_foreign_keys_are_checked() {
    let fixture = CaptureFixture::new();
    let (other, foreign) = fixture.filled(1);
    let mut graph = fixture.graph();
    let key = graph
        .capture(&fixture.side, CaptureOptions::default(), |capture| {
            let (stream, key) = (capture.stream().clone(), capture.allocate(64)?);
            let beyond = GraphError::OutOfBounds { offset: 60, bytes: 8, available: 64 };
            assert_eq!(graph_error(capture.fill(key.at(60), Pattern::U32(1), 2, &stream)), beyond);
            assert_eq!(graph_error(capture.copy(key.at(60), key, 8, &stream)), beyond);
            assert!(capture.fill(key.at(u64::MAX), Pattern::U8(1), 1, &stream).is_err());
            let argument = [key.at(65).into()];
            assert!(matches!(
                graph_error(capture_kernel(capture, fixture.add, &argument, &stream)),
                GraphError::OutOfBounds { .. }
            ));
            assert_eq!(graph_error(capture.buffer(foreign)), GraphError::UnknownBuffer);
            assert_eq!(graph_error(capture.fill(foreign, Pattern::U8(1), 1, &stream)), GraphError::UnknownBuffer);
            capture.fill(key, Pattern::U32(6), 16, &stream)?;
            Ok(key)
        })
        .unwrap();
    assert_eq!(graph_error(graph.buffer(foreign)), GraphError::UnknownBuffer);
    fixture.expect(&graph, key, 6);
    graph.reset().unwrap();
    assert_eq!(graph_error(graph.buffer(key)), GraphError::NotCaptured);
    fixture.expect_usable(&mut graph);
    assert_eq!(graph_error(graph.buffer(key)), GraphError::UnknownBuffer, "a key of the capture before");
    drop((graph, other));
    fixture.finish();
}

#[test]
fn objects_of_another_instance_are_errors() {
    let (fixture, other) = (CaptureFixture::new(), CaptureFixture::new());
    let foreign = other.context.any().allocate(64, &other.side).unwrap();
    let mut graph = fixture.graph();
    let outcome = graph.capture(&fixture.side, CaptureOptions::default(), |capture| capture.keep(foreign).map(drop));
    assert_eq!(outcome, Err(Error::ForeignInstance { object: "the block" }));
    let made = Graph::new(&fixture.context.any(), &other.context.device(), Default::default()).map(drop);
    assert_eq!(made, Err(Error::ForeignInstance { object: "the device" }));
    fixture.expect_usable(&mut graph);
    assert_eq!(graph.replay(&other.side), Err(Error::ForeignInstance { object: "the stream" }));
    let far = fixture.context.instance.device(1).unwrap().pool_stream().unwrap();
    assert!(matches!(graph_error(graph.replay(&far)), GraphError::StreamDevice { .. }));
    drop(graph);
    other.finish();
    fixture.finish();
}

#[test]
fn a_replay_cannot_be_captured() {
    let fixture = CaptureFixture::new();
    let (inner, key) = fixture.filled(5);
    let mut graph = fixture.graph();
    let captured = graph
        .capture(&fixture.side, CaptureOptions::default(), |capture| {
            let error = graph_error(inner.replay(capture.stream()));
            assert_eq!(error, GraphError::StreamCaptures { stream: fixture.side.id() });
            // On another stream it can be replayed.
            inner.replay(&fixture.context.side_stream())?;
            let (stream, key) = (capture.stream().clone(), capture.allocate(4)?);
            capture.fill(key, Pattern::U32(6), 1, &stream)?;
            Ok(key)
        })
        .expect("the capture is valid");
    fixture.expect(&graph, captured, 6);
    fixture.expect(&inner, key, 5);
    drop((graph, inner));
    fixture.finish();
}

#[test]
fn an_allocator_without_pools_has_no_graphs() {
    let fixture = CaptureFixture::new();
    let allocator: Arc<dyn DeviceAllocator> = Arc::new(DriverPoolAllocator::new(&fixture.context.instance));
    let error = Graph::new(&allocator, &fixture.context.device(), Default::default()).map(drop);
    assert_eq!(error, Err(Error::Unsupported { allocator: "driver-pool", what: "private pools" }));
    fixture.finish();
}

#[test]
fn several_threads_capture_concurrently() {
    let fixture = CaptureFixture::new();
    std::thread::scope(|threads| {
        for value in 0..4 {
            let fixture = &fixture;
            threads.spawn(move || {
                let device = fixture.context.device();
                let stream = device.lease_stream().unwrap();
                for round in 0..20 {
                    let mut graph = fixture.graph();
                    let key = graph
                        .capture(&stream, CaptureOptions::default(), |capture| {
                            let (stream, key) = (capture.stream().clone(), capture.allocate(4)?);
                            capture.fill(key, Pattern::U32(100 * value + round), 1, &stream)?;
                            Ok(key)
                        })
                        .unwrap();
                    graph.replay(&stream).unwrap();
                    assert!(graph.buffer(key).is_ok());
                }
            });
        }
    });
    fixture.finish();
}

#[test]
fn graphs_can_be_sent_between_threads() {
    fn both<T: Send + Sync>() {}
    both::<Graph>();
    both::<Instance>();
    let fixture = CaptureFixture::new();
    let (graph, key) = fixture.filled(8);
    std::thread::scope(|threads| threads.spawn(|| graph.replay(&fixture.side)).join().unwrap()).unwrap();
    fixture.expect(&graph, key, 8);
    drop(graph);
    fixture.finish();
}

#[test]
fn empty_copies_fills_and_draws() {
    let fixture = CaptureFixture::new();
    let generator = Generator::new(&fixture.context.device()).unwrap();
    let mut graph = fixture.graph();
    let empty = Arc::new(fixture.context.any().allocate(0, &fixture.side).unwrap());
    graph
        .capture(&fixture.side, CaptureOptions::default(), |capture| {
            let stream = capture.stream().clone();
            let (a, b) = (capture.allocate(0)?, capture.share(Arc::clone(&empty))?);
            let c = capture.allocate(8)?;
            capture.copy(a, b, 0, &stream)?;
            capture.copy(c.at(8), b, 0, &stream)?;
            capture.fill(a, Pattern::U32(1), 0, &stream)?;
            generator.fill_bits(capture.buffer(a)?, &stream)?;
            generator.reserve(0, &stream)?;
            Ok(())
        })
        .unwrap();
    for _ in 0..2 {
        graph.replay(&fixture.context.main).unwrap();
        graph.replay(&fixture.side).unwrap();
    }
    assert_eq!(generator.offset().unwrap(), 0);
    drop(graph);
    drop(empty);
    fixture.finish();
}
