//! Plugged allocators beyond what every allocator promises (`allocators.rs`): what the plug is called with and when, what becomes of its mistakes, pools, captures, graphs.

mod common;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, mpsc};
use std::thread;
use std::time::Duration;

use common::plugs::Notebook;
use warpool::driver::decorate::{FaultPlan, Faulty};
use warpool::driver::sim::{HazardKind, SimConfig, SimDriver};
use warpool::driver::{
    CaptureMode, Copies as _, DeviceId, DevicePtr, Driver, ErrorCode, ForeignStream, Pattern, StreamId, StreamOptions,
};
use warpool::graph::{CaptureOptions, Graph, GraphOptions};
use warpool::memory::{
    Action, Allocate, Allocation, CachingAllocator, CurrentAllocator, DeviceAllocator, FnPlug, Frame, HistoryOptions,
    MemPool, MemPoolId, OomCause, OomReport, Plug, PlugUpstream, PluggableAllocator, PoolKeeper, PoolOptions, Request,
    Route, Settings, SnapshotOptions, StackLevel, Stats,
};
use warpool::{Device, Error, Gpu, Stream};

const DEVICE: DeviceId = DeviceId(0);
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// A plugged allocator on a machine of its own.
struct Bench {
    sim: Arc<SimDriver>,
    gpu: Gpu,
    book: Arc<Notebook>,
    allocator: Arc<PluggableAllocator>,
}

impl Bench {
    /// Two closures and nothing else.
    fn plain() -> Self {
        Self::with(Settings::default(), Notebook::plug)
    }

    /// All hooks.
    fn hooked() -> Self {
        let bench = Self::with(Settings::default(), Notebook::plug_with_hooks);
        bench.book.read();
        bench
    }

    fn with(settings: Settings, plug: fn(&Arc<Notebook>) -> FnPlug) -> Self {
        let sim = Arc::new(SimDriver::new(SimConfig::default().with_devices(2)));
        let gpu = Gpu::new(sim.clone()).unwrap();
        let book = Notebook::new(sim.clone());
        let allocator = PluggableAllocator::with_settings(&gpu, Arc::new(plug(&book)), settings).unwrap();
        Self { sim, gpu, book, allocator: Arc::new(allocator) }
    }

    fn any(&self) -> Arc<dyn DeviceAllocator> {
        self.allocator.clone()
    }

    fn driver(&self) -> &dyn Driver {
        &*self.sim
    }

    fn device(&self) -> Device {
        self.gpu.device(0).unwrap()
    }

    fn stream(&self) -> Stream {
        self.device().pool_stream().unwrap()
    }

    fn give(&self, bytes: u64, stream: &Stream) -> Allocation {
        self.allocator.allocate_raw(Request::new(DEVICE, stream.id(), bytes)).unwrap()
    }

    fn refused(&self, bytes: u64, stream: &Stream) -> Error {
        self.allocator.allocate_raw(Request::new(DEVICE, stream.id(), bytes)).unwrap_err()
    }

    fn run_out(&self, bytes: u64, stream: &Stream) -> OomReport {
        match self.refused(bytes, stream) {
            Error::OutOfMemory(report) => *report,
            other => panic!("{other}"),
        }
    }

    fn stats(&self) -> Stats {
        self.allocator.stats(DEVICE).unwrap()
    }

    fn trim(&self) -> u64 {
        self.allocator.trim(DEVICE, MemPoolId::DEFAULT).unwrap()
    }

    fn fill(&self, ptr: DevicePtr, value: u8, bytes: u64, stream: &Stream) {
        self.driver().fill(ptr, Pattern::U8(value), bytes, stream.id()).unwrap();
    }

    fn byte_at(&self, ptr: DevicePtr) -> u8 {
        self.device().synchronize().unwrap();
        let mut byte = [0];
        self.driver().download(DEVICE, ptr, &mut byte).unwrap();
        byte[0]
    }

    /// Forgets that the test asked about streams that it has destroyed.
    fn forgive_stale_streams(&self) {
        let hazards = self.sim.hazards();
        assert!(hazards.iter().all(|hazard| hazard.kind == HazardKind::UseAfterDestroy), "{hazards:#?}");
        self.sim.clear_hazards();
    }

    /// Everything went back, nothing was used that nobody had, and the thread is as strict as before.
    fn finish(self) {
        self.trim();
        assert_eq!(self.driver().capture_mode_exchange(CaptureMode::Global).unwrap(), CaptureMode::Global);
        assert_eq!(self.book.live(), BTreeMap::new(), "the plug did not get these back");
        let stats = self.stats();
        assert_eq!((stats.active.all.current, stats.reserved_bytes.all.current), (0, 0));
        assert_eq!(self.sim.hazards(), []);
    }
}

#[test]
fn the_plug_is_called_with_what_was_asked_for_and_gets_the_same_back() {
    let bench = Bench::plain();
    let (one, two) = (bench.stream(), bench.stream());
    let far = bench.gpu.device(1).unwrap().pool_stream().unwrap();
    let given = [bench.give(1, &one), bench.give(1000, &two), bench.give(3 * MIB, &one)];
    let there = bench.allocator.allocate_raw(Request::new(DeviceId(1), far.id(), 77)).unwrap();
    let live = bench.book.live();
    for (what, stream) in [(given[0], &one), (given[1], &two), (given[2], &one), (there, &far)] {
        let (bytes, device, of) = live[&what.ptr.0];
        assert_eq!((bytes, device, of.id), (what.bytes_requested, what.device, stream.id()));
        assert_eq!((what.bytes, of.raw), (bytes, stream.info().unwrap().raw), "sizes are not rounded");
    }
    assert_eq!(bench.give(0, &one).ptr, DevicePtr(0));
    // The notebook compares what comes back with what it gave.
    for what in given {
        bench.allocator.free_raw(what.ptr).unwrap();
    }
    bench.allocator.free(there).unwrap();
    let words = ["give 1", "give 1000", "give 3145728", "give 77", "take 1", "take 1000", "take 3145728", "take 77"];
    assert_eq!(bench.book.read(), words);
    bench.finish();
}

