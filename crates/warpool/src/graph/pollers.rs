//! Threads that ask about events again and again, as watchdogs of collective communication do, beside threads that
//! capture.
//!
//! In the strictest mode, any thread's question about an event breaks a capture. So a poller holds a guard,
//! [`Instance::polling`], around its questions and asks through it; a capture does not begin while any guard is held, and
//! questions asked through a guard that was taken later know that a capture is under way and ask in the way that breaks
//! nothing.
//!
//! A beginning capture comes first: guards asked for while one waits are given when it has begun, so pollers that take
//! turns cannot keep it waiting for ever. A thread that already holds a guard gets another at once; it would wait for
//! itself otherwise.
//!
//! Without a capture about to begin, taking and dropping a guard is one atomic step each.

use std::cell::RefCell;
use std::fmt;
use std::marker::PhantomData;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::GraphError;
use super::relaxed::relaxed;
use crate::device::InstanceKey;
use crate::{Event, Instance, Result, lock};

/// After so long a beginning capture says that it waits.
const WARN_AFTER: Duration = Duration::from_secs(5);

/// One call of ours that holds captures off, in the count.
const CALL: u64 = 1 << 20;

/// One beginning capture, in the count.
const BEGIN: u64 = 1 << 40;

thread_local! {
    // How many guards this thread holds, per Instance. Mostly empty or one entry.
    static HELD: RefCell<Vec<(InstanceKey, u32)>> = const { RefCell::new(Vec::new()) };
}

/// Who polls, and who waits for that to end.
#[derive(Default)]
pub(crate) struct Pollers {
    /// Guards in the low bits, calls of ours above them, beginning captures on top: one number, so that none can miss
    /// the others.
    count: AtomicU64,
    /// For those who wait; locked for no longer than a look at `count`.
    waiting: Mutex<()>,
    changed: Condvar,
}

const fn guards_in(count: u64) -> u64 {
    count % CALL
}

impl Pollers {
    fn enter(&self, again: bool) {
        let entered = |count: u64| (again || count < BEGIN).then_some(count + 1);
        if self.count.fetch_update(Ordering::AcqRel, Ordering::Acquire, entered).is_ok() {
            return;
        }
        let mut turn = lock(&self.waiting);
        while self.count.fetch_update(Ordering::AcqRel, Ordering::Acquire, entered).is_err() {
            turn = self.changed.wait(turn).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Keeps captures from beginning until the result is dropped. Never waits: `None` if one is about to begin.
    pub(super) fn hold_off(&self) -> Option<HeldOff<'_>> {
        let entered = |count: u64| (count < BEGIN).then_some(count + CALL);
        let held = self.count.fetch_update(Ordering::AcqRel, Ordering::Acquire, entered).is_ok();
        held.then_some(HeldOff { pollers: self })
    }

    fn leave(&self, unit: u64) {
        if self.count.fetch_sub(unit, Ordering::AcqRel) >= BEGIN {
            self.wake();
        }
    }

    fn wake(&self) {
        // Whoever has looked and is about to sleep holds the lock until it sleeps.
        drop(lock(&self.waiting));
        self.changed.notify_all();
    }

    /// Waits until nobody polls, and keeps pollers out until the result is dropped. Calls of ours that hold captures
    /// off are waited for too, but are no matter of patience.
    pub(super) fn keep_out(&self, patience: Option<Duration>) -> Result<KeptOut<'_>> {
        self.count.fetch_add(BEGIN, Ordering::AcqRel);
        let kept_out = KeptOut { pollers: self };
        let begun = Instant::now();
        let mut warned = false;
        let mut turn = lock(&self.waiting);
        loop {
            let count = self.count.load(Ordering::Acquire);
            if count.is_multiple_of(BEGIN) {
                break;
            }
            let (pollers, waited) = (guards_in(count), begun.elapsed());
            let patience = patience.filter(|_| pollers > 0);
            if patience.is_some_and(|patience| waited >= patience) {
                drop(turn);
                return Err(GraphError::PollersBusy { pollers: pollers as usize, waited }.into());
            }
            if waited >= WARN_AFTER && !warned {
                warned = true;
                tracing::warn!(pollers, ?waited, "a capture cannot begin while threads hold polling guards");
            }
            let left = patience.map_or(WARN_AFTER, |patience| patience.saturating_sub(waited).min(WARN_AFTER));
            turn = self.changed.wait_timeout(turn, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(turn);
        Ok(kept_out)
    }
}

/// No guard is given out until this is dropped.
pub(super) struct KeptOut<'a> {
    pollers: &'a Pollers,
}

impl Drop for KeptOut<'_> {
    fn drop(&mut self) {
        self.pollers.count.fetch_sub(BEGIN, Ordering::AcqRel);
        self.pollers.wake();
    }
}

/// No capture begins until this is dropped. For a single call to the driver, and no code of others.
pub(crate) struct HeldOff<'a> {
    pollers: &'a Pollers,
}

