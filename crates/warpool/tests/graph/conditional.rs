//! Conditional nodes: bodies that run if, or while, a flag in device memory is true.

use warpool::driver::sim::{HazardKind, SimConfig};
use warpool::driver::{Copies as _, ErrorCode, NodeKind, Pattern};
use warpool::graph::{BufferKey, Capture, CaptureOptions, Flag, Graph, GraphError, GraphOptions};
use warpool::memory::{Allocate as _, MemPoolId};
use warpool::{Error, Result, Stream};

use crate::common::launch::capture_kernel;
use crate::common::memory::FIRST;
use crate::fixture::{CaptureFixture, graph_error};

/// Adds `value` to the word in `key`, on the scope's stream.
fn add(fixture: &CaptureFixture, capture: &mut Capture<'_>, key: BufferKey, value: u32) -> Result<()> {
    let stream = capture.stream().clone();
    capture_kernel(capture, fixture.add, &[key.into(), 1_u32.into(), value.into()], &stream)
}

fn fill(capture: &mut Capture<'_>, key: BufferKey, value: u32) -> Result<()> {
    let stream = capture.stream().clone();
    capture.fill(key, Pattern::U32(value), 1, &stream)
}

fn upload(fixture: &CaptureFixture, graph: &Graph, key: BufferKey, value: u32) {
    fixture.context.device().synchronize().unwrap();
    fixture.context.sim.upload(FIRST, graph.buffer(key).unwrap().ptr(), &value.to_le_bytes()).unwrap();
}

#[test]
fn an_if_runs_its_body_when_the_flag_is_true() {
    let fixture = CaptureFixture::new();
    for byte in [false, true] {
        let mut graph = fixture.graph_with(GraphOptions { keep_graph: true });
        let (switch, out) = graph
            .capture(&fixture.side, CaptureOptions::default(), |capture| {
                let (switch, out) = (capture.allocate(4)?, capture.allocate(4)?);
                fill(capture, out, 1)?;
                let flag = if byte { Flag::byte(switch.at(1)) } else { Flag::word(switch) };
                capture.if_node(flag, |body| {
                    assert!(body.in_body() && body.stream().id() != fixture.side.id());
                    assert_eq!(fixture.context.instance.current_stream()?, *body.stream());
                    add(&fixture, body, out, 10)
                })?;
                assert_eq!(fixture.context.instance.current_stream()?, *fixture.side.stream());
                add(&fixture, capture, out, 100)?;
                Ok((switch, out))
            })
            .unwrap();
        let kinds: Vec<NodeKind> = graph.topology().unwrap().nodes.iter().map(|node| node.kind).collect();
        assert_eq!(kinds, [NodeKind::Fill, NodeKind::Kernel, NodeKind::Conditional, NodeKind::Kernel]);
        for (value, sum) in [(0, 101), (0x0100, 111), (0, 101), (0xff00, 111)] {
            upload(&fixture, &graph, switch, value);
            fixture.expect(&graph, out, sum);
        }
        upload(&fixture, &graph, switch, 0xff);
        fixture.expect(&graph, out, if byte { 101 } else { 111 });
    }
    fixture.finish();
}

#[test]
fn a_while_runs_until_its_body_clears_the_flag() {
    let fixture = CaptureFixture::new();
    let mut graph = fixture.graph();
    let (left, out) = graph
        .capture(&fixture.side, CaptureOptions::default(), |capture| {
            let (left, out) = (capture.allocate(4)?, capture.allocate(4)?);
            fill(capture, out, 0)?;
            capture.while_node(Flag::word(left), |body| {
                add(&fixture, body, out, 5)?;
                // One less.
                add(&fixture, body, left, u32::MAX)
            })?;
            Ok((left, out))
        })
        .unwrap();
    for rounds in [3, 0, 1, 10] {
        upload(&fixture, &graph, left, rounds);
        fixture.expect(&graph, out, 5 * rounds);
    }
    drop(graph);
    fixture.finish();
}

