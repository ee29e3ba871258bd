//! The calls of [`DeviceAllocator`], as a caller sees them.

use std::sync::atomic::Ordering;

use warpool_driver::{DeviceId, DevicePtr, StreamId};

use super::block::{BlockKey, Standing};
use super::state::{State, Want};
use super::{CachingAllocator, Cell};
use crate::memory::journal::Cause;
use crate::memory::stream_fence;
use crate::memory::{
    Allocation, DeviceAllocator, HistoryOptions, MemPoolId, Observers, PoolKeeper, Request, SizeRules, Snapshot,
    SnapshotOptions, StackLevel, Stat, Stats,
};
use crate::{Error, Instance, Result, lock};

impl CachingAllocator {
    /// Takes a block back, if its caller has it. It is free then, or needs marks in streams that used it.
    fn take_back(&self, cell: &Cell, which: Which<'_>, cause: &Cause) -> Option<TakenBack> {
        if self.tracks_suballocations {
            // Before anybody else can get it. The memory of a private pool may be a graph's, whose replays go on using
            // what its capture gave back.
            let (range, of_pool) = self.with(cell, |state| {
                let block = which.block(state)?;
                Some((state.allocation(block), state.bin_of(state.blocks[block].segment).pool))
            })?;
            if of_pool.is_default() {
                self.driver().suballocation_freed(range.ptr, range.bytes);
            }
        }
        self.with(cell, |state| {
            let block = which.block(state)?;
            state.live.remove(&which.ptr().0);
            state.begin_free(block, cause);
            if state.blocks[block].has_uses() {
                return Some(TakenBack::InUse(block));
            }
            state.complete_free(block, cause);
            Some(TakenBack::Free)
        })
    }

    /// Frees what starts at `ptr`, if it is this device's.
    fn free_here(&self, cell: &Cell, ptr: DevicePtr) -> bool {
        let cause = self.cause(cell, StackLevel::All);
        let taken = self.take_back(cell, Which::At(ptr), &cause);
        taken.map(|taken| self.see_to(cell, taken, &cause)).is_some()
    }

    /// Sees to the streams that may still use a block that was taken back. The caller is rid of it whatever happens:
    /// what fails is tried again by the next call, which also reports what stays wrong.
    fn see_to(&self, cell: &Cell, taken: TakenBack, cause: &Cause) {
        if let TakenBack::InUse(block) = taken
            && let Err(error) = self.finish_free(cell, block, cause)
        {
            tracing::warn!(%error, "a freed block could not be marked in the streams that used it; trying again later");
        }
    }

    /// Hands out what was found.
    pub(super) fn handed_out(&self, allocation: Allocation) -> Allocation {
        if self.tracks_suballocations {
            self.driver().suballocated(allocation.ptr, allocation.bytes, allocation.stream);
        }
        allocation
    }
}

/// Which block a caller means.
#[derive(Clone, Copy)]
enum Which<'a> {
    /// What starts there.
    At(DevicePtr),
    /// What it was given, and nothing that stands in the same place since.
    Owned(&'a Allocation),
}

impl Which<'_> {
    fn ptr(self) -> DevicePtr {
        match self {
            Self::At(ptr) => ptr,
            Self::Owned(allocation) => allocation.ptr,
        }
    }

    /// The block, if its caller still has it.
    fn block(self, state: &State) -> Option<BlockKey> {
        match self {
            Self::At(ptr) => state.live_at(ptr),
            Self::Owned(allocation) => state.live_block(allocation),
        }
    }
}

/// A block whose caller gave it back.
enum TakenBack {
    Free,
    /// Streams may still use it.
    InUse(BlockKey),
}

/// What the first look at a request gives.
enum First {
    Found(Allocation),
    /// Nothing cached fits. The pool is being visited.
    Missed(Want),
    /// Frees are pending that have to be processed first.
    Pending,
    Refused(Error),
}

