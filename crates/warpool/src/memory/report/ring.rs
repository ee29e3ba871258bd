//! The newest entries of a history, in a ring of fixed size. Most entries have no call stack and no text, so these are
//! boxed: an entry is smaller than a cache line, and recording it writes nothing else. Most frees are
//! completed at once: their two entries are stored as one.

use super::Action;
use super::entry::{HistoryEntry, Stack};
use super::texts::EntryTexts;
use crate::memory::MemPoolId;

/// An entry as the ring stores it.
#[derive(Debug)]
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

#[derive(Debug, Default)]
pub(super) struct Ring {
    entries: Vec<StoredEntry>,
    /// Where the next entry goes: to the end until the ring is full, then in place of the oldest entry.
    next: usize,
    entries_max: usize,
}

impl Ring {
    /// Sets how many entries are kept, at least 1. The newest of the existing entries are kept.
    pub(super) fn resize(&mut self, entries_max: usize) {
        if self.next < self.entries.len() {
            self.entries.rotate_left(self.next);
        }
        self.entries_max = entries_max.max(1);
        let excess = self.entries.len().saturating_sub(self.entries_max);
        self.entries.drain(..excess);
        self.next = if self.entries.len() < self.entries_max { self.entries.len() } else { 0 };
    }

    #[inline(always)]
    pub(super) fn push(&mut self, entry: StoredEntry) {
        match self.entries.get_mut(self.next) {
            Some(oldest) => *oldest = entry,
            None => self.entries.push(entry),
        }
        self.next += 1;
        if self.next == self.entries_max {
            self.next = 0;
        }
    }

    /// The entries, oldest first.
    pub(super) fn iter(&self) -> impl Iterator<Item = HistoryEntry> {
        let (newest, oldest) = self.entries.split_at(self.next.min(self.entries.len()));
        let count = self.entries.len() + self.entries.iter().filter(|entry| entry.completes).count();
        let excess = count.saturating_sub(self.entries_max);
        oldest.iter().chain(newest).flat_map(StoredEntry::to_entries).skip(excess)
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
        let found: Vec<_> = ring.iter().map(|entry| (entry.addr, entry.action)).collect();
        assert_eq!(found, [(1, Action::FreeCompleted), (2, Action::FreeRequested), (2, Action::FreeCompleted)]);
    }

    fn addrs(ring: &Ring) -> Vec<u64> {
        ring.iter().map(|entry| entry.addr).collect()
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
