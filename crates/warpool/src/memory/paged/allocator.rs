//! The calls of [`DeviceAllocator`].

use std::sync::Arc;

use warpool_driver::{DeviceId, DevicePtr, StreamId};

use super::device::{BlockRef, PagedDevice};
use super::free::{Fences, result_of};
use super::heap::Heap;
use super::last_heap::last_device;
use super::pending::PendingFrees;
use super::{PagedAllocator, decay, inactive, naming_backend, reclaim, snapshot};
use crate::ledger::LedgerPages;
use crate::memory::elastic_range::ElasticRanges;
use crate::memory::report::StackIds;
use crate::memory::{
    Allocation, Checkpoints, DeviceAllocator, GraphKey, HistoryOptions, MappedPart, MemPoolId, Observers, PageStats,
    PrivatePools, Request, Settings, Snapshot, SnapshotOptions, StackLevel, Stat, Stats, Usage,
};
use crate::{Error, Instance, Result, lock};

impl PagedAllocator {
    #[inline(always)]
    fn allocate_plain(&self, request: &Request) -> Option<Allocation> {
        self.devices.get(request.device.0 as usize)?.allocate_plain(request)
    }

    pub(super) fn locate(&self, ptr: DevicePtr) -> Result<(&PagedDevice, Allocation)> {
        self.instance().expect_own_process("find")?;
        for device in &self.devices {
            if let Some(at) = device.space.locate(ptr) {
                let heap = device.heaps.get(at.heap).lock();
                if let Some(block) = heap.allocated_at(at.kind, at.range, ptr.0) {
                    let slot = BlockRef { heap: at.heap, block }.pack();
                    return Ok((device, heap.allocation(block, device.id, slot)));
                }
            }
        }
        Err(Error::UnknownPointer { ptr })
    }
}

