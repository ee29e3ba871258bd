//! The allocator that the settings select, and the operations that not all kinds have.

use std::sync::{Arc, Mutex, PoisonError};

use warpool::Instance;
use warpool::memory::{
    Allocation, Backend, CachingAllocator, DeviceAllocator, DriverPoolAllocator, MappedPart, MemPoolId, PageStats,
    PagedAllocator, PoolCheckpoint, PrivatePools, Request, Restored, Settings,
};
use warpool_driver::{DeviceId, DevicePtr};

use crate::error::{Error, Result};

/// Where a block is mapped; empty if there is none.
pub(crate) type PartsOf = Arc<dyn Fn(DevicePtr) -> Vec<MappedPart> + Send + Sync>;

/// The device allocator of a runtime.
#[derive(Debug)]
pub(crate) enum Allocator {
    Caching(Arc<CachingAllocator>),
    Paged(Arc<PagedAllocator>),
    DriverPool(Arc<DriverPoolAllocator>, Box<Settings>),
}

impl Allocator {
    /// Creates the allocator that `settings.backend` names. Creates no context.
    pub(crate) fn new(instance: &Instance, settings: Settings) -> Result<Self> {
        Ok(match settings.backend {
            Backend::Native => Self::Caching(Arc::new(CachingAllocator::new(instance, settings))),
            Backend::Paged => {
                Self::Paged(Arc::new(PagedAllocator::new(instance, settings).map_err(no_virtual_memory)?))
            }
            Backend::CudaMallocAsync => {
                let allocator = DriverPoolAllocator::with_settings(instance, settings.clone());
                Self::DriverPool(Arc::new(allocator), Box::new(settings))
            }
        })
    }

    #[inline]
    pub(crate) fn as_dyn(&self) -> &dyn DeviceAllocator {
        match self {
            Self::Caching(allocator) => &**allocator,
            Self::Paged(allocator) => &**allocator,
            Self::DriverPool(allocator, _) => &**allocator,
        }
    }

    /// The allocator as a shared trait object.
    pub(crate) fn shared(&self) -> Arc<dyn DeviceAllocator> {
        match self {
            Self::Caching(allocator) => allocator.clone(),
            Self::Paged(allocator) => allocator.clone(),
            Self::DriverPool(allocator, _) => allocator.clone(),
        }
    }

