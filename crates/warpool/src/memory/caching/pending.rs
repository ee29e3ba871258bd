//! Pending frees: blocks that were freed while other streams may still use them. The mechanism is `stream_fence/`;
//! this file connects it to this allocator's state and to frees that captures defer.
//!
//! Nothing here calls trackers: the public call does, once the state is consistent.
//!
//! "During a capture" means that a stream in question is capturing, not that some pool's scope is open.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;

use warpool_driver::StreamId;

use super::capture_order;
use super::device::CachingDevice;
use super::heap::BlockKey;
use crate::memory::core::DeviceCore;
use crate::memory::report::EntryDetails;
use crate::memory::stream_fence::{self, DeviceEvents, Fence, FenceOwner, PENDING_PER_CALL, StreamFences, StreamUses};
use crate::unwind::OnUnwind;
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

    fn device(&self) -> Option<&DeviceCore> {
        Some(self.device)
    }

    fn stream_of(&self, key: &BlockKey) -> Option<StreamId> {
        self.device.read(|state| state.heap.get(*key).map(|_| state.heap.stream_of(*key)))
    }

    fn with_uses<R>(&self, key: &BlockKey, act: impl FnOnce(&mut StreamUses) -> R) -> R {
        self.device.change(|state| act(state.heap.uses_mut(*key)))
    }

    fn with_fences<R>(&self, act: impl FnOnce(&mut StreamFences<BlockKey>) -> R) -> R {
        self.device.change(|state| act(&mut state.fences))
    }

    // Both in one step: a thread that finds no fence left to wait for also finds the blocks free.
    fn complete(&self, passed: &Fence) {
        self.device.change(|state| state.complete_fence(passed, self.details));
    }

    fn reclaim_if_clear(&self, key: BlockKey) {
        self.device.change(|state| state.reclaim_if_clear(key, self.details));
    }
}

impl<'a> PendingFrees<'a> {
    pub(super) fn new(device: &'a CachingDevice, details: &'a EntryDetails) -> Self {
        Self { device, details }
    }

    /// Completes the pending frees that are ready: records fences that destructors or captures left, completes deferred
    /// frees, and polls the fences. Examines a bounded number of those that are not ready, round robin. Must not be
    /// called while the request's stream is capturing.
    pub(super) fn process(&self) -> Result<()> {
        let left_over = self.device.read(|state| state.fences.has_unfenced() || state.has_deferred());
        let retried = if left_over { self.retry(PENDING_PER_CALL) } else { Ok(()) };
        retried.and(stream_fence::poll_some(self))
    }

    /// As [`process`](Self::process), for all pending frees.
    pub(super) fn process_all(&self) -> Result<()> {
        let retried = self.retry(usize::MAX);
        retried.and(stream_fence::poll(self))
    }

    /// For a request on `stream` that found no block: polls the fences that its blocks wait for and that
    /// [`process`](Self::process) left out. Returns whether there may be any.
    pub(super) fn process_for(&self, stream: StreamId) -> Result<bool> {
        let left_out = self.device.read(|state| state.fences.has_many_streams());
        if left_out {
            stream_fence::poll_of(self, stream)?;
        }
        Ok(left_out)
    }

    /// Waits until every pending free is completed, except those that wait for a capture.
    pub(super) fn wait(&self) -> Result<()> {
        self.device.change(|state| state.counters.stats.num_sync_all_streams += 1);
        let retried = self.retry(usize::MAX);
        retried.and(stream_fence::wait_all(self))
    }

    /// Starts to complete the free of a block that other streams used: records fences in them, or, if a capture forbids
    /// that, defers the free. Failures are retried by later calls.
    /// For the call that frees the block.
    pub(super) fn fence_or_defer(&self, block: BlockKey) -> Result<()> {
        self.fence_or_defer_in(block, None)
    }

