//! An area: the address ranges for the small or the large blocks of a heap.

use std::collections::BTreeMap;
use std::ops::Range;

use super::super::ids::{BlockId, RangeId, RangeInHeap};
use super::bins::Bins;
use super::block::{Blocks, GRAIN, NONE, State};
use super::recent::Recent;
use super::starts::Starts;
use crate::memory::SegmentKind;

#[derive(Debug)]
pub(super) struct Area {
    kind: SegmentKind,
    recent: Recent,
    /// The recent block of a large area that a search would choose, and the version of the bins for which it would.
    best: (BlockId, u64),
    bins: Bins,
    /// By address.
    holes: BTreeMap<u64, BlockId>,
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
    /// Whether it is elastic memory: its blocks are slots, and no call finds them by address.
    is_elastic: bool,
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
    pub(super) fn new(kind: SegmentKind) -> Self {
        Self {
            kind,
            recent: Recent::new(),
            best: (NONE, 0),
            bins: Bins::default(),
            holes: BTreeMap::new(),
            ranges: Vec::new(),
            removed: Vec::new(),
        }
    }

    /// A block of exactly that size that was freed a moment ago. In a large area only if a search would choose it too:
    /// there a bad place costs pages.
    #[inline(always)]
    pub(super) fn take_recent(&mut self, blocks: &Blocks, bytes: u64) -> Option<BlockId> {
        let slot = Recent::slot_of(self.kind, bytes);
        let id = self.recent.get(slot);
        // The place that is no block has no size.
        if blocks.get(id).bytes != bytes {
            return None;
        }
        if self.kind == SegmentKind::Large && self.best != (id, self.bins.version()) {
            if !self.is_best(blocks, id) {
                return None;
            }
            self.best = (id, self.bins.version());
        }
        self.recent.replace(slot, NONE);
        Some(id)
    }

    /// Whether a search for a block of this size would choose the place of this one, which is recent.
    #[inline(never)]
    fn is_best(&self, blocks: &Blocks, id: BlockId) -> bool {
        let block = blocks.get(id);
        let is_free = |id: BlockId| blocks.get(id).state == State::Free;
        if is_free(block.prev) {
            return false;
        }
        let merged = block.grains() + if is_free(block.next) { blocks.get(block.next).grains() } else { 0 };
        !self.bins.has_between(blocks, block.grains(), merged, block.next)
    }

    /// Keeps a freed block for a moment.
    #[inline(always)]
    pub(super) fn put_recent(&mut self, blocks: &mut Blocks, id: BlockId) {
        let block = blocks.get_mut(id);
        (block.state, block.requested) = (State::Recent, 0);
        let before = self.recent.replace(Recent::slot_of(self.kind, block.bytes), id);
        if before != NONE {
            self.put_free(blocks, before);
        }
    }

    pub(super) fn merge_recent(&mut self, blocks: &mut Blocks) {
        while let Some(id) = self.recent.pop() {
            self.put_free(blocks, id);
        }
    }

    /// Makes a block that is in no list a free one, merged with its free neighbours.
    #[inline]
    fn put_free(&mut self, blocks: &mut Blocks, mut id: BlockId) {
        let (prev, next) = (blocks.get(id).prev, blocks.get(id).next);
        if blocks.get(next).state == State::Free {
            self.bins.remove(blocks, next);
            blocks.merge_next(id);
        }
        if blocks.get(prev).state == State::Free {
            self.bins.remove(blocks, prev);
            blocks.merge_next(prev);
            id = prev;
        }
        blocks.get_mut(id).state = State::Free;
        self.bins.insert(blocks, id);
    }

    /// A free block of at least that size, cut to it. The rest stays free.
    #[inline]
    pub(super) fn take_free(&mut self, blocks: &mut Blocks, bytes: u64) -> Option<BlockId> {
        let id = self.bins.take(blocks, bytes / GRAIN)?;
        if blocks.get(id).bytes > bytes {
            let rest = blocks.split(id, bytes);
            self.bins.insert(blocks, rest);
        }
        self.add_start(blocks, id);
        Some(id)
    }

    #[inline]
    fn add_start(&mut self, blocks: &Blocks, id: BlockId) {
        let block = blocks.get(id);
        let range = &mut self.ranges[block.range.index()];
        range.starts.insert(block.addr - range.base, id);
    }

    /// The block that was last allocated at `addr`; it may be another one by now.
    #[inline]
    pub(super) fn started_at(&self, range: RangeInHeap, addr: u64) -> Option<BlockId> {
        let range = self.ranges.get(range.index())?;
        Some(range.starts.get(addr.checked_sub(range.base)?))
    }

    pub(super) fn free_at_least<'a>(&'a self, blocks: &'a Blocks, bytes: u64) -> impl Iterator<Item = BlockId> + 'a {
        self.bins.at_least(blocks, bytes.div_ceil(GRAIN))
    }

