//! Giving pages back: to the driver when memory is trimmed, and those of released pools to everybody else.

use std::collections::BTreeSet;

use super::device::PagedDevice;
use super::ids::{HeapId, PageId};
use super::old_mappings::{self, Recording, release_unused, unmap};
use super::pages::PageTable;
use super::pools::Takeable;
use super::segments;
use super::sharing;
use super::slot::Slot;
use super::take::{put_back, take_free};
use crate::memory::MemPoolId;
use crate::memory::report::EntryDetails;
use crate::{Result, lock};

/// Takes the pages of released pools in which nothing is allocated any more, as far as all work that may use them has
/// passed. Waits for nothing.
pub(super) fn poll_released(device: &PagedDevice, table: &mut PageTable, details: &EntryDetails) -> Result<()> {
    if !lock(&device.pools).has_released() {
        return Ok(());
    }
    let released = lock(&device.pools).released_heaps();
    for (pool, heaps) in released {
        if heaps.iter().any(|&heap| !device.heaps.get(heap).lock().is_idle()) {
            continue;
        }
        let known = lock(&device.pools).passed(pool);
        let Some(events) = known else {
            record_passed(device, table, (pool, &heaps), details)?;
            continue;
        };
        let _safe = device.capture_safe()?;
        let mut all = true;
        for event in &events {
            all &= device.driver().event_query(event.id())? || crate::defect::Defect::ReleasedPagesTooEarly.is_on();
        }
        if all {
            for heap in heaps {
                empty_heap(device, table, heap, details)?;
            }
        }
    }
    Ok(())
}

/// Waits for all work of the device if released pools may be in use on streams that are not known; then their pages are
/// as free as those of other released pools. Not while a capture is active, which the wait would invalidate.
pub(super) fn wait_for_unknown_users(device: &PagedDevice) -> Result<()> {
    let pools = lock(&device.pools).released_used_anywhere();
    if pools.is_empty() || device.has_captures() {
        return Ok(());
    }
    // Work that begins after this cannot use them: they were released before.
    if let Some(_held_off) = device.instance().hold_off_captures() {
        device.driver().device_synchronize(device.id)?;
        let mut table = lock(&device.pools);
        pools.into_iter().for_each(|pool| table.clear_use_anywhere(pool));
    }
    Ok(())
}

/// Records events after all work that may use the memory of a released pool.
fn record_passed(
    device: &PagedDevice,
    table: &mut PageTable,
    (pool, heaps): (MemPoolId, &[HeapId]),
    details: &EntryDetails,
) -> Result<()> {
    let users = lock(&device.pools).used_by(pool);
    if users.iter().any(|&stream| !device.instance().may_name(stream)) {
        // Their owner may have destroyed them since the pool was released.
        lock(&device.pools).set_used_anywhere(pool);
        return Ok(());
    }
    match old_mappings::record_users(device, table, heaps, &users, details)? {
        Recording::Done(events) => lock(&device.pools).set_passed(pool, events),
        Recording::Unknown => lock(&device.pools).set_used_anywhere(pool),
        Recording::Forbidden => {}
    }
    Ok(())
}

/// Retires a heap of the default pool in which nothing is allocated, and whose work is done: its pages belong to no
/// stream any more. They stay mapped, so that the next owner of the heap needs no driver call for them. `false` if
/// something is allocated.
pub(super) fn retire_idle(device: &PagedDevice, table: &mut PageTable, number: HeapId, details: &EntryDetails) -> bool {
    let is_idle = make_pages_spare(device, table, number, details);
    if is_idle {
        device.retire_heap(table, number);
    }
    is_idle
}

/// The pages of a heap in which nothing is allocated belong nowhere from then on. `false` if something is allocated.
fn make_pages_spare(device: &PagedDevice, table: &mut PageTable, number: HeapId, details: &EntryDetails) -> bool {
    if !device.heaps.get(number).lock().is_idle() {
        // A thread that was at it when its pool was released has allocated once more.
        return false;
    }
    for (page, _) in take_free(device, table, number, details, |_, _, _| true) {
        table.put_spare(page);
    }
    device.heaps.get(number).lock().is_idle()
}

/// Takes all pages out of a heap in which nothing is allocated, and makes it available for another pool.
fn empty_heap(device: &PagedDevice, table: &mut PageTable, number: HeapId, details: &EntryDetails) -> Result<()> {
    if !make_pages_spare(device, table, number, details) {
        return Ok(());
    }
    for (page, slot, _) in table.mappings_of(number) {
        unmap(device, table, page, slot)?;
    }
    if table.is_unmapped(number) {
        device.retire_heap(table, number);
    }
    Ok(())
}

/// Returns free memory until no more than `target` bytes are reserved: pages to the driver, segments to their sources.
/// That of one pool, or for the default pool also that of all released ones. Returns how many bytes. To be called
/// without any lock.
pub(super) fn release_all(device: &PagedDevice, pool: MemPoolId, target: u64, details: &EntryDetails) -> Result<u64> {
    let segments = segments::release(device, pool, target, details);
    let pages = release(device, pool, target, details);
    device.retire_empty();
    device.drop_removed();
    Ok(segments? + pages?)
}

