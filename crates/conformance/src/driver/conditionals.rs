//! Conditional nodes: bodies that run if, or while, a flag is set that kernels of the graph set.

use std::sync::Arc;

use super::Check;
use super::bench::Bench;
use crate::expect::{Checked, expect_code, expect_code_of, expect_eq, expect_same, need};
use warpool_driver::ErrorCode::{IllegalState, InvalidValue};
use warpool_driver::{
    CaptureMode, ConditionalId, ConditionalKind, EventScope, InstantiateOptions, KernelArg, NodeKind, Pattern, StreamId,
};

pub(super) const CHECKS: &[Check] = super::checks![
    an_if_runs_its_body_when_the_flag_is_set,
    the_default_counts_at_every_launch,
    a_while_runs_until_the_flag_is_clear,
    a_while_may_not_run_at_all,
    bodies_hold_several_kinds_of_work,
    conditionals_can_be_nested,
    a_conditional_is_one_node,
    a_flag_needs_a_capture,
    a_flag_serves_one_node,
    a_body_needs_a_stream_of_its_own,
    bodies_hold_no_callbacks_events_or_allocations,
];

/// Appends a conditional to what `stream` captures, with a body that `fill` puts into `body`.
fn conditional(
    bench: &Bench<'_>,
    stream: StreamId,
    flag: ConditionalId,
    kind: ConditionalKind,
    body: StreamId,
    fill: impl FnOnce() -> Checked,
) -> Checked {
    bench.driver.conditional_begin(stream, flag, kind, body, CaptureMode::Relaxed)?;
    fill()?;
    bench.end(body)?;
    Ok(())
}

fn an_if_runs_its_body_when_the_flag_is_set(bench: &Bench<'_>) -> Checked {
    let set_flag = bench.conditional_kernels()?.set_flag;
    let (stream, body, log) = (bench.stream()?, bench.stream()?, bench.log(20)?);
    let switch = bench.words_of(&[0])?;
    let exec = bench.ready(stream, || {
        let flag = bench.driver.conditional_create(stream, 0)?;
        bench.append(log, 1, stream)?;
        bench.launch_one(set_flag, &[KernelArg::Conditional(flag), switch.into()], stream)?;
        conditional(bench, stream, flag, ConditionalKind::If, body, || bench.append(log, 2, body))?;
        bench.append(log, 3, stream)
    })?;
    for value in [0_u32, 1, 0, 7] {
        bench.driver.upload(bench.device, switch, &value.to_le_bytes())?;
        bench.replay(exec, stream)?;
    }
    bench.expect_log(log, &[1, 3, 1, 2, 3, 1, 3, 1, 2, 3])
}

fn the_default_counts_at_every_launch(bench: &Bench<'_>) -> Checked {
    bench.conditional_kernels()?;
    for default in [0, 1] {
        let (stream, body, log) = (bench.stream()?, bench.stream()?, bench.log(4)?);
        let exec = bench.ready(stream, || {
            let flag = bench.driver.conditional_create(stream, default)?;
            conditional(bench, stream, flag, ConditionalKind::If, body, || bench.append(log, 1, body))
        })?;
        bench.replay(exec, stream)?;
        bench.replay(exec, stream)?;
        bench.expect_log(log, &vec![1; 2 * default as usize])?;
    }
    Ok(())
}

fn a_while_runs_until_the_flag_is_clear(bench: &Bench<'_>) -> Checked {
    let count_down = bench.conditional_kernels()?.count_down;
    let (stream, body, log) = (bench.stream()?, bench.stream()?, bench.log(40)?);
    let left = bench.words_of(&[0])?;
    let exec = bench.ready(stream, || {
        let flag = bench.driver.conditional_create(stream, 1)?;
        conditional(bench, stream, flag, ConditionalKind::While, body, || {
            bench.append(log, 5, body)?;
            bench.launch_one(count_down, &[KernelArg::Conditional(flag), left.into()], body)
        })?;
        bench.append(log, 9, stream)
    })?;
    let mut want = Vec::new();
    for rounds in [3_u32, 1, 10] {
        bench.driver.upload(bench.device, left, &rounds.to_le_bytes())?;
        bench.replay(exec, stream)?;
        want.extend(vec![5; rounds as usize]);
        want.push(9);
        bench.expect_log(log, &want)?;
        expect_eq("what is left", bench.words_at(left, 1)?, vec![0])?;
    }
    Ok(())
}

fn a_while_may_not_run_at_all(bench: &Bench<'_>) -> Checked {
    bench.conditional_kernels()?;
    let (stream, body, log) = (bench.stream()?, bench.stream()?, bench.log(4)?);
    let exec = bench.ready(stream, || {
        let flag = bench.driver.conditional_create(stream, 0)?;
        conditional(bench, stream, flag, ConditionalKind::While, body, || bench.append(log, 1, body))?;
        bench.append(log, 2, stream)
    })?;
    bench.replay(exec, stream)?;
    bench.expect_log(log, &[2])
}

fn bodies_hold_several_kinds_of_work(bench: &Bench<'_>) -> Checked {
    bench.conditional_kernels()?;
    bench.kernels()?;
    let (stream, body, n) = (bench.stream()?, bench.stream()?, 128_u32);
    let (first, second) = (bench.words_of(&vec![0; n as usize])?, bench.words_of(&vec![0; n as usize])?);
    let exec = bench.ready(stream, || {
        let flag = bench.driver.conditional_create(stream, 1)?;
        conditional(bench, stream, flag, ConditionalKind::If, body, || {
            bench.driver.fill(first, Pattern::U32(4), u64::from(n), body)?;
            bench.add(first, n, 3, body)?;
            Ok(bench.driver.copy(second.into(), first.into(), 4 * u64::from(n), body)?)
        })?;
        bench.add(second, n, 1, stream)
    })?;
    bench.replay(exec, stream)?;
    expect_same("what the body and the work behind it left", &bench.words_at(second, n as usize)?, &vec![8; n as usize])
}

