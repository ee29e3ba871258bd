//! The heaps in which something was allocated or freed since the pages were last needed. What is known of all others is
//! still right, so taking pages costs nothing for streams that do nothing.
//!
//! A heap is listed by its first allocation or free, under its own lock; looking at it removes it from the list.

use super::ids::HeapId;
use crate::sync::spin_lock::SpinLock;

#[derive(Debug, Default)]
pub(super) struct Activity {
    heaps: SpinLock<Vec<HeapId>>,
}

impl Activity {
    /// Lists a heap, which is not listed.
    #[cold]
    #[inline(never)]
    pub(super) fn push(&self, heap: HeapId) {
        self.heaps.lock().push(heap);
    }

    /// Takes the list, in the order of numbers. To be called without a heap's lock.
    pub(super) fn take(&self) -> Vec<HeapId> {
        let mut heaps = std::mem::take(&mut *self.heaps.lock());
        heaps.sort_unstable();
        heaps
    }
}
