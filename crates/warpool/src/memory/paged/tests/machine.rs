//! A small simulated device with checked memory: every page behind a block contains its owner's tag, and kernels check
//! that it is still there. The allocator calls the driver through [`Faulty`], the program itself the simulation.

use std::sync::Arc;

use warpool_driver::decorate::{FaultPlan, Faulty};
use warpool_driver::sim::{Latencies, ObjectCounts, SimConfig, SimDriver};
use warpool_driver::{Call, DeviceId, Devices as _, ErrorCode, EventOptions, EventScope, Events as _, Streams as _};
use warpool_testing::{Rng, Tags};

use crate::memory::{Allocation, PagedAllocator, Settings};
use crate::{Device, Error, Instance, Result, Stream, StreamLease};

pub const DEVICE: DeviceId = DeviceId(0);
pub const MIB: u64 = 1 << 20;

pub struct Machine {
    pub sim: Arc<SimDriver>,
    pub faulty: Arc<Faulty>,
    pub device: Device,
    pub paged: Arc<PagedAllocator>,
    pub streams: Vec<Stream>,
    pub capacity: u64,
    /// The size of the largest pages.
    pub page_bytes_max: u64,
    leases: Vec<StreamLease>,
    tags: Tags,
    start: ObjectCounts,
}

/// How a call ended.
pub enum Outcome<T> {
    Done(T),
    OutOfMemory {
        /// Whether a driver call was made to fail in it.
        faulted: bool,
    },
    /// A driver call was made to fail in it.
    Faulted,
}

impl Machine {
    /// With so many streams; the rest is drawn from the seed.
    pub fn new(seed: u64, streams: usize, settings: Settings) -> Self {
        let mut rng = Rng::new(seed ^ 0x5eed);
        let capacity = rng.pick(&[40, 80, 160]) * MIB;
        let mut config = SimConfig::default().with_seed(seed);
        // Without it, requests that nothing disturbs take a shorter path.
        config.track_suballocations = !rng.one_in(3);
        config.queue_depth = rng.pick(&[3, 20, 1024]);
        config.latencies = if rng.one_in(2) { Latencies::flat(0) } else { Latencies::h200() };
        let mut machine = Self::with_config(config, capacity, streams, settings);
        let pairs_from = rng.pick(&[0, capacity / 4, u64::MAX]);
        let fours_from = pairs_from.max(rng.pick(&[0, capacity / 2, u64::MAX]));
        machine.paged.set_page_sizes(pairs_from, fours_from);
        machine.page_bytes_max = match (pairs_from, fours_from) {
            (u64::MAX, _) => 2 * MIB,
            (_, u64::MAX) => 4 * MIB,
            _ => 8 * MIB,
        };
        machine
    }

    /// With so much memory and so many streams.
    pub fn with_capacity(capacity: u64, streams: usize, settings: Settings) -> Self {
        Self::with_config(SimConfig::default(), capacity, streams, settings)
    }

    fn with_config(config: SimConfig, capacity: u64, streams: usize, settings: Settings) -> Self {
        // Beside the allocator's pages there is room for the context and the tags.
        let mut config = config.with_capacity(capacity + 4 * MIB);
        config.devices[0].bytes_context = 2 * MIB;
        let sim = Arc::new(SimDriver::new(config));
        let faulty = Arc::new(Faulty::new(sim.clone(), FaultPlan::new()));
        let instance = Instance::new(faulty.clone()).unwrap();
        let device = instance.device(0).unwrap();
        let leases: Vec<StreamLease> = (0..streams).map(|_| device.lease_stream().unwrap()).collect();
        let streams = leases.iter().map(|lease| lease.stream().clone()).collect();
        let tags = Tags::new(&sim, DEVICE);
        let paged = Arc::new(PagedAllocator::new(&instance, settings).unwrap());
        let start = sim.object_counts();
        Self { sim, faulty, device, paged, streams, capacity, page_bytes_max: 2 * MIB, leases, tags, start }
    }

    /// Makes a call of the allocator, in which driver calls fail by the plan.
    pub fn call<T>(&self, plan: Option<FaultPlan>, call: impl FnOnce() -> Result<T>) -> Outcome<T> {
        let before = self.faulty.injected().len();
        if let Some(plan) = plan {
            self.faulty.set_plan(plan);
        }
        let outcome = call();
        self.faulty.clear_plan();
        let faulted = self.faulty.injected().len() > before;
        match outcome {
            Ok(result) => Outcome::Done(result),
            Err(Error::OutOfMemory(_)) => Outcome::OutOfMemory { faulted },
            Err(_) if faulted => Outcome::Faulted,
            Err(error) => panic!("without a fault: {error}"),
        }
    }

    /// Which driver calls of one call of the allocator fail.
    pub fn draw_plan(rng: &mut Rng) -> FaultPlan {
        let code = rng.pick(&[ErrorCode::OutOfMemory, ErrorCode::NotPermitted, ErrorCode::Unknown(999)]);
        let vm = [Call::VmCreate, Call::VmMap, Call::VmSetAccess, Call::VmUnmap, Call::VmRelease];
        let events = [Call::EventCreate, Call::EventRecord, Call::EventQuery, Call::StreamWaitEvent];
        match rng.below(5) {
            0 => FaultPlan::new().fail_nth_of_all(1 + rng.u64_below(12), code),
            1 => FaultPlan::new().fail_fraction(&vm, 0.2, rng.u64(), code),
            2 => FaultPlan::new().fail_fraction(&events, 0.5, rng.u64(), code),
            3 => FaultPlan::new().fail_fraction(&[rng.pick(&vm)], 1.0, rng.u64(), code),
            _ => FaultPlan::new().fail_fraction(&[], 0.1, rng.u64(), code),
        }
    }

    /// Queues a write of a tag into every page behind a block.
    pub fn write_tag(&self, block: &Allocation, tag: u32, stream: &Stream) {
        self.tags.write_pages(block.ptr, block.bytes_requested, tag, stream.id());
    }

    /// Queues a check that every page behind a block still contains its tag.
    pub fn check_tag(&self, block: &Allocation, tag: u32, stream: &Stream) {
        self.tags.check_pages(block.ptr, block.bytes_requested, tag, stream.id());
    }

    /// The later work of `stream` waits for the work of `other`.
    pub fn wait(&self, stream: &Stream, other: &Stream) {
        if stream == other {
            return;
        }
        let event = self.sim.event_create(DEVICE, EventOptions::default()).unwrap();
        self.sim.event_record(event, other.id(), EventScope::Plain).unwrap();
        self.sim.stream_wait_event(stream.id(), event, EventScope::Plain).unwrap();
        self.sim.event_destroy(event).unwrap();
    }

    /// After everything was freed: the first defect that the simulation saw, if any. Panics if something is left.
    pub fn finish(&self) -> Option<String> {
        self.sim.device_synchronize(DEVICE).unwrap();
        let defect = self.defect();
        self.device.event_pool().trim().unwrap();
        let mut end = self.sim.object_counts();
        // The allocator keeps its addresses, in which nothing is mapped any more.
        end.reservations = self.start.reservations;
        assert_eq!(end, self.start, "driver objects at the end and at the start; {} leases", self.leases.len());
        defect
    }

    /// After a synchronization: a tag that was overwritten, or a hazard.
    pub fn defect(&self) -> Option<String> {
        let lost = self.tags.mismatch().map(|(tag, other)| format!("block {tag} contained {other}"));
        lost.or_else(|| self.sim.hazards().first().map(ToString::to_string))
    }
}
