//! Capture, replay, begin and end, and captures that fail.

use warpool::Error;
use warpool::driver::sim::HazardKind;
use warpool::driver::{CaptureMode, Captures as _, Copies as _, ErrorCode, Graphs as _, Pattern};
use warpool::graph::{CaptureOptions, GraphError};
use warpool::memory::{Allocate as _, MemPool, MemPoolId, PoolOptions};

use crate::common::launch::capture_kernel;
use crate::common::memory::{FIRST, MIB};
use crate::lab::{Lab, graph_error};

#[test]
fn a_graph_runs_what_was_captured_each_time() {
    let lab = Lab::new();
    let mut graph = lab.graph();
    let data = lab.context.any().allocate(4, &lab.context.main).unwrap();
    let ptr = data.ptr();
    lab.context.sim.fill(ptr, Pattern::U32(5), 1, lab.context.main.id()).unwrap();
    lab.context.device().synchronize().unwrap();
    let key = graph
        .capture(&lab.side, CaptureOptions::default(), |capture| {
            assert_eq!(lab.context.instance.current_stream()?, *lab.side.stream());
            let (stream, key) = (capture.stream().clone(), capture.keep(data)?);
            capture_kernel(capture, lab.add, &[key.into(), 1_u32.into(), 3_u32.into()], &stream)?;
            Ok(key)
        })
        .unwrap();
    assert_eq!(lab.word(ptr), 5, "nothing runs while it is captured");
    for round in 1..=3 {
        lab.expect(&graph, key, 5 + 3 * round);
    }
    assert!(graph.is_captured() && !graph.is_capturing() && !graph.is_empty().unwrap());
    drop(graph);
    lab.finish();
}

#[test]
fn bad_begins_are_refused_one_by_one_and_change_nothing() {
    let lab = Lab::new();
    let (mut graph, plain) = (lab.graph(), CaptureOptions::default());
    let before = (lab.context.stats(), lab.context.sim.object_counts());
    let main = lab.context.main.clone();
    assert_eq!(graph_error(graph.capture_begin(&main, plain)), GraphError::DefaultStream);
    let far = lab.context.instance.device(1).unwrap().lease_stream().unwrap();
    assert!(matches!(graph_error(graph.capture_begin(&far, plain)), GraphError::StreamDevice { .. }));
    let other = Lab::new();
    assert_eq!(graph.capture_begin(&other.side, plain), Err(Error::ForeignInstance { object: "the stream" }));
    assert_eq!(
        graph_error(graph.capture_begin(&lab.side, plain.with_pool(MemPoolId::DEFAULT))),
        GraphError::DefaultPool
    );
    let unknown = MemPoolId { graph: 0, user: 99 };
    let refused = graph.capture_begin(&lab.side, plain.with_pool(unknown));
    assert_eq!(refused, Err(Error::UnknownPool { pool: unknown, device: FIRST }));
    let (pool, block) = {
        let pool = MemPool::new(&lab.context.any(), &lab.context.device(), PoolOptions::default()).unwrap();
        (pool.id(), lab.context.any().allocate_in(pool.id(), 512, &main).unwrap())
    };
    assert_eq!(graph.capture_begin(&lab.side, plain.with_pool(pool)), Err(Error::PoolReleased { pool }));
    drop(block);
    {
        let pool = MemPool::new(&lab.context.any(), &lab.context.device(), PoolOptions::default()).unwrap();
        let _scope = pool.enter().unwrap();
        let refused = graph.capture_begin(&lab.side, plain.with_pool(pool.id()));
        assert_eq!(refused, Err(Error::AlreadyRouting { pool: pool.id() }));
        assert_eq!(pool.uses().unwrap(), 2, "the owner and the scope");
    }
    lab.context.sim.capture_begin(lab.side.id(), CaptureMode::Relaxed).unwrap();
    assert_eq!(
        graph_error(graph.capture_begin(&lab.side, plain)),
        GraphError::StreamCaptures { stream: lab.side.id() }
    );
    let template = lab.context.sim.capture_end(lab.side.id()).unwrap();
    lab.context.sim.graph_destroy(template).unwrap();
    lab.context.trim();
    assert_eq!(
        (lab.context.stats().reserved_bytes.all.current, lab.context.sim.object_counts().graphs),
        (0, before.1.graphs)
    );
    lab.still_works(&mut graph);
    assert_eq!(graph_error(graph.capture_begin(&lab.side, plain)), GraphError::AlreadyCaptured);
    drop((graph, far));
    other.finish();
    lab.finish();
}