#[test]
fn a_null_address_is_out_of_memory_with_a_report() {
    let bench = Bench::plain();
    let stream = bench.stream();
    bench.book.capacity.store(10 * MIB, Ordering::SeqCst);
    let told = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&told);
    bench.allocator.observers().attach_oom_observer(Arc::new(move |report| seen.lock().unwrap().push(report.clone())));
    let held = bench.give(8 * MIB, &stream);
    let report = bench.run_out(3 * MIB, &stream);
    assert_eq!((report.cause, report.device, report.capturing), (OomCause::Upstream, DEVICE, false));
    assert_eq!((report.bytes_requested, report.bytes_segment), (3 * MIB, 3 * MIB));
    assert_eq!((report.bytes_allocated, report.bytes_reserved, report.bytes_limit), (8 * MIB, 8 * MIB, None));
    assert!(report.bytes_free > GIB && report.bytes_total > report.bytes_free);
    assert!(report.to_string().starts_with("CUDA out of memory. Tried to allocate 3.00 MiB."), "{report}");
    assert_eq!(*told.lock().unwrap(), [report]);
    assert_eq!((bench.stats().num_ooms, bench.stats().num_alloc_retries), (1, 1));

    // Null and none are the same.
    let nothing = FnPlug::new(|_, _, _| Ok(Some(DevicePtr(0))), |_, _, _, _| Ok(()));
    let empty = PluggableAllocator::new(&bench.gpu, Arc::new(nothing)).unwrap();
    let outcome = empty.allocate_raw(Request::new(DEVICE, stream.id(), 1));
    assert!(matches!(outcome, Err(Error::OutOfMemory(_))), "{outcome:?}");

    // A callback under pressure may help.
    let (weak, spare) = (Arc::downgrade(&bench.allocator), Mutex::new(Some(held)));
    bench.allocator.observers().attach_pressure_callback(Arc::new(move |_| {
        let Some(held) = spare.lock().unwrap().take() else { return false };
        weak.upgrade().unwrap().free(held).unwrap();
        true
    }));
    let more = bench.give(10 * MIB, &stream);
    bench.allocator.free(more).unwrap();
    assert_eq!(bench.stats().num_ooms, 1);
    bench.finish();
}

#[test]
fn errors_of_the_plug_are_passed_on() {
    let bench = Bench::plain();
    let stream = bench.stream();
    let why = |text: &str| Error::Plug { why: text.to_owned() };
    let plug = FnPlug::new(
        |_, _, _| Err(Error::Plug { why: "no way".into() }),
        |_, _, _, _| Err(Error::Plug { why: "not mine".into() }),
    );
    let refusing = PluggableAllocator::new(&bench.gpu, Arc::new(plug)).unwrap();
    assert_eq!(refusing.allocate_raw(Request::new(DEVICE, stream.id(), 1)), Err(why("no way")));
    assert_eq!(refusing.stats(DEVICE).unwrap().allocation.all.allocated, 0);

    let failed =
        FnPlug::new(|_, _, _| Ok(None), |_, _, _, _| Ok(())).on_init(|_| Err(Error::Plug { why: "late".into() }));
    assert_eq!(PluggableAllocator::new(&bench.gpu, Arc::new(failed)).map(drop), Err(why("late")));

    // A free that fails is reported, and the block is gone from the books.
    let plug =
        FnPlug::new(|_, _, _| Ok(Some(DevicePtr(4096))), |_, _, _, _| Err(Error::Plug { why: "not mine".into() }));
    let keeping = PluggableAllocator::new(&bench.gpu, Arc::new(plug)).unwrap();
    let given = keeping.allocate_raw(Request::new(DEVICE, stream.id(), 100)).unwrap();
    assert_eq!(keeping.free(given), Err(why("not mine")));
    assert_eq!(keeping.free(given), Err(Error::UnknownPointer { ptr: given.ptr }));
    assert_eq!(keeping.stats(DEVICE).unwrap().reserved_bytes.all.current, 0);
    bench.finish();
}

#[test]
fn an_address_that_is_taken_is_an_error() {
    let bench = Bench::plain();
    let stream = bench.stream();
    let next = Arc::new(AtomicU64::new(0x1_0000));
    let gives = Arc::clone(&next);
    let plug = FnPlug::new(move |_, _, _| Ok(Some(DevicePtr(gives.load(Ordering::SeqCst)))), |_, _, _, _| Ok(()));
    let allocator = PluggableAllocator::new(&bench.gpu, Arc::new(plug)).unwrap();
    let ask = |device: u32, stream: &Stream| allocator.allocate_raw(Request::new(DeviceId(device), stream.id(), 100));
    let first = ask(0, &stream).unwrap();
    let far = bench.gpu.device(1).unwrap().pool_stream().unwrap();
    for (at, device, on) in [(0x1_0000, 0, &stream), (0x1_0040, 0, &stream), (0xffff, 0, &stream), (0x1_0000, 1, &far)]
    {
        next.store(at, Ordering::SeqCst);
        let taken = Error::PlugAddress { ptr: DevicePtr(at), bytes: 100, taken: first.ptr, taken_bytes: 100 };
        assert_eq!(ask(device, on), Err(taken.clone()));
        assert!(taken.to_string().contains("0x10000"), "{taken}");
    }
    assert_eq!(allocator.find(first.ptr), Ok(first));
    assert_eq!(allocator.stats(DEVICE).unwrap().allocation.all.current, 1);
    // Once it is back with the plug, it may come again.
    allocator.free(first).unwrap();
    next.store(0x1_0040, Ordering::SeqCst);
    let again = ask(0, &stream).unwrap();
    allocator.free(again).unwrap();
    bench.finish();
}

