//! The state shared with a running call: its progress, and the flag to stop it.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use warpool_trace::Stop;
use warpool_trace::replay::ReplayProgress;

/// What a call is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Stage {
    /// Nothing yet.
    Waiting = 0,
    /// Reading a recording, in bytes of the input.
    Reading = 1,
    /// Replaying it, in events, or with `tune` in trials.
    Replaying = 2,
    /// Making a page.
    Writing = 3,
}

/// The progress of a call, and its flag to stop. Any thread may read it.
#[derive(Debug, Default)]
pub struct Work {
    /// Ends the call.
    pub stop: Stop,
    stage: AtomicU8,
    done: AtomicU64,
    total: AtomicU64,
    /// Called with every change, on the thread that makes it.
    watch: Option<fn(u8, u64, u64)>,
}

impl Work {
    /// Work whose progress is told to `watch`: stage, done and total, as [`progress`](Self::progress) has them. For a
    /// caller without a thread that could ask.
    #[must_use]
    pub fn watched(watch: fn(u8, u64, u64)) -> Self {
        Self { watch: Some(watch), ..Self::default() }
    }

    /// Work that is done at the same time and not shown: it stops with this one.
    #[must_use]
    pub fn beside(&self) -> Self {
        Self { stop: self.stop.clone(), ..Self::default() }
    }

    /// Begins a stage, at 0.
    pub fn begin(&self, stage: Stage, total: u64) {
        self.stage.store(stage as u8, Ordering::Relaxed);
        self.set(0, total);
    }

    /// Sets the progress. The figures are for display: a reader may see one change before the other.
    pub fn set(&self, done: u64, total: u64) {
        self.done.store(done, Ordering::Relaxed);
        self.total.store(total, Ordering::Relaxed);
        if let Some(watch) = self.watch {
            watch(self.stage.load(Ordering::Relaxed), done, total);
        }
    }

    /// The progress of a replay.
    pub fn replayed(&self, progress: ReplayProgress) {
        self.set(progress.done, progress.total);
    }

    /// The number of the stage, how much is done, and of how much (0 if that is not known).
    #[must_use]
    pub fn progress(&self) -> (u8, u64, u64) {
        let stage = self.stage.load(Ordering::Relaxed);
        (stage, self.done.load(Ordering::Relaxed), self.total.load(Ordering::Relaxed))
    }
}
