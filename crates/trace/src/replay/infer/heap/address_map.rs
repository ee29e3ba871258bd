//! A map by address whose neighbours are found without a search. A pass over a history of millions of events looks up,
//! splits and merges a block at almost every one, and in the standard library's B-tree each of these is a separate
//! search.
//!
//! Entries are in leaves of up to [`LEAF_MAX`], and the first address of each leaf in one list.

use std::ops::{Index, Range};

const LEAF_MAX: usize = 64;

#[derive(Clone, Debug)]
pub(in crate::replay) struct AddressMap<V> {
    /// The first address of each leaf.
    firsts: Vec<u64>,
    /// In the order of addresses; none is empty.
    leaves: Vec<Leaf<V>>,
    len: usize,
}

#[derive(Clone, Debug)]
struct Leaf<V> {
    addresses: Vec<u64>,
    values: Vec<V>,
}

/// Where an entry is. A change moves later entries only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Position {
    leaf: usize,
    at: usize,
}

impl<V> Default for AddressMap<V> {
    fn default() -> Self {
        Self { firsts: Vec::new(), leaves: Vec::new(), len: 0 }
    }
}

impl<V: Copy> AddressMap<V> {
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn get(&self, addr: u64) -> Option<&V> {
        self.find(addr).map(|position| self.value(position))
    }

    pub fn get_mut(&mut self, addr: u64) -> Option<&mut V> {
        self.find(addr).map(|position| self.value_mut(position))
    }

    /// All entries, by address.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = (u64, &V)> {
        self.leaves.iter().flat_map(|leaf| leaf.addresses.iter().copied().zip(&leaf.values))
    }

    pub fn values(&self) -> impl Iterator<Item = &V> {
        self.leaves.iter().flat_map(|leaf| &leaf.values)
    }

    /// The entries in a range of addresses.
    pub fn range(&self, range: Range<u64>) -> impl Iterator<Item = (u64, &V)> {
        let mut next = self.first_from(range.start);
        std::iter::from_fn(move || {
            let position = next.filter(|&position| self.address(position) < range.end)?;
            next = self.next(position);
            Some((self.address(position), self.value(position)))
        })
    }

    /// Inserts an entry. Returns the one that was there.
    pub fn insert(&mut self, addr: u64, value: V) -> Option<V> {
        match self.last_until(addr) {
            Some(position) if self.address(position) == addr => {
                Some(std::mem::replace(self.value_mut(position), value))
            }
            Some(position) => {
                self.insert_after(position, addr, value);
                None
            }
            None => {
                self.insert_first(addr, value);
                None
            }
        }
    }

    pub fn remove(&mut self, addr: u64) -> Option<V> {
        self.find(addr).map(|position| self.remove_at(position))
    }

    pub(super) fn find(&self, addr: u64) -> Option<Position> {
        self.last_until(addr).filter(|&position| self.address(position) == addr)
    }

    /// The last entry at or below an address.
    pub(super) fn last_until(&self, addr: u64) -> Option<Position> {
        let leaf = self.firsts.partition_point(|&first| first <= addr).checked_sub(1)?;
        let at = self.leaves[leaf].addresses.partition_point(|&it| it <= addr).checked_sub(1)?;
        Some(Position { leaf, at })
    }

    /// The first entry at or above an address.
    pub(super) fn first_from(&self, addr: u64) -> Option<Position> {
        match self.last_until(addr) {
            Some(position) if self.address(position) == addr => Some(position),
            Some(position) => self.next(position),
            None => (self.len > 0).then_some(Position { leaf: 0, at: 0 }),
        }
    }

    pub(super) fn next(&self, Position { leaf, at }: Position) -> Option<Position> {
        if at + 1 < self.leaves[leaf].values.len() {
            return Some(Position { leaf, at: at + 1 });
        }
        (leaf + 1 < self.leaves.len()).then_some(Position { leaf: leaf + 1, at: 0 })
    }

    pub(super) fn previous(&self, Position { leaf, at }: Position) -> Option<Position> {
        if let Some(at) = at.checked_sub(1) {
            return Some(Position { leaf, at });
        }
        let leaf = leaf.checked_sub(1)?;
        Some(Position { leaf, at: self.leaves[leaf].values.len() - 1 })
    }

    pub(super) fn address(&self, Position { leaf, at }: Position) -> u64 {
        self.leaves[leaf].addresses[at]
    }

    pub(super) fn value(&self, Position { leaf, at }: Position) -> &V {
        &self.leaves[leaf].values[at]
    }

    pub(super) fn value_mut(&mut self, Position { leaf, at }: Position) -> &mut V {
        &mut self.leaves[leaf].values[at]
    }

    /// Inserts an entry right after another one: its address is between that and the next.
    pub(super) fn insert_after(&mut self, Position { leaf, at }: Position, addr: u64, value: V) {
        debug_assert!(self.address(Position { leaf, at }) < addr, "addresses ascend");
        let found = &mut self.leaves[leaf];
        found.insert(at + 1, addr, value);
        self.len += 1;
        if found.values.len() > LEAF_MAX {
            let rest = found.split_off(LEAF_MAX / 2);
            self.firsts.insert(leaf + 1, rest.addresses[0]);
            self.leaves.insert(leaf + 1, rest);
        }
    }

    pub(super) fn remove_at(&mut self, Position { leaf, at }: Position) -> V {
        let found = &mut self.leaves[leaf];
        found.addresses.remove(at);
        let value = found.values.remove(at);
        self.len -= 1;
        if found.values.is_empty() {
            self.firsts.remove(leaf);
            self.leaves.remove(leaf);
            return value;
        }
        self.firsts[leaf] = found.addresses[0];
        // Otherwise a map that shrank would consist of leaves with one entry each.
        let left = found.values.len();
        if left < LEAF_MAX / 4 && self.leaves.get(leaf + 1).is_some_and(|next| left + next.values.len() <= LEAF_MAX / 2)
        {
            self.firsts.remove(leaf + 1);
            let next = self.leaves.remove(leaf + 1);
            self.leaves[leaf].append(next);
        }
        value
    }

    /// Inserts an entry below all others.
    fn insert_first(&mut self, addr: u64, value: V) {
        self.len += 1;
        match self.leaves.first_mut() {
            Some(first) if first.values.len() < LEAF_MAX => {
                first.insert(0, addr, value);
                self.firsts[0] = addr;
            }
            _ => {
                self.firsts.insert(0, addr);
                self.leaves.insert(0, Leaf { addresses: vec![addr], values: vec![value] });
            }
        }
    }
}

