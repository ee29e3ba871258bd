//! How blocks are cut, joined, and kept in the free sets of their lanes. The rule: two free neighbours are always
//! joined, and a block in no set (`Standing::Moving`) is never joined by anybody but who moves it.

use super::block::{Block, BlockKey, Standing};
use super::free_set::FreeKey;
use super::state::{LaneKey, State};

impl State {
    /// Cuts `size` bytes off the front of a block that is in no set, as a new block; the old one keeps the rest.
    pub(super) fn cut_front(&mut self, from: BlockKey, size: u64) -> BlockKey {
        let rest = &mut self.blocks[from];
        let mut front = Block::new(rest.ptr, size, rest.segment, rest.kind, rest.growing);
        front.prev = rest.prev;
        front.next = Some(from);
        rest.ptr += size;
        rest.size -= size;
        assert!(rest.size > 0, "nothing is left of a block that was cut");
        let (segment, prev) = (rest.segment, rest.prev);
        let front = self.blocks.insert(front);
        self.blocks[from].prev = Some(front);
        match prev {
            Some(prev) => self.blocks[prev].next = Some(front),
            None => self.segments[segment].first = front,
        }
        front
    }

    /// Makes a block in no set a free one, joined with the free blocks beside it. Says how many those were, and how
    /// much.
    pub(super) fn join_free(&mut self, block: BlockKey) -> (u64, u64) {
        let is_free = |key: &BlockKey| self.blocks[*key].standing == Standing::Free;
        let (prev, next) = (self.blocks[block].prev.filter(is_free), self.blocks[block].next.filter(is_free));
        let ((Some(only), None) | (None, Some(only))) = (prev, next) else {
            let merged = self.merge_free_neighbours(block);
            self.put_free(block);
            return merged;
        };
        // The common case: the neighbour's place in the set is taken over.
        let (lane, before) = self.free_place(only);
        let bytes = self.absorb(block, only);
        let (_, now) = self.free_place(block);
        self.mark_free(block, lane);
        self.lanes[lane].free.raise(before, now, block);
        (1, bytes)
    }

    /// The books of a block that is in the free set of `lane` from now on.
    pub(super) fn mark_free(&mut self, block: BlockKey, lane: LaneKey) {
        let searches = self.bins[self.lanes[lane].bin].searches;
        let entry = &mut self.blocks[block];
        entry.standing = Standing::Free;
        entry.born = searches;
    }

    /// Joins the free blocks beside `block` into it, and says how many and how much.
    pub(super) fn merge_free_neighbours(&mut self, block: BlockKey) -> (u64, u64) {
        let (mut count, mut bytes) = (0, 0);
        for neighbour in [self.blocks[block].prev, self.blocks[block].next].into_iter().flatten() {
            if self.blocks[neighbour].standing == Standing::Free {
                self.take_free(neighbour);
                count += 1;
                bytes += self.absorb(block, neighbour);
            }
        }
        (count, bytes)
    }

    /// Joins `other`, a neighbour that is in no set, into `block`. Returns its size.
    pub(super) fn absorb(&mut self, block: BlockKey, other: BlockKey) -> u64 {
        let other_block = self.blocks.remove(other).expect("neighbours are there");
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
            assert!(self.blocks[block].next == Some(other), "only neighbours are joined");
            self.blocks[block].next = other_block.next;
            if let Some(next) = other_block.next {
                self.blocks[next].prev = Some(block);
            }
        }
        self.blocks[block].size += other_block.size;
        other_block.size
    }

    /// Puts a block into its lane's free set.
    pub(super) fn put_free(&mut self, block: BlockKey) {
        let (lane, key) = self.free_place(block);
        self.mark_free(block, lane);
        self.lanes[lane].free.insert(key, block);
    }

    /// Takes a block out of its lane's free set.
    pub(super) fn take_free(&mut self, block: BlockKey) {
        let (lane, key) = self.free_place(block);
        self.lanes[lane].free.remove(key);
        self.blocks[block].standing = Standing::Moving;
    }

    /// Where a free block stands in its lane.
    pub(super) fn free_place(&self, block: BlockKey) -> (LaneKey, FreeKey) {
        let block = &self.blocks[block];
        let segment = &self.segments[block.segment];
        let registration = if self.policy.by_registration { segment.registration } else { 0 };
        (segment.lane, FreeKey { size: block.size, registration, ptr: block.ptr })
    }

    /// Puts all free blocks in order anew, after the order has changed.
    pub(super) fn reorder_free(&mut self) {
        let lanes: Vec<LaneKey> = self.lanes.keys().collect();
        for lane in lanes {
            for block in self.lanes[lane].free.drain() {
                let (_, key) = self.free_place(block);
                self.lanes[lane].free.insert(key, block);
            }
        }
    }
}
