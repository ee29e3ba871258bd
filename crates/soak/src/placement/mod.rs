//! Programs over the caching allocator, step by step on it and on a naive model of PyTorch's allocator: after each step
//! both must have every block at the same address, and the driver calls must be exactly those that the model expects.
//!
//! Streams are paused, so that fences in them pass when the program says so, or when the allocator waits for them.
//! Without faults: the model does not know what an allocator does after one.

mod driver_calls;
mod model;

use std::sync::Arc;

use warpool::driver::decorate::Hooked;
use warpool::driver::sim::{SimConfig, SimDriver};
use warpool::driver::{CaptureMode, CaptureState, Captures as _, DeviceId, Graphs as _, StreamId};
use warpool::memory::pools::{PoolOptions, PrivatePools, Route};
use warpool::memory::raw::{Allocation, Request};
use warpool::memory::report::{BlockState, SegmentKind, SnapshotOptions};
use warpool::memory::settings::{FreeBlockOrder, Reserve};
use warpool::memory::{CachingAllocator, DeviceAllocator, MemPoolId, Settings};
use warpool::{Error, Instance, StreamLease};

use self::driver_calls::CallRecorder;
use self::model::{MappedRange, Model, Rules, State};
use crate::allocators::into_block;
use crate::context::Context;
use crate::rng::Rng;

const DEVICE: DeviceId = DeviceId(0);
const MIB: u64 = 1 << 20;

struct Run<'a> {
    context: &'a mut Context,
    sim: Arc<SimDriver>,
    driver: Arc<Hooked<CallRecorder>>,
    allocator: Arc<CachingAllocator>,
    model: Model,
    settings: Settings,
    bytes_total: u64,
    streams: Vec<StreamId>,
    /// Streams that live as long as the instance: fences that are left to later calls are recorded in them, too.
    _leases: Vec<StreamLease>,
    live: Vec<Allocation>,
    /// Pools in use.
    pools: Vec<MemPoolId>,
    /// Released pools.
    released_pools: Vec<MemPoolId>,
    scopes: Vec<(MemPoolId, Route)>,
}

/// Runs one program.
pub fn run(context: &mut Context) {
    let mut run = Run::new(context);
    for _ in 0..40 + run.context.rng.below(80) {
        run.step();
        run.compare();
    }
    run.finish();
}

