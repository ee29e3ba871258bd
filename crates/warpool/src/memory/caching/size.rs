//! The arithmetic of sizes: what a request is rounded to, and how large a segment is fetched for it.

use crate::memory::SegmentKind;

const MIB: u64 = 1 << 20;

/// Sizes are multiples of it.
pub(super) const BLOCK_MIN: u64 = 512;
/// Requests up to this are small.
pub(super) const SMALL_MAX: u64 = MIB;
/// What is fetched for small requests.
pub(super) const SMALL_SEGMENT: u64 = 2 * MIB;
/// Requests below this share segments of the large size; larger ones get their own.
const SHARED_BELOW: u64 = 10 * MIB;
/// Own segments are multiples of it.
const LARGE_GRAIN: u64 = 2 * MIB;
/// No request is as large as this: an exbibyte.
pub(super) const TOO_LARGE: u64 = 1 << 60;

/// What a request of `bytes` takes. With more than one division, the steps between two powers of two are that many.
pub(super) fn round(bytes: u64, divisions: u64) -> u64 {
    if bytes < BLOCK_MIN {
        return BLOCK_MIN;
    }
    if divisions > 1 && bytes > BLOCK_MIN * divisions {
        return round_in_steps(bytes, divisions);
    }
    bytes.next_multiple_of(BLOCK_MIN)
}

/// Rounds up to the next of `divisions` equal steps between the enclosing powers of two.
fn round_in_steps(bytes: u64, divisions: u64) -> u64 {
    if bytes.is_power_of_two() {
        return bytes;
    }
    let below = bytes.next_power_of_two() / 2;
    let step = below / divisions;
    if step == 0 { 2 * below } else { bytes.next_multiple_of(step) }
}

/// Which kind of segment serves a request of this rounded size.
pub(super) fn kind(size: u64) -> SegmentKind {
    if size <= SMALL_MAX { SegmentKind::Small } else { SegmentKind::Large }
}

/// How much is fetched from the driver for a request of this rounded size.
pub(super) fn segment(size: u64, large_segment: u64) -> u64 {
    if size <= SMALL_MAX {
        SMALL_SEGMENT
    } else if size < SHARED_BELOW {
        large_segment
    } else {
        size.next_multiple_of(LARGE_GRAIN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_rounded() {
        let cases = [
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
        ];
        for (bytes, divisions, rounded) in cases {
            assert_eq!(round(bytes, divisions), rounded, "{bytes} in {divisions}");
        }
    }

    #[test]
    fn segments_come_in_three_sizes() {
        const LARGE: u64 = 20 * MIB;
        let cases = [
            (512, SMALL_SEGMENT),
            (MIB, SMALL_SEGMENT),
            (MIB + 512, LARGE),
            (10 * MIB - 512, LARGE),
            (10 * MIB, 10 * MIB),
            (10 * MIB + 512, 12 * MIB),
        ];
        for (size, fetched) in cases {
            assert_eq!(segment(size, LARGE), fetched, "{size}");
        }
    }
}
