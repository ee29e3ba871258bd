//! The memory pools of one device: the default pool and the private ones.
//!
//! A private pool has uses: its creator, open scopes, graphs. Without any it is *released*: it serves no new requests,
//! and is removed with its last segment. Whether it has segments is read from the heap, not counted by paired calls.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use warpool_driver::{DeviceId, StreamId};

use crate::memory::caching::heap::{BlockPoolKey, Heap};
use crate::memory::{MemPoolId, PoolOptions, PoolUser, PoolUses, SegmentKind, SleepingPools, Upstream};
use crate::{Error, Result};

pub(crate) struct Pools {
    device: DeviceId,
    by_id: BTreeMap<MemPoolId, Pool>,
    /// Small, large.
    default: [BlockPoolKey; 2],
    pub(crate) sleeping: SleepingPools,
}

/// One pool.
pub(crate) struct Pool {
    /// Small, large.
    block_pools: [BlockPoolKey; 2],
    uses: PoolUses,
    /// Threads that work on it without the lock: it is not removed meanwhile.
    threads: u32,
    upstream: Option<Arc<dyn Upstream>>,
    use_on_oom: bool,
    /// Whether captures allocated from it. Blocks that they freed may serve other captures, but the graphs continue to
    /// use them.
    has_graphs: bool,
    /// Streams that use its memory without being its allocation streams.
    used_by: BTreeSet<StreamId>,
    /// Whether unknown streams may use it too.
    used_anywhere: bool,
}

impl Pools {
    /// The default pool alone.
    pub(crate) fn new(device: DeviceId, heap: &mut Heap) -> Self {
        let default = block_pools(heap, MemPoolId::DEFAULT, &PoolOptions::default());
        let pool = Pool::new(default, PoolOptions::default());
        let by_id = BTreeMap::from([(MemPoolId::DEFAULT, pool)]);
        Self { device, by_id, default, sleeping: SleepingPools::default() }
    }

    /// Adds a pool with one use.
    pub(crate) fn add(&mut self, heap: &mut Heap, id: MemPoolId, options: PoolOptions) {
        let block_pools = block_pools(heap, id, &options);
        self.by_id.insert(id, Pool::new(block_pools, options));
    }

    /// The block pools of the default pool.
    pub(crate) fn default_block_pools(&self) -> [BlockPoolKey; 2] {
        self.default
    }

    /// The block pools of a pool.
    pub(crate) fn block_pools(&self, id: MemPoolId) -> Result<[BlockPoolKey; 2]> {
        Ok(self.get(id)?.block_pools)
    }

    /// The block pools of a pool that serves requests.
    #[inline]
    pub(crate) fn block_pools_in_use(&self, id: MemPoolId) -> Result<[BlockPoolKey; 2]> {
        if id.is_default() {
            return Ok(self.default);
        }
        let pool = self.get(id)?;
        self.sleeping.expect_awake(id)?;
        if pool.is_released() { Err(Error::PoolReleased { pool: id }) } else { Ok(pool.block_pools) }
    }

    /// As [`block_pools_in_use`](Self::block_pools_in_use); `None` if there is no such pool, or if it serves no
    /// requests.
    #[inline]
    pub(crate) fn serving(&self, id: MemPoolId) -> Option<[BlockPoolKey; 2]> {
        if id.is_default() {
            return Some(self.default);
        }
        let pool = self.by_id.get(&id).filter(|pool| !pool.is_released())?;
        self.sleeping.expect_awake(id).ok().map(|()| pool.block_pools)
    }

    pub(crate) fn uses(&self, id: MemPoolId) -> Result<u32> {
        Ok(self.get(id)?.uses.total())
    }

    pub(crate) fn upstream(&self, id: MemPoolId) -> Result<Option<Arc<dyn Upstream>>> {
        Ok(self.get(id)?.upstream.clone())
    }

    pub(crate) fn retain(&mut self, id: MemPoolId, user: PoolUser) -> Result<()> {
        self.in_use(id)?.uses.add(user);
        Ok(())
    }

    /// Ends a use of `user`. Returns the pool if that was the last use and the pool is removed. The caller drops it
    /// without the lock: its upstream's destructor may drop blocks.
    pub(crate) fn release(&mut self, id: MemPoolId, user: PoolUser, heap: &mut Heap) -> Result<Option<Pool>> {
        let pool = self.in_use(id)?;
        if id.is_default() && user == PoolUser::RAW {
            return Err(Error::PoolReleased { pool: id });
        }
        pool.uses.end(id, user)?;
        if !pool.is_released() {
            return Ok(None);
        }
        pool.use_on_oom = false;
        for key in pool.block_pools {
            heap.allow_splits(key);
        }
        Ok(self.remove_if_unused(id, heap))
    }

    /// Sets whether its free blocks serve the default pool before that runs out of memory.
    pub(crate) fn set_use_on_oom(&mut self, id: MemPoolId, on: bool) -> Result<()> {
        self.in_use(id)?.use_on_oom = on;
        Ok(())
    }

    /// Keeps a pool from being removed while the thread uses it without the lock. Returns its block pools.
    pub(crate) fn enter(&mut self, id: MemPoolId) -> Result<[BlockPoolKey; 2]> {
        let pool = self.get_mut(id)?;
        pool.threads += 1;
        Ok(pool.block_pools)
    }

