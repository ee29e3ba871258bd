//! Templates that are kept or not, raw handles, DOT files, and empty graphs.

use warpool::driver::{Call, NodeKind};
use warpool::generator::Generator;
use warpool::graph::{CaptureOptions, GraphError, GraphOptions};
use warpool::memory::{Allocate as _, DeviceBlock};

use crate::fixture::{CaptureFixture, graph_error};

const KEPT: GraphOptions = GraphOptions { keep_graph: true };

#[test]
fn a_template_that_is_not_kept_is_destroyed() {
    let fixture = CaptureFixture::new();
    let (mut graph, key) = fixture.filled(3);
    assert_eq!(fixture.context.sim.object_counts().graphs, 0);
    for outcome in [graph.raw().map(drop), graph.topology().map(drop), graph.dot().map(drop), graph.instantiate()] {
        assert_eq!(graph_error(outcome), GraphError::NotKept);
    }
    assert!(graph.raw_exec().is_ok());
    fixture.expect(&graph, key, 3);
    drop(graph);
    fixture.finish();
}

#[test]
fn a_kept_template_is_instantiated_at_first_use() {
    let fixture = CaptureFixture::new();
    let mut graph = fixture.graph_with(KEPT);
    assert_eq!(graph_error(graph.raw()), GraphError::NotCaptured);
    assert_eq!(graph_error(graph.instantiate()), GraphError::NotCaptured);
    let key = fixture.fill_into(&mut graph, CaptureOptions::default(), 4);
    assert!(graph.raw().is_ok());
    assert_eq!(graph_error(graph.raw_exec()), GraphError::NotInstantiated);
    fixture.expect(&graph, key, 4);
    let first = graph.raw_exec().unwrap();
    fixture.expect(&graph, key, 4);
    assert_eq!(fixture.context.sim.call_count(Call::GraphInstantiate), 1, "once, whatever the number of replays");
    graph.instantiate().unwrap();
    assert_ne!(graph.raw_exec().unwrap(), first);
    assert_eq!(fixture.context.sim.object_counts().graph_execs, 1, "the old one is destroyed");
    fixture.expect(&graph, key, 4);
    graph.reset().unwrap();
    assert_eq!((fixture.context.sim.object_counts().graphs, fixture.context.sim.object_counts().graph_execs), (0, 0));
    fixture.expect_usable(&mut graph);
    drop(graph);
    fixture.finish();
}

#[test]
fn many_threads_instantiate_it_once() {
    let fixture = CaptureFixture::new();
    let mut graph = fixture.graph_with(KEPT);
    let key = fixture.fill_into(&mut graph, CaptureOptions::default(), 4);
    std::thread::scope(|threads| {
        for _ in 0..8 {
            threads.spawn(|| graph.replay(&fixture.context.device().pool_stream().unwrap()).unwrap());
        }
    });
    assert_eq!(fixture.context.sim.call_count(Call::GraphInstantiate), 1);
    fixture.expect(&graph, key, 4);
    drop(graph);
    fixture.finish();
}

/// Instantiating a graph would invalidate another thread's capture without relaxed mode.
#[test]
fn instantiating_does_not_invalidate_another_capture() {
    let fixture = CaptureFixture::new();
    let mut ready = fixture.graph_with(KEPT);
    let key = fixture.fill_into(&mut ready, CaptureOptions::default(), 4);
    let mut graph = fixture.graph();
    graph
        .capture(&fixture.side, CaptureOptions::default(), |_| {
            std::thread::scope(|threads| threads.spawn(|| ready.replay(&fixture.context.main)).join().unwrap())
        })
        .unwrap();
    fixture.expect(&ready, key, 4);
    drop((graph, ready));
    fixture.finish();
}

#[test]
fn a_graph_can_be_written_as_dot() {
    let fixture = CaptureFixture::new();
    let mut graph = fixture.graph_with(KEPT);
    fixture.fill_into(&mut graph, CaptureOptions::default(), 4);
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
    fixture.finish();
}

#[test]
fn an_empty_graph_can_be_replayed() {
    let fixture = CaptureFixture::new();
    let mut graph = fixture.graph();
    assert_eq!(graph_error(graph.is_empty()), GraphError::NotCaptured);
    graph.capture(&fixture.side, CaptureOptions::default(), |_| Ok(())).unwrap();
    assert!(graph.is_empty().unwrap());
    graph.replay(&fixture.context.main).unwrap();
    drop(graph);
    fixture.finish();
}

#[test]
fn a_template_kept_for_generators_is_not_accessible() {
    let fixture = CaptureFixture::new();
    let generator = Generator::new(&fixture.context.device()).unwrap();
    let target: DeviceBlock = fixture.context.any().allocate(4 * 64, &fixture.side).unwrap();
    let eager = generator.duplicate().unwrap();
    let mut graph = fixture.graph();
    graph.capture(&fixture.side, CaptureOptions::default(), |_| generator.fill_bits(&target, &fixture.side)).unwrap();
    assert_eq!(fixture.context.sim.object_counts().graphs, 1);
    assert_eq!(graph_error(graph.raw()), GraphError::NotKept);
    let mut words = Vec::new();
    for _ in 0..3 {
        graph.replay(&fixture.side).unwrap();
        words.push(fixture.word(target.ptr()));
    }
    for word in words {
        eager.fill_bits(&target, &fixture.side).unwrap();
        assert_eq!(fixture.word(target.ptr()), word, "replays give the numbers that come next");
    }
    assert_eq!(generator.offset(), eager.offset());
    drop((graph, target));
    fixture.finish();
}
