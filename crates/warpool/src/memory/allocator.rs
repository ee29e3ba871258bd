//! The trait [`DeviceAllocator`] of all allocators of device memory, and the plain data of its calls.
//!
//! It uses addresses and ids, for C callers and replays; [`DeviceBlock`](super::DeviceBlock) is the owned form on top
//! of it. What a caller may rely on is written here alone, so that one suite of tests checks every allocator.

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
    /// The pool; `None` is the one that the calling thread or the stream is routed to, mostly the default pool.
    pub pool: Option<MemPoolId>,
}

impl Request {
    /// `bytes` for `stream` of `device`, from the pool that it is routed to.
    #[must_use]
    pub const fn new(device: DeviceId, stream: StreamId, bytes: u64) -> Self {
        Self { device, stream, bytes, pool: None }
    }

    /// The same request, from that pool.
    #[must_use]
    pub const fn in_pool(mut self, pool: MemPoolId) -> Self {
        self.pool = Some(pool);
        self
    }
}

/// Allocated memory, as plain data: a copy owns nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// Its address. Null if 0 bytes were requested.
    pub ptr: DevicePtr,
    /// Its size, at least the requested one.
    pub bytes: u64,
    /// The requested size.
    pub bytes_requested: u64,
    /// The device.
    pub device: DeviceId,
    /// The stream that it was allocated for.
    pub stream: StreamId,
    /// A number by which its allocator finds it; 0 if that needs none.
    pub slot: u64,
    /// Tells it from earlier allocations of the same memory: those free nothing any more.
    pub generation: u32,
}

/// Physical memory that a block is in, and where it is mapped: to share the block with another process.
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
    /// What a request of 0 bytes gets.
    pub(crate) fn empty(device: DeviceId, stream: StreamId) -> Self {
        Self { ptr: DevicePtr(0), bytes: 0, bytes_requested: 0, device, stream, slot: 0, generation: 0 }
    }
}

/// Shows that a call comes from a graph: only this crate has one.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub struct GraphKey(());

impl GraphKey {
    pub(super) const NEW: Self = Self(());
}

/// What a snapshot contains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SnapshotOptions {
    /// Segments of this pool alone; `None` is all.
    pub pool: Option<MemPoolId>,
    /// Whether it contains the history.
    pub traces: bool,
}

impl Default for SnapshotOptions {
    fn default() -> Self {
        Self { pool: None, traces: true }
    }
}

/// An allocator of device memory, for all devices of one [`Instance`].
///
/// A block is allocated for a stream. Freed, it may be reused for the same stream at once: stream order protects it. A
/// block that other streams used as well ([`record_use_raw`](Self::record_use_raw)) waits for their work first.
///
/// - Every method may be called from any thread at any time, also while a stream captures.
/// - A failed call has no visible effect but on statistics.
/// - Observers are called without any lock held, and may call the allocator.
///
/// # Safety
/// Typed memory is made of what an allocator returns, and safe code writes there. So the implementation promises:
/// - An allocation is device memory of its [`Instance`] from `ptr` on, with at least the requested bytes, as long as it
///   is not freed.
/// - Until it is freed and the work of its streams is done, no other allocation, and nothing else that the program has,
///   overlaps it.
#[expect(unsafe_code, reason = "nothing can check what an implementation returns")]
pub unsafe trait DeviceAllocator: fmt::Debug + Send + Sync {
    /// The name by which it is chosen: `caching`, `driver-pool`.
    fn name(&self) -> &'static str;

    /// The instance whose memory it allocates.
    fn instance(&self) -> &Instance;

    /// Allocates memory. [`Error::OutOfMemory`](crate::Error::OutOfMemory) has a report of the memory that there is.
    fn allocate_raw(&self, request: Request) -> Result<Allocation>;

    /// Frees the allocation that starts at `ptr`; null is ignored.
    /// [`Error::UnknownPointer`](crate::Error::UnknownPointer) if there is none.
    fn free_raw(&self, ptr: DevicePtr) -> Result<()>;

