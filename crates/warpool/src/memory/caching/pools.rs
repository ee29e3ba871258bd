//! Private pools and the scopes that route requests to them.
//!
//! A pool has uses: its maker, open scopes, graphs. Without any it is *freeable*: it gives out nothing new, and once
//! its last segment is gone it is gone too. That is asked of the segments themselves, so nothing has to be counted in
//! pairs.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use warpool_driver::{CaptureState, DeviceId, DevicePtr, StreamId};

use super::block::Standing;
use super::state::{Bin, BinKey, State};
use super::{CachingAllocator, Cell};
use crate::capture::CaptureStatus;
use crate::memory::journal::Cause;
use crate::memory::stream_fence;
use crate::memory::{MemPoolId, PoolKeeper, PoolOptions, Route, SegmentKind, StackLevel, Upstream};
use crate::{Error, Result};

/// A pool of one device.
pub(super) struct Pool {
    /// Small and large.
    pub(super) bins: [BinKey; 2],
    /// Nobody uses a pool with none.
    pub(super) uses: u32,
    /// Threads that are at work on it without the lock: until they are done it is not forgotten.
    visitors: u32,
    pub(super) upstream: Option<Arc<dyn Upstream>>,
    pub(super) use_on_oom: bool,
    /// Whether captures took memory from it: what they gave back is free for other captures, but their graphs go on
    /// using it.
    has_graphs: bool,
    /// Streams that use its memory beside those that it was allocated for.
    pub(super) used_by: Vec<StreamId>,
    /// Whether streams that nobody can name may use it too.
    used_anywhere: bool,
}

impl State {
    /// Adds a pool and returns its bins.
    pub(super) fn add_pool(
        &mut self,
        id: MemPoolId,
        upstream: Option<Arc<dyn Upstream>>,
        no_split: bool,
    ) -> [BinKey; 2] {
        let bins = [SegmentKind::Small, SegmentKind::Large].map(|kind| {
            let has_upstream = upstream.is_some();
            self.bins.insert(Bin { pool: id, kind, has_upstream, no_split, lanes: Vec::new(), searches: 0 })
        });
        let (use_on_oom, has_graphs, used_by, used_anywhere) = (false, false, Vec::new(), false);
        self.pools
            .insert(id, Pool { bins, uses: 1, visitors: 0, upstream, use_on_oom, has_graphs, used_by, used_anywhere });
        bins
    }

    pub(super) fn pool(&self, id: MemPoolId) -> Result<&Pool> {
        self.pools.get(&id).ok_or(Error::UnknownPool { pool: id, device: self.device })
    }

    /// The pool, if it is still used.
    fn pool_in_use(&mut self, id: MemPoolId) -> Result<&mut Pool> {
        let device = self.device;
        let pool = self.pools.get_mut(&id).ok_or(Error::UnknownPool { pool: id, device })?;
        if pool.uses == 0 { Err(Error::PoolReleased { pool: id }) } else { Ok(pool) }
    }

    /// Pools that nobody uses any more.
    pub(super) fn freeable_pools(&self) -> Vec<MemPoolId> {
        self.pools.iter().filter(|(_, pool)| pool.uses == 0).map(|(&id, _)| id).collect()
    }

    /// Pools whose free blocks may serve the default pool in need. Not those that graphs work in: they would write into
    /// what others were given.
    pub(super) fn pools_for_oom(&self) -> Vec<MemPoolId> {
        let serves = |pool: &Pool| pool.use_on_oom && pool.uses > 0 && !pool.has_graphs;
        self.pools.iter().filter(|(_, pool)| serves(pool)).map(|(&id, _)| id).collect()
    }

    /// Notes that a capture takes memory from a pool.
    pub(super) fn note_capture(&mut self, id: MemPoolId) {
        if let Some(pool) = self.pools.get_mut(&id) {
            pool.has_graphs = true;
        }
    }

    /// Notes that a thread is at work on a pool, and returns its bins.
    pub(super) fn visit(&mut self, id: MemPoolId) -> Result<[BinKey; 2]> {
        let device = self.device;
        let pool = self.pools.get_mut(&id).ok_or(Error::UnknownPool { pool: id, device })?;
        pool.visitors += 1;
        Ok(pool.bins)
    }

