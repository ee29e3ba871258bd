//! The calls of [`DeviceAllocator`].

use std::sync::atomic::Ordering;

use warpool_driver::{DeviceId, DevicePtr, MemoryInfo, StreamId};

use super::biased_lock::{BiasedGuard, BiasedLock};
use super::device::{BlockRef, PagedDevice};
use super::fill::{self, FillRequest};
use super::heap::{self, Freed, FreedAgain, Heap};
use super::last_heap::last_device;
use super::pending::PendingFrees;
use super::{PagedAllocator, inactive, reclaim, segments, shortage, snapshot};
use crate::memory::report::{EntryDetails, StackIds, now_us};
use crate::memory::stream_fence;
use crate::memory::{
    Action, Allocation, DeviceAllocator, GraphKey, HistoryOptions, MemPoolId, Observers, OomCause, PrivatePools,
    Request, SegmentKind, SizeRules, Snapshot, SnapshotOptions, StackLevel, Stat, Stats,
};
use crate::unwind::OnUnwind;
use crate::{Error, Instance, Result, lock};

/// Frees a block of a heap whose lock is not biased to the thread, if it can be freed without a closer look.
#[inline(never)]
fn free_without_bias(cell: &BiasedLock<Heap>, kind: SegmentKind, range: u32, ptr: DevicePtr) -> bool {
    cell.lock().free_plain(kind, range, ptr.0).is_some()
}

/// Frees a block that can be freed without a closer look, when others have to be merged first.
#[inline(never)]
fn free_crowded(mut heap: BiasedGuard<'_, Heap>, block: u32) {
    let freed = heap.free_plain_block(block);
    debug_assert!(freed.is_some(), "block {block} was just seen to be plain");
}

/// What became of a block that was to be freed.
enum Outcome {
    Completed,
    Pending,
    /// A graph holds it: it is not freed.
    Held,
    /// There is no such block.
    Unknown,
}

impl PagedDevice {
    /// Frees a block that only its own stream used, in the heap that the thread used last. `false` if it has to be
    /// looked at more closely, or is not of this device.
    #[inline(always)]
    fn free_plain(&self, ptr: DevicePtr) -> bool {
        if !self.is_unobserved() {
            return self.free_recorded(ptr);
        }
        let Some((cell, kind, range)) = self.last_heap_at(ptr) else { return false };
        let Some(mut heap) = cell.lock_by_bias() else { return free_without_bias(cell, kind, range, ptr) };
        match heap.free_again(kind, range, ptr.0) {
            FreedAgain::Kept => true,
            FreedAgain::Crowded(block) => {
                free_crowded(heap, block);
                true
            }
            FreedAgain::Refused => false,
        }
    }

    /// The same while a history is recorded, if its entries say no more than what happened and when.
    #[inline(never)]
    fn free_recorded(&self, ptr: DevicePtr) -> bool {
        if !self.only_records() {
            return false;
        }
        let Some((cell, kind, range)) = self.last_heap_at(ptr) else { return false };
        let time_us = now_us(self.driver());
        let mut heap = cell.lock();
        let Some(requested) = heap.free_plain(kind, range, ptr.0) else { return false };
        self.record_plain_free(ptr.0, requested, &heap, time_us);
        true
    }

    /// Allocates from the heap that the thread used last while a history is recorded, if its entries say no more than
    /// what happened and when.
    #[inline(always)]
    fn allocate_recorded(&self, request: &Request) -> Option<Allocation> {
        if !self.only_records() {
            return None;
        }
        let (number, cell) = self.heap_of_plain(request)?;
        let time_us = now_us(self.driver());
        let mut heap = cell.lock();
        let block = heap.allocate(request.bytes)?;
        let allocation = heap.allocation(block, self.id, BlockRef { heap: number, block }.pack());
        self.record_plain_allocation(allocation.ptr.0, request.bytes, &heap, time_us);
        Some(allocation)
    }

