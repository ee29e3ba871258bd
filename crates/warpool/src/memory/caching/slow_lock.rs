//! A mutex that can tell whether the calling thread holds it.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};

use crate::lock;

thread_local! {
    /// Its address identifies the thread. It has no destructor, so it exists also while those of other thread-locals
    /// run and drop blocks.
    static THREAD: u8 = const { 0 };
}

fn this_thread() -> usize {
    THREAD.with(|thread| std::ptr::from_ref(thread).addr())
}

#[derive(Default)]
pub(super) struct SlowLock {
    mutex: Mutex<()>,
    holder: AtomicUsize,
}

/// The lock, held.
#[must_use = "dropping it releases the lock"]
pub(super) struct SlowLockGuard<'a> {
    lock: &'a SlowLock,
    _guard: MutexGuard<'a, ()>,
    waited: bool,
}

impl SlowLock {
    /// Locks it.
    ///
    /// # Panics
    /// If the calling thread holds it already.
    pub(super) fn lock(&self) -> SlowLockGuard<'_> {
        assert!(!self.is_held_by_this_thread(), "an upstream must not call the allocator that it serves");
        let (guard, waited) = match self.mutex.try_lock() {
            Ok(guard) => (guard, false),
            Err(_) => (lock(&self.mutex), true),
        };
        self.holder.store(this_thread(), Ordering::Relaxed);
        SlowLockGuard { lock: self, _guard: guard, waited }
    }

    /// Only the thread itself ever stores its own identity, so the result is exact.
    pub(super) fn is_held_by_this_thread(&self) -> bool {
        self.holder.load(Ordering::Relaxed) == this_thread()
    }
}

impl SlowLockGuard<'_> {
    /// Whether another thread held it, so that much may have changed.
    pub(super) fn waited(&self) -> bool {
        self.waited
    }
}

impl Drop for SlowLockGuard<'_> {
    fn drop(&mut self) {
        self.lock.holder.store(0, Ordering::Relaxed);
    }
}
