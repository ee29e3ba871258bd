//! The device memory of this driver: plain and pool allocations, and what is mapped into reserved addresses.
//!
//! Adjacent allocations are distinct ranges: no copy may run from one into the next. Physical pieces that are mapped
//! next to each other in one reservation are one range, whatever their number.

use std::sync::RwLock;

use crate::handle::Context;
use crate::range_map::RangeMap;
use crate::sync::{read, write};

/// All device memory of this driver.
#[derive(Default)]
pub(crate) struct DeviceRanges(RwLock<Ranges>);

#[derive(Default)]
struct Ranges {
    memory: RangeMap<Memory>,
    /// Addresses that `vm_reserve` returned.
    reservations: RangeMap<()>,
}

#[derive(Clone, Copy)]
enum Memory {
    Allocated(Allocation),
    /// Mapped in the reservation that starts there.
    Mapped {
        reservation: u64,
    },
}

/// A plain or pool allocation.
#[derive(Clone, Copy)]
pub(crate) struct Allocation {
    /// The context that it is freed with.
    pub(crate) context: Context,
    /// What determines whether it is allocated.
    pub(crate) lifetime: Lifetime,
}

/// What determines whether an allocation exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lifetime {
    /// It exists until it is freed through this driver.
    UntilFreed,
    /// An allocation node of a graph: every launch may allocate it again, so only CUDA knows whether it exists.
    Graph,
}

/// Whether known memory contains a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lookup {
    /// It does.
    Inside,
    /// The range starts in known memory and runs over its end, which is there.
    Overruns(u64),
    /// The memory is not known here.
    Unknown,
}

impl DeviceRanges {
    /// Adds an allocation.
    pub(crate) fn insert(&self, start: u64, bytes: u64, allocation: Allocation) {
        write(&self.0).memory.insert(start, bytes, Memory::Allocated(allocation));
    }

    /// The allocation that starts there.
    pub(crate) fn allocation(&self, start: u64) -> Option<Allocation> {
        match read(&self.0).memory.get(start)?.value {
            Memory::Allocated(allocation) => Some(allocation),
            Memory::Mapped { .. } => None,
        }
    }

    /// Removes the allocation that starts there if it exists until it is freed, and returns its size.
    pub(crate) fn remove_until_freed(&self, start: u64) -> Option<u64> {
        let until_freed =
            |memory: &Memory| matches!(memory, Memory::Allocated(known) if known.lifetime == Lifetime::UntilFreed);
        write(&self.0).memory.remove_if(start, until_freed).map(|range| range.bytes)
    }

    /// Adds a reservation.
    pub(crate) fn reserve(&self, start: u64, bytes: u64) {
        write(&self.0).reservations.insert(start, bytes, ());
    }

    /// Removes a reservation, and returns its size if it was known.
    pub(crate) fn unreserve(&self, start: u64) -> Option<u64> {
        write(&self.0).reservations.remove_if(start, |()| true).map(|range| range.bytes)
    }

    /// Adds a mapped range.
    pub(crate) fn map(&self, start: u64, bytes: u64) {
        let Ranges { memory, reservations } = &mut *write(&self.0);
        let reservation = reservations.at(start).map_or(start, |(reservation, _)| reservation);
        let same = |known: &Memory| matches!(known, Memory::Mapped { reservation: other } if *other == reservation);
        let (mut from, mut to) = (start, start + bytes);
        if let Some((left, range)) = memory.last_before(start).filter(|&(at, range)| at + range.bytes == start)
            && same(&range.value)
        {
            from = left;
        }
        if let Some(range) = memory.get(to).filter(|range| same(&range.value)) {
            to += range.bytes;
        }
        memory.insert(from, to - from, Memory::Mapped { reservation });
    }

