//! Statistics: their names, what changes them, peaks and resets; and random runs compared with plain sums.

use std::collections::BTreeMap;

use crate::common::memory::{FIRST, GIB, KIB, MIB, TestContext};
use crate::common::rng::Rng;
use warpool::driver::{Call, DevicePtr};
use warpool::memory::pools::PoolOptions;
use warpool::memory::raw::{Allocation, Request};
use warpool::memory::report::{Action, HistoryOptions, SnapshotOptions, StatByKind};
use warpool::memory::{DeviceAllocator, MemPoolId};

/// The names of `torch.cuda.memory_stats`.
#[test]
fn statistics_have_pytorchs_names() {
    let context = TestContext::new("");
    let pool = context.pools().create_pool(FIRST, PoolOptions::default()).unwrap();
    context.alloc_in(pool, MIB);
    let flat: BTreeMap<String, i64> = context.stats().flattened().into_iter().collect();
    let mut expected = Vec::new();
    let by_kind = [
        "allocation",
        "segment",
        "active",
        "inactive_split",
        "allocated_bytes",
        "reserved_bytes",
        "active_bytes",
        "inactive_split_bytes",
        "requested_bytes",
        "reserved_bytes_by_private_pools.0_1",
    ];
    for name in by_kind {
        for kind in ["all", "small_pool", "large_pool"] {
            expected.push(format!("{name}.{kind}"));
        }
    }
    expected.extend(["oversize_allocations".to_owned(), "oversize_segments".to_owned()]);
    let mut expected: Vec<String> = expected
        .iter()
        .flat_map(|name| ["current", "peak", "allocated", "freed"].map(|what| format!("{name}.{what}")))
        .collect();
    expected.extend(
        [
            "num_alloc_retries",
            "num_ooms",
            "num_sync_all_streams",
            "num_device_alloc",
            "num_device_free",
            "num_oom_rejections",
            "max_split_size",
        ]
        .map(str::to_owned),
    );
    expected.sort();
    assert_eq!(flat.keys().cloned().collect::<Vec<_>>(), expected);
    assert_eq!(flat["max_split_size"], -1);
    assert_eq!(flat["reserved_bytes_by_private_pools.0_1.small_pool.current"], 2 << 20);
    context.set("max_split_size_mb:64");
    assert_eq!(context.stats().max_split_size, 64 << 20);
    context.finish();
}

#[test]
fn every_statistic_counts_what_it_should() {
    let context = TestContext::new("");
    let small = context.alloc(1000);
    let large = context.alloc(3 * MIB);
    let now = |by_kind: StatByKind| [by_kind.all, by_kind.small_pool, by_kind.large_pool].map(|stat| stat.current);
    let stats = context.stats();
    assert_eq!(now(stats.allocation), [2, 1, 1]);
    assert_eq!(now(stats.active), [2, 1, 1]);
    assert_eq!(now(stats.segment), [2, 1, 1]);
    assert_eq!(now(stats.inactive_split), [2, 1, 1]);
    assert_eq!(now(stats.allocated_bytes), [3 * MIB + KIB, KIB, 3 * MIB]);
    assert_eq!(now(stats.active_bytes), now(stats.allocated_bytes));
    assert_eq!(now(stats.requested_bytes), [3 * MIB + 1000, 1000, 3 * MIB]);
    assert_eq!(now(stats.reserved_bytes), [22 * MIB, 2 * MIB, 20 * MIB]);
    assert_eq!(now(stats.inactive_split_bytes), [19 * MIB - KIB, 2 * MIB - KIB, 17 * MIB]);
    assert_eq!((stats.num_device_alloc, stats.num_device_free), (2, 0));
    context.free_all([small, large]);
    let stats = context.stats();
    for by_kind in [stats.allocation, stats.active, stats.inactive_split, stats.allocated_bytes, stats.active_bytes] {
        assert_eq!(now(by_kind), [0, 0, 0]);
    }
    assert_eq!(now(stats.inactive_split_bytes), [0, 0, 0], "a free segment is not split");
    assert_eq!(now(stats.reserved_bytes), [22 * MIB, 2 * MIB, 20 * MIB]);
    assert_eq!(stats.allocation.all.freed, 2);
    context.trim();
    let stats = context.stats();
    assert_eq!((now(stats.reserved_bytes), now(stats.segment)), ([0, 0, 0], [0, 0, 0]));
    assert_eq!((stats.num_device_alloc, stats.num_device_free), (2, 2));
    assert_eq!(stats.reserved_bytes.all.peak, 22 * MIB);
    context.finish();
}

