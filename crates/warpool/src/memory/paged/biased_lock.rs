//! A spin lock for what one thread uses almost alone: the thread that it is *biased* to takes it by a store and two
//! loads. An atomic exchange, by which any other lock is taken, costs as much as all the rest of a cached allocation.
//!
//! A thread that takes the lock some hundred times in a row gets the bias. From then on it notes that it is inside, and
//! then looks whether the bias is still its own. A thread that wants the lock takes the bias away, and waits until the
//! other is not inside. Processors may perform a load before the store in front of it is visible to others, and a fence
//! between the two would cost as much as the exchange. So the thread that takes the bias away pays for both:
//! [`process_barrier`] makes every thread of the process pass a fence. Of a thread that is taking the lock by its bias
//! meanwhile, either the store is before that fence, and then it is seen inside; or the second load is behind it, and
//! then that thread sees that its bias is gone.
//!
//! The barrier is a system call of some microseconds. Each one doubles how often a thread has to take the lock in a row
//! before it gets the bias, so where threads take turns it is a spin lock like any other. The bias of a thread that has
//! ended is taken away without all this.

#![expect(unsafe_code, reason = "the lock gives access to what it protects")]

use std::cell::UnsafeCell;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::compiler_fence;

use super::spin_lock::{Spin, wait_until};
use super::sync::{
    AtomicBool, AtomicU64, Ordering, has_ended, known_thread_number, process_barrier, process_has_barrier,
    thread_number,
};

/// How many running threads can have the bias of one lock, in turns. Each has a place of its own for noting that it is
/// inside: one that lost the bias a moment ago may still write there, until it ends.
const PLACES: usize = 4;

/// How often in a row a thread takes the lock before it gets the bias: at first, and at most. Few in tests, so that
/// threads of every test get and lose it.
const STREAK_MIN: u32 = if cfg!(test) { 2 } else { 256 };
const STREAK_MAX: u32 = if cfg!(test) { 16 } else { 1 << 16 };

/// No thread has the bias. No thread has this number, whichever the place.
const NOBODY: u64 = u64::MAX;

/// A value under a biased lock. As with a [`SpinLock`](super::spin_lock::SpinLock), panics do not poison it.
#[derive(Debug)]
// Processors fetch two lines at once: nothing of another lock is in either.
#[repr(align(128))]
pub(in crate::memory) struct BiasedLock<T> {
    /// The number of the thread with the bias, times [`PLACES`], and its place. Changed under `spin`.
    bias: AtomicU64,
    /// Whether the thread of each place is inside, by its bias. Written by that thread alone.
    inside: [AtomicBool; PLACES],
    /// Held by a thread that is inside without the bias.
    spin: Spin,
    /// Under `spin`.
    streak: UnsafeCell<Streak>,
    value: UnsafeCell<T>,
}

/// Which thread takes the lock, and how often in a row.
#[derive(Debug)]
struct Streak {
    thread: u64,
    count: u32,
    /// What it takes to get the bias.
    needed: u32,
    /// The threads of the places, 0 for none.
    places: [u64; PLACES],
}

// SAFETY: the value is reached only through a guard, and only one guard exists at a time: a thread has one because it
// holds `spin`, and took the bias away if another had it; or because it is inside by the bias, which is taken away only
// by a holder of `spin` who then waits until it is not. The streak is reached under `spin`.
unsafe impl<T: Send> Sync for BiasedLock<T> {}

/// Access to the value, until it is dropped.
#[must_use = "dropping it releases the lock"]
pub(in crate::memory) struct BiasedGuard<'a, T> {
    lock: &'a BiasedLock<T>,
    /// What says that this thread is inside.
    held: &'a AtomicBool,
    /// Neither sent to another thread nor shared with one.
    stays: PhantomData<*mut T>,
}

impl<T: Default> Default for BiasedLock<T> {
    fn default() -> Self {
        Self::new(T::default())
    }
}

impl<T> BiasedLock<T> {
    pub(in crate::memory) fn new(value: T) -> Self {
        let streak = Streak { thread: 0, count: 0, needed: STREAK_MIN, places: [0; PLACES] };
        Self {
            bias: AtomicU64::new(NOBODY),
            inside: std::array::from_fn(|_| AtomicBool::new(false)),
            spin: Spin::default(),
            streak: UnsafeCell::new(streak),
            value: UnsafeCell::new(value),
        }
    }

    #[inline]
    pub(in crate::memory) fn lock(&self) -> BiasedGuard<'_, T> {
        match self.lock_by_bias() {
            Some(guard) => guard,
            None => self.lock_without_bias(),
        }
    }

    /// The same, if the calling thread has the bias.
    #[inline(always)]
    pub(in crate::memory) fn lock_by_bias(&self) -> Option<BiasedGuard<'_, T>> {
        let bias = self.bias.load(Ordering::Relaxed);
        if bias / PLACES as u64 == known_thread_number() {
            let held = &self.inside[bias as usize % PLACES];
            if held.load(Ordering::Relaxed) {
                // Inside already: it waits for itself, as with any lock, instead of having two guards.
                return None;
            }
            held.store(true, Ordering::Relaxed);
            // The processor's fence is in `process_barrier`.
            compiler_fence(Ordering::SeqCst);
            if self.bias.load(Ordering::Relaxed) == bias {
                // What the thread sees was written by itself, or before it got the bias.
                return Some(BiasedGuard { lock: self, held, stays: PhantomData });
            }
            held.store(false, Ordering::Release);
        }
        None
    }

    #[inline(never)]
    fn lock_without_bias(&self) -> BiasedGuard<'_, T> {
        // The first time it may wait for others of the process, so not under `spin`.
        let thread = thread_number();
        self.spin.lock();
        let bias = self.bias.load(Ordering::Relaxed);
        // SAFETY: this thread holds `spin`.
        let streak = unsafe { &mut *self.streak.get() };
        if bias != NOBODY {
            self.bias.store(NOBODY, Ordering::Relaxed);
            streak.count = 0;
            if !has_ended(bias / PLACES as u64) {
                process_barrier();
                // Acquires what that thread released when it was inside last.
                wait_until(|| !self.inside[bias as usize % PLACES].load(Ordering::Acquire));
                streak.needed = (streak.needed * 2).min(STREAK_MAX);
            }
        }
        if let Some(bias) = streak.prolong(thread) {
            self.bias.store(bias, Ordering::Relaxed);
        }
        BiasedGuard { lock: self, held: self.spin.held(), stays: PhantomData }
    }
}

impl Streak {
    /// A thread takes the lock without the bias. Returns its bias, if it gets it.
    #[inline]
    fn prolong(&mut self, thread: u64) -> Option<u64> {
        self.count = if self.thread == thread { self.count + 1 } else { 1 };
        self.thread = thread;
        if self.count >= self.needed { self.end() } else { None }
    }

    #[cold]
    fn end(&mut self) -> Option<u64> {
        self.count = 0;
        let own_or_unused = self.places.iter().position(|&thread| thread == 0 || thread == self.thread);
        let place = own_or_unused.or_else(|| self.places.iter().position(|&thread| has_ended(thread)))?;
        if !process_has_barrier() {
            return None;
        }
        self.places[place] = self.thread;
        Some(self.thread * PLACES as u64 + place as u64)
    }
}

impl<T> Deref for BiasedGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: the guard exists, so this thread holds the lock.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> DerefMut for BiasedGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: the guard exists, so this thread holds the lock, and the borrow of the guard is exclusive.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T> Drop for BiasedGuard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        self.held.store(false, Ordering::Release);
    }
}
