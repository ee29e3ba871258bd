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
use warpool::memory::{
    Action, Allocate, Allocation, BlockState, CachingAllocator, DeviceAllocator, DriverPoolAllocator,
    ExternalAllocator, Frame, HistoryOptions, Limited, MemPoolId, OomCause, PagedAllocator, PluggableAllocator,
    RawStream, Request, Settings, Snapshot, SnapshotOptions, StackId, StackLevel, StatByKind, Stats, Traced,
};
use warpool::{Device, Error, Instance, Stream};

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

        let total = |field: fn(&warpool::memory::SegmentInfo) -> u64| snapshot.segments.iter().map(field).sum::<u64>();
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

#[test]
fn a_request_for_no_bytes_returns_null() {
    each_by_default(|context| {
        let block = context.block(0, &context.stream());
        assert!(block.ptr.is_null() && block.bytes == 0);
        context.allocator.free_raw(block.ptr).unwrap();
        context.allocator.record_use_raw(block.ptr, context.stream().id()).unwrap();
        context.expect_sound(&[]);
    });
}

#[test]
fn creating_reading_and_trimming_create_no_context() {
    each_by_default(|context| {
        context.stats();
        context.snapshot();
        context.trim();
        context.allocator.set_memory_fraction(DEVICE, 0.5).unwrap();
        context.allocator.reset_peak_stats(DEVICE).unwrap();
        context.allocator.record_history(Some(HistoryOptions::default())).unwrap();
        let active = context.sim_driver().context_is_active(DEVICE).unwrap();
        assert!(!active, "a context was created");
    });
}

#[test]
fn blocks_are_large_enough_and_do_not_overlap() {
    each_by_default(|context| {
        let stream = context.stream();
        let mut live = Vec::new();
        for (value, bytes) in [1, 511, 512, 513, 100_000, MIB, MIB + 1, 3 * MIB, 17 * MIB].into_iter().enumerate() {
            let block = context.block(bytes, &stream);
            assert!(block.bytes >= bytes && block.bytes_requested == bytes);
            assert_eq!((block.device, block.stream, block.ptr.0 % 256), (DEVICE, stream.id(), 0));
            assert_eq!(context.allocator.find(block.ptr).unwrap(), block);
            context.fill(block, value as u8, &stream);
            live.push(block);
        }
        stream.synchronize().unwrap();
        for (value, block) in live.iter().enumerate() {
            assert_eq!(context.byte_at(block.ptr), value as u8);
            assert_eq!(context.byte_at(block.ptr.offset(block.bytes_requested - 1)), value as u8);
        }
        context.expect_sound(&live);
        context.expect_no_hazard();
    });
}

#[test]
fn memory_freed_on_a_stream_is_reused_by_it() {
    each_by_default(|context| {
        let stream = context.stream();
        for bytes in [1000, 5 * MIB, 40 * MIB] {
            let first = context.block(bytes, &stream);
            context.allocator.free(first).unwrap();
            let reserved = context.stats().reserved_bytes.all.current;
            for round in 0..50 {
                let block = context.block(bytes, &stream);
                context.fill(block, round, &stream);
                context.allocator.free(block).unwrap();
                if round % 10 == 9 {
                    stream.synchronize().unwrap();
                }
            }
            let grown = context.stats().reserved_bytes.all.current - reserved;
            // The driver's pool may hold memory whose free is still pending in a busy stream; a leak would be 50 times
            // as much.
            assert!(grown <= 12 * bytes.max(32 * MIB), "{grown} more bytes are reserved after 50 rounds of {bytes}");
        }
        context.expect_sound(&[]);
        context.expect_no_hazard();
    });
}

#[test]
fn unknown_pointers_are_errors() {
    each_by_default(|context| {
        let stream = context.stream();
        let block = context.block(10_000, &stream);
        let inside = block.ptr.offset(512);
        for ptr in [DevicePtr(512), inside, block.ptr.offset(1)] {
            let unknown = Error::UnknownPointer { ptr };
            assert_eq!(context.allocator.free_raw(ptr), Err(unknown.clone()));
            assert_eq!(context.allocator.record_use_raw(ptr, stream.id()), Err(unknown.clone()));
            assert_eq!(context.allocator.find(ptr), Err(unknown));
        }
        context.expect_sound(&[block]);
        context.allocator.free_raw(block.ptr).unwrap();
        assert_eq!(context.allocator.free_raw(block.ptr), Err(Error::UnknownPointer { ptr: block.ptr }));
        assert_eq!(context.allocator.free(block), Err(Error::UnknownPointer { ptr: block.ptr }));
        context.allocator.free_later(block);
        context.expect_sound(&[]);
    });
}

