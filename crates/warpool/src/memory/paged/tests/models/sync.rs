//! The same names as in the allocator's `sync.rs`, scheduled by `shuttle`.

pub(super) use shuttle::hint::spin_loop;
pub(super) use shuttle::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
pub(super) use shuttle::thread::yield_now;

/// A schedule of `shuttle` is one order of all loads and stores, so there is nothing for a barrier to do: that one is
/// needed is not tested here.
pub(super) fn process_barrier() {
    yield_now();
}

pub(super) fn process_has_barrier() -> bool {
    true
}

shuttle::thread_local! {
    static NUMBER: std::cell::Cell<u64> = std::cell::Cell::new(0);
}

shuttle::lazy_static! {
    static ref NEXT: AtomicU64 = AtomicU64::new(1);
}

/// That threads end is not a part of the models.
pub(super) fn has_ended(_: u64) -> bool {
    false
}

pub(super) fn known_thread_number() -> u64 {
    NUMBER.with(std::cell::Cell::get)
}

pub(super) fn thread_number() -> u64 {
    NUMBER.with(|number| {
        if number.get() == 0 {
            number.set(NEXT.fetch_add(1, Ordering::Relaxed));
        }
        number.get()
    })
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
