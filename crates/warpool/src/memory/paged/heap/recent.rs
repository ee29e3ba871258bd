//! Blocks that were freed a moment ago, at most one of each size: the next request of that size takes its block back
//! without a search. In a large area there is at most one: another might be a neighbour, and a search would find both
//! merged.

use super::super::ids::BlockId;
use super::block::{GRAIN, NONE};
use crate::memory::SegmentKind;

const SLOTS: usize = 16;

#[derive(Debug)]
pub(super) struct Recent {
    slots: [BlockId; SLOTS],
    /// Slots with a block.
    used: u16,
}

impl Recent {
    pub(super) fn new() -> Self {
        Self { slots: [NONE; SLOTS], used: 0 }
    }

    /// The slot of a size.
    #[inline]
    pub(super) fn slot_of(kind: SegmentKind, bytes: u64) -> usize {
        // Sizes are multiples of 512, often of large powers of two: a multiplication spreads them over the upper bits.
        let spread = (bytes / GRAIN).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 60;
        if kind == SegmentKind::Large { 0 } else { spread as usize }
    }

    /// The block in a slot; [`NONE`] if there is none.
    #[inline]
    pub(super) fn get(&self, slot: usize) -> BlockId {
        self.slots[slot]
    }

    /// Puts a block into a slot. Returns the one before.
    #[inline]
    pub(super) fn replace(&mut self, slot: usize, id: BlockId) -> BlockId {
        self.used = self.used & !(1 << slot) | u16::from(id != NONE) << slot;
        std::mem::replace(&mut self.slots[slot], id)
    }

    /// Takes any block.
    #[inline]
    pub(super) fn pop(&mut self) -> Option<BlockId> {
        (self.used != 0).then(|| self.replace(self.used.trailing_zeros() as usize, NONE))
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = BlockId> {
        self.slots.iter().copied().filter(|&id| id != NONE)
    }
}
