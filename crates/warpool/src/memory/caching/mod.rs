//! The caching allocator: blocks stand where PyTorch's native allocator would put them.
//!
//! # The life of an allocation
//! 1. The request is routed to a pool (`pools.rs`) and rounded (`size.rs`).
//! 2. What was given back meanwhile is looked after, if there is anything (`pending.rs`, `capture.rs`).
//! 3. The smallest free block of the stream that fits is taken, and cut if too much would be left over (`state.rs`). This is the hot path: one lock, no
//!    driver call.
//! 4. If none fits, a ladder is climbed (`ladder.rs`), with memory from the driver (`segment.rs`, `expandable.rs`).
//! 5. Freed, a block that only its own stream used is joined with its free neighbours at once. Others wait for marks in the streams that used them.
//!
//! # Locks
//! Each device has two. `state` is held for one step of the books, never during a driver call. `slow` is held by the one thread that asks
//! the driver for memory or gives it back; it comes before `state`. Observers are called with neither.

mod annotate;
mod block;
mod capture;
mod check;
mod checkpoint;
mod exact;
mod expandable;
mod free_set;
mod ladder;
mod peers;
mod pending;
mod policy;
mod pools;
mod segment;
mod size;
mod slow;
mod snapshot;
mod state;
mod uncached;

pub use checkpoint::{PoolCheckpoint, Restored};

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use warpool_driver::{DeviceId, DevicePtr, Driver, StreamId};

use self::block::{BlockKey, Standing};
use self::policy::Policy;
pub(super) use self::policy::share_of;
use self::pools::Scope;
use self::state::{State, Want};
use self::uncached::Uncached;
use super::journal::{Cause, Recording};
use super::{
    Allocation, DeviceAllocator, HistoryOptions, MemPoolId, Observers, PoolKeeper, Request, Settings, Snapshot,
    SnapshotOptions, StackLevel, Stats,
};
use crate::{Error, Gpu, Result, lock};

/// PyTorch's caching allocator, over any driver. See the [module](crate::memory) for how it is used.
pub struct CachingAllocator {
    gpu: Gpu,
    cells: Box<[Cell]>,
    settings: Mutex<Arc<Settings>>,
    observers: Observers,
    /// Whether the driver wants to know who has what.
    notes: bool,
    /// Off, every request goes straight to the driver.
    caching: AtomicBool,
    uncached: Uncached,
    next_user_pool: AtomicU32,
    next_graph_pool: AtomicU32,
    /// Classes of streams, for the sizes of their expandable segments.
    stream_classes: Mutex<BTreeMap<StreamId, String>>,
}

/// What there is per device.
struct Cell {
    device: DeviceId,
    bytes_total: u64,
    granularity: u64,
    rdma: bool,
    virtual_memory: bool,
    state: Mutex<State>,
    /// Held by whoever asks the driver for memory or gives it back.
    slow: Mutex<()>,
    slow_holder: slow::Holder,
    limits: Mutex<Limits>,
    scopes: RwLock<Vec<Scope>>,
    scope_count: AtomicU32,
    /// How many captures are under way, on all devices together: another device's stream may have used this one's memory, and a thread that
    /// captures is guarded on every device.
    captures: Arc<AtomicU32>,
    recording: Recording,
    /// Other devices that may use this one's memory.
    peers: Mutex<Vec<DeviceId>>,
}

/// What may be held from a device.
#[derive(Clone, Copy)]
struct Limits {
    fraction: f64,
    cap: Option<u64>,
}

impl Cell {
    fn has_captures(&self) -> bool {
        self.captures.load(Ordering::Acquire) > 0
    }

    fn scopes(&self) -> RwLockReadGuard<'_, Vec<Scope>> {
        self.scopes.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn scopes_mut(&self) -> RwLockWriteGuard<'_, Vec<Scope>> {
        self.scopes.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn peers(&self) -> Vec<DeviceId> {
        lock(&self.peers).clone()
    }

