//! Ranges of memory by address: which device an address belongs to, which host memory is pinned.

use std::collections::BTreeMap;
use std::sync::{RwLock, RwLockReadGuard};

use crate::table::{read, write};

/// Ranges of addresses that do not overlap, each with something to know about it.
pub(crate) struct Ranges<T> {
    by_start: RwLock<BTreeMap<u64, Range<T>>>,
}

/// One range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Range<T> {
    /// How long it is.
    pub(crate) bytes: u64,
    /// What is known about it.
    pub(crate) what: T,
}

/// Ranges that nobody can take away for now.
pub(crate) struct HeldRanges<'a, T>(RwLockReadGuard<'a, BTreeMap<u64, Range<T>>>);

impl<T> Ranges<T> {
    /// No ranges.
    pub(crate) const fn new() -> Self {
        Self { by_start: RwLock::new(BTreeMap::new()) }
    }

    /// Adds a range, in place of what was known about the same start.
    pub(crate) fn insert(&self, start: u64, bytes: u64, what: T) {
        write(&self.by_start).insert(start, Range { bytes, what });
    }

    /// The range that starts there.
    pub(crate) fn get(&self, start: u64) -> Option<Range<T>>
    where
        T: Copy,
    {
        read(&self.by_start).get(&start).copied()
    }

    /// Takes out the range that starts there, if `wanted` says so.
    pub(crate) fn remove_if(&self, start: u64, wanted: impl FnOnce(&T) -> bool) -> Option<Range<T>> {
        let mut ranges = write(&self.by_start);
        if ranges.get(&start).is_some_and(|range| wanted(&range.what)) { ranges.remove(&start) } else { None }
    }

    /// Holds all ranges where they are, for work that must not lose them midway.
    pub(crate) fn hold(&self) -> HeldRanges<'_, T> {
        HeldRanges(read(&self.by_start))
    }
}

impl<T> HeldRanges<'_, T> {
    /// The start and the range that `[address, address + bytes)` lies in, all of it.
    pub(crate) fn containing(&self, address: u64, bytes: u64) -> Option<(u64, &Range<T>)> {
        let (&start, range) = self.0.range(..=address).next_back()?;
        let end = address.checked_add(bytes)?;
        (address - start < range.bytes && end - start <= range.bytes).then_some((start, range))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_holds_what_lies_in_it_whole() {
        let ranges = Ranges::new();
        ranges.insert(100, 10, 'a');
        ranges.insert(110, 10, 'b');
        let found = |address, bytes| ranges.hold().containing(address, bytes).map(|(start, range)| (start, range.what));
        assert_eq!(found(100, 10), Some((100, 'a')));
        assert_eq!(found(109, 1), Some((100, 'a')));
        assert_eq!(found(110, 0), Some((110, 'b')));
        assert_eq!(found(105, 6), None, "no range spans the seam");
        assert_eq!((found(99, 1), found(120, 0), found(115, u64::MAX)), (None, None, None));
    }

    #[test]
    fn a_range_leaves_once_and_only_by_its_start() {
        let ranges = Ranges::new();
        ranges.insert(100, 10, 'a');
        assert_eq!(ranges.remove_if(105, |_| true), None);
        assert_eq!(ranges.remove_if(100, |&what| what == 'b'), None);
        assert_eq!(ranges.remove_if(100, |_| true), Some(Range { bytes: 10, what: 'a' }));
        assert_eq!((ranges.get(100), ranges.remove_if(100, |_| true)), (None, None));
    }
}
