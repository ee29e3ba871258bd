//! The heap of one stream and pool: address ranges, divided into blocks, in an area for small blocks and one for large
//! ones. No driver calls; `pages/` knows which pages are mapped there.
//!
//! A range is blocks without gaps. Free blocks have pages for all of their bytes; holes begin and end at page
//! boundaries and have none of their own. Neighbouring free blocks are merged, neighbouring holes too. A block that
//! was just freed is kept as it is for a moment (*recent*): the next request of its size takes it back.

mod area;
mod bins;
mod block;
mod check;
mod checkpoint;
mod elastic;
mod recent;
mod segments;
mod starts;

use std::sync::Arc;

use rustc_hash::FxHashMap;
use warpool_driver::{DevicePtr, StreamId};

use super::activity::Activity;
use super::counters::HeapCounters;
use super::ids::{BlockId, HeapId, RangeId, RangeInHeap};
use super::last_work::{LastWork, Owner};
use crate::memory::report::Stack;
use crate::memory::stream_fence::StreamUses;
use crate::memory::{Allocation, MemPoolId, SegmentKind};
use area::Area;
use block::{Blocks, NONE};

pub(super) use area::FreeRun;
pub(super) use block::{Block, GRAIN, State};
pub(super) use checkpoint::Kept;

/// Requests up to this size are served by the small area.
pub(super) const SMALL_MAX: u64 = 1 << 20;

/// The size that a request is rounded to.
#[inline]
pub(super) fn rounded(bytes: u64) -> u64 {
    (bytes + (GRAIN - 1)) & !(GRAIN - 1)
}

#[inline]
pub(super) fn kind_of(bytes: u64) -> SegmentKind {
    if bytes <= SMALL_MAX { SegmentKind::Small } else { SegmentKind::Large }
}

#[derive(Debug)]
pub(super) struct Heap {
    /// Whose heap it is. It changes when the heap is used again for another.
    pub(super) stream: StreamId,
    /// The handle of its stream.
    pub(super) stream_raw: u64,
    pub(super) pool: MemPoolId,
    /// Whether it is the first heap of its stream.
    is_first: bool,
    /// Allocated blocks, without pending ones: while there are any, the stream exists.
    live: u32,
    /// 1 if the stream may be destroyed once nothing is allocated: the free of the last block then records an event,
    /// and does not take the hot path. 0 if not.
    live_until_end: u32,
    /// What is known of the stream's last work, once nothing is allocated and the stream may be destroyed.
    last_work: LastWork,
    /// How often the last block was freed.
    ends: u64,
    /// Whether it is in the list of heaps with allocations and frees.
    is_listed: bool,
    /// Its number, and that list.
    number: HeapId,
    activity: Arc<Activity>,
    blocks: Blocks,
    /// Small, large.
    areas: [Area; 2],
    counters: HeapCounters,
    /// Streams that use blocks beside this one, by block.
    uses: FxHashMap<BlockId, StreamUses>,
    /// Call stacks of allocations, while a history is recorded with them.
    stacks: FxHashMap<BlockId, Stack>,
    /// Blocks that its pool has lent to requests of the default pool, with their generations: the free of a block
    /// changes that. Cleared of others when the next one is lent.
    lent: Vec<(BlockId, u32)>,
}

/// A block that is no longer allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Freed {
    Completed,
    /// Other streams may still use it.
    Pending,
}

impl Heap {
    pub(super) fn new(owner: Owner, number: HeapId, activity: Arc<Activity>) -> Self {
        let Owner { stream, stream_raw, pool, is_kept, is_first } = owner;
        Self {
            stream,
            stream_raw,
            pool,
            is_first,
            live: 0,
            live_until_end: u32::from(!is_kept),
            last_work: LastWork::Done,
            ends: 0,
            is_listed: false,
            number,
            activity,
            blocks: Blocks::default(),
            areas: [SegmentKind::Small, SegmentKind::Large].map(Area::new),
            counters: HeapCounters::default(),
            uses: FxHashMap::default(),
            stacks: FxHashMap::default(),
            lent: Vec::new(),
        }
    }

    /// Makes it the heap of another stream and pool. Nothing is allocated in it.
    pub(super) fn set_owner(&mut self, owner: Owner) {
        debug_assert!(self.is_idle());
        let Owner { stream, stream_raw, pool, is_kept, is_first } = owner;
        (self.stream, self.stream_raw, self.pool, self.is_first) = (stream, stream_raw, pool, is_first);
        (self.live_until_end, self.last_work) = (u32::from(!is_kept), LastWork::Done);
    }

    /// Whether it is the first heap of its stream.
    pub(super) fn is_first(&self) -> bool {
        self.is_first
    }

