//! Rounding, best fit, splitting and merging, and arguments that are not an allocation. A named test is the one of
//! PyTorch that it follows.

use crate::common::memory::{FIRST, GIB, KIB, MIB, TestContext};
use warpool::Error;
use warpool::driver::sim::SimConfig;
use warpool::driver::{Call, DeviceId, DevicePtr};
use warpool::memory::pools::Checkpoints as _;
use warpool::memory::raw::{Allocation, Request};
use warpool::memory::report::{BlockState, SegmentKind};
use warpool::memory::{DeviceAllocator, MemPoolId, Settings};

/// TestCuda.test_memory_allocation.
#[test]
fn allocated_bytes_count_the_rounded_size() {
    let context = TestContext::new("");
    for bytes in [1, 511, 512, 513, 4_000_000, MIB, MIB + 1, 35_511_234] {
        let before = context.bytes_allocated();
        let allocation = context.alloc(bytes);
        assert_eq!((allocation.bytes_requested, allocation.bytes >= bytes), (bytes, true));
        assert_eq!(context.bytes_allocated(), before + allocation.bytes);
        assert_eq!(context.stats().requested_bytes.all.current, bytes);
        context.free(allocation);
        assert_eq!(context.bytes_allocated(), before);
        context.trim();
    }
    context.finish();
}

/// Below 1 MiB any rest is split off, so the block has the rounded size.
#[test]
fn requests_are_rounded_to_512() {
    let context = TestContext::new("");
    for (bytes, rounded) in [(1, 512), (512, 512), (513, 1024), (1025, 1536), (1_000_001, 1_000_448), (MIB - 1, MIB)] {
        let allocation = context.alloc(bytes);
        assert_eq!(allocation.bytes, rounded, "{bytes}");
        context.free(allocation);
    }
    context.finish();
}

/// The kind and the size of a segment follow from the rounded request.
#[test]
fn segment_size_follows_the_rounded_size() {
    let cases = [
        (1, SegmentKind::Small, 2 * MIB),
        (MIB - 1, SegmentKind::Small, 2 * MIB),
        (MIB, SegmentKind::Small, 2 * MIB),
        (MIB + 1, SegmentKind::Large, 20 * MIB),
        (10 * MIB - 512, SegmentKind::Large, 20 * MIB),
        // Rounds to 10 MiB, which gets a segment of its own.
        (10 * MIB - 511, SegmentKind::Large, 10 * MIB),
        (10 * MIB, SegmentKind::Large, 10 * MIB),
        (10 * MIB + 1, SegmentKind::Large, 12 * MIB),
        (37 * MIB + 5, SegmentKind::Large, 38 * MIB),
    ];
    for (bytes, kind, segment) in cases {
        let context = TestContext::new("");
        context.alloc(bytes);
        let segments = context.segments();
        assert_eq!((segments[0].kind, segments[0].total_size), (kind, segment), "{bytes}");
        context.finish();
    }
}

#[test]
fn large_segment_size_is_a_setting() {
    let context = TestContext::new("large_segment_size_mb:32");
    context.alloc(2 * MIB);
    assert_eq!(context.segment_sizes(), [32 * MIB]);
    context.alloc(30 * MIB);
    assert_eq!(context.segment_sizes(), [32 * MIB], "the rest of the first serves the second");
    context.finish();
}

/// TestCudaAllocator.test_allocator_settings.
#[test]
fn rounding_to_divisions_follows_the_settings() {
    let context = TestContext::new("");
    let takes = |bytes: u64| {
        context.trim();
        let allocation = context.alloc(bytes);
        let allocated = context.bytes_allocated();
        context.free(allocation);
        allocated
    };
    const SMALLER: u64 = 84 * MIB;
    const LARGER: u64 = 400 * MIB;
    assert_eq!((takes(SMALLER), takes(LARGER)), (84 * MIB, 400 * MIB));
    context.set("garbage_collection_threshold:0.5, roundup_power2_divisions:4");
    assert_eq!((takes(SMALLER), takes(LARGER)), (96 * MIB, 448 * MIB));
    context.set("roundup_power2_divisions:[64:8,128:2,256:4,512:2,1024:1,>:1]");
    assert_eq!((takes(SMALLER), takes(LARGER)), (88 * MIB, 448 * MIB));
    // Only listed buckets have divisions; those between have none.
    context.set("roundup_power2_divisions:[64:1,512:2]");
    assert_eq!((takes(SMALLER), takes(LARGER)), (84 * MIB, 400 * MIB));
    // The first boundary also covers the sizes below it, and `>` the sizes above the last.
    context.set("roundup_power2_divisions:[128:2,>:4]");
    assert_eq!((takes(SMALLER), takes(LARGER)), (96 * MIB, 448 * MIB));
    // Every further string starts without divisions.
    context.set("garbage_collection_threshold:0.5");
    assert_eq!((takes(SMALLER), takes(LARGER)), (84 * MIB, 400 * MIB));
    context.finish();
}

