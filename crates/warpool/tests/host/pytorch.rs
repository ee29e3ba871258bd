//! PyTorch's tests of pinned host memory, for Warpool's allocator. Each test names its counterpart, and states where
//! the behaviour differs on purpose.
//!
//! Most differ in sizes: PyTorch rounds to powers of two and pins every block separately; here there are eight classes
//! between two powers of two, and blocks up to 256 KiB are split from shared segments, the first of 2 MiB. Its tests of
//! pinned memory in graphs are in `graph/host_memory.rs`.

use std::sync::Arc;

use crate::common::memory::{KIB, MIB};
use warpool::driver::decorate::Counting;
use warpool::driver::sim::{SimConfig, SimDriver};
use warpool::driver::{Call, Copies as _, DeviceId, DevicePtr, Devices as _, HostMemory as _, HostPtr, Memory as _};
use warpool::memory::host::HostStats;
use warpool::memory::report::{Action, BlockState, Frame, HistoryOptions, Snapshot, SnapshotOptions, StackLevel, Stat};
use warpool::memory::{
    Allocate as _, CachingAllocator, DeviceAllocator, HostAllocator, HostBlock, PinnedSettings, Settings,
};
use warpool::{Instance, Stream};

/// An allocator on simulated devices whose driver calls are counted.
struct TestContext {
    sim: Arc<SimDriver>,
    counting: Arc<Counting>,
    instance: Instance,
    host: HostAllocator,
}

impl TestContext {
    fn new(settings: PinnedSettings) -> Self {
        Self::with_devices(1, settings)
    }

    fn with_devices(devices: u32, settings: PinnedSettings) -> Self {
        let sim = Arc::new(SimDriver::new(SimConfig::default().with_devices(devices)));
        let counting = Arc::new(Counting::new(sim.clone()));
        let instance = Instance::new(counting.clone()).unwrap();
        let host = HostAllocator::new(&instance, settings);
        Self { sim, counting, instance, host }
    }

    fn block(&self, bytes: u64) -> HostBlock {
        let block = self.host.allocate(bytes).unwrap();
        assert!(block.bytes_usable() >= bytes && block.bytes() == bytes);
        self.host.check();
        block
    }

    fn stream(&self, device: u32) -> Stream {
        self.instance.device(device).unwrap().pool_stream().unwrap()
    }

    fn calls(&self, call: Call) -> u64 {
        self.counting.count(call).calls
    }

    /// Enqueues a copy from the block in a paused stream, records the use, and returns the destination.
    fn pending_copy(&self, from: &HostBlock, stream: &Stream) -> DevicePtr {
        self.sim.pause_stream(stream.id()).unwrap();
        let to = self.sim.mem_alloc(stream.device_id(), from.bytes()).unwrap();
        self.sim.copy(to.into(), from.ptr().into(), from.bytes(), stream.id()).unwrap();
        from.record_use(stream).unwrap();
        to
    }

    /// Runs all work of a paused stream, and resumes it.
    fn finish_stream(&self, stream: &Stream) {
        self.sim.run_paused(stream.id(), u64::MAX).unwrap();
        self.sim.resume_stream(stream.id()).unwrap();
        stream.synchronize().unwrap();
    }

    fn stats(&self) -> HostStats {
        self.host.stats()
    }

    /// Closes the allocator, after all blocks are dropped. Nothing stays pinned, and there was no hazard.
    fn finish(self) {
        for device in self.instance.devices() {
            if self.sim.context_is_active(device.id()).unwrap() {
                device.synchronize().unwrap();
            }
        }
        self.host.check();
        self.host.close().unwrap();
        assert_eq!(self.sim.object_counts().pinned, 0, "left pinned");
        assert_eq!(self.sim.hazards(), [], "hazards");
    }
}

fn default() -> PinnedSettings {
    Settings::default().pinned
}

fn parsed(settings: &str) -> PinnedSettings {
    Settings::parse(settings).unwrap().pinned
}

fn stat(current: u64, peak: u64, allocated: u64, freed: u64) -> Stat {
    Stat { current, peak, allocated, freed }
}

