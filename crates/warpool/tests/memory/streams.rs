//! Blocks that several streams use, outside of captures: they are reused once all are done, and not before.

use crate::common::memory::{FIRST, GIB, MIB, TestContext};
use warpool::Stream;
use warpool::driver::sim::{HazardKind, SimConfig};
use warpool::driver::{Call, DeviceId, Devices, StreamId, StreamOptions, Streams};
use warpool::memory::raw::Allocation;
use warpool::memory::report::{Action, BlockState, HistoryOptions, SnapshotOptions};
use warpool::memory::{Allocate, DeviceAllocator};

/// Enqueues a fill on each stream, after the work of the block's own stream, records the use, and frees the block.
fn use_and_free(context: &TestContext, block: Allocation, streams: &[&Stream]) {
    for stream in streams {
        stream.wait_stream(&context.main).unwrap();
        context.fill(block, 1, stream);
        context.record_use(block, stream);
    }
    context.free(block);
}

/// TestCuda.test_record_stream.
#[test]
fn a_block_is_not_reused_while_another_stream_is_busy() {
    for settings in ["", "expandable_segments:True"] {
        let context = TestContext::new(settings);
        let side = context.side_stream();
        context.pause_stream(&side);
        let block = context.alloc(4 * MIB);
        use_and_free(&context, block, &[&side]);
        let other = context.alloc(4 * MIB);
        assert_ne!(other.ptr, block.ptr, "the side stream still uses it");
        context.fill(other, 2, &context.main);
        context.resume_stream(&side);
        let again = context.alloc(4 * MIB);
        assert_eq!(again.ptr, block.ptr);
        context.fill(again, 3, &context.main);
        context.assert_holds(other, 2);
        context.assert_holds(again, 3);
        context.finish();
    }
}

/// TestCuda.test_record_stream_on_shifted_view: a use of a part protects the whole.
#[test]
fn a_use_of_a_part_protects_the_whole_block() {
    let context = TestContext::new("");
    let side = context.side_stream();
    context.pause_stream(&side);
    let block = context.alloc(8 * MIB);
    side.wait_stream(&context.main).unwrap();
    context.sim_fill_on(block.ptr.0 + 4 * MIB, 1, &side);
    context.record_use(block, &side);
    context.free(block);
    let front = context.alloc(4 * MIB);
    assert!(front.ptr.0 >= block.ptr.0 + 8 * MIB || front.ptr.0 < block.ptr.0);
    context.resume_stream(&side);
    context.finish();
}

#[test]
fn a_use_on_its_own_stream_needs_no_event() {
    let context = TestContext::new("");
    let block = context.alloc(MIB);
    context.record_use(block, &context.main);
    let calls = context.sim.calls_made();
    context.free(block);
    assert_eq!((context.alloc(MIB).ptr, context.sim.calls_made()), (block.ptr, calls));
    assert_eq!(context.sim.object_counts().events, 0);
    context.finish();
}

/// `allocated` drops at the free, `active` when the streams are done.
#[test]
fn statistics_and_history_show_a_pending_free() {
    let context = TestContext::new("");
    let side = context.side_stream();
    context.allocator.record_history(Some(HistoryOptions::default())).unwrap();
    context.pause_stream(&side);
    let block = context.alloc(4_000_000);
    use_and_free(&context, block, &[&side]);
    let stats = context.stats();
    assert_eq!((stats.allocation.all.current, stats.allocated_bytes.all.current), (0, 0));
    assert_eq!((stats.active.all.current, stats.active_bytes.all.current), (1, block.bytes));
    assert_eq!(stats.requested_bytes.all.current, 4_000_000);
    let segment = &context.segments()[0];
    assert_eq!(segment.blocks[0].state, BlockState::ActivePendingFree);
    assert_eq!((segment.allocated_size, segment.active_size), (0, block.bytes));
    let actions = || {
        let trace = context.allocator.snapshot(SnapshotOptions::default()).unwrap().traces.remove(0);
        trace.iter().map(|entry| entry.action).filter(|&action| action != Action::Snapshot).collect::<Vec<_>>()
    };
    assert_eq!(actions(), [Action::SegmentAlloc, Action::Alloc, Action::FreeRequested]);
    context.resume_stream(&side);
    context.free(context.alloc(100));
    let stats = context.stats();
    assert_eq!((stats.active.all.current, stats.requested_bytes.all.current), (0, 0));
    assert_eq!(actions()[3], Action::FreeCompleted);
    context.finish();
}

