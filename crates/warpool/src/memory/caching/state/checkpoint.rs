//! Checkpoints of a private pool: its allocated blocks are recorded, and restored later.
//!
//! Restoring checks everything first and then changes all in one step: every allocated block is freed, and every
//! recorded one is split out of free memory at its old address. Use counts, and segments allocated since, stay as they
//! are.

use warpool_driver::{DeviceId, DevicePtr, StreamId};

use super::DeviceState;
use crate::memory::caching::heap::{Block, BlockKey, BlockStatus};
use crate::memory::report::EntryDetails;
use crate::memory::stream_fence::StreamUses;
use crate::memory::{Allocation, MemPoolId};
use crate::{Error, Result};

/// The blocks of a pool that were allocated at some moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolCheckpoint {
    device: DeviceId,
    pool: MemPoolId,
    blocks: Vec<SavedBlock>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct SavedBlock {
    ptr: u64,
    size: u64,
    requested: u64,
    uses: Vec<StreamId>,
}

impl SavedBlock {
    fn end(&self) -> u64 {
        self.ptr + self.size
    }
}

impl PoolCheckpoint {
    pub(crate) const fn device(&self) -> DeviceId {
        self.device
    }

    /// The pool.
    #[must_use]
    pub const fn pool(&self) -> MemPoolId {
        self.pool
    }

    /// The addresses of its blocks, ascending.
    pub fn live(&self) -> impl ExactSizeIterator<Item = DevicePtr> + '_ {
        self.blocks.iter().map(|block| DevicePtr(block.ptr))
    }
}

/// What restoring a checkpoint did. An address may be in both lists: its block is another one now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Restored {
    /// Blocks that were allocated and are freed now: their owners must not use or free them any more.
    pub freed: Vec<DevicePtr>,
    /// Blocks that are allocated now, and belong to the caller.
    pub allocated: Vec<Allocation>,
}

impl DeviceState {
    /// Records the allocated blocks of a pool.
    pub(crate) fn checkpoint(&self, pool: MemPoolId) -> Result<PoolCheckpoint> {
        self.check_checkpointable(pool)?;
        let allocated = self.heap.blocks_in(pool).filter(|(_, block)| block.status() == BlockStatus::Allocated);
        let mut blocks: Vec<SavedBlock> = allocated
            .map(|(_, block)| SavedBlock {
                ptr: block.ptr(),
                size: block.size(),
                requested: block.requested(),
                uses: block.unfenced_streams().to_vec(),
            })
            .collect();
        blocks.sort_by_key(|block| block.ptr);
        Ok(PoolCheckpoint { device: self.device, pool, blocks })
    }

    /// Frees what is allocated in the pool, and allocates what the checkpoint recorded.
    pub(crate) fn restore(&mut self, checkpoint: &PoolCheckpoint, details: &EntryDetails) -> Result<Restored> {
        self.check_checkpointable(checkpoint.pool)?;
        self.check_room_for(checkpoint)?;
        let mut freed = self.free_pool(checkpoint.pool, details);
        freed.sort_unstable();
        Ok(Restored { freed, allocated: self.allocate_saved(checkpoint, details) })
    }

    fn check_checkpointable(&self, pool: MemPoolId) -> Result<()> {
        let refuse = |why: &str| Err(Error::Checkpoint { pool, why: why.to_owned() });
        if pool.is_default() {
            return refuse("only private pools have checkpoints");
        }
        if self.pools.uses(pool)? == 0 {
            return refuse("the pool was released");
        }
        let is_pending = |block: &Block| matches!(block.status(), BlockStatus::PendingFree | BlockStatus::Deferred);
        if self.heap.blocks_in(pool).any(|(_, block)| is_pending(block)) {
            return refuse("a freed block waits for streams that used it; synchronize with them first");
        }
        Ok(())
    }

    /// Every saved block must lie in memory that the pool has, without a hole.
    fn check_room_for(&self, checkpoint: &PoolCheckpoint) -> Result<()> {
        let mut ranges: Vec<&Block> = self
            .heap
            .blocks_in(checkpoint.pool)
            .map(|(_, block)| block)
            .filter(|block| matches!(block.status(), BlockStatus::Free | BlockStatus::Allocated))
            .collect();
        ranges.sort_unstable_by_key(|block| block.ptr());
        for saved in &checkpoint.blocks {
            let behind = &ranges[ranges.partition_point(|block| block.end() <= saved.ptr)..];
            let mut reached = saved.ptr;
            // Within one segment: two that happen to be adjacent are still two.
            for block in behind.iter().take_while(|block| block.segment() == behind[0].segment()) {
                if block.ptr() > reached || reached >= saved.end() {
                    break;
                }
                reached = block.end();
            }
            if reached < saved.end() {
                let why = format!("could not find {:#x}: the memory was released since", saved.ptr);
                return Err(Error::Checkpoint { pool: checkpoint.pool, why });
            }
        }
        Ok(())
    }

    fn free_pool(&mut self, pool: MemPoolId, details: &EntryDetails) -> Vec<DevicePtr> {
        let allocated: Vec<(BlockKey, DevicePtr)> = self
            .heap
            .blocks_in(pool)
            .filter(|(_, block)| block.status() == BlockStatus::Allocated)
            .map(|(key, block)| (key, DevicePtr(block.ptr())))
            .collect();
        for &(block, _) in &allocated {
            self.request_free(block, details);
            self.heap.clear_extra(block);
            self.complete_free(block, details);
        }
        allocated.into_iter().map(|(_, ptr)| ptr).collect()
    }

    /// Splits the saved blocks out of free memory, both by address: the rest of a block that is split keeps its key.
    fn allocate_saved(&mut self, checkpoint: &PoolCheckpoint, details: &EntryDetails) -> Vec<Allocation> {
        let mut free: Vec<(u64, BlockKey)> = self
            .heap
            .blocks_in(checkpoint.pool)
            .filter(|(_, block)| block.status() == BlockStatus::Free)
            .map(|(key, block)| (block.ptr(), key))
            .collect();
        free.sort_unstable();
        let around = |saved: &SavedBlock| free[..free.partition_point(|&(ptr, _)| ptr <= saved.ptr)].last();
        let allocate = |saved: &SavedBlock| {
            let &(_, block) = around(saved).expect("room was checked, and all of the pool is free");
            self.allocate_saved_block(block, saved, details)
        };
        checkpoint.blocks.iter().map(allocate).collect()
    }

    /// Splits a saved block out of the free one around it, whatever the size rules say.
    fn allocate_saved_block(&mut self, free: BlockKey, saved: &SavedBlock, details: &EntryDetails) -> Allocation {
        let around = self.heap.block(free);
        assert!(around.ptr() <= saved.ptr && saved.end() <= around.end(), "room for {:#x} was checked", saved.ptr);
        let stream = self.heap.stream_of(free);
        self.take_free_from(free, saved.ptr);
        let taken = self.heap.split(free, saved.size);
        let allocation = self.allocate_taken(&taken, saved.requested, stream, details);
        if !saved.uses.is_empty() {
            *self.heap.uses_mut(taken.block) = StreamUses::of(saved.uses.clone());
        }
        allocation
    }
}
