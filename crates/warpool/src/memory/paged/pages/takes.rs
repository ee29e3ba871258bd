//! Which takes of pages their streams have passed: old mappings may be undone then.

use std::collections::VecDeque;
use std::sync::Arc;

use super::{PageId, PageTable, PassedTakes, Slot};
use crate::PooledEvent;

/// Which takes of pages from a heap its stream has passed: a mapping that a page was taken from may be undone then.
/// Takes are numbered; those up to an event have the same number.
#[derive(Debug)]
pub(super) struct Takes {
    /// The number of takes since the last event.
    pub(super) current: u64,
    /// Events, with the numbers of the takes before them.
    recorded: VecDeque<(u64, Vec<Arc<PooledEvent>>)>,
    /// The highest number that has passed.
    passed: u64,
    /// Whether there were takes since the last event.
    pub(super) are_to_record: bool,
}

impl Default for Takes {
    fn default() -> Self {
        Self { current: 1, recorded: VecDeque::new(), passed: 0, are_to_record: false }
    }
}

impl Takes {
    /// All takes so far have the current number.
    fn begin_next(&mut self) {
        self.current += 1;
        self.are_to_record = false;
    }
}

impl PageTable {
    /// Events were recorded after all work that used the pages taken from a heap so far.
    pub(in crate::memory::paged) fn takes_recorded(&mut self, heap: u32, events: Vec<Arc<PooledEvent>>) {
        let takes = self.takes.entry(heap).or_default();
        takes.recorded.push_back((takes.current, events));
        takes.begin_next();
    }

    /// Whether pages were taken from a heap since an event was last recorded after the work that used them.
    pub(in crate::memory::paged) fn has_takes_to_record(&self, heap: u32) -> bool {
        self.takes.get(&heap).is_some_and(|takes| takes.are_to_record)
    }

    /// How many groups of events after takes from a heap have not passed.
    pub(in crate::memory::paged) fn takes_outstanding(&self, heap: u32) -> usize {
        self.takes.get(&heap).map_or(0, |takes| takes.recorded.len())
    }

    /// Forgets the takes from heaps in which nothing is mapped any more, with their events.
    pub(in crate::memory::paged) fn forget_takes(&mut self) {
        let heaps: Vec<u32> = self.takes.keys().copied().filter(|&heap| self.is_unmapped(heap)).collect();
        for heap in heaps {
            self.takes.remove(&heap);
        }
    }

    /// All work that used the pages taken from a heap so far is known to be over.
    pub(in crate::memory::paged) fn takes_passed(&mut self, heap: u32) {
        let takes = self.takes.entry(heap).or_default();
        takes.recorded.clear();
        takes.passed = takes.current;
        takes.begin_next();
    }

    /// Whether an event was recorded after the work that used a page where it was taken from.
    pub(in crate::memory::paged) fn is_take_recorded(&self, page: PageId, slot: Slot) -> bool {
        let takes = self.takes.get(&self.range(slot.range).heap);
        let is_mapped = self.page(page).is_mapped_at(slot);
        takes.is_some_and(|takes| is_mapped && self.slot(slot).was_taken_before(takes.current))
    }

    /// Reads how far the stream of a heap has come. `has_passed` asks the driver.
    pub(in crate::memory::paged) fn poll_takes<E>(
        &mut self,
        heap: u32,
        has_passed: impl Fn(&PooledEvent) -> Result<bool, E>,
    ) -> Result<(), E> {
        let Some(takes) = self.takes.get_mut(&heap) else { return Ok(()) };
        while let Some((number, events)) = takes.recorded.front() {
            for event in events {
                if !has_passed(event)? {
                    return Ok(());
                }
            }
            takes.passed = *number;
            takes.recorded.pop_front();
        }
        Ok(())
    }

    /// Whether a mapping that its page was taken from may be undone: no work uses it any more.
    pub(in crate::memory::paged) fn has_passed(&self, page: PageId, slot: Slot) -> bool {
        self.page(page).is_mapped_at(slot) && self.passed_takes(slot.range).has_passed(&self.slot(slot))
    }

    /// Which takes from the heap of a range its stream has passed.
    pub(in crate::memory::paged) fn passed_takes(&self, range: u32) -> PassedTakes {
        PassedTakes(self.takes.get(&self.range(range).heap).map_or(0, |takes| takes.passed))
    }

    /// Whether pages were ever taken from a heap: they may still be mapped there.
    pub(in crate::memory::paged) fn was_taken_from(&self, heap: u32) -> bool {
        self.takes.contains_key(&heap)
    }
}
