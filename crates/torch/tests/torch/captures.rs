//! Captures as PyTorch makes them: the pool is passed before the capture begins, and without its streams. On a
//! simulated GPU, whose hazard log must stay empty.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread;

use warpool::memory::report::{HistoryOptions, SnapshotOptions};
use warpool::memory::sleep::Keep;
use warpool::memory::{MemPoolId, Settings};
use warpool_driver::decorate::{FaultPlan, Faulty};
use warpool_driver::sim::{SimConfig, SimDriver};
use warpool_driver::{
    Call, CaptureMode, Captures as _, Copies as _, DeviceId, DevicePtr, Devices as _, ErrorCode, EventOptions,
    EventScope, Events as _, ForeignStream, GraphExecId, Graphs as _, InstantiateOptions, Pattern, StreamId,
    StreamOptions, Streams as _,
};
use warpool_torch::{Error, Runtime, TorchPoolId};

const FIRST: DeviceId = DeviceId(0);
const MIB: isize = 1 << 20;
const POOL: TorchPoolId = TorchPoolId { graph: 17, user: 0 };
const OTHER_POOL: TorchPoolId = TorchPoolId { graph: 18, user: 0 };

struct TestContext {
    sim: Arc<SimDriver>,
    runtime: Runtime,
}

/// A stream by its handle and by its id.
#[derive(Clone, Copy)]
struct TestStream {
    handle: ForeignStream,
    id: StreamId,
}

impl TestContext {
    fn with(settings: &str) -> Self {
        let sim = Arc::new(SimDriver::new(SimConfig::default().with_devices(2)));
        let runtime = Runtime::new(sim.clone(), Settings::parse(settings).unwrap()).unwrap();
        Self { sim, runtime }
    }

    fn stream(&self) -> TestStream {
        let id = self.sim.create_foreign_stream(FIRST, StreamOptions::default()).unwrap();
        let raw = self.sim.stream_handle(id).unwrap().raw;
        // SAFETY: the simulated GPU looks handles up and never follows them.
        TestStream { handle: unsafe { ForeignStream::new(raw) }, id }
    }

    fn alloc(&self, stream: TestStream) -> DevicePtr {
        self.runtime.malloc(4 * MIB, 0, stream.handle).unwrap()
    }

    fn fill(&self, ptr: DevicePtr, value: u8, stream: TestStream) {
        self.sim.fill(ptr, Pattern::U8(value), 4 << 20, stream.id).unwrap();
    }

    fn first_byte(&self, ptr: DevicePtr) -> u8 {
        self.sim.device_synchronize(FIRST).unwrap();
        let mut byte = [0];
        self.sim.download(FIRST, ptr, &mut byte).unwrap();
        byte[0]
    }

    /// Begins a capture as `torch.cuda.graph` does: the pool first, then the capture.
    fn begin(&self, pool: TorchPoolId, stream: TestStream) {
        self.runtime.begin_pool(0, pool).unwrap();
        self.sim.capture_begin(stream.id, CaptureMode::Global).unwrap();
    }

    fn end(&self, pool: TorchPoolId, stream: TestStream) -> GraphExecId {
        let graph = self.sim.capture_end(stream.id).unwrap();
        self.runtime.end_pool(0, pool).unwrap();
        self.sim.graph_instantiate(graph, InstantiateOptions::default()).unwrap()
    }

    /// Makes `later` wait for the work of `earlier`, which makes it part of the capture.
    fn order(&self, earlier: TestStream, later: TestStream) {
        let event = self.sim.event_create(FIRST, EventOptions::default()).unwrap();
        self.sim.event_record(event, earlier.id, EventScope::Plain).unwrap();
        self.sim.stream_wait_event(later.id, event, EventScope::Plain).unwrap();
    }

    /// The pool that contains an address.
    fn pool_of(&self, ptr: DevicePtr) -> MemPoolId {
        let options = SnapshotOptions { pool: None, traces: false };
        let segments = self.runtime.allocator().snapshot(options).unwrap().segments;
        let contains = |start: u64, bytes: u64| (start..start + bytes).contains(&ptr.0);
        segments.iter().find(|segment| contains(segment.address, segment.total_size)).expect("a segment").pool
    }

    fn bytes_reserved(&self) -> u64 {
        self.runtime.allocator().stats(FIRST).unwrap().reserved_bytes.all.current
    }

