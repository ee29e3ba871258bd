//! The effect of each decorator. `allocators.rs` checks that nothing else changes.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use warpool::driver::DeviceId;
use warpool::driver::sim::SimDriver;
use warpool::graph::{CaptureOptions, Graph, GraphOptions};
use warpool::memory::decorate::{AllocatorCall, FreeCall, Limited, Traced};
use warpool::memory::raw::Request;
use warpool::memory::{
    Allocate, CachingAllocator, DeviceAllocator, DeviceBlock, MemPoolId, OomCause, OomReport, Settings,
};
use warpool::{Error, Instance, Result, Stream};

const DEVICE: DeviceId = DeviceId(0);
const MIB: u64 = 1 << 20;

struct TestContext {
    sim: Arc<SimDriver>,
    instance: Instance,
    caching: Arc<dyn DeviceAllocator>,
    stream: Stream,
}

impl TestContext {
    fn new() -> Self {
        let (sim, instance) = crate::common::machine(1);
        let caching: Arc<dyn DeviceAllocator> = Arc::new(CachingAllocator::new(&instance, Settings::default()));
        let stream = instance.device(0).unwrap().pool_stream().unwrap();
        Self { sim, instance, caching, stream }
    }

    fn finish(self) {
        assert_eq!(self.caching.stats(DEVICE).unwrap().allocation.all.current, 0);
        assert_eq!(self.sim.hazards(), []);
    }
}

fn oom_report(outcome: Result<DeviceBlock>) -> OomReport {
    match outcome {
        Err(Error::OutOfMemory(report)) => *report,
        other => panic!("expected out of memory: {other:?}"),
    }
}

/// They would not be counted, capped or logged.
#[test]
fn the_hot_path_does_not_bypass_a_decorator() {
    let context = TestContext::new();
    let limited = Arc::new(Limited::new(&context.caching, 10 * MIB));
    let request = Request::new(DEVICE, context.stream.id(), MIB);
    context.caching.free_raw(context.caching.allocate_raw(request).unwrap().ptr).unwrap();
    assert_eq!(limited.allocate_cached(&request), None);
    let block = limited.allocate_raw(request).unwrap();
    assert!(!limited.free_cached(DEVICE, block.ptr));
    assert_eq!(limited.bytes_allocated(), MIB);
    limited.free_raw(block.ptr).unwrap();
    context.finish();
}

#[test]
fn a_cap_limits_allocated_bytes() {
    let context = TestContext::new();
    let limited = Arc::new(Limited::new(&context.caching, 10 * MIB));
    let any: Arc<dyn DeviceAllocator> = limited.clone();
    let observed = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&observed);
    any.observers().attach_oom_observer(Arc::new(move |_| {
        count.fetch_add(1, Ordering::SeqCst);
    }));

    let first = any.allocate(6 * MIB, &context.stream).unwrap();
    let reserved = context.caching.stats(DEVICE).unwrap().reserved_bytes.all.current;
    let refused = oom_report(any.allocate(4 * MIB + 1, &context.stream));
    assert_eq!((refused.cause, refused.bytes_limit), (OomCause::Cap { held: 6 * MIB }, Some(10 * MIB)));
    assert_eq!((refused.bytes_requested, refused.bytes_allocated), (4 * MIB + 1, 6 * MIB));
    let text = refused.to_string();
    assert!(text.contains("a cap of 10.00 MiB") && text.contains("6.00 MiB is allocated"), "{text}");
    assert_eq!(observed.load(Ordering::SeqCst), 1);
    assert_eq!(
        context.caching.stats(DEVICE).unwrap().reserved_bytes.all.current,
        reserved,
        "the inner allocator is not called"
    );

    let second = any.allocate(4 * MIB, &context.stream).unwrap();
    assert_eq!((limited.bytes_allocated(), limited.bytes_cap()), (10 * MIB, 10 * MIB));
    // Every kind of free passes through the decorator.
    drop(first);
    assert_eq!(limited.bytes_allocated(), 4 * MIB);
    second.free().unwrap();
    let third = any.allocate(10 * MIB, &context.stream).unwrap().into_raw();
    any.free_raw(third.ptr).unwrap();
    assert_eq!(limited.bytes_allocated(), 0);

    // Blocks allocated directly from the inner allocator do not count, and a stale free changes nothing.
    let past = context.caching.allocate(MIB, &context.stream).unwrap().into_raw();
    any.free(past).unwrap();
    assert_eq!(limited.bytes_allocated(), 0);
    let stale = any.allocate(MIB, &context.stream).unwrap().into_raw();
    any.free(stale).unwrap();
    let next = any.allocate(MIB, &context.stream).unwrap();
    assert_eq!(any.free(stale), Err(Error::UnknownPointer { ptr: stale.ptr }));
    any.free_later(stale);
    assert_eq!(limited.bytes_allocated(), MIB);
    drop(next);

    // A failed request counts nothing.
    assert!(matches!(any.allocate(u64::MAX, &context.stream), Err(Error::OutOfMemory(_))));
    let wide = Limited::new(&context.caching, u64::MAX);
    assert!(wide.allocate_raw(Request::new(DEVICE, context.stream.id(), 1 << 50)).is_err());
    assert_eq!((wide.bytes_allocated(), limited.bytes_allocated()), (0, 0));
    context.finish();
}

