//! A lock for steps of some ten nanoseconds: taking it is one atomic exchange, releasing it one store, where a mutex
//! needs two exchanges. Nothing is called under it that could wait. Only the copy of the history for a snapshot takes
//! long; threads that record entries meanwhile sleep.
//!
//! A thread that finds it held spins, then yields, then sleeps for moments, so that a holder whose thread is not
//! running gets the processor.

#![expect(unsafe_code, reason = "the lock gives access to what it protects")]

use std::cell::UnsafeCell;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::time::Duration;

use super::sync::{AtomicBool, Ordering, spin_loop, yield_now};

/// A value under a spin lock. Not poisoned by panics: every holder changes the value in one step that cannot panic, or
/// leaves it valid at each point where it can.
#[derive(Debug, Default)]
// Processors fetch two lines at once: nothing of another lock is in either.
#[repr(align(128))]
pub(in crate::memory) struct SpinLock<T> {
    held: AtomicBool,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached only through a guard, and only one guard exists at a time.
unsafe impl<T: Send> Sync for SpinLock<T> {}

/// Access to the value, until it is dropped.
#[must_use = "dropping it releases the lock"]
pub(in crate::memory) struct SpinGuard<'a, T> {
    lock: &'a SpinLock<T>,
    /// Neither sent to another thread nor shared with one.
    stays: PhantomData<*mut T>,
}

impl<T> SpinLock<T> {
    pub(in crate::memory) fn new(value: T) -> Self {
        Self { held: AtomicBool::new(false), value: UnsafeCell::new(value) }
    }

    #[inline]
    pub(in crate::memory) fn lock(&self) -> SpinGuard<'_, T> {
        if self.held.swap(true, Ordering::Acquire) {
            self.wait();
        }
        SpinGuard { lock: self, stays: PhantomData }
    }

    /// The same, if no thread holds it.
    pub(in crate::memory) fn try_lock(&self) -> Option<SpinGuard<'_, T>> {
        let free = !self.held.load(Ordering::Relaxed) && !self.held.swap(true, Ordering::Acquire);
        free.then(|| SpinGuard { lock: self, stays: PhantomData })
    }

    #[cold]
    fn wait(&self) {
        const SPINS: u32 = 200;
        const YIELDS: u32 = 50;
        let mut attempt = 0;
        loop {
            if !self.held.load(Ordering::Relaxed) && !self.held.swap(true, Ordering::Acquire) {
                return;
            }
            attempt += 1;
            if attempt < SPINS {
                spin_loop();
            } else if attempt < SPINS + YIELDS {
                yield_now();
            } else {
                std::thread::sleep(Duration::from_micros(50));
            }
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
