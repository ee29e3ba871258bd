//! Device allocators without a cache: [`UncachedAllocator`], over a source of memory. The source is the driver's
//! stream-ordered pool ([`DriverPoolAllocator`]) or a user's allocator ([`PluggableAllocator`]); this module keeps the
//! allocation table, limits, statistics, history and private pools, and decides when a freed block may be released.
//!
//! # The life of an allocation
//! 1. The request is routed to a pool, and counted against the limit by the requested size (`allocate.rs`).
//! 2. The source allocates. If it has no memory: pressure callbacks, a wait for freed blocks, a trim of the source, and
//!    one retry.
//! 3. The block is added to the allocation table of its device (`table.rs`, `ledger.rs`).
//! 4. A freed block is released to the source in the order that the source requires (`release.rs`, `source.rs`): in a
//!    stream, after the work that uses it, or after fences in the other streams have passed. Dropped blocks are
//!    released by the next call, since a destructor makes no driver call.
//!
//! # Locks
//! Each device has one for its table and one for its pools. Each is held for one step, none while another is taken, and
//! never while the driver, the source or an observer is called.
//!
//! # Panics
//! A panic of a source or an observer reaches the caller; guards keep the table and the pools consistent. Trackers are
//! called last, when the state is consistent.

mod allocate;
mod driver_pool;
mod external;
mod ledger;
mod pools;
mod private_pools;
mod release;
mod source;
mod table;

use std::fmt;
use std::sync::Mutex;

use warpool_driver::{DeviceId, DevicePtr, Driver, StreamId};

use super::capture_count::CaptureCount;
use super::report::{EntryDetails, StackIds};
use super::stream_fence::StreamFences;
use super::{
    Allocation, DeviceAllocator, GraphKey, Handled, HistoryOptions, MemPoolId, Observers, PrivatePools, Request,
    Settings, Snapshot, SnapshotOptions, StackLevel, Stat, Stats,
};
use crate::capture::CaptureStatus;
use crate::pool_id::PoolIds;
use crate::unwind::OnUnwind;
use crate::{Error, Instance, Result};
use ledger::DeviceLedger;
use pools::DevicePools;
use source::Source;
use table::AllocationTable;

pub use driver_pool::DriverPoolAllocator;
pub use external::PluggableAllocator;

/// A device allocator without a cache: every request and every free reaches its source.
pub struct UncachedAllocator<S> {
    instance: Instance,
    source: S,
    devices: Box<[DeviceState]>,
    settings: Settings,
    observers: Observers,
    captures: CaptureCount,
    pool_ids: PoolIds,
}

struct DeviceState {
    ledger: DeviceLedger,
    pools: DevicePools,
    /// Fences of freed blocks, by serial.
    fences: Mutex<StreamFences<u64>>,
}

impl<S: Source> UncachedAllocator<S> {
    fn over(instance: &Instance, source: S, settings: Settings) -> Self {
        let devices = instance.devices().map(|device| DeviceState {
            ledger: DeviceLedger::new(&device, settings.per_process_memory_fraction),
            pools: DevicePools::new(device.id()),
            fences: Mutex::default(),
        });
        Self {
            instance: instance.clone(),
            source,
            devices: devices.collect(),
            settings,
            observers: Observers::default(),
            captures: CaptureCount::default(),
            pool_ids: PoolIds::default(),
        }
    }

    fn source(&self) -> &S {
        &self.source
    }

    fn driver(&self) -> &dyn Driver {
        &**self.instance.driver()
    }

    fn state(&self, device: DeviceId) -> Result<&DeviceState> {
        self.instance.expect_own_process("allocator call")?;
        let count = self.instance.device_count();
        self.devices.get(device.0 as usize).ok_or(Error::DeviceOutOfRange { index: device.0, count })
    }

    /// One step under a device's lock. Trackers see its entries at the end of the call.
    fn with<R>(&self, state: &DeviceState, step: impl FnOnce(&mut AllocationTable) -> R) -> R {
        state.ledger.with(step)
    }

    /// Calls the trackers. Call it when the state is consistent: they may panic.
    fn report(&self, state: &DeviceState) {
        state.ledger.report(&self.observers);
    }

    fn entry_details(&self, state: &DeviceState, level: StackLevel) -> EntryDetails {
        state.ledger.entry_details(level, &self.observers, self.driver())
    }

    /// Whether a capture is active that Warpool knows of.
    fn has_captures(&self) -> bool {
        self.captures.any() || self.instance.has_captures()
    }