    /// The thread is done with it. As [`forget_if_empty`](Self::forget_if_empty).
    #[must_use = "to be dropped without the lock"]
    pub(super) fn leave(&mut self, id: MemPoolId) -> Option<Pool> {
        self.pools.get_mut(&id).expect("a pool with visitors stays").visitors -= 1;
        self.forget_if_empty(id)
    }

    /// Forgets a pool that nobody uses and that holds nothing. What is left of it is dropped without the lock: with it
    /// may go its source, whose destructor is the program's and may drop blocks.
    #[must_use = "to be dropped without the lock"]
    fn forget_if_empty(&mut self, id: MemPoolId) -> Option<Pool> {
        let pool = self.pools.get(&id)?;
        let is_empty = pool.bins.iter().all(|&bin| self.bins[bin].lanes.is_empty());
        if pool.uses > 0 || pool.visitors > 0 || !is_empty {
            return None;
        }
        let pool = self.pools.remove(&id)?;
        for bin in pool.bins {
            self.bins.remove(bin);
        }
        Some(pool)
    }
}

impl CachingAllocator {
    /// Where a request goes that names no pool: the newest scope that it fits, or the default pool.
    pub(super) fn routed(&self, cell: &Cell, stream: StreamId) -> Result<MemPoolId> {
        cell.scopes.routed(stream, |stream| {
            let capture = CaptureStatus::of(self.driver(), stream)?.capture();
            Ok(capture.map_or(CaptureState::None, CaptureState::Active))
        })
    }

