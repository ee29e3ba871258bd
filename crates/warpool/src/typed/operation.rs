//! One operation on typed memory outside of captures: everything it uses is locked and waited for, then the driver is
//! called, and the uses are recorded.
//!
//! The locks of all buffers are held until the work is in the stream, so that no thread can order its own work between
//! the wait and the work. They are taken in the order of the buffers' addresses in host memory.

use std::sync::Arc;

use super::buffer::Buffer;
use super::order::Span;
use crate::capture::StreamCapture;
use crate::{PooledEvent, Result, Stream};

/// How one buffer is used by an operation.
#[derive(Clone, Copy)]
pub(super) struct Access<'a> {
    pub(super) buffer: &'a Arc<Buffer>,
    pub(super) span: Span,
}

impl Access<'_> {
    /// The order in which buffers are locked.
    pub(super) fn key(&self) -> usize {
        Arc::as_ptr(self.buffer).addr()
    }
}

/// The capture that `stream` takes part in.
#[inline]
pub(super) fn capture_of(stream: &Stream) -> Result<Option<StreamCapture>> {
    if stream.instance().has_captures() { stream.instance().captures().find(stream) } else { Ok(None) }
}

/// Locks and prepares the buffers one by one, queues the work, and records the uses on the way back. `accesses` are
/// sorted. Returns the event behind the work, if one of the buffers needs one.
pub(super) fn run(
    stream: &Stream,
    accesses: &[Access<'_>],
    exact: bool,
    queue: &mut dyn FnMut() -> Result<()>,
) -> Result<Option<Arc<PooledEvent>>> {
    let Some(first) = accesses.first() else {
        queue()?;
        return Ok(if exact { record(stream) } else { None });
    };
    // An operation may use several parts of one buffer.
    let parts = accesses.iter().take_while(|access| access.key() == first.key()).count();
    let (of_buffer, rest) = accesses.split_at(parts);
    let mut uses = first.buffer.lock_uses()?;
    for access in of_buffer {
        access.buffer.prepare(&mut uses, stream, access.span)?;
    }
    let event = run(stream, rest, exact || uses.is_exact(), queue)?;
    for access in of_buffer {
        uses.add(stream, access.span, event.as_ref());
    }
    Ok(event)
}

/// An event behind the work that was just queued. `None` if the driver refuses: the work is queued all the same, and
/// whoever has to wait for it records one then.
fn record(stream: &Stream) -> Option<Arc<PooledEvent>> {
    let mut event = stream.device().event_pool().take().ok()?;
    event.record(stream).ok()?;
    Some(Arc::new(event))
}
