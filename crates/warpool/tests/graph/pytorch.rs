//! Counterparts of PyTorch's tests of graphs: each test names them, and states where our behaviour differs on purpose.
//! Those about memory are in `pytorch_memory.rs`, about conditional nodes in `pytorch_bodies.rs`.

use std::sync::{Arc, Mutex};

use crate::common::graphs::{GraphFixture, graph_error};
use crate::common::memory::{FIRST, MIB};
use tracing::field::{Field, Visit};
use tracing::{Event as LogEvent, Level, Metadata, span};
use warpool::EventOptions;
use warpool::blas::{Blas, BlasSettings};
use warpool::driver::sim::HazardKind;
use warpool::driver::{BlasMatrix, Copies as _, ErrorCode, Memory as _, NodeKind, Sgemm};
use warpool::generator::{Generator, philox};
use warpool::graph::{CaptureOptions, GraphError, GraphOptions, capture_mode};
use warpool::memory::DeviceBlock;

const PLAIN: CaptureOptions<'_> =
    CaptureOptions { pool: None, mode: warpool::driver::CaptureMode::Global, poller_timeout: None };
const KEEP: GraphOptions = GraphOptions { keep_graph: true };

/// test_graph_capture_simple: eleven operations are captured, one replay does them all.
#[test]
fn a_replay_runs_all_captured_work() {
    let fixture = GraphFixture::new("");
    let mut graph = fixture.graph();
    let block = fixture.block(4, &fixture.context.main);
    fixture.set(block.ptr(), 1);
    let key = graph
        .capture(&fixture.side, PLAIN, |capture| {
            let key = capture.keep(block)?;
            for _ in 0..10 {
                fixture.capture_add(capture, key, 1)?;
            }
            Ok(key)
        })
        .unwrap();
    let ptr = fixture.at(&graph, key);
    assert_eq!(fixture.word(ptr), 1, "the capture itself does nothing");
    graph.replay(&fixture.context.main).unwrap();
    assert_eq!(fixture.word(ptr), 11);
    drop(graph);
    fixture.finish();
}

/// test_graph_error: the default stream cannot capture, and the graph stays usable.
#[test]
fn the_default_stream_cannot_capture() {
    let fixture = GraphFixture::new("");
    let mut graph = fixture.graph();
    let error = graph_error(graph.capture(&fixture.context.main, PLAIN, |_| Ok(())));
    assert_eq!(error, GraphError::DefaultStream);
    assert!(error.to_string().contains("replays may go to any stream"));
    assert_eq!(graph.pools(), []);
    graph.capture(&fixture.side, PLAIN, |_| Ok(())).unwrap();
    drop(graph);
    fixture.finish();
}

/// Collects warnings.
#[derive(Clone, Default)]
struct Warnings(Arc<Mutex<Vec<String>>>);

impl tracing::Subscriber for Warnings {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() == Level::WARN
    }
    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }
    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn event(&self, event: &LogEvent<'_>) {
        struct Message(String);
        impl Visit for Message {
            fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
                if field.name() == "message" {
                    self.0 = format!("{value:?}");
                }
            }
        }
        let mut message = Message(String::new());
        event.record(&mut message);
        self.0.lock().unwrap().push(message.0);
    }
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}

/// test_graph_warn_if_has_zero_nodes: a capture without work is a warning, one with work is not.
/// Ours also has [`Graph::is_empty`], and replays of it do nothing.
#[test]
fn an_empty_graph_is_a_warning() {
    let fixture = GraphFixture::new("");
    let warnings = Warnings::default();
    tracing::subscriber::with_default(warnings.clone(), || {
        let (mut graph, block) = (fixture.graph(), fixture.block(4, &fixture.context.main));
        // The work goes to a stream outside of the capture.
        graph.capture(&fixture.side, PLAIN, |_| fixture.try_add(block.ptr(), 1, &fixture.context.main)).unwrap();
        assert!(graph.is_empty().unwrap());
        let warned = std::mem::take(&mut *warnings.0.lock().unwrap());
        assert_eq!(warned.len(), 1);
        assert!(warned[0].contains("the capture is empty"), "{warned:?}");
        graph.replay(&fixture.context.main).unwrap();
        graph.reset().unwrap();
        graph.capture(&fixture.side, PLAIN, |_| fixture.try_add(block.ptr(), 1, &fixture.side)).unwrap();
        assert!(!graph.is_empty().unwrap());
        assert_eq!(*warnings.0.lock().unwrap(), Vec::<String>::new());
        fixture.context.device().synchronize().unwrap();
    });
    fixture.finish();
}

