//! The trait [`DeviceAllocator`], which every device allocator implements, and the plain data types of its calls.
//!
//! The trait uses addresses and ids, for C callers and replays; [`DeviceBlock`](super::DeviceBlock) is the owning
//! wrapper. The contract is documented only here, and one conformance suite tests every allocator against it.

use std::fmt;

use warpool_driver::{DeviceId, DevicePtr, PhysicalId, StreamId};

use super::{HistoryOptions, MemPoolId, Observers, PrivatePools, Snapshot, Stats};
use crate::{Instance, Result};

/// A request for memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// The device.
    pub device: DeviceId,
    /// The stream whose work uses it. Uses on other streams must be [recorded](DeviceAllocator::record_use_raw).
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

/// An allocator of device memory, for all devices of one [`Instance`].
///
/// A block is allocated for a stream. Once freed, it may be reused on the same stream immediately, because stream order
/// protects it. A block that other streams used as well ([`record_use_raw`](Self::record_use_raw)) is reused only after
/// their work is done.
///
/// - Every method may be called from any thread at any time, even while a stream is capturing.
/// - A failed call has no visible effect except on statistics.
/// - Observers are called without any lock held, and may call the allocator.
///
/// # Safety
/// Typed buffers are built on the returned memory, and safe code writes to it. The implementation must guarantee:
/// - Until it is freed, an allocation is device memory of its [`Instance`] that starts at `ptr` and has at least the
///   requested size.
/// - Until it is freed and the work of its streams is done, no other allocation and no other memory of the program
///   overlaps it.
#[expect(unsafe_code, reason = "nothing can check what an implementation returns")]
pub unsafe trait DeviceAllocator: fmt::Debug + Send + Sync {
    /// The name that selects this allocator, such as `caching` or `driver-pool`.
    fn name(&self) -> &'static str;

    /// The instance whose memory it allocates.
    fn instance(&self) -> &Instance;

    /// Allocates memory. [`Error::OutOfMemory`](crate::Error::OutOfMemory) carries a report of the device's memory.
    fn allocate_raw(&self, request: Request) -> Result<Allocation>;

    /// Frees the allocation that starts at `ptr`; null is ignored.
    /// [`Error::UnknownPointer`](crate::Error::UnknownPointer) if there is none.
    fn free_raw(&self, ptr: DevicePtr) -> Result<()>;

    /// As [`free_raw`](Self::free_raw), for a caller that knows the device: an allocator with a table per device
    /// searches only that table.
    fn free_on(&self, device: DeviceId, ptr: DevicePtr) -> Result<()> {
        let _ = device;
        self.free_raw(ptr)
    }

    /// Records that work on `stream` uses the allocation that starts at `ptr`. Its memory is then reused only after the
    /// work that the stream holds at the time of the free is done. Null, and the stream that the allocation was made
    /// for, are ignored.
    fn record_use_raw(&self, ptr: DevicePtr, stream: StreamId) -> Result<()>;

    /// The allocation that starts at `ptr`.
    fn find(&self, ptr: DevicePtr) -> Result<Allocation>;

    /// As [`free_raw`](Self::free_raw), for an allocation of this allocator that the caller owns.
    fn free(&self, allocation: Allocation) -> Result<()> {
        self.free_raw(allocation.ptr)
    }

    /// As [`free`](Self::free), for destructors: makes no driver call, and leaves any that are needed to a later call.
    fn free_later(&self, allocation: Allocation);

    /// As [`record_use_raw`](Self::record_use_raw), for an allocation that the caller owns.
    fn record_use(&self, allocation: Allocation, stream: StreamId) -> Result<()> {
        self.record_use_raw(allocation.ptr, stream)
    }

    /// As [`record_use`](Self::record_use), for destructors: makes no driver call. The streams are distinct, and their
    /// work is not part of a capture.
    fn record_uses_later(&self, allocation: Allocation, streams: &[StreamId]) {
        for &stream in streams {
            // It fails only for an allocation that does not exist.
            let _ = self.record_use(allocation, stream);
        }
    }

    /// Records that a graph owns the allocation. Freeing it fails with
    /// [`Error::HeldByGraph`](crate::Error::HeldByGraph) until every `hold` is matched by an
    /// [`end_hold`](Self::end_hold).
    #[doc(hidden)]
    fn hold(&self, allocation: Allocation, key: GraphKey) -> Result<()> {
        let _ = (allocation, key);
        Ok(())
    }

    /// Ends one [`hold`](Self::hold).
    #[doc(hidden)]
    fn end_hold(&self, allocation: Allocation, key: GraphKey) {
        let _ = (allocation, key);
    }

    /// Returns unused cached memory to the driver, and returns the number of bytes. For the default pool, this includes
    /// the memory of all released private pools. A private pool is trimmed only if it is released.
    fn trim(&self, device: DeviceId, pool: MemPoolId) -> Result<u64>;

    /// The largest request that could succeed without waiting or releasing anything: the larger of the device's free
    /// memory and the largest cached block.
    fn largest_available(&self, device: DeviceId) -> Result<u64>;

    /// Limits reserved memory to this fraction of the device's memory; 1 is no limit.
    /// [`Error::Fraction`](crate::Error::Fraction) outside of [0, 1].
    fn set_memory_fraction(&self, device: DeviceId, fraction: f64) -> Result<()>;

    /// The fraction that is set.
    fn memory_fraction(&self, device: DeviceId) -> Result<f64>;

    /// The statistics of a device.
    fn stats(&self, device: DeviceId) -> Result<Stats>;

    /// Resets every peak to the current value.
    fn reset_peak_stats(&self, device: DeviceId) -> Result<()>;

    /// Resets the accumulated statistics to 0.
    fn reset_accumulated_stats(&self, device: DeviceId) -> Result<()>;

    /// The state of all devices as plain data.
    fn snapshot(&self, options: SnapshotOptions) -> Result<Snapshot>;

    /// Starts recording the history, or stops and clears it (`None`).
    fn record_history(&self, options: Option<HistoryOptions>) -> Result<()>;

    /// The observers of this allocator.
    fn observers(&self) -> &Observers;

    /// Its private pools; [`Error::Unsupported`](crate::Error::Unsupported) if it has none.
    fn pools(&self) -> Result<&dyn PrivatePools>;
}
