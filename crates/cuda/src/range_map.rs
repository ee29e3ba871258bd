//! Address ranges that do not overlap.

use std::collections::BTreeMap;

/// Values by address range.
pub(crate) struct RangeMap<T>(BTreeMap<u64, Range<T>>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Range<T> {
    /// Its length.
    pub(crate) bytes: u64,
    pub(crate) value: T,
}

impl<T> Default for RangeMap<T> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<T> RangeMap<T> {
    /// Adds a range, and removes those that it overlaps: whatever was known about these addresses is outdated.
    pub(crate) fn insert(&mut self, start: u64, bytes: u64, value: T) {
        let end = start.saturating_add(bytes);
        while let Some(overlapped) = self.last_before(end).filter(|&(at, range)| at + range.bytes > start) {
            let overlapped = overlapped.0;
            self.0.remove(&overlapped);
        }
        self.0.insert(start, Range { bytes, value });
    }

    /// The range that starts there.
    pub(crate) fn get(&self, start: u64) -> Option<&Range<T>> {
        self.0.get(&start)
    }

    /// Removes the range that starts there, if `condition` holds.
    pub(crate) fn remove_if(&mut self, start: u64, condition: impl FnOnce(&T) -> bool) -> Option<Range<T>> {
        if self.get(start).is_some_and(|range| condition(&range.value)) { self.0.remove(&start) } else { None }
    }

    /// The start and the range that the address is in.
    pub(crate) fn at(&self, address: u64) -> Option<(u64, &Range<T>)> {
        self.last_before(address.checked_add(1)?).filter(|&(start, range)| address - start < range.bytes)
    }

    /// The range that contains all of `[address, address + bytes)`, with its start.
    pub(crate) fn containing(&self, address: u64, bytes: u64) -> Option<(u64, &Range<T>)> {
        let end = address.checked_add(bytes)?;
        self.at(address).filter(|&(start, range)| end - start <= range.bytes)
    }

    /// The last range that starts before the address.
    pub(crate) fn last_before(&self, address: u64) -> Option<(u64, &Range<T>)> {
        self.0.range(..address).next_back().map(|(&start, range)| (start, range))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_contains_what_is_completely_in_it() {
        let mut map = RangeMap::default();
        map.insert(100, 10, 'a');
        map.insert(110, 10, 'b');
        let found = |address, bytes| map.containing(address, bytes).map(|(start, range)| (start, range.value));
        assert_eq!(found(100, 10), Some((100, 'a')));
        assert_eq!(found(109, 1), Some((100, 'a')));
        assert_eq!(found(110, 0), Some((110, 'b')));
        assert_eq!(found(105, 6), None, "no range contains both");
        assert_eq!((found(99, 1), found(120, 0), found(115, u64::MAX)), (None, None, None));
        assert_eq!((found(u64::MAX, 0), found(0, 1)), (None, None));
    }

    #[test]
    fn a_range_is_removed_once_and_only_by_its_start() {
        let mut map = RangeMap::default();
        map.insert(100, 10, 'a');
        assert_eq!(map.remove_if(105, |_| true), None);
        assert_eq!(map.remove_if(100, |&value| value == 'b'), None);
        assert_eq!(map.remove_if(100, |_| true), Some(Range { bytes: 10, value: 'a' }));
        assert_eq!(map.get(100), None);
        assert_eq!(map.remove_if(100, |_| true), None);
    }

    #[test]
    fn a_new_range_replaces_those_that_it_overlaps() {
        let mut map = RangeMap::default();
        for (start, value) in [(0, 'a'), (10, 'b'), (20, 'c'), (30, 'd')] {
            map.insert(start, 10, value);
        }
        map.insert(15, 10, 'e');
        let starts: Vec<_> = (0..40).filter_map(|start| map.get(start).map(|range| (start, range.value))).collect();
        assert_eq!(starts, [(0, 'a'), (15, 'e'), (30, 'd')]);
    }
}
