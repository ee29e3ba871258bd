//! How much memory reading and replaying a recording may take. The content of a file decides what is allocated, so
//! everything that grows with it is counted here before it grows; beyond the limit there is an error, never an abort.
//!
//! A budget also carries the flag that stops the work.
//!
//! The counts are estimates that are meant to be upper bounds: `tests/memory` compares them with a counting allocator.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::Stop;

/// Memory that is allowed for any recording: enough for the window of a decompressor and a simulated device.
const BASE: u64 = 256 << 20;
/// Bytes that are allowed for each byte of the recording. Real ones take 3 to 6 to read and as many to replay.
const PER_BYTE: u64 = 32;
/// The upper bound of the default limit.
const MAX: u64 = 4 << 30;

/// The memory limit where none is given: 256 MiB and 32 bytes for each of the recording's bytes that are read, after
/// decompression, but at most 4 GiB. Texts that are skipped do not count as read.
#[must_use]
pub fn default_memory_limit(bytes_needed: u64) -> u64 {
    bytes_needed.saturating_mul(PER_BYTE).saturating_add(BASE).min(MAX)
}

/// The memory limit was reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Exceeded;

/// An account of memory, shared by all that take from it, on any thread.
#[derive(Clone, Debug)]
pub(crate) struct Budget {
    account: Arc<Account>,
    stop: Stop,
}

#[derive(Debug)]
struct Account {
    limit: AtomicU64,
    /// Whether the limit grows with the bytes that are read.
    grows: bool,
    taken: AtomicU64,
    exceeded: AtomicBool,
}

impl Budget {
    /// A budget of `limit` bytes. `None` is the default limit, which grows with
    /// [`set_bytes_needed`](Self::set_bytes_needed).
    pub(crate) fn new(limit: Option<u64>) -> Self {
        let (limit, grows) = (limit.unwrap_or(BASE), limit.is_none());
        let (taken, exceeded) = (AtomicU64::new(0), AtomicBool::new(false));
        let account = Arc::new(Account { limit: AtomicU64::new(limit), grows, taken, exceeded });
        Self { account, stop: Stop::default() }
    }

    /// The same budget, for work that `stop` can end.
    pub(crate) fn with_stop(self, stop: &Stop) -> Self {
        Self { stop: stop.clone(), ..self }
    }

    /// Whether the work is to stop.
    pub(crate) fn is_stopped(&self) -> bool {
        self.stop.is_stopped()
    }

    /// Sets how many bytes of the recording were read and not skipped.
    pub(crate) fn set_bytes_needed(&self, bytes: u64) {
        if self.account.grows {
            self.account.limit.store(default_memory_limit(bytes), Ordering::Relaxed);
        }
    }

    pub(crate) fn limit(&self) -> u64 {
        self.account.limit.load(Ordering::Relaxed)
    }

    /// The bytes that are left.
    pub(crate) fn left(&self) -> u64 {
        self.limit().saturating_sub(self.account.taken.load(Ordering::Relaxed))
    }

    /// Whether a request was refused at any time.
    pub(crate) fn is_exceeded(&self) -> bool {
        self.account.exceeded.load(Ordering::Relaxed)
    }

    /// Fails if a request was refused at any time.
    #[inline]
    pub(crate) fn check(&self) -> Result<(), Exceeded> {
        if self.is_exceeded() { Err(Exceeded) } else { Ok(()) }
    }

