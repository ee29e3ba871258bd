//! Forked children of a process with busy threads: allocators and drivers return an error, freed or dropped objects are
//! left to the parent, and nothing hangs. Issue 12.
#![cfg(target_os = "linux")]

use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use warpool::driver::decorate::{Counting, FaultPlan, Faulty, Recording};
use warpool::driver::sim::{SimConfig, SimDriver};
use warpool::driver::{Call, CaptureMode, DeviceId, Devices as _, ErrorCode, Memory as _};
use warpool::graph::{CaptureOptions, Graph, GraphOptions};
use warpool::handle::{Cublas, HandlePool};
use warpool::memory::decorate::{Limited, Traced};
use warpool::memory::pools::PoolOptions;
use warpool::memory::report::{Action, Snapshot};
use warpool::memory::{
    Allocate as _, CachingAllocator, DeviceAllocator, HostAllocator, MemPool, MemPoolId, PinnedSettings, Settings,
};
use warpool::{Error, Instance};

unsafe extern "C" {
    fn fork() -> c_int;
    fn waitpid(pid: c_int, status: *mut c_int, options: c_int) -> c_int;
    fn alarm(seconds: u32) -> u32;
    fn _exit(status: c_int) -> !;
}

/// Runs `act` in a child, which is killed if it hangs. Returns whether it returned `true`.
fn in_child(act: impl FnOnce() -> bool) -> bool {
    // SAFETY: the child has one thread, which only runs `act`; the test checks what that may do after a fork.
    let pid = unsafe { fork() };
    assert!(pid >= 0, "no child can be started");
    if pid == 0 {
        // SAFETY: takes no pointers.
        unsafe { alarm(30) };
        let passed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(act)).unwrap_or(false);
        // SAFETY: ends the child.
        unsafe { _exit(c_int::from(!passed)) }
    }
    let mut status = 0;
    // SAFETY: writes the status of a child of this process.
    let waited = unsafe { waitpid(pid, &raw mut status, 0) };
    waited == pid && status == 0
}

fn is_forked<T>(result: Result<T, Error>) -> bool {
    result.is_err_and(|error| error.driver().is_some_and(|error| error.code == ErrorCode::NotInitialized))
}

#[test]
fn children_of_busy_threads_get_errors_and_never_hang() {
    let sim = Arc::new(SimDriver::new(SimConfig::default()));
    let instance = Instance::new(sim.clone()).unwrap();
    let device = instance.device(0).unwrap();
    let memory: Arc<dyn DeviceAllocator> = Arc::new(CachingAllocator::new(&instance, Settings::default()));
    let pinned = HostAllocator::new(&instance, PinnedSettings::default());
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for index in 0..4_u64 {
            let (stop, memory, pinned, device) = (&stop, &memory, &pinned, &device);
            scope.spawn(move || {
                let stream = device.pool_stream().unwrap();
                let mut bytes = 1000 * (index + 1);
                while !stop.load(Ordering::Relaxed) {
                    bytes = bytes * 7 % 3_000_017;
                    let block = memory.allocate(1 + bytes, &stream).unwrap();
                    let host = pinned.allocate(1 + bytes).unwrap();
                    host.record_use(&stream).unwrap();
                    drop((block, host, device.lease_stream().unwrap()));
                    if bytes % 16 == 0 {
                        memory.trim(device.id(), MemPoolId::DEFAULT).unwrap();
                        pinned.trim(0).unwrap();
                    }
                }
            });
        }
        let stream = device.pool_stream().unwrap();
        let mut failed = 0;
        for _ in 0..200 {
            let (block, host) = (memory.allocate(5000, &stream).unwrap(), pinned.allocate(5000).unwrap());
            let lease = device.lease_stream().unwrap();
            let handle = pinned.clone();
            let passed = in_child(|| {
                let errors = is_forked(memory.allocate(5000, &stream))
                    && is_forked(pinned.allocate(5000))
                    && is_forked(memory.stats(device.id()))
                    && is_forked(pinned.trim(0))
                    && is_forked(stream.synchronize())
                    && is_forked(host.record_use(&stream))
                    && is_forked(sim.mem_alloc(DeviceId(0), 512).map_err(Error::from));
                // Quiet.
                drop((block, lease));
                let freed = host.free().is_ok();
                let closed = is_forked(handle.close());
                // The child can have a driver of its own.
                let own = Instance::new(Arc::new(SimDriver::new(SimConfig::default()))).unwrap();
                let works = HostAllocator::new(&own, PinnedSettings::default()).allocate(100).is_ok();
                errors && freed && closed && works && instance.is_inherited() && !own.is_inherited()
            });
            failed += u32::from(!passed);
            if failed == 3 {
                break;
            }
        }
        stop.store(true, Ordering::Relaxed);
        assert_eq!(failed, 0, "children that failed or hung");
    });
}