    /// Allocates from free blocks of the heap.
    #[inline]
    fn search(&self, request: &Request, pool: MemPoolId, details: &EntryDetails) -> Result<(u32, Option<Allocation>)> {
        loop {
            let (number, cell) = self.heap_for(request.stream, pool)?;
            let mut heap = cell.lock();
            if !heap.is_of(request.stream, pool) {
                // Its pool was removed, and the heap used again.
                drop(heap);
                self.forget_last_heap();
                continue;
            }
            let block = heap.allocate(request.bytes);
            let allocation = block.map(|block| self.finish(&mut heap, number, block, details));
            return Ok((number, allocation));
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
    ) -> Result<(u32, Option<Allocation>)> {
        let no_split = {
            let mut pools = lock(&self.pools);
            pools.expect_serving(pool)?;
            if capturing {
                pools.record_capture(pool);
            }
            pools.is_no_split(pool)
        };
        let (number, found) =
            if no_split { self.search_whole(request, pool, details) } else { self.search(request, pool, details) }?;
        if let Some(allocation) = &found
            && let Err(error) = lock(&self.pools).expect_serving(pool)
        {
            // Released by another thread meanwhile: no work may use the pool's memory from then on.
            self.free_allocation(allocation, Fences::Later);
            return Err(error);
        }
        Ok((number, found))
    }

    /// Allocates a whole free segment of a pool whose segments are not split.
    fn search_whole(
        &self,
        request: &Request,
        pool: MemPoolId,
        details: &EntryDetails,
    ) -> Result<(u32, Option<Allocation>)> {
        let (number, cell) = self.heap_for(request.stream, pool)?;
        let mut heap = cell.lock();
        let kind = heap::kind_of(heap::rounded(request.bytes));
        let is_own = heap.is_of(request.stream, pool);
        let block = if is_own { heap.allocate_whole(kind, request.bytes) } else { None };
        Ok((number, block.map(|block| self.finish(&mut heap, number, block, details))))
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
            let kind = heap::kind_of(heap::rounded(request.bytes));
            let block = if no_split { heap.allocate_whole(kind, request.bytes) } else { heap.allocate(request.bytes) };
            block.map(|block| self.finish(&mut heap, number, block, details))
        })
    }

    /// The allocation of a block, with its entry in the history.
    #[inline]
    fn finish(&self, heap: &mut Heap, number: u32, block: u32, details: &EntryDetails) -> Allocation {
        let allocation = heap.allocation(block, self.id, BlockRef { heap: number, block }.pack());
        if !details.is_off() {
            heap.set_stack(block, details.stack.clone());
            self.record(Action::Alloc, allocation.ptr.0, allocation.bytes_requested, heap, details);
        }
        allocation
    }

    /// Allocates when no free block fits.
    #[cold]
    fn allocate_slow(
        &self,
        request: &Request,
        pool: MemPoolId,
        number: u32,
        capturing: bool,
        details: &EntryDetails,
    ) -> Result<Allocation> {
        if self.observers().run_pressure_callbacks(self.id)
            && let (_, Some(found)) = self.search_again(request, pool, details)?
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
        let allocate = |on_oom: bool| {
            // A callback, or the completion of pending frees, may have used other heaps.
            self.using(number);
            if has_segments {
                let allocated = segments::allocate(self, request, pool, number, details);
                // So may the source.
                self.using(number);
                allocated
            } else {
                fill::allocate(self, FillRequest { on_oom, ..fill }, details)
            }
        };
        let finish = |block: u32| self.finish(&mut self.heaps.get(number).lock(), number, block, details);
        let outcome = match allocate(false)? {
            Ok(block) => return Ok(finish(block)),
            Err(why) => {
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
                PendingFrees::new(self, details).wait()?;
                self.counts.retries.fetch_add(1, Ordering::Relaxed);
                if has_segments {
                    // The source may have the memory of what is free elsewhere.
                    reclaim::release_all(self, MemPoolId::DEFAULT, 0, details)?;
                    if let (_, Some(found)) = self.search_again(request, pool, details)? {
                        return Ok(found);
                    }
                } else {
                    segments::release(self, MemPoolId::DEFAULT, 0, details)?;
                }
            }
            let outcome = allocate(true)?;
            if outcome.is_err() && !capturing && !has_segments && reclaim::has_large_pages(self) {
                // Free pages that are larger than what the request lacks make room for smaller ones.
                reclaim::release_all(self, MemPoolId::DEFAULT, 0, details)?;
                allocate(true)?
            } else {
                outcome
            }
        };
        self.drop_removed();
        outcome.map(finish).map_err(|cause| self.out_of_memory(request, number, cause, capturing, details))
    }

    /// The search of a request that was routed already.
    fn search_again(
        &self,
        request: &Request,
        pool: MemPoolId,
        details: &EntryDetails,
    ) -> Result<(u32, Option<Allocation>)> {
        let no_split = !pool.is_default() && lock(&self.pools).is_no_split(pool);
        if no_split { self.search_whole(request, pool, details) } else { self.search(request, pool, details) }
    }

    /// Counts a failed request, calls the observers, and makes the error.
    fn out_of_memory(
        &self,
        request: &Request,
        number: u32,
        why: OomCause,
        capturing: bool,
        details: &EntryDetails,
    ) -> Error {
        // A failure of this call must not hide the error.
        let unknown = MemoryInfo { bytes_free: 0, bytes_total: self.bytes_total };
        let memory = self.driver().mem_info(self.id).unwrap_or(unknown);
        self.counts.ooms.fetch_add(1, Ordering::Relaxed);
        let bytes_segment = heap::rounded(request.bytes);
        {
            let heap = self.heaps.get(number).lock();
            self.record(Action::Oom, memory.bytes_free, bytes_segment, &heap, details);
        }
        let report = shortage::report(self, request, (why, bytes_segment), memory, &self.stats(), capturing);
        self.observers().report_oom(&report);
        Error::OutOfMemory(Box::new(report))
    }

    /// Frees the block that `find` finds in a heap.
    #[inline]
    fn free(&self, number: u32, find: impl Fn(&Heap) -> Option<u32>, fences: Fences) -> Outcome {
        self.using(number);
        let cell = self.heaps.get(number);
        if self.shared().tracks_suballocations && !self.report_freed(number, &find) {
            return Outcome::Unknown;
        }
        let details = {
            // A hook that collects stacks may panic: the block is freed all the same.
            let unwinds = OnUnwind::new(|| {
                let off = EntryDetails::default();
                let (outcome, block) = self.free_found(&mut cell.lock(), &find, &off);
                if let (Outcome::Pending, Some(block)) = (outcome, block) {
                    self.fence(BlockRef { heap: number, block }, Fences::Later, &off);
                }
            });
            let details = self.entry_details(StackLevel::All);
            unwinds.disarm();
            details
        };
        let mut heap = cell.lock();
        let (outcome, block) = self.free_found(&mut heap, &find, &details);
        drop(heap);
        if let (Outcome::Pending, Some(block)) = (&outcome, block) {
            self.fence(BlockRef { heap: number, block }, fences, &details);
        }
        if !details.is_off() {
            self.report();
        }
        outcome
    }

    #[inline]
    fn free_found(
        &self,
        heap: &mut Heap,
        find: &impl Fn(&Heap) -> Option<u32>,
        details: &EntryDetails,
    ) -> (Outcome, Option<u32>) {
        let Some(block) = find(heap) else { return (Outcome::Unknown, None) };
        if heap.is_held(block) {
            return (Outcome::Held, None);
        }
        let (addr, requested) = (heap.block(block).addr(), heap.block(block).requested());
        match heap.free(block) {
            Freed::Completed => {
                self.record_free(addr, requested, heap, details);
                (Outcome::Completed, Some(block))
            }
            Freed::Pending => {
                self.record(Action::FreeRequested, addr, requested, heap, details);
                (Outcome::Pending, Some(block))
            }
        }
    }

    #[cold]
    fn fence(&self, key: BlockRef, fences: Fences, details: &EntryDetails) {
        let pending = PendingFrees::new(self, details);
        match fences {
            Fences::Now => pending.fence(key),
            Fences::Later => stream_fence::fence_later(&pending, key),
        }
    }

    /// Reports a free to a driver that tracks suballocations, before another request can get the memory. `false` if
    /// there is no such block. Memory of a private pool may be a graph's, whose replays go on using it.
    #[cold]
    fn report_freed(&self, number: u32, find: &impl Fn(&Heap) -> Option<u32>) -> bool {
        let heap = self.heaps.get(number).lock();
        let Some(block) = find(&heap) else { return false };
        let (addr, bytes) = (heap.block(block).addr(), heap.block(block).bytes());
        let reports = heap.pool.is_default() && !heap.is_held(block);
        drop(heap);
        if reports {
            self.driver().suballocation_freed(DevicePtr(addr), bytes);
        }
        true
    }

    /// Frees what starts at `ptr`.
    #[inline]
    fn free_at(&self, ptr: DevicePtr) -> Outcome {
        let Some(at) = self.space.locate(ptr) else { return Outcome::Unknown };
        self.free(at.heap, |heap| heap.allocated_at(at.kind, at.range, ptr.0), Fences::Now)
    }

    #[inline]
    fn free_allocation(&self, allocation: &Allocation, fences: Fences) -> Outcome {
        if self.free_plain_allocation(allocation) {
            return Outcome::Completed;
        }
        self.free_allocation_checked(allocation, fences)
    }

    /// Frees a block that only its own stream used. `false` if it has to be looked at more closely.
    #[inline]
    fn free_plain_allocation(&self, allocation: &Allocation) -> bool {
        let Some(at) = BlockRef::unpack(allocation.slot) else { return false };
        self.is_unobserved()
            && self.last_heap(at.heap).is_some_and(|cell| {
                let mut heap = cell.lock();
                heap.allocated(at.block, allocation.ptr, allocation.generation)
                    && heap.free_plain_block(at.block).is_some()
            })
    }

    #[inline(never)]
    fn free_allocation_checked(&self, allocation: &Allocation, fences: Fences) -> Outcome {
        let Some(at) = BlockRef::unpack(allocation.slot) else { return Outcome::Unknown };
        if self.heaps.try_get(at.heap).is_none() {
            return Outcome::Unknown;
        }
        let (ptr, generation) = (allocation.ptr, allocation.generation);
        self.free(at.heap, |heap| heap.allocated(at.block, ptr, generation).then_some(at.block), fences)
    }

    /// Changes an allocated block.
    fn change<R>(&self, allocation: &Allocation, change: impl FnOnce(&mut Heap, u32) -> R) -> Result<R> {
        let unknown = Error::UnknownPointer { ptr: allocation.ptr };
        let at = BlockRef::unpack(allocation.slot).ok_or(unknown.clone())?;
        let mut heap = self.heaps.try_get(at.heap).ok_or(unknown.clone())?.lock();
        if heap.allocated(at.block, allocation.ptr, allocation.generation) {
            Ok(change(&mut heap, at.block))
        } else {
            Err(unknown)
        }
    }
}

