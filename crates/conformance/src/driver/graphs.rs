//! Graphs: instantiation, launches, topology, allocation nodes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use warpool_driver::ErrorCode::{InvalidHandle, StreamCaptureInvalidated, StreamCaptureUnsupported};
use warpool_driver::{
    DevicePtr, EventScope, GraphExecId, GraphId, InstantiateOptions, KernelArg, LaunchShape, NodeId, NodeKind, Pattern,
    RawHandle, StreamId, StreamOptions,
};

use super::exec_params::{
    kernel_arguments_can_be_set_during_a_capture, kernel_arguments_for_other_nodes_are_rejected,
    new_kernel_arguments_apply_to_later_launches, new_kernel_arguments_apply_to_one_executable,
    nodes_of_a_destroyed_graph_are_rejected, nodes_of_conditional_bodies_are_rejected,
    submitted_launches_keep_their_arguments,
};
use crate::check::Check;
use crate::context::{Capture, Resource, TestContext, mix_u32_on_host, to_bytes};
use crate::expect::{CheckResult, expect, expect_eq, expect_error, expect_error_of, expect_slice_eq};

pub(crate) const CHECKS: &[Check] = crate::checks![
    every_launch_runs_the_captured_work,
    long_chains_run_in_order,
    edges_order_the_nodes,
    random_graphs_compute_correct_results,
    launch_runs_in_submission_order,
    any_stream_can_launch_a_graph,
    launches_of_one_executable_do_not_overlap,
    graph_can_be_instantiated_several_times,
    executable_survives_destruction_of_its_graph,
    destroyed_executable_finishes_its_launch,
    empty_graph_can_be_launched,
    copies_read_memory_at_launch,
    callbacks_run_at_every_launch,
    external_record_happens_at_launch,
    external_wait_happens_at_launch,
    allocation_nodes_keep_their_address,
    unfreed_allocations_are_freed_at_the_next_launch,
    node_priorities_do_not_change_results,
    topology_matches_the_capture,
    dot_output_describes_the_graph,
    raw_handles_are_distinct,
    new_kernel_arguments_apply_to_later_launches,
    submitted_launches_keep_their_arguments,
    new_kernel_arguments_apply_to_one_executable,
    kernel_arguments_can_be_set_during_a_capture,
    kernel_arguments_for_other_nodes_are_rejected,
    nodes_of_a_destroyed_graph_are_rejected,
    nodes_of_conditional_bodies_are_rejected,
    unknown_graphs_are_rejected,
    ; provoking hazards:
    graph_launch_cannot_be_captured,
    destroyed_graphs_are_rejected,
];

fn every_launch_runs_the_captured_work(context: &TestContext) -> CheckResult {
    let (stream, n) = (context.stream()?, 777_u32);
    let words = context.random_words(n as usize);
    context.kernels()?;
    let data = context.alloc_words(&words)?;
    let exec = context.capture_exec(stream, || context.add_u32(data, n, 3, stream))?;
    expect_slice_eq("the memory before any launch", &context.read_words(data, n as usize)?, &words)?;
    for _ in 0..20 {
        context.launch_graph(exec, stream)?;
    }
    context.synchronize(stream)?;
    let want: Vec<u32> = words.iter().map(|word| word.wrapping_add(60)).collect();
    expect_slice_eq("the memory after twenty launches", &context.read_words(data, n as usize)?, &want)
}

fn long_chains_run_in_order(context: &TestContext) -> CheckResult {
    let (stream, log) = (context.stream()?, context.kernel_log(400)?);
    let exec = context.capture_exec(stream, || (0..200).try_for_each(|value| context.append(log, value, stream)))?;
    context.launch_graph(exec, stream)?;
    context.replay(exec, stream)?;
    context.expect_log(log, &(0..200).chain(0..200).collect::<Vec<_>>())
}

