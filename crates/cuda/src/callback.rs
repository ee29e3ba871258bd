//! Host callbacks: Rust closures that CUDA's threads call.
//!
//! CUDA is given a number, not an address, and the closure is looked up by it. A callback that CUDA runs once more than
//! expected, or after the closure was dropped, finds nothing instead of freed memory, so this module needs no unsafe
//! code.
//!
//! An eager callback is dropped after it ran. A captured one lives until CUDA reports that its graph, all its
//! executables and all their launches are destroyed ([`on_graph_gone`], the destructor of a CUDA user object).

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};

use warpool_driver::{HostCallback, discard_panic};

use crate::sync::lock;

/// The closures that CUDA may still call, of all drivers in the process.
static CALLBACKS: Mutex<BTreeMap<usize, HostCallback>> = Mutex::new(BTreeMap::new());

/// The next number. Never 0, a null pointer.
static NEXT: AtomicUsize = AtomicUsize::new(1);

thread_local! {
    /// Whether this thread is inside a callback.
    static RUNNING: Cell<bool> = const { Cell::new(false) };
}

/// The number of a closure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CallbackId(usize);

impl CallbackId {
    /// The number as the user data that CUDA passes to callbacks. Not an address.
    pub(crate) const fn user_data(self) -> *mut c_void {
        ptr::without_provenance_mut(self.0)
    }
}

/// Registers a closure. An eager one is dropped after it ran, a captured one by [`unregister`].
pub(crate) fn register(callback: HostCallback) -> CallbackId {
    let id = CallbackId(NEXT.fetch_add(1, Ordering::Relaxed));
    callbacks().insert(id.0, callback);
    id
}

/// Drops a closure that will not be called any more.
pub(crate) fn unregister(id: CallbackId) {
    // The lock is released first: dropping the closure runs user code.
    let callback = callbacks().remove(&id.0);
    drop(callback);
}

/// Whether the calling thread is inside a callback.
pub(crate) fn is_running() -> bool {
    RUNNING.get()
}

/// The function that CUDA calls for an eager callback.
pub(crate) extern "C" fn run_once(user_data: *mut c_void) {
    let callback = callbacks().remove(&user_data.addr());
    run(callback);
}

/// The function that CUDA calls for a captured callback, at every replay.
pub(crate) extern "C" fn run_captured(user_data: *mut c_void) {
    let callback = callbacks().get(&user_data.addr()).cloned();
    run(callback);
}

/// The function that CUDA calls when nothing can run a captured callback any more.
pub(crate) extern "C" fn on_graph_gone(user_data: *mut c_void) {
    in_callback(|| unregister(CallbackId(user_data.addr())));
}

fn run(callback: Option<HostCallback>) {
    in_callback(move || match callback {
        Some(callback) => callback(),
        None => tracing::error!("CUDA ran a host callback that was already dropped"),
    });
}

/// Runs `work` as a callback; a panic does not unwind into C.
fn in_callback(work: impl FnOnce()) {
    let before = RUNNING.replace(true);
    let outcome = catch_unwind(AssertUnwindSafe(work)).map_err(discard_panic);
    RUNNING.set(before);
    if outcome.is_err() {
        tracing::error!("a host callback panicked; the stream continues");
    }
}

fn callbacks() -> MutexGuard<'static, BTreeMap<usize, HostCallback>> {
    lock(&CALLBACKS)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use warpool_driver::{Call, ErrorCode};

    use super::*;
    use crate::fake_cuda;

    /// A callback that counts its runs, and the counter; the counter's reference count shows whether the callback
    /// lives.
    fn counter() -> (HostCallback, Arc<AtomicUsize>) {
        let count = Arc::new(AtomicUsize::new(0));
        let inner = Arc::clone(&count);
        (Arc::new(move || _ = inner.fetch_add(1, Ordering::Relaxed)), count)
    }

    #[test]
    fn an_eager_callback_runs_once_and_is_dropped() {
        let (callback, count) = counter();
        let id = register(callback);
        run_once(id.user_data());
        run_once(id.user_data());
        assert_eq!((count.load(Ordering::Relaxed), Arc::strong_count(&count)), (1, 1));
    }

    #[test]
    fn a_captured_callback_runs_until_its_graph_is_gone() {
        let (callback, count) = counter();
        let id = register(callback);
        run_captured(id.user_data());
        run_captured(id.user_data());
        on_graph_gone(id.user_data());
        run_captured(id.user_data());
        assert_eq!((count.load(Ordering::Relaxed), Arc::strong_count(&count)), (2, 1));
    }

    #[test]
    fn a_panic_does_not_leave_the_callback() {
        let id = register(Arc::new(|| panic!("in a callback")));
        run_once(id.user_data());
        assert!(!is_running());
    }

    #[test]
    fn calls_are_refused_inside_a_callback() {
        let driver = Arc::new(fake_cuda::driver());
        let inner = Arc::clone(&driver);
        let id = register(Arc::new(move || {
            let refused = inner.enter(Call::DeviceCount).err().map(|error| error.code);
            assert_eq!(refused, Some(ErrorCode::NotPermitted));
            SEEN.store(1, Ordering::Relaxed);
        }));
        static SEEN: AtomicUsize = AtomicUsize::new(0);
        run_once(id.user_data());
        assert_eq!(SEEN.load(Ordering::Relaxed), 1);
        assert!(driver.enter(Call::DeviceCount).is_ok());
    }
}
