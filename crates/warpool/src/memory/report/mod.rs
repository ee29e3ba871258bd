//! The reports of an allocator: statistics, the allocation history, snapshots and observers.

mod entry;
mod history;
mod observers;
mod page_stats;
mod recorder;
mod ring;
mod snapshot;
mod stats;
mod texts;

pub use entry::{HistoryEntry, Stack};
pub(crate) use history::StackIds;
pub use history::{HistoryOptions, StackLevel};
pub use observers::{ObserverId, Observers, OomObserver, PressureCallback, StackHook, Tracker, TrimHook};
pub use page_stats::{PageStats, PageTotals};
pub(crate) use recorder::{EntryDetails, HistoryFlags, HistoryRecorder, now_us};
pub use snapshot::{
    Action, Annotation, BlockInfo, BlockState, Frame, RecordedSettings, SegmentInfo, SegmentKind, Snapshot, StackId,
    TextId, Texts, TraceEntry,
};
pub use stats::{Stat, StatByKind, Stats};
pub(crate) use texts::with_metadata;
pub use texts::{pop_compile_context, push_compile_context, set_user_metadata, user_metadata};
