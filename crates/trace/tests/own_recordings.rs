//! Recordings of Warpool's own allocator: written as PyTorch writes them, read again, replayed exactly.

use std::sync::Arc;

use warpool::driver::DeviceId;
use warpool::driver::sim::{SimConfig, SimDriver};
use warpool::memory::{
    Allocation, BlockState, CachingAllocator, DeviceAllocator, HistoryOptions, MemPoolId, PoolKeeper, PoolOptions,
    Request, Settings, Snapshot, SnapshotOptions,
};
use warpool::{Error, Instance};
use warpool_trace::replay::{ReplayOptions, replay};
use warpool_trace::{ReadOptions, read, write_snapshot};

const DEVICE: DeviceId = DeviceId(0);

/// How a random program is recorded.
struct Case {
    settings: &'static str,
    streams: usize,
    pools: usize,
    cap: Option<u64>,
    entries_max: usize,
    /// How often in a thousand steps `expandable_segments` is switched.
    switches: u64,
    /// How often in a thousand steps what is cached goes back.
    trims: u64,
}

/// Runs a random program under recording and returns the allocator as it is then.
fn record(case: &Case, seed: u64) -> CachingAllocator {
    let instance = Instance::new(Arc::new(SimDriver::new(SimConfig::default().with_seed(seed)))).unwrap();
    let device = instance.device(0).unwrap();
    let allocator = CachingAllocator::new(&instance, Settings::parse(case.settings).unwrap());
    allocator.set_memory_cap(DEVICE, case.cap).unwrap();
    let entries_max = case.entries_max;
    allocator.record_history(Some(HistoryOptions { entries_max, ..HistoryOptions::default() })).unwrap();
    let streams: Vec<_> = (0..case.streams).map(|_| device.pool_stream().unwrap()).collect();
    let mut pools = vec![MemPoolId::DEFAULT];
    pools.extend((0..case.pools).map(|_| allocator.create_pool(DEVICE, PoolOptions::default()).unwrap()));
    let mut luck = Luck(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
    let mut live: Vec<Allocation> = Vec::new();
    for _ in 0..3000 {
        if live.len() > 50 || (!live.is_empty() && luck.below(100) < 45) {
            let given = live.swap_remove(luck.index(live.len()));
            if luck.below(4) == 0 {
                allocator.record_use(given, streams[luck.index(streams.len())].id()).unwrap();
            }
            allocator.free(given).unwrap();
        } else {
            let bytes = (1 << (8 + luck.below(18))) + luck.below(100_000);
            let stream = streams[luck.index(streams.len())].id();
            let pool = pools[luck.index(pools.len())];
            match allocator.allocate_raw(Request::new(DEVICE, stream, bytes).in_pool(pool)) {
                Ok(given) => live.push(given),
                Err(Error::OutOfMemory(_)) => {
                    live.drain(..live.len() / 2).for_each(|given| allocator.free(given).unwrap());
                }
                Err(error) => panic!("seed {seed}: {error}"),
            }
        }
        if luck.below(1000) < case.trims {
            allocator.trim(DEVICE, MemPoolId::DEFAULT).unwrap();
        }
        if case.switches > 0 && luck.below(1000) < case.switches {
            let settings = allocator.settings();
            let expandable_segments = !settings.expandable_segments;
            allocator.set_settings(Settings { expandable_segments, ..Settings::clone(&settings) });
        }
    }
    allocator.check();
    allocator
}

fn written_and_read(snapshot: &Snapshot) -> Snapshot {
    let mut file = Vec::new();
    write_snapshot(snapshot, &mut file).unwrap();
    read(file.as_slice(), &ReadOptions { stacks: true, progress: None }).unwrap().snapshot
}

fn check(case: &Case) {
    for seed in 0..6 {
        let allocator = record(case, seed);
        let taken = allocator.snapshot(SnapshotOptions::default()).unwrap();
        let snapshot = written_and_read(&taken);
        assert_eq!(snapshot, taken, "seed {seed}: what was written is what is read");

        let stats = allocator.stats(DEVICE).unwrap();
        let sum = |of: fn(&warpool::memory::SegmentInfo) -> u64| snapshot.segments.iter().map(of).sum::<u64>();
        assert_eq!(sum(|segment| segment.total_size), stats.reserved_bytes.all.current);
        assert_eq!(sum(|segment| segment.allocated_size), stats.allocated_bytes.all.current);
        assert_eq!(sum(|segment| segment.active_size), stats.active_bytes.all.current);
        assert_eq!(sum(|segment| segment.requested_size), stats.requested_bytes.all.current);
        let blocks = snapshot.segments.iter().flat_map(|segment| &segment.blocks);
        let taken = blocks.filter(|block| block.state == BlockState::ActiveAllocated).count();
        assert_eq!(taken as u64, stats.allocation.all.current);

        let report = replay(&snapshot, &ReplayOptions::default()).unwrap();
        let fidelity = &report.fidelity;
        assert!(fidelity.exact, "seed {seed} with {:?}: {:?}", case.settings, fidelity.first_difference);
        assert_eq!(fidelity.addresses_equal, fidelity.addresses_total);
        if case.entries_max == usize::MAX {
            assert_eq!(report.peak_reserved_bytes, stats.reserved_bytes.all.peak, "seed {seed}");
            assert_eq!((report.retries, report.ooms), (stats.num_alloc_retries, stats.num_ooms), "seed {seed}");
        }
    }
}

const WHOLE: Case =
    Case { settings: "", streams: 1, pools: 0, cap: None, entries_max: usize::MAX, switches: 0, trims: 2 };

#[test]
fn one_stream_is_replayed() {
    check(&WHOLE);
    check(&Case { settings: "free_block_order:address", ..WHOLE });
    check(&Case { settings: "expandable_segments:True", ..WHOLE });
    check(&Case { settings: "max_split_size_mb:32,roundup_power2_divisions:4", ..WHOLE });
}

#[test]
fn several_streams_are_replayed() {
    check(&Case { streams: 4, ..WHOLE });
    check(&Case { settings: "expandable_segments:True", streams: 4, ..WHOLE });
}

#[test]
fn pools_are_replayed() {
    check(&Case { pools: 2, ..WHOLE });
    check(&Case { settings: "expandable_segments:True", pools: 2, streams: 2, ..WHOLE });
}

#[test]
fn limits_are_inferred() {
    check(&Case { cap: Some(300 << 20), ..WHOLE });
    check(&Case { settings: "expandable_segments:True", cap: Some(300 << 20), ..WHOLE });
}

#[test]
fn histories_that_start_late_are_replayed() {
    check(&Case { entries_max: 2000, ..WHOLE });
    check(&Case { settings: "expandable_segments:True", entries_max: 2000, ..WHOLE });
    check(&Case { settings: "max_split_size_mb:32", entries_max: 2000, ..WHOLE });
}

#[test]
fn switches_are_found() {
    check(&Case { switches: 2, trims: 0, ..WHOLE });
    check(&Case { switches: 2, trims: 0, streams: 3, ..WHOLE });
    check(&Case { switches: 2, trims: 0, entries_max: 2000, ..WHOLE });
}

/// A random number for every draw.
struct Luck(u64);

impl Luck {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }

    fn index(&mut self, len: usize) -> usize {
        usize::try_from(self.below(len as u64)).expect("an index")
    }
}
