//! Taking free pages from heaps, and putting them back where they were.

use warpool_driver::PhysicalId;

use super::device::PagedDevice;
use super::ids::{HeapId, PageId};
use super::pages::PageTable;
use super::slot::Slot;
use crate::memory::Action;
use crate::memory::report::EntryDetails;

/// Takes pages that are wholly in free blocks of a heap, of its smallest blocks first, as far as `wants` wants them:
/// they belong nowhere from then on.
pub(super) fn take_free(
    device: &PagedDevice,
    table: &mut PageTable,
    number: HeapId,
    details: &EntryDetails,
    mut wants: impl FnMut(&PageTable, PageId, Slot) -> bool,
) -> Vec<(PageId, Slot)> {
    let mut heap = device.heaps.get(number).lock();
    heap.merge_recent();
    let mut taken = Vec::new();
    for block in heap.blocks_with_pages(table.slot_bytes) {
        let pages = table.pages_in(&heap, block).filter(|&(slot, page)| wants(table, page, slot));
        let pages: Vec<_> = pages.map(|(slot, page)| (page, slot)).collect();
        // From the end: what is left of the block in front keeps its number.
        for &(page, slot) in pages.iter().rev() {
            let (start, bytes) = (table.addr(slot), table.page_bytes(page));
            heap.make_hole(block, start, start + bytes);
            table.set_home(page, None);
            device.record(Action::SegmentUnmap, start, bytes, &heap, details);
        }
        taken.extend(pages);
    }
    if !taken.is_empty() {
        table.note_changed(number);
    }
    taken
}

/// Returns a page to where it was taken from, or to the spare ones if it is not mapped there any more.
pub(super) fn put_back(
    device: &PagedDevice,
    table: &mut PageTable,
    page: PageId,
    from: Option<Slot>,
    details: &EntryDetails,
) {
    let Some(slot) = from.filter(|&slot| table.page(page).is_mapped_at(slot)) else {
        table.put_spare(page);
        return;
    };
    let (start, bytes) = (table.addr(slot), table.page_bytes(page));
    let (number, kind) = (table.range(slot.range).heap, table.range(slot.range).kind);
    table.set_home(page, Some(slot));
    table.note_changed(number);
    let mut heap = device.heaps.get(number).lock();
    heap.end_hole(kind, start, start + bytes);
    device.record(Action::SegmentMap, start, bytes, &heap, details);
}

/// Releases physical memory; what fails is retried.
pub(super) fn release_physical(device: &PagedDevice, table: &mut PageTable, physical: (PhysicalId, u64)) {
    if let Err(error) = device.driver().vm_release(physical.0) {
        tracing::warn!(%error, "physical memory could not be released; it is retried");
        table.to_release.push(physical);
    }
}
