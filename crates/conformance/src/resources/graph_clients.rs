//! Generators, polling threads, external events and graphed callables in captures. Part of the suite `graph`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use warpool::generator::Generator;
use warpool::graph::{Call, Callable, CaptureOptions, Fallback, GraphError, GraphedCallable, GraphedOptions, Input};
use warpool::memory::{Allocate, DeviceBlock};
use warpool::{Error, EventOptions, Stream};
use warpool_driver::DevicePtr;

use super::helpers::{PLAIN, graph, philox_words, read_block_words, with_allocator};
use crate::context::TestContext;
use crate::expect::{CheckError, CheckResult, expect, expect_eq, expect_slice_eq};
use crate::sync::join;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

pub(super) fn replays_draw_the_eager_sequence(context: &TestContext) -> CheckResult {
    const COUNT: usize = 5000;
    with_allocator(context, |allocator, stream| {
        let generator = Generator::new(context.device())?;
        generator.set_seed(77)?;
        let blocks = [0; 2].map(|_| allocator.allocate(4 * COUNT as u64, stream));
        let [one, two] = blocks.map(|block| block.map(Arc::new));
        let (one, two) = (one?, two?);
        let mut graph = graph(context, allocator)?;
        graph.capture(stream, PLAIN, |capture| {
            for block in [&one, &two] {
                capture.share(Arc::clone(block))?;
                generator.fill_bits(&**block, stream)?;
            }
            Ok(())
        })?;
        let mut offset = 0;
        for round in 0..4 {
            // Eager draws between replays advance the sequence.
            for _ in 0..round {
                generator.reserve(4, stream)?;
                offset += 4;
            }
            graph.replay(stream)?;
            stream.synchronize()?;
            for block in [&one, &two] {
                let got = read_block_words(context, block)?;
                expect_slice_eq(&format!("numbers at {offset}"), &got, &philox_words(77, offset, COUNT))?;
                offset += 4;
            }
            expect_eq("the offset", generator.offset()?, offset)?;
        }
        Ok(graph.reset()?)
    })
}

pub(super) fn two_graphs_share_a_generator_on_two_streams(context: &TestContext) -> CheckResult {
    const COUNT: usize = 1000;
    const ROUNDS: u64 = 8;
    with_allocator(context, |allocator, stream| {
        let other = context.device().lease_stream()?;
        let generator = Generator::new(context.device())?;
        generator.set_seed(5)?;
        let mut graphs = Vec::new();
        for stream in [stream, &*other] {
            let mut graph = graph(context, allocator)?;
            let key = graph.capture(stream, PLAIN, |capture| {
                let key = capture.allocate(4 * COUNT as u64)?;
                generator.fill_bits(capture.buffer(key)?, stream)?;
                Ok(key)
            })?;
            let copies = (0..ROUNDS).map(|_| allocator.allocate(4 * COUNT as u64, stream));
            let copies = copies.collect::<warpool::Result<Vec<_>>>()?;
            graphs.push((graph, key, copies, stream.clone()));
        }
        // The launches of one stream are all pending while those of the other run.
        context.keep_stream_busy(&other)?;
        for round in 0..ROUNDS as usize {
            for (graph, key, copies, stream) in &graphs {
                graph.replay(stream)?;
                let (to, from) = (copies[round].ptr(), graph.buffer(*key)?.ptr());
                context.driver.copy(to.into(), from.into(), 4 * COUNT as u64, stream.id())?;
            }
        }
        context.device().synchronize()?;
        for round in 0..ROUNDS {
            for ((_, _, copies, _), index) in graphs.iter().zip(0..) {
                let (got, offset) = (read_block_words(context, &copies[round as usize])?, 4 * (2 * round + index));
                expect_slice_eq(
                    &format!("numbers of graph {index} at {offset}"),
                    &got,
                    &philox_words(5, offset, COUNT),
                )?;
            }
        }
        Ok(graphs.iter_mut().try_for_each(|(graph, ..)| graph.reset())?)
    })
}

