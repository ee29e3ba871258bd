//! Recording of history entries. Their details are collected before a device's lock is taken; entries are written under
//! the lock; trackers are called after it is released.
//!
//! Nothing here calls user code under a lock. Without a history and trackers it costs two loads and a branch.

use std::borrow::Cow;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use warpool_driver::Driver;

use super::entry::HistoryEntry;
use super::history::History;
use super::observers::ActionSet;
use super::ring::{Extras, StoredEntry};
use super::texts::{EntryTexts, entry_texts, has_entry_texts};
use super::{Action, HistoryOptions, Observers, SharedHistory, Stack, StackLevel};
use crate::memory::MemPoolId;

/// Whether a history is recorded, and from which level on with call stacks. Read before the lock is taken.
#[derive(Debug, Default)]
pub(crate) struct HistoryFlags {
    on: AtomicBool,
    stack_level: AtomicU32,
}

impl HistoryFlags {
    pub(crate) fn set(&self, options: Option<&HistoryOptions>) {
        let level = options.map_or(StackLevel::Never, |options| options.stacks);
        self.stack_level.store(level as u32, Ordering::Relaxed);
        self.on.store(options.is_some(), Ordering::Relaxed);
    }

    /// Whether [`entry_details`](Self::entry_details) collects anything.
    #[inline]
    pub(crate) fn collects_details(&self, observers: &Observers) -> bool {
        self.on.load(Ordering::Relaxed) || !observers.tracked().is_empty()
    }

    /// Whether nothing is recorded.
    #[inline]
    pub(crate) fn is_off(&self, observers: &Observers) -> bool {
        !self.on.load(Ordering::Relaxed) && observers.tracked().is_empty()
    }

    /// Whether a history is recorded whose entries have neither call stacks nor texts of the calling thread, and no
    /// tracker is called.
    #[inline]
    pub(crate) fn is_plain(&self, observers: &Observers) -> bool {
        self.on.load(Ordering::Relaxed)
            && self.stack_level.load(Ordering::Relaxed) == StackLevel::Never as u32
            && observers.tracked().is_empty()
            && !has_entry_texts()
    }

    /// Collects the details for the entries of this call, with the call stack if `level` is recorded with one.
    #[inline]
    pub(crate) fn entry_details(&self, level: StackLevel, observers: &Observers, driver: &dyn Driver) -> EntryDetails {
        self.entry_details_with(level, observers, driver, || observers.stack())
    }

    /// As [`entry_details`](Self::entry_details); `stack` collects the call stack.
    #[inline]
    pub(crate) fn entry_details_with(
        &self,
        level: StackLevel,
        observers: &Observers,
        driver: &dyn Driver,
        stack: impl FnOnce() -> Option<Stack>,
    ) -> EntryDetails {
        let tracked = observers.tracked();
        let recording = self.on.load(Ordering::Relaxed);
        if !recording && tracked.is_empty() {
            return EntryDetails::default();
        }
        let wants_stack = recording && self.stack_level.load(Ordering::Relaxed) >= level as u32;
        let stack = if wants_stack { stack() } else { None };
        // Trackers of segments alone should not make every call read the clock.
        let wants_time = recording || HOT.into_iter().any(|action| tracked.has(action));
        let time_us = wants_time.then(|| now_us(driver));
        EntryDetails { tracked, time_us, stack, texts: entry_texts() }
    }
}

/// The actions of every allocation and every free.
const HOT: [Action; 3] = [Action::Alloc, Action::FreeRequested, Action::FreeCompleted];

/// The details of entries besides the memory: time, call stack and texts.
#[derive(Clone, Debug, Default)]
pub(crate) struct EntryDetails {
    /// The actions that trackers see.
    tracked: ActionSet,
    /// In microseconds of the driver's clock; `None` if it was not needed so far.
    time_us: Option<i64>,
    pub(crate) stack: Option<Stack>,
    texts: EntryTexts,
}

/// The details of calls that are not recorded.
static NOT_RECORDED: EntryDetails =
    EntryDetails { tracked: ActionSet::NONE, time_us: None, stack: None, texts: EntryTexts::NONE };

impl EntryDetails {
    /// The details of a call that is not recorded.
    #[inline]
    pub(crate) fn not_recorded() -> &'static Self {
        &NOT_RECORDED
    }

    /// Whether nothing is recorded.
    #[inline]
    pub(crate) fn is_off(&self) -> bool {
        self.time_us.is_none() && self.tracked.is_empty()
    }

    /// Whether entries have no stack and no text, and no tracker sees them.
    #[inline]
    fn is_plain(&self) -> bool {
        self.tracked.is_empty() && self.stack.is_none() && self.texts.is_empty()
    }

    /// The details for the entry of a free: with the stack that the memory was allocated with, if the call has none of
    /// its own.
    #[inline]
    pub(crate) fn of_free(&self, allocated_with: Option<&Stack>) -> Cow<'_, Self> {
        match allocated_with {
            Some(stack) if self.stack.is_none() && !self.is_off() => Cow::Owned(self.with_stack(stack)),
            _ => Cow::Borrowed(self),
        }
    }

    #[cold]
    fn with_stack(&self, stack: &Stack) -> Self {
        Self { stack: Some(Stack::clone(stack)), ..self.clone() }
    }

    /// Adds the time if there are trackers, for actions that are not part of every call.
    pub(crate) fn timed(mut self, driver: &dyn Driver) -> Self {
        if !self.tracked.is_empty() {
            self.time_us.get_or_insert_with(|| now_us(driver));
        }
        self
    }
}

