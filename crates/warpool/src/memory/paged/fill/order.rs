//! Order between streams: before a stream uses pages of another one, it waits for the work that may still use them. The
//! device waits, not the host.

use std::sync::Arc;

use warpool_driver::{EventId, StreamId};

use super::Fill;
use crate::Result;
use crate::memory::paged::old_mappings;
use crate::memory::paged::pending::PendingFrees;
use crate::memory::paged::pools::Takeable;
use crate::memory::paged::stream_tail::Tail;
use crate::memory::stream_fence::{self, Recorded};

impl Fill<'_> {
    /// Makes the request's stream wait for the work of another heap, from which pages were just taken. `false` if it
    /// must not be taken from.
    pub(super) fn order_after_heap(&mut self, number: u32) -> Result<bool> {
        match self.takeable(number) {
            Takeable::After(users) => self.order_after(number, users),
            Takeable::OnOom | Takeable::Never => Ok(false),
        }
    }

    /// Makes the request's stream wait for the work of another heap and of the streams that use its memory beside its
    /// own, since pages of it were just taken. `false` if a capture forbids it.
    pub(super) fn order_after(&mut self, number: u32, users: Vec<StreamId>) -> Result<bool> {
        if crate::defect::Defect::NoEventBetweenHeaps.is_on() {
            return Ok(true);
        }
        let stream = self.device.heaps.get(number).lock().stream;
        // What was recorded before this take counts no longer.
        (self.needs_bystanders, self.ordered_after) = (true, Vec::new());
        if !self.order_after_users(&users)? {
            return Ok(false);
        }
        self.ordered_after = users;
        if stream == self.request.stream {
            return Ok(true);
        }
        match self.device.tail_of(number, self.details)? {
            Tail::Done => Ok(true),
            Tail::Event { event, is_new } => {
                self.ordered_after.extend(is_new.then_some(stream));
                self.wait_for(event.id())
            }
            Tail::Unknown => {
                let with_pages = self.table.index.with_pages();
                self.device.wait_for_unknown_work(with_pages.chain([number]))
            }
            Tail::CaptureActive => Ok(false),
        }
    }

    /// Makes the request's stream wait for the work that these streams hold now. `false` if a capture forbids it.
    fn order_after_users(&self, streams: &[StreamId]) -> Result<bool> {
        for &stream in streams.iter().filter(|&&stream| stream != self.request.stream) {
            match stream_fence::record(&PendingFrees::new(self.device, self.details), stream)? {
                Recorded::Fenced(event) if self.wait_for(event.id())? => {}
                Recorded::AlreadyDone => {}
                Recorded::Fenced(_) | Recorded::CaptureActive => return Ok(false),
            }
        }
        Ok(true)
    }

    /// `false` if the request's stream captures, which another thread may have begun since the request came.
    fn wait_for(&self, event: EventId) -> Result<bool> {
        stream_fence::wait_for_event(&PendingFrees::new(self.device, self.details), self.request.stream, event)
    }

    /// If pages were taken that another stream used, makes the request's stream wait for bystanders, too
    /// (`bystanders.rs`). To be called at the end, whatever the outcome.
    pub(super) fn order_after_bystanders(&mut self) {
        if crate::defect::Defect::NoEventBetweenHeaps.is_on() {
            return;
        }
        if !std::mem::take(&mut self.needs_bystanders) || self.request.capturing {
            return;
        }
        let mut except = std::mem::take(&mut self.ordered_after);
        except.push(self.request.stream);
        let recorded = std::mem::take(&mut self.recorded);
        let mut events: Vec<_> = recorded.into_iter().filter(|(stream, _)| !except.contains(stream)).collect();
        if events.is_empty() {
            events = old_mappings::bystander_events(self.device, self.table, &except, self.details);
        }
        for (stream, event) in events {
            let event = Arc::clone(&event);
            if let Err(error) = self.wait_for(event.id()) {
                tracing::warn!(%error, %stream, "a stream takes pages without waiting for another one");
            }
        }
    }
}
