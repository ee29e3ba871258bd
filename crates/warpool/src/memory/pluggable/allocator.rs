//! A device allocator over a plug: the plug gives and takes, this keeps the books.
//!
//! # The life of an allocation
//! 1. The request is held against the limit, by what was asked for, and routed to a pool (`pools.rs`).
//! 2. The plug is asked. If it has nothing, callbacks under memory pressure may help, blocks on their way back are
//!    waited for, the plug is told to give up what it keeps for later, and it is asked once more (`fetch.rs`).
//! 3. What it gives must not overlap what it has not got back (`claims.rs`).
//! 4. Freed, a block goes back to the plug at once if only its own stream used it. Otherwise it waits for marks in the
//!    others (`release.rs`), unless the plug sees to that itself.
//!
//! # Captures
//! A block that a capture took from a private pool is kept for the graph: it goes back when the pool has lost its last
//! user and the replays are done, however early its owner freed it. It is not given out again meanwhile, since nothing
//! is cached here: a graph that takes and frees often needs the sum of it all. Any other block that a stream which
//! captures used goes back when that capture is over.
//!
//! # Where it differs from PyTorch's `CUDAPluggableAllocator`
//! - Everything that it refuses works: statistics, snapshots, histories, observers, the memory fraction, private pools.
//! - Nothing is the null address, and the plug is not called for it. A null address from the plug is out of memory.
//! - `init` gets the true number of devices.
//! - Pool hooks are called in their order, but those that end something may come with the next call of the allocator:
//!   destructors call nobody.
//! - Blocks that other streams used wait for them, if the plug has no hook for that.
//!
//! # Locks
//! Each device has one for its books and one for its pools, and there is one for addresses; each is held for one step,
//! none while another is taken, and never while a driver, the plug or an observer is called.

use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex};

use warpool_driver::{DeviceId, DevicePtr, Driver, RawHandle, StreamId};

use super::claims::Claims;
use super::pools::Pools;
use super::release::Marks;
use super::{BaseAllocation, ExternalAllocator, Handled, RawStream};
use crate::capture::RelaxedMode;
use crate::memory::books::Books;
use crate::memory::desk::Desk;
use crate::memory::history::StackNumbers;
use crate::memory::journal::Cause;
use crate::memory::scopes::Scopes;
use crate::memory::standing::Standing;
use crate::memory::{
    Allocation, DeviceAllocator, HistoryOptions, MemPoolId, Observers, PoolKeeper, Request, Settings, Snapshot,
    SnapshotOptions, StackLevel, Stat, Stats,
};
use crate::{Error, Instance, Result};

pub(super) const NAME: &str = "pluggable";

/// Device memory from a [`ExternalAllocator`], with nothing in between but books. See the [module](crate::memory) for how allocators
/// are used.
///
/// Dropping it gives nothing back: what destructors left is given to the plug by the next call, so
/// [trim](DeviceAllocator::trim) before.
pub struct PluggableAllocator {
    pub(super) instance: Instance,
    pub(super) plug: Arc<dyn ExternalAllocator>,
    pub(super) cells: Box<[Cell]>,
    pub(super) settings: Settings,
    pub(super) observers: Observers,
    pub(super) claims: Claims,
    /// How many captures are under way on all devices, of those that it was told of.
    pub(super) captures: AtomicU32,
    pub(super) next_user_pool: AtomicU32,
    pub(super) next_graph_pool: AtomicU32,
}

/// What there is per device.
pub(super) struct Cell {
    pub(super) desk: Desk,
    pub(super) scopes: Scopes,
    pub(super) pools: Mutex<Pools>,
    /// Rings when a thread no longer tells the plug about pools.
    pub(super) told: Condvar,
    pub(super) marks: Mutex<Marks>,
}

impl PluggableAllocator {
    /// An allocator for all devices of `instance` over `plug`, whose `init` is called. No limits.
    pub fn new(instance: &Instance, plug: Arc<dyn ExternalAllocator>) -> Result<Self> {
        Self::with_settings(instance, plug, Settings::default())
    }

    /// The same with settings, of which memory fraction and cap count; the others are shown in snapshots.
    pub fn with_settings(instance: &Instance, plug: Arc<dyn ExternalAllocator>, settings: Settings) -> Result<Self> {
        plug.init(instance.device_count())?;
        let cells = instance.devices().map(|device| Cell {
            desk: Desk::new(&device, settings.per_process_memory_fraction),
            scopes: Scopes::default(),
            pools: Mutex::new(Pools::new()),
            told: Condvar::new(),
            marks: Mutex::default(),
        });
        Ok(Self {
            instance: instance.clone(),
            plug,
            cells: cells.collect(),
            settings,
            observers: Observers::default(),
            claims: Claims::default(),
            captures: AtomicU32::new(0),
            next_user_pool: AtomicU32::new(1),
            next_graph_pool: AtomicU32::new(1),
        })
    }

