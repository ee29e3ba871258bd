//! Pools of library handles: which handle a thread gets, which calls are made, and what happens when threads, pools and
//! instances end.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, mpsc};
use std::thread;

use crate::common::machine;
use warpool::driver::decorate::{Counting, FaultPlan, Faulty};
use warpool::driver::sim::{LibraryCall, SimConfig, SimDriver};
use warpool::driver::{Call, CaptureMode, Captures as _, DriverError, ErrorCode, Graphs as _, HandleId, Library};
use warpool::handle::{
    Cublas, CublasLt, Cudnn, Cusolver, Cusparse, HandlePool, LibraryHandle, LibraryKind, ThreadHandle,
};
use warpool::{Device, Error, Instance, Result};

/// A library that counts its handles.
#[derive(Clone, Default)]
struct CountedLibrary(Arc<Counters>);

#[derive(Default)]
struct Counters {
    made: AtomicUsize,
    unmade: AtomicUsize,
    dropped: AtomicUsize,
    fails: AtomicBool,
    panics: AtomicBool,
}

struct CountedHandle {
    number: usize,
    note: Cell<u32>,
    library: CountedLibrary,
}

impl Drop for CountedHandle {
    fn drop(&mut self) {
        self.library.0.dropped.fetch_add(1, Ordering::SeqCst);
    }
}

impl CountedLibrary {
    /// How many handles were created, destroyed, and dropped.
    fn counts(&self) -> [usize; 3] {
        [&self.0.made, &self.0.unmade, &self.0.dropped].map(|counter| counter.load(Ordering::SeqCst))
    }
}

impl LibraryKind for CountedLibrary {
    type Handle = CountedHandle;

    fn name(&self) -> &'static str {
        "toy"
    }

    fn create(&self, _: &Device) -> Result<CountedHandle> {
        assert!(!self.0.panics.load(Ordering::SeqCst), "a bug in the library");
        if self.0.fails.load(Ordering::SeqCst) {
            return Err(DriverError::new("toy_create", ErrorCode::OutOfMemory).into());
        }
        let number = self.0.made.fetch_add(1, Ordering::SeqCst);
        Ok(CountedHandle { number, note: Cell::new(0), library: self.clone() })
    }

    fn destroy(&self, _: &Device, _: &CountedHandle) -> Result<()> {
        self.0.unmade.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }
}

/// A pool of them.
fn counted_pool(devices: u32) -> (CountedLibrary, HandlePool<CountedLibrary>, Vec<Device>) {
    let instance = machine(devices).1;
    let toy = CountedLibrary::default();
    (toy.clone(), HandlePool::new(&instance, toy), instance.devices().collect())
}

/// Runs `body` on a new thread, and waits until its thread-local variables are destroyed.
fn on_a_thread<T: Send>(body: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| scope.spawn(body).join()).expect("a thread that ends well")
}

#[test]
fn each_thread_has_its_own_handle_per_device() {
    let (toy, pool, devices) = counted_pool(2);
    let fetch = || devices.iter().map(|device| pool.current(device).unwrap().number).collect::<Vec<_>>();
    let ours = fetch();
    assert_eq!(fetch(), ours);
    assert_ne!(ours[0], ours[1]);
    // While this thread owns its handle, another thread gets another one.
    let theirs = on_a_thread(fetch);
    assert!(theirs.iter().all(|number| !ours.contains(number)));
    assert_eq!(fetch(), ours);
    assert_eq!(toy.counts(), [4, 0, 0]);
    for device in &devices {
        assert_eq!((pool.alive(device), pool.idle(device)), (2, 1));
    }
}

#[test]
fn the_next_thread_reuses_a_handle_as_it_was_left() {
    let (toy, pool, devices) = counted_pool(1);
    on_a_thread(|| pool.current(&devices[0]).unwrap().note.set(7));
    assert_eq!((pool.alive(&devices[0]), pool.idle(&devices[0])), (1, 1));
    assert_eq!(on_a_thread(|| pool.current(&devices[0]).unwrap().note.get()), 7);
    assert_eq!(pool.current(&devices[0]).unwrap().note.get(), 7);
    assert_eq!(toy.counts(), [1, 0, 0]);
}

