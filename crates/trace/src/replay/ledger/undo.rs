//! The ledger backwards: undoes what was recorded, the last first. What is told there only in part is completed: how
//! far a block reached, and which kind of requests a range served.

use warpool::memory::{BlockState, MemPoolId, SegmentKind};

use super::super::sizes::Sizes;
use super::{Ledger, Piece, RegionId};

impl Ledger {
    /// Undoes an unmapping. Several pieces may have been unmapped as one, and the pieces between may not be back yet,
    /// so its range is whichever is near, and of a new one the kind is a guess.
    pub fn map_again(&mut self, addr: u64, bytes: u64, stream: u64, pool: Option<MemPoolId>) -> RegionId {
        let region = self.mapped_region(addr, bytes, stream, None, pool, true);
        self.add_free(addr, bytes, region);
        region
    }

    /// Undoes a free: somebody had `requested` bytes at `addr`, anywhere in a free block. What cannot have been a block
    /// of its own belongs to its neighbour in front. `None` if the place is not free.
    pub fn reinstate(&mut self, addr: u64, requested: u64) -> Option<()> {
        let size = self.sizes.round(requested);
        let (start, piece) = self.free_around(addr, size)?;
        self.correct_kind(piece.region, Sizes::kind(size));
        self.remove(start);
        let end = start + piece.bytes;
        if start < addr {
            // Too small to have been split off: it was the unused end of the block before.
            let before = self.pieces.range(..start).next_back().map(|(&at, &block)| (at, block));
            match before {
                Some((at, block))
                    if self.is_slack(block, addr - start)
                        && at + block.bytes == start
                        && block.region == piece.region =>
                {
                    self.pieces.insert(at, Piece { bytes: block.bytes + addr - start, ..block });
                }
                _ => self.insert(start, Piece { bytes: addr - start, ..piece }),
            }
        }
        let mut taken = Piece { bytes: size, requested, state: BlockState::ActivePendingFree, region: piece.region };
        let rest = end - addr - size;
        if rest > 0 {
            if self.is_slack(taken, rest) {
                taken.bytes += rest;
            } else {
                self.insert(addr + size, Piece { bytes: rest, ..piece });
            }
        }
        self.insert(addr, taken);
        Some(())
    }

    /// Undoes the first half of a free. `None` if it was not under way.
    pub fn hand_back(&mut self, addr: u64) -> Option<()> {
        let piece = self.pieces.get_mut(&addr).filter(|piece| piece.state == BlockState::ActivePendingFree)?;
        piece.state = BlockState::ActiveAllocated;
        Some(())
    }

    /// Moves the end of the block in front of the free one at `addr` back by `more`, at the latter's cost. Where a
    /// block ends whose free was not undone beside another is not known to the byte: up to 1 MiB behind it may have
    /// been its own. `None` if that is too little.
    pub fn lengthen_before(&mut self, addr: u64, more: u64) -> Option<()> {
        let free = *self.pieces.get(&addr).filter(|piece| piece.state == BlockState::Inactive && piece.bytes > more)?;
        let (&at, &block) = self.pieces.range(..addr).next_back()?;
        let slack = (block.bytes + more).checked_sub(self.sizes.round(block.requested))?;
        if at + block.bytes != addr || block.region != free.region || !self.is_slack(block, slack) {
            return None;
        }
        self.remove(addr);
        self.insert(addr + more, Piece { bytes: free.bytes - more, ..free });
        self.insert(at, Piece { bytes: block.bytes + more, ..block });
        Some(())
    }

    /// What was in a range tells its kind better than its size did.
    fn correct_kind(&mut self, id: RegionId, kind: SegmentKind) {
        let region = &mut self.regions[id as usize];
        let (stream, before) = (region.stream, region.kind);
        if before == kind || !region.expandable {
            return;
        }
        region.kind = kind;
        let Some(shelf) = self.free.get_mut(&(stream, before)) else { return };
        let pieces = &self.pieces;
        let moved: Vec<_> = shelf.iter().copied().filter(|(_, _, addr)| pieces[addr].region == id).collect();
        shelf.retain(|key| !moved.contains(key));
        self.free.entry((stream, kind)).or_default().extend(moved);
    }

    pub(super) fn is_slack(&self, block: Piece, rest: u64) -> bool {
        block.state != BlockState::Inactive && !self.sizes.splits(self.sizes.round(block.requested), rest)
    }
}
