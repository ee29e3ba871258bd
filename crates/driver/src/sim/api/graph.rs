//! Graphs: instantiate, launch, inspect, conditional nodes.

use std::sync::{Arc, OnceLock};

use crate::sim::driver::SimDriver;
use crate::sim::objects::{Conditional, Exec};
use crate::sim::refuse::refuse;
use crate::sim::state::SimState;
use crate::sim::table::Missing;
use crate::sim::work::{EventState, ExecGraph, KernelWork, Launch, ReplacedKernel, Work};
use crate::{
    Call, CaptureMode, ConditionalId, ConditionalKind, ErrorCode, FunctionId, GraphExecId, GraphId, GraphTopology,
    Graphs, InstantiateOptions, KernelArg, LaunchShape, NodeId, RawHandle, Result, StreamId,
};

impl Graphs for SimDriver {
    fn graph_instantiate(&self, graph: GraphId, options: InstantiateOptions) -> Result<GraphExecId> {
        self.call(Call::GraphInstantiate, |state| {
            let template = state.template(graph)?;
            state.use_device(template.device)?;
            let flat = match ExecGraph::new(&template) {
                Ok(flat) => Arc::new(flat),
                Err(why) => return refuse(ErrorCode::InvalidValue, why),
            };
            let kernels = Arc::default();
            let exec = Exec { graph: flat, template, template_id: graph, kernels, options, last_launch: None };
            Ok(state.graphs.add_exec(exec))
        })
    }

    unsafe fn graph_launch(&self, exec: GraphExecId, stream: StreamId) -> Result<()> {
        Self::graph_launch(self, exec, stream)
    }

    unsafe fn graph_exec_set_kernel(
        &self,
        exec: GraphExecId,
        node: NodeId,
        function: FunctionId,
        shape: LaunchShape,
        args: &[KernelArg],
    ) -> Result<()> {
        Self::graph_exec_set_kernel(self, exec, node, function, shape, args)
    }

    fn graph_topology(&self, graph: GraphId) -> Result<GraphTopology> {
        self.call(Call::GraphTopology, |state| Ok(state.template(graph)?.topology()))
    }

    fn graph_dot(&self, graph: GraphId) -> Result<String> {
        self.call(Call::GraphDot, |state| Ok(state.template(graph)?.dot()))
    }

    fn graph_destroy(&self, graph: GraphId) -> Result<()> {
        self.call(Call::GraphDestroy, |state| {
            // Not kept while the id's own reference is released.
            drop(state.template(graph)?);
            let template = state.graphs.remove_template(graph);
            state.release_template(template);
            Ok(())
        })
    }

    fn graph_exec_destroy(&self, exec: GraphExecId) -> Result<()> {
        self.call(Call::GraphExecDestroy, |state| {
            drop(state.exec(exec)?);
            let removed = state.graphs.remove_exec(exec);
            state.release_template(removed.template);
            Ok(())
        })
    }

    fn graph_raw(&self, graph: GraphId) -> Result<RawHandle> {
        self.call(Call::GraphRaw, |state| {
            state.template(graph)?;
            Ok(RawHandle(0x6000_0000 + graph.0 * 0x40))
        })
    }

    fn graph_exec_raw(&self, exec: GraphExecId) -> Result<RawHandle> {
        self.call(Call::GraphExecRaw, |state| {
            state.exec(exec)?;
            Ok(RawHandle(0x7000_0000 + exec.0 * 0x40))
        })
    }

    fn conditional_create(&self, stream: StreamId, default: u32) -> Result<ConditionalId> {
        self.call(Call::ConditionalCreate, |state| {
            let stream = state.live_stream(stream)?;
            let capture = state.captures.valid_membership(stream)?.capture;
            let device = state.captures.get(capture).device;
            if !state.config.devices[device.0 as usize].properties.conditional_nodes {
                return refuse(ErrorCode::NotSupported, format!("{device} has no conditional nodes"));
            }
            Ok(state.captures.create_flag(capture, default))
        })
    }

    fn conditional_begin(
        &self,
        stream: StreamId,
        conditional: ConditionalId,
        kind: ConditionalKind,
        body: StreamId,
        mode: CaptureMode,
    ) -> Result<()> {
        self.call(Call::ConditionalBegin, |state| {
            let stream = state.live_stream(stream)?;
            let member = state.captures.valid_membership(stream)?;
            let queue = state.live_stream(body)?;
            let (streams, device) = (&state.scheduler.streams, state.scheduler.streams.get(queue).device);
            if [streams.legacy(device), streams.per_thread(device)].contains(&body) {
                let why = "a body is not captured on a default stream";
                return refuse(ErrorCode::StreamCaptureUnsupported, why);
            }
            match state.captures.conditional(conditional) {
                Some(Conditional { capture, used: false }) if capture == member.capture => {}
                _ => return refuse(ErrorCode::InvalidValue, format!("{conditional} cannot be used in this graph")),
            }
            if state.captures.is_capturing(body) {
                return refuse(ErrorCode::IllegalState, format!("{body} is capturing already"));
            }
            let slot = Arc::new(OnceLock::new());
            let work = Work::Conditional { flag: conditional, kind, body: Arc::clone(&slot) };
            let (nanos, at) = (state.config.work.conditional, state.call_number());
            state.captures.add_node(stream, work, nanos, at)?;
            state.captures.set_used(conditional);
            let device = state.scheduler.streams.get(body).device;
            state.captures.begin(body, device, mode, Some((member.capture, slot)));
            Ok(())
        })
    }
}

