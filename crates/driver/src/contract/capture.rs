//! Stream capture: work is written down as a graph instead of being done.

use crate::{CaptureId, GraphId, GraphTopology, NodeId, Result, StreamId};

/// How strict a capture is with calls that might disturb it ([`CaptureRule::Guarded`](crate::CaptureRule::Guarded)),
/// and how strict a thread is with itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CaptureMode {
    /// Forbids them to every thread.
    #[default]
    Global,
    /// Forbids them to the thread that captures.
    ThreadLocal,
    /// Forbids nothing.
    Relaxed,
}

/// Where a stream stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CaptureState {
    /// It does its work.
    None,
    /// It writes its work down.
    Active(CaptureId),
    /// It did, until something broke the capture. It must still be ended, on the stream where it began.
    Invalidated,
}

/// Stream capture.
pub trait Captures {
    /// Starts a capture. `StreamCaptureUnsupported` on the legacy default stream, `IllegalState` on a stream that
    /// captures already. *During capture: free.*
    fn capture_begin(&self, stream: StreamId, mode: CaptureMode) -> Result<()>;

    /// Ends the capture that began on `stream`; whatever it returns, no stream is left capturing, but for the first
    /// case. `StreamCaptureUnmatched` on a stream that only joined (and breaks the capture), `IllegalState` if none is
    /// under way, `StreamCaptureWrongThread` from another thread unless relaxed, `StreamCaptureInvalidated` if it was
    /// broken, `StreamCaptureUnjoined` if work of a joined stream does not lead back to this one. For a broken capture
    /// the detail names the call that broke it, as far as it was made through this driver. *During capture: free.*
    fn capture_end(&self, stream: StreamId) -> Result<GraphId>;

    /// Where `stream` stands. On the legacy default stream `StreamCaptureImplicit` while a blocking stream of
    /// the device captures, which breaks nothing. *During capture: free.*
    fn capture_state(&self, stream: StreamId) -> Result<CaptureState>;

    /// The nodes that the stream's next work will depend on. `IllegalState` unless it captures,
    /// `StreamCaptureInvalidated` if the capture is broken. *During capture: free.*
    fn capture_dependencies(&self, stream: StreamId) -> Result<Vec<NodeId>>;

    /// The graph as it stands so far. Errors as [`capture_dependencies`](Self::capture_dependencies). *During capture:
    /// free.*
    fn capture_topology(&self, stream: StreamId) -> Result<GraphTopology>;

    /// Sets how strict the calling thread is, and returns how strict it was. Threads start as `Global`. *During
    /// capture: free.*
    fn capture_mode_exchange(&self, mode: CaptureMode) -> Result<CaptureMode>;
}
