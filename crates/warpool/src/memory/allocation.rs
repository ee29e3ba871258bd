//! The plain data types of a device allocator's calls.

use warpool_driver::{DeviceId, DevicePtr, PhysicalId, StreamId};

use super::MemPoolId;

/// A request for memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// The device.
    pub device: DeviceId,
    /// The stream whose work uses it. Uses on other streams must be [recorded](super::DeviceAllocator::record_use_raw).
    pub stream: StreamId,
    /// The size. 0 gives the null address, which need not be freed.
    pub bytes: u64,
    /// The pool; `None` uses the pool that the calling thread or the stream is routed to, usually the default pool.
    pub pool: Option<MemPoolId>,
}

impl Request {
    /// A request for `bytes` on `stream` of `device`, from the pool that the thread or stream is routed to.
    #[must_use]
    pub const fn new(device: DeviceId, stream: StreamId, bytes: u64) -> Self {
        Self { device, stream, bytes, pool: None }
    }

    /// The same request from `pool`.
    #[must_use]
    pub const fn in_pool(mut self, pool: MemPoolId) -> Self {
        self.pool = Some(pool);
        self
    }
}

/// An allocation as plain data. It owns nothing: copying or dropping it has no effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// Its address. Null if 0 bytes were requested.
    pub ptr: DevicePtr,
    /// The block's size, at least the requested size.
    pub bytes: u64,
    /// The requested size.
    pub bytes_requested: u64,
    /// The device.
    pub device: DeviceId,
    /// The stream that it was allocated for.
    pub stream: StreamId,
    /// An index that lets the allocator find the block without a search; 0 if the allocator does not use one.
    pub slot: u64,
    /// Distinguishes it from earlier allocations of the same memory. Freeing a stale one has no effect.
    pub generation: u32,
}

/// Physical memory that backs part of a block, and the address where it is mapped. For sharing the block with another
/// process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MappedPart {
    /// Its address.
    pub ptr: DevicePtr,
    /// Its size.
    pub bytes: u64,
    /// The physical memory.
    pub physical: PhysicalId,
}

impl Allocation {
    /// The result of a request for 0 bytes.
    pub(crate) fn empty(device: DeviceId, stream: StreamId) -> Self {
        Self { ptr: DevicePtr(0), bytes: 0, bytes_requested: 0, device, stream, slot: 0, generation: 0 }
    }
}

/// Proves that a call comes from a graph: only this crate can construct one.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub struct GraphKey(());

impl GraphKey {
    pub(super) const NEW: Self = Self(());
}

/// What a snapshot contains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SnapshotOptions {
    /// Include only segments of this pool; `None` includes all.
    pub pool: Option<MemPoolId>,
    /// Whether to include the history.
    pub traces: bool,
}

impl Default for SnapshotOptions {
    fn default() -> Self {
        Self { pool: None, traces: true }
    }
}