fn edges_order_the_nodes(context: &TestContext) -> CheckResult {
    let (root, left, right, n) = (context.stream()?, context.stream()?, context.stream()?, 300_u32);
    let mix = context.kernels()?.mix_u32;
    let (top, one, two, bottom) = (words(context, n)?, words(context, n)?, words(context, n)?, words(context, n)?);
    let mix_into = |to: DevicePtr, from: DevicePtr, stream| {
        context.launch(mix, n, &[to.into(), from.into(), KernelArg::U32(n)], stream)
    };
    let exec = context.capture_exec(root, || {
        context.delay(root)?;
        context.fill_index(top, n, root)?;
        context.order(root, left)?;
        context.order(root, right)?;
        context.delay(left)?;
        mix_into(one, top, left)?;
        mix_into(two, top, right)?;
        context.delay(right)?;
        mix_into(two, top, right)?;
        context.order(left, root)?;
        context.order(right, root)?;
        mix_into(bottom, one, root)?;
        mix_into(bottom, two, root)
    })?;
    let (mut first, mut second, mut last) = (vec![0; n as usize], vec![0; n as usize], vec![0; n as usize]);
    let index: Vec<u32> = (0..n).collect();
    for round in 1..=3 {
        context.replay(exec, root)?;
        first = mix_u32_on_host(&first, &index);
        second = mix_u32_on_host(&mix_u32_on_host(&second, &index), &index);
        last = mix_u32_on_host(&mix_u32_on_host(&last, &first), &second);
        expect_slice_eq(&format!("the result of launch {round}"), &context.read_words(bottom, n as usize)?, &last)?;
    }
    Ok(())
}

fn words(context: &TestContext, n: u32) -> CheckResult<DevicePtr> {
    context.alloc_words(&vec![0; n as usize])
}

/// Captures a random program over several streams; each launch must compute what a single stream would.
fn random_graphs_compute_correct_results(context: &TestContext) -> CheckResult {
    const N: u32 = 64;
    const BUFFERS: usize = 5;
    let streams = [context.stream()?, context.stream()?, context.stream()?];
    let mix = context.kernels()?.mix_u32;
    let mut hosts: Vec<Vec<u32>> = (0..BUFFERS).map(|_| context.random_words(N as usize)).collect();
    let buffers = hosts.iter().map(|host| context.alloc_words(host)).collect::<CheckResult<Vec<_>>>()?;
    let program: Vec<(usize, usize, usize)> = (0..40)
        .map(|_| {
            let to = context.random_below(BUFFERS as u64) as usize;
            (
                context.random_below(3) as usize,
                to,
                (to + 1 + context.random_below(BUFFERS as u64 - 1) as usize) % BUFFERS,
            )
        })
        .collect();
    let exec = context.capture_exec(streams[0], || {
        context.order(streams[0], streams[1])?;
        context.order(streams[0], streams[2])?;
        let mut last = [None; BUFFERS];
        for &(stream, to, from) in &program {
            for used in [to, from] {
                if let Some(event) = last[used] {
                    context.wait(streams[stream], event)?;
                }
            }
            context.launch(mix, N, &[buffers[to].into(), buffers[from].into(), KernelArg::U32(N)], streams[stream])?;
            let event = context.event()?;
            context.record(event, streams[stream])?;
            (last[to], last[from]) = (Some(event), Some(event));
        }
        context.order(streams[1], streams[0])?;
        context.order(streams[2], streams[0])
    })?;
    for (round, stream) in streams.into_iter().enumerate() {
        context.replay(exec, stream)?;
        for &(_, to, from) in &program {
            hosts[to] = mix_u32_on_host(&hosts[to], &hosts[from]);
        }
        for (at, (buffer, host)) in buffers.iter().zip(&hosts).enumerate() {
            expect_slice_eq(&format!("buffer {at}, round {round}"), &context.read_words(*buffer, N as usize)?, host)?;
        }
    }
    Ok(())
}

