//! What every allocator of device memory has beside its memory: [`AllocatorCore`] once, [`DeviceCore`] per device.
//! Instance, observers and settings; limits, scopes, peers, whether captures are active and calls are recorded.
//! Placement, blocks and their locks are the allocators'.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use warpool_driver::{DeviceId, Driver, MemoryInfo, PhysicalOptions, ShareKind, StreamId};

use super::capture_count::CaptureCount;
use super::limit::Limits;
use super::report::{EntryDetails, HistoryFlags};
use super::scopes::Scopes;
use super::{MemPoolId, Observers, OomReport, Settings, StackLevel};
use crate::capture::{CaptureSafe, CaptureStatus, RelaxedMode};
use crate::pool_id::PoolIds;
use crate::{Device, Error, Instance, Result, lock};

/// Allocators of all kinds are numbered.
static NEXT_KEY: AtomicU64 = AtomicU64::new(1);

/// The state that the devices of an allocator share.
pub(crate) struct AllocatorCore {
    pub(crate) instance: Instance,
    pub(crate) observers: Observers,
    pub(crate) settings: Mutex<Arc<Settings>>,
    pub(crate) captures: CaptureCount,
    pub(crate) pool_ids: PoolIds,
    /// Identifies the allocator among all of the process.
    pub(crate) key: u64,
    /// Whether the driver tracks suballocations.
    pub(crate) tracks_suballocations: bool,
}

impl AllocatorCore {
    pub(crate) fn new(instance: &Instance, settings: Settings) -> Arc<Self> {
        Arc::new(Self {
            instance: instance.clone(),
            observers: Observers::default(),
            settings: Mutex::new(Arc::new(settings)),
            captures: CaptureCount::default(),
            pool_ids: PoolIds::default(),
            key: NEXT_KEY.fetch_add(1, Ordering::Relaxed),
            tracks_suballocations: instance.driver().tracks_suballocations(),
        })
    }

    #[inline]
    pub(crate) fn driver(&self) -> &dyn Driver {
        &**self.instance.driver()
    }

    /// The current settings; the defaults in a forked child, where the lock may be held forever.
    pub(crate) fn settings(&self) -> Arc<Settings> {
        if self.instance.is_inherited() { Arc::default() } else { Arc::clone(&lock(&self.settings)) }
    }

    pub(crate) fn set_settings(&self, settings: Settings) {
        if !self.instance.is_inherited() {
            *lock(&self.settings) = Arc::new(settings);
        }
    }

    /// Whether captures are active on any device: those reported to this allocator, and those of graphs that use
    /// another allocator. Two loads.
    #[inline]
    pub(crate) fn has_captures(&self) -> bool {
        self.captures.any() || self.instance.has_captures()
    }

    /// The entry of a device in a list of all. Fails in a forked child.
    #[inline]
    pub(crate) fn device<'a, D>(&self, devices: &'a [D], device: DeviceId) -> Result<&'a D> {
        self.instance.expect_own_process("allocator call")?;
        let count = self.instance.device_count();
        devices.get(device.0 as usize).ok_or(Error::DeviceOutOfRange { index: device.0, count })
    }
}

/// One device of an allocator.
pub(crate) struct DeviceCore {
    shared: Arc<AllocatorCore>,
    pub(crate) id: DeviceId,
    pub(crate) bytes_total: u64,
    pub(crate) rdma: bool,
    /// How mapped memory can be shared with other processes.
    pub(crate) share: Option<ShareKind>,
    limits: Mutex<Limits>,
    pub(crate) scopes: Scopes,
    pub(crate) history_flags: HistoryFlags,
    /// Other devices that may access this one's memory.
    pub(crate) peers: Mutex<Vec<DeviceId>>,
}

impl DeviceCore {
    pub(crate) fn new(shared: &Arc<AllocatorCore>, device: &Device) -> Self {
        let properties = device.properties();
        Self {
            shared: Arc::clone(shared),
            id: device.id(),
            bytes_total: properties.bytes_total,
            rdma: properties.rdma,
            share: properties.share_posix_fd.then_some(ShareKind::PosixFd),
            limits: Mutex::new(Limits::of(&shared.settings())),
            scopes: Scopes::default(),
            history_flags: HistoryFlags::default(),
            peers: Mutex::default(),
        }
    }

