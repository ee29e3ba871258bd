//! Segments: ranges that are backed as a whole, without pages.

use std::collections::BTreeSet;

use super::super::homes::Home;
use super::super::ids::HeapId;
use super::super::pools::SegmentSource;
use super::{PageTable, RangeId, RangeMap};
use crate::memory::SegmentKind;

impl PageTable {
    /// Adds a segment. Returns its number.
    pub(in crate::memory::paged) fn add_segment(
        &mut self,
        base: u64,
        bytes: u64,
        heap: HeapId,
        kind: SegmentKind,
        from: SegmentSource,
    ) -> RangeId {
        self.segment_bytes += bytes;
        self.reserved.increase(kind, bytes);
        let pool = self.heap_mut(heap).pool;
        self.homes.added(Home { pool, kind, bytes, neighbours: 0 });
        self.homes.segment_allocs += 1;
        self.push_range(RangeMap::new(base, bytes, heap, kind, Some(from)))
    }

    /// Removes a segment. Returns its source, which is dropped without a lock.
    pub(in crate::memory::paged) fn remove_segment(&mut self, number: RangeId) -> Option<SegmentSource> {
        let map = &mut self.ranges[number.index()];
        let (bytes, heap, kind) = (map.bytes, std::mem::replace(&mut map.heap, HeapId(u32::MAX)), map.kind);
        let source = map.segment.take();
        self.heap_mut(heap).ranges.retain(|&other| other != number);
        self.segment_bytes -= bytes;
        self.reserved.decrease(kind, bytes);
        let pool = self.heap_mut(heap).pool;
        self.homes.removed(Home { pool, kind, bytes, neighbours: 0 });
        self.homes.segment_frees += 1;
        self.unused_ranges.push(number);
        source
    }

    pub(in crate::memory::paged) fn segment_source(&self, number: RangeId) -> SegmentSource {
        self.range(number).segment.clone().expect("a segment has a source")
    }

    /// The heaps that have segments, each once.
    pub(in crate::memory::paged) fn heaps_with_segments(&self) -> BTreeSet<HeapId> {
        self.ranges.iter().filter(|map| map.segment.is_some()).map(|map| map.heap).collect()
    }

    /// A source is asked for `bytes`, which count against the limit meanwhile. `false` if they exceed it.
    pub(in crate::memory::paged) fn begin_call(&mut self, bytes: u64) {
        self.calls_bytes += bytes;
    }

    pub(in crate::memory::paged) fn end_call(&mut self, bytes: u64) {
        self.calls_bytes -= bytes;
    }

    /// A source gets a segment of `bytes` back: from now on it may be free.
    pub(in crate::memory::paged) fn begin_return(&mut self, bytes: u64) {
        self.returning_bytes += bytes;
    }

    pub(in crate::memory::paged) fn end_return(&mut self, bytes: u64) {
        self.returning_bytes -= bytes;
    }
}
