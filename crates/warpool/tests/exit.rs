//! No driver call while a process exits: this program runs itself with objects of every kind in static and thread-local
//! variables, and its driver prints each call that is made after `main` is about to return.
//!
//! It has its own `main`, since the thread-local variables of the main thread are the ones that are dropped during
//! exit.

use std::any::Any;
use std::cell::RefCell;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, mpsc};
use std::thread;

use warpool::blas::{Blas, BlasSettings, forbid_tf32};
use warpool::driver::decorate::{Arguments, Hook, Hooked, Outcome};
use warpool::driver::sim::{SimConfig, SimDriver};
use warpool::driver::{Call, Driver, Result};
use warpool::handle::{Cublas, Cudnn, HandlePool};
use warpool::memory::pools::PoolOptions;
use warpool::memory::raw::Request;
use warpool::memory::{
    Allocate, CachingAllocator, DeviceAllocator, DriverPoolAllocator, HostAllocator, MemPool, PagedAllocator,
    PinnedSettings, Settings,
};
use warpool::{EventOptions, Instance};

const ROLE: &str = "WARPOOL_EXIT_TEST_ROLE";

fn main() {
    match std::env::var(ROLE).as_deref() {
        Ok("quiet") => fill_variables(false),
        Ok("loud") => fill_variables(true),
        _ => {
            let quiet = run("quiet");
            assert!(quiet.status.success(), "exit went wrong: {quiet:?}");
            assert_eq!(String::from_utf8_lossy(&quiet.stderr), "", "a destructor called the driver");
            // The same with one destructor that does call: the test can fail.
            assert_eq!(String::from_utf8_lossy(&run("loud").stderr), "call during exit: device_count\n");
            println!("exit: no driver call while the process exits ... ok");
        }
    }
}

fn run(role: &str) -> Output {
    let program = std::env::current_exe().expect("the path of this program");
    Command::new(program).env(ROLE, role).output().expect("this program can be started")
}

static EXITING: AtomicBool = AtomicBool::new(false);
static INSTANCE: OnceLock<Instance> = OnceLock::new();
static STATIC_OBJECTS: Mutex<Vec<Box<dyn Any + Send>>> = Mutex::new(Vec::new());

thread_local! {
    /// Registered before Warpool's own variables, hence destroyed after them.
    static EARLY: RefCell<Vec<Box<dyn Any>>> = const { RefCell::new(Vec::new()) };
    /// Registered after them, hence destroyed before them.
    static LATE: RefCell<Vec<Box<dyn Any>>> = const { RefCell::new(Vec::new()) };
}

/// Prints every call during exit.
struct Watch;

impl Hook for Watch {
    type CallState = ();

    fn before(&self, _: &dyn Driver, call: Call, _: Arguments<'_>) -> Result<()> {
        if EXITING.load(Ordering::SeqCst) {
            eprintln!("call during exit: {call}");
        }
        Ok(())
    }

