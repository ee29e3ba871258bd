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
mod prefetch;
mod recent;
mod segments;
mod starts;

use std::sync::Arc;

use rustc_hash::FxHashMap;
use warpool_driver::{DevicePtr, StreamId};

use super::activity::Activity;
use super::counters::HeapCounters;
use super::last_work::{LastWork, Owner};
use crate::memory::report::Stack;
use crate::memory::stream_fence::StreamUses;
use crate::memory::{Allocation, MemPoolId, SegmentKind};
use area::Area;
use block::{Blocks, NONE};

pub(super) use area::{FreeRun, FreeRuns, Hole};
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
    number: u32,
    activity: Arc<Activity>,
    blocks: Blocks,
    /// Small, large.
    areas: [Area; 2],
    counters: HeapCounters,
    /// Streams that use blocks beside this one, by block.
    uses: FxHashMap<u32, StreamUses>,
    /// Call stacks of allocations, while a history is recorded with them.
    stacks: FxHashMap<u32, Stack>,
    /// Blocks that its pool has lent to requests of the default pool, with their generations: the free of a block
    /// changes that. Cleared of others when the next one is lent.
    lent: Vec<(u32, u32)>,
}

/// A free block; in order, the smallest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct FreeBlock {
    bytes: u64,
    addr: u64,
    pub(super) id: u32,
}

/// A block that is no longer allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Freed {
    Completed,
    /// Other streams may still use it.
    Pending,
}

/// What became of a block that was to be freed in the hot path.
pub(super) enum FreedAgain {
    /// It is free.
    Kept,
    /// It can be freed, with more to do.
    Crowded(u32),
    /// It has to be looked at more closely.
    Refused,
}

