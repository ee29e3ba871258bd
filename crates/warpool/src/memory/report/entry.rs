//! An entry of the allocation history.

use std::sync::Arc;

use super::{Action, Frame};
use crate::memory::MemPoolId;

/// A call stack, innermost frame first.
pub type Stack = Arc<[Frame]>;

/// An entry of the allocation history, as trackers see it. [`TraceEntry`](super::TraceEntry) is its form in snapshots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HistoryEntry {
    /// The kind of event.
    pub action: Action,
    /// The address; for an [`Action::Oom`], the bytes that were free on the device.
    pub addr: u64,
    /// The size in bytes.
    pub size: u64,
    /// The stream, by the driver's handle.
    pub stream: u64,
    /// The time, in microseconds of the driver's clock.
    pub time_us: i64,
    /// The pool.
    pub pool: MemPoolId,
    /// The call stack.
    pub stack: Option<Stack>,
    /// The metadata that the program had set.
    pub user_metadata: Option<Arc<str>>,
    /// The compiled region of the program.
    pub compile_context: Option<Arc<str>>,
}