#[test]
fn a_freed_block_waits_for_all_streams() {
    let context = TestContext::new("");
    let streams = [0; 4].map(|_| context.side_stream());
    let block = context.alloc(4 * MIB);
    for (stream, offset) in streams.iter().zip(0..) {
        context.pause_stream(stream);
        stream.wait_stream(&context.main).unwrap();
        context.sim_fill_on(block.ptr.0 + offset * MIB, 1, stream);
        context.record_use(block, stream);
        context.record_use(block, stream);
    }
    context.free(block);
    for stream in &streams {
        assert_ne!(context.alloc(4 * MIB).ptr, block.ptr, "{stream} is busy");
        context.resume_stream(stream);
    }
    assert_eq!(context.alloc(4 * MIB).ptr, block.ptr);
    context.finish();
}

/// A stream uses one block, which is freed, and then another: the event after the first use does not cover the second.
#[test]
fn work_after_an_older_event_is_waited_for() {
    let context = TestContext::new("");
    let busy = context.side_stream();
    let blocks = [context.alloc(4 * MIB), context.alloc(4 * MIB)];
    busy.wait_stream(&context.main).unwrap();
    for block in blocks {
        context.pause_stream(&busy);
        context.sim_fill_on(block.ptr.0, 1, &busy);
        context.record_use(block, &busy);
        context.free(block);
        if block == blocks[0] {
            context.resume_stream(&busy);
        }
    }
    let next = [context.alloc(4 * MIB), context.alloc(4 * MIB)];
    assert!(next.iter().all(|next| next.ptr != blocks[1].ptr), "the stream still waits to write there");
    context.resume_stream(&busy);
    context.finish();
}

#[test]
fn a_busy_stream_delays_only_its_own_blocks() {
    let context = TestContext::new("");
    let (slow, quick) = (context.side_stream(), context.side_stream());
    context.pause_stream(&slow);
    let (held, passed) = (context.alloc(30 * MIB), context.alloc(40 * MIB));
    use_and_free(&context, held, &[&slow]);
    use_and_free(&context, passed, &[&quick]);
    quick.synchronize().unwrap();
    assert_eq!(context.alloc(40 * MIB).ptr, passed.ptr);
    assert_ne!(context.alloc(30 * MIB).ptr, held.ptr);
    context.resume_stream(&slow);
    context.finish();
}

#[test]
fn a_pending_block_is_not_merged() {
    let context = TestContext::new("");
    let side = context.side_stream();
    context.pause_stream(&side);
    let [a, b, c] = [0; 3].map(|_| context.alloc(4 * MIB));
    context.free(a);
    use_and_free(&context, b, &[&side]);
    context.free(c);
    let sizes = || context.segments()[0].blocks.iter().map(|block| block.size / MIB).collect::<Vec<_>>();
    assert_eq!(sizes(), [4, 4, 12]);
    context.resume_stream(&side);
    context.free(context.alloc(1));
    assert_eq!(context.segments().iter().find(|segment| segment.total_size == 20 * MIB).unwrap().blocks.len(), 1);
    context.finish();
}

#[test]
fn events_are_reused() {
    let context = TestContext::new("");
    let side = context.side_stream();
    for _ in 0..50 {
        let block = context.alloc(MIB);
        use_and_free(&context, block, &[&side]);
        side.synchronize().unwrap();
    }
    assert!(context.sim.object_counts().events <= 2, "{:?}", context.sim.object_counts());
    context.finish();
}

