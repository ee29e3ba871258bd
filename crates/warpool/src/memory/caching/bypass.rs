//! Requests while caching is off: each is a driver call and appears in no statistics. The addresses are kept, so that
//! each is freed the way it was allocated, also after caching was switched.

use std::sync::Mutex;

use rustc_hash::FxHashSet;
use warpool_driver::{DevicePtr, Driver};

use crate::memory::{Allocation, Request};
use crate::{Result, lock};

/// Memory that came from the driver directly.
#[derive(Default)]
pub(super) struct Bypass {
    allocated: Mutex<FxHashSet<u64>>,
    /// Freed by destructors, to be freed by a later call.
    to_free: Mutex<Vec<DevicePtr>>,
}

impl Bypass {
    pub(super) fn allocate(&self, driver: &dyn Driver, request: Request) -> Result<Allocation> {
        let Request { device, stream, bytes, .. } = request;
        self.free_pending(driver)?;
        let ptr = driver.mem_alloc(device, bytes)?;
        lock(&self.allocated).insert(ptr.0);
        Ok(Allocation { ptr, bytes, bytes_requested: bytes, device, stream, slot: 0, generation: 0 })
    }

    pub(super) fn contains(&self, ptr: DevicePtr) -> bool {
        lock(&self.allocated).contains(&ptr.0)
    }

    /// Frees what starts at `ptr`. Returns whether anything does.
    pub(super) fn free(&self, driver: &dyn Driver, ptr: DevicePtr) -> Result<bool> {
        if !lock(&self.allocated).remove(&ptr.0) {
            return Ok(false);
        }
        if let Err(error) = driver.mem_free(ptr) {
            lock(&self.allocated).insert(ptr.0);
            return Err(error.into());
        }
        Ok(true)
    }

    /// The same for destructors, without a driver call.
    pub(super) fn free_later(&self, ptr: DevicePtr) {
        if lock(&self.allocated).remove(&ptr.0) {
            lock(&self.to_free).push(ptr);
        }
    }

    /// Frees what destructors left.
    pub(super) fn free_pending(&self, driver: &dyn Driver) -> Result<()> {
        loop {
            let next = lock(&self.to_free).pop();
            let Some(ptr) = next else { return Ok(()) };
            if let Err(error) = driver.mem_free(ptr) {
                lock(&self.to_free).push(ptr);
                return Err(error.into());
            }
        }
    }
}