impl<'a> Run<'a> {
    fn new(context: &'a mut Context) -> Self {
        let rng = &mut context.rng;
        let capacity = rng.pick(&[120, 240, 500, 2000]) * MIB;
        let mut config = SimConfig::default().with_seed(context.seed).with_capacity(capacity);
        config.devices[0].bytes_context = 2 * MIB;
        let bytes_total = config.devices[0].properties.bytes_total;
        let sim = Arc::new(SimDriver::new(config));
        let driver = Arc::new(Hooked::with_hook(sim.clone(), CallRecorder::default()));
        let instance = Instance::new(driver.clone()).unwrap();
        let settings = draw_settings(rng);
        let allocator = Arc::new(CachingAllocator::new(&instance, settings.clone()));
        let device = instance.device(DEVICE.0).unwrap();
        let leases: Vec<StreamLease> = (0..1 + rng.below(3)).map(|_| device.lease_stream().unwrap()).collect();
        let streams: Vec<StreamId> = leases.iter().map(|lease| lease.stream().id()).collect();
        for &stream in &streams {
            sim.pause_stream(stream).unwrap();
        }
        context.step(format!("{} MiB, {} streams, {}", bytes_total / MIB, streams.len(), settings.to_conf_string()));
        let mut run = Self {
            context,
            model: Model::new(rules(&settings, bytes_total), bytes_total),
            sim,
            driver,
            allocator,
            settings,
            bytes_total,
            streams,
            _leases: leases,
            live: Vec::new(),
            pools: Vec::new(),
            released_pools: Vec::new(),
            scopes: Vec::new(),
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

    fn step(&mut self) {
        self.context.counts.operations += 1;
        self.start_step();
        match self.context.rng.below(40) {
            0..17 => self.allocate(),
            17..27 => self.free(),
            27..30 => self.record_use(),
            30 | 31 => self.run_paused(),
            32 => self.trim(),
            33 | 34 => self.change_pools(),
            35 | 36 => self.change_scopes(),
            37 => self.change_settings(),
            _ => self.change_capture(),
        }
    }

    fn allocate(&mut self) {
        let stream = self.context.rng.pick(&self.streams);
        let bytes = self.context.rng.request_bytes();
        let pool = (!self.pools.is_empty() && self.context.rng.one_in(3)).then(|| self.context.rng.pick(&self.pools));
        let mut request = Request::new(DEVICE, stream, bytes);
        request.pool = pool;
        self.context.step(format!("allocate {bytes} on {stream} from {pool:?}"));
        let routed = pool.unwrap_or_else(|| self.routed(stream));
        let outcome = self.allocator.allocate_raw(request);
        let mut calls = self.driver.hook().take();
        let expected = self.model.allocate(routed, stream, bytes, &mut calls);
        calls.expect_done();
        match outcome {
            Ok(allocation) => {
                assert_eq!(Some(allocation.ptr.0), expected, "the address of the block");
                self.context.counts.allocations += 1;
                if self.settings.expandable_segments {
                    self.context.made("expandable");
                }
                if self.settings.max_split_bytes.is_some_and(|most| allocation.bytes >= most) {
                    self.context.made("oversize");
                }
                self.live.push(allocation);
            }
            Err(Error::OutOfMemory(_)) => {
                assert_eq!(expected, None, "the model has memory for it");
                self.context.counts.out_of_memory += 1;
            }
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
        let allocation = self.live.swap_remove(self.context.rng.below(self.live.len()));
        let variant = self.context.rng.below(3);
        self.context.step(format!("free {} ({variant})", allocation.ptr));
        match variant {
            0 => self.allocator.free(allocation).unwrap(),
            1 => self.allocator.free_raw(allocation.ptr).unwrap(),
            _ => {
                let allocator: Arc<dyn DeviceAllocator> = self.allocator.clone();
                drop(into_block(&allocator, allocation));
            }
        }
        self.model.free(allocation.ptr.0, variant == 2);
    }

    fn record_use(&mut self) {
        if self.live.is_empty() {
            return;
        }
        let (allocation, stream) = (self.context.rng.pick(&self.live), self.context.rng.pick(&self.streams));
        self.context.step(format!("{stream} uses {}", allocation.ptr));
        self.allocator.record_use(allocation, stream).unwrap();
        self.model.record_use(allocation.ptr.0, stream);
    }

    fn run_paused(&mut self) {
        let (stream, count) = (self.context.rng.pick(&self.streams), 1 + self.context.rng.below(3) as u64);
        self.context.step(format!("{stream} runs {count} operations"));
        self.sim.run_paused(stream, count).unwrap();
    }

    fn trim(&mut self) {
        let known: Vec<MemPoolId> = [MemPoolId::DEFAULT, MemPoolId::DEFAULT]
            .into_iter()
            .chain(self.pools.iter().copied())
            .chain(self.released_pools.iter().copied())
            .collect();
        let pool = self.context.rng.pick(&known);
        self.context.step(format!("trim {pool}"));
        self.allocator.trim(DEVICE, pool).unwrap();
        let mut calls = self.driver.hook().take();
        self.model.trim(pool, &mut calls);
        calls.expect_done();
    }

    fn change_pools(&mut self) {
        if self.pools.is_empty() || self.context.rng.one_in(2) {
            let (use_on_oom, no_split) = (self.context.rng.one_in(3), self.context.rng.one_in(4));
            let options = PoolOptions { use_on_oom, no_split, ..PoolOptions::default() };
            let pool = match self.context.rng.below(2) {
                0 => self.allocator.create_graph_pool(DEVICE).unwrap(),
                _ => self.allocator.create_pool(DEVICE, options).unwrap(),
            };
            self.context.step(format!("pool {pool}, use_on_oom {use_on_oom}, no_split {no_split}"));
            let of_user = pool.user > 0;
            self.model.create_pool(pool, no_split && of_user, use_on_oom && of_user);
            self.pools.push(pool);
            self.context.made("pool");
        } else {
            let pool = self.pools.swap_remove(self.context.rng.below(self.pools.len()));
            self.context.step(format!("pool {pool} is released"));
            self.allocator.release_pool(DEVICE, pool).unwrap();
            self.model.release_pool(pool);
            self.released_pools.push(pool);
        }
    }

    fn change_scopes(&mut self) {
        if !self.scopes.is_empty() && self.context.rng.one_in(2) {
            let (pool, _) = self.scopes.remove(self.context.rng.below(self.scopes.len()));
            self.context.step(format!("scope of {pool} ends"));
            self.allocator.end_routing(DEVICE, pool).unwrap();
            self.model.release_pool(pool);
        } else if !self.pools.is_empty() {
            let pool = self.context.rng.pick(&self.pools);
            let mut route = match self.context.rng.below(3) {
                0 => Route::Thread(std::thread::current().id()),
                1 => Route::Everything,
                _ => Route::Stream(self.context.rng.pick(&self.streams)),
            };
            if let Some(stream) = self.model.capturing
                && let CaptureState::Active(capture) = self.sim.capture_state(stream).unwrap()
            {
                route = Route::Capture(capture);
            }
            self.context.step(format!("scope of {pool}: {route:?}"));
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
        match self.context.rng.below(4) {
            0 => settings.expandable_segments = !settings.expandable_segments,
            1 => settings.roundup_power2_divisions = [self.context.rng.pick(&[0, 2, 4, 8]); 16],
            2 => settings.free_block_order = self.context.rng.pick(&FreeBlockOrder::ALL),
            _ => {
                let cap = self.context.rng.one_in(2).then(|| self.context.rng.pick(&[60, 100, 200]) * MIB);
                settings.memory_cap_bytes = cap;
                self.allocator.set_memory_cap(DEVICE, cap).unwrap();
            }
        }
        let settings = self.settings.clone();
        self.context.step(format!("settings {}", settings.to_conf_string()));
        self.model.rules = rules(&settings, self.bytes_total);
        self.allocator.set_settings(settings).unwrap();
    }

    fn change_capture(&mut self) {
        if let Some(stream) = self.model.capturing.take() {
            self.context.step(format!("the capture of {stream} ends"));
            let graph = self.driver.capture_end(stream).unwrap();
            self.driver.graph_destroy(graph).unwrap();
            self.allocator.capture_ended(DEVICE).unwrap();
            let of_capture = |(_, route): &(MemPoolId, Route)| matches!(route, Route::Capture(_));
            for (pool, _) in self.scopes.extract_if(.., |scope| of_capture(scope)).collect::<Vec<_>>() {
                self.allocator.end_routing(DEVICE, pool).unwrap();
                self.model.release_pool(pool);
            }
        } else if self.context.rng.one_in(2) {
            let stream = self.context.rng.pick(&self.streams);
            let mode = self.context.rng.pick(&[CaptureMode::Global, CaptureMode::ThreadLocal, CaptureMode::Relaxed]);
            self.context.step(format!("{stream} captures, {mode:?}"));
            self.allocator.capture_began(DEVICE).unwrap();
            self.model.process_pending();
            self.driver.capture_begin(stream, mode).unwrap();
            self.model.capturing = Some(stream);
            self.context.counts.captures += 1;
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
        if self.model.capturing.is_some() {
            self.change_capture();
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
        self.context.made_many("retry", self.allocator.stats(DEVICE).unwrap().num_alloc_retries);
        self.context.made_many("fence", self.model.recorded.values().sum());
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