impl<V> Leaf<V> {
    fn insert(&mut self, at: usize, addr: u64, value: V) {
        self.addresses.insert(at, addr);
        self.values.insert(at, value);
    }

    fn split_off(&mut self, at: usize) -> Self {
        Self { addresses: self.addresses.split_off(at), values: self.values.split_off(at) }
    }

    fn append(&mut self, mut other: Self) {
        self.addresses.append(&mut other.addresses);
        self.values.append(&mut other.values);
    }
}

impl<V: Copy> Index<u64> for AddressMap<V> {
    type Output = V;

    fn index(&self, addr: u64) -> &V {
        self.get(addr).expect("there is an entry at this address")
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    /// Random changes, with ever more and then ever fewer entries, against the standard library's map.
    #[test]
    fn it_is_a_map() {
        let (mut map, mut model) = (AddressMap::default(), BTreeMap::new());
        let mut state = 0x9E37_79B9_7F4A_7C15_u64;
        let mut draw = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % below
        };
        for round in 0..60_000_u64 {
            let (addr, grows) = (draw(4000), round % 20_000 < 10_000);
            if draw(3) < if grows { 2 } else { 1 } {
                assert_eq!(map.insert(addr, round), model.insert(addr, round));
            } else {
                assert_eq!(map.remove(addr), model.remove(&addr));
            }
            assert_eq!((map.len(), map.get(addr)), (model.len(), model.get(&addr)));
            let near = |position: Option<Position>| position.map(|position| map.address(position));
            let probe = draw(4100);
            assert_eq!(near(map.last_until(probe)), model.range(..=probe).next_back().map(|it| *it.0));
            assert_eq!(near(map.first_from(probe)), model.range(probe..).next().map(|it| *it.0));
            if let Some(position) = map.last_until(probe) {
                let here = map.address(position);
                assert_eq!(near(map.next(position)), model.range(here + 1..).next().map(|it| *it.0));
                assert_eq!(near(map.previous(position)), model.range(..here).next_back().map(|it| *it.0));
            }
            if round % 500 == 0 {
                assert!(map.iter().map(|(addr, value)| (addr, *value)).eq(model.clone()));
                assert!(
                    map.range(probe..probe + 300).map(|it| it.0).eq(model.range(probe..probe + 300).map(|it| *it.0))
                );
                assert!(map.leaves.len() <= 2 + model.len() / 8, "{} leaves", map.leaves.len());
            }
        }
    }
}