impl Heap {
    pub(super) fn new(owner: Owner, number: u32, activity: Arc<Activity>) -> Self {
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

    /// Lists it: it is the first allocation or free since it was last looked at.
    #[cold]
    #[inline(never)]
    fn list(&mut self) {
        self.is_listed = true;
        self.activity.push(self.number);
    }

    /// It is looked at: the next allocation or free lists it again.
    pub(super) fn unlist(&mut self) {
        self.is_listed = false;
    }

    /// A block was allocated.
    #[inline(always)]
    fn note_allocated(&mut self) {
        self.live += 1;
        if !self.is_listed {
            self.list();
        }
    }

    /// A block was freed that is not the last one of a stream that may end.
    #[inline(always)]
    fn note_freed(&mut self) {
        self.live -= 1;
        if !self.is_listed {
            self.list();
        }
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
    pub(super) fn allocate(&mut self, requested: u64) -> Option<u32> {
        if let Some((id, _)) = self.allocate_again(requested) {
            return Some(id);
        }
        self.search(requested)
    }

    /// The same, if a block of that size was freed a moment ago and nothing else is to be looked at. It cannot panic,
    /// so the hot path needs no code that would release the lock then.
    #[inline(always)]
    pub(super) fn allocate_again(&mut self, requested: u64) -> Option<(u32, &Block)> {
        let bytes = rounded(requested);
        let kind = kind_of(bytes);
        let (id, block) = self.areas[kind as usize].take_again(&mut self.blocks, requested, bytes)?;
        block.state = State::Allocated;
        self.counters.allocated_again(kind, bytes, requested);
        self.live += 1;
        if !self.is_listed {
            // Not by `list`: the block is borrowed.
            self.is_listed = true;
            self.activity.push(self.number);
        }
        Some((id, block))
    }

    /// The same in every other case.
    #[inline(never)]
    pub(super) fn search(&mut self, requested: u64) -> Option<u32> {
        let bytes = rounded(requested);
        let area = &mut self.areas[kind_of(bytes) as usize];
        area.prefetch_fit(&self.blocks, bytes);
        if let Some(taken) = area.take_recent(&self.blocks, bytes) {
            if taken.uncounted {
                recent::count_free(self.blocks.get(taken.id), &mut self.counters);
            }
            self.mark_allocated(taken.id, requested);
            return Some(taken.id);
        }
        // Merged first, so that the best block is found as if all had been merged when they were freed.
        area.merge_recent(&mut self.blocks, &mut self.counters);
        let id = area.take_free(&mut self.blocks, bytes)?;
        self.mark_allocated(id, requested);
        Some(id)
    }

    #[inline(always)]
    fn mark_allocated(&mut self, id: u32, requested: u64) {
        self.note_allocated();
        let block = self.blocks.get_mut(id);
        block.state = State::Allocated;
        block.requested = requested;
        if self.counters.allocated(block.kind, block.bytes, requested) {
            self.raise_highest();
        }
    }

    #[cold]
    fn raise_highest(&mut self) {
        self.settle();
        self.counters.raise_highest();
    }

    /// Counts all frees.
    fn settle(&mut self) {
        for area in &mut self.areas {
            area.settle(&self.blocks, &mut self.counters);
        }
    }

    /// The statistics.
    pub(super) fn counters(&mut self) -> &mut HeapCounters {
        self.settle();
        &mut self.counters
    }

    /// The allocated block that starts at `addr`, in that range of that area.
    #[inline]
    pub(super) fn allocated_at(&self, kind: SegmentKind, range: u32, addr: u64) -> Option<u32> {
        let id = self.areas[kind as usize].started_at(range, addr)?;
        let block = self.blocks.get(id);
        (block.addr == addr && block.state == State::Allocated).then_some(id)
    }

    /// The block of an allocation, if it is still that one.
    #[inline]
    pub(super) fn allocated(&self, id: u32, ptr: DevicePtr, generation: u32) -> bool {
        self.blocks.try_get(id).is_some_and(|block| {
            let same_generation =
                block.generation == generation || crate::defect::Defect::PagedGenerationsIgnored.is_on();
            block.addr == ptr.0 && same_generation && block.state == State::Allocated
        })
    }

    #[inline]
    pub(super) fn block(&self, id: u32) -> &Block {
        self.blocks.get(id)
    }

    #[inline]
    pub(super) fn is_held(&self, id: u32) -> bool {
        self.blocks.get(id).holds > 0
    }

    pub(super) fn add_hold(&mut self, id: u32) {
        self.blocks.get_mut(id).holds += 1;
    }

    pub(super) fn end_hold(&mut self, id: u32) {
        let block = self.blocks.get_mut(id);
        block.holds = block.holds.saturating_sub(1);
    }

    /// Frees an allocated block.
    pub(super) fn free(&mut self, id: u32) -> Freed {
        if self.is_last_free() {
            self.ends += 1;
            self.last_work = LastWork::Unknown;
        }
        self.note_freed();
        let block = self.blocks.get_mut(id);
        block.generation = block.generation.wrapping_add(1);
        if block.has_uses && crate::defect::Defect::PagedFreeForgetsUses.is_on() {
            block.has_uses = false;
            self.uses.remove(&id);
        }
        if !block.has_uses {
            let kind = block.kind;
            self.stacks.remove(&id);
            self.areas[kind as usize].put_recent(&mut self.blocks, id, true, &mut self.counters);
            return Freed::Completed;
        }
        block.state = State::Pending;
        self.counters.freed(block.kind, block.bytes);
        self.uses.get_mut(&id).expect("a block with uses").mark_freed();
        Freed::Pending
    }

    /// Frees the allocated block that starts at `addr`, unless a graph holds it, other streams use it, or it is the
    /// last of a stream that may then be destroyed. Returns the size that was requested if it did.
    #[inline(always)]
    pub(super) fn free_plain(&mut self, kind: SegmentKind, range: u32, addr: u64) -> Option<u64> {
        let id = self.areas[kind as usize].started_at(range, addr)?;
        if self.blocks.get(id).addr == addr { self.free_plain_block(id) } else { None }
    }

    /// The same, except that a block that cannot be kept for a moment without another one being merged first is not
    /// freed yet. It cannot panic, as [`allocate_again`](Self::allocate_again).
    #[inline(always)]
    pub(super) fn free_again(&mut self, kind: SegmentKind, range: u32, addr: u64) -> FreedAgain {
        let area = &mut self.areas[kind as usize];
        let Some(id) = area.started_at(range, addr) else { return FreedAgain::Refused };
        let Some(block) = self.blocks.try_get_mut(id) else { return FreedAgain::Refused };
        let is_plain = block.addr == addr && block.is_plain() && self.stacks.is_empty();
        if !is_plain || self.live == self.live_until_end {
            return FreedAgain::Refused;
        }
        let (prev, next) = (block.prev, block.next);
        if !area.put_recent_alone(block, id) {
            return FreedAgain::Crowded(id);
        }
        block.generation = block.generation.wrapping_add(1);
        self.note_freed();
        // When it is merged, they are looked at.
        self.blocks.prefetch(prev);
        self.blocks.prefetch(next);
        FreedAgain::Kept
    }

    /// The same of a block that may be allocated.
    #[inline(always)]
    pub(super) fn free_plain_block(&mut self, id: u32) -> Option<u64> {
        let is_last = self.is_last_free();
        let block = self.blocks.get_mut(id);
        if !block.is_plain() || !self.stacks.is_empty() || is_last {
            return None;
        }
        block.generation = block.generation.wrapping_add(1);
        let (requested, prev, next) = (block.requested, block.prev, block.next);
        // When it is merged, they are looked at.
        self.blocks.prefetch(prev);
        self.blocks.prefetch(next);
        let block = self.blocks.get(id);
        self.areas[block.kind as usize].put_recent(&mut self.blocks, id, true, &mut self.counters);
        self.note_freed();
        Some(requested)
    }

    /// No stream uses a pending block any more.
    fn reclaim(&mut self, id: u32) {
        let block = self.blocks.get_mut(id);
        let kind = block.kind;
        self.counters.reclaimed(kind, block.bytes, block.requested);
        block.has_uses = false;
        self.uses.remove(&id);
        self.stacks.remove(&id);
        self.areas[kind as usize].put_recent(&mut self.blocks, id, false, &mut self.counters);
        if !self.is_listed {
            self.list();
        }
    }

    #[inline]
    pub(super) fn set_stack(&mut self, id: u32, stack: Option<Stack>) {
        if let Some(stack) = stack {
            self.stacks.insert(id, stack);
        }
    }

    pub(super) fn stack(&self, id: u32) -> Option<&Stack> {
        self.stacks.get(&id)
    }

    pub(super) fn add_use(&mut self, id: u32, stream: StreamId) {
        if stream != self.stream {
            self.blocks.get_mut(id).has_uses = true;
            self.uses.entry(id).or_default().add(stream);
        }
    }

    pub(super) fn add_uses(&mut self, id: u32, streams: &[StreamId]) {
        let own = self.stream;
        let mut others = streams.iter().copied().filter(|&stream| stream != own).peekable();
        if others.peek().is_some() {
            self.blocks.get_mut(id).has_uses = true;
            self.uses.entry(id).or_default().add_all(others);
        }
    }

    /// The uses of a block that is allocated or pending.
    pub(super) fn uses_mut(&mut self, id: u32) -> &mut StreamUses {
        self.uses.entry(id).or_default()
    }

    /// Address and requested size of a block, if it is pending.
    pub(super) fn pending(&self, id: u32) -> Option<(u64, u64)> {
        let block = self.blocks.try_get(id).filter(|block| block.state == State::Pending)?;
        Some((block.addr, block.requested))
    }

    /// Reclaims a pending block if no stream uses it any more. Returns whether it did.
    pub(super) fn reclaim_if_clear(&mut self, id: u32) -> bool {
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
            area.merge_recent(&mut self.blocks, &mut self.counters);
        }
    }

    /// The free blocks that may contain whole pages, smallest first.
    pub(super) fn blocks_with_pages(&self, slot: u64) -> Vec<FreeBlock> {
        let mut blocks = Vec::new();
        self.find_blocks_with_pages(slot, &mut blocks);
        blocks
    }

    /// The same, in a list that is kept.
    pub(super) fn find_blocks_with_pages(&self, slot: u64, blocks: &mut Vec<FreeBlock>) {
        blocks.clear();
        self.free_blocks_from(slot, |id| {
            let block = self.blocks.get(id);
            blocks.push(FreeBlock { bytes: block.bytes, addr: block.addr, id });
        });
        blocks.sort_unstable();
    }

    /// Calls `each` with every free block of at least `bytes` bytes.
    pub(super) fn free_blocks_from(&self, bytes: u64, mut each: impl FnMut(u32)) {
        for area in &self.areas {
            area.free_at_least(&self.blocks, bytes).for_each(&mut each);
        }
    }

    /// Whether there is a free block of at least `bytes` bytes that has a property.
    pub(super) fn has_free_block(&self, bytes: u64, has: impl Fn(u32) -> bool) -> bool {
        self.areas.iter().any(|area| area.free_at_least(&self.blocks, bytes).any(&has))
    }

    /// Calls `each` with every free block of the large ones' area.
    pub(super) fn large_free_blocks(&self, each: impl FnMut(u32)) {
        self.areas[SegmentKind::Large as usize].free_at_least(&self.blocks, GRAIN).for_each(each);
    }

    /// Finds the runs of free addresses that could hold `bytes` if pages were mapped in their holes.
    pub(super) fn find_free_runs(&self, kind: SegmentKind, bytes: u64, runs: &mut FreeRuns) {
        self.areas[kind as usize].find_free_runs(&self.blocks, bytes, runs);
    }

    /// A new range of addresses, all of it a hole. Returns its number in the area.
    pub(super) fn add_range(&mut self, kind: SegmentKind, number: u32, base: u64, bytes: u64) -> u32 {
        let (area, blocks) = self.area(kind);
        area.add_range(blocks, number, base, bytes)
    }

    /// Takes free addresses, which may be blocks and holes, out of all lists, as one block.
    pub(super) fn begin_filling(&mut self, kind: SegmentKind, start: u64, end: u64, anchor: u32) -> u32 {
        let (area, blocks) = self.area(kind);
        area.begin_filling(blocks, start, end, anchor)
    }

    /// Ends it: `pieces` are its parts by address, each with pages or without.
    pub(super) fn end_filling(&mut self, id: u32, pieces: &[(u64, bool)]) {
        let kind = self.blocks.get(id).kind;
        let (area, blocks) = self.area(kind);
        area.end_filling(blocks, id, pieces);
    }

    /// The same if all of it has pages; a part of it is allocated at once. Returns that block.
    pub(super) fn end_filling_allocated(&mut self, id: u32, addr: u64, requested: u64) -> u32 {
        let kind = self.blocks.get(id).kind;
        let (area, blocks) = self.area(kind);
        let id = area.carve(blocks, id, addr, rounded(requested));
        self.mark_allocated(id, requested);
        id
    }

    /// The pages of a part of a free block are taken away: it becomes a hole.
    pub(super) fn make_hole(&mut self, id: u32, start: u64, end: u64) {
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
    pub(super) fn range_of(&self, id: u32) -> u32 {
        let block = self.blocks.get(id);
        self.areas[block.kind as usize].range_number(block.range)
    }

    /// Bytes with pages that are not in use.
    pub(super) fn free_bytes(&self) -> u64 {
        let free = |block: &Block| matches!(block.state, State::Free | State::Recent);
        self.blocks.iter().filter(|(_, block)| free(block)).map(|(_, block)| block.bytes).sum()
    }

    /// Blocks of every range of an area, in the order of addresses within each.
    pub(super) fn ranges(&self, kind: SegmentKind) -> impl Iterator<Item = impl Iterator<Item = (u32, &Block)>> {
        self.areas[kind as usize].firsts().map(move |first| self.from(first))
    }

    fn from(&self, first: u32) -> impl Iterator<Item = (u32, &Block)> {
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

    pub(super) fn allocation(&self, id: u32, device: warpool_driver::DeviceId, slot: u64) -> Allocation {
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
