//! Checkpoints of a private pool: every allocated block is freed, and every recorded block is split out of free memory
//! at its old address. Memory of a freed block that no restored one covers waits for the streams that use it.

use std::collections::BTreeSet;

use rustc_hash::FxHashSet;
use warpool_driver::DevicePtr;

use super::DeviceState;
use crate::Result;
use crate::memory::caching::heap::{Block, BlockKey, BlockStatus};
use crate::memory::checkpoint::{
    BlockUses, PoolCheckpoint, Restored, SavedBlock, StreamOrder, UsedRanges, refused_pending,
};
use crate::memory::report::EntryDetails;
use crate::memory::{Allocation, MemPoolId};

impl DeviceState {
    /// Records the allocated blocks of a pool.
    pub(crate) fn checkpoint(&self, allocator: u64, pool: MemPoolId) -> Result<PoolCheckpoint> {
        self.check_checkpointable(pool)?;
        let allocated = self.blocks_in(pool)?.filter(|(_, block)| block.status() == BlockStatus::Allocated);
        let mut blocks: Vec<SavedBlock> = allocated
            .filter(|(_, block)| !block.is_lent())
            .map(|(_, block)| SavedBlock {
                ptr: block.ptr(),
                size: block.size(),
                requested: block.requested(),
                uses: BlockUses {
                    streams: block.unfenced_streams().to_vec(),
                    in_capture: block.streams_used_in_capture().to_vec(),
                },
            })
            .collect();
        blocks.sort_by_key(|block| block.ptr);
        Ok(PoolCheckpoint { allocator, device: self.device, pool, blocks })
    }

    /// For each block to be restored, the streams that its stream has to be ordered after.
    pub(crate) fn order_for(&self, checkpoint: &PoolCheckpoint) -> Result<BTreeSet<StreamOrder>> {
        let mut orders = BTreeSet::new();
        let freed = |block: &Block| !block.is_held() && !block.is_lent();
        for (key, block) in self.blocks_in(checkpoint.pool)?.filter(|(_, block)| freed(block)) {
            if block.has_uses() && checkpoint.overlaps(block.ptr(), block.end()) {
                let (streams, in_capture) = (block.unfenced_streams(), block.streams_used_in_capture());
                orders.extend(StreamOrder::all(self.heap.stream_of(key), streams, in_capture));
            }
        }
        Ok(orders)
    }

    /// Frees all allocated blocks of the pool, and allocates the recorded ones. `None`, without any change, if a stream
    /// uses that memory that is not in `ordered`.
    pub(crate) fn restore(
        &mut self,
        checkpoint: &PoolCheckpoint,
        ordered: &BTreeSet<StreamOrder>,
        details: &EntryDetails,
    ) -> Result<Option<Restored>> {
        self.check_checkpointable(checkpoint.pool)?;
        self.check_room_for(checkpoint)?;
        if !self.order_for(checkpoint)?.is_subset(ordered) {
            return Ok(None);
        }
        let (mut freed, mut used) = (Vec::new(), UsedRanges::default());
        for (block, ptr) in self.allocated_in(checkpoint.pool)? {
            freed.push(ptr);
            self.request_free(block, details);
            let entry = self.heap.block(block);
            let (start, end) = (entry.ptr(), entry.end());
            let forgets = crate::defect::Defect::RestoreForgetsUses.is_on();
            if entry.has_uses() && !checkpoint.overlaps(start, end) && !forgets {
                self.fence_later(block);
                continue;
            }
            let (streams, in_capture) = self.heap.take_uses(block);
            if !forgets {
                used.push((start, end), BlockUses { streams, in_capture });
            }
            self.complete_free(block, details);
        }
        freed.sort_unstable();
        used.sort();
        let allocated = self.allocate_saved(checkpoint, &used, details)?;
        self.free_unsaved(checkpoint.pool, &used, details)?;
        Ok(Some(Restored { freed, allocated }))
    }

    fn check_checkpointable(&self, pool: MemPoolId) -> Result<()> {
        self.pools.checkpointed(pool)?;
        let is_pending = |block: &Block| matches!(block.status(), BlockStatus::PendingFree | BlockStatus::Deferred);
        if self.blocks_in(pool)?.any(|(_, block)| is_pending(block)) {
            return Err(refused_pending(pool));
        }
        Ok(())
    }

    /// Fails unless every saved block lies in memory of the pool, without a hole.
    fn check_room_for(&self, checkpoint: &PoolCheckpoint) -> Result<()> {
        let mut ranges: Vec<&Block> = self
            .blocks_in(checkpoint.pool)?
            .map(|(_, block)| block)
            .filter(|block| matches!(block.status(), BlockStatus::Free | BlockStatus::Allocated))
            .collect();
        ranges.sort_unstable_by_key(|block| block.ptr());
        for saved in &checkpoint.blocks {
            let from_there = &ranges[ranges.partition_point(|block| block.end() <= saved.ptr)..];
            let mut reached = saved.ptr;
            // Within one segment: adjacent segments are not merged.
            for block in from_there.iter().take_while(|block| block.segment() == from_there[0].segment()) {
                if block.ptr() > reached || reached >= saved.end() {
                    break;
                }
                reached = block.end();
            }
            if let Some(held) = from_there.iter().find(|block| block.ptr() < saved.end() && block.is_held())
                && (held.ptr(), held.end()) != (saved.ptr, saved.end())
            {
                return Err(checkpoint.held_block(held.ptr()));
            }
            if let Some(lent) = from_there.iter().find(|block| block.ptr() < saved.end() && block.is_lent()) {
                return Err(checkpoint.lent_block(lent.ptr()));
            }
            if reached < saved.end() {
                return Err(checkpoint.released_since(saved));
            }
        }
        Ok(())
    }

