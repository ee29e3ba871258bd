//! The arithmetic of sizes: what a request is rounded to, and how large segments are.
//!
//! Up to 256 KiB there are classes, eight between two powers of two, so rounding wastes at most an eighth (below 4 KiB,
//! the grain of 512 bytes). Larger requests are rounded to pages only: a hundred requests of 1.1 MiB each pin 110 MiB.
//! No state here.

/// Every block is a multiple of it, and so aligned to it.
pub(super) const GRAIN: u64 = 512;

/// Segments and large blocks are multiples of it.
pub(super) const PAGE: u64 = 4096;

/// Requests up to here share segments. Seven blocks and more of the largest class lie in the smallest segment, so that
/// what does not fill it is little.
pub(super) const SMALL_MAX: u64 = 256 << 10;

/// How many classes there are: 8 up to a page, and 8 for each doubling from there to [`SMALL_MAX`].
pub(super) const CLASSES: usize = 8 + 8 * 6;

/// The smallest segment that small requests share.
pub(super) const SEGMENT_MIN: u64 = 2 << 20;

/// The largest of them.
pub(super) const SEGMENT_MAX: u64 = 32 << 20;

/// No machine has that much.
pub(super) const BYTES_MAX: u64 = 1 << 60;

/// What a request becomes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fit {
    /// The size of its block.
    pub(super) size: u64,
    /// The class whose blocks have its size; large ones have none, nor most unrounded ones.
    pub(super) class: Option<u8>,
    /// How much larger a block may be that is there already.
    pub(super) slack: u64,
}

impl Fit {
    /// Rounds a request; above `round_max` only to what alignment needs.
    #[inline]
    pub(super) fn of(bytes: u64, round_max: u64) -> Self {
        debug_assert!(0 < bytes && bytes <= BYTES_MAX);
        if bytes > round_max {
            let unit = if bytes > SMALL_MAX { PAGE } else { GRAIN };
            let size = bytes.next_multiple_of(unit);
            // It may have the size of a class all the same, and then lies with those.
            return Self { size, class: class_of_block(size), slack: 0 };
        }
        if bytes > SMALL_MAX {
            let size = bytes.next_multiple_of(PAGE);
            // Of what was asked, not of the pages: an eighth is the most that may be wasted in all.
            return Self { size, class: None, slack: (bytes + bytes / 8).saturating_sub(size) };
        }
        let (class, size) = class_of(bytes);
        Self { size, class: Some(class), slack: 0 }
    }

    /// Whether it shares segments with others.
    pub(super) fn is_small(&self) -> bool {
        self.size <= SMALL_MAX
    }
}

/// The class of a small request, and the size of its blocks.
#[inline]
fn class_of(bytes: u64) -> (u8, u64) {
    if bytes <= PAGE {
        let steps = bytes.div_ceil(GRAIN);
        return ((steps - 1) as u8, steps * GRAIN);
    }
    // Above 2^power and up to twice that, in steps of an eighth: the 9th to the 16th.
    let power = (bytes - 1).ilog2();
    let steps = bytes.div_ceil(1 << (power - 3));
    let class = 8 * u64::from(power - PAGE.ilog2() + 1) + steps - 9;
    (class as u8, steps << (power - 3))
}

/// The class whose blocks have exactly that size.
#[inline]
pub(super) fn class_of_block(size: u64) -> Option<u8> {
    if size > SMALL_MAX {
        return None;
    }
    let (class, rounded) = class_of(size);
    (rounded == size).then_some(class)
}

/// How large the next segment for small requests is, with so much in such segments already. An eighth of that: what it
/// does not fill wastes no more than an eighth, and the number of calls to the driver grows with the logarithm.
pub(super) fn shared_segment(bytes_pinned: u64) -> u64 {
    (bytes_pinned / 8 / SEGMENT_MIN * SEGMENT_MIN).clamp(SEGMENT_MIN, SEGMENT_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_are_in_order_and_waste_an_eighth_at_most() {
        let mut last = (0, 0);
        for bytes in 1..=SMALL_MAX {
            let (class, size) = class_of(bytes);
            assert!(size >= bytes && size.is_multiple_of(GRAIN), "{bytes}");
            assert!(size - bytes < GRAIN || (size - bytes) * 8 <= bytes, "{bytes} becomes {size}");
            assert!((class, size) == last || (class > last.0 || last.1 == 0) && size > last.1, "{bytes}");
            assert_eq!(class_of_block(size), Some(class));
            last = (class, size);
        }
        assert_eq!(last, (CLASSES as u8 - 1, SMALL_MAX));
        assert_eq!(class_of_block(5000), None);
    }

    #[test]
    fn large_requests_are_rounded_to_pages() {
        let cases = [
            (1, u64::MAX, 512, Some(0)),
            (4097, u64::MAX, 4608, Some(8)),
            (SMALL_MAX + 1, u64::MAX, SMALL_MAX + PAGE, None),
            (3 << 20, u64::MAX, 3 << 20, None),
            (100_001, 0, 100_352, None),
            (1000, 0, 1024, Some(1)),
            (100_000, 0, 100_352, None),
            (SMALL_MAX, 0, SMALL_MAX, Some(CLASSES as u8 - 1)),
            (100_000, 100_000, 106_496, Some(44)),
            ((1 << 20) + 1, 0, (1 << 20) + PAGE, None),
        ];
        for (bytes, round_max, size, class) in cases {
            let fit = Fit::of(bytes, round_max);
            assert_eq!((fit.size, fit.class), (size, class), "{bytes} up to {round_max}");
        }
    }

    #[test]
    fn shared_segments_grow_slowly() {
        let mib = |bytes: u64| shared_segment(bytes << 20) >> 20;
        assert_eq!([0, 16, 31, 32, 100, 256, 10_000].map(mib), [2, 2, 2, 4, 12, 32, 32]);
    }
}
