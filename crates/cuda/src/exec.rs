//! Executables: graphs made ready. Launched, changed, taken away.
//!
//! CUDA does not synchronise an executable, so whoever uses one has its row alone. Launches of different executables do
//! not wait for each other, and none takes a lock that others share.
//!
//! A launch must cost little more than `cuGraphLaunch` itself, some 1,200 ns on an H200, and locks are most of it. So
//! an executable knows the stream that it was last launched on (`holders.rs`): the next launch there locks nothing but
//! the executable.

use std::fmt;
use std::ptr;
use std::sync::{Arc, Mutex};

use cudarc::driver::sys;
use warpool_driver::{
    Call, DeviceId, ErrorCode, FunctionId, GraphExecId, GraphId, KernelArg, LaunchShape, NodeId, Result, StreamId,
};

use crate::CudaDriver;
use crate::capture::NodeHandle;
use crate::context::{Context, Current};
use crate::error::Site;
use crate::graph::Template;
use crate::holders::{Holder, may_go};
use crate::kernel::check_shape;
use crate::stream::Stream;
use crate::table::{Alone, Handle, Used, lock};

/// An executable behind its id.
pub(crate) struct Exec {
    /// CUDA's handle.
    pub(crate) raw: Handle<sys::CUgraphExec_st>,
    /// The context that it was made in.
    pub(crate) context: Context,
    /// What it was made of.
    graph: GraphId,
    template: Arc<Mutex<Template>>,
    /// The stream that it is launched on, most often.
    known: Option<KnownStream>,
    /// The stream of the last launch, if it is another. If the next is there too, it becomes the known one.
    other: Option<StreamId>,
}

/// A stream that an executable knows.
#[derive(Clone, Copy)]
struct KnownStream {
    id: StreamId,
    raw: Handle<sys::CUstream_st>,
    context: Option<Context>,
    device: DeviceId,
    may_go: bool,
}

impl Exec {
    /// An executable that was just made.
    pub(crate) const fn new(
        raw: sys::CUgraphExec,
        context: Context,
        graph: GraphId,
        template: Arc<Mutex<Template>>,
    ) -> Self {
        Self { raw: Handle::new(raw), context, graph, template, known: None, other: None }
    }
}

