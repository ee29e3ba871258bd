//! Streams.

use std::sync::Arc;

use crate::sim::driver::SimDriver;
use crate::sim::refuse::refuse;
use crate::sim::state::SimState;
use crate::sim::work::{AwaitedStream, EventState, StreamKind, Work};
use crate::{
    Call, CaptureId, DeviceId, ErrorCode, EventId, EventScope, ForeignStream, HostCallback, PriorityRange, RawHandle,
    Result, StreamHandle, StreamId, StreamInfo, StreamOptions, Streams,
};

impl SimDriver {
    /// Creates a stream as code outside this driver would, such as a framework: with
    /// [`stream_adopt`](Streams::stream_adopt) it can be adopted by its raw handle. If it captures by then, its
    /// attributes can be read ([`stream_info`](Streams::stream_info)) only after the capture. The id is for its
    /// creator's work and for destroying it; an adopter gets the same id.
    pub fn create_foreign_stream(&self, device: DeviceId, options: StreamOptions) -> Result<StreamId> {
        let stream = self.stream_create(device, options)?;
        self.lock().scheduler.streams.get_mut(stream).attributes_hidden = true;
        Ok(stream)
    }
}

impl Streams for SimDriver {
    fn stream_default(&self, device: DeviceId) -> Result<StreamId> {
        self.call(Call::StreamDefault, |state| {
            state.check_device(device)?;
            Ok(state.scheduler.streams.legacy(device))
        })
    }

    fn stream_per_thread(&self, device: DeviceId) -> Result<StreamId> {
        self.call(Call::StreamPerThread, |state| {
            state.check_device(device)?;
            Ok(state.scheduler.streams.per_thread(device))
        })
    }

    fn stream_priority_range(&self, device: DeviceId) -> Result<PriorityRange> {
        self.call(Call::StreamPriorityRange, |state| {
            state.use_device(device)?;
            Ok(state.config.devices[device.0 as usize].priorities)
        })
    }

    fn stream_create(&self, device: DeviceId, options: StreamOptions) -> Result<StreamId> {
        self.call(Call::StreamCreate, |state| {
            state.use_device(device)?;
            let priority = state.config.devices[device.0 as usize].priorities.clamp(options.priority);
            let kind = if options.non_blocking { StreamKind::NonBlocking } else { StreamKind::Blocking };
            Ok(state.scheduler.streams.create(device, kind, priority))
        })
    }

    fn stream_destroy(&self, stream: StreamId) -> Result<()> {
        self.call(Call::StreamDestroy, |state| {
            let device = stream_device(state, stream)?;
            let streams = &state.scheduler.streams;
            if stream == streams.legacy(device) || stream == streams.per_thread(device) {
                return refuse(ErrorCode::InvalidHandle, "default streams cannot be destroyed");
            }
            let memory = state.captures.stream_destroyed(stream);
            state.release_graph_addresses(&memory);
            state.scheduler.destroy_stream(stream);
            Ok(())
        })
    }

    fn stream_adopt(&self, device: DeviceId, stream: ForeignStream) -> Result<StreamId> {
        self.call(Call::StreamAdopt, |state| {
            state.use_device(device)?;
            let raw = stream.raw();
            match raw.0 {
                0 | 1 => return Ok(state.scheduler.streams.legacy(device)),
                2 => return Ok(state.scheduler.streams.per_thread(device)),
                _ => {}
            }
            match state.scheduler.streams.with_raw(device, raw.0) {
                Some(stream) => {
                    // If it captures, the attributes are read later.
                    let _ = read_attributes(state, stream);
                    Ok(stream)
                }
                None => refuse(ErrorCode::InvalidHandle, format!("no stream of {device} has the handle {raw}")),
            }
        })
    }

    fn stream_info(&self, stream: StreamId) -> Result<StreamInfo> {
        self.call(Call::StreamInfo, |state| {
            let device = stream_device(state, stream)?;
            read_attributes(state, stream)?;
            let streams = &state.scheduler.streams;
            let queue = streams.get(stream);
            Ok(StreamInfo {
                device,
                priority: queue.priority,
                non_blocking: queue.kind == StreamKind::NonBlocking && stream != streams.per_thread(device),
                raw: raw_handle(state, stream),
            })
        })
    }

    fn stream_handle(&self, stream: StreamId) -> Result<StreamHandle> {
        self.call(Call::StreamHandle, |state| match state.scheduler.streams.live(stream) {
            Ok(queue) => Ok(StreamHandle { device: queue.device, raw: raw_handle(state, stream) }),
            Err(why) => Err(state.missing(why, stream)),
        })
    }

    fn stream_query(&self, stream: StreamId) -> Result<bool> {
        self.call(Call::StreamQuery, |state| {
            let stream = state.live_stream(stream)?;
            state.forbid_wait(stream)?;
            let awaited = state.scheduler.streams.awaited(stream);
            let is_done = awaited.iter().all(|awaited| state.scheduler.is_done(awaited.epoch()));
            if is_done {
                state.scheduler.streams.host_waited(stream, awaited);
            }
            Ok(is_done)
        })
    }

