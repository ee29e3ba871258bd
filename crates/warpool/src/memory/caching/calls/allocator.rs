//! The calls of [`DeviceAllocator`].

use std::sync::Arc;
use std::sync::atomic::Ordering;

use warpool_driver::{DeviceId, DevicePtr, StreamId};

use crate::memory::caching::CachingAllocator;
use crate::memory::caching::device::{CachingDevice, PoolVisit};
use crate::memory::caching::heap::BlockKey;
use crate::memory::caching::pending::PendingFrees;
use crate::memory::caching::state::{DeviceState, Search, ToFree};
use crate::memory::caching::{slow_path, source};
use crate::memory::report::EntryDetails;
use crate::memory::report::StackIds;
use crate::memory::{
    Allocation, Checkpoints, DeviceAllocator, GraphKey, HistoryOptions, MappedPart, MemPoolId, Observers, PrivatePools,
    Request, Settings, SizeRules, Snapshot, SnapshotOptions, StackLevel, Stat, StatByKind, Stats, Usage,
};
use crate::unwind::OnUnwind;
use crate::{Error, Instance, Result};

/// The outcome of a free. It is small enough to stay in a register: results of the hot path are not copied through
/// memory, where a wide load after narrow stores would stall.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Freed {
    /// No such block.
    Unknown,
    Completed,
    /// Other streams may still use it.
    Pending,
    /// A graph holds it: it is not freed.
    Held,
}

impl CachingDevice {
    /// Frees a block, if there is one. If other streams may still use it, `fence` gets it.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "the hot path; see `Freed`")]
    fn free(&self, to_free: ToFree<'_>, fence: impl FnOnce(&Self, BlockKey, &EntryDetails)) -> Freed {
        if self.collects_details() {
            return self.free_recorded(to_free, fence);
        }
        let details = EntryDetails::not_recorded();
        let mut state = self.lock_unsettled();
        if state.free_recent(to_free) {
            return Freed::Completed;
        }
        state.settle();
        let (freed, block) = free_found(&mut state, to_free, details);
        if state.recorder.has_unreported() {
            self.show(state, (), |state, ()| fence_later(state, (freed, block)));
        } else {
            drop(state);
        }
        if freed == Freed::Pending {
            fence(self, block, details);
        }
        freed
    }

    /// As `free`, while a history is recorded or trackers are registered. It completes also if user code panics. Not
    /// `cold`: with a history on, this is the hot path.
    #[inline(never)]
    fn free_recorded(&self, to_free: ToFree<'_>, fence: impl FnOnce(&Self, BlockKey, &EntryDetails)) -> Freed {
        // Entry details are collected only for a block of this device: if their hook panics, a caller that would look
        // for the block elsewhere does not get there.
        if self.read(|state| to_free.find(&state.heap).is_none()) {
            return Freed::Unknown;
        }
        let unwinds = OnUnwind::new(|| {
            self.change(|state| {
                let freed = free_found(state, to_free, EntryDetails::not_recorded());
                fence_later(state, freed);
            });
        });
        let details = self.entry_details(StackLevel::All);
        unwinds.disarm();
        let (freed, block) = self.with(|state| free_found(state, to_free, &details), fence_later);
        if freed == Freed::Pending {
            fence(self, block, &details);
        }
        freed
    }

    /// Frees the block that starts at `ptr`, if there is one.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "the hot path; see `Freed`")]
    fn free_at(&self, ptr: DevicePtr) -> Freed {
        self.free(ToFree::Address(ptr), Self::fence_pending)
    }

    /// Fences a block whose free is pending. It counts as freed even if that fails: the next call tries again, and
    /// returns an error that persists.
    #[cold]
    fn fence_pending(&self, block: BlockKey, details: &EntryDetails) {
        if let Err(error) = PendingFrees::new(self, details).fence_or_defer(block) {
            tracing::warn!(%error, "no fence could be recorded for a freed block; it is retried");
        }
        self.report();
    }
}

/// Frees a block, if there is one and no graph holds it. Also returns its key.
#[inline(always)]
#[expect(clippy::inline_always, reason = "the hot path; see `Freed`")]
fn free_found(state: &mut DeviceState, to_free: ToFree<'_>, details: &EntryDetails) -> (Freed, BlockKey) {
    let Some(block) = to_free.find(&state.heap) else { return (Freed::Unknown, BlockKey::default()) };
    if state.heap.block(block).is_held() {
        return (Freed::Held, block);
    }
    state.report_free(block);
    (if state.free(block, details) { Freed::Pending } else { Freed::Completed }, block)
}

/// Leaves the fences of a block whose free is pending to the next call.
fn fence_later(state: &mut DeviceState, (freed, block): (Freed, BlockKey)) {
    if freed == Freed::Pending {
        state.fence_later(block);
    }
}

