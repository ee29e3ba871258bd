//! Device memory: allocators, pools, statistics, snapshots.

mod allocator;
mod block;
mod caching;
mod driver_pool;
mod history;
mod observe;
mod oom;
mod pool;
mod pool_id;
mod settings;
mod snapshot;
mod stats;

pub use allocator::{Allocation, DeviceAllocator, Request, SnapshotOptions};
pub use block::{Allocate, Block};
pub use caching::{CachingAllocator, PoolCheckpoint, Restored};
pub use driver_pool::DriverPoolAllocator;
pub use history::{
    Event, HistoryOptions, Stack, StackLevel, pop_compile_context, push_compile_context, set_user_metadata,
    user_metadata,
};
pub use observe::{ObserverId, Observers, OomObserver, PressureCallback, StackHook, Tracker};
pub use oom::{OomCause, OomReport};
pub use pool::{MemPool, PoolKeeper, PoolOptions, PoolScope, Route, Upstream};
pub use pool_id::MemPoolId;
pub use settings::{
    Backend, FreeBlockOrder, Lint, Origin, PinnedSettings, Problem, Reserve, SettingValue, Settings, SettingsError,
    Warning, lint,
};
pub use snapshot::{
    Action, Annotation, BlockInfo, BlockState, Frame, RecordedSettings, SegmentInfo, SegmentKind, Snapshot, StackId,
    TextId, Texts, TraceEntry,
};
pub use stats::{Stat, StatByKind, Stats};
