//! Leased streams: exclusive use of a stream until the lease is dropped.
//!
//! Streams that are handed out in turn come again after 32, and two users who each think a stream is their own wait
//! for each other without knowing. A lease is the way to be sure. There is no limit on leases, on purpose: with one,
//! two threads that each hold a lease and want a second could wait for each other for ever. As many streams exist as
//! were leased at once at the peak.

use std::fmt;
use std::ops::Deref;

use super::stream_pool::RowIndex;
use crate::{Device, Result, Stream};

/// A stream that nobody else has from Warpool, until this is dropped.
///
/// - Dropping it waits for nothing and makes no driver call. Work still in the stream completes; the next holder's
///   work comes behind it. The stream that was returned first is leased again first, as it is most likely idle.
/// - A stream that was returned while it captures is not leased again before that capture has ended.
/// - The lease protects against other leases and the shared streams, not against clones of its own [`Stream`] that
///   are kept longer than the lease, in a variable or as some thread's current stream.
pub struct StreamLease {
    stream: Stream,
    row: RowIndex,
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
        let (id, row) = self.state().streams.lease(self.driver(), priority)?;
        Ok(StreamLease { stream: Stream::known(self, id), row })
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
        self.stream.instance().state(self.stream.device_id()).streams.unlease(self.stream.id(), self.row);
    }
}

impl fmt::Debug for StreamLease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "lease of {:?}", self.stream)
    }
}
