//! Virtual memory for checks: address ranges and physical allocations in units of one granule. What is created here is
//! cleaned up after the check.

use warpool_driver::{Access, DeviceAccess, DevicePtr, PhysicalId, PhysicalOptions, ShareKind, SharedMemory};

use super::TestContext;
use super::cleanup::Resource;
use crate::expect::{CheckResult, require};

/// Creates and maps virtual memory in granules.
pub struct VmContext<'a> {
    context: &'a TestContext,
    /// The size of one granule in bytes.
    pub granule: u64,
}

impl<'a> VmContext<'a> {
    /// On the context's device. Skips the check if that has no virtual memory.
    pub fn new(context: &'a TestContext) -> CheckResult<Self> {
        let properties = context.properties()?;
        require(properties.virtual_memory, "the device has no virtual memory management")?;
        // Reservations come in units of 2 MiB, whatever the granularity of physical memory is.
        Ok(Self { context, granule: properties.granularity.max(2 << 20) })
    }

    /// Reserves addresses for `n` granules.
    pub fn reserve(&self, n: u64) -> CheckResult<DevicePtr> {
        let ptr = self.context.driver.vm_reserve(n * self.granule, 0, None)?;
        self.context.track(Resource::AddressRange(ptr, n * self.granule));
        Ok(ptr)
    }

    /// Physical memory of `n` granules.
    pub(crate) fn create_with(&self, n: u64, options: PhysicalOptions) -> CheckResult<PhysicalId> {
        let physical = self.context.driver.vm_create(self.context.device_id, n * self.granule, options)?;
        self.context.track(Resource::Physical(physical));
        Ok(physical)
    }

    pub(crate) fn create(&self, n: u64) -> CheckResult<PhysicalId> {
        self.create_with(n, PhysicalOptions::default())
    }

    /// Skips the check unless memory can be shared as a file descriptor.
    pub(crate) fn require_file_descriptors(&self) -> CheckResult {
        require(self.context.properties()?.share_posix_fd, "the device shares no memory by file descriptor")
    }

    /// One granule of physical memory, exported as a file descriptor. Skips the check where that is not supported.
    pub fn create_shared(&self) -> CheckResult<(PhysicalId, SharedMemory)> {
        self.require_file_descriptors()?;
        let physical = self.create_with(1, PhysicalOptions { share: Some(ShareKind::PosixFd), rdma: false })?;
        Ok((physical, self.context.driver.vm_export(physical, ShareKind::PosixFd)?))
    }

    /// Maps physical memory of `n` granules at granule `index` of a range.
    pub fn map(&self, range: DevicePtr, index: u64, physical: PhysicalId, n: u64) -> CheckResult<DevicePtr> {
        let ptr = self.at(range, index);
        self.context.driver.vm_map(ptr, physical)?;
        self.context.track(Resource::Mapping(ptr, n * self.granule));
        Ok(ptr)
    }

    pub(crate) fn unmap(&self, ptr: DevicePtr, n: u64) -> CheckResult {
        self.context.untrack(Resource::Mapping(ptr, n * self.granule));
        Ok(self.context.driver.vm_unmap(ptr, n * self.granule)?)
    }

    /// The address of granule `index` of a range.
    pub(crate) fn at(&self, range: DevicePtr, index: u64) -> DevicePtr {
        range.offset(index * self.granule)
    }

    pub(crate) fn set_access(&self, ptr: DevicePtr, bytes: u64, access: Access) -> warpool_driver::Result<()> {
        let access = DeviceAccess { device: self.context.device_id, access };
        self.context.driver.vm_set_access(ptr, bytes, &[access])
    }

    /// Lets the device read and write `n` granules.
    pub fn allow_access(&self, ptr: DevicePtr, n: u64) -> CheckResult {
        Ok(self.set_access(ptr, n * self.granule, Access::ReadWrite)?)
    }

    /// One granule, mapped and accessible.
    pub(crate) fn create_mapped(&self) -> CheckResult<(DevicePtr, PhysicalId)> {
        let physical = self.create(1)?;
        let ptr = self.map(self.reserve(1)?, 0, physical, 1)?;
        self.allow_access(ptr, 1)?;
        Ok((ptr, physical))
    }
}