#[test]
fn peaks_and_sums_can_be_reset() {
    let context = TestContext::with_capacity(GIB, "max_split_size_mb:100");
    let kept = context.alloc(200 * MIB);
    let freed = context.alloc(300 * MIB);
    context.expect_oom(2 * GIB);
    context.free(freed);
    let stats = context.stats();
    assert_eq!((stats.oversize_allocations.current, stats.oversize_allocations.peak), (1, 2));
    assert_eq!(stats.oversize_segments.current, 2, "of the threshold or more");
    assert_eq!(stats.allocated_bytes.all.peak, 500 * MIB);
    assert_eq!((stats.num_ooms, stats.num_alloc_retries), (1, 1));
    context.trim();
    context.allocator.reset_peak_stats(FIRST).unwrap();
    let stats = context.stats();
    assert_eq!((stats.allocated_bytes.all.peak, stats.allocated_bytes.large_pool.peak), (200 * MIB, 200 * MIB));
    assert_eq!((stats.reserved_bytes.all.peak, stats.reserved_bytes.large_pool.peak), (200 * MIB, 200 * MIB));
    assert_eq!((stats.oversize_allocations.peak, stats.allocated_bytes.all.allocated), (1, 500 * MIB));
    context.allocator.reset_accumulated_stats(FIRST).unwrap();
    let stats = context.stats();
    assert_eq!((stats.allocated_bytes.all.allocated, stats.allocated_bytes.all.freed), (0, 0));
    assert_eq!((stats.oversize_segments.allocated, stats.allocated_bytes.all.current), (0, 200 * MIB));
    let counters = [stats.num_ooms, stats.num_alloc_retries, stats.num_device_alloc, stats.num_device_free];
    assert_eq!((counters, stats.num_sync_all_streams), ([0; 4], 0));
    assert_eq!(stats.max_split_size, 100 << 20, "not accumulated");
    context.free(kept);
    assert_eq!(context.stats().allocated_bytes.all.freed, 200 * MIB);
    context.finish();
}

#[test]
fn a_block_of_the_threshold_is_oversize() {
    let context = TestContext::new("max_split_size_mb:64");
    let below = context.alloc(64 * MIB - 1024 * KIB);
    // Its segment has 64 MiB, the block has less.
    assert_eq!((context.stats().oversize_segments.current, context.stats().oversize_allocations.current), (1, 1));
    context.free(below);
    let exact = context.alloc(64 * MIB);
    assert_eq!(context.stats().oversize_allocations.current, 1);
    context.free(exact);
    context.trim();
    let stats = context.stats();
    assert_eq!((stats.oversize_segments.current, stats.oversize_allocations.current), (0, 0));
    context.finish();
}

/// Oversize counts follow the current threshold.
#[test]
fn the_threshold_can_change_while_blocks_are_allocated() {
    let context = TestContext::new("");
    let oversize = || {
        let stats = context.stats();
        (stats.oversize_allocations.current, stats.oversize_segments.current)
    };
    let early = context.alloc(100 * MIB);
    assert_eq!(oversize(), (0, 0));
    context.set("max_split_size_mb:50");
    assert_eq!(oversize(), (1, 1));
    let second = context.alloc(200 * MIB);
    context.set("max_split_size_mb:300");
    let late = context.alloc(250 * MIB);
    assert_eq!(oversize(), (0, 0));
    context.set("max_split_size_mb:20");
    assert_eq!(oversize(), (3, 3));
    context.free_all([early, second, late]);
    assert_eq!(oversize(), (0, 3));
    context.trim();
    assert_eq!(oversize(), (0, 0));
    context.finish();
}

