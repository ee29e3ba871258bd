//! The hot path: a cached allocation and its free, in the heap that the thread used last, while there is nothing else
//! to be done. One lock that threads on other streams never take, no driver call, no hash.

use warpool_driver::DevicePtr;

use super::device::{BlockRef, PagedDevice};
use crate::memory::report::now_us;
use crate::memory::{Allocation, MemPoolId, Request};

impl PagedDevice {
    /// Allocates from free blocks of the heap that the thread used last. `None`, and nothing has changed, if it takes
    /// more.
    #[inline(always)]
    pub(super) fn allocate_plain(&self, request: &Request) -> Option<Allocation> {
        let time_us = self.time_of_entry()?;
        let (number, cell) = self.heap_of_plain(request)?;
        let mut heap = cell.lock();
        if !heap.is_of(request.stream, MemPoolId::DEFAULT) {
            // It was retired, and may be another stream's.
            return None;
        }
        let block = heap.allocate(request.bytes)?;
        let allocation = heap.allocation(block, request.device, BlockRef { heap: number, block }.pack());
        if let Some(time_us) = time_us {
            self.record_plain_allocation(allocation.ptr.0, request.bytes, &heap, time_us);
        }
        Some(allocation)
    }

    /// Frees a block that only its own stream used, in the heap that the thread used last. `false`, and nothing has
    /// changed, if it takes more, or is not of this device.
    #[inline(always)]
    pub(super) fn free_plain(&self, ptr: DevicePtr) -> bool {
        let Some(time_us) = self.time_of_entry() else { return false };
        let Some((cell, kind, range)) = self.last_heap_at(ptr) else { return false };
        let mut heap = cell.lock();
        let Some(requested) = heap.free_plain(kind, range, ptr.0) else { return false };
        if let Some(time_us) = time_us {
            self.record_plain_free(ptr.0, requested, &heap, time_us);
        }
        true
    }

    /// The time of an entry in the history, if one is recorded. `None` if its entries say more than what happened and
    /// when, or somebody else is told of allocations and frees.
    #[inline(always)]
    fn time_of_entry(&self) -> Option<Option<i64>> {
        if self.is_unobserved() { Some(None) } else { self.only_records().then(|| Some(now_us(self.driver()))) }
    }
}