    /// Takes `bytes` bytes.
    pub(crate) fn take(&self, bytes: u64) -> Result<(), Exceeded> {
        let limit = self.limit();
        let with = |taken: u64| taken.checked_add(bytes).filter(|&taken| taken <= limit);
        match self.account.taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, with) {
            Ok(_) => Ok(()),
            Err(_) => {
                self.account.exceeded.store(true, Ordering::Relaxed);
                Err(Exceeded)
            }
        }
    }

    fn give_back(&self, bytes: u64) {
        let without = |taken: u64| Some(taken.saturating_sub(bytes));
        // It always succeeds.
        let _ = self.account.taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, without);
    }

    /// Makes room for one more element, and counts what that takes: while a vector grows, the old one exists too.
    #[inline]
    pub(crate) fn reserve_one<T>(&self, vec: &mut Vec<T>) -> Result<(), Exceeded> {
        if vec.len() < vec.capacity() { Ok(()) } else { self.grow(vec, vec.capacity().saturating_mul(2).max(4)) }
    }

    /// Makes room for `more` elements, likewise.
    pub(crate) fn reserve<T>(&self, vec: &mut Vec<T>, more: usize) -> Result<(), Exceeded> {
        let needed = vec.len().saturating_add(more);
        if needed <= vec.capacity() {
            return Ok(());
        }
        self.grow(vec, needed.max(vec.capacity().saturating_mul(2)))
    }

    #[cold]
    fn grow<T>(&self, vec: &mut Vec<T>, capacity: usize) -> Result<(), Exceeded> {
        let before = bytes_of::<T>(vec.capacity());
        self.take(bytes_of::<T>(capacity))?;
        vec.reserve_exact(capacity - vec.len());
        self.give_back(before);
        Ok(())
    }
}

/// The bytes of `count` elements.
pub(crate) fn bytes_of<T>(count: usize) -> u64 {
    (count as u64).saturating_mul(size_of::<T>() as u64)
}

/// A part of a budget, given back when it is dropped. A clone is charged again.
#[derive(Debug)]
pub(crate) struct Charge {
    budget: Budget,
    bytes: u64,
}

impl Charge {
    pub(crate) fn new(budget: &Budget) -> Self {
        Self { budget: budget.clone(), bytes: 0 }
    }

    /// Takes bytes, at once.
    pub(crate) fn of(budget: &Budget, bytes: u64) -> Result<Self, Exceeded> {
        budget.take(bytes)?;
        Ok(Self { budget: budget.clone(), bytes })
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(crate) fn budget(&self) -> &Budget {
        &self.budget
    }

    pub(crate) fn add(&mut self, bytes: u64) -> Result<(), Exceeded> {
        self.budget.take(bytes)?;
        self.bytes += bytes;
        Ok(())
    }

    /// Raises the charge to `bytes`. For data that grows in small steps: bytes are taken in larger steps ahead, and a
    /// failure shows in [`Budget::check`].
    #[inline]
    pub(crate) fn raise_to(&mut self, bytes: u64) {
        if bytes > self.bytes {
            self.raise(bytes);
        }
    }

    #[cold]
    fn raise(&mut self, bytes: u64) {
        const STEP: u64 = 64 << 10;
        // If that is refused, the budget keeps the failure.
        let _ = self.add((bytes - self.bytes).next_multiple_of(STEP));
    }
}

impl Clone for Charge {
    fn clone(&self) -> Self {
        let mut copy = Self::new(&self.budget);
        let _ = copy.add(self.bytes);
        copy
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.budget.give_back(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_taken_is_limited_and_given_back() {
        let budget = Budget::new(Some(1000));
        let mut charge = Charge::of(&budget, 600).unwrap();
        assert_eq!(charge.add(401), Err(Exceeded));
        assert!(budget.is_exceeded(), "it stays so");
        drop(charge);
        let budget = Budget::new(Some(1000));
        drop(Charge::of(&budget, 1000).unwrap());
        let mut vec: Vec<u64> = Vec::new();
        for value in 0..32 {
            budget.reserve_one(&mut vec).unwrap();
            vec.push(value);
        }
        assert_eq!(vec.capacity(), 32);
        assert_eq!(budget.reserve_one(&mut vec), Ok(()), "64 elements beside the old 32 are 768 bytes");
        vec.resize(64, 0);
        assert_eq!(budget.reserve_one(&mut vec), Err(Exceeded));
    }

    #[test]
    fn default_limit_grows_with_what_is_read() {
        let budget = Budget::new(None);
        assert_eq!(budget.limit(), 256 << 20);
        budget.set_bytes_needed(1 << 20);
        assert_eq!(budget.limit(), (256 << 20) + (32 << 20));
        budget.set_bytes_needed(1 << 40);
        assert_eq!(budget.limit(), 4 << 30);
        let fixed = Budget::new(Some(7));
        fixed.set_bytes_needed(1 << 40);
        assert_eq!(fixed.limit(), 7);
    }
}
