//! The memory pools of one device: the default pool and the private ones. What an allocator has of a pool's memory is
//! its own (`T`).
//!
//! A private pool has uses: its creator, open scopes, graphs. Without any it is *released*: it serves no new requests,
//! and is removed once nothing is left of its memory.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use warpool_driver::{DeviceId, StreamId};

use super::checkpoint::refused;
use super::{MemPoolId, PoolOptions, PoolUser, PoolUses, SleepingPools, Upstream};
use crate::{Error, Result};

pub(crate) struct PoolTable<T> {
    device: DeviceId,
    by_id: BTreeMap<MemPoolId, Pool<T>>,
    /// Pools without uses.
    released: BTreeSet<MemPoolId>,
    pub(crate) sleeping: SleepingPools,
}

/// One pool. To be dropped without a lock: its upstream's destructor is user code.
pub(crate) struct Pool<T> {
    pub(crate) memory: T,
    pub(crate) options: PoolOptions,
    uses: PoolUses,
    /// Whether captures allocated from it. Blocks that they freed may serve other captures, but the graphs continue to
    /// use them.
    pub(crate) has_graphs: bool,
    /// Streams that use its memory without being its allocation streams.
    used_by: BTreeSet<StreamId>,
    /// Whether unknown streams may use it too.
    pub(crate) used_anywhere: bool,
}

impl<T> Pool<T> {
    fn new(options: PoolOptions, memory: T) -> Self {
        let (uses, used_by) = (PoolUses::CREATED, BTreeSet::new());
        Self { memory, options, uses, has_graphs: false, used_by, used_anywhere: false }
    }

    pub(crate) fn is_released(&self) -> bool {
        self.uses.total() == 0
    }

    /// Whether its free blocks may serve the default pool before that runs out of memory. Not those of graphs: replays
    /// write into what captures freed.
    pub(crate) fn lends(&self) -> bool {
        self.options.use_on_oom && (!self.has_graphs || crate::defect::Defect::LendsMemoryOfGraphs.is_on())
    }
}

impl<T> PoolTable<T> {
    /// The default pool alone.
    pub(crate) fn new(device: DeviceId, default: T) -> Self {
        let by_id = BTreeMap::from([(MemPoolId::DEFAULT, Pool::new(PoolOptions::default(), default))]);
        Self { device, by_id, released: BTreeSet::new(), sleeping: SleepingPools::default() }
    }

    /// Adds a pool with one use.
    pub(crate) fn add(&mut self, id: MemPoolId, options: PoolOptions, memory: T) {
        self.by_id.insert(id, Pool::new(options, memory));
    }

    #[inline]
    pub(crate) fn find(&self, id: MemPoolId) -> Option<&Pool<T>> {
        self.by_id.get(&id)
    }

    #[inline]
    pub(crate) fn find_mut(&mut self, id: MemPoolId) -> Option<&mut Pool<T>> {
        self.by_id.get_mut(&id)
    }

    #[inline]
    pub(crate) fn get(&self, id: MemPoolId) -> Result<&Pool<T>> {
        self.find(id).ok_or(Error::UnknownPool { pool: id, device: self.device })
    }

    /// A pool that is not released.
    pub(crate) fn in_use(&mut self, id: MemPoolId) -> Result<&mut Pool<T>> {
        let pool = self.by_id.get_mut(&id).ok_or(Error::UnknownPool { pool: id, device: self.device })?;
        if pool.is_released() { Err(Error::PoolReleased { pool: id }) } else { Ok(pool) }
    }

    /// A pool that serves requests.
    #[inline]
    pub(crate) fn serving(&self, id: MemPoolId) -> Result<&Pool<T>> {
        let pool = self.get(id)?;
        self.sleeping.expect_awake(id)?;
        if pool.is_released() { Err(Error::PoolReleased { pool: id }) } else { Ok(pool) }
    }

