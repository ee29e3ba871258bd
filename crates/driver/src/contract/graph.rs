//! Graphs: captured work that is instantiated once and launched many times.

use crate::{
    CaptureMode, ConditionalId, FunctionId, GraphExecId, GraphId, KernelArg, LaunchShape, NodeId, RawHandle, Result,
    StreamId,
};

/// The kind of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NodeKind {
    /// Runs a kernel.
    Kernel,
    /// Copies.
    Copy,
    /// Fills.
    Fill,
    /// Runs code on the host.
    HostCallback,
    /// Runs another graph.
    ChildGraph,
    /// Does nothing, but has dependencies.
    Empty,
    /// Waits for an external event.
    EventWait,
    /// Records an external event.
    EventRecord,
    /// Allocates from a pool.
    MemAlloc,
    /// Frees to a pool.
    MemFree,
    /// Runs its body if, or while, its flag is set.
    Conditional,
    /// Another kind, by CUDA's number.
    Other(u32),
}

/// One node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Node {
    /// Its id.
    pub id: NodeId,
    /// Its kind.
    pub kind: NodeKind,
}

/// The nodes and edges of a graph.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GraphTopology {
    /// Its nodes, in the order in which they were captured.
    pub nodes: Vec<Node>,
    /// Dependencies: the first node runs before the second.
    pub edges: Vec<(NodeId, NodeId)>,
}

/// How a graph is instantiated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InstantiateOptions {
    /// At a launch, free what the previous launch allocated and did not free.
    pub auto_free_on_launch: bool,
    /// Run nodes at the priority of the stream that they were captured on.
    pub use_node_priority: bool,
}

/// What a conditional node does with its body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConditionalKind {
    /// Runs it once if the flag is not 0.
    If,
    /// Runs it repeatedly while the flag is not 0.
    While,
}

/// Graphs.
pub trait Graphs {
    /// Instantiates a graph. *During capture: guarded.*
    fn graph_instantiate(&self, graph: GraphId, options: InstantiateOptions) -> Result<GraphExecId>;

    /// Launches an executable in the order of `stream`; its nodes run in the order of their edges. Two launches of one
    /// executable never overlap. *During capture: stream*; but on a stream that captures it gives
    /// `StreamCaptureUnsupported` and invalidates the capture.
    ///
    /// # Safety
    /// Its nodes use the addresses that they were captured with, and nothing checks what is there now: a freed address
    /// may have become memory of this process. The caller promises, until the launch has finished:
    /// - All memory that its copies, fills and products use is still allocated or mapped, or pinned.
    /// - Its kernels meet the requirements of [`kernel_launch`](crate::Kernels::kernel_launch).
    unsafe fn graph_launch(&self, exec: GraphExecId, stream: StreamId) -> Result<()>;

    /// Changes the arguments of a kernel node of an executable for later launches; launches already queued keep theirs.
    /// `node` is one of the graph that the executable was instantiated from, which must still exist, and not in a
    /// conditional's body; `function` and `shape` are those that it was captured with. `InvalidValue` if any of this
    /// does not hold, as far as the driver can check it. *During capture: free.*
    ///
    /// # Safety
    /// As for [`kernel_launch`](crate::Kernels::kernel_launch), for every launch of the executable from now on.
    unsafe fn graph_exec_set_kernel(
        &self,
        exec: GraphExecId,
        node: NodeId,
        function: FunctionId,
        shape: LaunchShape,
        args: &[KernelArg],
    ) -> Result<()>;

    /// The nodes and edges, without those of conditional nodes' bodies. *During capture: free.*
    fn graph_topology(&self, graph: GraphId) -> Result<GraphTopology>;

    /// The graph in the DOT language. *During capture: free.*
    fn graph_dot(&self, graph: GraphId) -> Result<String>;

    /// Destroys the graph; executables instantiated from it stay. *During capture: free.*
    fn graph_destroy(&self, graph: GraphId) -> Result<()>;

    /// Destroys the executable; launches already queued complete. *During capture: free.*
    fn graph_exec_destroy(&self, exec: GraphExecId) -> Result<()>;

    /// The handle of a graph. *During capture: free.*
    fn graph_raw(&self, graph: GraphId) -> Result<RawHandle>;

    /// The handle of an executable. *During capture: free.*
    fn graph_exec_raw(&self, exec: GraphExecId) -> Result<RawHandle>;

    /// Creates the flag of a conditional node in the graph that `stream` captures. It is set to `default` when a launch
    /// begins; kernels of the graph set it through [`KernelArg::Conditional`](crate::KernelArg::Conditional).
    /// `IllegalState` unless the stream captures, `NotSupported` without conditional nodes. *During capture: free*, and
    /// only on a stream that captures.
    fn conditional_create(&self, stream: StreamId, default: u32) -> Result<ConditionalId>;

    /// Adds a conditional node to the capture of `stream`, and begins to capture its body on `body`, a stream that does
    /// not capture (`IllegalState`) and is no default stream (`StreamCaptureUnsupported`).
    /// [`capture_end`](crate::Captures::capture_end) on `body` returns the body's graph, which belongs to the node:
    /// destroying its id only forgets it. A flag is for one node (`InvalidValue`). A body may have kernels, copies,
    /// fills and conditional nodes; with anything else in it, [`graph_instantiate`](Self::graph_instantiate) gives
    /// `InvalidValue`. *During capture: free*, and only on a stream that captures.
    fn conditional_begin(
        &self,
        stream: StreamId,
        conditional: ConditionalId,
        kind: ConditionalKind,
        body: StreamId,
        mode: CaptureMode,
    ) -> Result<()>;
}
