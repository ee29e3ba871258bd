//! The lock of whoever asks the driver for memory or gives it back.
//!
//! What its holder does is kept for the trackers until the lock is gone: they are told without any lock, so that they
//! may call the allocator.

use std::sync::MutexGuard;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::{CachingAllocator, Cell};
use crate::lock;

thread_local! {
    /// Its address names the thread. It has no destructor, so it is there also while those of other thread-locals run
    /// and drop blocks.
    static NAME: u8 = const { 0 };
}

/// Which thread has the lock.
#[derive(Default)]
pub(super) struct Holder(AtomicUsize);

impl Holder {
    /// Whether it is the calling thread, which must not tell trackers now. Only that thread itself ever writes its
    /// name, so it cannot be mistaken.
    pub(super) fn is_me(&self) -> bool {
        self.0.load(Ordering::Relaxed) == Self::my_name()
    }

    fn my_name() -> usize {
        NAME.with(|name| std::ptr::from_ref(name).addr())
    }
}

/// The lock of one device. Dropped, it is let go, and then trackers are told what was done under it.
#[must_use = "dropping it lets the lock go"]
pub(super) struct Slow<'a> {
    allocator: &'a CachingAllocator,
    cell: &'a Cell,
    guard: Option<MutexGuard<'a, ()>>,
    /// Whether another thread had it, so that much may have changed.
    pub(super) waited: bool,
}

impl CachingAllocator {
    /// Takes a device's lock for asking the driver.
    pub(super) fn slow<'a>(&'a self, cell: &'a Cell) -> Slow<'a> {
        assert!(!cell.slow_holder.is_me(), "a pool's own source of memory must not call the allocator that it serves");
        let (guard, waited) = match cell.slow.try_lock() {
            Ok(guard) => (guard, false),
            Err(_) => (lock(&cell.slow), true),
        };
        cell.slow_holder.0.store(Holder::my_name(), Ordering::Relaxed);
        Slow { allocator: self, cell, guard: Some(guard), waited }
    }
}

impl Drop for Slow<'_> {
    fn drop(&mut self) {
        self.cell.slow_holder.0.store(0, Ordering::Relaxed);
        self.guard = None;
        if !std::thread::panicking() {
            self.allocator.with(self.cell, |_| ());
        }
    }
}
