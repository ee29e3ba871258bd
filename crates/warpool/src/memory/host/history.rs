//! The history of pinned memory, and its observers. The host has no streams; trackers see it as the device [`HOST`].

use std::sync::Mutex;

use warpool_driver::{DeviceId, Driver};

use crate::lock;
use crate::memory::history::StackNumbers;
use crate::memory::journal::{Cause, Journal, Recording};
use crate::memory::{Action, HistoryEntry, HistoryOptions, MemPoolId, Observers, Snapshot, StackLevel};

/// The device id of pinned memory for trackers. In snapshots it is -1.
pub(super) const HOST: DeviceId = DeviceId(u32::MAX);

#[derive(Default)]
pub(super) struct HostHistory {
    recording: Recording,
    journal: Mutex<Journal>,
    observers: Observers,
}

impl HostHistory {
    pub(super) fn observers(&self) -> &Observers {
        &self.observers
    }

    pub(super) fn set(&self, options: Option<HistoryOptions>) {
        let mut journal = lock(&self.journal);
        self.recording.set(options.as_ref());
        journal.history.set(options);
    }

    /// What the history stores with the next entries. Gathered before any lock is taken.
    #[inline]
    pub(super) fn cause(&self, level: StackLevel, driver: &dyn Driver) -> Cause {
        self.recording.cause(level, &self.observers, driver)
    }

    /// Adds an entry and calls the trackers. No lock may be held.
    #[inline]
    pub(super) fn record(&self, action: Action, addr: u64, size: u64, cause: &Cause) {
        if !cause.is_silent() {
            self.record_now(action, addr, size, cause);
        }
    }

    #[cold]
    fn record_now(&self, action: Action, addr: u64, size: u64, cause: &Cause) {
        let entries = self.write(action, addr, size, cause);
        self.notify(&entries);
    }

    /// Adds an entry. Returns what [`notify`](Self::notify) is to be called with.
    pub(super) fn write(&self, action: Action, addr: u64, size: u64, cause: &Cause) -> Vec<HistoryEntry> {
        if cause.is_silent() {
            return Vec::new();
        }
        let mut journal = lock(&self.journal);
        journal.record(action, addr, size, 0, MemPoolId::DEFAULT, cause);
        journal.take_news()
    }

    /// Calls the trackers. No lock may be held.
    pub(super) fn notify(&self, entries: &[HistoryEntry]) {
        if !entries.is_empty() {
            self.observers.track(HOST, entries);
        }
    }

    pub(super) fn add_to(&self, snapshot: &mut Snapshot, stacks: &mut StackNumbers) {
        snapshot.host_traces = Some(lock(&self.journal).history.copy_to(snapshot, stacks));
    }
}