fn launch_runs_in_submission_order(context: &TestContext) -> CheckResult {
    let (stream, log) = (context.stream()?, context.kernel_log(5)?);
    let exec = context.capture_exec(stream, || {
        context.delay(stream)?;
        context.append(log, 2, stream)
    })?;
    context.delay(stream)?;
    context.append(log, 1, stream)?;
    context.launch_graph(exec, stream)?;
    context.append(log, 3, stream)?;
    context.launch_graph(exec, stream)?;
    context.append(log, 4, stream)?;
    context.synchronize(stream)?;
    context.expect_log(log, &[1, 2, 3, 2, 4])
}

fn any_stream_can_launch_a_graph(context: &TestContext) -> CheckResult {
    let (stream, log) = (context.stream()?, context.kernel_log(4)?);
    let exec = context.capture_exec(stream, || context.append(log, 1, stream))?;
    for stream in
        [context.stream()?, context.blocking_stream()?, context.legacy_stream()?, context.per_thread_stream()?]
    {
        context.replay(exec, stream)?;
    }
    context.expect_log(log, &[1, 1, 1, 1])
}

fn launches_of_one_executable_do_not_overlap(context: &TestContext) -> CheckResult {
    let (first, second, log) = (context.stream()?, context.stream()?, context.kernel_log(6)?);
    let exec = context.capture_exec(first, || {
        context.append(log, 1, first)?;
        context.delay(first)?;
        context.append(log, 2, first)
    })?;
    for stream in [first, second, first] {
        context.launch_graph(exec, stream)?;
    }
    context.synchronize(first)?;
    context.synchronize(second)?;
    context.expect_log(log, &[1, 2, 1, 2, 1, 2])
}

fn graph_can_be_instantiated_several_times(context: &TestContext) -> CheckResult {
    let (stream, log) = (context.stream()?, context.kernel_log(3)?);
    let graph = context.capture(stream, || context.append(log, 1, stream))?;
    let (first, second) = (context.instantiate(graph)?, context.instantiate(graph)?);
    expect(first != second, "two executables have different ids")?;
    context.replay(first, stream)?;
    context.replay(second, stream)?;
    context.untrack(Resource::GraphExec(first));
    context.driver.graph_exec_destroy(first)?;
    context.replay(second, stream)?;
    context.expect_log(log, &[1, 1, 1])
}

fn executable_survives_destruction_of_its_graph(context: &TestContext) -> CheckResult {
    let (stream, log) = (context.stream()?, context.kernel_log(2)?);
    let graph = context.capture(stream, || context.append(log, 1, stream))?;
    let exec = context.instantiate(graph)?;
    context.untrack(Resource::Graph(graph));
    context.driver.graph_destroy(graph)?;
    context.replay(exec, stream)?;
    context.expect_log(log, &[1])
}

fn destroyed_executable_finishes_its_launch(context: &TestContext) -> CheckResult {
    let (stream, log) = (context.stream()?, context.kernel_log(2)?);
    let exec = context.capture_exec(stream, || {
        context.delay(stream)?;
        context.append(log, 1, stream)
    })?;
    context.launch_graph(exec, stream)?;
    context.untrack(Resource::GraphExec(exec));
    context.driver.graph_exec_destroy(exec)?;
    context.append(log, 2, stream)?;
    context.synchronize(stream)?;
    context.expect_log(log, &[1, 2])
}

fn empty_graph_can_be_launched(context: &TestContext) -> CheckResult {
    let (stream, log) = (context.stream()?, context.kernel_log(2)?);
    let graph = context.capture(stream, || Ok(()))?;
    let shape = context.driver.graph_topology(graph)?;
    expect_eq("nodes and edges", (shape.nodes.len(), shape.edges.len()), (0, 0))?;
    context.append(log, 1, stream)?;
    context.launch_graph(context.instantiate(graph)?, stream)?;
    context.append(log, 2, stream)?;
    context.synchronize(stream)?;
    context.expect_log(log, &[1, 2])
}

