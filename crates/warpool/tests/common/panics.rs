//! Every call of user code in a long scenario panics once: trackers, hooks, observers, callbacks, upstreams, external
//! allocators, decorators, destructors, host callbacks. The panic reaches the caller; nothing is lost, and the
//! allocator works afterwards. A run that hangs fails.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use warpool::driver::sim::SimDriver;
use warpool::driver::{Copies as _, DeviceId, Pattern};
use warpool::memory::decorate::Traced;
use warpool::memory::pools::PoolOptions;
use warpool::memory::raw::Request;
use warpool::memory::report::{Action, Frame, HistoryOptions, SnapshotOptions, StackLevel};
use warpool::memory::{Allocate as _, DeviceAllocator, DeviceBlock, MemPool, MemPoolId};
use warpool::{Instance, Result, Stream};

const DEVICE: DeviceId = DeviceId(0);
const MIB: u64 = 1 << 20;
const ON_PURPOSE: &str = "on purpose";

/// Counts the calls of user code; one of them panics.
#[derive(Default)]
pub struct Bomb {
    calls: AtomicU64,
    nth: AtomicU64,
}

impl Bomb {
    /// Called by all user code.
    pub fn tick(&self) {
        if self.calls.fetch_add(1, Ordering::SeqCst) + 1 == self.nth.load(Ordering::SeqCst) {
            // As a panic, but without the message.
            resume_unwind(Box::new(ON_PURPOSE));
        }
    }

    fn has_fired(&self) -> bool {
        self.calls.load(Ordering::SeqCst) >= self.nth.load(Ordering::SeqCst)
    }
}

/// Ticks when it is dropped.
pub struct TickingDrop(pub Arc<Bomb>);

impl Drop for TickingDrop {
    fn drop(&mut self) {
        self.0.tick();
    }
}

/// The subject of a scenario: an allocator, and the steps and checks that depend on it.
pub struct Subject {
    pub sim: Arc<SimDriver>,
    pub instance: Instance,
    pub allocator: Arc<dyn DeviceAllocator>,
    /// Options for pools of the scenario.
    pub pool_options: Box<dyn Fn() -> PoolOptions>,
    /// Steps that only this allocator has.
    pub more_steps: Box<dyn Fn(&Run<'_>)>,
    /// Checks invariants.
    pub check: Box<dyn Fn()>,
    /// The memory of the device.
    pub capacity: u64,
}

/// One run of the scenario.
pub struct Run<'a> {
    pub subject: &'a Subject,
    bomb: &'a Bomb,
}

impl Run<'_> {
    /// A step; the result is `None` if user code panicked in it.
    pub fn step<R>(&self, about: &str, step: impl FnOnce() -> R) -> Option<R> {
        match catch_unwind(AssertUnwindSafe(step)) {
            Ok(result) => Some(result),
            Err(panic) if panic.downcast_ref() == Some(&ON_PURPOSE) => {
                assert!(self.bomb.has_fired(), "{about}");
                None
            }
            Err(panic) => {
                eprintln!("in step: {about}");
                resume_unwind(panic)
            }
        }
    }

    fn expect_live(&self, about: &str, blocks: u64) {
        (self.subject.check)();
        let live = self.subject.allocator.stats(DEVICE).unwrap().allocation.all.current;
        assert_eq!(live, blocks, "allocated blocks after: {about}");
    }
}

