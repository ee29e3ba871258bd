//! The counters of an allocator, by PyTorch's names.
//!
//! `allocation` and `allocated_bytes` count what callers have; `active` counts also what waits for events; `segment`
//! and `reserved_bytes` what is held from the driver; `inactive_split` the free parts of segments that are in use.

use std::collections::BTreeMap;
use std::sync::Mutex;

use warpool_driver::DeviceId;

use super::{MemPoolId, SegmentKind};
use crate::lock;

/// A number that goes up and down.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stat {
    /// Now.
    pub current: u64,
    /// The most that it was.
    pub peak: u64,
    /// All that was ever added.
    pub allocated: u64,
    /// All that was ever taken away.
    pub freed: u64,
}

impl Stat {
    /// Adds.
    #[inline]
    pub fn increase(&mut self, by: u64) {
        self.current += by;
        self.allocated += by;
        self.peak = self.peak.max(self.current);
    }

    /// Takes away.
    ///
    /// # Panics
    /// If there is less than that: a counter that goes below zero hides a bug.
    #[inline]
    pub fn decrease(&mut self, by: u64) {
        assert!(self.current >= by, "a counter of {} cannot lose {by}", self.current);
        self.current -= by;
        self.freed += by;
    }

    /// Forgets the past: the peak is now.
    pub fn reset_peak(&mut self) {
        self.peak = self.current;
    }

    /// Forgets what was added and taken away.
    pub fn reset_accumulated(&mut self) {
        self.allocated = 0;
        self.freed = 0;
    }
}

/// A number for all requests, for small ones, and for large ones. The peak of all is not the sum of the peaks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StatByKind {
    /// All of them.
    pub all: Stat,
    /// Those of small pools.
    pub small_pool: Stat,
    /// Those of large pools.
    pub large_pool: Stat,
}

impl StatByKind {
    /// Adds to that kind, and to all.
    #[inline]
    pub fn increase(&mut self, kind: SegmentKind, by: u64) {
        self.all.increase(by);
        self.of_mut(kind).increase(by);
    }

    /// Takes away from that kind, and from all.
    #[inline]
    pub fn decrease(&mut self, kind: SegmentKind, by: u64) {
        self.all.decrease(by);
        self.of_mut(kind).decrease(by);
    }

    #[inline]
    fn of_mut(&mut self, kind: SegmentKind) -> &mut Stat {
        match kind {
            SegmentKind::Small => &mut self.small_pool,
            SegmentKind::Large => &mut self.large_pool,
        }
    }

    fn each(&mut self, act: fn(&mut Stat)) {
        act(&mut self.all);
        act(&mut self.small_pool);
        act(&mut self.large_pool);
    }

    fn named(&self) -> [(&'static str, Stat); 3] {
        [("all", self.all), ("small_pool", self.small_pool), ("large_pool", self.large_pool)]
    }
}

/// The counters of one device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Blocks that callers have.
    pub allocation: StatByKind,
    /// Segments held from the driver. Expandable ones do not count.
    pub segment: StatByKind,
    /// Blocks that callers have, or that wait for events.
    pub active: StatByKind,
    /// Free blocks of segments that are partly in use. Those of expandable segments do not count.
    pub inactive_split: StatByKind,
    /// Bytes that callers have.
    pub allocated_bytes: StatByKind,
    /// Bytes held from the driver.
    pub reserved_bytes: StatByKind,
    /// Bytes that callers have, or that wait for events.
    pub active_bytes: StatByKind,
    /// Bytes of the blocks that `inactive_split` counts.
    pub inactive_split_bytes: StatByKind,
    /// What was asked for, before rounding, of the active blocks.
    pub requested_bytes: StatByKind,
    /// Blocks of at least `max_split_size`.
    pub oversize_allocations: Stat,
    /// Segments of at least `max_split_size`.
    pub oversize_segments: Stat,
    /// How often everything cached was given back to try once more.
    pub num_alloc_retries: u64,
    /// How often a request failed for lack of memory.
    pub num_ooms: u64,
    /// How often the allocator waited for all pending events.
    pub num_sync_all_streams: u64,
    /// How often memory came from the driver.
    pub num_device_alloc: u64,
    /// How often memory went back to the driver.
    pub num_device_free: u64,
    /// How often a request was refused before the driver was asked.
    pub num_oom_rejections: u64,
    /// The size from which blocks are not split; -1 is none.
    pub max_split_size: i64,
    /// Bytes held from the driver by each private pool that ever was. As in PyTorch, an entry outlives its pool: what
    /// the pool had at most can still be read.
    pub reserved_bytes_by_private_pools: BTreeMap<MemPoolId, StatByKind>,
    /// Bytes that libraries work with ([`blas`](crate::blas)). They are among the allocated ones too. PyTorch has no
    /// such counter.
    pub workspace_bytes: Stat,
}

