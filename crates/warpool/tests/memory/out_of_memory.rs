//! The slow path: each retry, limits, rejections, oversize blocks, garbage collection, and observers.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use crate::common::memory::{FIRST, GIB, MIB, TestContext};
use warpool::Error;
use warpool::driver::Call;
use warpool::memory::pools::PoolOptions;
use warpool::memory::raw::{Allocation, Request};
use warpool::memory::report::{Action, HistoryOptions, SnapshotOptions};
use warpool::memory::{DeviceAllocator, OomCause, OomReport};

/// TestCuda.test_out_of_memory, and TestCudaAllocator.test_raises_oom with and without max_split_size.
#[test]
fn a_huge_request_fails_and_the_device_stays_usable() {
    for settings in ["", "max_split_size_mb:1024", "expandable_segments:True"] {
        let context = TestContext::with_capacity(80 * GIB, settings);
        let kept = context.alloc(100);
        let error = context.try_alloc(80_000_000_000_000).unwrap_err();
        let text = error.to_string();
        let beginning = "CUDA out of memory. Tried to allocate 74505.81 GiB. GPU 0 has a total capacity of 80.00 GiB";
        assert!(text.starts_with(beginning), "{text}");
        context.fill(kept, 7, &context.main);
        context.assert_holds(kept, 7);
        assert_eq!(context.stats().num_ooms, 1);
        context.finish();
    }
}

/// TestCuda.test_out_of_memory_retry.
#[test]
fn cached_memory_is_released_before_a_request_fails() {
    for settings in ["", "expandable_segments:True"] {
        let context = TestContext::with_capacity(10 * GIB, settings);
        let side = context.side_stream();
        let half = 10 * GIB / 100 * 51;
        let first = context.alloc(half);
        context.free(first);
        // Cached memory of one stream does not serve another stream: it is released.
        let second = context.alloc_on(&side, half);
        let stats = context.stats();
        assert_eq!((stats.num_alloc_retries, stats.num_ooms, stats.num_sync_all_streams), (1, 0, 1));
        context.free(second);
        context.finish();
    }
}

/// TestCuda.test_caching_allocator_record_stream_oom.
#[test]
fn pending_frees_are_waited_for_before_a_request_fails() {
    let context = TestContext::with_capacity(GIB, "");
    let side = context.side_stream();
    context.pause_stream(&side);
    for _ in 0..10 {
        let block = context.alloc(300 * MIB);
        context.record_use(block, &side);
        context.fill(block, 1, &side);
        side.wait_stream(&context.main).unwrap();
        context.free(block);
    }
    let stats = context.stats();
    assert!(stats.num_alloc_retries > 0);
    assert_eq!(stats.num_ooms, 0);
    context.resume_stream(&side);
    context.finish();
}

/// TestCuda.test_set_per_process_memory_fraction and test_get_per_process_memory_fraction.
#[test]
fn a_fraction_limits_reserved_memory() {
    let context = TestContext::with_capacity(10 * GIB, "");
    let allocator = &context.allocator;
    assert_eq!(allocator.memory_fraction(FIRST).unwrap(), 1.0);
    for wrong in [-0.1, 1.1, 2.0, f64::NAN, f64::INFINITY] {
        let error = allocator.set_memory_fraction(FIRST, wrong).unwrap_err();
        assert!(error.to_string().starts_with("invalid fraction:"), "{error}");
    }
    allocator.set_memory_fraction(FIRST, 0.5).unwrap();
    assert_eq!(allocator.memory_fraction(FIRST).unwrap(), 0.5);
    let fits = context.alloc(5 * GIB / 1000 * 998);
    context.free(fits);
    context.trim();
    let exact = context.alloc(5 * GIB);
    context.free(exact);
    context.trim();
    let calls = context.sim.call_count(Call::MemAlloc);
    let report = context.expect_oom(5 * GIB + 1);
    assert_eq!((report.cause, report.bytes_limit), (OomCause::Limit, Some(5 * GIB)));
    assert!(report.to_string().contains("5.00 GiB allowed"), "{report}");
    assert_eq!(context.sim.call_count(Call::MemAlloc), calls, "the driver is not called");
    assert_eq!(context.stats().num_alloc_retries, 1, "counted although the driver was not called");
    allocator.set_memory_fraction(FIRST, 0.0).unwrap();
    context.expect_oom(1);
    allocator.set_memory_fraction(FIRST, 1.0).unwrap();
    context.alloc(9 * GIB);
    context.finish();
}

