//! The heap that a thread used last: mostly the one that it uses next. Finding it takes no lock and no hash.

#![expect(unsafe_code, reason = "a heap is found by its address")]

use std::cell::Cell;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

use warpool_driver::StreamId;

use super::heap::Heap;
use super::heaps::Heaps;
use super::spin_lock::SpinLock;
use crate::memory::MemPoolId;

/// Tells a device of an allocator from all others that this process has had.
#[derive(Debug)]
pub(super) struct DeviceKey(u64);

#[derive(Clone, Copy)]
struct LastHeap {
    /// The device's key; 0 is none.
    device: u64,
    stream: StreamId,
    pool: MemPoolId,
    number: u32,
    cell: *const SpinLock<Heap>,
}

thread_local! {
    static LAST: Cell<LastHeap> = const {
        let (stream, pool) = (StreamId(0), MemPoolId::DEFAULT);
        Cell::new(LastHeap { device: 0, stream, pool, number: 0, cell: ptr::null() })
    };
}

impl DeviceKey {
    pub(super) fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }

    /// The heap that the thread used last, if it is that of this stream and pool. `heaps` are those of the device with
    /// this key.
    #[inline]
    pub(super) fn last_of<'a>(
        &self,
        heaps: &'a Heaps,
        stream: StreamId,
        pool: MemPoolId,
    ) -> Option<(u32, &'a SpinLock<Heap>)> {
        let last = LAST.get();
        let matches = last.device == self.0 && last.stream == stream && last.pool == pool;
        matches.then(|| (last.number, Self::cell(heaps, last)))
    }

    /// The heap with this number, if it is the one that the thread used last.
    #[inline]
    pub(super) fn last_numbered<'a>(&self, heaps: &'a Heaps, number: u32) -> Option<&'a SpinLock<Heap>> {
        let last = LAST.get();
        (last.device == self.0 && last.number == number).then(|| Self::cell(heaps, last))
    }

    #[inline]
    fn cell(_: &Heaps, last: LastHeap) -> &SpinLock<Heap> {
        // SAFETY: it was noted for the device with this key, of which there is one. That device is alive, since its
        // heaps are borrowed, and heaps neither move nor end before it.
        unsafe { &*last.cell }
    }

    /// Notes that the thread goes on with a heap. Returns the one before, if it was another of the same device.
    pub(super) fn note(&self, heaps: &Heaps, number: u32, stream: StreamId, pool: MemPoolId) -> Option<u32> {
        let next = LastHeap { device: self.0, stream, pool, number, cell: heaps.get(number) };
        let last = LAST.replace(next);
        (last.device == self.0 && last.number != number).then_some(last.number)
    }

    /// Forgets the heap that the thread used last. Returns it, if it was one of the device.
    pub(super) fn forget(&self) -> Option<u32> {
        let last = LAST.get();
        LAST.set(LastHeap { device: 0, ..last });
        (last.device == self.0).then_some(last.number)
    }
}
