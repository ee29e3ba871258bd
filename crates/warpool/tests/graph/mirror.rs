//! PyTorch's tests of graphs, in our terms: each test names those that it stands for. Where our behaviour differs on
//! purpose, it says so. What they say about memory is in `graph_mirror_memory.rs`, about conditional nodes in
//! `graph_mirror_bodies.rs`.

use std::sync::{Arc, Mutex};

use crate::common::graphs::{GraphLab, graph_error};
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

const PLAIN: CaptureOptions =
    CaptureOptions { pool: None, mode: warpool::driver::CaptureMode::Global, poller_timeout: None };
const KEEP: GraphOptions = GraphOptions { keep_graph: true };

/// test_graph_capture_simple: eleven operations are captured, one replay does them all.
#[test]
fn a_replay_does_all_that_was_captured() {
    let lab = GraphLab::new("");
    let mut graph = lab.graph();
    let block = lab.block(4, &lab.context.main);
    lab.set(block.ptr(), 1);
    let key = graph
        .capture(&lab.side, PLAIN, |capture| {
            let key = capture.keep(block)?;
            for _ in 0..10 {
                lab.capture_add(capture, key, 1)?;
            }
            Ok(key)
        })
        .unwrap();
    let ptr = lab.at(&graph, key);
    assert_eq!(lab.word(ptr), 1, "the capture itself does nothing");
    graph.replay(&lab.context.main).unwrap();
    assert_eq!(lab.word(ptr), 11);
    drop(graph);
    lab.finish();
}

