//! What is allocated, as the program knows it, beside what the allocator reports.

use std::collections::BTreeMap;

use super::machine::{DEVICE, MIB};
use crate::memory::{Allocation, DeviceAllocator as _, PagedAllocator};

const SLOT: u64 = 2 * MIB;

#[derive(Default)]
pub struct Model {
    /// Blocks by address, with their sizes.
    live: BTreeMap<u64, u64>,
    bytes: u64,
    bytes_peak: u64,
    /// Allocations and bytes so far.
    allocations: u64,
    bytes_allocated: u64,
    ooms: u64,
}

impl Model {
    /// A block was allocated, where no other is.
    pub fn allocated(&mut self, block: &Allocation) {
        assert!(block.bytes >= block.bytes_requested && block.ptr.0.is_multiple_of(512), "{block:?}");
        let before = self.live.range(..block.ptr.0 + block.bytes).next_back();
        assert!(before.is_none_or(|(&addr, &bytes)| addr + bytes <= block.ptr.0), "{block:?} overlaps {before:x?}");
        self.live.insert(block.ptr.0, block.bytes);
        self.bytes += block.bytes;
        self.bytes_peak = self.bytes_peak.max(self.bytes);
        self.allocations += 1;
        self.bytes_allocated += block.bytes;
    }

    pub fn freed(&mut self, block: &Allocation) {
        self.bytes -= self.live.remove(&block.ptr.0).expect("a block that is allocated");
    }

    pub fn out_of_memory(&mut self) {
        self.ooms += 1;
    }

    pub fn reset_peak(&mut self) {
        self.bytes_peak = self.bytes;
    }

    /// How many bytes of pages the live blocks and a further one need at most, whatever their places, if the largest
    /// pages have so many bytes. Of those only the first and the last one of a block have room for others.
    pub fn bytes_needed_max(&self, further: u64, page_bytes_max: u64) -> u64 {
        let around = SLOT + 2 * (page_bytes_max - SLOT);
        let needed = |bytes: u64| bytes.next_multiple_of(SLOT) + around;
        self.live.values().map(|&bytes| needed(bytes)).sum::<u64>() + needed(further)
    }

    /// The allocator reports the same. `pending` says whether frees may be pending.
    pub fn check(&self, paged: &PagedAllocator) {
        let stats = paged.stats(DEVICE).unwrap();
        let bytes = stats.allocated_bytes.all;
        let reported = (stats.allocation.all.current, bytes.current, bytes.peak, stats.num_ooms);
        assert_eq!(
            reported,
            (self.live.len() as u64, self.bytes, self.bytes_peak, self.ooms),
            "blocks, bytes, peak, ooms"
        );
        assert_eq!(
            (stats.allocation.all.allocated, bytes.allocated),
            (self.allocations, self.bytes_allocated),
            "so far"
        );
        assert!(stats.active_bytes.all.current >= self.bytes, "pending frees are active");
        let pages = paged.page_stats(DEVICE).unwrap();
        assert_eq!(pages.active_bytes, stats.active_bytes.all.current);
        let sum = pages.active_bytes + pages.free_mapped_bytes + pages.spare_bytes;
        assert_eq!(sum, pages.reserved_bytes, "{pages:?}");
        assert_eq!(stats.reserved_bytes.all.current, pages.reserved_bytes);
        paged.check();
    }
}