/// TestCuda.test_caching_pinned_memory.
#[test]
fn a_block_is_reused_but_not_while_a_copy_is_pending() {
    let context = TestContext::new(default());
    let stream = context.stream(0);
    let first = context.block(4 * KIB);
    let ptr = first.ptr();
    drop(first);
    let second = context.block(4 * KIB);
    assert_eq!(second.ptr(), ptr, "reused after the drop");
    second.write(0, &[5; 4096]).unwrap();
    let to = context.pending_copy(&second, &stream);
    drop(second);
    let third = context.block(4 * KIB);
    assert_ne!(third.ptr(), ptr, "a copy still reads it");
    third.write(0, &[6; 4096]).unwrap();
    context.finish_stream(&stream);
    let mut bytes = [0; 4096];
    context.sim.download(DeviceId(0), to, &mut bytes).unwrap();
    assert_eq!(bytes, [5; 4096], "the content when the copy was queued");
    context.host.process_pending().unwrap();
    assert_eq!(context.block(4 * KIB).ptr(), ptr, "the copy is done");
    drop(third);
    context.finish();
}

/// TestCudaMultiGPU.test_caching_pinned_memory_multi_gpu: the block waits for a copy to each device.
#[test]
fn a_block_waits_for_copies_to_every_device() {
    let context = TestContext::with_devices(2, default());
    let streams = [context.stream(0), context.stream(1)];
    let block = context.block(4 * KIB);
    let ptr = block.ptr();
    block.write(0, &[1; 4096]).unwrap();
    let to = streams.each_ref().map(|stream| context.pending_copy(&block, stream));
    block.free().unwrap();
    for (at, stream) in streams.iter().enumerate() {
        let other = context.block(4 * KIB);
        assert_ne!(other.ptr(), ptr, "device {at} still reads it");
        other.write(0, &[2; 4096]).unwrap();
        context.finish_stream(stream);
        drop(other);
        context.host.process_pending().unwrap();
    }
    let blocks: Vec<HostBlock> = (0..2).map(|_| context.block(4 * KIB)).collect();
    assert!(blocks.iter().any(|block| block.ptr() == ptr), "both are done");
    for (at, to) in to.into_iter().enumerate() {
        let mut bytes = [0; 4096];
        context.sim.download(DeviceId(at as u32), to, &mut bytes).unwrap();
        assert_eq!(bytes, [1; 4096], "device {at}");
    }
    drop(blocks);
    context.finish();
}

/// TestCuda.test_pinned_memory_with_cudaregister, test_pinned_memory_with_cudaregister_multithread. Here whole segments
/// are registered, with huge pages if the system has them.
#[test]
fn registered_memory_is_usable_with_any_number_of_threads() {
    for threads in [1, 2, 8, 128] {
        let settings = format!("pinned_use_cuda_host_register:True,pinned_num_register_threads:{threads}");
        let context = TestContext::new(parsed(&settings));
        let stream = context.stream(0);
        for bytes in [8, 100 * KIB, 5 * MIB + 3] {
            let block = context.block(bytes);
            // All of it is pinned, at one address for host and device.
            for offset in [0, bytes - 1] {
                let ptr = block.ptr().offset(offset);
                assert_eq!(context.sim.host_device_ptr(DeviceId(0), ptr).unwrap().0, ptr.0);
            }
            let written: Vec<u8> = (0..bytes).map(|at| (at % 251) as u8).collect();
            block.write(0, &written).unwrap();
            let to = context.pending_copy(&block, &stream);
            context.finish_stream(&stream);
            let mut read = vec![0; bytes as usize];
            context.sim.download(DeviceId(0), to, &mut read).unwrap();
            assert_eq!(read, written, "{bytes} bytes, {threads} threads");
        }
        assert_eq!(
            (context.calls(Call::HostAlloc), context.calls(Call::HostRegister)),
            (0, context.stats().num_host_alloc)
        );
        context.instance.device(0).unwrap().synchronize().unwrap();
        let TestContext { sim, counting, host, .. } = &context;
        host.trim(0).unwrap();
        assert_eq!(
            (counting.count(Call::HostUnregister).calls, sim.object_counts().pinned),
            (host.stats().num_host_alloc, 0)
        );
        context.finish();
    }
}

/// The method is stored with the segment, so the setting may change in between. (PyTorch once unpinned by the current
/// setting.)
#[test]
fn memory_is_unpinned_the_way_it_was_pinned() {
    let context = TestContext::new(default());
    let allocated = context.block(MIB);
    context.host.set_settings(PinnedSettings { use_cuda_host_register: true, ..default() });
    let registered = context.block(2 * MIB);
    context.host.set_settings(default());
    drop((allocated, registered));
    context.host.trim(0).unwrap();
    let calls =
        [Call::HostAlloc, Call::HostRegister, Call::HostFree, Call::HostUnregister].map(|call| context.calls(call));
    assert_eq!((calls, context.counting.count(Call::HostUnregister).errors), ([1, 1, 1, 1], 0));
    context.finish();
}

