//! Pinned host memory: memory of this process that the device can access.

use crate::{DeviceId, DevicePtr, HostPtr, HostRange, Result};

/// How host memory is pinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostOptions {
    /// Pinned for the contexts of all devices, not only of the one that it was pinned with.
    pub portable: bool,
    /// Accessible for kernels at [`HostMemory::host_device_ptr`].
    pub mapped: bool,
    /// Faster to write over the bus, very slow to read on the host. Not for registered memory.
    pub write_combined: bool,
}

impl Default for HostOptions {
    fn default() -> Self {
        Self { portable: true, mapped: true, write_combined: false }
    }
}

/// Pinned host memory.
///
/// The host accesses it through [`host_read`](Self::host_read) and [`host_write`](Self::host_write), which check the
/// range; the simulated device also reports work that still uses it. Code that dereferences the address itself is
/// unsafe code of the caller.
pub trait HostMemory {
    /// Allocates pinned memory, with `device`'s context. `InvalidValue` for 0 bytes, `OutOfMemory` if there is not
    /// enough memory. *During capture: guarded.*
    fn host_alloc(&self, device: DeviceId, bytes: u64, options: HostOptions) -> Result<HostPtr>;

    /// Frees memory from [`host_alloc`](Self::host_alloc), after waiting for all work of its device. `InvalidValue` for
    /// any other address. *During capture: guarded.*
    fn host_free(&self, ptr: HostPtr) -> Result<()>;

    /// Pins existing memory, and keeps it claimed while it is pinned ([`HostRange::claim`]).
    /// `HostMemoryAlreadyRegistered` if any of it is pinned, `InvalidValue` for 0 bytes, `NotSupported` on a device
    /// without registration. *During capture: guarded.*
    fn host_register(&self, device: DeviceId, range: HostRange, options: HostOptions) -> Result<()>;

    /// Unpins a registered range by its start, after waiting for all work of its device. If it fails, the range stays
    /// pinned and claimed. `HostMemoryNotRegistered` if it is not pinned, `InvalidValue` for an address inside a range.
    /// *During capture: guarded.*
    fn host_unregister(&self, ptr: HostPtr) -> Result<()>;

    /// The device address of pinned memory, for any address in it. `InvalidValue` if it is not pinned.
    /// *During capture: free.*
    fn host_device_ptr(&self, device: DeviceId, ptr: HostPtr) -> Result<DevicePtr>;

    /// Reads pinned memory on the host. `InvalidValue` if the range is not pinned. Does not wait: each byte that the
    /// device writes meanwhile has its old or its new value. *During capture: free.*
    fn host_read(&self, ptr: HostPtr, into: &mut [u8]) -> Result<()>;

    /// Writes pinned memory on the host. `InvalidValue` if the range is not pinned. Waits for nothing. *During capture:
    /// free.*
    fn host_write(&self, ptr: HostPtr, bytes: &[u8]) -> Result<()>;
}
