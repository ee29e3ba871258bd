//! Random programs on the real allocator, recorded by its own history and replayed: every address and every segment
//! must come out again, with whatever settings, streams, pools, limits and trims the program had, also when the
//! beginning of the history is lost.

mod luck;

use std::sync::Arc;

use luck::Random;
use warpool::driver::sim::{SimConfig, SimDriver};
use warpool::driver::{DeviceId, Driver, StreamId, StreamOptions, Streams};
use warpool::memory::{
    Action, Allocation, CachingAllocator, DeviceAllocator, FreeBlockOrder, HistoryOptions, MemPoolId, PoolKeeper,
    PoolOptions, Request, Settings, Snapshot, SnapshotOptions,
};
use warpool::{Error, Instance};
use warpool_trace::replay::{ReplayOptions, ReplayReport, replay};

const DEVICE: DeviceId = DeviceId(0);
const MIB: u64 = 1 << 20;

/// What a program may do, beside allocating and freeing.
#[derive(Clone, Copy, Debug, Default)]
struct Traits {
    streams: usize,
    /// Other streams use blocks.
    shares: bool,
    pools: bool,
    trims: bool,
    cap: Option<u64>,
    /// Entries without pools, free blocks by address: as PyTorch 2.11 records.
    old: bool,
}

/// Runs a random program and records it.
fn record(seed: u64, settings: &str, traits: Traits) -> Snapshot {
    let mut random = Random::new(seed);
    let order = if traits.old { FreeBlockOrder::Address } else { FreeBlockOrder::Registration };
    let settings = Settings { free_block_order: order, ..Settings::parse(settings).expect("a good string") };
    let driver = Arc::new(SimDriver::new(
        SimConfig { queue_depth: usize::MAX, ..SimConfig::default() }.without_suballocation_tracking(),
    ));
    let instance = Instance::new(Arc::clone(&driver) as Arc<dyn Driver>).expect("a device");
    let allocator = CachingAllocator::new(&instance, settings);
    allocator.record_history(Some(HistoryOptions::default())).expect("a history");
    allocator.set_memory_cap(DEVICE, traits.cap).expect("a device");

    let mut streams = vec![driver.stream_default(DEVICE).expect("a device")];
    let new_stream = || driver.stream_create(DEVICE, StreamOptions::default()).expect("a stream");
    streams.extend((1..traits.streams).map(|_| new_stream()));
    let user: StreamId = new_stream();
    driver.pause_stream(user).expect("a stream");

    let mut pools: Vec<MemPoolId> = Vec::new();
    let mut live: Vec<(Allocation, MemPoolId)> = Vec::new();
    for _ in 0..2000 {
        match random.below(100) {
            0..50 => {
                let bytes = match random.below(10) {
                    0..4 => 1 + random.below(MIB),
                    4..8 => 1 + random.below(12 * MIB),
                    _ => 1 + random.below(60 * MIB),
                };
                let private = traits.pools && random.below(3) == 0 && !pools.is_empty();
                let pool = if private { pools[random.index(pools.len())] } else { MemPoolId::DEFAULT };
                let request = Request::new(DEVICE, streams[random.index(streams.len())], bytes).in_pool(pool);
                match allocator.allocate_raw(request) {
                    Ok(block) => live.push((block, pool)),
                    Err(Error::OutOfMemory(_)) => free_half(&allocator, &mut live, &mut random),
                    Err(error) => panic!("seed {seed}: {error}"),
                }
            }
            50..95 if !live.is_empty() => {
                let (block, _) = live.swap_remove(random.index(live.len()));
                if traits.shares && random.below(4) == 0 {
                    allocator.record_use(block, user).expect("a block");
                }
                allocator.free(block).expect("a block");
            }
            95..97 if traits.shares => drop(driver.run_paused(user, random.below(4)).expect("a held stream")),
            97 if traits.pools && pools.len() < 3 => {
                pools.push(allocator.create_pool(DEVICE, PoolOptions::default()).expect("a device"));
            }
            98 if traits.pools && !pools.is_empty() => {
                let pool = pools.swap_remove(random.index(pools.len()));
                let (gone, kept): (Vec<_>, Vec<_>) = live.into_iter().partition(|&(_, of)| of == pool);
                live = kept;
                gone.into_iter().for_each(|(block, _)| allocator.free(block).expect("a block"));
                allocator.release_pool(DEVICE, pool).expect("a pool");
                allocator.trim(DEVICE, pool).expect("a pool");
            }
            99 if traits.trims => drop(allocator.trim(DEVICE, MemPoolId::DEFAULT).expect("a device")),
            _ => {}
        }
    }
    let mut snapshot = allocator.snapshot(SnapshotOptions::default()).expect("a snapshot");
    if traits.old {
        snapshot.traces.iter_mut().flatten().for_each(|entry| entry.pool = None);
    }
    snapshot
}

