//! Caching switched off during captures, and frees of uncached memory that fail.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::common::launch::launch_graph;
use crate::common::memory::{FIRST, MIB, TestContext};
use warpool::driver::decorate::{FaultPlan, Faulty};
use warpool::driver::sim::{SimConfig, SimDriver};
use warpool::driver::{
    Call, CaptureMode, CaptureState, Captures as _, Copies as _, DeviceId, ErrorCode, Graphs as _, InstantiateOptions,
};
use warpool::graph::{CaptureOptions, Graph, GraphOptions};
use warpool::memory::pools::Route;
use warpool::memory::raw::Request;
use warpool::memory::report::{HistoryOptions, StackLevel};
use warpool::memory::{Allocate as _, CachingAllocator, DeviceAllocator, MemPoolId, Settings};
use warpool::{Error, Instance};

const MODES: [CaptureMode; 3] = [CaptureMode::Global, CaptureMode::ThreadLocal, CaptureMode::Relaxed];

/// How a block is freed.
const WAYS: [&str; 3] = ["free", "drop", "raw"];

fn free(context: &TestContext, block: warpool::memory::DeviceBlock, way: &str) {
    match way {
        "free" => block.free().unwrap(),
        "drop" => drop(block),
        _ => context.allocator.free_raw(block.into_raw().ptr).unwrap(),
    }
}

/// Memory that a capture allocates, uses and frees, and earlier memory that it uses and frees: both stay for the
/// replays, until the graph is gone.
#[test]
fn memory_freed_in_a_capture_stays_for_the_replays() {
    for mode in MODES {
        for way in WAYS {
            let context = TestContext::new("");
            context.allocator.set_caching(false).unwrap();
            let any = context.any();
            let (device, lease) = (context.device(), context.device().lease_stream().unwrap());
            let (own, foreign) = (any.allocate(MIB, &lease).unwrap(), any.allocate(MIB, &context.main).unwrap());
            let (own_ptr, foreign_ptr) = (own.ptr(), foreign.ptr());
            let mut graph = Graph::new(&any, &device, GraphOptions::default()).unwrap();
            let options = CaptureOptions { mode, ..CaptureOptions::default() };
            graph
                .capture(&lease, options, |capture| {
                    let inside = any.allocate(2 * MIB, capture.stream())?;
                    for ptr in [inside.ptr(), own_ptr, foreign_ptr] {
                        context.sim_fill_id(ptr.0, 7, capture.stream().id());
                    }
                    foreign.record_use(capture.stream())?;
                    free(&context, inside, way);
                    free(&context, own, way);
                    free(&context, foreign, way);
                    Ok(())
                })
                .unwrap_or_else(|error| panic!("{mode:?}, {way}: {error}"));
            // Uncached requests at the same time must not free it.
            drop(any.allocate(MIB, &context.main).unwrap());
            any.trim(FIRST, MemPoolId::DEFAULT).unwrap();
            graph.replay(&lease).unwrap();
            device.synchronize().unwrap_or_else(|error| panic!("{mode:?}, {way}: {error}"));
            drop(graph);
            any.trim(FIRST, MemPoolId::DEFAULT).unwrap();
            any.trim(FIRST, MemPoolId::DEFAULT).unwrap();
            assert_eq!(context.sim.object_counts().allocations, 0, "{mode:?}, {way}: freed with the graph");
            context.finish();
        }
    }
}

/// A capture that no graph of Warpool owns and that has no pool: it is unknown when its graph is gone.
#[test]
fn without_a_pool_memory_freed_in_a_capture_stays_until_a_trim() {
    let context = TestContext::new("");
    context.allocator.set_caching(false).unwrap();
    let stream = context.side_stream();
    let block = context.alloc_on(&stream, MIB);
    context.begin_capture(&stream);
    context.sim_fill_on(block.ptr.0, 3, &stream);
    context.allocator.free(block).unwrap();
    assert_eq!(context.trim(), 0);
    let exec = context.end_capture(&stream);
    context.free(context.alloc(MIB));
    launch_graph(&*context.sim, exec, stream.id()).unwrap();
    context.device().synchronize().unwrap();
    context.sim.graph_exec_destroy(exec).unwrap();
    context.trim();
    assert_eq!(context.sim.object_counts().allocations, 0);
    context.finish();
}

