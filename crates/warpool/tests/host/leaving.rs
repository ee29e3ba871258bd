//! How it ends: closing gives everything back, dropping calls nobody, and blocks may outlive their allocator.

use std::sync::Arc;

use warpool::Error;
use warpool::memory::PinnedSettings;

use super::lab::{HostLab, KIB, MIB};

#[test]
fn closing_gives_everything_back() {
    let lab = HostLab::new("pinned_reserve_segment_size_mb:4");
    let stream = lab.stream();
    let blocks: Vec<_> = [KIB, 3 * MIB, 9 * MIB, 70 * MIB].map(|bytes| lab.alloc(bytes)).into();
    lab.pause_stream(&stream);
    blocks.iter().for_each(|block| lab.upload(block, &stream));
    assert_eq!(lab.sim.object_counts().pinned, 3);
    drop(blocks);
    // What is still under way is waited for.
    lab.pinned.close().unwrap();
    assert_eq!(lab.sim.object_counts().pinned, 0);
    assert_eq!(lab.sim.paused_work(stream.id()).unwrap(), 0);
    assert_eq!(lab.sim.hazards(), []);
}

#[test]
fn nobody_closes_what_others_have() {
    let lab = HostLab::new("");
    let block = lab.alloc(KIB);
    let (clone, again) = (lab.pinned.clone(), lab.pinned.clone());
    assert_eq!(clone.close(), Err(Error::HostMemoryInUse { handles: 2, blocks: 1 }));
    drop(again);
    let HostLab { sim, pinned, .. } = lab;
    assert_eq!(pinned.close(), Err(Error::HostMemoryInUse { handles: 0, blocks: 1 }));
    // The block is still good.
    block.write(0, &[1; 1024]).unwrap();
    drop(block);
    assert_eq!(sim.object_counts().pinned, 1);
}

/// The handle comes back, and works: first to go on with, then to close.
#[test]
fn a_refused_close_can_be_tried_again() {
    let lab = HostLab::new("pinned_use_background_threads:True");
    let stream = lab.stream();
    let block = lab.alloc(KIB);
    let HostLab { sim, pinned, .. } = lab;
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

/// The books go with the last block, in whatever order things go, and no destructor calls the driver.
#[test]
fn blocks_outlive_their_allocator() {
    let lab = HostLab::new("");
    let stream = lab.stream();
    let [plain, used, freed, marked] = [KIB, 2 * KIB, 3 * KIB, MIB].map(|bytes| lab.alloc(bytes));
    lab.pause_stream(&stream);
    lab.upload(&used, &stream);
    lab.upload(&freed, &stream);
    lab.upload(&marked, &stream);
    lab.free(marked);
    lab.let_go(&stream);
    let HostLab { sim, counting, instance, pinned, .. } = lab;
    counting.reset();
    drop(pinned);
    plain.write(0, &[1; 1024]).unwrap();
    drop(plain);
    drop(used);
    assert_eq!(counting.counts().len(), 1, "only the write");
    // By hand it may call the driver, and has nothing to do.
    freed.free().unwrap();
    drop((stream, instance));
    assert_eq!(Arc::strong_count(&counting), 1, "nobody holds the driver any more");
    assert_eq!(sim.object_counts().pinned, 2, "what was pinned stays");
}

/// A dropped allocator leaves nothing behind but what it had pinned.
#[test]
fn caches_go_with_the_last_handle() {
    let lab = HostLab::new("");
    let stream = lab.stream();
    let used = lab.alloc(KIB);
    used.record_use(&stream).unwrap();
    drop((used, lab.alloc(5 * KIB), lab.alloc(100 * MIB)));
    let HostLab { counting, instance, pinned, .. } = lab;
    counting.reset();
    drop(pinned);
    assert_eq!(counting.counts(), []);
    drop((stream, instance));
    assert_eq!(Arc::strong_count(&counting), 1);
}

#[test]
fn settings_are_kept() {
    let lab = HostLab::new("pinned_cap_mb:5");
    assert_eq!(lab.pinned.settings(), PinnedSettings { cap_bytes: Some(5 * MIB), ..PinnedSettings::default() });
    assert_eq!(*lab.pinned.instance(), lab.instance);
    lab.set("pinned_device_cap_mb:7");
    assert_eq!(lab.pinned.settings().device_cap_bytes, Some(7 * MIB));
    lab.finish();
}