#[test]
fn threads_stay_below_the_cap() {
    let context = TestContext::new();
    let limited = Arc::new(Limited::new(&context.caching, 8 * MIB));
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let stream = context.instance.device(0).unwrap().pool_stream().unwrap();
                let mut blocks = Vec::new();
                for _ in 0..200 {
                    match limited.allocate(MIB, &stream) {
                        Ok(block) => blocks.push(block),
                        Err(Error::OutOfMemory(report)) => {
                            assert!(matches!(report.cause, OomCause::Cap { held } if held > 7 * MIB));
                            blocks.pop();
                        }
                        Err(other) => panic!("{other}"),
                    }
                    assert!(limited.bytes_allocated() <= 8 * MIB);
                }
            });
        }
    });
    assert_eq!(limited.bytes_allocated(), 0);
    context.finish();
}

#[test]
fn every_call_is_traced() {
    let context = TestContext::new();
    let calls = Arc::new(Mutex::new(Vec::<(AllocatorCall, Option<Error>)>::new()));
    let log = Arc::clone(&calls);
    let traced: Arc<dyn DeviceAllocator> = Arc::new(Traced::new(&context.caching, move |call, error| {
        log.lock().unwrap().push((call.clone(), error.cloned()));
    }));
    let request = Request::new(DEVICE, context.stream.id(), 1000);
    let block = traced.allocate_raw(request).unwrap();
    traced.record_use(block, context.stream.id()).unwrap();
    traced.free(block).unwrap();
    let twice = traced.free_raw(block.ptr).unwrap_err();
    let by_address = traced.allocate(10, &context.stream).unwrap().into_raw();
    traced.free_raw(by_address.ptr).unwrap();
    drop(traced.allocate(1000, &context.stream).unwrap());
    traced.allocate(1 << 50, &context.stream).unwrap_err();
    let trimmed = traced.trim(DEVICE, MemPoolId::DEFAULT).unwrap();
    traced.stats(DEVICE).expect("it is not traced");

    let mut calls = std::mem::take(&mut *calls.lock().unwrap()).into_iter();
    let mut next = || calls.next().expect("one more call");
    let ok = |call| (call, None);
    assert_eq!(next(), ok(AllocatorCall::Allocate { request, allocation: Some(block) }));
    assert_eq!(next(), ok(AllocatorCall::RecordUse { ptr: block.ptr, stream: context.stream.id() }));
    assert_eq!(next(), ok(AllocatorCall::Free(FreeCall::Owned(block))));
    assert_eq!(next(), (AllocatorCall::Free(FreeCall::Raw(block.ptr)), Some(twice)));
    assert!(matches!(next().0, AllocatorCall::Allocate { request, .. } if request.bytes == 10));
    assert_eq!(next(), ok(AllocatorCall::Free(FreeCall::Raw(by_address.ptr))));
    assert!(matches!(next().0, AllocatorCall::Allocate { allocation: Some(_), .. }));
    assert!(matches!(next().0, AllocatorCall::Free(FreeCall::Dropped(_))));
    let (failed, error) = next();
    assert!(matches!(failed, AllocatorCall::Allocate { allocation: None, .. }) && error.is_some());
    assert_eq!(next(), ok(AllocatorCall::Trim { device: DEVICE, pool: MemPoolId::DEFAULT, bytes: trimmed }));
    assert_eq!(calls.next(), None);
    context.finish();
}

#[test]
fn decorators_nest_and_serve_graphs() {
    let context = TestContext::new();
    let limited = Arc::new(Limited::new(&context.caching, MIB));
    let any: Arc<dyn DeviceAllocator> = Arc::new(Traced::new(&limited, |_, _| {}));
    assert_eq!((any.name(), any.instance()), ("traced", &context.instance));
    assert!(format!("{any:?}").contains("Limited"), "{any:?}");
    let device = context.instance.device(0).unwrap();
    let lease = device.lease_stream().unwrap();
    let mut graph = Graph::new(&any, &device, GraphOptions::default()).unwrap();
    let key = graph
        .capture(&lease, CaptureOptions::default(), |capture| {
            let key = capture.allocate(4096)?;
            assert!(matches!(capture.allocate(MIB), Err(Error::OutOfMemory(_))), "the cap holds in a capture");
            let stream = capture.stream().clone();
            capture.fill(key, warpool::driver::Pattern::U8(9), 4096, &stream)?;
            Ok(key)
        })
        .unwrap();
    assert_eq!(limited.bytes_allocated(), 4096);
    graph.replay(&lease).unwrap();
    lease.synchronize().unwrap();
    let mut byte = [0];
    context.instance.driver().download(DEVICE, graph.buffer(key).unwrap().ptr(), &mut byte).unwrap();
    assert_eq!(byte, [9]);
    drop(graph);
    assert_eq!(limited.bytes_allocated(), 0);
    context.finish();
}
