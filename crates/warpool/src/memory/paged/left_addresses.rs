//! Addresses of dropped allocators. A destructor calls no driver, so they are left here. They are freed before a paged
//! allocator of the same [`Instance`](crate::Instance) reserves addresses, or by
//! [`Instance::close`](crate::Instance::close).

use std::sync::Mutex;

use warpool_driver::{DevicePtr, Driver};

use crate::instance::{Extension, ExtensionSlot};
use crate::{Result, lock};

#[derive(Debug, Default)]
pub(super) struct LeftAddresses {
    /// Base and size of reservations in which nothing is mapped, and that no work uses.
    reservations: Mutex<Vec<(u64, u64)>>,
}

impl LeftAddresses {
    pub(super) fn add(&self, reservations: impl Iterator<Item = (u64, u64)>) {
        lock(&self.reservations).extend(reservations);
    }

    /// Frees them. What fails stays, and the first error is returned.
    #[expect(unsafe_code, reason = "the driver cannot check that no work uses the addresses")]
    pub(super) fn free(&self, driver: &dyn Driver) -> Result<()> {
        let mut outcome = Ok(());
        let taken = std::mem::take(&mut *lock(&self.reservations));
        for (base, bytes) in taken {
            // SAFETY: mappings are undone only once the streams that used them have passed.
            let freed = unsafe { driver.vm_free_range(DevicePtr(base), bytes) };
            if freed.is_err() {
                lock(&self.reservations).push((base, bytes));
            }
            outcome = outcome.and(freed);
        }
        Ok(outcome?)
    }
}

impl Extension for LeftAddresses {
    fn slot() -> ExtensionSlot {
        ExtensionSlot::Addresses
    }

    fn destroy(&self, driver: &dyn Driver) -> Result<()> {
        self.free(driver)
    }
}
