//! Panics of user code in the caching allocator: `common/panics.rs` has the scenario.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use crate::common::memory::{FIRST, MIB, TestContext};
use crate::common::panics::{Bomb, Run, Subject, TickingDrop, every_call_panics_once};
use warpool::Result;
use warpool::driver::sim::SimDriver;
use warpool::driver::{DeviceId, DevicePtr, Memory as _, StreamId};
use warpool::memory::pools::{Checkpoints as _, PoolOptions, PrivatePools as _, Upstream};
use warpool::memory::raw::Request;
use warpool::memory::report::Action;
use warpool::memory::{Allocate as _, DeviceAllocator, DeviceBlock, MemPool, MemPoolId};

/// Ticks before each call and when it is dropped.
struct TickingUpstream {
    sim: Arc<SimDriver>,
    bomb: Arc<Bomb>,
    _drop: TickingDrop,
}

impl Upstream for TickingUpstream {
    fn allocate(&self, device: DeviceId, bytes: u64, _: StreamId) -> Result<Option<DevicePtr>> {
        self.bomb.tick();
        Ok(self.sim.mem_alloc(device, bytes).ok())
    }

    fn free(&self, ptr: DevicePtr, _: u64, _: DeviceId, _: StreamId) -> Result<()> {
        self.bomb.tick();
        Ok(self.sim.mem_free(ptr)?)
    }
}

fn caching_subject(settings: &str, upstream: bool, bomb: &Arc<Bomb>) -> Subject {
    let context = TestContext::with_capacity(200 * MIB, settings);
    let TestContext { sim, instance, allocator, main } = context;
    let (checked, more, pool_sim, pool_bomb) = (allocator.clone(), allocator.clone(), sim.clone(), bomb.clone());
    let pool_options = move || {
        let source = || -> Arc<dyn Upstream> {
            let (sim, bomb) = (pool_sim.clone(), pool_bomb.clone());
            Arc::new(TickingUpstream { sim, _drop: TickingDrop(bomb.clone()), bomb })
        };
        PoolOptions { upstream: upstream.then(source), ..PoolOptions::default() }
    };
    let more_steps = move |run: &Run<'_>| {
        let block = run.step("an allocation", || more.allocate(2 * MIB, &main).unwrap());
        if let Some(block) = block {
            let ptr = block.ptr();
            run.step("a name", || more.annotate(ptr, "weights").unwrap());
            assert_eq!(warpool::memory::report::user_metadata(), None, "the thread's metadata is restored");
            run.step("a free", || block.free().unwrap());
            let request = Request::new(FIRST, main.id(), MIB + 1);
            let exact = run.step("an exact allocation", || more.allocate_at(request, ptr));
            if let Some(Ok(exact)) = exact {
                run.step("a free", || more.free(exact).unwrap());
            }
        }
        assert_eq!(more.stats(FIRST).unwrap().allocation.all.current, 0);
        let pool = more.create_graph_pool(FIRST).unwrap();
        let block = run.step("an allocation", || {
            let any: Arc<dyn DeviceAllocator> = more.clone();
            DeviceBlock::allocate(&any, Request::new(FIRST, main.id(), MIB).in_pool(pool)).unwrap()
        });
        let checkpoint = run.step("a checkpoint", || more.checkpoint(FIRST, pool).unwrap());
        run.step("a drop", || drop(block));
        if let Some(checkpoint) = checkpoint
            && let Some(restored) = run.step("a restore", || more.restore(&checkpoint).unwrap())
        {
            for allocation in restored.allocated {
                run.step("a free", || more.free(allocation).unwrap());
            }
        }
        more.release_pool(FIRST, pool).unwrap();
        assert_eq!(more.stats(FIRST).unwrap().allocation.all.current, 0);
        if run.step("a capture begins", || more.capture_began(FIRST).unwrap()).is_some() {
            more.capture_ended(FIRST).unwrap();
        }
        assert!(more.capture_ended(FIRST).is_err(), "no capture is counted");
    };
    Subject {
        sim,
        instance,
        allocator,
        pool_options: Box::new(pool_options),
        more_steps: Box::new(more_steps),
        check: Box::new(move || checked.check()),
        capacity: 200 * MIB,
    }
}

#[test]
fn every_call_of_user_code_may_panic_once() {
    for (settings, upstream, least) in
        [("", true, 150), ("expandable_segments:True", false, 150), ("garbage_collection_threshold:0.2", true, 150)]
    {
        let calls = every_call_panics_once(move |bomb| caching_subject(settings, upstream, bomb));
        assert!(calls > least, "only {calls} calls of user code with {settings:?}");
    }
}

