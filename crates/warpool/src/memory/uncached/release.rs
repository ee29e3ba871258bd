//! When a freed block is released to the source: after all work that uses it, and never in a capture that did not
//! allocate it.
//!
//! - A stream-ordered source gets the free in the block's own stream; if other streams used the block, in a stream of
//!   the allocator that waits for all of them. In the capture that allocated the block the free is a node of the graph.
//! - Any other source gets the block back once fences in the other streams have passed, and also one in the block's own
//!   stream if that may be destroyed meanwhile.
//!
//! A block that cannot be released now stays in the table, and every later call tries again. By then the owners of its
//! streams may have destroyed them: a later call names only those that live as long as the instance, and waits for the
//! others by events after all work of the devices.
//!
//! For a stream-ordered source no capture begins or ends between the check of the streams and the free. Any other
//! source is user code, and captures must not wait for user code.

use rustc_hash::FxHashMap;
use warpool_driver::{CaptureId, ErrorCode, EventScope, RawHandle, StreamId};

use super::source::Source;
use super::table::TableEntry;
use super::{UncachedAllocator, UncachedDevice};
use crate::capture::{CaptureStatus, FrozenForCall, RelaxedMode};
use crate::memory::RawStream;
use crate::memory::report::EntryDetails;
use crate::memory::stream_fence::{self, DeviceEvents, FenceOwner, PENDING_PER_CALL, StreamFences, StreamUses};
use crate::unwind::OnUnwind;
use crate::{Error, Instance, Result, lock};

/// A release of one block, or a pass over all pending blocks.
#[derive(Default)]
struct Pass {
    /// A pass over all blocks queries each stream once, however many blocks used it.
    statuses: Option<FxHashMap<StreamId, CaptureStatus>>,
    /// Whether to wait for fences and devices.
    waits: bool,
    /// Whether fences were polled. Those recorded later are polled by the next pass.
    polled: bool,
}

impl Pass {
    fn over_all(waits: bool) -> Self {
        Self { statuses: Some(FxHashMap::default()), waits, polled: false }
    }

    /// Whether the blocks were freed by earlier calls.
    fn is_over_all(&self) -> bool {
        self.statuses.is_some()
    }
}

enum Decision {
    /// Free it after the work of this stream.
    Release(RawStream),
    NotYet,
    /// Its pool keeps it until the graph is gone.
    KeptForGraph,
}

impl<S: Source> UncachedAllocator<S> {
    /// Releases a block that the calling thread has begun to release, or leaves it pending. A returned error is the
    /// source's, and the block is gone. After an error of the driver the block is pending.
    pub(super) fn release_block(
        &self,
        state: &UncachedDevice,
        entry: &TableEntry,
        details: &EntryDetails,
    ) -> Result<()> {
        let unwinds = OnUnwind::new(|| state.with(|table| table.interrupt_release(entry.serial)));
        let frozen = self.freeze_captures();
        unwinds.disarm();
        match frozen {
            Ok(_frozen) => self.release_in(state, entry, &mut Pass::default(), details),
            Err(error) => self.stay_pending(state, entry, Some(error)),
        }
    }

    /// Releases every pending block that streams and captures allow. Examines a bounded number of those that are not
    /// ready, round robin.
    pub(super) fn process_pending(&self, state: &UncachedDevice, details: &EntryDetails) {
        if state.has_pending() {
            self.process(state, &mut Pass::over_all(false), details);
        }
    }

    /// Waits for streams and releases every pending block that captures allow; then waits for the source's frees.
    pub(super) fn wait_for_pending(&self, state: &UncachedDevice, details: &EntryDetails) -> Result<()> {
        let pending = state.has_pending();
        if pending {
            self.process(state, &mut Pass::over_all(true), details);
        }
        if self.source.wait_for_frees(state.id)? || pending {
            state.with(|table| table.stats.num_sync_all_streams += 1);
        }
        Ok(())
    }

