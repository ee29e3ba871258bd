//! The memory pools of one device: who uses them, and whether their pages may be taken.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use warpool_driver::{DeviceId, StreamId};

use crate::memory::{MemPoolId, PoolOptions, PoolUser, PoolUses};
use crate::{Error, PooledEvent, Result};

#[derive(Debug)]
pub(super) struct Pools {
    device: DeviceId,
    by_id: BTreeMap<MemPoolId, Pool>,
    /// Those without uses.
    released: BTreeSet<MemPoolId>,
}

#[derive(Debug, Default)]
struct Pool {
    uses: PoolUses,
    use_on_oom: bool,
    /// Whether captures allocated from it: replays go on using what they freed.
    has_graphs: bool,
    /// Streams that use its memory beside those that it was allocated for.
    used_by: BTreeSet<StreamId>,
    /// Whether streams that are not known use it too.
    used_anywhere: bool,
    /// Its heaps.
    heaps: Vec<u32>,
    /// Once it is released: events behind all work that may use its memory.
    passed: Option<Vec<Arc<PooledEvent>>>,
}

/// Whether the free pages of a pool's heaps may serve others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Takeable {
    /// Once these streams have passed, beside the heap's own.
    After(Vec<StreamId>),
    /// Only before a request would run out of memory.
    OnOom,
    Never,
}

impl Pools {
    pub(super) fn new(device: DeviceId) -> Self {
        let default = Pool { uses: PoolUses::CREATED, ..Pool::default() };
        Self { device, by_id: BTreeMap::from([(MemPoolId::DEFAULT, default)]), released: BTreeSet::new() }
    }

    pub(super) fn add(&mut self, id: MemPoolId, options: &PoolOptions) {
        let pool = Pool { uses: PoolUses::CREATED, use_on_oom: options.use_on_oom, ..Pool::default() };
        self.by_id.insert(id, pool);
    }

    fn get(&self, id: MemPoolId) -> Result<&Pool> {
        self.by_id.get(&id).ok_or(Error::UnknownPool { pool: id, device: self.device })
    }

    fn in_use(&mut self, id: MemPoolId) -> Result<&mut Pool> {
        let pool = self.by_id.get_mut(&id).ok_or(Error::UnknownPool { pool: id, device: self.device })?;
        if pool.uses.total() == 0 { Err(Error::PoolReleased { pool: id }) } else { Ok(pool) }
    }

    pub(super) fn expect_in_use(&mut self, id: MemPoolId) -> Result<()> {
        self.in_use(id).map(drop)
    }

    pub(super) fn uses(&self, id: MemPoolId) -> Result<u32> {
        Ok(self.get(id)?.uses.total())
    }

    pub(super) fn retain(&mut self, id: MemPoolId, user: PoolUser) -> Result<()> {
        self.in_use(id)?.uses.add(user);
        Ok(())
    }

    /// Ends a use of `user`. Returns whether it was the last.
    pub(super) fn release(&mut self, id: MemPoolId, user: PoolUser) -> Result<bool> {
        let pool = self.in_use(id)?;
        if id.is_default() && user == PoolUser::RAW {
            return Err(Error::PoolReleased { pool: id });
        }
        pool.uses.end(id, user)?;
        let released = pool.uses.total() == 0;
        if released {
            pool.use_on_oom = false;
            if pool.heaps.is_empty() {
                self.by_id.remove(&id);
            } else {
                self.released.insert(id);
            }
        }
        Ok(released)
    }

    pub(super) fn set_use_on_oom(&mut self, id: MemPoolId, on: bool) -> Result<()> {
        self.in_use(id)?.use_on_oom = on;
        Ok(())
    }

    pub(super) fn record_capture(&mut self, id: MemPoolId) {
        if let Some(pool) = self.by_id.get_mut(&id) {
            pool.has_graphs = true;
        }
    }

    pub(super) fn record_uses(&mut self, id: MemPoolId, streams: &[StreamId]) -> Result<()> {
        self.in_use(id)?.used_by.extend(streams);
        Ok(())
    }

    pub(super) fn record_use_anywhere(&mut self, id: MemPoolId) -> Result<()> {
        self.in_use(id)?.used_anywhere = true;
        Ok(())
    }

    /// Released pools that work on streams that are not known may still use.
    pub(super) fn released_used_anywhere(&self) -> Vec<MemPoolId> {
        let is_used = |id: &&MemPoolId| self.by_id.get(id).is_some_and(|pool| pool.used_anywhere);
        self.released.iter().filter(is_used).copied().collect()
    }

    /// All work of the device that these released pools were used by is done.
    pub(super) fn clear_use_anywhere(&mut self, ids: &[MemPoolId]) {
        for id in ids {
            if let Some(pool) = self.by_id.get_mut(id) {
                pool.used_anywhere = false;
            }
        }
    }

    pub(super) fn add_heap(&mut self, id: MemPoolId, heap: u32) -> Result<()> {
        self.in_use(id)?.heaps.push(heap);
        Ok(())
    }

    pub(super) fn heaps(&self, id: MemPoolId) -> Result<Vec<u32>> {
        Ok(self.get(id)?.heaps.clone())
    }

    /// A heap of a released pool has nothing left. The pool is removed with the last. Returns whether it was.
    pub(super) fn remove_heap(&mut self, id: MemPoolId, heap: u32) -> bool {
        let Some(pool) = self.by_id.get_mut(&id) else { return false };
        pool.heaps.retain(|&other| other != heap);
        let removed = pool.heaps.is_empty() && pool.uses.total() == 0;
        if removed {
            self.by_id.remove(&id);
            self.released.remove(&id);
        }
        removed
    }

    /// Pools without uses, with their heaps. Not those that unknown streams may still use.
    pub(super) fn released(&self) -> Vec<(MemPoolId, Vec<u32>)> {
        let pools = self.released.iter().filter_map(|&id| Some((id, self.by_id.get(&id)?)));
        pools.filter(|(_, pool)| !pool.used_anywhere).map(|(id, pool)| (id, pool.heaps.clone())).collect()
    }

    pub(super) fn has_released(&self) -> bool {
        !self.released.is_empty()
    }

    /// Events behind all work that may use the memory of a released pool.
    pub(super) fn passed(&self, id: MemPoolId) -> Option<Vec<Arc<PooledEvent>>> {
        self.by_id.get(&id)?.passed.clone()
    }

    pub(super) fn set_passed(&mut self, id: MemPoolId, events: Vec<Arc<PooledEvent>>) {
        if let Some(pool) = self.by_id.get_mut(&id) {
            pool.passed = Some(events);
        }
    }

    /// Streams that use a pool's memory beside those of its heaps.
    pub(super) fn used_by(&self, id: MemPoolId) -> Vec<StreamId> {
        self.by_id.get(&id).map(|pool| pool.used_by.iter().copied().collect()).unwrap_or_default()
    }

    /// Whether pages of a heap in this pool may be taken.
    pub(super) fn takeable(&self, id: MemPoolId) -> Takeable {
        match self.by_id.get(&id) {
            Some(pool) if !id.is_default() && pool.uses.total() > 0 => {
                if pool.use_on_oom && !pool.has_graphs {
                    Takeable::OnOom
                } else {
                    Takeable::Never
                }
            }
            Some(pool) if pool.used_anywhere => Takeable::Never,
            Some(pool) => Takeable::After(pool.used_by.iter().copied().collect()),
            None => Takeable::After(Vec::new()),
        }
    }
}
