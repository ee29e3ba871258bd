//! From the address of an allocation to its block, in constant time and without a search: one entry per possible start.
//!
//! In a small area that is one per grain. Blocks of a large area are larger than 1 MiB, so at most one starts in each.
//! An entry stays when its block is freed or merged: whoever reads it compares the block's address. The next block that
//! starts there overwrites it.

use super::block::{GRAIN, NONE};
use crate::memory::SegmentKind;

/// The bytes of addresses that share an entry, in a small and in a large area, as powers of two.
const SHIFT: [u32; 2] = [GRAIN.ilog2(), 20];

const CHUNK: usize = 1024;

/// The starts of blocks in one address range.
#[derive(Debug)]
pub(super) struct Starts {
    shift: u32,
    /// Made when they are first used.
    chunks: Vec<Option<Box<[u32; CHUNK]>>>,
}

impl Starts {
    pub(super) fn new(kind: SegmentKind) -> Self {
        Self { shift: SHIFT[kind as usize], chunks: Vec::new() }
    }

    #[inline]
    fn place(&self, offset: u64) -> (usize, usize) {
        let entry = (offset >> self.shift) as usize;
        (entry / CHUNK, entry % CHUNK)
    }

    /// The block that was last allocated at this offset in the range, or near it. It may be another one by now.
    #[inline]
    pub(super) fn get(&self, offset: u64) -> u32 {
        let (chunk, at) = self.place(offset);
        match self.chunks.get(chunk) {
            Some(Some(chunk)) => chunk[at],
            _ => NONE,
        }
    }

    #[inline]
    pub(super) fn insert(&mut self, offset: u64, id: u32) {
        let (chunk, at) = self.place(offset);
        if let Some(Some(chunk)) = self.chunks.get_mut(chunk) {
            chunk[at] = id;
        } else {
            self.add_chunk(chunk)[at] = id;
        }
    }

    #[cold]
    fn add_chunk(&mut self, chunk: usize) -> &mut [u32; CHUNK] {
        if chunk >= self.chunks.len() {
            self.chunks.resize_with(chunk + 1, || None);
        }
        self.chunks[chunk].get_or_insert_with(|| Box::new([NONE; CHUNK]))
    }
}
