//! Blocks: the parts that a segment is split into. Only the heap changes them, so that their neighbours, free lists and
//! statuses agree.

use warpool_driver::StreamId;

use super::key::{BlockKey, SegmentKey, StreamBlocksKey};
use crate::memory::stream_fence::StreamUses;
use crate::memory::{SegmentKind, Stack};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BlockStatus {
    /// In the free list of its stream and block pool.
    Free,
    Allocated,
    /// Freed; streams may still use it.
    PendingFree,
    /// Freed; a capture has to end before fences can be recorded for it.
    Deferred,
    /// Addresses without memory, in the list of its stream and block pool.
    Unmapped,
    /// In no list: one thread works on it, possibly during a driver call. It is not merged with neighbours.
    InTransit,
}

/// A part of a segment.
#[derive(Debug)]
pub(crate) struct Block {
    pub(super) ptr: u64,
    pub(super) size: u64,
    pub(super) requested: u64,
    /// How often it was allocated.
    pub(super) generation: u32,
    pub(super) segment: SegmentKey,
    /// The blocks of its segment's stream.
    pub(super) stream_blocks: StreamBlocksKey,
    pub(super) prev: Option<BlockKey>,
    pub(super) next: Option<BlockKey>,
    pub(super) status: BlockStatus,
    pub(super) expandable: bool,
    pub(super) kind: SegmentKind,
    /// How many searches its block pool had counted when it became free.
    pub(super) freed_at_search: u64,
    /// Data that few blocks have.
    pub(super) extra: Option<Box<Extra>>,
}

/// Data that few blocks have.
#[derive(Debug, Default)]
pub(crate) struct Extra {
    /// Other streams that used it, and the fences that it waits for once it is freed.
    pub(crate) uses: StreamUses,
    /// Streams that used it while they captured: the graph orders these uses.
    pub(crate) uses_in_capture: Vec<StreamId>,
    /// The call stack of the allocation.
    pub(crate) stack: Option<Stack>,
    /// How many graphs hold it. It cannot be freed while one does.
    pub(crate) holds: u32,
    /// Whether its pool has lent it to a request of the default pool.
    pub(crate) lent: bool,
}

impl Block {
    /// The only block of a segment, in transit.
    pub(super) fn new(
        (ptr, size): (u64, u64),
        segment: SegmentKey,
        stream_blocks: StreamBlocksKey,
        kind: SegmentKind,
        expandable: bool,
    ) -> Self {
        Self {
            ptr,
            size,
            requested: 0,
            generation: 0,
            segment,
            stream_blocks,
            prev: None,
            next: None,
            status: BlockStatus::InTransit,
            expandable,
            kind,
            freed_at_search: 0,
            extra: None,
        }
    }

    #[inline]
    pub(crate) fn ptr(&self) -> u64 {
        self.ptr
    }

    #[inline]
    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    #[inline]
    pub(crate) fn end(&self) -> u64 {
        self.ptr + self.size
    }

    /// The size that was last requested, before rounding.
    #[inline]
    pub(crate) fn requested(&self) -> u64 {
        self.requested
    }

    #[inline]
    pub(crate) fn segment(&self) -> SegmentKey {
        self.segment
    }

    #[inline]
    pub(crate) fn next(&self) -> Option<BlockKey> {
        self.next
    }

    #[inline]
    pub(crate) fn status(&self) -> BlockStatus {
        self.status
    }

    /// Whether its segment is expandable.
    #[inline]
    pub(crate) fn is_expandable(&self) -> bool {
        self.expandable
    }

    /// The kind of its segment.
    #[inline]
    pub(crate) fn kind(&self) -> SegmentKind {
        self.kind
    }

    /// Distinguishes the allocations of this block.
    #[inline]
    pub(crate) fn generation(&self) -> u32 {
        self.generation
    }

    /// Whether its segment has other blocks.
    #[inline]
    pub(crate) fn is_split(&self) -> bool {
        self.prev.is_some() || self.next.is_some()
    }

    /// Whether it is free and covers a whole segment that is not expandable.
    pub(crate) fn is_free_segment(&self) -> bool {
        self.status == BlockStatus::Free && !self.expandable && !self.is_split()
    }

    pub(crate) fn stack(&self) -> Option<&Stack> {
        self.extra.as_ref().and_then(|extra| extra.stack.as_ref())
    }

    /// Whether it has an [`Extra`].
    #[inline]
    pub(crate) fn has_extra(&self) -> bool {
        self.extra.is_some()
    }

    /// Whether a graph holds it.
    #[inline]
    pub(crate) fn is_held(&self) -> bool {
        self.extra.as_ref().is_some_and(|extra| extra.holds > 0 && !crate::defect::Defect::HoldsIgnored.is_on())
    }

    /// Whether its own pool has lent it to a request of the default pool.
    pub(crate) fn is_lent(&self) -> bool {
        self.extra.as_ref().is_some_and(|extra| extra.lent)
    }

    /// Whether other streams may use it.
    #[inline]
    pub(crate) fn has_uses(&self) -> bool {
        self.extra.as_ref().is_some_and(|extra| !extra.uses.is_clear() || !extra.uses_in_capture.is_empty())
    }

    /// The other streams that used it and have no fence yet; not those that used it in a capture.
    pub(crate) fn unfenced_streams(&self) -> &[StreamId] {
        self.extra.as_ref().map_or(&[], |extra| extra.uses.unfenced())
    }

    /// The other streams that used it while they captured.
    pub(crate) fn streams_used_in_capture(&self) -> &[StreamId] {
        self.extra.as_ref().map_or(&[], |extra| &extra.uses_in_capture)
    }

    /// All other streams that used it and have no fence yet.
    pub(crate) fn streams_used(&self) -> impl Iterator<Item = StreamId> + '_ {
        self.unfenced_streams().iter().chain(self.streams_used_in_capture()).copied()
    }
}
