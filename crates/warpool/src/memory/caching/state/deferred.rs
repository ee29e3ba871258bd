//! Frees that wait for the end of a capture: no event may be recorded or queried in the streams that captured, so a
//! block that several streams used is deferred until the capture is over, or, with `graph_capture_record_stream_reuse`,
//! until the graph itself orders every use before the next work.
//!
//! Each deferred free waits for one stream, the first that was found to be capturing. Once that capture has ended, the
//! other streams of the block are examined. An ordinary call therefore reads the status of only a few streams, however
//! many frees are deferred.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

use rustc_hash::FxHashSet;
use warpool_driver::{NodeId, StreamId};

use super::DeviceState;
use crate::memory::caching::heap::BlockKey;
use crate::memory::report::EntryDetails;

/// The deferred frees of a device, in the order in which they were deferred.
#[derive(Default)]
pub(super) struct DeferredFrees {
    entries: BTreeMap<u64, Deferred>,
    next: u64,
    /// Deferred frees by the stream that they wait for.
    by_stream: BTreeMap<StreamId, BTreeSet<u64>>,
    /// Deferred frees of blocks whose uses were all captured, by the block's stream.
    captured: BTreeMap<StreamId, BTreeSet<u64>>,
    /// The stream whose status was read last, if a call reads only some of them.
    last_read: Option<StreamId>,
}

/// A deferred free.
struct Deferred {
    block: BlockKey,
    /// The stream of the block.
    stream: StreamId,
    waits_for: StreamId,
    /// The last nodes of every stream that used the block, at its free; empty if not all uses were captured.
    last_nodes: Vec<NodeId>,
}

impl DeferredFrees {
    #[inline]
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    fn insert(&mut self, entry: Deferred) {
        let number = self.next;
        self.next += 1;
        self.by_stream.entry(entry.waits_for).or_default().insert(number);
        if !entry.last_nodes.is_empty() {
            self.captured.entry(entry.stream).or_default().insert(number);
        }
        self.entries.insert(number, entry);
    }

    fn remove(&mut self, number: u64) -> BlockKey {
        let entry = self.entries.remove(&number).expect("a deferred free");
        remove_from(&mut self.by_stream, entry.waits_for, number);
        remove_from(&mut self.captured, entry.stream, number);
        entry.block
    }
}

fn remove_from(lists: &mut BTreeMap<StreamId, BTreeSet<u64>>, stream: StreamId, number: u64) {
    if let Some(list) = lists.get_mut(&stream) {
        list.remove(&number);
        if list.is_empty() {
            lists.remove(&stream);
        }
    }
}

impl DeviceState {
    /// Defers a pending free until `waits_for` is no longer capturing.
    pub(crate) fn defer(&mut self, block: BlockKey, waits_for: StreamId, last_nodes: Vec<NodeId>) {
        self.heap.set_deferred(block, true);
        let stream = self.heap.stream_of(block);
        self.deferred.insert(Deferred { block, stream, waits_for, last_nodes });
    }

    #[inline]
    pub(crate) fn has_deferred(&self) -> bool {
        self.deferred.len() > 0
    }

    /// How many streams deferred frees wait for, and which was read last if there are more than `at_once`.
    pub(crate) fn deferred_streams(&self, at_once: usize) -> (usize, Option<StreamId>) {
        let count = self.deferred.by_stream.len();
        (count, self.deferred.last_read.filter(|_| count > at_once))
    }

    /// Up to `count` streams that deferred frees wait for: those after `last`, then from the first.
    pub(crate) fn deferred_streams_after(&self, last: Option<StreamId>, count: usize) -> Vec<StreamId> {
        let streams = &self.deferred.by_stream;
        let after = last.map_or(Bound::Unbounded, Bound::Excluded);
        let wrapped = last.map(|last| streams.range(..=last)).into_iter().flatten();
        streams.range((after, Bound::Unbounded)).chain(wrapped).take(count).map(|(&stream, _)| stream).collect()
    }

    /// Takes the deferred frees that wait for these streams, in the order in which they were deferred; they are pending
    /// again. The next call continues after `last_read`.
    pub(crate) fn take_ready(&mut self, streams: &[StreamId], last_read: Option<StreamId>) -> Vec<BlockKey> {
        let of_streams = streams.iter().filter_map(|stream| self.deferred.by_stream.get(stream)).flatten();
        let mut numbers: Vec<u64> = of_streams.copied().collect();
        numbers.sort_unstable();
        self.deferred.last_read = last_read;
        let blocks: Vec<BlockKey> = numbers.into_iter().map(|number| self.deferred.remove(number)).collect();
        blocks.iter().for_each(|&block| self.heap.set_deferred(block, false));
        blocks
    }

    /// Whether blocks of `stream` are deferred whose uses were all captured.
    pub(crate) fn has_captured_frees(&self, stream: StreamId) -> bool {
        self.deferred.captured.contains_key(&stream)
    }

    /// Completes the frees of blocks of `stream` whose uses are all among the nodes `done`.
    pub(crate) fn complete_captured_frees(
        &mut self,
        stream: StreamId,
        done: &FxHashSet<NodeId>,
        details: &EntryDetails,
    ) {
        let is_done = |number: &u64| {
            crate::defect::Defect::CapturedFreesUnordered.is_on()
                || self.deferred.entries[number].last_nodes.iter().all(|node| done.contains(node))
        };
        let captured = self.deferred.captured.get(&stream).into_iter().flatten().copied();
        let reusable: Vec<u64> = captured.filter(is_done).collect();
        for number in reusable {
            let block = self.deferred.remove(number);
            self.heap.set_deferred(block, false);
            self.heap.clear_extra(block);
            self.complete_free(block, details);
        }
    }

    /// The capture that used a block is over: ending it joined the captured uses into its stream.
    pub(crate) fn clear_uses_in_capture(&mut self, block: BlockKey) {
        self.heap.uses_in_capture_mut(block).clear();
    }
}
