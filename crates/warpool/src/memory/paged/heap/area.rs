//! An area: the address ranges for the small or the large blocks of a heap.

use std::collections::BTreeMap;
use std::ops::Range;

use super::super::counters::HeapCounters;
use super::bins::Bins;
use super::block::{Block, Blocks, GRAIN, NONE, State};
use super::recent::{self, Recent, Taken, count_free, slot_of};
use super::starts::Starts;
use crate::memory::SegmentKind;

#[derive(Debug)]
pub(super) struct Area {
    kind: SegmentKind,
    recent: Recent,
    /// The recent block of a large area that a search would choose, and the version of the bins for which it would.
    best: (u32, u64),
    bins: Bins,
    /// By address.
    holes: BTreeMap<u64, u32>,
    ranges: Vec<AddressRange>,
    /// Numbers of removed ranges, to be used again.
    removed: Vec<u32>,
}

#[derive(Debug)]
struct AddressRange {
    /// Its number on the device.
    number: u32,
    base: u64,
    /// Its first block; [`NONE`] if the range was removed.
    first: u32,
    /// Whether it is a segment: backed as a whole, and not by pages.
    is_segment: bool,
    starts: Starts,
}

/// A hole, or a part of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::memory::paged) struct Hole {
    pub(in crate::memory::paged) start: u64,
    pub(in crate::memory::paged) end: u64,
}

/// Neighbouring free blocks and holes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::memory::paged) struct FreeRun {
    pub(in crate::memory::paged) start: u64,
    pub(in crate::memory::paged) end: u64,
    /// Its holes, of those of all runs.
    holes: Range<usize>,
    /// Its first block.
    pub(in crate::memory::paged) first: u32,
    /// The number of its range on the device.
    pub(in crate::memory::paged) range: u32,
}

/// Runs of free addresses, by address.
#[derive(Debug, Default)]
pub(in crate::memory::paged) struct FreeRuns {
    runs: Vec<FreeRun>,
    /// Their holes, by address.
    holes: Vec<Hole>,
}

impl FreeRuns {
    fn clear(&mut self) {
        self.runs.clear();
        self.holes.clear();
    }

    pub(in crate::memory::paged) fn iter(&self) -> impl Iterator<Item = &FreeRun> {
        self.runs.iter()
    }

    pub(in crate::memory::paged) fn holes_of(&self, run: &FreeRun) -> &[Hole] {
        &self.holes[run.holes.clone()]
    }
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

