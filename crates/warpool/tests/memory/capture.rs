//! The allocator while streams capture: where memory comes from, which frees wait, and what a graph may reuse.

use crate::common::memory::{Bench, FIRST, GIB, MIB};
use warpool::driver::{
    Call, CaptureMode, CaptureState, Captures, ErrorCode, EventOptions, EventScope, Events, ForeignStream, Graphs,
    InstantiateOptions, StreamId, StreamOptions, Streams,
};
use warpool::memory::{DeviceAllocator, HistoryOptions, MemPoolId, Request, Route};
use warpool::{Error, Stream};

/// A pool for a graph, and a capture on `stream` that is routed to it.
fn begin(bench: &Bench, stream: &Stream) -> MemPoolId {
    let pool = bench.pools().create_graph_pool(FIRST).unwrap();
    let capture = bench.begin_capture(stream);
    bench.pools().begin_routing(FIRST, pool, Route::Capture(capture)).unwrap();
    pool
}

fn end(bench: &Bench, stream: &Stream, pool: MemPoolId) -> warpool::driver::GraphExecId {
    bench.pools().end_routing(FIRST, pool).unwrap();
    bench.end_capture(stream)
}

/// Memory can come from the driver in a capture, into the pool, and replays use it.
#[test]
fn a_capture_gets_memory_from_its_pool() {
    for settings in ["", "expandable_segments:True"] {
        let bench = Bench::new(settings);
        let stream = bench.side_stream();
        let cached = bench.alloc_on(&stream, 30 * MIB);
        bench.free(cached);
        let pool = begin(&bench, &stream);
        let block = bench.alloc_on(&stream, 30 * MIB);
        assert_ne!(block.ptr, cached.ptr);
        bench.fill(block, 42, &stream);
        // Others are not routed.
        let outside = bench.alloc(30 * MIB);
        let exec = end(&bench, &stream, pool);
        let of_pool = bench.segments_of(pool);
        assert_eq!(of_pool.len(), 1);
        assert!(of_pool[0].address <= block.ptr.0 && of_pool[0].pool == pool);
        bench.free(outside);
        bench.trim();
        bench.sim.graph_launch(exec, stream.id()).unwrap();
        bench.assert_holds(block, 42);
        bench.finish();
    }
}

/// A framework's stream that never allocated before: the capture begins on it, or comes to it by an event, and then it
/// is adopted. By then it does not say what it is.
#[test]
fn a_stream_that_is_adopted_in_a_capture_gets_memory() {
    for (settings, forks) in
        [("", false), ("", true), ("expandable_segments:True", false), ("expandable_segments:True", true)]
    {
        let bench = Bench::new(settings);
        let sim = &bench.sim;
        let order = |earlier: StreamId, later: StreamId| {
            let event = sim.event_create(FIRST, EventOptions::default()).unwrap();
            sim.event_record(event, earlier, EventScope::Plain).unwrap();
            sim.stream_wait_event(later, event, EventScope::Plain).unwrap();
        };
        let first = sim.create_foreign_stream(FIRST, StreamOptions::default()).unwrap();
        let fresh = if forks { sim.create_foreign_stream(FIRST, StreamOptions::default()).unwrap() } else { first };
        let pool = bench.pools().create_graph_pool(FIRST).unwrap();
        sim.capture_begin(first, CaptureMode::Global).unwrap();
        bench.pools().capture_began(FIRST).unwrap();
        let CaptureState::Active(capture) = sim.capture_state(first).unwrap() else { panic!("it should capture") };
        bench.pools().begin_routing(FIRST, pool, Route::Capture(capture)).unwrap();
        if forks {
            order(first, fresh);
        }
        let raw = sim.stream_handle(fresh).unwrap().raw;
        // SAFETY: a simulated driver follows no handle.
        let stream = Stream::external(&bench.device(), unsafe { ForeignStream::new(raw) }).unwrap();
        let refused = sim.stream_info(stream.id()).map_err(|error| error.code);
        assert_eq!((refused, stream.raw()), (Err(ErrorCode::StreamCaptureUnsupported), Ok(raw)));
        let block = bench.alloc_on(&stream, 30 * MIB);
        bench.fill(block, 42, &stream);
        if forks {
            order(fresh, first);
        }
        bench.pools().end_routing(FIRST, pool).unwrap();
        let graph = sim.capture_end(first).unwrap();
        bench.pools().capture_ended(FIRST).unwrap();
        assert_eq!(stream.info().unwrap().raw, raw, "now it says it");
        let exec = sim.graph_instantiate(graph, InstantiateOptions::default()).unwrap();
        sim.graph_launch(exec, first).unwrap();
        bench.assert_holds(block, 42);
        bench.finish();
    }
}