#[test]
fn a_panic_of_the_plug_leaves_the_books_right() {
    let bench = Bench::plain();
    let stream = bench.stream();
    bench.allocator.set_memory_fraction(DEVICE, 0.5).unwrap();
    let pool = MemPool::new(&bench.any(), &bench.device(), PoolOptions::default()).unwrap();
    let limit = bench.device().properties().bytes_total / 2;
    let half = limit / 2 + 1;
    for _ in 0..3 {
        bench.book.panics.store(true, Ordering::SeqCst);
        let request = Request::new(DEVICE, stream.id(), half).in_pool(pool.id());
        let outcome = catch_unwind(AssertUnwindSafe(|| bench.allocator.allocate_raw(request)));
        assert!(outcome.is_err(), "the plug should have panicked");
    }
    // What was promised to them is free again.
    assert_eq!(bench.stats().active.all.allocated, 0);
    let large = bench.give(half, &stream);
    bench.book.panics.store(true, Ordering::SeqCst);
    assert!(catch_unwind(AssertUnwindSafe(|| bench.allocator.free(large))).is_err());
    assert_eq!(bench.stats().active.all.current, 0);
    assert_eq!(bench.allocator.find(large.ptr), Err(Error::UnknownPointer { ptr: large.ptr }));
    let again = bench.give(half, &stream);
    bench.allocator.free(again).unwrap();
    let id = pool.id();
    drop(pool);
    assert_eq!(bench.allocator.pool_uses(DEVICE, id), Err(Error::UnknownPool { pool: id, device: DEVICE }));
    bench.finish();
}

#[test]
fn a_block_goes_back_when_other_streams_have_passed() {
    let bench = Bench::plain();
    bench.book.keeps.store(true, Ordering::SeqCst);
    let (own, other, third) = (bench.stream(), bench.stream(), bench.stream());
    let (slow, quick) = (bench.give(MIB, &own), bench.give(2 * MIB, &own));
    bench.sim.hold(other.id()).unwrap();
    bench.fill(slow.ptr, 1, MIB, &other);
    bench.allocator.record_use(slow, other.id()).unwrap();
    bench.fill(quick.ptr, 1, MIB, &third);
    bench.allocator.record_use(quick, third.id()).unwrap();
    bench.book.read();
    bench.allocator.free(slow).unwrap();
    bench.allocator.free_later(quick);
    assert_eq!(bench.book.read(), [] as [&str; 0], "destructors call nobody, and a stream is behind");
    let stats = bench.stats();
    assert_eq!((stats.allocation.all.current, stats.active.all.current), (0, 2));
    third.synchronize().unwrap();
    let next = bench.give(100, &own);
    // The one behind holds back no other. Its mark is put by this call, and asked about by the next.
    bench.allocator.free(next).unwrap();
    let words = bench.book.read();
    assert!(words.contains(&"take 2097152".to_owned()) && !words.contains(&"take 1048576".to_owned()), "{words:?}");
    bench.sim.let_through(other.id(), u64::MAX).unwrap();
    bench.sim.unhold(other.id()).unwrap();
    other.synchronize().unwrap();
    let next = bench.give(100, &own);
    assert_eq!(bench.book.read()[0], "take 1048576");
    bench.allocator.free(next).unwrap();
    bench.finish();
}

#[test]
fn a_plug_with_the_hook_is_told_of_other_streams_and_takes_care() {
    let bench = Bench::hooked();
    let (own, other) = (bench.stream(), bench.stream());
    let given = bench.give(MIB, &own);
    bench.sim.hold(other.id()).unwrap();
    bench.allocator.record_use(given, other.id()).unwrap();
    bench.allocator.record_use(given, own.id()).unwrap();
    bench.allocator.free(given).unwrap();
    let used = format!("{} used by {}", given.ptr, other.id());
    assert_eq!(bench.book.read(), ["give 1048576".to_owned(), used, "take 1048576".to_owned()]);
    bench.sim.unhold(other.id()).unwrap();
    bench.finish();
}

#[test]
fn hooks_are_called() {
    let bench = Bench::with(Settings::default(), Notebook::plug_with_hooks);
    assert_eq!(bench.book.read(), ["init 2"]);
    bench.allocator.set_memory_fraction(DEVICE, 0.25).unwrap();
    assert_eq!(bench.allocator.memory_fraction(DEVICE), Ok(0.25));
    assert!(bench.allocator.set_memory_fraction(DEVICE, 2.0).is_err());
    bench.trim();
    assert_eq!(bench.book.read(), ["fraction 0.25 of device 0", "reset"]);
    // The books keep the share, whatever the plug does about it.
    let stream = bench.stream();
    let report = bench.run_out(bench.device().properties().bytes_total / 2, &stream);
    assert_eq!(report.cause, OomCause::Limit);
    assert_eq!(bench.book.read(), [] as [&str; 0]);
    bench.finish();
}

#[test]
fn the_base_of_an_address_comes_from_the_hook_or_from_the_books() {
    let bench = Bench::hooked();
    let given = bench.give(10_000, &bench.stream());
    let base = bench.allocator.base_allocation(given.ptr.offset(5)).unwrap();
    assert_eq!((base.ptr, base.bytes), (given.ptr, Some(10_000)));
    let elsewhere = bench.allocator.base_allocation(DevicePtr(0x305)).unwrap();
    assert_eq!(
        (elsewhere.ptr, elsewhere.bytes),
        (DevicePtr(0x300), None),
        "the plug's word, which the books do not know"
    );
    bench.allocator.free(given).unwrap();
    bench.finish();

    let bench = Bench::plain();
    let given = bench.give(10_000, &bench.stream());
    let base = bench.allocator.base_allocation(given.ptr.offset(9_999)).unwrap();
    assert_eq!((base.ptr, base.bytes), (given.ptr, Some(10_000)));
    let outside = given.ptr.offset(10_000);
    assert_eq!(bench.allocator.base_allocation(outside), Err(Error::UnknownPointer { ptr: outside }));
    bench.allocator.free(given).unwrap();
    bench.finish();
}

