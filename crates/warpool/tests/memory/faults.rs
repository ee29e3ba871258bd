//! Every driver call of a long scenario fails once, and pairs of them: the allocator stays consistent, leaks nothing
//! and works afterwards.
//!
//! The scenario continues after an error and skips blocks that it could not allocate. It fails on a broken invariant,
//! on a leak, and on an error without an injected fault.

use std::sync::Arc;

use warpool::driver::decorate::{FaultPlan, Faulty};
use warpool::driver::sim::{ObjectCounts, SimConfig, SimDriver};
use warpool::driver::{
    Call, CaptureMode, CaptureState, Captures as _, Copies as _, DeviceId, ErrorCode, Graphs as _, Pattern,
    Streams as _,
};
use warpool::memory::pools::{Checkpoints as _, PoolOptions, PrivatePools, Route};
use warpool::memory::raw::Request;
use warpool::memory::report::SnapshotOptions;
use warpool::memory::{Allocate as _, CachingAllocator, DeviceAllocator, DeviceBlock, MemPoolId, Settings};
use warpool::{Error, Instance, Result, Stream, StreamLease};

use crate::common::launch::launch_graph;

const ZERO: DeviceId = DeviceId(0);
const ONE: DeviceId = DeviceId(1);
const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const CAP: u64 = 120 * MIB;

/// Two small devices, a driver with fault injection, and an allocator.
struct FaultContext {
    sim: Arc<SimDriver>,
    faulty: Arc<Faulty>,
    instance: Instance,
    allocator: Arc<CachingAllocator>,
    main: Stream,
    side: Stream,
    far: Stream,
    _leases: Vec<StreamLease>,
    start: ObjectCounts,
}

impl FaultContext {
    fn new(settings: &str) -> Self {
        let mut config = SimConfig::default().with_devices(2).with_capacity(300 * MIB);
        for device in &mut config.devices {
            device.bytes_context = 2 * MIB;
        }
        let sim = Arc::new(SimDriver::new(config));
        let faulty = Arc::new(Faulty::new(sim.clone(), FaultPlan::new()));
        let instance = Instance::new(faulty.clone()).unwrap();
        let devices = [0, 0, 1].map(|index| instance.device(index).unwrap());
        let leases: Vec<StreamLease> = devices.iter().map(|device| device.lease_stream().unwrap()).collect();
        for device in instance.devices() {
            device.synchronize().unwrap();
        }
        let [main, side, far] = [0, 1, 2].map(|index: usize| leases[index].stream().clone());
        let allocator = Arc::new(CachingAllocator::new(&instance, Settings::parse(settings).unwrap()));
        let start = sim.object_counts();
        Self { sim, faulty, instance, allocator, main, side, far, _leases: leases, start }
    }

    /// The whole scenario. Errors are ignored if `tolerant`.
    fn scenario(&self, tolerant: bool) {
        let pass = |outcome: Result<()>| match outcome {
            Err(error) if !tolerant => panic!("without a fault: {error}"),
            _ => self.allocator.check(),
        };
        pass(self.peers());
        pass(self.blocks(None));
        pass(self.uses());
        pass(self.pools());
        pass(self.captures());
        pass(self.checkpoints());
        pass(self.limits());
        pass(self.switches());
        pass(self.allocator.trim(ZERO, MemPoolId::DEFAULT).map(drop));
        pass(self.allocator.trim(ONE, MemPoolId::DEFAULT).map(drop));
    }

    fn get(&self, bytes: u64, stream: &Stream) -> Result<DeviceBlock> {
        let block = self.allocator.allocate(bytes, stream)?;
        self.faulty.fill(block.ptr(), Pattern::U8(1), bytes.min(64), stream.id())?;
        Ok(block)
    }

    fn get_in(&self, pool: MemPoolId, bytes: u64, stream: &Stream) -> Result<DeviceBlock> {
        let allocator: Arc<dyn DeviceAllocator> = self.allocator.clone();
        DeviceBlock::allocate(&allocator, Request::new(stream.device_id(), stream.id(), bytes).in_pool(pool))
    }

