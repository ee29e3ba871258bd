//! What each setting does, alone and beside others.

use warpool::driver::decorate::{FaultPlan, Faulty};
use warpool::driver::sim::SimConfig;
use warpool::driver::{Call, Devices as _, ErrorCode};
use warpool::memory::{HostAllocator, PinnedSettings, Settings};
use warpool::{Error, Instance};

use super::lab::{HostLab, KIB, MIB};

#[test]
fn sizes_above_the_threshold_are_not_rounded() {
    let lab = HostLab::new("pinned_max_round_threshold_mb:0");
    let block = lab.alloc(100_001);
    assert_eq!((block.bytes(), block.bytes_usable()), (100_001, 100_352));
    // Nobody gets less than was asked for, nor much more.
    let ptr = block.ptr();
    drop(block);
    assert_ne!(lab.alloc(100_353).ptr(), ptr);
    let smaller = lab.alloc(99_000);
    assert_eq!(smaller.bytes_usable(), 99_328);
    drop(smaller);
    assert_eq!(lab.alloc(100_352).ptr(), ptr);
    lab.set("");
    assert_eq!(lab.alloc(100_001).bytes_usable(), 104 * KIB);
    lab.finish();
}

#[test]
fn blocks_above_the_limit_are_not_kept() {
    let lab = HostLab::new("pinned_max_cached_size_mb:4");
    let [small, large] = [lab.alloc(4 * MIB), lab.alloc(4 * MIB + 1)];
    lab.free(small);
    assert_eq!(lab.pinned_bytes(), 8 * MIB + 4 * KIB);
    lab.free(large);
    assert_eq!((lab.pinned_bytes(), lab.stats().num_host_free), (4 * MIB, 1));
    // Dropped, it goes with the next call that may call the driver; used, when the stream has passed.
    let stream = lab.stream();
    let [dropped, used] = [lab.alloc(5 * MIB), lab.alloc(6 * MIB)];
    lab.pause_stream(&stream);
    lab.upload(&used, &stream);
    drop(dropped);
    lab.free(used);
    assert_eq!(lab.pinned_bytes(), 10 * MIB);
    lab.let_go(&stream);
    lab.pinned.process_pending().unwrap();
    assert_eq!(lab.pinned_bytes(), 4 * MIB);
    lab.finish();
}

#[test]
fn the_reserve_serves_all_sizes_and_stays() {
    let lab = HostLab::new("pinned_reserve_segment_size_mb:16");
    assert_eq!(lab.pinned_bytes(), 0, "not before the first use");
    let blocks = [512, 100 * KIB, 3 * MIB, 10 * MIB].map(|bytes| lab.alloc(bytes));
    assert_eq!((lab.pinned_bytes(), lab.stats().num_host_alloc), (16 * MIB, 1));
    let beyond = lab.alloc(4 * MIB);
    assert_eq!(lab.pinned_bytes(), 20 * MIB);
    drop((blocks, beyond));
    assert_eq!((lab.trim(0), lab.pinned_bytes()), (4 * MIB, 16 * MIB));
    let whole = lab.alloc(16 * MIB);
    assert_eq!(lab.pinned_bytes(), 16 * MIB);
    drop(whole);
    lab.finish();
}

/// What is cut from it is too large to be kept, but it is the reserve that is free then.
#[test]
fn the_reserve_stays_when_blocks_of_it_are_not_kept() {
    let lab = HostLab::new("pinned_reserve_segment_size_mb:16,pinned_max_cached_size_mb:4");
    for _ in 0..2 {
        lab.free(lab.alloc(8 * MIB));
        drop(lab.alloc(8 * MIB));
        lab.pinned.process_pending().unwrap();
        assert_eq!((lab.pinned_bytes(), lab.stats().num_host_free), (16 * MIB, 0));
    }
    lab.finish();
}

#[test]
fn a_reserve_that_is_no_longer_wanted_is_not_made_and_none_is_made_twice() {
    let lab = HostLab::new("pinned_reserve_segment_size_mb:16");
    lab.set("");
    drop(lab.alloc(KIB));
    assert_eq!((lab.pinned_bytes(), lab.stats().num_host_alloc), (2 * MIB, 1));
    lab.set("pinned_reserve_segment_size_mb:16");
    drop(lab.alloc(3 * MIB));
    assert_eq!(lab.pinned_bytes(), 18 * MIB);
    lab.set("");
    lab.set("pinned_reserve_segment_size_mb:16");
    drop(lab.alloc(20 * MIB));
    assert_eq!(lab.pinned_bytes(), 38 * MIB);
    lab.finish();
    // More than there is: a warning, and the request is served.
    let lab = HostLab::new("");
    lab.pinned.set_settings(PinnedSettings { reserve_segment_bytes: u64::MAX, ..PinnedSettings::default() });
    drop(lab.alloc(KIB));
    assert_eq!(lab.pinned_bytes(), 2 * MIB);
    lab.finish();
}

