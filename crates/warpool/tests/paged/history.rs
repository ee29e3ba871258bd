//! The history shows every page where it belongs: an address gets a page once, and loses it before it gets another.

use std::collections::BTreeSet;

use warpool::memory::{Action, HistoryOptions, MemPoolId, SnapshotOptions};
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
