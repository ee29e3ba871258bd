//! The allocator over the driver's own stream-ordered pool: the driver caches, this keeps the books.
//!
//! # The life of an allocation
//! 1. The request is held against the limit, by what was asked for.
//! 2. The device's default pool gives the memory, in the order of the stream. On a stream that captures it becomes a
//!    node of the graph.
//! 3. Freed, a block that only its own stream used goes back in the order of that stream; one that others used goes
//!    back in a stream of the allocator's own, which waits for all of them by events (`release.rs`).
//! 4. If the driver has no memory, the streams that frees are in are waited for, the pool gives back what is unused,
//!    and it is asked once more.
//!
//! The pool is set up at the first use of a device: it keeps what is freed (its release threshold is the largest
//! number) and may reuse memory across streams in every way that it knows. Other users of the device's default pool
//! share that.
//!
//! # Captures
//! Every call asks the driver whether its streams capture. A block of a capture is freed in it, as a node, if that
//! still is under way. Any other block that a stream which captures used waits until that capture is over.
//!
//! # Where it differs from PyTorch's `cudaMallocAsync` backend
//! - Several captures may be under way at once, also of several threads.
//! - Frees in a capture are joined in the block's own stream, so nothing has to be joined when it ends.
//! - A block whose free has to wait is given back by the next call of any kind, not only by an allocation.
//! - A second attempt waits for all streams that frees are in, not only for the one that asks.
//! - A fraction outside of [0, 1] is an error, and one that was never set is 1.
//! - All counters that have a meaning here are kept, and there are snapshots and a history. Every block is a segment of
//!   its own there; what the pool holds beyond that is shown as one free segment at address 0.
//! - Pressure callbacks run when a request would fail, since what is cached is not known before.
//!
//! # Locks
//! Each device has one for its books, held for one step, never during a driver call. Observers are called without it.

mod books;
mod limit;
mod release;

use std::collections::BTreeSet;
use std::fmt;
use std::sync::{Mutex, OnceLock};

use warpool_driver::{Access, DeviceId, DevicePtr, Driver, PoolAttribute, PoolId, StreamId};

use super::books::{Books, Entry};
use super::desk::Desk;
use super::history::StackNumbers;
use super::journal::Cause;
use super::standing::Standing;
use super::{
    Allocation, DeviceAllocator, HistoryOptions, MemPoolId, Observers, OomCause, PoolKeeper, Request, Settings,
    Snapshot, SnapshotOptions, StackLevel, Stat, Stats,
};
use crate::{Device, Error, Instance, Result, StreamLease};

const NAME: &str = "driver-pool";

/// Sizes are multiples of it; so are those of the driver's pools on an H200.
const GRAIN: u64 = 512;

/// No request is as large as this: an exbibyte.
const TOO_LARGE: u64 = 1 << 60;

/// Memory from the driver's stream-ordered pools. See the [module](crate::memory) for how allocators are used.
///
/// It has no private pools: [`pools`](DeviceAllocator::pools) is [`Error::Unsupported`].
pub struct DriverPoolAllocator {
    instance: Instance,
    cells: Box<[Cell]>,
    settings: Settings,
    observers: Observers,
}

/// What there is per device.
struct Cell {
    desk: Desk,
    /// Set up at first use: making it creates a context.
    ready: OnceLock<Ready>,
    /// Streams that frees were put into and that nobody waited for since.
    freed_on: Mutex<BTreeSet<StreamId>>,
}

/// A pool that is set up.
struct Ready {
    pool: PoolId,
    /// Where frees of blocks that several streams used are joined.
    joined: StreamLease,
}

impl DriverPoolAllocator {
    /// An allocator for all devices of `instance`, without limits. Makes no driver call.
    #[must_use]
    pub fn new(instance: &Instance) -> Self {
        Self::with_settings(instance, Settings::default())
    }

