//! Free blocks, ordered by size.
//!
//! A sorted list, divided into runs. Most lists have a few dozen blocks: an operation is a search and a shift within
//! one run. With thousands of blocks, a search over the runs comes first. Every split and every merge changes the key
//! of an entry, which usually stays in its run.

use super::key::BlockKey;

/// A run that reaches this length is divided in two.
const RUN_MAX: usize = 64;

/// The order of free blocks: by size, then by the registration of the segment (0 if the order is by address), then by
/// address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct FreeKey {
    pub(super) size: u64,
    pub(super) registration: u64,
    pub(super) ptr: u64,
}

/// The position of an entry, until the list changes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Position {
    run: usize,
    at: usize,
}

/// An entry with its position.
#[derive(Clone, Copy, Debug)]
pub(super) struct FreeEntry {
    pub(super) position: Position,
    pub(super) key: FreeKey,
    pub(super) block: BlockKey,
}

/// The free blocks of one stream in one block pool.
#[derive(Debug, Default)]
pub(super) struct FreeList {
    /// In order. None is empty, unless it is the only one.
    runs: Vec<Vec<(FreeKey, BlockKey)>>,
    /// The position of the entry whose key was lowered last: the block that was split off there is often freed next.
    lowered: Position,
}

impl FreeList {
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a call would pass the key through memory")]
    pub(super) fn insert(&mut self, key: FreeKey, block: BlockKey) {
        let Position { mut run, mut at } = self.position(key);
        if run == self.runs.len() {
            match self.runs.last() {
                // After all others: at the end of the last run.
                Some(last) => (run, at) = (run - 1, last.len()),
                None => self.runs.push(Vec::with_capacity(RUN_MAX)),
            }
        }
        let entries = &mut self.runs[run];
        assert!(entries.get(at).is_none_or(|&(entry, _)| entry != key), "two free blocks at {:#x}", key.ptr);
        entries.insert(at, (key, block));
        if entries.len() >= RUN_MAX {
            self.divide(run);
        }
    }

    /// Divides a run in two.
    #[cold]
    fn divide(&mut self, run: usize) {
        let mut upper = Vec::with_capacity(RUN_MAX);
        upper.extend(self.runs[run].drain(RUN_MAX / 2..));
        self.runs.insert(run + 1, upper);
    }

    pub(super) fn remove(&mut self, key: FreeKey) {
        let position = self.position(key);
        let found = self.runs.get(position.run).and_then(|entries| entries.get(position.at));
        assert!(found.is_some_and(|&(entry, _)| entry == key), "no free block at {:#x}", key.ptr);
        self.remove_at(position);
    }

    /// The position of the smallest block of at least that size, if there is one.
    #[inline]
    pub(super) fn first_at_least(&self, size: u64) -> Position {
        self.position_where(|entry| entry.size < size)
    }

    /// The entry at a position.
    #[inline]
    pub(super) fn at(&self, position: Position) -> Option<&(FreeKey, BlockKey)> {
        self.runs.get(position.run)?.get(position.at)
    }

