//! The state as plain data. Each contiguous mapped range of an expandable segment appears as a segment of its own.

use super::DeviceState;
use crate::memory::caching::heap::{Block, BlockStatus, Segment, SegmentKey};
use crate::memory::report::EntryDetails;
use crate::memory::report::StackIds;
use crate::memory::{Action, BlockInfo, BlockState, MemPoolId, SegmentInfo, Snapshot, SnapshotOptions, StackId};

impl DeviceState {
    /// Adds the device to a snapshot.
    pub(crate) fn add_to(
        &mut self,
        snapshot: &mut Snapshot,
        stacks: &mut StackIds,
        options: SnapshotOptions,
        details: &EntryDetails,
    ) {
        let trace = if options.traces { self.recorder.history.copy_to(snapshot, stacks) } else { Vec::new() };
        snapshot.traces.push(trace);
        let mut segments = Vec::new();
        for (key, segment) in self.heap.segments() {
            if options.pool.is_none_or(|pool| pool == self.heap.block_pool_of(key).pool()) {
                self.add_segment_infos(key, segment, &mut segments, snapshot, stacks);
            }
        }
        segments.sort_by_key(|segment| segment.address);
        snapshot.segments.extend(segments);
        // This appears only in the next snapshot: this one's history was copied before.
        let active = self.counters.stats().active_bytes.all.current;
        self.recorder.record(Action::Snapshot, 0, active, 0, MemPoolId::DEFAULT, details);
    }

    fn add_segment_infos(
        &self,
        key: SegmentKey,
        segment: &Segment,
        infos: &mut Vec<SegmentInfo>,
        snapshot: &mut Snapshot,
        stacks: &mut StackIds,
    ) {
        let block_pool = self.heap.block_pool_of(key);
        let stack = segment.stack().map(|stack| stacks.id(snapshot, stack));
        let mut open: Option<SegmentInfo> = None;
        for (_, block) in self.heap.blocks_of(segment) {
            if block.status() == BlockStatus::Unmapped {
                infos.extend(open.take());
                continue;
            }
            let info = open.get_or_insert_with(|| SegmentInfo {
                device: i32::try_from(self.device.0).unwrap_or(i32::MAX),
                address: block.ptr(),
                total_size: 0,
                allocated_size: 0,
                active_size: 0,
                requested_size: 0,
                stream: self.heap.stream_blocks_of(key).stream_raw(),
                kind: block_pool.kind(),
                pool: block_pool.pool(),
                is_expandable: block.is_expandable(),
                stack,
                blocks: Vec::new(),
            });
            let stack = block.stack().map(|stack| stacks.id(snapshot, stack));
            add_block(info, block, stack);
        }
        infos.extend(open);
    }
}

fn add_block(info: &mut SegmentInfo, block: &Block, stack: Option<StackId>) {
    let state = match block.status() {
        BlockStatus::Allocated => BlockState::ActiveAllocated,
        BlockStatus::PendingFree | BlockStatus::Deferred => BlockState::ActivePendingFree,
        BlockStatus::Free | BlockStatus::InTransit | BlockStatus::Unmapped => BlockState::Inactive,
    };
    info.total_size += block.size();
    if state == BlockState::ActiveAllocated {
        info.allocated_size += block.size();
    }
    if state != BlockState::Inactive {
        info.active_size += block.size();
        info.requested_size += block.requested();
    }
    info.blocks.push(BlockInfo {
        address: block.ptr(),
        size: block.size(),
        requested_size: block.requested(),
        state,
        stack,
    });
}
