//! The heap: segments of pinned memory, cut into blocks by address. Best fit by size; what is given back is joined with
//! its free neighbours at once.
//!
//! Small requests share segments; a large one has its own unless a free stretch fits; the reserved segment serves both.
//! A free stretch belongs to a lane: one kind of segment, counted to one device.
//!
//! No driver calls here. A segment that the driver is at work on is *moving*: it is not here but with whoever moves it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use warpool_driver::DeviceId;

use super::Shared;
use super::block::{BlockCell, Standing};
use super::pin::Pinned;
use super::size::Fit;
use super::stats::HostTime;
use crate::memory::{PinnedSettings, Stack, Stat};

/// Whose requests a segment serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    /// Small ones share it.
    Small,
    /// It was made for a large one.
    Large,
    /// Anybody's; it stays until the allocator is closed.
    Reserve,
}

/// A stretch of pinned memory that was obtained as one.
pub(super) struct Segment {
    pub(super) kind: Kind,
    /// Whose cap it counts to.
    pub(super) device: DeviceId,
    pub(super) pinned: Pinned,
    /// By address, without gaps.
    pub(super) pieces: BTreeMap<u64, Piece>,
    pub(super) stack: Option<Stack>,
}

/// A part of a segment.
pub(super) enum Piece {
    /// Nobody's: so many bytes.
    Free(u64),
    /// Somebody's, or a cache's.
    Out(Arc<BlockCell>),
}

impl Piece {
    pub(super) fn size(&self) -> u64 {
        match self {
            Self::Free(size) => *size,
            Self::Out(cell) => cell.size,
        }
    }
}

impl Segment {
    /// Whether it may go back to the driver before the end: nobody has any of it, and it is not the reserved one.
    fn may_go(&self) -> bool {
        self.kind != Kind::Reserve && self.is_whole()
    }

    /// Whether it is one free piece.
    fn is_whole(&self) -> bool {
        self.pieces.len() == 1 && matches!(self.pieces.first_key_value(), Some((_, Piece::Free(_))))
    }
}

/// Where a free stretch is found: kind, device, size, address.
type FreeKey = (Kind, DeviceId, u64, u64);

/// Why a promise of memory was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Short {
    /// The device whose cap it is; `None` for the one on all.
    pub(super) device: Option<DeviceId>,
    pub(super) cap: u64,
    /// What is pinned and counts.
    pub(super) pinned: u64,
    /// How much too much it would be.
    pub(super) excess: u64,
}

/// All pinned memory of an allocator.
#[derive(Default)]
pub(super) struct Heap {
    pub(super) segments: BTreeMap<u64, Segment>,
    free: BTreeSet<FreeKey>,
    /// Segments on their way to the driver, and their bytes.
    moving: (u64, u64),
    /// What is pinned, with what is about to be; by device.
    promised: BTreeMap<DeviceId, u64>,
    /// Bytes in segments for small requests.
    pub(super) bytes_small: u64,
    pub(super) count: Stat,
    pub(super) bytes: Stat,
    pub(super) pins: u64,
    pub(super) unpins: u64,
    pub(super) pin_time: HostTime,
    pub(super) unpin_time: HostTime,
}

impl Heap {
    /// Cuts a block from the smallest free stretch that it fits into.
    pub(super) fn take(&mut self, fit: &Fit, device: Option<DeviceId>, shared: &Arc<Shared>) -> Option<Arc<BlockCell>> {
        let own = if fit.is_small() { Kind::Small } else { Kind::Large };
        let key = self.search(own, fit.size, device).or_else(|| self.search(Kind::Reserve, fit.size, device))?;
        Some(self.cut(key, fit, shared))
    }

    /// Cuts a block from a segment that was just taken in.
    pub(super) fn take_from(&mut self, start: u64, fit: &Fit, shared: &Arc<Shared>) -> Arc<BlockCell> {
        let segment = &self.segments[&start];
        let key = (segment.kind, segment.device, segment.pinned.bytes, start);
        self.cut(key, fit, shared)
    }

    fn search(&self, kind: Kind, size: u64, device: Option<DeviceId>) -> Option<FreeKey> {
        let in_lane = |device: DeviceId| {
            let from = (kind, device, size, 0);
            self.free.range(from..=(kind, device, u64::MAX, u64::MAX)).next().copied()
        };
        match device {
            Some(device) => in_lane(device),
            None => {
                self.promised.keys().filter_map(|&device| in_lane(device)).min_by_key(|&(_, _, size, at)| (size, at))
            }
        }
    }

