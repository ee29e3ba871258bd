//! A reserved address range and the physical memory mapped into it.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use smallvec::{SmallVec, smallvec};

use super::backing::BackingId;
use super::remaps::MappingNumber;
use crate::sim::refuse::refuse;
use crate::{DeviceAccess, ErrorCode, Result};

/// Physical memory mapped into a reserved range.
#[derive(Clone, Debug)]
pub struct Mapping {
    pub bytes: u64,
    pub backing: BackingId,
    pub access: SmallVec<[DeviceAccess; 2]>,
    /// The number of the last call that unmapped something from these addresses; 0 if none has. Work queued before it
    /// was meant for what was mapped then.
    pub unmapped_at: u64,
    pub number: MappingNumber,
}

/// The mappings in a reserved range, by first address; without overlaps.
#[derive(Debug, Default)]
pub struct Reservation {
    mappings: BTreeMap<u64, Mapping>,
}

impl Reservation {
    /// The number of mappings.
    pub fn len(&self) -> usize {
        self.mappings.len()
    }

    /// The mapping at `address`, with its first address.
    pub fn get(&self, address: u64) -> Option<(u64, &Mapping)> {
        let (&start, mapping) = self.mappings.range(..=address).next_back()?;
        (address < start + mapping.bytes).then_some((start, mapping))
    }

    /// Adds a mapping at `start`; `InvalidValue` if something is mapped there.
    pub fn map(&mut self, start: u64, mapping: Mapping) -> Result<()> {
        let end = start + mapping.bytes;
        if self.mappings.range(..end).next_back().is_some_and(|(at, old)| at + old.bytes > start) {
            return refuse(ErrorCode::InvalidValue, "these addresses are mapped already");
        }
        self.mappings.insert(start, mapping);
        Ok(())
    }

    /// Removes the mappings in `[start, end)`; `InvalidValue` if the range divides one.
    pub fn unmap(&mut self, start: u64, end: u64) -> Result<SmallVec<[(u64, Mapping); 1]>> {
        // Most often it is one mapping.
        if let Entry::Occupied(mapping) = self.mappings.entry(start)
            && start + mapping.get().bytes == end
        {
            return Ok(smallvec![(start, mapping.remove())]);
        }
        let divided =
            |at: u64| self.mappings.range(..at).next_back().is_some_and(|(first, old)| first + old.bytes > at);
        if start == end || divided(start) || divided(end) {
            return refuse(ErrorCode::InvalidValue, "only whole mappings can be unmapped");
        }
        let starts: Vec<u64> = self.mappings.range(start..end).map(|(&at, _)| at).collect();
        Ok(starts.into_iter().filter_map(|at| Some((at, self.mappings.remove(&at)?))).collect())
    }

    /// The mappings in `[start, end)`; `InvalidValue` unless that is a sequence of whole ones without a gap.
    pub fn whole_mappings(&self, start: u64, end: u64) -> Result<impl Iterator<Item = &Mapping>> {
        let mappings = || self.mappings.range(start..end);
        let covered = mappings().try_fold(start, |end, (&at, mapping)| (at == end).then_some(end + mapping.bytes));
        if start == end || covered != Some(end) {
            return refuse(ErrorCode::InvalidValue, "the range must consist of whole mappings without a gap");
        }
        Ok(mappings().map(|(_, mapping)| mapping))
    }

    /// Sets the access rights of the mappings in `[start, end)`, and calls `on_set` for each.
    pub fn set_access(&mut self, start: u64, end: u64, access: &[DeviceAccess], mut on_set: impl FnMut(&Mapping)) {
        for (_, mapping) in self.mappings.range_mut(start..end) {
            for &rights in access {
                mapping.access.retain(|old| old.device != rights.device);
                mapping.access.push(rights);
            }
            on_set(mapping);
        }
    }
}
