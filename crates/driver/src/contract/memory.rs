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
}