    /// Cuts a block from the low end of a free stretch. A rest within the slack stays with it.
    fn cut(&mut self, key: FreeKey, fit: &Fit, shared: &Arc<Shared>) -> Arc<BlockCell> {
        let (kind, device, there, at) = key;
        assert!(self.free.remove(&key), "it was found there");
        let (&start, segment) = self.segments.range_mut(..=at).next_back().expect("a free stretch lies in a segment");
        let rest = there - fit.size;
        let size = if rest <= fit.slack { there } else { fit.size };
        let cell = Arc::new(BlockCell::new(shared, at, size, start, device));
        segment.pieces.insert(at, Piece::Out(Arc::clone(&cell)));
        if size < there {
            segment.pieces.insert(at + size, Piece::Free(there - size));
            self.free.insert((kind, device, there - size, at + size));
        }
        cell
    }

    /// Takes a block back and joins it with its neighbours. Returns the start of its segment if all of that is free now
    /// and may go; `None` too if the segment is gone. The piece itself comes out, to be dropped without the lock.
    pub(super) fn give(&mut self, cell: &BlockCell) -> (Option<u64>, Option<Piece>) {
        let Some(segment) = self.segments.get_mut(&cell.segment) else { return (None, None) };
        let (kind, device) = (segment.kind, segment.device);
        let (mut at, mut size) = (cell.ptr, cell.size);
        let out = segment.pieces.remove(&at);
        assert!(matches!(&out, Some(Piece::Out(own)) if own.size == size), "a block comes back once");
        if let Some((&before, &Piece::Free(bytes))) = segment.pieces.range(..at).next_back() {
            segment.pieces.remove(&before);
            assert!(self.free.remove(&(kind, device, bytes, before)), "a free stretch is in the set");
            (at, size) = (before, size + bytes);
        }
        if let Some(&Piece::Free(bytes)) = segment.pieces.get(&(at + size)) {
            segment.pieces.remove(&(at + size));
            assert!(self.free.remove(&(kind, device, bytes, at + size)), "a free stretch is in the set");
            size += bytes;
        }
        segment.pieces.insert(at, Piece::Free(size));
        self.free.insert((kind, device, size, at));
        (segment.may_go().then_some(cell.segment), out)
    }

    /// Room for a segment of `least` to `most` bytes under the caps; how much of that there is. It counts as pinned
    /// from here on.
    pub(super) fn promise(
        &mut self,
        least: u64,
        most: u64,
        device: DeviceId,
        settings: &PinnedSettings,
    ) -> Result<u64, Short> {
        let of_device = self.pinned_for(device);
        let caps = [
            settings.device_cap_bytes.map(|cap| (Some(device), cap, of_device)),
            settings.cap_bytes.map(|cap| (None, cap, self.pinned())),
        ];
        let mut granted = most;
        for (device, cap, pinned) in caps.into_iter().flatten() {
            let room = cap.saturating_sub(pinned);
            if room < least {
                return Err(Short { device, cap, pinned, excess: least - room });
            }
            granted = granted.min(room / super::size::PAGE * super::size::PAGE).max(least);
        }
        *self.promised.entry(device).or_default() += granted;
        Ok(granted)
    }

    /// Nothing came of a promise.
    pub(super) fn unpromise(&mut self, device: DeviceId, bytes: u64) {
        *self.promised.get_mut(&device).expect("it was promised") -= bytes;
    }

    /// What is pinned, with what is about to be, for a device.
    pub(super) fn pinned_for(&self, device: DeviceId) -> u64 {
        self.promised.get(&device).copied().unwrap_or(0)
    }

    /// The same for all.
    pub(super) fn pinned(&self) -> u64 {
        self.promised.values().sum()
    }

    /// Takes in a segment that was promised before.
    pub(super) fn add(&mut self, kind: Kind, device: DeviceId, pinned: Pinned, stack: Option<Stack>, took: Duration) {
        let (start, bytes) = (pinned.ptr.0, pinned.bytes);
        let pieces = BTreeMap::from([(start, Piece::Free(bytes))]);
        let before = self.segments.insert(start, Segment { kind, device, pinned, pieces, stack });
        assert!(before.is_none(), "the driver gives no address twice");
        self.free.insert((kind, device, bytes, start));
        if kind == Kind::Small {
            self.bytes_small += bytes;
        }
        self.count.increase(1);
        self.bytes.increase(bytes);
        self.pins += 1;
        self.pin_time.add(took);
    }

    /// Segments that are one free piece and may go, of a device or of all: size and start, smallest first.
    pub(super) fn spare(&self, device: Option<DeviceId>) -> Vec<(u64, u64)> {
        let may_go = |segment: &Segment| segment.may_go() && device.is_none_or(|device| segment.device == device);
        let all = self.segments.iter().filter(|(_, segment)| may_go(segment));
        let mut spare: Vec<(u64, u64)> = all.map(|(&start, segment)| (segment.pinned.bytes, start)).collect();
        spare.sort_unstable();
        spare
    }