/// TestCuda.test_memory_stats: allocations, frees, trims and resets in a fixed order, compared with sums.
#[test]
fn statistics_stay_consistent() {
    let context = TestContext::new("");
    let mut live: Vec<Allocation> = Vec::new();
    let (mut sum, mut peak) = (0, 0);
    let steps = (0..60_u64).map(|step| (step, (step * 7919) % 5));
    for (step, what) in steps {
        match what {
            0..=2 => {
                let allocation = context.alloc(1 + (step * 1_234_567) % (24 * MIB));
                sum += allocation.bytes;
                live.push(allocation);
            }
            3 if !live.is_empty() => {
                let freed = live.remove((step as usize * 31) % live.len());
                sum -= freed.bytes;
                context.free(freed);
            }
            _ => {
                context.trim();
                context.allocator.reset_peak_stats(FIRST).unwrap();
                peak = sum;
            }
        }
        peak = peak.max(sum);
        let stats = context.stats();
        assert_eq!((stats.allocated_bytes.all.current, stats.allocated_bytes.all.peak), (sum, peak), "step {step}");
        let reserved = stats.reserved_bytes.all;
        assert!(reserved.current >= sum && reserved.peak >= reserved.current);
        assert_eq!(reserved.current, context.segment_sizes().iter().sum::<u64>());
        assert_eq!(reserved.current, context.sim.object_counts().bytes_used);
    }
    context.free_all(live);
    context.trim();
    assert_eq!((context.bytes_reserved(), context.sim.object_counts().bytes_used), (0, 0));
    context.finish();
}

/// TestCudaAllocator.test_allocator_fuzz: 10,000 random steps with the contents checked, in both modes.
#[test]
fn random_steps_keep_contents() {
    for settings in ["", "expandable_segments:True", "max_split_size_mb:20", "roundup_power2_divisions:4"] {
        fuzz(settings, 1);
        fuzz(settings, 2);
    }
}

fn fuzz(settings: &str, seed: u64) {
    println!("settings {settings:?}, seed {seed}");
    let context = TestContext::with_capacity(2 * GIB, settings);
    let mut rng = Rng::new(seed);
    let mut live: Vec<(Allocation, u8)> = Vec::new();
    let mut sum = 0;
    for step in 0..10_000_u64 {
        let draw = rng.below(100);
        if draw < 50 || live.is_empty() {
            let bytes = match rng.below(3) {
                0 => 1 + rng.u64_below(2 * MIB),
                1 => 1 + rng.u64_below(20 * MIB),
                _ => 1 + rng.u64_below(60 * MIB),
            };
            let Ok(allocation) = context.allocator.allocate_raw(Request::new(FIRST, context.main.id(), bytes)) else {
                assert!(sum + bytes > 300 * MIB, "out of memory on an almost empty device");
                for (freed, _) in live.drain(..) {
                    context.allocator.free(freed).unwrap();
                }
                sum = 0;
                continue;
            };
            let value = rng.u32() as u8;
            // The first and the last bytes are enough to detect an overlap.
            for end in [0, bytes - 1] {
                context.sim_fill(allocation.ptr.0 + end, value);
            }
            sum += bytes;
            live.push((allocation, value));
        } else if draw < 98 {
            let (freed, value) = live.swap_remove(rng.below(live.len()));
            if step % 16 == 0 {
                context.assert_holds(freed, value);
            }
            sum -= freed.bytes_requested;
            context.allocator.free(freed).unwrap();
        } else {
            context.allocator.trim(FIRST, MemPoolId::DEFAULT).unwrap();
        }
        if step % 64 == 0 {
            context.allocator.check();
        }
        assert_eq!(context.stats().requested_bytes.all.current, sum);
    }
    for &(block, value) in &live {
        context.assert_holds(block, value);
    }
    context.free_all(live.into_iter().map(|(block, _)| block));
    context.trim();
    assert_eq!((context.bytes_reserved(), context.sim.object_counts().bytes_used), (0, 0));
    context.finish();
}

/// TestCudaAllocator.test_cachingAllocator_raw_alloc: requests while caching is off are in no statistics, and are freed
/// by the driver.
#[test]
fn without_caching_every_request_is_a_driver_call() {
    let context = TestContext::new("");
    let cached = context.alloc(MIB);
    let before = context.stats();
    context.allocator.set_caching(false).unwrap();
    let direct = context.alloc(4096);
    assert_eq!((direct.bytes, context.sim.call_count(Call::MemAlloc)), (4096, 2));
    context.allocator.record_use(direct, context.side_stream().id()).unwrap();
    context.fill(direct, 9, &context.main);
    context.assert_holds(direct, 9);
    assert_eq!(context.stats(), before);
    assert_eq!(context.segments().len(), 1);
    // A block from the cache returns to the cache.
    context.free(cached);
    assert_eq!(context.stats().allocation.all.current, 0);
    assert_eq!(context.bytes_reserved(), 2 * MIB);
    context.allocator.set_caching(true).unwrap();
    context.allocator.free_raw(direct.ptr).unwrap();
    assert_eq!(context.sim.call_count(Call::MemFree), 1);
    assert!(context.allocator.free_raw(direct.ptr).is_err(), "twice");
    assert_eq!(context.alloc(MIB).ptr, cached.ptr);
    context.finish();
}

