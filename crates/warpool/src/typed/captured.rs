//! Typed memory in captures: the graph keeps every buffer that its work uses, and its replays are ordered with other
//! uses of them like any operation.

use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};

use rustc_hash::FxHashMap;
use warpool_driver::{CaptureId, StreamId};

use super::operation::{Access, Attempt, Joined, Memory, in_order, run};
use super::order::Span;
use super::sole_stream::SoleStream;
use super::tracked::{Block, Tracked};
use crate::capture::StreamCapture;
use crate::memory::BlockHold;
use crate::{Device, Instance, Result, Stream};

/// The buffers that a capture, and then its graph, uses.
#[derive(Default)]
pub(crate) struct CapturedBuffers {
    by_key: FxHashMap<usize, usize>,
    list: Vec<CapturedBuffer>,
    /// The only stream that uses all of them, determined at the first replay; `None` if there was more than one.
    sole: OnceLock<Option<Arc<SoleStream>>>,
}

struct CapturedBuffer {
    // Dropped before the buffer.
    _hold: Option<BlockHold>,
    buffer: Arc<Tracked>,
    /// The bytes that a replay uses.
    span: Span,
    /// The uses in the capture, which order its streams.
    uses: Vec<(CaptureId, StreamId, Span)>,
}

impl CapturedBuffers {
    /// Captures work in `stream`. The stream waits for streams of the capture that used the same bytes, which adds
    /// edges to the graph.
    pub(super) fn submit(
        capture: &StreamCapture,
        stream: &Stream,
        accesses: &[Access<'_>],
        queue: &mut dyn FnMut() -> Result<()>,
    ) -> Result<()> {
        let record = &capture.record;
        accesses.iter().try_for_each(|access| Self::keep_one(capture, access))?;
        let conflicts = record.with(|captured: &mut Self| captured.conflicts(capture.id, stream.id(), accesses));
        for other in conflicts {
            stream.wait_stream(&Stream::from_id(&Device::from_id(stream.instance(), stream.device_id()), other))?;
        }
        let outcome = queue();
        // Added even after a failure: part of the work may have been captured.
        record.with(|captured: &mut Self| captured.add(capture.id, stream.id(), accesses));
        outcome
    }

    /// Called if work in `stream` was meant to run at once, but may have become part of a capture that the stream
    /// joined meanwhile: its graph keeps the buffers. A buffer that it cannot keep is never freed.
    #[cold]
    pub(super) fn keep(joined: &Joined, stream: &Stream, accesses: &[Access<'_>]) {
        for access in accesses {
            let kept = match joined {
                Joined::Capture(capture) => Self::keep_one(capture, access).is_ok(),
                Joined::Unknown => false,
            };
            if !kept {
                let buffer = Arc::clone(access.tracked());
                tracing::warn!(buffer = %buffer.name(), %stream, "memory is kept for good: a capture may use it");
                buffer.graphs.fetch_add(1, Ordering::AcqRel);
                std::mem::forget(buffer);
            }
        }
        if let Joined::Capture(capture) = joined {
            capture.record.with(|captured: &mut Self| captured.add(capture.id, stream.id(), accesses));
        }
    }

    fn keep_one(capture: &StreamCapture, access: &Access<'_>) -> Result<()> {
        let record = &capture.record;
        if !record.with(|captured: &mut Self| captured.by_key.contains_key(&key_of(access.tracked()))) {
            let entry = CapturedBuffer::new(access)?;
            record.with(|captured: &mut Self| captured.insert(entry));
        }
        Ok(())
    }

    fn insert(&mut self, entry: CapturedBuffer) {
        // Another thread of the capture may have added it.
        if let std::collections::hash_map::Entry::Vacant(vacant) = self.by_key.entry(key_of(&entry.buffer)) {
            vacant.insert(self.list.len());
            self.list.push(entry);
        }
    }

    fn get_mut(&mut self, access: &Access<'_>) -> Option<&mut CapturedBuffer> {
        self.by_key.get(&key_of(access.tracked())).map(|&at| &mut self.list[at])
    }

    /// The other streams of the same capture whose work `accesses` must come after. The body of a conditional node is a
    /// separate capture, and as a whole it is ordered in the stream that it was captured in.
    fn conflicts(&mut self, capture: CaptureId, stream: StreamId, accesses: &[Access<'_>]) -> Vec<StreamId> {
        let mut streams = Vec::new();
        if crate::defect::Defect::CaptureForgetsOrder.is_on() {
            return streams;
        }
        for access in accesses {
            let uses = self.get_mut(access).map_or(&[][..], |entry| &entry.uses);
            for &(of, other, span) in uses {
                if of == capture && other != stream && span.conflicts(access.span) && !streams.contains(&other) {
                    streams.push(other);
                }
            }
        }
        streams
    }

    fn add(&mut self, capture: CaptureId, stream: StreamId, accesses: &[Access<'_>]) {
        for access in accesses {
            // A buffer that could not be kept is never freed.
            let Some(entry) = self.get_mut(access) else { continue };
            entry.span = entry.span.union(access.span);
            let same = |(of, other, span): &(CaptureId, StreamId, Span)| {
                (*of, *other, span.write) == (capture, stream, access.span.write)
            };
            match entry.uses.iter_mut().find(|known| same(known)) {
                Some((_, _, span)) => *span = span.union(access.span),
                None => entry.uses.push((capture, stream, access.span)),
            }
        }
    }

    /// Called when the capture has ended: its uses no longer matter for ordering, and the buffers are sorted for
    /// locking by replays.
    pub(crate) fn finish(mut self) -> Self {
        self.by_key = FxHashMap::default();
        self.list.iter_mut().for_each(|entry| entry.uses = Vec::new());
        self.list.sort_unstable_by_key(|entry| key_of(&entry.buffer));
        self
    }

    /// Whether there are no buffers.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Fails if one of them is asleep. `what` names the operation that the caller cannot do then.
    pub(crate) fn expect_awake(&self, instance: &Instance, what: &'static str) -> Result<()> {
        self.list
            .iter()
            .filter_map(|entry| entry.buffer.device_ptr())
            .try_for_each(|ptr| instance.expect_awake_at(ptr, what))
    }

    /// Launches the graph in `stream` by `launch`, ordered with other uses of the buffers.
    #[inline]
    pub(crate) fn replay(&self, stream: &Stream, mut launch: impl FnMut() -> Result<()>) -> Result<()> {
        if let Some(Some(sole)) = self.sole.get()
            && let Some(_held) = sole.hold(stream.id())
        {
            return launch();
        }
        self.replay_in_order(stream, &mut launch)
    }

    #[inline(never)]
    fn replay_in_order(&self, stream: &Stream, launch: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        let accesses: Vec<Access<'_>> = self.list.iter().map(CapturedBuffer::access).collect();
        let mut outcome = Ok(());
        in_order(stream, |_frozen| {
            // A launch cannot be captured, so no graph has to keep the buffers.
            Ok(match run(stream, &accesses, false, &mut || outcome = launch())? {
                Attempt::Queued(_) => Ok(()),
                Attempt::Busy(tracked) => Err(tracked),
            })
        })?;
        if outcome.is_ok() {
            self.sole.get_or_init(|| self.find_sole(stream.id()));
        }
        outcome
    }

    /// The entry for `stream` as the only stream that uses all buffers, if it is. A buffer that a second stream has
    /// used never becomes private again, so one check is enough.
    fn find_sole(&self, stream: StreamId) -> Option<Arc<SoleStream>> {
        // In the order in which all operations lock.
        let locked: Result<Vec<_>> = self.list.iter().map(|entry| entry.buffer.lock_uses()).collect();
        let mut locked = locked.ok()?;
        if !locked.iter().all(|uses| uses.is_sole(stream)) {
            return None;
        }
        let sole = Arc::new(SoleStream::new(stream));
        locked.iter_mut().for_each(|uses| uses.add_sole_stream(&sole));
        Some(sole)
    }
}

impl CapturedBuffer {
    /// The access of a replay. It borrows nothing.
    fn access(&self) -> Access<'_> {
        Access { memory: Memory::Tracked(&self.buffer), span: self.span, exclusive: false }
    }

    fn new(access: &Access<'_>) -> Result<Self> {
        let buffer = Arc::clone(access.tracked());
        let hold = match buffer.block() {
            Block::Device(block) => Some(BlockHold::new(block)?),
            Block::Elastic(_) | Block::Pinned(..) => None,
        };
        buffer.graphs.fetch_add(1, Ordering::AcqRel);
        Ok(Self { _hold: hold, buffer, span: access.span, uses: Vec::new() })
    }
}

impl Drop for CapturedBuffer {
    fn drop(&mut self) {
        self.buffer.graphs.fetch_sub(1, Ordering::AcqRel);
    }
}

fn key_of(buffer: &Arc<Tracked>) -> usize {
    Arc::as_ptr(buffer).addr()
}
