//! The handles of each thread: one per pool and device, from its first use to the thread's end.
//!
//! No lock and no library call here. A thread's list keeps no pool and no [`Instance`](crate::Instance) alive: handles
//! of a dropped pool are leaked. The list is borrowed only to search and to move entries, and no handle is dropped
//! meanwhile: dropping one may run user code that calls this module again.

use std::any::Any;
use std::cell::RefCell;
use std::fmt;
use std::ops::Deref;
use std::rc::Rc;
use std::sync::Weak;

use warpool_driver::DeviceId;

use super::idle::{Acquired, PoolKey};

thread_local! {
    // Few pools and few devices: a search is short.
    static OWNED: RefCell<Vec<Owned>> = const { RefCell::new(Vec::new()) };
}

/// One handle of this thread.
struct Owned {
    pool: PoolKey,
    device: DeviceId,
    /// An [`Acquired`] of the pool's kind of handle. Returned when the last [`ThreadHandle`] is dropped, too.
    handle: Rc<dyn Any>,
    /// Dead once the pool is dropped; the entry is stale then.
    alive: Weak<dyn Any + Send + Sync>,
}

/// The calling thread's own handle. It stays on its thread:
/// ```compile_fail,E0277
/// # fn on_another_thread(pool: &warpool::handle::HandlePool<warpool::handle::Cublas>, device: &warpool::Device) {
/// let handle = pool.current(device).unwrap();
/// std::thread::spawn(move || handle.raw());
/// # }
/// ```
pub struct ThreadHandle<H>(Rc<Acquired<H>>);

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

/// The thread's handle of that pool for that device, if it owns one.
#[inline]
pub(super) fn get<H: 'static>(pool: PoolKey, device: DeviceId) -> Option<ThreadHandle<H>> {
    OWNED.try_with(|owned| find(&owned.borrow(), pool, device)).ok().flatten()
}

#[inline]
fn find<H: 'static>(owned: &[Owned], pool: PoolKey, device: DeviceId) -> Option<ThreadHandle<H>> {
    let entry = owned.iter().find(|entry| entry.pool == pool && entry.device == device)?;
    Some(ThreadHandle(Rc::clone(&entry.handle).downcast().expect("a pool has one kind of handle")))
}

/// Whether the thread's list is destroyed, as it is for destructors of thread-local variables that run after its own.
pub(super) fn is_ending() -> bool {
    OWNED.try_with(|_| ()).is_err()
}

/// Makes the thread own a handle until its end.
pub(super) fn own<H: Send + 'static>(pool: PoolKey, handle: Acquired<H>) -> ThreadHandle<H> {
    let (device, alive) = (handle.device, handle.pool().clone());
    let handle = Rc::new(handle);
    let (handle, _stale) = OWNED
        .try_with(|owned| {
            let owned = &mut *owned.borrow_mut();
            if let Some(first) = find(owned, pool, device) {
                // Creating the handle has created another one of the same pool: the first one stays, this one is
                // returned.
                return (first, Vec::new());
            }
            let stale: Vec<Owned> = owned.extract_if(.., |entry| entry.alive.strong_count() == 0).collect();
            owned.push(Owned { pool, device, handle: Rc::<Acquired<H>>::clone(&handle), alive });
            (ThreadHandle(Rc::clone(&handle)), stale)
        })
        // Without a list it is returned with the last ThreadHandle.
        .unwrap_or_else(|_| (ThreadHandle(Rc::clone(&handle)), Vec::new()));
    handle
}

/// Returns the thread's handles of a pool.
pub(super) fn release(pool: PoolKey) {
    let released: Vec<Owned> = OWNED
        .try_with(|owned| owned.borrow_mut().extract_if(.., |entry| entry.pool == pool).collect())
        .unwrap_or_default();
    drop(released);
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use warpool_driver::sim::{SimConfig, SimDriver};

    use super::super::{HandlePool, LibraryKind};
    use super::*;
    use crate::{Device, Instance, Result};

    struct Plain;

    /// A handle whose destructor borrows the list.
    struct BorrowsList;

    impl Drop for BorrowsList {
        fn drop(&mut self) {
            let _ = OWNED.try_with(|owned| drop(owned.borrow_mut()));
        }
    }

    impl LibraryKind for Plain {
        type Handle = BorrowsList;

        fn name(&self) -> &'static str {
            "a library"
        }

        fn create(&self, _: &Device) -> Result<BorrowsList> {
            Ok(BorrowsList)
        }

        fn destroy(&self, _: &Device, _: &BorrowsList) -> Result<()> {
            Ok(())
        }
    }

    #[test]
    fn entries_of_dropped_pools_are_removed() {
        let listed = || OWNED.with(|owned| owned.borrow().len());
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
