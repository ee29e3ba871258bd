//! An external allocator as the upstream of one pool of the caching allocator.

use std::fmt;
use std::sync::{Arc, Mutex};

use rustc_hash::FxHashMap;
use warpool_driver::{DeviceId, DevicePtr, StreamId};

use super::{AddressRanges, ExternalAllocator, RawStream};
use crate::memory::Upstream;
use crate::unwind::OnUnwind;
use crate::{Instance, Result, lock};

/// An external allocator as the upstream of a pool of a [`CachingAllocator`](crate::memory::CachingAllocator), set by
/// [`PoolOptions::upstream`](crate::memory::PoolOptions::upstream). It sees the sizes of segments, not of requests.
/// `init` is the only hook that is called: the caching allocator does the rest.
pub struct ExternalUpstream {
    instance: Instance,
    external: Arc<dyn ExternalAllocator>,
    /// The stream of each segment. The stream may be destroyed by the time the segment is freed.
    streams: Mutex<FxHashMap<u64, RawStream>>,
    ranges: AddressRanges,
}

impl ExternalUpstream {
    /// An upstream for pools of allocators of `instance`. Calls `init`.
    pub fn new(instance: &Instance, external: Arc<dyn ExternalAllocator>) -> Result<Self> {
        external.init(instance.device_count())?;
        let (streams, ranges) = (Mutex::default(), AddressRanges::default());
        Ok(Self { instance: instance.clone(), external, streams, ranges })
    }

    fn raw(&self, stream: StreamId) -> Result<RawStream> {
        Ok(RawStream { id: stream, raw: self.instance.driver().stream_handle(stream)?.raw })
    }
}

impl Upstream for ExternalUpstream {
    fn allocate(&self, device: DeviceId, bytes: u64, stream: StreamId) -> Result<Option<DevicePtr>> {
        let stream = self.raw(stream)?;
        let allocated = self.external.allocate(bytes, device, stream)?.filter(|ptr| !ptr.is_null());
        if let Some(ptr) = allocated {
            self.ranges.insert(ptr, bytes)?;
            lock(&self.streams).insert(ptr.0, stream);
        }
        Ok(allocated)
    }

    fn free(&self, ptr: DevicePtr, bytes: u64, device: DeviceId, stream: StreamId) -> Result<()> {
        // Removed before the call: after it the external allocator may return the address again.
        let recorded = lock(&self.streams).remove(&ptr.0);
        let stream = recorded.map_or_else(|| self.raw(stream), Ok)?;
        self.ranges.remove(ptr);
        // After an error or a panic the pool keeps the segment and frees it again later.
        let put_back = || {
            lock(&self.streams).insert(ptr.0, stream);
            if let Err(error) = self.ranges.insert(ptr, bytes) {
                tracing::warn!(%error, "an external allocator reused memory that it had failed to free");
            }
        };
        let unwinds = OnUnwind::new(put_back);
        let freed = self.external.free(ptr, bytes, device, stream);
        unwinds.disarm();
        if freed.is_err() {
            put_back();
        }
        freed
    }
}

impl fmt::Debug for ExternalUpstream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExternalUpstream").field("instance", &self.instance).finish_non_exhaustive()
    }
}
