//! The memory pools of one device: who uses them, and whether their pages may be taken.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use warpool_driver::{DeviceId, StreamId};

use crate::memory::{MemPoolId, PoolOptions, PoolUser, PoolUses, SleepingPools, Upstream};
use crate::{Error, PooledEvent, Result};

#[derive(Debug)]
pub(super) struct Pools {
    device: DeviceId,
    by_id: BTreeMap<MemPoolId, Pool>,
    /// Those without uses.
    released: BTreeSet<MemPoolId>,
    pub(super) sleeping: SleepingPools,
}

/// Where the segments of a pool come from whose memory is not made of pages.
#[derive(Clone)]
pub(super) enum SegmentSource {
    /// The driver, in one piece.
    Driver,
    Upstream(Arc<dyn Upstream>),
}

impl fmt::Debug for SegmentSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Driver => "Driver",
            Self::Upstream(_) => "Upstream",
        })
    }
}

#[derive(Debug, Default)]
struct Pool {
    /// Where its memory comes from, if it is not made of pages.
    source: Option<SegmentSource>,
    /// Whether its blocks are whole segments.
    no_split: bool,
    uses: PoolUses,
    use_on_oom: bool,
    /// Whether captures allocated from it: replays go on using what they freed.
    has_graphs: bool,
    /// Whether checkpoints of it were taken.
    has_checkpoints: bool,
    /// Streams that use its memory beside those that it was allocated for.
    used_by: BTreeSet<StreamId>,
    /// Whether streams that are not known use it too.
    used_anywhere: bool,
    /// Its heaps.
    heaps: BTreeSet<u32>,
    /// Once it is released: events after all work that may use its memory.
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
        let by_id = BTreeMap::from([(MemPoolId::DEFAULT, default)]);
        Self { device, by_id, released: BTreeSet::new(), sleeping: SleepingPools::default() }
    }

    pub(super) fn add(&mut self, id: MemPoolId, options: PoolOptions) {
        let PoolOptions { upstream, use_on_oom, no_split } = options;
        let source = upstream.map(SegmentSource::Upstream).or(no_split.then_some(SegmentSource::Driver));
        self.by_id.insert(id, Pool { uses: PoolUses::CREATED, use_on_oom, source, no_split, ..Pool::default() });
    }

    /// Where the segments of a pool come from, and whether they are not to be split; `None` if it is made of pages.
    pub(super) fn segment_source(&self, id: MemPoolId) -> Option<(SegmentSource, bool)> {
        let pool = self.by_id.get(&id)?;
        pool.source.clone().map(|source| (source, pool.no_split))
    }

    pub(super) fn has_segments(&self, id: MemPoolId) -> bool {
        self.by_id.get(&id).is_some_and(|pool| pool.source.is_some())
    }

    pub(super) fn is_no_split(&self, id: MemPoolId) -> bool {
        self.by_id.get(&id).is_some_and(|pool| pool.no_split)
    }

    /// Pools with segments whose free blocks serve the default pool before it runs out of memory.
    pub(super) fn segments_for_oom(&self) -> Vec<(MemPoolId, bool)> {
        let serves =
            |pool: &Pool| pool.source.is_some() && pool.use_on_oom && !pool.has_graphs && pool.uses.total() > 0;
        let awake = |id: MemPoolId| self.sleeping.expect_awake(id).is_ok();
        let pools = self.by_id.iter().filter(|(id, pool)| serves(pool) && awake(**id));
        pools.map(|(&id, pool)| (id, pool.no_split)).collect()
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

    /// Fails unless the pool serves requests.
    pub(super) fn expect_serving(&mut self, id: MemPoolId) -> Result<()> {
        self.in_use(id)?;
        self.sleeping.expect_awake(id)
    }

    pub(super) fn uses(&self, id: MemPoolId) -> Result<u32> {
        Ok(self.get(id)?.uses.total())
    }

    pub(super) fn retain(&mut self, id: MemPoolId, user: PoolUser) -> Result<()> {
        self.in_use(id)?.uses.add(user);
        Ok(())
    }

    /// Ends a use of `user`. Returns the source of the pool if that was removed, to be dropped without a lock.
    pub(super) fn release(&mut self, id: MemPoolId, user: PoolUser) -> Result<Option<SegmentSource>> {
        let pool = self.in_use(id)?;
        if id.is_default() && user == PoolUser::RAW {
            return Err(Error::PoolReleased { pool: id });
        }
        pool.uses.end(id, user)?;
        if pool.uses.total() > 0 {
            return Ok(None);
        }
        pool.use_on_oom = false;
        if !pool.heaps.is_empty() {
            self.released.insert(id);
            return Ok(None);
        }
        self.sleeping.set(id, None);
        Ok(self.by_id.remove(&id).and_then(|pool| pool.source))
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

    /// A checkpoint was taken: blocks may be restored at their addresses from here on.
    pub(super) fn record_checkpoint(&mut self, id: MemPoolId) {
        if let Some(pool) = self.by_id.get_mut(&id) {
            pool.has_checkpoints = true;
        }
    }

    /// Whether the pages of a pool stay where they are even for requests of its own: graphs and checkpoints know their
    /// addresses.
    pub(super) fn is_fixed(&self, id: MemPoolId) -> bool {
        self.has_graphs(id) || self.by_id.get(&id).is_some_and(|pool| pool.has_checkpoints)
    }

    /// Whether graphs may use its addresses.
    pub(super) fn has_graphs(&self, id: MemPoolId) -> bool {
        let pool = self.by_id.get(&id);
        pool.is_some_and(|pool| pool.used_anywhere || pool.has_graphs && pool.uses.total() > 0)
    }

    pub(super) fn record_uses(&mut self, id: MemPoolId, streams: &[StreamId]) -> Result<()> {
        self.in_use(id)?.used_by.extend(streams);
        Ok(())
    }

    pub(super) fn record_use_anywhere(&mut self, id: MemPoolId) -> Result<()> {
        self.in_use(id)?.used_anywhere = true;
        Ok(())
    }

    /// Work that cannot be named may use a released pool's memory.
    pub(super) fn set_used_anywhere(&mut self, id: MemPoolId) {
        if let Some(pool) = self.by_id.get_mut(&id) {
            pool.used_anywhere = true;
        }
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
        self.in_use(id)?.heaps.insert(heap);
        Ok(())
    }

    pub(super) fn heaps(&self, id: MemPoolId) -> Result<Vec<u32>> {
        Ok(self.get(id)?.heaps.iter().copied().collect())
    }

    /// A heap of a released pool has nothing left. The pool is removed with the last. Returns whether it was, and its
    /// source, to be dropped without a lock.
    pub(super) fn remove_heap(&mut self, id: MemPoolId, heap: u32) -> (bool, Option<SegmentSource>) {
        let Some(pool) = self.by_id.get_mut(&id) else { return (false, None) };
        pool.heaps.remove(&heap);
        if !pool.heaps.is_empty() || pool.uses.total() > 0 {
            return (false, None);
        }
        self.released.remove(&id);
        self.sleeping.set(id, None);
        (true, self.by_id.remove(&id).and_then(|pool| pool.source))
    }

    /// Pools without uses, with their heaps. Not those that unknown streams may still use.
    pub(super) fn released(&self) -> Vec<(MemPoolId, Vec<u32>)> {
        let pools = self.released.iter().filter_map(|&id| Some((id, self.by_id.get(&id)?)));
        pools
            .filter(|(_, pool)| !pool.used_anywhere)
            .map(|(id, pool)| (id, pool.heaps.iter().copied().collect()))
            .collect()
    }

    pub(super) fn has_released(&self) -> bool {
        !self.released.is_empty()
    }

    /// Events after all work that may use the memory of a released pool.
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
