//! Random programs, step by step on the allocator and on the naive model: after each step both must have every block at
//! the same address, and the driver calls must be exactly those that the model expects.
//!
//! Streams are paused, so that fences in them pass when the program says so, or when the allocator waits for them.

use std::sync::Arc;

use warpool::driver::decorate::Hooked;
use warpool::driver::sim::{SimConfig, SimDriver};
use warpool::driver::{
    CaptureMode, CaptureState, Captures as _, DeviceId, Graphs as _, StreamId, StreamOptions, Streams as _,
};
use warpool::memory::{
    Allocation, BlockState, CachingAllocator, DeviceAllocator, DeviceBlock, FreeBlockOrder, MemPoolId, PoolOptions,
    PrivatePools, Request, Reserve, Route, SegmentKind, Settings, SnapshotOptions,
};
use warpool::{Error, Instance};
use warpool_testing::FailingSeed;

use super::driver_calls::CallRecorder;
use super::model::{MappedRange, Model, Rules, State};
use crate::common::rng::Rng;

const DEVICE: DeviceId = DeviceId(0);
const MIB: u64 = 1 << 20;

/// How often each operation happened, over all seeds.
#[derive(Debug, Default)]
pub struct Tally {
    pub steps: u64,
    pub retries: u64,
    pub ooms: u64,
    pub captures: u64,
    pub fences: u64,
    pub pools: u64,
    pub expandable: u64,
    pub oversize: u64,
}

struct Run {
    sim: Arc<SimDriver>,
    driver: Arc<Hooked<CallRecorder>>,
    allocator: Arc<CachingAllocator>,
    model: Model,
    settings: Settings,
    bytes_total: u64,
    streams: Vec<StreamId>,
    live: Vec<Allocation>,
    /// Pools in use.
    pools: Vec<MemPoolId>,
    /// Released pools.
    released_pools: Vec<MemPoolId>,
    scopes: Vec<(MemPoolId, Route)>,
    failing: FailingSeed,
    rng: Rng,
}

/// One program.
pub fn run(seed: u64, tally: &mut Tally) {
    let mut run = Run::new(seed);
    let steps = 40 + run.rng.below(80);
    for _ in 0..steps {
        run.step(tally);
        run.compare();
        tally.steps += 1;
    }
    run.finish();
    let stats = run.allocator.stats(DEVICE).unwrap();
    tally.retries += stats.num_alloc_retries;
    tally.ooms += stats.num_ooms;
    tally.fences += run.model.recorded.values().sum::<u64>();
}

