//! A shortcut for a program that frees and allocates the same block repeatedly.
//!
//! A program that frees the block which it has just allocated, and then requests the same size again, gets the same
//! block: the free merges it with its rest, which restores the heap, and the request splits it off again. So neither
//! step is carried out: the block is only noted as freed, and returned again. Every other step on the device first
//! [settles](DeviceState::settle) the noted steps, so that none sees a block that the program has freed, or statistics
//! without a request.

use warpool_driver::{DevicePtr, StreamId};

use super::DeviceState;
use crate::memory::caching::heap::{BlockKey, Heap, Taken};
use crate::memory::report::EntryDetails;
use crate::memory::{Allocation, MemPoolId};

/// The last allocation. It was made without a history, pending frees or ages of free blocks, and there was no other
/// step since: no stream used it, no graph holds it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Recent {
    pool: MemPoolId,
    allocation: Allocation,
    taken: Taken,
    /// Whether the program has freed it.
    freed: bool,
    /// How often it was freed and allocated again.
    repeats: u64,
}

/// The argument of a free.
#[derive(Clone, Copy, Debug)]
pub(in crate::memory::caching) enum ToFree<'a> {
    /// An address.
    Address(DevicePtr),
    /// An allocation; another one at the same address is not freed.
    Allocation(&'a Allocation),
}

impl ToFree<'_> {
    /// The allocated block, if there is one.
    #[inline]
    pub(in crate::memory::caching) fn find(self, heap: &Heap) -> Option<BlockKey> {
        match self {
            Self::Address(ptr) => heap.allocated_at(ptr),
            Self::Allocation(allocation) => heap.allocated(allocation),
        }
    }

    #[inline]
    fn is(self, recent: &Allocation) -> bool {
        match self {
            Self::Address(ptr) => ptr == recent.ptr,
            Self::Allocation(allocation) => {
                (allocation.ptr, allocation.slot, allocation.generation) == (recent.ptr, recent.slot, recent.generation)
            }
        }
    }
}

impl DeviceState {
    /// Notes the last allocation; only one is noted at a time.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a call would pass the allocation through memory")]
    pub(super) fn set_recent(&mut self, pool: MemPoolId, allocation: Allocation, taken: Taken) {
        self.recent = Some(Recent { pool, allocation, taken, freed: false, repeats: 0 });
    }

    /// Allocates the last block again, if it was freed and the request is the same.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a call would return the result through memory")]
    pub(in crate::memory::caching) fn allocate_recent(
        &mut self,
        pool: MemPoolId,
        stream: StreamId,
        requested: u64,
    ) -> Option<Allocation> {
        let recent = self.recent.as_mut().filter(|recent| {
            recent.freed
                && recent.allocation.bytes_requested == requested
                && recent.allocation.stream == stream
                && recent.pool == pool
        })?;
        recent.freed = false;
        recent.repeats += 1;
        if !crate::defect::Defect::RecentKeepsGeneration.is_on() {
            recent.allocation.generation = recent.allocation.generation.wrapping_add(1);
        }
        let allocation = recent.allocation;
        self.report_allocated(&allocation);
        Some(allocation)
    }

    /// Frees the last block, if `to_free` is that block and it is not freed yet.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "the hot path")]
    pub(in crate::memory::caching) fn free_recent(&mut self, to_free: ToFree<'_>) -> bool {
        match &mut self.recent {
            Some(recent) if !recent.freed && to_free.is(&recent.allocation) => {
                recent.freed = true;
                let block = recent.taken.block;
                self.report_free(block);
                true
            }
            _ => false,
        }
    }

    /// Carries out the noted steps. Called before every step except the two above.
    #[inline]
    pub(in crate::memory::caching) fn settle(&mut self) {
        let Some(recent) = self.recent.take() else { return };
        if recent.freed || recent.repeats > 0 {
            self.settle_recent(&recent);
        }
    }

    fn settle_recent(&mut self, recent: &Recent) {
        let Recent { allocation, taken, .. } = recent;
        if recent.repeats > 0 {
            self.heap.set_generation(taken.block, allocation.generation);
            let oversize = self.policy.sizes.is_oversize(allocation.bytes);
            self.counters.repeated(taken, self.heap.block(taken.block), oversize, recent.repeats);
        }
        if recent.freed {
            let in_use = self.free(taken.block, EntryDetails::not_recorded());
            assert!(!in_use, "only its own stream used a block since it was allocated");
        }
    }
}
