//! Bodies that run if, or while, a flag in device memory is set.

use warpool::driver::sim::{HazardKind, SimConfig};
use warpool::driver::{Copies as _, ErrorCode, NodeKind, Pattern};
use warpool::graph::{BufferKey, Capture, CaptureOptions, Flag, Graph, GraphError, GraphOptions};
use warpool::memory::{Allocate as _, MemPoolId};
use warpool::{Error, Result, Stream};

use crate::common::launch::capture_kernel;
use crate::common::memory::FIRST;
use crate::lab::{Lab, graph_error};

/// Adds `value` to the word in `key`, on the scope's stream.
fn add(lab: &Lab, capture: &mut Capture<'_>, key: BufferKey, value: u32) -> Result<()> {
    let stream = capture.stream().clone();
    capture_kernel(capture, lab.add, &[key.into(), 1_u32.into(), value.into()], &stream)
}

fn fill(capture: &mut Capture<'_>, key: BufferKey, value: u32) -> Result<()> {
    let stream = capture.stream().clone();
    capture.fill(key, Pattern::U32(value), 1, &stream)
}

fn upload(lab: &Lab, graph: &Graph, key: BufferKey, value: u32) {
    lab.context.device().synchronize().unwrap();
    lab.context.sim.upload(FIRST, graph.buffer(key).unwrap().ptr(), &value.to_le_bytes()).unwrap();
}

#[test]
fn an_if_runs_its_body_when_the_flag_is_set() {
    let lab = Lab::new();
    for byte in [false, true] {
        let mut graph = lab.graph_with(GraphOptions { keep_graph: true });
        let (switch, out) = graph
            .capture(&lab.side, CaptureOptions::default(), |capture| {
                let (switch, out) = (capture.allocate(4)?, capture.allocate(4)?);
                fill(capture, out, 1)?;
                let flag = if byte { Flag::byte(switch.at(1)) } else { Flag::word(switch) };
                capture.if_node(flag, |body| {
                    assert!(body.in_body() && body.stream().id() != lab.side.id());
                    assert_eq!(lab.context.instance.current_stream()?, *body.stream());
                    add(&lab, body, out, 10)
                })?;
                assert_eq!(lab.context.instance.current_stream()?, *lab.side.stream());
                add(&lab, capture, out, 100)?;
                Ok((switch, out))
            })
            .unwrap();
        let kinds: Vec<NodeKind> = graph.topology().unwrap().nodes.iter().map(|node| node.kind).collect();
        assert_eq!(kinds, [NodeKind::Fill, NodeKind::Kernel, NodeKind::Conditional, NodeKind::Kernel]);
        for (value, sum) in [(0, 101), (0x0100, 111), (0, 101), (0xff00, 111)] {
            upload(&lab, &graph, switch, value);
            lab.expect(&graph, out, sum);
        }
        upload(&lab, &graph, switch, 0xff);
        lab.expect(&graph, out, if byte { 101 } else { 111 });
    }
    lab.finish();
}

#[test]
fn a_while_runs_until_its_body_clears_the_flag() {
    let lab = Lab::new();
    let mut graph = lab.graph();
    let (left, out) = graph
        .capture(&lab.side, CaptureOptions::default(), |capture| {
            let (left, out) = (capture.allocate(4)?, capture.allocate(4)?);
            fill(capture, out, 0)?;
            capture.while_node(Flag::word(left), |body| {
                add(&lab, body, out, 5)?;
                // One less.
                add(&lab, body, left, u32::MAX)
            })?;
            Ok((left, out))
        })
        .unwrap();
    for rounds in [3, 0, 1, 10] {
        upload(&lab, &graph, left, rounds);
        lab.expect(&graph, out, 5 * rounds);
    }
    drop(graph);
    lab.finish();
}

