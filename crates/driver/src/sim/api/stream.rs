//! Streams of the simulated machine.

use std::sync::Arc;

use crate::sim::SimDriver;
use crate::sim::work::Work;
use crate::sim::world::{EventMark, StreamKind, World};
use crate::{
    Call, DeviceId, ErrorCode, EventId, EventScope, ForeignStream, HostCallback, PriorityRange, RawHandle, Result,
    StreamHandle, StreamId, StreamInfo, StreamOptions, Streams,
};

impl SimDriver {
    /// Makes a stream as another part of the program would that has a driver of its own, such as a framework: with
    /// [`stream_adopt`](Streams::stream_adopt) it can be taken in by its handle. If it captures by then, it says what
    /// it is ([`stream_info`](Streams::stream_info)) only after that. The id is there for its maker's work; the adopter
    /// gets the same, and destroying it is the maker's business.
    pub fn create_foreign_stream(&self, device: DeviceId, options: StreamOptions) -> Result<StreamId> {
        let stream = self.stream_create(device, options)?;
        self.lock().stream_mut(stream).untold = true;
        Ok(stream)
    }
}

impl Streams for SimDriver {
    fn stream_default(&self, device: DeviceId) -> Result<StreamId> {
        self.call(Call::StreamDefault, |world| Ok(world.device_any(device)?.legacy))
    }

    fn stream_per_thread(&self, device: DeviceId) -> Result<StreamId> {
        self.call(Call::StreamPerThread, |world| Ok(world.device_any(device)?.per_thread))
    }

    fn stream_priority_range(&self, device: DeviceId) -> Result<PriorityRange> {
        self.call(Call::StreamPriorityRange, |world| {
            world.device(device)?;
            Ok(world.config.devices[device.0 as usize].priorities)
        })
    }

    fn stream_create(&self, device: DeviceId, options: StreamOptions) -> Result<StreamId> {
        self.call(Call::StreamCreate, |world| {
            world.device(device)?;
            let priority = world.config.devices[device.0 as usize].priorities.clamp(options.priority);
            let kind = if options.non_blocking { StreamKind::NonBlocking } else { StreamKind::Blocking };
            Ok(world.add_stream(device, kind, priority))
        })
    }

    fn stream_destroy(&self, stream: StreamId) -> Result<()> {
        self.call(Call::StreamDestroy, |world| {
            let device = world.known_stream(stream)?;
            let state = &world.devices[device.0 as usize];
            if stream == state.legacy || stream == state.per_thread {
                return world.fail(ErrorCode::InvalidHandle, "default streams cannot be destroyed");
            }
            world.leave_capture(stream);
            world.end_hold(stream);
            world.stream_mut(stream).gone = true;
            world.retire_if_drained(stream);
            Ok(())
        })
    }

    fn stream_adopt(&self, device: DeviceId, stream: ForeignStream) -> Result<StreamId> {
        self.call(Call::StreamAdopt, |world| {
            let state = world.device(device)?;
            let raw = stream.raw();
            match raw.0 {
                0 | 1 => return Ok(state.legacy),
                2 => return Ok(state.per_thread),
                _ => {}
            }
            let known = world.devices[device.0 as usize]
                .streams
                .iter()
                .copied()
                .find(|&stream| world.stream(stream).raw == raw.0 && !world.stream(stream).gone);
            match known {
                Some(stream) => {
                    // Best now. If it captures, whoever asks later learns why.
                    let _ = world.ask_traits(stream);
                    Ok(stream)
                }
                None => world.fail(ErrorCode::InvalidHandle, format!("no stream of {device} has the handle {raw}")),
            }
        })
    }

    fn stream_info(&self, stream: StreamId) -> Result<StreamInfo> {
        self.call(Call::StreamInfo, |world| {
            let device = world.known_stream(stream)?;
            world.ask_traits(stream)?;
            let state = world.stream(stream);
            Ok(StreamInfo {
                device,
                priority: state.priority,
                non_blocking: state.kind == StreamKind::NonBlocking
                    && stream != world.devices[device.0 as usize].per_thread,
                raw: world.raw_of(stream),
            })
        })
    }

    fn stream_handle(&self, stream: StreamId) -> Result<StreamHandle> {
        self.call(Call::StreamHandle, |world| match world.streams.get(stream.0) {
            Some(state) if !state.gone => Ok(StreamHandle { device: state.device, raw: world.raw_of(stream) }),
            // Gives the error.
            _ => world.live_stream(stream).map(|_| unreachable!("it is gone")),
        })
    }

