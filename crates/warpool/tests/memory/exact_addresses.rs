//! Allocation at a given address, after PyTorch's TestResizeStorageWithAddr.

use crate::common::memory::{FIRST, KIB, MIB, TestContext};
use warpool::Error;
use warpool::driver::{Call, DevicePtr};
use warpool::memory::DeviceAllocator;
use warpool::memory::raw::{Allocation, Request};

fn at(context: &TestContext, ptr: u64, bytes: u64) -> warpool::Result<Allocation> {
    let outcome = context.allocator.allocate_at(Request::new(FIRST, context.main.id(), bytes), DevicePtr(ptr));
    context.allocator.check();
    outcome
}

fn check_both(test: impl Fn(TestContext)) {
    test(TestContext::new(""));
    test(TestContext::new("expandable_segments:True"));
}

/// At the start, in the middle, and at the end of a free block.
#[test]
fn a_free_address_can_be_allocated() {
    check_both(|context| {
        let whole = context.alloc(20 * MIB);
        context.free(whole);
        let start = whole.ptr.0;
        for offset in [0, 512, 7 * MIB, 20 * MIB - 2 * MIB] {
            let allocation = at(&context, start + offset, 2 * MIB).unwrap();
            assert_eq!((allocation.ptr.0, allocation.bytes_requested), (start + offset, 2 * MIB));
            context.fill(allocation, 5, &context.main);
            context.assert_holds(allocation, 5);
            context.free(allocation);
        }
        assert_eq!(context.segments()[0].blocks.len(), 1, "merged again");
        context.finish();
    });
}

#[test]
fn a_freed_block_can_be_allocated_at_its_address_again() {
    check_both(|context| {
        let blocks = [0; 4].map(|_| context.alloc(100 * KIB));
        context.free_all([blocks[1], blocks[2]]);
        // The best fit would be at the low end of the merged block; the requested address is in its middle.
        let again = at(&context, blocks[2].ptr.0, 100 * KIB).unwrap();
        assert_eq!(again.ptr, blocks[2].ptr);
        assert_eq!(context.alloc(100 * KIB).ptr, blocks[1].ptr, "the front stayed free");
        context.finish();
    });
}

#[test]
fn allocated_misaligned_and_unknown_addresses_are_refused() {
    check_both(|context| {
        let (free, taken) = (context.alloc(4 * MIB), context.alloc(4 * MIB));
        context.free(free);
        let stats = context.stats();
        for (ptr, bytes) in [
            (taken.ptr.0, 2 * MIB),
            (free.ptr.0 + 256, 2 * MIB),
            // Overlaps an allocated block.
            (free.ptr.0 + 3 * MIB, 2 * MIB),
            (free.ptr.0, 4 * MIB + 1),
            // Small requests are not served by large segments.
            (free.ptr.0, MIB),
            (free.ptr.0, 0),
            (0, 2 * MIB),
            (u64::MAX - 511, 2 * MIB),
        ] {
            let error = at(&context, ptr, bytes).unwrap_err();
            assert!(matches!(error, Error::ExactAddress { .. }), "{ptr:#x}, {bytes}: {error:?}");
            assert!(error.to_string().contains("exact address"), "{error}");
        }
        assert_eq!(context.stats(), stats);
        context.finish();
    });
}

#[test]
fn memory_of_other_streams_and_of_the_driver_is_not_used() {
    let context = TestContext::new("");
    let side = context.side_stream();
    let theirs = context.alloc_on(&side, 20 * MIB);
    context.free(theirs);
    let before = context.sim.call_count(Call::MemAlloc);
    assert!(at(&context, theirs.ptr.0, 2 * MIB).is_err());
    assert!(at(&context, theirs.ptr.0 + (1 << 40), 2 * MIB).is_err());
    assert_eq!(context.sim.call_count(Call::MemAlloc), before);
    let request = Request::new(FIRST, side.id(), 2 * MIB);
    assert_eq!(context.allocator.allocate_at(request, theirs.ptr).unwrap().ptr, theirs.ptr);
    context.finish();
}

#[test]
fn it_counts_in_the_statistics() {
    let context = TestContext::new("");
    let whole = context.alloc(20 * MIB);
    context.free(whole);
    let before = context.stats();
    let allocation = at(&context, whole.ptr.0 + 4 * MIB, 2 * MIB).unwrap();
    let stats = context.stats();
    assert_eq!(stats.allocated_bytes.all.current, 2 * MIB);
    assert_eq!(stats.allocated_bytes.all.allocated, before.allocated_bytes.all.allocated + 2 * MIB);
    assert_eq!((stats.inactive_split.all.current, stats.inactive_split_bytes.all.current), (2, 18 * MIB));
    context.allocator.free_raw(allocation.ptr).unwrap();
    assert_eq!(context.stats().inactive_split_bytes.all.current, 0);
    context.finish();
}
