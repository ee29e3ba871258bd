//! Pending frees: the mechanism is `stream_fence.rs`; this connects it to the heaps.

use std::sync::atomic::Ordering;

use warpool_driver::{DeviceId, StreamId};

use super::device::{BlockRef, PagedDevice};
use crate::memory::core::DeviceCore;
use crate::memory::report::EntryDetails;
use crate::memory::stream_fence::{self, FenceOwner, PENDING_PER_CALL, StreamFences, StreamUses};
use crate::memory::{Action, MemPoolId};
use crate::{Instance, Result};

/// The pending frees of one device, on behalf of one call.
pub(super) struct PendingFrees<'a> {
    pub(super) device: &'a PagedDevice,
    pub(super) details: &'a EntryDetails,
}

impl FenceOwner for PendingFrees<'_> {
    type Key = BlockRef;

    fn instance(&self) -> &Instance {
        self.device.instance()
    }

    fn device(&self) -> Option<&DeviceCore> {
        Some(self.device)
    }

    fn device_of(&self, stream: StreamId) -> Option<DeviceId> {
        // Heaps are made only for streams of this device.
        self.device.existing_heap(stream, MemPoolId::DEFAULT).map(|_| self.device.id)
    }

    fn stream_of(&self, key: &BlockRef) -> Option<StreamId> {
        Some(self.device.heaps.get(key.heap).lock().stream)
    }

    fn with_uses<R>(&self, key: &BlockRef, act: impl FnOnce(&mut StreamUses) -> R) -> R {
        act(self.device.heaps.get(key.heap).lock().uses_mut(key.block))
    }

    fn with_fences<R>(&self, act: impl FnOnce(&mut StreamFences<BlockRef>) -> R) -> R {
        self.device.with_fences(act)
    }

    fn reclaim_if_clear(&self, key: BlockRef) {
        let mut heap = self.device.heaps.get(key.heap).lock();
        let Some((addr, requested)) = heap.pending(key.block) else { return };
        let stack = heap.stack(key.block).cloned();
        if heap.reclaim_if_clear(key.block) {
            let details = self.details.of_free(stack.as_ref());
            self.device.record(Action::FreeCompleted, addr, requested, &heap, &details);
        }
        drop(heap);
        self.device.using(key.heap);
    }
}

impl<'a> PendingFrees<'a> {
    pub(super) fn new(device: &'a PagedDevice, details: &'a EntryDetails) -> Self {
        Self { device, details }
    }

    /// Completes pending frees that can be; looks at a bounded number of those that cannot.
    pub(super) fn process(&self) -> Result<()> {
        let retried = self.retry(PENDING_PER_CALL);
        retried.and(stream_fence::poll_some(self))
    }

    /// Completes every pending free that can be, without waiting.
    pub(super) fn process_all(&self) -> Result<()> {
        let retried = self.retry(usize::MAX);
        retried.and(stream_fence::poll(self))
    }

    /// Waits until every pending free is completed, but for those that captures hold back.
    pub(super) fn wait(&self) -> Result<()> {
        self.device.counts.syncs.fetch_add(1, Ordering::Relaxed);
        let retried = self.retry(usize::MAX);
        retried.and(stream_fence::wait_all(self))
    }

    fn retry(&self, stay_max: usize) -> Result<()> {
        if !self.device.with_fences(|fences| fences.has_unfenced()) {
            return Ok(());
        }
        stream_fence::retry_unfenced(self, stay_max, |key, devices| stream_fence::fence_postponed(self, key, devices))
    }

    /// Records fences for a freed block. What fails is retried by later calls.
    pub(super) fn fence(&self, key: BlockRef) {
        if let Err(error) = stream_fence::fence(self, key) {
            tracing::warn!(%error, "no fence could be recorded for a freed block; it is retried");
        }
    }
}
