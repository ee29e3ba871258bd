//! Stream capture: work is recorded as a graph instead of being run.

use crate::{CaptureId, GraphId, GraphTopology, NodeId, Result, StreamId};

/// Which calls a capture forbids ([`CaptureRule::Guarded`](crate::CaptureRule::Guarded)), and which a thread forbids to
/// itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CaptureMode {
    /// Forbids guarded calls on every thread.
    #[default]
    Global,
    /// Forbids them on the capturing thread.
    ThreadLocal,
    /// Forbids none.
    Relaxed,
}

/// The capture status of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CaptureState {
    /// It does not capture.
    None,
    /// It captures.
    Active(CaptureId),
    /// It captures, but the capture was invalidated. It must still be ended, on the stream where it began.
    Invalidated,
}

/// Stream capture.
pub trait Captures {
    /// Begins a capture. `StreamCaptureUnsupported` on the legacy default stream, `IllegalState` on a stream that
    /// captures already. *During capture: free.*
    fn capture_begin(&self, stream: StreamId, mode: CaptureMode) -> Result<()>;

    /// Ends the capture that began on `stream`. Whatever it returns, no stream is left capturing, except in the first
    /// case. `StreamCaptureUnmatched` on a stream that only joined (which invalidates the capture), `IllegalState` if
    /// it does not capture, `StreamCaptureWrongThread` from another thread unless the capture is relaxed,
    /// `StreamCaptureInvalidated` if it was invalidated, `StreamCaptureUnjoined` if work of a joined stream was not
    /// joined to this one. For an invalidated capture the detail names the call that invalidated it, if it was made
    /// through this driver. *During capture: free.*
    fn capture_end(&self, stream: StreamId) -> Result<GraphId>;

    /// The capture status of `stream`. On the legacy default stream `StreamCaptureImplicit` while a blocking stream of
    /// the device captures; the query invalidates no capture. *During capture: free.*
    fn capture_state(&self, stream: StreamId) -> Result<CaptureState>;

    /// The nodes that the stream's next work will depend on. `IllegalState` unless it captures,
    /// `StreamCaptureInvalidated` if the capture was invalidated. *During capture: free.*
    fn capture_dependencies(&self, stream: StreamId) -> Result<Vec<NodeId>>;

    /// The graph captured so far. Errors as [`capture_dependencies`](Self::capture_dependencies). *During capture:
    /// free.*
    fn capture_topology(&self, stream: StreamId) -> Result<GraphTopology>;

    /// Sets the calling thread's capture mode, and returns the previous one. Threads start as `Global`. *During
    /// capture: free.*
    fn capture_mode_exchange(&self, mode: CaptureMode) -> Result<CaptureMode>;
}
