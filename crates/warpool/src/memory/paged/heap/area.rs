//! An area: the address ranges for the small or the large blocks of a heap, with its free blocks and holes.

use std::collections::BTreeMap;
use std::ops::Range;

use super::super::ids::{BlockId, RangeId, RangeInHeap};
use super::bins::Bins;
use super::block::{Block, Blocks, GRAIN, NONE, State};
use super::recent::Recent;
use super::starts::Starts;
use super::{Heap, kind_of, rounded};
use crate::memory::SegmentKind;

#[derive(Debug)]
pub(super) struct Area {
    pub(super) recent: Recent,
    /// The recent block of a large area that a search would choose, and the version of the bins for which it would.
    best: (BlockId, u64),
    pub(super) bins: Bins,
    /// By address.
    pub(super) holes: BTreeMap<u64, BlockId>,
    ranges: Vec<AddressRange>,
    /// Numbers of removed ranges, to be used again.
    removed: Vec<RangeInHeap>,
}

#[derive(Debug)]
struct AddressRange {
    number: RangeId,
    base: u64,
    /// Its first block; [`NONE`] if the range was removed.
    first: BlockId,
    /// Whether it is a segment: backed as a whole, and not by pages.
    is_segment: bool,
    starts: Starts,
}

/// Neighbouring free blocks and holes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::memory::paged) struct FreeRun {
    pub(in crate::memory::paged) start: u64,
    pub(in crate::memory::paged) end: u64,
    /// Its holes, by address.
    pub(in crate::memory::paged) holes: Vec<Range<u64>>,
    /// Its first block.
    pub(in crate::memory::paged) first: BlockId,
    pub(in crate::memory::paged) range: RangeId,
}

impl Area {
    pub(super) fn new() -> Self {
        Self {
            recent: Recent::new(),
            best: (NONE, 0),
            bins: Bins::default(),
            holes: BTreeMap::new(),
            ranges: Vec::new(),
            removed: Vec::new(),
        }
    }

    fn list(&mut self, blocks: &mut Blocks, id: BlockId) {
        match blocks.get(id).state {
            State::Free => self.bins.insert(blocks, id),
            State::Hole => drop(self.holes.insert(blocks.get(id).addr, id)),
            state => unreachable!("a block that is {state:?} is in no list"),
        }
    }

    fn unlist(&mut self, blocks: &mut Blocks, id: BlockId) {
        match blocks.get(id).state {
            State::Free => self.bins.remove(blocks, id),
            State::Hole => drop(self.holes.remove(&blocks.get(id).addr)),
            state => unreachable!("a block that is {state:?} is in no list"),
        }
    }
}

/// Free blocks.
impl Heap {
    #[inline]
    fn area(&mut self, kind: SegmentKind) -> (&mut Area, &mut Blocks) {
        (&mut self.areas[kind as usize], &mut self.blocks)
    }

    #[inline]
    fn area_of(&mut self, id: BlockId) -> (&mut Area, &mut Blocks) {
        self.area(self.blocks.get(id).kind)
    }

    /// A block of exactly that size that was freed a moment ago. Of large ones only if a search would choose it too:
    /// there a bad place costs pages.
    #[inline(always)]
    pub(super) fn take_recent(&mut self, kind: SegmentKind, bytes: u64) -> Option<BlockId> {
        let slot = Recent::slot_of(kind, bytes);
        let area = &self.areas[kind as usize];
        let id = area.recent.get(slot);
        // The place that is no block has no size.
        if self.blocks.get(id).bytes != bytes {
            return None;
        }
        let best = (id, area.bins.version());
        if kind == SegmentKind::Large && area.best != best {
            if !self.is_best(id) {
                return None;
            }
            self.areas[kind as usize].best = best;
        }
        self.areas[kind as usize].recent.replace(slot, NONE);
        Some(id)
    }

    /// Whether a search for a block of this size would choose the place of this one, which is recent and large.
    #[inline(never)]
    fn is_best(&self, id: BlockId) -> bool {
        let (blocks, block) = (&self.blocks, self.blocks.get(id));
        let is_free = |id: BlockId| blocks.get(id).state == State::Free;
        if is_free(block.prev) {
            return false;
        }
        let merged = block.grains() + if is_free(block.next) { blocks.get(block.next).grains() } else { 0 };
        !self.areas[SegmentKind::Large as usize].bins.has_between(blocks, block.grains(), merged, block.next)
    }

    /// Keeps a freed block for a moment.
    #[inline(always)]
    pub(super) fn put_recent(&mut self, id: BlockId) {
        let block = self.blocks.get_mut(id);
        (block.state, block.requested) = (State::Recent, 0);
        let slot = Recent::slot_of(block.kind, block.bytes);
        let before = self.areas[block.kind as usize].recent.replace(slot, id);
        if before != NONE {
            self.put_free(before);
        }
    }

