//! A small simulated device, an allocator with tags on it, and blocks with known contents. The allocator calls the
//! driver through [`Faulty`], the program itself the simulation.

use std::sync::Arc;

use warpool_driver::decorate::{FaultPlan, Faulty};
use warpool_driver::sim::{ObjectCounts, SimConfig, SimDriver};
use warpool_driver::{DeviceId, DevicePtr, Devices as _, Memory as _};
use warpool_testing::Tags as Contents;

use crate::memory::sleep::{Keep, SleepReport, Tag, TagState};
use crate::memory::{
    Allocation, CachingAllocator, DeviceAllocator, HostAllocator, MemPoolId, PagedAllocator, PinnedSettings, Request,
    Settings, Tags,
};
use crate::{Device, Instance, Result, Stream, StreamLease};

pub const DEVICE: DeviceId = DeviceId(0);
pub const MIB: u64 = 1 << 20;

/// The allocators whose pools can sleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Caching,
    Expandable,
    Paged,
}

impl Kind {
    pub const ALL: [Self; 3] = [Self::Caching, Self::Expandable, Self::Paged];
}

/// An allocator, by its own type, for the calls that are not in the trait.
enum Allocator {
    Caching(Arc<CachingAllocator>),
    Paged(Arc<PagedAllocator>),
}

pub struct Machine {
    pub sim: Arc<SimDriver>,
    pub faulty: Arc<Faulty>,
    pub device: Device,
    pub allocator: Arc<dyn DeviceAllocator>,
    own: Allocator,
    pub host: HostAllocator,
    pub tags: Tags,
    pub streams: Vec<Stream>,
    _leases: Vec<StreamLease>,
    contents: Contents,
    start: ObjectCounts,
}

impl Machine {
    pub fn new(kind: Kind, capacity: u64) -> Self {
        Self::with(kind, SimConfig::default(), capacity, PinnedSettings::default())
    }

    pub fn with(kind: Kind, config: SimConfig, capacity: u64, pinned: PinnedSettings) -> Self {
        // In addition to the allocator's memory there is room for the context and for checking contents.
        let mut config = config.with_capacity(capacity + 4 * MIB);
        config.devices[0].bytes_context = 2 * MIB;
        config.fresh_byte = 0xA5;
        let sim = Arc::new(SimDriver::new(config));
        let faulty = Arc::new(Faulty::new(sim.clone(), FaultPlan::new()));
        let instance = Instance::new(faulty.clone()).unwrap();
        let device = instance.device(0).unwrap();
        let leases: Vec<StreamLease> = (0..3).map(|_| device.lease_stream().unwrap()).collect();
        let streams = leases.iter().map(|lease| lease.stream().clone()).collect();
        // The streams of the copies are created now.
        drop((0..8).map(|_| device.lease_stream().unwrap()).collect::<Vec<_>>());
        let contents = Contents::new(&sim, DEVICE);
        let settings = if kind == Kind::Expandable { "expandable_segments:True" } else { "" };
        let settings = Settings::parse(settings).unwrap();
        let own = match kind {
            Kind::Paged => Allocator::Paged(Arc::new(PagedAllocator::new(&instance, settings).unwrap())),
            _ => Allocator::Caching(Arc::new(CachingAllocator::new(&instance, settings))),
        };
        let allocator: Arc<dyn DeviceAllocator> = match &own {
            Allocator::Caching(caching) => caching.clone(),
            Allocator::Paged(paged) => paged.clone(),
        };
        let host = HostAllocator::new(&instance, pinned);
        let tags = Tags::new(&allocator, &host).unwrap();
        let start = sim.object_counts();
        Self { sim, faulty, device, allocator, own, host, tags, streams, _leases: leases, contents, start }
    }

    pub fn check(&self) {
        match &self.own {
            Allocator::Caching(caching) => caching.check(),
            Allocator::Paged(paged) => paged.check(),
        }
        self.host.check();
    }

    pub fn set_cap(&self, bytes: Option<u64>) {
        self.allocator.set_memory_cap(DEVICE, bytes).unwrap();
    }

