//! Old mappings: pages that were taken from an address stay mapped there for a while, so that they can be taken back
//! without a driver call. A page has only so many; the oldest is undone once the stream that used it has passed.

use std::sync::Arc;

use warpool_driver::DevicePtr;

use super::device::PagedDevice;
use super::pages::{OldMapping, PageId, PageTable, Slot};
use super::pending::PendingFrees;
use super::physical::release_physical;
use crate::Result;
use crate::memory::report::EntryDetails;
use crate::memory::stream_fence::{self, Recorded};

/// At how many addresses a page may be mapped.
const MAPPED_MAX: usize = 4;

/// If a page is mapped at too many addresses, leaves the oldest mapping to [`undo_some`].
pub(super) fn retire_oldest(
    device: &PagedDevice,
    table: &mut PageTable,
    page: PageId,
    details: &EntryDetails,
) -> Result<()> {
    if table.page(page).mapped.len() <= MAPPED_MAX {
        return Ok(());
    }
    let home = table.page(page).home;
    let queued = |table: &PageTable, slot: Slot| table.old.iter().any(|old| old.page == page && old.slot == slot);
    let oldest = table.page(page).mapped.iter().copied().find(|&slot| Some(slot) != home);
    let Some(slot) = oldest.filter(|&slot| !queued(table, slot)) else { return Ok(()) };
    let stream = device.heaps.get(table.range(slot.range).heap).lock().stream;
    let passed = match stream_fence::record(&PendingFrees::new(device, details), stream)? {
        Recorded::Fenced(event) => Some(Arc::new(event)),
        Recorded::AlreadyDone => None,
        Recorded::CaptureActive => return Ok(()),
    };
    table.old.push_back(OldMapping { page, slot, passed });
    Ok(())
}

/// Undoes old mappings whose streams have passed, and retries what failed before.
pub(super) fn undo_some(device: &PagedDevice, table: &mut PageTable) -> Result<()> {
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
    if table.old.is_empty() {
        return Ok(());
    }
    let _safe = device.capture_safe()?;
    while let Some(old) = table.old.front() {
        // The page may have been taken back meanwhile, or be gone.
        let is_old = table.is_old_mapping(old.page, old.slot);
        if is_old {
            if let Some(event) = &old.passed
                && !device.driver().event_query(event.id())?
            {
                break;
            }
            unmap(device, table, old.page, old.slot)?;
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
