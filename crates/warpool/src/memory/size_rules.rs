//! The size rules of PyTorch's caching allocator: how a request is rounded, how large a segment is allocated for it,
//! when a block is split, and which free blocks may serve a request.
//!
//! Plain arithmetic on the settings. The caching allocator uses these rules, and a replay uses them to explain what a
//! recorded allocator did.

use crate::memory::{SegmentKind, Settings};

const MIB: u64 = 1 << 20;

/// Segments for small requests have this size.
const SMALL_SEGMENT_BYTES: u64 = 2 * MIB;
/// Requests below this share segments of `large_segment_bytes`; larger ones get a segment of their own.
const SHARED_SEGMENT_BELOW: u64 = 10 * MIB;
/// The size of a segment for one request is a multiple of this.
const OWN_SEGMENT_MULTIPLE: u64 = 2 * MIB;

/// The size rules under some settings.
///
/// ```
/// use warpool::memory::{Settings, SizeRules};
///
/// let rules = SizeRules::new(&Settings::default());
/// assert_eq!(rules.round(1000), 1024);
/// assert_eq!(rules.segment(1024), 2 << 20); // cut from a segment of 2 MiB
/// ```
#[derive(Clone, Debug)]
pub struct SizeRules {
    divisions: [u64; 16],
    has_divisions: bool,
    large_segment_bytes: u64,
    /// `u64::MAX` without a limit.
    max_split_bytes: u64,
    max_non_split_rounding_bytes: u64,
}

impl SizeRules {
    /// Block sizes are multiples of this.
    pub const BLOCK_MULTIPLE: u64 = 512;
    /// Requests up to this size are small.
    pub const SMALL_REQUEST_MAX: u64 = MIB;

    /// Requests of this size or more, an exbibyte, are refused.
    pub const REQUEST_TOO_LARGE: u64 = 1 << 60;

    /// The rules under `settings`. A large segment size that no settings string allows is clamped: every request that
    /// shares such segments must fit, and the size must not exceed the largest request.
    #[must_use]
    pub fn new(settings: &Settings) -> Self {
        Self {
            divisions: settings.roundup_power2_divisions,
            has_divisions: settings.roundup_power2_divisions.iter().any(|&divisions| divisions > 1),
            large_segment_bytes: settings
                .large_segment_bytes
                .clamp(SHARED_SEGMENT_BELOW, Self::REQUEST_TOO_LARGE)
                .next_multiple_of(Self::BLOCK_MULTIPLE),
            max_split_bytes: settings.max_split_bytes.unwrap_or(u64::MAX),
            max_non_split_rounding_bytes: settings.max_non_split_rounding_bytes,
        }
    }

    /// The size of the block for a request of `bytes`: a multiple of 512, or, with `roundup_power2_divisions`, of the
    /// steps between the two powers of two around it.
    #[must_use]
    #[inline]
    pub fn round(&self, bytes: u64) -> u64 {
        if self.has_divisions {
            let divisions = self.divisions_for(bytes);
            if divisions > 1 && bytes > Self::BLOCK_MULTIPLE.saturating_mul(divisions) {
                // A multiple of 512 already, unless the number of divisions is not a power of two.
                return Self::round_to_block(round_to_division(bytes, divisions));
            }
        }
        Self::round_to_block(bytes)
    }

    /// The smallest block size that holds `bytes`, regardless of the settings.
    #[must_use]
    #[inline]
    pub const fn round_to_block(bytes: u64) -> u64 {
        if bytes == 0 { Self::BLOCK_MULTIPLE } else { bytes.next_multiple_of(Self::BLOCK_MULTIPLE) }
    }

    /// The kind of segment that serves a request of this rounded size.
    #[must_use]
    #[inline]
    pub const fn kind(size: u64) -> SegmentKind {
        if size <= Self::SMALL_REQUEST_MAX { SegmentKind::Small } else { SegmentKind::Large }
    }

    /// The kind of a segment, or of a range that was mapped by one step, by its size.
    #[must_use]
    pub const fn kind_of_segment(bytes: u64) -> SegmentKind {
        if bytes <= SMALL_SEGMENT_BYTES { SegmentKind::Small } else { SegmentKind::Large }
    }

    /// How much is allocated from the driver for a request of this rounded size. A memory limit is compared with it.
    #[must_use]
    #[inline]
    pub const fn segment(&self, size: u64) -> u64 {
        if size <= Self::SMALL_REQUEST_MAX {
            SMALL_SEGMENT_BYTES
        } else if size < SHARED_SEGMENT_BELOW {
            self.large_segment_bytes
        } else {
            size.next_multiple_of(OWN_SEGMENT_MULTIPLE)
        }
    }

    /// The bytes by which an expandable segment of that kind grows, before rounding to the driver's granularity.
    #[must_use]
    pub const fn chunk(&self, kind: SegmentKind) -> u64 {
        match kind {
            SegmentKind::Small => SMALL_SEGMENT_BYTES,
            SegmentKind::Large => self.large_segment_bytes,
        }
    }