/// The driver's clock, in microseconds.
#[inline]
pub(crate) fn now_us(driver: &dyn Driver) -> i64 {
    let now = driver.now();
    let seconds = i64::try_from(now.as_secs()).unwrap_or(i64::MAX);
    seconds.saturating_mul(1_000_000).saturating_add(i64::from(now.subsec_micros()))
}

/// The recorded entries of one device: the history, and entries that trackers have not seen yet.
#[derive(Debug, Default)]
pub(crate) struct HistoryRecorder {
    pub(crate) history: History,
    unreported: Vec<HistoryEntry>,
}

impl HistoryRecorder {
    /// Whether entries are recorded.
    #[inline]
    pub(crate) fn is_on(&self, details: &EntryDetails) -> bool {
        self.history.is_on() || !details.tracked.is_empty()
    }

    /// Whether there are entries that trackers have not seen yet.
    #[inline]
    pub(crate) fn has_unreported(&self) -> bool {
        !self.unreported.is_empty()
    }

    /// Takes the entries for [`Observers::track`], which is called without the lock.
    pub(crate) fn take_unreported(&mut self) -> Vec<HistoryEntry> {
        std::mem::take(&mut self.unreported)
    }

    /// Writes an entry into the history, and for trackers.
    #[inline]
    pub(crate) fn record(
        &mut self,
        action: Action,
        addr: u64,
        size: u64,
        stream: u64,
        pool: MemPoolId,
        details: &EntryDetails,
    ) {
        if details.is_plain() {
            self.history.write_plain(action, addr, size, stream, pool, details.time_us.unwrap_or(0));
        } else {
            self.record_all(action, addr, size, stream, pool, details);
        }
    }

    /// Writes the entries of a free that is completed at once.
    #[inline]
    pub(crate) fn record_free(&mut self, addr: u64, size: u64, stream: u64, pool: MemPoolId, details: &EntryDetails) {
        if details.is_plain() {
            self.history.write_plain_free(addr, size, stream, pool, details.time_us.unwrap_or(0));
        } else if details.tracked.is_empty()
            && self.history.keeps(Action::FreeRequested)
            && self.history.keeps(Action::FreeCompleted)
        {
            let time_us = details.time_us.unwrap_or(0).saturating_add(self.history.epoch_us());
            let (extras, action) = (self.extras(details), Action::FreeRequested);
            self.history.write(StoredEntry { addr, size, stream, time_us, pool, extras, action, completes: true });
        } else {
            for action in [Action::FreeRequested, Action::FreeCompleted] {
                self.record_all(action, addr, size, stream, pool, details);
            }
        }
    }

    /// Records an entry with stack and texts, and for trackers.
    #[inline(never)]
    fn record_all(
        &mut self,
        action: Action,
        addr: u64,
        size: u64,
        stream: u64,
        pool: MemPoolId,
        details: &EntryDetails,
    ) {
        let (kept, tracked) = (self.history.keeps(action), details.tracked.has(action));
        if !kept && !tracked {
            return;
        }
        let time_us = details.time_us.unwrap_or(0).saturating_add(self.history.epoch_us());
        let extras = self.extras(details);
        let entry = StoredEntry { addr, size, stream, time_us, pool, extras, action, completes: false };
        if tracked {
            self.unreported.push(entry.to_entry());
        }
        if kept {
            self.history.write(entry);
        }
    }

    /// The history for a snapshot; empty if it is not wanted. Then records, for the next one, that a snapshot was
    /// taken, with the bytes of active blocks.
    pub(crate) fn share(&mut self, traces: bool, active: u64, details: &EntryDetails) -> SharedHistory {
        let shared = if traces { self.history.share() } else { SharedHistory::default() };
        self.record(Action::Snapshot, 0, active, 0, MemPoolId::DEFAULT, details);
        shared
    }

    /// The call stack for entries and segments. At lower levels only blocks have one.
    pub(crate) fn stack_of_entry(&self, details: &EntryDetails) -> Option<Stack> {
        details.stack.clone().filter(|_| self.history.stack_level() >= StackLevel::Alloc)
    }

    fn extras(&self, details: &EntryDetails) -> Option<Box<Extras>> {
        if details.stack.is_none() && details.texts.is_empty() {
            return None;
        }
        let (stack, texts) = (self.stack_of_entry(details), details.texts.clone());
        (stack.is_some() || !texts.is_empty()).then(|| Box::new(Extras { stack, texts }))
    }
}
