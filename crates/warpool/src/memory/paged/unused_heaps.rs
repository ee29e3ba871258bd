//! Heaps in which nothing is allocated, of streams that may have gone. `adoption.rs` says what for.

use std::collections::VecDeque;
use std::sync::Arc;

use warpool_driver::StreamId;

use super::ids::HeapId;
use crate::PooledEvent;

/// How many unused heaps are remembered. All others are retired later (`retire.rs`).
const HEAPS_MAX: usize = 32;

/// Heaps in which nothing is allocated, the one that was used first at the front.
#[derive(Debug, Default)]
pub(super) struct UnusedHeaps {
    pub(super) heaps: VecDeque<UnusedHeap>,
    /// Whether no stream gets them.
    pub(super) never_adopted: bool,
    /// How many heaps were added.
    pub(super) added: u64,
    /// The stream with the highest id that has had a heap.
    newest: Option<StreamId>,
}

#[derive(Debug)]
pub(super) struct UnusedHeap {
    pub(super) number: HeapId,
    /// How often its last block had been freed.
    pub(super) ends: u64,
    /// How many heaps had been added.
    pub(super) added: u64,
    /// After what bystanders had submitted when it was seen to be unused; `None` if they are to be recorded.
    pub(super) bystanders: Option<Arc<[Arc<PooledEvent>]>>,
}

impl UnusedHeaps {
    /// A heap is about to be added. Returns whether it is the first of its stream: ids are never used again.
    pub(super) fn note_added(&mut self, stream: StreamId) -> bool {
        self.added += 1;
        let is_new = self.newest.is_none_or(|newest| newest < stream);
        self.newest = self.newest.max(Some(stream));
        is_new
    }

    /// A heap was looked at. `ends` is how often its last block was freed, if nothing is allocated in it and its stream
    /// may be destroyed.
    pub(super) fn note(&mut self, number: HeapId, ends: Option<u64>) {
        self.heaps.retain(|heap| heap.number != number);
        if let Some(ends) = ends {
            self.heaps.push_back(UnusedHeap { number, ends, added: self.added, bystanders: None });
        }
        if self.heaps.len() > HEAPS_MAX {
            self.heaps.pop_front();
        }
    }
}