    /// Where memory comes from.
    #[must_use]
    pub fn plug(&self) -> &Arc<dyn ExternalAllocator> {
        &self.plug
    }

    /// The allocation that `ptr`, which may lie inside of it, belongs to: by the plug's hook, or, where that does not
    /// say, by the books.
    pub fn base_allocation(&self, ptr: DevicePtr) -> Result<BaseAllocation> {
        let told = self.call_plug(|plug| plug.base_allocation(ptr))?;
        let known = |at| self.claims.around(at).map(|(ptr, bytes)| BaseAllocation { ptr, bytes: Some(bytes) });
        match told {
            Some(base) if base.bytes.is_some() => Ok(base),
            Some(base) => Ok(known(base.ptr).filter(|known| known.ptr == base.ptr).unwrap_or(base)),
            None => known(ptr).ok_or(Error::UnknownPointer { ptr }),
        }
    }

    pub(super) fn driver(&self) -> &dyn Driver {
        &**self.instance.driver()
    }

    pub(super) fn cell(&self, device: DeviceId) -> Result<&Cell> {
        let count = self.instance.device_count();
        self.cells.get(device.0 as usize).ok_or(Error::DeviceOutOfRange { index: device.0, count })
    }

    /// One step under a device's lock; trackers are told afterwards, without it.
    pub(super) fn with<R>(&self, cell: &Cell, step: impl FnOnce(&mut Books) -> R) -> R {
        cell.desk.with(&self.observers, step)
    }

    pub(super) fn cause(&self, cell: &Cell, level: StackLevel) -> Cause {
        cell.desk.cause(level, &self.observers, self.driver())
    }

