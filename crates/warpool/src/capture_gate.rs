//! Keeps captures from beginning and ending while a typed call or an allocator enqueues work in a stream.
//!
//! A typed call reads the capture status of its stream, and then calls the driver. If a capture began in between, the
//! work would be part of a graph that does not keep its memory; if one ended, the work would run without a record of
//! its use. So a typed call is inside the gate during both steps ([`FrozenCaptures`]), and a thread that begins or ends
//! a capture closes the gate around the driver call ([`CaptureChange`]).
//!
//! Allocators do the same with events and waits ([`FrozenForCall`]): an event that is recorded in a capture belongs to
//! it, and a wait for work outside of a capture invalidates it. But they hold their own locks, which the closure of a
//! typed call (`with_address`) may need. If an allocator waited for a capture that waits for that closure, they would
//! deadlock. So an allocator waits only during the driver call that begins or ends a capture, by a second lock:
//! allocator calls share it among themselves, and so do changes.
//!
//! Entering and leaving an open gate is one atomic operation each, on one of several counters, so that threads with
//! streams of their own do not share a cache line. Closing it waits until all counters are 0, and typed calls that
//! arrive meanwhile wait until it is open again. A thread that is already inside enters at once, since it would wait
//! for itself otherwise (the closure of `with_address` may make typed calls).
//!
//! A stream can still join a capture meanwhile, by waiting for an event of it: typed calls read the status again after
//! the driver call (`typed/operation.rs`).

use std::cell::Cell;
use std::marker::PhantomData;
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::{Result, lock};

/// How many counters there are. Closing the gate reads them all.
const COUNTERS: usize = 16;

/// After this long, a capture that waits for typed calls logs a warning.
const WARN_AFTER: Duration = Duration::from_secs(5);

thread_local! {
    /// The address of the gate that this thread has entered last and not left; 0 if there is none.
    static INSIDE: Cell<usize> = const { Cell::new(0) };
}

/// Typed calls that are inside, and whether a capture is beginning or ending.
#[derive(Default)]
pub(crate) struct CaptureGate {
    inside: [Counter; COUNTERS],
    /// How many captures are beginning or ending; 0 if it is open.
    changes: AtomicUsize,
    /// For waiting threads of both sides; held only while counters are read.
    waiting: Mutex<()>,
    changed: Condvar,
    calls: Mutex<Calls>,
    calls_changed: Condvar,
}

/// Driver calls of allocators, and driver calls that begin or end a capture. At any time only one of the two kinds is
/// active.
#[derive(Default)]
struct Calls {
    of_allocators: usize,
    changes: usize,
    /// Changes that wait for calls of allocators. No allocator call begins meanwhile.
    changes_waiting: usize,
}

/// On two cache lines of its own, since processors prefetch lines in pairs.
#[derive(Default)]
#[repr(align(128))]
struct Counter(AtomicUsize);