impl SimDriver {
    /// [`Graphs::graph_launch`], which is safe on the simulated device, as [`SimDriver::kernel_launch`] is.
    pub fn graph_launch(&self, exec: GraphExecId, stream: StreamId) -> Result<()> {
        self.waiting_call(Call::GraphLaunch, |mut state| {
            let stream = state.live_stream(stream)?;
            let device = state.exec(exec)?.template.device;
            state.forbid_implicit_wait(stream)?;
            if state.captures.is_capturing(stream) {
                let why = format!("{exec} was launched on {stream}, which captures");
                return state.invalidate_capture_of(stream, ErrorCode::StreamCaptureUnsupported, &why);
            }
            state.use_device(device)?;
            let mut state = self.wait_for_queue(state, stream)?;
            take_graph_memory(&mut state, exec)?;
            queue_launch(&mut state, exec, stream)
        })
    }

    /// [`Graphs::graph_exec_set_kernel`], which is safe on the simulated device, as
    /// [`SimDriver::kernel_launch`] is.
    pub fn graph_exec_set_kernel(
        &self,
        exec: GraphExecId,
        node: NodeId,
        function: FunctionId,
        shape: LaunchShape,
        args: &[KernelArg],
    ) -> Result<()> {
        self.call(Call::GraphExecSetKernel, |state| {
            let Exec { graph, template_id, .. } = state.exec(exec)?;
            let host = state.host_kernel(function)?;
            state.use_device(graph.device)?;
            if state.graphs.template(template_id).is_err() {
                let why = format!("{template_id}, the template of {exec}, was destroyed, and its nodes with it");
                return refuse(ErrorCode::InvalidValue, why);
            }
            let Some(index) = graph.index_of(node) else {
                return refuse(ErrorCode::InvalidValue, format!("{node} is not a node of {template_id}"));
            };
            let Work::Kernel(captured) = &graph.nodes[index as usize].work else {
                return refuse(ErrorCode::InvalidValue, format!("{node} is not a kernel"));
            };
            if captured.function != Some(function) || captured.shape != shape {
                let KernelWork { host, shape, .. } = &**captured;
                let why = format!("{node} was captured as {} with {shape:?}, which cannot be changed", host.name);
                return refuse(ErrorCode::InvalidValue, why);
            }
            let kernel = KernelWork { function: Some(function), host, shape, args: args.to_vec() };
            let (nanos, replaced_at) = (state.kernel_nanos(&kernel), state.call_number());
            let kernel = ReplacedKernel { work: Work::Kernel(Arc::new(kernel)), nanos, replaced_at };
            state.graphs.replace_kernel(exec, index, kernel);
            Ok(())
        })
    }
}

/// Takes the memory that the graph's nodes allocate from its pools, unless an earlier launch has taken it: then it is
/// used again with `auto_free_on_launch`, and otherwise the launch is refused. Queued launches count, whether they have
/// run or not.
fn take_graph_memory(state: &mut SimState, exec: GraphExecId) -> Result<()> {
    let Exec { template, options, .. } = state.exec(exec)?;
    let mut taken = Vec::new();
    for &(ptr, pool) in &template.memory {
        let Some((bytes, is_live)) = state.memory.graph_memory(ptr) else { continue };
        if is_live && options.auto_free_on_launch {
            // This launch uses what the last one took.
            continue;
        }
        let outcome = if is_live {
            refuse(ErrorCode::InvalidValue, format!("{ptr}, allocated by the last launch, was not freed"))
        } else {
            state.pool(pool).map(drop).and_then(|()| state.memory.take_from_pool(pool, bytes))
        };
        if let Err(error) = outcome {
            for (pool, bytes) in taken {
                state.memory.give_back_to_pool(pool, bytes);
            }
            return Err(error);
        }
        taken.push((pool, bytes));
    }
    for &(ptr, _) in &template.memory {
        state.memory.set_graph_memory_live(ptr, !template.frees(ptr));
    }
    Ok(())
}

fn queue_launch(state: &mut SimState, exec: GraphExecId, stream: StreamId) -> Result<()> {
    let Exec { graph, template, kernels, last_launch, .. } = state.exec(exec)?;
    let mut waits = Vec::new();
    if let Some(last) = last_launch {
        // Launches of one executable never overlap.
        state.scheduler.streams.order_after(stream, &last);
        waits.push(last.epoch);
    }
    for node in &graph.nodes {
        if let Work::EventWait(event) | Work::Record(event) = node.work
            && state.scheduler.events.get(event.0).is_none()
        {
            // Logged; the launch proceeds without the event.
            state.missing(Missing::Destroyed, format!("{event}, which a node of {exec} uses"));
        }
    }
    // A node waits for what its event had recorded when the graph was launched, not when the node runs.
    for node in &graph.nodes {
        if let Work::EventWait(event) = node.work
            && let Some(event) = state.scheduler.events.get(event.0)
            && let EventState::Recorded { point, .. } = event.state.clone()
        {
            state.scheduler.streams.order_after(stream, &point);
            waits.push(point.epoch);
        }
    }
    let at = state.call_number();
    let parts = (Arc::clone(&graph), template, kernels);
    let launch = |point| Launch::new(exec, parts, stream, point, at);
    let point = state.scheduler.enqueue_launch(stream, waits, at, launch);
    for node in &graph.nodes {
        if let Work::Record(event) = node.work
            && let Some(event) = state.scheduler.events.get_mut(event.0)
        {
            event.state = EventState::Recorded { point: point.clone(), done_at: None };
        }
    }
    state.graphs.set_last_launch(exec, point);
    Ok(())
}