    /// The allocator counts no capture as under way: one more end is an error.
    fn assert_no_captures(&self) {
        let pools = self.runtime.allocator().pools().unwrap();
        assert!(matches!(pools.capture_ended(FIRST), Err(warpool::Error::NotCapturing { .. })));
    }

    fn finish(self) {
        self.sim.device_synchronize(FIRST).unwrap();
        assert_eq!(self.runtime.open_pools(), 0);
        assert_eq!(self.sim.hazards(), [], "hazards");
    }
}

with_each_backend! {
    allocations_of_a_capture_come_from_its_pool,
    two_graphs_share_a_pool,
    reused_pool_id_is_a_new_pool,
    capture_is_bound_to_the_scope_of_its_own_thread,
    first_allocation_of_a_capture_may_come_from_another_thread,
    two_concurrent_captures_share_a_pool,
    begin_and_end_must_be_paired,
    scope_of_a_failed_capture_is_closed,
    scope_of_a_failed_capture_without_allocations_is_closed,
    end_of_a_scope_that_another_thread_closed_is_accepted,
    begin_opens_a_scope_even_if_the_driver_fails,
    ambiguous_capture_is_an_error,
    pool_memory_is_kept_until_running_replays_are_done,
    pool_memory_serves_others_once_running_replays_are_done,
    snapshots_and_statistics_have_pytorchs_pool_ids,
    recorded_block_is_not_reused_within_the_capture,
    memory_of_a_capture_in_the_scope_of_a_tag_sleeps,
}

/// Its memory leaves the device and returns, and the graph works again. The thread's tag at the begin counts.
fn memory_of_a_capture_in_the_scope_of_a_tag_sleeps(backend: &str) {
    let context = TestContext::with(backend);
    let (runtime, stream) = (&context.runtime, context.stream());
    let scope = runtime.begin_tag(0, "graphs").unwrap();
    context.begin(POOL, stream);
    runtime.end_tag(scope).unwrap();
    let block = context.alloc(stream);
    context.fill(block, 7, stream);
    let graph = context.end(POOL, stream);
    let reserved = context.bytes_reserved();
    for round in 0..3 {
        let report = runtime.sleep(Some(&["graphs"]), Keep::Host).unwrap();
        assert!(report.bytes_device >= 4 << 20 && report.bytes_copied >= 4 << 20, "{report:?}");
        assert_eq!(context.bytes_reserved(), reserved - report.bytes_device);
        runtime.wake(None).unwrap();
        context.fill(block, round, stream);
        context.sim.graph_launch(graph, stream.id).unwrap();
        assert_eq!(context.first_byte(block), 7);
    }
    // A capture that begins while the tag sleeps gets no memory.
    runtime.sleep(None, Keep::Host).unwrap();
    let scope = runtime.begin_tag(0, "graphs").unwrap();
    context.begin(OTHER_POOL, stream);
    let refused = runtime.malloc(4 * MIB, 0, stream.handle).unwrap_err();
    assert!(matches!(refused, Error::Warpool(warpool::Error::TagAsleep { .. })), "{refused}");
    context.end(OTHER_POOL, stream);
    runtime.end_tag(scope).unwrap();
    runtime.release_pool(0, OTHER_POOL).unwrap();
    runtime.wake(None).unwrap();
    runtime.free(block, 0).unwrap();
    runtime.release_pool(0, POOL).unwrap();
    context.finish();
}

/// Also on streams that join the capture; allocations of other streams do not.
fn allocations_of_a_capture_come_from_its_pool(backend: &str) {
    let context = TestContext::with(backend);
    let (stream, side, other) = (context.stream(), context.stream(), context.stream());
    let cached = context.alloc(stream);
    context.runtime.free(cached, 0).unwrap();

    context.begin(POOL, stream);
    let outside = context.alloc(other);
    let first = context.alloc(stream);
    context.fill(first, 7, stream);
    context.order(stream, side);
    let on_side = context.alloc(side);
    context.fill(on_side, 8, side);
    context.order(side, stream);
    let default_stream = context.runtime.malloc(4 * MIB, 0, ForeignStream::NULL).unwrap();
    let exec = context.end(POOL, stream);

    let pool = context.pool_of(first);
    assert!(pool.graph > 0 && context.pool_of(on_side) == pool);
    assert_ne!(first, cached, "the cached block belongs to the default pool");
    for ptr in [outside, default_stream, context.alloc(stream)] {
        assert_eq!(context.pool_of(ptr), MemPoolId::DEFAULT);
    }
    for _ in 0..3 {
        context.sim.graph_launch(exec, stream.id).unwrap();
    }
    assert_eq!((context.first_byte(first), context.first_byte(on_side)), (7, 8));
    context.finish();
}

