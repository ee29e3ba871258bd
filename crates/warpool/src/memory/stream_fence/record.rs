//! Events behind a stream's work, and waiting for it, without a block.

use warpool_driver::{ErrorCode, EventScope, StreamId};

use super::owner::FenceOwner;
use crate::capture::CaptureStatus;
use crate::{Device, Error, Instance, PooledEvent, Result};

/// Result of [`record`].
pub(crate) enum Recorded {
    /// The event is recorded behind the stream's work.
    Fenced(PooledEvent),
    /// The stream's work is known to be done.
    AlreadyDone,
    /// A capture forbids recording; to be retried once it is over.
    CaptureActive,
}

/// Records an event behind the work that `stream` holds now.
pub(crate) fn record(owner: &impl FenceOwner, stream: StreamId) -> Result<Recorded> {
    match owner.capture_status(stream)? {
        CaptureStatus::NotCapturing => {}
        CaptureStatus::StreamDestroyed => return record_destroyed(owner),
        CaptureStatus::Capturing(_) | CaptureStatus::Invalidated | CaptureStatus::Blocked => {
            return Ok(Recorded::CaptureActive);
        }
    }
    match record_on(owner, stream) {
        Err(Error::Driver(error)) if error.code == ErrorCode::InvalidHandle => record_destroyed(owner),
        recorded => recorded,
    }
}

/// Records an event behind the work of a stream that did not capture a moment ago; `InvalidHandle` if it is destroyed.
fn record_on(owner: &impl FenceOwner, stream: StreamId) -> Result<Recorded> {
    let driver = owner.instance().driver();
    let device = match owner.device_of(stream) {
        Some(device) => device,
        None => driver.stream_handle(stream)?.device,
    };
    let mut event = Device::from_id(owner.instance(), device).event_pool().take()?;
    driver.event_record(event.id(), stream, EventScope::Plain)?;
    let status = owner.capture_status(stream);
    if status != Ok(CaptureStatus::NotCapturing) {
        // Another thread began a capture since the first check: the event may belong to it.
        event.never_reuse();
        return status.map(|_| Recorded::CaptureActive);
    }
    Ok(Recorded::Fenced(event))
}

/// Records an event behind the work of a stream that nobody said uses the memory in question. `None` if a capture
/// forbids it, or if the stream is destroyed.
pub(crate) fn record_bystander(owner: &impl FenceOwner, stream: StreamId) -> Result<Option<PooledEvent>> {
    if owner.capture_status(stream)? != CaptureStatus::NotCapturing {
        return Ok(None);
    }
    match record_on(owner, stream) {
        Ok(Recorded::Fenced(event)) => Ok(Some(event)),
        Ok(Recorded::AlreadyDone | Recorded::CaptureActive) => Ok(None),
        Err(Error::Driver(error)) if error.code == ErrorCode::InvalidHandle => Ok(None),
        Err(error) => Err(error),
    }
}

/// The last work of a destroyed stream may still run, and only the devices can be waited for.
fn record_destroyed(owner: &impl FenceOwner) -> Result<Recorded> {
    let waited = !owner.has_captures() && wait_for_devices(owner.instance())?;
    Ok(if waited { Recorded::AlreadyDone } else { Recorded::CaptureActive })
}

/// Waits for all work of all devices. Returns `false` without waiting while a capture is active, which the wait would
/// invalidate; none can begin during the wait.
pub(crate) fn wait_for_devices(instance: &Instance) -> Result<bool> {
    let Some(_held_off) = instance.hold_off_captures() else { return Ok(false) };
    for device in instance.devices() {
        if instance.driver().context_is_active(device.id())? {
            device.synchronize()?;
        }
    }
    Ok(true)
}

/// Waits for the work that `stream` holds now. Returns `false` without waiting if a capture forbids it. Waits for an
/// event and not for the stream: another thread may begin a capture in it at any moment, which a wait for the stream
/// would invalidate.
pub(crate) fn wait_for_stream(owner: &impl FenceOwner, stream: StreamId) -> Result<bool> {
    match record(owner, stream)? {
        Recorded::Fenced(event) => {
            let _guard = owner.capture_guard()?;
            owner.instance().driver().event_synchronize(event.id())?;
            Ok(true)
        }
        Recorded::AlreadyDone => Ok(true),
        Recorded::CaptureActive => Ok(false),
    }
}

/// Makes later work of `later` wait for the work that `earlier` holds now, on the device.
pub(crate) fn order_after(instance: &Instance, earlier: StreamId, later: StreamId) -> Result<()> {
    let driver = instance.driver();
    let device = driver.stream_handle(earlier)?.device;
    let event = Device::from_id(instance, device).event_pool().take()?;
    driver.event_record(event.id(), earlier, EventScope::Plain)?;
    Ok(driver.stream_wait_event(later, event.id(), EventScope::Plain)?)
}
