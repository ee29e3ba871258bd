//! A stream as a value: its device, its id, and the operations on it.
//!
//! A `Stream` does not own the driver's stream: dropping it does nothing. Streams are created elsewhere: pools in
//! `stream_pool.rs`, leases in `lease.rs`; the current stream is in `current.rs`. Operations with events are in
//! `event.rs`.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use warpool_driver::{CaptureState, DeviceId, Driver, ForeignStream, RawHandle, StreamId, StreamInfo};

use super::device::Device;
use super::{DeviceState, Instance};
use crate::capture_status::CaptureStatus;
use crate::{Error, Result};

/// A stream of one device. Cheap to clone; two are equal if device and id are. As the key of a map use its
/// [`id`](Self::id), which keeps no [`Instance`] alive.
///
/// Warpool destroys no stream while its [`Instance`] lives. An [external](Self::external) stream must be kept alive by
/// its creator.
#[derive(Clone)]
pub struct Stream {
    instance: Instance,
    device: DeviceId,
    id: StreamId,
}

impl Stream {
    /// A stream that was created outside of Warpool, and stays alive for as long as it is used here. The null handle is
    /// the default stream. The handle of the per-thread default stream is [`Error::PerThreadStream`]: it is a different
    /// stream on each thread, so state that is kept by stream would not be ordered.
    pub fn external(device: &Device, stream: ForeignStream) -> Result<Self> {
        match stream {
            ForeignStream::NULL | ForeignStream::LEGACY => return device.default_stream(),
            ForeignStream::PER_THREAD => return Err(Error::PerThreadStream),
            _ => {}
        }
        Ok(Self::from_id(device, device.driver().stream_adopt(device.id(), stream)?))
    }

    /// Says that this external stream exists as long as its [`Instance`], such as a stream of another library's pool.
    /// Then memory that is freed without a driver call, or while a capture forbids one, waits for this stream alone.
    /// For other external streams it waits for all work of the devices, because their owner may have destroyed them by
    /// the time that a call may record an event.
    ///
    /// # Safety
    /// The stream is not destroyed while the `Instance` is used: a real driver dereferences its handle.
    #[expect(unsafe_code, reason = "nothing can check how long another library keeps a stream")]
    pub unsafe fn promise_to_keep(&self) {
        self.instance.promise(self.id);
    }

    /// The `Instance` that it belongs to.
    #[inline]
    #[must_use]
    pub fn instance(&self) -> &Instance {
        &self.instance
    }

    /// Its device.
    #[must_use]
    pub fn device(&self) -> Device {
        Device::from_id(&self.instance, self.device)
    }

    /// Its device's id.
    #[inline]
    #[must_use]
    pub fn device_id(&self) -> DeviceId {
        self.device
    }

    /// The driver's id of it. Never reused for another stream, even if the driver reuses the raw handle.
    #[inline]
    #[must_use]
    pub fn id(&self) -> StreamId {
        self.id
    }

    /// Whether it is its device's default stream.
    pub fn is_default(&self) -> Result<bool> {
        Ok(self.id == self.instance.default_stream_id(self.device)?)
    }

    /// Priority, kind and raw handle, from the driver.
    pub fn info(&self) -> Result<StreamInfo> {
        Ok(self.driver().stream_info(self.id)?)
    }

    /// The driver's own handle, for libraries that need one.
    pub fn raw(&self) -> Result<RawHandle> {
        Ok(self.driver().stream_handle(self.id)?.raw)
    }

    /// Its priority; lower is more urgent.
    pub fn priority(&self) -> Result<i32> {
        Ok(self.info()?.priority)
    }

    /// Whether all work in it is done. Work that failed is an `Err`. Must not be called while the stream is capturing:
    /// that invalidates the capture.
    pub fn query(&self) -> Result<bool> {
        Ok(self.driver().stream_query(self.id)?)
    }

    /// Waits until all work in it is done.
    pub fn synchronize(&self) -> Result<()> {
        Ok(self.driver().stream_synchronize(self.id)?)
    }

    /// Whether it takes part in a capture, valid or invalidated.
    pub fn is_capturing(&self) -> Result<bool> {
        Ok(CaptureStatus::of_unblocked(self.driver(), self.id)?.is_capturing())
    }

    /// Its capture state, from the driver.
    pub fn capture_state(&self) -> Result<CaptureState> {
        Ok(self.driver().capture_state(self.id)?)
    }

    /// Runs `callback` on a host thread once the work before it is done; later work waits for it. It must not call the
    /// driver. In a capture it becomes a node and runs at every replay.
    pub fn host_callback(&self, callback: impl Fn() + Send + Sync + 'static) -> Result<()> {
        Ok(self.driver().stream_host_callback(self.id, Arc::new(callback))?)
    }

    /// Sets its name in hazard reports of the simulated GPU; the last name applies.
    pub fn set_label(&self, label: &str) {
        self.driver().label_stream(self.id, label);
    }

    /// The stream with an id that is known to exist.
    pub(crate) fn from_id(device: &Device, id: StreamId) -> Self {
        Self { instance: device.instance().clone(), device: device.id(), id }
    }

    #[inline]
    pub(crate) fn driver(&self) -> &dyn Driver {
        &**self.instance.driver()
    }

    /// The state of its device.
    pub(super) fn device_state(&self) -> &DeviceState {
        self.instance.state(self.device)
    }
}

impl Device {
    /// The device's default stream.
    pub fn default_stream(&self) -> Result<Stream> {
        Ok(Stream::from_id(self, self.instance().default_stream_id(self.id())?))
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