    /// The name of its backend.
    pub(crate) fn name(&self) -> &'static str {
        self.backend().name()
    }

    /// Allocates, without dynamic dispatch: the hot path.
    #[inline]
    pub(crate) fn allocate(&self, request: Request) -> warpool::Result<Allocation> {
        match self {
            Self::Caching(allocator) => allocator.allocate_raw(request),
            Self::Paged(allocator) => allocator.allocate_raw(request),
            Self::DriverPool(allocator, _) => allocator.allocate_raw(request),
        }
    }

    /// Frees the block that starts at `ptr`; `device` is searched first.
    #[inline]
    pub(crate) fn free(&self, device: DeviceId, ptr: DevicePtr) -> warpool::Result<()> {
        match self {
            Self::Caching(allocator) => allocator.free_on(device, ptr),
            Self::Paged(allocator) => allocator.free_on(device, ptr),
            Self::DriverPool(allocator, _) => allocator.free_on(device, ptr),
        }
    }

    /// Allocates a cached block, if that is all that the request needs.
    #[inline]
    pub(crate) fn allocate_cached(&self, request: &Request) -> Option<DevicePtr> {
        match self {
            Self::Caching(allocator) => allocator.allocate_cached(request),
            Self::Paged(allocator) => allocator.allocate_cached(request).map(|allocation| allocation.ptr),
            Self::DriverPool(..) => None,
        }
    }

    /// Frees the block that starts at `ptr` on `device`, if that is all that the free needs.
    #[inline]
    pub(crate) fn free_cached(&self, device: DeviceId, ptr: DevicePtr) -> bool {
        match self {
            Self::Caching(allocator) => allocator.free_cached(device, ptr),
            Self::Paged(allocator) => allocator.free_cached(device, ptr),
            Self::DriverPool(..) => false,
        }
    }

    /// Allocates at an address.
    pub(crate) fn allocate_at(&self, request: Request, ptr: DevicePtr) -> Result<()> {
        match self {
            Self::Caching(allocator) => Ok(allocator.allocate_at(request, ptr).map(drop)?),
            Self::Paged(_) | Self::DriverPool(..) => {
                Err(Error::NativeOnly { what: "allocation at a given address", backend: self.backend().name() })
            }
        }
    }

    /// Writes a text into the history, with an allocated block.
    pub(crate) fn annotate(&self, ptr: DevicePtr, text: &str) -> Result<()> {
        match self {
            Self::Caching(allocator) => Ok(allocator.annotate(ptr, text)?),
            Self::Paged(allocator) => Ok(allocator.annotate(ptr, text)?),
            Self::DriverPool(..) => {
                Err(Error::NativeOnly { what: "annotation of blocks", backend: self.backend().name() })
            }
        }
    }

    pub(crate) fn backend(&self) -> Backend {
        match self {
            Self::Caching(_) => Backend::Native,
            Self::Paged(_) => Backend::Paged,
            Self::DriverPool(..) => Backend::CudaMallocAsync,
        }
    }

    /// Whether caching can be switched off by the allocator itself. If so, it is switched.
    pub(crate) fn set_caching(&self, on: bool) -> bool {
        match self {
            Self::Caching(allocator) => {
                allocator.set_caching(on);
                true
            }
            Self::Paged(_) | Self::DriverPool(..) => false,
        }
    }

    /// Whether memory of the device may be mapped: a copy between devices without peer access then needs the driver's
    /// call for that.
    pub(crate) fn maps_memory(&self) -> bool {
        match self {
            Self::Caching(allocator) => allocator.settings().expandable_segments,
            Self::Paged(_) | Self::DriverPool(..) => true,
        }
    }

    /// Where the block that starts at `ptr` is mapped, if it is mapped memory.
    pub(crate) fn mapped_parts(&self, ptr: DevicePtr) -> Result<Vec<MappedPart>> {
        match self {
            Self::Caching(allocator) => Ok(allocator.mapped_parts(ptr)?),
            Self::Paged(allocator) => Ok(allocator.mapped_parts(ptr)?),
            Self::DriverPool(..) => Ok(Vec::new()),
        }
    }

    /// The same as a function that outlives the allocator: then there are no parts.
    pub(crate) fn parts_of(&self) -> PartsOf {
        match self {
            Self::Caching(allocator) => {
                let allocator = Arc::downgrade(allocator);
                Arc::new(move |ptr| allocator.upgrade().and_then(|it| it.mapped_parts(ptr).ok()).unwrap_or_default())
            }
            Self::Paged(allocator) => {
                let allocator = Arc::downgrade(allocator);
                Arc::new(move |ptr| allocator.upgrade().and_then(|it| it.mapped_parts(ptr).ok()).unwrap_or_default())
            }
            Self::DriverPool(..) => Arc::new(|_ptr| Vec::new()),
        }
    }

    /// Lets kernels on `device` access the memory on `owner`.
    pub(crate) fn enable_peer_access(&self, device: DeviceId, owner: DeviceId) -> Result<()> {
        match self {
            Self::Caching(allocator) => Ok(allocator.enable_peer_access(device, owner)?),
            Self::Paged(allocator) => Ok(allocator.enable_peer_access(device, owner)?),
            Self::DriverPool(allocator, _) => Ok(allocator.instance().driver().peer_enable(device, owner)?),
        }
    }

    /// Records the allocated blocks of a pool.
    pub(crate) fn checkpoint(&self, device: DeviceId, pool: MemPoolId) -> Result<PoolCheckpoint> {
        match self {
            Self::Caching(allocator) => Ok(allocator.checkpoint(device, pool)?),
            Self::Paged(allocator) => Ok(allocator.checkpoint(device, pool)?),
            Self::DriverPool(..) => Err(Error::NoCheckpoints { backend: Backend::CudaMallocAsync.name() }),
        }
    }

    /// Restores them.
    pub(crate) fn restore(&self, checkpoint: &PoolCheckpoint) -> Result<Restored> {
        match self {
            Self::Caching(allocator) => Ok(allocator.restore(checkpoint)?),
            Self::Paged(allocator) => Ok(allocator.restore(checkpoint)?),
            Self::DriverPool(..) => Err(Error::NoCheckpoints { backend: Backend::CudaMallocAsync.name() }),
        }
    }

    /// The private pools, if the allocator has any. The driver's own pools need none: memory that they give to a
    /// capture belongs to its graph.
    pub(crate) fn pools(&self) -> Option<&dyn PrivatePools> {
        self.as_dyn().pools().ok()
    }

    /// Records that graphs of a pool may have been replayed on streams that PyTorch does not name.
    pub(crate) fn record_replays(&self, device: DeviceId, pool: MemPoolId) -> Result<()> {
        match self {
            Self::Caching(allocator) => Ok(allocator.record_pool_use_anywhere(device, pool)?),
            Self::Paged(allocator) => Ok(allocator.record_pool_use_anywhere(device, pool)?),
            Self::DriverPool(..) => Ok(()),
        }
    }

    /// The statistics of a device's pages.
    pub(crate) fn page_stats(&self, device: DeviceId) -> Result<PageStats> {
        match self {
            Self::Paged(allocator) => Ok(allocator.page_stats(device)?),
            Self::Caching(_) => Err(Error::NoPages { backend: Backend::Native.name() }),
            Self::DriverPool(..) => Err(Error::NoPages { backend: Backend::CudaMallocAsync.name() }),
        }
    }

    /// The settings in effect.
    pub(crate) fn settings(&self) -> Settings {
        match self {
            Self::Caching(allocator) => Settings::clone(&allocator.settings()),
            Self::Paged(allocator) => Settings::clone(&allocator.settings()),
            Self::DriverPool(_, settings) => Settings::clone(settings),
        }
    }

    /// Applies a settings string on top of the settings in effect, including memory limits. On error nothing changes.
    pub(crate) fn set_settings(&self, string: &str) -> Result<()> {
        if matches!(self, Self::DriverPool(..)) {
            return Err(Error::FixedSettings);
        }
        static UPDATE: Mutex<()> = Mutex::new(());
        let _serialized = UPDATE.lock().unwrap_or_else(PoisonError::into_inner);
        let before = self.settings();
        let after = before.updated(string)?;
        let (fraction, cap) = (after.per_process_memory_fraction, after.memory_cap_bytes);
        for device in self.as_dyn().instance().devices() {
            #[expect(clippy::float_cmp, reason = "whether the setting was changed at all")]
            if fraction != before.per_process_memory_fraction {
                self.as_dyn().set_memory_fraction(device.id(), fraction)?;
            }
            if cap != before.memory_cap_bytes {
                self.set_memory_cap(device.id(), cap)?;
            }
        }
        match self {
            Self::Caching(allocator) => allocator.set_settings(after),
            Self::Paged(allocator) => allocator.set_settings(after),
            Self::DriverPool(..) => {}
        }
        Ok(())
    }

    fn set_memory_cap(&self, device: DeviceId, bytes: Option<u64>) -> Result<()> {
        match self {
            Self::Caching(allocator) => Ok(allocator.set_memory_cap(device, bytes)?),
            Self::Paged(allocator) => Ok(allocator.set_memory_cap(device, bytes)?),
            Self::DriverPool(..) => Err(Error::FixedSettings),
        }
    }
}

/// A GPU without virtual memory management: says which backend works there.
fn no_virtual_memory(error: warpool::Error) -> Error {
    match error {
        warpool::Error::Unsupported { .. } => Error::NoVirtualMemory,
        other => other.into(),
    }
}
