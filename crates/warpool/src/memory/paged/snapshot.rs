//! A device's state as plain data: a segment is a run of addresses with pages.

use super::device::PagedDevice;
use super::heap::{Block, Heap, State};
use crate::memory::report::{EntryDetails, StackIds};
use crate::memory::{Action, BlockInfo, BlockState, MemPoolId, SegmentInfo, SegmentKind, Snapshot, SnapshotOptions};

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
    let mut recorder = device.history.lock();
    let trace = if options.traces { recorder.history.copy_to(snapshot, stacks) } else { Vec::new() };
    snapshot.traces.push(trace);
    if !details.is_off() {
        // In the next snapshot's history only: this one's was copied before.
        recorder.record(Action::Snapshot, 0, active, 0, MemPoolId::DEFAULT, details);
    }
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
                device: i32::try_from(device.id.0).unwrap_or(i32::MAX),
                address: block.addr(),
                total_size: 0,
                allocated_size: 0,
                active_size: 0,
                requested_size: 0,
                stream: heap.stream_raw,
                kind,
                pool: heap.pool,
                is_expandable: !heap.is_in_segment(id),
                stack: None,
                blocks: Vec::new(),
            });
            segment.total_size += block.bytes();
            if state != BlockState::Inactive {
                segment.active_size += block.bytes();
                segment.requested_size += block.requested();
            }
            if state == BlockState::ActiveAllocated {
                segment.allocated_size += block.bytes();
            }
            // Blocks that were freed a moment ago are shown as they will be, without merging them: a snapshot must not
            // decide where the next request goes.
            if let Some(last) = segment.blocks.last_mut()
                && (last.state, state) == (BlockState::Inactive, BlockState::Inactive)
            {
                last.size += block.bytes();
                continue;
            }
            segment.blocks.push(BlockInfo {
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
