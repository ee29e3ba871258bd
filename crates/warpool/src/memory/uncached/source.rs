//! The source of memory of an [`UncachedAllocator`](super::UncachedAllocator): the trait [`Source`], implemented by the
//! driver's pool and by external allocators.

use warpool_driver::{DeviceId, DevicePtr, StreamId};

use super::pools::PoolEvent;
use crate::memory::{Handled, OomCause, RawStream};
use crate::{Error, Result};

/// A source of device memory. It determines how a free is ordered after the work that uses the memory.
pub trait Source: Send + Sync {
    /// The name of the allocator over it.
    const NAME: &'static str;

    /// Whether the source orders frees itself: [`free`](Self::free) is enqueued in a stream, like a kernel, and streams
    /// that used the block are joined by stream waits. Otherwise a block is freed only once fences in the other streams
    /// that used it have passed, and never in a capture.
    const STREAM_ORDERED: bool;

    /// Whether the allocator has private pools.
    const PRIVATE_POOLS: bool;

    /// Sizes are rounded up to a multiple of this.
    const GRANULARITY: u64;

    /// The cause to report if the source could not serve a request.
    const OOM_CAUSE: OomCause;

    /// `bytes` of memory for work on `stream`; `None` means out of memory.
    fn allocate(&self, device: DeviceId, bytes: u64, stream: RawStream) -> Result<Option<DevicePtr>>;

    /// Frees a block after the work of `stream`. The calling thread is in the relaxed capture mode.
    fn free(&self, ptr: DevicePtr, bytes: u64, device: DeviceId, stream: RawStream) -> Result<()>;

    /// The stream for frees that cannot be put into the block's own stream.
    fn release_stream(&self, device: DeviceId) -> Result<StreamId>;

    /// Returns cached memory of the source to the driver. `capturing` is true if a capture may be active.
    fn trim(&self, device: DeviceId, capturing: bool) -> Result<()>;

    /// Waits for frees that were enqueued in streams. Returns whether there were any.
    fn wait_for_frees(&self, device: DeviceId) -> Result<bool> {
        let _ = device;
        Ok(false)
    }

    /// After a request has finally failed: returns the memory that the source took from the driver for it.
    fn undo_growth(&self, device: DeviceId) -> Result<()> {
        let _ = device;
        Ok(())
    }

    /// The memory that the source holds; `None` if that is exactly the allocated blocks.
    fn reserved(&self, device: DeviceId) -> Result<Option<Reserved>> {
        let _ = device;
        Ok(None)
    }

    /// Sets the peak of [`reserved`](Self::reserved) to the current value.
    fn reset_peak(&self, device: DeviceId) -> Result<()> {
        let _ = device;
        Ok(())
    }

    /// Records that `stream` uses the block at `ptr` too. Returns whether the source delays the block's reuse itself.
    fn record_use(&self, ptr: DevicePtr, stream: RawStream) -> Result<Handled> {
        let _ = (ptr, stream);
        Ok(Handled::No)
    }

    /// Lets kernels on `device` access the source's memory on `owner`, present and future.
    fn enable_peer_access(&self, device: DeviceId, owner: DeviceId) -> Result<()> {
        let _ = (device, owner);
        Err(Error::Unsupported { allocator: Self::NAME, what: "peer access" })
    }

    /// Called when the memory fraction was set.
    fn set_memory_fraction(&self, device: DeviceId, fraction: f64) -> Result<()> {
        let _ = (device, fraction);
        Ok(())
    }

    /// Called for each event of a private pool.
    fn pool_event(&self, device: DeviceId, event: PoolEvent) -> Result<()> {
        let _ = (device, event);
        Ok(())
    }
}

/// Bytes that a source holds from the driver.
#[derive(Clone, Copy, Debug, Default)]
pub struct Reserved {
    pub(super) current: u64,
    pub(super) peak: u64,
}
