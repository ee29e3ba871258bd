//! The contract of [`DeviceAllocator`], checked on every allocator in [`ALLOCATORS`]. Behaviour that is specific to one
//! allocator is tested elsewhere.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::common::rng::Rng;
use warpool::driver::decorate::Counting;
use warpool::driver::sim::{SimConfig, SimDriver};
use warpool::driver::{CaptureMode, DeviceId, DevicePtr, Driver, EventOptions, EventScope, Pattern, PoolAttribute};
use warpool::memory::decorate::{Limited, Traced};
use warpool::memory::external::{ExternalAllocator, RawStream};
use warpool::memory::raw::{Allocation, Request};
use warpool::memory::report::{
    Action, BlockState, Frame, HistoryOptions, Snapshot, SnapshotOptions, StackId, StackLevel, StatByKind, Stats,
};
use warpool::memory::{
    Allocate, CachingAllocator, DeviceAllocator, DriverPoolAllocator, MemPoolId, OomCause, PagedAllocator,
    PluggableAllocator, Settings,
};
use warpool::{Device, Error, Instance, Stream};

mod blocks;
mod limits;
mod reports;
mod streams;

type Make = fn(&Instance) -> Arc<dyn DeviceAllocator>;

const ALLOCATORS: &[(&str, Make)] = &[
    ("caching", |instance| Arc::new(CachingAllocator::new(instance, Settings::default()))),
    ("caching, expandable", |instance| Arc::new(CachingAllocator::new(instance, parsed("expandable_segments:True")))),
    ("paged", |instance| Arc::new(PagedAllocator::new(instance, Settings::default()).unwrap())),
    ("driver-pool", |instance| Arc::new(DriverPoolAllocator::new(instance))),
    ("pluggable", |instance| Arc::new(pluggable(instance))),
    ("limited", |instance| {
        Arc::new(Limited::new(&Arc::new(CachingAllocator::new(instance, Settings::default())), u64::MAX))
    }),
    ("traced", |instance| Arc::new(Traced::new(&Arc::new(pluggable(instance)), |_, _| {}))),
    ("traced, limited", |instance| {
        let limited = Limited::new(&Arc::new(DriverPoolAllocator::new(instance)), u64::MAX);
        Arc::new(Traced::new(&Arc::new(limited), |_, _| {}))
    }),
];

/// An external allocator over the device's stream-ordered pool.
struct OverPool(Arc<dyn Driver>);

impl ExternalAllocator for OverPool {
    fn allocate(&self, bytes: u64, device: DeviceId, stream: RawStream) -> warpool::Result<Option<DevicePtr>> {
        let pool = self.0.pool_default(device)?;
        self.0.pool_set(pool, PoolAttribute::ReleaseThreshold, u64::MAX)?;
        Ok(self.0.pool_alloc(pool, bytes, stream.id).ok())
    }

    fn free(&self, ptr: DevicePtr, _: u64, _: DeviceId, stream: RawStream) -> warpool::Result<()> {
        Ok(self.0.pool_free(ptr, stream.id)?)
    }

    fn reset(&self) {
        if self.0.context_is_active(DEVICE).unwrap() {
            self.0.device_synchronize(DEVICE).unwrap();
            self.0.pool_trim(self.0.pool_default(DEVICE).unwrap(), 0).unwrap();
        }
    }
}

fn pluggable(instance: &Instance) -> PluggableAllocator {
    PluggableAllocator::new(instance, Arc::new(OverPool(instance.driver().clone()))).unwrap()
}

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const DEVICE: DeviceId = DeviceId(0);

fn parsed(settings: &str) -> Settings {
    Settings::parse(settings).expect("valid settings")
}

/// An allocator on its own simulated device.
struct TestContext {
    sim: Arc<SimDriver>,
    counting: Arc<Counting>,
    instance: Instance,
    allocator: Arc<dyn DeviceAllocator>,
}

/// Runs `check` on every allocator.
fn each(config: &SimConfig, check: impl Fn(&TestContext)) {
    for (name, make) in ALLOCATORS {
        // Printed if the check fails.
        println!("allocator: {name}");
        let sim = Arc::new(SimDriver::new(config.clone()));
        let counting = Arc::new(Counting::new(sim.clone()));
        let instance = Instance::new(counting.clone()).unwrap();
        let allocator = make(&instance);
        check(&TestContext { sim, counting, instance, allocator });
    }
}

