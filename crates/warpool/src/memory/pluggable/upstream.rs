//! A plug as the source of one pool's segments: the caching allocator is on top.

use std::fmt;
use std::sync::{Arc, Mutex};

use rustc_hash::FxHashMap;
use warpool_driver::{DeviceId, DevicePtr, StreamId};

use super::claims::Claims;
use super::{ExternalAllocator, RawStream};
use crate::memory::Upstream;
use crate::{Instance, Result, lock};

/// Where a pool of a [`CachingAllocator`](crate::memory::CachingAllocator) gets its segments from, by
/// [`PoolOptions::upstream`](crate::memory::PoolOptions::upstream): a plug. It sees the sizes of segments, not of
/// requests; and of its hooks `init` alone is called, since everything else is the business of the allocator on top.
pub struct ExternalUpstream {
    instance: Instance,
    plug: Arc<dyn ExternalAllocator>,
    /// The streams that memory was given for: a stream may be gone when its memory goes back.
    streams: Mutex<FxHashMap<u64, RawStream>>,
    claims: Claims,
}

impl ExternalUpstream {
    /// Memory for pools of allocators of `instance`, from `plug`, whose `init` is called.
    pub fn new(instance: &Instance, plug: Arc<dyn ExternalAllocator>) -> Result<Self> {
        plug.init(instance.device_count())?;
        Ok(Self { instance: instance.clone(), plug, streams: Mutex::default(), claims: Claims::default() })
    }
}

impl Upstream for ExternalUpstream {
    fn allocate(&self, device: DeviceId, bytes: u64, stream: StreamId) -> Result<Option<DevicePtr>> {
        let stream = RawStream { id: stream, raw: self.instance.driver().stream_handle(stream)?.raw };
        let given = self.plug.allocate(bytes, device, stream)?.filter(|ptr| !ptr.is_null());
        if let Some(ptr) = given {
            self.claims.claim(ptr, bytes)?;
            lock(&self.streams).insert(ptr.0, stream);
        }
        Ok(given)
    }

    fn free(&self, ptr: DevicePtr, bytes: u64, device: DeviceId, stream: StreamId) -> Result<()> {
        // Before the call: from then on the plug may give the address out again.
        let noted = lock(&self.streams).remove(&ptr.0);
        let given_for = match noted {
            Some(stream) => stream,
            None => RawStream { id: stream, raw: self.instance.driver().stream_handle(stream)?.raw },
        };
        self.claims.drop(ptr);
        let freed = self.plug.free(ptr, bytes, device, given_for);
        if freed.is_err() {
            // It is not taken back, and asked again.
            lock(&self.streams).insert(ptr.0, given_for);
            if let Err(error) = self.claims.claim(ptr, bytes) {
                tracing::warn!(%error, "a plug gave memory out again that it had refused to take back");
            }
        }
        freed
    }
}

impl fmt::Debug for ExternalUpstream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExternalUpstream").field("gpu", &self.instance).finish_non_exhaustive()
    }
}
