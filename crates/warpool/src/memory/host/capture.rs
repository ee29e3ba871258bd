//! Pinned memory in graphs. What a capture uses, its graph uses at every replay, so it goes to nobody else before the
//! graph is gone.
//!
//! Every pool of graphs that uses pinned memory has a [`GraphHostPool`] here; the graphs own it, together. It holds the
//! blocks that captures used, whichever way they were allocated, and, for the captures that follow, those that were
//! asked for in a capture and given back unused. When the last graph goes, so does the pool: its blocks then wait for
//! the streams that replays ran on, like any others.
//!
//! The rule: dropping a pool calls no driver.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, Weak};

use warpool_driver::{DeviceId, DriverError, ErrorCode};

use super::block::{BlockCell, POOLED, USED, Use};
use super::size::Fit;
use super::{HostBlock, Shared};
use crate::capture::CaptureRecord;
use crate::error::GraphError;
use crate::memory::{MemPoolId, StackLevel};
use crate::{Error, Result, Stream, lock};

/// Which pool: the allocator of device memory that named it, by its address, and the name. Graphs keep the allocator,
/// so the address is nobody else's meanwhile.
type PoolKey = (usize, DeviceId, MemPoolId);

/// The pools of one host allocator.
#[derive(Default)]
pub(super) struct GraphHostPools(Mutex<BTreeMap<PoolKey, Weak<GraphHostPool>>>);

/// The pinned memory of the graphs that share a pool.
pub(crate) struct GraphHostPool {
    contents: Mutex<Contents>,
}

#[derive(Default)]
struct Contents {
    /// Blocks that captures used.
    used: Vec<Arc<BlockCell>>,
    /// Blocks that captures gave back unused.
    idle: Vec<Arc<BlockCell>>,
    /// Streams that replays ran on.
    replays: Vec<Use>,
}

impl GraphHostPool {
    /// Notes that replays run on `stream`.
    pub(crate) fn record_replay(&self, stream: &Stream) {
        let mut contents = lock(&self.contents);
        let new = Use::of(stream);
        if !contents.replays.contains(&new) {
            contents.replays.push(new);
        }
    }

    /// Holds a block that a capture uses.
    fn hold(&self, cell: &Arc<BlockCell>) {
        let mut contents = lock(&self.contents);
        if !contents.used.iter().any(|other| Arc::ptr_eq(other, cell)) {
            contents.used.push(Arc::clone(cell));
            lock(&cell.notes).graphs += 1;
            cell.set_trait(USED);
        }
    }

    /// A block that was given back unused, the smallest that fits.
    fn take(&self, fit: &Fit) -> Option<Arc<BlockCell>> {
        let idle = &mut lock(&self.contents).idle;
        let sizes = fit.size..=fit.size + fit.slack;
        let candidates = idle.iter().enumerate().filter(|(_, cell)| sizes.contains(&cell.size));
        let (at, _) = candidates.min_by_key(|(_, cell)| cell.size)?;
        Some(idle.remove(at))
    }
}

impl Drop for GraphHostPool {
    fn drop(&mut self) {
        let contents = self.contents.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
        let Contents { used, idle, replays } = std::mem::take(contents);
        for cell in used {
            // The books are reached through the block, which moves on.
            let keep = Arc::clone(&cell);
            let (given_back, settled) = {
                let mut notes = lock(&cell.notes);
                notes.graphs -= 1;
                replays.iter().for_each(|&replay| notes.add_use(replay));
                let given_back = notes.given_back;
                (given_back, notes.settle())
            };
            if settled {
                keep.shared.complete(cell, &keep.shared.cause(StackLevel::All));
            } else if given_back {
                keep.shared.mark_later(cell);
            }
        }
        for cell in idle {
            let keep = Arc::clone(&cell);
            cell.clear_trait(POOLED);
            keep.shared.put_away(cell);
        }
    }
}

impl fmt::Debug for GraphHostPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let contents = lock(&self.contents);
        write!(f, "{} blocks used, {} idle", contents.used.len(), contents.idle.len())
    }
}

impl Shared {
    /// Notes that `stream` uses a block.
    pub(super) fn record_use(cell: &Arc<BlockCell>, stream: &Stream) -> Result<()> {
        let shared = &cell.shared;
        shared.instance.expect_same(stream.instance(), "the stream")?;
        match shared.instance.captures().find(stream) {
            Ok(Some(site)) => shared.graph_pool(&site.record).hold(cell),
            // A broken capture comes to nothing, but what was in the stream before it may still run.
            Ok(None) | Err(Error::Driver(DriverError { code: ErrorCode::StreamCaptureInvalidated, .. })) => {
                lock(&cell.notes).add_use(Use::of(stream));
            }
            Err(Error::Graph(GraphError::ForeignCapture)) => {
                tracing::warn!(%stream, ptr = format_args!("{:#x}", cell.ptr), "pinned memory is used by a capture that began past Warpool; it is never given out again");
                lock(&cell.notes).lost = true;
            }
            Err(error) => return Err(error),
        }
        cell.set_trait(USED);
        Ok(())
    }

    /// Memory for work on `stream`.
    pub(super) fn allocate_on(self: &Arc<Self>, bytes: u64, stream: &Stream) -> Result<HostBlock> {
        self.instance.expect_same(stream.instance(), "the stream")?;
        let site = match self.instance.captures().find(stream) {
            Ok(site) => site,
            // Its use will say what that means.
            Err(Error::Graph(GraphError::ForeignCapture)) => None,
            Err(error) => return Err(error),
        };
        let Some(site) = site.filter(|_| bytes > 0) else { return self.allocate(bytes, None) };
        let pool = self.graph_pool(&site.record);
        let fit = self.fit(bytes)?;
        let cause = self.cause(StackLevel::State);
        let home = self.home();
        let cell = match pool.take(&fit) {
            Some(cell) => {
                lock(&self.shards[home].0).count(cell.size);
                cell
            }
            None => {
                let cell = self.find(home, bytes, &fit, None, &cause)?;
                lock(&cell.notes).pool = Arc::downgrade(&pool);
                cell.set_trait(POOLED);
                cell
            }
        };
        Ok(self.hand_out(cell, home, bytes, &cause))
    }

    /// A block of a graph's pool comes back unused: for the next request in a capture of that pool, or, if that is
    /// gone, for anybody's.
    pub(super) fn put_into_pool(&self, cell: Arc<BlockCell>) {
        let pool = lock(&cell.notes).pool.upgrade();
        match pool {
            Some(pool) => lock(&pool.contents).idle.push(cell),
            None => {
                cell.clear_trait(POOLED);
                self.put_away(cell);
            }
        }
    }

    /// The pool of the graph that is being captured, which keeps it.
    fn graph_pool(&self, record: &CaptureRecord) -> Arc<GraphHostPool> {
        let key = (Arc::as_ptr(&record.allocator).addr(), record.device, record.pool);
        let pool = {
            let mut pools = lock(&self.graph_pools.0);
            pools.retain(|_, pool| pool.strong_count() > 0);
            match pools.get(&key).and_then(Weak::upgrade) {
                Some(pool) => pool,
                None => {
                    let pool = Arc::new(GraphHostPool { contents: Mutex::default() });
                    pools.insert(key, Arc::downgrade(&pool));
                    pool
                }
            }
        };
        record.keep_host_pool(&pool);
        pool
    }
}
