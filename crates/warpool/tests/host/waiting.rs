//! Blocks that streams used: who waits for what, and for how long.

use warpool::Stream;
use warpool::driver::sim::{HazardKind, SimConfig};
use warpool::driver::{Call, Copies as _, ForeignStream, StreamOptions, Streams as _};
use warpool::memory::{BlockState, HostBlock};

use super::lab::{HostLab, KIB, MIB};

/// TestCuda.test_caching_pinned_memory: reuse after a free; no reuse while a copy is pending.
#[test]
fn a_used_block_waits_for_its_stream() {
    let lab = HostLab::new("");
    let stream = lab.stream();
    let block = lab.alloc(KIB);
    let ptr = block.ptr();
    lab.pause_stream(&stream);
    block.write(0, &[7; 1024]).unwrap();
    lab.upload(&block, &stream);
    lab.free(block);
    assert_eq!(lab.state_at(ptr), BlockState::ActivePendingFree);
    let other = lab.alloc(KIB);
    assert_ne!(other.ptr(), ptr);
    lab.let_go(&stream);
    let again = lab.alloc(KIB);
    assert_eq!(again.ptr(), ptr);
    // The copy read it before: writing now is no hazard.
    again.write(0, &[8; 1024]).unwrap();
    drop((again, other));
    lab.finish();
}

/// The same of a block that is dropped: the mark is put by the next call that may.
#[test]
fn a_dropped_block_waits_too() {
    let lab = HostLab::new("");
    let stream = lab.stream();
    let block = lab.alloc(KIB);
    let ptr = block.ptr();
    lab.pause_stream(&stream);
    lab.upload(&block, &stream);
    lab.counting.reset();
    drop(block);
    assert_eq!(lab.counting.counts(), []);
    assert_ne!(lab.alloc(KIB).ptr(), ptr);
    assert_eq!(lab.counting.count(Call::EventRecord).calls, 1);
    lab.let_go(&stream);
    lab.pinned.process_pending().unwrap();
    assert_eq!(lab.state_at(ptr), BlockState::Inactive);
    lab.finish();
}

/// A stream that is stuck holds back the blocks that it used, and no others.
#[test]
fn one_stuck_stream_holds_back_only_its_blocks() {
    let lab = HostLab::new("");
    let [stuck, quick] = [lab.stream(), lab.stream()];
    lab.pause_stream(&stuck);
    let blocks: Vec<_> = (0..6).map(|_| lab.alloc(300 * KIB)).collect();
    let ptrs: Vec<_> = blocks.iter().map(HostBlock::ptr).collect();
    for (index, block) in blocks.iter().enumerate() {
        lab.upload(block, if index % 2 == 0 { &stuck } else { &quick });
    }
    // One used by both waits for both.
    blocks[1].record_use(&stuck).unwrap();
    blocks.into_iter().for_each(|block| block.free().unwrap());
    quick.synchronize().unwrap();
    lab.pinned.process_pending().unwrap();
    let waiting =
        |lab: &HostLab| ptrs.iter().map(|&ptr| lab.state_at(ptr) == BlockState::ActivePendingFree).collect::<Vec<_>>();
    assert_eq!(waiting(&lab), [true, true, true, false, true, false]);
    assert_eq!(lab.stats().active_requests.current, 4);
    // What is free serves requests; what waits does not, and nothing more is pinned for the rest.
    let pinned = lab.pinned_bytes();
    let [one, two] = [lab.alloc(300 * KIB), lab.alloc(300 * KIB)];
    assert_eq!(std::collections::BTreeSet::from([one.ptr(), two.ptr()]), [ptrs[3], ptrs[5]].into());
    assert_eq!(lab.pinned_bytes(), pinned);
    drop((one, two));
    lab.let_go(&stuck);
    lab.pinned.process_pending().unwrap();
    assert_eq!(waiting(&lab), [false; 6]);
    lab.finish();
}

