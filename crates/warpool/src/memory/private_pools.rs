//! The trait [`PrivatePools`], and how pools are created and requests routed to them.
//!
//! Routing is not capturing: a scope decides which pool serves a request and changes nothing else.

use std::fmt;
use std::sync::Arc;
use std::thread::ThreadId;

use warpool_driver::{CaptureId, DeviceId, DevicePtr, StreamId};

use super::{Asleep, MemPoolId, ScopeId};
use crate::{Error, Result};

/// How a pool is created.
#[derive(Clone, Default)]
pub struct PoolOptions {
    /// Where its segments come from; `None` is the driver. [`Error::Unsupported`] with an allocator without a cache.
    pub upstream: Option<Arc<dyn Upstream>>,
    /// Whether the memory of its segments can be registered with hardware and libraries for as long as the pool has
    /// uses: each segment is one physical allocation, mapped once, never moved and never asleep. Its size and address
    /// are multiples of 2 MiB and of [`multicast_granularity`], and it can be shared and accessed by other hardware,
    /// where the device can. With an upstream the segments are the upstream's, and this has no effect.
    /// [`Error::Unsupported`] with an allocator without a cache, and on a device without virtual memory management.
    ///
    /// [`multicast_granularity`]: warpool_driver::DeviceProperties::multicast_granularity
    pub stable: bool,
    /// Whether its free blocks serve the default pool when it cannot get a new segment. Not after a capture has
    /// allocated from it: the graph continues to use that memory.
    pub use_on_oom: bool,
    /// Whether each of its blocks is a whole segment.
    pub no_split: bool,
}

impl fmt::Debug for PoolOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PoolOptions")
            .field("upstream", &self.upstream.is_some())
            .field("stable", &self.stable)
            .field("use_on_oom", &self.use_on_oom)
            .field("no_split", &self.no_split)
            .finish()
    }
}

impl PoolOptions {
    /// Those of a [stable](Self::stable) pool.
    #[must_use]
    pub fn stable() -> Self {
        Self { stable: true, ..Self::default() }
    }
}

/// The source of a pool's segments instead of the driver.
///
/// It is called without any lock, possibly by several threads at once. It may call the allocator that it serves, but
/// must not allocate from its own pool. A panic reaches the caller of the allocator; the segment that was being freed
/// stays in its pool, as after an error.
pub trait Upstream: Send + Sync {
    /// Allocates `bytes` of device memory for `stream`; `None` is out of memory. The null address, and memory that
    /// reaches the end of the address space or overlaps what the allocator has, are an error.
    fn allocate(&self, device: DeviceId, bytes: u64, stream: StreamId) -> Result<Option<DevicePtr>>;

    /// Frees memory that [`allocate`](Self::allocate) returned. Work of its stream that uses it may still run. After an
    /// error the pool keeps the memory, and retries the free later.
    fn free(&self, ptr: DevicePtr, bytes: u64, device: DeviceId, stream: StreamId) -> Result<()>;

    /// The sizes that it is asked for are multiples of this.
    fn granularity(&self) -> u64 {
        1
    }

    /// Lets kernels on `peer` access its memory, present and future, as those of the allocator's. By default nothing:
    /// the memory is the user's. May be called more than once.
    fn enable_peer_access(&self, peer: DeviceId) -> Result<()> {
        let _ = peer;
        Ok(())
    }

    /// Whether a pool in use gives it free segments before a request would run out of memory, unless captures allocated
    /// from the pool. Otherwise a pool keeps what it has until it is released.
    fn takes_free_segments(&self) -> bool {
        false
    }
}

/// Which requests go to a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// Requests of this thread.
    Thread(ThreadId),
    /// Requests for streams that take part in this capture.
    Capture(CaptureId),
    /// Requests for this stream.
    Stream(StreamId),
    /// All requests on the device.
    Everything,
}

/// The kind of user whose use of a pool, or whose scope, a call begins or ends. Each kind ends only its own uses and
/// scopes: a raw call cannot release a pool that a graph uses, nor end the routing of a capture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolUser {
    is_handle: bool,
}

