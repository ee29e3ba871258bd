//! Random programs on the caching allocator, recorded by its own history, written and read as PyTorch's snapshots, and
//! replayed: every address and every segment must be reproduced, whatever settings, streams, pools, limits and trims
//! the program had, even if the first part of the history is missing.
//!
//! Heuristics infer what a recording does not contain. Random programs for which they fail are listed.
//! `WARPOOL_TEST_SCALE` multiplies the number of programs of each kind, two by default; 3 is the full size.

use std::sync::Arc;

use warpool::driver::sim::{SimConfig, SimDriver};
use warpool::driver::{DeviceId, Driver, StreamId, StreamOptions, Streams};
use warpool::memory::pools::{PoolOptions, PrivatePools};
use warpool::memory::raw::{Allocation, Request};
use warpool::memory::report::{Action, BlockState, HistoryOptions, SegmentInfo, Snapshot, SnapshotOptions};
use warpool::memory::settings::FreeBlockOrder;
use warpool::memory::{CachingAllocator, DeviceAllocator, MemPoolId, Settings};
use warpool::{Error, Instance};
use warpool_trace::replay::{ReplayOptions, ReplayReport, replay};

use crate::common::{MIB, read, scale, written};

const DEVICE: DeviceId = DeviceId(0);

/// What a random program does, beside allocating and freeing.
#[derive(Clone, Copy, Debug)]
struct Program {
    settings: &'static str,
    streams: usize,
    /// Other streams use some blocks when they are freed.
    shares_blocks: bool,
    /// It creates and releases private pools.
    has_pools: bool,
    /// It releases cached memory.
    trims: bool,
    /// It changes `expandable_segments`.
    toggles: bool,
    memory_limit: Option<u64>,
    /// The entries that the history keeps.
    entries_max: usize,
    /// The recording is as PyTorch 2.11 makes it: entries do not name pools, and free blocks are ordered by address.
    is_old: bool,
    /// Recordings that are not reproduced: the seed, and the eighth of the history that they start with.
    not_reproduced: &'static [(u64, usize)],
}

const PROGRAM: Program = Program {
    settings: "",
    streams: 1,
    shares_blocks: false,
    has_pools: false,
    trims: false,
    toggles: false,
    memory_limit: None,
    entries_max: usize::MAX,
    is_old: true,
    not_reproduced: &[],
};

/// A running program.
struct Running {
    program: Program,
    rng: fastrand::Rng,
    driver: Arc<SimDriver>,
    allocator: CachingAllocator,
    streams: Vec<StreamId>,
    /// A stream whose work does not complete by itself.
    paused: StreamId,
    pools: Vec<MemPoolId>,
    live: Vec<(Allocation, MemPoolId)>,
}

impl Running {
    fn new(program: Program, seed: u64) -> Self {
        let free_block_order = if program.is_old { FreeBlockOrder::Address } else { FreeBlockOrder::Registration };
        let settings = Settings { free_block_order, ..Settings::parse(program.settings).expect("valid settings") };
        let config = SimConfig { queue_depth: usize::MAX, ..SimConfig::default() };
        let driver = Arc::new(SimDriver::new(config.without_suballocation_tracking()));
        let instance = Instance::new(Arc::clone(&driver) as Arc<dyn Driver>).expect("an instance");
        let allocator = CachingAllocator::new(&instance, settings);
        let history = HistoryOptions { entries_max: program.entries_max, ..HistoryOptions::default() };
        allocator.record_history(Some(history)).expect("a history");
        allocator.set_memory_cap(DEVICE, program.memory_limit).expect("a device");
        let new_stream = || driver.stream_create(DEVICE, StreamOptions::default()).expect("a stream");
        let mut streams = vec![driver.stream_default(DEVICE).expect("a device")];
        streams.extend((1..program.streams).map(|_| new_stream()));
        let paused = new_stream();
        driver.pause_stream(paused).expect("a stream");
        let rng = fastrand::Rng::with_seed(seed);
        Self { program, rng, driver, allocator, streams, paused, pools: Vec::new(), live: Vec::new() }
    }

