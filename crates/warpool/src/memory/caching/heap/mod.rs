//! The memory of one device: segments, the blocks that they are split into, and the free lists. No driver calls, no
//! statistics.
//!
//! A memory pool has two *block pools*, small and large. A block pool has *stream blocks*: the free and the unmapped
//! blocks of one stream. A *segment* belongs to one stream in one block pool.
//!
//! Invariants, checked by [`Heap::check`]:
//! - The blocks of a segment lie side by side without gaps and link to each other.
//! - A block is in a free list exactly if its status is `Free`, in a list of unmapped blocks exactly if it is
//!   `Unmapped`, and among the allocated blocks exactly if it is `Allocated`.
//! - Two free neighbours are always merged, as are two unmapped ones. A block in transit is merged only by the thread
//!   that works on it.

mod block;
mod block_pool;
mod check;
mod free_list;
mod key;
mod mapping;
mod segment;

use std::collections::BTreeMap;
use std::mem;

use rustc_hash::FxHashMap;
use slotmap::{Key, KeyData, SlotMap};
use warpool_driver::{DevicePtr, StreamId};

pub(super) use self::block::{Block, BlockStatus};
use self::block_pool::PoolStreams;
pub(super) use self::block_pool::{BlockPool, StreamBlocks};
pub(super) use self::check::HeapTotals;
use self::free_list::{FreeEntry, FreeKey};
use self::key::StreamBlocksKey;
pub(super) use self::key::{BlockKey, BlockPoolKey, SegmentKey};
pub(super) use self::mapping::Unmapped;
pub(super) use self::segment::{Backing, Chunks, ExpandableSegment, Segment};
use crate::memory::stream_fence::StreamUses;
use crate::memory::{Allocation, FreeBlockOrder, MemPoolId, SegmentKind, SizeRules, Stack};
use crate::{Error, Result, steps};

/// A request, resolved to a block pool and to sizes.
#[derive(Clone, Copy, Debug)]
pub(super) struct BlockRequest {
    pub(super) block_pool: BlockPoolKey,
    pub(super) pool: MemPoolId,
    pub(super) stream: StreamId,
    pub(super) kind: SegmentKind,
    pub(super) requested: u64,
    /// The requested size, rounded.
    pub(super) size: u64,
    /// The size of a segment that would be allocated for it.
    pub(super) segment: u64,
    /// Whether expandable segments may serve it.
    pub(super) expandable: bool,
}

/// A block in transit that was taken for an allocation, and how it was split.
#[derive(Clone, Copy, Debug)]
pub(super) struct Taken {
    pub(super) block: BlockKey,
    /// Whether its segment already had other blocks before.
    pub(super) was_split: bool,
    /// The size of the free block that was split off after it.
    pub(super) rest: Option<u64>,
}

/// Free neighbours that were merged into a block.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Merged {
    pub(super) blocks: u64,
    pub(super) bytes: u64,
}

/// The segments, blocks and free lists of one device.
pub(super) struct Heap {
    blocks: SlotMap<BlockKey, Block>,
    segments: SlotMap<SegmentKey, Segment>,
    stream_blocks: SlotMap<StreamBlocksKey, StreamBlocks>,
    block_pools: SlotMap<BlockPoolKey, BlockPool>,
    /// Allocated blocks by address.
    allocated: FxHashMap<u64, BlockKey>,
    /// The order of free blocks of one size.
    free_block_order: FreeBlockOrder,
    next_registration: u64,
    /// Start and length of every segment.
    ranges: BTreeMap<u64, u64>,
    /// The driver's handles of streams that have segments, with the number of block pools in which they have some.
    stream_handles: FxHashMap<StreamId, (u64, u32)>,
}

impl Heap {
    pub(super) fn new(free_block_order: FreeBlockOrder) -> Self {
        Self {
            blocks: SlotMap::with_key(),
            segments: SlotMap::with_key(),
            stream_blocks: SlotMap::with_key(),
            block_pools: SlotMap::with_key(),
            allocated: FxHashMap::default(),
            free_block_order,
            next_registration: 0,
            ranges: BTreeMap::new(),
            stream_handles: FxHashMap::default(),
        }
    }

