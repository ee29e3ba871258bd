//! Errors of graphs and captures.

use std::time::Duration;

use warpool_driver::{DeviceId, DriverError, StreamId};

use super::Error;

/// Wrong use of a graph, or a capture that failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GraphError {
    /// The stream takes part in a capture that was not begun by a graph of this `Instance`.
    #[error("the stream captures, but the capture was not begun by a Graph; begin it with one")]
    ForeignCapture,

    /// A graph holds one capture.
    #[error("this graph already holds a capture; reset it first, or make another graph")]
    AlreadyCaptured,

    /// A begin during a capture of the same graph.
    #[error("this graph is already being captured, on {stream}; end that capture first")]
    AlreadyCapturing {
        /// The stream that it captures on.
        stream: StreamId,
    },

    /// The default stream cannot capture.
    #[error("a default stream cannot capture; capture on another stream (replays may go to any stream)")]
    DefaultStream,

    /// A graph and a stream of different devices.
    #[error("the graph belongs to {graph}, and {stream} to {owner}; use a stream of the graph's device")]
    StreamDevice {
        /// The graph's device.
        graph: DeviceId,
        /// The stream.
        stream: StreamId,
        /// The stream's device.
        owner: DeviceId,
    },

    /// The stream is capturing.
    #[error("{stream} already takes part in a capture; end that first, or use another stream")]
    StreamCaptures {
        /// The stream.
        stream: StreamId,
    },

    /// Memory of the default pool is reused while graphs live.
    #[error("a graph cannot use the default pool; pass no pool, and the graph makes one of its own")]
    DefaultPool,

    /// An end without a begin, or a call that is possible only during a capture.
    #[error("no capture of this graph is under way; begin one first")]
    NotCapturing,

    /// An end on another stream than the begin's.
    #[error("the capture began on {began} and cannot end on {ended}; end it on the stream where it began")]
    WrongStream {
        /// Where it began.
        began: StreamId,
        /// Where it was to end.
        ended: StreamId,
    },

    /// An end on another thread than the begin's.
    #[error("the capture began on another thread; end it there, or capture in relaxed mode")]
    WrongThread,

    /// A call that needs a finished capture.
    #[error("the graph is still being captured; end the capture first")]
    StillCapturing,

    /// A call that needs a capture.
    #[error("the graph is empty: no capture of it has succeeded since it was made or reset; capture first")]
    NotCaptured,

    /// The captured graph was destroyed after instantiation.
    #[error("the captured graph was not kept; make the Graph with the option keep_graph")]
    NotKept,

    /// There is no executable graph yet.
    #[error("the graph has not been instantiated; instantiate or replay it first")]
    NotInstantiated,

    /// The driver reported at the end that the capture was invalidated.
    #[error("the capture failed and was discarded: {error}")]
    CaptureFailed {
        /// The driver's error; its detail names the call that invalidated the capture, if known.
        #[source]
        error: DriverError,
    },

    /// The body of a conditional node could not be captured, so the graph around it would be incomplete.
    #[error("the capture failed and was discarded: the body of a conditional node failed: {error}")]
    BodyFailed {
        /// The first error in the body.
        #[source]
        error: Box<Error>,
    },

    /// A panic in the body of a conditional node.
    #[error("a panic in the body left it incomplete")]
    BodyPanicked,

    /// A stream that does not take part in the capture.
    #[error(
        "{stream} takes no part in this capture: work there would run now, not at the replays; \
         fork a stream, or make it wait for one of the capture"
    )]
    StreamNotInCapture {
        /// The stream.
        stream: StreamId,
    },

    /// A buffer key of another graph, or from before a reset.
    #[error("this graph has no such buffer; a key is valid only for the capture that returned it")]
    UnknownBuffer,

    /// A generator slot of another capture.
    #[error(
        "the random numbers were reserved in another capture; reserve them in this one, on the stream of the kernel"
    )]
    ForeignSlot,

    /// A range that does not lie in a buffer.
    #[error("{bytes} bytes at offset {offset} do not lie in a buffer of {available} bytes")]
    OutOfBounds {
        /// Where the range starts.
        offset: u64,
        /// Its length.
        bytes: u64,
        /// The size of the buffer.
        available: u64,
    },

    /// A flag of four bytes whose address is not a multiple of four.
    #[error("the flag at offset {offset} is a word whose address is not a multiple of 4; align it, or use a byte")]
    FlagAlignment {
        /// Its offset in the buffer.
        offset: u64,
    },

    /// The device does not support conditional nodes.
    #[error(
        "graphs of {device} have no conditional nodes; \
         capture each branch as a graph of its own, and choose on the host"
    )]
    NoConditionalNodes {
        /// The device.
        device: DeviceId,
    },

    /// Threads held polling guards for longer than the capture was to wait.
    #[error(
        "the capture could not begin: after {waited:?}, {pollers} threads still hold polling guards; \
         drop them before a capture begins"
    )]
    PollersBusy {
        /// How many.
        pollers: usize,
        /// How long they were waited for.
        waited: Duration,
    },

    /// A begin on a thread that holds a polling guard would wait for itself.
    #[error("this thread holds a polling guard, which a capture has to wait for; drop it before the capture begins")]
    PollsItself,

    /// A begin or an end inside the closure of a typed call, which may have queued work already.
    #[error("a capture cannot begin or end inside the closure of `with_address`; do it before or after that call")]
    InTypedCall,

    /// A call of a [`GraphedCallable`](crate::graph::GraphedCallable) whose inputs do not match its shape.
    #[error("the call has inputs of {given:?} bytes, its shape needs {wanted:?}; pass inputs of these sizes")]
    CallInputs {
        /// The sizes passed.
        given: Vec<u64>,
        /// The sizes of the shape.
        wanted: Vec<u64>,
    },

    /// There is no capture mode with that name.
    #[error("unknown capture mode {name:?}; there are global, thread_local and relaxed")]
    UnknownMode {
        /// The name.
        name: String,
    },

    /// The DOT file could not be written.
    #[error("cannot write the graph to {path}: {why}")]
    WriteDot {
        /// The file.
        path: String,
        /// The system's reason.
        why: String,
    },
}
