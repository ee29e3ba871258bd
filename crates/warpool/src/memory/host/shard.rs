//! A shard of the heap: pinned segments, split into blocks by address. Best fit by size; a returned block is merged
//! with its free neighbours at once.
//!
//! Small requests share segments. A large request gets its own segment unless a free range fits. The reserved segment
//! serves both. Free ranges are ordered by kind of segment, the device that it counts for, and size.
//!
//! No driver calls and no locks here. A segment that is being unpinned is *in transit*: it is removed from the shard,
//! and the unpinning thread owns it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use warpool_driver::DeviceId;

use super::block::{BlockOwner, PinnedBlock, PinnedState, StateRef};
use super::pin::PinnedRange;
use super::size_class::{Fit, GRANULARITY};
use crate::memory::Stack;

/// Which requests a segment serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum SegmentUse {
    /// Small requests.
    Small,
    /// Large requests.
    Large,
    /// All requests; it stays pinned until the allocator is closed.
    Reserve,
}

/// Memory that was pinned by one call.
pub(super) struct Segment {
    serves: SegmentUse,
    /// The device whose cap it counts against.
    device: DeviceId,
    range: PinnedRange,
    /// By address, without gaps.
    pieces: BTreeMap<u64, Piece>,
    stack: Option<Stack>,
}

/// A part of a segment.
pub(super) enum Piece {
    /// A free range of this number of bytes.
    Free(u64),
    /// A block, allocated or in a cache.
    Block(Arc<PinnedBlock>),
}

impl Piece {
    fn size(&self) -> u64 {
        match self {
            Self::Free(size) => *size,
            Self::Block(block) => block.size(),
        }
    }
}

impl Segment {
    pub(super) fn serves(&self) -> SegmentUse {
        self.serves
    }

    pub(super) fn device(&self) -> DeviceId {
        self.device
    }

    pub(super) fn range(&self) -> &PinnedRange {
        &self.range
    }

    pub(super) fn pieces(&self) -> &BTreeMap<u64, Piece> {
        &self.pieces
    }

    pub(super) fn stack(&self) -> Option<&Stack> {
        self.stack.as_ref()
    }

    /// Whether it may be unpinned before the allocator is closed: all of it is free, and it is not the reserved one.
    fn is_spare(&self) -> bool {
        self.serves != SegmentUse::Reserve && self.is_free()
    }

    /// Whether it is a single free piece.
    fn is_free(&self) -> bool {
        self.pieces.len() == 1 && matches!(self.pieces.first_key_value(), Some((_, Piece::Free(_))))
    }
}

/// A free range: kind of segment, device, size, address.
pub(super) type FreeRange = (SegmentUse, DeviceId, u64, u64);

/// A shard of the heap.
#[derive(Default)]
pub(super) struct Shard {
    segments: BTreeMap<u64, Segment>,
    free: BTreeSet<FreeRange>,
    /// The devices that its segments have counted for.
    devices: BTreeSet<DeviceId>,
    /// The reference that its blocks share; created with the first of them.
    state_ref: Option<Arc<StateRef>>,
}

impl Shard {
    /// A block from the smallest free range that fits.
    pub(super) fn take(&mut self, fit: &Fit, owner: BlockOwner<'_>) -> Option<Arc<PinnedBlock>> {
        let range = self.find(fit)?;
        Some(self.split(range, fit, owner))
    }

    /// The smallest free range that fits.
    pub(super) fn find(&self, fit: &Fit) -> Option<FreeRange> {
        let serves = if fit.is_small() { SegmentUse::Small } else { SegmentUse::Large };
        self.search(serves, fit).or_else(|| self.search(SegmentUse::Reserve, fit))
    }

    /// A block from a segment that was just added.
    pub(super) fn take_from(&mut self, start: u64, fit: &Fit, owner: BlockOwner<'_>) -> Arc<PinnedBlock> {
        let segment = &self.segments[&start];
        let range = (segment.serves, segment.device, segment.range.bytes(), start);
        self.split(range, fit, owner)
    }

    fn search(&self, serves: SegmentUse, fit: &Fit) -> Option<FreeRange> {
        let best = |device: DeviceId| {
            let from = (serves, device, fit.size, 0);
            self.free.range(from..=(serves, device, u64::MAX, u64::MAX)).next().copied()
        };
        match fit.device {
            Some(device) => best(device),
            None => self.devices.iter().filter_map(|&device| best(device)).min_by_key(|&(_, _, size, at)| (size, at)),
        }
    }

    /// Splits a block off the low end of a free range. A rest within the slack stays with the block.
    pub(super) fn split(&mut self, range: FreeRange, fit: &Fit, owner: BlockOwner<'_>) -> Arc<PinnedBlock> {
        let (serves, device, available, at) = range;
        assert!(self.free.remove(&range), "a free range is in the set");
        let (&start, segment) = self.segments.range_mut(..=at).next_back().expect("a free range is in a segment");
        let size = if available - fit.size <= fit.slack { available } else { fit.size };
        let state_ref = self.state_ref.get_or_insert_with(|| StateRef::new(owner.shared));
        let block = Arc::new(PinnedBlock::new(state_ref, owner.shard, at, size, start, device));
        segment.pieces.insert(at, Piece::Block(Arc::clone(&block)));
        if size < available {
            segment.pieces.insert(at + size, Piece::Free(available - size));
            self.free.insert((serves, device, available - size, at + size));
        }
        block
    }

