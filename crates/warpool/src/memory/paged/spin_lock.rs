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

/// Whether a thread is inside. The lock itself, without what it protects.
#[derive(Debug, Default)]
pub(super) struct Spin {
    held: AtomicBool,
}

/// A value under a spin lock. Not poisoned by panics: every holder changes the value in one step that cannot panic, or
/// leaves it valid at each point where it can.
#[derive(Debug, Default)]
// Processors fetch two lines at once: nothing of another lock is in either.
#[repr(align(128))]
pub(in crate::memory) struct SpinLock<T> {
    spin: Spin,
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

impl Spin {
    #[inline]
    pub(super) fn lock(&self) {
        if self.held.swap(true, Ordering::Acquire) {
            self.wait();
        }
    }

    /// The same, if no thread holds it. Returns whether it did.
    fn try_lock(&self) -> bool {
        !self.held.load(Ordering::Relaxed) && !self.held.swap(true, Ordering::Acquire)
    }

    /// Storing `false` here, with release ordering, releases the lock.
    #[inline]
    pub(super) fn held(&self) -> &AtomicBool {
        &self.held
    }

    #[cold]
    fn wait(&self) {
        wait_until(|| self.try_lock());
    }
}

/// Spins, then yields, then sleeps, until `done` returns `true`. It looks less and less often: as long as a thread
/// looks at a lock, the one that holds it has to fetch its memory again for every step.
pub(super) fn wait_until(mut done: impl FnMut() -> bool) {
    const SPINS: u32 = 12;
    const YIELDS: u32 = 50;
    /// A pause is about 50 ns. In models of threads each is a step.
    const PAUSES_MAX: u32 = if cfg!(test) { 1 } else { 64 };
    let (mut attempt, mut pauses) = (0, 1);
    while !done() {
        attempt += 1;
        if attempt < SPINS {
            (0..pauses).for_each(|_| spin_loop());
            pauses = PAUSES_MAX.min(pauses * 2);
        } else if attempt < SPINS + YIELDS {
            yield_now();
        } else {
            std::thread::sleep(Duration::from_micros(50));
        }
    }
}

impl<T> SpinLock<T> {
    pub(in crate::memory) fn new(value: T) -> Self {
        Self { spin: Spin::default(), value: UnsafeCell::new(value) }
    }

    #[inline]
    pub(in crate::memory) fn lock(&self) -> SpinGuard<'_, T> {
        self.spin.lock();
        SpinGuard { lock: self, stays: PhantomData }
    }

    /// The same, if no thread holds it.
    pub(in crate::memory) fn try_lock(&self) -> Option<SpinGuard<'_, T>> {
        self.spin.try_lock().then(|| SpinGuard { lock: self, stays: PhantomData })
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
        self.lock.spin.held.store(false, Ordering::Release);
    }
}
