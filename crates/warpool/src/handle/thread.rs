//! What each thread holds: one handle per pool and device, from its first use to the thread's end.
//!
//! No lock and no library call here. A thread's list keeps no pool and no [`Instance`](crate::Instance) alive: a pool that is
//! gone leaves its handles to leak. The list is borrowed for looking and moving only, and nothing is dropped meanwhile:
//! a drop may be somebody's code, which may come back here.

use std::any::Any;
use std::cell::RefCell;
use std::fmt;
use std::ops::Deref;
use std::rc::Rc;
use std::sync::Weak;

use warpool_driver::DeviceId;

use super::pool::PoolKey;
use super::shelf::Loan;

thread_local! {
    // Few pools and few devices: a search is a glance.
    static HELD: RefCell<Vec<Held>> = const { RefCell::new(Vec::new()) };
}

/// One handle of this thread.
struct Held {
    pool: PoolKey,
    device: DeviceId,
    /// A loan of the pool's kind of handle. It goes back when the last [`ThreadHandle`] is gone, too.
    loan: Rc<dyn Any>,
    /// Dead once the pool is: then this entry is stale.
    home: Weak<dyn Any + Send + Sync>,
}

/// The calling thread's own handle. It stays on its thread:
/// ```compile_fail,E0277
/// # fn on_another_thread(pool: &warpool::handle::HandlePool<warpool::handle::Cublas>, device: &warpool::Device) {
/// let handle = pool.current(device).unwrap();
/// std::thread::spawn(move || handle.raw());
/// # }
/// ```
pub struct ThreadHandle<H>(Rc<Loan<H>>);

impl<H> Deref for ThreadHandle<H> {
    type Target = H;

    fn deref(&self) -> &H {
        &self.0
    }
}

impl<H> Clone for ThreadHandle<H> {
    fn clone(&self) -> Self {
        Self(Rc::clone(&self.0))
    }
}

impl<H: fmt::Debug> fmt::Debug for ThreadHandle<H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

/// What the thread holds of that pool for that device.
#[inline]
pub(super) fn held<H: 'static>(pool: PoolKey, device: DeviceId) -> Option<ThreadHandle<H>> {
    HELD.try_with(|held| find(&held.borrow(), pool, device)).ok().flatten()
}

#[inline]
fn find<H: 'static>(held: &[Held], pool: PoolKey, device: DeviceId) -> Option<ThreadHandle<H>> {
    let entry = held.iter().find(|entry| entry.pool == pool && entry.device == device)?;
    Some(ThreadHandle(Rc::clone(&entry.loan).downcast().expect("a pool has one kind of handle")))
}

/// Whether the thread's list is gone, as it is for destructors of other thread-local variables that run after its own.
pub(super) fn is_past_holding() -> bool {
    HELD.try_with(|_| ()).is_err()
}

/// Holds on to a handle for the rest of the thread.
pub(super) fn hold<H: Send + 'static>(pool: PoolKey, loan: Loan<H>) -> ThreadHandle<H> {
    let (device, home) = (loan.device, loan.home().clone());
    let loan = Rc::new(loan);
    let (handle, _stale) = HELD
        .try_with(|held| {
            let held = &mut *held.borrow_mut();
            if let Some(handle) = find(held, pool, device) {
                // Making the handle made another one, from the same pool: the first to be held stays, this one goes
                // back.
                return (handle, Vec::new());
            }
            let stale: Vec<Held> = held.extract_if(.., |entry| entry.home.strong_count() == 0).collect();
            held.push(Held { pool, device, loan: Rc::<Loan<H>>::clone(&loan), home });
            (ThreadHandle(Rc::clone(&loan)), stale)
        })
        // Without a list it goes back with the last ThreadHandle.
        .unwrap_or_else(|_| (ThreadHandle(Rc::clone(&loan)), Vec::new()));
    handle
}

/// Gives up what the thread holds of a pool.
pub(super) fn give_up(pool: PoolKey) {
    let gone: Vec<Held> = HELD
        .try_with(|held| held.borrow_mut().extract_if(.., |entry| entry.pool == pool).collect())
        .unwrap_or_default();
    drop(gone);
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use warpool_driver::sim::{SimConfig, SimDriver};

    use super::super::{HandlePool, LibraryKind};
    use super::*;
    use crate::{Device, Instance, Result};

    struct Plain;

    /// A handle whose drop comes back to the list.
    struct ComesBack;

    impl Drop for ComesBack {
        fn drop(&mut self) {
            let _ = HELD.try_with(|held| drop(held.borrow_mut()));
        }
    }

    impl LibraryKind for Plain {
        type Handle = ComesBack;

        fn name(&self) -> &'static str {
            "a library"
        }

        fn create(&self, _: &Device) -> Result<ComesBack> {
            Ok(ComesBack)
        }

        fn destroy(&self, _: &Device, _: &ComesBack) -> Result<()> {
            Ok(())
        }
    }

    #[test]
    fn entries_of_pools_that_are_gone_do_not_pile_up() {
        let listed = || HELD.with(|held| held.borrow().len());
        let instance = Instance::new(Arc::new(SimDriver::new(SimConfig::default()))).unwrap();
        let device = instance.device(0).unwrap();
        let kept = HandlePool::new(&instance, Plain);
        kept.current(&device).unwrap();
        for _ in 0..1_000 {
            HandlePool::new(&instance, Plain).current(&device).unwrap();
            assert!(listed() <= 2);
        }
        for _ in 0..1_000 {
            let pool = HandlePool::new(&instance, Plain);
            pool.current(&device).unwrap();
            pool.close().unwrap();
        }
        assert_eq!((listed(), kept.alive(&device)), (1, 1));
    }
}
