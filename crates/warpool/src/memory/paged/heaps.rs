//! The heaps of a device, by number: reading one takes no lock, and their places never move.

use super::heap::Heap;
use super::spin_lock::SpinLock;
use super::sync::{AtomicU32, OnceLock, Ordering};
use crate::memory::paged::ids::HeapId;

const CHUNK: usize = 256;
const CHUNKS: usize = 4096;

type Chunk = Box<[OnceLock<SpinLock<Heap>>]>;

pub(super) struct Heaps {
    chunks: Box<[OnceLock<Chunk>]>,
    count: AtomicU32,
}

impl Heaps {
    pub(super) fn new() -> Self {
        Self { chunks: (0..CHUNKS).map(|_| OnceLock::new()).collect(), count: AtomicU32::new(0) }
    }

    /// Adds a heap. To be called by one thread at a time.
    pub(super) fn push(&self, heap: Heap) -> HeapId {
        let number = self.count.load(Ordering::Relaxed);
        let (chunk, at) = (number as usize / CHUNK, number as usize % CHUNK);
        let chunk = self.chunks.get(chunk).expect("fewer than a million streams and pools at once");
        let chunk = chunk.get_or_init(|| (0..CHUNK).map(|_| OnceLock::new()).collect());
        assert!(chunk[at].set(SpinLock::new(heap)).is_ok(), "heaps are added by one thread at a time");
        self.count.store(number + 1, Ordering::Release);
        HeapId(number)
    }

    /// A heap that exists.
    #[inline]
    pub(super) fn get(&self, number: HeapId) -> &SpinLock<Heap> {
        let chunk = self.chunks[number.index() / CHUNK].get().expect("a heap that exists");
        chunk[number.index() % CHUNK].get().expect("a heap that exists")
    }

    pub(super) fn try_get(&self, number: HeapId) -> Option<&SpinLock<Heap>> {
        self.chunks.get(number.index() / CHUNK)?.get()?[number.index() % CHUNK].get()
    }

    pub(super) fn len(&self) -> u32 {
        self.count.load(Ordering::Acquire)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (HeapId, &SpinLock<Heap>)> {
        (0..self.len()).map(HeapId).map(|number| (number, self.get(number)))
    }
}
