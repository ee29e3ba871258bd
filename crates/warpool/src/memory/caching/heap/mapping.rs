//! Expandable segments in the heap: parts of them are mapped, parts are not. The driver calls are in
//! `source/expandable.rs`, whose callers hold the slow lock: only they touch unmapped blocks.

use warpool_driver::{DevicePtr, PhysicalId};

use super::{
    Backing, BlockKey, BlockPoolKey, BlockRequest, BlockStatus, Chunks, ExpandableSegment, Heap, SegmentKey,
    StreamBlocksKey,
};
use crate::memory::MappedPart;

/// Where the memory for a request is to be mapped.
pub(crate) struct Room {
    /// The mapped block at its start, in transit.
    pub(crate) mapped: Option<BlockKey>,
    /// The unmapped block after it.
    pub(crate) unmapped: Option<BlockKey>,
}

/// Chunks to be mapped at the start of a block in transit that was unmapped.
pub(crate) struct Unmapped {
    pub(crate) block: BlockKey,
    pub(crate) ptr: u64,
    pub(crate) bytes: u64,
    pub(crate) chunk: u64,
}

impl Heap {
    /// The lowest address range with room for a request, made of free and unmapped blocks. A free block at its start is
    /// taken out of its free list.
    pub(crate) fn take_room(&mut self, request: &BlockRequest) -> Option<Room> {
        let stream_blocks = self.block_pools[request.block_pool].of_stream(request.stream)?;
        let start = self.find_room(stream_blocks, request.size)?;
        if self.blocks[start].status == BlockStatus::Free {
            self.take_free(start);
            Some(Room { mapped: Some(start), unmapped: self.blocks[start].next })
        } else {
            Some(Room { mapped: None, unmapped: Some(start) })
        }
    }

    fn find_room(&self, stream_blocks: StreamBlocksKey, size: u64) -> Option<BlockKey> {
        let usable = |block: BlockKey| matches!(self.blocks[block].status, BlockStatus::Free | BlockStatus::Unmapped);
        self.stream_blocks[stream_blocks].unmapped.values().find_map(|&unmapped| {
            let start = self.blocks[unmapped].prev.filter(|&prev| usable(prev)).unwrap_or(unmapped);
            let (mut room, mut next) = (0, Some(start));
            while let Some(block) = next.filter(|&block| room < size && usable(block)) {
                room += self.blocks[block].size;
                next = self.blocks[block].next;
            }
            (room >= size).then_some(start)
        })
    }

    /// Takes an unmapped block out of its list, to map up to `bytes` at its start. `None` if it is no longer unmapped.
    pub(crate) fn take_unmapped(&mut self, block: BlockKey, bytes: u64) -> Option<Unmapped> {
        let (ptr, size) = match self.blocks.get(block) {
            Some(entry) if entry.status == BlockStatus::Unmapped => (entry.ptr, entry.size),
            _ => return None,
        };
        self.remove_unmapped(block);
        let chunk = self.expandable_mut(block).chunk();
        Some(Unmapped { block, ptr, bytes: bytes.min(size).next_multiple_of(chunk), chunk })
    }

    /// Chunks were mapped at the start of `unmapped`, a block in transit. It keeps the mapped part, merged with free
    /// neighbours and with `grown`, the block in transit before it; the rest becomes an unmapped block.
    pub(crate) fn set_mapped(
        &mut self,
        unmapped: BlockKey,
        grown: Option<BlockKey>,
        handles: &[PhysicalId],
    ) -> BlockKey {
        let ptr = self.blocks[unmapped].ptr;
        let bytes = self.expandable_mut(unmapped).add_mapped(ptr, handles);
        let mapped = if bytes < self.blocks[unmapped].size {
            let mapped = self.split_front(unmapped, bytes);
            self.put_unmapped(unmapped);
            mapped
        } else {
            unmapped
        };
        if let Some(grown) = grown {
            self.absorb(mapped, grown);
        }
        self.merge_free_neighbours(mapped);
        mapped
    }

