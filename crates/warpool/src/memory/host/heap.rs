//! The heap: pinned segments, split into blocks by address. Best fit by size; a returned block is merged with its free
//! neighbours at once.
//!
//! Small requests share segments; a large one has its own unless a free range fits; the reserved segment serves both.
//! Free ranges are ordered by kind of segment, the device that it counts for, and size.
//!
//! No driver calls here. A segment that is being unpinned is *in transit*: the thread that unpins it has it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use warpool_driver::DeviceId;

use super::Shared;
use super::block::{PinnedBlock, PinnedState};
use super::pin::PinnedRange;
use super::size_class::{Fit, GRANULARITY, PAGE};
use super::stats::{HostStats, HostTime};
use crate::memory::{PinnedSettings, Stack, Stat};

/// Which requests a segment serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum SegmentUse {
    /// Small ones.
    Small,
    /// Large ones.
    Large,
    /// All; it stays pinned until the allocator is closed.
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
    /// So many free bytes.
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

    /// Whether it is one free piece.
    fn is_free(&self) -> bool {
        self.pieces.len() == 1 && matches!(self.pieces.first_key_value(), Some((_, Piece::Free(_))))
    }
}

/// A free range: kind of segment, device, size, address.
type FreeRange = (SegmentUse, DeviceId, u64, u64);

/// The cap that refuses a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CapExceeded {
    /// The device whose cap it is; `None` for the cap over all devices.
    pub(super) device: Option<DeviceId>,
    pub(super) cap: u64,
    /// What counts against it.
    pub(super) pinned: u64,
    /// By how much it would be exceeded.
    pub(super) excess: u64,
}

/// All pinned memory of an allocator.
#[derive(Default)]
pub(super) struct Heap {
    segments: BTreeMap<u64, Segment>,
    free: BTreeSet<FreeRange>,
    /// Segments that are being unpinned, and their bytes.
    in_transit: (u64, u64),
    /// Bytes that are pinned or being pinned, by device: what counts against the caps.
    quota: BTreeMap<DeviceId, u64>,
    /// Bytes of segments for small requests.
    bytes_small: u64,
    count: Stat,
    bytes: Stat,
    pins: u64,
    unpins: u64,
    pin_time: HostTime,
    unpin_time: HostTime,
}

impl Heap {
    /// A block from the smallest free range that fits.
    pub(super) fn take(
        &mut self,
        fit: &Fit,
        device: Option<DeviceId>,
        shared: &Arc<Shared>,
    ) -> Option<Arc<PinnedBlock>> {
        let serves = if fit.is_small() { SegmentUse::Small } else { SegmentUse::Large };
        let found = self.search(serves, fit.size, device);
        let range = found.or_else(|| self.search(SegmentUse::Reserve, fit.size, device))?;
        Some(self.split(range, fit, shared))
    }

    /// A block from a segment that was just added.
    pub(super) fn take_from(&mut self, start: u64, fit: &Fit, shared: &Arc<Shared>) -> Arc<PinnedBlock> {
        let segment = &self.segments[&start];
        let range = (segment.serves, segment.device, segment.range.bytes(), start);
        self.split(range, fit, shared)
    }

    fn search(&self, serves: SegmentUse, size: u64, device: Option<DeviceId>) -> Option<FreeRange> {
        let best = |device: DeviceId| {
            let from = (serves, device, size, 0);
            self.free.range(from..=(serves, device, u64::MAX, u64::MAX)).next().copied()
        };
        match device {
            Some(device) => best(device),
            None => self.quota.keys().filter_map(|&device| best(device)).min_by_key(|&(_, _, size, at)| (size, at)),
        }
    }

    /// Cuts a block from the low end of a free range. A rest within the slack stays with the block.
    fn split(&mut self, range: FreeRange, fit: &Fit, shared: &Arc<Shared>) -> Arc<PinnedBlock> {
        let (serves, device, available, at) = range;
        assert!(self.free.remove(&range), "a free range is in the set");
        let (&start, segment) = self.segments.range_mut(..=at).next_back().expect("a free range is in a segment");
        let size = if available - fit.size <= fit.slack { available } else { fit.size };
        let block = Arc::new(PinnedBlock::new(shared, at, size, start, device));
        segment.pieces.insert(at, Piece::Block(Arc::clone(&block)));
        if size < available {
            segment.pieces.insert(at + size, Piece::Free(available - size));
            self.free.insert((serves, device, available - size, at + size));
        }
        block
    }