/// When fences of a freed block are recorded.
#[derive(Clone, Copy)]
enum Fences {
    Now,
    /// By a later call: this one must not call the driver.
    Later,
}

fn result_of(outcome: &Outcome, ptr: DevicePtr) -> Result<()> {
    match outcome {
        Outcome::Completed | Outcome::Pending => Ok(()),
        Outcome::Held => Err(Error::HeldByGraph { ptr }),
        Outcome::Unknown => Err(Error::UnknownPointer { ptr }),
    }
}

impl PagedAllocator {
    pub(super) fn locate(&self, ptr: DevicePtr) -> Result<(&PagedDevice, Allocation)> {
        self.instance().expect_own_process("find")?;
        for device in &self.devices {
            if let Some(at) = device.space.locate(ptr) {
                let heap = device.heaps.get(at.heap).lock();
                if let Some(block) = heap.allocated_at(at.kind, at.range, ptr.0) {
                    let slot = BlockRef { heap: at.heap, block }.pack();
                    return Ok((device, heap.allocation(block, device.id, slot)));
                }
            }
        }
        Err(Error::UnknownPointer { ptr })
    }
}

/// The hot path: the heap that the thread used last, while there is nothing to be looked after. One lock that
/// threads on other streams never take, and that is mostly biased to the thread: then there is no locked instruction.
impl PagedAllocator {
    /// Allocates from the heap that the thread used last, without anything else: for frameworks that call this on every
    /// allocation. `None`, and nothing has changed, if it takes more: [`allocate_raw`](DeviceAllocator::allocate_raw)
    /// does that.
    #[inline]
    #[must_use]
    pub fn allocate_cached(&self, request: &Request) -> Option<Allocation> {
        match self.allocate_again(request) {
            Again::Done(allocation) => Some(allocation),
            Again::Search(heap, number) => search(heap, number, request),
            Again::Unbiased(cell, number) => allocate_without_bias(cell, number, request),
            Again::Other => self.allocate_recorded(request),
        }
    }

