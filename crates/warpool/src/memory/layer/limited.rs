//! A cap on what callers hold.

use std::fmt;
use std::sync::{Arc, Mutex};

use warpool_driver::MemoryInfo;

use super::held::Held;
use super::{GivenBack, IntoAllocator, Layer};
use crate::memory::shortage::Shortage;
use crate::memory::{Allocation, DeviceAllocator, OomCause, Request};
use crate::{Error, Result, lock};

/// An allocator through which callers can hold no more than so many bytes at a time, on all devices together, by what
/// they asked for.
///
/// A request beyond the cap is [`Error::OutOfMemory`] with the cause [`OomCause::Cap`]; the inner allocator is not
/// asked, and its observers are told. What it caches for itself does not count: for that, there is the memory fraction.
pub struct Limited {
    inner: Arc<dyn DeviceAllocator>,
    bytes_cap: u64,
    books: Mutex<Books>,
}

#[derive(Default)]
struct Books {
    held: Held,
    /// What requests under way will hold.
    promised: u64,
}

/// Takes a promise back, also if the inner allocator panics.
struct Promise<'a> {
    books: &'a Mutex<Books>,
    bytes: u64,
}

impl Drop for Promise<'_> {
    fn drop(&mut self) {
        lock(self.books).promised -= self.bytes;
    }
}

impl Limited {
    /// `inner`, of which callers can hold `bytes_cap` bytes.
    pub fn new(inner: impl IntoAllocator, bytes_cap: u64) -> Self {
        Self { inner: inner.into_allocator(), bytes_cap, books: Mutex::default() }
    }

    /// The cap.
    #[must_use]
    pub fn bytes_cap(&self) -> u64 {
        self.bytes_cap
    }

    /// What callers hold.
    #[must_use]
    pub fn bytes_held(&self) -> u64 {
        lock(&self.books).held.bytes()
    }

    /// Has `bytes` promised; the error is what is held instead.
    fn promise(&self, bytes: u64) -> std::result::Result<Promise<'_>, u64> {
        let mut books = lock(&self.books);
        let held = books.held.bytes() + books.promised;
        if held.saturating_add(bytes) > self.bytes_cap {
            return Err(held);
        }
        books.promised += bytes;
        Ok(Promise { books: &self.books, bytes })
    }

    fn refuse(&self, request: &Request, held: u64) -> Error {
        let stats = match self.inner.stats(request.device) {
            Ok(stats) => stats,
            // No such device, which is what is wrong then.
            Err(error) => return error,
        };
        let driver = self.inner.instance().driver();
        let memory = driver.mem_info(request.device).unwrap_or(MemoryInfo { bytes_free: 0, bytes_total: 0 });
        let (why, bytes_segment, limit) = (OomCause::Cap { held }, request.bytes, Some(self.bytes_cap));
        let capturing = false;
        let report = Shortage { request, why, bytes_segment, memory, limit, stats: &stats, capturing }.report();
        self.inner.observers().out_of_memory(&report);
        Error::OutOfMemory(Box::new(report))
    }
}

impl Layer for Limited {
    fn title(&self) -> &'static str {
        "limited"
    }

    fn inner(&self) -> &Arc<dyn DeviceAllocator> {
        &self.inner
    }

    fn give(&self, request: Request) -> Result<Allocation> {
        let promise = self.promise(request.bytes).map_err(|held| self.refuse(&request, held))?;
        let given = self.inner.allocate_raw(request)?;
        lock(&self.books).held.add(given);
        drop(promise);
        Ok(given)
    }

    fn take_back(&self, what: GivenBack) -> Result<()> {
        let taken = lock(&self.books).held.take(what);
        let outcome = what.pass_to(&*self.inner);
        if let (Some(taken), Err(_)) = (taken, &outcome)
            && self.inner.find(taken.ptr) == Ok(taken)
        {
            // Its owner still has it.
            lock(&self.books).held.add(taken);
        }
        outcome
    }
}

impl fmt::Debug for Limited {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Limited").field("bytes_cap", &self.bytes_cap).field("inner", &self.inner).finish()
    }
}
