//! Graphs: what was captured, done again and again.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::Check;
use super::bench::{Bench, Capturing, to_bytes};
use super::kernels::mixed;
use super::new_arguments::{
    a_destroyed_template_has_no_nodes_to_set, arguments_can_be_set_while_streams_capture,
    arguments_for_other_nodes_are_refused, launches_under_way_keep_their_arguments,
    new_arguments_are_of_one_executable, new_arguments_count_from_the_next_launch_on, nodes_of_bodies_cannot_be_set,
};
use super::owned::Owned;
use crate::expect::{Checked, expect, expect_code, expect_code_of, expect_eq, expect_same};
use crate::launch::{launch_graph, set_kernel};
use warpool_driver::ErrorCode::{InvalidHandle, StreamCaptureInvalidated, StreamCaptureUnsupported};
use warpool_driver::{
    EventScope, GraphExecId, GraphId, InstantiateOptions, KernelArg, NodeKind, Pattern, RawHandle, StreamId,
};

pub(super) const CHECKS: &[Check] = super::checks![
    every_replay_has_its_effect,
    long_chains_keep_their_order,
    edges_are_respected,
    random_graphs_compute_what_their_order_says,
    a_launch_keeps_its_place_in_the_stream,
    any_stream_can_launch,
    launches_of_one_executable_do_not_overlap,
    a_template_serves_many_executables,
    executables_outlive_their_template,
    a_destroyed_executable_finishes_its_launch,
    an_empty_graph_can_be_launched,
    copies_read_what_is_there_at_replay,
    callbacks_run_at_every_replay,
    an_external_record_happens_at_replay,
    an_external_wait_happens_at_replay,
    allocations_have_the_same_address_at_every_replay,
    unfreed_allocations_can_be_freed_at_the_next_launch,
    node_priorities_change_no_results,
    the_shape_is_what_was_captured,
    the_dot_text_is_for_people,
    handles_are_there_for_others,
    new_arguments_count_from_the_next_launch_on,
    launches_under_way_keep_their_arguments,
    new_arguments_are_of_one_executable,
    arguments_can_be_set_while_streams_capture,
    arguments_for_other_nodes_are_refused,
    a_destroyed_template_has_no_nodes_to_set,
    nodes_of_bodies_cannot_be_set,
    graphs_never_made_are_unknown,
    ; provoking:
    a_launch_cannot_be_captured,
    destroyed_graphs_are_unknown,
];

fn every_replay_has_its_effect(bench: &Bench<'_>) -> Checked {
    let (stream, n) = (bench.stream()?, 777_u32);
    let words = bench.random_words(n as usize);
    bench.kernels()?;
    let data = bench.words_of(&words)?;
    let exec = bench.ready(stream, || bench.add(data, n, 3, stream))?;
    expect_same("before any launch", &bench.words_at(data, n as usize)?, &words)?;
    for _ in 0..20 {
        launch_graph(bench.driver, exec, stream)?;
    }
    bench.sync(stream)?;
    let want: Vec<u32> = words.iter().map(|word| word.wrapping_add(60)).collect();
    expect_same("after twenty launches", &bench.words_at(data, n as usize)?, &want)
}

fn long_chains_keep_their_order(bench: &Bench<'_>) -> Checked {
    let (stream, log) = (bench.stream()?, bench.log(400)?);
    let exec = bench.ready(stream, || (0..200).try_for_each(|value| bench.append(log, value, stream)))?;
    launch_graph(bench.driver, exec, stream)?;
    bench.replay(exec, stream)?;
    bench.expect_log(log, &(0..200).chain(0..200).collect::<Vec<_>>())
}

