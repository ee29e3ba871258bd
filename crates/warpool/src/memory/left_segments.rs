//! Segments of pools that are gone, which a failed driver call or a capture kept from returning to the driver. A
//! destructor calls no driver, so they are left here: for the next call that allocates or frees such segments, or for
//! [`Instance::close`](crate::Instance::close).

use std::sync::Mutex;

use warpool_driver::{DeviceId, DevicePtr, Driver, PhysicalId};

use crate::instance::{Extension, ExtensionSlot};
use crate::{Result, lock};

#[derive(Debug, Default)]
pub(super) struct LeftSegments(Mutex<Vec<LeftSegment>>);

/// What is left of a segment.
#[derive(Debug)]
pub(super) struct LeftSegment {
    pub(super) device: DeviceId,
    pub(super) physical: Option<PhysicalId>,
    /// Its address and size, if these are still reserved.
    pub(super) addresses: Option<(u64, u64)>,
    pub(super) is_mapped: bool,
}

impl LeftSegments {
    pub(super) fn add(&self, segments: impl Iterator<Item = LeftSegment>) {
        lock(&self.0).extend(segments);
    }

    /// Returns them to the driver, after all work of their devices. What fails stays, and the first error is returned.
    pub(super) fn free(&self, driver: &dyn Driver) -> Result<()> {
        let (taken, mut outcome) = (std::mem::take(&mut *lock(&self.0)), Ok(()));
        for mut segment in taken {
            if let Err(error) = segment.free(driver) {
                lock(&self.0).push(segment);
                outcome = outcome.and(Err(error));
            }
        }
        outcome
    }
}

impl LeftSegment {
    #[expect(unsafe_code, reason = "the driver cannot check that no work uses the addresses")]
    fn free(&mut self, driver: &dyn Driver) -> Result<()> {
        if let Some((ptr, bytes)) = self.addresses.filter(|_| self.is_mapped) {
            driver.device_synchronize(self.device)?;
            driver.vm_unmap(DevicePtr(ptr), bytes)?;
            self.is_mapped = false;
        }
        if let Some(physical) = self.physical {
            driver.vm_release(physical)?;
            self.physical = None;
        }
        if let Some((ptr, bytes)) = self.addresses {
            // SAFETY: the pool freed the segment, and a mapping is undone only after the work of its device.
            unsafe { driver.vm_free_range(DevicePtr(ptr), bytes)? };
            self.addresses = None;
        }
        Ok(())
    }
}

impl Extension for LeftSegments {
    fn slot() -> ExtensionSlot {
        ExtensionSlot::Segments
    }

    fn destroy(&self, driver: &dyn Driver) -> Result<()> {
        self.free(driver)
    }
}
