//! The state of pinned memory as plain data, and the history. The host is device -1, has no streams, and all of its
//! segments are called small, as in PyTorch's snapshots; unlike there, a segment may have many blocks.

use super::block::{BlockCell, Standing};
use super::heap::{Piece, Segment};
use super::{HOST, Shared};
use crate::lock;
use crate::memory::history::{HistoryEntry, StackNumbers};
use crate::memory::journal::Cause;
use crate::memory::{Action, BlockInfo, BlockState, MemPoolId, SegmentInfo, SegmentKind, Snapshot, StackLevel};

impl Shared {
    /// What the history wants to know, gathered before any lock is taken.
    #[inline]
    pub(super) fn cause(&self, level: StackLevel) -> Cause {
        self.recording.cause(level, &self.observers, self.driver())
    }

    /// Writes down what happened, and tells the trackers. No lock may be held.
    #[inline]
    pub(super) fn record(&self, action: Action, addr: u64, size: u64, cause: &Cause) {
        if !cause.is_silent() {
            self.record_loudly(action, addr, size, cause);
        }
    }

    #[cold]
    fn record_loudly(&self, action: Action, addr: u64, size: u64, cause: &Cause) {
        let news = self.write_down(action, addr, size, cause);
        self.tell(&news);
    }

    /// Writes down what happened. What comes out is for the trackers.
    pub(super) fn write_down(&self, action: Action, addr: u64, size: u64, cause: &Cause) -> Vec<HistoryEntry> {
        if cause.is_silent() {
            return Vec::new();
        }
        let mut journal = lock(&self.journal);
        journal.record(action, addr, size, 0, MemPoolId::DEFAULT, cause);
        journal.take_news()
    }

    /// Tells the trackers. No lock may be held.
    pub(super) fn tell(&self, news: &[HistoryEntry]) {
        if !news.is_empty() {
            self.observers.track(HOST, news);
        }
    }

    /// Adds segments and history to a snapshot.
    pub(super) fn add_to(&self, snapshot: &mut Snapshot) {
        let mut stacks = StackNumbers::of(snapshot);
        let traces = lock(&self.journal).history.copy_to(snapshot, &mut stacks);
        snapshot.host_traces = Some(traces);
        let heap = lock(&self.heap);
        let segments = heap.segments.iter().map(|(&start, segment)| info(start, segment, snapshot, &mut stacks));
        snapshot.host_segments = Some(segments.collect());
    }
}

fn info(start: u64, segment: &Segment, snapshot: &mut Snapshot, stacks: &mut StackNumbers) -> SegmentInfo {
    let mut info = SegmentInfo {
        device: -1,
        address: start,
        total_size: segment.pinned.bytes,
        allocated_size: 0,
        active_size: 0,
        requested_size: 0,
        stream: 0,
        kind: SegmentKind::Small,
        pool: MemPoolId::DEFAULT,
        is_expandable: false,
        stack: segment.stack.as_ref().map(|stack| stacks.number(snapshot, stack)),
        blocks: Vec::with_capacity(segment.pieces.len()),
    };
    for (&address, piece) in &segment.pieces {
        let block = match piece {
            Piece::Free(size) => {
                let state = BlockState::Inactive;
                BlockInfo { address, size: *size, requested_size: 0, state, stack: None }
            }
            Piece::Out(cell) => {
                let stack = lock(&cell.notes).stack.clone();
                let stack = stack.map(|stack| stacks.number(snapshot, &stack));
                BlockInfo { address, size: cell.size, requested_size: cell.requested(), state: state_of(cell), stack }
            }
        };
        if block.state == BlockState::ActiveAllocated {
            info.allocated_size += block.size;
        }
        if block.state != BlockState::Inactive {
            info.active_size += block.size;
            info.requested_size += block.requested_size;
        }
        info.blocks.push(block);
    }
    info
}

fn state_of(cell: &BlockCell) -> BlockState {
    match cell.standing() {
        Standing::Taken => BlockState::ActiveAllocated,
        Standing::Waiting => BlockState::ActivePendingFree,
        Standing::Idle | Standing::Gone => BlockState::Inactive,
    }
}
