//! Closures as an external allocator.

use std::fmt;

use warpool_driver::{DeviceId, DevicePtr};

use super::{BaseAllocation, ExternalAllocator, Handled, RawStream};
use crate::Result;
use crate::memory::MemPoolId;

type Allocate = Box<dyn Fn(u64, DeviceId, RawStream) -> Result<Option<DevicePtr>> + Send + Sync>;
type Free = Box<dyn Fn(DevicePtr, u64, DeviceId, RawStream) -> Result<()> + Send + Sync>;

/// An [`ExternalAllocator`] made of closures: two required ones, and optional hooks set with the `on_` methods.
///
/// ```
/// use std::sync::Arc;
/// use warpool::Instance;
/// use warpool::driver::sim::{SimConfig, SimDriver};
/// use warpool::memory::{Allocate, DeviceAllocator, PluggableAllocator};
/// use warpool::memory::external::FnAllocator;
///
/// # fn main() -> warpool::Result<()> {
/// let instance = Instance::new(Arc::new(SimDriver::new(SimConfig::default())))?;
/// let (allocates, frees) = (instance.driver().clone(), instance.driver().clone());
/// let external = FnAllocator::new(
///     move |bytes, device, _stream| Ok(allocates.mem_alloc(device, bytes).ok()),
///     move |ptr, _bytes, _device, _stream| Ok(frees.mem_free(ptr)?),
/// );
/// let allocator = Arc::new(PluggableAllocator::new(&instance, Arc::new(external))?);
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
    hooks: Hooks,
}

impl FnAllocator {
    /// An allocator whose memory comes from `allocate` and is freed by `free`. See [`ExternalAllocator`] for their
    /// arguments.
    pub fn new(
        allocate: impl Fn(u64, DeviceId, RawStream) -> Result<Option<DevicePtr>> + Send + Sync + 'static,
        free: impl Fn(DevicePtr, u64, DeviceId, RawStream) -> Result<()> + Send + Sync + 'static,
    ) -> Self {
        Self { allocate: Box::new(allocate), free: Box::new(free), hooks: Hooks::default() }
    }
}

/// Declares the optional hooks: `method sets hook(arguments) -> result`, where `method` sets the closure that is called
/// for [`ExternalAllocator`]'s method `hook`.
macro_rules! hooks {
    ($($(#[doc = $more:literal])* $set:ident sets $hook:ident($($ty:ty),*) $(-> $ret:ty)?;)*) => {
        #[derive(Default)]
        struct Hooks {
            $($hook: Option<Box<dyn Fn($($ty),*) $(-> $ret)? + Send + Sync>>,)*
        }

        impl FnAllocator {
            $(
                #[doc = concat!("As [`ExternalAllocator::", stringify!($hook), "`].")]
                $(#[doc = $more])*
                #[must_use]
                pub fn $set(mut self, hook: impl Fn($($ty),*) $(-> $ret)? + Send + Sync + 'static) -> Self {
                    self.hooks.$hook = Some(Box::new(hook));
                    self
                }
            )*
        }

        impl fmt::Debug for FnAllocator {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let hooks = [$((stringify!($hook), self.hooks.$hook.is_some())),*];
                let names: Vec<_> = hooks.into_iter().filter_map(|(name, is_set)| is_set.then_some(name)).collect();
                f.debug_struct("FnAllocator").field("hooks", &names).finish()
            }
        }
    };
}

hooks! {
    on_init sets init(u32) -> Result<()>;
    on_reset sets reset();
    on_memory_fraction sets memory_fraction(f64, DeviceId);
    on_base_allocation sets base_allocation(DevicePtr) -> Option<BaseAllocation>;
    /// With this hook, the external allocator handles other streams itself.
    on_record_stream sets record_stream(DevicePtr, RawStream);
    on_begin_pool sets begin_pool(DeviceId, MemPoolId);
    on_end_pool sets end_pool(DeviceId, MemPoolId);
    on_release_pool sets release_pool(DeviceId, MemPoolId);
}

impl ExternalAllocator for FnAllocator {
    fn allocate(&self, bytes: u64, device: DeviceId, stream: RawStream) -> Result<Option<DevicePtr>> {
        (self.allocate)(bytes, device, stream)
    }

    fn free(&self, ptr: DevicePtr, bytes: u64, device: DeviceId, stream: RawStream) -> Result<()> {
        (self.free)(ptr, bytes, device, stream)
    }

    fn init(&self, device_count: u32) -> Result<()> {
        self.hooks.init.as_ref().map_or(Ok(()), |hook| hook(device_count))
    }

    fn reset(&self) {
        self.hooks.reset.iter().for_each(|hook| hook());
    }

    fn memory_fraction(&self, fraction: f64, device: DeviceId) {
        self.hooks.memory_fraction.iter().for_each(|hook| hook(fraction, device));
    }

    fn base_allocation(&self, ptr: DevicePtr) -> Option<BaseAllocation> {
        self.hooks.base_allocation.as_ref().and_then(|hook| hook(ptr))
    }

    fn record_stream(&self, ptr: DevicePtr, stream: RawStream) -> Handled {
        self.hooks.record_stream.as_ref().map_or(Handled::No, |hook| {
            hook(ptr, stream);
            Handled::Yes
        })
    }

    fn begin_pool(&self, device: DeviceId, pool: MemPoolId) {
        self.hooks.begin_pool.iter().for_each(|hook| hook(device, pool));
    }

    fn end_pool(&self, device: DeviceId, pool: MemPoolId) {
        self.hooks.end_pool.iter().for_each(|hook| hook(device, pool));
    }

    fn release_pool(&self, device: DeviceId, pool: MemPoolId) {
        self.hooks.release_pool.iter().for_each(|hook| hook(device, pool));
    }
}