impl CudaDriver {
    /// The executable behind an id, ours alone as long as the result lives.
    pub(crate) fn exec(&self, site: Site<'_>, exec: GraphExecId) -> Result<Alone<'_, Exec>> {
        self.execs.turn(exec.0).ok_or_else(|| site.error(ErrorCode::InvalidHandle))
    }

    /// `graph_launch` of the contract.
    ///
    /// # Safety
    /// As there.
    pub(crate) unsafe fn launch_exec(&self, exec: GraphExecId, stream: StreamId) -> Result<()> {
        let site = self.enter(Call::GraphLaunch)?;
        let mut row = self.exec(site, exec)?;
        let Some(known) = row.known.filter(|known| known.id == stream) else {
            // SAFETY: the caller promises what the nodes need.
            return unsafe { self.launch_elsewhere(site, exec, row, stream) };
        };
        row.other = None;
        let context = known.context.map_or_else(|| self.context_of(site, known.device), Ok)?;
        let _current = self.make_current(site, context)?;
        // SAFETY: the executable is live and ours alone, its row being held, and the stream that it knows is live. The
        // caller promises what the nodes need.
        site.check(unsafe { (self.api.graph_launch)(row.raw.raw(), known.raw.raw()) })
    }

    /// Launches on a stream that the executable does not know.
    ///
    /// # Safety
    /// As `launch_exec`.
    unsafe fn launch_elsewhere(
        &self,
        site: Site<'_>,
        exec: GraphExecId,
        mut row: Alone<'_, Exec>,
        stream: StreamId,
    ) -> Result<()> {
        let target = self.stream(site, stream)?;
        let _current = self.on_stream(site, &target)?;
        // SAFETY: the executable is live and ours alone, its row being held; the stream is live. The caller promises
        // what the nodes need.
        site.check(unsafe { (self.api.graph_launch)(row.raw.raw(), target.raw.raw()) })?;
        // Once is nothing: one that goes to and fro between two streams would be noted anew each time.
        if row.other.replace(stream) == Some(stream) {
            let Stream { raw, context, device, .. } = *target;
            let known = KnownStream { id: stream, raw, context, device, may_go: may_go(&target) };
            let noted = |known: &KnownStream| known.may_go.then_some(known.id);
            let before = row.known.replace(known);
            self.holders.went(Holder::Exec(exec), before.as_ref().and_then(noted), noted(&known));
        }
        Ok(())
    }

    /// Forgets a stream that is about to go.
    pub(crate) fn exec_leaves(&self, exec: GraphExecId, stream: StreamId) {
        // Waits for launches under way, and for whoever takes the executable away. One that is gone has left.
        if let Some(mut row) = self.execs.turn(exec.0) {
            row.known.take_if(|known| known.id == stream);
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
        let row = self.exec(site, exec)?;
        let function = self.function(site, function)?;
        check_shape(site, shape)?;
        let _current = self.make_current(site, row.context)?;
        // CUDA looks at the template's node, so nobody else may look at the template, or take it away.
        let mut template = lock(&row.template);
        if !template.is_there {
            let detail = format!("{}, which {exec} was made of, is gone, and its nodes with it", row.graph);
            return Err(site.explain(ErrorCode::InvalidValue, detail));
        }
        let raw = template.raw;
        let kernels = match &mut template.kernels {
            Some(kernels) => kernels,
            unknown => unknown.insert(self.kernels_of(site, raw)?),
        };
        if !kernels.contains(&node.0) {
            let detail = format!("{node} is no kernel of {}, which {exec} was made of", row.graph);
            return Err(site.explain(ErrorCode::InvalidValue, detail));
        }
        // Legal while streams capture, in every mode: seen on an H200 with CUDA 13.0.
        let node = NodeHandle::from_number(node.0);
        let ([gx, gy, gz], [bx, by, bz]) = (shape.grid, shape.block);
        self.with_arguments(site, &function, args, |arguments, extra| {
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
                // Not looked at: there is a function.
                kern: ptr::null_mut(),
                ctx: ptr::null_mut(),
            };
            // SAFETY: the executable is live and ours alone; the node is one of the template that it was made of, which
            // is live and locked; the function is live and the arguments are its own. CUDA copies what it is given.
            unsafe { (self.api.graph_exec_kernel_node_set_params)(row.raw.raw(), node.raw(), &raw const parameters) }
        })
    }

    /// `graph_exec_destroy` of the contract.
    pub(crate) fn destroy_exec(&self, exec: GraphExecId) -> Result<()> {
        let site = self.enter(Call::GraphExecDestroy)?;
        let row = self.execs.alone(exec.0).ok_or_else(|| site.error(ErrorCode::InvalidHandle))?;
        let _current = self.make_current(site, row.context)?;
        // Captures forbid it, though it waits for nothing; the contract does not.
        let _relaxed = self.relax(site)?;
        // SAFETY: `raw` came from cuGraphInstantiateWithFlags, and nobody else can use it.
        site.check(unsafe { (self.api.graph_exec_destroy)(row.raw.raw()) })?;
        if let Some(known) = row.known.filter(|known| known.may_go) {
            self.holders.went(Holder::Exec(exec), Some(known.id), None);
        }
        row.remove();
        Ok(())
    }

    /// Prepares launches of `exec` on `stream` that cost what CUDA's own function costs, to compare others with. For
    /// benchmarks: until the result is dropped, whoever else wants to use the executable, or to take it or the stream
    /// away, waits. On the same thread that is for ever.
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

/// An executable and a stream that are held, with the stream's context current on this thread: all that is left to do
/// is `cuGraphLaunch`. See [`CudaDriver::bare_launcher`].
pub struct BareLaunch<'a> {
    site: Site<'a>,
    launch: unsafe extern "C" fn(sys::CUgraphExec, sys::CUstream) -> u32,
    /// Of this thread, on which the result therefore stays: the row's lock cannot be sent to another.
    _current: Current<'a>,
    exec: Alone<'a, Exec>,
    stream: Used<'a, Stream>,
}

impl BareLaunch<'_> {
    /// Launches the graph, by nothing but CUDA's own function.
    pub fn launch(&mut self) -> Result<()> {
        // SAFETY: the executable is live and ours alone, and the stream live, their rows being held. Whoever made this
        // promised what the nodes need.
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
    use crate::fake::{self, DEVICE, LISTED};

    /// A graph of a kernel and a callback, and an executable of it.
    fn graph(driver: &CudaDriver, function: FunctionId) -> Result<(GraphId, GraphExecId, Vec<Node>)> {
        let stream = driver.stream_create(DEVICE, Default::default())?;
        driver.capture_begin(stream, CaptureMode::Relaxed)?;
        fake::launch(driver, function, LaunchShape::ONE, &[KernelArg::U64(1)], stream)?;
        driver.stream_host_callback(stream, Arc::new(|| {}))?;
        let graph = driver.capture_end(stream)?;
        let exec = driver.graph_instantiate(graph, InstantiateOptions::default())?;
        Ok((graph, exec, driver.graph_topology(graph)?.nodes))
    }

    #[test]
    fn only_kernels_of_the_live_template_can_be_changed() -> Result<()> {
        let driver = fake::driver();
        let function = fake::kernel(&driver, &[8]);
        let (template, exec, nodes) = graph(&driver, function)?;
        let (_, _, others) = graph(&driver, function)?;
        assert_eq!([nodes[0].kind, nodes[1].kind], [NodeKind::Kernel, NodeKind::HostCallback]);
        let set = |exec, node, shape, args: &[KernelArg]| fake::set_kernel(&driver, exec, node, function, shape, args);
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
        let unknown = fake::set_kernel(&driver, exec, nodes[0].id, FunctionId(99), LaunchShape::ONE, &one);
        assert_eq!(refused(unknown).0, ErrorCode::InvalidHandle);
        assert_eq!(refused(set(GraphExecId(99), nodes[0].id, LaunchShape::ONE, &one)).0, ErrorCode::InvalidHandle);

        driver.graph_destroy(template)?;
        let (code, why) = refused(set(exec, nodes[0].id, LaunchShape::ONE, &one));
        assert_eq!(code, ErrorCode::InvalidValue);
        assert!(why.contains("is gone"), "{why}");
        driver.graph_exec_destroy(exec)
    }

    #[test]
    fn the_nodes_are_asked_for_once_and_captures_do_not_mind() -> Result<()> {
        let driver = fake::driver();
        let function = fake::kernel(&driver, &[8]);
        let (_, exec, nodes) = graph(&driver, function)?;
        let stream = driver.stream_create(DEVICE, Default::default())?;
        driver.capture_begin(stream, CaptureMode::Global)?;
        let mut asked = [0; 2];
        for asked in &mut asked {
            fake::set_kernel(&driver, exec, nodes[0].id, function, LaunchShape::ONE, &[KernelArg::U64(3)])?;
            *asked = LISTED.get();
        }
        assert_eq!(asked[0], asked[1]);
        driver.capture_end(stream).map(drop)
    }

    #[test]
    fn a_stream_that_goes_is_known_to_no_executable() -> Result<()> {
        let driver = fake::driver();
        let (_, exec, _) = graph(&driver, fake::kernel(&driver, &[8]))?;
        let [a, b] = [(); 2].map(|()| driver.stream_create(DEVICE, Default::default()).expect("it is made"));
        let known = || driver.execs.turn(exec.0).and_then(|row| row.known.map(|known| known.id));
        // One launch is not enough, and going to and fro is not either.
        for (stream, then) in [(a, None), (a, Some(a)), (b, Some(a)), (a, Some(a)), (b, Some(a)), (b, Some(b))] {
            fake::launch_graph(&driver, exec, stream)?;
            assert_eq!(known(), then);
        }
        assert_eq!(driver.holders.count(), 1);
        driver.stream_destroy(b)?;
        assert_eq!((known(), driver.holders.count()), (None, 0));
        assert_eq!(fake::launch_graph(&driver, exec, b).err().map(|error| error.code), Some(ErrorCode::InvalidHandle));

        (0..2).try_for_each(|_| fake::launch_graph(&driver, exec, a))?;
        driver.graph_exec_destroy(exec)?;
        assert_eq!(driver.holders.count(), 0);
        driver.stream_destroy(a)
    }

    fn bare(driver: &CudaDriver, exec: GraphExecId, stream: StreamId) -> Result<BareLaunch<'_>> {
        // SAFETY: the fake driver runs no graphs.
        unsafe { driver.bare_launcher(exec, stream) }
    }

    #[test]
    fn a_bare_launch_holds_what_it_uses() -> Result<()> {
        let driver = fake::driver();
        let (_, exec, _) = graph(&driver, fake::kernel(&driver, &[8]))?;
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
            fake::launch_graph(&driver, exec, stream).err().map(|error| error.code),
            Some(ErrorCode::InvalidHandle)
        );
        driver.stream_destroy(stream)
    }
}