impl CaptureGate {
    /// Enters, unless it is closed. Calls with the same `key` share a counter.
    #[inline]
    pub(crate) fn try_enter(&self, key: u64) -> Option<FrozenCaptures<'_>> {
        let counter = &self.inside[key as usize % COUNTERS].0;
        // Counted before `changes` is read; `close` increments `changes` before it reads this counter. So at least one
        // sees the other.
        counter.fetch_add(1, Ordering::SeqCst);
        if self.is_closed() && !self.is_thread_inside() {
            self.leave(counter);
            return None;
        }
        let outer = INSIDE.replace(self.address());
        Some(FrozenCaptures { gate: self, counter, outer, _not_send: PhantomData })
    }

    /// As [`try_enter`](Self::try_enter), but waits while the gate is closed. `may_wait` is called before waiting.
    pub(crate) fn enter(&self, key: u64, may_wait: impl FnOnce() -> Result<()>) -> Result<FrozenCaptures<'_>> {
        if let Some(entered) = self.try_enter(key) {
            return Ok(entered);
        }
        may_wait()?;
        let mut guard = lock(&self.waiting);
        loop {
            if !self.is_closed() {
                drop(guard);
                if let Some(entered) = self.try_enter(key) {
                    return Ok(entered);
                }
                guard = lock(&self.waiting);
                continue;
            }
            guard = self.changed.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Keeps captures from beginning and ending during a driver call of an allocator, which may hold its own locks.
    /// `may_wait` is called before it waits. A thread must leave before it enters again.
    pub(crate) fn enter_for_call(&self, may_wait: impl FnOnce() -> Result<()>) -> Result<FrozenForCall<'_>> {
        let is_changing = |calls: &mut Calls| calls.changes + calls.changes_waiting > 0;
        let mut calls = lock(&self.calls);
        if is_changing(&mut calls) {
            drop(calls);
            may_wait()?;
            calls = lock(&self.calls);
            calls = self.calls_changed.wait_while(calls, is_changing).unwrap_or_else(PoisonError::into_inner);
        }
        calls.of_allocators += 1;
        Ok(FrozenForCall { gate: self })
    }

    /// Whether the calling thread is inside. (`false` if it has entered the gate of another `Instance` since.)
    pub(crate) fn is_thread_inside(&self) -> bool {
        INSIDE.get() == self.address()
    }

    /// Closes the gate, and waits until all threads inside have left. Several captures may begin and end at once. Must
    /// not be called by a thread that is inside.
    pub(crate) fn close(&self) -> CaptureChange<'_> {
        self.changes.fetch_add(1, Ordering::SeqCst);
        let mut change = CaptureChange { gate: self, excludes_calls: false };
        let (begun, mut warned) = (Instant::now(), false);
        let mut guard = lock(&self.waiting);
        while self.inside.iter().any(|counter| counter.0.load(Ordering::SeqCst) > 0) {
            if crate::defect::Defect::GateForgetsTypedCalls.is_on() {
                break;
            }
            if begun.elapsed() >= WARN_AFTER && !warned {
                warned = true;
                tracing::warn!("a capture cannot begin or end while the closure of a typed call runs");
            }
            guard = self.changed.wait_timeout(guard, WARN_AFTER).unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(guard);
        // Taken after all typed calls have left: a typed call may need an allocator's lock whose holder waits for this
        // change.
        let mut calls = lock(&self.calls);
        calls.changes_waiting += 1;
        let has_calls = |calls: &mut Calls| calls.of_allocators > 0;
        calls = self.calls_changed.wait_while(calls, has_calls).unwrap_or_else(PoisonError::into_inner);
        calls.changes_waiting -= 1;
        calls.changes += 1;
        change.excludes_calls = true;
        change
    }

    #[inline]
    fn is_closed(&self) -> bool {
        self.changes.load(Ordering::SeqCst) > 0
    }

    #[inline]
    fn leave(&self, counter: &AtomicUsize) {
        counter.fetch_sub(1, Ordering::SeqCst);
        if self.is_closed() {
            self.wake();
        }
    }

    #[cold]
    fn wake(&self) {
        // A thread that has read the counters and is about to sleep holds this lock until it sleeps.
        drop(lock(&self.waiting));
        self.changed.notify_all();
    }

    fn address(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }
}

/// No capture of a graph begins or ends until this is dropped.
#[must_use = "captures may begin and end once it is dropped"]
pub(crate) struct FrozenCaptures<'a> {
    gate: &'a CaptureGate,
    counter: &'a AtomicUsize,
    /// The previous value of [`INSIDE`].
    outer: usize,
    _not_send: PhantomData<Rc<()>>,
}

impl Drop for FrozenCaptures<'_> {
    #[inline]
    fn drop(&mut self) {
        INSIDE.set(self.outer);
        self.gate.leave(self.counter);
    }
}

/// No capture of a graph begins or ends until this is dropped. Hold it over driver calls, never over user code.
#[must_use = "captures may begin and end once it is dropped"]
pub(crate) struct FrozenForCall<'a> {
    gate: &'a CaptureGate,
}

impl Drop for FrozenForCall<'_> {
    fn drop(&mut self) {
        let mut calls = lock(&self.gate.calls);
        calls.of_allocators -= 1;
        if calls.of_allocators == 0 && calls.changes_waiting > 0 {
            self.gate.calls_changed.notify_all();
        }
    }
}

/// No typed call and no allocator is between its check and its driver call until this is dropped. Hold it over driver
/// calls that begin or end a capture, never over user code.
#[must_use = "typed calls go on once it is dropped"]
pub(crate) struct CaptureChange<'a> {
    gate: &'a CaptureGate,
    /// `false` while it waits for typed calls.
    excludes_calls: bool,
}

