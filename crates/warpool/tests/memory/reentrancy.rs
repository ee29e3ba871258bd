//! Callbacks, destructors and other threads that call the allocator during a call: no lock is held, and nothing that
//! the call works on is removed. A failure of most of these tests is a deadlock or an abort.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;

use crate::common::memory::{FIRST, MIB, TestContext};
use warpool::driver::sim::SimDriver;
use warpool::driver::{Call, DeviceId, DevicePtr, Memory, StreamId};
use warpool::memory::pools::{PoolOptions, Route, Upstream};
use warpool::memory::raw::Request;
use warpool::memory::report::{Action, HistoryOptions, StackLevel};
use warpool::memory::{Allocate, DeviceAllocator, DeviceBlock, MemPool, MemPoolId};
use warpool::{Error, Result};

/// An upstream that runs a closure whenever a segment is freed, and that owns something.
struct Source {
    sim: Arc<SimDriver>,
    on_free: Box<dyn Fn() + Send + Sync>,
    _own: Mutex<Option<DeviceBlock>>,
}

impl Source {
    fn options(
        context: &TestContext,
        on_free: impl Fn() + Send + Sync + 'static,
        own: Option<DeviceBlock>,
    ) -> PoolOptions {
        let source = Self { sim: context.sim.clone(), on_free: Box::new(on_free), _own: Mutex::new(own) };
        PoolOptions { upstream: Some(Arc::new(source)), ..PoolOptions::default() }
    }
}

impl Upstream for Source {
    fn allocate(&self, device: DeviceId, bytes: u64, _: StreamId) -> Result<Option<DevicePtr>> {
        Ok(Some(self.sim.mem_alloc(device, bytes)?))
    }

    fn free(&self, ptr: DevicePtr, _: u64, _: DeviceId, _: StreamId) -> Result<()> {
        (self.on_free)();
        Ok(self.sim.mem_free(ptr)?)
    }
}

/// The request succeeds, and the pool is removed with its last segment.
#[test]
fn a_pool_may_be_released_during_a_request() {
    for settings in ["", "expandable_segments:True"] {
        let context = TestContext::new(settings);
        let pool = context.pools().create_pool(FIRST, PoolOptions::default()).unwrap();
        let (allocator, once) = (context.any(), AtomicBool::new(true));
        let give_up = move |device| {
            if once.swap(false, Ordering::Relaxed) {
                allocator.pools().unwrap().release_pool(device, pool).unwrap();
            }
            true
        };
        let callback = context.allocator.observers().attach_pressure_callback(Arc::new(give_up));
        let block = context.alloc_in(pool, 4 * MIB);
        assert_eq!(context.pools().pool_uses(FIRST, pool).unwrap(), 0, "it exists as long as it has memory");
        assert!(matches!(
            context.allocator.allocate_raw(Request::new(FIRST, context.main.id(), 1).in_pool(pool)),
            Err(Error::PoolReleased { .. })
        ));
        context.free(block);
        context.trim();
        assert!(matches!(context.pools().pool_uses(FIRST, pool), Err(Error::UnknownPool { .. })));
        context.allocator.observers().detach(callback);
        context.finish();
    }
}

#[test]
fn a_pool_released_during_a_failing_request_is_removed() {
    let context = TestContext::with_capacity(64 * MIB, "");
    let pool = context.pools().create_pool(FIRST, PoolOptions::default()).unwrap();
    let allocator = context.any();
    let give_up = move |device| allocator.pools().unwrap().release_pool(device, pool).is_ok();
    let callback = context.allocator.observers().attach_pressure_callback(Arc::new(give_up));
    let outcome = context.allocator.allocate_raw(Request::new(FIRST, context.main.id(), 100 * MIB).in_pool(pool));
    assert!(matches!(outcome, Err(Error::OutOfMemory(_))), "{outcome:?}");
    assert!(matches!(context.pools().pool_uses(FIRST, pool), Err(Error::UnknownPool { .. })));
    context.allocator.observers().detach(callback);
    context.finish();
}