impl CachingDevice {
    /// Returns cached memory of a pool to the driver.
    fn trim(&self, pool: MemPoolId, details: &EntryDetails) -> Result<u64> {
        let slow = self.lock_slow();
        source::retry_failed_calls(&slow);
        if pool.is_default() {
            let current = self.instance().device(self.id.0)?.current_stream_id()?;
            let capturing = slow.is_capturing(current)?;
            if !capturing {
                PendingFrees::new(&slow, details).wait()?;
            }
            return source::release_all(&slow, capturing, details);
        }
        match slow.read(|state| state.pools.uses(pool)) {
            Ok(0) => {
                PendingFrees::new(&slow, details).wait()?;
                source::release_pool(&slow, pool, details)
            }
            // The pool is in use, or was already removed together with its memory.
            Ok(_) | Err(Error::UnknownPool { .. }) => Ok(0),
            Err(error) => Err(error),
        }
    }
}

impl CachingAllocator {
    /// The hot path: a free block of the default pool, or of the pool that the request names, if no other work is due.
    /// `None` means that nothing changed.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a call would return the allocation through memory")]
    fn take_cached(&self, request: &Request) -> Option<Allocation> {
        if self.instance().is_inherited() {
            return None;
        }
        let device = self.devices.get(request.device.0 as usize)?;
        let is_plain = request.bytes > 0
            && request.bytes < SizeRules::REQUEST_TOO_LARGE
            && self.caching.load(Ordering::Acquire)
            && !(request.pool.is_none() && device.scopes.is_any_open())
            && !device.collects_details()
            && !device.has_captures();
        if !is_plain {
            return None;
        }
        let pool = request.pool.unwrap_or(MemPoolId::DEFAULT);
        let mut state = device.lock_unsettled();
        let allocation = match state.allocate_recent(pool, request.stream, request.bytes) {
            Some(allocation) => allocation,
            None => {
                state.settle();
                state.allocate_plain(pool, request.stream, request.bytes)?
            }
        };
        Some(allocation)
    }

    /// The general path of an allocation: driver calls, captures, private pools, history. Not `cold`, as above.
    #[inline(never)]
    fn allocate_general(&self, request: &Request) -> Result<Allocation> {
        let Request { device, stream, bytes, pool } = *request;
        let caching_device = self.device(device)?;
        if bytes == 0 {
            return Ok(Allocation::empty(device, stream));
        }
        if bytes >= SizeRules::REQUEST_TOO_LARGE {
            return Err(Error::RequestTooLarge { bytes });
        }
        let device = caching_device;
        if !self.caching.load(Ordering::Acquire) && !device.is_capturing(stream)? {
            return self.allocate_direct(device, *request);
        }
        let mut pool = match pool {
            Some(pool) => pool,
            None => device.routed(stream)?,
        };
        let details = device.entry_details(StackLevel::State);
        let capturing = device.is_capturing(stream)?;
        if capturing {
            PendingFrees::new(device, &details).reuse_in_capture(stream)?;
        }
        let mut process_pending = !capturing;
        loop {
            let search = |state: &mut DeviceState| {
                if process_pending && state.has_pending() {
                    return Search::Pending;
                }
                state.search((pool, stream, bytes), capturing, &details)
            };
            let search = device.with(search, |state, search| match search {
                Search::Found(allocation) => {
                    state.abandon(&allocation, &details);
                    None
                }
                Search::NotFound(_) => state.leave_pool(pool),
                Search::Pending | Search::Refused(_) => None,
            });
            match search {
                Search::Found(allocation) => return Ok(allocation),
                Search::NotFound(request) => {
                    let visit = PoolVisit::entered(device, pool);
                    let outcome = slow_path::allocate(device, &request, capturing, &details);
                    drop(visit);
                    return outcome;
                }
                Search::Pending => PendingFrees::new(device, &details).process()?,
                Search::Refused(error) => {
                    // Another thread may have closed the scope since the request was routed: route it again.
                    let routed = if request.pool.is_none() { device.routed(stream)? } else { pool };
                    if routed == pool {
                        return Err(*error);
                    }
                    pool = routed;
                }
            }
            process_pending = false;
        }
    }
}

