//! The history of pinned memory, and its observers. The host has no streams; trackers see it as the device [`HOST`].
//!
//! Trackers and stack hooks run in the middle of a call, without a lock, and may panic. The call still does all its
//! work: [`Details`] keeps the first panic, which is resumed at the end.

use std::any::Any;
use std::cell::Cell;
use std::ops::Deref;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Mutex;
use std::thread;

use warpool_driver::{DeviceId, Driver, discard_panic};

use super::block::PinnedBlock;
use crate::lock;
use crate::memory::report::StackIds;
use crate::memory::report::{EntryDetails, HistoryFlags, HistoryRecorder};
use crate::memory::{Action, HistoryEntry, HistoryOptions, MemPoolId, Observers, Snapshot, Stack, StackLevel};

/// The device id of pinned memory for trackers. In snapshots it is -1.
pub(super) const HOST: DeviceId = DeviceId(u32::MAX);

/// The details that the history stores with the entries of one call, and the first panic of an observer during the
/// call.
#[derive(Default)]
pub(super) struct Details {
    entry: EntryDetails,
    caught: Caught,
}

impl Details {
    /// Takes over a caught panic from a step of this call.
    pub(super) fn take_panic(&self, step: Self) {
        if let Some(panic) = step.caught.0.take() {
            self.caught.keep(panic);
        }
    }

    /// Called after all work is done: resumes the panic of an observer, unless the thread is already unwinding.
    #[inline]
    pub(super) fn finish(self) {
        if let Some(panic) = self.caught.0.take() {
            resume(panic);
        }
    }
}

impl Deref for Details {
    type Target = EntryDetails;

    #[inline]
    fn deref(&self) -> &EntryDetails {
        &self.entry
    }
}

/// The first panic of user code.
#[derive(Default)]
pub(super) struct Caught(Cell<Option<Box<dyn Any + Send>>>);

impl Caught {
    /// Runs `act`; `None` if it panics.
    pub(super) fn run<R>(&self, act: impl FnOnce() -> R) -> Option<R> {
        match catch_unwind(AssertUnwindSafe(act)) {
            Ok(result) => Some(result),
            Err(panic) => {
                self.keep(panic);
                None
            }
        }
    }

    /// Resumes the caught panic.
    pub(super) fn resume(self) -> ! {
        resume_unwind(self.0.take().expect("a panic was caught"))
    }

    /// Keeps it, if it is the first.
    fn keep(&self, panic: Box<dyn Any + Send>) {
        let first = match self.0.take() {
            Some(first) => {
                discard_panic(panic);
                first
            }
            None => panic,
        };
        self.0.set(Some(first));
    }
}

#[cold]
fn resume(panic: Box<dyn Any + Send>) {
    if thread::panicking() {
        discard_panic(panic);
    } else {
        resume_unwind(panic);
    }
}

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

    /// Whether nothing is recorded.
    #[inline]
    pub(super) fn is_off(&self) -> bool {
        self.history_flags.is_off(&self.observers)
    }

    /// The details that the history stores with the next entries, collected before any lock is taken.
    #[inline]
    pub(super) fn details(&self, level: StackLevel, driver: &dyn Driver) -> Details {
        let caught = Caught::default();
        let stack = || caught.run(|| self.observers.stack()).flatten();
        let entry = self.history_flags.entry_details_with(level, &self.observers, driver, stack);
        Details { entry, caught }
    }

    /// Adds an entry and calls the trackers. No lock may be held.
    #[inline]
    pub(super) fn record(&self, action: Action, addr: u64, size: u64, details: &Details) {
        if !details.is_off() {
            self.record_now(action, addr, size, details);
        }
    }

    /// As [`record`](Self::record), for the free of a block.
    #[inline]
    pub(super) fn record_free(&self, action: Action, block: &PinnedBlock, details: &Details) {
        if !details.is_off() {
            self.record_free_now(action, block, details);
        }
    }

    #[cold]
    fn record_free_now(&self, action: Action, block: &PinnedBlock, details: &Details) {
        let stack = lock(&block.usage).stack.clone();
        let entries = self.write(action, block.ptr(), block.requested(), &details.of_free(stack.as_ref()));
        self.notify(&entries, details);
    }

    #[cold]
    fn record_now(&self, action: Action, addr: u64, size: u64, details: &Details) {
        let entries = self.write(action, addr, size, details);
        self.notify(&entries, details);
    }

    /// Adds an entry. Returns the arguments for [`notify`](Self::notify).
    pub(super) fn write(&self, action: Action, addr: u64, size: u64, details: &EntryDetails) -> Vec<HistoryEntry> {
        if details.is_off() {
            return Vec::new();
        }
        let mut recorder = lock(&self.recorder);
        recorder.record(action, addr, size, 0, MemPoolId::DEFAULT, details);
        recorder.take_unreported()
    }

    /// The call stack for entries and segments.
    pub(super) fn stack_of_entry(&self, details: &EntryDetails) -> Option<Stack> {
        if details.stack.is_none() { None } else { lock(&self.recorder).stack_of_entry(details) }
    }

    /// Calls the trackers. No lock may be held.
    pub(super) fn notify(&self, entries: &[HistoryEntry], details: &Details) {
        if !entries.is_empty() {
            details.caught.run(|| self.observers.track(HOST, entries));
        }
    }

    pub(super) fn add_to(&self, snapshot: &mut Snapshot, stacks: &mut StackIds) {
        let history = lock(&self.recorder).history.share();
        snapshot.host_traces = Some(history.entries(snapshot, stacks));
    }
}
