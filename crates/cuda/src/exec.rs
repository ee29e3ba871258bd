//! Executables: instantiated graphs.
//!
//! CUDA does not synchronize an executable, so a call that uses one holds it exclusively. Launches of different
//! executables do not wait for each other, and take no lock that others take.
//!
//! A launch must cost little more than `cuGraphLaunch` itself, some 1,200 ns on an H200, and locks are most of the
//! difference. So an executable is bound to the stream that it was last launched on (`stream_users.rs`): the next
//! launch there locks nothing but the executable.

use std::fmt;
use std::ptr;
use std::sync::{Arc, Mutex};

use cudarc::driver::sys;
use warpool_driver::{
    Call, DeviceId, ErrorCode, FunctionId, GraphExecId, GraphId, KernelArg, LaunchShape, NodeId, Result, StreamId,
};

use crate::CudaDriver;
use crate::context::CurrentContext;
use crate::error::CallSite;
use crate::graph::{Graph, Template};
use crate::graph_family::GraphFamily;
use crate::handle::{Context, CudaHandle, NodeHandle, StreamHandle};
use crate::kernel::check_shape;
use crate::object_table::{Exclusive, Shared};
use crate::stream::Stream;
use crate::stream_users::StreamUser;
use crate::sync::lock;

/// An executable in the object table.
pub(crate) struct Exec {
    /// CUDA's handle.
    pub(crate) raw: CudaHandle<sys::CUgraphExec_st>,
    /// The context that it was instantiated in.
    pub(crate) context: Context,
    /// The graph that it was instantiated from.
    graph: GraphId,
    template: Arc<Mutex<Template>>,
    family: Option<GraphFamily>,
    /// The stream that it is mostly launched on.
    bound: Option<BoundStream>,
    /// The stream of the last launch, if it is another. If the next launch is there too, the executable is bound to it.
    last: Option<StreamId>,
}

/// The stream that an executable is bound to.
#[derive(Clone, Copy)]
struct BoundStream {
    id: StreamId,
    raw: StreamHandle,
    context: Option<Context>,
    device: DeviceId,
    is_destroyable: bool,
}

impl BoundStream {
    /// Its id, if the executable must be registered as a user of the stream.
    fn registered(&self) -> Option<StreamId> {
        self.is_destroyable.then_some(self.id)
    }
}

