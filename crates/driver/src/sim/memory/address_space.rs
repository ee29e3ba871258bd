//! The address space: which addresses belong to what. What they belonged to before is in `tombs.rs`.
//!
//! Addresses lie above all that this process can have itself, so that pinned host memory keeps its own. They are handed
//! out upwards and come again as late as possible, so that a stale address is told from a live one. A replay may place
//! memory elsewhere (`placement.rs`).

use std::collections::BTreeMap;

use super::bytes::Bytes;
use super::quarantine::{Gone, Tomb, Tombs};
use super::shadow::Shadow;
use crate::{Access, DeviceAccess, DeviceId, DevicePtr, PoolId};

/// The first address and the first beyond.
const FIRST: u64 = 1 << 47;
const BEYOND: u64 = 1 << 56;

/// A piece of memory: contents and history. Reached by addresses through a region or a mapping.
#[derive(Debug)]
pub struct Piece {
    pub bytes: u64,
    /// Whose memory it is; `None` for the host's.
    pub device: Option<DeviceId>,
    /// The call that pinned it, if it is the host's.
    pub pinned_by: Option<u64>,
    pub contents: Bytes,
    pub shadow: Shadow,
}

/// Names a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PieceId(pub u64);

/// What a range of addresses is.
#[derive(Debug)]
pub enum Region {
    /// Memory from `mem_alloc`.
    Plain { piece: PieceId },
    /// Memory from a pool. `freed` once the free is queued.
    Pooled { piece: PieceId, pool: PoolId, freed: bool },
    /// Addresses that nodes of a graph allocate and free; with memory only in between. `held` from the launch that
    /// allocates without freeing until the free is queued.
    OfGraph { piece: Option<PieceId>, pool: PoolId, held: bool },
    /// Pinned host memory, at the address that the host knows.
    Pinned { piece: PieceId, registered: bool },
    /// Reserved addresses with what is mapped in them.
    Reserved { mappings: BTreeMap<u64, Mapping> },
}

/// A piece mapped into reserved addresses.
#[derive(Clone, Debug)]
pub struct Mapping {
    pub bytes: u64,
    pub piece: PieceId,
    pub access: Vec<DeviceAccess>,
    /// The last call that unmapped something from these addresses; 0 if none has. Work queued before it means what was
    /// there then.
    pub unmapped_at: u64,
}

/// Why an address cannot be used.
#[derive(Clone, Copy, Debug)]
pub enum Fault {
    /// It belongs to nothing, and is not remembered to have.
    Nothing,
    /// It belonged to something.
    Gone(Tomb),
    /// It is not for this device.
    Denied,
}

/// Where an address leads: so many bytes of a piece.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    pub piece: PieceId,
    pub offset: u64,
    pub bytes: u64,
}

/// All addresses.
#[derive(Debug)]
pub struct Space {
    pub regions: BTreeMap<u64, (u64, Region)>,
    tombs: Tombs,
    next: u64,
}

impl Default for Space {
    fn default() -> Self {
        Self { regions: BTreeMap::new(), tombs: Tombs::default(), next: FIRST }
    }
}

impl Space {
    /// Free addresses for `bytes`, aligned; `None` if the space is used up.
    pub fn find(&mut self, bytes: u64, align: u64) -> Option<u64> {
        let start = self.fit(self.next, bytes, align).or_else(|| self.fit(FIRST, bytes, align))?;
        self.next = start + bytes;
        Some(start)
    }

    fn fit(&self, from: u64, bytes: u64, align: u64) -> Option<u64> {
        let mut start = from.next_multiple_of(align);
        while start.checked_add(bytes)? <= BEYOND {
            match self.overlap(start, bytes) {
                None => return Some(start),
                Some(end) => start = end.next_multiple_of(align),
            }
        }
        None
    }

    /// Where the last region ends that overlaps these addresses, if any does.
    fn overlap(&self, start: u64, bytes: u64) -> Option<u64> {
        self.in_the_way(start, bytes).map(|(at, size, _)| at + size)
    }

    /// The last region that overlaps these addresses, if any does: its start, its size, and what it is.
    pub fn in_the_way(&self, start: u64, bytes: u64) -> Option<(u64, u64, &Region)> {
        let (&at, (size, region)) = self.regions.range(..start.saturating_add(bytes)).next_back()?;
        (at + size > start).then_some((at, *size, region))
    }

    /// Whether these addresses are free and not the host's own.
    pub fn may_give(&self, start: u64, bytes: u64) -> bool {
        start >= FIRST && self.is_free(start, bytes)
    }

