//! Segments: one allocation of the driver or an upstream each, or one range of reserved addresses.

use warpool_driver::{DevicePtr, PhysicalId};

use super::key::{BlockKey, StreamBlocksKey};
use crate::memory::segment_source::SegmentSource;
use crate::memory::{MappedPart, Stack};

/// A segment. It and its blocks belong to one stream and one block pool for their whole life.
pub(crate) struct Segment {
    pub(super) stream_blocks: StreamBlocksKey,
    /// Its lowest block.
    pub(super) first: BlockKey,
    /// A sequence number, in the order in which segments were added.
    pub(super) registration: u64,
    pub(super) backing: Backing,
    /// The call stack of the request that it was allocated for.
    pub(super) stack: Option<Stack>,
}

impl Segment {
    pub(crate) fn backing(&self) -> &Backing {
        &self.backing
    }

    pub(crate) fn stack(&self) -> Option<&Stack> {
        self.stack.as_ref()
    }
}

/// The memory of a segment.
pub(crate) enum Backing {
    /// One allocation.
    Whole(SegmentSource),
    /// Reserved addresses, with physical memory mapped chunk by chunk.
    Expandable(ExpandableSegment),
}

/// The mappings of an expandable segment.
pub(crate) struct ExpandableSegment {
    base: u64,
    chunk: u64,
    /// Physical memory by chunk, up to the last chunk that was ever mapped: a segment reserves far more addresses than
    /// it uses.
    handles: Vec<Option<PhysicalId>>,
}

/// Chunks inside a free block.
pub(crate) struct Chunks {
    pub(crate) ptr: u64,
    pub(crate) bytes: u64,
    pub(crate) handles: Vec<PhysicalId>,
}

impl ExpandableSegment {
    pub(crate) fn new(base: u64, chunk: u64) -> Self {
        Self { base, chunk, handles: Vec::new() }
    }

    /// The size of a chunk.
    pub(crate) fn chunk(&self) -> u64 {
        self.chunk
    }

    pub(crate) fn bytes_mapped(&self) -> u64 {
        self.handles.iter().flatten().count() as u64 * self.chunk
    }

    /// The contiguous mapped ranges.
    pub(crate) fn mapped_ranges(&self) -> Vec<(DevicePtr, u64)> {
        let mut ranges: Vec<(DevicePtr, u64)> = Vec::new();
        for (at, handle) in self.handles.iter().enumerate() {
            let ptr = self.base + at as u64 * self.chunk;
            match (handle, ranges.last_mut()) {
                (None, _) => {}
                (Some(_), Some((start, bytes))) if start.0 + *bytes == ptr => *bytes += self.chunk,
                (Some(_), _) => ranges.push((DevicePtr(ptr), self.chunk)),
            }
        }
        ranges
    }

    /// Records chunks that were mapped at `ptr`. Returns their bytes.
    pub(super) fn add_mapped(&mut self, ptr: u64, handles: &[PhysicalId]) -> u64 {
        let first = self.chunk_at(ptr);
        let end = first + handles.len();
        if self.handles.len() < end {
            self.handles.resize(end, None);
        }
        for (slot, &handle) in self.handles[first..end].iter_mut().zip(handles) {
            *slot = Some(handle);
        }
        self.chunk * handles.len() as u64
    }

    /// Records that chunks were unmapped.
    pub(super) fn remove_mapped(&mut self, ptr: u64, bytes: u64) {
        let chunks = self.chunk_at(ptr)..self.chunk_at(ptr + bytes);
        self.handles[chunks].fill(None);
    }

    /// The whole chunks between two mapped addresses.
    pub(super) fn whole_chunks(&self, start: u64, end: u64) -> Option<Chunks> {
        let first = (start - self.base).next_multiple_of(self.chunk);
        let last = (end - self.base) / self.chunk * self.chunk;
        if first >= last {
            return None;
        }
        let (ptr, bytes) = (self.base + first, last - first);
        let chunks = self.chunk_at(ptr)..self.chunk_at(ptr + bytes);
        let handles = self.handles[chunks].iter().map(|handle| handle.expect("a free block is mapped")).collect();
        Some(Chunks { ptr, bytes, handles })
    }

    /// The mapped chunks that overlap the addresses from `start` to `end`.
    pub(super) fn parts(&self, start: u64, end: u64) -> Vec<MappedPart> {
        let chunks = self.chunk_at(start)..=self.chunk_at(end - 1);
        let part = |at: usize| {
            let physical = (*self.handles.get(at)?)?;
            Some(MappedPart { ptr: DevicePtr(self.base + at as u64 * self.chunk), bytes: self.chunk, physical })
        };
        chunks.filter_map(part).collect()
    }

    fn chunk_at(&self, ptr: u64) -> usize {
        usize::try_from((ptr - self.base) / self.chunk).expect("addresses fit")
    }
}
