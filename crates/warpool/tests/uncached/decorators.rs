//! What each layer around an allocator adds. That nothing else changes, `allocators.rs` checks.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use warpool::driver::DeviceId;
use warpool::driver::sim::SimDriver;
use warpool::graph::{CaptureOptions, Graph, GraphOptions};
use warpool::memory::{
    Allocate, AllocatorCall, Block, CachingAllocator, Counted, Counts, DeviceAllocator, FailureCallback, GivenBack,
    Limited, MemPoolId, OomCause, OomReport, Request, Settings, SnapshotOptions, Traced,
};
use warpool::{Error, Instance, Result, Stream};

const DEVICE: DeviceId = DeviceId(0);
const MIB: u64 = 1 << 20;

struct Bench {
    sim: Arc<SimDriver>,
    instance: Instance,
    caching: Arc<dyn DeviceAllocator>,
    stream: Stream,
}

impl Bench {
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

fn report(outcome: Result<Block>) -> OomReport {
    match outcome {
        Err(Error::OutOfMemory(report)) => *report,
        other => panic!("out of memory was due: {other:?}"),
    }
}

/// The device that the caller knows reaches the allocator inside, through every layer.
#[test]
fn a_free_by_address_and_device_goes_through() {
    let bench = Bench::new();
    let heard = Arc::new(Mutex::new(Vec::new()));
    let hears = Arc::clone(&heard);
    let inner = Traced::new(Arc::clone(&bench.caching), move |call: &AllocatorCall, _: Option<&Error>| {
        hears.lock().unwrap().push(call.clone());
    });
    let limited = Arc::new(Limited::new(FailureCallback::new(inner, |_| false), 10 * MIB));
    let any: Arc<dyn DeviceAllocator> = Arc::new(Counted::new(limited.clone()));
    let given = any.allocate(MIB, &bench.stream).unwrap().into_raw();
    heard.lock().unwrap().clear();
    any.free_on(DEVICE, given.ptr).unwrap();
    assert_eq!(*heard.lock().unwrap(), [AllocatorCall::Free { what: GivenBack::On(DEVICE, given.ptr) }]);
    assert_eq!(limited.bytes_held(), 0);
    bench.finish();
}

#[test]
fn a_cap_limits_what_callers_hold() {
    let bench = Bench::new();
    let limited = Arc::new(Limited::new(Arc::clone(&bench.caching), 10 * MIB));
    let any: Arc<dyn DeviceAllocator> = limited.clone();
    let told = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&told);
    any.observers().attach_oom_observer(Arc::new(move |_| {
        count.fetch_add(1, Ordering::SeqCst);
    }));

    let first = any.allocate(6 * MIB, &bench.stream).unwrap();
    let reserved = bench.caching.stats(DEVICE).unwrap().reserved_bytes.all.current;
    let refused = report(any.allocate(4 * MIB + 1, &bench.stream));
    assert_eq!((refused.cause, refused.bytes_limit), (OomCause::Cap { held: 6 * MIB }, Some(10 * MIB)));
    assert_eq!((refused.bytes_requested, refused.bytes_allocated), (4 * MIB + 1, 6 * MIB));
    let text = refused.to_string();
    assert!(text.contains("a cap of 10.00 MiB") && text.contains("they hold 6.00 MiB"), "{text}");
    assert_eq!(told.load(Ordering::SeqCst), 1);
    assert_eq!(bench.caching.stats(DEVICE).unwrap().reserved_bytes.all.current, reserved, "the inner one is not asked");

    let second = any.allocate(4 * MIB, &bench.stream).unwrap();
    assert_eq!((limited.bytes_held(), limited.bytes_cap()), (10 * MIB, 10 * MIB));
    // Dropped, freed, freed by address: all of it comes back through the layer.
    drop(first);
    assert_eq!(limited.bytes_held(), 4 * MIB);
    second.free().unwrap();
    let third = any.allocate(10 * MIB, &bench.stream).unwrap().into_raw();
    any.free_raw(third.ptr).unwrap();
    assert_eq!(limited.bytes_held(), 0);

    // What was got past the layer is none of its business, and what is stale is not counted twice.
    let past = bench.caching.allocate(MIB, &bench.stream).unwrap().into_raw();
    any.free(past).unwrap();
    assert_eq!(limited.bytes_held(), 0);
    let stale = any.allocate(MIB, &bench.stream).unwrap().into_raw();
    any.free(stale).unwrap();
    let next = any.allocate(MIB, &bench.stream).unwrap();
    assert_eq!(any.free(stale), Err(Error::UnknownPointer { ptr: stale.ptr }));
    any.free_later(stale);
    assert_eq!(limited.bytes_held(), MIB);
    drop(next);

