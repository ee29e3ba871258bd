//! Whose a heap is, and what is known of the work that used its memory last.

use std::sync::Arc;

use warpool_driver::StreamId;

use super::super::ids::HeapId;
use super::Heap;
use crate::PooledEvent;
use crate::memory::MemPoolId;
use crate::sync::spin_lock::SpinLock;

/// The stream of a heap without an owner.
const NOBODY: StreamId = StreamId(u64::MAX);

/// Whose a heap is.
#[derive(Clone, Copy, Debug)]
pub(in crate::memory::paged) struct Owner {
    pub(in crate::memory::paged) stream: StreamId,
    pub(in crate::memory::paged) stream_raw: u64,
    pub(in crate::memory::paged) pool: MemPoolId,
    /// Whether the stream lives as long as the instance.
    pub(in crate::memory::paged) is_kept: bool,
    /// Whether it is the stream's first heap. A stream that lost one before lives on.
    pub(in crate::memory::paged) is_first: bool,
}

/// What is known of the last work that used a heap's memory. `stream_tail.rs` says what for.
#[derive(Clone, Debug)]
pub(in crate::memory::paged) enum LastWork {
    Done,
    Before(Arc<PooledEvent>),
    /// No event could be recorded. Only the device can be waited for.
    Unknown,
}

/// The heaps in which something was allocated or freed since pages were last needed. What is known of all others is
/// still right, so taking pages costs nothing for streams that do nothing. A heap is listed by its first allocation or
/// free, under its own lock.
#[derive(Debug, Default)]
pub(in crate::memory::paged) struct Activity {
    heaps: SpinLock<Vec<HeapId>>,
}

impl Activity {
    /// Lists a heap, which is not listed.
    #[cold]
    #[inline(never)]
    fn push(&self, heap: HeapId) {
        self.heaps.lock().push(heap);
    }

    /// Takes the list, in the order of numbers. To be called without a heap's lock.
    pub(in crate::memory::paged) fn take(&self) -> Vec<HeapId> {
        let mut heaps = std::mem::take(&mut *self.heaps.lock());
        heaps.sort_unstable();
        heaps
    }
}

impl Heap {
    /// Makes it the heap of another stream and pool. Nothing is allocated in it.
    pub(in crate::memory::paged) fn set_owner(&mut self, owner: Owner) {
        debug_assert!(self.is_idle());
        let Owner { stream, stream_raw, pool, is_kept, is_first } = owner;
        (self.stream, self.stream_raw, self.pool, self.is_first) = (stream, stream_raw, pool, is_first);
        (self.live_until_end, self.last_work) = (u32::from(!is_kept), LastWork::Done);
    }

    /// All work in it is done: it is nobody's from then on. What it has of memory any pool may take.
    pub(in crate::memory::paged) fn set_no_owner(&mut self) {
        let (stream_raw, pool) = (self.stream_raw, MemPoolId::DEFAULT);
        self.set_owner(Owner { stream: NOBODY, stream_raw, pool, is_kept: false, is_first: false });
    }

    pub(in crate::memory::paged) fn has_owner(&self) -> bool {
        self.stream != NOBODY
    }

    /// Whether it is the heap of this stream and pool.
    #[inline]
    pub(in crate::memory::paged) fn is_of(&self, stream: StreamId, pool: MemPoolId) -> bool {
        self.stream == stream && self.pool == pool
    }

    /// Whether it is the first heap of its stream.
    pub(in crate::memory::paged) fn is_first(&self) -> bool {
        self.is_first
    }

    /// Lists it, if something is allocated or freed for the first time since it was last looked at.
    #[inline(always)]
    pub(super) fn list(&mut self) {
        if !self.is_listed {
            self.is_listed = true;
            self.activity.push(self.number);
        }
    }

    /// Whether something was allocated or freed since it was last looked at.
    pub(in crate::memory::paged) fn is_listed(&self) -> bool {
        self.is_listed
    }

    /// It is looked at: the next allocation or free lists it again.
    pub(in crate::memory::paged) fn unlist(&mut self) {
        self.is_listed = false;
    }

    /// Whether the next free is the last: after it the owner may destroy the stream.
    #[inline(always)]
    pub(super) fn is_last_free(&self) -> bool {
        self.live == self.live_until_end
    }

    /// What is known of the work that used this heap's memory, if its stream may be destroyed by now; `None` if the
    /// stream exists.
    pub(in crate::memory::paged) fn last_work(&self) -> Option<&LastWork> {
        (self.live < self.live_until_end).then_some(&self.last_work)
    }

    /// How often the last block was freed.
    pub(in crate::memory::paged) fn ends(&self) -> u64 {
        self.ends
    }

    /// Stores what is known of the last work, unless the last block was freed again since the time of `ends`.
    pub(in crate::memory::paged) fn set_last_work(&mut self, ends: u64, last_work: LastWork) {
        if self.ends == ends {
            self.last_work = last_work;
        }
    }

    /// Whether nothing is allocated.
    pub(in crate::memory::paged) fn has_no_live(&self) -> bool {
        self.live == 0
    }
}