impl CudaDriver {
    /// Looks up an executable by id, held exclusively while the result lives.
    pub(crate) fn exec(&self, site: CallSite<'_>, exec: GraphExecId) -> Result<Exclusive<'_, Exec>> {
        self.execs.wait_exclusive(exec.0).ok_or_else(|| site.error(ErrorCode::InvalidHandle))
    }

    /// Registers an executable that CUDA has just instantiated from `source`.
    pub(crate) fn exec_instantiated(&self, raw: sys::CUgraphExec, graph: GraphId, source: &Graph) -> GraphExecId {
        GraphExecId(self.execs.insert(Exec {
            raw: CudaHandle::new(raw),
            context: source.context,
            graph,
            template: Arc::clone(&source.template),
            family: source.family.clone(),
            bound: None,
            last: None,
        }))
    }

    /// `graph_launch` of the contract.
    ///
    /// # Safety
    /// As there.
    pub(crate) unsafe fn launch_exec(&self, exec: GraphExecId, stream: StreamId) -> Result<()> {
        let site = self.enter(Call::GraphLaunch)?;
        let mut object = self.exec(site, exec)?;
        let Some(bound) = object.bound.filter(|bound| bound.id == stream) else {
            // SAFETY: the caller promises what the nodes need.
            return unsafe { self.launch_unbound(site, exec, object, stream) };
        };
        object.last = None;
        let context = bound.context.map_or_else(|| self.context_of(site, bound.device), Ok)?;
        let _current = self.make_current(site, context)?;
        // SAFETY: the executable is held exclusively, and the stream that it is bound to is live. The caller promises
        // what the nodes need.
        site.check(unsafe { (self.api.graph_launch)(object.raw.raw(), bound.raw.raw()) })
    }

    /// Launches on a stream that the executable is not bound to.
    ///
    /// # Safety
    /// As `launch_exec`.
    unsafe fn launch_unbound(
        &self,
        site: CallSite<'_>,
        exec: GraphExecId,
        mut object: Exclusive<'_, Exec>,
        stream: StreamId,
    ) -> Result<()> {
        let target = self.stream(site, stream)?;
        let _current = self.on_stream(site, &target)?;
        // SAFETY: the executable is held exclusively; the stream is live. The caller promises what the nodes need.
        site.check(unsafe { (self.api.graph_launch)(object.raw.raw(), target.raw.raw()) })?;
        // Not at the first launch: an executable that alternates between two streams would be bound anew each time.
        if object.last.replace(stream) == Some(stream) {
            let Stream { raw, context, device, .. } = *target;
            let bound = BoundStream { id: stream, raw, context, device, is_destroyable: target.is_destroyable() };
            let before = object.bound.replace(bound);
            let before = before.as_ref().and_then(BoundStream::registered);
            self.stream_users.rebind(StreamUser::Exec(exec), before, bound.registered());
        }
        Ok(())
    }

    /// Unbinds an executable from a stream that is about to be destroyed.
    pub(crate) fn unbind_exec(&self, exec: GraphExecId, stream: StreamId) {
        // Waits for launches in progress, and for a call that destroys the executable.
        if let Some(mut object) = self.execs.wait_exclusive(exec.0) {
            object.bound.take_if(|bound| bound.id == stream);
        }
    }

    /// `graph_exec_set_kernel` of the contract.
    ///
    /// # Safety
    /// As there.
    pub(crate) unsafe fn set_kernel(
        &self,
        exec: GraphExecId,
        node: NodeId,
        function: FunctionId,
        shape: LaunchShape,
        args: &[KernelArg],
    ) -> Result<()> {
        let site = self.enter(Call::GraphExecSetKernel)?;
        let object = self.exec(site, exec)?;
        let function = self.function(site, function)?;
        check_shape(site, shape)?;
        let _current = self.make_current(site, object.context)?;
        // CUDA reads the template's node, so no other call may use or destroy the template meanwhile.
        let mut template = lock(&object.template);
        if !template.is_alive {
            let detail =
                format!("{}, which {exec} was instantiated from, is destroyed, and its nodes with it", object.graph);
            return Err(site.explain(ErrorCode::InvalidValue, detail));
        }
        let raw = template.raw;
        let kernels = match &mut template.kernels {
            Some(kernels) => kernels,
            unknown => unknown.insert(self.kernels_of(site, raw)?),
        };
        if !kernels.contains(&node.0) {
            let detail = format!("{node} is no kernel of {}, which {exec} was instantiated from", object.graph);
            return Err(site.explain(ErrorCode::InvalidValue, detail));
        }
        // Legal while streams capture, in every mode: seen on an H200 with CUDA 13.0.
        let node = NodeHandle::from_number(node.0);
        let ([gx, gy, gz], [bx, by, bz]) = (shape.grid, shape.block);
        let set = |arguments, extra| {
            let parameters = sys::CUDA_KERNEL_NODE_PARAMS {
                func: function.raw.raw(),
                gridDimX: gx,
                gridDimY: gy,
                gridDimZ: gz,
                blockDimX: bx,
                blockDimY: by,
                blockDimZ: bz,
                sharedMemBytes: shape.shared_bytes,
                kernelParams: arguments,
                extra,
                // Unused: there is a function.
                kern: ptr::null_mut(),
                ctx: ptr::null_mut(),
            };
            // SAFETY: the executable is held exclusively; the node is one of the template that it was instantiated
            // from, which is live and locked; the function is live and the arguments are its own, which the caller
            // promises. CUDA copies the arguments.
            unsafe { (self.api.graph_exec_kernel_node_set_params)(object.raw.raw(), node.raw(), &raw const parameters) }
        };
        self.with_arguments(site, &function, args, set)?;
        function.used_by_graph(object.family.as_ref());
        Ok(())
    }

    /// `graph_exec_destroy` of the contract.
    pub(crate) fn destroy_exec(&self, exec: GraphExecId) -> Result<()> {
        let site = self.enter(Call::GraphExecDestroy)?;
        let object = self.execs.exclusive(exec.0).ok_or_else(|| site.error(ErrorCode::InvalidHandle))?;
        let _current = self.make_current(site, object.context)?;
        // Captures forbid it, though it waits for nothing; the contract allows it.
        let _relaxed = self.relax_capture_mode(site)?;
        // SAFETY: `raw` came from cuGraphInstantiateWithFlags, and no other call can use it.
        site.check(unsafe { (self.api.graph_exec_destroy)(object.raw.raw()) })?;
        if let Some(stream) = object.bound.as_ref().and_then(BoundStream::registered) {
            self.stream_users.rebind(StreamUser::Exec(exec), Some(stream), None);
        }
        object.remove();
        Ok(())
    }

    /// Prepares launches of `exec` on `stream` that cost what CUDA's own function costs, as a baseline for benchmarks.
    /// Until the result is dropped, calls that use the executable, or destroy it or the stream, wait. On the same
    /// thread they deadlock.
    ///
    /// # Safety
    /// As for [`Graphs::graph_launch`](warpool_driver::Graphs::graph_launch), for every launch through the result.
    pub unsafe fn bare_launcher(&self, exec: GraphExecId, stream: StreamId) -> Result<BareLaunch<'_>> {
        let site = self.enter_named("bare_launcher")?;
        let exec = self.exec(site, exec)?;
        let stream = self.stream(site, stream)?;
        let current = self.on_stream(site, &stream)?;
        Ok(BareLaunch { site, launch: self.api.graph_launch, _current: current, exec, stream })
    }
}