#[expect(unsafe_code, reason = "the promise of `DeviceAllocator`")]
// SAFETY: a block is a part of a segment that no other block overlaps (`heap/check.rs`), and is free before it is
// allocated again.
unsafe impl DeviceAllocator for CachingAllocator {
    fn name(&self) -> &'static str {
        "caching"
    }

    fn instance(&self) -> &Instance {
        &self.shared.instance
    }

    fn allocate_raw(&self, request: Request) -> Result<Allocation> {
        match self.take_cached(&request) {
            Some(allocation) => Ok(allocation),
            None => self.allocate_general(&request),
        }
    }

    fn free_raw(&self, ptr: DevicePtr) -> Result<()> {
        if ptr.is_null() || self.instance().is_inherited() {
            return Ok(());
        }
        for device in &self.devices {
            match device.free_at(ptr) {
                Freed::Unknown => {}
                Freed::Completed | Freed::Pending => return Ok(()),
                Freed::Held => return Err(Error::HeldByGraph { ptr }),
            }
        }
        if self.free_direct(ptr)? {
            return Ok(());
        }
        Err(Error::UnknownPointer { ptr })
    }

    fn allocate_cached(&self, request: &Request) -> Option<DevicePtr> {
        self.take_cached(request).map(|allocation| allocation.ptr)
    }

    fn free_cached(&self, device: DeviceId, ptr: DevicePtr) -> bool {
        !self.instance().is_inherited()
            && self
                .devices
                .get(device.0 as usize)
                .is_some_and(|device| matches!(device.free_at(ptr), Freed::Completed | Freed::Pending))
    }

    /// `ptr` is a multiple of 512.
    fn allocate_at(&self, request: Request, ptr: DevicePtr) -> Result<Allocation> {
        self.take_at(request, ptr)
    }

    fn record_use_raw(&self, ptr: DevicePtr, stream: StreamId) -> Result<()> {
        self.instance().expect_own_process("record_use")?;
        if ptr.is_null() || self.record_direct_use(ptr, stream)? {
            return Ok(());
        }
        let (device, block) = self.locate(ptr)?;
        let in_capture = device.is_capturing(stream)?;
        device.change(|state| state.record_use(block, ptr, stream, in_capture));
        Ok(())
    }

    fn find(&self, ptr: DevicePtr) -> Result<Allocation> {
        self.instance().expect_own_process("find")?;
        let find = |state: &DeviceState| state.heap.allocated_at(ptr).map(|block| state.allocation(block));
        let found = self.devices.iter().find_map(|device| device.read(find));
        found.ok_or(Error::UnknownPointer { ptr })
    }

    fn free(&self, allocation: Allocation) -> Result<()> {
        if self.instance().is_inherited() {
            return Ok(());
        }
        let device = self.device(allocation.device)?;
        if allocation.slot == 0 {
            return self.free_raw(allocation.ptr);
        }
        let ptr = allocation.ptr;
        match device.free(ToFree::Allocation(&allocation), CachingDevice::fence_pending) {
            Freed::Unknown => Err(Error::UnknownPointer { ptr }),
            Freed::Completed | Freed::Pending => Ok(()),
            Freed::Held => Err(Error::HeldByGraph { ptr }),
        }
    }

    fn free_later(&self, allocation: Allocation) {
        let Ok(device) = self.device(allocation.device) else { return };
        if allocation.slot == 0 {
            self.free_direct_later(allocation.ptr);
            return;
        }
        device.free(ToFree::Allocation(&allocation), |device, block, _| {
            device.change(|state| state.fence_later(block));
        });
    }

    fn annotate(&self, ptr: DevicePtr, text: &str) -> Result<()> {
        self.record_annotation(ptr, text)
    }

    fn mapped_parts(&self, ptr: DevicePtr) -> Result<Vec<MappedPart>> {
        self.mapped_chunks(ptr)
    }

    fn maps_memory(&self) -> bool {
        self.settings().expandable_segments
    }

    fn enable_peer_access(&self, device: DeviceId, owner: DeviceId) -> Result<()> {
        self.let_access(device, owner)
    }

    fn hold(&self, allocation: Allocation, _: GraphKey) -> Result<()> {
        let device = self.device(allocation.device)?;
        if allocation.slot == 0 {
            self.bypass.change(allocation.ptr, |block| block.holds += 1);
            return Ok(());
        }
        device.change(|state| state.hold(&allocation))
    }

    fn end_hold(&self, allocation: Allocation, _: GraphKey) {
        if self.instance().is_inherited() {
            return;
        }
        if allocation.slot == 0 {
            self.bypass.change(allocation.ptr, |block| block.holds = block.holds.saturating_sub(1));
        } else if let Ok(device) = self.device(allocation.device) {
            device.change(|state| state.end_hold(&allocation));
        }
    }

    fn record_uses_later(&self, allocation: Allocation, streams: &[StreamId]) {
        // Memory that was allocated while caching was off is freed by the driver, which waits for all work.
        if let Ok(device) = self.device(allocation.device) {
            device.change(|state| state.record_uses(&allocation, streams));
        }
    }

    fn trim(&self, device: DeviceId, pool: MemPoolId) -> Result<u64> {
        let caching_device = self.device(device)?;
        if pool.is_default() {
            self.shared.observers.run_trim_hooks(device);
        }
        let details = caching_device.timed_details(StackLevel::All);
        let freed = self.trim_direct(caching_device);
        let trimmed = caching_device.trim(pool, &details);
        caching_device.report();
        trimmed.and_then(|bytes| freed.map(|()| bytes))
    }

    fn largest_available(&self, device: DeviceId) -> Result<u64> {
        let caching_device = self.device(device)?;
        let free = self.driver().mem_info(device)?.bytes_free;
        Ok(free.max(caching_device.read(|state| state.heap.largest_free())))
    }

    fn set_memory_fraction(&self, device: DeviceId, fraction: f64) -> Result<()> {
        self.device(device)?.change_limits(|limits| limits.set_fraction(fraction))
    }

    fn memory_fraction(&self, device: DeviceId) -> Result<f64> {
        Ok(self.device(device)?.limits().fraction())
    }

    fn set_memory_cap(&self, device: DeviceId, bytes: Option<u64>) -> Result<()> {
        self.device(device)?.change_limits(|limits| limits.cap = bytes);
        Ok(())
    }

    fn settings(&self) -> Arc<Settings> {
        self.shared.settings()
    }

    /// Expandable segments serve requests only while `expandable_segments` is on.
    fn set_settings(&self, settings: Settings) -> Result<()> {
        if !self.instance().is_inherited() {
            self.devices.iter().for_each(|device| device.set_settings(&settings));
            self.shared.set_settings(settings);
        }
        Ok(())
    }

    /// A free whose driver call fails is retried by later frees and by [`trim`](DeviceAllocator::trim).
    ///
    /// A capturing stream is still served from the cache, out of the graph's pool. Other memory that a capture used and
    /// that is freed during it stays allocated until the pools of the graph are released; for a capture without a
    /// private pool, until the allocator is trimmed outside of captures.
    fn set_caching(&self, on: bool) -> Result<()> {
        self.caching.store(on, Ordering::Release);
        Ok(())
    }

    fn stats(&self, device: DeviceId) -> Result<Stats> {
        let mut stats = self.device(device)?.read(|state| {
            let mut stats = state.counters.stats.clone();
            state.pools.sleeping.write(&mut stats);
            stats
        });
        stats.workspace_bytes = self.shared.observers.workspaces.read(device);
        Ok(stats)
    }

    fn usage(&self, device: DeviceId) -> Result<Usage> {
        let stats = self.stats(device)?;
        let stats =
            Stats { inactive_split: StatByKind::default(), inactive_split_bytes: StatByKind::default(), ..stats };
        let device = self.device(device)?;
        let parts = device.read(DeviceState::usage);
        Ok(Usage { stats, pages: None, bytes_limit: device.limit(), parts })
    }

    fn reset_peak_stats(&self, device: DeviceId) -> Result<()> {
        self.device(device)?.change(|state| {
            state.counters.stats.reset_peak();
            state.pools.sleeping.reset_peak();
        });
        self.shared.observers.workspaces.change(device, Stat::reset_peak);
        Ok(())
    }

    fn reset_accumulated_stats(&self, device: DeviceId) -> Result<()> {
        self.device(device)?.change(|state| {
            state.counters.stats.reset_accumulated();
            state.pools.sleeping.reset_accumulated();
        });
        self.shared.observers.workspaces.change(device, Stat::reset_accumulated);
        Ok(())
    }

    fn snapshot(&self, options: SnapshotOptions) -> Result<Snapshot> {
        self.instance().expect_own_process("snapshot")?;
        let mut snapshot = Snapshot { settings: self.settings().recorded(), ..Snapshot::default() };
        let mut stacks = StackIds::default();
        for device in &self.devices {
            let details = device.timed_details(StackLevel::Alloc);
            let add = |state: &mut DeviceState| state.add_to(&mut snapshot, &mut stacks, options, &details);
            let history = device.with(add, |_, history| history);
            history.add_to(&mut snapshot, &mut stacks);
        }
        Ok(snapshot)
    }

    fn record_history(&self, options: Option<HistoryOptions>) -> Result<()> {
        self.instance().expect_own_process("record_history")?;
        self.devices.iter().for_each(|device| device.record_history(options.as_ref()));
        Ok(())
    }

    fn observers(&self) -> &Observers {
        &self.shared.observers
    }

    fn pools(&self) -> Result<&dyn PrivatePools> {
        Ok(self)
    }

    fn checkpoints(&self) -> Result<&dyn Checkpoints> {
        Ok(self)
    }
}
