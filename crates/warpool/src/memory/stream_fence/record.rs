//! Recording events after a stream's work and waiting for it, independent of blocks.
//!
//! A stream's capture status is read and acted on while no capture can begin or end (`capture_gate.rs`). A stream may
//! still join a capture meanwhile, and captures that are begun without a graph are not blocked, so the status is read
//! again after an event was recorded.

use std::sync::Arc;

use warpool_driver::{DeviceId, ErrorCode, EventId, EventScope, StreamId};

use super::owner::FenceOwner;
use crate::capture::{CaptureStatus, RelaxedMode};
use crate::{Device, Error, Instance, PooledEvent, Result};

/// Result of [`record`].
pub(crate) enum Recorded {
    /// The event is recorded after the stream's work.
    Fenced(PooledEvent),
    /// The stream's work is known to be done.
    AlreadyDone,
    /// A capture forbids recording; retry after it ends.
    CaptureActive,
}

/// Records an event after the work that `stream` holds now.
pub(crate) fn record(owner: &impl FenceOwner, stream: StreamId) -> Result<Recorded> {
    match record_if_existing(owner, stream)? {
        Some(recorded) => Ok(recorded),
        None => record_destroyed(owner),
    }
}

/// As [`record`]; `None` if the stream is destroyed.
fn record_if_existing(owner: &impl FenceOwner, stream: StreamId) -> Result<Option<Recorded>> {
    let _frozen = owner.instance().freeze_captures_for_call()?;
    match owner.capture_status(stream)? {
        CaptureStatus::NotCapturing => {}
        CaptureStatus::StreamDestroyed => return Ok(None),
        CaptureStatus::Capturing(_) | CaptureStatus::Invalidated | CaptureStatus::Blocked => {
            return Ok(Some(Recorded::CaptureActive));
        }
    }
    let mut event = match record_event(owner.instance(), owner.device_of(stream), stream) {
        Err(Error::Driver(error)) if error.code == ErrorCode::InvalidHandle => return Ok(None),
        recorded => recorded?,
    };
    let status = owner.capture_status(stream);
    if status != Ok(CaptureStatus::NotCapturing) {
        // The stream has joined a capture since the first check: the event may belong to it.
        event.never_reuse();
        return status.map(|_| Some(Recorded::CaptureActive));
    }
    Ok(Some(Recorded::Fenced(event)))
}

/// Records an event in a stream; `device` is its device, if known. Call it while captures are frozen.
fn record_event(instance: &Instance, device: Option<DeviceId>, stream: StreamId) -> Result<PooledEvent> {
    let driver = instance.driver();
    let device = match device {
        Some(device) => device,
        None => driver.stream_handle(stream)?.device,
    };
    let event = Device::from_id(instance, device).event_pool().take()?;
    driver.event_record(event.id(), stream, EventScope::Plain)?;
    Ok(event)
}

/// Records an event after the work of a stream that has no recorded use of the memory in question. `None` if a capture
/// forbids it, or if the stream is destroyed.
pub(crate) fn record_bystander(owner: &impl FenceOwner, stream: StreamId) -> Result<Option<PooledEvent>> {
    match record_if_existing(owner, stream)? {
        Some(Recorded::Fenced(event)) => Ok(Some(event)),
        Some(Recorded::AlreadyDone | Recorded::CaptureActive) | None => Ok(None),
    }
}

/// The last work of a destroyed stream may still run. Only a wait for the devices covers it.
fn record_destroyed(owner: &impl FenceOwner) -> Result<Recorded> {
    let waited = !owner.has_captures() && wait_for_devices(owner.instance())?;
    Ok(if waited { Recorded::AlreadyDone } else { Recorded::CaptureActive })
}

