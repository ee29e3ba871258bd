//! CUDA's stream-ordered memory pools.

use std::ffi::c_int;
use std::ptr;

use cudarc::driver::sys;
use cudarc::driver::sys::CUmemPool_attribute_enum as Attribute;
use warpool_driver::{Access, Call, DeviceId, DevicePtr, ErrorCode, PoolAttribute, PoolId, Pools, Result, StreamId};

use crate::CudaDriver;
use crate::device_ranges::{Allocation, Lifetime};
use crate::error::CallSite;
use crate::handle::{Context, CudaHandle};
use crate::object_table::Shared;
use crate::virtual_memory::{access_of, pool_properties_of};

/// A pool in the object table.
pub(crate) struct Pool {
    raw: CudaHandle<sys::CUmemPoolHandle_st>,
    context: Context,
    /// Whether it is a device's default pool, which cannot be destroyed.
    is_default: bool,
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
        let gpu = self.device(site, device)?;
        self.require_pools(site, device)?;
        let context = self.context_of(site, device)?;
        let _current = self.make_current(site, context)?;
        let mut raw = ptr::null_mut();
        // SAFETY: CUDA writes the handle to `raw`.
        site.check(unsafe { (self.api.device_get_default_mem_pool)(&raw mut raw, gpu.raw) })?;
        let raw = CudaHandle::new(raw);
        let pool = Pool { raw, context, is_default: true };
        Ok(PoolId(self.pools.find_or_insert(|known| known.is_default && known.raw == raw, pool)))
    }

    fn pool_create(&self, device: DeviceId) -> Result<PoolId> {
        let site = self.enter(Call::PoolCreate)?;
        let gpu = self.device(site, device)?;
        self.require_pools(site, device)?;
        let context = self.context_of(site, device)?;
        let _current = self.make_current(site, context)?;
        let properties = pool_properties_of(gpu);
        let mut raw = ptr::null_mut();
        // SAFETY: CUDA writes the handle to `raw`, and reads `properties` during the call.
        site.check(unsafe { (self.api.mem_pool_create)(&raw mut raw, &raw const properties) })?;
        Ok(PoolId(self.pools.insert(Pool { raw: CudaHandle::new(raw), context, is_default: false })))
    }

    fn pool_destroy(&self, pool: PoolId) -> Result<()> {
        let site = self.enter(Call::PoolDestroy)?;
        // Before the exclusive lock: a default pool must stay usable meanwhile.
        if self.pool(site, pool)?.is_default {
            return Err(site.error(ErrorCode::InvalidValue));
        }
        let object = self.pools.exclusive(pool.0).ok_or_else(|| site.error(ErrorCode::InvalidHandle))?;
        let _current = self.make_current(site, object.context)?;
        // SAFETY: `raw` came from cuMemPoolCreate, and no other call can use it.
        site.check(unsafe { (self.api.mem_pool_destroy)(object.raw.raw()) })?;
        object.remove();
        Ok(())
    }

    fn pool_alloc(&self, pool: PoolId, bytes: u64, stream: StreamId) -> Result<DevicePtr> {
        let site = self.enter(Call::PoolAlloc)?;
        let pool = self.pool(site, pool)?;
        let stream = self.stream(site, stream)?;
        let context = self.context_of_stream(site, &stream)?;
        let _current = self.make_current(site, context)?;
        let work = self.begin_work(site, &stream, stream.lock_work());
        let mut address = 0;
        // SAFETY: pool and stream are live; CUDA writes the address to `address`.
        site.check(unsafe {
            (self.api.mem_alloc_from_pool_async)(&raw mut address, bytes as usize, pool.raw.raw(), stream.raw.raw())
        })?;
        if address != 0 {
            let captured = work.captured_into().is_some();
            let lifetime = if captured { Lifetime::Graph } else { Lifetime::UntilFreed };
            self.device_ranges.insert(address, bytes, Allocation { context, lifetime });
        }
        Ok(DevicePtr(address))
    }

    fn pool_free(&self, ptr: DevicePtr, stream: StreamId) -> Result<()> {
        let site = self.enter(Call::PoolFree)?;
        let stream = self.stream(site, stream)?;
        let allocation = self.allocation(site, ptr)?;
        let _current = self.on_stream(site, &stream)?;
        let _work = self.begin_work(site, &stream, stream.lock_work());
        self.free_with(site, ptr, allocation, || {
            // SAFETY: this driver allocated the address; if a graph did, CUDA checks whether it is allocated. The
            // stream is live.
            site.check(unsafe { (self.api.mem_free_async)(ptr.0, stream.raw.raw()) })
        })
    }

    fn pool_get(&self, pool: PoolId, attribute: PoolAttribute) -> Result<u64> {
        let site = self.enter(Call::PoolGet)?;
        let pool = self.pool(site, pool)?;
        let _current = self.make_current(site, pool.context)?;
        let (attribute, _) = attribute_of(attribute);
        // CUDA writes an int or 64 bits; both give the right number, since the machine is little-endian and neither is
        // negative.
        let mut value = 0_u64;
        // SAFETY: the pool is live; `value` has the size of the larger of the two.
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
        // CUDA's rounding overflows for sizes near 2^64, and it trims everything then (seen on an H200). No pool holds
        // that much.
        let keep = keep.min(1 << 56) as usize;
        // SAFETY: the pool is live.
        site.check(unsafe { (self.api.mem_pool_trim_to)(pool.raw.raw(), keep) })
    }

    fn pool_set_access(&self, pool: PoolId, device: DeviceId, access: Access) -> Result<()> {
        let site = self.enter(Call::PoolSetAccess)?;
        let pool = self.pool(site, pool)?;
        let description = access_of(self.device(site, device)?, access);
        let _current = self.make_current(site, pool.context)?;
        // SAFETY: the pool is live; CUDA reads the one description during the call.
        site.check(unsafe { (self.api.mem_pool_set_access)(pool.raw.raw(), &raw const description, 1) })
    }
}

impl CudaDriver {
    fn pool(&self, site: CallSite<'_>, pool: PoolId) -> Result<Shared<'_, Pool>> {
        self.pools.get(pool.0).ok_or_else(|| site.error(ErrorCode::InvalidHandle))
    }

    fn require_pools(&self, site: CallSite<'_>, device: DeviceId) -> Result<()> {
        let gpu = self.device(site, device)?;
        let supported =
            self.has(site, gpu, sys::CUdevice_attribute_enum::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED)?;
        if supported { Ok(()) } else { Err(site.error(ErrorCode::NotSupported)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reuse_attributes_are_ints_and_the_others_are_not() {
        let number = |attribute| (attribute_of(attribute).0 as u32, attribute_of(attribute).1);
        assert_eq!(number(PoolAttribute::ReuseFollowEvents), (1, true));
        assert_eq!(number(PoolAttribute::ReuseOpportunistic), (2, true));
        assert_eq!(number(PoolAttribute::ReuseInternalDependencies), (3, true));
        assert_eq!(number(PoolAttribute::ReleaseThreshold), (4, false));
        assert_eq!(number(PoolAttribute::UsedHigh), (8, false));
    }
}
