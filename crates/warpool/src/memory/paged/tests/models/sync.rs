//! The same names as in the allocator's `sync.rs`, scheduled by `shuttle`.

pub(super) use shuttle::hint::spin_loop;
pub(super) use shuttle::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};

/// Another thread runs.
pub(super) fn sleep_us(_: u64) {
    shuttle::thread::yield_now();
}

/// As the standard library's, of which `shuttle` has none: a value that is published once.
#[derive(Debug)]
pub(super) struct OnceLock<T> {
    is_set: AtomicBool,
    value: std::sync::OnceLock<T>,
}

impl<T> OnceLock<T> {
    pub(super) fn new() -> Self {
        Self { is_set: AtomicBool::new(false), value: std::sync::OnceLock::new() }
    }

    pub(super) fn get(&self) -> Option<&T> {
        if self.is_set.load(Ordering::Acquire) { self.value.get() } else { None }
    }

    pub(super) fn set(&self, value: T) -> Result<(), T> {
        self.value.set(value)?;
        self.is_set.store(true, Ordering::Release);
        Ok(())
    }

    /// By one thread at a time.
    pub(super) fn get_or_init(&self, init: impl FnOnce() -> T) -> &T {
        if self.get().is_none() {
            assert!(self.set(init()).is_ok(), "two threads initialize it");
        }
        self.get().expect("it was set")
    }

    pub(super) fn take(&mut self) -> Option<T> {
        self.value.take()
    }
}
