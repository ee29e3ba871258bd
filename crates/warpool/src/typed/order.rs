//! The order in which streams use one buffer: which stream used which bytes, and what a new use has to wait for.
//!
//! A buffer that only one stream uses costs a comparison: stream order protects it. At the first use by a second stream
//! an event is recorded after the work that the first has enqueued, and the second waits for it. From then on every use
//! is followed by its own event, so that later waits are for that use and not for later work of the stream: a pipeline
//! of two streams overlaps.

use std::sync::{Arc, Weak};

use warpool_driver::{DeviceId, StreamId};

use super::sole_stream::SoleStream;
use crate::capture::CaptureSafe;
use crate::error::BufferError;
use crate::{Device, Instance, PooledEvent, Result, Stream};

/// How many uses are stored separately before those of each stream are merged.
const USES_MAX: usize = 16;

/// Bytes of a buffer, and whether they are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Span {
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) write: bool,
}

impl Span {
    fn overlaps(self, other: Self) -> bool {
        self.start.max(other.start) < self.end.min(other.end)
    }

    pub(super) fn conflicts(self, other: Self) -> bool {
        (self.write || other.write) && self.overlaps(other)
    }

    fn covers(self, other: Self) -> bool {
        self.start <= other.start && other.end <= self.end
    }

    pub(super) fn union(self, other: Self) -> Self {
        let (start, end) = (self.start.min(other.start), self.end.max(other.end));
        Self { start, end, write: self.write || other.write }
    }
}

/// One use, or several of one stream.
#[derive(Debug)]
struct Use {
    device: DeviceId,
    stream: StreamId,
    span: Span,
    /// Recorded after the use; `None` if that is left until another stream has to wait.
    event: Option<Arc<PooledEvent>>,
    /// Streams that have waited for it.
    waited: Vec<StreamId>,
}

/// The uses of one buffer that a later use may have to wait for.
///
/// While only one stream uses it, this is one entry without a heap allocation.
#[derive(Debug)]
pub(super) struct Uses {
    /// All uses so far, if they are all of one stream.
    sole: Option<Use>,
    /// The uses since there was a second stream.
    list: Vec<Use>,
    /// Whether every use is followed by an event.
    exact: bool,
    /// The stream that it was allocated for.
    home: Option<StreamId>,
    /// Other streams whose use is recorded with the allocator.
    recorded: Vec<StreamId>,
    /// Graphs whose replays rely on `sole` being set.
    sole_streams: Vec<Weak<SoleStream>>,
}

impl Uses {
    /// Memory that was allocated for work in `stream`: earlier work of the stream may still use it.
    pub(super) fn allocated_for(device: DeviceId, stream: StreamId, bytes: u64) -> Self {
        let span = Span { start: 0, end: bytes, write: true };
        let first = Use { device, stream, span, event: None, waited: Vec::new() };
        Self {
            sole: Some(first),
            list: Vec::new(),
            exact: false,
            home: Some(stream),
            recorded: Vec::new(),
            sole_streams: Vec::new(),
        }
    }

    /// Memory of the host, which no stream uses yet. The host often checks whether it may access the memory, so every
    /// use gets an event.
    pub(super) fn of_host() -> Self {
        Self { sole: None, list: Vec::new(), exact: true, home: None, recorded: Vec::new(), sole_streams: Vec::new() }
    }

    /// Whether an event has to be recorded after the next use.
    pub(super) fn is_exact(&self) -> bool {
        self.exact
    }

    /// Whether the use of `stream` is not recorded with the allocator yet.
    pub(super) fn is_new_stream(&self, stream: StreamId) -> bool {
        self.home != Some(stream) && !self.recorded.contains(&stream)
    }

    /// The streams beside its own whose use is recorded.
    pub(super) fn recorded(&self) -> &[StreamId] {
        &self.recorded
    }

    /// Marks the use of `stream` as recorded with the allocator.
    pub(super) fn add_stream(&mut self, stream: StreamId) {
        self.recorded.push(stream);
    }

    /// Whether all its uses so far are of that stream, and are merged into one.
    pub(super) fn is_sole(&self, stream: StreamId) -> bool {
        self.sole.as_ref().is_some_and(|sole| sole.stream == stream)
    }

    /// Registers a graph whose replays rely on one stream being the only user of the buffer, until that ends.
    pub(super) fn add_sole_stream(&mut self, sole: &Arc<SoleStream>) {
        self.sole_streams.retain(|known| known.strong_count() > 0);
        self.sole_streams.push(Arc::downgrade(sole));
    }

    /// Called when a second stream is about to use the buffer: ends the reliance of replays on a sole stream.
    pub(super) fn end_sole_streams(&mut self, instance: &Instance) -> Result<()> {
        for sole in self.sole_streams.iter().filter_map(Weak::upgrade) {
            if crate::defect::Defect::ReplayKeepsSoleStream.is_on() {
                continue;
            }
            sole.end(instance)?;
        }
        self.sole_streams = Vec::new();
        Ok(())
    }

    /// Whether another stream than `stream` used it.
    #[inline]
    pub(super) fn has_other_streams(&self, stream: StreamId) -> bool {
        self.sole.iter().chain(&self.list).any(|earlier| earlier.stream != stream)
    }

    /// Makes `stream` wait for the uses that conflict with its own. `label` names the buffer.
    pub(super) fn wait_for_others(&mut self, stream: &Stream, span: Span, label: &dyn Fn() -> String) -> Result<()> {
        self.exact = true;
        self.list.extend(self.sole.take());
        let id = stream.id();
        let others = self.list.iter_mut().filter(|earlier| earlier.stream != id && earlier.span.conflicts(span));
        for earlier in others {
            if earlier.waited.contains(&id) || (crate::defect::Defect::TypedForgetsWriter.is_on() && !span.write) {
                continue;
            }
            earlier.event(stream.instance(), label)?.wait(stream)?;
            earlier.waited.push(id);
        }
        Ok(())
    }

