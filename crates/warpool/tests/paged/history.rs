//! The history shows every page at the address where it is mapped: an address gets a page once, and loses it before it
//! gets another.

use std::collections::BTreeSet;

use warpool::Error;
use warpool::driver::DevicePtr;
use warpool::memory::raw::Request;
use warpool::memory::report::{Action, HistoryOptions, SnapshotOptions, set_user_metadata};
use warpool::memory::{DeviceAllocator as _, MemPoolId};
use warpool_testing::{Rng, seeds};

use crate::{DEVICE, MIB, Machine};

/// A page that was mapped twice in one window appeared at both addresses, and left one of them unseen.
#[test]
fn map_and_unmap_events_give_the_segments_of_the_snapshot() {
    for seed in seeds(10) {
        println!("seed: {seed}");
        let mut rng = Rng::new(seed);
        let machine = Machine::new();
        let streams = [machine.stream(), machine.stream()];
        machine.allocator.record_history(Some(HistoryOptions::default())).unwrap();
        let mut live = Vec::new();
        for step in 0..1500 {
            if !live.is_empty() && (rng.below(100) < 48 || live.len() > 60) {
                live.swap_remove(rng.below(live.len()));
            } else {
                let bytes = (512 << rng.below(17)) + rng.below(1 << 20) as u64;
                live.push(machine.block(bytes, &streams[rng.below(8) / 7]));
            }
            if step % 500 == 499 {
                machine.allocator.trim(DEVICE, MemPoolId::DEFAULT).unwrap();
            }
        }
        let snapshot = machine.allocator.snapshot(SnapshotOptions::default()).unwrap();
        let slots = |addr: u64, bytes: u64| (addr..addr + bytes).step_by(2 * MIB as usize);
        let mut mapped = BTreeSet::new();
        for (number, entry) in snapshot.traces[0].iter().enumerate() {
            for slot in slots(entry.addr, entry.size) {
                match entry.action {
                    Action::SegmentMap => assert!(mapped.insert(slot), "entry {number}: {slot:#x} has a page already"),
                    Action::SegmentUnmap => assert!(mapped.remove(&slot), "entry {number}: {slot:#x} has no page"),
                    _ => {}
                }
            }
        }
        let in_segments = snapshot.segments.iter().flat_map(|segment| slots(segment.address, segment.total_size));
        assert_eq!(mapped, in_segments.collect());
    }
}

/// Cached calls that only the history records take a shorter path. It writes the same entries as the longer one.
#[test]
fn the_short_way_writes_the_same_entries() {
    for seed in seeds(5) {
        println!("seed: {seed}");
        let history = |tracks_suballocations: bool| {
            let machine = Machine::tracking(tracks_suballocations);
            let streams = [machine.stream(), machine.stream()];
            let (mut rng, mut live) = (Rng::new(seed), Vec::new());
            // Fewer entries than there are events: the oldest are overwritten.
            machine.allocator.record_history(Some(HistoryOptions { entries_max: 1000, ..Default::default() })).unwrap();
            for step in 0..1500 {
                if step % 400 == 0 {
                    set_user_metadata(if step % 800 == 0 { "even" } else { "" });
                }
                if !live.is_empty() && (rng.below(100) < 48 || live.len() > 60) {
                    let block: warpool::memory::raw::Allocation = live.swap_remove(rng.below(live.len()));
                    if !machine.allocator.free_cached(DEVICE, block.ptr) {
                        machine.allocator.free_raw(block.ptr).unwrap();
                    }
                } else {
                    let bytes = (512 << rng.below(17)) + rng.below(1 << 20) as u64;
                    let request = Request::new(DEVICE, streams[rng.below(8) / 7].id(), bytes);
                    live.push(machine.allocator.allocate_raw(request).unwrap());
                }
            }
            set_user_metadata("");
            let snapshot = machine.allocator.snapshot(SnapshotOptions::default()).unwrap();
            let text = |id: Option<_>| id.map(|id| snapshot.texts.get(id).to_owned());
            let entries = snapshot.traces[0].iter();
            entries
                .map(|entry| (entry.action, entry.addr, entry.size, entry.stream, text(entry.user_metadata)))
                .collect::<Vec<_>>()
        };
        let (short, long) = (history(false), history(true));
        assert_eq!(short.len(), 1000);
        assert_eq!(short, long);
        assert!(short.iter().any(|entry| entry.4.is_some()) && short.iter().any(|entry| entry.4.is_none()));
    }
}

#[test]
fn a_block_can_be_annotated() {
    let machine = Machine::new();
    let stream = machine.stream();
    machine.allocator.record_history(Some(HistoryOptions::default())).unwrap();
    let block = machine.allocator.allocate_raw(Request::new(DEVICE, stream.id(), 1000)).unwrap();
    machine.paged.annotate(block.ptr, "weights").unwrap();
    let snapshot = machine.allocator.snapshot(SnapshotOptions::default()).unwrap();
    let entry = snapshot.traces[0].iter().find(|entry| entry.action == Action::Annotate).unwrap();
    assert_eq!((entry.addr, entry.size), (block.ptr.0, 1000));
    assert_eq!(entry.user_metadata.map(|id| snapshot.texts.get(id)), Some("weights"));
    let inside = DevicePtr(block.ptr.0 + 512);
    assert_eq!(machine.paged.annotate(inside, "x"), Err(Error::UnknownPointer { ptr: inside }));
    machine.allocator.free(block).unwrap();
    assert!(machine.paged.annotate(block.ptr, "x").is_err());
    assert!(machine.paged.annotate(DevicePtr(0x100), "x").is_err(), "an address of nobody");
}