impl Drop for HeldOff<'_> {
    fn drop(&mut self) {
        self.pollers.leave(CALL);
    }
}

/// The right to ask about events while others capture. No capture begins while it is held, so hold it for a round of
/// questions, not for ever. Dropping it makes no driver call.
///
/// It stays on its thread:
/// ```compile_fail,E0277
/// # fn on_another_thread(instance: &warpool::Instance) {
/// let polling = instance.polling();
/// std::thread::spawn(move || drop(polling));
/// # }
/// ```
pub struct Polling {
    instance: Instance,
    _not_send: PhantomData<Rc<()>>,
}

impl Instance {
    /// Announces questions about events. Waits while a capture is about to begin, unless this thread holds a guard
    /// already.
    #[must_use = "dropping the guard ends the polling"]
    pub fn polling(&self) -> Polling {
        let again = held_by_thread(self) > 0;
        self.captures().pollers.enter(again);
        change_held(self, |held| held + 1);
        Polling { instance: self.clone(), _not_send: PhantomData }
    }
}

impl Polling {
    /// Whether what `event` marks is done. As [`Event::query`], but breaks no capture, unless the event itself was
    /// recorded in one.
    pub fn query(&self, event: &Event) -> Result<bool> {
        self.ask(|| event.query())
    }

    /// Runs `act`, which asks the driver in ways of its own, so that it breaks no capture that is under way.
    pub fn ask<R>(&self, act: impl FnOnce() -> Result<R>) -> Result<R> {
        // None now means none until the guard is dropped: whoever begins one says so first and then waits for us.
        if self.instance.captures().none() { act() } else { relaxed(&**self.instance.driver(), act) }
    }
}

impl Drop for Polling {
    fn drop(&mut self) {
        change_held(&self.instance, |held| held.saturating_sub(1));
        self.instance.captures().pollers.leave(1);
    }
}

impl fmt::Debug for Polling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Polling").field("gpu", &self.instance).finish()
    }
}

/// How many guards of `instance` the calling thread holds. A thread that is past having notes counts as holding none.
pub(super) fn held_by_thread(instance: &Instance) -> u32 {
    let find = |held: &RefCell<Vec<(InstanceKey, u32)>>| {
        held.borrow().iter().find(|(key, _)| *key == instance.key()).map(|e| e.1)
    };
    HELD.try_with(find).ok().flatten().unwrap_or(0)
}

fn change_held(instance: &Instance, change: impl Fn(u32) -> u32) {
    let _ = HELD.try_with(|held| {
        let mut held = held.borrow_mut();
        match held.iter_mut().find(|(key, _)| *key == instance.key()) {
            Some((_, count)) => *count = change(*count),
            None => held.push((instance.key(), change(0))),
        }
        held.retain(|&(_, count)| count > 0);
    });
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    /// Waits until a begin waits.
    fn until_a_begin_waits(pollers: &Pollers) {
        while pollers.count.load(Ordering::Acquire) < BEGIN {
            thread::yield_now();
        }
    }

    #[test]
    fn a_begin_waits_for_guards_and_new_guards_wait_for_the_begin() {
        let pollers = Arc::new(Pollers::default());
        let (say, heard) = mpsc::channel();
        pollers.enter(false);
        let begin = thread::spawn({
            let (pollers, say) = (Arc::clone(&pollers), say.clone());
            move || {
                let kept_out = pollers.keep_out(None).unwrap();
                say.send("begun").unwrap();
                drop(kept_out);
            }
        });
        until_a_begin_waits(&pollers);
        let late = thread::spawn({
            let pollers = Arc::clone(&pollers);
            move || {
                pollers.enter(false);
                say.send("polled").unwrap();
                pollers.leave(1);
            }
        });
        // A guard on top of one that is held must not wait: its thread would never drop the first.
        pollers.enter(true);
        assert!(heard.try_recv().is_err(), "nobody may go on while the first guard is held");
        pollers.leave(1);
        pollers.leave(1);
        assert_eq!((heard.recv().unwrap(), heard.recv().unwrap()), ("begun", "polled"));
        begin.join().unwrap();
        late.join().unwrap();
        assert_eq!(pollers.count.load(Ordering::Acquire), 0);
    }

    #[test]
    fn a_begin_that_gives_up_lets_pollers_in_again() {
        let pollers = Pollers::default();
        pollers.enter(false);
        let refused = pollers.keep_out(Some(Duration::ZERO)).map(drop).unwrap_err();
        assert!(matches!(refused, crate::Error::Graph(GraphError::PollersBusy { pollers: 1, .. })), "{refused}");
        pollers.enter(false);
        pollers.leave(1);
        pollers.leave(1);
        drop(pollers.keep_out(Some(Duration::ZERO)).unwrap());
        assert_eq!(pollers.count.load(Ordering::Acquire), 0);
    }
}
