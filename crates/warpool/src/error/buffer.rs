//! Errors of typed buffers and of launches with typed arguments.

use warpool_driver::{DeviceId, StreamId};

/// Wrong use of typed memory. All of these are detected before the driver is called.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BufferError {
    /// Source and target of a copy have different lengths.
    #[error("cannot copy {source_len} elements into {target_len}; take a slice of the longer one")]
    Length {
        /// Elements of the source.
        source_len: usize,
        /// Elements of the target.
        target_len: usize,
    },

    /// A range that does not lie in a slice.
    #[error("range {start}..{end} does not lie in a slice of {len} elements")]
    Range {
        /// Where it starts.
        start: usize,
        /// Where it ends.
        end: usize,
        /// The length of the slice.
        len: usize,
    },

    /// Rows that do not fit into a slice, or overlap.
    #[error(
        "{rows} rows of {columns} elements at a stride of {stride} do not fit into a slice of {len} elements; the \
         stride is at least the number of columns"
    )]
    Rows {
        /// How many rows.
        rows: usize,
        /// Elements of a row.
        columns: usize,
        /// Elements from the start of a row to the start of the next.
        stride: usize,
        /// The length of the slice.
        len: usize,
    },

    /// Source and target of a 2D copy have different shapes.
    #[error("cannot copy {source_rows} x {source_columns} elements into {target_rows} x {target_columns}")]
    Shape {
        /// Rows of the source.
        source_rows: usize,
        /// Columns of the source.
        source_columns: usize,
        /// Rows of the target.
        target_rows: usize,
        /// Columns of the target.
        target_columns: usize,
    },

    /// Memory of one device in work of another.
    #[error("{buffer} is memory of {owner}, and the stream belongs to {stream}; copy it to that device first")]
    Device {
        /// The buffer, by its label.
        buffer: String,
        /// Its device.
        owner: DeviceId,
        /// The stream's device.
        stream: DeviceId,
    },

    /// The host needs memory that a device still uses.
    #[error("{buffer} is still in use by work in {stream}; wait for it (`wait`), or synchronize the stream first")]
    InUse {
        /// The buffer, by its label.
        buffer: String,
        /// The stream.
        stream: StreamId,
    },

    /// The host needs memory that work being queued right now uses.
    #[error("{buffer} is in use by work that another thread is queuing at this moment")]
    BeingQueued {
        /// The buffer, by its label.
        buffer: String,
    },

    /// Elements of blocks that have no memory.
    #[error("blocks {start}..{end} of {buffer} are not all committed; commit them first")]
    NotCommitted {
        /// The buffer, by its label.
        buffer: String,
        /// The first block of the view.
        start: usize,
        /// The end of its blocks.
        end: usize,
    },

    /// Elastic memory in work that a graph has captured.
    #[error(
        "{buffer} is used by a captured graph, whose replays would use blocks without memory; \
         drop or reset the graph before decommitting, or give its kernels the address (`ptr`) alone"
    )]
    ElasticInGraph {
        /// The buffer, by its label.
        buffer: String,
    },

    /// A plain reference to memory that a graph uses.
    #[error(
        "{buffer} is used by a captured graph, whose replays a plain reference would not keep off; \
         access it with `host` or `host_mut`"
    )]
    UsedByGraph {
        /// The buffer, by its label.
        buffer: String,
    },

    /// Work needs memory that the host has borrowed.
    #[error("{buffer} is borrowed on the host (`host` or `host_mut`); drop that borrow before queuing work on it")]
    BorrowedByHost {
        /// The buffer, by its label.
        buffer: String,
    },

    /// Ordinary host memory in a capture.
    #[error("a copy of ordinary host memory cannot be captured: replays would access it later; use a PinnedVec")]
    OrdinaryMemoryInCapture,

    /// The work to wait for is in a stream that is capturing now.
    #[error(
        "{buffer} was used in {stream}, which captures now and cannot be waited for; end the capture first, or make \
         this stream wait for the other one before it begins"
    )]
    LastUseCaptures {
        /// The buffer, by its label.
        buffer: String,
        /// The stream.
        stream: StreamId,
    },

    /// A kernel takes another number of arguments.
    #[error("kernel {kernel} takes {takes} arguments, and its declaration has {declared} (a slice is two)")]
    ArgumentCount {
        /// The kernel.
        kernel: &'static str,
        /// How many arguments the loaded kernel takes.
        takes: usize,
        /// How many the declaration has.
        declared: usize,
    },

    /// A kernel takes an argument of another size.
    #[error("argument {index} of kernel {kernel} has {takes} bytes, and {declared} in its declaration")]
    ArgumentSize {
        /// The kernel.
        kernel: &'static str,
        /// Which argument, from 0.
        index: usize,
        /// Its size in the loaded kernel.
        takes: u64,
        /// Its size in the declaration.
        declared: u64,
    },

    /// More elements than a launch can have threads for.
    #[error("{len} elements are more than one launch can cover; launch the kernel on parts")]
    TooManyElements {
        /// How many elements.
        len: usize,
    },
}
