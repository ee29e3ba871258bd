//! How a request is served, and what happens when the source has no memory.
//!
//! The source may panic: guards release what a request in flight has reserved (quota, a slot in a pool).

use std::mem::ManuallyDrop;

use warpool_driver::{DevicePtr, MemoryInfo};

use super::source::Source;
use super::table::{AllocationTable, TableEntry};
use super::{DeviceState, UncachedAllocator};
use crate::capture::CaptureStatus;
use crate::memory::report::EntryDetails;
use crate::memory::shortage::Shortage;
use crate::memory::{Allocation, MemPoolId, OomCause, RawStream, Request, StackLevel};
use crate::unwind::OnUnwind;
use crate::{Error, Result};

/// Requests of this size (an exbibyte) or more are refused.
const TOO_LARGE: u64 = 1 << 60;

/// Bytes that count against the limit while a request is in flight.
struct Quota<'a, S: Source> {
    allocator: &'a UncachedAllocator<S>,
    state: &'a DeviceState,
    bytes: u64,
}

impl<S: Source> Quota<'_, S> {
    /// Releases the quota in the same step in which the block is added.
    fn end_with<R>(self, step: impl FnOnce(&mut AllocationTable) -> R) -> R {
        let Self { allocator, state, bytes } = *ManuallyDrop::new(self);
        allocator.with(state, |table| {
            table.release_quota(bytes);
            step(table)
        })
    }
}

impl<S: Source> Drop for Quota<'_, S> {
    fn drop(&mut self) {
        self.allocator.with(self.state, |table| table.release_quota(self.bytes));
    }
}

impl<S: Source> UncachedAllocator<S> {
    pub(super) fn allocate(&self, request: Request) -> Result<Allocation> {
        let state = self.state(request.device)?;
        let outcome = self.allocate_unreported(state, request);
        if !state.ledger.has_untracked() {
            return outcome;
        }
        let allocated = outcome.as_ref().ok().copied();
        let unwinds = OnUnwind::new(|| allocated.into_iter().for_each(|allocation| self.abandon(state, allocation)));
        self.report(state);
        unwinds.disarm();
        outcome
    }

    fn allocate_unreported(&self, state: &DeviceState, request: Request) -> Result<Allocation> {
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
        let slot = state.pools.reserve_slot(pool, stream, self.driver())?;
        let details = self.entry_details(state, StackLevel::State);
        self.process_pending(state, &details);
        let status = if S::STREAM_ORDERED {
            CaptureStatus::of_unblocked(self.driver(), stream)?
        } else {
            CaptureStatus::of_existing(self.driver(), stream)?
        };
        let capturing = status.refuses_work();
        let (raw_stream, owner) = state.ledger.raw_stream(stream, self.driver())?;
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
        &'a self,
        state: &'a DeviceState,
        bytes: u64,
        capturing: bool,
        details: &EntryDetails,
    ) -> Result<Option<Quota<'a, S>>> {
        let limit = state.ledger.limit(self.settings.memory_cap_bytes);
        let reserve = || {
            let reserved = self.with(state, |table| table.reserve_quota(bytes, limit));
            reserved.then(|| Quota { allocator: self, state, bytes })
        };
        if let Some(quota) = reserve() {
            return Ok(Some(quota));
        }
        if self.observers.run_pressure_callbacks(state.ledger.device())
            && let Some(quota) = reserve()
        {
            return Ok(Some(quota));
        }
        if !capturing && state.ledger.has_pending() {
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
        state: &DeviceState,
        bytes: u64,
        stream: RawStream,
        status: CaptureStatus,
        details: &EntryDetails,
    ) -> Result<Option<(DevicePtr, CaptureStatus)>> {
        let (device, capturing) = (state.ledger.device(), status.refuses_work());
        let allocate = || {
            // In a capture a stream-ordered allocation is a node of the graph.
            let _frozen = self.freeze_captures()?;
            let asks_again = S::STREAM_ORDERED && (capturing || self.has_captures());
            let status = if asks_again { CaptureStatus::of_unblocked(self.driver(), stream.id)? } else { status };
            Result::Ok(self.source.allocate(device, bytes, stream)?.map(|ptr| (ptr, status)))
        };
        if let Some(allocated) = allocate()? {
            return Ok(Some(allocated));
        }
        self.observers.run_pressure_callbacks(device);
        if !capturing {
            self.wait_for_pending(state, details)?;
            self.source.trim(device, self.has_captures())?;
            self.with(state, AllocationTable::count_retry);
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
        state: &DeviceState,
        request: &Request,
        pool: MemPoolId,
        why: OomCause,
        capturing: bool,
        details: &EntryDetails,
    ) -> Error {
        let (device, bytes_segment) = (state.ledger.device(), request.bytes.next_multiple_of(S::GRANULARITY));
        // A failure of these calls must not hide the out-of-memory error.
        let unknown = MemoryInfo { bytes_free: 0, bytes_total: state.ledger.bytes_total() };
        let memory = self.driver().mem_info(device).unwrap_or(unknown);
        let reserved = self.source.reserved(device).unwrap_or_default();
        let stream_raw = state.ledger.raw_stream(request.stream, self.driver()).map_or(0, |(stream, _)| stream.raw.0);
        let stats = self.with(state, |table| {
            table.record_oom(memory.bytes_free, bytes_segment, stream_raw, pool, details);
            table.stats(reserved)
        });
        let limit = state.ledger.limit(self.settings.memory_cap_bytes);
        let report = Shortage { request, why, bytes_segment, memory, limit, stats: &stats, capturing }.report();
        self.observers.report_oom(&report);
        Error::OutOfMemory(Box::new(report))
    }
}