#[test]
fn the_last_returned_handle_is_reused_first() {
    let (_, pool, devices) = counted_pool(1);
    let device = &devices[0];
    let leases: Vec<_> = (0..3).map(|_| pool.lease(device).unwrap()).collect();
    let [a, b, c] = [0, 1, 2].map(|i| leases[i].number);
    drop(leases); // in order: c is returned last
    assert_eq!(on_a_thread(|| pool.current(device).unwrap().number), c);
    let _c = pool.lease(device).unwrap();
    let second = pool.lease(device).unwrap();
    assert_eq!(second.number, b);
    assert_eq!(pool.current(device).unwrap().number, a);
}

#[test]
fn there_are_as_many_handles_as_concurrent_threads() {
    const THREADS: usize = 10_000;
    const AT_ONCE: usize = 64;
    let (sim, instance) = machine(2);
    let pool = HandlePool::new(&instance, Cublas);
    let devices: Vec<Device> = instance.devices().collect();
    let all_here = Arc::new(Barrier::new(AT_ONCE));
    let mut running = VecDeque::new();
    for number in 0..THREADS {
        if running.len() == AT_ONCE {
            running.pop_front().map(thread::JoinHandle::join).unwrap().unwrap();
        }
        let (pool, device, all_here) = (pool.clone(), devices[number % 2].clone(), Arc::clone(&all_here));
        let other = devices[(number + 1) % 2].clone();
        running.push_back(thread::spawn(move || {
            let mine = pool.current(&device).unwrap();
            if number < AT_ONCE {
                // The first threads wait until all of them have a handle, so that the maximum is reached.
                pool.current(&other).unwrap();
                all_here.wait();
            }
            thread::yield_now();
            assert_eq!(pool.current(&device).unwrap().id(), mine.id());
            assert!(pool.alive(&device) <= AT_ONCE);
        }));
    }
    running.into_iter().for_each(|thread| thread.join().unwrap());
    for device in &devices {
        assert_eq!((pool.alive(device), pool.idle(device)), (AT_ONCE, AT_ONCE));
    }
    assert_eq!(sim.object_counts().handles, 2 * AT_ONCE);
    pool.close().unwrap();
    assert_eq!(sim.object_counts().handles, 0);
}

#[test]
fn no_two_threads_share_a_handle() {
    let (toy, pool, devices) = counted_pool(1);
    let taken: Vec<AtomicBool> = (0..16).map(|_| AtomicBool::new(false)).collect();
    let alone = |number: usize| {
        assert!(!taken[number].swap(true, Ordering::SeqCst), "two threads have handle {number}");
        thread::yield_now();
        taken[number].store(false, Ordering::SeqCst);
    };
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for round in 0..500 {
                    alone(pool.lease(&devices[0]).unwrap().number);
                    if round % 10 == 0 {
                        on_a_thread(|| alone(pool.current(&devices[0]).unwrap().number));
                    }
                }
            });
        }
    });
    assert!(toy.counts()[0] <= 16);
}

#[test]
fn a_repeated_fetch_makes_no_call() {
    let counting = Arc::new(Counting::new(Arc::new(SimDriver::new(SimConfig::default()))));
    let instance = Instance::new(counting.clone()).unwrap();
    let device = instance.device(0).unwrap();
    let stream = device.pool_stream().unwrap();
    let pool = HandlePool::new(&instance, Cusparse);
    pool.current(&device).unwrap().set_stream(&stream).unwrap();
    counting.reset();
    for _ in 0..100 {
        let handle = pool.current(&device).unwrap();
        handle.set_stream(&stream).unwrap();
        let _ = handle.raw();
    }
    drop(pool.lease(&device).unwrap());
    counting.reset();
    for _ in 0..100 {
        pool.lease(&device).unwrap();
    }
    assert_eq!(counting.counts(), []);
    // The next thread finds the stream still set.
    let lease = pool.lease(&device).unwrap();
    lease.set_stream(&stream).unwrap();
    drop(lease);
    counting.reset();
    on_a_thread(|| pool.current(&device).unwrap().set_stream(&stream).unwrap());
    assert_eq!(counting.counts(), []);
}

