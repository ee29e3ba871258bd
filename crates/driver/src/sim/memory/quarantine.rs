//! What addresses belonged to before: the ranges that are gone, so that a stale address can be named for what it was.
//!
//! No two graves share an address: the later burial wins, and so does live memory, which clears its addresses. What is
//! left of a range that was cut still tells the whole story of it. The oldest are forgotten, so that a long run costs
//! no more than a short one.

use std::collections::{BTreeMap, VecDeque};

/// How many gone ranges are remembered.
const KEPT: usize = 65_536;

/// Why an address that belonged to something does so no more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gone {
    Freed,
    /// Freed to a pool, which keeps it mapped: touching it is wrong but does not break the device.
    PoolFreed,
    Unmapped,
    /// Unmapped, and other memory has been mapped there since.
    Remapped,
}

/// A range that is gone, and the number of the call that took it.
#[derive(Clone, Copy, Debug)]
pub struct Tomb {
    pub start: u64,
    pub bytes: u64,
    pub gone: Gone,
    pub at: u64,
    /// The call that had pinned it, if it was the host's.
    pub pinned_by: Option<u64>,
}

/// What is left of a range that is gone, by its first address.
#[derive(Clone, Copy, Debug)]
struct Grave {
    end: u64,
    /// Tells it from what lay there before.
    age: u64,
    tomb: Tomb,
}

/// All ranges that are gone and remembered.
#[derive(Debug, Default)]
pub struct Tombs {
    graves: BTreeMap<u64, Grave>,
    /// First addresses with ages, oldest first. One whose grave has another age, or none, counts for nothing.
    order: VecDeque<(u64, u64)>,
    last_age: u64,
}

impl Tombs {
    /// Remembers that a range is gone.
    pub fn bury(&mut self, tomb: Tomb) {
        let end = tomb.start.saturating_add(tomb.bytes);
        self.clear(tomb.start, end);
        self.dig(tomb.start, end, tomb);
    }

    /// Forgets what is remembered of `[start, end)`; what lies beside it stays.
    pub fn clear(&mut self, start: u64, end: u64) {
        // Graves do not overlap, so only the last that begins before the end can reach beyond it, and so on downwards.
        while let Some((&from, &Grave { end: to, tomb, .. })) = self.graves.range(..end).next_back()
            && to > start
        {
            self.graves.remove(&from);
            if to > end {
                self.dig(end, to, tomb);
            }
            if from < start {
                self.dig(from, start, tomb);
            }
        }
    }

    /// What `address` belonged to, if that is remembered.
    pub fn at(&self, address: u64) -> Option<Tomb> {
        let (_, grave) = self.graves.range(..=address).next_back()?;
        (address < grave.end).then_some(grave.tomb)
    }

    /// What is remembered of `[start, end)`, from the highest address down.
    pub fn within(&self, start: u64, end: u64) -> impl Iterator<Item = &Tomb> {
        let down = self.graves.range(..end).rev().map(|(_, grave)| grave);
        down.take_while(move |grave| grave.end > start).map(|grave| &grave.tomb)
    }

    fn dig(&mut self, start: u64, end: u64, tomb: Tomb) {
        if start >= end {
            return;
        }
        self.last_age += 1;
        self.graves.insert(start, Grave { end, age: self.last_age, tomb });
        self.order.push_back((start, self.last_age));
        if self.order.len() > KEPT {
            let (oldest, age) = self.order.pop_front().expect("more than none");
            if self.graves.get(&oldest).is_some_and(|grave| grave.age == age) {
                self.graves.remove(&oldest);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tomb(start: u64, end: u64, at: u64) -> Tomb {
        Tomb { start, bytes: end - start, gone: Gone::Freed, at, pinned_by: None }
    }

    /// Buries ranges, each by the call of its number, clears one, and shows who is remembered at each address.
    fn check(buried: &[(u64, u64)], cleared: (u64, u64), picture: &str) {
        let mut tombs = Tombs::default();
        for (at, &(start, end)) in (1..).zip(buried) {
            tombs.bury(tomb(start, end, at));
        }
        tombs.clear(cleared.0, cleared.1);
        let seen: String =
            (0..picture.len() as u64).map(|a| tombs.at(a).map_or(".".to_owned(), |tomb| tomb.at.to_string())).collect();
        assert_eq!(seen, picture, "buried {buried:?}, cleared {cleared:?}");
    }

    #[test]
    fn the_later_burial_wins_and_live_memory_clears_only_its_own() {
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
    fn what_is_left_of_a_range_still_says_what_the_whole_was() {
        let mut tombs = Tombs::default();
        tombs.bury(tomb(100, 200, 7));
        tombs.clear(120, 130);
        let rest = tombs.at(150).expect("it was not cleared");
        assert_eq!((rest.start, rest.bytes, rest.at), (100, 100, 7));
        assert_eq!(tombs.within(110, 140).count(), 2);
        assert_eq!(tombs.within(120, 130).count(), 0);
    }

    #[test]
    fn the_oldest_are_forgotten_and_nothing_grows() {
        let mut tombs = Tombs::default();
        for n in 0..3 * KEPT as u64 {
            tombs.bury(tomb(n * 10, n * 10 + 5, n));
            // The same address over and over costs no room either.
            tombs.bury(tomb(u64::MAX - 9, u64::MAX, n));
        }
        assert!(tombs.graves.len() <= KEPT && tombs.order.len() <= KEPT);
        assert!(tombs.at(0).is_none());
        let last = 3 * KEPT as u64 - 1;
        assert_eq!(tombs.at(last * 10 + 4).map(|tomb| tomb.at), Some(last));
        assert_eq!(tombs.at(u64::MAX - 1).map(|tomb| tomb.at), Some(last));
    }
}