#[test]
fn uses_are_recorded_by_address_too() {
    let lab = HostLab::new("");
    let stream = lab.stream();
    let block = lab.alloc(KIB);
    let ptr = block.ptr();
    lab.pause_stream(&stream);
    lab.sim.copy(lab.device_bytes(&[0; 8]).into(), ptr.into(), 8, stream.id()).unwrap();
    assert!(lab.pinned.record_use_at(ptr, &stream).unwrap());
    for unknown in [ptr.offset(512), ptr.offset(1024), warpool::driver::HostPtr(0), warpool::driver::HostPtr(u64::MAX)]
    {
        assert!(!lab.pinned.record_use_at(unknown, &stream).unwrap(), "{unknown}");
    }
    lab.free(block);
    assert!(!lab.pinned.record_use_at(ptr, &stream).unwrap(), "nobody has it");
    assert_eq!(lab.state_at(ptr), BlockState::ActivePendingFree);
    lab.let_go(&stream);
    lab.finish();
}

#[test]
fn a_stream_that_is_gone_is_waited_for() {
    let lab = HostLab::new("");
    let id = lab.sim.stream_create(lab.device().id(), StreamOptions::default()).unwrap();
    // SAFETY: the stream is destroyed through the driver itself, which then knows.
    let foreign = unsafe { ForeignStream::new(lab.sim.stream_handle(id).unwrap().raw) };
    let stream = Stream::external(&lab.device(), foreign).unwrap();
    let block = lab.alloc(KIB);
    let ptr = block.ptr();
    lab.upload(&block, &stream);
    drop(block);
    lab.sim.stream_destroy(stream.id()).unwrap();
    lab.pinned.process_pending().unwrap();
    assert_eq!(lab.state_at(ptr), BlockState::Inactive);
    // That we asked is all there is to complain about.
    assert!(lab.sim.hazards().iter().all(|hazard| hazard.kind == HazardKind::UseAfterDestroy));
    lab.sim.clear_hazards();
    let again = lab.alloc(KIB);
    again.write(0, &[1; 1024]).unwrap();
    drop(again);
    lab.finish();
}

/// Streams of several devices, each marked with an event of its own device.
#[test]
fn streams_of_all_devices_count() {
    let lab = HostLab::on(SimConfig::default().with_devices(2), "");
    let streams = [0, 1].map(|index| lab.instance.device(index).unwrap().pool_stream().unwrap());
    let block = lab.alloc(MIB);
    let ptr = block.ptr();
    for stream in &streams {
        lab.pause_stream(stream);
        lab.upload(&block, stream);
    }
    lab.free(block);
    for (stream, state) in streams.iter().zip([BlockState::ActivePendingFree, BlockState::Inactive]) {
        lab.let_go(stream);
        lab.pinned.process_pending().unwrap();
        assert_eq!(lab.state_at(ptr), state);
    }
    lab.finish();
}

/// With a thread of its own, what waited is free again without any call.
#[test]
fn a_background_thread_looks_after_streams() {
    let lab = HostLab::new("pinned_use_background_threads:True");
    let stream = lab.stream();
    for _ in 0..3 {
        let block = lab.alloc(KIB);
        let ptr = block.ptr();
        lab.pause_stream(&stream);
        lab.upload(&block, &stream);
        drop(block);
        lab.let_go(&stream);
        while lab.state_at(ptr) != BlockState::Inactive {
            std::thread::yield_now();
        }
    }
    lab.set("");
    lab.finish();
}

/// The thread keeps nothing alive: with the last handle everything goes but what was pinned.
#[test]
fn a_background_thread_ends_with_the_allocator() {
    let lab = HostLab::new("pinned_use_background_threads:True");
    let stream = lab.stream();
    let block = lab.alloc(KIB);
    lab.pause_stream(&stream);
    lab.upload(&block, &stream);
    drop(block);
    let HostLab { sim, counting, instance, pinned, .. } = lab;
    drop((pinned, stream, instance));
    // Whoever holds the driver beside us is gone once the thread is.
    while std::sync::Arc::strong_count(&counting) > 1 {
        std::thread::yield_now();
    }
    assert_eq!(sim.object_counts().pinned, 1, "no destructor unpins");
}