    fn peers(&self) -> Result<()> {
        let first = self.get(3 * MIB, &self.main);
        let enabled = self.allocator.enable_peer_access(ONE, ZERO);
        let second = self.get(25 * MIB, &self.main);
        drop(first?);
        enabled?;
        second?.free()
    }

    /// Small and large blocks, holes, growth.
    fn blocks(&self, pool: Option<MemPoolId>) -> Result<()> {
        let mut blocks = Vec::new();
        let mut outcome = Ok(());
        for (bytes, stream) in [
            (KIB, &self.main),
            (300 * KIB, &self.side),
            (4 * MIB, &self.main),
            (15 * MIB, &self.main),
            (21 * MIB, &self.side),
            (MIB, &self.far),
            (9 * MIB, &self.far),
        ] {
            let got = match pool {
                Some(pool) if stream.device_id() == ZERO => self.get_in(pool, bytes, stream),
                _ => self.get(bytes, stream),
            };
            match got {
                Ok(block) => blocks.push(block),
                Err(error) => outcome = Err(error),
            }
        }
        // Frees every second one and trims, so that there are holes to grow into.
        let mut index = 0;
        blocks.retain(|_| {
            index += 1;
            index % 2 == 0
        });
        let trimmed = self.allocator.trim(ZERO, MemPoolId::DEFAULT);
        let again = self.get(30 * MIB, &self.main);
        self.allocator.check();
        for block in blocks {
            let ptr = block.ptr();
            block.free()?;
            assert!(matches!(self.allocator.free_raw(ptr), Err(Error::UnknownPointer { .. }) | Ok(())));
        }
        outcome.and(trimmed.map(drop)).and(again.map(drop))
    }

    /// Other streams use blocks; destructors and callers free them.
    fn uses(&self) -> Result<()> {
        let mut outcome = Ok(());
        let mut keep_first = |result: Result<()>| {
            if let Err(error) = result {
                outcome = Err(error);
            }
        };
        for round in 0..4 {
            match self.get(2 * MIB, &self.main) {
                Ok(block) => {
                    // A use that could not be recorded is not made.
                    let recorded = block.record_use(&self.side).and_then(|()| block.record_use(&self.far));
                    if recorded.is_ok() {
                        keep_first(
                            self.side.wait_stream(&self.main).and_then(|()| {
                                Ok(self.faulty.fill(block.ptr(), Pattern::U8(2), 64, self.side.id())?)
                            }),
                        );
                    }
                    keep_first(recorded);
                    if round % 2 == 0 { drop(block) } else { keep_first(block.free()) }
                }
                Err(error) => keep_first(Err(error)),
            }
            keep_first(self.get(5 * KIB, &self.side).map(drop));
            self.allocator.check();
        }
        keep_first(self.side.synchronize());
        keep_first(self.get(2 * MIB, &self.main).map(drop));
        outcome
    }

    /// Private pools, by id and by scope; one without splits.
    fn pools(&self) -> Result<()> {
        let pools = &self.allocator;
        let plain = pools.create_pool(ZERO, PoolOptions::default())?;
        let options = PoolOptions { no_split: true, use_on_oom: true, ..PoolOptions::default() };
        let whole = pools.create_pool(ZERO, options)?;
        let named = self.blocks(Some(plain));
        let big = self.get_in(whole, 12 * MIB, &self.main);
        pools.begin_routing(ZERO, whole, Route::Stream(self.side.id()))?;
        let routed = self.get(MIB, &self.side);
        pools.end_routing(ZERO, whole)?;
        let kept = routed.and_then(|block| big.map(|big| (block, big)));
        pools.release_pool(ZERO, plain)?;
        pools.release_pool(ZERO, whole)?;
        let trimmed = self.allocator.trim(ZERO, plain);
        drop(kept?);
        named.and(trimmed.map(drop)).and(self.allocator.trim(ZERO, whole).map(drop))
    }

