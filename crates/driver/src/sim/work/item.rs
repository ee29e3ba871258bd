//! Items of work, and captured graphs of them. (A conditional node is an item that contains a graph.)

use std::fmt;
use std::sync::{Arc, Mutex, OnceLock};

use crate::sim::order::Operation;
use crate::{
    ConditionalId, ConditionalKind, DeviceId, DevicePtr, EventId, FunctionId, GraphTopology, HostCallback, HostKernel,
    KernelArg, LaunchShape, Node, NodeId, NodeKind, Pattern, PoolId, StreamId,
};

/// A kernel with its arguments.
#[derive(Debug)]
pub struct KernelWork {
    /// The launched function; `None` for a kernel of a library.
    pub function: Option<FunctionId>,
    pub host: HostKernel,
    pub shape: LaunchShape,
    pub args: Vec<KernelArg>,
}

/// One item of work.
#[derive(Clone)]
pub enum Work {
    /// No work: a position in stream order.
    Marker,
    Record(EventId),
    Fill {
        dst: DevicePtr,
        pattern: Pattern,
        count: u64,
    },
    Copy {
        dst: DevicePtr,
        src: DevicePtr,
        bytes: u64,
    },
    Copy2d {
        dst: DevicePtr,
        dst_pitch: u64,
        src: DevicePtr,
        src_pitch: u64,
        width: u64,
        rows: u64,
    },
    Upload {
        dst: DevicePtr,
        data: Arc<[u8]>,
    },
    /// A write to memory that was registered, by the number of the registration.
    WriteRegistered {
        registration: u64,
        offset: u64,
        bytes: u64,
        value: u8,
    },
    Download {
        src: DevicePtr,
        into: Arc<Mutex<Vec<u8>>>,
    },
    Kernel(Arc<KernelWork>),
    Callback(HostCallback),
    PoolAlloc {
        ptr: DevicePtr,
        bytes: u64,
        pool: PoolId,
    },
    PoolFree {
        ptr: DevicePtr,
    },
    /// A launched graph, by the number of its launch. Only in a stream.
    Launch(u64),
    /// Waits for an event recorded outside the graph. Only in a graph.
    EventWait(EventId),
    /// A body that runs if, or while, a flag is set. Only in a graph.
    Conditional {
        flag: ConditionalId,
        kind: ConditionalKind,
        body: Arc<OnceLock<Arc<Template>>>,
    },
}

impl Work {
    /// Its kind as a node of a graph.
    pub fn node_kind(&self) -> NodeKind {
        match self {
            Self::Marker | Self::Launch(_) => NodeKind::Empty,
            Self::Record(_) => NodeKind::EventRecord,
            Self::EventWait(_) => NodeKind::EventWait,
            Self::Fill { .. } | Self::WriteRegistered { .. } => NodeKind::Fill,
            Self::Copy { .. } | Self::Copy2d { .. } | Self::Upload { .. } | Self::Download { .. } => NodeKind::Copy,
            Self::Kernel(_) => NodeKind::Kernel,
            Self::Callback(_) => NodeKind::HostCallback,
            Self::PoolAlloc { .. } => NodeKind::MemAlloc,
            Self::PoolFree { .. } => NodeKind::MemFree,
            Self::Conditional { .. } => NodeKind::Conditional,
        }
    }

    /// Whether the body of a conditional node may contain it.
    pub fn is_allowed_in_body(&self) -> bool {
        matches!(
            self,
            Self::Kernel(_)
                | Self::Copy { .. }
                | Self::Copy2d { .. }
                | Self::Fill { .. }
                | Self::Conditional { .. }
                | Self::Marker
        )
    }

    /// Whether its duration is given, so that the seed does not change it.
    pub fn has_fixed_duration(&self) -> bool {
        matches!(self, Self::Kernel(kernel) if kernel.host.nanos.is_some())
    }

    /// Its name in messages about memory accesses.
    pub fn operation(&self) -> Operation {
        match self {
            Self::Fill { .. } => Operation::Fill,
            Self::WriteRegistered { .. } => Operation::WriteRegistered,
            Self::Upload { .. } => Operation::Upload,
            Self::Download { .. } => Operation::Download,
            Self::Kernel(kernel) => Operation::Kernel(kernel.host.name),
            Self::PoolAlloc { .. } => Operation::PoolAlloc,
            Self::PoolFree { .. } => Operation::PoolFree,
            _ => Operation::Copy,
        }
    }
}

impl fmt::Debug for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.node_kind())
    }
}

/// A captured node.
#[derive(Clone, Debug)]
pub struct TemplateNode {
    pub id: NodeId,
    /// The number of the call that captured it.
    pub captured_at: u64,
    pub work: Work,
    pub nanos: u64,
    /// The indices of the nodes that it depends on.
    pub dependencies: Vec<u32>,
    pub stream: StreamId,
}

/// A captured graph.
#[derive(Debug)]
pub struct Template {
    pub device: DeviceId,
    pub nodes: Vec<TemplateNode>,
    /// The flags of its conditional nodes with their initial values.
    pub flags: Vec<(ConditionalId, u32)>,
    /// Memory that its nodes allocate, with the pool.
    pub memory: Vec<(DevicePtr, PoolId)>,
}

impl Template {
    pub fn topology(&self) -> GraphTopology {
        topology(&self.nodes)
    }

    /// Whether one of its nodes frees `ptr`.
    pub fn frees(&self, ptr: DevicePtr) -> bool {
        frees(&self.nodes, ptr)
    }

    /// The graph in the DOT language.
    pub fn dot(&self) -> String {
        let mut text = String::from("digraph warpool {\n");
        for (index, node) in self.nodes.iter().enumerate() {
            let label = match &node.work {
                Work::Kernel(kernel) => kernel.host.name.to_owned(),
                other => format!("{:?}", other.node_kind()),
            };
            text += &format!("  n{index} [label=\"{index}\\n{label}\"];\n");
        }
        for (index, node) in self.nodes.iter().enumerate() {
            for dependency in &node.dependencies {
                text += &format!("  n{dependency} -> n{index};\n");
            }
        }
        text + "}\n"
    }
}

/// Whether one of these nodes frees `ptr`.
pub fn frees(nodes: &[TemplateNode], ptr: DevicePtr) -> bool {
    nodes.iter().any(|node| matches!(node.work, Work::PoolFree { ptr: freed } if freed == ptr))
}

/// Nodes and edges as the contract shows them.
pub fn topology(nodes: &[TemplateNode]) -> GraphTopology {
    let edge = |from: u32, to: &TemplateNode| (nodes[from as usize].id, to.id);
    GraphTopology {
        nodes: nodes.iter().map(|node| Node { id: node.id, kind: node.work.node_kind() }).collect(),
        edges: nodes.iter().flat_map(|node| node.dependencies.iter().map(move |&from| edge(from, node))).collect(),
    }
}
