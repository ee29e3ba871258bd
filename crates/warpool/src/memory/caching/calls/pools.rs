//! The calls of [`PrivatePools`].

use warpool_driver::{DeviceId, DevicePtr, StreamId};

use crate::Result;
use crate::memory::caching::CachingAllocator;
use crate::memory::caching::pending::PendingFrees;
use crate::memory::{MemPoolId, PoolOptions, PoolSleep, PoolUser, PrivatePools, Route, StackLevel};
use crate::unwind::drop_user_value;

impl CachingAllocator {
    /// As [`record_pool_uses`](PrivatePools::record_pool_uses), for work on unknown streams, such as replays that a
    /// framework launches itself. The pool's memory is returned to the driver only after all work of the device is
    /// done, and not while a capture is active.
    pub fn record_pool_use_anywhere(&self, device: DeviceId, pool: MemPoolId) -> Result<()> {
        self.device(device)?.change(|state| state.pools_mut().record_use_anywhere(pool))
    }

    fn create(&self, device: DeviceId, id: MemPoolId, options: PoolOptions) -> Result<MemPoolId> {
        self.device(device)?.change(|state| state.add_pool(id, options));
        Ok(id)
    }
}

impl PrivatePools for CachingAllocator {
    fn create_pool(&self, device: DeviceId, options: PoolOptions) -> Result<MemPoolId> {
        self.create(device, self.pool_ids.next_user(), options)
    }

    fn create_graph_pool(&self, device: DeviceId) -> Result<MemPoolId> {
        self.create(device, self.pool_ids.next_graph(), PoolOptions::default())
    }

    fn retain_pool_as(&self, device: DeviceId, pool: MemPoolId, user: PoolUser) -> Result<()> {
        self.device(device)?.change(|state| state.pools_mut().retain(pool, user))
    }

    fn release_pool_as(&self, device: DeviceId, pool: MemPoolId, user: PoolUser) -> Result<()> {
        let device = self.device(device)?;
        let removed = device.change(|state| state.release_pool(pool, user))?;
        self.pool_was_released(device, pool);
        drop_user_value(removed);
        Ok(())
    }

    fn pool_uses(&self, device: DeviceId, pool: MemPoolId) -> Result<u32> {
        self.device(device)?.read(|state| state.pools().uses(pool))
    }

    fn set_use_on_oom(&self, device: DeviceId, pool: MemPoolId, on: bool) -> Result<()> {
        self.device(device)?.change(|state| state.pools_mut().set_use_on_oom(pool, on))
    }

    fn begin_routing_as(&self, device: DeviceId, pool: MemPoolId, route: Route, user: PoolUser) -> Result<()> {
        let scopes = &self.device(device)?.scopes;
        self.retain_pool_as(device, pool, PoolUser::HANDLE)?;
        let opened = scopes.begin(pool, route, user);
        if opened.is_err() {
            self.release_pool_as(device, pool, PoolUser::HANDLE)?;
        }
        opened
    }

    fn reroute_as(&self, device: DeviceId, pool: MemPoolId, routes: &[Route], user: PoolUser) -> Result<()> {
        self.device(device)?.scopes.reroute(pool, routes, user)
    }

    fn end_routing_as(&self, device: DeviceId, pool: MemPoolId, user: PoolUser) -> Result<()> {
        self.device(device)?.scopes.end(pool, user)?;
        self.release_pool_as(device, pool, PoolUser::HANDLE)
    }

    fn capture_began(&self, device: DeviceId) -> Result<()> {
        let device = self.device(device)?;
        self.shared.captures().begin(|| {
            // Frees of earlier captures can be completed now, and not during this one: graphs that share a pool are
            // captured one after the other.
            let outcome = PendingFrees::new(device, &device.entry_details(StackLevel::State)).process();
            device.report();
            outcome
        })
    }

    fn capture_ended(&self, device: DeviceId) -> Result<()> {
        self.device(device)?;
        self.shared.captures().end(device)
    }

    fn record_pool_uses(&self, device: DeviceId, pool: MemPoolId, streams: &[StreamId]) -> Result<()> {
        self.device(device)?.change(|state| state.pools_mut().record_uses(pool, streams))
    }

    fn sleep(&self) -> Option<&dyn PoolSleep> {
        Some(self)
    }

    fn has_exactly(&self, device: DeviceId, pool: MemPoolId, live: &[DevicePtr]) -> Result<bool> {
        self.device(device)?.read(|state| state.has_exactly(pool, live))
    }
}
