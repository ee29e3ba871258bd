//! The objects of the contract's ids. Finding one takes no lock that calls on other objects take.
//!
//! The rules. An id is never reused, and newer ids are greater. A call that uses an object holds it shared
//! ([`ObjectTable::get`]) until CUDA has returned; a call that destroys it holds it exclusively
//! ([`ObjectTable::exclusive`]). So CUDA is never given an object that another thread has just destroyed. Objects that
//! one thread at a time may use are always held exclusively ([`ObjectTable::wait_exclusive`]).
//!
//! An id consists of a slot number and an epoch. Slots are reused; each reuse starts a new epoch, so the ids of earlier
//! objects of the slot match nothing.

use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, OnceLock, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError};

use crate::sync::{lock, write};

/// How many bits of an id are its slot number. The rest, the epoch, is enough for a million million reuses.
const SLOT_BITS: u32 = 24;
const SLOT_MASK: u64 = (1 << SLOT_BITS) - 1;

/// Slots are allocated in chunks that never move, each twice as long as the one before it.
const FIRST_CHUNK: u64 = 64;
const CHUNKS: usize = (SLOT_BITS - FIRST_CHUNK.ilog2()) as usize;

/// The last slot number. The first is 1, so that no id is 0.
const LAST_SLOT: u64 = (1 << SLOT_BITS) - FIRST_CHUNK;

/// Objects by id.
pub(crate) struct ObjectTable<T> {
    chunks: [OnceLock<Box<[Slot<T>]>>; CHUNKS],
    free_slots: Mutex<FreeSlots>,
}

/// One object, or none. On a cache line of its own, so that threads with different objects share none.
#[repr(align(64))]
struct Slot<T>(RwLock<Option<Entry<T>>>);

struct Entry<T> {
    id: u64,
    object: T,
}

impl<T> Slot<T> {
    /// The object, if there is one and no call holds it exclusively.
    fn try_get(&self) -> Option<Shared<'_, T>> {
        let entry = match self.0.try_read() {
            Ok(entry) => entry,
            Err(TryLockError::Poisoned(entry)) => entry.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        entry.is_some().then_some(Shared(entry))
    }
}

/// Which slots are free.
#[derive(Default)]
struct FreeSlots {
    /// How many slots were ever used, from the first on.
    used: u64,
    /// Used slots that are free again.
    free: Vec<u64>,
    epoch: u64,
}

impl FreeSlots {
    /// A new id, greater than all before.
    fn next_id(&mut self) -> u64 {
        let slot = if let Some(slot) = self.free.pop() {
            self.epoch += 1;
            slot
        } else {
            assert!(self.used < LAST_SLOT, "more than {LAST_SLOT} objects of one kind at a time");
            self.used += 1;
            self.used
        };
        self.epoch << SLOT_BITS | slot
    }
}

impl<T> ObjectTable<T> {
    /// An empty table. The first id is 1.
    pub(crate) fn new() -> Self {
        Self { chunks: [const { OnceLock::new() }; CHUNKS], free_slots: Mutex::default() }
    }

    /// Adds an object under a new id.
    pub(crate) fn insert(&self, object: T) -> u64 {
        self.insert_locked(&mut lock(&self.free_slots), object)
    }

    /// The id of the object that `same` matches, or of `object`, added under a new id.
    pub(crate) fn find_or_insert(&self, same: impl Fn(&T) -> bool, object: T) -> u64 {
        let mut free_slots = lock(&self.free_slots);
        let known = self.iter(free_slots.used).find(|entry| same(entry)).map(|entry| entry.id());
        known.unwrap_or_else(|| self.insert_locked(&mut free_slots, object))
    }

    fn insert_locked(&self, free_slots: &mut FreeSlots, object: T) -> u64 {
        let id = free_slots.next_id();
        let (chunk, index) = position(id & SLOT_MASK);
        let slots =
            self.chunks[chunk].get_or_init(|| (0..FIRST_CHUNK << chunk).map(|_| Slot(RwLock::new(None))).collect());
        let before = write(&slots[index].0).replace(Entry { id, object });
        assert!(before.is_none(), "a free slot holds no object");
        id
    }

