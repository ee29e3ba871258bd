//! The memory pools of one device, with their heaps: whether their pages may be taken.

use std::collections::BTreeSet;
use std::sync::Arc;

use warpool_driver::StreamId;

pub(super) use crate::memory::segment_source::SegmentSource;

use super::ids::HeapId;
use crate::memory::checkpoint::refused;
use crate::memory::pool_table::{Pool, PoolTable};
use crate::memory::{MemPoolId, PoolUser};
use crate::{Error, PooledEvent, Result};

pub(super) type Pools = PoolTable<PoolHeaps>;

/// What a pool has of pages.
#[derive(Debug, Default)]
pub(crate) struct PoolHeaps {
    heaps: BTreeSet<HeapId>,
    /// Whether checkpoints of it were taken.
    has_checkpoints: bool,
    /// Whether it is elastic memory: it serves no requests, and its free pages serve others while it is in use.
    is_elastic: bool,
    /// Once it is released: events after all work that may use its memory.
    passed: Option<Vec<Arc<PooledEvent>>>,
}

impl PoolHeaps {
    /// Those of elastic memory.
    pub(super) fn elastic() -> Self {
        Self { is_elastic: true, ..Self::default() }
    }
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

impl Pool<PoolHeaps> {
    /// Where its segments come from, if its memory is not made of pages.
    fn segment_source(&self) -> Option<SegmentSource> {
        let upstream = self.options.upstream.clone().map(SegmentSource::Upstream);
        upstream.or(self.options.no_split.then_some(SegmentSource::Driver))
    }

    pub(super) fn heaps(&self) -> Vec<HeapId> {
        self.memory.heaps.iter().copied().collect()
    }
}

impl Pools {
    /// Where the segments of a pool come from, and whether they are not to be split; `None` if it is made of pages.
    pub(super) fn segment_source(&self, id: MemPoolId) -> Option<(SegmentSource, bool)> {
        let pool = self.find(id)?;
        pool.segment_source().map(|source| (source, pool.options.no_split))
    }

    pub(super) fn has_segments(&self, id: MemPoolId) -> bool {
        self.find(id).is_some_and(|pool| pool.segment_source().is_some())
    }

    pub(super) fn is_no_split(&self, id: MemPoolId) -> bool {
        self.find(id).is_some_and(|pool| pool.options.no_split)
    }

    /// Pools with segments whose free blocks serve the default pool before it runs out of memory.
    pub(super) fn segments_for_oom(&self) -> Vec<(MemPoolId, bool)> {
        let with_segments = self.for_oom().filter(|(_, pool)| pool.segment_source().is_some());
        with_segments.map(|(id, pool)| (id, pool.options.no_split)).collect()
    }

    pub(super) fn expect_in_use(&mut self, id: MemPoolId) -> Result<()> {
        self.in_use(id).map(drop)
    }

    /// Fails unless the pool serves requests.
    pub(super) fn expect_serving(&self, id: MemPoolId) -> Result<()> {
        if self.serving(id)?.memory.is_elastic {
            return Err(Error::Unsupported { allocator: "paged", what: "requests to the pool of elastic memory" });
        }
        Ok(())
    }

    /// Ends a use of `user`. Returns the pool if that was the last use and it has no heaps: it is removed.
    pub(super) fn end_use(&mut self, id: MemPoolId, user: PoolUser) -> Result<Option<Pool<PoolHeaps>>> {
        self.release(id, user)?;
        Ok(self.remove_if(id, |memory| memory.heaps.is_empty()))
    }

    /// A checkpoint is taken: blocks may be restored at their addresses from here on.
    pub(super) fn record_checkpoint(&mut self, id: MemPoolId) -> Result<()> {
        if let Some(pool) = self.find_mut(id) {
            if pool.memory.is_elastic {
                return Err(refused(id, "elastic memory has none"));
            }
            pool.memory.has_checkpoints = true;
        }
        Ok(())
    }

    /// Whether the pages of a pool stay where they are even for requests of its own: graphs and checkpoints know their
    /// addresses.
    pub(super) fn is_fixed(&self, id: MemPoolId) -> bool {
        self.has_graphs(id) || self.find(id).is_some_and(|pool| pool.memory.has_checkpoints)
    }

    /// Whether it has no uses.
    pub(super) fn is_released(&self, id: MemPoolId) -> bool {
        self.find(id).is_some_and(Pool::is_released)
    }

    /// Whether graphs may use its addresses.
    pub(super) fn has_graphs(&self, id: MemPoolId) -> bool {
        self.find(id).is_some_and(|pool| pool.used_anywhere || pool.has_graphs && !pool.is_released())
    }

    /// Work that cannot be named may use a released pool's memory.
    pub(super) fn set_used_anywhere(&mut self, id: MemPoolId) {
        if let Some(pool) = self.find_mut(id) {
            pool.used_anywhere = true;
        }
    }

    /// Released pools that work on streams that are not known may still use.
    pub(super) fn released_used_anywhere(&self) -> Vec<MemPoolId> {
        self.released().filter(|(_, pool)| pool.used_anywhere).map(|(id, _)| id).collect()
    }

    pub(super) fn add_heap(&mut self, id: MemPoolId, heap: HeapId) -> Result<()> {
        self.in_use(id)?.memory.heaps.insert(heap);
        Ok(())
    }

    pub(super) fn heaps(&self, id: MemPoolId) -> Result<Vec<HeapId>> {
        self.get(id).map(Pool::heaps)
    }

    /// A heap of a released pool has nothing left. Returns the pool if it is removed: that was its last heap.
    pub(super) fn remove_heap(&mut self, id: MemPoolId, heap: HeapId) -> Option<Pool<PoolHeaps>> {
        self.find_mut(id)?.memory.heaps.remove(&heap);
        self.remove_if(id, |memory| memory.heaps.is_empty())
    }

    /// Pools without uses, with their heaps. Not those that unknown streams may still use.
    pub(super) fn released_heaps(&self) -> Vec<(MemPoolId, Vec<HeapId>)> {
        self.released().filter(|(_, pool)| !pool.used_anywhere).map(|(id, pool)| (id, pool.heaps())).collect()
    }

    /// Events after all work that may use the memory of a released pool.
    pub(super) fn passed(&self, id: MemPoolId) -> Option<Vec<Arc<PooledEvent>>> {
        self.find(id)?.memory.passed.clone()
    }

    pub(super) fn set_passed(&mut self, id: MemPoolId, events: Vec<Arc<PooledEvent>>) {
        if let Some(pool) = self.find_mut(id) {
            pool.memory.passed = Some(events);
        }
    }

    /// Whether pages of a heap in this pool may be taken.
    pub(super) fn takeable(&self, id: MemPoolId) -> Takeable {
        match self.find(id) {
            Some(pool) if !id.is_default() && !pool.is_released() => {
                if pool.memory.is_elastic {
                    Takeable::After(self.used_by(id))
                } else if pool.lends() {
                    Takeable::OnOom
                } else {
                    Takeable::Never
                }
            }
            Some(pool) if pool.used_anywhere => Takeable::Never,
            Some(_) | None => Takeable::After(self.used_by(id)),
        }
    }
}
