//! Events.

use crate::platform::process_id;
use crate::sim::driver::SimDriver;
use crate::sim::refuse::{refuse, unnamed};
use crate::sim::state::SimState;
use crate::sim::work::{Event, EventState, StreamPoint, Work};
use crate::{Call, DeviceId, ErrorCode, EventId, EventOptions, EventScope, Events, IpcEventHandle, Result, StreamId};

/// The first bytes of a handle of an exported event.
const IPC_MAGIC: &[u8; 8] = b"wpsimevt";

impl Events for SimDriver {
    fn event_create(&self, device: DeviceId, options: EventOptions) -> Result<EventId> {
        self.call(Call::EventCreate, |state| {
            state.use_device(device)?;
            if options.interprocess && !state.config.devices[device.0 as usize].properties.ipc_events {
                let why = format!("{device} cannot share events between processes");
                return refuse(ErrorCode::NotSupported, why);
            }
            if options.interprocess && options.timing {
                return refuse(ErrorCode::InvalidValue, "an interprocess event cannot have timing");
            }
            let event = Event { device, options, state: EventState::NeverRecorded };
            Ok(EventId(state.scheduler.events.insert(event)))
        })
    }

    fn event_destroy(&self, event: EventId) -> Result<()> {
        self.call(Call::EventDestroy, |state| {
            state.event(event)?;
            state.scheduler.events.remove(event.0);
            Ok(())
        })
    }

    fn event_record(&self, event: EventId, stream: StreamId, scope: EventScope) -> Result<()> {
        self.waiting_call(Call::EventRecord, |mut state| {
            let stream = state.live_stream(stream)?;
            let device = state.event(event)?.device;
            let stream_device = state.scheduler.streams.get(stream).device;
            if device != stream_device {
                let why = format!("{event} is on {device}, {stream} on {stream_device}");
                return refuse(ErrorCode::InvalidHandle, why);
            }
            state.forbid_implicit_wait(stream)?;
            match (state.captures.membership(stream).cloned(), scope) {
                (None, EventScope::External) => {
                    refuse(ErrorCode::IllegalState, "external records are only for streams that capture")
                }
                (None, EventScope::Plain) => {
                    if state.operation_before_room(stream).is_some() {
                        state = self.wait_for_queue(state, stream)?;
                        // Another thread may have destroyed it meanwhile.
                        state.event(event)?;
                    }
                    let at = state.call_number();
                    state.scheduler.enqueue_record(stream, event, at);
                    Ok(())
                }
                (Some(_), EventScope::External) => state.submit(stream, Work::Record(event), 0),
                (Some(member), EventScope::Plain) => {
                    state.captures.check_valid(member.capture)?;
                    let (capture, dependencies) = (member.capture, member.dependencies);
                    state.event(event)?.state = EventState::Captured { capture, dependencies };
                    Ok(())
                }
            }
        })
    }

    fn event_record_context(&self, event: EventId) -> Result<()> {
        self.call(Call::EventRecordContext, |state| {
            let device = state.event(event)?.device;
            state.use_device(device)?;
            if !state.captures.on_device(device).is_empty() {
                let why = format!("the work of {device} cannot be recorded while a stream of it captures");
                return refuse(ErrorCode::StreamCaptureUnsupported, why);
            }
            let at = state.call_number();
            state.scheduler.enqueue_record_of_device(device, event, at);
            Ok(())
        })
    }

    fn event_query(&self, event: EventId) -> Result<bool> {
        self.call(Call::EventQuery, |state| {
            let Some((point, done_at)) = queryable(state, event)? else { return Ok(true) };
            if done_at.is_some() {
                state.scheduler.streams.host_observed(&point);
            }
            Ok(done_at.is_some())
        })
    }