/// A library whose `create` waits for the test.
struct Slow {
    begun: mpsc::SyncSender<()>,
    go_on: std::sync::Mutex<mpsc::Receiver<()>>,
    library: CountedLibrary,
}

impl LibraryKind for Slow {
    type Handle = CountedHandle;

    fn name(&self) -> &'static str {
        "slow"
    }

    fn create(&self, device: &Device) -> Result<CountedHandle> {
        self.begun.send(()).unwrap();
        self.go_on.lock().unwrap().recv().unwrap();
        self.library.create(device)
    }

    fn destroy(&self, device: &Device, handle: &CountedHandle) -> Result<()> {
        self.library.destroy(device, handle)
    }
}

fn slow() -> (CountedLibrary, HandlePool<Slow>, Device, mpsc::Receiver<()>, mpsc::SyncSender<()>) {
    let (begun, has_begun) = mpsc::sync_channel(16);
    let (say_go, go_on) = mpsc::sync_channel(16);
    let library = CountedLibrary::default();
    let device = crate::common::device();
    let kind = Slow { begun, go_on: go_on.into(), library: library.clone() };
    (library, HandlePool::new(device.instance(), kind), device, has_begun, say_go)
}

#[test]
fn no_lock_is_held_while_a_handle_is_created() {
    let (_, pool, device, has_begun, say_go) = slow();
    say_go.send(()).unwrap();
    let ours = pool.current(&device).unwrap().number;
    has_begun.recv().unwrap();
    thread::scope(|scope| {
        let other = scope.spawn(|| pool.current(&device).unwrap().number);
        has_begun.recv().unwrap();
        // The other thread's handle is being created: each of these calls would wait if a lock were held.
        assert_eq!(pool.current(&device).unwrap().number, ours);
        assert_eq!((pool.alive(&device), pool.idle(&device), pool.trim(&device)), (1, 0, Ok(0)));
        say_go.send(()).unwrap();
        assert_ne!(other.join().unwrap(), ours);
    });
    assert_eq!((pool.alive(&device), pool.idle(&device)), (2, 1));
}

#[test]
fn a_handle_created_while_the_pool_closes_is_destroyed() {
    let (library, pool, device, has_begun, say_go) = slow();
    thread::scope(|scope| {
        let other = scope.spawn(|| pool.current(&device).err());
        has_begun.recv().unwrap();
        pool.clone().close().unwrap();
        say_go.send(()).unwrap();
        assert_eq!(other.join().unwrap(), Some(Error::HandlePoolClosed { library: "slow" }));
    });
    assert_eq!((library.counts(), pool.alive(&device)), ([1, 1, 1], 0));
}

#[test]
fn leases_move_between_threads() {
    let (toy, pool, devices) = counted_pool(1);
    let device = &devices[0];
    let lease = pool.lease(device).unwrap();
    let number = lease.number;
    let lease = on_a_thread(|| {
        lease.note.set(1);
        assert_ne!(pool.current(device).unwrap().number, number);
        lease
    });
    assert_eq!((pool.alive(device), pool.idle(device)), (2, 1));
    on_a_thread(|| {
        assert_eq!(lease.note.get(), 1);
        drop(lease);
    });
    assert_eq!((pool.alive(device), pool.idle(device)), (2, 2));
    assert_eq!((pool.current(device).unwrap().number, toy.counts()), (number, [2, 0, 0]));
}

#[test]
fn a_lease_keeps_its_pool_alive() {
    let (toy, pool, devices) = counted_pool(1);
    let lease = pool.lease(&devices[0]).unwrap();
    drop(pool);
    assert_eq!(toy.counts(), [1, 0, 0]);
    drop(lease);
    // The pool was dropped with it: nothing was destroyed.
    assert_eq!(toy.counts(), [1, 0, 1]);
}

