//! An allocator on a simulated device whose driver calls are counted. Every test ends with [`TestContext::finish`],
//! after all its blocks are dropped: it checks that nothing stays pinned and that there was no hazard.

use std::sync::Arc;

use warpool::driver::decorate::Counting;
use warpool::driver::sim::{ObjectCounts, SimConfig, SimDriver};
use warpool::driver::{Copies as _, DevicePtr, HostPtr, Memory as _};
use warpool::memory::host::HostStats;
use warpool::memory::report::{BlockState, SegmentInfo, Snapshot};
use warpool::memory::{HostAllocator, HostBlock, Settings};
use warpool::{Device, Error, Instance, Stream};

pub const KIB: u64 = 1 << 10;
pub const MIB: u64 = 1 << 20;
pub const GIB: u64 = 1 << 30;

pub struct TestContext {
    pub sim: Arc<SimDriver>,
    pub counting: Arc<Counting>,
    pub instance: Instance,
    pub pinned: HostAllocator,
    start: ObjectCounts,
}

impl TestContext {
    pub fn new(settings: &str) -> Self {
        Self::on(SimConfig::default(), settings)
    }

    pub fn on(config: SimConfig, settings: &str) -> Self {
        let sim = Arc::new(SimDriver::new(config));
        let counting = Arc::new(Counting::new(sim.clone()));
        let instance = Instance::new(counting.clone()).expect("a simulated device");
        let settings = Settings::parse(settings).expect("valid settings").pinned;
        let pinned = HostAllocator::new(&instance, settings);
        let start = sim.object_counts();
        Self { sim, counting, instance, pinned, start }
    }

    pub fn device(&self) -> Device {
        self.instance.device(0).unwrap()
    }

    /// A stream that is not ordered with others.
    pub fn stream(&self) -> Stream {
        self.device().pool_stream().unwrap()
    }

    pub fn alloc(&self, bytes: u64) -> HostBlock {
        let block = self.pinned.allocate(bytes).unwrap();
        self.pinned.check();
        block
    }

    /// Requests more than a cap allows, and returns the report.
    pub fn refused_by_cap(&self, bytes: u64) -> warpool::memory::report::PinnedCapReport {
        let outcome = self.pinned.allocate(bytes);
        self.pinned.check();
        match outcome {
            Err(Error::PinnedCap(report)) => *report,
            other => panic!("{bytes} bytes should exceed the cap: {other:?}"),
        }
    }

    pub fn free(&self, block: HostBlock) {
        block.free().unwrap();
        self.pinned.check();
    }

    pub fn trim(&self, target: u64) -> u64 {
        let bytes = self.pinned.trim(target).unwrap();
        self.pinned.check();
        bytes
    }

    pub fn stats(&self) -> HostStats {
        self.pinned.stats()
    }

    /// The pinned bytes.
    pub fn pinned_bytes(&self) -> u64 {
        let bytes = self.stats().allocated_bytes.current;
        assert_eq!(self.stats().pinned_bytes_by_device.iter().sum::<u64>(), bytes);
        bytes
    }

    pub fn set(&self, settings: &str) {
        self.pinned.set_settings(Settings::parse(settings).unwrap().pinned);
    }

    pub fn snapshot(&self) -> Snapshot {
        let mut snapshot = Snapshot::default();
        self.pinned.add_to(&mut snapshot);
        snapshot
    }

    pub fn segments(&self) -> Vec<SegmentInfo> {
        self.snapshot().host_segments.unwrap()
    }

    /// The state of the block at that address.
    pub fn state_at(&self, ptr: HostPtr) -> BlockState {
        let segments = self.segments();
        let mut blocks = segments.iter().flat_map(|segment| &segment.blocks);
        blocks.find(|block| block.address == ptr.0).expect("a block at that address").state
    }

    /// Pauses a stream: none of its work starts from now on.
    pub fn pause_stream(&self, stream: &Stream) {
        self.sim.pause_stream(stream.id()).unwrap();
    }

    /// Runs all work of a paused stream, and resumes it.
    pub fn finish_stream(&self, stream: &Stream) {
        self.sim.run_paused(stream.id(), u64::MAX).unwrap();
        self.sim.resume_stream(stream.id()).unwrap();
        stream.synchronize().unwrap();
    }

    /// Copies a block to the device, and records the use.
    pub fn upload(&self, block: &HostBlock, stream: &Stream) {
        let to = self.sim.mem_alloc(stream.device_id(), block.bytes()).unwrap();
        self.sim.copy(to.into(), block.ptr().into(), block.bytes(), stream.id()).unwrap();
        block.record_use(stream).unwrap();
    }

    /// Device memory with that content.
    pub fn device_bytes(&self, bytes: &[u8]) -> DevicePtr {
        let ptr = self.sim.mem_alloc(self.device().id(), bytes.len() as u64).unwrap();
        self.sim.upload(self.device().id(), ptr, bytes).unwrap();
        ptr
    }

    pub fn assert_no_hazards(&self) {
        assert_eq!(self.sim.hazards(), [], "hazards");
    }

    /// Closes the allocator. Nothing stays pinned, and there was no hazard.
    pub fn finish(self) {
        self.pinned.check();
        for device in self.instance.devices() {
            device.synchronize().unwrap();
        }
        self.assert_no_hazards();
        self.pinned.close().unwrap();
        assert_eq!(self.sim.object_counts().pinned, self.start.pinned, "left pinned");
    }
}