    /// Forgets the waits of `stream`: they may be part of a capture, and do not order work outside of it.
    pub(super) fn forget_waits(&mut self, stream: StreamId) {
        self.list.iter_mut().for_each(|earlier| earlier.waited.retain(|&waited| waited != stream));
    }

    /// Adds a use that was enqueued in `stream`; `event` was recorded after it, if possible.
    #[inline]
    pub(super) fn add(&mut self, stream: &Stream, span: Span, event: Option<&Arc<PooledEvent>>) {
        match &mut self.sole {
            Some(sole) => sole.span = sole.span.union(span),
            None => self.push(stream, span, event),
        }
    }

    fn push(&mut self, stream: &Stream, span: Span, event: Option<&Arc<PooledEvent>>) {
        // A write is ordered after every use of the same bytes; a read only after those of its own stream.
        self.list.retain(|earlier| {
            let same_stream = earlier.stream == stream.id() || crate::defect::Defect::TypedForgetsReaders.is_on();
            let is_before = span.write || (same_stream && !earlier.span.write);
            !(is_before && span.covers(earlier.span))
        });
        let (device, event) = (stream.device_id(), event.map(Arc::clone));
        self.list.push(Use { device, stream: stream.id(), span, event, waited: Vec::new() });
        if self.list.len() > USES_MAX {
            self.merge();
        }
    }

    /// Merges the uses of each stream: its last event comes after all of them.
    fn merge(&mut self) {
        let mut merged: Vec<Use> = Vec::new();
        for next in self.list.drain(..) {
            match merged.iter_mut().find(|known| known.stream == next.stream) {
                Some(known) if crate::defect::Defect::TypedMergeForgetsSpan.is_on() => *known = next,
                Some(known) => *known = Use { span: known.span.union(next.span), ..next },
                None => merged.push(next),
            }
        }
        self.list = merged;
    }

    /// The stream of a use that conflicts with an access of the host and may not have completed. Completed uses are
    /// dropped.
    pub(super) fn busy_for_host(&mut self, instance: &Instance, write: bool) -> Result<Option<StreamId>> {
        if self.list.is_empty() {
            return Ok(None);
        }
        let _safe = CaptureSafe::begin(instance, || !instance.has_captures())?;
        let mut busy = None;
        let mut failed = Ok(());
        self.list.retain(|earlier| {
            if !(write || earlier.span.write) || failed.is_err() {
                return true;
            }
            match earlier.is_done(instance) {
                Ok(done) => {
                    busy = busy.or((!done).then_some(earlier.stream));
                    !done
                }
                Err(error) => {
                    failed = Err(error);
                    true
                }
            }
        });
        failed.map(|()| busy)
    }

    /// Waits until no use conflicts with an access of the host. `label` names the buffer.
    pub(super) fn wait_for_host(&mut self, instance: &Instance, write: bool, label: &dyn Fn() -> String) -> Result<()> {
        let _safe = CaptureSafe::begin(instance, || !instance.has_captures())?;
        let waits = write && !crate::defect::Defect::HostForgetsReaders.is_on();
        let conflicting = self.list.iter().filter(|earlier| waits || earlier.span.write);
        for earlier in conflicting {
            match &earlier.event {
                Some(event) => event.synchronize()?,
                None => {
                    let stream = earlier.stream(instance);
                    // The wait would invalidate the capture.
                    if instance.is_capturing(&stream)? {
                        return Err(BufferError::LastUseCaptures { buffer: label(), stream: stream.id() }.into());
                    }
                    stream.synchronize()?;
                }
            }
        }
        self.list.retain(|earlier| !(write || earlier.span.write));
        Ok(())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }
}

impl Use {
    fn stream(&self, instance: &Instance) -> Stream {
        Stream::from_id(&Device::from_id(instance, self.device), self.stream)
    }

    fn is_done(&self, instance: &Instance) -> Result<bool> {
        match &self.event {
            Some(event) => event.query(),
            None => {
                let stream = self.stream(instance);
                // A query would invalidate the capture.
                Ok(!instance.is_capturing(&stream)? && stream.query()?)
            }
        }
    }

    /// The event after the use, recorded now if necessary. Call it while captures are frozen.
    fn event(&mut self, instance: &Instance, label: &dyn Fn() -> String) -> Result<&PooledEvent> {
        if self.event.is_none() {
            let stream = self.stream(instance);
            let captures = || BufferError::LastUseCaptures { buffer: label(), stream: self.stream };
            if instance.is_capturing(&stream)? {
                return Err(captures().into());
            }
            let mut event = stream.device().event_pool().take()?;
            event.record(&stream)?;
            // No capture begins meanwhile, but the stream may have joined one: then the event may be part of it.
            if instance.is_capturing(&stream)? {
                return Err(captures().into());
            }
            self.event = Some(Arc::new(event));
        }
        Ok(self.event.as_ref().expect("recorded just now, if not before"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(start: u64, end: u64, write: bool) -> Span {
        Span { start, end, write }
    }

    #[test]
    fn spans_conflict_where_they_overlap_and_one_writes() {
        for (a, b, expected) in [
            (span(0, 4, true), span(4, 8, true), false),
            (span(0, 5, true), span(4, 8, false), true),
            (span(0, 5, false), span(4, 8, false), false),
            (span(0, 8, false), span(3, 4, true), true),
            (span(3, 3, true), span(0, 8, true), false),
        ] {
            assert_eq!((a.conflicts(b), b.conflicts(a)), (expected, expected), "{a:?} {b:?}");
        }
    }
}
