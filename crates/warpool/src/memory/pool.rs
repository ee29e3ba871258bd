//! Owned memory pools ([`MemPool`]), and scopes that route requests to a pool.

use std::fmt;
use std::sync::Arc;

use warpool_driver::{DeviceId, StreamId};

use super::{DeviceAllocator, MemPoolId, PoolOptions, PoolUser, Route, SharedAllocator};
use crate::{Device, Error, Result};

/// A handle of a pool, which keeps the pool and its allocator alive. Clones share one handle.
///
/// A pool lives as long as a handle, an open scope or a graph uses it; a call can only end its own use. After the last
/// use, the pool's cached memory is returned when the allocator needs memory or is trimmed, never by a driver call in a
/// destructor. [`close`](Self::close) returns it at once.
#[derive(Clone)]
pub struct MemPool(Arc<PoolUse>);

/// One use of a pool.
struct PoolUse {
    allocator: Arc<dyn DeviceAllocator>,
    device: DeviceId,
    id: MemPoolId,
    /// Whether it is the use of the pool's creator. When that ends, the pool no longer serves the default pool.
    by_creator: bool,
}

impl MemPool {
    /// A new pool of `allocator` on `device`.
    pub fn new(allocator: &impl SharedAllocator, device: &Device, options: PoolOptions) -> Result<Self> {
        let allocator = allocator.to_dyn();
        allocator.instance().expect_same(device.instance(), "the device")?;
        let pools = allocator.pools()?;
        let id = pools.create_pool(device.id(), options)?;
        let created = Self::hold(&allocator, device.id(), id, true);
        pools.release_pool(device.id(), id)?;
        created
    }

    /// A new pool for a graph.
    pub(crate) fn for_graph(allocator: &Arc<dyn DeviceAllocator>, device: DeviceId) -> Result<Self> {
        let pools = allocator.pools()?;
        let id = pools.create_graph_pool(device)?;
        let created = Self::hold(allocator, device, id, false);
        pools.release_pool(device, id)?;
        created
    }

    /// A handle of a pool that a raw call created, or of the default pool.
    pub fn from_id(allocator: &impl SharedAllocator, device: &Device, id: MemPoolId) -> Result<Self> {
        let allocator = allocator.to_dyn();
        allocator.instance().expect_same(device.instance(), "the device")?;
        Self::hold(&allocator, device.id(), id, false)
    }

    fn hold(allocator: &Arc<dyn DeviceAllocator>, device: DeviceId, id: MemPoolId, by_creator: bool) -> Result<Self> {
        allocator.pools()?.retain_pool_as(device, id, PoolUser::HANDLE)?;
        Ok(Self(Arc::new(PoolUse { allocator: Arc::clone(allocator), device, id, by_creator })))
    }

    /// Another use of the same pool, by a graph.
    pub(crate) fn another_use(&self) -> Result<Self> {
        Self::hold(&self.0.allocator, self.0.device, self.0.id, false)
    }

    /// Its id.
    #[must_use]
    pub fn id(&self) -> MemPoolId {
        self.0.id
    }

    /// Its device's id.
    #[must_use]
    pub fn device_id(&self) -> DeviceId {
        self.0.device
    }

    /// Its allocator.
    #[must_use]
    pub fn allocator(&self) -> &Arc<dyn DeviceAllocator> {
        &self.0.allocator
    }

    /// Fails if it is not a pool of `allocator` on `device`: another allocator or device may have one with the same id.
    pub(crate) fn expect_of(&self, allocator: &dyn DeviceAllocator, device: DeviceId) -> Result<()> {
        if !self.is_of(allocator) {
            return Err(Error::ForeignAllocator { pool: self.id() });
        }
        if self.0.device != device {
            return Err(Error::PoolDevice { pool: self.id(), owner: self.0.device, device });
        }
        Ok(())
    }

    /// The pools of a decorator are those of the inner allocator.
    fn is_of(&self, allocator: &dyn DeviceAllocator) -> bool {
        match (self.0.allocator.pools(), allocator.pools()) {
            (Ok(mine), Ok(theirs)) => std::ptr::addr_eq(mine, theirs),
            _ => false,
        }
    }

    /// Records that replays on `streams` use its memory, in addition to its allocation streams. Makes no driver call.
    pub(crate) fn record_replays(&self, streams: &[StreamId]) {
        if let Ok(pools) = self.0.allocator.pools() {
            // This fails only for an unknown pool, and this handle is one of its uses.
            let _ = pools.record_pool_uses(self.0.device, self.0.id, streams);
        }
    }

    /// Fails if it is asleep. `what` names the operation that the caller cannot do then.
    pub(crate) fn expect_awake(&self, what: &'static str) -> Result<()> {
        let Some(sleep) = self.0.allocator.pools()?.sleep() else { return Ok(()) };
        sleep.expect_awake(self.0.device, self.0.id).map_err(|error| match error {
            Error::TagAsleep { tag } => Error::MemoryAsleep { tag, what },
            other => other,
        })
    }

    /// The number of its uses: this handle and its clones together, other handles, open scopes, graphs.
    pub fn uses(&self) -> Result<u32> {
        self.0.allocator.pools()?.pool_uses(self.0.device, self.0.id)
    }

    /// Routes requests of the calling thread on the pool's device to it, until the scope is dropped.
    pub fn enter(&self) -> Result<PoolScope> {
        self.route(Route::Thread(std::thread::current().id()))
    }

    /// Routes requests to it, until the scope is dropped.
    pub fn route(&self, route: Route) -> Result<PoolScope> {
        self.0.allocator.pools()?.begin_routing_as(self.0.device, self.0.id, route, PoolUser::HANDLE)?;
        Ok(PoolScope { pool: self.clone() })
    }

    /// Ends the use of this handle, unless it has clones. If it was the last use, returns the pool's cached memory.
    pub fn close(self) -> Result<()> {
        let (allocator, device, id) = (Arc::clone(&self.0.allocator), self.0.device, self.0.id);
        drop(self);
        if id.is_default() { Ok(()) } else { allocator.trim(device, id).map(drop) }
    }
}

impl Drop for PoolUse {
    fn drop(&mut self) {
        if self.allocator.instance().is_inherited() {
            return;
        }
        if let Ok(pools) = self.allocator.pools() {
            // These fail only for an unknown pool, and this handle is one of its uses.
            if self.by_creator {
                let _ = pools.set_use_on_oom(self.device, self.id, false);
            }
            let _ = pools.release_pool_as(self.device, self.id, PoolUser::HANDLE);
        }
    }
}

/// Two handles are equal if they are of the same pool.
impl PartialEq for MemPool {
    fn eq(&self, other: &Self) -> bool {
        (self.id(), self.0.device) == (other.id(), other.0.device) && self.is_of(&*other.0.allocator)
    }
}

impl Eq for MemPool {}

impl fmt::Debug for MemPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pool {} of {}", self.id(), self.0.device)
    }
}

/// An open scope of a pool. Dropping it closes it, without a driver call.
#[must_use = "dropping the scope ends the routing"]
pub struct PoolScope {
    pool: MemPool,
}

impl Drop for PoolScope {
    fn drop(&mut self) {
        let PoolUse { allocator, device, id, .. } = &*self.pool.0;
        if allocator.instance().is_inherited() {
            return;
        }
        if let Ok(pools) = allocator.pools() {
            // This fails only if no scope is open.
            let _ = pools.end_routing_as(*device, *id, PoolUser::HANDLE);
        }
    }
}

impl fmt::Debug for PoolScope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "scope of {:?}", self.pool)
    }
}
