//! A test context for graphs: kernels that count, a stream to capture on, and checks at the end. A test that makes one
//! ends with [`GraphFixture::finish`], after all its graphs are dropped.

use warpool::driver::sim::{HazardKind, ObjectCounts, SimConfig};
use warpool::driver::{Copies as _, DevicePtr, FunctionId, HostKernel, KernelSource, Kernels as _, LaunchShape};
use warpool::graph::{BufferKey, Capture, Graph, GraphError, GraphOptions, HostOffset};
use warpool::memory::{Allocate as _, DeviceBlock};
use warpool::{Error, Result, Stream, StreamLease};

use super::launch::capture_kernel;
use super::memory::{FIRST, TestContext};

static KERNELS: KernelSource = KernelSource {
    name: "graph labs",
    cuda: "",
    host_kernels: &[
        // Adds to one word.
        HostKernel::new("add", |kernel| {
            let (to, value) = (kernel.arg_ptr(0)?, kernel.arg_u32(1)?);
            let old = kernel.read_u32(to, 1)?[0];
            kernel.write_u32(to, &[old.wrapping_add(value)])
        }),
        // Sets one word to another, plus a value.
        HostKernel::new("sum", |kernel| {
            let (to, from, value) = (kernel.arg_ptr(0)?, kernel.arg_ptr(1)?, kernel.arg_u32(2)?);
            let sum = kernel.read_u32(from, 1)?[0].wrapping_add(value);
            kernel.write_u32(to, &[sum])
        }),
        // Sets one word to the lowest bit of another.
        HostKernel::new("odd", |kernel| {
            let (to, from) = (kernel.arg_ptr(0)?, kernel.arg_ptr(1)?);
            let odd = kernel.read_u32(from, 1)?[0] % 2;
            kernel.write_u32(to, &[odd])
        }),
    ],
};

/// A simulated device with an allocator, kernels, and a stream to capture on.
pub struct GraphFixture {
    pub context: TestContext,
    pub side: StreamLease,
    add: FunctionId,
    sum: FunctionId,
    odd: FunctionId,
    start: ObjectCounts,
}

impl GraphFixture {
    pub fn new(settings: &str) -> Self {
        Self::on(SimConfig::default(), settings)
    }

    pub fn on(config: SimConfig, settings: &str) -> Self {
        let context = TestContext::with_config(config, settings);
        let module = context.sim.module_load(FIRST, &KERNELS).unwrap();
        let [add, sum, odd] = ["add", "sum", "odd"].map(|name| context.sim.function_get(module, name).unwrap());
        let side = context.device().lease_stream().unwrap();
        let start = context.sim.object_counts();
        Self { context, side, add, sum, odd, start }
    }

    pub fn graph(&self) -> Graph {
        self.graph_with(GraphOptions::default())
    }

    pub fn graph_with(&self, options: GraphOptions) -> Graph {
        Graph::new(&self.context.any(), &self.context.device(), options).unwrap()
    }

    /// A block for the stream, from the pool that it is routed to.
    pub fn block(&self, bytes: u64, stream: &Stream) -> DeviceBlock {
        self.context.any().allocate(bytes, stream).unwrap()
    }

    /// Enqueues `to += value` in a stream.
    pub fn add(&self, to: DevicePtr, value: u32, stream: &Stream) {
        self.try_add(to, value, stream).unwrap();
    }

    /// As [`add`](Self::add), with a result, for the body of a capture.
    pub fn try_add(&self, to: DevicePtr, value: u32, stream: &Stream) -> Result<()> {
        let args = [to.into(), value.into()];
        Ok(self.context.sim.kernel_launch(self.add, LaunchShape::ONE, &args, stream.id())?)
    }

    /// Enqueues `to = from + value` in a stream.
    pub fn sum(&self, to: DevicePtr, from: DevicePtr, value: u32, stream: &Stream) {
        let args = [to.into(), from.into(), value.into()];
        self.context.sim.kernel_launch(self.sum, LaunchShape::ONE, &args, stream.id()).unwrap();
    }

    /// Captures `to += value` on the scope's stream.
    pub fn capture_add(&self, capture: &mut Capture<'_>, to: BufferKey, value: u32) -> Result<()> {
        let stream = capture.stream().clone();
        capture_kernel(capture, self.add, &[to.into(), value.into()], &stream)
    }

    /// As [`capture_add`](Self::capture_add), in pinned host memory.
    pub fn capture_add_host(&self, capture: &mut Capture<'_>, to: impl Into<HostOffset>, value: u32) -> Result<()> {
        let stream = capture.stream().clone();
        capture_kernel(capture, self.add, &[to.into().into(), value.into()], &stream)
    }

    /// Captures `to = from % 2` on the scope's stream.
    pub fn capture_odd(&self, capture: &mut Capture<'_>, to: BufferKey, from: BufferKey) -> Result<()> {
        let stream = capture.stream().clone();
        capture_kernel(capture, self.odd, &[to.into(), from.into()], &stream)
    }

    /// Waits for the device and sets a word.
    pub fn set(&self, ptr: DevicePtr, value: u32) {
        self.context.device().synchronize().unwrap();
        self.context.sim.upload(FIRST, ptr, &value.to_le_bytes()).unwrap();
    }

    /// Waits for the device and reads a word.
    pub fn word(&self, ptr: DevicePtr) -> u32 {
        self.context.device().synchronize().unwrap();
        let mut bytes = [0; 4];
        self.context.sim.download(FIRST, ptr, &mut bytes).unwrap();
        u32::from_le_bytes(bytes)
    }

    /// The address of a graph's buffer.
    pub fn at(&self, graph: &Graph, key: BufferKey) -> DevicePtr {
        graph.buffer(key).unwrap().ptr()
    }

    /// Clears the hazards of that kind, which the test causes on purpose.
    pub fn expect_hazards(&self, kind: HazardKind) {
        let hazards = self.context.sim.hazards();
        assert!(hazards.iter().all(|hazard| hazard.kind == kind), "{hazards:#?}");
        self.context.sim.clear_hazards();
    }

    /// Frees everything that is unused, including objects that destructors left.
    pub fn clean(&self) {
        self.graph().reset().unwrap();
        self.context.device().synchronize().unwrap();
        self.context.trim();
        self.context.device().event_pool().trim().unwrap();
    }

    /// After all graphs and blocks are dropped: checks that nothing is leaked.
    pub fn finish(self) {
        self.clean();
        let now = self.context.sim.object_counts();
        assert_eq!((now.graphs, now.graph_execs, now.captures), (0, 0, 0), "leaked");
        assert_eq!((now.allocations, now.mappings, now.reservations), (0, 0, 0), "leaked");
        assert_eq!((now.events, now.handles), (self.start.events, 0), "leaked");
        assert_eq!(now.bytes_used, self.start.bytes_used, "memory leaked");
        assert!(!self.context.instance.is_capturing(&self.side).unwrap());
        self.context.finish();
    }
}

pub fn graph_error<T: std::fmt::Debug>(outcome: Result<T>) -> GraphError {
    match outcome {
        Err(Error::Graph(error)) => error,
        other => panic!("not a graph's error: {other:?}"),
    }
}
