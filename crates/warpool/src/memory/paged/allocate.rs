//! Allocating when the hot path does not do: by pool, from free blocks, then with further pages, and at last the report
//! that there is no memory.

use std::sync::atomic::Ordering;

use warpool_driver::{DevicePtr, MemoryInfo};

use super::device::{BlockRef, PagedDevice};
use super::fill::{self, FillRequest};
use super::free::Fences;
use super::heap::{self, Heap};
use super::ids::{BlockId, HeapId};
use super::pending::PendingFrees;
use super::{PagedAllocator, reclaim, segments, shortage};
use crate::defect::Defect;
use crate::memory::report::EntryDetails;
use crate::memory::{Action, Allocation, MemPoolId, OomCause, OomReport, Request, SizeRules, StackLevel};
use crate::unwind::OnUnwind;
use crate::{Error, Result, lock};

impl PagedDevice {
    /// Allocates from free blocks of the heap of a stream and pool.
    #[inline]
    fn search(
        &self,
        request: &Request,
        pool: MemPoolId,
        details: &EntryDetails,
    ) -> Result<(HeapId, Option<Allocation>)> {
        let no_split = !pool.is_default() && lock(&self.pools).is_no_split(pool);
        loop {
            let (number, cell) = self.heap_for(request.stream, pool)?;
            let mut heap = cell.lock();
            if heap.is_of(request.stream, pool) {
                let block = heap.allocate_as(request.bytes, no_split);
                let allocation = block.map(|block| self.finish(&mut heap, number, block, details));
                return Ok((number, allocation));
            }
            // It was retired, and may be used again.
            drop(heap);
            self.forget_last_heap();
        }
    }

    /// The same from a private pool.
    #[cold]
    fn search_private(
        &self,
        request: &Request,
        pool: MemPoolId,
        capturing: bool,
        details: &EntryDetails,
    ) -> Result<(HeapId, Option<Allocation>)> {
        {
            let mut pools = lock(&self.pools);
            pools.expect_serving(pool)?;
            if capturing {
                pools.record_capture(pool);
            }
        }
        let (number, found) = self.search(request, pool, details)?;
        if let Some(allocation) = &found
            && let Err(error) = lock(&self.pools).expect_serving(pool)
        {
            // Released by another thread meanwhile: no work may use the pool's memory from then on.
            self.free_allocation(allocation, Fences::Later);
            return Err(error);
        }
        Ok((number, found))
    }

    /// A free block of a pool with segments that serves the default pool before it runs out of memory.
    fn search_for_oom(&self, request: &Request, details: &EntryDetails) -> Option<Allocation> {
        let pools = lock(&self.pools).segments_for_oom();
        pools.into_iter().find_map(|(pool, no_split)| {
            let number = self.existing_heap(request.stream, pool)?;
            self.using(number);
            let mut heap = self.heaps.get(number).lock();
            if !heap.is_of(request.stream, pool) {
                return None;
            }
            heap.allocate_as(request.bytes, no_split).map(|block| {
                heap.set_lent(block);
                self.finish(&mut heap, number, block, details)
            })
        })
    }

    /// The allocation of a block, with its entry in the history.
    #[inline]
    pub(super) fn finish(&self, heap: &mut Heap, number: HeapId, block: BlockId, details: &EntryDetails) -> Allocation {
        let allocation = heap.allocation(block, self.id, BlockRef { heap: number, block }.pack());
        if !details.is_off() {
            heap.set_stack(block, details.stack.clone());
            self.record(Action::Alloc, allocation.ptr.0, allocation.bytes_requested, heap, details);
        }
        self.report_allocated(&allocation);
        allocation
    }

