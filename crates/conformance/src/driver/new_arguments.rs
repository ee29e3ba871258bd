//! Kernels of executables that are given other arguments. Part of the suite of graphs.

use super::bench::{Bench, Log};
use super::owned::Owned;
use crate::expect::{Checked, expect_code_of, expect_eq};
use crate::launch::{launch_graph, set_kernel};
use warpool_driver::ErrorCode::InvalidValue;
use warpool_driver::{
    CaptureMode, ConditionalKind, GraphExecId, GraphId, KernelArg, LaunchShape, NodeId, NodeKind, Pattern, StreamId,
};

/// The kernels among a template's nodes.
fn kernels(bench: &Bench<'_>, graph: GraphId) -> Checked<Vec<NodeId>> {
    let nodes = bench.driver.graph_topology(graph)?.nodes;
    Ok(nodes.iter().filter(|node| node.kind == NodeKind::Kernel).map(|node| node.id).collect())
}

/// Makes a node that appends to `log` append `value`.
fn set(bench: &Bench<'_>, exec: GraphExecId, node: NodeId, log: Log, value: u32) -> warpool_driver::Result<()> {
    set_with(bench, exec, node, log, value, LaunchShape::ONE)
}

fn set_with(
    bench: &Bench<'_>,
    exec: GraphExecId,
    node: NodeId,
    log: Log,
    value: u32,
    shape: LaunchShape,
) -> warpool_driver::Result<()> {
    let append = bench.kernels().expect("a log has loaded them").append;
    set_kernel(bench.driver, exec, node, append, shape, &[log.ptr.into(), KernelArg::U32(value)])
}

/// A template that appends 1, and an executable of it.
fn appender(bench: &Bench<'_>, log: Log, stream: StreamId) -> Checked<(GraphId, GraphExecId, NodeId)> {
    let graph = bench.captured(stream, || bench.append(log, 1, stream))?;
    Ok((graph, bench.instantiate(graph)?, kernels(bench, graph)?[0]))
}

pub(super) fn new_arguments_count_from_the_next_launch_on(bench: &Bench<'_>) -> Checked {
    let (stream, log) = (bench.stream()?, bench.log(8)?);
    let (_, exec, node) = appender(bench, log, stream)?;
    launch_graph(bench.driver, exec, stream)?;
    for value in 2..5 {
        set(bench, exec, node, log, value)?;
        launch_graph(bench.driver, exec, stream)?;
    }
    launch_graph(bench.driver, exec, stream)?;
    bench.sync(stream)?;
    bench.expect_log(log, &[1, 2, 3, 4, 4])
}

pub(super) fn launches_under_way_keep_their_arguments(bench: &Bench<'_>) -> Checked {
    let (stream, log) = (bench.stream()?, bench.log(8)?);
    let graph = bench.captured(stream, || {
        bench.spin(stream)?;
        bench.append(log, 1, stream)?;
        bench.append(log, 2, stream)
    })?;
    let (exec, nodes) = (bench.instantiate(graph)?, kernels(bench, graph)?);
    launch_graph(bench.driver, exec, stream)?;
    set(bench, exec, nodes[1], log, 10)?;
    launch_graph(bench.driver, exec, stream)?;
    set(bench, exec, nodes[2], log, 20)?;
    launch_graph(bench.driver, exec, stream)?;
    bench.sync(stream)?;
    bench.expect_log(log, &[1, 2, 10, 2, 10, 20])
}

pub(super) fn new_arguments_are_of_one_executable(bench: &Bench<'_>) -> Checked {
    let (stream, log) = (bench.stream()?, bench.log(8)?);
    let (graph, first, node) = appender(bench, log, stream)?;
    let second = bench.instantiate(graph)?;
    set(bench, first, node, log, 2)?;
    bench.replay(first, stream)?;
    bench.replay(second, stream)?;
    bench.replay(bench.instantiate(graph)?, stream)?;
    bench.expect_log(log, &[2, 1, 1])
}

pub(super) fn arguments_can_be_set_while_streams_capture(bench: &Bench<'_>) -> Checked {
    let (stream, other, log) = (bench.stream()?, bench.stream()?, bench.log(8)?);
    let (_, exec, node) = appender(bench, log, stream)?;
    bench.driver.capture_begin(other, CaptureMode::Global)?;
    set(bench, exec, node, log, 2)?;
    let graph = bench.end(other)?;
    expect_eq("nodes of the capture", bench.driver.graph_topology(graph)?.nodes.len(), 0)?;
    bench.replay(exec, stream)?;
    bench.expect_log(log, &[2])
}

pub(super) fn arguments_for_other_nodes_are_refused(bench: &Bench<'_>) -> Checked {
    let (stream, log, memory) = (bench.stream()?, bench.log(8)?, bench.memory(64)?);
    let graph = bench.captured(stream, || {
        bench.append(log, 1, stream)?;
        Ok(bench.driver.fill(memory, Pattern::U8(1), 64, stream)?)
    })?;
    let exec = bench.instantiate(graph)?;
    let nodes = bench.driver.graph_topology(graph)?.nodes;
    let fill = nodes[1].id;
    let (_, _, foreign) = appender(bench, log, stream)?;
    let refused = |what: &str, result| expect_code_of(what, result, InvalidValue);
    refused("a fill", set(bench, exec, fill, log, 2))?;
    refused("a node of another graph", set(bench, exec, foreign, log, 2))?;
    refused("a node never made", set(bench, exec, NodeId(u64::MAX), log, 2))?;
    bench.replay(exec, stream)?;
    bench.expect_log(log, &[1])
}

pub(super) fn a_destroyed_template_has_no_nodes_to_set(bench: &Bench<'_>) -> Checked {
    let (stream, log) = (bench.stream()?, bench.log(8)?);
    let (graph, exec, node) = appender(bench, log, stream)?;
    set(bench, exec, node, log, 2)?;
    bench.disown(Owned::Graph(graph));
    bench.driver.graph_destroy(graph)?;
    expect_code_of("a node of a template that is gone", set(bench, exec, node, log, 3), InvalidValue)?;
    bench.replay(exec, stream)?;
    bench.expect_log(log, &[2])
}

pub(super) fn nodes_of_bodies_cannot_be_set(bench: &Bench<'_>) -> Checked {
    bench.conditional_kernels()?;
    let (stream, inner, log) = (bench.stream()?, bench.stream()?, bench.log(8)?);
    let mut body = None;
    let graph = bench.captured(stream, || {
        let flag = bench.driver.conditional_create(stream, 1)?;
        bench.driver.conditional_begin(stream, flag, ConditionalKind::If, inner, CaptureMode::Relaxed)?;
        bench.append(log, 1, inner)?;
        body = Some(bench.end(inner)?);
        Ok(())
    })?;
    let nodes = kernels(bench, body.expect("captured above"))?;
    let exec = bench.instantiate(graph)?;
    expect_code_of("a node of a body", set(bench, exec, nodes[0], log, 2), InvalidValue)?;
    bench.replay(exec, stream)?;
    bench.expect_log(log, &[1])
}
