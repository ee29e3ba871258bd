//! One device of the caching allocator: its state under its lock, and the data that its driver calls need.
//!
//! Locks: `state` is held for one step, usually some ten nanoseconds, and never during a driver call. `slow` is held by
//! the one thread that allocates memory from the driver or returns it; it is taken before `state`. User code
//! (observers, upstreams, destructors of user values) runs with neither held.

use std::cell::Cell;
use std::ops::Deref;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use warpool_driver::{DeviceId, StreamId};

use super::slow_lock::{SlowLock, SlowLockGuard};
use super::state::{DeviceState, Policy};
use super::stream_classes::StreamClasses;
use crate::memory::core::{AllocatorCore, DeviceCore};
use crate::memory::limit::Limits;
use crate::memory::{HistoryOptions, MemPoolId, Settings};
use crate::sync::spin_lock::{SpinGuard, SpinLock};
use crate::unwind::drop_user_value;
use crate::{Device, Error, Result, lock};

pub(super) struct CachingDevice {
    core: DeviceCore,
    pub(super) granularity: u64,
    virtual_memory: bool,
    /// Classes of streams, for the sizes of their expandable segments.
    pub(super) stream_classes: Arc<StreamClasses>,
    state: SpinLock<DeviceState>,
    slow: SlowLock,
    /// How many streams and blocks were examined to complete deferred frees. For tests.
    pub(super) deferred_steps: AtomicU64,
}

impl Deref for CachingDevice {
    type Target = DeviceCore;

    #[inline]
    fn deref(&self) -> &DeviceCore {
        &self.core
    }
}

impl CachingDevice {
    pub(super) fn new(shared: &Arc<AllocatorCore>, device: &Device, stream_classes: &Arc<StreamClasses>) -> Self {
        let (core, properties, settings) = (DeviceCore::new(shared, device), device.properties(), shared.settings());
        let mut policy = Policy::new(&settings, core.bytes_total, properties.virtual_memory);
        policy.limit = core.limit();
        if settings.expandable_segments && !properties.virtual_memory {
            tracing::warn!(device = %core.id, "expandable_segments is off: the device has no virtual memory");
        }
        Self {
            granularity: properties.granularity.max(1),
            virtual_memory: properties.virtual_memory,
            stream_classes: Arc::clone(stream_classes),
            state: SpinLock::new(DeviceState::new(core.id, policy, shared.instance.driver())),
            slow: SlowLock::default(),
            deferred_steps: AtomicU64::new(0),
            core,
        }
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
        if state.recorder.has_unreported() { self.show(state, result, undo) } else { result }
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
        let entries = state.recorder.take_unreported();
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

    pub(super) fn record_history(&self, options: Option<&HistoryOptions>) {
        self.change(|state| state.recorder.history.set(options.cloned()));
        self.history_flags.set(options);
    }

    pub(super) fn set_settings(&self, settings: &Settings) {
        let policy = Policy::new(settings, self.bytes_total, self.virtual_memory);
        self.change(|state| state.set_policy(policy));
    }

    pub(super) fn change_limits<R>(&self, change: impl FnOnce(&mut Limits) -> R) -> R {
        let result = self.core.change_limits(change);
        self.change(|state| state.policy.limit = self.limit());
        result
    }

    /// Other devices that may access the memory.
    pub(super) fn peers(&self) -> Vec<DeviceId> {
        lock(&self.core.peers).clone()
    }

    pub(super) fn add_peer(&self, device: DeviceId) {
        lock(&self.core.peers).push(device);
    }

    /// The driver's handle of a stream, which must be of this device.
    pub(super) fn stream_raw(&self, stream: StreamId) -> Result<u64> {
        // Not in the heap before the stream's first segment.
        if let Some(raw) = self.read(|state| state.heap.stream_raw(stream)) {
            return Ok(raw);
        }
        let handle = self.driver().stream_handle(stream)?;
        if handle.device != self.id {
            return Err(Error::StreamDevice { device: self.id, stream, owner: handle.device });
        }
        Ok(handle.raw.0)
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

impl Deref for SlowGuard<'_> {
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
