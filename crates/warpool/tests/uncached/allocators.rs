//! What [`DeviceAllocator`] promises, checked on every allocator. A new one joins by a line in [`ALLOCATORS`].
//!
//! What only one of them does is tested elsewhere: where the caching allocator puts blocks in `caching.rs`, what
//! becomes of captures under the driver's pools in `driver_pool.rs`.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::common::rng::Rng;
use warpool::driver::decorate::Counting;
use warpool::driver::sim::{SimConfig, SimDriver};
use warpool::driver::{CaptureMode, DeviceId, DevicePtr, Driver, Pattern, PoolAttribute};
use warpool::memory::{
    Action, Allocate, Allocation, BlockState, CachingAllocator, DeviceAllocator, DriverPoolAllocator,
    ExternalAllocator, HistoryOptions, Limited, MemPoolId, OomCause, PluggableAllocator, RawStream, Request, Settings,
    Snapshot, SnapshotOptions, StatByKind, Stats, Traced,
};
use warpool::{Device, Error, Instance, Stream};

type Make = fn(&Instance) -> Arc<dyn DeviceAllocator>;

const ALLOCATORS: &[(&str, Make)] = &[
    ("caching", |instance| Arc::new(CachingAllocator::new(instance, Settings::default()))),
    ("caching, expandable", |instance| Arc::new(CachingAllocator::new(instance, parsed("expandable_segments:True")))),
    ("driver-pool", |instance| Arc::new(DriverPoolAllocator::new(instance))),
    ("pluggable", |instance| Arc::new(plugged(instance))),
    ("limited", |instance| {
        Arc::new(Limited::new(Arc::new(CachingAllocator::new(instance, Settings::default())), u64::MAX))
    }),
    ("traced", |instance| Arc::new(Traced::new(Arc::new(plugged(instance)), |_, _| {}))),
    ("traced, limited", |instance| {
        let limited = Limited::new(Arc::new(DriverPoolAllocator::new(instance)), u64::MAX);
        Arc::new(Traced::new(Arc::new(limited), |_, _| {}))
    }),
];

/// A plug over the device's stream-ordered pool, which reuses memory in the order of streams and no other.
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

fn plugged(instance: &Instance) -> PluggableAllocator {
    PluggableAllocator::new(instance, Arc::new(OverPool(instance.driver().clone()))).unwrap()
}

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const DEVICE: DeviceId = DeviceId(0);

fn parsed(settings: &str) -> Settings {
    Settings::parse(settings).expect("settings that can be read")
}

/// An allocator on a machine of its own.
struct Subject {
    sim: Arc<SimDriver>,
    counting: Arc<Counting>,
    instance: Instance,
    allocator: Arc<dyn DeviceAllocator>,
}

/// Runs `check` on every allocator, each on a fresh machine.
fn each(config: &SimConfig, check: impl Fn(&Subject)) {
    for (name, make) in ALLOCATORS {
        // Shown if the check fails.
        println!("allocator: {name}");
        let sim = Arc::new(SimDriver::new(config.clone()));
        let counting = Arc::new(Counting::new(sim.clone()));
        let instance = Instance::new(counting.clone()).unwrap();
        let allocator = make(&instance);
        check(&Subject { sim, counting, instance, allocator });
    }
}

fn each_by_default(check: impl Fn(&Subject)) {
    each(&SimConfig::default(), check);
}

impl Subject {
    fn device(&self) -> Device {
        self.instance.device(0).unwrap()
    }

    fn stream(&self) -> Stream {
        self.device().pool_stream().unwrap()
    }

    fn give(&self, bytes: u64, stream: &Stream) -> Allocation {
        self.allocator.allocate_raw(Request::new(DEVICE, stream.id(), bytes)).unwrap()
    }

    fn refused(&self, bytes: u64, stream: &Stream) -> Error {
        self.allocator.allocate_raw(Request::new(DEVICE, stream.id(), bytes)).unwrap_err()
    }