    /// Ends [`enter`](Self::enter). Returns the pool if it is removed, for the caller to drop without the lock.
    #[must_use = "to be dropped without the lock"]
    pub(crate) fn leave(&mut self, id: MemPoolId, heap: &mut Heap) -> Option<Pool> {
        self.get_mut(id).expect("a pool that a thread works on is not removed").threads -= 1;
        self.remove_if_unused(id, heap)
    }

    fn remove_if_unused(&mut self, id: MemPoolId, heap: &mut Heap) -> Option<Pool> {
        let pool = self.by_id.get(&id)?;
        if !pool.is_released() || pool.threads > 0 || !pool.is_empty(heap) {
            return None;
        }
        let pool = self.by_id.remove(&id)?;
        self.sleeping.set(id, None);
        for key in pool.block_pools {
            heap.remove_block_pool(key);
        }
        Some(pool)
    }

    /// Pools without uses.
    pub(crate) fn released(&self) -> Vec<MemPoolId> {
        self.by_id.iter().filter(|(_, pool)| pool.is_released()).map(|(&id, _)| id).collect()
    }

    /// Pools whose free blocks may serve the default pool before it runs out of memory. Not those of graphs: replays
    /// write into what captures freed.
    pub(crate) fn for_oom(&self) -> Vec<MemPoolId> {
        let serves = |pool: &Pool| {
            pool.use_on_oom
                && !pool.is_released()
                && (!pool.has_graphs || crate::defect::Defect::LendsMemoryOfGraphs.is_on())
        };
        let awake = |id: &MemPoolId| self.sleeping.expect_awake(*id).is_ok();
        let pools = self.by_id.iter().filter(|(_, pool)| serves(pool)).map(|(&id, _)| id);
        pools.filter(awake).collect()
    }

    /// Whether captures allocated from a pool.
    pub(crate) fn has_graphs(&self, id: MemPoolId) -> Result<bool> {
        Ok(self.get(id)?.has_graphs)
    }

    /// Records that a capture allocates from a pool.
    pub(crate) fn record_capture(&mut self, id: MemPoolId) {
        if let Some(pool) = self.by_id.get_mut(&id) {
            pool.has_graphs = true;
        }
    }

    /// Records that work on `streams` uses the pool's memory.
    pub(crate) fn record_uses(&mut self, id: MemPoolId, streams: &[StreamId]) -> Result<()> {
        self.in_use(id)?.used_by.extend(streams);
        Ok(())
    }

    /// Records that work on unknown streams uses the pool's memory.
    pub(crate) fn record_use_anywhere(&mut self, id: MemPoolId) -> Result<()> {
        self.in_use(id)?.used_anywhere = true;
        Ok(())
    }

    /// The recorded streams, and whether unknown streams may use the pool too.
    pub(crate) fn users(&self, id: MemPoolId) -> Result<(Vec<StreamId>, bool)> {
        let pool = self.get(id)?;
        Ok((pool.used_by.iter().copied().collect(), pool.used_anywhere))
    }

    /// Clears the use by unknown streams after their work is done. Only for a released pool: one in use may be replayed
    /// again.
    pub(crate) fn clear_use_anywhere(&mut self, id: MemPoolId) {
        if let Some(pool) = self.by_id.get_mut(&id).filter(|pool| pool.is_released()) {
            pool.used_anywhere = false;
        }
    }

    /// Checks that released pools without segments are removed.
    ///
    /// # Panics
    /// If one is not removed.
    pub(crate) fn check(&self, heap: &Heap) {
        for (id, pool) in &self.by_id {
            assert!(!pool.is_released() || !pool.is_empty(heap), "pool {id} should be removed");
        }
        assert_eq!(heap.block_pools(), 2 * self.by_id.len(), "every block pool has a pool");
    }

    fn get(&self, id: MemPoolId) -> Result<&Pool> {
        self.by_id.get(&id).ok_or(Error::UnknownPool { pool: id, device: self.device })
    }

    fn get_mut(&mut self, id: MemPoolId) -> Result<&mut Pool> {
        let device = self.device;
        self.by_id.get_mut(&id).ok_or(Error::UnknownPool { pool: id, device })
    }

    fn in_use(&mut self, id: MemPoolId) -> Result<&mut Pool> {
        let pool = self.get_mut(id)?;
        if pool.is_released() { Err(Error::PoolReleased { pool: id }) } else { Ok(pool) }
    }
}

impl Pool {
    fn new(block_pools: [BlockPoolKey; 2], options: PoolOptions) -> Self {
        Self {
            block_pools,
            uses: PoolUses::CREATED,
            threads: 0,
            upstream: options.upstream,
            use_on_oom: options.use_on_oom,
            has_graphs: false,
            used_by: BTreeSet::new(),
            used_anywhere: false,
        }
    }

    fn is_released(&self) -> bool {
        self.uses.total() == 0
    }

    fn is_empty(&self, heap: &Heap) -> bool {
        self.block_pools.iter().all(|&key| heap.block_pool(key).is_empty())
    }
}

fn block_pools(heap: &mut Heap, id: MemPoolId, options: &PoolOptions) -> [BlockPoolKey; 2] {
    [SegmentKind::Small, SegmentKind::Large]
        .map(|kind| heap.add_block_pool(id, kind, options.upstream.is_some(), options.no_split))
}