#[test]
fn streams_that_are_gone_or_elsewhere() {
    let bench = Bench::plain();
    let far = bench.gpu.device(1).unwrap().pool_stream().unwrap();
    let wrong = Error::StreamDevice { device: DEVICE, stream: far.id(), owner: DeviceId(1) };
    assert_eq!(bench.refused(100, &far), wrong);
    // Used by a stream of another device it may be.
    let given = bench.give(100, &bench.stream());
    bench.allocator.record_use(given, far.id()).unwrap();
    bench.allocator.free(given).unwrap();
    assert_eq!(bench.refused(100, &far), wrong);

    let short: StreamId = bench.driver().stream_create(DEVICE, StreamOptions::default()).unwrap();
    let request = Request::new(DEVICE, short, 5000);
    let given = bench.allocator.allocate_raw(request).unwrap();
    bench.driver().stream_destroy(short).unwrap();
    assert!(
        matches!(bench.allocator.allocate_raw(request), Err(Error::Driver(_))),
        "its handle must not reach the plug"
    );
    // The notebook allows another stream if its own is gone.
    bench.allocator.free(given).unwrap();
    assert_eq!(bench.stats().active.all.current, 0);
    bench.forgive_stale_streams();
    bench.finish();
}

#[test]
fn pools_are_kept_and_the_plug_is_told() {
    let bench = Bench::hooked();
    let (any, stream) = (bench.any(), bench.stream());
    let pool = MemPool::new(&any, &bench.device(), PoolOptions::default()).unwrap();
    assert_eq!(pool.id(), MemPoolId { graph: 0, user: 1 });
    let routed = {
        let _scope = pool.enter().unwrap();
        assert_eq!(pool.uses(), Ok(2));
        assert_eq!(pool.enter().map(drop), Err(Error::AlreadyRouting { pool: pool.id() }));
        bench.give(1000, &stream)
    };
    let named = any.allocate_in(pool.id(), 2000, &stream).unwrap();
    let open = bench.give(4000, &stream);
    let expected = ["begin (0, 1) on device 0", "give 1000", "end (0, 1) on device 0", "give 2000", "give 4000"];
    assert_eq!(bench.book.read(), expected);
    let sizes = |only| {
        let snapshot = any.snapshot(SnapshotOptions { pool: only, traces: false }).unwrap();
        snapshot.segments.iter().map(|segment| (segment.pool, segment.total_size)).collect::<BTreeMap<_, _>>().len()
    };
    assert_eq!((sizes(Some(pool.id())), sizes(Some(MemPoolId::DEFAULT)), sizes(None)), (1, 1, 2));
    assert_eq!(bench.stats().reserved_bytes_by_private_pools[&pool.id()].all.current, 3000);
    let has = |live: &[DevicePtr]| bench.allocator.has_exactly(DEVICE, pool.id(), live).unwrap();
    assert!(has(&[named.ptr(), routed.ptr]) && !has(&[named.ptr()]) && !has(&[named.ptr(), routed.ptr, open.ptr]));

    // Blocks outlive their pool; the plug hears of its end with the next call.
    let id = pool.id();
    drop(pool);
    assert_eq!(bench.book.read(), [] as [&str; 0]);
    let gone = bench.allocator.allocate_raw(Request::new(DEVICE, stream.id(), 1).in_pool(id));
    assert_eq!(gone, Err(Error::PoolReleased { pool: id }));
    named.free().unwrap();
    bench.allocator.free(routed).unwrap();
    assert_eq!(bench.book.read(), ["release (0, 1) on device 0", "take 2000", "take 1000"]);
    assert_eq!(bench.allocator.pool_uses(DEVICE, id), Err(Error::UnknownPool { pool: id, device: DEVICE }));
    bench.allocator.free(open).unwrap();

    let upstream = PlugUpstream::new(&bench.gpu, Arc::new(bench.book.plug())).unwrap();
    let options = PoolOptions { upstream: Some(Arc::new(upstream)), ..PoolOptions::default() };
    assert!(matches!(MemPool::new(&any, &bench.device(), options), Err(Error::Unsupported { .. })));
    bench.finish();
}

#[test]
fn a_graph_keeps_what_its_capture_took() {
    let bench = Bench::hooked();
    let (any, stream) = (bench.any(), bench.device().lease_stream().unwrap());
    let mut graph = Graph::new(&any, &bench.device(), GraphOptions::default()).unwrap();
    let (key, scratch) = graph
        .capture(&stream, CaptureOptions::default(), |capture| {
            let key = capture.allocate(4096)?;
            // Freed in the capture, and used by every replay.
            let scratch = any.allocate(4096, capture.stream())?;
            bench.fill(scratch.ptr(), 7, 4096, capture.stream());
            let to = capture.buffer(key)?.ptr();
            bench.driver().copy(to.into(), scratch.ptr().into(), 4096, capture.stream().id())?;
            Ok((key, scratch.ptr()))
        })
        .unwrap();
    let pool = graph.pool().unwrap();
    assert!(bench.book.read().contains(&format!("begin {pool} on device 0")));
    for round in 0..20 {
        // Nobody gets the memory that was freed.
        let other = bench.give(4096, &stream);
        assert_ne!(other.ptr, scratch);
        bench.fill(other.ptr, round, 4096, &stream);
        graph.replay(&stream).unwrap();
        assert_eq!(bench.byte_at(graph.buffer(key).unwrap().ptr()), 7);
        assert_eq!(bench.byte_at(other.ptr), round);
        bench.allocator.free(other).unwrap();
    }
    bench.trim();
    assert_eq!(bench.book.bytes_live(), 2 * 4096, "trimming takes nothing from a graph");
    assert_eq!(bench.stats().reserved_bytes_by_private_pools[&pool].all.current, 2 * 4096);
    graph.replay(&stream).unwrap();
    bench.book.read();
    drop(graph);
    assert_eq!(bench.book.read(), [] as [&str; 0], "destructors call nobody");
    let next = bench.give(100, &stream);
    let words = bench.book.read();
    assert!(words.contains(&format!("release {pool} on device 0")), "{words:?}");
    bench.allocator.free(next).unwrap();
    bench.finish();
}

