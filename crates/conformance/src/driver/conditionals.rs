//! Conditional nodes: bodies that run if, or while, a flag is set. Kernels of the graph set it.

use std::sync::Arc;

use warpool_driver::ErrorCode::{IllegalState, InvalidValue, StreamCaptureUnsupported};
use warpool_driver::{
    CaptureMode, ConditionalId, ConditionalKind, EventScope, InstantiateOptions, KernelArg, NodeKind, Pattern, StreamId,
};

use crate::check::Check;
use crate::context::{Capture, TestContext};
use crate::expect::{CheckResult, expect_eq, expect_error, expect_error_of, expect_slice_eq, require};

pub(crate) const CHECKS: &[Check] = crate::checks![
    if_node_runs_its_body_when_the_flag_is_set,
    default_value_applies_at_every_launch,
    while_node_runs_until_the_flag_is_clear,
    while_node_may_run_zero_times,
    bodies_contain_fills_kernels_and_copies,
    conditional_nodes_can_be_nested,
    conditional_is_one_node_of_the_graph,
    flag_requires_a_capture,
    flag_is_used_by_one_node,
    body_requires_its_own_stream,
    bodies_reject_callbacks_events_and_allocations,
];

/// Adds a conditional node to the capture of `stream`; `fill` submits its body to the stream `body`.
fn conditional(
    context: &TestContext,
    stream: StreamId,
    flag: ConditionalId,
    kind: ConditionalKind,
    body: StreamId,
    fill: impl FnOnce() -> CheckResult,
) -> CheckResult {
    context.driver.conditional_begin(stream, flag, kind, body, CaptureMode::Relaxed)?;
    fill()?;
    context.end_capture(body)?;
    Ok(())
}

fn if_node_runs_its_body_when_the_flag_is_set(context: &TestContext) -> CheckResult {
    let set_flag = context.conditional_kernels()?.set_flag;
    let (stream, body, log) = (context.stream()?, context.stream()?, context.kernel_log(20)?);
    let switch = context.alloc_words(&[0])?;
    let exec = context.capture_exec(stream, || {
        let flag = context.driver.conditional_create(stream, 0)?;
        context.append(log, 1, stream)?;
        context.launch_single(set_flag, &[KernelArg::Conditional(flag), switch.into()], stream)?;
        conditional(context, stream, flag, ConditionalKind::If, body, || context.append(log, 2, body))?;
        context.append(log, 3, stream)
    })?;
    for value in [0_u32, 1, 0, 7] {
        context.driver.upload(context.device_id, switch, &value.to_le_bytes())?;
        context.replay(exec, stream)?;
    }
    context.expect_log(log, &[1, 3, 1, 2, 3, 1, 3, 1, 2, 3])
}

fn default_value_applies_at_every_launch(context: &TestContext) -> CheckResult {
    context.conditional_kernels()?;
    for default in [0, 1] {
        let (stream, body, log) = (context.stream()?, context.stream()?, context.kernel_log(4)?);
        let exec = context.capture_exec(stream, || {
            let flag = context.driver.conditional_create(stream, default)?;
            conditional(context, stream, flag, ConditionalKind::If, body, || context.append(log, 1, body))
        })?;
        context.replay(exec, stream)?;
        context.replay(exec, stream)?;
        context.expect_log(log, &vec![1; 2 * default as usize])?;
    }
    Ok(())
}

fn while_node_runs_until_the_flag_is_clear(context: &TestContext) -> CheckResult {
    let count_down = context.conditional_kernels()?.count_down;
    let (stream, body, log) = (context.stream()?, context.stream()?, context.kernel_log(40)?);
    let left = context.alloc_words(&[0])?;
    let exec = context.capture_exec(stream, || {
        let flag = context.driver.conditional_create(stream, 1)?;
        conditional(context, stream, flag, ConditionalKind::While, body, || {
            context.append(log, 5, body)?;
            context.launch_single(count_down, &[KernelArg::Conditional(flag), left.into()], body)
        })?;
        context.append(log, 9, stream)
    })?;
    let mut want = Vec::new();
    for rounds in [3_u32, 1, 10] {
        context.driver.upload(context.device_id, left, &rounds.to_le_bytes())?;
        context.replay(exec, stream)?;
        want.extend(vec![5; rounds as usize]);
        want.push(9);
        context.expect_log(log, &want)?;
        expect_eq("the counter", context.read_words(left, 1)?, vec![0])?;
    }
    Ok(())
}

fn while_node_may_run_zero_times(context: &TestContext) -> CheckResult {
    context.conditional_kernels()?;
    let (stream, body, log) = (context.stream()?, context.stream()?, context.kernel_log(4)?);
    let exec = context.capture_exec(stream, || {
        let flag = context.driver.conditional_create(stream, 0)?;
        conditional(context, stream, flag, ConditionalKind::While, body, || context.append(log, 1, body))?;
        context.append(log, 2, stream)
    })?;
    context.replay(exec, stream)?;
    context.expect_log(log, &[2])
}

fn bodies_contain_fills_kernels_and_copies(context: &TestContext) -> CheckResult {
    context.conditional_kernels()?;
    context.kernels()?;
    let (stream, body, n) = (context.stream()?, context.stream()?, 128_u32);
    let (first, second) = (context.alloc_words(&vec![0; n as usize])?, context.alloc_words(&vec![0; n as usize])?);
    let exec = context.capture_exec(stream, || {
        let flag = context.driver.conditional_create(stream, 1)?;
        conditional(context, stream, flag, ConditionalKind::If, body, || {
            context.driver.fill(first, Pattern::U32(4), u64::from(n), body)?;
            context.add_u32(first, n, 3, body)?;
            Ok(context.driver.copy(second.into(), first.into(), 4 * u64::from(n), body)?)
        })?;
        context.add_u32(second, n, 1, stream)
    })?;
    context.replay(exec, stream)?;
    expect_slice_eq(
        "the results of the body and of the work after it",
        &context.read_words(second, n as usize)?,
        &vec![8; n as usize],
    )
}

