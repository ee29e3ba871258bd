//! Device allocators without a cache: [`UncachedAllocator`], over a source of memory. The source is the driver's
//! stream-ordered pool ([`DriverPoolAllocator`]) or a user's allocator ([`PluggableAllocator`]); this module keeps the
//! allocation table, limits, statistics, history and private pools, and decides when a freed block may be released.
//!
//! ```
//! # use std::sync::Arc;
//! # use warpool::driver::sim::{SimConfig, SimDriver};
//! # use warpool::prelude::*;
//! use warpool::memory::DriverPoolAllocator;
//! use warpool::memory::uncached::UncachedAllocator;
//!
//! # fn main() -> warpool::Result<()> {
//! # let instance = Instance::new(Arc::new(SimDriver::new(SimConfig::default())))?;
//! # let device = instance.device(0)?;
//! # let stream = device.lease_stream()?;
//! # let allocator = Arc::new(CachingAllocator::new(&instance, Settings::default()));
//! let pool = Arc::new(DriverPoolAllocator::new(&instance));
//! pool.allocate(1 << 20, &stream)?.free()?; // by the driver's calls, in the order of the stream
//! assert_eq!(pool.stats(device.id())?.allocated_bytes.all.peak, 1 << 20);
//!
//! /// Those without a cache are one type, over different sources.
//! fn table_of<S>(_: &UncachedAllocator<S>) {}
//! table_of(&pool);
//! # Ok(())
//! # }
//! ```
//!
//! # The life of an allocation
//! 1. The request is routed to a pool, and counted against the limit by the requested size (`allocate.rs`).
//! 2. The source allocates. If it has no memory: pressure callbacks, a wait for freed blocks, a trim of the source, and
//!    one retry.
//! 3. The block is added to the allocation table of its device (`table.rs`, `device.rs`).
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
mod device;
mod driver_pool;
mod external;
mod pools;
mod private_pools;
mod release;
mod source;
mod table;

use std::fmt;
use std::sync::Arc;

use warpool_driver::{DeviceId, DevicePtr, Driver, StreamId};

use super::core::AllocatorCore;
use super::report::{EntryDetails, StackIds};
use super::{
    Allocation, DeviceAllocator, GraphKey, Handled, HistoryOptions, MemPoolId, Observers, PrivatePools, Request,
    Settings, Snapshot, SnapshotOptions, StackLevel, Stat, Stats,
};
use crate::capture::CaptureStatus;
use crate::unwind::OnUnwind;
use crate::{Error, Instance, Result};
use device::UncachedDevice;
use source::Source;
use table::AllocationTable;

pub use driver_pool::DriverPoolAllocator;
pub use external::PluggableAllocator;

/// A device allocator without a cache: every request and every free reaches its source.
pub struct UncachedAllocator<S> {
    shared: Arc<AllocatorCore>,
    source: S,
    devices: Box<[UncachedDevice]>,
}

impl<S: Source> UncachedAllocator<S> {
    fn over(instance: &Instance, source: S, settings: Settings) -> Self {
        let shared = AllocatorCore::new(instance, settings);
        let devices = instance.devices().map(|device| UncachedDevice::new(&shared, &device)).collect();
        Self { shared, source, devices }
    }

    fn source(&self) -> &S {
        &self.source
    }

    fn driver(&self) -> &dyn Driver {
        self.shared.driver()
    }

    fn state(&self, device: DeviceId) -> Result<&UncachedDevice> {
        self.shared.device(&self.devices, device)
    }

    /// Notifies the source of pool events. With `wait`, waits for events that another thread is delivering.
    fn deliver_pool_events(&self, state: &UncachedDevice, wait: bool) {
        state.pools.deliver(wait, |event| self.source.pool_event(state.id, event));
    }

    /// Removes the statistics of pools that were removed.
    fn forget_removed_pools(&self, state: &UncachedDevice) {
        let removed = state.pools.take_removed();
        if !removed.is_empty() {
            state.with(|table| {
                let reserved = &mut table.stats.reserved_bytes_by_private_pools;
                reserved.retain(|pool, _| !removed.contains(pool));
            });
        }
    }

