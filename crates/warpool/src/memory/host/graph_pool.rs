//! Pinned memory of graphs. A graph uses the blocks of its capture at every replay, so they are not reused before the
//! graph is gone.
//!
//! Every graph pool that uses pinned memory has a [`GraphHostPool`], which its graphs share. It holds the blocks that
//! captures used, however they were allocated, and keeps blocks that were allocated in a capture and freed unused for
//! later captures. It is dropped with the last graph: its blocks then wait for the streams that replays ran on, like
//! any others.
//!
//! A framework that captures graphs itself uses such a pool as [`HostGraphPool`].
//!
//! Rule: dropping a pool makes no driver call.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use warpool_driver::StreamId;

use super::block::{GraphPoolKey, IN_GRAPH_POOL, PinnedBlock, USED};
use super::history::Details;
use super::size_class::Fit;
use crate::lock;
use crate::memory::StackLevel;

/// The graph pools of one host allocator.
#[derive(Default)]
pub(super) struct GraphHostPools(Mutex<BTreeMap<GraphPoolKey, Weak<GraphHostPool>>>);

/// The pinned memory of the graphs that share a pool.
pub(super) struct GraphHostPool {
    key: GraphPoolKey,
    contents: Mutex<Contents>,
}

#[derive(Default)]
struct Contents {
    /// Blocks that captures used.
    used: Vec<Arc<PinnedBlock>>,
    /// Blocks that were freed unused.
    free: Vec<Arc<PinnedBlock>>,
    /// Streams on which replays of graphs that are gone may be under way.
    replay_streams: BTreeSet<StreamId>,
}

impl GraphHostPools {
    /// The pool of that key, created if there is none.
    pub(super) fn get(&self, key: GraphPoolKey) -> Arc<GraphHostPool> {
        let mut pools = lock(&self.0);
        pools.retain(|_, pool| pool.strong_count() > 0);
        if let Some(pool) = pools.get(&key).and_then(Weak::upgrade) {
            return pool;
        }
        let pool = Arc::new(GraphHostPool { key, contents: Mutex::default() });
        pools.insert(key, Arc::downgrade(&pool));
        pool
    }

    /// Returns a free block to its pool, for the next request of a capture; returns it if the pool is gone.
    pub(super) fn put(&self, block: Arc<PinnedBlock>) -> Result<(), Arc<PinnedBlock>> {
        let key = lock(&block.usage).pool;
        let pool = key.and_then(|key| lock(&self.0).get(&key).and_then(Weak::upgrade));
        match pool {
            Some(pool) => {
                lock(&pool.contents).free.push(block);
                Ok(())
            }
            None => Err(block),
        }
    }
}

/// The pinned memory that a capture, and later its graph, uses: one pool per host allocator.
#[derive(Default)]
pub(crate) struct CapturedHostPools(Vec<Arc<GraphHostPool>>);

impl CapturedHostPools {
    pub(super) fn add(&mut self, pool: &Arc<GraphHostPool>) {
        if !self.0.iter().any(|other| Arc::ptr_eq(other, pool)) {
            self.0.push(Arc::clone(pool));
        }
    }

    /// Records that replays may run on `streams`.
    pub(crate) fn record_replays(&self, streams: &[StreamId]) {
        self.0.iter().for_each(|pool| lock(&pool.contents).replay_streams.extend(streams));
    }
}

impl GraphHostPool {
    /// Records that a capture uses the block.
    pub(super) fn add_used(&self, block: &Arc<PinnedBlock>) {
        let mut contents = lock(&self.contents);
        if !contents.used.iter().any(|other| Arc::ptr_eq(other, block)) {
            contents.used.push(Arc::clone(block));
            lock(&block.usage).graphs += 1;
            block.set_flag(USED);
        }
    }

    /// The smallest free block that fits.
    pub(super) fn take(&self, fit: &Fit) -> Option<Arc<PinnedBlock>> {
        let free = &mut lock(&self.contents).free;
        let sizes = fit.size..=fit.size + fit.slack;
        let candidates = free.iter().enumerate().filter(|(_, block)| sizes.contains(&block.size()));
        let (at, _) = candidates.min_by_key(|(_, block)| block.size())?;
        Some(free.remove(at))
    }

    /// Adds a new block to the pool; it returns there when it is freed.
    pub(super) fn adopt(&self, block: &PinnedBlock) {
        lock(&block.usage).pool = Some(self.key);
        block.set_flag(IN_GRAPH_POOL);
    }
}

impl Drop for GraphHostPool {
    fn drop(&mut self) {
        let contents = self.contents.get_mut().unwrap_or_else(PoisonError::into_inner);
        let Contents { used, free, replay_streams } = std::mem::take(contents);
        if used.iter().chain(&free).any(|block| block.shared().instance.is_inherited()) {
            return;
        }
        let call = Details::default();
        for block in used {
            // The state is borrowed from the block, which is passed on.
            let keep = Arc::clone(&block);
            let (is_freed, reclaimable) = {
                let mut usage = lock(&block.usage);
                usage.graphs -= 1;
                usage.streams.add_all(replay_streams.iter().copied());
                let is_freed = usage.streams.is_freed();
                (is_freed, usage.take_reclaimable())
            };
            let details = keep.shared().details(StackLevel::All);
            if reclaimable {
                keep.shared().complete_free(block, &details);
            } else if is_freed {
                keep.shared().fence_later(block, &details);
            }
            call.take_panic(details);
        }
        for block in free {
            let keep = Arc::clone(&block);
            keep.shared().put_away(block);
        }
        call.finish();
    }
}

impl fmt::Debug for GraphHostPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let contents = lock(&self.contents);
        write!(f, "{} blocks used, {} free", contents.used.len(), contents.free.len())
    }
}
