//! The allocator while streams capture: where memory comes from, which frees wait, and what a graph may reuse.

use crate::common::memory::{FIRST, GIB, MIB, TestContext};
use warpool::driver::{
    Call, CaptureMode, CaptureState, Captures, ErrorCode, EventOptions, EventScope, Events, ForeignStream, Graphs,
    InstantiateOptions, StreamId, StreamOptions, Streams,
};
use warpool::memory::pools::Route;
use warpool::memory::raw::Request;
use warpool::memory::report::HistoryOptions;
use warpool::memory::{DeviceAllocator, MemPoolId};
use warpool::{Error, Stream};

/// A pool for a graph, and a capture on `stream` that is routed to it.
fn begin(context: &TestContext, stream: &Stream) -> MemPoolId {
    let pool = context.pools().create_graph_pool(FIRST).unwrap();
    let capture = context.begin_capture(stream);
    context.pools().begin_routing(FIRST, pool, Route::Capture(capture)).unwrap();
    pool
}

fn end(context: &TestContext, stream: &Stream, pool: MemPoolId) -> warpool::driver::GraphExecId {
    context.pools().end_routing(FIRST, pool).unwrap();
    context.end_capture(stream)
}

/// A capture may allocate from the driver, and replays use that memory.
#[test]
fn a_capture_allocates_from_its_pool() {
    for settings in ["", "expandable_segments:True"] {
        let context = TestContext::new(settings);
        let stream = context.side_stream();
        let cached = context.alloc_on(&stream, 30 * MIB);
        context.free(cached);
        let pool = begin(&context, &stream);
        let block = context.alloc_on(&stream, 30 * MIB);
        assert_ne!(block.ptr, cached.ptr);
        context.fill(block, 42, &stream);
        // Other streams are not routed.
        let outside = context.alloc(30 * MIB);
        let exec = end(&context, &stream, pool);
        let of_pool = context.segments_of(pool);
        assert_eq!(of_pool.len(), 1);
        assert!(of_pool[0].address <= block.ptr.0 && of_pool[0].pool == pool);
        context.free(outside);
        context.trim();
        context.sim.graph_launch(exec, stream.id()).unwrap();
        context.assert_holds(block, 42);
        context.finish();
    }
}

/// A foreign stream that is adopted while it is capturing: the driver refuses to describe it then.
#[test]
fn a_stream_that_is_adopted_in_a_capture_gets_memory() {
    for (settings, forks) in
        [("", false), ("", true), ("expandable_segments:True", false), ("expandable_segments:True", true)]
    {
        let context = TestContext::new(settings);
        let sim = &context.sim;
        let order = |earlier: StreamId, later: StreamId| {
            let event = sim.event_create(FIRST, EventOptions::default()).unwrap();
            sim.event_record(event, earlier, EventScope::Plain).unwrap();
            sim.stream_wait_event(later, event, EventScope::Plain).unwrap();
        };
        let first = sim.create_foreign_stream(FIRST, StreamOptions::default()).unwrap();
        let fresh = if forks { sim.create_foreign_stream(FIRST, StreamOptions::default()).unwrap() } else { first };
        let pool = context.pools().create_graph_pool(FIRST).unwrap();
        sim.capture_begin(first, CaptureMode::Global).unwrap();
        context.pools().capture_began(FIRST).unwrap();
        let CaptureState::Active(capture) = sim.capture_state(first).unwrap() else {
            panic!("the stream should capture")
        };
        context.pools().begin_routing(FIRST, pool, Route::Capture(capture)).unwrap();
        if forks {
            order(first, fresh);
        }
        let raw = sim.stream_handle(fresh).unwrap().raw;
        // SAFETY: the simulation does not dereference handles.
        let stream = Stream::external(&context.device(), unsafe { ForeignStream::new(raw) }).unwrap();
        let refused = sim.stream_info(stream.id()).map_err(|error| error.code);
        assert_eq!((refused, stream.raw()), (Err(ErrorCode::StreamCaptureUnsupported), Ok(raw)));
        let block = context.alloc_on(&stream, 30 * MIB);
        context.fill(block, 42, &stream);
        if forks {
            order(fresh, first);
        }
        context.pools().end_routing(FIRST, pool).unwrap();
        let graph = sim.capture_end(first).unwrap();
        context.pools().capture_ended(FIRST).unwrap();
        assert_eq!(stream.info().unwrap().raw, raw, "after the capture");
        let exec = sim.graph_instantiate(graph, InstantiateOptions::default()).unwrap();
        sim.graph_launch(exec, first).unwrap();
        context.assert_holds(block, 42);
        context.finish();
    }
}

#[test]
fn a_free_in_a_capture_is_reused_by_its_stream() {
    let context = TestContext::new("");
    let stream = context.side_stream();
    let pool = begin(&context, &stream);
    let block = context.alloc_on(&stream, 4 * MIB);
    context.fill(block, 1, &stream);
    context.free(block);
    let again = context.alloc_on(&stream, 4 * MIB);
    assert_eq!(again.ptr, block.ptr);
    context.fill(again, 2, &stream);
    let exec = end(&context, &stream, pool);
    context.sim.graph_launch(exec, stream.id()).unwrap();
    context.assert_holds(again, 2);
    context.finish();
}