    fn process(&self, state: &UncachedDevice, pass: &mut Pass, details: &EntryDetails) {
        let owner = Fencing { allocator: self, state };
        let stay_max = if pass.waits { usize::MAX } else { PENDING_PER_CALL };
        let fence = |serial, devices: &mut DeviceEvents| stream_fence::fence_postponed(&owner, serial, devices);
        if let Err(error) = stream_fence::retry_unfenced(&owner, stay_max, fence) {
            tracing::warn!(%error, "no event could be recorded behind the use of a freed block; it is retried");
        }
        let _frozen = match self.freeze_captures() {
            Ok(frozen) => frozen,
            Err(error) => return tracing::warn!(%error, "freed blocks could not be released; they are retried"),
        };
        let (mut unseen, mut last) = state.with(|table| table.begin_pass(stay_max));
        let mut stay = 0;
        while unseen > 0 && stay < stay_max {
            let next = state.with(|table| table.begin_next_release(last));
            let Some(entry) = next else { break };
            (unseen, last) = (unseen - 1, Some(entry.serial));
            if let Err(error) = self.release_in(state, &entry, pass, details) {
                tracing::warn!(%error, ptr = %entry.ptr, "the external allocator failed to free a block");
            }
            stay += usize::from(state.with(|table| table.is_idle(entry.serial)));
        }
    }

    fn release_in(
        &self,
        state: &UncachedDevice,
        entry: &TableEntry,
        pass: &mut Pass,
        details: &EntryDetails,
    ) -> Result<()> {
        let stay_pending = |error| self.stay_pending(state, entry, error);
        // After a panic the block is pending, unless it was removed from the table.
        let unwinds = OnUnwind::new(|| state.with(|table| table.interrupt_release(entry.serial)));
        let decision = self.decide(state, entry, pass);
        unwinds.disarm();
        let (stream, _relaxed) = match decision {
            Ok(Decision::Release(stream)) => match RelaxedMode::begin(self.driver()) {
                Ok(relaxed) => (stream, relaxed),
                Err(error) => return stay_pending(Some(error)),
            },
            Ok(Decision::KeptForGraph) => return Ok(()),
            Ok(Decision::NotYet) => return stay_pending(None),
            Err(error) => return stay_pending(Some(error)),
        };
        let free = || self.source.free(entry.ptr, entry.bytes, state.id, stream);
        if !S::STREAM_ORDERED {
            // Removed from the table first: after the call the address may be allocated again, and the state stays
            // consistent if the source panics.
            self.complete(state, entry, details);
            return free();
        }
        let unwinds = OnUnwind::new(|| state.with(|table| table.interrupt_release(entry.serial)));
        let freed = free();
        unwinds.disarm();
        match freed {
            Err(Error::Driver(error)) if entry.capture.is_some() && error.code == ErrorCode::InvalidValue => {
                tracing::warn!(
                    ptr = %entry.ptr,
                    "freed outside of the capture that allocated it, whose graph never ran; free it within the capture"
                );
            }
            Err(error) => return stay_pending(Some(error)),
            Ok(()) => {}
        }
        self.complete(state, entry, details);
        Ok(())
    }

    fn stay_pending(&self, state: &UncachedDevice, entry: &TableEntry, error: Option<Error>) -> Result<()> {
        if let Some(error) = error {
            tracing::warn!(%error, ptr = %entry.ptr, "a freed block could not be released; it is retried");
        }
        state.with(|table| table.end_release(entry.serial));
        Ok(())
    }

