//! Checkpoints of a private pool: which of its blocks are given out is kept, and put back later.
//!
//! Putting back checks everything first and then changes all in one step: every block that is given out is freed, and
//! every kept one is cut out of free memory at its old place. Use counts, and segments made since, stay as they are.

use warpool_driver::{DeviceId, DevicePtr, StreamId};

use super::block::{Block, BlockKey, Standing};
use super::state::State;
use super::{CachingAllocator, Cell};
use crate::memory::journal::Cause;
use crate::memory::stream_fence::StreamUses;
use crate::memory::{Allocation, MemPoolId, StackLevel};
use crate::{Error, Result};

/// Which blocks of a pool were given out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolCheckpoint {
    device: DeviceId,
    pool: MemPoolId,
    blocks: Vec<Kept>,
}

/// One block that was given out.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Kept {
    ptr: u64,
    size: u64,
    requested: u64,
    uses: Vec<StreamId>,
}

impl Kept {
    fn end(&self) -> u64 {
        self.ptr + self.size
    }
}

impl PoolCheckpoint {
    /// The pool that it is of.
    #[must_use]
    pub const fn pool(&self) -> MemPoolId {
        self.pool
    }

    /// Where its blocks were, by address.
    pub fn live(&self) -> impl ExactSizeIterator<Item = DevicePtr> + '_ {
        self.blocks.iter().map(|block| DevicePtr(block.ptr))
    }
}

/// What putting a checkpoint back did. An address may be in both lists: its block is another one now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Restored {
    /// Blocks that were given out and are not any more: whoever had them must forget them.
    pub freed: Vec<DevicePtr>,
    /// Blocks that are given out now, and belong to the caller.
    pub allocated: Vec<Allocation>,
}

impl CachingAllocator {
    /// Keeps which blocks of a pool are given out. Fails if one of its blocks waits for streams, or if nobody uses the
    /// pool.
    pub fn checkpoint(&self, device: DeviceId, pool: MemPoolId) -> Result<PoolCheckpoint> {
        let cell = self.settled(device)?;
        self.with(cell, |state| {
            state.expect_checkpointable(pool)?;
            let mut blocks: Vec<Kept> = state
                .blocks_of(pool)
                .filter(|&block| state.blocks[block].standing == Standing::Taken)
                .map(|block| Kept {
                    ptr: state.blocks[block].ptr,
                    size: state.blocks[block].size,
                    requested: state.blocks[block].requested,
                    uses: state.uses_of(block).to_vec(),
                })
                .collect();
            blocks.sort_by_key(|block| block.ptr);
            Ok(PoolCheckpoint { device, pool, blocks })
        })
    }

    /// Frees what the pool has given out, and gives out again what a checkpoint kept. Fails, and changes nothing, if
    /// some of that memory is no longer there.
    pub fn restore(&self, checkpoint: &PoolCheckpoint) -> Result<Restored> {
        let cell = self.settled(checkpoint.device)?;
        let cause = self.cause(cell, StackLevel::State);
        let restored = self.try_with(cell, |state| {
            state.expect_checkpointable(checkpoint.pool)?;
            state.expect_room_for(checkpoint)?;
            let mut freed = state.free_all_of(checkpoint.pool, &cause);
            freed.sort_unstable();
            let allocated = state.carve_all(checkpoint, &cause);
            Ok(Restored { freed: freed.into_iter().map(DevicePtr).collect(), allocated })
        })?;
        for &allocation in &restored.allocated {
            self.handed_out(allocation);
        }
        Ok(restored)
    }

    /// The device's cell, after what was given back has been looked after.
    fn settled(&self, device: DeviceId) -> Result<&Cell> {
        let cell = self.cell(device)?;
        let cause = self.cause(cell, StackLevel::All);
        self.process_pending(cell, &cause)?;
        Ok(cell)
    }
}

impl State {
    fn expect_checkpointable(&self, pool: MemPoolId) -> Result<()> {
        let refuse = |why: &str| Err(Error::Checkpoint { pool, why: why.to_owned() });
        if pool.is_default() {
            return refuse("only private pools can be kept");
        }
        if self.pool(pool)?.uses == 0 {
            return refuse("nobody uses the pool any more");
        }
        if self.blocks_of(pool).any(|block| self.blocks[block].standing == Standing::Waiting) {
            return refuse("a block waits for streams that used it; synchronize with them first");
        }
        Ok(())
    }

