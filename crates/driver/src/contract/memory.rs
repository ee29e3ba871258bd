//! Plain device memory.

use crate::{DeviceId, DevicePtr, Result};

/// What a device has left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryInfo {
    /// Bytes that nobody holds; other processes count too.
    pub bytes_free: u64,
    /// Bytes in all.
    pub bytes_total: u64,
}

/// Plain device memory.
pub trait Memory {
    /// Allocates device memory, aligned to 256 bytes at least. Its contents are undefined. `InvalidValue` for 0 bytes,
    /// `OutOfMemory` if there is no room. Does not wait for running work. *During capture: guarded.*
    fn mem_alloc(&self, device: DeviceId, bytes: u64) -> Result<DevicePtr>;

    /// Frees what [`mem_alloc`](Self::mem_alloc) or `pool_alloc` gave, after waiting for all work of its device.
    /// Freeing null does nothing; any other address that starts no live allocation gives `InvalidValue`. *During
    /// capture: guarded.*
    fn mem_free(&self, ptr: DevicePtr) -> Result<()>;

    /// How much memory the device has left. *During capture: free.*
    fn mem_info(&self, device: DeviceId) -> Result<MemoryInfo>;
}