    pub fn trim_to(&self, bytes: u64) -> u64 {
        match &self.own {
            Allocator::Caching(_) => panic!("only pages are trimmed to a target"),
            Allocator::Paged(paged) => paged.trim_to(DEVICE, bytes).unwrap(),
        }
    }

    pub fn tag(&self, name: &str) -> Tag {
        self.tags.tag(&self.device, name).unwrap()
    }

    /// Memory that carries a tag.
    pub fn allocate(&self, tag: &str, bytes: u64, stream: usize) -> Result<Allocation> {
        let tag = self.tag(tag);
        let _scope = tag.enter()?;
        self.allocator.allocate_raw(Request::new(DEVICE, self.streams[stream].id(), bytes))
    }

    pub fn untagged(&self, bytes: u64, stream: usize) -> Result<Allocation> {
        self.allocator.allocate_raw(Request::new(DEVICE, self.streams[stream].id(), bytes))
    }

    pub fn sleep(&self, tags: &[&str], keep: Keep) -> Result<SleepReport> {
        let outcome = self.tags.sleep(tags, keep);
        self.check();
        outcome
    }

    pub fn wake(&self, tags: &[&str]) -> Result<SleepReport> {
        let outcome = self.tags.wake(tags);
        self.check();
        outcome
    }

    pub fn is_asleep(&self, tag: &str) -> bool {
        matches!(self.tag(tag).info().state, TagState::Asleep { .. })
    }

    pub fn reserved(&self) -> u64 {
        self.allocator.stats(DEVICE).unwrap().reserved_bytes.all.current
    }

    /// Pinned memory that is in use.
    pub fn pinned(&self) -> u64 {
        self.host.process_pending().unwrap();
        self.host.stats().active_bytes.current
    }

    /// The free bytes that the driver reports.
    pub fn free(&self) -> u64 {
        self.sim.mem_info(DEVICE).unwrap().bytes_free
    }

    pub fn write(&self, block: &Allocation, value: u32, stream: usize) {
        self.contents.write(block.ptr, block.bytes_requested, value, self.streams[stream].id());
    }

    pub fn write_at(&self, ptr: DevicePtr, bytes: u64, value: u32, stream: usize) {
        self.contents.write(ptr, bytes, value, self.streams[stream].id());
    }

    /// Queues a check that a block contains a value.
    pub fn expect(&self, block: &Allocation, value: u32, stream: usize) {
        self.expect_at(block.ptr, block.bytes_requested, value, stream);
    }

    pub fn expect_at(&self, ptr: DevicePtr, bytes: u64, value: u32, stream: usize) {
        self.contents.check(ptr, bytes, value, self.streams[stream].id());
    }

    /// A value that was lost, or a hazard.
    pub fn defect(&self) -> Option<String> {
        self.sim.device_synchronize(DEVICE).unwrap();
        let lost = self.contents.mismatch().map(|(value, other)| format!("a block with {value} contained {other}"));
        lost.or_else(|| self.sim.hazards().first().map(ToString::to_string))
    }

    /// After everything was freed: the first defect, if any. Panics if something is left.
    pub fn finish(self) -> Option<String> {
        let Self { sim, device, allocator, own, host, tags, contents, start, .. } = self;
        sim.device_synchronize(DEVICE).unwrap();
        let lost = contents.mismatch().map(|(value, other)| format!("a block with {value} contained {other}"));
        let defect = lost.or_else(|| sim.hazards().first().map(ToString::to_string));
        drop(tags);
        allocator.trim(DEVICE, MemPoolId::DEFAULT).unwrap();
        host.trim(0).unwrap();
        match &own {
            Allocator::Caching(caching) => caching.check(),
            Allocator::Paged(paged) => paged.check(),
        }
        assert_eq!(allocator.stats(DEVICE).unwrap().reserved_bytes.all.current, 0, "all memory was returned");
        device.event_pool().trim().unwrap();
        let mut end = sim.object_counts();
        if matches!(own, Allocator::Paged(_)) {
            // It keeps its addresses, in which nothing is mapped any more.
            end.reservations = start.reservations;
        }
        assert_eq!(end, start, "driver objects at the end and at the start");
        defect
    }
}
