//! Calls that a capture elsewhere would forbid, made without breaking it.

use std::fmt;

use warpool_driver::{CaptureMode, Driver};

use super::pollers::HeldOff;
use crate::{Instance, Result};

/// While this is there, what the calling thread asks the driver for breaks no other stream's capture. A guard for the
/// stack: it puts the thread's strictness back when dropped, also by a panic, and so is the one destructor that calls
/// the driver.
pub(crate) struct Relaxed<'a> {
    driver: &'a dyn Driver,
    before: CaptureMode,
}

impl<'a> Relaxed<'a> {
    pub(crate) fn begin(driver: &'a dyn Driver) -> Result<Self> {
        let before = driver.capture_mode_exchange(CaptureMode::Relaxed)?;
        Ok(Self { driver, before })
    }
}

impl Drop for Relaxed<'_> {
    fn drop(&mut self) {
        let put_back = || self.driver.capture_mode_exchange(self.before);
        // Tried twice: a thread that stays lax is not told of the mistakes that captures forbid.
        if let Err(error) = put_back().or_else(|_| put_back()) {
            tracing::warn!(%error, "the thread's capture mode could not be put back");
        }
    }
}

impl fmt::Debug for Relaxed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "relaxed, and {:?} before", self.before)
    }
}

/// For a call that a capture would forbid: while this is there, it breaks none.
pub(crate) enum Harmless<'a> {
    /// No capture is under way, and none begins. Makes no driver call.
    Alone {
        /// Until this is dropped.
        _held_off: HeldOff<'a>,
    },
    /// Captures are under way, or about to begin.
    Relaxed {
        /// Until this is dropped.
        _relaxed: Relaxed<'a>,
    },
}

impl<'a> Harmless<'a> {
    /// `none` says whether no capture is under way as far as the caller knows.
    pub(crate) fn begin(instance: &'a Instance, none: impl Fn() -> bool) -> Result<Self> {
        // Looked at with captures held off: one that began before is seen, one that comes after waits. One that is
        // about to begin is not waited for: it may be waiting for a guard of a thread that waits for us.
        if none()
            && let Some(held_off) = instance.captures().pollers.hold_off()
            && none()
            && instance.captures().none()
        {
            return Ok(Self::Alone { _held_off: held_off });
        }
        Ok(Self::Relaxed { _relaxed: Relaxed::begin(&**instance.driver())? })
    }
}

/// Runs `act` with the calling thread's strictness lowered.
pub(crate) fn relaxed<R>(driver: &dyn Driver, act: impl FnOnce() -> Result<R>) -> Result<R> {
    let _relaxed = Relaxed::begin(driver)?;
    act()
}
