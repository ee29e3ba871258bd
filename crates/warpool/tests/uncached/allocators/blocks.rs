//! Requests, frees, wrong arguments, and blocks that several streams use.

use super::*;

#[test]
fn a_request_for_no_bytes_returns_null() {
    each_by_default(|context| {
        let block = context.block(0, &context.stream());
        assert!(block.ptr.is_null() && block.bytes == 0);
        context.allocator.free_raw(block.ptr).unwrap();
        context.allocator.record_use_raw(block.ptr, context.stream().id()).unwrap();
        context.expect_sound(&[]);
    });
}

#[test]
fn creating_reading_and_trimming_create_no_context() {
    each_by_default(|context| {
        context.stats();
        context.snapshot();
        context.trim();
        context.allocator.set_memory_fraction(DEVICE, 0.5).unwrap();
        context.allocator.reset_peak_stats(DEVICE).unwrap();
        context.allocator.record_history(Some(HistoryOptions::default())).unwrap();
        let active = context.sim_driver().context_is_active(DEVICE).unwrap();
        assert!(!active, "a context was created");
    });
}

#[test]
fn blocks_are_large_enough_and_do_not_overlap() {
    each_by_default(|context| {
        let stream = context.stream();
        let mut live = Vec::new();
        for (value, bytes) in [1, 511, 512, 513, 100_000, MIB, MIB + 1, 3 * MIB, 17 * MIB].into_iter().enumerate() {
            let block = context.block(bytes, &stream);
            assert!(block.bytes >= bytes && block.bytes_requested == bytes);
            assert_eq!((block.device, block.stream, block.ptr.0 % 256), (DEVICE, stream.id(), 0));
            assert_eq!(context.allocator.find(block.ptr).unwrap(), block);
            context.fill(block, value as u8, &stream);
            live.push(block);
        }
        stream.synchronize().unwrap();
        for (value, block) in live.iter().enumerate() {
            assert_eq!(context.byte_at(block.ptr), value as u8);
            assert_eq!(context.byte_at(block.ptr.offset(block.bytes_requested - 1)), value as u8);
        }
        context.expect_sound(&live);
        context.expect_no_hazard();
    });
}

#[test]
fn memory_freed_on_a_stream_is_reused_by_it() {
    each_by_default(|context| {
        let stream = context.stream();
        for bytes in [1000, 5 * MIB, 40 * MIB] {
            let first = context.block(bytes, &stream);
            context.allocator.free(first).unwrap();
            let reserved = context.stats().reserved_bytes.all.current;
            for round in 0..50 {
                let block = context.block(bytes, &stream);
                context.fill(block, round, &stream);
                context.allocator.free(block).unwrap();
                if round % 10 == 9 {
                    stream.synchronize().unwrap();
                }
            }
            let grown = context.stats().reserved_bytes.all.current - reserved;
            // The driver's pool may hold memory whose free is still pending in a busy stream; a leak would be 50 times
            // as much.
            assert!(grown <= 12 * bytes.max(32 * MIB), "{grown} more bytes are reserved after 50 rounds of {bytes}");
        }
        context.expect_sound(&[]);
        context.expect_no_hazard();
    });
}

#[test]
fn unknown_pointers_are_errors() {
    each_by_default(|context| {
        let stream = context.stream();
        let block = context.block(10_000, &stream);
        let inside = block.ptr.offset(512);
        for ptr in [DevicePtr(512), inside, block.ptr.offset(1)] {
            let unknown = Error::UnknownPointer { ptr };
            assert_eq!(context.allocator.free_raw(ptr), Err(unknown.clone()));
            assert_eq!(context.allocator.record_use_raw(ptr, stream.id()), Err(unknown.clone()));
            assert_eq!(context.allocator.find(ptr), Err(unknown));
        }
        context.expect_sound(&[block]);
        context.allocator.free_raw(block.ptr).unwrap();
        assert_eq!(context.allocator.free_raw(block.ptr), Err(Error::UnknownPointer { ptr: block.ptr }));
        assert_eq!(context.allocator.free(block), Err(Error::UnknownPointer { ptr: block.ptr }));
        context.allocator.free_later(block);
        context.expect_sound(&[]);
    });
}