    /// Makes it nobody's, until it is used again.
    pub(super) fn set_no_owner(&mut self) {
        (self.pool, self.last_work) = (MemPoolId { graph: u32::MAX, user: u32::MAX }, LastWork::Done);
    }

    /// Lists it, if something is allocated or freed for the first time since it was last looked at.
    #[inline(always)]
    fn list(&mut self) {
        if !self.is_listed {
            self.is_listed = true;
            self.activity.push(self.number);
        }
    }

    /// It is looked at: the next allocation or free lists it again.
    pub(super) fn unlist(&mut self) {
        self.is_listed = false;
    }

    /// Whether the next free is the last: after it the owner may destroy the stream.
    #[inline(always)]
    fn is_last_free(&self) -> bool {
        self.live == self.live_until_end
    }

    /// What is known of the work that used this heap's memory, if its stream may be destroyed by now; `None` if the
    /// stream exists.
    pub(super) fn last_work(&self) -> Option<&LastWork> {
        (self.live < self.live_until_end).then_some(&self.last_work)
    }

    /// How often the last block was freed.
    pub(super) fn ends(&self) -> u64 {
        self.ends
    }

    /// Stores what is known of the last work, unless the last block was freed again since the time of `ends`.
    pub(super) fn set_last_work(&mut self, ends: u64, last_work: LastWork) {
        if self.ends == ends {
            self.last_work = last_work;
        }
    }

    /// Whether nothing is allocated.
    pub(super) fn has_no_live(&self) -> bool {
        self.live == 0
    }

    /// Whether it is the heap of this stream and pool.
    #[inline]
    pub(super) fn is_of(&self, stream: StreamId, pool: MemPoolId) -> bool {
        self.stream == stream && self.pool == pool
    }

    #[inline]
    fn area(&mut self, kind: SegmentKind) -> (&mut Area, &mut Blocks) {
        (&mut self.areas[kind as usize], &mut self.blocks)
    }

    /// Takes a free block for a request of `requested` bytes.
    #[inline(always)]
    pub(super) fn allocate(&mut self, requested: u64) -> Option<BlockId> {
        let bytes = rounded(requested);
        let id = match self.areas[kind_of(bytes) as usize].take_recent(&self.blocks, bytes) {
            Some(id) => id,
            None => self.search(bytes)?,
        };
        self.mark_allocated(id, requested);
        Some(id)
    }

    #[inline(never)]
    fn search(&mut self, bytes: u64) -> Option<BlockId> {
        let (area, blocks) = self.area(kind_of(bytes));
        // Merged first, so that the best block is found as if all had been merged when they were freed.
        area.merge_recent(blocks);
        area.take_free(blocks, bytes)
    }

    #[inline(always)]
    fn mark_allocated(&mut self, id: BlockId, requested: u64) {
        self.live += 1;
        self.list();
        let block = self.blocks.get_mut(id);
        block.state = State::Allocated;
        block.requested = requested;
        self.counters.allocated(block.kind, block.bytes, requested);
    }

    /// The statistics.
    pub(super) fn counters(&mut self) -> &mut HeapCounters {
        &mut self.counters
    }

    /// The allocated block that starts at `addr`, in that range of that area.
    #[inline]
    pub(super) fn allocated_at(&self, kind: SegmentKind, range: RangeInHeap, addr: u64) -> Option<BlockId> {
        let id = self.areas[kind as usize].started_at(range, addr)?;
        let block = self.blocks.get(id);
        (block.addr == addr && block.state == State::Allocated).then_some(id)
    }

    /// The block of an allocation, if it is still that one.
    #[inline]
    pub(super) fn allocated(&self, id: BlockId, ptr: DevicePtr, generation: u32) -> bool {
        self.blocks.try_get(id).is_some_and(|block| {
            let same_generation =
                block.generation == generation || crate::defect::Defect::PagedGenerationsIgnored.is_on();
            block.addr == ptr.0 && same_generation && block.state == State::Allocated
        })
    }

    #[inline]
    pub(super) fn block(&self, id: BlockId) -> &Block {
        self.blocks.get(id)
    }

    #[inline]
    pub(super) fn is_held(&self, id: BlockId) -> bool {
        self.blocks.get(id).holds > 0
    }

    pub(super) fn add_hold(&mut self, id: BlockId) {
        self.blocks.get_mut(id).holds += 1;
    }

    pub(super) fn end_hold(&mut self, id: BlockId) {
        let block = self.blocks.get_mut(id);
        block.holds = block.holds.saturating_sub(1);
    }