pub(super) fn pollers_do_not_invalidate_captures(context: &TestContext) -> CheckResult {
    const BYTES: u64 = 64 * KIB;
    with_allocator(context, |allocator, stream| {
        let (watched, mut graph) = (context.device().lease_stream()?, graph(context, allocator)?);
        let (stop, queries) = (AtomicBool::new(false), AtomicU64::new(0));
        let data = Arc::new(allocator.allocate(BYTES, stream)?);
        context.write_sequence(data.ptr(), BYTES, 0, stream)?;
        std::thread::scope(|scope| -> CheckResult {
            let poller = scope.spawn(|| -> CheckResult {
                while !stop.load(Ordering::Acquire) {
                    let mut event = context.instance().event();
                    event.record(&watched)?;
                    let polling = context.instance().polling();
                    polling.query(&event)?;
                    drop(polling);
                    queries.fetch_add(1, Ordering::AcqRel);
                }
                Ok(())
            });
            let captured = (|| -> CheckResult {
                for round in 1..=50 {
                    let before = queries.load(Ordering::Acquire);
                    graph.capture(stream, PLAIN, |capture| {
                        capture.share(Arc::clone(&data))?;
                        // The other thread queries at least once during the capture.
                        while queries.load(Ordering::Acquire) < before + 2 && !poller.is_finished() {
                            std::thread::yield_now();
                        }
                        context.add_sequence(data.ptr(), data.ptr(), BYTES, 1, stream)
                    })?;
                    graph.replay(stream)?;
                    context.expect_sequence(
                        "the result of a graph captured while another thread polls",
                        data.ptr(),
                        BYTES,
                        round,
                        stream,
                    )?;
                    graph.reset()?;
                }
                Ok(())
            })();
            stop.store(true, Ordering::Release);
            join(poller)?;
            captured
        })?;
        // A guard that is held for long delays captures; a timeout ends the wait.
        let polling = context.instance().polling();
        let outcome = graph.capture(stream, PLAIN, |_| Ok(()));
        expect_eq("a capture by a polling thread", outcome, Err(GraphError::PollsItself.into()))?;
        let timeout = CaptureOptions { poller_timeout: Some(Duration::from_millis(1)), ..PLAIN };
        let outcome = std::thread::scope(|scope| {
            let capture = scope.spawn(|| graph.capture(stream, timeout, |_| Ok(())));
            join(capture)
        });
        let timed_out = matches!(outcome, Err(Error::Graph(GraphError::PollersBusy { pollers: 1, .. })));
        expect(timed_out, &format!("the capture times out: {outcome:?}"))?;
        drop(polling);
        graph.capture(stream, timeout, |_| Ok(()))?;
        Ok(graph.reset()?)
    })
}

pub(super) fn external_events_order_replays(context: &TestContext) -> CheckResult {
    const BYTES: u64 = MIB;
    with_allocator(context, |allocator, stream| {
        let (before, after) = (context.device().lease_stream()?, context.device().lease_stream()?);
        let external = EventOptions { external: true, ..EventOptions::default() };
        let (mut ready, mut done) =
            (context.instance().event_with(external)?, context.instance().event_with(external)?);
        ready.create(context.device())?;
        let [input, middle, output] = [&*before, stream, &*after].map(|stream| allocator.allocate(BYTES, stream));
        let (input, middle, output) = (Arc::new(input?), Arc::new(middle?), Arc::new(output?));
        context.device().synchronize()?;
        let mut graph = graph(context, allocator)?;
        graph.capture(stream, PLAIN, |capture| {
            capture.share(Arc::clone(&input))?;
            capture.share(Arc::clone(&middle))?;
            stream.wait_event(&ready)?;
            context.add_sequence(middle.ptr(), input.ptr(), BYTES, 10, stream)?;
            done.record(stream)
        })?;
        for round in 0..3 {
            // The graph is launched long before the event that it waits for is complete.
            context.keep_stream_busy(&before)?;
            context.write_sequence(input.ptr(), BYTES, 1000 * round, &before)?;
            ready.record(&before)?;
            graph.replay(stream)?;
            done.wait(&after)?;
            context.add_sequence(output.ptr(), middle.ptr(), BYTES, 1, &after)?;
            context.expect_sequence(
                "the result ordered by two events",
                output.ptr(),
                BYTES,
                1000 * round + 11,
                &after,
            )?;
            context.device().synchronize()?;
        }
        Ok(graph.reset()?)
    })
}

