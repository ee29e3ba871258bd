//! The calls of [`PoolSleep`].

use warpool_driver::DeviceId;

use crate::Result;
use crate::memory::caching::CachingAllocator;
use crate::memory::caching::pending::PendingFrees;
use crate::memory::caching::source;
use crate::memory::{Asleep, MemPoolId, PoolSleep, PoolUser, PrivatePools as _, Route, ScopeId, StackLevel};

impl PoolSleep for CachingAllocator {
    fn open_scope(&self, device: DeviceId, pool: MemPoolId, route: Route) -> Result<ScopeId> {
        let scopes = &self.device(device)?.scopes;
        self.retain_pool_as(device, pool, PoolUser::HANDLE)?;
        Ok(scopes.open(pool, route))
    }

    fn close_scope(&self, device: DeviceId, pool: MemPoolId, scope: ScopeId) {
        if let Ok(caching_device) = self.device(device)
            && caching_device.scopes.close(scope)
        {
            // This fails only for an unknown pool, and the scope was one of its uses.
            let _ = self.release_pool_as(device, pool, PoolUser::HANDLE);
        }
    }

    fn has_captures(&self) -> bool {
        self.shared.captures().any()
    }

    fn release_free_segments(&self, device: DeviceId, pool: MemPoolId) -> Result<u64> {
        let device = self.device(device)?;
        let details = device.entry_details(StackLevel::All).timed(self.driver());
        let slow = device.lock_slow();
        let released = PendingFrees::new(&slow, &details).wait().and_then(|()| {
            let has_graphs = slow.read(|state| state.pools().has_graphs(pool))?;
            if has_graphs { Ok(0) } else { source::release_pool(&slow, pool, &details) }
        });
        drop(slow);
        device.report();
        released
    }

    fn set_asleep(&self, device: DeviceId, pool: MemPoolId, asleep: Option<Asleep>) -> Result<()> {
        self.device(device)?.change(|state| state.pools_mut().sleeping.set(pool, asleep));
        Ok(())
    }

    fn expect_awake(&self, device: DeviceId, pool: MemPoolId) -> Result<()> {
        self.device(device)?.read(|state| state.pools().sleeping.expect_awake(pool))
    }

    fn reserve_to_wake(&self, device: DeviceId, pool: MemPoolId, asleep: Asleep) -> Result<bool> {
        Ok(self.device(device)?.change(|state| state.reserve_to_wake(pool, asleep)))
    }
}