/// A framework's stream that is first seen when it captures already, and does not say what it is.
#[test]
fn a_stream_that_is_adopted_in_a_capture_gets_memory() {
    use warpool::memory::Upstream as _;
    let bench = Bench::plain();
    let upstream = PlugUpstream::new(&bench.gpu, Arc::new(bench.book.plug())).unwrap();
    let id = bench.sim.stream_of_others(DEVICE, StreamOptions::default()).unwrap();
    bench.driver().capture_begin(id, CaptureMode::Relaxed).unwrap();
    bench.allocator.capture_began(DEVICE).unwrap();
    let raw = bench.driver().stream_handle(id).unwrap().raw;
    // SAFETY: a simulated driver follows no handle.
    let stream = Stream::external(&bench.device(), unsafe { ForeignStream::new(raw) }).unwrap();
    let refused = bench.driver().stream_info(stream.id()).map_err(|error| error.code);
    assert_eq!(refused, Err(ErrorCode::StreamCaptureUnsupported));
    let given = bench.give(1000, &stream);
    let segment = upstream.allocate(DEVICE, MIB, stream.id()).unwrap().unwrap();
    bench.fill(given.ptr, 6, 1000, &stream);
    let graph = bench.driver().capture_end(id).expect("a whole capture");
    bench.allocator.capture_ended(DEVICE).unwrap();
    bench.driver().graph_destroy(graph).unwrap();
    upstream.free(segment, MIB, DEVICE, stream.id()).unwrap();
    bench.allocator.free(given).unwrap();
    bench.finish();
}

/// One thread tells the plug of its pool, which takes a while. Another opens its own meanwhile, and may count on the plug's knowing.
#[test]
fn the_plug_knows_of_a_pool_before_its_scope_is_open() {
    let bench = Bench::plain();
    let (entered, inside) = mpsc::channel();
    let (leave, left) = mpsc::channel::<()>();
    let gate = Mutex::new(Some((entered, left)));
    let heard = Arc::new(Mutex::new(Vec::new()));
    let hears = Arc::clone(&heard);
    let plug = bench.book.plug().on_begin_pool(move |_, pool| {
        let first = gate.lock().unwrap().take();
        if let Some((entered, left)) = first {
            entered.send(()).unwrap();
            left.recv().unwrap();
        }
        hears.lock().unwrap().push(pool);
    });
    let allocator = PluggableAllocator::new(&bench.gpu, Arc::new(plug)).unwrap();
    let pools = [(); 2].map(|()| allocator.create_pool(DEVICE, PoolOptions::default()).unwrap());
    let open = |pool| allocator.begin_routing(DEVICE, pool, Route::Thread(thread::current().id())).unwrap();
    let known = thread::scope(|scope| {
        scope.spawn(|| open(pools[0]));
        inside.recv().unwrap();
        let second = scope.spawn(|| {
            open(pools[1]);
            heard.lock().unwrap().contains(&pools[1])
        });
        while allocator.pool_uses(DEVICE, pools[1]) == Ok(1) {
            thread::yield_now();
        }
        // Time to come back too early, for one that would.
        thread::sleep(Duration::from_millis(50));
        leave.send(()).unwrap();
        second.join().unwrap()
    });
    assert!(known, "it was open before the plug knew");
    assert_eq!(*heard.lock().unwrap(), pools);
    for pool in pools {
        allocator.end_routing(DEVICE, pool).unwrap();
        allocator.release_pool(DEVICE, pool).unwrap();
    }
    bench.finish();
}

/// A hook that opens a scope itself does not wait for itself.
#[test]
fn a_hook_may_open_a_scope() {
    let bench = Bench::plain();
    let allocator = Arc::new(OnceLock::<(Arc<PluggableAllocator>, MemPoolId)>::new());
    let (inner, heard) = (Arc::clone(&allocator), Arc::new(Mutex::new(Vec::new())));
    let hears = Arc::clone(&heard);
    let plug = bench.book.plug().on_begin_pool(move |_, pool| {
        let (allocator, other) = inner.get().unwrap();
        if pool != *other {
            allocator.begin_routing(DEVICE, *other, Route::Thread(thread::current().id())).unwrap();
        }
        hears.lock().unwrap().push(pool);
    });
    let made = Arc::new(PluggableAllocator::new(&bench.gpu, Arc::new(plug)).unwrap());
    let pools = [(); 2].map(|()| made.create_pool(DEVICE, PoolOptions::default()).unwrap());
    allocator.set((Arc::clone(&made), pools[1])).expect("set once");
    made.begin_routing(DEVICE, pools[0], Route::Thread(thread::current().id())).unwrap();
    assert_eq!(*heard.lock().unwrap(), pools);
    bench.finish();
}

#[test]
fn a_replay_that_is_under_way_is_waited_for() {
    let bench = Bench::plain();
    bench.book.keeps.store(true, Ordering::SeqCst);
    let (any, stream, other) = (bench.any(), bench.device().lease_stream().unwrap(), bench.stream());
    let mut graph = Graph::new(&any, &bench.device(), GraphOptions::default()).unwrap();
    graph
        .capture(&stream, CaptureOptions::default(), |capture| {
            let key = capture.allocate(MIB)?;
            let stream = capture.stream().clone();
            capture.fill(key, Pattern::U8(1), MIB, &stream)
        })
        .unwrap();
    bench.sim.hold(other.id()).unwrap();
    graph.replay(&other).unwrap();
    drop(graph);
    bench.book.read();
    for _ in 0..3 {
        let next = bench.give(100, &stream);
        bench.allocator.free(next).unwrap();
    }
    assert!(!bench.book.read().contains(&"take 1048576".to_owned()), "the replay is held");
    bench.sim.let_through(other.id(), u64::MAX).unwrap();
    bench.sim.unhold(other.id()).unwrap();
    bench.finish();
}

