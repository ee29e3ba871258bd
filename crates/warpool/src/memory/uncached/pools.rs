//! The private pools of one device. Nothing is cached, so a pool consists of an id that is stored with each block, its
//! users, and the blocks that captures allocated from it, which stay until the pool has no users.
//!
//! The source is notified when routing begins and ends and when a pool is released. Destructors end routing and release
//! pools, but must not call the source. So events are queued, and the next call that may call the source delivers them
//! in order.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::thread::{self, ThreadId};

use warpool_driver::{DeviceId, Driver, StreamId};

use crate::memory::scopes::Scopes;
use crate::memory::{MemPoolId, PoolUser, PoolUses, Route};
use crate::{Error, Result, lock};

/// An event of a private pool that a source is notified of.
#[derive(Clone, Copy, Debug)]
pub enum PoolEvent {
    /// Routing to the pool began.
    Begin(MemPoolId),
    /// Routing to the pool ended.
    End(MemPoolId),
    /// The pool has no users any more. Sent once for each `Begin`.
    Release(MemPoolId),
}

pub(super) struct DevicePools {
    device: DeviceId,
    scopes: Scopes,
    table: Mutex<PoolTable>,
    /// Whether events are queued. If none are, a call takes no lock to deliver them. Changed under the lock.
    has_events: AtomicBool,
    /// Signalled when a thread stops delivering events.
    delivered: Condvar,
}

struct PoolTable {
    by_id: BTreeMap<MemPoolId, Pool>,
    events: VecDeque<PoolEvent>,
    /// The thread that is delivering events.
    delivering: Option<ThreadId>,
    /// Pools that were removed and may still have statistics.
    removed: Vec<MemPoolId>,
}

#[derive(Default)]
struct Pool {
    uses: PoolUses,
    /// The number of blocks that are allocated from it or about to be, until the source has them back.
    blocks: usize,
    /// How often the source was notified that routing began.
    begun: u32,
    /// Streams that use its memory without being its allocation streams.
    streams: BTreeSet<StreamId>,
    /// Serials of blocks that captures allocated and that were freed since.
    kept: Vec<u64>,
}

impl Pool {
    fn is_released(&self) -> bool {
        self.uses.total() == 0
    }
}

impl PoolTable {
    fn in_use(&mut self, id: MemPoolId, device: DeviceId) -> Result<&mut Pool> {
        let pool = self.by_id.get_mut(&id).ok_or(Error::UnknownPool { pool: id, device })?;
        if pool.is_released() { Err(Error::PoolReleased { pool: id }) } else { Ok(pool) }
    }

    fn remove_if_empty(&mut self, id: MemPoolId) {
        if self.by_id.get(&id).is_some_and(|pool| pool.is_released() && pool.blocks == 0) {
            self.by_id.remove(&id);
            self.removed.push(id);
        }
    }
}

/// A block that a pool counts before it is allocated. Dropping it ends that.
pub(super) struct PoolSlot<'a> {
    pools: &'a DevicePools,
    pool: MemPoolId,
}

impl PoolSlot<'_> {
    pub(super) fn pool(&self) -> MemPoolId {
        self.pool
    }

    /// Called when the block is allocated: it counts until [`DevicePools::remove_block`].
    pub(super) fn fill(self) {
        std::mem::forget(self);
    }
}

impl Drop for PoolSlot<'_> {
    fn drop(&mut self) {
        self.pools.remove_block(self.pool);
    }
}

/// Lets other threads deliver events again, also after a panic of the source.
struct Delivering<'a>(&'a DevicePools);

impl Drop for Delivering<'_> {
    fn drop(&mut self) {
        lock(&self.0.table).delivering = None;
        self.0.delivered.notify_all();
    }
}

impl DevicePools {
    pub(super) fn new(device: DeviceId) -> Self {
        let default = Pool { uses: PoolUses::CREATED, ..Pool::default() };
        let by_id = [(MemPoolId::DEFAULT, default)].into();
        let table = PoolTable { by_id, events: VecDeque::new(), delivering: None, removed: Vec::new() };
        Self {
            device,
            scopes: Scopes::default(),
            table: Mutex::new(table),
            has_events: AtomicBool::new(false),
            delivered: Condvar::new(),
        }
    }