    /// Merges what was freed a moment ago with its neighbours.
    pub(in crate::memory::paged) fn merge_recent(&mut self) {
        self.merge_recent_of(SegmentKind::Small);
        self.merge_recent_of(SegmentKind::Large);
    }

    fn merge_recent_of(&mut self, kind: SegmentKind) {
        while let Some(id) = self.areas[kind as usize].recent.pop() {
            self.put_free(id);
        }
    }

    /// Makes a block that is in no list a free one, merged with its free neighbours.
    #[inline]
    fn put_free(&mut self, mut id: BlockId) {
        let (area, blocks) = self.area_of(id);
        let (prev, next) = (blocks.get(id).prev, blocks.get(id).next);
        if blocks.get(next).state == State::Free {
            area.bins.remove(blocks, next);
            blocks.merge_next(id);
        }
        if blocks.get(prev).state == State::Free {
            area.bins.remove(blocks, prev);
            blocks.merge_next(prev);
            id = prev;
        }
        blocks.get_mut(id).state = State::Free;
        area.bins.insert(blocks, id);
    }

    /// The smallest free block of at least that size, cut to it. The rest stays free.
    #[inline(never)]
    pub(super) fn search(&mut self, kind: SegmentKind, bytes: u64) -> Option<BlockId> {
        // Merged first, so that the best block is found as if all had been merged when they were freed.
        self.merge_recent_of(kind);
        let (area, blocks) = self.area(kind);
        let id = area.bins.take(blocks, bytes / GRAIN)?;
        if blocks.get(id).bytes > bytes {
            let rest = blocks.split(id, bytes);
            area.bins.insert(blocks, rest);
        }
        self.add_start(id);
        Some(id)
    }

    #[inline]
    fn add_start(&mut self, id: BlockId) {
        let block = self.blocks.get(id);
        let range = &mut self.areas[block.kind as usize].ranges[block.range.index()];
        range.starts.insert(block.addr - range.base, id);
    }

    /// The block that was last allocated at `addr`; it may be another one by now.
    #[inline]
    pub(super) fn started_at(&self, kind: SegmentKind, range: RangeInHeap, addr: u64) -> Option<BlockId> {
        let range = self.areas[kind as usize].ranges.get(range.index())?;
        Some(range.starts.get(addr.checked_sub(range.base)?))
    }

    /// The free blocks that may contain whole pages, smallest first.
    pub(in crate::memory::paged) fn blocks_with_pages(&self, slot: u64) -> Vec<BlockId> {
        let mut blocks: Vec<BlockId> = self.free_blocks(slot).collect();
        blocks.sort_unstable_by_key(|&id| (self.blocks.get(id).bytes, self.blocks.get(id).addr));
        blocks
    }

    /// The free blocks of at least `bytes` bytes.
    pub(in crate::memory::paged) fn free_blocks(&self, bytes: u64) -> impl Iterator<Item = BlockId> {
        self.areas.iter().flat_map(move |area| area.bins.at_least(&self.blocks, bytes.div_ceil(GRAIN)))
    }

    /// The free blocks of the large ones' area.
    pub(in crate::memory::paged) fn large_free_blocks(&self) -> impl Iterator<Item = BlockId> {
        self.areas[SegmentKind::Large as usize].bins.at_least(&self.blocks, 1)
    }
}

/// Ranges of addresses.
impl Heap {
    /// A new range of addresses, all of it a hole. Returns its number in the area.
    pub(in crate::memory::paged) fn add_range(
        &mut self,
        kind: SegmentKind,
        number: RangeId,
        base: u64,
        bytes: u64,
    ) -> RangeInHeap {
        let (range, first) = self.push_range(kind, number, (base, bytes), State::Hole);
        self.areas[kind as usize].holes.insert(base, first);
        range
    }

    fn push_range(
        &mut self,
        kind: SegmentKind,
        number: RangeId,
        (base, bytes): (u64, u64),
        state: State,
    ) -> (RangeInHeap, BlockId) {
        let (area, blocks) = self.area(kind);
        let at = area.removed.pop().unwrap_or_else(|| RangeInHeap::at(area.ranges.len()));
        let first = blocks.add(base, bytes, kind, at, state);
        let is_segment = state != State::Hole;
        let range = AddressRange { number, base, first, is_segment, starts: Starts::new(kind, bytes) };
        if at.index() < area.ranges.len() {
            area.ranges[at.index()] = range;
        } else {
            area.ranges.push(range);
        }
        (at, first)
    }

    /// The number on the device of the range of a block.
    pub(in crate::memory::paged) fn range_of(&self, id: BlockId) -> RangeId {
        let block = self.blocks.get(id);
        self.areas[block.kind as usize].ranges[block.range.index()].number
    }