    /// Frees a block that never reaches its caller, or whose free was interrupted. Calls neither the driver nor the
    /// source.
    fn abandon(&self, state: &UncachedDevice, allocation: Allocation) {
        let free = |table: &mut AllocationTable| {
            table.begin_free_of_owner(allocation.ptr, allocation.slot, false, &EntryDetails::default()).map(drop)
        };
        // Nothing starts at the null address.
        let _ = state.with(free);
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
        &self.shared.instance
    }

    fn allocate_raw(&self, request: Request) -> Result<Allocation> {
        self.shared.instance.expect_own_process("allocate")?;
        self.allocate(request)
    }

    fn free_raw(&self, ptr: DevicePtr) -> Result<()> {
        if ptr.is_null() || self.shared.instance.is_inherited() {
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
        let (raw_stream, _) = state.raw_stream(stream)?;
        let handled = self.source.record_use(ptr, raw_stream)?;
        // A use in a capture always delays the free: the source cannot record an event there.
        if handled == Handled::Yes && CaptureStatus::of(self.driver(), stream)? == CaptureStatus::NotCapturing {
            return Ok(());
        }
        let recorded = state.with(|table| table.record_use(ptr, stream));
        if recorded { Ok(()) } else { Err(Error::UnknownPointer { ptr }) }
    }

    fn find(&self, ptr: DevicePtr) -> Result<Allocation> {
        self.shared.instance.expect_own_process("find")?;
        self.devices.iter().find_map(|state| state.find(ptr)).ok_or(Error::UnknownPointer { ptr })
    }

    fn free(&self, allocation: Allocation) -> Result<()> {
        if allocation.ptr.is_null() || self.shared.instance.is_inherited() {
            return Ok(());
        }
        let state = self.state(allocation.device)?;
        // The block is freed even if a hook panics.
        let unwinds = OnUnwind::new(|| self.abandon(state, allocation));
        self.deliver_pool_events(state, false);
        let details = state.timed_details(StackLevel::All);
        unwinds.disarm();
        let entry = state.with(|table| table.begin_free_of_owner(allocation.ptr, allocation.slot, true, &details))?;
        let released = self.release_block(state, &entry, &details);
        self.process_pending(state, &details);
        state.report();
        released
    }

    fn free_later(&self, allocation: Allocation) {
        let Ok(state) = self.state(allocation.device) else { return };
        let unwinds = OnUnwind::new(|| self.abandon(state, allocation));
        let details = state.timed_details(StackLevel::All);
        unwinds.disarm();
        // A destructor cannot report that there is no such block.
        let _ =
            state.with(|table| table.begin_free_of_owner(allocation.ptr, allocation.slot, false, &details).map(drop));
        state.report();
    }

    fn enable_peer_access(&self, device: DeviceId, owner: DeviceId) -> Result<()> {
        self.state(device)?;
        self.state(owner)?;
        self.source.enable_peer_access(device, owner)
    }

    fn hold(&self, allocation: Allocation, _: GraphKey) -> Result<()> {
        let state = self.state(allocation.device)?;
        if allocation.ptr.is_null() { Ok(()) } else { state.with(|table| table.hold(&allocation)) }
    }

    fn end_hold(&self, allocation: Allocation, _: GraphKey) {
        if let Ok(state) = self.state(allocation.device) {
            state.with(|table| table.end_hold(&allocation));
        }
    }

    /// Does not call the source's `record_use`, which may call the driver.
    fn record_uses_later(&self, allocation: Allocation, streams: &[StreamId]) {
        if let Ok(state) = self.state(allocation.device) {
            state.with(|table| table.record_uses(&allocation, streams));
        }
    }

    fn trim(&self, device: DeviceId, pool: MemPoolId) -> Result<u64> {
        let state = self.state(device)?;
        self.deliver_pool_events(state, false);
        if pool.is_default() {
            self.shared.observers.run_trim_hooks(device);
        }
        let reserved = || -> Result<u64> {
            if !pool.is_default() {
                return Ok(state.with(|table| table.bytes_in(pool)));
            }
            let reserved = self.source.reserved(device)?;
            Ok(reserved.map_or_else(|| state.with(|table| table.active_bytes()), |reserved| reserved.current))
        };
        let before = reserved()?;
        self.wait_for_pending(state, &state.timed_details(StackLevel::All))?;
        if pool.is_default() {
            self.source.trim(device, self.shared.has_captures())?;
        }
        let bytes = before.saturating_sub(reserved()?);
        state.report();
        Ok(bytes)
    }

    fn largest_available(&self, device: DeviceId) -> Result<u64> {
        let state = self.state(device)?;
        let free = self.driver().mem_info(device)?.bytes_free;
        let reserved = self.source.reserved(device)?;
        Ok(free.max(state.with(|table| table.unused_bytes(reserved))))
    }

    fn set_memory_fraction(&self, device: DeviceId, fraction: f64) -> Result<()> {
        let state = self.state(device)?;
        let before = state.limits().fraction();
        state.change_limits(|limits| limits.set_fraction(fraction))?;
        let restore = || state.change_limits(|limits| limits.set_fraction(before)).expect("it was set before");
        let unwinds = OnUnwind::new(restore);
        let set = self.source.set_memory_fraction(device, fraction);
        unwinds.disarm();
        if set.is_err() {
            restore();
        }
        set
    }

    fn memory_fraction(&self, device: DeviceId) -> Result<f64> {
        Ok(self.state(device)?.limits().fraction())
    }

    fn settings(&self) -> Arc<Settings> {
        self.shared.settings()
    }

    fn stats(&self, device: DeviceId) -> Result<Stats> {
        let state = self.state(device)?;
        let reserved = self.source.reserved(device)?;
        self.forget_removed_pools(state);
        let mut stats = state.with(|table| table.stats(reserved));
        stats.workspace_bytes = self.shared.observers.workspaces.read(device);
        Ok(stats)
    }

    fn reset_peak_stats(&self, device: DeviceId) -> Result<()> {
        let state = self.state(device)?;
        self.source.reset_peak(device)?;
        state.with(|table| table.stats.reset_peak());
        self.shared.observers.workspaces.change(device, Stat::reset_peak);
        Ok(())
    }

    fn reset_accumulated_stats(&self, device: DeviceId) -> Result<()> {
        self.state(device)?.with(|table| table.stats.reset_accumulated());
        self.shared.observers.workspaces.change(device, Stat::reset_accumulated);
        Ok(())
    }

    fn snapshot(&self, options: SnapshotOptions) -> Result<Snapshot> {
        self.shared.instance.expect_own_process("snapshot")?;
        let mut snapshot = Snapshot { settings: self.shared.settings().recorded(), ..Snapshot::default() };
        let mut stacks = StackIds::default();
        for state in &self.devices {
            let reserved = self.source.reserved(state.id)?;
            let details = state.timed_details(StackLevel::Alloc);
            state.add_to(&mut snapshot, &mut stacks, options, reserved, &details);
            state.report();
        }
        Ok(snapshot)
    }

    fn record_history(&self, options: Option<HistoryOptions>) -> Result<()> {
        self.shared.instance.expect_own_process("record_history")?;
        for state in &self.devices {
            state.record_history(options.as_ref());
        }
        Ok(())
    }

    fn observers(&self) -> &Observers {
        &self.shared.observers
    }

    fn pools(&self) -> Result<&dyn PrivatePools> {
        if S::PRIVATE_POOLS { Ok(self) } else { Err(self.no_private_pools()) }
    }
}

impl<S: Source> fmt::Debug for UncachedAllocator<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("UncachedAllocator");
        shown.field("source", &S::NAME).field("instance", &self.shared.instance).finish_non_exhaustive()
    }
}
