//! Captures as PyTorch makes them: a pool is named before the capture begins, and nobody says which streams are meant.
//! On a simulated GPU, whose captures and replays are real, and whose hazard log must stay empty.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread;

use warpool::memory::{HistoryOptions, MemPoolId, Settings, SnapshotOptions};
use warpool_driver::decorate::{FaultPlan, Faulty};
use warpool_driver::sim::{SimConfig, SimDriver};
use warpool_driver::{
    Call, CaptureMode, Captures as _, Copies as _, DeviceId, DevicePtr, Devices as _, ErrorCode, EventOptions,
    EventScope, Events as _, GraphExecId, Graphs as _, InstantiateOptions, Pattern, RawHandle, StreamId, StreamOptions,
    Streams as _,
};
use warpool_torch::{Error, Runtime, TorchPool};

const FIRST: DeviceId = DeviceId(0);
const MIB: isize = 1 << 20;
const POOL: TorchPool = TorchPool { graph: 17, user: 0 };
const OTHER_POOL: TorchPool = TorchPool { graph: 18, user: 0 };

struct Bench {
    sim: Arc<SimDriver>,
    runtime: Runtime,
}

/// A stream, as C knows it and as the driver does.
#[derive(Clone, Copy)]
struct Lane {
    raw: RawHandle,
    id: StreamId,
}

impl Bench {
    fn new() -> Self {
        Self::with("")
    }

    fn with(settings: &str) -> Self {
        let sim = Arc::new(SimDriver::new(SimConfig::default().with_devices(2)));
        let runtime = Runtime::new(sim.clone(), Settings::parse(settings).unwrap()).unwrap();
        Self { sim, runtime }
    }

    fn lane(&self) -> Lane {
        let id = self.sim.create_foreign_stream(FIRST, StreamOptions::default()).unwrap();
        Lane { raw: self.sim.stream_handle(id).unwrap().raw, id }
    }

    fn alloc(&self, lane: Lane) -> DevicePtr {
        self.runtime.malloc(4 * MIB, 0, lane.raw).unwrap()
    }

    fn fill(&self, ptr: DevicePtr, value: u8, lane: Lane) {
        self.sim.fill(ptr, Pattern::U8(value), 4 << 20, lane.id).unwrap();
    }

    fn holds(&self, ptr: DevicePtr) -> u8 {
        self.sim.device_synchronize(FIRST).unwrap();
        let mut byte = [0];
        self.sim.download(FIRST, ptr, &mut byte).unwrap();
        byte[0]
    }

    /// As `torch.cuda.graph` does: the pool first, then the capture.
    fn begin(&self, pool: TorchPool, lane: Lane) {
        self.runtime.begin_pool(0, pool).unwrap();
        self.sim.capture_begin(lane.id, CaptureMode::Global).unwrap();
    }

    fn end(&self, pool: TorchPool, lane: Lane) -> GraphExecId {
        let graph = self.sim.capture_end(lane.id).unwrap();
        self.runtime.end_pool(0, pool).unwrap();
        self.sim.graph_instantiate(graph, InstantiateOptions::default()).unwrap()
    }

    /// Makes `later` wait for what `earlier` has, and joins its capture.
    fn order(&self, earlier: Lane, later: Lane) {
        let event = self.sim.event_create(FIRST, EventOptions::default()).unwrap();
        self.sim.event_record(event, earlier.id, EventScope::Plain).unwrap();
        self.sim.stream_wait_event(later.id, event, EventScope::Plain).unwrap();
    }

    /// The pool that an address belongs to.
    fn pool_of(&self, ptr: DevicePtr) -> MemPoolId {
        let options = SnapshotOptions { pool: None, traces: false };
        let segments = self.runtime.allocator().snapshot(options).unwrap().segments;
        let holds = |start: u64, bytes: u64| (start..start + bytes).contains(&ptr.0);
        segments.iter().find(|segment| holds(segment.address, segment.total_size)).expect("a segment").pool
    }

    fn bytes_reserved(&self) -> u64 {
        self.runtime.allocator().stats(FIRST).unwrap().reserved_bytes.all.current
    }

