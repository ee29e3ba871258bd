//! The arithmetic of the recorded allocator, as far as a recording must be read with it: what a request takes, how
//! large a segment is fetched for it, and when a block is split. The allocator that is replayed has its own; here
//! nothing is decided, only explained.

use warpool::memory::{SegmentKind, Settings};

pub(super) const MIB: u64 = 1 << 20;
const BLOCK_MIN: u64 = 512;
const SMALL_MAX: u64 = MIB;
const SMALL_SEGMENT: u64 = 2 * MIB;
const SHARED_BELOW: u64 = 10 * MIB;
const LARGE_GRAIN: u64 = 2 * MIB;

/// The sizes that go with some settings.
#[derive(Clone, Debug)]
pub(super) struct Sizes {
    settings: Settings,
    has_divisions: bool,
    max_split: u64,
}

impl Sizes {
    pub fn new(settings: &Settings) -> Self {
        Self {
            has_divisions: settings.roundup_power2_divisions.iter().any(|&divisions| divisions > 1),
            max_split: settings.max_split_bytes.unwrap_or(u64::MAX),
            settings: settings.clone(),
        }
    }

    /// What a request takes.
    pub fn round(&self, bytes: u64) -> u64 {
        if self.has_divisions {
            let divisions = self.settings.divisions_for(bytes);
            if divisions > 1 && bytes > BLOCK_MIN * divisions {
                if bytes.is_power_of_two() {
                    return bytes;
                }
                let below = bytes.next_power_of_two() / 2;
                let step = below / divisions;
                return if step == 0 { 2 * below } else { bytes.next_multiple_of(step) };
            }
        }
        round_to_block(bytes)
    }

    /// Which kind of segment serves a request of this rounded size.
    pub fn kind(size: u64) -> SegmentKind {
        if size <= SMALL_MAX { SegmentKind::Small } else { SegmentKind::Large }
    }

    /// Which kind of requests a segment or a mapped piece of this size serves: only small ones share 2 MiB.
    pub fn kind_of_segment(bytes: u64) -> SegmentKind {
        if bytes <= SMALL_SEGMENT { SegmentKind::Small } else { SegmentKind::Large }
    }

    /// What is fetched for a request of this rounded size, and what a limit is compared with.
    pub fn segment(&self, size: u64) -> u64 {
        if size <= SMALL_MAX {
            SMALL_SEGMENT
        } else if size < SHARED_BELOW {
            self.settings.large_segment_bytes
        } else {
            size.next_multiple_of(LARGE_GRAIN)
        }
    }

    /// In which steps an expandable segment of that kind grows.
    pub fn chunk(&self, kind: SegmentKind) -> u64 {
        match kind {
            SegmentKind::Small => SMALL_SEGMENT,
            SegmentKind::Large => self.settings.large_segment_bytes,
        }
    }

    /// Whether what is left of a block becomes a block of its own.
    pub fn splits(&self, size: u64, rest: u64) -> bool {
        if Self::kind(size) == SegmentKind::Small || self.settings.expandable_segments {
            rest >= BLOCK_MIN
        } else {
            size < self.max_split && rest > SMALL_MAX
        }
    }

    /// Whether a free block of `block` bytes may serve a request, as far as `max_split_size` goes.
    pub fn may_serve(&self, size: u64, block: u64) -> bool {
        if self.max_split == u64::MAX {
            return true;
        }
        if size < self.max_split {
            block < self.max_split
        } else {
            block < size.saturating_add(self.settings.max_non_split_rounding_bytes)
        }
    }

    /// Whether the allocator itself gives back some of what it has and not the rest: garbage, or segments above the
    /// split limit.
    pub fn gives_back_parts(&self) -> bool {
        self.settings.garbage_collection_threshold > 0.0 || self.settings.max_split_bytes.is_some()
    }

    pub fn settings(&self) -> &Settings {
        &self.settings
    }
}

/// The size after rounding to 512, whatever the settings: what a program itself uses.
pub(super) fn round_to_block(bytes: u64) -> u64 {
    bytes.max(1).next_multiple_of(BLOCK_MIN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_request_takes() {
        let plain = Sizes::new(&Settings::default());
        let divided = Sizes::new(&Settings { roundup_power2_divisions: [4; 16], ..Settings::default() });
        let cases = [
            (1, 512, 512),
            (513, 1024, 1024),
            (2100, 2560, 2560),
            (5 * MIB, 5 * MIB, 5 * MIB),
            (MIB + 1, MIB + 512, MIB + 256 * 1024),
        ];
        for (bytes, without, with) in cases {
            assert_eq!((plain.round(bytes), divided.round(bytes)), (without, with), "{bytes}");
        }
    }

    #[test]
    fn when_a_block_is_split() {
        let native = Sizes::new(&Settings::default());
        assert!(native.splits(512, 512));
        assert!(!native.splits(2 * MIB, MIB));
        assert!(native.splits(2 * MIB, MIB + 512));
        let expandable = Sizes::new(&Settings { expandable_segments: true, ..Settings::default() });
        assert!(expandable.splits(2 * MIB, 512));
        let limited = Sizes::new(&Settings { max_split_bytes: Some(200 * MIB), ..Settings::default() });
        assert!(!limited.splits(200 * MIB, 100 * MIB));
        assert!(!limited.may_serve(MIB, 200 * MIB));
        assert!(limited.may_serve(200 * MIB, 219 * MIB));
        assert!(!limited.may_serve(200 * MIB, 220 * MIB));
    }
}