    /// Takes a segment out, if it is one free piece, so that the driver can be told. It counts as pinned until
    /// [`end_move`](Self::end_move). It is taken out before the driver has it: from then on the address may come again,
    /// to another thread.
    pub(super) fn begin_move(&mut self, start: u64) -> Option<Segment> {
        let segment = self.segments.get(&start).filter(|segment| segment.is_whole())?;
        let bytes = segment.pinned.bytes;
        assert!(self.free.remove(&(segment.kind, segment.device, bytes, start)), "a free stretch is in the set");
        self.moving.0 += 1;
        self.moving.1 += bytes;
        self.segments.remove(&start)
    }

    /// The driver has it, and `took` so long; or has refused, and it is back.
    pub(super) fn end_move(&mut self, segment: Segment, took: Option<Duration>) {
        let (start, bytes) = (segment.pinned.ptr.0, segment.pinned.bytes);
        self.moving.0 -= 1;
        self.moving.1 -= bytes;
        let Some(took) = took else {
            self.free.insert((segment.kind, segment.device, bytes, start));
            let before = self.segments.insert(start, segment);
            assert!(before.is_none(), "the driver gives no address twice");
            return;
        };
        if segment.kind == Kind::Small {
            self.bytes_small -= bytes;
        }
        self.unpromise(segment.device, bytes);
        self.count.decrease(1);
        self.bytes.decrease(bytes);
        self.unpins += 1;
        self.unpin_time.add(took);
    }

    /// Bytes of the segments that are on their way to the driver.
    pub(super) fn bytes_moving(&self) -> u64 {
        self.moving.1
    }

    /// Whether the reserved segment is there.
    pub(super) fn has_reserve(&self) -> bool {
        self.segments.values().any(|segment| segment.kind == Kind::Reserve)
    }

    /// Lets all segments and blocks go, to be dropped without the lock. What is on its way to the driver still comes to
    /// its end, so the counters stay.
    pub(super) fn close(&mut self) -> BTreeMap<u64, Segment> {
        self.free.clear();
        std::mem::take(&mut self.segments)
    }

    /// The block that starts there, if somebody has it or a cache does.
    pub(super) fn block_at(&self, ptr: u64) -> Option<&Arc<BlockCell>> {
        let (_, segment) = self.segments.range(..=ptr).next_back()?;
        match segment.pieces.get(&ptr)? {
            Piece::Out(cell) => Some(cell),
            Piece::Free(_) => None,
        }
    }

    /// Every block that is cut out.
    pub(super) fn blocks(&self) -> impl Iterator<Item = &Arc<BlockCell>> {
        let pieces = self.segments.values().flat_map(|segment| segment.pieces.values());
        pieces.filter_map(|piece| match piece {
            Piece::Out(cell) => Some(cell),
            Piece::Free(_) => None,
        })
    }

    /// Bytes of the free stretches.
    pub(super) fn bytes_free(&self) -> u64 {
        self.free.iter().map(|&(_, _, size, _)| size).sum()
    }

    /// What must hold.
    pub(super) fn check(&self) {
        let mut free = BTreeSet::new();
        let mut promised: BTreeMap<DeviceId, u64> = self.promised.keys().map(|&device| (device, 0)).collect();
        for (&start, segment) in &self.segments {
            *promised.get_mut(&segment.device).expect("it was promised") += segment.pinned.bytes;
            let (mut end, mut was_free) = (start, false);
            for (&at, piece) in &segment.pieces {
                assert_eq!(at, end, "pieces leave no gaps");
                assert!(piece.size() > 0 && piece.size().is_multiple_of(super::size::GRAIN), "pieces are whole grains");
                let is_free = matches!(piece, Piece::Free(_));
                assert!(!(is_free && was_free), "free neighbours are joined");
                if let Piece::Out(cell) = piece {
                    assert_eq!(
                        (cell.ptr, cell.segment, cell.device),
                        (at, start, segment.device),
                        "a block knows its place"
                    );
                    assert_ne!(cell.standing(), Standing::Gone, "a block that is cut out is somewhere");
                } else {
                    free.insert((segment.kind, segment.device, piece.size(), at));
                }
                (end, was_free) = (end + piece.size(), is_free);
            }
            assert_eq!(end, start + segment.pinned.bytes, "pieces fill their segment");
        }
        assert_eq!(free, self.free, "the set has all free stretches, and no others");
        assert_eq!(
            promised.values().sum::<u64>() + self.moving.1,
            self.bytes.current,
            "the counters know what is pinned"
        );
        assert_eq!(self.segments.len() as u64 + self.moving.0, self.count.current, "and how many segments there are");
        assert!(promised.iter().all(|(device, &bytes)| self.pinned_for(*device) >= bytes), "all of it was promised");
    }
}