#[test]
fn a_block_that_a_capture_uses_goes_back_when_that_is_over() {
    for recorded in [false, true] {
        let bench = Bench::hooked();
        let (own, capturing) = (bench.stream(), bench.device().lease_stream().unwrap());
        // Either the block's own stream captures, or another that uses it. The plug would take care of that one, but not in a capture.
        let given = if recorded { bench.give(MIB, &own) } else { bench.give(MIB, &capturing) };
        let pools = bench.any();
        pools.pools().unwrap().capture_began(DEVICE).unwrap();
        bench.driver().capture_begin(capturing.id(), CaptureMode::Global).unwrap();
        bench.fill(given.ptr, 1, MIB, &capturing);
        if recorded {
            bench.allocator.record_use(given, capturing.id()).unwrap();
        }
        bench.allocator.free(given).unwrap();
        // All calls go on meanwhile, on both streams, and break nothing.
        let inside = bench.give(100, &capturing);
        let outside = bench.give(200, &own);
        bench.allocator.free(outside).unwrap();
        bench.trim();
        assert_eq!(bench.stats().active.all.current, 2, "recorded: {recorded}");
        let words = bench.book.read();
        assert!(!words.contains(&"reset".to_owned()), "it may wait for the device, which a capture forbids: {words:?}");
        let graph = bench.driver().capture_end(capturing.id()).expect("a whole capture");
        pools.pools().unwrap().capture_ended(DEVICE).unwrap();
        bench.driver().graph_destroy(graph).unwrap();
        bench.allocator.free(inside).unwrap();
        assert_eq!(bench.stats().active.all.current, 0, "recorded: {recorded}");
        bench.finish();
    }
}

#[test]
fn a_cap_of_the_settings_holds() {
    let settings = Settings { memory_cap_bytes: Some(5 * MIB), ..Settings::default() };
    let bench = Bench::with(settings, Notebook::plug);
    let (own, other) = (bench.stream(), bench.stream());
    let held = bench.give(4 * MIB, &own);
    let report = bench.run_out(2 * MIB, &own);
    assert_eq!((report.cause, report.bytes_limit), (OomCause::Limit, Some(5 * MIB)));
    // What other streams still use counts, and is waited for.
    common::keep_busy(&other);
    bench.allocator.record_use(held, other.id()).unwrap();
    bench.allocator.free(held).unwrap();
    let next = bench.give(5 * MIB, &own);
    bench.allocator.free(next).unwrap();
    bench.finish();
}

#[test]
fn snapshots_and_histories_show_blocks_with_their_stacks() {
    let bench = Bench::plain();
    let stream = bench.stream();
    let frame = Frame { name: "step".into(), filename: "train.rs".into(), line: 12 };
    bench.allocator.observers().set_stack_hook(Some(Arc::new(move || Some(vec![frame.clone()].into()))));
    bench
        .allocator
        .record_history(Some(HistoryOptions { stacks: StackLevel::All, ..HistoryOptions::default() }))
        .unwrap();
    let given = bench.give(5000, &stream);
    bench.book.capacity.store(0, Ordering::SeqCst);
    bench.run_out(7, &stream);
    let snapshot = bench.allocator.snapshot(SnapshotOptions::default()).unwrap();
    let segment = &snapshot.segments[0];
    assert_eq!(
        (segment.address, segment.total_size, segment.stream),
        (given.ptr.0, 5000, stream.info().unwrap().raw.0)
    );
    assert_eq!(snapshot.stacks[segment.blocks[0].stack.unwrap().0 as usize][0].line, 12);
    bench.allocator.free(given).unwrap();
    let trace = bench.allocator.snapshot(SnapshotOptions::default()).unwrap().traces.remove(0);
    let actions: Vec<_> = trace.iter().map(|entry| entry.action).collect();
    let whole = [
        Action::SegmentAlloc,
        Action::Alloc,
        Action::Oom,
        Action::Snapshot,
        Action::FreeRequested,
        Action::FreeCompleted,
        Action::SegmentFree,
    ];
    assert_eq!(actions, whole);
    assert!(trace.iter().all(|entry| entry.stack.is_some()), "{trace:#?}");
    bench.finish();
}

/// Random programs over a plug that compares: on two streams, with pools, late frees, uses by others and trims.
#[test]
fn random_programs_keep_the_books() {
    for seed in 0..20 {
        println!("seed: {seed}");
        let mut luck = seed;
        let mut draw = move |n: u64| {
            luck = u64::wrapping_add(luck, 0x9e37_79b9_7f4a_7c15);
            let mut z = luck;
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            (z ^ (z >> 31)) % n
        };
        let bench = if seed % 2 == 0 { Bench::plain() } else { Bench::hooked() };
        bench.book.capacity.store(2 * MIB, Ordering::SeqCst);
        let streams = [bench.stream(), bench.stream(), bench.stream()];
        let pools = [bench.allocator.create_pool(DEVICE, PoolOptions::default()).unwrap(), MemPoolId::DEFAULT];
        let mut live: Vec<Allocation> = Vec::new();
        for _ in 0..300 {
            match draw(10) {
                0..=3 => {
                    let (bytes, stream) = (1 + draw(MIB / 4), &streams[draw(3) as usize]);
                    let request = Request::new(DEVICE, stream.id(), bytes).in_pool(pools[draw(2) as usize]);
                    match bench.allocator.allocate_raw(request) {
                        Ok(given) => {
                            bench.fill(given.ptr, draw(256) as u8, bytes, stream);
                            live.push(given);
                        }
                        Err(Error::OutOfMemory(report)) => assert_eq!(report.cause, OomCause::Upstream),
                        Err(other) => panic!("{other}"),
                    }
                }
                4..=6 if !live.is_empty() => {
                    let given = live.swap_remove(draw(live.len() as u64) as usize);
                    match draw(3) {
                        0 => bench.allocator.free(given).unwrap(),
                        1 => bench.allocator.free_raw(given.ptr).unwrap(),
                        _ => bench.allocator.free_later(given),
                    }
                }
                7 | 8 if !live.is_empty() => {
                    let given = live[draw(live.len() as u64) as usize];
                    bench.allocator.record_use(given, streams[draw(3) as usize].id()).unwrap();
                }
                9 if draw(10) == 0 => drop(bench.trim()),
                _ => {}
            }
            let stats = bench.stats();
            assert_eq!(stats.active_bytes.all.current, bench.book.bytes_live(), "seed {seed}");
            assert_eq!(stats.allocation.all.current, live.len() as u64, "seed {seed}");
        }
        live.into_iter().for_each(|given| bench.allocator.free(given).unwrap());
        bench.allocator.release_pool(DEVICE, pools[0]).unwrap();
        bench.finish();
    }
}

