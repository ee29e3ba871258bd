//! Memory that is allocated while caching is off, for allocators that cannot switch it off themselves: every request is
//! a driver call, and appears in no statistics.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustc_hash::FxHashSet;
use warpool_driver::{DeviceId, DevicePtr, Driver};

use super::relaxed;
use crate::error::Result;

/// Memory that was allocated while caching was off.
#[derive(Debug, Default)]
pub(crate) struct Direct {
    off: AtomicBool,
    /// How many blocks there are: without any, a free takes no lock.
    count: AtomicUsize,
    blocks: Mutex<FxHashSet<u64>>,
}

impl Direct {
    /// Whether caching is off.
    #[inline]
    pub(crate) fn is_on(&self) -> bool {
        self.off.load(Ordering::Acquire)
    }

    pub(crate) fn set(&self, on: bool) {
        self.off.store(on, Ordering::Release);
    }

    pub(crate) fn allocate(&self, driver: &dyn Driver, device: DeviceId, bytes: u64) -> Result<DevicePtr> {
        let ptr = relaxed::run(driver, || driver.mem_alloc(device, bytes))?;
        self.lock().insert(ptr.0);
        self.count.fetch_add(1, Ordering::Release);
        Ok(ptr)
    }

    /// Whether there is any such memory.
    #[inline]
    pub(crate) fn has_blocks(&self) -> bool {
        self.count.load(Ordering::Acquire) > 0
    }

    /// Frees the block that starts at `ptr`, if it was allocated here. Returns whether it was.
    pub(crate) fn free(&self, driver: &dyn Driver, ptr: DevicePtr) -> Result<bool> {
        if !self.lock().remove(&ptr.0) {
            return Ok(false);
        }
        if let Err(error) = relaxed::run(driver, || driver.mem_free(ptr)) {
            self.lock().insert(ptr.0);
            return Err(error);
        }
        self.count.fetch_sub(1, Ordering::Release);
        Ok(true)
    }

    /// Whether `ptr` is the start of such memory.
    pub(crate) fn has(&self, ptr: DevicePtr) -> bool {
        self.has_blocks() && self.lock().contains(&ptr.0)
    }

    fn lock(&self) -> MutexGuard<'_, FxHashSet<u64>> {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