    /// Every kept block must lie in memory that the pool has, without a hole.
    fn expect_room_for(&self, checkpoint: &PoolCheckpoint) -> Result<()> {
        let mut ranges: Vec<&Block> = self
            .blocks_of(checkpoint.pool)
            .map(|block| &self.blocks[block])
            .filter(|block| matches!(block.standing, Standing::Free | Standing::Taken))
            .collect();
        ranges.sort_unstable_by_key(|block| block.ptr);
        for kept in &checkpoint.blocks {
            let behind = &ranges[ranges.partition_point(|block| block.end() <= kept.ptr)..];
            let mut reached = kept.ptr;
            // Within one segment: two that happen to lie side by side are still two.
            for block in behind.iter().take_while(|block| block.segment == behind[0].segment) {
                if block.ptr > reached || reached >= kept.end() {
                    break;
                }
                reached = block.end();
            }
            if reached < kept.end() {
                let why = format!("could not find {:#x}: the memory was given back since", kept.ptr);
                return Err(Error::Checkpoint { pool: checkpoint.pool, why });
            }
        }
        Ok(())
    }

    fn free_all_of(&mut self, pool: MemPoolId, cause: &Cause) -> Vec<u64> {
        let taken: Vec<BlockKey> =
            self.blocks_of(pool).filter(|&block| self.blocks[block].standing == Standing::Taken).collect();
        taken
            .into_iter()
            .map(|block| {
                let ptr = self.blocks[block].ptr;
                self.live.remove(&ptr);
                self.begin_free(block, cause);
                self.blocks[block].extra = None;
                self.complete_free(block, cause);
                ptr
            })
            .collect()
    }

    /// Cuts the kept blocks out of free memory. Both are gone through by address: what is left of a block that was cut
    /// keeps its name.
    fn carve_all(&mut self, checkpoint: &PoolCheckpoint, cause: &Cause) -> Vec<Allocation> {
        let mut free: Vec<(u64, BlockKey)> = self
            .blocks_of(checkpoint.pool)
            .filter(|&block| self.blocks[block].standing == Standing::Free)
            .map(|block| (self.blocks[block].ptr, block))
            .collect();
        free.sort_unstable();
        let around = |kept: &Kept| free[..free.partition_point(|&(ptr, _)| ptr <= kept.ptr)].last();
        checkpoint
            .blocks
            .iter()
            .map(|kept| {
                let &(_, rest) = around(kept).expect("room was checked, and all of the pool is free");
                self.carve(rest, kept, cause)
            })
            .collect()
    }

    /// Cuts a kept block out of the free one around it, whatever the rules of splitting say.
    fn carve(&mut self, rest: BlockKey, kept: &Kept, cause: &Cause) -> Allocation {
        let around = &self.blocks[rest];
        assert!(around.ptr <= kept.ptr && kept.end() <= around.end(), "room for {:#x} was checked", kept.ptr);
        let (kind, stream) = self.place_of(around.segment);
        self.take_free(rest);
        let before = kept.ptr - self.blocks[rest].ptr;
        if before > 0 {
            self.split_off_front(rest, before);
        }
        let was_split = self.blocks[rest].is_split();
        let growing = self.blocks[rest].growing;
        let whole = self.blocks[rest].size;
        let given = if whole > kept.size {
            let given = self.cut_front(rest, kept.size);
            self.put_free(rest);
            given
        } else {
            rest
        };
        if !growing {
            match (was_split, given == rest) {
                (true, true) => {
                    self.stats.inactive_split.decrease(kind, 1);
                    self.stats.inactive_split_bytes.decrease(kind, whole);
                }
                (true, false) => self.stats.inactive_split_bytes.decrease(kind, kept.size),
                (false, true) => {}
                (false, false) => {
                    self.stats.inactive_split.increase(kind, 1);
                    self.stats.inactive_split_bytes.increase(kind, whole - kept.size);
                }
            }
        }
        let allocation = self.mark_taken(given, kept.requested, stream, cause);
        if !kept.uses.is_empty() {
            self.blocks[given].extra().uses = StreamUses::of(kept.uses.clone());
        }
        allocation
    }

    /// The blocks of a pool, in no order.
    fn blocks_of(&self, pool: MemPoolId) -> impl Iterator<Item = BlockKey> + '_ {
        self.blocks.iter().filter(move |(_, block)| self.bin_of(block.segment).pool == pool).map(|(key, _)| key)
    }
}
