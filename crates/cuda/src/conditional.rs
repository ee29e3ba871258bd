//! Conditional nodes: a flag, and a body that is captured on a stream of its own.
//! Needs a driver of CUDA 12.3; an older one says `NotSupported`, naming the function that it lacks.

use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};

use cudarc::driver::sys;
use warpool_driver::{Call, CaptureMode, ConditionalId, ConditionalKind, DriverError, ErrorCode, Result, StreamId};

use crate::CudaDriver;
use crate::capture::{GraphHandle, mode_of};
use crate::error::Site;
use crate::graph::Owner;
use crate::stream::StreamKind;
use crate::table::{Alone, Used, lock};

/// A conditional's flag behind its id.
pub(crate) struct Conditional {
    /// What kernels and the node know it by.
    pub(crate) handle: sys::CUgraphConditionalHandle,
    /// The graph that it is a flag of.
    graph: GraphHandle,
    /// The graph with which that goes away.
    root: GraphHandle,
    /// Whether a node has it. Changed only while `graph_gate` is held.
    taken: AtomicBool,
}

impl CudaDriver {
    /// The flag behind an id, as kernels get it.
    pub(crate) fn conditional(&self, site: Site<'_>, conditional: ConditionalId) -> Result<Used<'_, Conditional>> {
        self.conditionals.get(conditional.0).ok_or_else(|| site.error(ErrorCode::InvalidHandle))
    }

    /// `conditional_create` of the contract.
    pub(crate) fn create_conditional(&self, stream: StreamId, default: u32) -> Result<ConditionalId> {
        let site = self.enter(Call::ConditionalCreate)?;
        let row = self.stream(site, stream)?;
        let create = self.api.graph_conditional_handle_create.ok_or_else(|| self.no_conditionals(site))?;
        let context = self.context_of_stream(site, &row)?;
        let _current = self.make_current(site, context)?;
        let _gate = lock(&self.graph_gate);
        let graph = self.capture(site, &row)?.graph;
        let mut handle = 0;
        // SAFETY: the graph is being captured and cannot end while the gate is held; `handle` takes the number.
        site.check(unsafe {
            create(&raw mut handle, graph.raw(), context.raw(), default, sys::CU_GRAPH_COND_ASSIGN_DEFAULT)
        })?;
        let flag = Conditional { handle, graph, root: self.root_of(graph), taken: AtomicBool::new(false) };
        Ok(ConditionalId(self.conditionals.insert(flag)))
    }

    /// `conditional_begin` of the contract: a node is added by hand behind what the stream captured so far, the stream
    /// goes on behind the node, and the body stream starts to capture into the node's graph.
    pub(crate) fn begin_conditional(
        &self,
        stream: StreamId,
        conditional: ConditionalId,
        kind: ConditionalKind,
        body: StreamId,
        mode: CaptureMode,
    ) -> Result<()> {
        let site = self.enter(Call::ConditionalBegin)?;
        let (row, body_row) = (self.stream(site, stream)?, self.stream(site, body)?);
        let add_node = self.api.graph_add_node.ok_or_else(|| self.no_conditionals(site))?;
        let begin = self.api.stream_begin_capture_to_graph.ok_or_else(|| self.no_conditionals(site))?;
        let context = self.context_of_stream(site, &row)?;
        let _current = self.make_current(site, context)?;
        let _gate = lock(&self.graph_gate);
        // Looked up behind the gate, where a flag's graph cannot go: that waits for whoever uses the flag.
        let flag = self.conditional(site, conditional)?;
        let capture = self.capture(site, &row)?;

        // A node cannot be taken out of a capture again, so what could fail behind it is asked before.
        if body_row.kind == StreamKind::Legacy {
            return Err(site.error(ErrorCode::StreamCaptureUnsupported));
        }
        if self.is_capturing(site, &body_row)? {
            return Err(site.explain(ErrorCode::IllegalState, "the body's stream captures already"));
        }
        if flag.graph != capture.graph {
            return Err(site.explain(ErrorCode::InvalidValue, "the flag belongs to another graph"));
        }
        if flag.taken.load(Ordering::Relaxed) {
            return Err(site.explain(ErrorCode::InvalidValue, "the flag has a node already"));
        }

        // SAFETY: all zeros is a value of every member: numbers, null pointers, and the node type 0.
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
        let before: Vec<sys::CUgraphNode> = capture.dependencies.iter().map(|node| node.raw()).collect();
        let mut node = ptr::null_mut();
        // SAFETY: the graph cannot end while the gate is held; `before` holds its nodes; `node` and `parameters` take
        // what CUDA adds.
        site.check(unsafe {
            add_node(&raw mut node, capture.graph.raw(), before.as_ptr(), before.len(), &raw mut parameters)
        })?;
        flag.taken.store(true, Ordering::Relaxed);
        // SAFETY: the node is a conditional one, so this is the member that CUDA filled.
        let bodies = unsafe { parameters.__bindgen_anon_1.conditional.phGraph_out };
        // SAFETY: CUDA points it to an array of `size` graphs, that is one, which lives as long as the node.
        let graph = GraphHandle::new(unsafe { *bodies });

        let set = sys::CUstreamUpdateCaptureDependencies_flags::CU_STREAM_SET_CAPTURE_DEPENDENCIES as u32;
        // SAFETY: the stream captures the graph that the node is in; one node is read.
        site.check(unsafe { (self.api.stream_update_capture_dependencies)(row.raw.raw(), &raw mut node, 1, set) })?;
        let _body_current = self.on_stream(site, &body_row)?;
        let since = self.blame.mark();
        // SAFETY: the body's stream is live and its graph lives as long as the node; without dependencies the arrays
        // are not read.
        site.check(unsafe { begin(body_row.raw.raw(), graph.raw(), ptr::null(), ptr::null(), 0, mode_of(mode)) })?;
        self.capture_began(site, &body_row, graph, flag.root, since)
    }

    /// Notes that a graph is gone, and what lived in it at whatever depth: flags, and bodies of conditional nodes. The
    /// caller holds `graph_gate`.
    pub(crate) fn forget_inside(&self, root: GraphHandle) {
        for id in self.conditionals.ids(|flag| flag.root == root) {
            self.conditionals.alone(id).map(Alone::remove);
        }
        for id in self.graphs.ids(|row| row.owner == Owner::Inside(root)) {
            if let Some(mut body) = self.graphs.alone(id) {
                body.owner = Owner::Gone;
            }
        }
    }

    /// Why there are no conditional nodes.
    fn no_conditionals(&self, site: Site<'_>) -> DriverError {
        let missing = self.api.missing_for_conditionals().unwrap_or("conditional nodes");
        let detail = format!("the driver speaks CUDA {}, which has no {missing}", self.version());
        site.explain(ErrorCode::NotSupported, detail)
    }
}
