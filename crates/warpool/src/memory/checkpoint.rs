//! The data of checkpoints of private pools. Each allocator records and restores its own.

use std::sync::atomic::{AtomicU64, Ordering};

use warpool_driver::{DeviceId, DevicePtr, StreamId};

use super::{Allocation, MemPoolId};
use crate::{Error, Result};

/// A number that identifies an allocator among those of all kinds.
pub(super) fn next_allocator_key() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// The blocks of a pool that were allocated when the checkpoint was taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolCheckpoint {
    /// The allocator of the pool.
    pub(super) allocator: u64,
    pub(super) device: DeviceId,
    pub(super) pool: MemPoolId,
    /// By address.
    pub(super) blocks: Vec<SavedBlock>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SavedBlock {
    pub(super) ptr: u64,
    pub(super) size: u64,
    pub(super) requested: u64,
    pub(super) uses: BlockUses,
}

impl SavedBlock {
    pub(super) fn end(&self) -> u64 {
        self.ptr + self.size
    }
}

/// The streams other than its own that use a block.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct BlockUses {
    pub(super) streams: Vec<StreamId>,
    /// Streams that used it while they were capturing, if the allocator distinguishes them.
    pub(super) in_capture: Vec<StreamId>,
}

impl PoolCheckpoint {
    pub(crate) const fn device(&self) -> DeviceId {
        self.device
    }

    /// Fails unless it was taken from that allocator.
    pub(crate) fn expect_of(&self, allocator: u64) -> Result<()> {
        if self.allocator == allocator { Ok(()) } else { Err(Error::ForeignAllocator { pool: self.pool }) }
    }

    /// The pool that it was taken from.
    #[must_use]
    pub const fn pool(&self) -> MemPoolId {
        self.pool
    }

    /// The addresses of its blocks, ascending.
    pub fn live(&self) -> impl ExactSizeIterator<Item = DevicePtr> + '_ {
        self.blocks.iter().map(|block| DevicePtr(block.ptr))
    }
}

/// Why a checkpoint cannot be restored while a block of the pool serves the default pool.
pub(super) fn lent_block(ptr: u64) -> String {
    format!("the block at {ptr:#x} serves a request of the default pool, which ran out of memory; free it first")
}

/// The result of restoring a checkpoint. An address may be in both lists: its block is a new one then. Blocks that
/// graphs own, and blocks that serve requests of the default pool ([`use_on_oom`](super::PoolOptions::use_on_oom)), do
/// not change and are in neither list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Restored {
    /// Blocks that were allocated and are freed now: their owners must not use or free them any more.
    pub freed: Vec<DevicePtr>,
    /// Blocks that are allocated now, and belong to the caller.
    pub allocated: Vec<Allocation>,
}

impl PoolCheckpoint {
    /// Whether a saved block overlaps that range.
    pub(super) fn overlaps(&self, start: u64, end: u64) -> bool {
        let behind = self.blocks.partition_point(|block| block.end() <= start);
        self.blocks.get(behind).is_some_and(|block| block.ptr < end)
    }
}
