//! Blocks that were freed a moment ago, at most one of each size: the next request of that size takes its block back
//! without a search.
//!
//! Their frees need not be counted yet. As long as only such blocks are freed and taken back, no current value rises
//! above what was counted, so no peak is missed. Before a value is noted as a peak, and before the statistics are read,
//! [`Recent::settle`] counts them.

use super::super::counters::HeapCounters;
use super::block::{Block, Blocks, GRAIN, NONE};

const SLOTS: usize = 16;

/// All slots, as bits.
pub(super) const ALL: u32 = (1 << SLOTS) - 1;

/// The bit of a slot whose block's free is not counted.
const UNCOUNTED: u32 = 1 << SLOTS;

#[derive(Debug)]
pub(super) struct Recent {
    slots: [u32; SLOTS],
    /// Slots with a block in the lower half; in the upper half those of them whose free is not counted.
    bits: u32,
}

/// A block that was taken out.
#[derive(Clone, Copy, Debug)]
pub(super) struct Taken {
    pub(super) id: u32,
    /// Whether its free is not counted.
    pub(super) uncounted: bool,
}

/// The slot of a size.
#[inline]
pub(super) fn slot_of(bytes: u64) -> usize {
    // Sizes are multiples of 512, often of large powers of two: a multiplication spreads them over the upper bits.
    ((bytes / GRAIN).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 60) as usize
}

/// Counts the free of a block.
#[inline]
pub(super) fn count_free(block: &Block, counters: &mut HeapCounters) {
    counters.freed_and_reclaimed(block.kind, block.bytes, block.requested);
}

impl Recent {
    pub(super) fn new() -> Self {
        Self { slots: [NONE; SLOTS], bits: 0 }
    }

    /// Whether a block is in one of these slots, given as bits.
    #[inline]
    pub(super) fn has_any(&self, slots: u32) -> bool {
        self.bits & slots != 0
    }

    /// The block in a slot.
    #[inline]
    pub(super) fn peek(&self, slot: usize) -> Option<u32> {
        (self.bits & 1 << slot != 0).then(|| self.slots[slot])
    }

    /// The block in a slot, if its free is not counted.
    #[inline]
    pub(super) fn peek_uncounted(&self, slot: usize) -> Option<u32> {
        (self.bits & UNCOUNTED << slot != 0).then(|| self.slots[slot])
    }

    /// Takes the block out of a slot that has one.
    #[inline]
    pub(super) fn take(&mut self, slot: usize) -> Taken {
        let uncounted = self.bits & UNCOUNTED << slot != 0;
        self.bits &= !((1 | UNCOUNTED) << slot);
        Taken { id: self.slots[slot], uncounted }
    }

    /// Puts a block into a slot that has none.
    #[inline]
    pub(super) fn put(&mut self, slot: usize, id: u32, uncounted: bool) {
        self.slots[slot] = id;
        self.bits |= (1 | u32::from(uncounted) << SLOTS) << slot;
    }

    /// Takes any block.
    #[inline]
    pub(super) fn pop(&mut self) -> Option<Taken> {
        (self.bits != 0).then(|| self.take(self.bits.trailing_zeros() as usize % SLOTS))
    }

    /// Counts the frees that are not counted yet.
    pub(super) fn settle(&mut self, blocks: &Blocks, counters: &mut HeapCounters) {
        while self.bits >= UNCOUNTED {
            let slot = (self.bits / UNCOUNTED).trailing_zeros() as usize;
            count_free(blocks.get(self.slots[slot]), counters);
            self.bits &= !(UNCOUNTED << slot);
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = Taken> {
        let used = (0..SLOTS).filter(|&slot| self.bits & 1 << slot != 0);
        used.map(|slot| Taken { id: self.slots[slot], uncounted: self.bits & UNCOUNTED << slot != 0 })
    }
}
