//! Where unused blocks go: a front cache, a graph's pool, or the free ranges of the heap. No driver calls: segments
//! that are not to be kept are listed for `segments.rs`.

use std::sync::Arc;

use super::Shared;
use super::block::{HAS_STACK, IN_GRAPH_POOL, PinnedBlock, PinnedState, USED};
use super::front_cache::Kind;
use super::history::Details;
use crate::lock;
use crate::memory::Action;

impl Shared {
    /// Second half of a free that is not on the hot path: nothing uses the block any more.
    pub(super) fn complete_free(&self, block: Arc<PinnedBlock>, details: &Details) {
        self.history.record_free(Action::FreeCompleted, &block, details);
        lock(&block.usage).stack = None;
        block.clear_flags(USED | HAS_STACK);
        if block.flags() & IN_GRAPH_POOL == 0 {
            self.put_back(block);
            return;
        }
        block.set_state(PinnedState::Free);
        self.front.count_freed(block.home(), block.size());
        if let Err(block) = self.graph_pools.put(block) {
            self.put_away(block);
        }
    }

    /// Counts a block as free and puts it into its front cache. Returns whether there are segments to unpin.
    #[inline]
    pub(super) fn put_back(&self, block: Arc<PinnedBlock>) -> bool {
        block.set_state(PinnedState::Free);
        let keep = self.keeps(&block);
        match self.front.free(block, keep) {
            Ok(()) => false,
            Err(block) => self.merge(&[block]),
        }
    }

    /// Stores a block of a graph's pool, which was counted as free before.
    pub(super) fn put_away(&self, block: Arc<PinnedBlock>) {
        block.clear_flags(IN_GRAPH_POOL);
        let refused = if self.keeps(&block) { self.front.put(block) } else { Err(block) };
        if let Err(block) = refused {
            self.merge(&[block]);
        }
    }

    #[inline]
    pub(super) fn keeps(&self, block: &PinnedBlock) -> bool {
        block.size() <= self.limits.cached_max()
    }

    /// Merges blocks into the free ranges of the heap. Returns whether there are segments to unpin.
    pub(super) fn merge(&self, blocks: &[Arc<PinnedBlock>]) -> bool {
        let mut to_unpin = Vec::new();
        let pieces = self.heap.merge(blocks, |block, spare| {
            block.set_state(PinnedState::Merged);
            to_unpin.extend(spare.filter(|_| !self.keeps(block)));
        });
        drop(pieces);
        let any = !to_unpin.is_empty();
        if any {
            self.pending.with(|pending| pending.to_unpin.append(&mut to_unpin));
        }
        any
    }

    /// Merges blocks that were withheld for unknown graphs. Called when the allocator is closed: nothing uses them any
    /// more.
    pub(super) fn merge_leaked(&self) {
        let is_leaked =
            |block: &PinnedBlock| block.state() == PinnedState::PendingFree && lock(&block.usage).is_leaked();
        let leaked: Vec<_> = self.heap.lock_all().blocks().filter(|block| is_leaked(block)).cloned().collect();
        self.merge(&leaked);
    }

    /// Merges the blocks of all front caches.
    pub(super) fn empty_front_caches(&self) {
        for blocks in self.front.drain(Kind::All) {
            self.merge(&blocks);
        }
    }
}
