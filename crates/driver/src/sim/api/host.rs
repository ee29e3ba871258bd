//! Pinned host memory.

use crate::sim::driver::Guard;
use crate::sim::driver::SimDriver;
use crate::sim::memory::{AccessContext, HostBytes, Memory, PinnedRange};
use crate::sim::order::{Accessor, HappensBefore, Operation};
use crate::sim::refuse::refuse;
use crate::sim::state::SimState;
use crate::{Call, DeviceId, DevicePtr, ErrorCode, HostMemory, HostOptions, HostPtr, HostRange, Result, StreamId};

impl HostMemory for SimDriver {
    fn host_alloc(&self, device: DeviceId, bytes: u64, _options: HostOptions) -> Result<HostPtr> {
        self.call(Call::HostAlloc, |state| {
            state.use_device(device)?;
            if bytes == 0 {
                return refuse(ErrorCode::InvalidValue, "0 bytes cannot be pinned");
            }
            let Some(contents) = HostBytes::allocate(bytes) else {
                return refuse(ErrorCode::OutOfMemory, "the host does not have that much memory");
            };
            if !state.memory.can_pin(contents.start(), bytes) {
                return refuse(ErrorCode::OutOfMemory, "device memory was placed at these host addresses");
            }
            state.spend(bytes);
            let at = state.call_number();
            Ok(state.memory.pin(bytes, contents, PinnedRange { device, registered: false }, at))
        })
    }

    fn host_free(&self, ptr: HostPtr) -> Result<()> {
        self.waiting_call(Call::HostFree, |state| match state.memory.pinned_range(ptr) {
            Some((start, PinnedRange { device, registered: false })) if start == ptr => self.unpin(state, ptr, device),
            _ => refuse(ErrorCode::InvalidValue, format!("{ptr} is not the start of a pinned allocation")),
        })
    }

    fn host_register(&self, device: DeviceId, range: HostRange, _options: HostOptions) -> Result<()> {
        self.call(Call::HostRegister, |state| {
            state.use_device(device)?;
            let (ptr, bytes) = (range.ptr(), range.bytes());
            if !state.config.devices[device.0 as usize].properties.host_registration {
                return refuse(ErrorCode::NotSupported, format!("{device} cannot register host memory"));
            }
            if bytes == 0 {
                return refuse(ErrorCode::InvalidValue, "0 bytes cannot be pinned");
            }
            if !state.memory.can_pin(ptr.0, bytes) {
                let why = format!("a part of {bytes} bytes at {ptr} is pinned already");
                return refuse(ErrorCode::HostMemoryAlreadyRegistered, why);
            }
            let Some(claimed) = range.claim() else {
                let why = format!("another driver has the pages at {ptr} pinned");
                return refuse(ErrorCode::HostMemoryAlreadyRegistered, why);
            };
            state.spend(bytes);
            let (contents, at) = (HostBytes::registered(claimed), state.call_number());
            state.memory.pin(bytes, contents, PinnedRange { device, registered: true }, at);
            Ok(())
        })
    }

    fn host_unregister(&self, ptr: HostPtr) -> Result<()> {
        self.waiting_call(Call::HostUnregister, |state| match state.memory.pinned_range(ptr) {
            Some((start, PinnedRange { device, registered: true })) if start == ptr => self.unpin(state, ptr, device),
            Some(_) => refuse(ErrorCode::InvalidValue, format!("{ptr} is not the start of a registered range")),
            None => refuse(ErrorCode::HostMemoryNotRegistered, format!("{ptr} is not pinned")),
        })
    }

    fn host_device_ptr(&self, device: DeviceId, ptr: HostPtr) -> Result<DevicePtr> {
        self.call(Call::HostDevicePtr, |state| {
            state.use_device(device)?;
            if !state.memory.is_pinned(ptr, 1) {
                return refuse(ErrorCode::InvalidValue, format!("{ptr} is not pinned"));
            }
            Ok(DevicePtr(ptr.0))
        })
    }

    fn host_read(&self, ptr: HostPtr, into: &mut [u8]) -> Result<()> {
        self.call(Call::HostRead, |state| {
            check_pinned(state, ptr, into.len() as u64)?;
            state.spend(into.len() as u64);
            let from = DevicePtr(ptr.0);
            let read = access_as_host(state, Operation::HostRead, |memory, by| memory.read(from, into, by));
            debug_assert!(read.is_ok(), "the range was checked");
            Ok(())
        })
    }

    fn host_write(&self, ptr: HostPtr, bytes: &[u8]) -> Result<()> {
        self.call(Call::HostWrite, |state| {
            check_pinned(state, ptr, bytes.len() as u64)?;
            state.spend(bytes.len() as u64);
            let to = DevicePtr(ptr.0);
            let written = access_as_host(state, Operation::HostWrite, |memory, by| memory.write(to, bytes, by));
            debug_assert!(written.is_ok(), "the range was checked");
            Ok(())
        })
    }
}

impl SimDriver {
    /// Waits for the device that a range was pinned with, then unpins it.
    fn unpin(&self, mut state: Guard<'_>, ptr: HostPtr, device: DeviceId) -> Result<()> {
        state.use_device(device)?;
        let mut state = self.wait_for_device(state, device);
        state.use_device(device)?;
        let at = state.call_number();
        match state.memory.unpin(ptr, at) {
            Some(bytes) => {
                state.spend(bytes);
                Ok(())
            }
            None => refuse(ErrorCode::InvalidValue, format!("{ptr} was unpinned by another thread meanwhile")),
        }
    }
}

fn check_pinned(state: &SimState, ptr: HostPtr, bytes: u64) -> Result<()> {
    if bytes == 0 || state.memory.is_pinned(ptr, bytes) {
        return Ok(());
    }
    refuse(ErrorCode::InvalidValue, format!("{bytes} bytes at {ptr} are not pinned"))
}

/// Accesses memory as the host.
fn access_as_host<R>(
    state: &mut SimState,
    operation: Operation,
    access: impl FnOnce(&mut Memory, &mut AccessContext<'_>) -> R,
) -> R {
    let (epoch, clock) = state.scheduler.streams.next_host_operation();
    let (stream, queued_at) = (StreamId(0), state.call_number());
    let accessor = Accessor { operation, epoch, number: epoch.seq, node: None, stream, queued_at };
    let before = HappensBefore { epoch, clock: &clock, graph: None };
    let now = state.scheduler.now();
    let hazards = &mut state.hazards;
    let mut by = AccessContext { device: DeviceId(0), accessor, before, now, any_device: true, hazards };
    access(&mut state.memory, &mut by)
}
