//! The segments and blocks that the recorded allocator had at one moment, reconstructed from the recording alone.
//!
//! A [`RecordedHeap`] places nothing by itself: an event names the block that was allocated or freed. It runs forward
//! over the events, and backward by undoing them from the segments of the snapshot. On the way it answers which other
//! free blocks a best-fit search would have preferred, from which pools are inferred.
//!
//! Why not the caching allocator's own free lists: those belong to one pool, while here the pools are still unknown and
//! all free blocks of a stream are searched together. They run only forward and treat contradictions as bugs, while
//! here blocks are restored backward with sizes that are corrected later, and a damaged recording may contradict
//! itself.

mod address_map;
mod releasable;
#[cfg(test)]
mod tests;
mod undo;

use std::collections::{BTreeMap, BTreeSet};

use warpool::memory::report::{BlockState, SegmentInfo, SegmentKind};
use warpool::memory::{MemPoolId, SizeRules};

use address_map::{AddressMap, Position};
use releasable::{Releasable, ReleasableBlock};

use super::rules::{MIB, RecordedRules};
use crate::budget::{Budget, Charge, Exceeded};
use crate::steps;

/// The number of a segment in the order of appearance: the same in every pass over the same events.
pub(in crate::replay) type SegmentId = u32;

/// Memory from the driver: a segment, or the whole address range of an expandable segment with what is mapped in it.
#[derive(Clone, Debug)]
pub(in crate::replay) struct RecordedSegment {
    /// The lowest address that it ever had.
    pub base: u64,
    /// The end of the highest address that it has.
    pub end: u64,
    pub stream: u64,
    pub kind: SegmentKind,
    pub expandable: bool,
    /// Its pool, if the recording names it.
    pub pool: Option<MemPoolId>,
    /// Bytes that are mapped; 0 once it is freed.
    pub bytes: u64,
}

/// A block of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::replay) struct RecordedBlock {
    pub bytes: u64,
    pub requested: u64,
    pub state: BlockState,
    pub segment: SegmentId,
    /// The event of its allocation, if it is known.
    pub event: Option<u32>,
}

impl RecordedBlock {
    fn free(bytes: u64, segment: SegmentId) -> Self {
        Self { bytes, requested: 0, state: BlockState::Inactive, segment, event: None }
    }

    /// Whether this is a free block of a segment.
    fn is_free_in(&self, segment: SegmentId) -> bool {
        self.state == BlockState::Inactive && self.segment == segment
    }

    /// The requested bytes, at most the size of the block.
    pub fn bytes_requested(&self) -> u64 {
        self.requested.min(self.bytes)
    }
}

/// Free blocks of each stream and kind, in the order of a search.
type FreeLists = BTreeMap<(u64, SegmentKind), BTreeSet<FreeKey>>;

/// The order of free blocks in a search: by size, then by age of the segment, then by address.
type FreeKey = (u64, SegmentId, u64);

/// The segments and their blocks at one moment.
#[derive(Clone, Debug)]
pub(in crate::replay) struct RecordedHeap {
    rules: RecordedRules,
    /// All segments that ever existed, by id.
    segments: Vec<RecordedSegment>,
    /// Segments that are not freed, by base address.
    segments_by_base: BTreeMap<u64, SegmentId>,
    blocks: AddressMap<RecordedBlock>,
    /// Only in passes that search: keeping them sorted takes as long as the rest of the pass.
    free: Option<FreeLists>,
    bytes_reserved: u64,
    releasable: Releasable,
    charge: Charge,
}

/// Memory of a segment, of a block with its place in a free list, and of a free list, while the tables grow.
const SEGMENT_BYTES: usize = 256;
const BLOCK_BYTES: usize = 208;
const LIST_BYTES: usize = 512;

