//! The address space: which addresses are in use, and for what.
//!
//! Device addresses lie above all addresses of this process, so that pinned host memory keeps its address. They are
//! given out upwards and reused as late as possible, so that a stale address is not mistaken for a live one. Freed
//! ranges stay in quarantine. A replay may place memory elsewhere (`placement.rs`), or have addresses drawn from a
//! range.

use std::collections::BTreeMap;

use super::backing::BackingId;
use super::quarantine::{FreedRange, Quarantine, Removal};
use super::reservation::Reservation;
use crate::sim::rng;
use crate::{DeviceId, DevicePtr, PoolId};

/// The first device address, and the end of the address space.
const FIRST: u64 = 1 << 47;
const END: u64 = 1 << 56;

/// What an address range is used for.
#[derive(Debug)]
pub enum Region {
    /// Memory from `mem_alloc`.
    Allocation { backing: BackingId },
    /// Memory from a pool. `freed` once the free is queued.
    PoolAllocation { backing: BackingId, pool: PoolId, freed: bool },
    /// Addresses that nodes of a graph allocate and free; there is memory only in between. `live` from the launch that
    /// allocates without freeing until the free is queued.
    GraphMemory { backing: Option<BackingId>, pool: PoolId, live: bool },
    /// Pinned host memory at its host address, and the device that it was pinned with.
    Pinned { backing: BackingId, device: DeviceId, registered: bool },
    /// Reserved addresses with what is mapped in them.
    Reserved(Reservation),
}

/// Why an address cannot be accessed.
#[derive(Clone, Copy, Debug)]
pub enum AccessFault {
    /// Nothing is there, and nothing is known to have been.
    NotMapped,
    /// What was there was freed or unmapped.
    Freed(FreedRange),
    /// The device has no access.
    Denied,
}

/// What an address refers to: `bytes` bytes of backing memory from `offset` on.
#[derive(Clone, Copy, Debug)]
pub struct Location {
    pub backing: BackingId,
    pub offset: u64,
    pub bytes: u64,
}

/// All addresses.
#[derive(Debug)]
pub struct AddressSpace {
    /// By first address, with the size; without overlaps.
    regions: BTreeMap<u64, (u64, Region)>,
    quarantine: Quarantine,
    next: u64,
    scatter: Option<Scatter>,
}

/// Where addresses are drawn from, instead of being given out upwards.
#[derive(Debug)]
struct Scatter {
    range: std::ops::Range<u64>,
    seed: u64,
    drawn: u64,
}

impl Default for AddressSpace {
    fn default() -> Self {
        Self { regions: BTreeMap::new(), quarantine: Quarantine::default(), next: FIRST, scatter: None }
    }
}

impl AddressSpace {
    /// Unused addresses for `bytes`, aligned; `None` if no gap is large enough.
    pub fn find(&mut self, bytes: u64, align: u64) -> Option<u64> {
        if let Some(start) = self.draw(bytes, align) {
            return Some(start);
        }
        let start = self.fit(self.next, bytes, align).or_else(|| self.fit(FIRST, bytes, align))?;
        self.next = start + bytes;
        Some(start)
    }

    /// Draws addresses from `range` from now on.
    pub fn scatter(&mut self, seed: u64, range: std::ops::Range<u64>) {
        self.scatter = Some(Scatter { range, seed, drawn: 0 });
    }

    /// Unused addresses that the seed selects; `None` if nothing is drawn, or the range is nearly full.
    fn draw(&mut self, bytes: u64, align: u64) -> Option<u64> {
        const DRAWS_MAX: u64 = 64;
        let Scatter { range, seed, drawn } = self.scatter.as_mut()?;
        let first = range.start.max(1).checked_next_multiple_of(align)?;
        let places = range.end.min(END).checked_sub(bytes)?.checked_sub(first)? / align + 1;
        let (seed, at) = (*seed, *drawn);
        *drawn += DRAWS_MAX;
        let start = |draw| first + rng::draw(seed, 0, at + draw, 0) % places * align;
        (0..DRAWS_MAX).map(start).find(|&start| self.is_free(start, bytes))
    }

    fn fit(&self, from: u64, bytes: u64, align: u64) -> Option<u64> {
        let mut start = from.next_multiple_of(align);
        while start.checked_add(bytes)? <= END {
            match self.overlapping(start, bytes) {
                None => return Some(start),
                Some((at, size, _)) => start = (at + size).next_multiple_of(align),
            }
        }
        None
    }

    /// The last region that overlaps these addresses: its start, its size, and what it is.
    pub fn overlapping(&self, start: u64, bytes: u64) -> Option<(u64, u64, &Region)> {
        let (&at, (size, region)) = self.regions.range(..start.saturating_add(bytes)).next_back()?;
        (at + size > start).then_some((at, *size, region))
    }