    /// A graph with its own pool, captured, launched and destroyed, while blocks with uses are freed.
    fn captures(&self) -> Result<()> {
        let pools = &self.allocator;
        let pool = pools.create_graph_pool(ZERO)?;
        let outside = self.get(3 * MIB, &self.main);
        if let Ok(block) = &outside {
            // A use that could not be recorded is not made.
            let _ = block.record_use(&self.side);
        }
        let outcome = self.capture(pool, outside.ok());
        pools.release_pool(ZERO, pool)?;
        self.allocator.check();
        outcome
    }

    fn capture(&self, pool: MemPoolId, outside: Option<DeviceBlock>) -> Result<()> {
        self.faulty.capture_begin(self.main.id(), CaptureMode::ThreadLocal)?;
        self.allocator.capture_began(ZERO)?;
        let inside = (|| {
            let CaptureState::Active(capture) = self.faulty.capture_state(self.main.id())? else {
                panic!("the stream should capture");
            };
            self.allocator.begin_routing(ZERO, pool, Route::Capture(capture))?;
            let outcome = (|| {
                let block = self.get(6 * MIB, &self.main)?;
                self.side.wait_stream(&self.main)?;
                let recorded = block.record_use(&self.side);
                let filled = self.faulty.fill(block.ptr(), Pattern::U8(3), 64, self.side.id());
                drop(outside);
                let joined = until_no_fault(|| self.main.wait_stream(&self.side));
                block.free()?;
                let next = self.get(2 * MIB, &self.main)?;
                let eager = self.get(40 * MIB, &self.far);
                recorded.and(filled.map_err(Error::from)).and(joined).and(eager.map(drop)).map(|()| next)
            })();
            self.allocator.end_routing(ZERO, pool)?;
            outcome
        })();
        // The capture has to end, whatever happened.
        let ended = until_no_fault(|| self.faulty.capture_end(self.main.id()));
        self.allocator.capture_ended(ZERO)?;
        let graph = ended?;
        let launched = inside.and_then(|block| {
            let exec = self.faulty.graph_instantiate(graph, Default::default())?;
            let launched = launch_graph(&*self.faulty, exec, self.main.id());
            until_no_fault(|| self.faulty.stream_synchronize(self.main.id()))?;
            until_no_fault(|| self.faulty.graph_exec_destroy(exec))?;
            drop(block);
            launched
        });
        until_no_fault(|| self.faulty.graph_destroy(graph))?;
        launched
    }

    /// A checkpoint of a pool, and its restore.
    fn checkpoints(&self) -> Result<()> {
        let pool = self.allocator.create_graph_pool(ZERO)?;
        let outcome = (|| {
            let first = self.get_in(pool, 5 * MIB, &self.main)?;
            let kept = self.allocator.checkpoint(ZERO, pool)?;
            let second = self.get_in(pool, 7 * MIB, &self.main);
            let restored = self.allocator.restore(&kept)?;
            // The restored blocks replace those from before.
            let _ = first.into_raw();
            if let Ok(second) = second {
                let _ = second.into_raw();
            }
            for allocation in restored.allocated {
                self.allocator.free(allocation)?;
            }
            Ok(())
        })();
        self.allocator.release_pool(ZERO, pool)?;
        outcome
    }

    /// Out of memory under a cap, with every retry, and afterwards.
    fn limits(&self) -> Result<()> {
        let mut outcome = Ok(());
        self.allocator.set_memory_cap(ZERO, Some(CAP))?;
        let mut blocks: Vec<DeviceBlock> = Vec::new();
        for bytes in [20 * MIB, 30 * MIB, 40 * MIB, 40 * MIB, MIB, 500 * MIB] {
            match self.get(bytes, &self.main) {
                Ok(block) => blocks.push(block),
                Err(Error::OutOfMemory(_)) => {}
                Err(error) => outcome = Err(error),
            }
            self.allocator.check();
        }
        if let Some(block) = blocks.first() {
            let _ = block.record_use(&self.side);
        }
        drop(blocks);
        // Cached memory and pending frees make room.
        match self.get(90 * MIB, &self.main) {
            Ok(block) => drop(block),
            Err(error) => outcome = Err(error),
        }
        self.allocator.set_memory_cap(ZERO, None)?;
        outcome
    }

