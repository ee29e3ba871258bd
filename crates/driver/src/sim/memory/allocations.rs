//! Allocations: plain ones, those of pools, and the memory that nodes of graphs allocate.

use super::access::AccessContext;
use super::address_space::Region;
use super::capacity::ALLOCATION_UNIT;
use super::quarantine::{FreedRange, Removal};
use super::{BackingId, Memory};
use crate::sim::refuse::{refuse, unnamed};
use crate::{DeviceId, DevicePtr, ErrorCode, PoolId, Result};

/// From this size on, plain allocations are aligned to 2 MiB, as real ones are.
const LARGE: u64 = 2 << 20;

impl Memory {
    /// Allocates device memory.
    pub fn allocate(&mut self, device: DeviceId, bytes: u64) -> Result<DevicePtr> {
        let Some(rounded) = bytes.checked_next_multiple_of(ALLOCATION_UNIT) else {
            return Err(unnamed(ErrorCode::OutOfMemory));
        };
        self.capacity.take(device, rounded)?;
        let align = if rounded >= LARGE { LARGE } else { ALLOCATION_UNIT };
        let start = self
            .placements
            .allocation(&mut self.space, device, rounded, align)
            .inspect_err(|_| self.capacity.give_back(device, rounded))?;
        let backing = self.backings.add_device(bytes, device);
        self.space.insert(start, bytes, Region::Allocation { backing });
        Ok(DevicePtr(start))
    }

    /// The allocation that starts at `ptr`, to be freed: the device that must be waited for, and the backing memory.
    /// The memory of a graph exists only once its launch has run, but can be freed from the launch on.
    pub fn find_allocation(&self, ptr: DevicePtr) -> Result<(DeviceId, Option<BackingId>)> {
        let (start, backing, device) = match self.space.region_at(ptr.0) {
            Some((start, _, Region::Allocation { backing } | Region::PoolAllocation { backing, freed: false, .. })) => {
                (start, Some(*backing), self.backings.get(*backing).device)
            }
            Some((start, _, Region::GraphMemory { pool, live: true, .. })) => {
                (start, None, self.pools.get(*pool).map(|pool| pool.device))
            }
            _ => return refuse(ErrorCode::InvalidValue, format!("{ptr} is not the start of a live allocation")),
        };
        if start != ptr.0 {
            return refuse(ErrorCode::InvalidValue, format!("{ptr} is inside the allocation at {start:#x}"));
        }
        match device {
            Some(device) => Ok((device, backing)),
            None => refuse(ErrorCode::InvalidValue, format!("the pool of {ptr} no longer exists")),
        }
    }

    /// The size of the region at `ptr`; 0 if there is none.
    pub fn bytes_at(&self, ptr: DevicePtr) -> u64 {
        self.space.get(ptr.0).map_or(0, |(bytes, _)| bytes)
    }

    /// Frees what [`find_allocation`](Self::find_allocation) found, by call number `at`, after a wait for the device.
    pub fn free(&mut self, ptr: DevicePtr, found: Option<BackingId>, at: u64) -> Result<()> {
        match self.space.get_mut(ptr.0) {
            Some((bytes, Region::Allocation { backing })) if Some(*backing) == found => {
                let backing = *backing;
                let device = self.backings.get(backing).device.expect("device memory");
                self.space.remove(ptr.0, Removal::Freed, at, None);
                self.capacity.give_back(device, bytes.next_multiple_of(ALLOCATION_UNIT));
                self.backings.remove(backing);
            }
            Some((bytes, Region::PoolAllocation { backing, pool, freed: false })) if Some(*backing) == found => {
                let (backing, pool) = (*backing, *pool);
                self.space.remove(ptr.0, Removal::PoolFreed, at, None);
                self.give_back_to_pool(pool, bytes);
                self.backings.remove(backing);
            }
            Some((bytes, Region::GraphMemory { backing, pool, live })) if *live => {
                // The addresses remain the graph's.
                *live = false;
                let (backing, pool) = (backing.take(), *pool);
                self.quarantine_pool_memory(ptr, bytes, at);
                self.give_back_to_pool(pool, bytes);
                if let Some(backing) = backing {
                    self.backings.remove(backing);
                }
            }
            _ => return refuse(ErrorCode::InvalidValue, format!("{ptr} was freed by another thread meanwhile")),
        }
        Ok(())
    }

    pub fn allocate_from_pool(&mut self, pool: PoolId, bytes: u64) -> Result<DevicePtr> {
        self.take_from_pool(pool, bytes)?;
        let Some(start) = self.space.find(bytes, ALLOCATION_UNIT) else {
            self.give_back_to_pool(pool, bytes);
            return refuse(ErrorCode::OutOfMemory, "the address space is used up");
        };
        let device = self.pools.get(pool).expect("memory was taken from it").device;
        let backing = self.backings.add_device(bytes, device);
        self.space.insert(start, bytes, Region::PoolAllocation { backing, pool, freed: false });
        Ok(DevicePtr(start))
    }

