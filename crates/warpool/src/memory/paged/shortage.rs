//! The out-of-memory report: what is live, free but mapped, spare, waiting for streams, and fixed by pools in use.

use warpool_driver::MemoryInfo;

use super::device::PagedDevice;
use super::heap::{Heap, State};
use super::pages::PageTable;
use super::pools::Takeable;
use crate::lock;
use crate::memory::shortage::Shortage;
use crate::memory::{OomCause, OomReport, PageShortage, Request, SegmentKind, Stats};

pub(super) fn report(
    device: &PagedDevice,
    request: &Request,
    (why, bytes_segment): (OomCause, u64),
    memory: MemoryInfo,
    stats: &Stats,
    capturing: bool,
) -> OomReport {
    let limit = device.limit();
    let mut report = Shortage { request, why, bytes_segment, memory, limit, stats, capturing }.report();
    let table = lock(&device.pages);
    let spare: u64 = table.homeless_pages().map(|page| table.page_bytes(page)).sum();
    let mut pages = PageShortage { bytes_spare: spare, bytes_page: table.slot_bytes, ..PageShortage::default() };
    (report.blocks_cached, report.bytes_largest_cached) = (0, 0);
    for (_, cell) in device.heaps.iter() {
        let heap = cell.lock();
        let pool = heap.pool;
        let free = free_in(&heap, &table);
        drop(heap);
        let takeable = lock(&device.pools).takeable(pool);
        if matches!(takeable, Takeable::After(_)) {
            pages.bytes_free_mapped += free.bytes;
            pages.bytes_whole_pages += free.bytes_whole_pages;
            report.blocks_cached += free.parts;
            report.bytes_largest_cached = report.bytes_largest_cached.max(free.largest);
        } else {
            pages.bytes_fixed += free.bytes;
        }
    }
    report.bytes_cached = pages.bytes_free_mapped + spare;
    report.bytes_private_free = pages.bytes_fixed;
    report.pages = Some(pages);
    report
}

#[derive(Default)]
struct Free {
    bytes: u64,
    bytes_whole_pages: u64,
    parts: u64,
    largest: u64,
}

fn free_in(heap: &Heap, table: &PageTable) -> Free {
    let mut free = Free::default();
    for (id, block) in [SegmentKind::Small, SegmentKind::Large].into_iter().flat_map(|kind| heap.ranges(kind).flatten())
    {
        if matches!(block.state(), State::Free | State::Recent) {
            free.bytes += block.bytes();
            free.parts += 1;
            free.largest = free.largest.max(block.bytes());
            let pages = table.pages_in(heap, id);
            free.bytes_whole_pages += pages.map(|(_, page)| table.page_bytes(page)).sum::<u64>();
        }
    }
    free
}
