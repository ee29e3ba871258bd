//! Memory pools: private caches that some requests are routed to, and who keeps them.
//!
//! Routing is not capturing: a pool's scope decides where memory comes from and changes nothing else.

use std::fmt;
use std::sync::Arc;
use std::thread::ThreadId;

use warpool_driver::{CaptureId, DeviceId, DevicePtr, StreamId};

use super::{DeviceAllocator, MemPoolId};
use crate::{Device, Error, Result};

/// How a pool is made.
#[derive(Clone, Default)]
pub struct PoolOptions {
    /// Where its segments come from; `None` is the driver.
    pub upstream: Option<Arc<dyn Upstream>>,
    /// Whether its free blocks serve the default pool when that would run out. Not from the first capture on that takes
    /// memory from it: its graph goes on using that.
    pub use_on_oom: bool,
    /// Whether each of its blocks is a whole segment.
    pub no_split: bool,
}

impl fmt::Debug for PoolOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PoolOptions")
            .field("upstream", &self.upstream.is_some())
            .field("use_on_oom", &self.use_on_oom)
            .field("no_split", &self.no_split)
            .finish()
    }
}

/// Where a pool can get its segments from instead of the driver. It must not call the allocator that it serves.
pub trait Upstream: Send + Sync {
    /// `bytes` of device memory for `stream`; `None` is out of memory.
    fn allocate(&self, device: DeviceId, bytes: u64, stream: StreamId) -> Result<Option<DevicePtr>>;

    /// Takes it back. The work of the stream that used it may still be under way.
    fn free(&self, ptr: DevicePtr, bytes: u64, device: DeviceId, stream: StreamId) -> Result<()>;
}

/// Whose requests go to a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// Those that this thread makes.
    Thread(ThreadId),
    /// Those for streams that take part in this capture.
    Capture(CaptureId),
    /// Those for this stream.
    Stream(StreamId),
    /// All of the device.
    Everything,
}

/// The private pools of an allocator. A pool is there as long as somebody uses it: its maker, open scopes, graphs.
/// After that it gives back what it has when memory is trimmed, and blocks that callers still have keep working.
pub trait PoolKeeper: Send + Sync {
    /// Makes a pool with one use, the maker's: `(0, n)`.
    fn create_pool(&self, device: DeviceId, options: PoolOptions) -> Result<MemPoolId>;

    /// The same for a graph: `(n, 0)`.
    fn create_graph_pool(&self, device: DeviceId) -> Result<MemPoolId>;

    /// One use more.
    fn retain_pool(&self, device: DeviceId, pool: MemPoolId) -> Result<()>;

    /// One use less. Calls no driver.
    fn release_pool(&self, device: DeviceId, pool: MemPoolId) -> Result<()>;

    /// How many use it.
    fn pool_uses(&self, device: DeviceId, pool: MemPoolId) -> Result<u32>;

    /// Whether its free blocks serve the default pool when that would run out.
    fn set_use_on_oom(&self, device: DeviceId, pool: MemPoolId, on: bool) -> Result<()>;

    /// Opens a scope: requests that `route` names come from the pool. Of several open scopes the newest that fits
    /// counts. One use more. [`Error::AlreadyRouting`](crate::Error::AlreadyRouting) if the pool has one open.
    fn begin_routing(&self, device: DeviceId, pool: MemPoolId, route: Route) -> Result<()>;

    /// Names others whose requests go to the pool while its scope is open: those that any of `routes` names.
    fn reroute(&self, device: DeviceId, pool: MemPoolId, routes: &[Route]) -> Result<()>;

    /// Closes the scope of the pool, and takes back its use.
    fn end_routing(&self, device: DeviceId, pool: MemPoolId) -> Result<()>;

    /// A capture is about to begin on a stream of the device: from here on, requests and frees look whether their
    /// stream captures. To be called before the driver's `capture_begin`, so that no other thread waits for the stream
    /// meanwhile.
    fn capture_began(&self, device: DeviceId) -> Result<()>;

    /// It ended; to be called after the driver's `capture_end`.
    fn capture_ended(&self, device: DeviceId) -> Result<()>;