impl RecordedHeap {
    pub fn new(rules: RecordedRules, budget: &Budget) -> Self {
        Self {
            rules,
            segments: Vec::new(),
            segments_by_base: BTreeMap::new(),
            blocks: AddressMap::default(),
            free: None,
            bytes_reserved: 0,
            releasable: Releasable::default(),
            charge: Charge::new(budget),
        }
    }

    pub fn budget(&self) -> &Budget {
        self.charge.budget()
    }

    /// The state that a snapshot shows.
    pub fn from_snapshot(rules: RecordedRules, segments: &[&SegmentInfo], budget: &Budget) -> Result<Self, Exceeded> {
        let mut heap = Self::new(rules, budget);
        for info in segments {
            budget.check()?;
            let (addr, bytes, pool) = (info.address, info.total_size, Some(info.pool));
            let segment = if info.is_expandable {
                heap.extend_expandable(addr, bytes, info.stream, Some(info.kind), pool, true)
            } else {
                heap.new_segment(addr, bytes, info.stream, info.kind, false, pool)
            };
            for block in &info.blocks {
                let (bytes, requested, state) = (block.size, block.requested_size, block.state);
                heap.insert(block.address, RecordedBlock { bytes, requested, state, segment, event: None });
            }
        }
        Ok(heap)
    }

    /// The expandable segments only, with all their blocks free.
    pub fn expandable_segments_only(&self) -> Self {
        let mut heap = Self::new(self.rules.clone(), self.budget());
        for (addr, block) in self.blocks.iter() {
            let from = self.segment(block.segment);
            if from.expandable {
                let segment = heap.extend_expandable(addr, block.bytes, from.stream, Some(from.kind), from.pool, true);
                heap.insert_free(addr, block.bytes, segment);
            }
        }
        heap
    }

    pub fn rules(&self) -> &RecordedRules {
        &self.rules
    }

    /// The same, to change them where the program did.
    pub fn rules_mut(&mut self) -> &mut RecordedRules {
        &mut self.rules
    }

    pub fn segment(&self, id: SegmentId) -> &RecordedSegment {
        &self.segments[id as usize]
    }

    /// All segments that ever existed, by id.
    pub fn segments(&self) -> &[RecordedSegment] {
        &self.segments
    }

    pub fn bytes_reserved(&self) -> u64 {
        self.bytes_reserved
    }

    /// The blocks by address.
    pub fn blocks(&self) -> &AddressMap<RecordedBlock> {
        &self.blocks
    }

    /// A segment was allocated.
    pub fn add_segment(&mut self, addr: u64, bytes: u64, stream: u64, pool: Option<MemPoolId>) -> SegmentId {
        let segment = self.new_segment(addr, bytes, stream, SizeRules::kind_of_segment(bytes), false, pool);
        self.insert(addr, RecordedBlock::free(bytes, segment));
        segment
    }

    /// A segment was freed. `None` if there is none, or one of its blocks is in use.
    pub fn remove_segment(&mut self, addr: u64, bytes: u64) -> Option<SegmentId> {
        let block = *self.blocks.get(addr)?;
        let segment = block.segment;
        if block.state != BlockState::Inactive || block.bytes != bytes || self.segment(segment).bytes != bytes {
            return None;
        }
        self.remove(addr);
        self.shrink(segment, bytes);
        Some(segment)
    }

    /// Memory was mapped at the end of an expandable segment, or for a new one.
    pub fn map(&mut self, addr: u64, bytes: u64, stream: u64, pool: Option<MemPoolId>) -> SegmentId {
        let kind = SizeRules::kind_of_segment(bytes);
        let segment = self.extend_expandable(addr, bytes, stream, Some(kind), pool, false);
        self.insert_free(addr, bytes, segment);
        segment
    }

    /// A part of an expandable segment was unmapped. `None` if it is not one free block.
    pub fn unmap(&mut self, addr: u64, bytes: u64) -> Option<SegmentId> {
        let segment = self.cut_out(addr, bytes)?;
        self.shrink(segment, bytes);
        Some(segment)
    }

