//! What the recorded allocator had, from moment to moment, as the recording alone tells it: regions of memory, and the
//! blocks in them.
//!
//! A ledger chooses nothing. Forwards it takes each block where the recording says; backwards it undoes that. What it
//! is asked is which other blocks would have served as well, which tells pools apart.
//!
//! A *region* is what the allocator got as one: a segment, or the address range of an expandable segment with what is
//! mapped in it.

#[cfg(test)]
mod tests;
mod undo;

use std::collections::{BTreeMap, BTreeSet};

use warpool::memory::{BlockState, MemPoolId, SegmentInfo, SegmentKind};

use super::sizes::{MIB, Sizes};

/// Names a region: its number in the order of appearance, the same for every walk over the same events.
pub(super) type RegionId = u32;

/// Memory obtained as one.
#[derive(Clone, Debug)]
pub(super) struct Region {
    /// The lowest address that it ever had.
    pub base: u64,
    /// The end of the highest that it has.
    pub end: u64,
    pub stream: u64,
    pub kind: SegmentKind,
    pub expandable: bool,
    /// Its pool, if the recording says so.
    pub pool: Option<MemPoolId>,
    /// What of it is there; none when it is gone.
    pub bytes: u64,
}

/// A piece of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub bytes: u64,
    pub requested: u64,
    pub state: BlockState,
    pub region: RegionId,
}

/// Where a free piece stands in the order of searches: size, age of the region, address.
type FreeKey = (u64, RegionId, u64);

/// The regions and their blocks at one moment.
#[derive(Clone, Debug)]
pub(super) struct Ledger {
    sizes: Sizes,
    by_registration: bool,
    regions: Vec<Region>,
    /// Those that are there, by their base.
    places: BTreeMap<u64, RegionId>,
    pieces: BTreeMap<u64, Piece>,
    /// Free pieces of a stream and kind, in the order in which a search meets them.
    free: BTreeMap<(u64, SegmentKind), BTreeSet<FreeKey>>,
    bytes: u64,
}

impl Ledger {
    pub fn new(sizes: Sizes, by_registration: bool) -> Self {
        Self {
            sizes,
            by_registration,
            regions: Vec::new(),
            places: BTreeMap::new(),
            pieces: BTreeMap::new(),
            free: BTreeMap::new(),
            bytes: 0,
        }
    }

    /// The state that a snapshot shows.
    pub fn of_segments(sizes: Sizes, by_registration: bool, segments: &[&SegmentInfo]) -> Self {
        let mut ledger = Self::new(sizes, by_registration);
        for segment in segments {
            let region = if segment.is_expandable {
                ledger.mapped_region(
                    segment.address,
                    segment.total_size,
                    segment.stream,
                    Some(segment.kind),
                    Some(segment.pool),
                    true,
                )
            } else {
                ledger.add_region(
                    segment.address,
                    segment.total_size,
                    segment.stream,
                    segment.kind,
                    false,
                    Some(segment.pool),
                )
            };
            for block in &segment.blocks {
                let piece = Piece { bytes: block.size, requested: block.requested_size, state: block.state, region };
                ledger.insert(block.address, piece);
            }
        }
        ledger
    }

    /// The same address ranges, with nothing in use in them.
    pub fn ranges_only(&self) -> Self {
        let mut ranges = Self::new(self.sizes.clone(), false);
        for (&addr, piece) in &self.pieces {
            let region = self.region(piece.region);
            if region.expandable {
                let id = ranges.mapped_region(addr, piece.bytes, region.stream, Some(region.kind), region.pool, true);
                ranges.insert(addr, Piece { state: BlockState::Inactive, region: id, ..*piece });
                ranges.merge(addr);
            }
        }
        ranges
    }

    pub fn sizes(&self) -> &Sizes {
        &self.sizes
    }

    pub fn region(&self, id: RegionId) -> &Region {
        &self.regions[id as usize]
    }

    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// All bytes that are there.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The pieces of what is there, by address.
    pub fn pieces(&self) -> &BTreeMap<u64, Piece> {
        &self.pieces
    }

    /// Gets a segment.
    pub fn add_segment(&mut self, addr: u64, bytes: u64, stream: u64, pool: Option<MemPoolId>) -> RegionId {
        let region = self.add_region(addr, bytes, stream, Sizes::kind_of_segment(bytes), false, pool);
        self.insert(addr, Piece { bytes, requested: 0, state: BlockState::Inactive, region });
        region
    }

    /// Gives back a segment that is wholly free. `None` if it is not there or not free.
    pub fn remove_segment(&mut self, addr: u64, bytes: u64) -> Option<RegionId> {
        let piece = *self.pieces.get(&addr)?;
        let region = piece.region;
        if piece.state != BlockState::Inactive || piece.bytes != bytes || self.region(region).bytes != bytes {
            return None;
        }
        self.remove(addr);
        self.shrink(region, bytes);
        Some(region)
    }

