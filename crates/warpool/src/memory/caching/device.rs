//! One device of the caching allocator: its state under its lock, and the data that its driver calls need.
//!
//! Locks: `state` is held for one step, usually some ten nanoseconds, and never during a driver call. `slow` is held by
//! the one thread that allocates memory from the driver or returns it; it is taken before `state`. User code
//! (observers, upstreams, destructors of user values) runs with neither held.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};

use warpool_driver::{DeviceId, Driver, ShareKind, StreamId};

use super::slow_lock::{SlowLock, SlowLockGuard};
use super::state::{DeviceState, Policy};
use super::stream_classes::StreamClasses;
use crate::capture::{CaptureSafe, CaptureStatus, RelaxedMode};
use crate::memory::capture_count::CaptureCount;
use crate::memory::limit::Limits;
use crate::memory::paged::spin_lock::{SpinGuard, SpinLock};
use crate::memory::report::{EntryDetails, HistoryFlags};
use crate::memory::scopes::Scopes;
use crate::memory::{HistoryOptions, MemPoolId, Observers, Settings, StackLevel};
use crate::unwind::drop_user_value;
use crate::{Device, Error, Instance, Result, lock};

/// The state that the devices of an allocator share.
pub(super) struct Shared {
    instance: Instance,
    observers: Observers,
    settings: Mutex<Arc<Settings>>,
    captures: CaptureCount,
    /// Classes of streams, for the sizes of their expandable segments.
    stream_classes: StreamClasses,
}

impl Shared {
    pub(super) fn new(instance: &Instance, settings: Settings) -> Self {
        Self {
            instance: instance.clone(),
            observers: Observers::default(),
            settings: Mutex::new(Arc::new(settings)),
            captures: CaptureCount::default(),
            stream_classes: StreamClasses::default(),
        }
    }

    #[inline]
    pub(super) fn instance(&self) -> &Instance {
        &self.instance
    }

    #[inline]
    pub(super) fn observers(&self) -> &Observers {
        &self.observers
    }

    /// The current settings; the defaults in a forked child, where the lock may be held forever.
    pub(super) fn settings(&self) -> Arc<Settings> {
        if self.instance.is_inherited() { Arc::default() } else { Arc::clone(&lock(&self.settings)) }
    }

    pub(super) fn set_settings(&self, settings: Settings) {
        *lock(&self.settings) = Arc::new(settings);
    }

    #[inline]
    pub(super) fn stream_classes(&self) -> &StreamClasses {
        &self.stream_classes
    }

    #[inline]
    pub(super) fn captures(&self) -> &CaptureCount {
        &self.captures
    }
}

pub(super) struct CachingDevice {
    shared: Arc<Shared>,
    pub(super) id: DeviceId,
    pub(super) bytes_total: u64,
    pub(super) granularity: u64,
    pub(super) rdma: bool,
    /// How mapped memory can be shared with other processes.
    pub(super) share: Option<ShareKind>,
    virtual_memory: bool,
    state: SpinLock<DeviceState>,
    slow: SlowLock,
    limits: Mutex<Limits>,
    pub(super) scopes: Scopes,
    history_flags: HistoryFlags,
    /// Other devices that may access this one's memory.
    peers: Mutex<Vec<DeviceId>>,
    /// How many streams and blocks were examined to complete deferred frees. For tests.
    pub(super) deferred_steps: AtomicU64,
}

impl CachingDevice {
    pub(super) fn new(shared: &Arc<Shared>, device: &Device, settings: &Settings) -> Self {
        let properties = device.properties();
        let limits = Limits::of(settings);
        let mut policy = Policy::new(settings, properties.bytes_total, properties.virtual_memory);
        policy.limit = limits.bytes(properties.bytes_total);
        if settings.expandable_segments && !properties.virtual_memory {
            tracing::warn!(device = %device.id(), "expandable_segments is off: the device has no virtual memory");
        }
        Self {
            shared: Arc::clone(shared),
            id: device.id(),
            bytes_total: properties.bytes_total,
            granularity: properties.granularity.max(1),
            rdma: properties.rdma,
            share: properties.share_posix_fd.then_some(ShareKind::PosixFd),
            virtual_memory: properties.virtual_memory,
            state: SpinLock::new(DeviceState::new(device.id(), policy, shared.instance.driver())),
            slow: SlowLock::default(),
            limits: Mutex::new(limits),
            scopes: Scopes::default(),
            history_flags: HistoryFlags::default(),
            peers: Mutex::default(),
            deferred_steps: AtomicU64::new(0),
        }
    }