/// TestCudaAllocator.test_allocator_memory_fraction_setting.
#[test]
fn the_fraction_can_be_an_initial_setting() {
    let context = TestContext::with_capacity(10 * GIB, "per_process_memory_fraction:0.5");
    context.expect_oom(6 * GIB);
    assert_eq!(context.allocator.memory_fraction(FIRST).unwrap(), 0.5);
    context.alloc(4 * GIB);
    // Later settings leave the fraction as it is.
    context.set("per_process_memory_fraction:1.0");
    context.expect_oom(4 * GIB);
    context.finish();
}

/// A cap in bytes in addition to the fraction.
#[test]
fn the_lower_limit_counts() {
    let context = TestContext::with_capacity(10 * GIB, "memory_cap_mb:1024");
    // The text is right for both: the number of bytes does not tell which limit applies.
    let remedy = "allowed; raise the lower of the memory fraction and memory_cap_mb (without a limit: fraction 1.0 \
                  and no cap).";
    let refused = |bytes, limit, limit_text| {
        let report = context.expect_oom(bytes);
        assert_eq!(report.bytes_limit, Some(limit));
        assert!(report.to_string().contains(&format!(" {limit_text} {remedy}")), "{report}");
    };
    refused(2 * GIB, GIB, "1024.00 MiB");
    context.allocator.set_memory_cap(FIRST, Some(3 * GIB)).unwrap();
    context.alloc(2 * GIB);
    context.allocator.set_memory_fraction(FIRST, 0.25).unwrap();
    refused(GIB, 10 * GIB / 4, "2.50 GiB");
    context.finish();
}

/// TestCudaAllocator.test_throw_on_cudamalloc_oom: no retry, not counted as out of memory, no history entry.
#[test]
fn a_rejection_comes_before_any_retry() {
    let context = TestContext::with_capacity(10 * GIB, "per_process_memory_fraction:0.5,throw_on_cudamalloc_oom:True");
    context.allocator.record_history(Some(HistoryOptions::default())).unwrap();
    let cached = context.alloc(2 * GIB);
    context.free(cached);
    let report = context.expect_oom(4 * GIB);
    assert_eq!(report.cause, OomCause::Rejected);
    let stats = context.stats();
    assert_eq!((stats.num_oom_rejections, stats.num_ooms, stats.num_alloc_retries), (1, 0, 0));
    assert_eq!(context.bytes_reserved(), 2 * GIB, "cached memory stays");
    let trace = context.allocator.snapshot(SnapshotOptions::default()).unwrap().traces.remove(0);
    assert!(trace.iter().all(|entry| entry.action != Action::Oom));
    // Cached blocks still serve requests.
    assert_eq!(context.alloc(2 * GIB).ptr, cached.ptr);
    // The setting is read at every request; without it the same request reaches the limit.
    context.set("throw_on_cudamalloc_oom:False");
    assert_eq!(context.expect_oom(4 * GIB).cause, OomCause::Limit);
    assert_eq!((context.stats().num_oom_rejections, context.stats().num_ooms), (1, 1));
    context.finish();
}