    /// Allocates a block that was freed a moment ago, by the bias of the heap's lock.
    #[inline(always)]
    fn allocate_again(&self, request: &Request) -> Again<'_> {
        let &Request { device, stream, bytes: requested, .. } = request;
        let Some(paged_device) = self.devices.get(device.0 as usize) else { return Again::Other };
        if !paged_device.is_unobserved() {
            return Again::Other;
        }
        let Some((number, cell)) = paged_device.heap_of_plain(request) else { return Again::Other };
        let Some(mut heap) = cell.lock_by_bias() else { return Again::Unbiased(cell, number) };
        let Some((id, block)) = heap.allocate_again(requested) else { return Again::Search(heap, number) };
        let (ptr, bytes, generation) = (DevicePtr(block.addr()), block.bytes(), block.generation());
        drop(heap);
        let slot = BlockRef { heap: number, block: id }.pack();
        Again::Done(Allocation { ptr, bytes, bytes_requested: requested, device, stream, slot, generation })
    }

    #[inline(never)]
    fn allocate_recorded(&self, request: &Request) -> Option<Allocation> {
        self.devices.get(request.device.0 as usize)?.allocate_recorded(request)
    }

    /// Goes on where [`allocate_again`](Self::allocate_again) found no block.
    #[inline(never)]
    fn allocate_after_search(&self, heap: BiasedGuard<'_, Heap>, number: u32, request: &Request) -> Result<Allocation> {
        match search(heap, number, request) {
            Some(allocation) => Ok(allocation),
            None => self.allocate_checked(*request),
        }
    }

    /// Goes on where it had not the bias.
    #[inline(never)]
    fn allocate_after_lock(&self, cell: &BiasedLock<Heap>, number: u32, request: &Request) -> Result<Allocation> {
        match allocate_without_bias(cell, number, request) {
            Some(allocation) => Ok(allocation),
            None => self.allocate_checked(*request),
        }
    }

    /// Goes on in every other case.
    #[inline(never)]
    fn allocate_otherwise(&self, request: &Request) -> Result<Allocation> {
        let device = self.devices.get(request.device.0 as usize);
        match device.and_then(|device| device.allocate_recorded(request)) {
            Some(allocation) => Ok(allocation),
            None => self.allocate_checked(*request),
        }
    }

    /// Frees what starts at `ptr` on `device`, if it was allocated so and its stream alone used it. `false`, and
    /// nothing has changed, if it takes more: [`free_on`](DeviceAllocator::free_on) does that.
    #[inline]
    pub fn free_cached(&self, device: DeviceId, ptr: DevicePtr) -> bool {
        self.devices.get(device.0 as usize).is_some_and(|device| device.free_plain(ptr))
    }

    /// Allocates in every other case.
    #[inline(never)]
    fn allocate_checked(&self, request: Request) -> Result<Allocation> {
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
        if device.shared().tracks_suballocations {
            device.driver().suballocated(allocation.ptr, allocation.bytes, allocation.stream);
        }
        if !details.is_off() {
            let unwinds = OnUnwind::new(|| {
                device.free_allocation(&allocation, Fences::Later);
            });
            device.report();
            unwinds.disarm();
        }
        Ok(allocation)
    }

    /// Frees a block of any kind, first looked for on that device.
    #[inline(never)]
    fn free_on_checked(&self, device: DeviceId, ptr: DevicePtr) -> Result<()> {
        if ptr.is_null() || self.instance().is_inherited() {
            return Ok(());
        }
        match self.device(device)?.free_at(ptr) {
            Outcome::Unknown => self.free_checked(ptr),
            outcome => result_of(&outcome, ptr),
        }
    }

    /// Frees a block of any kind.
    #[inline(never)]
    fn free_checked(&self, ptr: DevicePtr) -> Result<()> {
        if ptr.is_null() || self.instance().is_inherited() {
            return Ok(());
        }
        for device in &self.devices {
            match device.free_at(ptr) {
                Outcome::Unknown => {}
                outcome => return result_of(&outcome, ptr),
            }
        }
        Err(Error::UnknownPointer { ptr })
    }
}

