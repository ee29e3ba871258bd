//! CUDA's stream-ordered memory pools: memory is allocated and freed in the order of a stream.

use crate::{Access, DeviceId, DevicePtr, PoolId, Result, StreamId};

/// An attribute of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PoolAttribute {
    /// May reuse memory freed in another stream if an event orders the two. 0 or 1.
    ReuseFollowEvents,
    /// May reuse memory freed in another stream if that has already completed. 0 or 1.
    ReuseOpportunistic,
    /// May insert dependencies to reuse memory. 0 or 1.
    ReuseInternalDependencies,
    /// How many unused bytes it keeps when the host waits for a stream or event. Initially 0.
    ReleaseThreshold,
    /// Bytes that it has reserved. Cannot be set.
    ReservedCurrent,
    /// The peak of that. Can only be set to 0, which resets it to the current value.
    ReservedHigh,
    /// Bytes allocated. Cannot be set.
    UsedCurrent,
    /// The peak of that. Can only be set to 0, which resets it to the current value.
    UsedHigh,
}

/// Stream-ordered pools.
pub trait Pools {
    /// The device's default pool. Always the same id. `NotSupported` on a device without pools. *During capture: free.*
    fn pool_default(&self, device: DeviceId) -> Result<PoolId>;

    /// Creates a pool. *During capture: guarded.*
    fn pool_create(&self, device: DeviceId) -> Result<PoolId>;

    /// Destroys a pool once its memory has been freed. `InvalidValue` for a default pool. *During capture: guarded.*
    fn pool_destroy(&self, pool: PoolId) -> Result<()>;

    /// Allocates in the order of `stream`: usable by work that comes after, in that stream or ordered after it.
    /// `OutOfMemory` if there is not enough. *During capture:* on a stream that captures it becomes a node, and the
    /// address is the same at every replay; on another stream guarded.
    fn pool_alloc(&self, pool: PoolId, bytes: u64, stream: StreamId) -> Result<DevicePtr>;

    /// Frees in the order of `stream`: work that comes after must not use it. `InvalidValue` if it is not the start of
    /// an allocation. *During capture:* as [`pool_alloc`](Self::pool_alloc).
    fn pool_free(&self, ptr: DevicePtr, stream: StreamId) -> Result<()>;

    /// Reads an attribute. *During capture: guarded.*
    fn pool_get(&self, pool: PoolId, attribute: PoolAttribute) -> Result<u64>;

    /// Sets an attribute; `InvalidValue` where [`PoolAttribute`] does not allow it. *During capture: guarded.*
    fn pool_set(&self, pool: PoolId, attribute: PoolAttribute, value: u64) -> Result<()>;

    /// Releases unused memory until at most `keep` bytes are reserved, as far as possible. *During capture:
    /// guarded.*
    fn pool_trim(&self, pool: PoolId, keep: u64) -> Result<()>;

    /// Sets another device's access to the pool's memory. The pool's own device always has access (`InvalidDevice`).
    /// *During capture: free.*
    fn pool_set_access(&self, pool: PoolId, device: DeviceId, access: Access) -> Result<()>;
}