fn edges_are_respected(bench: &Bench<'_>) -> Checked {
    let (root, left, right, n) = (bench.stream()?, bench.stream()?, bench.stream()?, 300_u32);
    let (mix, fill_index) = (bench.kernels()?.mix_u32, bench.kernels()?.fill_index);
    let (top, one, two, bottom) = (words(bench, n)?, words(bench, n)?, words(bench, n)?, words(bench, n)?);
    let put = |to: warpool_driver::DevicePtr, from: warpool_driver::DevicePtr, stream| {
        bench.launch(mix, n, &[to.into(), from.into(), KernelArg::U32(n)], stream)
    };
    let exec = bench.ready(root, || {
        bench.spin(root)?;
        bench.launch(fill_index, n, &[top.into(), KernelArg::U32(n)], root)?;
        bench.order(root, left)?;
        bench.order(root, right)?;
        bench.spin(left)?;
        put(one, top, left)?;
        put(two, top, right)?;
        bench.spin(right)?;
        put(two, top, right)?;
        bench.order(left, root)?;
        bench.order(right, root)?;
        put(bottom, one, root)?;
        put(bottom, two, root)
    })?;
    let (mut first, mut second, mut last) = (vec![0; n as usize], vec![0; n as usize], vec![0; n as usize]);
    let index: Vec<u32> = (0..n).collect();
    for round in 1..=3 {
        bench.replay(exec, root)?;
        first = mixed(&first, &index);
        second = mixed(&mixed(&second, &index), &index);
        last = mixed(&mixed(&last, &first), &second);
        expect_same(&format!("the bottom of the diamond, round {round}"), &bench.words_at(bottom, n as usize)?, &last)?;
    }
    Ok(())
}

fn words(bench: &Bench<'_>, n: u32) -> Checked<warpool_driver::DevicePtr> {
    bench.words_of(&vec![0; n as usize])
}

/// A random program over several streams, captured; each replay must compute what a single stream would have.
fn random_graphs_compute_what_their_order_says(bench: &Bench<'_>) -> Checked {
    const N: u32 = 64;
    const BUFFERS: usize = 5;
    let streams = [bench.stream()?, bench.stream()?, bench.stream()?];
    let mix = bench.kernels()?.mix_u32;
    let mut hosts: Vec<Vec<u32>> = (0..BUFFERS).map(|_| bench.random_words(N as usize)).collect();
    let buffers = hosts.iter().map(|host| bench.words_of(host)).collect::<Checked<Vec<_>>>()?;
    let program: Vec<(usize, usize, usize)> = (0..40)
        .map(|_| {
            let to = bench.below(BUFFERS as u64) as usize;
            (bench.below(3) as usize, to, (to + 1 + bench.below(BUFFERS as u64 - 1) as usize) % BUFFERS)
        })
        .collect();
    let exec = bench.ready(streams[0], || {
        bench.order(streams[0], streams[1])?;
        bench.order(streams[0], streams[2])?;
        let mut last = [None; BUFFERS];
        for &(stream, to, from) in &program {
            for used in [to, from] {
                if let Some(event) = last[used] {
                    bench.wait(streams[stream], event)?;
                }
            }
            bench.launch(mix, N, &[buffers[to].into(), buffers[from].into(), KernelArg::U32(N)], streams[stream])?;
            let event = bench.event()?;
            bench.record(event, streams[stream])?;
            (last[to], last[from]) = (Some(event), Some(event));
        }
        bench.order(streams[1], streams[0])?;
        bench.order(streams[2], streams[0])
    })?;
    for (round, stream) in streams.into_iter().enumerate() {
        bench.replay(exec, stream)?;
        for &(_, to, from) in &program {
            hosts[to] = mixed(&hosts[to], &hosts[from]);
        }
        for (at, (buffer, host)) in buffers.iter().zip(&hosts).enumerate() {
            expect_same(&format!("buffer {at}, round {round}"), &bench.words_at(*buffer, N as usize)?, host)?;
        }
    }
    Ok(())
}

