//! Physical memory that is returned to the driver.

use warpool_driver::PhysicalId;

use super::device::PagedDevice;
use super::pages::PageTable;

/// Releases physical memory; what fails is retried.
pub(super) fn release_physical(device: &PagedDevice, table: &mut PageTable, physical: PhysicalId) {
    if let Err(error) = device.driver().vm_release(physical) {
        tracing::warn!(%error, "physical memory could not be released; it is retried");
        table.to_release.push(physical);
    }
}