    /// Changes the order of free blocks of one size.
    pub(super) fn set_free_block_order(&mut self, order: FreeBlockOrder) {
        if mem::replace(&mut self.free_block_order, order) == order {
            return;
        }
        let keys: Vec<StreamBlocksKey> = self.stream_blocks.keys().collect();
        for key in keys {
            for block in self.stream_blocks[key].free.drain() {
                let (_, free_key) = self.free_key(block);
                self.stream_blocks[key].free.insert(free_key, block);
            }
        }
    }
}

/// Block pools and their streams.
impl Heap {
    pub(super) fn add_block_pool(
        &mut self,
        pool: MemPoolId,
        kind: SegmentKind,
        has_upstream: bool,
        no_split: bool,
    ) -> BlockPoolKey {
        let streams = PoolStreams::default();
        self.block_pools.insert(BlockPool { pool, kind, has_upstream, no_split, streams, searches: 0 })
    }

    /// Removes a block pool without segments.
    pub(super) fn remove_block_pool(&mut self, key: BlockPoolKey) {
        let block_pool = self.block_pools.remove(key).expect("the block pool exists");
        assert!(block_pool.is_empty(), "a block pool with segments cannot be removed");
    }

    #[inline]
    pub(super) fn block_pool(&self, key: BlockPoolKey) -> &BlockPool {
        &self.block_pools[key]
    }

    pub(super) fn block_pools(&self) -> usize {
        self.block_pools.len()
    }

    /// Allows blocks of that block pool to be split from now on.
    pub(super) fn allow_splits(&mut self, key: BlockPoolKey) {
        self.block_pools[key].no_split = false;
    }

    /// Counts a search, for the age of free blocks.
    #[inline]
    pub(super) fn count_search(&mut self, key: BlockPoolKey) {
        self.block_pools[key].searches += 1;
    }

    /// The driver's handle of a stream that has segments.
    pub(super) fn stream_raw(&self, stream: StreamId) -> Option<u64> {
        self.stream_handles.get(&stream).map(|&(raw, _)| raw)
    }

    /// The free blocks of a block pool, by stream and then in the order of its free list.
    pub(super) fn free_blocks(&self, key: BlockPoolKey) -> Vec<BlockKey> {
        let streams = &self.block_pools[key].streams;
        streams.keys().flat_map(|stream_blocks| self.stream_blocks[stream_blocks].free.all()).collect()
    }

    /// The free blocks of one stream in a block pool, largest first.
    pub(super) fn free_blocks_of(
        &self,
        key: BlockPoolKey,
        stream: StreamId,
    ) -> impl Iterator<Item = (BlockKey, &Block)> {
        let stream_blocks = self.block_pools[key].of_stream(stream).map(|key| &self.stream_blocks[key]);
        stream_blocks.into_iter().flat_map(|blocks| blocks.free.all().rev()).map(|key| (key, &self.blocks[key]))
    }

    /// The smallest free blocks of at least `size` bytes of one stream in a block pool.
    pub(super) fn free_blocks_from(
        &self,
        key: BlockPoolKey,
        stream: StreamId,
        size: u64,
    ) -> impl Iterator<Item = (BlockKey, &Block)> {
        let stream_blocks = self.block_pools[key].of_stream(stream).map(|key| &self.stream_blocks[key]);
        stream_blocks
            .into_iter()
            .flat_map(move |blocks| blocks.free.at_least(size))
            .map(|entry| (entry.block, &self.blocks[entry.block]))
    }

    /// How many searches ago a free block became free.
    pub(super) fn age(&self, block: BlockKey) -> u64 {
        let block = &self.blocks[block];
        self.block_pools[self.stream_blocks_of(block.segment).block_pool].searches - block.freed_at_search
    }

