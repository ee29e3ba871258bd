//! Graphs: capture, replay, memory, conditional nodes. Kernels write and compare the contents of blocks. The suite also
//! has the checks of `graph_failures.rs` (failed captures, wrong use) and of `graph_clients.rs` (generators, cuBLAS,
//! events, polling threads and graphed callables in captures).

use std::sync::Arc;

use warpool::Stream;
use warpool::graph::{BufferKey, Capture, CaptureOptions, Flag, Graph, GraphError, GraphOptions};
use warpool::memory::{Allocate, MemPool, MemPoolId};
use warpool_driver::DevicePtr;

use super::graph_clients::{
    external_events_order_replays, graphed_callable_replays_the_graph_of_its_shape, pollers_do_not_invalidate_captures,
    replays_draw_the_eager_sequence, two_graphs_share_a_generator_on_two_streams,
};
use super::graph_failures::{
    error_or_missing_join_ends_the_capture, invalidated_capture_names_the_call, wrong_use_returns_specific_errors,
};
use super::helpers::{PLAIN, SharedAllocator, capture_sum, graph, reserved_bytes, with_allocator};
use crate::check::Check;
use crate::context::TestContext;
use crate::expect::{CheckResult, expect, expect_eq, require};

pub(crate) const CHECKS: &[Check] = crate::checks![
    replay_runs_the_captured_work,
    graph_can_be_replayed_on_any_stream,
    temporaries_are_reused_within_the_graph_only,
    ten_graphs_share_one_pool,
    reset_frees_memory,
    invalidated_capture_names_the_call,
    error_or_missing_join_ends_the_capture,
    wrong_use_returns_specific_errors,
    kept_graph_can_be_inspected_and_instantiated_again,
    if_node_follows_its_flag,
    while_node_follows_its_flag,
    replays_draw_the_eager_sequence,
    two_graphs_share_a_generator_on_two_streams,
    pollers_do_not_invalidate_captures,
    external_events_order_replays,
    graphed_callable_replays_the_graph_of_its_shape,
];

const MIB: u64 = 1 << 20;

fn replay_runs_the_captured_work(context: &TestContext) -> CheckResult {
    const BYTES: u64 = 3 * MIB;
    with_allocator(context, |allocator, stream| {
        let input = Arc::new(allocator.allocate(BYTES, stream)?);
        context.write_sequence(input.ptr(), BYTES, 0, stream)?;
        let mut graph = graph(context, allocator)?;
        let key = graph.capture(stream, PLAIN, |capture| {
            let stream = capture.stream().clone();
            capture.share(Arc::clone(&input))?;
            let output = capture.allocate(BYTES)?;
            let out = capture.buffer(output)?.ptr();
            context.add_sequence(out, input.ptr(), BYTES, 3, &stream)?;
            // Each of two streams adds to one half.
            let fork = capture.fork()?;
            context.add_sequence(out, out, BYTES / 2, 4, &fork)?;
            let half = out.offset(BYTES / 2);
            context.add_sequence(half, half, BYTES / 2, 4, &stream)?;
            capture.join(fork)?;
            context.add_sequence(input.ptr(), input.ptr(), BYTES, 100, &stream)?;
            Ok(output)
        })?;
        let output = graph.buffer(key)?.ptr();
        context.expect_sequence("the input after the capture", input.ptr(), BYTES, 0, stream)?;
        for round in 0..4 {
            graph.replay(stream)?;
            context.expect_sequence("the output", output, BYTES, 100 * round + 7, stream)?;
            context.expect_sequence("the input", input.ptr(), BYTES, 100 * round + 100, stream)?;
        }
        expect(!graph.is_empty()?, "the graph is not empty")?;
        Ok(graph.reset()?)
    })
}

