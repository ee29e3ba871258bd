//! The state of one device: the heap, the pools, pending frees, statistics and history. Every method is one step under
//! the device's lock. No driver calls here, except the reports to a driver that tracks suballocations: under the lock,
//! so that no other thread sees a block as allocated which is not reported yet.

mod checkpoint;
mod counters;
mod deferred;
mod policy;
mod pools;
mod recent;
mod segments;
mod snapshot;

use std::sync::Arc;

use warpool_driver::{DeviceId, DevicePtr, Driver, MemoryInfo, StreamId};

use self::counters::Counters;
use self::deferred::DeferredFrees;
pub(super) use self::policy::Policy;
pub(super) use self::pools::BlockPools;
use self::pools::Pools;
use self::recent::Recent;
pub(super) use self::recent::ToFree;
use self::segments::DriverRetries;
use super::heap::{BlockKey, BlockPoolKey, BlockRequest, BlockStatus, Heap, SegmentKey, Taken};
use crate::memory::pool_table::Pool;
use crate::memory::report::{EntryDetails, HistoryRecorder};
use crate::memory::shortage::Shortage;
use crate::memory::stream_fence::{Fence, StreamFences};
use crate::memory::{Action, Allocation, MemPoolId, OomCause, OomReport, PoolOptions, PoolUser, Request, SizeRules};
use crate::{Error, Result, steps};

pub(super) struct DeviceState {
    device: DeviceId,
    pub(super) policy: Policy,
    pub(super) heap: Heap,
    pub(super) pools: Pools,
    /// The fences that freed blocks wait for.
    pub(super) fences: StreamFences<BlockKey>,
    /// Blocks whose frees wait for the end of a capture.
    deferred: DeferredFrees,
    pub(super) counters: Counters,
    pub(super) recorder: HistoryRecorder,
    pub(super) retries: DriverRetries,
    recent: Option<Recent>,
    /// Bytes of requests to sources of segments that are under way: they count against the limit.
    pub(super) source_bytes_in_flight: u64,
    /// The driver, if it tracks suballocations.
    tracker: Option<Arc<dyn Driver>>,
}

/// The result of a search for a cached block.
pub(super) enum Search {
    Found(Allocation),
    /// Nothing cached fits. The thread has entered the pool.
    NotFound(BlockRequest),
    /// Pending frees must be processed before a search.
    Pending,
    /// Boxed, because an error is several times as large as the usual result.
    Refused(Box<Error>),
}

impl DeviceState {
    pub(super) fn new(device: DeviceId, policy: Policy, driver: &Arc<dyn Driver>) -> Self {
        let mut heap = Heap::new(policy.free_block_order);
        Self {
            device,
            pools: Pools::new(device, &mut heap),
            heap,
            fences: StreamFences::default(),
            deferred: DeferredFrees::default(),
            counters: Counters::new(policy.max_split_stat()),
            policy,
            recorder: HistoryRecorder::default(),
            retries: DriverRetries::default(),
            recent: None,
            source_bytes_in_flight: 0,
            tracker: driver.tracks_suballocations().then(|| Arc::clone(driver)),
        }
    }

    /// Replaces the policy except for the limit.
    pub(super) fn set_policy(&mut self, mut policy: Policy) {
        policy.limit = self.policy.limit;
        self.policy = policy;
        self.counters.set_oversize(self.policy.max_split_stat(), self.heap.count_oversize(&self.policy.sizes));
        self.heap.set_free_block_order(self.policy.free_block_order);
    }

    /// Checks every invariant. No other thread may use the allocator meanwhile.
    ///
    /// # Panics
    /// If an invariant does not hold.
    pub(super) fn check(&self) {
        let totals = self.heap.check(&self.policy.sizes);
        assert_eq!(totals.deferred, self.deferred.len(), "deferred frees");
        assert_eq!(self.source_bytes_in_flight, 0, "no source is called now");
        self.counters.check(&totals);
        self.pools.check(&self.heap);
        for pool in self.counters.stats.reserved_bytes_by_private_pools.keys() {
            assert!(self.pools.uses(*pool).is_ok(), "statistics of pool {pool}, which was removed");
        }
    }
}

