//! The free blocks of one lane, in order.
//!
//! A sorted list in chunks: with the few dozen blocks that most lanes have, a search and a shift within one chunk; with
//! thousands, one more search over the chunks. Giving an entry another key, which every cut and every join does, mostly
//! stays within its chunk.

use super::block::BlockKey;

/// A chunk that reaches this is cut in two.
const CHUNK_MAX: usize = 64;

/// The order of free blocks: by size, then by the age of the segment (0 where the order is by address), then by
/// address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct FreeKey {
    pub(super) size: u64,
    pub(super) registration: u64,
    pub(super) ptr: u64,
}

/// Where an entry stands, until the set is changed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    chunk: usize,
    at: usize,
}

/// The free blocks of one lane.
#[derive(Debug, Default)]
pub(super) struct FreeSet {
    /// In order, none of them empty.
    chunks: Vec<Vec<(FreeKey, BlockKey)>>,
}

impl FreeSet {
    pub(super) fn insert(&mut self, key: FreeKey, block: BlockKey) {
        let Place { mut chunk, mut at } = self.place(key);
        if chunk == self.chunks.len() {
            match self.chunks.last() {
                // Behind all others: at the end of the last chunk.
                Some(last) => (chunk, at) = (chunk - 1, last.len()),
                None => self.chunks.push(Vec::with_capacity(CHUNK_MAX)),
            }
        }
        let entries = &mut self.chunks[chunk];
        assert!(entries.get(at).is_none_or(|&(there, _)| there != key), "two free blocks at {:#x}", key.ptr);
        entries.insert(at, (key, block));
        if entries.len() >= CHUNK_MAX {
            let mut upper = Vec::with_capacity(CHUNK_MAX);
            upper.extend(entries.drain(CHUNK_MAX / 2..));
            self.chunks.insert(chunk + 1, upper);
        }
    }

    pub(super) fn remove(&mut self, key: FreeKey) {
        let place = self.place(key);
        let found = self.chunks.get(place.chunk).and_then(|entries| entries.get(place.at));
        assert!(found.is_some_and(|&(there, _)| there == key), "no free block at {:#x}", key.ptr);
        self.remove_at(place);
    }