    /// Maps a piece of an expandable segment; a new one, if no range of the stream reaches there.
    pub fn map(&mut self, addr: u64, bytes: u64, stream: u64, pool: Option<MemPoolId>) -> RegionId {
        let kind = Sizes::kind_of_segment(bytes);
        let region = self.mapped_region(addr, bytes, stream, Some(kind), pool, false);
        self.add_free(addr, bytes, region);
        region
    }

    fn add_free(&mut self, addr: u64, bytes: u64, region: RegionId) {
        self.insert(addr, Piece { bytes, requested: 0, state: BlockState::Inactive, region });
        self.merge(addr);
    }

    /// Unmaps a free stretch. `None` if it is not there or not free.
    pub fn unmap(&mut self, addr: u64, bytes: u64) -> Option<RegionId> {
        let (start, piece) = self.free_around(addr, bytes)?;
        self.remove(start);
        let free = |bytes| Piece { bytes, requested: 0, ..piece };
        if start < addr {
            self.insert(start, free(addr - start));
        }
        let (end, piece_end) = (addr + bytes, start + piece.bytes);
        if end < piece_end {
            self.insert(end, free(piece_end - end));
        }
        self.shrink(piece.region, bytes);
        Some(piece.region)
    }

    /// Takes the block that starts at `addr` for a request. `None` if there is none that is free and large enough.
    pub fn take(&mut self, addr: u64, requested: u64) -> Option<RegionId> {
        let piece = *self.pieces.get(&addr)?;
        let size = self.sizes.round(requested);
        if piece.state != BlockState::Inactive || piece.bytes < size {
            return None;
        }
        self.remove(addr);
        let rest = piece.bytes - size;
        let bytes = if rest > 0 && self.sizes.splits(size, rest) {
            self.insert(addr + size, Piece { bytes: rest, requested: 0, ..piece });
            size
        } else {
            piece.bytes
        };
        self.insert(addr, Piece { bytes, requested, state: BlockState::ActiveAllocated, ..piece });
        Some(piece.region)
    }

    /// The owner gave it back, and streams may still use it. `None` if nobody has it.
    pub fn give_back(&mut self, addr: u64) -> Option<()> {
        let piece = self.pieces.get_mut(&addr).filter(|piece| piece.state == BlockState::ActiveAllocated)?;
        piece.state = BlockState::ActivePendingFree;
        Some(())
    }

    /// Frees what starts at `addr`, whoever had it. `None` if nobody did.
    pub fn release(&mut self, addr: u64) -> Option<()> {
        let piece = *self.pieces.get(&addr).filter(|piece| piece.state != BlockState::Inactive)?;
        self.insert(addr, Piece { state: BlockState::Inactive, ..piece });
        self.merge(addr);
        Some(())
    }

    /// Free blocks, with their regions, that a search for `size` would have met before the one at `chosen`, or at all
    /// where nothing was chosen, had they been in its pool.
    pub fn rivals(&self, stream: u64, size: u64, chosen: Option<u64>) -> Vec<(u64, RegionId)> {
        const MANY: usize = 256;
        let Some(free) = self.free.get(&(stream, Sizes::kind(size))) else { return Vec::new() };
        let own = chosen.and_then(|addr| Some((addr, self.pieces.get(&addr)?)));
        let own_key = own.map_or((u64::MAX, 0, 0), |(addr, piece)| self.key(addr, piece));
        if own_key < (size, 0, 0) {
            // Too small for the request: the recording does not fit itself.
            return Vec::new();
        }
        let own_room = own.map_or(u64::MAX, |(addr, piece)| self.room(addr, piece));
        free.range((size, 0, 0)..own_key)
            .map(|&(_, _, addr)| (addr, &self.pieces[&addr]))
            // Of growing blocks the one that could grow least is preferred, so a tail that could grow more is no rival.
            .filter(|&(addr, piece)| self.sizes.may_serve(size, piece.bytes) && self.room(addr, piece) <= own_room)
            .map(|(addr, piece)| (addr, piece.region))
            .take(MANY)
            .collect()
    }

    /// Regions of which something could be given back to the driver.
    pub fn releasable(&self) -> Vec<RegionId> {
        let mut found = Vec::new();
        for (stream_kind, free) in &self.free {
            let chunk = self.sizes.chunk(stream_kind.1);
            for &(bytes, _, addr) in free {
                let id = self.pieces[&addr].region;
                let region = self.region(id);
                let fits = if region.expandable {
                    let first = region.base + (addr - region.base).next_multiple_of(chunk);
                    first + chunk <= addr + bytes
                } else {
                    bytes == region.bytes
                };
                if fits {
                    found.push(id);
                }
            }
        }
        found
    }

    /// How large a free block could get.
    fn room(&self, addr: u64, piece: &Piece) -> u64 {
        let region = self.region(piece.region);
        if !region.expandable {
            return piece.bytes;
        }
        let end = addr + piece.bytes;
        if end == region.end {
            return u64::MAX;
        }
        let next = self.pieces.range(end..).next().map_or(end, |(&at, _)| at);
        next - addr
    }

