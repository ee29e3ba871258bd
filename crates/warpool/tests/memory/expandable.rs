//! Expandable segments: growth, holes, unmapping, limits on addresses, switching them on and off, and access for peers.

use crate::common::memory::{Bench, FIRST, GIB, MIB};
use warpool::driver::sim::SimConfig;
use warpool::driver::{Copies, DeviceId, DevicePtr, Pattern};
use warpool::memory::{Action, Allocation, BlockState, DeviceAllocator, HistoryOptions, Request, SnapshotOptions};

const ON: &str = "expandable_segments:True";

/// Whether two blocks stand side by side.
fn follows(next: Allocation, before: Allocation) -> bool {
    next.ptr.0 == before.ptr.0 + before.bytes
}

#[test]
fn a_segment_grows_at_its_end() {
    let bench = Bench::new(ON);
    let [a, b, c] = [20, 70, 3].map(|mib| bench.alloc(mib * MIB));
    assert!(follows(b, a) && follows(c, b), "{a:?} {b:?} {c:?}");
    // Chunks of 20 MiB, and the last is shared.
    assert_eq!((bench.bytes_reserved(), bench.segments().len()), (100 * MIB, 1));
    let census = bench.sim.object_counts();
    assert_eq!((census.reservations, census.mappings, census.physical), (1, 5, 5));
    for (block, value) in [(a, 1), (b, 2), (c, 3)] {
        bench.fill(block, value, &bench.main);
    }
    for (block, value) in [(a, 1), (b, 2), (c, 3)] {
        bench.assert_holds(block, value);
    }
    bench.finish();
}

#[test]
fn small_requests_grow_by_two_mebibytes() {
    let bench = Bench::new(ON);
    let blocks = [0; 5].map(|_| bench.alloc(MIB));
    assert!(blocks.windows(2).all(|pair| follows(pair[1], pair[0])));
    assert_eq!((bench.bytes_reserved(), bench.sim.object_counts().mappings), (6 * MIB, 3));
    bench.finish();
}

/// One range for each stream and kind.
#[test]
fn streams_have_their_own_segments() {
    let bench = Bench::new(ON);
    let side = bench.side_stream();
    bench.alloc(MIB);
    bench.alloc(2 * MIB);
    bench.alloc_on(&side, MIB);
    assert_eq!((bench.sim.object_counts().reservations, bench.segments().len()), (3, 3));
    bench.finish();
}

/// Counters: no segments, no splits, but bytes and driver calls; the history shows mapping.
#[test]
fn growth_has_its_own_place_in_counters_and_history() {
    let bench = Bench::new(ON);
    bench.allocator.record_history(Some(HistoryOptions::default())).unwrap();
    let a = bench.alloc(30 * MIB);
    let stats = bench.stats();
    assert_eq!((stats.segment.all.allocated, stats.reserved_bytes.large_pool.current), (0, 40 * MIB));
    assert_eq!((stats.inactive_split.all.current, stats.inactive_split_bytes.all.current), (0, 0));
    assert_eq!(stats.num_device_alloc, 1);
    bench.free(a);
    bench.trim();
    let stats = bench.stats();
    assert_eq!((stats.num_device_free, stats.reserved_bytes.all.current), (1, 0));
    let trace = bench.allocator.snapshot(SnapshotOptions::default()).unwrap().traces.remove(0);
    let seen: Vec<(Action, u64)> = trace.iter().map(|entry| (entry.action, entry.size / MIB)).collect();
    let wanted = [
        (Action::SegmentMap, 40),
        (Action::Alloc, 30),
        (Action::FreeRequested, 30),
        (Action::FreeCompleted, 30),
        (Action::SegmentUnmap, 40),
    ];
    assert_eq!(seen, wanted);
    assert_eq!(bench.sim.object_counts().reservations, 0, "its addresses went back too");
    bench.finish();
}

