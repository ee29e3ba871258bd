//! How a request is served, and what happens when the source has no memory.
//!
//! The source may panic: guards release what a request in flight has reserved (quota, a slot in a pool).

use std::mem::ManuallyDrop;

use warpool_driver::DevicePtr;

use super::source::Source;
use super::table::{AllocationTable, TableEntry};
use super::{UncachedAllocator, UncachedDevice};
use crate::capture::CaptureStatus;
use crate::memory::report::EntryDetails;
use crate::memory::shortage::Shortage;
use crate::memory::{Allocation, MemPoolId, OomCause, RawStream, Request, StackLevel};
use crate::unwind::OnUnwind;
use crate::{Error, Result};

/// Requests of this size (an exbibyte) or more are refused.
const TOO_LARGE: u64 = 1 << 60;

/// Bytes that count against the limit while a request is in flight.
struct Quota<'a> {
    state: &'a UncachedDevice,
    bytes: u64,
}

impl Quota<'_> {
    /// Releases the quota in the same step in which the block is added.
    fn end_with<R>(self, step: impl FnOnce(&mut AllocationTable) -> R) -> R {
        let Self { state, bytes } = *ManuallyDrop::new(self);
        state.with(|table| {
            table.release_quota(bytes);
            step(table)
        })
    }
}

impl Drop for Quota<'_> {
    fn drop(&mut self) {
        self.state.with(|table| table.release_quota(self.bytes));
    }
}

impl<S: Source> UncachedAllocator<S> {
    pub(super) fn allocate(&self, request: Request) -> Result<Allocation> {
        let state = self.state(request.device)?;
        let outcome = self.allocate_unreported(state, request);
        if !state.has_untracked() {
            return outcome;
        }
        let allocated = outcome.as_ref().ok().copied();
        let unwinds = OnUnwind::new(|| allocated.into_iter().for_each(|allocation| self.abandon(state, allocation)));
        state.report();
        unwinds.disarm();
        outcome
    }

    fn allocate_unreported(&self, state: &UncachedDevice, request: Request) -> Result<Allocation> {
        let Request { device, stream, bytes, pool } = request;
        if !S::PRIVATE_POOLS && pool.is_some_and(|pool| !pool.is_default()) {
            return Err(self.no_private_pools());
        }
        if bytes == 0 {
            return Ok(Allocation::empty(device, stream));
        }
        if bytes >= TOO_LARGE {
            return Err(Error::RequestTooLarge { bytes });
        }
        self.deliver_pool_events(state, false);
        let slot = state.pools.reserve_slot(pool, || state.routed(stream))?;
        let details = state.timed_details(StackLevel::State);
        self.process_pending(state, &details);
        let status = if S::STREAM_ORDERED {
            CaptureStatus::of_unblocked(self.driver(), stream)?
        } else {
            CaptureStatus::of_existing(self.driver(), stream)?
        };
        let capturing = status.refuses_work();
        let (raw_stream, owner) = state.raw_stream(stream)?;
        // The driver's pools serve streams of any device.
        if owner != device && !S::STREAM_ORDERED {
            return Err(Error::StreamDevice { device, stream, owner });
        }
        let size = bytes.next_multiple_of(S::GRANULARITY);
        let out_of_memory = |why| Err(self.out_of_memory(state, &request, slot.pool(), why, capturing, &details));
        let Some(quota) = self.reserve_quota(state, bytes, capturing, &details)? else {
            return out_of_memory(OomCause::Limit);
        };
        let Some((ptr, status)) = self.fetch(state, size, raw_stream, status, &details)? else {
            drop(quota);
            return out_of_memory(S::OOM_CAUSE);
        };
        let entry = TableEntry {
            serial: 0,
            ptr,
            bytes: size,
            requested: bytes,
            stream,
            stream_raw: raw_stream.raw.0,
            pool: slot.pool(),
            holds: 0,
            uses: Vec::new(),
            capture: status.capture(),
            stack: None,
        };
        slot.fill();
        Ok(quota.end_with(|table| table.insert(entry, &details)))
    }

    /// Counts `bytes` against the limit. If that is exceeded: calls the pressure callbacks, then waits for freed
    /// blocks.
    fn reserve_quota<'a>(
        &self,
        state: &'a UncachedDevice,
        bytes: u64,
        capturing: bool,
        details: &EntryDetails,
    ) -> Result<Option<Quota<'a>>> {
        let limit = state.limit();
        let reserve = || {
            let reserved = state.with(|table| table.reserve_quota(bytes, limit));
            reserved.then(|| Quota { state, bytes })
        };
        if let Some(quota) = reserve() {
            return Ok(Some(quota));
        }
        if self.shared.observers.run_pressure_callbacks(state.id)
            && let Some(quota) = reserve()
        {
            return Ok(Some(quota));
        }
        if !capturing && state.has_pending() {
            self.wait_for_pending(state, details)?;
            return Ok(reserve());
        }
        Ok(None)
    }

    /// Memory from the source. If it has none: calls the pressure callbacks, waits for freed blocks, trims the source,
    /// and tries once more. `None` means out of memory. `status` is the stream's capture status before the call;
    /// returns its status at the allocation.
    fn fetch(
        &self,
        state: &UncachedDevice,
        bytes: u64,
        stream: RawStream,
        status: CaptureStatus,
        details: &EntryDetails,
    ) -> Result<Option<(DevicePtr, CaptureStatus)>> {
        let (device, capturing) = (state.id, status.refuses_work());
        let allocate = || {
            // In a capture a stream-ordered allocation is a node of the graph.
            let _frozen = self.freeze_captures()?;
            let asks_again = S::STREAM_ORDERED && (capturing || self.shared.has_captures());
            let status = if asks_again { CaptureStatus::of_unblocked(self.driver(), stream.id)? } else { status };
            Result::Ok(self.source.allocate(device, bytes, stream)?.map(|ptr| (ptr, status)))
        };
        if let Some(allocated) = allocate()? {
            return Ok(Some(allocated));
        }
        self.shared.observers.run_pressure_callbacks(device);
        if !capturing {
            self.wait_for_pending(state, details)?;
            self.source.trim(device, self.shared.has_captures())?;
            state.with(|table| table.stats.num_alloc_retries += 1);
        }
        let retried = allocate()?;
        if retried.is_none() && !capturing {
            self.source.undo_growth(device)?;
        }
        Ok(retried)
    }

    /// Counts a failure, calls the observers, and builds the error.
    fn out_of_memory(
        &self,
        state: &UncachedDevice,
        request: &Request,
        pool: MemPoolId,
        why: OomCause,
        capturing: bool,
        details: &EntryDetails,
    ) -> Error {
        let (device, bytes_segment) = (state.id, request.bytes.next_multiple_of(S::GRANULARITY));
        // A failure of these calls must not hide the out-of-memory error.
        let memory = state.memory_info();
        let reserved = self.source.reserved(device).unwrap_or_default();
        let stream_raw = state.raw_stream(request.stream).map_or(0, |(stream, _)| stream.raw.0);
        let stats = state.with(|table| {
            table.record_oom(memory.bytes_free, bytes_segment, stream_raw, pool, details);
            table.stats(reserved)
        });
        let limit = state.limit();
        let report = Shortage { request, why, bytes_segment, memory, limit, stats: &stats, capturing }.report();
        state.out_of_memory(report)
    }
}
