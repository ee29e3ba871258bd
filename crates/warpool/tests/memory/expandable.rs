//! Expandable segments: growth, holes, unmapping, limits on addresses, switching them on and off, and access for peers.

use crate::common::memory::{FIRST, GIB, MIB, TestContext};
use warpool::driver::sim::SimConfig;
use warpool::driver::{Copies, DeviceId, DevicePtr, Pattern};
use warpool::memory::DeviceAllocator;
use warpool::memory::raw::{Allocation, Request};
use warpool::memory::report::{Action, BlockState, HistoryOptions, SnapshotOptions};

const ON: &str = "expandable_segments:True";

/// Whether one block lies right after another.
fn follows(next: Allocation, before: Allocation) -> bool {
    next.ptr.0 == before.ptr.0 + before.bytes
}

#[test]
fn a_segment_grows_at_its_end() {
    let context = TestContext::new(ON);
    let [a, b, c] = [20, 70, 3].map(|mib| context.alloc(mib * MIB));
    assert!(follows(b, a) && follows(c, b), "{a:?} {b:?} {c:?}");
    // Chunks of 20 MiB; the last is shared.
    assert_eq!((context.bytes_reserved(), context.segments().len()), (100 * MIB, 1));
    let census = context.sim.object_counts();
    assert_eq!((census.reservations, census.mappings, census.physical), (1, 5, 5));
    for (block, value) in [(a, 1), (b, 2), (c, 3)] {
        context.fill(block, value, &context.main);
    }
    for (block, value) in [(a, 1), (b, 2), (c, 3)] {
        context.assert_holds(block, value);
    }
    context.finish();
}

#[test]
fn small_requests_grow_by_two_mebibytes() {
    let context = TestContext::new(ON);
    let blocks = [0; 5].map(|_| context.alloc(MIB));
    assert!(blocks.windows(2).all(|pair| follows(pair[1], pair[0])));
    assert_eq!((context.bytes_reserved(), context.sim.object_counts().mappings), (6 * MIB, 3));
    context.finish();
}

/// One segment for each stream and kind.
#[test]
fn streams_have_their_own_segments() {
    let context = TestContext::new(ON);
    let side = context.side_stream();
    context.alloc(MIB);
    context.alloc(2 * MIB);
    context.alloc_on(&side, MIB);
    assert_eq!((context.sim.object_counts().reservations, context.segments().len()), (3, 3));
    context.finish();
}

/// Statistics count no segments and no splits, but bytes and driver calls; the history shows mapping.
#[test]
fn statistics_and_history_of_growth() {
    let context = TestContext::new(ON);
    context.allocator.record_history(Some(HistoryOptions::default())).unwrap();
    let a = context.alloc(30 * MIB);
    let stats = context.stats();
    assert_eq!((stats.segment.all.allocated, stats.reserved_bytes.large_pool.current), (0, 40 * MIB));
    assert_eq!((stats.inactive_split.all.current, stats.inactive_split_bytes.all.current), (0, 0));
    assert_eq!(stats.num_device_alloc, 1);
    context.free(a);
    context.trim();
    let stats = context.stats();
    assert_eq!((stats.num_device_free, stats.reserved_bytes.all.current), (1, 0));
    let trace = context.allocator.snapshot(SnapshotOptions::default()).unwrap().traces.remove(0);
    let seen: Vec<(Action, u64)> = trace.iter().map(|entry| (entry.action, entry.size / MIB)).collect();
    let expected = [
        (Action::SegmentMap, 40),
        (Action::Alloc, 30),
        (Action::FreeRequested, 30),
        (Action::FreeCompleted, 30),
        (Action::SegmentUnmap, 40),
    ];
    assert_eq!(seen, expected);
    assert_eq!(context.sim.object_counts().reservations, 0, "its addresses are released too");
    context.finish();
}

