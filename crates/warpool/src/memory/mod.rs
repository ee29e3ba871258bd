//! Memory: allocators of device memory and of pinned host memory, pools, settings, statistics, history, snapshots.
//!
//! ```
//! use std::sync::Arc;
//! use warpool::Instance;
//! use warpool::driver::sim::{SimConfig, SimDriver};
//! use warpool::memory::{Allocate, CachingAllocator, DeviceAllocator, MemPool, MemPoolId, PoolOptions, Settings};
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
//! - [`DeviceAllocator`] is the trait of all allocators of device memory: [`CachingAllocator`], which places every
//!   block where PyTorch's native allocator would, [`PagedAllocator`], which maps physical pages where they are needed
//!   and so has almost no fragmentation, and [`DriverPoolAllocator`], over the driver's own pools. [`DeviceBlock`] is
//!   owned memory; the raw calls of the trait are for C and for replays.
//! - [`HostAllocator`] allocates pinned host memory, as [`HostBlock`]s, for all devices.
//! - [`PluggableAllocator`] is a device allocator over a user's functions, an [`ExternalAllocator`];
//!   [`ExternalUpstream`] makes them the upstream of one pool.
//! - [`Limited`] and [`Traced`] are [`Decorator`]s: each wraps any allocator and adds one thing.
//! - [`MemPool`] and [`PrivatePools`]: private pools, for graphs and for programs that want memory of their own.
//! - [`Settings`]: PyTorch's settings strings, parsed strictly; [`lint`] reports settings without effect.
//!   [`SizeRules`]: how a request is rounded and when a block is split.
//! - [`Stats`], [`HistoryOptions`], [`Snapshot`]: statistics, allocation history and state, in PyTorch's terms.
//! - [`Observers`]: callbacks, including those for low memory.
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
//! - Sharing a block with other processes is left to the caller: [`MappedPart`]s describe its mappings.

mod allocation;
mod allocator;
mod asleep_ranges;
mod caching;
mod capture_count;
mod capture_memory;
mod checkpoint;
mod core;
mod decorate;
mod device_block;
mod external;
mod hold;
mod host;
mod limit;
mod paged;
mod pool;
mod pool_owner;
mod pool_sleep;
mod pool_table;
mod private_pools;
mod report;
mod scopes;
mod segment_source;
mod settings;
mod shortage;
mod size_rules;
mod sleep;
mod stream_fence;
mod uncached;

pub use crate::error::{OomCause, OomReport, PageShortage, PinnedCapReport};
pub use crate::pool_id::MemPoolId;
#[doc(hidden)]
pub use allocation::GraphKey;
pub use allocation::{Allocation, MappedPart, Request, SnapshotOptions};
pub use allocator::{DeviceAllocator, SharedAllocator};
pub use caching::CachingAllocator;
pub(crate) use capture_memory::CaptureMemory;
pub use checkpoint::{Checkpoints, PoolCheckpoint, Restored};
pub use decorate::{AllocatorCall, Decorator, FreeCall, Limited, Traced};
pub use device_block::{Allocate, DeviceBlock};
pub use external::{BaseAllocation, ExternalAllocator, ExternalUpstream, FnAllocator, Handled, RawStream};
pub(crate) use hold::{BlockHold, HeldBlock};
pub(crate) use host::CapturedHostPools;
pub use host::{HostAllocator, HostBlock, HostGraphPool, HostStats, HostTime};
pub use paged::PagedAllocator;
pub use pool::{MemPool, PoolScope};
pub(crate) use pool_sleep::SleepingPools;
#[doc(hidden)]
pub use pool_sleep::{Asleep, ScopeId};
#[doc(hidden)]
pub use private_pools::PoolSleep;
pub(crate) use private_pools::PoolUses;
pub use private_pools::{PoolOptions, PoolUser, PrivatePools, Route, Upstream};
pub(crate) use report::with_metadata;
pub use report::{
    Action, Annotation, BlockInfo, BlockState, Frame, HistoryEntry, HistoryOptions, ObserverId, Observers, OomObserver,
    PageStats, PageTotals, PressureCallback, RecordedSettings, SegmentInfo, SegmentKind, Snapshot, Stack, StackHook,
    StackId, StackLevel, Stat, StatByKind, Stats, TextId, Texts, TraceEntry, Tracker, TrimHook, pop_compile_context,
    push_compile_context, set_user_metadata, user_metadata,
};
pub use settings::{
    Backend, FreeBlockOrder, Lint, Origin, PinnedSettings, Problem, Reserve, SettingValue, Settings, SettingsError,
    Warning, lint,
};
pub use size_rules::SizeRules;
pub use sleep::{Keep, SleepReport, Tag, TagInfo, TagScope, TagState, Tags};
pub use uncached::{DriverPoolAllocator, PluggableAllocator, UncachedAllocator};
