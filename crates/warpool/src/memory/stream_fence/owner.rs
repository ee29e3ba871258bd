//! What an allocator provides: access to a block's uses and to the fences, under its locks.

use warpool_driver::{DeviceId, StreamId};

use super::queues::{Fence, StreamFences};
use super::uses::StreamUses;
use crate::capture::{CaptureStatus, RelaxedMode};
use crate::memory::core::DeviceCore;
use crate::{Instance, Result};

/// The interface between one device of an allocator and its fences.
pub(crate) trait FenceOwner {
    /// Names a freed block.
    type Key: Clone;

    fn instance(&self) -> &Instance;

    /// The device, if the allocator is told about every capture. Then no driver call is made for captures while none is
    /// active.
    fn device(&self) -> Option<&DeviceCore> {
        None
    }

    /// Whether captures are active. They forbid waiting for a device.
    fn has_captures(&self) -> bool {
        self.device().map_or_else(|| self.instance().has_captures(), DeviceCore::has_captures)
    }

    /// The capture status of a stream.
    fn capture_status(&self, stream: StreamId) -> Result<CaptureStatus> {
        match self.device() {
            Some(device) => device.capture_status(stream),
            None => CaptureStatus::of(&**self.instance().driver(), stream),
        }
    }

    /// The device of a stream, if it is known without a driver call.
    fn device_of(&self, stream: StreamId) -> Option<DeviceId> {
        let _ = stream;
        None
    }

    /// While the result is held, queries and waits of the calling thread invalidate no capture of another stream.
    fn capture_guard(&self) -> Result<impl Sized> {
        Ok(match self.device() {
            Some(device) => (Some(device.capture_safe()?), None),
            None => (None, Some(RelaxedMode::begin(&**self.instance().driver())?)),
        })
    }

    /// The stream that a block belongs to, if [`poll_of`](super::poll_of) is to find it.
    fn stream_of(&self, key: &Self::Key) -> Option<StreamId> {
        let _ = key;
        None
    }

    /// Accesses a block's uses, under their lock.
    fn with_uses<R>(&self, key: &Self::Key, act: impl FnOnce(&mut StreamUses) -> R) -> R;

    /// Accesses the fences, under their lock.
    fn with_fences<R>(&self, act: impl FnOnce(&mut StreamFences<Self::Key>) -> R) -> R;

    /// A fence has passed: pops it, and reclaims its block if that has none left.
    fn complete(&self, passed: &Fence) {
        if let Some(key) = self.with_fences(|fences| fences.pop(passed)) {
            self.with_uses(&key, StreamUses::fence_passed);
            self.reclaim_if_clear(key);
        }
    }

    /// Reclaims a block if it is freed and no stream may still use it.
    fn reclaim_if_clear(&self, key: Self::Key);
}