    /// Blocks of every range of an area, in the order of addresses within each.
    pub(in crate::memory::paged) fn ranges(
        &self,
        kind: SegmentKind,
    ) -> impl Iterator<Item = impl Iterator<Item = (BlockId, &Block)>> {
        let ranges = self.areas[kind as usize].ranges.iter().filter(|range| range.first != NONE);
        ranges.map(|range| self.blocks.from(range.first))
    }

    /// The blocks of a range, in the order of addresses.
    pub(super) fn blocks_in(&self, kind: SegmentKind, at: RangeInHeap) -> impl Iterator<Item = (BlockId, &Block)> {
        self.blocks.from(self.areas[kind as usize].ranges[at.index()].first)
    }
}

/// Segments: ranges that are backed as a whole, and not by pages.
impl Heap {
    /// Adds a segment, and allocates from it at once: all of it if it is not to be split. Returns its number in the
    /// area, and the block.
    pub(in crate::memory::paged) fn add_segment(
        &mut self,
        kind: SegmentKind,
        number: RangeId,
        base: u64,
        bytes: u64,
        requested: u64,
        no_split: bool,
    ) -> (RangeInHeap, BlockId) {
        let (range, id) = self.push_range(kind, number, (base, bytes), State::Filling);
        (range, self.carve(id, base, if no_split { bytes } else { rounded(requested) }, requested))
    }

    /// Allocates from free blocks: a whole free segment, if those are not to be split.
    pub(in crate::memory::paged) fn allocate_as(&mut self, requested: u64, no_split: bool) -> Option<BlockId> {
        if !no_split {
            return self.allocate(requested);
        }
        self.merge_recent();
        let (area, blocks) = self.area(kind_of(rounded(requested)));
        let fitting = area.bins.at_least(blocks, rounded(requested) / GRAIN);
        let id = fitting.min_by_key(|&id| (blocks.get(id).bytes, blocks.get(id).addr))?;
        area.bins.remove(blocks, id);
        self.add_start(id);
        self.mark_allocated(id, requested);
        Some(id)
    }

    /// The segments of a kind that are free as a whole.
    pub(in crate::memory::paged) fn free_segments(&mut self, kind: SegmentKind) -> Vec<RangeInHeap> {
        self.merge_recent();
        let numbers = (0..self.areas[kind as usize].ranges.len()).map(RangeInHeap::at);
        numbers.filter(|&at| self.free_segment(kind, at).is_some()).collect()
    }

    /// The block of a segment that is free as a whole.
    fn free_segment(&self, kind: SegmentKind, at: RangeInHeap) -> Option<BlockId> {
        let range = self.areas[kind as usize].ranges.get(at.index())?;
        let first = self.blocks.get(range.first);
        (range.is_segment && first.state == State::Free && first.next == NONE).then_some(range.first)
    }

    /// Takes a segment out of all lists, if it is free as a whole. Returns its number on the device, base and size.
    pub(in crate::memory::paged) fn take_segment(
        &mut self,
        kind: SegmentKind,
        at: RangeInHeap,
    ) -> Option<(RangeId, u64, u64)> {
        let first = self.free_segment(kind, at)?;
        let (area, blocks) = self.area(kind);
        area.bins.remove(blocks, first);
        blocks.get_mut(first).state = State::Filling;
        Some((self.range_of(first), self.blocks.get(first).addr, self.blocks.get(first).bytes))
    }

    /// A segment that was taken is free again.
    pub(in crate::memory::paged) fn put_segment_back(&mut self, kind: SegmentKind, at: RangeInHeap) {
        self.put_free(self.areas[kind as usize].ranges[at.index()].first);
    }

    /// Removes a segment that was taken.
    pub(in crate::memory::paged) fn remove_segment(&mut self, kind: SegmentKind, at: RangeInHeap) {
        let (area, blocks) = self.area(kind);
        let range = &mut area.ranges[at.index()];
        blocks.remove(range.first);
        (range.first, range.is_segment) = (NONE, false);
        area.removed.push(at);
    }

    /// Whether a block is in a segment.
    pub(in crate::memory::paged) fn is_in_segment(&self, id: BlockId) -> bool {
        let block = self.blocks.get(id);
        self.areas[block.kind as usize].ranges[block.range.index()].is_segment
    }
}

