//! The handles of a pool: which are idle, per device, and how one in use is returned.
//!
//! No library calls here: handles are created and destroyed in `pool.rs`. Each device has a lock, a leaf, held while
//! handles are moved. No handle is dropped under it: dropping one may run user code.

use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

use warpool_driver::DeviceId;
use warpool_driver::fork::Origin;

use crate::lock;

/// Identifies a pool. Never reused in a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PoolKey(u64);

impl PoolKey {
    pub(super) fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// The handles of one pool.
pub(super) struct IdleHandles<H> {
    /// Set once and never cleared. Read under a device's lock when handles are moved, and without it when one is
    /// already owned.
    closed: AtomicBool,
    by_device: Box<[Mutex<DeviceHandles<H>>]>,
    origin: Origin,
}

/// The handles of one device.
struct DeviceHandles<H> {
    /// The last one returned is reused first.
    idle: Vec<H>,
    /// How many there are, idle and in use.
    alive: usize,
}

/// The pool is closed.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Closed;

impl<H> IdleHandles<H> {
    pub(super) fn new(devices: u32) -> Self {
        let empty = |_| Mutex::new(DeviceHandles { idle: Vec::new(), alive: 0 });
        let by_device = (0..devices).map(empty).collect();
        Self { closed: AtomicBool::new(false), by_device, origin: Origin::here() }
    }

    /// Read without a lock: a thread that is not synchronized with the closing one may see it later.
    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Relaxed)
    }

    /// Closes the pool: from now on handles are only returned, and leaked. Idle ones stay until
    /// [`take_all`](Self::take_all).
    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
    }

    /// The idle handle that was returned last, if there is one.
    pub(super) fn acquire(self: &Arc<Self>, device: DeviceId) -> Result<Option<Acquired<H>>, Closed> {
        let mut handles = lock(self.of(device));
        if self.is_closed() {
            return Err(Closed);
        }
        Ok(handles.idle.pop().map(|handle| self.acquired(device, handle)))
    }

    /// Counts a handle that was just created. If the pool was closed meanwhile, returns the handle to be destroyed.
    pub(super) fn add(self: &Arc<Self>, device: DeviceId, handle: H) -> Result<Acquired<H>, H> {
        let mut handles = lock(self.of(device));
        if self.is_closed() {
            return Err(handle);
        }
        handles.alive += 1;
        Ok(self.acquired(device, handle))
    }

    /// Takes all idle handles of a device, to be destroyed.
    pub(super) fn take_all(&self, device: DeviceId) -> Vec<H> {
        let mut handles = lock(self.of(device));
        handles.alive -= handles.idle.len();
        std::mem::take(&mut handles.idle)
    }

    /// Puts back handles that could not be destroyed, even into a closed pool. They are reused last.
    pub(super) fn put_back(&self, device: DeviceId, undestroyed: Vec<H>) {
        let mut handles = lock(self.of(device));
        handles.alive += undestroyed.len();
        handles.idle.splice(0..0, undestroyed);
    }

    /// How many handles of a device there are, idle and in use.
    pub(super) fn alive(&self, device: DeviceId) -> usize {
        lock(self.of(device)).alive
    }

    /// Visits the idle handles of a device, under its lock.
    pub(super) fn for_each_idle(&self, device: DeviceId, visit: impl FnMut(&H)) {
        lock(self.of(device)).idle.iter().for_each(visit);
    }

    fn acquired(self: &Arc<Self>, device: DeviceId, handle: H) -> Acquired<H> {
        Acquired { handle: Some(handle), device, pool: Arc::downgrade(self) }
    }

    /// `device` belongs to the pool's `Instance`: callers have checked it.
    fn of(&self, device: DeviceId) -> &Mutex<DeviceHandles<H>> {
        &self.by_device[device.0 as usize]
    }

    fn release(&self, device: DeviceId, handle: H) {
        if !self.origin.is_here() {
            // The parent process owns it, and the lock of the list may be held forever.
            std::mem::forget(handle);
            return;
        }
        let mut handles = lock(self.of(device));
        // Closing sets the flag first and locks each device afterwards: either `take_all` finds the handle, or the flag
        // is seen here.
        if self.is_closed() {
            handles.alive -= 1;
            drop(handles);
            // Leaked without a warning: the process may be exiting.
            drop(handle);
        } else {
            handles.idle.push(handle);
        }
    }
}

