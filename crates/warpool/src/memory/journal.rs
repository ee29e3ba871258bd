//! How allocators write down what happens: why is gathered before a device's lock is taken, the event is written under
//! it, and trackers are told once it is gone.
//!
//! The rule: nothing here is called back under a lock. Off, and without trackers, all of it is two loads and a branch.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use warpool_driver::Driver;

use super::history::{History, HistoryEntry, compile_context, user_metadata};
use super::observe::ActionSet;
use super::{Action, HistoryOptions, MemPoolId, Observers, Stack, StackLevel};

/// Whether a history is recorded, and with call stacks from which level on: what is asked before the lock is taken.
#[derive(Debug, Default)]
pub(crate) struct Recording {
    on: AtomicBool,
    stack_level: AtomicU32,
}

impl Recording {
    pub(crate) fn set(&self, options: Option<&HistoryOptions>) {
        let level = options.map_or(StackLevel::Never, |options| options.stacks);
        self.stack_level.store(level as u32, Ordering::Relaxed);
        self.on.store(options.is_some(), Ordering::Relaxed);
    }

    /// Gathers what will be written beside events; with the caller's call stack, if that is wanted from `level` on.
    #[inline]
    pub(crate) fn cause(&self, level: StackLevel, observers: &Observers, driver: &dyn Driver) -> Cause {
        let tracked = observers.tracked();
        let recording = self.on.load(Ordering::Relaxed);
        if !recording && tracked.is_empty() {
            return Cause::default();
        }
        let wants_stack = recording && self.stack_level.load(Ordering::Relaxed) >= level as u32;
        let stack = if wants_stack { observers.stack() } else { None };
        // Trackers of segments alone should not cost every call a look at the clock.
        let wants_time = recording || HOT.into_iter().any(|action| tracked.has(action));
        let time_us = wants_time.then(|| now_us(driver));
        Cause { tracked, time_us, stack }
    }
}

/// What every allocation and every free writes.
const HOT: [Action; 3] = [Action::Alloc, Action::FreeRequested, Action::FreeCompleted];

/// What is written beside an event: when, and on whose behalf.
#[derive(Clone, Debug, Default)]
pub(crate) struct Cause {
    /// What trackers want to see.
    tracked: ActionSet,
    /// In microseconds of the driver's clock; `None` if nobody wanted to know so far.
    time_us: Option<i64>,
    pub(crate) stack: Option<Stack>,
}

impl Cause {
    /// Whether nobody wants to know anything.
    #[inline]
    pub(crate) fn is_silent(&self) -> bool {
        self.time_us.is_none() && self.tracked.is_empty()
    }

    /// With the time, if anybody wants to know: for events that not every call writes.
    pub(crate) fn timed(mut self, driver: &dyn Driver) -> Self {
        if self.tracked.is_empty() {
            return self;
        }
        self.time_us.get_or_insert_with(|| now_us(driver));
        self
    }
}

fn now_us(driver: &dyn Driver) -> i64 {
    i64::try_from(driver.now().as_micros()).unwrap_or(i64::MAX)
}

/// What happened on one device: for readers of the history, and for trackers.
#[derive(Debug, Default)]
pub(crate) struct Journal {
    pub(crate) history: History,
    /// What trackers are to be told once the lock is gone.
    outbox: Vec<HistoryEntry>,
}

impl Journal {
    /// Whether anybody wants to know anything.
    #[inline]
    pub(crate) fn is_open(&self, cause: &Cause) -> bool {
        self.history.is_on() || !cause.tracked.is_empty()
    }

    /// Whether there is something to tell.
    #[inline]
    pub(crate) fn has_news(&self) -> bool {
        !self.outbox.is_empty()
    }

    pub(crate) fn take_news(&mut self) -> Vec<HistoryEntry> {
        std::mem::take(&mut self.outbox)
    }

    /// Writes into the history, and down for the trackers.
    pub(crate) fn record(&mut self, action: Action, addr: u64, size: u64, stream: u64, pool: MemPoolId, cause: &Cause) {
        let told = cause.tracked.has(action);
        if !self.history.is_on() && !told {
            return;
        }
        let is_free = matches!(action, Action::FreeRequested | Action::FreeCompleted);
        let level = if is_free { StackLevel::All } else { StackLevel::Alloc };
        let stack = if self.history.stack_level() >= level { cause.stack.clone() } else { None };
        let event = HistoryEntry {
            action,
            addr,
            size,
            stream,
            time_us: cause.time_us.unwrap_or(0).saturating_add(self.history.epoch_us()),
            pool,
            stack,
            user_metadata: user_metadata(),
            compile_context: compile_context(),
        };
        if told {
            self.outbox.push(event.clone());
        }
        self.history.write(event);
    }
}
