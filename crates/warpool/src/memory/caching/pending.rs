//! Pending frees: blocks that were freed while other streams may still use them. The mechanism is `stream_fence.rs`;
//! here it meets this allocator's state, and the frees that captures deferred.

use warpool_driver::StreamId;

use super::block::{BlockKey, Standing};
use super::state::State;
use super::{CachingAllocator, Cell};
use crate::capture::CaptureStatus;
use crate::memory::journal::Cause;
use crate::memory::stream_fence::{self, Fence, FenceOwner, StreamFences, StreamUses};
use crate::{Instance, Result};

/// The pending frees of one device, on behalf of one call.
pub(super) struct PendingFrees<'a> {
    pub(super) allocator: &'a CachingAllocator,
    pub(super) cell: &'a Cell,
    pub(super) cause: &'a Cause,
}

impl FenceOwner for PendingFrees<'_> {
    type Key = BlockKey;

    fn instance(&self) -> &Instance {
        &self.allocator.instance
    }

    fn has_captures(&self) -> bool {
        self.allocator.has_captures(self.cell)
    }

    fn capture_status(&self, stream: StreamId) -> Result<CaptureStatus> {
        self.allocator.capture_status(self.cell, stream)
    }

    fn capture_guard(&self) -> Result<impl Sized> {
        self.allocator.relaxed(self.cell)
    }

    fn with_uses<R>(&self, key: &BlockKey, act: impl FnOnce(&mut StreamUses) -> R) -> R {
        self.allocator.with(self.cell, |state| act(&mut state.blocks[*key].extra().uses))
    }

    fn with_fences<R>(&self, act: impl FnOnce(&mut StreamFences<BlockKey>) -> R) -> R {
        self.allocator.with(self.cell, |state| act(&mut state.fences))
    }

    // In one step: a thread that finds no fence left to wait for finds the blocks free.
    fn complete(&self, passed: &[Fence]) {
        self.allocator.with(self.cell, |state| {
            for fence in passed {
                if let Some(block) = state.fences.pop(fence) {
                    state.blocks[block].extra().uses.fence_passed();
                    state.reclaim_if_clear(block, self.cause);
                }
            }
        });
    }

    fn reclaim_if_clear(&self, key: BlockKey) {
        self.allocator.with(self.cell, |state| state.reclaim_if_clear(key, self.cause));
    }
}

impl State {
    /// Whether frees are pending that may be completed before the next search.
    pub(super) fn has_pending(&self) -> bool {
        !self.fences.is_empty() || !self.deferred.is_empty()
    }

    /// The streams that a freed block has no fence for yet.
    pub(super) fn uses_of(&self, block: BlockKey) -> &[StreamId] {
        self.blocks[block].extra.as_ref().map_or(&[], |extra| extra.uses.unfenced())
    }

    fn reclaim_if_clear(&mut self, block: BlockKey, cause: &Cause) {
        let Some(entry) = self.blocks.get_mut(block).filter(|entry| entry.standing == Standing::Waiting) else {
            return;
        };
        let extra = entry.extra();
        if extra.uses_in_capture.is_empty() && extra.uses.take_reclaimable() {
            self.complete_free(block, cause);
        }
    }
}

impl CachingAllocator {
    pub(super) fn pending_frees<'a>(&'a self, cell: &'a Cell, cause: &'a Cause) -> PendingFrees<'a> {
        PendingFrees { allocator: self, cell, cause }
    }

    /// Completes the pending frees that can be: records fences that destructors or captures left, frees what captures
    /// deferred, and polls the fences. Not while the requested stream captures.
    pub(super) fn process_pending(&self, cell: &Cell, cause: &Cause) -> Result<()> {
        let left_over = self.with(cell, |state| state.fences.has_unfenced() || !state.deferred.is_empty());
        let retried = if left_over { self.retry_pending(cell, cause) } else { Ok(()) };
        retried.and(stream_fence::poll(&self.pending_frees(cell, cause)))
    }

    /// Waits until every pending free is completed that no capture holds back.
    pub(super) fn wait_for_pending(&self, cell: &Cell, cause: &Cause) -> Result<()> {
        self.with(cell, |state| state.stats.num_sync_all_streams += 1);
        let retried = self.retry_pending(cell, cause);
        retried.and(stream_fence::wait_all(&self.pending_frees(cell, cause)))
    }

    fn retry_pending(&self, cell: &Cell, cause: &Cause) -> Result<()> {
        let fenced = self.retry_unfenced(cell, cause);
        fenced.and(self.retry_deferred(cell, cause))
    }

    pub(super) fn retry_unfenced(&self, cell: &Cell, cause: &Cause) -> Result<()> {
        let pending = self.pending_frees(cell, cause);
        stream_fence::retry_unfenced(&pending, |block| self.finish_free(cell, block, cause))
    }
}
