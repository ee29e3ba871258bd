//! Graphs: the templates that captures produce.
//!
//! CUDA does not synchronize a `CUgraph`, so every call that uses one holds `graph_lock`. Executables are in `exec.rs`.

use std::ffi::CString;
use std::fs::{self, OpenOptions};
use std::path::PathBuf;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::{env, io, process};

use cudarc::driver::sys;
use rustc_hash::FxHashSet;
use warpool_driver::{
    Call, CaptureMode, ConditionalId, ConditionalKind, ErrorCode, FunctionId, GraphExecId, GraphId, GraphTopology,
    Graphs, InstantiateOptions, KernelArg, LaunchShape, Node, NodeId, NodeKind, RawHandle, Result, StreamId,
};

use crate::CudaDriver;
use crate::error::CallSite;
use crate::graph_family::GraphFamily;
use crate::handle::{Context, GraphHandle, NodeHandle};
use crate::object_table::Shared;
use crate::sync::lock;

/// A graph in the object table.
pub(crate) struct Graph {
    /// CUDA's handle.
    pub(crate) raw: GraphHandle,
    /// The context that it was captured in.
    pub(crate) context: Context,
    /// Who destroys it.
    pub(crate) owner: GraphOwner,
    /// Shared with its executables.
    pub(crate) template: Arc<Mutex<Template>>,
    /// `None` for a body whose node was destroyed.
    pub(crate) family: Option<GraphFamily>,
}

/// A graph as its executables refer to it. Locked, besides `graph_lock`, by calls that use the `CUgraph`; calls that
/// change an executable lock only this.
pub(crate) struct Template {
    /// CUDA's handle.
    pub(crate) raw: GraphHandle,
    /// Whether it can be used without `graph_lock`: it is owned by its id, and not destroyed.
    pub(crate) is_alive: bool,
    /// Its kernel nodes, once queried.
    pub(crate) kernels: Option<FxHashSet<u64>>,
}

impl Graph {
    /// A graph that gets an id now.
    pub(crate) fn new(raw: GraphHandle, context: Context, owner: GraphOwner, family: GraphFamily) -> Self {
        let template = Template { raw, is_alive: owner == GraphOwner::Id, kernels: None };
        Self { raw, context, owner, template: Arc::new(Mutex::new(template)), family: Some(family) }
    }
}

/// Who destroys a graph.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum GraphOwner {
    /// `graph_destroy` of its id.
    Id,
    /// The conditional node whose body it is: it is destroyed with `root`, the outermost graph around the node.
    Node {
        /// That graph.
        root: GraphHandle,
    },
    /// It was destroyed with the node whose body it was. The id can only be forgotten.
    Destroyed,
}

/// A node's kind from CUDA's number.
fn kind_of(number: u32) -> NodeKind {
    match number {
        0 => NodeKind::Kernel,
        1 => NodeKind::Copy,
        2 => NodeKind::Fill,
        3 => NodeKind::HostCallback,
        4 => NodeKind::ChildGraph,
        5 => NodeKind::Empty,
        6 => NodeKind::EventWait,
        7 => NodeKind::EventRecord,
        10 => NodeKind::MemAlloc,
        11 => NodeKind::MemFree,
        13 => NodeKind::Conditional,
        other => NodeKind::Other(other),
    }
}

/// CUDA's flags for instantiation.
const fn flags(options: InstantiateOptions) -> u64 {
    let mut flags = 0;
    if options.auto_free_on_launch {
        flags |= sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH.0 as u64;
    }
    if options.use_node_priority {
        flags |= sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY.0 as u64;
    }
    flags
}

impl Graphs for CudaDriver {
    fn graph_instantiate(&self, graph: GraphId, options: InstantiateOptions) -> Result<GraphExecId> {
        let site = self.enter(Call::GraphInstantiate)?;
        let _graphs = lock(&self.graph_lock);
        let object = self.graph(site, graph)?;
        let _current = self.make_current(site, object.context)?;
        let _template = lock(&object.template);
        let mut raw = ptr::null_mut();
        // SAFETY: the graph is live, and `graph_lock` is held; CUDA writes the handle to `raw`. The modules of its
        // kernels are still loaded: they stay while a graph of its family exists.
        site.check(unsafe { (self.api.graph_instantiate_with_flags)(&raw mut raw, object.raw.raw(), flags(options)) })?;
        Ok(self.exec_instantiated(raw, graph, &object))
    }

