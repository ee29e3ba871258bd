//! Options of a graph, and of a capture.

use std::time::Duration;

use warpool_driver::CaptureMode;

use crate::error::GraphError;
use crate::memory::MemPool;

/// Options of a graph.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GraphOptions {
    /// Whether the captured template is kept after instantiation, for [`Graph::raw`](super::Graph::raw),
    /// [`Graph::dot`](super::Graph::dot) and instantiating it again. It is then instantiated at the first replay, not
    /// when the capture ends.
    pub keep_graph: bool,
}

/// Options of a capture.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CaptureOptions<'p> {
    /// The pool of its memory: that of another graph ([`Graph::pool`](super::Graph::pool)), or one that the program
    /// created. It must belong to the graph's allocator and device. The graph then uses it too. `None` creates a new
    /// pool.
    ///
    /// Graphs that share a pool use the same memory at different times. So their replays must not overlap, and must run
    /// in the order of their captures if one reads the output of another.
    ///
    /// The same holds for memory that the program gets from the pool between captures: it may be what a capture freed,
    /// which replays of its graph go on writing, as in PyTorch. A pool for graphs alone avoids that.
    pub pool: Option<&'p MemPool>,
    /// Which calls of other threads invalidate it. See [`capture_mode`] for the names.
    pub mode: CaptureMode,
    /// How long to wait for threads that [poll](crate::Instance::polling); `None` is without a limit.
    pub poller_timeout: Option<Duration>,
}

impl<'p> CaptureOptions<'p> {
    /// Sets the pool of its memory.
    #[must_use]
    pub const fn with_pool(mut self, pool: &'p MemPool) -> Self {
        self.pool = Some(pool);
        self
    }

    /// Sets the capture mode.
    #[must_use]
    pub const fn with_mode(mut self, mode: CaptureMode) -> Self {
        self.mode = mode;
        self
    }
}

/// The mode with that name: `global`, `thread_local` or `relaxed`.
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