#[test]
fn a_stale_free_does_not_free_the_next_block() {
    each_by_default(|context| {
        let stream = context.stream();
        let stale = context.block(10_000, &stream);
        context.allocator.free(stale).unwrap();
        let next = context.block(10_000, &stream);
        assert_eq!(context.allocator.free(stale), Err(Error::UnknownPointer { ptr: stale.ptr }));
        context.allocator.free_later(stale);
        context.expect_sound(&[next]);
        context.allocator.free(next).unwrap();
    });
}

#[test]
fn wrong_devices_and_sizes_are_errors() {
    each_by_default(|context| {
        let stream = context.stream();
        let nowhere = DeviceId(7);
        let missing = Error::DeviceOutOfRange { index: 7, count: 1 };
        assert_eq!(context.allocator.allocate_raw(Request::new(nowhere, stream.id(), 1)), Err(missing.clone()));
        assert_eq!(context.allocator.stats(nowhere), Err(missing.clone()));
        assert_eq!(context.allocator.trim(nowhere, MemPoolId::DEFAULT), Err(missing.clone()));
        assert_eq!(context.allocator.set_memory_fraction(nowhere, 0.5), Err(missing));
        assert_eq!(context.refused(u64::MAX, &stream), Error::RequestTooLarge { bytes: u64::MAX });
        assert!(matches!(context.refused(1 << 50, &stream), Error::OutOfMemory(_)));
        context.expect_sound(&[]);
    });
}

/// Uses a block on a second, busy stream, frees it, and writes to the next block on the first stream.
fn use_on_two_streams(context: &TestContext, recorded: bool) {
    let (own, other) = (context.stream(), context.stream());
    let block = context.block(2 * MIB, &own);
    context.fill(block, 1, &own);
    other.wait_stream(&own).unwrap();
    for value in 0..50 {
        context.fill(block, value, &other);
    }
    if recorded {
        context.allocator.record_use_raw(block.ptr, other.id()).unwrap();
        context.allocator.record_use(block, other.id()).unwrap();
    }
    context.allocator.free(block).unwrap();
    let next = context.block(2 * MIB, &own);
    context.fill(next, 99, &own);
    context.device().synchronize().unwrap();
    if recorded {
        assert_eq!(context.byte_at(next.ptr), 99);
    }
    context.allocator.free(next).unwrap();
}

#[test]
fn a_block_waits_for_the_streams_that_used_it() {
    each_by_default(|context| {
        for _ in 0..5 {
            use_on_two_streams(context, true);
        }
        context.trim();
        context.expect_no_hazard();
        context.expect_sound(&[]);
        assert_eq!(context.stats().active.all.current, 0);
    });
}

/// Shows that the test above can fail.
#[test]
fn an_unrecorded_use_is_a_hazard() {
    each_by_default(|context| {
        use_on_two_streams(context, false);
        assert!(!context.sim.hazards().is_empty());
    });
}

#[test]
fn recording_the_own_stream_has_no_effect() {
    each_by_default(|context| {
        let stream = context.stream();
        let block = context.block(MIB, &stream);
        crate::common::keep_busy(&stream);
        context.allocator.record_use_raw(block.ptr, stream.id()).unwrap();
        context.allocator.free(block).unwrap();
        assert_eq!(context.stats().active.all.current, 0);
    });
}