    // A failure inside holds nothing.
    assert!(matches!(any.allocate(u64::MAX, &bench.stream), Err(Error::OutOfMemory(_))));
    let wide = Limited::new(Arc::clone(&bench.caching), u64::MAX);
    assert!(wide.allocate_raw(Request::new(DEVICE, bench.stream.id(), 1 << 50)).is_err());
    assert_eq!((wide.bytes_held(), limited.bytes_held()), (0, 0));
    bench.finish();
}

#[test]
fn threads_stay_below_the_cap() {
    let bench = Bench::new();
    let limited = Arc::new(Limited::new(Arc::clone(&bench.caching), 8 * MIB));
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let stream = bench.instance.device(0).unwrap().pool_stream().unwrap();
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
                    assert!(limited.bytes_held() <= 8 * MIB);
                }
            });
        }
    });
    assert_eq!(limited.bytes_held(), 0);
    bench.finish();
}

#[test]
fn every_call_is_told() {
    let bench = Bench::new();
    let told = Arc::new(Mutex::new(Vec::<(AllocatorCall, Option<Error>)>::new()));
    let sink = Arc::clone(&told);
    let traced: Arc<dyn DeviceAllocator> =
        Arc::new(Traced::new(Arc::clone(&bench.caching), move |call: &AllocatorCall, error: Option<&Error>| {
            sink.lock().unwrap().push((call.clone(), error.cloned()));
        }));
    let request = Request::new(DEVICE, bench.stream.id(), 1000);
    let given = traced.allocate_raw(request).unwrap();
    traced.record_use(given, bench.stream.id()).unwrap();
    traced.find(given.ptr).unwrap();
    traced.free(given).unwrap();
    let twice = traced.free_raw(given.ptr).unwrap_err();
    let block = traced.allocate(0, &bench.stream).unwrap();
    drop(block);
    let by_device = traced.allocate(10, &bench.stream).unwrap().into_raw();
    traced.free_on(DEVICE, by_device.ptr).unwrap();
    let kept = traced.allocate(1000, &bench.stream).unwrap();
    let again = Request::new(DEVICE, bench.stream.id(), 1000);
    drop(kept);
    let trimmed = traced.trim(DEVICE, MemPoolId::DEFAULT).unwrap();
    traced.largest_available(DEVICE).unwrap();
    traced.set_memory_fraction(DEVICE, 1.0).unwrap();
    traced.memory_fraction(DEVICE).unwrap();
    traced.stats(DEVICE).unwrap();
    traced.reset_peak_stats(DEVICE).unwrap();
    traced.reset_accumulated_stats(DEVICE).unwrap();
    traced.snapshot(SnapshotOptions::default()).unwrap();
    traced.record_history(None).unwrap();

    let mut told = std::mem::take(&mut *told.lock().unwrap()).into_iter();
    let mut next = || told.next().expect("one more call");
    let fine = |call| (call, None);
    assert_eq!(next(), fine(AllocatorCall::Allocate { request, given: Some(given) }));
    assert_eq!(next(), fine(AllocatorCall::RecordUse { ptr: given.ptr, stream: bench.stream.id() }));
    assert_eq!(next(), fine(AllocatorCall::Find { ptr: given.ptr }));
    assert_eq!(next(), fine(AllocatorCall::Free { what: GivenBack::Owned(given) }));
    assert_eq!(next(), (AllocatorCall::Free { what: GivenBack::At(given.ptr) }, Some(twice)));
    let (nothing, error) = next();
    assert!(error.is_none() && matches!(nothing, AllocatorCall::Allocate { request, .. } if request.bytes == 0));
    assert!(matches!(next().0, AllocatorCall::Allocate { request, .. } if request.bytes == 10));
    assert_eq!(next(), fine(AllocatorCall::Free { what: GivenBack::On(DEVICE, by_device.ptr) }));
    assert!(matches!(next().0, AllocatorCall::Allocate { request, given: Some(_) } if request == again));
    assert!(matches!(next().0, AllocatorCall::Free { what: GivenBack::Later(_) }), "a dropped block comes through");
    assert_eq!(next(), fine(AllocatorCall::Trim { device: DEVICE, pool: MemPoolId::DEFAULT, bytes: trimmed }));
    assert_eq!(next(), fine(AllocatorCall::LargestAvailable { device: DEVICE }));
    assert_eq!(next(), fine(AllocatorCall::SetMemoryFraction { device: DEVICE, fraction: 1.0 }));
    assert_eq!(next(), fine(AllocatorCall::MemoryFraction { device: DEVICE }));
    assert_eq!(next(), fine(AllocatorCall::Stats { device: DEVICE }));
    assert_eq!(next(), fine(AllocatorCall::ResetPeakStats { device: DEVICE }));
    assert_eq!(next(), fine(AllocatorCall::ResetAccumulatedStats { device: DEVICE }));
    assert_eq!(next(), fine(AllocatorCall::Snapshot { options: SnapshotOptions::default() }));
    assert_eq!(next(), fine(AllocatorCall::RecordHistory { on: false }));
    assert_eq!(told.next(), None);
    bench.finish();
}

