//! The private pools as callers see them: [`PrivatePools`] for sources that allow them.

use warpool_driver::{DeviceId, DevicePtr, StreamId};

use super::source::Source;
use super::{DeviceState, UncachedAllocator};
use crate::memory::{MemPoolId, PoolOptions, PoolUser, PrivatePools, Route, StackLevel};
use crate::unwind::OnUnwind;
use crate::{Error, Result};

impl<S: Source> UncachedAllocator<S> {
    /// Ends one use of `user`. Calls neither the driver nor the source.
    fn release(&self, state: &DeviceState, pool: MemPoolId, user: PoolUser) -> Result<()> {
        let kept = state.pools.release(pool, user)?;
        self.with(state, |table| kept.into_iter().for_each(|serial| table.end_release(serial)));
        self.forget_removed_pools(state);
        Ok(())
    }
}

impl<S: Source> PrivatePools for UncachedAllocator<S> {
    /// [`Error::Unsupported`] with an upstream: all pools use the allocator's source. The other options have no effect,
    /// since nothing is cached.
    fn create_pool(&self, device: DeviceId, options: PoolOptions) -> Result<MemPoolId> {
        if options.upstream.is_some() {
            return Err(Error::Unsupported { allocator: S::NAME, what: "pools with an upstream of their own" });
        }
        let id = self.pool_ids.next_user();
        self.state(device)?.pools.create(id);
        Ok(id)
    }

    fn create_graph_pool(&self, device: DeviceId) -> Result<MemPoolId> {
        let id = self.pool_ids.next_graph();
        self.state(device)?.pools.create(id);
        Ok(id)
    }

    fn retain_pool_as(&self, device: DeviceId, pool: MemPoolId, user: PoolUser) -> Result<()> {
        self.state(device)?.pools.retain(pool, user)
    }

    fn release_pool_as(&self, device: DeviceId, pool: MemPoolId, user: PoolUser) -> Result<()> {
        if pool.is_default() && user == PoolUser::RAW {
            return Err(Error::PoolReleased { pool });
        }
        self.release(self.state(device)?, pool, user)
    }

    fn pool_uses(&self, device: DeviceId, pool: MemPoolId) -> Result<u32> {
        self.state(device)?.pools.uses(pool)
    }

    fn set_use_on_oom(&self, device: DeviceId, pool: MemPoolId, _on: bool) -> Result<()> {
        // No pool has free blocks that another could use.
        self.state(device)?.pools.expect_in_use(pool)
    }

    fn begin_routing_as(&self, device: DeviceId, pool: MemPoolId, route: Route, user: PoolUser) -> Result<()> {
        let state = self.state(device)?;
        state.pools.retain(pool, PoolUser::HANDLE)?;
        let begun = state.pools.begin_routing(pool, route, user);
        if begun.is_err() {
            self.release(state, pool, PoolUser::HANDLE)?;
            return begun;
        }
        // The source must have been notified before anything is allocated from the pool. After a panic of its hook the
        // scope is closed.
        let unwinds = OnUnwind::new(|| {
            if state.pools.end_routing(pool, user).is_ok() {
                let _ = self.release(state, pool, PoolUser::HANDLE);
            }
        });
        self.deliver_pool_events(state, true);
        unwinds.disarm();
        Ok(())
    }

    fn reroute_as(&self, device: DeviceId, pool: MemPoolId, routes: &[Route], user: PoolUser) -> Result<()> {
        self.state(device)?.pools.reroute(pool, routes, user)
    }

    fn end_routing_as(&self, device: DeviceId, pool: MemPoolId, user: PoolUser) -> Result<()> {
        let state = self.state(device)?;
        state.pools.end_routing(pool, user)?;
        self.release(state, pool, PoolUser::HANDLE)
    }

    fn capture_began(&self, device: DeviceId) -> Result<()> {
        let state = self.state(device)?;
        self.captures.begin(|| {
            self.deliver_pool_events(state, false);
            // Fewer blocks can be freed during the capture.
            self.process_pending(state, &self.entry_details(state, StackLevel::All));
            self.report(state);
            Ok(())
        })
    }

    fn capture_ended(&self, device: DeviceId) -> Result<()> {
        self.state(device)?;
        self.captures.end(device)
    }

    fn record_pool_uses(&self, device: DeviceId, pool: MemPoolId, streams: &[StreamId]) -> Result<()> {
        self.state(device)?.pools.record_streams(pool, streams)
    }

    fn has_exactly(&self, device: DeviceId, pool: MemPoolId, live: &[DevicePtr]) -> Result<bool> {
        let state = self.state(device)?;
        state.pools.uses(pool)?;
        let mut expected = live.to_vec();
        expected.sort_unstable();
        Ok(self.with(state, |table| table.live_in(pool)) == expected)
    }
}
