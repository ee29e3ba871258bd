//! Blocks: what the address ranges of a heap are divided into.

use super::super::ids::{BlockId, RangeInHeap};
use crate::memory::SegmentKind;

/// The unit of sizes and addresses.
pub(in crate::memory::paged) const GRAIN: u64 = 512;

/// No block. There is a place with this number, which is never in use: it can be written instead of a neighbour that a
/// block does not have, without a branch.
pub(super) const NONE: BlockId = BlockId(0);

/// What a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::memory::paged) enum State {
    /// Allocated.
    Allocated,
    /// Freed, while other streams may still use it.
    Pending,
    /// Freed a moment ago, not merged with its neighbours yet.
    Recent,
    /// Free, with pages for all of it; in a bin.
    Free,
    /// Addresses without pages of their own.
    Hole,
    /// Free addresses that a thread is getting pages for.
    Filling,
    /// Not a block: this number can be used for a new one.
    Unused,
}

#[derive(Debug)]
#[repr(align(64))]
pub(in crate::memory::paged) struct Block {
    pub(super) addr: u64,
    pub(super) bytes: u64,
    /// The requested size; 0 unless it is allocated or pending.
    pub(super) requested: u64,
    /// Neighbours in the same range, by address.
    pub(super) prev: BlockId,
    pub(super) next: BlockId,
    /// Neighbours in the list of a bin.
    pub(super) bin_prev: BlockId,
    pub(super) bin_next: BlockId,
    /// The bin, while it is in one.
    pub(super) bin: u16,
    /// Tells allocations of the same block apart.
    pub(super) generation: u32,
    /// How many graphs hold it.
    pub(super) holds: u32,
    /// Its range, in its area.
    pub(super) range: RangeInHeap,
    pub(super) state: State,
    pub(super) kind: SegmentKind,
    /// Whether other streams use it.
    pub(super) has_uses: bool,
}

impl Block {
    /// Without neighbours.
    #[inline]
    fn new(addr: u64, bytes: u64, kind: SegmentKind, range: RangeInHeap, state: State) -> Self {
        Self {
            addr,
            bytes,
            requested: 0,
            prev: NONE,
            next: NONE,
            bin_prev: NONE,
            bin_next: NONE,
            bin: 0,
            generation: 1,
            holds: 0,
            range,
            state,
            kind,
            has_uses: false,
        }
    }

    #[inline]
    pub(super) fn grains(&self) -> u64 {
        self.bytes / GRAIN
    }

    /// Whether it is allocated, and only its own stream uses it.
    #[inline]
    pub(super) fn is_plain(&self) -> bool {
        self.state == State::Allocated && !self.has_uses && self.holds == 0
    }

    #[inline]
    pub(super) fn end(&self) -> u64 {
        self.addr + self.bytes
    }

    #[inline]
    pub(in crate::memory::paged) fn addr(&self) -> u64 {
        self.addr
    }

    #[inline]
    pub(in crate::memory::paged) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(in crate::memory::paged) fn requested(&self) -> u64 {
        self.requested
    }

    pub(in crate::memory::paged) fn state(&self) -> State {
        self.state
    }
}

/// All blocks of a heap, by number. Numbers are used again, with the next generation.
#[derive(Debug)]
pub(super) struct Blocks {
    all: Vec<Block>,
    /// The first unused number, or [`NONE`]; each has the next one as `next`.
    unused: BlockId,
}

impl Default for Blocks {
    fn default() -> Self {
        // Room for a page of them, so that the first ones of two heaps are not neighbours in memory.
        let mut all = Vec::with_capacity(64);
        all.push(Block::new(0, 0, SegmentKind::Small, RangeInHeap(0), State::Unused));
        Self { all, unused: NONE }
    }
}

impl Blocks {
    #[inline]
    pub(super) fn get(&self, id: BlockId) -> &Block {
        &self.all[id.index()]
    }

    #[inline]
    pub(super) fn get_mut(&mut self, id: BlockId) -> &mut Block {
        &mut self.all[id.index()]
    }

    /// The block, if there is one with that number.
    #[inline]
    pub(super) fn try_get(&self, id: BlockId) -> Option<&Block> {
        self.all.get(id.index())
    }

    /// A new block without neighbours.
    #[inline]
    pub(super) fn add(
        &mut self,
        addr: u64,
        bytes: u64,
        kind: SegmentKind,
        range: RangeInHeap,
        state: State,
    ) -> BlockId {
        let id = self.unused;
        if id == NONE {
            return self.push(Block::new(addr, bytes, kind, range, state));
        }
        let block = self.get_mut(id);
        let (generation, next) = (block.generation, block.next);
        *block = Block { generation, ..Block::new(addr, bytes, kind, range, state) };
        self.unused = next;
        id
    }

    #[cold]
    fn push(&mut self, block: Block) -> BlockId {
        let id = BlockId::at(self.all.len());
        self.all.push(block);
        id
    }

    #[inline]
    pub(super) fn remove(&mut self, id: BlockId) {
        let unused = self.unused;
        let block = self.get_mut(id);
        (block.state, block.next) = (State::Unused, unused);
        self.unused = id;
    }

    /// Splits off what begins `bytes` after its start, as a new block after it, in the same state.
    #[inline]
    pub(super) fn split(&mut self, id: BlockId, bytes: u64) -> BlockId {
        let (addr, rest, kind, range, state, next) = {
            let block = self.get_mut(id);
            let rest = block.bytes - bytes;
            block.bytes = bytes;
            (block.addr + bytes, rest, block.kind, block.range, block.state, block.next)
        };
        let after = self.add(addr, rest, kind, range, state);
        let block = self.get_mut(after);
        (block.prev, block.next) = (id, next);
        self.get_mut(id).next = after;
        self.get_mut(next).prev = after;
        after
    }

    /// Merges the next block into `id`.
    #[inline]
    pub(super) fn merge_next(&mut self, id: BlockId) {
        let next = self.get(id).next;
        let (bytes, after) = (self.get(next).bytes, self.get(next).next);
        let block = self.get_mut(id);
        (block.bytes, block.next) = (block.bytes + bytes, after);
        self.get_mut(after).prev = id;
        self.remove(next);
    }

    /// Checks that every place is a block, or one of the unused ones.
    ///
    /// # Panics
    /// If one is neither.
    pub(super) fn check(&self) {
        let next = |&id: &BlockId| Some(self.get(id).next);
        let unused = std::iter::successors(Some(self.unused), next).take_while(|&id| id != NONE);
        let unused = unused.inspect(|&id| assert_eq!(self.get(id).state, State::Unused, "unused place {id:?}"));
        assert_eq!(unused.count() + self.iter().count() + 1, self.all.len(), "places of blocks");
        assert_eq!((self.get(NONE).state, self.get(NONE).bytes), (State::Unused, 0), "the place that is no block");
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (BlockId, &Block)> {
        let used = |(_, block): &(BlockId, &Block)| block.state != State::Unused;
        (0..).map(BlockId).zip(&self.all).filter(used)
    }
}
