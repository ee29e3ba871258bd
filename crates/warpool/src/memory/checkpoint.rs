//! The data of checkpoints of private pools. Each allocator records and restores its own.

use std::sync::atomic::{AtomicU64, Ordering};

use warpool_driver::{DeviceId, DevicePtr, StreamId};

use super::{Allocation, MemPoolId};
use crate::{Error, Result};

/// A number that tells an allocator from all others, of any kind.
pub(super) fn next_allocator_key() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// The blocks of a pool that were allocated at some moment.
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

/// The streams that use a block beside its own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct BlockUses {
    pub(super) streams: Vec<StreamId>,
    /// Those that used it while they captured, if the allocator tells them apart.
    pub(super) in_capture: Vec<StreamId>,
}

impl PoolCheckpoint {
    pub(crate) const fn device(&self) -> DeviceId {
        self.device
    }

    /// Fails unless it is one of that allocator.
    pub(crate) fn expect_of(&self, allocator: u64) -> Result<()> {
        if self.allocator == allocator { Ok(()) } else { Err(Error::ForeignAllocator { pool: self.pool }) }
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

/// Why a checkpoint cannot be restored while a block of the pool serves the default pool.
pub(super) fn lent_block(ptr: u64) -> String {
    format!("the block at {ptr:#x} serves a request of the default pool, which ran out of memory; free it first")
}

/// What restoring a checkpoint did. An address may be in both lists: its block is another one now. Blocks that graphs
/// own stay as they are, and are in neither; so do those that serve requests of the default pool
/// ([`use_on_oom`](super::PoolOptions::use_on_oom)).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Restored {
    /// Blocks that were allocated and are freed now: their owners must not use or free them any more.
    pub freed: Vec<DevicePtr>,
    /// Blocks that are allocated now, and belong to the caller.
    pub allocated: Vec<Allocation>,
}

impl PoolCheckpoint {
    /// Whether a saved block lies in that range, in part or as a whole.
    pub(super) fn overlaps(&self, start: u64, end: u64) -> bool {
        let behind = self.blocks.partition_point(|block| block.end() <= start);
        self.blocks.get(behind).is_some_and(|block| block.ptr < end)
    }
}