    fn event_synchronize(&self, event: EventId) -> Result<()> {
        self.waiting_call(Call::EventSynchronize, |mut state| {
            let Some((point, _)) = queryable(&mut state, event)? else { return Ok(()) };
            let (device, epoch) = (state.event(event)?.device, point.epoch);
            let mut state = self.wait(state, std::iter::once(epoch), |state| {
                match state.scheduler.events.get(event.0).map(|event| &event.state) {
                    // Otherwise another thread recorded it again or destroyed it: the timeline decides.
                    Some(EventState::Recorded { point, done_at }) if point.epoch == epoch => done_at.is_some(),
                    _ => state.scheduler.is_done(epoch),
                }
            });
            state.scheduler.streams.host_observed(&point);
            state.memory.trim_pools(device);
            state.use_device(device)
        })
    }

    fn event_elapsed_ms(&self, start: EventId, end: EventId) -> Result<f32> {
        self.call(Call::EventElapsedMs, |state| match (time_of(state, start)?, time_of(state, end)?) {
            (Some(start), Some(end)) => Ok(((end as f64 - start as f64) / 1e6) as f32),
            _ => Err(unnamed(ErrorCode::NotReady)),
        })
    }

    fn event_export(&self, event: EventId) -> Result<IpcEventHandle> {
        self.call(Call::EventExport, |state| {
            if !state.event(event)?.options.interprocess {
                return refuse(ErrorCode::InvalidHandle, format!("{event} was not created as interprocess"));
            }
            let mut handle = [0; 64];
            handle[..8].copy_from_slice(IPC_MAGIC);
            handle[8..16].copy_from_slice(&u64::from(process_id()).to_le_bytes());
            handle[16..24].copy_from_slice(&state.driver_id.to_le_bytes());
            handle[24..32].copy_from_slice(&event.0.to_le_bytes());
            Ok(IpcEventHandle(handle))
        })
    }

    fn event_import(&self, device: DeviceId, handle: &IpcEventHandle) -> Result<EventId> {
        self.call(Call::EventImport, |state| {
            state.use_device(device)?;
            if handle.0[..8] != *IPC_MAGIC {
                return refuse(ErrorCode::MapFailed, "these bytes are not the handle of an event");
            }
            if handle.0[8..16] == u64::from(process_id()).to_le_bytes() {
                let why = "an event cannot be opened in the process that exported it";
                return refuse(ErrorCode::InvalidContext, why);
            }
            refuse(ErrorCode::MapFailed, "the event belongs to a simulated driver of another process")
        })
    }
}

/// What an event last recorded, and when it was reached; `None` if nothing. Refused if that was in a capture.
fn queryable(state: &mut SimState, event: EventId) -> Result<Option<(StreamPoint, Option<u64>)>> {
    let recorded = match &state.event(event)?.state {
        EventState::NeverRecorded => None,
        EventState::Recorded { point, done_at } => Some((point.clone(), *done_at)),
        &EventState::Captured { capture, .. } => {
            if !state.captures.exists(capture) {
                let why = format!("{event} was last recorded in a capture that has ended");
                return refuse(ErrorCode::InvalidValue, why);
            }
            let why = format!("{} on {event}, which was recorded in the capture", state.current_call.call);
            return state.invalidate(&[capture], ErrorCode::CapturedEvent, &why);
        }
    };
    state.forbid_unsafe_call()?;
    Ok(recorded)
}

/// The time at which an event was reached; `None` if it has not been.
fn time_of(state: &mut SimState, event: EventId) -> Result<Option<u64>> {
    let Event { options, state, .. } = state.event(event)?;
    match state {
        _ if !options.timing => refuse(ErrorCode::InvalidHandle, format!("{event} has no timing")),
        EventState::Recorded { done_at, .. } => Ok(*done_at),
        EventState::Captured { .. } => {
            refuse(ErrorCode::InvalidHandle, format!("{event} was last recorded in a capture"))
        }
        EventState::NeverRecorded => refuse(ErrorCode::InvalidHandle, format!("{event} was never recorded")),
    }
}