    /// With `postponed`, for a block that an earlier call freed: streams that their owners may have destroyed since
    /// then are not named.
    fn fence_or_defer_in(&self, block: BlockKey, postponed: Option<&mut DeviceEvents>) -> Result<()> {
        let streams: Vec<StreamId> = self.device.read(|state| state.heap.streams_of(block).collect());
        let may_name = |stream| postponed.is_none() || self.device.instance().may_name(stream);
        let refuses = |&stream: &StreamId| match self.refuses_work(stream, may_name(stream)) {
            Ok(refuses) => refuses.then_some(Ok(stream)),
            Err(error) => Some(Err(error)),
        };
        let unwinds = OnUnwind::new(|| self.device.change(|state| state.fence_later(block)));
        let refused = streams.iter().find_map(refuses).transpose();
        unwinds.disarm();
        let refused = match refused {
            Ok(refused) => refused,
            Err(error) => {
                self.fence_later(block);
                return Err(error);
            }
        };
        let Some(capturing) = refused else {
            // Uses in a capture were joined when the capture ended.
            self.device.change(|state| state.clear_uses_in_capture(block));
            return match postponed {
                Some(devices) => stream_fence::fence_postponed(self, block, devices),
                None => stream_fence::fence(self, block),
            };
        };
        // The graph orders the captured uses. Uses from before the capture need fences in their streams, after it has
        // ended.
        let by_graph = self
            .device
            .read(|state| state.policy.reuse_in_capture && state.heap.block(block).unfenced_streams().is_empty());
        let unwinds = OnUnwind::new(|| self.device.change(|state| state.fence_later(block)));
        let by_graph = by_graph && streams.iter().all(|&stream| may_name(stream));
        let last_nodes = if by_graph { capture_order::last_nodes(self.device.driver(), &streams) } else { Vec::new() };
        unwinds.disarm();
        self.device.change(|state| state.defer(block, capturing, last_nodes));
        Ok(())
    }

    /// Whether a capture forbids work in a stream. While captures are active, one that may not be named may take part.
    fn refuses_work(&self, stream: StreamId, may_name: bool) -> Result<bool> {
        match may_name {
            true => Ok(self.device.capture_status(stream)?.refuses_work()),
            false => Ok(self.device.has_captures()),
        }
    }

    /// As [`fence_or_defer`](Self::fence_or_defer), without a driver call: left to the next call.
    pub(super) fn fence_later(&self, block: BlockKey) {
        stream_fence::fence_later(self, block);
    }

    /// Completes the frees that the capture of `stream` deferred and whose uses the graph orders before the next work
    /// of the stream.
    pub(super) fn reuse_in_capture(&self, stream: StreamId) -> Result<()> {
        if !self.device.read(|state| state.policy.reuse_in_capture) {
            return Ok(());
        }
        // Destructors did not look up the last nodes for their frees.
        self.retry_unfenced(PENDING_PER_CALL)?;
        if !self.device.read(|state| state.has_captured_frees(stream)) {
            return Ok(());
        }
        let done = capture_order::ancestors(self.device.driver(), stream)?;
        self.device.change(|state| state.complete_captured_frees(stream, &done, self.details));
        Ok(())
    }

    /// Retries the frees that destructors, errors and captures left, until `stay_max` of each kind are still not ready.
    fn retry(&self, stay_max: usize) -> Result<()> {
        let fenced = self.retry_unfenced(stay_max);
        fenced.and(self.retry_deferred(stay_max))
    }

    fn retry_unfenced(&self, stay_max: usize) -> Result<()> {
        stream_fence::retry_unfenced(self, stay_max, |block, devices| self.fence_or_defer_in(block, Some(devices)))
    }

    /// Retries the frees that captures deferred. Reads the status of a stream once, however many blocks wait for it.
    fn retry_deferred(&self, stay_max: usize) -> Result<()> {
        let (mut unseen, mut last) = self.device.read(|state| state.deferred_streams(stay_max));
        let (mut budget, mut over) = (stay_max, Vec::new());
        while unseen > 0 && budget > 0 {
            let streams = self.device.read(|state| state.deferred_streams_after(last, budget.min(unseen)));
            let Some(&newest) = streams.last() else { break };
            (last, unseen) = (Some(newest), unseen - streams.len());
            self.device.deferred_steps.fetch_add(streams.len() as u64, Ordering::Relaxed);
            for stream in streams {
                match self.refuses_work(stream, self.device.instance().may_name(stream))? {
                    true => budget -= 1,
                    false => over.push(stream),
                }
            }
        }
        let ready = self.device.change(|state| state.take_ready(&over, last));
        self.device.deferred_steps.fetch_add(ready.len() as u64, Ordering::Relaxed);
        let mut ready = VecDeque::from(ready);
        let (mut outcome, mut devices) = (Ok(()), DeviceEvents::default());
        while let Some(block) = ready.pop_front() {
            let unwinds = OnUnwind::new(|| {
                self.device.change(|state| ready.iter().for_each(|&block| state.fence_later(block)));
            });
            let fenced = self.fence_or_defer_in(block, Some(&mut devices));
            unwinds.disarm();
            outcome = outcome.and(fenced);
        }
        outcome
    }
}
