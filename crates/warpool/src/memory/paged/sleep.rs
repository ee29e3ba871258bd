//! The calls of [`PoolSleep`].

use warpool_driver::DeviceId;

use super::PagedAllocator;
use super::address_space::Location;
use super::device::PagedDevice;
use super::pending::PendingFrees;
use super::segments;
use crate::memory::report::EntryDetails;
use crate::memory::{
    Asleep, MemPoolId, PoolSleep, PoolUser, PrivatePools as _, Route, ScopeId, SegmentKind, StackLevel,
};
use crate::{Result, lock};

impl PagedDevice {
    /// Returns the free segments of a pool in use to its upstream, unless captures allocated from it.
    fn release_free_segments(&self, pool: MemPoolId, details: &EntryDetails) -> Result<u64> {
        PendingFrees::new(self, details).wait()?;
        let (heaps, users) = {
            let pools = lock(&self.pools);
            if pools.is_fixed(pool) {
                return Ok(0);
            }
            (pools.heaps(pool)?, pools.used_by(pool))
        };
        let mut released = 0;
        for number in heaps {
            let stream = self.heaps.get(number).lock().stream;
            for kind in [SegmentKind::Small, SegmentKind::Large] {
                let free = self.heaps.get(number).lock().free_segments(kind);
                for range in free {
                    let at = Location { heap: number, kind, range };
                    released += segments::release_segment(self, at, (stream, &users), details)?;
                }
            }
        }
        self.drop_removed();
        Ok(released)
    }
}

impl PoolSleep for PagedAllocator {
    fn open_scope(&self, device: DeviceId, pool: MemPoolId, route: Route) -> Result<ScopeId> {
        let scopes = &self.device(device)?.scopes;
        self.retain_pool_as(device, pool, PoolUser::HANDLE)?;
        Ok(scopes.open(pool, route))
    }

    fn close_scope(&self, device: DeviceId, pool: MemPoolId, scope: ScopeId) {
        if let Ok(paged_device) = self.device(device)
            && paged_device.scopes.close(scope)
        {
            // It fails only for an unknown pool, and the scope was one of its uses.
            let _ = self.release_pool_as(device, pool, PoolUser::HANDLE);
        }
    }

    fn has_captures(&self) -> bool {
        self.shared.captures.any()
    }

    fn release_free_segments(&self, device: DeviceId, pool: MemPoolId) -> Result<u64> {
        let device = self.device(device)?;
        let details = device.entry_details(StackLevel::All).timed(self.driver());
        let released = device.release_free_segments(pool, &details);
        device.report();
        released
    }

    fn set_asleep(&self, device: DeviceId, pool: MemPoolId, asleep: Option<Asleep>) -> Result<()> {
        let device = self.device(device)?;
        let (mut table, mut pools) = (lock(&device.pages), lock(&device.pools));
        pools.sleeping.set(pool, asleep);
        table.bytes_asleep = pools.sleeping.bytes();
        Ok(())
    }

    fn expect_awake(&self, device: DeviceId, pool: MemPoolId) -> Result<()> {
        lock(&self.device(device)?.pools).sleeping.expect_awake(pool)
    }

    fn reserve_to_wake(&self, device: DeviceId, pool: MemPoolId, asleep: Asleep) -> Result<bool> {
        let device = self.device(device)?;
        let limit = device.limit();
        let (mut table, mut pools) = (lock(&device.pages), lock(&device.pools));
        let more = pools.sleeping.bytes_more(pool, &asleep);
        if more > 0 && limit.is_some_and(|limit| table.bytes_limited().saturating_add(more) > limit) {
            return Ok(false);
        }
        pools.sleeping.set(pool, Some(asleep));
        table.bytes_asleep = pools.sleeping.bytes();
        Ok(true)
    }
}