/// Events after all work that the devices hold now, which name no stream: one for each device in use, or none for a
/// device that was waited for because its driver has no such events. `None` if a capture is active.
pub(super) fn record_devices(owner: &impl FenceOwner) -> Result<Option<Vec<Arc<PooledEvent>>>> {
    let instance = owner.instance();
    if owner.has_captures() {
        return Ok(None);
    }
    let Some(_held_off) = instance.hold_off_captures() else { return Ok(None) };
    let mut events = Vec::new();
    for device in instance.devices() {
        if !instance.driver().context_is_active(device.id())? {
            continue;
        }
        let event = device.event_pool().take()?;
        match instance.driver().event_record_context(event.id()) {
            Ok(()) => events.push(Arc::new(event)),
            // Captures that were begun without a graph.
            Err(error) if error.code == ErrorCode::StreamCaptureUnsupported => return Ok(None),
            Err(error) if error.code == ErrorCode::NotSupported => device.synchronize()?,
            Err(error) => return Err(error.into()),
        }
    }
    Ok(Some(events))
}

/// Waits for all work of all devices. Returns `false` without waiting if a capture is active, since the wait would
/// invalidate it. No capture can begin during the wait.
pub(crate) fn wait_for_devices(instance: &Instance) -> Result<bool> {
    let Some(_held_off) = instance.hold_off_captures() else { return Ok(false) };
    for device in instance.devices() {
        if instance.driver().context_is_active(device.id())? {
            device.synchronize()?;
        }
    }
    Ok(true)
}

/// Waits for the work that `stream` holds now. Returns `false` without waiting if a capture forbids it. It waits for an
/// event and not for the stream: another thread may begin a capture in the stream at any moment, and a wait for the
/// stream would invalidate it. If the stream's owner may have destroyed it, the devices are waited for instead.
pub(crate) fn wait_for_stream(owner: &impl FenceOwner, stream: StreamId) -> Result<bool> {
    if !owner.instance().may_name(stream) {
        return Ok(!owner.has_captures() && wait_for_devices(owner.instance())?);
    }
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

/// Waits for the work that `stream` holds now. `false` if it is capturing or destroyed.
pub(crate) fn synchronize(instance: &Instance, stream: StreamId) -> Result<bool> {
    let Some(event) = record_outside_captures(instance, stream)? else { return Ok(false) };
    let _relaxed = RelaxedMode::begin(&**instance.driver())?;
    instance.driver().event_synchronize(event.id())?;
    Ok(true)
}

/// Records an event after the work in `stream`. `None` if the stream is capturing or destroyed.
pub(crate) fn record_outside_captures(instance: &Instance, stream: StreamId) -> Result<Option<PooledEvent>> {
    let _frozen = instance.freeze_captures_for_call()?;
    match CaptureStatus::of(&**instance.driver(), stream)? {
        CaptureStatus::NotCapturing => record_event(instance, None, stream).map(Some),
        _ => Ok(None),
    }
}

/// Makes later work of `stream` wait for an event outside of captures, on the device. `false` if `stream` is capturing.
pub(crate) fn wait_for_event(owner: &impl FenceOwner, stream: StreamId, event: EventId) -> Result<bool> {
    let _frozen = owner.instance().freeze_captures_for_call()?;
    if owner.capture_status(stream)?.refuses_work() {
        return Ok(false);
    }
    owner.instance().driver().stream_wait_event(stream, event, EventScope::Plain)?;
    Ok(true)
}

/// Makes later work of `later` wait for the work that `earlier` holds now, on the device. Call it while captures are
/// frozen. Both streams must take part in the same capture, or in none.
pub(crate) fn order_after(instance: &Instance, earlier: StreamId, later: StreamId) -> Result<()> {
    let event = record_event(instance, None, earlier)?;
    Ok(instance.driver().stream_wait_event(later, event.id(), EventScope::Plain)?)
}

/// As [`order_after`], for two streams that must not be capturing. `false` if a capture forbids it.
pub(crate) fn order_outside_captures(instance: &Instance, earlier: StreamId, later: StreamId) -> Result<bool> {
    let driver = &**instance.driver();
    let [earlier_status, later_status] = {
        let _frozen = instance.freeze_captures_for_call()?;
        let statuses = [CaptureStatus::of(driver, earlier)?, CaptureStatus::of(driver, later)?];
        if statuses == [CaptureStatus::NotCapturing; 2] {
            order_after(instance, earlier, later)?;
            return Ok(true);
        }
        statuses
    };
    if earlier_status.refuses_work() || later_status.refuses_work() {
        Ok(false)
    } else if later_status == CaptureStatus::StreamDestroyed {
        Ok(true)
    } else {
        wait_for_devices(instance)
    }
}
