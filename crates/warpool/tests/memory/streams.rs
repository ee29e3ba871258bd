//! Blocks that several streams use, outside of captures: no reuse before all are done, and none later than that.

use crate::common::memory::{Bench, FIRST, GIB, MIB};
use warpool::Stream;
use warpool::driver::sim::{HazardKind, SimConfig};
use warpool::driver::{Call, DeviceId, Devices, StreamId, StreamOptions, Streams};
use warpool::memory::{Action, Allocate, Allocation, BlockState, DeviceAllocator, HistoryOptions, SnapshotOptions};

/// Queues a fill on a held stream, behind what the block's own stream has, notes the use, and frees the block.
fn use_and_free(bench: &Bench, block: Allocation, streams: &[&Stream]) {
    for stream in streams {
        stream.wait_stream(&bench.main).unwrap();
        bench.fill(block, 1, stream);
        bench.record_use(block, stream);
    }
    bench.free(block);
}

/// TestCuda.test_record_stream.
#[test]
fn a_block_is_not_reused_while_another_stream_is_busy() {
    for settings in ["", "expandable_segments:True"] {
        let bench = Bench::new(settings);
        let side = bench.side_stream();
        bench.pause_stream(&side);
        let block = bench.alloc(4 * MIB);
        use_and_free(&bench, block, &[&side]);
        let other = bench.alloc(4 * MIB);
        assert_ne!(other.ptr, block.ptr, "the side stream still uses it");
        bench.fill(other, 2, &bench.main);
        bench.let_go(&side);
        let again = bench.alloc(4 * MIB);
        assert_eq!(again.ptr, block.ptr);
        bench.fill(again, 3, &bench.main);
        bench.assert_holds(other, 2);
        bench.assert_holds(again, 3);
        bench.finish();
    }
}

/// TestCuda.test_record_stream_on_shifted_view: a use of a part protects the whole.
#[test]
fn a_use_of_a_part_protects_the_whole() {
    let bench = Bench::new("");
    let side = bench.side_stream();
    bench.pause_stream(&side);
    let block = bench.alloc(8 * MIB);
    side.wait_stream(&bench.main).unwrap();
    bench.sim_fill_on(block.ptr.0 + 4 * MIB, 1, &side);
    bench.record_use(block, &side);
    bench.free(block);
    let front = bench.alloc(4 * MIB);
    assert!(front.ptr.0 >= block.ptr.0 + 8 * MIB || front.ptr.0 < block.ptr.0);
    bench.let_go(&side);
    bench.finish();
}

#[test]
fn a_use_on_its_own_stream_is_nothing() {
    let bench = Bench::new("");
    let block = bench.alloc(MIB);
    bench.record_use(block, &bench.main);
    let calls = bench.sim.calls_made();
    bench.free(block);
    assert_eq!((bench.alloc(MIB).ptr, bench.sim.calls_made()), (block.ptr, calls));
    assert_eq!(bench.sim.object_counts().events, 0);
    bench.finish();
}

/// What callers have drops at the call, what is active when the streams are done.
#[test]
fn counters_and_history_show_the_wait() {
    let bench = Bench::new("");
    let side = bench.side_stream();
    bench.allocator.record_history(Some(HistoryOptions::default())).unwrap();
    bench.pause_stream(&side);
    let block = bench.alloc(4_000_000);
    use_and_free(&bench, block, &[&side]);
    let stats = bench.stats();
    assert_eq!((stats.allocation.all.current, stats.allocated_bytes.all.current), (0, 0));
    assert_eq!((stats.active.all.current, stats.active_bytes.all.current), (1, block.bytes));
    assert_eq!(stats.requested_bytes.all.current, 4_000_000);
    let segment = &bench.segments()[0];
    assert_eq!(segment.blocks[0].state, BlockState::ActivePendingFree);
    assert_eq!((segment.allocated_size, segment.active_size), (0, block.bytes));
    let actions = || {
        let trace = bench.allocator.snapshot(SnapshotOptions::default()).unwrap().traces.remove(0);
        trace.iter().map(|entry| entry.action).filter(|&action| action != Action::Snapshot).collect::<Vec<_>>()
    };
    assert_eq!(actions(), [Action::SegmentAlloc, Action::Alloc, Action::FreeRequested]);
    bench.let_go(&side);
    bench.free(bench.alloc(100));
    let stats = bench.stats();
    assert_eq!((stats.active.all.current, stats.requested_bytes.all.current), (0, 0));
    assert_eq!(actions()[3], Action::FreeCompleted);
    bench.finish();
}

