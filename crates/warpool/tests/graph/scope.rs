//! What can be done in the scope of a capture, and what it refuses.

use std::sync::Arc;

use warpool::driver::sim::HazardKind;
use warpool::driver::{CaptureMode, ErrorCode, Pattern};
use warpool::generator::Generator;
use warpool::graph::{CaptureOptions, Graph, GraphError, capture_mode};
use warpool::memory::{Allocate as _, DeviceAllocator, DriverPoolAllocator};
use warpool::{Error, Instance};

use crate::common::launch::capture_kernel;
use crate::lab::{Lab, graph_error};

#[test]
fn modes_go_by_their_names() {
    for (name, mode) in
        [("global", CaptureMode::Global), ("thread_local", CaptureMode::ThreadLocal), ("relaxed", CaptureMode::Relaxed)]
    {
        assert_eq!(capture_mode(name), Ok(mode));
    }
    let unknown = capture_mode("Global").unwrap_err();
    assert_eq!(unknown.to_string(), "unknown capture mode \"Global\"; there are global, thread_local and relaxed");
}

#[test]
fn the_mode_decides_what_breaks_a_capture() {
    let lab = Lab::new();
    for (mode, by_other, by_itself) in [
        (CaptureMode::Global, true, true),
        (CaptureMode::ThreadLocal, false, true),
        (CaptureMode::Relaxed, false, false),
    ] {
        for (itself, breaks) in [(false, by_other), (true, by_itself)] {
            let mut graph = lab.graph();
            let idle = lab.context.side_stream();
            let outcome = graph.capture(&lab.side, CaptureOptions::default().with_mode(mode), |_| {
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
    lab.forgive(&[HazardKind::CaptureInvalidated]);
    lab.finish();
}

#[test]
fn forks_run_side_by_side_and_are_joined() {
    let lab = Lab::new();
    let mut graph = lab.graph_with(warpool::graph::GraphOptions { keep_graph: true });
    let (left, right) = graph
        .capture(&lab.side, CaptureOptions::default(), |capture| {
            let stream = capture.stream().clone();
            let left = capture.allocate(4)?;
            capture.fill(left, Pattern::U32(1), 1, &stream)?;
            let fork = capture.fork()?;
            let right = capture.allocate_on(4, &fork)?;
            capture.copy(right, left, 4, &fork)?;
            capture_kernel(capture, lab.add, &[right.into(), 1_u32.into(), 10_u32.into()], &fork)?;
            let other = capture.allocate(4)?;
            capture.fill(other, Pattern::U32(2), 1, &stream)?;
            capture.join(fork)?;
            capture.copy(left, right, 4, &stream)?;
            Ok((left, right))
        })
        .unwrap();
    let shape = graph.topology().unwrap();
    assert_eq!((shape.nodes.len(), shape.edges.len()), (5, 5), "{shape:?}");
    lab.expect(&graph, left, 11);
    lab.expect(&graph, right, 11);
    drop(graph);
    lab.finish();
}

#[test]
fn a_fork_that_is_not_joined_fails_the_capture() {
    let lab = Lab::new();
    let mut graph = lab.graph();
    let outcome = graph.capture(&lab.side, CaptureOptions::default(), |capture| {
        let (stream, key) = (capture.stream().clone(), capture.allocate(4)?);
        capture.fill(key, Pattern::U32(1), 1, &stream)?;
        let fork = capture.fork()?;
        capture.fill(key, Pattern::U32(2), 1, &fork)
    });
    match graph_error(outcome) {
        GraphError::CaptureFailed { error } => assert_eq!(error.code, ErrorCode::StreamCaptureUnjoined),
        other => panic!("{other}"),
    }
    lab.forgive(&[HazardKind::CaptureUnjoined]);
    lab.still_works(&mut graph);
    drop(graph);
    lab.finish();
}

#[test]
fn work_goes_to_streams_of_the_capture_only() {
    let lab = Lab::new();
    let mut graph = lab.graph();
    let outside = lab.context.side_stream();
    graph
        .capture(&lab.side, CaptureOptions::default(), |capture| {
            let key = capture.allocate(64)?;
            let refused = GraphError::StreamNotInCapture { stream: outside.id() };
            assert_eq!(graph_error(capture.fill(key, Pattern::U8(1), 1, &outside)), refused);
            assert_eq!(graph_error(capture.copy(key.at(32), key, 32, &outside)), refused);
            assert_eq!(graph_error(capture_kernel(capture, lab.add, &[], &outside)), refused);
            assert_eq!(graph_error(capture.allocate_on(64, &outside)), refused);
            Ok(())
        })
        .unwrap();
    assert!(graph.is_empty().unwrap());
    drop(graph);
    lab.finish();
}

#[test]
fn ends_of_buffers_and_strange_keys_are_noticed() {
    let lab = Lab::new();
    let (other, foreign) = lab.filled(1);
    let mut graph = lab.graph();
    let key = graph
        .capture(&lab.side, CaptureOptions::default(), |capture| {
            let (stream, key) = (capture.stream().clone(), capture.allocate(64)?);
            let beyond = GraphError::OutOfBounds { offset: 60, bytes: 8, available: 64 };
            assert_eq!(graph_error(capture.fill(key.at(60), Pattern::U32(1), 2, &stream)), beyond);
            assert_eq!(graph_error(capture.copy(key.at(60), key, 8, &stream)), beyond);
            assert!(capture.fill(key.at(u64::MAX), Pattern::U8(1), 1, &stream).is_err());
            let argument = [key.at(65).into()];
            assert!(matches!(
                graph_error(capture_kernel(capture, lab.add, &argument, &stream)),
                GraphError::OutOfBounds { .. }
            ));
            assert_eq!(graph_error(capture.buffer(foreign)), GraphError::UnknownBuffer);
            assert_eq!(graph_error(capture.fill(foreign, Pattern::U8(1), 1, &stream)), GraphError::UnknownBuffer);
            capture.fill(key, Pattern::U32(6), 16, &stream)?;
            Ok(key)
        })
        .unwrap();
    assert_eq!(graph_error(graph.buffer(foreign)), GraphError::UnknownBuffer);
    lab.expect(&graph, key, 6);
    graph.reset().unwrap();
    assert_eq!(graph_error(graph.buffer(key)), GraphError::NotCaptured);
    lab.still_works(&mut graph);
    assert_eq!(graph_error(graph.buffer(key)), GraphError::UnknownBuffer, "a key of the capture before");
    drop((graph, other));
    lab.finish();
}

#[test]
fn things_of_other_gpus_are_refused() {
    let (lab, other) = (Lab::new(), Lab::new());
    let foreign = other.context.any().allocate(64, &other.side).unwrap();
    let mut graph = lab.graph();
    let outcome = graph.capture(&lab.side, CaptureOptions::default(), |capture| capture.keep(foreign).map(drop));
    assert_eq!(outcome, Err(Error::ForeignInstance { object: "the block" }));
    let made = Graph::new(&lab.context.any(), &other.context.device(), Default::default()).map(drop);
    assert_eq!(made, Err(Error::ForeignInstance { object: "the device" }));
    lab.still_works(&mut graph);
    assert_eq!(graph.replay(&other.side), Err(Error::ForeignInstance { object: "the stream" }));
    let far = lab.context.instance.device(1).unwrap().pool_stream().unwrap();
    assert!(matches!(graph_error(graph.replay(&far)), GraphError::StreamDevice { .. }));
    drop(graph);
    other.finish();
    lab.finish();
}

#[test]
fn a_replay_cannot_be_captured() {
    let lab = Lab::new();
    let (inner, key) = lab.filled(5);
    let mut graph = lab.graph();
    let captured = graph
        .capture(&lab.side, CaptureOptions::default(), |capture| {
            let refused = graph_error(inner.replay(capture.stream()));
            assert_eq!(refused, GraphError::StreamCaptures { stream: lab.side.id() });
            // Elsewhere it can be replayed.
            inner.replay(&lab.context.side_stream())?;
            let (stream, key) = (capture.stream().clone(), capture.allocate(4)?);
            capture.fill(key, Pattern::U32(6), 1, &stream)?;
            Ok(key)
        })
        .expect("the capture is not broken");
    lab.expect(&graph, captured, 6);
    lab.expect(&inner, key, 5);
    drop((graph, inner));
    lab.finish();
}

#[test]
fn an_allocator_without_pools_has_no_graphs() {
    let lab = Lab::new();
    let allocator: Arc<dyn DeviceAllocator> = Arc::new(DriverPoolAllocator::new(&lab.context.instance));
    let refused = Graph::new(&allocator, &lab.context.device(), Default::default()).map(drop);
    assert_eq!(refused, Err(Error::Unsupported { allocator: "driver-pool", what: "private pools" }));
    lab.finish();
}

#[test]
fn several_threads_capture_at_once() {
    let lab = Lab::new();
    std::thread::scope(|threads| {
        for value in 0..4 {
            let lab = &lab;
            threads.spawn(move || {
                let device = lab.context.device();
                let stream = device.lease_stream().unwrap();
                for round in 0..20 {
                    let mut graph = lab.graph();
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
    lab.finish();
}

#[test]
fn graphs_go_from_thread_to_thread() {
    fn both<T: Send + Sync>() {}
    both::<Graph>();
    both::<Instance>();
    let lab = Lab::new();
    let (graph, key) = lab.filled(8);
    std::thread::scope(|threads| threads.spawn(|| graph.replay(&lab.side)).join().unwrap()).unwrap();
    lab.expect(&graph, key, 8);
    drop(graph);
    lab.finish();
}

#[test]
fn nothing_may_be_copied_filled_and_drawn() {
    let lab = Lab::new();
    let generator = Generator::new(&lab.context.device()).unwrap();
    let mut graph = lab.graph();
    let empty = Arc::new(lab.context.any().allocate(0, &lab.side).unwrap());
    graph
        .capture(&lab.side, CaptureOptions::default(), |capture| {
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
        graph.replay(&lab.context.main).unwrap();
        graph.replay(&lab.side).unwrap();
    }
    assert_eq!(generator.offset().unwrap(), 0);
    drop(graph);
    drop(empty);
    lab.finish();
}
