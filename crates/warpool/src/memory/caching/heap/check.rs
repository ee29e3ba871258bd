//! The invariants of the heap, and the totals that the statistics must match.

use std::collections::BTreeMap;

use warpool_driver::StreamId;

use super::{Backing, BlockStatus, Heap, SegmentKey};
use crate::memory::{MemPoolId, SizeRules};

/// Sums over all blocks and segments.
#[derive(Default)]
pub(crate) struct HeapTotals {
    /// Small, large.
    pub(crate) by_kind: [KindTotals; 2],
    pub(crate) reserved_by_pool: BTreeMap<MemPoolId, u64>,
    pub(crate) oversize_allocations: u64,
    pub(crate) oversize_segments: u64,
    pub(crate) deferred: usize,
}

/// The totals of one kind of segment.
#[derive(Default)]
pub(crate) struct KindTotals {
    pub(crate) allocation: u64,
    pub(crate) allocated_bytes: u64,
    pub(crate) active: u64,
    pub(crate) active_bytes: u64,
    pub(crate) requested_bytes: u64,
    pub(crate) inactive_split: u64,
    pub(crate) inactive_split_bytes: u64,
    pub(crate) reserved_bytes: u64,
    pub(crate) segment: u64,
}

impl Heap {
    /// How many allocated blocks and how many segments are too large to be split.
    pub(crate) fn count_oversize(&self, rules: &SizeRules) -> (u64, u64) {
        let is_oversize =
            |(_, block): &(_, &super::Block)| block.status == BlockStatus::Allocated && rules.is_oversize(block.size);
        let blocks = self.blocks.iter().filter(is_oversize).count();
        let segments = self.segments.values().filter(|segment| {
            let bytes: u64 = self.blocks_of(segment).map(|(_, block)| block.size).sum();
            !matches!(segment.backing, Backing::Expandable(_)) && rules.is_oversize(bytes)
        });
        (blocks as u64, segments.count() as u64)
    }

    /// Checks every invariant. No other thread may use the allocator meanwhile.
    ///
    /// # Panics
    /// If an invariant does not hold.
    pub(crate) fn check(&self, rules: &SizeRules) -> HeapTotals {
        let mut totals = HeapTotals::default();
        (totals.oversize_allocations, totals.oversize_segments) = self.count_oversize(rules);
        let (mut blocks, mut allocated) = (0, 0);
        for (key, segment) in &self.segments {
            let stream_blocks = &self.stream_blocks[segment.stream_blocks];
            let block_pool = &self.block_pools[stream_blocks.block_pool];
            let of_stream = block_pool.of_stream(stream_blocks.stream);
            assert_eq!(of_stream, Some(segment.stream_blocks), "a segment's stream is in its block pool");
            let sums = &mut totals.by_kind[block_pool.kind as usize];
            let (mut mapped, mut previous) = (0, None);
            for (block_key, block) in self.blocks_of(segment) {
                blocks += 1;
                assert_eq!(block.segment, key, "links stay in their segment");
                let before = previous.map(|previous| &self.blocks[previous]);
                assert_eq!(block.prev, previous, "links go both ways");
                assert!(before.is_none_or(|before| before.end() == block.ptr), "a hole before {:#x}", block.ptr);
                let mergeable = matches!(block.status, BlockStatus::Free | BlockStatus::Unmapped);
                assert!(
                    before.is_none_or(|before| before.status != block.status || !mergeable),
                    "free neighbours at {:#x} are not merged",
                    block.ptr
                );
                assert!(block.status != BlockStatus::InTransit, "{:#x} was left in transit", block.ptr);
                let (free_list, free_key) = self.free_key(block_key);
                let is_free = self.stream_blocks[free_list].free.contains(free_key, block_key);
                assert_eq!(is_free, block.status == BlockStatus::Free, "in a free list, at {:#x}", block.ptr);
                let is_unmapped = stream_blocks.unmapped.get(&block.ptr) == Some(&block_key);
                assert_eq!(is_unmapped, block.status == BlockStatus::Unmapped, "unmapped, at {:#x}", block.ptr);
                let is_allocated = self.allocated.get(&block.ptr) == Some(&block_key);
                assert_eq!(is_allocated, block.status == BlockStatus::Allocated, "allocated, at {:#x}", block.ptr);
                allocated += usize::from(is_allocated);
                totals.deferred += usize::from(block.status == BlockStatus::Deferred);
                if block.status != BlockStatus::Unmapped {
                    mapped += block.size;
                }
                match block.status {
                    BlockStatus::Allocated | BlockStatus::PendingFree | BlockStatus::Deferred => {
                        if block.status == BlockStatus::Allocated {
                            sums.allocation += 1;
                            sums.allocated_bytes += block.size;
                        }
                        sums.active += 1;
                        sums.active_bytes += block.size;
                        sums.requested_bytes += block.requested;
                    }
                    BlockStatus::Free if block.is_split() && !block.expandable => {
                        sums.inactive_split += 1;
                        sums.inactive_split_bytes += block.size;
                    }
                    BlockStatus::Free | BlockStatus::Unmapped | BlockStatus::InTransit => {}
                }
                previous = Some(block_key);
            }
            match &segment.backing {
                Backing::Expandable(expandable) => {
                    assert_eq!(expandable.bytes_mapped(), mapped, "chunks and blocks disagree");
                }
                Backing::Whole(_) => sums.segment += 1,
            }
            sums.reserved_bytes += mapped;
            *totals.reserved_by_pool.entry(block_pool.pool).or_default() += mapped;
        }
        assert_eq!(blocks, self.blocks.len(), "every block is in a segment");
        assert_eq!(allocated, self.allocated.len(), "every address is that of an allocated block");
        self.check_stream_blocks();
        totals
    }

    fn check_stream_blocks(&self) {
        let free: usize = self.stream_blocks.values().map(|blocks| blocks.free.len()).sum();
        assert_eq!(free, self.blocks.values().filter(|block| block.status == BlockStatus::Free).count());
        let unmapped: usize = self.stream_blocks.values().map(|blocks| blocks.unmapped.len()).sum();
        assert_eq!(unmapped, self.blocks.values().filter(|block| block.status == BlockStatus::Unmapped).count());
        let mut block_pools: BTreeMap<StreamId, u32> = BTreeMap::new();
        for (key, blocks) in &self.stream_blocks {
            let is_of_stream = |segment: &SegmentKey| self.segments[*segment].stream_blocks == key;
            assert!(blocks.segments.iter().all(is_of_stream), "a stream has segments of its own");
            assert!(!blocks.segments.is_empty(), "a stream without segments is removed");
            *block_pools.entry(blocks.stream).or_default() += 1;
        }
        let segments: usize = self.stream_blocks.values().map(|blocks| blocks.segments.len()).sum();
        assert_eq!(segments, self.segments.len(), "every segment is a stream's");
        let handles = self.stream_handles.iter().map(|(&stream, &(_, count))| (stream, count));
        assert_eq!(handles.collect::<BTreeMap<_, _>>(), block_pools, "handles of streams with segments");
        assert_eq!(self.ranges.len(), self.segments.len(), "ranges of segments");
        let streams: usize = self.block_pools.values().map(|block_pool| block_pool.streams.len()).sum();
        assert_eq!(streams, self.stream_blocks.len(), "every stream's blocks are in a block pool");
    }
}