/// Only whole chunks inside a free block are unmapped; the rest stays free around what is in use.
#[test]
fn trim_unmaps_whole_chunks_of_segments_in_use() {
    let bench = Bench::new(ON);
    let [a, b] = [30, 10].map(|mib| bench.alloc(mib * MIB));
    bench.fill(b, 6, &bench.main);
    bench.free(a);
    assert_eq!(bench.trim(), 20 * MIB);
    let segments = bench.segments();
    let blocks: Vec<_> = segments[0].blocks.iter().map(|block| (block.size / MIB, block.state)).collect();
    assert_eq!(blocks, [(10, BlockState::Inactive), (10, BlockState::ActiveAllocated)]);
    assert_eq!((segments.len(), segments[0].address), (1, a.ptr.0 + 20 * MIB));
    bench.assert_holds(b, 6);
    // The hole is filled first, with what is free behind it.
    let again = bench.alloc(30 * MIB);
    assert_eq!((again.ptr, bench.bytes_reserved()), (a.ptr, 40 * MIB));
    bench.assert_holds(b, 6);
    bench.finish();
}

#[test]
fn a_snapshot_lists_each_stretch_without_holes() {
    let bench = Bench::new(ON);
    let blocks = [0; 5].map(|_| bench.alloc(20 * MIB));
    bench.free_all([blocks[1], blocks[3]]);
    bench.trim();
    let segments = bench.segments();
    assert!(segments.iter().all(|segment| segment.is_expandable && segment.total_size == 20 * MIB));
    let at: Vec<u64> = segments.iter().map(|segment| segment.address).collect();
    assert_eq!(at, [blocks[0], blocks[2], blocks[4]].map(|block| block.ptr.0));
    // The lowest hole that fits; then the next; then the end.
    let again = [0; 3].map(|_| bench.alloc(20 * MIB).ptr.0);
    assert_eq!(again, [blocks[1].ptr.0, blocks[3].ptr.0, blocks[4].ptr.0 + 20 * MIB]);
    assert_eq!(bench.segments().len(), 1);
    bench.finish();
}

/// A free block that can grow is kept for those who need that; a smaller one inside is taken first.
#[test]
fn what_borders_on_unmapped_addresses_is_used_last() {
    let bench = Bench::new(ON);
    let [a, _, c] = [20, 20, 10].map(|mib| bench.alloc(mib * MIB));
    bench.free(a);
    let d = bench.alloc(10 * MIB);
    assert_eq!(d.ptr, a.ptr, "not the 10 MiB behind c, though they fit exactly");
    let e = bench.alloc(25 * MIB);
    assert!(follows(e, c), "the end grows, with what is free there");
    assert_eq!(bench.bytes_reserved(), 80 * MIB);
    bench.finish();
}

/// Memory that runs out in the middle of growing leaves nothing behind.
#[test]
fn a_growth_that_fails_takes_nothing() {
    let bench = Bench::with_capacity(100 * MIB, ON);
    let kept = bench.alloc(60 * MIB);
    bench.fill(kept, 1, &bench.main);
    let census = bench.sim.object_counts();
    let report = bench.run_out(60 * MIB);
    assert!(report.expandable_segments);
    assert_eq!(bench.sim.object_counts(), census);
    assert_eq!((bench.bytes_reserved(), bench.stats().num_ooms), (60 * MIB, 1));
    let fits = bench.alloc(40 * MIB);
    assert!(follows(fits, kept));
    bench.assert_holds(kept, 1);
    bench.finish();
}

/// CUDACachingAllocatorReserveDeviceTest: what exceeds the reserved addresses runs out like anything else.
#[test]
fn a_request_beyond_the_reserve_runs_out() {
    let bench = Bench::with_capacity(4 * GIB, "expandable_segments:True,expandable_segments_reserve:0.25");
    bench.run_out(GIB + 20 * MIB);
    assert_eq!((bench.stats().num_ooms, bench.stats().num_alloc_retries), (1, 1));
    // A second segment begins where the first is full.
    let [a, b] = [0; 2].map(|_| bench.alloc(600 * MIB));
    assert!(!follows(b, a));
    assert_eq!(bench.sim.object_counts().reservations, 2);
    bench.finish();
}

#[test]
fn streams_of_a_class_have_their_own_reserve() {
    let settings = "expandable_segments:True,expandable_segments_reserve_by_class:[little:0.1,none:1G]";
    let bench = Bench::with_capacity(4 * GIB, settings);
    let side = bench.side_stream();
    bench.allocator.set_stream_class(side.id(), "little");
    let request = Request::new(FIRST, side.id(), 600 * MIB);
    assert!(bench.allocator.allocate_raw(request).is_err());
    bench.alloc(600 * MIB);
    bench.allocator.set_stream_class(side.id(), "");
    bench.allocator.allocate_raw(request).unwrap();
    bench.allocator.check();
    bench.finish();
}

