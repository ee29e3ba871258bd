//! What the calls about pools need of this allocator.

use std::sync::Arc;

use warpool_driver::{DeviceId, DevicePtr};

use super::UncachedAllocator;
use super::pools::PoolBlocks;
use super::source::Source;
use crate::memory::core::{AllocatorCore, DeviceCore};
use crate::memory::pool_owner::PoolOwner;
use crate::memory::pool_table::PoolTable;
use crate::memory::{MemPoolId, PoolOptions, PoolUser, StackLevel};
use crate::{Error, Result};

impl<S: Source> PoolOwner for UncachedAllocator<S> {
    const NAME: &'static str = S::NAME;

    type Memory = PoolBlocks;

    fn shared(&self) -> &Arc<AllocatorCore> {
        &self.shared
    }

    fn device_core(&self, device: DeviceId) -> Result<&DeviceCore> {
        self.state(device).map(|state| &**state)
    }

    fn with_pools<R>(&self, device: DeviceId, step: impl FnOnce(&mut PoolTable<PoolBlocks>) -> R) -> Result<R> {
        Ok(self.state(device)?.pools.with(step))
    }

    /// [`Error::Unsupported`] with an upstream, and for a stable pool: all pools use the allocator's source. The other
    /// options have no effect, since nothing is cached.
    fn add_pool(&self, device: DeviceId, id: MemPoolId, options: PoolOptions) -> Result<()> {
        if options.stable {
            return Err(Error::Unsupported { allocator: S::NAME, what: "stable pools; use backend:native or paged" });
        }
        if options.upstream.is_some() {
            return Err(Error::Unsupported { allocator: S::NAME, what: "pools with an upstream of their own" });
        }
        self.with_pools(device, |pools| pools.add(id, options, PoolBlocks::default()))
    }

    fn end_use(&self, device: DeviceId, id: MemPoolId, user: PoolUser) -> Result<()> {
        let state = self.state(device)?;
        let kept = state.pools.end_use(id, user)?;
        state.with(|table| kept.into_iter().for_each(|serial| table.end_release(serial)));
        self.forget_removed_pools(state);
        Ok(())
    }

    fn process_pending(&self, device: DeviceId) -> Result<()> {
        let state = self.state(device)?;
        self.deliver_pool_events(state, false);
        UncachedAllocator::process_pending(self, state, &state.timed_details(StackLevel::All));
        state.report();
        Ok(())
    }

    fn allocated_in(&self, device: DeviceId, id: MemPoolId) -> Result<Vec<DevicePtr>> {
        let state = self.state(device)?;
        state.pools.with(|pools| pools.uses(id))?;
        Ok(state.with(|table| table.live_in(id)))
    }

    fn record_use_anywhere(&self, device: DeviceId, id: MemPoolId) -> Result<()> {
        self.with_pools(device, |pools| pools.uses(id))??;
        Err(Error::Unsupported { allocator: S::NAME, what: "pools with work on unknown streams" })
    }

    /// Waits until the source is notified.
    fn routing_began(&self, device: DeviceId, id: MemPoolId) -> Result<()> {
        let state = self.state(device)?;
        state.pools.routing_began(id)?;
        self.deliver_pool_events(state, true);
        Ok(())
    }

    /// The source is notified by a later call: destructors close scopes.
    fn routing_ended(&self, device: DeviceId, id: MemPoolId) -> Result<()> {
        self.state(device)?.pools.routing_ended(id);
        Ok(())
    }
}