    /// The blocks that a restore frees: all allocated ones except those that graphs hold or that serve the default
    /// pool.
    fn allocated_in(&self, pool: MemPoolId) -> Result<Vec<(BlockKey, DevicePtr)>> {
        let allocated = self.blocks_in(pool)?.filter(|(_, block)| block.status() == BlockStatus::Allocated);
        let freed = allocated.filter(|(_, block)| !block.is_held() && !block.is_lent());
        Ok(freed.map(|(key, block)| (key, DevicePtr(block.ptr()))).collect())
    }

    /// The free blocks of a pool, by address.
    fn free_in(&self, pool: MemPoolId) -> Result<Vec<(u64, BlockKey)>> {
        let free = self.blocks_in(pool)?.filter(|(_, block)| block.status() == BlockStatus::Free);
        let mut free: Vec<(u64, BlockKey)> = free.map(|(key, block)| (block.ptr(), key)).collect();
        free.sort_unstable();
        Ok(free)
    }

    /// Splits the saved blocks out of the free blocks. Both are sorted by address: the rest of a block that is split
    /// keeps its key.
    fn allocate_saved(
        &mut self,
        checkpoint: &PoolCheckpoint,
        used: &UsedRanges,
        details: &EntryDetails,
    ) -> Result<Vec<Allocation>> {
        let held = self.blocks_in(checkpoint.pool)?.filter(|(_, block)| block.is_held());
        let held: FxHashSet<u64> = held.map(|(_, block)| block.ptr()).collect();
        let free = self.free_in(checkpoint.pool)?;
        let around = |saved: &SavedBlock| free[..free.partition_point(|&(ptr, _)| ptr <= saved.ptr)].last();
        let allocate = |saved: &SavedBlock| {
            let &(_, free) = around(saved).expect("room was checked, and all of it is free");
            let (block, allocation) = self.allocate_range(free, (saved.ptr, saved.end()), saved.requested, details);
            self.add_uses(block, &saved.uses);
            used.of(saved).for_each(|range| self.add_uses(block, &range.uses));
            self.report_allocated(&allocation);
            allocation
        };
        Ok(checkpoint.blocks.iter().filter(|saved| !held.contains(&saved.ptr)).map(allocate).collect())
    }

    /// Makes the free parts of the ranges wait for the streams that use them: each part becomes a block that is
    /// allocated and freed at once.
    fn free_unsaved(&mut self, pool: MemPoolId, used: &UsedRanges, details: &EntryDetails) -> Result<()> {
        if used.iter().next().is_none() {
            return Ok(());
        }
        let free = self.free_in(pool)?;
        for range in used.iter() {
            let first = free.partition_point(|&(ptr, _)| ptr <= range.start).saturating_sub(1);
            for &(_, block) in free[first..].iter().take_while(|&&(ptr, _)| ptr < range.end) {
                // After a split, the rest, which comes after, keeps the key.
                let Some(entry) = self.heap.get(block).filter(|entry| entry.status() == BlockStatus::Free) else {
                    continue;
                };
                let (start, end) = (entry.ptr().max(range.start), entry.end().min(range.end));
                if start < end {
                    let (block, _) = self.allocate_range(block, (start, end), end - start, details);
                    self.add_uses(block, &range.uses);
                    self.request_free(block, details);
                    self.fence_later(block);
                }
            }
        }
        Ok(())
    }

    /// Allocates a range of a free block, regardless of the size rules.
    fn allocate_range(
        &mut self,
        free: BlockKey,
        (start, end): (u64, u64),
        requested: u64,
        details: &EntryDetails,
    ) -> (BlockKey, Allocation) {
        let around = self.heap.block(free);
        assert!(around.ptr() <= start && end <= around.end(), "a free block is around {start:#x}");
        let stream = self.heap.stream_of(free);
        self.take_free_from(free, start);
        let taken = self.heap.split(free, end - start);
        (taken.block, self.allocate_taken(&taken, requested, stream, details))
    }

    fn add_uses(&mut self, block: BlockKey, uses: &BlockUses) {
        if !uses.streams.is_empty() {
            self.heap.uses_mut(block).add_all(uses.streams.iter().copied());
        }
        for &stream in &uses.in_capture {
            let known = self.heap.uses_in_capture_mut(block);
            if !known.contains(&stream) {
                known.push(stream);
            }
        }
    }
}
