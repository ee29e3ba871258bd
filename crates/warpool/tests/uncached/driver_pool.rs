//! [`DriverPoolAllocator`] beyond the common contract: captures, joined frees, injected faults.

use std::sync::Arc;

use crate::common::launch::launch_graph;
use warpool::driver::decorate::{FaultPlan, Faulty};
use warpool::driver::sim::{SimConfig, SimDriver};
use warpool::driver::{
    Call, CaptureMode, DeviceId, Driver, ErrorCode, GraphExecId, InstantiateOptions, NodeKind, Pattern, PoolAttribute,
    StreamOptions,
};
use warpool::memory::raw::{Allocation, Request};
use warpool::memory::report::{Action, HistoryOptions, SnapshotOptions};
use warpool::memory::{DeviceAllocator, DriverPoolAllocator, MemPoolId, Settings};
use warpool::{Error, Instance, Stream};

const DEVICE: DeviceId = DeviceId(0);
const MIB: u64 = 1 << 20;

struct TestContext {
    sim: Arc<SimDriver>,
    instance: Instance,
    allocator: DriverPoolAllocator,
}

impl TestContext {
    fn new() -> Self {
        let (sim, instance) = crate::common::machine(1);
        let allocator = DriverPoolAllocator::new(&instance);
        Self { sim, instance, allocator }
    }

    fn driver(&self) -> &dyn Driver {
        &*self.sim
    }

    fn stream(&self) -> Stream {
        self.instance.device(0).unwrap().pool_stream().unwrap()
    }

    fn allocate(&self, bytes: u64, stream: &Stream) -> Allocation {
        self.allocator.allocate_raw(Request::new(DEVICE, stream.id(), bytes)).unwrap()
    }

    fn fill(&self, block: Allocation, value: u8, stream: &Stream) {
        self.driver().fill(block.ptr, Pattern::U8(value), block.bytes_requested, stream.id()).unwrap();
    }

    fn byte_at(&self, block: Allocation) -> u8 {
        let mut byte = [0];
        self.driver().download(DEVICE, block.ptr, &mut byte).unwrap();
        byte[0]
    }

    fn active(&self) -> u64 {
        self.allocator.stats(DEVICE).unwrap().active.all.current
    }

    /// Ends a capture. Returns the kinds of its nodes, and the instantiated graph.
    fn end(&self, stream: &Stream) -> (Vec<NodeKind>, GraphExecId) {
        let graph = self.driver().capture_end(stream.id()).unwrap();
        let kinds = self.driver().graph_topology(graph).unwrap().nodes.iter().map(|node| node.kind).collect();
        let exec = self.driver().graph_instantiate(graph, InstantiateOptions::default()).unwrap();
        (kinds, exec)
    }

    #[track_caller]
    fn expect_no_hazard(&self) {
        assert!(self.sim.hazards().is_empty(), "{:#?}", self.sim.hazards());
    }
}

#[test]
fn the_pool_is_set_up_at_first_use_and_keeps_freed_memory() {
    let context = TestContext::new();
    let stream = context.stream();
    let pool = context.driver().pool_default(DEVICE).unwrap();
    assert_eq!(context.driver().pool_get(pool, PoolAttribute::ReleaseThreshold), Ok(0));
    let block = context.allocate(100 * MIB, &stream);
    assert_eq!(context.driver().pool_get(pool, PoolAttribute::ReleaseThreshold), Ok(u64::MAX));
    context.allocator.free(block).unwrap();
    stream.synchronize().unwrap();
    assert!(context.allocator.stats(DEVICE).unwrap().reserved_bytes.all.current >= 100 * MIB);
}

#[test]
fn there_are_no_private_pools() {
    let context = TestContext::new();
    let unsupported = Error::Unsupported { allocator: "driver-pool", what: "private pools" };
    assert_eq!(context.allocator.pools().err(), Some(unsupported.clone()));
    let pool = MemPoolId { graph: 0, user: 1 };
    let request = Request::new(DEVICE, context.stream().id(), 1).in_pool(pool);
    assert_eq!(context.allocator.allocate_raw(request), Err(unsupported));
    assert_eq!(context.allocator.trim(DEVICE, pool), Ok(0));
}

#[test]
fn allocation_and_free_in_a_capture_are_nodes() {
    let context = TestContext::new();
    let (stream, result) = (context.stream(), context.allocate(MIB, &context.stream()));
    context.instance.device(0).unwrap().synchronize().unwrap();
    context.driver().capture_begin(stream.id(), CaptureMode::Global).unwrap();
    let block = context.allocate(MIB, &stream);
    context.fill(block, 7, &stream);
    context.driver().copy(result.ptr.into(), block.ptr.into(), MIB, stream.id()).unwrap();
    context.allocator.free(block).unwrap();
    assert_eq!(context.active(), 1);
    let (kinds, exec) = context.end(&stream);
    assert_eq!(kinds, [NodeKind::MemAlloc, NodeKind::Fill, NodeKind::Copy, NodeKind::MemFree]);
    for _ in 0..3 {
        launch_graph(context.driver(), exec, stream.id()).unwrap();
    }
    stream.synchronize().unwrap();
    assert_eq!(context.byte_at(result), 7);
    context.expect_no_hazard();
}

