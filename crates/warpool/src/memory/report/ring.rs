//! The newest entries of a history, in a ring of fixed size. Many entries have no call stack and no text, so these are
//! boxed: an entry is smaller than a cache line, and recording it writes nothing else. Most frees are
//! completed at once: their two entries are stored as one.

use std::collections::VecDeque;
use std::sync::Arc;

use super::Action;
use super::entry::{HistoryEntry, Stack};
use super::texts::EntryTexts;
use crate::memory::MemPoolId;

/// An entry as the ring stores it.
#[derive(Clone, Debug)]
pub(super) struct StoredEntry {
    pub(super) addr: u64,
    pub(super) size: u64,
    pub(super) stream: u64,
    pub(super) time_us: i64,
    pub(super) pool: MemPoolId,
    pub(super) extras: Option<Box<Extras>>,
    pub(super) action: Action,
    /// Whether it is a free that was completed at once. It then represents the completion entry too, which has the same
    /// data.
    pub(super) completes: bool,
}

/// Data that few entries have.
#[derive(Clone, Debug)]
pub(super) struct Extras {
    pub(super) stack: Option<Stack>,
    pub(super) texts: EntryTexts,
}

impl StoredEntry {
    /// The entries that it represents, oldest first.
    fn to_entries(&self) -> impl Iterator<Item = HistoryEntry> {
        let completed = || HistoryEntry { action: Action::FreeCompleted, ..self.to_entry() };
        std::iter::once(self.to_entry()).chain(self.completes.then(completed))
    }

    /// The entry as trackers see it.
    pub(super) fn to_entry(&self) -> HistoryEntry {
        let extras = self.extras.as_deref();
        HistoryEntry {
            action: self.action,
            addr: self.addr,
            size: self.size,
            stream: self.stream,
            time_us: self.time_us,
            pool: self.pool,
            stack: extras.and_then(|extras| extras.stack.clone()),
            user_metadata: extras.and_then(|extras| extras.texts.user_metadata.clone()),
            compile_context: extras.and_then(|extras| extras.texts.compile_context.clone()),
        }
    }
}

/// Entries of a part of the ring. Small rings have smaller parts.
const PART: usize = 1024;

/// The entries, in parts. A full part does not change any more, so that a reader shares it instead of copying it: what
/// is done under a lock for a reader does not grow with the entries, only with the number of parts.
#[derive(Debug, Default)]
pub(super) struct Ring {
    /// The parts that are full, oldest first.
    full: VecDeque<Arc<Vec<StoredEntry>>>,
    /// The newest entries.
    newest: Vec<StoredEntry>,
    /// Entries that have left the ring. Each new entry drops one of them, so that no entry pays for a whole part.
    stale: Vec<StoredEntry>,
    entries_max: usize,
    part: usize,
}

impl Ring {
    /// Sets how many entries are kept, at least 1. The newest of the existing entries are kept.
    pub(super) fn resize(&mut self, entries_max: usize) {
        let before = std::mem::take(self);
        self.entries_max = entries_max.max(1);
        self.part = self.entries_max.div_ceil(8).min(PART);
        let count = before.full.iter().map(|part| part.len()).sum::<usize>() + before.newest.len();
        let entries = before.full.iter().flat_map(|part| part.iter()).chain(&before.newest);
        for entry in entries.skip(count.saturating_sub(self.entries_max)) {
            self.push(entry.clone());
        }
    }

    #[inline(always)]
    pub(super) fn push(&mut self, entry: StoredEntry) {
        self.newest.push(entry);
        drop(self.stale.pop());
        if self.newest.len() >= self.part {
            self.begin_part();
        }
    }

    #[inline(never)]
    fn begin_part(&mut self) {
        // Empty by now: each entry of the new part dropped one.
        let mut next = std::mem::take(&mut self.stale);
        next.reserve_exact(self.part);
        self.full.push_back(Arc::new(std::mem::replace(&mut self.newest, next)));
        if (self.full.len() - 1) * self.part >= self.entries_max {
            // A part that a reader still has is dropped by that reader.
            self.stale = self.full.pop_front().and_then(Arc::into_inner).unwrap_or_default();
        }
    }

    /// The entries as they are now, for a reader without the lock.
    pub(super) fn share(&self) -> SharedRing {
        let full = self.full.iter().map(Arc::clone).collect();
        SharedRing { full, newest: self.newest.clone(), entries_max: self.entries_max }
    }
}