/// Runs the scenario once for every call of user code in it, and makes that call panic. Returns the number of calls.
pub fn every_call_panics_once(make: impl Fn(&Arc<Bomb>) -> Subject + Send + 'static) -> u64 {
    let (sender, receiver) = mpsc::channel();
    let runs = std::thread::spawn(move || {
        for nth in 1.. {
            sender.send(nth).unwrap();
            let bomb = Arc::new(Bomb::default());
            let subject = make(&bomb);
            bomb.calls.store(0, Ordering::SeqCst);
            bomb.nth.store(nth, Ordering::SeqCst);
            scenario(&subject, &bomb);
            if !bomb.has_fired() {
                return nth - 1;
            }
        }
        unreachable!("a scenario ends")
    });
    let mut last = 0;
    loop {
        match receiver.recv_timeout(Duration::from_secs(120)) {
            Ok(nth) => last = nth,
            Err(mpsc::RecvTimeoutError::Disconnected) => break,
            Err(mpsc::RecvTimeoutError::Timeout) => panic!("the run in which call {last} panics hangs"),
        }
    }
    runs.join().unwrap_or_else(|panic| {
        eprintln!("in the run in which call {last} panics");
        resume_unwind(panic)
    })
}

fn attach(allocator: &dyn DeviceAllocator, bomb: &Arc<Bomb>) {
    let observers = allocator.observers();
    let ticks = || Arc::clone(bomb);
    let (first, second, oom, pressure, trim, stack) = (ticks(), ticks(), ticks(), ticks(), ticks(), ticks());
    observers.attach_tracker(&Action::ALL, Arc::new(move |_, _| first.tick()));
    observers.attach_tracker(&[Action::Alloc, Action::SegmentFree], Arc::new(move |_, _| second.tick()));
    observers.attach_oom_observer(Arc::new(move |_| oom.tick()));
    observers.attach_pressure_callback(Arc::new(move |_| {
        pressure.tick();
        false
    }));
    observers.attach_trim_hook(Arc::new(move |_| trim.tick()));
    observers.set_stack_hook(Some(Arc::new(move || {
        stack.tick();
        Some([Frame { name: "f".into(), filename: "f.rs".into(), line: 1 }].into())
    })));
    let options = HistoryOptions { stacks: StackLevel::All, entries_max: 50, ..HistoryOptions::default() };
    allocator.record_history(Some(options)).unwrap();
}

fn scenario(subject: &Subject, bomb: &Arc<Bomb>) {
    let run = Run { subject, bomb };
    let inner = &subject.allocator;
    attach(&**inner, bomb);
    let log = Arc::clone(bomb);
    let traced: Arc<dyn DeviceAllocator> = Arc::new(Traced::new(inner, move |_, _| log.tick()));
    let device = subject.instance.device(0).unwrap();
    let [main, side] = [(); 2].map(|()| device.pool_stream().unwrap());
    for allocator in [inner, &traced] {
        let mut live: Vec<DeviceBlock> = Vec::new();
        for bytes in [1000, 3 * MIB, 30 * MIB, 1000] {
            live.extend(run.step("an allocation", || allocator.allocate(bytes, &main).unwrap()));
            run.expect_live("an allocation", live.len() as u64);
        }
        // Its panic is caught in the driver.
        let ticks = Arc::clone(bomb);
        run.step("a host callback", || main.host_callback(move || ticks.tick()).unwrap());
        for (round, block) in std::mem::take(&mut live).into_iter().enumerate() {
            run.step("a use", || use_block(subject, &block, &main, &side).unwrap());
            match round % 4 {
                0 => {
                    run.step("a free", || block.free().unwrap());
                }
                1 => {
                    run.step("a drop", || drop(block));
                }
                2 => {
                    let allocation = block.into_raw();
                    // A panic frees the block as well.
                    run.step("a raw free", || allocator.free_raw(allocation.ptr).unwrap());
                }
                _ => {
                    // Dropped by a panic.
                    let outcome = catch_unwind(AssertUnwindSafe(|| {
                        let _block = block;
                        resume_unwind(Box::new(ON_PURPOSE));
                    }));
                    assert!(outcome.is_err());
                }
            }
            (subject.check)();
        }
        run.expect_live("frees", 0);
        run.step("a wait", || side.synchronize().unwrap());
        // Pending frees are completed, and cached blocks found.
        for bytes in [1000, 3 * MIB] {
            let block = run.step("a cached allocation", || allocator.allocate(bytes, &main).unwrap());
            run.expect_live("a cached allocation", u64::from(block.is_some()));
            if let Some(block) = block {
                run.step("a free", || block.free().unwrap());
            }
            run.expect_live("a free", 0);
        }
        let request = Request::new(DEVICE, main.id(), subject.capacity + MIB);
        let outcome = run.step("an allocation that fails", || allocator.allocate_raw(request).is_err());
        assert_ne!(outcome, Some(false), "there is not so much memory");
        run.expect_live("an allocation that fails", 0);
        run.step("a snapshot", || allocator.snapshot(SnapshotOptions::default()).unwrap());
        run.step("a trim", || allocator.trim(DEVICE, MemPoolId::DEFAULT).unwrap());
        (subject.check)();
        pools(&run, allocator, &main, &side);
    }
    (subject.more_steps)(&run);
    // Everything works, and nothing is lost.
    run.step("the last allocation", || drop(inner.allocate(3 * MIB, &main).unwrap()));
    run.step("a wait", || device.synchronize().unwrap());
    for _ in 0..3 {
        run.step("the last trim", || inner.trim(DEVICE, MemPoolId::DEFAULT).unwrap());
    }
    (subject.check)();
    let stats = inner.stats(DEVICE).unwrap();
    let left = (stats.allocation.all.current, stats.active.all.current, stats.reserved_bytes.all.current);
    assert_eq!(left, (0, 0, 0), "allocated, active, reserved");
    assert_eq!(subject.sim.object_counts().allocations, 0, "memory of the driver");
    assert_eq!(subject.sim.hazards(), [], "hazards");
}