    /// The allocator takes care of no capture: an end too many is noticed.
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

/// What a capture asks for comes from its pool, on side streams too; what others ask for meanwhile does not.
#[test]
fn a_capture_gets_memory_from_its_pool() {
    let bench = Bench::new();
    let (lane, side, outsider) = (bench.lane(), bench.lane(), bench.lane());
    let cached = bench.alloc(lane);
    bench.runtime.free(cached, 0).unwrap();

    bench.begin(POOL, lane);
    let outside = bench.alloc(outsider);
    let first = bench.alloc(lane);
    bench.fill(first, 7, lane);
    bench.order(lane, side);
    let on_side = bench.alloc(side);
    bench.fill(on_side, 8, side);
    bench.order(side, lane);
    let default_stream = bench.runtime.malloc(4 * MIB, 0, RawHandle(0)).unwrap();
    let exec = bench.end(POOL, lane);

    let pool = bench.pool_of(first);
    assert!(pool.graph > 0 && bench.pool_of(on_side) == pool);
    assert_ne!(first, cached, "what is cached elsewhere is not the graph's");
    for ptr in [outside, default_stream, bench.alloc(lane)] {
        assert_eq!(bench.pool_of(ptr), MemPoolId::DEFAULT);
    }
    for _ in 0..3 {
        bench.sim.graph_launch(exec, lane.id).unwrap();
    }
    assert_eq!((bench.holds(first), bench.holds(on_side)), (7, 8));
    bench.finish();
}

/// Graphs share a pool: the second reuses what the first gave back, and the pool is there until both are gone.
#[test]
fn graphs_share_a_pool() {
    let bench = Bench::new();
    let lane = bench.lane();
    bench.begin(POOL, lane);
    let first = bench.alloc(lane);
    bench.fill(first, 1, lane);
    bench.runtime.free(first, 0).unwrap();
    let one = bench.end(POOL, lane);
    bench.begin(POOL, lane);
    let second = bench.alloc(lane);
    assert_eq!(second, first);
    bench.fill(second, 2, lane);
    bench.runtime.free(second, 0).unwrap();
    let two = bench.end(POOL, lane);
    for (exec, value) in [(one, 1), (two, 2)] {
        bench.sim.graph_launch(exec, lane.id).unwrap();
        assert_eq!(bench.holds(first), value);
    }

    let reserved = bench.bytes_reserved();
    bench.runtime.release_pool(0, POOL).unwrap();
    bench.runtime.empty_cache().unwrap();
    assert_eq!(bench.bytes_reserved(), reserved, "the second graph is still there");
    bench.runtime.release_pool(0, POOL).unwrap();
    bench.runtime.empty_cache().unwrap();
    assert_eq!(bench.bytes_reserved(), 0);
    let text = bench.runtime.release_pool(0, POOL).unwrap_err().to_string();
    assert!(text.starts_with("pool (17, 0) is unknown on device 0"), "{text}");
    bench.finish();
}

/// The same name again, after the pool is gone, is a pool of its own.
#[test]
fn a_name_can_come_again() {
    let bench = Bench::new();
    let lane = bench.lane();
    let mut pools = Vec::new();
    for _ in 0..2 {
        bench.begin(POOL, lane);
        let block = bench.alloc(lane);
        pools.push(bench.pool_of(block));
        bench.end(POOL, lane);
        bench.runtime.free(block, 0).unwrap();
        bench.runtime.release_pool(0, POOL).unwrap();
    }
    assert_ne!(pools[0], pools[1]);
    bench.finish();
}

/// Two threads capture at once, begun crosswise: each gets the pool that it opened itself.
#[test]
fn each_thread_is_bound_to_its_own_scope() {
    let bench = Bench::new();
    let (mine, theirs) = (bench.lane(), bench.lane());
    let (opened, wait_opened) = channel();
    let (bound, wait_bound) = channel();
    thread::scope(|scope| {
        let bench = &bench;
        bench.runtime.begin_pool(0, POOL).unwrap();
        bench.sim.capture_begin(mine.id, CaptureMode::Relaxed).unwrap();
        let other = scope.spawn(move || {
            bench.runtime.begin_pool(0, OTHER_POOL).unwrap();
            bench.sim.capture_begin(theirs.id, CaptureMode::Relaxed).unwrap();
            opened.send(()).unwrap();
            wait_bound.recv().unwrap();
            let block = bench.alloc(theirs);
            bench.fill(block, 2, theirs);
            bench.sim.capture_end(theirs.id).unwrap();
            bench.runtime.end_pool(0, OTHER_POOL).unwrap();
            block
        });
        wait_opened.recv().unwrap();
        // The other thread's scope is the newer one.
        let block = bench.alloc(mine);
        bound.send(()).unwrap();
        let other = other.join().unwrap();
        let (pool, other_pool) = (bench.pool_of(block), bench.pool_of(other));
        assert!(!pool.is_default() && !other_pool.is_default() && pool != other_pool);
        bench.fill(block, 1, mine);
        // The name still leads to the pool that this thread meant.
        bench.sim.capture_end(mine.id).unwrap();
        bench.runtime.end_pool(0, POOL).unwrap();
        bench.begin(POOL, mine);
        assert_eq!(bench.pool_of(bench.alloc(mine)), pool);
        bench.sim.capture_end(mine.id).unwrap();
        bench.runtime.end_pool(0, POOL).unwrap();
    });
    bench.finish();
}

/// Backward passes run on threads of their own: a scope that another thread opened serves them.
#[test]
fn another_thread_of_the_capture_is_served() {
    let bench = Bench::new();
    let lane = bench.lane();
    bench.begin(POOL, lane);
    let block = thread::scope(|scope| scope.spawn(|| bench.alloc(lane)).join().unwrap());
    let again = bench.alloc(lane);
    bench.end(POOL, lane);
    assert!(!bench.pool_of(block).is_default());
    assert_eq!(bench.pool_of(again), bench.pool_of(block));
    bench.finish();
}

/// Two captures at once from one pool.
#[test]
fn one_pool_serves_two_captures_at_once() {
    let bench = Bench::new();
    let (one, two) = (bench.lane(), bench.lane());
    bench.begin(POOL, one);
    let first = bench.alloc(one);
    bench.begin(POOL, two);
    let second = bench.alloc(two);
    // Not made ready: that is forbidden while the other capture is under way.
    bench.sim.capture_end(two.id).unwrap();
    bench.runtime.end_pool(0, POOL).unwrap();
    let third = bench.alloc(one);
    bench.end(POOL, one);
    let pool = bench.pool_of(first);
    assert!(!pool.is_default());
    assert_eq!((bench.pool_of(second), bench.pool_of(third)), (pool, pool));
    assert_eq!(bench.pool_of(bench.alloc(one)), MemPoolId::DEFAULT);
    bench.finish();
}

/// A capture that asks for nothing is bound to nothing; begin and end must be paired.
#[test]
fn scopes_are_opened_and_closed_in_pairs() {
    let bench = Bench::new();
    let lane = bench.lane();
    bench.begin(POOL, lane);
    bench.end(POOL, lane);
    assert_eq!(bench.runtime.open_pools(), 0);
    assert!(matches!(bench.runtime.end_pool(0, POOL), Err(Error::PoolNotOpen { pool: POOL, device: 0 })));
    assert!(matches!(bench.runtime.begin_pool(9, POOL), Err(Error::Warpool(_))));
    assert!(matches!(bench.runtime.begin_pool(-1, POOL), Err(Error::NegativeDevice { device: -1 })));
    // Outside of captures the default pool serves, also between begin and capture.
    bench.runtime.begin_pool(0, POOL).unwrap();
    assert_eq!(bench.pool_of(bench.alloc(lane)), MemPoolId::DEFAULT);
    bench.runtime.end_pool(0, POOL).unwrap();
    bench.finish();
}

/// A capture that failed, of whose end nobody spoke: the next begin, or empty_cache, closes its scope, and the pool's
/// other graphs keep it.
#[test]
fn a_lost_capture_is_closed() {
    for by_begin in [true, false] {
        let bench = Bench::new();
        let (lane, side) = (bench.lane(), bench.lane());
        bench.begin(POOL, lane);
        let block = bench.alloc(lane);
        // A stream that joined and never came back breaks the capture at its end.
        bench.order(lane, side);
        let in_side = bench.alloc(side);
        bench.fill(in_side, 1, side);
        bench.sim.capture_end(lane.id).unwrap_err();
        // That was on purpose.
        bench.sim.clear_hazards();
        assert_eq!(bench.runtime.open_pools(), 1);
        if by_begin {
            bench.begin(OTHER_POOL, lane);
            assert_eq!(bench.runtime.open_pools(), 1);
            let inside = bench.alloc(lane);
            assert!(![MemPoolId::DEFAULT, bench.pool_of(block)].contains(&bench.pool_of(inside)));
            bench.end(OTHER_POOL, lane);
        } else {
            bench.runtime.empty_cache().unwrap();
        }
        bench.assert_no_captures();
        bench.runtime.release_pool(0, POOL).unwrap();
        bench.finish();
    }
}

/// A capture that broke before it asked for anything: the same thread's next begin closes its scope. After empty_cache
/// nobody takes care of it, but should it be under way after all, it still gets its pool.
#[test]
fn a_lost_capture_that_asked_for_nothing_is_closed() {
    let bench = Bench::new();
    let lane = bench.lane();
    bench.runtime.begin_pool(0, POOL).unwrap();
    bench.begin(OTHER_POOL, lane);
    assert_eq!(bench.runtime.open_pools(), 1);
    assert!(!bench.pool_of(bench.alloc(lane)).is_default());
    bench.end(OTHER_POOL, lane);
    bench.assert_no_captures();
    // If the end of the first comes after all, it is accepted, once.
    bench.runtime.end_pool(0, POOL).unwrap();
    assert!(matches!(bench.runtime.end_pool(0, POOL), Err(Error::PoolNotOpen { .. })));

    bench.runtime.begin_pool(0, POOL).unwrap();
    bench.runtime.empty_cache().unwrap();
    bench.assert_no_captures();
    bench.sim.capture_begin(lane.id, CaptureMode::Global).unwrap();
    assert!(!bench.pool_of(bench.alloc(lane)).is_default());
    bench.end(POOL, lane);
    bench.assert_no_captures();
    bench.finish();
}

/// Between the end of a capture and the word of it, another thread may notice it.
#[test]
fn an_end_that_another_thread_saw_first_is_accepted() {
    let bench = Bench::new();
    let lane = bench.lane();
    bench.begin(POOL, lane);
    bench.alloc(lane);
    bench.sim.capture_end(lane.id).unwrap();
    thread::scope(|scope| scope.spawn(|| bench.runtime.empty_cache().unwrap()).join().unwrap());
    assert_eq!(bench.runtime.open_pools(), 0);
    bench.runtime.end_pool(0, POOL).unwrap();
    assert!(matches!(bench.runtime.end_pool(0, POOL), Err(Error::PoolNotOpen { .. })));
    bench.finish();
}

/// A begin has no way to say that it failed, so it does not: an allocation does, and no graph gets memory of the
/// default pool.
#[test]
fn a_begin_with_a_failing_driver_opens_its_scope() {
    let sim = Arc::new(SimDriver::new(SimConfig::default()));
    let faulty = Arc::new(Faulty::new(sim.clone(), FaultPlan::new()));
    let bench = Bench { runtime: Runtime::new(faulty.clone(), Settings::default()).unwrap(), sim };
    let (lane, side) = (bench.lane(), bench.lane());
    // A free that waits for another stream, which the begin of a capture looks after.
    let block = bench.alloc(lane);
    bench.fill(block, 1, side);
    bench.runtime.record_stream(block, side.raw).unwrap();
    bench.runtime.free(block, 0).unwrap();

    faulty.set_plan(FaultPlan::new().fail_fraction(&[Call::EventQuery], 1.0, 1, ErrorCode::Unknown(7777)));
    bench.begin(POOL, lane);
    assert_eq!(faulty.injected().len(), 1);
    bench.runtime.malloc(4 * MIB, 0, lane.raw).unwrap_err();
    faulty.clear_plan();
    assert!(!bench.pool_of(bench.alloc(lane)).is_default());
    bench.end(POOL, lane);
    bench.assert_no_captures();
    bench.finish();
}

/// Two captures wait for their first allocation, and a thread that began neither makes one: whose it is is not guessed.
#[test]
fn an_unclear_capture_is_an_error() {
    let bench = Bench::new();
    let lane = bench.lane();
    for pool in [POOL, OTHER_POOL] {
        thread::scope(|scope| scope.spawn(|| bench.runtime.begin_pool(0, pool).unwrap()).join().unwrap());
    }
    bench.sim.capture_begin(lane.id, CaptureMode::Global).unwrap();
    assert!(matches!(bench.runtime.malloc(MIB, 0, lane.raw), Err(Error::CaptureUnclear { device: 0 })));
    bench.runtime.end_pool(0, POOL).unwrap();
    assert!(!bench.pool_of(bench.alloc(lane)).is_default());
    bench.end(OTHER_POOL, lane);
    bench.finish();
}

/// PyTorch replays on whichever stream it likes, drops the graph at once and empties the cache: the memory stays until
/// the replay is done.
#[test]
fn a_replay_that_is_under_way_keeps_the_pools_memory() {
    for during_a_capture in [false, true] {
        let bench = Bench::with("expandable_segments:True");
        let (lane, unheard_of) = (bench.lane(), bench.lane());
        bench.begin(POOL, lane);
        let block = bench.alloc(lane);
        for turn in 0..100 {
            bench.fill(block, turn, lane);
        }
        bench.runtime.free(block, 0).unwrap();
        let exec = bench.end(POOL, lane);
        let reserved = bench.bytes_reserved();
        bench.sim.graph_launch(exec, unheard_of.id).unwrap();
        bench.runtime.release_pool(0, POOL).unwrap();
        if during_a_capture {
            // What nobody may wait for now stays for later.
            bench.begin(OTHER_POOL, lane);
            thread::scope(|scope| scope.spawn(|| bench.runtime.empty_cache().unwrap()).join().unwrap());
            assert_eq!(bench.bytes_reserved(), reserved);
            bench.end(OTHER_POOL, lane);
        }
        bench.runtime.empty_cache().unwrap();
        assert_eq!(bench.bytes_reserved(), 0);
        bench.finish();
    }
}

/// Snapshots and statistics call a pool as PyTorch does, also when it is released and somebody still has a block of it.
#[test]
fn pools_have_pytorchs_names() {
    let bench = Bench::new();
    let lane = bench.lane();
    bench.runtime.allocator().record_history(Some(HistoryOptions::default())).unwrap();
    let name = MemPoolId { graph: 17, user: 0 };
    let mut expected = 0;
    // The second time it is another pool of ours, by the same name.
    for _ in 0..2 {
        bench.begin(POOL, lane);
        bench.alloc(lane);
        bench.end(POOL, lane);
        expected = bench.bytes_reserved();
        bench.runtime.release_pool(0, POOL).unwrap();
        bench.runtime.empty_cache().unwrap();
        let snapshot = bench.runtime.snapshot().unwrap();
        assert!(!snapshot.segments.is_empty() && snapshot.segments.iter().all(|segment| segment.pool == name));
        let of_memory = snapshot.traces[0].iter().filter(|entry| entry.addr != 0);
        assert!(of_memory.clone().count() > 0 && of_memory.clone().all(|entry| entry.pool == Some(name)));
    }
    let by_pool = bench.runtime.stats(0).unwrap().reserved_bytes_by_private_pools;
    assert_eq!(by_pool.keys().copied().collect::<Vec<_>>(), [name]);
    assert_eq!((by_pool[&name].all.current, by_pool[&name].large_pool.current), (expected, expected));
    bench.finish();
}

/// A block that a side stream of the capture used is not given out again in it.
#[test]
fn record_stream_holds_back_in_a_capture() {
    let bench = Bench::new();
    let (lane, side) = (bench.lane(), bench.lane());
    bench.begin(POOL, lane);
    let block = bench.alloc(lane);
    bench.order(lane, side);
    bench.fill(block, 1, side);
    bench.runtime.record_stream(block, side.raw).unwrap();
    bench.runtime.free(block, 0).unwrap();
    assert_ne!(bench.alloc(lane), block);
    bench.order(side, lane);
    bench.end(POOL, lane);
    bench.finish();
}

/// The driver's own pools make memory of a capture the graph's; there is nothing to open or close.
#[test]
fn with_the_drivers_pools_nothing_is_to_be_done() {
    let bench = Bench::with("backend:cudaMallocAsync");
    let lane = bench.lane();
    bench.begin(POOL, lane);
    let block = bench.alloc(lane);
    bench.fill(block, 3, lane);
    let exec = bench.end(POOL, lane);
    bench.sim.graph_launch(exec, lane.id).unwrap();
    assert_eq!(bench.holds(block), 3);
    bench.runtime.free(block, 0).unwrap();
    bench.runtime.release_pool(0, POOL).unwrap();
    assert!(matches!(bench.runtime.set_settings("max_split_size_mb:200"), Err(Error::FixedSettings)));
    bench.finish();
}