fn copies_read_memory_at_launch(context: &TestContext) -> CheckResult {
    let (stream, pinned, memory) = (context.stream()?, context.alloc_pinned(4096)?, context.alloc(4096)?);
    let exec = context.capture_exec(stream, || {
        context.driver.fill(memory, Pattern::U8(0), 4096, stream)?;
        Ok(context.driver.copy(memory.offset(5).into(), pinned.into(), 4000, stream)?)
    })?;
    for _ in 0..3 {
        let bytes = context.random_bytes(4096);
        context.driver.host_write(pinned, &bytes)?;
        context.replay(exec, stream)?;
        let want = [&[0; 5], &bytes[..4000], &[0; 91]].concat();
        expect_slice_eq("the copied memory", &context.read_bytes(memory, 4096)?, &want)?;
    }
    Ok(())
}

fn callbacks_run_at_every_launch(context: &TestContext) -> CheckResult {
    let stream = context.stream()?;
    let count = Arc::new(AtomicU32::new(0));
    let inside = Arc::clone(&count);
    let exec = context.capture_exec(stream, || {
        let callback = Arc::new(move || {
            inside.fetch_add(1, Ordering::SeqCst);
        });
        Ok(context.driver.stream_host_callback(stream, callback)?)
    })?;
    expect_eq("callbacks before any launch", count.load(Ordering::SeqCst), 0)?;
    for round in 1..=5 {
        context.replay(exec, stream)?;
        expect_eq("callbacks so far", count.load(Ordering::SeqCst), round)?;
    }
    Ok(())
}

fn external_record_happens_at_launch(context: &TestContext) -> CheckResult {
    let (stream, other, event, log) = (context.stream()?, context.stream()?, context.event()?, context.kernel_log(2)?);
    let exec = context.capture_exec(stream, || {
        context.delay(stream)?;
        context.append(log, 1, stream)?;
        Ok(context.driver.event_record(event, stream, EventScope::External)?)
    })?;
    expect(context.driver.event_query(event)?, "an event that is not recorded yet is complete")?;
    context.launch_graph(exec, stream)?;
    context.wait(other, event)?;
    context.append(log, 2, other)?;
    context.synchronize(other)?;
    context.driver.event_synchronize(event)?;
    context.expect_log(log, &[1, 2])
}

fn external_wait_happens_at_launch(context: &TestContext) -> CheckResult {
    let (stream, other, event, log) = (context.stream()?, context.stream()?, context.event()?, context.kernel_log(4)?);
    let exec = context.capture_exec(stream, || {
        context.driver.stream_wait_event(stream, event, EventScope::External)?;
        context.append(log, 2, stream)
    })?;
    for _ in 0..2 {
        context.delay(other)?;
        context.append(log, 1, other)?;
        context.record(event, other)?;
        context.replay(exec, stream)?;
    }
    context.expect_log(log, &[1, 2, 1, 2])
}

fn allocation_nodes_keep_their_address(context: &TestContext) -> CheckResult {
    let (pool, stream, n) = (context.pool()?, context.stream()?, 2000_u32);
    context.kernels()?;
    let back = context.alloc_pinned(4 * u64::from(n))?;
    let mut address = None;
    let graph = context.capture(stream, || {
        let ptr = context.driver.pool_alloc(pool, 4 * u64::from(n), stream)?;
        address = Some(ptr);
        context.fill_index(ptr, n, stream)?;
        context.add_u32(ptr, n, 10, stream)?;
        context.driver.copy(back.into(), ptr.into(), 4 * u64::from(n), stream)?;
        Ok(context.driver.pool_free(ptr, stream)?)
    })?;
    expect(address.is_some_and(|ptr| !ptr.is_null()), "the address is not null")?;
    let exec = context.instantiate(graph)?;
    let want = to_bytes(&(10..n + 10).collect::<Vec<_>>());
    for round in 0..3 {
        context.driver.host_write(back, &vec![0; 4 * n as usize])?;
        context.replay(exec, stream)?;
        expect_slice_eq(&format!("the result of launch {round}"), &context.read_pinned(back, 4 * n as usize)?, &want)?;
    }
    Ok(())
}