    fn fill(&self, what: Allocation, value: u8, stream: &Stream) {
        self.sim_driver().fill(what.ptr, Pattern::U8(value), what.bytes_requested, stream.id()).unwrap();
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
        assert_eq!(stats.allocated_bytes.all.current, sum(|given| given.bytes));
        assert!(stats.requested_bytes.all.current >= sum(|given| given.bytes_requested));
        assert!(stats.active_bytes.all.current >= stats.allocated_bytes.all.current);
        assert!(stats.reserved_bytes.all.current >= stats.active_bytes.all.current);

        let total = |field: fn(&warpool::memory::SegmentInfo) -> u64| snapshot.segments.iter().map(field).sum::<u64>();
        assert_eq!(total(|segment| segment.total_size), stats.reserved_bytes.all.current);
        assert_eq!(total(|segment| segment.allocated_size), stats.allocated_bytes.all.current);
        assert_eq!(total(|segment| segment.active_size), stats.active_bytes.all.current);
        assert_eq!(total(|segment| segment.requested_size), stats.requested_bytes.all.current);
        let blocks = snapshot.segments.iter().flat_map(|segment| &segment.blocks);
        let shown: BTreeMap<u64, u64> = blocks
            .filter(|block| block.state == BlockState::ActiveAllocated)
            .map(|block| (block.address, block.size))
            .collect();
        let known: BTreeMap<u64, u64> = live.iter().map(|given| (given.ptr.0, given.bytes)).collect();
        assert_eq!(shown, known);
        for segment in &snapshot.segments {
            let mut at = segment.address;
            for block in &segment.blocks {
                assert_eq!(block.address, at, "blocks lie without gaps");
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

/// Random numbers from a seed (`SplitMix64`).

/// Many small sizes, few large ones.
fn request_bytes(rng: &mut Rng) -> u64 {
    let magnitude = rng.below(25);
    1 + rng.u64_below(1 << magnitude)
}

#[test]
fn nothing_is_the_null_address() {
    each_by_default(|subject| {
        let given = subject.give(0, &subject.stream());
        assert!(given.ptr.is_null() && given.bytes == 0);
        subject.allocator.free_raw(given.ptr).unwrap();
        subject.allocator.record_use_raw(given.ptr, subject.stream().id()).unwrap();
        subject.expect_sound(&[]);
    });
}

#[test]
fn making_asking_and_trimming_make_no_context() {
    each_by_default(|subject| {
        subject.stats();
        subject.snapshot();
        subject.trim();
        subject.allocator.set_memory_fraction(DEVICE, 0.5).unwrap();
        subject.allocator.reset_peak_stats(DEVICE).unwrap();
        subject.allocator.record_history(Some(HistoryOptions::default())).unwrap();
        let quiet = subject.sim_driver().context_is_active(DEVICE).unwrap();
        assert!(!quiet, "a context came to be");
    });
}

#[test]
fn blocks_are_at_least_what_was_asked_for_and_do_not_overlap() {
    each_by_default(|subject| {
        let stream = subject.stream();
        let mut live = Vec::new();
        for (value, bytes) in [1, 511, 512, 513, 100_000, MIB, MIB + 1, 3 * MIB, 17 * MIB].into_iter().enumerate() {
            let given = subject.give(bytes, &stream);
            assert!(given.bytes >= bytes && given.bytes_requested == bytes);
            assert_eq!((given.device, given.stream, given.ptr.0 % 256), (DEVICE, stream.id(), 0));
            assert_eq!(subject.allocator.find(given.ptr).unwrap(), given);
            subject.fill(given, value as u8, &stream);
            live.push(given);
        }
        stream.synchronize().unwrap();
        for (value, given) in live.iter().enumerate() {
            assert_eq!(subject.byte_at(given.ptr), value as u8);
            assert_eq!(subject.byte_at(given.ptr.offset(given.bytes_requested - 1)), value as u8);
        }
        subject.expect_sound(&live);
        subject.expect_no_hazard();
    });
}

#[test]
fn what_a_stream_frees_it_may_have_again_at_once() {
    each_by_default(|subject| {
        let stream = subject.stream();
        for bytes in [1000, 5 * MIB, 40 * MIB] {
            let first = subject.give(bytes, &stream);
            subject.allocator.free(first).unwrap();
            let reserved = subject.stats().reserved_bytes.all.current;
            for round in 0..50 {
                let given = subject.give(bytes, &stream);
                subject.fill(given, round, &stream);
                subject.allocator.free(given).unwrap();
                if round % 10 == 9 {
                    stream.synchronize().unwrap();
                }
            }
            let grown = subject.stats().reserved_bytes.all.current - reserved;
            // The driver's pool may hold what a busy stream has not freed yet; a leak would be 50 times as much.
            assert!(grown <= 12 * bytes.max(32 * MIB), "{grown} more bytes are held after 50 rounds of {bytes}");
        }
        subject.expect_sound(&[]);
        subject.expect_no_hazard();
    });
}

#[test]
fn unknown_pointers_are_errors() {
    each_by_default(|subject| {
        let stream = subject.stream();
        let given = subject.give(10_000, &stream);
        let inside = given.ptr.offset(512);
        for ptr in [DevicePtr(512), inside, given.ptr.offset(1)] {
            let unknown = Error::UnknownPointer { ptr };
            assert_eq!(subject.allocator.free_raw(ptr), Err(unknown.clone()));
            assert_eq!(subject.allocator.record_use_raw(ptr, stream.id()), Err(unknown.clone()));
            assert_eq!(subject.allocator.find(ptr), Err(unknown));
        }
        subject.expect_sound(&[given]);
        subject.allocator.free_raw(given.ptr).unwrap();
        assert_eq!(subject.allocator.free_raw(given.ptr), Err(Error::UnknownPointer { ptr: given.ptr }));
        assert_eq!(subject.allocator.free(given), Err(Error::UnknownPointer { ptr: given.ptr }));
        subject.allocator.free_later(given);
        subject.expect_sound(&[]);
    });
}

#[test]
fn what_was_freed_is_not_freed_again_under_its_next_owner() {
    each_by_default(|subject| {
        let stream = subject.stream();
        let stale = subject.give(10_000, &stream);
        subject.allocator.free(stale).unwrap();
        let next = subject.give(10_000, &stream);
        assert_eq!(subject.allocator.free(stale), Err(Error::UnknownPointer { ptr: stale.ptr }));
        subject.allocator.free_later(stale);
        subject.expect_sound(&[next]);
        subject.allocator.free(next).unwrap();
    });
}

#[test]
fn wrong_devices_and_sizes_are_errors() {
    each_by_default(|subject| {
        let stream = subject.stream();
        let nowhere = DeviceId(7);
        let missing = Error::DeviceOutOfRange { index: 7, count: 1 };
        assert_eq!(subject.allocator.allocate_raw(Request::new(nowhere, stream.id(), 1)), Err(missing.clone()));
        assert_eq!(subject.allocator.stats(nowhere), Err(missing.clone()));
        assert_eq!(subject.allocator.trim(nowhere, MemPoolId::DEFAULT), Err(missing.clone()));
        assert_eq!(subject.allocator.set_memory_fraction(nowhere, 0.5), Err(missing));
        assert_eq!(subject.refused(u64::MAX, &stream), Error::RequestTooLarge { bytes: u64::MAX });
        assert!(matches!(subject.refused(1 << 50, &stream), Error::OutOfMemory(_)));
        subject.expect_sound(&[]);
    });
}

/// Uses a block on a second stream that is behind, frees it, and has the first stream write to what comes next.
fn share(subject: &Subject, recorded: bool) {
    let (own, other) = (subject.stream(), subject.stream());
    let given = subject.give(2 * MIB, &own);
    subject.fill(given, 1, &own);
    other.wait_stream(&own).unwrap();
    for value in 0..50 {
        subject.fill(given, value, &other);
    }
    if recorded {
        subject.allocator.record_use_raw(given.ptr, other.id()).unwrap();
        subject.allocator.record_use(given, other.id()).unwrap();
    }
    subject.allocator.free(given).unwrap();
    let next = subject.give(2 * MIB, &own);
    subject.fill(next, 99, &own);
    subject.device().synchronize().unwrap();
    if recorded {
        assert_eq!(subject.byte_at(next.ptr), 99);
    }
    subject.allocator.free(next).unwrap();
}

#[test]
fn a_block_waits_for_the_streams_that_used_it() {
    each_by_default(|subject| {
        for _ in 0..5 {
            share(subject, true);
        }
        subject.trim();
        subject.expect_no_hazard();
        subject.expect_sound(&[]);
        assert_eq!(subject.stats().active.all.current, 0);
    });
}

/// The same without the record: the check above can fail.
#[test]
fn a_use_that_nobody_recorded_is_a_hazard() {
    each_by_default(|subject| {
        share(subject, false);
        assert!(!subject.sim.hazards().is_empty());
    });
}

#[test]
fn its_own_stream_recorded_is_nothing() {
    each_by_default(|subject| {
        let stream = subject.stream();
        let given = subject.give(MIB, &stream);
        crate::common::keep_busy(&stream);
        subject.allocator.record_use_raw(given.ptr, stream.id()).unwrap();
        subject.allocator.free(given).unwrap();
        assert_eq!(subject.stats().active.all.current, 0);
    });
}

#[test]
fn counters_and_snapshots_agree_in_a_random_program() {
    each_by_default(|subject| {
        for seed in 0..4 {
            println!("seed: {seed}");
            let mut rng = Rng::new(seed);
            let streams = [subject.stream(), subject.stream()];
            let mut live: Vec<Allocation> = Vec::new();
            for step in 0..400 {
                match rng.below(10) {
                    0..=4 => live.push(subject.give(request_bytes(&mut rng), &streams[rng.below(2)])),
                    5..=7 if !live.is_empty() => {
                        let given = live.swap_remove(rng.below(live.len()));
                        match rng.below(3) {
                            0 => subject.allocator.free(given).unwrap(),
                            1 => subject.allocator.free_raw(given.ptr).unwrap(),
                            _ => subject.allocator.free_later(given),
                        }
                    }
                    8 if !live.is_empty() => {
                        let given = live[rng.below(live.len())];
                        subject.allocator.record_use(given, streams[rng.below(2)].id()).unwrap();
                    }
                    9 if step % 50 == 0 => drop(subject.trim()),
                    _ => {}
                }
                if step % 10 == 0 {
                    subject.expect_sound(&live);
                }
            }
            for given in live.drain(..) {
                subject.allocator.free(given).unwrap();
            }
            subject.trim();
            subject.expect_sound(&[]);
            let stats = subject.stats();
            assert_eq!((stats.active_bytes.all.current, stats.reserved_bytes.all.current), (0, 0));
            assert_eq!(stats.allocation.all.allocated, stats.allocation.all.freed);
        }
        subject.expect_no_hazard();
    });
}

#[test]
fn peaks_and_sums_can_be_reset() {
    each_by_default(|subject| {
        let stream = subject.stream();
        let (kept, freed) = (subject.give(40 * MIB, &stream), subject.give(80 * MIB, &stream));
        subject.allocator.free(freed).unwrap();
        subject.trim();
        let before = subject.stats();
        assert_eq!(before.allocated_bytes.all.peak, 120 * MIB);
        assert!(before.reserved_bytes.all.peak >= 120 * MIB);
        subject.allocator.reset_peak_stats(DEVICE).unwrap();
        subject.allocator.reset_accumulated_stats(DEVICE).unwrap();
        let after = subject.stats();
        for (before, after) in [
            (before.allocated_bytes, after.allocated_bytes),
            (before.active_bytes, after.active_bytes),
            (before.reserved_bytes, after.reserved_bytes),
        ] {
            assert_eq!((after.all.current, after.all.peak), (before.all.current, before.all.current));
            assert_eq!((after.all.allocated, after.all.freed), (0, 0));
        }
        subject.allocator.free(kept).unwrap();
    });
}

#[test]
fn a_fraction_limits_and_can_be_lifted() {
    each_by_default(|subject| {
        let stream = subject.stream();
        for wrong in [-0.1, 1.1, f64::NAN] {
            assert!(matches!(subject.allocator.set_memory_fraction(DEVICE, wrong), Err(Error::Fraction { .. })));
        }
        assert_eq!(subject.allocator.memory_fraction(DEVICE), Ok(1.0));
        let limit = subject.device().properties().bytes_total / 128;
        subject.allocator.set_memory_fraction(DEVICE, 1.0 / 128.0).unwrap();
        assert_eq!(subject.allocator.memory_fraction(DEVICE), Ok(1.0 / 128.0));

        let held = subject.give(limit / 2, &stream);
        let Error::OutOfMemory(report) = subject.refused(limit / 2 + 64 * MIB, &stream) else { panic!("no report") };
        assert_eq!((report.cause, report.device, report.capturing), (OomCause::Limit, DEVICE, false));
        assert_eq!((report.bytes_requested, report.bytes_limit), (limit / 2 + 64 * MIB, Some(limit)));
        assert_eq!((report.bytes_allocated, report.bytes_pending), (held.bytes, 0));
        assert!(report.bytes_free > limit && report.bytes_total > report.bytes_free);
        assert!(report.to_string().contains("allowed"), "{report}");
        assert_eq!(subject.stats().num_ooms, 1);
        subject.expect_sound(&[held]);

        // Cached memory makes way: what was freed is of another size.
        subject.allocator.free(held).unwrap();
        let large = subject.give(limit - 64 * MIB, &stream);
        subject.allocator.free(large).unwrap();
        subject.allocator.set_memory_fraction(DEVICE, 1.0).unwrap();
        let more = subject.give(2 * limit, &stream);
        subject.allocator.free(more).unwrap();
    });
}

#[test]
fn a_full_device_is_an_error_and_recovers() {
    each(&SimConfig::default().with_capacity(4 * GIB), |subject| {
        let stream = subject.stream();
        let mut live = Vec::new();
        let report = loop {
            match subject.allocator.allocate_raw(Request::new(DEVICE, stream.id(), 256 * MIB)) {
                Ok(given) => live.push(given),
                Err(Error::OutOfMemory(report)) => break report,
                Err(other) => panic!("{other}"),
            }
        };
        assert!(live.len() >= 12, "{} blocks fitted", live.len());
        assert!(matches!(report.cause, OomCause::Device | OomCause::Upstream), "{report}");
        assert_eq!(report.bytes_limit, None);
        assert_eq!(report.bytes_allocated, 256 * MIB * live.len() as u64);
        let stats = subject.stats();
        assert_eq!((stats.num_ooms, stats.num_alloc_retries), (1, 1));
        subject.expect_sound(&live);

        // What comes back while a stream is busy is waited for; what is cached in the wrong size makes way.
        crate::common::keep_busy(&stream);
        for given in live.drain(..) {
            subject.allocator.free(given).unwrap();
        }
        let large = subject.give(3 * GIB, &stream);
        subject.expect_sound(&[large]);
        subject.allocator.free(large).unwrap();
        subject.trim();
        subject.expect_no_hazard();
    });
}

#[test]
fn a_failed_request_waits_for_blocks_that_other_streams_use() {
    each(&SimConfig::default().with_capacity(4 * GIB), |subject| {
        let (own, other) = (subject.stream(), subject.stream());
        let first = subject.give(2 * GIB, &own);
        crate::common::keep_busy(&other);
        subject.allocator.record_use(first, other.id()).unwrap();
        subject.allocator.free(first).unwrap();
        let second = subject.give(3 * GIB, &own);
        subject.allocator.free(second).unwrap();
        subject.expect_no_hazard();
    });
}

#[test]
fn trim_gives_everything_back_that_nobody_uses() {
    each_by_default(|subject| {
        let stream = subject.stream();
        let before = subject.sim_driver().mem_info(DEVICE).unwrap().bytes_free;
        let kept = subject.give(30 * MIB, &stream);
        let freed: Vec<_> = [100 * KIB, 5 * MIB, 200 * MIB].map(|bytes| subject.give(bytes, &stream)).into();
        freed.into_iter().for_each(|given| subject.allocator.free_later(given));
        let held = subject.stats().reserved_bytes.all.current;
        let trimmed = subject.trim();
        assert!(trimmed >= 200 * MIB);
        assert_eq!(subject.stats().reserved_bytes.all.current, held - trimmed);
        subject.expect_sound(&[kept]);
        assert_eq!(subject.trim(), 0);
        subject.allocator.free(kept).unwrap();
        subject.trim();
        assert_eq!(subject.stats().reserved_bytes.all.current, 0);
        assert_eq!(subject.sim_driver().mem_info(DEVICE).unwrap().bytes_free, before);
        assert!(subject.allocator.largest_available(DEVICE).unwrap() >= before);
    });
}

#[test]
fn destructors_call_no_driver() {
    each(&SimConfig::default().without_suballocation_tracking(), |subject| {
        let (own, other) = (subject.stream(), subject.stream());
        let blocks: Vec<_> = (0..4).map(|_| subject.allocator.allocate(3 * MIB, &own).unwrap()).collect();
        blocks[0].record_use(&other).unwrap();
        crate::common::keep_busy(&other);
        subject.counting.reset();
        drop(blocks);
        assert_eq!(subject.counting.counts(), []);
        assert_eq!(subject.stats().allocation.all.current, 0);
        // The next call does what they left.
        let block = subject.allocator.allocate(3 * MIB, &own).unwrap();
        block.free().unwrap();
        subject.trim();
        assert_eq!(subject.stats().reserved_bytes.all.current, 0);
        subject.counting.reset();
        drop(subject.allocator.allocate(0, &own).unwrap());
        assert_eq!(subject.counting.counts(), []);
        subject.expect_no_hazard();
    });
}

#[test]
fn owned_blocks_refuse_streams_of_another_gpu() {
    each_by_default(|subject| {
        let foreign = crate::common::device().pool_stream().unwrap();
        assert_eq!(
            subject.allocator.allocate(1, &foreign).unwrap_err(),
            Error::ForeignInstance { object: "the stream" }
        );
        let block = subject.allocator.allocate(1000, &subject.stream()).unwrap();
        assert_eq!(block.record_use(&foreign), Err(Error::ForeignInstance { object: "the stream" }));
        let raw = block.into_raw();
        subject.allocator.free(raw).unwrap();
        subject.expect_sound(&[]);
    });
}

#[test]
fn threads_share_an_allocator() {
    each_by_default(|subject| {
        std::thread::scope(|scope| {
            for thread in 0..4_u64 {
                scope.spawn(move || {
                    let mut rng = Rng::new(thread);
                    let stream = subject.stream();
                    let mut live = Vec::new();
                    for step in 0..300_u64 {
                        if rng.below(2) == 0 || live.is_empty() {
                            let given = subject.give(request_bytes(&mut rng).min(4 * MIB), &stream);
                            subject.fill(given, step as u8, &stream);
                            live.push(given);
                        } else {
                            let given = live.swap_remove(rng.below(live.len()));
                            match rng.below(2) {
                                0 => subject.allocator.free_raw(given.ptr).unwrap(),
                                _ => subject.allocator.free_later(given),
                            }
                        }
                        match step {
                            99 => drop(subject.snapshot()),
                            199 => drop(subject.trim()),
                            _ => {}
                        }
                    }
                    live.into_iter().for_each(|given| subject.allocator.free(given).unwrap());
                });
            }
        });
        subject.trim();
        subject.expect_sound(&[]);
        assert_eq!(subject.stats().reserved_bytes.all.current, 0);
        subject.expect_no_hazard();
    });
}

#[test]
fn trackers_see_everything_and_may_call_the_allocator() {
    each_by_default(|subject| {
        let stream = subject.stream();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let inside = Arc::new(AtomicBool::new(false));
        let id = {
            let (weak, seen, stream) = (Arc::downgrade(&subject.allocator), Arc::clone(&seen), stream.clone());
            subject.allocator.observers().attach_tracker(
                &[Action::Alloc, Action::FreeRequested, Action::FreeCompleted],
                Arc::new(move |device, event| {
                    if inside.swap(true, Ordering::SeqCst) {
                        return;
                    }
                    seen.lock().unwrap().push((event.action, event.size));
                    let allocator = weak.upgrade().expect("it is calling");
                    allocator.stats(device).unwrap();
                    let given = allocator.allocate_raw(Request::new(device, stream.id(), 700)).unwrap();
                    allocator.free(given).unwrap();
                    inside.store(false, Ordering::SeqCst);
                }),
            )
        };
        let given = subject.give(5000, &stream);
        subject.allocator.free(given).unwrap();
        let expected = [(Action::Alloc, 5000), (Action::FreeRequested, 5000), (Action::FreeCompleted, 5000)];
        assert_eq!(*seen.lock().unwrap(), expected);
        assert!(subject.allocator.observers().detach(id) && !subject.allocator.observers().detach(id));
        let given = subject.give(5000, &stream);
        subject.allocator.free(given).unwrap();
        assert_eq!(seen.lock().unwrap().len(), 3);
    });
}

#[test]
fn observers_of_failures_are_told_and_callbacks_may_help() {
    each(&SimConfig::default().with_capacity(4 * GIB), |subject| {
        let stream = subject.stream();
        let told = Arc::new(AtomicU64::new(0));
        {
            let (told, weak) = (Arc::clone(&told), Arc::downgrade(&subject.allocator));
            subject.allocator.observers().attach_oom_observer(Arc::new(move |report| {
                told.fetch_add(report.bytes_requested, Ordering::SeqCst);
                let allocator = weak.upgrade().expect("it is calling");
                allocator.trim(report.device, MemPoolId::DEFAULT).unwrap();
                allocator.snapshot(SnapshotOptions::default()).unwrap();
            }));
        }
        let spare = Arc::new(Mutex::new(Some(subject.give(2 * GIB, &stream))));
        assert!(matches!(subject.refused(3 * GIB, &stream), Error::OutOfMemory(_)));
        assert_eq!(told.load(Ordering::SeqCst), 3 * GIB);

        let weak = Arc::downgrade(&subject.allocator);
        let given = Arc::clone(&spare);
        subject.allocator.observers().attach_pressure_callback(Arc::new(move |_| {
            let Some(spare) = given.lock().unwrap().take() else { return false };
            weak.upgrade().expect("it is calling").free(spare).unwrap();
            true
        }));
        let large = subject.give(3 * GIB, &stream);
        assert!(spare.lock().unwrap().is_none());
        subject.allocator.free(large).unwrap();
        assert_eq!(told.load(Ordering::SeqCst), 3 * GIB);
    });
}

#[test]
fn a_history_is_recorded_while_it_is_on() {
    each_by_default(|subject| {
        let stream = subject.stream();
        let raw = stream.info().unwrap().raw.0;
        let round = || {
            let given = subject.give(3000, &stream);
            subject.allocator.free(given).unwrap();
            given
        };
        round();
        subject.allocator.record_history(Some(HistoryOptions { entries_max: 3, ..HistoryOptions::default() })).unwrap();
        round();
        let skip = ["segment_alloc", "segment_free", "segment_map"];
        let options = HistoryOptions { entries_max: 3, ..HistoryOptions::default() }.skipping(&skip).unwrap();
        subject.allocator.record_history(Some(options)).unwrap();
        let given = round();
        let trace = subject.snapshot().traces.remove(0);
        let shown: Vec<_> = trace.iter().map(|entry| (entry.action, entry.addr, entry.size, entry.stream)).collect();
        let entry = |action| (action, given.ptr.0, 3000, raw);
        assert_eq!(shown, [Action::Alloc, Action::FreeRequested, Action::FreeCompleted].map(entry));
        assert!(trace.is_sorted_by_key(|entry| entry.time_us));

        let without = subject.allocator.snapshot(SnapshotOptions { traces: false, ..SnapshotOptions::default() });
        assert!(without.unwrap().traces[0].is_empty());
        subject.allocator.record_history(None).unwrap();
        round();
        assert!(subject.snapshot().traces[0].is_empty());
    });
}

#[test]
fn a_snapshot_of_another_pool_shows_nothing_of_the_default_one() {
    each_by_default(|subject| {
        let given = subject.give(3000, &subject.stream());
        let of = |pool| {
            let options = SnapshotOptions { pool: Some(pool), ..SnapshotOptions::default() };
            subject.allocator.snapshot(options).unwrap().segments.len()
        };
        assert!(of(MemPoolId::DEFAULT) > 0);
        assert_eq!(of(MemPoolId { graph: 0, user: 77 }), 0);
        subject.allocator.free(given).unwrap();
    });
}

#[test]
fn a_capture_elsewhere_survives_every_call() {
    each_by_default(|subject| {
        let (capturing, own, other) = (subject.stream(), subject.stream(), subject.stream());
        // Everything is met once before, so that kernels and pools are ready.
        let scratch = subject.give(MIB, &own);
        let pools = subject.allocator.pools().ok();
        if let Some(pools) = pools {
            pools.capture_began(DEVICE).unwrap();
        }
        subject.sim_driver().capture_begin(capturing.id(), CaptureMode::Global).unwrap();
        let given = subject.give(50 * MIB, &own);
        subject.fill(given, 3, &own);
        subject.allocator.record_use(given, other.id()).unwrap();
        subject.allocator.free(given).unwrap();
        let next = subject.give(70 * MIB, &own);
        subject.stats();
        subject.snapshot();
        subject.allocator.reset_peak_stats(DEVICE).unwrap();
        subject.allocator.largest_available(DEVICE).unwrap();
        subject.allocator.free(next).unwrap();
        subject.trim();
        let graph = subject.sim_driver().capture_end(capturing.id()).expect("a whole capture");
        subject.sim_driver().graph_destroy(graph).unwrap();
        if let Some(pools) = pools {
            pools.capture_ended(DEVICE).unwrap();
        }
        subject.allocator.free(scratch).unwrap();
        subject.trim();
        subject.expect_sound(&[]);
        subject.expect_no_hazard();
    });
}

#[test]
fn a_stream_that_is_gone_keeps_no_block() {
    each_by_default(|subject| {
        let own = subject.stream();
        let gone = subject.sim_driver().stream_create(DEVICE, warpool::driver::StreamOptions::default()).unwrap();
        let given = subject.give(3 * MIB, &own);
        subject.allocator.record_use_raw(given.ptr, gone).unwrap();
        subject.sim_driver().stream_destroy(gone).unwrap();
        subject.allocator.free(given).unwrap();
        subject.trim();
        subject.expect_sound(&[]);
        assert_eq!(subject.stats().reserved_bytes.all.current, 0);
    });
}