/// Only whole chunks inside a free block are unmapped; the rest stays free next to blocks in use.
#[test]
fn trim_unmaps_whole_chunks_of_segments_in_use() {
    let context = TestContext::new(ON);
    let [a, b] = [30, 10].map(|mib| context.alloc(mib * MIB));
    context.fill(b, 6, &context.main);
    context.free(a);
    assert_eq!(context.trim(), 20 * MIB);
    let segments = context.segments();
    let blocks: Vec<_> = segments[0].blocks.iter().map(|block| (block.size / MIB, block.state)).collect();
    assert_eq!(blocks, [(10, BlockState::Inactive), (10, BlockState::ActiveAllocated)]);
    assert_eq!((segments.len(), segments[0].address), (1, a.ptr.0 + 20 * MIB));
    context.assert_holds(b, 6);
    // The hole is filled first, together with the free block after it.
    let again = context.alloc(30 * MIB);
    assert_eq!((again.ptr, context.bytes_reserved()), (a.ptr, 40 * MIB));
    context.assert_holds(b, 6);
    context.finish();
}

#[test]
fn a_snapshot_lists_each_mapped_range() {
    let context = TestContext::new(ON);
    let blocks = [0; 5].map(|_| context.alloc(20 * MIB));
    context.free_all([blocks[1], blocks[3]]);
    context.trim();
    let segments = context.segments();
    assert!(segments.iter().all(|segment| segment.is_expandable && segment.total_size == 20 * MIB));
    let at: Vec<u64> = segments.iter().map(|segment| segment.address).collect();
    assert_eq!(at, [blocks[0], blocks[2], blocks[4]].map(|block| block.ptr.0));
    // The lowest hole that fits, then the next, then the end.
    let again = [0; 3].map(|_| context.alloc(20 * MIB).ptr.0);
    assert_eq!(again, [blocks[1].ptr.0, blocks[3].ptr.0, blocks[4].ptr.0 + 20 * MIB]);
    assert_eq!(context.segments().len(), 1);
    context.finish();
}

/// The size of a free block includes unmapped addresses after it, so another block is taken first.
#[test]
fn blocks_that_can_grow_are_used_last() {
    let context = TestContext::new(ON);
    let [a, _, c] = [20, 20, 10].map(|mib| context.alloc(mib * MIB));
    context.free(a);
    let d = context.alloc(10 * MIB);
    assert_eq!(d.ptr, a.ptr, "not the 10 MiB behind c, though they fit exactly");
    let e = context.alloc(25 * MIB);
    assert!(follows(e, c), "the free block at the end grows");
    assert_eq!(context.bytes_reserved(), 80 * MIB);
    context.finish();
}

#[test]
fn a_failed_growth_leaves_nothing_mapped() {
    let context = TestContext::with_capacity(100 * MIB, ON);
    let kept = context.alloc(60 * MIB);
    context.fill(kept, 1, &context.main);
    let census = context.sim.object_counts();
    let report = context.expect_oom(60 * MIB);
    assert!(report.expandable_segments);
    assert_eq!(context.sim.object_counts(), census);
    assert_eq!((context.bytes_reserved(), context.stats().num_ooms), (60 * MIB, 1));
    let fits = context.alloc(40 * MIB);
    assert!(follows(fits, kept));
    context.assert_holds(kept, 1);
    context.finish();
}

/// CUDACachingAllocatorReserveDeviceTest.
#[test]
fn a_request_beyond_the_reserved_addresses_runs_out_of_memory() {
    let context = TestContext::with_capacity(4 * GIB, "expandable_segments:True,expandable_segments_reserve:0.25");
    context.expect_oom(GIB + 20 * MIB);
    assert_eq!((context.stats().num_ooms, context.stats().num_alloc_retries), (1, 1));
    // A second segment is reserved when the first is full.
    let [a, b] = [0; 2].map(|_| context.alloc(600 * MIB));
    assert!(!follows(b, a));
    assert_eq!(context.sim.object_counts().reservations, 2);
    context.finish();
}

#[test]
fn stream_classes_have_their_own_reserve() {
    let settings = "expandable_segments:True,expandable_segments_reserve_by_class:[little:0.1,none:1G]";
    let context = TestContext::with_capacity(4 * GIB, settings);
    let side = context.side_stream();
    context.allocator.set_stream_class(side.id(), "little");
    let request = Request::new(FIRST, side.id(), 600 * MIB);
    assert!(context.allocator.allocate_raw(request).is_err());
    context.alloc(600 * MIB);
    context.allocator.set_stream_class(side.id(), "");
    context.allocator.allocate_raw(request).unwrap();
    context.allocator.check();
    context.finish();
}

