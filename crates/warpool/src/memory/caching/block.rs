//! The pieces that segments are cut into.
//! No rules here: who may split, merge or take a block is in `state.rs`.

use slotmap::new_key_type;
use warpool_driver::StreamId;

use super::state::SegmentKey;
use crate::memory::stream_fence::StreamUses;
use crate::memory::{SegmentKind, Stack};

new_key_type! {
    /// Names a block. Never comes again for another.
    pub(super) struct BlockKey;
}

/// Where a block stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    /// In its lane's free set.
    Free,
    /// A caller has it.
    Taken,
    /// Its caller gave it back, but streams may still use it.
    Waiting,
    /// Addresses without memory, in its lane's unmapped set.
    Unmapped,
    /// In nobody's set: one thread works on it, and the driver may be under way. Neighbours leave it alone.
    Moving,
}

/// A stretch of a segment.
#[derive(Debug)]
pub(super) struct Block {
    pub(super) ptr: u64,
    pub(super) size: u64,
    /// What was last asked for.
    pub(super) requested: u64,
    pub(super) segment: SegmentKey,
    pub(super) prev: Option<BlockKey>,
    pub(super) next: Option<BlockKey>,
    pub(super) standing: Standing,
    /// Whether its segment is an expandable one.
    pub(super) growing: bool,
    /// Which requests its segment serves.
    pub(super) kind: SegmentKind,
    /// How many searches its bin had seen when it became free.
    pub(super) born: u64,
    /// What few blocks have.
    pub(super) extra: Option<Box<Extra>>,
}

/// What few blocks have.
#[derive(Debug, Default)]
pub(super) struct Extra {
    /// Other streams that used it, and the fences that it waits for once it is freed.
    pub(super) uses: StreamUses,
    /// Of those, the ones that used it while they captured: the graph joins them.
    pub(super) uses_in_capture: Vec<StreamId>,
    /// Who asked for it.
    pub(super) stack: Option<Stack>,
}

impl Block {
    /// A block in no set.
    pub(super) fn new(ptr: u64, size: u64, segment: SegmentKey, kind: SegmentKind, growing: bool) -> Self {
        Self {
            ptr,
            size,
            requested: 0,
            segment,
            prev: None,
            next: None,
            standing: Standing::Moving,
            growing,
            kind,
            born: 0,
            extra: None,
        }
    }

    pub(super) fn end(&self) -> u64 {
        self.ptr + self.size
    }

    /// Whether its segment has other blocks.
    pub(super) fn is_split(&self) -> bool {
        self.prev.is_some() || self.next.is_some()
    }

    pub(super) fn extra(&mut self) -> &mut Extra {
        self.extra.get_or_insert_default()
    }

    pub(super) fn stack(&self) -> Option<&Stack> {
        self.extra.as_ref().and_then(|extra| extra.stack.as_ref())
    }

    pub(super) fn has_uses(&self) -> bool {
        self.extra.as_ref().is_some_and(|extra| !extra.uses.is_clear() || !extra.uses_in_capture.is_empty())
    }
}