/// Everything that asks the driver: blocks that wait for streams, a capture, a replay, pools, a request that fails.
fn scenario(gpu: &Gpu, sim: &SimDriver, any: &Arc<dyn DeviceAllocator>) -> warpool::Result<()> {
    let device = gpu.device(0)?;
    let (own, other) = (device.pool_stream()?, device.pool_stream()?);
    let shared = any.allocate(MIB, &own)?;
    sim.fill(shared.ptr(), Pattern::U8(1), MIB, other.id())?;
    shared.record_use(&other)?;
    let late = any.allocate(2 * MIB, &own)?;
    late.record_use(&other)?;
    drop(late);
    shared.free()?;
    let pool = MemPool::new(any, &device, PoolOptions::default())?;
    let routed = {
        let _scope = pool.enter()?;
        any.allocate(1000, &own)?
    };
    pool.close()?;
    let lease = device.lease_stream()?;
    let mut graph = Graph::new(any, &device, GraphOptions::default())?;
    graph.capture(&lease, CaptureOptions::default(), |capture| {
        let key = capture.allocate(4096)?;
        drop(any.allocate(4096, capture.stream())?);
        let stream = capture.stream().clone();
        capture.fill(key, Pattern::U8(3), 4096, &stream)
    })?;
    graph.replay(&other)?;
    graph.reset()?;
    routed.free()?;
    let outcome = any.allocate(1 << 50, &own);
    if !matches!(outcome, Err(Error::OutOfMemory(_))) {
        outcome?;
    }
    any.set_memory_fraction(DEVICE, 0.9)?;
    any.trim(DEVICE, MemPoolId::DEFAULT)?;
    Ok(())
}

#[test]
fn every_driver_call_may_fail_once() {
    for nth in 1.. {
        let sim = Arc::new(SimDriver::new(SimConfig::default()));
        let plan = FaultPlan::new().fail_nth_of_all(nth, ErrorCode::NotPermitted).sparing(FaultPlan::CLEANUP);
        let faulty = Arc::new(Faulty::new(sim.clone(), plan));
        let Ok(gpu) = Gpu::new(faulty.clone()) else { continue };
        // The plug's own calls go past the faults.
        let book = Notebook::new(sim.clone());
        let plug = if nth % 2 == 0 { book.plug() } else { book.plug_with_hooks() };
        let any: Arc<dyn DeviceAllocator> = Arc::new(PluggableAllocator::new(&gpu, Arc::new(plug)).unwrap());
        let _ = scenario(&gpu, &sim, &any);
        let fired = faulty.fired();
        faulty.clear_plan();
        scenario(&gpu, &sim, &any).unwrap_or_else(|error| panic!("after call {nth} failed: {error}"));
        assert_eq!(book.live(), BTreeMap::new(), "call {nth} failed: {fired:?}");
        let stats = any.stats(DEVICE).unwrap();
        assert_eq!((stats.active.all.current, stats.allocation.all.current), (0, 0), "call {nth} failed: {fired:?}");
        assert_eq!(sim.census().allocations, 0, "call {nth} failed: {fired:?}");
        assert_eq!(sim.hazards(), [], "call {nth} failed: {fired:?}");
        if fired.is_empty() {
            assert!(nth > 60, "the scenario made only {nth} calls");
            return;
        }
    }
}

#[test]
fn threads_share_a_plug() {
    let bench = Bench::plain();
    thread::scope(|scope| {
        for thread in 0..4_u64 {
            let bench = &bench;
            scope.spawn(move || {
                let stream = bench.stream();
                for step in 0..200 {
                    let given = bench.give(1 + (step * 7919 + thread * 104_729) % MIB, &stream);
                    bench.fill(given.ptr, step as u8, given.bytes, &stream);
                    if step % 3 == 0 { bench.allocator.free_later(given) } else { bench.allocator.free(given).unwrap() }
                }
            });
        }
    });
    bench.finish();
}

#[test]
fn a_plug_is_the_source_of_one_pool_with_caching_on_top() {
    let bench = Bench::plain();
    let caching: Arc<dyn DeviceAllocator> = Arc::new(CachingAllocator::new(&bench.gpu, Settings::default()));
    let upstream = PlugUpstream::new(&bench.gpu, Arc::new(bench.book.plug_with_hooks())).unwrap();
    assert_eq!(bench.book.read(), ["init 2"]);
    let options = PoolOptions { upstream: Some(Arc::new(upstream)), ..PoolOptions::default() };
    let pool = MemPool::new(&caching, &bench.device(), options).unwrap();
    let stream = bench.stream();
    let small = caching.allocate_in(pool.id(), 1000, &stream).unwrap();
    let large = caching.allocate_in(pool.id(), 3 * MIB, &stream).unwrap();
    let open = caching.allocate(1000, &stream).unwrap();
    assert_eq!(bench.book.read(), ["give 2097152", "give 20971520"], "segments, and those of the pool alone");
    for (value, block) in [(1, &small), (2, &large), (3, &open)] {
        bench.fill(block.ptr(), value, block.bytes(), &stream);
    }
    for (value, block) in [(1, &small), (2, &large), (3, &open)] {
        assert_eq!(bench.byte_at(block.ptr().offset(block.bytes() - 1)), value);
    }
    // Cached: neither of these asks the plug.
    small.free().unwrap();
    let again = caching.allocate_in(pool.id(), 500, &stream).unwrap();
    assert_eq!(bench.book.read(), [] as [&str; 0]);
    bench.book.capacity.store(0, Ordering::SeqCst);
    let outcome = caching.allocate_in(pool.id(), 300 * MIB, &stream);
    assert!(matches!(&outcome, Err(Error::OutOfMemory(report)) if report.cause == OomCause::Upstream), "{outcome:?}");
    drop((again, large, open));
    pool.close().unwrap();
    assert!(bench.book.read().ends_with(&["take 2097152".to_owned(), "take 20971520".to_owned()]));
    caching.trim(DEVICE, MemPoolId::DEFAULT).unwrap();
    bench.finish();
}