/// test_graph_is_current_stream_capturing.
#[test]
fn is_capturing_follows_the_capture() {
    let fixture = GraphFixture::new("");
    let mut graph = fixture.graph();
    let answers = || {
        let current = fixture.context.instance.current_stream().unwrap();
        (current.is_capturing().unwrap(), fixture.context.instance.is_capturing(&current).unwrap())
    };
    assert_eq!(answers(), (false, false));
    graph
        .capture(&fixture.side, PLAIN, |capture| {
            assert_eq!(answers(), (true, true));
            assert!(!fixture.context.instance.is_capturing(&fixture.context.main)?, "others do not");
            let fork = capture.fork()?;
            assert!(fixture.context.instance.is_capturing(&fork)?, "a forked one does");
            capture.join(fork)
        })
        .unwrap();
    assert_eq!(answers(), (false, false));
    drop(graph);
    fixture.finish();
}

/// test_cuda_graph_error_options: a call that a capture may forbid, made by the capturing thread or by another one, in
/// each mode.
#[test]
fn the_mode_decides_whose_calls_invalidate_a_capture() {
    let cases = [
        ("global", false, false),
        ("global", true, false),
        ("thread_local", false, false),
        ("thread_local", true, true),
        ("relaxed", false, true),
        ("relaxed", true, true),
    ];
    for (mode, elsewhere, survives) in cases {
        let fixture = GraphFixture::new("");
        let mut graph = fixture.graph();
        let options = PLAIN.with_mode(capture_mode(mode).unwrap());
        let disturb =
            || fixture.context.sim.mem_alloc(FIRST, MIB).map(|ptr| fixture.context.sim.mem_free(ptr).unwrap());
        let outcome = graph.capture(&fixture.side, options, |capture| {
            let key = capture.allocate(4)?;
            fixture.capture_add(capture, key, 1)?;
            let disturbed =
                if elsewhere { std::thread::scope(|scope| scope.spawn(disturb).join().unwrap()) } else { disturb() };
            assert_eq!(disturbed.is_ok(), survives, "{mode}, elsewhere {elsewhere}");
            Ok(())
        });
        assert_eq!(outcome.is_ok(), survives, "{mode}, elsewhere {elsewhere}");
        if let Err(error) = outcome {
            assert!(error.to_string().contains("mem_alloc"), "{error}");
        }
        drop(graph);
        fixture.expect_hazards(HazardKind::CaptureInvalidated);
        fixture.finish();
    }
    let unknown = capture_mode("invalid").unwrap_err();
    assert!(unknown.to_string().contains("global, thread_local and relaxed"), "{unknown}");
}

/// test_graph_capture_reset_recapture.
#[test]
fn a_reset_graph_captures_again() {
    let fixture = GraphFixture::new("");
    let (mut graph, block) = (fixture.graph(), fixture.block(4, &fixture.context.main));
    fixture.set(block.ptr(), 0);
    for (value, sum) in [(3, 3), (10, 13), (100, 113)] {
        graph.capture(&fixture.side, PLAIN, |_| fixture.try_add(block.ptr(), value, &fixture.side)).unwrap();
        graph.replay(&fixture.side).unwrap();
        assert_eq!(fixture.word(block.ptr()), sum);
        graph.reset().unwrap();
        assert_eq!(graph_error(graph.replay(&fixture.side)), GraphError::NotCaptured);
    }
    drop((graph, block));
    fixture.finish();
}

