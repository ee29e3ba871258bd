//! What can be chosen about a graph, and about each capture of it.

use std::time::Duration;

use warpool_driver::CaptureMode;

use super::GraphError;
use crate::memory::MemPoolId;

/// How a graph is made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GraphOptions {
    /// Whether the captured template stays after it was made ready: for [`Graph::raw`](super::Graph::raw),
    /// [`Graph::dot`](super::Graph::dot) and making it ready again. It is then made ready at the first replay, not when
    /// the capture ends.
    pub keep_graph: bool,
}

/// How a capture is done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CaptureOptions {
    /// Where its memory comes from: the pool of another graph, or of a [`MemPool`](crate::memory::MemPool). `None`
    /// makes a pool of its own.
    ///
    /// Graphs that share a pool use the same memory at different times. So their replays must not overlap, and must
    /// come in the order of their captures wherever one reads what another left.
    pub pool: Option<MemPoolId>,
    /// How strict it is with calls that could disturb it. See [`capture_mode`] for the names.
    pub mode: CaptureMode,
    /// How long to wait for threads that [poll](crate::Instance::polling); `None` is as long as it takes.
    pub poller_patience: Option<Duration>,
}

impl CaptureOptions {
    /// The same, with memory from `pool`.
    #[must_use]
    pub const fn with_pool(mut self, pool: MemPoolId) -> Self {
        self.pool = Some(pool);
        self
    }

    /// The same, in that mode.
    #[must_use]
    pub const fn with_mode(mut self, mode: CaptureMode) -> Self {
        self.mode = mode;
        self
    }
}

/// The mode of that name: `global`, `thread_local` or `relaxed`.
///
/// ```
/// use warpool::driver::CaptureMode;
/// assert_eq!(warpool::graph::capture_mode("thread_local"), Ok(CaptureMode::ThreadLocal));
/// assert!(warpool::graph::capture_mode("strict").is_err());
/// ```
pub fn capture_mode(name: &str) -> Result<CaptureMode, GraphError> {
    match name {
        "global" => Ok(CaptureMode::Global),
        "thread_local" => Ok(CaptureMode::ThreadLocal),
        "relaxed" => Ok(CaptureMode::Relaxed),
        other => Err(GraphError::UnknownMode { name: other.to_owned() }),
    }
}
