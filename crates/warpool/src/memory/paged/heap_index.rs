//! Which heaps have free memory, and which were not used for long. Looking for pages visits the former alone, so heaps
//! without any cost nothing, however many there are.

use std::collections::{BTreeMap, VecDeque};

use rustc_hash::FxHashMap;

/// After this many requests that needed pages, a heap that was not used meanwhile is retired, if nothing is allocated
/// in it.
const REQUESTS_UNTIL_IDLE: u64 = 32;

/// The free memory of a heap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct FreeMemory {
    /// Whether a page is free as a whole.
    pub(super) has_pages: bool,
    /// Beside large blocks, in pages that those have parts of.
    pub(super) bytes_in_parts: u64,
    /// Whether it is a heap of the default pool.
    pub(super) is_default: bool,
}

#[derive(Debug, Default)]
pub(super) struct HeapIndex {
    /// Heaps with free memory, as of the last look at each.
    free: BTreeMap<u32, FreeMemory>,
    /// In heaps of the default pool.
    bytes_in_parts: u64,
    /// Heaps of which pages were taken, or that got some, since.
    changed: Vec<u32>,
    /// How many requests needed pages.
    requests: u64,
    /// When each heap that is not idle was used last, in requests.
    used: FxHashMap<u32, u64>,
    /// Uses, the earliest first.
    uses: VecDeque<(u64, u32)>,
}

impl HeapIndex {
    /// Pages of a heap were taken, or it got some.
    pub(super) fn note_changed(&mut self, heap: u32) {
        if self.changed.last() != Some(&heap) {
            self.changed.push(heap);
        }
    }

    pub(super) fn take_changed(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.changed)
    }

    /// A heap was looked at.
    pub(super) fn set(&mut self, heap: u32, free: FreeMemory) {
        let parts = |free: FreeMemory| if free.is_default { free.bytes_in_parts } else { 0 };
        let before = if !free.has_pages && free.bytes_in_parts == 0 {
            self.free.remove(&heap)
        } else {
            self.free.insert(heap, free)
        };
        self.bytes_in_parts = self.bytes_in_parts - before.map_or(0, parts) + parts(free);
    }

    /// Heaps with pages that are free as a whole.
    pub(super) fn with_pages(&self) -> impl Iterator<Item = u32> {
        self.free.iter().filter(|(_, free)| free.has_pages).map(|(&heap, _)| heap)
    }

    /// What is free beside large blocks in heaps of the default pool.
    pub(super) fn bytes_in_parts(&self) -> u64 {
        self.bytes_in_parts
    }

    /// The same by heap, in those of other pools.
    pub(super) fn parts_of_private(&self) -> impl Iterator<Item = (u32, u64)> {
        let free = self.free.iter().filter(|(_, free)| !free.is_default && free.bytes_in_parts > 0);
        free.map(|(&heap, free)| (heap, free.bytes_in_parts))
    }

    /// A request needs pages.
    pub(super) fn begin_request(&mut self) {
        self.requests += 1;
    }

    /// Something was allocated or freed in a heap.
    pub(super) fn note_used(&mut self, heap: u32) {
        if self.used.insert(heap, self.requests) != Some(self.requests) {
            self.uses.push_back((self.requests, heap));
        }
    }

    /// A heap that was not used for long. The caller retires it, or [notes](Self::note_used) a use.
    pub(super) fn pop_unused(&mut self) -> Option<u32> {
        while let Some(&(used, heap)) = self.uses.front() {
            if used + REQUESTS_UNTIL_IDLE > self.requests {
                return None;
            }
            self.uses.pop_front();
            if self.used.get(&heap) == Some(&used) {
                self.used.remove(&heap);
                return Some(heap);
            }
        }
        None
    }
}
