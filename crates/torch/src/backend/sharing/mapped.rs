//! Pages of another process, mapped side by side.

use std::os::fd::OwnedFd;

use warpool_driver::{Access, DeviceAccess, DeviceId, DevicePtr, Driver, PhysicalId, SharedMemory};

use crate::error::Result;

/// A reservation full of such pages.
#[derive(Debug)]
pub(super) struct MappedRange {
    ptr: DevicePtr,
    bytes: u64,
}

impl MappedRange {
    pub(super) fn ptr(&self) -> DevicePtr {
        self.ptr
    }

    /// Maps pages of these sizes, all or none; `page` returns the descriptor of a page by its number.
    pub(super) fn open(
        driver: &dyn Driver,
        device: DeviceId,
        sizes: &[u64],
        mut page: impl FnMut(usize) -> Result<OwnedFd>,
    ) -> Result<Self> {
        let bytes = sizes.iter().fold(0_u64, |sum, &bytes| sum.saturating_add(bytes));
        let range = Self { ptr: driver.vm_reserve(bytes, 0, None)?, bytes };
        let mut mapped = 0;
        let outcome = (|| {
            for (number, &bytes) in sizes.iter().enumerate() {
                let shared = SharedMemory::PosixFd(page(number)?);
                let imported = driver.vm_import(device, &shared, bytes)?;
                let outcome = driver.vm_map(DevicePtr(range.ptr.0 + mapped), imported);
                // Once mapped, it lives as long as the mapping.
                release(driver, imported);
                outcome?;
                mapped += bytes;
            }
            let access = DeviceAccess { device, access: Access::ReadWrite };
            Ok(driver.vm_set_access(range.ptr, bytes, &[access])?)
        })();
        match outcome {
            Ok(()) => Ok(range),
            Err(error) => {
                if let Err(error) = range.undo(driver, mapped) {
                    tracing::warn!(%error, "pages of another process could not be unmapped");
                }
                Err(error)
            }
        }
    }

    /// Unmaps it, after waiting for all work of the device, which may use it.
    pub(super) fn close(&self, driver: &dyn Driver, device: DeviceId) -> Result<()> {
        driver.device_synchronize(device)?;
        self.undo(driver, self.bytes)
    }

    fn undo(&self, driver: &dyn Driver, mapped: u64) -> Result<()> {
        if mapped > 0 {
            driver.vm_unmap(self.ptr, mapped)?;
        }
        // SAFETY: no work uses the addresses: the device was waited for, or the addresses were never returned.
        Ok(unsafe { driver.vm_free_range(self.ptr, self.bytes) }?)
    }
}

fn release(driver: &dyn Driver, imported: PhysicalId) {
    if let Err(error) = driver.vm_release(imported) {
        tracing::warn!(%error, "a page of another process could not be released");
    }
}
