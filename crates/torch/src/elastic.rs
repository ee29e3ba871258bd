//! The elastic memory that C callers have reserved, by its first address.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use warpool::memory::elastic::ElasticMemory;
use warpool_driver::DevicePtr;

use crate::error::{Error, Result};

#[derive(Debug, Default)]
pub(crate) struct ProcessElastic(Mutex<BTreeMap<u64, Arc<ElasticMemory>>>);

impl ProcessElastic {
    fn with<R>(&self, act: impl FnOnce(&mut BTreeMap<u64, Arc<ElasticMemory>>) -> R) -> R {
        act(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Adds elastic memory. Returns its first address.
    pub(crate) fn add(&self, memory: Arc<ElasticMemory>) -> DevicePtr {
        let ptr = memory.ptr();
        self.with(|all| all.insert(ptr.0, memory));
        ptr
    }

    /// The elastic memory that begins at an address.
    pub(crate) fn at(&self, ptr: DevicePtr) -> Result<Arc<ElasticMemory>> {
        self.with(|all| all.get(&ptr.0).map(Arc::clone)).ok_or(Error::NotElastic { ptr })
    }

    /// Returns its memory and addresses.
    pub(crate) fn release(&self, ptr: DevicePtr) -> Result<()> {
        // Dropped without the lock.
        self.with(|all| all.remove(&ptr.0)).map(drop).ok_or(Error::NotElastic { ptr })
    }
}