/// Requests and frees of other streams, in the strictest mode.
#[test]
fn uncached_calls_do_not_invalidate_captures() {
    for mode in MODES {
        let context = TestContext::new("");
        context.allocator.set_caching(false).unwrap();
        let (stream, other) = (context.side_stream(), context.side_stream());
        let before = context.alloc_on(&other, MIB);
        let pool = context.pools().create_graph_pool(FIRST).unwrap();
        context.sim.capture_begin(stream.id(), mode).unwrap();
        context.pools().capture_began(FIRST).unwrap();
        let CaptureState::Active(capture) = context.sim.capture_state(stream.id()).unwrap() else { panic!("{mode:?}") };
        context.pools().begin_routing(FIRST, pool, Route::Capture(capture)).unwrap();
        let during = context.alloc_on(&other, MIB);
        context.free_all([before, during]);
        drop(context.any().allocate(MIB, &other).unwrap());
        context.trim();
        let captured = context.alloc_on(&stream, MIB);
        assert_eq!(context.segments_of(pool).len(), 1, "from the graph's pool");
        context.fill(captured, 5, &stream);
        assert_eq!(context.sim.capture_state(stream.id()), Ok(CaptureState::Active(capture)), "{mode:?}");
        context.pools().end_routing(FIRST, pool).unwrap();
        let graph = context.sim.capture_end(stream.id()).unwrap();
        context.pools().capture_ended(FIRST).unwrap();
        let exec = context.sim.graph_instantiate(graph, InstantiateOptions::default()).unwrap();
        launch_graph(&*context.sim, exec, stream.id()).unwrap();
        context.assert_holds(captured, 5);
        context.sim.graph_exec_destroy(exec).unwrap();
        context.free(captured);
        context.pools().release_pool(FIRST, pool).unwrap();
        context.trim();
        assert_eq!(context.sim.object_counts().allocations, 0, "{mode:?}");
        context.finish();
    }
}

/// A free whose driver call fails is retried by the next free, or by a trim.
#[test]
fn frees_that_fail_are_retried() {
    for trims in [false, true] {
        let sim = Arc::new(SimDriver::new(SimConfig::default()));
        let faulty = Arc::new(Faulty::new(sim.clone(), FaultPlan::new()));
        let instance = Instance::new(faulty.clone()).unwrap();
        let allocator = Arc::new(CachingAllocator::new(&instance, Settings::default()));
        let stream = instance.device(0).unwrap().default_stream().unwrap();
        allocator.set_caching(false).unwrap();
        let allocate = || allocator.allocate_raw(Request::new(FIRST, stream.id(), MIB)).unwrap();
        let [first, second] = [allocate(), allocate()];
        faulty.set_plan(FaultPlan::new().fail_nth(Call::MemFree, 1, ErrorCode::NotPermitted));
        allocator.free(first).unwrap();
        assert_eq!(sim.object_counts().allocations, 2, "the driver refused it");
        assert!(matches!(allocator.free_raw(first.ptr), Err(Error::UnknownPointer { .. })), "it is freed");
        if trims {
            faulty.set_plan(FaultPlan::new().fail_nth(Call::MemFree, 1, ErrorCode::NotPermitted));
            assert!(allocator.trim(FIRST, MemPoolId::DEFAULT).is_err(), "a trim says so");
            allocator.trim(FIRST, MemPoolId::DEFAULT).unwrap();
            assert_eq!(sim.object_counts().allocations, 1);
        }
        allocator.free(second).unwrap();
        assert_eq!(sim.object_counts().allocations, 0);
    }
}

/// The driver's free waits for the work of the memory's own device. Found by `warpool soak`: a recorded use of another
/// device was ignored, and its kernel read memory that was gone.
#[test]
fn memory_that_another_device_uses_is_freed_after_that() {
    for way in WAYS {
        let context = TestContext::with_config(SimConfig::default().with_devices(2), "");
        let (owner, peer) = (DeviceId(1), context.main.clone());
        context.allocator.enable_peer_access(FIRST, owner).unwrap();
        context.allocator.set_caching(false).unwrap();
        let stream = context.instance.device(1).unwrap().pool_stream().unwrap();
        let block = context.any().allocate(MIB, &stream).unwrap();
        let target = context.any().allocate(MIB, &peer).unwrap();
        context.pause_stream(&peer);
        context.sim.copy(target.ptr().into(), block.ptr().into(), MIB, peer.id()).unwrap();
        block.record_use(&peer).unwrap();
        free(&context, block, way);
        // Returns it to the driver, if the free was left to a later call.
        context.any().trim(owner, MemPoolId::DEFAULT).unwrap();
        context.resume_stream(&peer);
        drop(target);
        context.finish();
    }
}

/// Found by soak: the hook was called for a block that is in no segment, and its panic kept the free from looking for
/// uncached memory.
#[test]
fn a_stack_hook_that_panics_does_not_lose_uncached_memory() {
    let context = TestContext::new("");
    let allocator = &context.allocator;
    let options = HistoryOptions { stacks: StackLevel::All, ..HistoryOptions::default() };
    allocator.record_history(Some(options)).unwrap();
    allocator.observers().set_stack_hook(Some(Arc::new(|| panic!("of the hook"))));
    allocator.set_caching(false).unwrap();
    for way in 0..2 {
        let block = allocator.allocate_raw(Request::new(FIRST, context.main.id(), MIB)).unwrap();
        let freed = catch_unwind(AssertUnwindSafe(|| match way {
            0 => allocator.free_raw(block.ptr).unwrap(),
            _ => allocator.free(block).unwrap(),
        }));
        assert!(freed.is_ok(), "the hook is not called");
        assert_eq!(context.sim.object_counts().allocations, 0);
    }
    allocator.observers().set_stack_hook(None);
}