/// The second graph reuses memory that the first freed, and the pool exists until both are destroyed.
fn two_graphs_share_a_pool(backend: &str) {
    let context = TestContext::with(backend);
    let stream = context.stream();
    context.begin(POOL, stream);
    let first = context.alloc(stream);
    context.fill(first, 1, stream);
    context.runtime.free(first, 0).unwrap();
    let one = context.end(POOL, stream);
    context.begin(POOL, stream);
    let second = context.alloc(stream);
    assert_eq!(second, first);
    context.fill(second, 2, stream);
    context.runtime.free(second, 0).unwrap();
    let two = context.end(POOL, stream);
    for (exec, value) in [(one, 1), (two, 2)] {
        context.sim.graph_launch(exec, stream.id).unwrap();
        assert_eq!(context.first_byte(first), value);
    }

    let reserved = context.bytes_reserved();
    context.runtime.release_pool(0, POOL).unwrap();
    context.runtime.empty_cache().unwrap();
    assert_eq!(context.bytes_reserved(), reserved, "the second graph still uses the pool");
    context.runtime.release_pool(0, POOL).unwrap();
    context.runtime.empty_cache().unwrap();
    assert_eq!(context.bytes_reserved(), 0);
    let text = context.runtime.release_pool(0, POOL).unwrap_err().to_string();
    assert!(text.starts_with("pool (17, 0) is unknown on device 0"), "{text}");
    context.finish();
}

fn reused_pool_id_is_a_new_pool(backend: &str) {
    let context = TestContext::with(backend);
    let stream = context.stream();
    let mut pools = Vec::new();
    for _ in 0..2 {
        context.begin(POOL, stream);
        let block = context.alloc(stream);
        pools.push(context.pool_of(block));
        context.end(POOL, stream);
        context.runtime.free(block, 0).unwrap();
        context.runtime.release_pool(0, POOL).unwrap();
    }
    assert_ne!(pools[0], pools[1]);
    context.finish();
}

/// Two threads capture at once, and the second begins before the first allocates.
fn capture_is_bound_to_the_scope_of_its_own_thread(backend: &str) {
    let context = TestContext::with(backend);
    let (mine, theirs) = (context.stream(), context.stream());
    let (opened, wait_opened) = channel();
    let (bound, wait_bound) = channel();
    thread::scope(|scope| {
        let context = &context;
        context.runtime.begin_pool(0, POOL).unwrap();
        context.sim.capture_begin(mine.id, CaptureMode::Relaxed).unwrap();
        let other = scope.spawn(move || {
            context.runtime.begin_pool(0, OTHER_POOL).unwrap();
            context.sim.capture_begin(theirs.id, CaptureMode::Relaxed).unwrap();
            opened.send(()).unwrap();
            wait_bound.recv().unwrap();
            let block = context.alloc(theirs);
            context.fill(block, 2, theirs);
            context.sim.capture_end(theirs.id).unwrap();
            context.runtime.end_pool(0, OTHER_POOL).unwrap();
            block
        });
        wait_opened.recv().unwrap();
        // The other thread's scope is the newer one.
        let block = context.alloc(mine);
        bound.send(()).unwrap();
        let other = other.join().unwrap();
        let (pool, other_pool) = (context.pool_of(block), context.pool_of(other));
        assert!(!pool.is_default() && !other_pool.is_default() && pool != other_pool);
        context.fill(block, 1, mine);
        // The id still refers to this thread's pool.
        context.sim.capture_end(mine.id).unwrap();
        context.runtime.end_pool(0, POOL).unwrap();
        context.begin(POOL, mine);
        assert_eq!(context.pool_of(context.alloc(mine)), pool);
        context.sim.capture_end(mine.id).unwrap();
        context.runtime.end_pool(0, POOL).unwrap();
    });
    context.finish();
}

