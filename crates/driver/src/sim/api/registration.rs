//! Registered memory: what network cards and communication libraries do with device memory. They keep the physical
//! memory that was behind a range when it was registered: if the range gets other memory, they read and write the wrong
//! one, without any error.
//!
//! Not part of the contract: CUDA has no such calls.

use crate::sim::driver::SimDriver;
use crate::sim::refuse::{named_as, refuse};
use crate::sim::state::SimState;
use crate::sim::work::Work;
use crate::{Call, DevicePtr, ErrorCode, RegistrationId, Result, StreamId};

impl SimDriver {
    /// Registers a range with the memory that is behind it now. The label is for messages. `InvalidValue` unless all of
    /// it is device memory.
    ///
    /// ```
    /// use warpool_driver::sim::{HazardKind, SimConfig, SimDriver};
    /// use warpool_driver::*;
    ///
    /// # fn main() -> Result<()> {
    /// let gpu = SimDriver::new(SimConfig::default());
    /// let (device, stream) = (DeviceId(0), gpu.stream_create(DeviceId(0), StreamOptions::default())?);
    /// let memory = gpu.mem_alloc(device, 2 << 20)?;
    /// let registered: RegistrationId = gpu.register_memory(memory, 2 << 20, "activations")?;
    /// gpu.write_registered(registered, 0, 512, 7, stream)?;
    /// gpu.device_synchronize(device)?;
    /// assert_eq!(gpu.hazards(), []);
    ///
    /// gpu.mem_free(memory)?; // still registered
    /// gpu.write_registered(registered, 0, 512, 7, stream)?;
    /// gpu.device_synchronize(device)?;
    /// assert_eq!(gpu.hazards()[0].kind, HazardKind::StaleRegistration);
    /// gpu.deregister_memory(registered)?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn register_memory(&self, ptr: DevicePtr, bytes: u64, label: &str) -> Result<RegistrationId> {
        let mut state = self.lock();
        // Registering is no call of the driver: it comes after the last one.
        let at = state.call_number();
        named_as("register_memory", state.memory.register(ptr, bytes, label, at).map(RegistrationId))
    }

    /// Ends a registration. `InvalidHandle` if there is none.
    pub fn deregister_memory(&self, registration: RegistrationId) -> Result<()> {
        let ended = self.lock().memory.deregister(registration.0);
        let outcome = if ended { Ok(()) } else { refuse(ErrorCode::InvalidHandle, format!("{registration} is ended")) };
        named_as("deregister_memory", outcome)
    }

    /// Registrations whose memory has left its address, and why, oldest first. Each use of one would be a hazard.
    #[must_use]
    pub fn stale_registrations(&self) -> Vec<(RegistrationId, String)> {
        let state = self.lock();
        let stale = state.memory.stale_registrations();
        stale.into_iter().map(|(id, why)| (RegistrationId(id), why)).collect()
    }

    /// Enqueues a write to registered memory, as a peer or a network card makes it. When it runs, and other memory is
    /// at the addresses than was registered, that is a [`StaleRegistration`] and nothing is written. Counts as a
    /// [`fill`](crate::Copies::fill). `InvalidHandle` if the registration has ended.
    ///
    /// [`StaleRegistration`]: crate::sim::HazardKind::StaleRegistration
    pub fn write_registered(
        &self,
        registration: RegistrationId,
        offset: u64,
        bytes: u64,
        value: u8,
        stream: StreamId,
    ) -> Result<()> {
        self.submit(Call::Fill, stream, |state: &mut SimState, _| {
            let of = match state.memory.registration(registration.0) {
                Ok(of) => of,
                Err(why) => return Err(state.missing(why, registration)),
            };
            if offset.checked_add(bytes).is_none_or(|end| end > of.bytes) {
                return refuse(ErrorCode::InvalidValue, format!("{registration} has {} bytes", of.bytes));
            }
            let work = Work::WriteRegistered { registration: registration.0, offset, bytes, value };
            Ok((work, state.config.work.fill_nanos(bytes)))
        })
    }
}
