//! The addresses of a device: a few large reservations (*arenas*), divided into ranges for heaps. From an address to
//! the heap it belongs to are a subtraction, a shift and a load; no lock. Segments (`segments.rs`) are elsewhere; they
//! are searched for only if there are any.

use std::collections::BTreeMap;
use std::sync::Mutex;

use warpool_driver::DevicePtr;

use super::sync::{AtomicU64, AtomicUsize, OnceLock, Ordering};
use crate::memory::SegmentKind;
use crate::memory::paged::ids::{HeapId, RangeInHeap};
use crate::{Error, Instance, Result, lock};

/// Ranges begin and end at multiples of this.
const STRIPE: u64 = 64 << 20;

/// More are not needed: each is at least eight times the device's memory.
const ARENAS_MAX: usize = 64;

/// Where in a heap an address is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Location {
    pub(super) heap: HeapId,
    pub(super) kind: SegmentKind,
    /// The number of its range in the area.
    pub(super) range: RangeInHeap,
}

impl Location {
    fn pack(self) -> u64 {
        1 << 63 | u64::from(self.heap.0) << 31 | u64::from(self.range.0) << 1 | self.kind as u64
    }

    fn unpack(packed: u64) -> Option<Self> {
        let (kind, range) = Self::unpack_place(packed);
        #[expect(clippy::cast_possible_truncation, reason = "a field of `pack`")]
        let heap = HeapId((packed >> 31) as u32);
        (packed >> 63 == 1).then_some(Self { heap, kind, range })
    }

    /// Whether it is a location in this heap.
    #[inline]
    fn is_in(packed: u64, heap: HeapId) -> bool {
        packed >> 31 == 1 << 32 | u64::from(heap.0)
    }

    /// Its kind and range.
    #[inline]
    fn unpack_place(packed: u64) -> (SegmentKind, RangeInHeap) {
        let kind = if packed & 1 == 0 { SegmentKind::Small } else { SegmentKind::Large };
        (kind, RangeInHeap((packed >> 1 & 0x3FFF_FFFF) as u32))
    }
}

#[derive(Debug)]
struct Arena {
    base: u64,
    /// Packed locations, by stripe.
    stripes: Box<[AtomicU64]>,
}

impl Arena {
    /// The stripe that contains an address, if it is in the arena.
    #[inline]
    fn stripe(&self, ptr: DevicePtr) -> Option<&AtomicU64> {
        // An address before the arena wraps around to one far after it.
        self.stripes.get((ptr.0.wrapping_sub(self.base) / STRIPE) as usize)
    }
}

#[derive(Debug)]
pub(super) struct AddressSpace {
    /// The size of an arena, if no request needs more.
    arena_bytes: u64,
    arenas: [OnceLock<Arena>; ARENAS_MAX],
    /// The arena in use and how much of it is divided; under the lock new ones are reserved.
    used: Mutex<(usize, u64)>,
    /// Size and location, by address.
    segments: Mutex<BTreeMap<u64, (u64, Location)>>,
    segments_count: AtomicUsize,
}

impl AddressSpace {
    /// For a device with that much memory.
    pub(super) fn new(bytes_total: u64) -> Self {
        let arena_bytes = bytes_total.max(1 << 30).next_power_of_two() * 8;
        Self {
            arena_bytes,
            arenas: std::array::from_fn(|_| OnceLock::new()),
            used: Mutex::new((0, 0)),
            segments: Mutex::default(),
            segments_count: AtomicUsize::new(0),
        }
    }

    /// Reserves a range of at least `bytes`. Returns its address and size, or `None` if no addresses are left. It
    /// belongs to nobody before [`assign`](Self::assign).
    pub(super) fn reserve(&self, instance: &Instance, bytes: u64) -> Result<Option<(u64, u64)>> {
        let Some(bytes) = bytes.checked_next_multiple_of(STRIPE) else { return Ok(None) };
        let mut used = lock(&self.used);
        if let Some(arena) = self.arenas.get(used.0).and_then(OnceLock::get) {
            if used.1 + bytes <= arena.stripes.len() as u64 * STRIPE {
                let addr = arena.base + used.1;
                used.1 += bytes;
                return Ok(Some((addr, bytes)));
            }
            used.0 += 1;
        }
        let Some(arena) = self.arenas.get(used.0) else { return Ok(None) };
        let size = self.arena_bytes.max(bytes);
        let base = match instance.driver().vm_reserve(size, 0, None) {
            Ok(base) => base.0,
            Err(error) if error.code == warpool_driver::ErrorCode::OutOfMemory => {
                used.0 = used.0.saturating_sub(1);
                return Ok(None);
            }
            Err(error) => {
                used.0 = used.0.saturating_sub(usize::from(used.0 > 0));
                return Err(error.into());
            }
        };
        let stripes = (0..size / STRIPE).map(|_| AtomicU64::new(0)).collect();
        arena.set(Arena { base, stripes }).expect("an arena is reserved once, under the lock");
        used.1 = bytes;
        Ok(Some((base, bytes)))
    }

