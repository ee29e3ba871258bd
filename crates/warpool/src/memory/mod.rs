//! Memory: allocators of device memory and of pinned host memory, pools, settings, statistics, history, snapshots.
//!
//! ```
//! use std::sync::Arc;
//! use warpool::Instance;
//! use warpool::driver::sim::{SimConfig, SimDriver};
//! use warpool::memory::{Allocate, CachingAllocator, DeviceAllocator, MemPool, MemPoolId, Settings};
//! use warpool::memory::pools::PoolOptions;
//!
//! # fn main() -> warpool::Result<()> {
//! let instance = Instance::new(Arc::new(SimDriver::new(SimConfig::default())))?;
//! let (device, settings) = (instance.device(0)?, Settings::parse("max_split_size_mb:200")?);
//! let allocator = Arc::new(CachingAllocator::new(&instance, settings));
//! let (stream, other) = (device.pool_stream()?, device.pool_stream()?);
//!
//! let block = allocator.allocate(3 << 20, &stream)?; // 3 MiB of a segment of 20
//! block.record_use(&other)?; // this stream reads it too
//! drop(block); // reused when the work of `other` is done
//!
//! let pool = MemPool::new(&allocator, &device, PoolOptions::default())?;
//! {
//!     let _scope = pool.enter()?; // the pool serves this thread's requests
//!     let private = allocator.allocate(1 << 20, &stream)?;
//!     assert_eq!(allocator.stats(device.id())?.reserved_bytes.all.current, 22 << 20);
//! }
//! pool.close()?;
//!
//! allocator.trim(device.id(), MemPoolId::DEFAULT)?; // returns cached memory to the driver
//! assert_eq!(allocator.stats(device.id())?.reserved_bytes.all.current, 0);
//! # Ok(())
//! # }
//! ```
//!
//! Here is what every program needs:
//! - [`DeviceAllocator`] is the trait of all allocators of device memory: [`CachingAllocator`], which places every
//!   block where PyTorch's native allocator would, [`PagedAllocator`], which maps physical pages where they are needed
//!   and so has almost no fragmentation, [`DriverPoolAllocator`], over the driver's own pools, and
//!   [`PluggableAllocator`], over a user's functions. [`DeviceBlock`] is owned memory, and [`Allocate`] has the calls
//!   that allocate it.
//! - [`HostAllocator`] allocates pinned host memory, as [`HostBlock`]s, for all devices.
//!
//! The rest is in modules, one per subject:
//!
//! | module | what |
//! |---|---|
//! | [`settings`] | PyTorch's settings strings, parsed strictly; [`lint`] reports what has no effect |
//! | [`report`] | statistics, history, snapshots and observers, in PyTorch's terms |
//! | [`pools`] | private pools, for graphs and for programs that want memory of their own; checkpoints, upstreams |
//! | [`elastic`] | memory at fixed addresses that comes and goes in blocks |
//! | [`host`] | pinned memory: its allocator, statistics and pools of captures |
//! | [`sleep`] | memory that returns to the driver and comes back at the same addresses |
//! | [`external`] | a user's allocator, as a device allocator or as the upstream of one pool |
//! | [`decorate`] | allocators that wrap another and add one thing: a cap, a log |
//! | [`uncached`] | allocators without a cache |
//! | [`raw`] | requests in addresses and ids |
//!
//! [`SizeRules`]: how a request is rounded and when a block is split. [`OomReport`]: what an out-of-memory error knows.
//!
//! # Differences from PyTorch
//! - A search of cached memory never waits for another thread's driver call: these are made under a separate lock.
//!   `release_lock_on_cudamalloc` is accepted and always on.
//! - Trackers, observers and callbacks are called without any lock, and may call the allocator. Entries of one thread
//!   arrive in order.
//! - Dropping a [`DeviceBlock`] makes no driver call: fences in streams that used it are recorded by the next call.
//!   [`DeviceBlock::free`] records them at once.
//! - An unknown pointer, a removed pool, a stream of another device are errors, not assertions.
//! - While another stream is capturing, events are still queried, with the thread in relaxed capture mode for the call,
//!   so that no capture is invalidated. The allocator never waits for a capturing stream.
//! - Oversize segments of private pools are not released to make room: a graph may use them.
//! - A private pool is removed with its last segment, independent of paired calls.
//! - [`CachingAllocator::allocate_at`] writes no history entries about the parts that it splits off.
//! - Sharing a block with other processes is left to the caller: [`MappedPart`]s describe its
//!   mappings.

mod allocation;
mod allocator;
mod asleep_ranges;
mod background;
mod caching;
mod capture_count;
mod capture_memory;
mod checkpoint;
mod core;
pub mod decorate;
mod device_block;
pub mod elastic;
mod elastic_range;
pub mod external;
mod hold;
pub mod host;
mod left_segments;
mod limit;
mod mapped_segments;
mod paged;
mod pool;
mod pool_owner;
mod pool_sleep;
mod pool_table;
mod private_pools;
pub mod report;
mod scopes;
mod segment_source;
pub mod settings;
mod shortage;
mod size_rules;
pub mod sleep;
mod stream_fence;
pub mod uncached;

pub use crate::error::{OomCause, OomReport};
pub use crate::pool_id::MemPoolId;
pub use allocator::{DeviceAllocator, SharedAllocator};
pub use background::BackgroundReclaim;
pub use caching::CachingAllocator;
pub use device_block::{Allocate, DeviceBlock};
pub use host::{HostAllocator, HostBlock};
pub use paged::PagedAllocator;
pub use pool::MemPool;
pub use settings::{PinnedSettings, Settings};
pub use size_rules::SizeRules;
pub use sleep::Tags;
pub use uncached::{DriverPoolAllocator, PluggableAllocator};

