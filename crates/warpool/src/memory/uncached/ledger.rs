//! The state of one device of an [`UncachedAllocator`](super::UncachedAllocator): the allocation table under its lock,
//! the memory fraction, and whether a history is recorded. The lock is not held during calls of the driver, the source
//! or an observer.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use warpool_driver::{DeviceId, DevicePtr, Driver, RawHandle, StreamId};

use super::source::Reserved;
use super::table::AllocationTable;
use crate::memory::limit::{checked_fraction, limit_bytes};
use crate::memory::report::StackIds;
use crate::memory::report::{EntryDetails, HistoryFlags};
use crate::memory::{
    Allocation, HistoryOptions, MemPoolId, Observers, RawStream, Snapshot, SnapshotOptions, StackLevel,
};
use crate::{Device, Result, lock};

pub(super) struct DeviceLedger {
    device: DeviceId,
    bytes_total: u64,
    table: Mutex<AllocationTable>,
    /// Whether there are entries for trackers, and whether freed blocks wait for a thread to release them. Updated
    /// after each step, so that a call without such work takes no lock.
    has_untracked: AtomicBool,
    has_pending: AtomicBool,
    /// The bits of an `f64`.
    fraction: AtomicU64,
    history_flags: HistoryFlags,
}

impl DeviceLedger {
    pub(super) fn new(device: &Device, fraction: f64) -> Self {
        Self {
            device: device.id(),
            bytes_total: device.properties().bytes_total,
            table: Mutex::new(AllocationTable::new(device.id())),
            has_untracked: AtomicBool::new(false),
            has_pending: AtomicBool::new(false),
            fraction: AtomicU64::new(fraction.to_bits()),
            history_flags: HistoryFlags::default(),
        }
    }

    pub(super) fn device(&self) -> DeviceId {
        self.device
    }

    pub(super) fn bytes_total(&self) -> u64 {
        self.bytes_total
    }

    /// One step under the lock. Trackers see its entries when [`report`](Self::report) is called.
    pub(super) fn with<R>(&self, step: impl FnOnce(&mut AllocationTable) -> R) -> R {
        let mut table = lock(&self.table);
        let result = step(&mut table);
        publish(&self.has_untracked, table.has_untracked());
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
    pub(super) fn report(&self, observers: &Observers) {
        if !self.has_untracked() || std::thread::panicking() {
            return;
        }
        let entries = self.with(AllocationTable::take_untracked);
        if !entries.is_empty() {
            observers.track(self.device, &entries);
        }
    }

    pub(super) fn find(&self, ptr: DevicePtr) -> Option<Allocation> {
        lock(&self.table).find(ptr)
    }

    /// The details that the history stores with the next entries, collected before the lock is taken.
    pub(super) fn entry_details(&self, level: StackLevel, observers: &Observers, driver: &dyn Driver) -> EntryDetails {
        self.history_flags.entry_details(level, observers, driver).timed(driver)
    }

    /// A stream with its driver handle, and its device. Cached.
    pub(super) fn raw_stream(&self, stream: StreamId, driver: &dyn Driver) -> Result<(RawStream, DeviceId)> {
        let cached = lock(&self.table).stream_handle(stream);
        let (raw, device) = match cached {
            Some(handle) => handle,
            None => {
                let handle = driver.stream_handle(stream)?;
                lock(&self.table).cache_stream_handle(stream, (handle.raw.0, handle.device));
                (handle.raw.0, handle.device)
            }
        };
        Ok((RawStream { id: stream, raw: RawHandle(raw) }, device))
    }

    pub(super) fn fraction(&self) -> f64 {
        f64::from_bits(self.fraction.load(Ordering::Acquire))
    }

    pub(super) fn set_fraction(&self, fraction: f64) -> Result<()> {
        self.fraction.store(checked_fraction(fraction)?.to_bits(), Ordering::Release);
        Ok(())
    }

    /// The lower of the memory fraction and the cap.
    pub(super) fn limit(&self, cap: Option<u64>) -> Option<u64> {
        limit_bytes(self.bytes_total, self.fraction(), cap)
    }

    pub(super) fn record_history(&self, options: Option<&HistoryOptions>) {
        self.with(|table| table.set_history(options.cloned()));
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
        self.with(|table| {
            let unused = if pool.is_none_or(MemPoolId::is_default) { table.unused_bytes(reserved) } else { 0 };
            table.add_to(snapshot, stacks, (pool, traces), unused, details);
        });
    }
}

/// Sets a flag under the lock of the data that it describes. Stores only if the value changes.
#[inline]
fn publish(flag: &AtomicBool, now: bool) {
    if flag.load(Ordering::Relaxed) != now {
        flag.store(now, Ordering::Release);
    }
}
