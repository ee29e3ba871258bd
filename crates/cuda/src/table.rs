//! What stands behind the contract's ids: handles by id, and ranges of memory by address.
//!
//! The rule: an id is never given twice. A lookup copies the row out, so no lock is held while CUDA is called; whoever
//! takes an object away removes its row first, so that of two threads that destroy the same id only one gets to CUDA.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use rustc_hash::FxHashMap;
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
        // SAFETY: it came from CUDA, and whoever asks for it gets it from a row that is still there.
        unsafe { RawHandle::new(self.number()) }
    }
}

/// Rows by id.
pub(crate) struct Table<T> {
    next: AtomicU64,
    rows: RwLock<FxHashMap<u64, T>>,
}

impl<T: Clone> Table<T> {
    /// An empty table. The first id is 1.
    pub(crate) fn new() -> Self {
        Self { next: AtomicU64::new(1), rows: RwLock::default() }
    }

    /// Adds a row under a new id.
    pub(crate) fn insert(&self, row: T) -> u64 {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        write(&self.rows).insert(id, row);
        id
    }

    /// The id of the row that `same` recognises, or of `row`, added under a new id.
    pub(crate) fn find_or_insert(&self, same: impl Fn(&T) -> bool, row: T) -> u64 {
        let mut rows = write(&self.rows);
        if let Some((&id, _)) = rows.iter().find(|(_, row)| same(row)) {
            return id;
        }
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        rows.insert(id, row);
        id
    }

    /// A copy of the row.
    pub(crate) fn get(&self, id: u64) -> Option<T> {
        read(&self.rows).get(&id).cloned()
    }

    /// Takes the row out.
    pub(crate) fn remove(&self, id: u64) -> Option<T> {
        write(&self.rows).remove(&id)
    }

    /// Puts back a row that [`remove`](Self::remove) took, because its object could not be taken away.
    pub(crate) fn put_back(&self, id: u64, row: T) {
        let before = write(&self.rows).insert(id, row);
        assert!(before.is_none(), "an id is never given twice");
    }

    /// Changes a row in place; `None` if there is none.
    pub(crate) fn update<R>(&self, id: u64, change: impl FnOnce(&mut T) -> R) -> Option<R> {
        write(&self.rows).get_mut(&id).map(change)
    }

    /// Visits every row, in no order.
    pub(crate) fn for_each(&self, visit: impl FnMut(&mut T)) {
        write(&self.rows).values_mut().for_each(visit);
    }

    /// Takes out every row that `keep` does not want.
    pub(crate) fn retain(&self, keep: impl Fn(&T) -> bool) {
        write(&self.rows).retain(|_, row| keep(row));
    }
}

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

impl<T: Copy> Ranges<T> {
    /// No ranges.
    pub(crate) const fn new() -> Self {
        Self { by_start: RwLock::new(BTreeMap::new()) }
    }

    /// Adds a range, in place of what was known about the same start.
    pub(crate) fn insert(&self, start: u64, bytes: u64, what: T) {
        write(&self.by_start).insert(start, Range { bytes, what });
    }

    /// The range that starts there.
    pub(crate) fn get(&self, start: u64) -> Option<Range<T>> {
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

impl<T: Copy> HeldRanges<'_, T> {
    /// The start and the range that `[address, address + bytes)` lies in, all of it.
    pub(crate) fn containing(&self, address: u64, bytes: u64) -> Option<(u64, Range<T>)> {
        let (&start, range) = self.0.range(..=address).next_back()?;
        let end = address.checked_add(bytes)?;
        (address - start < range.bytes && end - start <= range.bytes).then_some((start, *range))
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
    use super::*;

    #[test]
    fn an_id_is_never_given_twice() {
        let table = Table::new();
        let first = table.insert('a');
        assert_eq!(table.remove(first), Some('a'));
        let second = table.insert('b');
        assert_ne!(first, second);
        assert_eq!((table.get(first), table.get(second)), (None, Some('b')));
        table.retain(|_| false);
        assert!(table.insert('c') > second);
    }

    #[test]
    fn what_is_known_already_keeps_its_id() {
        let table = Table::new();
        let id = table.find_or_insert(|&row| row == 7, 7);
        assert_eq!(table.find_or_insert(|&row| row == 7, 7), id);
        assert_ne!(table.find_or_insert(|&row| row == 8, 8), id);
    }

    #[test]
    fn a_row_that_was_put_back_keeps_its_id() {
        let table = Table::new();
        let id = table.insert('a');
        let row = table.remove(id).expect("it is there");
        table.put_back(id, row);
        assert_eq!(table.update(id, |row| std::mem::replace(row, 'z')), Some('a'));
        assert_eq!(table.get(id), Some('z'));
    }

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
