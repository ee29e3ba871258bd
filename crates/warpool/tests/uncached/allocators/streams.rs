//! Captures of other streams, and streams that were destroyed.

use super::*;

#[test]
fn no_call_invalidates_another_streams_capture() {
    each_by_default(|context| {
        let (capturing, own, other) = (context.stream(), context.stream(), context.stream());
        // The pools are configured before the capture.
        let scratch = context.block(MIB, &own);
        let pools = context.allocator.pools().ok();
        if let Some(pools) = pools {
            pools.capture_began(DEVICE).unwrap();
        }
        context.sim_driver().capture_begin(capturing.id(), CaptureMode::Global).unwrap();
        let block = context.block(50 * MIB, &own);
        context.fill(block, 3, &own);
        context.allocator.record_use(block, other.id()).unwrap();
        context.allocator.free(block).unwrap();
        let next = context.block(70 * MIB, &own);
        context.stats();
        context.snapshot();
        context.allocator.reset_peak_stats(DEVICE).unwrap();
        context.allocator.largest_available(DEVICE).unwrap();
        context.allocator.free(next).unwrap();
        context.trim();
        let graph = context.sim_driver().capture_end(capturing.id()).expect("the capture is valid");
        context.sim_driver().graph_destroy(graph).unwrap();
        if let Some(pools) = pools {
            pools.capture_ended(DEVICE).unwrap();
        }
        context.allocator.free(scratch).unwrap();
        context.trim();
        context.expect_sound(&[]);
        context.expect_no_hazard();
    });
}

#[test]
fn a_block_used_by_a_destroyed_stream_is_released() {
    each_by_default(|context| {
        let own = context.stream();
        let destroyed = context.sim_driver().stream_create(DEVICE, warpool::driver::StreamOptions::default()).unwrap();
        let block = context.block(3 * MIB, &own);
        context.allocator.record_use_raw(block.ptr, destroyed).unwrap();
        context.sim_driver().stream_destroy(destroyed).unwrap();
        context.allocator.free(block).unwrap();
        context.trim();
        context.expect_sound(&[]);
        assert_eq!(context.stats().reserved_bytes.all.current, 0);
    });
}

/// Issue 35: later calls, above all a trim, named streams that their owner had destroyed.
#[test]
fn no_call_names_a_stream_once_its_memory_is_freed() {
    each_by_default(|context| {
        let destroyed = context.sim_driver().stream_create(DEVICE, warpool::driver::StreamOptions::default()).unwrap();
        let busy = context.stream();
        let request = Request::new(DEVICE, destroyed, 3 * MIB);
        let [plain, shared] = [0, 1].map(|_| context.allocator.allocate_raw(request).unwrap());
        let event = context.sim_driver().event_create(DEVICE, EventOptions::default()).unwrap();
        context.sim_driver().event_record(event, destroyed, EventScope::Plain).unwrap();
        context.sim_driver().stream_wait_event(busy.id(), event, EventScope::Plain).unwrap();
        context.sim_driver().event_destroy(event).unwrap();
        context.fill(shared, 1, &busy);
        context.allocator.record_use_raw(shared.ptr, busy.id()).unwrap();
        context.allocator.free(shared).unwrap();
        context.allocator.free(plain).unwrap();
        context.sim_driver().stream_destroy(destroyed).unwrap();
        let later = context.block(30 * MIB, &busy);
        context.allocator.free(later).unwrap();
        context.trim();
        context.expect_sound(&[]);
        context.expect_no_hazard();
        assert_eq!(context.stats().reserved_bytes.all.current, 0);
    });
}
