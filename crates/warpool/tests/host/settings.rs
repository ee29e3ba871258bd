//! The effect of each setting.

use warpool::driver::decorate::{FaultPlan, Faulty};
use warpool::driver::sim::SimConfig;
use warpool::driver::{Call, Devices as _, ErrorCode};
use warpool::memory::{HostAllocator, PinnedSettings, Settings};
use warpool::{Error, Instance};

use super::context::{KIB, MIB, TestContext};

#[test]
fn sizes_above_the_threshold_are_not_rounded() {
    let context = TestContext::new("pinned_max_round_threshold_mb:0");
    let block = context.alloc(100_001);
    assert_eq!((block.bytes(), block.bytes_usable()), (100_001, 100_352));
    // A cached block serves requests of its own size only.
    let ptr = block.ptr();
    drop(block);
    assert_ne!(context.alloc(100_353).ptr(), ptr);
    let smaller = context.alloc(99_000);
    assert_eq!(smaller.bytes_usable(), 99_328);
    drop(smaller);
    assert_eq!(context.alloc(100_352).ptr(), ptr);
    context.set("");
    assert_eq!(context.alloc(100_001).bytes_usable(), 104 * KIB);
    context.finish();
}

#[test]
fn blocks_above_the_limit_are_not_kept() {
    let context = TestContext::new("pinned_max_cached_size_mb:4");
    let [small, large] = [context.alloc(4 * MIB), context.alloc(4 * MIB + 1)];
    context.free(small);
    assert_eq!(context.pinned_bytes(), 8 * MIB + 4 * KIB);
    context.free(large);
    assert_eq!((context.pinned_bytes(), context.stats().num_host_free), (4 * MIB, 1));
    // A dropped block is unpinned by the next call that may call the driver; a used one when its fence has passed.
    let stream = context.stream();
    let [dropped, used] = [context.alloc(5 * MIB), context.alloc(6 * MIB)];
    context.pause_stream(&stream);
    context.upload(&used, &stream);
    drop(dropped);
    context.free(used);
    assert_eq!(context.pinned_bytes(), 10 * MIB);
    context.finish_stream(&stream);
    context.pinned.process_pending().unwrap();
    assert_eq!(context.pinned_bytes(), 4 * MIB);
    context.finish();
}

#[test]
fn the_reserve_serves_all_sizes_and_stays_pinned() {
    let context = TestContext::new("pinned_reserve_segment_size_mb:16");
    assert_eq!(context.pinned_bytes(), 0, "not before the first use");
    let blocks = [512, 100 * KIB, 3 * MIB, 10 * MIB].map(|bytes| context.alloc(bytes));
    assert_eq!((context.pinned_bytes(), context.stats().num_host_alloc), (16 * MIB, 1));
    let beyond = context.alloc(4 * MIB);
    assert_eq!(context.pinned_bytes(), 20 * MIB);
    drop((blocks, beyond));
    assert_eq!((context.trim(0), context.pinned_bytes()), (4 * MIB, 16 * MIB));
    let whole = context.alloc(16 * MIB);
    assert_eq!(context.pinned_bytes(), 16 * MIB);
    drop(whole);
    context.finish();
}

#[test]
fn the_reserve_stays_pinned_when_its_blocks_are_not_kept() {
    let context = TestContext::new("pinned_reserve_segment_size_mb:16,pinned_max_cached_size_mb:4");
    for _ in 0..2 {
        context.free(context.alloc(8 * MIB));
        drop(context.alloc(8 * MIB));
        context.pinned.process_pending().unwrap();
        assert_eq!((context.pinned_bytes(), context.stats().num_host_free), (16 * MIB, 0));
    }
    context.finish();
}

#[test]
fn the_reserve_follows_the_settings_and_is_pinned_once() {
    let context = TestContext::new("pinned_reserve_segment_size_mb:16");
    context.set("");
    drop(context.alloc(KIB));
    assert_eq!((context.pinned_bytes(), context.stats().num_host_alloc), (2 * MIB, 1));
    context.set("pinned_reserve_segment_size_mb:16");
    drop(context.alloc(3 * MIB));
    assert_eq!(context.pinned_bytes(), 18 * MIB);
    context.set("");
    context.set("pinned_reserve_segment_size_mb:16");
    drop(context.alloc(20 * MIB));
    assert_eq!(context.pinned_bytes(), 38 * MIB);
    context.finish();
    // A reserved segment that cannot be pinned is only a warning, and the request is served.
    let context = TestContext::new("");
    context.pinned.set_settings(PinnedSettings { reserve_segment_bytes: u64::MAX, ..PinnedSettings::default() });
    drop(context.alloc(KIB));
    assert_eq!(context.pinned_bytes(), 2 * MIB);
    context.finish();
}

