//! An external allocator as a source.

use std::sync::Arc;

use warpool_driver::{DeviceId, DevicePtr, Driver, StreamId};

use super::UncachedAllocator;
use super::pools::PoolEvent;
use super::source::Source;
use crate::capture::RelaxedMode;
use crate::memory::external::AddressRanges;
use crate::memory::{BaseAllocation, ExternalAllocator, Handled, OomCause, RawStream, Settings};
use crate::{Error, Instance, Result};

/// Device memory from an [`ExternalAllocator`]; the counterpart of PyTorch's `CUDAPluggableAllocator`. See the
/// [module](crate::memory) for how allocators are used.
///
/// Dropping it frees nothing: blocks dropped before are freed by the allocator's next call, so call
/// [`trim`](crate::memory::DeviceAllocator::trim) first.
///
/// # Captures
/// A block that a capture allocated from a private pool is kept for the graph: however early its owner freed it, it is
/// released only when the pool has no users and the replays are done. Nothing is cached, so it is not reused meanwhile:
/// a graph needs the sum of all its allocations. Any other block that a capturing stream used is freed after that
/// capture.
///
/// # Where it differs from PyTorch's
/// - These work, unlike with PyTorch's: statistics, snapshots, history, observers, memory fraction, private pools.
/// - A request for 0 bytes returns the null address without a call. A null address from the external allocator means
///   out of memory.
/// - `init` gets the actual number of devices.
/// - Pool hooks are called in order, but those for the end of routing and for a release may run in the allocator's next
///   call: destructors call no hooks.
/// - Blocks that other streams used wait for them, if the external allocator has no hook for that.
pub type PluggableAllocator = UncachedAllocator<External>;

/// An external allocator, with the address ranges of its live allocations.
pub struct External {
    instance: Instance,
    allocator: Arc<dyn ExternalAllocator>,
    ranges: AddressRanges,
}

impl UncachedAllocator<External> {
    /// An allocator for all devices of `instance`, without limits. Calls `init`.
    pub fn new(instance: &Instance, external: Arc<dyn ExternalAllocator>) -> Result<Self> {
        Self::with_settings(instance, external, Settings::default())
    }

    /// As `new`, with settings. Only the memory fraction and the cap have an effect; the others are shown in snapshots.
    pub fn with_settings(
        instance: &Instance,
        external: Arc<dyn ExternalAllocator>,
        settings: Settings,
    ) -> Result<Self> {
        external.init(instance.device_count())?;
        let source = External { instance: instance.clone(), allocator: external, ranges: AddressRanges::default() };
        Ok(Self::over(instance, source, settings))
    }

    /// The external allocator.
    #[must_use]
    pub fn external(&self) -> &Arc<dyn ExternalAllocator> {
        &self.source().allocator
    }

    /// The allocation that contains `ptr`, from the external allocator's hook or, if that returns `None`, from the
    /// recorded address ranges.
    pub fn base_allocation(&self, ptr: DevicePtr) -> Result<BaseAllocation> {
        let source = self.source();
        let answer = source.call(|external| external.base_allocation(ptr))?;
        let recorded = |at| source.ranges.containing(at).map(|(ptr, bytes)| BaseAllocation { ptr, bytes: Some(bytes) });
        match answer {
            Some(base) if base.bytes.is_some() => Ok(base),
            Some(base) => Ok(recorded(base.ptr).filter(|recorded| recorded.ptr == base.ptr).unwrap_or(base)),
            None => recorded(ptr).ok_or(Error::UnknownPointer { ptr }),
        }
    }
}

impl External {
    fn driver(&self) -> &dyn Driver {
        &**self.instance.driver()
    }

    /// Calls the external allocator in the relaxed mode: the driver calls that it makes must not invalidate a capture.
    fn call<R>(&self, call: impl FnOnce(&dyn ExternalAllocator) -> R) -> Result<R> {
        let _relaxed = RelaxedMode::begin(self.driver())?;
        Ok(call(&*self.allocator))
    }
}

impl Source for External {
    const NAME: &'static str = "pluggable";
    const STREAM_ORDERED: bool = false;
    const PRIVATE_POOLS: bool = true;
    const GRANULARITY: u64 = 1;
    const OOM_CAUSE: OomCause = OomCause::External;

    fn allocate(&self, device: DeviceId, bytes: u64, stream: RawStream) -> Result<Option<DevicePtr>> {
        let allocated = self.call(|external| external.allocate(bytes, device, stream))??.filter(|ptr| !ptr.is_null());
        if let Some(ptr) = allocated {
            self.ranges.insert(ptr, bytes)?;
        }
        Ok(allocated)
    }

    fn free(&self, ptr: DevicePtr, bytes: u64, device: DeviceId, stream: RawStream) -> Result<()> {
        self.ranges.remove(ptr);
        self.allocator.free(ptr, bytes, device, stream)
    }

    fn release_stream(&self, device: DeviceId) -> Result<StreamId> {
        self.instance.default_stream_id(device)
    }

    fn trim(&self, _device: DeviceId, capturing: bool) -> Result<()> {
        // `reset` may synchronize the device, which invalidates captures even in the relaxed mode.
        if capturing { Ok(()) } else { self.call(|external| external.reset()) }
    }

    fn record_use(&self, ptr: DevicePtr, stream: RawStream) -> Result<Handled> {
        self.call(|external| external.record_stream(ptr, stream))
    }

    fn set_memory_fraction(&self, device: DeviceId, fraction: f64) -> Result<()> {
        self.call(|external| external.memory_fraction(fraction, device))
    }

    fn pool_event(&self, device: DeviceId, event: PoolEvent) -> Result<()> {
        self.call(|external| match event {
            PoolEvent::Begin(pool) => external.begin_pool(device, pool),
            PoolEvent::End(pool) => external.end_pool(device, pool),
            PoolEvent::Release(pool) => external.release_pool(device, pool),
        })
    }
}