    unsafe fn graph_launch(&self, exec: GraphExecId, stream: StreamId) -> Result<()> {
        // SAFETY: the caller promises what the nodes need.
        unsafe { self.launch_exec(exec, stream) }
    }

    unsafe fn graph_exec_set_kernel(
        &self,
        exec: GraphExecId,
        node: NodeId,
        function: FunctionId,
        shape: LaunchShape,
        args: &[KernelArg],
    ) -> Result<()> {
        // SAFETY: the caller promises what the kernel does with these arguments.
        unsafe { self.set_kernel(exec, node, function, shape, args) }
    }

    fn graph_topology(&self, graph: GraphId) -> Result<GraphTopology> {
        let site = self.enter(Call::GraphTopology)?;
        let _graphs = lock(&self.graph_lock);
        let object = self.graph(site, graph)?;
        let _current = self.make_current(site, object.context)?;
        let _template = lock(&object.template);
        self.topology(site, object.raw)
    }

    fn graph_dot(&self, graph: GraphId) -> Result<String> {
        let site = self.enter(Call::GraphDot)?;
        let _graphs = lock(&self.graph_lock);
        let object = self.graph(site, graph)?;
        let _current = self.make_current(site, object.context)?;
        let _template = lock(&object.template);
        let io_error = |error: io::Error| site.explain(ErrorCode::OperatingSystem, error.to_string());
        // CUDA only writes to files.
        let file = ScratchFile::create().map_err(io_error)?;
        let path =
            CString::new(file.0.as_os_str().as_encoded_bytes()).map_err(|_| site.error(ErrorCode::OperatingSystem))?;
        // SAFETY: the graph is live, and `graph_lock` is held; the path ends with a 0. No flags: the short form.
        site.check(unsafe { (self.api.graph_debug_dot_print)(object.raw.raw(), path.as_ptr(), 0) })?;
        let bytes = fs::read(&file.0).map_err(io_error)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    fn graph_destroy(&self, graph: GraphId) -> Result<()> {
        let site = self.enter(Call::GraphDestroy)?;
        let _graphs = lock(&self.graph_lock);
        let object = self.graphs.exclusive(graph.0).ok_or_else(|| site.error(ErrorCode::InvalidHandle))?;
        if object.owner == GraphOwner::Id {
            let _current = self.make_current(site, object.context)?;
            let mut template = lock(&object.template);
            // SAFETY: `raw` came from cuStreamEndCapture and is owned by the id; no other call can use it.
            site.check(unsafe { (self.api.graph_destroy)(object.raw.raw()) })?;
            template.is_alive = false;
            drop(template);
            self.forget_graphs_inside(object.raw);
        }
        object.remove();
        Ok(())
    }

    fn graph_exec_destroy(&self, exec: GraphExecId) -> Result<()> {
        self.destroy_exec(exec)
    }

    fn graph_raw(&self, graph: GraphId) -> Result<RawHandle> {
        let site = self.enter(Call::GraphRaw)?;
        let _graphs = lock(&self.graph_lock);
        Ok(self.graph(site, graph)?.raw.exposed())
    }

    fn graph_exec_raw(&self, exec: GraphExecId) -> Result<RawHandle> {
        let site = self.enter(Call::GraphExecRaw)?;
        Ok(self.exec(site, exec)?.raw.exposed())
    }

    fn conditional_create(&self, stream: StreamId, default: u32) -> Result<ConditionalId> {
        self.create_conditional(stream, default)
    }

    fn conditional_begin(
        &self,
        stream: StreamId,
        conditional: ConditionalId,
        kind: ConditionalKind,
        body: StreamId,
        mode: CaptureMode,
    ) -> Result<()> {
        self.begin_conditional(stream, conditional, kind, body, mode)
    }
}

impl CudaDriver {
    /// Looks up a graph by id. The caller holds `graph_lock`.
    fn graph(&self, site: CallSite<'_>, graph: GraphId) -> Result<Shared<'_, Graph>> {
        let live = self.graphs.get(graph.0).filter(|graph| graph.owner != GraphOwner::Destroyed);
        live.ok_or_else(|| site.error(ErrorCode::InvalidHandle))
    }

    /// The nodes and edges of a graph. The caller holds `graph_lock`.
    pub(crate) fn topology(&self, site: CallSite<'_>, graph: GraphHandle) -> Result<GraphTopology> {
        let nodes = self.nodes_of(site, graph)?;
        let describe =
            |&node: &sys::CUgraphNode| Ok(Node { id: node_id(node), kind: kind_of(self.node_type(site, node)?) });
        Ok(GraphTopology {
            nodes: nodes.iter().map(describe).collect::<Result<_>>()?,
            edges: self.edges_of(site, graph)?,
        })
    }

    /// The kernel nodes of a graph, which no other call uses meanwhile.
    pub(crate) fn kernels_of(&self, site: CallSite<'_>, graph: GraphHandle) -> Result<FxHashSet<u64>> {
        let mut kernels = FxHashSet::default();
        for node in self.nodes_of(site, graph)? {
            if kind_of(self.node_type(site, node)?) == NodeKind::Kernel {
                kernels.insert(node_id(node).0);
            }
        }
        Ok(kernels)
    }

    fn nodes_of(&self, site: CallSite<'_>, graph: GraphHandle) -> Result<Vec<sys::CUgraphNode>> {
        let mut count = 0;
        // SAFETY: without an array CUDA only writes the number.
        site.check(unsafe { (self.api.graph_get_nodes)(graph.raw(), ptr::null_mut(), &raw mut count) })?;
        let mut nodes = vec![ptr::null_mut(); count];
        if count > 0 {
            // SAFETY: the array has `count` elements.
            site.check(unsafe { (self.api.graph_get_nodes)(graph.raw(), nodes.as_mut_ptr(), &raw mut count) })?;
        }
        nodes.truncate(count);
        Ok(nodes)
    }

    fn edges_of(&self, site: CallSite<'_>, graph: GraphHandle) -> Result<Vec<(NodeId, NodeId)>> {
        let mut count = 0;
        // SAFETY: without arrays CUDA only writes the number.
        site.check(unsafe {
            (self.api.graph_get_edges)(graph.raw(), ptr::null_mut(), ptr::null_mut(), &raw mut count)
        })?;
        let (mut from, mut to) = (vec![ptr::null_mut(); count], vec![ptr::null_mut(); count]);
        if count > 0 {
            // SAFETY: both arrays have `count` elements.
            site.check(unsafe {
                (self.api.graph_get_edges)(graph.raw(), from.as_mut_ptr(), to.as_mut_ptr(), &raw mut count)
            })?;
        }
        Ok(from.into_iter().zip(to).take(count).map(|(from, to)| (node_id(from), node_id(to))).collect())
    }

    fn node_type(&self, site: CallSite<'_>, node: sys::CUgraphNode) -> Result<u32> {
        let mut number = 0_u32;
        // SAFETY: the node is of a graph that no other call uses meanwhile; `number` has the size of the C enum.
        site.check(unsafe { (self.api.graph_node_get_type)(node, (&raw mut number).cast()) })?;
        Ok(number)
    }
}

/// A node's id: its handle, which is valid as long as its graph.
fn node_id(node: sys::CUgraphNode) -> NodeId {
    NodeId(NodeHandle::new(node).number())
}

/// A new file in the directory for temporary files; removed when dropped.
struct ScratchFile(PathBuf);

impl ScratchFile {
    fn create() -> io::Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        loop {
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let path = env::temp_dir().join(format!("warpool-{}-{number}.dot", process::id()));
            // A new one: an existing name may be a link to another file.
            match OpenOptions::new().write(true).create_new(true).open(&path) {
                Ok(_) => return Ok(Self(path)),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
            }
        }
    }
}

impl Drop for ScratchFile {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_file(&self.0) {
            tracing::warn!("{} could not be removed: {error}", self.0.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_become_flags() {
        let both = InstantiateOptions { auto_free_on_launch: true, use_node_priority: true };
        assert_eq!((flags(InstantiateOptions::default()), flags(both)), (0, 9));
    }

    #[test]
    fn an_unknown_node_kind_keeps_its_number() {
        let known = sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_CONDITIONAL as u32;
        assert_eq!(
            (kind_of(known), kind_of(0), kind_of(99)),
            (NodeKind::Conditional, NodeKind::Kernel, NodeKind::Other(99))
        );
    }

    #[test]
    fn a_scratch_file_is_new_and_removed_when_dropped() {
        let (a, b) = (ScratchFile::create().expect("writable"), ScratchFile::create().expect("writable"));
        assert_ne!(a.0, b.0);
        let path = a.0.clone();
        assert!(path.exists());
        drop(a);
        assert!(!path.exists());
    }
}
