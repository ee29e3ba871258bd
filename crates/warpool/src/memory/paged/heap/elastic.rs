//! What elastic memory needs of a heap: ranges whose allocated blocks are slots, at addresses that the caller chooses.

use super::super::ids::{BlockId, RangeId, RangeInHeap};
use super::{Heap, State};
use crate::memory::SegmentKind;

/// Elastic memory is in the area of large blocks.
const KIND: SegmentKind = SegmentKind::Large;

impl Heap {
    /// A range of at least `bytes` in which nothing is, with its number on the device, base and size.
    pub(in crate::memory::paged) fn unused_range(&self, bytes: u64) -> Option<(RangeInHeap, RangeId, u64, u64)> {
        self.areas[KIND as usize].unused_range(&self.blocks, bytes)
    }

    /// Makes a range elastic memory, or ends that: nothing in it is allocated then.
    pub(in crate::memory::paged) fn set_elastic(&mut self, range: RangeInHeap, is_elastic: bool) {
        self.merge_recent();
        let (area, blocks) = self.area(KIND);
        area.set_elastic(blocks, range, is_elastic);
    }

    /// Whether a block is elastic memory.
    pub(in crate::memory::paged) fn is_elastic(&self, id: BlockId) -> bool {
        let block = self.blocks.get(id);
        self.areas[block.kind as usize].is_elastic(block.range)
    }

    /// Bytes that are allocated as elastic memory.
    pub(in crate::memory::paged) fn elastic_bytes(&self) -> u64 {
        let ranges = self.ranges(KIND).flatten();
        let allocated = ranges.filter(|&(id, block)| block.state == State::Allocated && self.is_elastic(id));
        allocated.map(|(_, block)| block.bytes).sum()
    }

    /// Takes slots that are not allocated out of all lists, as one block. `before` is the last slot before them that is
    /// allocated.
    pub(in crate::memory::paged) fn begin_filling_slots(
        &mut self,
        range: RangeInHeap,
        before: Option<BlockId>,
        start: u64,
        end: u64,
    ) -> BlockId {
        let (area, blocks) = self.area(KIND);
        let anchor = before.map_or_else(|| area.first(range), |before| blocks.get(before).next);
        area.begin_filling(blocks, start, end, anchor)
    }

    /// Ends it with pages in all of them: each slot is an allocated block. Returns those.
    pub(in crate::memory::paged) fn end_filling_slots(&mut self, mut id: BlockId, slot_bytes: u64) -> Vec<BlockId> {
        let mut allocated = Vec::new();
        loop {
            let rest = (self.blocks.get(id).bytes > slot_bytes).then(|| self.blocks.split(id, slot_bytes));
            self.mark_allocated(id, slot_bytes);
            allocated.push(id);
            match rest {
                Some(rest) => id = rest,
                None => return allocated,
            }
        }
    }
}
