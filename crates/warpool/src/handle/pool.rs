//! The pool: which thread gets which handle, and when handles are created and destroyed.
//!
//! No lock is held while the library is called, so a [`LibraryKind`] may use the pool there.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use warpool_driver::DeviceId;

use super::idle::{Acquired, Closed, IdleHandles, PoolKey};
use super::kind::LibraryKind;
use super::thread::{self, ThreadHandle};
use crate::{Device, Error, Instance, Result};

/// The handles of one library, for all devices of an [`Instance`]. Cheap to clone; clones share one pool.
///
/// Dropping the last clone destroys nothing; [`close`](Self::close) does.
pub struct HandlePool<K: LibraryKind> {
    shared: Arc<Shared<K>>,
}

struct Shared<K: LibraryKind> {
    key: PoolKey,
    instance: Instance,
    kind: K,
    handles: Arc<IdleHandles<K::Handle>>,
}

impl<K: LibraryKind> HandlePool<K> {
    /// An empty pool. Loads nothing.
    #[must_use]
    pub fn new(instance: &Instance, kind: K) -> Self {
        let handles = Arc::new(IdleHandles::new(instance.device_count()));
        Self { shared: Arc::new(Shared { key: PoolKey::new(), instance: instance.clone(), kind, handles }) }
    }

    /// The calling thread's handle for `device`: the same at every call; from the second call on, without a lock.
    #[inline]
    pub fn current(&self, device: &Device) -> Result<ThreadHandle<K::Handle>> {
        // Devices of another Instance have the same ids.
        if self.shared.instance == *device.instance()
            && let Some(handle) = self.owned(device.id())
        {
            return Ok(handle);
        }
        self.first_of_thread(device)
    }

    /// The handle that the calling thread already owns, for a device of this pool's [`Instance`]. `None` if the pool is
    /// closed.
    #[inline]
    pub(crate) fn owned(&self, device: DeviceId) -> Option<ThreadHandle<K::Handle>> {
        if self.shared.handles.is_closed() { None } else { thread::get(self.shared.key, device) }
    }

    /// The calling thread's first handle for `device`.
    #[cold]
    fn first_of_thread(&self, device: &Device) -> Result<ThreadHandle<K::Handle>> {
        if thread::is_ending() {
            return Err(Error::ThreadEnding);
        }
        Ok(thread::own(self.shared.key, self.acquire(device)?))
    }

    /// Leases a handle that no thread owns, until the lease is dropped.
    pub fn lease(&self, device: &Device) -> Result<HandleLease<K>> {
        Ok(HandleLease { handle: self.acquire(device)?, pool: self.clone() })
    }

    /// How many handles of `device` there are, in use and idle.
    #[must_use]
    pub fn alive(&self, device: &Device) -> usize {
        self.check(device).map_or(0, |id| self.shared.handles.alive(id))
    }

    /// How many of them are idle.
    #[must_use]
    pub fn idle(&self, device: &Device) -> usize {
        let mut count = 0;
        self.for_each_idle(device, |_| count += 1);
        count
    }

    /// Visits the idle handles of `device`, the next to be reused last. The device's list is locked meanwhile: `visit`
    /// must not use the pool.
    pub(crate) fn for_each_idle(&self, device: &Device, visit: impl FnMut(&K::Handle)) {
        if let Ok(id) = self.check(device) {
            self.shared.handles.for_each_idle(id, visit);
        }
    }

    /// Destroys the idle handles of `device`, and returns how many. After a failure it continues, and returns the first
    /// error; handles that could not be destroyed, for example while a stream of the device is capturing, stay.
    pub fn trim(&self, device: &Device) -> Result<usize> {
        self.check(device)?;
        self.destroy_idle(device)
    }

    /// Destroys the idle handles and those of the calling thread, and closes the pool: it returns no more handles.
    /// Handles that are still in use, and those of other threads, keep working, and are leaked when they are returned.
    /// After a failure it continues, and returns the first error; closing another clone retries the handles that could
    /// not be destroyed.
    pub fn close(self) -> Result<()> {
        self.shared.instance.expect_own_process("close")?;
        thread::release(self.shared.key);
        self.shared.handles.close();
        let mut outcome = Ok(());
        for device in self.shared.instance.devices() {
            outcome = outcome.and(self.destroy_idle(&device).map(drop));
        }
        outcome
    }

