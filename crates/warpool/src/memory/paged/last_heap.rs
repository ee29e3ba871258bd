//! The heap that a thread used last: mostly the one that it uses next. Finding it takes no lock and no hash.

#![expect(unsafe_code, reason = "a heap is found by its address")]

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

use warpool_driver::{DeviceId, StreamId};

use super::heap::Heap;
use super::heaps::Heaps;
use super::ids::HeapId;
use crate::memory::MemPoolId;
use crate::sync::spin_lock::SpinLock;

/// Tells a device of an allocator from all others that this process has had.
#[derive(Debug)]
pub(super) struct DeviceKey {
    key: u64,
    /// Its index in its allocator.
    index: u32,
}

#[derive(Clone, Copy)]
struct LastHeap {
    /// The device's key; 0 is none.
    device: u64,
    stream: StreamId,
    pool: MemPoolId,
    /// The device's index in its allocator.
    index: u32,
    number: HeapId,
    /// Not a `NonNull`, whose niche every access to the thread's variable would look at.
    cell: *const SpinLock<Heap>,
}

/// The index, in its allocator, of the device that the thread used last; of whichever allocator that was.
#[inline]
pub(super) fn last_device() -> usize {
    LAST.get().index as usize
}

thread_local! {
    static LAST: Cell<LastHeap> = const {
        let (stream, pool) = (StreamId(0), MemPoolId::DEFAULT);
        Cell::new(LastHeap { device: 0, stream, pool, index: 0, number: HeapId(0), cell: std::ptr::null() })
    };
}

impl DeviceKey {
    pub(super) fn new(device: DeviceId) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self { key: NEXT.fetch_add(1, Ordering::Relaxed), index: device.0 }
    }

    /// The heap that the thread used last, if it is that of this stream and pool. `heaps` are those of the device with
    /// this key.
    #[inline]
    pub(super) fn last_of<'a>(
        &self,
        heaps: &'a Heaps,
        stream: StreamId,
        pool: MemPoolId,
    ) -> Option<(HeapId, &'a SpinLock<Heap>)> {
        let last = LAST.get();
        let matches = last.device == self.key && last.stream == stream && last.pool == pool;
        matches.then(|| (last.number, Self::cell(heaps, last)))
    }

    /// The heap that the thread used last, if it is one of the device.
    #[inline]
    pub(super) fn last<'a>(&self, heaps: &'a Heaps) -> Option<(HeapId, &'a SpinLock<Heap>)> {
        let last = LAST.get();
        (last.device == self.key).then(|| (last.number, Self::cell(heaps, last)))
    }

    /// The heap with this number, if it is the one that the thread used last.
    #[inline]
    pub(super) fn last_numbered<'a>(&self, heaps: &'a Heaps, number: HeapId) -> Option<&'a SpinLock<Heap>> {
        let last = LAST.get();
        (last.device == self.key && last.number == number).then(|| Self::cell(heaps, last))
    }

    #[inline]
    fn cell(_: &Heaps, last: LastHeap) -> &SpinLock<Heap> {
        // SAFETY: it was noted with the key that it is asked for, and only heaps are noted so.
        unsafe { std::hint::assert_unchecked(!last.cell.is_null()) };
        // SAFETY: it was noted for the device with this key, of which there is one. That device is alive, since its
        // heaps are borrowed, and heaps neither move nor end before it.
        unsafe { &*last.cell }
    }

    /// Notes that the thread goes on with a heap. Returns the one before, if it was another of the same device.
    pub(super) fn note(&self, heaps: &Heaps, number: HeapId, stream: StreamId, pool: MemPoolId) -> Option<HeapId> {
        let cell = std::ptr::from_ref(heaps.get(number));
        let next = LastHeap { device: self.key, stream, pool, index: self.index, number, cell };
        let last = LAST.replace(next);
        (last.device == self.key && last.number != number).then_some(last.number)
    }

    /// Forgets the heap that the thread used last. Returns it, if it was one of the device.
    pub(super) fn forget(&self) -> Option<HeapId> {
        let last = LAST.get();
        LAST.set(LastHeap { device: 0, ..last });
        (last.device == self.key).then_some(last.number)
    }
}