/// test_graph_record_stream: a block that another stream used is reused after the end of the capture.
#[test]
fn a_captured_use_defers_the_free_to_the_end_of_the_capture() {
    let context = TestContext::new("");
    let (stream, side) = (context.side_stream(), context.side_stream());
    let pool = begin(&context, &stream);
    let block = context.alloc_on(&stream, 4 * MIB);
    side.wait_stream(&stream).unwrap();
    context.fill(block, 1, &side);
    context.record_use(block, &side);
    stream.wait_stream(&side).unwrap();
    let records = context.sim.call_count(Call::EventRecord);
    context.free(block);
    assert_eq!(context.sim.call_count(Call::EventRecord), records, "no event is recorded in a capture");
    let other = context.alloc_on(&stream, 4 * MIB);
    assert_ne!(other.ptr, block.ptr);
    assert_eq!(context.stats().active.all.current, 2);
    let exec = end(&context, &stream, pool);
    context.free(context.alloc(1));
    assert_eq!(context.stats().active.all.current, 1, "reclaimed after the capture");
    assert_eq!(context.alloc_in_on(pool, &stream, 4 * MIB).ptr, block.ptr);
    context.sim.graph_launch(exec, stream.id()).unwrap();
    context.finish();
}

/// TestMemPool.test_graph_capture_reclaim_2_streams: if the graph orders all uses before, the block is reused in the
/// capture.
#[test]
fn joined_uses_are_reused_in_the_capture() {
    for (reuse, joined) in [(true, true), (true, false), (false, true)] {
        let context = TestContext::new(if reuse { "graph_capture_record_stream_reuse:True" } else { "" });
        let (stream, side) = (context.side_stream(), context.side_stream());
        let pool = begin(&context, &stream);
        let block = context.alloc_on(&stream, 4 * MIB);
        context.fill(block, 1, &stream);
        side.wait_stream(&stream).unwrap();
        context.fill(block, 2, &side);
        context.record_use(block, &side);
        if joined {
            stream.wait_stream(&side).unwrap();
        }
        context.free(block);
        let next = context.alloc_on(&stream, 4 * MIB);
        assert_eq!(next.ptr == block.ptr, reuse && joined, "reuse {reuse}, joined {joined}");
        context.fill(next, 3, &stream);
        stream.wait_stream(&side).unwrap();
        // Everything is joined now.
        let last = context.alloc_on(&stream, 4 * MIB);
        assert_eq!(last.ptr == block.ptr, reuse && !joined, "reuse {reuse}, joined {joined}");
        context.fill(last, 4, &stream);
        let exec = end(&context, &stream, pool);
        for _ in 0..3 {
            context.sim.graph_launch(exec, stream.id()).unwrap();
        }
        context.assert_holds(next, 3);
        context.assert_holds(last, 4);
        context.finish();
    }
}

/// TestMemPool.test_graph_capture_reclaim_4_streams.
#[test]
fn all_uses_must_be_joined_for_reuse() {
    let context = TestContext::new("graph_capture_record_stream_reuse:True");
    let stream = context.side_stream();
    let sides = [0; 3].map(|_| context.side_stream());
    let pool = begin(&context, &stream);
    let block = context.alloc_on(&stream, 4 * MIB);
    for (at, side) in sides.iter().enumerate() {
        side.wait_stream(&stream).unwrap();
        context.sim_fill_on(block.ptr.0 + at as u64 * 1024, 1, side);
        context.record_use(block, side);
    }
    context.free(block);
    for side in &sides {
        let early = context.alloc_on(&stream, 4 * MIB);
        assert_ne!(early.ptr, block.ptr);
        context.fill(early, 5, &stream);
        stream.wait_stream(side).unwrap();
    }
    assert_eq!(context.alloc_on(&stream, 4 * MIB).ptr, block.ptr);
    let exec = end(&context, &stream, pool);
    context.sim.graph_launch(exec, stream.id()).unwrap();
    context.finish();
}

/// TestMemPool.test_graph_capture_pre_capture_stream_use: the graph does not order a use before the capture.
#[test]
fn a_use_before_the_capture_needs_a_fence_after_it() {
    for settings in ["", "graph_capture_record_stream_reuse:True"] {
        let context = TestContext::new(settings);
        let (stream, side) = (context.side_stream(), context.side_stream());
        context.pause_stream(&side);
        let block = context.alloc_on(&stream, 4 * MIB);
        context.fill(block, 1, &side);
        context.record_use(block, &side);
        let pool = begin(&context, &stream);
        context.free(block);
        let request = Request::new(FIRST, stream.id(), 4 * MIB).in_pool(MemPoolId::DEFAULT);
        let other = context.allocator.allocate_raw(request).unwrap();
        assert_ne!(other.ptr, block.ptr, "{settings}");
        end(&context, &stream, pool);
        assert_ne!(context.alloc_on(&stream, 4 * MIB).ptr, block.ptr, "the side stream still uses it");
        context.resume_stream(&side);
        assert_eq!(context.alloc_on(&stream, 4 * MIB).ptr, block.ptr);
        context.finish();
    }
}

