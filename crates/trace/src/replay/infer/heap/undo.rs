//! The recorded heap backward: undoes events, the last first. An event does not contain all that is needed: how far a
//! block reached beyond its request, and which kind of requests an expandable segment served, is completed here.

use warpool::memory::report::{BlockState, SegmentKind};
use warpool::memory::{MemPoolId, SizeRules};

use super::{RecordedBlock, RecordedHeap, SegmentId};

impl RecordedHeap {
    /// Undoes an unmapping. One event may have unmapped several blocks, and the memory between them may not be restored
    /// yet, so the memory is added to any segment nearby; the kind of a new segment is a guess.
    pub fn undo_unmap(&mut self, addr: u64, bytes: u64, stream: u64, pool: Option<MemPoolId>) -> SegmentId {
        let segment = self.extend_expandable(addr, bytes, stream, None, pool, true);
        self.insert_free(addr, bytes, segment);
        segment
    }

    /// Undoes an allocation. `None` if the block at `addr` is not in use.
    pub fn undo_alloc(&mut self, addr: u64) -> Option<RecordedBlock> {
        self.free_completed(addr)
    }

    /// Undoes a completed free: `requested` bytes at `addr`, anywhere in a free block, were in use. Parts of the free
    /// block that are too small to have been split off belonged to the block before them. `None` if the range is not
    /// free.
    pub fn undo_free_completed(&mut self, addr: u64, requested: u64) -> Option<()> {
        let size = self.rules.sizes().round(requested);
        let (start, free) = self.free_block_around(addr, size)?;
        self.correct_kind(free.segment, SizeRules::kind(size));
        self.remove(start);
        let end = start + free.bytes;
        if start < addr {
            let before = start.checked_sub(1).and_then(|below| self.blocks.last_until(below));
            let before = before.map(|at| (self.blocks.address(at), *self.blocks.value(at)));
            match before {
                Some((at, block))
                    if self.is_unsplit_rest(block, addr - start)
                        && at + block.bytes == start
                        && block.segment == free.segment =>
                {
                    self.blocks.insert(at, RecordedBlock { bytes: block.bytes + addr - start, ..block });
                }
                _ => self.insert(start, RecordedBlock { bytes: addr - start, ..free }),
            }
        }
        let state = BlockState::ActivePendingFree;
        let mut restored = RecordedBlock { bytes: size, requested, state, segment: free.segment, event: None };
        let rest = end - addr - size;
        if rest > 0 {
            if self.is_unsplit_rest(restored, rest) {
                restored.bytes += rest;
            } else {
                self.insert(addr + size, RecordedBlock { bytes: rest, ..free });
            }
        }
        self.insert(addr, restored);
        Some(())
    }

    /// Undoes a requested free. `None` if the block at `addr` is not pending free.
    pub fn undo_free_requested(&mut self, addr: u64) -> Option<()> {
        let block = self.blocks.get_mut(addr).filter(|block| block.state == BlockState::ActivePendingFree)?;
        block.state = BlockState::ActiveAllocated;
        Some(())
    }

    /// Extends the block in front of the free block at `addr` by `more` bytes of the latter. The end of a block that
    /// was never freed beside another one is known only to within 1 MiB. `None` if `more` is beyond that.
    pub fn extend_block_before(&mut self, addr: u64, more: u64) -> Option<()> {
        let free = *self.blocks.get(addr).filter(|block| block.state == BlockState::Inactive && block.bytes > more)?;
        let before = self.blocks.last_until(addr.checked_sub(1)?)?;
        let (at, block) = (self.blocks.address(before), *self.blocks.value(before));
        let rest = (block.bytes + more).checked_sub(self.rules.sizes().round(block.requested))?;
        if at + block.bytes != addr || block.segment != free.segment || !self.is_unsplit_rest(block, rest) {
            return None;
        }
        self.remove(addr);
        self.insert(addr + more, RecordedBlock { bytes: free.bytes - more, ..free });
        self.insert(at, RecordedBlock { bytes: block.bytes + more, ..block });
        Some(())
    }

    /// Sets the kind of an expandable segment by a block that was in it.
    fn correct_kind(&mut self, id: SegmentId, kind: SegmentKind) {
        debug_assert!(self.free.is_none(), "its free blocks would be in the lists of another kind");
        let segment = &mut self.segments[id as usize];
        if segment.expandable {
            segment.kind = kind;
        }
    }

    /// Whether `rest` bytes after the request of a block in use belong to that block.
    fn is_unsplit_rest(&self, block: RecordedBlock, rest: u64) -> bool {
        block.state != BlockState::Inactive && !self.rules.splits(self.rules.sizes().round(block.requested), rest)
    }
}
