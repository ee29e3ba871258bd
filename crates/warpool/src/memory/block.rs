//! Owned device memory: a [`Block`] that frees itself, and the calls that give one.

use std::fmt;
use std::sync::Arc;

use warpool_driver::{DeviceId, DevicePtr, StreamId};

use super::{Allocation, DeviceAllocator, MemPoolId, Request};
use crate::{Instance, Result, Stream};

/// Device memory with one owner. Dropping it gives it back without a driver call; what needs one (events of other
/// streams that used it) is left to the allocator's next call. [`free`](Self::free) does it at once.
///
/// It keeps its allocator alive, and the driver under it.
pub struct Block {
    allocator: Arc<dyn DeviceAllocator>,
    allocation: Allocation,
}

impl Block {
    /// Memory from `allocator`.
    pub fn allocate(allocator: &Arc<dyn DeviceAllocator>, request: Request) -> Result<Self> {
        let allocation = allocator.allocate_raw(request)?;
        Ok(Self { allocator: Arc::clone(allocator), allocation })
    }

    /// Takes ownership of what a raw call gave. Nobody else may free it then; if somebody does, the drop of this finds
    /// nothing, or frees what was given out at the same place since: memory stays safe for the host, not for the
    /// device.
    #[must_use]
    pub fn from_raw(allocator: Arc<dyn DeviceAllocator>, allocation: Allocation) -> Self {
        Self { allocator, allocation }
    }

    /// Gives up ownership: nobody frees it any more but by the raw call.
    #[must_use = "what is not freed by hand is never freed"]
    pub fn into_raw(mut self) -> Allocation {
        let allocation = self.allocation;
        self.allocation.ptr = DevicePtr(0);
        allocation
    }

    /// Where it starts; null if it is empty.
    #[must_use]
    pub fn ptr(&self) -> DevicePtr {
        self.allocation.ptr
    }

    /// How much was asked for.
    #[must_use]
    #[expect(clippy::misnamed_getters, reason = "what its owner calls its size is what was asked for")]
    pub fn bytes(&self) -> u64 {
        self.allocation.bytes_requested
    }

    /// How much there is, after rounding.
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

    /// Notes that `stream` uses it too. See [`DeviceAllocator::record_use_raw`].
    pub fn record_use(&self, stream: &Stream) -> Result<()> {
        self.allocator.instance().expect_same(stream.instance(), "the stream")?;
        self.allocator.record_use(self.allocation, stream.id())
    }

    /// Fails if it is not memory of `instance`.
    pub(crate) fn expect_of(&self, instance: &Instance) -> Result<()> {
        instance.expect_same(self.allocator.instance(), "the block")
    }

    /// Gives it back at once, and says what went wrong if something did. It is given back either way.
    pub fn free(mut self) -> Result<()> {
        let allocation = self.allocation;
        self.allocation.ptr = DevicePtr(0);
        if allocation.ptr.is_null() { Ok(()) } else { self.allocator.free(allocation) }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if !self.allocation.ptr.is_null() {
            self.allocator.free_later(self.allocation);
        }
    }
}

impl fmt::Debug for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes at {} of {}", self.bytes(), self.ptr(), self.device_id())
    }
}

/// Owned blocks from an allocator behind an [`Arc`].
pub trait Allocate {
    /// Memory for work on `stream`, from wherever the thread or the stream is routed to.
    fn allocate(&self, bytes: u64, stream: &Stream) -> Result<Block>;

    /// The same, from a pool.
    fn allocate_in(&self, pool: MemPoolId, bytes: u64, stream: &Stream) -> Result<Block>;
}

impl Allocate for Arc<dyn DeviceAllocator> {
    fn allocate(&self, bytes: u64, stream: &Stream) -> Result<Block> {
        self.instance().expect_same(stream.instance(), "the stream")?;
        Block::allocate(self, Request::new(stream.device_id(), stream.id(), bytes))
    }

    fn allocate_in(&self, pool: MemPoolId, bytes: u64, stream: &Stream) -> Result<Block> {
        self.instance().expect_same(stream.instance(), "the stream")?;
        Block::allocate(self, Request::new(stream.device_id(), stream.id(), bytes).in_pool(pool))
    }
}

impl<A: DeviceAllocator + 'static> Allocate for Arc<A> {
    fn allocate(&self, bytes: u64, stream: &Stream) -> Result<Block> {
        let allocator: Arc<dyn DeviceAllocator> = Arc::<A>::clone(self);
        allocator.allocate(bytes, stream)
    }

    fn allocate_in(&self, pool: MemPoolId, bytes: u64, stream: &Stream) -> Result<Block> {
        let allocator: Arc<dyn DeviceAllocator> = Arc::<A>::clone(self);
        allocator.allocate_in(pool, bytes, stream)
    }
}