#[test]
fn a_closed_pool_returns_no_handle_and_leaks_returned_ones() {
    let (toy, pool, devices) = counted_pool(2);
    let device = &devices[0];
    let closed = Some(Error::HandlePoolClosed { library: "toy" });
    thread::scope(|scope| {
        let (say_go, go_on) = mpsc::channel();
        let (begun, has_begun) = mpsc::channel();
        let (pool, closed) = (&pool, &closed);
        let other = scope.spawn(move || {
            let mine = pool.current(device).unwrap();
            begun.send(()).unwrap();
            go_on.recv().unwrap();
            // Its handle still works; a fetch is an error.
            mine.note.set(1);
            assert_eq!(pool.current(device).err(), *closed);
        });
        has_begun.recv().unwrap();
        let lease = pool.lease(&devices[1]).unwrap();
        drop(pool.lease(&devices[1]).unwrap());
        let ours = pool.current(device).unwrap();
        pool.clone().close().unwrap();
        // Of the four, this thread's, the lease and the other thread's are in use.
        assert_eq!((toy.counts(), pool.alive(device), pool.alive(&devices[1])), ([4, 1, 1], 2, 1));
        assert_eq!((ours.note.get(), lease.note.get()), (0, 0));
        assert_eq!(pool.lease(device).err(), *closed);
        assert_eq!(pool.current(device).err(), *closed);
        assert_eq!((pool.trim(device), pool.clone().close()), (Ok(0), Ok(())));
        drop((ours, lease));
        say_go.send(()).unwrap();
        other.join().unwrap();
    });
    assert_eq!((toy.counts(), pool.alive(device), pool.alive(&devices[1])), ([4, 1, 4], 0, 0));
}

#[test]
fn close_destroys_the_calling_threads_handle() {
    let (toy, pool, devices) = counted_pool(2);
    devices.iter().for_each(|device| drop(pool.current(device).unwrap()));
    pool.close().unwrap();
    assert_eq!(toy.counts(), [2, 2, 2]);
}

#[test]
fn an_instance_can_be_closed_while_threads_have_handles_of_closed_pools() {
    let (sim, instance) = machine(1);
    let pool = HandlePool::new(&instance, Cublas);
    thread::scope(|scope| {
        let (say_go, go_on) = mpsc::channel::<()>();
        let (begun, has_begun) = mpsc::channel();
        let (device, of_thread) = (instance.device(0).unwrap(), pool.clone());
        scope.spawn(move || {
            of_thread.current(&device).unwrap();
            drop((of_thread, device));
            begun.send(()).unwrap();
            // An idle worker with a handle.
            let _ = go_on.recv();
        });
        has_begun.recv().unwrap();
        pool.current(&instance.device(0).unwrap()).unwrap();
        pool.close().unwrap();
        instance.close().expect("it is the last handle");
        assert_eq!(sim.object_counts().handles, 1, "the worker's, which is leaked");
        drop(say_go);
    });
    assert_eq!(sim.object_counts().handles, 1);
}

#[test]
fn dropping_a_pool_destroys_nothing() {
    let (toy, pool, devices) = counted_pool(1);
    pool.current(&devices[0]).unwrap();
    drop(pool.lease(&devices[0]).unwrap());
    on_a_thread(move || {
        pool.current(&devices[0]).unwrap();
        drop(pool);
        // The idle handle is dropped, this thread's is not.
        assert_eq!(toy.counts(), [2, 0, 0]);
    });
}

#[test]
fn instances_have_their_own_handles() {
    let (first, second) = (machine(1).1.device(0).unwrap(), machine(1).1.device(0).unwrap());
    let pools = [&first, &second].map(|device| HandlePool::new(device.instance(), CountedLibrary::default()));
    pools[0].current(&first).unwrap().note.set(1);
    pools[1].current(&second).unwrap().note.set(2);
    assert_eq!(pools[0].current(&first).unwrap().note.get(), 1);
    assert_eq!(pools[1].current(&second).unwrap().note.get(), 2);
    assert_eq!(pools[0].current(&second).err(), Some(Error::ForeignInstance { object: "the device" }));
}

