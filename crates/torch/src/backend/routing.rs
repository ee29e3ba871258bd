//! PyTorch's memory pools, and which requests they serve: those that the filter of an open scope accepts; with several
//! scopes, the newest one that accepts.
//!
//! PyTorch counts the uses of a pool itself: creating it and opening a scope add one, a release ends one. Opening a
//! scope is the only sign that a capture may be about to begin, so the allocator counts a capture as long as one is
//! open.

mod torch_pools;

use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use warpool::memory::pools::{PoolOptions, Upstream};
use warpool::memory::{DeviceAllocator, MemPoolId};
use warpool_driver::{DeviceId, DevicePtr, Driver};

use super::{Filter, relaxed};
use crate::allocator::optional;
use crate::error::{Error, Result};
use crate::torch_pool::TorchPoolId;
use torch_pools::TorchPools;

/// The pools of a runtime.
#[derive(Debug, Default)]
pub(crate) struct Routing {
    /// Oldest first.
    scopes: RwLock<Vec<Scope>>,
    /// The number of open scopes. If it is 0, a request skips the scopes.
    open: AtomicUsize,
    pools: Mutex<TorchPools>,
}

#[derive(Debug)]
struct Scope {
    device: DeviceId,
    id: TorchPoolId,
    pool: MemPoolId,
    filter: Filter,
}

impl Routing {
    /// Whether any scope is open.
    #[inline]
    pub(crate) fn is_any_open(&self) -> bool {
        self.open.load(Ordering::Acquire) > 0
    }

    /// The pool of a request for `stream`, a `cudaStream_t`; `None` is the default pool. Filters are called under the
    /// lock, as PyTorch's own allocator does.
    #[cold]
    pub(crate) fn pool_for(
        &self,
        driver: &dyn Driver,
        device: DeviceId,
        stream: *const c_void,
    ) -> Result<Option<MemPoolId>> {
        relaxed::restore(driver)?;
        let scopes = self.scopes.read().unwrap_or_else(PoisonError::into_inner);
        for scope in scopes.iter().rev().filter(|scope| scope.device == device) {
            if scope.filter.matches(stream)? {
                return Ok(Some(scope.pool));
            }
        }
        Ok(None)
    }

    /// Ends the relaxed mode that a release set for the calling thread, if all scopes have been closed since.
    pub(crate) fn end_relaxed_mode(&self, driver: &dyn Driver) -> Result<()> {
        if self.is_any_open() { Ok(()) } else { relaxed::restore(driver) }
    }

    /// Opens a scope, and adds a use of its pool, which `create` makes if there is none yet.
    pub(crate) fn begin_with(
        &self,
        allocator: &dyn DeviceAllocator,
        device: DeviceId,
        id: TorchPoolId,
        filter: Filter,
        create: impl FnOnce(PoolOptions) -> Result<MemPoolId>,
    ) -> Result<()> {
        let pools = allocator.pools()?;
        relaxed::restore(driver(allocator))?;
        let is_open = |scopes: &[Scope]| scopes.iter().any(|scope| (scope.device, scope.id) == (device, id));
        if is_open(&self.scopes.read().unwrap_or_else(PoisonError::into_inner)) {
            return Err(Error::PoolOpen { pool: id });
        }
        let pool = {
            let mut table = self.lock();
            table.add_use(device, id);
            let pool = table.get_or_create(pools, device, id, create);
            if pool.is_err() {
                table.release(device, id)?;
            }
            pool?
        };
        let began = pools.capture_began(device);
        let mut scopes = self.scopes.write().unwrap_or_else(PoisonError::into_inner);
        // Another thread may have opened it meanwhile.
        let refused = match began {
            Err(error) => Some(error.into()),
            Ok(()) if is_open(&scopes) => {
                let _ = pools.capture_ended(device);
                Some(Error::PoolOpen { pool: id })
            }
            Ok(()) => None,
        };
        if let Some(error) = refused {
            drop(scopes);
            let _ = self.release(allocator, device, id);
            return Err(error);
        }
        scopes.push(Scope { device, id, pool, filter });
        self.open.fetch_add(1, Ordering::Release);
        Ok(())
    }

    /// The same, with a plain pool.
    #[cfg(test)]
    pub(crate) fn begin(
        &self,
        allocator: &dyn DeviceAllocator,
        device: DeviceId,
        id: TorchPoolId,
        filter: Filter,
    ) -> Result<()> {
        let pools = allocator.pools()?;
        self.begin_with(allocator, device, id, filter, |options| Ok(pools.create_pool(device, options)?))
    }

