//! Closures as an external allocator.

use std::fmt;

use warpool_driver::{DeviceId, DevicePtr};

use super::{BaseAllocation, ExternalAllocator, Handled, RawStream};
use crate::Result;
use crate::memory::MemPoolId;

type Allocate = Box<dyn Fn(u64, DeviceId, RawStream) -> Result<Option<DevicePtr>> + Send + Sync>;
type Free = Box<dyn Fn(DevicePtr, u64, DeviceId, RawStream) -> Result<()> + Send + Sync>;
type PoolHook = Box<dyn Fn(DeviceId, MemPoolId) + Send + Sync>;

/// An [`ExternalAllocator`] made of closures: two required ones, and optional hooks set with the `on_` methods.
///
/// ```
/// use std::sync::Arc;
/// use warpool::Instance;
/// use warpool::driver::sim::{SimConfig, SimDriver};
/// use warpool::memory::{Allocate, DeviceAllocator, FnAllocator, PluggableAllocator};
///
/// # fn main() -> warpool::Result<()> {
/// let instance = Instance::new(Arc::new(SimDriver::new(SimConfig::default())))?;
/// let (allocates, frees) = (instance.driver().clone(), instance.driver().clone());
/// let external = FnAllocator::new(
///     move |bytes, device, _stream| Ok(allocates.mem_alloc(device, bytes).ok()),
///     move |ptr, _bytes, _device, _stream| Ok(frees.mem_free(ptr)?),
/// );
/// let allocator: Arc<dyn DeviceAllocator> = Arc::new(PluggableAllocator::new(&instance, Arc::new(external))?);
///
/// let device = instance.device(0)?;
/// let block = allocator.allocate(1000, &device.pool_stream()?)?;
/// assert_eq!(allocator.stats(device.id())?.allocated_bytes.all.current, 1000);
/// block.free()?;
/// # Ok(())
/// # }
/// ```
pub struct FnAllocator {
    allocate: Allocate,
    free: Free,
    init: Option<Box<dyn Fn(u32) -> Result<()> + Send + Sync>>,
    reset: Option<Box<dyn Fn() + Send + Sync>>,
    memory_fraction: Option<Box<dyn Fn(f64, DeviceId) + Send + Sync>>,
    base_allocation: Option<Box<dyn Fn(DevicePtr) -> Option<BaseAllocation> + Send + Sync>>,
    record_stream: Option<Box<dyn Fn(DevicePtr, RawStream) + Send + Sync>>,
    begin_pool: Option<PoolHook>,
    end_pool: Option<PoolHook>,
    release_pool: Option<PoolHook>,
}

impl FnAllocator {
    /// Memory from `allocate`, freed by `free`. See [`ExternalAllocator`] for their arguments.
    pub fn new(
        allocate: impl Fn(u64, DeviceId, RawStream) -> Result<Option<DevicePtr>> + Send + Sync + 'static,
        free: impl Fn(DevicePtr, u64, DeviceId, RawStream) -> Result<()> + Send + Sync + 'static,
    ) -> Self {
        Self {
            allocate: Box::new(allocate),
            free: Box::new(free),
            init: None,
            reset: None,
            memory_fraction: None,
            base_allocation: None,
            record_stream: None,
            begin_pool: None,
            end_pool: None,
            release_pool: None,
        }
    }

    /// As [`ExternalAllocator::init`].
    #[must_use]
    pub fn on_init(mut self, hook: impl Fn(u32) -> Result<()> + Send + Sync + 'static) -> Self {
        self.init = Some(Box::new(hook));
        self
    }

    /// As [`ExternalAllocator::reset`].
    #[must_use]
    pub fn on_reset(mut self, hook: impl Fn() + Send + Sync + 'static) -> Self {
        self.reset = Some(Box::new(hook));
        self
    }

    /// As [`ExternalAllocator::memory_fraction`].
    #[must_use]
    pub fn on_memory_fraction(mut self, hook: impl Fn(f64, DeviceId) + Send + Sync + 'static) -> Self {
        self.memory_fraction = Some(Box::new(hook));
        self
    }