    /// Frees an allocated block.
    pub(super) fn free(&mut self, id: BlockId) -> Freed {
        if self.is_last_free() {
            self.ends += 1;
            self.last_work = LastWork::Unknown;
        }
        let block = self.blocks.get_mut(id);
        if block.has_uses && crate::defect::Defect::PagedFreeForgetsUses.is_on() {
            block.has_uses = false;
            self.uses.remove(&id);
        }
        let block = self.blocks.get_mut(id);
        if !block.has_uses {
            self.stacks.remove(&id);
            self.complete_free(id);
            return Freed::Completed;
        }
        self.live -= 1;
        self.list();
        let block = self.blocks.get_mut(id);
        block.generation = block.generation.wrapping_add(1);
        block.state = State::Pending;
        self.counters.freed(block.kind, block.bytes);
        self.uses.get_mut(&id).expect("a block with uses").mark_freed();
        Freed::Pending
    }

    /// Frees the allocated block that starts at `addr`, unless a graph holds it, other streams use it, or it is the
    /// last of a stream that may then be destroyed. Returns the size that was requested if it did.
    #[inline(always)]
    pub(super) fn free_plain(&mut self, kind: SegmentKind, range: RangeInHeap, addr: u64) -> Option<u64> {
        let id = self.areas[kind as usize].started_at(range, addr)?;
        if self.blocks.get(id).addr == addr { self.free_plain_block(id) } else { None }
    }

    /// The same of a block that may be allocated.
    #[inline(always)]
    pub(super) fn free_plain_block(&mut self, id: BlockId) -> Option<u64> {
        let block = self.blocks.get(id);
        if !block.is_plain() || !self.stacks.is_empty() || self.is_last_free() {
            return None;
        }
        let requested = block.requested;
        self.complete_free(id);
        Some(requested)
    }

    /// Frees a block that only its own stream used.
    #[inline(always)]
    fn complete_free(&mut self, id: BlockId) {
        self.live -= 1;
        self.list();
        let block = self.blocks.get_mut(id);
        block.generation = block.generation.wrapping_add(1);
        self.counters.freed_and_reclaimed(block.kind, block.bytes, block.requested);
        self.areas[block.kind as usize].put_recent(&mut self.blocks, id);
    }

    /// No stream uses a pending block any more.
    fn reclaim(&mut self, id: BlockId) {
        let block = self.blocks.get_mut(id);
        let kind = block.kind;
        self.counters.reclaimed(kind, block.bytes, block.requested);
        block.has_uses = false;
        self.uses.remove(&id);
        self.stacks.remove(&id);
        self.areas[kind as usize].put_recent(&mut self.blocks, id);
        self.list();
    }

    #[inline]
    pub(super) fn set_stack(&mut self, id: BlockId, stack: Option<Stack>) {
        if let Some(stack) = stack {
            self.stacks.insert(id, stack);
        }
    }

    pub(super) fn stack(&self, id: BlockId) -> Option<&Stack> {
        self.stacks.get(&id)
    }

    pub(super) fn add_use(&mut self, id: BlockId, stream: StreamId) {
        if stream != self.stream {
            self.blocks.get_mut(id).has_uses = true;
            self.uses.entry(id).or_default().add(stream);
        }
    }

    pub(super) fn add_uses(&mut self, id: BlockId, streams: &[StreamId]) {
        let own = self.stream;
        let mut others = streams.iter().copied().filter(|&stream| stream != own).peekable();
        if others.peek().is_some() {
            self.blocks.get_mut(id).has_uses = true;
            self.uses.entry(id).or_default().add_all(others);
        }
    }

    /// The uses of a block that is allocated or pending.
    pub(super) fn uses_mut(&mut self, id: BlockId) -> &mut StreamUses {
        self.uses.entry(id).or_default()
    }

    /// Address and requested size of a block, if it is pending.
    pub(super) fn pending(&self, id: BlockId) -> Option<(u64, u64)> {
        let block = self.blocks.try_get(id).filter(|block| block.state == State::Pending)?;
        Some((block.addr, block.requested))
    }

    /// Reclaims a pending block if no stream uses it any more. Returns whether it did.
    pub(super) fn reclaim_if_clear(&mut self, id: BlockId) -> bool {
        let reclaimable = self.blocks.try_get(id).is_some_and(|block| block.state == State::Pending)
            && self.uses.get_mut(&id).is_some_and(StreamUses::take_reclaimable);
        if reclaimable {
            self.reclaim(id);
        }
        reclaimable
    }

    /// Merges what was freed a moment ago with its neighbours.
    pub(super) fn merge_recent(&mut self) {
        for area in &mut self.areas {
            area.merge_recent(&mut self.blocks);
        }
    }