/// Also what its own look gives back, since it was not to be kept.
#[test]
fn trim_says_all_that_it_gave_back_and_asks_its_hooks_first() {
    let lab = HostLab::new("pinned_max_cached_size_mb:4");
    let (say, heard) = std::sync::mpsc::channel();
    lab.pinned.observers().attach_trim_hook(std::sync::Arc::new(move |device| say.send(device.0).unwrap()));
    drop((lab.alloc(5 * MIB), lab.alloc(3 * MIB)));
    assert_eq!((lab.trim(4 * MIB), lab.pinned_bytes()), (5 * MIB, 3 * MIB));
    drop(lab.alloc(5 * MIB));
    assert_eq!((lab.trim(0), lab.pinned_bytes()), (8 * MIB, 0));
    assert_eq!(heard.try_iter().collect::<Vec<_>>(), [u32::MAX; 2]);
    lab.finish();
}

/// A reserve that cannot be had is no reason to refuse a request that can.
#[test]
fn a_reserve_beyond_the_cap_is_left_out() {
    let lab = HostLab::new("pinned_reserve_segment_size_mb:16,pinned_cap_mb:8");
    let block = lab.alloc(MIB);
    assert_eq!(lab.pinned_bytes(), MIB);
    drop(block);
    lab.finish();
}

/// A driver whose next calls of that kind fail.
fn failing(call: Call, settings: &str) -> (Instance, HostAllocator) {
    let plan = FaultPlan::default().fail_nth(call, 1, ErrorCode::OutOfMemory);
    let sim = std::sync::Arc::new(warpool::driver::sim::SimDriver::new(SimConfig::default()));
    let instance = Instance::new(std::sync::Arc::new(Faulty::new(sim, plan))).unwrap();
    let pinned = HostAllocator::new(&instance, Settings::parse(settings).unwrap().pinned);
    (instance, pinned)
}

#[test]
fn errors_at_free_are_swallowed_if_wanted() {
    for (settings, swallowed) in [("", false), ("pinned_free_catch_all:True", true)] {
        let (instance, pinned) = failing(Call::EventRecord, settings);
        let stream = instance.device(0).unwrap().pool_stream().unwrap();
        let block = pinned.allocate(KIB).unwrap();
        block.record_use(&stream).unwrap();
        let outcome = block.free();
        assert_eq!(outcome.is_ok(), swallowed, "{outcome:?}");
        assert_eq!(pinned.stats().active_requests.current, 1, "it waits for the next try");
        pinned.process_pending().unwrap();
        stream.synchronize().unwrap();
        pinned.process_pending().unwrap();
        assert_eq!(pinned.stats().active_requests.current, 0);
        pinned.close().unwrap();
    }
}

/// Pinning makes no context where there is none.
#[test]
fn memory_is_pinned_with_a_context_that_there_is() {
    let active =
        |lab: &HostLab| [0, 1, 2].map(|index| lab.sim.context_is_active(warpool::driver::DeviceId(index)).unwrap());
    let lab = HostLab::on(SimConfig::default().with_devices(3), "");
    lab.instance.device(2).unwrap().pool_stream().unwrap();
    assert_eq!(active(&lab), [false, false, true]);
    let any = lab.alloc(MIB);
    let of_first = lab.pinned.allocate_for(2 * MIB, &lab.device()).unwrap();
    assert_eq!(active(&lab), [false, false, true]);
    assert_eq!(lab.stats().pinned_bytes_by_device, [2 * MIB, 0, MIB]);
    drop((any, of_first));
    lab.finish();

    // The current device's, if it has one; and where none has, its own.
    let lab = HostLab::on(SimConfig::default().with_devices(3), "");
    let _current = lab.instance.device(1).unwrap().enter();
    drop(lab.alloc(MIB));
    assert_eq!(active(&lab), [false, true, false]);
    lab.finish();
}

#[test]
fn odd_sizes_are_answered() {
    let lab = HostLab::new("");
    let empty = lab.alloc(0);
    assert_eq!((empty.ptr().0, empty.bytes(), empty.bytes_usable()), (0, 0, 0));
    empty.record_use(&lab.stream()).unwrap();
    empty.write(0, &[]).unwrap();
    assert!(matches!(empty.read(0, &mut [0]), Err(Error::HostBounds { offset: 0, bytes: 1, available: 0 })));
    lab.free(empty);
    assert!(matches!(lab.pinned.allocate(u64::MAX), Err(Error::PinnedRequestTooLarge { bytes: u64::MAX })));
    let block = lab.alloc(1000);
    block.write(990, &[1; 10]).unwrap();
    assert!(matches!(block.write(991, &[1; 10]), Err(Error::HostBounds { offset: 991, bytes: 10, available: 1000 })));
    assert!(block.read(u64::MAX, &mut [0; 2]).is_err());
    let mut back = [0; 10];
    block.read(990, &mut back).unwrap();
    assert_eq!(back, [1; 10]);
    drop(block);
    lab.finish();
}
