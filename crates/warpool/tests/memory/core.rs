//! Where blocks come from: rounding, best fit, cutting and joining, exact addresses, and what is not an allocation.
//! After PyTorch's own tests where one is named.

use crate::common::memory::{Bench, FIRST, GIB, KIB, MIB};
use warpool::Error;
use warpool::driver::{Call, DeviceId, DevicePtr};
use warpool::memory::{Allocation, BlockState, DeviceAllocator, MemPoolId, Request, SegmentKind, Settings};

/// TestCuda.test_memory_allocation.
#[test]
fn an_allocation_moves_the_counter_by_its_rounded_size() {
    let bench = Bench::new("");
    for bytes in [1, 511, 512, 513, 4_000_000, MIB, MIB + 1, 35_511_234] {
        let before = bench.bytes_allocated();
        let given = bench.alloc(bytes);
        assert_eq!((given.bytes_requested, given.bytes >= bytes), (bytes, true));
        assert_eq!(bench.bytes_allocated(), before + given.bytes);
        assert_eq!(bench.stats().requested_bytes.all.current, bytes);
        bench.free(given);
        assert_eq!(bench.bytes_allocated(), before);
        bench.trim();
    }
    bench.finish();
}

/// Sizes below 1 MiB leave no rest that is too small to cut off, so there the block is the rounded request.
#[test]
fn requests_are_rounded_to_512() {
    let bench = Bench::new("");
    for (bytes, rounded) in [(1, 512), (512, 512), (513, 1024), (1025, 1536), (1_000_001, 1_000_448), (MIB - 1, MIB)] {
        let given = bench.alloc(bytes);
        assert_eq!(given.bytes, rounded, "{bytes}");
        bench.free(given);
    }
    bench.finish();
}

/// The kind and the size of a segment follow from the rounded request.
#[test]
fn a_segment_is_chosen_by_the_rounded_size() {
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
        let bench = Bench::new("");
        bench.alloc(bytes);
        let segments = bench.segments();
        assert_eq!((segments[0].kind, segments[0].total_size), (kind, segment), "{bytes}");
        bench.finish();
    }
}

#[test]
fn large_segments_can_have_another_size() {
    let bench = Bench::new("large_segment_size_mb:32");
    bench.alloc(2 * MIB);
    assert_eq!(bench.segment_sizes(), [32 * MIB]);
    bench.alloc(30 * MIB);
    assert_eq!(bench.segment_sizes(), [32 * MIB], "what is left of the first serves the second");
    bench.finish();
}

/// TestCudaAllocator.test_allocator_settings.
#[test]
fn rounding_in_divisions_follows_the_settings() {
    let bench = Bench::new("");
    let takes = |bytes: u64| {
        bench.trim();
        let given = bench.alloc(bytes);
        let allocated = bench.bytes_allocated();
        bench.free(given);
        allocated
    };
    const SMALLER: u64 = 84 * MIB;
    const LARGER: u64 = 400 * MIB;
    assert_eq!((takes(SMALLER), takes(LARGER)), (84 * MIB, 400 * MIB));
    bench.set("garbage_collection_threshold:0.5, roundup_power2_divisions:4");
    assert_eq!((takes(SMALLER), takes(LARGER)), (96 * MIB, 448 * MIB));
    bench.set("roundup_power2_divisions:[64:8,128:2,256:4,512:2,1024:1,>:1]");
    assert_eq!((takes(SMALLER), takes(LARGER)), (88 * MIB, 448 * MIB));
    // Listed buckets only; those between keep none.
    bench.set("roundup_power2_divisions:[64:1,512:2]");
    assert_eq!((takes(SMALLER), takes(LARGER)), (84 * MIB, 400 * MIB));
    // The first boundary fills what is below, and `>` what is above the last.
    bench.set("roundup_power2_divisions:[128:2,>:4]");
    assert_eq!((takes(SMALLER), takes(LARGER)), (96 * MIB, 448 * MIB));
    // Every further string starts without divisions.
    bench.set("garbage_collection_threshold:0.5");
    assert_eq!((takes(SMALLER), takes(LARGER)), (84 * MIB, 400 * MIB));
    bench.finish();
}

