//! Which takes of pages their streams have passed: old mappings may be undone then.

use std::collections::VecDeque;
use std::sync::Arc;

use super::super::ids::HeapId;
use super::{PageId, PageTable, RangeId, Slot};
use crate::PooledEvent;

/// Which takes of pages from a heap its stream has passed: a mapping that a page was taken from may be undone then.
/// Takes are numbered; those up to an event have the same number.
#[derive(Debug)]
pub(super) struct Takes {
    /// The number of takes since the last event.
    current: u64,
    /// Events, with the numbers of the takes before them.
    recorded: VecDeque<(u64, Vec<Arc<PooledEvent>>)>,
    /// The highest number that has passed.
    passed: u64,
    /// Whether there were takes since the last event.
    are_to_record: bool,
    /// Whether there were any: pages may still be mapped where they were.
    were_any: bool,
}

impl Default for Takes {
    fn default() -> Self {
        Self { current: 1, recorded: VecDeque::new(), passed: 0, are_to_record: false, were_any: false }
    }
}

impl Takes {
    /// A page is taken. Returns the number of the take.
    pub(super) fn take(&mut self) -> u64 {
        (self.are_to_record, self.were_any) = (true, true);
        self.current
    }

    /// All takes so far have the current number.
    fn begin_next(&mut self) {
        self.current += 1;
        self.are_to_record = false;
    }
}

impl PageTable {
    fn takes(&self, heap: HeapId) -> Option<&Takes> {
        self.heap(heap).map(|heap| &heap.takes)
    }

    /// Events were recorded after all work that used the pages taken from a heap so far.
    pub(in crate::memory::paged) fn takes_recorded(&mut self, heap: HeapId, events: Vec<Arc<PooledEvent>>) {
        let takes = &mut self.heap_mut(heap).takes;
        takes.recorded.push_back((takes.current, events));
        takes.begin_next();
    }

    /// Whether pages were taken from a heap since an event was last recorded after the work that used them, and how
    /// many groups of events after earlier takes have not passed.
    pub(in crate::memory::paged) fn takes_to_record(&self, heap: HeapId) -> Option<usize> {
        self.takes(heap).filter(|takes| takes.are_to_record).map(|takes| takes.recorded.len())
    }

    /// Forgets the takes from heaps in which nothing is mapped any more, with their events.
    pub(in crate::memory::paged) fn forget_takes(&mut self) {
        for heap in (0..self.heaps.len()).map(HeapId::at) {
            if self.is_unmapped(heap) {
                self.heap_mut(heap).takes = Takes::default();
            }
        }
    }

    /// All work that used the pages taken from a heap so far is known to be over.
    pub(in crate::memory::paged) fn takes_passed(&mut self, heap: HeapId) {
        let takes = &mut self.heap_mut(heap).takes;
        takes.recorded.clear();
        takes.passed = takes.current;
        takes.begin_next();
    }

    /// Whether an event was recorded after the work that used a page where it was taken from.
    pub(in crate::memory::paged) fn is_take_recorded(&self, page: PageId, slot: Slot) -> bool {
        let takes = self.takes(self.range(slot.range).heap);
        let is_mapped = self.page(page).is_mapped_at(slot);
        takes.is_some_and(|takes| is_mapped && self.slot(slot).taken < takes.current)
    }

    /// Reads how far the stream of a heap has come. `has_passed` asks the driver.
    pub(in crate::memory::paged) fn poll_takes<E>(
        &mut self,
        heap: HeapId,
        has_passed: impl Fn(&PooledEvent) -> Result<bool, E>,
    ) -> Result<(), E> {
        let takes = &mut self.heap_mut(heap).takes;
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
        self.page(page).is_mapped_at(slot) && self.slot(slot).has_passed(self.passed_takes(slot.range))
    }

    /// The highest number of a take from the heap of a range that its stream has passed.
    pub(in crate::memory::paged) fn passed_takes(&self, range: RangeId) -> u64 {
        self.takes(self.range(range).heap).map_or(0, |takes| takes.passed)
    }

    /// Whether pages were ever taken from a heap: they may still be mapped there.
    pub(in crate::memory::paged) fn was_taken_from(&self, heap: HeapId) -> bool {
        self.takes(heap).is_some_and(|takes| takes.were_any)
    }
}