    /// Caching off and on, expandable segments on and off, with blocks allocated before.
    fn switches(&self) -> Result<()> {
        let before = self.get(2 * MIB, &self.main);
        let mut settings = (*self.allocator.settings()).clone();
        settings.expandable_segments = !settings.expandable_segments;
        self.allocator.set_settings(settings.clone()).unwrap();
        let between = self.get(2 * MIB, &self.main);
        settings.expandable_segments = !settings.expandable_segments;
        self.allocator.set_settings(settings).unwrap();
        self.allocator.set_caching(false).unwrap();
        let direct = self.allocator.allocate_raw(Request::new(ZERO, self.main.id(), MIB));
        self.allocator.set_caching(true).unwrap();
        // A free that failed can be repeated.
        let freed = direct.and_then(|allocation| until_no_fault(|| self.allocator.free(allocation)));
        drop(before?);
        drop(between?);
        freed
    }

    /// Without faults: everything is released, and every kind of request works.
    fn expect_usable(&self, about: &str) {
        self.faulty.clear_plan();
        self.allocator.check();
        self.release_everything(about);
        let live = self.allocator.stats(ZERO).unwrap().allocation.all.current;
        assert_eq!(live, 0, "{about}: blocks are lost");
        self.scenario(false);
        self.release_everything(about);
    }

    fn release_everything(&self, about: &str) {
        for device in [ZERO, ONE] {
            self.allocator.trim(device, MemPoolId::DEFAULT).unwrap();
        }
        self.allocator.check();
        for device in self.instance.devices() {
            device.synchronize().unwrap();
            device.event_pool().trim().unwrap();
        }
        let left = self.allocator.snapshot(SnapshotOptions::default()).unwrap().segments;
        assert!(left.is_empty(), "{about}: {left:#?}");
        assert_eq!(self.sim.object_counts(), self.start, "{about}: driver objects at the end and at the start");
        let hazards: Vec<String> = self.sim.hazards().iter().map(ToString::to_string).collect();
        assert!(hazards.is_empty(), "{about}: {hazards:#?}");
    }
}

/// Repeats a required call until no fault is injected.
fn until_no_fault<T, E: Into<Error>>(mut call: impl FnMut() -> std::result::Result<T, E>) -> Result<T> {
    loop {
        match call().map_err(Into::into) {
            Err(error) if error.to_string().contains("injected fault") => {}
            outcome => return outcome,
        }
    }
}

/// The settings to run with.
const SETTINGS: [&str; 4] = [
    "",
    "expandable_segments:True",
    "expandable_segments:True,graph_capture_record_stream_reuse:True",
    "max_split_size_mb:20,per_process_memory_fraction:0.5,garbage_collection_threshold:0.2",
];

/// How many driver calls the scenario makes.
fn calls(settings: &str) -> u64 {
    let context = FaultContext::new(settings);
    let before = context.sim.calls_made();
    context.scenario(false);
    let calls = context.sim.calls_made() - before;
    context.release_everything("without faults");
    calls
}

fn check(settings: &str, plan: FaultPlan) {
    let context = FaultContext::new(settings);
    context.faulty.set_plan(plan);
    context.scenario(true);
    let about = format!("{settings:?}, with {:?} failing", context.faulty.injected());
    context.expect_usable(&about);
}

#[test]
fn every_call_may_fail_once() {
    for settings in SETTINGS {
        let calls = calls(settings);
        assert!(calls > 150, "the scenario makes only {calls} calls");
        for code in [ErrorCode::OutOfMemory, ErrorCode::UnknownError, ErrorCode::LaunchFailed] {
            for nth in 1..=calls {
                check(settings, FaultPlan::new().fail_nth_of_all(nth, code));
            }
        }
    }
}

