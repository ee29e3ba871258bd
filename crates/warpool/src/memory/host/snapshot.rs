//! The pinned segments in a snapshot. As in PyTorch's, the host is device -1, has no streams, and its segments are
//! called small; unlike there, a segment may have many blocks.

use super::block::{PinnedBlock, PinnedState};
use super::heap::LockedHeap;
use super::history::HOST;
use super::shard::{Piece, Segment};
use crate::lock;
use crate::memory::report::StackIds;
use crate::memory::{BlockInfo, BlockState, SegmentInfo, SegmentKind, Snapshot};

pub(super) fn add_segments(heap: &LockedHeap<'_>, snapshot: &mut Snapshot, stacks: &mut StackIds) {
    let infos = heap.segments().values().map(|segment| segment_info(segment, snapshot, stacks)).collect();
    snapshot.host_segments = Some(infos);
}

fn segment_info(segment: &Segment, snapshot: &mut Snapshot, stacks: &mut StackIds) -> SegmentInfo {
    let mut info = SegmentInfo::empty(HOST, segment.range().start(), SegmentKind::Small);
    info.stack = segment.stack().map(|stack| stacks.id(snapshot, stack));
    for (&address, piece) in segment.pieces() {
        info.push(match piece {
            Piece::Free(size) => {
                let state = BlockState::Inactive;
                BlockInfo { address, size: *size, requested_size: 0, state, stack: None }
            }
            Piece::Block(block) => {
                let stack = lock(&block.usage).stack.clone();
                let stack = stack.map(|stack| stacks.id(snapshot, &stack));
                let (size, requested_size, state) = (block.size(), block.requested(), state_of(block));
                BlockInfo { address, size, requested_size, state, stack }
            }
        });
    }
    info
}

fn state_of(block: &PinnedBlock) -> BlockState {
    match block.state() {
        PinnedState::Allocated => BlockState::ActiveAllocated,
        PinnedState::PendingFree => BlockState::ActivePendingFree,
        PinnedState::Free | PinnedState::Merged => BlockState::Inactive,
    }
}