impl Stats {
    /// Makes every peak what is now.
    pub fn reset_peak(&mut self) {
        self.each(Stat::reset_peak);
    }

    /// Zeroes what was ever added and taken away, and the plain counters.
    pub fn reset_accumulated(&mut self) {
        self.each(Stat::reset_accumulated);
        for counter in [
            &mut self.num_alloc_retries,
            &mut self.num_ooms,
            &mut self.num_sync_all_streams,
            &mut self.num_device_alloc,
            &mut self.num_device_free,
            &mut self.num_oom_rejections,
        ] {
            *counter = 0;
        }
    }

    /// Every counter by the name that `torch.cuda.memory_stats` gives it, such as `allocated_bytes.all.peak`, in their
    /// order there, and no others.
    #[must_use]
    pub fn flattened(&self) -> Vec<(String, i64)> {
        let mut flat = Vec::new();
        let mut put = |name: String, value: u64| flat.push((name, i64::try_from(value).unwrap_or(i64::MAX)));
        let mut put_stat = |name: &str, stat: Stat| {
            put(format!("{name}.current"), stat.current);
            put(format!("{name}.peak"), stat.peak);
            put(format!("{name}.allocated"), stat.allocated);
            put(format!("{name}.freed"), stat.freed);
        };
        for (name, by_kind) in self.by_kind() {
            for (kind, stat) in by_kind.named() {
                put_stat(&format!("{name}.{kind}"), stat);
            }
        }
        for (pool, by_kind) in &self.reserved_bytes_by_private_pools {
            for (kind, stat) in by_kind.named() {
                put_stat(&format!("reserved_bytes_by_private_pools.{}_{}.{kind}", pool.graph, pool.user), stat);
            }
        }
        put_stat("oversize_allocations", self.oversize_allocations);
        put_stat("oversize_segments", self.oversize_segments);
        put("num_alloc_retries".into(), self.num_alloc_retries);
        put("num_ooms".into(), self.num_ooms);
        put("num_sync_all_streams".into(), self.num_sync_all_streams);
        put("num_device_alloc".into(), self.num_device_alloc);
        put("num_device_free".into(), self.num_device_free);
        put("num_oom_rejections".into(), self.num_oom_rejections);
        flat.push(("max_split_size".into(), self.max_split_size));
        flat
    }

    fn by_kind(&self) -> [(&'static str, &StatByKind); 9] {
        [
            ("allocation", &self.allocation),
            ("segment", &self.segment),
            ("active", &self.active),
            ("inactive_split", &self.inactive_split),
            ("allocated_bytes", &self.allocated_bytes),
            ("reserved_bytes", &self.reserved_bytes),
            ("active_bytes", &self.active_bytes),
            ("inactive_split_bytes", &self.inactive_split_bytes),
            ("requested_bytes", &self.requested_bytes),
        ]
    }

    fn each(&mut self, act: fn(&mut Stat)) {
        for by_kind in [
            &mut self.allocation,
            &mut self.segment,
            &mut self.active,
            &mut self.inactive_split,
            &mut self.allocated_bytes,
            &mut self.reserved_bytes,
            &mut self.active_bytes,
            &mut self.inactive_split_bytes,
            &mut self.requested_bytes,
        ] {
            by_kind.each(act);
        }
        for by_kind in self.reserved_bytes_by_private_pools.values_mut() {
            by_kind.each(act);
        }
        act(&mut self.oversize_allocations);
        act(&mut self.oversize_segments);
        act(&mut self.workspace_bytes);
    }
}

/// Counts what libraries work with, by device.
#[derive(Debug, Default)]
pub(crate) struct WorkspaceMeter(Mutex<BTreeMap<DeviceId, Stat>>);

impl WorkspaceMeter {
    pub(crate) fn read(&self, device: DeviceId) -> Stat {
        lock(&self.0).get(&device).copied().unwrap_or_default()
    }

    pub(crate) fn change(&self, device: DeviceId, act: impl FnOnce(&mut Stat)) {
        act(lock(&self.0).entry(device).or_default());
    }
}
