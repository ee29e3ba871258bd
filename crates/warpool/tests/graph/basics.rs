//! Capture, replay, begin and end, and captures that fail.

use warpool::Error;
use warpool::driver::sim::HazardKind;
use warpool::driver::{CaptureMode, Captures as _, Copies as _, ErrorCode, Graphs as _, Pattern};
use warpool::graph::{CaptureOptions, GraphError};
use warpool::memory::pools::PoolOptions;
use warpool::memory::{Allocate as _, MemPool, MemPoolId};

use crate::common::launch::capture_kernel;
use crate::common::memory::{FIRST, MIB};
use crate::fixture::{CaptureFixture, graph_error};

#[test]
fn a_graph_replays_the_captured_work() {
    let fixture = CaptureFixture::new();
    let mut graph = fixture.graph();
    let data = fixture.context.any().allocate(4, &fixture.context.main).unwrap();
    let ptr = data.ptr();
    fixture.context.sim.fill(ptr, Pattern::U32(5), 1, fixture.context.main.id()).unwrap();
    fixture.context.device().synchronize().unwrap();
    let key = graph
        .capture(&fixture.side, CaptureOptions::default(), |capture| {
            assert_eq!(fixture.context.instance.current_stream()?, *fixture.side.stream());
            let (stream, key) = (capture.stream().clone(), capture.keep(data)?);
            capture_kernel(capture, fixture.add, &[key.into(), 1_u32.into(), 3_u32.into()], &stream)?;
            Ok(key)
        })
        .unwrap();
    assert_eq!(fixture.word(ptr), 5, "nothing runs while it is captured");
    for round in 1..=3 {
        fixture.expect(&graph, key, 5 + 3 * round);
    }
    assert!(graph.is_captured() && !graph.is_capturing() && !graph.is_empty().unwrap());
    drop(graph);
    fixture.finish();
}

#[test]
fn each_wrong_begin_has_its_error_and_changes_nothing() {
    let fixture = CaptureFixture::new();
    let (mut graph, plain) = (fixture.graph(), CaptureOptions::default());
    let before = (fixture.context.stats(), fixture.context.sim.object_counts());
    let main = fixture.context.main.clone();
    assert_eq!(graph_error(graph.capture_begin(&main, plain)), GraphError::DefaultStream);
    let far = fixture.context.instance.device(1).unwrap().lease_stream().unwrap();
    assert!(matches!(graph_error(graph.capture_begin(&far, plain)), GraphError::StreamDevice { .. }));
    let other = CaptureFixture::new();
    assert_eq!(graph.capture_begin(&other.side, plain), Err(Error::ForeignInstance { object: "the stream" }));
    let (any, device) = (fixture.context.any(), fixture.context.device());
    let default = MemPool::from_id(&any, &device, MemPoolId::DEFAULT).unwrap();
    assert_eq!(graph_error(graph.capture_begin(&fixture.side, plain.with_pool(&default))), GraphError::DefaultPool);
    let unknown = MemPoolId { graph: 0, user: 99 };
    let outcome = MemPool::from_id(&any, &device, unknown).map(drop);
    assert_eq!(outcome, Err(Error::UnknownPool { pool: unknown, device: FIRST }));
    let second = fixture.context.instance.device(1).unwrap();
    let of_second = MemPool::new(&any, &second, PoolOptions::default()).unwrap();
    assert_eq!(
        graph.capture_begin(&fixture.side, plain.with_pool(&of_second)),
        Err(Error::PoolDevice { pool: of_second.id(), owner: second.id(), device: FIRST })
    );
    let foreign = MemPool::new(&other.context.any(), &other.context.device(), PoolOptions::default()).unwrap();
    assert_eq!(
        graph.capture_begin(&fixture.side, plain.with_pool(&foreign)),
        Err(Error::ForeignAllocator { pool: foreign.id() })
    );
    drop((default, of_second, foreign));
    let (pool, block) = {
        let pool = MemPool::new(&fixture.context.any(), &fixture.context.device(), PoolOptions::default()).unwrap();
        (pool.id(), fixture.context.any().allocate_in(&pool, 512, &main).unwrap())
    };
    assert_eq!(MemPool::from_id(&any, &device, pool).map(drop), Err(Error::PoolReleased { pool }));
    drop(block);
    {
        let pool = MemPool::new(&fixture.context.any(), &fixture.context.device(), PoolOptions::default()).unwrap();
        let _scope = pool.enter().unwrap();
        let outcome = graph.capture_begin(&fixture.side, plain.with_pool(&pool));
        assert_eq!(outcome, Err(Error::AlreadyRouting { pool: pool.id() }));
        assert_eq!(pool.uses().unwrap(), 2, "the owner and the scope");
    }
    fixture.context.sim.capture_begin(fixture.side.id(), CaptureMode::Relaxed).unwrap();
    assert_eq!(
        graph_error(graph.capture_begin(&fixture.side, plain)),
        GraphError::StreamCaptures { stream: fixture.side.id() }
    );
    let template = fixture.context.sim.capture_end(fixture.side.id()).unwrap();
    fixture.context.sim.graph_destroy(template).unwrap();
    fixture.context.trim();
    assert_eq!(
        (fixture.context.stats().reserved_bytes.all.current, fixture.context.sim.object_counts().graphs),
        (0, before.1.graphs)
    );
    fixture.expect_usable(&mut graph);
    assert_eq!(graph_error(graph.capture_begin(&fixture.side, plain)), GraphError::AlreadyCaptured);
    drop((graph, far, any));
    other.finish();
    fixture.finish();
}

