//! The counters of pinned host memory, by PyTorch's names.
//!
//! Requests are counted where they are served, in the front caches; what is held from the driver in the heap. Reading
//! sums them up.

use std::time::Duration;

use crate::memory::Stat;

/// What calls to the driver took, in microseconds of its clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostTime {
    /// All of them.
    pub total_us: u64,
    /// The longest.
    pub max_us: u64,
    /// The shortest; 0 if there was none.
    pub min_us: u64,
    /// How many.
    pub count: u64,
}

impl HostTime {
    /// The mean, rounded down; 0 if there was none.
    #[must_use]
    pub fn avg_us(&self) -> u64 {
        self.total_us.checked_div(self.count).unwrap_or(0)
    }

    pub(super) fn add(&mut self, took: Duration) {
        let us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        self.min_us = if self.count == 0 { us } else { self.min_us.min(us) };
        self.max_us = self.max_us.max(us);
        self.total_us = self.total_us.saturating_add(us);
        self.count += 1;
    }
}

/// The counters of a [`HostAllocator`](super::HostAllocator).
///
/// Peaks of the requests are sums over the front caches: exact for one thread, and an upper bound for several.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostStats {
    /// Segments held from the driver. PyTorch, which does not cut them, counts blocks here.
    pub allocations: Stat,
    /// Bytes held from the driver.
    pub allocated_bytes: Stat,
    /// Blocks that callers have, or that wait for streams or graphs.
    pub active_requests: Stat,
    /// Bytes of those blocks.
    pub active_bytes: Stat,
    /// How often memory came from the driver.
    pub num_host_alloc: u64,
    /// How often memory went back to the driver.
    pub num_host_free: u64,
    /// What pinning took.
    pub host_alloc_time: HostTime,
    /// What unpinning took.
    pub host_free_time: HostTime,
    /// Bytes held from the driver for each device. PyTorch has no such counter.
    pub pinned_bytes_by_device: Vec<u64>,
    /// Bytes that lie free for anybody, whole segments or parts of them: without those that a capture gave back unused,
    /// which lie in the pool of a graph that lives. PyTorch has no such counter.
    pub cached_bytes: u64,
}

impl HostStats {
    /// Every counter by the name that `torch.cuda.host_memory_stats` gives it, such as `active_bytes.peak`, in their
    /// order there, and no others.
    #[must_use]
    pub fn flattened(&self) -> Vec<(String, i64)> {
        let mut flat = Vec::new();
        let mut put = |name: String, value: u64| flat.push((name, i64::try_from(value).unwrap_or(i64::MAX)));
        let stats = [
            ("allocations", self.allocations),
            ("allocated_bytes", self.allocated_bytes),
            ("active_requests", self.active_requests),
            ("active_bytes", self.active_bytes),
        ];
        for (name, stat) in stats {
            put(format!("{name}.current"), stat.current);
            put(format!("{name}.peak"), stat.peak);
            put(format!("{name}.allocated"), stat.allocated);
            put(format!("{name}.freed"), stat.freed);
        }
        put("num_host_alloc".into(), self.num_host_alloc);
        put("num_host_free".into(), self.num_host_free);
        for (name, time) in [("host_alloc_time", self.host_alloc_time), ("host_free_time", self.host_free_time)] {
            put(format!("{name}.total"), time.total_us);
            put(format!("{name}.max"), time.max_us);
            put(format!("{name}.min"), time.min_us);
            put(format!("{name}.count"), time.count);
            put(format!("{name}.avg"), time.avg_us());
        }
        flat
    }
}

/// One counter of several caches, summed up.
pub(super) fn sum(into: &mut Stat, of: Stat) {
    into.current += of.current;
    into.peak += of.peak;
    into.allocated += of.allocated;
    into.freed += of.freed;
}