/// Returns free pages to the driver until no more than `target` bytes are reserved: those of one pool, or for the
/// default pool also those of all released ones. Returns how many bytes.
fn release(device: &PagedDevice, pool: MemPoolId, target: u64, details: &EntryDetails) -> Result<u64> {
    let mut table = lock(&device.pages);
    let table = &mut *table;
    old_mappings::undo_some(device, table, details)?;
    let mut outcome = if pool.is_default() { release_leaving(device, table, details) } else { Ok(()) };
    let (before, mut left) = (table.reserved_all().current, table.bytes_awake().saturating_sub(target));
    let mut is_wanted = |table: &PageTable, page: PageId| {
        let is_wanted = left > 0;
        left = left.saturating_sub(if is_wanted { table.page_bytes(page) } else { 0 });
        is_wanted
    };
    // Those that belong nowhere first: nobody can use them without a driver call.
    let spare: Vec<PageId> = if pool.is_default() { table.spare_pages().collect() } else { Vec::new() };
    let spare = spare.into_iter().filter(|&page| is_wanted(table, page));
    let mut pages: Vec<(PageId, Option<Slot>)> = spare.map(|page| (page, None)).collect();
    for &(page, _) in &pages {
        table.take_spare_page(page);
    }
    let mut heaps = Vec::new();
    for (number, cell) in device.heaps.iter() {
        let of_pool = cell.lock().pool;
        let is_takeable = matches!(lock(&device.pools).takeable(of_pool), Takeable::After(_));
        if is_takeable && (of_pool == pool || pool.is_default()) && table.has_mappings(number) {
            let taken = take_free(device, table, number, details, |table, page, _| is_wanted(table, page));
            pages.extend(taken.into_iter().map(|(page, slot)| (page, Some(slot))));
            heaps.push(number);
        }
    }
    let (kept, released) = release_pages(device, table, pages, details);
    kept.into_iter().for_each(|(page, from)| put_back(device, table, page, from, details));
    outcome = outcome.and(released);
    for number in heaps.into_iter().filter(|_| target == 0) {
        outcome = outcome.and(unmap_old(device, table, number, details));
    }
    table.forget_takes();
    outcome = outcome.and(sharing::give(device, table, details));
    outcome?;
    Ok(before.saturating_sub(table.reserved_all().current))
}

/// Undoes the old mappings in a heap, of pages that are in use elsewhere, once all work that may use them has passed.
fn unmap_old(device: &PagedDevice, table: &mut PageTable, number: HeapId, details: &EntryDetails) -> Result<()> {
    let mut old = table.mappings_of(number);
    old.retain(|&(_, _, is_home)| !is_home);
    if old.is_empty() || !old_mappings::wait_for_users(device, number, details)? {
        return Ok(());
    }
    old_mappings::wait_for_bystanders(device, table, details)?;
    old.into_iter().try_for_each(|(page, slot, _)| unmap(device, table, page, slot))
}

/// Waits for all work that may use the pages that are to leave, and returns them to the driver.
pub(super) fn release_leaving(device: &PagedDevice, table: &mut PageTable, details: &EntryDetails) -> Result<()> {
    let pages = std::mem::take(&mut table.leaving).into_iter().map(|page| (page, None)).collect();
    let (kept, released) = release_pages(device, table, pages, details);
    table.leaving.extend(kept.into_iter().map(|(page, _)| page));
    released
}

/// Pages that belong nowhere, and where each was taken from.
type Homeless = Vec<(PageId, Option<Slot>)>;

/// Waits for all work that may use pages that belong nowhere, and returns them to the driver. Returns those that it
/// keeps: where a capture forbids to wait, or a call failed.
pub(super) fn release_pages(
    device: &PagedDevice,
    table: &mut PageTable,
    pages: Homeless,
    details: &EntryDetails,
) -> (Homeless, Result<()>) {
    let (mut kept, mut outcome, mut passed) = (Homeless::new(), Ok(()), BTreeSet::new());
    let mapped = pages.iter().flat_map(|&(page, _)| &table.page(page).mapped);
    let heaps: BTreeSet<HeapId> = mapped.map(|slot| table.range(slot.range).heap).collect();
    for heap in heaps {
        match old_mappings::wait_for_users(device, heap, details) {
            Ok(has_passed) => passed.extend(has_passed.then_some(heap)),
            Err(error) => outcome = outcome.and(Err(error)),
        }
    }
    if !pages.is_empty()
        && let Err(error) = old_mappings::wait_for_bystanders(device, table, details)
    {
        return (pages, Err(error));
    }
    for (page, from) in pages {
        let is_done = table.page(page).mapped.iter().all(|slot| passed.contains(&table.range(slot.range).heap));
        if is_done {
            outcome = outcome.and(release_unused(device, table, page));
        }
        kept.extend(table.exists(page).then_some((page, from)));
    }
    (kept, outcome)
}