    fn limit(&self) -> Option<u64> {
        let Limits { fraction, cap } = *lock(&self.limits);
        let by_fraction = (fraction < 1.0).then(|| share_of(self.bytes_total, fraction));
        [by_fraction, cap].into_iter().flatten().min()
    }
}

impl CachingAllocator {
    /// An allocator for all devices of `gpu`. Makes no driver call.
    #[must_use]
    pub fn new(gpu: &Gpu, settings: Settings) -> Self {
        let captures = Arc::new(AtomicU32::new(0));
        let cells = gpu.devices().map(|device| {
            let properties = device.properties();
            let limits = Limits { fraction: settings.per_process_memory_fraction, cap: settings.memory_cap_bytes };
            let policy = Policy::new(&settings, properties.bytes_total, None, properties.virtual_memory);
            let cell = Cell {
                device: device.id(),
                bytes_total: properties.bytes_total,
                granularity: properties.granularity.max(1),
                rdma: properties.rdma,
                virtual_memory: properties.virtual_memory,
                state: Mutex::new(State::new(device.id(), policy)),
                slow: Mutex::new(()),
                slow_holder: slow::Holder::default(),
                limits: Mutex::new(limits),
                scopes: RwLock::default(),
                scope_count: AtomicU32::new(0),
                captures: Arc::clone(&captures),
                recording: Recording::default(),
                peers: Mutex::default(),
            };
            lock(&cell.state).policy.limit = cell.limit();
            if settings.expandable_segments && !properties.virtual_memory {
                tracing::warn!(device = %cell.device, "expandable_segments: the device has no virtual memory; it is off there");
            }
            cell
        });
        Self {
            gpu: gpu.clone(),
            cells: cells.collect(),
            notes: gpu.driver().listens(),
            settings: Mutex::new(Arc::new(settings)),
            observers: Observers::default(),
            caching: AtomicBool::new(true),
            uncached: Uncached::default(),
            next_user_pool: AtomicU32::new(1),
            next_graph_pool: AtomicU32::new(1),
            stream_classes: Mutex::default(),
        }
    }

    /// The settings that are in force.
    #[must_use]
    pub fn settings(&self) -> Arc<Settings> {
        Arc::clone(&lock(&self.settings))
    }

    /// Puts other settings in force. What is cached stays; segments that grow stay usable only while `expandable_segments` is on. Memory
    /// fraction and cap are those of the start, or of the last call that set them.
    pub fn set_settings(&self, settings: Settings) {
        for cell in &self.cells {
            let mut policy = Policy::new(&settings, cell.bytes_total, None, cell.virtual_memory);
            self.with(cell, |state| {
                policy.limit = state.policy.limit;
                let order_changed = policy.by_registration != state.policy.by_registration;
                state.stats.max_split_size = policy.max_split_stat();
                state.policy = policy;
                state.recount_oversize();
                if order_changed {
                    state.reorder_free();
                }
            });
        }
        *lock(&self.settings) = Arc::new(settings);
    }

    /// Limits what is held from a device to `bytes`, beside the fraction; `None` is no limit.
    pub fn set_memory_cap(&self, device: DeviceId, bytes: Option<u64>) -> Result<()> {
        self.change_limits(self.cell(device)?, |limits| limits.cap = bytes);
        Ok(())
    }

    /// Turns caching off or on. Off, every request goes straight to the driver and appears in no counter; what was given out either way is taken back
    /// the way it came.
    pub fn set_caching(&self, on: bool) {
        self.caching.store(on, Ordering::Release);
    }

    /// Puts a stream into a class, which decides how many addresses its expandable segments reserve
    /// (`expandable_segments_reserve_by_class`); an empty name takes it out.
    pub fn set_stream_class(&self, stream: StreamId, class: &str) {
        let mut classes = lock(&self.stream_classes);
        if class.is_empty() {
            classes.remove(&stream);
        } else {
            classes.insert(stream, class.to_owned());
        }
    }

    fn stream_class(&self, stream: StreamId) -> Option<String> {
        lock(&self.stream_classes).get(&stream).cloned()
    }

    fn driver(&self) -> &dyn Driver {
        &**self.gpu.driver()
    }