    pub(super) fn add_range(&mut self, blocks: &mut Blocks, number: RangeId, base: u64, bytes: u64) -> RangeInHeap {
        let (range, first) = self.push_range(blocks, number, (base, bytes), State::Hole);
        self.holes.insert(base, first);
        range
    }

    fn push_range(
        &mut self,
        blocks: &mut Blocks,
        number: RangeId,
        (base, bytes): (u64, u64),
        state: State,
    ) -> (RangeInHeap, BlockId) {
        let at = self.removed.pop().unwrap_or_else(|| RangeInHeap::at(self.ranges.len()));
        let first = blocks.add(base, bytes, self.kind, at, state);
        let is_segment = state != State::Hole;
        let starts = Starts::new(self.kind, bytes);
        let range = AddressRange { number, base, first, is_segment, is_elastic: false, starts };
        if at.index() < self.ranges.len() {
            self.ranges[at.index()] = range;
        } else {
            self.ranges.push(range);
        }
        (at, first)
    }

    /// Adds a segment, as one block that is in no list.
    pub(super) fn add_segment(
        &mut self,
        blocks: &mut Blocks,
        number: RangeId,
        base: u64,
        bytes: u64,
    ) -> (RangeInHeap, BlockId) {
        self.push_range(blocks, number, (base, bytes), State::Filling)
    }

    /// The segments that are free as a whole.
    pub(super) fn free_segments(&self, blocks: &Blocks) -> Vec<RangeInHeap> {
        let is_free = |range: &AddressRange| {
            let first = blocks.get(range.first);
            range.is_segment && first.state == State::Free && first.next == NONE
        };
        let used = (0..).map(RangeInHeap).zip(&self.ranges).filter(|(_, range)| range.first != NONE);
        used.filter(|(_, range)| is_free(range)).map(|(at, _)| at).collect()
    }

    /// Takes a segment out of all lists, if it is free as a whole. Returns its number on the device, base and size.
    pub(super) fn take_segment(&mut self, blocks: &mut Blocks, at: RangeInHeap) -> Option<(RangeId, u64, u64)> {
        let (number, base, first) = self.ranges.get(at.index()).map(|range| (range.number, range.base, range.first))?;
        if first == NONE || blocks.get(first).state != State::Free || blocks.get(first).next != NONE {
            return None;
        }
        self.bins.remove(blocks, first);
        blocks.get_mut(first).state = State::Filling;
        Some((number, base, blocks.get(first).bytes))
    }

    pub(super) fn put_segment_back(&mut self, blocks: &mut Blocks, at: RangeInHeap) {
        self.put_free(blocks, self.ranges[at.index()].first);
    }

    /// Removes a segment that was taken.
    pub(super) fn remove_segment(&mut self, blocks: &mut Blocks, at: RangeInHeap) {
        let range = &mut self.ranges[at.index()];
        blocks.remove(range.first);
        (range.first, range.is_segment) = (NONE, false);
        self.removed.push(at);
    }

    /// Makes a range in which nothing is elastic memory, or ends that.
    pub(super) fn set_elastic(&mut self, blocks: &Blocks, at: RangeInHeap, is_elastic: bool) {
        let range = &mut self.ranges[at.index()];
        if is_elastic {
            // No call finds its slots: not by an entry of a block that was there before either.
            range.starts = Starts::new(self.kind, blocks.get(range.first).bytes);
        }
        range.is_elastic = is_elastic;
    }

    pub(super) fn is_elastic(&self, at: RangeInHeap) -> bool {
        self.ranges[at.index()].is_elastic
    }

    /// The smallest range of at least `bytes` that is all hole, with its number on the device, base and size.
    pub(super) fn unused_range(&self, blocks: &Blocks, bytes: u64) -> Option<(RangeInHeap, RangeId, u64, u64)> {
        let unused = (0..).map(RangeInHeap).zip(&self.ranges).filter_map(|(at, range)| {
            let first = blocks.try_get(range.first)?;
            let fits = first.state == State::Hole && first.next == NONE && first.bytes >= bytes;
            fits.then_some((at, range.number, range.base, first.bytes))
        });
        unused.min_by_key(|&(_, _, _, bytes)| bytes)
    }

    pub(super) fn is_segment(&self, at: RangeInHeap) -> bool {
        self.ranges[at.index()].is_segment
    }

    /// A free block of at least that size, whole.
    pub(super) fn take_whole(&mut self, blocks: &mut Blocks, bytes: u64) -> Option<BlockId> {
        let id = self.free_at_least(blocks, bytes).min_by_key(|&id| (blocks.get(id).bytes, blocks.get(id).addr))?;
        self.bins.remove(blocks, id);
        self.add_start(blocks, id);
        Some(id)
    }

    /// The first block of a range.
    pub(super) fn first(&self, at: RangeInHeap) -> BlockId {
        self.ranges[at.index()].first
    }

    pub(super) fn firsts(&self) -> impl Iterator<Item = BlockId> {
        self.ranges.iter().map(|range| range.first).filter(|&first| first != NONE)
    }