    /// Whether these addresses are free.
    pub fn is_free(&self, start: u64, bytes: u64) -> bool {
        start != 0 && start.checked_add(bytes).is_some_and(|end| end <= BEYOND) && self.overlap(start, bytes).is_none()
    }

    pub fn insert(&mut self, start: u64, bytes: u64, region: Region) {
        debug_assert!(self.overlap(start, bytes).is_none(), "two regions share addresses");
        self.tombs.clear(start, start + bytes);
        self.regions.insert(start, (bytes, region));
    }

    /// Remembers that a range is gone.
    pub fn bury(&mut self, tomb: Tomb) {
        self.tombs.bury(tomb);
    }

    /// The region that `address` lies in: its start, its size, and what it is.
    pub fn region_at(&self, address: u64) -> Option<(u64, u64, &Region)> {
        let (&start, (bytes, region)) = self.regions.range(..=address).next_back()?;
        (address < start + bytes).then_some((start, *bytes, region))
    }

    /// Where `ptr` leads, and how far. `device` is who asks, with work that call number `queued_at` queued; `may`
    /// decides about memory that is not mapped by hand, by its pool if it is of one.
    pub fn resolve(
        &self,
        ptr: DevicePtr,
        device: DeviceId,
        write: bool,
        queued_at: u64,
        may: impl Fn(PieceId, Option<PoolId>) -> bool,
    ) -> Result<Place, Fault> {
        let Some((_, _, region)) = self.region_at(ptr.0) else { return Err(self.why_gone(ptr.0)) };
        let allowed = match region {
            Region::Pinned { .. } => true,
            Region::Plain { piece } => may(*piece, None),
            Region::Pooled { piece, pool, .. } | Region::OfGraph { piece: Some(piece), pool, .. } => {
                may(*piece, Some(*pool))
            }
            Region::OfGraph { piece: None, .. } => false,
            Region::Reserved { mappings } => mappings.range(..=ptr.0).next_back().is_some_and(|(_, mapping)| {
                mapping.access.iter().any(|rights| {
                    rights.device == device
                        && (rights.access == Access::ReadWrite || (rights.access == Access::Read && !write))
                })
            }),
        };
        if let Some(tomb) = self.remapped(ptr, queued_at) {
            return Err(Fault::Gone(tomb));
        }
        match self.locate(ptr) {
            Some(place) if allowed => Ok(place),
            Some(_) => Err(Fault::Denied),
            None => Err(self.why_gone(ptr.0)),
        }
    }

    /// What was unmapped at `ptr` since call number `since`, if something else is mapped there now.
    fn remapped(&self, ptr: DevicePtr, since: u64) -> Option<Tomb> {
        let Some((_, _, Region::Reserved { mappings })) = self.region_at(ptr.0) else { return None };
        let (&start, mapping) = mappings.range(..=ptr.0).next_back()?;
        let stale = ptr.0 < start + mapping.bytes && mapping.unmapped_at > since;
        let at = mapping.unmapped_at;
        stale.then_some(Tomb { start, bytes: mapping.bytes, gone: Gone::Remapped, at, pinned_by: None })
    }

    /// The last call that unmapped something from `[start, start + bytes)`, as far as is remembered; 0 if none did.
    pub fn last_unmap(&self, start: u64, bytes: u64) -> u64 {
        let unmapped = self.tombs.within(start, start + bytes).filter(|tomb| tomb.gone == Gone::Unmapped);
        unmapped.map(|tomb| tomb.at).max().unwrap_or(0)
    }

    /// Where `ptr` leads, whoever asks.
    pub fn locate(&self, ptr: DevicePtr) -> Option<Place> {
        let (start, bytes, region) = self.region_at(ptr.0)?;
        let place = |piece, start, bytes| Place { piece, offset: ptr.0 - start, bytes: start + bytes - ptr.0 };
        match region {
            Region::Pinned { piece, .. }
            | Region::Plain { piece }
            | Region::Pooled { piece, .. }
            | Region::OfGraph { piece: Some(piece), .. } => Some(place(*piece, start, bytes)),
            Region::OfGraph { piece: None, .. } => None,
            Region::Reserved { mappings } => {
                let (&at, mapping) = mappings.range(..=ptr.0).next_back()?;
                (ptr.0 < at + mapping.bytes).then(|| place(mapping.piece, at, mapping.bytes))
            }
        }
    }

    /// Why there is nothing at `address`.
    pub fn why_gone(&self, address: u64) -> Fault {
        self.tombs.at(address).map_or(Fault::Nothing, Fault::Gone)
    }
}
