//! Captures that fail on purpose, and wrong use of graphs: each has its own error, and everything is usable afterwards.

use std::sync::Arc;

use warpool::generator::{Generator, GeneratorError, Target};
use warpool::graph::{CaptureOptions, Graph, GraphError};
use warpool::memory::pools::PoolOptions;
use warpool::memory::{Allocate, MemPool, MemPoolId};
use warpool::{Error, Instance, Stream};
use warpool_driver::{ErrorCode, Pattern};

use super::helpers::{PLAIN, SharedAllocator, capture_sum, graph, with_allocator};
use crate::context::TestContext;
use crate::expect::{CheckError, CheckResult, expect, expect_eq};

const MIB: u64 = 1 << 20;

/// The call must fail with a graph's error, which is returned.
#[track_caller]
fn expect_graph_error<T: std::fmt::Debug>(what: &str, outcome: warpool::Result<T>) -> CheckResult<GraphError> {
    match outcome {
        Err(Error::Graph(error)) => Ok(error),
        other => Err(CheckError::Failed(format!("{what}: expected an error about graphs, got {other:?}"))),
    }
}

/// A capture and a replay must work after a failure.
fn expect_usable(
    context: &TestContext,
    allocator: &SharedAllocator,
    graph: &mut Graph,
    stream: &Stream,
) -> CheckResult {
    const BYTES: u64 = 64 << 10;
    let input = Arc::new(allocator.allocate(BYTES, stream)?);
    context.write_sequence(input.ptr(), BYTES, 500, stream)?;
    let key = graph.capture(stream, PLAIN, |capture| {
        capture.share(Arc::clone(&input))?;
        capture_sum(context, capture, input.ptr(), BYTES, 20)
    })?;
    graph.replay(stream)?;
    context.expect_sequence("the result of a graph after a failure", graph.buffer(key)?.ptr(), BYTES, 520, stream)?;
    expect(!context.instance().is_capturing(stream)?, "the stream no longer captures")?;
    Ok(graph.reset()?)
}

pub(super) fn invalidated_capture_names_the_call(context: &TestContext) -> CheckResult {
    with_allocator(context, |allocator, stream| {
        let mut graph = graph(context, allocator)?;
        type Invalidation<'a> = (&'static str, Box<dyn Fn() -> bool + 'a>);
        let invalidations: [Invalidation<'_>; 3] = [
            ("stream_query", Box::new(|| stream.query().is_err())),
            ("stream_synchronize", Box::new(|| stream.synchronize().is_err())),
            ("device_synchronize", Box::new(|| context.device().synchronize().is_err())),
        ];
        for (name, invalidate) in invalidations {
            let outcome = graph.capture(stream, PLAIN, |capture| {
                let key = capture.allocate(MIB)?;
                context.add_sequence(capture.buffer(key)?.ptr(), capture.buffer(key)?.ptr(), MIB, 1, stream)?;
                Ok(invalidate())
            });
            match expect_graph_error(name, outcome)? {
                GraphError::CaptureFailed { error } => {
                    let text = error.to_string();
                    expect_eq("the error code", error.code, ErrorCode::StreamCaptureInvalidated)?;
                    expect(text.contains(name), &format!("the error names {name}: {text}"))?;
                }
                other => return Err(CheckError::Failed(format!("{name}: {other}"))),
            }
            expect(!graph.is_captured() && graph.pools().is_empty(), "the graph is empty")?;
            expect_usable(context, allocator, &mut graph, stream)?;
        }
        Ok(())
    })
}

pub(super) fn error_or_missing_join_ends_the_capture(context: &TestContext) -> CheckResult {
    with_allocator(context, |allocator, stream| {
        let mut graph = graph(context, allocator)?;
        let failed = graph.capture(stream, PLAIN, |capture| {
            capture.allocate(30 * MIB)?;
            Err::<(), _>(Error::ThreadEnding)
        });
        expect_eq("the error of the captured work", failed, Err(Error::ThreadEnding))?;
        expect_usable(context, allocator, &mut graph, stream)?;
        // A fork without a join.
        let unjoined = graph.capture(stream, PLAIN, |capture| {
            let (fork, key) = (capture.fork()?, capture.allocate(4096)?);
            context.add_sequence(capture.buffer(key)?.ptr(), capture.buffer(key)?.ptr(), 4096, 1, &fork)
        });
        let error = expect_graph_error("unjoined work", unjoined)?;
        expect(matches!(error, GraphError::CaptureFailed { .. }), &format!("the capture failed: {error}"))?;
        expect_usable(context, allocator, &mut graph, stream)
    })
}

