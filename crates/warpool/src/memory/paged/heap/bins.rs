//! Free blocks by size: lists in bins of geometrically growing width, and a bitmap of those that are not empty. Adding,
//! removing and searching take constant time, with few branches: which sizes are free is random, and a branch that is
//! predicted wrongly costs as much as twenty additions.
//!
//! A search finds a block that is at most one bin larger than the best one. With finer bins, and with one for every
//! size of small blocks, recorded programs reserved no less.

use std::hint::select_unpredictable;

use super::super::ids::BlockId;
use super::block::{Blocks, NONE};

/// Bits of the size below its highest that choose the bin: 16 bins from each power of two to the next.
const SUB_BITS: u32 = 4;

/// Sizes are counted in grains of 512 bytes, and a block has fewer than 2^52 of them.
const BINS: usize = ((52 - SUB_BITS as usize) << SUB_BITS) + (2 << SUB_BITS);
const WORDS: usize = BINS.div_ceil(64);

/// How many blocks of a bin a search looks at for the best one. With 16, recorded programs were placed no better.
const LOOK: usize = 3;

/// How many blocks [`Bins::has_between`] looks at.
const BETWEEN_LOOK: usize = 32;

/// The free blocks of one area.
#[derive(Debug)]
pub(super) struct Bins {
    /// The first block of each list.
    heads: Box<[BlockId; BINS]>,
    /// Which lists are not empty.
    occupied: [u64; WORDS],
    /// Which words of it are not 0.
    words: u64,
    /// How often it changed.
    version: u64,
}

impl Default for Bins {
    fn default() -> Self {
        Self { heads: Box::new([NONE; BINS]), occupied: [0; WORDS], words: 0, version: 0 }
    }
}

/// The bin of a size in grains, at least 1.
#[inline]
#[expect(clippy::cast_possible_truncation, reason = "the result is below BINS")]
const fn bin_of(grains: u64) -> usize {
    let shift = (grains | 1 << SUB_BITS).ilog2() - SUB_BITS;
    ((shift as usize) << SUB_BITS) + (grains >> shift) as usize
}

