//! Giving pages back: to the driver when memory is trimmed, and those of released pools to everybody else.

use std::collections::BTreeMap;
use std::sync::Arc;

use warpool_driver::StreamId;

use super::device::PagedDevice;
use super::heap::{FreeBlock, Heap};
use super::old_mappings::{self, unmap};
use super::pages::{PageId, PageTable, Slot};
use super::pending::PendingFrees;
use super::physical::release_physical;
use super::pools::Takeable;
use super::segments;
use super::stream_tail::Tail;
use crate::memory::report::EntryDetails;
use crate::memory::stream_fence::{self, Recorded};
use crate::memory::{Action, MemPoolId};
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
    (pool, heaps): (MemPoolId, &[u32]),
    details: &EntryDetails,
) -> Result<()> {
    let mut streams = lock(&device.pools).used_by(pool);
    let mut events = Vec::new();
    for &stream in &streams {
        match stream_fence::record(&PendingFrees::new(device, details), stream)? {
            Recorded::Fenced(event) => events.push(Arc::new(event)),
            Recorded::AlreadyDone => {}
            Recorded::CaptureActive => return Ok(()),
        }
    }
    for &heap in heaps {
        match device.tail_of(heap, details)? {
            Tail::Done => {}
            Tail::Event { event, is_new } => {
                events.push(event);
                streams.extend(is_new.then(|| device.heaps.get(heap).lock().stream));
            }
            Tail::Unknown => {
                lock(&device.pools).set_used_anywhere(pool);
                return Ok(());
            }
            Tail::CaptureActive => return Ok(()),
        }
    }
    let bystanders = old_mappings::bystander_events(device, table, &streams, details);
    events.extend(bystanders.into_iter().map(|(_, event)| event));
    lock(&device.pools).set_passed(pool, events);
    Ok(())
}

/// Retires a heap of the default pool in which nothing is allocated, and whose work is done: its pages belong to no
/// stream any more. They stay mapped, so that the next owner of the heap needs no driver call for them.
pub(super) fn retire_idle(device: &PagedDevice, table: &mut PageTable, number: u32, details: &EntryDetails) {
    {
        let mut heap = device.heaps.get(number).lock();
        if !heap.is_idle() {
            return;
        }
        heap.merge_recent();
        for (page, _) in take_free(device, table, &mut heap, u64::MAX, details) {
            table.put_spare(page);
        }
    }
    device.retire_heap(table, number);
}

/// Takes all pages out of a heap in which nothing is allocated, and makes it available for another pool.
fn empty_heap(device: &PagedDevice, table: &mut PageTable, number: u32, details: &EntryDetails) -> Result<()> {
    {
        let mut heap = device.heaps.get(number).lock();
        if !heap.is_idle() {
            // A thread that was at it when the pool was released has allocated once more.
            return Ok(());
        }
        heap.merge_recent();
        for (page, _) in take_free(device, table, &mut heap, u64::MAX, details) {
            table.put_spare(page);
        }
    }
    for (page, slot, _) in table.mappings_of(number) {
        unmap(device, table, page, slot)?;
    }
    if table.is_unmapped(number) {
        device.retire_heap(table, number);
    }
    Ok(())
}

/// Takes whole pages of free blocks, of the largest first, up to `most` bytes: they belong to nothing any more.
fn take_free(
    device: &PagedDevice,
    table: &mut PageTable,
    heap: &mut Heap,
    most: u64,
    details: &EntryDetails,
) -> Vec<(PageId, Slot)> {
    let (mut taken, mut left) = (Vec::new(), most);
    for FreeBlock { id: block, .. } in heap.blocks_with_pages(table.slot_bytes).into_iter().rev() {
        let pages: Vec<_> = table.pages_in(heap, block).collect();
        for (slot, page) in pages.into_iter().rev() {
            if left == 0 {
                return taken;
            }
            left = left.saturating_sub(table.page_bytes(page));
            let (start, bytes) = (table.addr(slot), table.page_bytes(page));
            heap.make_hole(block, start, start + bytes);
            table.index.note_changed(table.range(slot.range).heap);
            table.set_home(page, None);
            device.record(Action::SegmentUnmap, start, bytes, heap, details);
            taken.push((page, slot));
        }
    }
    taken
}

/// What was waited for, and whether a capture forbade it.
#[derive(Default)]
pub(super) struct Waited {
    heaps: BTreeMap<u32, bool>,
    streams: BTreeMap<StreamId, bool>,
    bystanders: bool,
}

impl Waited {
    /// Waits for the work that may use the memory of a heap now.
    fn anew(&mut self, device: &PagedDevice, heap: u32, details: &EntryDetails) -> Result<bool> {
        self.heaps.remove(&heap);
        self.for_heap(device, heap, details)
    }

    fn for_heap(&mut self, device: &PagedDevice, heap: u32, details: &EntryDetails) -> Result<bool> {
        if let Some(&waited) = self.heaps.get(&heap) {
            return Ok(waited);
        }
        let waited = device.wait_for_heap(heap, details)?;
        self.heaps.insert(heap, waited);
        Ok(waited)
    }

    /// Waits for the work that a stream holds now which uses a pool's memory.
    fn for_user(&mut self, device: &PagedDevice, stream: StreamId, details: &EntryDetails) -> Result<bool> {
        if let Some(&waited) = self.streams.get(&stream) {
            return Ok(waited);
        }
        let waited = stream_fence::wait_for_stream(&PendingFrees::new(device, details), stream)?;
        self.streams.insert(stream, waited);
        Ok(waited)
    }