    #[inline]
    pub(crate) fn shared(&self) -> &AllocatorCore {
        &self.shared
    }

    #[inline]
    pub(crate) fn instance(&self) -> &Instance {
        &self.shared.instance
    }

    #[inline]
    pub(crate) fn driver(&self) -> &dyn Driver {
        self.shared.driver()
    }

    #[inline]
    pub(crate) fn observers(&self) -> &Observers {
        &self.shared.observers
    }

    pub(crate) fn settings(&self) -> Arc<Settings> {
        self.shared.settings()
    }

    pub(crate) fn limits(&self) -> Limits {
        *lock(&self.limits)
    }

    pub(crate) fn change_limits<R>(&self, change: impl FnOnce(&mut Limits) -> R) -> R {
        change(&mut lock(&self.limits))
    }

    /// The most that may be reserved; `None` is no limit.
    pub(crate) fn limit(&self) -> Option<u64> {
        self.limits().bytes(self.bytes_total)
    }

    /// How physical memory is created.
    pub(crate) fn physical_options(&self) -> PhysicalOptions {
        PhysicalOptions { share: self.share, rdma: self.rdma }
    }

    /// The pool that a request without a pool is routed to.
    #[inline]
    pub(crate) fn routed(&self, stream: StreamId) -> Result<MemPoolId> {
        self.scopes.routed(stream, self.driver())
    }
}

/// Captures.
impl DeviceCore {
    /// As [`AllocatorCore::has_captures`].
    #[inline]
    pub(crate) fn has_captures(&self) -> bool {
        self.shared.has_captures()
    }

    /// The capture status of a stream. No driver call while no capture is active on any device.
    #[inline]
    pub(crate) fn capture_status(&self, stream: StreamId) -> Result<CaptureStatus> {
        if self.has_captures() { CaptureStatus::of(self.driver(), stream) } else { Ok(CaptureStatus::NotCapturing) }
    }

    #[inline]
    pub(crate) fn is_capturing(&self, stream: StreamId) -> Result<bool> {
        Ok(self.capture_status(stream)?.is_capturing())
    }

    /// While the result is held, driver calls of the calling thread invalidate no capture. No driver call unless
    /// captures are active.
    pub(crate) fn capture_safe(&self) -> Result<CaptureSafe<'_>> {
        CaptureSafe::begin(self.instance(), || !self.has_captures())
    }

    /// As [`capture_safe`](Self::capture_safe), around user code (an upstream), which may poll or begin captures
    /// itself. So captures are not blocked, and the thread is always put into relaxed mode.
    pub(crate) fn relaxed_mode(&self) -> Result<RelaxedMode<'_>> {
        RelaxedMode::begin(self.driver())
    }
}

/// Reports.
impl DeviceCore {
    /// Collects the details for history entries, before a lock is taken.
    #[inline]
    pub(crate) fn entry_details(&self, level: StackLevel) -> EntryDetails {
        self.history_flags.entry_details(level, self.observers(), self.driver())
    }

    /// As [`entry_details`](Self::entry_details), for calls that are not made for every allocation.
    pub(crate) fn timed_details(&self, level: StackLevel) -> EntryDetails {
        self.entry_details(level).timed(self.driver())
    }

    /// Whether anything is collected for history entries.
    #[inline]
    pub(crate) fn collects_details(&self) -> bool {
        self.history_flags.collects_details(self.observers())
    }

    /// The device's memory as the driver sees it, for an out-of-memory report: a failure must not hide that error.
    pub(crate) fn memory_info(&self) -> MemoryInfo {
        let unknown = MemoryInfo { bytes_free: 0, bytes_total: self.bytes_total };
        self.driver().mem_info(self.id).unwrap_or(unknown)
    }

    /// Calls the observers with an out-of-memory report, and returns the error.
    pub(crate) fn out_of_memory(&self, report: OomReport) -> Error {
        self.observers().report_oom(&report);
        Error::OutOfMemory(Box::new(report))
    }
}