impl DeviceAllocator for CachingAllocator {
    fn name(&self) -> &'static str {
        "caching"
    }

    fn instance(&self) -> &Instance {
        &self.instance
    }

    fn allocate_raw(&self, request: Request) -> Result<Allocation> {
        let Request { device, stream, bytes, pool } = request;
        let cell = self.cell(device)?;
        if bytes == 0 {
            return Ok(Allocation { ptr: DevicePtr(0), bytes: 0, bytes_requested: 0, device, stream, slot: 0 });
        }
        if bytes >= SizeRules::REQUEST_TOO_LARGE {
            return Err(Error::RequestTooLarge { bytes });
        }
        if !self.caching.load(Ordering::Acquire) {
            return self.allocate_uncached(request);
        }
        let mut pool = match pool {
            Some(pool) => pool,
            None => self.routed(cell, stream)?,
        };
        let cause = self.cause(cell, StackLevel::State);
        let capturing = self.is_capturing(cell, stream)?;
        if capturing {
            self.reuse_in_capture(cell, stream, &cause)?;
        }
        let mut process = !capturing;
        loop {
            let first = self.with(cell, |state| {
                if process && state.has_pending() {
                    return First::Pending;
                }
                match state.bins_for_use(pool) {
                    Ok(bins) => {
                        if capturing {
                            state.note_capture(pool);
                        }
                        let want = state.want_of(bins, pool, stream, bytes);
                        if let Some(found) = state.take_cached(&want, &cause) {
                            return First::Found(found);
                        }
                        state.visit(pool).map_or_else(First::Refused, |_| First::Missed(want))
                    }
                    Err(error) => First::Refused(error),
                }
            });
            match first {
                First::Found(allocation) => return Ok(self.handed_out(allocation)),
                First::Missed(want) => {
                    let outcome = self.climb(cell, &want, capturing, &cause);
                    drop(self.with(cell, |state| state.leave(pool)));
                    return Ok(self.handed_out(outcome?));
                }
                First::Pending => self.process_pending(cell, &cause)?,
                First::Refused(error) => {
                    // The scope that led here may have been closed by another thread since: it is as if we came later.
                    let now = if request.pool.is_none() { self.routed(cell, stream)? } else { pool };
                    if now == pool {
                        return Err(error);
                    }
                    pool = now;
                }
            }
            process = false;
        }
    }

    fn free_raw(&self, ptr: DevicePtr) -> Result<()> {
        if ptr.is_null() {
            return Ok(());
        }
        // Of several devices, the one that has it is found first: what is gathered for the history is gathered once.
        let found = match &*self.cells {
            [only] => Some(only),
            cells => cells.iter().find(|cell| lock(&cell.state).live_at(ptr).is_some()),
        };
        if found.is_some_and(|cell| self.free_here(cell, ptr)) || self.free_uncached(ptr)? {
            return Ok(());
        }
        Err(Error::UnknownPointer { ptr })
    }

    fn free_on(&self, device: DeviceId, ptr: DevicePtr) -> Result<()> {
        if !ptr.is_null() && self.free_here(self.cell(device)?, ptr) {
            return Ok(());
        }
        self.free_raw(ptr)
    }

    fn record_use_raw(&self, ptr: DevicePtr, stream: StreamId) -> Result<()> {
        if ptr.is_null() || self.is_uncached(ptr) {
            return Ok(());
        }
        let (cell, block) = self.locate(ptr)?;
        let in_capture = self.is_capturing(cell, stream)?;
        self.with(cell, |state| {
            // Another thread may have freed it since.
            let taken = state.blocks.get(block).filter(|entry| entry.standing == Standing::Taken && entry.ptr == ptr.0);
            let Some(entry) = taken else { return };
            if state.place_of(entry.segment).1 == stream {
                return;
            }
            let extra = state.blocks[block].extra();
            if !in_capture {
                extra.uses.add(stream);
            } else if !extra.uses_in_capture.contains(&stream) {
                extra.uses_in_capture.push(stream);
            }
        });
        Ok(())
    }

    fn find(&self, ptr: DevicePtr) -> Result<Allocation> {
        let found = self.cells.iter().find_map(|cell| {
            let state = lock(&cell.state);
            state.live_at(ptr).map(|block| state.allocation(block))
        });
        found.ok_or(Error::UnknownPointer { ptr })
    }

    fn free(&self, allocation: Allocation) -> Result<()> {
        let cell = self.cell(allocation.device)?;
        if allocation.slot == 0 {
            return self.free_raw(allocation.ptr);
        }
        let cause = self.cause(cell, StackLevel::All);
        let taken = self.take_back(cell, Which::Owned(&allocation), &cause);
        self.see_to(cell, taken.ok_or(Error::UnknownPointer { ptr: allocation.ptr })?, &cause);
        Ok(())
    }

    fn free_later(&self, allocation: Allocation) {
        let Ok(cell) = self.cell(allocation.device) else { return };
        if allocation.slot == 0 {
            self.free_uncached_later(allocation.ptr);
            return;
        }
        let cause = self.cause(cell, StackLevel::All);
        if let Some(TakenBack::InUse(block)) = self.take_back(cell, Which::Owned(&allocation), &cause) {
            stream_fence::fence_later(&self.pending_frees(cell, &cause), block);
        }
    }

    fn trim(&self, device: DeviceId, pool: MemPoolId) -> Result<u64> {
        let cell = self.cell(device)?;
        if pool.is_default() {
            self.observers.before_trim(device);
        }
        let cause = self.cause(cell, StackLevel::All).timed(self.driver());
        self.free_uncached_leftovers()?;
        let _slow = self.slow(cell);
        self.release_orphans(cell);
        if pool.is_default() {
            let current = self.instance.device(device.0)?.current_stream_id()?;
            let capturing = self.is_capturing(cell, current)?;
            if !capturing {
                self.wait_for_pending(cell, &cause)?;
            }
            return self.return_all(cell, capturing, &cause);
        }
        let freeable = self.with(cell, |state| Ok(state.pool(pool)?.uses == 0));
        match freeable {
            Ok(true) => {
                self.wait_for_pending(cell, &cause)?;
                self.return_pool(cell, pool, &cause)
            }
            // In use, or gone already with all that it had.
            Ok(false) | Err(Error::UnknownPool { .. }) => Ok(0),
            Err(error) => Err(error),
        }
    }

    fn largest_available(&self, device: DeviceId) -> Result<u64> {
        let cell = self.cell(device)?;
        let free = self.driver().mem_info(device)?.bytes_free;
        let cached = self.with(cell, |state| state.lanes.values().map(|lane| lane.free.largest()).max().unwrap_or(0));
        Ok(free.max(cached))
    }

    fn set_memory_fraction(&self, device: DeviceId, fraction: f64) -> Result<()> {
        if !(0.0..=1.0).contains(&fraction) {
            return Err(Error::Fraction { fraction: fraction.to_string() });
        }
        self.change_limits(self.cell(device)?, |limits| limits.fraction = fraction);
        Ok(())
    }

    fn memory_fraction(&self, device: DeviceId) -> Result<f64> {
        Ok(lock(&self.cell(device)?.limits).fraction)
    }

    fn stats(&self, device: DeviceId) -> Result<Stats> {
        let mut stats = self.with(self.cell(device)?, |state| state.stats.clone());
        stats.workspace_bytes = self.observers.workspaces.read(device);
        Ok(stats)
    }

    fn reset_peak_stats(&self, device: DeviceId) -> Result<()> {
        self.with(self.cell(device)?, |state| state.stats.reset_peak());
        self.observers.workspaces.change(device, Stat::reset_peak);
        Ok(())
    }

    fn reset_accumulated_stats(&self, device: DeviceId) -> Result<()> {
        self.with(self.cell(device)?, |state| state.stats.reset_accumulated());
        self.observers.workspaces.change(device, Stat::reset_accumulated);
        Ok(())
    }

    fn snapshot(&self, options: SnapshotOptions) -> Result<Snapshot> {
        Ok(self.take_snapshot(options))
    }

    fn record_history(&self, options: Option<HistoryOptions>) -> Result<()> {
        for cell in &self.cells {
            self.with(cell, |state| state.journal.history.set(options.clone()));
            cell.recording.set(options.as_ref());
        }
        Ok(())
    }

    fn observers(&self) -> &Observers {
        &self.observers
    }

    fn pools(&self) -> Result<&dyn PoolKeeper> {
        Ok(self)
    }
}