/// TestCudaAllocator.test_notifies_oom.
#[test]
fn observers_are_called_before_the_request_fails() {
    let context = TestContext::with_capacity(GIB, "");
    let seen: Arc<Mutex<Vec<OomReport>>> = Arc::default();
    let (log, allocator) = (seen.clone(), Arc::downgrade(&context.allocator));
    let id = context.allocator.observers().attach_oom_observer(Arc::new(move |report| {
        // No lock is held.
        allocator.upgrade().unwrap().stats(FIRST).unwrap();
        log.lock().unwrap().push(report.clone());
    }));
    let report = context.expect_oom(3 * GIB + 1);
    let seen_first = seen.lock().unwrap().remove(0);
    assert_eq!(seen_first, report);
    assert_eq!((report.device, report.bytes_segment, report.bytes_requested), (FIRST, 3 * GIB + 2 * MIB, 3 * GIB + 1));
    assert_eq!((report.bytes_total, report.bytes_free, report.bytes_limit), (GIB, GIB, None));
    assert!(context.allocator.observers().detach(id));
    context.expect_oom(3 * GIB);
    assert!(seen.lock().unwrap().is_empty());
    context.finish();
}

/// The entry has the free bytes of the device as address, and the rounded request as size.
#[test]
fn the_history_has_an_out_of_memory_entry() {
    let context = TestContext::with_capacity(GIB, "");
    context.alloc(100 * MIB);
    context.allocator.record_history(Some(HistoryOptions::default())).unwrap();
    context.expect_oom(3 * GIB + 1);
    let trace = context.allocator.snapshot(SnapshotOptions::default()).unwrap().traces.remove(0);
    let oom = trace.iter().find(|entry| entry.action == Action::Oom).unwrap();
    assert_eq!((oom.addr, oom.size), (924 * MIB, 3 * GIB + 512));
    context.finish();
}

#[test]
fn the_report_says_where_the_memory_is() {
    let context = TestContext::with_capacity(GIB, "");
    let pool = context.pools().create_graph_pool(FIRST).unwrap();
    let private = context.alloc_in(pool, 100 * MIB);
    context.free(private);
    let blocks = [0; 20].map(|_| context.alloc(4 * MIB));
    context.free_all(blocks.iter().copied().step_by(2));
    let report = context.expect_oom(950 * MIB);
    assert_eq!((report.bytes_private_free, report.bytes_allocated), (100 * MIB, 40 * MIB));
    assert_eq!((report.bytes_cached, report.blocks_cached, report.bytes_largest_cached), (40 * MIB, 10, 4 * MIB));
    assert_eq!((report.bytes_reserved, report.cause, report.capturing), (180 * MIB, OomCause::Device, false));
    let text = report.to_string();
    assert!(text.contains("100.00 MiB is free in private pools (e.g., CUDA Graphs)"), "{text}");
    context.finish();
}

/// They are called after the search; memory that they free serves the request.
#[test]
fn pressure_callbacks_are_called_before_the_driver() {
    let context = TestContext::new("");
    let limbo: Arc<Mutex<Vec<Allocation>>> = Arc::new(Mutex::new(vec![context.alloc(100 * MIB)]));
    let (held, allocator) = (limbo.clone(), Arc::downgrade(&context.allocator));
    let callback_calls = Arc::new(AtomicU32::new(0));
    let count = callback_calls.clone();
    context.allocator.observers().attach_pressure_callback(Arc::new(move |_| {
        count.fetch_add(1, Ordering::Relaxed);
        let freed = held.lock().unwrap().pop();
        freed.is_some_and(|freed| allocator.upgrade().unwrap().free(freed).is_ok())
    }));
    let place = limbo.lock().unwrap()[0].ptr;
    let calls = context.sim.call_count(Call::MemAlloc);
    let allocation = context.alloc(100 * MIB);
    assert_eq!((allocation.ptr, context.sim.call_count(Call::MemAlloc)), (place, calls));
    assert_eq!(callback_calls.load(Ordering::Relaxed), 1);
    context.free(allocation);
    context.alloc(100 * MIB);
    assert_eq!(callback_calls.load(Ordering::Relaxed), 1, "not called if a cached block fits");
    context.alloc(100 * MIB);
    assert_eq!((callback_calls.load(Ordering::Relaxed), context.sim.call_count(Call::MemAlloc)), (2, calls + 1));
    context.finish();
}

