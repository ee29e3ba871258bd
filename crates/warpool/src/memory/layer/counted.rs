//! How many calls there were, and how much callers hold.

use std::fmt;
use std::sync::{Arc, Mutex};

use super::held::Held;
use super::{AllocatorCall, GivenBack, IntoAllocator, Layer};
use crate::memory::{Allocation, DeviceAllocator, Request};
use crate::{Error, Result, lock};

/// What was counted, on all devices together. Bytes are those that were asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Requests, those for nothing too.
    pub allocations: u64,
    /// Frees, of any kind.
    pub frees: u64,
    /// Uses by other streams that were recorded.
    pub uses: u64,
    /// All other calls.
    pub others: u64,
    /// How many of all calls failed.
    pub failures: u64,
    /// How many of them for lack of memory.
    pub out_of_memory: u64,
    /// Blocks that callers hold.
    pub blocks_live: u64,
    /// The most that they held.
    pub blocks_peak: u64,
    /// Bytes that callers hold.
    pub bytes_live: u64,
    /// The most that they held.
    pub bytes_peak: u64,
    /// All that they were ever given.
    pub bytes_given: u64,
}

/// An allocator whose calls are counted.
pub struct Counted {
    inner: Arc<dyn DeviceAllocator>,
    books: Mutex<Books>,
}

#[derive(Default)]
struct Books {
    held: Held,
    counts: Counts,
}

impl Books {
    fn weigh(&mut self) {
        let counts = &mut self.counts;
        (counts.blocks_live, counts.bytes_live) = (self.held.blocks() as u64, self.held.bytes());
        counts.blocks_peak = counts.blocks_peak.max(counts.blocks_live);
        counts.bytes_peak = counts.bytes_peak.max(counts.bytes_live);
    }
}

impl Counted {
    /// `inner`, counted from now on.
    pub fn new(inner: impl IntoAllocator) -> Self {
        Self { inner: inner.into_allocator(), books: Mutex::default() }
    }

    /// What was counted.
    #[must_use]
    pub fn counts(&self) -> Counts {
        lock(&self.books).counts
    }

    /// Counts from zero, and makes what callers hold the most that they held.
    pub fn reset(&self) {
        let mut books = lock(&self.books);
        books.counts = Counts::default();
        books.weigh();
    }
}

impl Layer for Counted {
    fn title(&self) -> &'static str {
        "counted"
    }

    fn inner(&self) -> &Arc<dyn DeviceAllocator> {
        &self.inner
    }

    fn give(&self, request: Request) -> Result<Allocation> {
        let given = self.inner.allocate_raw(request)?;
        let mut books = lock(&self.books);
        books.held.add(given);
        books.counts.bytes_given += given.bytes_requested;
        books.weigh();
        Ok(given)
    }

    fn take_back(&self, what: GivenBack) -> Result<()> {
        let taken = {
            let mut books = lock(&self.books);
            let taken = books.held.take(what);
            books.weigh();
            taken
        };
        let outcome = what.pass_to(&*self.inner);
        if let (Some(taken), Err(_)) = (taken, &outcome)
            && self.inner.find(taken.ptr) == Ok(taken)
        {
            // Its owner still has it.
            let mut books = lock(&self.books);
            books.held.add(taken);
            books.weigh();
        }
        outcome
    }

    fn after(&self, call: &AllocatorCall, error: Option<&Error>) {
        let counts = &mut lock(&self.books).counts;
        match call {
            AllocatorCall::Allocate { .. } => counts.allocations += 1,
            AllocatorCall::Free { .. } => counts.frees += 1,
            AllocatorCall::RecordUse { .. } => counts.uses += 1,
            _ => counts.others += 1,
        }
        counts.failures += u64::from(error.is_some());
        counts.out_of_memory += u64::from(matches!(error, Some(Error::OutOfMemory(_))));
    }
}

impl fmt::Debug for Counted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Counted").field("counts", &self.counts()).field("inner", &self.inner).finish()
    }
}
