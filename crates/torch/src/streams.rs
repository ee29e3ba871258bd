//! The table from raw `cudaStream_t` handles to our stream ids. Every allocation looks up its stream, so each thread
//! caches its last lookup; other lookups use a table under a read-write lock. The default stream of the first device,
//! the only one in most programs, is stored separately and does not need the thread's cache.
//!
//! A handle is taken to name the same stream forever, as in PyTorch. If a stream is destroyed and the driver gives its
//! handle to a new one, the new stream gets the same id, which has the same handle.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{PoisonError, RwLock};

use rustc_hash::FxHashMap;
use warpool::{Instance, Stream};
use warpool_driver::{DeviceId, ForeignStream, RawHandle, StreamId};

use crate::error::Result;

/// The streams that callers have passed so far.
#[derive(Debug)]
pub(crate) struct StreamTable {
    /// Distinguishes this table from others in a thread's cached lookup.
    table: u64,
    ids: RwLock<FxHashMap<(DeviceId, RawHandle), StreamId>>,
    /// The default stream of the first device; its id plus 1, and 0 as long as it is not known.
    first_default: AtomicU64,
}

/// A thread's last lookup.
#[derive(Clone, Copy)]
struct Lookup {
    table: u64,
    device: DeviceId,
    raw: RawHandle,
    stream: StreamId,
}

thread_local! {
    /// Table 0 does not exist. Has no destructor, so it works until the thread has ended.
    static LAST: Cell<Lookup> =
        const { Cell::new(Lookup { table: 0, device: DeviceId(0), raw: RawHandle(0), stream: StreamId(0) }) };
}

impl StreamTable {
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self { table: NEXT.fetch_add(1, Ordering::Relaxed), ids: RwLock::default(), first_default: AtomicU64::new(0) }
    }

    /// The default stream of the first device, if it has been passed before.
    #[inline]
    pub(crate) fn first_default(&self) -> Option<StreamId> {
        self.first_default.load(Ordering::Acquire).checked_sub(1).map(StreamId)
    }

    /// The id of `stream` on `device`, if it is what the thread looked up last.
    #[inline]
    pub(crate) fn last(&self, device: DeviceId, stream: ForeignStream) -> Option<StreamId> {
        let last = LAST.get();
        (last.table == self.table && last.device == device && last.raw == stream.raw()).then_some(last.stream)
    }

    /// The same, for a caller that rarely needs it. Not inlined: otherwise the address of the thread-local value would
    /// be looked up in every call.
    #[inline(never)]
    pub(crate) fn last_of_thread(&self, device: DeviceId, stream: ForeignStream) -> Option<StreamId> {
        self.last(device, stream)
    }

    /// The device of the thread's last lookup.
    #[inline]
    pub(crate) fn last_device() -> DeviceId {
        LAST.get().device
    }

    /// Whether the handle names the default stream of any device.
    pub(crate) fn is_default(stream: ForeignStream) -> bool {
        matches!(stream, ForeignStream::NULL | ForeignStream::LEGACY)
    }

    /// The id of `stream` on `device`.
    #[inline]
    pub(crate) fn resolve(&self, instance: &Instance, device: DeviceId, stream: ForeignStream) -> Result<StreamId> {
        match self.last(device, stream) {
            Some(id) => Ok(id),
            None => self.look_up(instance, device, stream),
        }
    }

    #[inline(never)]
    fn look_up(&self, instance: &Instance, device: DeviceId, stream: ForeignStream) -> Result<StreamId> {
        let raw = stream.raw();
        let known = self.ids.read().unwrap_or_else(PoisonError::into_inner).get(&(device, raw)).copied();
        let id = match known {
            Some(id) => id,
            None => self.adopt(instance, device, stream)?,
        };
        LAST.set(Lookup { table: self.table, device, raw, stream: id });
        Ok(id)
    }

    /// Like [`resolve`](Self::resolve), for a caller that does not pass the stream's device: `device` is tried first,
    /// then all others.
    pub(crate) fn resolve_on_any_device(
        &self,
        instance: &Instance,
        device: DeviceId,
        stream: ForeignStream,
    ) -> Result<StreamId> {
        let first = self.resolve(instance, device, stream);
        if first.is_ok() {
            return first;
        }
        let mut others = instance.devices().filter(|other| other.id() != device);
        others.find_map(|other| self.resolve(instance, other.id(), stream).ok()).map_or(first, Ok)
    }

    /// Devices for which a stream was passed.
    pub(crate) fn devices(&self) -> Vec<DeviceId> {
        let ids = self.ids.read().unwrap_or_else(PoisonError::into_inner);
        let mut devices: Vec<DeviceId> = ids.keys().map(|&(device, _)| device).collect();
        devices.sort_unstable();
        devices.dedup();
        devices
    }

    #[cold]
    fn adopt(&self, instance: &Instance, device: DeviceId, stream: ForeignStream) -> Result<StreamId> {
        // Without the lock. If two threads do this at once, the driver returns the same id to both.
        let id = Stream::external(&instance.device(device.0)?, stream)?.id();
        self.ids.write().unwrap_or_else(PoisonError::into_inner).insert((device, stream.raw()), id);
        if device == DeviceId(0) && stream == ForeignStream::NULL {
            self.first_default.store(id.0 + 1, Ordering::Release);
        }
        Ok(id)
    }
}