/// Without uses on other streams a free in a capture is at once reusable in it.
#[test]
fn a_plain_free_in_a_capture_is_reused() {
    let bench = Bench::new("");
    let stream = bench.side_stream();
    let pool = begin(&bench, &stream);
    let block = bench.alloc_on(&stream, 4 * MIB);
    bench.fill(block, 1, &stream);
    bench.free(block);
    let again = bench.alloc_on(&stream, 4 * MIB);
    assert_eq!(again.ptr, block.ptr);
    bench.fill(again, 2, &stream);
    let exec = end(&bench, &stream, pool);
    bench.sim.graph_launch(exec, stream.id()).unwrap();
    bench.assert_holds(again, 2);
    bench.finish();
}

/// test_graph_record_stream: with a use on another stream it waits for the end of the capture, and then for nothing.
#[test]
fn a_use_in_a_capture_defers_the_free_to_its_end() {
    let bench = Bench::new("");
    let (stream, side) = (bench.side_stream(), bench.side_stream());
    let pool = begin(&bench, &stream);
    let block = bench.alloc_on(&stream, 4 * MIB);
    side.wait_stream(&stream).unwrap();
    bench.fill(block, 1, &side);
    bench.record_use(block, &side);
    stream.wait_stream(&side).unwrap();
    let records = bench.sim.call_count(Call::EventRecord);
    bench.free(block);
    assert_eq!(bench.sim.call_count(Call::EventRecord), records, "nothing is recorded for it in a capture");
    let other = bench.alloc_on(&stream, 4 * MIB);
    assert_ne!(other.ptr, block.ptr);
    assert_eq!(bench.stats().active.all.current, 2);
    let exec = end(&bench, &stream, pool);
    bench.free(bench.alloc(1));
    assert_eq!(bench.stats().active.all.current, 1, "free as soon as the capture is over");
    assert_eq!(bench.alloc_in_on(pool, &stream, 4 * MIB).ptr, block.ptr);
    bench.sim.graph_launch(exec, stream.id()).unwrap();
    bench.finish();
}

/// TestMemPool.test_graph_capture_reclaim_2_streams: where the graph puts all uses first, the block is reused in the
/// capture.
#[test]
fn joined_uses_are_reused_in_the_capture() {
    for (reuse, joined) in [(true, true), (true, false), (false, true)] {
        let bench = Bench::new(if reuse { "graph_capture_record_stream_reuse:True" } else { "" });
        let (stream, side) = (bench.side_stream(), bench.side_stream());
        let pool = begin(&bench, &stream);
        let block = bench.alloc_on(&stream, 4 * MIB);
        bench.fill(block, 1, &stream);
        side.wait_stream(&stream).unwrap();
        bench.fill(block, 2, &side);
        bench.record_use(block, &side);
        if joined {
            stream.wait_stream(&side).unwrap();
        }
        bench.free(block);
        let next = bench.alloc_on(&stream, 4 * MIB);
        assert_eq!(next.ptr == block.ptr, reuse && joined, "reuse {reuse}, joined {joined}");
        bench.fill(next, 3, &stream);
        stream.wait_stream(&side).unwrap();
        // Joined by now, whatever it was before.
        let last = bench.alloc_on(&stream, 4 * MIB);
        assert_eq!(last.ptr == block.ptr, reuse && !joined, "reuse {reuse}, joined {joined}");
        bench.fill(last, 4, &stream);
        let exec = end(&bench, &stream, pool);
        for _ in 0..3 {
            bench.sim.graph_launch(exec, stream.id()).unwrap();
        }
        bench.assert_holds(next, 3);
        bench.assert_holds(last, 4);
        bench.finish();
    }
}

