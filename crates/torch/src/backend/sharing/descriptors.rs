//! Mapped memory as file descriptors, as PyTorch's own allocator shares it: a process keeps them open, and another one
//! duplicates them, for which it needs ptrace permission for that process.
//!
//! An open descriptor keeps its memory alive. So the descriptors of a freed block are closed before the allocator
//! reserves or releases memory, and after many further blocks were shared.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use warpool::memory::raw::MappedPart;
use warpool_driver::{DevicePtr, Driver, PhysicalId};

use super::handle::DescriptorHandle;
use super::server::PageServer;
use crate::allocator::PartsOf;
use crate::error::{Error, Result};

/// The maximum number of kept descriptors; a process may have 1024 by default. Memory shared beyond that can be opened
/// only by processes with Warpool.
const KEPT_MAX: usize = 256;
/// How many blocks are shared before the first search for freed ones.
const BLOCKS_MIN: usize = 64;

/// The descriptors that this process keeps.
#[derive(Debug, Default)]
pub(super) struct KeptDescriptors {
    kept: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    descriptors: BTreeMap<PhysicalId, OwnedFd>,
    /// The shared blocks, and below their number after the last search.
    blocks: BTreeMap<DevicePtr, Vec<PhysicalId>>,
    blocks_checked: usize,
}

impl KeptDescriptors {
    /// The parts of the block at `ptr` in PyTorch's form; `None` if they are of several sizes, or too many.
    pub(super) fn keep(
        &self,
        driver: &dyn Driver,
        version: u8,
        ptr: DevicePtr,
        parts: &[MappedPart],
        parts_of: &PartsOf,
    ) -> Result<Option<DescriptorHandle>> {
        let Some(part_bytes) = parts.first().map(|part| part.bytes) else { return Ok(None) };
        if parts.len() > KEPT_MAX || parts.iter().any(|part| part.bytes != part_bytes) {
            return Ok(None);
        }
        let mut kept = self.lock();
        if kept.blocks.len() >= BLOCKS_MIN.max(2 * kept.blocks_checked) || !kept.has_room(parts) {
            kept.close_freed(parts_of);
        }
        if !kept.has_room(parts) {
            return Ok(None);
        }
        let mut descriptors = Vec::with_capacity(parts.len());
        for part in parts {
            // The same descriptors each time: PyTorch identifies opened memory by its handle.
            let descriptor = match kept.descriptors.entry(part.physical) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(place) => place.insert(PageServer::export(driver, part.physical)?),
            };
            descriptors.push(descriptor.as_raw_fd());
        }
        kept.blocks.insert(ptr, parts.iter().map(|part| part.physical).collect());
        Ok(Some(DescriptorHandle { version, process: std::process::id(), part_bytes, descriptors }))
    }

    /// Closes descriptors of blocks that are freed.
    pub(super) fn close_freed(&self, parts_of: &PartsOf) {
        self.lock().close_freed(parts_of);
    }

    #[cfg(test)]
    pub(super) fn count(&self) -> usize {
        self.lock().descriptors.len()
    }

    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Kept {
    fn has_room(&self, parts: &[MappedPart]) -> bool {
        let new = parts.iter().filter(|part| !self.descriptors.contains_key(&part.physical)).count();
        self.descriptors.len() + new <= KEPT_MAX
    }

    fn close_freed(&mut self, parts_of: &PartsOf) {
        self.blocks.retain(|&ptr, shared| {
            let parts = parts_of(ptr);
            parts.iter().map(|part| part.physical).eq(shared.iter().copied())
        });
        let used: BTreeSet<PhysicalId> = self.blocks.values().flatten().copied().collect();
        self.descriptors.retain(|physical, _| used.contains(physical));
        self.blocks_checked = self.blocks.len();
    }
}

/// Another process whose descriptors are taken.
pub(super) struct OtherProcess {
    descriptor: OwnedFd,
    process: u32,
}

impl OtherProcess {
    pub(super) fn open(process: u32) -> Result<Self> {
        let gone = |source: rustix::io::Errno| Error::SharedProcess { process, source: source.into() };
        let id = i32::try_from(process).ok().and_then(Pid::from_raw).ok_or_else(|| gone(rustix::io::Errno::SRCH))?;
        Ok(Self { descriptor: pidfd_open(id, PidfdFlags::empty()).map_err(gone)?, process })
    }

    /// A copy of one of its descriptors.
    pub(super) fn descriptor(&self, number: i32) -> Result<OwnedFd> {
        let process = self.process;
        pidfd_getfd(&self.descriptor, number, PidfdGetfdFlags::empty()).map_err(|source| match source {
            rustix::io::Errno::BADF => Error::SharedMemoryGone { process },
            rustix::io::Errno::PERM => Error::SharedDescriptor { process },
            source => Error::SharedProcess { process, source: source.into() },
        })
    }
}
