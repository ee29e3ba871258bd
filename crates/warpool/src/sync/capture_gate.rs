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
use std::sync::PoisonError;
use std::time::Duration;

use warpool_driver::platform::Instant;

use super::primitives::{AtomicUsize, Condvar, Mutex, Ordering, lock, thread_local};
use crate::Result;

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
        let outer = INSIDE.with(|inside| inside.replace(self.address()));
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
        INSIDE.with(Cell::get) == self.address()
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
        let has_calls =
            |calls: &mut Calls| calls.of_allocators > 0 && !crate::defect::Defect::GateForgetsAllocators.is_on();
        calls = self.calls_changed.wait_while(calls, has_calls).unwrap_or_else(PoisonError::into_inner);
        calls.changes_waiting -= 1;
        calls.changes += 1;
        change.excludes_calls = true;
        change
    }

    #[inline]
    pub(super) fn is_closed(&self) -> bool {
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
        INSIDE.with(|inside| inside.set(self.outer));
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
