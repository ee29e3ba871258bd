//! Counterparts of PyTorch's tests of conditional nodes: each test names them, and states where our behaviour differs
//! on purpose. Flags are in device memory, and are read when a replay reaches the node.

use crate::common::graphs::{GraphFixture, graph_error};
use warpool::driver::{NodeKind, Pattern};
use warpool::generator::{Generator, GeneratorError};
use warpool::graph::{BufferKey, Capture, CaptureOptions, Flag, Graph, GraphError, GraphOptions};
use warpool::{Error, Result};

const PLAIN: CaptureOptions<'_> =
    CaptureOptions { pool: None, mode: warpool::driver::CaptureMode::Global, poller_timeout: None };

/// Words that a graph keeps.
fn words<const N: usize>(capture: &mut Capture<'_>) -> Result<[BufferKey; N]> {
    let keys: Vec<BufferKey> = (0..N).map(|_| capture.allocate(4)).collect::<Result<_>>()?;
    Ok(keys.try_into().expect("as many as were made"))
}

fn set(fixture: &GraphFixture, graph: &Graph, keys: &[BufferKey], values: &[u32]) {
    for (&key, &value) in keys.iter().zip(values) {
        fixture.set(fixture.at(graph, key), value);
    }
}

fn got(fixture: &GraphFixture, graph: &Graph, keys: &[BufferKey]) -> Vec<u32> {
    keys.iter().map(|&key| fixture.word(fixture.at(graph, key))).collect()
}

/// test_cuda_graph_many_if_nodes_across_graphs: bodies lease streams, and return them.
#[test]
fn forty_graphs_with_an_if_share_streams() {
    let fixture = GraphFixture::new("");
    let mut graphs = Vec::new();
    let mut streams = Vec::new();
    for _ in 0..40 {
        let mut graph = fixture.graph();
        let keys = graph
            .capture(&fixture.side, PLAIN, |capture| {
                let [flag, count] = words(capture)?;
                capture.if_node(Flag::word(flag), |body| fixture.capture_add(body, count, 1))?;
                Ok([flag, count])
            })
            .unwrap();
        streams.push(fixture.context.sim.object_counts().streams);
        graphs.push((graph, keys));
    }
    assert_eq!(streams.first(), streams.last(), "bodies share one stream: {streams:?}");
    for (at, (graph, keys)) in graphs.iter().enumerate() {
        set(&fixture, graph, keys, &[u32::from(at % 3 == 0), 0]);
        graph.replay(&fixture.context.main).unwrap();
    }
    for (at, (graph, keys)) in graphs.iter().enumerate() {
        assert_eq!(got(&fixture, graph, &keys[1..]), [u32::from(at % 3 == 0)], "graph {at}");
    }
    drop(graphs);
    fixture.finish();
}

/// test_cuda_graph_many_if_nodes_in_one_graph, test_cond_traced_not_nested_cudagraphs.
#[test]
fn forty_ifs_in_one_graph_each_follow_their_flag() {
    let fixture = GraphFixture::new("");
    let mut graph = fixture.graph_with(GraphOptions { keep_graph: true });
    let before = fixture.context.sim.object_counts().streams;
    let keys: Vec<[BufferKey; 2]> = graph
        .capture(&fixture.side, PLAIN, |capture| {
            let mut keys = Vec::new();
            for at in 0..40 {
                let [flag, count] = words(capture)?;
                capture.if_node(Flag::word(flag), |body| fixture.capture_add(body, count, at + 1))?;
                keys.push([flag, count]);
            }
            Ok(keys)
        })
        .unwrap();
    assert!(fixture.context.sim.object_counts().streams <= before + 1);
    let kinds = graph.topology().unwrap().nodes;
    assert_eq!(kinds.iter().filter(|node| node.kind == NodeKind::Conditional).count(), 40);
    let mut sums = [0; 40];
    for round in 0..3_usize {
        for (at, pair) in keys.iter().enumerate() {
            let runs = (at * 7 + round).is_multiple_of(3);
            sums[at] += if runs { at as u32 + 1 } else { 0 };
            fixture.set(fixture.at(&graph, pair[0]), u32::from(runs));
            if round == 0 {
                fixture.set(fixture.at(&graph, pair[1]), 0);
            }
        }
        graph.replay(&fixture.context.main).unwrap();
        for (at, pair) in keys.iter().enumerate() {
            assert_eq!(fixture.word(fixture.at(&graph, pair[1])), sums[at], "if {at} in round {round}");
        }
    }
    drop(graph);
    fixture.finish();
}

/// test_cond_traced_triply_nested_cudagraphs: all eight paths through three ifs. The number of streams is the nesting
/// depth.
#[test]
fn three_nested_ifs_run_inside_each_other() {
    let fixture = GraphFixture::new("");
    let mut graph = fixture.graph();
    let before = fixture.context.sim.object_counts().streams;
    let keys: [BufferKey; 6] = graph
        .capture(&fixture.side, PLAIN, |capture| {
            let keys: [BufferKey; 6] = words(capture)?;
            let [a, b, c, one, two, three] = keys;
            capture.if_node(Flag::word(a), |outer| {
                assert!(outer.in_body() && outer.stream() != &*fixture.side);
                assert_eq!(fixture.context.instance.current_stream()?, *outer.stream());
                fixture.capture_add(outer, one, 1)?;
                outer.if_node(Flag::word(b), |middle| {
                    fixture.capture_add(middle, two, 1)?;
                    middle.if_node(Flag::word(c), |inner| fixture.capture_add(inner, three, 1))
                })?;
                // After the inner bodies, in the outer one.
                fixture.capture_add(outer, one, 10)
            })?;
            Ok(keys)
        })
        .unwrap();
    assert!(fixture.context.sim.object_counts().streams <= before + 3);
    for ways in 0..8_u32 {
        let [a, b, c] = [ways & 1, ways >> 1 & 1, ways >> 2];
        set(&fixture, &graph, &keys, &[a, b, c, 0, 0, 0]);
        graph.replay(&fixture.context.main).unwrap();
        assert_eq!(got(&fixture, &graph, &keys[3..]), [11 * a, a * b, a * b * c], "{ways:03b}");
    }
    drop(graph);
    fixture.finish();
}