    /// If the source is stream-ordered, keeps the capture status of streams unchanged until the source is called.
    pub(super) fn freeze_captures(&self) -> Result<Option<FrozenForCall<'_>>> {
        S::STREAM_ORDERED.then(|| self.shared.instance.freeze_captures_for_call()).transpose()
    }

    fn complete(&self, state: &UncachedDevice, entry: &TableEntry, details: &EntryDetails) {
        state.with(|table| table.complete_free(entry.serial, details));
        state.pools.remove_block(entry.pool);
        if !entry.pool.is_default() {
            self.forget_removed_pools(state);
        }
    }

    fn decide(&self, state: &UncachedDevice, entry: &TableEntry, pass: &mut Pass) -> Result<Decision> {
        if entry.capture.is_some() && state.pools.keep_for_graph(entry.pool, entry.serial) {
            return Ok(Decision::KeptForGraph);
        }
        if S::STREAM_ORDERED {
            self.decide_stream_ordered(state, entry, pass)
        } else {
            self.decide_fenced(state, entry, pass)
        }
    }

    fn decide_stream_ordered(&self, state: &UncachedDevice, entry: &TableEntry, pass: &mut Pass) -> Result<Decision> {
        let others = other_streams(state, entry);
        let instance = &self.shared.instance;
        if pass.is_over_all()
            && !others.iter().chain([&entry.stream]).all(|&stream| instance.may_name(stream))
            && !crate::defect::Defect::PostponedFenceNamesStream.is_on()
        {
            return self.decide_unnamed(state);
        }
        let own = self.status(entry.stream, pass)?;
        let statuses = others.iter().map(|&stream| self.status(stream, pass)).collect::<Result<Vec<_>>>()?;
        if let Some(capture) = entry.capture
            && own == CaptureStatus::Capturing(capture)
        {
            return self.decide_in_capture(entry, capture, &others, &statuses);
        }
        if own.refuses_work() || statuses.iter().any(|status| status.refuses_work()) {
            return Ok(Decision::NotYet);
        }
        if own == CaptureStatus::StreamDestroyed || statuses.contains(&CaptureStatus::StreamDestroyed) {
            // Only a wait for the devices helps: left to a pass that waits.
            return if pass.waits { self.decide_after_devices(state, entry, own) } else { Ok(Decision::NotYet) };
        }
        if others.is_empty() {
            return Ok(Decision::Release(own_stream(entry)));
        }
        let joined = self.source.release_stream(state.id)?;
        for &stream in [entry.stream].iter().chain(&others) {
            stream_fence::order_after(&self.shared.instance, stream, joined)?;
        }
        Ok(Decision::Release(state.raw_stream(joined)?.0))
    }

    /// For a block of streams that may not be named: frees it in a stream of the allocator, after all work of the
    /// devices.
    fn decide_unnamed(&self, state: &UncachedDevice) -> Result<Decision> {
        // Not shared by the blocks of a pass: another thread may free blocks meanwhile.
        let mut devices = DeviceEvents::default();
        let Some(events) = devices.record(&Fencing { allocator: self, state })? else {
            return Ok(Decision::NotYet);
        };
        let stream = self.source.release_stream(state.id)?;
        for event in events {
            self.driver().stream_wait_event(stream, event.id(), EventScope::Plain)?;
        }
        Ok(Decision::Release(state.raw_stream(stream)?.0))
    }

    /// In the capture that allocated the block the free is a node, after all uses. The block's own stream waits for the
    /// others: a stream of the allocator could not be joined into the capture before it ends.
    fn decide_in_capture(
        &self,
        entry: &TableEntry,
        capture: CaptureId,
        others: &[StreamId],
        statuses: &[CaptureStatus],
    ) -> Result<Decision> {
        if statuses.iter().any(|&status| status != CaptureStatus::Capturing(capture)) {
            // A use outside of the capture: the graph cannot wait for it.
            return Ok(Decision::NotYet);
        }
        for &stream in others {
            stream_fence::order_after(&self.shared.instance, stream, entry.stream)?;
        }
        Ok(Decision::Release(own_stream(entry)))
    }

    /// The block's own stream may be destroyed once the free has returned. So a block that has to wait for other
    /// streams also waits for an event in its own stream, unless that stream lives as long as the instance, and is then
    /// freed in a stream of the allocator.
    fn decide_fenced(&self, state: &UncachedDevice, entry: &TableEntry, pass: &mut Pass) -> Result<Decision> {
        let is_kept = self.shared.instance.may_name(entry.stream);
        let may_name = is_kept || !pass.is_over_all() || crate::defect::Defect::PostponedFenceNamesStream.is_on();
        let owner = Fencing { allocator: self, state };
        let is_fenced = state.with(|table| table.has_fences(entry.serial));
        if !is_fenced || is_kept {
            let mut streams = other_streams(state, entry);
            if may_name {
                let own = self.status(entry.stream, pass)?;
                if own.refuses_work() {
                    return Ok(Decision::NotYet);
                }
                if !is_fenced && streams.is_empty() {
                    return match own {
                        CaptureStatus::StreamDestroyed => self.decide_after_devices(state, entry, own),
                        _ => Ok(Decision::Release(own_stream(entry))),
                    };
                }
            }
            if !is_fenced {
                streams.extend((!is_kept).then_some(entry.stream));
                state.with(|table| table.begin_fences(entry.serial, streams));
                match pass.is_over_all() {
                    true => stream_fence::fence_postponed(&owner, entry.serial, &mut DeviceEvents::default())?,
                    false => stream_fence::fence(&owner, entry.serial)?,
                }
            }
        }
        let is_clear = || owner.with_uses(&entry.serial, |uses| uses.is_clear());
        if !is_clear() {
            let outcome = if pass.waits {
                stream_fence::wait_all(&owner)
            } else if !std::mem::replace(&mut pass.polled, true) {
                stream_fence::poll_some(&owner)
            } else {
                Ok(())
            };
            if !is_clear() {
                return outcome.map(|()| Decision::NotYet);
            }
        }
        if is_kept { Ok(Decision::Release(own_stream(entry))) } else { self.release_in_own(state) }
    }

    /// A source must not get the handle of a stream that may be destroyed.
    fn release_in_own(&self, state: &UncachedDevice) -> Result<Decision> {
        let stream = self.source.release_stream(state.id)?;
        Ok(Decision::Release(state.raw_stream(stream)?.0))
    }

    /// Waits for the devices, unless a capture is active, which the wait would invalidate.
    fn decide_after_devices(&self, state: &UncachedDevice, entry: &TableEntry, own: CaptureStatus) -> Result<Decision> {
        if self.shared.has_captures() || !stream_fence::wait_for_devices(&self.shared.instance)? {
            return Ok(Decision::NotYet);
        }
        if own != CaptureStatus::StreamDestroyed {
            return Ok(Decision::Release(own_stream(entry)));
        }
        self.release_in_own(state)
    }

    fn status(&self, stream: StreamId, pass: &mut Pass) -> Result<CaptureStatus> {
        let Some(statuses) = &mut pass.statuses else { return CaptureStatus::of(self.driver(), stream) };
        if let Some(&known) = statuses.get(&stream) {
            return Ok(known);
        }
        let status = CaptureStatus::of(self.driver(), stream)?;
        statuses.insert(stream, status);
        Ok(status)
    }
}