/// Before anything is released, and only for requests to the default pool.
#[test]
fn use_on_oom_pools_serve_before_the_cache_is_released() {
    let context = TestContext::with_capacity(GIB, "");
    let options = PoolOptions { use_on_oom: true, ..PoolOptions::default() };
    let pool = context.pools().create_pool(FIRST, options).unwrap();
    let other = context.pools().create_graph_pool(FIRST).unwrap();
    let spare = context.alloc_in(pool, 400 * MIB);
    context.free(spare);
    let cached = context.alloc(300 * MIB);
    context.free(cached);
    // Not for another private pool: the default pool's cache is released instead.
    let request = Request::new(FIRST, context.main.id(), 350 * MIB).in_pool(other);
    let private = context.allocator.allocate_raw(request).unwrap();
    assert_ne!(private.ptr, spare.ptr);
    assert_eq!((context.stats().num_alloc_retries, context.bytes_reserved()), (1, 750 * MIB));
    let allocation = context.alloc(400 * MIB);
    assert_eq!((allocation.ptr, context.stats().num_alloc_retries), (spare.ptr, 1));
    assert_eq!(context.pools().pool_uses(FIRST, pool).unwrap(), 1);
    // Only free blocks: no segment is allocated in the pool for it.
    context.expect_oom(400 * MIB);
    context.free(allocation);
    context.pools().set_use_on_oom(FIRST, pool, false).unwrap();
    context.expect_oom(400 * MIB);
    context.finish();
}

/// A smaller request gets no oversize block, and an oversize request gets none that is much larger.
#[test]
fn oversize_blocks_are_kept_for_oversize_requests() {
    let context = TestContext::new("max_split_size_mb:100");
    let whole = context.alloc(200 * MIB);
    context.free(whole);
    let small = context.alloc(50 * MIB);
    assert_ne!(small.ptr, whole.ptr, "not oversize");
    let fits = context.alloc(180 * MIB + 512);
    assert_eq!((fits.ptr, fits.bytes), (whole.ptr, 200 * MIB), "not split, and less than 20 MiB larger");
    context.free(fits);
    let wide = context.alloc(180 * MIB);
    assert_ne!(wide.ptr, whole.ptr, "20 MiB is too wide");
    context.set("max_split_size_mb:100,max_non_split_rounding_mb:64");
    context.free(wide);
    context.trim();
    let whole = context.alloc(200 * MIB);
    context.free(whole);
    assert_eq!(context.alloc(140 * MIB).ptr, whole.ptr);
    context.finish();
}

#[test]
fn just_enough_oversize_segments_are_released() {
    let context = TestContext::with_capacity(GIB, "max_split_size_mb:100");
    let [small, a, b, c] = [10, 150, 250, 450].map(|mib| context.alloc(mib * MIB));
    context.free_all([small, a, b, c]);
    // 164 MiB are free. One block is large enough but too large to be used; it alone is released.
    context.alloc(400 * MIB);
    assert_eq!(context.segment_sizes().iter().filter(|&&size| size >= 100 * MIB).count(), 3);
    assert_eq!((context.stats().num_alloc_retries, context.bytes_reserved()), (0, 810 * MIB));
    // Now none suffices alone: the largest ones are released until they sum up.
    context.alloc(380 * MIB);
    assert_eq!((context.stats().num_alloc_retries, context.bytes_reserved()), (0, 790 * MIB));
    context.finish();
}

/// Two are enough; the third stays.
#[test]
fn oversize_segments_beyond_the_sum_stay() {
    let context = TestContext::with_capacity(GIB, "max_split_size_mb:100");
    let [_, a, b, c] = [300, 150, 200, 250].map(|mib| context.alloc(mib * MIB));
    context.free_all([a, b, c]);
    context.alloc(260 * MIB);
    assert_eq!((context.stats().num_alloc_retries, context.bytes_reserved()), (0, 710 * MIB));
    context.finish();
}