#[test]
fn counters_and_snapshots_agree_in_random_programs() {
    each_by_default(|context| {
        for seed in 0..4 {
            println!("seed: {seed}");
            let mut rng = Rng::new(seed);
            let streams = [context.stream(), context.stream()];
            let mut live: Vec<Allocation> = Vec::new();
            for step in 0..400 {
                match rng.below(10) {
                    0..=4 => live.push(context.block(request_bytes(&mut rng), &streams[rng.below(2)])),
                    5..=7 if !live.is_empty() => {
                        let block = live.swap_remove(rng.below(live.len()));
                        match rng.below(3) {
                            0 => context.allocator.free(block).unwrap(),
                            1 => context.allocator.free_raw(block.ptr).unwrap(),
                            _ => context.allocator.free_later(block),
                        }
                    }
                    8 if !live.is_empty() => {
                        let block = live[rng.below(live.len())];
                        context.allocator.record_use(block, streams[rng.below(2)].id()).unwrap();
                    }
                    9 if step % 50 == 0 => drop(context.trim()),
                    _ => {}
                }
                if step % 10 == 0 {
                    context.expect_sound(&live);
                }
            }
            for block in live.drain(..) {
                context.allocator.free(block).unwrap();
            }
            context.trim();
            context.expect_sound(&[]);
            let stats = context.stats();
            assert_eq!((stats.active_bytes.all.current, stats.reserved_bytes.all.current), (0, 0));
            assert_eq!(stats.allocation.all.allocated, stats.allocation.all.freed);
        }
        context.expect_no_hazard();
    });
}

#[test]
fn peaks_and_accumulated_counters_can_be_reset() {
    each_by_default(|context| {
        let stream = context.stream();
        let (kept, freed) = (context.block(40 * MIB, &stream), context.block(80 * MIB, &stream));
        context.allocator.free(freed).unwrap();
        context.trim();
        let before = context.stats();
        assert_eq!(before.allocated_bytes.all.peak, 120 * MIB);
        assert!(before.reserved_bytes.all.peak >= 120 * MIB);
        context.allocator.reset_peak_stats(DEVICE).unwrap();
        context.allocator.reset_accumulated_stats(DEVICE).unwrap();
        let after = context.stats();
        for (before, after) in [
            (before.allocated_bytes, after.allocated_bytes),
            (before.active_bytes, after.active_bytes),
            (before.reserved_bytes, after.reserved_bytes),
        ] {
            assert_eq!((after.all.current, after.all.peak), (before.all.current, before.all.current));
            assert_eq!((after.all.allocated, after.all.freed), (0, 0));
        }
        context.allocator.free(kept).unwrap();
    });
}

#[test]
fn a_memory_fraction_limits_and_can_be_lifted() {
    each_by_default(|context| {
        let stream = context.stream();
        for wrong in [-0.1, 1.1, f64::NAN] {
            assert!(matches!(context.allocator.set_memory_fraction(DEVICE, wrong), Err(Error::Fraction { .. })));
        }
        assert_eq!(context.allocator.memory_fraction(DEVICE), Ok(1.0));
        let limit = context.device().properties().bytes_total / 128;
        context.allocator.set_memory_fraction(DEVICE, 1.0 / 128.0).unwrap();
        assert_eq!(context.allocator.memory_fraction(DEVICE), Ok(1.0 / 128.0));

        let held = context.block(limit / 2, &stream);
        let Error::OutOfMemory(report) = context.refused(limit / 2 + 64 * MIB, &stream) else { panic!("no report") };
        assert_eq!((report.cause, report.device, report.capturing), (OomCause::Limit, DEVICE, false));
        assert_eq!((report.bytes_requested, report.bytes_limit), (limit / 2 + 64 * MIB, Some(limit)));
        assert_eq!((report.bytes_allocated, report.bytes_pending), (held.bytes, 0));
        assert!(report.bytes_free > limit && report.bytes_total > report.bytes_free);
        assert!(report.to_string().contains("allowed"), "{report}");
        assert_eq!(context.stats().num_ooms, 1);
        context.expect_sound(&[held]);

        // Cached memory of another size is released.
        context.allocator.free(held).unwrap();
        let large = context.block(limit - 64 * MIB, &stream);
        context.allocator.free(large).unwrap();
        context.allocator.set_memory_fraction(DEVICE, 1.0).unwrap();
        let more = context.block(2 * limit, &stream);
        context.allocator.free(more).unwrap();
    });
}

