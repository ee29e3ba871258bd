//! Events with options, created at first use.
//!
//! [`Instance::event`] creates nothing on the driver. The first [record](Event::record) takes an event from the pool of
//! the stream's device, or creates one; from then on it belongs to that device. When dropped, it returns to the pool;
//! `event_pool.rs` explains why that never calls the driver.

use warpool_driver::{DeviceId, EventId, IpcEventHandle};

use super::Instance;
use super::device::Device;
use super::event_pool::PooledEvent;
use super::stream::Stream;
use crate::{Endpoint, Error, Result};

/// The options of an event. The default is the cheapest: ordering only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EventOptions {
    /// Whether it records the time, for [`Event::elapsed_ms`].
    pub timing: bool,
    /// Whether a host thread that waits for it sleeps instead of spinning.
    pub blocking: bool,
    /// Whether it can be shared with other processes. Excludes `timing`.
    pub interprocess: bool,
    /// Whether recording it and waiting for it on a capturing stream become external event nodes, which act at every
    /// replay. On other streams it is a plain event. Graphs that use it must not outlive it.
    pub external: bool,
}

/// A point in a stream that can be waited for, queried and timed.
///
/// It can be moved but not copied. Until it is recorded it counts as completed: [`query`](Self::query) returns `true`,
/// [`synchronize`](Self::synchronize) and [`wait`](Self::wait) do nothing.
#[derive(Debug)]
pub struct Event {
    instance: Instance,
    options: EventOptions,
    created: Option<PooledEvent>,
    recorded: bool,
}

impl Instance {
    /// An event for ordering. The driver's event is created when it is first recorded.
    #[must_use]
    pub fn event(&self) -> Event {
        Event::lazy(self, EventOptions::default())
    }

    /// An event with timing.
    #[must_use]
    pub fn timing_event(&self) -> Event {
        Event::lazy(self, EventOptions { timing: true, ..EventOptions::default() })
    }

    /// An event with any options; [`Error::TimingInterprocess`] for `timing` with `interprocess`.
    pub fn event_with(&self, options: EventOptions) -> Result<Event> {
        if options.timing && options.interprocess {
            return Err(Error::TimingInterprocess);
        }
        Ok(Event::lazy(self, options))
    }
}

impl Event {
    /// Opens an event of another process from the 64 bytes that [`export`](Self::export) returned there.
    pub fn import(device: &Device, bytes: &[u8]) -> Result<Self> {
        let handle = bytes.try_into().map_err(|_| Error::IpcHandleLength { bytes: bytes.len() })?;
        let id = device.driver().event_import(device.id(), &IpcEventHandle(handle))?;
        Ok(Self {
            instance: device.instance().clone(),
            options: EventOptions { interprocess: true, ..EventOptions::default() },
            created: Some(PooledEvent::imported(device, id)),
            recorded: false,
        })
    }

    /// Its options.
    #[must_use]
    pub fn options(&self) -> EventOptions {
        self.options
    }

    /// Its device, once it is created.
    #[must_use]
    pub fn device(&self) -> Option<DeviceId> {
        self.created.as_ref().map(PooledEvent::device_id)
    }

    /// The driver's id of it, once it is created.
    #[must_use]
    pub fn id(&self) -> Option<EventId> {
        self.created.as_ref().map(PooledEvent::id)
    }

    /// Whether this process has recorded it.
    #[must_use]
    pub fn is_recorded(&self) -> bool {
        self.recorded
    }

    /// Creates it now, on `device`, instead of at the first record. Does nothing if it is created already.
    pub fn create(&mut self, device: &Device) -> Result<()> {
        self.instance.expect_same(device.instance(), "the device")?;
        let event = self.create_on(device)?.device_id();
        if event == device.id() { Ok(()) } else { Err(Error::EventExists { event, wanted: device.id() }) }
    }

    /// Records it after the work that `stream` holds now, replacing an earlier record. The first record determines the
    /// device: after that, a stream of another device is [`Error::EventDevice`].
    pub fn record(&mut self, stream: &Stream) -> Result<()> {
        self.instance.expect_same(stream.instance(), "the stream")?;
        let external = self.options.external;
        let event = self.create_on(&stream.device())?;
        if external { event.record_external(stream) } else { event.record(stream) }?;
        self.recorded = true;
        Ok(())
    }

