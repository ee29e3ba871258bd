//! Private pools over a plug. Nothing is cached, so a pool is a name beside blocks, with its users; and what captures
//! took from it stays until it has none.
//!
//! The plug is told when routing begins and ends and when a pool is given up. Destructors end and give up, and must
//! call nobody: so what is to be told stands in a queue, and the next call that is no destructor delivers it, in its
//! order.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::Ordering;
use std::sync::{MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

use warpool_driver::{DeviceId, DevicePtr, StreamId};

use super::allocator::{Cell, NAME, PluggableAllocator};
use crate::memory::{MemPoolId, PoolKeeper, PoolOptions, Route, StackLevel};
use crate::{Error, Result, lock};

/// The pools of one device.
pub(super) struct Pools {
    by_id: BTreeMap<MemPoolId, Pool>,
    /// What the plug is to be told.
    words: VecDeque<Word>,
    /// The thread that is telling it.
    telling: Option<ThreadId>,
}

#[derive(Default)]
struct Pool {
    /// Nobody uses a pool with none.
    uses: u32,
    /// Blocks that are in it, or about to be, and are not back with the plug.
    blocks: usize,
    /// How often the plug was told that routing began.
    begun: u32,
    /// Streams that use its memory beside those that it was allocated for.
    used_by: Vec<StreamId>,
    /// Blocks that captures took and that their owners gave back: the pool has them in hand, by their numbers.
    kept: Vec<u64>,
}

#[derive(Clone, Copy)]
enum Word {
    Begin(MemPoolId),
    End(MemPoolId),
    Release(MemPoolId),
}

impl Pools {
    pub(super) fn new() -> Self {
        let default = Pool { uses: 1, ..Pool::default() };
        Self { by_id: [(MemPoolId::DEFAULT, default)].into(), words: VecDeque::new(), telling: None }
    }

    fn in_use(&mut self, id: MemPoolId, device: DeviceId) -> Result<&mut Pool> {
        let pool = self.by_id.get_mut(&id).ok_or(Error::UnknownPool { pool: id, device })?;
        if pool.uses == 0 { Err(Error::PoolReleased { pool: id }) } else { Ok(pool) }
    }

    /// A block more is about to be in the pool.
    pub(super) fn enter(&mut self, id: MemPoolId, device: DeviceId) -> Result<()> {
        self.in_use(id, device)?.blocks += 1;
        Ok(())
    }

    /// A block less.
    pub(super) fn leave(&mut self, id: MemPoolId) {
        self.by_id.get_mut(&id).expect("a pool with blocks stays").blocks -= 1;
        self.forget_if_empty(id);
    }

    /// Keeps a block that a capture took from the pool, if that is private and still used; whether it does.
    pub(super) fn keep(&mut self, id: MemPoolId, number: u64) -> bool {
        match self.by_id.get_mut(&id) {
            Some(pool) if !id.is_default() && pool.uses > 0 => {
                pool.kept.push(number);
                true
            }
            _ => false,
        }
    }

    /// Streams that use the pool's memory beside those that it was allocated for.
    pub(super) fn users(&self, id: MemPoolId) -> Vec<StreamId> {
        self.by_id.get(&id).map(|pool| pool.used_by.clone()).unwrap_or_default()
    }

    /// One use less. Returns the blocks that the pool no longer keeps.
    fn release(&mut self, id: MemPoolId, device: DeviceId) -> Result<Vec<u64>> {
        let pool = self.in_use(id, device)?;
        pool.uses -= 1;
        if pool.uses > 0 {
            return Ok(Vec::new());
        }
        let (begun, kept) = (std::mem::take(&mut pool.begun), std::mem::take(&mut pool.kept));
        self.words.extend((0..begun).map(|_| Word::Release(id)));
        self.forget_if_empty(id);
        Ok(kept)
    }

    fn forget_if_empty(&mut self, id: MemPoolId) {
        if self.by_id.get(&id).is_some_and(|pool| pool.uses == 0 && pool.blocks == 0) {
            self.by_id.remove(&id);
        }
    }
}

/// Lets others tell the plug again, also after a panic of its.
struct Telling<'a>(&'a Cell);

impl Drop for Telling<'_> {
    fn drop(&mut self) {
        lock(&self.0.pools).telling = None;
        self.0.told.notify_all();
    }
}

impl PluggableAllocator {
    /// Tells the plug what happened to pools. If another thread is at it, that one does it all.
    pub(super) fn deliver(&self, cell: &Cell) {
        self.deliver_or(cell, |_| None);
    }

    /// The same, but waits for the other thread: when this returns, the plug has heard all that was to be told before,
    /// unless it could not be.
    fn deliver_all(&self, cell: &Cell) {
        self.deliver_or(cell, |pools| {
            // A hook of the plug's that comes back here would wait for itself.
            let other = pools.telling != Some(thread::current().id());
            other.then(|| cell.told.wait(pools).unwrap_or_else(PoisonError::into_inner))
        });
    }

