//! Stream-ordered pools.

use crate::sim::driver::SimDriver;
use crate::sim::memory::{ALLOCATION_UNIT, Pool};
use crate::sim::refuse::{refuse, unnamed};
use crate::sim::state::SimState;
use crate::sim::table::Missing;
use crate::sim::work::Work;
use crate::{Access, Call, DeviceId, DevicePtr, ErrorCode, PoolAttribute, PoolId, Pools, Result, StreamId};

impl Pools for SimDriver {
    fn pool_default(&self, device: DeviceId) -> Result<PoolId> {
        self.call(Call::PoolDefault, |state| {
            state.use_device(device)?;
            check_pools(state, device)?;
            Ok(state.memory.default_pool(device))
        })
    }

    fn pool_create(&self, device: DeviceId) -> Result<PoolId> {
        self.call(Call::PoolCreate, |state| {
            state.use_device(device)?;
            check_pools(state, device)?;
            Ok(state.memory.create_pool(device))
        })
    }

    fn pool_destroy(&self, pool: PoolId) -> Result<()> {
        self.call(Call::PoolDestroy, |state| {
            if state.pool(pool)?.is_default {
                return refuse(ErrorCode::InvalidValue, "a default pool cannot be destroyed");
            }
            state.memory.destroy_pool(pool);
            Ok(())
        })
    }

    fn pool_alloc(&self, pool: PoolId, bytes: u64, stream: StreamId) -> Result<DevicePtr> {
        self.waiting_call(Call::PoolAlloc, |mut state| {
            let stream = state.live_stream(stream)?;
            use_pool(&mut state, pool)?;
            let is_capturing = forbid_pool_call(&mut state, stream)?;
            let bytes = bytes.max(1);
            if bytes.checked_next_multiple_of(ALLOCATION_UNIT).is_none() {
                return Err(unnamed(ErrorCode::OutOfMemory));
            }
            if is_capturing {
                return capture_alloc(&mut state, pool, bytes, stream);
            }
            state.spend(bytes);
            let mut state = self.wait_for_queue(state, stream)?;
            state.pool(pool)?;
            let ptr = state.memory.allocate_from_pool(pool, bytes)?;
            let at = state.call_number();
            state.scheduler.enqueue(stream, Work::PoolAlloc { ptr, bytes, pool }, 0, Vec::new(), at);
            Ok(ptr)
        })
    }

    fn pool_free(&self, ptr: DevicePtr, stream: StreamId) -> Result<()> {
        self.waiting_call(Call::PoolFree, |mut state| {
            let stream = state.live_stream(stream)?;
            if forbid_pool_call(&mut state, stream)? {
                return capture_free(&mut state, ptr, stream);
            }
            let mut state = self.wait_for_queue(state, stream)?;
            state.memory.begin_pool_free(ptr)?;
            let at = state.call_number();
            state.scheduler.enqueue(stream, Work::PoolFree { ptr }, 0, Vec::new(), at);
            Ok(())
        })
    }

    fn pool_get(&self, pool: PoolId, attribute: PoolAttribute) -> Result<u64> {
        self.call(Call::PoolGet, |state| Ok(use_pool(state, pool)?.get(attribute)))
    }

    fn pool_set(&self, pool: PoolId, attribute: PoolAttribute, value: u64) -> Result<()> {
        self.call(Call::PoolSet, |state| {
            if !use_pool(state, pool)?.set_attribute(attribute, value) {
                return refuse(ErrorCode::InvalidValue, format!("{attribute:?} cannot be set to {value}"));
            }
            Ok(())
        })
    }

    fn pool_trim(&self, pool: PoolId, keep: u64) -> Result<()> {
        self.call(Call::PoolTrim, |state| {
            use_pool(state, pool)?;
            state.memory.trim_pool(pool, keep);
            Ok(())
        })
    }

    fn pool_set_access(&self, pool: PoolId, device: DeviceId, access: Access) -> Result<()> {
        self.call(Call::PoolSetAccess, |state| {
            state.check_device(device)?;
            let owner = use_pool(state, pool)?.device;
            if owner == device {
                return match access {
                    Access::ReadWrite => Ok(()),
                    _ => refuse(ErrorCode::InvalidDevice, "the access of a pool's own device cannot be changed"),
                };
            }
            let peers = &state.config.devices[device.0 as usize].properties.peers;
            if access != Access::None && !peers.contains(&owner) {
                return refuse(ErrorCode::InvalidDevice, format!("{device} cannot reach the pool's device"));
            }
            use_pool(state, pool)?.set_access(device, access);
            Ok(())
        })
    }
}

fn check_pools(state: &SimState, device: DeviceId) -> Result<()> {
    if state.config.devices[device.0 as usize].properties.async_pools {
        return Ok(());
    }
    refuse(ErrorCode::NotSupported, format!("{device} has no stream-ordered pools"))
}

/// A pool that was not destroyed, and whose device works.
fn use_pool(state: &mut SimState, pool: PoolId) -> Result<&mut Pool> {
    if state.pool(pool)?.destroyed {
        return Err(state.missing(Missing::Destroyed, pool));
    }
    state.pool(pool)
}

/// Refuses an allocation or free that a capture forbids. Returns whether the stream captures.
fn forbid_pool_call(state: &mut SimState, stream: StreamId) -> Result<bool> {
    let is_capturing = state.captures.is_capturing(stream);
    if !is_capturing {
        state.forbid_unsafe_call()?;
    }
    state.forbid_implicit_wait(stream)?;
    Ok(is_capturing)
}

/// An allocation as a node: its address is chosen now, its memory comes when the graph runs.
fn capture_alloc(state: &mut SimState, pool: PoolId, bytes: u64, stream: StreamId) -> Result<DevicePtr> {
    let capture = state.captures.valid_membership(stream)?.capture;
    let ptr = state.memory.reserve_graph_memory(pool, bytes)?;
    state.submit(stream, Work::PoolAlloc { ptr, bytes, pool }, 0)?;
    state.captures.add_memory(capture, ptr, pool);
    Ok(ptr)
}

/// A free as a node, of memory that the same graph allocates.
fn capture_free(state: &mut SimState, ptr: DevicePtr, stream: StreamId) -> Result<()> {
    let capture = state.captures.valid_membership(stream)?.capture;
    if !state.captures.is_live(capture, ptr) {
        let why = format!("{ptr} is not the start of a live allocation of this graph");
        return refuse(ErrorCode::InvalidValue, why);
    }
    state.submit(stream, Work::PoolFree { ptr }, 0)
}
