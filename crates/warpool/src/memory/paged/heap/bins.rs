//! Free blocks by size: lists in bins of geometrically growing width, and a bitmap of those that are not empty. Adding
//! and removing take constant time; a search finds a block that is at most one bin larger than the best one.

use super::block::{Blocks, NONE};

/// Bits of the size below its highest that choose the bin: 16 bins from each power of two to the next.
const SUB_BITS: u32 = 4;

/// Sizes are counted in grains of 512 bytes, and a block has fewer than 2^52 of them.
const BINS: usize = ((52 - SUB_BITS as usize) << SUB_BITS) + (2 << SUB_BITS);

/// How many blocks of a bin a search looks at for the best one.
const LOOK: usize = 16;

/// How many blocks [`Bins::has_between`] looks at.
const BETWEEN_LOOK: usize = 32;

/// The free blocks of one area.
#[derive(Debug)]
pub(super) struct Bins {
    heads: Box<[u32; BINS]>,
    /// How often it changed.
    version: u64,
    occupied: [u64; BINS.div_ceil(64)],
}

impl Default for Bins {
    fn default() -> Self {
        Self { heads: Box::new([NONE; BINS]), version: 0, occupied: [0; BINS.div_ceil(64)] }
    }
}

/// The bin of a size in grains, at least 1.
#[inline]
#[expect(clippy::cast_possible_truncation, reason = "the result is below BINS")]
fn bin_of(grains: u64) -> usize {
    let highest = 63 - grains.leading_zeros();
    if highest <= SUB_BITS {
        return grains as usize;
    }
    let shift = highest - SUB_BITS;
    ((shift as usize) << SUB_BITS) + (grains >> shift) as usize
}

impl Bins {
    #[inline]
    pub(super) fn insert(&mut self, blocks: &mut Blocks, id: u32) {
        let bin = bin_of(blocks.get(id).grains());
        let head = std::mem::replace(&mut self.heads[bin], id);
        if head != NONE {
            blocks.get_mut(head).bin_prev = id;
        }
        let block = blocks.get_mut(id);
        (block.bin_prev, block.bin_next) = (NONE, head);
        self.occupied[bin / 64] |= 1 << (bin % 64);
        self.version += 1;
    }

    /// Another number after every change.
    #[inline]
    pub(super) fn version(&self) -> u64 {
        self.version
    }

    /// Whether a block other than `except` may have a size from `least` up to below `most`, in grains. `true` also if
    /// there are too many to look at.
    pub(super) fn has_between(&self, blocks: &Blocks, least: u64, most: u64, except: u32) -> bool {
        let (mut bin, last) = (self.next_occupied(bin_of(least)), bin_of(most));
        let mut looked = 0;
        while let Some(at) = bin.filter(|&at| at <= last) {
            let mut id = self.heads[at];
            while id != NONE {
                let block = blocks.get(id);
                looked += 1;
                if looked > BETWEEN_LOOK || id != except && (least..most).contains(&block.grains()) {
                    return true;
                }
                id = block.bin_next;
            }
            bin = self.next_occupied(at + 1);
        }
        false
    }

    #[inline]
    pub(super) fn remove(&mut self, blocks: &mut Blocks, id: u32) {
        self.version += 1;
        let block = blocks.get(id);
        let (before, after) = (block.bin_prev, block.bin_next);
        if after != NONE {
            blocks.get_mut(after).bin_prev = before;
        }
        if before != NONE {
            blocks.get_mut(before).bin_next = after;
            return;
        }
        let bin = bin_of(blocks.get(id).grains());
        self.heads[bin] = after;
        if after == NONE {
            self.occupied[bin / 64] &= !(1 << (bin % 64));
        }
    }

    /// A block of at least that size: the best of the first few of its own bin, else one of the next bin.
    #[inline]
    pub(super) fn find(&self, blocks: &Blocks, grains: u64) -> Option<u32> {
        let own = bin_of(grains);
        let (mut id, mut best, mut best_grains) = (self.heads[own], NONE, u64::MAX);
        for _ in 0..LOOK {
            if id == NONE {
                break;
            }
            let block = blocks.get(id);
            if (grains..best_grains).contains(&block.grains()) {
                (best, best_grains) = (id, block.grains());
            }
            id = block.bin_next;
        }
        if best != NONE {
            return Some(best);
        }
        self.next_occupied(own + 1).map(|bin| self.heads[bin])
    }

    /// Every block of at least that size, smallest bins first.
    pub(super) fn at_least<'a>(&'a self, blocks: &'a Blocks, grains: u64) -> impl Iterator<Item = u32> + 'a {
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

    #[inline]
    fn next_occupied(&self, from: usize) -> Option<usize> {
        let mut word = from / 64;
        let mut bits = self.occupied.get(word)? & (u64::MAX << (from % 64));
        loop {
            if bits != 0 {
                return Some(word * 64 + bits.trailing_zeros() as usize);
            }
            word += 1;
            bits = *self.occupied.get(word)?;
        }
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