fn free_half(allocator: &CachingAllocator, live: &mut Vec<(Allocation, MemPoolId)>, random: &mut Random) {
    for _ in 0..live.len() / 2 {
        let (block, _) = live.swap_remove(random.index(live.len()));
        allocator.free(block).expect("a block");
    }
}

/// The history without its first `count` entries.
fn cut(recording: &Snapshot, count: usize) -> Snapshot {
    let mut recording = recording.clone();
    recording.traces[0].drain(..count);
    recording
}

fn replayed(recording: &Snapshot) -> ReplayReport {
    replay(recording, &ReplayOptions::default()).expect("a replay")
}

/// Programs of some kind come out again, whole and without their beginning.
fn check(settings: &str, traits: Traits, cuts: bool) {
    for seed in 0..6 {
        let recording = record(seed, settings, traits);
        let report = replayed(&recording);
        let difference = report.fidelity.first_difference.as_ref().map(ToString::to_string);
        assert!(report.fidelity.exact, "seed {seed}, {settings:?}, {traits:?}: {difference:?}, {:?}", report.inferred);
        let failures = recording.traces[0].iter().filter(|entry| entry.action == Action::Oom).count();
        assert_eq!(report.ooms, failures as u64, "seed {seed}");
        for eighth in 1..if cuts { 8 } else { 0 } {
            let count = recording.traces[0].len() * eighth / 8 + eighth;
            let report = replayed(&cut(&recording, count));
            let difference = report.fidelity.first_difference.as_ref().map(ToString::to_string);
            assert!(
                report.fidelity.exact,
                "seed {seed} from {count} on, {settings:?}, {traits:?}: {difference:?}, {:?}",
                report.inferred
            );
        }
    }
}

const ONE: Traits = Traits { streams: 1, shares: false, pools: false, trims: false, cap: None, old: true };

#[test]
fn one_stream() {
    check("", ONE, true);
    check("expandable_segments:True", ONE, true);
    check("max_split_size_mb:30", ONE, true);
    check("roundup_power2_divisions:4", ONE, true);
    check("", Traits { old: false, ..ONE }, false);
}

#[test]
fn several_streams_and_shared_blocks() {
    let traits = Traits { streams: 3, shares: true, ..ONE };
    check("", traits, true);
    check("expandable_segments:True", traits, true);
}

#[test]
fn trims() {
    let traits = Traits { streams: 2, shares: true, trims: true, ..ONE };
    check("", traits, true);
    check("expandable_segments:True", traits, true);
    check("roundup_power2_divisions:[1:2,>:8]", traits, true);
}

#[test]
fn pools_that_are_named() {
    let traits = Traits { streams: 2, pools: true, trims: true, old: false, ..ONE };
    check("", traits, false);
    check("expandable_segments:True", traits, false);
    check("", Traits { shares: true, cap: Some(1024 * MIB), ..traits }, false);
}

#[test]
fn pools_that_are_not_named() {
    let traits = Traits { pools: true, ..ONE };
    check("", traits, false);
    check("expandable_segments:True", traits, false);
}

#[test]
fn limits() {
    let traits = Traits { cap: Some(1024 * MIB), ..ONE };
    check("", traits, false);
    check("expandable_segments:True", traits, false);
    check("max_split_size_mb:30", traits, false);
    check("", Traits { streams: 3, shares: true, ..traits }, false);
    check("max_split_size_mb:40", Traits { streams: 3, shares: true, ..traits }, false);
    check("garbage_collection_threshold:0.6", traits, false);
    check(
        "garbage_collection_threshold:0.8,max_split_size_mb:30",
        Traits { streams: 2, shares: true, ..traits },
        false,
    );
}