    /// A pool of which checkpoints can be taken and restored.
    pub(crate) fn checkpointed(&self, id: MemPoolId) -> Result<&Pool<T>> {
        if id.is_default() {
            return Err(refused(id, "only private pools have checkpoints"));
        }
        let pool = self.get(id)?;
        if pool.is_released() {
            return Err(refused(id, "the pool was released"));
        }
        self.sleeping.expect_awake(id).map(|()| pool)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (MemPoolId, &Pool<T>)> {
        self.by_id.iter().map(|(&id, pool)| (id, pool))
    }

    pub(crate) fn uses(&self, id: MemPoolId) -> Result<u32> {
        Ok(self.get(id)?.uses.total())
    }

    pub(crate) fn upstream(&self, id: MemPoolId) -> Result<Option<Arc<dyn Upstream>>> {
        Ok(self.get(id)?.options.upstream.clone())
    }

    /// The upstreams of all pools that have one.
    pub(crate) fn upstreams(&self) -> Vec<Arc<dyn Upstream>> {
        self.by_id.values().filter_map(|pool| pool.options.upstream.clone()).collect()
    }

    pub(crate) fn retain(&mut self, id: MemPoolId, user: PoolUser) -> Result<()> {
        self.in_use(id)?.uses.add(user);
        Ok(())
    }

    /// Ends a use of `user`. Returns the pool if that was the last use: it is released.
    pub(crate) fn release(&mut self, id: MemPoolId, user: PoolUser) -> Result<Option<&mut Pool<T>>> {
        let pool = self.in_use(id)?;
        if id.is_default() && user == PoolUser::RAW {
            return Err(Error::PoolReleased { pool: id });
        }
        pool.uses.end(id, user)?;
        if !pool.is_released() {
            return Ok(None);
        }
        pool.options.use_on_oom = false;
        self.released.insert(id);
        Ok(self.by_id.get_mut(&id))
    }

    /// Removes a pool if it is released and nothing is left of its memory.
    #[must_use = "to be dropped without the lock"]
    pub(crate) fn remove_if(&mut self, id: MemPoolId, is_empty: impl FnOnce(&T) -> bool) -> Option<Pool<T>> {
        let pool = self.by_id.get(&id)?;
        if !pool.is_released() || !is_empty(&pool.memory) {
            return None;
        }
        self.released.remove(&id);
        self.sleeping.set(id, None);
        self.by_id.remove(&id)
    }

    pub(crate) fn has_released(&self) -> bool {
        !self.released.is_empty()
    }

    /// Pools without uses.
    pub(crate) fn released(&self) -> impl Iterator<Item = (MemPoolId, &Pool<T>)> {
        self.released.iter().map(|&id| (id, &self.by_id[&id]))
    }

    pub(crate) fn set_use_on_oom(&mut self, id: MemPoolId, on: bool) -> Result<()> {
        self.in_use(id)?.options.use_on_oom = on;
        Ok(())
    }

    /// Pools whose free blocks may serve the default pool before it runs out of memory.
    pub(crate) fn for_oom(&self) -> impl Iterator<Item = (MemPoolId, &Pool<T>)> {
        self.iter().filter(|&(id, pool)| pool.lends() && !pool.is_released() && self.sleeping.expect_awake(id).is_ok())
    }

    /// Pools in use whose free segments may go to their upstream before memory runs out: not those of graphs, whose
    /// replays write into what captures freed, nor what sleeps. Upstreams say whether they take them, without a lock.
    pub(crate) fn with_upstream(&self) -> Vec<(MemPoolId, Arc<dyn Upstream>)> {
        let is_free = |id: MemPoolId, pool: &Pool<T>| {
            !pool.is_released() && !pool.has_graphs && !pool.used_anywhere && self.sleeping.expect_awake(id).is_ok()
        };
        let pools = self.iter().filter(|&(id, pool)| is_free(id, pool));
        pools.filter_map(|(id, pool)| Some((id, pool.options.upstream.clone()?))).collect()
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

    /// Clears the use by unknown streams after their work is done. Only for a released pool: one in use may be replayed
    /// again.
    pub(crate) fn clear_use_anywhere(&mut self, id: MemPoolId) {
        if let Some(pool) = self.by_id.get_mut(&id).filter(|pool| pool.is_released()) {
            pool.used_anywhere = false;
        }
    }

    /// The streams that use a pool's memory without being its allocation streams.
    pub(crate) fn used_by(&self, id: MemPoolId) -> Vec<StreamId> {
        self.by_id.get(&id).map(|pool| pool.used_by.iter().copied().collect()).unwrap_or_default()
    }
}