    /// The runs of free addresses with at least one hole, of at least `bytes` in total, by address.
    pub(super) fn free_runs(&self, blocks: &Blocks, bytes: u64) -> Vec<FreeRun> {
        let (mut runs, mut seen) = (Vec::new(), 0);
        for (&addr, &id) in self.holes.iter() {
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
                let range = self.ranges[hole.range.index()].number;
                runs.push(FreeRun { start, end: seen, holes, first, range });
            }
        }
        runs
    }

    /// Makes the free blocks and holes from `start` to `end` one block, which is in no list. `anchor` is a block of
    /// that run at or before `start`.
    pub(super) fn begin_filling(&mut self, blocks: &mut Blocks, start: u64, end: u64, anchor: BlockId) -> BlockId {
        let mut id = anchor;
        while blocks.get(id).end() <= start {
            id = blocks.get(id).next;
        }
        self.unlist(blocks, id);
        if blocks.get(id).addr < start {
            let rest = blocks.split(id, start - blocks.get(id).addr);
            self.list(blocks, id);
            id = rest;
        }
        while blocks.get(id).end() < end {
            let next = blocks.get(id).next;
            self.unlist(blocks, next);
            if blocks.get(next).end() > end {
                let rest = blocks.split(next, end - blocks.get(next).addr);
                self.list(blocks, rest);
            }
            blocks.merge_next(id);
        }
        if blocks.get(id).end() > end {
            // Before the merges its state was that of all of it.
            let rest = blocks.split(id, end - blocks.get(id).addr);
            self.list(blocks, rest);
        }
        blocks.get_mut(id).state = State::Filling;
        id
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

    /// Divides the block into pieces that end at the given addresses, each with pages or without.
    pub(super) fn end_filling(&mut self, blocks: &mut Blocks, mut id: BlockId, pieces: &[(u64, bool)]) {
        for &(end, has_pages) in pieces {
            let rest = (blocks.get(id).end() > end).then(|| blocks.split(id, end - blocks.get(id).addr));
            if has_pages {
                self.put_free(blocks, id);
            } else {
                self.put_hole(blocks, id);
            }
            let Some(rest) = rest else { break };
            id = rest;
        }
    }

    /// Allocates `bytes` at `addr` of a block that has pages for all of it and is in no list.
    pub(super) fn carve(&mut self, blocks: &mut Blocks, mut id: BlockId, addr: u64, bytes: u64) -> BlockId {
        if blocks.get(id).addr < addr {
            let rest = blocks.split(id, addr - blocks.get(id).addr);
            self.put_free(blocks, id);
            id = rest;
        }
        if blocks.get(id).bytes > bytes {
            let rest = blocks.split(id, bytes);
            self.put_free(blocks, rest);
        }
        self.add_start(blocks, id);
        id
    }

    pub(super) fn make_hole(&mut self, blocks: &mut Blocks, mut id: BlockId, start: u64, end: u64) {
        self.bins.remove(blocks, id);
        if blocks.get(id).addr < start {
            let rest = blocks.split(id, start - blocks.get(id).addr);
            self.bins.insert(blocks, id);
            id = rest;
        }
        if blocks.get(id).end() > end {
            let rest = blocks.split(id, end - start);
            self.bins.insert(blocks, rest);
        }
        self.put_hole(blocks, id);
    }

    /// Makes a block that is in no list a hole, merged with neighbouring holes.
    fn put_hole(&mut self, blocks: &mut Blocks, mut id: BlockId) {
        let (prev, next) = (blocks.get(id).prev, blocks.get(id).next);
        if blocks.get(next).state == State::Hole {
            self.holes.remove(&blocks.get(next).addr);
            blocks.merge_next(id);
        }
        if blocks.get(prev).state == State::Hole {
            blocks.merge_next(prev);
            id = prev;
        }
        blocks.get_mut(id).state = State::Hole;
        self.holes.insert(blocks.get(id).addr, id);
    }

    /// The number on the device of a range.
    pub(super) fn range_number(&self, range: RangeInHeap) -> RangeId {
        self.ranges[range.index()].number
    }

    /// A part of a hole has pages again: it becomes free.
    pub(super) fn end_hole(&mut self, blocks: &mut Blocks, start: u64, end: u64) {
        let (_, &hole) = self.holes.range(..=start).next_back().expect("a hole at that address");
        let id = self.begin_filling(blocks, start, end, hole);
        self.put_free(blocks, id);
    }

    /// Checks the lists of free blocks.
    ///
    /// # Panics
    /// If they do not agree with the blocks.
    pub(super) fn check_bins(&self, blocks: &Blocks) {
        self.bins.check(blocks);
    }

    pub(super) fn recent(&self) -> impl Iterator<Item = BlockId> {
        self.recent.iter()
    }

    pub(super) fn holes(&self) -> &BTreeMap<u64, BlockId> {
        &self.holes
    }
}
