//! A small simulated device with checked memory: every page behind a block contains its owner's tag, and kernels check
//! that it is still there. The allocator calls the driver through [`Faulty`], the program itself the simulation.

use std::sync::Arc;

use warpool_driver::decorate::{FaultPlan, Faulty};
use warpool_driver::sim::{ObjectCounts, SimConfig, SimDriver};
use warpool_driver::{DeviceId, Devices as _, EventOptions, EventScope, Events as _, Streams as _};
use warpool_testing::Tags;

use crate::memory::{Allocation, PagedAllocator, Settings};
use crate::{Device, Instance, Stream, StreamLease};

pub const DEVICE: DeviceId = DeviceId(0);
pub const MIB: u64 = 1 << 20;

pub struct Machine {
    pub sim: Arc<SimDriver>,
    pub faulty: Arc<Faulty>,
    pub device: Device,
    pub paged: Arc<PagedAllocator>,
    pub streams: Vec<Stream>,
    leases: Vec<StreamLease>,
    tags: Tags,
    start: ObjectCounts,
}

impl Machine {
    /// With so much memory and so many streams, and pages of one slot.
    pub fn with_capacity(capacity: u64, streams: usize, settings: Settings) -> Self {
        // Beside the allocator's pages there is room for the context and the tags.
        let mut config = SimConfig::default().with_capacity(capacity + 4 * MIB);
        config.devices[0].bytes_context = 2 * MIB;
        let sim = Arc::new(SimDriver::new(config));
        let faulty = Arc::new(Faulty::new(sim.clone(), FaultPlan::new()));
        let instance = Instance::new(faulty.clone()).unwrap();
        let device = instance.device(0).unwrap();
        let leases: Vec<StreamLease> = (0..streams).map(|_| device.lease_stream().unwrap()).collect();
        let streams = leases.iter().map(|lease| lease.stream().clone()).collect();
        let tags = Tags::new(&sim, DEVICE);
        let paged = Arc::new(PagedAllocator::new(&instance, settings).unwrap());
        paged.set_page_sizes(u64::MAX, u64::MAX);
        let start = sim.object_counts();
        Self { sim, faulty, device, paged, streams, leases, tags, start }
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