    /// The same with settings, of which memory fraction and cap count; the others are shown in snapshots.
    #[must_use]
    pub fn with_settings(instance: &Instance, settings: Settings) -> Self {
        let cells = instance.devices().map(|device| Cell {
            desk: Desk::new(&device, settings.per_process_memory_fraction),
            ready: OnceLock::new(),
            freed_on: Mutex::default(),
        });
        Self { instance: instance.clone(), cells: cells.collect(), observers: Observers::default(), settings }
    }

    /// Lets kernels on `device` use what this allocator has on `owner`, now and later. A second time changes nothing.
    pub fn enable_peer_access(&self, device: DeviceId, owner: DeviceId) -> Result<()> {
        self.cell(device)?;
        let ready = self.ready(self.cell(owner)?)?;
        if device == owner {
            return Ok(());
        }
        Ok(self.driver().pool_set_access(ready.pool, device, Access::ReadWrite)?)
    }

    fn driver(&self) -> &dyn Driver {
        &**self.instance.driver()
    }

    fn cell(&self, device: DeviceId) -> Result<&Cell> {
        let count = self.instance.device_count();
        self.cells.get(device.0 as usize).ok_or(Error::DeviceOutOfRange { index: device.0, count })
    }

    /// The device's pool, set up if nobody did before. Two threads may both do it: it comes to the same.
    fn ready<'a>(&self, cell: &'a Cell) -> Result<&'a Ready> {
        if let Some(ready) = cell.ready.get() {
            return Ok(ready);
        }
        let pool = self.driver().pool_default(cell.desk.device)?;
        let lax = self.lax()?;
        for (attribute, value) in [
            (PoolAttribute::ReleaseThreshold, u64::MAX),
            (PoolAttribute::ReuseFollowEvents, 1),
            (PoolAttribute::ReuseOpportunistic, 1),
            (PoolAttribute::ReuseInternalDependencies, 1),
        ] {
            self.driver().pool_set(pool, attribute, value)?;
        }
        drop(lax);
        let joined = Device::known(&self.instance, cell.desk.device).lease_stream()?;
        Ok(cell.ready.get_or_init(|| Ready { pool, joined }))
    }

    /// One step under a device's lock; trackers are told afterwards, without it.
    fn with<R>(&self, cell: &Cell, step: impl FnOnce(&mut Books) -> R) -> R {
        cell.desk.with(&self.observers, step)
    }

    /// Gathers what the history wants to know, before a lock is taken.
    fn cause(&self, cell: &Cell, level: StackLevel) -> Cause {
        cell.desk.cause(level, &self.observers, self.driver())
    }

    /// The driver's handle of a stream, asked for once.
    fn raw_of(&self, cell: &Cell, stream: StreamId) -> Result<u64> {
        Ok(cell.desk.raw_of(stream, self.driver())?.0)
    }

    /// Takes a block back; a number of 0 stands for whatever starts there.
    fn free_numbered(&self, cell: &Cell, ptr: DevicePtr, number: u64) -> Result<()> {
        let cause = self.cause(cell, StackLevel::All);
        let entry = self.with(cell, |books| books.begin_free(ptr, number, true, &cause))?;
        self.give_back(cell, &entry, &cause);
        self.settle(cell, &cause);
        Ok(())
    }
}