fn own_stream(entry: &TableEntry) -> RawStream {
    RawStream { id: entry.stream, raw: RawHandle(entry.stream_raw) }
}

/// The streams other than its own that may use a block.
fn other_streams(state: &UncachedDevice, entry: &TableEntry) -> Vec<StreamId> {
    let mut others = state.pools.with(|table| table.used_by(entry.pool));
    others.extend(&entry.uses);
    others.retain(|&stream| stream != entry.stream);
    others.sort_unstable();
    others.dedup();
    others
}

/// The fences of one device. A freed block is identified by its serial; `decide` reclaims it.
struct Fencing<'a, S> {
    allocator: &'a UncachedAllocator<S>,
    state: &'a UncachedDevice,
}

impl<S: Source> FenceOwner for Fencing<'_, S> {
    type Key = u64;

    fn instance(&self) -> &Instance {
        &self.allocator.shared.instance
    }

    fn has_captures(&self) -> bool {
        self.allocator.shared.has_captures()
    }

    fn with_uses<R>(&self, serial: &u64, act: impl FnOnce(&mut StreamUses) -> R) -> R {
        self.state.with(|table| act(table.stream_uses(*serial)))
    }

    fn with_fences<R>(&self, act: impl FnOnce(&mut StreamFences<u64>) -> R) -> R {
        act(&mut lock(&self.state.fences))
    }

    fn reclaim_if_clear(&self, _: u64) {}
}