    fn cell(&self, device: DeviceId) -> Result<&Cell> {
        let count = self.gpu.device_count();
        self.cells.get(device.0 as usize).ok_or(Error::DeviceOutOfRange { index: device.0, count })
    }

    /// One step under a device's lock; trackers are told afterwards, without it and without the slow one.
    fn with<R>(&self, cell: &Cell, step: impl FnOnce(&mut State) -> R) -> R {
        let mut state = lock(&cell.state);
        let result = step(&mut state);
        if state.journal.has_news() && !cell.slow_holder.is_me() {
            let events = state.journal.take_news();
            drop(state);
            self.observers.track(cell.device, &events);
        }
        result
    }

    /// The same, of a step that can fail.
    fn try_with<R>(&self, cell: &Cell, step: impl FnOnce(&mut State) -> Result<R>) -> Result<R> {
        self.with(cell, step)
    }

    /// Gathers what the history wants to know, before a lock is taken.
    fn cause(&self, cell: &Cell, level: StackLevel) -> Cause {
        cell.recording.cause(level, &self.observers, self.driver())
    }

    fn change_limits(&self, cell: &Cell, change: impl FnOnce(&mut Limits)) {
        change(&mut lock(&cell.limits));
        let limit = cell.limit();
        self.with(cell, |state| state.policy.limit = limit);
    }

    /// Finds what starts at `ptr` on any device.
    fn locate(&self, ptr: DevicePtr) -> Result<(&Cell, BlockKey)> {
        self.cells
            .iter()
            .find_map(|cell| lock(&cell.state).live_at(ptr).map(|block| (cell, block)))
            .ok_or(Error::UnknownPointer { ptr })
    }

    /// Takes a block back, if its caller has it. It is free then, or needs marks in streams that used it.
    fn take_back(&self, cell: &Cell, which: Which<'_>, cause: &Cause) -> Option<TakenBack> {
        if self.notes {
            // Before anybody else can get it. The memory of a private pool may be a graph's, whose replays go on using what its capture gave back.
            let (range, of_pool) = self.with(cell, |state| {
                let block = which.block(state)?;
                Some((state.allocation(block), state.bin_of(state.blocks[block].segment).pool))
            })?;
            if of_pool.is_default() {
                self.driver().note_returned(range.ptr, range.bytes);
            }
        }
        self.with(cell, |state| {
            let block = which.block(state)?;
            state.live.remove(&which.ptr().0);
            state.begin_free(block, cause);
            if state.blocks[block].has_uses() {
                return Some(TakenBack::InUse(block));
            }
            state.complete_free(block, cause);
            Some(TakenBack::Free)
        })
    }

    /// Sees to the streams that may still use a block that was taken back. The caller is rid of it whatever happens: what fails is tried again by the
    /// next call, which also reports what stays wrong.
    fn see_to(&self, cell: &Cell, taken: TakenBack, cause: &Cause) {
        if let TakenBack::InUse(block) = taken
            && let Err(error) = self.finish_free(cell, block, cause)
        {
            tracing::warn!(%error, "a freed block could not be marked in the streams that used it; trying again later");
        }
    }

    /// Hands out what was found.
    fn handed_out(&self, allocation: Allocation) -> Allocation {
        if self.notes {
            self.driver().note_handed_out(allocation.ptr, allocation.bytes, allocation.stream);
        }
        allocation
    }
}

/// Which block a caller means.
#[derive(Clone, Copy)]
enum Which<'a> {
    /// What starts there.
    At(DevicePtr),
    /// What it was given, and nothing that stands in the same place since.
    Owned(&'a Allocation),
}

impl Which<'_> {
    fn ptr(self) -> DevicePtr {
        match self {
            Self::At(ptr) => ptr,
            Self::Owned(allocation) => allocation.ptr,
        }
    }

    /// The block, if its caller still has it.
    fn block(self, state: &State) -> Option<BlockKey> {
        match self {
            Self::At(ptr) => state.live_at(ptr),
            Self::Owned(allocation) => state.live_block(allocation),
        }
    }
}