fn conditionals_can_be_nested(bench: &Bench<'_>) -> Checked {
    let kernels = bench.conditional_kernels()?;
    let (stream, outer, inner, log) = (bench.stream()?, bench.stream()?, bench.stream()?, bench.log(20)?);
    let (left, switch) = (bench.words_of(&[3])?, bench.words_of(&[1])?);
    let exec = bench.ready(stream, || {
        let again = bench.driver.conditional_create(stream, 1)?;
        conditional(bench, stream, again, ConditionalKind::While, outer, || {
            bench.append(log, 1, outer)?;
            let choice = bench.driver.conditional_create(outer, 0)?;
            bench.launch_one(kernels.set_flag, &[KernelArg::Conditional(choice), switch.into()], outer)?;
            conditional(bench, outer, choice, ConditionalKind::If, inner, || bench.append(log, 2, inner))?;
            bench.launch_one(kernels.count_down, &[KernelArg::Conditional(again), left.into()], outer)
        })
    })?;
    bench.replay(exec, stream)?;
    bench.expect_log(log, &[1, 2, 1, 2, 1, 2])?;
    bench.driver.upload(bench.device, left, &2_u32.to_le_bytes())?;
    bench.driver.upload(bench.device, switch, &0_u32.to_le_bytes())?;
    bench.replay(exec, stream)?;
    bench.expect_log(log, &[1, 2, 1, 2, 1, 2, 1, 1])
}

fn a_conditional_is_one_node(bench: &Bench<'_>) -> Checked {
    bench.conditional_kernels()?;
    let (stream, body, log) = (bench.stream()?, bench.stream()?, bench.log(4)?);
    let graph = bench.captured(stream, || {
        let flag = bench.driver.conditional_create(stream, 0)?;
        bench.append(log, 1, stream)?;
        conditional(bench, stream, flag, ConditionalKind::If, body, || {
            bench.append(log, 2, body)?;
            bench.append(log, 3, body)
        })?;
        bench.append(log, 4, stream)
    })?;
    let shape = bench.driver.graph_topology(graph)?;
    let kinds: Vec<_> = shape.nodes.iter().map(|node| node.kind).collect();
    expect_eq("the nodes", kinds, vec![NodeKind::Kernel, NodeKind::Conditional, NodeKind::Kernel])?;
    let ids: Vec<_> = shape.nodes.iter().map(|node| node.id).collect();
    expect_eq("the edges", shape.edges, vec![(ids[0], ids[1]), (ids[1], ids[2])])
}

fn a_flag_needs_a_capture(bench: &Bench<'_>) -> Checked {
    need(bench.properties()?.conditional_nodes, "graphs of this device have no conditional nodes")?;
    expect_code(bench.driver.conditional_create(bench.stream()?, 0), IllegalState)
}

fn a_flag_serves_one_node(bench: &Bench<'_>) -> Checked {
    bench.conditional_kernels()?;
    let (stream, body, log) = (bench.stream()?, bench.stream()?, bench.log(4)?);
    bench.begin(stream)?;
    let flag = bench.driver.conditional_create(stream, 0)?;
    conditional(bench, stream, flag, ConditionalKind::If, body, || bench.append(log, 1, body))?;
    let again = bench.driver.conditional_begin(stream, flag, ConditionalKind::If, body, CaptureMode::Relaxed);
    expect_code(again, InvalidValue)
}

fn a_body_needs_a_stream_of_its_own(bench: &Bench<'_>) -> Checked {
    bench.conditional_kernels()?;
    let stream = bench.stream()?;
    bench.begin(stream)?;
    let flag = bench.driver.conditional_create(stream, 0)?;
    let begun = bench.driver.conditional_begin(stream, flag, ConditionalKind::If, stream, CaptureMode::Relaxed);
    expect_code(begun, IllegalState)
}

/// Puts something into a stream.
type Put<'a> = &'a dyn Fn(StreamId) -> warpool_driver::Result<()>;

fn bodies_hold_no_callbacks_events_or_allocations(bench: &Bench<'_>) -> Checked {
    bench.conditional_kernels()?;
    let (driver, event, pool) = (bench.driver, bench.event()?, bench.pool()?);
    let cases: [(&str, Put<'_>); 4] = [
        ("a callback", &|body| driver.stream_host_callback(body, Arc::new(|| ()))),
        ("a record", &|body| driver.event_record(event, body, EventScope::External)),
        ("a wait", &|body| driver.stream_wait_event(body, event, EventScope::External)),
        ("an allocation", &|body| driver.pool_alloc(pool, 4096, body).map(drop)),
    ];
    for (what, put) in cases {
        let (stream, body) = (bench.stream()?, bench.stream()?);
        let graph = bench.captured(stream, || {
            let flag = driver.conditional_create(stream, 1)?;
            conditional(bench, stream, flag, ConditionalKind::If, body, || Ok(put(body)?))
        })?;
        let ready = driver.graph_instantiate(graph, InstantiateOptions::default());
        expect_code_of(what, ready.map(drop), InvalidValue)?;
    }
    Ok(())
}
