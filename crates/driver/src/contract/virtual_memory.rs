//! Virtual memory management: addresses are reserved, physical memory is created, and mapped to the addresses. None of
//! these calls waits for the device: work that uses memory when it is unmapped faults.

use crate::platform::OwnedFd;
use crate::{DeviceId, DevicePtr, PhysicalId, Result};

/// Which granularity is queried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Granularity {
    /// The smallest possible.
    Minimum,
    /// The one with the best performance.
    Recommended,
}

/// How physical memory can be shared with other processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShareKind {
    /// As a file descriptor, on this machine.
    PosixFd,
    /// As 64 bytes, between machines of one fabric.
    Fabric,
}

/// Physical memory as another process can import it.
#[derive(Debug)]
pub enum SharedMemory {
    /// A file descriptor; closed when dropped.
    PosixFd(OwnedFd),
    /// A fabric handle.
    Fabric([u8; 64]),
}

/// How physical memory is created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PhysicalOptions {
    /// How it can be exported, if at all.
    pub share: Option<ShareKind>,
    /// Whether other hardware can access it (GPUDirect RDMA).
    pub rdma: bool,
}

/// A device's access to mapped memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// No access.
    None,
    /// Read access.
    Read,
    /// Read and write access.
    ReadWrite,
}

/// The access of one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceAccess {
    /// The device.
    pub device: DeviceId,
    /// Its access.
    pub access: Access,
}

/// Virtual memory.
pub trait VirtualMemory {
    /// The granularity of sizes and addresses. `NotSupported` on a device without virtual memory management. *During
    /// capture: free.*
    fn vm_granularity(&self, device: DeviceId, which: Granularity) -> Result<u64>;

    /// Reserves addresses: `bytes` (a multiple of 2 MiB, not 0), aligned to `align` (a power of two, or 0), at `hint`
    /// if the driver can. `InvalidValue` for other sizes and alignments, `OutOfMemory` if no addresses are left.
    /// *During capture: free.*
    fn vm_reserve(&self, bytes: u64, align: u64, hint: Option<DevicePtr>) -> Result<DevicePtr>;

    /// Frees one whole reservation; `InvalidValue` for a part of one, or while anything is mapped in it. Waits for
    /// nothing. *During capture: free.*
    ///
    /// # Safety
    /// No work that is queued or running uses the range: its addresses may become memory of this process at once.
    unsafe fn vm_free_range(&self, ptr: DevicePtr, bytes: u64) -> Result<()>;

    /// Creates physical memory on `device`: `bytes` (a multiple of the granularity, not 0, else `InvalidValue`).
    /// `OutOfMemory` if there is not enough. *During capture: free.*
    fn vm_create(&self, device: DeviceId, bytes: u64, options: PhysicalOptions) -> Result<PhysicalId>;

    /// Releases the id. The memory is freed when it is not mapped any more. *During capture: free.*
    fn vm_release(&self, physical: PhysicalId) -> Result<()>;

    /// Maps all of `physical` at `ptr`, in reserved and unmapped addresses (else `InvalidValue`; but a driver that
    /// reserved more than requested may accept a mapping beyond the end). It may be mapped at several addresses at
    /// once. No device has access before [`vm_set_access`](Self::vm_set_access). *During capture: free.*
    fn vm_map(&self, ptr: DevicePtr, physical: PhysicalId) -> Result<()>;

    /// Unmaps all that is mapped in `[ptr, ptr + bytes)`, which must contain whole mappings and be in one reservation
    /// (else `InvalidValue`). Waits for nothing. *During capture: free.*
    fn vm_unmap(&self, ptr: DevicePtr, bytes: u64) -> Result<()>;

    /// Sets the access of devices to whole mappings. `InvalidValue` if the range contains a part of one, is not mapped
    /// completely, or a device is unknown, `InvalidDevice` if one of them cannot access the memory. *During capture:
    /// free.*
    fn vm_set_access(&self, ptr: DevicePtr, bytes: u64, access: &[DeviceAccess]) -> Result<()>;

    /// Exports the memory to another process. `InvalidValue` if it was not created for that kind. *During capture:
    /// free.*
    fn vm_export(&self, physical: PhysicalId, kind: ShareKind) -> Result<SharedMemory>;

    /// Imports memory of `bytes` bytes, a size that the driver does not report; the id is like one of
    /// [`vm_create`](Self::vm_create). Fails (`InvalidValue`, or `UnknownError`) for a handle of nothing. With a wrong
    /// size, this call or [`vm_map`](Self::vm_map) fails.
    /// *During capture: free.*
    fn vm_import(&self, device: DeviceId, shared: &SharedMemory, bytes: u64) -> Result<PhysicalId>;
}