impl DeviceAllocator for DriverPoolAllocator {
    fn name(&self) -> &'static str {
        NAME
    }

    fn instance(&self) -> &Instance {
        &self.instance
    }

    fn allocate_raw(&self, request: Request) -> Result<Allocation> {
        let Request { device, stream, bytes, pool } = request;
        let cell = self.cell(device)?;
        if pool.is_some_and(|pool| !pool.is_default()) {
            return Err(Error::Unsupported { allocator: NAME, what: "private pools" });
        }
        if bytes == 0 {
            return Ok(Allocation { ptr: DevicePtr(0), bytes: 0, bytes_requested: 0, device, stream, slot: 0 });
        }
        if bytes >= TOO_LARGE {
            return Err(Error::RequestTooLarge { bytes });
        }
        let cause = self.cause(cell, StackLevel::State);
        self.settle(cell, &cause);
        let standing = self.standing(stream)?;
        let capture = match standing {
            Standing::Working => None,
            Standing::Captures(capture) => Some(capture),
            // Asked again for the driver's own words: the allocation itself would break the capture.
            Standing::Blocked | Standing::Gone => {
                self.driver().capture_state(stream)?;
                None
            }
        };
        let stream_raw = self.raw_of(cell, stream)?;
        if !self.promise(cell, bytes) {
            return Err(self.out_of_memory(cell, &request, OomCause::Limit, capture.is_some(), &cause));
        }
        let size = bytes.next_multiple_of(GRAIN);
        let ptr = match self.fetch(cell, size, stream, standing, &cause) {
            Ok(Some(ptr)) => ptr,
            failed => {
                self.with(cell, |books| books.settle_promise(bytes));
                failed?;
                return Err(self.out_of_memory(cell, &request, OomCause::Device, capture.is_some(), &cause));
            }
        };
        let (pool, uses, stack) = (MemPoolId::DEFAULT, Vec::new(), None);
        let entry =
            Entry { number: 0, ptr, bytes: size, requested: bytes, stream, stream_raw, pool, uses, capture, stack };
        Ok(self.with(cell, |books| {
            books.settle_promise(bytes);
            books.hand_out(entry, &cause)
        }))
    }

    fn free_raw(&self, ptr: DevicePtr) -> Result<()> {
        if ptr.is_null() {
            return Ok(());
        }
        let found = self.find(ptr)?;
        self.free(found)
    }

    fn record_use_raw(&self, ptr: DevicePtr, stream: StreamId) -> Result<()> {
        let noted = ptr.is_null() || self.cells.iter().any(|cell| self.with(cell, |books| books.add_use(ptr, stream)));
        if noted { Ok(()) } else { Err(Error::UnknownPointer { ptr }) }
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
        let Some(ready) = cell.ready.get().filter(|_| pool.is_default()) else { return Ok(0) };
        self.observers.before_trim(device);
        let cause = self.cause(cell, StackLevel::All);
        let (before, _) = self.bytes_in_pool(cell)?;
        self.drain(cell, ready, &cause)?;
        let (after, _) = self.bytes_in_pool(cell)?;
        Ok(before.saturating_sub(after))
    }

    fn largest_available(&self, device: DeviceId) -> Result<u64> {
        let cell = self.cell(device)?;
        let free = self.driver().mem_info(device)?.bytes_free;
        let (held, _) = self.bytes_in_pool(cell)?;
        let active = self.with(cell, |books| books.stats.active_bytes.all.current);
        Ok(free.max(held.saturating_sub(active)))
    }

    fn set_memory_fraction(&self, device: DeviceId, fraction: f64) -> Result<()> {
        self.cell(device)?.desk.set_fraction(fraction)
    }

    fn memory_fraction(&self, device: DeviceId) -> Result<f64> {
        Ok(self.cell(device)?.desk.fraction())
    }

    fn stats(&self, device: DeviceId) -> Result<Stats> {
        let cell = self.cell(device)?;
        let pool = self.bytes_in_pool(cell)?;
        let mut stats = self.with(cell, |books| books.stats_with(pool));
        stats.workspace_bytes = self.observers.workspaces.read(device);
        Ok(stats)
    }

    fn reset_peak_stats(&self, device: DeviceId) -> Result<()> {
        let cell = self.cell(device)?;
        if let Some(ready) = cell.ready.get() {
            let _lax = self.lax()?;
            self.driver().pool_set(ready.pool, PoolAttribute::ReservedHigh, 0)?;
        }
        self.with(cell, |books| books.stats.reset_peak());
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
            let (bytes_in_pool, _) = self.bytes_in_pool(cell)?;
            let cause = self.cause(cell, StackLevel::Alloc);
            let rest = |books: &Books| books.rest(bytes_in_pool);
            cell.desk.add_to(&mut snapshot, &mut stacks, options, rest, &self.observers, &cause);
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
        Err(Error::Unsupported { allocator: NAME, what: "private pools" })
    }
}

impl fmt::Debug for DriverPoolAllocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DriverPoolAllocator").field("gpu", &self.instance).finish_non_exhaustive()
    }
}
