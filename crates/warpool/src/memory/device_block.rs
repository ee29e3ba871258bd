//! Owned device memory: [`DeviceBlock`], and the calls that allocate one.

use std::fmt;
use std::sync::Arc;

use warpool_driver::{DeviceId, DevicePtr, StreamId};

use super::{Allocation, DeviceAllocator, MemPool, Request, SharedAllocator};
use crate::instance::InstanceKey;
use crate::{Instance, Result, Stream};

/// Owned device memory. Dropping it frees it without a driver call: fences in other streams that used it are recorded
/// by the allocator's next call. [`free`](Self::free) records them at once.
///
/// It keeps its allocator and the driver alive.
pub struct DeviceBlock {
    allocator: Arc<dyn DeviceAllocator>,
    /// The key of the allocator's instance.
    instance: InstanceKey,
    allocation: Allocation,
}

impl DeviceBlock {
    /// Allocates memory from `allocator`.
    pub fn allocate(allocator: &impl SharedAllocator, request: Request) -> Result<Self> {
        let allocator = allocator.to_dyn();
        let instance = allocator.instance().key();
        Self::allocate_of(allocator, instance, request)
    }

    /// As [`allocate`](Self::allocate), from an allocator of `instance`.
    #[inline]
    fn allocate_of(allocator: Arc<dyn DeviceAllocator>, instance: InstanceKey, request: Request) -> Result<Self> {
        let allocation = allocator.allocate_raw(request)?;
        Ok(Self { allocator, instance, allocation })
    }

    /// Takes ownership of a raw allocation.
    ///
    /// # Safety
    /// `allocation` must come from [`allocate_raw`](DeviceAllocator::allocate_raw) of `allocator` (or from
    /// [`into_raw`](Self::into_raw) of one of its blocks), must not have been freed, must have no other owner, and must
    /// not be freed in any other way from now on. Typed buffers are built on blocks, so safe code writes to the memory
    /// that the block describes.
    #[must_use]
    #[expect(unsafe_code, reason = "nothing can check that the memory has no other owner")]
    pub unsafe fn from_raw(allocator: &impl SharedAllocator, allocation: Allocation) -> Self {
        let allocator = allocator.to_dyn();
        let instance = allocator.instance().key();
        Self { allocator, instance, allocation }
    }

    /// Gives up ownership: the memory has to be freed by a raw call.
    #[must_use = "it is not freed otherwise"]
    pub fn into_raw(mut self) -> Allocation {
        let allocation = self.allocation;
        self.allocation.ptr = DevicePtr(0);
        allocation
    }

    /// Another owner of the same memory. One of the two has to give it up by [`into_raw`](Self::into_raw).
    pub(crate) fn second_owner(&self) -> Self {
        Self { allocator: Arc::clone(&self.allocator), ..*self }
    }

    /// Its address; null if it is empty.
    #[must_use]
    pub fn ptr(&self) -> DevicePtr {
        self.allocation.ptr
    }

    /// The requested size.
    #[must_use]
    #[expect(clippy::misnamed_getters, reason = "the size for its owner is the requested one")]
    pub fn bytes(&self) -> u64 {
        self.allocation.bytes_requested
    }

    /// The size after rounding.
    #[must_use]
    pub fn bytes_usable(&self) -> u64 {
        self.allocation.bytes
    }

    /// Its device.
    #[must_use]
    pub fn device_id(&self) -> DeviceId {
        self.allocation.device
    }

    /// The stream that it was allocated for.
    #[must_use]
    pub fn stream_id(&self) -> StreamId {
        self.allocation.stream
    }

    /// Whether it was allocated for work in `stream`.
    #[inline]
    pub(crate) fn is_of_stream(&self, stream: &Stream) -> bool {
        self.allocation.stream == stream.id()
            && self.allocation.device == stream.device_id()
            && self.instance == stream.instance().key()
    }

    /// Records that work on `stream` uses it too. See [`DeviceAllocator::record_use_raw`].
    pub fn record_use(&self, stream: &Stream) -> Result<()> {
        self.allocator.instance().expect_same(stream.instance(), "the stream")?;
        self.allocator.record_use(self.allocation, stream.id())
    }

    /// Records that work in `streams` uses it too. Makes no driver call.
    pub(crate) fn record_replays(&self, streams: &[StreamId]) {
        if !self.allocation.ptr.is_null() {
            self.allocator.record_uses_later(self.allocation, streams);
        }
    }

    /// The instance whose memory it is.
    pub(crate) fn instance(&self) -> &Instance {
        self.allocator.instance()
    }

    /// Its allocator, and the allocation.
    pub(super) fn parts(&self) -> (&Arc<dyn DeviceAllocator>, Allocation) {
        (&self.allocator, self.allocation)
    }

    /// Fails if it is not memory of `instance`.
    pub(crate) fn expect_of(&self, instance: &Instance) -> Result<()> {
        instance.expect_same(self.allocator.instance(), "the block")
    }

    /// Frees it, and records fences in other streams that used it. It is freed even if that fails.
    pub fn free(mut self) -> Result<()> {
        let allocation = self.allocation;
        self.allocation.ptr = DevicePtr(0);
        if allocation.ptr.is_null() { Ok(()) } else { self.allocator.free(allocation) }
    }
}

impl Drop for DeviceBlock {
    fn drop(&mut self) {
        if !self.allocation.ptr.is_null() {
            self.allocator.free_later(self.allocation);
        }
    }
}

impl fmt::Debug for DeviceBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes at {} of {}", self.bytes(), self.ptr(), self.device_id())
    }
}

/// Allocation of owned blocks from a [shared allocator](SharedAllocator).
pub trait Allocate: SharedAllocator {
    /// Memory for work on `stream`, from the pool that the thread or the stream is routed to.
    #[inline]
    fn allocate(&self, bytes: u64, stream: &Stream) -> Result<DeviceBlock> {
        let allocator = self.to_dyn();
        allocator.instance().expect_same(stream.instance(), "the stream")?;
        let instance = allocator.instance().key();
        DeviceBlock::allocate_of(allocator, instance, Request::new(stream.device_id(), stream.id(), bytes))
    }

    /// Memory from `pool`, which must belong to this allocator and to the stream's device.
    fn allocate_in(&self, pool: &MemPool, bytes: u64, stream: &Stream) -> Result<DeviceBlock> {
        let allocator = self.to_dyn();
        allocator.instance().expect_same(stream.instance(), "the stream")?;
        pool.expect_of(&*allocator, stream.device_id())?;
        DeviceBlock::allocate(&allocator, Request::new(stream.device_id(), stream.id(), bytes).in_pool(pool.id()))
    }
}

impl<A: SharedAllocator + ?Sized> Allocate for A {}