fn graph_can_be_replayed_on_any_stream(context: &TestContext) -> CheckResult {
    const BYTES: u64 = 4 * MIB;
    with_allocator(context, |allocator, stream| {
        let (main, other) = (context.device().default_stream()?, context.device().lease_stream()?);
        let input = Arc::new(allocator.allocate(BYTES, stream)?);
        let mut graph = graph(context, allocator)?;
        let key = graph.capture(stream, PLAIN, |capture| {
            capture.share(Arc::clone(&input))?;
            capture_sum(context, capture, input.ptr(), BYTES, 9)
        })?;
        stream.synchronize()?;
        let output = graph.buffer(key)?.ptr();
        let streams: [&Stream; 3] = [stream, &main, &other];
        for round in 0..6_u32 {
            let (now, last) = (streams[round as usize % 3], streams[(round as usize + 2) % 3]);
            now.wait_stream(last)?;
            context.write_sequence(input.ptr(), BYTES, 1000 * round, now)?;
            graph.replay(now)?;
            context.expect_sequence("the output on one of three streams", output, BYTES, 1000 * round + 9, now)?;
        }
        // Reset while a replay is pending on a stream that no memory was allocated for: later allocations must not
        // overlap the memory of that replay.
        context.keep_stream_busy(&other)?;
        graph.replay(&other)?;
        graph.reset()?;
        drop(input);
        let others = (0..4).map(|_| allocator.allocate(BYTES, stream)).collect::<warpool::Result<Vec<_>>>()?;
        for (block, first) in others.iter().zip(70..) {
            context.write_sequence(block.ptr(), BYTES, first, stream)?;
        }
        other.synchronize()?;
        for (block, first) in others.iter().zip(70..) {
            context.expect_sequence(
                "a block allocated during a replay of a reset graph",
                block.ptr(),
                BYTES,
                first,
                stream,
            )?;
        }
        Ok(())
    })
}

fn temporaries_are_reused_within_the_graph_only(context: &TestContext) -> CheckResult {
    const BYTES: u64 = 2 * MIB;
    with_allocator(context, |allocator, stream| {
        let result = Arc::new(allocator.allocate(BYTES, stream)?);
        context.write_sequence(result.ptr(), BYTES, 0, stream)?;
        let mut graph = graph(context, allocator)?;
        let mut addresses = graph.capture(stream, PLAIN, |capture| {
            capture.share(Arc::clone(&result))?;
            let mut addresses = Vec::new();
            for _ in 0..10 {
                let scratch = capture.allocator().allocate(BYTES, stream)?;
                context.add_sequence(scratch.ptr(), result.ptr(), BYTES, 1, stream)?;
                context.add_sequence(result.ptr(), scratch.ptr(), BYTES, 0, stream)?;
                addresses.push(scratch.ptr());
            }
            Ok(addresses)
        })?;
        addresses.dedup();
        expect_eq("addresses of ten successive temporaries", addresses.len(), 1)?;
        for round in 1..=3 {
            // Blocks allocated between replays must not overlap the memory of the graph.
            let others = (0..8).map(|_| allocator.allocate(BYTES, stream)).collect::<warpool::Result<Vec<_>>>()?;
            for block in &others {
                expect(block.ptr() != addresses[0], "the block is not memory of the graph")?;
                context.write_sequence(block.ptr(), BYTES, 77, stream)?;
            }
            graph.replay(stream)?;
            context.expect_sequence("the result of ten steps", result.ptr(), BYTES, 10 * round, stream)?;
            for block in &others {
                context.expect_sequence("a block outside the graph", block.ptr(), BYTES, 77, stream)?;
            }
        }
        Ok(graph.reset()?)
    })
}

