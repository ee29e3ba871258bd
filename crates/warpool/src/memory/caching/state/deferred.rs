//! Frees that wait for the end of a capture: no event may be recorded or queried in the streams that captured, so a
//! block that several streams used is deferred until the capture is over, or, with `graph_capture_record_stream_reuse`,
//! until the graph itself orders every use before the next work.

use std::collections::BTreeSet;

use rustc_hash::FxHashSet;
use warpool_driver::{NodeId, StreamId};

use super::DeviceState;
use crate::memory::caching::heap::BlockKey;
use crate::memory::report::EntryDetails;

/// A deferred free.
pub(super) struct Deferred {
    block: BlockKey,
    /// The last nodes of every stream that used the block, at its free; empty if not all uses were captured.
    last_nodes: Vec<NodeId>,
}

impl DeviceState {
    /// Defers a pending free.
    pub(crate) fn defer(&mut self, block: BlockKey, last_nodes: Vec<NodeId>) {
        self.heap.set_deferred(block, true);
        self.deferred.push(Deferred { block, last_nodes });
    }

    pub(crate) fn has_deferred(&self) -> bool {
        !self.deferred.is_empty()
    }

    /// All streams that used deferred blocks.
    pub(crate) fn deferred_streams(&self) -> BTreeSet<StreamId> {
        self.deferred.iter().flat_map(|entry| self.heap.streams_of(entry.block)).collect()
    }

    /// Takes the deferred frees that none of the `capturing` streams holds back: they are pending again.
    pub(crate) fn take_undeferred(&mut self, capturing: &FxHashSet<StreamId>) -> Vec<BlockKey> {
        let heap = &self.heap;
        let waits = |entry: &Deferred| heap.streams_of(entry.block).any(|stream| capturing.contains(&stream));
        let (kept, ready): (Vec<_>, Vec<_>) = std::mem::take(&mut self.deferred).into_iter().partition(waits);
        self.deferred = kept;
        ready.iter().for_each(|entry| self.heap.set_deferred(entry.block, false));
        ready.into_iter().map(|entry| entry.block).collect()
    }

    /// Whether blocks of `stream` are deferred whose uses were all captured.
    pub(crate) fn has_captured_frees(&self, stream: StreamId) -> bool {
        self.deferred.iter().any(|entry| self.is_captured_free(entry, stream))
    }

    /// Completes the frees of blocks of `stream` whose uses are all among the nodes `done`.
    pub(crate) fn complete_captured_frees(
        &mut self,
        stream: StreamId,
        done: &FxHashSet<NodeId>,
        details: &EntryDetails,
    ) {
        let deferred = std::mem::take(&mut self.deferred);
        let is_done = |entry: &Deferred| {
            self.is_captured_free(entry, stream) && entry.last_nodes.iter().all(|node| done.contains(node))
        };
        let (reusable, kept): (Vec<_>, Vec<_>) = deferred.into_iter().partition(is_done);
        self.deferred = kept;
        for entry in reusable {
            self.heap.set_deferred(entry.block, false);
            self.heap.clear_extra(entry.block);
            self.complete_free(entry.block, details);
        }
    }

    fn is_captured_free(&self, entry: &Deferred, stream: StreamId) -> bool {
        !entry.last_nodes.is_empty() && self.heap.stream_of(entry.block) == stream
    }

    /// The capture that used a block is over: ending it joined the captured uses into its stream.
    pub(crate) fn clear_uses_in_capture(&mut self, block: BlockKey) {
        self.heap.uses_in_capture_mut(block).clear();
    }
}
