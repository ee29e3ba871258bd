//! What locks and the parts without a lock are made of. Their models build them once more, with `shuttle`'s primitives
//! in place of these (`tests/models`).

pub(crate) use std::hint::spin_loop;
pub(crate) use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard, OnceLock};
pub(crate) use std::thread_local;

use std::sync::{PoisonError, TryLockError};

/// Locks `mutex`, even after a panic of another holder. Only for data that every holder changes in one step, so that a
/// panic cannot leave it half changed.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// As [`lock`], if no thread has it locked.
pub(crate) fn try_lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

/// Sleeps for at least `us` microseconds.
pub(crate) fn sleep_us(us: u64) {
    std::thread::sleep(std::time::Duration::from_micros(us));
}
