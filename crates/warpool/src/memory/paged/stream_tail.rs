//! The last work of a stream in the memory of a heap, without naming a stream that may be destroyed.
//!
//! A caller keeps a stream alive as long as memory that was allocated for it. Once the last block of a heap is freed,
//! the stream may be destroyed at any moment, and its id must not reach the driver again. So the free of the last block
//! records an event, and later calls wait for that. It costs an event (0.14 us on an H200) each time nothing is left
//! allocated, not a driver call for every pair. Streams that live as long as their [`Instance`](crate::Instance), its
//! own and the default ones, need none of this.
//!
//! A destructor calls no driver, and a capture may forbid the event: then the last work is unknown, and before the
//! memory serves another stream all work of the device is waited for.
//!
//! # Why no stream is named too late
//! Events are recorded while `naming` is locked, in a stream that has an allocated block at that time. A free of the
//! last block locks it afterwards, before it returns to the owner: by then no event is being recorded by a thread that
//! saw the block, and later ones see none.

use std::sync::Arc;

use warpool_driver::StreamId;

use super::device::PagedDevice;
use super::free::Fences;
use super::ids::HeapId;
use super::last_work::LastWork;
use super::pending::PendingFrees;
use crate::memory::report::EntryDetails;
use crate::memory::stream_fence::{self, Recorded};
use crate::{PooledEvent, Result, lock};

/// An event after the work of a stream.
pub(super) enum Tail {
    Done,
    Event {
        event: Arc<PooledEvent>,
        /// Whether it is after all work that the stream holds now, not only after what used the heap's memory.
        is_new: bool,
    },
    /// Only the device can be waited for.
    Unknown,
    /// A capture forbids to record an event.
    CaptureActive,
}

impl PagedDevice {
    /// An event after all work of its stream that may use the memory of a heap.
    pub(super) fn tail_of(&self, number: HeapId, details: &EntryDetails) -> Result<Tail> {
        let _naming = lock(&self.naming);
        let (stream, last_work) = {
            let heap = self.heaps.get(number).lock();
            (heap.stream, heap.last_work().cloned())
        };
        Ok(match last_work {
            Some(LastWork::Done) => Tail::Done,
            Some(LastWork::Before(event)) => Tail::Event { event, is_new: false },
            Some(LastWork::Unknown) if crate::defect::Defect::UnknownWorkIsDone.is_on() => Tail::Done,
            Some(LastWork::Unknown) => Tail::Unknown,
            None => match stream_fence::record(&PendingFrees::new(self, details), stream)? {
                Recorded::Fenced(event) => Tail::Event { event: Arc::new(event), is_new: true },
                Recorded::AlreadyDone => Tail::Done,
                Recorded::CaptureActive => Tail::CaptureActive,
            },
        })
    }

    /// The same for a stream that nobody said uses the memory in question. `None` if nothing can be waited for.
    pub(super) fn bystander_tail(&self, number: HeapId, details: &EntryDetails) -> Result<Option<Arc<PooledEvent>>> {
        let _naming = lock(&self.naming);
        let (stream, last_work) = {
            let heap = self.heaps.get(number).lock();
            (heap.stream, heap.last_work().cloned())
        };
        match last_work {
            Some(LastWork::Before(event)) => Ok(Some(event)),
            Some(LastWork::Done | LastWork::Unknown) => Ok(None),
            None => {
                let event = stream_fence::record_bystander(&PendingFrees::new(self, details), stream)?;
                Ok(event.map(Arc::new))
            }
        }
    }

    /// The last block of `stream` in a heap was freed: its owner may destroy it as soon as this returns.
    #[cold]
    pub(super) fn end_of_stream(&self, number: HeapId, stream: StreamId, fences: Fences, details: &EntryDetails) {
        let _naming = lock(&self.naming);
        let ends = {
            let heap = self.heaps.get(number).lock();
            if heap.last_work().is_none() || heap.stream != stream {
                // Another thread has allocated meanwhile; the free of that block gets here, too. Or that is also freed,
                // and the heap is another stream's by now.
                return;
            }
            heap.ends()
        };
        let last_work = match fences {
            Fences::Later => return,
            Fences::Now => stream_fence::record(&PendingFrees::new(self, details), stream),
        };
        let last_work = match last_work {
            Ok(Recorded::Fenced(event)) => LastWork::Before(Arc::new(event)),
            Ok(Recorded::AlreadyDone) => LastWork::Done,
            Ok(Recorded::CaptureActive) => return,
            Err(error) => {
                tracing::warn!(%error, %stream, "no event could be recorded after the last work of a stream");
                return;
            }
        };
        self.heaps.get(number).lock().set_last_work(ends, last_work);
    }

    /// Waits for all work of the device, and notes that the unknown last work of these heaps is done. `false` if a
    /// capture forbids it.
    pub(super) fn wait_for_unknown_work(&self, heaps: impl Iterator<Item = HeapId>) -> Result<bool> {
        let unknown = heaps.filter_map(|number| {
            let heap = self.heaps.get(number).lock();
            matches!(heap.last_work(), Some(LastWork::Unknown)).then(|| (number, heap.ends()))
        });
        let unknown: Vec<(HeapId, u64)> = unknown.collect();
        if self.has_captures() {
            return Ok(false);
        }
        let Some(_held_off) = self.instance().hold_off_captures() else { return Ok(false) };
        self.driver().device_synchronize(self.id)?;
        for (number, ends) in unknown {
            self.heaps.get(number).lock().set_last_work(ends, LastWork::Done);
        }
        Ok(true)
    }

    /// Waits for all work of its stream that may use the memory of a heap. `false` if a capture forbids it.
    pub(super) fn wait_for_heap(&self, number: HeapId, details: &EntryDetails) -> Result<bool> {
        match self.tail_of(number, details)? {
            Tail::Done => Ok(true),
            Tail::Event { event, .. } => {
                let _safe = self.capture_safe()?;
                self.driver().event_synchronize(event.id())?;
                Ok(true)
            }
            Tail::Unknown => self.wait_for_unknown_work(std::iter::once(number)),
            Tail::CaptureActive => Ok(false),
        }
    }
}
