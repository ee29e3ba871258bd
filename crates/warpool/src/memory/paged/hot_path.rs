//! The hot path: what a cached allocation and its free do, and where they go on if it takes more.

use warpool_driver::DevicePtr;

use super::PagedAllocator;
use super::device::{BlockRef, PagedDevice};
use super::heap::{FreedAgain, Heap};
use crate::Result;
use crate::memory::report::now_us;
use crate::memory::{Allocation, MemPoolId, Request};
use crate::sync::spin_lock::SpinGuard;

impl PagedDevice {
    /// Frees a block that only its own stream used, in the heap that the thread used last. `false` if it has to be
    /// looked at more closely, or is not of this device.
    #[inline(always)]
    pub(super) fn free_plain(&self, ptr: DevicePtr) -> bool {
        if !self.is_unobserved() {
            return self.free_recorded(ptr);
        }
        let Some((cell, kind, range)) = self.last_heap_at(ptr) else { return false };
        let mut heap = cell.lock();
        match heap.free_again(kind, range, ptr.0) {
            FreedAgain::Kept => true,
            FreedAgain::Crowded(block) => {
                free_crowded(heap, block);
                true
            }
            FreedAgain::Refused => false,
        }
    }

    /// The same while a history is recorded, if its entries say no more than what happened and when.
    #[inline(never)]
    fn free_recorded(&self, ptr: DevicePtr) -> bool {
        if !self.only_records() {
            return false;
        }
        let Some((cell, kind, range)) = self.last_heap_at(ptr) else { return false };
        let time_us = now_us(self.driver());
        let mut heap = cell.lock();
        let Some(requested) = heap.free_plain(kind, range, ptr.0) else { return false };
        self.record_plain_free(ptr.0, requested, &heap, time_us);
        true
    }

    /// Allocates from the heap that the thread used last while a history is recorded, if its entries say no more than
    /// what happened and when.
    #[inline(always)]
    fn allocate_recorded(&self, request: &Request) -> Option<Allocation> {
        if !self.only_records() {
            return None;
        }
        let (number, cell) = self.heap_of_plain(request)?;
        let time_us = now_us(self.driver());
        let mut heap = cell.lock();
        if !heap.is_of(request.stream, MemPoolId::DEFAULT) {
            return None;
        }
        let block = heap.allocate(request.bytes)?;
        let allocation = heap.allocation(block, self.id, BlockRef { heap: number, block }.pack());
        self.record_plain_allocation(allocation.ptr.0, request.bytes, &heap, time_us);
        Some(allocation)
    }
}

/// The hot path: the heap that the thread used last, while there is nothing to be looked after. One lock that
/// threads on other streams never take.
impl PagedAllocator {
    /// Allocates from the heap that the thread used last, without anything else. `None`, and nothing has changed, if it
    /// takes more.
    #[inline(always)]
    pub(super) fn take_cached(&self, request: &Request) -> Option<Allocation> {
        match self.allocate_again(request) {
            Again::Done(allocation) => Some(allocation),
            Again::Search(heap, number) => search(heap, number, request),
            Again::Other => self.allocate_recorded(request),
        }
    }

    /// Allocates a block that was freed a moment ago.
    #[inline(always)]
    pub(super) fn allocate_again(&self, request: &Request) -> Again<'_> {
        let &Request { device, stream, bytes: requested, .. } = request;
        let Some(paged_device) = self.devices.get(device.0 as usize) else { return Again::Other };
        if !paged_device.is_unobserved() {
            return Again::Other;
        }
        let Some((number, cell)) = paged_device.heap_of_plain(request) else { return Again::Other };
        let mut heap = cell.lock();
        if !heap.is_of(stream, MemPoolId::DEFAULT) {
            // It was retired, and may be another stream's.
            return Again::Other;
        }
        let Some((id, block)) = heap.allocate_again(requested) else { return Again::Search(heap, number) };
        let (ptr, bytes, generation) = (DevicePtr(block.addr()), block.bytes(), block.generation());
        drop(heap);
        let slot = BlockRef { heap: number, block: id }.pack();
        Again::Done(Allocation { ptr, bytes, bytes_requested: requested, device, stream, slot, generation })
    }

    #[inline(never)]
    fn allocate_recorded(&self, request: &Request) -> Option<Allocation> {
        self.devices.get(request.device.0 as usize)?.allocate_recorded(request)
    }

    /// Goes on where [`allocate_again`](Self::allocate_again) found no block.
    #[inline(never)]
    pub(super) fn allocate_after_search(
        &self,
        heap: SpinGuard<'_, Heap>,
        number: u32,
        request: &Request,
    ) -> Result<Allocation> {
        match search(heap, number, request) {
            Some(allocation) => Ok(allocation),
            None => self.allocate_checked(*request),
        }
    }

    /// Goes on in every other case.
    #[inline(never)]
    pub(super) fn allocate_otherwise(&self, request: &Request) -> Result<Allocation> {
        let device = self.devices.get(request.device.0 as usize);
        match device.and_then(|device| device.allocate_recorded(request)) {
            Some(allocation) => Ok(allocation),
            None => self.allocate_checked(*request),
        }
    }
}

/// What the hot path of an allocation came to.
pub(super) enum Again<'a> {
    Done(Allocation),
    /// The heap, with its number, has to be searched.
    Search(SpinGuard<'a, Heap>, u32),
    /// A history is recorded, or there is more to look at.
    Other,
}

/// Allocates a free block of a heap, whichever fits best. `None` if none does.
#[inline]
fn search(mut heap: SpinGuard<'_, Heap>, number: u32, request: &Request) -> Option<Allocation> {
    let block = heap.search(request.bytes)?;
    Some(heap.allocation(block, request.device, BlockRef { heap: number, block }.pack()))
}

/// Frees a block that can be freed without a closer look, when others have to be merged first.
#[inline(never)]
fn free_crowded(mut heap: SpinGuard<'_, Heap>, block: u32) {
    let freed = heap.free_plain_block(block);
    debug_assert!(freed.is_some(), "block {block} was just seen to be plain");
}
