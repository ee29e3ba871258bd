//! Stream-ordered pools of the simulated machine.
//!
//! A pool holds memory from its device in units of 32 MiB, gives it out in the order of streams, and shrinks when the
//! host waits. Which addresses it reuses is its own affair, as it is the driver's: here every allocation has fresh
//! ones.

use crate::sim::SimDriver;
use crate::sim::api::GRAIN;
use crate::sim::memory::{Bytes, Gone, Region, Tomb, Toucher};
use crate::sim::work::Work;
use crate::sim::world::{Pool, World};
use crate::{
    Access, Call, DeviceId, DevicePtr, ErrorCode, PoolAttribute as Attribute, PoolId, Pools, Result, StreamId,
};

/// What a pool grows by; so it was on an H200.
const UNIT: u64 = 32 << 20;

impl Pools for SimDriver {
    fn pool_default(&self, device: DeviceId) -> Result<PoolId> {
        self.call(Call::PoolDefault, |world| {
            let pool = world.device(device)?.default_pool;
            world.check_pools(device)?;
            Ok(pool)
        })
    }

    fn pool_create(&self, device: DeviceId) -> Result<PoolId> {
        self.call(Call::PoolCreate, |world| {
            world.device(device)?;
            world.check_pools(device)?;
            Ok(PoolId(world.pools.insert(Pool::new(device, false))))
        })
    }

    fn pool_destroy(&self, pool: PoolId) -> Result<()> {
        self.call(Call::PoolDestroy, |world| {
            if world.pool(pool)?.is_default {
                return world.fail(ErrorCode::InvalidValue, "a default pool cannot be destroyed");
            }
            let state = world.pool(pool)?;
            state.gone = true;
            world.drop_pool_if_unused(pool);
            Ok(())
        })
    }

    fn pool_alloc(&self, pool: PoolId, bytes: u64, stream: StreamId) -> Result<DevicePtr> {
        let mut world = self.enter(Call::PoolAlloc)?;
        let stream = world.live_stream(stream)?;
        world.pool_open(pool)?;
        let capturing = world.stream(stream).capture.is_some();
        if !capturing {
            world.forbid_guarded()?;
        }
        world.forbid_implicit(stream)?;
        let bytes = bytes.max(1);
        if bytes.checked_next_multiple_of(GRAIN).is_none() {
            return Err(world.error(ErrorCode::OutOfMemory));
        }
        if capturing {
            return world.capture_pool_alloc(pool, bytes, stream);
        }
        world.spend(bytes);
        let mut world = self.wait_for_room(world, stream)?;
        world.take_from_pool(pool, bytes)?;
        let Some(start) = world.memory.space.find(bytes, GRAIN) else {
            world.return_to_pool(pool, bytes);
            return world.fail(ErrorCode::OutOfMemory, "the address space is used up");
        };
        let device = world.pool(pool)?.device;
        let piece = world.memory.add_piece(bytes, Some(device), Bytes::device());
        world.memory.space.insert(start, bytes, Region::Pooled { piece, pool, freed: false });
        let ptr = DevicePtr(start);
        world.enqueue(stream, Work::PoolAlloc { ptr, bytes, pool }, 0, Vec::new());
        Ok(ptr)
    }

    fn pool_free(&self, ptr: DevicePtr, stream: StreamId) -> Result<()> {
        let mut world = self.enter(Call::PoolFree)?;
        let stream = world.live_stream(stream)?;
        let capturing = world.stream(stream).capture.is_some();
        if !capturing {
            world.forbid_guarded()?;
        }
        world.forbid_implicit(stream)?;
        if capturing {
            return world.capture_pool_free(ptr, stream);
        }
        let mut world = self.wait_for_room(world, stream)?;
        match world.memory.space.regions.get_mut(&ptr.0) {
            Some((_, Region::Pooled { freed, .. })) if !*freed => *freed = true,
            Some((_, Region::OfGraph { held, .. })) if *held => *held = false,
            _ => return world.fail(ErrorCode::InvalidValue, format!("{ptr} starts no live allocation of a pool")),
        }
        world.enqueue(stream, Work::PoolFree { ptr }, 0, Vec::new());
        Ok(())
    }

