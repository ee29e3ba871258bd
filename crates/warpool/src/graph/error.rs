//! What can go wrong with graphs and captures.

use std::time::Duration;

use warpool_driver::{DeviceId, DriverError, StreamId};

use crate::Error;

/// Wrong use of a graph, or a capture that failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GraphError {
    /// A stream takes part in a capture that Warpool does not know.
    #[error("the stream captures, but not for a graph of ours; begin the capture with a Graph")]
    ForeignCapture,

    /// A graph holds one capture.
    #[error("this graph holds a capture already; reset it first, or make another graph")]
    AlreadyCaptured,

    /// A begin inside a capture of the same graph.
    #[error("this graph is being captured already, on {stream}; end that capture first")]
    AlreadyCapturing {
        /// Where.
        stream: StreamId,
    },

    /// The default stream cannot capture.
    #[error("a default stream cannot capture; use another stream for it (replays may go to any stream)")]
    DefaultStream,

    /// A graph belongs to one device.
    #[error("the graph belongs to {graph}, and {stream} to {owner}; use a stream of the graph's device")]
    StreamDevice {
        /// The graph's device.
        graph: DeviceId,
        /// The stream.
        stream: StreamId,
        /// The stream's device.
        owner: DeviceId,
    },

    /// A stream can take part in one capture.
    #[error("{stream} takes part in a capture already; end that first, or use another stream")]
    StreamCaptures {
        /// The stream.
        stream: StreamId,
    },

    /// The default pool is everybody's, and its memory is given out again while graphs live.
    #[error("a graph cannot take its memory from the default pool; leave the pool out for one of its own")]
    DefaultPool,

    /// An end without a begin, or something that is possible only in between.
    #[error("no capture of this graph is under way; begin one first")]
    NotCapturing,

    /// An end on another stream than the begin's.
    #[error("the capture began on {began} and cannot end on {ended}; end it where it began")]
    WrongStream {
        /// Where it began.
        began: StreamId,
        /// Where it was to end.
        ended: StreamId,
    },

    /// An end on another thread than the begin's.
    #[error("the capture began on another thread; end it there, or capture in the mode relaxed")]
    WrongThread,

    /// Something that needs a capture that is over.
    #[error("the graph is still being captured; end the capture first")]
    StillCapturing,

    /// Something that needs a capture.
    #[error("the graph holds nothing: no capture of it has succeeded since it was made or reset")]
    NotCaptured,

    /// The template is gone.
    #[error("the captured template was not kept; make the graph with the option keep_graph")]
    NotKept,

    /// Nothing is ready to launch yet.
    #[error("the graph has not been made ready yet; instantiate or replay it first")]
    NotInstantiated,

    /// The driver refused to end the capture: something broke it.
    #[error("the capture failed, and what it recorded is gone: {error}")]
    CaptureFailed {
        /// What the driver says; its detail names the call that broke the capture where that is known.
        #[source]
        error: DriverError,
    },

    /// The body of a conditional node could not be captured, so the graph around it is not what it should be.
    #[error("the capture failed, and what it recorded is gone: the body of a conditional node failed: {error}")]
    BodyFailed {
        /// Why.
        #[source]
        error: Box<Error>,
    },

    /// A panic in the body of a conditional node.
    #[error("a panic left the body half done")]
    BodyPanicked,

    /// The stream does not take part in the capture that it was used for.
    #[error(
        "{stream} takes no part in this capture: work there would run now, not at the replays; fork a stream, or make it wait for one of the capture"
    )]
    StreamNotInCapture {
        /// The stream.
        stream: StreamId,
    },

    /// A buffer of another graph, or from before a reset.
    #[error("this graph has no such buffer; keys are good for the capture that gave them")]
    UnknownBuffer,

    /// Numbers that were reserved in another capture.
    #[error("the numbers were reserved in another capture; reserve them in this one, on the stream of the kernel")]
    ForeignSlot,

    /// More of a buffer was named than there is.
    #[error("{bytes} bytes from {offset} on are more than the buffer has, which is {available}")]
    OutOfBounds {
        /// Where it starts.
        offset: u64,
        /// How much.
        bytes: u64,
        /// The size of the buffer.
        available: u64,
    },

    /// A flag of four bytes at another address than a multiple of four.
    #[error("the flag at {offset} is a word, and its address no multiple of 4; put it at one, or use a byte")]
    FlagAlignment {
        /// Where in its buffer it is.
        offset: u64,
    },

    /// The device's graphs have no `if` and `while`.
    #[error(
        "graphs of {device} have no conditional nodes; capture both ways as graphs of their own, and choose on the host"
    )]
    NoConditionalNodes {
        /// The device.
        device: DeviceId,
    },

    /// Threads kept polling for longer than the capture was told to wait.
    #[error(
        "gave up after {waited:?}: {pollers} threads are still polling; let them drop their guards before a capture begins"
    )]
    PollersBusy {
        /// How many.
        pollers: usize,
        /// How long they were waited for.
        waited: Duration,
    },

    /// A thread that polls would have to wait for itself.
    #[error("this thread holds a polling guard, which a capture has to wait for; drop it before beginning one")]
    PollsItself,

    /// A call of a graphed function with other inputs than its shape has.
    #[error("the call has inputs of {given:?} bytes, and its shape wants {wanted:?}")]
    CallInputs {
        /// What came.
        given: Vec<u64>,
        /// What the shape says.
        wanted: Vec<u64>,
    },

    /// No mode has that name.
    #[error("unknown capture mode {name:?}; there are global, thread_local and relaxed")]
    UnknownMode {
        /// What was named.
        name: String,
    },

    /// A picture of the graph could not be written.
    #[error("cannot write the graph to {path}: {why}")]
    WriteDot {
        /// Where to.
        path: String,
        /// What the system says.
        why: String,
    },
}
