//! Memory: allocators of device memory and of pinned host memory, pools, settings, statistics, history, snapshots.
//!
//! ```
//! use std::sync::Arc;
//! use warpool::Instance;
//! use warpool::driver::sim::{SimConfig, SimDriver};
//! use warpool::memory::{Allocate, CachingAllocator, DeviceAllocator, MemPool, MemPoolId, PoolOptions, Settings};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let instance = Instance::new(Arc::new(SimDriver::new(SimConfig::default())))?;
//! let (device, settings) = (instance.device(0)?, Settings::parse("max_split_size_mb:200")?);
//! let allocator: Arc<dyn DeviceAllocator> = Arc::new(CachingAllocator::new(&instance, settings));
//! let (stream, other) = (device.pool_stream()?, device.pool_stream()?);
//!
//! let block = allocator.allocate(3 << 20, &stream)?; // 3 MiB of a segment of 20
//! block.record_use(&other)?; // this stream reads it too
//! drop(block); // given out again when `other` has passed
//!
//! let pool = MemPool::new(&allocator, &device, PoolOptions::default())?;
//! {
//!     let _scope = pool.enter()?; // what this thread asks for comes from the pool
//!     let private = allocator.allocate(1 << 20, &stream)?;
//!     assert_eq!(allocator.stats(device.id())?.reserved_bytes.all.current, 22 << 20);
//! }
//! pool.close()?;
//!
//! allocator.trim(device.id(), MemPoolId::DEFAULT)?; // what is cached goes back to the driver
//! assert_eq!(allocator.stats(device.id())?.reserved_bytes.all.current, 0);
//! # Ok(())
//! # }
//! ```
//!
//! - [`DeviceAllocator`] is what every allocator offers: [`CachingAllocator`], which puts every block where PyTorch's
//!   native allocator would, and [`DriverPoolAllocator`], over the driver's own pools. [`Block`] is owned memory; the
//!   raw calls of the trait are for C and for recordings.
//! - [`HostAllocator`] gives pinned host memory, as [`HostBlock`]s, for all devices.
//! - [`PluggableAllocator`] is a device allocator over a user's functions, an [`ExternalAllocator`]; [`ExternalUpstream`]
//!   makes them the upstream of one pool.
//! - [`Limited`] and [`Traced`] are [`Decorator`]s: each wraps any allocator and adds one thing.
//! - [`MemPool`] and [`PoolKeeper`]: private pools, for graphs and for programs that want memory of their own.
//! - [`Settings`]: PyTorch's settings strings, read strictly; [`lint`] says what of one has no effect.
//! - [`Stats`], [`HistoryOptions`], [`Snapshot`]: what was counted, what happened, what there is, in PyTorch's terms.
//! - [`Observers`]: who is told, and who helps when memory runs short.
//!
//! # Where it differs from PyTorch
//! - Nobody's search waits for the driver: memory is asked for and given back under a lock of its own.
//!   `release_lock_on_cudamalloc` is accepted and always so.
//! - Trackers, observers and callbacks are called without any lock, and may call the allocator. Events of one thread
//!   come in order.
//! - A dropped [`Block`] calls no driver: marks in streams that used it are put by the next call. [`Block::free`] puts
//!   them at once.
//! - An unknown pointer, a pool that is gone, a stream of another device are errors, never assertions.
//! - While a capture is under way elsewhere, events are still asked about, with the thread's strictness lowered for the
//!   call: no other thread's capture breaks. A stream that captures is never waited for.
//! - The oversize release, which gives cached blocks back to make room, leaves private pools alone: a graph may own
//!   them.
//! - A private pool is gone when its last segment is; nothing is counted in pairs, so it cannot be lost or dropped too
//!   early.
//! - [`CachingAllocator::allocate_at`] writes no entries about the parts that it cuts off.
//! - Sharing blocks with other processes is not here yet.

mod allocator;
mod block;
mod caching;
mod decorate;
mod external;
mod history;
mod host;
mod journal;
mod limit;
mod observe;
mod pool;
mod scopes;
mod settings;
mod shortage;
mod size_rules;
mod snapshot;
mod stats;
mod stream_fence;
mod uncached;

pub use crate::error::{OomCause, OomReport, PinnedCapReport};
pub use crate::pool_id::MemPoolId;
pub use allocator::{Allocation, DeviceAllocator, Request, SnapshotOptions};
pub use block::{Allocate, Block};
pub use caching::{CachingAllocator, PoolCheckpoint, Restored};
pub use decorate::{AllocatorCall, Decorator, FreeCall, Limited, Traced};
pub use external::{BaseAllocation, ExternalAllocator, ExternalUpstream, FnAllocator, Handled, RawStream};
pub(crate) use history::with_metadata;
pub use history::{
    HistoryEntry, HistoryOptions, Stack, StackLevel, pop_compile_context, push_compile_context, set_user_metadata,
    user_metadata,
};
pub(crate) use host::GraphHostPool;
pub use host::{HostAllocator, HostBlock, HostStats, HostTime};
pub use observe::{ObserverId, Observers, OomObserver, PressureCallback, StackHook, Tracker, TrimHook};
pub use pool::{MemPool, PoolKeeper, PoolOptions, PoolScope, Route, Upstream};
pub use settings::{
    Backend, FreeBlockOrder, Lint, Origin, PinnedSettings, Problem, Reserve, SettingValue, Settings, SettingsError,
    Warning, lint,
};
pub use size_rules::SizeRules;
pub use snapshot::{
    Action, Annotation, BlockInfo, BlockState, Frame, RecordedSettings, SegmentInfo, SegmentKind, Snapshot, StackId,
    TextId, Texts, TraceEntry,
};
pub use stats::{Stat, StatByKind, Stats};
pub use uncached::{DriverPoolAllocator, PluggableAllocator, UncachedAllocator};
