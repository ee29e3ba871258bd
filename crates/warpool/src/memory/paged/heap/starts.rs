//! From the address of an allocation to its block, in constant time and without a search: one entry per possible start.
//!
//! In a small area that is one per grain. Blocks of a large area are larger than 1 MiB, so at most one starts in each.
//! An entry stays when its block is freed or merged: whoever reads it compares the block's address. The next block that
//! starts there overwrites it.

use super::super::ids::BlockId;
use super::block::{GRAIN, NONE};
use crate::memory::SegmentKind;

/// The bytes of addresses that share an entry, in a small and in a large area, as powers of two.
const SHIFT: [u32; 2] = [GRAIN.ilog2(), 20];

/// The starts of blocks in one address range.
#[derive(Debug)]
pub(super) struct Starts {
    shift: u32,
    /// For the whole range. They are all [`NONE`] at first, which is 0: the system gives such memory without touching
    /// it, so entries of addresses that are never used cost nothing.
    entries: Box<[BlockId]>,
}

impl Starts {
    /// For a range of that many bytes.
    pub(super) fn new(kind: SegmentKind, bytes: u64) -> Self {
        let shift = SHIFT[kind as usize];
        let entries = usize::try_from(bytes.div_ceil(1 << shift)).expect("a range is smaller than the address space");
        Self { shift, entries: vec![NONE; entries].into_boxed_slice() }
    }

    /// The block that was last allocated at this offset in the range, or near it. It may be another one by now.
    #[inline]
    pub(super) fn get(&self, offset: u64) -> BlockId {
        self.entries.get((offset >> self.shift) as usize).copied().unwrap_or(NONE)
    }

    #[inline]
    pub(super) fn insert(&mut self, offset: u64, id: BlockId) {
        self.entries[(offset >> self.shift) as usize] = id;
    }
}