#[test]
fn rounding_to_divisions_starts_above_512_times_divisions() {
    let context = TestContext::new("roundup_power2_divisions:4");
    for (bytes, rounded) in [(2048, 2048), (2049, 2560), (1200, 1536), (5000, 5120), (4096, 4096)] {
        let allocation = context.alloc(bytes);
        assert_eq!(allocation.bytes, rounded, "{bytes}");
        context.free(allocation);
    }
    context.finish();
}

/// The invalid values of TestCudaAllocator.test_allocator_settings; none changes anything.
#[test]
fn invalid_settings_are_refused() {
    let settings = Settings::parse("").unwrap();
    for wrong in [
        "foo:1,bar:2",
        "garbage_collection_threshold:1.2",
        "max_split_size_mb:2",
        "release_lock_on_cudamalloc:none",
        "pinned_use_cuda_host_register:none",
        "pinned_num_register_threads:none",
        "pinned_num_register_threads:1024",
        "roundup_power2_divisions:3",
        "roundup_power2_divisions:[3:2]",
        "per_process_memory_fraction:1.5",
        "per_process_memory_fraction:-0.1",
        "large_segment_size_mb:10",
    ] {
        assert!(settings.updated(wrong).is_err(), "{wrong}");
    }
}

#[test]
fn zero_bytes_are_null() {
    let context = TestContext::new("");
    let empty = context.alloc(0);
    assert!(empty.ptr.is_null());
    assert_eq!((empty.bytes, empty.bytes_requested), (0, 0));
    assert_eq!(context.stats().allocation.all.allocated, 0);
    context.free(empty);
    context.allocator.free_raw(DevicePtr(0)).unwrap();
    context.allocator.record_use_raw(DevicePtr(0), context.side_stream().id()).unwrap();
    context.finish();
}

/// The second half of TestCuda.test_out_of_memory, and the negative sizes of test_caching_allocator_alloc_negative_size
/// as they arrive in an unsigned number.
#[test]
fn more_than_an_exbibyte_is_refused_at_once() {
    let context = TestContext::new("");
    let calls = context.sim.calls_made();
    for bytes in [1 << 60, u64::MAX, u64::MAX - 511, (-1_i64).cast_unsigned()] {
        let error = context.try_alloc(bytes).unwrap_err();
        assert!(matches!(error, Error::RequestTooLarge { .. }), "{error:?}");
        assert!(error.to_string().contains("Tried to allocate more than 1EB memory"));
        let at = context.allocator.allocate_at(Request::new(FIRST, context.main.id(), bytes), DevicePtr(512));
        assert!(at.is_err(), "{at:?}");
    }
    assert_eq!((context.sim.calls_made(), context.stats().num_ooms), (calls, 0));
    context.expect_oom((1 << 60) - 1);
    context.alloc(10);
    context.finish();
}

#[test]
fn unknown_pointers_cannot_be_freed() {
    let context = TestContext::new("");
    let allocation = context.alloc(MIB);
    let inside = DevicePtr(allocation.ptr.0 + 512);
    let free_part = DevicePtr(allocation.ptr.0 + MIB);
    for wrong in [inside, free_part, DevicePtr(512), DevicePtr(u64::MAX)] {
        assert_eq!(context.allocator.free_raw(wrong).unwrap_err(), Error::UnknownPointer { ptr: wrong });
        assert!(context.allocator.record_use_raw(wrong, context.side_stream().id()).is_err());
        assert!(context.allocator.find(wrong).is_err());
    }
    assert_eq!(context.allocator.find(allocation.ptr).unwrap(), allocation);
    let error = context.allocator.free_raw(inside).unwrap_err().to_string();
    assert!(error.contains("invalid device pointer"), "{error}");
    context.free(allocation);
    assert!(context.allocator.free(allocation).is_err(), "twice");
    assert!(context.allocator.free_raw(allocation.ptr).is_err(), "twice");
    context.finish();
}

#[test]
fn a_double_free_leaves_the_next_owner_alone() {
    let context = TestContext::new("");
    let first = context.alloc(MIB);
    context.free(first);
    let second = context.alloc(MIB);
    assert_eq!(second.ptr, first.ptr);
    assert_eq!(context.allocator.free(first).unwrap_err(), Error::UnknownPointer { ptr: first.ptr });
    context.allocator.free_later(first);
    context.fill(second, 3, &context.main);
    context.assert_holds(second, 3);
    context.finish();
}

