//! Mapping pages where they are needed.

use warpool_driver::{Access, DeviceAccess, DevicePtr};

use super::Fill;
use crate::memory::Action;
use crate::memory::paged::ids::PageId;
use crate::memory::paged::old_mappings;
use crate::memory::paged::slot::Slot;
use crate::memory::paged::supply::Supplied;
use crate::{Result, lock};

impl Fill<'_> {
    /// Maps pages. Those that could not be mapped go back to where they were.
    pub(super) fn map(&mut self, pages: &mut [Supplied]) -> Result<()> {
        pages.sort_unstable_by_key(|supplied| supplied.to);
        let mut rest = &*pages;
        let mut outcome = Ok(());
        while let Some(first) = rest.first()
            && outcome.is_ok()
        {
            // Access is set for neighbours by one call.
            let (mut count, mut end) = (0, first.to);
            while let Some(supplied) = rest.get(count)
                && supplied.to == end
                && outcome.is_ok()
            {
                let page = self.table.page(supplied.page);
                match self.device.driver().vm_map(DevicePtr(self.table.addr(end)), page.physical) {
                    Ok(()) => {
                        end.index += page.slots;
                        count += 1;
                        self.table.set_mapped(supplied.page, supplied.to);
                    }
                    Err(error) => outcome = Err(error.into()),
                }
            }
            let set = self.set_access(first.to, end.index - first.to.index);
            let (mapped, others) = rest.split_at(count);
            if set.is_ok() {
                self.begin_use(mapped);
                rest = others;
            } else {
                mapped.iter().rev().for_each(|supplied| self.undo_map(supplied.page, supplied.to));
                outcome = outcome.and(set);
            }
        }
        self.put_pages_back(rest.iter().map(|supplied| (supplied.page, supplied.from)));
        outcome
    }

    /// Pages that were mapped belong there from now on.
    fn begin_use(&mut self, mapped: &[Supplied]) {
        let heap = self.cell.lock();
        for supplied in mapped {
            self.table.set_home(supplied.page, Some(supplied.to));
            let (addr, bytes) = (self.table.addr(supplied.to), self.table.page_bytes(supplied.page));
            self.device.record(Action::SegmentMap, addr, bytes, &heap, self.details);
        }
        drop(heap);
        mapped.iter().for_each(|supplied| old_mappings::retire_oldest(self.table, supplied.page));
    }

    fn set_access(&self, first: Slot, slots: u32) -> Result<()> {
        if slots == 0 {
            return Ok(());
        }
        let peers = lock(&self.device.peers);
        let devices = std::iter::once(self.device.id).chain(peers.iter().copied());
        let access: Vec<_> = devices.map(|device| DeviceAccess { device, access: Access::ReadWrite }).collect();
        let bytes = u64::from(slots) * self.table.slot_bytes;
        Ok(self.device.driver().vm_set_access(DevicePtr(self.table.addr(first)), bytes, &access)?)
    }

    /// Undoes a mapping that nothing has used.
    fn undo_map(&mut self, page: PageId, slot: Slot) {
        let bytes = self.table.page_bytes(page);
        let undone = self.device.driver().vm_unmap(DevicePtr(self.table.addr(slot)), bytes);
        let slots = self.table.page(page).slots;
        self.table.set_unmapped(page, slot);
        if let Err(error) = undone {
            tracing::warn!(%error, "a mapping could not be undone; it is retried");
            self.table.set_broken(slot, slots);
        }
    }
}
