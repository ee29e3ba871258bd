//! The quarantine: address ranges that were freed or unmapped, so that an access through a stale address can be
//! reported as what it is.
//!
//! Entries do not share addresses: a later one replaces the addresses of an earlier one, and live memory removes its
//! addresses from the quarantine. The remaining part of an entry still describes the whole range. The oldest entries
//! are dropped, so that a long run needs no more memory than a short one.

use std::collections::{BTreeMap, VecDeque};

/// How many entries are kept.
const CAPACITY: usize = 65_536;

/// How a range ceased to be usable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Removal {
    Freed,
    /// Freed to a pool, which keeps it mapped: an access is wrong, but the device survives it.
    PoolFreed,
    Unmapped,
    /// Unmapped, and other memory has been mapped there since.
    Remapped,
}

/// A range that was freed or unmapped, and the number of the call that did it.
#[derive(Clone, Copy, Debug)]
pub struct FreedRange {
    pub start: u64,
    pub bytes: u64,
    pub removal: Removal,
    pub freed_at: u64,
    /// The number of the call that had pinned it, if it was host memory.
    pub pinned_by: Option<u64>,
}

/// The part of a freed range that is still quarantined, by its first address.
#[derive(Clone, Copy, Debug)]
struct Part {
    end: u64,
    /// Identifies this part among all that ever began at this address.
    id: u64,
    range: FreedRange,
}

/// The freed ranges that are remembered.
#[derive(Debug, Default)]
pub struct Quarantine {
    parts: BTreeMap<u64, Part>,
    /// First addresses and ids, oldest first. An entry without a part of that id is obsolete.
    oldest: VecDeque<(u64, u64)>,
    last_id: u64,
}

impl Quarantine {
    /// Adds a range that was freed.
    pub fn add(&mut self, range: FreedRange) {
        let end = range.start.saturating_add(range.bytes);
        self.remove(range.start, end);
        self.insert(range.start, end, range);
    }

    /// Removes the addresses `[start, end)`; parts beside them stay.
    pub fn remove(&mut self, start: u64, end: u64) {
        // Parts do not overlap, so only the last that begins before `end` can reach beyond it, and so on downwards.
        while let Some((&from, &Part { end: to, range, .. })) = self.parts.range(..end).next_back()
            && to > start
        {
            self.parts.remove(&from);
            if to > end {
                self.insert(end, to, range);
            }
            if from < start {
                self.insert(from, start, range);
            }
        }
    }

    /// The freed range that `address` was part of, if that is known.
    pub fn get(&self, address: u64) -> Option<FreedRange> {
        let (_, part) = self.parts.range(..=address).next_back()?;
        (address < part.end).then_some(part.range)
    }

    /// The freed ranges that overlap `[start, end)`, from the highest address down.
    pub fn overlapping(&self, start: u64, end: u64) -> impl Iterator<Item = &FreedRange> {
        let down = self.parts.range(..end).rev().map(|(_, part)| part);
        down.take_while(move |part| part.end > start).map(|part| &part.range)
    }

    fn insert(&mut self, start: u64, end: u64, range: FreedRange) {
        if start >= end {
            return;
        }
        self.last_id += 1;
        self.parts.insert(start, Part { end, id: self.last_id, range });
        self.oldest.push_back((start, self.last_id));
        if self.oldest.len() > CAPACITY {
            let (oldest, id) = self.oldest.pop_front().expect("more than none");
            if self.parts.get(&oldest).is_some_and(|part| part.id == id) {
                self.parts.remove(&oldest);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn freed(start: u64, end: u64, freed_at: u64) -> FreedRange {
        FreedRange { start, bytes: end - start, removal: Removal::Freed, freed_at, pinned_by: None }
    }

    /// Adds ranges, each freed by the call of its number, removes one, and shows the call for each address.
    fn check(added: &[(u64, u64)], removed: (u64, u64), picture: &str) {
        let mut quarantine = Quarantine::default();
        for (call, &(start, end)) in (1..).zip(added) {
            quarantine.add(freed(start, end, call));
        }
        quarantine.remove(removed.0, removed.1);
        let shown: String = (0..picture.len() as u64)
            .map(|address| quarantine.get(address).map_or(".".to_owned(), |range| range.freed_at.to_string()))
            .collect();
        assert_eq!(shown, picture, "added {added:?}, removed {removed:?}");
    }

    #[test]
    fn later_ranges_replace_earlier_ones_and_removal_cuts_them() {
        check(&[(2, 6)], (0, 0), "..1111..");
        check(&[(2, 6)], (3, 5), "..1..1..");
        check(&[(2, 6)], (0, 4), "....11..");
        check(&[(2, 6)], (4, 9), "..11....");
        check(&[(2, 4), (4, 6)], (0, 8), "........");
        check(&[(0, 8), (2, 4)], (0, 0), "11221111");
        check(&[(2, 4), (0, 8)], (0, 0), "22222222");
        check(&[(0, 3), (2, 6), (5, 8)], (4, 5), "1122.333");
        check(&[(0, 8), (1, 2), (3, 4), (5, 6)], (2, 6), "12....11");
    }

    #[test]
    fn the_rest_of_a_cut_range_describes_the_whole_range() {
        let mut quarantine = Quarantine::default();
        quarantine.add(freed(100, 200, 7));
        quarantine.remove(120, 130);
        let rest = quarantine.get(150).expect("it was not removed");
        assert_eq!((rest.start, rest.bytes, rest.freed_at), (100, 100, 7));
        assert_eq!(quarantine.overlapping(110, 140).count(), 2);
        assert_eq!(quarantine.overlapping(120, 130).count(), 0);
    }

    #[test]
    #[cfg_attr(miri, ignore = "70,000 insertions take minutes in an interpreter")]
    fn the_oldest_ranges_are_dropped() {
        const COUNT: u64 = CAPACITY as u64 + 5_000;
        let mut quarantine = Quarantine::default();
        for n in 0..COUNT {
            quarantine.add(freed(n * 10, n * 10 + 5, n));
            // The same address again and again needs no more room either.
            quarantine.add(freed(u64::MAX - 9, u64::MAX, n));
        }
        assert!(quarantine.parts.len() <= CAPACITY && quarantine.oldest.len() <= CAPACITY);
        assert!(quarantine.get(0).is_none());
        let last = COUNT - 1;
        assert_eq!(quarantine.get(last * 10 + 4).map(|range| range.freed_at), Some(last));
        assert_eq!(quarantine.get(u64::MAX - 1).map(|range| range.freed_at), Some(last));
    }
}
