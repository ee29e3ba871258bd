//! What an allocator reports: statistics, the allocation history, snapshots and the observers that are called.

mod history;
mod observers;
mod recorder;
mod snapshot;
mod stats;

pub use history::{
    HistoryEntry, HistoryOptions, Stack, StackLevel, pop_compile_context, push_compile_context, set_user_metadata,
    user_metadata,
};
pub(crate) use history::{StackIds, with_metadata};
pub use observers::{ObserverId, Observers, OomObserver, PressureCallback, StackHook, Tracker, TrimHook};
pub(crate) use recorder::{EntryDetails, HistoryFlags, HistoryRecorder};
pub use snapshot::{
    Action, Annotation, BlockInfo, BlockState, Frame, RecordedSettings, SegmentInfo, SegmentKind, Snapshot, StackId,
    TextId, Texts, TraceEntry,
};
pub use stats::{Stat, StatByKind, Stats};
