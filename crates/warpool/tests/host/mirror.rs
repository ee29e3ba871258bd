//! PyTorch's tests of pinned host memory, in our terms: each test names the one that it stands for. Where our behaviour
//! differs on purpose, it says so.
//!
//! What differs in most of them is size. PyTorch rounds to powers of two and asks the driver for every block; here
//! there are eight classes between two powers of two, and blocks up to 256 KiB are cut from shared segments, the first
//! of 2 MiB. Its tests of pinned memory in graphs are in `graph_host.rs`.

use std::sync::Arc;

use crate::common::memory::{KIB, MIB};
use warpool::driver::decorate::Counting;
use warpool::driver::sim::{SimConfig, SimDriver};
use warpool::driver::{Call, Copies as _, DeviceId, DevicePtr, Devices as _, HostMemory as _, HostPtr, Memory as _};
use warpool::memory::{
    Action, Allocate as _, BlockState, CachingAllocator, DeviceAllocator, Frame, HistoryOptions, HostAllocator,
    HostBlock, HostStats, PinnedSettings, Settings, Snapshot, SnapshotOptions, StackLevel, Stat,
};
use warpool::{Instance, Stream};

/// A machine with an allocator of pinned memory, and every driver call counted.
struct Lab {
    sim: Arc<SimDriver>,
    counting: Arc<Counting>,
    instance: Instance,
    host: HostAllocator,
}

impl Lab {
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

    /// Puts a copy from the block into a stream that does not get to it, notes the use, and returns where it goes.
    fn pending_copy(&self, from: &HostBlock, stream: &Stream) -> DevicePtr {
        self.sim.pause_stream(stream.id()).unwrap();
        let to = self.sim.mem_alloc(stream.device_id(), from.bytes()).unwrap();
        self.sim.copy(to.into(), from.ptr().into(), from.bytes(), stream.id()).unwrap();
        from.record_use(stream).unwrap();
        to
    }

    /// The stream gets to everything that it has.
    fn let_go(&self, stream: &Stream) {
        self.sim.run_paused(stream.id(), u64::MAX).unwrap();
        self.sim.resume_stream(stream.id()).unwrap();
        stream.synchronize().unwrap();
    }

    fn stats(&self) -> HostStats {
        self.host.stats()
    }