/// Fails instead of hanging.
fn within_a_minute(test: impl FnOnce() + Send + 'static) {
    let (done, finished) = mpsc::channel();
    let running = thread::spawn(move || {
        test();
        done.send(()).unwrap();
    });
    if finished.recv_timeout(Duration::from_secs(60)) == Err(mpsc::RecvTimeoutError::Timeout) {
        panic!("it hangs");
    }
    running.join().unwrap_or_else(|panic| resume_unwind(panic));
}

/// The behaviour of an upstream.
type Behaviour = Box<dyn Fn(u64) -> Result<Option<DevicePtr>> + Send + Sync>;

struct FnUpstream(Behaviour, Arc<SimDriver>);

impl Upstream for FnUpstream {
    fn allocate(&self, _: DeviceId, bytes: u64, _: StreamId) -> Result<Option<DevicePtr>> {
        (self.0)(bytes)
    }

    fn free(&self, ptr: DevicePtr, _: u64, _: DeviceId, _: StreamId) -> Result<()> {
        Ok(self.1.mem_free(ptr)?)
    }
}

fn upstream_pool(
    context: &TestContext,
    behaviour: impl Fn(u64) -> Result<Option<DevicePtr>> + Send + Sync + 'static,
) -> MemPool {
    let upstream = FnUpstream(Box::new(behaviour), context.sim.clone());
    let options = PoolOptions { upstream: Some(Arc::new(upstream)), ..PoolOptions::default() };
    MemPool::new(&context.any(), &context.device(), options).unwrap()
}

/// Issue 12: the second uncached request of the device waited for itself.
#[test]
fn after_a_panic_of_an_upstream_other_requests_go_on() {
    within_a_minute(|| {
        let context = TestContext::new("");
        let (sim, once) = (context.sim.clone(), AtomicBool::new(true));
        let pool = upstream_pool(&context, move |bytes| {
            if once.swap(false, Ordering::SeqCst) {
                resume_unwind(Box::new("on purpose"));
            }
            Ok(Some(sim.mem_alloc(FIRST, bytes)?))
        });
        let request = Request::new(FIRST, context.main.id(), 4 * MIB).in_pool(pool.id());
        let panicked = catch_unwind(AssertUnwindSafe(|| context.allocator.allocate_raw(request)));
        assert!(panicked.is_err());
        context.allocator.check();
        let (own, other) = (context.alloc_in(pool.id(), 4 * MIB), context.alloc(4 * MIB));
        context.free_all([own, other]);
        pool.close().unwrap();
        context.trim();
        assert_eq!(context.bytes_reserved(), 0);
        context.finish();
    });
}

/// An upstream may wait for another thread that needs memory from the driver, and may use the allocator itself. Its
/// requested bytes count against the limit meanwhile.
#[test]
fn an_upstream_is_called_without_a_lock() {
    within_a_minute(|| {
        let context = TestContext::new("memory_cap_mb:100");
        let (any, sim, stream) = (context.any(), context.sim.clone(), context.main.clone());
        let pool = upstream_pool(&context, move |bytes| {
            let (other, main) = (any.clone(), stream.clone());
            let helper = thread::spawn(move || {
                let within = other.allocate(20 * MIB, &main).unwrap();
                assert!(other.allocate(40 * MIB, &main).is_err(), "40 + 20 + 40 MiB and what is in flight");
                within.free().unwrap();
                other.trim(FIRST, MemPoolId::DEFAULT).unwrap();
            });
            helper.join().unwrap();
            drop(any.allocate(30 * MIB, &stream).unwrap());
            Ok(Some(sim.mem_alloc(FIRST, bytes)?))
        });
        let block = context.alloc_in(pool.id(), 50 * MIB);
        context.free(block);
        pool.close().unwrap();
        context.trim();
        assert_eq!(context.bytes_reserved(), 0);
        context.finish();
    });
}

/// All other trackers see every entry, including those of a batch in which one tracker panics.
#[test]
fn a_panic_of_one_tracker_hides_nothing_from_the_others() {
    let context = TestContext::new("");
    let seen = Arc::new(std::sync::Mutex::new(Vec::new()));
    let log = seen.clone();
    let observers = context.allocator.observers();
    let bad = observers.attach_tracker(&Action::ALL, Arc::new(|_, _| resume_unwind(Box::new("on purpose"))));
    let good = observers.attach_tracker(&Action::ALL, Arc::new(move |_, entry| log.lock().unwrap().push(entry.action)));
    let stream = context.main.clone();
    let outcome = catch_unwind(AssertUnwindSafe(|| context.allocator.allocate(MIB, &stream)));
    assert!(outcome.is_err() && context.bytes_allocated() == 0);
    assert!(observers.detach(bad));
    context.free(context.alloc(MIB));
    let undone = [Action::FreeRequested, Action::FreeCompleted];
    let expected = [&[Action::SegmentAlloc, Action::Alloc][..], &undone, &[Action::Alloc], &undone].concat();
    assert_eq!(*seen.lock().unwrap(), expected);
    observers.detach(good);
    context.finish();
}
