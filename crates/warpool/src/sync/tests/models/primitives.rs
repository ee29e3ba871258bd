//! The same names as in `sync/primitives.rs`, scheduled by `shuttle`.

pub(crate) use shuttle::hint::spin_loop;
pub(crate) use shuttle::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
pub(crate) use shuttle::sync::{Condvar, Mutex, MutexGuard};
pub(crate) use shuttle::thread_local;

use std::sync::PoisonError;

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Another thread runs.
pub(crate) fn sleep_us(_: u64) {
    shuttle::thread::yield_now();
}

/// As the standard library's, of which `shuttle` has none: a value that is published once.
#[derive(Debug)]
pub(crate) struct OnceLock<T> {
    is_set: AtomicBool,
    value: std::sync::OnceLock<T>,
}

impl<T> OnceLock<T> {
    pub(crate) fn new() -> Self {
        Self { is_set: AtomicBool::new(false), value: std::sync::OnceLock::new() }
    }

    pub(crate) fn get(&self) -> Option<&T> {
        if self.is_set.load(Ordering::Acquire) { self.value.get() } else { None }
    }

    pub(crate) fn set(&self, value: T) -> Result<(), T> {
        self.value.set(value)?;
        self.is_set.store(true, Ordering::Release);
        Ok(())
    }

    /// By one thread at a time.
    pub(crate) fn get_or_init(&self, init: impl FnOnce() -> T) -> &T {
        if self.get().is_none() {
            assert!(self.set(init()).is_ok(), "two threads initialize it");
        }
        self.get().expect("it was set")
    }

    pub(crate) fn take(&mut self) -> Option<T> {
        self.value.take()
    }
}