    /// With all blocks given back: nothing stays pinned, and nothing was used that nobody had.
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

fn plain() -> PinnedSettings {
    Settings::default().pinned
}

/// The settings that PyTorch's string gives.
fn parsed(settings: &str) -> PinnedSettings {
    Settings::parse(settings).unwrap().pinned
}

fn stat(current: u64, peak: u64, allocated: u64, freed: u64) -> Stat {
    Stat { current, peak, allocated, freed }
}

/// TestCuda.test_caching_pinned_memory.
#[test]
fn a_block_is_reused_but_not_while_a_copy_is_pending() {
    let lab = Lab::new(plain());
    let stream = lab.stream(0);
    let first = lab.block(4 * KIB);
    let place = first.ptr();
    drop(first);
    let second = lab.block(4 * KIB);
    assert_eq!(second.ptr(), place, "reused once it is gone");
    second.write(0, &[5; 4096]).unwrap();
    let to = lab.pending_copy(&second, &stream);
    drop(second);
    let third = lab.block(4 * KIB);
    assert_ne!(third.ptr(), place, "a copy still reads it");
    third.write(0, &[6; 4096]).unwrap();
    lab.let_go(&stream);
    let mut bytes = [0; 4096];
    lab.sim.download(DeviceId(0), to, &mut bytes).unwrap();
    assert_eq!(bytes, [5; 4096], "what was there when the copy was asked for");
    lab.host.process_pending().unwrap();
    assert_eq!(lab.block(4 * KIB).ptr(), place, "the copy is done");
    drop(third);
    lab.finish();
}

/// TestCudaMultiGPU.test_caching_pinned_memory_multi_gpu: a copy to one device says nothing about one to another.
#[test]
fn a_block_waits_for_copies_to_every_device() {
    let lab = Lab::with_devices(2, plain());
    let streams = [lab.stream(0), lab.stream(1)];
    let block = lab.block(4 * KIB);
    let place = block.ptr();
    block.write(0, &[1; 4096]).unwrap();
    let to = streams.each_ref().map(|stream| lab.pending_copy(&block, stream));
    block.free().unwrap();
    for (at, stream) in streams.iter().enumerate() {
        let other = lab.block(4 * KIB);
        assert_ne!(other.ptr(), place, "device {at} still reads it");
        other.write(0, &[2; 4096]).unwrap();
        lab.let_go(stream);
        drop(other);
        lab.host.process_pending().unwrap();
    }
    let held: Vec<HostBlock> = (0..2).map(|_| lab.block(4 * KIB)).collect();
    assert!(held.iter().any(|block| block.ptr() == place), "both are done");
    for (at, to) in to.into_iter().enumerate() {
        let mut bytes = [0; 4096];
        lab.sim.download(DeviceId(at as u32), to, &mut bytes).unwrap();
        assert_eq!(bytes, [1; 4096], "device {at}");
    }
    drop(held);
    lab.finish();
}

/// TestCuda.test_pinned_memory_with_cudaregister, test_pinned_memory_with_cudaregister_multithread. In ours the pages
/// are whole segments of our own, and huge ones where the system has them.
#[test]
fn memory_is_pinned_where_it_is_by_any_number_of_threads() {
    for threads in [1, 2, 8, 128] {
        let settings = format!("pinned_use_cuda_host_register:True,pinned_num_register_threads:{threads}");
        let lab = Lab::new(parsed(&settings));
        let stream = lab.stream(0);
        for bytes in [8, 100 * KIB, 5 * MIB + 3] {
            let block = lab.block(bytes);
            // It is pinned: the driver knows all of it, by one address.
            for offset in [0, bytes - 1] {
                let ptr = block.ptr().offset(offset);
                assert_eq!(lab.sim.host_device_ptr(DeviceId(0), ptr).unwrap().0, ptr.0);
            }
            let want: Vec<u8> = (0..bytes).map(|at| (at % 251) as u8).collect();
            block.write(0, &want).unwrap();
            let to = lab.pending_copy(&block, &stream);
            lab.let_go(&stream);
            let mut got = vec![0; bytes as usize];
            lab.sim.download(DeviceId(0), to, &mut got).unwrap();
            assert_eq!(got, want, "{bytes} bytes, {threads} threads");
        }
        assert_eq!((lab.calls(Call::HostAlloc), lab.calls(Call::HostRegister)), (0, lab.stats().num_host_alloc));
        lab.instance.device(0).unwrap().synchronize().unwrap();
        let Lab { sim, counting, host, .. } = &lab;
        host.trim(0).unwrap();
        assert_eq!(
            (counting.count(Call::HostUnregister).calls, sim.object_counts().pinned),
            (host.stats().num_host_alloc, 0)
        );
        lab.finish();
    }
}

/// The rest of that story: the way is remembered by segment, so the setting may change in between. (PyTorch once
/// unpinned by the setting of the moment.)
#[test]
fn memory_goes_back_the_way_it_came() {
    let lab = Lab::new(plain());
    let allocated = lab.block(MIB);
    lab.host.set_settings(PinnedSettings { use_cuda_host_register: true, ..plain() });
    let registered = lab.block(2 * MIB);
    lab.host.set_settings(plain());
    drop((allocated, registered));
    lab.host.trim(0).unwrap();
    let calls = [Call::HostAlloc, Call::HostRegister, Call::HostFree, Call::HostUnregister].map(|call| lab.calls(call));
    assert_eq!((calls, lab.counting.count(Call::HostUnregister).errors), ([1, 1, 1, 1], 0));
    lab.finish();
}

/// TestCuda.test_pinned_memory_empty_cache, for both ways of pinning.
#[test]
fn an_emptied_cache_holds_only_what_somebody_has() {
    for settings in ["", "pinned_use_cuda_host_register:True", "pinned_use_background_threads:True"] {
        let lab = Lab::new(parsed(settings));
        let kept = lab.block(MIB);
        let blocks: Vec<HostBlock> = [100, 5000, 3 * MIB, 7 * MIB].map(|bytes| lab.block(bytes)).into();
        drop(blocks);
        let before = lab.stats().allocated_bytes.current;
        let returned = lab.host.trim(0).unwrap();
        assert_eq!((lab.stats().allocated_bytes.current, before - returned), (MIB, MIB), "{settings}");
        assert_eq!(lab.sim.object_counts().pinned, 1, "{settings}");
        kept.write(0, &[1; 100]).unwrap();
        drop(kept);
        assert_eq!(lab.host.trim(0).unwrap(), MIB, "{settings}");
        assert_eq!((lab.sim.object_counts().pinned, lab.host.trim(0).unwrap()), (0, 0), "{settings}");
        lab.finish();
    }
}

/// TestCuda.test_pinned_memory_use_background_threads: nobody asks for anything, and what waited comes back all the
/// same. Ours sleeps while nothing waits.
#[test]
fn a_thread_of_its_own_looks_after_events() {
    let lab = Lab::new(parsed("pinned_use_background_threads:True"));
    let stream = lab.stream(0);
    let block = lab.block(4 * KIB);
    let place = block.ptr();
    lab.pending_copy(&block, &stream);
    drop(block);
    assert_eq!(lab.stats().active_requests.current, 1);
    lab.let_go(&stream);
    // The statistics look after nothing. A thread that never comes would keep this waiting for ever.
    while lab.stats().active_requests.current > 0 {
        std::thread::yield_now();
    }
    assert_eq!(lab.block(4 * KIB).ptr(), place);
    lab.finish();
}

/// TestCuda.test_host_memory_stats: exact counters over requests, reuse, an emptied cache and both resets.
#[test]
fn counters_are_exact() {
    let lab = Lab::new(plain());
    let zero = HostStats { pinned_bytes_by_device: lab.stats().pinned_bytes_by_device, ..HostStats::default() };
    assert_eq!(lab.stats(), zero);
    assert!(lab.stats().pinned_bytes_by_device.iter().all(|&bytes| bytes == 0));

    // A small block is cut from a shared segment: one call of the driver. PyTorch would pin 16 bytes for it.
    let small = lab.block(10);
    let stats = lab.stats();
    assert_eq!(stats.allocations, stat(1, 1, 1, 0));
    assert_eq!(stats.allocated_bytes, stat(2 * MIB, 2 * MIB, 2 * MIB, 0));
    assert_eq!(stats.active_requests, stat(1, 1, 1, 0));
    assert_eq!(stats.active_bytes, stat(512, 512, 512, 0));
    assert_eq!((stats.num_host_alloc, stats.num_host_free), (1, 0));
    assert_eq!((stats.cached_bytes, stats.pinned_bytes_by_device[0]), (2 * MIB - 512, 2 * MIB));

    // A large one has its own, as large as it is. PyTorch would pin 4 MiB.
    let large = lab.block(3 * MIB);
    let stats = lab.stats();
    assert_eq!(stats.allocations, stat(2, 2, 2, 0));
    assert_eq!(stats.allocated_bytes, stat(5 * MIB, 5 * MIB, 5 * MIB, 0));
    assert_eq!(stats.active_requests, stat(2, 2, 2, 0));
    assert_eq!(stats.active_bytes, stat(3 * MIB + 512, 3 * MIB + 512, 3 * MIB + 512, 0));

    // Given back, both stay pinned; taken again, nothing is pinned.
    drop((small, large));
    let stats = lab.stats();
    assert_eq!(stats.active_requests, stat(0, 2, 2, 2));
    assert_eq!(stats.active_bytes, stat(0, 3 * MIB + 512, 3 * MIB + 512, 3 * MIB + 512));
    assert_eq!(stats.allocated_bytes, stat(5 * MIB, 5 * MIB, 5 * MIB, 0));
    let (small, large) = (lab.block(500), lab.block(3 * MIB - 100));
    let stats = lab.stats();
    assert_eq!(stats.active_requests, stat(2, 2, 4, 2));
    assert_eq!((stats.num_host_alloc, stats.allocations), (2, stat(2, 2, 2, 0)));
    assert_eq!(stats.host_alloc_time.count, 2);
    assert!(stats.host_alloc_time.min_us <= stats.host_alloc_time.max_us);
    assert!(stats.host_alloc_time.max_us <= stats.host_alloc_time.total_us);

    // The cache is emptied: the large one goes.
    drop(large);
    lab.host.trim(0).unwrap();
    let stats = lab.stats();
    assert_eq!(stats.allocations, stat(1, 2, 2, 1));
    assert_eq!(stats.allocated_bytes, stat(2 * MIB, 5 * MIB, 5 * MIB, 3 * MIB));
    assert_eq!((stats.num_host_free, stats.host_free_time.count), (1, 1));

    // Peaks become what is now; then what was ever done is forgotten, and what is stays.
    lab.host.reset_peak_stats();
    let stats = lab.stats();
    assert_eq!(stats.allocations, stat(1, 1, 2, 1));
    assert_eq!(stats.active_bytes, stat(512, 512, 6 * MIB + 1024, 6 * MIB + 512));
    lab.host.reset_accumulated_stats();
    let stats = lab.stats();
    assert_eq!(stats.allocations, stat(1, 1, 0, 0));
    assert_eq!(stats.allocated_bytes, stat(2 * MIB, 2 * MIB, 0, 0));
    assert_eq!(stats.active_requests, stat(1, 1, 0, 0));
    assert_eq!((stats.num_host_alloc, stats.num_host_free), (0, 0));
    assert_eq!((stats.host_alloc_time.count, stats.host_free_time.total_us), (0, 0));
    drop(small);
    lab.host.trim(0).unwrap();
    let stats = lab.stats();
    assert_eq!(stats.allocations, stat(0, 1, 0, 1));
    assert_eq!(stats.active_requests, stat(0, 1, 0, 1));
    assert_eq!((stats.num_host_free, stats.cached_bytes, stats.pinned_bytes_by_device[0]), (1, 0, 0));
    lab.finish();
}

/// TestCuda.test_host_memory_stats_active_after_free_no_events.
#[test]
fn a_block_that_no_stream_used_is_inactive_at_once() {
    let lab = Lab::new(plain());
    for by_drop in [true, false] {
        let block = lab.block(4 * KIB);
        assert_eq!((lab.stats().active_requests.current, lab.stats().active_bytes.current), (1, 4 * KIB));
        if by_drop {
            drop(block);
        } else {
            block.free().unwrap();
        }
        assert_eq!((lab.stats().active_requests.current, lab.stats().active_bytes.current), (0, 0));
    }
    assert_eq!(lab.stats().allocated_bytes.current, 2 * MIB, "still pinned");
    lab.finish();
}

/// TestCuda.test_host_memory_stats_active_after_event_drain: it counts until somebody has seen its events pass, and
/// reading the counters is not that.
#[test]
fn a_block_that_waits_is_active_until_its_events_are_seen() {
    let lab = Lab::new(plain());
    let stream = lab.stream(0);
    let block = lab.block(4 * KIB);
    lab.pending_copy(&block, &stream);
    drop(block);
    let active = || (lab.stats().active_requests.current, lab.stats().active_bytes.current);
    assert_eq!(active(), (1, 4 * KIB));
    lab.host.process_pending().unwrap();
    assert_eq!(active(), (1, 4 * KIB), "the copy is still to come");
    lab.let_go(&stream);
    assert_eq!(active(), (1, 4 * KIB), "nobody has looked");
    lab.host.process_pending().unwrap();
    assert_eq!(active(), (0, 0));
    lab.finish();
}

/// TestCachingHostAllocatorConfig.test_max_round_threshold. PyTorch's powers of two waste up to half; here a threshold
/// spares an eighth at most, and large blocks are rounded to pages at any rate.
#[test]
fn above_the_threshold_nothing_is_rounded_to_a_class() {
    let limited = |bytes| PinnedSettings { max_round_threshold_bytes: Some(bytes), ..plain() };
    let usable = |settings: PinnedSettings, bytes: u64| {
        let lab = Lab::new(settings);
        let usable = lab.block(bytes).bytes_usable();
        lab.finish();
        usable
    };
    assert_eq!(usable(plain(), 100_000), 104 * KIB, "the class");
    assert_eq!(usable(limited(100_000), 100_000), 104 * KIB, "at the threshold");
    assert_eq!(usable(limited(99_999), 100_000), 100_352, "above it: only as alignment needs it");
    assert_eq!(usable(limited(0), 1), 512);
    assert_eq!(usable(parsed("pinned_max_round_threshold_mb:1"), 100_000), 104 * KIB);
    for settings in [plain(), limited(0)] {
        assert_eq!(usable(settings, 5 * MIB + 1), 5 * MIB + 4 * KIB, "pages");
    }
}

/// TestCachingHostAllocatorConfig.test_max_cached_size.
#[test]
fn above_the_limit_nothing_is_kept() {
    let lab = Lab::new(parsed("pinned_max_cached_size_mb:1"));
    let (small, large) = (lab.block(MIB), lab.block(MIB + 1));
    assert_eq!(lab.sim.object_counts().pinned, 2);
    let place = small.ptr();
    small.free().unwrap();
    large.free().unwrap();
    assert_eq!(
        (lab.sim.object_counts().pinned, lab.stats().num_host_free),
        (1, 1),
        "the large one is the driver's again"
    );
    assert_eq!(lab.block(MIB).ptr(), place, "the small one was kept");
    // A dropped one calls no driver, and goes with the next call that may.
    drop(lab.block(2 * MIB));
    lab.host.process_pending().unwrap();
    assert_eq!((lab.sim.object_counts().pinned, lab.stats().num_host_free), (1, 2));
    // One that streams used goes when they are done with it.
    let (stream, large) = (lab.stream(0), lab.block(2 * MIB));
    lab.pending_copy(&large, &stream);
    large.free().unwrap();
    lab.host.process_pending().unwrap();
    assert_eq!(lab.sim.object_counts().pinned, 2);
    lab.let_go(&stream);
    lab.host.process_pending().unwrap();
    assert_eq!((lab.sim.object_counts().pinned, lab.stats().num_host_free), (1, 3));
    lab.finish();
}

/// TestCachingHostAllocatorConfig.test_both_thresholds: rounded and kept, unrounded and kept, unrounded and not kept.
#[test]
fn the_two_thresholds_do_not_disturb_each_other() {
    let settings = PinnedSettings { max_round_threshold_bytes: Some(50_000), max_cached_bytes: Some(MIB), ..plain() };
    let lab = Lab::new(settings);
    for (bytes, usable, kept) in [(40_000, 40 * KIB, true), (60_001, 60_416, true), (MIB + 1, MIB + 4 * KIB, false)] {
        let pins = lab.stats().num_host_alloc;
        let block = lab.block(bytes);
        assert_eq!(block.bytes_usable(), usable, "{bytes}");
        block.free().unwrap();
        let first = lab.stats().num_host_alloc - pins;
        lab.block(bytes).free().unwrap();
        assert_eq!(lab.stats().num_host_alloc - pins, if kept { first } else { first + 1 }, "{bytes} kept: {kept}");
    }
    assert_eq!(lab.stats().num_host_free, 2);
    lab.finish();
}

/// TestCachingHostAllocatorConfig.test_round_threshold_larger_than_cached_size: the limit on what is kept wins, for
/// rounding too.
#[test]
fn what_is_not_kept_is_not_rounded() {
    let settings =
        PinnedSettings { max_round_threshold_bytes: Some(200_000), max_cached_bytes: Some(100_000), ..plain() };
    let lab = Lab::new(settings);
    let block = lab.block(150_000);
    assert_eq!(block.bytes_usable(), 150_016, "its class would be 160 KiB");
    drop(block);
    assert_eq!(lab.block(90_000).bytes_usable(), 88 * KIB);
    lab.finish();
}

/// TestCachingHostAllocatorConfig.test_unrounded_bucket_no_undersized_reuse: blocks of many sizes side by side, none of
/// them is ever too small.
#[test]
fn nobody_gets_a_block_that_is_too_small() {
    let lab = Lab::new(PinnedSettings { max_round_threshold_bytes: Some(0), ..plain() });
    let sizes = |step: u64| (0..60).map(move |at| 33_000 + (at * step) % 6_000);
    for step in [1, 513, 517, 1031, 2999] {
        let blocks: Vec<HostBlock> = sizes(step).map(|bytes| lab.block(bytes)).collect();
        for (at, block) in blocks.iter().enumerate() {
            block.write(0, &vec![at as u8; block.bytes() as usize]).unwrap();
        }
        for (at, block) in blocks.iter().enumerate() {
            let mut bytes = vec![0; block.bytes() as usize];
            block.read(0, &mut bytes).unwrap();
            assert!(
                bytes.iter().all(|&byte| byte == at as u8),
                "{} bytes, step {step}: shared with another",
                block.bytes()
            );
        }
        // Some go, so that the next round finds holes of all sizes.
        blocks.into_iter().enumerate().filter(|(at, _)| at % 3 != 0).for_each(drop);
    }
    let small = lab.block(2 * MIB);
    let place = small.ptr();
    small.free().unwrap();
    assert_ne!(lab.block(2 * MIB + 1).ptr(), place);
    lab.finish();
}

/// CachingHostAllocatorTest.check_stats: what comes back in another thread than it was taken in is counted once.
#[test]
fn counters_hold_across_threads() {
    let lab = Lab::new(plain());
    let blocks: Vec<HostBlock> = std::thread::scope(|scope| {
        let host = &lab.host;
        let threads: Vec<_> = (0..4)
            .map(|_| scope.spawn(move || [8, 9000, 400 * KIB].map(|bytes| host.allocate(bytes).unwrap())))
            .collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!((lab.stats().active_requests.current, lab.stats().active_requests.allocated), (12, 12));
    let bytes: u64 = blocks.iter().map(HostBlock::bytes_usable).sum();
    assert_eq!(lab.stats().active_bytes.current, bytes);
    drop(blocks);
    let stats = lab.stats();
    assert_eq!((stats.active_requests.current, stats.active_requests.freed, stats.active_bytes.freed), (0, 12, bytes));
    assert_eq!(stats.cached_bytes, stats.allocated_bytes.current, "all that is pinned lies free");
    lab.finish();
}

/// CachingHostAllocatorTest.pinned_alias_slice. A view of a block notes its use through the block, whatever part it is
/// of; there is no other way to name a part.
#[test]
fn a_use_of_any_part_is_a_use_of_the_block() {
    let lab = Lab::new(plain());
    let stream = lab.stream(0);
    let block = lab.block(4 * KIB);
    let place = block.ptr();
    lab.sim.pause_stream(stream.id()).unwrap();
    let to = lab.sim.mem_alloc(DeviceId(0), 512).unwrap();
    lab.sim.copy(to.into(), block.ptr().offset(1024).into(), 512, stream.id()).unwrap();
    block.record_use(&stream).unwrap();
    drop(block);
    assert_ne!(lab.block(4 * KIB).ptr(), place);
    lab.let_go(&stream);
    lab.finish();
}

/// CachingHostAllocatorTest.check_raw_allocation: by its address a block is known where it starts, as long as somebody
/// has it.
#[test]
fn a_use_by_address_is_by_the_start_of_a_block() {
    let lab = Lab::new(plain());
    let stream = lab.stream(0);
    let block = lab.block(4 * KIB);
    let place = block.ptr();
    assert!(!lab.host.record_use_at(place.offset(8), &stream).unwrap(), "inside");
    assert!(!lab.host.record_use_at(place.offset(4 * KIB), &stream).unwrap(), "behind");
    lab.sim.pause_stream(stream.id()).unwrap();
    let to = lab.sim.mem_alloc(DeviceId(0), 4 * KIB).unwrap();
    lab.sim.copy(to.into(), place.into(), 4 * KIB, stream.id()).unwrap();
    assert!(lab.host.record_use_at(place, &stream).unwrap());
    drop(block);
    assert_ne!(lab.block(4 * KIB).ptr(), place, "as if noted by the block");
    lab.let_go(&stream);
    lab.host.process_pending().unwrap();
    assert!(!lab.host.record_use_at(place, &stream).unwrap(), "nobody has it");
    lab.finish();
}

/// CachingHostAllocatorTest.check_unknown_tensor.
#[test]
fn an_unknown_address_is_no_block() {
    let lab = Lab::new(plain());
    let stream = lab.stream(0);
    let own = [0_u8; 64];
    for ptr in [HostPtr(0), HostPtr(own.as_ptr() as u64), HostPtr(u64::MAX)] {
        assert!(!lab.host.record_use_at(ptr, &stream).unwrap());
    }
    // Pinned, but not here.
    let pinned = lab.sim.host_alloc(DeviceId(0), 4096, warpool::driver::HostOptions::default()).unwrap();
    assert!(!lab.host.record_use_at(pinned, &stream).unwrap());
    lab.sim.host_free(pinned).unwrap();
    lab.finish();
}

/// CachingHostAllocatorTest.check_empty_cache: a block whose copy is pending outlasts it.
#[test]
fn an_emptied_cache_leaves_what_is_pending() {
    let lab = Lab::new(plain());
    let stream = lab.stream(0);
    let block = lab.block(3 * MIB);
    lab.pending_copy(&block, &stream);
    drop(block);
    drop(lab.block(5 * MIB));
    // The memory of a pending copy is not the cache's, and the call does not wait for it.
    assert_eq!(lab.host.trim(0).unwrap(), 5 * MIB);
    assert_eq!((lab.sim.object_counts().pinned, lab.stats().active_bytes.current), (1, 3 * MIB));
    lab.let_go(&stream);
    assert_eq!((lab.host.trim(0).unwrap(), lab.sim.object_counts().pinned), (3 * MIB, 0));
    lab.finish();
}

/// CachingHostAllocatorTest.check_reuse: the same place again and again, without a call of the driver.
#[test]
fn a_cached_pair_calls_no_driver() {
    let lab = Lab::new(plain());
    for bytes in [1, 4096, 100_000, 3 * MIB] {
        let place = lab.block(bytes).ptr();
        lab.counting.reset();
        for _ in 0..100 {
            assert_eq!(lab.block(bytes).ptr(), place);
        }
        assert_eq!(lab.counting.counts(), [], "{bytes}");
    }
    assert_eq!(lab.host.allocate(0).unwrap().ptr(), HostPtr(0), "nothing is nowhere");
    lab.finish();
}

/// TestCuda.test_is_pinned_no_context, test_cuda_primary_ctx.test_pin_memory.
#[test]
fn pinning_makes_no_context_where_there_is_one_elsewhere() {
    let lab = Lab::with_devices(3, plain());
    let active = || (0..3).map(|at| lab.sim.context_is_active(DeviceId(at)).unwrap()).collect::<Vec<_>>();
    assert_eq!(active(), [false; 3], "making the allocator makes none");
    assert!(lab.host.allocate(0).is_ok() && lab.stats().num_host_alloc == 0);
    assert!(!lab.host.record_use_at(HostPtr(64), &lab.stream(2)).unwrap());
    lab.stream(2).synchronize().unwrap();
    lab.sim.context_retain(DeviceId(2)).unwrap();
    assert_eq!(active(), [false, false, true]);
    let block = lab.block(4 * KIB);
    block.write(0, &[1; 64]).unwrap();
    lab.host.process_pending().unwrap();
    lab.host.trim(0).unwrap();
    assert_eq!(active(), [false, false, true], "the only one there is serves");
    assert_eq!(lab.stats().pinned_bytes_by_device, [0, 0, 2 * MIB], "and it counts to its device");
    // For a device that is named, and has none.
    let other = lab.host.allocate_for(3 * MIB, &lab.instance.device(0).unwrap()).unwrap();
    assert_eq!(active(), [false, false, true]);
    drop((block, other));
    lab.sim.context_release(DeviceId(2)).unwrap();
    lab.finish();
}

/// The other half: where no device has a context, the one that is made is the current device's.
#[test]
fn the_first_context_is_the_current_devices() {
    let lab = Lab::with_devices(2, plain());
    let _current = lab.instance.device(1).unwrap().enter();
    let block = lab.block(4 * KIB);
    let active = [0, 1].map(|at| lab.sim.context_is_active(DeviceId(at)).unwrap());
    assert_eq!(active, [false, true]);
    drop(block);
    lab.finish();
}

fn snapshot(lab: &Lab) -> Snapshot {
    let mut snapshot = Snapshot::default();
    lab.host.add_to(&mut snapshot);
    snapshot
}

fn actions(snapshot: &Snapshot) -> Vec<Action> {
    snapshot.host_traces.iter().flatten().map(|entry| entry.action).collect()
}

/// TestCudaAllocator.test_host_memory_snapshot: what there is, and what happened. A segment may have many blocks here,
/// where PyTorch's has one.
#[test]
fn a_snapshot_has_the_hosts_segments_and_history() {
    let lab = Lab::new(plain());
    lab.host.observers().set_stack_hook(Some(Arc::new(|| {
        Some([Frame { name: "pin".into(), filename: "loader.py".into(), line: 7 }].into())
    })));
    lab.host.record_history(Some(HistoryOptions { stacks: StackLevel::All, ..HistoryOptions::default() }));
    let stream = lab.stream(0);
    let (kept, waits, gone) = (lab.block(1000), lab.block(5000), lab.block(3 * MIB));
    let (kept_at, waits_at) = (kept.ptr().0, waits.ptr().0);
    lab.pending_copy(&waits, &stream);
    drop((waits, gone));
    let taken = snapshot(&lab);
    let segments = taken.host_segments.clone().unwrap();
    assert!(segments.iter().all(|segment| segment.device == -1 && segment.stream == 0 && !segment.is_expandable));
    let total: u64 = segments.iter().map(|segment| segment.total_size).sum();
    assert_eq!((segments.len(), total), (2, lab.stats().allocated_bytes.current));
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
    assert_eq!((at(waits_at).state, at(waits_at).requested_size), (BlockState::ActivePendingFree, 5000));
    assert_eq!(blocks().filter(|block| block.state != BlockState::Inactive).count(), 2);
    let stack = &taken.stacks[at(kept_at).stack.unwrap().0 as usize];
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
    assert_eq!(of(Action::FreeCompleted), [3 * MIB], "the other waits");
    lab.let_go(&stream);
    drop(kept);
    lab.host.trim(0).unwrap();
    let taken = snapshot(&lab);
    assert_eq!(taken.host_segments, Some(Vec::new()));
    let trace = taken.host_traces.unwrap();
    assert_eq!(trace.iter().filter(|entry| entry.action == Action::FreeCompleted).count(), 3);
    assert_eq!(trace.iter().filter(|entry| entry.action == Action::SegmentFree).count(), 2);
    lab.finish();
}

/// TestCudaAllocator.test_host_memory_snapshot_disabled: without a history there are segments all the same, and nothing
/// that happened.
#[test]
fn without_a_history_a_snapshot_has_segments_only() {
    let lab = Lab::new(plain());
    let block = lab.block(1000);
    let taken = snapshot(&lab);
    assert_eq!((taken.host_segments.unwrap().len(), taken.host_traces), (1, Some(Vec::new())));
    drop(block);
    lab.finish();
}

/// TestCudaAllocator.test_host_memory_snapshot_max_entries: the newest are kept, oldest first.
#[test]
fn a_history_keeps_the_newest_entries() {
    let lab = Lab::new(plain());
    lab.host.record_history(Some(HistoryOptions { entries_max: 4, ..HistoryOptions::default() }));
    for bytes in 1..=5 {
        drop(lab.block(bytes));
    }
    let taken = snapshot(&lab);
    let trace: Vec<(Action, u64)> =
        taken.host_traces.iter().flatten().map(|entry| (entry.action, entry.size)).collect();
    let [alloc, requested, completed] = [Action::Alloc, Action::FreeRequested, Action::FreeCompleted];
    assert_eq!(trace, [(completed, 4), (alloc, 5), (requested, 5), (completed, 5)]);
    lab.finish();
}

/// TestCudaAllocator.test_host_memory_snapshot_none_disables. PyTorch keeps what it has until it is told to clear it;
/// here, as on the device's side, stopping forgets.
#[test]
fn a_stopped_history_is_forgotten() {
    let lab = Lab::new(plain());
    lab.host.record_history(Some(HistoryOptions::default()));
    drop(lab.block(1000));
    assert_eq!(actions(&snapshot(&lab)).len(), 4, "a segment, an allocation, both halves of a free");
    lab.host.record_history(None);
    assert_eq!(actions(&snapshot(&lab)), []);
    drop(lab.block(1000));
    assert_eq!(actions(&snapshot(&lab)), []);
    lab.host.record_history(Some(HistoryOptions::default().skipping(&["free_requested", "free_completed"]).unwrap()));
    drop(lab.block(1000));
    assert_eq!(actions(&snapshot(&lab)), [Action::Alloc]);
    lab.finish();
}

/// TestCudaAllocator.test_host_memory_snapshot_host_only: each side has a history of its own, in one snapshot.
#[test]
fn the_hosts_history_is_not_the_devices() {
    let lab = Lab::new(plain());
    let allocator: Arc<dyn DeviceAllocator> = Arc::new(CachingAllocator::new(&lab.instance, Settings::default()));
    let stream = lab.stream(0);
    lab.host.record_history(Some(HistoryOptions::default()));
    let (pinned, block) = (lab.block(1000), allocator.allocate(2000, &stream).unwrap());
    let mut taken = allocator.snapshot(SnapshotOptions::default()).unwrap();
    assert_eq!(
        (&taken.host_segments, &taken.host_traces),
        (&None, &None),
        "the device's allocator knows nothing of the host"
    );
    lab.host.add_to(&mut taken);
    assert!(taken.traces.iter().all(Vec::is_empty), "the device's side was not asked for");
    assert_eq!(actions(&taken), [Action::SegmentAlloc, Action::Alloc]);
    assert_eq!((taken.segments.len(), taken.host_segments.unwrap().len()), (1, 1));
    drop((pinned, block, allocator));
    lab.finish();
}