    /// The object, for use; it is not destroyed before the result is dropped. `None` if it is destroyed or being
    /// destroyed. Never waits.
    pub(crate) fn get(&self, id: u64) -> Option<Shared<'_, T>> {
        // A slot is locked exclusively only to destroy its object, or to fill it under another id.
        self.slot(id & SLOT_MASK)?.try_get().filter(|entry| entry.id() == id)
    }

    /// The object, to change or remove it; waits until no call uses it, and no call can until the result is dropped.
    pub(crate) fn exclusive(&self, id: u64) -> Option<Exclusive<'_, T>> {
        let slot = self.slot(id & SLOT_MASK)?;
        // A stale id must not make users of the slot's present object wait.
        if slot.try_get().is_some_and(|entry| entry.id() != id) {
            return None;
        }
        self.locked(slot, id)
    }

    /// The object, exclusively, for the length of one call: waits for other calls on it. `None` if it is destroyed by
    /// then. For tables whose objects are used in no other way: one lock then serves to find the object and to
    /// serialize calls on it.
    pub(crate) fn wait_exclusive(&self, id: u64) -> Option<Exclusive<'_, T>> {
        self.locked(self.slot(id & SLOT_MASK)?, id)
    }

    fn locked<'a>(&'a self, slot: &'a Slot<T>, id: u64) -> Option<Exclusive<'a, T>> {
        let entry = write(&slot.0);
        entry.as_ref().is_some_and(|entry| entry.id == id).then_some(Exclusive { table: self, entry })
    }

    /// The ids of all objects that match, except those that are being destroyed.
    pub(crate) fn ids(&self, matches: impl Fn(&T) -> bool) -> Vec<u64> {
        let used = lock(&self.free_slots).used;
        self.iter(used).filter(|entry| matches(entry)).map(|entry| entry.id()).collect()
    }

    fn iter(&self, used: u64) -> impl Iterator<Item = Shared<'_, T>> {
        (1..=used).filter_map(|slot| self.slot(slot)?.try_get())
    }

    fn slot(&self, slot: u64) -> Option<&Slot<T>> {
        if !(1..=LAST_SLOT).contains(&slot) {
            return None;
        }
        let (chunk, index) = position(slot);
        self.chunks[chunk].get()?.get(index)
    }
}

/// The chunk of a slot, and the index in it.
const fn position(slot: u64) -> (usize, usize) {
    let slot = slot - 1 + FIRST_CHUNK;
    let chunk = slot.ilog2() - FIRST_CHUNK.ilog2();
    (chunk as usize, (slot - (FIRST_CHUNK << chunk)) as usize)
}

/// An object in use.
pub(crate) struct Shared<'a, T>(RwLockReadGuard<'a, Option<Entry<T>>>);

impl<T> Shared<'_, T> {
    fn entry(&self) -> &Entry<T> {
        self.0.as_ref().expect("checked when it was found")
    }

    fn id(&self) -> u64 {
        self.entry().id
    }
}

impl<T> Deref for Shared<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.entry().object
    }
}

/// An object that no other call can use.
pub(crate) struct Exclusive<'a, T> {
    table: &'a ObjectTable<T>,
    entry: RwLockWriteGuard<'a, Option<Entry<T>>>,
}

impl<T> Exclusive<'_, T> {
    /// Removes the object from the table.
    pub(crate) fn remove(mut self) -> T {
        let Entry { id, object } = self.entry.take().expect("checked when it was found");
        // The slot is unlocked first: inserting locks the two in the opposite order.
        drop(self.entry);
        lock(&self.table.free_slots).free.push(id & SLOT_MASK);
        object
    }
}

impl<T> Deref for Exclusive<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.entry.as_ref().expect("checked when it was found").object
    }
}