/// test_graph_error: the default stream cannot capture, and the graph is none the worse for it.
#[test]
fn the_default_stream_is_refused() {
    let lab = GraphLab::new("");
    let mut graph = lab.graph();
    let refused = graph_error(graph.capture(&lab.context.main, PLAIN, |_| Ok(())));
    assert_eq!(refused, GraphError::DefaultStream);
    assert!(refused.to_string().contains("replays may go to any stream"));
    assert_eq!(graph.pools(), []);
    graph.capture(&lab.side, PLAIN, |_| Ok(())).unwrap();
    drop(graph);
    lab.finish();
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
/// Ours also says so when asked ([`Graph::is_empty`]), and replays of it do nothing.
#[test]
fn an_empty_graph_is_a_warning() {
    let lab = GraphLab::new("");
    let warnings = Warnings::default();
    tracing::subscriber::with_default(warnings.clone(), || {
        let (mut graph, block) = (lab.graph(), lab.block(4, &lab.context.main));
        // The work goes to a stream that takes no part.
        graph.capture(&lab.side, PLAIN, |_| lab.try_add(block.ptr(), 1, &lab.context.main)).unwrap();
        assert!(graph.is_empty().unwrap());
        let told = std::mem::take(&mut *warnings.0.lock().unwrap());
        assert_eq!(told.len(), 1);
        assert!(told[0].contains("the capture is empty"), "{told:?}");
        graph.replay(&lab.context.main).unwrap();
        graph.reset().unwrap();
        graph.capture(&lab.side, PLAIN, |_| lab.try_add(block.ptr(), 1, &lab.side)).unwrap();
        assert!(!graph.is_empty().unwrap());
        assert_eq!(*warnings.0.lock().unwrap(), Vec::<String>::new());
        lab.context.device().synchronize().unwrap();
    });
    lab.finish();
}

/// test_graph_is_current_stream_capturing.
#[test]
fn a_stream_tells_whether_it_captures() {
    let lab = GraphLab::new("");
    let mut graph = lab.graph();
    let answers = || {
        let current = lab.context.instance.current_stream().unwrap();
        (current.is_capturing().unwrap(), lab.context.instance.is_capturing(&current).unwrap())
    };
    assert_eq!(answers(), (false, false));
    graph
        .capture(&lab.side, PLAIN, |capture| {
            assert_eq!(answers(), (true, true));
            assert!(!lab.context.instance.is_capturing(&lab.context.main)?, "others do not");
            let fork = capture.fork()?;
            assert!(lab.context.instance.is_capturing(&fork)?, "a forked one does");
            capture.join(fork)
        })
        .unwrap();
    assert_eq!(answers(), (false, false));
    drop(graph);
    lab.finish();
}

/// test_cuda_graph_error_options: a call that could disturb a capture, made by the capturing thread or by another one,
/// in each mode.
#[test]
fn modes_decide_whose_calls_break_a_capture() {
    let cases = [
        ("global", false, false),
        ("global", true, false),
        ("thread_local", false, false),
        ("thread_local", true, true),
        ("relaxed", false, true),
        ("relaxed", true, true),
    ];
    for (mode, elsewhere, survives) in cases {
        let lab = GraphLab::new("");
        let mut graph = lab.graph();
        let options = PLAIN.with_mode(capture_mode(mode).unwrap());
        let disturb = || lab.context.sim.mem_alloc(FIRST, MIB).map(|ptr| lab.context.sim.mem_free(ptr).unwrap());
        let outcome = graph.capture(&lab.side, options, |capture| {
            let key = capture.allocate(4)?;
            lab.capture_add(capture, key, 1)?;
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
        lab.forgive(HazardKind::CaptureInvalidated);
        lab.finish();
    }
    let unknown = capture_mode("invalid").unwrap_err();
    assert!(unknown.to_string().contains("global, thread_local and relaxed"), "{unknown}");
}

/// test_graph_capture_reset_recapture.
#[test]
fn a_reset_graph_captures_again() {
    let lab = GraphLab::new("");
    let (mut graph, block) = (lab.graph(), lab.block(4, &lab.context.main));
    lab.set(block.ptr(), 0);
    for (value, sum) in [(3, 3), (10, 13), (100, 113)] {
        graph.capture(&lab.side, PLAIN, |_| lab.try_add(block.ptr(), value, &lab.side)).unwrap();
        graph.replay(&lab.side).unwrap();
        assert_eq!(lab.word(block.ptr()), sum);
        graph.reset().unwrap();
        assert_eq!(graph_error(graph.replay(&lab.side)), GraphError::NotCaptured);
    }
    drop((graph, block));
    lab.finish();
}

/// test_graph_rng_after_failed_capture: numbers that a failed capture counted were never drawn.
#[test]
fn a_generator_works_on_after_a_failed_capture() {
    let lab = GraphLab::new("");
    let generator = Generator::new(&lab.context.device()).unwrap();
    generator.set_seed(42).unwrap();
    let block = lab.block(4, &lab.context.main);
    let first = |offset| philox::block(42, 0, offset)[0];
    generator.fill_bits(&block, &lab.context.main).unwrap();
    assert_eq!(lab.word(block.ptr()), first(0));
    let mut graph = lab.graph();
    let failed = graph.capture(&lab.side, PLAIN, |_| {
        generator.fill_bits(&block, &lab.side)?;
        lab.context.device().synchronize()
    });
    assert_eq!(failed.unwrap_err().driver().map(|error| error.code), Some(ErrorCode::StreamCaptureUnsupported));
    lab.forgive(HazardKind::CaptureInvalidated);
    assert_eq!(generator.offset().unwrap(), 4);
    generator.fill_bits(&block, &lab.context.main).unwrap();
    assert_eq!(lab.word(block.ptr()), first(4));
    graph.capture(&lab.side, PLAIN, |_| generator.fill_bits(&block, &lab.side)).unwrap();
    for offset in [8, 12] {
        graph.replay(&lab.context.main).unwrap();
        assert_eq!(lab.word(block.ptr()), first(offset));
    }
    drop((graph, block));
    lab.finish();
}

/// test_cuda_graph_raw_graph_keep_graph_false, _raw_graph, _raw_graph_exec, _reset_and_recapture.
#[test]
fn raw_handles_are_there_when_what_they_name_is() {
    let lab = GraphLab::new("");
    let block = lab.block(4, &lab.context.main);
    lab.set(block.ptr(), 0);
    let mut gone = lab.graph();
    assert_eq!(graph_error(gone.raw()), GraphError::NotCaptured);
    gone.capture(&lab.side, PLAIN, |_| lab.try_add(block.ptr(), 1, &lab.side)).unwrap();
    assert_eq!(graph_error(gone.raw()), GraphError::NotKept);
    assert_eq!(graph_error(gone.instantiate()), GraphError::NotKept);
    assert_eq!(graph_error(gone.dot()), GraphError::NotKept);
    assert_ne!(gone.raw_exec().unwrap().0, 0, "it was made ready at the end of the capture");

    let mut kept = lab.graph_with(KEEP);
    assert_eq!(graph_error(kept.instantiate()), GraphError::NotCaptured);
    for round in 0..2 {
        kept.capture(&lab.side, PLAIN, |_| lab.try_add(block.ptr(), 1, &lab.side)).unwrap();
        assert_ne!(kept.raw().unwrap().0, 0);
        assert_eq!(graph_error(kept.raw_exec()), GraphError::NotInstantiated);
        kept.instantiate().unwrap();
        let exec = kept.raw_exec().unwrap();
        // Again, and what was there before is gone.
        kept.instantiate().unwrap();
        assert_ne!(kept.raw_exec().unwrap(), exec);
        kept.replay(&lab.context.main).unwrap();
        assert_eq!(lab.word(block.ptr()), round + 1);
        kept.reset().unwrap();
        assert_eq!(graph_error(kept.raw()), GraphError::NotCaptured);
        assert_eq!(graph_error(kept.raw_exec()), GraphError::NotCaptured);
    }
    // PyTorch's C++ refuses a replay before `instantiate`, its Python does it on demand; ours is as the latter.
    kept.capture(&lab.side, PLAIN, |_| lab.try_add(block.ptr(), 1, &lab.side)).unwrap();
    kept.replay(&lab.context.main).unwrap();
    assert_eq!(lab.word(block.ptr()), 3);
    drop((gone, kept, block));
    lab.finish();
}

/// test_graph_debugdump: any number of times, and the graph is the same afterwards.
#[test]
fn a_kept_graph_can_be_drawn() {
    let lab = GraphLab::new("");
    let (mut graph, block) = (lab.graph_with(KEEP), lab.block(4, &lab.context.main));
    lab.set(block.ptr(), 0);
    let two = |_: &mut warpool::graph::Capture<'_>| {
        lab.add(block.ptr(), 1, &lab.side);
        lab.try_add(block.ptr(), 2, &lab.side)
    };
    graph.capture(&lab.side, PLAIN, two).unwrap();
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
    graph.replay(&lab.context.main).unwrap();
    assert_eq!(lab.word(block.ptr()), 3);
    drop((graph, block));
    lab.finish();
}

/// test_repeat_graph_capture_cublas_workspace_memory: a workspace that a capture made goes with its graph.
#[test]
fn a_hundred_captures_with_products_do_not_grow_memory() {
    let lab = GraphLab::new("");
    let blas = Blas::new(&lab.context.any(), BlasSettings::default());
    let block = lab.block(64, &lab.context.main);
    let numbers: Vec<u8> = [2.0_f32, 3.0, 0.0].iter().flat_map(|number| number.to_le_bytes()).collect();
    lab.context.sim.upload(FIRST, block.ptr(), &numbers).unwrap();
    let matrix = |at: u64| BlasMatrix { ptr: block.ptr().offset(4 * at), stride: 1, transposed: false };
    let product = Sgemm { m: 1, n: 1, k: 1, alpha: 1.0, a: matrix(0), b: matrix(1), beta: 1.0, c: matrix(2) };
    // Before the first: an eager workspace and the handle are there to stay.
    blas.handle_on(&lab.side).unwrap().sgemm(&product).unwrap();
    let mut held = Vec::new();
    for round in 1..=100 {
        let mut graph = lab.graph();
        graph.capture(&lab.side, PLAIN, |_| blas.handle(&lab.context.device())?.sgemm(&product)).unwrap();
        graph.replay(&lab.side).unwrap();
        assert_eq!(f32::from_bits(lab.word(matrix(2).ptr)), 6.0 + 6.0 * round as f32);
        graph.reset().unwrap();
        lab.context.trim();
        held.push((
            lab.context.bytes_reserved(),
            lab.context.stats().workspace_bytes.current,
            lab.context.sim.object_counts(),
        ));
    }
    assert!(held.iter().all(|now| now == &held[0]), "{held:?}");
    drop(block);
    blas.close().unwrap();
    lab.finish();
}

/// test_graph_external_wait_and_record: a replay waits for what the event marks by then, and marks its own work for
/// others.
#[test]
fn external_events_speak_to_the_world_outside() {
    let lab = GraphLab::new("");
    let (before, after) = (lab.context.device().lease_stream().unwrap(), lab.context.device().lease_stream().unwrap());
    let external = EventOptions { external: true, ..EventOptions::default() };
    let mut ready = lab.context.instance.event_with(external).unwrap();
    let mut done = lab.context.instance.event_with(external).unwrap();
    ready.create(&lab.context.device()).unwrap();
    let blocks: [DeviceBlock; 3] = [0; 3].map(|_| lab.block(4, &lab.context.main));
    let [input, middle, output] = [0, 1, 2].map(|at: usize| blocks[at].ptr());
    for ptr in [input, middle, output] {
        lab.set(ptr, 0);
    }
    let mut graph = lab.graph_with(KEEP);
    graph
        .capture(&lab.side, PLAIN, |_| {
            lab.side.wait_event(&ready)?;
            lab.sum(middle, input, 1, &lab.side);
            done.record(&lab.side)
        })
        .unwrap();
    let kinds: Vec<NodeKind> = graph.topology().unwrap().nodes.iter().map(|node| node.kind).collect();
    assert_eq!(kinds, [NodeKind::EventWait, NodeKind::Kernel, NodeKind::EventRecord]);
    for round in 1..=3 {
        lab.add(input, 10, &before);
        ready.record(&before).unwrap();
        graph.replay(&lab.side).unwrap();
        done.wait(&after).unwrap();
        lab.sum(output, middle, 100, &after);
        // The next round comes behind this one: only the graph's own order is left to the events.
        before.wait_stream(&after).unwrap();
        assert_eq!(lab.word(output), 10 * round + 101);
    }
    drop((graph, ready, done, blocks, before, after));
    lab.finish();
}