/// A handle in use. Dropping it returns it to its pool, or leaks it if the pool is closed or dropped. Does not keep the
/// pool alive.
pub(super) struct Acquired<H> {
    /// `Some` until the drop.
    handle: Option<H>,
    pub(super) device: DeviceId,
    pool: Weak<IdleHandles<H>>,
}

impl<H> Acquired<H> {
    pub(super) fn pool(&self) -> &Weak<IdleHandles<H>> {
        &self.pool
    }
}

impl<H> Deref for Acquired<H> {
    type Target = H;

    fn deref(&self) -> &H {
        self.handle.as_ref().expect("it has its handle until it is dropped")
    }
}

impl<H> Drop for Acquired<H> {
    fn drop(&mut self) {
        if let Some(pool) = self.pool.upgrade()
            && let Some(handle) = self.handle.take()
        {
            pool.release(self.device, handle);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEVICE: DeviceId = DeviceId(0);

    fn idle(handles: &IdleHandles<u32>) -> Vec<u32> {
        let mut seen = Vec::new();
        handles.for_each_idle(DEVICE, |&handle| seen.push(handle));
        seen
    }

    #[test]
    fn the_last_returned_handle_is_reused_first() {
        let handles = Arc::new(IdleHandles::new(1));
        let in_use: Vec<_> = (1..=3).map(|handle| handles.add(DEVICE, handle).ok().unwrap()).collect();
        assert_eq!((handles.alive(DEVICE), idle(&handles)), (3, vec![]));
        drop(in_use);
        assert_eq!((handles.alive(DEVICE), idle(&handles)), (3, vec![1, 2, 3]));
        let [three, two] = [(); 2].map(|()| handles.acquire(DEVICE).unwrap().unwrap());
        assert_eq!((*three, *two, idle(&handles)), (3, 2, vec![1]));
        drop(three);
        assert_eq!(**handles.acquire(DEVICE).unwrap().as_ref().unwrap(), 3);
    }

    #[test]
    fn a_closed_pool_keeps_idle_handles_and_leaks_returned_ones() {
        let handles = Arc::new(IdleHandles::new(1));
        let [idle_one, in_use] = [1, 2].map(|handle| handles.add(DEVICE, handle).ok().unwrap());
        drop(idle_one);
        handles.close();
        assert_eq!(handles.acquire(DEVICE).err(), Some(Closed));
        assert_eq!(handles.add(DEVICE, 3).err(), Some(3));
        assert_eq!((handles.alive(DEVICE), *in_use), (2, 2));
        drop(in_use);
        assert_eq!((handles.alive(DEVICE), handles.take_all(DEVICE)), (1, vec![1]));
        assert_eq!((handles.alive(DEVICE), idle(&handles)), (0, vec![]));
    }

    #[test]
    fn undestroyed_handles_are_reused_last_and_stay_in_a_closed_pool() {
        let handles = Arc::new(IdleHandles::new(1));
        drop([1, 2].map(|handle| handles.add(DEVICE, handle).ok().unwrap()));
        let taken = handles.take_all(DEVICE);
        drop(handles.add(DEVICE, 3).ok().unwrap());
        handles.put_back(DEVICE, taken);
        assert_eq!((handles.alive(DEVICE), idle(&handles)), (3, vec![1, 2, 3]));
        handles.close();
        let taken = handles.take_all(DEVICE);
        handles.put_back(DEVICE, taken);
        assert_eq!((handles.alive(DEVICE), idle(&handles)), (3, vec![1, 2, 3]));
    }

    #[test]
    fn a_handle_in_use_may_outlive_the_pool() {
        let handles = Arc::new(IdleHandles::new(1));
        let in_use = handles.add(DEVICE, 1).ok().unwrap();
        drop(handles);
        assert_eq!(*in_use, 1);
    }

    /// A handle whose destructor locks its own pool.
    struct LocksPool(Weak<IdleHandles<Self>>);

    impl Drop for LocksPool {
        fn drop(&mut self) {
            if let Some(handles) = self.0.upgrade() {
                assert_eq!(handles.alive(DEVICE), 0);
            }
        }
    }

    #[test]
    fn no_handle_is_dropped_under_the_lock() {
        let handles = Arc::new(IdleHandles::new(1));
        let in_use = handles.add(DEVICE, LocksPool(Arc::downgrade(&handles))).ok().unwrap();
        handles.close();
        drop(in_use); // a deadlock if it were
    }
}