/// A request without a pool does not fail because another thread closed the scope meanwhile. The hook simulates that
/// thread.
#[test]
fn a_request_is_routed_again_if_its_scope_closes() {
    let context = TestContext::new("");
    let pool = MemPool::new(&context.any(), &context.device(), PoolOptions::default()).unwrap();
    let scope = pool.route(Route::Everything).unwrap();
    let open = Mutex::new(Some((scope, pool)));
    let hook = move || {
        drop(open.lock().unwrap().take());
        None
    };
    context.allocator.observers().set_stack_hook(Some(Arc::new(hook)));
    let options = HistoryOptions { stacks: StackLevel::All, ..HistoryOptions::default() };
    context.allocator.record_history(Some(options)).unwrap();
    let block = context.alloc(MIB);
    assert_eq!(context.segments_of(MemPoolId::DEFAULT).len(), 1);
    context.free(block);
    context.allocator.observers().set_stack_hook(None);
    context.finish();
}

/// Calls about pools record nothing, and do not report what another thread recorded: a tracker that panics would leave
/// them incomplete.
#[test]
fn trackers_are_not_called_while_a_scope_opens() {
    let context = TestContext::new("");
    context.free(context.alloc(MIB));
    let (arrived, arrival) = mpsc::channel();
    let (go, may_go) = mpsc::channel::<()>();
    let (seen, may_go) = (AtomicU64::new(0), Mutex::new(may_go));
    // The free of the second segment blocks its thread, before the entry of the first is reported.
    let stop = move || {
        if seen.fetch_add(1, Ordering::Relaxed) == 1 {
            arrived.send(()).unwrap();
            may_go.lock().unwrap().recv().unwrap();
        }
    };
    let pool = MemPool::new(&context.any(), &context.device(), Source::options(&context, stop, None)).unwrap();
    context.free_all([11, 12].map(|mib| context.alloc_in(pool.id(), mib * MIB)));
    let calls = Arc::new(AtomicU64::new(0));
    let tracker = {
        let (calls, allocator, stream) = (calls.clone(), context.any(), context.main.clone());
        move |_, _: &_| {
            calls.fetch_add(1, Ordering::Relaxed);
            drop(allocator.allocate(MIB, &stream).unwrap());
        }
    };
    let tracker = context.allocator.observers().attach_tracker(&[Action::SegmentFree], Arc::new(tracker));
    let others = [(); 2].map(|()| MemPool::new(&context.any(), &context.device(), PoolOptions::default()).unwrap());
    let outer = others[0].route(Route::Stream(context.side_stream().id())).unwrap();
    thread::scope(|scope| {
        let closing = scope.spawn(|| pool.close().unwrap());
        arrival.recv().unwrap();
        drop(others[1].enter().unwrap());
        assert_eq!(calls.load(Ordering::Relaxed), 0, "the other thread's first segment is not reported yet");
        go.send(()).unwrap();
        closing.join().unwrap();
    });
    assert_eq!(calls.load(Ordering::Relaxed), 2);
    context.allocator.observers().detach(tracker);
    drop(outer);
    context.finish();
}

/// The blocks are dropped with the observer, which calls the other observers.
#[test]
fn observers_may_own_blocks() {
    let context = TestContext::new("");
    let observers = context.allocator.observers();
    let calls = Arc::new(AtomicU64::new(0));
    let counter = calls.clone();
    let count = move |_, _: &_| {
        counter.fetch_add(1, Ordering::Relaxed);
    };
    let frees = observers.attach_tracker(&[Action::FreeCompleted], Arc::new(count));
    let own = |bytes| context.allocator.allocate(bytes, &context.main).unwrap();
    let block = own(MIB);
    let tracker = observers.attach_tracker(&Action::ALL, Arc::new(move |_, _: &_| assert!(block.bytes() > 0)));
    assert!(observers.detach(tracker) && !observers.detach(tracker));
    let block = own(2 * MIB);
    observers.set_stack_hook(Some(Arc::new(move || if block.bytes() > 0 { None } else { Some([].into()) })));
    observers.set_stack_hook(None);
    let block = own(3 * MIB);
    let callback = observers.attach_pressure_callback(Arc::new(move |_| block.bytes() == 0));
    assert!(observers.detach(callback));
    assert_eq!((calls.load(Ordering::Relaxed), context.bytes_allocated()), (3, 0));
    observers.detach(frees);
    context.finish();
}

