//! Streams that are waited for although nobody said that they use the memory in question.
//!
//! A program should say which streams use a block before it frees it. One that forgets it works with an allocator that
//! keeps memory within its stream, as long as that stream is idle: PyTorch's own tests do so. So before pages change
//! their stream, and before a mapping is undone, other streams are waited for, too.
//!
//! Which ones is what the allocator sees: a stream on which something was allocated or freed is waited for the next
//! [`TIMES`] times, and after that for as long as it is busy. One that was found idle is not waited for again until it
//! allocates or frees. Of more than [`STREAMS_MAX`], those that did so last count. So the cost is bounded, and streams
//! that do nothing cost nothing.
//!
//! A stream whose last block was freed by a destructor is not waited for: a destructor records no event, the stream may
//! have gone since, and to wait for the whole device would make programs slow that say which streams use a block, as
//! typed memory does by itself.

use std::collections::VecDeque;
use std::sync::Arc;

use warpool_driver::StreamId;

use super::ids::HeapId;
use crate::{PooledEvent, Result};

/// How often a stream is waited for after each allocation or free, whether or not it is busy: a program allocates first
/// and submits the work then.
const TIMES: u32 = 4;

/// PyTorch has 32 streams per priority.
const STREAMS_MAX: usize = 32;

/// The streams that may be busy, the one that allocated or freed last at the front.
#[derive(Debug, Default)]
pub(super) struct Bystanders {
    streams: VecDeque<Bystander>,
}

#[derive(Debug)]
struct Bystander {
    stream: StreamId,
    /// Its heap with the last allocation or free, unless that was retired.
    heap: Option<HeapId>,
    /// How often it is waited for whether or not it is busy.
    times: u32,
    /// The last event after its work.
    event: Option<Arc<PooledEvent>>,
}

impl Bystanders {
    /// Something was allocated or freed on a stream.
    pub(super) fn note(&mut self, stream: StreamId, heap: HeapId) {
        let known = self.streams.iter().position(|bystander| bystander.stream == stream);
        let event = known.and_then(|at| self.streams.remove(at)).and_then(|bystander| bystander.event);
        self.streams.push_front(Bystander { stream, heap: Some(heap), times: TIMES, event });
        self.streams.truncate(STREAMS_MAX);
    }

    /// A heap was retired: it may be another stream's from here on.
    pub(super) fn heap_retired(&mut self, heap: HeapId) {
        for bystander in self.streams.iter_mut().filter(|bystander| bystander.heap == Some(heap)) {
            (bystander.heap, bystander.times) = (None, 0);
        }
    }

    /// The host has waited for the events of all: none is busy.
    pub(super) fn all_done(&mut self) {
        self.streams.retain_mut(|bystander| {
            bystander.event = None;
            bystander.times > 0
        });
    }

    /// Events after the work of the streams that may be busy, but for some. `record` records one after the work of a
    /// heap's stream, if it can be; `is_done` asks for an earlier one. A failure is no reason to fail a request: where
    /// no event can be recorded, there is none.
    pub(super) fn events(
        &mut self,
        except: &[StreamId],
        record: impl Fn(HeapId) -> Result<Option<Arc<PooledEvent>>>,
        is_done: impl Fn(&PooledEvent) -> Result<bool>,
    ) -> Vec<(StreamId, Arc<PooledEvent>)> {
        if crate::defect::Defect::ForgetsBystanders.is_on() {
            return Vec::new();
        }
        let mut events = Vec::with_capacity(self.streams.len());
        self.streams.retain_mut(|bystander| {
            if except.contains(&bystander.stream) {
                return true;
            }
            let is_busy = bystander.next_event(&record, &is_done).unwrap_or_else(|error| {
                let stream = bystander.stream;
                tracing::warn!(%error, %stream, "pages change their stream without waiting for another one");
                true
            });
            if let Some(event) = bystander.event.as_ref().filter(|_| is_busy) {
                events.push((bystander.stream, Arc::clone(event)));
            }
            is_busy
        });
        events
    }
}

impl Bystander {
    /// Records the next event. `false` if the stream was found idle, and need not be waited for.
    fn next_event(
        &mut self,
        record: impl Fn(HeapId) -> Result<Option<Arc<PooledEvent>>>,
        is_done: impl Fn(&PooledEvent) -> Result<bool>,
    ) -> Result<bool> {
        if self.times == 0
            && let Some(event) = &self.event
            && is_done(event)?
        {
            return Ok(false);
        }
        self.times = self.times.saturating_sub(1);
        if let Some(heap) = self.heap
            && let Some(event) = record(heap)?
        {
            self.event = Some(event);
        }
        Ok(self.event.is_some() || self.times > 0)
    }
}
