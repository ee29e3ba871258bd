//! Pending frees: blocks that were freed while other streams may still use them. The mechanism is `stream_fence.rs`;
//! this file connects it to this allocator's state and to frees that captures defer.
//!
//! "During a capture" means that a stream in question is capturing, not that some pool's scope is open.

use rustc_hash::FxHashSet;
use warpool_driver::StreamId;

use super::capture_order;
use super::device::CachingDevice;
use super::heap::BlockKey;
use super::state::DeviceState;
use crate::capture::CaptureStatus;
use crate::memory::report::EntryDetails;
use crate::memory::stream_fence::{self, Fence, FenceOwner, StreamFences, StreamUses};
use crate::{Instance, Result};

/// The pending frees of one device, on behalf of one call.
pub(super) struct PendingFrees<'a> {
    device: &'a CachingDevice,
    details: &'a EntryDetails,
}

impl FenceOwner for PendingFrees<'_> {
    type Key = BlockKey;

    fn instance(&self) -> &Instance {
        self.device.instance()
    }

    fn has_captures(&self) -> bool {
        self.device.has_captures()
    }

    fn capture_status(&self, stream: StreamId) -> Result<CaptureStatus> {
        self.device.capture_status(stream)
    }

    fn capture_guard(&self) -> Result<impl Sized> {
        self.device.capture_safe()
    }

    fn with_uses<R>(&self, key: &BlockKey, act: impl FnOnce(&mut StreamUses) -> R) -> R {
        self.device.with(|state| act(state.uses_mut(*key)))
    }

    fn with_fences<R>(&self, act: impl FnOnce(&mut StreamFences<BlockKey>) -> R) -> R {
        self.device.with(|state| act(state.fences()))
    }

    // In one step: a thread that finds no fence left to wait for finds the blocks free.
    fn complete(&self, passed: &[Fence]) {
        self.device.with(|state| state.complete_fences(passed, self.details));
    }

    fn reclaim_if_clear(&self, key: BlockKey) {
        self.device.with(|state| state.reclaim_if_clear(key, self.details));
    }
}

impl<'a> PendingFrees<'a> {
    pub(super) fn new(device: &'a CachingDevice, details: &'a EntryDetails) -> Self {
        Self { device, details }
    }

    /// Completes the pending frees that can be: records fences that destructors or captures left, frees what captures
    /// deferred, and polls the fences. Must not be called while the request's stream is capturing.
    pub(super) fn process(&self) -> Result<()> {
        let left_over = self.device.with(|state| state.fences().has_unfenced() || state.has_deferred());
        let retried = if left_over { self.retry() } else { Ok(()) };
        retried.and(stream_fence::poll(self))
    }

    /// Waits until every pending free is completed, but for those that captures hold back.
    pub(super) fn wait(&self) -> Result<()> {
        self.device.with(|state| state.counters_mut().sync_all_streams());
        let retried = self.retry();
        retried.and(stream_fence::wait_all(self))
    }

    /// Starts to complete the free of a block that other streams used: records fences in them, or, if a capture forbids
    /// that, defers the free. What fails is retried by later calls.
    pub(super) fn fence_or_defer(&self, block: BlockKey) -> Result<()> {
        let streams: Vec<StreamId> = self.device.read(|state| state.heap().streams_of(block).collect());
        let mut refused = false;
        for &stream in &streams {
            match self.device.capture_status(stream) {
                Ok(status) => refused |= status.refuses_work(),
                Err(error) => {
                    self.fence_later(block);
                    return Err(error);
                }
            }
        }
        if !refused {
            // Whatever used it in a capture was joined when that ended.
            self.device.with(|state| state.clear_uses_in_capture(block));
            return stream_fence::fence(self, block);
        }
        // The graph orders the uses that were captured. Uses from before need fences in their streams, after the
        // capture.
        let by_graph = self
            .device
            .read(|state| state.policy().reuse_in_capture && state.heap().block(block).unfenced_streams().is_empty());
        let last_nodes = if by_graph { capture_order::last_nodes(self.device.driver(), &streams) } else { Vec::new() };
        self.device.with(|state| state.defer(block, last_nodes));
        Ok(())
    }

    /// As [`fence_or_defer`](Self::fence_or_defer), without a driver call: the next call does it.
    pub(super) fn fence_later(&self, block: BlockKey) {
        stream_fence::fence_later(self, block);
    }

    /// Completes the frees that the capture of `stream` deferred and whose uses the graph orders before the next work
    /// of the stream.
    pub(super) fn reuse_in_capture(&self, stream: StreamId) -> Result<()> {
        if !self.device.read(|state| state.policy().reuse_in_capture) {
            return Ok(());
        }
        // Destructors did not look up which nodes their frees come after.
        self.retry_unfenced()?;
        if !self.device.read(|state| state.has_captured_frees(stream)) {
            return Ok(());
        }
        let done = capture_order::ancestors(self.device.driver(), stream)?;
        self.device.with(|state| state.complete_captured_frees(stream, &done, self.details));
        Ok(())
    }

    fn retry(&self) -> Result<()> {
        let fenced = self.retry_unfenced();
        fenced.and(self.retry_deferred())
    }

    fn retry_unfenced(&self) -> Result<()> {
        stream_fence::retry_unfenced(self, |block| self.fence_or_defer(block))
    }

    /// Retries the frees that captures deferred. Each stream's status is read once, however many blocks wait: another
    /// thread's capture may defer thousands, and every request outside of it calls this.
    fn retry_deferred(&self) -> Result<()> {
        let mut capturing = FxHashSet::default();
        for stream in self.device.read(DeviceState::deferred_streams) {
            if self.device.capture_status(stream)?.refuses_work() {
                capturing.insert(stream);
            }
        }
        let ready = self.device.with(|state| state.take_undeferred(&capturing));
        let mut outcome = Ok(());
        for block in ready {
            outcome = outcome.and(self.fence_or_defer(block));
        }
        outcome
    }
}
