//! The pinned segments in a snapshot. As in PyTorch's, the host is device -1, has no streams, and its segments are
//! called small; unlike there, a segment may have many blocks.

use super::block::{PinnedBlock, PinnedState};
use super::heap::LockedHeap;
use super::shard::{Piece, Segment};
use crate::lock;
use crate::memory::report::StackIds;
use crate::memory::{BlockInfo, BlockState, MemPoolId, SegmentInfo, SegmentKind, Snapshot};

pub(super) fn add_segments(heap: &LockedHeap<'_>, snapshot: &mut Snapshot, stacks: &mut StackIds) {
    let infos = heap.segments().values().map(|segment| segment_info(segment, snapshot, stacks)).collect();
    snapshot.host_segments = Some(infos);
}

fn segment_info(segment: &Segment, snapshot: &mut Snapshot, stacks: &mut StackIds) -> SegmentInfo {
    let mut info = SegmentInfo {
        device: -1,
        address: segment.range().start(),
        total_size: segment.range().bytes(),
        allocated_size: 0,
        active_size: 0,
        requested_size: 0,
        stream: 0,
        kind: SegmentKind::Small,
        pool: MemPoolId::DEFAULT,
        is_expandable: false,
        stack: segment.stack().map(|stack| stacks.id(snapshot, stack)),
        blocks: Vec::with_capacity(segment.pieces().len()),
    };
    for (&address, piece) in segment.pieces() {
        let block = match piece {
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

fn state_of(block: &PinnedBlock) -> BlockState {
    match block.state() {
        PinnedState::Allocated => BlockState::ActiveAllocated,
        PinnedState::PendingFree => BlockState::ActivePendingFree,
        PinnedState::Free | PinnedState::Merged => BlockState::Inactive,
    }
}
