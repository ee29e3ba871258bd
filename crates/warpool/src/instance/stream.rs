//! A stream as a value: which device, which queue, and what can be done with it.
//!
//! Streams are not owned: a `Stream` is a name, equal to every other name of the same queue, and dropping it does
//! nothing. Where they come from is elsewhere: pools in `stream_pool.rs`, leases in `lease.rs`, what is current in
//! `current.rs`.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use warpool_driver::{CaptureState, DeviceId, Driver, ForeignStream, RawHandle, StreamId, StreamInfo};

use crate::{Device, Error, Event, Instance, Result};

/// A stream of one device. Cheap to clone; equal if device and id are. As the key of a map its [`id`](Self::id)
/// serves as well, and keeps no [`Instance`] alive.
///
/// Warpool never destroys a stream that somebody may still name: ids stay good as long as the [`Instance`], or, for an
/// [external](Self::external) stream, as long as its maker keeps it.
#[derive(Clone)]
pub struct Stream {
    instance: Instance,
    device: DeviceId,
    id: StreamId,
}

impl Stream {
    /// Takes in a stream that somebody else made, and keeps alive for as long as it is used here. The null handle is
    /// the default stream. The handle that means each thread's own default stream is refused
    /// ([`Error::PerThreadStream`]): one name would stand for many streams, and nothing that is kept by stream would be
    /// in order.
    pub fn external(device: &Device, stream: ForeignStream) -> Result<Self> {
        match stream {
            ForeignStream::NULL | ForeignStream::LEGACY => return device.default_stream(),
            ForeignStream::PER_THREAD => return Err(Error::PerThreadStream),
            _ => {}
        }
        Ok(Self::known(device, device.driver().stream_adopt(device.id(), stream)?))
    }

    /// The `Instance` that it belongs to.
    #[must_use]
    pub fn instance(&self) -> &Instance {
        &self.instance
    }

    /// Its device.
    #[must_use]
    pub fn device(&self) -> Device {
        Device::known(&self.instance, self.device)
    }

    /// Its device's id.
    #[must_use]
    pub fn device_id(&self) -> DeviceId {
        self.device
    }

    /// Its name for the driver. Never another stream's, even where a raw handle comes again.
    #[must_use]
    pub fn id(&self) -> StreamId {
        self.id
    }

    /// Whether it is its device's default stream.
    pub fn is_default(&self) -> Result<bool> {
        Ok(self.id == self.instance.default_stream_id(self.device)?)
    }

    /// What the driver knows about it: priority, kind, raw handle.
    pub fn info(&self) -> Result<StreamInfo> {
        Ok(self.driver().stream_info(self.id)?)
    }

    /// The driver's own handle, for libraries that want one.
    pub fn raw(&self) -> Result<RawHandle> {
        Ok(self.driver().stream_handle(self.id)?.raw)
    }

    /// Its priority; lower is more urgent.
    pub fn priority(&self) -> Result<i32> {
        Ok(self.info()?.priority)
    }

    /// Whether all work in it is done. Work that failed is an `Err`. Do not ask while it captures: that breaks the
    /// capture.
    pub fn query(&self) -> Result<bool> {
        Ok(self.driver().stream_query(self.id)?)
    }

    /// Waits until all work in it is done.
    pub fn synchronize(&self) -> Result<()> {
        Ok(self.driver().stream_synchronize(self.id)?)
    }

    /// Whether it takes part in a capture, be it a broken one.
    pub fn is_capturing(&self) -> Result<bool> {
        Ok(self.capture_state()? != CaptureState::None)
    }

    /// Where it stands with captures.
    pub fn capture_state(&self) -> Result<CaptureState> {
        Ok(self.driver().capture_state(self.id)?)
    }

    /// Marks the work that is in it now. See [`Event::record`].
    pub fn record_event(&self, event: &mut Event) -> Result<()> {
        event.record(self)
    }

    /// Makes its later work wait for what `event` marked. See [`Event::wait`].
    pub fn wait_event(&self, event: &Event) -> Result<()> {
        event.wait(self)
    }

    /// Makes its later work wait for all work that is in `other` now, of this or another device.
    pub fn wait_stream(&self, other: &Self) -> Result<()> {
        self.instance.expect_same(&other.instance, "the stream to wait for")?;
        let mut event = other.device().event_pool().take()?;
        event.record(other)?;
        // The wait is for the mark, not the event: it may go back to the pool, and be recorded again, at once.
        event.wait(self)
    }

    /// Runs `callback` on some host thread once the work before it is done; later work waits for it. It must not call
    /// the driver. Captured, it runs at every replay.
    pub fn host_callback(&self, callback: impl Fn() + Send + Sync + 'static) -> Result<()> {
        Ok(self.driver().stream_host_callback(self.id, Arc::new(callback))?)
    }

    /// A name for a stream that is known to exist.
    pub(crate) fn known(device: &Device, id: StreamId) -> Self {
        Self { instance: device.instance().clone(), device: device.id(), id }
    }

    pub(crate) fn driver(&self) -> &dyn Driver {
        &**self.instance.driver()
    }
}

impl Device {
    /// The device's default stream.
    pub fn default_stream(&self) -> Result<Stream> {
        Ok(Stream::known(self, self.instance().default_stream_id(self.id())?))
    }
}

impl PartialEq for Stream {
    fn eq(&self, other: &Self) -> bool {
        self.id == other.id && self.device == other.device && self.instance == other.instance
    }
}

impl Eq for Stream {}

impl Hash for Stream {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.device, self.id).hash(state);
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}", self.id, self.device)
    }
}
