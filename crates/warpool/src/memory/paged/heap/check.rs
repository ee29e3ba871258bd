//! The invariants of a heap, as code.

use std::collections::BTreeSet;

use super::super::ids::BlockId;
use super::block::{GRAIN, NONE, State};
use super::{Heap, kind_of};
use crate::memory::SegmentKind;

impl Heap {
    /// Checks every invariant. `slot` is the size of a page.
    ///
    /// # Panics
    /// If one does not hold.
    pub(in crate::memory::paged) fn check(&self, slot: u64) {
        let mut seen = BTreeSet::new();
        for kind in [SegmentKind::Small, SegmentKind::Large] {
            let area = &self.areas[kind as usize];
            area.check_bins(&self.blocks);
            let binned: BTreeSet<BlockId> = area.free_at_least(&self.blocks, GRAIN).collect();
            let recent: BTreeSet<BlockId> = area.recent().collect();
            let mut counted = [0; 5];
            for range in self.ranges(kind) {
                let (mut before, mut number) = (None, None);
                for (id, block) in range {
                    assert!(seen.insert(id), "{id:?} is in two places");
                    assert!(block.bytes > 0 && block.bytes.is_multiple_of(GRAIN));
                    let number = *number.get_or_insert(block.range);
                    assert_eq!(block.range, number, "{block:?}");
                    assert_eq!(block.kind, kind);
                    assert_eq!(binned.contains(&id), block.state == State::Free, "{block:?}");
                    assert_eq!(recent.contains(&id), block.state == State::Recent, "{block:?}");
                    assert_eq!(area.holes().get(&block.addr) == Some(&id), block.state == State::Hole, "{block:?}");
                    let is_indexed = matches!(block.state, State::Allocated | State::Pending | State::Recent);
                    if is_indexed && area.is_elastic(number) {
                        assert_eq!((block.addr % slot, block.bytes), (0, slot), "a block of elastic memory is a slot");
                    } else if is_indexed {
                        assert_eq!(area.started_at(number, block.addr), Some(id), "{block:?}");
                    }
                    if is_indexed && !area.is_segment(number) {
                        assert_eq!(kind_of(block.bytes), kind, "a block is in the area of its size");
                    }
                    if block.state == State::Hole {
                        assert!(block.addr.is_multiple_of(slot) && block.bytes.is_multiple_of(slot), "{block:?}");
                    }
                    let is_allocated = block.state == State::Allocated;
                    if is_allocated || block.state == State::Pending {
                        let allocated = if is_allocated { [1, block.bytes] } else { [0, 0] };
                        let one = [allocated[0], allocated[1], 1, block.bytes, block.requested];
                        counted = std::array::from_fn(|metric| counted[metric] + one[metric]);
                    }
                    assert_eq!(self.uses.contains_key(&id), block.has_uses, "{block:?}");
                    if let Some((other, end, state)) = before {
                        assert_eq!((block.prev, block.addr), (other, end), "blocks without gaps");
                        let merges = matches!(state, State::Free | State::Hole) && state == block.state;
                        assert!(!merges, "neighbours that are {state:?} are merged");
                    } else {
                        assert_eq!(block.prev, NONE);
                    }
                    before = Some((id, block.end(), block.state));
                }
            }
            assert_eq!(self.counters.current(kind), counted, "the statistics agree with the blocks");
        }
        assert_eq!(seen.len(), self.blocks.iter().count(), "every block is in a range");
        let live = self.blocks.iter().filter(|(_, block)| block.state == State::Allocated).count();
        assert_eq!(live, self.live as usize, "allocated blocks are counted");
        self.blocks.check();
    }
}