    /// Notifies the source of pool events. With `wait`, waits for events that another thread is delivering.
    fn deliver_pool_events(&self, state: &DeviceState, wait: bool) {
        state.pools.deliver(wait, |event| self.source.pool_event(state.ledger.device(), event));
    }

    /// Removes the statistics of pools that were removed.
    fn forget_removed_pools(&self, state: &DeviceState) {
        let removed = state.pools.take_removed();
        if !removed.is_empty() {
            self.with(state, |table| removed.into_iter().for_each(|pool| table.forget_pool(pool)));
        }
    }

    /// Frees a block that never reaches its caller, or whose free was interrupted. Calls neither the driver nor the
    /// source.
    fn abandon(&self, state: &DeviceState, allocation: Allocation) {
        let free = |table: &mut AllocationTable| {
            table.begin_free_of_owner(allocation.ptr, allocation.slot, false, &EntryDetails::default()).map(drop)
        };
        // Nothing starts at the null address.
        let _ = self.with(state, free);
    }

    fn no_private_pools(&self) -> Error {
        Error::Unsupported { allocator: S::NAME, what: "private pools" }
    }
}

#[expect(unsafe_code, reason = "the promise of `DeviceAllocator`")]
// SAFETY: every allocation is one allocation of the source, and the table refuses overlaps.
unsafe impl<S: Source> DeviceAllocator for UncachedAllocator<S> {
    fn name(&self) -> &'static str {
        S::NAME
    }

    fn instance(&self) -> &Instance {
        &self.instance
    }

    fn allocate_raw(&self, request: Request) -> Result<Allocation> {
        self.instance.expect_own_process("allocate")?;
        self.allocate(request)
    }

    fn free_raw(&self, ptr: DevicePtr) -> Result<()> {
        if ptr.is_null() || self.instance.is_inherited() {
            return Ok(());
        }
        self.free(self.find(ptr)?)
    }

    fn record_use_raw(&self, ptr: DevicePtr, stream: StreamId) -> Result<()> {
        if ptr.is_null() {
            return Ok(());
        }
        let used = self.find(ptr)?;
        if used.stream == stream {
            return Ok(());
        }
        let state = self.state(used.device)?;
        let (raw_stream, _) = state.ledger.raw_stream(stream, self.driver())?;
        let handled = self.source.record_use(ptr, raw_stream)?;
        // A use in a capture always delays the free: the source cannot record an event there.
        if handled == Handled::Yes && CaptureStatus::of(self.driver(), stream)? == CaptureStatus::NotCapturing {
            return Ok(());
        }
        let recorded = self.with(state, |table| table.record_use(ptr, stream));
        if recorded { Ok(()) } else { Err(Error::UnknownPointer { ptr }) }
    }

    fn find(&self, ptr: DevicePtr) -> Result<Allocation> {
        self.instance.expect_own_process("find")?;
        self.devices.iter().find_map(|state| state.ledger.find(ptr)).ok_or(Error::UnknownPointer { ptr })
    }

    fn free(&self, allocation: Allocation) -> Result<()> {
        if allocation.ptr.is_null() || self.instance.is_inherited() {
            return Ok(());
        }
        let state = self.state(allocation.device)?;
        // The block is freed even if a hook panics.
        let unwinds = OnUnwind::new(|| self.abandon(state, allocation));
        self.deliver_pool_events(state, false);
        let details = self.entry_details(state, StackLevel::All);
        unwinds.disarm();
        let entry =
            self.with(state, |table| table.begin_free_of_owner(allocation.ptr, allocation.slot, true, &details))?;
        let released = self.release_block(state, &entry, &details);
        self.process_pending(state, &details);
        self.report(state);
        released
    }

    fn free_later(&self, allocation: Allocation) {
        let Ok(state) = self.state(allocation.device) else { return };
        let unwinds = OnUnwind::new(|| self.abandon(state, allocation));
        let details = self.entry_details(state, StackLevel::All);
        unwinds.disarm();
        // A destructor cannot report that there is no such block.
        let _ = self
            .with(state, |table| table.begin_free_of_owner(allocation.ptr, allocation.slot, false, &details).map(drop));
        self.report(state);
    }

    fn hold(&self, allocation: Allocation, _: GraphKey) -> Result<()> {
        let state = self.state(allocation.device)?;
        if allocation.ptr.is_null() { Ok(()) } else { self.with(state, |table| table.hold(&allocation)) }
    }

    fn end_hold(&self, allocation: Allocation, _: GraphKey) {
        if let Ok(state) = self.state(allocation.device) {
            self.with(state, |table| table.end_hold(&allocation));
        }
    }

    /// Does not call the source's `record_use`, which may call the driver.
    fn record_uses_later(&self, allocation: Allocation, streams: &[StreamId]) {
        if let Ok(state) = self.state(allocation.device) {
            self.with(state, |table| table.record_uses(&allocation, streams));
        }
    }

    fn trim(&self, device: DeviceId, pool: MemPoolId) -> Result<u64> {
        let state = self.state(device)?;
        self.deliver_pool_events(state, false);
        if pool.is_default() {
            self.observers.run_trim_hooks(device);
        }
        let reserved = || -> Result<u64> {
            if !pool.is_default() {
                return Ok(self.with(state, |table| table.bytes_in(pool)));
            }
            let reserved = self.source.reserved(device)?;
            Ok(reserved.map_or_else(|| self.with(state, |table| table.active_bytes()), |reserved| reserved.current))
        };
        let before = reserved()?;
        self.wait_for_pending(state, &self.entry_details(state, StackLevel::All))?;
        if pool.is_default() {
            self.source.trim(device, self.has_captures())?;
        }
        let bytes = before.saturating_sub(reserved()?);
        self.report(state);
        Ok(bytes)
    }

    fn largest_available(&self, device: DeviceId) -> Result<u64> {
        let state = self.state(device)?;
        let free = self.driver().mem_info(device)?.bytes_free;
        let reserved = self.source.reserved(device)?;
        Ok(free.max(self.with(state, |table| table.unused_bytes(reserved))))
    }

    fn set_memory_fraction(&self, device: DeviceId, fraction: f64) -> Result<()> {
        let ledger = &self.state(device)?.ledger;
        let before = ledger.fraction();
        ledger.set_fraction(fraction)?;
        let restore = || ledger.set_fraction(before).expect("it was set before");
        let unwinds = OnUnwind::new(restore);
        let set = self.source.set_memory_fraction(device, fraction);
        unwinds.disarm();
        if set.is_err() {
            restore();
        }
        set
    }

    fn memory_fraction(&self, device: DeviceId) -> Result<f64> {
        Ok(self.state(device)?.ledger.fraction())
    }

    fn stats(&self, device: DeviceId) -> Result<Stats> {
        let state = self.state(device)?;
        let reserved = self.source.reserved(device)?;
        self.forget_removed_pools(state);
        let mut stats = self.with(state, |table| table.stats(reserved));
        stats.workspace_bytes = self.observers.workspaces.read(device);
        Ok(stats)
    }

    fn reset_peak_stats(&self, device: DeviceId) -> Result<()> {
        let state = self.state(device)?;
        self.source.reset_peak(device)?;
        self.with(state, AllocationTable::reset_peak_stats);
        self.observers.workspaces.change(device, Stat::reset_peak);
        Ok(())
    }

    fn reset_accumulated_stats(&self, device: DeviceId) -> Result<()> {
        self.with(self.state(device)?, AllocationTable::reset_accumulated_stats);
        self.observers.workspaces.change(device, Stat::reset_accumulated);
        Ok(())
    }

    fn snapshot(&self, options: SnapshotOptions) -> Result<Snapshot> {
        self.instance.expect_own_process("snapshot")?;
        let mut snapshot = Snapshot { settings: self.settings.recorded(), ..Snapshot::default() };
        let mut stacks = StackIds::default();
        for state in &self.devices {
            let reserved = self.source.reserved(state.ledger.device())?;
            let details = self.entry_details(state, StackLevel::Alloc);
            state.ledger.add_to(&mut snapshot, &mut stacks, options, reserved, &details);
            self.report(state);
        }
        Ok(snapshot)
    }

    fn record_history(&self, options: Option<HistoryOptions>) -> Result<()> {
        self.instance.expect_own_process("record_history")?;
        for state in &self.devices {
            state.ledger.record_history(options.as_ref());
        }
        Ok(())
    }

    fn observers(&self) -> &Observers {
        &self.observers
    }

    fn pools(&self) -> Result<&dyn PrivatePools> {
        if S::PRIVATE_POOLS { Ok(self) } else { Err(self.no_private_pools()) }
    }
}

impl<S: Source> fmt::Debug for UncachedAllocator<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("UncachedAllocator");
        shown.field("source", &S::NAME).field("instance", &self.instance).finish_non_exhaustive()
    }
}
