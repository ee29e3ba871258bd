//! When a freed block is released to the source: behind all work that uses it, and never into a capture that did not
//! allocate it.
//!
//! - A stream-ordered source gets the free in the block's own stream; if other streams used the block, in a stream of
//!   the allocator that waits for all of them. In the capture that allocated the block the free is a node of the graph.
//! - Any other source gets the block back once fences in the other streams have passed.
//!
//! A block that cannot be released now stays in the table, and every later call tries again.

use std::collections::BTreeMap;

use rustc_hash::FxHashMap;
use warpool_driver::{CaptureId, ErrorCode, EventScope, RawHandle, StreamId};

use super::source::Source;
use super::table::TableEntry;
use super::{DeviceState, UncachedAllocator};
use crate::capture::{CaptureStatus, RelaxedMode};
use crate::memory::RawStream;
use crate::memory::journal::Cause;
use crate::{Device, Error, PooledEvent, Result, lock};

/// The fences that freed blocks wait for, by serial.
#[derive(Default)]
pub(super) struct Fences {
    of: BTreeMap<u64, Vec<Fence>>,
    last: u64,
}

/// An event recorded behind the work that was in a stream when the block was freed.
struct Fence {
    stream: StreamId,
    /// Fences of one stream pass in the order of their numbers.
    number: u64,
    event: PooledEvent,
}

/// What is known about streams while pending blocks are processed: each is queried once, however many blocks used it.
#[derive(Default)]
struct Pass {
    statuses: FxHashMap<StreamId, CaptureStatus>,
    /// The first fence of a stream that has not passed.
    behind: FxHashMap<StreamId, u64>,
    /// Whether to wait for fences and devices.
    waits: bool,
}

enum Decision {
    /// Free it behind the work of this stream.
    Release(RawStream),
    NotYet,
    /// Its pool keeps it until the graph is gone.
    KeptForGraph,
}

impl<S: Source> UncachedAllocator<S> {
    /// Releases a block that the calling thread is releasing, or leaves it pending. An error is the source's; the
    /// block is gone then. After an error of the driver the block is pending.
    pub(super) fn release_block(&self, state: &DeviceState, entry: &TableEntry, cause: &Cause) -> Result<()> {
        self.release_in(state, entry, &mut Pass::default(), cause)
    }

    /// Releases every pending block that streams and captures allow.
    pub(super) fn process_pending(&self, state: &DeviceState, cause: &Cause) {
        if self.with(state, |table| table.has_pending()) {
            self.process(state, &mut Pass::default(), cause);
        }
    }

    /// Waits for streams and releases every pending block that captures allow; then waits for the source's frees.
    pub(super) fn wait_for_pending(&self, state: &DeviceState, cause: &Cause) -> Result<()> {
        let pending = self.with(state, |table| table.has_pending());
        if pending {
            self.process(state, &mut Pass { waits: true, ..Pass::default() }, cause);
        }
        if self.source.wait_for_frees(state.ledger.device())? || pending {
            self.with(state, |table| table.count_synchronization());
        }
        Ok(())
    }

    fn process(&self, state: &DeviceState, pass: &mut Pass, cause: &Cause) {
        for serial in self.with(state, |table| table.pending()) {
            let Some(entry) = self.with(state, |table| table.begin_release(serial)) else { continue };
            if let Err(error) = self.release_in(state, &entry, pass, cause) {
                tracing::warn!(%error, ptr = %entry.ptr, "the external allocator failed to free a block");
            }
        }
    }