#[test]
fn rounding_in_divisions_begins_above_so_many_smallest_blocks() {
    let bench = Bench::new("roundup_power2_divisions:4");
    for (bytes, rounded) in [(2048, 2048), (2049, 2560), (1200, 1536), (5000, 5120), (4096, 4096)] {
        let given = bench.alloc(bytes);
        assert_eq!(given.bytes, rounded, "{bytes}");
        bench.free(given);
    }
    bench.finish();
}

/// The invalid values of TestCudaAllocator.test_allocator_settings; none changes anything.
#[test]
fn wrong_settings_are_refused() {
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
fn nothing_is_nothing() {
    let bench = Bench::new("");
    let empty = bench.alloc(0);
    assert!(empty.ptr.is_null());
    assert_eq!((empty.bytes, empty.bytes_requested), (0, 0));
    assert_eq!(bench.stats().allocation.all.allocated, 0);
    bench.free(empty);
    bench.allocator.free_raw(DevicePtr(0)).unwrap();
    bench.allocator.record_use_raw(DevicePtr(0), bench.side_stream().id()).unwrap();
    bench.finish();
}

/// The second half of TestCuda.test_out_of_memory, and the negative sizes of test_caching_allocator_alloc_negative_size
/// as they arrive in an unsigned number.
#[test]
fn more_than_an_exbibyte_is_refused_before_anything_is_tried() {
    let bench = Bench::new("");
    let calls = bench.sim.calls_made();
    for bytes in [1 << 60, u64::MAX, u64::MAX - 511, (-1_i64).cast_unsigned()] {
        let error = bench.try_alloc(bytes).unwrap_err();
        assert!(matches!(error, Error::RequestTooLarge { .. }), "{error:?}");
        assert!(error.to_string().contains("Tried to allocate more than 1EB memory"));
        let at = bench.allocator.allocate_at(Request::new(FIRST, bench.main.id(), bytes), DevicePtr(512));
        assert!(at.is_err(), "{at:?}");
    }
    assert_eq!((bench.sim.calls_made(), bench.stats().num_ooms), (calls, 0));
    bench.run_out((1 << 60) - 1);
    bench.alloc(10);
    bench.finish();
}

#[test]
fn what_starts_no_allocation_cannot_be_freed() {
    let bench = Bench::new("");
    let given = bench.alloc(MIB);
    let inside = DevicePtr(given.ptr.0 + 512);
    let free_part = DevicePtr(given.ptr.0 + MIB);
    for wrong in [inside, free_part, DevicePtr(512), DevicePtr(u64::MAX)] {
        assert_eq!(bench.allocator.free_raw(wrong).unwrap_err(), Error::UnknownPointer { ptr: wrong });
        assert!(bench.allocator.record_use_raw(wrong, bench.side_stream().id()).is_err());
        assert!(bench.allocator.find(wrong).is_err());
    }
    assert_eq!(bench.allocator.find(given.ptr).unwrap(), given);
    let error = bench.allocator.free_raw(inside).unwrap_err().to_string();
    assert!(error.contains("invalid device pointer"), "{error}");
    bench.free(given);
    assert!(bench.allocator.free(given).is_err(), "twice");
    assert!(bench.allocator.free_raw(given.ptr).is_err(), "twice");
    bench.finish();
}

/// What was freed twice belongs to somebody else by then, who must not notice.
#[test]
fn a_double_free_does_not_harm_the_next_owner() {
    let bench = Bench::new("");
    let first = bench.alloc(MIB);
    bench.free(first);
    let second = bench.alloc(MIB);
    assert_eq!(second.ptr, first.ptr);
    assert_eq!(bench.allocator.free(first).unwrap_err(), Error::UnknownPointer { ptr: first.ptr });
    bench.allocator.free_later(first);
    bench.fill(second, 3, &bench.main);
    bench.assert_holds(second, 3);
    bench.finish();
}

#[test]
fn a_made_up_allocation_is_refused() {
    let bench = Bench::new("");
    let given = bench.alloc(MIB);
    for slot in [1, u64::MAX, given.slot + 1] {
        assert!(bench.allocator.free(Allocation { slot, ..given }).is_err(), "{slot}");
        bench.allocator.free_later(Allocation { slot, ..given });
    }
    assert!(bench.allocator.free(Allocation { device: DeviceId(9), ..given }).is_err());
    bench.free(given);
    bench.finish();
}

#[test]
fn devices_out_of_range_are_refused_everywhere() {
    let bench = Bench::new("");
    let (allocator, no) = (&bench.allocator, DeviceId(7));
    let refused = [
        allocator.allocate_raw(Request::new(no, bench.main.id(), 1)).map(drop),
        allocator.allocate_raw(Request::new(no, bench.main.id(), 0)).map(drop),
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
        bench.pools().create_graph_pool(no).map(drop),
        bench.pools().capture_began(no),
        bench.pools().capture_ended(no),
    ];
    for outcome in refused {
        assert_eq!(outcome, Err(Error::DeviceOutOfRange { index: 7, count: 1 }));
    }
    bench.finish();
}

#[test]
fn the_smallest_block_that_fits_is_taken() {
    let bench = Bench::new("");
    let blocks: Vec<Allocation> = [30, 14, 22, 12].map(|mib| bench.alloc(mib * MIB)).into();
    bench.free_all(blocks.clone());
    assert_eq!(bench.alloc(13 * MIB).ptr, blocks[1].ptr);
    assert_eq!(bench.alloc(13 * MIB).ptr, blocks[2].ptr);
    assert_eq!(bench.alloc(12 * MIB).ptr, blocks[3].ptr);
    assert_eq!(bench.segments().len(), 4);
    bench.finish();
}

/// TestMemPool.test_nccl_mem_alloc_addresses_in_random_order: among blocks of one size the oldest segment's comes
/// first, not that of the lowest address, so the same requests get the same memory again.
#[test]
fn of_equal_blocks_the_oldest_segment_comes_first() {
    const PLACES: [u64; 4] = [0x7_4000_0000, 0x7_1000_0000, 0x7_3000_0000, 0x7_2000_0000];
    let bench = Bench::new("");
    let allocate = || PLACES.map(|_| bench.alloc(12 * MIB));
    let blocks = PLACES.map(|place| {
        bench.sim.place_next_alloc(FIRST, DevicePtr(place)).unwrap();
        bench.alloc(12 * MIB)
    });
    assert_eq!(blocks.map(|block| block.ptr.0), PLACES);
    for order in [[0, 1, 2, 3], [3, 1, 0, 2], [2, 0, 3, 1]] {
        bench.free_all(order.map(|at| bench.allocator.find(DevicePtr(PLACES[at])).unwrap()));
        assert_eq!(allocate().map(|block| block.ptr.0), PLACES, "freed in the order {order:?}");
    }
    // The same after segments were cut and joined again.
    bench.free_all(PLACES.map(|place| bench.allocator.find(DevicePtr(place)).unwrap()));
    let pieces = [0; 8].map(|_| bench.alloc(5 * MIB));
    assert_eq!(pieces[0].ptr.0, PLACES[0]);
    bench.free_all(pieces);
    assert_eq!(allocate().map(|block| block.ptr.0), PLACES);
    bench.finish();
}

#[test]
fn within_a_segment_the_lowest_of_equal_blocks_comes_first() {
    let bench = Bench::new("");
    let blocks = [0; 6].map(|_| bench.alloc(4 * KIB));
    bench.free_all([blocks[4], blocks[0], blocks[2]]);
    assert_eq!(bench.alloc(4 * KIB).ptr, blocks[0].ptr);
    assert_eq!(bench.alloc(4 * KIB).ptr, blocks[2].ptr);
    assert_eq!(bench.alloc(4 * KIB).ptr, blocks[4].ptr);
    bench.finish();
}

#[test]
fn streams_never_share_cached_blocks() {
    let bench = Bench::new("");
    let other = bench.side_stream();
    let mine = bench.alloc(MIB);
    bench.fill(mine, 1, &bench.main);
    bench.free(mine);
    let theirs = bench.alloc_on(&other, MIB);
    bench.fill(theirs, 2, &other);
    assert_ne!(theirs.ptr, mine.ptr);
    assert_eq!(bench.segment_sizes(), [2 * MIB, 2 * MIB]);
    bench.free(theirs);
    assert_eq!(bench.alloc(MIB).ptr, mine.ptr);
    bench.finish();
}

#[test]
fn small_and_large_requests_never_share_segments() {
    let bench = Bench::new("");
    let large = bench.alloc(2 * MIB);
    bench.free(large);
    let small = bench.alloc(MIB);
    assert_eq!(bench.segments().len(), 2);
    assert!(small.ptr.0 < large.ptr.0 || small.ptr.0 >= large.ptr.0 + 20 * MIB);
    bench.finish();
}

/// Of a large block more than 1 MiB must be left over, of a small one 512 bytes.
#[test]
fn a_rest_is_cut_off_if_it_is_worth_it() {
    let bench = Bench::new("");
    let whole = bench.alloc(12 * MIB);
    bench.free(whole);
    let with_rest = bench.alloc(11 * MIB);
    assert_eq!(with_rest.bytes, 12 * MIB, "a rest of exactly 1 MiB stays");
    bench.free(with_rest);
    let cut = bench.alloc(11 * MIB - 512);
    assert_eq!((cut.bytes, cut.ptr), (11 * MIB - 512, whole.ptr), "the low end is given out");
    bench.free(cut);
    let small = bench.alloc(MIB - 512);
    assert_eq!(small.bytes, MIB - 512);
    bench.finish();
}

#[test]
fn free_neighbours_are_joined_on_both_sides() {
    let bench = Bench::new("");
    let blocks = [0; 5].map(|_| bench.alloc(4 * MIB));
    let states = || bench.segments()[0].blocks.iter().map(|block| (block.size / MIB, block.state)).collect::<Vec<_>>();
    let (taken, free) = (BlockState::ActiveAllocated, BlockState::Inactive);
    bench.free_all([blocks[1], blocks[3]]);
    assert_eq!(states(), [(4, taken), (4, free), (4, taken), (4, free), (4, taken)]);
    bench.free(blocks[2]);
    assert_eq!(states(), [(4, taken), (12, free), (4, taken)]);
    bench.free_all([blocks[0], blocks[4]]);
    assert_eq!(states(), [(20, free)]);
    bench.finish();
}

/// The blocks of a live segment cannot go back, and a whole free one can.
#[test]
fn trim_gives_back_only_whole_segments() {
    let bench = Bench::new("");
    let (kept, freed) = (bench.alloc(4 * MIB), bench.alloc(4 * MIB));
    let whole = bench.alloc(30 * MIB);
    bench.free_all([freed, whole]);
    assert_eq!(bench.trim(), 30 * MIB);
    assert_eq!(bench.segment_sizes(), [20 * MIB]);
    bench.free(kept);
    assert_eq!(bench.trim(), 20 * MIB);
    assert_eq!((bench.trim(), bench.bytes_reserved(), bench.sim.object_counts().allocations), (0, 0, 0));
    bench.finish();
}

#[test]
fn the_hot_path_makes_no_driver_call() {
    let bench = Bench::new("");
    let first = [bench.alloc(MIB), bench.alloc(5 * MIB)];
    bench.free_all(first);
    let calls = bench.sim.calls_made();
    for _ in 0..100 {
        bench.free_all([bench.alloc(100), bench.alloc(MIB), bench.alloc(5 * MIB), bench.alloc(0)]);
    }
    assert_eq!(bench.sim.calls_made(), calls);
    assert_eq!(bench.sim.call_count(Call::MemAlloc), 2);
    bench.finish();
}

/// cacheInfo: the larger of what the device has and what is cached, private pools included.
#[test]
fn the_largest_available_is_free_or_cached() {
    let bench = Bench::with_capacity(GIB, "");
    assert_eq!(bench.allocator.largest_available(FIRST).unwrap(), GIB);
    let most = bench.alloc(900 * MIB);
    assert_eq!(bench.allocator.largest_available(FIRST).unwrap(), 124 * MIB);
    bench.free(most);
    assert_eq!(bench.allocator.largest_available(FIRST).unwrap(), 900 * MIB);
    bench.trim();
    let pool = bench.pools().create_graph_pool(FIRST).unwrap();
    let private = bench.alloc_in(pool, 900 * MIB);
    bench.free(private);
    assert_eq!(bench.allocator.largest_available(FIRST).unwrap(), 900 * MIB);
    bench.finish();
}
