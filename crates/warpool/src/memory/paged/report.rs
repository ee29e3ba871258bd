//! A device's state for readers: as plain data, in which a segment is a run of addresses with pages, and as the report
//! that a request ran out of memory.

use warpool_driver::MemoryInfo;

use super::device::PagedDevice;
use super::heap::{Block, Heap, State};
use super::pages::PageTable;
use super::pools::Takeable;
use crate::lock;
use crate::memory::report::{EntryDetails, StackIds};
use crate::memory::shortage::Shortage;
use crate::memory::{
    BlockInfo, BlockState, OomCause, OomReport, PageShortage, Request, SegmentInfo, SegmentKind, Snapshot,
    SnapshotOptions, Stats,
};

/// Adds a device to a snapshot.
pub(super) fn add_to(
    device: &PagedDevice,
    snapshot: &mut Snapshot,
    stacks: &mut StackIds,
    options: SnapshotOptions,
    details: &EntryDetails,
) {
    let mut segments = Vec::new();
    for (_, cell) in device.heaps.iter() {
        let heap = cell.lock();
        if options.pool.is_none_or(|pool| pool == heap.pool) {
            for kind in [SegmentKind::Small, SegmentKind::Large] {
                add_segments(device, &heap, kind, snapshot, stacks, &mut segments);
            }
        }
    }
    segments.sort_by_key(|segment: &SegmentInfo| segment.address);
    snapshot.segments.extend(segments);
    let active = if details.is_off() { 0 } else { device.stats().active_bytes.all.current };
    device.history.lock().add_to(snapshot, stacks, options.traces, active, details);
}

fn add_segments(
    device: &PagedDevice,
    heap: &Heap,
    kind: SegmentKind,
    snapshot: &mut Snapshot,
    stacks: &mut StackIds,
    segments: &mut Vec<SegmentInfo>,
) {
    for range in heap.ranges(kind) {
        let mut open: Option<SegmentInfo> = None;
        for (id, block) in range {
            let Some(state) = state_of(block) else {
                segments.extend(open.take());
                continue;
            };
            let segment = open.get_or_insert_with(|| SegmentInfo {
                stream: heap.stream_raw,
                pool: heap.pool,
                is_expandable: !heap.is_in_segment(id),
                ..SegmentInfo::empty(device.id, block.addr(), kind)
            });
            // Blocks that were freed a moment ago are shown as they will be, without merging them: a snapshot must not
            // decide where the next request goes.
            if let Some(last) = segment.blocks.last_mut()
                && (last.state, state) == (BlockState::Inactive, BlockState::Inactive)
            {
                last.size += block.bytes();
                segment.total_size += block.bytes();
                continue;
            }
            segment.push(BlockInfo {
                address: block.addr(),
                size: block.bytes(),
                requested_size: if state == BlockState::Inactive { 0 } else { block.requested() },
                state,
                stack: heap.stack(id).map(|stack| stacks.id(snapshot, stack)),
            });
        }
        segments.extend(open);
    }
}

/// `None` if it has no pages.
fn state_of(block: &Block) -> Option<BlockState> {
    match block.state() {
        State::Allocated => Some(BlockState::ActiveAllocated),
        State::Pending => Some(BlockState::ActivePendingFree),
        State::Recent | State::Free => Some(BlockState::Inactive),
        State::Hole | State::Filling | State::Unused => None,
    }
}

/// The out-of-memory report: what is live, free but mapped, spare, waiting for streams, and fixed by pools in use.
pub(super) fn out_of_memory(
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
    for (id, block) in heap.all_blocks() {
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
