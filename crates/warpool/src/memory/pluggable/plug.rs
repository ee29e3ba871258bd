//! What memory can come from: the trait [`ExternalAllocator`]. It is PyTorch's ABI of a pluggable allocator, as a trait: two
//! functions that must be there, and hooks.

use warpool_driver::{DeviceId, DevicePtr, RawHandle, StreamId};

use crate::Result;
use crate::memory::MemPoolId;

/// Somebody else's functions that give and take device memory. A Rust type can be one, closures can
/// ([`FnAllocator`](super::FnAllocator)), and C functions of a shared object (the crate `warpool-external`).
///
/// - Every method may be called from any thread, also at the same time.
/// - No lock is held while one runs, and the calling thread is in the relaxed capture mode: what it asks the driver for
///   breaks no capture.
/// - A panic goes on to whoever called the allocator. The books are right afterwards; memory that was on its way counts
///   as given back.
pub trait ExternalAllocator: Send + Sync {
    /// `bytes` of device memory for work on `stream`; more than 0 are asked for. `None`, or the null address, is out of
    /// memory.
    ///
    /// The memory may be in use by earlier work of that stream alone: stream order has to protect it.
    fn allocate(&self, bytes: u64, device: DeviceId, stream: RawStream) -> Result<Option<DevicePtr>>;

    /// Takes back what [`allocate`](Self::allocate) gave, with the same size, device and stream. Work of that stream
    /// may still use it. If the stream is gone by now, the devices have been waited for, and the device's default
    /// stream is named instead.
    ///
    /// An error says that it was not taken back. A [`PluggableAllocator`](super::PluggableAllocator) passes that on and
    /// is rid of it all the same; a pool on top of a [`ExternalUpstream`](super::ExternalUpstream) keeps it.
    fn free(&self, ptr: DevicePtr, bytes: u64, device: DeviceId, stream: RawStream) -> Result<()>;

    /// Called once for each allocator or upstream that is made of it, before anything else.
    fn init(&self, device_count: u32) -> Result<()> {
        let _ = device_count;
        Ok(())
    }

    /// Give back to the driver what is kept only for later: when the allocator is trimmed, and before a request that
    /// found nothing is tried once more. Not while captures are under way, since it may wait for the device.
    fn reset(&self) {}

    /// The share of the device's memory that may be used was set. It is kept by the allocator's books in any case.
    fn memory_fraction(&self, fraction: f64, device: DeviceId) {
        let _ = (fraction, device);
    }

    /// The allocation that `ptr`, which may lie inside of it, belongs to; `None` leaves the answer to the books.
    fn base_allocation(&self, ptr: DevicePtr) -> Option<BaseAllocation> {
        let _ = ptr;
        None
    }

    /// `stream` uses the memory at `ptr` too. [`Handled::Yes`] promises that it is not given out again before the work
    /// that is in that stream when it is freed is done. By default the allocator sees to it: it frees later.
    fn record_stream(&self, ptr: DevicePtr, stream: RawStream) -> Handled {
        let _ = (ptr, stream);
        Handled::No
    }

    /// Requests are routed to a pool from here on. Which they are, the allocator knows: it decides for each, and keeps
    /// the pool beside each block.
    fn begin_pool(&self, device: DeviceId, pool: MemPoolId) {
        let _ = (device, pool);
    }

    /// No more.
    fn end_pool(&self, device: DeviceId, pool: MemPoolId) {
        let _ = (device, pool);
    }

    /// The pool has lost its last user. As often as it was begun, since plugs count.
    fn release_pool(&self, device: DeviceId, pool: MemPoolId) {
        let _ = (device, pool);
    }
}

/// A stream, as Warpool knows it and as C functions want it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawStream {
    /// Its name for the driver contract.
    pub id: StreamId,
    /// The driver's own handle: a `CUstream`.
    pub raw: RawHandle,
}

/// An allocation that some address lies in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BaseAllocation {
    /// Where it starts.
    pub ptr: DevicePtr,
    /// How much it is, if that is known.
    pub bytes: Option<u64>,
}

/// Whether a plug takes care of something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Handled {
    /// It does.
    Yes,
    /// It does not: the allocator has to.
    No,
}
