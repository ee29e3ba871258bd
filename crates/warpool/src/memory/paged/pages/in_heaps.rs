//! The pages behind the addresses of one heap.

use super::super::heap::Heap;
use super::super::ids::{BlockId, HeapId};
use super::{Mapping, PageId, PageTable, Slot};

impl PageTable {
    /// The pages that are wholly in one block of a heap, which is free, by address.
    pub(in crate::memory::paged) fn pages_in(
        &self,
        heap: &Heap,
        block: BlockId,
    ) -> impl Iterator<Item = (Slot, PageId)> {
        let range = heap.range_of(block);
        let block = heap.block(block);
        let end = self.slot_index(range, block.addr() + block.bytes());
        let slots = self.slot_index(range, block.addr() + self.slot_bytes - 1)..end;
        slots.filter_map(move |index| {
            let part = self.slot(Slot { range, index }).own()?;
            (part.part == 0 && index + u32::from(part.slots) <= end).then_some((Slot { range, index }, part.page))
        })
    }

    /// The pages that are wholly in free blocks of a heap.
    pub(in crate::memory::paged) fn free_pages(&self, heap: &Heap) -> impl Iterator<Item = PageId> {
        heap.free_blocks(self.slot_bytes).flat_map(|block| self.pages_in(heap, block)).map(|(_, page)| page)
    }

    /// Whether a page is wholly in a free block of a heap. It may be larger than a slot, so the block's size does not
    /// tell.
    pub(super) fn has_free_pages(&self, heap: &Heap) -> bool {
        self.free_pages(heap).next().is_some()
    }

    /// How much of the pages of a heap's large blocks is free beside one: smaller blocks can use it, and nothing else.
    pub(super) fn bytes_in_parts_of(&self, heap: &Heap) -> u64 {
        let blocks = heap.large_free_blocks().filter(|&block| !heap.is_in_segment(block));
        let parts = blocks.map(|block| {
            let pages = self.pages_in(heap, block).map(|(_, page)| self.page_bytes(page));
            heap.block(block).bytes() - pages.sum::<u64>()
        });
        parts.sum()
    }

    /// Every mapping in the ranges of a heap: the page, its first slot, and whether it belongs there.
    pub(in crate::memory::paged) fn mappings_of(&self, heap: HeapId) -> Vec<(PageId, Slot, bool)> {
        let mut mappings = Vec::new();
        for (range, map) in self.ranges_of(heap) {
            for (index, state) in (0..).zip(&map.slots) {
                if let Some(part) = state.part().filter(|part| part.part == 0) {
                    mappings.push((part.page, Slot { range, index }, part.is_home));
                }
            }
        }
        mappings
    }

    pub(in crate::memory::paged) fn has_mappings(&self, heap: HeapId) -> bool {
        self.ranges_of(heap).flat_map(|(_, map)| &map.slots).any(|state| state.mapping != Mapping::Nothing)
    }

    /// Whether nothing is behind the ranges of a heap, neither pages nor segments.
    pub(in crate::memory::paged) fn is_unmapped(&self, heap: HeapId) -> bool {
        !self.has_mappings(heap) && !self.ranges_of(heap).any(|(_, map)| map.segment.is_some())
    }
}
