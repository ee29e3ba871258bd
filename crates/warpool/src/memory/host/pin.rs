//! Memory from the driver and back: the only place here that pins. How a segment was pinned is kept with it, so that it
//! goes back the same way whatever the settings say by then.
//!
//! The rules: no lock is held, and no capture breaks, wherever it is under way: the thread's strictness is lowered for
//! the call.

use warpool_driver::{DeviceId, HostOptions, HostPtr};

use super::Shared;
use super::register::register;
use crate::capture::RelaxedMode;
use crate::{Error, Result, lock};

/// Pinned memory, as it came.
#[derive(Clone, Debug)]
pub(super) struct Pinned {
    pub(super) ptr: HostPtr,
    pub(super) bytes: u64,
    how: How,
}

/// How memory was pinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum How {
    /// The driver allocated it.
    Allocated,
    /// Pages were mapped here, touched by so many threads, and pinned where they are.
    Registered { threads: u64 },
}

impl Shared {
    /// How the settings want memory pinned.
    pub(super) fn way(&self) -> How {
        let settings = lock(&self.settings);
        match settings.use_cuda_host_register {
            true => How::Registered { threads: settings.num_register_threads },
            false => How::Allocated,
        }
    }

    /// Whose context memory is pinned with: one that there is already, since a context takes memory of its device.
    /// `wanted`'s if it has one, or else the current device's, or else the first that has one. If none has, it cannot
    /// be helped: `wanted`'s, or the current device's.
    pub(super) fn pinning_device(&self, wanted: Option<DeviceId>) -> Result<DeviceId> {
        let current = self.instance.current_device_id();
        let first = wanted.unwrap_or(current);
        let all = (0..self.instance.device_count()).map(DeviceId);
        for device in [first, current].into_iter().chain(all) {
            if self.driver().context_is_active(device)? {
                return Ok(device);
            }
        }
        Ok(first)
    }

    /// Pins memory with `device`'s context, for the host and every device at one address.
    pub(super) fn pin(&self, device: DeviceId, bytes: u64, how: How) -> Result<Pinned> {
        let _relaxed = RelaxedMode::begin(self.driver())?;
        let ptr = match how {
            How::Allocated => {
                let options = HostOptions { portable: true, mapped: true, write_combined: false };
                self.driver().host_alloc(device, bytes, options)?
            }
            How::Registered { threads } => register(self.driver(), device, bytes, threads)?,
        };
        let pinned = Pinned { ptr, bytes, how };
        match self.check_address(device, &pinned) {
            Ok(()) => Ok(pinned),
            Err(error) => {
                // Tried twice: nobody else will know of this memory.
                let unpin = || self.unpin_relaxed(&pinned);
                if let Err(second) = unpin().or_else(|_| unpin()) {
                    tracing::warn!(error = %second, ptr = %pinned.ptr, "memory that is of no use stays pinned");
                }
                Err(error)
            }
        }
    }

    /// Gives it back. On real devices that waits for the work of the device.
    pub(super) fn unpin(&self, pinned: &Pinned) -> Result<()> {
        let _relaxed = RelaxedMode::begin(self.driver())?;
        self.unpin_relaxed(pinned)
    }

    fn unpin_relaxed(&self, pinned: &Pinned) -> Result<()> {
        match pinned.how {
            How::Allocated => Ok(self.driver().host_free(pinned.ptr)?),
            // The pages go with it: the driver had them.
            How::Registered { .. } => Ok(self.driver().host_unregister(pinned.ptr)?),
        }
    }

    /// Blocks have one address for everybody.
    fn check_address(&self, device: DeviceId, pinned: &Pinned) -> Result<()> {
        let seen = self.driver().host_device_ptr(device, pinned.ptr)?;
        if seen.0 == pinned.ptr.0 { Ok(()) } else { Err(Error::HostAddress { host: pinned.ptr, seen, device }) }
    }
}
