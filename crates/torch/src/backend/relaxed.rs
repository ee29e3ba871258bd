//! Driver calls that an active capture forbids: ours, and PyTorch's own when it destroys a graph.
//!
//! PyTorch destroys the executable of a graph right after it has released the graph's pool. During a capture in global
//! mode CUDA refuses that, and invalidates the capture; Python's garbage collector may do it at any moment. So a thread
//! that releases a pool while another is open gets CUDA's relaxed mode, until it next opens, closes or releases a pool,
//! or allocates (while a pool is open: any allocation; otherwise one that no cached block fits). A thread that does
//! none of these again stays relaxed: its forbidden calls, if any, do not invalidate captures of other threads.

use std::cell::Cell;

use warpool_driver::{CaptureMode, Driver};

use crate::error::Result;

thread_local! {
    /// The mode before the thread was relaxed. Has no destructor, so it works until the thread has ended.
    static BEFORE: Cell<Option<CaptureMode>> = const { Cell::new(None) };
}

/// Puts the calling thread into relaxed mode, until [`restore`].
pub(super) fn relax(driver: &dyn Driver) -> Result<()> {
    let before = driver.capture_mode_exchange(CaptureMode::Relaxed)?;
    // Already relaxed, by an earlier call here or by the program.
    if before != CaptureMode::Relaxed {
        BEFORE.set(Some(before));
    }
    Ok(())
}

/// Ends the relaxed mode of [`relax`], if it is set.
#[inline]
pub(super) fn restore(driver: &dyn Driver) -> Result<()> {
    if let Some(before) = BEFORE.get() {
        driver.capture_mode_exchange(before)?;
        BEFORE.set(None);
    }
    Ok(())
}

/// Makes a driver call in relaxed mode.
pub(super) fn run<R>(driver: &dyn Driver, call: impl FnOnce() -> warpool_driver::Result<R>) -> Result<R> {
    let before = driver.capture_mode_exchange(CaptureMode::Relaxed)?;
    let outcome = call();
    driver.capture_mode_exchange(before)?;
    Ok(outcome?)
}

#[cfg(test)]
mod tests {
    use std::ffi::{c_int, c_void};
    use std::ptr;
    use std::sync::Arc;

    use warpool::memory::Settings;
    use warpool_driver::sim::{SimConfig, SimDriver};
    use warpool_driver::{
        CaptureState, Captures as _, DeviceId, ForeignStream, Memory as _, StreamOptions, Streams as _,
    };

    use super::super::Filter;
    use super::*;
    use crate::{Runtime, TorchPoolId};

    unsafe extern "C" fn accept(_user: *mut c_void, _stream: *const c_void) -> c_int {
        1
    }

    fn pool(number: u64) -> TorchPoolId {
        TorchPoolId { graph: number, user: 0 }
    }

    /// Test `test_graph_make_graphed_callables_same_pool` of PyTorch failed so: the garbage collector destroyed the
    /// graphs of earlier tests during a capture.
    #[test]
    fn a_graph_that_is_destroyed_during_a_capture_does_not_invalidate_it() {
        for settings in ["backend:native", "backend:paged"] {
            let sim = Arc::new(SimDriver::new(SimConfig::default()));
            let runtime = Runtime::new(sim.clone(), Settings::parse(settings).unwrap()).unwrap();
            let (device, routing, allocator) = (DeviceId(0), &runtime.routing, runtime.allocator());
            // SAFETY: the function needs no argument, and any thread may call it.
            let filter = || unsafe { Filter::new(accept, None, ptr::null_mut()) };
            let stream = sim.create_foreign_stream(device, StreamOptions::default()).unwrap();
            // SAFETY: the simulated GPU looks handles up and never follows them.
            let handle = unsafe { ForeignStream::new(sim.stream_handle(stream).unwrap().raw) };
            for earlier in [1, 2] {
                routing.begin(allocator, device, pool(earlier), filter()).unwrap();
                routing.end(allocator, device, pool(earlier)).unwrap();
            }
            routing.release(allocator, device, pool(1)).unwrap();
            assert_eq!(sim.capture_mode_exchange(CaptureMode::Global).unwrap(), CaptureMode::Global, "no pool is open");

            routing.begin(allocator, device, pool(3), filter()).unwrap();
            sim.capture_begin(stream, CaptureMode::Global).unwrap();
            routing.release(allocator, device, pool(2)).unwrap();
            // Like destroying a graph, a call that captures forbid.
            let ptr = sim.mem_alloc(device, 1 << 20).unwrap();
            assert!(matches!(sim.capture_state(stream).unwrap(), CaptureState::Active(_)), "{settings}");
            runtime.allocate(512, 0, handle).unwrap();
            assert_eq!(sim.capture_mode_exchange(CaptureMode::Global).unwrap(), CaptureMode::Global, "restored");
            sim.capture_end(stream).unwrap();
            routing.end(allocator, device, pool(3)).unwrap();
            sim.mem_free(ptr).unwrap();
        }
    }

    /// The pool was closed by another thread: nothing that this thread does with pools ends its mode.
    #[test]
    fn an_allocation_behind_the_capture_restores_the_mode() {
        let sim = Arc::new(SimDriver::new(SimConfig::default()));
        let runtime = Runtime::new(sim.clone(), Settings::parse("backend:native").unwrap()).unwrap();
        let (device, routing, allocator) = (DeviceId(0), &runtime.routing, runtime.allocator());
        // SAFETY: the function needs no argument, and any thread may call it.
        let filter = || unsafe { Filter::new(accept, None, ptr::null_mut()) };
        for number in [1, 2] {
            routing.begin(allocator, device, pool(number), filter()).unwrap();
        }
        routing.end(allocator, device, pool(1)).unwrap();
        routing.release(allocator, device, pool(1)).unwrap();
        std::thread::scope(|scope| scope.spawn(|| routing.end(allocator, device, pool(2)).unwrap()).join()).unwrap();
        assert_eq!(sim.capture_mode_exchange(CaptureMode::Relaxed).unwrap(), CaptureMode::Relaxed, "not yet");
        runtime.allocate(512, 0, ForeignStream::NULL).unwrap();
        assert_eq!(sim.capture_mode_exchange(CaptureMode::Global).unwrap(), CaptureMode::Global, "restored");
    }

    #[test]
    fn closing_a_pool_restores_the_mode_and_a_relaxed_thread_stays_relaxed() {
        let sim = SimDriver::new(SimConfig::default());
        relax(&sim).unwrap();
        relax(&sim).unwrap();
        restore(&sim).unwrap();
        assert_eq!(sim.capture_mode_exchange(CaptureMode::Relaxed).unwrap(), CaptureMode::Global);
        relax(&sim).unwrap();
        restore(&sim).unwrap();
        assert_eq!(run(&sim, || sim.capture_mode_exchange(CaptureMode::Global)).unwrap(), CaptureMode::Relaxed);
        assert_eq!(sim.capture_mode_exchange(CaptureMode::Global).unwrap(), CaptureMode::Relaxed);
    }
}