/// For a block that is a whole segment, for a part of one, and for one that is freed and allocated again at once.
#[test]
fn a_second_free_is_refused_though_the_block_is_the_same() {
    // With a driver that does not track blocks, a block is freed and allocated again without any step.
    for track_suballocations in [true, false] {
        let context = TestContext::with_config(SimConfig { track_suballocations, ..SimConfig::default() }, "");
        for bytes in [MIB, 20 * MIB] {
            let mut stale = Vec::new();
            for _ in 0..4 {
                let block = context.alloc(bytes);
                for &old in &stale {
                    assert_eq!(context.allocator.free(old), Err(Error::UnknownPointer { ptr: block.ptr }));
                }
                context.free(block);
                stale.push(block);
            }
        }
        context.finish();
    }
}

#[test]
fn a_forged_allocation_is_refused() {
    let context = TestContext::new("");
    let allocation = context.alloc(MIB);
    for slot in [1, u64::MAX, allocation.slot + 1] {
        assert!(context.allocator.free(Allocation { slot, ..allocation }).is_err(), "{slot}");
        context.allocator.free_later(Allocation { slot, ..allocation });
    }
    assert!(context.allocator.free(Allocation { device: DeviceId(9), ..allocation }).is_err());
    context.free(allocation);
    context.finish();
}

#[test]
fn devices_out_of_range_are_refused() {
    let context = TestContext::new("");
    let (allocator, no) = (&context.allocator, DeviceId(7));
    let refused = [
        allocator.allocate_raw(Request::new(no, context.main.id(), 1)).map(drop),
        allocator.allocate_raw(Request::new(no, context.main.id(), 0)).map(drop),
        allocator.trim(no, MemPoolId::DEFAULT).map(drop),
        allocator.largest_available(no).map(drop),
        allocator.set_memory_fraction(no, 0.5),
        allocator.memory_fraction(no).map(drop),
        allocator.stats(no).map(drop),
        allocator.reset_peak_stats(no),
        allocator.reset_accumulated_stats(no),
        allocator.enable_peer_access(no, FIRST),
        allocator.enable_peer_access(FIRST, no),
        allocator.checkpoint(no, MemPoolId::DEFAULT).map(drop),
        context.pools().create_graph_pool(no).map(drop),
        context.pools().capture_began(no),
        context.pools().capture_ended(no),
    ];
    for outcome in refused {
        assert_eq!(outcome, Err(Error::DeviceOutOfRange { index: 7, count: 1 }));
    }
    context.finish();
}

#[test]
fn the_smallest_fitting_block_is_taken() {
    let context = TestContext::new("");
    let blocks: Vec<Allocation> = [30, 14, 22, 12].map(|mib| context.alloc(mib * MIB)).into();
    context.free_all(blocks.clone());
    assert_eq!(context.alloc(13 * MIB).ptr, blocks[1].ptr);
    assert_eq!(context.alloc(13 * MIB).ptr, blocks[2].ptr);
    assert_eq!(context.alloc(12 * MIB).ptr, blocks[3].ptr);
    assert_eq!(context.segments().len(), 4);
    context.finish();
}

/// TestMemPool.test_nccl_mem_alloc_addresses_in_random_order: among blocks of one size the one in the oldest segment is
/// taken, not the one at the lowest address, so the same requests get the same memory again.
#[test]
fn equal_blocks_are_taken_by_registration_of_their_segment() {
    const PLACES: [u64; 4] = [0x7_4000_0000, 0x7_1000_0000, 0x7_3000_0000, 0x7_2000_0000];
    let context = TestContext::new("");
    let allocate = || PLACES.map(|_| context.alloc(12 * MIB));
    let blocks = PLACES.map(|place| {
        context.sim.place_next_alloc(FIRST, DevicePtr(place)).unwrap();
        context.alloc(12 * MIB)
    });
    assert_eq!(blocks.map(|block| block.ptr.0), PLACES);
    for order in [[0, 1, 2, 3], [3, 1, 0, 2], [2, 0, 3, 1]] {
        context.free_all(order.map(|at| context.allocator.find(DevicePtr(PLACES[at])).unwrap()));
        assert_eq!(allocate().map(|block| block.ptr.0), PLACES, "freed in the order {order:?}");
    }
    // The same after segments were split and merged again.
    context.free_all(PLACES.map(|place| context.allocator.find(DevicePtr(place)).unwrap()));
    let pieces = [0; 8].map(|_| context.alloc(5 * MIB));
    assert_eq!(pieces[0].ptr.0, PLACES[0]);
    context.free_all(pieces);
    assert_eq!(allocate().map(|block| block.ptr.0), PLACES);
    context.finish();
}

#[test]
fn equal_blocks_of_a_segment_are_taken_by_address() {
    let context = TestContext::new("");
    let blocks = [0; 6].map(|_| context.alloc(4 * KIB));
    context.free_all([blocks[4], blocks[0], blocks[2]]);
    assert_eq!(context.alloc(4 * KIB).ptr, blocks[0].ptr);
    assert_eq!(context.alloc(4 * KIB).ptr, blocks[2].ptr);
    assert_eq!(context.alloc(4 * KIB).ptr, blocks[4].ptr);
    context.finish();
}