/// TestCuda.test_pinned_memory_empty_cache, for both pin methods.
#[test]
fn after_a_trim_only_allocated_memory_is_pinned() {
    for settings in ["", "pinned_use_cuda_host_register:True", "pinned_use_background_threads:True"] {
        let context = TestContext::new(parsed(settings));
        let kept = context.block(MIB);
        let blocks: Vec<HostBlock> = [100, 5000, 3 * MIB, 7 * MIB].map(|bytes| context.block(bytes)).into();
        drop(blocks);
        let before = context.stats().allocated_bytes.current;
        let unpinned = context.host.trim(0).unwrap();
        assert_eq!((context.stats().allocated_bytes.current, before - unpinned), (MIB, MIB), "{settings}");
        assert_eq!(context.sim.object_counts().pinned, 1, "{settings}");
        kept.write(0, &[1; 100]).unwrap();
        drop(kept);
        assert_eq!(context.host.trim(0).unwrap(), MIB, "{settings}");
        assert_eq!((context.sim.object_counts().pinned, context.host.trim(0).unwrap()), (0, 0), "{settings}");
        context.finish();
    }
}

/// TestCuda.test_pinned_memory_use_background_threads: pending blocks are reclaimed without a call. Here the thread
/// sleeps while nothing is pending.
#[test]
fn a_background_thread_reclaims_pending_blocks() {
    let context = TestContext::new(parsed("pinned_use_background_threads:True"));
    let stream = context.stream(0);
    let block = context.block(4 * KIB);
    let ptr = block.ptr();
    context.pending_copy(&block, &stream);
    drop(block);
    assert_eq!(context.stats().active_requests.current, 1);
    context.finish_stream(&stream);
    // Reading the statistics reclaims nothing: without the thread this would not end.
    while context.stats().active_requests.current > 0 {
        std::thread::yield_now();
    }
    assert_eq!(context.block(4 * KIB).ptr(), ptr);
    context.finish();
}

/// TestCuda.test_host_memory_stats: exact counters over requests, reuse, a trim and both resets.
#[test]
fn counters_are_exact() {
    let context = TestContext::new(default());
    let mut zero = HostStats::default();
    zero.pinned_bytes_by_device.clone_from(&context.stats().pinned_bytes_by_device);
    assert_eq!(context.stats(), zero);
    assert!(context.stats().pinned_bytes_by_device.iter().all(|&bytes| bytes == 0));

    // A small block is split from a shared segment: one driver call. PyTorch would pin 16 bytes for it.
    let small = context.block(10);
    let stats = context.stats();
    assert_eq!(stats.allocations, stat(1, 1, 1, 0));
    assert_eq!(stats.allocated_bytes, stat(2 * MIB, 2 * MIB, 2 * MIB, 0));
    assert_eq!(stats.active_requests, stat(1, 1, 1, 0));
    assert_eq!(stats.active_bytes, stat(512, 512, 512, 0));
    assert_eq!((stats.num_host_alloc, stats.num_host_free), (1, 0));
    assert_eq!((stats.cached_bytes, stats.pinned_bytes_by_device[0]), (2 * MIB - 512, 2 * MIB));

    // A large one has its own segment of the same size. PyTorch would pin 4 MiB.
    let large = context.block(3 * MIB);
    let stats = context.stats();
    assert_eq!(stats.allocations, stat(2, 2, 2, 0));
    assert_eq!(stats.allocated_bytes, stat(5 * MIB, 5 * MIB, 5 * MIB, 0));
    assert_eq!(stats.active_requests, stat(2, 2, 2, 0));
    assert_eq!(stats.active_bytes, stat(3 * MIB + 512, 3 * MIB + 512, 3 * MIB + 512, 0));

    // Both stay pinned after their free, and allocating them again pins nothing more.
    drop((small, large));
    let stats = context.stats();
    assert_eq!(stats.active_requests, stat(0, 2, 2, 2));
    assert_eq!(stats.active_bytes, stat(0, 3 * MIB + 512, 3 * MIB + 512, 3 * MIB + 512));
    assert_eq!(stats.allocated_bytes, stat(5 * MIB, 5 * MIB, 5 * MIB, 0));
    let (small, large) = (context.block(500), context.block(3 * MIB - 100));
    let stats = context.stats();
    assert_eq!(stats.active_requests, stat(2, 2, 4, 2));
    assert_eq!((stats.num_host_alloc, stats.allocations), (2, stat(2, 2, 2, 0)));
    assert_eq!(stats.host_alloc_time.count, 2);
    assert!(stats.host_alloc_time.min_us <= stats.host_alloc_time.max_us);
    assert!(stats.host_alloc_time.max_us <= stats.host_alloc_time.total_us);

    // A trim unpins the large one.
    drop(large);
    context.host.trim(0).unwrap();
    let stats = context.stats();
    assert_eq!(stats.allocations, stat(1, 2, 2, 1));
    assert_eq!(stats.allocated_bytes, stat(2 * MIB, 5 * MIB, 5 * MIB, 3 * MIB));
    assert_eq!((stats.num_host_free, stats.host_free_time.count), (1, 1));

    // Peaks are reset to the current values; then the accumulated counters to zero.
    context.host.reset_peak_stats();
    let stats = context.stats();
    assert_eq!(stats.allocations, stat(1, 1, 2, 1));
    assert_eq!(stats.active_bytes, stat(512, 512, 6 * MIB + 1024, 6 * MIB + 512));
    context.host.reset_accumulated_stats();
    let stats = context.stats();
    assert_eq!(stats.allocations, stat(1, 1, 0, 0));
    assert_eq!(stats.allocated_bytes, stat(2 * MIB, 2 * MIB, 0, 0));
    assert_eq!(stats.active_requests, stat(1, 1, 0, 0));
    assert_eq!((stats.num_host_alloc, stats.num_host_free), (0, 0));
    assert_eq!((stats.host_alloc_time.count, stats.host_free_time.total_us), (0, 0));
    drop(small);
    context.host.trim(0).unwrap();
    let stats = context.stats();
    assert_eq!(stats.allocations, stat(0, 1, 0, 1));
    assert_eq!(stats.active_requests, stat(0, 1, 0, 1));
    assert_eq!((stats.num_host_free, stats.cached_bytes, stats.pinned_bytes_by_device[0]), (1, 0, 0));
    context.finish();
}

