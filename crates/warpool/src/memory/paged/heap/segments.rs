//! Segments of a heap: ranges that are backed as a whole, and not by pages.

use super::super::ids::{BlockId, RangeId, RangeInHeap};
use super::{Heap, kind_of, rounded};
use crate::memory::SegmentKind;

impl Heap {
    /// Adds a segment, and allocates from it at once: all of it if it is not to be split. Returns its number in the
    /// area, and the block.
    pub(in crate::memory::paged) fn add_segment(
        &mut self,
        kind: SegmentKind,
        number: RangeId,
        base: u64,
        bytes: u64,
        requested: u64,
        no_split: bool,
    ) -> (RangeInHeap, BlockId) {
        let (area, blocks) = self.area(kind);
        let (range, id) = area.add_segment(blocks, number, base, bytes);
        let id = area.carve(blocks, id, base, if no_split { bytes } else { rounded(requested) });
        self.mark_allocated(id, requested);
        (range, id)
    }

    /// Allocates from free blocks: a whole free segment, if those are not to be split.
    pub(in crate::memory::paged) fn allocate_as(&mut self, requested: u64, no_split: bool) -> Option<BlockId> {
        if !no_split {
            return self.allocate(requested);
        }
        self.merge_recent();
        let (area, blocks) = self.area(kind_of(rounded(requested)));
        let id = area.take_whole(blocks, rounded(requested))?;
        self.mark_allocated(id, requested);
        Some(id)
    }

    /// The segments of a kind that are free as a whole.
    pub(in crate::memory::paged) fn free_segments(&mut self, kind: SegmentKind) -> Vec<RangeInHeap> {
        self.merge_recent();
        self.areas[kind as usize].free_segments(&self.blocks)
    }

    /// Takes a segment out of all lists, if it is free as a whole. Returns its number on the device, base and size.
    pub(in crate::memory::paged) fn take_segment(
        &mut self,
        kind: SegmentKind,
        range: RangeInHeap,
    ) -> Option<(RangeId, u64, u64)> {
        let (area, blocks) = self.area(kind);
        area.take_segment(blocks, range)
    }

    /// A segment that was taken is free again.
    pub(in crate::memory::paged) fn put_segment_back(&mut self, kind: SegmentKind, range: RangeInHeap) {
        let (area, blocks) = self.area(kind);
        area.put_segment_back(blocks, range);
    }

    /// Removes a segment that was taken.
    pub(in crate::memory::paged) fn remove_segment(&mut self, kind: SegmentKind, range: RangeInHeap) {
        let (area, blocks) = self.area(kind);
        area.remove_segment(blocks, range);
    }

    /// Whether a block is in a segment.
    pub(in crate::memory::paged) fn is_in_segment(&self, id: BlockId) -> bool {
        let block = self.blocks.get(id);
        self.areas[block.kind as usize].is_segment(block.range)
    }
}
