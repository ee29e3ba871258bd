//! [`PrivatePools`] and [`PoolSleep`], implemented once for every allocator whose pools are a [`PoolTable`] per device.

use std::sync::Arc;

use warpool_driver::{DeviceId, DevicePtr, StreamId};

use super::core::{AllocatorCore, DeviceCore};
use super::mapped_segments::MappedSegments;
use super::pool_table::PoolTable;
use super::{Asleep, MemPoolId, PoolOptions, PoolSleep, PoolUser, PrivatePools, Route, ScopeId, Upstream};
use crate::unwind::OnUnwind;
use crate::{Device, Error, Result, lock};

/// What such an allocator adds.
pub(crate) trait PoolOwner: Send + Sync {
    /// The allocator's name.
    const NAME: &'static str;

    /// What it has of a pool's memory.
    type Memory;

    fn shared(&self) -> &Arc<AllocatorCore>;

    fn device_core(&self, device: DeviceId) -> Result<&DeviceCore>;

    /// One step under the lock of a device's pools.
    fn with_pools<R>(&self, device: DeviceId, step: impl FnOnce(&mut PoolTable<Self::Memory>) -> R) -> Result<R>;

    fn add_pool(&self, device: DeviceId, id: MemPoolId, options: PoolOptions) -> Result<()>;

    /// Ends a use of a pool, and removes the pool if nothing is left of it. Makes no driver call.
    fn end_use(&self, device: DeviceId, id: MemPoolId, user: PoolUser) -> Result<()>;

    /// Completes pending frees before a capture begins: fewer can be completed during it, and graphs that share a pool
    /// are captured one after the other.
    fn process_pending(&self, device: DeviceId) -> Result<()>;

    /// The addresses that are allocated in a pool.
    fn allocated_in(&self, device: DeviceId, id: MemPoolId) -> Result<Vec<DevicePtr>>;

    /// As [`PrivatePools::record_pool_use_anywhere`].
    fn record_use_anywhere(&self, device: DeviceId, id: MemPoolId) -> Result<()> {
        self.with_pools(device, |pools| pools.record_use_anywhere(id))?
    }

    /// Called after a scope was opened, before anything is allocated from its pool. The scope is closed if it panics.
    fn routing_began(&self, device: DeviceId, id: MemPoolId) -> Result<()> {
        let _ = (device, id);
        Ok(())
    }

    /// Called after a scope was closed.
    fn routing_ended(&self, device: DeviceId, id: MemPoolId) -> Result<()> {
        let _ = (device, id);
        Ok(())
    }

    /// Gives the pools of `owner` with an upstream a peer.
    fn share_pools(&self, owner: DeviceId, peer: DeviceId) -> Result<()> {
        let upstreams = self.with_pools(owner, |pools| pools.upstreams())?;
        upstreams.iter().try_for_each(|upstream| upstream.enable_peer_access(peer))
    }

    /// The allocator, if its pools can sleep.
    fn sleeper(&self) -> Option<&dyn PoolSleep> {
        None
    }
}

impl<A: PoolOwner> PrivatePools for A {
    fn create_pool(&self, device: DeviceId, options: PoolOptions) -> Result<MemPoolId> {
        let (id, core) = (self.shared().pool_ids.next_user(), self.device_core(device)?);
        let is_stable = options.stable && !crate::defect::Defect::StableMemoryMoves.is_on();
        let options = if is_stable && options.upstream.is_none() {
            PoolOptions { upstream: Some(stable_segments(self, device)?), ..options }
        } else {
            options
        };
        let upstream = options.upstream.clone();
        self.add_pool(device, id, options)?;
        // The peers so far: those to come find the pool in the table.
        let peers = lock(&core.peers).clone();
        let shared = upstream.map_or(Ok(()), |of| peers.iter().try_for_each(|&peer| of.enable_peer_access(peer)));
        if shared.is_err() {
            self.end_use(device, id, PoolUser::RAW)?;
        }
        shared.map(|()| id)
    }

    fn create_graph_pool(&self, device: DeviceId) -> Result<MemPoolId> {
        let id = self.shared().pool_ids.next_graph();
        self.add_pool(device, id, PoolOptions::default()).map(|()| id)
    }

    fn retain_pool_as(&self, device: DeviceId, pool: MemPoolId, user: PoolUser) -> Result<()> {
        self.with_pools(device, |pools| pools.retain(pool, user))?
    }

    fn release_pool_as(&self, device: DeviceId, pool: MemPoolId, user: PoolUser) -> Result<()> {
        self.end_use(device, pool, user)
    }

    fn pool_uses(&self, device: DeviceId, pool: MemPoolId) -> Result<u32> {
        self.with_pools(device, |pools| pools.uses(pool))?
    }

    fn set_use_on_oom(&self, device: DeviceId, pool: MemPoolId, on: bool) -> Result<()> {
        self.with_pools(device, |pools| pools.set_use_on_oom(pool, on))?
    }