fn a_launch_keeps_its_place_in_the_stream(bench: &Bench<'_>) -> Checked {
    let (stream, log) = (bench.stream()?, bench.log(5)?);
    let exec = bench.ready(stream, || {
        bench.spin(stream)?;
        bench.append(log, 2, stream)
    })?;
    bench.spin(stream)?;
    bench.append(log, 1, stream)?;
    launch_graph(bench.driver, exec, stream)?;
    bench.append(log, 3, stream)?;
    launch_graph(bench.driver, exec, stream)?;
    bench.append(log, 4, stream)?;
    bench.sync(stream)?;
    bench.expect_log(log, &[1, 2, 3, 2, 4])
}

fn any_stream_can_launch(bench: &Bench<'_>) -> Checked {
    let (stream, log) = (bench.stream()?, bench.log(4)?);
    let exec = bench.ready(stream, || bench.append(log, 1, stream))?;
    for stream in [bench.stream()?, bench.blocking_stream()?, bench.default_stream()?, bench.thread_stream()?] {
        bench.replay(exec, stream)?;
    }
    bench.expect_log(log, &[1, 1, 1, 1])
}

fn launches_of_one_executable_do_not_overlap(bench: &Bench<'_>) -> Checked {
    let (first, second, log) = (bench.stream()?, bench.stream()?, bench.log(6)?);
    let exec = bench.ready(first, || {
        bench.append(log, 1, first)?;
        bench.spin(first)?;
        bench.append(log, 2, first)
    })?;
    for stream in [first, second, first] {
        launch_graph(bench.driver, exec, stream)?;
    }
    bench.sync(first)?;
    bench.sync(second)?;
    bench.expect_log(log, &[1, 2, 1, 2, 1, 2])
}

fn a_template_serves_many_executables(bench: &Bench<'_>) -> Checked {
    let (stream, log) = (bench.stream()?, bench.log(3)?);
    let graph = bench.captured(stream, || bench.append(log, 1, stream))?;
    let (first, second) = (bench.instantiate(graph)?, bench.instantiate(graph)?);
    expect(first != second, "executables of their own")?;
    bench.replay(first, stream)?;
    bench.replay(second, stream)?;
    bench.disown(Owned::Exec(first));
    bench.driver.graph_exec_destroy(first)?;
    bench.replay(second, stream)?;
    bench.expect_log(log, &[1, 1, 1])
}

fn executables_outlive_their_template(bench: &Bench<'_>) -> Checked {
    let (stream, log) = (bench.stream()?, bench.log(2)?);
    let graph = bench.captured(stream, || bench.append(log, 1, stream))?;
    let exec = bench.instantiate(graph)?;
    bench.disown(Owned::Graph(graph));
    bench.driver.graph_destroy(graph)?;
    bench.replay(exec, stream)?;
    bench.expect_log(log, &[1])
}

fn a_destroyed_executable_finishes_its_launch(bench: &Bench<'_>) -> Checked {
    let (stream, log) = (bench.stream()?, bench.log(2)?);
    let exec = bench.ready(stream, || {
        bench.spin(stream)?;
        bench.append(log, 1, stream)
    })?;
    launch_graph(bench.driver, exec, stream)?;
    bench.disown(Owned::Exec(exec));
    bench.driver.graph_exec_destroy(exec)?;
    bench.append(log, 2, stream)?;
    bench.sync(stream)?;
    bench.expect_log(log, &[1, 2])
}

fn an_empty_graph_can_be_launched(bench: &Bench<'_>) -> Checked {
    let (stream, log) = (bench.stream()?, bench.log(2)?);
    let graph = bench.captured(stream, || Ok(()))?;
    let shape = bench.driver.graph_topology(graph)?;
    expect_eq("nodes and edges", (shape.nodes.len(), shape.edges.len()), (0, 0))?;
    bench.append(log, 1, stream)?;
    launch_graph(bench.driver, bench.instantiate(graph)?, stream)?;
    bench.append(log, 2, stream)?;
    bench.sync(stream)?;
    bench.expect_log(log, &[1, 2])
}

