//! A lock for steps of some ten nanoseconds: taking it is one atomic exchange, releasing it one store, where a mutex
//! needs two exchanges. Nothing is called under it that could wait. Only the copy of the history for a snapshot takes
//! long; threads that record entries meanwhile sleep.
//!
//! A thread that finds it held spins for about a microsecond and then sleeps. A thread that looks at a lock takes the
//! memory from the one that holds it, so each one that waits awake makes every step slower: with 16 threads that spun
//! and yielded for longer, a step took ten times as long as one after the other. Sleeping threads also leave the
//! processor to a holder that is not running. They are not woken: that would be an exchange in every release, and a
//! system call in those with waiters.

#![expect(unsafe_code, reason = "the lock gives access to what it protects")]

use std::cell::UnsafeCell;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

use super::primitives::{AtomicBool, Ordering, sleep_us, spin_loop};

/// A value under a spin lock. Not poisoned by panics: every holder changes the value in one step that cannot panic, or
/// leaves it valid at each point where it can.
#[derive(Debug, Default)]
// Processors fetch two lines at once: nothing of another lock is in either.
#[repr(align(128))]
pub(crate) struct SpinLock<T> {
    held: AtomicBool,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached only through a guard, and only one guard exists at a time.
unsafe impl<T: Send> Sync for SpinLock<T> {}

/// Access to the value, until it is dropped.
#[must_use = "dropping it releases the lock"]
pub(crate) struct SpinGuard<'a, T> {
    lock: &'a SpinLock<T>,
    /// Neither sent to another thread nor shared with one.
    stays: PhantomData<*mut T>,
}

impl<T> SpinLock<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { held: AtomicBool::new(false), value: UnsafeCell::new(value) }
    }

    #[inline]
    pub(crate) fn lock(&self) -> SpinGuard<'_, T> {
        if self.held.swap(true, Ordering::Acquire) {
            self.wait();
        }
        SpinGuard { lock: self, stays: PhantomData }
    }

    /// The same, if no thread holds it.
    pub(crate) fn try_lock(&self) -> Option<SpinGuard<'_, T>> {
        self.try_take().then(|| SpinGuard { lock: self, stays: PhantomData })
    }

    #[inline]
    fn try_take(&self) -> bool {
        if crate::defect::Defect::LockWithoutExchange.is_on() && !self.held.load(Ordering::Acquire) {
            self.held.store(true, Ordering::Relaxed);
            return true;
        }
        !self.held.load(Ordering::Relaxed) && !self.held.swap(true, Ordering::Acquire)
    }

    /// Takes it once it is not held. It looks less and less often.
    #[cold]
    #[inline(never)]
    fn wait(&self) {
        /// A pause is 20 to 50 ns. In models of threads each is a step.
        const PAUSES_MAX: u32 = if cfg!(test) { 2 } else { 16 };
        /// The system adds about 50 us to each sleep.
        const SLEEP_US: u64 = 20;
        const SLEEP_US_MAX: u64 = 320;
        let mut pauses = 1;
        while pauses <= PAUSES_MAX {
            if self.try_take() {
                return;
            }
            (0..pauses).for_each(|_| spin_loop());
            pauses *= 2;
        }
        let mut us = SLEEP_US;
        while !self.try_take() {
            sleep_us(us);
            us = SLEEP_US_MAX.min(us * 2);
        }
    }
}

impl<T> Deref for SpinGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: the guard exists, so this thread holds the lock.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> DerefMut for SpinGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: the guard exists, so this thread holds the lock, and the borrow of the guard is exclusive.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T> Drop for SpinGuard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        self.lock.held.store(false, Ordering::Release);
    }
}