    fn stream_synchronize(&self, stream: StreamId) -> Result<()> {
        self.waiting_call(Call::StreamSynchronize, |mut state| {
            let stream = state.live_stream(stream)?;
            state.forbid_wait(stream)?;
            let device = state.scheduler.streams.get(stream).device;
            // Meanwhile other threads may queue work, which is not waited for, or destroy the stream.
            let awaited = state.scheduler.streams.awaited(stream);
            let mut state = self.wait(state, awaited.iter().map(AwaitedStream::epoch), |state| {
                awaited.iter().all(|awaited| state.scheduler.is_done(awaited.epoch()))
            });
            state.scheduler.streams.host_waited(stream, awaited);
            state.memory.trim_pools(device);
            state.use_device(device)
        })
    }

    fn stream_wait_event(&self, stream: StreamId, event: EventId, scope: EventScope) -> Result<()> {
        self.waiting_call(Call::StreamWaitEvent, |mut state| {
            let stream = state.live_stream(stream)?;
            let recorded = state.event(event)?.state.clone();
            state.forbid_implicit_wait(stream)?;
            let is_capturing = state.captures.is_capturing(stream);
            if scope == EventScope::External {
                if !is_capturing {
                    return refuse(ErrorCode::IllegalState, "external waits are only for streams that capture");
                }
                return state.submit(stream, Work::EventWait(event), 0);
            }
            match recorded {
                EventState::NeverRecorded => Ok(()),
                EventState::Captured { capture, dependencies } => {
                    join_capture(&mut state, stream, capture, &dependencies)
                }
                EventState::Recorded { .. } if is_capturing => {
                    let why = format!("{stream} waited for {event}, which was recorded outside the capture");
                    state.invalidate_capture_of(stream, ErrorCode::StreamCaptureIsolation, &why)
                }
                EventState::Recorded { point, done_at } => {
                    let kind = state.scheduler.streams.get(stream).kind;
                    if done_at.is_some() && kind == StreamKind::NonBlocking {
                        state.scheduler.streams.order_after(stream, &point);
                        return Ok(());
                    }
                    // Queued even if the event is done: the default-stream rules order other streams after the wait.
                    let mut state = self.wait_for_queue(state, stream)?;
                    state.scheduler.streams.order_after(stream, &point);
                    let at = state.call_number();
                    state.scheduler.enqueue(stream, Work::Marker, 0, vec![point.epoch], at);
                    Ok(())
                }
            }
        })
    }

    fn stream_host_callback(&self, stream: StreamId, callback: HostCallback) -> Result<()> {
        // Dropped without the lock if it is refused: what it owns may call the driver when it is dropped.
        let kept = Arc::clone(&callback);
        let outcome = self.submit(Call::StreamHostCallback, stream, |state, _| {
            Ok((Work::Callback(callback), state.config.work.callback))
        });
        drop(kept);
        outcome
    }
}

/// The device of a stream that exists. Has no other effect.
fn stream_device(state: &mut SimState, stream: StreamId) -> Result<DeviceId> {
    let device = match state.scheduler.streams.live(stream) {
        Ok(queue) => queue.device,
        Err(why) => return Err(state.missing(why, stream)),
    };
    state.use_device(device)?;
    Ok(device)
}

/// The raw handle of a stream that exists.
fn raw_handle(state: &SimState, stream: StreamId) -> RawHandle {
    let streams = &state.scheduler.streams;
    let queue = streams.get(stream);
    RawHandle(match stream {
        _ if stream == streams.legacy(queue.device) => 0,
        _ if stream == streams.per_thread(queue.device) => 2,
        _ => queue.raw,
    })
}

/// Reads the attributes of a foreign stream, unless it captures.
fn read_attributes(state: &mut SimState, stream: StreamId) -> Result<()> {
    let is_capturing = state.captures.is_capturing(stream);
    let queue = state.scheduler.streams.get_mut(stream);
    if queue.attributes_hidden && is_capturing {
        let why = "the attributes of a stream that was adopted while it captures can be read only after the capture";
        return refuse(ErrorCode::StreamCaptureUnsupported, why);
    }
    queue.attributes_hidden = false;
    Ok(())
}

/// A stream waits for an event of a capture, and so joins it.
fn join_capture(state: &mut SimState, stream: StreamId, capture: CaptureId, dependencies: &[u32]) -> Result<()> {
    if !state.captures.exists(capture) {
        return refuse(ErrorCode::InvalidValue, "the event was last recorded in a capture that has ended");
    }
    if state.scheduler.streams.get(stream).kind == StreamKind::Legacy {
        let why = format!("{stream}, the legacy default stream, would depend on the capture");
        return state.invalidate(&[capture], ErrorCode::StreamCaptureImplicit, &why);
    }
    let other = state.captures.membership(stream).map(|member| member.capture);
    if let Some(other) = other.filter(|&other| other != capture) {
        let why = format!("{stream} would merge {other} and {capture}");
        return state.invalidate(&[other, capture], ErrorCode::StreamCaptureMerge, &why);
    }
    state.captures.check_valid(capture)?;
    state.captures.join(stream, capture, dependencies);
    Ok(())
}
