//! Where a recording began. A history that starts late leaves out what was there before; the state then is found by
//! undoing every event, the last first, from the segments at the end.

use warpool::memory::{Action, BlockState, SegmentInfo, TraceEntry};

use super::ledger::Ledger;
use super::sizes::Sizes;

/// The state before the first event.
#[derive(Clone, Debug)]
pub(super) struct Start {
    /// What was there.
    pub ledger: Ledger,
    /// Bytes that somebody had, or streams still used, and whose allocation is not in the history.
    pub bytes_unknown_origin: u64,
    /// Events that could not be undone.
    pub misfits: u64,
    /// Blocks whose end was moved, because what followed showed that it must have been elsewhere.
    pub corrections: u64,
}

/// Whether the history seems to begin with nothing: what came and went adds up to what is there at the end.
pub(super) fn is_whole(events: &[TraceEntry], segments: &[&SegmentInfo]) -> bool {
    let (mut bytes, mut blocks) = (0_i128, 0_i64);
    for event in events {
        match event.action {
            Action::SegmentAlloc | Action::SegmentMap => bytes += i128::from(event.size),
            Action::SegmentFree | Action::SegmentUnmap => bytes -= i128::from(event.size),
            Action::Alloc => blocks += 1,
            Action::FreeRequested => blocks -= 1,
            _ => {}
        }
        if bytes < 0 || blocks < 0 {
            return false;
        }
    }
    let held: u64 = segments.iter().map(|segment| segment.total_size).sum();
    let live = |segment: &&SegmentInfo| {
        segment.blocks.iter().filter(|block| block.state == BlockState::ActiveAllocated).count()
    };
    let live: usize = segments.iter().map(live).sum();
    bytes == i128::from(held) && i64::try_from(live).is_ok_and(|live| live == blocks)
}

/// Undoes all events.
pub(super) fn rebuild(events: &[TraceEntry], segments: &[&SegmentInfo], sizes: &Sizes, by_registration: bool) -> Start {
    let mut ledger = Ledger::of_segments(sizes.clone(), by_registration, segments);
    let mut misfits = 0;
    for event in events.iter().rev() {
        let undone = match event.action {
            Action::Alloc => ledger.release(event.addr).is_some(),
            Action::FreeRequested => ledger.hand_back(event.addr).is_some(),
            Action::FreeCompleted => ledger.reinstate(event.addr, event.size).is_some(),
            Action::SegmentAlloc => ledger.remove_segment(event.addr, event.size).is_some(),
            Action::SegmentMap => ledger.unmap(event.addr, event.size).is_some(),
            Action::SegmentFree => {
                ledger.add_segment(event.addr, event.size, event.stream, event.pool);
                true
            }
            Action::SegmentUnmap => {
                ledger.map_again(event.addr, event.size, event.stream, event.pool);
                true
            }
            Action::Snapshot | Action::Oom | Action::Annotate => true,
        };
        misfits += u64::from(!undone);
    }
    let active = ledger.pieces().values().filter(|piece| piece.state != BlockState::Inactive);
    let bytes_unknown_origin = active.map(|piece| piece.bytes).sum();
    Start { ledger, bytes_unknown_origin, misfits, corrections: 0 }
}