    /// A request got the block at `addr`, at this event. `None` if no free block of sufficient size starts there.
    pub fn alloc(&mut self, addr: u64, requested: u64, event: u32) -> Option<RecordedBlock> {
        let size = self.rules.sizes().round(requested);
        let position = self.blocks.find(addr)?;
        let free = *self.blocks.value(position);
        if free.state != BlockState::Inactive || free.bytes < size {
            return None;
        }
        let rest = free.bytes - size;
        let bytes = if rest > 0 && self.rules.splits(size, rest) { size } else { free.bytes };
        let (state, event) = (BlockState::ActiveAllocated, Some(event));
        let allocated = RecordedBlock { bytes, requested, state, segment: free.segment, event };
        *self.blocks.value_mut(position) = allocated;
        self.unlist(addr, &free);
        if bytes < free.bytes {
            self.insert_following(position, addr + bytes, RecordedBlock::free(rest, free.segment));
        }
        Some(allocated)
    }

    /// A request got a block at `addr` that these rules do not place there: it is cut out of the free block around it.
    /// `None` if there is none.
    pub fn alloc_exactly(&mut self, addr: u64, requested: u64, event: u32) -> Option<RecordedBlock> {
        let bytes = self.rules.sizes().round(requested);
        let segment = self.cut_out(addr, bytes)?;
        let (state, event) = (BlockState::ActiveAllocated, Some(event));
        let block = RecordedBlock { bytes, requested, state, segment, event };
        self.insert(addr, block);
        Some(block)
    }

    /// The block at `addr` was freed, and streams may still use it. `None` if it is not allocated.
    pub fn free_requested(&mut self, addr: u64) -> Option<RecordedBlock> {
        let block = self.blocks.get_mut(addr).filter(|block| block.state == BlockState::ActiveAllocated)?;
        block.state = BlockState::ActivePendingFree;
        Some(*block)
    }

    /// The block at `addr` became free. Returns it as it was before; `None` if it was not in use.
    pub fn free_completed(&mut self, addr: u64) -> Option<RecordedBlock> {
        let position = self.blocks.find(addr)?;
        let block = *self.blocks.value(position);
        if block.state == BlockState::Inactive {
            return None;
        }
        self.join(position);
        Some(block)
    }

    /// Free blocks that a search for `size` would have preferred to the one at `chosen`, or to new memory where that is
    /// `None`, if they were in the same pool: their addresses and segments.
    pub fn preferred_blocks(&self, stream: u64, size: u64, chosen: Option<u64>) -> Vec<(u64, SegmentId)> {
        const COUNT_MAX: usize = 256;
        const EXAMINED_MAX: usize = 4 * COUNT_MAX;
        debug_assert!(self.free.is_some(), "a pass that searches keeps the free lists");
        let lists = self.free.as_ref();
        let Some(free) = lists.and_then(|lists| lists.get(&(stream, SizeRules::kind(size)))) else {
            return Vec::new();
        };
        let chosen = chosen.and_then(|addr| Some((addr, self.blocks.get(addr)?)));
        let chosen_key = chosen.map_or((u64::MAX, 0, 0), |(addr, block)| self.key(addr, block));
        if chosen_key < (size, 0, 0) {
            // Too small for the request: the recording contradicts itself.
            return Vec::new();
        }
        let chosen_size = chosen.map_or(u64::MAX, |(addr, block)| self.extended_size(addr, block));
        free.range((size, 0, 0)..chosen_key)
            // After the first that is too large to serve the request, all are too large.
            .take_while(|&&(bytes, _, _)| self.rules.sizes().may_serve(size, bytes))
            .take(EXAMINED_MAX)
            .inspect(|_| steps::count(1))
            .filter_map(|&(_, _, addr)| Some((addr, self.blocks.get(addr)?)))
            // Among blocks that can be extended, the one that can be extended least is preferred.
            .filter(|&(addr, block)| self.extended_size(addr, block) <= chosen_size)
            .map(|(addr, block)| (addr, block.segment))
            .take(COUNT_MAX)
            .collect()
    }

