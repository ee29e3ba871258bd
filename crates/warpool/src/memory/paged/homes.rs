//! Statistics of the addresses that pages belong to: segments, and the bytes of each private pool.
//!
//! A *segment* of this allocator is a run of addresses with pages in one range of a heap. Segments come and
//! go where pages do, in the slow path, so every figure here is exact. A peak includes pages that a request took and
//! put back.

use std::collections::BTreeMap;

use crate::memory::{MemPoolId, SegmentKind, StatByKind};

#[derive(Debug, Default)]
pub(super) struct HomeCounters {
    pub(super) segments: StatByKind,
    /// Bytes of pages by the private pool that they belong to.
    pub(super) by_pool: BTreeMap<MemPoolId, StatByKind>,
    /// Segments in one piece that were allocated and freed.
    pub(super) segment_allocs: u64,
    pub(super) segment_frees: u64,
}

/// A page or segment that belongs to a heap, or is about to.
#[derive(Clone, Copy)]
pub(super) struct Home {
    pub(super) pool: MemPoolId,
    pub(super) kind: SegmentKind,
    pub(super) bytes: u64,
    /// How many of the two slots beside it have pages of their own.
    pub(super) neighbours: u64,
}

impl HomeCounters {
    pub(super) fn forget_pool(&mut self, pool: MemPoolId) {
        self.by_pool.remove(&pool);
    }

    pub(super) fn added(&mut self, home: Home) {
        self.change_segments(home.kind, home.neighbours, 1);
        if !home.pool.is_default() {
            self.by_pool.entry(home.pool).or_default().increase(home.kind, home.bytes);
        }
    }

    pub(super) fn removed(&mut self, home: Home) {
        self.change_segments(home.kind, 1, home.neighbours);
        if !home.pool.is_default() {
            self.by_pool.entry(home.pool).or_default().decrease(home.kind, home.bytes);
        }
    }

    /// The number of segments changes.
    fn change_segments(&mut self, kind: SegmentKind, before: u64, after: u64) {
        if after > before {
            self.segments.increase(kind, after - before);
        } else {
            self.segments.decrease(kind, before - after);
        }
    }

    pub(super) fn reset_peak(&mut self) {
        self.segments.reset_peak();
        self.by_pool.values_mut().for_each(StatByKind::reset_peak);
    }

    pub(super) fn reset_accumulated(&mut self) {
        (self.segment_allocs, self.segment_frees) = (0, 0);
        self.segments.reset_accumulated();
        self.by_pool.values_mut().for_each(StatByKind::reset_accumulated);
    }
}
