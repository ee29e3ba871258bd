//! The data that clones of [`Tags`](super::Tags) share: the allocator, the tags by name, and their pools.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};

use warpool_driver::DeviceId;

use super::elastic::TagElastic;
use crate::lock;
use crate::memory::mapped_segments::MappedSegments;
use crate::memory::{Annotation, DeviceAllocator, HostAllocator, MemPool, MemPoolId, PoolSleep};

/// The maximum number of sleep and wake annotations in a snapshot.
const TIMES: usize = 4096;

pub(super) struct Shared {
    pub(super) allocator: Arc<dyn DeviceAllocator>,
    pub(super) host: HostAllocator,
    pub(super) by_name: Mutex<BTreeMap<(String, DeviceId), TagPools>>,
    /// Held by the one call that puts memory to sleep or wakes it.
    pub(super) changing: Mutex<()>,
    /// The last sleep and wake annotations.
    pub(super) times: Mutex<VecDeque<Annotation>>,
}

/// The pools of a tag on a device.
pub(super) struct TagPools {
    /// The tag's own pool, which it keeps alive.
    pub(super) pool: MemPool,
    pub(super) own: Arc<TagPool>,
    /// Pools of other owners whose memory carries the tag.
    pub(super) others: Vec<Arc<TagPool>>,
    /// Elastic memory that carries the tag.
    elastic: Vec<Arc<TagElastic>>,
}

impl TagPools {
    pub(super) fn new(pool: MemPool, own: Arc<TagPool>) -> Self {
        Self { pool, own, others: Vec::new(), elastic: Vec::new() }
    }

    pub(super) fn add_elastic(&mut self, elastic: TagElastic) {
        self.elastic.push(Arc::new(elastic));
    }

    /// The elastic memory that still exists.
    pub(super) fn elastic(&mut self) -> Vec<Arc<TagElastic>> {
        self.elastic.retain(|elastic| elastic.exists());
        self.elastic.clone()
    }

    /// All of them that still exist.
    pub(super) fn all(&mut self) -> Vec<Arc<TagPool>> {
        // A pool keeps its upstream alive, and so does every segment.
        self.others.retain(|other| Arc::strong_count(&other.segments) > 1);
        std::iter::once(&self.own).chain(&self.others).cloned().collect()
    }
}

/// A pool whose memory carries a tag.
pub(super) struct TagPool {
    pub(super) id: MemPoolId,
    pub(super) segments: Arc<MappedSegments>,
}

impl TagPool {
    pub(super) fn device(&self) -> DeviceId {
        self.segments.device.id()
    }

    pub(super) fn name(&self) -> (String, DeviceId) {
        (self.segments.tag.to_string(), self.device())
    }
}

impl Shared {
    pub(super) fn new(allocator: Arc<dyn DeviceAllocator>, host: HostAllocator) -> Self {
        Self { allocator, host, by_name: Mutex::default(), changing: Mutex::default(), times: Mutex::default() }
    }

    /// The allocator's interface for sleeping memory.
    pub(super) fn pool_sleep(&self) -> &dyn PoolSleep {
        let pools = self.allocator.pools().expect("an allocator with tags has pools");
        pools.sleep().expect("an allocator with tags has pools that can sleep")
    }

    /// After copies from and to pinned memory are done: makes freed pinned memory available to other requests at once.
    pub(super) fn reuse_pinned(&self) {
        if let Err(error) = self.host.process_pending() {
            tracing::warn!(%error, "pinned memory that was freed is reused later");
        }
    }

    pub(super) fn now_us(&self) -> i64 {
        i64::try_from(self.allocator.instance().driver().now().as_micros()).unwrap_or(i64::MAX)
    }

    /// Records the time when a tag was put to sleep (`START`) or woken (`END`), for snapshots.
    pub(super) fn remember(&self, pool: &TagPool, stage: &str, time_us: i64) {
        let mut times = lock(&self.times);
        if times.len() == TIMES {
            times.pop_front();
        }
        times.push_back(Annotation {
            name: format!("asleep: {}", pool.segments.tag),
            stage: stage.to_owned(),
            device: i64::from(pool.device().0),
            time_us,
        });
    }
}