/// The result includes segments that are not to be kept.
#[test]
fn trim_returns_the_unpinned_bytes_and_calls_its_hooks_first() {
    let context = TestContext::new("pinned_max_cached_size_mb:4");
    let (send, received) = std::sync::mpsc::channel();
    context.pinned.observers().attach_trim_hook(std::sync::Arc::new(move |device| send.send(device.0).unwrap()));
    drop((context.alloc(5 * MIB), context.alloc(3 * MIB)));
    assert_eq!((context.trim(4 * MIB), context.pinned_bytes()), (5 * MIB, 3 * MIB));
    drop(context.alloc(5 * MIB));
    assert_eq!((context.trim(0), context.pinned_bytes()), (8 * MIB, 0));
    assert_eq!(received.try_iter().collect::<Vec<_>>(), [u32::MAX; 2]);
    context.finish();
}

#[test]
fn a_reserve_above_the_cap_is_not_pinned() {
    let context = TestContext::new("pinned_reserve_segment_size_mb:16,pinned_cap_mb:8");
    let block = context.alloc(MIB);
    assert_eq!(context.pinned_bytes(), MIB);
    drop(block);
    context.finish();
}

/// An allocator over a driver whose first call of that kind fails.
fn failing(call: Call, settings: &str) -> (Instance, HostAllocator) {
    let plan = FaultPlan::default().fail_nth(call, 1, ErrorCode::OutOfMemory);
    let sim = std::sync::Arc::new(warpool::driver::sim::SimDriver::new(SimConfig::default()));
    let instance = Instance::new(std::sync::Arc::new(Faulty::new(sim, plan))).unwrap();
    let pinned = HostAllocator::new(&instance, Settings::parse(settings).unwrap().pinned);
    (instance, pinned)
}

#[test]
fn errors_of_a_free_are_ignored_if_set() {
    for (settings, ignored) in [("", false), ("pinned_free_catch_all:True", true)] {
        let (instance, pinned) = failing(Call::EventRecord, settings);
        let stream = instance.device(0).unwrap().pool_stream().unwrap();
        let block = pinned.allocate(KIB).unwrap();
        block.record_use(&stream).unwrap();
        let outcome = block.free();
        assert_eq!(outcome.is_ok(), ignored, "{outcome:?}");
        assert_eq!(pinned.stats().active_requests.current, 1, "the fence is retried");
        pinned.process_pending().unwrap();
        stream.synchronize().unwrap();
        pinned.process_pending().unwrap();
        assert_eq!(pinned.stats().active_requests.current, 0);
        pinned.close().unwrap();
    }
}

#[test]
fn memory_is_pinned_with_an_existing_context() {
    let active = |context: &TestContext| {
        [0, 1, 2].map(|index| context.sim.context_is_active(warpool::driver::DeviceId(index)).unwrap())
    };
    let context = TestContext::on(SimConfig::default().with_devices(3), "");
    context.instance.device(2).unwrap().pool_stream().unwrap();
    assert_eq!(active(&context), [false, false, true]);
    let any = context.alloc(MIB);
    let of_first = context.pinned.allocate_for(2 * MIB, &context.device()).unwrap();
    assert_eq!(active(&context), [false, false, true]);
    assert_eq!(context.stats().pinned_bytes_by_device, [2 * MIB, 0, MIB]);
    drop((any, of_first));
    context.finish();

    // If no device has a context, the current device creates one.
    let context = TestContext::on(SimConfig::default().with_devices(3), "");
    let _current = context.instance.device(1).unwrap().enter();
    drop(context.alloc(MIB));
    assert_eq!(active(&context), [false, true, false]);
    context.finish();
}

#[test]
fn empty_and_impossible_requests() {
    let context = TestContext::new("");
    let empty = context.alloc(0);
    assert_eq!((empty.ptr().0, empty.bytes(), empty.bytes_usable()), (0, 0, 0));
    empty.record_use(&context.stream()).unwrap();
    empty.write(0, &[]).unwrap();
    assert!(matches!(empty.read(0, &mut [0]), Err(Error::HostBounds { offset: 0, bytes: 1, available: 0 })));
    context.free(empty);
    assert!(matches!(context.pinned.allocate(u64::MAX), Err(Error::PinnedRequestTooLarge { bytes: u64::MAX })));
    let block = context.alloc(1000);
    block.write(990, &[1; 10]).unwrap();
    assert!(matches!(block.write(991, &[1; 10]), Err(Error::HostBounds { offset: 991, bytes: 10, available: 1000 })));
    assert!(block.read(u64::MAX, &mut [0; 2]).is_err());
    let mut read = [0; 10];
    block.read(990, &mut read).unwrap();
    assert_eq!(read, [1; 10]);
    drop(block);
    context.finish();
}
