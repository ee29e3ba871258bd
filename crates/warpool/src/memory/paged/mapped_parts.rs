//! Where a block is mapped, for sharing it with other processes. Pages stay where a block is allocated.

use warpool_driver::DevicePtr;

use super::PagedAllocator;
use super::pages::{PageTable, Slot};
use crate::memory::MappedPart;
use crate::{Error, Result, lock};

impl PagedAllocator {
    /// The pages of the block that starts at `ptr`, in the order of their addresses; the first may begin before it, and
    /// the last end behind it. They stay mapped there as long as the block is allocated. Empty if the block has no
    /// pages: it is in a pool with an upstream, or one whose blocks are whole segments.
    pub fn mapped_parts(&self, ptr: DevicePtr) -> Result<Vec<MappedPart>> {
        let (device, allocation) = self.locate(ptr)?;
        let table = lock(&device.pages);
        let Some(range) = table.range_with(ptr.0) else { return Ok(Vec::new()) };
        let base = table.range(range).base;
        let (mut index, end) = ((ptr.0 - base) / table.slot_bytes, ptr.0 + allocation.bytes);
        let mut parts = Vec::new();
        while base + index * table.slot_bytes < end {
            let part = part(&table, range, index).ok_or(Error::UnknownPointer { ptr })?;
            index = (part.ptr.0 + part.bytes - base) / table.slot_bytes;
            parts.push(part);
        }
        Ok(parts)
    }
}

/// The page that belongs to a slot.
fn part(table: &PageTable, range: u32, index: u64) -> Option<MappedPart> {
    let page = table.own_page(Slot { range, index: u32::try_from(index).ok()? })?;
    let physical = table.page(page).physical;
    let home = table.page(page).home?;
    Some(MappedPart { ptr: DevicePtr(table.addr(home)), bytes: table.page_bytes(page), physical })
}
