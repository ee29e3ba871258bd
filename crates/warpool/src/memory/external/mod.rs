//! External allocators: device memory from a user's functions. A Rust type, closures ([`FnAllocator`]) or C functions
//! written for PyTorch's `CUDAPluggableAllocator` (the crate `warpool-external`).
//!
//! ```
//! # use std::sync::Arc;
//! # use warpool::driver::sim::{SimConfig, SimDriver};
//! # use warpool::prelude::*;
//! use warpool::driver::{DeviceId, DevicePtr, Driver};
//! use warpool::memory::external::{BaseAllocation, ExternalAllocator, ExternalUpstream, Handled, RawStream};
//! use warpool::memory::pools::{MemPool, PoolOptions};
//! use warpool::memory::PluggableAllocator;
//!
//! # fn main() -> warpool::Result<()> {
//! # let instance = Instance::new(Arc::new(SimDriver::new(SimConfig::default())))?;
//! # let device = instance.device(0)?;
//! # let stream = device.lease_stream()?;
//! # let allocator = Arc::new(CachingAllocator::new(&instance, Settings::default()));
//! struct Mine(Arc<dyn Driver>);
//!
//! impl ExternalAllocator for Mine {
//!     fn allocate(&self, bytes: u64, device: DeviceId, _stream: RawStream) -> warpool::Result<Option<DevicePtr>> {
//!         Ok(self.0.mem_alloc(device, bytes).ok()) // `None` if there is no memory
//!     }
//!
//!     fn free(&self, ptr: DevicePtr, _bytes: u64, _device: DeviceId, _stream: RawStream) -> warpool::Result<()> {
//!         Ok(self.0.mem_free(ptr)?)
//!     }
//!
//!     fn base_allocation(&self, ptr: DevicePtr) -> Option<BaseAllocation> {
//!         Some(BaseAllocation { ptr, bytes: None }) // nothing is cut from a larger allocation
//!     }
//!
//!     fn record_stream(&self, _ptr: DevicePtr, _stream: RawStream) -> Handled {
//!         Handled::No // Warpool waits for the stream
//!     }
//! }
//!
//! // As a program's allocator:
//! let mine = Arc::new(Mine(instance.driver().clone()));
//! let pluggable = Arc::new(PluggableAllocator::new(&instance, mine.clone())?);
//! pluggable.allocate(1000, &stream)?.free()?;
//!
//! // As the source of one pool of another allocator:
//! let upstream = Arc::new(ExternalUpstream::new(&instance, mine)?);
//! let pool = MemPool::new(&allocator, &device, PoolOptions { upstream: Some(upstream), ..PoolOptions::default() })?;
//! allocator.allocate_in(&pool, 1000, &stream)?.free()?;
//! # Ok(())
//! # }
//! ```
//!
//! [`PluggableAllocator`](super::PluggableAllocator) is a device allocator that uses one; [`ExternalUpstream`] makes
//! one the upstream of a pool of the caching allocator.

mod address_ranges;
mod fn_allocator;
mod upstream;

use warpool_driver::{DeviceId, DevicePtr, RawHandle, StreamId};

use super::MemPoolId;
use crate::Result;

pub(super) use address_ranges::AddressRanges;
pub use fn_allocator::FnAllocator;
pub use upstream::ExternalUpstream;

/// A user's allocator of device memory: two required functions and optional hooks, those of PyTorch's pluggable
/// allocator ABI.
///
/// - Every method may be called from any thread, and concurrently.
/// - No lock of Warpool is held during a call, and the calling thread is in the relaxed capture mode: driver calls of
///   the method do not invalidate captures.
/// - A panic propagates to the caller of the allocator. The allocation table stays consistent; memory that was being
///   freed counts as freed by a [`PluggableAllocator`](super::PluggableAllocator), and not by an [`ExternalUpstream`].
pub trait ExternalAllocator: Send + Sync {
    /// Allocates `bytes` of device memory, more than 0, for work on `stream`. `None` and the null address mean out of
    /// memory. Memory that reaches the end of the address space or overlaps a live allocation is an error.
    ///
    /// Earlier work of that stream, but of no other, may still use the memory: the allocator may rely on stream order.
    fn allocate(&self, bytes: u64, device: DeviceId, stream: RawStream) -> Result<Option<DevicePtr>>;

    /// Frees what [`allocate`](Self::allocate) returned, with the same size, device and stream. Work of that stream may
    /// still use it. If the stream has been destroyed, the devices have been synchronized, and the device's default
    /// stream is passed instead.
    ///
    /// An error means that the memory was not freed. A [`PluggableAllocator`](super::PluggableAllocator) returns the
    /// error and forgets the block; a pool over an [`ExternalUpstream`] keeps the segment.
    fn free(&self, ptr: DevicePtr, bytes: u64, device: DeviceId, stream: RawStream) -> Result<()>;

    /// Called once for each allocator or upstream that is built on it, before anything else.
    fn init(&self, device_count: u32) -> Result<()> {
        let _ = device_count;
        Ok(())
    }

    /// Returns cached memory to the driver. Called when the allocator is trimmed, and before a failed request is
    /// retried; not while a stream is capturing, since it may synchronize the device.
    fn reset(&self) {}

    /// Called when the memory fraction of a device was set. Warpool enforces it anyway.
    fn memory_fraction(&self, fraction: f64, device: DeviceId) {
        let _ = (fraction, device);
    }

    /// The allocation that contains `ptr`. With `None`, Warpool answers from its own records.
    fn base_allocation(&self, ptr: DevicePtr) -> Option<BaseAllocation> {
        let _ = ptr;
        None
    }

    /// Called when `stream` uses the memory at `ptr` too. [`Handled::Yes`] promises that freed memory is not reused
    /// before the work that the stream holds at the free is done. Otherwise Warpool delays the free until then.
    fn record_stream(&self, ptr: DevicePtr, stream: RawStream) -> Handled {
        let _ = (ptr, stream);
        Handled::No
    }

    /// Called when requests are routed to a pool from now on. Warpool decides which ones, and records the pool of every
    /// block.
    fn begin_pool(&self, device: DeviceId, pool: MemPoolId) {
        let _ = (device, pool);
    }

    /// Called when routing to the pool ended.
    fn end_pool(&self, device: DeviceId, pool: MemPoolId) {
        let _ = (device, pool);
    }

    /// Called when the pool has no users any more. It is called as often as [`begin_pool`](Self::begin_pool) was, for
    /// allocators that count.
    fn release_pool(&self, device: DeviceId, pool: MemPoolId) {
        let _ = (device, pool);
    }
}

/// A stream: its id in the driver contract, and the handle that C functions take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawStream {
    /// The id.
    pub id: StreamId,
    /// The driver's handle: a `CUstream`.
    pub raw: RawHandle,
}

/// The allocation that contains some address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BaseAllocation {
    /// Its first address.
    pub ptr: DevicePtr,
    /// Its size, if known.
    pub bytes: Option<u64>,
}

/// Whether an external allocator handles a recorded use itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Handled {
    /// The external allocator delays the reuse itself.
    Yes,
    /// Warpool has to delay the free.
    No,
}