    /// As [`ExternalAllocator::base_allocation`].
    #[must_use]
    pub fn on_base_allocation(
        mut self,
        hook: impl Fn(DevicePtr) -> Option<BaseAllocation> + Send + Sync + 'static,
    ) -> Self {
        self.base_allocation = Some(Box::new(hook));
        self
    }

    /// As [`ExternalAllocator::record_stream`]; with this hook, the external allocator handles other
    /// streams itself.
    #[must_use]
    pub fn on_record_stream(mut self, hook: impl Fn(DevicePtr, RawStream) + Send + Sync + 'static) -> Self {
        self.record_stream = Some(Box::new(hook));
        self
    }

    /// As [`ExternalAllocator::begin_pool`].
    #[must_use]
    pub fn on_begin_pool(mut self, hook: impl Fn(DeviceId, MemPoolId) + Send + Sync + 'static) -> Self {
        self.begin_pool = Some(Box::new(hook));
        self
    }

    /// As [`ExternalAllocator::end_pool`].
    #[must_use]
    pub fn on_end_pool(mut self, hook: impl Fn(DeviceId, MemPoolId) + Send + Sync + 'static) -> Self {
        self.end_pool = Some(Box::new(hook));
        self
    }

    /// As [`ExternalAllocator::release_pool`].
    #[must_use]
    pub fn on_release_pool(mut self, hook: impl Fn(DeviceId, MemPoolId) + Send + Sync + 'static) -> Self {
        self.release_pool = Some(Box::new(hook));
        self
    }
}

impl ExternalAllocator for FnAllocator {
    fn allocate(&self, bytes: u64, device: DeviceId, stream: RawStream) -> Result<Option<DevicePtr>> {
        (self.allocate)(bytes, device, stream)
    }

    fn free(&self, ptr: DevicePtr, bytes: u64, device: DeviceId, stream: RawStream) -> Result<()> {
        (self.free)(ptr, bytes, device, stream)
    }

    fn init(&self, device_count: u32) -> Result<()> {
        self.init.as_ref().map_or(Ok(()), |hook| hook(device_count))
    }

    fn reset(&self) {
        if let Some(hook) = &self.reset {
            hook();
        }
    }

    fn memory_fraction(&self, fraction: f64, device: DeviceId) {
        if let Some(hook) = &self.memory_fraction {
            hook(fraction, device);
        }
    }

    fn base_allocation(&self, ptr: DevicePtr) -> Option<BaseAllocation> {
        self.base_allocation.as_ref().and_then(|hook| hook(ptr))
    }

    fn record_stream(&self, ptr: DevicePtr, stream: RawStream) -> Handled {
        match &self.record_stream {
            Some(hook) => {
                hook(ptr, stream);
                Handled::Yes
            }
            None => Handled::No,
        }
    }

    fn begin_pool(&self, device: DeviceId, pool: MemPoolId) {
        if let Some(hook) = &self.begin_pool {
            hook(device, pool);
        }
    }

    fn end_pool(&self, device: DeviceId, pool: MemPoolId) {
        if let Some(hook) = &self.end_pool {
            hook(device, pool);
        }
    }

    fn release_pool(&self, device: DeviceId, pool: MemPoolId) {
        if let Some(hook) = &self.release_pool {
            hook(device, pool);
        }
    }
}

impl fmt::Debug for FnAllocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hooks = [
            ("init", self.init.is_some()),
            ("reset", self.reset.is_some()),
            ("memory_fraction", self.memory_fraction.is_some()),
            ("base_allocation", self.base_allocation.is_some()),
            ("record_stream", self.record_stream.is_some()),
            ("begin_pool", self.begin_pool.is_some()),
            ("end_pool", self.end_pool.is_some()),
            ("release_pool", self.release_pool.is_some()),
        ];
        let names: Vec<_> = hooks.into_iter().filter_map(|(name, is_set)| is_set.then_some(name)).collect();
        f.debug_struct("FnAllocator").field("hooks", &names).finish()
    }
}
