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
use super::heap::LastWork;
use super::ids::HeapId;
use super::pages::PageTable;
use super::pending::PendingFrees;
use crate::memory::report::EntryDetails;
use crate::memory::stream_fence::{self, Recorded};
use crate::{PooledEvent, Result, lock};

impl PagedDevice {
    /// All work of its stream that may use the memory of a heap: if it is not known, an event is recorded after it.
    /// `None` if a capture forbids that.
    pub(super) fn last_work_of(&self, number: HeapId, details: &EntryDetails) -> Result<Option<LastWork>> {
        let _naming = lock(&self.naming);
        let (stream, last_work) = {
            let heap = self.heaps.get(number).lock();
            (heap.stream, heap.last_work().cloned())
        };
        match last_work {
            Some(LastWork::Unknown) if crate::defect::Defect::UnknownWorkIsDone.is_on() => Ok(Some(LastWork::Done)),
            Some(last_work) => Ok(Some(last_work)),
            None => self.record_last_work(stream, details),
        }
    }

    /// Records an event in a stream that exists.
    fn record_last_work(&self, stream: StreamId, details: &EntryDetails) -> Result<Option<LastWork>> {
        Ok(match stream_fence::record(&PendingFrees::new(self, details), stream)? {
            Recorded::Fenced(event) => Some(LastWork::Before(Arc::new(event))),
            Recorded::AlreadyDone => Some(LastWork::Done),
            Recorded::CaptureActive => None,
        })
    }

    /// Events after the work of bystanders, but for some streams.
    pub(super) fn bystander_events(
        &self,
        table: &mut PageTable,
        except: &[StreamId],
        details: &EntryDetails,
    ) -> Vec<(StreamId, Arc<PooledEvent>)> {
        let record = |number| {
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
        };
        table.bystanders.events(except, record, |event| self.has_passed(event))
    }

    /// Whether the work before an event is done.
    pub(super) fn has_passed(&self, event: &PooledEvent) -> Result<bool> {
        let _safe = self.capture_safe()?;
        Ok(self.driver().event_query(event.id())?)
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
        let recorded = match fences {
            Fences::Later => return,
            Fences::Now => self.record_last_work(stream, details),
        };
        match recorded {
            Ok(Some(last_work)) => self.heaps.get(number).lock().set_last_work(ends, last_work),
            Ok(None) => {}
            Err(error) => tracing::warn!(%error, %stream, "no event could be recorded after the last work of a stream"),
        }
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
        match self.last_work_of(number, details)? {
            Some(LastWork::Done) => Ok(true),
            Some(LastWork::Before(event)) => {
                let _safe = self.capture_safe()?;
                self.driver().event_synchronize(event.id())?;
                Ok(true)
            }
            Some(LastWork::Unknown) => self.wait_for_unknown_work(std::iter::once(number)),
            None => Ok(false),
        }
    }
}
