//! One operation on typed memory outside of captures: its buffers are locked, the stream waits for conflicting uses,
//! the driver is called, and the uses are recorded.
//!
//! The locks of all buffers are held until the work is enqueued, so that no other thread can enqueue work between the
//! wait and the work. They are taken in the order of the buffers' addresses in host memory.
//!
//! A buffer that is private to the stream is not locked. If another thread begins to use it in a second stream
//! meanwhile, both borrow it, so their uses do not conflict, but later uses may conflict with both. So the unlocked use
//! must be recorded: if the work was enqueued before, the event that the other thread records in this stream covers it;
//! else this thread records it afterwards ([`Access::add_late`]). While the vector itself is borrowed exclusively, no
//! other thread can use it, and neither is needed.
//!
//! All of this is done while no capture can begin or end (`capture_gate.rs`). A stream may still join a capture at any
//! moment, by a wait of another thread. So its status is read once more after the driver calls, and the graph keeps
//! buffers whose use may have become part of it ([`Queued::capture`]). No thread waits for the gate while it holds the
//! lock of a buffer's uses, nor the other way round: a thread that holds the lock may be waiting for a device.

use std::sync::Arc;

use warpool_driver::{DevicePtr, ErrorCode};

use super::buffer::Buffer;
use super::order::Span;
use super::tracked::Tracked;
use crate::capture::{FrozenCaptures, StreamCapture};
use crate::error::GraphError;
use crate::{Error, Instance, PooledEvent, Result, Stream};

/// How one buffer is used by an operation.
#[derive(Clone, Copy)]
pub(super) struct Access<'a> {
    pub(super) memory: Memory<'a>,
    pub(super) span: Span,
    /// Whether its vector is borrowed exclusively, and no other view of it is in use.
    pub(super) exclusive: bool,
}

/// The memory that an operation uses.
#[derive(Clone, Copy)]
pub(super) enum Memory<'a> {
    /// The buffer of a vector; once the stream is known, one that is private to that stream.
    Buffer(&'a Buffer),
    /// Memory whose uses are recorded.
    Tracked(&'a Arc<Tracked>),
}

impl<'a> Access<'a> {
    pub(super) fn instance(&self) -> &'a Instance {
        match self.memory {
            Memory::Buffer(buffer) => buffer.instance(),
            Memory::Tracked(tracked) => tracked.instance(),
        }
    }

    /// Its address, if it is device memory.
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

    /// Its uses, which are recorded from now on.
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

    /// For a use in `stream`, outside of captures: switches to recorded uses, if necessary.
    pub(super) fn track_for(&mut self, stream: &Stream) {
        if !self.is_private_to(stream) {
            self.memory = Memory::Tracked(self.tracked());
        }
    }

    /// The order in which buffers are locked. Buffers that are not locked come first.
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
        // This fails inside a host callback, where nothing was enqueued.
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

/// Makes attempts at an operation in `stream`, each while captures are frozen, until no buffer is busy.
pub(super) fn in_order<'s, 'a, R>(
    stream: &'s Stream,
    mut attempt: impl FnMut(FrozenCaptures<'s>) -> Result<std::result::Result<R, &'a Tracked>>,
) -> Result<R> {
    loop {
        match attempt(stream.instance().freeze_captures(stream)?)? {
            Ok(done) => return Ok(done),
            Err(busy) => busy.wait_until_unlocked()?,
        }
    }
}

/// The result of an attempt to enqueue work.
pub(super) enum Attempt<'a> {
    Queued(Queued),
    /// Nothing was enqueued: another thread has the uses of this buffer locked.
    Busy(&'a Tracked),
}

/// Work that was enqueued, possibly with an error.
pub(super) struct Queued {
    /// An event after the work, if one of the buffers needs one.
    event: Option<Arc<PooledEvent>>,
    /// The capture that the stream has joined meanwhile: some of the work may be part of it.
    pub(super) capture: Option<Joined>,
}

/// A capture that a stream joined while work was being enqueued in it.
pub(super) enum Joined {
    Capture(StreamCapture),
    /// The driver call that asks for it failed.
    Unknown,
}

/// Locks and prepares tracked buffers one by one, enqueues the work, and records the uses on the way back, even if
/// `queue` has failed: some of the work may be in the stream. `accesses` must be sorted. An error comes from the
/// preparation, before anything was enqueued. Call it while captures are frozen.
pub(super) fn run<'a>(
    stream: &Stream,
    accesses: &[Access<'a>],
    exact: bool,
    queue: &mut dyn FnMut(),
) -> Result<Attempt<'a>> {
    let Some(first) = accesses.first() else {
        queue();
        let event = if exact { record(stream) } else { None };
        return Ok(Attempt::Queued(Queued { event, capture: joined(stream) }));
    };
    // An operation may use several parts of one buffer.
    let parts = accesses.iter().take_while(|access| access.key() == first.key()).count();
    let (of_buffer, rest) = accesses.split_at(parts);
    let tracked = first.tracked();
    let Some(mut uses) = tracked.uses_if_unlocked() else { return Ok(Attempt::Busy(tracked)) };
    for access in of_buffer {
        tracked.prepare(&mut uses, stream, access.span)?;
    }
    let queued = match run(stream, rest, exact || uses.is_exact(), queue)? {
        Attempt::Queued(queued) => queued,
        busy @ Attempt::Busy(_) => return Ok(busy),
    };
    for access in of_buffer {
        uses.add(stream, access.span, queued.event.as_ref());
    }
    if queued.capture.is_some() {
        uses.forget_waits(stream.id());
    }
    Ok(Attempt::Queued(queued))
}

/// The capture that `stream` takes part in after work that was meant to run at once. A capture without a graph does not
/// count: safe code cannot launch it.
fn joined(stream: &Stream) -> Option<Joined> {
    match capture_of(stream).or_else(|_| capture_of(stream)) {
        Ok(capture) => capture.map(Joined::Capture),
        Err(Error::Graph(GraphError::ForeignCapture)) => None,
        // An invalidated capture does not become a graph.
        Err(Error::Driver(error)) if error.code == ErrorCode::StreamCaptureInvalidated => None,
        Err(_) => Some(Joined::Unknown),
    }
}

/// An event after the work that was just queued. `None` if the driver call fails, or if the stream has joined a
/// capture: the work is enqueued nevertheless, and a later use that has to wait for it records an event then.
fn record(stream: &Stream) -> Option<Arc<PooledEvent>> {
    let mut event = stream.device().event_pool().take().ok()?;
    event.record(stream).ok()?;
    // Read afterwards: while captures are frozen, a stream may join a capture but does not leave one.
    let captured = stream.instance().is_capturing(stream).unwrap_or(true);
    (!captured).then(|| Arc::new(event))
}