    /// The size of the largest free block.
    pub(super) fn largest_free(&self) -> u64 {
        self.stream_blocks.values().map(|blocks| blocks.free.largest()).max().unwrap_or(0)
    }
}

/// Segments.
impl Heap {
    /// Adds a segment with one block, in transit.
    pub(super) fn add_segment(
        &mut self,
        block_pool: BlockPoolKey,
        (stream, stream_raw): (StreamId, u64),
        (ptr, bytes): (u64, u64),
        backing: Backing,
        stack: Option<Stack>,
    ) -> BlockKey {
        let registration = self.next_registration;
        self.next_registration += 1;
        self.ranges.insert(ptr, bytes);
        let stream_blocks = self.stream_blocks_for(block_pool, stream, stream_raw);
        let expandable = matches!(backing, Backing::Expandable(_));
        let kind = self.block_pools[block_pool].kind;
        let first = BlockKey::null();
        let segment = self.segments.insert(Segment { stream_blocks, first, registration, backing, stack });
        let block = self.blocks.insert(Block::new((ptr, bytes), segment, stream_blocks, kind, expandable));
        self.segments[segment].first = block;
        self.stream_blocks[stream_blocks].segments.insert(segment);
        block
    }

    /// Removes a segment that is one block in transit, and returns its memory.
    pub(super) fn remove_segment(&mut self, block: BlockKey) -> Backing {
        let block = self.blocks.remove(block).expect("the block exists");
        assert!(!block.is_split() && block.status == BlockStatus::InTransit, "a segment in use cannot be removed");
        let key = block.segment;
        let segment = self.segments.remove(key).expect("its segment exists");
        self.ranges.remove(&block.ptr);
        let stream_blocks = &mut self.stream_blocks[segment.stream_blocks];
        stream_blocks.segments.remove(&key);
        if stream_blocks.segments.is_empty() {
            let removed = self.stream_blocks.remove(segment.stream_blocks).expect("its stream's blocks exist");
            assert!(removed.free.is_empty() && removed.unmapped.is_empty(), "blocks without a segment");
            self.block_pools[removed.block_pool].streams.remove(removed.stream);
            self.remove_stream_handle(removed.stream);
        }
        segment.backing
    }

    /// Validates the address that an upstream returned: fails if no segment of `bytes` bytes can be at `ptr`.
    pub(super) fn check_untrusted(&self, ptr: DevicePtr, bytes: u64) -> Result<()> {
        let end = ptr.0.checked_add(bytes).filter(|_| !ptr.is_null()).ok_or(Error::ExternalAddress { ptr, bytes })?;
        // Among the segments that start before its end, only the last can overlap it.
        match self.ranges.range(..end).next_back() {
            Some((&start, &length)) if start + length > ptr.0 => {
                Err(Error::ExternalOverlap { ptr, bytes, live: DevicePtr(start), live_bytes: length })
            }
            _ => Ok(()),
        }
    }

    fn remove_stream_handle(&mut self, stream: StreamId) {
        let (_, block_pools) = self.stream_handles.get_mut(&stream).expect("a stream with segments has a handle");
        *block_pools -= 1;
        if *block_pools == 0 {
            self.stream_handles.remove(&stream);
        }
    }

    fn stream_blocks_for(&mut self, block_pool: BlockPoolKey, stream: StreamId, stream_raw: u64) -> StreamBlocksKey {
        if let Some(key) = self.block_pools[block_pool].of_stream(stream) {
            return key;
        }
        let key = self.stream_blocks.insert(StreamBlocks::new(block_pool, stream, stream_raw));
        self.block_pools[block_pool].streams.insert(stream, key);
        self.stream_handles.entry(stream).or_insert((stream_raw, 0)).1 += 1;
        key
    }

    pub(super) fn segment(&self, key: SegmentKey) -> &Segment {
        &self.segments[key]
    }

    pub(super) fn segments(&self) -> impl Iterator<Item = (SegmentKey, &Segment)> {
        self.segments.iter()
    }