/// TestMemPool.test_graph_capture_reclaim_4_streams: every one of several uses must lie before.
#[test]
fn all_of_several_uses_must_be_joined() {
    let bench = Bench::new("graph_capture_record_stream_reuse:True");
    let stream = bench.side_stream();
    let sides = [0; 3].map(|_| bench.side_stream());
    let pool = begin(&bench, &stream);
    let block = bench.alloc_on(&stream, 4 * MIB);
    for (at, side) in sides.iter().enumerate() {
        side.wait_stream(&stream).unwrap();
        bench.sim_fill_on(block.ptr.0 + at as u64 * 1024, 1, side);
        bench.record_use(block, side);
    }
    bench.free(block);
    for side in &sides {
        let early = bench.alloc_on(&stream, 4 * MIB);
        assert_ne!(early.ptr, block.ptr);
        bench.fill(early, 5, &stream);
        stream.wait_stream(side).unwrap();
    }
    assert_eq!(bench.alloc_on(&stream, 4 * MIB).ptr, block.ptr);
    let exec = end(&bench, &stream, pool);
    bench.sim.graph_launch(exec, stream.id()).unwrap();
    bench.finish();
}

/// TestMemPool.test_graph_capture_pre_capture_stream_use: a use before the capture is not the graph's, and needs a mark
/// afterwards.
#[test]
fn a_use_before_the_capture_is_still_waited_for() {
    for settings in ["", "graph_capture_record_stream_reuse:True"] {
        let bench = Bench::new(settings);
        let (stream, side) = (bench.side_stream(), bench.side_stream());
        bench.pause_stream(&side);
        let block = bench.alloc_on(&stream, 4 * MIB);
        bench.fill(block, 1, &side);
        bench.record_use(block, &side);
        let pool = begin(&bench, &stream);
        bench.free(block);
        let request = Request::new(FIRST, stream.id(), 4 * MIB).in_pool(MemPoolId::DEFAULT);
        let other = bench.allocator.allocate_raw(request).unwrap();
        assert_ne!(other.ptr, block.ptr, "{settings}");
        end(&bench, &stream, pool);
        assert_ne!(bench.alloc_on(&stream, 4 * MIB).ptr, block.ptr, "still busy there");
        bench.let_go(&side);
        assert_eq!(bench.alloc_on(&stream, 4 * MIB).ptr, block.ptr);
        bench.finish();
    }
}

/// A capture elsewhere forbids much, but not to the allocator: it asks and waits without breaking it.
#[test]
fn requests_of_others_do_not_break_a_capture() {
    for settings in ["", "expandable_segments:True"] {
        let bench = Bench::with_capacity(GIB, settings);
        let (stream, side) = (bench.side_stream(), bench.side_stream());
        let pool = begin(&bench, &stream);
        let captured = bench.alloc_on(&stream, 100 * MIB);
        bench.fill(captured, 8, &stream);
        let whole = |what: &str| {
            let state = bench.sim.capture_state(stream.id()).unwrap();
            assert!(matches!(state, CaptureState::Active(_)), "{what} with {settings:?}");
        };
        // Marks, questions about them, and memory from the driver.
        let block = bench.alloc_on(&side, 600 * MIB);
        bench.fill(block, 1, &side);
        let other = bench.side_stream();
        other.wait_stream(&side).unwrap();
        bench.record_use(block, &other);
        bench.free(block);
        whole("a free");
        // Waits for marks and gives everything back.
        let more = bench.alloc_on(&other, 700 * MIB);
        whole("a retry");
        bench.free(more);
        bench.trim();
        whole("a trim");
        let exec = end(&bench, &stream, pool);
        bench.sim.graph_launch(exec, stream.id()).unwrap();
        bench.assert_holds(captured, 8);
        bench.finish();
    }
}