#[test]
fn the_next_call_records_fences_for_a_dropped_block() {
    let context = TestContext::new("");
    let side = context.side_stream();
    context.pause_stream(&side);
    let block = context.allocator.allocate(4 * MIB, &context.main).unwrap();
    let place = block.ptr();
    side.wait_stream(&context.main).unwrap();
    context.sim_fill_on(place.0, 1, &side);
    block.record_use(&side).unwrap();
    let calls = context.sim.calls_made();
    drop(block);
    assert_eq!(context.sim.calls_made(), calls);
    context.allocator.check();
    assert_ne!(context.alloc(4 * MIB).ptr, place);
    assert!(context.sim.call_count(Call::EventRecord) > 0);
    context.resume_stream(&side);
    assert_eq!(context.alloc(4 * MIB).ptr, place);
    context.finish();
}

/// No event can be recorded in it, so the allocator waits for the devices.
#[test]
fn a_destroyed_stream_is_waited_for() {
    let context = TestContext::new("");
    let destroyed = context.sim.stream_create(FIRST, StreamOptions::default()).unwrap();
    let block = context.alloc(4 * MIB);
    context.sim_fill_id(block.ptr.0, 1, destroyed);
    context.allocator.record_use(block, destroyed).unwrap();
    context.sim.stream_destroy(destroyed).unwrap();
    context.free(block);
    let again = context.alloc(4 * MIB);
    context.fill(again, 2, &context.main);
    context.assert_holds(again, 2);
    let unknown = context.alloc(MIB);
    context.allocator.record_use(unknown, StreamId(123_456)).unwrap();
    context.free(unknown);
    context.alloc(MIB);
    // The simulation reports the use of a destroyed stream, and nothing else.
    assert!(context.sim.hazards().iter().all(|hazard| hazard.kind == HazardKind::UseAfterDestroy));
    context.sim.clear_hazards();
    context.finish();
}

/// The allocator waits for the devices instead, but not while a capture is active, and not for devices without a
/// context.
#[test]
fn waiting_for_a_destroyed_stream_spares_captures() {
    let context = TestContext::with_config(SimConfig::default().with_devices(2), "");
    let (stream, captures) = (context.side_stream(), context.side_stream());
    let destroyed = context.sim.stream_create(FIRST, StreamOptions::default()).unwrap();
    let block = context.alloc_on(&stream, 4 * MIB);
    context.allocator.record_use(block, destroyed).unwrap();
    context.sim.stream_destroy(destroyed).unwrap();
    context.begin_capture(&captures);
    context.free(block);
    let other = context.alloc_on(&stream, 4 * MIB);
    assert_ne!(other.ptr, block.ptr);
    assert_eq!(context.sim.call_count(Call::DeviceSynchronize), 0);
    context.end_capture(&captures);
    assert_eq!(context.alloc_on(&stream, 4 * MIB).ptr, block.ptr, "reclaimed after the capture");
    assert!(!context.sim.context_is_active(DeviceId(1)).unwrap(), "the second device is not used");
    context.sim.clear_hazards();
    context.finish();
}

/// trim waits for pending frees, and releases them too.
#[test]
fn trim_waits_for_streams() {
    for settings in ["", "expandable_segments:True"] {
        let context = TestContext::new(settings);
        let side = context.side_stream();
        let block = context.alloc(40 * MIB);
        use_and_free(&context, block, &[&side]);
        assert_eq!(context.trim(), 40 * MIB);
        assert_eq!((context.bytes_reserved(), context.sim.object_counts().bytes_used), (0, 0));
        assert_eq!(context.stats().num_sync_all_streams, 1);
        context.finish();
    }
}

/// Freed memory of a stream with pending work can be reused by the stream, and trim waits before it releases the
/// memory.
#[test]
fn trim_does_not_disturb_queued_work() {
    for settings in ["", "expandable_segments:True"] {
        let context = TestContext::with_capacity(4 * GIB, settings);
        let side = context.side_stream();
        let block = context.alloc_on(&side, 40 * MIB);
        for value in 0..20 {
            context.fill(block, value, &side);
        }
        context.free(block);
        context.trim();
        let again = context.alloc_on(&side, 40 * MIB);
        context.fill(again, 99, &side);
        context.assert_holds(again, 99);
        context.finish();
    }
}