#[test]
fn without_caching_a_dropped_block_is_freed_by_the_next_call() {
    let context = TestContext::new("");
    context.allocator.set_caching(false).unwrap();
    let direct = context.alloc(MIB);
    context.allocator.free_later(direct);
    assert_eq!(context.sim.call_count(Call::MemFree), 0);
    context.trim();
    assert_eq!((context.sim.call_count(Call::MemFree), context.sim.object_counts().bytes_used), (1, 0));
    let (one, two) = (context.alloc(64 * GIB - MIB), context.try_alloc(2 * MIB));
    assert!(matches!(two, Err(warpool::Error::OutOfMemory(_))), "{two:?}");
    context.free(one);
    context.finish();
}

/// cuda_allocatorTraceTracker_test TrackMallocFree, and check_reporter: a tracker sees the segment, the allocation and
/// the free, with sizes that sum up, although no history is recorded.
#[test]
fn a_tracker_sees_every_action() {
    use std::sync::{Arc, Mutex};
    let context = TestContext::new("");
    let seen: Arc<Mutex<Vec<(Action, u64, u64)>>> = Arc::default();
    let log = seen.clone();
    let id = context.allocator.observers().attach_tracker(
        &Action::ALL,
        Arc::new(move |device, event| {
            assert_eq!(device, FIRST);
            log.lock().unwrap().push((event.action, event.addr, event.size));
        }),
    );
    let allocation = context.alloc(4_000_000);
    context.free(allocation);
    context.trim();
    let at = allocation.ptr.0;
    let whole = [
        (Action::SegmentAlloc, at, 20 * MIB),
        (Action::Alloc, at, 4_000_000),
        (Action::FreeRequested, at, 4_000_000),
        (Action::FreeCompleted, at, 4_000_000),
        (Action::SegmentFree, at, 20 * MIB),
    ];
    assert_eq!(*seen.lock().unwrap(), whole);
    assert!(context.allocator.snapshot(SnapshotOptions::default()).unwrap().traces[0].is_empty());
    assert!(context.allocator.observers().detach(id));
    assert!(!context.allocator.observers().detach(id));
    context.alloc(1);
    assert_eq!(seen.lock().unwrap().len(), 6, "the snapshot, and nothing since");
    context.finish();
}

#[test]
fn trackers_may_call_the_allocator() {
    use std::sync::{Arc, Mutex, Weak};
    let context = TestContext::new("");
    let taken: Arc<Mutex<Vec<Allocation>>> = Arc::default();
    let (inner, stream): (Weak<_>, _) = (Arc::downgrade(&context.allocator), context.main.id());
    let mine = taken.clone();
    context.allocator.record_history(Some(HistoryOptions::default())).unwrap();
    context.allocator.observers().attach_tracker(
        &[Action::SegmentAlloc],
        Arc::new(move |_, _| {
            let allocator = inner.upgrade().unwrap();
            allocator.stats(FIRST).unwrap();
            let mut taken = mine.lock().unwrap();
            if taken.is_empty() {
                // The reported segment may already serve this allocation; its entries are not reported to the tracker
                // again.
                taken.push(Allocation {
                    ptr: DevicePtr(0),
                    bytes: 0,
                    bytes_requested: 0,
                    device: FIRST,
                    stream,
                    slot: 0,
                    generation: 0,
                });
                drop(taken);
                let allocation = allocator.allocate_raw(Request::new(FIRST, stream, 100)).unwrap();
                mine.lock().unwrap().push(allocation);
            }
        }),
    );
    let allocation = context.alloc(5 * MIB);
    assert_eq!(taken.lock().unwrap().len(), 2);
    context.free(allocation);
    context.free(taken.lock().unwrap()[1]);
    let inner = Arc::downgrade(&context.allocator);
    context.allocator.observers().attach_tracker(
        &[Action::SegmentFree],
        Arc::new(move |_, _| {
            inner.upgrade().unwrap().trim(FIRST, MemPoolId::DEFAULT).unwrap();
        }),
    );
    context.trim();
    assert_eq!(context.bytes_reserved(), 0);
    context.finish();
}