/// Issue 12: observers have a lock of their own, which a thread of the parent may hold at the fork.
#[test]
fn a_child_attaches_and_detaches_observers_without_effect() {
    let instance = Instance::new(Arc::new(SimDriver::new(SimConfig::default()))).unwrap();
    let caching = CachingAllocator::new(&instance, Settings::default());
    let (observers, stop) = (caching.observers(), AtomicBool::new(false));
    let attached = observers.attach_trim_hook(Arc::new(|_| ()));
    let attach_all = || {
        observers.set_stack_hook(Some(Arc::new(|| None)));
        [
            observers.attach_tracker(&Action::ALL, Arc::new(|_, _| ())),
            observers.attach_oom_observer(Arc::new(|_| ())),
            observers.attach_pressure_callback(Arc::new(|_| false)),
            observers.attach_trim_hook(Arc::new(|_| ())),
        ]
    };
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    assert!(attach_all().into_iter().all(|id| observers.detach(id)));
                }
            });
        }
        let child = || {
            let without_effect = attach_all().into_iter().all(|id| !observers.detach(id));
            without_effect && !observers.detach(attached) && format!("{observers:?}").contains("trackers: 0")
        };
        let failed = (0..50).filter(|_| !in_child(child)).take(3).count();
        stop.store(true, Ordering::Relaxed);
        assert_eq!(failed, 0, "children that failed or hung");
    });
}

/// The objects that other threads of the parent use all the time: driver decorators, pools, scopes, captures, handles,
/// decorated allocators, statistics.
struct Busy {
    counting: Arc<Counting>,
    recording: Arc<Recording>,
    faulty: Arc<Faulty>,
    instance: Instance,
    memory: Arc<dyn DeviceAllocator>,
    limited: Arc<Limited>,
    caching: Arc<CachingAllocator>,
    pinned: HostAllocator,
    handles: HandlePool<Cublas>,
}

impl Busy {
    fn new() -> Self {
        let sim = Arc::new(SimDriver::new(SimConfig::default()));
        let counting = Arc::new(Counting::new(sim));
        let recording = Arc::new(Recording::with_limit(counting.clone(), 100));
        let faulty = Arc::new(Faulty::new(
            recording.clone(),
            FaultPlan::new().fail_nth(Call::MemInfo, u64::MAX, ErrorCode::UnknownError),
        ));
        let instance = Instance::new(faulty.clone()).unwrap();
        let caching = Arc::new(CachingAllocator::new(&instance, Settings::default()));
        let limited = Arc::new(Limited::new(&caching, 1 << 40));
        let memory: Arc<dyn DeviceAllocator> = Arc::new(Traced::new(&limited, |_, _| ()));
        let pinned = HostAllocator::new(&instance, PinnedSettings::default());
        let handles = HandlePool::new(&instance, Cublas);
        Self { counting, recording, faulty, instance, memory, limited, caching, pinned, handles }
    }