fn copies_read_what_is_there_at_replay(bench: &Bench<'_>) -> Checked {
    let (stream, pinned, memory) = (bench.stream()?, bench.pinned(4096)?, bench.memory(4096)?);
    let exec = bench.ready(stream, || {
        bench.driver.fill(memory, Pattern::U8(0), 4096, stream)?;
        Ok(bench.driver.copy(memory.offset(5).into(), pinned.into(), 4000, stream)?)
    })?;
    for _ in 0..3 {
        let bytes = bench.random_bytes(4096);
        bench.driver.host_write(pinned, &bytes)?;
        bench.replay(exec, stream)?;
        let want = [&[0; 5], &bytes[..4000], &[0; 91]].concat();
        expect_same("the copy", &bench.bytes_at(memory, 4096)?, &want)?;
    }
    Ok(())
}

fn callbacks_run_at_every_replay(bench: &Bench<'_>) -> Checked {
    let stream = bench.stream()?;
    let count = Arc::new(AtomicU32::new(0));
    let inside = Arc::clone(&count);
    let exec = bench.ready(stream, || {
        let callback = Arc::new(move || {
            inside.fetch_add(1, Ordering::SeqCst);
        });
        Ok(bench.driver.stream_host_callback(stream, callback)?)
    })?;
    expect_eq("calls before any launch", count.load(Ordering::SeqCst), 0)?;
    for round in 1..=5 {
        bench.replay(exec, stream)?;
        expect_eq("calls so far", count.load(Ordering::SeqCst), round)?;
    }
    Ok(())
}

fn an_external_record_happens_at_replay(bench: &Bench<'_>) -> Checked {
    let (stream, other, event, log) = (bench.stream()?, bench.stream()?, bench.event()?, bench.log(2)?);
    let exec = bench.ready(stream, || {
        bench.spin(stream)?;
        bench.append(log, 1, stream)?;
        Ok(bench.driver.event_record(event, stream, EventScope::External)?)
    })?;
    expect(bench.driver.event_query(event)?, "an event that marks nothing yet")?;
    launch_graph(bench.driver, exec, stream)?;
    bench.wait(other, event)?;
    bench.append(log, 2, other)?;
    bench.sync(other)?;
    bench.driver.event_synchronize(event)?;
    bench.expect_log(log, &[1, 2])
}

fn an_external_wait_happens_at_replay(bench: &Bench<'_>) -> Checked {
    let (stream, other, event, log) = (bench.stream()?, bench.stream()?, bench.event()?, bench.log(4)?);
    let exec = bench.ready(stream, || {
        bench.driver.stream_wait_event(stream, event, EventScope::External)?;
        bench.append(log, 2, stream)
    })?;
    for _ in 0..2 {
        bench.spin(other)?;
        bench.append(log, 1, other)?;
        bench.record(event, other)?;
        bench.replay(exec, stream)?;
    }
    bench.expect_log(log, &[1, 2, 1, 2])
}

fn allocations_have_the_same_address_at_every_replay(bench: &Bench<'_>) -> Checked {
    let (pool, stream, n) = (bench.pool()?, bench.stream()?, 2000_u32);
    let fill_index = bench.kernels()?.fill_index;
    let back = bench.pinned(4 * u64::from(n))?;
    let mut address = None;
    let graph = bench.captured(stream, || {
        let ptr = bench.driver.pool_alloc(pool, 4 * u64::from(n), stream)?;
        address = Some(ptr);
        bench.launch(fill_index, n, &[ptr.into(), KernelArg::U32(n)], stream)?;
        bench.add(ptr, n, 10, stream)?;
        bench.driver.copy(back.into(), ptr.into(), 4 * u64::from(n), stream)?;
        Ok(bench.driver.pool_free(ptr, stream)?)
    })?;
    expect(address.is_some_and(|ptr| !ptr.is_null()), "an address")?;
    let exec = bench.instantiate(graph)?;
    let want = to_bytes(&(10..n + 10).collect::<Vec<_>>());
    for round in 0..3 {
        bench.driver.host_write(back, &vec![0; 4 * n as usize])?;
        bench.replay(exec, stream)?;
        expect_same(&format!("what round {round} computed"), &bench.pinned_bytes(back, 4 * n as usize)?, &want)?;
    }
    Ok(())
}

