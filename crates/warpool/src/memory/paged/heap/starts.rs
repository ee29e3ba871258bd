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
    /// The numbers of blocks, for the whole range. They are all 0 at first, that of [`NONE`]: the system gives such
    /// memory without touching it, so entries of addresses that are never used cost nothing. (A list of [`BlockId`]s
    /// would be written, since the compiler does not know that `NONE` is 0.)
    entries: Box<[u32]>,
}

impl Starts {
    /// For a range of that many bytes.
    pub(super) fn new(kind: SegmentKind, bytes: u64) -> Self {
        let shift = SHIFT[kind as usize];
        let entries = usize::try_from(bytes.div_ceil(1 << shift)).expect("a range is smaller than the address space");
        Self { shift, entries: vec![NONE.0; entries].into_boxed_slice() }
    }

    /// The block that was last allocated at this offset in the range, or near it. It may be another one by now.
    #[inline]
    pub(super) fn get(&self, offset: u64) -> BlockId {
        self.entries.get((offset >> self.shift) as usize).map_or(NONE, |&id| BlockId(id))
    }

    #[inline]
    pub(super) fn insert(&mut self, offset: u64, id: BlockId) {
        self.entries[(offset >> self.shift) as usize] = id.0;
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    /// Bytes of memory that the process uses.
    fn bytes_resident() -> u64 {
        let text = std::fs::read_to_string("/proc/self/statm").unwrap();
        4096 * text.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap()
    }

    /// A stream has a range of gigabytes, of which it may use one block.
    #[test]
    fn entries_that_are_not_used_take_no_memory() {
        let before = bytes_resident();
        let mut all: Vec<Starts> = (0..64).map(|_| Starts::new(SegmentKind::Small, 8 << 30)).collect();
        all.iter_mut().for_each(|starts| starts.insert(1 << 30, BlockId(7)));
        assert!(all.iter().all(|starts| starts.get(1 << 30) == BlockId(7) && starts.get(2 << 30) == NONE));
        let grown = bytes_resident().saturating_sub(before);
        // The entries would be 4 GiB. Other tests run at the same time.
        assert!(grown < 3 << 30, "{grown} bytes");
    }
}
