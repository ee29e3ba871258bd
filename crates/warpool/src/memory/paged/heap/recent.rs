//! Blocks that were freed a moment ago, at most one of each size: the next request of that size takes its block back
//! without a search.
//!
//! Their frees need not be counted yet. As long as only such blocks are freed and taken back, no current value rises
//! above what was counted, so no peak is missed. Before anything else is allocated, and before the statistics are
//! read, [`Recent::settle`] counts them.

use super::super::counters::HeapCounters;
use super::block::{Block, Blocks, GRAIN, NONE, State};

const SLOTS: usize = 16;

#[derive(Debug)]
pub(super) struct Recent {
    slots: [u32; SLOTS],
    /// Slots with a block.
    used: u32,
    /// Those of them whose free is not counted.
    uncounted: u32,
}

/// A block that was taken out.
#[derive(Clone, Copy, Debug)]
pub(super) struct Taken {
    pub(super) id: u32,
    /// Whether its free is not counted.
    pub(super) uncounted: bool,
}

#[inline]
fn slot_of(bytes: u64) -> usize {
    // Sizes are multiples of 512, often of large powers of two: a multiplication spreads them over the upper bits.
    ((bytes / GRAIN).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 60) as usize
}

/// Counts the free of a block.
#[inline]
pub(super) fn count_free(block: &Block, counters: &mut HeapCounters) {
    counters.freed(block.kind, block.bytes);
    counters.reclaimed(block.kind, block.bytes, block.requested);
}

impl Recent {
    pub(super) fn new() -> Self {
        Self { slots: [NONE; SLOTS], used: 0, uncounted: 0 }
    }

    /// The block in the place for that size.
    #[inline]
    pub(super) fn peek(&self, bytes: u64) -> Option<u32> {
        let slot = slot_of(bytes);
        (self.used & 1 << slot != 0).then(|| self.slots[slot])
    }

    /// Takes the block of exactly that size.
    #[inline]
    pub(super) fn take(&mut self, blocks: &Blocks, bytes: u64) -> Option<Taken> {
        let slot = slot_of(bytes);
        let (id, bit) = (self.slots[slot], 1 << slot);
        if self.used & bit == 0 || blocks.get(id).bytes != bytes {
            return None;
        }
        let uncounted = self.uncounted & bit != 0;
        self.used &= !bit;
        self.uncounted &= !bit;
        Some(Taken { id, uncounted })
    }

    /// Adds a block. Returns the one that was in its place.
    #[inline]
    pub(super) fn put(&mut self, blocks: &mut Blocks, id: u32, uncounted: bool) -> Option<Taken> {
        let block = blocks.get_mut(id);
        block.state = State::Recent;
        let slot = slot_of(block.bytes);
        let bit = 1 << slot;
        let before = Taken { id: self.slots[slot], uncounted: self.uncounted & bit != 0 };
        let had_one = self.used & bit != 0;
        self.slots[slot] = id;
        self.used |= bit;
        self.uncounted = self.uncounted & !bit | u32::from(uncounted) << slot;
        had_one.then_some(before)
    }

    /// Takes any block.
    #[inline]
    pub(super) fn pop(&mut self) -> Option<Taken> {
        if self.used == 0 {
            return None;
        }
        let slot = self.used.trailing_zeros() as usize;
        let bit = 1 << slot;
        let taken = Taken { id: self.slots[slot], uncounted: self.uncounted & bit != 0 };
        self.used &= !bit;
        self.uncounted &= !bit;
        Some(taken)
    }

    /// Counts the frees that are not counted yet.
    #[inline]
    pub(super) fn settle(&mut self, blocks: &Blocks, counters: &mut HeapCounters) {
        while self.uncounted != 0 {
            let slot = self.uncounted.trailing_zeros() as usize;
            count_free(blocks.get(self.slots[slot]), counters);
            self.uncounted &= self.uncounted - 1;
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = Taken> {
        let used = (0..SLOTS).filter(|&slot| self.used & 1 << slot != 0);
        used.map(|slot| Taken { id: self.slots[slot], uncounted: self.uncounted & 1 << slot != 0 })
    }
}