#[test]
fn a_failed_creation_is_not_counted() {
    let (toy, pool, devices) = counted_pool(1);
    let device = &devices[0];
    toy.0.fails.store(true, Ordering::SeqCst);
    assert!(pool.current(device).err().unwrap().driver().unwrap().is_out_of_memory());
    assert!(pool.lease(device).is_err());
    toy.0.fails.store(false, Ordering::SeqCst);

    toy.0.panics.store(true, Ordering::SeqCst);
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| pool.current(device).is_ok()));
    assert!(panicked.is_err());
    toy.0.panics.store(false, Ordering::SeqCst);

    assert_eq!((pool.alive(device), pool.idle(device)), (0, 0));
    pool.current(device).unwrap();
    assert_eq!((pool.alive(device), pool.idle(device)), (1, 0));
    pool.close().unwrap();
    assert_eq!(toy.counts(), [1, 1, 1]);
}

thread_local! {
    /// The pool that `Nested` uses.
    static POOL: RefCell<Option<HandlePool<Nested>>> = const { RefCell::new(None) };
}

/// A library that fetches a handle of the same pool while it creates the first one.
struct Nested(CountedLibrary);

impl LibraryKind for Nested {
    type Handle = CountedHandle;

    fn name(&self) -> &'static str {
        "nested"
    }

    fn create(&self, device: &Device) -> Result<CountedHandle> {
        let handle = self.0.create(device)?;
        if handle.number == 0 {
            let pool = POOL.with_borrow(Option::clone).expect("set before the first use");
            assert_eq!(pool.current(device)?.number, 1);
        }
        Ok(handle)
    }

    fn destroy(&self, device: &Device, handle: &CountedHandle) -> Result<()> {
        self.0.destroy(device, handle)
    }
}

#[test]
fn a_library_can_use_the_pool_while_it_creates_a_handle() {
    let device = crate::common::device();
    let pool = HandlePool::new(device.instance(), Nested(CountedLibrary::default()));
    POOL.set(Some(pool.clone()));
    // The inner fetch was first; there is one handle per thread.
    assert_eq!(pool.current(&device).unwrap().number, 1);
    assert_eq!(pool.current(&device).unwrap().number, 1);
    assert_eq!((pool.alive(&device), pool.idle(&device)), (2, 1));
    assert_eq!(pool.lease(&device).unwrap().number, 0);
    POOL.take();
}

thread_local! {
    /// Registered before Warpool's own list, hence destroyed after it.
    static EARLY: RefCell<Vec<Later>> = const { RefCell::new(Vec::new()) };
    /// Registered after it, hence destroyed before.
    static LATE: RefCell<Vec<Later>> = const { RefCell::new(Vec::new()) };
}

/// What a thread-local destructor does at the end of a thread.
enum Later {
    Keep { _handle: ThreadHandle<CountedHandle> },
    Fetch(HandlePool<CountedLibrary>, Device, mpsc::Sender<Result<usize>>),
}

impl Drop for Later {
    fn drop(&mut self) {
        if let Self::Fetch(pool, device, answers) = self {
            let _ = answers.send(pool.current(device).map(|handle| handle.number));
        }
    }
}

#[test]
fn a_handle_in_another_thread_local_variable_is_returned_too() {
    for variable in [&EARLY, &LATE] {
        let (toy, pool, devices) = counted_pool(1);
        on_a_thread(|| {
            EARLY.with_borrow_mut(Vec::clear);
            let handle = pool.current(&devices[0]).unwrap();
            variable.with_borrow_mut(|objects| objects.push(Later::Keep { _handle: handle }));
        });
        assert_eq!((pool.alive(&devices[0]), pool.idle(&devices[0]), toy.counts()), (1, 1, [1, 0, 0]));
    }
}

