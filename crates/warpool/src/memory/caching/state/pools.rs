//! The pools of one device, with their block pools. Whether a pool has segments is read from the heap, not counted by
//! paired calls.

use std::ops::{Deref, DerefMut};

use warpool_driver::DeviceId;

use crate::Result;
use crate::memory::caching::heap::{BlockPoolKey, Heap};
use crate::memory::pool_table::{Pool, PoolTable};
use crate::memory::{MemPoolId, PoolOptions, PoolUser, SegmentKind};

pub(crate) struct Pools {
    table: PoolTable<BlockPools>,
    /// Those of the default pool.
    default: [BlockPoolKey; 2],
}

/// The block pools of a pool.
pub(crate) struct BlockPools {
    /// Small, large.
    keys: [BlockPoolKey; 2],
    /// Threads that work on the pool without the lock: it is not removed meanwhile.
    threads: u32,
}

impl BlockPools {
    fn add(heap: &mut Heap, id: MemPoolId, options: &PoolOptions) -> Self {
        let keys = [SegmentKind::Small, SegmentKind::Large]
            .map(|kind| heap.add_block_pool(id, kind, options.upstream.is_some(), options.no_split));
        Self { keys, threads: 0 }
    }

    fn are_empty(&self, heap: &Heap) -> bool {
        self.keys.iter().all(|&key| heap.block_pool(key).is_empty())
    }
}

impl Deref for Pools {
    type Target = PoolTable<BlockPools>;

    fn deref(&self) -> &PoolTable<BlockPools> {
        &self.table
    }
}

impl DerefMut for Pools {
    fn deref_mut(&mut self) -> &mut PoolTable<BlockPools> {
        &mut self.table
    }
}

impl Pools {
    /// The default pool alone.
    pub(crate) fn new(device: DeviceId, heap: &mut Heap) -> Self {
        let default = BlockPools::add(heap, MemPoolId::DEFAULT, &PoolOptions::default());
        Self { default: default.keys, table: PoolTable::new(device, default) }
    }

    /// Adds a pool with one use.
    pub(crate) fn add(&mut self, heap: &mut Heap, id: MemPoolId, options: PoolOptions) {
        let block_pools = BlockPools::add(heap, id, &options);
        self.table.add(id, options, block_pools);
    }

    /// The block pools of the default pool.
    pub(crate) fn default_block_pools(&self) -> [BlockPoolKey; 2] {
        self.default
    }

    /// The block pools of a pool.
    pub(crate) fn block_pools(&self, id: MemPoolId) -> Result<[BlockPoolKey; 2]> {
        Ok(self.get(id)?.memory.keys)
    }

    /// The block pools of a pool that serves requests.
    #[inline]
    pub(crate) fn serving_block_pools(&self, id: MemPoolId) -> Result<[BlockPoolKey; 2]> {
        if id.is_default() { Ok(self.default) } else { Ok(self.serving(id)?.memory.keys) }
    }

    /// Ends a use of `user`. Returns the pool if that was the last use and the pool is removed.
    pub(crate) fn release(
        &mut self,
        id: MemPoolId,
        user: PoolUser,
        heap: &mut Heap,
    ) -> Result<Option<Pool<BlockPools>>> {
        if let Some(pool) = self.table.release(id, user)? {
            pool.memory.keys.into_iter().for_each(|key| heap.allow_splits(key));
        }
        Ok(self.remove_if_unused(id, heap))
    }

    /// Keeps a pool from being removed while the thread uses it without the lock. Returns its block pools.
    pub(crate) fn enter(&mut self, id: MemPoolId) -> Result<[BlockPoolKey; 2]> {
        self.get(id)?;
        let block_pools = &mut self.find_mut(id).expect("it was just found").memory;
        block_pools.threads += 1;
        Ok(block_pools.keys)
    }

    /// Ends [`enter`](Self::enter). Returns the pool if it is removed, for the caller to drop without the lock.
    #[must_use = "to be dropped without the lock"]
    pub(crate) fn leave(&mut self, id: MemPoolId, heap: &mut Heap) -> Option<Pool<BlockPools>> {
        self.find_mut(id).expect("a pool that a thread works on is not removed").memory.threads -= 1;
        self.remove_if_unused(id, heap)
    }

    fn remove_if_unused(&mut self, id: MemPoolId, heap: &mut Heap) -> Option<Pool<BlockPools>> {
        let is_unused = |block_pools: &BlockPools| block_pools.threads == 0 && block_pools.are_empty(heap);
        let removed = self.table.remove_if(id, is_unused)?;
        removed.memory.keys.into_iter().for_each(|key| heap.remove_block_pool(key));
        Some(removed)
    }

    /// Checks that released pools without segments are removed.
    ///
    /// # Panics
    /// If one is not removed.
    pub(crate) fn check(&self, heap: &Heap) {
        for (id, pool) in self.released() {
            assert!(!pool.memory.are_empty(heap), "pool {id} should be removed");
        }
        assert_eq!(heap.block_pools(), 2 * self.iter().count(), "every block pool has a pool");
    }
}
