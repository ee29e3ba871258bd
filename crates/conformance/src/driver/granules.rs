//! Memory mapped by hand, in pieces of one granule: what a check makes of it here is taken away behind it.

use super::bench::Bench;
use super::owned::Owned;
use crate::expect::{Checked, need};
use warpool_driver::{Access, DeviceAccess, DevicePtr, PhysicalId, PhysicalOptions, ShareKind, SharedMemory};

/// Pieces of one granule, and the hands to map them.
pub struct Granules<'a> {
    bench: &'a Bench<'a>,
    /// The bytes of one.
    pub bytes: u64,
}

impl<'a> Granules<'a> {
    /// Those of the bench's device, or a skip.
    pub fn new(bench: &'a Bench<'a>) -> Checked<Self> {
        let properties = bench.properties()?;
        need(properties.virtual_memory, "the device maps no memory by hand")?;
        // Reservations come in units of 2 MiB, whatever the granularity of memory is.
        Ok(Self { bench, bytes: properties.granularity.max(2 << 20) })
    }

    /// Addresses for `n` pieces.
    pub fn reserve(&self, n: u64) -> Checked<DevicePtr> {
        let ptr = self.bench.driver.vm_reserve(n * self.bytes, 0, None)?;
        self.bench.own(Owned::Range(ptr, n * self.bytes));
        Ok(ptr)
    }

    pub(super) fn create(&self, n: u64, options: PhysicalOptions) -> Checked<PhysicalId> {
        let physical = self.bench.driver.vm_create(self.bench.device, n * self.bytes, options)?;
        self.bench.own(Owned::Physical(physical));
        Ok(physical)
    }

    pub(super) fn piece(&self) -> Checked<PhysicalId> {
        self.create(1, PhysicalOptions::default())
    }

    /// Skips unless memory can be shared as a file descriptor.
    pub(super) fn need_file_descriptors(&self) -> Checked {
        need(self.bench.properties()?.share_posix_fd, "the device shares no memory by file descriptor")
    }

    /// A piece and the file descriptor that carries it, or a skip.
    pub fn shared(&self) -> Checked<(PhysicalId, SharedMemory)> {
        self.need_file_descriptors()?;
        let physical = self.create(1, PhysicalOptions { share: Some(ShareKind::PosixFd), rdma: false })?;
        Ok((physical, self.bench.driver.vm_export(physical, ShareKind::PosixFd)?))
    }

    /// Maps a piece of `n` granules at granule `at` of a range.
    pub fn map(&self, range: DevicePtr, at: u64, physical: PhysicalId, n: u64) -> Checked<DevicePtr> {
        let ptr = self.at(range, at);
        self.bench.driver.vm_map(ptr, physical)?;
        self.bench.own(Owned::Mapping(ptr, n * self.bytes));
        Ok(ptr)
    }

    pub(super) fn unmap(&self, ptr: DevicePtr, n: u64) -> Checked {
        self.bench.disown(Owned::Mapping(ptr, n * self.bytes));
        Ok(self.bench.driver.vm_unmap(ptr, n * self.bytes)?)
    }

    pub(super) fn at(&self, range: DevicePtr, granule: u64) -> DevicePtr {
        range.offset(granule * self.bytes)
    }

    pub(super) fn set_access(&self, ptr: DevicePtr, bytes: u64, access: Access) -> warpool_driver::Result<()> {
        self.bench.driver.vm_set_access(ptr, bytes, &[DeviceAccess { device: self.bench.device, access }])
    }

    /// Lets the device read and write `n` granules.
    pub fn open(&self, ptr: DevicePtr, n: u64) -> Checked {
        Ok(self.set_access(ptr, n * self.bytes, Access::ReadWrite)?)
    }

    /// One granule, mapped and open.
    pub(super) fn mapped(&self) -> Checked<(DevicePtr, PhysicalId)> {
        let physical = self.piece()?;
        let ptr = self.map(self.reserve(1)?, 0, physical, 1)?;
        self.open(ptr, 1)?;
        Ok((ptr, physical))
    }
}