#[test]
fn a_full_device_is_an_error_and_recovers() {
    each(&SimConfig::default().with_capacity(4 * GIB), |context| {
        let stream = context.stream();
        let mut live = Vec::new();
        let report = loop {
            match context.allocator.allocate_raw(Request::new(DEVICE, stream.id(), 256 * MIB)) {
                Ok(block) => live.push(block),
                Err(Error::OutOfMemory(report)) => break report,
                Err(other) => panic!("{other}"),
            }
        };
        assert!(live.len() >= 12, "{} blocks fitted", live.len());
        assert!(matches!(report.cause, OomCause::Device | OomCause::External), "{report}");
        assert_eq!(report.bytes_limit, None);
        assert_eq!(report.bytes_allocated, 256 * MIB * live.len() as u64);
        let stats = context.stats();
        assert_eq!((stats.num_ooms, stats.num_alloc_retries), (1, 1));
        context.expect_sound(&live);

        // The request waits for frees on a busy stream, and cached memory of another size is released.
        crate::common::keep_busy(&stream);
        for block in live.drain(..) {
            context.allocator.free(block).unwrap();
        }
        let large = context.block(3 * GIB, &stream);
        context.expect_sound(&[large]);
        context.allocator.free(large).unwrap();
        context.trim();
        context.expect_no_hazard();
    });
}

#[test]
fn a_request_waits_for_pending_blocks_before_it_fails() {
    each(&SimConfig::default().with_capacity(4 * GIB), |context| {
        let (own, other) = (context.stream(), context.stream());
        let first = context.block(2 * GIB, &own);
        crate::common::keep_busy(&other);
        context.allocator.record_use(first, other.id()).unwrap();
        context.allocator.free(first).unwrap();
        let second = context.block(3 * GIB, &own);
        context.allocator.free(second).unwrap();
        context.expect_no_hazard();
    });
}

#[test]
fn trim_releases_all_unused_memory() {
    each_by_default(|context| {
        let stream = context.stream();
        let before = context.sim_driver().mem_info(DEVICE).unwrap().bytes_free;
        let kept = context.block(30 * MIB, &stream);
        let freed: Vec<_> = [100 * KIB, 5 * MIB, 200 * MIB].map(|bytes| context.block(bytes, &stream)).into();
        freed.into_iter().for_each(|block| context.allocator.free_later(block));
        let reserved = context.stats().reserved_bytes.all.current;
        let trimmed = context.trim();
        assert!(trimmed >= 200 * MIB);
        assert_eq!(context.stats().reserved_bytes.all.current, reserved - trimmed);
        context.expect_sound(&[kept]);
        assert_eq!(context.trim(), 0);
        context.allocator.free(kept).unwrap();
        context.trim();
        assert_eq!(context.stats().reserved_bytes.all.current, 0);
        assert_eq!(context.sim_driver().mem_info(DEVICE).unwrap().bytes_free, before);
        assert!(context.allocator.largest_available(DEVICE).unwrap() >= before);
    });
}

#[test]
fn destructors_make_no_driver_call() {
    each(&SimConfig::default().without_suballocation_tracking(), |context| {
        let (own, other) = (context.stream(), context.stream());
        let blocks: Vec<_> = (0..4).map(|_| context.allocator.allocate(3 * MIB, &own).unwrap()).collect();
        blocks[0].record_use(&other).unwrap();
        crate::common::keep_busy(&other);
        context.counting.reset();
        drop(blocks);
        assert_eq!(context.counting.counts(), []);
        assert_eq!(context.stats().allocation.all.current, 0);
        // The next call does the rest.
        let block = context.allocator.allocate(3 * MIB, &own).unwrap();
        block.free().unwrap();
        context.trim();
        assert_eq!(context.stats().reserved_bytes.all.current, 0);
        context.counting.reset();
        drop(context.allocator.allocate(0, &own).unwrap());
        assert_eq!(context.counting.counts(), []);
        context.expect_no_hazard();
    });
}

#[test]
fn blocks_refuse_streams_of_another_instance() {
    each_by_default(|context| {
        let foreign = crate::common::device().pool_stream().unwrap();
        assert_eq!(
            context.allocator.allocate(1, &foreign).unwrap_err(),
            Error::ForeignInstance { object: "the stream" }
        );
        let block = context.allocator.allocate(1000, &context.stream()).unwrap();
        assert_eq!(block.record_use(&foreign), Err(Error::ForeignInstance { object: "the stream" }));
        let raw = block.into_raw();
        context.allocator.free(raw).unwrap();
        context.expect_sound(&[]);
    });
}

