//! Where a block is mapped, for sharing it with other processes. Pages stay where a block is allocated.

use warpool_driver::DevicePtr;

use super::PagedAllocator;
use super::pages::{PageTable, Slot};
use crate::memory::MappedPart;
use crate::{Error, Result, lock};

impl PagedAllocator {
    /// The pages of the block that starts at `ptr`, by address. Empty if the block has none: it is in a pool with an
    /// upstream, or one whose blocks are whole segments.
    pub(super) fn mapped_pages(&self, ptr: DevicePtr) -> Result<Vec<MappedPart>> {
        let (device, allocation) = self.locate(ptr)?;
        let table = lock(&device.pages);
        let Some(range) = table.range_with(ptr.0) else { return Ok(Vec::new()) };
        let (mut slot, end) = (Slot { range, index: table.slot_index(range, ptr.0) }, ptr.0 + allocation.bytes);
        let mut parts = Vec::new();
        while table.addr(slot) < end {
            let part = part(&table, slot).ok_or(Error::UnknownPointer { ptr })?;
            slot.index = table.slot_index(range, part.ptr.0 + part.bytes);
            parts.push(part);
        }
        Ok(parts)
    }
}

/// The page that belongs to a slot.
fn part(table: &PageTable, slot: Slot) -> Option<MappedPart> {
    let page = table.own_page(slot)?;
    let physical = table.page(page).physical;
    let home = table.page(page).home?;
    Some(MappedPart { ptr: DevicePtr(table.addr(home)), bytes: table.page_bytes(page), physical })
}