    fn release_in(&self, state: &DeviceState, entry: &TableEntry, pass: &mut Pass, cause: &Cause) -> Result<()> {
        let stay_pending = |error: Option<Error>| {
            if let Some(error) = error {
                tracing::warn!(%error, ptr = %entry.ptr, "a freed block could not be released; it is retried");
            }
            self.with(state, |table| table.end_release(entry.serial));
            Ok(())
        };
        let (stream, _relaxed) = match self.decide(state, entry, pass) {
            Ok(Decision::Release(stream)) => match RelaxedMode::begin(self.driver()) {
                Ok(relaxed) => (stream, relaxed),
                Err(error) => return stay_pending(Some(error)),
            },
            Ok(Decision::KeptForGraph) => return Ok(()),
            Ok(Decision::NotYet) => return stay_pending(None),
            Err(error) => return stay_pending(Some(error)),
        };
        let free = || self.source.free(entry.ptr, entry.bytes, state.ledger.device(), stream);
        if !S::STREAM_ORDERED {
            // Out of the table first: from the call on the address may be allocated again, and a panic of the source
            // leaves nothing half done.
            self.complete(state, entry, cause);
            return free();
        }
        match free() {
            Err(Error::Driver(error)) if entry.capture.is_some() && error.code == ErrorCode::InvalidValue => {
                tracing::warn!(
                    ptr = %entry.ptr,
                    "freed outside of the capture that allocated it, whose graph never ran; free it within the capture"
                );
            }
            Err(error) => return stay_pending(Some(error)),
            Ok(()) => {}
        }
        self.complete(state, entry, cause);
        Ok(())
    }

    fn complete(&self, state: &DeviceState, entry: &TableEntry, cause: &Cause) {
        drop(lock(&state.fences).of.remove(&entry.serial));
        self.with(state, |table| table.complete_free(entry.serial, cause));
        state.pools.remove_block(entry.pool);
    }

    fn decide(&self, state: &DeviceState, entry: &TableEntry, pass: &mut Pass) -> Result<Decision> {
        if entry.capture.is_some() && state.pools.keep_for_graph(entry.pool, entry.serial) {
            return Ok(Decision::KeptForGraph);
        }
        let mut others = state.pools.streams_of(entry.pool);
        others.extend(&entry.uses);
        others.retain(|&stream| stream != entry.stream);
        others.sort_unstable();
        others.dedup();
        let own = self.status(entry.stream, pass)?;
        if let Some(capture) = entry.capture
            && S::STREAM_ORDERED
            && own == CaptureStatus::Capturing(capture)
        {
            return self.decide_in_capture(entry, capture, &others, pass);
        }
        if own.refuses_work() {
            return Ok(Decision::NotYet);
        }
        let fences = lock(&state.fences).of.remove(&entry.serial);
        let is_fenced = fences.is_some();
        let mut destroyed = own == CaptureStatus::StreamDestroyed;
        for &stream in others.iter().filter(|_| !is_fenced) {
            let status = self.status(stream, pass)?;
            if status.refuses_work() {
                return Ok(Decision::NotYet);
            }
            destroyed |= status == CaptureStatus::StreamDestroyed;
        }
        if destroyed && !is_fenced {
            return self.wait_for_devices(state, entry, own, pass);
        }
        let own_stream = RawStream { id: entry.stream, raw: RawHandle(entry.stream_raw) };
        if S::STREAM_ORDERED {
            return match others.is_empty() {
                true => Ok(Decision::Release(own_stream)),
                false => self.join(state, entry.stream, &others).map(Decision::Release),
            };
        }
        let fences = match fences {
            Some(fences) => Some(fences),
            None => self.record_fences(state, &others)?,
        };
        let Some(mut fences) = fences else { return Ok(Decision::NotYet) };
        let dropped = self.drop_passed(&mut fences, pass);
        if dropped.is_err() || !fences.is_empty() {
            lock(&state.fences).of.insert(entry.serial, fences);
            return dropped.map(|()| Decision::NotYet);
        }
        if own == CaptureStatus::StreamDestroyed {
            return self.wait_for_devices(state, entry, own, pass);
        }
        Ok(Decision::Release(own_stream))
    }

    /// In the capture that allocated the block the free is a node, behind all uses. The block's own stream waits for the
    /// others: a stream of the allocator could not be joined into the capture before it ends.
    fn decide_in_capture(
        &self,
        entry: &TableEntry,
        capture: CaptureId,
        others: &[StreamId],
        pass: &mut Pass,
    ) -> Result<Decision> {
        for &stream in others {
            // A use outside of the capture: the graph cannot wait for it.
            if self.status(stream, pass)? != CaptureStatus::Capturing(capture) {
                return Ok(Decision::NotYet);
            }
        }
        for &stream in others {
            self.wait_for_stream(entry.stream, stream)?;
        }
        Ok(Decision::Release(RawStream { id: entry.stream, raw: RawHandle(entry.stream_raw) }))
    }

