//! Pinned host memory for PyTorch. While PyTorch captures a graph, requests and uses that its filter accepts belong to
//! the graph's pool.
//!
//! PyTorch replays graphs on streams that are not known here. So memory that a graph used is free only after the graph
//! is destroyed and all devices were waited for, which `empty_cache` does, as in PyTorch's own allocator.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock};

use warpool::memory::host::HostGraphPool;
use warpool::memory::{HostAllocator, HostBlock, PinnedSettings};
use warpool::{Instance, Stream};
use warpool_driver::HostPtr;

use super::Filter;
use crate::error::{Error, Result};
use crate::torch_pool::TorchPoolId;

/// The pinned memory of a runtime.
#[derive(Debug)]
pub(crate) struct PinnedMemory {
    allocator: HostAllocator,
    scopes: RwLock<Vec<Scope>>,
    /// The number of open scopes. If it is 0, a request skips the scopes.
    open: AtomicUsize,
    pools: Mutex<Pools>,
    history_on: AtomicBool,
}

/// A capture under way.
#[derive(Debug)]
struct Scope {
    id: TorchPoolId,
    pool: HostGraphPool,
    filter: Filter,
}

#[derive(Debug, Default)]
struct Pools {
    in_use: BTreeMap<TorchPoolId, (HostGraphPool, u32)>,
    /// Pools whose graphs are destroyed; replays may still run.
    released: Vec<HostGraphPool>,
}

impl PinnedMemory {
    pub(crate) fn new(instance: &Instance, settings: PinnedSettings) -> Self {
        let allocator = HostAllocator::new(instance, settings);
        Self {
            allocator,
            scopes: RwLock::default(),
            open: AtomicUsize::new(0),
            pools: Mutex::default(),
            history_on: AtomicBool::new(false),
        }
    }

    pub(crate) fn allocator(&self) -> &HostAllocator {
        &self.allocator
    }

    /// Whether a history is recorded.
    pub(crate) fn is_history_on(&self) -> bool {
        self.history_on.load(Ordering::Relaxed)
    }

    pub(crate) fn set_history_on(&self, on: bool) {
        self.history_on.store(on, Ordering::Relaxed);
    }

    /// Pinned memory. `stream` is what filters get: the current stream of the calling thread.
    #[inline]
    pub(crate) fn allocate(&self, bytes: u64, stream: *const c_void) -> Result<HostBlock> {
        if self.open.load(Ordering::Acquire) > 0
            && let Some(pool) = self.routed(stream)?
        {
            return Ok(self.allocator.allocate_in(bytes, &pool)?);
        }
        Ok(self.allocator.allocate(bytes)?)
    }

    /// The same from the cache, if no scope is open and the request needs nothing else.
    #[inline]
    pub(crate) fn allocate_cached(&self, bytes: u64) -> Option<HostBlock> {
        if self.open.load(Ordering::Acquire) > 0 { None } else { self.allocator.allocate_cached(bytes) }
    }

    /// Records that `stream` uses the block that contains `ptr`. Returns `false` if no block does. `filtered` is what
    /// filters get for the stream.
    pub(crate) fn record_use(&self, ptr: HostPtr, stream: &Stream, filtered: *const c_void) -> Result<bool> {
        if self.open.load(Ordering::Acquire) > 0
            && let Some(pool) = self.routed(filtered)?
        {
            return Ok(self.allocator.record_graph_use_within(ptr, &pool)?);
        }
        Ok(self.allocator.record_use_within(ptr, stream)?)
    }

    /// A capture is about to begin: requests and uses that its filter accepts belong to the pool.
    pub(crate) fn begin(&self, id: TorchPoolId, filter: Filter) -> Result<()> {
        let mut scopes = self.scopes.write().unwrap_or_else(PoisonError::into_inner);
        if scopes.iter().any(|scope| scope.id == id) {
            return Err(Error::PoolOpen { pool: id });
        }
        let pool = {
            let mut pools = self.lock();
            let (pool, uses) = pools.in_use.entry(id).or_insert_with(|| (self.allocator.new_graph_pool(), 0));
            *uses += 1;
            pool.clone()
        };
        scopes.push(Scope { id, pool, filter });
        self.open.fetch_add(1, Ordering::Release);
        Ok(())
    }

    /// The capture has ended.
    pub(crate) fn end(&self, id: TorchPoolId) -> Result<()> {
        let mut scopes = self.scopes.write().unwrap_or_else(PoisonError::into_inner);
        let at = scopes.iter().rposition(|scope| scope.id == id).ok_or(Error::PinnedPoolNotOpen { pool: id })?;
        let ended = scopes.remove(at);
        self.open.fetch_sub(1, Ordering::Release);
        drop(scopes);
        // Deleting the filter calls the C++ layer.
        drop(ended);
        Ok(())
    }

    /// A graph of the pool was destroyed.
    pub(crate) fn release(&self, id: TorchPoolId) -> Result<()> {
        let mut pools = self.lock();
        let (_, uses) = pools.in_use.get_mut(&id).ok_or(Error::PinnedPoolUnknown { pool: id })?;
        *uses -= 1;
        if *uses == 0
            && let Some((pool, _)) = pools.in_use.remove(&id)
        {
            pools.released.push(pool);
        }
        Ok(())
    }

    /// Unpins cached memory, and memory that destroyed graphs used.
    pub(crate) fn empty_cache(&self) -> Result<()> {
        let released = {
            let mut pools = self.lock();
            // A capture does not allow waiting for the device.
            let capturing = self.open.load(Ordering::Acquire) > 0;
            if capturing { Vec::new() } else { std::mem::take(&mut pools.released) }
        };
        if !released.is_empty()
            && let Err(error) = self.wait_for_devices()
        {
            self.lock().released.extend(released);
            return Err(error);
        }
        drop(released);
        self.allocator.trim(0)?;
        Ok(())
    }

    /// Waits for the devices that have pinned memory: their contexts exist.
    fn wait_for_devices(&self) -> Result<()> {
        let pinned = self.allocator.stats().pinned_bytes_by_device;
        for (device, _) in self.allocator.instance().devices().zip(pinned).filter(|&(_, bytes)| bytes > 0) {
            device.synchronize()?;
        }
        Ok(())
    }

    #[cold]
    fn routed(&self, stream: *const c_void) -> Result<Option<HostGraphPool>> {
        let scopes = self.scopes.read().unwrap_or_else(PoisonError::into_inner);
        for scope in scopes.iter().rev() {
            if scope.filter.matches(stream)? {
                return Ok(Some(scope.pool.clone()));
            }
        }
        Ok(None)
    }

    fn lock(&self) -> MutexGuard<'_, Pools> {
        self.pools.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