    /// Closes the scope.
    pub(crate) fn end(&self, allocator: &dyn DeviceAllocator, device: DeviceId, id: TorchPoolId) -> Result<()> {
        let pools = allocator.pools()?;
        relaxed::restore(driver(allocator))?;
        let closed = {
            let mut scopes = self.scopes.write().unwrap_or_else(PoisonError::into_inner);
            let at = scopes.iter().rposition(|scope| (scope.device, scope.id) == (device, id));
            let at = at.ok_or(Error::PoolNotOpen { pool: id, device: device.0 })?;
            self.open.fetch_sub(1, Ordering::Release);
            scopes.remove(at)
        };
        // Deleting the filter calls the C++ layer.
        drop(closed);
        Ok(pools.capture_ended(device)?)
    }

    /// Creates a pool, with an upstream if one is given, or adds a use of one that exists.
    pub(crate) fn create(&self, device: DeviceId, id: TorchPoolId, upstream: Option<Arc<dyn Upstream>>) -> Result<()> {
        self.lock().create(device, id, upstream)
    }

    /// Ends a use of a pool. After the last its memory can be returned to the driver, once replays that PyTorch started
    /// on any stream are done. If it was a graph's, PyTorch destroys the graph next: an active capture stays valid.
    pub(crate) fn release(&self, allocator: &dyn DeviceAllocator, device: DeviceId, id: TorchPoolId) -> Result<()> {
        let released = self.lock().release(device, id)?;
        if self.is_any_open() {
            relaxed::relax(driver(allocator))?;
        } else {
            relaxed::restore(driver(allocator))?;
        }
        let Some(pool) = released else { return Ok(()) };
        let pools = allocator.pools()?;
        pools.record_pool_use_anywhere(device, pool)?;
        Ok(pools.release_pool(device, pool)?)
    }

    pub(crate) fn uses(&self, device: DeviceId, id: TorchPoolId) -> u32 {
        self.lock().uses(device, id)
    }

    /// Whether free blocks of the pool serve the default pool before it runs out of memory.
    pub(crate) fn set_use_on_oom(
        &self,
        allocator: &dyn DeviceAllocator,
        device: DeviceId,
        id: TorchPoolId,
        on: bool,
    ) -> Result<()> {
        match self.lock().set_use_on_oom(device, id, on)? {
            Some(pool) => Ok(allocator.pools()?.set_use_on_oom(device, pool, on)?),
            None => Ok(()),
        }
    }

    /// Each block of the pool is a whole segment.
    pub(crate) fn set_no_split(&self, device: DeviceId, id: TorchPoolId) -> Result<()> {
        self.lock().set_no_split(device, id)
    }

    /// Makes a pool stable. It is created now: a backend without such pools says so, and it carries no tag.
    pub(crate) fn set_stable(&self, allocator: &dyn DeviceAllocator, device: DeviceId, id: TorchPoolId) -> Result<()> {
        let choose = "backend:native or backend:paged";
        let pools = optional(allocator, choose, allocator.pools())?;
        let mut table = self.lock();
        table.set_stable(device, id)?;
        let create = |options| optional(allocator, choose, pools.create_pool(device, options));
        table.get_or_create(pools, device, id, create).map(drop)
    }

    /// Whether exactly these addresses are allocated in the pool.
    pub(crate) fn has_exactly(
        &self,
        allocator: &dyn DeviceAllocator,
        device: DeviceId,
        id: TorchPoolId,
        live: &[DevicePtr],
    ) -> Result<bool> {
        match self.lock().get(device, id)? {
            Some(pool) => Ok(allocator.pools()?.has_exactly(device, pool, live)?),
            None => Ok(live.is_empty()),
        }
    }

    /// Our pool in use of PyTorch's id.
    pub(crate) fn pool(&self, allocator: &dyn DeviceAllocator, device: DeviceId, id: TorchPoolId) -> Result<MemPoolId> {
        let pools = allocator.pools()?;
        self.lock().get_or_create(pools, device, id, |options| Ok(pools.create_pool(device, options)?))
    }

    /// All pools that have or had PyTorch's id, released ones with memory too.
    pub(crate) fn all_pools(&self, id: TorchPoolId) -> Vec<(DeviceId, MemPoolId)> {
        self.lock().all(id)
    }

    /// PyTorch's id of our pool, if it has one.
    pub(crate) fn torch_id(&self, device: DeviceId, pool: MemPoolId) -> Option<TorchPoolId> {
        self.lock().torch_id(device, pool)
    }

    fn lock(&self) -> MutexGuard<'_, TorchPools> {
        self.pools.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn driver(allocator: &dyn DeviceAllocator) -> &dyn Driver {
    &**allocator.instance().driver()
}