fn conditional_nodes_can_be_nested(context: &TestContext) -> CheckResult {
    let kernels = context.conditional_kernels()?;
    let (stream, outer, inner, log) =
        (context.stream()?, context.stream()?, context.stream()?, context.kernel_log(20)?);
    let (left, switch) = (context.alloc_words(&[3])?, context.alloc_words(&[1])?);
    let exec = context.capture_exec(stream, || {
        let again = context.driver.conditional_create(stream, 1)?;
        conditional(context, stream, again, ConditionalKind::While, outer, || {
            context.append(log, 1, outer)?;
            let choice = context.driver.conditional_create(outer, 0)?;
            context.launch_single(kernels.set_flag, &[KernelArg::Conditional(choice), switch.into()], outer)?;
            conditional(context, outer, choice, ConditionalKind::If, inner, || context.append(log, 2, inner))?;
            context.launch_single(kernels.count_down, &[KernelArg::Conditional(again), left.into()], outer)
        })
    })?;
    context.replay(exec, stream)?;
    context.expect_log(log, &[1, 2, 1, 2, 1, 2])?;
    context.driver.upload(context.device_id, left, &2_u32.to_le_bytes())?;
    context.driver.upload(context.device_id, switch, &0_u32.to_le_bytes())?;
    context.replay(exec, stream)?;
    context.expect_log(log, &[1, 2, 1, 2, 1, 2, 1, 1])
}

fn conditional_is_one_node_of_the_graph(context: &TestContext) -> CheckResult {
    context.conditional_kernels()?;
    let (stream, body, log) = (context.stream()?, context.stream()?, context.kernel_log(4)?);
    let graph = context.capture(stream, || {
        let flag = context.driver.conditional_create(stream, 0)?;
        context.append(log, 1, stream)?;
        conditional(context, stream, flag, ConditionalKind::If, body, || {
            context.append(log, 2, body)?;
            context.append(log, 3, body)
        })?;
        context.append(log, 4, stream)
    })?;
    let shape = context.driver.graph_topology(graph)?;
    let kinds: Vec<_> = shape.nodes.iter().map(|node| node.kind).collect();
    expect_eq("the kinds of nodes", kinds, vec![NodeKind::Kernel, NodeKind::Conditional, NodeKind::Kernel])?;
    let ids: Vec<_> = shape.nodes.iter().map(|node| node.id).collect();
    expect_eq("the edges", shape.edges, vec![(ids[0], ids[1]), (ids[1], ids[2])])
}

fn flag_requires_a_capture(context: &TestContext) -> CheckResult {
    require(context.properties()?.conditional_nodes, "graphs of this device have no conditional nodes")?;
    expect_error(context.driver.conditional_create(context.stream()?, 0), IllegalState)
}

fn flag_is_used_by_one_node(context: &TestContext) -> CheckResult {
    context.conditional_kernels()?;
    let (stream, body, log) = (context.stream()?, context.stream()?, context.kernel_log(4)?);
    context.begin_capture(stream)?;
    let flag = context.driver.conditional_create(stream, 0)?;
    conditional(context, stream, flag, ConditionalKind::If, body, || context.append(log, 1, body))?;
    let again = context.driver.conditional_begin(stream, flag, ConditionalKind::If, body, CaptureMode::Relaxed);
    expect_error(again, InvalidValue)
}

fn body_requires_its_own_stream(context: &TestContext) -> CheckResult {
    context.conditional_kernels()?;
    let stream = context.stream()?;
    context.begin_capture(stream)?;
    let flag = context.driver.conditional_create(stream, 0)?;
    let begin = |body| context.driver.conditional_begin(stream, flag, ConditionalKind::If, body, CaptureMode::Relaxed);
    expect_error(begin(stream), IllegalState)?;
    for default in [context.legacy_stream()?, context.per_thread_stream()?] {
        expect_error(begin(default), StreamCaptureUnsupported)?;
    }
    begin(context.stream()?)?;
    context.expect_capture(stream, Capture::Active)
}

/// Submits work to a stream.
type Submit<'a> = &'a dyn Fn(StreamId) -> warpool_driver::Result<()>;

fn bodies_reject_callbacks_events_and_allocations(context: &TestContext) -> CheckResult {
    context.conditional_kernels()?;
    let (driver, event, pool) = (&context.driver, context.event()?, context.pool()?);
    let cases: [(&str, Submit<'_>); 4] = [
        ("a callback", &|body| driver.stream_host_callback(body, Arc::new(|| ()))),
        ("a record", &|body| driver.event_record(event, body, EventScope::External)),
        ("a wait", &|body| driver.stream_wait_event(body, event, EventScope::External)),
        ("an allocation", &|body| driver.pool_alloc(pool, 4096, body).map(drop)),
    ];
    for (what, submit) in cases {
        let (stream, body) = (context.stream()?, context.stream()?);
        let graph = context.capture(stream, || {
            let flag = driver.conditional_create(stream, 1)?;
            conditional(context, stream, flag, ConditionalKind::If, body, || Ok(submit(body)?))
        })?;
        let ready = driver.graph_instantiate(graph, InstantiateOptions::default());
        expect_error_of(what, ready.map(drop), InvalidValue)?;
    }
    Ok(())
}