/// test_while_loop_cuda_graph_replay_uses_runtime_condition: how often the body runs is decided at the replay, by the
/// device.
#[test]
fn a_while_reads_the_flag_at_the_replay() {
    let fixture = GraphFixture::new("");
    let mut graph = fixture.graph();
    let keys: [BufferKey; 2] = graph
        .capture(&fixture.side, PLAIN, |capture| {
            let [left, count] = words(capture)?;
            capture.while_node(Flag::word(left), |body| {
                fixture.capture_add(body, count, 3)?;
                fixture.capture_add(body, left, u32::MAX)
            })?;
            Ok([left, count])
        })
        .unwrap();
    for rounds in [4, 0, 1, 17] {
        set(&fixture, &graph, &keys, &[rounds, 0]);
        graph.replay(&fixture.context.main).unwrap();
        assert_eq!(got(&fixture, &graph, &keys), [0, 3 * rounds]);
    }
    // Set by the device before the replay, on its stream.
    set(&fixture, &graph, &keys, &[0, 0]);
    fixture.add(fixture.at(&graph, keys[0]), 5, &fixture.side);
    graph.replay(&fixture.side).unwrap();
    assert_eq!(got(&fixture, &graph, &keys), [0, 15]);
    drop(graph);
    fixture.finish();
}

/// test_cond_inside_while_loop_cudagraphs: of 7 rounds, 4 are odd. Memory of a body comes from the graph's
/// pool.
#[test]
fn an_if_inside_a_while_is_evaluated_in_every_round() {
    let fixture = GraphFixture::new("");
    let mut graph = fixture.graph();
    let (keys, of_body) = graph
        .capture(&fixture.side, PLAIN, |capture| {
            let keys: [BufferKey; 4] = words(capture)?;
            let [left, odd, rounds, odds] = keys;
            let of_body = capture.while_node(Flag::word(left), |body| {
                let stream = body.stream().clone();
                let own = body.allocate(4)?;
                body.fill(own, Pattern::U32(1), 1, &stream)?;
                fixture.capture_odd(body, odd, left)?;
                body.if_node(Flag::word(odd), |inner| fixture.capture_add(inner, odds, 1))?;
                fixture.capture_add(body, rounds, 1)?;
                fixture.capture_add(body, left, u32::MAX)?;
                Ok(own)
            })?;
            Ok((keys, of_body))
        })
        .unwrap();
    let place = fixture.at(&graph, of_body).0;
    let segments = fixture.context.segments_of(graph.pool().unwrap().id());
    assert!(segments.iter().any(|it| (it.address..it.address + it.total_size).contains(&place)));
    for (left, expected) in [(7, [0, 1, 7, 4]), (1, [0, 1, 1, 1]), (2, [0, 1, 2, 1])] {
        set(&fixture, &graph, &keys, &[left, 0, 0, 0]);
        graph.replay(&fixture.context.main).unwrap();
        assert_eq!(got(&fixture, &graph, &keys), expected, "{left}");
    }
    drop(graph);
    fixture.finish();
}

/// Random numbers in a body are an error, in PyTorch when the body ends, here when they are drawn; the whole capture
/// fails.
#[test]
fn random_numbers_in_a_body_are_an_error() {
    let fixture = GraphFixture::new("");
    let mut graph = fixture.graph();
    let generator = Generator::new(&fixture.context.device()).unwrap();
    let block = fixture.block(4, &fixture.context.main);
    let mut seen = None;
    let outcome = graph.capture(&fixture.side, PLAIN, |capture| {
        let [flag] = words(capture)?;
        // The capture fails even if the error is ignored here: the body would be incomplete.
        let _ = capture.if_node(Flag::byte(flag), |body| {
            let drawn = generator.fill_bits(&block, body.stream());
            seen = drawn.clone().err();
            drawn
        });
        Ok(())
    });
    assert_eq!(seen, Some(Error::from(GeneratorError::InBody)));
    let error = Box::new(Error::from(GeneratorError::InBody));
    assert_eq!(graph_error(outcome), GraphError::BodyFailed { error });
    assert_eq!(generator.offset().unwrap(), 0);
    // Everything is as before.
    let key = graph
        .capture(&fixture.side, PLAIN, |capture| {
            let [flag] = words(capture)?;
            capture.if_node(Flag::word(flag), |body| fixture.capture_add(body, flag, 1))?;
            generator.fill_bits(&block, &fixture.side)?;
            Ok(flag)
        })
        .unwrap();
    set(&fixture, &graph, &[key], &[1]);
    graph.replay(&fixture.side).unwrap();
    assert_eq!((got(&fixture, &graph, &[key]), generator.offset().unwrap()), (vec![2], 4));
    drop((graph, block));
    fixture.finish();
}