#[test]
fn an_upstream_remembers_streams_that_are_gone() {
    use warpool::memory::Upstream as _;
    let bench = Bench::plain();
    let upstream = PlugUpstream::new(&bench.gpu, Arc::new(bench.book.plug())).unwrap();
    let short = bench.driver().stream_create(DEVICE, StreamOptions::default()).unwrap();
    let ptr = upstream.allocate(DEVICE, MIB, short).unwrap().unwrap();
    bench.driver().stream_destroy(short).unwrap();
    upstream.free(ptr, MIB, DEVICE, short).unwrap();
    assert!(upstream.allocate(DEVICE, MIB, short).is_err());
    bench.forgive_stale_streams();
    bench.finish();
}

#[test]
fn an_upstream_refuses_an_address_that_is_taken() {
    use warpool::memory::Upstream as _;
    let bench = Bench::plain();
    let stream = bench.stream().id();
    let (next, takes) = (Arc::new(AtomicU64::new(0x1_0000)), Arc::new(AtomicBool::new(false)));
    let (gives, free) = (Arc::clone(&next), Arc::clone(&takes));
    let plug = FnPlug::new(
        move |_, _, _| Ok(Some(DevicePtr(gives.load(Ordering::SeqCst)))),
        move |ptr, _, _, _| if free.load(Ordering::SeqCst) { Ok(()) } else { Err(Error::UnknownPointer { ptr }) },
    );
    let upstream = PlugUpstream::new(&bench.gpu, Arc::new(plug)).unwrap();
    let first = upstream.allocate(DEVICE, 100, stream).unwrap().unwrap();
    let ask = |at| {
        next.store(at, Ordering::SeqCst);
        upstream.allocate(DEVICE, 100, stream)
    };
    let taken = |at| Err(Error::PlugAddress { ptr: DevicePtr(at), bytes: 100, taken: first, taken_bytes: 100 });
    assert_eq!((ask(0x1_0000), ask(0x1_0040)), (taken(0x1_0000), taken(0x1_0040)));
    // What the plug would not take back is still taken; what it took may come again.
    upstream.free(first, 100, DEVICE, stream).unwrap_err();
    assert_eq!(ask(0x1_0040), taken(0x1_0040));
    takes.store(true, Ordering::SeqCst);
    upstream.free(first, 100, DEVICE, stream).unwrap();
    assert_eq!(ask(0x1_0040), Ok(Some(DevicePtr(0x1_0040))));
    bench.finish();
}

#[test]
fn the_programs_allocator_is_chosen_before_it_is_used() {
    let bench = Bench::plain();
    let current = CurrentAllocator::new(&bench.gpu);
    let (_, elsewhere) = common::machine(1);
    let foreign: Arc<dyn DeviceAllocator> = Arc::new(CachingAllocator::new(&elsewhere, Settings::default()));
    assert_eq!(current.install(foreign), Err(Error::ForeignGpu { thing: "the allocator" }));
    let other: Arc<dyn DeviceAllocator> = Arc::new(CachingAllocator::new(&bench.gpu, Settings::default()));
    current.install(Arc::clone(&other)).unwrap();
    current.install(bench.any()).expect("nobody got the first");
    assert!(!current.is_used());
    let stream = bench.stream();
    let block = current.get().allocate(1000, &stream).unwrap();
    assert_eq!(bench.book.bytes_live(), 1000);
    let refused = current.install(Arc::clone(&other)).unwrap_err();
    assert_eq!(refused, Error::AllocatorInUse { installed: "pluggable", bytes: 1000, wanted: "caching" });
    assert!(refused.to_string().contains("1000 bytes; install before the first use"), "{refused}");
    block.free().unwrap();

    let by_default = CurrentAllocator::new(&bench.gpu);
    assert_eq!(by_default.get().name(), "caching");
    assert!(Arc::ptr_eq(&by_default.get(), &by_default.get()) && by_default.is_used());
    assert!(matches!(by_default.install(other), Err(Error::AllocatorInUse { installed: "caching", bytes: 0, .. })));
    bench.finish();
}

/// A Rust type as a plug, with no closure in sight.
#[test]
fn any_type_can_be_a_plug() {
    struct Bump {
        base: DevicePtr,
        next: AtomicU64,
    }
    impl Plug for Bump {
        fn allocate(
            &self,
            bytes: u64,
            _: DeviceId,
            _: warpool::memory::PlugStream,
        ) -> warpool::Result<Option<DevicePtr>> {
            let at = self.next.fetch_add(bytes.next_multiple_of(512), Ordering::SeqCst);
            Ok((at + bytes <= MIB).then(|| self.base.offset(at)))
        }

        fn free(&self, _: DevicePtr, _: u64, _: DeviceId, _: warpool::memory::PlugStream) -> warpool::Result<()> {
            Ok(())
        }
    }
    let bench = Bench::plain();
    let base = bench.driver().mem_alloc(DEVICE, MIB).unwrap();
    let bump = Bump { base, next: AtomicU64::new(0) };
    let allocator: Arc<dyn DeviceAllocator> = Arc::new(PluggableAllocator::new(&bench.gpu, Arc::new(bump)).unwrap());
    let stream = bench.stream();
    let blocks: Vec<_> = (0..10).map(|_| allocator.allocate(100_000, &stream).unwrap()).collect();
    assert_eq!(blocks[9].ptr(), base.offset(9 * 100_352));
    assert!(matches!(allocator.allocate(100_000, &stream), Err(Error::OutOfMemory(_))));
    drop(blocks);
    bench.finish();
}