#[test]
fn two_calls_may_fail() {
    for settings in SETTINGS {
        let calls = calls(settings);
        for nth in 1..=calls {
            for apart in [1, 3] {
                let code = if nth % 2 == 0 { ErrorCode::OutOfMemory } else { ErrorCode::LaunchFailed };
                check(settings, FaultPlan::new().fail_nth_of_all(nth, code).fail_nth_of_all(nth + apart, code));
            }
        }
    }
}

#[test]
fn a_share_of_all_calls_may_fail() {
    for settings in SETTINGS {
        for seed in 0..200 {
            let code = [ErrorCode::OutOfMemory, ErrorCode::UnknownError][seed as usize % 2];
            check(settings, FaultPlan::new().fail_fraction(&[], 0.1, seed, code));
        }
    }
}

/// Found by two faults in a row: the scope of a capture was ignored when the capture status could not be read.
#[test]
fn a_request_in_a_capture_is_routed_or_fails() {
    let context = FaultContext::new("");
    let pool = context.allocator.create_graph_pool(ZERO).unwrap();
    context.allocator.capture_began(ZERO).unwrap();
    context.faulty.capture_begin(context.main.id(), CaptureMode::ThreadLocal).unwrap();
    let CaptureState::Active(capture) = context.faulty.capture_state(context.main.id()).unwrap() else {
        panic!("the stream should capture")
    };
    context.allocator.begin_routing(ZERO, pool, Route::Capture(capture)).unwrap();
    context.faulty.set_plan(FaultPlan::new().fail_nth_of_all(1, ErrorCode::UnknownError));
    let refused = context.allocator.allocate(MIB, &context.main).unwrap_err();
    assert_eq!(refused.driver().map(|error| error.call), Some("capture_state"));
    context.allocator.allocate(MIB, &context.main).unwrap().free().unwrap();
    assert!(
        context.allocator.snapshot(SnapshotOptions::default()).unwrap().segments.iter().all(|one| one.pool == pool)
    );
}

/// Found by two faults in a row: mapping memory failed, and so did undoing the partial mapping; the segment could never
/// be released.
#[test]
fn a_mapping_that_could_not_be_undone_is_retried() {
    let context = FaultContext::new("expandable_segments:True");
    let plan = FaultPlan::new().fail_nth(Call::VmSetAccess, 1, ErrorCode::UnknownError).fail_nth(
        Call::VmUnmap,
        1,
        ErrorCode::UnknownError,
    );
    context.faulty.set_plan(plan);
    let refused = context.allocator.allocate(50 * MIB, &context.main).unwrap_err();
    assert_eq!(refused.driver().map(|error| error.call), Some("vm_set_access"));
    context.allocator.allocate(50 * MIB, &context.main).unwrap().free().unwrap();
    context.release_everything("after both");
}

/// Found by `warpool soak`: the same, and then a request that needs all memory, while expandable segments are off. It
/// failed with an error of the driver, which cannot release addresses in which something is mapped.
#[test]
fn memory_is_released_beside_a_mapping_that_could_not_be_undone() {
    for unmap_fails in [1, 3] {
        let context = FaultContext::new("expandable_segments:True");
        let mut plan = FaultPlan::new().fail_nth(Call::VmSetAccess, 1, ErrorCode::UnknownError);
        for nth in 1..=unmap_fails {
            plan = plan.fail_nth(Call::VmUnmap, nth, ErrorCode::UnknownError);
        }
        context.faulty.set_plan(plan);
        context.allocator.allocate(30 * MIB, &context.main).unwrap_err();
        context.allocator.set_settings(Settings::default()).unwrap();
        let held = context.allocator.allocate(100 * MIB, &context.main).unwrap();
        let outcome = context.allocator.allocate(250 * MIB, &context.main);
        assert!(matches!(outcome, Err(Error::OutOfMemory(_))), "{outcome:?}");
        context.allocator.check();
        held.free().unwrap();
        context.faulty.clear_plan();
        context.allocator.trim(ZERO, MemPoolId::DEFAULT).unwrap();
        assert_eq!(context.sim.object_counts().bytes_used, context.start.bytes_used);
    }
}
