//! A device's state as plain data: a segment is a run of addresses with pages.

use super::device::PagedDevice;
use super::heap::{Block, Heap, State};
use crate::memory::report::{EntryDetails, StackIds};
use crate::memory::{BlockInfo, BlockState, SegmentInfo, SegmentKind, Snapshot, SnapshotOptions};

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
    let history = device.history.lock().share(options.traces, active, details);
    history.add_to(snapshot, stacks);
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
                is_elastic: heap.is_elastic(id),
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
