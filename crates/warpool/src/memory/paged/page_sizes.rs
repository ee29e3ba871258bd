//! How large new pages are.

/// From how much reserved memory on new pages have several slots. Twice the slots are half the driver calls per byte;
/// that is worth it once a few free megabytes more do not matter. `docs/paged.md` has the curve that the defaults were
/// chosen from.
#[derive(Clone, Copy, Debug)]
pub(super) struct PageSizes {
    pub(super) pairs_from: u64,
    pub(super) fours_from: u64,
}

impl PageSizes {
    /// The most slots that a page has.
    pub(super) const SLOTS_MAX: u32 = 4;

    /// How many slots a new page has.
    pub(super) fn slots(&self, bytes_reserved: u64) -> u32 {
        if bytes_reserved >= self.fours_from {
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
        Self { pairs_from: 3 << 29, fours_from: 16 << 30 }
    }
}