    /// A free of pool memory is queued: it can be freed only once.
    pub fn begin_pool_free(&mut self, ptr: DevicePtr) -> Result<()> {
        match self.space.get_mut(ptr.0) {
            Some((_, Region::PoolAllocation { freed, .. })) if !*freed => *freed = true,
            Some((_, Region::GraphMemory { live, .. })) if *live => *live = false,
            _ => {
                let why = format!("{ptr} is not the start of a live allocation of a pool");
                return refuse(ErrorCode::InvalidValue, why);
            }
        }
        Ok(())
    }

    /// Chooses the addresses that a node of a graph allocates; their memory comes when the graph runs.
    pub fn reserve_graph_memory(&mut self, pool: PoolId, bytes: u64) -> Result<DevicePtr> {
        let Some(start) = self.space.find(bytes, ALLOCATION_UNIT) else {
            return refuse(ErrorCode::OutOfMemory, "the address space is used up");
        };
        self.space.insert(start, bytes, Region::GraphMemory { backing: None, pool, live: false });
        Ok(DevicePtr(start))
    }

    /// The size of the memory that a node of a graph allocates at `ptr`, and whether a launch has allocated it.
    pub fn graph_memory(&self, ptr: DevicePtr) -> Option<(u64, bool)> {
        match self.space.get(ptr.0) {
            Some((bytes, Region::GraphMemory { live, .. })) => Some((bytes, *live)),
            _ => None,
        }
    }

    /// A launch was queued that allocates the memory at `ptr`: it is live unless the same graph frees it.
    pub fn set_graph_memory_live(&mut self, ptr: DevicePtr, is_live: bool) {
        if let Some((_, Region::GraphMemory { live, .. })) = self.space.get_mut(ptr.0) {
            *live = is_live;
        }
    }

    /// Where the allocation, pinned range or reservation at `ptr` ends.
    pub fn region_end(&self, ptr: DevicePtr) -> Option<DevicePtr> {
        self.space.region_at(ptr.0).map(|(start, size, _)| DevicePtr(start + size))
    }

    /// Whether all of a range is device memory.
    pub fn is_device_memory(&self, ptr: DevicePtr, bytes: u64) -> bool {
        if self.is_graph_memory(ptr, bytes) {
            return true;
        }
        let fits = self.region_end(ptr).is_some_and(|end| bytes <= end.0 - ptr.0);
        let mut done = 0;
        while fits && done < bytes {
            let Some(location) = self.space.locate(ptr.offset(done)) else { return false };
            if self.backings.get(location.backing).device.is_none() {
                return false;
            }
            done += location.bytes;
        }
        fits
    }

    /// Whether a range lies in the memory of a graph, which is checked when the graph runs.
    pub fn is_graph_memory(&self, ptr: DevicePtr, bytes: u64) -> bool {
        match self.space.region_at(ptr.0) {
            Some((start, size, Region::GraphMemory { .. })) => {
                ptr.0.checked_add(bytes).is_some_and(|end| end <= start + size)
            }
            _ => false,
        }
    }

    /// Releases the addresses of a graph that will not be launched again, except those with memory in use.
    pub fn release_graph_addresses(&mut self, memory: &[(DevicePtr, PoolId)], at: u64) {
        for (ptr, _) in memory {
            if let Some((_, Region::GraphMemory { backing: None, live: false, .. })) = self.space.get(ptr.0) {
                self.space.remove(ptr.0, Removal::PoolFreed, at, None);
            }
        }
    }

    /// A queued allocation takes effect. Its memory exists already, unless a graph allocates it.
    pub fn run_pool_alloc(&mut self, ptr: DevicePtr, bytes: u64, pool: PoolId, by: &mut AccessContext<'_>) {
        if let Some((_, Region::GraphMemory { backing, .. })) = self.space.get_mut(ptr.0)
            && backing.is_none()
        {
            let device = self.pools.get(pool).expect("memory was taken from it at the launch").device;
            *backing = Some(self.backings.add_device(bytes, device));
        }
        // An access that is unordered with the allocation is a hazard.
        let _ = self.record_access(ptr, bytes, true, by);
    }

    /// A queued free takes effect.
    pub fn run_pool_free(&mut self, ptr: DevicePtr, by: &mut AccessContext<'_>) {
        let Some((bytes, _)) = self.space.get(ptr.0) else { return };
        let _ = self.record_access(ptr, bytes, true, by);
        let at = by.accessor.queued_at;
        let (backing, pool) = match self.space.get_mut(ptr.0) {
            Some((_, Region::PoolAllocation { backing, pool, .. })) => {
                let freed = (*backing, *pool);
                self.space.remove(ptr.0, Removal::PoolFreed, at, None);
                freed
            }
            Some((_, Region::GraphMemory { backing, pool, .. })) => {
                let (Some(backing), pool) = (backing.take(), *pool) else { return };
                self.quarantine_pool_memory(ptr, bytes, at);
                (backing, pool)
            }
            _ => return,
        };
        self.backings.remove(backing);
        self.give_back_to_pool(pool, bytes);
    }

    fn quarantine_pool_memory(&mut self, ptr: DevicePtr, bytes: u64, at: u64) {
        let removal = Removal::PoolFreed;
        self.space.quarantine(FreedRange { start: ptr.0, bytes, removal, freed_at: at, pinned_by: None });
    }
}
