//! Keeps event queries from coinciding with the beginning of captures. Queries come from threads that poll events in a
//! loop (such as watchdogs of collective communication), and from single driver calls of Warpool itself.
//!
//! In global mode a query of an event by any thread invalidates a capture. So a poller holds a guard
//! ([`Polling`](super::Polling)) around its queries, and a capture does not begin while any guard is held.
//!
//! A capture that waits to begin has priority: guards requested meanwhile are granted once it has begun, so pollers
//! that alternate cannot delay it forever. A thread that already holds a guard gets another at once, since it would
//! wait for itself otherwise.
//!
//! While no capture is about to begin, taking and dropping a guard is one atomic operation each.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use warpool_driver::platform::Instant;

use crate::error::GraphError;
use crate::{Result, lock};

/// After this long, a capture that waits to begin logs a warning.
const WARN_AFTER: Duration = Duration::from_secs(5);

/// One driver call of Warpool that holds captures off, in [`Pollers::count`].
const CALL: u64 = 1 << 20;

/// One capture that waits to begin, in [`Pollers::count`].
const BEGIN: u64 = 1 << 40;

/// Counts of polling guards, calls and beginning captures, and the queue of waiting threads.
#[derive(Default)]
pub(crate) struct Pollers {
    /// Guards in the low bits, calls above them, beginning captures on top: one number, so that a guard and a begin
    /// always see each other.
    count: AtomicU64,
    /// For waiting threads; held only while `count` is read.
    waiting: Mutex<()>,
    changed: Condvar,
}

const fn guards_in(count: u64) -> u64 {
    count % CALL
}

impl Pollers {
    /// Counts a guard; waits while a capture is about to begin, unless the thread holds a guard already (`nested`).
    pub(super) fn enter(&self, nested: bool) {
        let entered = |count: u64| (nested || count < BEGIN).then_some(count + 1);
        if self.count.fetch_update(Ordering::AcqRel, Ordering::Acquire, entered).is_ok() {
            return;
        }
        let mut guard = lock(&self.waiting);
        while self.count.fetch_update(Ordering::AcqRel, Ordering::Acquire, entered).is_err() {
            guard = self.changed.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Uncounts a guard.
    pub(super) fn leave(&self) {
        self.subtract(1);
    }

    /// Keeps captures from beginning until the result is dropped. Never waits: `None` if one is about to begin.
    pub(super) fn hold_off(&self) -> Option<HoldOff<'_>> {
        let entered = |count: u64| (count < BEGIN).then_some(count + CALL);
        let held = self.count.fetch_update(Ordering::AcqRel, Ordering::Acquire, entered).is_ok();
        // Created only if it was counted, since dropping it decrements the count.
        held.then(|| HoldOff { pollers: self })
    }

    fn subtract(&self, unit: u64) {
        if self.count.fetch_sub(unit, Ordering::AcqRel) >= BEGIN {
            self.wake();
        }
    }

    fn wake(&self) {
        // A thread that has read the count and is about to sleep holds this lock until it sleeps.
        drop(lock(&self.waiting));
        self.changed.notify_all();
    }

    /// Waits until no guard is held, and grants none until the result is dropped. Also waits for calls that hold
    /// captures off, but these do not count against `timeout`: they are short.
    pub(crate) fn exclude(&self, timeout: Option<Duration>) -> Result<PollersExcluded<'_>> {
        self.count.fetch_add(BEGIN, Ordering::AcqRel);
        let excluded = PollersExcluded { pollers: self };
        let begun = Instant::now();
        let mut warned = false;
        let mut guard = lock(&self.waiting);
        loop {
            let count = self.count.load(Ordering::Acquire);
            if count.is_multiple_of(BEGIN) {
                break;
            }
            let (pollers, waited) = (guards_in(count), begun.elapsed());
            let timeout = timeout.filter(|_| pollers > 0);
            if timeout.is_some_and(|timeout| waited >= timeout) {
                drop(guard);
                return Err(GraphError::PollersBusy { pollers: pollers as usize, waited }.into());
            }
            if waited >= WARN_AFTER && !warned {
                warned = true;
                tracing::warn!(pollers, ?waited, "a capture cannot begin while threads hold polling guards");
            }
            let left = timeout.map_or(WARN_AFTER, |timeout| timeout.saturating_sub(waited).min(WARN_AFTER));
            guard = self.changed.wait_timeout(guard, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(guard);
        Ok(excluded)
    }
}

/// No polling guard is granted until this is dropped.
pub(crate) struct PollersExcluded<'a> {
    pollers: &'a Pollers,
}

impl Drop for PollersExcluded<'_> {
    fn drop(&mut self) {
        self.pollers.count.fetch_sub(BEGIN, Ordering::AcqRel);
        self.pollers.wake();
    }
}

/// No capture begins until this is dropped. Hold it over a single driver call, never over user code.
pub(crate) struct HoldOff<'a> {
    pollers: &'a Pollers,
}

impl Drop for HoldOff<'_> {
    fn drop(&mut self) {
        self.pollers.subtract(CALL);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    fn wait_until_a_begin_waits(pollers: &Pollers) {
        while pollers.count.load(Ordering::Acquire) < BEGIN {
            thread::yield_now();
        }
    }

    #[test]
    fn a_begin_waits_for_guards_and_new_guards_wait_for_the_begin() {
        let pollers = Arc::new(Pollers::default());
        let (sender, receiver) = mpsc::channel();
        pollers.enter(false);
        let begin = thread::spawn({
            let (pollers, sender) = (Arc::clone(&pollers), sender.clone());
            move || {
                let excluded = pollers.exclude(None).unwrap();
                sender.send("begun").unwrap();
                drop(excluded);
            }
        });
        wait_until_a_begin_waits(&pollers);
        let late = thread::spawn({
            let pollers = Arc::clone(&pollers);
            move || {
                pollers.enter(false);
                sender.send("polled").unwrap();
                pollers.leave();
            }
        });
        // A nested guard must not wait: its thread would never drop the first.
        pollers.enter(true);
        assert!(receiver.try_recv().is_err(), "neither thread may go on while the first guard is held");
        pollers.leave();
        pollers.leave();
        assert_eq!((receiver.recv().unwrap(), receiver.recv().unwrap()), ("begun", "polled"));
        begin.join().unwrap();
        late.join().unwrap();
        assert_eq!(pollers.count.load(Ordering::Acquire), 0);
    }

    /// Found by `warpool soak`: each refused call was uncounted without having been counted, and the next capture
    /// waited forever.
    #[test]
    fn a_call_that_is_refused_is_not_counted() {
        let pollers = Pollers::default();
        let excluded = pollers.exclude(None).unwrap();
        assert!(pollers.hold_off().is_none(), "a capture is about to begin");
        drop(excluded);
        assert_eq!(pollers.count.load(Ordering::Acquire), 0);
        drop(pollers.hold_off().expect("no capture is about to begin"));
        drop(pollers.exclude(Some(Duration::ZERO)).unwrap());
    }

    #[test]
    fn a_begin_that_times_out_grants_guards_again() {
        let pollers = Pollers::default();
        pollers.enter(false);
        let error = pollers.exclude(Some(Duration::ZERO)).map(drop).unwrap_err();
        assert!(matches!(error, crate::Error::Graph(GraphError::PollersBusy { pollers: 1, .. })), "{error}");
        pollers.enter(false);
        pollers.leave();
        pollers.leave();
        drop(pollers.exclude(Some(Duration::ZERO)).unwrap());
        assert_eq!(pollers.count.load(Ordering::Acquire), 0);
    }
}