    /// Merges a free block with its neighbours. Returns the start of its segment if that is spare now; and the piece,
    /// to be dropped without the lock. `None`s if the segment is gone.
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

    /// Counts a segment of `least` to `most` bytes against the caps, before it is pinned. Returns how many bytes.
    pub(super) fn reserve_quota(
        &mut self,
        least: u64,
        most: u64,
        device: DeviceId,
        settings: &PinnedSettings,
    ) -> Result<u64, CapExceeded> {
        let of_device = self.quota_of(device);
        let caps = [
            settings.device_cap_bytes.map(|cap| (Some(device), cap, of_device)),
            settings.cap_bytes.map(|cap| (None, cap, self.quota.values().sum())),
        ];
        let mut granted = most;
        for (device, cap, pinned) in caps.into_iter().flatten() {
            let room = cap.saturating_sub(pinned);
            if room < least {
                return Err(CapExceeded { device, cap, pinned, excess: least - room });
            }
            granted = granted.min(room / PAGE * PAGE).max(least);
        }
        *self.quota.entry(device).or_default() += granted;
        Ok(granted)
    }

    /// A segment was not pinned, or is unpinned.
    pub(super) fn release_quota(&mut self, device: DeviceId, bytes: u64) {
        *self.quota.get_mut(&device).expect("quota was reserved") -= bytes;
    }

    fn quota_of(&self, device: DeviceId) -> u64 {
        self.quota.get(&device).copied().unwrap_or(0)
    }

    /// Adds a segment whose quota was reserved.
    pub(super) fn add(
        &mut self,
        serves: SegmentUse,
        device: DeviceId,
        range: PinnedRange,
        stack: Option<Stack>,
        duration: Duration,
    ) {
        let (start, bytes) = (range.start(), range.bytes());
        let pieces = BTreeMap::from([(start, Piece::Free(bytes))]);
        let before = self.segments.insert(start, Segment { serves, device, range, pieces, stack });
        assert!(before.is_none(), "two segments at one address");
        self.free.insert((serves, device, bytes, start));
        if serves == SegmentUse::Small {
            self.bytes_small += bytes;
        }
        self.count.increase(1);
        self.bytes.increase(bytes);
        self.pins += 1;
        self.pin_time.add(duration);
    }

    /// Spare segments of a device, or of all: size and start, smallest first.
    pub(super) fn spare(&self, device: Option<DeviceId>) -> Vec<(u64, u64)> {
        let selected = |segment: &Segment| segment.is_spare() && device.is_none_or(|device| segment.device == device);
        let all = self.segments.iter().filter(|(_, segment)| selected(segment));
        let mut spare: Vec<(u64, u64)> = all.map(|(&start, segment)| (segment.range.bytes(), start)).collect();
        spare.sort_unstable();
        spare
    }

    /// Takes out a segment to be unpinned, if it is free. It counts as pinned until [`end_transit`](Self::end_transit).
    /// It is taken out before the driver call: after that another thread may be given the same address.
    pub(super) fn begin_transit(&mut self, start: u64) -> Option<Segment> {
        let segment = self.segments.get(&start).filter(|segment| segment.is_free())?;
        let bytes = segment.range.bytes();
        assert!(self.free.remove(&(segment.serves, segment.device, bytes, start)), "a free range is in the set");
        self.in_transit.0 += 1;
        self.in_transit.1 += bytes;
        self.segments.remove(&start)
    }

    /// The segment was unpinned, which took `duration`; or that failed, and it is put back.
    pub(super) fn end_transit(&mut self, segment: Segment, duration: Option<Duration>) {
        let (start, bytes) = (segment.range.start(), segment.range.bytes());
        self.in_transit.0 -= 1;
        self.in_transit.1 -= bytes;
        let Some(duration) = duration else {
            self.free.insert((segment.serves, segment.device, bytes, start));
            let before = self.segments.insert(start, segment);
            assert!(before.is_none(), "two segments at one address");
            return;
        };
        if segment.serves == SegmentUse::Small {
            self.bytes_small -= bytes;
        }
        self.release_quota(segment.device, bytes);
        self.count.decrease(1);
        self.bytes.decrease(bytes);
        self.unpins += 1;
        self.unpin_time.add(duration);
    }