    /// Keeps the free lists that [searches](Self::preferred_blocks) need, from now on.
    pub fn keep_free_lists(&mut self) {
        let mut lists = FreeLists::new();
        for (addr, block) in self.blocks.iter().filter(|(_, block)| block.state == BlockState::Inactive) {
            lists.entry(self.list_of(block)).or_default().insert(self.key(addr, block));
        }
        self.free = Some(lists);
    }

    /// Tracks the segments of which at least a part could be returned to the driver, from now on.
    pub fn track_releasable(&mut self) {
        let mut releasable = Releasable::tracking();
        for (addr, block) in self.blocks.iter() {
            if block.state == BlockState::Inactive {
                self.note_free(&mut releasable, addr, block);
            }
        }
        self.releasable = releasable;
    }

    /// How often each segment is to be added to or removed from those that are releasable, since the last call.
    pub fn take_releasable_changes(&mut self) -> Vec<(SegmentId, i32)> {
        self.releasable.take_changes()
    }

    /// Whether a large segment that is not expandable is unused.
    pub fn has_unused_large_segment(&self) -> bool {
        self.releasable.has_unused_large()
    }

    /// Bytes that could be returned to the driver, if they are [tracked](Self::track_releasable): segments without
    /// allocations, and chunks of expandable segments without allocations.
    pub fn bytes_releasable(&self) -> u64 {
        self.releasable.bytes()
    }

    fn note_free(&self, releasable: &mut Releasable, addr: u64, block: &RecordedBlock) {
        let segment = self.segment(block.segment);
        let bytes = if segment.expandable {
            let chunk = self.rules.sizes().chunk(segment.kind);
            let first_chunk = addr.checked_sub(segment.base).and_then(|offset| offset.checked_next_multiple_of(chunk));
            let first = first_chunk.and_then(|offset| segment.base.checked_add(offset));
            let bytes = first.and_then(|first| (addr + block.bytes).checked_sub(first));
            bytes.map_or(0, |bytes| bytes - bytes % chunk)
        } else if block.bytes == segment.bytes {
            block.bytes
        } else {
            0
        };
        if bytes > 0 {
            let is_unused_large = segment.kind == SegmentKind::Large && !segment.expandable;
            releasable.add(addr, ReleasableBlock { segment: block.segment, is_unused_large, bytes });
        }
    }

    /// The size of a free block with the unmapped addresses after it.
    fn extended_size(&self, addr: u64, block: &RecordedBlock) -> u64 {
        let segment = self.segment(block.segment);
        if !segment.expandable {
            return block.bytes;
        }
        let end = addr + block.bytes;
        if end == segment.end {
            return u64::MAX;
        }
        let next = self.blocks.first_from(end).map_or(end, |next| self.blocks.address(next));
        next - addr
    }

    fn key(&self, addr: u64, block: &RecordedBlock) -> FreeKey {
        (block.bytes, if self.rules.oldest_segment_first() { block.segment } else { 0 }, addr)
    }

    fn list_of(&self, block: &RecordedBlock) -> (u64, SegmentKind) {
        let segment = self.segment(block.segment);
        (segment.stream, segment.kind)
    }

    /// Inserts a free block, and merges it with free neighbours in its segment.
    fn insert_free(&mut self, addr: u64, bytes: u64, segment: SegmentId) {
        self.insert(
            addr,
            RecordedBlock { state: BlockState::ActivePendingFree, ..RecordedBlock::free(bytes, segment) },
        );
        self.join(self.blocks.find(addr).expect("it was inserted"));
    }

