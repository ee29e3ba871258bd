//! The elastic memory that C callers have reserved, by its first address.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use warpool::memory::elastic::ElasticMemory;
use warpool_driver::DevicePtr;

use crate::error::{Error, Result};

#[derive(Debug, Default)]
pub(crate) struct ProcessElastic(Mutex<BTreeMap<u64, Entry>>);

#[derive(Debug)]
struct Entry {
    memory: Arc<ElasticMemory>,
    /// Whether a tensor owns it.
    has_tensor: bool,
}

impl ProcessElastic {
    fn with<R>(&self, act: impl FnOnce(&mut BTreeMap<u64, Entry>) -> R) -> R {
        act(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Adds elastic memory. Returns its first address.
    pub(crate) fn add(&self, memory: Arc<ElasticMemory>) -> DevicePtr {
        let ptr = memory.ptr();
        self.with(|all| all.insert(ptr.0, Entry { memory, has_tensor: false }));
        ptr
    }

    /// The elastic memory that begins at an address.
    pub(crate) fn at(&self, ptr: DevicePtr) -> Result<Arc<ElasticMemory>> {
        self.with(|all| all.get(&ptr.0).map(|entry| Arc::clone(&entry.memory))).ok_or(Error::NotElastic { ptr })
    }

    /// The same, for a tensor that owns it from here on.
    pub(crate) fn take_for_tensor(&self, ptr: DevicePtr) -> Result<Arc<ElasticMemory>> {
        self.with(|all| {
            let entry = all.get_mut(&ptr.0).ok_or(Error::NotElastic { ptr })?;
            if std::mem::replace(&mut entry.has_tensor, true) {
                return Err(Error::ElasticHasTensor { ptr });
            }
            Ok(Arc::clone(&entry.memory))
        })
    }

    /// Returns its memory and addresses.
    pub(crate) fn release(&self, ptr: DevicePtr) -> Result<()> {
        let entry = self.with(|all| all.remove(&ptr.0)).ok_or(Error::NotElastic { ptr })?;
        close(entry.memory)
    }

    /// The same of memory that a tensor owned.
    pub(crate) fn release_tensor(&self, memory: Arc<ElasticMemory>) -> Result<()> {
        let ptr = memory.ptr();
        let removed = self.with(|all| {
            // It may have been released before.
            let is_same = all.get(&ptr.0).is_some_and(|entry| Arc::ptr_eq(&entry.memory, &memory));
            if is_same { all.remove(&ptr.0) } else { None }
        });
        drop(removed);
        close(memory)
    }
}

/// If another thread is at it, that one drops it.
fn close(memory: Arc<ElasticMemory>) -> Result<()> {
    match Arc::try_unwrap(memory) {
        Ok(memory) => Ok(memory.close()?),
        Err(_) => Ok(()),
    }
}
