//! What the table of pages knows of every heap, so that a request for pages looks only at heaps that were used since
//! the last one, and at those with free pages: heaps without any cost nothing, however many there are.

use super::super::heap::Heap;
use super::super::ids::{HeapId, RangeId};
use super::PageTable;
use super::takes::Takes;
use crate::memory::{MemPoolId, SegmentKind};

/// After this many requests that needed pages, a heap that was not used meanwhile is retired, if nothing is allocated
/// in it.
const REQUESTS_UNTIL_IDLE: u64 = 32;

/// How often a heap needs a page again after its own was taken, before it gets one of its own.
const TIMES_TAKEN: u32 = 4;

/// What the table knows of a heap.
#[derive(Debug, Default)]
pub(super) struct HeapPages {
    pub(super) ranges: Vec<RangeId>,
    pub(super) takes: Takes,
    /// Its pool; set before it gets pages.
    pub(super) pool: MemPoolId,
    /// What was free beside large blocks, in pages that those have parts of.
    bytes_in_parts: u64,
    /// When it was used last, in requests for pages; `None` if it may be retired.
    used: Option<u64>,
    /// Whether another heap took a page since this one needed one, and how often this one then needed one again.
    was_taken_from: bool,
    times_taken: u32,
    /// How many pages had been released when it got a page of its own.
    own_since: Option<u64>,
}

impl PageTable {
    pub(super) fn heap(&self, heap: HeapId) -> Option<&HeapPages> {
        self.heaps.get(heap.index())
    }

    pub(super) fn heap_mut(&mut self, heap: HeapId) -> &mut HeapPages {
        if self.heaps.len() <= heap.index() {
            self.heaps.resize_with(heap.index() + 1, HeapPages::default);
        }
        &mut self.heaps[heap.index()]
    }

    /// Says whose a heap is; before it gets pages.
    pub(in crate::memory::paged) fn set_pool(&mut self, heap: HeapId, pool: MemPoolId) {
        self.heap_mut(heap).pool = pool;
    }

    /// Pages of a heap were taken, or it got some: it is to be looked at.
    pub(in crate::memory::paged) fn note_changed(&mut self, heap: HeapId) {
        if self.changed.last() != Some(&heap) {
            self.changed.push(heap);
        }
    }

    pub(in crate::memory::paged) fn take_changed(&mut self) -> Vec<HeapId> {
        std::mem::take(&mut self.changed)
    }

    /// Heaps with pages that are free as a whole.
    pub(in crate::memory::paged) fn heaps_with_free_pages(&self) -> impl Iterator<Item = HeapId> {
        self.with_free_pages.iter().copied()
    }

    /// What is free beside large blocks.
    pub(in crate::memory::paged) fn bytes_in_parts(&self) -> u64 {
        self.bytes_in_parts
    }

    /// A request needs pages.
    pub(in crate::memory::paged) fn begin_request(&mut self) {
        self.requests += 1;
    }

    /// Looks at what is free in a heap.
    pub(in crate::memory::paged) fn look_at(&mut self, number: HeapId, heap: &Heap) {
        let (bytes, has_pages) = (self.bytes_in_parts_of(heap), self.has_free_pages(heap));
        let known = self.heap_mut(number);
        let before = std::mem::replace(&mut known.bytes_in_parts, bytes);
        self.bytes_in_parts = self.bytes_in_parts - before + bytes;
        if has_pages {
            self.with_free_pages.insert(number);
        } else {
            self.with_free_pages.remove(&number);
        }
    }

    /// Something was allocated or freed in a heap.
    pub(in crate::memory::paged) fn note_used(&mut self, heap: HeapId) {
        let now = self.requests;
        if self.heap_mut(heap).used.replace(now) != Some(now) {
            self.uses.push_back((now, heap));
        }
    }

    /// When a heap was used last, in requests; `None` if that is long ago.
    pub(in crate::memory::paged) fn last_use(&self, heap: HeapId) -> Option<u64> {
        self.heap(heap).and_then(|heap| heap.used)
    }

    /// A heap that was not used for long. The caller retires it, or [notes](Self::note_used) a use.
    pub(in crate::memory::paged) fn pop_unused(&mut self) -> Option<HeapId> {
        while let Some(&(used, heap)) =
            self.uses.front().filter(|(used, _)| used + REQUESTS_UNTIL_IDLE <= self.requests)
        {
            self.uses.pop_front();
            if self.heap_mut(heap).used.take_if(|last| *last == used).is_some() {
                return Some(heap);
            }
        }
        None
    }

    /// Another heap takes pages of this one.
    pub(in crate::memory::paged) fn note_taken(&mut self, heap: HeapId) {
        self.heap_mut(heap).was_taken_from = true;
    }

    /// A heap needs one page. Returns whether it gets a new one rather than one of another heap: heaps that take the
    /// same page from each other would go on for ever, each time with an event, a mapping, and the locks of all heaps.
    /// It gets no second one before memory was given back to the driver.
    pub(in crate::memory::paged) fn needs_own_page(&mut self, heap: HeapId) -> bool {
        let released = self.released;
        let heap = self.heap_mut(heap);
        heap.times_taken += u32::from(std::mem::take(&mut heap.was_taken_from));
        heap.times_taken >= TIMES_TAKEN && heap.own_since != Some(released)
    }

    /// The heap got one.
    pub(in crate::memory::paged) fn note_own_page(&mut self, heap: HeapId) {
        self.heap_mut(heap).own_since = Some(self.released);
    }

    /// The bytes of addresses that a heap has for a kind of blocks.
    pub(in crate::memory::paged) fn bytes_of_ranges(&self, heap: HeapId, kind: SegmentKind) -> u64 {
        self.ranges_of(heap).filter(|(_, range)| range.kind == kind).map(|(_, range)| range.bytes).sum()
    }
}