    /// The idle handle that was returned last, or a new one.
    fn acquire(&self, device: &Device) -> Result<Acquired<K::Handle>> {
        let id = self.check(device)?;
        let Shared { kind, handles, .. } = &*self.shared;
        let closed = || Error::HandlePoolClosed { library: kind.name() };
        if let Some(handle) = handles.acquire(id).map_err(|Closed| closed())? {
            return Ok(handle);
        }
        handles.add(id, kind.create(device)?).map_err(|handle| {
            // The pool was closed while the handle was being created: that is the error to return, even if the
            // destruction fails.
            if kind.destroy(device, &handle).is_err() {
                handles.put_back(id, vec![handle]);
            }
            closed()
        })
    }

    fn destroy_idle(&self, device: &Device) -> Result<usize> {
        let Shared { kind, handles, .. } = &*self.shared;
        let idle = handles.take_all(device.id());
        let (mut outcome, mut undestroyed) = (Ok(idle.len()), Vec::new());
        for handle in idle {
            if let Err(error) = kind.destroy(device, &handle) {
                undestroyed.push(handle);
                outcome = outcome.and(Err(error));
            }
        }
        handles.put_back(device.id(), undestroyed);
        outcome
    }

    /// The id of a device; fails unless it belongs to the pool's `Instance`.
    fn check(&self, device: &Device) -> Result<DeviceId> {
        self.shared.instance.expect_same(device.instance(), "the device")?;
        self.shared.instance.expect_own_process("library handle")?;
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

/// A handle that may move between threads; dropping the lease returns it without a library call.
pub struct HandleLease<K: LibraryKind> {
    // Dropped before the pool, so that it can be returned.
    handle: Acquired<K::Handle>,
    pool: HandlePool<K>,
}

impl<K: LibraryKind> Deref for HandleLease<K> {
    type Target = K::Handle;

    fn deref(&self) -> &K::Handle {
        &self.handle
    }
}

impl<K: LibraryKind> fmt::Debug for HandleLease<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "lease of a handle of {} of {}", self.pool.shared.kind.name(), self.handle.device)
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
    fn a_repeated_fetch_takes_no_lock() {
        let instance = Instance::new(Arc::new(SimDriver::new(SimConfig::default()))).unwrap();
        let device = instance.device(0).unwrap();
        let pool = HandlePool::new(&instance, Cusparse);
        drop(pool.lease(&device).unwrap());
        let (to_worker, requests) = mpsc::channel();
        let (to_main, ids) = mpsc::channel();
        thread::scope(|scope| {
            scope.spawn(|| {
                let requests = requests;
                for () in requests {
                    to_main.send(pool.current(&device).unwrap().id()).unwrap();
                }
            });
            let fetch = || {
                to_worker.send(()).unwrap();
                ids.recv_timeout(Duration::from_secs(60)).expect("a fetch without a lock")
            };
            let first = fetch();
            drop(pool.lease(&device).unwrap());
            let mut visited = 0;
            pool.for_each_idle(&device, |idle| {
                visited += 1;
                assert_ne!(idle.id(), first);
                assert_eq!(fetch(), first);
            });
            assert_eq!(visited, 1);
            drop(to_worker);
        });
    }

    #[test]
    fn a_device_of_another_instance_is_an_error() {
        let instance =
            |devices| Instance::new(Arc::new(SimDriver::new(SimConfig::default().with_devices(devices)))).unwrap();
        let (own, foreign) = (instance(1), instance(2));
        let pool = HandlePool::new(&own, Cublas);
        drop(pool.lease(&own.device(0).unwrap()).unwrap());
        pool.current(&own.device(0).unwrap()).unwrap();
        for device in foreign.devices() {
            let error = Error::ForeignInstance { object: "the device" };
            assert_eq!(pool.current(&device).err(), Some(error.clone()));
            assert_eq!(pool.lease(&device).err(), Some(error.clone()));
            assert_eq!(pool.trim(&device), Err(error));
            assert_eq!((pool.alive(&device), pool.idle(&device)), (0, 0));
            pool.for_each_idle(&device, |_| panic!("of another Instance"));
        }
    }
}