/// PyTorch runs backward passes on threads of their own.
fn first_allocation_of_a_capture_may_come_from_another_thread(backend: &str) {
    let context = TestContext::with(backend);
    let stream = context.stream();
    context.begin(POOL, stream);
    let block = thread::scope(|scope| scope.spawn(|| context.alloc(stream)).join().unwrap());
    let again = context.alloc(stream);
    context.end(POOL, stream);
    assert!(!context.pool_of(block).is_default());
    assert_eq!(context.pool_of(again), context.pool_of(block));
    context.finish();
}

fn two_concurrent_captures_share_a_pool(backend: &str) {
    let context = TestContext::with(backend);
    let (one, two) = (context.stream(), context.stream());
    context.begin(POOL, one);
    let first = context.alloc(one);
    context.begin(POOL, two);
    let second = context.alloc(two);
    // Not instantiated: that is forbidden while the other capture is under way.
    context.sim.capture_end(two.id).unwrap();
    context.runtime.end_pool(0, POOL).unwrap();
    let third = context.alloc(one);
    context.end(POOL, one);
    let pool = context.pool_of(first);
    assert!(!pool.is_default());
    assert_eq!((context.pool_of(second), context.pool_of(third)), (pool, pool));
    assert_eq!(context.pool_of(context.alloc(one)), MemPoolId::DEFAULT);
    context.finish();
}

/// Also if the capture allocates nothing.
fn begin_and_end_must_be_paired(backend: &str) {
    let context = TestContext::with(backend);
    let stream = context.stream();
    context.begin(POOL, stream);
    context.end(POOL, stream);
    assert_eq!(context.runtime.open_pools(), 0);
    assert!(matches!(context.runtime.end_pool(0, POOL), Err(Error::PoolNotOpen { pool: POOL, device: 0 })));
    assert!(matches!(context.runtime.begin_pool(9, POOL), Err(Error::Warpool(_))));
    assert!(matches!(context.runtime.begin_pool(-1, POOL), Err(Error::NegativeDevice { device: -1 })));
    // Without a capture the default pool is used, even inside a scope.
    context.runtime.begin_pool(0, POOL).unwrap();
    assert_eq!(context.pool_of(context.alloc(stream)), MemPoolId::DEFAULT);
    context.runtime.end_pool(0, POOL).unwrap();
    context.finish();
}

/// PyTorch does not end the scope of a capture that failed: the next begin, or empty_cache, closes it. The pool stays
/// in use.
fn scope_of_a_failed_capture_is_closed(backend: &str) {
    for by_begin in [true, false] {
        let context = TestContext::with(backend);
        let (stream, side) = (context.stream(), context.stream());
        context.begin(POOL, stream);
        let block = context.alloc(stream);
        // A stream that is not joined back makes the end of the capture fail.
        context.order(stream, side);
        let in_side = context.alloc(side);
        context.fill(in_side, 1, side);
        context.sim.capture_end(stream.id).unwrap_err();
        // The unjoined stream is a hazard on purpose.
        context.sim.clear_hazards();
        assert_eq!(context.runtime.open_pools(), 1);
        if by_begin {
            context.begin(OTHER_POOL, stream);
            assert_eq!(context.runtime.open_pools(), 1);
            let inside = context.alloc(stream);
            assert!(![MemPoolId::DEFAULT, context.pool_of(block)].contains(&context.pool_of(inside)));
            context.end(OTHER_POOL, stream);
        } else {
            context.runtime.empty_cache().unwrap();
        }
        context.assert_no_captures();
        context.runtime.release_pool(0, POOL).unwrap();
        context.finish();
    }
}

/// A capture that failed before its first allocation: the thread's next begin closes its scope. After empty_cache the
/// allocator no longer counts it, but if it is under way after all, it still gets its pool.
fn scope_of_a_failed_capture_without_allocations_is_closed(backend: &str) {
    let context = TestContext::with(backend);
    let stream = context.stream();
    context.runtime.begin_pool(0, POOL).unwrap();
    context.begin(OTHER_POOL, stream);
    assert_eq!(context.runtime.open_pools(), 1);
    assert!(!context.pool_of(context.alloc(stream)).is_default());
    context.end(OTHER_POOL, stream);
    context.assert_no_captures();
    // A late end of the first scope is accepted once.
    context.runtime.end_pool(0, POOL).unwrap();
    assert!(matches!(context.runtime.end_pool(0, POOL), Err(Error::PoolNotOpen { .. })));

    context.runtime.begin_pool(0, POOL).unwrap();
    context.runtime.empty_cache().unwrap();
    context.assert_no_captures();
    context.sim.capture_begin(stream.id, CaptureMode::Global).unwrap();
    assert!(!context.pool_of(context.alloc(stream)).is_default());
    context.end(POOL, stream);
    context.assert_no_captures();
    context.finish();
}