impl Run {
    fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let mut config = SimConfig::default().with_seed(seed).with_capacity(rng.pick(&[120, 240, 500, 2000]) * MIB);
        config.devices[0].bytes_context = 2 * MIB;
        let bytes_total = config.devices[0].properties.bytes_total;
        let sim = Arc::new(SimDriver::new(config));
        let driver = Arc::new(Hooked::with_hook(sim.clone(), CallRecorder::default()));
        let instance = Instance::new(driver.clone()).unwrap();
        let settings = draw_settings(&mut rng);
        let allocator = Arc::new(CachingAllocator::new(&instance, settings.clone()));
        let streams: Vec<StreamId> = (0..1 + rng.below(3))
            .map(|_| driver.stream_create(DEVICE, StreamOptions { non_blocking: true, priority: 0 }).unwrap())
            .collect();
        for &stream in &streams {
            sim.pause_stream(stream).unwrap();
        }
        let mut failing = FailingSeed::new(seed);
        failing.push(format!("{} MiB, {} streams, {}", bytes_total / MIB, streams.len(), settings.to_conf_string()));
        let mut run = Self {
            model: Model::new(rules(&settings, bytes_total), bytes_total),
            sim,
            driver,
            allocator,
            settings,
            bytes_total,
            streams,
            live: Vec::new(),
            pools: Vec::new(),
            released_pools: Vec::new(),
            scopes: Vec::new(),
            failing,
            rng,
        };
        run.start_step();
        run
    }

    /// Discards driver calls made outside of steps, and counts the fences that have passed.
    fn start_step(&mut self) {
        drop(self.driver.hook().take());
        for &stream in &self.streams {
            let paused = self.sim.paused_work(stream).unwrap();
            let recorded = self.model.recorded.get(&stream).copied().unwrap_or(0);
            self.model.passed.insert(stream, recorded - paused);
        }
    }

    fn step(&mut self, tally: &mut Tally) {
        self.start_step();
        match self.rng.below(40) {
            0..17 => self.allocate(tally),
            17..27 => self.free(),
            27..30 => self.record_use(),
            30 | 31 => self.run_paused(),
            32 => self.trim(),
            33 | 34 => self.change_pools(tally),
            35 | 36 => self.change_scopes(),
            37 => self.change_settings(),
            _ => self.change_capture(tally),
        }
    }

    fn allocate(&mut self, tally: &mut Tally) {
        let stream = self.rng.pick(&self.streams);
        let bytes = self.rng.request_bytes();
        let pool = (!self.pools.is_empty() && self.rng.one_in(3)).then(|| self.rng.pick(&self.pools));
        let mut request = Request::new(DEVICE, stream, bytes);
        request.pool = pool;
        self.failing.push(format!("allocate {bytes} on {stream} from {pool:?}"));
        let routed = pool.unwrap_or_else(|| self.routed(stream));
        let outcome = self.allocator.allocate_raw(request);
        let mut calls = self.driver.hook().take();
        let expected = self.model.allocate(routed, stream, bytes, &mut calls);
        calls.expect_done();
        match outcome {
            Ok(allocation) => {
                assert_eq!(Some(allocation.ptr.0), expected, "the address of the block");
                tally.expandable += u64::from(self.settings.expandable_segments);
                tally.oversize += u64::from(self.settings.max_split_bytes.is_some_and(|most| allocation.bytes >= most));
                self.live.push(allocation);
            }
            Err(Error::OutOfMemory(_)) => assert_eq!(expected, None, "the model has memory for it"),
            Err(error) => panic!("{error}"),
        }
    }

    /// The pool of the newest scope that matches.
    fn routed(&self, stream: StreamId) -> MemPoolId {
        let matches = |route: &Route| match *route {
            Route::Thread(thread) => thread == std::thread::current().id(),
            Route::Stream(only) => only == stream,
            Route::Capture(_) => self.model.capturing == Some(stream),
            Route::Everything => true,
        };
        let newest = self.scopes.iter().rev().find(|(_, route)| matches(route));
        newest.map_or(MemPoolId::DEFAULT, |&(pool, _)| pool)
    }

    fn free(&mut self) {
        if self.live.is_empty() {
            return;
        }
        let allocation = self.live.swap_remove(self.rng.below(self.live.len()));
        let variant = self.rng.below(3);
        self.failing.push(format!("free {} ({variant})", allocation.ptr));
        match variant {
            0 => self.allocator.free(allocation).unwrap(),
            1 => self.allocator.free_raw(allocation.ptr).unwrap(),
            // SAFETY: it is live, and has no other owner.
            _ => drop(unsafe { DeviceBlock::from_raw(self.allocator.clone(), allocation) }),
        }
        self.model.free(allocation.ptr.0, variant == 2);
    }

    fn record_use(&mut self) {
        if self.live.is_empty() {
            return;
        }
        let (allocation, stream) = (self.rng.pick(&self.live), self.rng.pick(&self.streams));
        self.failing.push(format!("{stream} uses {}", allocation.ptr));
        self.allocator.record_use(allocation, stream).unwrap();
        self.model.record_use(allocation.ptr.0, stream);
    }

    fn run_paused(&mut self) {
        let (stream, count) = (self.rng.pick(&self.streams), 1 + self.rng.below(3) as u64);
        self.failing.push(format!("{stream} runs {count} operations"));
        self.sim.run_paused(stream, count).unwrap();
    }

    fn trim(&mut self) {
        let known: Vec<MemPoolId> = [MemPoolId::DEFAULT, MemPoolId::DEFAULT]
            .into_iter()
            .chain(self.pools.iter().copied())
            .chain(self.released_pools.iter().copied())
            .collect();
        let pool = self.rng.pick(&known);
        self.failing.push(format!("trim {pool}"));
        self.allocator.trim(DEVICE, pool).unwrap();
        let mut calls = self.driver.hook().take();
        self.model.trim(pool, &mut calls);
        calls.expect_done();
    }

    fn change_pools(&mut self, tally: &mut Tally) {
        if self.pools.is_empty() || self.rng.one_in(2) {
            let (use_on_oom, no_split) = (self.rng.one_in(3), self.rng.one_in(4));
            let options = PoolOptions { upstream: None, use_on_oom, no_split };
            let pool = match self.rng.below(2) {
                0 => self.allocator.create_graph_pool(DEVICE).unwrap(),
                _ => self.allocator.create_pool(DEVICE, options).unwrap(),
            };
            self.failing.push(format!("pool {pool}, use_on_oom {use_on_oom}, no_split {no_split}"));
            let of_user = pool.user > 0;
            self.model.create_pool(pool, no_split && of_user, use_on_oom && of_user);
            self.pools.push(pool);
            tally.pools += 1;
        } else {
            let pool = self.pools.swap_remove(self.rng.below(self.pools.len()));
            self.failing.push(format!("pool {pool} is released"));
            self.allocator.release_pool(DEVICE, pool).unwrap();
            self.model.release_pool(pool);
            self.released_pools.push(pool);
        }
    }

    fn change_scopes(&mut self) {
        if !self.scopes.is_empty() && self.rng.one_in(2) {
            let (pool, _) = self.scopes.remove(self.rng.below(self.scopes.len()));
            self.failing.push(format!("scope of {pool} ends"));
            self.allocator.end_routing(DEVICE, pool).unwrap();
            self.model.release_pool(pool);
        } else if !self.pools.is_empty() {
            let pool = self.rng.pick(&self.pools);
            let mut route = match self.rng.below(3) {
                0 => Route::Thread(std::thread::current().id()),
                1 => Route::Everything,
                _ => Route::Stream(self.rng.pick(&self.streams)),
            };
            if let Some(stream) = self.model.capturing
                && let CaptureState::Active(capture) = self.sim.capture_state(stream).unwrap()
            {
                route = Route::Capture(capture);
            }
            self.failing.push(format!("scope of {pool}: {route:?}"));
            match self.allocator.begin_routing(DEVICE, pool, route) {
                Ok(()) => {
                    self.scopes.push((pool, route));
                    self.model.retain_pool(pool);
                }
                Err(Error::AlreadyRouting { .. }) => assert!(self.scopes.iter().any(|&(open, _)| open == pool)),
                Err(error) => panic!("{error}"),
            }
        }
    }

    fn change_settings(&mut self) {
        let settings = &mut self.settings;
        match self.rng.below(4) {
            0 => settings.expandable_segments = !settings.expandable_segments,
            1 => settings.roundup_power2_divisions = [self.rng.pick(&[0, 2, 4, 8]); 16],
            2 => settings.free_block_order = self.rng.pick(&FreeBlockOrder::ALL),
            _ => {
                let cap = self.rng.one_in(2).then(|| self.rng.pick(&[60, 100, 200]) * MIB);
                settings.memory_cap_bytes = cap;
                self.allocator.set_memory_cap(DEVICE, cap).unwrap();
            }
        }
        let settings = self.settings.clone();
        self.failing.push(format!("settings {}", settings.to_conf_string()));
        self.model.rules = rules(&settings, self.bytes_total);
        self.allocator.set_settings(settings);
    }

    fn change_capture(&mut self, tally: &mut Tally) {
        if let Some(stream) = self.model.capturing.take() {
            self.failing.push(format!("the capture of {stream} ends"));
            let graph = self.driver.capture_end(stream).unwrap();
            self.driver.graph_destroy(graph).unwrap();
            self.allocator.capture_ended(DEVICE).unwrap();
            let of_capture = |(_, route): &(MemPoolId, Route)| matches!(route, Route::Capture(_));
            for (pool, _) in self.scopes.extract_if(.., |scope| of_capture(scope)).collect::<Vec<_>>() {
                self.allocator.end_routing(DEVICE, pool).unwrap();
                self.model.release_pool(pool);
            }
        } else if self.rng.one_in(2) {
            let stream = self.rng.pick(&self.streams);
            let mode = self.rng.pick(&[CaptureMode::Global, CaptureMode::ThreadLocal, CaptureMode::Relaxed]);
            self.failing.push(format!("{stream} captures, {mode:?}"));
            self.allocator.capture_began(DEVICE).unwrap();
            self.model.process_pending();
            self.driver.capture_begin(stream, mode).unwrap();
            self.model.capturing = Some(stream);
            tally.captures += 1;
        }
    }

    /// Compares the allocator with the model.
    fn compare(&self) {
        self.allocator.check();
        let mut shown: Vec<MappedRange> = Vec::new();
        for segment in self.allocator.snapshot(SnapshotOptions::default()).unwrap().segments {
            let blocks = segment.blocks.iter().map(|block| match block.state {
                BlockState::Inactive => (block.address, block.size, 0, State::Free),
                BlockState::ActiveAllocated => (block.address, block.size, block.requested_size, State::Allocated),
                BlockState::ActivePendingFree => (block.address, block.size, block.requested_size, State::PendingFree),
            });
            let (small, expandable) = (segment.kind == SegmentKind::Small, segment.is_expandable);
            shown.push((segment.address, segment.total_size, segment.pool, small, expandable, blocks.collect()));
        }
        let expected = self.model.mapped_ranges();
        assert_eq!(shown, expected, "mapped ranges");
        let stats = self.allocator.stats(DEVICE).unwrap();
        assert_eq!(
            (stats.num_alloc_retries, stats.num_ooms),
            (self.model.retries, self.model.ooms),
            "retries and ooms"
        );
        let all = || expected.iter().flat_map(|range| &range.5);
        let sum =
            |states: &[State]| -> u64 { all().filter(|block| states.contains(&block.3)).map(|block| block.1).sum() };
        assert_eq!(stats.allocated_bytes.all.current, sum(&[State::Allocated]));
        assert_eq!(stats.active_bytes.all.current, sum(&[State::Allocated, State::PendingFree]));
        assert_eq!(stats.reserved_bytes.all.current, expected.iter().map(|range| range.1).sum::<u64>());
        assert_eq!(stats.segment.all.current, expected.iter().filter(|range| !range.4).count() as u64);
    }

    /// Frees everything: nothing may be left, in the allocator or in the driver.
    fn finish(&mut self) {
        let mut tally = Tally::default();
        if self.model.capturing.is_some() {
            self.change_capture(&mut tally);
        }
        for (pool, _) in std::mem::take(&mut self.scopes) {
            self.allocator.end_routing(DEVICE, pool).unwrap();
        }
        for allocation in std::mem::take(&mut self.live) {
            self.allocator.free(allocation).unwrap();
        }
        for pool in std::mem::take(&mut self.pools) {
            self.allocator.release_pool(DEVICE, pool).unwrap();
        }
        self.allocator.trim(DEVICE, MemPoolId::DEFAULT).unwrap();
        self.allocator.check();
        assert_eq!(self.allocator.snapshot(SnapshotOptions::default()).unwrap().segments, []);
        let counts = self.sim.object_counts();
        let left = (counts.allocations, counts.reservations, counts.mappings, counts.physical);
        assert_eq!(left, (0, 0, 0, 0), "allocations, reservations, mappings, chunks");
        let hazards: Vec<String> = self.sim.hazards().iter().map(ToString::to_string).collect();
        assert!(hazards.is_empty(), "{hazards:#?}");
    }
}