    /// Whether `rest` bytes that a block has beyond a request of the rounded size `size` become a block of their own.
    #[must_use]
    #[inline]
    pub fn splits(&self, size: u64, rest: u64, expandable: bool) -> bool {
        if Self::kind(size) == SegmentKind::Small || expandable {
            rest >= Self::BLOCK_MULTIPLE
        } else {
            !self.is_oversize(size) && rest > Self::SMALL_REQUEST_MAX
        }
    }

    /// Whether a block of that size is never split, as `max_split_size` says.
    #[must_use]
    #[inline]
    pub const fn is_oversize(&self, bytes: u64) -> bool {
        bytes >= self.max_split_bytes
    }

    /// Whether `max_split_size` lets a free block of `block` bytes serve a request of the rounded size `size`: oversize
    /// blocks serve only oversize requests, and only those that leave little of them unused.
    #[must_use]
    #[inline]
    pub const fn may_serve(&self, size: u64, block: u64) -> bool {
        if self.is_oversize(size) {
            block < size.saturating_add(self.max_non_split_rounding_bytes)
        } else {
            !self.is_oversize(block)
        }
    }

    /// Blocks of this size or more are never split; `u64::MAX` without a limit.
    #[must_use]
    pub const fn max_split_bytes(&self) -> u64 {
        self.max_split_bytes
    }

    fn divisions_for(&self, bytes: u64) -> u64 {
        let power = bytes.max(1).ilog2() as usize;
        self.divisions[power.saturating_sub(20).min(self.divisions.len() - 1)]
    }
}

/// Rounds up to the next of `divisions` equal steps between the enclosing powers of two.
fn round_to_division(bytes: u64, divisions: u64) -> u64 {
    if bytes.is_power_of_two() {
        return bytes;
    }
    let below = bytes.next_power_of_two() / 2;
    let step = below / divisions;
    if step == 0 { 2 * below } else { bytes.next_multiple_of(step) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_rounded() {
        let cases = [
            (0, 0, 512),
            (1, 0, 512),
            (511, 4, 512),
            (512, 0, 512),
            (513, 0, 1024),
            (1200, 4, 1536), // not above 512 x 4, so to 512
            (2100, 4, 2560),
            (1 << 20, 4, 1 << 20),
            ((1 << 20) + 1, 4, (1 << 20) + (256 << 10)),
            (84 << 20, 8, 88 << 20),
            (84 << 20, 1, 84 << 20),
            (1000, 256, 1024),
            (300_000, 32, 303_104),
            (300_000, 3, 349_696),
            (300_000, u64::MAX, 300_032),
        ];
        for (bytes, divisions, rounded) in cases {
            let rules = SizeRules::new(&Settings { roundup_power2_divisions: [divisions; 16], ..Settings::default() });
            assert_eq!(rules.round(bytes), rounded, "{bytes} in {divisions}");
        }
    }

    #[test]
    fn segments_come_in_three_sizes() {
        let cases = [
            (512, 2 * MIB),
            (MIB, 2 * MIB),
            (MIB + 512, 20 * MIB),
            (10 * MIB - 512, 20 * MIB),
            (10 * MIB, 10 * MIB),
            (10 * MIB + 512, 12 * MIB),
        ];
        let rules = SizeRules::new(&Settings::default());
        for (size, segment) in cases {
            assert_eq!(rules.segment(size), segment, "{size}");
        }
    }

    #[test]
    fn a_size_of_large_segments_that_no_string_sets_is_clamped() {
        for (given, used) in [(0, 10 * MIB), (1, 10 * MIB), (10 * MIB + 1, 10 * MIB + 512), (u64::MAX, 1 << 60)] {
            let rules = SizeRules::new(&Settings { large_segment_bytes: given, ..Settings::default() });
            assert_eq!((rules.segment(9 * MIB), rules.chunk(SegmentKind::Large)), (used, used), "{given}");
        }
    }

    #[test]
    fn blocks_are_split_where_the_rest_is_large_enough() {
        let rules = SizeRules::new(&Settings::default());
        assert!(rules.splits(512, 512, false));
        assert!(!rules.splits(2 * MIB, MIB, false));
        assert!(rules.splits(2 * MIB, MIB + 512, false));
        assert!(rules.splits(2 * MIB, 512, true));
        assert!(rules.may_serve(MIB, u64::MAX - 1));
    }

    #[test]
    fn oversize_blocks_are_not_split_and_serve_oversize_requests() {
        let rules = SizeRules::new(&Settings { max_split_bytes: Some(200 * MIB), ..Settings::default() });
        assert!(!rules.splits(200 * MIB, 100 * MIB, false));
        assert!(!rules.may_serve(MIB, 200 * MIB));
        assert!(rules.may_serve(200 * MIB, 219 * MIB));
        assert!(!rules.may_serve(200 * MIB, 220 * MIB));
    }
}
