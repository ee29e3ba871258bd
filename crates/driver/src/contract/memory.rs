//! Plain device memory.

use crate::{DeviceId, DevicePtr, Result};

/// The memory of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryInfo {
    /// Bytes that no process uses.
    pub bytes_free: u64,
    /// All bytes.
    pub bytes_total: u64,
}

/// The handle of device memory for other processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct IpcMemoryHandle(pub [u8; 64]);

/// Plain device memory.
pub trait Memory {
    /// Allocates device memory, aligned to 256 bytes at least. Its contents are undefined. `InvalidValue` for 0 bytes,
    /// `OutOfMemory` if there is not enough. Does not wait for running work. *During capture: guarded.*
    fn mem_alloc(&self, device: DeviceId, bytes: u64) -> Result<DevicePtr>;

    /// Frees memory from [`mem_alloc`](Self::mem_alloc) or `pool_alloc`, after waiting for all work of its device.
    /// Freeing null does nothing; any other address that is not the start of an allocation gives `InvalidValue`.
    /// *During capture: guarded.*
    fn mem_free(&self, ptr: DevicePtr) -> Result<()>;

    /// Free and total memory of the device. *During capture: free.*
    fn mem_info(&self, device: DeviceId) -> Result<MemoryInfo>;

    /// The handle of the allocation that starts at `ptr`, for other processes; the same at every call. `InvalidValue`
    /// for any other address, and for mapped memory, which [`vm_export`](crate::VirtualMemory::vm_export) shares.
    /// *During capture: free.*
    fn mem_export(&self, ptr: DevicePtr) -> Result<IpcMemoryHandle>;

    /// Opens memory of another process, and returns where it starts here. It is not to be opened again before it is
    /// [closed](Self::mem_close). Fails in the process that exported it (`InvalidContext`), and for bytes that are no
    /// handle. *During capture: free.*
    fn mem_import(&self, device: DeviceId, handle: &IpcMemoryHandle) -> Result<DevicePtr>;

    /// Closes what [`mem_import`](Self::mem_import) of that device returned, after waiting for all work of the device.
    /// `InvalidValue` for any other address. *During capture: free.*
    fn mem_close(&self, device: DeviceId, ptr: DevicePtr) -> Result<()>;
}
