//! Templates that are kept or not, raw handles, pictures, and graphs without work.

use warpool::driver::{Call, NodeKind};
use warpool::generator::Generator;
use warpool::graph::{CaptureOptions, GraphError, GraphOptions};
use warpool::memory::{Allocate as _, DeviceBlock};

use crate::lab::{Lab, graph_error};

const KEPT: GraphOptions = GraphOptions { keep_graph: true };

#[test]
fn a_template_that_is_not_kept_is_gone() {
    let lab = Lab::new();
    let (mut graph, key) = lab.filled(3);
    assert_eq!(lab.context.sim.object_counts().graphs, 0);
    for refused in [graph.raw().map(drop), graph.topology().map(drop), graph.dot().map(drop), graph.instantiate()] {
        assert_eq!(graph_error(refused), GraphError::NotKept);
    }
    assert!(graph.raw_exec().is_ok());
    lab.expect(&graph, key, 3);
    drop(graph);
    lab.finish();
}

#[test]
fn a_kept_template_is_made_ready_when_first_needed() {
    let lab = Lab::new();
    let mut graph = lab.graph_with(KEPT);
    assert_eq!(graph_error(graph.raw()), GraphError::NotCaptured);
    assert_eq!(graph_error(graph.instantiate()), GraphError::NotCaptured);
    let key = lab.fill_into(&mut graph, CaptureOptions::default(), 4);
    assert!(graph.raw().is_ok());
    assert_eq!(graph_error(graph.raw_exec()), GraphError::NotInstantiated);
    lab.expect(&graph, key, 4);
    let first = graph.raw_exec().unwrap();
    lab.expect(&graph, key, 4);
    assert_eq!(lab.context.sim.call_count(Call::GraphInstantiate), 1, "once, whatever the number of replays");
    graph.instantiate().unwrap();
    assert_ne!(graph.raw_exec().unwrap(), first);
    assert_eq!(lab.context.sim.object_counts().graph_execs, 1, "the old one is gone");
    lab.expect(&graph, key, 4);
    graph.reset().unwrap();
    assert_eq!((lab.context.sim.object_counts().graphs, lab.context.sim.object_counts().graph_execs), (0, 0));
    lab.still_works(&mut graph);
    drop(graph);
    lab.finish();
}

#[test]
fn many_threads_make_it_ready_once() {
    let lab = Lab::new();
    let mut graph = lab.graph_with(KEPT);
    let key = lab.fill_into(&mut graph, CaptureOptions::default(), 4);
    std::thread::scope(|threads| {
        for _ in 0..8 {
            threads.spawn(|| graph.replay(&lab.context.device().pool_stream().unwrap()).unwrap());
        }
    });
    assert_eq!(lab.context.sim.call_count(Call::GraphInstantiate), 1);
    lab.expect(&graph, key, 4);
    drop(graph);
    lab.finish();
}

/// Making a graph ready is among the calls that break another thread's capture, unless care is taken.
#[test]
fn a_graph_made_ready_beside_a_capture_does_not_break_it() {
    let lab = Lab::new();
    let mut ready = lab.graph_with(KEPT);
    let key = lab.fill_into(&mut ready, CaptureOptions::default(), 4);
    let mut graph = lab.graph();
    graph
        .capture(&lab.side, CaptureOptions::default(), |_| {
            std::thread::scope(|threads| threads.spawn(|| ready.replay(&lab.context.main)).join().unwrap())
        })
        .unwrap();
    lab.expect(&ready, key, 4);
    drop((graph, ready));
    lab.finish();
}

#[test]
fn the_picture_of_a_graph_can_be_written() {
    let lab = Lab::new();
    let mut graph = lab.graph_with(KEPT);
    lab.fill_into(&mut graph, CaptureOptions::default(), 4);
    let kinds: Vec<NodeKind> = graph.topology().unwrap().nodes.iter().map(|node| node.kind).collect();
    assert_eq!(kinds, [NodeKind::Fill]);
    let path = std::env::temp_dir().join(format!("warpool-graph-{}.dot", std::process::id()));
    graph.write_dot(&path).unwrap();
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    assert!(text.starts_with("digraph") && text == graph.dot().unwrap(), "{text}");
    let nowhere = path.join("no").join("such.dot");
    match graph_error(graph.write_dot(&nowhere)) {
        GraphError::WriteDot { path, .. } => assert_eq!(path, nowhere.display().to_string()),
        other => panic!("{other}"),
    }
    drop(graph);
    lab.finish();
}

#[test]
fn a_graph_without_work_says_so_and_can_be_replayed() {
    let lab = Lab::new();
    let mut graph = lab.graph();
    assert_eq!(graph_error(graph.is_empty()), GraphError::NotCaptured);
    graph.capture(&lab.side, CaptureOptions::default(), |_| Ok(())).unwrap();
    assert!(graph.is_empty().unwrap());
    graph.replay(&lab.context.main).unwrap();
    drop(graph);
    lab.finish();
}

#[test]
fn generators_need_the_template_and_nobody_else_sees_it() {
    let lab = Lab::new();
    let generator = Generator::new(&lab.context.device()).unwrap();
    let target: DeviceBlock = lab.context.any().allocate(4 * 64, &lab.side).unwrap();
    let eager = generator.duplicate().unwrap();
    let mut graph = lab.graph();
    graph.capture(&lab.side, CaptureOptions::default(), |_| generator.fill_bits(&target, &lab.side)).unwrap();
    assert_eq!(lab.context.sim.object_counts().graphs, 1);
    assert_eq!(graph_error(graph.raw()), GraphError::NotKept);
    let mut words = Vec::new();
    for _ in 0..3 {
        graph.replay(&lab.side).unwrap();
        words.push(lab.word(target.ptr()));
    }
    for word in words {
        eager.fill_bits(&target, &lab.side).unwrap();
        assert_eq!(lab.word(target.ptr()), word, "replays give the numbers that come next");
    }
    assert_eq!(generator.offset(), eager.offset());
    drop((graph, target));
    lab.finish();
}
