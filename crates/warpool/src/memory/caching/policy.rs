//! The settings as the rules need them: plain numbers, one copy per device under its lock.

use crate::memory::{FreeBlockOrder, Settings, SizeRules};

/// What the rules of one device go by.
#[derive(Clone, Debug)]
pub(super) struct Policy {
    pub(super) sizes: SizeRules,
    /// The share of the limit above which old segments go; 0 is never.
    pub(super) garbage_threshold: f64,
    pub(super) expandable: bool,
    pub(super) reuse_in_capture: bool,
    /// Whether of blocks of one size that of the oldest segment comes first, rather than that of the lowest address.
    pub(super) by_registration: bool,
    /// Whether requests beyond `bytes_before_rejection` fail before anything is tried.
    pub(super) bytes_before_rejection: Option<u64>,
    /// The least of what the fraction and the cap allow.
    pub(super) limit: Option<u64>,
}

impl Policy {
    /// What `settings` mean for a device, under `limit`. `grows` says whether the device has virtual memory.
    pub(super) fn new(settings: &Settings, bytes_total: u64, limit: Option<u64>, grows: bool) -> Self {
        Self {
            sizes: SizeRules::new(settings),
            garbage_threshold: settings.garbage_collection_threshold,
            expandable: settings.expandable_segments && grows,
            reuse_in_capture: settings.graph_capture_record_stream_reuse,
            by_registration: settings.free_block_order == FreeBlockOrder::Registration,
            bytes_before_rejection: settings.throw_on_cudamalloc_oom.then(|| {
                share_of(bytes_total, settings.per_process_memory_fraction)
                    .min(settings.memory_cap_bytes.unwrap_or(u64::MAX))
            }),
            limit,
        }
    }

    /// Whether old segments are ever given back because of their age. It takes a limit to be above.
    pub(super) fn collects_garbage(&self) -> bool {
        self.limit.is_some() && self.garbage_threshold > 0.0
    }

    /// How much may be held under that limit before old segments go.
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a share of a device's memory; the threshold is in (0, 1)"
    )]
    pub(super) fn garbage_from(&self, limit: u64) -> u64 {
        (limit as f64 * self.garbage_threshold) as u64
    }

    /// As the counters show it.
    pub(super) fn max_split_stat(&self) -> i64 {
        i64::try_from(self.sizes.max_split_bytes()).unwrap_or(-1)
    }
}

/// That share of `bytes`, to the nearest byte.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a share of a device's memory; the fraction is in [0, 1]"
)]
pub(in crate::memory) fn share_of(bytes: u64, fraction: f64) -> u64 {
    (bytes as f64 * fraction).round() as u64
}
