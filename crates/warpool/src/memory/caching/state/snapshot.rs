//! The state as plain data. Each contiguous mapped range of an expandable segment appears as a segment of its own.

use super::DeviceState;
use crate::memory::caching::heap::{BlockStatus, Segment, SegmentKey};
use crate::memory::report::{EntryDetails, SharedHistory, StackIds};
use crate::memory::{BlockInfo, BlockState, SegmentInfo, Snapshot, SnapshotOptions, UsagePart};

impl DeviceState {
    /// Adds the device's segments to a snapshot, and returns its history, which is added without the lock.
    pub(crate) fn add_to(
        &mut self,
        snapshot: &mut Snapshot,
        stacks: &mut StackIds,
        options: SnapshotOptions,
        details: &EntryDetails,
    ) -> SharedHistory {
        let active = self.counters.stats.active_bytes.all.current;
        let history = self.recorder.share(options.traces, active, details);
        let mut segments = Vec::new();
        for (key, segment) in self.heap.segments() {
            if options.pool.is_none_or(|pool| pool == self.heap.block_pool_of(key).pool()) {
                self.add_segment_infos(key, segment, &mut segments, snapshot, stacks);
            }
        }
        segments.sort_by_key(|segment| segment.address);
        snapshot.segments.extend(segments);
        history
    }

    /// Memory by stream and pool, one part per segment.
    pub(crate) fn usage(&self) -> Vec<UsagePart> {
        let of_segment = |(key, segment): (SegmentKey, &Segment)| {
            let (pool, stream) = (self.heap.block_pool_of(key).pool(), self.heap.stream_blocks_of(key).stream_raw());
            let mut part = UsagePart { pool, stream, ..UsagePart::default() };
            for (_, block) in self.heap.blocks_of(segment) {
                let (allocated, active) = match block.status() {
                    BlockStatus::Allocated => (block.size(), block.size()),
                    BlockStatus::PendingFree | BlockStatus::Deferred => (0, block.size()),
                    BlockStatus::Free | BlockStatus::InTransit => (0, 0),
                    BlockStatus::Unmapped => continue,
                };
                part.bytes_reserved += block.size();
                part.bytes_allocated += allocated;
                part.bytes_active += active;
            }
            part
        };
        self.heap.segments().map(of_segment).collect()
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
            let state = match block.status() {
                BlockStatus::Allocated => BlockState::ActiveAllocated,
                BlockStatus::PendingFree | BlockStatus::Deferred => BlockState::ActivePendingFree,
                BlockStatus::Free | BlockStatus::InTransit => BlockState::Inactive,
                BlockStatus::Unmapped => {
                    infos.extend(open.take());
                    continue;
                }
            };
            let info = open.get_or_insert_with(|| SegmentInfo {
                stream: self.heap.stream_blocks_of(key).stream_raw(),
                pool: block_pool.pool(),
                is_expandable: block.is_expandable(),
                stack,
                ..SegmentInfo::empty(self.device, block.ptr(), block_pool.kind())
            });
            info.push(BlockInfo {
                address: block.ptr(),
                size: block.size(),
                requested_size: block.requested(),
                state,
                stack: block.stack().map(|stack| stacks.id(snapshot, stack)),
            });
        }
        infos.extend(open);
    }
}
