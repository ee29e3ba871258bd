//! Idle decay: pages that nobody needed for `idle_decay_ms` return to the driver, a part at a time.
//!
//! What was needed is the highest number of active bytes, and what was in pages beside them (`needs.rs`): the rest was
//! idle all that time. Which pages leave is another question: any that are free, spare ones first, then those of the
//! heaps that were used longest ago. So a program that repeats itself keeps what its iterations need, and loses what
//! only an earlier phase needed.
//!
//! Nothing is waited for: a page leaves once the streams that used it have passed (`old_mappings.rs`), at once or in a
//! later call. The hot path takes no part: requests that need pages do this, and whoever calls `release_idle`.

use std::time::Duration;

use super::device::PagedDevice;
use super::ids::{HeapId, PageId};
use super::old_mappings;
use super::pages::PageTable;
use super::pools::Takeable;
use super::sharing;
use super::take::take_free;
use super::used_heaps::look_at_used;
use crate::memory::report::EntryDetails;
use crate::{Result, lock};

/// Of what is idle, this part leaves in a slice of time, but at least [`PART_MIN`].
const PART: u64 = 4;
const PART_MIN: u64 = 64 << 20;

/// As [`decay`], and returns what streams have passed by now. Returns how many bytes. To be called without any lock.
pub(super) fn release_idle(device: &PagedDevice, details: &EntryDetails) -> Result<u64> {
    if device.settings().idle_decay_ms.is_none() && device.card.get().is_none() {
        return Ok(0);
    }
    let mut table = lock(&device.pages);
    let table = &mut *table;
    let before = table.bytes_of_pages();
    look_at_used(device, table);
    decay(device, table, details);
    old_mappings::undo_some(device, table, details)?;
    sharing::give(device, table, details)?;
    Ok(before.saturating_sub(table.bytes_of_pages()))
}

/// If a slice of time is over, lets a part of the pages leave that were idle for long enough. The caller undoes their
/// mappings.
pub(super) fn decay(device: &PagedDevice, table: &mut PageTable, details: &EntryDetails) {
    let Some(millis) = device.settings().idle_decay_ms else { return };
    let (window, now) = (Duration::from_millis(millis), device.driver().now());
    if !table.needs.is_due(now, window) {
        return;
    }
    let heaps = idle_first(device, table);
    let free = free_bytes(device, table, &heaps);
    let (active, active_peak) = device.with_totals(|totals, _| totals.take_active_peak());
    let held = table.bytes_staying();
    table.needs.note((held - free).saturating_add(active_peak - active));
    let idle = held.saturating_sub(table.needs.end_slice(now, window));
    let part = (idle / PART).max(idle.min(PART_MIN));
    let leaving = take_pages(device, table, &heaps, part, details);
    table.leaving.extend(leaving);
}

/// The heaps whose free pages may be taken, the one that was used longest ago first.
pub(super) fn idle_first(device: &PagedDevice, table: &PageTable) -> Vec<HeapId> {
    let is_takeable = |number: &HeapId| {
        let pool = device.heaps.get(*number).lock().pool;
        matches!(lock(&device.pools).takeable(pool), Takeable::After(_))
    };
    let mut heaps: Vec<HeapId> = table.heaps_with_free_pages().filter(is_takeable).collect();
    heaps.sort_by_key(|&number| (table.last_use(number), number));
    heaps
}

/// The bytes of spare pages, and of those that are free as a whole in some heaps.
pub(super) fn free_bytes(device: &PagedDevice, table: &PageTable, heaps: &[HeapId]) -> u64 {
    let bytes = |page: PageId| table.page_bytes(page);
    let in_heap = |&number: &HeapId| {
        let mut heap = device.heaps.get(number).lock();
        heap.merge_recent();
        table.free_pages(&heap).map(bytes).sum::<u64>()
    };
    table.spare_pages().map(bytes).sum::<u64>() + heaps.iter().map(in_heap).sum::<u64>()
}

/// Takes free pages of at most `bytes` in all: they belong nowhere from then on.
pub(super) fn take_pages(
    device: &PagedDevice,
    table: &mut PageTable,
    heaps: &[HeapId],
    bytes: u64,
    details: &EntryDetails,
) -> Vec<PageId> {
    let mut left = bytes;
    let mut is_wanted = |table: &PageTable, page: PageId| {
        let rest = left.checked_sub(table.page_bytes(page));
        left = rest.unwrap_or(left);
        rest.is_some()
    };
    let spare: Vec<PageId> = table.spare_pages().collect();
    let mut taken: Vec<PageId> = spare.into_iter().filter(|&page| is_wanted(table, page)).collect();
    for &page in &taken {
        table.take_spare_page(page);
    }
    for &number in heaps {
        let of_heap = take_free(device, table, number, details, |table, page, _| is_wanted(table, page));
        taken.extend(of_heap.into_iter().map(|(page, _)| page));
    }
    taken
}