/// A segment that was split before there was a limit cannot be released; the next larger one can.
#[test]
fn an_oversize_part_of_a_segment_is_passed_over() {
    let context = TestContext::with_capacity(GIB, "");
    let whole = context.alloc(500 * MIB);
    context.free(whole);
    context.alloc(300 * MIB);
    context.set("max_split_size_mb:100");
    let other = context.alloc(400 * MIB);
    context.free(other);
    // 124 MiB are free. The part of 200 MiB is the smallest block that is large enough.
    context.alloc(150 * MIB);
    assert_eq!((context.stats().num_alloc_retries, context.bytes_reserved()), (0, 650 * MIB));
    context.finish();
}

#[test]
fn too_few_oversize_segments_lead_to_the_next_retry() {
    let context = TestContext::with_capacity(GIB, "max_split_size_mb:100");
    let [a, b] = [300, 600].map(|mib| context.alloc(mib * MIB));
    context.free(a);
    let more = context.alloc(50 * MIB);
    context.free(more);
    context.expect_oom(450 * MIB);
    assert_eq!(
        (context.stats().num_alloc_retries, context.bytes_reserved()),
        (1, 600 * MIB),
        "all cached memory is released"
    );
    context.free(b);
    context.finish();
}

/// Segments of the large default pool that are at least as old as the average are released.
#[test]
fn old_segments_are_released_above_the_threshold() {
    let context =
        TestContext::with_capacity(2 * GIB, "garbage_collection_threshold:0.5,per_process_memory_fraction:0.5");
    let blocks = [12, 14, 16, 18].map(|mib| context.alloc(mib * 10 * MIB));
    context.free_all(blocks);
    // 600 of 1024 MiB are reserved, 88 above the threshold. The two that were used since are younger.
    for _ in 0..10 {
        context.free_all([context.alloc(160 * MIB), context.alloc(180 * MIB)]);
    }
    context.alloc(200 * MIB);
    let mut sizes: Vec<u64> = context.segment_sizes().iter().map(|size| size / MIB).collect();
    sizes.sort_unstable();
    assert_eq!(sizes, [160, 180, 200], "a pass is completed");
    assert_eq!(context.stats().num_sync_all_streams, 0);
    context.finish();
}

#[test]
fn garbage_collection_needs_a_limit_and_spares_private_pools() {
    for (settings, kept) in [
        ("garbage_collection_threshold:0.1", true),
        ("per_process_memory_fraction:0.9", true),
        ("garbage_collection_threshold:0.1,per_process_memory_fraction:0.9", false),
    ] {
        let context = TestContext::with_capacity(GIB, settings);
        let pool = context.pools().create_graph_pool(FIRST).unwrap();
        let (private, cached) = (context.alloc_in(pool, 200 * MIB), context.alloc(100 * MIB));
        context.free_all([private, cached]);
        context.alloc(150 * MIB);
        assert_eq!(context.bytes_reserved(), if kept { 450 * MIB } else { 350 * MIB }, "{settings}");
        context.finish();
    }
}

#[test]
fn a_failed_request_changes_nothing_else() {
    let context = TestContext::with_capacity(GIB, "");
    let kept = context.alloc(600 * MIB);
    context.fill(kept, 4, &context.main);
    for _ in 0..3 {
        let error = context.try_alloc(600 * MIB).unwrap_err();
        assert!(matches!(error, Error::OutOfMemory(_)));
    }
    let stats = context.stats();
    assert_eq!((stats.num_ooms, stats.num_alloc_retries, stats.allocation.all.current), (3, 3, 1));
    assert_eq!((stats.num_device_alloc, stats.num_device_free), (1, 0));
    context.assert_holds(kept, 4);
    context.finish();
}
