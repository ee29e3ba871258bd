//! Old mappings: pages that were taken from an address stay mapped there for a while, so that they can be taken back
//! without a driver call. A page has at most sixteen mappings; the oldest is undone once the stream that used it has
//! passed.

use std::collections::BTreeSet;
use std::sync::Arc;

use warpool_driver::{DevicePtr, StreamId};

use super::device::PagedDevice;
use super::ids::HeapId;
use super::pages::{PageId, PageTable, Slot};
use super::pending::PendingFrees;
use super::stream_tail::Tail;
use super::take::release_physical;
use super::used_heaps::look_at_used;
use crate::defect::Defect;
use crate::memory::report::EntryDetails;
use crate::memory::stream_fence::{self, Recorded};
use crate::{PooledEvent, Result, lock};

/// At how many addresses a page may be mapped. A program whose sizes come back needs about as many as it has sizes.
const MAPPED_MAX: usize = 16;

/// How often events are recorded after takes from a heap before the first of them have passed. Takes in between get
/// theirs after that: an old mapping then stays a little longer, which costs addresses, not memory.
const OUTSTANDING_MAX: usize = 2;

/// If a page is mapped at too many addresses, leaves the oldest mapping to [`undo_some`].
pub(super) fn retire_oldest(table: &mut PageTable, page: PageId) {
    let Some(slot) = oldest(table, page) else { return };
    if !table.old.contains(&(page, slot)) {
        table.old.push_back((page, slot));
    }
}

fn oldest(table: &PageTable, page: PageId) -> Option<Slot> {
    let page = table.page(page);
    let mut old = page.mapped.iter().copied().filter(|&slot| Some(slot) != page.home);
    old.next().filter(|_| page.mapped.len() > MAPPED_MAX)
}

/// The streams whose work may use the addresses of a heap beside its own. `None` if captured graphs may: their replays
/// use every address that the captures used, so mappings stay while the pool is in use.
fn users_of(device: &PagedDevice, heap: HeapId) -> Option<Vec<StreamId>> {
    let pool = device.heaps.get(heap).lock().pool;
    if pool.is_default() {
        return Some(Vec::new());
    }
    let pools = lock(&device.pools);
    (!pools.has_graphs(pool)).then(|| pools.used_by(pool))
}

/// Events after the work of bystanders, but for some streams.
pub(super) fn bystander_events(
    device: &PagedDevice,
    table: &mut PageTable,
    except: &[StreamId],
    details: &EntryDetails,
) -> Vec<(StreamId, Arc<PooledEvent>)> {
    let record = |heap| device.bystander_tail(heap, details);
    let is_done = |event: &PooledEvent| {
        let _safe = device.capture_safe()?;
        Ok(device.driver().event_query(event.id())?)
    };
    table.bystanders.events(except, record, is_done)
}

/// Records events after all work that used the pages taken from a heap so far, and after that of bystanders. While a
/// capture forbids it, or enough are recorded, that is left to a later call.
pub(super) fn record_takes(
    device: &PagedDevice,
    table: &mut PageTable,
    heap: HeapId,
    details: &EntryDetails,
) -> Result<()> {
    if table.takes_to_record(heap).is_none_or(|outstanding| outstanding >= OUTSTANDING_MAX) {
        return Ok(());
    }
    let Some(users) = users_of(device, heap) else { return Ok(()) };
    if let Recording::Done(events) = record_users(device, table, &[heap], &users, details)? {
        table.takes_recorded(heap, events);
    }
    Ok(())
}

/// What came of recording events.
pub(super) enum Recording {
    Done(Vec<Arc<PooledEvent>>),
    /// The last work of a stream that may be destroyed is not known.
    Unknown,
    /// A capture forbids it.
    Forbidden,
}

/// Records events after all work that may use the memory of these heaps of a pool: their streams', other users', and
/// bystanders'.
pub(super) fn record_users(
    device: &PagedDevice,
    table: &mut PageTable,
    heaps: &[HeapId],
    users: &[StreamId],
    details: &EntryDetails,
) -> Result<Recording> {
    let (mut events, mut known) = (Vec::new(), users.to_vec());
    for &heap in heaps {
        match device.tail_of(heap, details)? {
            Tail::Done => {}
            Tail::Event { event, is_new } => {
                events.push(event);
                known.extend(is_new.then(|| device.heaps.get(heap).lock().stream));
            }
            Tail::Unknown => return Ok(Recording::Unknown),
            Tail::CaptureActive => return Ok(Recording::Forbidden),
        }
    }
    for &stream in users {
        match stream_fence::record(&PendingFrees::new(device, details), stream)? {
            Recorded::Fenced(event) => events.push(Arc::new(event)),
            Recorded::AlreadyDone => {}
            Recorded::CaptureActive => return Ok(Recording::Forbidden),
        }
    }
    events.extend(bystander_events(device, table, &known, details).into_iter().map(|(_, event)| event));
    Ok(Recording::Done(events))
}

