//! The number of active captures that were reported to an allocator, over all its devices: a stream of another device
//! may have used this device's memory, and a capturing thread is restricted on every device.

use std::sync::atomic::{AtomicU32, Ordering};

use warpool_driver::DeviceId;

use crate::unwind::OnUnwind;
use crate::{Error, Result};

#[derive(Debug, Default)]
pub(crate) struct CaptureCount(AtomicU32);

impl CaptureCount {
    /// Whether any is active.
    #[inline]
    pub(crate) fn any(&self) -> bool {
        self.0.load(Ordering::Acquire) > 0
    }

    /// Counts a capture that begins, after `prepare` has done what cannot be done during it. The capture is not counted
    /// if `prepare` fails or panics.
    pub(crate) fn begin(&self, prepare: impl FnOnce() -> Result<()>) -> Result<()> {
        self.0.fetch_add(1, Ordering::AcqRel);
        let unwinds = OnUnwind::new(|| {
            self.subtract();
        });
        let outcome = prepare();
        unwinds.disarm();
        if outcome.is_err() {
            self.subtract();
        }
        outcome
    }

    /// A capture on `device` has ended.
    pub(crate) fn end(&self, device: DeviceId) -> Result<()> {
        if self.subtract() { Ok(()) } else { Err(Error::NotCapturing { device }) }
    }

    fn subtract(&self) -> bool {
        self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, |count| count.checked_sub(1)).is_ok()
    }
}