fn graph_launch_cannot_be_captured(context: &TestContext) -> CheckResult {
    let (stream, log) = (context.stream()?, context.kernel_log(2)?);
    let exec = context.capture_exec(stream, || context.append(log, 1, stream))?;
    context.begin_capture(stream)?;
    context.append(log, 2, stream)?;
    expect_error(context.launch_graph(exec, stream), StreamCaptureUnsupported)?;
    context.expect_capture(stream, Capture::Invalidated)?;
    expect_error(context.driver.capture_end(stream), StreamCaptureInvalidated)?;
    context.replay(exec, stream)?;
    context.expect_log(log, &[1])
}

fn unfreed_allocations_are_freed_at_the_next_launch(context: &TestContext) -> CheckResult {
    let (pool, stream, n) = (context.pool()?, context.stream()?, 256_u32);
    context.kernels()?;
    context.begin_capture(stream)?;
    let ptr = context.driver.pool_alloc(pool, 4 * u64::from(n), stream)?;
    context.fill_index(ptr, n, stream)?;
    let graph = context.end_capture(stream)?;
    let options = InstantiateOptions { auto_free_on_launch: true, use_node_priority: false };
    let exec = context.instantiate_with(graph, options)?;
    context.track(Resource::Memory(ptr));
    for _ in 0..3 {
        context.replay(exec, stream)?;
        expect_slice_eq("the result of the graph", &context.read_words(ptr, n as usize)?, &(0..n).collect::<Vec<_>>())?;
    }
    context.untrack(Resource::Memory(ptr));
    context.driver.pool_free(ptr, stream)?;
    context.synchronize(stream)
}

fn node_priorities_do_not_change_results(context: &TestContext) -> CheckResult {
    let urgent = StreamOptions { non_blocking: true, priority: -1 };
    let (stream, other, log) = (context.stream()?, context.stream_with(urgent)?, context.kernel_log(3)?);
    let graph = context.capture(stream, || {
        context.append(log, 1, stream)?;
        context.order(stream, other)?;
        context.append(log, 2, other)?;
        context.order(other, stream)?;
        context.append(log, 3, stream)
    })?;
    let options = InstantiateOptions { auto_free_on_launch: false, use_node_priority: true };
    let exec = context.instantiate_with(graph, options)?;
    context.replay(exec, stream)?;
    context.expect_log(log, &[1, 2, 3])
}

/// A graph with one node of every kind that can be captured, on two streams.
fn graph_with_every_node(context: &TestContext) -> CheckResult<GraphId> {
    let (first, second, event, n) = (context.stream()?, context.stream()?, context.event()?, 4_u32);
    let (pool, memory, pinned) = (context.pool()?, context.alloc(64)?, context.alloc_pinned(64)?);
    context.kernels()?;
    context.capture(first, || {
        context.driver.fill(memory, Pattern::U32(0), 4, first)?;
        context.add_u32(memory, n, 1, first)?;
        context.order(first, second)?;
        context.driver.copy(pinned.into(), memory.into(), 4, second)?;
        context.driver.stream_host_callback(second, Arc::new(|| ()))?;
        let ptr = context.driver.pool_alloc(pool, 4096, first)?;
        context.driver.pool_free(ptr, first)?;
        context.order(second, first)?;
        context.driver.event_record(event, first, EventScope::External)?;
        Ok(context.driver.stream_wait_event(first, event, EventScope::External)?)
    })
}

