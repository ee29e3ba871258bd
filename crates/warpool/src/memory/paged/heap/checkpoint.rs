//! What checkpoints need of a heap: the uses of blocks, and allocations at given addresses.

use warpool_driver::StreamId;

use super::super::ids::{BlockId, RangeInHeap};
use super::{Block, Heap, State};
use crate::memory::SegmentKind;
use crate::memory::stream_fence::StreamUses;

/// A block that a restore leaves as it is, by its address.
pub(in crate::memory::paged) enum Kept {
    /// A graph holds it.
    Held(u64),
    /// It serves a request of the default pool.
    Lent(u64),
}

impl Heap {
    /// Streams that use a block beside its own.
    pub(in crate::memory::paged) fn streams_using(&self, id: BlockId) -> &[StreamId] {
        self.uses.get(&id).map_or(&[], StreamUses::unfenced)
    }

    /// Forgets the streams that use an allocated block. Returns them.
    pub(in crate::memory::paged) fn take_uses(&mut self, id: BlockId) -> Vec<StreamId> {
        self.blocks.get_mut(id).has_uses = false;
        self.uses.remove(&id).map_or_else(Vec::new, |uses| uses.unfenced().to_vec())
    }

    /// An allocated block serves a request of the default pool, until it is freed.
    pub(in crate::memory::paged) fn set_lent(&mut self, id: BlockId) {
        let mut lent = std::mem::take(&mut self.lent);
        lent.retain(|&(other, generation)| self.blocks.get(other).generation == generation);
        lent.push((id, self.blocks.get(id).generation));
        self.lent = lent;
    }

    /// Whether an allocated block serves a request of the default pool.
    pub(in crate::memory::paged) fn is_lent(&self, id: BlockId) -> bool {
        self.lent.contains(&(id, self.blocks.get(id).generation))
    }

    /// Every block, by area, range and address.
    pub(in crate::memory::paged) fn all_blocks(&self) -> impl Iterator<Item = (BlockId, &Block)> {
        [SegmentKind::Small, SegmentKind::Large].into_iter().flat_map(|kind| self.ranges(kind).flatten())
    }

    /// Whether a range of addresses is free, or allocated and not held by graphs; `Err` with a held block that is not
    /// exactly this range, or one that is lent. A held one that is exactly it is `Ok(None)`.
    pub(in crate::memory::paged) fn room_at(
        &self,
        kind: SegmentKind,
        range: RangeInHeap,
        (start, end): (u64, u64),
    ) -> Result<Option<bool>, Kept> {
        let blocks = self.from(self.areas[kind as usize].first(range));
        let inside = blocks.skip_while(|(_, block)| block.end() <= start).take_while(|(_, block)| block.addr < end);
        for (id, block) in inside {
            if self.is_lent(id) {
                return Err(Kept::Lent(block.addr));
            }
            if block.holds > 0 {
                return if (block.addr, block.end()) == (start, end) { Ok(None) } else { Err(Kept::Held(block.addr)) };
            }
            if !matches!(block.state, State::Free | State::Recent | State::Allocated) {
                return Ok(Some(false));
            }
        }
        Ok(Some(true))
    }

    /// Allocates these addresses, which are free. `anchor` is a block of the same range at or before them; without one
    /// the search begins with the range.
    pub(in crate::memory::paged) fn allocate_at(
        &mut self,
        kind: SegmentKind,
        range: RangeInHeap,
        (addr, bytes): (u64, u64),
        requested: u64,
        anchor: Option<BlockId>,
    ) -> BlockId {
        let (area, blocks) = self.area(kind);
        let anchor = anchor.unwrap_or_else(|| area.first(range));
        let id = area.begin_filling(blocks, addr, addr + bytes, anchor);
        let id = area.carve(blocks, id, addr, bytes);
        self.mark_allocated(id, requested);
        id
    }
}
