//! The pages behind the addresses of one heap.

use super::super::heap::Heap;
use super::super::page_set::PageSet;
use super::{Mapping, PageId, PagePart, PageTable, Slot, SlotRange, SlotState};
use crate::memory::SegmentKind;

impl PageTable {
    /// The slots that are wholly in one block of a heap.
    pub(in crate::memory::paged) fn whole_slots_in(&self, heap: &Heap, block: u32) -> SlotRange {
        let range = heap.range_of(block);
        let block = heap.block(block);
        let first = self.slot_index(range, block.addr() + self.slot_bytes - 1);
        SlotRange { start: Slot { range, index: first }, behind: self.slot_index(range, block.addr() + block.bytes()) }
    }

    /// The slots of the pages that are wholly in one block of a heap, which is free: the number of the first, and what
    /// is in them.
    fn page_slots_in(&self, heap: &Heap, block: u32) -> (Slot, &[SlotState]) {
        let SlotRange { start, behind } = self.whole_slots_in(heap, block);
        let states = self.slots(start.range);
        let states = states.get(start.index as usize..states.len().min(behind as usize)).unwrap_or_default();
        // Parts of pages whose others are in the blocks beside it.
        let before = states.first().map_or(0, SlotState::slots_to_next_page);
        let after = states.last().map_or(0, SlotState::slots_of_cut_page);
        let states = states.get(before..states.len().saturating_sub(after)).unwrap_or_default();
        debug_assert!(states.iter().all(|state| state.own_page().is_some()), "pages are behind all of a free block");
        (Slot { index: start.index + before as u32, ..start }, states)
    }

    /// The pages that are wholly in one block of a heap, which is free, by address.
    pub(in crate::memory::paged) fn pages_in(&self, heap: &Heap, block: u32) -> impl Iterator<Item = (Slot, PageId)> {
        let (first, states) = self.page_slots_in(heap, block);
        let slots = (first.index..).map(move |index| Slot { index, ..first });
        slots.zip(states).filter_map(|(slot, state)| Some((slot, state.own_page_begins()?)))
    }

    /// Inserts the pages that are wholly in free blocks of a heap into a set with room for all.
    pub(in crate::memory::paged) fn add_free_pages(&self, heap: &Heap, pages: &mut PageSet) {
        heap.free_blocks_from(self.slot_bytes, |block| {
            let (_, states) = self.page_slots_in(heap, block);
            pages.insert_known(states.iter().map(SlotState::page_number));
        });
    }

    /// Whether a page is wholly in a free block of a heap. It may be larger than a slot, so the block's size does not
    /// tell.
    pub(in crate::memory::paged) fn has_free_pages(&self, heap: &Heap) -> bool {
        heap.has_free_block(self.slot_bytes, |block| !self.page_slots_in(heap, block).1.is_empty())
    }

    /// How much of the pages of a heap's large blocks is free beside one: smaller blocks can use it, and nothing else.
    pub(in crate::memory::paged) fn bytes_in_parts(&self, heap: &Heap) -> u64 {
        let mut bytes = 0;
        heap.large_free_blocks(|block| {
            let (first, states) = self.page_slots_in(heap, block);
            if self.ranges[first.range as usize].segment.is_none() {
                bytes += heap.block(block).bytes() - states.len() as u64 * self.slot_bytes;
            }
        });
        bytes
    }

    /// Every mapping in the ranges of a heap: the page, its first slot, and whether it belongs there.
    pub(in crate::memory::paged) fn mappings_of(&self, heap: u32) -> Vec<(PageId, Slot, bool)> {
        let mut mappings = Vec::new();
        for (range, map) in self.ranges_of(heap) {
            for (index, state) in (0..).zip(&map.slots) {
                if let Mapping::Page(PagePart { page, part: 0, is_home, .. }) = state.mapping() {
                    mappings.push((page, Slot { range, index }, is_home));
                }
            }
        }
        mappings
    }

    pub(in crate::memory::paged) fn has_mappings(&self, heap: u32) -> bool {
        self.ranges_of(heap).flat_map(|(_, map)| &map.slots).any(|state| !state.is_unmapped())
    }

    /// Whether nothing is behind the ranges of a heap, neither pages nor segments.
    pub(in crate::memory::paged) fn is_unmapped(&self, heap: u32) -> bool {
        !self.has_mappings(heap) && !self.ranges_of(heap).any(|(_, map)| map.segment.is_some())
    }

    /// The bytes of addresses that a heap has for a kind of blocks.
    pub(in crate::memory::paged) fn bytes_of_ranges(&self, heap: u32, kind: SegmentKind) -> u64 {
        let of_kind = self.ranges_of(heap).filter(|(_, range)| range.kind == kind);
        of_kind.map(|(_, range)| range.bytes).sum()
    }
}
