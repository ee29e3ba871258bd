//! Events as programs use them: made when first needed, with options, with clear errors.
//!
//! Life of an event: made by [`Instance::event`] it is only a wish. The first [record](Event::record) takes an event from
//! the pool of the stream's device (or makes one); from then on it belongs to that device. Dropped, it goes back to
//! the pool. `event_pool.rs` says why that never calls the driver.

use warpool_driver::{DeviceId, EventId, IpcEventHandle};

use crate::error::Endpoint;
use crate::{Device, Error, Instance, PooledEvent, Result, Stream};

/// What an event is to be able to do. The default is the cheapest: order only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EventOptions {
    /// Takes the time, for [`Event::elapsed_ms`].
    pub timing: bool,
    /// A host thread that waits for it sleeps instead of spinning.
    pub blocking: bool,
    /// Can be shared with other processes. Excludes `timing`.
    pub interprocess: bool,
    /// Speaks to the world outside when it is used on a stream that captures: recording and waiting become nodes that
    /// act at every replay. On a stream that does not capture it is a plain event. Its graphs must not outlive it.
    pub external: bool,
}

/// A mark in a stream that can be waited for, asked about and timed.
///
/// It can be moved, not copied. Until it is recorded it counts as done: [`query`](Self::query) says `true`,
/// [`synchronize`](Self::synchronize) and [`wait`](Self::wait) do nothing.
#[derive(Debug)]
pub struct Event {
    instance: Instance,
    options: EventOptions,
    made: Option<PooledEvent>,
    recorded: bool,
}

impl Instance {
    /// An event for ordering. Nothing is made before it is first recorded.
    #[must_use]
    pub fn event(&self) -> Event {
        Event::lazy(self, EventOptions::default())
    }

    /// An event that takes the time.
    #[must_use]
    pub fn timing_event(&self) -> Event {
        Event::lazy(self, EventOptions { timing: true, ..EventOptions::default() })
    }

    /// An event with any options; [`Error::TimingInterprocess`] for the pair that excludes itself.
    pub fn event_with(&self, options: EventOptions) -> Result<Event> {
        if options.timing && options.interprocess {
            return Err(Error::TimingInterprocess);
        }
        Ok(Event::lazy(self, options))
    }
}

impl Event {
    /// Opens an event of another process from the 64 bytes that [`export`](Self::export) gave there.
    pub fn import(device: &Device, bytes: &[u8]) -> Result<Self> {
        let handle = bytes.try_into().map_err(|_| Error::IpcHandleLength { bytes: bytes.len() })?;
        let id = device.driver().event_import(device.id(), &IpcEventHandle(handle))?;
        Ok(Self {
            instance: device.instance().clone(),
            options: EventOptions { interprocess: true, ..EventOptions::default() },
            made: Some(PooledEvent::imported(device, id)),
            recorded: false,
        })
    }

    /// The options that it was asked for with.
    #[must_use]
    pub fn options(&self) -> EventOptions {
        self.options
    }

    /// Its device, once it has one.
    #[must_use]
    pub fn device(&self) -> Option<DeviceId> {
        self.made.as_ref().map(PooledEvent::device_id)
    }

    /// Its name for the driver, once it has one.
    #[must_use]
    pub fn id(&self) -> Option<EventId> {
        self.made.as_ref().map(PooledEvent::id)
    }

    /// Whether this process has recorded it.
    #[must_use]
    pub fn is_recorded(&self) -> bool {
        self.recorded
    }

    /// Makes it now, on `device`, rather than at the first record. Does nothing if it is there already.
    pub fn create(&mut self, device: &Device) -> Result<()> {
        self.instance.expect_same(device.instance(), "the device")?;
        let made = self.made_on(device)?.device_id();
        if made == device.id() { Ok(()) } else { Err(Error::EventExists { event: made, wanted: device.id() }) }
    }

    /// Marks the work that is in `stream` now, and forgets what it marked before. The first time it also settles
    /// the device: after that, a stream of another is [`Error::EventDevice`].
    pub fn record(&mut self, stream: &Stream) -> Result<()> {
        self.instance.expect_same(stream.instance(), "the stream")?;
        let external = self.options.external;
        let event = self.made_on(&stream.device())?;
        if external { event.record_external(stream) } else { event.record(stream) }?;
        self.recorded = true;
        Ok(())
    }

    /// Records only if it was never recorded, and says whether it did.
    pub fn record_once(&mut self, stream: &Stream) -> Result<bool> {
        if self.recorded {
            return Ok(false);
        }
        self.record(stream)?;
        Ok(true)
    }

    /// Whether the marked work is done; `true` if none was marked. While it marks work in a capture it must not be
    /// asked: that is an error, and breaks the capture.
    pub fn query(&self) -> Result<bool> {
        self.made.as_ref().map_or(Ok(true), PooledEvent::query)
    }

    /// Waits until the marked work is done; nothing if none was marked.
    pub fn synchronize(&self) -> Result<()> {
        self.made.as_ref().map_or(Ok(()), PooledEvent::synchronize)
    }

    /// Makes later work of `stream`, of any device, wait for the marked work; nothing if none was marked.
    ///
    /// An `external` event that is to be waited for by a graph before anybody recorded it must be
    /// [created](Self::create) first.
    pub fn wait(&self, stream: &Stream) -> Result<()> {
        self.instance.expect_same(stream.instance(), "the stream")?;
        match &self.made {
            None => Ok(()),
            Some(event) if self.options.external => event.wait_external(stream),
            Some(event) => event.wait(stream),
        }
    }

    /// Milliseconds from this event to `end`; negative if `end` came first. Both must have been made with
    /// timing, recorded on one device, and be done; each of these has its own error.
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

    /// Its name for other processes; makes it, on `device`, if it is not there yet. Needs the option `interprocess`.
    pub fn export(&mut self, device: &Device) -> Result<[u8; 64]> {
        self.instance.expect_same(device.instance(), "the device")?;
        if !self.options.interprocess {
            return Err(Error::NotInterprocess);
        }
        let event = self.made_on(device)?;
        let IpcEventHandle(bytes) = event.driver().event_export(event.id())?;
        event.may_be_marked_elsewhere();
        Ok(bytes)
    }

    fn lazy(instance: &Instance, options: EventOptions) -> Self {
        Self { instance: instance.clone(), options, made: None, recorded: false }
    }

    /// The event, made on `device` if it was not made before.
    fn made_on(&mut self, device: &Device) -> Result<&mut PooledEvent> {
        if self.made.is_none() {
            let EventOptions { timing, blocking, interprocess, external } = self.options;
            let options = warpool_driver::EventOptions { timing, blocking, interprocess };
            let mut event = PooledEvent::take(device, options)?;
            if external {
                event.never_reuse();
            }
            self.made = Some(event);
        }
        Ok(self.made.as_mut().expect("made just now, if not before"))
    }

    fn recorded_as(&self, which: Endpoint) -> Result<&PooledEvent> {
        self.made.as_ref().filter(|_| self.recorded).ok_or(Error::ElapsedNotRecorded { which })
    }
}