fn ten_graphs_share_one_pool(context: &TestContext) -> CheckResult {
    const BYTES: u64 = 12 * MIB;
    with_allocator(context, |allocator, stream| {
        let data = Arc::new(allocator.allocate(BYTES, stream)?);
        let before = reserved_bytes(context, allocator)?;
        let (mut graphs, mut last): (Vec<Graph>, Option<DevicePtr>) = (Vec::new(), None);
        for step in 0..10_u32 {
            let mut graph = graph(context, allocator)?;
            let pool = graphs.first().map(Graph::pool).transpose()?;
            let from = last.unwrap_or(data.ptr());
            let key = graph.capture(stream, CaptureOptions { pool, ..PLAIN }, |capture| {
                capture.share(Arc::clone(&data))?;
                // A small output, and a large temporary.
                let between = capture.allocator().allocate(BYTES, stream)?;
                context.add_sequence(between.ptr(), from, 4096, step, stream)?;
                let output = capture.allocate(4096)?;
                context.add_sequence(capture.buffer(output)?.ptr(), between.ptr(), 4096, 1, stream)?;
                Ok(output)
            })?;
            last = Some(graph.buffer(key)?.ptr());
            graphs.push(graph);
        }
        let added = reserved_bytes(context, allocator)? - before;
        expect_eq(
            "bytes reserved by ten graphs: one large segment, and one for their outputs",
            added,
            BYTES + 2 * MIB,
        )?;
        let pools: Vec<&MemPool> = graphs.iter().map(Graph::pool).collect::<warpool::Result<_>>()?;
        expect(pools.iter().all(|&pool| pool == pools[0]), "all graphs use one pool")?;
        for round in 0..3 {
            context.write_sequence(data.ptr(), 4096, 1000 * round, stream)?;
            graphs.iter().try_for_each(|graph| graph.replay(stream))?;
            let output = last.unwrap_or(data.ptr());
            context.expect_sequence("the output of ten graphs", output, 4096, 1000 * round + 45 + 10, stream)?;
        }
        // Reset one by one; the remaining graphs keep the pool.
        while let Some(mut graph) = graphs.pop() {
            graph.reset()?;
            allocator.trim(context.device_id, MemPoolId::DEFAULT)?;
            let left = reserved_bytes(context, allocator)? - before;
            let want = if graphs.is_empty() { 0 } else { BYTES + 2 * MIB };
            expect_eq(&format!("bytes reserved by {} graphs", graphs.len()), left, want)?;
        }
        Ok(())
    })
}

fn reset_frees_memory(context: &TestContext) -> CheckResult {
    const BYTES: u64 = 30 * MIB;
    with_allocator(context, |allocator, stream| {
        let mut graph = graph(context, allocator)?;
        for round in 0..3 {
            let key = graph.capture(stream, PLAIN, |capture| {
                let key = capture.allocate(BYTES)?;
                let ptr = capture.buffer(key)?.ptr();
                context.add_sequence(ptr, ptr, MIB, 1, stream)?;
                Ok(key)
            })?;
            let ptr = graph.buffer(key)?.ptr();
            context.write_sequence(ptr, MIB, round, stream)?;
            graph.replay(stream)?;
            context.expect_sequence("the memory of a graph", ptr, MIB, round + 1, stream)?;
            allocator.trim(context.device_id, MemPoolId::DEFAULT)?;
            expect_eq("bytes reserved by a graph after a trim", reserved_bytes(context, allocator)?, BYTES)?;
            graph.reset()?;
            allocator.trim(context.device_id, MemPoolId::DEFAULT)?;
            expect_eq("reserved bytes after a reset", reserved_bytes(context, allocator)?, 0)?;
            expect_eq("a replay after a reset", graph.replay(stream), Err(GraphError::NotCaptured.into()))?;
        }
        Ok(())
    })
}

fn kept_graph_can_be_inspected_and_instantiated_again(context: &TestContext) -> CheckResult {
    const BYTES: u64 = 4096;
    with_allocator(context, |allocator, stream| {
        let mut graph = Graph::new(allocator, context.device(), GraphOptions { keep_graph: true })?;
        let key = graph.capture(stream, PLAIN, |capture| {
            let key = capture.allocate(BYTES)?;
            let ptr = capture.buffer(key)?.ptr();
            context.add_sequence(ptr, ptr, BYTES, 1, stream)?;
            context.add_sequence(ptr, ptr, BYTES, 1, stream)?;
            Ok(key)
        })?;
        expect_eq("nodes", graph.topology()?.nodes.len(), 2)?;
        expect(graph.raw()?.0 != 0, "the raw graph handle is not null")?;
        expect_eq("the raw handle before instantiation", graph.raw_exec(), Err(GraphError::NotInstantiated.into()))?;
        expect(graph.dot()?.contains("digraph"), "the DOT text is complete")?;
        let ptr = graph.buffer(key)?.ptr();
        context.write_sequence(ptr, BYTES, 0, stream)?;
        for round in 1..=3 {
            graph.replay(stream)?;
            context.expect_sequence(
                "the result of a graph that was instantiated again",
                ptr,
                BYTES,
                2 * round,
                stream,
            )?;
            expect(graph.raw_exec()?.0 != 0, "the raw handle of the executable is not null")?;
            graph.instantiate()?;
        }
        Ok(graph.reset()?)
    })
}

