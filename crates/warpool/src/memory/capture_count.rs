//! How many captures are active that an allocator was told of, on all its devices together: another device's stream may
//! have used this one's memory, and a thread that captures is restricted on every device.

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

    /// A capture begins; `prepare` is what can no longer be done during it. It is not counted if that fails or panics.
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