    fn key(&self, addr: u64, piece: &Piece) -> FreeKey {
        (piece.bytes, if self.by_registration { piece.region } else { 0 }, addr)
    }

    /// Puts a piece in its place. Where the recording does not fit itself, another may stand there, and goes.
    fn insert(&mut self, addr: u64, piece: Piece) {
        if self.pieces.contains_key(&addr) {
            self.remove(addr);
        }
        if piece.state == BlockState::Inactive {
            let region = self.region(piece.region);
            let shelf = (region.stream, region.kind);
            let key = self.key(addr, &piece);
            self.free.entry(shelf).or_default().insert(key);
        }
        self.pieces.insert(addr, piece);
    }

    fn remove(&mut self, addr: u64) -> Piece {
        let piece = self.pieces.remove(&addr).expect("only what was found is removed");
        if piece.state == BlockState::Inactive {
            let region = self.region(piece.region);
            let shelf = (region.stream, region.kind);
            let key = self.key(addr, &piece);
            let was_there = self.free.get_mut(&shelf).is_some_and(|free| free.remove(&key));
            assert!(was_there, "a free piece stands on its shelf");
        }
        piece
    }

    /// Joins the free piece at `addr` with free neighbours of its region.
    fn merge(&mut self, addr: u64) {
        let mut piece = self.remove(addr);
        let mut start = addr;
        let is_friend = |at: u64, other: &Piece, end: u64| {
            at + other.bytes == end && other.region == piece.region && other.state == BlockState::Inactive
        };
        if let Some((&at, other)) = self.pieces.range(..addr).next_back()
            && is_friend(at, other, addr)
        {
            start = at;
            piece.bytes += self.remove(at).bytes;
        }
        let end = start + piece.bytes;
        if let Some(other) = self.pieces.get(&end)
            && other.region == piece.region
            && other.state == BlockState::Inactive
        {
            piece.bytes += self.remove(end).bytes;
        }
        self.insert(start, Piece { requested: 0, ..piece });
    }

    /// The free piece that has all of that range.
    fn free_around(&self, addr: u64, bytes: u64) -> Option<(u64, Piece)> {
        let (&start, &piece) = self.pieces.range(..=addr).next_back()?;
        (piece.state == BlockState::Inactive && addr + bytes <= start + piece.bytes).then_some((start, piece))
    }

    fn add_region(
        &mut self,
        addr: u64,
        bytes: u64,
        stream: u64,
        kind: SegmentKind,
        expandable: bool,
        pool: Option<MemPoolId>,
    ) -> RegionId {
        let id = RegionId::try_from(self.regions.len()).expect("fewer than 2^32 regions");
        self.regions.push(Region { base: addr, end: addr + bytes, stream, kind, expandable, pool, bytes });
        self.places.insert(addr, id);
        self.bytes += bytes;
        id
    }

    /// The range that a mapped piece belongs to, grown by it. `near` finds one across small gaps too.
    fn mapped_region(
        &mut self,
        addr: u64,
        bytes: u64,
        stream: u64,
        kind: Option<SegmentKind>,
        pool: Option<MemPoolId>,
        near: bool,
    ) -> RegionId {
        // Ranges lie further apart than a device has memory, so what is near belongs together.
        let reach = if near { 4096 * MIB } else { 0 };
        let fits = |region: &Region| {
            region.expandable
                && region.stream == stream
                && kind.is_none_or(|kind| kind == region.kind)
                && (pool.is_none() || region.pool.is_none() || pool == region.pool)
                && addr <= region.end.saturating_add(reach)
                && addr + bytes + reach >= region.base
                && (near || addr >= region.base)
        };
        let below = self.places.range(..=addr).next_back();
        let above = self.places.range(addr..).next();
        let found = below.into_iter().chain(above).map(|(_, &id)| id).find(|&id| fits(self.region(id)));
        let Some(id) = found else {
            let whole_chunks = bytes.is_multiple_of(self.sizes.chunk(SegmentKind::Large));
            let guess = if whole_chunks { SegmentKind::Large } else { SegmentKind::Small };
            return self.add_region(addr, bytes, stream, kind.unwrap_or(guess), true, pool);
        };
        let region = &mut self.regions[id as usize];
        let base = region.base;
        region.base = base.min(addr);
        region.end = region.end.max(addr + bytes);
        region.bytes += bytes;
        region.pool = region.pool.or(pool);
        if addr < base {
            self.places.remove(&base);
            self.places.insert(addr, id);
        }
        self.bytes += bytes;
        id
    }

    /// A region lost some bytes; without any it is gone. Where the recording does not fit itself, there may be less
    /// than it says.
    fn shrink(&mut self, id: RegionId, bytes: u64) {
        self.bytes = self.bytes.saturating_sub(bytes);
        let region = &mut self.regions[id as usize];
        region.bytes = region.bytes.saturating_sub(bytes);
        if region.bytes == 0 {
            self.places.remove(&region.base);
        } else if region.expandable {
            let last = self.pieces.range(region.base..region.end).next_back();
            region.end = last.map_or(region.base, |(&at, last)| at + last.bytes);
        }
    }
}