#[test]
fn uses_in_a_capture_are_joined_before_the_free() {
    let context = TestContext::new();
    let (own, other) = (context.stream(), context.stream());
    context.driver().capture_begin(own.id(), CaptureMode::Global).unwrap();
    let block = context.allocate(MIB, &own);
    other.wait_stream(&own).unwrap();
    context.fill(block, 7, &other);
    context.allocator.record_use(block, other.id()).unwrap();
    context.allocator.free_later(block);
    // The next call frees it, and the capture needs no other join.
    let next = context.allocate(MIB, &own);
    context.allocator.free(next).unwrap();
    let (kinds, exec) = context.end(&own);
    assert_eq!(kinds.iter().filter(|&&kind| kind == NodeKind::MemFree).count(), 2);
    launch_graph(context.driver(), exec, own.id()).unwrap();
    own.synchronize().unwrap();
    assert_eq!(context.active(), 0);
    context.expect_no_hazard();
}

#[test]
fn a_block_from_before_a_capture_is_freed_after_it() {
    let context = TestContext::new();
    let (own, other) = (context.stream(), context.stream());
    let (first, second) = (context.allocate(MIB, &own), context.allocate(MIB, &other));
    context.allocator.record_use(second, own.id()).unwrap();
    context.driver().capture_begin(own.id(), CaptureMode::Global).unwrap();
    context.allocator.free(first).unwrap();
    context.allocator.free(second).unwrap();
    let stats = context.allocator.stats(DEVICE).unwrap();
    assert_eq!((stats.allocation.all.current, stats.active.all.current), (0, 2));
    let snapshot = context.allocator.snapshot(SnapshotOptions::default()).unwrap();
    assert_eq!(snapshot.segments.iter().map(|segment| segment.active_size).sum::<u64>(), 2 * MIB);
    let (kinds, _) = context.end(&own);
    assert_eq!(kinds, []);
    let next = context.allocate(MIB, &other);
    assert_eq!(context.active(), 1);
    context.allocator.free(next).unwrap();
    context.expect_no_hazard();
}

#[test]
fn two_captures_at_once_are_independent() {
    let context = TestContext::new();
    let streams = [context.stream(), context.stream()];
    for stream in &streams {
        context.driver().capture_begin(stream.id(), CaptureMode::Relaxed).unwrap();
    }
    let block = streams.each_ref().map(|stream| context.allocate(MIB, stream));
    for (block, stream) in block.into_iter().zip(&streams) {
        context.fill(block, 1, stream);
        context.allocator.free(block).unwrap();
    }
    for stream in &streams {
        let (kinds, exec) = context.end(stream);
        assert_eq!(kinds, [NodeKind::MemAlloc, NodeKind::Fill, NodeKind::MemFree]);
        launch_graph(context.driver(), exec, stream.id()).unwrap();
    }
    context.instance.device(0).unwrap().synchronize().unwrap();
    context.expect_no_hazard();
}

#[test]
fn a_block_of_a_capture_may_be_freed_outside_of_it() {
    let context = TestContext::new();
    let stream = context.stream();
    for launched in [true, false] {
        context.driver().capture_begin(stream.id(), CaptureMode::Global).unwrap();
        let block = context.allocate(MIB, &stream);
        context.fill(block, 3, &stream);
        let (_, exec) = context.end(&stream);
        if launched {
            launch_graph(context.driver(), exec, stream.id()).unwrap();
            stream.synchronize().unwrap();
            assert_eq!(context.byte_at(block), 3);
        }
        // Without a launch there is nothing to free, and the counters are right.
        context.allocator.free(block).unwrap();
        assert_eq!(context.active(), 0);
        stream.synchronize().unwrap();
    }
    context.expect_no_hazard();
}

#[test]
fn a_block_of_a_destroyed_stream_is_freed_in_another() {
    let context = TestContext::new();
    let destroyed = context.driver().stream_create(DEVICE, StreamOptions::default()).unwrap();
    let block = context.allocator.allocate_raw(Request::new(DEVICE, destroyed, MIB)).unwrap();
    context.driver().stream_destroy(destroyed).unwrap();
    // The free itself names the stream: the program broke its promise.
    context.allocator.free(block).unwrap();
    assert_eq!(context.active(), 0);
}