    /// Inserts a block. In a recording that contradicts itself there may be one at this address, which is replaced.
    fn insert(&mut self, addr: u64, block: RecordedBlock) {
        if let Some(before) = self.blocks.insert(addr, block)
            && before.state == BlockState::Inactive
        {
            self.unlist(addr, &before);
        }
        if block.state == BlockState::Inactive {
            self.list(addr, &block);
        }
        self.count_memory();
    }

    /// A block is free now, and may be searched and released.
    fn list(&mut self, addr: u64, block: &RecordedBlock) {
        let (list, key) = (self.list_of(block), self.key(addr, block));
        if let Some(lists) = &mut self.free {
            lists.entry(list).or_default().insert(key);
        }
        if self.releasable.is_tracking() {
            let mut releasable = std::mem::take(&mut self.releasable);
            self.note_free(&mut releasable, addr, block);
            self.releasable = releasable;
        }
    }

    /// A block was free, and is not any more.
    fn unlist(&mut self, addr: u64, block: &RecordedBlock) {
        let (list, key) = (self.list_of(block), self.key(addr, block));
        if let Some(lists) = &mut self.free {
            let was_listed = lists.get_mut(&list).is_some_and(|free| free.remove(&key));
            debug_assert!(was_listed, "a free block is in the free list of its stream and kind");
        }
        self.releasable.remove(addr);
    }

    #[inline]
    fn count_memory(&mut self) {
        let Self { segments, blocks, free, .. } = self;
        let lists = free.as_ref().map_or(0, BTreeMap::len);
        let bytes = segments.len() * SEGMENT_BYTES + blocks.len() * BLOCK_BYTES + lists * LIST_BYTES;
        self.charge.raise_to(bytes as u64);
    }

    fn remove(&mut self, addr: u64) -> RecordedBlock {
        let block = self.blocks.remove(addr).expect("only blocks that were found are removed");
        if block.state == BlockState::Inactive {
            self.unlist(addr, &block);
        }
        block
    }

    /// Inserts a free block that was split off the one at `position`.
    fn insert_following(&mut self, position: Position, addr: u64, block: RecordedBlock) {
        if self.blocks.next(position).is_some_and(|next| self.blocks.address(next) <= addr) {
            // A recording that contradicts itself: blocks overlap.
            self.insert(addr, block);
            return;
        }
        self.blocks.insert_after(position, addr, block);
        self.list(addr, &block);
        self.count_memory();
    }

    /// Makes a block that was in use a part of one free block with its free neighbours in the segment.
    fn join(&mut self, position: Position) {
        let (addr, block) = (self.blocks.address(position), *self.blocks.value(position));
        let segment = block.segment;
        let mut free = RecordedBlock::free(block.bytes, segment);
        if let Some(after) = self.blocks.next(position)
            && self.blocks.address(after) == addr + block.bytes
            && self.blocks.value(after).is_free_in(segment)
        {
            let after = self.blocks.remove_at(after);
            free.bytes += after.bytes;
            self.unlist(addr + block.bytes, &after);
        }
        if let Some(before) = self.blocks.previous(position)
            && let (start, was) = (self.blocks.address(before), *self.blocks.value(before))
            && start + was.bytes == addr
            && was.is_free_in(segment)
        {
            free.bytes += was.bytes;
            *self.blocks.value_mut(before) = free;
            self.blocks.remove_at(position);
            self.unlist(start, &was);
            self.list(start, &free);
        } else {
            *self.blocks.value_mut(position) = free;
            self.list(addr, &free);
        }
    }

    /// Takes a range out of the free block around it. `None` if there is none.
    fn cut_out(&mut self, addr: u64, bytes: u64) -> Option<SegmentId> {
        let (start, block) = self.free_block_around(addr, bytes)?;
        self.remove(start);
        if start < addr {
            self.insert(start, RecordedBlock::free(addr - start, block.segment));
        }
        let (end, block_end) = (addr + bytes, start + block.bytes);
        if end < block_end {
            self.insert(end, RecordedBlock::free(block_end - end, block.segment));
        }
        Some(block.segment)
    }