#[test]
fn threads_share_an_allocator() {
    each_by_default(|context| {
        std::thread::scope(|scope| {
            for thread in 0..4_u64 {
                scope.spawn(move || {
                    let mut rng = Rng::new(thread);
                    let stream = context.stream();
                    let mut live = Vec::new();
                    for step in 0..300_u64 {
                        if rng.below(2) == 0 || live.is_empty() {
                            let block = context.block(request_bytes(&mut rng).min(4 * MIB), &stream);
                            context.fill(block, step as u8, &stream);
                            live.push(block);
                        } else {
                            let block = live.swap_remove(rng.below(live.len()));
                            match rng.below(2) {
                                0 => context.allocator.free_raw(block.ptr).unwrap(),
                                _ => context.allocator.free_later(block),
                            }
                        }
                        match step {
                            99 => drop(context.snapshot()),
                            199 => drop(context.trim()),
                            _ => {}
                        }
                    }
                    live.into_iter().for_each(|block| context.allocator.free(block).unwrap());
                });
            }
        });
        context.trim();
        context.expect_sound(&[]);
        assert_eq!(context.stats().reserved_bytes.all.current, 0);
        context.expect_no_hazard();
    });
}

#[test]
fn trackers_see_every_entry_and_may_call_the_allocator() {
    each_by_default(|context| {
        let stream = context.stream();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let inside = Arc::new(AtomicBool::new(false));
        let id = {
            let (weak, seen, stream) = (Arc::downgrade(&context.allocator), Arc::clone(&seen), stream.clone());
            context.allocator.observers().attach_tracker(
                &[Action::Alloc, Action::FreeRequested, Action::FreeCompleted],
                Arc::new(move |device, entry| {
                    if inside.swap(true, Ordering::SeqCst) {
                        return;
                    }
                    seen.lock().unwrap().push((entry.action, entry.size));
                    let allocator = weak.upgrade().expect("the allocator is alive");
                    allocator.stats(device).unwrap();
                    let block = allocator.allocate_raw(Request::new(device, stream.id(), 700)).unwrap();
                    allocator.free(block).unwrap();
                    inside.store(false, Ordering::SeqCst);
                }),
            )
        };
        let block = context.block(5000, &stream);
        context.allocator.free(block).unwrap();
        let expected = [(Action::Alloc, 5000), (Action::FreeRequested, 5000), (Action::FreeCompleted, 5000)];
        assert_eq!(*seen.lock().unwrap(), expected);
        assert!(context.allocator.observers().detach(id) && !context.allocator.observers().detach(id));
        let block = context.block(5000, &stream);
        context.allocator.free(block).unwrap();
        assert_eq!(seen.lock().unwrap().len(), 3);
    });
}

#[test]
fn oom_observers_are_called_and_pressure_callbacks_may_free_memory() {
    each(&SimConfig::default().with_capacity(4 * GIB), |context| {
        let stream = context.stream();
        let observed = Arc::new(AtomicU64::new(0));
        {
            let (observed, weak) = (Arc::clone(&observed), Arc::downgrade(&context.allocator));
            context.allocator.observers().attach_oom_observer(Arc::new(move |report| {
                observed.fetch_add(report.bytes_requested, Ordering::SeqCst);
                let allocator = weak.upgrade().expect("the allocator is alive");
                allocator.trim(report.device, MemPoolId::DEFAULT).unwrap();
                allocator.snapshot(SnapshotOptions::default()).unwrap();
            }));
        }
        let spare = Arc::new(Mutex::new(Some(context.block(2 * GIB, &stream))));
        assert!(matches!(context.refused(3 * GIB, &stream), Error::OutOfMemory(_)));
        assert_eq!(observed.load(Ordering::SeqCst), 3 * GIB);

        let weak = Arc::downgrade(&context.allocator);
        let block = Arc::clone(&spare);
        context.allocator.observers().attach_pressure_callback(Arc::new(move |_| {
            let Some(spare) = block.lock().unwrap().take() else { return false };
            weak.upgrade().expect("the allocator is alive").free(spare).unwrap();
            true
        }));
        let large = context.block(3 * GIB, &stream);
        assert!(spare.lock().unwrap().is_none());
        context.allocator.free(large).unwrap();
        assert_eq!(observed.load(Ordering::SeqCst), 3 * GIB);
    });
}

