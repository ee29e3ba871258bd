//! Frees during a capture. No event may be recorded or asked about there, so blocks that several streams used wait
//! until the capture is over, or, with `graph_capture_record_stream_reuse`, until the graph itself orders every use
//! before what comes next.
//!
//! "During a capture" means that the stream in question captures, not that some pool's scope is open.

use std::collections::BTreeSet;

use rustc_hash::FxHashSet;
use warpool_driver::{NodeId, StreamId};

use super::block::BlockKey;
use super::state::State;
use super::{CachingAllocator, Cell};
use crate::Result;
use crate::capture::{CaptureSafe, CaptureStatus, RelaxedMode};
use crate::memory::DeviceAllocator as _;
use crate::memory::journal::Cause;
use crate::memory::stream_fence;

/// A block that was given back in a capture.
pub(super) struct Deferred {
    pub(super) block: BlockKey,
    /// The last nodes of every stream that used it, when it was given back; empty if not all of its uses were captured.
    markers: Vec<NodeId>,
}

impl CachingAllocator {
    /// Whether captures are under way on any device: those that this allocator was told of, and those of graphs that
    /// work with another one. Two loads.
    pub(super) fn has_captures(&self, cell: &Cell) -> bool {
        cell.has_captures() || !self.instance.captures().none()
    }

    /// The capture status of `stream`. No driver call, as long as no capture is under way on any device.
    pub(super) fn capture_status(&self, cell: &Cell, stream: StreamId) -> Result<CaptureStatus> {
        if self.has_captures(cell) { CaptureStatus::of(self.driver(), stream) } else { Ok(CaptureStatus::NotCapturing) }
    }

    /// Whether `stream` captures.
    pub(super) fn is_capturing(&self, cell: &Cell, stream: StreamId) -> Result<bool> {
        Ok(self.capture_status(cell, stream)?.is_capturing())
    }

