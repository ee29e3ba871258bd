//! Driver calls that must not invalidate a capture. No extra cost while no capture is active.

use super::pollers::HoldOff;
use super::relaxed::RelaxedMode;
use crate::{Instance, Result};

/// While this guard lives, driver calls of the calling thread invalidate no capture: either no capture is active and
/// none can begin, or the thread is in relaxed mode.
pub(crate) enum CaptureSafe<'a> {
    /// No capture is active, and none begins before this is dropped. Created without a driver call.
    NoCapture {
        /// Keeps captures from beginning until it is dropped.
        _hold_off: HoldOff<'a>,
    },
    /// Captures are active, or about to begin.
    Relaxed {
        /// Keeps the thread in relaxed mode until it is dropped.
        _relaxed: RelaxedMode<'a>,
    },
}

impl<'a> CaptureSafe<'a> {
    /// `none` returns whether no capture is active as far as the caller knows.
    pub(crate) fn begin(instance: &'a Instance, none: impl Fn() -> bool) -> Result<Self> {
        // Checked again while captures are held off: one that began before is seen, a later one waits. This does not
        // wait for a capture that is about to begin: it may be waiting for a polling guard of a thread that waits for
        // this one.
        if none()
            && let Some(hold_off) = instance.hold_off_captures()
            && none()
        {
            return Ok(Self::NoCapture { _hold_off: hold_off });
        }
        Ok(Self::Relaxed { _relaxed: RelaxedMode::begin(&**instance.driver())? })
    }
}