#[test]
fn calls_bytes_and_failures_are_counted() {
    let bench = Bench::new();
    let counted = Arc::new(Counted::new(Arc::clone(&bench.caching)));
    let any: Arc<dyn DeviceAllocator> = counted.clone();
    let blocks = [1000, 3 * MIB, 5000].map(|bytes| any.allocate(bytes, &bench.stream).unwrap());
    blocks[0].record_use(&bench.instance.device(0).unwrap().pool_stream().unwrap()).unwrap();
    let [first, second, third] = blocks;
    first.free().unwrap();
    drop(second);
    assert!(any.allocate(1 << 50, &bench.stream).is_err());
    assert!(any.free_raw(warpool::driver::DevicePtr(512)).is_err());
    any.stats(DEVICE).unwrap();
    let counts = Counts {
        allocations: 4,
        frees: 3,
        uses: 1,
        others: 1,
        failures: 2,
        out_of_memory: 1,
        blocks_live: 1,
        blocks_peak: 3,
        bytes_live: 5000,
        bytes_peak: 3 * MIB + 6000,
        bytes_given: 3 * MIB + 6000,
    };
    assert_eq!(counted.counts(), counts);
    counted.reset();
    let held = Counts { blocks_live: 1, blocks_peak: 1, bytes_live: 5000, bytes_peak: 5000, ..Counts::default() };
    assert_eq!(counted.counts(), held);
    drop(third);
    assert_eq!((counted.counts().bytes_live, counted.counts().frees), (0, 1));
    bench.finish();
}

#[test]
fn a_callback_decides_whether_to_try_again() {
    let bench = Bench::new();
    let limited = Arc::new(Limited::new(Arc::clone(&bench.caching), 10 * MIB));
    let spare: Arc<Mutex<Vec<Block>>> = Arc::default();
    let asked = Arc::new(AtomicU64::new(0));
    let (gives_up, count) = (Arc::clone(&spare), Arc::clone(&asked));
    let any: Arc<dyn DeviceAllocator> = Arc::new(FailureCallback::new(Arc::clone(&limited), move |report| {
        assert!(matches!(report.cause, OomCause::Cap { .. }));
        count.fetch_add(1, Ordering::SeqCst);
        gives_up.lock().unwrap().pop().is_some()
    }));
    for _ in 0..5 {
        spare.lock().unwrap().push(any.allocate(2 * MIB, &bench.stream).unwrap());
    }
    // Three have to go: asked as often, and no more.
    let large = any.allocate(6 * MIB, &bench.stream).unwrap();
    assert_eq!((asked.load(Ordering::SeqCst), spare.lock().unwrap().len()), (3, 2));
    let refused = report(any.allocate(11 * MIB, &bench.stream));
    assert_eq!((asked.load(Ordering::SeqCst), refused.cause), (6, OomCause::Cap { held: 6 * MIB }));
    // Other failures are not its business.
    assert_eq!(any.free_raw(warpool::driver::DevicePtr(512)).map_err(|_| ()), Err(()));
    assert_eq!(asked.load(Ordering::SeqCst), 6);
    drop(large);
    bench.finish();
}

#[test]
fn layers_nest_and_graphs_go_through_them() {
    let bench = Bench::new();
    let counted = Arc::new(Counted::new(Limited::new(Arc::clone(&bench.caching), MIB)));
    let traced = Traced::new(Arc::clone(&counted), |_: &AllocatorCall, _: Option<&Error>| {});
    let any: Arc<dyn DeviceAllocator> = Arc::new(traced);
    assert_eq!((any.name(), any.instance()), ("traced", &bench.instance));
    assert!(format!("{any:?}").contains("Limited"), "{any:?}");
    let device = bench.instance.device(0).unwrap();
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
    assert_eq!(counted.counts().bytes_live, 4096);
    graph.replay(&lease).unwrap();
    lease.synchronize().unwrap();
    let mut byte = [0];
    bench.instance.driver().download(DEVICE, graph.buffer(key).unwrap().ptr(), &mut byte).unwrap();
    assert_eq!(byte, [9]);
    drop(graph);
    assert_eq!((counted.counts().bytes_live, counted.counts().failures), (0, 1));
    bench.finish();
}