    fn step(&mut self) {
        match self.rng.u32(..100) {
            0..50 => self.allocate(),
            50..95 if !self.live.is_empty() => {
                let (block, _) = self.live.swap_remove(self.rng.usize(..self.live.len()));
                if self.program.shares_blocks && self.rng.u32(..4) == 0 {
                    let stream = if self.rng.bool() { self.paused } else { self.any_stream() };
                    self.allocator.record_use(block, stream).expect("a block");
                }
                self.allocator.free(block).expect("a block");
            }
            95..97 if self.program.shares_blocks => {
                self.driver.run_paused(self.paused, self.rng.u64(..4)).expect("a paused stream");
            }
            97 if self.program.has_pools && self.pools.len() < 3 => {
                self.pools.push(self.allocator.create_pool(DEVICE, PoolOptions::default()).expect("a device"));
            }
            98 if self.program.has_pools && !self.pools.is_empty() => self.release_pool(),
            99 if self.program.trims => {
                self.allocator.trim(DEVICE, MemPoolId::DEFAULT).expect("a device");
            }
            99 if self.program.toggles && self.rng.u32(..5) == 0 => {
                let settings = self.allocator.settings();
                let expandable_segments = !settings.expandable_segments;
                self.allocator.set_settings(Settings { expandable_segments, ..Settings::clone(&settings) }).unwrap();
            }
            _ => {}
        }
    }

    fn allocate(&mut self) {
        let bytes = match self.rng.u32(..10) {
            0..4 => self.rng.u64(1..=MIB),
            4..8 => self.rng.u64(1..=12 * MIB),
            _ => self.rng.u64(1..=60 * MIB),
        };
        let is_private = !self.pools.is_empty() && self.rng.u32(..3) == 0;
        let pool = if is_private { self.pools[self.rng.usize(..self.pools.len())] } else { MemPoolId::DEFAULT };
        let request = Request::new(DEVICE, self.any_stream(), bytes).in_pool(pool);
        match self.allocator.allocate_raw(request) {
            Ok(block) => self.live.push((block, pool)),
            Err(Error::OutOfMemory(_)) => {
                for _ in 0..self.live.len() / 2 {
                    let (block, _) = self.live.swap_remove(self.rng.usize(..self.live.len()));
                    self.allocator.free(block).expect("a block");
                }
            }
            Err(error) => panic!("{:?}: {error}", self.program),
        }
    }

    fn release_pool(&mut self) {
        let pool = self.pools.swap_remove(self.rng.usize(..self.pools.len()));
        let (freed, live): (Vec<_>, Vec<_>) = self.live.drain(..).partition(|&(_, of)| of == pool);
        self.live = live;
        freed.into_iter().for_each(|(block, _)| self.allocator.free(block).expect("a block"));
        self.allocator.release_pool(DEVICE, pool).expect("a pool");
        self.allocator.trim(DEVICE, pool).expect("a pool");
    }

    fn any_stream(&mut self) -> StreamId {
        self.streams[self.rng.usize(..self.streams.len())]
    }
}

/// Runs a random program and returns its recording, read back from a file, and its allocator.
fn record(program: Program, seed: u64) -> (Snapshot, CachingAllocator) {
    let mut running = Running::new(program, seed);
    (0..2000).for_each(|_| running.step());
    running.allocator.check();
    let taken = running.allocator.snapshot(SnapshotOptions::default()).expect("a snapshot");
    let mut recording = read(&written(&taken)).expect("a readable file").snapshot;
    assert_eq!(recording, taken, "seed {seed}: a snapshot is read as it was written");
    if program.is_old {
        recording.traces.iter_mut().flatten().for_each(|entry| entry.pool = None);
    }
    (recording, running.allocator)
}

/// Random programs of this kind are reproduced.
fn check(program: Program) {
    for seed in 0..2 * scale().min(3) {
        check_seed(program, seed);
    }
}

/// The same, also from seven later starts of the history.
fn check_with_late_starts(program: Program) {
    for seed in 0..2 * scale().min(3) {
        let recording = check_seed(program, seed);
        for eighth in 1..8 {
            let mut late = recording.clone();
            late.traces[0].drain(..recording.traces[0].len() * eighth / 8 + eighth);
            check_replay(&late, program, seed, eighth);
        }
    }
}

/// Records the program, replays it, and returns the recording.
fn check_seed(program: Program, seed: u64) -> Snapshot {
    let (recording, allocator) = record(program, seed);
    expect_stats(&recording, &allocator);
    let report = check_replay(&recording, program, seed, 0);
    if report.fidelity.exact && program.entries_max == usize::MAX {
        let stats = allocator.stats(DEVICE).expect("a device");
        let failures = recording.traces[0].iter().filter(|entry| entry.action == Action::Oom).count();
        let expected = (stats.reserved_bytes.all.peak, stats.num_alloc_retries, stats.num_ooms, failures as u64);
        let got = (report.peak_reserved_bytes, report.retries, report.ooms, report.ooms);
        assert_eq!(got, expected, "seed {seed}, {program:?}");
    }
    recording
}

