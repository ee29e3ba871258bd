//! The lock of whoever asks the driver for memory or gives it back.
//!
//! What its holder does is kept for the trackers until the lock is gone: they are told without any lock, so that they may call the
//! allocator.

use std::cell::RefCell;
use std::sync::MutexGuard;

use super::{CachingAllocator, Cell};
use crate::lock;

thread_local! {
    /// The cells whose lock the calling thread has: one, or two where a pool of one allocator gets its segments from another.
    static HELD: RefCell<Vec<*const Cell>> = const { RefCell::new(Vec::new()) };
}

/// Whether the calling thread has the lock, and must not tell trackers now.
pub(super) fn is_held(cell: &Cell) -> bool {
    HELD.with_borrow(|held| held.contains(&std::ptr::from_ref(cell)))
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
        assert!(!is_held(cell), "a pool's own source of memory must not call the allocator that it serves");
        let (guard, waited) = match cell.slow.try_lock() {
            Ok(guard) => (guard, false),
            Err(_) => (lock(&cell.slow), true),
        };
        HELD.with_borrow_mut(|held| held.push(std::ptr::from_ref(cell)));
        Slow { allocator: self, cell, guard: Some(guard), waited }
    }
}

impl Drop for Slow<'_> {
    fn drop(&mut self) {
        self.guard = None;
        HELD.with_borrow_mut(|held| held.retain(|&cell| cell != std::ptr::from_ref(self.cell)));
        if !std::thread::panicking() {
            self.allocator.with(self.cell, |_| ());
        }
    }
}
