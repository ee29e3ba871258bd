//! Owned memory pools ([`MemPool`]), and scopes that route requests to a pool.

use std::fmt;
use std::sync::Arc;

use warpool_driver::DeviceId;

use super::{DeviceAllocator, MemPoolId, PoolOptions, Route};
use crate::{Device, Error, Result};

/// An owned pool. Dropping it ends the owner's use without a driver call; its cached memory is returned when the
/// allocator next needs memory or is trimmed. [`close`](Self::close) returns it at once.
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

    /// Its id.
    #[must_use]
    pub fn id(&self) -> MemPoolId {
        self.id
    }

    /// Fails if it is not a pool of `allocator`: another allocator may have one with the same id.
    pub(crate) fn expect_of(&self, allocator: &Arc<dyn DeviceAllocator>) -> Result<()> {
        // The addresses alone: one object may have several vtables.
        if std::ptr::addr_eq(Arc::as_ptr(&self.allocator), Arc::as_ptr(allocator)) {
            return Ok(());
        }
        Err(Error::ForeignAllocator { pool: self.id })
    }

    /// The number of its uses: this, open scopes, graphs.
    pub fn uses(&self) -> Result<u32> {
        self.allocator.pools()?.pool_uses(self.device, self.id)
    }

    /// Routes requests of the calling thread on the pool's device to it, until the scope is dropped.
    pub fn enter(&self) -> Result<PoolScope> {
        PoolScope::open(&self.allocator, self.device, self.id, Route::Thread(std::thread::current().id()))
    }

    /// Releases the pool and returns its cached memory.
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
            // They fail only for an unknown pool, and this is one of its uses.
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

/// An open scope of a pool. Dropping it closes it, without a driver call.
#[must_use = "dropping the scope ends the routing"]
pub struct PoolScope {
    allocator: Arc<dyn DeviceAllocator>,
    device: DeviceId,
    id: MemPoolId,
}

impl PoolScope {
    /// Routes requests to an existing pool.
    pub fn open(allocator: &Arc<dyn DeviceAllocator>, device: DeviceId, pool: MemPoolId, route: Route) -> Result<Self> {
        allocator.pools()?.begin_routing(device, pool, route)?;
        Ok(Self { allocator: Arc::clone(allocator), device, id: pool })
    }
}

impl Drop for PoolScope {
    fn drop(&mut self) {
        if let Ok(pools) = self.allocator.pools() {
            // It fails only if no scope is open.
            let _ = pools.end_routing(self.device, self.id);
        }
    }
}

impl fmt::Debug for PoolScope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "scope of pool {} of {}", self.id, self.device)
    }
}
