//! From a stream and pool to their heap, which is added if there is none.

use std::sync::{Arc, PoisonError};

use warpool_driver::StreamId;

use super::adoption;
use super::device::PagedDevice;
use super::heap::Heap;
use super::ids::HeapId;
use super::last_work::Owner;
use crate::memory::MemPoolId;
use crate::sync::spin_lock::SpinLock;
use crate::{Error, Result, lock};

impl PagedDevice {
    /// The heap of a stream and pool. No lock if it is the one that the thread used last.
    #[inline]
    pub(super) fn heap_for(&self, stream: StreamId, pool: MemPoolId) -> Result<(HeapId, &SpinLock<Heap>)> {
        match self.key.last_of(&self.heaps, stream, pool) {
            Some(last) => Ok(last),
            None => self.find_heap(stream, pool),
        }
    }

    #[cold]
    fn find_heap(&self, stream: StreamId, pool: MemPoolId) -> Result<(HeapId, &SpinLock<Heap>)> {
        let known = self.by_key.read().unwrap_or_else(PoisonError::into_inner).by_key.get(&(stream, pool)).copied();
        let heap = match known {
            Some(heap) => heap,
            None => self.add_heap(stream, pool, |_| false)?,
        };
        self.switch_to(heap, stream, pool);
        Ok((heap, self.heaps.get(heap)))
    }

    /// Adds the heap of a stream and pool. Of the retired ones it gets the first that is `preferred`, or else the last.
    pub(super) fn add_heap(
        &self,
        stream: StreamId,
        pool: MemPoolId,
        preferred: impl Fn(&Heap) -> bool,
    ) -> Result<HeapId> {
        let handle = self.driver().stream_handle(stream)?;
        if handle.device != self.id {
            return Err(Error::StreamDevice { device: self.id, stream, owner: handle.device });
        }
        let is_kept = self.instance().keeps_stream(self.id, stream)?;
        // Before the keys: heaps change their owners while the pages are locked.
        let mut table = lock(&self.pages);
        if let Some(heap) = self.existing_heap(stream, pool) {
            return Ok(heap);
        }
        let is_first = pool.is_default() && table.unused_heaps.note_added(stream);
        let owner = Owner { stream, stream_raw: handle.raw.0, pool, is_kept, is_first };
        if is_first
            && !table.unused_heaps.never_adopted
            && let Some((heap, before)) = adoption::adopt(self, &mut table, owner)?
        {
            let mut keys = self.by_key.write().unwrap_or_else(PoisonError::into_inner);
            keys.by_key.remove(&(before, pool));
            keys.by_key.insert((stream, pool), heap);
            return Ok(heap);
        }
        let mut keys = self.by_key.write().unwrap_or_else(PoisonError::into_inner);
        let mut pools = lock(&self.pools);
        pools.expect_in_use(pool)?;
        let found = keys.idle.iter().position(|&heap| preferred(&self.heaps.get(heap).lock()));
        let idle = match found {
            Some(at) => Some(keys.idle.remove(at)),
            None => keys.idle.pop(),
        };
        let heap = match idle {
            Some(heap) => {
                self.heaps.get(heap).lock().set_owner(owner);
                heap
            }
            None => self.heaps.push(Heap::new(owner, HeapId(self.heaps.len()), Arc::clone(&self.activity))),
        };
        pools.add_heap(pool, heap)?;
        keys.by_key.insert((stream, pool), heap);
        Ok(heap)
    }
}