fn topology_matches_the_capture(context: &TestContext) -> CheckResult {
    let shape = context.driver.graph_topology(graph_with_every_node(context)?)?;
    let kinds: Vec<_> = shape.nodes.iter().map(|node| node.kind).collect();
    let want = vec![
        NodeKind::Fill,
        NodeKind::Kernel,
        NodeKind::Copy,
        NodeKind::HostCallback,
        NodeKind::MemAlloc,
        NodeKind::MemFree,
        NodeKind::EventRecord,
        NodeKind::EventWait,
    ];
    expect_eq("the kinds of nodes", kinds, want)?;
    let place = |id| shape.nodes.iter().position(|node| node.id == id);
    let mut edges: Vec<_> = shape.edges.iter().map(|&(from, to)| (place(from), place(to))).collect();
    edges.sort_unstable();
    let want = [(0, 1), (1, 2), (1, 4), (2, 3), (3, 6), (4, 5), (5, 6), (6, 7)];
    expect_eq("the edges", edges, want.map(|(from, to)| (Some(from), Some(to))).to_vec())
}

fn dot_output_describes_the_graph(context: &TestContext) -> CheckResult {
    let text = context.driver.graph_dot(graph_with_every_node(context)?)?;
    expect(text.starts_with("digraph"), "the text starts as DOT")?;
    expect(text.trim_end().ends_with('}'), "the text is complete")?;
    expect_eq("the edges in the text", text.matches("->").count(), 8)?;
    expect(text.contains("add_u32"), "the text names the kernel")
}

fn raw_handles_are_distinct(context: &TestContext) -> CheckResult {
    let stream = context.stream()?;
    let (first, second) = (context.capture(stream, || Ok(()))?, context.capture(stream, || Ok(()))?);
    let raw = |graph| context.driver.graph_raw(graph);
    expect(raw(first)? != RawHandle(0) && raw(first)? != raw(second)?, "handles of graphs are distinct")?;
    let (one, two) = (context.instantiate(first)?, context.instantiate(first)?);
    let raw = |exec| context.driver.graph_exec_raw(exec);
    expect(raw(one)? != RawHandle(0) && raw(one)? != raw(two)?, "handles of executables are distinct")
}

fn unknown_graphs_are_rejected(context: &TestContext) -> CheckResult {
    expect_rejected(context, GraphId(u64::MAX), GraphExecId(u64::MAX), context.stream()?)
}

fn destroyed_graphs_are_rejected(context: &TestContext) -> CheckResult {
    let stream = context.stream()?;
    let graph = context.capture(stream, || Ok(()))?;
    let exec = context.instantiate(graph)?;
    context.untrack(Resource::GraphExec(exec));
    context.driver.graph_exec_destroy(exec)?;
    context.untrack(Resource::Graph(graph));
    context.driver.graph_destroy(graph)?;
    expect_rejected(context, graph, exec, stream)
}

/// Every call that takes a graph or an executable must reject these.
fn expect_rejected(context: &TestContext, graph: GraphId, exec: GraphExecId, stream: StreamId) -> CheckResult {
    let driver = &context.driver;
    let rejected = |call: &str, result: warpool_driver::Result<()>| expect_error_of(call, result, InvalidHandle);
    rejected("graph_instantiate", driver.graph_instantiate(graph, InstantiateOptions::default()).map(drop))?;
    rejected("graph_topology", driver.graph_topology(graph).map(drop))?;
    rejected("graph_dot", driver.graph_dot(graph).map(drop))?;
    rejected("graph_raw", driver.graph_raw(graph).map(drop))?;
    rejected("graph_destroy", driver.graph_destroy(graph))?;
    rejected("graph_launch", context.launch_graph(exec, stream))?;
    let (append, node) = (context.kernels()?.append, NodeId(1));
    let set = context.set_exec_kernel(exec, node, append, LaunchShape::ONE, &[]);
    rejected("graph_exec_set_kernel", set)?;
    rejected("graph_exec_raw", driver.graph_exec_raw(exec).map(drop))?;
    rejected("graph_exec_destroy", driver.graph_exec_destroy(exec))
}
