//! What stands behind the contract's ids: a row per object, found by id without a lock that others share.
//!
//! The rules. An id is never given twice, and younger ones are greater. Whoever uses an object holds its row
//! ([`Table::get`]) until CUDA has returned; whoever takes it away holds the row alone ([`Table::alone`]). So no call
//! hands CUDA an object that another thread has just destroyed. Objects that one thread at a time may use are always
//! held alone ([`Table::turn`]).
//!
//! An id is a place and an epoch. Places are used again; each time one is, a new epoch begins, and the id of the row
//! that was there before fits nothing any more.

use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError};

use warpool_driver::RawHandle;

/// A CUDA handle: the name of an object of the driver, good on every thread. Never followed.
pub(crate) struct Handle<T>(*mut T);

// SAFETY: a handle is a name, not a reference; CUDA's objects may be used from any thread.
unsafe impl<T> Send for Handle<T> {}
// SAFETY: as above; sharing a name shares nothing.
unsafe impl<T> Sync for Handle<T> {}

impl<T> Clone for Handle<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Handle<T> {}

impl<T> PartialEq for Handle<T> {
    fn eq(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}

impl<T> Eq for Handle<T> {}

impl<T> Handle<T> {
    /// Takes in what CUDA gave.
    pub(crate) const fn new(raw: *mut T) -> Self {
        Self(raw)
    }

    /// Takes in a handle that came as a number.
    pub(crate) const fn from_number(number: u64) -> Self {
        Self(std::ptr::without_provenance_mut(number as usize))
    }

    /// What CUDA takes.
    pub(crate) const fn raw(self) -> *mut T {
        self.0
    }

    /// The handle as a number, to tell it from others.
    pub(crate) fn number(self) -> u64 {
        self.0.addr() as u64
    }

    /// The handle as others get to see it.
    pub(crate) fn exposed(self) -> RawHandle {
        RawHandle(self.number())
    }
}

/// How many bits of an id are its place. The rest, the epoch, lasts for a million million reuses.
const PLACE_BITS: u32 = 24;
const PLACE_MASK: u64 = (1 << PLACE_BITS) - 1;

/// Rows come in chunks that never move, each twice as long as the one before it.
const FIRST_CHUNK: u64 = 64;
const CHUNKS: usize = (PLACE_BITS - FIRST_CHUNK.ilog2()) as usize;

/// The last place that the chunks have room for. The first is 1, so that no id is 0.
const LAST_PLACE: u64 = (1 << PLACE_BITS) - FIRST_CHUNK;

/// Rows by id.
pub(crate) struct Table<T> {
    chunks: [OnceLock<Box<[Slot<T>]>>; CHUNKS],
    places: Mutex<Places>,
}

/// Where one row is, or none. On a cache line of its own, so that threads with different objects do not meet.
#[repr(align(64))]
struct Slot<T>(RwLock<Option<Row<T>>>);

struct Row<T> {
    id: u64,
    what: T,
}

impl<T> Slot<T> {
    /// The row, if there is one and nobody has it alone.
    fn used(&self) -> Option<Used<'_, T>> {
        let row = match self.0.try_read() {
            Ok(row) => row,
            Err(TryLockError::Poisoned(row)) => row.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        row.is_some().then_some(Used(row))
    }
}

/// Which places are taken.
#[derive(Default)]
struct Places {
    /// How many were ever used, from the first on.
    used: u64,
    /// Those of them that are free again.
    free: Vec<u64>,
    epoch: u64,
}

impl Places {
    /// A new id, greater than all before.
    fn next_id(&mut self) -> u64 {
        let place = if let Some(place) = self.free.pop() {
            self.epoch += 1;
            place
        } else {
            assert!(self.used < LAST_PLACE, "nobody has so many objects of one kind at a time");
            self.used += 1;
            self.used
        };
        self.epoch << PLACE_BITS | place
    }
}

impl<T> Table<T> {
    /// An empty table. The first id is 1.
    pub(crate) fn new() -> Self {
        Self { chunks: [const { OnceLock::new() }; CHUNKS], places: Mutex::default() }
    }

    /// Adds a row under a new id.
    pub(crate) fn insert(&self, what: T) -> u64 {
        self.insert_at(&mut lock(&self.places), what)
    }

    /// The id of the row that `same` recognises, or of `what`, added under a new id.
    pub(crate) fn find_or_insert(&self, same: impl Fn(&T) -> bool, what: T) -> u64 {
        let mut places = lock(&self.places);
        let known = self.rows(places.used).find(|row| same(row)).map(|row| row.id());
        known.unwrap_or_else(|| self.insert_at(&mut places, what))
    }

