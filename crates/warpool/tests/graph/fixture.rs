//! A simulated device with an allocator, a stream to capture on and a kernel, and a check for leaks at the end.

use std::sync::Arc;

use warpool::driver::sim::{HazardKind, ObjectCounts, SimConfig};
use warpool::driver::{Copies as _, DevicePtr, FunctionId, HostKernel, KernelSource, Kernels as _, Pattern};
use warpool::graph::{BufferKey, CaptureOptions, Graph, GraphError, GraphOptions};
use warpool::memory::MemPoolId;
use warpool::{Error, StreamLease};

use crate::common::memory::{FIRST, TestContext};

static KERNELS: KernelSource = KernelSource {
    name: "graph tests",
    cuda: "",
    host_kernels: &[HostKernel::new("add", |kernel| {
        let (to, n, value) = (kernel.arg_ptr(0)?, kernel.arg_u32(1)? as usize, kernel.arg_u32(2)?);
        let sums: Vec<u32> = kernel.read_u32(to, n)?.iter().map(|old| old.wrapping_add(value)).collect();
        kernel.write_u32(to, &sums)
    })],
};

/// A machine with an allocator, and a stream to capture on.
pub struct CaptureFixture {
    pub context: TestContext,
    pub add: FunctionId,
    pub side: StreamLease,
    start: ObjectCounts,
}

impl CaptureFixture {
    pub fn new() -> Self {
        Self::with("")
    }

    pub fn with(settings: &str) -> Self {
        Self::on(SimConfig::default().with_devices(2), settings)
    }

    pub fn on(config: SimConfig, settings: &str) -> Self {
        let context = TestContext::with_config(config, settings);
        let module = context.sim.module_load(FIRST, &KERNELS).unwrap();
        let add = context.sim.function_get(module, "add").unwrap();
        let side = context.device().lease_stream().unwrap();
        let start = context.sim.object_counts();
        Self { context, add, side, start }
    }

    pub fn graph(&self) -> Graph {
        self.graph_with(GraphOptions::default())
    }

    pub fn graph_with(&self, options: GraphOptions) -> Graph {
        Graph::new(&self.context.any(), &self.context.device(), options).unwrap()
    }

    /// A graph that sets a word to `value`, and the buffer that holds it.
    pub fn filled(&self, value: u32) -> (Graph, BufferKey) {
        let mut graph = self.graph();
        let key = self.fill_into(&mut graph, CaptureOptions::default(), value);
        (graph, key)
    }

    pub fn fill_into(&self, graph: &mut Graph, options: CaptureOptions<'_>, value: u32) -> BufferKey {
        graph
            .capture(&self.side, options, |capture| {
                let stream = capture.stream().clone();
                let key = capture.allocate(4)?;
                capture.fill(key, Pattern::U32(value), 1, &stream)?;
                Ok(key)
            })
            .unwrap()
    }

    pub fn word(&self, ptr: DevicePtr) -> u32 {
        self.context.device().synchronize().unwrap();
        let mut bytes = [0; 4];
        self.context.sim.download(FIRST, ptr, &mut bytes).unwrap();
        u32::from_le_bytes(bytes)
    }

    /// Replays and compares.
    pub fn expect(&self, graph: &Graph, key: BufferKey, value: u32) {
        graph.replay(&self.context.main).unwrap();
        assert_eq!(self.word(graph.buffer(key).unwrap().ptr()), value);
    }

    /// Checks that a capture works, after an error.
    pub fn expect_usable(&self, graph: &mut Graph) {
        let key = self.fill_into(graph, CaptureOptions::default(), 77);
        self.expect(graph, key, 77);
    }

    /// Clears the hazards of those kinds, which the test causes on purpose.
    pub fn expect_hazards(&self, kinds: &[HazardKind]) {
        let hazards = self.context.sim.hazards();
        assert!(hazards.iter().all(|hazard| kinds.contains(&hazard.kind)), "{hazards:#?}");
        self.context.sim.clear_hazards();
    }

    /// After all graphs are dropped: checks that nothing is leaked.
    pub fn finish(self) {
        // The next reset destroys what destructors left.
        self.graph().reset().unwrap();
        // No request is routed to a destroyed pool.
        let block = self.context.alloc_on(&self.side, 512);
        assert_eq!(self.context.segments_of(MemPoolId::DEFAULT).iter().filter(|one| one.allocated_size > 0).count(), 1);
        self.context.free(block);
        self.context.trim();
        self.context.device().event_pool().trim().unwrap();
        let now = self.context.sim.object_counts();
        assert_eq!((now.graphs, now.graph_execs, now.captures), (0, 0, 0), "leaked");
        assert_eq!((now.allocations, now.mappings, now.reservations), (0, 0, 0), "leaked");
        assert_eq!(now.bytes_used, self.start.bytes_used, "memory leaked");
        // The driver is not called as long as no capture is counted.
        let calls = self.context.sim.calls_made();
        assert!(!self.context.instance.is_capturing(&self.side).unwrap());
        assert_eq!(self.context.sim.calls_made(), calls, "a capture still counts");
        assert_eq!(self.context.pools().capture_ended(FIRST), Err(Error::NotCapturing { device: FIRST }));
        assert_eq!(Arc::strong_count(&self.context.allocator), 1, "the allocator is still referenced");
        self.context.finish();
    }
}

pub fn graph_error<T: std::fmt::Debug>(outcome: warpool::Result<T>) -> GraphError {
    match outcome {
        Err(Error::Graph(error)) => error,
        other => panic!("not a graph's error: {other:?}"),
    }
}
