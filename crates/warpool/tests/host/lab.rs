//! A lab for the host allocator: a simulated machine that counts calls, an allocator on it, and an end that looks for
//! everything that may have gone wrong. The rule: a test that makes a lab ends with [`HostLab::finish`], with all its
//! blocks gone.

use std::sync::Arc;

use warpool::driver::decorate::Counting;
use warpool::driver::sim::{ObjectCounts, SimConfig, SimDriver};
use warpool::driver::{Copies as _, DevicePtr, HostPtr, Memory as _};
use warpool::memory::{BlockState, HostAllocator, HostBlock, HostStats, SegmentInfo, Settings, Snapshot};
use warpool::{Device, Error, Instance, Stream};

pub const KIB: u64 = 1 << 10;
pub const MIB: u64 = 1 << 20;
pub const GIB: u64 = 1 << 30;

pub struct HostLab {
    pub sim: Arc<SimDriver>,
    pub counting: Arc<Counting>,
    pub instance: Instance,
    pub pinned: HostAllocator,
    start: ObjectCounts,
}

impl HostLab {
    pub fn new(settings: &str) -> Self {
        Self::on(SimConfig::default(), settings)
    }

    pub fn on(config: SimConfig, settings: &str) -> Self {
        let sim = Arc::new(SimDriver::new(config));
        let counting = Arc::new(Counting::new(sim.clone()));
        let instance = Instance::new(counting.clone()).expect("a simulated device");
        let settings = Settings::parse(settings).expect("settings without mistakes").pinned;
        let pinned = HostAllocator::new(&instance, settings);
        let start = sim.object_counts();
        Self { sim, counting, instance, pinned, start }
    }

    pub fn device(&self) -> Device {
        self.instance.device(0).unwrap()
    }

    /// A stream in no order with the others.
    pub fn stream(&self) -> Stream {
        self.device().pool_stream().unwrap()
    }

    pub fn alloc(&self, bytes: u64) -> HostBlock {
        let block = self.pinned.allocate(bytes).unwrap();
        self.pinned.check();
        block
    }

    /// Asks for more than a cap allows, and returns the report.
    pub fn capped(&self, bytes: u64) -> warpool::memory::PinnedCapReport {
        let outcome = self.pinned.allocate(bytes);
        self.pinned.check();
        match outcome {
            Err(Error::PinnedCap(report)) => *report,
            other => panic!("{bytes} bytes should be too much: {other:?}"),
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

    /// How much is pinned.
    pub fn pinned_bytes(&self) -> u64 {
        let bytes = self.stats().allocated_bytes.current;
        assert_eq!(self.stats().pinned_bytes_by_device.iter().sum::<u64>(), bytes);
        bytes
    }

    /// Other settings from here on.
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

    /// How the block that starts there stands.
    pub fn state_at(&self, ptr: HostPtr) -> BlockState {
        let segments = self.segments();
        let mut blocks = segments.iter().flat_map(|segment| &segment.blocks);
        blocks.find(|block| block.address == ptr.0).expect("a block starts there").state
    }

    /// Nothing begins in the stream from now on.
    pub fn pause_stream(&self, stream: &Stream) {
        self.sim.pause_stream(stream.id()).unwrap();
    }

    /// All that the stream has is done, and it is held no more.
    pub fn let_go(&self, stream: &Stream) {
        self.sim.run_paused(stream.id(), u64::MAX).unwrap();
        self.sim.resume_stream(stream.id()).unwrap();
        stream.synchronize().unwrap();
    }

    /// Copies a block to the device and says so.
    pub fn upload(&self, block: &HostBlock, stream: &Stream) {
        let to = self.sim.mem_alloc(stream.device_id(), block.bytes()).unwrap();
        self.sim.copy(to.into(), block.ptr().into(), block.bytes(), stream.id()).unwrap();
        block.record_use(stream).unwrap();
    }

    /// A piece of device memory with that in it.
    pub fn device_bytes(&self, bytes: &[u8]) -> DevicePtr {
        let ptr = self.sim.mem_alloc(self.device().id(), bytes.len() as u64).unwrap();
        self.sim.upload(self.device().id(), ptr, bytes).unwrap();
        ptr
    }

    pub fn assert_no_hazards(&self) {
        assert_eq!(self.sim.hazards(), [], "hazards");
    }

    /// Closes; nothing stays pinned, and nothing was used that nobody had.
    pub fn finish(self) {
        self.pinned.check();
        for device in self.instance.devices() {
            device.synchronize().unwrap();
        }
        self.assert_no_hazards();
        self.pinned.close().unwrap();
        assert_eq!(self.sim.object_counts().pinned, self.start.pinned, "pinned memory left behind");
    }
}
