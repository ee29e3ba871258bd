//! The rules of the recorded allocator, as its settings define them. The size rules are those of the caching allocator.

use warpool::memory::settings::FreeBlockOrder;
use warpool::memory::{Settings, SizeRules};

pub(in crate::replay) const MIB: u64 = 1 << 20;

/// The rules under the recorded settings.
#[derive(Clone, Debug)]
pub(in crate::replay) struct RecordedRules {
    sizes: SizeRules,
    expandable_segments: bool,
    max_split_bytes: Option<u64>,
    garbage_collection_threshold: f64,
    oldest_segment_first: bool,
}

impl RecordedRules {
    pub fn new(settings: &Settings) -> Self {
        Self {
            sizes: SizeRules::new(settings),
            expandable_segments: settings.expandable_segments,
            max_split_bytes: settings.max_split_bytes,
            garbage_collection_threshold: settings.garbage_collection_threshold,
            oldest_segment_first: settings.free_block_order == FreeBlockOrder::Registration,
        }
    }

    /// The program changed `expandable_segments`.
    pub fn toggle_expandable_segments(&mut self) {
        self.expandable_segments = !self.expandable_segments;
    }

    pub fn expandable_segments(&self) -> bool {
        self.expandable_segments
    }

    pub fn sizes(&self) -> &SizeRules {
        &self.sizes
    }

    /// Whether `rest` bytes beyond a request of the rounded size `size` become a block of their own.
    pub fn splits(&self, size: u64, rest: u64) -> bool {
        self.sizes.splits(size, rest, self.expandable_segments)
    }

    pub fn max_split_bytes(&self) -> Option<u64> {
        self.max_split_bytes
    }

    /// The share of the memory limit above which unused segments are released; 0 is never.
    pub fn garbage_collection_threshold(&self) -> f64 {
        self.garbage_collection_threshold
    }

    /// Whether the allocator may release some cached segments and keep others: garbage collection, or oversize
    /// segments under `max_split_size`.
    pub fn releases_partially(&self) -> bool {
        self.garbage_collection_threshold > 0.0 || self.max_split_bytes.is_some()
    }

    /// Among free blocks of one size: whether the one in the oldest segment is used first, or else the one at the
    /// lowest address.
    pub fn oldest_segment_first(&self) -> bool {
        self.oldest_segment_first
    }
}