/// Between the end of the capture and the end of its scope, another thread may close the scope.
fn end_of_a_scope_that_another_thread_closed_is_accepted(backend: &str) {
    let context = TestContext::with(backend);
    let stream = context.stream();
    context.begin(POOL, stream);
    context.alloc(stream);
    context.sim.capture_end(stream.id).unwrap();
    thread::scope(|scope| scope.spawn(|| context.runtime.empty_cache().unwrap()).join().unwrap());
    assert_eq!(context.runtime.open_pools(), 0);
    context.runtime.end_pool(0, POOL).unwrap();
    assert!(matches!(context.runtime.end_pool(0, POOL), Err(Error::PoolNotOpen { .. })));
    context.finish();
}

/// A begin cannot report failure. The capture's first allocation does instead, and never uses the default pool.
fn begin_opens_a_scope_even_if_the_driver_fails(backend: &str) {
    let sim = Arc::new(SimDriver::new(SimConfig::default()));
    let faulty = Arc::new(Faulty::new(sim.clone(), FaultPlan::new()));
    let context =
        TestContext { runtime: Runtime::new(faulty.clone(), Settings::parse(backend).unwrap()).unwrap(), sim };
    let (stream, side) = (context.stream(), context.stream());
    // A pending free, whose event the begin of a capture queries.
    let block = context.alloc(stream);
    context.fill(block, 1, side);
    context.runtime.record_stream(block, side.handle).unwrap();
    context.runtime.free(block, 0).unwrap();

    faulty.set_plan(FaultPlan::new().fail_fraction(&[Call::EventQuery], 1.0, 1, ErrorCode::Unknown(7777)));
    context.begin(POOL, stream);
    assert_eq!(faulty.injected().len(), 1);
    context.runtime.malloc(4 * MIB, 0, stream.handle).unwrap_err();
    faulty.clear_plan();
    assert!(!context.pool_of(context.alloc(stream)).is_default());
    context.end(POOL, stream);
    context.assert_no_captures();
    context.finish();
}

/// Two scopes are unbound, and a thread that opened neither allocates in a capture.
fn ambiguous_capture_is_an_error(backend: &str) {
    let context = TestContext::with(backend);
    let stream = context.stream();
    for pool in [POOL, OTHER_POOL] {
        thread::scope(|scope| scope.spawn(|| context.runtime.begin_pool(0, pool).unwrap()).join().unwrap());
    }
    context.sim.capture_begin(stream.id, CaptureMode::Global).unwrap();
    assert!(matches!(context.runtime.malloc(MIB, 0, stream.handle), Err(Error::CaptureUnclear { device: 0 })));
    context.runtime.end_pool(0, POOL).unwrap();
    assert!(!context.pool_of(context.alloc(stream)).is_default());
    context.end(OTHER_POOL, stream);
    context.finish();
}

/// The graph is replayed on a stream that the allocator has not seen, destroyed, and the cache emptied.
fn pool_memory_is_kept_until_running_replays_are_done(backend: &str) {
    for during_a_capture in [false, true] {
        let context = TestContext::with(backend);
        let (stream, unrecorded) = (context.stream(), context.stream());
        context.begin(POOL, stream);
        let block = context.alloc(stream);
        for turn in 0..100 {
            context.fill(block, turn, stream);
        }
        context.runtime.free(block, 0).unwrap();
        let exec = context.end(POOL, stream);
        let reserved = context.bytes_reserved();
        context.sim.graph_launch(exec, unrecorded.id).unwrap();
        context.runtime.release_pool(0, POOL).unwrap();
        if during_a_capture {
            // Synchronizing is forbidden now, so the memory is kept.
            context.begin(OTHER_POOL, stream);
            thread::scope(|scope| scope.spawn(|| context.runtime.empty_cache().unwrap()).join().unwrap());
            assert_eq!(context.bytes_reserved(), reserved);
            context.end(OTHER_POOL, stream);
        }
        context.runtime.empty_cache().unwrap();
        assert_eq!(context.bytes_reserved(), 0);
        context.finish();
    }
}

