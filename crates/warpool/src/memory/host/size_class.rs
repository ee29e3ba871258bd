//! Size classes of pinned memory: how requests are rounded, and how large segments are.
//!
//! Up to 256 KiB there are eight classes between two powers of two, so rounding wastes at most an eighth (below 4 KiB,
//! the granularity of 512 bytes). Larger requests are rounded to pages only: a hundred requests of 1.1 MiB pin 110 MiB.
//! Arithmetic only, no state.

use warpool_driver::DeviceId;

/// The granularity of block sizes, and so their alignment.
pub(super) const GRANULARITY: u64 = 512;

/// The granularity of segments and large blocks.
pub(super) const PAGE: u64 = 4096;

/// Requests up to this size share segments. The smallest segment holds more than seven blocks of the largest class, so
/// little of it is unused.
pub(super) const SMALL_MAX: u64 = 256 << 10;

/// The number of classes: 8 up to a page, and 8 for each doubling from there to [`SMALL_MAX`].
pub(super) const CLASSES: usize = 8 + 8 * 6;

/// The smallest segment for small requests.
const SEGMENT_MIN: u64 = 2 << 20;

/// The largest segment for small requests.
const SEGMENT_MAX: u64 = 32 << 20;

/// Larger requests are refused: no machine has that much.
pub(super) const BYTES_MAX: u64 = 1 << 60;

/// A request, and the blocks that fit it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fit {
    /// The requested bytes.
    pub(super) bytes: u64,
    /// The device that its memory must count for, if any.
    pub(super) device: Option<DeviceId>,
    /// The size of its block.
    pub(super) size: u64,
    /// The size class of that size; large sizes and most unrounded ones have none.
    pub(super) class: Option<u8>,
    /// How much larger an existing block may be to serve it.
    pub(super) slack: u64,
}

impl Fit {
    /// Rounds a request; above `round_max` only as far as alignment requires.
    #[inline]
    pub(super) fn of(bytes: u64, device: Option<DeviceId>, round_max: u64) -> Self {
        debug_assert!(0 < bytes && bytes <= BYTES_MAX);
        let (size, class, slack) = Self::rounded(bytes, round_max);
        Self { bytes, device, size, class, slack }
    }

    /// Size, class and slack.
    #[inline]
    fn rounded(bytes: u64, round_max: u64) -> (u64, Option<u8>, u64) {
        if bytes > round_max {
            let unit = if bytes > SMALL_MAX { PAGE } else { GRANULARITY };
            let size = bytes.next_multiple_of(unit);
            // It may still have exactly the size of a class; its blocks are cached in that class then.
            return (size, class_of_block(size), 0);
        }
        if bytes > SMALL_MAX {
            let size = bytes.next_multiple_of(PAGE);
            // An eighth of the requested size, not of the pages: at most an eighth may be wasted in all.
            return (size, None, (bytes + bytes / 8).saturating_sub(size));
        }
        let (class, size) = class_of(bytes);
        (size, Some(class), 0)
    }

    /// Whether it shares segments with other requests.
    pub(super) fn is_small(&self) -> bool {
        self.size <= SMALL_MAX
    }
}

/// The class of a small request, and the size of its blocks.
#[inline]
fn class_of(bytes: u64) -> (u8, u64) {
    if bytes <= PAGE {
        let steps = bytes.div_ceil(GRANULARITY);
        return ((steps - 1) as u8, steps * GRANULARITY);
    }
    // Above 2^power and up to twice that, in steps of an eighth: steps 9 to 16.
    let power = (bytes - 1).ilog2();
    let steps = bytes.div_ceil(1 << (power - 3));
    let class = 8 * u64::from(power - PAGE.ilog2() + 1) + steps - 9;
    (class as u8, steps << (power - 3))
}

/// The class with exactly that block size.
#[inline]
pub(super) fn class_of_block(size: u64) -> Option<u8> {
    if size > SMALL_MAX {
        return None;
    }
    let (class, rounded) = class_of(size);
    (rounded == size).then_some(class)
}

/// The size of the next segment for small requests, given the bytes of those that exist. An eighth of them, so that an
/// unused rest wastes at most an eighth, and the number of driver calls grows logarithmically.
pub(super) fn shared_segment(bytes_pinned: u64) -> u64 {
    (bytes_pinned / 8 / SEGMENT_MIN * SEGMENT_MIN).clamp(SEGMENT_MIN, SEGMENT_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn size_classes_ascend_and_waste_at_most_an_eighth() {
        let mut last = (0, 0);
        for bytes in 1..=SMALL_MAX {
            let (class, size) = class_of(bytes);
            assert!(size >= bytes && size.is_multiple_of(GRANULARITY), "{bytes}");
            assert!(size - bytes < GRANULARITY || (size - bytes) * 8 <= bytes, "{bytes} becomes {size}");
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
            let fit = Fit::of(bytes, None, round_max);
            assert_eq!((fit.size, fit.class), (size, class), "{bytes} up to {round_max}");
        }
    }

    #[test]
    fn shared_segments_grow_slowly() {
        let mib = |bytes: u64| shared_segment(bytes << 20) >> 20;
        assert_eq!([0, 16, 31, 32, 100, 256, 10_000].map(mib), [2, 2, 2, 4, 12, 32, 32]);
    }
}