#[expect(unsafe_code, reason = "the promise of `DeviceAllocator`")]
// SAFETY: a block is a range of mapped pages that no other block overlaps, and is free before it is allocated again.
unsafe impl DeviceAllocator for PagedAllocator {
    fn name(&self) -> &'static str {
        "paged"
    }

    fn instance(&self) -> &Instance {
        &self.shared.instance
    }

    #[inline]
    fn allocate_raw(&self, request: Request) -> Result<Allocation> {
        match self.allocate_plain(&request) {
            Some(allocation) => Ok(allocation),
            None => self.allocate_checked(request),
        }
    }

    #[inline]
    fn free_raw(&self, ptr: DevicePtr) -> Result<()> {
        let device = self.devices.get(last_device());
        if device.is_some_and(|device| device.free_plain(ptr)) { Ok(()) } else { self.free_checked(ptr) }
    }

    fn allocate_cached(&self, request: &Request) -> Option<DevicePtr> {
        self.allocate_plain(request).map(|allocation| allocation.ptr)
    }

    fn free_cached(&self, device: DeviceId, ptr: DevicePtr) -> bool {
        self.devices.get(device.0 as usize).is_some_and(|device| device.free_plain(ptr))
    }

    fn record_use_raw(&self, ptr: DevicePtr, stream: StreamId) -> Result<()> {
        if ptr.is_null() {
            return Ok(());
        }
        let (device, allocation) = self.locate(ptr)?;
        device.change(&allocation, |heap, block| heap.add_use(block, stream))
    }

    fn find(&self, ptr: DevicePtr) -> Result<Allocation> {
        self.locate(ptr).map(|(_, allocation)| allocation)
    }

    fn free(&self, allocation: Allocation) -> Result<()> {
        if allocation.ptr.is_null() || self.instance().is_inherited() {
            return Ok(());
        }
        let outcome = self.device(allocation.device)?.free_allocation(&allocation, Fences::Now);
        result_of(&outcome, allocation.ptr)
    }

    fn free_later(&self, allocation: Allocation) {
        if let Ok(device) = self.device(allocation.device) {
            // A destructor cannot report that there is no such block.
            device.free_allocation(&allocation, Fences::Later);
        }
    }

    fn record_use(&self, allocation: Allocation, stream: StreamId) -> Result<()> {
        if allocation.ptr.is_null() {
            return Ok(());
        }
        self.device(allocation.device)?.change(&allocation, |heap, block| heap.add_use(block, stream))
    }

    fn record_uses_later(&self, allocation: Allocation, streams: &[StreamId]) {
        if let Ok(device) = self.device(allocation.device) {
            // It fails only for an allocation that does not exist.
            let _ = device.change(&allocation, |heap, block| heap.add_uses(block, streams));
        }
    }

    fn annotate(&self, ptr: DevicePtr, text: &str) -> Result<()> {
        self.record_annotation(ptr, text)
    }

    fn mapped_parts(&self, ptr: DevicePtr) -> Result<Vec<MappedPart>> {
        self.mapped_pages(ptr)
    }

    fn enable_peer_access(&self, device: DeviceId, owner: DeviceId) -> Result<()> {
        self.let_access(device, owner)
    }

    fn hold(&self, allocation: Allocation, _: GraphKey) -> Result<()> {
        if allocation.ptr.is_null() {
            return Ok(());
        }
        self.device(allocation.device)?.change(&allocation, Heap::add_hold)
    }

    fn end_hold(&self, allocation: Allocation, _: GraphKey) {
        if let Ok(device) = self.device(allocation.device) {
            let _ = device.change(&allocation, Heap::end_hold);
        }
    }

    fn trim(&self, device: DeviceId, pool: MemPoolId) -> Result<u64> {
        let paged_device = self.device(device)?;
        if pool.is_default() {
            self.shared.observers.run_trim_hooks(device);
        }
        let details = paged_device.timed_details(StackLevel::All);
        if !pool.is_default() {
            match lock(&paged_device.pools).uses(pool) {
                Ok(0) => {}
                // In use, or removed already with all that it had.
                Ok(_) | Err(Error::UnknownPool { .. }) => return Ok(0),
                Err(error) => return Err(error),
            }
        }
        let current = paged_device.instance().device(device.0)?.current_stream_id()?;
        if !paged_device.capture_status(current)?.is_capturing() {
            reclaim::wait_for_unknown_users(paged_device)?;
            PendingFrees::new(paged_device, &details).wait()?;
        }
        let trimmed = reclaim::release_all(paged_device, pool, 0, &details);
        paged_device.report();
        trimmed
    }

    fn release_idle(&self, device: DeviceId) -> Result<u64> {
        let device = self.device(device)?;
        // Without a call stack: the caller is a thread that has nothing to do with the memory.
        let details = device.timed_details(StackLevel::Never);
        if let Some(card) = device.card.get() {
            card.keep(device.driver());
        }
        let released = decay::release_idle(device, &details);
        device.report();
        released
    }

    fn share(&self, pages: &Arc<dyn LedgerPages>) -> Result<()> {
        self.instance().expect_own_process("share")?;
        self.join(pages)
    }

    fn largest_available(&self, device: DeviceId) -> Result<u64> {
        let paged_device = self.device(device)?;
        let free = paged_device.bytes_available()?;
        let largest = paged_device.heaps.iter().map(|(_, heap)| inactive::largest(&heap.lock()));
        Ok(free.max(largest.max().unwrap_or(0)))
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

    fn set_settings(&self, settings: Settings) -> Result<()> {
        self.shared.set_settings(naming_backend(settings));
        Ok(())
    }

    fn stats(&self, device: DeviceId) -> Result<Stats> {
        let mut stats = self.device(device)?.stats();
        stats.workspace_bytes = self.shared.observers.workspaces.read(device);
        Ok(stats)
    }

    fn usage(&self, device: DeviceId) -> Result<Usage> {
        let pages = self.count_pages(device)?;
        let of = self.device(device)?;
        let (mut stats, parts) = of.usage();
        stats.workspace_bytes = self.shared.observers.workspaces.read(device);
        Ok(Usage { stats, pages: Some(pages), bytes_limit: of.limit(), parts })
    }

    fn reset_peak_stats(&self, device: DeviceId) -> Result<()> {
        self.device(device)?.reset_peak();
        self.shared.observers.workspaces.change(device, Stat::reset_peak);
        Ok(())
    }

    fn reset_accumulated_stats(&self, device: DeviceId) -> Result<()> {
        self.device(device)?.reset_accumulated();
        self.shared.observers.workspaces.change(device, Stat::reset_accumulated);
        Ok(())
    }

    fn page_stats(&self, device: DeviceId) -> Result<PageStats> {
        self.count_pages(device)
    }

    fn snapshot(&self, options: SnapshotOptions) -> Result<Snapshot> {
        self.instance().expect_own_process("snapshot")?;
        let mut snapshot = Snapshot { settings: self.settings().recorded(), ..Snapshot::default() };
        let mut stacks = StackIds::default();
        for device in &self.devices {
            let details = device.timed_details(StackLevel::Alloc);
            snapshot::add_to(device, &mut snapshot, &mut stacks, options, &details);
            device.report();
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

    fn elastic(&self) -> Result<&dyn ElasticRanges> {
        Ok(self)
    }

    fn checkpoints(&self) -> Result<&dyn Checkpoints> {
        Ok(self)
    }
}
