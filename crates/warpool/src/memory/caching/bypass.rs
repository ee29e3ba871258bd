//! Memory that was allocated while caching was off: each block is a driver allocation and appears in no statistics. The
//! addresses are recorded, so that each block is freed the way it was allocated, even after caching was switched. The
//! calls are in `calls/direct.rs`; no driver call here.
//!
//! A block that a capture used, and that is freed during that capture, stays allocated, because the graph continues to
//! use it. It is kept until all pools that serve the graph are released. Without such a pool the lifetime of the graph
//! is unknown: the block is kept until the allocator is trimmed outside of captures.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Mutex;

use rustc_hash::FxHashMap;
use warpool_driver::{DeviceId, DevicePtr, StreamId};

use crate::memory::MemPoolId;
use crate::{Error, Result, lock};

/// A pool that a graph's memory comes from.
pub(super) type Keeper = (DeviceId, MemPoolId);

/// An allocated block.
#[derive(Clone, Debug)]
pub(super) struct DirectBlock {
    pub(super) device: DeviceId,
    pub(super) stream: StreamId,
    /// The pools of captures that recorded a use of it; the default pool for captures without one.
    pub(super) captured_for: Vec<MemPoolId>,
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
    /// Streams of other devices that used a block, allocated or freed: the driver's free does not wait for them.
    peer_uses: FxHashMap<u64, Vec<StreamId>>,
    /// Freed blocks that the next call that may call the driver returns: a destructor freed them, or a driver call
    /// failed.
    to_free: VecDeque<DevicePtr>,
    /// Blocks freed in captures, with the pools that keep each.
    kept: FxHashMap<u64, Vec<Keeper>>,
    by_keeper: BTreeMap<Keeper, Vec<DevicePtr>>,
    /// Blocks freed in captures without a pool.
    kept_for_trim: Vec<DevicePtr>,
}

impl Bypass {
    pub(super) fn insert(&self, ptr: DevicePtr, block: DirectBlock) {
        lock(&self.blocks).allocated.insert(ptr.0, block);
    }

    pub(super) fn get(&self, ptr: DevicePtr) -> Option<DirectBlock> {
        lock(&self.blocks).allocated.get(&ptr.0).cloned()
    }

    /// Records that a capture whose memory comes from `pool` uses a block.
    pub(super) fn record_capture(&self, ptr: DevicePtr, pool: MemPoolId) {
        if let Some(block) = lock(&self.blocks).allocated.get_mut(&ptr.0)
            && !block.captured_for.contains(&pool)
        {
            block.captured_for.push(pool);
        }
    }

    /// Records that a stream of another device uses a block.
    pub(super) fn record_peer_use(&self, ptr: DevicePtr, stream: StreamId) {
        let mut blocks = lock(&self.blocks);
        if blocks.allocated.contains_key(&ptr.0) {
            let streams = blocks.peer_uses.entry(ptr.0).or_default();
            if !streams.contains(&stream) {
                streams.push(stream);
            }
        }
    }

    /// Takes the streams to wait for before a block is returned to the driver.
    pub(super) fn take_peer_uses(&self, ptr: DevicePtr) -> Vec<StreamId> {
        lock(&self.blocks).peer_uses.remove(&ptr.0).unwrap_or_default()
    }

    /// Puts them back after the wait failed.
    pub(super) fn put_peer_uses(&self, ptr: DevicePtr, streams: Vec<StreamId>) {
        lock(&self.blocks).peer_uses.insert(ptr.0, streams);
    }

    /// Changes the number of graphs that hold a block.
    pub(super) fn change_holds(&self, ptr: DevicePtr, change: impl FnOnce(u32) -> u32) {
        if let Some(block) = lock(&self.blocks).allocated.get_mut(&ptr.0) {
            block.holds = change(block.holds);
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
    pub(super) fn free_later(&self, ptr: DevicePtr) {
        lock(&self.blocks).to_free.push_back(ptr);
    }

    /// Keeps a freed block for graphs; without keepers until the allocator is trimmed.
    pub(super) fn keep(&self, ptr: DevicePtr, keepers: Vec<Keeper>) {
        let mut blocks = lock(&self.blocks);
        if keepers.is_empty() {
            blocks.kept_for_trim.push(ptr);
            return;
        }
        for &keeper in &keepers {
            blocks.by_keeper.entry(keeper).or_default().push(ptr);
        }
        blocks.kept.insert(ptr.0, keepers);
    }

    /// Whether a pool keeps blocks.
    pub(super) fn has_keeper(&self, keeper: Keeper) -> bool {
        lock(&self.blocks).by_keeper.contains_key(&keeper)
    }

    /// A pool is released, so the graphs that used it are gone. Blocks that no other pool keeps are freed by a later
    /// call.
    pub(super) fn keeper_released(&self, keeper: Keeper) {
        let mut blocks = lock(&self.blocks);
        for ptr in blocks.by_keeper.remove(&keeper).unwrap_or_default() {
            let Some(keepers) = blocks.kept.get_mut(&ptr.0) else { continue };
            keepers.retain(|&other| other != keeper);
            if keepers.is_empty() {
                blocks.kept.remove(&ptr.0);
                blocks.to_free.push_back(ptr);
            }
        }
    }

    /// Frees the blocks that were kept until a trim outside of captures.
    pub(super) fn free_kept_for_trim(&self) {
        let mut blocks = lock(&self.blocks);
        let kept = std::mem::take(&mut blocks.kept_for_trim);
        blocks.to_free.extend(kept);
    }

    /// How many blocks are to be freed.
    pub(super) fn to_free(&self) -> usize {
        lock(&self.blocks).to_free.len()
    }

    pub(super) fn take_to_free(&self) -> Option<DevicePtr> {
        lock(&self.blocks).to_free.pop_front()
    }
}