/// TestCuda.test_host_memory_stats_active_after_free_no_events.
#[test]
fn an_unused_block_is_inactive_at_once() {
    let context = TestContext::new(default());
    for by_drop in [true, false] {
        let block = context.block(4 * KIB);
        assert_eq!((context.stats().active_requests.current, context.stats().active_bytes.current), (1, 4 * KIB));
        if by_drop {
            drop(block);
        } else {
            block.free().unwrap();
        }
        assert_eq!((context.stats().active_requests.current, context.stats().active_bytes.current), (0, 0));
    }
    assert_eq!(context.stats().allocated_bytes.current, 2 * MIB, "still pinned");
    context.finish();
}

/// TestCuda.test_host_memory_stats_active_after_event_drain: the block is active until its events have been queried;
/// reading the counters does not query them.
#[test]
fn a_pending_block_is_active_until_it_is_reclaimed() {
    let context = TestContext::new(default());
    let stream = context.stream(0);
    let block = context.block(4 * KIB);
    context.pending_copy(&block, &stream);
    drop(block);
    let active = || (context.stats().active_requests.current, context.stats().active_bytes.current);
    assert_eq!(active(), (1, 4 * KIB));
    context.host.process_pending().unwrap();
    assert_eq!(active(), (1, 4 * KIB), "the copy is pending");
    context.finish_stream(&stream);
    assert_eq!(active(), (1, 4 * KIB), "not processed yet");
    context.host.process_pending().unwrap();
    assert_eq!(active(), (0, 0));
    context.finish();
}

/// TestCachingHostAllocatorConfig.test_max_round_threshold. PyTorch's powers of two waste up to half; here the
/// threshold saves an eighth at most, and large blocks are always rounded to pages.
#[test]
fn sizes_above_the_threshold_are_not_rounded_to_a_class() {
    let limited = |bytes| PinnedSettings { max_round_threshold_bytes: Some(bytes), ..default() };
    let usable = |settings: PinnedSettings, bytes: u64| {
        let context = TestContext::new(settings);
        let usable = context.block(bytes).bytes_usable();
        context.finish();
        usable
    };
    assert_eq!(usable(default(), 100_000), 104 * KIB, "the class");
    assert_eq!(usable(limited(100_000), 100_000), 104 * KIB, "at the threshold");
    assert_eq!(usable(limited(99_999), 100_000), 100_352, "above it: rounded for alignment only");
    assert_eq!(usable(limited(0), 1), 512);
    assert_eq!(usable(parsed("pinned_max_round_threshold_mb:1"), 100_000), 104 * KIB);
    for settings in [default(), limited(0)] {
        assert_eq!(usable(settings, 5 * MIB + 1), 5 * MIB + 4 * KIB, "pages");
    }
}

