//! Memory that was allocated while caching was off: each block is a driver allocation and appears in no statistics. The
//! addresses are recorded, so that each block is freed the way it was allocated, even after caching was switched. The
//! calls are in `calls/direct.rs`; no driver call here.
//!
//! A block that a capture used, and that is freed during that capture, stays allocated, because the graph continues to
//! use it. It is kept until all pools that serve the graph are released. Without such a pool the lifetime of the graph
//! is unknown: the block is kept until the allocator is trimmed outside of captures.

use std::collections::VecDeque;
use std::sync::Mutex;

use rustc_hash::FxHashMap;
use warpool_driver::{DeviceId, DevicePtr, StreamId};

use crate::memory::MemPoolId;
use crate::{Error, Result, lock};

#[derive(Clone, Debug)]
pub(super) struct DirectBlock {
    pub(super) ptr: DevicePtr,
    pub(super) device: DeviceId,
    pub(super) stream: StreamId,
    /// The pools of captures that recorded a use of it; the default pool for captures without one.
    pub(super) captured_for: Vec<MemPoolId>,
    /// Streams of other devices that used it: the driver's free does not wait for them.
    pub(super) peer_uses: Vec<StreamId>,
    /// How many graphs hold it. It cannot be freed while one does.
    pub(super) holds: u32,
}

/// Memory that came from the driver directly.
#[derive(Default)]
pub(super) struct Bypass {
    blocks: Mutex<Blocks>,
}

#[derive(Default)]
struct Blocks {
    allocated: FxHashMap<u64, DirectBlock>,
    /// Freed blocks that the next call that may call the driver returns: a destructor freed them, or a driver call
    /// failed.
    to_free: VecDeque<DirectBlock>,
    /// Blocks freed in captures, with the pools that keep each; without one, until the allocator is trimmed.
    kept: Vec<(DirectBlock, Vec<MemPoolId>)>,
}

impl Bypass {
    pub(super) fn insert(&self, block: DirectBlock) {
        lock(&self.blocks).allocated.insert(block.ptr.0, block);
    }

    pub(super) fn get(&self, ptr: DevicePtr) -> Option<DirectBlock> {
        lock(&self.blocks).allocated.get(&ptr.0).cloned()
    }

    /// Changes an allocated block, if there is one.
    pub(super) fn change(&self, ptr: DevicePtr, change: impl FnOnce(&mut DirectBlock)) {
        if let Some(block) = lock(&self.blocks).allocated.get_mut(&ptr.0) {
            change(block);
        }
    }

    /// Takes a block that is being freed. The caller frees or keeps it. Fails if a graph holds it.
    pub(super) fn remove(&self, ptr: DevicePtr) -> Result<Option<DirectBlock>> {
        let allocated = &mut lock(&self.blocks).allocated;
        if allocated.get(&ptr.0).is_some_and(|block| block.holds > 0) {
            return Err(Error::HeldByGraph { ptr });
        }
        Ok(allocated.remove(&ptr.0))
    }

    /// Leaves the free of a block to a later call.
    pub(super) fn free_later(&self, block: DirectBlock) {
        lock(&self.blocks).to_free.push_back(block);
    }

    /// Keeps a freed block for graphs with these pools; without one until the allocator is trimmed.
    pub(super) fn keep(&self, block: DirectBlock, pools: Vec<MemPoolId>) {
        lock(&self.blocks).kept.push((block, pools));
    }

    /// Whether blocks are kept for graphs.
    pub(super) fn keeps_any(&self) -> bool {
        !lock(&self.blocks).kept.is_empty()
    }

    /// A pool is released, so the graphs that used it are gone. Blocks that no other pool keeps are freed by a later
    /// call.
    pub(super) fn keeper_released(&self, device: DeviceId, pool: MemPoolId) {
        self.free_kept(|block, pools| {
            let before = pools.len();
            pools.retain(|&other| (block.device, other) != (device, pool));
            pools.is_empty() && before > 0
        });
    }

    /// Frees the blocks that were kept until a trim outside of captures.
    pub(super) fn free_kept_for_trim(&self) {
        self.free_kept(|_, pools| pools.is_empty());
    }

    /// Leaves the free of kept blocks to a later call, if nothing keeps them any more.
    fn free_kept(&self, mut is_free: impl FnMut(&DirectBlock, &mut Vec<MemPoolId>) -> bool) {
        let Blocks { to_free, kept, .. } = &mut *lock(&self.blocks);
        to_free.extend(kept.extract_if(.., |(block, pools)| is_free(block, pools)).map(|(block, _)| block));
    }

    /// How many blocks are to be freed.
    pub(super) fn to_free(&self) -> usize {
        lock(&self.blocks).to_free.len()
    }

    pub(super) fn take_to_free(&self) -> Option<DirectBlock> {
        lock(&self.blocks).to_free.pop_front()
    }
}
