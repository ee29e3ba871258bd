//! Freed blocks that streams used.

use warpool::Stream;
use warpool::driver::sim::{HazardKind, SimConfig};
use warpool::driver::{Call, Copies as _, ForeignStream, StreamOptions, Streams as _};
use warpool::memory::HostBlock;
use warpool::memory::report::BlockState;

use super::context::{KIB, MIB, TestContext};

/// TestCuda.test_caching_pinned_memory: reuse after a free; no reuse while a copy is pending.
#[test]
fn a_used_block_waits_for_its_stream() {
    let context = TestContext::new("");
    let stream = context.stream();
    let block = context.alloc(KIB);
    let ptr = block.ptr();
    context.pause_stream(&stream);
    block.write(0, &[7; 1024]).unwrap();
    context.upload(&block, &stream);
    context.free(block);
    assert_eq!(context.state_at(ptr), BlockState::ActivePendingFree);
    let other = context.alloc(KIB);
    assert_ne!(other.ptr(), ptr);
    context.finish_stream(&stream);
    let again = context.alloc(KIB);
    assert_eq!(again.ptr(), ptr);
    // The copy has read it: writing now is no hazard.
    again.write(0, &[8; 1024]).unwrap();
    drop((again, other));
    context.finish();
}

/// The fence of a dropped block is recorded by the next call that may call the driver.
#[test]
fn a_dropped_block_waits_for_its_stream() {
    let context = TestContext::new("");
    let stream = context.stream();
    let block = context.alloc(KIB);
    let ptr = block.ptr();
    context.pause_stream(&stream);
    context.upload(&block, &stream);
    context.counting.reset();
    drop(block);
    assert_eq!(context.counting.counts(), []);
    assert_ne!(context.alloc(KIB).ptr(), ptr);
    assert_eq!(context.counting.count(Call::EventRecord).calls, 1);
    context.finish_stream(&stream);
    context.pinned.process_pending().unwrap();
    assert_eq!(context.state_at(ptr), BlockState::Inactive);
    context.finish();
}

#[test]
fn a_paused_stream_delays_only_its_blocks() {
    let context = TestContext::new("");
    let [paused, quick] = [context.stream(), context.stream()];
    context.pause_stream(&paused);
    let blocks: Vec<_> = (0..6).map(|_| context.alloc(300 * KIB)).collect();
    let ptrs: Vec<_> = blocks.iter().map(HostBlock::ptr).collect();
    for (index, block) in blocks.iter().enumerate() {
        context.upload(block, if index % 2 == 0 { &paused } else { &quick });
    }
    // A block used by both waits for both.
    blocks[1].record_use(&paused).unwrap();
    blocks.into_iter().for_each(|block| block.free().unwrap());
    quick.synchronize().unwrap();
    context.pinned.process_pending().unwrap();
    let pending = |context: &TestContext| {
        ptrs.iter().map(|&ptr| context.state_at(ptr) == BlockState::ActivePendingFree).collect::<Vec<_>>()
    };
    assert_eq!(pending(&context), [true, true, true, false, true, false]);
    assert_eq!(context.stats().active_requests.current, 4);
    // Free blocks serve requests, pending ones do not.
    let pinned = context.pinned_bytes();
    let [one, two] = [context.alloc(300 * KIB), context.alloc(300 * KIB)];
    assert_eq!(std::collections::BTreeSet::from([one.ptr(), two.ptr()]), [ptrs[3], ptrs[5]].into());
    assert_eq!(context.pinned_bytes(), pinned);
    drop((one, two));
    context.finish_stream(&paused);
    context.pinned.process_pending().unwrap();
    assert_eq!(pending(&context), [false; 6]);
    context.finish();
}

#[test]
fn uses_are_recorded_by_address() {
    let context = TestContext::new("");
    let stream = context.stream();
    let block = context.alloc(KIB);
    let ptr = block.ptr();
    context.pause_stream(&stream);
    context.sim.copy(context.device_bytes(&[0; 8]).into(), ptr.into(), 8, stream.id()).unwrap();
    assert!(context.pinned.record_use_at(ptr, &stream).unwrap());
    for unknown in [ptr.offset(512), ptr.offset(1024), warpool::driver::HostPtr(0), warpool::driver::HostPtr(u64::MAX)]
    {
        assert!(!context.pinned.record_use_at(unknown, &stream).unwrap(), "{unknown}");
    }
    context.free(block);
    assert!(!context.pinned.record_use_at(ptr, &stream).unwrap(), "it is not allocated");
    assert_eq!(context.state_at(ptr), BlockState::ActivePendingFree);
    context.finish_stream(&stream);
    context.finish();
}

#[test]
fn a_destroyed_stream_is_waited_for() {
    let context = TestContext::new("");
    let id = context.sim.stream_create(context.device().id(), StreamOptions::default()).unwrap();
    // SAFETY: the stream is destroyed through the same driver, which refuses its handle afterwards.
    let foreign = unsafe { ForeignStream::new(context.sim.stream_handle(id).unwrap().raw) };
    let stream = Stream::external(&context.device(), foreign).unwrap();
    let block = context.alloc(KIB);
    let ptr = block.ptr();
    context.upload(&block, &stream);
    drop(block);
    context.sim.stream_destroy(stream.id()).unwrap();
    context.pinned.process_pending().unwrap();
    assert_eq!(context.state_at(ptr), BlockState::Inactive);
    // Only the query of the destroyed stream is reported.
    assert!(context.sim.hazards().iter().all(|hazard| hazard.kind == HazardKind::UseAfterDestroy));
    context.sim.clear_hazards();
    let again = context.alloc(KIB);
    again.write(0, &[1; 1024]).unwrap();
    drop(again);
    context.finish();
}

/// Each stream is fenced with an event of its own device.
#[test]
fn a_block_waits_for_streams_of_all_devices() {
    let context = TestContext::on(SimConfig::default().with_devices(2), "");
    let streams = [0, 1].map(|index| context.instance.device(index).unwrap().pool_stream().unwrap());
    let block = context.alloc(MIB);
    let ptr = block.ptr();
    for stream in &streams {
        context.pause_stream(stream);
        context.upload(&block, stream);
    }
    context.free(block);
    for (stream, state) in streams.iter().zip([BlockState::ActivePendingFree, BlockState::Inactive]) {
        context.finish_stream(stream);
        context.pinned.process_pending().unwrap();
        assert_eq!(context.state_at(ptr), state);
    }
    context.finish();
}

#[test]
fn a_background_thread_reclaims_pending_blocks() {
    let context = TestContext::new("pinned_use_background_threads:True");
    let stream = context.stream();
    for _ in 0..3 {
        let block = context.alloc(KIB);
        let ptr = block.ptr();
        context.pause_stream(&stream);
        context.upload(&block, &stream);
        drop(block);
        context.finish_stream(&stream);
        while context.state_at(ptr) != BlockState::Inactive {
            std::thread::yield_now();
        }
    }
    context.set("");
    context.finish();
}

/// The thread keeps nothing alive.
#[test]
fn a_background_thread_ends_with_the_allocator() {
    let context = TestContext::new("pinned_use_background_threads:True");
    let stream = context.stream();
    let block = context.alloc(KIB);
    context.pause_stream(&stream);
    context.upload(&block, &stream);
    drop(block);
    let TestContext { sim, counting, instance, pinned, .. } = context;
    drop((pinned, stream, instance));
    // The thread may hold the last other reference to the driver.
    while std::sync::Arc::strong_count(&counting) > 1 {
        std::thread::yield_now();
    }
    assert_eq!(sim.object_counts().pinned, 1, "destructors do not unpin");
}
