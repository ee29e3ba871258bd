//! PyTorch's tests of conditional nodes in graphs, in our terms: each test names those that it stands for. Where our
//! behaviour differs on purpose, it says so. Flags are memory of the device: what counts is what they are when a replay
//! gets there.

use crate::common::graphs::{GraphLab, graph_error};
use warpool::driver::{NodeKind, Pattern};
use warpool::generator::{Generator, GeneratorError};
use warpool::graph::{BufferKey, Capture, CaptureOptions, Flag, Graph, GraphError, GraphOptions};
use warpool::{Error, Result};

const PLAIN: CaptureOptions =
    CaptureOptions { pool: None, mode: warpool::driver::CaptureMode::Global, poller_timeout: None };

/// Words that a graph keeps.
fn words<const N: usize>(capture: &mut Capture<'_>) -> Result<[BufferKey; N]> {
    let keys: Vec<BufferKey> = (0..N).map(|_| capture.allocate(4)).collect::<Result<_>>()?;
    Ok(keys.try_into().expect("as many as were made"))
}

fn set(lab: &GraphLab, graph: &Graph, keys: &[BufferKey], values: &[u32]) {
    for (&key, &value) in keys.iter().zip(values) {
        lab.set(lab.at(graph, key), value);
    }
}

fn got(lab: &GraphLab, graph: &Graph, keys: &[BufferKey]) -> Vec<u32> {
    keys.iter().map(|&key| lab.word(lab.at(graph, key))).collect()
}

/// test_cuda_graph_many_if_nodes_across_graphs: bodies need streams, and give them back.
#[test]
fn forty_graphs_with_an_if_do_not_use_up_the_streams() {
    let lab = GraphLab::new("");
    let mut graphs = Vec::new();
    let mut streams = Vec::new();
    for _ in 0..40 {
        let mut graph = lab.graph();
        let keys = graph
            .capture(&lab.side, PLAIN, |capture| {
                let [flag, count] = words(capture)?;
                capture.if_node(Flag::word(flag), |body| lab.capture_add(body, count, 1))?;
                Ok([flag, count])
            })
            .unwrap();
        streams.push(lab.context.sim.object_counts().streams);
        graphs.push((graph, keys));
    }
    assert_eq!(streams.first(), streams.last(), "bodies take turns on one stream: {streams:?}");
    for (at, (graph, keys)) in graphs.iter().enumerate() {
        set(&lab, graph, keys, &[u32::from(at % 3 == 0), 0]);
        graph.replay(&lab.context.main).unwrap();
    }
    for (at, (graph, keys)) in graphs.iter().enumerate() {
        assert_eq!(got(&lab, graph, &keys[1..]), [u32::from(at % 3 == 0)], "graph {at}");
    }
    drop(graphs);
    lab.finish();
}

/// test_cuda_graph_many_if_nodes_in_one_graph, test_cond_traced_not_nested_cudagraphs.
#[test]
fn forty_ifs_in_one_graph_each_follow_their_flag() {
    let lab = GraphLab::new("");
    let mut graph = lab.graph_with(GraphOptions { keep_graph: true });
    let before = lab.context.sim.object_counts().streams;
    let keys: Vec<[BufferKey; 2]> = graph
        .capture(&lab.side, PLAIN, |capture| {
            let mut keys = Vec::new();
            for at in 0..40 {
                let [flag, count] = words(capture)?;
                capture.if_node(Flag::word(flag), |body| lab.capture_add(body, count, at + 1))?;
                keys.push([flag, count]);
            }
            Ok(keys)
        })
        .unwrap();
    assert!(lab.context.sim.object_counts().streams <= before + 1);
    let kinds = graph.topology().unwrap().nodes;
    assert_eq!(kinds.iter().filter(|node| node.kind == NodeKind::Conditional).count(), 40);
    let mut sums = [0; 40];
    for round in 0..3_usize {
        for (at, pair) in keys.iter().enumerate() {
            let runs = (at * 7 + round).is_multiple_of(3);
            sums[at] += if runs { at as u32 + 1 } else { 0 };
            lab.set(lab.at(&graph, pair[0]), u32::from(runs));
            if round == 0 {
                lab.set(lab.at(&graph, pair[1]), 0);
            }
        }
        graph.replay(&lab.context.main).unwrap();
        for (at, pair) in keys.iter().enumerate() {
            assert_eq!(lab.word(lab.at(&graph, pair[1])), sums[at], "if {at} in round {round}");
        }
    }
    drop(graph);
    lab.finish();
}