    /// Waits for the bystanders that can be waited for.
    fn for_bystanders(&mut self, device: &PagedDevice, table: &mut PageTable, details: &EntryDetails) -> Result<()> {
        if !self.bystanders {
            old_mappings::wait_for_bystanders(device, table, details)?;
            self.bystanders = true;
        }
        Ok(())
    }
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
    let (mut waited, before) = (Waited::default(), table.reserved_all().current);
    let excess = |table: &PageTable| table.bytes_awake().saturating_sub(target);
    let mut outcome = Ok(());
    if pool.is_default() {
        // Those that belong nowhere first: nobody can use them without a driver call.
        outcome = outcome.and(release_leaving(device, table, details));
        for page in table.spare_pages().collect::<Vec<_>>() {
            if excess(table) == 0 {
                break;
            }
            table.take_spare_page(page);
            let released = release_page(device, table, page, &mut waited, details);
            if !matches!(released, Ok(true)) {
                table.put_spare(page);
            }
            outcome = outcome.and(released.map(drop));
        }
    }
    for number in 0..device.heaps.len() {
        if excess(table) == 0 {
            break;
        }
        let of_pool = device.heaps.get(number).lock().pool;
        let concerned = of_pool == pool || pool.is_default();
        let Takeable::After(users) = lock(&device.pools).takeable(of_pool) else { continue };
        if concerned && table.has_mappings(number) {
            let most = if target == 0 { u64::MAX } else { excess(table) };
            release_heap(device, table, number, (&users, most), &mut waited, details)?;
        }
    }
    table.forget_takes();
    outcome?;
    Ok(before.saturating_sub(table.reserved_all().current))
}

/// Waits for all work that may use the pages that are to leave, and returns them to the driver.
pub(super) fn release_leaving(device: &PagedDevice, table: &mut PageTable, details: &EntryDetails) -> Result<()> {
    let (mut waited, mut outcome) = (Waited::default(), Ok(()));
    for page in std::mem::take(&mut table.leaving) {
        let released = release_page(device, table, page, &mut waited, details);
        if !matches!(released, Ok(true)) {
            table.leaving.push(page);
        }
        outcome = outcome.and(released.map(drop));
    }
    outcome
}

/// Unmaps and releases free pages of a heap, up to `most` bytes, once its stream and other `users` have passed.
fn release_heap(
    device: &PagedDevice,
    table: &mut PageTable,
    number: u32,
    (users, most): (&[StreamId], u64),
    waited: &mut Waited,
    details: &EntryDetails,
) -> Result<()> {
    let taken = {
        let mut heap = device.heaps.get(number).lock();
        heap.merge_recent();
        take_free(device, table, &mut heap, most, details)
    };
    // After they were taken: other threads may have used and freed the memory since an earlier wait.
    let mut passed = waited.anew(device, number, details);
    for &user in users {
        waited.streams.remove(&user);
        passed = passed.and_then(|passed| Ok(waited.for_user(device, user, details)? && passed));
    }
    let mut outcome = passed.clone().map(drop);
    for (page, home) in taken {
        let released = match passed {
            Ok(true) => release_page(device, table, page, waited, details),
            _ => Ok(false),
        };
        if !matches!(released, Ok(true)) {
            put_back(device, table, number, page, home, details);
        }
        outcome = outcome.and(released.map(drop));
    }
    if !matches!(passed, Ok(true)) {
        return outcome;
    }
    if most < u64::MAX {
        return outcome;
    }
    waited.for_bystanders(device, table, details)?;
    // Old mappings of pages that are in use elsewhere.
    for (page, slot, is_home) in table.mappings_of(number) {
        if !is_home {
            outcome = outcome.and(unmap(device, table, page, slot));
        }
    }
    outcome
}

/// A page could not be released: it belongs to its home again, or is a spare one if it is not mapped there any more.
fn put_back(
    device: &PagedDevice,
    table: &mut PageTable,
    number: u32,
    page: PageId,
    home: Slot,
    details: &EntryDetails,
) {
    if !table.page(page).is_mapped_at(home) {
        table.put_spare(page);
        return;
    }
    let (start, bytes, kind) = (table.addr(home), table.page_bytes(page), table.range(home.range).kind);
    table.set_home(page, Some(home));
    table.index.note_changed(number);
    let mut heap = device.heaps.get(number).lock();
    heap.end_hole(kind, start, start + bytes);
    device.record(Action::SegmentMap, start, bytes, &heap, details);
}

/// Unmaps a page everywhere and releases it. `false` if a capture forbids to wait for a stream that may use it.
pub(super) fn release_page(
    device: &PagedDevice,
    table: &mut PageTable,
    page: PageId,
    waited: &mut Waited,
    details: &EntryDetails,
) -> Result<bool> {
    for slot in table.page(page).mapped.clone() {
        if !waited.for_heap(device, table.range(slot.range).heap, details)? {
            return Ok(false);
        }
    }
    waited.for_bystanders(device, table, details)?;
    // The home last: if one before it fails the page still has it.
    for slot in table.page(page).mapped.clone() {
        unmap(device, table, page, slot)?;
    }
    let physical = table.remove(page);
    table.contention.forget();
    release_physical(device, table, physical);
    Ok(true)
}
