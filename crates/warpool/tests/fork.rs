//! Forked children of a process with busy threads: allocators and drivers return an error, what is freed or dropped is
//! left to the parent, and nothing hangs. Issue 12.
#![cfg(target_os = "linux")]

use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use warpool::driver::sim::{SimConfig, SimDriver};
use warpool::driver::{DeviceId, ErrorCode, Memory as _};
use warpool::memory::{Allocate as _, CachingAllocator, DeviceAllocator, HostAllocator, PinnedSettings, Settings};
use warpool::{Error, Instance};

unsafe extern "C" {
    fn fork() -> c_int;
    fn waitpid(pid: c_int, status: *mut c_int, options: c_int) -> c_int;
    fn alarm(seconds: u32) -> u32;
    fn _exit(status: c_int) -> !;
}

/// Runs `act` in a child, which is killed if it hangs. Returns whether it returned `true`.
fn in_child(act: impl FnOnce() -> bool) -> bool {
    // SAFETY: the child has one thread, which only runs `act`; what that must not do after a fork is what is tested.
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
                        memory.trim(device.id(), warpool::memory::MemPoolId::DEFAULT).unwrap();
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