/// Allocating.
impl DeviceState {
    /// Resolves a request. Fails if the pool does not exist or is released.
    #[inline]
    pub(super) fn request(&self, pool: MemPoolId, stream: StreamId, requested: u64) -> Result<BlockRequest> {
        let block_pools = self.pools.serving_block_pools(pool)?;
        Ok(self.request_in(block_pools, pool, stream, requested))
    }

    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a call would return the result through memory")]
    fn request_in(
        &self,
        block_pools: [BlockPoolKey; 2],
        pool: MemPoolId,
        stream: StreamId,
        requested: u64,
    ) -> BlockRequest {
        let size = self.policy.sizes.round(requested);
        let kind = SizeRules::kind(size);
        let block_pool = block_pools[kind as usize];
        BlockRequest {
            block_pool,
            pool,
            stream,
            kind,
            requested,
            size,
            segment: self.policy.sizes.segment(size),
            expandable: self.policy.expandable && !self.heap.block_pool(block_pool).has_upstream(),
        }
    }

    /// Allocates a cached block if no other work is due before or after: no pending frees, no history entries, no ages
    /// of free blocks. `None` means that nothing changed.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a call would return the result through memory")]
    pub(super) fn allocate_plain(&mut self, pool: MemPoolId, stream: StreamId, requested: u64) -> Option<Allocation> {
        if self.has_pending() || self.recorder.has_unreported() || self.policy.collects_garbage() {
            return None;
        }
        let is_default = pool.is_default();
        let block_pools =
            if is_default { self.pools.default_block_pools() } else { self.pools.serving_block_pools(pool).ok()? };
        let request = self.request_in(block_pools, pool, stream, requested);
        let taken = self.heap.take_best_fit(&request, &self.policy.sizes)?;
        let allocation = self.allocate_taken(&taken, requested, stream, EntryDetails::not_recorded());
        self.report_allocated(&allocation);
        self.set_recent(pool, allocation, taken);
        Some(allocation)
    }

    /// Allocates a cached block, or enters the pool.
    pub(super) fn search(
        &mut self,
        (pool, stream, requested): (MemPoolId, StreamId, u64),
        capturing: bool,
        details: &EntryDetails,
    ) -> Search {
        let request = match self.request(pool, stream, requested) {
            Ok(request) => request,
            Err(error) => return Search::Refused(Box::new(error)),
        };
        if capturing {
            self.pools.record_capture(pool);
        }
        if let Some(allocation) = self.allocate_cached(&request, details) {
            return Search::Found(allocation);
        }
        match self.pools.enter(pool) {
            Ok(_) => Search::NotFound(request),
            Err(error) => Search::Refused(Box::new(error)),
        }
    }

    /// Allocates the best free block for a request.
    pub(super) fn allocate_cached(&mut self, request: &BlockRequest, details: &EntryDetails) -> Option<Allocation> {
        if self.policy.collects_garbage() {
            self.heap.count_search(request.block_pool);
        }
        let taken = self.heap.take_best_fit(request, &self.policy.sizes)?;
        let allocation = self.allocate_taken(&taken, request.requested, request.stream, details);
        self.report_allocated(&allocation);
        Some(allocation)
    }

    /// Allocates a free block of a pool that lends its memory to the default pool.
    pub(super) fn allocate_from_pools_for_oom(
        &mut self,
        request: &BlockRequest,
        details: &EntryDetails,
    ) -> Option<Allocation> {
        let pools: Vec<MemPoolId> = self.pools.for_oom().map(|(id, _)| id).collect();
        pools.into_iter().find_map(|pool| {
            let request = self.request(pool, request.stream, request.requested).ok()?;
            let allocation = self.allocate_cached(&request, details)?;
            let block = self.heap.allocated(&allocation).expect("allocated just now");
            self.heap.set_lent(block);
            Some(allocation)
        })
    }

    /// Allocates a block in transit that is at least as large as requested; the rest becomes free.
    pub(super) fn allocate_block(
        &mut self,
        block: BlockKey,
        request: &BlockRequest,
        details: &EntryDetails,
    ) -> Allocation {
        let taken = self.heap.split_for(block, request, &self.policy.sizes);
        let allocation = self.allocate_taken(&taken, request.requested, request.stream, details);
        self.report_allocated(&allocation);
        allocation
    }