    fn insert_at(&self, places: &mut Places, what: T) -> u64 {
        let id = places.next_id();
        let (chunk, index) = position(id & PLACE_MASK);
        let slots =
            self.chunks[chunk].get_or_init(|| (0..FIRST_CHUNK << chunk).map(|_| Slot(RwLock::new(None))).collect());
        let before = write(&slots[index].0).replace(Row { id, what });
        assert!(before.is_none(), "a place that is taken is not free");
        id
    }

    /// The row, to use its object; it stays until the result is dropped. `None` if it is gone or just being taken away.
    /// Never waits.
    pub(crate) fn get(&self, id: u64) -> Option<Used<'_, T>> {
        // Rows are locked alone only by those who take them away, or who fill a place that had another id.
        self.slot(id & PLACE_MASK)?.used().filter(|row| row.id() == id)
    }

    /// The row, to change it or take it away; waits until nobody uses it, and nobody can until the result is dropped.
    pub(crate) fn alone(&self, id: u64) -> Option<Alone<'_, T>> {
        let slot = self.slot(id & PLACE_MASK)?;
        // A stale id must not get in the way of those who use what is in its place now.
        if slot.used().is_some_and(|row| row.id() != id) {
            return None;
        }
        let row = write(&slot.0);
        row.as_ref().is_some_and(|row| row.id == id).then_some(Alone { table: self, row })
    }

    /// The row, alone, for the length of one call: waits for its turn, also behind calls of others. `None` if the row
    /// is gone by then. For tables whose rows are used in no other way: one lock then does for finding the object and
    /// for keeping calls on it apart.
    pub(crate) fn turn(&self, id: u64) -> Option<Alone<'_, T>> {
        let row = write(&self.slot(id & PLACE_MASK)?.0);
        row.as_ref().is_some_and(|row| row.id == id).then_some(Alone { table: self, row })
    }

    /// The ids of all rows that `wanted` wants, but for those that are being taken away.
    pub(crate) fn ids(&self, wanted: impl Fn(&T) -> bool) -> Vec<u64> {
        let used = lock(&self.places).used;
        self.rows(used).filter(|row| wanted(row)).map(|row| row.id()).collect()
    }

    fn rows(&self, used: u64) -> impl Iterator<Item = Used<'_, T>> {
        (1..=used).filter_map(|place| self.slot(place)?.used())
    }

    fn slot(&self, place: u64) -> Option<&Slot<T>> {
        if !(1..=LAST_PLACE).contains(&place) {
            return None;
        }
        let (chunk, index) = position(place);
        self.chunks[chunk].get()?.get(index)
    }
}

/// The chunk of a place, and the index in it.
const fn position(place: u64) -> (usize, usize) {
    let place = place - 1 + FIRST_CHUNK;
    let chunk = place.ilog2() - FIRST_CHUNK.ilog2();
    (chunk as usize, (place - (FIRST_CHUNK << chunk)) as usize)
}

/// A row in use.
pub(crate) struct Used<'a, T>(RwLockReadGuard<'a, Option<Row<T>>>);

impl<T> Used<'_, T> {
    fn row(&self) -> &Row<T> {
        self.0.as_ref().expect("checked when it was found")
    }

    fn id(&self) -> u64 {
        self.row().id
    }
}

impl<T> Deref for Used<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.row().what
    }
}

/// A row that nobody else can use.
pub(crate) struct Alone<'a, T> {
    table: &'a Table<T>,
    row: RwLockWriteGuard<'a, Option<Row<T>>>,
}

impl<T> Alone<'_, T> {
    /// Takes the row out, once its object is gone.
    pub(crate) fn remove(mut self) -> T {
        let Row { id, what } = self.row.take().expect("checked when it was found");
        // The row is unlocked before the places are locked: inserting takes the two the other way round.
        drop(self.row);
        lock(&self.table.places).free.push(id & PLACE_MASK);
        what
    }
}

impl<T> Deref for Alone<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.row.as_ref().expect("checked when it was found").what
    }
}

impl<T> DerefMut for Alone<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.row.as_mut().expect("checked when it was found").what
    }
}

/// Locks for reading. A poisoned lock is taken as it is: no code of others runs under our locks, so nothing is left
/// half done.
pub(crate) fn read<T>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(PoisonError::into_inner)
}

/// Locks for writing.
pub(crate) fn write<T>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(PoisonError::into_inner)
}