/// test_cond_traced_triply_nested_cudagraphs: all eight ways through three ifs. As many streams as bodies are nested.
#[test]
fn three_nested_ifs_run_only_behind_each_other() {
    let lab = GraphLab::new("");
    let mut graph = lab.graph();
    let before = lab.context.sim.object_counts().streams;
    let keys: [BufferKey; 6] = graph
        .capture(&lab.side, PLAIN, |capture| {
            let keys: [BufferKey; 6] = words(capture)?;
            let [a, b, c, one, two, three] = keys;
            capture.if_node(Flag::word(a), |outer| {
                assert!(outer.in_body() && outer.stream() != &*lab.side);
                assert_eq!(lab.context.instance.current_stream()?, *outer.stream());
                lab.capture_add(outer, one, 1)?;
                outer.if_node(Flag::word(b), |middle| {
                    lab.capture_add(middle, two, 1)?;
                    middle.if_node(Flag::word(c), |inner| lab.capture_add(inner, three, 1))
                })?;
                // Behind the inner bodies, in the outer one.
                lab.capture_add(outer, one, 10)
            })?;
            Ok(keys)
        })
        .unwrap();
    assert!(lab.context.sim.object_counts().streams <= before + 3);
    for ways in 0..8_u32 {
        let [a, b, c] = [ways & 1, ways >> 1 & 1, ways >> 2];
        set(&lab, &graph, &keys, &[a, b, c, 0, 0, 0]);
        graph.replay(&lab.context.main).unwrap();
        assert_eq!(got(&lab, &graph, &keys[3..]), [11 * a, a * b, a * b * c], "{ways:03b}");
    }
    drop(graph);
    lab.finish();
}

/// test_while_loop_cuda_graph_replay_uses_runtime_condition: how often the body runs is decided at the replay, by the
/// device.
#[test]
fn a_while_follows_the_flag_at_the_replay() {
    let lab = GraphLab::new("");
    let mut graph = lab.graph();
    let keys: [BufferKey; 2] = graph
        .capture(&lab.side, PLAIN, |capture| {
            let [left, count] = words(capture)?;
            capture.while_node(Flag::word(left), |body| {
                lab.capture_add(body, count, 3)?;
                lab.capture_add(body, left, u32::MAX)
            })?;
            Ok([left, count])
        })
        .unwrap();
    for rounds in [4, 0, 1, 17] {
        set(&lab, &graph, &keys, &[rounds, 0]);
        graph.replay(&lab.context.main).unwrap();
        assert_eq!(got(&lab, &graph, &keys), [0, 3 * rounds]);
    }
    // Set by the device right before, on the stream of the replay.
    set(&lab, &graph, &keys, &[0, 0]);
    lab.add(lab.at(&graph, keys[0]), 5, &lab.side);
    graph.replay(&lab.side).unwrap();
    assert_eq!(got(&lab, &graph, &keys), [0, 15]);
    drop(graph);
    lab.finish();
}

/// test_cond_inside_while_loop_cudagraphs: of 7 rounds, 4 are odd. Memory that a body takes comes from the graph's
/// pool.
#[test]
fn an_if_inside_a_while_is_asked_in_every_round() {
    let lab = GraphLab::new("");
    let mut graph = lab.graph();
    let (keys, of_body) = graph
        .capture(&lab.side, PLAIN, |capture| {
            let keys: [BufferKey; 4] = words(capture)?;
            let [left, odd, rounds, odds] = keys;
            let of_body = capture.while_node(Flag::word(left), |body| {
                let stream = body.stream().clone();
                let own = body.allocate(4)?;
                body.fill(own, Pattern::U32(1), 1, &stream)?;
                lab.capture_odd(body, odd, left)?;
                body.if_node(Flag::word(odd), |inner| lab.capture_add(inner, odds, 1))?;
                lab.capture_add(body, rounds, 1)?;
                lab.capture_add(body, left, u32::MAX)?;
                Ok(own)
            })?;
            Ok((keys, of_body))
        })
        .unwrap();
    let place = lab.at(&graph, of_body).0;
    let segments = lab.context.segments_of(graph.pool().unwrap());
    assert!(segments.iter().any(|it| (it.address..it.address + it.total_size).contains(&place)));
    for (left, want) in [(7, [0, 1, 7, 4]), (1, [0, 1, 1, 1]), (2, [0, 1, 2, 1])] {
        set(&lab, &graph, &keys, &[left, 0, 0, 0]);
        graph.replay(&lab.context.main).unwrap();
        assert_eq!(got(&lab, &graph, &keys), want, "{left}");
    }
    drop(graph);
    lab.finish();
}

/// Random numbers in a body are refused, as PyTorch does. It says so when the body ends; ours says so where they are
/// drawn, and the whole capture fails.
#[test]
fn bodies_draw_no_random_numbers() {
    let lab = GraphLab::new("");
    let mut graph = lab.graph();
    let generator = Generator::new(&lab.context.device()).unwrap();
    let block = lab.block(4, &lab.context.main);
    let mut seen = None;
    let outcome = graph.capture(&lab.side, PLAIN, |capture| {
        let [flag] = words(capture)?;
        // Also if nobody minds the error here: a body without its numbers is not what was asked for.
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
        .capture(&lab.side, PLAIN, |capture| {
            let [flag] = words(capture)?;
            capture.if_node(Flag::word(flag), |body| lab.capture_add(body, flag, 1))?;
            generator.fill_bits(&block, &lab.side)?;
            Ok(flag)
        })
        .unwrap();
    set(&lab, &graph, &[key], &[1]);
    graph.replay(&lab.side).unwrap();
    assert_eq!((got(&lab, &graph, &[key]), generator.offset().unwrap()), (vec![2], 4));
    drop((graph, block));
    lab.finish();
}
