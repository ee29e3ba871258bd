//! The streams that use one block. Whether they have passed is in `queues.rs`, under another lock.

use rustc_hash::FxHashSet;
use smallvec::SmallVec;
use warpool_driver::StreamId;

/// Mostly one stream uses a block beside its own.
pub(super) type Streams = SmallVec<[StreamId; 2]>;

/// The streams that use a block beside its own, and the progress of its free. Kept with the block, under its owner's
/// lock.
#[derive(Debug, Default)]
pub(crate) struct StreamUses {
    /// Streams without a fence yet.
    streams: Streams,
    /// Incomplete fences, plus one while a thread is recording fences, so that the block is not reclaimed meanwhile.
    outstanding: u32,
    freed: bool,
    /// Whether the block is in the list of unfenced ones.
    listed: bool,
}

/// What is to be done with a block in whose streams fences were recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AfterFencing {
    /// To be listed as unfenced.
    List,
    /// No stream may use it any more.
    Reclaim,
    /// Nothing, until its last fence has passed, or while it is listed already.
    Wait,
}

impl StreamUses {
    /// Streams that used the block.
    pub(crate) fn of(streams: Vec<StreamId>) -> Self {
        Self { streams: streams.into(), ..Self::default() }
    }

    /// Records that `stream` uses the block. A use that is added while a fence for the same stream is being recorded is
    /// another use, with a fence of its own.
    pub(crate) fn add(&mut self, stream: StreamId) {
        if !self.streams.contains(&stream) {
            self.streams.push(stream);
        }
    }

    /// Records that these streams use the block, which are distinct and may be many.
    pub(crate) fn add_all(&mut self, streams: impl IntoIterator<Item = StreamId>) {
        let known: FxHashSet<StreamId> = self.streams.iter().copied().collect();
        self.streams.extend(streams.into_iter().filter(|stream| !known.contains(stream)));
    }

    /// Streams without a fence yet.
    pub(crate) fn unfenced(&self) -> &[StreamId] {
        &self.streams
    }

    /// Whether no stream may still use the block.
    pub(crate) fn is_clear(&self) -> bool {
        self.streams.is_empty() && self.outstanding == 0
    }

    /// The block was freed: from here on fences may be recorded for it.
    pub(crate) fn mark_freed(&mut self) {
        self.freed = true;
    }

    /// Whether the block is freed and not reclaimed yet.
    pub(crate) fn is_freed(&self) -> bool {
        self.freed
    }

    /// Whether the block is freed and no stream may still use it. Returns `true` to one caller only, which reclaims it.
    pub(crate) fn take_reclaimable(&mut self) -> bool {
        let reclaimable = self.freed && self.is_clear();
        if reclaimable {
            self.freed = false;
        }
        reclaimable
    }

    /// A fence of the block has passed.
    pub(crate) fn fence_passed(&mut self) {
        self.outstanding -= 1;
    }

    /// The streams to record fences in, each counted as outstanding from here on. `None` if the block is not freed: it
    /// was reclaimed by another thread, and may be allocated again.
    pub(super) fn begin_fencing(&mut self) -> Option<Streams> {
        if !self.freed {
            return None;
        }
        let mut streams = std::mem::take(&mut self.streams);
        if crate::defect::Defect::FenceForgetsThirdStream.is_on() {
            streams.truncate(2);
        }
        self.outstanding += streams.len() as u32 + 1;
        Some(streams)
    }

    /// Ends recording: `done` streams needed no fence, and in those `left` none can be recorded now.
    pub(super) fn end_fencing(&mut self, done: u32, left: &[StreamId]) -> AfterFencing {
        self.outstanding -= 1 + done + left.len() as u32;
        left.iter().for_each(|&stream| self.add(stream));
        if !self.streams.is_empty() && self.list() {
            AfterFencing::List
        } else if self.is_clear() {
            AfterFencing::Reclaim
        } else {
            AfterFencing::Wait
        }
    }

    /// The block is to be listed as unfenced. Returns `false` if it is already.
    pub(super) fn list(&mut self) -> bool {
        !std::mem::replace(&mut self.listed, true)
    }

    /// The block has left the list of unfenced ones.
    pub(super) fn unlist(&mut self) {
        self.listed = false;
    }
}