    /// The stream of a segment, with its handle and block pool.
    #[inline]
    pub(super) fn stream_blocks_of(&self, segment: SegmentKey) -> &StreamBlocks {
        &self.stream_blocks[self.segments[segment].stream_blocks]
    }

    #[inline]
    pub(super) fn block_pool_of(&self, segment: SegmentKey) -> &BlockPool {
        &self.block_pools[self.stream_blocks_of(segment).block_pool]
    }

    /// The blocks of a segment, by address.
    pub(super) fn blocks_of(&self, segment: &Segment) -> impl Iterator<Item = (BlockKey, &Block)> {
        let mut next = Some(segment.first);
        std::iter::from_fn(move || {
            let key = next?;
            steps::count();
            let block = &self.blocks[key];
            next = block.next;
            Some((key, block))
        })
    }
}

/// Blocks.
impl Heap {
    #[inline]
    pub(super) fn block(&self, key: BlockKey) -> &Block {
        &self.blocks[key]
    }

    /// The block, if it exists. One that another thread works on may be merged into its neighbour at any moment.
    #[inline]
    pub(super) fn get(&self, key: BlockKey) -> Option<&Block> {
        self.blocks.get(key)
    }

    pub(super) fn blocks(&self) -> impl Iterator<Item = (BlockKey, &Block)> {
        self.blocks.iter().inspect(|_| steps::count())
    }

    /// The blocks of a block pool, by stream and then by segment.
    pub(super) fn blocks_in(&self, key: BlockPoolKey) -> impl Iterator<Item = (BlockKey, &Block)> {
        let streams = self.block_pools[key].streams.keys().map(|key| &self.stream_blocks[key]);
        streams.flat_map(|stream| &stream.segments).flat_map(|&segment| self.blocks_of(&self.segments[segment]))
    }

    /// The stream that a block is for.
    #[inline]
    pub(super) fn stream_of(&self, key: BlockKey) -> StreamId {
        self.stream_blocks_of(self.blocks[key].segment).stream
    }

