//! Free parts of segments, as a snapshot shows them: neighbours that will be merged count as one. Reading them changes
//! nothing: statistics must not decide where the next request goes.

use super::heap::{Heap, State};
use crate::memory::{SegmentKind, Stat, StatByKind};

/// The free parts of segments that are partly in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Inactive {
    pub(super) parts: u64,
    pub(super) bytes: u64,
}

/// One segment while its blocks are visited.
#[derive(Default)]
struct Segment {
    inactive: Inactive,
    in_use: bool,
    ends_free: bool,
}

pub(super) fn inactive(heap: &Heap, kind: SegmentKind) -> Inactive {
    let mut sum = Inactive::default();
    for range in heap.ranges(kind) {
        let mut segment = Segment::default();
        for (_, block) in range {
            match block.state() {
                State::Free | State::Recent => {
                    segment.inactive.parts += u64::from(!segment.ends_free);
                    segment.inactive.bytes += block.bytes();
                    segment.ends_free = true;
                }
                State::Allocated | State::Pending => {
                    segment.in_use = true;
                    segment.ends_free = false;
                }
                State::Hole | State::Filling | State::Unused => sum.add(std::mem::take(&mut segment)),
            }
        }
        sum.add(segment);
    }
    sum
}

/// The largest free part of a heap.
pub(super) fn largest(heap: &Heap) -> u64 {
    let (mut largest, mut part) = (0, 0);
    for kind in [SegmentKind::Small, SegmentKind::Large] {
        for range in heap.ranges(kind) {
            for (_, block) in range {
                let is_free = matches!(block.state(), State::Free | State::Recent);
                part = if is_free { part + block.bytes() } else { 0 };
                largest = largest.max(part);
            }
            part = 0;
        }
    }
    largest
}

impl Inactive {
    fn add(&mut self, segment: Segment) {
        if segment.in_use {
            self.parts += segment.inactive.parts;
            self.bytes += segment.inactive.bytes;
        }
    }
}

/// The statistics of free parts. They are computed when they are read: a peak is the highest value that was read, and
/// increases and decreases are those between two reads.
#[derive(Debug, Default)]
pub(super) struct InactiveStats {
    pub(super) parts: StatByKind,
    pub(super) bytes: StatByKind,
}

impl InactiveStats {
    pub(super) fn set(&mut self, [small, large]: [Inactive; 2]) {
        for (stats, small, large) in
            [(&mut self.parts, small.parts, large.parts), (&mut self.bytes, small.bytes, large.bytes)]
        {
            set(&mut stats.small_pool, small);
            set(&mut stats.large_pool, large);
            set(&mut stats.all, small + large);
        }
    }

    pub(super) fn each(&mut self, act: fn(&mut StatByKind)) {
        act(&mut self.parts);
        act(&mut self.bytes);
    }
}

fn set(stat: &mut Stat, now: u64) {
    if now >= stat.current {
        stat.increase(now - stat.current);
    } else {
        stat.decrease(stat.current - now);
    }
}
