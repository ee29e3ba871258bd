//! The private pools of one device. Nothing is cached, so a pool consists of an id that is stored with each block, its
//! users, and the blocks that captures allocated from it, which stay until the pool has no users.
//!
//! The source is notified when routing begins and ends and when a pool is released. Destructors end routing and release
//! pools, but must not call the source. So events are queued, and the next call that may call the source delivers them
//! in order.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::thread::{self, ThreadId};

use warpool_driver::DeviceId;

use crate::memory::pool_table::PoolTable;
use crate::memory::{MemPoolId, PoolUser};
use crate::{Result, lock};

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
    table: Mutex<Pools>,
    /// Whether events are queued. If none are, a call takes no lock to deliver them. Changed under the lock.
    has_events: AtomicBool,
    /// Signalled when a thread stops delivering events.
    delivered: Condvar,
}

struct Pools {
    table: PoolTable<PoolBlocks>,
    events: VecDeque<PoolEvent>,
    /// The thread that is delivering events.
    delivering: Option<ThreadId>,
    /// Pools that were removed and may still have statistics.
    removed: Vec<MemPoolId>,
}

/// The blocks of a pool.
#[derive(Default)]
pub struct PoolBlocks {
    /// The number of blocks that are allocated from it or about to be, until the source has them back.
    count: usize,
    /// How often the source was notified that routing began.
    begun: u32,
    /// Serials of blocks that captures allocated and that were freed since.
    kept: Vec<u64>,
}

impl Pools {
    fn remove_if_empty(&mut self, id: MemPoolId) {
        if self.table.remove_if(id, |blocks| blocks.count == 0).is_some() {
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
        let table = PoolTable::new(device, PoolBlocks::default());
        let pools = Pools { table, events: VecDeque::new(), delivering: None, removed: Vec::new() };
        Self { table: Mutex::new(pools), has_events: AtomicBool::new(false), delivered: Condvar::new() }
    }

    /// One step under the lock.
    pub(super) fn with<R>(&self, step: impl FnOnce(&mut PoolTable<PoolBlocks>) -> R) -> R {
        step(&mut lock(&self.table).table)
    }

    /// Counts a block in the pool that a request names or is routed to.
    pub(super) fn reserve_slot(
        &self,
        named: Option<MemPoolId>,
        route: impl Fn() -> Result<MemPoolId>,
    ) -> Result<PoolSlot<'_>> {
        let mut pool = named.map_or_else(&route, Ok)?;
        loop {
            let reserved = self.with(|table| table.in_use(pool).map(|pool| pool.memory.count += 1));
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
        let mut pools = lock(&self.table);
        pools.table.find_mut(id).expect("a pool with blocks is not removed").memory.count -= 1;
        pools.remove_if_empty(id);
    }

    /// Keeps a freed block that a capture allocated, if its pool is private and still in use. Returns whether it does.
    pub(super) fn keep_for_graph(&self, id: MemPoolId, serial: u64) -> bool {
        !id.is_default() && self.with(|table| table.in_use(id).map(|pool| pool.memory.kept.push(serial)).is_ok())
    }

    /// Ends one use of `user`. Returns the serials of blocks that the pool no longer keeps.
    pub(super) fn end_use(&self, id: MemPoolId, user: PoolUser) -> Result<Vec<u64>> {
        let mut pools = lock(&self.table);
        let Some(pool) = pools.table.release(id, user)? else { return Ok(Vec::new()) };
        let PoolBlocks { begun, kept, .. } = &mut pool.memory;
        let (begun, kept) = (std::mem::take(begun), std::mem::take(kept));
        pools.events.extend((0..begun).map(|_| PoolEvent::Release(id)));
        self.publish_events(&pools);
        pools.remove_if_empty(id);
        Ok(kept)
    }

    /// The pools that were removed since the last call.
    pub(super) fn take_removed(&self) -> Vec<MemPoolId> {
        std::mem::take(&mut lock(&self.table).removed)
    }

    /// Routing to a pool in use began.
    pub(super) fn routing_began(&self, id: MemPoolId) -> Result<()> {
        let mut pools = lock(&self.table);
        pools.table.in_use(id)?.memory.begun += 1;
        pools.events.push_back(PoolEvent::Begin(id));
        self.publish_events(&pools);
        Ok(())
    }

    pub(super) fn routing_ended(&self, id: MemPoolId) {
        let mut pools = lock(&self.table);
        pools.events.push_back(PoolEvent::End(id));
        self.publish_events(&pools);
    }

    fn publish_events(&self, pools: &Pools) {
        self.has_events.store(!pools.events.is_empty(), Ordering::Release);
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
            let mut pools = lock(&self.table);
            while let Some(other) = pools.delivering {
                // A hook that calls the allocator must not wait for itself.
                if !wait || other == thread::current().id() {
                    return;
                }
                pools = self.delivered.wait(pools).unwrap_or_else(PoisonError::into_inner);
            }
            let Some(event) = pools.events.pop_front() else { return };
            self.publish_events(&pools);
            pools.delivering = Some(thread::current().id());
            drop(pools);
            let _delivering = Delivering(self);
            if let Err(error) = notify(event) {
                tracing::warn!(%error, ?event, "a pool event could not be delivered; it is retried");
                let mut pools = lock(&self.table);
                pools.events.push_front(event);
                self.publish_events(&pools);
                return;
            }
        }
    }
}
