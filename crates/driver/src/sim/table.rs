//! Objects by id. Ids count upwards and are never reused, so an id that was destroyed differs from one that never
//! existed.

use rustc_hash::FxHashMap;

/// Why an id has no object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missing {
    /// The object was destroyed.
    Destroyed,
    /// The id was never given out.
    Unknown,
}

/// Objects by id.
#[derive(Debug)]
pub struct Table<T> {
    last: u64,
    live: FxHashMap<u64, T>,
}

impl<T> Default for Table<T> {
    fn default() -> Self {
        Self { last: 0, live: FxHashMap::default() }
    }
}

impl<T> Table<T> {
    /// The id that the next [`insert`](Self::insert) gives.
    pub fn next_id(&self) -> u64 {
        self.last + 1
    }

    pub fn insert(&mut self, value: T) -> u64 {
        self.last += 1;
        self.live.insert(self.last, value);
        self.last
    }

    pub fn get(&self, id: u64) -> Option<&T> {
        self.live.get(&id)
    }

    pub fn get_mut(&mut self, id: u64) -> Option<&mut T> {
        self.live.get_mut(&id)
    }

    pub fn remove(&mut self, id: u64) -> Option<T> {
        self.live.remove(&id)
    }

    /// Why `id` has no object.
    pub fn why_missing(&self, id: u64) -> Missing {
        if id != 0 && id <= self.last { Missing::Destroyed } else { Missing::Unknown }
    }

    pub fn len(&self) -> usize {
        self.live.len()
    }

    /// All ids, oldest first.
    pub fn ids(&self) -> Vec<u64> {
        let mut ids: Vec<u64> = self.live.keys().copied().collect();
        ids.sort_unstable();
        ids
    }
}