impl PoolUser {
    /// The callers of raw calls, which count their uses themselves.
    pub const RAW: Self = Self { is_handle: false };

    /// Handles, scopes and graphs, which end their uses when they are dropped.
    pub(crate) const HANDLE: Self = Self { is_handle: true };
}

/// How many uses a pool has.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PoolUses {
    raw: u32,
    handles: u32,
}

impl PoolUses {
    /// One use, by the creator.
    pub(crate) const CREATED: Self = Self { raw: 1, handles: 0 };

    pub(crate) fn total(self) -> u32 {
        self.raw + self.handles
    }

    pub(crate) fn add(&mut self, user: PoolUser) {
        *self.of(user) += 1;
    }

    /// Ends a use of `user`; [`Error::PoolNotRetained`] if it has none.
    pub(crate) fn end(&mut self, pool: MemPoolId, user: PoolUser) -> Result<()> {
        let uses = self.of(user);
        *uses = uses.checked_sub(1).ok_or(Error::PoolNotRetained { pool })?;
        Ok(())
    }

    fn of(&mut self, user: PoolUser) -> &mut u32 {
        if user.is_handle { &mut self.handles } else { &mut self.raw }
    }
}

/// The private pools of an allocator. A pool exists as long as it has uses: its creator, open scopes, graphs. After
/// that it is released: its memory is returned when memory is trimmed, and blocks that are still allocated stay valid.
///
/// [`MemPool`](super::MemPool) is the owned form of a pool. The calls here take ids, for C callers and replays; they
/// end only the uses and scopes that such calls have begun.
pub trait PrivatePools: Send + Sync {
    /// Creates a pool with one use, the creator's, which [`release_pool`](Self::release_pool) ends: `(0, n)`.
    fn create_pool(&self, device: DeviceId, options: PoolOptions) -> Result<MemPoolId>;

    /// As [`create_pool`](Self::create_pool), for a graph: `(n, 0)`.
    fn create_graph_pool(&self, device: DeviceId) -> Result<MemPoolId>;

    /// Adds a use, which [`release_pool`](Self::release_pool) ends.
    fn retain_pool(&self, device: DeviceId, pool: MemPoolId) -> Result<()> {
        self.retain_pool_as(device, pool, PoolUser::RAW)
    }

    /// Ends one of the uses that [`create_pool`](Self::create_pool), [`create_graph_pool`](Self::create_graph_pool) and
    /// [`retain_pool`](Self::retain_pool) have begun; [`Error::PoolNotRetained`] if none is left. Makes no driver call.
    fn release_pool(&self, device: DeviceId, pool: MemPoolId) -> Result<()> {
        self.release_pool_as(device, pool, PoolUser::RAW)
    }

    /// Adds a use of `user`.
    fn retain_pool_as(&self, device: DeviceId, pool: MemPoolId, user: PoolUser) -> Result<()>;

    /// Ends a use of `user`. Makes no driver call.
    fn release_pool_as(&self, device: DeviceId, pool: MemPoolId, user: PoolUser) -> Result<()>;

    /// The number of uses.
    fn pool_uses(&self, device: DeviceId, pool: MemPoolId) -> Result<u32>;

    /// Sets whether its free blocks serve the default pool before that runs out of memory.
    fn set_use_on_oom(&self, device: DeviceId, pool: MemPoolId, on: bool) -> Result<()>;

    /// Opens a scope: requests that match `route` are served by the pool. If several open scopes match, the newest
    /// applies. Adds a use. [`Error::AlreadyRouting`](crate::Error::AlreadyRouting) if the pool has an open scope.
    fn begin_routing(&self, device: DeviceId, pool: MemPoolId, route: Route) -> Result<()> {
        self.begin_routing_as(device, pool, route, PoolUser::RAW)
    }

    /// Replaces the routes of the scope that [`begin_routing`](Self::begin_routing) opened: requests that match any of
    /// them are served by the pool. [`Error::ForeignScope`] if it is a [`PoolScope`](super::PoolScope)'s or a
    /// capture's.
    fn reroute(&self, device: DeviceId, pool: MemPoolId, routes: &[Route]) -> Result<()> {
        self.reroute_as(device, pool, routes, PoolUser::RAW)
    }

