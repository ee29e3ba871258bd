//! Statistics that are computed when they are read: segments, their free parts, and what private pools have reserved. A
//! peak is the highest value that was read, and increases and decreases are those between two reads. Reading them
//! changes nothing: statistics must not decide where the next request goes.
//!
//! A *segment* of this allocator is a run of addresses with pages in one range of a heap. Of its free blocks neighbours
//! that will be merged count as one part, as in a snapshot.

use std::collections::BTreeMap;

use super::heap::{Heap, State};
use crate::memory::{MemPoolId, SegmentKind, Stat, StatByKind, Stats};

/// What a heap has of one kind.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counted {
    segments: u64,
    bytes: u64,
    /// The free parts of segments that are partly in use.
    parts: u64,
    bytes_of_parts: u64,
    /// The largest free part.
    largest: u64,
}

/// One segment while its blocks are visited.
#[derive(Default)]
struct Segment {
    bytes: u64,
    parts: u64,
    bytes_free: u64,
    /// The bytes of the free part at its end.
    last_part: u64,
    largest: u64,
}

impl Counted {
    pub(super) fn of(heap: &Heap, kind: SegmentKind) -> Self {
        let mut counted = Self::default();
        for range in heap.ranges(kind) {
            let mut segment = Segment::default();
            for (_, block) in range {
                match block.state() {
                    State::Free | State::Recent => {
                        segment.parts += u64::from(segment.last_part == 0);
                        segment.last_part += block.bytes();
                        segment.bytes_free += block.bytes();
                        segment.largest = segment.largest.max(segment.last_part);
                    }
                    State::Allocated | State::Pending => segment.last_part = 0,
                    State::Hole | State::Filling | State::Unused => {
                        counted.add(std::mem::take(&mut segment));
                        continue;
                    }
                }
                segment.bytes += block.bytes();
            }
            counted.add(segment);
        }
        counted
    }

    fn add(&mut self, segment: Segment) {
        self.segments += u64::from(segment.bytes > 0);
        self.bytes += segment.bytes;
        self.largest = self.largest.max(segment.largest);
        if segment.bytes_free < segment.bytes {
            self.parts += segment.parts;
            self.bytes_of_parts += segment.bytes_free;
        }
    }
}

/// The largest free part of a heap.
pub(super) fn largest(heap: &Heap) -> u64 {
    [SegmentKind::Small, SegmentKind::Large].map(|kind| Counted::of(heap, kind).largest).into_iter().max().unwrap_or(0)
}

#[derive(Debug, Default)]
pub(super) struct ComputedStats {
    segments: StatByKind,
    parts: StatByKind,
    bytes_of_parts: StatByKind,
    /// Bytes by the private pool that they belong to.
    by_pool: BTreeMap<MemPoolId, StatByKind>,
}

impl ComputedStats {
    /// Takes over what all heaps have, of both kinds. `pools` are the private pools that exist.
    pub(super) fn set(&mut self, heaps: &[(MemPoolId, [Counted; 2])], pools: &[MemPoolId]) {
        let sum = |of: fn(&Counted) -> u64, pool: Option<MemPoolId>| {
            let heaps = heaps.iter().filter(|(of_pool, _)| pool.is_none_or(|pool| pool == *of_pool));
            heaps.fold([0; 2], |[small, large], (_, counted)| [small + of(&counted[0]), large + of(&counted[1])])
        };
        set(&mut self.segments, sum(|counted| counted.segments, None));
        set(&mut self.parts, sum(|counted| counted.parts, None));
        set(&mut self.bytes_of_parts, sum(|counted| counted.bytes_of_parts, None));
        self.by_pool.retain(|pool, _| pools.contains(pool));
        for &pool in pools {
            let bytes = sum(|counted| counted.bytes, Some(pool));
            if bytes != [0; 2] || self.by_pool.contains_key(&pool) {
                set(self.by_pool.entry(pool).or_default(), bytes);
            }
        }
    }

    pub(super) fn each(&mut self, act: fn(&mut StatByKind)) {
        [&mut self.segments, &mut self.parts, &mut self.bytes_of_parts].into_iter().for_each(act);
        self.by_pool.values_mut().for_each(act);
    }

    pub(super) fn write(&self, stats: &mut Stats) {
        (stats.segment, stats.inactive_split) = (self.segments, self.parts);
        stats.inactive_split_bytes = self.bytes_of_parts;
        stats.reserved_bytes_by_private_pools.clone_from(&self.by_pool);
    }
}

fn set(stats: &mut StatByKind, [small, large]: [u64; 2]) {
    let set = |stat: &mut Stat, now: u64| match now.checked_sub(stat.current) {
        Some(more) => stat.increase(more),
        None => stat.decrease(stat.current - now),
    };
    set(&mut stats.small_pool, small);
    set(&mut stats.large_pool, large);
    set(&mut stats.all, small + large);
}