#[test]
fn bodies_nest_three_deep() {
    let lab = Lab::new();
    let mut graph = lab.graph();
    let (flags, out) = graph
        .capture(&lab.side, CaptureOptions::default(), |capture| {
            let flags = [capture.allocate(4)?, capture.allocate(4)?, capture.allocate(4)?];
            let out = capture.allocate(4)?;
            fill(capture, out, 0)?;
            capture.if_node(Flag::word(flags[0]), |one| {
                add(&lab, one, out, 1)?;
                one.if_node(Flag::word(flags[1]), |two| {
                    add(&lab, two, out, 10)?;
                    two.while_node(Flag::word(flags[2]), |three| {
                        add(&lab, three, out, 100)?;
                        add(&lab, three, flags[2], u32::MAX)
                    })
                })?;
                add(&lab, one, out, 1000)
            })?;
            Ok((flags, out))
        })
        .unwrap();
    for (values, sum) in [([0, 1, 1], 0), ([1, 0, 1], 1001), ([1, 1, 0], 1011), ([1, 1, 3], 1311)] {
        for (flag, value) in flags.into_iter().zip(values) {
            upload(&lab, &graph, flag, value);
        }
        lab.expect(&graph, out, sum);
    }
    drop(graph);
    lab.finish();
}

#[test]
fn forty_ifs_take_one_stream() {
    let lab = Lab::new();
    let before = lab.context.sim.object_counts().streams;
    for graphs in 0..2 {
        let mut graph = lab.graph();
        let (switch, out) = graph
            .capture(&lab.side, CaptureOptions::default(), |capture| {
                let (switch, out) = (capture.allocate(4)?, capture.allocate(4)?);
                fill(capture, out, graphs)?;
                for _ in 0..40 {
                    capture.if_node(Flag::word(switch), |body| add(&lab, body, out, 2))?;
                }
                Ok((switch, out))
            })
            .unwrap();
        upload(&lab, &graph, switch, 1);
        lab.expect(&graph, out, 80 + graphs);
    }
    assert_eq!(lab.context.sim.object_counts().streams, before + 1);
    lab.finish();
}

#[test]
fn memory_asked_for_in_a_body_is_the_graphs() {
    let lab = Lab::with("graph_capture_record_stream_reuse:True");
    let mut graph = lab.graph();
    let (switch, out) = graph
        .capture(&lab.side, CaptureOptions::default(), |capture| {
            let (switch, out, pool) = (capture.allocate(4)?, capture.allocate(4)?, capture.pool());
            fill(capture, out, 7)?;
            let mut inside = Vec::new();
            for round in 0..3 {
                capture.if_node(Flag::word(switch), |body| {
                    let scratch = body.allocate(4)?;
                    inside.push(body.buffer(scratch)?.ptr());
                    fill(body, scratch, round)?;
                    let (stream, fork) = (body.stream().clone(), body.fork()?);
                    let forked = body.allocate_on(4, &fork)?;
                    body.copy(forked, scratch, 4, &fork)?;
                    body.join(fork)?;
                    body.copy(out, forked, 4, &stream)
                })?;
            }
            let segments = lab.context.segments_of(pool);
            for ptr in inside {
                assert!(segments.iter().any(|one| (one.address..one.address + one.total_size).contains(&ptr.0)));
            }
            assert_eq!(lab.context.segments_of(MemPoolId::DEFAULT), []);
            Ok((switch, out))
        })
        .unwrap();
    for (value, sum) in [(0, 7), (1, 2)] {
        upload(&lab, &graph, switch, value);
        lab.expect(&graph, out, sum);
    }
    drop(graph);
    lab.finish();
}

#[test]
fn without_the_device_or_a_capture_there_are_none() {
    let mut config = SimConfig::default();
    config.devices[0].properties.conditional_nodes = false;
    let lab = Lab::on(config, "");
    let mut graph = lab.graph();
    assert_eq!(graph_error(graph.scope().map(drop)), GraphError::NotCapturing);
    let key = graph
        .capture(&lab.side, CaptureOptions::default(), |capture| {
            let key = capture.allocate(4)?;
            let refused = graph_error(capture.if_node(Flag::word(key), |_| Ok(())));
            assert_eq!(refused, GraphError::NoConditionalNodes { device: FIRST });
            fill(capture, key, 6)?;
            Ok(key)
        })
        .expect("asking breaks nothing");
    lab.expect(&graph, key, 6);
    drop(graph);
    lab.finish();
}

