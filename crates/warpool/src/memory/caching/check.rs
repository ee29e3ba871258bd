//! What must hold between the books. Tests call it after every step.

use std::collections::BTreeMap;

use super::CachingAllocator;
use super::block::Standing;
use super::state::{Source, State};
use crate::lock;
use crate::memory::{MemPoolId, SegmentKind};

impl CachingAllocator {
    /// Compares every book with every other. Slow; for tests, while no other thread is at work.
    ///
    /// # Panics
    /// If they disagree.
    pub fn check(&self) {
        for cell in &self.cells {
            lock(&cell.state).check();
        }
    }
}

/// What the counters of one kind should be.
#[derive(Default)]
struct Sums {
    allocation: u64,
    allocated_bytes: u64,
    active: u64,
    active_bytes: u64,
    requested_bytes: u64,
    inactive_split: u64,
    inactive_split_bytes: u64,
    reserved_bytes: u64,
    segment: u64,
}

impl State {
    fn check(&self) {
        let mut sums = [Sums::default(), Sums::default()];
        let mut by_pool: BTreeMap<MemPoolId, u64> = BTreeMap::new();
        let mut reached = 0;
        for (key, segment) in &self.segments {
            let lane = &self.lanes[segment.lane];
            let bin = &self.bins[lane.bin];
            assert_eq!(bin.lane(lane.stream), Some(segment.lane), "a segment's lane is its bin's");
            let sums = &mut sums[bin.kind as usize];
            let (mut mapped, mut previous) = (0, None);
            for (block_key, block) in self.chain(segment.first) {
                reached += 1;
                assert_eq!(block.segment, key, "a chain stays in its segment");
                let before = previous.map(|previous| &self.blocks[previous]);
                assert_eq!(block.prev, previous, "links go both ways");
                assert!(before.is_none_or(|before| before.end() == block.ptr), "a hole before {:#x}", block.ptr);
                let joinable = matches!(block.standing, Standing::Free | Standing::Unmapped);
                assert!(
                    before.is_none_or(|before| before.standing != block.standing || !joinable),
                    "free neighbours at {:#x} are not joined",
                    block.ptr
                );
                assert!(block.standing != Standing::Moving, "somebody left {:#x} behind", block.ptr);
                let (free_lane, free_key) = self.free_place(block_key);
                let is_free = self.lanes[free_lane].free.holds(free_key, block_key);
                assert_eq!(is_free, block.standing == Standing::Free, "the free set and {:#x} disagree", block.ptr);
                let is_unmapped = lane.unmapped.get(&block.ptr) == Some(&block_key);
                assert_eq!(is_unmapped, block.standing == Standing::Unmapped, "at {:#x}", block.ptr);
                let is_live = self.live.get(&block.ptr) == Some(&block_key);
                assert_eq!(is_live, block.standing == Standing::Taken, "at {:#x}", block.ptr);
                if block.standing != Standing::Unmapped {
                    mapped += block.size;
                }
                match block.standing {
                    Standing::Taken | Standing::Waiting => {
                        if block.standing == Standing::Taken {
                            sums.allocation += 1;
                            sums.allocated_bytes += block.size;
                        }
                        sums.active += 1;
                        sums.active_bytes += block.size;
                        sums.requested_bytes += block.requested;
                    }
                    Standing::Free if block.is_split() && !block.growing => {
                        sums.inactive_split += 1;
                        sums.inactive_split_bytes += block.size;
                    }
                    Standing::Free | Standing::Unmapped | Standing::Moving => {}
                }
                previous = Some(block_key);
            }
            match &segment.source {
                Source::Growing(growing) => assert_eq!(growing.bytes_mapped(), mapped, "chunks and blocks disagree"),
                Source::Plain | Source::Upstream(_) => sums.segment += 1,
            }
            sums.reserved_bytes += mapped;
            *by_pool.entry(bin.pool).or_default() += mapped;
        }
        assert_eq!(reached, self.blocks.len(), "every block is in a segment");
        assert_eq!(self.reserved, sums.iter().map(|sums| sums.reserved_bytes).sum::<u64>());
        self.check_counters(&sums, &by_pool);
        let free: usize = self.lanes.values().map(|lane| lane.free.len()).sum();
        assert_eq!(free, self.blocks.values().filter(|block| block.standing == Standing::Free).count());
        for (lane, entry) in &self.lanes {
            let segments = self.segments.values().filter(|segment| segment.lane == lane).count();
            assert_eq!(entry.segments as usize, segments, "a lane knows its segments");
        }
        assert!(self.lanes.values().all(|lane| lane.segments > 0), "a lane without segments is gone");
        for (id, pool) in &self.pools {
            let empty = pool.bins.iter().all(|&bin| self.bins[bin].lanes.is_empty());
            assert!(pool.uses > 0 || !empty, "pool {id} should be gone");
        }
        assert_eq!(self.bins.len(), 2 * self.pools.len(), "every bin has a pool");
    }

    fn check_counters(&self, sums: &[Sums; 2], by_pool: &BTreeMap<MemPoolId, u64>) {
        let stats = &self.stats;
        let oversize = (stats.oversize_allocations.current, stats.oversize_segments.current);
        assert_eq!(oversize, self.count_oversize(), "oversize blocks and segments");
        for (kind, sums) in [SegmentKind::Small, SegmentKind::Large].into_iter().zip(sums) {
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
            assert_eq!(by_kind.all.current, by_pool.get(pool).copied().unwrap_or(0), "reserved by pool {pool}");
        }
    }
}
