//! Bugs of the allocator that random programs found, reduced.

use std::sync::Arc;

use warpool::driver::sim::{SimConfig, SimDriver};
use warpool::driver::{
    CaptureMode, CaptureState, Captures as _, Copies as _, DeviceId, GraphExecId, Graphs as _, InstantiateOptions,
    Pattern,
};
use warpool::memory::pools::{PrivatePools, Route};
use warpool::memory::{Allocate as _, CachingAllocator, DeviceAllocator, MemPoolId, Settings};
use warpool::{Instance, Stream, StreamLease};

const ZERO: DeviceId = DeviceId(0);
const MIB: u64 = 1 << 20;

/// Two devices with 150 MiB each.
struct TwoDevices {
    sim: Arc<SimDriver>,
    allocator: Arc<CachingAllocator>,
    leases: Vec<StreamLease>,
}

impl TwoDevices {
    fn new(settings: &str) -> Self {
        let mut config = SimConfig::default().with_devices(2).with_capacity(150 * MIB);
        for device in &mut config.devices {
            device.bytes_context = 2 * MIB;
        }
        let sim = Arc::new(SimDriver::new(config));
        let instance = Instance::new(sim.clone()).unwrap();
        let allocator = Arc::new(CachingAllocator::new(&instance, Settings::parse(settings).unwrap()));
        let leases = [0, 0, 1].map(|device| instance.device(device).unwrap().lease_stream().unwrap());
        Self { sim, allocator, leases: leases.into() }
    }

    fn stream(&self, index: usize) -> &Stream {
        self.leases[index].stream()
    }

    fn fill(&self, block: &warpool::memory::DeviceBlock, stream: &Stream) {
        self.sim.fill(block.ptr(), Pattern::U8(1), block.bytes(), stream.id()).unwrap();
    }

    /// Captures the work of `body` on a stream, with its own pool.
    fn capture(&self, stream: &Stream, mode: CaptureMode, body: impl FnOnce()) -> (GraphExecId, MemPoolId) {
        let device = stream.device_id();
        let pool = self.allocator.create_graph_pool(device).unwrap();
        self.allocator.capture_began(device).unwrap();
        self.sim.capture_begin(stream.id(), mode).unwrap();
        let CaptureState::Active(capture) = self.sim.capture_state(stream.id()).unwrap() else {
            panic!("the stream should capture")
        };
        self.allocator.begin_routing(device, pool, Route::Capture(capture)).unwrap();
        body();
        self.allocator.end_routing(device, pool).unwrap();
        let graph = self.sim.capture_end(stream.id()).unwrap();
        self.allocator.capture_ended(device).unwrap();
        (self.sim.graph_instantiate(graph, InstantiateOptions::default()).unwrap(), pool)
    }

    fn expect_no_hazards(&self) {
        for lease in &self.leases {
            lease.stream().synchronize().unwrap();
        }
        self.allocator.check();
        let hazards: Vec<String> = self.sim.hazards().iter().map(ToString::to_string).collect();
        assert!(hazards.is_empty(), "{hazards:#?}");
    }
}

/// Contents, seed 0: the capture restricted the thread, but the allocator checked for captures on the trimmed device
/// only.
#[test]
fn trim_works_during_a_capture_on_another_device() {
    let devices = TwoDevices::new("");
    let block = devices.allocator.allocate(MIB, devices.stream(0)).unwrap();
    devices.fill(&block, devices.stream(0));
    block.record_use(devices.stream(1)).unwrap();
    drop(block);
    devices.capture(devices.stream(2), CaptureMode::Global, || {
        assert_eq!(devices.allocator.trim(ZERO, MemPoolId::DEFAULT).unwrap(), 2 * MIB);
    });
    devices.expect_no_hazards();
}

/// Contents, seed 2: the free was reported to the driver, and every replay was a hazard.
#[test]
fn replays_may_use_blocks_that_the_capture_freed() {
    let devices = TwoDevices::new("");
    let stream = devices.stream(0);
    let (exec, _) = devices.capture(stream, CaptureMode::ThreadLocal, || {
        let block = devices.allocator.allocate(MIB, stream).unwrap();
        devices.fill(&block, stream);
        drop(block);
    });
    for _ in 0..2 {
        devices.sim.graph_launch(exec, stream.id()).unwrap();
    }
    devices.expect_no_hazards();
}

/// Contents, seed 27: a block that had not been counted as oversize was subtracted when it was freed.
#[test]
fn oversize_statistics_follow_a_changed_split_limit() {
    let devices = TwoDevices::new("");
    let block = devices.allocator.allocate(41 * MIB, devices.stream(0)).unwrap();
    devices.allocator.set_settings(Settings::parse("max_split_size_mb:20").unwrap()).unwrap();
    let oversize = |devices: &TwoDevices| {
        let stats = devices.allocator.stats(ZERO).unwrap();
        (stats.oversize_allocations.current, stats.oversize_segments.current)
    };
    assert_eq!(oversize(&devices), (1, 1));
    devices.allocator.check();
    drop(block);
    assert_eq!(oversize(&devices), (0, 1));
    devices.allocator.set_settings(Settings::default()).unwrap();
    assert_eq!(oversize(&devices), (0, 0));
    devices.allocator.trim(ZERO, MemPoolId::DEFAULT).unwrap();
    devices.allocator.check();
}

/// Contents, seed 1506: with little memory, the capture's second request returned the memory of its first to the
/// driver.
#[test]
fn oversize_memory_of_a_graph_is_not_released() {
    let devices = TwoDevices::new("max_split_size_mb:20");
    let stream = devices.stream(0);
    let (exec, _) = devices.capture(stream, CaptureMode::ThreadLocal, || {
        let block = devices.allocator.allocate(100 * MIB, stream).unwrap();
        devices.fill(&block, stream);
        drop(block);
        assert!(devices.allocator.allocate(60 * MIB, stream).is_err(), "only the graph's memory would suffice");
    });
    devices.sim.graph_launch(exec, stream.id()).unwrap();
    devices.expect_no_hazards();
}

/// Contents, seed 14881: a block freed in a capture was reused by graph order alone, although another stream had used
/// it before.
#[test]
fn uses_before_a_capture_are_waited_for() {
    let devices = TwoDevices::new("graph_capture_record_stream_reuse:True");
    let (main, side) = (devices.stream(0), devices.stream(1));
    let before = devices.allocator.allocate(MIB, main).unwrap();
    devices.fill(&before, main);
    side.wait_stream(main).unwrap();
    before.record_use(side).unwrap();
    for _ in 0..50 {
        devices.fill(&before, side);
    }
    devices.capture(main, CaptureMode::ThreadLocal, || {
        side.wait_stream(main).unwrap();
        before.free().unwrap();
        main.wait_stream(side).unwrap();
        drop(devices.allocator.allocate(MIB, main).unwrap());
    });
    let after = devices.allocator.allocate(MIB, main).unwrap();
    devices.fill(&after, main);
    devices.expect_no_hazards();
}