    /// Takes all reservations out: base and size.
    pub(super) fn take_all(&mut self) -> impl Iterator<Item = (u64, u64)> {
        let arenas = self.arenas.iter_mut().filter_map(OnceLock::take);
        arenas.map(|arena| (arena.base, arena.stripes.len() as u64 * STRIPE))
    }

    /// Says whose a range is.
    pub(super) fn assign(&self, base: u64, bytes: u64, location: Location) {
        let arenas = self.arenas.iter().map_while(OnceLock::get);
        for arena in arenas {
            let Some(first) = base.checked_sub(arena.base).map(|offset| (offset / STRIPE) as usize) else { continue };
            let count = (bytes / STRIPE) as usize;
            if let Some(stripes) = arena.stripes.get(first..first + count) {
                stripes.iter().for_each(|stripe| stripe.store(location.pack(), Ordering::Release));
                return;
            }
        }
        unreachable!("a range is in an arena");
    }

    /// Where an address is, if it is in a range of that heap, and that is in the first arena: mostly there is one.
    #[inline(always)]
    pub(super) fn locate_in(&self, heap: HeapId, ptr: DevicePtr) -> Option<(SegmentKind, RangeInHeap)> {
        let packed = self.arenas[0].get()?.stripe(ptr)?.load(Ordering::Acquire);
        Location::is_in(packed, heap).then(|| Location::unpack_place(packed))
    }

    /// Where an address is, if it is in a range of a heap.
    pub(super) fn locate(&self, ptr: DevicePtr) -> Option<Location> {
        let mut arenas = self.arenas.iter().map_while(OnceLock::get);
        match arenas.find_map(|arena| arena.stripe(ptr)) {
            Some(stripe) => Location::unpack(stripe.load(Ordering::Acquire)),
            None => self.locate_in_segments(ptr),
        }
    }

    fn locate_in_segments(&self, ptr: DevicePtr) -> Option<Location> {
        if self.segments_count.load(Ordering::Acquire) == 0 {
            return None;
        }
        let segments = lock(&self.segments);
        let (&base, &(bytes, location)) = segments.range(..=ptr.0).next_back()?;
        (ptr.0 - base < bytes).then_some(location)
    }

    /// Fails if no memory can be there, or if it overlaps what the device has: an upstream's results are untrusted.
    pub(super) fn check_untrusted(&self, ptr: DevicePtr, bytes: u64) -> Result<()> {
        let end = ptr.0.checked_add(bytes).filter(|_| !ptr.is_null()).ok_or(Error::ExternalAddress { ptr, bytes })?;
        let arenas = self.arenas.iter().map_while(OnceLock::get);
        let arenas = arenas.map(|arena| (arena.base, arena.stripes.len() as u64 * STRIPE));
        let segments = lock(&self.segments);
        // Of all segments that start before its end, only the last can reach into it.
        let segment = segments.range(..end).next_back().map(|(&base, &(bytes, _))| (base, bytes));
        match arenas.chain(segment).find(|&(base, length)| base < end && base + length > ptr.0) {
            Some((live, live_bytes)) => Err(Error::ExternalOverlap { ptr, bytes, live: DevicePtr(live), live_bytes }),
            None => Ok(()),
        }
    }

    pub(super) fn add_segment(&self, base: u64, bytes: u64, location: Location) {
        let mut segments = lock(&self.segments);
        segments.insert(base, (bytes, location));
        self.segments_count.store(segments.len(), Ordering::Release);
    }

    pub(super) fn remove_segment(&self, base: u64) {
        let mut segments = lock(&self.segments);
        segments.remove(&base);
        self.segments_count.store(segments.len(), Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_location_survives_packing() {
        for heap in [0, 1, u32::MAX].map(HeapId) {
            for range in [0, 7, 0x3FFF_FFFF].map(RangeInHeap) {
                for kind in [SegmentKind::Small, SegmentKind::Large] {
                    let location = Location { heap, kind, range };
                    assert_eq!(Location::unpack(location.pack()), Some(location));
                    assert!(Location::is_in(location.pack(), heap));
                    assert!(!Location::is_in(location.pack(), HeapId(heap.0 ^ 1)));
                }
            }
        }
        assert_eq!(Location::unpack(0), None);
    }
}
