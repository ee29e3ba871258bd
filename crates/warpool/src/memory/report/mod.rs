//! The reports of an allocator: statistics, the allocation history, snapshots and observers.
//!
//! ```
//! # use std::sync::Arc;
//! # use warpool::driver::sim::{SimConfig, SimDriver};
//! # use warpool::prelude::*;
//! use warpool::memory::report::{
//!     AccountRow, Action, Annotation, DeviceAccount, Frame, HistoryEntry, HistoryOptions, ObserverId, OomObserver,
//!     PageStats, PageTotals, PinnedCapReport, PressureCallback, Snapshot, SnapshotOptions, Stack, StackHook,
//!     StackLevel, TraceEntry, Tracker, TrimHook, Usage, UsagePart, pop_compile_context, push_compile_context,
//!     set_user_metadata,
//! };
//! use warpool::memory::PagedAllocator;
//!
//! # fn main() -> warpool::Result<()> {
//! # let instance = Instance::new(Arc::new(SimDriver::new(SimConfig::default())))?;
//! # let device = instance.device(0)?;
//! # let stream = device.lease_stream()?;
//! # let allocator = Arc::new(CachingAllocator::new(&instance, Settings::default()));
//!
//! // The history, with call stacks from a hook.
//! let frame = Frame { name: "forward".to_owned(), filename: "model.rs".to_owned(), line: 7 };
//! let stack: Stack = Arc::new([frame]);
//! let hook: StackHook = Arc::new(move || Some(stack.clone()));
//! allocator.observers().set_stack_hook(Some(hook));
//! allocator.record_history(Some(HistoryOptions { stacks: StackLevel::Alloc, ..HistoryOptions::default() }))?;
//! set_user_metadata("layer 1"); // of the entries of this thread from now on
//! push_compile_context("0/0"); // until `pop_compile_context`
//!
//! // Observers are called without a lock, and may call the allocator.
//! let print = |entry: &HistoryEntry| println!("{} {}", entry.action.name(), entry.size);
//! let tracker: Tracker = Arc::new(move |_device, entry| print(entry));
//! let on_oom: OomObserver = Arc::new(|report| println!("out of memory: {report}"));
//! let pressure: PressureCallback = Arc::new(|_device| false); // whether it freed memory
//! let on_trim: TrimHook = Arc::new(|_device| ());
//! let observers = allocator.observers();
//! let id: ObserverId = observers.attach_tracker(&[Action::Alloc, Action::FreeCompleted], tracker);
//! observers.attach_oom_observer(on_oom);
//! observers.attach_pressure_callback(pressure);
//! observers.attach_trim_hook(on_trim);
//!
//! let block = allocator.allocate(1 << 20, &stream)?;
//! assert!(observers.detach(id));
//! pop_compile_context();
//!
//! let stats = allocator.stats(device.id())?;
//! assert_eq!((stats.allocated_bytes.all.current, stats.allocation.all.peak), (1 << 20, 1));
//! let usage: Usage = allocator.usage(device.id())?; // for readers that come often
//! let part: UsagePart = usage.parts[0];
//! assert_eq!((part.bytes_reserved, part.bytes_allocated), (2 << 20, 1 << 20));
//! let snapshot: Snapshot = allocator.snapshot(SnapshotOptions::default())?;
//! let last: &TraceEntry = snapshot.traces[0].last().expect("the history is recorded");
//! assert_eq!((last.action, last.size), (Action::Alloc, 1 << 20));
//! let stack = &snapshot.stacks[last.stack.expect("the hook returned one").index()];
//! assert_eq!((stack[0].name.as_str(), snapshot.segments[0].blocks.len()), ("forward", 2));
//! assert_eq!(snapshot.texts.get(last.user_metadata.expect("it was set")), "layer 1");
//! assert_eq!(snapshot.texts.get(last.compile_context.expect("it was set")), "0/0");
//! let annotations: &[Annotation] = &snapshot.annotations; // of PyTorch's profiler, in its files
//! assert!(annotations.is_empty());
//!
//! // Whose the rest of a device's memory is; recorders that know it add it to the snapshot.
//! let (owner, what) = (AccountRow::ALLOCATOR.to_owned(), AccountRow::RESERVED.to_owned());
//! let row = AccountRow { owner, what, bytes: 2 << 20, ..AccountRow::default() };
//! let account = DeviceAccount { used: 9 << 20, rows: vec![row], ..DeviceAccount::default() };
//! assert_eq!((account.outside(), account.unexplained()), (7 << 20, 7 << 20));
//! assert!(snapshot.accounts.is_empty());
//!
//! // What the pages of a paged allocator are used for.
//! let paged = Arc::new(PagedAllocator::new(&instance, Settings::default())?);
//! let block = paged.allocate(1 << 20, &stream)?;
//! let pages: PageStats = paged.page_stats(device.id())?;
//! let totals: PageTotals = pages.totals;
//! assert!(pages.reserved_bytes >= 1 << 20 && totals.created >= 1);
//!
//! /// What a failed request asked for, on a device or on the host.
//! fn requested(error: &warpool::Error) -> Option<u64> {
//!     match error {
//!         warpool::Error::OutOfMemory(report) => Some(report.bytes_requested),
//!         warpool::Error::PinnedCap(report) => {
//!             let report: &PinnedCapReport = report;
//!             Some(report.bytes_requested)
//!         }
//!         _ => None,
//!     }
//! }
//! let error = allocator.allocate(1 << 50, &stream).unwrap_err();
//! assert_eq!(requested(&error), Some(1 << 50));
//! # Ok(())
//! # }
//! ```

mod account;
mod entry;
mod history;
mod observers;
mod page_stats;
mod recorder;
mod ring;
mod snapshot;
mod stats;
mod texts;
mod usage;

pub use super::allocation::SnapshotOptions;
pub use crate::error::{OomCause, OomReport, PageShortage, PinnedCapReport};
pub use account::{AccountRow, DeviceAccount};
pub use entry::{HistoryEntry, Stack};
pub use history::{HistoryOptions, StackLevel};
pub(crate) use history::{SharedHistory, StackIds};
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
pub use usage::{Usage, UsagePart};
