//! The pool: who gets which handle, and how handles are made and unmade.
//!
//! No lock is held while the library is called, so [`LibraryKind`]s may do what they like there, also use the pool.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use warpool_driver::DeviceId;

use super::LibraryKind;
use super::shelf::{Closed, Loan, Shelves};
use super::thread::{self, ThreadHandle};
use crate::{Device, Error, Instance, Result};

/// The handles of one library, for all devices of a [`Instance`]. Cheap to clone; clones are the same pool.
///
/// Dropping the last clone destroys nothing; [`close`](Self::close) does.
pub struct HandlePool<K: LibraryKind> {
    shared: Arc<Shared<K>>,
}

struct Shared<K: LibraryKind> {
    key: PoolKey,
    instance: Instance,
    kind: K,
    shelves: Arc<Shelves<K::Handle>>,
}

/// Which pool. Never reused in a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PoolKey(u64);

impl<K: LibraryKind> HandlePool<K> {
    /// An empty pool. Loads nothing.
    #[must_use]
    pub fn new(instance: &Instance, kind: K) -> Self {
        static NEXT_KEY: AtomicU64 = AtomicU64::new(0);
        let key = PoolKey(NEXT_KEY.fetch_add(1, Ordering::Relaxed));
        let shelves = Arc::new(Shelves::new(instance.device_count()));
        Self { shared: Arc::new(Shared { key, instance: instance.clone(), kind, shelves }) }
    }

    /// The calling thread's handle for `device`: from its first use on always the same, and then without a lock.
    #[inline]
    pub fn current(&self, device: &Device) -> Result<ThreadHandle<K::Handle>> {
        // Another Instance's devices have the same numbers.
        if self.shared.instance == *device.instance()
            && let Some(handle) = self.held(device.id())
        {
            return Ok(handle);
        }
        self.first(device)
    }

    /// What the calling thread holds already, for a device of this pool's [`Instance`]. A closed pool gives out nothing, not
    /// even that.
    #[inline]
    pub(crate) fn held(&self, device: DeviceId) -> Option<ThreadHandle<K::Handle>> {
        if self.shared.shelves.is_closed() { None } else { thread::held(self.shared.key, device) }
    }

    /// The calling thread's first handle for `device`.
    #[cold]
    fn first(&self, device: &Device) -> Result<ThreadHandle<K::Handle>> {
        if thread::is_past_holding() {
            return Err(Error::ThreadEnding);
        }
        let loan = self.lend(device)?;
        Ok(thread::hold(self.shared.key, loan))
    }

    /// A handle that belongs to nobody's thread, until the lease is dropped.
    pub fn lease(&self, device: &Device) -> Result<HandleLease<K>> {
        Ok(HandleLease { loan: self.lend(device)?, pool: self.clone() })
    }

    /// How many handles of `device` there are, held and idle.
    #[must_use]
    pub fn alive(&self, device: &Device) -> usize {
        self.known(device).map_or(0, |id| self.shared.shelves.alive(id))
    }

    /// How many of them are idle.
    #[must_use]
    pub fn idle(&self, device: &Device) -> usize {
        let mut count = 0;
        self.for_each_idle(device, |_| count += 1);
        count
    }

    /// Shows the idle handles of `device`, the next to go out last. The shelf is locked meanwhile: no handle can go out
    /// or come back, and a visitor that asked the pool for one would wait for ever.
    pub(crate) fn for_each_idle(&self, device: &Device, visit: impl FnMut(&K::Handle)) {
        if let Ok(id) = self.known(device) {
            self.shared.shelves.for_each_idle(id, visit);
        }
    }

    /// Destroys the idle handles of `device`, and returns how many. Goes on after a failure and reports the first; what
    /// could not be destroyed, as while a stream of the device captures, stays.
    pub fn trim(&self, device: &Device) -> Result<usize> {
        self.known(device)?;
        self.destroy_idle(device)
    }

    /// Destroys the idle handles, and the calling thread's, and gives out no more. Handles that are still in use, and
    /// those of other threads, keep working, and are leaked in silence when they are given up. Goes on after a failure
    /// and reports the first; closing another clone tries again what could not be destroyed.
    pub fn close(self) -> Result<()> {
        thread::give_up(self.shared.key);
        self.shared.shelves.close();
        let mut outcome = Ok(());
        for device in self.shared.instance.devices() {
            outcome = outcome.and(self.destroy_idle(&device).map(drop));
        }
        outcome
    }