#[test]
fn a_flag_lies_in_a_buffer() {
    let lab = Lab::new();
    let mut graph = lab.graph();
    let key = graph
        .capture(&lab.side, CaptureOptions::default(), |capture| {
            let key = capture.allocate(4)?;
            for flag in [Flag::byte(key.at(4)), Flag::word(key.at(1))] {
                let refused = graph_error(capture.while_node(flag, |_| Ok(())));
                assert!(matches!(refused, GraphError::OutOfBounds { available: 4, .. }), "{refused}");
            }
            let longer = capture.allocate(8)?;
            let refused = graph_error(capture.if_node(Flag::word(longer.at(1)), |_| Ok(())));
            assert_eq!(refused, GraphError::FlagAlignment { offset: 1 });
            fill(capture, key, 6)?;
            Ok(key)
        })
        .expect("asking breaks nothing");
    lab.expect(&graph, key, 6);
    drop(graph);
    lab.finish();
}

#[test]
fn a_body_that_fails_fails_the_capture_even_if_nobody_looks() {
    let lab = Lab::new();
    let mut graph = lab.graph();
    for passes_on in [false, true] {
        let outcome = graph.capture(&lab.side, CaptureOptions::default(), |capture| {
            let key = capture.allocate(4)?;
            let failed = capture.if_node(Flag::word(key), |body| {
                fill(body, key, 1)?;
                Err::<(), _>(Error::ThreadEnding)
            });
            assert_eq!(failed, Err(Error::ThreadEnding));
            if passes_on { failed } else { Ok(()) }
        });
        let wanted = GraphError::BodyFailed { error: Box::new(Error::ThreadEnding) };
        assert_eq!(outcome, Err(if passes_on { Error::ThreadEnding } else { wanted.into() }));
    }
    lab.still_works(&mut graph);
    drop(graph);
    lab.finish();
}

#[test]
fn a_panic_in_a_body_that_is_caught_outside_fails_the_capture() {
    let lab = Lab::new();
    let mut graph = lab.graph();
    let outcome = graph.capture(&lab.side, CaptureOptions::default(), |capture| {
        let key = capture.allocate(4)?;
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            capture.if_node(Flag::word(key), |_| -> Result<()> { panic!("on purpose") })
        }));
        assert!(caught.is_err());
        assert_eq!(lab.context.instance.current_stream()?, *lab.side.stream());
        Ok(())
    });
    assert_eq!(graph_error(outcome), GraphError::BodyFailed { error: Box::new(GraphError::BodyPanicked.into()) });
    lab.still_works(&mut graph);
    drop(graph);
    lab.finish();
}

#[test]
fn a_body_broken_on_purpose_says_by_what() {
    let lab = Lab::new();
    let mut graph = lab.graph();
    let outcome = graph.capture(&lab.side, CaptureOptions::default(), |capture| {
        let key = capture.allocate(4)?;
        capture.if_node(Flag::word(key), |_| {
            let _ = lab.context.device().synchronize();
            Ok(())
        })
    });
    match graph_error(outcome) {
        GraphError::CaptureFailed { error } => {
            assert_eq!(error.code, ErrorCode::StreamCaptureInvalidated);
            assert!(error.to_string().contains("device_synchronize"), "{error}");
        }
        other => panic!("{other}"),
    }
    lab.forgive(&[HazardKind::CaptureInvalidated]);
    lab.still_works(&mut graph);
    drop(graph);
    lab.finish();
}

/// Memory that a body gave up must not go to work that may run beside the body.
#[test]
fn nobody_else_gets_the_stream_of_a_body_before_the_capture_ends() {
    let lab = Lab::new();
    let mut graph = lab.graph();
    let device = lab.context.device();
    let scratch = |stream: &Stream| -> Result<()> {
        let block = lab.context.any().allocate(1 << 20, stream)?;
        Ok(lab.context.sim.fill(block.ptr(), Pattern::U8(9), 1 << 20, stream.id())?)
    };
    graph
        .capture(&lab.side, CaptureOptions::default(), |capture| {
            let switch = capture.allocate(4)?;
            fill(capture, switch, 1)?;
            let mut before = lab.context.instance.event();
            lab.side.record_event(&mut before)?;
            let mut used = Vec::new();
            for _ in 0..2 {
                capture.if_node(Flag::word(switch), |body| {
                    used.push(body.stream().id());
                    scratch(body.stream())
                })?;
            }
            assert_eq!(used[0], used[1], "bodies come one after another");
            let beside = device.lease_stream()?;
            beside.wait_event(&before)?;
            scratch(&beside)?;
            lab.side.wait_stream(&beside)
        })
        .unwrap();
    graph.replay(&lab.context.main).unwrap();
    drop(graph);
    lab.finish();
}