impl<T> DerefMut for Exclusive<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.entry.as_mut().expect("checked when it was found").object
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::thread;

    use super::*;

    fn value<T: Copy>(table: &ObjectTable<T>, id: u64) -> Option<T> {
        table.get(id).map(|object| *object)
    }

    fn take<T>(table: &ObjectTable<T>, id: u64) -> Option<T> {
        table.exclusive(id).map(Exclusive::remove)
    }

    #[test]
    fn ids_are_never_reused_and_newer_ones_are_greater() {
        let table = ObjectTable::new();
        let mut newest = 0;
        for round in 0..5 {
            let ids: Vec<u64> = (0..3 + round).map(|n| table.insert(n)).collect();
            assert!(ids[0] > newest && ids.is_sorted());
            newest = ids[ids.len() - 1];
            for &id in &ids[1..] {
                assert!(take(&table, id).is_some());
                assert_eq!((value(&table, id), take(&table, id)), (None, None));
            }
            assert_eq!(value(&table, ids[0]), Some(0));
        }
    }

    #[test]
    fn unknown_ids_match_nothing() {
        let table = ObjectTable::new();
        assert_eq!(table.insert('a'), 1);
        for id in [0, 2, 64, 65, LAST_SLOT, LAST_SLOT + 1, SLOT_MASK, 1 << SLOT_BITS, 1 << SLOT_BITS | 1, u64::MAX] {
            assert_eq!((value(&table, id), take(&table, id)), (None, None), "{id}");
        }
    }

    #[test]
    fn slot_numbers_map_to_distinct_slots() {
        let count = if cfg!(miri) { 200 } else { 20_000 };
        let table = ObjectTable::new();
        let ids: Vec<u64> = (0..count).map(|n| table.insert(n)).collect();
        assert!(ids.iter().zip(0..).all(|(&id, n)| value(&table, id) == Some(n)));
        assert_eq!(position(1), (0, 0));
        assert_eq!((position(64), position(65)), ((0, 63), (1, 0)));
        assert_eq!(position(LAST_SLOT), (CHUNKS - 1, (FIRST_CHUNK << (CHUNKS - 1)) as usize - 1));
    }

    #[test]
    fn find_or_insert_returns_the_id_of_a_known_object() {
        let table = ObjectTable::new();
        let id = table.find_or_insert(|&object| object == 7, 7);
        assert_eq!(table.find_or_insert(|&object| object == 7, 7), id);
        assert_ne!(table.find_or_insert(|&object| object == 8, 8), id);
        assert_eq!(table.ids(|&object| object == 7), [id]);
    }

    #[test]
    fn an_object_that_is_not_removed_stays() {
        let table = ObjectTable::new();
        let id = table.insert('a');
        let mut object = table.exclusive(id).expect("it exists");
        assert_eq!(value(&table, id), None, "held exclusively");
        *object = 'z';
        drop(object);
        assert_eq!(value(&table, id), Some('z'));
    }

    #[test]
    fn wait_exclusive_waits_for_other_calls() {
        let table = ObjectTable::new();
        let ids = [1, 2].map(|n| table.insert(n));
        take(&table, ids[0]);
        assert!(table.wait_exclusive(ids[0]).is_none() && table.wait_exclusive(99).is_none());
        let mut object = table.wait_exclusive(ids[1]).expect("it exists");
        thread::scope(|scope| {
            let waiting = scope.spawn(|| table.wait_exclusive(ids[1]).map(|object| *object));
            *object += 10;
            drop(object);
            assert_eq!(waiting.join().expect("it does not panic"), Some(12));
        });
        let object = table.wait_exclusive(ids[1]).expect("it exists");
        thread::scope(|scope| {
            let waiting = scope.spawn(|| table.wait_exclusive(ids[1]).map(|object| *object));
            object.remove();
            assert_eq!(waiting.join().expect("it does not panic"), None);
        });
    }

    /// Every thread creates, uses and removes objects of all. An object is set to 0 before it is removed; no thread may
    /// see that while it uses the object.
    #[test]
    fn no_object_is_removed_while_it_is_used() {
        let (rounds, threads) = if cfg!(miri) { (20, 3) } else { (5_000, 4) };
        let table: ObjectTable<AtomicU64> = ObjectTable::new();
        let shared: Vec<AtomicU64> = (0..8).map(|_| AtomicU64::new(0)).collect();
        let removed = AtomicU64::new(0);
        let work = |seed: u64| {
            let mut rng = fastrand::Rng::with_seed(seed);
            for _ in 0..rounds {
                let at = &shared[rng.usize(..shared.len())];
                let id = at.load(Ordering::Acquire);
                let remove = |id| {
                    let Some(object) = table.exclusive(id) else { return };
                    object.store(0, Ordering::Relaxed);
                    object.remove();
                    removed.fetch_add(1, Ordering::Relaxed);
                };
                match rng.u32(..4) {
                    0 => remove(at.swap(table.insert(AtomicU64::new(1)), Ordering::AcqRel)),
                    1 => remove(id),
                    _ => {
                        let Some(object) = table.get(id) else { continue };
                        assert_eq!(object.load(Ordering::Relaxed), 1, "{id} is used and gone, seed {seed}");
                        thread::yield_now();
                        assert_eq!(object.load(Ordering::Relaxed), 1, "{id} went while in use, seed {seed}");
                    }
                }
            }
        };
        thread::scope(|scope| (1..=threads).for_each(|seed| _ = scope.spawn(move || work(seed))));
        let left = table.ids(|_| true);
        assert!(removed.load(Ordering::Relaxed) > 0 && left.len() <= shared.len());
    }
}