    /// The same for a caller that knows the device: an allocator with a table per device searches only that one.
    fn free_on(&self, device: DeviceId, ptr: DevicePtr) -> Result<()> {
        let _ = device;
        self.free_raw(ptr)
    }

    /// Records that work on `stream` uses the allocation that starts at `ptr`: after its free it is reused only when
    /// the work that the stream holds then is done. Null, and the stream that it was allocated for, are ignored.
    fn record_use_raw(&self, ptr: DevicePtr, stream: StreamId) -> Result<()>;

    /// The allocation that starts at `ptr`.
    fn find(&self, ptr: DevicePtr) -> Result<Allocation>;

    /// As [`free_raw`](Self::free_raw), of an allocation of this allocator that the caller owns.
    fn free(&self, allocation: Allocation) -> Result<()> {
        self.free_raw(allocation.ptr)
    }

    /// The same for destructors: makes no driver call. What needs one is done by a later call.
    fn free_later(&self, allocation: Allocation);

    /// As [`record_use_raw`](Self::record_use_raw), of an allocation that the caller owns.
    fn record_use(&self, allocation: Allocation, stream: StreamId) -> Result<()> {
        self.record_use_raw(allocation.ptr, stream)
    }

    /// The same for destructors, of work that is in these streams and not in a capture: makes no driver call. They are
    /// distinct.
    fn record_uses_later(&self, allocation: Allocation, streams: &[StreamId]) {
        for &stream in streams {
            // It fails only for an allocation that does not exist.
            let _ = self.record_use(allocation, stream);
        }
    }

    /// A graph owns the allocation: until as many calls of [`end_hold`](Self::end_hold), every free of it is
    /// [`Error::HeldByGraph`](crate::Error::HeldByGraph).
    #[doc(hidden)]
    fn hold(&self, allocation: Allocation, key: GraphKey) -> Result<()> {
        let _ = (allocation, key);
        Ok(())
    }

    /// See [`hold`](Self::hold).
    #[doc(hidden)]
    fn end_hold(&self, allocation: Allocation, key: GraphKey) {
        let _ = (allocation, key);
    }

    /// Returns cached memory that nothing uses to the driver. Returns how many bytes. For the default pool, that is its
    /// memory and that of all released private pools; another pool is trimmed only if it is released.
    fn trim(&self, device: DeviceId, pool: MemPoolId) -> Result<u64>;

    /// The largest request that could succeed without waiting or releasing anything: the larger of the device's free
    /// memory and the largest cached block.
    fn largest_available(&self, device: DeviceId) -> Result<u64>;

    /// Limits what it reserves to this share of the device's memory; 1 is no limit.
    /// [`Error::Fraction`](crate::Error::Fraction) outside of [0, 1].
    fn set_memory_fraction(&self, device: DeviceId, fraction: f64) -> Result<()>;

    /// The share that is set.
    fn memory_fraction(&self, device: DeviceId) -> Result<f64>;

    /// The statistics.
    fn stats(&self, device: DeviceId) -> Result<Stats>;

    /// Sets every peak to its current value.
    fn reset_peak_stats(&self, device: DeviceId) -> Result<()>;

    /// Sets accumulated statistics to 0.
    fn reset_accumulated_stats(&self, device: DeviceId) -> Result<()>;

    /// The state of all devices as plain data.
    fn snapshot(&self, options: SnapshotOptions) -> Result<Snapshot>;

    /// Starts to record the history, or stops and clears it (`None`).
    fn record_history(&self, options: Option<HistoryOptions>) -> Result<()>;

    /// Its observers.
    fn observers(&self) -> &Observers;

    /// Its private pools; [`Error::Unsupported`](crate::Error::Unsupported) if it has none.
    fn pools(&self) -> Result<&dyn PrivatePools>;
}