    /// Allocates when no free block fits.
    #[cold]
    fn allocate_slow(
        &self,
        request: &Request,
        pool: MemPoolId,
        number: HeapId,
        capturing: bool,
        details: &EntryDetails,
    ) -> Result<Allocation> {
        if self.observers().run_pressure_callbacks(self.id)
            && let (_, Some(found)) = self.search(request, pool, details)?
        {
            return Ok(found);
        }
        let fill = FillRequest {
            heap: number,
            requested: request.bytes,
            stream: request.stream,
            pool,
            capturing,
            on_oom: false,
        };
        let has_segments = !pool.is_default() && lock(&self.pools).has_segments(pool);
        let finish = |block: BlockId| self.finish(&mut self.heaps.get(number).lock(), number, block, details);
        let allocate = |on_oom: bool| {
            // A callback, or the completion of pending frees, may have used other heaps.
            self.using(number);
            if has_segments {
                let allocated = segments::allocate(self, request, pool, number, details);
                // The upstream may also have used other heaps.
                self.using(number);
                allocated
            } else {
                let filled = fill::allocate(self, FillRequest { on_oom, ..fill }, details);
                filled.map(|filled| filled.map(finish))
            }
        };
        let outcome = match allocate(false)? {
            Ok(allocation) => return Ok(allocation),
            Err(why) => {
                // While others have idle pages, the streams of this process are not waited for.
                if let Some(allocation) = self.wait_for_others((why, request.bytes), false, || allocate(false))? {
                    return Ok(allocation);
                }
                if pool.is_default()
                    && let Some(found) = self.search_for_oom(request, details)
                {
                    return Ok(found);
                }
                Err(why)
            }
        };
        let outcome = if capturing && has_segments {
            outcome
        } else {
            if !capturing {
                reclaim::wait_for_unknown_users(self)?;
                if !Defect::ShortageDoesNotWait.is_on() {
                    PendingFrees::new(self, details).wait()?;
                }
                self.counts.retries.fetch_add(1, Ordering::Relaxed);
                if has_segments {
                    // The source may have the memory of what is free elsewhere.
                    reclaim::release_all(self, MemPoolId::DEFAULT, 0, details)?;
                    if let (_, Some(found)) = self.search(request, pool, details)? {
                        return Ok(found);
                    }
                } else {
                    segments::release(self, MemPoolId::DEFAULT, 0, details)?;
                }
            }
            let mut outcome = allocate(true)?;
            if outcome.is_err() && !capturing && self.release_tagged(details)? > 0 {
                outcome = allocate(true)?;
            }
            match outcome {
                Ok(allocation) => Ok(allocation),
                Err(why) => self.wait_for_others((why, request.bytes), true, || allocate(false))?.ok_or(why),
            }
        };
        self.drop_removed();
        outcome.map_err(|cause| self.out_of_memory(request, number, cause, capturing, details))
    }

    /// Counts a failed request, calls the observers, and makes the error.
    fn out_of_memory(
        &self,
        request: &Request,
        number: HeapId,
        why: OomCause,
        capturing: bool,
        details: &EntryDetails,
    ) -> Error {
        let report = self.shortage(request, number, why, capturing, details);
        self.observers().report_oom(&report);
        Error::OutOfMemory(Box::new(report))
    }

    /// Counts a failed request, and makes the report.
    pub(super) fn shortage(
        &self,
        request: &Request,
        number: HeapId,
        why: OomCause,
        capturing: bool,
        details: &EntryDetails,
    ) -> OomReport {
        // A failure of this call must not hide the error.
        let unknown = MemoryInfo { bytes_free: 0, bytes_total: self.bytes_total };
        let memory = self.driver().mem_info(self.id).unwrap_or(unknown);
        self.counts.ooms.fetch_add(1, Ordering::Relaxed);
        let bytes_segment = heap::rounded(request.bytes);
        {
            let heap = self.heaps.get(number).lock();
            self.record(Action::Oom, memory.bytes_free, bytes_segment, &heap, details);
        }
        shortage::report(self, request, (why, bytes_segment), memory, &self.stats(), capturing)
    }
}

impl PagedAllocator {
    /// Allocates in every other case.
    #[inline(never)]
    pub(super) fn allocate_checked(&self, request: Request) -> Result<Allocation> {
        let device = self.device(request.device)?;
        let Request { stream, bytes, .. } = request;
        if bytes == 0 {
            let ptr = DevicePtr(0);
            let device = request.device;
            return Ok(Allocation { ptr, bytes: 0, bytes_requested: 0, device, stream, slot: 0, generation: 0 });
        }
        if bytes >= SizeRules::REQUEST_TOO_LARGE {
            return Err(Error::RequestTooLarge { bytes });
        }
        let details = device.entry_details(StackLevel::State);
        let capturing = device.capture_status(stream)?.is_capturing();
        if device.has_pending() && !capturing {
            PendingFrees::new(device, &details).process()?;
        }
        let mut pool = match request.pool {
            Some(pool) => pool,
            None => device.routed(stream)?,
        };
        let allocation = loop {
            let searched = if pool.is_default() {
                device.search(&request, pool, &details)
            } else {
                device.search_private(&request, pool, capturing, &details)
            };
            let outcome = match searched {
                Ok((_, Some(allocation))) => Ok(allocation),
                Ok((number, None)) => device.allocate_slow(&request, pool, number, capturing, &details),
                Err(error) => Err(error),
            };
            match outcome {
                // The heap was retired before it got pages: the stream gets another.
                Err(Error::PoolReleased { .. }) if pool.is_default() => {}
                Err(error @ (Error::PoolReleased { .. } | Error::UnknownPool { .. })) => {
                    // Another thread may have closed the scope since the request was routed: route it again.
                    let routed = if request.pool.is_none() { device.routed(stream)? } else { pool };
                    if routed == pool {
                        return Err(error);
                    }
                    pool = routed;
                }
                Ok(allocation) => break allocation,
                Err(error) => {
                    // Pages may have been taken before it failed.
                    device.report();
                    return Err(error);
                }
            }
        };
        if !details.is_off() {
            let unwinds = OnUnwind::new(|| {
                device.free_allocation(&allocation, Fences::Later);
            });
            device.report();
            unwinds.disarm();
        }
        Ok(allocation)
    }
}