#[test]
fn all_streams_must_be_done() {
    let bench = Bench::new("");
    let (one, two) = (bench.side_stream(), bench.side_stream());
    bench.pause_stream(&one);
    bench.pause_stream(&two);
    let block = bench.alloc(4 * MIB);
    one.wait_stream(&bench.main).unwrap();
    two.wait_stream(&bench.main).unwrap();
    for (stream, offset) in [(&one, 0), (&two, MIB)] {
        bench.sim_fill_on(block.ptr.0 + offset, 1, stream);
        bench.record_use(block, stream);
        bench.record_use(block, stream);
    }
    bench.free(block);
    bench.let_go(&one);
    assert_ne!(bench.alloc(4 * MIB).ptr, block.ptr);
    bench.let_go(&two);
    assert_eq!(bench.alloc(4 * MIB).ptr, block.ptr);
    bench.finish();
}

#[test]
fn a_stream_that_is_behind_holds_back_only_its_own() {
    let bench = Bench::new("");
    let (slow, quick) = (bench.side_stream(), bench.side_stream());
    bench.pause_stream(&slow);
    let (held, passed) = (bench.alloc(30 * MIB), bench.alloc(40 * MIB));
    use_and_free(&bench, held, &[&slow]);
    use_and_free(&bench, passed, &[&quick]);
    quick.synchronize().unwrap();
    assert_eq!(bench.alloc(40 * MIB).ptr, passed.ptr);
    assert_ne!(bench.alloc(30 * MIB).ptr, held.ptr);
    bench.let_go(&slow);
    bench.finish();
}

#[test]
fn a_waiting_block_is_not_joined() {
    let bench = Bench::new("");
    let side = bench.side_stream();
    bench.pause_stream(&side);
    let [a, b, c] = [0; 3].map(|_| bench.alloc(4 * MIB));
    bench.free(a);
    use_and_free(&bench, b, &[&side]);
    bench.free(c);
    let sizes = || bench.segments()[0].blocks.iter().map(|block| block.size / MIB).collect::<Vec<_>>();
    assert_eq!(sizes(), [4, 4, 12]);
    bench.let_go(&side);
    bench.free(bench.alloc(1));
    assert_eq!(bench.segments().iter().find(|segment| segment.total_size == 20 * MIB).unwrap().blocks.len(), 1);
    bench.finish();
}

#[test]
fn events_are_used_again() {
    let bench = Bench::new("");
    let side = bench.side_stream();
    for _ in 0..50 {
        let block = bench.alloc(MIB);
        use_and_free(&bench, block, &[&side]);
        side.synchronize().unwrap();
    }
    assert!(bench.sim.object_counts().events <= 2, "{:?}", bench.sim.object_counts());
    bench.finish();
}

/// A destructor makes no driver call; the next request does what is left.
#[test]
fn a_dropped_block_is_looked_after_by_the_next_call() {
    let bench = Bench::new("");
    let side = bench.side_stream();
    bench.pause_stream(&side);
    let block = bench.allocator.allocate(4 * MIB, &bench.main).unwrap();
    let place = block.ptr();
    side.wait_stream(&bench.main).unwrap();
    bench.sim_fill_on(place.0, 1, &side);
    block.record_use(&side).unwrap();
    let calls = bench.sim.calls_made();
    drop(block);
    assert_eq!(bench.sim.calls_made(), calls);
    bench.allocator.check();
    assert_ne!(bench.alloc(4 * MIB).ptr, place);
    assert!(bench.sim.call_count(Call::EventRecord) > 0);
    bench.let_go(&side);
    assert_eq!(bench.alloc(4 * MIB).ptr, place);
    bench.finish();
}