    fn pool_get(&self, pool: PoolId, attribute: Attribute) -> Result<u64> {
        self.call(Call::PoolGet, |world| Ok(world.pool_open(pool)?.get(attribute)))
    }

    fn pool_set(&self, pool: PoolId, attribute: Attribute, value: u64) -> Result<()> {
        self.call(Call::PoolSet, |world| {
            let state = world.pool_open(pool)?;
            let value = match (attribute, value) {
                (Attribute::ReservedHigh, 0) => state.get(Attribute::ReservedCurrent),
                (Attribute::UsedHigh, 0) => state.get(Attribute::UsedCurrent),
                (Attribute::ReleaseThreshold, _) => value,
                (Attribute::ReuseFollowEvents, 0 | 1)
                | (Attribute::ReuseOpportunistic, 0 | 1)
                | (Attribute::ReuseInternalDependencies, 0 | 1) => value,
                _ => return world.fail(ErrorCode::InvalidValue, format!("{attribute:?} cannot be set to {value}")),
            };
            state.set(attribute, value);
            Ok(())
        })
    }

    fn pool_trim(&self, pool: PoolId, keep: u64) -> Result<()> {
        self.call(Call::PoolTrim, |world| {
            world.pool_open(pool)?;
            world.shrink_pool(pool, keep);
            Ok(())
        })
    }

    fn pool_set_access(&self, pool: PoolId, device: DeviceId, access: Access) -> Result<()> {
        self.call(Call::PoolSetAccess, |world| {
            world.device_any(device)?;
            let peers = world.config.devices[device.0 as usize].properties.peers.clone();
            let state = world.pool_open(pool)?;
            if state.device == device {
                return match access {
                    Access::ReadWrite => Ok(()),
                    _ => world.fail(ErrorCode::InvalidDevice, "a pool's own device keeps its rights"),
                };
            }
            if access != Access::None && !peers.contains(&state.device) {
                return world.fail(ErrorCode::InvalidDevice, format!("{device} cannot reach that pool's device"));
            }
            world.memory.pool_access.retain(|&(known, who, _)| (known, who) != (pool, device));
            if access != Access::None {
                world.memory.pool_access.push((pool, device, access));
            }
            Ok(())
        })
    }
}

impl Pool {
    pub fn new(device: DeviceId, is_default: bool) -> Self {
        let mut pool = Self { device, is_default, attributes: [0; 8], gone: false };
        for reuse in [Attribute::ReuseFollowEvents, Attribute::ReuseOpportunistic, Attribute::ReuseInternalDependencies]
        {
            pool.set(reuse, 1);
        }
        pool
    }
}

impl World {
    fn check_pools(&self, device: DeviceId) -> Result<()> {
        if self.config.devices[device.0 as usize].properties.async_pools {
            return Ok(());
        }
        self.fail(ErrorCode::NotSupported, format!("{device} has no stream-ordered pools"))
    }

    /// A pool that has not been destroyed.
    fn pool_open(&mut self, pool: PoolId) -> Result<&mut Pool> {
        if self.pool(pool)?.gone {
            return Err(self.missing(crate::sim::table::Missing::Destroyed, pool.to_string()));
        }
        self.pool(pool)
    }

    /// Makes room in a pool, from its device if need be.
    pub fn take_from_pool(&mut self, pool: PoolId, bytes: u64) -> Result<()> {
        let bytes = bytes.next_multiple_of(GRAIN);
        let state = self.pool(pool)?;
        let device = state.device;
        let used = state.get(Attribute::UsedCurrent).saturating_add(bytes);
        let missing = used.saturating_sub(state.get(Attribute::ReservedCurrent));
        if missing > 0 {
            let growth = missing.checked_next_multiple_of(UNIT).unwrap_or(u64::MAX);
            self.take_bytes(device, growth)?;
            let state = self.pool(pool)?;
            let reserved = state.get(Attribute::ReservedCurrent) + growth;
            state.set(Attribute::ReservedCurrent, reserved);
            state.set(Attribute::ReservedHigh, reserved.max(state.get(Attribute::ReservedHigh)));
        }
        let state = self.pool(pool)?;
        state.set(Attribute::UsedCurrent, used);
        state.set(Attribute::UsedHigh, used.max(state.get(Attribute::UsedHigh)));
        Ok(())
    }

