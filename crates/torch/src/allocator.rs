//! The allocator that the settings select, and the operations that not all kinds have.

use std::sync::{Mutex, PoisonError};

use warpool::Instance;
use warpool::memory::{
    Backend, CachingAllocator, DeviceAllocator, DriverPoolAllocator, MemPoolId, PageStats, PagedAllocator,
    PrivatePools, Settings,
};
use warpool_driver::DeviceId;

use crate::error::{Error, Result};

/// The device allocator of a runtime.
#[derive(Debug)]
pub(crate) enum Allocator {
    Caching(Box<CachingAllocator>),
    Paged(Box<PagedAllocator>),
    DriverPool(Box<DriverPoolAllocator>, Box<Settings>),
}

impl Allocator {
    /// Creates the allocator that `settings.backend` names. Creates no context.
    pub(crate) fn new(instance: &Instance, settings: Settings) -> Result<Self> {
        Ok(match settings.backend {
            Backend::Native => Self::Caching(Box::new(CachingAllocator::new(instance, settings))),
            Backend::Paged => {
                Self::Paged(Box::new(PagedAllocator::new(instance, settings).map_err(no_virtual_memory)?))
            }
            Backend::CudaMallocAsync => {
                let allocator = DriverPoolAllocator::with_settings(instance, settings.clone());
                Self::DriverPool(Box::new(allocator), Box::new(settings))
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

    /// What a device's pages are used for.
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