    fn after(&self, _: &dyn Driver, _: Call, (): (), _: Outcome<'_>) {}

    fn suballocation(&self, _: Call, _: Arguments<'_>) {}
}

fn watched_instance() -> Instance {
    let sim = Arc::new(SimDriver::new(SimConfig::default().with_devices(2)));
    Instance::new(Arc::new(Hooked::with_hook(sim, Watch))).expect("a simulated device")
}

/// When dropped, reads and sets the current device and stream and fetches the thread's handle, which must neither panic
/// nor call the driver.
struct UsesOnDrop(Instance, HandlePool<Cublas>);

impl Drop for UsesOnDrop {
    fn drop(&mut self) {
        let device = self.0.device(1).expect("the second device");
        let _guard = device.enter();
        let _ = self.0.current_device();
        device.make_current();
        let _ = self.1.current(&device);
    }
}

/// Calls the driver when it is dropped.
struct CallsOnDrop(Instance);

impl Drop for CallsOnDrop {
    fn drop(&mut self) {
        let _ = self.0.driver().device_count();
    }
}

/// One object of every kind that can be sent.
fn sendable_objects(instance: &Instance) -> Vec<Box<dyn Any + Send>> {
    let device = instance.device(0).expect("the first device");
    let stream = device.pool_stream().expect("a stream");
    let mut all: Vec<Box<dyn Any + Send>> = vec![
        Box::new(instance.clone()),
        Box::new(device.lease_stream().expect("a lease")),
        Box::new(device.event_pool().take().expect("a pooled event")),
    ];
    for (timing, interprocess, external) in [(false, false, false), (true, false, false), (false, true, true)] {
        let options = EventOptions { timing, interprocess, external, ..EventOptions::default() };
        let mut event = instance.event_with(options).expect("possible options");
        event.record(&stream).expect("a record");
        all.push(Box::new(event));
    }
    // With addresses in which nothing is mapped any more.
    let paged = PagedAllocator::new(instance, Settings::default()).expect("virtual memory");
    let block = paged.allocate_raw(Request::new(device.id(), stream.id(), 1 << 20)).expect("a block");
    paged.free_raw(block.ptr).expect("its free");
    paged.trim_to(device.id(), 0).expect("a trim");
    all.push(Box::new(paged));
    let allocators: [Arc<dyn DeviceAllocator>; 4] = [
        Arc::new(PagedAllocator::new(instance, Settings::default()).expect("virtual memory")),
        Arc::new(CachingAllocator::new(instance, Settings::default())),
        Arc::new(CachingAllocator::new(instance, Settings { expandable_segments: true, ..Settings::default() })),
        Arc::new(DriverPoolAllocator::new(instance)),
    ];
    for allocator in allocators {
        let block = allocator.allocate(1 << 20, &stream).expect("a block");
        // Its free needs the driver, which a destructor must not call.
        block.record_use(&device.pool_stream().expect("a stream")).expect("a use");
        all.push(Box::new(block));
        let blas = Blas::new(&allocator, BlasSettings::default());
        drop((blas.handle_on(&stream).expect("a handle"), blas.lt_on(&stream).expect("another")));
        all.push(Box::new(blas));
        if let Ok(pool) = MemPool::new(&allocator, &device, PoolOptions::default()) {
            all.push(Box::new(pool.enter().expect("a scope")));
            all.push(Box::new(pool));
        }
    }
    // Pinned memory: cached, used by a stream and freed, allocated; of an allocator that is kept and of one that is
    // dropped.
    for keep in [true, false] {
        let pinned = HostAllocator::new(instance, PinnedSettings::default());
        let blocks = [1 << 10, 1 << 20, 1 << 21].map(|bytes| pinned.allocate(bytes).expect("pinned memory"));
        blocks.iter().for_each(|block| block.record_use(&stream).expect("a use"));
        let [freed, dropped, kept] = blocks;
        freed.free().expect("a mark");
        drop((dropped, pinned.allocate(1 << 12).expect("pinned memory")));
        all.push(Box::new(kept));
        if keep {
            all.push(Box::new(pinned));
        }
    }
    // Handles: an idle one, a leased one, and one that this thread owns, of a pool that is kept and of one that is
    // dropped.
    let pool = HandlePool::new(instance, Cublas);
    drop([pool.lease(&device).expect("a lease"), pool.lease(&device).expect("another")]);
    all.push(Box::new(pool.lease(&device).expect("a lease")));
    pool.current(&device).expect("a handle");
    HandlePool::new(instance, Cudnn).current(&device).expect("a handle");
    all.push(Box::new(pool));
    all.push(Box::new(stream));
    all
}

/// One object of every kind that stays on its thread.
fn thread_objects(instance: &Instance) -> Vec<Box<dyn Any>> {
    let device = instance.device(1).expect("the second device");
    let pool = HandlePool::new(instance, Cublas);
    let allocator: Arc<dyn DeviceAllocator> = Arc::new(CachingAllocator::new(instance, Settings::default()));
    let blas = Blas::new(&allocator, BlasSettings::default());
    vec![
        Box::new(blas.handle(&device).expect("a handle")),
        Box::new(forbid_tf32()),
        Box::new(device.enter()),
        Box::new(instance.current_stream().expect("a stream").enter()),
        Box::new(pool.current(&device).expect("a handle")),
        Box::new(HandlePool::new(instance, Cudnn).current(&device).expect("a handle")),
        Box::new(UsesOnDrop(instance.clone(), pool)),
    ]
}

fn fill_variables(loud: bool) {
    EARLY.with(|early| early.borrow_mut().clear());
    let instance = INSTANCE.get_or_init(watched_instance);
    instance.device(1).expect("the second device").make_current();
    HandlePool::new(instance, Cudnn).current(&instance.current_device()).expect("a handle");
    LATE.with(|late| late.borrow_mut().clear());

    STATIC_OBJECTS.lock().expect("not poisoned").extend(sendable_objects(instance));
    for variable in [&EARLY, &LATE] {
        // One Instance lives in static variables, the other only here: its last handle is dropped during exit.
        for instance in [instance.clone(), watched_instance()] {
            let mut objects: Vec<Box<dyn Any>> = Vec::new();
            objects.extend(sendable_objects(&instance).into_iter().map(|object| object as Box<dyn Any>));
            objects.extend(thread_objects(&instance));
            variable.with(|variable| variable.borrow_mut().extend(objects));
        }
    }
    if loud {
        LATE.with(|late| late.borrow_mut().push(Box::new(CallsOnDrop(instance.clone()))));
    }

    // A thread that ends with objects in its own variables, made there or moved there.
    let (sender, receiver) = mpsc::channel::<Vec<Box<dyn Any + Send>>>();
    let (ready, is_ready) = mpsc::channel();
    let thread = thread::spawn(move || {
        LATE.with(|late| late.borrow_mut().extend(thread_objects(instance)));
        ready.send(()).expect("the main thread waits");
        let objects = receiver.recv().expect("the main thread sends them");
        LATE.with(|late| late.borrow_mut().extend(objects.into_iter().map(|object| object as Box<dyn Any>)));
    });
    is_ready.recv().expect("the thread comes so far");

    EXITING.store(true, Ordering::SeqCst);
    sender.send(STATIC_OBJECTS.lock().expect("not poisoned").split_off(0)).expect("the thread waits");
    thread.join().expect("a thread that ends well");
}
