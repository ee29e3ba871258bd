//! Taking pages back that are still mapped where they are needed: no driver call.

use super::Fill;
use crate::Result;
use crate::memory::Action;
use crate::memory::paged::fill_memory::InHeap;
use crate::memory::paged::pages::PageId;
use crate::memory::paged::pools::Takeable;
use crate::memory::paged::slot::{Mapping, PagePart, Slot};
use crate::memory::paged::window::Window;

impl Fill<'_> {
    /// Finds the pages in free blocks of other heaps, as far as they may be taken. Those that are still mapped in this
    /// one need no driver call.
    pub(super) fn find_free_elsewhere(&mut self) {
        self.memory.free_elsewhere.clear_for(self.table.pages_end());
        if self.request.capturing || !self.table.was_taken_from(self.request.heap) {
            return;
        }
        let others: Vec<u32> = self.table.index.with_pages().filter(|&number| self.may_take_from(number)).collect();
        for number in others {
            let mut heap = self.device.heaps.get(number).lock();
            heap.merge_recent();
            self.table.add_free_pages(&heap, &mut self.memory.free_elsewhere);
        }
    }

    /// Whether a heap is another one, and its pages may be taken.
    pub(super) fn may_take_from(&self, number: u32) -> bool {
        let is_other = !self.request.capturing && number != self.request.heap;
        is_other && matches!(self.takeable(number), Takeable::After(_))
    }

    /// Pages that are still mapped in the window, and belong to free blocks or to nothing, belong to the window again.
    pub(super) fn take_back(&mut self, window: Window) -> Result<()> {
        let mut old = std::mem::take(&mut self.memory.old);
        self.find_old_in(window, &mut old);
        let outcome = if old.is_empty() { Ok(()) } else { self.take_back_old(&old) };
        self.memory.old = old;
        outcome
    }

    fn take_back_old(&mut self, old: &[(Slot, PageId)]) -> Result<()> {
        let taken = &mut self.memory.taken_back;
        taken.clear_for(self.table.pages_end());
        taken.extend(old.iter().map(|&(_, page)| page).filter(|&page| self.table.take_spare_page(page)));
        self.needs_bystanders |= !taken.is_empty();
        let mut wanted = std::mem::take(&mut self.memory.wanted);
        wanted.clear();
        let takes_own = self.takes_own();
        let may_be_taken = |place: &InHeap| takes_own || place.heap != self.request.heap;
        wanted.extend(old.iter().filter_map(|&(_, page)| self.place_of(page)).filter(may_be_taken));
        wanted.sort_unstable();
        wanted.dedup();
        let mut outcome = Ok(());
        let mut from = std::mem::take(&mut self.memory.take_lists.taken);
        for wanted in wanted.chunk_by(|a, b| a.heap == b.heap) {
            let number = wanted[0].heap;
            self.take_wanted(number, wanted, &mut from);
            let ordered = if number == self.request.heap { Ok(true) } else { self.order_after_heap(number) };
            if matches!(ordered, Ok(true)) {
                if number != self.request.heap && !from.is_empty() {
                    self.table.contention.note_taken(number);
                }
                self.memory.taken_back.extend(from.iter().map(|&(_, page)| page));
            } else {
                from.iter().for_each(|&(slot, page)| self.put_back(page, Some(slot)));
                outcome = outcome.and(ordered.map(drop));
            }
        }
        self.memory.take_lists.taken = from;
        self.memory.wanted = wanted;
        let heap = self.cell.lock();
        for &(slot, page) in old {
            if self.memory.taken_back.remove(page) {
                self.table.set_home(page, Some(slot));
                self.table.totals.taken_back += 1;
                let bytes = self.table.page_bytes(page);
                self.device.record(Action::SegmentMap, self.table.addr(slot), bytes, &heap, self.details);
            }
        }
        outcome
    }

    /// Finds the old mappings that are wholly in the window: slots and pages.
    fn find_old_in(&self, window: Window, found: &mut Vec<(Slot, PageId)>) {
        let [first, last] = [window.start, window.end - 1].map(|addr| self.table.slot_index(window.range, addr));
        let (used, behind) = (self.table.slots(window.range), last + 1);
        let used = used.get(first as usize..used.len().min(behind as usize)).unwrap_or_default();
        found.clear();
        found.extend((first..).zip(used).filter_map(|(index, state)| match state.mapping() {
            Mapping::Page(PagePart { page, part: 0, slots, is_home: false }) => {
                (index + u32::from(slots) <= behind).then_some((Slot { range: window.range, index }, page))
            }
            _ => None,
        }));
    }

    /// Where a page belongs; `None` if nowhere.
    fn place_of(&self, page: PageId) -> Option<InHeap> {
        let home = self.table.page(page).home?;
        Some(InHeap { heap: self.table.range(home.range).heap, home, page })
    }

    /// Takes those of the wanted pages that are in free blocks of a heap. They are sorted.
    fn take_wanted(&mut self, number: u32, wanted: &[InHeap], taken: &mut Vec<(Slot, PageId)>) {
        let mut heap = self.device.heaps.get(number).lock();
        let mut found = std::mem::take(&mut self.memory.wanted_in);
        found.clear();
        heap.free_blocks_from(self.table.slot_bytes, |block| {
            let slots = self.table.whole_slots_in(&heap, block);
            let first = wanted.partition_point(|wanted| wanted.home < slots.start);
            let behind = |wanted: &InHeap| wanted.home.index + self.table.page(wanted.page).slots;
            let inside = wanted[first..]
                .iter()
                .take_while(|wanted| wanted.home.range == slots.start.range && behind(wanted) <= slots.behind);
            let count = inside.count();
            if count > 0 {
                found.push((block, first..first + count));
            }
        });
        taken.clear();
        for (block, pages) in &found {
            let before = taken.len();
            taken.extend(wanted[pages.clone()].iter().map(|wanted| (wanted.home, wanted.page)));
            self.take_pages(&mut heap, *block, &taken[before..]);
        }
        self.memory.wanted_in = found;
    }
}