    pub(super) fn instance(&self) -> &Instance {
        &self.shared.instance
    }

    #[inline]
    pub(super) fn driver(&self) -> &dyn Driver {
        &**self.shared.instance.driver()
    }

    pub(super) fn observers(&self) -> &Observers {
        &self.shared.observers
    }

    #[inline]
    pub(super) fn shared(&self) -> &Shared {
        &self.shared
    }

    /// The device's lock, for steps whose results must stay in registers. All other steps use [`change`](Self::change)
    /// and [`with`](Self::with).
    #[inline]
    pub(super) fn lock_state(&self) -> SpinGuard<'_, DeviceState> {
        let mut state = self.lock_unsettled();
        state.settle();
        state
    }

    /// As [`lock_state`](Self::lock_state), for the steps that free or repeat the last allocation: they settle it
    /// themselves if they concern another block.
    #[inline]
    pub(super) fn lock_unsettled(&self) -> SpinGuard<'_, DeviceState> {
        self.state.lock()
    }

    /// One step under the device's lock. Trackers do not see its entries yet: [`report`](Self::report) delivers them.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a call would return the result through memory")]
    pub(super) fn change<R>(&self, step: impl FnOnce(&mut DeviceState) -> R) -> R {
        step(&mut self.lock_state())
    }

    /// One step under the device's lock. Afterwards trackers see its entries and all earlier ones, with no lock held.
    /// If a tracker panics, the caller does not get the result: `undo` reverts the step, and returns a value to be
    /// dropped without the lock.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a call would return the result through memory")]
    pub(super) fn with<R, D>(
        &self,
        step: impl FnOnce(&mut DeviceState) -> R,
        undo: impl FnOnce(&mut DeviceState, R) -> D,
    ) -> R {
        let mut state = self.lock_state();
        let result = step(&mut state);
        if state.has_unreported() { self.show(state, result, undo) } else { result }
    }

    /// The second half of [`with`](Self::with), if there are entries for trackers.
    #[cold]
    pub(super) fn show<R, D>(
        &self,
        mut state: SpinGuard<'_, DeviceState>,
        result: R,
        undo: impl FnOnce(&mut DeviceState, R) -> D,
    ) -> R {
        if self.slow.is_held_by_this_thread() || std::thread::panicking() {
            return result;
        }
        let entries = state.take_unreported();
        drop(state);
        match catch_unwind(AssertUnwindSafe(|| self.observers().track(self.id, &entries))) {
            Ok(()) => result,
            Err(panic) => {
                let undone = self.change(|state| undo(state, result));
                drop_user_value(undone);
                resume_unwind(panic)
            }
        }
    }

    /// Calls the trackers with the entries that they have not seen. Does nothing on a thread that holds the slow lock
    /// or is unwinding: the next call does it.
    pub(super) fn report(&self) {
        self.with(|_| (), |_, ()| ());
    }

    /// Reads the state.
    #[inline]
    pub(super) fn read<R>(&self, read: impl FnOnce(&DeviceState) -> R) -> R {
        read(&self.lock_state())
    }

    /// Takes the lock for allocating memory from the driver and for returning it.
    pub(super) fn lock_slow(&self) -> SlowGuard<'_> {
        let guard = self.slow.lock();
        SlowGuard { device: self, waited: guard.waited(), guard: Cell::new(Some(guard)) }
    }

    /// Collects the details for history entries, before a lock is taken.
    #[inline]
    pub(super) fn entry_details(&self, level: StackLevel) -> EntryDetails {
        self.history_flags.entry_details(level, self.observers(), self.driver())
    }

    /// Whether anything is collected for history entries.
    #[inline]
    pub(super) fn collects_details(&self) -> bool {
        self.history_flags.collects_details(self.observers())
    }

    pub(super) fn record_history(&self, options: Option<&HistoryOptions>) {
        self.change(|state| state.set_history(options.cloned()));
        self.history_flags.set(options);
    }

    pub(super) fn set_settings(&self, settings: &Settings) {
        let policy = Policy::new(settings, self.bytes_total, self.virtual_memory);
        self.change(|state| state.set_policy(policy));
    }

    pub(super) fn limits(&self) -> Limits {
        *lock(&self.limits)
    }

    pub(super) fn change_limits<R>(&self, change: impl FnOnce(&mut Limits) -> R) -> R {
        let (result, limit) = {
            let mut limits = lock(&self.limits);
            (change(&mut limits), limits.bytes(self.bytes_total))
        };
        self.change(|state| state.set_limit(limit));
        result
    }

    /// Other devices that may access the memory.
    pub(super) fn peers(&self) -> Vec<DeviceId> {
        lock(&self.peers).clone()
    }

    pub(super) fn add_peer(&self, device: DeviceId) {
        lock(&self.peers).push(device);
    }

    /// The pool that a request without a pool is routed to.
    #[inline]
    pub(super) fn routed(&self, stream: StreamId) -> Result<MemPoolId> {
        self.scopes.routed(stream, self.driver())
    }

    /// The driver's handle of a stream, which must be of this device.
    pub(super) fn stream_raw(&self, stream: StreamId) -> Result<u64> {
        // Not in the heap before the stream's first segment.
        if let Some(raw) = self.read(|state| state.heap().stream_raw(stream)) {
            return Ok(raw);
        }
        let handle = self.driver().stream_handle(stream)?;
        if handle.device != self.id {
            return Err(Error::StreamDevice { device: self.id, stream, owner: handle.device });
        }
        Ok(handle.raw.0)
    }
}