/// A block whose caller gave it back.
enum TakenBack {
    Free,
    /// Streams may still use it.
    InUse(BlockKey),
}

/// What the first look at a request gives.
enum First {
    Found(Allocation),
    /// Nothing cached fits. The pool is being visited.
    Missed(Want),
    /// Something was given back that has to be looked after first.
    Chores,
    Refused(Error),
}

impl DeviceAllocator for CachingAllocator {
    fn name(&self) -> &'static str {
        "caching"
    }

    fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    fn allocate_raw(&self, request: Request) -> Result<Allocation> {
        let Request { device, stream, bytes, pool } = request;
        let cell = self.cell(device)?;
        if bytes == 0 {
            return Ok(Allocation { ptr: DevicePtr(0), bytes: 0, bytes_requested: 0, device, stream, slot: 0 });
        }
        if bytes >= size::TOO_LARGE {
            return Err(Error::RequestTooLarge { bytes });
        }
        if !self.caching.load(Ordering::Acquire) {
            return self.allocate_uncached(request);
        }
        let mut pool = match pool {
            Some(pool) => pool,
            None => self.routed(cell, stream)?,
        };
        let cause = self.cause(cell, StackLevel::State);
        let capturing = self.is_capturing(cell, stream)?;
        if capturing {
            self.reuse_in_capture(cell, stream, &cause)?;
        }
        let mut look_after = !capturing;
        loop {
            let first = self.with(cell, |state| {
                if look_after && state.has_chores() {
                    return First::Chores;
                }
                match state.bins_for_use(pool) {
                    Ok(bins) => {
                        let want = state.want_of(bins, pool, stream, bytes);
                        if let Some(found) = state.take_cached(&want, &cause) {
                            return First::Found(found);
                        }
                        state.visit(pool).map_or_else(First::Refused, |_| First::Missed(want))
                    }
                    Err(error) => First::Refused(error),
                }
            });
            match first {
                First::Found(allocation) => return Ok(self.handed_out(allocation)),
                First::Missed(want) => {
                    let outcome = self.climb(cell, &want, capturing, &cause);
                    drop(self.with(cell, |state| state.leave(pool)));
                    return Ok(self.handed_out(outcome?));
                }
                First::Chores => self.reap(cell, &cause)?,
                First::Refused(error) => {
                    // The scope that led here may have been closed by another thread since: it is as if we came later.
                    let now = if request.pool.is_none() { self.routed(cell, stream)? } else { pool };
                    if now == pool {
                        return Err(error);
                    }
                    pool = now;
                }
            }
            look_after = false;
        }
    }

    fn free_raw(&self, ptr: DevicePtr) -> Result<()> {
        if ptr.is_null() {
            return Ok(());
        }
        for cell in &self.cells {
            let cause = self.cause(cell, StackLevel::All);
            if let Some(taken) = self.take_back(cell, Which::At(ptr), &cause) {
                self.see_to(cell, taken, &cause);
                return Ok(());
            }
        }
        if self.free_uncached(ptr)? { Ok(()) } else { Err(Error::UnknownPointer { ptr }) }
    }

    fn record_use_raw(&self, ptr: DevicePtr, stream: StreamId) -> Result<()> {
        if ptr.is_null() || self.is_uncached(ptr) {
            return Ok(());
        }
        let (cell, block) = self.locate(ptr)?;
        let in_capture = self.is_capturing(cell, stream)?;
        self.with(cell, |state| {
            // Another thread may have freed it since.
            let taken = state.blocks.get(block).filter(|entry| entry.standing == Standing::Taken && entry.ptr == ptr.0);
            let Some(entry) = taken else { return };
            if state.place_of(entry.segment).1 == stream {
                return;
            }
            let extra = state.blocks[block].extra();
            let list = if in_capture { &mut extra.uses_in_capture } else { &mut extra.uses };
            if !list.contains(&stream) {
                list.push(stream);
            }
        });
        Ok(())
    }

    fn find(&self, ptr: DevicePtr) -> Result<Allocation> {
        let found = self.cells.iter().find_map(|cell| {
            let state = lock(&cell.state);
            state.live_at(ptr).map(|block| state.allocation(block))
        });
        found.ok_or(Error::UnknownPointer { ptr })
    }

    fn free(&self, allocation: Allocation) -> Result<()> {
        let cell = self.cell(allocation.device)?;
        if allocation.slot == 0 {
            return self.free_raw(allocation.ptr);
        }
        let cause = self.cause(cell, StackLevel::All);
        let taken = self.take_back(cell, Which::Owned(&allocation), &cause);
        self.see_to(cell, taken.ok_or(Error::UnknownPointer { ptr: allocation.ptr })?, &cause);
        Ok(())
    }

    fn free_later(&self, allocation: Allocation) {
        let Ok(cell) = self.cell(allocation.device) else { return };
        if allocation.slot == 0 {
            self.free_uncached_later(allocation.ptr);
            return;
        }
        let cause = self.cause(cell, StackLevel::All);
        if let Some(TakenBack::InUse(block)) = self.take_back(cell, Which::Owned(&allocation), &cause) {
            self.with(cell, |state| state.unmarked.push(block));
        }
    }

    fn trim(&self, device: DeviceId, pool: MemPoolId) -> Result<u64> {
        let cell = self.cell(device)?;
        let cause = self.cause(cell, StackLevel::All);
        self.free_uncached_leftovers()?;
        let _slow = self.slow(cell);
        self.release_orphans(cell);
        if pool.is_default() {
            let current = self.gpu.device(device.0)?.current_stream_id()?;
            let capturing = self.is_capturing(cell, current)?;
            if !capturing {
                self.wait_for_pending(cell, &cause)?;
            }
            return self.return_all(cell, capturing, &cause);
        }
        let freeable = self.with(cell, |state| Ok(state.pool(pool)?.uses == 0));
        match freeable {
            Ok(true) => {
                self.wait_for_pending(cell, &cause)?;
                self.return_pool(cell, pool, &cause)
            }
            // In use, or gone already with all that it had.
            Ok(false) | Err(Error::UnknownPool { .. }) => Ok(0),
            Err(error) => Err(error),
        }
    }

    fn largest_available(&self, device: DeviceId) -> Result<u64> {
        let cell = self.cell(device)?;
        let free = self.driver().mem_info(device)?.bytes_free;
        let cached = self.with(cell, |state| state.lanes.values().map(|lane| lane.free.largest()).max().unwrap_or(0));
        Ok(free.max(cached))
    }

    fn set_memory_fraction(&self, device: DeviceId, fraction: f64) -> Result<()> {
        if !(0.0..=1.0).contains(&fraction) {
            return Err(Error::Fraction { fraction: fraction.to_string() });
        }
        self.change_limits(self.cell(device)?, |limits| limits.fraction = fraction);
        Ok(())
    }

    fn memory_fraction(&self, device: DeviceId) -> Result<f64> {
        Ok(lock(&self.cell(device)?.limits).fraction)
    }

    fn stats(&self, device: DeviceId) -> Result<Stats> {
        Ok(self.with(self.cell(device)?, |state| state.stats.clone()))
    }

    fn reset_peak_stats(&self, device: DeviceId) -> Result<()> {
        self.with(self.cell(device)?, |state| state.stats.reset_peak());
        Ok(())
    }

    fn reset_accumulated_stats(&self, device: DeviceId) -> Result<()> {
        self.with(self.cell(device)?, |state| state.stats.reset_accumulated());
        Ok(())
    }

    fn snapshot(&self, options: SnapshotOptions) -> Result<Snapshot> {
        Ok(self.take_snapshot(options))
    }

    fn record_history(&self, options: Option<HistoryOptions>) -> Result<()> {
        for cell in &self.cells {
            self.with(cell, |state| state.journal.history.set(options.clone()));
            cell.recording.set(options.as_ref());
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

impl fmt::Debug for CachingAllocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CachingAllocator").field("gpu", &self.gpu).finish_non_exhaustive()
    }
}