    /// Waits for the work that is in the streams that use a pool's memory beside its own: replays of graphs that are
    /// gone. The driver's free waits for all work, but unmapping does not. Says no if one of them captures, and can
    /// only be waited for later.
    pub(super) fn wait_for_users(&self, cell: &Cell, pool: MemPoolId) -> Result<bool> {
        let (users, anywhere) = self.with(cell, |state| {
            let pool = state.pool(pool)?;
            Ok::<_, Error>((pool.used_by.clone(), pool.used_anywhere))
        })?;
        if anywhere {
            // The device is all that can be waited for, which would break any capture.
            if self.has_captures(cell) {
                return Ok(false);
            }
            self.driver().device_synchronize(cell.device)?;
            // Nobody can use a pool again that is released: what was under way is done for good.
            self.with(cell, |state| {
                if let Some(pool) = state.pools.get_mut(&pool).filter(|pool| pool.uses == 0) {
                    pool.used_anywhere = false;
                }
            });
        }
        for stream in users {
            if !stream_fence::wait_for_stream(&self.pending_frees(cell, &Cause::default()), stream)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// As [`record_pool_use`](PoolKeeper::record_pool_use), of work on streams that nobody can name: replays that a
    /// framework makes by itself. When the pool's memory goes back to the driver, all work of the device is waited for;
    /// while a capture is under way it does not go back.
    pub fn record_pool_use_anywhere(&self, device: DeviceId, pool: MemPoolId) -> Result<()> {
        self.with(self.cell(device)?, |state| {
            state.pool_in_use(pool)?.used_anywhere = true;
            Ok(())
        })
    }

    fn create(&self, device: DeviceId, id: MemPoolId, options: PoolOptions) -> Result<MemPoolId> {
        let cell = self.cell(device)?;
        self.with(cell, |state| {
            state.add_pool(id, options.upstream, options.no_split);
            state.pool_in_use(id)?.use_on_oom = options.use_on_oom;
            Ok(id)
        })
    }
}

impl PoolKeeper for CachingAllocator {
    fn create_pool(&self, device: DeviceId, options: PoolOptions) -> Result<MemPoolId> {
        let user = self.next_user_pool.fetch_add(1, Ordering::Relaxed);
        self.create(device, MemPoolId { graph: 0, user }, options)
    }

    fn create_graph_pool(&self, device: DeviceId) -> Result<MemPoolId> {
        let graph = self.next_graph_pool.fetch_add(1, Ordering::Relaxed);
        self.create(device, MemPoolId { graph, user: 0 }, PoolOptions::default())
    }

    fn retain_pool(&self, device: DeviceId, pool: MemPoolId) -> Result<()> {
        self.with(self.cell(device)?, |state| {
            state.pool_in_use(pool)?.uses += 1;
            Ok(())
        })
    }

    fn release_pool(&self, device: DeviceId, pool: MemPoolId) -> Result<()> {
        let forgotten = self.with(self.cell(device)?, |state| {
            if pool.is_default() {
                return Err(Error::PoolReleased { pool });
            }
            let entry = state.pool_in_use(pool)?;
            entry.uses -= 1;
            if entry.uses == 0 {
                entry.use_on_oom = false;
                for bin in entry.bins {
                    state.bins[bin].no_split = false;
                }
                return Ok(state.forget_if_empty(pool));
            }
            Ok(None)
        });
        forgotten.map(drop)
    }

    fn pool_uses(&self, device: DeviceId, pool: MemPoolId) -> Result<u32> {
        self.with(self.cell(device)?, |state| Ok(state.pool(pool)?.uses))
    }

    fn set_use_on_oom(&self, device: DeviceId, pool: MemPoolId, on: bool) -> Result<()> {
        self.with(self.cell(device)?, |state| {
            state.pool_in_use(pool)?.use_on_oom = on;
            Ok(())
        })
    }

    fn begin_routing(&self, device: DeviceId, pool: MemPoolId, route: Route) -> Result<()> {
        let cell = self.cell(device)?;
        // Not with the scopes locked: it may tell trackers what another thread did, and they may ask for memory.
        self.retain_pool(device, pool)?;
        let opened = cell.scopes.begin(pool, route);
        if opened.is_err() {
            self.release_pool(device, pool)?;
        }
        opened
    }

    fn reroute(&self, device: DeviceId, pool: MemPoolId, routes: &[Route]) -> Result<()> {
        self.cell(device)?.scopes.reroute(pool, routes)
    }

    fn end_routing(&self, device: DeviceId, pool: MemPoolId) -> Result<()> {
        self.cell(device)?.scopes.end(pool)?;
        self.release_pool(device, pool)
    }

    fn capture_began(&self, device: DeviceId) -> Result<()> {
        let cell = self.cell(device)?;
        cell.captures.fetch_add(1, Ordering::AcqRel);
        // What earlier captures gave back can be looked after now, and not in this one: graphs that share a pool are
        // captured one right behind the other.
        let outcome = self.process_pending(cell, &self.cause(cell, StackLevel::State));
        if outcome.is_err() {
            cell.captures.fetch_sub(1, Ordering::AcqRel);
        }
        outcome
    }

    fn capture_ended(&self, device: DeviceId) -> Result<()> {
        let captures = &self.cell(device)?.captures;
        let ended = captures.fetch_update(Ordering::AcqRel, Ordering::Acquire, |count| count.checked_sub(1));
        ended.map(drop).map_err(|_| Error::NotCapturing { device })
    }

    fn record_pool_use(&self, device: DeviceId, pool: MemPoolId, stream: StreamId) -> Result<()> {
        self.with(self.cell(device)?, |state| {
            let used_by = &mut state.pool_in_use(pool)?.used_by;
            if !used_by.contains(&stream) {
                used_by.push(stream);
            }
            Ok(())
        })
    }

    fn has_exactly(&self, device: DeviceId, pool: MemPoolId, live: &[DevicePtr]) -> Result<bool> {
        self.with(self.cell(device)?, |state| {
            state.pool(pool)?;
            let mut wanted: Vec<u64> = live.iter().map(|ptr| ptr.0).collect();
            let mut there: Vec<u64> = state
                .blocks
                .values()
                .filter(|block| block.standing == Standing::Taken && state.bin_of(block.segment).pool == pool)
                .map(|block| block.ptr)
                .collect();
            wanted.sort_unstable();
            there.sort_unstable();
            Ok(wanted == there)
        })
    }
}
