//! Several processes on one card, as the allocator takes part in it (`crate::ledger`): it asks before it takes memory
//! from the driver, waits for others before a request fails, and gives them free pages.
//!
//! Without `share:True` nothing here does anything, and costs a load.

use std::sync::Arc;

use super::PagedAllocator;
use super::device::PagedDevice;
use super::idle_pages::{free_bytes, idle_first, take_pages};
use super::old_mappings;
use super::page_sizes::PageSizes;
use super::pages::PageTable;
use crate::ledger::{CardShare, LedgerPages, Terms};
use crate::memory::OomCause;
use crate::memory::report::EntryDetails;
use crate::memory::segment_source::OrOom;
use crate::{Result, lock};

impl PagedAllocator {
    /// Joins the processes that share the cards of all devices, once; none, if one of them cannot be shared.
    pub(super) fn join(&self, pages: &Arc<dyn LedgerPages>) -> Result<()> {
        let settings = self.shared.settings().share.clone();
        let terms = Terms {
            guaranteed: settings.guaranteed_bytes.min(settings.limit_bytes.unwrap_or(u64::MAX)),
            priority: settings.priority,
            reclaim_ms: settings.reclaim_ms,
        };
        for (index, device) in self.devices.iter().enumerate().filter(|(_, device)| device.card.get().is_none()) {
            let held = lock(&device.pages).bytes_held();
            match CardShare::join(pages, &self.shared.instance, device.id, terms, held) {
                // Only another thread that does the same could have set it.
                Ok(card) => drop(device.card.set(card)),
                Err(error) => {
                    self.devices[..index].iter().filter_map(|device| device.card.get()).for_each(CardShare::leave);
                    return Err(error);
                }
            }
        }
        for device in &self.devices {
            device.change_limits(|limits| limits.share = settings.limit_bytes);
        }
        Ok(())
    }
}

impl PagedDevice {
    /// Whether the device may hold `bytes` more than now: by its limit, and by what other processes leave.
    pub(super) fn admit(&self, table: &PageTable, bytes: u64) -> OrOom<()> {
        if self.limit().is_some_and(|limit| table.bytes_limited().saturating_add(bytes) > limit) {
            return Err(OomCause::Limit);
        }
        self.admit_shared(table, bytes)
    }

    /// Whether other processes leave `bytes` more than now. From then on they do.
    pub(super) fn admit_shared(&self, table: &PageTable, bytes: u64) -> OrOom<()> {
        let total = table.bytes_shared().saturating_add(bytes);
        match self.card.get() {
            Some(card) if !card.admit(self.driver(), table.bytes_held(), total) => Err(OomCause::Shared),
            _ => Ok(()),
        }
    }

    /// Memory is about to be released; `held` is what is left then.
    pub(super) fn will_hold(&self, held: u64) {
        if let Some(card) = self.card.get() {
            card.set_held(held);
        }
    }

    /// What the driver has free, as far as other processes leave it.
    pub(super) fn bytes_available(&self) -> Result<u64> {
        let free = self.driver().mem_info(self.id)?.bytes_free;
        Ok(self.card.get().map_or(free, |card| free.min(card.room(self.driver()))))
    }

    /// Makes attempts to get `bytes`, which failed because of `why`, while other processes give pages. `None` if they
    /// could not help, or nothing came of it. Not to be called with a lock.
    pub(super) fn wait_for_others<T>(
        &self,
        (why, bytes): (OomCause, u64),
        is_last: bool,
        attempt: impl FnMut() -> Result<OrOom<T>>,
    ) -> Result<Option<T>> {
        match self.card.get().filter(|_| matches!(why, OomCause::Shared | OomCause::Device)) {
            Some(share) => share.wait_for_others(bytes, is_last, attempt),
            None => Ok(None),
        }
    }
}

/// Gives free pages to processes that ask for them, as far as streams have passed, and says what this one has.
pub(super) fn give(device: &PagedDevice, table: &mut PageTable, details: &EntryDetails) -> Result<()> {
    let Some(share) = device.card.get() else { return Ok(()) };
    let heaps = idle_first(device, table);
    let leaving: u64 = table.leaving.iter().map(|&page| table.page_bytes(page)).sum();
    let wanted = share.to_give(free_bytes(device, table, &heaps)).saturating_sub(leaving);
    let mut outcome = Ok(());
    if wanted > 0 {
        // Of the last page a part may be more than is wanted.
        let rest = u64::from(PageSizes::SLOTS_MAX) * table.slot_bytes - 1;
        let pages = take_pages(device, table, &heaps, wanted.saturating_add(rest), details);
        table.leaving.extend(pages);
        outcome = old_mappings::undo_some(device, table, details);
    }
    share.settle(table.bytes_held(), table.bytes_shared(), free_bytes(device, table, &heaps));
    outcome
}
