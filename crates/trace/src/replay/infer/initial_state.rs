//! The state before the first event. A history that starts late leaves out what was allocated before it; that state is
//! found by undoing every event, the last first, from the segments of the snapshot.

use warpool::memory::report::{Action, BlockState};

use super::heap::RecordedHeap;
use super::rules::RecordedRules;
use crate::budget::{Budget, Exceeded};
use crate::replay::recording::DeviceRecording;

/// The state before the first event.
#[derive(Clone, Debug)]
pub(in crate::replay) struct InitialState {
    pub heap: RecordedHeap,
    /// Bytes in use whose allocation is not in the history.
    pub bytes_unknown_origin: u64,
    /// Events that could not be undone.
    pub events_not_undone: u64,
    /// Blocks whose end was moved, because later allocations showed that it was elsewhere.
    pub blocks_extended: u64,
}

impl InitialState {
    /// Undoes all events.
    pub fn reconstruct(
        recording: DeviceRecording<'_>,
        rules: RecordedRules,
        budget: &Budget,
    ) -> Result<Self, Exceeded> {
        let mut heap = RecordedHeap::from_snapshot(rules, recording.segments, budget)?;
        let mut events_not_undone = 0;
        for event in recording.events.iter().rev() {
            budget.check()?;
            let undone = match event.action {
                Action::Alloc => heap.undo_alloc(event.addr).is_some(),
                Action::FreeRequested => heap.undo_free_requested(event.addr).is_some(),
                Action::FreeCompleted => heap.undo_free_completed(event.addr, event.size).is_some(),
                Action::SegmentAlloc => heap.remove_segment(event.addr, event.size).is_some(),
                Action::SegmentMap => heap.unmap(event.addr, event.size).is_some(),
                Action::SegmentFree => {
                    heap.add_segment(event.addr, event.size, event.stream, event.pool);
                    true
                }
                Action::SegmentUnmap => {
                    heap.undo_unmap(event.addr, event.size, event.stream, event.pool);
                    true
                }
                Action::Snapshot | Action::Oom | Action::Annotate => true,
            };
            events_not_undone += u64::from(!undone);
        }
        let in_use = heap.blocks().values().filter(|block| block.state != BlockState::Inactive);
        let bytes_unknown_origin = in_use.fold(0_u64, |sum, block| sum.saturating_add(block.bytes));
        Ok(Self { heap, bytes_unknown_origin, events_not_undone, blocks_extended: 0 })
    }

    /// Whether the state is empty.
    pub fn is_empty(&self) -> bool {
        let in_use = |state| state != BlockState::Inactive;
        self.heap.bytes_reserved() == 0
            && !self.heap.blocks().values().any(|block| block.bytes > 0 && in_use(block.state))
    }
}
