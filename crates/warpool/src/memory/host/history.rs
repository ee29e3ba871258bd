//! The history of pinned memory, and its observers. The host has no streams; trackers see it as the device [`HOST`].

use std::sync::Mutex;

use warpool_driver::{DeviceId, Driver};

use crate::lock;
use crate::memory::report::StackIds;
use crate::memory::report::{EntryDetails, HistoryFlags, HistoryRecorder};
use crate::memory::{Action, HistoryEntry, HistoryOptions, MemPoolId, Observers, Snapshot, StackLevel};

/// The device id of pinned memory for trackers. In snapshots it is -1.
pub(super) const HOST: DeviceId = DeviceId(u32::MAX);

#[derive(Default)]
pub(super) struct HostHistory {
    history_flags: HistoryFlags,
    recorder: Mutex<HistoryRecorder>,
    observers: Observers,
}

impl HostHistory {
    pub(super) fn observers(&self) -> &Observers {
        &self.observers
    }

    pub(super) fn set(&self, options: Option<HistoryOptions>) {
        let mut recorder = lock(&self.recorder);
        self.history_flags.set(options.as_ref());
        recorder.history.set(options);
    }

    /// What the history stores with the next entries. Gathered before any lock is taken.
    #[inline]
    pub(super) fn entry_details(&self, level: StackLevel, driver: &dyn Driver) -> EntryDetails {
        self.history_flags.entry_details(level, &self.observers, driver)
    }

    /// Adds an entry and calls the trackers. No lock may be held.
    #[inline]
    pub(super) fn record(&self, action: Action, addr: u64, size: u64, details: &EntryDetails) {
        if !details.is_off() {
            self.record_now(action, addr, size, details);
        }
    }

    #[cold]
    fn record_now(&self, action: Action, addr: u64, size: u64, details: &EntryDetails) {
        let entries = self.write(action, addr, size, details);
        self.notify(&entries);
    }

    /// Adds an entry. Returns what [`notify`](Self::notify) is to be called with.
    pub(super) fn write(&self, action: Action, addr: u64, size: u64, details: &EntryDetails) -> Vec<HistoryEntry> {
        if details.is_off() {
            return Vec::new();
        }
        let mut recorder = lock(&self.recorder);
        recorder.record(action, addr, size, 0, MemPoolId::DEFAULT, details);
        recorder.take_unreported()
    }

    /// Calls the trackers. No lock may be held.
    pub(super) fn notify(&self, entries: &[HistoryEntry]) {
        if !entries.is_empty() {
            self.observers.track(HOST, entries);
        }
    }

    pub(super) fn add_to(&self, snapshot: &mut Snapshot, stacks: &mut StackIds) {
        snapshot.host_traces = Some(lock(&self.recorder).history.copy_to(snapshot, stacks));
    }
}
