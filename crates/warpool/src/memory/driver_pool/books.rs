//! What only the driver's pools know: how much they hold beyond what is in use.

use crate::memory::Stats;
use crate::memory::books::Books;

impl Books {
    /// The counters, with what is held from the driver: `pool` is what its pool holds now, and the most that it did.
    /// What captures allocated lies elsewhere and is held as well. The driver does not say which requests the rest
    /// served: it counts as large.
    pub(super) fn stats_with(&self, pool: (u64, u64)) -> Stats {
        let mut stats = self.stats.clone();
        let small = stats.active_bytes.small_pool;
        let reserved = &mut stats.reserved_bytes;
        let current = self.held(pool.0);
        reserved.all.current = current;
        reserved.all.peak = pool.1.max(current);
        (reserved.small_pool.current, reserved.small_pool.peak) = (small.current, small.peak);
        reserved.large_pool.current = current - small.current;
        reserved.large_pool.peak = reserved.all.peak.saturating_sub(small.current);
        stats
    }

    /// What is held, if the driver's pool holds so much. Never less than what is in use: the pool may have grown since
    /// it was asked.
    fn held(&self, bytes_in_pool: u64) -> u64 {
        (bytes_in_pool + self.captured_bytes()).max(self.stats.active_bytes.all.current)
    }

    /// What the driver's pool holds beyond what is in use.
    pub(super) fn rest(&self, bytes_in_pool: u64) -> u64 {
        self.held(bytes_in_pool) - self.stats.active_bytes.all.current
    }
}