    /// The idle handle that came back last, or a new one.
    fn lend(&self, device: &Device) -> Result<Loan<K::Handle>> {
        let id = self.known(device)?;
        let Shared { kind, shelves, .. } = &*self.shared;
        let closed = || Error::HandlePoolClosed { library: kind.name() };
        if let Some(loan) = shelves.lend(id).map_err(|Closed| closed())? {
            return Ok(loan);
        }
        shelves.lend_new(id, kind.create(device)?).map_err(|handle| {
            // Closed while it was being made. That is the error to report, whatever becomes of this one.
            if kind.destroy(device, &handle).is_err() {
                shelves.put_back(id, vec![handle]);
            }
            closed()
        })
    }

    fn destroy_idle(&self, device: &Device) -> Result<usize> {
        let Shared { kind, shelves, .. } = &*self.shared;
        let idle = shelves.empty(device.id());
        let (mut outcome, mut left) = (Ok(idle.len()), Vec::new());
        for handle in idle {
            if let Err(error) = kind.destroy(device, &handle) {
                left.push(handle);
                outcome = outcome.and(Err(error));
            }
        }
        shelves.put_back(device.id(), left);
        outcome
    }

    /// The number of a device of the pool's own `Instance`.
    fn known(&self, device: &Device) -> Result<DeviceId> {
        self.shared.instance.expect_same(device.instance(), "the device")?;
        Ok(device.id())
    }
}

impl<K: LibraryKind> Clone for HandlePool<K> {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared) }
    }
}

impl<K: LibraryKind> fmt::Debug for HandlePool<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "handles of {}", self.shared.kind.name())
    }
}

/// A handle that may go from thread to thread; dropping the lease gives it back without a library call.
pub struct HandleLease<K: LibraryKind> {
    // Before the pool: it goes back while there is one.
    loan: Loan<K::Handle>,
    pool: HandlePool<K>,
}

impl<K: LibraryKind> Deref for HandleLease<K> {
    type Target = K::Handle;

    fn deref(&self) -> &K::Handle {
        &self.loan
    }
}

impl<K: LibraryKind> fmt::Debug for HandleLease<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "lease of a handle of {} of {}", self.pool.shared.kind.name(), self.loan.device)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;

    use warpool_driver::sim::{SimConfig, SimDriver};

    use super::super::{Cublas, Cusparse};
    use super::*;

    #[test]
    fn a_repeated_fetch_does_not_wait_for_the_shelf() {
        let instance = Instance::new(Arc::new(SimDriver::new(SimConfig::default()))).unwrap();
        let device = instance.device(0).unwrap();
        let pool = HandlePool::new(&instance, Cusparse);
        drop(pool.lease(&device).unwrap());
        let (to_worker, orders) = mpsc::channel();
        let (to_us, answers) = mpsc::channel();
        thread::scope(|scope| {
            scope.spawn(|| {
                let orders = orders;
                for () in orders {
                    to_us.send(pool.current(&device).unwrap().id()).unwrap();
                }
            });
            let ask = || {
                to_worker.send(()).unwrap();
                answers.recv_timeout(Duration::from_secs(60)).expect("a fetch that takes no lock")
            };
            let first = ask();
            drop(pool.lease(&device).unwrap());
            let mut visited = 0;
            pool.for_each_idle(&device, |idle| {
                visited += 1;
                assert_ne!(idle.id(), first);
                assert_eq!(ask(), first);
            });
            assert_eq!(visited, 1);
            drop(to_worker);
        });
    }

    #[test]
    fn a_foreign_device_has_nothing_here() {
        let instance =
            |devices| Instance::new(Arc::new(SimDriver::new(SimConfig::default().with_devices(devices)))).unwrap();
        let (own, foreign) = (instance(1), instance(2));
        let pool = HandlePool::new(&own, Cublas);
        drop(pool.lease(&own.device(0).unwrap()).unwrap());
        pool.current(&own.device(0).unwrap()).unwrap();
        for device in foreign.devices() {
            let refused = Error::ForeignInstance { object: "the device" };
            assert_eq!(pool.current(&device).err(), Some(refused.clone()));
            assert_eq!(pool.lease(&device).err(), Some(refused.clone()));
            assert_eq!(pool.trim(&device), Err(refused));
            assert_eq!((pool.alive(&device), pool.idle(&device)), (0, 0));
            pool.for_each_idle(&device, |_| panic!("of another Instance"));
        }
    }
}
