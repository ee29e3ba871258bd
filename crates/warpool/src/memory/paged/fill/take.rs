//! Taking free pages from heaps: this one's, and others', whose work the request's stream then waits for (`order.rs`).

use super::Fill;
use crate::memory::Action;
use crate::memory::paged::fill_memory::TakeLists;
use crate::memory::paged::heap::{FreeBlock, Heap};
use crate::memory::paged::old_mappings;
use crate::memory::paged::pages::{PageId, Slot};
use crate::memory::paged::pools::Takeable;
use crate::memory::paged::supply::Supply;
use crate::{Result, lock};

impl Fill<'_> {
    /// Takes spare pages, the largest first.
    pub(super) fn take_spare(&mut self, supply: &mut Supply, slots_min: u32) {
        while supply.slots_needed > 0
            && let Some(page) = self.table.take_spare(slots_min..=supply.next_max())
        {
            self.needs_bystanders = true;
            supply.add(page, self.table.page(page).slots, None);
        }
    }

    /// Takes pages of this heap, if its pages may be taken.
    pub(super) fn take_own(&mut self, supply: &mut Supply, slots_min: u32) {
        if self.takes_own() {
            self.take_from(self.request.heap, supply, slots_min);
        }
    }

    pub(super) fn takeable(&self, number: u32) -> Takeable {
        let pool = self.device.heaps.get(number).lock().pool;
        lock(&self.device.pools).takeable(pool)
    }

    /// Takes pages of at least `slots_min` slots from free blocks of a heap, the smallest block first: whole units
    /// before others, since mapping those costs least.
    fn take_from(&mut self, number: u32, supply: &mut Supply, slots_min: u32) {
        if self.page_slots > 1 {
            self.take_units(number, supply, self.page_slots, slots_min);
        }
        self.take_units(number, supply, 1, slots_min);
    }

    /// Takes pages of at least `slots_min` slots, as far as all of a unit of so many slots is free.
    fn take_units(&mut self, number: u32, supply: &mut Supply, unit: u32, slots_min: u32) {
        if supply.slots_needed == 0 {
            return;
        }
        let mut heap = self.device.heaps.get(number).lock();
        heap.merge_recent();
        let TakeLists { mut blocks, mut pages, mut taken } = std::mem::take(&mut self.memory.take_lists);
        heap.find_blocks_with_pages(self.table.slot_bytes, &mut blocks);
        for &FreeBlock { id: block, .. } in &blocks {
            if supply.slots_needed == 0 {
                break;
            }
            pages.clear();
            taken.clear();
            pages.extend(self.table.pages_in(&heap, block));
            // Pages by address, in groups of those that begin in the same unit.
            for pages in pages.chunk_by(|(a, _), (b, _)| a.index / unit == b.index / unit) {
                // A unit is taken whole, or what of it is needed at last.
                let slots: u32 = pages.iter().map(|&(_, page)| self.table.page(page).slots).sum();
                if slots < unit.min(supply.slots_needed) {
                    continue;
                }
                for &(slot, page) in pages {
                    let slots = self.table.page(page).slots;
                    if slots >= slots_min && supply.accepts(slots) {
                        supply.add(page, slots, Some(slot));
                        taken.push((slot, page));
                    }
                }
            }
            self.take_pages(&mut heap, block, &taken);
        }
        self.memory.take_lists = TakeLists { blocks, pages, taken };
    }

    /// Takes pages from other heaps. The request's stream waits, on the device, for the work of theirs.
    pub(super) fn take_from_others(&mut self, supply: &mut Supply, slots_min: u32) -> Result<()> {
        if self.request.capturing {
            return Ok(());
        }
        let with_pages: Vec<u32> = self.table.index.with_pages().collect();
        for number in with_pages {
            if supply.slots_needed == 0 {
                break;
            }
            if number == self.request.heap {
                continue;
            }
            let users = match self.takeable(number) {
                Takeable::After(users) => users,
                Takeable::OnOom if self.request.on_oom => Vec::new(),
                Takeable::OnOom | Takeable::Never => continue,
            };
            // Taken first: the events are then after all work that ever used the pages.
            let before = supply.clone();
            self.take_from(number, supply, slots_min);
            if supply.pages.len() == before.pages.len() {
                continue;
            }
            let ordered = self.order_after(number, users);
            if !matches!(ordered, Ok(true)) {
                let taken = supply.pages.split_off(before.pages.len());
                *supply = before;
                taken.into_iter().for_each(|supplied| self.put_back(supplied.page, supplied.from));
                ordered?;
            } else {
                self.table.contention.note_taken(number);
            }
        }
        Ok(())
    }

    /// These pages, which are in a free block, belong to it no longer. They are sorted by address.
    pub(super) fn take_pages(&mut self, heap: &mut Heap, block: u32, pages: &[(Slot, PageId)]) {
        if let Some(&(slot, _)) = pages.first() {
            self.table.index.note_changed(self.table.range(slot.range).heap);
        }
        let end = |&(slot, page): &(Slot, PageId)| self.table.addr(slot) + self.table.page_bytes(page);
        let neighbours = pages.chunk_by(|before, (slot, _)| end(before) == self.table.addr(*slot));
        // From the end: what is left of the block in front keeps its number.
        for pages in neighbours.rev() {
            if let (Some((first, _)), Some(last)) = (pages.first(), pages.last()) {
                heap.make_hole(block, self.table.addr(*first), end(last));
            }
        }
        for &(slot, page) in pages.iter().rev() {
            let (start, bytes) = (self.table.addr(slot), self.table.page_bytes(page));
            self.table.set_home(page, None);
            self.table.totals.taken += 1;
            self.device.record(Action::SegmentUnmap, start, bytes, heap, self.details);
        }
    }

    /// Records an event after the work that used what was taken from this heap. Without it the old mappings stay
    /// until a later one.
    pub(super) fn record_takes(&mut self) {
        match old_mappings::record_takes(self.device, self.table, self.request.heap, self.details) {
            Ok(bystanders) => self.recorded = bystanders,
            Err(error) => tracing::warn!(%error, "no event could be recorded after taken pages; it is retried"),
        }
    }
}
