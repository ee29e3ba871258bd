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
use super::idle_pages::{free_bytes, idle_first, take_pages};
use super::old_mappings;
use super::pages::PageTable;
use super::sharing;
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