    /// Counts a block in the pool that a request names or is routed to.
    pub(super) fn reserve_slot(
        &self,
        named: Option<MemPoolId>,
        stream: StreamId,
        driver: &dyn Driver,
    ) -> Result<PoolSlot<'_>> {
        let route = || self.scopes.routed(stream, driver);
        let mut pool = named.map_or_else(route, Ok)?;
        loop {
            let reserved = lock(&self.table).in_use(pool, self.device).map(|pool| pool.blocks += 1);
            let Err(error) = reserved else { return Ok(PoolSlot { pools: self, pool }) };
            // Another thread may have closed the scope meanwhile. The request is then routed again, as if it came
            // later.
            let now = if named.is_none() { route()? } else { pool };
            if now == pool {
                return Err(error);
            }
            pool = now;
        }
    }

    /// The source has a block of the pool back.
    pub(super) fn remove_block(&self, id: MemPoolId) {
        let mut table = lock(&self.table);
        table.by_id.get_mut(&id).expect("a pool with blocks is not removed").blocks -= 1;
        table.remove_if_empty(id);
    }

    /// Keeps a freed block that a capture allocated, if its pool is private and still in use. Returns whether it does.
    pub(super) fn keep_for_graph(&self, id: MemPoolId, serial: u64) -> bool {
        match lock(&self.table).by_id.get_mut(&id) {
            Some(pool) if !id.is_default() && !pool.is_released() => {
                pool.kept.push(serial);
                true
            }
            _ => false,
        }
    }

    /// Streams that use the pool's memory without being its allocation streams.
    pub(super) fn streams_of(&self, id: MemPoolId) -> Vec<StreamId> {
        lock(&self.table).by_id.get(&id).map(|pool| pool.streams.iter().copied().collect()).unwrap_or_default()
    }

    pub(super) fn create(&self, id: MemPoolId) {
        lock(&self.table).by_id.insert(id, Pool { uses: PoolUses::CREATED, ..Pool::default() });
    }

    pub(super) fn retain(&self, id: MemPoolId, user: PoolUser) -> Result<()> {
        lock(&self.table).in_use(id, self.device)?.uses.add(user);
        Ok(())
    }

    /// Ends one use of `user`. Returns the serials of blocks that the pool no longer keeps.
    pub(super) fn release(&self, id: MemPoolId, user: PoolUser) -> Result<Vec<u64>> {
        let mut table = lock(&self.table);
        let pool = table.in_use(id, self.device)?;
        pool.uses.end(id, user)?;
        if !pool.is_released() {
            return Ok(Vec::new());
        }
        let (begun, kept) = (std::mem::take(&mut pool.begun), std::mem::take(&mut pool.kept));
        table.events.extend((0..begun).map(|_| PoolEvent::Release(id)));
        self.publish_events(&table);
        table.remove_if_empty(id);
        Ok(kept)
    }

    /// The pools that were removed since the last call.
    pub(super) fn take_removed(&self) -> Vec<MemPoolId> {
        std::mem::take(&mut lock(&self.table).removed)
    }

    pub(super) fn uses(&self, id: MemPoolId) -> Result<u32> {
        let uses = lock(&self.table).by_id.get(&id).map(|pool| pool.uses.total());
        uses.ok_or(Error::UnknownPool { pool: id, device: self.device })
    }

    /// Fails unless the pool is in use.
    pub(super) fn expect_in_use(&self, id: MemPoolId) -> Result<()> {
        lock(&self.table).in_use(id, self.device).map(drop)
    }

    pub(super) fn record_streams(&self, id: MemPoolId, streams: &[StreamId]) -> Result<()> {
        lock(&self.table).in_use(id, self.device)?.streams.extend(streams);
        Ok(())
    }

    /// Opens a scope of a pool that the caller retained for it.
    pub(super) fn begin_routing(&self, id: MemPoolId, route: Route, user: PoolUser) -> Result<()> {
        self.scopes.begin(id, route, user)?;
        let mut table = lock(&self.table);
        table.in_use(id, self.device)?.begun += 1;
        table.events.push_back(PoolEvent::Begin(id));
        self.publish_events(&table);
        Ok(())
    }

    pub(super) fn reroute(&self, id: MemPoolId, routes: &[Route], user: PoolUser) -> Result<()> {
        self.scopes.reroute(id, routes, user)
    }

    pub(super) fn end_routing(&self, id: MemPoolId, user: PoolUser) -> Result<()> {
        self.scopes.end(id, user)?;
        let mut table = lock(&self.table);
        table.events.push_back(PoolEvent::End(id));
        self.publish_events(&table);
        Ok(())
    }

    fn publish_events(&self, table: &PoolTable) {
        self.has_events.store(!table.events.is_empty(), Ordering::Release);
    }

    /// Delivers queued events to `notify`. If another thread is delivering, that thread delivers all of them. With
    /// `wait` this call waits for it, so that on return every event that was queued before has been delivered or has
    /// failed.
    #[inline]
    pub(super) fn deliver(&self, wait: bool, notify: impl Fn(PoolEvent) -> Result<()>) {
        if wait || self.has_events.load(Ordering::Acquire) {
            self.deliver_queued(wait, notify);
        }
    }

    fn deliver_queued(&self, wait: bool, notify: impl Fn(PoolEvent) -> Result<()>) {
        loop {
            let mut table = lock(&self.table);
            while let Some(other) = table.delivering {
                // A hook that calls the allocator must not wait for itself.
                if !wait || other == thread::current().id() {
                    return;
                }
                table = self.delivered.wait(table).unwrap_or_else(PoisonError::into_inner);
            }
            let Some(event) = table.events.pop_front() else { return };
            self.publish_events(&table);
            table.delivering = Some(thread::current().id());
            drop(table);
            let _delivering = Delivering(self);
            if let Err(error) = notify(event) {
                tracing::warn!(%error, ?event, "a pool event could not be delivered; it is retried");
                let mut table = lock(&self.table);
                table.events.push_front(event);
                self.publish_events(&table);
                return;
            }
        }
    }
}