/// test_graph_rng_after_failed_capture: numbers that a failed capture counted were never drawn.
#[test]
fn a_generator_works_after_a_failed_capture() {
    let fixture = GraphFixture::new("");
    let generator = Generator::new(&fixture.context.device()).unwrap();
    generator.set_seed(42).unwrap();
    let block = fixture.block(4, &fixture.context.main);
    let first = |offset| philox::block(42, 0, offset)[0];
    generator.fill_bits(&block, &fixture.context.main).unwrap();
    assert_eq!(fixture.word(block.ptr()), first(0));
    let mut graph = fixture.graph();
    let failed = graph.capture(&fixture.side, PLAIN, |_| {
        generator.fill_bits(&block, &fixture.side)?;
        fixture.context.device().synchronize()
    });
    assert_eq!(failed.unwrap_err().driver().map(|error| error.code), Some(ErrorCode::StreamCaptureUnsupported));
    fixture.expect_hazards(HazardKind::CaptureInvalidated);
    assert_eq!(generator.offset().unwrap(), 4);
    generator.fill_bits(&block, &fixture.context.main).unwrap();
    assert_eq!(fixture.word(block.ptr()), first(4));
    graph.capture(&fixture.side, PLAIN, |_| generator.fill_bits(&block, &fixture.side)).unwrap();
    for offset in [8, 12] {
        graph.replay(&fixture.context.main).unwrap();
        assert_eq!(fixture.word(block.ptr()), first(offset));
    }
    drop((graph, block));
    fixture.finish();
}

/// test_cuda_graph_raw_graph_keep_graph_false, _raw_graph, _raw_graph_exec, _reset_and_recapture.
#[test]
fn raw_handles_exist_with_their_objects() {
    let fixture = GraphFixture::new("");
    let block = fixture.block(4, &fixture.context.main);
    fixture.set(block.ptr(), 0);
    let mut not_kept = fixture.graph();
    assert_eq!(graph_error(not_kept.raw()), GraphError::NotCaptured);
    not_kept.capture(&fixture.side, PLAIN, |_| fixture.try_add(block.ptr(), 1, &fixture.side)).unwrap();
    assert_eq!(graph_error(not_kept.raw()), GraphError::NotKept);
    assert_eq!(graph_error(not_kept.instantiate()), GraphError::NotKept);
    assert_eq!(graph_error(not_kept.dot()), GraphError::NotKept);
    assert_ne!(not_kept.raw_exec().unwrap().0, 0, "it was instantiated at the end of the capture");

    let mut kept = fixture.graph_with(KEEP);
    assert_eq!(graph_error(kept.instantiate()), GraphError::NotCaptured);
    for round in 0..2 {
        kept.capture(&fixture.side, PLAIN, |_| fixture.try_add(block.ptr(), 1, &fixture.side)).unwrap();
        assert_ne!(kept.raw().unwrap().0, 0);
        assert_eq!(graph_error(kept.raw_exec()), GraphError::NotInstantiated);
        kept.instantiate().unwrap();
        let exec = kept.raw_exec().unwrap();
        // Instantiated again: the old executable is destroyed.
        kept.instantiate().unwrap();
        assert_ne!(kept.raw_exec().unwrap(), exec);
        kept.replay(&fixture.context.main).unwrap();
        assert_eq!(fixture.word(block.ptr()), round + 1);
        kept.reset().unwrap();
        assert_eq!(graph_error(kept.raw()), GraphError::NotCaptured);
        assert_eq!(graph_error(kept.raw_exec()), GraphError::NotCaptured);
    }
    // In PyTorch's C++ a replay before `instantiate` is an error, its Python instantiates on demand; ours does too.
    kept.capture(&fixture.side, PLAIN, |_| fixture.try_add(block.ptr(), 1, &fixture.side)).unwrap();
    kept.replay(&fixture.context.main).unwrap();
    assert_eq!(fixture.word(block.ptr()), 3);
    drop((not_kept, kept, block));
    fixture.finish();
}

/// test_graph_debugdump: any number of times, and the graph is the same afterwards.
#[test]
fn a_kept_graph_can_be_written_as_dot() {
    let fixture = GraphFixture::new("");
    let (mut graph, block) = (fixture.graph_with(KEEP), fixture.block(4, &fixture.context.main));
    fixture.set(block.ptr(), 0);
    let two = |_: &mut warpool::graph::Capture<'_>| {
        fixture.add(block.ptr(), 1, &fixture.side);
        fixture.try_add(block.ptr(), 2, &fixture.side)
    };
    graph.capture(&fixture.side, PLAIN, two).unwrap();
    let kinds: Vec<NodeKind> = graph.topology().unwrap().nodes.iter().map(|node| node.kind).collect();
    assert_eq!((kinds, graph.topology().unwrap().edges.len()), (vec![NodeKind::Kernel; 2], 1));
    let path = std::env::temp_dir().join(format!("warpool-graph-mirror-{}.dot", std::process::id()));
    for _ in 0..2 {
        graph.write_dot(&path).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.contains("digraph") && text == graph.dot().unwrap(), "{text}");
    }
    std::fs::remove_file(&path).unwrap();
    let nowhere = graph_error(graph.write_dot("/nonexistent/graph.dot"));
    assert!(matches!(nowhere, GraphError::WriteDot { .. }), "{nowhere}");
    graph.replay(&fixture.context.main).unwrap();
    assert_eq!(fixture.word(block.ptr()), 3);
    drop((graph, block));
    fixture.finish();
}

