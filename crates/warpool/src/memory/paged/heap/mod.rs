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
mod owner;
mod recent;
mod starts;

use std::sync::Arc;

use rustc_hash::FxHashMap;
use warpool_driver::{DevicePtr, StreamId};

use super::counters::HeapCounters;
use super::ids::{BlockId, HeapId, RangeInHeap};
use crate::memory::report::Stack;
use crate::memory::stream_fence::StreamUses;
use crate::memory::{Allocation, MemPoolId, SegmentKind};
use area::Area;
use block::Blocks;

pub(super) use area::FreeRun;
pub(super) use block::{Block, GRAIN, State};
pub(super) use checkpoint::Kept;
pub(super) use owner::{Activity, LastWork, Owner};

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
            areas: [Area::new(), Area::new()],
            counters: HeapCounters::default(),
            uses: FxHashMap::default(),
            stacks: FxHashMap::default(),
            lent: Vec::new(),
        }
    }

    /// Takes a free block for a request of `requested` bytes.
    #[inline(always)]
    pub(super) fn allocate(&mut self, requested: u64) -> Option<BlockId> {
        let bytes = rounded(requested);
        let kind = kind_of(bytes);
        let id = match self.take_recent(kind, bytes) {
            Some(id) => id,
            None => self.search(kind, bytes)?,
        };
        self.mark_allocated(id, requested);
        Some(id)
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
        let id = self.started_at(kind, range, addr)?;
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
        let id = self.started_at(kind, range, addr)?;
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
        self.put_recent(id);
    }

    /// No stream uses a pending block any more.
    fn reclaim(&mut self, id: BlockId) {
        let block = self.blocks.get_mut(id);
        self.counters.reclaimed(block.kind, block.bytes, block.requested);
        block.has_uses = false;
        self.uses.remove(&id);
        self.stacks.remove(&id);
        self.put_recent(id);
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

    /// Bytes with pages that are not in use.
    pub(super) fn free_bytes(&self) -> u64 {
        let free = |block: &Block| matches!(block.state, State::Free | State::Recent);
        self.blocks.iter().filter(|(_, block)| free(block)).map(|(_, block)| block.bytes).sum()
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