/// Expandable segments serve no requests while the setting is off, and serve them again when it is on.
#[test]
fn expandable_segments_can_be_switched_at_any_time() {
    let context = TestContext::new(ON);
    let grown = context.alloc(20 * MIB);
    context.free(grown);
    context.set("expandable_segments:False");
    let plain = context.alloc(20 * MIB);
    assert_ne!(plain.ptr, grown.ptr);
    assert_eq!(context.segments().iter().filter(|segment| segment.is_expandable).count(), 1);
    context.free(plain);
    context.set(ON);
    // The older one can grow, so the other is used first.
    let [first, second] = [0; 2].map(|_| context.alloc(20 * MIB));
    assert_eq!([first.ptr, second.ptr], [plain.ptr, grown.ptr]);
    context.set("expandable_segments:False");
    context.free_all([first, second]);
    assert_eq!(context.trim(), 40 * MIB, "both are released in any case");
    context.finish();
}

/// TestCudaAllocator.test_max_split_expandable.
#[test]
fn both_kinds_of_segments_are_released_before_a_request_fails() {
    let context = TestContext::with_capacity(10 * GIB, "");
    context.allocator.set_memory_fraction(FIRST, (120 * MIB) as f64 / (10 * GIB) as f64).unwrap();
    let in_mode = |growing: &str| {
        context.set(&format!("expandable_segments:{growing},max_split_size_mb:40"));
        context.alloc(40 * MIB)
    };
    let blocks = [in_mode("False"), in_mode("True"), in_mode("False")];
    context.expect_oom(40 * MIB);
    context.free_all(blocks);
    context.alloc(120 * MIB);
    assert_eq!(context.bytes_reserved(), 120 * MIB);
    context.finish();
}

/// TestCudaAllocator.test_garbage_collect_expandable.
#[test]
fn garbage_collection_spares_expandable_segments() {
    let context = TestContext::with_capacity(10 * GIB, "");
    context.allocator.set_memory_fraction(FIRST, (120 * MIB) as f64 / (10 * GIB) as f64).unwrap();
    context.set("expandable_segments:False,garbage_collection_threshold:0.5");
    let a = context.alloc(40 * MIB);
    context.set("expandable_segments:True,garbage_collection_threshold:0.5");
    let b = context.alloc(40 * MIB);
    context.free_all([a, b]);
    context.alloc(80 * MIB);
    context.finish();
}

#[test]
fn peers_can_access_memory_mapped_before_and_after() {
    for settings in [ON, ""] {
        let context = TestContext::with_config(SimConfig::default().with_devices(2), settings);
        let peer = context.instance.device(1).unwrap().default_stream().unwrap();
        let before = context.alloc(40 * MIB);
        context.allocator.enable_peer_access(DeviceId(1), FIRST).unwrap();
        context.allocator.enable_peer_access(DeviceId(1), FIRST).unwrap();
        context.allocator.enable_peer_access(FIRST, FIRST).unwrap();
        let after = context.alloc(60 * MIB);
        for (block, value) in [(before, 3), (after, 4)] {
            context.sim.fill(block.ptr, Pattern::U8(value), block.bytes, peer.id()).unwrap();
            peer.synchronize().unwrap();
            context.assert_holds(block, value);
        }
        context.finish();
    }
}

#[test]
fn expandable_segments_are_off_without_virtual_memory() {
    let mut config = SimConfig::default();
    config.devices[0].properties.virtual_memory = false;
    let context = TestContext::with_config(config, ON);
    context.alloc(30 * MIB);
    assert!(context.segments().iter().all(|segment| !segment.is_expandable));
    context.finish();
}

#[test]
fn unmapping_waits_for_the_stream() {
    let context = TestContext::new(ON);
    let side = context.side_stream();
    let block = context.alloc_on(&side, 100 * MIB);
    for value in 0..30 {
        context.fill(block, value, &side);
    }
    context.free(block);
    assert_eq!(context.trim(), 100 * MIB);
    assert!(context.allocator.find(DevicePtr(block.ptr.0)).is_err());
    context.finish();
}