    fn stream_query(&self, stream: StreamId) -> Result<bool> {
        self.call(Call::StreamQuery, |world| {
            let stream = world.live_stream(stream)?;
            world.forbid_waiting(stream)?;
            let awaited = world.awaited(stream);
            let done = awaited.iter().all(|&(_, last)| world.is_done(last));
            if done {
                world.host_waited(stream, &awaited);
            }
            Ok(done)
        })
    }

    fn stream_synchronize(&self, stream: StreamId) -> Result<()> {
        let mut world = self.enter(Call::StreamSynchronize)?;
        let stream = world.live_stream(stream)?;
        world.forbid_waiting(stream)?;
        let device = world.stream(stream).device;
        // Meanwhile other threads may add work, which is not waited for, or destroy the stream.
        let awaited = world.awaited(stream);
        let stamps = awaited.iter().map(|&(_, last)| last);
        let mut world = self.wait(world, stamps, |world| awaited.iter().all(|&(_, last)| world.is_done(last)));
        world.host_waited(stream, &awaited);
        world.settle_pools(device);
        world.device(device).map(drop)
    }

    fn stream_wait_event(&self, stream: StreamId, event: EventId, scope: EventScope) -> Result<()> {
        let mut world = self.enter(Call::StreamWaitEvent)?;
        let stream = world.live_stream(stream)?;
        let mark = world.event(event)?.mark.clone();
        world.forbid_implicit(stream)?;
        let capturing = world.stream(stream).capture.is_some();
        if scope == EventScope::External {
            if !capturing {
                return world.fail(ErrorCode::IllegalState, "external waits are for streams that capture");
            }
            return world.submit(stream, Work::EventWait(event), 0);
        }
        match mark {
            EventMark::Never => Ok(()),
            EventMark::Captured { capture, deps } => world.join_capture(stream, capture, &deps),
            EventMark::Recorded { .. } if capturing => {
                let why = format!("{stream} waited for {event}, which was recorded outside the capture");
                world.break_capture_of(stream, ErrorCode::StreamCaptureIsolation, why)
            }
            EventMark::Recorded { stamp, base, done } => {
                if done.is_some() && world.stream(stream).kind == StreamKind::NonBlocking {
                    world.learn(stream, &base, stamp);
                    return Ok(());
                }
                // Also behind a mark that has been reached: a wait is an action, which the default-stream rules hand
                // on.
                let mut world = self.wait_for_room(world, stream)?;
                world.learn(stream, &base, stamp);
                world.enqueue(stream, Work::Marker, 0, vec![stamp]);
                Ok(())
            }
        }
    }

    fn stream_host_callback(&self, stream: StreamId, callback: HostCallback) -> Result<()> {
        // Held until the lock is gone: what a refused one holds may call the driver as it goes.
        let held = Arc::clone(&callback);
        let outcome = self.submit(Call::StreamHostCallback, stream, |world, _| {
            Ok((Work::Callback(callback), world.config.work.callback))
        });
        drop(held);
        outcome
    }
}

impl World {
    /// The device of a stream that lives; asking changes nothing.
    fn known_stream(&mut self, stream: StreamId) -> Result<DeviceId> {
        let device = match self.streams.get(stream.0) {
            Some(state) if !state.gone => state.device,
            // Gives the error.
            _ => return self.live_stream(stream).map(|_| DeviceId(0)),
        };
        self.device(device)?;
        Ok(device)
    }

    /// The handle of a stream that is there.
    fn raw_of(&self, stream: StreamId) -> RawHandle {
        let state = self.stream(stream);
        let own = &self.devices[state.device.0 as usize];
        RawHandle(match stream {
            _ if stream == own.legacy => 0,
            _ if stream == own.per_thread => 2,
            _ => state.raw,
        })
    }

    /// Asks a stream that lives what it is, if that is not known.
    fn ask_traits(&mut self, stream: StreamId) -> Result<()> {
        if self.stream(stream).untold && self.stream(stream).capture.is_some() {
            let why = "a stream that was adopted while it captures tells nothing about itself before that ends";
            return self.fail(ErrorCode::StreamCaptureUnsupported, why);
        }
        self.stream_mut(stream).untold = false;
        Ok(())
    }

    /// Gives work to a stream: into the graph if it captures, into its queue if not.
    pub fn submit(&mut self, stream: StreamId, work: Work, nanos: u64) -> Result<()> {
        if self.stream(stream).capture.is_some() {
            return self.add_node(stream, work, nanos);
        }
        self.enqueue(stream, work, nanos, Vec::new());
        Ok(())
    }
}