    /// Blocks of at least that size, smallest first.
    pub(super) fn at_least(&self, size: u64) -> impl Iterator<Item = FreeEntry> + '_ {
        let mut next = self.first_at_least(size);
        std::iter::from_fn(move || {
            let entries = self.runs.get(next.run)?;
            let position = next;
            let &(key, block) = entries.get(position.at)?;
            next.at += 1;
            if next.at == entries.len() {
                next = Position { run: next.run + 1, at: 0 };
            }
            Some(FreeEntry { position, key, block })
        })
    }

    /// Removes the entry at `position`.
    pub(super) fn remove_at(&mut self, position: Position) {
        self.runs[position.run].remove(position.at);
        // The last run stays, so that a list that empties and fills does not allocate.
        if self.runs[position.run].is_empty() && self.runs.len() > 1 {
            self.runs.remove(position.run);
        }
    }

    /// Gives the entry at `position` a smaller key.
    #[inline]
    pub(super) fn lower_at(&mut self, position: Position, key: FreeKey) {
        let Position { run, at } = position;
        let entries = &mut self.runs[run];
        let is_in_order = if at > 0 { entries[at - 1].0 < key } else { run == 0 };
        if is_in_order {
            entries[at].0 = key;
            self.lowered = position;
        } else {
            self.move_down(position, key);
        }
    }

    /// As [`lower_at`](Self::lower_at), if the entry has to move before others.
    fn move_down(&mut self, position: Position, key: FreeKey) {
        let entries = &mut self.runs[position.run];
        let block = entries[position.at].1;
        let stays_in_run = position.run == 0 || entries[0].0 < key;
        if stays_in_run {
            let at = entries[..position.at].partition_point(|&(entry, _)| entry < key);
            entries.copy_within(at..position.at, at + 1);
            entries[at] = (key, block);
            self.lowered = Position { run: position.run, at };
        } else {
            self.remove_at(position);
            self.insert(key, block);
        }
    }

    /// Gives the entry with the key `before` a larger key and another block.
    #[inline]
    pub(super) fn raise(&mut self, before: FreeKey, after: FreeKey, block: BlockKey) {
        let is_lowered = self.at(self.lowered).is_some_and(|&(entry, _)| entry == before);
        let Position { run, at } = if is_lowered { self.lowered } else { self.position(before) };
        let is_last_run = run + 1 == self.runs.len();
        let entries = &mut self.runs[run];
        assert!(entries[at].0 == before, "no free block at {:#x}", before.ptr);
        let is_in_order = match entries.get(at + 1) {
            Some(&(next, _)) => after < next,
            None => is_last_run,
        };
        if is_in_order {
            entries[at] = (after, block);
        } else {
            self.move_up(Position { run, at }, after, block);
        }
    }

    /// As [`raise`](Self::raise), if the entry has to move after others.
    fn move_up(&mut self, position: Position, after: FreeKey, block: BlockKey) {
        let Position { run, at } = position;
        let is_last_run = run + 1 == self.runs.len();
        let entries = &mut self.runs[run];
        let skipped = entries[at + 1..].partition_point(|&(entry, _)| entry < after);
        let last = at + skipped;
        if last + 1 < entries.len() || is_last_run {
            entries.copy_within(at + 1..=last, at);
            entries[last] = (after, block);
        } else {
            // It may belong in a later run.
            self.remove_at(position);
            self.insert(after, block);
        }
    }

    /// All blocks, smallest first.
    pub(super) fn all(&self) -> impl DoubleEndedIterator<Item = BlockKey> + '_ {
        self.runs.iter().flatten().map(|&(_, block)| block)
    }

    pub(super) fn len(&self) -> usize {
        self.runs.iter().map(Vec::len).sum()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.runs.first().is_none_or(Vec::is_empty)
    }

    /// The size of the largest block.
    pub(super) fn largest(&self) -> u64 {
        self.runs.last().and_then(|entries| entries.last()).map_or(0, |(key, _)| key.size)
    }

    /// Whether it contains that block, under that key.
    pub(super) fn contains(&self, key: FreeKey, block: BlockKey) -> bool {
        let Position { run, at } = self.position(key);
        self.runs.get(run).and_then(|entries| entries.get(at)) == Some(&(key, block))
    }

    /// Removes all, to be inserted again under other keys.
    pub(super) fn drain(&mut self) -> Vec<BlockKey> {
        std::mem::take(&mut self.runs).into_iter().flatten().map(|(_, block)| block).collect()
    }

    /// The position of the first entry that is not before `key`. If there is none, `run` is the number of runs.
    fn position(&self, key: FreeKey) -> Position {
        self.position_where(|entry| *entry < key)
    }

    #[inline]
    fn position_where(&self, is_before: impl Fn(&FreeKey) -> bool) -> Position {
        let ends_before = |entries: &Vec<(FreeKey, BlockKey)>| entries.last().is_none_or(|(last, _)| is_before(last));
        let run = match self.runs.as_slice() {
            [only] => usize::from(ends_before(only)),
            runs => runs.partition_point(ends_before),
        };
        let at = self.runs.get(run).map_or(0, |entries| entries.partition_point(|(entry, _)| is_before(entry)));
        Position { run, at }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use slotmap::{KeyData, SlotMap};

    use super::*;

    /// Random inserts and removes, compared with a B-tree.
    #[test]
    fn free_list_is_an_ordered_map() {
        for seed in 0..20_u64 {
            let mut keys: SlotMap<BlockKey, ()> = SlotMap::with_key();
            let (mut list, mut model) = (FreeList::default(), BTreeMap::new());
            let mut rng = fastrand::Rng::with_seed(seed);
            let mut below = |limit: u64| rng.u64(..limit);
            let ptr_max = [3, 70, 5000][usize::try_from(seed % 3).unwrap()];
            for _ in 0..4_000 {
                let key = FreeKey { size: below(40), registration: below(3), ptr: below(ptr_max) };
                if model.contains_key(&key) {
                    list.remove(key);
                    model.remove(&key);
                } else if below(3) > 0 || model.len() < 2 {
                    let block = keys.insert(());
                    list.insert(key, block);
                    model.insert(key, block);
                }
                let size = below(42);
                let least = FreeKey { size, registration: 0, ptr: 0 };
                let expected = model.range(least..).next().map(|(_, &block)| block);
                assert_eq!(list.at_least(size).next().map(|entry| entry.block), expected, "seed {seed}");
                let lower = FreeKey { size: size / 2, registration: 0, ptr: ptr_max + below(1000) };
                let position = list.first_at_least(size);
                let first = list.at(position).map(|&(_, block)| block);
                assert_eq!(first, expected, "seed {seed}");
                if let Some(block) = first
                    && !model.contains_key(&lower)
                    && size > 1
                {
                    model.retain(|_, other| *other != block);
                    model.insert(lower, block);
                    list.lower_at(position, lower);
                }
                let higher = FreeKey { size: size + 1 + below(5), registration: 1, ptr: 2 * ptr_max + below(1000) };
                if let Some((&before, _)) = model.range(..higher).next_back()
                    && !model.contains_key(&higher)
                {
                    let block = keys.insert(());
                    model.remove(&before);
                    model.insert(higher, block);
                    list.raise(before, higher, block);
                }
            }
            assert!(list.all().eq(model.values().copied()), "seed {seed}");
            assert!(
                list.at_least(20)
                    .map(|entry| entry.block)
                    .eq(model.iter().filter(|(key, _)| key.size >= 20).map(|(_, &block)| block))
            );
            assert_eq!(list.len(), model.len());
            assert_eq!(list.largest(), model.last_key_value().map_or(0, |(key, _)| key.size));
            let (&key, &block) = model.first_key_value().unwrap();
            assert!(list.contains(key, block) && !list.contains(key, BlockKey::from(KeyData::from_ffi(u64::MAX))));
        }
    }
}