/// The entries of a ring at one moment.
#[derive(Debug, Default)]
pub(super) struct SharedRing {
    full: Vec<Arc<Vec<StoredEntry>>>,
    newest: Vec<StoredEntry>,
    entries_max: usize,
}

impl SharedRing {
    /// The entries, oldest first.
    pub(super) fn iter(&self) -> impl Iterator<Item = HistoryEntry> {
        let stored = || self.full.iter().flat_map(|part| part.iter()).chain(&self.newest);
        let count = stored().map(|entry| if entry.completes { 2 } else { 1 }).sum::<usize>();
        stored().flat_map(StoredEntry::to_entries).skip(count.saturating_sub(self.entries_max))
    }

    /// How many parts and entries were copied for it.
    #[cfg(test)]
    pub(super) fn copied(&self) -> usize {
        self.full.len() + self.newest.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(addr: u64) -> StoredEntry {
        let (stream, time_us) = (0, 0);
        let action = Action::Alloc;
        let pool = MemPoolId::DEFAULT;
        StoredEntry { addr, size: 1, stream, time_us, pool, extras: None, action, completes: false }
    }

    #[test]
    fn a_free_that_was_completed_at_once_is_two_entries() {
        let mut ring = Ring::default();
        ring.resize(3);
        let free = |addr| StoredEntry { action: Action::FreeRequested, completes: true, ..entry(addr) };
        ring.push(entry(1));
        ring.push(free(1));
        ring.push(free(2));
        let found: Vec<_> = ring.share().iter().map(|entry| (entry.addr, entry.action)).collect();
        assert_eq!(found, [(1, Action::FreeCompleted), (2, Action::FreeRequested), (2, Action::FreeCompleted)]);
    }

    fn addrs(ring: &Ring) -> Vec<u64> {
        ring.share().iter().map(|entry| entry.addr).collect()
    }

    #[test]
    fn what_is_copied_for_a_reader_does_not_grow_with_the_entries() {
        for entries_max in [1_000_usize, 10_000, 100_000] {
            let mut ring = Ring::default();
            ring.resize(entries_max);
            for addr in 0..2 * entries_max as u64 + 500 {
                ring.push(entry(addr));
            }
            let shared = ring.share();
            let newest = 2 * entries_max as u64 + 499;
            (0..3 * PART as u64).for_each(|addr| ring.push(entry(addr)));
            assert!(shared.copied() <= 9 + entries_max / PART + PART, "{entries_max}: {}", shared.copied());
            let addrs: Vec<u64> = shared.iter().map(|entry| entry.addr).collect();
            assert_eq!((addrs.len(), addrs[0]), (entries_max, newest + 1 - entries_max as u64));
            assert_eq!(addrs.last(), Some(&newest), "later entries do not appear");
        }
    }

    #[test]
    fn no_entry_drops_more_than_one_that_has_left() {
        let dropped = |ring: &Ring| ring.full.iter().map(|part| part.len()).sum::<usize>() + ring.newest.len();
        let mut ring = Ring::default();
        ring.resize(10 * PART);
        for addr in 0..40 * PART as u64 {
            let before = dropped(&ring) + ring.stale.len();
            ring.push(entry(addr));
            let after = dropped(&ring) + ring.stale.len();
            assert!(after + 1 > before, "{before} entries became {after}");
            assert!(after <= 12 * PART, "{after} entries are kept");
        }
    }

    #[test]
    fn the_newest_entries_stay_whatever_the_size_becomes() {
        let mut ring = Ring::default();
        ring.resize(3);
        (1..=2).for_each(|addr| ring.push(entry(addr)));
        assert_eq!(addrs(&ring), [1, 2]);
        (3..=5).for_each(|addr| ring.push(entry(addr)));
        assert_eq!(addrs(&ring), [3, 4, 5]);
        ring.resize(5);
        assert_eq!(addrs(&ring), [3, 4, 5]);
        (6..=8).for_each(|addr| ring.push(entry(addr)));
        assert_eq!(addrs(&ring), [4, 5, 6, 7, 8]);
        ring.resize(2);
        assert_eq!(addrs(&ring), [7, 8]);
        ring.push(entry(9));
        assert_eq!(addrs(&ring), [8, 9]);
        ring.resize(0);
        assert_eq!(addrs(&ring), [9]);
    }

    #[test]
    fn an_entry_is_smaller_than_a_cache_line() {
        assert!(size_of::<StoredEntry>() <= 56);
    }
}
