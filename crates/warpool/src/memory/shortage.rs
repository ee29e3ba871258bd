//! The out-of-memory report as far as statistics tell it. An allocator that knows its free blocks fills in the rest.

use warpool_driver::MemoryInfo;

use super::{OomCause, OomReport, Request, Stats};

pub(crate) struct Shortage<'a> {
    pub(crate) request: &'a Request,
    pub(crate) why: OomCause,
    /// The bytes that were, or would have been, requested from the source.
    pub(crate) bytes_segment: u64,
    pub(crate) memory: MemoryInfo,
    pub(crate) limit: Option<u64>,
    pub(crate) stats: &'a Stats,
    pub(crate) capturing: bool,
}

impl Shortage<'_> {
    pub(crate) fn report(&self) -> OomReport {
        let (reserved, active) = (self.stats.reserved_bytes.all.current, self.stats.active_bytes.all.current);
        let allocated = self.stats.allocated_bytes.all.current;
        // Other threads may allocate while the counters are read.
        let (pending, cached) = (active.saturating_sub(allocated), reserved.saturating_sub(active));
        OomReport {
            device: self.request.device,
            cause: self.why,
            bytes_requested: self.request.bytes,
            bytes_segment: self.bytes_segment,
            bytes_total: self.memory.bytes_total,
            bytes_free: self.memory.bytes_free,
            bytes_limit: self.limit,
            bytes_reserved: reserved,
            bytes_allocated: allocated,
            bytes_pending: pending,
            bytes_private_free: 0,
            bytes_cached: cached,
            blocks_cached: u64::from(cached > 0),
            bytes_largest_cached: cached,
            // No setting would change the placement.
            expandable_segments: true,
            capturing: self.capturing,
            pages: None,
        }
    }
}