/// A capture forbids event queries and waits in other streams, unless they are made in relaxed mode.
#[test]
fn requests_on_other_streams_do_not_invalidate_a_capture() {
    for settings in ["", "expandable_segments:True"] {
        let context = TestContext::with_capacity(GIB, settings);
        let (stream, side) = (context.side_stream(), context.side_stream());
        let pool = begin(&context, &stream);
        let captured = context.alloc_on(&stream, 100 * MIB);
        context.fill(captured, 8, &stream);
        let expect_valid = |what: &str| {
            let state = context.sim.capture_state(stream.id()).unwrap();
            assert!(matches!(state, CaptureState::Active(_)), "{what} with {settings:?}");
        };
        // Records and queries fences, and allocates from the driver.
        let block = context.alloc_on(&side, 600 * MIB);
        context.fill(block, 1, &side);
        let other = context.side_stream();
        other.wait_stream(&side).unwrap();
        context.record_use(block, &other);
        context.free(block);
        expect_valid("a free");
        // Waits for fences and releases everything.
        let more = context.alloc_on(&other, 700 * MIB);
        expect_valid("a retry");
        context.free(more);
        context.trim();
        expect_valid("a trim");
        let exec = end(&context, &stream, pool);
        context.sim.graph_launch(exec, stream.id()).unwrap();
        context.assert_holds(captured, 8);
        context.finish();
    }
}

#[test]
fn out_of_memory_in_a_capture_keeps_the_cache() {
    let context = TestContext::with_capacity(GIB, "");
    let stream = context.side_stream();
    let cached = context.alloc(600 * MIB);
    context.free(cached);
    let pool = begin(&context, &stream);
    let outcome = context.allocator.allocate_raw(Request::new(FIRST, stream.id(), 600 * MIB));
    let Err(Error::OutOfMemory(report)) = outcome else { panic!("{outcome:?}") };
    assert!(report.capturing);
    let stats = context.stats();
    assert_eq!((stats.num_ooms, stats.num_alloc_retries, stats.num_sync_all_streams), (1, 0, 0));
    assert_eq!(context.bytes_reserved(), 600 * MIB);
    // The capture can continue.
    let small = context.alloc_on(&stream, 100 * MIB);
    context.fill(small, 1, &stream);
    let exec = end(&context, &stream, pool);
    context.sim.graph_launch(exec, stream.id()).unwrap();
    context.assert_holds(small, 1);
    context.finish();
}

/// While the current stream of the calling thread is capturing, trim releases only memory of released pools.
#[test]
fn trim_on_a_capturing_stream_spares_the_default_pool() {
    let context = TestContext::new("");
    let stream = context.side_stream();
    let old = context.pools().create_graph_pool(FIRST).unwrap();
    let (private, cached) = (context.alloc_in(old, 30 * MIB), context.alloc(40 * MIB));
    context.free_all([private, cached]);
    context.pools().release_pool(FIRST, old).unwrap();
    let pool = begin(&context, &stream);
    {
        let _current = stream.enter();
        assert_eq!(context.trim(), 30 * MIB);
    }
    assert_eq!(context.trim(), 40 * MIB, "the current stream does not capture");
    end(&context, &stream, pool);
    context.finish();
}

#[test]
fn a_graph_pool_keeps_its_memory_while_in_use() {
    let context = TestContext::new("");
    let stream = context.side_stream();
    context.allocator.record_history(Some(HistoryOptions::default())).unwrap();
    let pool = begin(&context, &stream);
    assert_eq!(context.pools().pool_uses(FIRST, pool).unwrap(), 2);
    let block = context.alloc_on(&stream, 30 * MIB);
    context.fill(block, 6, &stream);
    context.free(block);
    let exec = end(&context, &stream, pool);
    assert_eq!(context.pools().pool_uses(FIRST, pool).unwrap(), 1);
    assert_eq!(context.trim(), 0);
    context.sim.graph_launch(exec, stream.id()).unwrap();
    context.device().synchronize().unwrap();
    context.sim.graph_exec_destroy(exec).unwrap();
    context.pools().release_pool(FIRST, pool).unwrap();
    assert_eq!(context.trim(), 30 * MIB);
    assert_eq!(context.pools().pool_uses(FIRST, pool), Err(Error::UnknownPool { pool, device: FIRST }));
    context.finish();
}

#[test]
fn a_capture_that_never_began_cannot_end() {
    let context = TestContext::new("");
    assert_eq!(context.pools().capture_ended(FIRST), Err(Error::NotCapturing { device: FIRST }));
    let stream = context.side_stream();
    let pool = begin(&context, &stream);
    end(&context, &stream, pool);
    assert_eq!(context.pools().capture_ended(FIRST), Err(Error::NotCapturing { device: FIRST }));
    context.finish();
}
