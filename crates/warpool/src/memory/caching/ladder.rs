//! What happens when nothing cached fits: rungs, tried in order, each only when the ones before gave nothing.
//!
//! 1. Callbacks under memory pressure, without any lock; if one freed something, the search again.
//! 2. Old segments go, where that is set up.
//! 3. A new segment.
//! 4. Free blocks of pools that are marked for need, for requests to the default pool.
//! 5. Oversize segments of the stream, just enough; a new segment again.
//! 6. Unless the stream captures: all events are waited for, everything cached goes back; a new segment for the last
//!    time.
//! 7. A report of all that.
//!
//! From the second rung on the device's `slow` lock is held: one thread at a time asks the driver for memory, and no
//! other thread's search waits for it.

use warpool_driver::{DeviceId, MemoryInfo};

use super::block::{BlockKey, Standing};
use super::segment::Fetched;
use super::state::{State, Want};
use super::{CachingAllocator, Cell};
use crate::memory::journal::Cause;
use crate::memory::{Action, Allocation, MemPoolId, OomCause, OomReport};
use crate::{Error, Result};

impl CachingAllocator {
    /// Meets a request for which nothing is cached.
    pub(super) fn climb(&self, cell: &Cell, want: &Want, capturing: bool, cause: &Cause) -> Result<Allocation> {
        let cause = &cause.clone().timed(self.driver());
        if self.observers.relieve(cell.device)
            && let Some(found) = self.search(cell, want, cause)
        {
            return Ok(found);
        }
        let slow = self.slow(cell);
        if slow.waited
            && let Some(found) = self.search(cell, want, cause)
        {
            // Whoever was here before us brought something that fits.
            return Ok(found);
        }
        let outcome = self.climb_alone(cell, want, capturing, cause);
        drop(slow);
        match outcome? {
            Ok(block) => Ok(block),
            Err(why) => Err(self.out_of_memory(cell, want, why, capturing, cause)),
        }
    }

    /// The rungs that ask the driver. The inner error is that there is no memory.
    fn climb_alone(
        &self,
        cell: &Cell,
        want: &Want,
        capturing: bool,
        cause: &Cause,
    ) -> Result<std::result::Result<Allocation, OomCause>> {
        let hand_out = |block: BlockKey| Ok(Ok(self.with(cell, |state| state.hand_out(block, want, cause))));
        if self.with(cell, |state| state.policy.collects_garbage()) {
            self.collect_garbage(cell, cause)?;
        }
        if self.with(cell, |state| state.rejects(want)) {
            return Ok(Err(OomCause::Rejected));
        }
        if let Fetched::Block(block) = self.fetch(cell, want, cause)? {
            return hand_out(block);
        }
        if want.pool.is_default()
            && let Some(found) = self.with(cell, |state| state.take_from_pools_for_oom(want, cause))
        {
            return Ok(Ok(found));
        }
        if self.return_oversize(cell, want, cause)?
            && let Fetched::Block(block) = self.fetch(cell, want, cause)?
        {
            return hand_out(block);
        }
        if capturing {
            return Ok(Err(self.with(cell, |state| state.why_not(want))));
        }
        self.wait_for_pending(cell, cause)?;
        self.return_all(cell, false, cause)?;
        self.with(cell, |state| state.stats.num_alloc_retries += 1);
        match self.fetch(cell, want, cause)? {
            Fetched::Block(block) => hand_out(block),
            Fetched::Nothing(why) => Ok(Err(why)),
        }
    }

    /// One search among what is cached.
    pub(super) fn search(&self, cell: &Cell, want: &Want, cause: &Cause) -> Option<Allocation> {
        self.with(cell, |state| state.take_cached(want, cause))
    }

    /// Counts a failure, tells the observers, and makes the error.
    fn out_of_memory(&self, cell: &Cell, want: &Want, why: OomCause, capturing: bool, cause: &Cause) -> Error {
        // That these fail too must not hide what went wrong.
        let nothing = MemoryInfo { bytes_free: 0, bytes_total: cell.bytes_total };
        let memory = self.driver().mem_info(cell.device).unwrap_or(nothing);
        let stream_raw = self.driver().stream_handle(want.stream).map_or(0, |handle| handle.raw.0);
        let mut report = self.with(cell, |state| {
            if why == OomCause::Rejected {
                state.stats.num_oom_rejections += 1;
            } else {
                state.stats.num_ooms += 1;
                state.record_at(Action::Oom, memory.bytes_free, want.size, stream_raw, want.pool, cause);
            }
            state.report(cell.device, want)
        });
        report.cause = why;
        report.capturing = capturing;
        (report.bytes_total, report.bytes_free) = (memory.bytes_total, memory.bytes_free);
        self.observers.out_of_memory(&report);
        Error::OutOfMemory(Box::new(report))
    }
}

impl State {
    /// Whether the policy refuses the request before anything is tried.
    fn rejects(&self, want: &Want) -> bool {
        self.policy.bytes_before_rejection.is_some_and(|most| self.reserved.saturating_add(want.segment) > most)
    }

    /// Why a segment could not be had, as far as is known without asking again.
    fn why_not(&self, want: &Want) -> OomCause {
        let over = |limit: u64| self.reserved.saturating_add(want.segment) > limit;
        if self.policy.limit.is_some_and(over) { OomCause::Limit } else { OomCause::Device }
    }

    /// A free block of a pool that is marked for need.
    fn take_from_pools_for_oom(&mut self, want: &Want, cause: &Cause) -> Option<Allocation> {
        self.pools_for_oom().into_iter().find_map(|pool: MemPoolId| {
            let want = self.want(pool, want.stream, want.requested).ok()?;
            self.take_cached(&want, cause)
        })
    }

    /// What there is, and where.
    fn report(&self, device: DeviceId, want: &Want) -> OomReport {
        let mut report = OomReport {
            device,
            cause: OomCause::Device,
            bytes_requested: want.requested,
            bytes_segment: want.segment,
            bytes_total: 0,
            bytes_free: 0,
            bytes_limit: self.policy.limit,
            bytes_reserved: self.reserved,
            bytes_allocated: self.stats.allocated_bytes.all.current,
            bytes_pending: self.stats.active_bytes.all.current - self.stats.allocated_bytes.all.current,
            bytes_private_free: 0,
            bytes_cached: 0,
            blocks_cached: 0,
            bytes_largest_cached: 0,
            expandable_segments: self.policy.expandable,
            capturing: false,
        };
        for block in self.blocks.values().filter(|block| block.standing == Standing::Free) {
            if self.bin_of(block.segment).pool.is_default() {
                report.bytes_cached += block.size;
                report.blocks_cached += 1;
                report.bytes_largest_cached = report.bytes_largest_cached.max(block.size);
            } else {
                report.bytes_private_free += block.size;
            }
        }
        report
    }
}
