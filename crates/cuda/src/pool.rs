//! The driver's own stream-ordered pools.

use std::ffi::c_int;
use std::ptr;

use cudarc::driver::sys;
use cudarc::driver::sys::CUmemPool_attribute_enum as Attribute;
use warpool_driver::{Access, Call, DeviceId, DevicePtr, ErrorCode, PoolAttribute, PoolId, Pools, Result, StreamId};

use crate::CudaDriver;
use crate::context::Context;
use crate::error::Site;
use crate::memory::{Allocation, Life};
use crate::table::{Handle, Used};
use crate::virtual_memory::{access_of, pool_properties_of};

/// A pool behind its id.
pub(crate) struct Pool {
    raw: Handle<sys::CUmemPoolHandle_st>,
    context: Context,
    /// Whether it is a device's default pool, which nobody may destroy.
    default: bool,
}

/// CUDA's number for an attribute, and whether its value is an `int` rather than 64 bits.
const fn attribute_of(attribute: PoolAttribute) -> (Attribute, bool) {
    match attribute {
        PoolAttribute::ReuseFollowEvents => (Attribute::CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES, true),
        PoolAttribute::ReuseOpportunistic => (Attribute::CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC, true),
        PoolAttribute::ReuseInternalDependencies => {
            (Attribute::CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES, true)
        }
        PoolAttribute::ReleaseThreshold => (Attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, false),
        PoolAttribute::ReservedCurrent => (Attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, false),
        PoolAttribute::ReservedHigh => (Attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH, false),
        PoolAttribute::UsedCurrent => (Attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT, false),
        PoolAttribute::UsedHigh => (Attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH, false),
    }
}

impl Pools for CudaDriver {
    fn pool_default(&self, device: DeviceId) -> Result<PoolId> {
        let site = self.enter(Call::PoolDefault)?;
        let slot = self.device(site, device)?;
        self.require_pools(site, device)?;
        let context = self.context_of(site, device)?;
        let _current = self.make_current(site, context)?;
        let mut raw = ptr::null_mut();
        // SAFETY: `raw` takes the handle.
        site.check(unsafe { (self.api.device_get_default_mem_pool)(&raw mut raw, slot.raw) })?;
        let raw = Handle::new(raw);
        let pool = Pool { raw, context, default: true };
        Ok(PoolId(self.pools.find_or_insert(|known| known.default && known.raw == raw, pool)))
    }

    fn pool_create(&self, device: DeviceId) -> Result<PoolId> {
        let site = self.enter(Call::PoolCreate)?;
        let slot = self.device(site, device)?;
        self.require_pools(site, device)?;
        let context = self.context_of(site, device)?;
        let _current = self.make_current(site, context)?;
        let properties = pool_properties_of(slot);
        let mut raw = ptr::null_mut();
        // SAFETY: `raw` takes the handle; `properties` is read during the call.
        site.check(unsafe { (self.api.mem_pool_create)(&raw mut raw, &raw const properties) })?;
        Ok(PoolId(self.pools.insert(Pool { raw: Handle::new(raw), context, default: false })))
    }

    fn pool_destroy(&self, pool: PoolId) -> Result<()> {
        let site = self.enter(Call::PoolDestroy)?;
        // Asked before anything is locked: a default pool must stay usable meanwhile.
        if self.pool(site, pool)?.default {
            return Err(site.error(ErrorCode::InvalidValue));
        }
        let row = self.pools.alone(pool.0).ok_or_else(|| site.error(ErrorCode::InvalidHandle))?;
        let _current = self.make_current(site, row.context)?;
        // SAFETY: `raw` came from cuMemPoolCreate, and nobody else can use it.
        site.check(unsafe { (self.api.mem_pool_destroy)(row.raw.raw()) })?;
        row.remove();
        Ok(())
    }

    fn pool_alloc(&self, pool: PoolId, bytes: u64, stream: StreamId) -> Result<DevicePtr> {
        let site = self.enter(Call::PoolAlloc)?;
        let pool = self.pool(site, pool)?;
        let stream = self.stream(site, stream)?;
        let context = self.context_of_stream(site, &stream)?;
        let _current = self.make_current(site, context)?;
        let captured = self.capturing_graph(site, &stream).is_some();
        let mut address = 0;
        // SAFETY: pool and stream are live; `address` takes the number.
        site.check(unsafe {
            (self.api.mem_alloc_from_pool_async)(&raw mut address, bytes as usize, pool.raw.raw(), stream.raw.raw())
        })?;
        if address != 0 {
            let life = if captured { Life::Graph } else { Life::Counted };
            self.allocations.insert(address, bytes, Allocation { context, life });
        }
        Ok(DevicePtr(address))
    }

