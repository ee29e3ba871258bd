//! Old mappings: pages that were taken from an address stay mapped there for a while, so that they can be taken back
//! without a driver call. A page has only so many; the oldest is undone once the stream that used it has passed.

use warpool_driver::DevicePtr;

use super::device::PagedDevice;
use super::pages::{PageId, PageTable, Slot};
use super::pending::PendingFrees;
use super::physical::release_physical;
use crate::Result;
use crate::memory::report::EntryDetails;
use crate::memory::stream_fence::{self, Recorded};

/// At how many addresses a page may be mapped.
const MAPPED_MAX: usize = 4;

/// If a page is mapped at too many addresses, leaves the oldest mapping to [`undo_some`].
pub(super) fn retire_oldest(table: &mut PageTable, page: PageId) {
    let Some(slot) = oldest(table, page) else { return };
    if !table.old.contains(&(page, slot)) {
        table.old.push_back((page, slot));
    }
}

fn oldest(table: &PageTable, page: PageId) -> Option<Slot> {
    let page = table.page(page);
    let mut old = page.mapped_slots().into_iter().filter(|&slot| Some(slot) != page.home);
    old.next().filter(|_| page.mapped.len() > MAPPED_MAX)
}

/// Records an event behind all work that used the pages taken from a heap so far. While a capture forbids it, that is
/// left to a later call.
pub(super) fn record_takes(
    device: &PagedDevice,
    table: &mut PageTable,
    heap: u32,
    details: &EntryDetails,
) -> Result<()> {
    let stream = device.heaps.get(heap).lock().stream;
    match stream_fence::record(&PendingFrees::new(device, details), stream)? {
        Recorded::Fenced(event) => table.takes_recorded(heap, event),
        Recorded::AlreadyDone => table.takes_passed(heap),
        Recorded::CaptureActive => {}
    }
    Ok(())
}

/// Reads how far the stream of a heap has come.
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
        // The page may have been taken back meanwhile, or be gone.
        if table.is_old_mapping(page, slot) {
            let heap = table.range(slot.range).heap;
            if !table.is_take_recorded(page, slot) {
                record_takes(device, table, heap, details)?;
            }
            poll(device, table, heap)?;
            if !table.has_passed(page, slot) {
                break;
            }
            unmap(device, table, page, slot)?;
        }
        table.old.pop_front();
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