    /// Allocates at `ptr`, in a free block that contains all of the request.
    pub(super) fn allocate_at(
        &mut self,
        request: &BlockRequest,
        ptr: u64,
        details: &EntryDetails,
    ) -> Option<Allocation> {
        let mut candidates = self.heap.free_blocks_from(request.block_pool, request.stream, request.size);
        let end = ptr.saturating_add(request.size);
        let (found, _) = candidates.find(|(_, block)| {
            steps::count();
            block.ptr() <= ptr && end <= block.end()
        })?;
        drop(candidates);
        self.take_free_from(found, ptr);
        Some(self.allocate_block(found, request, details))
    }

    /// Takes a free block; the part before `ptr` becomes a free block of its own.
    fn take_free_from(&mut self, block: BlockKey, ptr: u64) {
        self.heap.take_free(block);
        let (start, whole) = (self.heap.block(block).ptr(), self.heap.block(block).size());
        if ptr > start {
            let was_split = self.heap.free_front(block, ptr - start);
            self.counters.front_freed(self.heap.block(block), was_split, whole);
        }
    }

    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a call would return the result through memory")]
    fn allocate_taken(
        &mut self,
        taken: &Taken,
        requested: u64,
        stream: StreamId,
        details: &EntryDetails,
    ) -> Allocation {
        let block = self.heap.set_allocated(taken.block, requested, details.stack.as_ref());
        self.counters.taken(taken, block);
        let (ptr, size, segment, kind) = (block.ptr(), block.size(), block.segment(), block.kind());
        let generation = block.generation();
        self.counters.block_allocated(kind, size, requested, self.policy.sizes.is_oversize(size));
        if crate::defect::Defect::SplitCountsTwice.is_on() && taken.rest.is_some() && size >= 1 << 20 {
            self.counters.block_allocated(kind, size, requested, false);
        }
        self.record(Action::Alloc, ptr, requested, segment, details);
        Allocation {
            ptr: DevicePtr(ptr),
            bytes: size,
            bytes_requested: requested,
            device: self.device,
            stream,
            slot: Heap::slot(taken.block),
            generation,
        }
    }

    /// Reports an allocation to a driver that tracks suballocations.
    #[inline]
    fn report_allocated(&self, allocation: &Allocation) {
        if let Some(tracker) = &self.tracker {
            tracker.suballocated(allocation.ptr, allocation.bytes, allocation.stream);
        }
    }

    /// Reports that an allocated block is about to be freed to a driver that tracks suballocations. Memory of a private
    /// pool may be a graph's, whose replays go on using what its capture freed.
    #[inline]
    pub(super) fn report_free(&self, key: BlockKey) {
        let Some(tracker) = &self.tracker else { return };
        let block = self.heap.block(key);
        if self.heap.block_pool_of(block.segment()).pool().is_default() {
            tracker.suballocation_freed(DevicePtr(block.ptr()), block.size());
        }
    }

    /// The allocation of an allocated block.
    pub(super) fn allocation(&self, key: BlockKey) -> Allocation {
        let block = self.heap.block(key);
        Allocation {
            ptr: DevicePtr(block.ptr()),
            bytes: block.size(),
            bytes_requested: block.requested(),
            device: self.device,
            stream: self.heap.stream_of(key),
            slot: Heap::slot(key),
            generation: block.generation(),
        }
    }
}

/// Freeing.
impl DeviceState {
    /// Frees an allocated block. Returns whether its free is pending because other streams may still use it.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a call would return the result through memory")]
    pub(super) fn free(&mut self, block: BlockKey, details: &EntryDetails) -> bool {
        let in_use = self.request_free(block, details);
        if in_use && crate::defect::Defect::FreeForgetsUses.is_on() {
            self.heap.clear_extra(block);
            self.complete_free(block, details);
            return false;
        }
        if !in_use {
            self.complete_free(block, details);
        }
        in_use
    }

    /// Frees an allocation that never reaches its caller, if it still exists. Its fences are left to the next call.
    pub(super) fn abandon(&mut self, allocation: &Allocation, details: &EntryDetails) {
        if let Some(block) = self.heap.allocated(allocation)
            && self.free(block, details)
        {
            self.fence_later(block);
        }
    }

    /// Leaves the fences of a pending free to the next call.
    pub(super) fn fence_later(&mut self, block: BlockKey) {
        let pending = self.heap.get(block).is_some_and(|block| block.status() == BlockStatus::PendingFree);
        if pending {
            self.fences.list_unfenced(self.heap.uses_mut(block), block);
        }
    }

