//! Events of the simulated machine.

use std::sync::Arc;

use crate::sim::SimDriver;
use crate::sim::work::Work;
use crate::sim::world::{Event, EventMark, World};
use crate::{Call, DeviceId, ErrorCode, EventId, EventOptions, EventScope, Events, IpcEventHandle, Result, StreamId};

/// What exported events of simulated machines begin with.
const IPC_MAGIC: &[u8; 8] = b"wpsimevt";

impl Events for SimDriver {
    fn event_create(&self, device: DeviceId, options: EventOptions) -> Result<EventId> {
        self.call(Call::EventCreate, |world| {
            world.device(device)?;
            if options.interprocess && !world.config.devices[device.0 as usize].properties.ipc_events {
                return world.fail(ErrorCode::NotSupported, format!("{device} shares no events between processes"));
            }
            if options.interprocess && options.timing {
                return world.fail(ErrorCode::InvalidValue, "an interprocess event cannot take the time");
            }
            Ok(EventId(world.events.insert(Event { device, options, mark: EventMark::Never })))
        })
    }

    fn event_destroy(&self, event: EventId) -> Result<()> {
        self.call(Call::EventDestroy, |world| {
            world.event(event)?;
            world.events.remove(event.0);
            Ok(())
        })
    }

    fn event_record(&self, event: EventId, stream: StreamId, scope: EventScope) -> Result<()> {
        let mut world = self.enter(Call::EventRecord)?;
        let stream = world.live_stream(stream)?;
        let (own, theirs) = (world.event(event)?.device, world.stream(stream).device);
        if own != theirs {
            return world.fail(ErrorCode::InvalidHandle, format!("{event} is of {own}, {stream} of {theirs}"));
        }
        world.forbid_implicit(stream)?;
        match (world.stream(stream).capture.clone(), scope) {
            (None, EventScope::External) => {
                world.fail(ErrorCode::IllegalState, "external records are for streams that capture")
            }
            (None, EventScope::Plain) => {
                let mut world = self.wait_for_room(world, stream)?;
                // Another thread may have destroyed it meanwhile.
                world.event(event)?;
                let stamp = world.enqueue(stream, Work::Record(event), 0, Vec::new());
                let base = Arc::clone(&world.stream(stream).base);
                world.mark(event, EventMark::Recorded { stamp, base, done: None });
                Ok(())
            }
            (Some(_), EventScope::External) => world.submit(stream, Work::Record(event), 0),
            (Some(joined), EventScope::Plain) => {
                world.check_unbroken(joined.capture)?;
                world.mark(event, EventMark::Captured { capture: joined.capture, deps: joined.deps });
                Ok(())
            }
        }
    }

    fn event_query(&self, event: EventId) -> Result<bool> {
        self.call(Call::EventQuery, |world| {
            world.askable(event)?;
            let mark = world.event(event)?.mark.clone();
            if let EventMark::Recorded { stamp, base, done } = mark {
                if done.is_none() {
                    return Ok(false);
                }
                world.host_learns(&base, stamp);
            }
            Ok(true)
        })
    }

    fn event_synchronize(&self, event: EventId) -> Result<()> {
        let mut world = self.enter(Call::EventSynchronize)?;
        world.askable(event)?;
        let state = world.event(event)?;
        let device = state.device;
        let EventMark::Recorded { stamp, base, .. } = state.mark.clone() else { return Ok(()) };
        let mut world = self.wait(world, std::iter::once(stamp), |world| {
            match world.events.get(event.0).map(|state| &state.mark) {
                // Recorded again or destroyed by another thread meanwhile: what was waited for is in the lane.
                Some(EventMark::Recorded { stamp: now, done, .. }) if *now == stamp => done.is_some(),
                _ => world.lanes[stamp.lane as usize].done >= stamp.seq,
            }
        });
        world.host_learns(&base, stamp);
        world.settle_pools(device);
        world.device(device).map(drop)
    }

    fn event_elapsed_ms(&self, start: EventId, end: EventId) -> Result<f32> {
        self.call(Call::EventElapsedMs, |world| {
            let (start, end) = (world.time_of(start)?, world.time_of(end)?);
            match (start, end) {
                (Some(start), Some(end)) => Ok(((end as f64 - start as f64) / 1e6) as f32),
                _ => Err(world.error(ErrorCode::NotReady)),
            }
        })
    }

    fn event_export(&self, event: EventId) -> Result<IpcEventHandle> {
        self.call(Call::EventExport, |world| {
            if !world.event(event)?.options.interprocess {
                return world.fail(ErrorCode::InvalidHandle, format!("{event} was not made for other processes"));
            }
            let mut handle = [0; 64];
            handle[..8].copy_from_slice(IPC_MAGIC);
            handle[8..16].copy_from_slice(&u64::from(std::process::id()).to_le_bytes());
            handle[16..24].copy_from_slice(&world.machine.to_le_bytes());
            handle[24..32].copy_from_slice(&event.0.to_le_bytes());
            Ok(IpcEventHandle(handle))
        })
    }

    fn event_import(&self, device: DeviceId, handle: &IpcEventHandle) -> Result<EventId> {
        self.call(Call::EventImport, |world| {
            world.device(device)?;
            if handle.0[..8] != *IPC_MAGIC {
                return world.fail(ErrorCode::MapFailed, "these bytes name no event");
            }
            if handle.0[8..16] == u64::from(std::process::id()).to_le_bytes() {
                return world
                    .fail(ErrorCode::InvalidContext, "an event cannot be opened in the process that exported it");
            }
            // No two processes share a simulated machine.
            world.fail(ErrorCode::MapFailed, "the event is of a simulated machine in another process")
        })
    }
}

impl World {
    fn mark(&mut self, event: EventId, mark: EventMark) {
        self.events.get_mut(event.0).expect("an event that was looked up").mark = mark;
    }

    /// Whether an event may be asked about: not while, and not after, it belongs to a capture.
    fn askable(&mut self, event: EventId) -> Result<()> {
        if let EventMark::Captured { capture, .. } = self.event(event)?.mark {
            if self.captures.get(capture.0).is_none() {
                return self
                    .fail(ErrorCode::InvalidValue, format!("{event} was last recorded in a capture that is over"));
            }
            let why = format!("{} asked about {event}, which was recorded in the capture", self.call);
            return self.break_captures(&[capture], ErrorCode::CapturedEvent, why);
        }
        self.forbid_guarded()
    }

    /// When an event was reached; `None` if it has not been.
    fn time_of(&mut self, event: EventId) -> Result<Option<u64>> {
        let state = self.event(event)?;
        let timing = state.options.timing;
        match state.mark {
            EventMark::Recorded { done, .. } if timing => Ok(done),
            _ if !timing => self.fail(ErrorCode::InvalidHandle, format!("{event} does not take the time")),
            EventMark::Captured { .. } => {
                self.fail(ErrorCode::InvalidHandle, format!("{event} was last recorded in a capture"))
            }
            _ => self.fail(ErrorCode::InvalidHandle, format!("{event} was never recorded")),
        }
    }
}
