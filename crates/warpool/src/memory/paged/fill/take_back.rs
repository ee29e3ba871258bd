//! Taking pages back that are still mapped where they are needed: no driver call.

use super::Fill;
use crate::Result;
use crate::memory::Action;
use crate::memory::paged::page_set::PageSet;
use crate::memory::paged::pages::{Mapping, PageId, Slot};
use crate::memory::paged::pools::Takeable;
use crate::memory::paged::window::Window;

impl Fill<'_> {
    /// Pages in free blocks of other heaps, as far as they may be taken. Those that are still mapped in this one need
    /// no driver call.
    pub(super) fn free_in_others(&self) -> PageSet {
        if self.request.capturing || !self.table.was_taken_from(self.request.heap) {
            return PageSet::default();
        }
        let mut free = PageSet::for_pages(self.table.pages_end());
        for (number, cell) in self.device.heaps.iter() {
            if number == self.request.heap {
                continue;
            }
            if matches!(self.takeable(number), Takeable::After(_)) {
                let mut heap = cell.lock();
                heap.merge_recent();
                self.table.add_free_pages(&heap, &mut free);
            }
        }
        free
    }

    /// Pages that are still mapped in the window, and belong to free blocks or to nothing, belong to the window again.
    pub(super) fn take_back(&mut self, window: Window) -> Result<()> {
        let last = self.slots(window).last().map_or(0, |slot| slot.index);
        let in_window = |slot: Slot| match self.table.mapping(slot) {
            Mapping::Page { page, part: 0 } if self.table.own_page(slot).is_none() => {
                (slot.index + self.table.page(page).slots <= last + 1).then_some(page)
            }
            _ => None,
        };
        let wanted: PageSet = self.slots(window).filter_map(in_window).collect();
        if wanted.is_empty() {
            return Ok(());
        }
        let mut taken: PageSet = wanted.iter().filter(|&page| self.table.take_spare_page(page)).collect();
        let heap_of = |page: PageId| self.table.page(page).home.map(|home| self.table.range(home.range).heap);
        let mut heaps: Vec<u32> = wanted.iter().filter(|&page| !taken.contains(page)).filter_map(heap_of).collect();
        heaps.sort_unstable();
        heaps.dedup();
        let mut outcome = Ok(());
        for number in heaps {
            let from = self.take_wanted(number, &wanted);
            let ordered = if number == self.request.heap { Ok(true) } else { self.order_after_heap(number) };
            if matches!(ordered, Ok(true)) {
                if number != self.request.heap && !from.is_empty() {
                    self.table.contention.note_taken(number);
                }
                taken.extend(from.iter().map(|&(_, page)| page));
            } else {
                from.into_iter().for_each(|(slot, page)| self.put_back(page, Some(slot)));
                outcome = outcome.and(ordered.map(drop));
            }
        }
        let heap = self.cell.lock();
        for slot in self.slots(window) {
            if let Mapping::Page { page, part: 0 } = self.table.mapping(slot)
                && taken.remove(page)
            {
                self.table.set_home(page, Some(slot));
                self.table.totals.taken_back += 1;
                let bytes = self.table.page_bytes(page);
                self.device.record(Action::SegmentMap, self.table.addr(slot), bytes, &heap, self.details);
            }
        }
        outcome
    }

    /// Takes those of the wanted pages that are in free blocks of a heap.
    fn take_wanted(&mut self, number: u32, wanted: &PageSet) -> Vec<(Slot, PageId)> {
        let mut taken = Vec::new();
        let mut heap = self.device.heaps.get(number).lock();
        for block in heap.blocks_with_pages(self.table.slot_bytes) {
            let pages = self.table.pages_in(&heap, block);
            let pages: Vec<_> = pages.filter(|&(_, page)| wanted.contains(page)).collect();
            self.take_pages(&mut heap, block, &pages);
            taken.extend(pages);
        }
        taken
    }
}
