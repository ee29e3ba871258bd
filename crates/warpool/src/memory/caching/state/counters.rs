//! The statistics of one device, counted where its state changes.

use crate::memory::caching::heap::{Block, BlockPool, HeapTotals, Merged, Taken};
use crate::memory::{SegmentKind, Stat, Stats};

#[derive(Debug)]
pub(crate) struct Counters {
    pub(crate) stats: Stats,
}

impl Counters {
    pub(crate) fn new(max_split_stat: i64) -> Self {
        Self { stats: Stats { max_split_size: max_split_stat, ..Stats::default() } }
    }

    pub(crate) fn segment_allocated(&mut self, block_pool: &BlockPool, bytes: u64, oversize: bool) {
        self.reserved(block_pool, bytes);
        self.stats.segment.increase(block_pool.kind(), 1);
        if oversize {
            self.stats.oversize_segments.increase(1);
        }
    }

    pub(crate) fn segment_freed(&mut self, block_pool: &BlockPool, bytes: u64, oversize: bool) {
        self.released(block_pool, bytes);
        self.stats.segment.decrease(block_pool.kind(), 1);
        if oversize {
            self.stats.oversize_segments.decrease(1);
        }
    }

    /// Bytes came from the driver.
    pub(crate) fn reserved(&mut self, block_pool: &BlockPool, bytes: u64) {
        let (pool, kind) = (block_pool.pool(), block_pool.kind());
        self.stats.reserved_bytes.increase(kind, bytes);
        self.stats.num_device_alloc += 1;
        if !pool.is_default() {
            self.stats.reserved_bytes_by_private_pools.entry(pool).or_default().increase(kind, bytes);
        }
    }

    /// Bytes returned to the driver.
    pub(crate) fn released(&mut self, block_pool: &BlockPool, bytes: u64) {
        let (pool, kind) = (block_pool.pool(), block_pool.kind());
        self.stats.reserved_bytes.decrease(kind, bytes);
        self.stats.num_device_free += 1;
        if !pool.is_default() && !crate::defect::Defect::PoolStatsKeepReleased.is_on() {
            self.stats.reserved_bytes_by_private_pools.entry(pool).or_default().decrease(kind, bytes);
        }
    }

    /// A free block was taken, whole or in part. Blocks of expandable segments do not count as split.
    #[inline]
    pub(crate) fn taken(&mut self, taken: &Taken, block: &Block) {
        if block.is_expandable() {
            return;
        }
        let (kind, stats) = (block.kind(), &mut self.stats);
        match (taken.was_split, taken.rest) {
            (true, Some(_)) => stats.inactive_split_bytes.decrease(kind, block.size()),
            (true, None) => {
                stats.inactive_split_bytes.decrease(kind, block.size());
                stats.inactive_split.decrease(kind, 1);
            }
            (false, Some(rest)) => {
                stats.inactive_split_bytes.increase(kind, rest);
                stats.inactive_split.increase(kind, 1);
            }
            (false, None) => {}
        }
    }

    /// The front of a block of `whole` bytes that is about to be allocated was split off as a free block. Both count as
    /// free parts of their segment until the allocation.
    pub(crate) fn front_freed(&mut self, block: &Block, was_split: bool, whole: u64) {
        if block.is_expandable() {
            return;
        }
        self.stats.inactive_split.increase(block.kind(), if was_split { 1 } else { 2 });
        if !was_split {
            self.stats.inactive_split_bytes.increase(block.kind(), whole);
        }
    }

    #[inline]
    pub(crate) fn block_allocated(&mut self, kind: SegmentKind, size: u64, requested: u64, oversize: bool) {
        let stats = &mut self.stats;
        stats.allocation.increase(kind, 1);
        stats.allocated_bytes.increase(kind, size);
        stats.active.increase(kind, 1);
        stats.active_bytes.increase(kind, size);
        stats.requested_bytes.increase(kind, requested);
        if oversize {
            stats.oversize_allocations.increase(1);
        }
    }

    #[inline]
    pub(crate) fn free_requested(&mut self, kind: SegmentKind, size: u64, oversize: bool) {
        self.stats.allocation.decrease(kind, 1);
        self.stats.allocated_bytes.decrease(kind, size);
        if oversize {
            self.stats.oversize_allocations.decrease(1);
        }
    }