/// What the hot path of an allocation came to.
enum Again<'a> {
    Done(Allocation),
    /// The heap, with its number, has to be searched.
    Search(BiasedGuard<'a, Heap>, u32),
    /// The heap's lock is not biased to the thread.
    Unbiased(&'a BiasedLock<Heap>, u32),
    /// A history is recorded, or there is more to look at.
    Other,
}

/// Allocates a free block of a heap, whichever fits best. `None` if none does.
#[inline]
fn search(mut heap: BiasedGuard<'_, Heap>, number: u32, request: &Request) -> Option<Allocation> {
    let block = heap.search(request.bytes)?;
    Some(heap.allocation(block, request.device, BlockRef { heap: number, block }.pack()))
}

/// Allocates a free block of a heap whose lock is not biased to the thread.
#[inline(never)]
fn allocate_without_bias(cell: &BiasedLock<Heap>, number: u32, request: &Request) -> Option<Allocation> {
    let mut heap = cell.lock();
    let block = heap.allocate(request.bytes)?;
    Some(heap.allocation(block, request.device, BlockRef { heap: number, block }.pack()))
}

impl DeviceAllocator for PagedAllocator {
    fn name(&self) -> &'static str {
        "paged"
    }

    fn instance(&self) -> &Instance {
        &self.shared.instance
    }

    #[inline]
    fn allocate_raw(&self, request: Request) -> Result<Allocation> {
        match self.allocate_again(&request) {
            Again::Done(allocation) => Ok(allocation),
            // Calls at the end: the hot path has nothing to keep for afterwards.
            Again::Search(heap, number) => self.allocate_after_search(heap, number, &request),
            Again::Unbiased(cell, number) => self.allocate_after_lock(cell, number, &request),
            Again::Other => self.allocate_otherwise(&request),
        }
    }

    #[inline]
    fn free_raw(&self, ptr: DevicePtr) -> Result<()> {
        let device = self.devices.get(last_device());
        if device.is_some_and(|device| device.free_plain(ptr)) { Ok(()) } else { self.free_checked(ptr) }
    }

    #[inline]
    fn free_on(&self, device: DeviceId, ptr: DevicePtr) -> Result<()> {
        if self.free_cached(device, ptr) { Ok(()) } else { self.free_on_checked(device, ptr) }
    }

    fn record_use_raw(&self, ptr: DevicePtr, stream: StreamId) -> Result<()> {
        if ptr.is_null() {
            return Ok(());
        }
        let (device, allocation) = self.locate(ptr)?;
        device.change(&allocation, |heap, block| heap.add_use(block, stream))
    }

    fn find(&self, ptr: DevicePtr) -> Result<Allocation> {
        self.locate(ptr).map(|(_, allocation)| allocation)
    }

    fn free(&self, allocation: Allocation) -> Result<()> {
        if allocation.ptr.is_null() || self.instance().is_inherited() {
            return Ok(());
        }
        let outcome = self.device(allocation.device)?.free_allocation(&allocation, Fences::Now);
        result_of(&outcome, allocation.ptr)
    }

    fn free_later(&self, allocation: Allocation) {
        if let Ok(device) = self.device(allocation.device) {
            // A destructor cannot report that there is no such block.
            device.free_allocation(&allocation, Fences::Later);
        }
    }

    fn record_use(&self, allocation: Allocation, stream: StreamId) -> Result<()> {
        if allocation.ptr.is_null() {
            return Ok(());
        }
        self.device(allocation.device)?.change(&allocation, |heap, block| heap.add_use(block, stream))
    }

    fn record_uses_later(&self, allocation: Allocation, streams: &[StreamId]) {
        if let Ok(device) = self.device(allocation.device) {
            // It fails only for an allocation that does not exist.
            let _ = device.change(&allocation, |heap, block| heap.add_uses(block, streams));
        }
    }

    fn hold(&self, allocation: Allocation, _: GraphKey) -> Result<()> {
        if allocation.ptr.is_null() {
            return Ok(());
        }
        self.device(allocation.device)?.change(&allocation, Heap::add_hold)
    }

    fn end_hold(&self, allocation: Allocation, _: GraphKey) {
        if let Ok(device) = self.device(allocation.device) {
            let _ = device.change(&allocation, Heap::end_hold);
        }
    }

    fn trim(&self, device: DeviceId, pool: MemPoolId) -> Result<u64> {
        let paged_device = self.device(device)?;
        if pool.is_default() {
            self.shared.observers.run_trim_hooks(device);
        }
        let details = paged_device.entry_details(StackLevel::All).timed(self.driver());
        if !pool.is_default() {
            match lock(&paged_device.pools).uses(pool) {
                Ok(0) => {}
                // In use, or removed already with all that it had.
                Ok(_) | Err(Error::UnknownPool { .. }) => return Ok(0),
                Err(error) => return Err(error),
            }
        }
        let current = paged_device.instance().device(device.0)?.current_stream_id()?;
        if !paged_device.capture_status(current)?.is_capturing() {
            reclaim::wait_for_unknown_users(paged_device)?;
            PendingFrees::new(paged_device, &details).wait()?;
        }
        let trimmed = reclaim::release_all(paged_device, pool, 0, &details);
        paged_device.report();
        trimmed
    }

    fn largest_available(&self, device: DeviceId) -> Result<u64> {
        let paged_device = self.device(device)?;
        let free = self.driver().mem_info(device)?.bytes_free;
        let largest = paged_device.heaps.iter().map(|(_, heap)| inactive::largest(&heap.lock()));
        Ok(free.max(largest.max().unwrap_or(0)))
    }

    fn set_memory_fraction(&self, device: DeviceId, fraction: f64) -> Result<()> {
        self.device(device)?.change_limits(|limits| limits.set_fraction(fraction))
    }

    fn memory_fraction(&self, device: DeviceId) -> Result<f64> {
        Ok(self.device(device)?.limits().fraction())
    }

    fn stats(&self, device: DeviceId) -> Result<Stats> {
        let mut stats = self.device(device)?.stats();
        stats.workspace_bytes = self.shared.observers.workspaces.read(device);
        Ok(stats)
    }

    fn reset_peak_stats(&self, device: DeviceId) -> Result<()> {
        self.device(device)?.reset_peak();
        self.shared.observers.workspaces.change(device, Stat::reset_peak);
        Ok(())
    }

    fn reset_accumulated_stats(&self, device: DeviceId) -> Result<()> {
        self.device(device)?.reset_accumulated();
        self.shared.observers.workspaces.change(device, Stat::reset_accumulated);
        Ok(())
    }

    fn snapshot(&self, options: SnapshotOptions) -> Result<Snapshot> {
        self.instance().expect_own_process("snapshot")?;
        let mut snapshot = Snapshot { settings: self.settings().recorded(), ..Snapshot::default() };
        let mut stacks = StackIds::default();
        for device in &self.devices {
            let details = device.entry_details(StackLevel::Alloc).timed(self.driver());
            snapshot::add_to(device, &mut snapshot, &mut stacks, options, &details);
            device.report();
        }
        Ok(snapshot)
    }

    fn record_history(&self, options: Option<HistoryOptions>) -> Result<()> {
        self.instance().expect_own_process("record_history")?;
        self.devices.iter().for_each(|device| device.record_history(options.as_ref()));
        Ok(())
    }

    fn observers(&self) -> &Observers {
        &self.shared.observers
    }

    fn pools(&self) -> Result<&dyn PrivatePools> {
        Ok(self)
    }
}
