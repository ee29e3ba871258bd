//! Graphs: capture, replay, memory, conditional nodes. Contents are written and counted by kernels. Captures that fail
//! and wrong use are in `graph_failures.rs`, what others do with graphs (generators, libraries, events, threads that
//! poll, functions with graphs) in `graph_use.rs`; all of it is one suite.

use std::sync::Arc;

use warpool::Stream;
use warpool::graph::{BufferKey, Capture, CaptureOptions, Flag, Graph, GraphError, GraphOptions};
use warpool::memory::{Allocate, MemPoolId};
use warpool_driver::DevicePtr;

use super::graph_clients::{
    external_events_order_replays, graphed_callable_replays_the_graph_of_its_shape, pollers_do_not_invalidate_captures,
    repeated_gemm_captures_do_not_grow_memory, replays_draw_the_eager_sequence,
    two_graphs_share_a_generator_on_two_streams,
};
use super::graph_failures::{
    error_or_missing_join_ends_the_capture, invalidated_capture_names_the_call, wrong_use_returns_specific_errors,
};
use super::graph_helpers::{PLAIN, Shared, capture_sum, graph, held, with_allocator};
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
    repeated_gemm_captures_do_not_grow_memory,
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
            // Two streams, each with a half.
            let fork = capture.fork()?;
            context.add_sequence(out, out, BYTES / 2, 4, &fork)?;
            let half = out.offset(BYTES / 2);
            context.add_sequence(half, half, BYTES / 2, 4, &stream)?;
            capture.join(fork)?;
            context.add_sequence(input.ptr(), input.ptr(), BYTES, 100, &stream)?;
            Ok(output)
        })?;
        let output = graph.buffer(key)?.ptr();
        context.expect_sequence("the input after the capture, which does nothing", input.ptr(), BYTES, 0, stream)?;
        for round in 0..4 {
            graph.replay(stream)?;
            context.expect_sequence("the output", output, BYTES, 100 * round + 7, stream)?;
            context.expect_sequence("the input", input.ptr(), BYTES, 100 * round + 100, stream)?;
        }
        expect(!graph.is_empty()?, "a graph that holds something")?;
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
        // Gone while replays are under way on a stream that nothing was allocated for: whoever comes next must not
        // meet them.
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
                "a block beside a replay of a graph that is gone",
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
        let mut places = graph.capture(stream, PLAIN, |capture| {
            capture.share(Arc::clone(&result))?;
            let mut places = Vec::new();
            for _ in 0..10 {
                let scratch = capture.allocator().allocate(BYTES, stream)?;
                context.add_sequence(scratch.ptr(), result.ptr(), BYTES, 1, stream)?;
                context.add_sequence(result.ptr(), scratch.ptr(), BYTES, 0, stream)?;
                places.push(scratch.ptr());
            }
            Ok(places)
        })?;
        places.dedup();
        expect_eq("places of ten temporaries, one after another", places.len(), 1)?;
        for round in 1..=3 {
            // Others come and go between replays, and must not meet what the graph will use again.
            let others = (0..8).map(|_| allocator.allocate(BYTES, stream)).collect::<warpool::Result<Vec<_>>>()?;
            for block in &others {
                expect(block.ptr() != places[0], "memory that is not the graph's")?;
                context.write_sequence(block.ptr(), BYTES, 77, stream)?;
            }
            graph.replay(stream)?;
            context.expect_sequence("the result of ten steps", result.ptr(), BYTES, 10 * round, stream)?;
            for block in &others {
                context.expect_sequence("a block beside the graph", block.ptr(), BYTES, 77, stream)?;
            }
        }
        Ok(graph.reset()?)
    })
}