#[test]
fn a_stale_free_does_not_free_the_next_block() {
    each_by_default(|context| {
        let stream = context.stream();
        let stale = context.block(10_000, &stream);
        context.allocator.free(stale).unwrap();
        let next = context.block(10_000, &stream);
        assert_eq!(context.allocator.free(stale), Err(Error::UnknownPointer { ptr: stale.ptr }));
        context.allocator.free_later(stale);
        context.expect_sound(&[next]);
        context.allocator.free(next).unwrap();
    });
}

#[test]
fn wrong_devices_and_sizes_are_errors() {
    each_by_default(|context| {
        let stream = context.stream();
        let nowhere = DeviceId(7);
        let missing = Error::DeviceOutOfRange { index: 7, count: 1 };
        assert_eq!(context.allocator.allocate_raw(Request::new(nowhere, stream.id(), 1)), Err(missing.clone()));
        assert_eq!(context.allocator.stats(nowhere), Err(missing.clone()));
        assert_eq!(context.allocator.trim(nowhere, MemPoolId::DEFAULT), Err(missing.clone()));
        assert_eq!(context.allocator.set_memory_fraction(nowhere, 0.5), Err(missing));
        assert_eq!(context.refused(u64::MAX, &stream), Error::RequestTooLarge { bytes: u64::MAX });
        assert!(matches!(context.refused(1 << 50, &stream), Error::OutOfMemory(_)));
        context.expect_sound(&[]);
    });
}

/// Uses a block on a second, busy stream, frees it, and writes to the next block on the first stream.
fn use_on_two_streams(context: &TestContext, recorded: bool) {
    let (own, other) = (context.stream(), context.stream());
    let block = context.block(2 * MIB, &own);
    context.fill(block, 1, &own);
    other.wait_stream(&own).unwrap();
    for value in 0..50 {
        context.fill(block, value, &other);
    }
    if recorded {
        context.allocator.record_use_raw(block.ptr, other.id()).unwrap();
        context.allocator.record_use(block, other.id()).unwrap();
    }
    context.allocator.free(block).unwrap();
    let next = context.block(2 * MIB, &own);
    context.fill(next, 99, &own);
    context.device().synchronize().unwrap();
    if recorded {
        assert_eq!(context.byte_at(next.ptr), 99);
    }
    context.allocator.free(next).unwrap();
}

#[test]
fn a_block_waits_for_the_streams_that_used_it() {
    each_by_default(|context| {
        for _ in 0..5 {
            use_on_two_streams(context, true);
        }
        context.trim();
        context.expect_no_hazard();
        context.expect_sound(&[]);
        assert_eq!(context.stats().active.all.current, 0);
    });
}

/// Shows that the test above can fail.
#[test]
fn an_unrecorded_use_is_a_hazard() {
    each_by_default(|context| {
        use_on_two_streams(context, false);
        assert!(!context.sim.hazards().is_empty());
    });
}

#[test]
fn recording_the_own_stream_has_no_effect() {
    each_by_default(|context| {
        let stream = context.stream();
        let block = context.block(MIB, &stream);
        crate::common::keep_busy(&stream);
        context.allocator.record_use_raw(block.ptr, stream.id()).unwrap();
        context.allocator.free(block).unwrap();
        assert_eq!(context.stats().active.all.current, 0);
    });
}

#[test]
fn blocks_refuse_streams_of_another_instance() {
    each_by_default(|context| {
        let foreign = crate::common::device().pool_stream().unwrap();
        assert_eq!(
            context.allocator.allocate(1, &foreign).unwrap_err(),
            Error::ForeignInstance { object: "the stream" }
        );
        let block = context.allocator.allocate(1000, &context.stream()).unwrap();
        assert_eq!(block.record_use(&foreign), Err(Error::ForeignInstance { object: "the stream" }));
        let raw = block.into_raw();
        context.allocator.free(raw).unwrap();
        context.expect_sound(&[]);
    });
}