    /// Calls the plug. It is foreign code, which may ask the driver for anything: no capture may break of it.
    pub(super) fn call_plug<R>(&self, call: impl FnOnce(&(dyn ExternalAllocator + 'static)) -> R) -> Result<R> {
        let _relaxed = RelaxedMode::begin(self.driver())?;
        Ok(call(&*self.plug))
    }

    /// Has the plug give up what it keeps for later. Not while captures are under way: it may wait for the device,
    /// which breaks them even in the relaxed mode.
    pub(super) fn reset_plug(&self) -> Result<()> {
        if self.has_captures() {
            return Ok(());
        }
        self.call_plug(ExternalAllocator::reset)
    }

    /// A stream as the plug wants it, and its device.
    pub(super) fn plug_stream(&self, cell: &Cell, stream: StreamId) -> Result<(RawStream, DeviceId)> {
        let (raw, device) = cell.desk.raw_of(stream, self.driver())?;
        Ok((RawStream { id: stream, raw: RawHandle(raw) }, device))
    }

    pub(super) fn stats_of(books: &Books) -> Stats {
        let mut stats = books.stats.clone();
        // All that is held is in blocks.
        stats.reserved_bytes = stats.active_bytes;
        stats
    }

    /// Takes a block back; a number of 0 stands for whatever starts there.
    fn free_numbered(&self, cell: &Cell, ptr: DevicePtr, number: u64) -> Result<()> {
        self.deliver(cell);
        let cause = self.cause(cell, StackLevel::All);
        let entry = self.with(cell, |books| books.begin_free(ptr, number, true, &cause))?;
        let freed = self.give_back(cell, &entry, &cause);
        self.settle(cell, &cause);
        freed
    }
}

impl DeviceAllocator for PluggableAllocator {
    fn name(&self) -> &'static str {
        NAME
    }

    fn instance(&self) -> &Instance {
        &self.instance
    }

    fn allocate_raw(&self, request: Request) -> Result<Allocation> {
        self.fetch(request)
    }

    fn free_raw(&self, ptr: DevicePtr) -> Result<()> {
        if ptr.is_null() {
            return Ok(());
        }
        let found = self.find(ptr)?;
        self.free(found)
    }

    fn record_use_raw(&self, ptr: DevicePtr, stream: StreamId) -> Result<()> {
        if ptr.is_null() {
            return Ok(());
        }
        let used = self.find(ptr)?;
        if used.stream == stream {
            return Ok(());
        }
        let cell = self.cell(used.device)?;
        let (plug_stream, _) = self.plug_stream(cell, stream)?;
        let handled = self.call_plug(|plug| plug.record_stream(ptr, plug_stream))?;
        // What captures used waits for their end in any case: no plug can mark it there.
        if handled == Handled::Yes && Standing::of(stream, self.driver())? == Standing::Working {
            return Ok(());
        }
        if self.with(cell, |books| books.add_use(ptr, stream)) { Ok(()) } else { Err(Error::UnknownPointer { ptr }) }
    }

    fn find(&self, ptr: DevicePtr) -> Result<Allocation> {
        self.cells.iter().find_map(|cell| cell.desk.find(ptr)).ok_or(Error::UnknownPointer { ptr })
    }

    fn free(&self, allocation: Allocation) -> Result<()> {
        if allocation.ptr.is_null() {
            return Ok(());
        }
        self.free_numbered(self.cell(allocation.device)?, allocation.ptr, allocation.slot)
    }

    fn free_later(&self, allocation: Allocation) {
        let Ok(cell) = self.cell(allocation.device) else { return };
        let cause = self.cause(cell, StackLevel::All);
        // Nobody can be told that there is no such block.
        let _ = self.with(cell, |books| books.begin_free(allocation.ptr, allocation.slot, false, &cause).map(drop));
    }

    fn trim(&self, device: DeviceId, pool: MemPoolId) -> Result<u64> {
        let cell = self.cell(device)?;
        self.deliver(cell);
        if pool.is_default() {
            self.observers.before_trim(device);
        }
        let held = || self.with(cell, |books| bytes_of(books, pool));
        let before = held();
        self.settle_and_wait(cell, &self.cause(cell, StackLevel::All));
        if pool.is_default() {
            self.reset_plug()?;
        }
        Ok(before.saturating_sub(held()))
    }

    fn largest_available(&self, device: DeviceId) -> Result<u64> {
        self.cell(device)?;
        Ok(self.driver().mem_info(device)?.bytes_free)
    }

    fn set_memory_fraction(&self, device: DeviceId, fraction: f64) -> Result<()> {
        let desk = &self.cell(device)?.desk;
        let before = desk.fraction();
        desk.set_fraction(fraction)?;
        let told = self.call_plug(|plug| plug.memory_fraction(fraction, device));
        if told.is_err() {
            desk.set_fraction(before)?;
        }
        told
    }

    fn memory_fraction(&self, device: DeviceId) -> Result<f64> {
        Ok(self.cell(device)?.desk.fraction())
    }

    fn stats(&self, device: DeviceId) -> Result<Stats> {
        let mut stats = self.with(self.cell(device)?, |books| Self::stats_of(books));
        stats.workspace_bytes = self.observers.workspaces.read(device);
        Ok(stats)
    }

    fn reset_peak_stats(&self, device: DeviceId) -> Result<()> {
        self.with(self.cell(device)?, |books| books.stats.reset_peak());
        self.observers.workspaces.change(device, Stat::reset_peak);
        Ok(())
    }

    fn reset_accumulated_stats(&self, device: DeviceId) -> Result<()> {
        self.with(self.cell(device)?, |books| books.stats.reset_accumulated());
        self.observers.workspaces.change(device, Stat::reset_accumulated);
        Ok(())
    }

    fn snapshot(&self, options: SnapshotOptions) -> Result<Snapshot> {
        let mut snapshot = Snapshot { settings: self.settings.recorded(), ..Snapshot::default() };
        let mut stacks = StackNumbers::default();
        for cell in &self.cells {
            let cause = self.cause(cell, StackLevel::Alloc);
            cell.desk.add_to(&mut snapshot, &mut stacks, options, |_| 0, &self.observers, &cause);
        }
        Ok(snapshot)
    }

    fn record_history(&self, options: Option<HistoryOptions>) -> Result<()> {
        for cell in &self.cells {
            cell.desk.record_history(options.as_ref(), &self.observers);
        }
        Ok(())
    }

    fn observers(&self) -> &Observers {
        &self.observers
    }

    fn pools(&self) -> Result<&dyn PoolKeeper> {
        Ok(self)
    }
}

/// What is held in a pool; in all of them, for the default pool.
fn bytes_of(books: &Books, pool: MemPoolId) -> u64 {
    if pool.is_default() {
        return books.stats.active_bytes.all.current;
    }
    books.stats.reserved_bytes_by_private_pools.get(&pool).map_or(0, |held| held.all.current)
}

impl PluggableAllocator {
    /// Whether captures are under way, as far as anybody told.
    pub(super) fn has_captures(&self) -> bool {
        self.captures.load(Ordering::Acquire) > 0 || !self.instance.captures().none()
    }
}

impl fmt::Debug for PluggableAllocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PluggableAllocator").field("gpu", &self.instance).finish_non_exhaustive()
    }
}
