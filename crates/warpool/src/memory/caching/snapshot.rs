//! The state as plain data. Segments are listed by device and address; of expandable ones, each stretch without holes.

use super::block::{Block, BlockKey, Standing};
use super::state::State;
use super::{CachingAllocator, Cell};
use crate::memory::history::StackNumbers;
use crate::memory::{Action, BlockInfo, BlockState, MemPoolId, SegmentInfo, Snapshot, SnapshotOptions, StackLevel};

impl CachingAllocator {
    pub(super) fn take_snapshot(&self, options: SnapshotOptions) -> Snapshot {
        let mut snapshot = Snapshot { settings: self.settings().recorded(), ..Snapshot::default() };
        let mut stacks = StackNumbers::default();
        for cell in &self.cells {
            self.add_device(cell, options, &mut snapshot, &mut stacks);
        }
        snapshot
    }

    fn add_device(&self, cell: &Cell, options: SnapshotOptions, snapshot: &mut Snapshot, stacks: &mut StackNumbers) {
        let cause = self.cause(cell, StackLevel::Alloc).timed(self.driver());
        self.with(cell, |state| {
            let trace = if options.traces { state.journal.history.copy_to(snapshot, stacks) } else { Vec::new() };
            snapshot.traces.push(trace);
            let mut segments = state.segment_infos(options.pool, snapshot, stacks);
            segments.sort_by_key(|segment| segment.address);
            // Shows in the next snapshot only: this one was asked for before it.
            let active = state.stats.active_bytes.all.current;
            state.record_at(Action::Snapshot, 0, active, 0, MemPoolId::DEFAULT, &cause);
            snapshot.segments.extend(segments);
        });
    }
}

impl State {
    fn segment_infos(
        &self,
        only: Option<MemPoolId>,
        snapshot: &mut Snapshot,
        stacks: &mut StackNumbers,
    ) -> Vec<SegmentInfo> {
        let mut infos = Vec::new();
        for segment in self.segments.values() {
            let lane = &self.lanes[segment.lane];
            let bin = &self.bins[lane.bin];
            if only.is_some_and(|pool| pool != bin.pool) {
                continue;
            }
            let stack = segment.stack.as_ref().map(|stack| stacks.number(snapshot, stack));
            let mut open: Option<SegmentInfo> = None;
            for (_, block) in self.chain(segment.first) {
                if block.standing == Standing::Unmapped {
                    infos.extend(open.take());
                    continue;
                }
                let info = open.get_or_insert_with(|| SegmentInfo {
                    device: i32::try_from(self.device.0).unwrap_or(i32::MAX),
                    address: block.ptr,
                    total_size: 0,
                    allocated_size: 0,
                    active_size: 0,
                    requested_size: 0,
                    stream: lane.stream_raw,
                    kind: bin.kind,
                    pool: bin.pool,
                    is_expandable: block.growing,
                    stack,
                    blocks: Vec::new(),
                });
                let state = match block.standing {
                    Standing::Taken => BlockState::ActiveAllocated,
                    Standing::Waiting => BlockState::ActivePendingFree,
                    Standing::Free | Standing::Moving | Standing::Unmapped => BlockState::Inactive,
                };
                info.total_size += block.size;
                if state == BlockState::ActiveAllocated {
                    info.allocated_size += block.size;
                }
                if state != BlockState::Inactive {
                    info.active_size += block.size;
                    info.requested_size += block.requested;
                }
                let stack = block.stack().map(|stack| stacks.number(snapshot, stack));
                info.blocks.push(BlockInfo {
                    address: block.ptr,
                    size: block.size,
                    requested_size: block.requested,
                    state,
                    stack,
                });
            }
            infos.extend(open);
        }
        infos
    }

    /// A block and all behind it in its segment.
    pub(super) fn chain(&self, first: BlockKey) -> impl Iterator<Item = (BlockKey, &Block)> {
        let mut next = Some(first);
        std::iter::from_fn(move || {
            let key = next?;
            let block = &self.blocks[key];
            next = block.next;
            Some((key, block))
        })
    }
}