    fn pool_free(&self, ptr: DevicePtr, stream: StreamId) -> Result<()> {
        let site = self.enter(Call::PoolFree)?;
        let stream = self.stream(site, stream)?;
        let known = self.allocations.get(ptr.0).ok_or_else(|| site.error(ErrorCode::InvalidValue))?;
        let _current = self.on_stream(site, &stream)?;
        // Out of the book first: once CUDA has it back, another thread may be given the same address.
        let taken = self.allocations.remove_if(ptr.0, |what| what.life == Life::Counted);
        if taken.is_none() && known.what.life == Life::Counted {
            return Err(site.error(ErrorCode::InvalidValue));
        }
        // SAFETY: only addresses that this driver gave out get here; CUDA knows whether one is live.
        let freed = site.check(unsafe { (self.api.mem_free_async)(ptr.0, stream.raw.raw()) });
        if let (Err(_), Some(range)) = (&freed, taken) {
            self.allocations.insert(ptr.0, range.bytes, range.what);
        }
        freed
    }

    fn pool_get(&self, pool: PoolId, attribute: PoolAttribute) -> Result<u64> {
        let site = self.enter(Call::PoolGet)?;
        let pool = self.pool(site, pool)?;
        let _current = self.make_current(site, pool.context)?;
        let (attribute, _) = attribute_of(attribute);
        // CUDA writes an int or 64 bits; both read right from here, since the machine is little-endian and neither is
        // negative.
        let mut value = 0_u64;
        // SAFETY: the pool is live; `value` has room for the larger of the two.
        site.check(unsafe { (self.api.mem_pool_get_attribute)(pool.raw.raw(), attribute, (&raw mut value).cast()) })?;
        Ok(value)
    }

    fn pool_set(&self, pool: PoolId, attribute: PoolAttribute, value: u64) -> Result<()> {
        let site = self.enter(Call::PoolSet)?;
        let pool = self.pool(site, pool)?;
        let (attribute, is_int) = attribute_of(attribute);
        if is_int && value > 1 {
            return Err(site.explain(ErrorCode::InvalidValue, "this attribute is 0 or 1"));
        }
        let _current = self.make_current(site, pool.context)?;
        let (mut wide, mut narrow) = (value, value as c_int);
        let value = if is_int { (&raw mut narrow).cast() } else { (&raw mut wide).cast() };
        // SAFETY: the pool is live; `value` points to the type that the attribute has.
        site.check(unsafe { (self.api.mem_pool_set_attribute)(pool.raw.raw(), attribute, value) })
    }

    fn pool_trim(&self, pool: PoolId, keep: u64) -> Result<()> {
        let site = self.enter(Call::PoolTrim)?;
        let pool = self.pool(site, pool)?;
        let _current = self.make_current(site, pool.context)?;
        // Rounding inside CUDA overflows for sizes near the end of the range, and then all is trimmed (seen on an
        // H200). No pool holds that much.
        let keep = keep.min(1 << 56) as usize;
        // SAFETY: the pool is live.
        site.check(unsafe { (self.api.mem_pool_trim_to)(pool.raw.raw(), keep) })
    }

    fn pool_set_access(&self, pool: PoolId, device: DeviceId, access: Access) -> Result<()> {
        let site = self.enter(Call::PoolSetAccess)?;
        let pool = self.pool(site, pool)?;
        let description = access_of(self.device(site, device)?, access);
        let _current = self.make_current(site, pool.context)?;
        // SAFETY: the pool is live; the one description is read during the call.
        site.check(unsafe { (self.api.mem_pool_set_access)(pool.raw.raw(), &raw const description, 1) })
    }
}

impl CudaDriver {
    fn pool(&self, site: Site<'_>, pool: PoolId) -> Result<Used<'_, Pool>> {
        self.pools.get(pool.0).ok_or_else(|| site.error(ErrorCode::InvalidHandle))
    }

    fn require_pools(&self, site: Site<'_>, device: DeviceId) -> Result<()> {
        let slot = self.device(site, device)?;
        let supported =
            self.has(site, slot, sys::CUdevice_attribute_enum::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED)?;
        if supported { Ok(()) } else { Err(site.error(ErrorCode::NotSupported)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reuse_attributes_are_ints_and_the_rest_is_not() {
        let number = |attribute| (attribute_of(attribute).0 as u32, attribute_of(attribute).1);
        assert_eq!(number(PoolAttribute::ReuseFollowEvents), (1, true));
        assert_eq!(number(PoolAttribute::ReuseOpportunistic), (2, true));
        assert_eq!(number(PoolAttribute::ReuseInternalDependencies), (3, true));
        assert_eq!(number(PoolAttribute::ReleaseThreshold), (4, false));
        assert_eq!(number(PoolAttribute::UsedHigh), (8, false));
    }
}