    /// The free blocks that may contain whole pages, smallest first.
    pub(super) fn blocks_with_pages(&self, slot: u64) -> Vec<BlockId> {
        let mut blocks: Vec<BlockId> = self.free_blocks(slot).collect();
        blocks.sort_unstable_by_key(|&id| (self.blocks.get(id).bytes, self.blocks.get(id).addr));
        blocks
    }

    /// The free blocks of at least `bytes` bytes.
    pub(super) fn free_blocks(&self, bytes: u64) -> impl Iterator<Item = BlockId> {
        self.areas.iter().flat_map(move |area| area.free_at_least(&self.blocks, bytes))
    }

    /// The free blocks of the large ones' area.
    pub(super) fn large_free_blocks(&self) -> impl Iterator<Item = BlockId> {
        self.areas[SegmentKind::Large as usize].free_at_least(&self.blocks, GRAIN)
    }

    /// The runs of free addresses that could hold `bytes` if pages were mapped in their holes.
    pub(super) fn free_runs(&self, kind: SegmentKind, bytes: u64) -> Vec<FreeRun> {
        self.areas[kind as usize].free_runs(&self.blocks, bytes)
    }

    /// A new range of addresses, all of it a hole. Returns its number in the area.
    pub(super) fn add_range(&mut self, kind: SegmentKind, number: RangeId, base: u64, bytes: u64) -> RangeInHeap {
        let (area, blocks) = self.area(kind);
        area.add_range(blocks, number, base, bytes)
    }

    /// Takes free addresses, which may be blocks and holes, out of all lists, as one block.
    pub(super) fn begin_filling(&mut self, kind: SegmentKind, start: u64, end: u64, anchor: BlockId) -> BlockId {
        let (area, blocks) = self.area(kind);
        area.begin_filling(blocks, start, end, anchor)
    }

    /// Ends it: `pieces` are its parts by address, each with pages or without.
    pub(super) fn end_filling(&mut self, id: BlockId, pieces: &[(u64, bool)]) {
        let kind = self.blocks.get(id).kind;
        let (area, blocks) = self.area(kind);
        area.end_filling(blocks, id, pieces);
    }

    /// The same if all of it has pages; a part of it is allocated at once. Returns that block.
    pub(super) fn end_filling_allocated(&mut self, id: BlockId, addr: u64, requested: u64) -> BlockId {
        let kind = self.blocks.get(id).kind;
        let (area, blocks) = self.area(kind);
        let id = area.carve(blocks, id, addr, rounded(requested));
        self.mark_allocated(id, requested);
        id
    }

    /// The pages of a part of a free block are taken away: it becomes a hole.
    pub(super) fn make_hole(&mut self, id: BlockId, start: u64, end: u64) {
        let kind = self.blocks.get(id).kind;
        let (area, blocks) = self.area(kind);
        area.make_hole(blocks, id, start, end);
    }

    /// A part of a hole has pages again.
    pub(super) fn end_hole(&mut self, kind: SegmentKind, start: u64, end: u64) {
        let (area, blocks) = self.area(kind);
        area.end_hole(blocks, start, end);
    }

    /// The number on the device of the range of a block.
    pub(super) fn range_of(&self, id: BlockId) -> RangeId {
        let block = self.blocks.get(id);
        self.areas[block.kind as usize].range_number(block.range)
    }

    /// Bytes with pages that are not in use.
    pub(super) fn free_bytes(&self) -> u64 {
        let free = |block: &Block| matches!(block.state, State::Free | State::Recent);
        self.blocks.iter().filter(|(_, block)| free(block)).map(|(_, block)| block.bytes).sum()
    }

    /// Blocks of every range of an area, in the order of addresses within each.
    pub(super) fn ranges(&self, kind: SegmentKind) -> impl Iterator<Item = impl Iterator<Item = (BlockId, &Block)>> {
        self.areas[kind as usize].firsts().map(move |first| self.from(first))
    }

    fn from(&self, first: BlockId) -> impl Iterator<Item = (BlockId, &Block)> {
        let mut id = first;
        std::iter::from_fn(move || {
            let block = self.blocks.try_get(id).filter(|_| id != NONE)?;
            let this = id;
            id = block.next;
            Some((this, block))
        })
    }

    /// Whether nothing is allocated or pending.
    pub(super) fn is_idle(&self) -> bool {
        self.blocks.iter().all(|(_, block)| !matches!(block.state, State::Allocated | State::Pending | State::Filling))
    }

    pub(super) fn allocation(&self, id: BlockId, device: warpool_driver::DeviceId, slot: u64) -> Allocation {
        let block = self.blocks.get(id);
        Allocation {
            ptr: DevicePtr(block.addr),
            bytes: block.bytes,
            bytes_requested: block.requested,
            device,
            stream: self.stream,
            slot,
            generation: block.generation,
        }
    }
}