/// A stream that is gone cannot be marked; its work is waited for another way.
#[test]
fn a_destroyed_stream_is_waited_for() {
    let bench = Bench::new("");
    let gone = bench.sim.stream_create(FIRST, StreamOptions::default()).unwrap();
    let block = bench.alloc(4 * MIB);
    bench.sim_fill_id(block.ptr.0, 1, gone);
    bench.allocator.record_use(block, gone).unwrap();
    bench.sim.stream_destroy(gone).unwrap();
    bench.free(block);
    let again = bench.alloc(4 * MIB);
    bench.fill(again, 2, &bench.main);
    bench.assert_holds(again, 2);
    let unknown = bench.alloc(MIB);
    bench.allocator.record_use(unknown, StreamId(123_456)).unwrap();
    bench.free(unknown);
    bench.alloc(MIB);
    // The simulated device notices that a stream was named that is gone, and nothing else.
    assert!(bench.sim.hazards().iter().all(|hazard| hazard.kind == HazardKind::UseAfterDestroy));
    bench.sim.clear_hazards();
    bench.finish();
}

/// Only the devices can be waited for in place of a stream that is gone: not while a capture is under way, and not
/// those that nobody uses.
#[test]
fn a_destroyed_stream_breaks_no_capture() {
    let bench = Bench::with_config(SimConfig::default().with_devices(2), "");
    let (stream, captures) = (bench.side_stream(), bench.side_stream());
    let gone = bench.sim.stream_create(FIRST, StreamOptions::default()).unwrap();
    let block = bench.alloc_on(&stream, 4 * MIB);
    bench.allocator.record_use(block, gone).unwrap();
    bench.sim.stream_destroy(gone).unwrap();
    bench.begin_capture(&captures);
    bench.free(block);
    let other = bench.alloc_on(&stream, 4 * MIB);
    assert_ne!(other.ptr, block.ptr);
    assert_eq!(bench.sim.call_count(Call::DeviceSynchronize), 0);
    bench.end_capture(&captures);
    assert_eq!(bench.alloc_on(&stream, 4 * MIB).ptr, block.ptr, "free as soon as the capture is over");
    assert!(!bench.sim.context_is_active(DeviceId(1)).unwrap(), "nobody uses the second device");
    bench.sim.clear_hazards();
    bench.finish();
}

/// trim waits for what streams use, and gives that back too.
#[test]
fn trim_waits_for_streams() {
    for settings in ["", "expandable_segments:True"] {
        let bench = Bench::new(settings);
        let side = bench.side_stream();
        let block = bench.alloc(40 * MIB);
        use_and_free(&bench, block, &[&side]);
        assert_eq!(bench.trim(), 40 * MIB);
        assert_eq!((bench.bytes_reserved(), bench.sim.object_counts().bytes_used), (0, 0));
        assert_eq!(bench.stats().num_sync_all_streams, 1);
        bench.finish();
    }
}

/// Work that is still queued in the block's own stream is no obstacle for that stream, and trim does not take the
/// memory from under it.
#[test]
fn queued_work_survives_a_trim() {
    for settings in ["", "expandable_segments:True"] {
        let bench = Bench::with_capacity(4 * GIB, settings);
        let side = bench.side_stream();
        let block = bench.alloc_on(&side, 40 * MIB);
        for value in 0..20 {
            bench.fill(block, value, &side);
        }
        bench.free(block);
        bench.trim();
        let again = bench.alloc_on(&side, 40 * MIB);
        bench.fill(again, 99, &side);
        bench.assert_holds(again, 99);
        bench.finish();
    }
}
