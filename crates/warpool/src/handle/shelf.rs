//! What a pool has: which handles are idle, device by device, and how one that was lent comes back.
//!
//! No library calls here: handles are made and unmade in `pool.rs`. Each shelf has a lock, a leaf, held for a few
//! moves, and no handle is dropped under it: a drop may be somebody's code.

use std::ops::Deref;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};

use warpool_driver::DeviceId;

use crate::lock;

/// The handles of one pool.
pub(super) struct Shelves<H> {
    /// Set once, for good. Whoever moves handles reads it under a shelf's lock; whoever has one already, without.
    closed: AtomicBool,
    by_device: Box<[Mutex<Shelf<H>>]>,
}

/// The handles of one device.
struct Shelf<H> {
    /// The last one returned goes out first.
    idle: Vec<H>,
    /// How many there are, idle and lent.
    alive: usize,
}

/// There are no handles any more.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Closed;

impl<H> Shelves<H> {
    pub(super) fn new(devices: u32) -> Self {
        let shelf = |_| Mutex::new(Shelf { idle: Vec::new(), alive: 0 });
        Self { closed: AtomicBool::new(false), by_device: (0..devices).map(shelf).collect() }
    }

    /// Without a lock. A thread that another one told about the closing sees it; one that was not told may see it
    /// later.
    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Relaxed)
    }

    /// From here on handles only come back, and those are leaked. What is idle stays for [`empty`](Self::empty) to
    /// take.
    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
    }

    /// Lends the idle handle that came back last, if there is one.
    pub(super) fn lend(self: &Arc<Self>, device: DeviceId) -> Result<Option<Loan<H>>, Closed> {
        let mut shelf = lock(self.shelf(device));
        if self.is_closed() {
            return Err(Closed);
        }
        Ok(shelf.idle.pop().map(|handle| self.loan(device, handle)))
    }

    /// Counts a handle that was just made, and lends it. A pool that was closed meanwhile gives it back to be unmade.
    pub(super) fn lend_new(self: &Arc<Self>, device: DeviceId, handle: H) -> Result<Loan<H>, H> {
        let mut shelf = lock(self.shelf(device));
        if self.is_closed() {
            return Err(handle);
        }
        shelf.alive += 1;
        Ok(self.loan(device, handle))
    }

    /// Takes all idle handles of a device, for good.
    pub(super) fn empty(&self, device: DeviceId) -> Vec<H> {
        let mut shelf = lock(self.shelf(device));
        shelf.alive -= shelf.idle.len();
        std::mem::take(&mut shelf.idle)
    }

    /// Takes back what was taken by [`empty`](Self::empty), or never lent, and could not be unmade; also when closed.
    /// It goes out last.
    pub(super) fn put_back(&self, device: DeviceId, handles: Vec<H>) {
        let mut shelf = lock(self.shelf(device));
        shelf.alive += handles.len();
        shelf.idle.splice(0..0, handles);
    }

    /// How many handles of a device there are, idle and lent.
    pub(super) fn alive(&self, device: DeviceId) -> usize {
        lock(self.shelf(device)).alive
    }

    /// Shows the idle handles of a device, under its lock.
    pub(super) fn for_each_idle(&self, device: DeviceId, visit: impl FnMut(&H)) {
        lock(self.shelf(device)).idle.iter().for_each(visit);
    }

    fn loan(self: &Arc<Self>, device: DeviceId, handle: H) -> Loan<H> {
        Loan { handle: Some(handle), device, home: Arc::downgrade(self) }
    }

    /// A device of the pool's own `Instance`: the callers have seen to it.
    fn shelf(&self, device: DeviceId) -> &Mutex<Shelf<H>> {
        &self.by_device[device.0 as usize]
    }

    fn take_back(&self, device: DeviceId, handle: H) {
        let mut shelf = lock(self.shelf(device));
        // Whoever closes sets the mark first and locks each shelf afterwards: a handle is put where `empty` will find
        // it, or the mark is seen.
        if self.is_closed() {
            shelf.alive -= 1;
            drop(shelf);
            // Leaked in silence, whatever the library had for it: this may be the end of the process.
            drop(handle);
        } else {
            shelf.idle.push(handle);
        }
    }
}