impl Drop for CaptureChange<'_> {
    fn drop(&mut self) {
        if self.excludes_calls {
            let mut calls = lock(&self.gate.calls);
            calls.changes -= 1;
            if calls.changes == 0 {
                self.gate.calls_changed.notify_all();
            }
        }
        if self.gate.changes.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.gate.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    fn wait_until_closed(gate: &CaptureGate) {
        while !gate.is_closed() {
            thread::yield_now();
        }
    }

    #[test]
    fn a_change_waits_for_calls_and_later_calls_wait_for_the_change() {
        let gate = Arc::new(CaptureGate::default());
        let (sender, receiver) = mpsc::channel();
        let outer = gate.try_enter(0).unwrap();
        let change = thread::spawn({
            let (gate, sender) = (Arc::clone(&gate), sender.clone());
            move || {
                let change = gate.close();
                sender.send("changed").unwrap();
                drop(change);
            }
        });
        wait_until_closed(&gate);
        let late = thread::spawn({
            let gate = Arc::clone(&gate);
            move || {
                assert!(gate.try_enter(1).is_none());
                sender.send("refused").unwrap();
                let _entered = gate.enter(1, || Ok(())).unwrap();
                sender.send("entered").unwrap();
            }
        });
        assert_eq!(receiver.recv().unwrap(), "refused");
        // A nested call must not wait: its thread would never leave.
        let nested = gate.enter(1, || panic!("it waits for itself")).unwrap();
        assert!(gate.is_thread_inside());
        drop(nested);
        assert!(gate.is_thread_inside() && receiver.try_recv().is_err());
        drop(outer);
        assert!(!gate.is_thread_inside());
        assert_eq!((receiver.recv().unwrap(), receiver.recv().unwrap()), ("changed", "entered"));
        change.join().unwrap();
        late.join().unwrap();
        assert!(gate.inside.iter().all(|counter| counter.0.load(Ordering::SeqCst) == 0));
    }

    /// An allocator may hold a lock that the closure of a typed call needs: it does not wait for that closure.
    #[test]
    fn a_call_of_an_allocator_waits_for_a_change_but_not_for_the_typed_calls_before_it() {
        let gate = Arc::new(CaptureGate::default());
        let (sender, receiver) = mpsc::channel();
        let typed = gate.try_enter(0).unwrap();
        let change = thread::spawn({
            let (gate, sender) = (Arc::clone(&gate), sender.clone());
            move || {
                let change = gate.close();
                sender.send("changed").unwrap();
                let late = thread::spawn({
                    let gate = Arc::clone(&gate);
                    move || {
                        let waits = || {
                            sender.send("waits").unwrap();
                            Ok(())
                        };
                        drop(gate.enter_for_call(waits).unwrap());
                        sender.send("entered").unwrap();
                    }
                });
                // Dropped once the call waits, or is about to wait.
                thread::sleep(Duration::from_millis(20));
                drop(change);
                late.join().unwrap();
            }
        });
        wait_until_closed(&gate);
        drop(gate.enter_for_call(|| panic!("it waits for a typed call")).unwrap());
        assert!(receiver.try_recv().is_err());
        drop(typed);
        change.join().unwrap();
        let seen: Vec<&str> = receiver.try_iter().collect();
        assert!(seen == ["changed", "waits", "entered"] || seen == ["changed", "entered"], "{seen:?}");
    }

    #[test]
    fn another_gate_is_entered_on_its_own() {
        let gates = [CaptureGate::default(), CaptureGate::default()];
        let _first = gates[0].try_enter(0).unwrap();
        let second = gates[1].try_enter(0).unwrap();
        assert!(gates[1].is_thread_inside());
        drop(second);
        assert!(gates[0].is_thread_inside());
        drop(gates[1].close());
    }

    /// Calls see the same state at their beginning and end.
    #[test]
    fn nothing_changes_while_a_call_is_inside() {
        let gate = CaptureGate::default();
        let (value, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
        thread::scope(|scope| {
            for key in 0..3 {
                let (gate, value, stop) = (&gate, &value, &stop);
                scope.spawn(move || {
                    while !stop.load(Ordering::Relaxed) {
                        let entered = gate.enter(key, || Ok(())).unwrap();
                        let before = value.load(Ordering::Relaxed);
                        for _ in 0..20 {
                            assert_eq!((before % 2, value.load(Ordering::Relaxed)), (0, before));
                        }
                        drop(entered);
                    }
                });
            }
            for _ in 0..2000 {
                let change = gate.close();
                value.fetch_add(1, Ordering::Relaxed);
                thread::yield_now();
                value.fetch_add(1, Ordering::Relaxed);
                drop(change);
            }
            stop.store(true, Ordering::Relaxed);
        });
    }
}