#[test]
fn bodies_nest_three_deep() {
    let fixture = CaptureFixture::new();
    let mut graph = fixture.graph();
    let (flags, out) = graph
        .capture(&fixture.side, CaptureOptions::default(), |capture| {
            let flags = [capture.allocate(4)?, capture.allocate(4)?, capture.allocate(4)?];
            let out = capture.allocate(4)?;
            fill(capture, out, 0)?;
            capture.if_node(Flag::word(flags[0]), |one| {
                add(&fixture, one, out, 1)?;
                one.if_node(Flag::word(flags[1]), |two| {
                    add(&fixture, two, out, 10)?;
                    two.while_node(Flag::word(flags[2]), |three| {
                        add(&fixture, three, out, 100)?;
                        add(&fixture, three, flags[2], u32::MAX)
                    })
                })?;
                add(&fixture, one, out, 1000)
            })?;
            Ok((flags, out))
        })
        .unwrap();
    for (values, sum) in [([0, 1, 1], 0), ([1, 0, 1], 1001), ([1, 1, 0], 1011), ([1, 1, 3], 1311)] {
        for (flag, value) in flags.into_iter().zip(values) {
            upload(&fixture, &graph, flag, value);
        }
        fixture.expect(&graph, out, sum);
    }
    drop(graph);
    fixture.finish();
}

#[test]
fn forty_ifs_use_one_stream() {
    let fixture = CaptureFixture::new();
    let before = fixture.context.sim.object_counts().streams;
    for graphs in 0..2 {
        let mut graph = fixture.graph();
        let (switch, out) = graph
            .capture(&fixture.side, CaptureOptions::default(), |capture| {
                let (switch, out) = (capture.allocate(4)?, capture.allocate(4)?);
                fill(capture, out, graphs)?;
                for _ in 0..40 {
                    capture.if_node(Flag::word(switch), |body| add(&fixture, body, out, 2))?;
                }
                Ok((switch, out))
            })
            .unwrap();
        upload(&fixture, &graph, switch, 1);
        fixture.expect(&graph, out, 80 + graphs);
    }
    assert_eq!(fixture.context.sim.object_counts().streams, before + 1);
    fixture.finish();
}

#[test]
fn memory_allocated_in_a_body_comes_from_the_graphs_pool() {
    let fixture = CaptureFixture::with("graph_capture_record_stream_reuse:True");
    let mut graph = fixture.graph();
    let (switch, out) = graph
        .capture(&fixture.side, CaptureOptions::default(), |capture| {
            let (switch, out, pool) = (capture.allocate(4)?, capture.allocate(4)?, capture.pool().id());
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
            let segments = fixture.context.segments_of(pool);
            for ptr in inside {
                assert!(segments.iter().any(|one| (one.address..one.address + one.total_size).contains(&ptr.0)));
            }
            assert_eq!(fixture.context.segments_of(MemPoolId::DEFAULT), []);
            Ok((switch, out))
        })
        .unwrap();
    for (value, sum) in [(0, 7), (1, 2)] {
        upload(&fixture, &graph, switch, value);
        fixture.expect(&graph, out, sum);
    }
    drop(graph);
    fixture.finish();
}

#[test]
fn conditional_nodes_need_device_support_and_a_capture() {
    let mut config = SimConfig::default();
    config.devices[0].properties.conditional_nodes = false;
    let fixture = CaptureFixture::on(config, "");
    let mut graph = fixture.graph();
    assert_eq!(graph_error(graph.scope().map(drop)), GraphError::NotCapturing);
    let key = graph
        .capture(&fixture.side, CaptureOptions::default(), |capture| {
            let key = capture.allocate(4)?;
            let error = graph_error(capture.if_node(Flag::word(key), |_| Ok(())));
            assert_eq!(error, GraphError::NoConditionalNodes { device: FIRST });
            fill(capture, key, 6)?;
            Ok(key)
        })
        .expect("the errors do not invalidate the capture");
    fixture.expect(&graph, key, 6);
    drop(graph);
    fixture.finish();
}