/// Waits for all work that used the pages taken from a heap, so that all its free addresses can be used. Before a
/// request would run out of memory. Nothing happens if a capture forbids to wait.
pub(super) fn wait(device: &PagedDevice, table: &mut PageTable, heap: HeapId, details: &EntryDetails) -> Result<()> {
    let has_old = table.mappings_of(heap).iter().any(|&(_, _, is_home)| !is_home);
    if has_old && wait_for_users(device, heap, details)? {
        wait_for_bystanders(device, table, details)?;
        table.takes_passed(heap);
    }
    Ok(())
}

/// Waits for the work that may use the addresses of a heap, but for bystanders'. `false` if captured graphs may use
/// them, or a capture forbids to wait.
pub(super) fn wait_for_users(device: &PagedDevice, heap: HeapId, details: &EntryDetails) -> Result<bool> {
    let Some(users) = users_of(device, heap) else { return Ok(false) };
    let mut waited = device.wait_for_heap(heap, details)?;
    for stream in users {
        waited = waited && stream_fence::wait_for_stream(&PendingFrees::new(device, details), stream)?;
    }
    Ok(waited)
}

/// Waits for bystanders.
pub(super) fn wait_for_bystanders(device: &PagedDevice, table: &mut PageTable, details: &EntryDetails) -> Result<()> {
    look_at_used(device, table);
    for (_, event) in bystander_events(device, table, &[], details) {
        let _safe = device.capture_safe()?;
        device.driver().event_synchronize(event.id())?;
    }
    table.bystanders.all_done();
    Ok(())
}

/// Reads how far the streams have come that may use the addresses of a heap.
pub(super) fn poll(device: &PagedDevice, table: &mut PageTable, heap: HeapId) -> Result<()> {
    let _safe = device.capture_safe()?;
    Ok(table.poll_takes(heap, |event| device.driver().event_query(event.id()))?)
}

/// Undoes old mappings whose streams have passed, and retries what failed before.
pub(super) fn undo_some(device: &PagedDevice, table: &mut PageTable, details: &EntryDetails) -> Result<()> {
    for (slot, slots) in std::mem::take(&mut table.broken) {
        let bytes = u64::from(slots) * table.slot_bytes;
        match device.driver().vm_unmap(DevicePtr(table.addr(slot)), bytes) {
            Ok(()) => table.set_repaired(slot, slots),
            Err(_) => table.broken.push((slot, slots)),
        }
    }
    let unreturned = std::mem::take(&mut table.to_release);
    if !unreturned.is_empty() {
        device.will_hold(table.bytes_held());
    }
    for physical in unreturned {
        release_physical(device, table, physical);
    }
    while let Some(&(page, slot)) = table.old.front() {
        let heap = table.range(slot.range).heap;
        if users_of(device, heap).is_none() {
            // It stays; if the page moves on once the pool is released, it is the oldest again.
            table.old.pop_front();
            continue;
        }
        if !table.is_take_recorded(page, slot) {
            record_takes(device, table, heap, details)?;
        }
        poll(device, table, heap)?;
        if !table.has_passed(page, slot) {
            break;
        }
        unmap(device, table, page, slot)?;
    }
    release_leaving(device, table, details)
}

/// Returns pages to the driver that are to leave, as far as all work that used them is done.
fn release_leaving(device: &PagedDevice, table: &mut PageTable, details: &EntryDetails) -> Result<()> {
    let slots = |table: &PageTable, page: &PageId| table.page(*page).mapped.clone();
    let mapped: Vec<Slot> = table.leaving.iter().flat_map(|page| slots(table, page)).collect();
    let heaps: BTreeSet<HeapId> = mapped.iter().map(|slot| table.range(slot.range).heap).collect();
    for &heap in &heaps {
        record_takes(device, table, heap, details)?;
        poll(device, table, heap)?;
    }
    let in_graphs: BTreeSet<HeapId> = heaps.into_iter().filter(|&heap| users_of(device, heap).is_none()).collect();
    for page in std::mem::take(&mut table.leaving) {
        let is_done = |slot: &Slot| !in_graphs.contains(&table.range(slot.range).heap) && table.has_passed(page, *slot);
        let is_done = table.page(page).mapped.iter().all(is_done) || Defect::IdlePagesLeaveEarly.is_on();
        if let Err(error) = if is_done { release_unused(device, table, page) } else { Ok(()) } {
            tracing::warn!(%error, "a page that is to leave could not be unmapped; it is retried");
        }
        if table.exists(page) {
            table.leaving.push(page);
        }
    }
    Ok(())
}

/// Unmaps a page that no work uses any more, and returns it to the driver.
pub(super) fn release_unused(device: &PagedDevice, table: &mut PageTable, page: PageId) -> Result<()> {
    for slot in table.page(page).mapped.clone() {
        unmap(device, table, page, slot)?;
    }
    let physical = table.remove(page);
    device.will_hold(table.bytes_held());
    release_physical(device, table, physical);
    Ok(())
}

/// Undoes a mapping that no stream uses any more.
pub(super) fn unmap(device: &PagedDevice, table: &mut PageTable, page: PageId, slot: Slot) -> Result<()> {
    let (addr, bytes) = (table.addr(slot), table.page_bytes(page));
    device.driver().vm_unmap(DevicePtr(addr), bytes)?;
    table.set_unmapped(page, slot);
    Ok(())
}