#[test]
fn begin_and_end_are_a_pair() {
    let lab = Lab::new();
    let mut graph = lab.graph();
    assert_eq!(graph_error(graph.capture_end(&lab.side)), GraphError::NotCapturing);
    assert_eq!(graph_error(graph.replay(&lab.context.main)), GraphError::NotCaptured);
    graph.capture_begin(&lab.side, CaptureOptions::default()).unwrap();
    assert!(graph.is_capturing() && lab.context.instance.is_capturing(&lab.side).unwrap());
    let nested = graph_error(graph.capture_begin(&lab.side, CaptureOptions::default()));
    assert_eq!(nested, GraphError::AlreadyCapturing { stream: lab.side.id() });
    assert_eq!(graph_error(graph.replay(&lab.context.main)), GraphError::StillCapturing);
    let main = lab.context.main.clone();
    let wrong = GraphError::WrongStream { began: lab.side.id(), ended: main.id() };
    assert_eq!(graph_error(graph.capture_end(&main)), wrong);
    assert!(graph.is_capturing(), "a wrong end changes nothing");
    let key = graph.scope().unwrap().allocate(4).unwrap();
    graph.scope().unwrap().fill(key, Pattern::U32(9), 1, &lab.side).unwrap();
    graph.capture_end(&lab.side).unwrap();
    assert!(!lab.context.instance.is_capturing(&lab.side).unwrap());
    lab.expect(&graph, key, 9);
    drop(graph);
    lab.finish();
}

#[test]
fn a_capture_broken_on_purpose_leaves_everything_usable() {
    let lab = Lab::new();
    let mut graph = lab.graph();
    let outcome = graph.capture(&lab.side, CaptureOptions::default(), |capture| {
        capture.allocate(3 * MIB)?;
        // Forbidden: the device would have to wait for a capture.
        let _ = lab.context.device().synchronize();
        Ok(())
    });
    match graph_error(outcome) {
        GraphError::CaptureFailed { error } => {
            assert_eq!(error.code, ErrorCode::StreamCaptureInvalidated);
            assert!(error.to_string().contains("device_synchronize"), "{error}");
        }
        other => panic!("{other}"),
    }
    assert!(!graph.is_captured() && graph.pools().is_empty());
    assert_eq!(graph_error(graph.replay(&lab.context.main)), GraphError::NotCaptured);
    lab.forgive(&[HazardKind::CaptureInvalidated]);
    lab.still_works(&mut graph);
    drop(graph);
    lab.finish();
}

#[test]
fn an_error_in_the_scope_ends_the_capture_and_is_passed_on() {
    let lab = Lab::new();
    let mut graph = lab.graph();
    let failed: warpool::Result<()> = graph.capture(&lab.side, CaptureOptions::default(), |capture| {
        capture.allocate(3 * MIB)?;
        Err(Error::ThreadEnding)
    });
    assert_eq!(failed, Err(Error::ThreadEnding));
    let driver_error = graph.capture(&lab.side, CaptureOptions::default(), |_| lab.context.device().synchronize());
    let code = driver_error.unwrap_err().driver().map(|error| error.code);
    assert_eq!(code, Some(ErrorCode::StreamCaptureUnsupported), "the call that broke it speaks for itself");
    let only_broken = graph.capture(&lab.side, CaptureOptions::default(), |capture| {
        let _ = lab.context.device().synchronize();
        capture.allocate(512)
    });
    let error = graph_error(only_broken);
    assert!(error.to_string().contains("device_synchronize"), "the cause, not only that it is broken: {error}");
    lab.forgive(&[HazardKind::CaptureInvalidated]);
    lab.still_works(&mut graph);
    drop(graph);
    lab.finish();
}

#[test]
fn a_panic_in_the_scope_ends_the_capture_and_goes_on() {
    let lab = Lab::new();
    let mut graph = lab.graph();
    let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        graph.capture(&lab.side, CaptureOptions::default(), |capture| -> warpool::Result<()> {
            capture.allocate(512)?;
            panic!("on purpose");
        })
    }));
    assert_eq!(panic.unwrap_err().downcast_ref::<&str>(), Some(&"on purpose"));
    assert!(!graph.is_capturing() && lab.context.instance.current_stream().unwrap() == lab.context.main);
    lab.still_works(&mut graph);
    drop(graph);
    lab.finish();
}

#[test]
fn a_capture_ends_on_its_thread_unless_it_is_relaxed() {
    let lab = Lab::new();
    let mut graph = lab.graph();
    let mut end_elsewhere = |mode: CaptureMode| {
        graph.reset().unwrap();
        graph.capture_begin(&lab.side, CaptureOptions::default().with_mode(mode)).unwrap();
        let outcome = std::thread::scope(|threads| threads.spawn(|| graph.capture_end(&lab.side)).join().unwrap());
        if outcome.is_err() {
            // The mistake changes nothing.
            graph.capture_end(&lab.side).unwrap();
        }
        outcome
    };
    for mode in [CaptureMode::Global, CaptureMode::ThreadLocal] {
        assert_eq!(graph_error(end_elsewhere(mode)), GraphError::WrongThread);
    }
    end_elsewhere(CaptureMode::Relaxed).unwrap();
    drop(graph);
    lab.finish();
}