    /// Merges a free block with its neighbours. Returns the start of its segment if that is spare now, and the piece
    /// for the caller to drop without the lock. Both are `None` if the segment is gone.
    pub(super) fn merge(&mut self, block: &PinnedBlock) -> (Option<u64>, Option<Piece>) {
        let Some(segment) = self.segments.get_mut(&block.segment()) else { return (None, None) };
        let (serves, device) = (segment.serves, segment.device);
        let (mut at, mut size) = (block.ptr(), block.size());
        let piece = segment.pieces.remove(&at);
        assert!(matches!(&piece, Some(Piece::Block(own)) if own.size() == size), "a block is merged once");
        if let Some((&before, &Piece::Free(bytes))) = segment.pieces.range(..at).next_back() {
            segment.pieces.remove(&before);
            assert!(self.free.remove(&(serves, device, bytes, before)), "a free range is in the set");
            (at, size) = (before, size + bytes);
        }
        if let Some(&Piece::Free(bytes)) = segment.pieces.get(&(at + size)) {
            segment.pieces.remove(&(at + size));
            assert!(self.free.remove(&(serves, device, bytes, at + size)), "a free range is in the set");
            size += bytes;
        }
        segment.pieces.insert(at, Piece::Free(size));
        self.free.insert((serves, device, size, at));
        (segment.is_spare().then_some(block.segment()), piece)
    }

    /// Adds a segment, all of it free.
    pub(super) fn add(&mut self, serves: SegmentUse, device: DeviceId, range: PinnedRange, stack: Option<Stack>) {
        let pieces = BTreeMap::from([(range.start(), Piece::Free(range.bytes()))]);
        self.insert(Segment { serves, device, range, pieces, stack });
    }

    /// Adds a segment that is free.
    pub(super) fn insert(&mut self, segment: Segment) {
        let (start, bytes) = (segment.range.start(), segment.range.bytes());
        self.free.insert((segment.serves, segment.device, bytes, start));
        self.devices.insert(segment.device);
        let before = self.segments.insert(start, segment);
        assert!(before.is_none(), "two segments at one address");
    }

    /// Spare segments of a device, or of all: size and start.
    pub(super) fn spare(&self, device: Option<DeviceId>) -> impl Iterator<Item = (u64, u64)> {
        let selected =
            move |segment: &Segment| segment.is_spare() && device.is_none_or(|device| segment.device == device);
        let all = self.segments.iter().filter(move |(_, segment)| selected(segment));
        all.map(|(&start, segment)| (segment.range.bytes(), start))
    }

    /// The start of the segment that a free range covers, if that segment is spare.
    pub(super) fn spare_of(&self, (_, _, bytes, start): FreeRange) -> Option<u64> {
        self.segments.get(&start).filter(|segment| segment.is_spare() && segment.range.bytes() == bytes).map(|_| start)
    }

    /// Removes a segment, if it is free.
    pub(super) fn remove(&mut self, start: u64) -> Option<Segment> {
        let segment = self.segments.get(&start).filter(|segment| segment.is_free())?;
        let range = (segment.serves, segment.device, segment.range.bytes(), start);
        assert!(self.free.remove(&range), "a free range is in the set");
        self.segments.remove(&start)
    }

    /// Segments by address.
    pub(super) fn segments(&self) -> &BTreeMap<u64, Segment> {
        &self.segments
    }

    /// Removes all segments and blocks and the reference to the allocator's state, for the caller to drop without the
    /// lock.
    pub(super) fn close(&mut self) -> (BTreeMap<u64, Segment>, Option<Arc<StateRef>>) {
        self.free.clear();
        (std::mem::take(&mut self.segments), self.state_ref.take())
    }

    /// The block that contains an address.
    pub(super) fn block_with(&self, ptr: u64) -> Option<&Arc<PinnedBlock>> {
        let (_, segment) = self.segments.range(..=ptr).next_back()?;
        match segment.pieces.range(..=ptr).next_back()? {
            (&start, Piece::Block(block)) if ptr < start + block.size() => Some(block),
            _ => None,
        }
    }

    /// Every block, allocated or in a cache.
    pub(super) fn blocks(&self) -> impl Iterator<Item = &Arc<PinnedBlock>> {
        let pieces = self.segments.values().flat_map(|segment| segment.pieces.values());
        pieces.filter_map(|piece| match piece {
            Piece::Block(block) => Some(block),
            Piece::Free(_) => None,
        })
    }

    /// The bytes of all free ranges.
    pub(super) fn bytes_free(&self) -> u64 {
        self.free.iter().map(|&(_, _, size, _)| size).sum()
    }

    /// Panics if an invariant does not hold.
    pub(super) fn check(&self, index: usize) {
        let mut free = BTreeSet::new();
        for (&start, segment) in &self.segments {
            assert!(self.devices.contains(&segment.device), "the device of a segment");
            let (mut end, mut was_free) = (start, false);
            for (&at, piece) in &segment.pieces {
                assert_eq!(at, end, "pieces leave no gaps");
                assert!(piece.size() > 0 && piece.size().is_multiple_of(GRANULARITY), "the granularity of pieces");
                let is_free = matches!(piece, Piece::Free(_));
                assert!(!(is_free && was_free), "free neighbours are merged");
                if let Piece::Block(block) = piece {
                    let location = (block.shard(), block.ptr(), block.segment(), block.device());
                    assert_eq!(location, (index, at, start, segment.device), "location of a block");
                    assert_ne!(block.state(), PinnedState::Merged, "a block of a segment is not merged");
                } else {
                    free.insert((segment.serves, segment.device, piece.size(), at));
                }
                (end, was_free) = (end + piece.size(), is_free);
            }
            assert_eq!(end, start + segment.range.bytes(), "pieces fill their segment");
        }
        assert_eq!(free, self.free, "free ranges");
    }
}
