//! The counters of pinned host memory, by PyTorch's names.
//!
//! Requests are counted in the front caches that serve them, pinned memory in the heap. Reading the statistics adds
//! them up.

use std::time::Duration;

use crate::memory::Stat;

/// The duration of driver calls, in microseconds of the driver's clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostTime {
    /// The sum.
    pub total_us: u64,
    /// The longest.
    pub max_us: u64,
    /// The shortest; 0 if there was none.
    pub min_us: u64,
    /// The number of calls.
    pub count: u64,
}

impl HostTime {
    /// The mean, rounded down; 0 if there was none.
    #[must_use]
    pub fn avg_us(&self) -> u64 {
        self.total_us.checked_div(self.count).unwrap_or(0)
    }

    pub(super) fn add(&mut self, duration: Duration) {
        let us = u64::try_from(duration.as_micros()).unwrap_or(u64::MAX);
        self.min_us = if self.count == 0 { us } else { self.min_us.min(us) };
        self.max_us = self.max_us.max(us);
        self.total_us = self.total_us.saturating_add(us);
        self.count += 1;
    }
}

/// The counters of a [`HostAllocator`](super::HostAllocator).
///
/// Peaks of the requests are sums over the front caches: exact for one thread, an upper bound for several.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct HostStats {
    /// Pinned segments. PyTorch does not split them, and counts blocks here.
    pub allocations: Stat,
    /// Pinned bytes.
    pub allocated_bytes: Stat,
    /// Blocks that are allocated or pending free.
    pub active_requests: Stat,
    /// Bytes of those blocks.
    pub active_bytes: Stat,
    /// How often memory was pinned.
    pub num_host_alloc: u64,
    /// How often memory was unpinned.
    pub num_host_free: u64,
    /// The time that pinning took.
    pub host_alloc_time: HostTime,
    /// The time that unpinning took.
    pub host_free_time: HostTime,
    /// Pinned bytes by device. PyTorch has no such counter.
    pub pinned_bytes_by_device: Vec<u64>,
    /// Free bytes, in whole segments or parts of them, not including those in the pools of live graphs. PyTorch has no
    /// such counter.
    pub cached_bytes: u64,
}

impl HostStats {
    /// Every counter by its name in `torch.cuda.host_memory_stats`, such as `active_bytes.peak`, in the order there,
    /// and no others.
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
