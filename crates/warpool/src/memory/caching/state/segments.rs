//! Segments in the state: the changes that the driver calls of `source/` make. Their callers hold the slow lock.

use std::collections::VecDeque;

use warpool_driver::{DevicePtr, PhysicalId, StreamId};

use super::DeviceState;
use crate::memory::caching::heap::{
    Backing, BlockKey, BlockPoolKey, BlockRequest, Chunks, ExpandableSegment, SegmentKey, Unmapped,
};
use crate::memory::report::EntryDetails;
use crate::memory::segment_source::SegmentSource;
use crate::memory::{Action, Asleep, MemPoolId, OomCause, SegmentKind};

/// Driver calls that failed and are to be retried.
#[derive(Default)]
pub(crate) struct DriverRetries {
    /// Physical memory that could not be released.
    pub(crate) releases: Vec<PhysicalId>,
    /// Mappings of failed allocations that could not be undone. In the heap, these addresses are unmapped.
    pub(crate) unmaps: VecDeque<(DevicePtr, u64)>,
}

impl DriverRetries {
    /// Whether a mapping in that range is still to be undone.
    pub(crate) fn has_unmap_in(&self, start: DevicePtr, bytes: u64) -> bool {
        self.unmaps.iter().any(|(ptr, _)| ptr.0 >= start.0 && ptr.0 - start.0 < bytes)
    }
}

/// A segment taken out of the free list, to be returned to its source.
pub(crate) struct SegmentTaken {
    pub(crate) ptr: DevicePtr,
    pub(crate) bytes: u64,
    pub(crate) stream: StreamId,
    pub(crate) source: SegmentSource,
}

/// The free memory of a block pool.
pub(crate) struct FreeMemory {
    /// Free blocks of segments that are not expandable.
    pub(crate) blocks: Vec<BlockKey>,
    /// Free blocks of expandable segments.
    pub(crate) expandable: Vec<BlockKey>,
}

impl DeviceState {
    /// Whether a segment for the request would exceed the limit.
    pub(crate) fn exceeds_limit(&self, request: &BlockRequest) -> bool {
        if crate::defect::Defect::LimitForgetsTheRequest.is_on() {
            return self.policy.exceeds_limit(self.bytes_reserved());
        }
        self.policy.exceeds_limit(self.bytes_reserved_with(request))
    }

    /// Whether the policy rejects the request at once, without any retry.
    pub(crate) fn rejects(&self, request: &BlockRequest) -> bool {
        self.policy.rejects(self.bytes_reserved_with(request))
    }

    /// The sum of reserved bytes, requests to sources under way, and a segment for the request.
    fn bytes_reserved_with(&self, request: &BlockRequest) -> u64 {
        let reserved = self.bytes_reserved().saturating_add(self.source_bytes_in_flight);
        reserved.saturating_add(request.segment)
    }

    /// Reserved bytes that are not asleep.
    pub(super) fn bytes_reserved(&self) -> u64 {
        self.counters.stats.reserved_bytes.all.current.saturating_sub(self.pools.sleeping.bytes())
    }

    /// Sets how much of a pool is asleep. Returns `false`, without any change, if it is to stay `within_limit` and the
    /// total would exceed it.
    pub(crate) fn put_asleep(&mut self, pool: MemPoolId, asleep: Option<Asleep>, within_limit: bool) -> bool {
        let more = asleep.as_ref().map_or(0, |asleep| self.pools.sleeping.bytes_more(pool, asleep));
        let reserved = self.bytes_reserved().saturating_add(self.source_bytes_in_flight).saturating_add(more);
        if within_limit && more > 0 && self.policy.exceeds_limit(reserved) {
            return false;
        }
        self.pools.sleeping.set(pool, asleep);
        true
    }

    /// Why no segment can be allocated for a request, as far as that is known without another driver call.
    pub(crate) fn oom_cause(&self, request: &BlockRequest) -> OomCause {
        if self.exceeds_limit(request) { OomCause::Limit } else { OomCause::Device }
    }

    /// How much is reserved above the threshold of garbage collection.
    pub(crate) fn bytes_over_gc_threshold(&self) -> u64 {
        self.policy.bytes_over_gc_threshold(self.bytes_reserved())
    }

    /// Adds a segment that was allocated for a request, as one block in transit.
    pub(crate) fn add_segment(
        &mut self,
        request: &BlockRequest,
        stream_raw: u64,
        ptr: DevicePtr,
        source: SegmentSource,
        details: &EntryDetails,
    ) -> BlockKey {
        let (stream, range) = ((request.stream, stream_raw), (ptr.0, request.segment));
        let backing = Backing::Whole(source);
        let block =
            self.heap.add_segment(request.block_pool, stream, range, backing, self.recorder.stack_of_entry(details));
        let oversize = self.policy.sizes.is_oversize(request.segment);
        self.counters.segment_allocated(self.heap.block_pool(request.block_pool), request.segment, oversize);
        self.record(Action::SegmentAlloc, ptr.0, request.segment, self.heap.block(block).segment(), details);
        block
    }

    /// Takes a segment out of its free list, if the block is a free segment.
    pub(crate) fn take_segment(&mut self, block: BlockKey) -> Option<SegmentTaken> {
        let entry = self.heap.get(block).filter(|entry| entry.is_free_segment())?;
        let Backing::Whole(source) = self.heap.segment(entry.segment()).backing() else { return None };
        let source = source.clone();
        let (ptr, bytes) = (DevicePtr(entry.ptr()), entry.size());
        let stream = self.heap.stream_of(block);
        self.heap.take_free(block);
        Some(SegmentTaken { ptr, bytes, stream, source })
    }

