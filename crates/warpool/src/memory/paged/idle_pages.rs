//! Free pages of a device that may leave: how much they are, and taking some of them.

use super::device::PagedDevice;
use super::ids::{HeapId, PageId};
use super::pages::PageTable;
use super::pools::Takeable;
use super::take::take_free;
use crate::lock;
use crate::memory::report::EntryDetails;

/// The heaps whose free pages may be taken, the one that was used longest ago first.
pub(super) fn idle_first(device: &PagedDevice, table: &PageTable) -> Vec<HeapId> {
    let is_takeable = |number: &HeapId| {
        let pool = device.heaps.get(*number).lock().pool;
        matches!(lock(&device.pools).takeable(pool), Takeable::After(_))
    };
    let mut heaps: Vec<HeapId> = table.heaps_with_free_pages().filter(is_takeable).collect();
    heaps.sort_by_key(|&number| (table.last_use(number), number));
    heaps
}

/// The bytes of spare pages, and of those that are free as a whole in some heaps.
pub(super) fn free_bytes(device: &PagedDevice, table: &PageTable, heaps: &[HeapId]) -> u64 {
    let bytes = |page: PageId| table.page_bytes(page);
    let in_heap = |&number: &HeapId| {
        let mut heap = device.heaps.get(number).lock();
        heap.merge_recent();
        table.free_pages(&heap).map(bytes).sum::<u64>()
    };
    table.spare_pages().map(bytes).sum::<u64>() + heaps.iter().map(in_heap).sum::<u64>()
}

/// Takes free pages of at most `bytes` in all: they belong nowhere from then on.
pub(super) fn take_pages(
    device: &PagedDevice,
    table: &mut PageTable,
    heaps: &[HeapId],
    bytes: u64,
    details: &EntryDetails,
) -> Vec<PageId> {
    let mut left = bytes;
    let mut is_wanted = |table: &PageTable, page: PageId| {
        let rest = left.checked_sub(table.page_bytes(page));
        left = rest.unwrap_or(left);
        rest.is_some()
    };
    let spare: Vec<PageId> = table.spare_pages().collect();
    let mut taken: Vec<PageId> = spare.into_iter().filter(|&page| is_wanted(table, page)).collect();
    for &page in &taken {
        table.take_spare_page(page);
    }
    for &number in heaps {
        let of_heap = take_free(device, table, number, details, |table, page, _| is_wanted(table, page));
        taken.extend(of_heap.into_iter().map(|(page, _)| page));
    }
    taken
}