/// The upstream is dropped with the pool, or with its last segment.
#[test]
fn an_upstream_may_own_blocks_of_its_allocator() {
    for with_segment in [false, true] {
        let context = TestContext::new("");
        let own = context.allocator.allocate(MIB, &context.main).unwrap();
        let pool =
            MemPool::new(&context.any(), &context.device(), Source::options(&context, || (), Some(own))).unwrap();
        if with_segment {
            context.free(context.alloc_in(pool.id(), MIB));
        }
        drop(pool);
        context.trim();
        assert_eq!(context.bytes_allocated(), 0, "the upstream is dropped");
        context.trim();
        assert_eq!(context.bytes_reserved(), 0);
        context.finish();
    }
}

/// Runs its closure when it is dropped.
struct Last(Option<Box<dyn FnOnce()>>);

impl Drop for Last {
    fn drop(&mut self) {
        self.0.take().expect("dropped once")();
    }
}

thread_local! {
    /// Registered before any thread-local of the allocator, hence dropped after it.
    static KEPT: RefCell<Vec<Last>> = const { RefCell::new(Vec::new()) };
}

/// The last destructors of a thread may drop blocks and allocate.
#[test]
fn a_thread_may_allocate_in_its_last_destructors() {
    let context = TestContext::new("");
    let calls = Arc::new(AtomicU64::new(0));
    let counter = calls.clone();
    let count = move |_, _: &_| {
        counter.fetch_add(1, Ordering::Relaxed);
    };
    let tracker = context.allocator.observers().attach_tracker(&[Action::FreeCompleted], Arc::new(count));
    context.allocator.record_history(Some(HistoryOptions::default())).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            KEPT.with_borrow_mut(Vec::clear);
            let (allocator, stream) = (context.any(), context.main.clone());
            let block = allocator.allocate(30 * MIB, &stream).unwrap();
            let last = move || {
                drop(block);
                drop(allocator.allocate(50 * MIB, &stream).unwrap());
                allocator.trim(FIRST, MemPoolId::DEFAULT).unwrap();
            };
            KEPT.with_borrow_mut(|kept| kept.push(Last(Some(Box::new(last)))));
        });
    });
    // The end of a scope does not wait for the destructors of its threads.
    while calls.load(Ordering::Relaxed) < 2 || context.bytes_reserved() > 0 {
        thread::yield_now();
    }
    context.allocator.observers().detach(tracker);
    context.finish();
}

/// However many frees another thread's capture defers, a request outside of it reads each stream's status once.
#[test]
fn deferred_frees_cost_a_request_one_status_query_per_stream() {
    const BLOCKS: usize = 100;
    let context = TestContext::new("");
    let (stream, side) = (context.side_stream(), context.side_stream());
    let pool = context.pools().create_graph_pool(FIRST).unwrap();
    let capture = context.begin_capture(&stream);
    context.pools().begin_routing(FIRST, pool, Route::Capture(capture)).unwrap();
    side.wait_stream(&stream).unwrap();
    let blocks: Vec<_> = (0..BLOCKS).map(|_| context.alloc_on(&stream, MIB)).collect();
    for &block in &blocks {
        context.record_use(block, &side);
        context.free(block);
    }
    stream.wait_stream(&side).unwrap();
    assert_eq!(context.stats().active.all.current, BLOCKS as u64, "all are deferred");
    let other = context.side_stream();
    let before = context.sim.call_count(Call::CaptureState);
    let block = context.alloc_on(&other, MIB);
    let queries = context.sim.call_count(Call::CaptureState) - before;
    assert!(queries < 10, "{queries} queries for one request");
    context.end_capture(&stream);
    context.pools().end_routing(FIRST, pool).unwrap();
    context.free(block);
    context.free(context.alloc_on(&other, MIB));
    assert_eq!(context.stats().active.all.current, 0);
    context.finish();
}
