//! The memory of recordings that are read at once, bounded: each worker has an equal part of it. A recording that needs
//! more is read again alone, with all of it.

use std::sync::{Condvar, Mutex, PoisonError};

/// The memory that workers share.
#[derive(Debug)]
pub struct MemoryGate {
    /// What all have together.
    all: u64,
    /// What each has.
    each: u64,
    free: Mutex<u64>,
    changed: Condvar,
}

impl MemoryGate {
    /// `bytes` for as many workers.
    #[must_use]
    pub fn new(bytes: u64, workers: usize) -> Self {
        let each = bytes / (workers.max(1) as u64);
        Self { all: bytes, each, free: Mutex::new(bytes), changed: Condvar::new() }
    }

    /// Calls `work` with the bytes that it may take; if these are not enough, once more with all.
    ///
    /// # Errors
    /// Those of `work`.
    pub fn within<T, E>(&self, work: impl Fn(u64) -> Result<T, E>, needs_more: impl Fn(&E) -> bool) -> Result<T, E> {
        match self.with(self.each, &work) {
            Err(error) if needs_more(&error) && self.each < self.all => self.with(self.all, &work),
            result => result,
        }
    }

    fn with<T>(&self, bytes: u64, work: impl Fn(u64) -> T) -> T {
        let free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.changed.wait_while(free, |free| *free < bytes);
        *waited.unwrap_or_else(PoisonError::into_inner) -= bytes;
        let _taken = Taken { gate: self, bytes };
        work(bytes)
    }
}

/// Given back when it is dropped, also by a panic.
struct Taken<'a> {
    gate: &'a MemoryGate,
    bytes: u64,
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        *self.gate.free.lock().unwrap_or_else(PoisonError::into_inner) += self.bytes;
        self.gate.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;
    use crate::parallel::in_parallel;

    #[test]
    fn no_more_is_taken_than_there_is() {
        let gate = MemoryGate::new(100, 4);
        let (taken, most) = (AtomicU64::new(0), AtomicU64::new(0));
        let needs = |number: usize| (number as u64 * 13) % 120;
        let found = in_parallel(40, 4, |number| {
            let work = |limit: u64| {
                most.fetch_max(taken.fetch_add(limit, Ordering::SeqCst) + limit, Ordering::SeqCst);
                std::thread::yield_now();
                taken.fetch_sub(limit, Ordering::SeqCst);
                if needs(number) <= limit { Ok(limit) } else { Err(()) }
            };
            gate.within(work, |()| true)
        });
        for (number, found) in found.into_iter().enumerate() {
            let expected = match needs(number) {
                0..=25 => Ok(25),
                26..=100 => Ok(100),
                _ => Err(()),
            };
            assert_eq!(found, expected, "{number}");
        }
        assert!(most.into_inner() <= 100);
    }
}