    fn work(&self, round: u64) {
        let device = self.instance.device(0).unwrap();
        let pool = MemPool::new(&self.memory, &device, PoolOptions::default()).unwrap();
        let lease = device.lease_stream().unwrap();
        let scope = pool.enter().unwrap();
        let block = self.memory.allocate(1 + round * 7919 % 3_000_017, &lease).unwrap();
        drop((scope, block, self.handles.lease(&device).unwrap()));
        let host = self.pinned.allocate(1 + round * 7919 % 300_017).unwrap();
        let _ = (self.pinned.stats(), self.limited.bytes_allocated(), self.recording.log(), self.faulty.injected());
        self.memory.stats(device.id()).unwrap();
        self.caching.set_settings(Settings::default()).unwrap();
        self.pinned.set_settings(PinnedSettings::default());
        drop((host, pool));
        if round.is_multiple_of(8) {
            let mut graph = Graph::new(&self.memory, &device, GraphOptions::default()).unwrap();
            graph.capture(&lease, relaxed(), |capture| capture.allocate(512).map(drop)).unwrap();
            drop(self.instance.polling());
        }
    }
}

/// Other threads may make any call meanwhile.
fn relaxed() -> CaptureOptions<'static> {
    CaptureOptions::default().with_mode(CaptureMode::Relaxed)
}

/// Issue 12: in a child, decorators of drivers and allocators, statistics, and the destructors of pools, scopes,
/// handles and captures need no lock that a thread of the parent may hold.
#[test]
fn a_child_can_drop_and_read_everything_that_it_inherited() {
    let busy = Busy::new();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (busy, stop) = (&busy, &stop);
            scope.spawn(move || {
                let mut round = thread;
                while !stop.load(Ordering::Relaxed) {
                    busy.work(round);
                    round += 4;
                }
            });
        }
        let Busy { counting, recording, faulty, instance, memory, limited, caching, pinned, handles } = &busy;
        let device = instance.device(0).unwrap();
        let mut failed = 0;
        for _ in 0..100 {
            let pool = MemPool::new(memory, &device, PoolOptions::default()).unwrap();
            let scope = pool.enter().unwrap();
            let lease = device.lease_stream().unwrap();
            let block = memory.allocate(5000, &lease).unwrap();
            let handle = handles.lease(&device).unwrap();
            let polling = instance.polling();
            drop(polling);
            let mut graph = Graph::new(memory, &device, GraphOptions::default()).unwrap();
            graph.capture_begin(&lease, relaxed()).unwrap();
            let passed = in_child(|| {
                let errors = is_forked(faulty.device_count().map_err(Error::from))
                    && is_forked(recording.device_count().map_err(Error::from))
                    && is_forked(counting.device_count().map_err(Error::from))
                    && is_forked(memory.allocate(5000, &lease))
                    && is_forked(memory.trim(device.id(), MemPoolId::DEFAULT))
                    && is_forked(memory.snapshot(Default::default()))
                    && is_forked(handles.lease(&device))
                    && is_forked(MemPool::new(memory, &device, PoolOptions::default()))
                    && is_forked(graph.capture_end(&lease))
                    && is_forked(graph.reset());
                let _ = (recording.log(), faulty.injected(), counting.counts(), caching.settings(), pinned.settings());
                faulty.clear_plan();
                recording.clear();
                pinned.check();
                caching.check();
                pinned.reset_peak_stats();
                pinned.add_to(&mut Snapshot::default());
                let empty = pinned.stats().allocated_bytes.current == 0 && limited.bytes_allocated() == 0;
                drop(instance.polling());
                drop((scope, block, handle, graph, lease, pool));
                errors && empty
            });
            failed += u32::from(!passed);
            if failed == 3 {
                break;
            }
        }
        stop.store(true, Ordering::Relaxed);
        assert_eq!(failed, 0, "children that failed or hung");
    });
}