#[test]
fn a_history_is_recorded_while_enabled() {
    each_by_default(|context| {
        let stream = context.stream();
        let raw = stream.info().unwrap().raw.0;
        let round = || {
            let block = context.block(3000, &stream);
            context.allocator.free(block).unwrap();
            block
        };
        round();
        context.allocator.record_history(Some(HistoryOptions { entries_max: 3, ..HistoryOptions::default() })).unwrap();
        round();
        let skip = ["segment_alloc", "segment_free", "segment_map"];
        let options = HistoryOptions { entries_max: 3, ..HistoryOptions::default() }.skipping(&skip).unwrap();
        context.allocator.record_history(Some(options)).unwrap();
        let block = round();
        let trace = context.snapshot().traces.remove(0);
        let found: Vec<_> = trace.iter().map(|entry| (entry.action, entry.addr, entry.size, entry.stream)).collect();
        let entry = |action| (action, block.ptr.0, 3000, raw);
        assert_eq!(found, [Action::Alloc, Action::FreeRequested, Action::FreeCompleted].map(entry));
        assert!(trace.is_sorted_by_key(|entry| entry.time_us));

        let without = context.allocator.snapshot(SnapshotOptions { traces: false, ..SnapshotOptions::default() });
        assert!(without.unwrap().traces[0].is_empty());
        context.allocator.record_history(None).unwrap();
        round();
        assert!(context.snapshot().traces[0].is_empty());
    });
}

/// Entries of a free have the stack of the allocation, or of a later call that completes the free; only at the highest
/// level, they have their own. At lower levels only blocks have a stack, while they are allocated.
#[test]
fn the_stack_level_decides_where_stacks_appear() {
    for level in [StackLevel::Never, StackLevel::State, StackLevel::Alloc, StackLevel::All] {
        println!("level: {level:?}");
        each_by_default(|context| {
            let (stream, user) = (context.stream(), context.stream());
            context.allocator.observers().set_stack_hook(Some(Arc::new(|| {
                let name = CALL.get().to_owned();
                Some([Frame { name, filename: "main.rs".into(), line: 1 }].into())
            })));
            context.allocator.record_history(Some(HistoryOptions { stacks: level, ..Default::default() })).unwrap();
            CALL.set("allocate");
            let (plain, used) = (context.block(3000, &stream), context.block(3 * MIB, &stream));
            let live = context.snapshot();
            let blocks = live.segments.iter().flat_map(|segment| &segment.blocks);
            let allocated = blocks.filter(|block| block.state == BlockState::ActiveAllocated);
            let with_stack = allocated.filter(|block| block.stack.is_some()).count();
            assert_eq!(with_stack, if level == StackLevel::Never { 0 } else { 2 });
            context.allocator.record_use(used, user.id()).unwrap();
            CALL.set("free");
            context.allocator.free(plain).unwrap();
            context.allocator.free(used).unwrap();
            // Completes frees that wait for the stream.
            context.device().synchronize().unwrap();
            CALL.set("later");
            context.block(3000, &stream);
            CALL.set("trim");
            context.trim();

            let in_entries = level >= StackLevel::Alloc;
            let snapshot = context.snapshot();
            let name_of = |id: StackId| snapshot.stacks[id.index()][0].name.as_str();
            for entry in snapshot.traces[0].iter().filter(|entry| entry.action != Action::Snapshot) {
                // The former owner of pages is unknown when they are unmapped.
                let may_have_none = entry.action == Action::SegmentUnmap && level == StackLevel::Alloc;
                assert!(entry.stack.is_some() == in_entries || may_have_none, "{entry:?}");
                let name = entry.stack.map(name_of);
                match entry.action {
                    Action::FreeRequested if level == StackLevel::All => assert_eq!(name, Some("free")),
                    Action::FreeRequested if in_entries => assert_eq!(name, Some("allocate")),
                    _ => {}
                }
            }
            let frees = |action| snapshot.traces[0].iter().filter(|entry| entry.action == action).count();
            assert_eq!((frees(Action::FreeRequested), frees(Action::FreeCompleted)), (2, 2));
            let segments = || live.segments.iter().chain(&snapshot.segments).filter(|segment| segment.stack.is_some());
            assert!(in_entries || segments().next().is_none(), "a segment has a stack");
            let names: Vec<_> = snapshot.stacks.iter().map(|stack| stack[0].name.as_str()).collect();
            assert_eq!(names.contains(&"free"), level == StackLevel::All, "{names:?}");
            assert_eq!(names.contains(&"allocate"), in_entries, "{names:?}");
        });
    }
}

