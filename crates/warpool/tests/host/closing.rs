//! The end of an allocator: closing unpins everything, dropping makes no driver call, and blocks may outlive it.

use std::sync::Arc;

use warpool::driver::decorate::{FaultPlan, Faulty};
use warpool::driver::sim::{SimConfig, SimDriver};
use warpool::driver::{Call, ErrorCode};
use warpool::memory::{HostAllocator, PinnedSettings};
use warpool::{Error, Instance};

use super::context::{KIB, MIB, TestContext};

#[test]
fn closing_unpins_everything() {
    let context = TestContext::new("pinned_reserve_segment_size_mb:4");
    let stream = context.stream();
    let blocks: Vec<_> = [KIB, 3 * MIB, 9 * MIB, 70 * MIB].map(|bytes| context.alloc(bytes)).into();
    context.pause_stream(&stream);
    blocks.iter().for_each(|block| context.upload(block, &stream));
    assert_eq!(context.sim.object_counts().pinned, 3);
    drop(blocks);
    // Closing waits for pending work.
    context.pinned.close().unwrap();
    assert_eq!(context.sim.object_counts().pinned, 0);
    assert_eq!(context.sim.paused_work(stream.id()).unwrap(), 0);
    assert_eq!(context.sim.hazards(), []);
}

#[test]
fn closing_fails_while_blocks_or_handles_are_left() {
    let context = TestContext::new("");
    let block = context.alloc(KIB);
    let (clone, again) = (context.pinned.clone(), context.pinned.clone());
    assert_eq!(clone.close(), Err(Error::HostMemoryInUse { handles: 2, blocks: 1 }));
    drop(again);
    let TestContext { sim, pinned, .. } = context;
    assert_eq!(pinned.close(), Err(Error::HostMemoryInUse { handles: 0, blocks: 1 }));
    // The block is still valid.
    block.write(0, &[1; 1024]).unwrap();
    drop(block);
    assert_eq!(sim.object_counts().pinned, 1);
}

/// The returned handle works, and can be closed later.
#[test]
fn a_failed_close_can_be_retried() {
    let context = TestContext::new("pinned_use_background_threads:True");
    let stream = context.stream();
    let block = context.alloc(KIB);
    let TestContext { sim, pinned, .. } = context;
    let (clone, error) = pinned.clone().try_close().unwrap_err();
    assert_eq!(error, Error::HostMemoryInUse { handles: 1, blocks: 1 });
    drop(clone);
    let (pinned, error) = pinned.try_close().unwrap_err();
    assert_eq!(error, Error::HostMemoryInUse { handles: 0, blocks: 1 });
    let other = pinned.allocate(3 * MIB).unwrap();
    other.record_use(&stream).unwrap();
    drop((block, other));
    pinned.try_close().unwrap();
    assert_eq!(sim.object_counts().pinned, 0);
}

/// The state is dropped with the last block, in any order, and destructors make no driver call.
#[test]
fn blocks_outlive_their_allocator() {
    let context = TestContext::new("");
    let stream = context.stream();
    let [plain, used, freed, fenced] = [KIB, 2 * KIB, 3 * KIB, MIB].map(|bytes| context.alloc(bytes));
    context.pause_stream(&stream);
    context.upload(&used, &stream);
    context.upload(&freed, &stream);
    context.upload(&fenced, &stream);
    context.free(fenced);
    context.finish_stream(&stream);
    let TestContext { sim, counting, instance, pinned, .. } = context;
    counting.reset();
    drop(pinned);
    plain.write(0, &[1; 1024]).unwrap();
    drop(plain);
    drop(used);
    assert_eq!(counting.counts().len(), 1, "only the write");
    // It may call the driver, but there is nothing to do.
    freed.free().unwrap();
    drop((stream, instance));
    assert_eq!(Arc::strong_count(&counting), 1, "no reference to the driver is left");
    assert_eq!(sim.object_counts().pinned, 2, "pinned memory stays pinned");
}

#[test]
fn caches_are_dropped_with_the_last_handle() {
    let context = TestContext::new("");
    let stream = context.stream();
    let used = context.alloc(KIB);
    used.record_use(&stream).unwrap();
    drop((used, context.alloc(5 * KIB), context.alloc(100 * MIB)));
    let TestContext { counting, instance, pinned, .. } = context;
    counting.reset();
    drop(pinned);
    assert_eq!(counting.counts(), []);
    drop((stream, instance));
    assert_eq!(Arc::strong_count(&counting), 1);
}

#[test]
fn settings_can_be_read_back() {
    let context = TestContext::new("pinned_cap_mb:5");
    assert_eq!(context.pinned.settings(), PinnedSettings { cap_bytes: Some(5 * MIB), ..PinnedSettings::default() });
    assert_eq!(*context.pinned.instance(), context.instance);
    context.set("pinned_device_cap_mb:7");
    assert_eq!(context.pinned.settings().device_cap_bytes, Some(7 * MIB));
    context.finish();
}

/// Issue 12: memory whose pinning failed after the driver had pinned it, and which could not be unpinned at once, was
/// forgotten, and closing reported success.
#[test]
fn memory_that_could_not_be_unpinned_after_a_failed_request_is_not_forgotten() {
    for register in [false, true] {
        let sim = Arc::new(SimDriver::new(SimConfig::default()));
        let faulty = Arc::new(Faulty::new(sim.clone(), FaultPlan::new()));
        let instance = Instance::new(faulty.clone()).unwrap();
        let settings =
            PinnedSettings { use_cuda_host_register: register, cap_bytes: Some(8 * MIB), ..PinnedSettings::default() };
        let pinned = HostAllocator::new(&instance, settings);
        let unpin = if register { Call::HostUnregister } else { Call::HostFree };
        let no_unpinning = || FaultPlan::new().fail_fraction(&[unpin], 1.0, 0, ErrorCode::Unknown(1));
        faulty.set_plan(no_unpinning().fail_nth(Call::HostDevicePtr, 1, ErrorCode::Unknown(2)));
        assert!(pinned.allocate(5 * MIB).is_err());
        assert_eq!(sim.object_counts().pinned, 1);
        pinned.check();
        // It counts against the cap, and is not used.
        faulty.set_plan(no_unpinning());
        let code = |error: &Error| error.driver().map(|error| error.code);
        assert_eq!(pinned.allocate(5 * MIB).map_err(|error| code(&error)).unwrap_err(), Some(ErrorCode::Unknown(1)));
        assert_eq!(sim.object_counts().pinned, 1);
        let (pinned, error) = pinned.try_close().expect_err("it cannot be unpinned yet");
        assert_eq!(code(&error), Some(ErrorCode::Unknown(1)));
        assert_eq!(sim.object_counts().pinned, 1);
        faulty.set_plan(FaultPlan::new());
        drop(pinned.allocate(5 * MIB).expect("the next request unpins it"));
        assert_eq!((sim.object_counts().pinned, pinned.stats().allocated_bytes.current), (1, 5 * MIB));
        faulty.set_plan(no_unpinning().fail_nth(Call::HostDevicePtr, 1, ErrorCode::Unknown(2)));
        assert!(pinned.allocate(KIB).is_err());
        faulty.set_plan(FaultPlan::new());
        pinned.close().unwrap();
        assert_eq!(sim.object_counts().pinned, 0);
    }
}