/// Adds 7 to its input, with a temporary. A shape is a size in KiB.
struct AddSeven<'a> {
    context: &'a TestContext,
    /// A shape whose work synchronizes the stream, which cannot be captured.
    synchronizing_shape: u64,
}

impl Callable for AddSeven<'_> {
    type Shape = u64;

    fn input_bytes(&self, &kib: &u64) -> Vec<u64> {
        vec![kib * KIB]
    }

    fn run(&self, call: &Call<'_, u64>) -> warpool::Result<Vec<DeviceBlock>> {
        let (stream, bytes, input) = (call.stream(), call.shape() * KIB, call.inputs()[0]);
        if *call.shape() == self.synchronizing_shape {
            stream.synchronize()?;
        }
        let between = call.allocator().allocate(bytes, stream)?;
        let output = call.allocator().allocate(bytes, stream)?;
        self.context.add_sequence(between.ptr(), input.ptr, bytes, 3, stream)?;
        self.context.add_sequence(output.ptr(), between.ptr(), bytes, 4, stream)?;
        Ok(vec![output])
    }
}

pub(super) fn graphed_callable_replays_the_graph_of_its_shape(context: &TestContext) -> CheckResult {
    const SYNCHRONIZING: u64 = 300;
    with_allocator(context, |allocator, stream| {
        let (work, other) =
            (AddSeven { context, synchronizing_shape: SYNCHRONIZING }, context.device().lease_stream()?);
        let shapes = [64, 12 << 10, 2 << 10, SYNCHRONIZING];
        let options = GraphedOptions::default();
        let mut graphed = GraphedCallable::new(allocator, context.device(), work, shapes, options)?;
        let reports = graphed.reports().iter().map(|it| (it.shape, it.bytes_added, it.failed.is_some()));
        let want = [(12 << 10, 24 * MIB, false), (2 << 10, 0, false), (SYNCHRONIZING, 0, true), (64, 2 * MIB, false)];
        expect_slice_eq(
            "shapes, bytes that each adds, and whether its capture failed",
            &reports.collect::<Vec<_>>(),
            &want,
        )?;
        for round in 0..12_u32 {
            let shape = [64, 12 << 10, 2 << 10][round as usize % 3];
            let stream: &Stream = if round % 2 == 0 { stream } else { &other };
            let input = allocator.allocate(shape * KIB, stream)?;
            context.write_sequence(input.ptr(), shape * KIB, 100 * round, stream)?;
            let result = graphed.call(&shape, &[Input::from(&input)], stream)?;
            expect_eq("the shape of the replayed graph", result.replayed().copied(), Some(shape))?;
            let output = result.outputs().next().map_or(DevicePtr(0), DeviceBlock::ptr);
            context.expect_sequence("the output", output, shape * KIB, 100 * round + 7, stream)?;
        }
        for (shape, why) in [(128, "no captured shape"), (SYNCHRONIZING, "stream_synchronize")] {
            let input = allocator.allocate(shape * KIB, stream)?;
            context.write_sequence(input.ptr(), shape * KIB, 9, stream)?;
            let result = graphed.call(&shape, &[Input::from(&input)], stream)?;
            let reason = result.fallback().map(Fallback::to_string).unwrap_or_default();
            expect(reason.contains(why), &format!("the reason contains {why:?}: {reason:?}"))?;
            let output = result.outputs().next().map_or(DevicePtr(0), DeviceBlock::ptr);
            context.expect_sequence("the output without a graph", output, shape * KIB, 16, stream)?;
        }
        match graphed.call(&64, &[], stream) {
            Err(Error::Graph(GraphError::CallInputs { .. })) => {}
            other => return Err(CheckError::Failed(format!("a call without its input: {other:?}"))),
        }
        graphed.close()?;
        Ok(())
    })
}