/// Private pools: memory that only certain requests get.
///
/// ```
/// # use std::sync::Arc;
/// # use warpool::driver::sim::{SimConfig, SimDriver};
/// # use warpool::prelude::*;
/// use warpool::memory::pools::{Checkpoints, MemPool, PoolCheckpoint, PoolOptions, PoolUser, Restored, Route};
///
/// # fn main() -> warpool::Result<()> {
/// # let instance = Instance::new(Arc::new(SimDriver::new(SimConfig::default())))?;
/// # let device = instance.device(0)?;
/// # let stream = device.lease_stream()?;
/// # let allocator = Arc::new(CachingAllocator::new(&instance, Settings::default()));
/// let pool = MemPool::new(&allocator, &device, PoolOptions::default())?;
/// let block = allocator.allocate_in(&pool, 1 << 20, &stream)?;
/// {
///     let _scope = pool.enter()?; // until it is dropped, all requests of this thread
///     let another = allocator.allocate(1 << 20, &stream)?;
/// }
///
/// // The calls of `PrivatePools` take ids: here all requests of a stream, whichever thread makes them.
/// let pools = allocator.pools()?;
/// pools.begin_routing(device.id(), pool.id(), Route::Stream(stream.id()))?;
/// let third = allocator.allocate(1 << 20, &stream)?;
/// pools.end_routing(device.id(), pool.id())?;
/// pools.retain_pool_as(device.id(), pool.id(), PoolUser::RAW)?; // a use that a raw call ends
/// pools.release_pool_as(device.id(), pool.id(), PoolUser::RAW)?;
///
/// // A checkpoint restores which blocks are allocated, not what is in them.
/// let checkpoints: &dyn Checkpoints = allocator.checkpoints()?;
/// let before: PoolCheckpoint = checkpoints.checkpoint(device.id(), pool.id())?;
/// third.free()?;
/// let restored: Restored = checkpoints.restore(&before)?;
/// assert_eq!(restored.allocated.len(), 2); // at their addresses; the owner of `block` frees nothing any more
/// for allocation in restored.allocated {
///     allocator.free(allocation)?;
/// }
/// drop(block);
/// pool.close()?; // returns its memory to the driver
/// # Ok(())
/// # }
/// ```
pub mod pools {
    pub use super::checkpoint::{Checkpoints, PoolCheckpoint, Restored};
    pub use super::pool::{MemPool, PoolScope};
    pub use super::private_pools::{PoolOptions, PoolUser, PrivatePools, Route, Upstream};
    pub use crate::pool_id::MemPoolId;
}

/// The calls of [`DeviceAllocator`] in addresses and ids, for C interfaces and replays. Rust programs use
/// [`DeviceBlock`], which frees its memory when it is dropped.
///
/// ```
/// # use std::sync::Arc;
/// # use warpool::driver::sim::{SimConfig, SimDriver};
/// # use warpool::memory::raw::{Allocation, MappedPart, Request};
/// # use warpool::prelude::*;
/// # fn main() -> warpool::Result<()> {
/// # let instance = Instance::new(Arc::new(SimDriver::new(SimConfig::default())))?;
/// # let device = instance.device(0)?;
/// # let stream = device.pool_stream()?;
/// # let allocator = Arc::new(CachingAllocator::new(&instance, Settings::default()));
/// let allocation: Allocation = allocator.allocate_raw(Request::new(device.id(), stream.id(), 1000))?;
/// assert_eq!((allocation.bytes_requested, allocation.bytes), (1000, 1024));
/// allocator.free_raw(allocation.ptr)?; // nothing else frees it
/// # Ok(())
/// # }
/// ```
pub mod raw {
    pub use super::allocation::{Allocation, MappedPart, Request};
}

// In calls that only this crate's own allocators and graphs make.
#[doc(hidden)]
pub use allocation::GraphKey;
#[doc(hidden)]
pub use pool_sleep::{Asleep, ScopeId};
#[doc(hidden)]
pub use private_pools::PoolSleep;

// Within this crate, by one path.
pub(crate) use crate::error::PageShortage;
pub(crate) use allocation::{Allocation, MappedPart, Request, SnapshotOptions};
pub(crate) use capture_memory::CaptureMemory;
pub(crate) use checkpoint::{Checkpoints, PoolCheckpoint, Restored};
pub(crate) use external::{BaseAllocation, ExternalAllocator, Handled, RawStream};
pub(crate) use hold::{BlockHold, HeldBlock};
pub(crate) use host::CapturedHostPools;
pub(crate) use pool::PoolScope;
pub(crate) use pool_sleep::SleepingPools;
pub(crate) use private_pools::{PoolOptions, PoolUser, PoolUses, PrivatePools, Route, Upstream};
pub(crate) use report::{
    Action, Annotation, BlockInfo, BlockState, HistoryEntry, HistoryOptions, ObserverId, Observers, PageStats,
    PageTotals, RecordedSettings, SegmentInfo, SegmentKind, Snapshot, Stack, StackLevel, Stat, StatByKind, Stats,
    Usage, UsagePart, with_metadata,
};
pub(crate) use settings::{Backend, FreeBlockOrder, Warning, lint};