    pub fn return_to_pool(&mut self, pool: PoolId, bytes: u64) {
        let bytes = bytes.next_multiple_of(GRAIN);
        if let Some(state) = self.pools.get_mut(pool.0) {
            state.set(Attribute::UsedCurrent, state.get(Attribute::UsedCurrent) - bytes);
            self.drop_pool_if_unused(pool);
        }
    }

    /// A destroyed pool goes once nothing of it is in use.
    fn drop_pool_if_unused(&mut self, pool: PoolId) {
        let unused = self.pools.get(pool.0).is_some_and(|state| state.gone && state.get(Attribute::UsedCurrent) == 0);
        if unused {
            self.shrink_pool(pool, 0);
            self.pools.remove(pool.0);
            self.memory.pool_access.retain(|&(known, _, _)| known != pool);
        }
    }

    /// Gives unused memory back until at most `keep` bytes are held.
    fn shrink_pool(&mut self, pool: PoolId, keep: u64) {
        let Some(state) = self.pools.get_mut(pool.0) else { return };
        let reserved = state.get(Attribute::ReservedCurrent);
        let needed = state.get(Attribute::UsedCurrent).max(keep.min(reserved)).next_multiple_of(UNIT);
        if needed < reserved {
            state.set(Attribute::ReservedCurrent, needed);
            let device = state.device;
            self.give_bytes(device, reserved - needed);
        }
    }

    /// The host has waited for work of `device`: its pools shrink to what they may keep.
    pub fn settle_pools(&mut self, device: DeviceId) {
        for id in self.pools.ids() {
            let state = self.pools.get(id).expect("a live id");
            if state.device == device && state.get(Attribute::ReservedCurrent) > state.get(Attribute::UsedCurrent) {
                let keep = state.get(Attribute::ReleaseThreshold);
                self.shrink_pool(PoolId(id), keep);
            }
        }
    }

    /// What pools hold and have not given out.
    pub fn bytes_idle_in_pools(&self) -> u64 {
        let idle = |pool: &Pool| pool.get(Attribute::ReservedCurrent) - pool.get(Attribute::UsedCurrent);
        self.pools.ids().into_iter().filter_map(|id| self.pools.get(id)).map(idle).sum()
    }

    /// An allocation's turn has come. Its memory is there already, unless a graph allocates it.
    pub fn run_pool_alloc(&mut self, ptr: DevicePtr, bytes: u64, pool: PoolId, by: &Toucher<'_>) {
        if let Some((_, Region::OfGraph { piece: None, .. })) = self.memory.space.regions.get(&ptr.0) {
            // Room was made when the graph was launched.
            let device = self.pools.get(pool.0).map(|state| state.device);
            let fresh = self.memory.add_piece(bytes, device, Bytes::device());
            if let Some((_, Region::OfGraph { piece, .. })) = self.memory.space.regions.get_mut(&ptr.0) {
                *piece = Some(fresh);
            }
        }
        // For those in no order with the allocation it is not there yet.
        let _ = self.memory.touch_all(ptr, bytes, true, by);
    }

    /// A free's turn has come.
    pub fn run_pool_free(&mut self, ptr: DevicePtr, by: &Toucher<'_>) {
        let Some((bytes, _)) = self.memory.space.regions.get(&ptr.0) else { return };
        let bytes = *bytes;
        let _ = self.memory.touch_all(ptr, bytes, true, by);
        let freed = match self.memory.space.regions.get_mut(&ptr.0) {
            Some((_, Region::Pooled { piece, pool, .. })) => Some((*piece, *pool, true)),
            Some((_, Region::OfGraph { piece, pool, .. })) => piece.take().map(|piece| (piece, *pool, false)),
            _ => None,
        };
        let Some((piece, pool, forget)) = freed else { return };
        if forget {
            self.memory.space.regions.remove(&ptr.0);
        }
        let at = by.who.at;
        self.memory.space.bury(Tomb { start: ptr.0, bytes, gone: Gone::PoolFreed, at, pinned_by: None });
        self.memory.drop_piece(piece);
        self.return_to_pool(pool, bytes);
    }
}