    /// Makes a block in transit an unmapped one, merged with unmapped neighbours.
    pub(crate) fn put_unmapped(&mut self, block: BlockKey) {
        for neighbour in [self.blocks[block].prev, self.blocks[block].next].into_iter().flatten() {
            if self.blocks[neighbour].status == BlockStatus::Unmapped {
                self.remove_unmapped(neighbour);
                self.absorb(block, neighbour);
            }
        }
        let (stream_blocks, ptr) = (self.segments[self.blocks[block].segment].stream_blocks, self.blocks[block].ptr);
        self.blocks[block].status = BlockStatus::Unmapped;
        self.stream_blocks[stream_blocks].unmapped.insert(ptr, block);
    }

    /// Takes a free block that contains whole chunks out of its free list, to unmap the chunks. `None` if it has none,
    /// or is not free any more.
    pub(crate) fn take_chunks(&mut self, block: BlockKey) -> Option<Chunks> {
        let entry = self.blocks.get(block).filter(|entry| entry.status == BlockStatus::Free && entry.expandable)?;
        let (start, end) = (entry.ptr, entry.end());
        let chunks = self.expandable_mut(block).whole_chunks(start, end)?;
        self.take_free(block);
        Some(chunks)
    }

    /// Chunks of `block`, which is in transit, were unmapped; the parts of the block before and after them become free.
    pub(crate) fn set_unmapped(&mut self, block: BlockKey, ptr: u64, bytes: u64) {
        self.expandable_mut(block).remove_mapped(ptr, bytes);
        let before = ptr - self.blocks[block].ptr;
        if before > 0 {
            let front = self.split_front(block, before);
            self.merge_and_free(front);
        }
        let mut unmapped = block;
        if self.blocks[block].size > bytes {
            unmapped = self.split_front(block, bytes);
            self.merge_and_free(block);
        }
        self.put_unmapped(unmapped);
    }

    /// Segments of a block pool of which nothing is mapped.
    pub(crate) fn unmapped_segments(&self, key: BlockPoolKey) -> Vec<SegmentKey> {
        let streams = self.block_pools[key].streams.keys().map(|key| &self.stream_blocks[key]);
        let unmapped = streams.flat_map(|blocks| blocks.unmapped.values().map(|&block| &self.blocks[block]));
        unmapped.filter(|block| !block.is_split()).map(|block| block.segment).collect()
    }

    /// Takes a segment of which nothing is mapped: its block, in transit, and its addresses. `None` if part of it is
    /// mapped.
    pub(crate) fn take_unmapped_segment(&mut self, segment: SegmentKey) -> Option<(BlockKey, DevicePtr, u64)> {
        let first = self.segments.get(segment)?.first;
        let block = &self.blocks[first];
        if block.status != BlockStatus::Unmapped || block.is_split() {
            return None;
        }
        let (ptr, bytes) = (DevicePtr(block.ptr), block.size);
        self.remove_unmapped(first);
        Some((first, ptr, bytes))
    }

    /// The mapped ranges of all expandable segments.
    pub(crate) fn mapped_ranges(&self) -> Vec<(DevicePtr, u64)> {
        let expandable = self.segments.values().filter_map(|segment| match &segment.backing {
            Backing::Expandable(expandable) => Some(expandable.mapped_ranges()),
            Backing::Whole(_) => None,
        });
        expandable.flatten().collect()
    }

    /// The chunks that a block lies in; empty if its segment is not expandable.
    pub(crate) fn mapped_parts(&self, block: BlockKey) -> Vec<MappedPart> {
        let entry = &self.blocks[block];
        match &self.segments[entry.segment].backing {
            Backing::Expandable(expandable) => expandable.parts(entry.ptr, entry.ptr + entry.size),
            Backing::Whole(_) => Vec::new(),
        }
    }

    fn remove_unmapped(&mut self, block: BlockKey) {
        let (stream_blocks, ptr) = (self.segments[self.blocks[block].segment].stream_blocks, self.blocks[block].ptr);
        let removed = self.stream_blocks[stream_blocks].unmapped.remove(&ptr);
        assert!(removed == Some(block), "no unmapped block at {ptr:#x}");
        self.blocks[block].status = BlockStatus::InTransit;
    }

    fn expandable_mut(&mut self, block: BlockKey) -> &mut ExpandableSegment {
        match &mut self.segments[self.blocks[block].segment].backing {
            Backing::Expandable(expandable) => expandable,
            Backing::Whole(_) => unreachable!("only expandable segments have chunks"),
        }
    }
}
