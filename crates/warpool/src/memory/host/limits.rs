//! The settings that the hot path reads.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::memory::PinnedSettings;

pub(super) struct Limits {
    /// Larger sizes are not rounded to a size class.
    round_max: AtomicU64,
    /// Larger blocks are not kept.
    cached_max: AtomicU64,
    /// Whether the reserved segment has yet to be pinned.
    wants_reserve: AtomicBool,
}

impl Limits {
    pub(super) fn of(settings: &PinnedSettings) -> Self {
        let limits = Self {
            round_max: AtomicU64::new(0),
            cached_max: AtomicU64::new(0),
            wants_reserve: AtomicBool::new(settings.reserve_segment_bytes > 0),
        };
        limits.set_sizes(settings);
        limits
    }

    /// Replaces `before`. If only the new settings ask for a reserved segment, it is to be pinned; there is never a
    /// second one.
    pub(super) fn set(&self, before: &PinnedSettings, settings: &PinnedSettings) {
        self.set_sizes(settings);
        match (before.reserve_segment_bytes, settings.reserve_segment_bytes) {
            (_, 0) => self.wants_reserve.store(false, Ordering::Relaxed),
            (0, _) => self.wants_reserve.store(true, Ordering::Relaxed),
            _ => {}
        }
    }

    fn set_sizes(&self, settings: &PinnedSettings) {
        self.round_max.store(settings.max_round_threshold_bytes.unwrap_or(u64::MAX), Ordering::Relaxed);
        self.cached_max.store(settings.max_cached_bytes.unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    #[inline]
    pub(super) fn round_max(&self) -> u64 {
        // A block that is not kept is not reused, so its size is not rounded.
        self.round_max.load(Ordering::Relaxed).min(self.cached_max())
    }

    #[inline]
    pub(super) fn cached_max(&self) -> u64 {
        self.cached_max.load(Ordering::Relaxed)
    }

    /// Whether the caller has to pin the reserved segment. Returns `true` once.
    pub(super) fn take_reserve(&self) -> bool {
        self.wants_reserve.load(Ordering::Relaxed) && self.wants_reserve.swap(false, Ordering::Relaxed)
    }
}