    /// The free block that contains the whole range.
    fn free_block_around(&self, addr: u64, bytes: u64) -> Option<(u64, RecordedBlock)> {
        let position = self.blocks.last_until(addr)?;
        let (start, block) = (self.blocks.address(position), *self.blocks.value(position));
        (block.state == BlockState::Inactive && addr + bytes <= start + block.bytes).then_some((start, block))
    }

    fn new_segment(
        &mut self,
        addr: u64,
        bytes: u64,
        stream: u64,
        kind: SegmentKind,
        expandable: bool,
        pool: Option<MemPoolId>,
    ) -> SegmentId {
        let id = SegmentId::try_from(self.segments.len()).expect("fewer than 2^32 segments");
        let (base, end) = (addr, addr + bytes);
        let segment = RecordedSegment { base, end, stream, kind, expandable, pool, bytes };
        self.segments.push(segment);
        self.segments_by_base.insert(addr, id);
        self.bytes_reserved = self.bytes_reserved.saturating_add(bytes);
        self.count_memory();
        id
    }

    /// Adds mapped bytes to the expandable segment that they belong to, or makes a new one. `near`: there may be gaps
    /// to the rest of the segment.
    fn extend_expandable(
        &mut self,
        addr: u64,
        bytes: u64,
        stream: u64,
        kind: Option<SegmentKind>,
        pool: Option<MemPoolId>,
        near: bool,
    ) -> SegmentId {
        // Address ranges lie further apart than a device has memory, so what is near belongs to the same range.
        let distance_max = if near { 4096 * MIB } else { 0 };
        let belongs = |segment: &RecordedSegment| {
            segment.expandable
                && segment.stream == stream
                && kind.is_none_or(|kind| kind == segment.kind)
                && (pool.is_none() || segment.pool.is_none() || pool == segment.pool)
                && addr <= segment.end.saturating_add(distance_max)
                && addr + bytes + distance_max >= segment.base
                && (near || addr >= segment.base)
        };
        let below = self.segments_by_base.range(..=addr).next_back();
        let above = self.segments_by_base.range(addr..).next();
        let found = below.into_iter().chain(above).map(|(_, &id)| id).find(|&id| belongs(self.segment(id)));
        let Some(id) = found else {
            let whole_chunks = bytes.is_multiple_of(self.rules.sizes().chunk(SegmentKind::Large));
            let likely_kind = if whole_chunks { SegmentKind::Large } else { SegmentKind::Small };
            return self.new_segment(addr, bytes, stream, kind.unwrap_or(likely_kind), true, pool);
        };
        let segment = &mut self.segments[id as usize];
        let base = segment.base;
        segment.base = base.min(addr);
        segment.end = segment.end.max(addr + bytes);
        segment.bytes = segment.bytes.saturating_add(bytes);
        segment.pool = segment.pool.or(pool);
        if addr < base {
            self.segments_by_base.remove(&base);
            self.segments_by_base.insert(addr, id);
        }
        self.bytes_reserved = self.bytes_reserved.saturating_add(bytes);
        id
    }

    /// Takes `bytes` off a segment, which is freed with its last byte. A recording that contradicts itself may return
    /// more than there is.
    fn shrink(&mut self, id: SegmentId, bytes: u64) {
        self.bytes_reserved = self.bytes_reserved.saturating_sub(bytes);
        let segment = &mut self.segments[id as usize];
        segment.bytes = segment.bytes.saturating_sub(bytes);
        if segment.bytes == 0 {
            self.segments_by_base.remove(&segment.base);
        } else if segment.expandable {
            let last = segment.end.checked_sub(1).and_then(|last| self.blocks.last_until(last));
            let end = last.map(|last| self.blocks.address(last) + self.blocks.value(last).bytes);
            segment.end = end.unwrap_or(0).max(segment.base);
        }
    }
}
