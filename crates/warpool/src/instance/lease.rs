//! Leased streams: exclusive use of a stream until the lease is dropped.
//!
//! Shared streams repeat after 32, and two users of the same stream serialize unintentionally. A lease avoids that. The
//! number of leases is deliberately unlimited: with a limit, two threads that each hold a lease and need a second could
//! deadlock. The number of streams is the highest number of simultaneous leases.

use std::fmt;
use std::ops::Deref;

use super::device::Device;
use super::stream::Stream;
use super::stream_pool::PoolIndex;
use crate::Result;

/// Exclusive use of a stream, until this is dropped.
///
/// - Dropping it does not wait and makes no driver call. Work still in the stream completes; work of the next holder
///   runs after it. The stream that has been idle the longest is leased first, since its work is most likely done.
/// - A stream that is returned while it is capturing is not leased again before that capture has ended.
/// - The lease excludes other leases and the shared streams, not clones of its own [`Stream`] that are kept longer than
///   the lease, in a variable or as some thread's current stream.
pub struct StreamLease {
    stream: Stream,
    pool: PoolIndex,
}

impl StreamLease {
    /// The stream.
    #[must_use]
    pub fn stream(&self) -> &Stream {
        &self.stream
    }
}

impl Device {
    /// Leases a stream at the least urgent priority.
    pub fn lease_stream(&self) -> Result<StreamLease> {
        self.lease_stream_at(i32::MAX)
    }

    /// Leases a stream at `priority`, clamped into the [range](Self::priority_range).
    pub fn lease_stream_at(&self, priority: i32) -> Result<StreamLease> {
        let (id, pool) = self.state().streams.lease(self.driver(), priority)?;
        Ok(StreamLease { stream: Stream::from_id(self, id), pool })
    }
}

impl Deref for StreamLease {
    type Target = Stream;

    fn deref(&self) -> &Stream {
        &self.stream
    }
}

impl Drop for StreamLease {
    fn drop(&mut self) {
        if !self.stream.instance().is_inherited() {
            self.stream.device_state().streams.end_lease(self.stream.id(), self.pool);
        }
    }
}

impl fmt::Debug for StreamLease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "lease of {:?}", self.stream)
    }
}
