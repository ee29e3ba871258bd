//! Elastic memory of a tag: it sleeps and wakes with the rest, all or none, and its pages serve others meanwhile.

use std::sync::Arc;

use warpool_driver::sim::SimConfig;
use warpool_driver::{Copies as _, Devices as _, Pattern};

use super::machine::{DEVICE, Kind, MIB, Machine};
use crate::error::SleepShortage;
use crate::memory::elastic::{ElasticLayout, ElasticMemory};
use crate::memory::sleep::Keep;
use crate::memory::{MemPoolId, PinnedSettings};
use crate::typed::ElasticVec;
use crate::{Error, Result, Stream};

/// Two rows of 20 blocks.
const LAYOUT: ElasticLayout = ElasticLayout { rows: 2, blocks: 20, block_bytes: MIB };

struct Scene {
    machine: Machine,
    cache: Arc<ElasticMemory>,
    stream: Stream,
}

impl Scene {
    /// A range of the tag `kv`, of which blocks 2 to 12 and 15 are committed and contain their number.
    fn new(capacity: u64, pinned: PinnedSettings) -> Result<Self> {
        let machine = Machine::with(Kind::Paged, SimConfig::default(), capacity, pinned);
        let stream = machine.streams[0].clone();
        let cache = machine.tag("kv").elastic(LAYOUT, &stream)?;
        cache.commit(2..12, &stream)?;
        cache.commit(15..16, &stream)?;
        let scene = Self { machine, cache, stream };
        scene.each(|block, ptr, bytes| scene.machine.write_at(ptr, bytes, block, 0));
        Ok(scene)
    }

    fn each(&self, act: impl Fn(u32, warpool_driver::DevicePtr, u64)) {
        for run in self.cache.committed_blocks() {
            for block in run {
                for (ptr, bytes) in self.cache.pieces(&(block..block + 1)) {
                    act(u32::try_from(block).unwrap(), warpool_driver::DevicePtr(ptr), bytes);
                }
            }
        }
    }

    /// The contents are there, or zeroes.
    fn expect(&self, keep: Keep) {
        assert_eq!(self.cache.committed_blocks(), [2..12, 15..16]);
        let value = |block| if keep == Keep::Host { block } else { 0 };
        self.each(|block, ptr, bytes| self.machine.expect_at(ptr, bytes, value(block), 0));
        assert_eq!(self.machine.defect(), None);
    }

    fn finish(self) {
        drop(self.cache);
        assert_eq!(self.machine.finish(), None);
    }
}

#[test]
fn it_sleeps_without_memory_and_wakes_with_its_contents() -> Result<()> {
    for keep in [Keep::Host, Keep::Discard] {
        let scene = Scene::new(200 * MIB, PinnedSettings::default())?;
        let Scene { machine, cache, stream } = &scene;
        let info = machine.tag("kv").info();
        assert_eq!((info.bytes, info.bytes_device, info.bytes_host), (22 * MIB, 22 * MIB, 0));
        if keep == Keep::Host {
            assert_eq!(machine.tags.prepare(&["kv"])?, 22 * MIB);
        }
        let report = machine.sleep(&["kv"], keep)?;
        let copied = if keep == Keep::Host { 22 * MIB } else { 0 };
        assert_eq!((report.bytes_copied, machine.reserved()), (copied, 0));
        assert!(report.bytes_device >= 22 * MIB);
        let info = machine.tag("kv").info();
        assert_eq!((info.bytes, info.bytes_device, info.bytes_host), (22 * MIB, 0, copied));
        // Others have the memory meanwhile; the range refuses changes.
        let other = machine.untagged(150 * MIB, 1)?;
        machine.write(&other, 77, 1);
        let asleep = Err(Error::TagAsleep { tag: "kv".into() });
        assert_eq!((cache.commit(0..1, stream), cache.decommit(0..1, stream)), (asleep.clone(), asleep));
        assert!(machine.tag("kv").elastic(LAYOUT, stream).is_err());
        machine.allocator.free(other)?;
        assert_eq!(machine.wake(&["kv"])?.bytes_copied, copied);
        scene.expect(keep);
        cache.commit(0..20, stream)?;
        cache.decommit(0..2, stream)?;
        cache.decommit(12..15, stream)?;
        cache.decommit(16..20, stream)?;
        scene.expect(keep);
        scene.finish();
    }
    Ok(())
}

/// Blocks of three bytes: neither their addresses nor their sizes are multiples of a word.
#[test]
fn blocks_of_odd_sizes_sleep() -> Result<()> {
    for keep in [Keep::Host, Keep::Discard] {
        let machine = Machine::new(Kind::Paged, 200 * MIB);
        let stream = &machine.streams[0];
        let layout = ElasticLayout { rows: 2, blocks: 7, block_bytes: 3 };
        let cache = machine.tag("kv").elastic(layout, stream)?;
        cache.commit(1..4, stream)?;
        let bytes = |value: [u8; 9]| {
            let mut read = [0; 9];
            machine.sim.device_synchronize(DEVICE)?;
            machine.sim.download(DEVICE, cache.ptr().offset(24), &mut read)?;
            assert_eq!(read, value, "blocks 1 to 3 of the second row");
            Ok::<(), Error>(())
        };
        machine.sim.fill(cache.ptr().offset(24), Pattern::U8(9), 9, stream.id())?;
        bytes([9; 9])?;
        machine.sleep(&["kv"], keep)?;
        machine.wake(&["kv"])?;
        bytes([if keep == Keep::Host { 9 } else { 0 }; 9])?;
        drop(cache);
        assert_eq!(machine.finish(), None);
    }
    Ok(())
}