    /// Notes that work on `stream` uses the pool's memory although it was not allocated for it, as replays of a graph
    /// do. When the pool's memory goes back to the driver, that work is waited for.
    fn record_pool_use(&self, device: DeviceId, pool: MemPoolId, stream: StreamId) -> Result<()>;

    /// Whether exactly these addresses are given out in the pool.
    fn has_exactly(&self, device: DeviceId, pool: MemPoolId, live: &[DevicePtr]) -> Result<bool>;
}

/// A pool with an owner. Dropping it gives up the owner's use without a driver call; its cached memory goes back when
/// the allocator next needs memory or is trimmed. [`close`](Self::close) gives it back at once.
pub struct MemPool {
    allocator: Arc<dyn DeviceAllocator>,
    device: DeviceId,
    id: MemPoolId,
    owned: bool,
}

impl MemPool {
    /// A new pool of `allocator` on `device`.
    pub fn new(allocator: &Arc<dyn DeviceAllocator>, device: &Device, options: PoolOptions) -> Result<Self> {
        allocator.instance().expect_same(device.instance(), "the device")?;
        let id = allocator.pools()?.create_pool(device.id(), options)?;
        Ok(Self { allocator: Arc::clone(allocator), device: device.id(), id, owned: true })
    }

    /// Its name.
    #[must_use]
    pub fn id(&self) -> MemPoolId {
        self.id
    }

    /// Fails if it is a pool of another allocator than `allocator`, which may have one of the same name.
    pub(crate) fn expect_of(&self, allocator: &Arc<dyn DeviceAllocator>) -> Result<()> {
        // The addresses alone: of one object there may be several tables of functions.
        if std::ptr::addr_eq(Arc::as_ptr(&self.allocator), Arc::as_ptr(allocator)) {
            return Ok(());
        }
        Err(Error::ForeignAllocator { pool: self.id })
    }

    /// How many use it: this, open scopes, graphs.
    pub fn uses(&self) -> Result<u32> {
        self.allocator.pools()?.pool_uses(self.device, self.id)
    }

    /// Routes what the calling thread asks for on the pool's device to it, until the scope is dropped.
    pub fn enter(&self) -> Result<PoolScope> {
        PoolScope::open(&self.allocator, self.device, self.id, Route::Thread(std::thread::current().id()))
    }

    /// Gives up the pool and gives back what it has cached.
    pub fn close(mut self) -> Result<()> {
        self.owned = false;
        let pools = self.allocator.pools()?;
        pools.set_use_on_oom(self.device, self.id, false)?;
        pools.release_pool(self.device, self.id)?;
        self.allocator.trim(self.device, self.id).map(drop)
    }
}

impl Drop for MemPool {
    fn drop(&mut self) {
        if self.owned
            && let Ok(pools) = self.allocator.pools()
        {
            // They can only say that the pool is unknown, and it is known: this is one of its uses.
            let _ = pools.set_use_on_oom(self.device, self.id, false);
            let _ = pools.release_pool(self.device, self.id);
        }
    }
}

impl fmt::Debug for MemPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pool {} of {}", self.id, self.device)
    }
}

/// An open scope of a pool. Dropping it closes it; no driver call.
#[must_use = "dropping the scope ends the routing"]
pub struct PoolScope {
    allocator: Arc<dyn DeviceAllocator>,
    device: DeviceId,
    id: MemPoolId,
}

impl PoolScope {
    /// Routes requests to a pool that is there already.
    pub fn open(allocator: &Arc<dyn DeviceAllocator>, device: DeviceId, pool: MemPoolId, route: Route) -> Result<Self> {
        allocator.pools()?.begin_routing(device, pool, route)?;
        Ok(Self { allocator: Arc::clone(allocator), device, id: pool })
    }
}

impl Drop for PoolScope {
    fn drop(&mut self) {
        if let Ok(pools) = self.allocator.pools() {
            // It can only say that the scope is not open, and it is.
            let _ = pools.end_routing(self.device, self.id);
        }
    }
}

impl fmt::Debug for PoolScope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "scope of pool {} of {}", self.id, self.device)
    }
}
