//! One device of an [`UncachedAllocator`](super::UncachedAllocator): the allocation table under its lock, and the
//! private pools. The lock is not held during calls of the driver, the source or an observer.

use std::ops::Deref;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use warpool_driver::{DeviceId, DevicePtr, RawHandle, StreamId};

use super::pools::DevicePools;
use super::source::Reserved;
use super::table::AllocationTable;
use crate::memory::core::{AllocatorCore, DeviceCore};
use crate::memory::report::{EntryDetails, StackIds};
use crate::memory::stream_fence::StreamFences;
use crate::memory::{Allocation, HistoryOptions, MemPoolId, RawStream, Snapshot, SnapshotOptions};
use crate::{Device, Result, lock};

pub(super) struct UncachedDevice {
    core: DeviceCore,
    table: Mutex<AllocationTable>,
    /// Whether there are entries for trackers, and whether freed blocks wait for a thread to release them. Updated
    /// after each step, so that a call without such work takes no lock.
    has_untracked: AtomicBool,
    has_pending: AtomicBool,
    pub(super) pools: DevicePools,
    /// Fences of freed blocks, by serial.
    pub(super) fences: Mutex<StreamFences<u64>>,
}

impl Deref for UncachedDevice {
    type Target = DeviceCore;

    #[inline]
    fn deref(&self) -> &DeviceCore {
        &self.core
    }
}

impl UncachedDevice {
    pub(super) fn new(shared: &Arc<AllocatorCore>, device: &Device) -> Self {
        Self {
            core: DeviceCore::new(shared, device),
            table: Mutex::new(AllocationTable::new(device.id())),
            has_untracked: AtomicBool::new(false),
            has_pending: AtomicBool::new(false),
            pools: DevicePools::new(device.id()),
            fences: Mutex::default(),
        }
    }

    /// One step under the lock. Trackers see its entries when [`report`](Self::report) is called.
    pub(super) fn with<R>(&self, step: impl FnOnce(&mut AllocationTable) -> R) -> R {
        let mut table = lock(&self.table);
        let result = step(&mut table);
        publish(&self.has_untracked, table.recorder.has_unreported());
        publish(&self.has_pending, table.has_pending());
        result
    }

    /// Whether freed blocks wait for a thread to release them.
    #[inline]
    pub(super) fn has_pending(&self) -> bool {
        self.has_pending.load(Ordering::Acquire)
    }

    /// Whether there are entries that trackers have not seen.
    #[inline]
    pub(super) fn has_untracked(&self) -> bool {
        self.has_untracked.load(Ordering::Acquire)
    }

    /// Calls the trackers with the entries that they have not seen, without the lock. Does nothing while the thread is
    /// unwinding: the next call does it.
    pub(super) fn report(&self) {
        if !self.has_untracked() || std::thread::panicking() {
            return;
        }
        let entries = self.with(|table| table.recorder.take_unreported());
        if !entries.is_empty() {
            self.observers().track(self.id, &entries);
        }
    }

    pub(super) fn find(&self, ptr: DevicePtr) -> Option<Allocation> {
        lock(&self.table).find(ptr)
    }

    /// A stream with its driver handle, and its device. Cached.
    pub(super) fn raw_stream(&self, stream: StreamId) -> Result<(RawStream, DeviceId)> {
        let cached = lock(&self.table).stream_handle(stream);
        let (raw, device) = match cached {
            Some(handle) => handle,
            None => {
                let handle = self.driver().stream_handle(stream)?;
                lock(&self.table).cache_stream_handle(stream, (handle.raw.0, handle.device));
                (handle.raw.0, handle.device)
            }
        };
        Ok((RawStream { id: stream, raw: RawHandle(raw) }, device))
    }

    pub(super) fn record_history(&self, options: Option<&HistoryOptions>) {
        self.with(|table| table.recorder.history.set(options.cloned()));
        self.history_flags.set(options);
    }

    /// Adds the device to a snapshot.
    pub(super) fn add_to(
        &self,
        snapshot: &mut Snapshot,
        stacks: &mut StackIds,
        SnapshotOptions { pool, traces }: SnapshotOptions,
        reserved: Option<Reserved>,
        details: &EntryDetails,
    ) {
        let history = self.with(|table| {
            let unused = if pool.is_none_or(MemPoolId::is_default) { table.unused_bytes(reserved) } else { 0 };
            table.add_to(snapshot, stacks, (pool, traces), unused, details)
        });
        history.add_to(snapshot, stacks);
    }
}

/// Sets a flag under the lock of the data that it describes. Stores only if the value changes.
#[inline]
fn publish(flag: &AtomicBool, now: bool) {
    if flag.load(Ordering::Relaxed) != now {
        flag.store(now, Ordering::Release);
    }
}