    /// Those of at least that size, smallest first, with their places.
    pub(super) fn at_least(&self, size: u64) -> impl Iterator<Item = (Place, BlockKey)> + '_ {
        let mut place = self.place(FreeKey { size, registration: 0, ptr: 0 });
        std::iter::from_fn(move || {
            let entries = self.chunks.get(place.chunk)?;
            let &(_, block) = entries.get(place.at)?;
            let found = place;
            place.at += 1;
            if place.at == entries.len() {
                place = Place { chunk: place.chunk + 1, at: 0 };
            }
            Some((found, block))
        })
    }

    /// Takes out what stands at `place`.
    pub(super) fn remove_at(&mut self, place: Place) {
        self.chunks[place.chunk].remove(place.at);
        // The last one stays, so that a lane that empties and fills does not allocate.
        if self.chunks[place.chunk].is_empty() && self.chunks.len() > 1 {
            self.chunks.remove(place.chunk);
        }
    }

    /// Gives what stands at `place` a smaller key.
    pub(super) fn lower_at(&mut self, place: Place, key: FreeKey) {
        let entries = &mut self.chunks[place.chunk];
        let block = entries[place.at].1;
        let stays_in_chunk = place.chunk == 0 || entries[0].0 < key;
        if stays_in_chunk && place.at > 0 {
            let at = entries[..place.at].partition_point(|&(there, _)| there < key);
            entries.copy_within(at..place.at, at + 1);
            entries[at] = (key, block);
        } else if stays_in_chunk {
            entries[0].0 = key;
        } else {
            self.remove_at(place);
            self.insert(key, block);
        }
    }

    /// Gives the entry at `before` a larger key, and to another block.
    pub(super) fn raise(&mut self, before: FreeKey, now: FreeKey, block: BlockKey) {
        let Place { chunk, at } = self.place(before);
        let is_last = chunk + 1 == self.chunks.len();
        let entries = &mut self.chunks[chunk];
        assert!(entries[at].0 == before, "no free block at {:#x}", before.ptr);
        let behind = entries[at + 1..].partition_point(|&(there, _)| there < now);
        let last = at + behind;
        if last + 1 < entries.len() || is_last {
            entries.copy_within(at + 1..=last, at);
            entries[last] = (now, block);
        } else {
            // It may belong into a later chunk.
            self.remove_at(Place { chunk, at });
            self.insert(now, block);
        }
    }

    /// All, smallest first.
    pub(super) fn all(&self) -> impl DoubleEndedIterator<Item = BlockKey> + '_ {
        self.chunks.iter().flatten().map(|&(_, block)| block)
    }

    pub(super) fn len(&self) -> usize {
        self.chunks.iter().map(Vec::len).sum()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.chunks.first().is_none_or(Vec::is_empty)
    }

    /// The size of the largest.
    pub(super) fn largest(&self) -> u64 {
        self.chunks.last().and_then(|entries| entries.last()).map_or(0, |(key, _)| key.size)
    }

    /// Whether that block is in it, under that key.
    pub(super) fn holds(&self, key: FreeKey, block: BlockKey) -> bool {
        let Place { chunk, at } = self.place(key);
        self.chunks.get(chunk).and_then(|entries| entries.get(at)) == Some(&(key, block))
    }

    /// Takes all out, to put them in again under other keys.
    pub(super) fn drain(&mut self) -> Vec<BlockKey> {
        std::mem::take(&mut self.chunks).into_iter().flatten().map(|(_, block)| block).collect()
    }

    /// Where the first entry stands that is not before `key`. Behind all, the chunk is one that is not there.
    fn place(&self, key: FreeKey) -> Place {
        let chunk = match self.chunks.as_slice() {
            [only] => usize::from(only.last().is_none_or(|&(last, _)| last < key)),
            chunks => chunks.partition_point(|entries| entries.last().is_none_or(|&(last, _)| last < key)),
        };
        let at = self.chunks.get(chunk).map_or(0, |entries| entries.partition_point(|&(there, _)| there < key));
        Place { chunk, at }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use slotmap::{KeyData, SlotMap};

    use super::*;

    /// Random inserts and removes, beside a B-tree.
    #[test]
    fn it_is_an_ordered_map() {
        for seed in 0..20_u64 {
            let mut keys: SlotMap<BlockKey, ()> = SlotMap::with_key();
            let (mut set, mut model) = (FreeSet::default(), BTreeMap::new());
            let mut luck = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
            let mut draw = |below: u64| {
                luck ^= luck << 13;
                luck ^= luck >> 7;
                luck ^= luck << 17;
                luck % below
            };
            let most = [3, 70, 5000][usize::try_from(seed % 3).unwrap()];
            for _ in 0..4_000 {
                let key = FreeKey { size: draw(40), registration: draw(3), ptr: draw(most) };
                if model.contains_key(&key) {
                    set.remove(key);
                    model.remove(&key);
                } else if draw(3) > 0 || model.len() < 2 {
                    let block = keys.insert(());
                    set.insert(key, block);
                    model.insert(key, block);
                }
                let size = draw(42);
                let least = FreeKey { size, registration: 0, ptr: 0 };
                let expected = model.range(least..).next().map(|(_, &block)| block);
                assert_eq!(set.at_least(size).next().map(|(_, block)| block), expected, "seed {seed}");
                let lower = FreeKey { size: size / 2, registration: 0, ptr: most + draw(1000) };
                let first = set.at_least(size).next();
                if let Some((place, block)) = first
                    && !model.contains_key(&lower)
                    && size > 1
                {
                    model.retain(|_, other| *other != block);
                    model.insert(lower, block);
                    set.lower_at(place, lower);
                }
                let higher = FreeKey { size: size + 1 + draw(5), registration: 1, ptr: 2 * most + draw(1000) };
                if let Some((&before, _)) = model.range(..higher).next_back()
                    && !model.contains_key(&higher)
                {
                    let block = keys.insert(());
                    model.remove(&before);
                    model.insert(higher, block);
                    set.raise(before, higher, block);
                }
            }
            assert!(set.all().eq(model.values().copied()), "seed {seed}");
            assert!(
                set.at_least(20)
                    .map(|(_, block)| block)
                    .eq(model.iter().filter(|(key, _)| key.size >= 20).map(|(_, &block)| block))
            );
            assert_eq!(set.len(), model.len());
            assert_eq!(set.largest(), model.last_key_value().map_or(0, |(key, _)| key.size));
            let (&some, &block) = model.first_key_value().unwrap();
            assert!(set.holds(some, block) && !set.holds(some, BlockKey::from(KeyData::from_ffi(u64::MAX))));
        }
    }
}