    /// Whether these addresses are unused.
    pub fn is_free(&self, start: u64, bytes: u64) -> bool {
        start != 0 && start.checked_add(bytes).is_some_and(|end| end <= END) && self.overlapping(start, bytes).is_none()
    }

    /// Whether these addresses are unused, and no host address could be among them.
    pub fn is_free_of_host(&self, start: u64, bytes: u64) -> bool {
        start >= FIRST && self.is_free(start, bytes)
    }

    /// Adds a region at unused addresses.
    pub fn insert(&mut self, start: u64, bytes: u64, region: Region) {
        debug_assert!(self.overlapping(start, bytes).is_none(), "two regions share addresses");
        self.quarantine.remove(start, start + bytes);
        self.regions.insert(start, (bytes, region));
    }

    /// Removes the region that starts at `start` and puts its addresses into quarantine, as freed by call number `at`.
    pub fn remove(&mut self, start: u64, removal: Removal, at: u64, pinned_by: Option<u64>) -> Option<(u64, Region)> {
        let (bytes, region) = self.regions.remove(&start)?;
        self.quarantine(FreedRange { start, bytes, removal, freed_at: at, pinned_by });
        Some((bytes, region))
    }

    /// Puts a range into quarantine that was freed or unmapped while its addresses stay reserved.
    pub fn quarantine(&mut self, range: FreedRange) {
        self.quarantine.add(range);
    }

    /// The region that starts at `start`, with its size.
    pub fn get(&self, start: u64) -> Option<(u64, &Region)> {
        self.regions.get(&start).map(|(bytes, region)| (*bytes, region))
    }

    /// The same, to change it.
    pub fn get_mut(&mut self, start: u64) -> Option<(u64, &mut Region)> {
        self.regions.get_mut(&start).map(|(bytes, region)| (*bytes, region))
    }

    /// The region that `address` lies in: its start, its size, and what it is.
    pub fn region_at(&self, address: u64) -> Option<(u64, u64, &Region)> {
        let (&start, (bytes, region)) = self.regions.range(..=address).next_back()?;
        (address < start + bytes).then_some((start, *bytes, region))
    }

    /// The reservation that contains the range.
    pub fn reservation(&mut self, ptr: DevicePtr, bytes: u64) -> Option<&mut Reservation> {
        let (&start, (size, region)) = self.regions.range_mut(..=ptr.0).next_back()?;
        match region {
            Region::Reserved(reservation) if ptr.0.checked_add(bytes)? <= start + *size => Some(reservation),
            _ => None,
        }
    }

    /// All regions with their sizes.
    pub fn regions(&self) -> impl Iterator<Item = (u64, &Region)> {
        self.regions.values().map(|(bytes, region)| (*bytes, region))
    }

    /// What `ptr` refers to, without a check of access rights.
    pub fn locate(&self, ptr: DevicePtr) -> Option<Location> {
        let (start, bytes, region) = self.region_at(ptr.0)?;
        let (start, bytes, backing) = match region {
            Region::Pinned { backing, .. }
            | Region::Allocation { backing }
            | Region::PoolAllocation { backing, .. }
            | Region::GraphMemory { backing: Some(backing), .. } => (start, bytes, *backing),
            Region::GraphMemory { backing: None, .. } => return None,
            Region::Reserved(reservation) => {
                let (start, mapping) = reservation.get(ptr.0)?;
                (start, mapping.bytes, mapping.backing)
            }
        };
        Some(Location { backing, offset: ptr.0 - start, bytes: start + bytes - ptr.0 })
    }

    /// What was unmapped at `ptr` since call number `since`, if something else is mapped there now.
    pub fn remapped_since(&self, ptr: DevicePtr, since: u64) -> Option<FreedRange> {
        let Some((_, _, Region::Reserved(reservation))) = self.region_at(ptr.0) else { return None };
        let (start, mapping) = reservation.get(ptr.0)?;
        let (bytes, freed_at) = (mapping.bytes, mapping.unmapped_at);
        (freed_at > since).then_some(FreedRange { start, bytes, removal: Removal::Remapped, freed_at, pinned_by: None })
    }

    /// The number of the last call known to have unmapped something from these addresses; 0 if none did.
    pub fn last_unmap(&self, start: u64, bytes: u64) -> u64 {
        let freed = self.quarantine.overlapping(start, start + bytes);
        freed.filter(|range| range.removal == Removal::Unmapped).map(|range| range.freed_at).max().unwrap_or(0)
    }

    /// Why nothing is at `address`.
    pub fn why_not_mapped(&self, address: u64) -> AccessFault {
        self.quarantine.get(address).map_or(AccessFault::NotMapped, AccessFault::Freed)
    }
}