    /// Bytes of segments that are being unpinned.
    pub(super) fn bytes_in_transit(&self) -> u64 {
        self.in_transit.1
    }

    pub(super) fn bytes_pinned(&self) -> u64 {
        self.bytes.current
    }

    /// Bytes of segments for small requests.
    pub(super) fn bytes_small(&self) -> u64 {
        self.bytes_small
    }

    /// Whether nothing is pinned, in transit or not.
    pub(super) fn is_empty(&self) -> bool {
        self.count.current == 0
    }

    pub(super) fn has_reserve(&self) -> bool {
        self.segments.values().any(|segment| segment.serves == SegmentUse::Reserve)
    }

    /// Segments by address.
    pub(super) fn segments(&self) -> &BTreeMap<u64, Segment> {
        &self.segments
    }

    /// Lets go of all segments and blocks, to be dropped without the lock. The counters stay for segments in transit.
    pub(super) fn close(&mut self) -> BTreeMap<u64, Segment> {
        self.free.clear();
        std::mem::take(&mut self.segments)
    }

    /// The block at that address.
    pub(super) fn block_at(&self, ptr: u64) -> Option<&Arc<PinnedBlock>> {
        let (_, segment) = self.segments.range(..=ptr).next_back()?;
        match segment.pieces.get(&ptr)? {
            Piece::Block(block) => Some(block),
            Piece::Free(_) => None,
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

    /// Adds the counters of pinned memory and the free bytes.
    pub(super) fn add_to(&self, stats: &mut HostStats, device_count: u32) {
        stats.allocations = self.count;
        stats.allocated_bytes = self.bytes;
        stats.num_host_alloc = self.pins;
        stats.num_host_free = self.unpins;
        stats.host_alloc_time = self.pin_time;
        stats.host_free_time = self.unpin_time;
        stats.cached_bytes += self.free.iter().map(|&(_, _, size, _)| size).sum::<u64>();
        stats.pinned_bytes_by_device = vec![0; device_count as usize];
        for segment in self.segments.values() {
            stats.pinned_bytes_by_device[segment.device.0 as usize] += segment.range.bytes();
        }
    }

    pub(super) fn for_each_stat(&mut self, act: fn(&mut Stat)) {
        act(&mut self.count);
        act(&mut self.bytes);
    }

    pub(super) fn reset_accumulated_stats(&mut self) {
        self.for_each_stat(Stat::reset_accumulated);
        (self.pins, self.unpins) = (0, 0);
        (self.pin_time, self.unpin_time) = (HostTime::default(), HostTime::default());
    }

    /// Panics if an invariant does not hold.
    pub(super) fn check(&self) {
        let mut free = BTreeSet::new();
        let mut pinned: BTreeMap<DeviceId, u64> = self.quota.keys().map(|&device| (device, 0)).collect();
        for (&start, segment) in &self.segments {
            *pinned.get_mut(&segment.device).expect("quota was reserved") += segment.range.bytes();
            let (mut end, mut was_free) = (start, false);
            for (&at, piece) in &segment.pieces {
                assert_eq!(at, end, "pieces leave no gaps");
                assert!(piece.size() > 0 && piece.size().is_multiple_of(GRANULARITY), "the granularity of pieces");
                let is_free = matches!(piece, Piece::Free(_));
                assert!(!(is_free && was_free), "free neighbours are merged");
                if let Piece::Block(block) = piece {
                    let location = (block.ptr(), block.segment(), block.device());
                    assert_eq!(location, (at, start, segment.device), "location of a block");
                    assert_ne!(block.state(), PinnedState::Merged, "a block of a segment is not merged");
                } else {
                    free.insert((segment.serves, segment.device, piece.size(), at));
                }
                (end, was_free) = (end + piece.size(), is_free);
            }
            assert_eq!(end, start + segment.range.bytes(), "pieces fill their segment");
        }
        assert_eq!(free, self.free, "free ranges");
        assert_eq!(pinned.values().sum::<u64>() + self.in_transit.1, self.bytes.current, "pinned bytes");
        assert_eq!(self.segments.len() as u64 + self.in_transit.0, self.count.current, "number of segments");
        assert!(pinned.iter().all(|(device, &bytes)| self.quota_of(*device) >= bytes), "quota covers pinned bytes");
    }
}
