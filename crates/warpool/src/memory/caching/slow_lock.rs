//! The lock of the slow path: a mutex without poisoning that can tell whether the calling thread holds it.
//!
//! No user code runs while it is held, except a user's driver. A panic under it releases it; guards in `source/` put
//! back what was in transit.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, TryLockError};

use crate::lock;

thread_local! {
    /// Its address identifies the thread. It has no destructor, so it is valid while destructors of other thread-locals
    /// drop blocks.
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
    /// Locks it, even after a panic of another holder.
    ///
    /// # Panics
    /// If the calling thread already holds it.
    pub(super) fn lock(&self) -> SlowLockGuard<'_> {
        assert!(!self.is_held_by_this_thread(), "the slow path must not be entered twice by one thread");
        let (guard, waited) = match self.mutex.try_lock() {
            Ok(guard) => (guard, false),
            Err(TryLockError::Poisoned(poisoned)) => (poisoned.into_inner(), false),
            Err(TryLockError::WouldBlock) => (lock(&self.mutex), true),
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
    /// Whether another thread held it before, so that the state may have changed.
    pub(super) fn waited(&self) -> bool {
        self.waited
    }
}

impl Drop for SlowLockGuard<'_> {
    fn drop(&mut self) {
        self.lock.holder.store(0, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    /// A poisoned mutex must not be locked a second time while the error of `try_lock` still holds its guard.
    #[test]
    fn after_a_panic_of_its_holder_it_can_be_locked() {
        let (sender, receiver) = mpsc::channel();
        std::thread::spawn(move || {
            let lock = SlowLock::default();
            let panicked = catch_unwind(AssertUnwindSafe(|| {
                let _held = lock.lock();
                panic!("under the lock");
            }));
            assert!(panicked.is_err() && !lock.is_held_by_this_thread());
            drop(lock.lock());
            assert!(!lock.lock().waited());
            sender.send(()).unwrap();
        });
        receiver.recv_timeout(Duration::from_secs(60)).expect("it should not wait for itself");
    }
}