/// A handle that is out, and goes back when this is dropped: to its shelf, or, if the pool is closed or gone, nowhere.
/// It does not keep the pool.
pub(super) struct Loan<H> {
    /// There until the drop.
    handle: Option<H>,
    pub(super) device: DeviceId,
    home: Weak<Shelves<H>>,
}

impl<H> Loan<H> {
    pub(super) fn home(&self) -> &Weak<Shelves<H>> {
        &self.home
    }
}

impl<H> Deref for Loan<H> {
    type Target = H;

    fn deref(&self) -> &H {
        self.handle.as_ref().expect("a loan has its handle until it is dropped")
    }
}

impl<H> Drop for Loan<H> {
    fn drop(&mut self) {
        if let Some(home) = self.home.upgrade()
            && let Some(handle) = self.handle.take()
        {
            home.take_back(self.device, handle);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEVICE: DeviceId = DeviceId(0);

    fn idle(shelves: &Shelves<u32>) -> Vec<u32> {
        let mut seen = Vec::new();
        shelves.for_each_idle(DEVICE, |&handle| seen.push(handle));
        seen
    }

    #[test]
    fn the_last_one_back_goes_out_first() {
        let shelves = Arc::new(Shelves::new(1));
        let loans: Vec<_> = (1..=3).map(|handle| shelves.lend_new(DEVICE, handle).ok().unwrap()).collect();
        assert_eq!((shelves.alive(DEVICE), idle(&shelves)), (3, vec![]));
        drop(loans);
        assert_eq!((shelves.alive(DEVICE), idle(&shelves)), (3, vec![1, 2, 3]));
        let [three, two] = [(); 2].map(|()| shelves.lend(DEVICE).unwrap().unwrap());
        assert_eq!((*three, *two, idle(&shelves)), (3, 2, vec![1]));
        drop(three);
        assert_eq!(**shelves.lend(DEVICE).unwrap().as_ref().unwrap(), 3);
    }

    #[test]
    fn a_closed_pool_keeps_what_is_idle_and_leaks_what_comes_back() {
        let shelves = Arc::new(Shelves::new(1));
        let [idle_one, lent] = [1, 2].map(|handle| shelves.lend_new(DEVICE, handle).ok().unwrap());
        drop(idle_one);
        shelves.close();
        assert_eq!(shelves.lend(DEVICE).err(), Some(Closed));
        assert_eq!(shelves.lend_new(DEVICE, 3).err(), Some(3));
        assert_eq!((shelves.alive(DEVICE), *lent), (2, 2));
        drop(lent);
        assert_eq!((shelves.alive(DEVICE), shelves.empty(DEVICE)), (1, vec![1]));
        assert_eq!((shelves.alive(DEVICE), idle(&shelves)), (0, vec![]));
    }

    #[test]
    fn what_could_not_be_unmade_goes_out_last_and_stays_in_a_closed_pool() {
        let shelves = Arc::new(Shelves::new(1));
        drop([1, 2].map(|handle| shelves.lend_new(DEVICE, handle).ok().unwrap()));
        let taken = shelves.empty(DEVICE);
        drop(shelves.lend_new(DEVICE, 3).ok().unwrap());
        shelves.put_back(DEVICE, taken);
        assert_eq!((shelves.alive(DEVICE), idle(&shelves)), (3, vec![1, 2, 3]));
        shelves.close();
        let taken = shelves.empty(DEVICE);
        shelves.put_back(DEVICE, taken);
        assert_eq!((shelves.alive(DEVICE), idle(&shelves)), (3, vec![1, 2, 3]));
    }

    #[test]
    fn a_loan_may_outlive_the_shelves() {
        let shelves = Arc::new(Shelves::new(1));
        let loan = shelves.lend_new(DEVICE, 1).ok().unwrap();
        drop(shelves);
        assert_eq!(*loan, 1);
    }

    /// A handle whose drop looks at its own pool.
    struct Looks(Weak<Shelves<Self>>);

    impl Drop for Looks {
        fn drop(&mut self) {
            if let Some(shelves) = self.0.upgrade() {
                assert_eq!(shelves.alive(DEVICE), 0);
            }
        }
    }

    #[test]
    fn no_handle_is_dropped_under_the_lock() {
        let shelves = Arc::new(Shelves::new(1));
        let lent = shelves.lend_new(DEVICE, Looks(Arc::downgrade(&shelves))).ok().unwrap();
        shelves.close();
        drop(lent); // would wait for ever
    }
}
