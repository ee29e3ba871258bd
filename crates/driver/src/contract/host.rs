//! Pinned host memory: memory of this process that the device can reach.

use crate::{DeviceId, DevicePtr, HostPtr, HostRange, Result};

/// How host memory is pinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostOptions {
    /// Pinned for every device's context, not only for the one that it was made with.
    pub portable: bool,
    /// Reachable for kernels at [`HostMemory::host_device_ptr`].
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
/// The host touches it through [`host_read`](Self::host_read) and [`host_write`](Self::host_write), which check the
/// range and, on the simulated device, that no work on the device still uses it. Code that needs the bytes themselves
/// makes a pointer of the address, and takes on what that means.
pub trait HostMemory {
    /// Allocates pinned memory, with `device`'s context. `InvalidValue` for 0 bytes, `OutOfMemory` if it cannot be had.
    /// *During capture: guarded.*
    fn host_alloc(&self, device: DeviceId, bytes: u64, options: HostOptions) -> Result<HostPtr>;

    /// Frees what [`host_alloc`](Self::host_alloc) gave, after waiting for all work of its device. Any other address
    /// gives `InvalidValue`. *During capture: guarded.*
    fn host_free(&self, ptr: HostPtr) -> Result<()>;

    /// Pins memory where it is, and keeps it while it is pinned ([`HostRange::keep`]). `HostMemoryAlreadyRegistered` if
    /// any of it is pinned, `InvalidValue` for 0 bytes, `NotSupported` on a device that cannot. *During capture:
    /// guarded.*
    fn host_register(&self, device: DeviceId, range: HostRange, options: HostOptions) -> Result<()>;

    /// Unpins a range by its start, after waiting for all work of its device, and lets it go. If it fails, the range
    /// stays pinned and kept. `HostMemoryNotRegistered` if it is not pinned, `InvalidValue` inside a range. *During
    /// capture: guarded.*
    fn host_unregister(&self, ptr: HostPtr) -> Result<()>;

    /// Where kernels of `device` find pinned memory; works for any address in it. `InvalidValue` if it is not pinned.
    /// *During capture: free.*
    fn host_device_ptr(&self, device: DeviceId, ptr: HostPtr) -> Result<DevicePtr>;

    /// Reads pinned memory on the host. `InvalidValue` if the range is not pinned. Waits for nothing: of bytes that the
    /// device writes meanwhile, each is old or new. *During capture: free.*
    fn host_read(&self, ptr: HostPtr, into: &mut [u8]) -> Result<()>;

    /// Writes pinned memory on the host. `InvalidValue` if the range is not pinned. Waits for nothing. *During capture:
    /// free.*
    fn host_write(&self, ptr: HostPtr, bytes: &[u8]) -> Result<()>;
}