/// TestCachingHostAllocatorConfig.test_max_cached_size.
#[test]
fn blocks_above_the_limit_are_not_kept() {
    let context = TestContext::new(parsed("pinned_max_cached_size_mb:1"));
    let (small, large) = (context.block(MIB), context.block(MIB + 1));
    assert_eq!(context.sim.object_counts().pinned, 2);
    let ptr = small.ptr();
    small.free().unwrap();
    large.free().unwrap();
    assert_eq!(
        (context.sim.object_counts().pinned, context.stats().num_host_free),
        (1, 1),
        "the large one is unpinned"
    );
    assert_eq!(context.block(MIB).ptr(), ptr, "the small one was kept");
    // A dropped block is unpinned by the next call that may call the driver.
    drop(context.block(2 * MIB));
    context.host.process_pending().unwrap();
    assert_eq!((context.sim.object_counts().pinned, context.stats().num_host_free), (1, 2));
    // A used block is unpinned when its fence has passed.
    let (stream, large) = (context.stream(0), context.block(2 * MIB));
    context.pending_copy(&large, &stream);
    large.free().unwrap();
    context.host.process_pending().unwrap();
    assert_eq!(context.sim.object_counts().pinned, 2);
    context.finish_stream(&stream);
    context.host.process_pending().unwrap();
    assert_eq!((context.sim.object_counts().pinned, context.stats().num_host_free), (1, 3));
    context.finish();
}

/// TestCachingHostAllocatorConfig.test_both_thresholds: rounded and kept, unrounded and kept, unrounded and not kept.
#[test]
fn the_two_thresholds_are_independent() {
    let settings = PinnedSettings { max_round_threshold_bytes: Some(50_000), max_cached_bytes: Some(MIB), ..default() };
    let context = TestContext::new(settings);
    for (bytes, usable, kept) in [(40_000, 40 * KIB, true), (60_001, 60_416, true), (MIB + 1, MIB + 4 * KIB, false)] {
        let pins = context.stats().num_host_alloc;
        let block = context.block(bytes);
        assert_eq!(block.bytes_usable(), usable, "{bytes}");
        block.free().unwrap();
        let first = context.stats().num_host_alloc - pins;
        context.block(bytes).free().unwrap();
        assert_eq!(context.stats().num_host_alloc - pins, if kept { first } else { first + 1 }, "{bytes} kept: {kept}");
    }
    assert_eq!(context.stats().num_host_free, 2);
    context.finish();
}

/// TestCachingHostAllocatorConfig.test_round_threshold_larger_than_cached_size: the lower limit applies to
/// rounding too.
#[test]
fn blocks_that_are_not_kept_are_not_rounded() {
    let settings =
        PinnedSettings { max_round_threshold_bytes: Some(200_000), max_cached_bytes: Some(100_000), ..default() };
    let context = TestContext::new(settings);
    let block = context.block(150_000);
    assert_eq!(block.bytes_usable(), 150_016, "its class would be 160 KiB");
    drop(block);
    assert_eq!(context.block(90_000).bytes_usable(), 88 * KIB);
    context.finish();
}

/// TestCachingHostAllocatorConfig.test_unrounded_bucket_no_undersized_reuse: a block is never reused for a larger
/// request.
#[test]
fn a_block_is_never_smaller_than_requested() {
    let context = TestContext::new(PinnedSettings { max_round_threshold_bytes: Some(0), ..default() });
    let sizes = |step: u64| (0..60).map(move |at| 33_000 + (at * step) % 6_000);
    for step in [1, 513, 517, 1031, 2999] {
        let blocks: Vec<HostBlock> = sizes(step).map(|bytes| context.block(bytes)).collect();
        for (at, block) in blocks.iter().enumerate() {
            block.write(0, &vec![at as u8; block.bytes() as usize]).unwrap();
        }
        for (at, block) in blocks.iter().enumerate() {
            let mut bytes = vec![0; block.bytes() as usize];
            block.read(0, &mut bytes).unwrap();
            assert!(
                bytes.iter().all(|&byte| byte == at as u8),
                "{} bytes, step {step}: overlaps another",
                block.bytes()
            );
        }
        // Some are freed, so that the next round finds free ranges of all sizes.
        blocks.into_iter().enumerate().filter(|(at, _)| at % 3 != 0).for_each(drop);
    }
    let small = context.block(2 * MIB);
    let ptr = small.ptr();
    small.free().unwrap();
    assert_ne!(context.block(2 * MIB + 1).ptr(), ptr);
    context.finish();
}