/// The same without emptying the cache: other streams get the pool's memory only once the replays are done.
fn pool_memory_serves_others_once_running_replays_are_done(backend: &str) {
    let context = TestContext::with(backend);
    let (stream, unrecorded, other) = (context.stream(), context.stream(), context.stream());
    context.begin(POOL, stream);
    let block = context.alloc(stream);
    for turn in 0..100 {
        context.fill(block, turn, stream);
    }
    context.runtime.free(block, 0).unwrap();
    let exec = context.end(POOL, stream);
    context.sim.graph_launch(exec, unrecorded.id).unwrap();
    context.runtime.release_pool(0, POOL).unwrap();
    context.sim.stream_synchronize(stream.id).unwrap();
    for _ in 0..3 {
        let block = context.alloc(other);
        context.fill(block, 1, other);
    }
    // A device that is as full as it can be: this waits for the replay.
    context.runtime.set_settings("memory_cap_mb:40").unwrap();
    for _ in 0..3 {
        if let Ok(block) = context.runtime.malloc(4 * MIB, 0, other.handle) {
            context.fill(block, 2, other);
        }
    }
    context.finish();
}

/// Also for a released pool that still has allocated blocks.
fn snapshots_and_statistics_have_pytorchs_pool_ids(backend: &str) {
    let context = TestContext::with(backend);
    let stream = context.stream();
    context.runtime.allocator().record_history(Some(HistoryOptions::default())).unwrap();
    let id = MemPoolId { graph: 17, user: 0 };
    let mut expected = 0;
    // The second time it is another pool of ours with the same PyTorch id.
    for _ in 0..2 {
        context.begin(POOL, stream);
        context.alloc(stream);
        context.end(POOL, stream);
        expected = context.bytes_reserved();
        context.runtime.release_pool(0, POOL).unwrap();
        context.runtime.empty_cache().unwrap();
        let snapshot = context.runtime.snapshot().unwrap();
        assert!(!snapshot.segments.is_empty() && snapshot.segments.iter().all(|segment| segment.pool == id));
        let of_memory = snapshot.traces[0].iter().filter(|entry| entry.addr != 0);
        assert!(of_memory.clone().count() > 0 && of_memory.clone().all(|entry| entry.pool == Some(id)));
    }
    let by_pool = context.runtime.stats(0).unwrap().reserved_bytes_by_private_pools;
    assert_eq!(by_pool.keys().copied().collect::<Vec<_>>(), [id]);
    assert_eq!((by_pool[&id].all.current, by_pool[&id].large_pool.current), (expected, expected));
    context.finish();
}

fn recorded_block_is_not_reused_within_the_capture(backend: &str) {
    let context = TestContext::with(backend);
    let (stream, side) = (context.stream(), context.stream());
    context.begin(POOL, stream);
    let block = context.alloc(stream);
    context.order(stream, side);
    context.fill(block, 1, side);
    context.runtime.record_stream(block, side.handle).unwrap();
    context.runtime.free(block, 0).unwrap();
    assert_ne!(context.alloc(stream), block);
    context.order(side, stream);
    context.end(POOL, stream);
    context.finish();
}

/// With the driver's pools, memory allocated in a capture belongs to the graph.
#[test]
fn driver_pools_need_no_capture_scopes() {
    let context = TestContext::with("backend:cudaMallocAsync");
    let stream = context.stream();
    context.begin(POOL, stream);
    let block = context.alloc(stream);
    context.fill(block, 3, stream);
    let exec = context.end(POOL, stream);
    context.sim.graph_launch(exec, stream.id).unwrap();
    assert_eq!(context.first_byte(block), 3);
    context.runtime.free(block, 0).unwrap();
    context.runtime.release_pool(0, POOL).unwrap();
    assert!(matches!(
        context.runtime.set_settings("max_split_size_mb:200"),
        Err(Error::NotInBackend { backend: "cudaMallocAsync", .. })
    ));
    context.finish();
}
