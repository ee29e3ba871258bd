//! A test context for the caching allocator: one simulated machine, short calls, and checks at the end. A test that
//! makes one ends with [`TestContext::finish`].

use std::sync::Arc;

use warpool::driver::sim::{SimConfig, SimDriver};
use warpool::driver::{
    CaptureId, CaptureMode, CaptureState, Captures, Copies, DeviceId, DevicePtr, GraphExecId, Graphs,
    InstantiateOptions, Pattern, StreamId,
};
use warpool::memory::pools::PrivatePools;
use warpool::memory::raw::{Allocation, Request};
use warpool::memory::report::{SegmentInfo, SnapshotOptions, Stats};
use warpool::memory::{CachingAllocator, DeviceAllocator, MemPoolId, Settings};
use warpool::{Device, Error, Instance, Result, Stream};

pub const KIB: u64 = 1 << 10;
pub const MIB: u64 = 1 << 20;
pub const GIB: u64 = 1 << 30;

/// The first device.
pub const FIRST: DeviceId = DeviceId(0);

/// A machine, an allocator on it, and the default stream of its first device.
pub struct TestContext {
    pub sim: Arc<SimDriver>,
    pub instance: Instance,
    pub allocator: Arc<CachingAllocator>,
    pub main: Stream,
}

impl TestContext {
    /// One device with 64 GiB, all of it free.
    pub fn new(settings: &str) -> Self {
        Self::with_capacity(64 * GIB, settings)
    }

    /// One device of that size, all of it free.
    pub fn with_capacity(bytes: u64, settings: &str) -> Self {
        Self::with_config(SimConfig::default().with_capacity(bytes), settings)
    }

    /// Any machine; CUDA contexts take no memory on it.
    pub fn with_config(mut config: SimConfig, settings: &str) -> Self {
        for device in &mut config.devices {
            device.bytes_context = 0;
        }
        let sim = Arc::new(SimDriver::new(config));
        let instance = Instance::new(sim.clone()).expect("a simulated device");
        let settings = Settings::parse(settings).expect("valid settings");
        let allocator = Arc::new(CachingAllocator::new(&instance, settings));
        let main = instance.device(0).unwrap().default_stream().unwrap();
        Self { sim, instance, allocator, main }
    }

    pub fn device(&self) -> Device {
        self.instance.device(0).unwrap()
    }

    /// The allocator as a trait object.
    pub fn any(&self) -> Arc<dyn DeviceAllocator> {
        self.allocator.clone()
    }

    pub fn pools(&self) -> &dyn PrivatePools {
        self.allocator.pools().unwrap()
    }

    /// A stream that is not ordered with the others.
    pub fn side_stream(&self) -> Stream {
        self.device().pool_stream().unwrap()
    }

    pub fn try_alloc(&self, bytes: u64) -> Result<Allocation> {
        let outcome = self.allocator.allocate_raw(Request::new(FIRST, self.main.id(), bytes));
        self.allocator.check();
        outcome
    }

    /// Allocates for the default stream.
    pub fn alloc(&self, bytes: u64) -> Allocation {
        self.try_alloc(bytes).unwrap()
    }

    pub fn alloc_on(&self, stream: &Stream, bytes: u64) -> Allocation {
        let allocation = self.allocator.allocate_raw(Request::new(FIRST, stream.id(), bytes)).unwrap();
        self.allocator.check();
        allocation
    }

    pub fn alloc_in(&self, pool: MemPoolId, bytes: u64) -> Allocation {
        self.alloc_in_on(pool, &self.main, bytes)
    }

    pub fn alloc_in_on(&self, pool: MemPoolId, stream: &Stream, bytes: u64) -> Allocation {
        let request = Request::new(FIRST, stream.id(), bytes).in_pool(pool);
        let allocation = self.allocator.allocate_raw(request).unwrap();
        self.allocator.check();
        allocation
    }

    /// Makes a request that runs out of memory, and returns the report.
    pub fn expect_oom(&self, bytes: u64) -> warpool::memory::OomReport {
        match self.try_alloc(bytes) {
            Err(Error::OutOfMemory(report)) => *report,
            other => panic!("a request for {bytes} bytes should fail: {other:?}"),
        }
    }

    pub fn free(&self, allocation: Allocation) {
        self.allocator.free(allocation).unwrap();
        self.allocator.check();
    }

    pub fn free_all(&self, allocations: impl IntoIterator<Item = Allocation>) {
        allocations.into_iter().for_each(|allocation| self.free(allocation));
    }