/// CachingHostAllocatorTest.check_stats: blocks freed by another thread are counted once.
#[test]
fn counters_are_exact_across_threads() {
    let context = TestContext::new(default());
    let blocks: Vec<HostBlock> = std::thread::scope(|scope| {
        let host = &context.host;
        let threads: Vec<_> = (0..4)
            .map(|_| scope.spawn(move || [8, 9000, 400 * KIB].map(|bytes| host.allocate(bytes).unwrap())))
            .collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!((context.stats().active_requests.current, context.stats().active_requests.allocated), (12, 12));
    let bytes: u64 = blocks.iter().map(HostBlock::bytes_usable).sum();
    assert_eq!(context.stats().active_bytes.current, bytes);
    drop(blocks);
    let stats = context.stats();
    assert_eq!((stats.active_requests.current, stats.active_requests.freed, stats.active_bytes.freed), (0, 12, bytes));
    assert_eq!(stats.cached_bytes, stats.allocated_bytes.current, "all pinned memory is free");
    context.finish();
}

/// CachingHostAllocatorTest.pinned_alias_slice. The use of any part is recorded through the block.
#[test]
fn a_use_of_a_part_is_a_use_of_the_block() {
    let context = TestContext::new(default());
    let stream = context.stream(0);
    let block = context.block(4 * KIB);
    let ptr = block.ptr();
    context.sim.pause_stream(stream.id()).unwrap();
    let to = context.sim.mem_alloc(DeviceId(0), 512).unwrap();
    context.sim.copy(to.into(), block.ptr().offset(1024).into(), 512, stream.id()).unwrap();
    block.record_use(&stream).unwrap();
    drop(block);
    assert_ne!(context.block(4 * KIB).ptr(), ptr);
    context.finish_stream(&stream);
    context.finish();
}

/// CachingHostAllocatorTest.check_raw_allocation: a use is recorded by the start address of an allocated block.
#[test]
fn a_use_by_address_needs_the_start_of_an_allocated_block() {
    let context = TestContext::new(default());
    let stream = context.stream(0);
    let block = context.block(4 * KIB);
    let ptr = block.ptr();
    assert!(!context.host.record_use_at(ptr.offset(8), &stream).unwrap(), "inside");
    assert!(!context.host.record_use_at(ptr.offset(4 * KIB), &stream).unwrap(), "past the end");
    context.sim.pause_stream(stream.id()).unwrap();
    let to = context.sim.mem_alloc(DeviceId(0), 4 * KIB).unwrap();
    context.sim.copy(to.into(), ptr.into(), 4 * KIB, stream.id()).unwrap();
    assert!(context.host.record_use_at(ptr, &stream).unwrap());
    drop(block);
    assert_ne!(context.block(4 * KIB).ptr(), ptr, "as if recorded through the block");
    context.finish_stream(&stream);
    context.host.process_pending().unwrap();
    assert!(!context.host.record_use_at(ptr, &stream).unwrap(), "it is not allocated");
    context.finish();
}

/// CachingHostAllocatorTest.check_unknown_tensor.
#[test]
fn a_use_of_an_unknown_address_is_refused() {
    let context = TestContext::new(default());
    let stream = context.stream(0);
    let own = [0_u8; 64];
    for ptr in [HostPtr(0), HostPtr(own.as_ptr() as u64), HostPtr(u64::MAX)] {
        assert!(!context.host.record_use_at(ptr, &stream).unwrap());
    }
    // Pinned by another caller.
    let pinned = context.sim.host_alloc(DeviceId(0), 4096, warpool::driver::HostOptions::default()).unwrap();
    assert!(!context.host.record_use_at(pinned, &stream).unwrap());
    context.sim.host_free(pinned).unwrap();
    context.finish();
}

/// CachingHostAllocatorTest.check_empty_cache: a pending block stays pinned.
#[test]
fn a_trim_leaves_pending_blocks() {
    let context = TestContext::new(default());
    let stream = context.stream(0);
    let block = context.block(3 * MIB);
    context.pending_copy(&block, &stream);
    drop(block);
    drop(context.block(5 * MIB));
    // The trim does not wait for the copy.
    assert_eq!(context.host.trim(0).unwrap(), 5 * MIB);
    assert_eq!((context.sim.object_counts().pinned, context.stats().active_bytes.current), (1, 3 * MIB));
    context.finish_stream(&stream);
    assert_eq!((context.host.trim(0).unwrap(), context.sim.object_counts().pinned), (3 * MIB, 0));
    context.finish();
}

/// CachingHostAllocatorTest.check_reuse: the same address again, without a driver call.
#[test]
fn reusing_a_cached_block_makes_no_driver_call() {
    let context = TestContext::new(default());
    for bytes in [1, 4096, 100_000, 3 * MIB] {
        let ptr = context.block(bytes).ptr();
        context.counting.reset();
        for _ in 0..100 {
            assert_eq!(context.block(bytes).ptr(), ptr);
        }
        assert_eq!(context.counting.counts(), [], "{bytes}");
    }
    assert_eq!(context.host.allocate(0).unwrap().ptr(), HostPtr(0), "an empty block");
    context.finish();
}

/// TestCuda.test_is_pinned_no_context, test_cuda_primary_ctx.test_pin_memory.
#[test]
fn pinning_uses_an_existing_context() {
    let context = TestContext::with_devices(3, default());
    let active = || (0..3).map(|at| context.sim.context_is_active(DeviceId(at)).unwrap()).collect::<Vec<_>>();
    assert_eq!(active(), [false; 3], "creating the allocator creates none");
    assert!(context.host.allocate(0).is_ok() && context.stats().num_host_alloc == 0);
    assert!(!context.host.record_use_at(HostPtr(64), &context.stream(2)).unwrap());
    context.stream(2).synchronize().unwrap();
    context.sim.context_retain(DeviceId(2)).unwrap();
    assert_eq!(active(), [false, false, true]);
    let block = context.block(4 * KIB);
    block.write(0, &[1; 64]).unwrap();
    context.host.process_pending().unwrap();
    context.host.trim(0).unwrap();
    assert_eq!(active(), [false, false, true], "the existing one is used");
    assert_eq!(context.stats().pinned_bytes_by_device, [0, 0, 2 * MIB], "and its device is charged");
    // The same holds for a request for a device without a context.
    let other = context.host.allocate_for(3 * MIB, &context.instance.device(0).unwrap()).unwrap();
    assert_eq!(active(), [false, false, true]);
    drop((block, other));
    context.sim.context_release(DeviceId(2)).unwrap();
    context.finish();
}

#[test]
fn without_any_context_the_current_device_gets_one() {
    let context = TestContext::with_devices(2, default());
    let _current = context.instance.device(1).unwrap().enter();
    let block = context.block(4 * KIB);
    let active = [0, 1].map(|at| context.sim.context_is_active(DeviceId(at)).unwrap());
    assert_eq!(active, [false, true]);
    drop(block);
    context.finish();
}

fn snapshot(context: &TestContext) -> Snapshot {
    let mut snapshot = Snapshot::default();
    context.host.add_to(&mut snapshot);
    snapshot
}

fn actions(snapshot: &Snapshot) -> Vec<Action> {
    snapshot.host_traces.iter().flatten().map(|entry| entry.action).collect()
}

/// TestCudaAllocator.test_host_memory_snapshot: segments and history. A segment may have many blocks here, where
/// PyTorch's has one.
#[test]
fn a_snapshot_has_pinned_segments_and_history() {
    let context = TestContext::new(default());
    context.host.observers().set_stack_hook(Some(Arc::new(|| {
        Some([Frame { name: "pin".into(), filename: "loader.py".into(), line: 7 }].into())
    })));
    context.host.record_history(Some(HistoryOptions { stacks: StackLevel::All, ..HistoryOptions::default() }));
    let stream = context.stream(0);
    let (kept, pending, freed) = (context.block(1000), context.block(5000), context.block(3 * MIB));
    let (kept_at, pending_at) = (kept.ptr().0, pending.ptr().0);
    context.pending_copy(&pending, &stream);
    drop((pending, freed));
    let taken = snapshot(&context);
    let segments = taken.host_segments.clone().unwrap();
    assert!(segments.iter().all(|segment| segment.device == -1 && segment.stream == 0 && !segment.is_expandable));
    let total: u64 = segments.iter().map(|segment| segment.total_size).sum();
    assert_eq!((segments.len(), total), (2, context.stats().allocated_bytes.current));
    for segment in &segments {
        let ends = segment.blocks.iter().scan(segment.address, |end, block| {
            let fits = block.address == *end;
            *end += block.size;
            Some((fits, *end))
        });
        let ends: Vec<(bool, u64)> = ends.collect();
        assert!(ends.iter().all(|&(fits, _)| fits), "no gaps");
        assert_eq!(ends.last().unwrap().1, segment.address + segment.total_size);
    }
    let blocks = || segments.iter().flat_map(|segment| &segment.blocks);
    let at = |ptr: u64| *blocks().find(|block| block.address == ptr).unwrap();
    assert_eq!((at(kept_at).state, at(kept_at).requested_size), (BlockState::ActiveAllocated, 1000));
    assert_eq!((at(pending_at).state, at(pending_at).requested_size), (BlockState::ActivePendingFree, 5000));
    assert_eq!(blocks().filter(|block| block.state != BlockState::Inactive).count(), 2);
    let stack = &taken.stacks[at(kept_at).stack.unwrap().index()];
    assert_eq!((&*stack[0].name, stack[0].line), ("pin", 7));
    let trace = taken.host_traces.as_ref().unwrap();
    assert!(trace.iter().all(|entry| entry.stream == 0 && entry.stack.is_some()));
    assert_eq!(
        trace.iter().filter(|entry| entry.action == Action::SegmentAlloc).map(|entry| entry.size).sum::<u64>(),
        total
    );
    let of =
        |action| trace.iter().filter(move |entry| entry.action == action).map(|entry| entry.size).collect::<Vec<_>>();
    assert_eq!(of(Action::Alloc), [1000, 5000, 3 * MIB]);
    assert_eq!(of(Action::FreeRequested), [5000, 3 * MIB]);
    assert_eq!(of(Action::FreeCompleted), [3 * MIB], "the other is pending");
    context.finish_stream(&stream);
    drop(kept);
    context.host.trim(0).unwrap();
    let taken = snapshot(&context);
    assert_eq!(taken.host_segments, Some(Vec::new()));
    let trace = taken.host_traces.unwrap();
    assert_eq!(trace.iter().filter(|entry| entry.action == Action::FreeCompleted).count(), 3);
    assert_eq!(trace.iter().filter(|entry| entry.action == Action::SegmentFree).count(), 2);
    context.finish();
}

/// TestCudaAllocator.test_host_memory_snapshot_disabled: segments, and an empty trace.
#[test]
fn without_a_history_a_snapshot_has_segments_only() {
    let context = TestContext::new(default());
    let block = context.block(1000);
    let taken = snapshot(&context);
    assert_eq!((taken.host_segments.unwrap().len(), taken.host_traces), (1, Some(Vec::new())));
    drop(block);
    context.finish();
}

/// TestCudaAllocator.test_host_memory_snapshot_max_entries: the newest are kept, oldest first.
#[test]
fn a_history_keeps_the_newest_entries() {
    let context = TestContext::new(default());
    context.host.record_history(Some(HistoryOptions { entries_max: 4, ..HistoryOptions::default() }));
    for bytes in 1..=5 {
        drop(context.block(bytes));
    }
    let taken = snapshot(&context);
    let trace: Vec<(Action, u64)> =
        taken.host_traces.iter().flatten().map(|entry| (entry.action, entry.size)).collect();
    let [alloc, requested, completed] = [Action::Alloc, Action::FreeRequested, Action::FreeCompleted];
    assert_eq!(trace, [(completed, 4), (alloc, 5), (requested, 5), (completed, 5)]);
    context.finish();
}

/// TestCudaAllocator.test_host_memory_snapshot_none_disables. PyTorch keeps the entries until they are cleared; here
/// stopping clears them, as for device memory.
#[test]
fn stopping_a_history_clears_it() {
    let context = TestContext::new(default());
    context.host.record_history(Some(HistoryOptions::default()));
    drop(context.block(1000));
    assert_eq!(actions(&snapshot(&context)).len(), 4, "a segment, an allocation, both halves of a free");
    context.host.record_history(None);
    assert_eq!(actions(&snapshot(&context)), []);
    drop(context.block(1000));
    assert_eq!(actions(&snapshot(&context)), []);
    context
        .host
        .record_history(Some(HistoryOptions::default().skipping(&["free_requested", "free_completed"]).unwrap()));
    drop(context.block(1000));
    assert_eq!(actions(&snapshot(&context)), [Action::Alloc]);
    context.finish();
}

/// TestCudaAllocator.test_host_memory_snapshot_host_only: host and device have separate histories, in one snapshot.
#[test]
fn host_and_device_histories_are_separate() {
    let context = TestContext::new(default());
    let allocator: Arc<dyn DeviceAllocator> = Arc::new(CachingAllocator::new(&context.instance, Settings::default()));
    let stream = context.stream(0);
    context.host.record_history(Some(HistoryOptions::default()));
    let (pinned, block) = (context.block(1000), allocator.allocate(2000, &stream).unwrap());
    let mut taken = allocator.snapshot(SnapshotOptions::default()).unwrap();
    assert_eq!((&taken.host_segments, &taken.host_traces), (&None, &None), "the device allocator has no host memory");
    context.host.add_to(&mut taken);
    assert!(taken.traces.iter().all(Vec::is_empty), "the device history is off");
    assert_eq!(actions(&taken), [Action::SegmentAlloc, Action::Alloc]);
    assert_eq!((taken.segments.len(), taken.host_segments.unwrap().len()), (1, 1));
    drop((pinned, block, allocator));
    context.finish();
}