    /// Marks an allocated block as pending free. Returns whether other streams may still use it.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a call would return the result through memory")]
    fn request_free(&mut self, block: BlockKey, details: &EntryDetails) -> bool {
        let block = self.heap.set_pending_free(block);
        let (ptr, size, requested, segment) = (block.ptr(), block.size(), block.requested(), block.segment());
        let (in_use, stack) = (block.has_uses(), block.stack().cloned());
        self.counters.free_requested(block.kind(), size, self.policy.sizes.is_oversize(size));
        self.record(Action::FreeRequested, ptr, requested, segment, &details.of_free(stack.as_ref()));
        in_use
    }

    /// Completes a pending free: no stream uses the block any more, and it is merged with its free neighbours.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a call would return the result through memory")]
    fn complete_free(&mut self, key: BlockKey, details: &EntryDetails) {
        let block = self.heap.block(key);
        assert!(block.status() == BlockStatus::PendingFree && !block.has_uses(), "a block in use cannot become free");
        let (ptr, size, requested, segment) = (block.ptr(), block.size(), block.requested(), block.segment());
        let stack = block.stack().cloned();
        if block.has_extra() {
            self.heap.clear_extra(key);
        }
        self.record(Action::FreeCompleted, ptr, requested, segment, &details.of_free(stack.as_ref()));
        let (merged, block) = self.heap.merge_and_free(key);
        self.counters.free_completed(size, requested, merged, block);
    }

    /// Records that `stream` uses the allocated block at `ptr`, if it is still allocated.
    pub(super) fn record_use(&mut self, block: BlockKey, ptr: DevicePtr, stream: StreamId, in_capture: bool) {
        let is_allocated = self.heap.allocated_at(ptr) == Some(block);
        if !is_allocated || self.heap.stream_of(block) == stream {
            return;
        }
        if !in_capture {
            self.heap.uses_mut(block).add(stream);
            return;
        }
        let uses = self.heap.uses_in_capture_mut(block);
        if !uses.contains(&stream) {
            uses.push(stream);
        }
    }

    /// Records that a graph holds an allocation.
    pub(super) fn hold(&mut self, allocation: &Allocation) -> Result<()> {
        let block = self.heap.allocated(allocation).ok_or(Error::UnknownPointer { ptr: allocation.ptr })?;
        *self.heap.holds_mut(block) += 1;
        Ok(())
    }

    /// Records that a graph no longer holds an allocation.
    pub(super) fn end_hold(&mut self, allocation: &Allocation) {
        if let Some(block) = self.heap.allocated(allocation).filter(|&block| self.heap.block(block).is_held()) {
            *self.heap.holds_mut(block) -= 1;
        }
    }

    /// Records that `streams` use an allocation, if it still exists.
    pub(super) fn record_uses(&mut self, allocation: &Allocation, streams: &[StreamId]) {
        if let Some(block) = self.heap.allocated(allocation) {
            let own = self.heap.stream_of(block);
            self.heap.uses_mut(block).add_all(streams.iter().copied().filter(|&stream| stream != own));
        }
    }

    /// Whether frees are pending that may be completed before the next search.
    #[inline]
    pub(super) fn has_pending(&self) -> bool {
        !self.fences.is_empty() || self.has_deferred()
    }

    /// Completes a fence that has passed.
    pub(super) fn complete_fence(&mut self, passed: &Fence, details: &EntryDetails) {
        if let Some(block) = self.fences.pop(passed) {
            self.heap.uses_mut(block).fence_passed();
            self.reclaim_if_clear(block, details);
        }
    }

    /// Completes a pending free if no stream may still use the block.
    pub(super) fn reclaim_if_clear(&mut self, key: BlockKey, details: &EntryDetails) {
        let pending = self.heap.get(key).is_some_and(|block| block.status() == BlockStatus::PendingFree);
        if pending && self.heap.uses_mut(key).take_reclaimable() {
            self.complete_free(key, details);
        }
    }
}

/// Pools.
impl DeviceState {
    pub(super) fn add_pool(&mut self, id: MemPoolId, options: PoolOptions) {
        self.pools.add(&mut self.heap, id, options);
    }

    /// Ends a use of a pool. The caller drops the result without the lock.
    pub(super) fn release_pool(&mut self, id: MemPoolId, user: PoolUser) -> Result<Option<Pool<BlockPools>>> {
        let removed = self.pools.release(id, user, &mut self.heap)?;
        self.forget_removed(id, removed.is_some());
        Ok(removed)
    }

