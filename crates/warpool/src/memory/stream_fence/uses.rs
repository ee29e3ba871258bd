//! The streams that use one block. Their fences are in `queues.rs`, under another lock.

use rustc_hash::FxHashSet;
use smallvec::SmallVec;
use warpool_driver::StreamId;

/// Usually at most one other stream uses a block.
pub(super) type Streams = SmallVec<[StreamId; 2]>;

/// The streams other than its own that use a block, and the progress of its free. Kept with the block, under its
/// owner's lock.
#[derive(Debug, Default)]
pub(crate) struct StreamUses {
    /// Streams without a fence yet.
    streams: Streams,
    /// Incomplete fences, plus one while a thread is recording fences, so that the block is not reclaimed meanwhile.
    outstanding: u32,
    freed: bool,
    /// Whether the block is in the unfenced list.
    listed: bool,
}

/// What to do with a block after fences were recorded for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AfterFencing {
    /// To be listed as unfenced.
    List,
    /// No stream may use it any more.
    Reclaim,
    /// Nothing: the block waits for its last fence, or is listed already.
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

    /// Records that these distinct streams use the block; there may be many.
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

    /// Marks the block as freed: fences may be recorded for it from now on.
    pub(crate) fn mark_freed(&mut self) {
        self.freed = true;
    }

    /// Whether the block is freed and not reclaimed yet.
    pub(crate) fn is_freed(&self) -> bool {
        self.freed
    }

    /// Whether the block is freed and no stream may still use it. Returns `true` to exactly one caller, which must
    /// reclaim it.
    pub(crate) fn take_reclaimable(&mut self) -> bool {
        let reclaimable = self.freed && self.is_clear();
        if reclaimable {
            self.freed = false;
        }
        reclaimable
    }

    /// Counts a fence of the block as passed.
    pub(crate) fn fence_passed(&mut self) {
        self.outstanding -= 1;
    }

    /// Counts further fences, each as outstanding from now on.
    pub(super) fn add_outstanding(&mut self, fences: u32) {
        self.outstanding += fences;
    }

    /// The streams to record fences in, each counted as outstanding from now on. `None` if the block is not freed: it
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

    /// Ends recording: `done` streams needed no fence; in the streams of `left`, none can be recorded now.
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

    /// Marks the block as listed. Returns `false` if it is already.
    pub(super) fn list(&mut self) -> bool {
        !std::mem::replace(&mut self.listed, true)
    }

    /// Marks the block as no longer in the unfenced list.
    pub(super) fn unlist(&mut self) {
        self.listed = false;
    }
}
