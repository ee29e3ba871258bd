//! Old mappings: pages that were taken from an address stay mapped there for a while, so that they can be taken back
//! without a driver call. A page has only so many; the oldest is undone once the stream that used it has passed.

use warpool_driver::{DevicePtr, EventId, StreamId};

use super::device::PagedDevice;
use super::pages::{PageId, PageTable, Slot};
use super::pending::PendingFrees;
use super::physical::release_physical;
use crate::memory::report::EntryDetails;
use crate::memory::stream_fence::{self, Recorded};
use crate::{Result, lock};

/// At how many addresses a page may be mapped. A program whose sizes come back needs about as many as it has sizes.
const MAPPED_MAX: usize = 16;

/// How often events are recorded behind takes from a heap before the first of them have passed. Takes in between get
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

/// The streams whose work may use the addresses of a heap. `None` if captured graphs may: their replays use every
/// address that the captures used, so mappings stay while the pool is in use.
fn users_of(device: &PagedDevice, heap: u32) -> Option<Vec<StreamId>> {
    let (stream, pool) = {
        let heap = device.heaps.get(heap).lock();
        (heap.stream, heap.pool)
    };
    if pool.is_default() {
        return Some(vec![stream]);
    }
    let pools = lock(&device.pools);
    (!pools.has_graphs(pool)).then(|| pools.used_by(pool).into_iter().chain([stream]).collect())
}

/// Records events behind all work that used the pages taken from a heap so far, and behind that of the other streams of
/// the device (`fill/order.rs` says why); returns the latter. While a capture forbids it, or enough are recorded, that
/// is left to a later call.
pub(super) fn record_takes(
    device: &PagedDevice,
    table: &mut PageTable,
    heap: u32,
    details: &EntryDetails,
) -> Result<Vec<(StreamId, EventId)>> {
    let mut bystanders = Vec::new();
    if !table.has_takes_to_record(heap) || table.takes_outstanding(heap) >= OUTSTANDING_MAX {
        return Ok(bystanders);
    }
    let Some(streams) = users_of(device, heap) else { return Ok(bystanders) };
    let owner = PendingFrees::new(device, details);
    let others: Vec<StreamId> = device.streams().into_iter().filter(|stream| !streams.contains(stream)).collect();
    let mut events = Vec::with_capacity(streams.len() + others.len());
    for &stream in &streams {
        match stream_fence::record(&owner, stream)? {
            Recorded::Fenced(event) => events.push(event),
            Recorded::AlreadyDone => {}
            Recorded::CaptureActive => return Ok(bystanders),
        }
    }
    bystanders.reserve(others.len());
    for stream in others {
        if let Some(event) = stream_fence::record_bystander(&owner, stream)? {
            bystanders.push((stream, event.id()));
            events.push(event);
        }
    }
    table.takes_recorded(heap, events);
    Ok(bystanders)
}

/// Waits for all work that used the pages taken from a heap, so that all its free addresses can be used. Before a
/// request would run out of memory. Nothing happens if a capture forbids to wait.
pub(super) fn wait(device: &PagedDevice, table: &mut PageTable, heap: u32, details: &EntryDetails) -> Result<()> {
    let has_old = table.mappings_of(heap).iter().any(|&(_, _, is_home)| !is_home);
    let Some(streams) = users_of(device, heap).filter(|_| has_old) else { return Ok(()) };
    for &stream in &streams {
        if !stream_fence::wait_for_stream(&PendingFrees::new(device, details), stream)? {
            return Ok(());
        }
    }
    wait_for_bystanders(device, &streams, details)?;
    table.takes_passed(heap);
    Ok(())
}

/// Waits for the other streams of the device that can be waited for.
pub(super) fn wait_for_bystanders(device: &PagedDevice, known: &[StreamId], details: &EntryDetails) -> Result<()> {
    for stream in device.streams().into_iter().filter(|stream| !known.contains(stream)) {
        if let Some(event) = stream_fence::record_bystander(&PendingFrees::new(device, details), stream)? {
            let _safe = device.capture_safe()?;
            device.driver().event_synchronize(event.id())?;
        }
    }
    Ok(())
}

/// Reads how far the streams have come that may use the addresses of a heap.
pub(super) fn poll(device: &PagedDevice, table: &mut PageTable, heap: u32) -> Result<()> {
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
    for physical in std::mem::take(&mut table.to_release) {
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
    Ok(())
}

/// Undoes a mapping that no stream uses any more.
pub(super) fn unmap(device: &PagedDevice, table: &mut PageTable, page: PageId, slot: Slot) -> Result<()> {
    let (addr, bytes) = (table.addr(slot), table.page_bytes(page));
    device.driver().vm_unmap(DevicePtr(addr), bytes)?;
    table.set_unmapped(page, slot);
    Ok(())
}