    /// Leaves a pool that the thread entered. The caller drops the result without the lock.
    #[must_use = "to be dropped without the lock"]
    pub(super) fn leave_pool(&mut self, id: MemPoolId) -> Option<Pool<BlockPools>> {
        let removed = self.pools.leave(id, &mut self.heap);
        self.forget_removed(id, removed.is_some());
        removed
    }

    /// Removes the statistics of a removed pool.
    fn forget_removed(&mut self, id: MemPoolId, removed: bool) {
        if removed {
            self.counters.stats.reserved_bytes_by_private_pools.remove(&id);
        }
    }

    /// The blocks of a pool, by stream and then by segment.
    fn blocks_in(&self, pool: MemPoolId) -> Result<impl Iterator<Item = (BlockKey, &super::heap::Block)>> {
        let block_pools = self.pools.block_pools(pool)?;
        Ok(block_pools.into_iter().flat_map(|block_pool| self.heap.blocks_in(block_pool)))
    }

    /// The addresses of the allocated blocks of a pool.
    pub(super) fn allocated_addresses(&self, pool: MemPoolId) -> Result<Vec<DevicePtr>> {
        let blocks = self.blocks_in(pool)?.map(|(_, block)| block);
        let allocated = blocks.filter(|block| block.status() == BlockStatus::Allocated);
        Ok(allocated.map(|block| DevicePtr(block.ptr())).collect())
    }
}

/// History and reports.
impl DeviceState {
    /// Writes an entry about a segment's memory into the history, and for trackers.
    #[inline]
    fn record(&mut self, action: Action, addr: u64, size: u64, segment: SegmentKey, details: &EntryDetails) {
        if self.recorder.is_on(details) {
            self.write_entry(action, addr, size, segment, details);
        }
    }

    #[cold]
    fn write_entry(&mut self, action: Action, addr: u64, size: u64, segment: SegmentKey, details: &EntryDetails) {
        let (stream, pool) = {
            let stream_blocks = self.heap.stream_blocks_of(segment);
            (stream_blocks.stream_raw(), self.heap.block_pool(stream_blocks.block_pool()).pool())
        };
        self.recorder.record(action, addr, size, stream, pool, details);
    }

    /// Writes the program's name for an allocated block into the history.
    pub(super) fn annotate(&mut self, ptr: DevicePtr, details: &EntryDetails) -> Result<()> {
        let block = self.heap.allocated_at(ptr).ok_or(Error::UnknownPointer { ptr })?;
        let (requested, segment) = (self.heap.block(block).requested(), self.heap.block(block).segment());
        self.record(Action::Annotate, ptr.0, requested, segment, details);
        Ok(())
    }

    /// Counts a failed request, and reports the device's memory.
    pub(super) fn out_of_memory(
        &mut self,
        request: &BlockRequest,
        why: OomCause,
        stream_raw: u64,
        (memory, capturing): (MemoryInfo, bool),
        details: &EntryDetails,
    ) -> OomReport {
        if why == OomCause::Rejected {
            self.counters.stats.num_oom_rejections += 1;
        } else {
            self.counters.stats.num_ooms += 1;
            self.recorder.record(Action::Oom, memory.bytes_free, request.size, stream_raw, request.pool, details);
        }
        let asked = Request::new(self.device, request.stream, request.requested);
        let (bytes_segment, limit, stats) = (request.segment, self.policy.limit, &self.counters.stats);
        let shortage = Shortage { request: &asked, why, bytes_segment, memory, limit, stats, capturing };
        let mut report = OomReport {
            bytes_reserved: self.bytes_reserved(),
            bytes_cached: 0,
            blocks_cached: 0,
            bytes_largest_cached: 0,
            expandable_segments: self.policy.expandable,
            ..shortage.report()
        };
        for (_, block) in self.heap.blocks().filter(|(_, block)| block.status() == BlockStatus::Free) {
            if self.heap.block_pool_of(block.segment()).pool().is_default() {
                report.bytes_cached += block.size();
                report.blocks_cached += 1;
                report.bytes_largest_cached = report.bytes_largest_cached.max(block.size());
            } else {
                report.bytes_private_free += block.size();
            }
        }
        report
    }
}
