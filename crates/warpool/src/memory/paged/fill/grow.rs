//! New pages from the driver.
//!
//! New pages are needed although enough memory is free if the free pages are larger than the gaps. Then as much of the
//! free pages is returned to the driver as new ones are created, so that reserved memory does not grow. A page leaves
//! once all work that used it is done (`old_mappings::release_leaving`). For a request that would otherwise fail the
//! host waits for that.

use warpool_driver::{ErrorCode, PhysicalOptions};

use super::{Fill, OrOom};
use crate::Result;
use crate::memory::OomCause;
use crate::memory::paged::heap::FreeBlock;
use crate::memory::paged::page_sizes::PageSizes;
use crate::memory::paged::pages::{PageId, Slot};
use crate::memory::paged::physical::release_physical;
use crate::memory::paged::reclaim;
use crate::memory::paged::supply::Supply;

impl Fill<'_> {
    /// Gets what is still needed from the driver, within the limit.
    pub(super) fn grow(&mut self, supply: &mut Supply) -> Result<OrOom<()>> {
        let options = PhysicalOptions { share: self.device.share, rdma: self.device.rdma };
        let limit = self.device.limit().unwrap_or(u64::MAX);
        // The size of the gaps for which larger pages were exchanged, and how many slots may be created for those.
        let (mut exchanged_for, mut credit) = (PageSizes::SLOTS_MAX, 0);
        while supply.slots_needed > 0 {
            let room = supply.next_max();
            if room < exchanged_for {
                let wanted = supply.slots_needed.saturating_sub(credit).max(self.slots_beyond(limit, supply));
                credit += self.exchange(supply, room, wanted)?;
                exchanged_for = room;
            }
            let slots = 1 << room.min(self.page_slots).ilog2();
            let bytes = u64::from(slots) * self.table.slot_bytes;
            if self.table.bytes_limited().saturating_add(bytes) > limit {
                return Ok(Err(OomCause::Limit));
            }
            match self.device.driver().vm_create(self.device.id, bytes, options) {
                Ok(physical) => {
                    let page = self.table.add(physical, slots);
                    supply.created.push(page);
                    supply.add(page, slots, None);
                    credit = credit.saturating_sub(slots);
                }
                Err(error) if error.code == ErrorCode::OutOfMemory => return Ok(Err(OomCause::Device)),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(Ok(()))
    }

    /// How many slots must leave at once for the rest of the window to be within the limit, which may have been
    /// lowered. None, unless the request would otherwise fail.
    fn slots_beyond(&self, limit: u64, supply: &Supply) -> u32 {
        let needed = u64::from(supply.slots_needed) * self.table.slot_bytes;
        let excess = self.table.bytes_limited().saturating_add(needed).saturating_sub(limit);
        if self.request.on_oom { u32::try_from(excess.div_ceil(self.table.slot_bytes)).unwrap_or(u32::MAX) } else { 0 }
    }

    /// Takes free pages of more than `room` slots, `wanted` slots in all, that are to leave. Returns how many slots.
    fn exchange(&mut self, supply: &mut Supply, room: u32, wanted: u32) -> Result<u32> {
        if !self.table.has_pages_of(2 * room) {
            return Ok(0);
        }
        let before = supply.exchanged.len();
        let mut slots = 0;
        while slots < wanted
            && let Some(page) = self.table.take_spare(room + 1..=PageSizes::SLOTS_MAX)
        {
            slots += self.table.page(page).slots;
            supply.exchanged.push((page, None));
        }
        if self.takes_own() {
            slots += self.take_too_large(self.request.heap, room, wanted.saturating_sub(slots), &mut supply.exchanged);
        }
        let others: Vec<u32> = self.table.index.with_pages().collect();
        for number in others {
            if self.asks_others && slots < wanted && self.may_take_from(number) {
                slots += self.take_too_large(number, room, wanted - slots, &mut supply.exchanged);
            }
        }
        if self.request.on_oom {
            let taken = supply.exchanged.split_off(before);
            slots = self.release_now(taken)?;
        }
        Ok(slots)
    }

    /// Takes free pages of a heap, of the smallest blocks first. Returns how many slots.
    fn take_too_large(&mut self, number: u32, room: u32, wanted: u32, taken: &mut Vec<(PageId, Option<Slot>)>) -> u32 {
        let mut heap = self.device.heaps.get(number).lock();
        heap.merge_recent();
        let mut slots = 0;
        for FreeBlock { id: block, .. } in heap.blocks_with_pages(self.table.slot_bytes) {
            let pages = self.table.pages_in(&heap, block);
            let too_large = pages.filter(|&(_, page)| self.table.page(page).slots > room);
            let enough = too_large.take_while(|&(_, page)| {
                let is_wanted = slots < wanted;
                slots += if is_wanted { self.table.page(page).slots } else { 0 };
                is_wanted
            });
            let pages: Vec<_> = enough.collect();
            self.take_pages(&mut heap, block, &pages);
            taken.extend(pages.into_iter().map(|(slot, page)| (page, Some(slot))));
        }
        slots
    }

    /// Waits for all work that may use these pages, and returns them to the driver. Returns how many slots.
    fn release_now(&mut self, pages: Vec<(PageId, Option<Slot>)>) -> Result<u32> {
        let (mut waited, mut slots, mut outcome) = (reclaim::Waited::default(), 0, Ok(()));
        for (page, from) in pages {
            let of_page = self.table.page(page).slots;
            let released = reclaim::release_page(self.device, self.table, page, &mut waited, self.details);
            if matches!(released, Ok(true)) {
                slots += of_page;
            } else {
                self.put_back(page, from.filter(|&slot| self.table.page(page).is_mapped_at(slot)));
            }
            outcome = outcome.and(released.map(drop));
        }
        outcome.map(|()| slots)
    }

    /// Returns a page to the driver that was created for this request and is mapped nowhere.
    pub(super) fn release_new(&mut self, page: PageId) {
        if self.table.take_spare_page(page) {
            let physical = self.table.remove(page);
            release_physical(self.device, self.table, physical);
        }
    }
}