#[test]
fn limits_count_requested_bytes() {
    let (_, instance) = crate::common::machine(1);
    let settings = Settings { memory_cap_bytes: Some(10_000), ..Settings::default() };
    let allocator = DriverPoolAllocator::with_settings(&instance, settings);
    let stream = instance.device(0).unwrap().pool_stream().unwrap();
    let request = |bytes| allocator.allocate_raw(Request::new(DEVICE, stream.id(), bytes));
    // 5,120 bytes each, after rounding.
    let (first, _second) = (request(5000).unwrap(), request(5000).unwrap());
    assert!(matches!(request(1), Err(Error::OutOfMemory(report)) if report.bytes_limit == Some(10_000)));
    assert_eq!(allocator.stats(DEVICE).unwrap().num_alloc_retries, 0);
    allocator.free(first).unwrap();
    request(5000).unwrap();
}

#[test]
fn every_block_is_a_segment_in_the_history() {
    let context = TestContext::new();
    let stream = context.stream();
    context.allocator.record_history(Some(HistoryOptions::default())).unwrap();
    let block = context.allocate(1000, &stream);
    context.allocator.free(block).unwrap();
    let trace = context.allocator.snapshot(SnapshotOptions::default()).unwrap().traces.remove(0);
    let found: Vec<_> = trace.iter().map(|entry| (entry.action, entry.size)).collect();
    let expected = [
        (Action::SegmentAlloc, 1024),
        (Action::Alloc, 1000),
        (Action::FreeRequested, 1000),
        (Action::FreeCompleted, 1000),
        (Action::SegmentFree, 1024),
    ];
    assert_eq!(found, expected);
}

#[test]
fn peers_may_access_the_pools_memory() {
    let (sim, instance) = crate::common::machine(2);
    let allocator = DriverPoolAllocator::new(&instance);
    let streams = [0, 1].map(|index| instance.device(index).unwrap().pool_stream().unwrap());
    let block = allocator.allocate_raw(Request::new(DEVICE, streams[0].id(), MIB)).unwrap();
    streams[1].wait_stream(&streams[0]).unwrap();
    for _ in 0..2 {
        allocator.enable_peer_access(DeviceId(1), DEVICE).unwrap();
    }
    instance.driver().fill(block.ptr, Pattern::U8(1), MIB, streams[1].id()).unwrap();
    // A stream of another device delays the free too.
    allocator.record_use(block, streams[1].id()).unwrap();
    allocator.free(block).unwrap();
    allocator.trim(DEVICE, MemPoolId::DEFAULT).unwrap();
    assert!(sim.hazards().is_empty(), "{:#?}", sim.hazards());
}

/// Allocates, shares, frees in every way, runs out of memory, trims.
fn scenario(instance: &Instance, allocator: &DriverPoolAllocator) -> warpool::Result<()> {
    let device = instance.device(0)?;
    let (own, other) = (device.pool_stream()?, device.pool_stream()?);
    let allocate = |bytes| allocator.allocate_raw(Request::new(DEVICE, own.id(), bytes));
    let mut live = Vec::new();
    let outcome = (|| {
        for bytes in [1000, 5 * MIB, 900 * MIB] {
            live.push(allocate(bytes)?);
        }
        allocator.record_use(live[0], other.id())?;
        allocator.record_use(live[2], other.id())?;
        assert!(allocate(4 << 30).is_err(), "no room for it");
        allocator.free(live.pop().expect("three were block"))?;
        live.push(allocate(3 << 30)?);
        allocator.stats(DEVICE)?;
        Ok(())
    })();
    live.into_iter().enumerate().for_each(|(at, block)| match at {
        0 => allocator.free_later(block),
        _ => allocator.free(block).expect("a free never fails"),
    });
    outcome.and(allocator.trim(DEVICE, MemPoolId::DEFAULT).map(drop))
}

#[test]
fn every_call_may_fail_once() {
    for nth in 1.. {
        let sim = Arc::new(SimDriver::new(SimConfig::default().with_capacity(4 << 30)));
        let plan = FaultPlan::new().fail_nth_of_all(nth, ErrorCode::NotPermitted).excluding(FaultPlan::CLEANUP);
        let faulty = Arc::new(Faulty::new(sim.clone(), plan));
        let Ok(instance) = Instance::new(faulty.clone()) else { continue };
        let allocator = DriverPoolAllocator::new(&instance);
        let _ = scenario(&instance, &allocator);
        faulty.clear_plan();
        scenario(&instance, &allocator).unwrap_or_else(|error| panic!("after call {nth} failed: {error}"));
        let stats = allocator.stats(DEVICE).unwrap();
        assert_eq!((stats.active_bytes.all.current, stats.reserved_bytes.all.current), (0, 0), "call {nth} failed");
        assert_eq!(sim.object_counts().allocations, 0, "call {nth} failed and memory was leaked");
        assert!(sim.hazards().is_empty(), "call {nth} failed: {:#?}", sim.hazards());
        if faulty.injected().is_empty() {
            assert!(nth > 50, "the scenario made only {nth} calls");
            return;
        }
        assert_ne!(faulty.injected()[0].call, Call::DeviceSynchronize);
    }
}
