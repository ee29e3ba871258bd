//! A cap on allocated bytes.

use std::fmt;
use std::sync::{Arc, Mutex};

use rustc_hash::FxHashMap;
use warpool_driver::MemoryInfo;

use super::{Decorator, FreeCall};
use crate::memory::shortage::Shortage;
use crate::memory::{Allocation, DeviceAllocator, OomCause, Request, SharedAllocator};
use crate::{Error, Result, lock};

/// An allocator that caps the bytes allocated through it, on all devices together, by requested size.
///
/// A request beyond the cap is [`Error::OutOfMemory`] with the cause [`OomCause::Cap`]. The inner allocator is not
/// called, but its out-of-memory observers are. Its cached memory does not count: the memory fraction limits that.
pub struct Limited {
    inner: Arc<dyn DeviceAllocator>,
    bytes_cap: u64,
    table: Mutex<Table>,
}

/// The blocks that were allocated through the decorator. Blocks allocated directly from the inner allocator are not
/// here, and do not count when they are freed through it.
#[derive(Default)]
struct Table {
    live: FxHashMap<u64, Allocation>,
    bytes: u64,
    in_flight_bytes: u64,
}

impl Table {
    fn insert(&mut self, allocation: Allocation) {
        if allocation.ptr.is_null() {
            return;
        }
        self.bytes += allocation.bytes_requested;
        // A block at the same address was freed directly by the inner allocator.
        if let Some(stale) = self.live.insert(allocation.ptr.0, allocation) {
            self.bytes -= stale.bytes_requested;
        }
    }

    /// Removes a block before the inner allocator frees it, since afterwards the address may be allocated again.
    fn remove(&mut self, free: FreeCall) -> Option<Allocation> {
        let live = *self.live.get(&free.ptr().0)?;
        if free.allocation().is_some_and(|allocation| allocation != live) {
            return None;
        }
        self.live.remove(&live.ptr.0);
        self.bytes -= live.bytes_requested;
        Some(live)
    }
}

/// Bytes of a request in flight. They count against the cap until this is dropped, also by a panic of the inner
/// allocator.
struct InFlight<'a> {
    table: &'a Mutex<Table>,
    bytes: u64,
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        lock(self.table).in_flight_bytes -= self.bytes;
    }
}

impl Limited {
    /// A decorator of `inner` that allows at most `bytes_cap` bytes.
    #[must_use]
    pub fn new(inner: &impl SharedAllocator, bytes_cap: u64) -> Self {
        Self { inner: inner.to_dyn(), bytes_cap, table: Mutex::default() }
    }

    /// The cap in bytes.
    #[must_use]
    pub fn bytes_cap(&self) -> u64 {
        self.bytes_cap
    }

    /// The bytes that are allocated now; 0 in a forked child.
    #[must_use]
    pub fn bytes_allocated(&self) -> u64 {
        if self.inner.instance().is_inherited() {
            return 0;
        }
        lock(&self.table).bytes
    }

    /// Counts `bytes` as in flight. If the cap would be exceeded, the error is the number of bytes that count already.
    fn reserve_quota(&self, bytes: u64) -> std::result::Result<InFlight<'_>, u64> {
        let mut table = lock(&self.table);
        let counted = table.bytes + table.in_flight_bytes;
        if counted.saturating_add(bytes) > self.bytes_cap {
            return Err(counted);
        }
        table.in_flight_bytes += bytes;
        Ok(InFlight { table: &self.table, bytes })
    }

    fn cap_exceeded(&self, request: &Request, held: u64) -> Error {
        let stats = match self.inner.stats(request.device) {
            Ok(stats) => stats,
            // There is no such device.
            Err(error) => return error,
        };
        let driver = self.inner.instance().driver();
        let memory = driver.mem_info(request.device).unwrap_or(MemoryInfo { bytes_free: 0, bytes_total: 0 });
        let (why, bytes_segment, limit) = (OomCause::Cap { held }, request.bytes, Some(self.bytes_cap));
        let shortage = Shortage { request, why, bytes_segment, memory, limit, stats: &stats, capturing: false };
        let report = shortage.report();
        self.inner.observers().report_oom(&report);
        Error::OutOfMemory(Box::new(report))
    }
}

#[expect(unsafe_code, reason = "the promise of `Decorator`")]
// SAFETY: it returns what the inner allocator returns.
unsafe impl Decorator for Limited {
    fn decorator_name(&self) -> &'static str {
        "limited"
    }

    fn inner(&self) -> &Arc<dyn DeviceAllocator> {
        &self.inner
    }

    fn on_allocate(&self, request: Request) -> Result<Allocation> {
        let in_flight = self.reserve_quota(request.bytes).map_err(|held| self.cap_exceeded(&request, held))?;
        let allocation = self.inner.allocate_raw(request)?;
        lock(&self.table).insert(allocation);
        drop(in_flight);
        Ok(allocation)
    }

    fn on_free(&self, free: FreeCall) -> Result<()> {
        let removed = lock(&self.table).remove(free);
        let outcome = free.forward(&*self.inner);
        if let (Some(removed), Err(_)) = (removed, &outcome)
            && self.inner.find(removed.ptr) == Ok(removed)
        {
            // The free failed, and the block is still allocated.
            lock(&self.table).insert(removed);
        }
        outcome
    }
}

impl fmt::Debug for Limited {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Limited").field("bytes_cap", &self.bytes_cap).field("inner", &self.inner).finish()
    }
}
