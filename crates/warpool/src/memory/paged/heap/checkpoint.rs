//! What checkpoints need of a heap: the uses of blocks, and allocations at given addresses.

use warpool_driver::StreamId;

use super::{Block, Heap, State};
use crate::memory::SegmentKind;
use crate::memory::stream_fence::StreamUses;

impl Heap {
    /// Streams that use a block beside its own.
    pub(in crate::memory::paged) fn streams_using(&self, id: u32) -> &[StreamId] {
        self.uses.get(&id).map_or(&[], StreamUses::unfenced)
    }

    /// Forgets the streams that use an allocated block. Returns them.
    pub(in crate::memory::paged) fn take_uses(&mut self, id: u32) -> Vec<StreamId> {
        self.blocks.get_mut(id).has_uses = false;
        self.uses.remove(&id).map_or_else(Vec::new, |uses| uses.unfenced().to_vec())
    }

    /// Every block, by area, range and address.
    pub(in crate::memory::paged) fn all_blocks(&self) -> impl Iterator<Item = (u32, &Block)> {
        [SegmentKind::Small, SegmentKind::Large].into_iter().flat_map(|kind| self.ranges(kind).flatten())
    }

    /// Whether a range of addresses is free, or allocated and not held by graphs; `Err` with the address of a held
    /// block that is not exactly this range. A held one that is exactly it is `Ok(None)`.
    pub(in crate::memory::paged) fn room_at(
        &self,
        kind: SegmentKind,
        range: u32,
        (start, end): (u64, u64),
    ) -> Result<Option<bool>, u64> {
        let blocks = self.from(self.areas[kind as usize].first(range));
        let inside = blocks.skip_while(|(_, block)| block.end() <= start).take_while(|(_, block)| block.addr < end);
        for (_, block) in inside {
            if block.holds > 0 {
                return if (block.addr, block.end()) == (start, end) { Ok(None) } else { Err(block.addr) };
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
        range: u32,
        (addr, bytes): (u64, u64),
        requested: u64,
        anchor: Option<u32>,
    ) -> u32 {
        let (area, blocks) = self.area(kind);
        let anchor = anchor.unwrap_or_else(|| area.first(range));
        let id = area.begin_filling(blocks, addr, addr + bytes, anchor);
        let id = area.carve(blocks, id, addr, bytes);
        self.mark_allocated(id, requested);
        id
    }
}
