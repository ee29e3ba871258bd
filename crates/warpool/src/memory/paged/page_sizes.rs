//! How large new pages are.
//!
//! A new page has 4 MiB, beyond 16 GiB of reserved memory 8 MiB; but 2 MiB while the free parts of pages beside large
//! blocks are more than 0.6 % of what is reserved and 16 MiB, and if it is a heap's first one for small blocks.
//!
//! Twice the size is half the driver calls per byte; smaller pages have smaller parts. `docs/design/paged.md` has the
//! measurements that these numbers come from.

#[derive(Clone, Copy, Debug)]
pub(super) struct PageSizes {
    /// From how much reserved memory on new pages have two slots: always, except in tests.
    pub(super) pairs_from: u64,
    /// The same for four slots.
    pub(super) fours_from: u64,
}

/// How much of the reserved memory may be free in parts of pages, before new pages are small: per mille, and slots.
const IN_PARTS_PER_MILLE: u64 = 6;
const SLOTS_IN_PARTS: u64 = 8;

impl PageSizes {
    /// The most slots that a page has.
    pub(super) const SLOTS_MAX: u32 = 4;

    /// How many slots a new page has, unless it is a heap's first one for small blocks.
    pub(super) fn slots(&self, bytes_reserved: u64, bytes_in_parts: u64, slot_bytes: u64) -> u32 {
        if bytes_in_parts > bytes_reserved / 1000 * IN_PARTS_PER_MILLE + SLOTS_IN_PARTS * slot_bytes {
            1
        } else if bytes_reserved >= self.fours_from {
            Self::SLOTS_MAX
        } else if bytes_reserved >= self.pairs_from {
            2
        } else {
            1
        }
    }
}

impl Default for PageSizes {
    fn default() -> Self {
        Self { pairs_from: 0, fours_from: 16 << 30 }
    }
}