    /// The block of a request of exactly that size that was freed a moment ago, if that is all there is to know: its
    /// free is not counted, and a search was seen to choose it.
    #[inline(always)]
    pub(super) fn take_again<'a>(
        &mut self,
        blocks: &'a mut Blocks,
        requested: u64,
        bytes: u64,
    ) -> Option<(u32, &'a mut Block)> {
        let slot = slot_of(bytes);
        let id = self.recent.peek_uncounted(slot)?;
        let block = blocks.try_get_mut(id)?;
        let is_chosen = self.kind == SegmentKind::Small || self.best == (id, self.bins.version());
        if block.requested != requested || !is_chosen {
            return None;
        }
        self.recent.take(slot);
        Some((id, block))
    }

    /// A block of exactly that size that was freed a moment ago. In a large area only if a search would choose it too:
    /// there a bad place costs pages.
    pub(super) fn take_recent(&mut self, blocks: &Blocks, bytes: u64) -> Option<Taken> {
        let slot = slot_of(bytes);
        let id = self.recent.peek(slot).filter(|&id| blocks.get(id).bytes == bytes)?;
        if self.kind == SegmentKind::Large {
            let best = (id, self.bins.version());
            if self.best != best && !self.is_best(blocks, id) {
                return None;
            }
            self.best = best;
        }
        Some(self.recent.take(slot))
    }

    /// Begins to load the block that a search for that size looks at first.
    #[inline]
    pub(super) fn prefetch_fit(&self, blocks: &Blocks, bytes: u64) {
        blocks.prefetch(self.bins.first_of(bytes / GRAIN));
    }

    /// Whether a search for a block of this size would choose the place of this one, which is recent.
    #[inline(never)]
    fn is_best(&self, blocks: &Blocks, id: u32) -> bool {
        let block = blocks.get(id);
        let is_free = |id: u32| blocks.get(id).state == State::Free;
        if is_free(block.prev) {
            return false;
        }
        let merged = block.grains() + if is_free(block.next) { blocks.get(block.next).grains() } else { 0 };
        !self.bins.has_between(blocks, block.grains(), merged, block.next)
    }

    /// Keeps a freed block for a moment; `uncounted` if its free is to be counted later.
    #[inline(always)]
    pub(super) fn put_recent(&mut self, blocks: &mut Blocks, id: u32, uncounted: bool, counters: &mut HeapCounters) {
        let block = blocks.get_mut(id);
        block.state = State::Recent;
        let slot = slot_of(block.bytes);
        // In a large area every other one is in the way: it might be a neighbour, and a search would find them merged.
        let others = if self.kind == SegmentKind::Large { recent::ALL } else { 1 << slot };
        if self.recent.has_any(others) {
            self.make_room(blocks, slot, counters);
        }
        self.recent.put(slot, id, uncounted);
    }

    /// Keeps a freed block for a moment, with its free to be counted later, if no other is in the way.
    #[inline(always)]
    pub(super) fn put_recent_alone(&mut self, block: &mut Block, id: u32) -> bool {
        let slot = slot_of(block.bytes);
        let others = if self.kind == SegmentKind::Large { recent::ALL } else { 1 << slot };
        let is_alone = !self.recent.has_any(others);
        if is_alone {
            block.state = State::Recent;
            self.recent.put(slot, id, true);
        }
        is_alone
    }

    /// Merges the block that is in a slot; in a large area all of them.
    #[inline(never)]
    fn make_room(&mut self, blocks: &mut Blocks, slot: usize, counters: &mut HeapCounters) {
        if self.kind == SegmentKind::Large {
            self.merge_recent(blocks, counters);
        } else if self.recent.peek(slot).is_some() {
            let before = self.recent.take(slot);
            self.merge_taken(blocks, before, counters);
        }
    }

    pub(super) fn merge_recent(&mut self, blocks: &mut Blocks, counters: &mut HeapCounters) {
        while let Some(taken) = self.recent.pop() {
            self.merge_taken(blocks, taken, counters);
        }
    }

    #[inline]
    fn merge_taken(&mut self, blocks: &mut Blocks, taken: Taken, counters: &mut HeapCounters) {
        let block = blocks.get_mut(taken.id);
        if taken.uncounted {
            count_free(block, counters);
        }
        block.requested = 0;
        self.put_free(blocks, taken.id);
    }

    /// Counts the frees that are not counted yet.
    pub(super) fn settle(&mut self, blocks: &Blocks, counters: &mut HeapCounters) {
        self.recent.settle(blocks, counters);
    }

    /// Makes a block that is in no list a free one, merged with its free neighbours.
    #[inline]
    fn put_free(&mut self, blocks: &mut Blocks, mut id: u32) {
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
    pub(super) fn take_free(&mut self, blocks: &mut Blocks, bytes: u64) -> Option<u32> {
        let id = self.bins.take(blocks, bytes / GRAIN)?;
        if blocks.get(id).bytes > bytes {
            let rest = blocks.split(id, bytes);
            self.bins.insert(blocks, rest);
        }
        self.add_start(blocks, id);
        Some(id)
    }

    #[inline]
    fn add_start(&mut self, blocks: &Blocks, id: u32) {
        let block = blocks.get(id);
        let range = &mut self.ranges[block.range as usize];
        range.starts.insert(block.addr - range.base, id);
    }

    /// The block that was last allocated at `addr`; it may be another one by now.
    #[inline]
    pub(super) fn started_at(&self, range: u32, addr: u64) -> Option<u32> {
        let range = self.ranges.get(range as usize)?;
        Some(range.starts.get(addr.checked_sub(range.base)?))
    }

    pub(super) fn free_at_least<'a>(&'a self, blocks: &'a Blocks, bytes: u64) -> impl Iterator<Item = u32> + 'a {
        self.bins.at_least(blocks, bytes.div_ceil(GRAIN))
    }

    pub(super) fn add_range(&mut self, blocks: &mut Blocks, number: u32, base: u64, bytes: u64) -> u32 {
        let (range, first) = self.push_range(blocks, number, (base, bytes), State::Hole);
        self.holes.insert(base, first);
        range
    }

    fn push_range(&mut self, blocks: &mut Blocks, number: u32, (base, bytes): (u64, u64), state: State) -> (u32, u32) {
        let at = self.removed.pop().unwrap_or_else(|| u32::try_from(self.ranges.len()).expect("few ranges"));
        let first = blocks.add(base, bytes, self.kind, at, state);
        let is_segment = state != State::Hole;
        let range = AddressRange { number, base, first, is_segment, starts: Starts::new(self.kind, bytes) };
        if (at as usize) < self.ranges.len() {
            self.ranges[at as usize] = range;
        } else {
            self.ranges.push(range);
        }
        (at, first)
    }

    /// Adds a segment, as one block that is in no list.
    pub(super) fn add_segment(&mut self, blocks: &mut Blocks, number: u32, base: u64, bytes: u64) -> (u32, u32) {
        self.push_range(blocks, number, (base, bytes), State::Filling)
    }

    /// The segments that are free as a whole.
    pub(super) fn free_segments(&self, blocks: &Blocks) -> Vec<u32> {
        let is_free = |range: &AddressRange| {
            let first = blocks.get(range.first);
            range.is_segment && first.state == State::Free && first.next == NONE
        };
        let used = (0..).zip(&self.ranges).filter(|(_, range)| range.first != NONE);
        used.filter(|(_, range)| is_free(range)).map(|(at, _)| at).collect()
    }

    /// Takes a segment out of all lists, if it is free as a whole. Returns its number on the device, base and size.
    pub(super) fn take_segment(&mut self, blocks: &mut Blocks, at: u32) -> Option<(u32, u64, u64)> {
        let (number, base, first) =
            self.ranges.get(at as usize).map(|range| (range.number, range.base, range.first))?;
        if first == NONE || blocks.get(first).state != State::Free || blocks.get(first).next != NONE {
            return None;
        }
        self.bins.remove(blocks, first);
        blocks.get_mut(first).state = State::Filling;
        Some((number, base, blocks.get(first).bytes))
    }

    pub(super) fn put_segment_back(&mut self, blocks: &mut Blocks, at: u32) {
        self.put_free(blocks, self.ranges[at as usize].first);
    }

    /// Removes a segment that was taken.
    pub(super) fn remove_segment(&mut self, blocks: &mut Blocks, at: u32) {
        let range = &mut self.ranges[at as usize];
        blocks.remove(range.first);
        (range.first, range.is_segment) = (NONE, false);
        self.removed.push(at);
    }

    pub(super) fn is_segment(&self, at: u32) -> bool {
        self.ranges[at as usize].is_segment
    }

    /// A free block of at least that size, whole.
    pub(super) fn take_whole(&mut self, blocks: &mut Blocks, bytes: u64) -> Option<u32> {
        let id = self.free_at_least(blocks, bytes).min_by_key(|&id| (blocks.get(id).bytes, blocks.get(id).addr))?;
        self.bins.remove(blocks, id);
        self.add_start(blocks, id);
        Some(id)
    }

    /// The first block of a range.
    pub(super) fn first(&self, at: u32) -> u32 {
        self.ranges[at as usize].first
    }

    pub(super) fn firsts(&self) -> impl Iterator<Item = u32> {
        self.ranges.iter().map(|range| range.first).filter(|&first| first != NONE)
    }

    /// Finds the runs of free addresses with at least one hole, of at least `bytes` in total.
    pub(super) fn find_free_runs(&self, blocks: &Blocks, bytes: u64, runs: &mut FreeRuns) {
        let mut seen = 0;
        runs.clear();
        for (&addr, &id) in &self.holes {
            if addr < seen {
                continue;
            }
            let hole = blocks.get(id);
            let before = blocks.get(hole.prev);
            let (first, start) = if before.state == State::Free { (hole.prev, before.addr) } else { (id, addr) };
            let holes_before = runs.holes.len();
            // Holes and free blocks alternate: neighbours of one kind are merged.
            let mut block = hole;
            while block.state == State::Hole {
                seen = block.end();
                runs.holes.push(Hole { start: block.addr, end: seen });
                block = blocks.get(block.next);
                if block.state == State::Free {
                    seen = block.end();
                    block = blocks.get(block.next);
                }
            }
            if seen - start >= bytes {
                let holes = holes_before..runs.holes.len();
                let range = self.ranges[hole.range as usize].number;
                runs.runs.push(FreeRun { start, end: seen, holes, first, range });
            } else {
                runs.holes.truncate(holes_before);
            }
        }
    }

    /// Makes the free blocks and holes from `start` to `end` one block, which is in no list. `anchor` is a block of
    /// that run at or before `start`.
    pub(super) fn begin_filling(&mut self, blocks: &mut Blocks, start: u64, end: u64, anchor: u32) -> u32 {
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

    fn list(&mut self, blocks: &mut Blocks, id: u32) {
        match blocks.get(id).state {
            State::Free => self.bins.insert(blocks, id),
            State::Hole => drop(self.holes.insert(blocks.get(id).addr, id)),
            state => unreachable!("a block that is {state:?} is in no list"),
        }
    }

    fn unlist(&mut self, blocks: &mut Blocks, id: u32) {
        match blocks.get(id).state {
            State::Free => self.bins.remove(blocks, id),
            State::Hole => drop(self.holes.remove(&blocks.get(id).addr)),
            state => unreachable!("a block that is {state:?} is in no list"),
        }
    }

    /// Divides the block into pieces that end at the given addresses, each with pages or without.
    pub(super) fn end_filling(&mut self, blocks: &mut Blocks, mut id: u32, pieces: &[(u64, bool)]) {
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
    pub(super) fn carve(&mut self, blocks: &mut Blocks, mut id: u32, addr: u64, bytes: u64) -> u32 {
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

    pub(super) fn make_hole(&mut self, blocks: &mut Blocks, mut id: u32, start: u64, end: u64) {
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
    fn put_hole(&mut self, blocks: &mut Blocks, mut id: u32) {
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
    pub(super) fn range_number(&self, range: u32) -> u32 {
        self.ranges[range as usize].number
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

    pub(super) fn recent(&self) -> impl Iterator<Item = Taken> {
        self.recent.iter()
    }

    pub(super) fn holes(&self) -> &BTreeMap<u64, u32> {
        &self.holes
    }
}
