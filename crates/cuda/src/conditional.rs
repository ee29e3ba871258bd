//! Conditional nodes: a flag, and a body that is captured on a stream of its own.
//! They need a driver of CUDA 12.3; an older one gives `NotSupported`, naming the missing function.

use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};

use cudarc::driver::sys;
use warpool_driver::{Call, CaptureMode, ConditionalId, ConditionalKind, DriverError, ErrorCode, Result, StreamId};

use crate::CudaDriver;
use crate::capture::mode_of;
use crate::error::CallSite;
use crate::graph::GraphOwner;
use crate::handle::GraphHandle;
use crate::object_table::{Exclusive, Shared};
use crate::sync::{lock, write};

/// The flag of a conditional node, in the object table.
pub(crate) struct Conditional {
    /// CUDA's handle, which kernels and the node take.
    pub(crate) handle: sys::CUgraphConditionalHandle,
    /// The graph that the node is in.
    graph: GraphHandle,
    /// The graph that owns that one.
    root: GraphHandle,
    /// Whether a node has it. Changed only while `graph_lock` is held.
    has_node: AtomicBool,
}

impl CudaDriver {
    /// Looks up a flag by id.
    pub(crate) fn conditional(
        &self,
        site: CallSite<'_>,
        conditional: ConditionalId,
    ) -> Result<Shared<'_, Conditional>> {
        self.conditionals.get(conditional.0).ok_or_else(|| site.error(ErrorCode::InvalidHandle))
    }

    /// `conditional_create` of the contract.
    pub(crate) fn create_conditional(&self, stream: StreamId, default: u32) -> Result<ConditionalId> {
        let site = self.enter(Call::ConditionalCreate)?;
        let stream = self.stream(site, stream)?;
        let create = self.api.graph_conditional_handle_create.ok_or_else(|| self.no_conditionals(site))?;
        let context = self.context_of_stream(site, &stream)?;
        let _current = self.make_current(site, context)?;
        let _graphs = lock(&self.graph_lock);
        let graph = self.capture_info(site, &stream)?.graph;
        let mut handle = 0;
        // SAFETY: the graph is being captured, and the capture cannot end while `graph_lock` is held; CUDA writes the
        // number to `handle`.
        site.check(unsafe {
            create(&raw mut handle, graph.raw(), context.raw(), default, sys::CU_GRAPH_COND_ASSIGN_DEFAULT)
        })?;
        let flag = Conditional { handle, graph, root: self.root_of(graph), has_node: AtomicBool::new(false) };
        Ok(ConditionalId(self.conditionals.insert(flag)))
    }

    /// `conditional_begin` of the contract: adds a node that depends on what the stream has captured so far, makes
    /// later work of the stream depend on the node, and starts to capture the body's stream into the node's graph.
    pub(crate) fn begin_conditional(
        &self,
        stream: StreamId,
        conditional: ConditionalId,
        kind: ConditionalKind,
        body: StreamId,
        mode: CaptureMode,
    ) -> Result<()> {
        let site = self.enter(Call::ConditionalBegin)?;
        let (stream, body) = (self.stream(site, stream)?, self.stream(site, body)?);
        let add_node = self.api.graph_add_node.ok_or_else(|| self.no_conditionals(site))?;
        let begin = self.api.stream_begin_capture_to_graph.ok_or_else(|| self.no_conditionals(site))?;
        let context = self.context_of_stream(site, &stream)?;
        let _current = self.make_current(site, context)?;
        let _no_work = body.lock_capture();
        let _graphs = lock(&self.graph_lock);
        // Found under the lock, so that the flag's graph cannot be destroyed: that would wait for users of the flag.
        let flag = self.conditional(site, conditional)?;
        let capture = self.capture_info(site, &stream)?;

        // A node cannot be removed from a capture, so everything that could fail later is checked first.
        if !body.is_destroyable() {
            // The legacy stream cannot capture. The capture of another thread's per-thread stream could not be ended
            // when the capture around it ends.
            return Err(site.explain(ErrorCode::StreamCaptureUnsupported, "a body is not captured on a default stream"));
        }
        if self.is_capturing(site, &body)? {
            return Err(site.explain(ErrorCode::IllegalState, "the body's stream captures already"));
        }
        if flag.graph != capture.graph {
            return Err(site.explain(ErrorCode::InvalidValue, "the flag belongs to another graph"));
        }
        if flag.has_node.load(Ordering::Relaxed) {
            return Err(site.explain(ErrorCode::InvalidValue, "the flag has a node already"));
        }

        // SAFETY: zero is valid for every member: numbers, null pointers, and the node type 0.
        let mut parameters: sys::CUgraphNodeParams = unsafe { std::mem::zeroed() };
        parameters.type_ = sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_CONDITIONAL;
        parameters.__bindgen_anon_1.conditional = sys::CUDA_CONDITIONAL_NODE_PARAMS {
            handle: flag.handle,
            type_: match kind {
                ConditionalKind::If => sys::CUgraphConditionalNodeType::CU_GRAPH_COND_TYPE_IF,
                ConditionalKind::While => sys::CUgraphConditionalNodeType::CU_GRAPH_COND_TYPE_WHILE,
            },
            size: 1,
            phGraph_out: ptr::null_mut(),
            ctx: context.raw(),
        };
        let dependencies: Vec<sys::CUgraphNode> = capture.dependencies.iter().map(|node| node.raw()).collect();
        let mut node = ptr::null_mut();
        // SAFETY: the capture cannot end while `graph_lock` is held; the dependencies are nodes of the graph; CUDA
        // writes to `node` and `parameters`.
        site.check(unsafe {
            add_node(&raw mut node, capture.graph.raw(), dependencies.as_ptr(), dependencies.len(), &raw mut parameters)
        })?;
        flag.has_node.store(true, Ordering::Relaxed);
        // SAFETY: the node is conditional, so CUDA has set this member.
        let bodies = unsafe { parameters.__bindgen_anon_1.conditional.phGraph_out };
        // SAFETY: an array of `size` graphs, that is one, which lives as long as the node.
        let graph = GraphHandle::new(unsafe { *bodies });

        let set = sys::CUstreamUpdateCaptureDependencies_flags::CU_STREAM_SET_CAPTURE_DEPENDENCIES as u32;
        // SAFETY: the stream captures into the graph that the node is in; CUDA reads one node.
        site.check(unsafe { (self.api.stream_update_capture_dependencies)(stream.raw.raw(), &raw mut node, 1, set) })?;
        let _body_current = self.on_stream(site, &body)?;
        let _beginning = self.captures.beginning();
        let since = self.capture_errors.count();
        let code = {
            let _no_queries = write(&self.capture_queries);
            // SAFETY: the body's stream is live, and its graph lives as long as the node; without dependencies CUDA
            // reads no arrays.
            unsafe { begin(body.raw.raw(), graph.raw(), ptr::null(), ptr::null(), 0, mode_of(mode)) }
        };
        site.check(code)?;
        let family = self.family_of_capture(capture.graph);
        self.capture_began(site, &body, (graph, flag.root), family, since)
    }

    /// Forgets what was inside a destroyed graph, at any depth: flags, and bodies of conditional nodes. The caller
    /// holds `graph_lock`.
    pub(crate) fn forget_graphs_inside(&self, root: GraphHandle) {
        for id in self.conditionals.ids(|flag| flag.root == root) {
            self.conditionals.exclusive(id).map(Exclusive::remove);
        }
        for id in self.graphs.ids(|graph| graph.owner == GraphOwner::Node { root }) {
            if let Some(mut body) = self.graphs.exclusive(id) {
                body.owner = GraphOwner::Destroyed;
                body.family = None;
            }
        }
    }

    /// The error that names the missing function.
    fn no_conditionals(&self, site: CallSite<'_>) -> DriverError {
        let missing = self.api.missing_for_conditionals().unwrap_or("conditional nodes");
        let detail = format!("the driver is of CUDA {}, which has no {missing}", self.version());
        site.explain(ErrorCode::NotSupported, detail)
    }
}