#[test]
fn an_ending_thread_can_fetch_its_handle_until_its_list_is_destroyed() {
    let ending = Err(Error::ThreadEnding);
    for (variable, first_use, expected) in
        [(&LATE, true, Ok(0)), (&EARLY, true, ending), (&LATE, false, Ok(0)), (&EARLY, false, Ok(0))]
    {
        let (toy, pool, devices) = counted_pool(1);
        let (answers, answer) = mpsc::channel();
        on_a_thread(|| {
            EARLY.with_borrow_mut(Vec::clear);
            if first_use {
                pool.current(&devices[0]).unwrap();
            }
            let later = Later::Fetch(pool.clone(), devices[0].clone(), answers);
            variable.with_borrow_mut(|objects| objects.push(later));
        });
        assert_eq!(answer.recv().unwrap(), expected);
        assert_eq!((pool.idle(&devices[0]), toy.counts()), (1, [1, 0, 0]));
    }
}

#[test]
fn every_library_has_handles() {
    let (sim, instance) = machine(1);
    let device = instance.device(0).unwrap();
    fn made<K: LibraryKind<Handle = LibraryHandle>>(instance: &Instance, kind: K) -> HandleId {
        HandlePool::new(instance, kind).lease(&instance.device(0).unwrap()).unwrap().id()
    }
    let handles = [
        made(&instance, Cublas),
        made(&instance, CublasLt),
        made(&instance, Cudnn),
        made(&instance, Cusparse),
        made(&instance, Cusolver),
    ];
    for (handle, library) in handles.into_iter().zip(Library::ALL) {
        assert_eq!(sim.library_calls(handle), [LibraryCall::Created { library, device: device.id() }]);
    }
}

#[test]
fn an_absent_library_is_an_error_with_its_name() {
    let sim = SimDriver::new(SimConfig::default().without_library(Library::Dnn));
    let instance = Instance::new(Arc::new(sim)).unwrap();
    let device = instance.device(0).unwrap();
    let pool = HandlePool::new(&instance, Cudnn);
    for error in [pool.current(&device).err().unwrap(), pool.lease(&device).err().unwrap()] {
        assert_eq!(error.driver().unwrap().code, ErrorCode::SharedObjectInitFailed);
        assert!(error.to_string().contains("cuDNN"), "{error}");
    }
    assert_eq!(pool.alive(&device), 0);
    HandlePool::new(&instance, Cusolver).current(&device).unwrap();
}

#[test]
fn a_stream_is_set_when_it_changes_and_after_a_failure() {
    let sim = Arc::new(SimDriver::new(SimConfig::default().with_devices(2)));
    let plan = FaultPlan::new().fail_nth(Call::LibrarySetStream, 3, ErrorCode::UnknownError);
    let instance = Instance::new(Arc::new(Faulty::new(sim.clone(), plan))).unwrap();
    let device = instance.device(0).unwrap();
    let [a, b] = [(); 2].map(|()| device.pool_stream().unwrap());
    let pool = HandlePool::new(&instance, Cusolver);
    let handle = pool.current(&device).unwrap();
    for stream in [&a, &a, &b, &b] {
        handle.set_stream(stream).unwrap();
    }
    // The third call fails: the handle's stream is unknown.
    assert_eq!(handle.set_stream(&a).unwrap_err().driver().unwrap().code, ErrorCode::UnknownError);
    handle.set_stream(&b).unwrap();
    handle.set_stream(&b).unwrap();
    let set: Vec<LibraryCall> = [&a, &b, &b].map(|stream| LibraryCall::SetStream(stream.id())).into();
    assert_eq!(sim.library_calls(handle.id())[1..], set);

    let elsewhere = instance.device(1).unwrap().pool_stream().unwrap();
    let (handle_on, owner) = (device.id(), elsewhere.device_id());
    let error = Err(Error::HandleDevice { handle: handle_on, stream: elsewhere.id(), owner });
    assert_eq!(handle.set_stream(&elsewhere), error);
    let foreign = crate::common::device().pool_stream().unwrap();
    assert_eq!(handle.set_stream(&foreign), Err(Error::ForeignInstance { object: "the stream" }));
    assert_eq!(sim.library_calls(handle.id()).len(), 4);
}

