//! The settings of one device as plain numbers, copied under its lock.

use crate::memory::limit::share_of;
use crate::memory::{FreeBlockOrder, Settings, SizeRules};

#[derive(Clone, Debug)]
pub(crate) struct Policy {
    pub(crate) sizes: SizeRules,
    /// The fraction of the limit above which old segments are released; 0 disables it.
    garbage_threshold: f64,
    pub(crate) expandable: bool,
    pub(crate) reuse_in_capture: bool,
    pub(crate) free_block_order: FreeBlockOrder,
    /// Requests that would reserve more fail at once, without any retry.
    bytes_before_rejection: Option<u64>,
    /// The smaller of the limits that the fraction and the cap set.
    pub(crate) limit: Option<u64>,
}

impl Policy {
    /// What `settings` mean for a device of `bytes_total`, with or without virtual memory. No limit yet.
    pub(crate) fn new(settings: &Settings, bytes_total: u64, virtual_memory: bool) -> Self {
        Self {
            sizes: SizeRules::new(settings),
            garbage_threshold: settings.garbage_collection_threshold,
            expandable: settings.expandable_segments && virtual_memory,
            reuse_in_capture: settings.graph_capture_record_stream_reuse,
            free_block_order: settings.free_block_order,
            bytes_before_rejection: settings.throw_on_cudamalloc_oom.then(|| {
                share_of(bytes_total, settings.per_process_memory_fraction)
                    .min(settings.memory_cap_bytes.unwrap_or(u64::MAX))
            }),
            limit: None,
        }
    }

    /// Whether old segments are released because of their age. Needs a limit.
    #[inline]
    pub(crate) fn collects_garbage(&self) -> bool {
        self.limit.is_some() && self.garbage_threshold > 0.0
    }

    /// How much of the `reserved` bytes is above the threshold of garbage collection.
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a share of a device's memory; the threshold is in (0, 1)"
    )]
    pub(crate) fn bytes_over_gc_threshold(&self, reserved: u64) -> u64 {
        let Some(limit) = self.limit.filter(|_| self.collects_garbage()) else { return 0 };
        reserved.saturating_sub((limit as f64 * self.garbage_threshold) as u64)
    }

    /// Whether `reserved` bytes are more than the limit.
    pub(crate) fn exceeds_limit(&self, reserved: u64) -> bool {
        self.limit.is_some_and(|limit| reserved > limit)
    }

    /// Whether a request that would raise the total to `reserved` bytes fails at once, without any retry.
    pub(crate) fn rejects(&self, reserved: u64) -> bool {
        self.bytes_before_rejection.is_some_and(|most| reserved > most)
    }

    /// `max_split_size` as the statistics show it.
    pub(crate) fn max_split_stat(&self) -> i64 {
        i64::try_from(self.sizes.max_split_bytes()).unwrap_or(-1)
    }
}