#[test]
fn begin_and_end_must_be_paired() {
    let fixture = CaptureFixture::new();
    let mut graph = fixture.graph();
    assert_eq!(graph_error(graph.capture_end(&fixture.side)), GraphError::NotCapturing);
    assert_eq!(graph_error(graph.replay(&fixture.context.main)), GraphError::NotCaptured);
    graph.capture_begin(&fixture.side, CaptureOptions::default()).unwrap();
    assert!(graph.is_capturing() && fixture.context.instance.is_capturing(&fixture.side).unwrap());
    let nested = graph_error(graph.capture_begin(&fixture.side, CaptureOptions::default()));
    assert_eq!(nested, GraphError::AlreadyCapturing { stream: fixture.side.id() });
    assert_eq!(graph_error(graph.replay(&fixture.context.main)), GraphError::StillCapturing);
    let main = fixture.context.main.clone();
    let wrong = GraphError::WrongStream { began: fixture.side.id(), ended: main.id() };
    assert_eq!(graph_error(graph.capture_end(&main)), wrong);
    assert!(graph.is_capturing(), "a wrong end changes nothing");
    let key = graph.scope().unwrap().allocate(4).unwrap();
    graph.scope().unwrap().fill(key, Pattern::U32(9), 1, &fixture.side).unwrap();
    graph.capture_end(&fixture.side).unwrap();
    assert!(!fixture.context.instance.is_capturing(&fixture.side).unwrap());
    fixture.expect(&graph, key, 9);
    drop(graph);
    fixture.finish();
}

#[test]
fn an_invalidated_capture_leaves_everything_usable() {
    let fixture = CaptureFixture::new();
    let mut graph = fixture.graph();
    let outcome = graph.capture(&fixture.side, CaptureOptions::default(), |capture| {
        capture.allocate(3 * MIB)?;
        // Forbidden during a capture.
        let _ = fixture.context.device().synchronize();
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
    assert_eq!(graph_error(graph.replay(&fixture.context.main)), GraphError::NotCaptured);
    fixture.expect_hazards(&[HazardKind::CaptureInvalidated]);
    fixture.expect_usable(&mut graph);
    drop(graph);
    fixture.finish();
}

#[test]
fn an_error_in_the_scope_ends_the_capture_and_is_returned() {
    let fixture = CaptureFixture::new();
    let mut graph = fixture.graph();
    let failed: warpool::Result<()> = graph.capture(&fixture.side, CaptureOptions::default(), |capture| {
        capture.allocate(3 * MIB)?;
        Err(Error::ThreadEnding)
    });
    assert_eq!(failed, Err(Error::ThreadEnding));
    let driver_error =
        graph.capture(&fixture.side, CaptureOptions::default(), |_| fixture.context.device().synchronize());
    let code = driver_error.unwrap_err().driver().map(|error| error.code);
    assert_eq!(code, Some(ErrorCode::StreamCaptureUnsupported), "the error of the call that invalidated it");
    let only_broken = graph.capture(&fixture.side, CaptureOptions::default(), |capture| {
        let _ = fixture.context.device().synchronize();
        capture.allocate(512)
    });
    let error = graph_error(only_broken);
    assert!(error.to_string().contains("device_synchronize"), "the cause, not only that it was invalidated: {error}");
    fixture.expect_hazards(&[HazardKind::CaptureInvalidated]);
    fixture.expect_usable(&mut graph);
    drop(graph);
    fixture.finish();
}

#[test]
fn a_panic_in_the_scope_ends_the_capture_and_is_resumed() {
    let fixture = CaptureFixture::new();
    let mut graph = fixture.graph();
    let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        graph.capture(&fixture.side, CaptureOptions::default(), |capture| -> warpool::Result<()> {
            capture.allocate(512)?;
            panic!("on purpose");
        })
    }));
    assert_eq!(panic.unwrap_err().downcast_ref::<&str>(), Some(&"on purpose"));
    assert!(!graph.is_capturing() && fixture.context.instance.current_stream().unwrap() == fixture.context.main);
    fixture.expect_usable(&mut graph);
    drop(graph);
    fixture.finish();
}

#[test]
fn a_capture_ends_on_its_thread_unless_it_is_relaxed() {
    let fixture = CaptureFixture::new();
    let mut graph = fixture.graph();
    let mut end_elsewhere = |mode: CaptureMode| {
        graph.reset().unwrap();
        graph.capture_begin(&fixture.side, CaptureOptions::default().with_mode(mode)).unwrap();
        let outcome = std::thread::scope(|threads| threads.spawn(|| graph.capture_end(&fixture.side)).join().unwrap());
        if outcome.is_err() {
            // The error changes nothing.
            graph.capture_end(&fixture.side).unwrap();
        }
        outcome
    };
    for mode in [CaptureMode::Global, CaptureMode::ThreadLocal] {
        assert_eq!(graph_error(end_elsewhere(mode)), GraphError::WrongThread);
    }
    end_elsewhere(CaptureMode::Relaxed).unwrap();
    drop(graph);
    fixture.finish();
}
