//! Requests while caching is off: each is a call of the driver's, in no counter. The addresses are remembered, so that
//! each goes back the way it came, whatever is switched meanwhile.

use std::sync::Mutex;

use rustc_hash::FxHashSet;
use warpool_driver::DevicePtr;

use super::CachingAllocator;
use crate::memory::{Allocation, Request};
use crate::{Result, lock};

/// What the driver gave directly.
#[derive(Default)]
pub(super) struct Uncached {
    live: Mutex<FxHashSet<u64>>,
    /// What destructors gave back: the driver has not been told yet.
    leftovers: Mutex<Vec<DevicePtr>>,
}

impl CachingAllocator {
    pub(super) fn allocate_uncached(&self, request: Request) -> Result<Allocation> {
        let Request { device, stream, bytes, .. } = request;
        self.free_uncached_leftovers()?;
        let ptr = self.driver().mem_alloc(device, bytes)?;
        lock(&self.uncached.live).insert(ptr.0);
        Ok(Allocation { ptr, bytes, bytes_requested: bytes, device, stream, slot: 0 })
    }

    pub(super) fn is_uncached(&self, ptr: DevicePtr) -> bool {
        lock(&self.uncached.live).contains(&ptr.0)
    }

    /// Frees what the driver gave directly; whether it did.
    pub(super) fn free_uncached(&self, ptr: DevicePtr) -> Result<bool> {
        if !lock(&self.uncached.live).remove(&ptr.0) {
            return Ok(false);
        }
        if let Err(error) = self.driver().mem_free(ptr) {
            lock(&self.uncached.live).insert(ptr.0);
            return Err(error.into());
        }
        Ok(true)
    }

    /// The same for destructors.
    pub(super) fn free_uncached_later(&self, ptr: DevicePtr) {
        if lock(&self.uncached.live).remove(&ptr.0) {
            lock(&self.uncached.leftovers).push(ptr);
        }
    }

    /// Tells the driver about what destructors gave back.
    pub(super) fn free_uncached_leftovers(&self) -> Result<()> {
        loop {
            let next = lock(&self.uncached.leftovers).pop();
            let Some(ptr) = next else { return Ok(()) };
            if let Err(error) = self.driver().mem_free(ptr) {
                lock(&self.uncached.leftovers).push(ptr);
                return Err(error.into());
            }
        }
    }
}