impl Bins {
    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "there are fewer than 2^16 bins")]
    pub(super) fn insert(&mut self, blocks: &mut Blocks, id: BlockId) {
        let grains = blocks.get(id).grains();
        let bin = bin_of(grains);
        let head = std::mem::replace(&mut self.heads[bin], id);
        blocks.get_mut(head).bin_prev = id;
        let block = blocks.get_mut(id);
        (block.bin_prev, block.bin_next, block.bin) = (NONE, head, bin as u16);
        self.occupied[bin / 64] |= 1 << (bin % 64);
        self.words |= 1 << (bin / 64);
        self.version += 1;
    }

    #[inline]
    pub(super) fn remove(&mut self, blocks: &mut Blocks, id: BlockId) {
        let block = blocks.get(id);
        let (before, after, bin) = (block.bin_prev, block.bin_next, usize::from(block.bin));
        // Without a branch: NONE is a place that is written and not read.
        blocks.get_mut(after).bin_prev = before;
        blocks.get_mut(before).bin_next = after;
        let head = select_unpredictable(before == NONE, after, self.heads[bin]);
        self.set_head(bin, head);
    }

    /// Takes the first block of a bin that is not empty.
    #[inline]
    fn pop(&mut self, blocks: &mut Blocks, bin: usize) -> BlockId {
        let id = self.heads[bin];
        let block = blocks.get(id);
        let after = block.bin_next;
        blocks.get_mut(after).bin_prev = NONE;
        self.set_head(bin, after);
        id
    }

    #[inline]
    fn set_head(&mut self, bin: usize, head: BlockId) {
        self.heads[bin] = head;
        let word = self.occupied[bin / 64] & !(u64::from(head == NONE) << (bin % 64));
        self.occupied[bin / 64] = word;
        self.words &= !(u64::from(word == 0) << (bin / 64));
        self.version += 1;
    }

    /// Another number after every change.
    #[inline]
    pub(super) fn version(&self) -> u64 {
        self.version
    }

    /// Whether a block other than `except` may have a size from `least` up to below `most`, in grains. `true` also if
    /// there are too many to look at.
    pub(super) fn has_between(&self, blocks: &Blocks, least: u64, most: u64, except: BlockId) -> bool {
        let (mut bin, last) = (self.next_occupied(bin_of(least)), bin_of(most));
        let mut looked = 0;
        while let Some(at) = bin.filter(|&at| at <= last) {
            for (id, grains) in self.list(blocks, at) {
                looked += 1;
                if looked > BETWEEN_LOOK || id != except && (least..most).contains(&grains) {
                    return true;
                }
            }
            bin = self.next_occupied(at + 1);
        }
        false
    }

    /// Takes a block of at least that size: the best of the first few of its own bin, else one of the next bin.
    #[inline]
    pub(super) fn take(&mut self, blocks: &mut Blocks, grains: u64) -> Option<BlockId> {
        let own = bin_of(grains);
        let mut best = (u64::MAX, NONE);
        let mut id = self.heads[own];
        for _ in 0..LOOK {
            let block = blocks.get(id);
            let size = block.grains();
            // The place that is no block has no size.
            let is_better = (size >= grains) & (size < best.0);
            best.0 = select_unpredictable(is_better, size, best.0);
            best.1 = select_unpredictable(is_better, id, best.1);
            id = select_unpredictable(id == NONE, NONE, block.bin_next);
        }
        if best.1 == NONE {
            return self.next_occupied(own + 1).map(|bin| self.pop(blocks, bin));
        }
        self.remove(blocks, best.1);
        Some(best.1)
    }

    /// The blocks of a bin, with their sizes in grains.
    fn list<'a>(&self, blocks: &'a Blocks, bin: usize) -> impl Iterator<Item = (BlockId, u64)> + 'a {
        let mut next = self.heads[bin];
        std::iter::from_fn(move || {
            let id = next;
            let block = blocks.get(id);
            next = block.bin_next;
            (id != NONE).then(|| (id, block.grains()))
        })
    }

    /// Every block of at least that size, smallest bins first.
    pub(super) fn at_least<'a>(&'a self, blocks: &'a Blocks, grains: u64) -> impl Iterator<Item = BlockId> + 'a {
        let mut bin = self.next_occupied(bin_of(grains));
        let mut id = bin.map_or(NONE, |bin| self.heads[bin]);
        let all = std::iter::from_fn(move || {
            if id == NONE {
                bin = self.next_occupied(bin? + 1);
                id = self.heads[bin?];
            }
            let found = id;
            id = blocks.get(found).bin_next;
            Some(found)
        });
        all.filter(move |&id| blocks.get(id).grains() >= grains)
    }

    /// Checks that lists, bitmap and blocks agree.
    ///
    /// # Panics
    /// If they do not.
    pub(super) fn check(&self, blocks: &Blocks) {
        for (bin, &head) in self.heads.iter().enumerate() {
            assert_eq!(self.occupied[bin / 64] >> (bin % 64) & 1 == 1, head != NONE, "the bit of bin {bin}");
            let mut before = NONE;
            for (id, grains) in self.list(blocks, bin) {
                let block = blocks.get(id);
                assert_eq!((usize::from(block.bin), bin_of(grains), block.bin_prev), (bin, bin, before), "{block:?}");
                before = id;
            }
        }
        for (word, &bits) in self.occupied.iter().enumerate() {
            assert_eq!(self.words >> word & 1 == 1, bits != 0, "the bit of word {word}");
        }
    }

    /// The first bin from this one on that is not empty.
    #[inline]
    fn next_occupied(&self, from: usize) -> Option<usize> {
        let word = from / 64;
        let bits = self.occupied.get(word)? & (u64::MAX << (from % 64));
        if bits != 0 {
            return Some(word * 64 + bits.trailing_zeros() as usize);
        }
        let words = self.words & (u64::MAX << (word + 1));
        if words == 0 {
            return None;
        }
        let word = words.trailing_zeros() as usize;
        Some(word * 64 + self.occupied[word].trailing_zeros() as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bins_grow_with_the_size_and_never_skip() {
        let mut last = 0;
        for grains in 1..100_000_u64 {
            let bin = bin_of(grains);
            assert!(bin == last || bin == last + 1, "{grains} is in bin {bin} after {last}");
            last = bin;
        }
        assert!(bin_of((1 << 52) - 1) < BINS);
    }
}