    /// The allocator's release stream, behind the work of `own` and `others`.
    fn join(&self, state: &DeviceState, own: StreamId, others: &[StreamId]) -> Result<RawStream> {
        let joined = self.source.release_stream(state.ledger.device())?;
        for &stream in [own].iter().chain(others) {
            self.wait_for_stream(joined, stream)?;
        }
        Ok(state.ledger.raw_stream(joined, self.driver())?.0)
    }

    /// Makes later work of `waiting` wait for what is in `stream` now.
    fn wait_for_stream(&self, waiting: StreamId, stream: StreamId) -> Result<()> {
        let device = self.driver().stream_handle(stream)?.device;
        let event = Device::known(&self.instance, device).event_pool().take()?;
        self.driver().event_record(event.id(), stream, EventScope::Plain)?;
        Ok(self.driver().stream_wait_event(waiting, event.id(), EventScope::Plain)?)
    }

    /// Records a fence in each of `streams`; `None` if one of them captures by now.
    fn record_fences(&self, state: &DeviceState, streams: &[StreamId]) -> Result<Option<Vec<Fence>>> {
        let mut fences = Vec::with_capacity(streams.len());
        for &stream in streams {
            let device = self.driver().stream_handle(stream)?.device;
            let mut event = Device::known(&self.instance, device).event_pool().take()?;
            self.driver().event_record(event.id(), stream, EventScope::Plain)?;
            if CaptureStatus::of(self.driver(), stream)? != CaptureStatus::NotCapturing {
                // Another thread began a capture meanwhile: the event may belong to it, and a query would invalidate it.
                event.never_reuse();
                return Ok(None);
            }
            let number = {
                let mut all = lock(&state.fences);
                all.last += 1;
                all.last
            };
            fences.push(Fence { stream, number, event });
        }
        Ok(Some(fences))
    }

    /// Drops the fences that have passed; all of them, if this pass waits.
    fn drop_passed(&self, fences: &mut Vec<Fence>, pass: &mut Pass) -> Result<()> {
        if fences.is_empty() {
            return Ok(());
        }
        let _relaxed = RelaxedMode::begin(self.driver())?;
        while let Some(fence) = fences.last() {
            if pass.behind.get(&fence.stream).is_some_and(|&first| first <= fence.number) {
                return Ok(());
            }
            if pass.waits {
                self.driver().event_synchronize(fence.event.id())?;
            } else if !self.driver().event_query(fence.event.id())? {
                let first = pass.behind.entry(fence.stream).or_insert(fence.number);
                *first = fence.number.min(*first);
                return Ok(());
            }
            fences.pop();
        }
        Ok(())
    }

    /// A stream that used the block was destroyed, so only the devices can be waited for, which would invalidate a
    /// capture. A stream-ordered source leaves that to a pass that waits.
    fn wait_for_devices(
        &self,
        state: &DeviceState,
        entry: &TableEntry,
        own: CaptureStatus,
        pass: &Pass,
    ) -> Result<Decision> {
        if self.has_captures() || S::STREAM_ORDERED && !pass.waits {
            return Ok(Decision::NotYet);
        }
        for device in self.instance.devices() {
            if self.driver().context_is_active(device.id())? {
                device.synchronize()?;
            }
        }
        // A source must not get the handle of a destroyed stream.
        let stream = if own == CaptureStatus::StreamDestroyed {
            self.source.release_stream(state.ledger.device())?
        } else {
            entry.stream
        };
        Ok(Decision::Release(state.ledger.raw_stream(stream, self.driver())?.0))
    }

    fn status(&self, stream: StreamId, pass: &mut Pass) -> Result<CaptureStatus> {
        if let Some(&known) = pass.statuses.get(&stream) {
            return Ok(known);
        }
        let status = CaptureStatus::of(self.driver(), stream)?;
        pass.statuses.insert(stream, status);
        Ok(status)
    }
}