fn a_launch_cannot_be_captured(bench: &Bench<'_>) -> Checked {
    let (stream, log) = (bench.stream()?, bench.log(2)?);
    let exec = bench.ready(stream, || bench.append(log, 1, stream))?;
    bench.begin(stream)?;
    bench.append(log, 2, stream)?;
    expect_code(launch_graph(bench.driver, exec, stream), StreamCaptureUnsupported)?;
    bench.expect_state(stream, Capturing::Broken)?;
    expect_code(bench.driver.capture_end(stream), StreamCaptureInvalidated)?;
    bench.replay(exec, stream)?;
    bench.expect_log(log, &[1])
}

fn unfreed_allocations_can_be_freed_at_the_next_launch(bench: &Bench<'_>) -> Checked {
    let (pool, stream, n) = (bench.pool()?, bench.stream()?, 256_u32);
    let fill_index = bench.kernels()?.fill_index;
    bench.begin(stream)?;
    let ptr = bench.driver.pool_alloc(pool, 4 * u64::from(n), stream)?;
    bench.launch(fill_index, n, &[ptr.into(), KernelArg::U32(n)], stream)?;
    let graph = bench.end(stream)?;
    let options = InstantiateOptions { auto_free_on_launch: true, use_node_priority: false };
    let exec = bench.instantiate_with(graph, options)?;
    bench.own(Owned::Memory(ptr));
    for _ in 0..3 {
        bench.replay(exec, stream)?;
        expect_same("what the graph left", &bench.words_at(ptr, n as usize)?, &(0..n).collect::<Vec<_>>())?;
    }
    bench.disown(Owned::Memory(ptr));
    bench.driver.pool_free(ptr, stream)?;
    bench.sync(stream)
}

fn node_priorities_change_no_results(bench: &Bench<'_>) -> Checked {
    let urgent = warpool_driver::StreamOptions { non_blocking: true, priority: -1 };
    let (stream, other, log) = (bench.stream()?, bench.stream_with(urgent)?, bench.log(3)?);
    let graph = bench.captured(stream, || {
        bench.append(log, 1, stream)?;
        bench.order(stream, other)?;
        bench.append(log, 2, other)?;
        bench.order(other, stream)?;
        bench.append(log, 3, stream)
    })?;
    let options = InstantiateOptions { auto_free_on_launch: false, use_node_priority: true };
    let exec = bench.instantiate_with(graph, options)?;
    bench.replay(exec, stream)?;
    bench.expect_log(log, &[1, 2, 3])
}

/// One node of every kind that capture makes, on two streams.
fn everything(bench: &Bench<'_>) -> Checked<GraphId> {
    let (first, second, event, n) = (bench.stream()?, bench.stream()?, bench.event()?, 4_u32);
    let (pool, memory, pinned) = (bench.pool()?, bench.memory(64)?, bench.pinned(64)?);
    bench.kernels()?;
    bench.captured(first, || {
        bench.driver.fill(memory, Pattern::U32(0), 4, first)?;
        bench.add(memory, n, 1, first)?;
        bench.order(first, second)?;
        bench.driver.copy(pinned.into(), memory.into(), 4, second)?;
        bench.driver.stream_host_callback(second, Arc::new(|| ()))?;
        let ptr = bench.driver.pool_alloc(pool, 4096, first)?;
        bench.driver.pool_free(ptr, first)?;
        bench.order(second, first)?;
        bench.driver.event_record(event, first, EventScope::External)?;
        Ok(bench.driver.stream_wait_event(first, event, EventScope::External)?)
    })
}