    /// Closes the scope that [`begin_routing`](Self::begin_routing) opened, and ends its use. [`Error::ForeignScope`]
    /// if it is a [`PoolScope`](super::PoolScope)'s or a capture's.
    fn end_routing(&self, device: DeviceId, pool: MemPoolId) -> Result<()> {
        self.end_routing_as(device, pool, PoolUser::RAW)
    }

    /// Opens a scope of `user`.
    fn begin_routing_as(&self, device: DeviceId, pool: MemPoolId, route: Route, user: PoolUser) -> Result<()>;

    /// Replaces the routes of a scope of `user`.
    fn reroute_as(&self, device: DeviceId, pool: MemPoolId, routes: &[Route], user: PoolUser) -> Result<()>;

    /// Closes a scope of `user`.
    fn end_routing_as(&self, device: DeviceId, pool: MemPoolId, user: PoolUser) -> Result<()>;

    /// Announces that a capture is about to begin on a stream of the device: from now on, requests and frees check the
    /// capture status of their streams. Call it before the driver's `capture_begin`, so that no other thread waits for
    /// the stream meanwhile.
    fn capture_began(&self, device: DeviceId) -> Result<()>;

    /// Announces that the capture ended. Call it after the driver's `capture_end`.
    fn capture_ended(&self, device: DeviceId) -> Result<()>;

    /// Records that work on `streams` uses the pool's memory although it was allocated for other streams, as replays of
    /// a graph do. The pool's memory is returned to the driver only after that work is done. Makes no driver call.
    fn record_pool_uses(&self, device: DeviceId, pool: MemPoolId, streams: &[StreamId]) -> Result<()>;

    /// As [`record_pool_uses`](Self::record_pool_uses), for work on unknown streams, such as replays that a framework
    /// launches itself. The pool's memory is returned to the driver, and used elsewhere, only after all work of the
    /// device is done, and not while a capture is active.
    fn record_pool_use_anywhere(&self, device: DeviceId, pool: MemPoolId) -> Result<()>;

    /// The interface that [`Tags`](super::Tags) need; `None` if its pools cannot sleep.
    #[doc(hidden)]
    fn sleep(&self) -> Option<&dyn PoolSleep> {
        None
    }

    /// Whether exactly these addresses are allocated in the pool.
    fn has_exactly(&self, device: DeviceId, pool: MemPoolId, live: &[DevicePtr]) -> Result<bool>;
}

/// The interface of an allocator for sleeping memory. Only for [`Tags`](super::Tags).
#[doc(hidden)]
pub trait PoolSleep: Send + Sync {
    /// Opens another scope of a pool, and adds a use.
    fn open_scope(&self, device: DeviceId, pool: MemPoolId, route: Route) -> Result<ScopeId>;

    /// Closes a scope. Makes no driver call.
    fn close_scope(&self, device: DeviceId, pool: MemPoolId, scope: ScopeId);

    /// Whether captures are active that were reported to the allocator.
    fn has_captures(&self) -> bool;

    /// Waits for pending frees of the device, and returns the free segments of a pool in use to its upstream; none if
    /// captures allocated from it. Returns the number of bytes.
    fn release_free_segments(&self, device: DeviceId, pool: MemPoolId) -> Result<u64>;

    /// Sets how much of a pool is asleep; `None` is awake. Makes no driver call.
    fn set_asleep(&self, device: DeviceId, pool: MemPoolId, asleep: Option<Asleep>) -> Result<()>;

    /// Fails with [`Error::TagAsleep`] if a pool is asleep.
    fn expect_awake(&self, device: DeviceId, pool: MemPoolId) -> Result<()>;

    /// As [`set_asleep`](Self::set_asleep), before memory is allocated for the part that wakes. Returns `false`,
    /// without any change, if that would exceed a limit.
    fn reserve_to_wake(&self, device: DeviceId, pool: MemPoolId, asleep: Asleep) -> Result<bool>;
}
