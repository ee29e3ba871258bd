//! Graphs: captured work, made ready once and launched many times.

use crate::{
    CaptureMode, ConditionalId, FunctionId, GraphExecId, GraphId, KernelArg, LaunchShape, NodeId, RawHandle, Result,
    StreamId,
};

/// What a node does.
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
    /// Does nothing; joins others.
    Empty,
    /// Waits for an event of the world outside.
    EventWait,
    /// Records an event for the world outside.
    EventRecord,
    /// Allocates from a pool.
    MemAlloc,
    /// Frees to a pool.
    MemFree,
    /// Runs its body if, or while, its flag is set.
    Conditional,
    /// Something else, by CUDA's number.
    Other(u32),
}

/// One node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Node {
    /// Its name in this graph.
    pub id: NodeId,
    /// What it does.
    pub kind: NodeKind,
}

/// The shape of a graph.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GraphTopology {
    /// Its nodes, in the order in which they were captured.
    pub nodes: Vec<Node>,
    /// Which must run before which.
    pub edges: Vec<(NodeId, NodeId)>,
}

/// How a graph is made ready.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InstantiateOptions {
    /// Free what the last launch allocated and did not free, at the next launch.
    pub auto_free_on_launch: bool,
    /// Run nodes at the priority of the stream that they were captured on.
    pub use_node_priority: bool,
}

/// What a conditional node does with its body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConditionalKind {
    /// Runs it once if the flag is not 0.
    If,
    /// Runs it again and again while the flag is not 0.
    While,
}

/// Graphs.
pub trait Graphs {
    /// Makes a graph ready to launch. *During capture: guarded.*
    fn graph_instantiate(&self, graph: GraphId, options: InstantiateOptions) -> Result<GraphExecId>;

    /// Runs it in the order of `stream`; its nodes run in the order of their edges. Two launches of one executable
    /// never overlap. *During capture: stream*; but on a stream that captures it gives `StreamCaptureUnsupported` and
    /// breaks the capture.
    ///
    /// # Safety
    /// Its nodes use the addresses that they were captured with, and nothing checks what is there now: a freed address
    /// may have become memory of this process. The caller promises, until the launch has finished:
    /// - All memory that its copies, fills and products use is still allocated or mapped, or pinned.
    /// - What [`kernel_launch`](crate::Kernels::kernel_launch) asks for holds for its kernels.
    unsafe fn graph_launch(&self, exec: GraphExecId, stream: StreamId) -> Result<()>;

    /// Gives a kernel node of an executable other arguments, for launches from now on; launches under way keep theirs.
    /// `node` is one of the template that the executable was made of, which must still be there, and not in a
    /// conditional's body; `function` and `shape` are those that it was captured with. `InvalidValue` if any of this
    /// does not hold, as far as it can be seen. *During capture: free.*
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

    /// The nodes and edges. A conditional's body is not listed. *During capture: free.*
    fn graph_topology(&self, graph: GraphId) -> Result<GraphTopology>;

    /// The graph as text in the DOT language, for people. *During capture: free.*
    fn graph_dot(&self, graph: GraphId) -> Result<String>;

    /// Takes the template away; executables made of it live on. *During capture: free.*
    fn graph_destroy(&self, graph: GraphId) -> Result<()>;

    /// Takes the executable away; a launch under way completes. *During capture: free.*
    fn graph_exec_destroy(&self, exec: GraphExecId) -> Result<()>;

    /// The driver's own handle of a template. *During capture: free.*
    fn graph_raw(&self, graph: GraphId) -> Result<RawHandle>;

    /// The driver's own handle of an executable. *During capture: free.*
    fn graph_exec_raw(&self, exec: GraphExecId) -> Result<RawHandle>;

    /// Makes a flag for one conditional node of the graph that `stream` captures. It has the value `default` when a
    /// launch begins; kernels of the graph that get it as [`KernelArg::Conditional`](crate::KernelArg::Conditional) set
    /// it. `IllegalState` unless the stream captures, `NotSupported` without conditional nodes. *During capture: free*,
    /// and only on a stream that captures.
    fn conditional_create(&self, stream: StreamId, default: u32) -> Result<ConditionalId>;

    /// Appends a conditional node to what `stream` captures, and starts to capture its body on `body`, a stream that
    /// captures nothing and is no default stream (`StreamCaptureUnsupported`). [`capture_end`](crate::Captures::capture_end) on `body` ends it and returns the body's graph,
    /// which belongs to the node: destroying the id only forgets it. A flag serves one node (`InvalidValue`). A body
    /// may hold kernels, copies, fills and further conditional nodes; with anything else in it,
    /// [`graph_instantiate`](Self::graph_instantiate) gives `InvalidValue`. *During capture: free*, and only on a
    /// stream that captures.
    fn conditional_begin(
        &self,
        stream: StreamId,
        conditional: ConditionalId,
        kind: ConditionalKind,
        body: StreamId,
        mode: CaptureMode,
    ) -> Result<()>;
}