fn draw_settings(rng: &mut Rng) -> Settings {
    let mut settings = Settings { large_segment_bytes: rng.pick(&[20, 20, 20, 12, 32]) * MIB, ..Settings::default() };
    settings.max_non_split_rounding_bytes = settings.large_segment_bytes + rng.pick(&[0, 4]) * MIB;
    if rng.one_in(3) {
        settings.max_split_bytes = Some(settings.large_segment_bytes + rng.pick(&[0, 2, 10]) * MIB);
    }
    if rng.one_in(3) {
        settings.garbage_collection_threshold = rng.pick(&[0.2, 0.5, 0.8]);
    }
    if rng.one_in(3) {
        settings.per_process_memory_fraction = rng.pick(&[0.3, 0.5, 0.9]);
    }
    if rng.one_in(3) {
        settings.memory_cap_bytes = Some(rng.pick(&[40, 90, 150, 300]) * MIB);
    }
    if rng.one_in(3) {
        settings.roundup_power2_divisions = std::array::from_fn(|_| rng.pick(&[0, 1, 2, 4, 8, 32]));
    }
    settings.expandable_segments = rng.one_in(2);
    if rng.one_in(4) {
        settings.expandable_segments_reserve = Some(Reserve::Bytes(rng.pick(&[20, 45, 100]) * MIB));
    }
    settings.free_block_order = rng.pick(&FreeBlockOrder::ALL);
    settings
}

fn rules(settings: &Settings, bytes_total: u64) -> Rules {
    let fraction = settings.per_process_memory_fraction;
    let by_fraction = (fraction < 1.0).then(|| (bytes_total as f64 * fraction).round() as u64);
    Rules {
        divisions: settings.roundup_power2_divisions,
        large_segment: settings.large_segment_bytes,
        max_split: settings.max_split_bytes,
        rounding: settings.max_non_split_rounding_bytes,
        garbage: settings.garbage_collection_threshold,
        expandable: settings.expandable_segments,
        by_address: settings.free_block_order == FreeBlockOrder::Address,
        limit: [by_fraction, settings.memory_cap_bytes].into_iter().flatten().min(),
        reserve: settings.expandable_segments_reserve.map(|reserve| match reserve {
            Reserve::Bytes(bytes) => bytes,
            Reserve::Fraction(_) => unreachable!("not drawn"),
        }),
    }
}