    /// Removes a segment that was returned. The caller drops the result without the lock: an upstream's destructor may
    /// drop blocks.
    pub(crate) fn remove_segment(&mut self, block: BlockKey, details: &EntryDetails) -> Backing {
        let entry = self.heap.block(block);
        let (ptr, bytes, segment) = (entry.ptr(), entry.size(), entry.segment());
        let stack = self.heap.segment(segment).stack().cloned();
        self.record(Action::SegmentFree, ptr, bytes, segment, &details.of_free(stack.as_ref()));
        let oversize = self.policy.sizes.is_oversize(bytes);
        self.counters.segment_freed(self.heap.block_pool_of(segment), bytes, oversize);
        self.heap.remove_segment(block)
    }

    /// The free memory of a block pool, in the order in which it is returned.
    pub(crate) fn free_memory(&self, block_pool: BlockPoolKey) -> FreeMemory {
        let free = self.heap.free_blocks(block_pool).into_iter();
        let (expandable, blocks) = free.partition(|&block| self.heap.block(block).is_expandable());
        FreeMemory { blocks, expandable }
    }

    /// With a split limit, the oversize segments of the request's stream to release, and the bytes that it needs: one
    /// that is large enough, or else the largest ones. Only in the default pool: a graph may use the memory of a
    /// private pool as long as the pool exists.
    pub(crate) fn oversize_segments(&self, request: &BlockRequest) -> (u64, Vec<BlockKey>) {
        let limit = self.policy.sizes.max_split_bytes();
        if limit == u64::MAX || !request.pool.is_default() {
            return (0, Vec::new());
        }
        let needed = request.size.max(limit);
        let mut large_enough = self.heap.free_blocks_from(request.block_pool, request.stream, needed);
        // Part of a segment may be oversize if the limit was set after that was split.
        if let Some((one, _)) = large_enough.find(|(_, block)| block.is_free_segment()) {
            return (needed, vec![one]);
        }
        let largest = self.heap.free_blocks_of(request.block_pool, request.stream);
        let oversize = largest.take_while(|(_, block)| block.size() >= limit);
        (needed, oversize.filter(|(_, block)| block.is_free_segment()).map(|(key, _)| key).collect())
    }

    /// The free large segments of the default pool that are at least as old as their average.
    pub(crate) fn old_segments(&self) -> Vec<BlockKey> {
        let large = self.pools.default_block_pools()[SegmentKind::Large as usize];
        let segments: Vec<(BlockKey, u64)> = self
            .heap
            .free_blocks(large)
            .into_iter()
            .filter(|&block| self.heap.block(block).is_free_segment())
            .map(|block| (block, self.heap.age(block)))
            .collect();
        let ages: u64 = segments.iter().map(|&(_, age)| age).sum();
        let count = segments.len() as u64;
        segments.into_iter().filter(|&(_, age)| age * count >= ages).map(|(block, _)| block).collect()
    }
}

/// Expandable segments.
impl DeviceState {
    /// Adds an expandable segment for a request, all of it unmapped.
    pub(crate) fn add_expandable(
        &mut self,
        request: &BlockRequest,
        stream_raw: u64,
        (ptr, bytes): (DevicePtr, u64),
        chunk: u64,
        details: &EntryDetails,
    ) {
        let backing = Backing::Expandable(ExpandableSegment::new(ptr.0, chunk));
        let stream = (request.stream, stream_raw);
        let block = self.heap.add_segment(
            request.block_pool,
            stream,
            (ptr.0, bytes),
            backing,
            self.recorder.stack_of_entry(details),
        );
        self.heap.put_unmapped(block);
    }

    /// Chunks were mapped. Returns the block in transit, with `grown` and its free neighbours merged into it.
    pub(crate) fn set_mapped(
        &mut self,
        unmapped: &Unmapped,
        grown: Option<BlockKey>,
        handles: &[PhysicalId],
        details: &EntryDetails,
    ) -> BlockKey {
        let segment = self.heap.block(unmapped.block).segment();
        let block = self.heap.set_mapped(unmapped.block, grown, handles);
        self.counters.reserved(self.heap.block_pool_of(segment), unmapped.bytes);
        self.record(Action::SegmentMap, unmapped.ptr, unmapped.bytes, segment, details);
        block
    }

    /// Takes a free block that contains whole chunks, and returns the stream to wait for before they are unmapped.
    pub(crate) fn take_chunks(&mut self, block: BlockKey) -> Option<(Chunks, StreamId)> {
        let chunks = self.heap.take_chunks(block)?;
        Some((chunks, self.heap.stream_of(block)))
    }

    /// Chunks were unmapped. Returns their segment.
    pub(crate) fn set_unmapped(&mut self, block: BlockKey, chunks: &Chunks, details: &EntryDetails) -> SegmentKey {
        let segment = self.heap.block(block).segment();
        self.heap.set_unmapped(block, chunks.ptr, chunks.bytes);
        self.counters.released(self.heap.block_pool_of(segment), chunks.bytes);
        let stack = self.heap.segment(segment).stack().cloned();
        self.record(Action::SegmentUnmap, chunks.ptr, chunks.bytes, segment, &details.of_free(stack.as_ref()));
        segment
    }
}