fn use_block(subject: &Subject, block: &DeviceBlock, main: &Stream, side: &Stream) -> Result<()> {
    block.record_use(side)?;
    side.wait_stream(main)?;
    Ok(subject.sim.fill(block.ptr(), Pattern::U8(1), 64, side.id())?)
}

/// Pools, scopes, and an upstream, if the subject has one.
fn pools(run: &Run<'_>, allocator: &Arc<dyn DeviceAllocator>, main: &Stream, side: &Stream) {
    let subject = run.subject;
    let device = subject.instance.device(0).unwrap();
    if allocator.pools().is_err() {
        return;
    }
    let options = (subject.pool_options)();
    let Some(pool) = run.step("a pool", || MemPool::new(allocator, &device, options).unwrap()) else { return };
    let id = pool.id();
    let mut live: Vec<DeviceBlock> = Vec::new();
    for bytes in [1000, 3 * MIB, 12 * MIB] {
        live.extend(run.step("an allocation from a pool", || allocator.allocate_in(&pool, bytes, main).unwrap()));
        run.expect_live("an allocation from a pool", live.len() as u64);
    }
    {
        let scope = run.step("a scope", || pool.enter().unwrap());
        live.extend(run.step("a routed allocation", || allocator.allocate(2000, main).unwrap()));
        run.step("the end of a scope", || drop(scope));
    }
    assert_eq!(pool.uses(), Ok(1), "no scope is open");
    run.expect_live("a scope", live.len() as u64);
    if let Some(block) = live.last() {
        run.step("a use", || use_block(subject, block, main, side).unwrap());
    }
    let too_much = Request::new(DEVICE, main.id(), subject.capacity + MIB).in_pool(id);
    run.step("a failing allocation from a pool", || allocator.allocate_raw(too_much).unwrap_err());
    for block in live {
        run.step("a free", || block.free().unwrap());
    }
    run.expect_live("frees of a pool", 0);
    run.step("closing a pool", || pool.close().unwrap());
    for _ in 0..2 {
        run.step("a trim of a pool", || allocator.trim(DEVICE, id).unwrap());
        run.step("a trim", || allocator.trim(DEVICE, MemPoolId::DEFAULT).unwrap());
    }
    (subject.check)();
    let uses = allocator.pools().unwrap().pool_uses(DEVICE, id);
    assert!(uses.is_err(), "a closed pool without memory is removed: {uses:?}");
}