fn the_shape_is_what_was_captured(bench: &Bench<'_>) -> Checked {
    let shape = bench.driver.graph_topology(everything(bench)?)?;
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
    expect_eq("the nodes", kinds, want)?;
    let place = |id| shape.nodes.iter().position(|node| node.id == id);
    let mut edges: Vec<_> = shape.edges.iter().map(|&(from, to)| (place(from), place(to))).collect();
    edges.sort_unstable();
    let want = [(0, 1), (1, 2), (1, 4), (2, 3), (3, 6), (4, 5), (5, 6), (6, 7)];
    expect_eq("the edges", edges, want.map(|(from, to)| (Some(from), Some(to))).to_vec())
}

fn the_dot_text_is_for_people(bench: &Bench<'_>) -> Checked {
    let text = bench.driver.graph_dot(everything(bench)?)?;
    expect(text.starts_with("digraph"), "a text in the DOT language")?;
    expect(text.trim_end().ends_with('}'), "all of it")?;
    expect_eq("its edges", text.matches("->").count(), 8)?;
    expect(text.contains("add_u32"), "the kernel's name in it")
}

fn handles_are_there_for_others(bench: &Bench<'_>) -> Checked {
    let stream = bench.stream()?;
    let (first, second) = (bench.captured(stream, || Ok(()))?, bench.captured(stream, || Ok(()))?);
    let raw = |graph| bench.driver.graph_raw(graph);
    expect(raw(first)? != RawHandle(0) && raw(first)? != raw(second)?, "handles of templates")?;
    let (one, two) = (bench.instantiate(first)?, bench.instantiate(first)?);
    let raw = |exec| bench.driver.graph_exec_raw(exec);
    expect(raw(one)? != RawHandle(0) && raw(one)? != raw(two)?, "handles of executables")
}

fn graphs_never_made_are_unknown(bench: &Bench<'_>) -> Checked {
    unknown(bench, GraphId(u64::MAX), GraphExecId(u64::MAX), bench.stream()?)
}

fn destroyed_graphs_are_unknown(bench: &Bench<'_>) -> Checked {
    let stream = bench.stream()?;
    let graph = bench.captured(stream, || Ok(()))?;
    let exec = bench.instantiate(graph)?;
    bench.disown(Owned::Exec(exec));
    bench.driver.graph_exec_destroy(exec)?;
    bench.disown(Owned::Graph(graph));
    bench.driver.graph_destroy(graph)?;
    unknown(bench, graph, exec, stream)
}

/// Every call that takes a graph refuses these.
fn unknown(bench: &Bench<'_>, graph: GraphId, exec: GraphExecId, stream: StreamId) -> Checked {
    let driver = bench.driver;
    let refused = |call: &str, result: warpool_driver::Result<()>| expect_code_of(call, result, InvalidHandle);
    refused("graph_instantiate", driver.graph_instantiate(graph, InstantiateOptions::default()).map(drop))?;
    refused("graph_topology", driver.graph_topology(graph).map(drop))?;
    refused("graph_dot", driver.graph_dot(graph).map(drop))?;
    refused("graph_raw", driver.graph_raw(graph).map(drop))?;
    refused("graph_destroy", driver.graph_destroy(graph))?;
    refused("graph_launch", launch_graph(driver, exec, stream))?;
    let (append, node) = (bench.kernels()?.append, warpool_driver::NodeId(1));
    let set = set_kernel(driver, exec, node, append, warpool_driver::LaunchShape::ONE, &[]);
    refused("graph_exec_set_kernel", set)?;
    refused("graph_exec_raw", driver.graph_exec_raw(exec).map(drop))?;
    refused("graph_exec_destroy", driver.graph_exec_destroy(exec))
}
