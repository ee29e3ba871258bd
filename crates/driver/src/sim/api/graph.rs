//! Graphs of the simulated machine: instantiate, launch, look at, conditional nodes.

use std::sync::{Arc, OnceLock};

use crate::sim::SimDriver;
use crate::sim::memory::{Gone, Region};
use crate::sim::table::Missing;
use crate::sim::work::{ExecGraph, KernelWork, Launch, NewKernel, Template, Work};
use crate::sim::world::{Conditional, EventMark, Exec, World};
use crate::{
    Call, CaptureMode, ConditionalId, ConditionalKind, DevicePtr, ErrorCode, FunctionId, GraphExecId, GraphId,
    GraphTopology, Graphs, InstantiateOptions, KernelArg, LaunchShape, NodeId, PoolId, RawHandle, Result, StreamId,
};

impl Graphs for SimDriver {
    fn graph_instantiate(&self, graph: GraphId, options: InstantiateOptions) -> Result<GraphExecId> {
        self.call(Call::GraphInstantiate, |world| {
            let template = Arc::clone(&world.graph(graph)?.template);
            world.device(template.device)?;
            let flat = match ExecGraph::new(&template) {
                Ok(flat) => flat,
                Err(why) => return world.fail(ErrorCode::InvalidValue, why),
            };
            let (flat, kernels) = (Arc::new(flat), Arc::default());
            let exec = Exec { graph: flat, template, of: graph, kernels, options, last: None };
            Ok(GraphExecId(world.execs.insert(exec)))
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
        self.call(Call::GraphTopology, |world| Ok(world.graph(graph)?.template.topology()))
    }

    fn graph_dot(&self, graph: GraphId) -> Result<String> {
        self.call(Call::GraphDot, |world| Ok(world.graph(graph)?.template.dot()))
    }

    fn graph_destroy(&self, graph: GraphId) -> Result<()> {
        self.call(Call::GraphDestroy, |world| {
            world.graph(graph)?;
            let state = world.graphs.remove(graph.0).expect("just found");
            world.release_template(state.template);
            Ok(())
        })
    }

    fn graph_exec_destroy(&self, exec: GraphExecId) -> Result<()> {
        self.call(Call::GraphExecDestroy, |world| {
            world.exec(exec)?;
            let state = world.execs.remove(exec.0).expect("just found");
            world.release_template(state.template);
            Ok(())
        })
    }

    fn graph_raw(&self, graph: GraphId) -> Result<RawHandle> {
        self.call(Call::GraphRaw, |world| {
            world.graph(graph)?;
            Ok(RawHandle(0x6000_0000 + graph.0 * 0x40))
        })
    }

    fn graph_exec_raw(&self, exec: GraphExecId) -> Result<RawHandle> {
        self.call(Call::GraphExecRaw, |world| {
            world.exec(exec)?;
            Ok(RawHandle(0x7000_0000 + exec.0 * 0x40))
        })
    }

    fn conditional_create(&self, stream: StreamId, default: u32) -> Result<ConditionalId> {
        self.call(Call::ConditionalCreate, |world| {
            let capture = world.captured_by(stream)?.capture;
            let device = world.capture(capture).device;
            if !world.config.devices[device.0 as usize].properties.conditional_nodes {
                return world.fail(ErrorCode::NotSupported, format!("{device} has no conditional nodes"));
            }
            let flag = ConditionalId(world.conditionals.insert(Conditional { capture, used: false }));
            world.captures.get_mut(capture.0).expect("a live capture").flags.push((flag, default));
            Ok(flag)
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
        self.call(Call::ConditionalBegin, |world| {
            let joined = world.captured_by(stream)?;
            let stream = world.live_stream(stream)?;
            let body = world.live_stream(body)?;
            match world.conditionals.get(conditional.0) {
                Some(state) if state.capture == joined.capture && !state.used => {}
                _ => return world.fail(ErrorCode::InvalidValue, format!("{conditional} is not free for this graph")),
            }
            if world.stream(body).capture.is_some() {
                return world.fail(ErrorCode::IllegalState, format!("{body} captures already"));
            }
            let place = Arc::new(OnceLock::new());
            let work = Work::Conditional { flag: conditional, kind, body: Arc::clone(&place) };
            let nanos = world.config.work.conditional;
            world.add_node(stream, work, nanos)?;
            world.conditionals.get_mut(conditional.0).expect("just found").used = true;
            let capture = world.begin_capture(body, mode);
            let state = world.captures.get_mut(capture.0).expect("just begun");
            state.body_of = Some(place);
            state.parent = Some(joined.capture);
            Ok(())
        })
    }
}

impl SimDriver {
    /// [`Graphs::graph_launch`], which is safe on the simulated device, as [`SimDriver::kernel_launch`] is.
    pub fn graph_launch(&self, exec: GraphExecId, stream: StreamId) -> Result<()> {
        let mut world = self.enter(Call::GraphLaunch)?;
        let stream = world.live_stream(stream)?;
        let device = world.exec(exec)?.template.device;
        world.forbid_implicit(stream)?;
        if world.stream(stream).capture.is_some() {
            let why = format!("{exec} was launched on {stream}, which captures");
            return world.break_capture_of(stream, ErrorCode::StreamCaptureUnsupported, why);
        }
        world.device(device)?;
        let mut world = self.wait_for_room(world, stream)?;
        world.make_room_for_graph(exec)?;
        world.launch_graph(exec, stream)
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
        self.call(Call::GraphExecSetKernel, |world| {
            let Exec { graph, of, .. } = world.exec(exec)?;
            let (graph, of) = (Arc::clone(graph), *of);
            let mirror = world.function(function)?;
            world.device(graph.device)?;
            if world.graphs.get(of.0).is_none() {
                let why = format!("{of}, the template of {exec}, is gone, and its nodes with it");
                return world.fail(ErrorCode::InvalidValue, why);
            }
            let Some(place) = graph.place_of(node) else {
                return world.fail(ErrorCode::InvalidValue, format!("{node} is not one of {of}"));
            };
            let Work::Kernel(captured) = &graph.nodes[place as usize].work else {
                return world.fail(ErrorCode::InvalidValue, format!("{node} is no kernel"));
            };
            if captured.function != Some(function) || captured.shape != shape {
                let what = captured.mirror.name;
                let why = format!("{node} was captured as {what} with {:?}, and cannot become another", captured.shape);
                return world.fail(ErrorCode::InvalidValue, why);
            }
            let kernel = KernelWork { function: Some(function), mirror, shape, args: args.to_vec() };
            let (nanos, at) = (world.kernel_nanos(&kernel), world.calls);
            // Launches under way hold on to what was there.
            let kernels = Arc::make_mut(&mut world.exec(exec)?.kernels);
            kernels.insert(place, NewKernel { work: Work::Kernel(Arc::new(kernel)), nanos, at });
            Ok(())
        })
    }
}

impl World {
    /// Makes room for what the graph's nodes allocate. What counts is what has been queued, not what has run.
    fn make_room_for_graph(&mut self, exec: GraphExecId) -> Result<()> {
        let Exec { template, options, .. } = self.exec(exec)?;
        let (template, options) = (Arc::clone(template), *options);
        let mut taken = Vec::new();
        for &(ptr, pool) in &template.memory {
            let (bytes, held) = match self.memory.space.regions.get(&ptr.0) {
                Some((bytes, Region::OfGraph { held, .. })) => (*bytes, *held),
                _ => continue,
            };
            if held && options.auto_free_on_launch {
                // The room of the last launch serves this one.
                continue;
            }
            let refused = if held {
                self.fail(ErrorCode::InvalidValue, format!("{ptr}, allocated by the last launch, was not freed"))
            } else {
                self.take_from_pool(pool, bytes)
            };
            if let Err(error) = refused {
                for (pool, bytes) in taken {
                    self.return_to_pool(pool, bytes);
                }
                return Err(error);
            }
            taken.push((pool, bytes));
        }
        for &(ptr, _) in &template.memory {
            if let Some((_, Region::OfGraph { held, .. })) = self.memory.space.regions.get_mut(&ptr.0) {
                *held = !template.frees(ptr);
            }
        }
        Ok(())
    }

    /// Puts a launch into the stream's queue.
    fn launch_graph(&mut self, exec: GraphExecId, stream: StreamId) -> Result<()> {
        let Exec { graph, template, kernels, last, .. } = self.exec(exec)?;
        let (graph, template, kernels, last) =
            (Arc::clone(graph), Arc::clone(template), Arc::clone(kernels), last.clone());
        let mut waits = Vec::new();
        if let Some((stamp, base)) = last {
            // Launches of one executable never overlap.
            self.learn(stream, &base, stamp);
            waits.push(stamp);
        }
        for node in &graph.nodes {
            if let Work::EventWait(event) | Work::Record(event) = node.work
                && self.events.get(event.0).is_none()
            {
                // Logged; the launch goes on without it, as a real one would with whatever is there.
                self.missing(Missing::Destroyed, format!("{event}, which a node of {exec} uses"));
            }
        }
        // What an event has marked counts when the graph is launched, not when its node gets to run.
        for node in &graph.nodes {
            if let Work::EventWait(event) = node.work
                && let Some(EventMark::Recorded { stamp, base, .. }) = self.events.get(event.0).map(|e| e.mark.clone())
            {
                self.learn(stream, &base, stamp);
                waits.push(stamp);
            }
        }
        let slot = self.slot(stream, waits);
        let (stamp, base) = (slot.stamp, Arc::clone(&slot.base));
        self.last_launch += 1;
        let launch = Launch::new(exec, (&graph, template, kernels), stream, stamp, self.calls, Arc::clone(&base));
        self.launches.insert(self.last_launch, launch);
        self.push(stream, slot, Work::Launch(self.last_launch), 0);
        for node in &graph.nodes {
            if let Work::Record(event) = node.work
                && let Some(state) = self.events.get_mut(event.0)
            {
                state.mark = EventMark::Recorded { stamp, base: Arc::clone(&base), done: None };
            }
        }
        self.exec(exec)?.last = Some((stamp, base));
        Ok(())
    }

    /// One holder of a template less. With the last one go the addresses that its nodes allocated.
    pub fn release_template(&mut self, template: Arc<Template>) {
        let Ok(template) = Arc::try_unwrap(template) else { return };
        self.captured_callbacks.graph_gone();
        self.release_addresses(&template.memory);
        for node in template.nodes {
            if let Work::Conditional { body, .. } = node.work
                && let Some(body) = Arc::try_unwrap(body).ok().and_then(OnceLock::into_inner)
            {
                self.release_template(body);
            }
        }
    }

    /// Gives up the addresses of a graph that will not be launched any more, but for those that hold memory.
    pub fn release_addresses(&mut self, memory: &[(DevicePtr, PoolId)]) {
        for (ptr, _) in memory {
            if let Some((bytes, Region::OfGraph { piece: None, held: false, .. })) =
                self.memory.space.regions.get(&ptr.0)
            {
                let bytes = *bytes;
                self.memory.space.regions.remove(&ptr.0);
                self.bury(ptr.0, bytes, Gone::PoolFreed);
            }
        }
    }
}