/// test_repeat_graph_capture_cublas_workspace_memory: the workspace of a capture is freed with its graph.
#[test]
fn repeated_captures_with_gemms_do_not_grow_memory() {
    let fixture = GraphFixture::new("");
    let blas = Blas::new(&fixture.context.any(), BlasSettings::default());
    let block = fixture.block(64, &fixture.context.main);
    let numbers: Vec<u8> = [2.0_f32, 3.0, 0.0].iter().flat_map(|number| number.to_le_bytes()).collect();
    fixture.context.sim.upload(FIRST, block.ptr(), &numbers).unwrap();
    let matrix = |at: u64| BlasMatrix { ptr: block.ptr().offset(4 * at), stride: 1, transposed: false };
    let product = Sgemm { m: 1, n: 1, k: 1, alpha: 1.0, a: matrix(0), b: matrix(1), beta: 1.0, c: matrix(2) };
    // Before the first capture: the eager workspace and the handle stay.
    blas.handle_on(&fixture.side).unwrap().sgemm(&product).unwrap();
    let mut held = Vec::new();
    for round in 1..=100 {
        let mut graph = fixture.graph();
        graph.capture(&fixture.side, PLAIN, |_| blas.handle(&fixture.context.device())?.sgemm(&product)).unwrap();
        graph.replay(&fixture.side).unwrap();
        assert_eq!(f32::from_bits(fixture.word(matrix(2).ptr)), 6.0 + 6.0 * round as f32);
        graph.reset().unwrap();
        fixture.context.trim();
        held.push((
            fixture.context.bytes_reserved(),
            fixture.context.stats().workspace_bytes.current,
            fixture.context.sim.object_counts(),
        ));
    }
    assert!(held.iter().all(|now| now == &held[0]), "{held:?}");
    drop(block);
    blas.close().unwrap();
    fixture.finish();
}

/// test_graph_external_wait_and_record: a replay waits for the last record of the event, and records one of its own.
#[test]
fn external_events_order_replays_with_other_work() {
    let fixture = GraphFixture::new("");
    let (before, after) =
        (fixture.context.device().lease_stream().unwrap(), fixture.context.device().lease_stream().unwrap());
    let external = EventOptions { external: true, ..EventOptions::default() };
    let mut ready = fixture.context.instance.event_with(external).unwrap();
    let mut done = fixture.context.instance.event_with(external).unwrap();
    ready.create(&fixture.context.device()).unwrap();
    let blocks: [DeviceBlock; 3] = [0; 3].map(|_| fixture.block(4, &fixture.context.main));
    let [input, middle, output] = [0, 1, 2].map(|at: usize| blocks[at].ptr());
    for ptr in [input, middle, output] {
        fixture.set(ptr, 0);
    }
    let mut graph = fixture.graph_with(KEEP);
    graph
        .capture(&fixture.side, PLAIN, |_| {
            fixture.side.wait_event(&ready)?;
            fixture.sum(middle, input, 1, &fixture.side);
            done.record(&fixture.side)
        })
        .unwrap();
    let kinds: Vec<NodeKind> = graph.topology().unwrap().nodes.iter().map(|node| node.kind).collect();
    assert_eq!(kinds, [NodeKind::EventWait, NodeKind::Kernel, NodeKind::EventRecord]);
    for round in 1..=3 {
        fixture.add(input, 10, &before);
        ready.record(&before).unwrap();
        graph.replay(&fixture.side).unwrap();
        done.wait(&after).unwrap();
        fixture.sum(output, middle, 100, &after);
        // The next round waits for this one, so the events order only the graph's own work.
        before.wait_stream(&after).unwrap();
        assert_eq!(fixture.word(output), 10 * round + 101);
    }
    drop((graph, ready, done, blocks, before, after));
    fixture.finish();
}