    pub fn record_use(&self, allocation: Allocation, stream: &Stream) {
        self.allocator.record_use(allocation, stream.id()).unwrap();
    }

    /// Releases the cached memory of the default pool and of released pools.
    pub fn trim(&self) -> u64 {
        let bytes = self.allocator.trim(FIRST, MemPoolId::DEFAULT).unwrap();
        self.allocator.check();
        bytes
    }

    pub fn stats(&self) -> Stats {
        self.allocator.stats(FIRST).unwrap()
    }

    pub fn bytes_reserved(&self) -> u64 {
        self.stats().reserved_bytes.all.current
    }

    pub fn bytes_allocated(&self) -> u64 {
        self.stats().allocated_bytes.all.current
    }

    /// Changes the settings.
    pub fn set(&self, settings: &str) {
        self.allocator.set_settings(self.allocator.settings().updated(settings).unwrap()).unwrap();
        self.allocator.check();
    }

    pub fn segments(&self) -> Vec<SegmentInfo> {
        self.allocator.snapshot(SnapshotOptions { pool: None, traces: false }).unwrap().segments
    }

    pub fn segments_of(&self, pool: MemPoolId) -> Vec<SegmentInfo> {
        self.allocator.snapshot(SnapshotOptions { pool: Some(pool), traces: false }).unwrap().segments
    }

    /// The sizes of all segments, by address.
    pub fn segment_sizes(&self) -> Vec<u64> {
        self.segments().iter().map(|segment| segment.total_size).collect()
    }

    /// Queues a fill of the whole block.
    pub fn fill(&self, block: Allocation, value: u8, stream: &Stream) {
        self.sim.fill(block.ptr, Pattern::U8(value), block.bytes_requested, stream.id()).unwrap();
    }

    /// Queues a fill of one byte on the default stream.
    pub fn sim_fill(&self, address: u64, value: u8) {
        self.sim_fill_id(address, value, self.main.id());
    }

    pub fn sim_fill_on(&self, address: u64, value: u8, stream: &Stream) {
        self.sim_fill_id(address, value, stream.id());
    }

    pub fn sim_fill_id(&self, address: u64, value: u8, stream: StreamId) {
        self.sim.fill(DevicePtr(address), Pattern::U8(value), 1, stream).unwrap();
    }

    /// Waits for the device and compares the first and the last byte of a block.
    pub fn assert_holds(&self, block: Allocation, value: u8) {
        self.device().synchronize().unwrap();
        for offset in [0, block.bytes_requested - 1] {
            let mut byte = [0];
            self.sim.download(block.device, DevicePtr(block.ptr.0 + offset), &mut byte).unwrap();
            assert_eq!(byte[0], value, "at {offset} of {} bytes at {}", block.bytes_requested, block.ptr);
        }
    }

    /// No work of the stream starts from now on.
    pub fn pause_stream(&self, stream: &Stream) {
        self.sim.pause_stream(stream.id()).unwrap();
    }

    /// Runs all work of a paused stream, and resumes it.
    pub fn resume_stream(&self, stream: &Stream) {
        self.sim.run_paused(stream.id(), u64::MAX).unwrap();
        self.sim.resume_stream(stream.id()).unwrap();
        stream.synchronize().unwrap();
    }

    /// Begins a capture on a stream, and reports it to the allocator.
    pub fn begin_capture(&self, stream: &Stream) -> CaptureId {
        self.sim.capture_begin(stream.id(), CaptureMode::Global).unwrap();
        self.pools().capture_began(FIRST).unwrap();
        match self.sim.capture_state(stream.id()).unwrap() {
            CaptureState::Active(id) => id,
            other => panic!("the stream should capture: {other:?}"),
        }
    }

    /// Ends the capture and instantiates the graph.
    pub fn end_capture(&self, stream: &Stream) -> GraphExecId {
        let graph = self.sim.capture_end(stream.id()).unwrap();
        self.pools().capture_ended(FIRST).unwrap();
        self.sim.graph_instantiate(graph, InstantiateOptions::default()).unwrap()
    }

    /// Waits for the devices, checks the allocator's invariants, and that the simulation saw no hazard.
    pub fn finish(self) {
        for device in self.instance.devices() {
            device.synchronize().unwrap();
        }
        self.allocator.check();
        assert_eq!(self.sim.hazards(), [], "hazards");
    }
}
