//! What every allocator of device memory offers: the trait [`DeviceAllocator`], and the plain data of its calls.
//!
//! The trait speaks in addresses and ids, as C callers and recordings do; [`Block`](super::Block) is the owned form on
//! top of it. What a caller may rely on stands here and nowhere else, so that one suite of tests serves all allocators.

use std::fmt;

use warpool_driver::{DeviceId, DevicePtr, StreamId};

use super::{HistoryOptions, MemPoolId, Observers, PoolKeeper, Snapshot, Stats};
use crate::{Instance, Result};

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// On which device.
    pub device: DeviceId,
    /// For work on which stream. Other streams may use it too, but must be [recorded](DeviceAllocator::record_use_raw).
    pub stream: StreamId,
    /// How much. 0 gives the null address, which nobody needs to free.
    pub bytes: u64,
    /// From which pool; `None` is where the calling thread or the stream is routed to, which mostly is the default
    /// pool.
    pub pool: Option<MemPoolId>,
}

impl Request {
    /// `bytes` for `stream` of `device`, from wherever it is routed to.
    #[must_use]
    pub const fn new(device: DeviceId, stream: StreamId, bytes: u64) -> Self {
        Self { device, stream, bytes, pool: None }
    }

    /// From that pool.
    #[must_use]
    pub const fn in_pool(mut self, pool: MemPoolId) -> Self {
        self.pool = Some(pool);
        self
    }
}

/// Memory that somebody has. Plain data: copies of it own nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// Where it starts. Null if nothing was asked for.
    pub ptr: DevicePtr,
    /// How much there is, at least what was asked for.
    pub bytes: u64,
    /// How much was asked for.
    pub bytes_requested: u64,
    /// On which device.
    pub device: DeviceId,
    /// For which stream.
    pub stream: StreamId,
    /// Where its allocator finds it again; a note of the allocator's own, 0 if it needs none.
    pub slot: u64,
}

/// Which part of the state a snapshot shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SnapshotOptions {
    /// Only this pool's segments; `None` is all.
    pub pool: Option<MemPoolId>,
    /// With the history.
    pub traces: bool,
}

impl Default for SnapshotOptions {
    fn default() -> Self {
        Self { pool: None, traces: true }
    }
}

/// An allocator of device memory, for all devices of one [`Instance`].
///
/// A block is given for a stream. Freed, it may be given out again for the same stream at once: stream order protects
/// it. A block that other streams used as well ([`record_use_raw`](Self::record_use_raw)) waits for their work first.
///
/// - Every method may be called from any thread, at any time, also while a stream captures.
/// - A failed call changes nothing that a caller could see, but for counters.
/// - Observers are called without any lock held, and may call the allocator.
pub trait DeviceAllocator: fmt::Debug + Send + Sync {
    /// The name that it is chosen by: `caching`, `driver-pool`.
    fn name(&self) -> &'static str;

    /// Whose memory it manages.
    fn instance(&self) -> &Instance;

    /// Gives out memory. [`Error::OutOfMemory`](crate::Error::OutOfMemory) has a report of what was tried.
    fn allocate_raw(&self, request: Request) -> Result<Allocation>;

    /// Takes back what starts at `ptr`. Null is nothing. [`Error::UnknownPointer`](crate::Error::UnknownPointer) if
    /// nothing does.
    fn free_raw(&self, ptr: DevicePtr) -> Result<()>;

    /// The same, by a caller who knows the device: allocators that keep books per device look only there.
    fn free_on(&self, device: DeviceId, ptr: DevicePtr) -> Result<()> {
        let _ = device;
        self.free_raw(ptr)
    }

    /// Notes that `stream` uses what starts at `ptr`: it is not given out again before the work that is in the stream
    /// when it is freed is done. Null, and the stream that it was allocated for, are nothing.
    fn record_use_raw(&self, ptr: DevicePtr, stream: StreamId) -> Result<()>;

    /// What starts at `ptr` and is given out.
    fn find(&self, ptr: DevicePtr) -> Result<Allocation>;

    /// As [`free_raw`](Self::free_raw), of an allocation that this allocator made and the caller owns.
    fn free(&self, allocation: Allocation) -> Result<()> {
        self.free_raw(allocation.ptr)
    }

    /// The same for destructors: calls no driver. What needs the driver is done by a later call.
    fn free_later(&self, allocation: Allocation);

    /// As [`record_use_raw`](Self::record_use_raw), of an allocation that the caller owns.
    fn record_use(&self, allocation: Allocation, stream: StreamId) -> Result<()> {
        self.record_use_raw(allocation.ptr, stream)
    }

    /// Gives cached memory back to the driver, as far as nothing of it is in use, and returns how many bytes. The
    /// default pool stands for itself and for all private pools that nobody uses any more; another pool is touched only
    /// if nobody uses it any more.
    fn trim(&self, device: DeviceId, pool: MemPoolId) -> Result<u64>;

    /// The largest request that could be met without waiting or giving anything back: the larger of what the device has
    /// free and the largest cached block.
    fn largest_available(&self, device: DeviceId) -> Result<u64>;

    /// Limits what it holds from the device to this share of its memory; 1 is no limit.
    /// [`Error::Fraction`](crate::Error::Fraction) outside of [0, 1].
    fn set_memory_fraction(&self, device: DeviceId, fraction: f64) -> Result<()>;

    /// The share that is set.
    fn memory_fraction(&self, device: DeviceId) -> Result<f64>;

    /// The counters.
    fn stats(&self, device: DeviceId) -> Result<Stats>;

    /// Makes every peak what is now.
    fn reset_peak_stats(&self, device: DeviceId) -> Result<()>;

    /// Zeroes what was counted up.
    fn reset_accumulated_stats(&self, device: DeviceId) -> Result<()>;

    /// The state as plain data, of all devices.
    fn snapshot(&self, options: SnapshotOptions) -> Result<Snapshot>;

    /// Starts to write down what happens, or stops it and forgets what was written (`None`).
    fn record_history(&self, options: Option<HistoryOptions>) -> Result<()>;

    /// Who is told what happens.
    fn observers(&self) -> &Observers;

    /// Its private pools; [`Error::Unsupported`](crate::Error::Unsupported) if it has none.
    fn pools(&self) -> Result<&dyn PoolKeeper>;
}
