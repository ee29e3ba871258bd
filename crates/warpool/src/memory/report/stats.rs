//! The statistics of an allocator, by PyTorch's names.
//!
//! `allocation` and `allocated_bytes` count allocated blocks; `active` counts pending frees too; `segment` and
//! `reserved_bytes` count memory from the driver; `inactive_split` counts free parts of segments that are in use.

use std::collections::BTreeMap;
use std::sync::Mutex;

use warpool_driver::DeviceId;

use super::SegmentKind;
use crate::lock;
use crate::memory::MemPoolId;

/// A statistic with its peak.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stat {
    /// The current value.
    pub current: u64,
    /// The highest value since the last reset.
    pub peak: u64,
    /// The sum of all increases.
    pub allocated: u64,
    /// The sum of all decreases.
    pub freed: u64,
}

impl Stat {
    /// Adds `by`.
    #[inline]
    pub fn increase(&mut self, by: u64) {
        self.current += by;
        self.allocated += by;
        self.peak = self.peak.max(self.current);
    }

    /// Subtracts `by`.
    ///
    /// # Panics
    /// If the current value is lower.
    #[inline]
    pub fn decrease(&mut self, by: u64) {
        assert!(self.current >= by, "a statistic of {} cannot decrease by {by}", self.current);
        self.current -= by;
        self.freed += by;
    }

    /// Counts an increase and a decrease by `by`. Neither the current value nor the peak changes.
    pub(crate) fn repeat(&mut self, by: u64) {
        self.allocated += by;
        self.freed += by;
    }

    /// Sets the peak to the current value.
    pub fn reset_peak(&mut self) {
        self.peak = self.current;
    }

    /// Sets the sums of increases and decreases to 0.
    pub fn reset_accumulated(&mut self) {
        self.allocated = 0;
        self.freed = 0;
    }
}

/// A statistic over all blocks, over those in small pools, and over those in large pools. The peak of all is not the
/// sum of the peaks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StatByKind {
    /// Small and large pools.
    pub all: Stat,
    /// Small pools.
    pub small_pool: Stat,
    /// Large pools.
    pub large_pool: Stat,
}

impl StatByKind {
    /// Adds `by` to that kind and to all.
    #[inline]
    pub fn increase(&mut self, kind: SegmentKind, by: u64) {
        self.all.increase(by);
        self.of_mut(kind).increase(by);
    }

    /// Subtracts `by` from that kind and from all.
    #[inline]
    pub fn decrease(&mut self, kind: SegmentKind, by: u64) {
        self.all.decrease(by);
        self.of_mut(kind).decrease(by);
    }

    /// Counts an increase and a decrease by `by`, for that kind and for all. Neither current values nor peaks change.
    pub(crate) fn repeat(&mut self, kind: SegmentKind, by: u64) {
        self.all.repeat(by);
        self.of_mut(kind).repeat(by);
    }

    #[inline]
    fn of_mut(&mut self, kind: SegmentKind) -> &mut Stat {
        match kind {
            SegmentKind::Small => &mut self.small_pool,
            SegmentKind::Large => &mut self.large_pool,
        }
    }

    /// Sets every peak to its current value.
    pub(crate) fn reset_peak(&mut self) {
        if crate::defect::Defect::PeakOfKindsStays.is_on() {
            return self.all.reset_peak();
        }
        self.each(Stat::reset_peak);
    }

    /// Sets the sums of increases and decreases to 0.
    pub(crate) fn reset_accumulated(&mut self) {
        self.each(Stat::reset_accumulated);
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

/// The statistics of one device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Allocated blocks.
    pub allocation: StatByKind,
    /// Segments. Expandable segments do not count. For the paged allocator, contiguous mapped address ranges count.
    pub segment: StatByKind,
    /// Allocated blocks and pending frees.
    pub active: StatByKind,
    /// Free blocks of segments that are partly in use. Those of expandable segments do not count. The paged allocator
    /// computes them when they are read: the peak is the highest value that was read, and increases and decreases are
    /// the differences between reads.
    pub inactive_split: StatByKind,
    /// Bytes of allocated blocks.
    pub allocated_bytes: StatByKind,
    /// Bytes allocated from the driver.
    pub reserved_bytes: StatByKind,
    /// Bytes of allocated blocks and of pending frees.
    pub active_bytes: StatByKind,
    /// Bytes of the blocks that `inactive_split` counts.
    pub inactive_split_bytes: StatByKind,
    /// Requested bytes, before rounding, of the active blocks.
    pub requested_bytes: StatByKind,
    /// Allocated blocks of at least `max_split_size`.
    pub oversize_allocations: Stat,
    /// Segments of at least `max_split_size`.
    pub oversize_segments: Stat,
    /// How often all cached memory was released to retry a request.
    pub num_alloc_retries: u64,
    /// How often a request ran out of memory.
    pub num_ooms: u64,
    /// How often the allocator waited for all pending frees.
    pub num_sync_all_streams: u64,
    /// How often memory was allocated from the driver.
    pub num_device_alloc: u64,
    /// How often memory was returned to the driver.
    pub num_device_free: u64,
    /// How often a request was rejected before the driver was called.
    pub num_oom_rejections: u64,
    /// The size from which on blocks are not split; -1 is none.
    pub max_split_size: i64,
    /// Bytes reserved by each private pool. An entry is removed with its pool: PyTorch keeps the entries of all pools
    /// that ever existed.
    pub reserved_bytes_by_private_pools: BTreeMap<MemPoolId, StatByKind>,
    /// Bytes of workspaces of libraries ([`blas`](crate::blas)). They also count as allocated. PyTorch has no such
    /// statistic.
    pub workspace_bytes: Stat,
    /// Bytes of segments whose memory is asleep ([`Tags`](crate::memory::Tags)): it is released to the driver, and
    /// `reserved_bytes` does not count it. Blocks in it still count as allocated. PyTorch has no such statistic.
    pub asleep_bytes: StatByKind,
}

impl Stats {
    /// Sets every peak to its current value.
    pub fn reset_peak(&mut self) {
        self.each(Stat::reset_peak);
    }

    /// Sets the sums of increases and decreases, and the plain counters, to 0.
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

    /// Every statistic of `torch.cuda.memory_stats`, by its name there, such as `allocated_bytes.all.peak`, and in its
    /// order.
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

/// The workspaces of libraries, by device.
#[derive(Debug, Default)]
pub(crate) struct WorkspaceStats(Mutex<BTreeMap<DeviceId, Stat>>);

impl WorkspaceStats {
    pub(crate) fn read(&self, device: DeviceId) -> Stat {
        lock(&self.0).get(&device).copied().unwrap_or_default()
    }

    pub(crate) fn change(&self, device: DeviceId, act: impl FnOnce(&mut Stat)) {
        act(lock(&self.0).entry(device).or_default());
    }
}
