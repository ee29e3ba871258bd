//! Heaps that take the same page from each other, again and again.
//!
//! As long as some heap has a free page, memory does not grow. So threads that allocate and free one block each, on
//! streams of their own, may have fewer pages than they are, and then take them from each other for ever: each time
//! with an event, a mapping, and the locks of all heaps. A heap to which that happens several times gets a page of its
//! own. It gets no second one before memory was given back to the driver, so what this costs is a page for each heap.

use rustc_hash::FxHashMap;

/// How often a heap needs a page again after its own was taken, before it gets one of its own.
const TIMES: u32 = 4;

#[derive(Debug, Default)]
pub(super) struct Contention {
    by_heap: FxHashMap<u32, Contended>,
}

#[derive(Debug, Default)]
struct Contended {
    /// Whether another heap took a page since this one needed one.
    was_taken_from: bool,
    /// How often this one then needed one again.
    times: u32,
    has_own: bool,
}

impl Contention {
    /// Another heap takes pages of this one.
    pub(super) fn note_taken(&mut self, heap: u32) {
        self.by_heap.entry(heap).or_default().was_taken_from = true;
    }

    /// The heap needs a page. Returns whether it should get a new one rather than one of another heap.
    pub(super) fn note_needed(&mut self, heap: u32) -> bool {
        let Some(contended) = self.by_heap.get_mut(&heap) else { return false };
        contended.times += u32::from(std::mem::take(&mut contended.was_taken_from));
        contended.times >= TIMES && !contended.has_own
    }

    /// The heap got one.
    pub(super) fn note_own(&mut self, heap: u32) {
        self.by_heap.entry(heap).or_default().has_own = true;
    }

    /// Memory goes back to the driver: whichever heap it was of.
    pub(super) fn forget(&mut self) {
        self.by_heap.clear();
    }
}