    /// The same around code of others (a pool's source), which may poll or begin captures itself: so none are held off,
    /// and the driver is told in any case.
    pub(super) fn relaxed_for_others(&self) -> Result<RelaxedMode<'_>> {
        RelaxedMode::begin(self.driver())
    }

    /// Lets the calling thread ask the driver for what a capture elsewhere would forbid, and break. No driver call
    /// unless captures are under way.
    pub(super) fn relaxed(&self, cell: &Cell) -> Result<CaptureSafe<'_>> {
        CaptureSafe::begin(self.instance(), || !self.has_captures(cell))
    }

    /// The second half of every free of a block with uses: marks for its streams, or, if one of them captures, a place
    /// in the queue until the capture is over.
    pub(super) fn finish_free(&self, cell: &Cell, block: BlockKey, cause: &Cause) -> Result<()> {
        let streams = self.streams_of(cell, block);
        let mut any = false;
        for &stream in &streams {
            match self.capture_status(cell, stream) {
                Ok(status) => any |= status.refuses_work(),
                Err(error) => {
                    stream_fence::fence_later(&self.pending_frees(cell, cause), block);
                    return Err(error);
                }
            }
        }
        if any {
            // The graph orders what was captured. Uses from before it need marks in their streams, which must wait
            // until it is over.
            let only_captured = self.with(cell, |state| state.uses_of(block).is_empty());
            let markers = if only_captured { self.markers(cell, &streams) } else { Vec::new() };
            self.with(cell, |state| state.deferred.push(Deferred { block, markers }));
            return Ok(());
        }
        // Whatever used it in a capture was joined when that ended.
        self.with(cell, |state| state.blocks[block].extra().uses_in_capture.clear());
        stream_fence::fence(&self.pending_frees(cell, cause), block)
    }

    /// Frees what waited for captures that are over. Every stream is asked about once, however many blocks wait:
    /// another thread's capture may defer thousands, and this is called by every request outside of it.
    pub(super) fn retry_deferred(&self, cell: &Cell, cause: &Cause) -> Result<()> {
        let streams: BTreeSet<StreamId> =
            self.with(cell, |state| state.deferred.iter().flat_map(|entry| state.streams_of(entry.block)).collect());
        let mut captures = FxHashSet::default();
        for stream in streams {
            if self.capture_status(cell, stream)?.refuses_work() {
                captures.insert(stream);
            }
        }
        let ready: Vec<Deferred> = self.with(cell, |state| {
            let deferred = std::mem::take(&mut state.deferred);
            let waits = |entry: &Deferred| state.streams_of(entry.block).any(|stream| captures.contains(&stream));
            let (kept, ready) = deferred.into_iter().partition(waits);
            state.deferred = kept;
            ready
        });
        ready.into_iter().fold(Ok(()), |outcome, entry| outcome.and(self.finish_free(cell, entry.block, cause)))
    }

    /// Frees what was given back in the capture of `stream` and is, by the graph's order, done before whatever the
    /// stream does next.
    pub(super) fn reuse_in_capture(&self, cell: &Cell, stream: StreamId, cause: &Cause) -> Result<()> {
        let is_candidate = |state: &State, entry: &Deferred| {
            !entry.markers.is_empty() && state.place_of(state.blocks[entry.block].segment).1 == stream
        };
        let (on, left_over) = self.with(cell, |state| (state.policy.reuse_in_capture, state.fences.has_unfenced()));
        if !on {
            return Ok(());
        }
        if left_over {
            // Of these, destructors could not say what they come after.
            self.retry_unfenced(cell, cause)?;
        }
        if !self.with(cell, |state| state.deferred.iter().any(|entry| is_candidate(state, entry))) {
            return Ok(());
        }
        let done = self.ancestors(stream)?;
        self.with(cell, |state| {
            let deferred = std::mem::take(&mut state.deferred);
            let is_done = |entry: &Deferred| {
                is_candidate(state, entry) && entry.markers.iter().all(|marker| done.contains(marker))
            };
            let (reusable, kept): (Vec<_>, Vec<_>) = deferred.into_iter().partition(is_done);
            state.deferred = kept;
            for entry in reusable {
                state.blocks[entry.block].extra = None;
                state.complete_free(entry.block, cause);
            }
        });
        Ok(())
    }

    /// All nodes that the stream's next work comes after.
    fn ancestors(&self, stream: StreamId) -> Result<FxHashSet<NodeId>> {
        let mut edges = self.driver().capture_topology(stream)?.edges;
        edges.sort_unstable_by_key(|&(_, to)| to);
        let mut open = self.driver().capture_dependencies(stream)?;
        let mut seen: FxHashSet<NodeId> = open.iter().copied().collect();
        while let Some(node) = open.pop() {
            let first = edges.partition_point(|&(_, to)| to < node);
            for &(from, _) in edges[first..].iter().take_while(|&&(_, to)| to == node) {
                if seen.insert(from) {
                    open.push(from);
                }
            }
        }
        Ok(seen)
    }

    /// The last nodes of all `streams`; none if one of them does not capture, or does not say.
    fn markers(&self, cell: &Cell, streams: &[StreamId]) -> Vec<NodeId> {
        if !self.with(cell, |state| state.policy.reuse_in_capture) {
            return Vec::new();
        }
        let mut markers = Vec::new();
        for &stream in streams {
            match self.driver().capture_dependencies(stream) {
                Ok(nodes) => markers.extend(nodes),
                Err(_) => return Vec::new(),
            }
        }
        markers
    }

    /// The streams that a block was allocated for and used on.
    fn streams_of(&self, cell: &Cell, block: BlockKey) -> Vec<StreamId> {
        self.with(cell, |state| state.streams_of(block).collect())
    }
}

impl State {
    fn streams_of(&self, block: BlockKey) -> impl Iterator<Item = StreamId> + '_ {
        let entry = &self.blocks[block];
        let uses = entry.extra.iter().flat_map(|extra| extra.uses.unfenced().iter().chain(&extra.uses_in_capture));
        std::iter::once(self.place_of(entry.segment).1).chain(uses.copied())
    }
}
