//! Driver calls that another stream's capture forbids, made without invalidating it.

use std::fmt;

use warpool_driver::{CaptureMode, Driver};

use crate::Result;

/// While this guard lives, driver calls of the calling thread invalidate no capture of another stream. Dropping it,
/// also by a panic, restores the thread's capture mode. No other destructor of this crate calls the driver for an
/// effect, so keep it on the stack of a call, and create none in a destructor.
pub(crate) struct RelaxedMode<'a> {
    driver: &'a dyn Driver,
    before: CaptureMode,
}

impl<'a> RelaxedMode<'a> {
    pub(crate) fn begin(driver: &'a dyn Driver) -> Result<Self> {
        let before = driver.capture_mode_exchange(CaptureMode::Relaxed)?;
        Ok(Self { driver, before })
    }

    /// Runs `act` in relaxed mode.
    pub(crate) fn run<R>(driver: &'a dyn Driver, act: impl FnOnce() -> Result<R>) -> Result<R> {
        let _relaxed = Self::begin(driver)?;
        act()
    }
}

impl Drop for RelaxedMode<'_> {
    fn drop(&mut self) {
        let restore = || self.driver.capture_mode_exchange(self.before);
        // Tried twice: if the thread stayed relaxed, calls that a capture forbids would not be detected.
        if let Err(error) = restore().or_else(|_| restore()) {
            tracing::warn!(%error, "the thread's capture mode could not be restored");
        }
    }
}

impl fmt::Debug for RelaxedMode<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "relaxed, {:?} before", self.before)
    }
}