/// Off, segments that grow serve nobody; on again, they do.
#[test]
fn the_option_can_change_at_any_time() {
    let bench = Bench::new(ON);
    let grown = bench.alloc(20 * MIB);
    bench.free(grown);
    bench.set("expandable_segments:False");
    let plain = bench.alloc(20 * MIB);
    assert_ne!(plain.ptr, grown.ptr);
    assert_eq!(bench.segments().iter().filter(|segment| segment.is_expandable).count(), 1);
    bench.free(plain);
    bench.set(ON);
    // The older one can grow, so the one that cannot comes first.
    let [first, second] = [0; 2].map(|_| bench.alloc(20 * MIB));
    assert_eq!([first.ptr, second.ptr], [plain.ptr, grown.ptr]);
    bench.set("expandable_segments:False");
    bench.free_all([first, second]);
    assert_eq!(bench.trim(), 40 * MIB, "both go back, whatever the option");
    bench.finish();
}

/// TestCudaAllocator.test_max_split_expandable.
#[test]
fn both_kinds_of_segments_go_back_before_a_request_fails() {
    let bench = Bench::with_capacity(10 * GIB, "");
    bench.allocator.set_memory_fraction(FIRST, (120 * MIB) as f64 / (10 * GIB) as f64).unwrap();
    let in_mode = |growing: &str| {
        bench.set(&format!("expandable_segments:{growing},max_split_size_mb:40"));
        bench.alloc(40 * MIB)
    };
    let blocks = [in_mode("False"), in_mode("True"), in_mode("False")];
    bench.run_out(40 * MIB);
    bench.free_all(blocks);
    bench.alloc(120 * MIB);
    assert_eq!(bench.bytes_reserved(), 120 * MIB);
    bench.finish();
}

/// TestCudaAllocator.test_garbage_collect_expandable.
#[test]
fn garbage_collection_passes_over_segments_that_grow() {
    let bench = Bench::with_capacity(10 * GIB, "");
    bench.allocator.set_memory_fraction(FIRST, (120 * MIB) as f64 / (10 * GIB) as f64).unwrap();
    bench.set("expandable_segments:False,garbage_collection_threshold:0.5");
    let a = bench.alloc(40 * MIB);
    bench.set("expandable_segments:True,garbage_collection_threshold:0.5");
    let b = bench.alloc(40 * MIB);
    bench.free_all([a, b]);
    bench.alloc(80 * MIB);
    bench.finish();
}

/// Peers reach what is there and what comes.
#[test]
fn peers_reach_memory_that_grows() {
    for settings in [ON, ""] {
        let bench = Bench::with_config(SimConfig::default().with_devices(2), settings);
        let peer = bench.instance.device(1).unwrap().default_stream().unwrap();
        let before = bench.alloc(40 * MIB);
        bench.allocator.enable_peer_access(DeviceId(1), FIRST).unwrap();
        bench.allocator.enable_peer_access(DeviceId(1), FIRST).unwrap();
        bench.allocator.enable_peer_access(FIRST, FIRST).unwrap();
        let after = bench.alloc(60 * MIB);
        for (block, value) in [(before, 3), (after, 4)] {
            bench.sim.fill(block.ptr, Pattern::U8(value), block.bytes, peer.id()).unwrap();
            peer.synchronize().unwrap();
            bench.assert_holds(block, value);
        }
        bench.finish();
    }
}

/// A device without virtual memory serves without it.
#[test]
fn without_virtual_memory_the_option_is_off() {
    let mut config = SimConfig::default();
    config.devices[0].properties.virtual_memory = false;
    let bench = Bench::with_config(config, ON);
    bench.alloc(30 * MIB);
    assert!(bench.segments().iter().all(|segment| !segment.is_expandable));
    bench.finish();
}

/// Chunks are unmapped only when the stream is done with them.
#[test]
fn unmapping_waits_for_the_stream() {
    let bench = Bench::new(ON);
    let side = bench.side_stream();
    let block = bench.alloc_on(&side, 100 * MIB);
    for value in 0..30 {
        bench.fill(block, value, &side);
    }
    bench.free(block);
    assert_eq!(bench.trim(), 100 * MIB);
    assert!(bench.allocator.find(DevicePtr(block.ptr.0)).is_err());
    bench.finish();
}