    /// Removes what is mapped in `[start, start + bytes)`, and returns it: start and length of every range.
    pub(crate) fn unmap(&self, start: u64, bytes: u64) -> Vec<(u64, u64)> {
        let memory = &mut write(&self.0).memory;
        let (mut unmapped, mut end) = (Vec::new(), start.saturating_add(bytes));
        while let Some((at, range)) = memory.last_before(end).filter(|&(at, range)| at + range.bytes > start) {
            let (range_end, value) = (at + range.bytes, range.value);
            end = at;
            if let Memory::Mapped { .. } = value {
                memory.remove_if(at, |_| true);
                let (from, to) = (at.max(start), range_end.min(start.saturating_add(bytes)));
                unmapped.push((from, to - from));
                for (from, to) in [(at, from), (to, range_end)].into_iter().filter(|(from, to)| from < to) {
                    memory.insert(from, to - from, value);
                }
            }
        }
        unmapped
    }

    /// Whether known memory contains `[address, address + bytes)`.
    pub(crate) fn find(&self, address: u64, bytes: u64) -> Lookup {
        let ranges = read(&self.0);
        let Some((start, range)) = ranges.memory.at(address) else { return Lookup::Unknown };
        if address.checked_add(bytes).is_some_and(|end| end - start <= range.bytes) {
            return Lookup::Inside;
        }
        match range.value {
            Memory::Allocated(Allocation { lifetime: Lifetime::Graph, .. }) => Lookup::Unknown,
            _ => Lookup::Overruns(start + range.bytes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Lookup::{Inside, Overruns, Unknown};
    use super::*;

    fn allocation(lifetime: Lifetime) -> Allocation {
        Allocation { context: Context::from_number(1), lifetime }
    }

    #[test]
    fn adjacent_allocations_are_distinct() {
        let ranges = DeviceRanges::default();
        ranges.insert(100, 10, allocation(Lifetime::UntilFreed));
        ranges.insert(110, 10, allocation(Lifetime::UntilFreed));
        assert_eq!([ranges.find(100, 10), ranges.find(109, 1), ranges.find(110, 10)], [Inside; 3]);
        assert_eq!([ranges.find(100, 11), ranges.find(109, 2)], [Overruns(110); 2]);
        assert_eq!(ranges.find(115, u64::MAX), Overruns(120));
        assert_eq!([ranges.find(99, 2), ranges.find(120, 1)], [Unknown; 2]);
        assert_eq!(ranges.remove_until_freed(105), None);
        assert_eq!(ranges.remove_until_freed(100), Some(10));
        assert_eq!((ranges.find(100, 1), ranges.find(110, 1)), (Unknown, Inside));
    }

    #[test]
    fn an_outdated_allocation_of_a_graph_is_replaced() {
        let ranges = DeviceRanges::default();
        ranges.insert(100, 10, allocation(Lifetime::Graph));
        assert_eq!((ranges.find(100, 10), ranges.find(100, 11)), (Inside, Unknown));
        assert_eq!(ranges.remove_until_freed(100), None);
        ranges.insert(96, 64, allocation(Lifetime::UntilFreed));
        assert_eq!((ranges.find(96, 64), ranges.find(100, 60), ranges.find(100, 61)), (Inside, Inside, Overruns(160)));
    }

    #[test]
    fn pieces_mapped_next_to_each_other_are_one_range() {
        let ranges = DeviceRanges::default();
        ranges.reserve(100, 100);
        ranges.reserve(200, 100);
        for start in [140, 100, 120, 160, 180, 200] {
            ranges.map(start, 20);
        }
        assert_eq!((ranges.find(100, 100), ranges.find(130, 50)), (Inside, Inside));
        assert_eq!(ranges.find(190, 20), Overruns(200), "another reservation");
        assert_eq!(ranges.unmap(120, 20), [(120, 20)]);
        assert_eq!((ranges.find(100, 20), ranges.find(110, 20), ranges.find(120, 1)), (Inside, Overruns(120), Unknown));
        assert_eq!(ranges.find(140, 60), Inside);
        assert_eq!(ranges.unmap(0, 1000), [(200, 20), (140, 60), (100, 20)]);
        assert_eq!((ranges.find(100, 1), ranges.find(200, 1)), (Unknown, Unknown));
        assert_eq!((ranges.unreserve(100), ranges.unreserve(100)), (Some(100), None));
    }
}