#[test]
fn each_failed_call_is_returned_and_leaks_nothing() {
    let scenario = |instance: &Instance| -> Result<()> {
        let [zero, one] = [instance.device(0)?, instance.device(1)?];
        let pool = HandlePool::new(instance, Cublas);
        let outcome = (|| {
            pool.current(&zero)?.set_stream(&zero.default_stream()?)?;
            let lease = pool.lease(&zero)?;
            drop(pool.lease(&one)?);
            lease.set_stream(&zero.default_stream()?)
        })();
        let held = usize::from(pool.alive(&zero) > pool.idle(&zero));
        assert!(pool.alive(&zero) <= 2 && pool.alive(&one) <= 1 && held <= 1);
        outcome.and(pool.close())
    };
    for nth in 1.. {
        let sim = Arc::new(SimDriver::new(SimConfig::default().with_devices(2)));
        let plan = FaultPlan::new().fail_nth_of_all(nth, ErrorCode::OutOfMemory).excluding(FaultPlan::CLEANUP);
        let faulty = Arc::new(Faulty::new(sim.clone(), plan));
        let outcome = Instance::new(faulty.clone()).and_then(|instance| {
            let outcome = scenario(&instance);
            faulty.clear_plan();
            scenario(&instance).expect("after a fault everything works");
            instance.close().expect("it is the last handle");
            outcome
        });
        assert_eq!(sim.object_counts().handles, 0, "a handle leaked after call {nth} failed");
        if faulty.injected().is_empty() {
            outcome.expect("nothing was made to fail");
            assert!(nth > 12, "the scenario made only {nth} calls");
            break;
        }
        let error = outcome.expect_err("a failed call must be reported");
        assert_eq!(error.driver().unwrap().code, ErrorCode::OutOfMemory);
    }
}

#[test]
fn a_failed_destroy_keeps_that_handle_only() {
    let sim = Arc::new(SimDriver::new(SimConfig::default().with_devices(2)));
    let destroy = Call::LibraryDestroy;
    let plan = FaultPlan::new().fail_nth(destroy, 2, ErrorCode::UnknownError);
    let plan = plan.fail_nth(destroy, 4, ErrorCode::LaunchFailed);
    let instance = Instance::new(Arc::new(Faulty::new(sim.clone(), plan))).unwrap();
    let devices: Vec<Device> = instance.devices().collect();
    let pool = HandlePool::new(&instance, Cublas);
    let leases = |n| drop((0..n).map(|_| pool.lease(&devices[0]).unwrap()).collect::<Vec<_>>());
    leases(3);
    assert_eq!(pool.trim(&devices[0]).unwrap_err().driver().unwrap().code, ErrorCode::UnknownError);
    assert_eq!((pool.alive(&devices[0]), pool.idle(&devices[0]), sim.object_counts().handles), (1, 1, 1));
    // It still works.
    leases(1);
    assert_eq!((pool.alive(&devices[0]), sim.object_counts().handles), (1, 1));
    leases(2);
    pool.current(&devices[1]).unwrap();
    let again = pool.clone();
    assert_eq!(pool.close().unwrap_err().driver().unwrap().code, ErrorCode::LaunchFailed);
    assert_eq!(sim.object_counts().handles, 1);
    again.close().unwrap();
    assert_eq!(sim.object_counts().handles, 0);
}

/// Destroying a handle would invalidate the capture, so it is an error of the driver.
#[test]
fn trim_and_close_keep_handles_while_a_stream_captures() {
    let (sim, instance) = machine(1);
    let device = instance.device(0).unwrap();
    let stream = device.pool_stream().unwrap();
    let pool = HandlePool::new(&instance, Cublas);
    drop(pool.lease(&device).unwrap());
    sim.capture_begin(stream.id(), CaptureMode::Global).unwrap();
    let is_capture_error =
        |error: Error| error.driver().map(|error| error.code) == Some(ErrorCode::StreamCaptureUnsupported);
    assert!(is_capture_error(pool.trim(&device).unwrap_err()));
    assert_eq!((pool.alive(&device), pool.idle(&device)), (1, 1));
    let again = pool.clone();
    assert!(is_capture_error(pool.close().unwrap_err()));
    sim.graph_destroy(sim.capture_end(stream.id()).expect("the capture is valid")).unwrap();
    again.close().unwrap();
    assert_eq!((sim.object_counts().handles, sim.hazards()), (0, vec![]));
}