    /// All streams that may use a block and have no fence yet, its own first.
    pub(super) fn streams_of(&self, key: BlockKey) -> impl Iterator<Item = StreamId> + '_ {
        std::iter::once(self.stream_of(key)).chain(self.blocks[key].streams_used())
    }

    /// The allocated block that starts at `ptr`.
    #[inline]
    pub(super) fn allocated_at(&self, ptr: DevicePtr) -> Option<BlockKey> {
        self.allocated.get(&ptr.0).copied()
    }

    /// The block of an allocation, if that allocation still exists.
    #[inline]
    pub(super) fn allocated(&self, allocation: &Allocation) -> Option<BlockKey> {
        let key = BlockKey::from(KeyData::from_ffi(allocation.slot));
        let block = self.blocks.get(key)?;
        let same_generation =
            block.generation == allocation.generation || crate::defect::Defect::GenerationsIgnored.is_on();
        let is_same = same_generation && block.ptr == allocation.ptr.0;
        (block.status == BlockStatus::Allocated && is_same).then_some(key)
    }

    /// The number of a block, for [`allocated`](Self::allocated).
    #[inline]
    pub(super) fn slot(key: BlockKey) -> u64 {
        key.data().as_ffi()
    }

    /// Takes the best free block for a request: the smallest that fits, split if too much of it would be unused.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a call would return the result through memory")]
    pub(super) fn take_best_fit(&mut self, request: &BlockRequest, rules: &SizeRules) -> Option<Taken> {
        let block_pool = &self.block_pools[request.block_pool];
        let (searches, no_split) = (block_pool.searches, block_pool.no_split);
        let stream_blocks = block_pool.of_stream(request.stream)?;
        let free = &self.stream_blocks[stream_blocks].free;
        let mut position = free.first_at_least(request.size);
        let &(mut key, mut found) = free.at(position)?;
        if self.blocks[found].expandable {
            FreeEntry { position, key, block: found } = self.best_fit_of_expandable(stream_blocks, request)?;
        }
        if !rules.may_serve(request.size, key.size) {
            return None;
        }
        let rest = key.size - request.size;
        let found_block = &mut self.blocks[found];
        let was_split = found_block.is_split();
        if no_split || !rules.splits(request.size, rest, request.expandable) {
            found_block.status = BlockStatus::InTransit;
            self.stream_blocks[stream_blocks].free.remove_at(position);
            return Some(Taken { block: found, was_split, rest: None });
        }
        // The rest keeps the entry in the free list.
        found_block.freed_at_search = searches;
        let block = self.split_front(found, request.size);
        if crate::defect::Defect::SplitOverlaps.is_on() && rest >= 1 << 20 {
            self.blocks[block].size += 512;
        }
        let key = FreeKey { size: rest, ptr: key.ptr + request.size, ..key };
        self.stream_blocks[stream_blocks].free.lower_at(position, key);
        Some(Taken { block, was_split, rest: Some(rest) })
    }

    /// The best fit if the smallest free block that fits belongs to an expandable segment.
    fn best_fit_of_expandable(&self, stream_blocks: StreamBlocksKey, request: &BlockRequest) -> Option<FreeEntry> {
        let mut candidates = self.stream_blocks[stream_blocks].free.at_least(request.size);
        if !request.expandable {
            return candidates.find(|candidate| !self.blocks[candidate.block].expandable);
        }
        // The size of a free block includes unmapped addresses after it, so blocks that cannot grow are used first.
        let mut found = candidates.next()?;
        for next in candidates {
            if !self.blocks[found.block].expandable
                || self.size_with_unmapped(next.block) >= self.size_with_unmapped(found.block)
            {
                break;
            }
            found = next;
        }
        Some(found)
    }

    /// The size of a block and of the unmapped block after it.
    fn size_with_unmapped(&self, key: BlockKey) -> u64 {
        let block = &self.blocks[key];
        let behind = block.next.map(|next| &self.blocks[next]).filter(|next| next.status == BlockStatus::Unmapped);
        block.size + behind.map_or(0, |next| next.size)
    }

    fn should_split(&self, found: BlockKey, request: &BlockRequest, rules: &SizeRules) -> bool {
        let rest = self.blocks[found].size - request.size;
        !self.block_pools[request.block_pool].no_split && rules.splits(request.size, rest, request.expandable)
    }

    /// Splits a block in transit for a request, if too much of it would be unused.
    pub(super) fn split_for(&mut self, block: BlockKey, request: &BlockRequest, rules: &SizeRules) -> Taken {
        if self.should_split(block, request, rules) {
            self.split(block, request.size)
        } else {
            Taken { block, was_split: self.blocks[block].is_split(), rest: None }
        }
    }

    /// Splits the first `size` bytes off a block in transit; the rest, if there is any, becomes free.
    pub(super) fn split(&mut self, block: BlockKey, size: u64) -> Taken {
        let was_split = self.blocks[block].is_split();
        if self.blocks[block].size == size {
            return Taken { block, was_split, rest: None };
        }
        let front = self.split_front(block, size);
        if !crate::defect::Defect::SplitLosesRest.is_on() {
            self.put_free(block);
        }
        Taken { block: front, was_split, rest: Some(self.blocks[block].size) }
    }

    /// Splits the first `size` bytes off a block in transit and makes them free; the block keeps the rest. Returns
    /// whether its segment already had other blocks before.
    pub(super) fn free_front(&mut self, block: BlockKey, size: u64) -> bool {
        let was_split = self.blocks[block].is_split();
        let front = self.split_front(block, size);
        self.put_free(front);
        was_split
    }

    /// Takes a free block out of its free list: it is in transit.
    pub(super) fn take_free(&mut self, block: BlockKey) {
        let (stream_blocks, key) = self.free_key(block);
        self.stream_blocks[stream_blocks].free.remove(key);
        self.blocks[block].status = BlockStatus::InTransit;
    }

    /// Puts a block in transit into the free list for its size.
    pub(super) fn put_free(&mut self, block: BlockKey) {
        let (stream_blocks, key) = self.free_key(block);
        let stream_blocks = &mut self.stream_blocks[stream_blocks];
        let entry = &mut self.blocks[block];
        entry.status = BlockStatus::Free;
        entry.freed_at_search = self.block_pools[stream_blocks.block_pool].searches;
        stream_blocks.free.insert(key, block);
    }

    /// Makes a block in transit, or one that was freed, a free one, merged with its free neighbours.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a call would return the result through memory")]
    pub(super) fn merge_and_free(&mut self, key: BlockKey) -> (Merged, &Block) {
        let is_free = |key: &BlockKey| self.blocks[*key].status == BlockStatus::Free;
        let block = &self.blocks[key];
        let ((Some(only), None) | (None, Some(only))) = (block.prev.filter(is_free), block.next.filter(is_free)) else {
            let merged = self.merge_free_neighbours(key);
            self.put_free(key);
            return (merged, &self.blocks[key]);
        };
        // The common case: the neighbour's entry in the free list is reused.
        let (stream_blocks, before) = self.free_key(only);
        let bytes = self.absorb(key, only);
        let stream_blocks = &mut self.stream_blocks[stream_blocks];
        let block = &mut self.blocks[key];
        block.status = BlockStatus::Free;
        block.freed_at_search = self.block_pools[stream_blocks.block_pool].searches;
        stream_blocks.free.raise(before, FreeKey { size: block.size, ptr: block.ptr, ..before }, key);
        (Merged { blocks: 1, bytes }, block)
    }

    /// Makes a block in transit an allocated one.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a call would return the result through memory")]
    pub(super) fn set_allocated(&mut self, key: BlockKey, requested: u64, stack: Option<&Stack>) -> &Block {
        let block = &mut self.blocks[key];
        block.status = BlockStatus::Allocated;
        block.requested = requested;
        block.generation = block.generation.wrapping_add(1);
        if let Some(stack) = stack {
            block.extra.get_or_insert_default().stack = Some(Stack::clone(stack));
        }
        self.allocated.insert(block.ptr, key);
        block
    }

    /// Sets the generation of an allocated block.
    pub(super) fn set_generation(&mut self, key: BlockKey, generation: u32) {
        self.blocks[key].generation = generation;
    }

    /// Marks an allocated block as pending free.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a call would return the result through memory")]
    pub(super) fn set_pending_free(&mut self, key: BlockKey) -> &Block {
        let block = &mut self.blocks[key];
        assert!(block.status == BlockStatus::Allocated, "only an allocated block can be freed");
        block.status = BlockStatus::PendingFree;
        if let Some(extra) = &mut block.extra {
            extra.uses.mark_freed();
        }
        self.allocated.remove(&block.ptr);
        block
    }

    /// A pending free waits for the end of a capture (`deferred`), or no longer does.
    pub(super) fn set_deferred(&mut self, key: BlockKey, deferred: bool) {
        let block = &mut self.blocks[key];
        let (from, to) = match deferred {
            true => (BlockStatus::PendingFree, BlockStatus::Deferred),
            false => (BlockStatus::Deferred, BlockStatus::PendingFree),
        };
        assert!(block.status == from, "only a pending free is deferred");
        block.status = to;
    }

    /// Clears the uses and the call stack of a block whose free is pending.
    pub(super) fn clear_extra(&mut self, key: BlockKey) {
        self.blocks[key].extra = None;
    }

    /// Takes the uses of an allocated block, or of one that was freed and has no fences: the streams that used it, and
    /// those that used it while they captured.
    pub(super) fn take_uses(&mut self, key: BlockKey) -> (Vec<StreamId>, Vec<StreamId>) {
        let Some(extra) = &mut self.blocks[key].extra else { return Default::default() };
        let uses = mem::take(&mut extra.uses);
        (uses.unfenced().to_vec(), mem::take(&mut extra.uses_in_capture))
    }

    /// The number of graphs that hold a block.
    pub(super) fn holds_mut(&mut self, key: BlockKey) -> &mut u32 {
        &mut self.blocks[key].extra.get_or_insert_default().holds
    }

    /// Marks an allocated block as lent to a request of the default pool. Its free clears the flag.
    pub(super) fn set_lent(&mut self, key: BlockKey) {
        self.blocks[key].extra.get_or_insert_default().lent = true;
    }

    /// The streams that used a block, with the state of its fences.
    pub(super) fn uses_mut(&mut self, key: BlockKey) -> &mut StreamUses {
        &mut self.blocks[key].extra.get_or_insert_default().uses
    }

    /// The streams that used a block while they captured.
    pub(super) fn uses_in_capture_mut(&mut self, key: BlockKey) -> &mut Vec<StreamId> {
        &mut self.blocks[key].extra.get_or_insert_default().uses_in_capture
    }

    /// Splits the first `size` bytes off a block, as a new block in transit; the old one keeps the rest. If the old one
    /// is in a list, the caller updates its entry.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a call would return the result through memory")]
    fn split_front(&mut self, from: BlockKey, size: u64) -> BlockKey {
        let rest = &mut self.blocks[from];
        let range = (rest.ptr, size);
        let mut front = Block::new(range, rest.segment, rest.stream_blocks, rest.kind, rest.expandable);
        front.prev = rest.prev;
        front.next = Some(from);
        rest.ptr += size;
        rest.size -= size;
        assert!(rest.size > 0, "nothing is left of a block that was split");
        let (segment, prev) = (rest.segment, rest.prev);
        let front = self.blocks.insert(front);
        self.blocks[from].prev = Some(front);
        match prev {
            Some(prev) => self.blocks[prev].next = Some(front),
            None => self.segments[segment].first = front,
        }
        front
    }

    /// Merges the free neighbours of a block in transit into it.
    fn merge_free_neighbours(&mut self, block: BlockKey) -> Merged {
        let mut merged = Merged::default();
        for neighbour in [self.blocks[block].prev, self.blocks[block].next].into_iter().flatten() {
            if crate::defect::Defect::MergeForgetsNeighbour.is_on() && self.blocks[block].next == Some(neighbour) {
                continue;
            }
            if self.blocks[neighbour].status == BlockStatus::Free {
                self.take_free(neighbour);
                merged.blocks += 1;
                merged.bytes += self.absorb(block, neighbour);
            }
        }
        merged
    }

    /// Merges `other`, a neighbour in no list, into `block`. Returns its size.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a call would return the result through memory")]
    fn absorb(&mut self, block: BlockKey, other: BlockKey) -> u64 {
        let other_block = self.blocks.remove(other).expect("neighbours exist");
        let segment = other_block.segment;
        if self.blocks[block].prev == Some(other) {
            let block_mut = &mut self.blocks[block];
            block_mut.ptr = other_block.ptr;
            block_mut.prev = other_block.prev;
            match other_block.prev {
                Some(prev) => self.blocks[prev].next = Some(block),
                None => self.segments[segment].first = block,
            }
        } else {
            assert!(self.blocks[block].next == Some(other), "only neighbours are merged");
            self.blocks[block].next = other_block.next;
            if let Some(next) = other_block.next {
                self.blocks[next].prev = Some(block);
            }
        }
        self.blocks[block].size += other_block.size;
        other_block.size
    }

    /// The key of a block in the free list that it belongs in.
    #[inline]
    fn free_key(&self, block: BlockKey) -> (StreamBlocksKey, FreeKey) {
        let block = &self.blocks[block];
        let registration = match self.free_block_order {
            FreeBlockOrder::Registration => self.segments[block.segment].registration,
            FreeBlockOrder::Address => 0,
        };
        (block.stream_blocks, FreeKey { size: block.size, registration, ptr: block.ptr })
    }
}
