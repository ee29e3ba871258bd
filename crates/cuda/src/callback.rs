//! Host callbacks: Rust closures that CUDA's threads call.
//!
//! CUDA is given a number, never an address, and the closure is looked up under it. So a callback that CUDA runs once
//! more than expected, or after it was dropped, finds nothing instead of freed memory, and nothing here is unsafe.
//!
//! An eager callback is dropped after it ran. A captured one lives until CUDA says that its graph, all executables of
//! it and all launches under way are gone ([`on_graph_gone`], the destructor of a CUDA user object).

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use warpool_driver::HostCallback;

/// The closures that CUDA may still call. One for the process: CUDA's threads know no driver.
static WAITING: Mutex<BTreeMap<usize, HostCallback>> = Mutex::new(BTreeMap::new());

/// The next number. Never 0, which CUDA might take for "nothing".
static NEXT: AtomicUsize = AtomicUsize::new(1);

thread_local! {
    /// Whether this thread is inside a callback now.
    static RUNNING: Cell<bool> = const { Cell::new(false) };
}

/// A closure's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ticket(usize);

impl Ticket {
    /// The number as what CUDA passes to callbacks. Not an address: nobody may follow it.
    pub(crate) const fn user_data(self) -> *mut c_void {
        ptr::without_provenance_mut(self.0)
    }
}

/// Keeps a closure until it ran (eager) or is dropped by its ticket (captured).
pub(crate) fn keep(callback: HostCallback) -> Ticket {
    let ticket = Ticket(NEXT.fetch_add(1, Ordering::Relaxed));
    waiting().insert(ticket.0, callback);
    ticket
}

/// Drops a closure that will not be called any more.
pub(crate) fn forget(ticket: Ticket) {
    // The lock is gone before the closure: what it owns may do anything when dropped.
    let callback = waiting().remove(&ticket.0);
    drop(callback);
}

/// Whether the calling thread is inside a callback.
pub(crate) fn is_running() -> bool {
    RUNNING.get()
}

/// What CUDA calls for an eager callback.
pub(crate) extern "C" fn run_once(user_data: *mut c_void) {
    let callback = waiting().remove(&user_data.addr());
    run(callback);
}

/// What CUDA calls for a captured callback, at every replay.
pub(crate) extern "C" fn run_captured(user_data: *mut c_void) {
    let callback = waiting().get(&user_data.addr()).cloned();
    run(callback);
}

/// What CUDA calls when nothing can run a captured callback any more.
pub(crate) extern "C" fn on_graph_gone(user_data: *mut c_void) {
    guarded(|| forget(Ticket(user_data.addr())));
}

fn run(callback: Option<HostCallback>) {
    guarded(move || match callback {
        Some(callback) => callback(),
        None => tracing::error!("CUDA ran a host callback that is already gone"),
    });
}

/// Runs `work` as CUDA wants it: marked as a callback, and without a panic getting out into C.
fn guarded(work: impl FnOnce()) {
    let before = RUNNING.replace(true);
    let outcome = catch_unwind(AssertUnwindSafe(work));
    RUNNING.set(before);
    if let Err(payload) = outcome {
        // Whatever a panic carries might panic again when dropped, and that would get out.
        mem::forget(payload);
        tracing::error!("a host callback panicked; the stream goes on without it");
    }
}

fn waiting() -> MutexGuard<'static, BTreeMap<usize, HostCallback>> {
    // No code of others runs under the lock, so a poisoned map is whole.
    WAITING.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use warpool_driver::{Call, ErrorCode};

    use super::*;
    use crate::fake;

    /// A callback that counts, and the counter; the counter's owners tell whether the callback still lives.
    fn counter() -> (HostCallback, Arc<AtomicUsize>) {
        let count = Arc::new(AtomicUsize::new(0));
        let inner = Arc::clone(&count);
        (Arc::new(move || _ = inner.fetch_add(1, Ordering::Relaxed)), count)
    }

    #[test]
    fn an_eager_callback_runs_once_and_is_dropped() {
        let (callback, count) = counter();
        let ticket = keep(callback);
        run_once(ticket.user_data());
        run_once(ticket.user_data());
        assert_eq!((count.load(Ordering::Relaxed), Arc::strong_count(&count)), (1, 1));
    }

    #[test]
    fn a_captured_callback_runs_until_its_graph_is_gone() {
        let (callback, count) = counter();
        let ticket = keep(callback);
        run_captured(ticket.user_data());
        run_captured(ticket.user_data());
        on_graph_gone(ticket.user_data());
        run_captured(ticket.user_data());
        assert_eq!((count.load(Ordering::Relaxed), Arc::strong_count(&count)), (2, 1));
    }

    #[test]
    fn a_panic_stays_inside() {
        let ticket = keep(Arc::new(|| panic!("a callback went wrong")));
        run_once(ticket.user_data());
        assert!(!is_running());
    }

    #[test]
    fn no_call_of_the_contract_begins_inside_a_callback() {
        let driver = Arc::new(fake::driver());
        let inner = Arc::clone(&driver);
        let ticket = keep(Arc::new(move || {
            let refused = inner.enter(Call::DeviceCount).err().map(|error| error.code);
            assert_eq!(refused, Some(ErrorCode::NotPermitted));
            SEEN.store(1, Ordering::Relaxed);
        }));
        static SEEN: AtomicUsize = AtomicUsize::new(0);
        run_once(ticket.user_data());
        assert_eq!(SEEN.load(Ordering::Relaxed), 1);
        assert!(driver.enter(Call::DeviceCount).is_ok());
    }
}