/// Captures a graph with `N` words of its own, which are 0 when this returns.
fn with_words<const N: usize>(
    context: &TestContext,
    allocator: &SharedAllocator,
    stream: &Stream,
    body: impl FnOnce(&mut Capture<'_>, [BufferKey; N], [DevicePtr; N]) -> warpool::Result<()>,
) -> CheckResult<(Graph, [DevicePtr; N])> {
    let mut graph = graph(context, allocator)?;
    let keys = graph.capture(stream, PLAIN, |capture| {
        let mut keys = Vec::new();
        for _ in 0..N {
            keys.push(capture.allocate(4)?);
        }
        let keys: [BufferKey; N] = keys.try_into().expect("one per word");
        let mut ptrs = [DevicePtr(0); N];
        for (ptr, &key) in ptrs.iter_mut().zip(&keys) {
            *ptr = capture.buffer(key)?.ptr();
        }
        body(capture, keys, ptrs)?;
        Ok(keys)
    })?;
    let mut ptrs = [DevicePtr(0); N];
    for (ptr, &key) in ptrs.iter_mut().zip(&keys) {
        *ptr = graph.buffer(key)?.ptr();
        context.driver.upload(context.device_id, *ptr, &[0; 4])?;
    }
    Ok((graph, ptrs))
}

fn word_at(context: &TestContext, ptr: DevicePtr) -> CheckResult<u32> {
    let bytes = context.read_bytes(ptr, 4)?;
    Ok(bytes.as_chunks().0.first().map_or(0, |&word| u32::from_le_bytes(word)))
}

fn if_node_follows_its_flag(context: &TestContext) -> CheckResult {
    require(context.device().properties().conditional_nodes, "graphs of the device have no conditional nodes")?;
    with_allocator(context, |allocator, stream| {
        let (mut graph, [flag, inner, count, both]) =
            with_words(context, allocator, stream, |capture, [flag, inner, _, _], [_, _, count, both]| {
                capture.if_node(Flag::word(flag), |body| {
                    context.add_sequence(count, count, 4, 1, body.stream())?;
                    body.if_node(Flag::byte(inner), |body| context.add_sequence(both, both, 4, 1, body.stream()))
                })
            })?;
        let (mut outer_runs, mut inner_runs) = (0, 0);
        for round in 0..8_u32 {
            let (outer, inner_flag) = (round % 2, round / 2 % 2);
            context.write_sequence(flag, 4, outer, stream)?;
            context.write_sequence(inner, 4, inner_flag, stream)?;
            graph.replay(stream)?;
            stream.synchronize()?;
            outer_runs += outer;
            inner_runs += outer * inner_flag;
            let got = (word_at(context, count)?, word_at(context, both)?);
            expect_eq("runs of the outer and of the inner body", got, (outer_runs, inner_runs))?;
        }
        Ok(graph.reset()?)
    })
}

fn while_node_follows_its_flag(context: &TestContext) -> CheckResult {
    require(context.device().properties().conditional_nodes, "graphs of the device have no conditional nodes")?;
    with_allocator(context, |allocator, stream| {
        let (mut graph, [left, count]) =
            with_words(context, allocator, stream, |capture, [flag, _], [left, count]| {
                capture.while_node(Flag::word(flag), |body| {
                    context.add_sequence(count, count, 4, 3, body.stream())?;
                    context.add_sequence(left, left, 4, u32::MAX, body.stream())
                })
            })?;
        for rounds in [5, 0, 1, 100] {
            context.write_sequence(left, 4, rounds, stream)?;
            context.write_sequence(count, 4, 0, stream)?;
            graph.replay(stream)?;
            stream.synchronize()?;
            let got = (word_at(context, left)?, word_at(context, count)?);
            expect_eq(&format!("the words after {rounds} iterations"), got, (0, 3 * rounds))?;
        }
        Ok(graph.reset()?)
    })
}
