//! One operation on typed memory outside of captures: everything it uses is locked and waited for, then the driver is
//! called, and the uses are recorded.
//!
//! The locks of all buffers are held until the work is in the stream, so that no thread can order its own work between
//! the wait and the work. They are taken in the order of the buffers' addresses in host memory.
//!
//! A buffer that is private to the stream is not locked. If another thread begins to use it in a second stream
//! meanwhile, both borrow it, so their uses do not conflict; but later ones may, with both. So whoever was not seen is
//! recorded: by the event in the stream that the other thread waits for, if the work was queued before, else by its own
//! thread afterwards ([`Access::add_late`]). No thread can do so while the vector itself is borrowed exclusively, which
//! needs neither.

use std::sync::Arc;

use warpool_driver::DevicePtr;

use super::buffer::Buffer;
use super::order::Span;
use super::tracked::Tracked;
use crate::capture::StreamCapture;
use crate::{Instance, PooledEvent, Result, Stream};

/// How one buffer is used by an operation.
#[derive(Clone, Copy)]
pub(super) struct Access<'a> {
    pub(super) memory: Memory<'a>,
    pub(super) span: Span,
    /// Whether its vector is borrowed exclusively, and no other view of it is in use.
    pub(super) exclusive: bool,
}

/// What an operation uses.
#[derive(Clone, Copy)]
pub(super) enum Memory<'a> {
    /// A vector's; once the stream is known, one that is private to it.
    Buffer(&'a Buffer),
    /// With uses that are recorded.
    Tracked(&'a Arc<Tracked>),
}

impl<'a> Access<'a> {
    pub(super) fn instance(&self) -> &'a Instance {
        match self.memory {
            Memory::Buffer(buffer) => buffer.instance(),
            Memory::Tracked(tracked) => tracked.instance(),
        }
    }

    /// Where it is, if it is device memory.
    pub(super) fn device_ptr(&self) -> Option<DevicePtr> {
        match self.memory {
            Memory::Buffer(buffer) => buffer.device_ptr(),
            Memory::Tracked(tracked) => tracked.device_ptr(),
        }
    }

    /// Fails if it is memory of another device than the stream's.
    pub(super) fn expect_device_of(&self, stream: &Stream) -> Result<()> {
        match self.memory {
            Memory::Buffer(buffer) => buffer.expect_device_of(stream),
            Memory::Tracked(_) => Ok(()),
        }
    }

    /// Its uses, recorded from here on.
    pub(super) fn tracked(&self) -> &'a Arc<Tracked> {
        match self.memory {
            Memory::Buffer(buffer) => buffer.tracked(),
            Memory::Tracked(tracked) => tracked,
        }
    }

    /// Whether a use in `stream`, outside of captures, needs no record.
    #[inline]
    pub(super) fn is_private_to(&self, stream: &Stream) -> bool {
        match self.memory {
            Memory::Buffer(buffer) => buffer.is_private_to(stream),
            Memory::Tracked(_) => false,
        }
    }

    /// For a use in `stream`, outside of captures: its uses are recorded, if they must be.
    pub(super) fn track_for(&mut self, stream: &Stream) {
        if !self.is_private_to(stream) {
            self.memory = Memory::Tracked(self.tracked());
        }
    }

    /// The order in which buffers are locked: first those that are not.
    #[inline]
    pub(super) fn key(&self) -> usize {
        match self.memory {
            Memory::Buffer(_) => 0,
            Memory::Tracked(tracked) => Arc::as_ptr(tracked).addr(),
        }
    }

    /// Records the use of a buffer that was private when the work was queued, if it is not any more.
    #[inline]
    pub(super) fn add_late(&self, stream: &Stream) {
        if !self.exclusive
            && let Memory::Buffer(buffer) = self.memory
            && let Some(tracked) = buffer.shared_meanwhile()
        {
            self.add_to(tracked, stream);
        }
    }

    #[cold]
    fn add_to(&self, tracked: &Tracked, stream: &Stream) {
        // It fails inside a host callback, where nothing was queued.
        if let Ok(mut uses) = tracked.lock_uses() {
            let event = if uses.is_exact() { record(stream) } else { None };
            uses.add(stream, self.span, event.as_ref());
        }
    }
}

/// The capture that `stream` takes part in.
#[inline]
pub(super) fn capture_of(stream: &Stream) -> Result<Option<StreamCapture>> {
    if stream.instance().has_captures() { stream.instance().captures().find(stream) } else { Ok(None) }
}

/// Locks and prepares tracked buffers one by one, queues the work, and records the uses on the way back, also if
/// `queue` has failed: some of the work may be in the stream. `accesses` are sorted. Returns the event behind the work,
/// if one of the buffers needs one; an error is one of the preparation, before anything was queued.
pub(super) fn run(
    stream: &Stream,
    accesses: &[Access<'_>],
    exact: bool,
    queue: &mut dyn FnMut(),
) -> Result<Option<Arc<PooledEvent>>> {
    let Some(first) = accesses.first() else {
        queue();
        return Ok(if exact { record(stream) } else { None });
    };
    // An operation may use several parts of one buffer.
    let parts = accesses.iter().take_while(|access| access.key() == first.key()).count();
    let (of_buffer, rest) = accesses.split_at(parts);
    let tracked = first.tracked();
    let mut uses = tracked.lock_uses()?;
    for access in of_buffer {
        tracked.prepare(&mut uses, stream, access.span)?;
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
