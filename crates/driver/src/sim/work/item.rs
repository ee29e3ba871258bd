//! Pieces of work: what a stream or a graph does, one after the other.

use std::fmt;
use std::sync::{Arc, Mutex, OnceLock};

use crate::sim::order::{Frontier, Label, Stamp};
use crate::sim::work::Template;
use crate::{
    ConditionalId, ConditionalKind, DevicePtr, EventId, FunctionId, HostCallback, KernelArg, KernelMirror, LaunchShape,
    NodeKind, Pattern, PoolId,
};

/// A kernel with its arguments.
#[derive(Debug)]
pub struct KernelWork {
    /// What was launched; none for a library's own kernel.
    pub function: Option<FunctionId>,
    pub mirror: KernelMirror,
    pub shape: LaunchShape,
    pub args: Vec<KernelArg>,
}

/// What there is to do.
#[derive(Clone)]
pub enum Work {
    /// Nothing; it waits for others and others wait for it.
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
    Upload {
        dst: DevicePtr,
        data: Arc<[u8]>,
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
    /// Waits for an event of the world outside. Only in a graph.
    EventWait(EventId),
    /// A body that runs if, or while, a flag is set. Only in a graph.
    Conditional {
        flag: ConditionalId,
        kind: ConditionalKind,
        body: Arc<OnceLock<Arc<Template>>>,
    },
}

impl Work {
    /// What it is as a node of a graph.
    pub fn node_kind(&self) -> NodeKind {
        match self {
            Self::Marker | Self::Launch(_) => NodeKind::Empty,
            Self::Record(_) => NodeKind::EventRecord,
            Self::EventWait(_) => NodeKind::EventWait,
            Self::Fill { .. } => NodeKind::Fill,
            Self::Copy { .. } | Self::Upload { .. } | Self::Download { .. } => NodeKind::Copy,
            Self::Kernel(_) => NodeKind::Kernel,
            Self::Callback(_) => NodeKind::HostCallback,
            Self::PoolAlloc { .. } => NodeKind::MemAlloc,
            Self::PoolFree { .. } => NodeKind::MemFree,
            Self::Conditional { .. } => NodeKind::Conditional,
        }
    }

    /// Whether the body of a conditional node may hold it.
    pub fn is_allowed_in_body(&self) -> bool {
        matches!(
            self,
            Self::Kernel(_) | Self::Copy { .. } | Self::Fill { .. } | Self::Conditional { .. } | Self::Marker
        )
    }

    /// Whether it says itself how long it takes, so that luck has no part in it.
    pub fn is_timed(&self) -> bool {
        matches!(self, Self::Kernel(kernel) if kernel.mirror.nanos.is_some())
    }

    /// What messages call it, where it touches memory.
    pub fn label(&self) -> Label {
        match self {
            Self::Fill { .. } => Label::Fill,
            Self::Upload { .. } => Label::Upload,
            Self::Download { .. } => Label::Download,
            Self::Kernel(kernel) => Label::Kernel(kernel.mirror.name),
            Self::PoolAlloc { .. } => Label::PoolAlloc,
            Self::PoolFree { .. } => Label::PoolFree,
            _ => Label::Copy,
        }
    }
}

impl fmt::Debug for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.node_kind())
    }
}

/// A piece of work in a stream's queue.
#[derive(Debug)]
pub struct Op {
    pub seq: u64,
    /// The number of the call that queued it.
    pub at: u64,
    /// What it comes after, besides what is before it in its stream.
    pub base: Arc<Frontier>,
    /// What of that is not done yet and in other lanes.
    pub waits: Vec<Stamp>,
    pub nanos: u64,
    pub work: Work,
}

/// The callbacks that are in graphs, held once more so that the last graph does not let go of them under the lock.
#[derive(Default)]
pub struct CapturedCallbacks {
    held: Vec<HostCallback>,
    /// Whether a graph has gone since they were last looked through.
    graph_gone: bool,
}

impl CapturedCallbacks {
    pub fn push(&mut self, callback: HostCallback) {
        self.held.push(callback);
    }

    pub fn graph_gone(&mut self) {
        self.graph_gone = true;
    }

    /// Takes out those that no graph holds any more.
    pub fn take_unused(&mut self) -> Vec<HostCallback> {
        if !std::mem::take(&mut self.graph_gone) {
            return Vec::new();
        }
        self.held.extract_if(.., |callback| Arc::strong_count(callback) == 1).collect()
    }
}

impl fmt::Debug for CapturedCallbacks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} callbacks", self.held.len())
    }
}
