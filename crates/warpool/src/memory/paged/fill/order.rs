//! Order between streams: before a stream uses pages of another one, it waits for the work that may still use them. The
//! device waits, not the host.

use warpool_driver::{EventId, EventScope, StreamId};

use super::Fill;
use crate::memory::paged::pending::PendingFrees;
use crate::memory::paged::pools::Takeable;
use crate::memory::stream_fence::{self, Recorded};
use crate::{Result, lock};

impl Fill<'_> {
    /// Makes the request's stream wait for the work of another heap, from which pages were just taken. `false` if it
    /// must not be taken from.
    pub(super) fn order_after_heap(&mut self, number: u32) -> Result<bool> {
        let (stream, pool) = {
            let heap = self.device.heaps.get(number).lock();
            (heap.stream, heap.pool)
        };
        let takeable = lock(&self.device.pools).takeable(pool);
        match takeable {
            Takeable::After(mut streams) => {
                streams.push(stream);
                self.order_after(streams)
            }
            Takeable::OnOom | Takeable::Never => Ok(false),
        }
    }

    /// Makes the request's stream wait for the work that these streams hold now, since pages were just taken that they
    /// used. `false` if a capture forbids it.
    pub(super) fn order_after(&mut self, mut streams: Vec<StreamId>) -> Result<bool> {
        if crate::defect::Defect::NoEventBetweenHeaps.is_on() {
            return Ok(true);
        }
        streams.retain(|&stream| stream != self.request.stream);
        self.ordered_after = Some(Vec::new());
        for &stream in &streams {
            match stream_fence::record(&PendingFrees::new(self.device, self.details), stream)? {
                Recorded::Fenced(event) => self.wait_for(event.id())?,
                Recorded::AlreadyDone => {}
                Recorded::CaptureActive => return Ok(false),
            }
        }
        self.ordered_after = Some(streams);
        Ok(true)
    }

    fn wait_for(&self, event: EventId) -> Result<()> {
        Ok(self.device.driver().stream_wait_event(self.request.stream, event, EventScope::Plain)?)
    }

    /// If pages of another heap were taken, makes the request's stream wait for the other streams of the device too. To
    /// be called at the end, whatever the outcome.
    ///
    /// A program should say which streams use a block before it frees it. One that forgets it works with an allocator
    /// that keeps memory within its stream, as long as that stream is idle: PyTorch's own tests do so. It is no reason
    /// to fail a request, though: where no event can be recorded, there is none.
    pub(super) fn order_after_bystanders(&mut self) {
        if crate::defect::Defect::NoEventBetweenHeaps.is_on() {
            return;
        }
        let Some(known) = self.ordered_after.take() else { return };
        let owner = PendingFrees::new(self.device, self.details);
        for stream in self.device.streams() {
            if stream == self.request.stream || known.contains(&stream) {
                continue;
            }
            let waited = match self.recorded.iter().find(|&&(of, _)| of == stream) {
                Some(&(_, event)) => self.wait_for(event),
                None => stream_fence::record_bystander(&owner, stream)
                    .and_then(|event| event.map_or(Ok(()), |event| self.wait_for(event.id()))),
            };
            if let Err(error) = waited {
                tracing::warn!(%error, %stream, "a stream takes pages without waiting for another one");
            }
        }
    }
}