    /// Records it only if it was never recorded. Returns whether it did.
    pub fn record_once(&mut self, stream: &Stream) -> Result<bool> {
        if self.recorded {
            return Ok(false);
        }
        self.record(stream)?;
        Ok(true)
    }

    /// Whether the work before it is done; `true` if it was never recorded. While it is recorded in a capture, a query
    /// is an error and invalidates the capture.
    pub fn query(&self) -> Result<bool> {
        self.created.as_ref().map_or(Ok(true), PooledEvent::query)
    }

    /// Waits until the work before it is done; returns at once if it was never recorded.
    pub fn synchronize(&self) -> Result<()> {
        self.created.as_ref().map_or(Ok(()), PooledEvent::synchronize)
    }

    /// Makes later work of `stream`, of any device, wait for the event; does nothing if it was never recorded.
    ///
    /// An `external` event that a graph waits for before its first record must be [created](Self::create) first.
    pub fn wait(&self, stream: &Stream) -> Result<()> {
        self.instance.expect_same(stream.instance(), "the stream")?;
        match &self.created {
            None => Ok(()),
            Some(event) if self.options.external => event.wait_external(stream),
            Some(event) => event.wait(stream),
        }
    }

    /// Milliseconds from this event to `end`; negative if `end` was first. Both must have timing, be recorded on the
    /// same device, and be completed; each condition has its own error.
    pub fn elapsed_ms(&self, end: &Self) -> Result<f32> {
        self.instance.expect_same(&end.instance, "the end event")?;
        for (event, which) in [(self, Endpoint::Start), (end, Endpoint::End)] {
            if !event.options.timing {
                return Err(Error::ElapsedWithoutTiming { which });
            }
        }
        let start = self.recorded_as(Endpoint::Start)?;
        let end = end.recorded_as(Endpoint::End)?;
        if start.device_id() != end.device_id() {
            return Err(Error::ElapsedAcrossDevices { start: start.device_id(), end: end.device_id() });
        }
        start
            .driver()
            .event_elapsed_ms(start.id(), end.id())
            .map_err(|error| if error.is_not_ready() { Error::ElapsedNotReady } else { error.into() })
    }

    /// Its handle for other processes. Creates the event on `device` if it is not created yet. Requires the option
    /// `interprocess`.
    pub fn export(&mut self, device: &Device) -> Result<[u8; 64]> {
        self.instance.expect_same(device.instance(), "the device")?;
        if !self.options.interprocess {
            return Err(Error::NotInterprocess);
        }
        let event = self.create_on(device)?;
        let IpcEventHandle(bytes) = event.driver().event_export(event.id())?;
        event.may_be_recorded_elsewhere();
        Ok(bytes)
    }

    fn lazy(instance: &Instance, options: EventOptions) -> Self {
        Self { instance: instance.clone(), options, created: None, recorded: false }
    }

    /// The driver's event, created on `device` if it was not before.
    fn create_on(&mut self, device: &Device) -> Result<&mut PooledEvent> {
        if self.created.is_none() {
            let EventOptions { timing, blocking, interprocess, external } = self.options;
            let options = warpool_driver::EventOptions { timing, blocking, interprocess };
            let mut event = PooledEvent::take(device, options)?;
            if external {
                event.never_reuse();
            }
            self.created = Some(event);
        }
        Ok(self.created.as_mut().expect("created just now, if not before"))
    }

    fn recorded_as(&self, which: Endpoint) -> Result<&PooledEvent> {
        self.created.as_ref().filter(|_| self.recorded).ok_or(Error::ElapsedNotRecorded { which })
    }
}

impl Stream {
    /// Records `event` after the work that the stream holds now. See [`Event::record`].
    pub fn record_event(&self, event: &mut Event) -> Result<()> {
        event.record(self)
    }

    /// Makes its later work wait for `event`. See [`Event::wait`].
    pub fn wait_event(&self, event: &Event) -> Result<()> {
        event.wait(self)
    }

    /// Makes its later work wait for all work that `other` holds now. `other` may be of another device.
    pub fn wait_stream(&self, other: &Self) -> Result<()> {
        self.instance().expect_same(other.instance(), "the stream to wait for")?;
        let mut event = other.device().event_pool().take()?;
        event.record(other)?;
        // The wait is for this record, so the event can return to the pool, and be recorded again, at once.
        event.wait(self)
    }
}