/// Holes, and filling them with pages.
impl Heap {
    /// The runs of free addresses with at least one hole, of at least `bytes` in total, by address.
    pub(in crate::memory::paged) fn free_runs(&self, kind: SegmentKind, bytes: u64) -> Vec<FreeRun> {
        let (blocks, mut runs, mut seen) = (&self.blocks, Vec::new(), 0);
        for (&addr, &id) in &self.areas[kind as usize].holes {
            if addr < seen {
                continue;
            }
            let hole = blocks.get(id);
            let before = blocks.get(hole.prev);
            let (first, start) = if before.state == State::Free { (hole.prev, before.addr) } else { (id, addr) };
            let mut holes = Vec::new();
            // Holes and free blocks alternate: neighbours of one kind are merged.
            let mut block = hole;
            while block.state == State::Hole {
                seen = block.end();
                holes.push(block.addr..seen);
                block = blocks.get(block.next);
                if block.state == State::Free {
                    seen = block.end();
                    block = blocks.get(block.next);
                }
            }
            if seen - start >= bytes {
                runs.push(FreeRun { start, end: seen, holes, first, range: self.range_of(id) });
            }
        }
        runs
    }

    /// Makes the free blocks and holes from `start` to `end` one block, which is in no list. `anchor` is a block of
    /// that run at or before `start`.
    pub(in crate::memory::paged) fn begin_filling(&mut self, start: u64, end: u64, anchor: BlockId) -> BlockId {
        let (area, blocks) = self.area_of(anchor);
        let mut id = anchor;
        while blocks.get(id).end() <= start {
            id = blocks.get(id).next;
        }
        area.unlist(blocks, id);
        if blocks.get(id).addr < start {
            let rest = blocks.split(id, start - blocks.get(id).addr);
            area.list(blocks, id);
            id = rest;
        }
        while blocks.get(id).end() < end {
            let next = blocks.get(id).next;
            area.unlist(blocks, next);
            if blocks.get(next).end() > end {
                let rest = blocks.split(next, end - blocks.get(next).addr);
                area.list(blocks, rest);
            }
            blocks.merge_next(id);
        }
        if blocks.get(id).end() > end {
            // Before the merges its state was that of all of it.
            let rest = blocks.split(id, end - blocks.get(id).addr);
            area.list(blocks, rest);
        }
        blocks.get_mut(id).state = State::Filling;
        id
    }

    /// Ends it: `pieces` are its parts by address, each with pages or without.
    pub(in crate::memory::paged) fn end_filling(&mut self, mut id: BlockId, pieces: &[(u64, bool)]) {
        for &(end, has_pages) in pieces {
            let block = self.blocks.get(id);
            let rest = (block.end() > end).then_some(end - block.addr).map(|bytes| self.blocks.split(id, bytes));
            if has_pages {
                self.put_free(id);
            } else {
                self.put_hole(id);
            }
            let Some(rest) = rest else { break };
            id = rest;
        }
    }

    /// Allocates `bytes` at `addr` of a block that has pages for all of it and is in no list. The rest is free.
    pub(in crate::memory::paged) fn carve(
        &mut self,
        mut id: BlockId,
        addr: u64,
        bytes: u64,
        requested: u64,
    ) -> BlockId {
        let before = addr - self.blocks.get(id).addr;
        if before > 0 {
            let rest = self.blocks.split(id, before);
            self.put_free(id);
            id = rest;
        }
        if self.blocks.get(id).bytes > bytes {
            let rest = self.blocks.split(id, bytes);
            self.put_free(rest);
        }
        self.add_start(id);
        self.mark_allocated(id, requested);
        id
    }

    /// The pages of a part of a free block are taken away: it becomes a hole.
    pub(in crate::memory::paged) fn make_hole(&mut self, mut id: BlockId, start: u64, end: u64) {
        let (area, blocks) = self.area_of(id);
        area.bins.remove(blocks, id);
        if blocks.get(id).addr < start {
            let rest = blocks.split(id, start - blocks.get(id).addr);
            area.bins.insert(blocks, id);
            id = rest;
        }
        if blocks.get(id).end() > end {
            let rest = blocks.split(id, end - start);
            area.bins.insert(blocks, rest);
        }
        self.put_hole(id);
    }

    /// Makes a block that is in no list a hole, merged with neighbouring holes.
    fn put_hole(&mut self, mut id: BlockId) {
        let (area, blocks) = self.area_of(id);
        let (prev, next) = (blocks.get(id).prev, blocks.get(id).next);
        if blocks.get(next).state == State::Hole {
            area.holes.remove(&blocks.get(next).addr);
            blocks.merge_next(id);
        }
        if blocks.get(prev).state == State::Hole {
            blocks.merge_next(prev);
            id = prev;
        }
        blocks.get_mut(id).state = State::Hole;
        area.holes.insert(blocks.get(id).addr, id);
    }

    /// A part of a hole has pages again: it becomes free.
    pub(in crate::memory::paged) fn end_hole(&mut self, kind: SegmentKind, start: u64, end: u64) {
        let before = self.areas[kind as usize].holes.range(..=start).next_back();
        let hole = *before.expect("a hole at that address").1;
        let id = self.begin_filling(start, end, hole);
        self.put_free(id);
    }
}