thread_local! {
    /// The call that the stack hook names.
    static CALL: Cell<&'static str> = const { Cell::new("none") };
}

#[test]
fn a_snapshot_of_one_pool_has_only_its_segments() {
    each_by_default(|context| {
        let block = context.block(3000, &context.stream());
        let of = |pool| {
            let options = SnapshotOptions { pool: Some(pool), ..SnapshotOptions::default() };
            context.allocator.snapshot(options).unwrap().segments.len()
        };
        assert!(of(MemPoolId::DEFAULT) > 0);
        assert_eq!(of(MemPoolId { graph: 0, user: 77 }), 0);
        context.allocator.free(block).unwrap();
    });
}

#[test]
fn no_call_invalidates_another_streams_capture() {
    each_by_default(|context| {
        let (capturing, own, other) = (context.stream(), context.stream(), context.stream());
        // The pools are configured before the capture.
        let scratch = context.block(MIB, &own);
        let pools = context.allocator.pools().ok();
        if let Some(pools) = pools {
            pools.capture_began(DEVICE).unwrap();
        }
        context.sim_driver().capture_begin(capturing.id(), CaptureMode::Global).unwrap();
        let block = context.block(50 * MIB, &own);
        context.fill(block, 3, &own);
        context.allocator.record_use(block, other.id()).unwrap();
        context.allocator.free(block).unwrap();
        let next = context.block(70 * MIB, &own);
        context.stats();
        context.snapshot();
        context.allocator.reset_peak_stats(DEVICE).unwrap();
        context.allocator.largest_available(DEVICE).unwrap();
        context.allocator.free(next).unwrap();
        context.trim();
        let graph = context.sim_driver().capture_end(capturing.id()).expect("the capture is valid");
        context.sim_driver().graph_destroy(graph).unwrap();
        if let Some(pools) = pools {
            pools.capture_ended(DEVICE).unwrap();
        }
        context.allocator.free(scratch).unwrap();
        context.trim();
        context.expect_sound(&[]);
        context.expect_no_hazard();
    });
}

#[test]
fn a_block_used_by_a_destroyed_stream_is_released() {
    each_by_default(|context| {
        let own = context.stream();
        let destroyed = context.sim_driver().stream_create(DEVICE, warpool::driver::StreamOptions::default()).unwrap();
        let block = context.block(3 * MIB, &own);
        context.allocator.record_use_raw(block.ptr, destroyed).unwrap();
        context.sim_driver().stream_destroy(destroyed).unwrap();
        context.allocator.free(block).unwrap();
        context.trim();
        context.expect_sound(&[]);
        assert_eq!(context.stats().reserved_bytes.all.current, 0);
    });
}

/// Issue 35: later calls, above all a trim, named streams that their owner had destroyed.
#[test]
fn no_call_names_a_stream_once_its_memory_is_freed() {
    each_by_default(|context| {
        let destroyed = context.sim_driver().stream_create(DEVICE, warpool::driver::StreamOptions::default()).unwrap();
        let busy = context.stream();
        let request = Request::new(DEVICE, destroyed, 3 * MIB);
        let [plain, shared] = [0, 1].map(|_| context.allocator.allocate_raw(request).unwrap());
        let event = context.sim_driver().event_create(DEVICE, EventOptions::default()).unwrap();
        context.sim_driver().event_record(event, destroyed, EventScope::Plain).unwrap();
        context.sim_driver().stream_wait_event(busy.id(), event, EventScope::Plain).unwrap();
        context.sim_driver().event_destroy(event).unwrap();
        context.fill(shared, 1, &busy);
        context.allocator.record_use_raw(shared.ptr, busy.id()).unwrap();
        context.allocator.free(shared).unwrap();
        context.allocator.free(plain).unwrap();
        context.sim_driver().stream_destroy(destroyed).unwrap();
        let later = context.block(30 * MIB, &busy);
        context.allocator.free(later).unwrap();
        context.trim();
        context.expect_sound(&[]);
        context.expect_no_hazard();
        assert_eq!(context.stats().reserved_bytes.all.current, 0);
    });
}