#[test]
fn streams_never_share_cached_blocks() {
    let context = TestContext::new("");
    let other = context.side_stream();
    let mine = context.alloc(MIB);
    context.fill(mine, 1, &context.main);
    context.free(mine);
    let theirs = context.alloc_on(&other, MIB);
    context.fill(theirs, 2, &other);
    assert_ne!(theirs.ptr, mine.ptr);
    assert_eq!(context.segment_sizes(), [2 * MIB, 2 * MIB]);
    context.free(theirs);
    assert_eq!(context.alloc(MIB).ptr, mine.ptr);
    context.finish();
}

#[test]
fn small_and_large_requests_never_share_segments() {
    let context = TestContext::new("");
    let large = context.alloc(2 * MIB);
    context.free(large);
    let small = context.alloc(MIB);
    assert_eq!(context.segments().len(), 2);
    assert!(small.ptr.0 < large.ptr.0 || small.ptr.0 >= large.ptr.0 + 20 * MIB);
    context.finish();
}

/// The rest of a large block must exceed 1 MiB, that of a small one reach 512 bytes.
#[test]
fn a_block_is_split_if_the_rest_is_large_enough() {
    let context = TestContext::new("");
    let whole = context.alloc(12 * MIB);
    context.free(whole);
    let with_rest = context.alloc(11 * MIB);
    assert_eq!(with_rest.bytes, 12 * MIB, "a rest of exactly 1 MiB is not split off");
    context.free(with_rest);
    let cut = context.alloc(11 * MIB - 512);
    assert_eq!((cut.bytes, cut.ptr), (11 * MIB - 512, whole.ptr), "the low end is allocated");
    context.free(cut);
    let small = context.alloc(MIB - 512);
    assert_eq!(small.bytes, MIB - 512);
    context.finish();
}

#[test]
fn free_neighbours_are_merged_on_both_sides() {
    let context = TestContext::new("");
    let blocks = [0; 5].map(|_| context.alloc(4 * MIB));
    let states =
        || context.segments()[0].blocks.iter().map(|block| (block.size / MIB, block.state)).collect::<Vec<_>>();
    let (allocated, free) = (BlockState::ActiveAllocated, BlockState::Inactive);
    context.free_all([blocks[1], blocks[3]]);
    assert_eq!(states(), [(4, allocated), (4, free), (4, allocated), (4, free), (4, allocated)]);
    context.free(blocks[2]);
    assert_eq!(states(), [(4, allocated), (12, free), (4, allocated)]);
    context.free_all([blocks[0], blocks[4]]);
    assert_eq!(states(), [(20, free)]);
    context.finish();
}

#[test]
fn trim_releases_only_whole_segments() {
    let context = TestContext::new("");
    let (kept, freed) = (context.alloc(4 * MIB), context.alloc(4 * MIB));
    let whole = context.alloc(30 * MIB);
    context.free_all([freed, whole]);
    assert_eq!(context.trim(), 30 * MIB);
    assert_eq!(context.segment_sizes(), [20 * MIB]);
    context.free(kept);
    assert_eq!(context.trim(), 20 * MIB);
    assert_eq!((context.trim(), context.bytes_reserved(), context.sim.object_counts().allocations), (0, 0, 0));
    context.finish();
}

#[test]
fn the_hot_path_makes_no_driver_call() {
    let context = TestContext::new("");
    let first = [context.alloc(MIB), context.alloc(5 * MIB)];
    context.free_all(first);
    let calls = context.sim.calls_made();
    for _ in 0..100 {
        context.free_all([context.alloc(100), context.alloc(MIB), context.alloc(5 * MIB), context.alloc(0)]);
    }
    assert_eq!(context.sim.calls_made(), calls);
    assert_eq!(context.sim.call_count(Call::MemAlloc), 2);
    context.finish();
}

/// cacheInfo: the larger of the device's free memory and the largest cached block, private pools included.
#[test]
fn largest_available_is_free_or_cached() {
    let context = TestContext::with_capacity(GIB, "");
    assert_eq!(context.allocator.largest_available(FIRST).unwrap(), GIB);
    let most = context.alloc(900 * MIB);
    assert_eq!(context.allocator.largest_available(FIRST).unwrap(), 124 * MIB);
    context.free(most);
    assert_eq!(context.allocator.largest_available(FIRST).unwrap(), 900 * MIB);
    context.trim();
    let pool = context.pools().create_graph_pool(FIRST).unwrap();
    let private = context.alloc_in(pool, 900 * MIB);
    context.free(private);
    assert_eq!(context.allocator.largest_available(FIRST).unwrap(), 900 * MIB);
    context.finish();
}
