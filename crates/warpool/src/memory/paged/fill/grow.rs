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
use crate::memory::paged::ids::PageId;
use crate::memory::paged::page_sizes::PageSizes;
use crate::memory::paged::reclaim;
use crate::memory::paged::supply::Supply;
use crate::memory::paged::take::release_physical;

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
            // All that is still needed at once, so that nothing is created in vain; before it fails, page by page.
            let rest = if self.request.on_oom { slots } else { supply.slots_needed.saturating_sub(credit).max(slots) };
            if let Err(cause) = self.device.admit_shared(self.table, u64::from(rest) * self.table.slot_bytes) {
                return Ok(Err(cause));
            }
            match self.device.driver().vm_create(self.device.id, bytes, options) {
                Ok(physical) => {
                    let page = self.table.add(physical, slots);
                    supply.created.push(page);
                    supply.add(page, slots, None);
                    credit = credit.saturating_sub(slots);
                    // The free pages of the device were too few.
                    self.table.note_all_needed();
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
        let (mut slots, mut taken) = (0, Vec::new());
        while slots < wanted
            && let Some(page) = self.table.take_spare(room + 1..=PageSizes::SLOTS_MAX)
        {
            slots += self.table.page(page).slots;
            taken.push((page, None));
        }
        let mut heaps = if self.asks_others { self.other_heaps() } else { Vec::new() };
        heaps.splice(0..0, self.takes_own().then_some(self.request.heap));
        for number in heaps {
            let from_heap = self.take_pages(number, |(_, of_page), _| {
                let is_wanted = of_page > room && slots < wanted;
                slots += if is_wanted { of_page } else { 0 };
                is_wanted
            });
            taken.extend(from_heap.into_iter().map(|(page, slot)| (page, Some(slot))));
        }
        if !self.request.on_oom {
            supply.exchanged.extend(taken);
            return Ok(slots);
        }
        let before = self.table.bytes_of_pages();
        let (kept, outcome) = reclaim::release_pages(self.device, self.table, taken, self.details);
        self.put_pages_back(kept.into_iter());
        outcome?;
        let released = (before - self.table.bytes_of_pages()) / self.table.slot_bytes;
        Ok(u32::try_from(released).expect("fewer than 2^32 slots"))
    }

    /// Returns a page to the driver that was created for this request and is mapped nowhere.
    pub(super) fn release_new(&mut self, page: PageId) {
        if self.table.take_spare_page(page) {
            let physical = self.table.remove(page);
            self.device.will_hold(self.table.bytes_held());
            release_physical(self.device, self.table, physical);
        }
    }
}