/// Captures.
impl CachingDevice {
    /// Whether captures are active on any device: those reported to this allocator, and those of graphs that use
    /// another allocator. Two loads.
    #[inline]
    pub(super) fn has_captures(&self) -> bool {
        self.shared.captures.any() || self.instance().has_captures()
    }

    /// The capture status of a stream. No driver call while no capture is active on any device.
    #[inline]
    pub(super) fn capture_status(&self, stream: StreamId) -> Result<CaptureStatus> {
        if self.has_captures() { CaptureStatus::of(self.driver(), stream) } else { Ok(CaptureStatus::NotCapturing) }
    }

    #[inline]
    pub(super) fn is_capturing(&self, stream: StreamId) -> Result<bool> {
        Ok(self.capture_status(stream)?.is_capturing())
    }

    /// While the result is held, driver calls of the calling thread invalidate no capture. No driver call unless
    /// captures are active.
    pub(super) fn capture_safe(&self) -> Result<CaptureSafe<'_>> {
        CaptureSafe::begin(self.instance(), || !self.has_captures())
    }

    /// As [`capture_safe`](Self::capture_safe), around user code (an upstream), which may poll or begin captures
    /// itself. So captures are not blocked, and the thread is always put into relaxed mode.
    pub(super) fn relaxed_mode(&self) -> Result<RelaxedMode<'_>> {
        RelaxedMode::begin(self.driver())
    }
}

/// The slow lock: one thread at a time may allocate memory from the driver or return it. Trackers see the entries by
/// the first [`report`](CachingDevice::report) after it is dropped: they are called without any lock, so that they may
/// call the allocator.
#[must_use = "dropping it releases the lock"]
pub(super) struct SlowGuard<'a> {
    device: &'a CachingDevice,
    waited: bool,
    /// `None` while user code runs.
    guard: Cell<Option<SlowLockGuard<'a>>>,
}

impl SlowGuard<'_> {
    /// Whether another thread held the lock before, so that the state may have changed.
    pub(super) fn waited(&self) -> bool {
        self.waited
    }

    /// Runs user code without the lock. Another thread may run the slow path meanwhile. Only blocks in transit, and
    /// pools that this thread has entered, are sure to stay.
    pub(super) fn unlocked<R>(&self, user_code: impl FnOnce() -> R) -> R {
        drop(self.guard.take());
        let result = user_code();
        self.guard.set(Some(self.device.slow.lock()));
        result
    }
}

impl std::ops::Deref for SlowGuard<'_> {
    type Target = CachingDevice;

    fn deref(&self) -> &CachingDevice {
        self.device
    }
}

/// A pool that the thread has entered (`Pools::enter`): it is not removed before this is dropped, also by a panic.
#[must_use = "dropping it leaves the pool"]
pub(super) struct PoolVisit<'a> {
    device: &'a CachingDevice,
    pool: MemPoolId,
}

impl<'a> PoolVisit<'a> {
    /// For a pool that was entered in an earlier step.
    pub(super) fn entered(device: &'a CachingDevice, pool: MemPoolId) -> Self {
        Self { device, pool }
    }
}

impl Drop for PoolVisit<'_> {
    fn drop(&mut self) {
        let removed = self.device.change(|state| state.leave_pool(self.pool));
        // Its upstream's destructor is user code.
        drop_user_value(removed);
    }
}
