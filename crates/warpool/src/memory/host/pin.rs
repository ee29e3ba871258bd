//! Pinning and unpinning: the driver calls for segments. How a range was pinned is stored with it, so that it is
//! unpinned the same way even if the settings have changed.
//!
//! Rules: no lock is held during these calls, and they run in the relaxed capture mode, so that they invalidate no
//! capture.

use warpool_driver::{DeviceId, Driver, HostOptions, HostPtr};

use super::register::register;
use crate::capture::RelaxedMode;
use crate::memory::PinnedSettings;
use crate::{Error, Instance, Result};

/// Memory that was pinned by one call.
#[derive(Clone, Debug)]
pub(super) struct PinnedRange {
    ptr: HostPtr,
    bytes: u64,
    method: PinMethod,
}

/// Why memory could not be pinned.
pub(super) struct PinFailure {
    pub(super) error: Error,
    /// Memory that was pinned, cannot be used, and could not be unpinned. It has to be unpinned later.
    pub(super) still_pinned: Option<PinnedRange>,
}

impl<E: Into<Error>> From<E> for PinFailure {
    fn from(error: E) -> Self {
        Self { error: error.into(), still_pinned: None }
    }
}

/// How memory is pinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PinMethod {
    /// The driver allocates it.
    Allocate,
    /// Pages are mapped, touched by this number of threads, and registered.
    Register { threads: u64 },
}

impl PinMethod {
    pub(super) fn of(settings: &PinnedSettings) -> Self {
        match settings.use_cuda_host_register {
            true => Self::Register { threads: settings.num_register_threads },
            false => Self::Allocate,
        }
    }
}

/// The device whose context pins the memory: one that has a context, since creating one takes device memory. `wanted`,
/// else the current device, else the first one with a context. If no device has one: `wanted`, or the current device.
pub(super) fn pinning_device(instance: &Instance, wanted: Option<DeviceId>) -> Result<DeviceId> {
    let current = instance.current_device_id();
    let first = wanted.unwrap_or(current);
    let all = (0..instance.device_count()).map(DeviceId);
    for device in [first, current].into_iter().chain(all) {
        if instance.driver().context_is_active(device)? {
            return Ok(device);
        }
    }
    Ok(first)
}

impl PinnedRange {
    /// Pins memory with `device`'s context, for the host and every device at one address.
    pub(super) fn pin(
        driver: &dyn Driver,
        device: DeviceId,
        bytes: u64,
        method: PinMethod,
    ) -> std::result::Result<Self, PinFailure> {
        let _relaxed = RelaxedMode::begin(driver)?;
        let ptr = match method {
            PinMethod::Allocate => {
                let options = HostOptions { portable: true, mapped: true, write_combined: false };
                driver.host_alloc(device, bytes, options)?
            }
            PinMethod::Register { threads } => register(driver, device, bytes, threads)?,
        };
        let range = Self { ptr, bytes, method };
        if let Err(error) = range.check_address(driver, device) {
            // Tried twice: until the memory is unpinned, it counts against the caps without being usable.
            let unpin = || range.unpin_relaxed(driver);
            let unpinned = unpin().or_else(|_| unpin());
            if let Err(second) = &unpinned {
                tracing::warn!(error = %second, %ptr, "unusable memory could not be unpinned; it is retried");
            }
            return Err(PinFailure { error, still_pinned: unpinned.is_err().then_some(range) });
        }
        Ok(range)
    }

    /// Unpins the memory. On real devices this waits for the device's work.
    pub(super) fn unpin(&self, driver: &dyn Driver) -> Result<()> {
        let _relaxed = RelaxedMode::begin(driver)?;
        self.unpin_relaxed(driver)
    }

    pub(super) fn start(&self) -> u64 {
        self.ptr.0
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    fn unpin_relaxed(&self, driver: &dyn Driver) -> Result<()> {
        match self.method {
            PinMethod::Allocate => Ok(driver.host_free(self.ptr)?),
            // The driver owns the pages, and unmaps them.
            PinMethod::Register { .. } => Ok(driver.host_unregister(self.ptr)?),
        }
    }

    /// Fails unless the device's address of the memory is the host's: blocks have one address for both.
    fn check_address(&self, driver: &dyn Driver, device: DeviceId) -> Result<()> {
        let seen = driver.host_device_ptr(device, self.ptr)?;
        if seen.0 == self.ptr.0 { Ok(()) } else { Err(Error::HostAddress { host: self.ptr, seen, device }) }
    }
}