#[test]
fn contents_may_be_dropped_while_it_sleeps() -> Result<()> {
    let scene = Scene::new(200 * MIB, PinnedSettings::default())?;
    scene.machine.sleep(&["kv"], Keep::Host)?;
    scene.machine.sleep(&["kv"], Keep::Discard)?;
    assert_eq!((scene.machine.tag("kv").info().bytes_host, scene.machine.pinned()), (0, 0));
    scene.machine.wake(&["kv"])?;
    scene.expect(Keep::Discard);
    scene.finish();
    Ok(())
}

/// Neither the range nor the other memory of the tag changes.
#[test]
fn too_little_memory_for_one_part_leaves_all_asleep() -> Result<()> {
    let scene = Scene::new(100 * MIB, PinnedSettings::default())?;
    let machine = &scene.machine;
    let weights = machine.allocate("kv", 40 * MIB, 0)?;
    machine.write(&weights, 5, 0);
    machine.sleep(&["kv"], Keep::Host)?;
    let pinned = machine.pinned();
    for bytes in [90, 50] {
        // First there is too little for either, then for the second.
        let other = machine.untagged(bytes * MIB, 1)?;
        let Err(Error::Sleep(failure)) = machine.wake(&["kv"]) else { panic!("it does not fit") };
        assert!(matches!(failure.shortage, SleepShortage::DeviceMemory { .. }) && failure.is_undone, "{failure}");
        assert!(machine.is_asleep("kv") && scene.cache.committed() == 0);
        assert_eq!(machine.pinned(), pinned, "the host has the contents");
        machine.allocator.free(other)?;
        machine.allocator.trim(DEVICE, MemPoolId::DEFAULT)?;
    }
    machine.wake(&["kv"])?;
    machine.expect(&weights, 5, 0);
    scene.expect(Keep::Host);
    machine.allocator.free(weights)?;
    scene.finish();
    Ok(())
}

#[test]
fn too_little_pinned_memory_leaves_all_awake() -> Result<()> {
    let scene = Scene::new(200 * MIB, PinnedSettings { cap_bytes: Some(40 * MIB), ..PinnedSettings::default() })?;
    let machine = &scene.machine;
    for mib in [30, 20] {
        // The second is not even enough for the range.
        let weights = machine.allocate("kv", mib * MIB, 0)?;
        machine.write(&weights, 5, 0);
        let taken = (mib == 20).then(|| machine.host.allocate(30 * MIB)).transpose()?;
        let Err(Error::Sleep(failure)) = machine.sleep(&["kv"], Keep::Host) else { panic!("over the cap") };
        assert!(matches!(failure.shortage, SleepShortage::PinnedMemory { .. }) && failure.is_undone, "{failure}");
        assert!(!machine.is_asleep("kv"));
        machine.expect(&weights, 5, 0);
        scene.expect(Keep::Host);
        scene.cache.commit(12..13, &scene.stream)?;
        scene.cache.decommit(12..13, &scene.stream)?;
        drop(taken);
        machine.allocator.free(weights)?;
    }
    scene.finish();
    Ok(())
}

#[test]
fn a_typed_vector_of_a_tag_refuses_work_asleep() -> Result<()> {
    let machine = Machine::new(Kind::Paged, 200 * MIB);
    let stream = &machine.streams[0];
    let mut cache = ElasticVec::<u32>::tagged(&machine.tag("kv"), 10, 1 << 18, stream)?;
    cache.commit(0..4, stream)?;
    stream.fill(cache.block_mut(3)?, 6)?;
    machine.sleep(&["kv"], Keep::Host)?;
    assert!(matches!(cache.block(3), Err(Error::Buffer(_))), "it is not committed");
    assert!(cache.commit(4..5, stream).is_err_and(|error| error.is_asleep()));
    machine.wake(&["kv"])?;
    assert_eq!(stream.to_vec(cache.block(3)?)?, vec![6; 1 << 18]);
    drop(cache);
    assert_eq!(machine.finish(), None);
    Ok(())
}

#[test]
fn what_is_dropped_asleep_leaves_nothing() -> Result<()> {
    let scene = Scene::new(200 * MIB, PinnedSettings::default())?;
    scene.machine.sleep(&["kv"], Keep::Host)?;
    assert!(scene.machine.pinned() > 0 && scene.machine.device.instance().has_asleep());
    drop(scene.cache);
    let info = scene.machine.tag("kv").info();
    assert_eq!((info.bytes, info.bytes_host, scene.machine.pinned()), (0, 0, 0));
    scene.machine.wake(&["kv"])?;
    assert!(!scene.machine.device.instance().has_asleep());
    assert_eq!(scene.machine.finish(), None);
    Ok(())
}
