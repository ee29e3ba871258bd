//! The calls of [`PrivatePools`].

use warpool_driver::{DeviceId, DevicePtr, StreamId};

use super::PagedAllocator;
use super::heap::State;
use super::pending::PendingFrees;
use crate::memory::{MemPoolId, PoolOptions, PoolSleep, PoolUser, PrivatePools, Route, SegmentKind, StackLevel};
use crate::unwind::drop_user_value;
use crate::{Result, lock};

impl PagedAllocator {
    /// As [`record_pool_uses`](PrivatePools::record_pool_uses), of work on streams that are not known: replays that a
    /// framework makes by itself. Before the pool's pages are used elsewhere or returned to the driver, all work of the
    /// device is waited for: by a trim, or by a request that would run out of memory otherwise.
    pub fn record_pool_use_anywhere(&self, device: DeviceId, pool: MemPoolId) -> Result<()> {
        lock(&self.device(device)?.pools).record_use_anywhere(pool)
    }

    fn create(&self, device: DeviceId, id: MemPoolId, options: PoolOptions) -> Result<MemPoolId> {
        lock(&self.device(device)?.pools).add(id, options);
        Ok(id)
    }
}

impl PrivatePools for PagedAllocator {
    fn create_pool(&self, device: DeviceId, options: PoolOptions) -> Result<MemPoolId> {
        self.create(device, self.pool_ids.next_user(), options)
    }

    fn create_graph_pool(&self, device: DeviceId) -> Result<MemPoolId> {
        self.create(device, self.pool_ids.next_graph(), PoolOptions::default())
    }

    fn retain_pool_as(&self, device: DeviceId, pool: MemPoolId, user: PoolUser) -> Result<()> {
        lock(&self.device(device)?.pools).retain(pool, user)
    }

    fn release_pool_as(&self, device: DeviceId, pool: MemPoolId, user: PoolUser) -> Result<()> {
        let removed = lock(&self.device(device)?.pools).release(pool, user)?;
        drop_user_value(removed);
        Ok(())
    }

    fn pool_uses(&self, device: DeviceId, pool: MemPoolId) -> Result<u32> {
        lock(&self.device(device)?.pools).uses(pool)
    }

    fn set_use_on_oom(&self, device: DeviceId, pool: MemPoolId, on: bool) -> Result<()> {
        lock(&self.device(device)?.pools).set_use_on_oom(pool, on)
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
        self.shared.captures.begin(|| {
            let outcome = PendingFrees::new(device, &device.entry_details(StackLevel::State)).process();
            device.report();
            outcome
        })
    }

    fn capture_ended(&self, device: DeviceId) -> Result<()> {
        self.device(device)?;
        self.shared.captures.end(device)
    }

    fn record_pool_uses(&self, device: DeviceId, pool: MemPoolId, streams: &[StreamId]) -> Result<()> {
        lock(&self.device(device)?.pools).record_uses(pool, streams)
    }

    fn sleep(&self) -> Option<&dyn PoolSleep> {
        Some(self)
    }

    fn has_exactly(&self, device: DeviceId, pool: MemPoolId, live: &[DevicePtr]) -> Result<bool> {
        let device = self.device(device)?;
        let heaps = lock(&device.pools).heaps(pool)?;
        let mut found = Vec::new();
        for number in heaps {
            let heap = device.heaps.get(number).lock();
            for kind in [SegmentKind::Small, SegmentKind::Large] {
                let blocks = heap.ranges(kind).flatten();
                let allocated = blocks.filter(|(_, block)| block.state() == State::Allocated);
                found.extend(allocated.map(|(_, block)| DevicePtr(block.addr())));
            }
        }
        let mut expected = live.to_vec();
        expected.sort_unstable();
        found.sort_unstable();
        Ok(found == expected)
    }
}
