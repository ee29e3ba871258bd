//! The allocator that the settings select, and what its users read if it lacks something.

use std::sync::{Arc, Mutex, PoisonError};

use warpool::Instance;
use warpool::memory::raw::MappedPart;
use warpool::memory::settings::Backend;
use warpool::memory::{CachingAllocator, DeviceAllocator, DriverPoolAllocator, PagedAllocator, Settings};
use warpool_driver::DevicePtr;

use crate::error::{Error, Result};

/// The backends that have most features.
pub(crate) const NATIVE_OR_PAGED: &str = "backend:native or backend:paged";

/// Where a block is mapped; empty if there is none.
pub(crate) type PartsOf = Arc<dyn Fn(DevicePtr) -> Vec<MappedPart> + Send + Sync>;

/// Creates the allocator that `settings.backend` names. Creates no context.
pub(crate) fn create(instance: &Instance, settings: Settings) -> Result<Arc<dyn DeviceAllocator>> {
    Ok(match settings.backend {
        Backend::Native => Arc::new(CachingAllocator::new(instance, settings)),
        Backend::Paged => Arc::new(PagedAllocator::new(instance, settings).map_err(no_virtual_memory)?),
        Backend::CudaMallocAsync => Arc::new(DriverPoolAllocator::with_settings(instance, settings)),
    })
}

/// A GPU without virtual memory management: says which backend works there.
fn no_virtual_memory(error: warpool::Error) -> Error {
    match error {
        warpool::Error::Unsupported { .. } => Error::NoVirtualMemory,
        other => other.into(),
    }
}

/// The name of the allocator's backend.
pub(crate) fn backend(allocator: &dyn DeviceAllocator) -> &'static str {
    allocator.settings().backend.name()
}

/// The outcome of a call that not every backend has. If it is refused for that, the error names the backend, and
/// `choose` those that have it.
pub(crate) fn optional<T>(
    allocator: &dyn DeviceAllocator,
    choose: &'static str,
    outcome: warpool::Result<T>,
) -> Result<T> {
    outcome.map_err(|error| match error {
        warpool::Error::Unsupported { what, .. } => Error::NotInBackend { what, backend: backend(allocator), choose },
        other => other.into(),
    })
}

/// Where blocks are mapped, by a function that outlives the allocator: then there are no parts.
pub(crate) fn parts_of(allocator: &Arc<dyn DeviceAllocator>) -> PartsOf {
    let allocator = Arc::downgrade(allocator);
    Arc::new(move |ptr| allocator.upgrade().and_then(|it| it.mapped_parts(ptr).ok()).unwrap_or_default())
}

/// Applies a settings string on top of the settings in effect, including memory limits. On error nothing changes.
pub(crate) fn set_settings(allocator: &dyn DeviceAllocator, string: &str) -> Result<()> {
    static UPDATE: Mutex<()> = Mutex::new(());
    let _serialized = UPDATE.lock().unwrap_or_else(PoisonError::into_inner);
    let before = allocator.settings();
    let after = before.updated(string)?;
    let (fraction, cap) = (after.per_process_memory_fraction, after.memory_cap_bytes);
    // First, since not every backend can. The limits were checked with the string.
    let choose = "backend:native or backend:paged, or set them in the environment";
    optional(allocator, choose, allocator.set_settings(after))?;
    for device in allocator.instance().devices() {
        #[expect(clippy::float_cmp, reason = "whether the setting was changed at all")]
        if fraction != before.per_process_memory_fraction {
            allocator.set_memory_fraction(device.id(), fraction)?;
        }
        if cap != before.memory_cap_bytes {
            allocator.set_memory_cap(device.id(), cap)?;
        }
    }
    Ok(())
}
