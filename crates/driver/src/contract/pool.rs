//! The driver's own stream-ordered pools: memory is given and taken back in the order of a stream.

use crate::{Access, DeviceId, DevicePtr, PoolId, Result, StreamId};

/// What can be asked of a pool, and partly set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PoolAttribute {
    /// May reuse memory freed in another stream if an event orders the two. 0 or 1.
    ReuseFollowEvents,
    /// May reuse memory freed in another stream if that has already completed. 0 or 1.
    ReuseOpportunistic,
    /// May insert waits of its own to reuse memory. 0 or 1.
    ReuseInternalDependencies,
    /// How many unused bytes it keeps when the host waits for a stream or event. 0 at first.
    ReleaseThreshold,
    /// Bytes that it holds from the device. Cannot be set.
    ReservedCurrent,
    /// The most of that. Can be set to 0 only, which starts anew from the current value.
    ReservedHigh,
    /// Bytes given out. Cannot be set.
    UsedCurrent,
    /// The most of that. Can be set to 0 only, which starts anew from the current value.
    UsedHigh,
}

/// Stream-ordered pools.
pub trait Pools {
    /// The device's default pool. Always the same id. `NotSupported` on a device without pools. *During capture: free.*
    fn pool_default(&self, device: DeviceId) -> Result<PoolId>;

    /// Makes a pool. *During capture: guarded.*
    fn pool_create(&self, device: DeviceId) -> Result<PoolId>;

    /// Takes a pool away once its memory has been freed. `InvalidValue` for a default pool. *During capture: guarded.*
    fn pool_destroy(&self, pool: PoolId) -> Result<()>;

    /// Allocates in the order of `stream`: usable by work that comes after, in that stream or ordered behind it.
    /// `OutOfMemory` if there is no room. *During capture:* on a stream that captures it becomes a node, and the
    /// address is the same at every replay; on another stream guarded.
    fn pool_alloc(&self, pool: PoolId, bytes: u64, stream: StreamId) -> Result<DevicePtr>;

    /// Frees in the order of `stream`: work that comes after must not touch it. `InvalidValue` if it starts no live
    /// allocation. *During capture:* as [`pool_alloc`](Self::pool_alloc).
    fn pool_free(&self, ptr: DevicePtr, stream: StreamId) -> Result<()>;

    /// Reads an attribute. *During capture: guarded.*
    fn pool_get(&self, pool: PoolId, attribute: PoolAttribute) -> Result<u64>;

    /// Sets an attribute; `InvalidValue` where [`PoolAttribute`] does not allow it. *During capture: guarded.*
    fn pool_set(&self, pool: PoolId, attribute: PoolAttribute, value: u64) -> Result<()>;

    /// Gives unused memory back to the device until at most `keep` bytes are held, as far as it can. *During capture:
    /// guarded.*
    fn pool_trim(&self, pool: PoolId, keep: u64) -> Result<()>;

    /// Sets what another device may do with the pool's memory. The pool's own device keeps its rights
    /// (`InvalidDevice` to take them away). *During capture: free.*
    fn pool_set_access(&self, pool: PoolId, device: DeviceId, access: Access) -> Result<()>;
}
