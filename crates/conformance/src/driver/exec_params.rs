//! New arguments for kernel nodes of executable graphs. Part of the suite `graphs`.

use warpool_driver::ErrorCode::InvalidValue;
use warpool_driver::{
    CaptureMode, ConditionalKind, GraphExecId, GraphId, KernelArg, LaunchShape, NodeId, NodeKind, Pattern, StreamId,
};

use crate::context::{KernelLog, Resource, TestContext};
use crate::expect::{CheckResult, expect_eq, expect_error_of};

/// The kernel nodes of a graph.
fn kernel_nodes(context: &TestContext, graph: GraphId) -> CheckResult<Vec<NodeId>> {
    let nodes = context.driver.graph_topology(graph)?.nodes;
    Ok(nodes.iter().filter(|node| node.kind == NodeKind::Kernel).map(|node| node.id).collect())
}

/// Makes a kernel node append `value` to `log`.
fn set_append(
    context: &TestContext,
    exec: GraphExecId,
    node: NodeId,
    log: KernelLog,
    value: u32,
) -> warpool_driver::Result<()> {
    set_append_with(context, exec, node, log, value, LaunchShape::ONE)
}

fn set_append_with(
    context: &TestContext,
    exec: GraphExecId,
    node: NodeId,
    log: KernelLog,
    value: u32,
    shape: LaunchShape,
) -> warpool_driver::Result<()> {
    let append = context.kernels().expect("loaded by `kernel_log`").append;
    context.set_exec_kernel(exec, node, append, shape, &[log.ptr.into(), KernelArg::U32(value)])
}

/// A graph that appends 1, its executable and its kernel node.
fn append_graph(
    context: &TestContext,
    log: KernelLog,
    stream: StreamId,
) -> CheckResult<(GraphId, GraphExecId, NodeId)> {
    let graph = context.capture(stream, || context.append(log, 1, stream))?;
    Ok((graph, context.instantiate(graph)?, kernel_nodes(context, graph)?[0]))
}

pub(super) fn new_kernel_arguments_apply_to_later_launches(context: &TestContext) -> CheckResult {
    let (stream, log) = (context.stream()?, context.kernel_log(8)?);
    let (_, exec, node) = append_graph(context, log, stream)?;
    context.launch_graph(exec, stream)?;
    for value in 2..5 {
        set_append(context, exec, node, log, value)?;
        context.launch_graph(exec, stream)?;
    }
    context.launch_graph(exec, stream)?;
    context.synchronize(stream)?;
    context.expect_log(log, &[1, 2, 3, 4, 4])
}

pub(super) fn submitted_launches_keep_their_arguments(context: &TestContext) -> CheckResult {
    let (stream, log) = (context.stream()?, context.kernel_log(8)?);
    let graph = context.capture(stream, || {
        context.delay(stream)?;
        context.append(log, 1, stream)?;
        context.append(log, 2, stream)
    })?;
    let (exec, nodes) = (context.instantiate(graph)?, kernel_nodes(context, graph)?);
    context.launch_graph(exec, stream)?;
    set_append(context, exec, nodes[1], log, 10)?;
    context.launch_graph(exec, stream)?;
    set_append(context, exec, nodes[2], log, 20)?;
    context.launch_graph(exec, stream)?;
    context.synchronize(stream)?;
    context.expect_log(log, &[1, 2, 10, 2, 10, 20])
}

pub(super) fn new_kernel_arguments_apply_to_one_executable(context: &TestContext) -> CheckResult {
    let (stream, log) = (context.stream()?, context.kernel_log(8)?);
    let (graph, first, node) = append_graph(context, log, stream)?;
    let second = context.instantiate(graph)?;
    set_append(context, first, node, log, 2)?;
    context.replay(first, stream)?;
    context.replay(second, stream)?;
    context.replay(context.instantiate(graph)?, stream)?;
    context.expect_log(log, &[2, 1, 1])
}

pub(super) fn kernel_arguments_can_be_set_during_a_capture(context: &TestContext) -> CheckResult {
    let (stream, other, log) = (context.stream()?, context.stream()?, context.kernel_log(8)?);
    let (_, exec, node) = append_graph(context, log, stream)?;
    context.driver.capture_begin(other, CaptureMode::Global)?;
    set_append(context, exec, node, log, 2)?;
    let graph = context.end_capture(other)?;
    expect_eq("the number of nodes of the capture", context.driver.graph_topology(graph)?.nodes.len(), 0)?;
    context.replay(exec, stream)?;
    context.expect_log(log, &[2])
}

pub(super) fn kernel_arguments_for_other_nodes_are_rejected(context: &TestContext) -> CheckResult {
    let (stream, log, memory) = (context.stream()?, context.kernel_log(8)?, context.alloc(64)?);
    let graph = context.capture(stream, || {
        context.append(log, 1, stream)?;
        Ok(context.driver.fill(memory, Pattern::U8(1), 64, stream)?)
    })?;
    let exec = context.instantiate(graph)?;
    let nodes = context.driver.graph_topology(graph)?.nodes;
    let fill = nodes[1].id;
    let (_, _, foreign) = append_graph(context, log, stream)?;
    let rejected = |what: &str, result| expect_error_of(what, result, InvalidValue);
    rejected("a fill", set_append(context, exec, fill, log, 2))?;
    rejected("a node of another graph", set_append(context, exec, foreign, log, 2))?;
    rejected("an unknown node", set_append(context, exec, NodeId(u64::MAX), log, 2))?;
    context.replay(exec, stream)?;
    context.expect_log(log, &[1])
}

pub(super) fn nodes_of_a_destroyed_graph_are_rejected(context: &TestContext) -> CheckResult {
    let (stream, log) = (context.stream()?, context.kernel_log(8)?);
    let (graph, exec, node) = append_graph(context, log, stream)?;
    set_append(context, exec, node, log, 2)?;
    context.untrack(Resource::Graph(graph));
    context.driver.graph_destroy(graph)?;
    expect_error_of("a node of a destroyed graph", set_append(context, exec, node, log, 3), InvalidValue)?;
    context.replay(exec, stream)?;
    context.expect_log(log, &[2])
}

pub(super) fn nodes_of_conditional_bodies_are_rejected(context: &TestContext) -> CheckResult {
    context.conditional_kernels()?;
    let (stream, inner, log) = (context.stream()?, context.stream()?, context.kernel_log(8)?);
    let mut body = None;
    let graph = context.capture(stream, || {
        let flag = context.driver.conditional_create(stream, 1)?;
        context.driver.conditional_begin(stream, flag, ConditionalKind::If, inner, CaptureMode::Relaxed)?;
        context.append(log, 1, inner)?;
        body = Some(context.end_capture(inner)?);
        Ok(())
    })?;
    let nodes = kernel_nodes(context, body.expect("captured above"))?;
    let exec = context.instantiate(graph)?;
    expect_error_of("a node of a body", set_append(context, exec, nodes[0], log, 2), InvalidValue)?;
    context.replay(exec, stream)?;
    context.expect_log(log, &[1])
}