    /// A block of `size` bytes became free, as a part of `merged`.
    #[inline]
    pub(crate) fn free_completed(&mut self, size: u64, requested: u64, merged: Merged, block: &Block) {
        let (kind, stats) = (block.kind(), &mut self.stats);
        stats.active.decrease(kind, 1);
        stats.active_bytes.decrease(kind, size);
        stats.requested_bytes.decrease(kind, requested);
        if block.is_expandable() {
            return;
        }
        // Several free parts of the segment became one, or none if the whole segment is free. Each counter changes
        // once, so that the peaks are right.
        let (blocks, bytes) = if block.is_split() { (1, block.size()) } else { (0, 0) };
        if blocks >= merged.blocks {
            stats.inactive_split.increase(kind, blocks - merged.blocks);
        } else {
            stats.inactive_split.decrease(kind, merged.blocks - blocks);
        }
        if bytes >= merged.bytes {
            stats.inactive_split_bytes.increase(kind, bytes - merged.bytes);
        } else {
            stats.inactive_split_bytes.decrease(kind, merged.bytes - bytes);
        }
    }

    /// A block was freed and allocated again, `times` times: only the accumulated values change.
    pub(crate) fn repeated(&mut self, taken: &Taken, block: &Block, oversize: bool, times: u64) {
        let (kind, stats) = (block.kind(), &mut self.stats);
        for stat in [&mut stats.allocation, &mut stats.active] {
            stat.repeat(kind, times);
        }
        for stat in [&mut stats.allocated_bytes, &mut stats.active_bytes] {
            stat.repeat(kind, times * block.size());
        }
        stats.requested_bytes.repeat(kind, times * block.requested());
        if oversize {
            stats.oversize_allocations.repeat(times);
        }
        if block.is_expandable() {
            return;
        }
        // `free_completed` reverts the changes of `taken`.
        let (blocks, bytes) = match (taken.was_split, taken.rest) {
            (true, Some(_)) => (0, block.size()),
            (true, None) => (1, block.size()),
            (false, Some(rest)) => (1, rest),
            (false, None) => (0, 0),
        };
        stats.inactive_split.repeat(kind, times * blocks);
        stats.inactive_split_bytes.repeat(kind, times * bytes);
    }

    /// `max_split_size` changed: blocks and segments freed later are judged by the new one.
    pub(crate) fn set_oversize(&mut self, max_split_stat: i64, (allocations, segments): (u64, u64)) {
        self.stats.max_split_size = max_split_stat;
        let set = |stat: &mut Stat, now: u64| match now.checked_sub(stat.current) {
            Some(more) => stat.increase(more),
            None => stat.decrease(stat.current - now),
        };
        set(&mut self.stats.oversize_allocations, allocations);
        set(&mut self.stats.oversize_segments, segments);
    }

    /// Compares the statistics with the heap.
    ///
    /// # Panics
    /// If they disagree.
    pub(crate) fn check(&self, totals: &HeapTotals) {
        let stats = &self.stats;
        assert_eq!(stats.oversize_allocations.current, totals.oversize_allocations, "oversize blocks");
        assert_eq!(stats.oversize_segments.current, totals.oversize_segments, "oversize segments");
        for (kind, sums) in [SegmentKind::Small, SegmentKind::Large].into_iter().zip(&totals.by_kind) {
            let pairs = [
                ("allocation", &stats.allocation, sums.allocation),
                ("allocated_bytes", &stats.allocated_bytes, sums.allocated_bytes),
                ("active", &stats.active, sums.active),
                ("active_bytes", &stats.active_bytes, sums.active_bytes),
                ("requested_bytes", &stats.requested_bytes, sums.requested_bytes),
                ("inactive_split", &stats.inactive_split, sums.inactive_split),
                ("inactive_split_bytes", &stats.inactive_split_bytes, sums.inactive_split_bytes),
                ("reserved_bytes", &stats.reserved_bytes, sums.reserved_bytes),
                ("segment", &stats.segment, sums.segment),
            ];
            for (name, by_kind, sum) in pairs {
                let counted = match kind {
                    SegmentKind::Small => by_kind.small_pool.current,
                    SegmentKind::Large => by_kind.large_pool.current,
                };
                assert_eq!(counted, sum, "{name} of {}", kind.name());
                let both = by_kind.small_pool.current + by_kind.large_pool.current;
                assert_eq!(by_kind.all.current, both, "{name} of all");
            }
        }
        for (pool, by_kind) in &stats.reserved_bytes_by_private_pools {
            let reserved = totals.reserved_by_pool.get(pool).copied().unwrap_or(0);
            assert_eq!(by_kind.all.current, reserved, "reserved by pool {pool}");
        }
    }
}
