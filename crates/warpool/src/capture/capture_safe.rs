//! Driver calls that must not invalidate a capture, at no cost while there is none.

use super::pollers::HoldOff;
use super::relaxed::RelaxedMode;
use crate::{Instance, Result};

/// While this guard lives, driver calls of the calling thread invalidate no capture: either no capture is under way and
/// none can begin, or the thread is in relaxed mode.
pub(crate) enum CaptureSafe<'a> {
    /// No capture is under way, and none begins before this is dropped. Made without a driver call.
    NoCapture {
        /// Until this is dropped.
        _hold_off: HoldOff<'a>,
    },
    /// Captures are under way, or about to begin.
    Relaxed {
        /// Until this is dropped.
        _relaxed: RelaxedMode<'a>,
    },
}

impl<'a> CaptureSafe<'a> {
    /// `none` says whether no capture is under way as far as the caller can tell.
    pub(crate) fn begin(instance: &'a Instance, none: impl Fn() -> bool) -> Result<Self> {
        // Checked again while captures are held off: one that began before is seen, one that comes later waits. One
        // that is about to begin is not waited for: it may be waiting for a polling guard of a thread that waits for
        // us.
        if none()
            && let Some(hold_off) = instance.hold_off_captures()
            && none()
        {
            return Ok(Self::NoCapture { _hold_off: hold_off });
        }
        Ok(Self::Relaxed { _relaxed: RelaxedMode::begin(&**instance.driver())? })
    }
}
