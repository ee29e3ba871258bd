//! Which of our streams a raw `cudaStream_t` is. Every allocation asks, so the answer is remembered: each thread has
//! the last one at hand, and behind that is a table that is mostly read.
//!
//! A handle is taken to mean the same stream for ever, as PyTorch takes it. If its maker destroys it and the driver
//! gives the number to another stream, that one is served by the same id, which leads to the same handle.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{PoisonError, RwLock};

use rustc_hash::FxHashMap;
use warpool::{Instance, Stream};
use warpool_driver::{DeviceId, ForeignStream, RawHandle, StreamId};

use crate::error::Result;

/// The streams that callers named so far.
#[derive(Debug)]
pub(crate) struct Streams {
    /// Tells this table from others that a thread may remember an answer of.
    table: u64,
    known: RwLock<FxHashMap<(DeviceId, RawHandle), StreamId>>,
}

/// The last answer that a thread got.
#[derive(Clone, Copy)]
struct Answer {
    table: u64,
    device: DeviceId,
    raw: RawHandle,
    stream: StreamId,
}

thread_local! {
    /// Table 0 is nobody's. Without a destructor, so that it can be asked until the very end of a thread.
    static LAST: Cell<Answer> =
        const { Cell::new(Answer { table: 0, device: DeviceId(0), raw: RawHandle(0), stream: StreamId(0) }) };
}

impl Streams {
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self { table: NEXT.fetch_add(1, Ordering::Relaxed), known: RwLock::default() }
    }

    /// Whether a handle means the default stream, of whichever device.
    pub(crate) fn is_default(raw: RawHandle) -> bool {
        raw.0 <= 1
    }

    /// The stream of `device` with that handle; 0 and 1 are the default stream.
    #[inline]
    pub(crate) fn resolve(&self, instance: &Instance, device: DeviceId, raw: RawHandle) -> Result<StreamId> {
        let last = LAST.get();
        if last.table == self.table && last.device == device && last.raw == raw {
            return Ok(last.stream);
        }
        let known = self.known.read().unwrap_or_else(PoisonError::into_inner).get(&(device, raw)).copied();
        let stream = match known {
            Some(stream) => stream,
            None => self.adopt(instance, device, raw)?,
        };
        LAST.set(Answer { table: self.table, device, raw, stream });
        Ok(stream)
    }

    /// As [`resolve`](Self::resolve), for a caller who does not say whose stream it is: most likely that of `device`,
    /// else any other device's.
    pub(crate) fn resolve_anywhere(&self, instance: &Instance, device: DeviceId, raw: RawHandle) -> Result<StreamId> {
        let first = self.resolve(instance, device, raw);
        if first.is_ok() {
            return first;
        }
        let mut others = instance.devices().filter(|other| other.id() != device);
        others.find_map(|other| self.resolve(instance, other.id(), raw).ok()).map_or(first, Ok)
    }

    /// Devices that somebody had work for.
    pub(crate) fn devices(&self) -> Vec<DeviceId> {
        let known = self.known.read().unwrap_or_else(PoisonError::into_inner);
        let mut devices: Vec<DeviceId> = known.keys().map(|&(device, _)| device).collect();
        devices.sort_unstable();
        devices.dedup();
        devices
    }

    #[cold]
    fn adopt(&self, instance: &Instance, device: DeviceId, raw: RawHandle) -> Result<StreamId> {
        // SAFETY: the handle came through the C interface, whose callers promise that a stream they name lives as long
        // as memory for it does. PyTorch never destroys its own.
        let foreign = unsafe { ForeignStream::new(raw) };
        // Not with the table locked. Two threads may both ask; the driver gives both the same id.
        let stream = Stream::external(&instance.device(device.0)?, foreign)?.id();
        self.known.write().unwrap_or_else(PoisonError::into_inner).insert((device, raw), stream);
        Ok(stream)
    }
}
