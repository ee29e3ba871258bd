//! Virtual memory by hand: addresses are reserved, physical memory is created, and the one is mapped to the other.
//! None of these calls waits for the device: unmapping under a running kernel makes it fault.

use std::os::fd::OwnedFd;

use crate::{DeviceId, DevicePtr, PhysicalId, Result};

/// Which unit of physical memory is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Granularity {
    /// The least that works.
    Minimum,
    /// The unit that performs best.
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

/// Physical memory in a form that another process can take in.
#[derive(Debug)]
pub enum SharedMemory {
    /// A file descriptor; closed when dropped.
    PosixFd(OwnedFd),
    /// A name in the fabric.
    Fabric([u8; 64]),
}

/// How physical memory is made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PhysicalOptions {
    /// How it will be shared, if it will.
    pub share: Option<ShareKind>,
    /// Whether other hardware must reach it (GPUDirect RDMA).
    pub rdma: bool,
}

/// What a device may do with mapped memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Nothing.
    None,
    /// Read.
    Read,
    /// Read and write.
    ReadWrite,
}

/// One device's rights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceAccess {
    /// Whose.
    pub device: DeviceId,
    /// What it may do.
    pub access: Access,
}

/// Virtual memory.
pub trait VirtualMemory {
    /// The unit that sizes must be multiples of. `NotSupported` on a device without virtual memory. *During capture:
    /// free.*
    fn vm_granularity(&self, device: DeviceId, which: Granularity) -> Result<u64>;

    /// Reserves addresses: `bytes` (a multiple of 2 MiB, not 0), aligned to `align` (a power of two, or 0), at `hint`
    /// if that is given and the driver likes it. Else `InvalidValue`; `OutOfMemory` if the space is used up. *During
    /// capture: free.*
    fn vm_reserve(&self, bytes: u64, align: u64, hint: Option<DevicePtr>) -> Result<DevicePtr>;

    /// Gives back one whole reservation; `InvalidValue` for a part of one, or while anything is mapped in it. Waits for
    /// nothing. *During capture: free.*
    ///
    /// # Safety
    /// No work that is queued or running uses the range: its addresses may become memory of this process at once.
    unsafe fn vm_free_range(&self, ptr: DevicePtr, bytes: u64) -> Result<()>;

    /// Creates physical memory on `device`: `bytes` (a multiple of the granularity, not 0, else
    /// `InvalidValue`). `OutOfMemory` if there is no room. *During capture: free.*
    fn vm_create(&self, device: DeviceId, bytes: u64, options: PhysicalOptions) -> Result<PhysicalId>;

    /// Gives up the id. The memory itself goes when it is mapped nowhere any more. *During capture: free.*
    fn vm_release(&self, physical: PhysicalId) -> Result<()>;

    /// Maps the whole of `physical` at `ptr`, in reserved and unmapped addresses (`InvalidValue`; but a driver that
    /// reserved more than it was asked for may let it reach beyond the end). One piece may be mapped at several
    /// addresses at once. Nobody may touch it before [`vm_set_access`](Self::vm_set_access). *During capture: free.*
    fn vm_map(&self, ptr: DevicePtr, physical: PhysicalId) -> Result<()>;

    /// Unmaps all that is mapped in `[ptr, ptr + bytes)`, which must cut no piece in two and lie in one
    /// reservation (`InvalidValue`). Waits for nothing. *During capture: free.*
    fn vm_unmap(&self, ptr: DevicePtr, bytes: u64) -> Result<()>;

    /// Sets what devices may do with whole mapped pieces. `InvalidValue` if the range cuts one, has a hole, or
    /// names an unknown device, `InvalidDevice` if one of them cannot reach the memory. *During capture: free.*
    fn vm_set_access(&self, ptr: DevicePtr, bytes: u64, access: &[DeviceAccess]) -> Result<()>;

    /// Makes a handle for another process. `InvalidValue` if the piece was not created for that kind. *During capture:
    /// free.*
    fn vm_export(&self, physical: PhysicalId, kind: ShareKind) -> Result<SharedMemory>;

    /// Takes in a handle of memory that is `bytes` long, which its exporter must say since the driver does not; the id
    /// counts like one of [`vm_create`](Self::vm_create). Fails (`InvalidValue`, or `UnknownError` where the driver
    /// says no more) for a handle that names nothing. With a wrong size, this call or [`vm_map`](Self::vm_map) fails.
    /// *During capture: free.*
    fn vm_import(&self, device: DeviceId, shared: &SharedMemory, bytes: u64) -> Result<PhysicalId>;
}