/// An executable and a stream that are locked, with the stream's context current on this thread, so that a launch is
/// nothing but `cuGraphLaunch`. See [`CudaDriver::bare_launcher`].
pub struct BareLaunch<'a> {
    site: CallSite<'a>,
    launch: unsafe extern "C" fn(sys::CUgraphExec, sys::CUstream) -> u32,
    /// The context is current on this thread, which the value cannot leave: the lock guards below are not `Send`.
    _current: CurrentContext<'a>,
    exec: Exclusive<'a, Exec>,
    stream: Shared<'a, Stream>,
}

impl BareLaunch<'_> {
    /// Launches the graph, by nothing but CUDA's own function.
    pub fn launch(&mut self) -> Result<()> {
        // SAFETY: the executable is held exclusively, and the stream is live. The caller of `bare_launcher` promised
        // what the nodes need.
        self.site.check(unsafe { (self.launch)(self.exec.raw.raw(), self.stream.raw.raw()) })
    }
}

impl fmt::Debug for BareLaunch<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BareLaunch").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use warpool_driver::{CaptureMode, Captures, Graphs, InstantiateOptions, Node, NodeKind, Streams};

    use super::*;
    use crate::fake_cuda::{self, DEVICE, NODE_QUERIES};

    /// A graph of a kernel and a callback, and its executable.
    fn graph(driver: &CudaDriver, function: FunctionId) -> Result<(GraphId, GraphExecId, Vec<Node>)> {
        let stream = driver.stream_create(DEVICE, Default::default())?;
        driver.capture_begin(stream, CaptureMode::Relaxed)?;
        fake_cuda::launch(driver, function, LaunchShape::ONE, &[KernelArg::U64(1)], stream)?;
        driver.stream_host_callback(stream, Arc::new(|| {}))?;
        let graph = driver.capture_end(stream)?;
        let exec = driver.graph_instantiate(graph, InstantiateOptions::default())?;
        Ok((graph, exec, driver.graph_topology(graph)?.nodes))
    }

    #[test]
    fn only_kernels_of_the_live_template_can_be_changed() -> Result<()> {
        let driver = fake_cuda::driver();
        let function = fake_cuda::kernel(&driver, &[8]);
        let (template, exec, nodes) = graph(&driver, function)?;
        let (_, _, others) = graph(&driver, function)?;
        assert_eq!([nodes[0].kind, nodes[1].kind], [NodeKind::Kernel, NodeKind::HostCallback]);
        let set =
            |exec, node, shape, args: &[KernelArg]| fake_cuda::set_kernel(&driver, exec, node, function, shape, args);
        let one = [KernelArg::U64(2)];
        set(exec, nodes[0].id, LaunchShape::ONE, &one)?;

        let refused = |result: Result<()>| {
            let error = result.expect_err("it is refused");
            (error.code, error.detail.unwrap_or_default().into_string())
        };
        for node in [nodes[1].id, others[0].id, NodeId(0), NodeId(u64::MAX)] {
            let (code, why) = refused(set(exec, node, LaunchShape::ONE, &one));
            assert_eq!(code, ErrorCode::InvalidValue);
            assert!(why.contains("is no kernel of graph"), "{why}");
        }
        let (code, why) = refused(set(exec, nodes[0].id, LaunchShape::ONE, &[]));
        assert_eq!((code, &*why), (ErrorCode::InvalidValue, "k takes 1 arguments, 0 are given"));
        let none = LaunchShape { grid: [0; 3], ..LaunchShape::ONE };
        assert_eq!(refused(set(exec, nodes[0].id, none, &one)).0, ErrorCode::InvalidValue);
        let unknown = fake_cuda::set_kernel(&driver, exec, nodes[0].id, FunctionId(99), LaunchShape::ONE, &one);
        assert_eq!(refused(unknown).0, ErrorCode::InvalidHandle);
        assert_eq!(refused(set(GraphExecId(99), nodes[0].id, LaunchShape::ONE, &one)).0, ErrorCode::InvalidHandle);

        driver.graph_destroy(template)?;
        let (code, why) = refused(set(exec, nodes[0].id, LaunchShape::ONE, &one));
        assert_eq!(code, ErrorCode::InvalidValue);
        assert!(why.contains("is destroyed"), "{why}");
        driver.graph_exec_destroy(exec)
    }

    #[test]
    fn nodes_are_queried_once_and_captures_allow_new_arguments() -> Result<()> {
        let driver = fake_cuda::driver();
        let function = fake_cuda::kernel(&driver, &[8]);
        let (_, exec, nodes) = graph(&driver, function)?;
        let stream = driver.stream_create(DEVICE, Default::default())?;
        driver.capture_begin(stream, CaptureMode::Global)?;
        let mut queries = [0; 2];
        for queries in &mut queries {
            fake_cuda::set_kernel(&driver, exec, nodes[0].id, function, LaunchShape::ONE, &[KernelArg::U64(3)])?;
            *queries = NODE_QUERIES.get();
        }
        assert_eq!(queries[0], queries[1]);
        driver.capture_end(stream).map(drop)
    }

    #[test]
    fn no_executable_is_bound_to_a_destroyed_stream() -> Result<()> {
        let driver = fake_cuda::driver();
        let (_, exec, _) = graph(&driver, fake_cuda::kernel(&driver, &[8]))?;
        let [a, b] = [(); 2].map(|()| driver.stream_create(DEVICE, Default::default()).expect("a stream"));
        let bound = || driver.execs.wait_exclusive(exec.0).and_then(|exec| exec.bound.map(|bound| bound.id));
        // One launch does not bind, and neither does alternating.
        for (stream, then) in [(a, None), (a, Some(a)), (b, Some(a)), (a, Some(a)), (b, Some(a)), (b, Some(b))] {
            fake_cuda::launch_graph(&driver, exec, stream)?;
            assert_eq!(bound(), then);
        }
        assert_eq!(driver.stream_users.count(), 1);
        driver.stream_destroy(b)?;
        assert_eq!((bound(), driver.stream_users.count()), (None, 0));
        assert_eq!(
            fake_cuda::launch_graph(&driver, exec, b).err().map(|error| error.code),
            Some(ErrorCode::InvalidHandle)
        );

        (0..2).try_for_each(|_| fake_cuda::launch_graph(&driver, exec, a))?;
        driver.graph_exec_destroy(exec)?;
        assert_eq!(driver.stream_users.count(), 0);
        driver.stream_destroy(a)
    }

    fn bare(driver: &CudaDriver, exec: GraphExecId, stream: StreamId) -> Result<BareLaunch<'_>> {
        // SAFETY: the fake driver runs no graphs.
        unsafe { driver.bare_launcher(exec, stream) }
    }

    #[test]
    fn a_bare_launch_locks_what_it_uses() -> Result<()> {
        let driver = fake_cuda::driver();
        let (_, exec, _) = graph(&driver, fake_cuda::kernel(&driver, &[8]))?;
        let stream = driver.stream_create(DEVICE, Default::default())?;
        assert!(bare(&driver, GraphExecId(99), stream).is_err());
        assert!(bare(&driver, exec, StreamId(99)).is_err());
        let mut bare = bare(&driver, exec, stream)?;
        std::thread::scope(|scope| {
            let destroyer = scope.spawn(|| driver.graph_exec_destroy(exec));
            for _ in 0..100 {
                bare.launch()?;
            }
            drop(bare);
            destroyer.join().expect("it does not panic")
        })?;
        assert_eq!(
            fake_cuda::launch_graph(&driver, exec, stream).err().map(|error| error.code),
            Some(ErrorCode::InvalidHandle)
        );
        driver.stream_destroy(stream)
    }
}