#[test]
fn a_flag_must_lie_in_a_buffer() {
    let fixture = CaptureFixture::new();
    let mut graph = fixture.graph();
    let key = graph
        .capture(&fixture.side, CaptureOptions::default(), |capture| {
            let key = capture.allocate(4)?;
            for flag in [Flag::byte(key.at(4)), Flag::word(key.at(1))] {
                let error = graph_error(capture.while_node(flag, |_| Ok(())));
                assert!(matches!(error, GraphError::OutOfBounds { available: 4, .. }), "{error}");
            }
            let longer = capture.allocate(8)?;
            let error = graph_error(capture.if_node(Flag::word(longer.at(1)), |_| Ok(())));
            assert_eq!(error, GraphError::FlagAlignment { offset: 1 });
            fill(capture, key, 6)?;
            Ok(key)
        })
        .expect("the errors do not invalidate the capture");
    fixture.expect(&graph, key, 6);
    drop(graph);
    fixture.finish();
}

#[test]
fn a_failed_body_fails_the_capture_even_if_its_error_is_ignored() {
    let fixture = CaptureFixture::new();
    let mut graph = fixture.graph();
    for passes_on in [false, true] {
        let outcome = graph.capture(&fixture.side, CaptureOptions::default(), |capture| {
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
    fixture.expect_usable(&mut graph);
    drop(graph);
    fixture.finish();
}

#[test]
fn a_caught_panic_of_a_body_fails_the_capture() {
    let fixture = CaptureFixture::new();
    let mut graph = fixture.graph();
    let outcome = graph.capture(&fixture.side, CaptureOptions::default(), |capture| {
        let key = capture.allocate(4)?;
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            capture.if_node(Flag::word(key), |_| -> Result<()> { panic!("on purpose") })
        }));
        assert!(caught.is_err());
        assert_eq!(fixture.context.instance.current_stream()?, *fixture.side.stream());
        Ok(())
    });
    assert_eq!(graph_error(outcome), GraphError::BodyFailed { error: Box::new(GraphError::BodyPanicked.into()) });
    fixture.expect_usable(&mut graph);
    drop(graph);
    fixture.finish();
}

#[test]
fn an_invalidated_body_names_the_call() {
    let fixture = CaptureFixture::new();
    let mut graph = fixture.graph();
    let outcome = graph.capture(&fixture.side, CaptureOptions::default(), |capture| {
        let key = capture.allocate(4)?;
        capture.if_node(Flag::word(key), |_| {
            let _ = fixture.context.device().synchronize();
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
    fixture.expect_hazards(&[HazardKind::CaptureInvalidated]);
    fixture.expect_usable(&mut graph);
    drop(graph);
    fixture.finish();
}

/// Memory that a body frees must not be reused by work that may run in parallel with the body.
#[test]
fn the_stream_of_a_body_is_not_leased_before_the_capture_ends() {
    let fixture = CaptureFixture::new();
    let mut graph = fixture.graph();
    let device = fixture.context.device();
    let scratch = |stream: &Stream| -> Result<()> {
        let block = fixture.context.any().allocate(1 << 20, stream)?;
        Ok(fixture.context.sim.fill(block.ptr(), Pattern::U8(9), 1 << 20, stream.id())?)
    };
    graph
        .capture(&fixture.side, CaptureOptions::default(), |capture| {
            let switch = capture.allocate(4)?;
            fill(capture, switch, 1)?;
            let mut before = fixture.context.instance.event();
            fixture.side.record_event(&mut before)?;
            let mut used = Vec::new();
            for _ in 0..2 {
                capture.if_node(Flag::word(switch), |body| {
                    used.push(body.stream().id());
                    scratch(body.stream())
                })?;
            }
            assert_eq!(used[0], used[1], "bodies are captured one after another");
            let beside = device.lease_stream()?;
            beside.wait_event(&before)?;
            scratch(&beside)?;
            fixture.side.wait_stream(&beside)
        })
        .unwrap();
    graph.replay(&fixture.context.main).unwrap();
    drop(graph);
    fixture.finish();
}