fn check_replay(recording: &Snapshot, program: Program, seed: u64, eighth: usize) -> ReplayReport {
    let report = replay(recording, &ReplayOptions::default()).expect("a replay");
    let fidelity = &report.fidelity;
    let what = format!("seed {seed} from eighth {eighth}, {program:?}");
    let difference = fidelity.first_difference.as_ref().map(ToString::to_string);
    let expected = !program.not_reproduced.contains(&(seed, eighth));
    assert_eq!(fidelity.exact, expected, "{what}: {difference:?}, {:?}", report.inferred);
    report
}

/// The segments of a snapshot add up to the statistics.
fn expect_stats(recording: &Snapshot, allocator: &CachingAllocator) {
    let stats = allocator.stats(DEVICE).expect("a device");
    let sum = |of: fn(&SegmentInfo) -> u64| recording.segments.iter().map(of).sum::<u64>();
    assert_eq!(sum(|segment| segment.total_size), stats.reserved_bytes.all.current);
    assert_eq!(sum(|segment| segment.allocated_size), stats.allocated_bytes.all.current);
    assert_eq!(sum(|segment| segment.active_size), stats.active_bytes.all.current);
    assert_eq!(sum(|segment| segment.requested_size), stats.requested_bytes.all.current);
    let blocks = recording.segments.iter().flat_map(|segment| &segment.blocks);
    let allocated = blocks.filter(|block| block.state == BlockState::ActiveAllocated).count();
    assert_eq!(allocated as u64, stats.allocation.all.current);
}

#[test]
fn one_stream_is_reproduced() {
    check_with_late_starts(PROGRAM);
    check_with_late_starts(Program { settings: "expandable_segments:True", ..PROGRAM });
    let not_reproduced = &[(5, 7)];
    check_with_late_starts(Program { settings: "max_split_size_mb:30", not_reproduced, ..PROGRAM });
    check_with_late_starts(Program { settings: "roundup_power2_divisions:4", ..PROGRAM });
    check(Program { is_old: false, trims: true, ..PROGRAM });
    check(Program { is_old: false, settings: "max_split_size_mb:32,roundup_power2_divisions:4", ..PROGRAM });
}

#[test]
fn several_streams_and_shared_blocks_are_reproduced() {
    let program = Program { streams: 3, shares_blocks: true, ..PROGRAM };
    check_with_late_starts(program);
    check_with_late_starts(Program { settings: "expandable_segments:True", ..program });
}

#[test]
fn trims_are_reproduced() {
    let program = Program { streams: 2, shares_blocks: true, trims: true, ..PROGRAM };
    check_with_late_starts(program);
    check_with_late_starts(Program { settings: "expandable_segments:True", ..program });
    check_with_late_starts(Program { settings: "roundup_power2_divisions:[1:2,>:8]", ..program });
}

#[test]
fn pools_with_names_are_reproduced() {
    let program = Program { streams: 2, has_pools: true, trims: true, is_old: false, ..PROGRAM };
    check(program);
    check(Program { settings: "expandable_segments:True", ..program });
    check(Program { shares_blocks: true, memory_limit: Some(1024 * MIB), ..program });
}

#[test]
fn pools_without_names_are_inferred() {
    let program = Program { has_pools: true, ..PROGRAM };
    check(program);
    check(Program { settings: "expandable_segments:True", ..program });
}

#[test]
fn limits_are_inferred() {
    let program = Program { memory_limit: Some(1024 * MIB), ..PROGRAM };
    let sharing = Program { streams: 3, shares_blocks: true, ..program };
    check(program);
    check(Program { settings: "expandable_segments:True", ..program });
    check(Program { settings: "max_split_size_mb:30", ..program });
    check(sharing);
    check(Program { settings: "max_split_size_mb:40", not_reproduced: &[(0, 0)], ..sharing });
    check(Program { settings: "garbage_collection_threshold:0.6", ..program });
    let settings = "garbage_collection_threshold:0.8,max_split_size_mb:30";
    check(Program { settings, streams: 2, not_reproduced: &[(1, 0)], ..sharing });
}

#[test]
fn histories_that_lost_their_first_entries_are_reproduced() {
    let program = Program { entries_max: 2000, shares_blocks: true, is_old: false, ..PROGRAM };
    check(program);
    check(Program { settings: "expandable_segments:True", ..program });
    check(Program { settings: "max_split_size_mb:32", ..program });
}

#[test]
fn changes_of_expandable_segments_are_inferred() {
    let program = Program { toggles: true, shares_blocks: true, is_old: false, ..PROGRAM };
    check(Program { not_reproduced: &[(5, 0)], ..program });
    check(Program { streams: 3, ..program });
    check(Program { entries_max: 3000, not_reproduced: &[(5, 0)], ..program });
}