fn ten_graphs_share_one_pool(context: &TestContext) -> CheckResult {
    const BYTES: u64 = 12 * MIB;
    with_allocator(context, |allocator, stream| {
        let data = Arc::new(allocator.allocate(BYTES, stream)?);
        let before = held(context, allocator)?;
        let (mut graphs, mut last): (Vec<Graph>, Option<DevicePtr>) = (Vec::new(), None);
        for step in 0..10_u32 {
            let mut graph = graph(context, allocator)?;
            let pool = graphs.first().map(Graph::pool).transpose()?;
            let from = last.unwrap_or(data.ptr());
            let key = graph.capture(stream, CaptureOptions { pool, ..PLAIN }, |capture| {
                capture.share(Arc::clone(&data))?;
                // A small output of what is read, and large memory of its own.
                let between = capture.allocator().allocate(BYTES, stream)?;
                context.add_sequence(between.ptr(), from, 4096, step, stream)?;
                let output = capture.allocate(4096)?;
                context.add_sequence(capture.buffer(output)?.ptr(), between.ptr(), 4096, 1, stream)?;
                Ok(output)
            })?;
            last = Some(graph.buffer(key)?.ptr());
            graphs.push(graph);
        }
        let added = held(context, allocator)? - before;
        expect_eq("what ten graphs hold: one large piece, and one for their outputs", added, BYTES + 2 * MIB)?;
        let pools: Vec<MemPoolId> = graphs.iter().map(Graph::pool).collect::<warpool::Result<_>>()?;
        expect(pools.iter().all(|&pool| pool == pools[0]), "one pool")?;
        for round in 0..3 {
            context.write_sequence(data.ptr(), 4096, 1000 * round, stream)?;
            graphs.iter().try_for_each(|graph| graph.replay(stream))?;
            let output = last.unwrap_or(data.ptr());
            context.expect_sequence("what went through ten graphs", output, 4096, 1000 * round + 45 + 10, stream)?;
        }
        // They go one by one, and those that are left keep the pool.
        while let Some(mut graph) = graphs.pop() {
            graph.reset()?;
            allocator.trim(context.device_id, MemPoolId::DEFAULT)?;
            let left = held(context, allocator)? - before;
            let want = if graphs.is_empty() { 0 } else { BYTES + 2 * MIB };
            expect_eq(&format!("what {} graphs hold", graphs.len()), left, want)?;
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
            context.expect_sequence("a graph's memory", ptr, MIB, round + 1, stream)?;
            allocator.trim(context.device_id, MemPoolId::DEFAULT)?;
            expect_eq("what a graph holds, whatever is trimmed", held(context, allocator)?, BYTES)?;
            graph.reset()?;
            allocator.trim(context.device_id, MemPoolId::DEFAULT)?;
            expect_eq("what it holds after a reset", held(context, allocator)?, 0)?;
            expect_eq("a replay after it", graph.replay(stream), Err(GraphError::NotCaptured.into()))?;
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
        expect(graph.raw()?.0 != 0, "a handle of the template")?;
        expect_eq("a handle before it is ready", graph.raw_exec(), Err(GraphError::NotInstantiated.into()))?;
        expect(graph.dot()?.contains("digraph"), "a drawing")?;
        let ptr = graph.buffer(key)?.ptr();
        context.write_sequence(ptr, BYTES, 0, stream)?;
        for round in 1..=3 {
            graph.replay(stream)?;
            context.expect_sequence("a graph that was made ready again", ptr, BYTES, 2 * round, stream)?;
            expect(graph.raw_exec()?.0 != 0, "a handle of what is launched")?;
            graph.instantiate()?;
        }
        Ok(graph.reset()?)
    })
}

/// Captures a graph with some words of its own; they are 0 when it returns.
fn with_words<const N: usize>(
    context: &TestContext,
    allocator: &Shared,
    stream: &Stream,
    body: impl FnOnce(&mut Capture<'_>, [BufferKey; N], [DevicePtr; N]) -> warpool::Result<()>,
) -> CheckResult<(Graph, [DevicePtr; N])> {
    let mut graph = graph(context, allocator)?;
    let keys = graph.capture(stream, PLAIN, |capture| {
        let mut keys = Vec::new();
        for _ in 0..N {
            keys.push(capture.allocate(4)?);
        }
        let keys: [BufferKey; N] = keys.try_into().expect("as many as were made");
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
        let (mut counted, mut nested) = (0, 0);
        for round in 0..8_u32 {
            let (outer, within) = (round % 2, round / 2 % 2);
            context.write_sequence(flag, 4, outer, stream)?;
            context.write_sequence(inner, 4, within, stream)?;
            graph.replay(stream)?;
            stream.synchronize()?;
            counted += outer;
            nested += outer * within;
            let got = (word_at(context, count)?, word_at(context, both)?);
            expect_eq("how often the outer and the inner body ran", got, (counted, nested))?;
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
            expect_eq(&format!("what {rounds} rounds leave"), got, (0, 3 * rounds))?;
        }
        Ok(graph.reset()?)
    })
}
