//! Freeing, and changing, a block of any kind.

use warpool_driver::DevicePtr;

use super::PagedAllocator;
use super::device::{BlockRef, PagedDevice};
use super::heap::{Freed, Heap};
use super::ids::{BlockId, HeapId};
use super::pending::PendingFrees;
use crate::memory::report::EntryDetails;
use crate::memory::stream_fence;
use crate::memory::{Action, Allocation, DeviceAllocator, StackLevel};
use crate::unwind::OnUnwind;
use crate::{Error, Result};

/// What became of a block that was to be freed.
pub(super) enum Outcome {
    Completed,
    Pending,
    /// A graph holds it: it is not freed.
    Held,
    /// There is no such block.
    Unknown,
}

/// When fences of a freed block are recorded.
#[derive(Clone, Copy)]
pub(super) enum Fences {
    Now,
    /// By a later call: this one must not call the driver.
    Later,
}

pub(super) fn result_of(outcome: &Outcome, ptr: DevicePtr) -> Result<()> {
    match outcome {
        Outcome::Completed | Outcome::Pending => Ok(()),
        Outcome::Held => Err(Error::HeldByGraph { ptr }),
        Outcome::Unknown => Err(Error::UnknownPointer { ptr }),
    }
}

impl PagedDevice {
    /// Frees the block that `find` finds in a heap.
    #[inline]
    fn free(&self, number: HeapId, find: impl Fn(&Heap) -> Option<BlockId>, fences: Fences) -> Outcome {
        self.using(number);
        let cell = self.heaps.get(number);
        let details = {
            // A hook that collects stacks may panic: the block is freed all the same.
            let unwinds = OnUnwind::new(|| {
                let off = EntryDetails::default();
                let (stream, (outcome, block)) = {
                    let mut heap = cell.lock();
                    (heap.stream, self.free_found(&mut heap, &find, &off))
                };
                if let (Outcome::Pending, Some(block)) = (outcome, block) {
                    self.fence(BlockRef { heap: number, block }, Fences::Later, &off);
                }
                self.end_of_stream(number, stream, Fences::Later, &off);
            });
            let details = self.entry_details(StackLevel::All);
            unwinds.disarm();
            details
        };
        let mut heap = cell.lock();
        let ends = heap.ends();
        let (outcome, block) = self.free_found(&mut heap, &find, &details);
        let (stream, may_end) = (heap.stream, heap.ends() != ends);
        drop(heap);
        if let (Outcome::Pending, Some(block)) = (&outcome, block) {
            self.fence(BlockRef { heap: number, block }, fences, &details);
        }
        if may_end {
            self.end_of_stream(number, stream, fences, &details);
        }
        if !details.is_off() {
            self.report();
        }
        outcome
    }

    /// Frees blocks of a heap that no other stream uses. User code is not called.
    pub(super) fn free_known(&self, number: HeapId, blocks: &[BlockId], fences: Fences, details: &EntryDetails) {
        self.using(number);
        let mut heap = self.heaps.get(number).lock();
        let ends = heap.ends();
        for &block in blocks {
            self.free_found(&mut heap, &|_| Some(block), details);
        }
        let (stream, may_end) = (heap.stream, heap.ends() != ends);
        drop(heap);
        if may_end {
            self.end_of_stream(number, stream, fences, details);
        }
    }

    #[inline]
    fn free_found(
        &self,
        heap: &mut Heap,
        find: &impl Fn(&Heap) -> Option<BlockId>,
        details: &EntryDetails,
    ) -> (Outcome, Option<BlockId>) {
        let Some(block) = find(heap) else { return (Outcome::Unknown, None) };
        if heap.is_held(block) {
            return (Outcome::Held, None);
        }
        let (addr, requested) = (heap.block(block).addr(), heap.block(block).requested());
        self.report_free(heap, block);
        let stack = heap.stack(block).cloned();
        let details = &*details.of_free(stack.as_ref());
        match heap.free(block) {
            Freed::Completed => {
                self.record_free(addr, requested, heap, details);
                (Outcome::Completed, Some(block))
            }
            Freed::Pending => {
                self.record(Action::FreeRequested, addr, requested, heap, details);
                (Outcome::Pending, Some(block))
            }
        }
    }

    #[cold]
    fn fence(&self, key: BlockRef, fences: Fences, details: &EntryDetails) {
        let pending = PendingFrees::new(self, details);
        match fences {
            Fences::Now => pending.fence(key),
            Fences::Later => stream_fence::fence_later(&pending, key),
        }
    }

    /// Frees what starts at `ptr`.
    #[inline]
    fn free_at(&self, ptr: DevicePtr) -> Outcome {
        let Some(at) = self.space.locate(ptr) else { return Outcome::Unknown };
        self.free(at.heap, |heap| heap.allocated_at(at.kind, at.range, ptr.0), Fences::Now)
    }

    #[inline]
    pub(super) fn free_allocation(&self, allocation: &Allocation, fences: Fences) -> Outcome {
        if self.free_plain_allocation(allocation) {
            return Outcome::Completed;
        }
        self.free_allocation_checked(allocation, fences)
    }

    /// Frees a block that only its own stream used. `false` if it has to be looked at more closely.
    #[inline]
    fn free_plain_allocation(&self, allocation: &Allocation) -> bool {
        let Some(at) = BlockRef::unpack(allocation.slot) else { return false };
        self.is_unobserved()
            && self.last_heap(at.heap).is_some_and(|cell| {
                let mut heap = cell.lock();
                heap.allocated(at.block, allocation.ptr, allocation.generation)
                    && heap.free_plain_block(at.block).is_some()
            })
    }

    #[inline(never)]
    fn free_allocation_checked(&self, allocation: &Allocation, fences: Fences) -> Outcome {
        let Some(at) = BlockRef::unpack(allocation.slot) else { return Outcome::Unknown };
        if self.heaps.try_get(at.heap).is_none() {
            return Outcome::Unknown;
        }
        let (ptr, generation) = (allocation.ptr, allocation.generation);
        self.free(at.heap, |heap| heap.allocated(at.block, ptr, generation).then_some(at.block), fences)
    }

    /// Changes an allocated block.
    pub(super) fn change<R>(&self, allocation: &Allocation, change: impl FnOnce(&mut Heap, BlockId) -> R) -> Result<R> {
        let unknown = Error::UnknownPointer { ptr: allocation.ptr };
        let at = BlockRef::unpack(allocation.slot).ok_or(unknown.clone())?;
        let mut heap = self.heaps.try_get(at.heap).ok_or(unknown.clone())?.lock();
        if heap.allocated(at.block, allocation.ptr, allocation.generation) {
            Ok(change(&mut heap, at.block))
        } else {
            Err(unknown)
        }
    }
}

impl PagedAllocator {
    /// Frees a block of any kind.
    #[inline(never)]
    pub(super) fn free_checked(&self, ptr: DevicePtr) -> Result<()> {
        if ptr.is_null() || self.instance().is_inherited() {
            return Ok(());
        }
        for device in &self.devices {
            match device.free_at(ptr) {
                Outcome::Unknown => {}
                outcome => return result_of(&outcome, ptr),
            }
        }
        Err(Error::UnknownPointer { ptr })
    }
}