/// A request in a capture that runs out does not give the cache back.
#[test]
fn running_out_in_a_capture_keeps_the_cache() {
    let bench = Bench::with_capacity(GIB, "");
    let stream = bench.side_stream();
    let cached = bench.alloc(600 * MIB);
    bench.free(cached);
    let pool = begin(&bench, &stream);
    let outcome = bench.allocator.allocate_raw(Request::new(FIRST, stream.id(), 600 * MIB));
    let Err(Error::OutOfMemory(report)) = outcome else { panic!("{outcome:?}") };
    assert!(report.capturing);
    let stats = bench.stats();
    assert_eq!((stats.num_ooms, stats.num_alloc_retries, stats.num_sync_all_streams), (1, 0, 0));
    assert_eq!(bench.bytes_reserved(), 600 * MIB);
    // The capture goes on, and so does everything else.
    let small = bench.alloc_on(&stream, 100 * MIB);
    bench.fill(small, 1, &stream);
    let exec = end(&bench, &stream, pool);
    bench.sim.graph_launch(exec, stream.id()).unwrap();
    bench.assert_holds(small, 1);
    bench.finish();
}

/// While the calling thread's current stream captures, trim leaves the default pool alone but not pools that nobody
/// uses.
#[test]
fn trim_in_a_capture_spares_the_default_pool() {
    let bench = Bench::new("");
    let stream = bench.side_stream();
    let old = bench.pools().create_graph_pool(FIRST).unwrap();
    let (private, cached) = (bench.alloc_in(old, 30 * MIB), bench.alloc(40 * MIB));
    bench.free_all([private, cached]);
    bench.pools().release_pool(FIRST, old).unwrap();
    let pool = begin(&bench, &stream);
    {
        let _current = stream.enter();
        assert_eq!(bench.trim(), 30 * MIB);
    }
    assert_eq!(bench.trim(), 40 * MIB, "the current stream does not capture");
    end(&bench, &stream, pool);
    bench.finish();
}

/// The pool of a graph keeps its memory until nobody uses it.
#[test]
fn a_graphs_pool_keeps_its_memory_while_used() {
    let bench = Bench::new("");
    let stream = bench.side_stream();
    bench.allocator.record_history(Some(HistoryOptions::default())).unwrap();
    let pool = begin(&bench, &stream);
    assert_eq!(bench.pools().pool_uses(FIRST, pool).unwrap(), 2);
    let block = bench.alloc_on(&stream, 30 * MIB);
    bench.fill(block, 6, &stream);
    bench.free(block);
    let exec = end(&bench, &stream, pool);
    assert_eq!(bench.pools().pool_uses(FIRST, pool).unwrap(), 1);
    assert_eq!(bench.trim(), 0);
    bench.sim.graph_launch(exec, stream.id()).unwrap();
    bench.device().synchronize().unwrap();
    bench.sim.graph_exec_destroy(exec).unwrap();
    bench.pools().release_pool(FIRST, pool).unwrap();
    assert_eq!(bench.trim(), 30 * MIB);
    assert_eq!(bench.pools().pool_uses(FIRST, pool), Err(Error::UnknownPool { pool, device: FIRST }));
    bench.finish();
}

#[test]
fn a_capture_that_never_began_cannot_end() {
    let bench = Bench::new("");
    assert_eq!(bench.pools().capture_ended(FIRST), Err(Error::NotCapturing { device: FIRST }));
    let stream = bench.side_stream();
    let pool = begin(&bench, &stream);
    end(&bench, &stream, pool);
    assert_eq!(bench.pools().capture_ended(FIRST), Err(Error::NotCapturing { device: FIRST }));
    bench.finish();
}