    /// Tells the plug; `busy` says what to do while somebody is at it: to wait, and look again, or nothing.
    fn deliver_or<'a>(&self, cell: &'a Cell, busy: impl Fn(MutexGuard<'a, Pools>) -> Option<MutexGuard<'a, Pools>>) {
        loop {
            let mut pools = lock(&cell.pools);
            while pools.telling.is_some() {
                let Some(waited) = busy(pools) else { return };
                pools = waited;
            }
            let Some(word) = pools.words.pop_front() else { return };
            pools.telling = Some(thread::current().id());
            drop(pools);
            let _telling = Telling(cell);
            let device = cell.desk.device;
            let told = self.call_plug(|plug| match word {
                Word::Begin(pool) => plug.begin_pool(device, pool),
                Word::End(pool) => plug.end_pool(device, pool),
                Word::Release(pool) => plug.release_pool(device, pool),
            });
            if let Err(error) = told {
                tracing::warn!(%error, "the plugged allocator could not be told about a pool; it is tried again");
                lock(&cell.pools).words.push_front(word);
                return;
            }
        }
    }

    /// One use less. Calls neither driver nor plug.
    fn release(&self, cell: &Cell, pool: MemPoolId) -> Result<()> {
        let kept = lock(&cell.pools).release(pool, cell.desk.device)?;
        self.with(cell, |books| kept.into_iter().for_each(|number| books.put_out_of_hand(number)));
        Ok(())
    }

    fn create(&self, device: DeviceId, id: MemPoolId) -> Result<MemPoolId> {
        let pool = Pool { uses: 1, ..Pool::default() };
        lock(&self.cell(device)?.pools).by_id.insert(id, pool);
        Ok(id)
    }
}

impl PoolKeeper for PluggableAllocator {
    /// [`Error::Unsupported`] with a source of its own: nothing is cached here, and the plug is the source of all. The
    /// other options have no effect.
    fn create_pool(&self, device: DeviceId, options: PoolOptions) -> Result<MemPoolId> {
        if options.upstream.is_some() {
            return Err(Error::Unsupported { allocator: NAME, what: "pools with a source of their own" });
        }
        let user = self.next_user_pool.fetch_add(1, Ordering::Relaxed);
        self.create(device, MemPoolId { graph: 0, user })
    }

    fn create_graph_pool(&self, device: DeviceId) -> Result<MemPoolId> {
        let graph = self.next_graph_pool.fetch_add(1, Ordering::Relaxed);
        self.create(device, MemPoolId { graph, user: 0 })
    }

    fn retain_pool(&self, device: DeviceId, pool: MemPoolId) -> Result<()> {
        lock(&self.cell(device)?.pools).in_use(pool, device)?.uses += 1;
        Ok(())
    }

    fn release_pool(&self, device: DeviceId, pool: MemPoolId) -> Result<()> {
        if pool.is_default() {
            return Err(Error::PoolReleased { pool });
        }
        self.release(self.cell(device)?, pool)
    }

    fn pool_uses(&self, device: DeviceId, pool: MemPoolId) -> Result<u32> {
        let pools = lock(&self.cell(device)?.pools);
        pools.by_id.get(&pool).map(|pool| pool.uses).ok_or(Error::UnknownPool { pool, device })
    }

    fn set_use_on_oom(&self, device: DeviceId, pool: MemPoolId, _on: bool) -> Result<()> {
        // No pool has free blocks that could help.
        lock(&self.cell(device)?.pools).in_use(pool, device).map(drop)
    }

    fn begin_routing(&self, device: DeviceId, pool: MemPoolId, route: Route) -> Result<()> {
        let cell = self.cell(device)?;
        self.retain_pool(device, pool)?;
        let opened = cell.scopes.begin(pool, route);
        if opened.is_err() {
            self.release(cell, pool)?;
            return opened;
        }
        {
            let mut pools = lock(&cell.pools);
            pools.in_use(pool, device)?.begun += 1;
            pools.words.push_back(Word::Begin(pool));
        }
        // What is allocated from now on lies in the pool, and the plug must know.
        self.deliver_all(cell);
        Ok(())
    }

    fn reroute(&self, device: DeviceId, pool: MemPoolId, routes: &[Route]) -> Result<()> {
        self.cell(device)?.scopes.reroute(pool, routes)
    }

    fn end_routing(&self, device: DeviceId, pool: MemPoolId) -> Result<()> {
        let cell = self.cell(device)?;
        cell.scopes.end(pool)?;
        lock(&cell.pools).words.push_back(Word::End(pool));
        self.release(cell, pool)
    }

    fn capture_began(&self, device: DeviceId) -> Result<()> {
        let cell = self.cell(device)?;
        self.captures.fetch_add(1, Ordering::AcqRel);
        self.deliver(cell);
        // What can go back does so now: during the capture more has to wait.
        self.settle(cell, &self.cause(cell, StackLevel::All));
        Ok(())
    }

    fn capture_ended(&self, device: DeviceId) -> Result<()> {
        self.cell(device)?;
        let ended = self.captures.fetch_update(Ordering::AcqRel, Ordering::Acquire, |count| count.checked_sub(1));
        ended.map(drop).map_err(|_| Error::NotCapturing { device })
    }

    fn record_pool_use(&self, device: DeviceId, pool: MemPoolId, stream: StreamId) -> Result<()> {
        let mut pools = lock(&self.cell(device)?.pools);
        let used_by = &mut pools.in_use(pool, device)?.used_by;
        if !used_by.contains(&stream) {
            used_by.push(stream);
        }
        Ok(())
    }

    fn has_exactly(&self, device: DeviceId, pool: MemPoolId, live: &[DevicePtr]) -> Result<bool> {
        let cell = self.cell(device)?;
        self.pool_uses(device, pool)?;
        let mut wanted = live.to_vec();
        wanted.sort_unstable();
        Ok(self.with(cell, |books| books.live_in(pool)) == wanted)
    }
}