fn each_by_default(check: impl Fn(&TestContext)) {
    each(&SimConfig::default(), check);
}

impl TestContext {
    fn device(&self) -> Device {
        self.instance.device(0).unwrap()
    }

    fn stream(&self) -> Stream {
        self.device().pool_stream().unwrap()
    }

    fn block(&self, bytes: u64, stream: &Stream) -> Allocation {
        self.allocator.allocate_raw(Request::new(DEVICE, stream.id(), bytes)).unwrap()
    }

    fn refused(&self, bytes: u64, stream: &Stream) -> Error {
        self.allocator.allocate_raw(Request::new(DEVICE, stream.id(), bytes)).unwrap_err()
    }

    fn fill(&self, block: Allocation, value: u8, stream: &Stream) {
        self.sim_driver().fill(block.ptr, Pattern::U8(value), block.bytes_requested, stream.id()).unwrap();
    }

    fn byte_at(&self, ptr: DevicePtr) -> u8 {
        let mut byte = [0];
        self.sim_driver().download(DEVICE, ptr, &mut byte).unwrap();
        byte[0]
    }

    fn sim_driver(&self) -> &dyn Driver {
        &*self.sim
    }

    fn stats(&self) -> Stats {
        self.allocator.stats(DEVICE).unwrap()
    }

    fn snapshot(&self) -> Snapshot {
        self.allocator.snapshot(SnapshotOptions::default()).unwrap()
    }

    fn trim(&self) -> u64 {
        self.allocator.trim(DEVICE, MemPoolId::DEFAULT).unwrap()
    }

    #[track_caller]
    fn expect_no_hazard(&self) {
        assert!(self.sim.hazards().is_empty(), "{:#?}", self.sim.hazards());
    }

    /// Compares counters with each other and with a snapshot.
    #[track_caller]
    fn expect_sound(&self, live: &[Allocation]) {
        let (stats, snapshot) = (self.stats(), self.snapshot());
        for (name, stat) in named(&stats) {
            let StatByKind { all, small_pool, large_pool } = stat;
            assert_eq!(all.current, small_pool.current + large_pool.current, "{name}");
            assert!(all.peak >= all.current, "{name}");
        }
        assert_eq!(stats.allocation.all.current, live.len() as u64);
        let sum = |field: fn(&Allocation) -> u64| live.iter().map(field).sum::<u64>();
        assert_eq!(stats.allocated_bytes.all.current, sum(|block| block.bytes));
        assert!(stats.requested_bytes.all.current >= sum(|block| block.bytes_requested));
        assert!(stats.active_bytes.all.current >= stats.allocated_bytes.all.current);
        assert!(stats.reserved_bytes.all.current >= stats.active_bytes.all.current);

        let total =
            |field: fn(&warpool::memory::report::SegmentInfo) -> u64| snapshot.segments.iter().map(field).sum::<u64>();
        assert_eq!(total(|segment| segment.total_size), stats.reserved_bytes.all.current);
        assert_eq!(total(|segment| segment.allocated_size), stats.allocated_bytes.all.current);
        assert_eq!(total(|segment| segment.active_size), stats.active_bytes.all.current);
        assert_eq!(total(|segment| segment.requested_size), stats.requested_bytes.all.current);
        let blocks = snapshot.segments.iter().flat_map(|segment| &segment.blocks);
        let found: BTreeMap<u64, u64> = blocks
            .filter(|block| block.state == BlockState::ActiveAllocated)
            .map(|block| (block.address, block.size))
            .collect();
        let live_blocks: BTreeMap<u64, u64> = live.iter().map(|block| (block.ptr.0, block.bytes)).collect();
        assert_eq!(found, live_blocks);
        for segment in &snapshot.segments {
            let mut at = segment.address;
            for block in &segment.blocks {
                assert_eq!(block.address, at, "blocks leave no gaps");
                at += block.size;
            }
            assert_eq!(at, segment.address + segment.total_size);
        }
    }
}

fn named(stats: &Stats) -> [(&'static str, StatByKind); 5] {
    [
        ("allocation", stats.allocation),
        ("active", stats.active),
        ("allocated_bytes", stats.allocated_bytes),
        ("active_bytes", stats.active_bytes),
        ("requested_bytes", stats.requested_bytes),
    ]
}

/// A random size of any order of magnitude up to 16 MiB.
fn request_bytes(rng: &mut Rng) -> u64 {
    let magnitude = rng.below(25);
    1 + rng.u64_below(1 << magnitude)
}