pub(super) fn wrong_use_returns_specific_errors(context: &TestContext) -> CheckResult {
    with_allocator(context, |allocator, stream| {
        let (main, other) = (context.device().default_stream()?, context.device().lease_stream()?);
        let mut graph = graph(context, allocator)?;
        let begin = |graph: &mut Graph, stream: &Stream, pool: Option<&MemPool>| {
            graph.capture_begin(stream, CaptureOptions { pool, ..PLAIN })
        };
        expect_eq("an end without a begin", graph.capture_end(stream), Err(GraphError::NotCapturing.into()))?;
        expect_eq("a replay before a capture", graph.replay(stream), Err(GraphError::NotCaptured.into()))?;
        let default = begin(&mut graph, &main, None);
        expect_eq("the default stream", default, Err(GraphError::DefaultStream.into()))?;
        let destroyed_pool = MemPool::new(allocator, context.device(), PoolOptions::default())?.id();
        let destroyed = MemPool::from_id(allocator, context.device(), destroyed_pool).map(drop);
        let device = context.device_id;
        let known = [Error::PoolReleased { pool: destroyed_pool }, Error::UnknownPool { pool: destroyed_pool, device }];
        expect(destroyed.is_err_and(|error| known.contains(&error)), "a destroyed pool is rejected by its id")?;
        let default_pool = MemPool::from_id(allocator, context.device(), MemPoolId::DEFAULT)?;
        let default_pool = begin(&mut graph, stream, Some(&default_pool));
        expect_eq("the default pool", default_pool, Err(GraphError::DefaultPool.into()))?;
        let other_instance = Instance::new(Arc::clone(&context.driver))?;
        let foreign = Generator::new(&other_instance.device(context.device().index())?)?;
        expect(!context.instance().is_capturing(stream)?, "no capture after the rejected calls")?;

        begin(&mut graph, stream, None)?;
        let during_capture = (|| -> CheckResult {
            let nested = begin(&mut graph, stream, None);
            expect_eq("a second begin", nested, Err(GraphError::AlreadyCapturing { stream: stream.id() }.into()))?;
            let wrong = GraphError::WrongStream { began: stream.id(), ended: other.id() };
            expect_eq("an end on another stream", graph.capture_end(&other), Err(wrong.into()))?;
            expect_eq("a replay during a capture", graph.replay(&other), Err(GraphError::StillCapturing.into()))?;
            let mut second = super::helpers::graph(context, allocator)?;
            let busy = GraphError::StreamCaptures { stream: stream.id() };
            expect_eq("a stream that already captures", begin(&mut second, stream, None), Err(busy.into()))?;
            let key = graph.scope()?.allocate(4096)?;
            let ptr = graph.buffer(key)?.ptr();
            let drawn = foreign.fill_bits(Target::part(graph.buffer(key)?, 0, 16), stream);
            expect_eq("a generator of another Instance", drawn, Err(GeneratorError::ForeignInstance.into()))?;
            let outside = graph.scope()?.fill(key, Pattern::U8(1), 1, &other);
            let expected = GraphError::StreamNotInCapture { stream: other.id() };
            expect_eq("a stream outside the capture", outside, Err(expected.into()))?;
            Ok(context.add_sequence(ptr, ptr, 4096, 1, stream)?)
        })();
        // None of these errors invalidated the capture.
        let ended = graph.capture_end(stream);
        during_capture?;
        ended?;
        graph.replay(stream)?;
        expect_eq(
            "a begin on a captured graph",
            begin(&mut graph, stream, None),
            Err(GraphError::AlreadyCaptured.into()),
        )?;
        expect_eq("the raw handle of a graph that was not kept", graph.raw(), Err(GraphError::NotKept.into()))?;
        graph.reset()?;
        expect_usable(context, allocator, &mut graph, stream)?;
        drop(foreign);
        Ok(other_instance.close()?)
    })
}