    fn begin_routing_as(&self, device: DeviceId, pool: MemPoolId, route: Route, user: PoolUser) -> Result<()> {
        let scopes = &self.device_core(device)?.scopes;
        self.retain_pool_as(device, pool, PoolUser::HANDLE)?;
        if let Err(error) = scopes.begin(pool, route, user) {
            self.end_use(device, pool, PoolUser::HANDLE)?;
            return Err(error);
        }
        let unwinds = OnUnwind::new(|| {
            let _ = self.end_routing_as(device, pool, user);
        });
        let began = self.routing_began(device, pool);
        unwinds.disarm();
        began
    }

    fn reroute_as(&self, device: DeviceId, pool: MemPoolId, routes: &[Route], user: PoolUser) -> Result<()> {
        self.device_core(device)?.scopes.reroute(pool, routes, user)
    }

    fn end_routing_as(&self, device: DeviceId, pool: MemPoolId, user: PoolUser) -> Result<()> {
        self.device_core(device)?.scopes.end(pool, user)?;
        self.routing_ended(device, pool)?;
        self.end_use(device, pool, PoolUser::HANDLE)
    }

    fn capture_began(&self, device: DeviceId) -> Result<()> {
        self.device_core(device)?;
        self.shared().captures.begin(|| self.process_pending(device))
    }

    fn capture_ended(&self, device: DeviceId) -> Result<()> {
        self.device_core(device)?;
        self.shared().captures.end(device)
    }

    fn record_pool_uses(&self, device: DeviceId, pool: MemPoolId, streams: &[StreamId]) -> Result<()> {
        self.with_pools(device, |pools| pools.record_uses(pool, streams))?
    }

    fn record_pool_use_anywhere(&self, device: DeviceId, pool: MemPoolId) -> Result<()> {
        self.record_use_anywhere(device, pool)
    }

    fn sleep(&self) -> Option<&dyn PoolSleep> {
        self.sleeper()
    }

    fn has_exactly(&self, device: DeviceId, pool: MemPoolId, live: &[DevicePtr]) -> Result<bool> {
        let (mut allocated, mut expected) = (self.allocated_in(device, pool)?, live.to_vec());
        allocated.sort_unstable();
        expected.sort_unstable();
        Ok(allocated == expected)
    }
}

/// The source of the segments of a stable pool.
fn stable_segments<A: PoolOwner>(owner: &A, device: DeviceId) -> Result<Arc<dyn Upstream>> {
    let core = owner.shared();
    let device = Device::from_id(&core.instance, device);
    if !device.properties().virtual_memory {
        let what = "stable pools: the device has no virtual memory management";
        return Err(Error::Unsupported { allocator: A::NAME, what });
    }
    Ok(Arc::new(MappedSegments::stable(core, &device)))
}

/// What an allocator adds whose pools can sleep.
pub(crate) trait SleepingPoolOwner: PoolOwner {
    /// As [`PoolSleep::release_free_segments`].
    fn release_segments(&self, device: DeviceId, pool: MemPoolId) -> Result<u64>;

    /// Sets how much of a pool is asleep. Returns `false`, without any change, if it is to stay `within_limit` and does
    /// not.
    fn put_asleep(&self, device: DeviceId, pool: MemPoolId, asleep: Option<Asleep>, within_limit: bool)
    -> Result<bool>;
}

impl<A: SleepingPoolOwner> PoolSleep for A {
    fn open_scope(&self, device: DeviceId, pool: MemPoolId, route: Route) -> Result<ScopeId> {
        let scopes = &self.device_core(device)?.scopes;
        self.retain_pool_as(device, pool, PoolUser::HANDLE)?;
        Ok(scopes.open(pool, route))
    }

    fn close_scope(&self, device: DeviceId, pool: MemPoolId, scope: ScopeId) {
        if self.device_core(device).is_ok_and(|core| core.scopes.close(scope)) {
            // This fails only for an unknown pool, and the scope was one of its uses.
            let _ = self.end_use(device, pool, PoolUser::HANDLE);
        }
    }

    fn has_captures(&self) -> bool {
        self.shared().captures.any()
    }

    fn release_free_segments(&self, device: DeviceId, pool: MemPoolId) -> Result<u64> {
        self.release_segments(device, pool)
    }

    fn set_asleep(&self, device: DeviceId, pool: MemPoolId, asleep: Option<Asleep>) -> Result<()> {
        self.put_asleep(device, pool, asleep, false).map(drop)
    }

    fn expect_awake(&self, device: DeviceId, pool: MemPoolId) -> Result<()> {
        self.with_pools(device, |pools| pools.sleeping.expect_awake(pool))?
    }

    fn reserve_to_wake(&self, device: DeviceId, pool: MemPoolId, asleep: Asleep) -> Result<bool> {
        self.put_asleep(device, pool, Some(asleep), true)
    }
}
