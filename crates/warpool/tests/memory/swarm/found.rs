//! What random programs found in the allocator, made small.

use std::sync::Arc;

use warpool::driver::sim::{SimConfig, SimDriver};
use warpool::driver::{
    CaptureMode, CaptureState, Captures as _, Copies as _, DeviceId, GraphExecId, Graphs as _, InstantiateOptions,
    Pattern,
};
use warpool::memory::{Allocate as _, CachingAllocator, DeviceAllocator, MemPoolId, PrivatePools, Route, Settings};
use warpool::{Instance, Stream, StreamLease};

const ZERO: DeviceId = DeviceId(0);
const MIB: u64 = 1 << 20;

/// Two devices with 150 MiB each.
struct Lab {
    sim: Arc<SimDriver>,
    allocator: Arc<CachingAllocator>,
    leases: Vec<StreamLease>,
}

impl Lab {
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

    /// Captures what `body` does on a stream, with a pool of its own.
    fn capture(&self, stream: &Stream, mode: CaptureMode, body: impl FnOnce()) -> (GraphExecId, MemPoolId) {
        let device = stream.device_id();
        let pool = self.allocator.create_graph_pool(device).unwrap();
        self.allocator.capture_began(device).unwrap();
        self.sim.capture_begin(stream.id(), mode).unwrap();
        let CaptureState::Active(capture) = self.sim.capture_state(stream.id()).unwrap() else { panic!("it captures") };
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

/// Contents, seed 0: the thread was guarded by the capture, but the allocator looked for captures on the trimmed device
/// only.
#[test]
fn a_capture_on_one_device_does_not_stop_a_trim_on_another() {
    let lab = Lab::new("");
    let block = lab.allocator.allocate(MIB, lab.stream(0)).unwrap();
    lab.fill(&block, lab.stream(0));
    block.record_use(lab.stream(1)).unwrap();
    drop(block);
    lab.capture(lab.stream(2), CaptureMode::Global, || {
        assert_eq!(lab.allocator.trim(ZERO, MemPoolId::DEFAULT).unwrap(), 2 * MIB);
    });
    lab.expect_no_hazards();
}

/// Contents, seed 2: the device was told that the memory was taken back, and complained about every replay.
#[test]
fn a_graph_goes_on_using_what_its_capture_gave_back() {
    let lab = Lab::new("");
    let stream = lab.stream(0);
    let (exec, _) = lab.capture(stream, CaptureMode::ThreadLocal, || {
        let block = lab.allocator.allocate(MIB, stream).unwrap();
        lab.fill(&block, stream);
        drop(block);
    });
    for _ in 0..2 {
        lab.sim.graph_launch(exec, stream.id()).unwrap();
    }
    lab.expect_no_hazards();
}

/// Contents, seed 27: what had not been counted as oversize was counted down when it was given back.
#[test]
fn a_changed_split_limit_does_not_upset_the_counters() {
    let lab = Lab::new("");
    let block = lab.allocator.allocate(41 * MIB, lab.stream(0)).unwrap();
    lab.allocator.set_settings(Settings::parse("max_split_size_mb:20").unwrap());
    let oversize = |lab: &Lab| {
        let stats = lab.allocator.stats(ZERO).unwrap();
        (stats.oversize_allocations.current, stats.oversize_segments.current)
    };
    assert_eq!(oversize(&lab), (1, 1));
    lab.allocator.check();
    drop(block);
    assert_eq!(oversize(&lab), (0, 1));
    lab.allocator.set_settings(Settings::default());
    assert_eq!(oversize(&lab), (0, 0));
    lab.allocator.trim(ZERO, MemPoolId::DEFAULT).unwrap();
    lab.allocator.check();
}

/// Contents, seed 1506: with little memory, the capture's own second request gave the memory of its first back to the
/// driver.
#[test]
fn oversize_memory_of_a_graph_stays_with_it() {
    let lab = Lab::new("max_split_size_mb:20");
    let stream = lab.stream(0);
    let (exec, _) = lab.capture(stream, CaptureMode::ThreadLocal, || {
        let block = lab.allocator.allocate(100 * MIB, stream).unwrap();
        lab.fill(&block, stream);
        drop(block);
        assert!(lab.allocator.allocate(60 * MIB, stream).is_err(), "it would fit only where the graph's memory is");
    });
    lab.sim.graph_launch(exec, stream.id()).unwrap();
    lab.expect_no_hazards();
}

/// Contents, seed 14881: given back in a capture, a block went by the order of the graph alone, though another stream
/// had used it before.
#[test]
fn uses_from_before_a_capture_are_waited_for() {
    let lab = Lab::new("graph_capture_record_stream_reuse:True");
    let (main, side) = (lab.stream(0), lab.stream(1));
    let before = lab.allocator.allocate(MIB, main).unwrap();
    lab.fill(&before, main);
    side.wait_stream(main).unwrap();
    before.record_use(side).unwrap();
    for _ in 0..50 {
        lab.fill(&before, side);
    }
    lab.capture(main, CaptureMode::ThreadLocal, || {
        side.wait_stream(main).unwrap();
        before.free().unwrap();
        main.wait_stream(side).unwrap();
        drop(lab.allocator.allocate(MIB, main).unwrap());
    });
    let after = lab.allocator.allocate(MIB, main).unwrap();
    lab.fill(&after, main);
    lab.expect_no_hazards();
}