/// Locks.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::thread;

    use super::*;

    fn value<T: Copy>(table: &Table<T>, id: u64) -> Option<T> {
        table.get(id).map(|row| *row)
    }

    fn take<T>(table: &Table<T>, id: u64) -> Option<T> {
        table.alone(id).map(Alone::remove)
    }

    #[test]
    fn an_id_is_never_given_twice_and_younger_ones_are_greater() {
        let table = Table::new();
        let mut youngest = 0;
        for round in 0..5 {
            let ids: Vec<u64> = (0..3 + round).map(|n| table.insert(n)).collect();
            assert!(ids[0] > youngest && ids.is_sorted());
            youngest = ids[ids.len() - 1];
            for &id in &ids[1..] {
                assert!(take(&table, id).is_some());
                assert_eq!((value(&table, id), take(&table, id)), (None, None));
            }
            assert_eq!(value(&table, ids[0]), Some(0));
        }
    }

    #[test]
    fn ids_that_were_never_given_out_name_nothing() {
        let table = Table::new();
        assert_eq!(table.insert('a'), 1);
        for id in [0, 2, 64, 65, LAST_PLACE, LAST_PLACE + 1, PLACE_MASK, 1 << PLACE_BITS, 1 << PLACE_BITS | 1, u64::MAX]
        {
            assert_eq!((value(&table, id), take(&table, id)), (None, None), "{id}");
        }
    }

    #[test]
    fn every_place_has_a_slot_of_its_own() {
        let count = if cfg!(miri) { 200 } else { 20_000 };
        let table = Table::new();
        let ids: Vec<u64> = (0..count).map(|n| table.insert(n)).collect();
        assert!(ids.iter().zip(0..).all(|(&id, n)| value(&table, id) == Some(n)));
        assert_eq!(position(1), (0, 0));
        assert_eq!((position(64), position(65)), ((0, 63), (1, 0)));
        assert_eq!(position(LAST_PLACE), (CHUNKS - 1, (FIRST_CHUNK << (CHUNKS - 1)) as usize - 1));
    }

    #[test]
    fn what_is_known_already_keeps_its_id() {
        let table = Table::new();
        let id = table.find_or_insert(|&row| row == 7, 7);
        assert_eq!(table.find_or_insert(|&row| row == 7, 7), id);
        assert_ne!(table.find_or_insert(|&row| row == 8, 8), id);
        assert_eq!(table.ids(|&row| row == 7), [id]);
    }

    #[test]
    fn a_row_that_was_not_taken_away_after_all_stays() {
        let table = Table::new();
        let id = table.insert('a');
        let mut row = table.alone(id).expect("it is there");
        assert_eq!(value(&table, id), None, "somebody has it alone");
        *row = 'z';
        drop(row);
        assert_eq!(value(&table, id), Some('z'));
    }

    #[test]
    fn whoever_wants_a_row_alone_gets_it_in_turn() {
        let table = Table::new();
        let ids = [1, 2].map(|n| table.insert(n));
        take(&table, ids[0]);
        assert!(table.turn(ids[0]).is_none() && table.turn(99).is_none());
        let mut row = table.turn(ids[1]).expect("it is there");
        thread::scope(|scope| {
            let waiting = scope.spawn(|| table.turn(ids[1]).map(|row| *row));
            *row += 10;
            drop(row);
            assert_eq!(waiting.join().expect("it does not panic"), Some(12));
        });
        let row = table.turn(ids[1]).expect("it is there");
        thread::scope(|scope| {
            let waiting = scope.spawn(|| table.turn(ids[1]).map(|row| *row));
            row.remove();
            assert_eq!(waiting.join().expect("it does not panic"), None);
        });
    }

    /// Every thread makes objects, uses everybody's, and takes some away. An object notes that it is gone; nobody may
    /// see that while using it.
    #[test]
    fn nothing_is_taken_away_while_it_is_used() {
        let (rounds, threads) = if cfg!(miri) { (20, 3) } else { (5_000, 4) };
        let table: Table<AtomicU64> = Table::new();
        let shared: Vec<AtomicU64> = (0..8).map(|_| AtomicU64::new(0)).collect();
        let taken = AtomicU64::new(0);
        let work = |seed: u64| {
            let mut luck = seed;
            for _ in 0..rounds {
                luck = luck.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let at = &shared[(luck >> 60) as usize % shared.len()];
                let id = at.load(Ordering::Acquire);
                match luck >> 40 & 3 {
                    0 => {
                        let before = at.swap(table.insert(AtomicU64::new(1)), Ordering::AcqRel);
                        let Some(row) = table.alone(before) else { continue };
                        row.store(0, Ordering::Relaxed);
                        row.remove();
                        taken.fetch_add(1, Ordering::Relaxed);
                    }
                    1 => {
                        let Some(row) = table.alone(id) else { continue };
                        row.store(0, Ordering::Relaxed);
                        row.remove();
                        taken.fetch_add(1, Ordering::Relaxed);
                    }
                    _ => {
                        let Some(row) = table.get(id) else { continue };
                        assert_eq!(row.load(Ordering::Relaxed), 1, "{id} is used and gone, seed {seed}");
                        thread::yield_now();
                        assert_eq!(row.load(Ordering::Relaxed), 1, "{id} went while in use, seed {seed}");
                    }
                }
            }
        };
        thread::scope(|scope| (1..=threads).for_each(|seed| _ = scope.spawn(move || work(seed))));
        let left = table.ids(|_| true);
        assert!(taken.load(Ordering::Relaxed) > 0 && left.len() <= shared.len());
    }
}
