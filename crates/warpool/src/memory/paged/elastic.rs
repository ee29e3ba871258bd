//! Elastic memory: a heap of its own for each range, whose blocks are slots at addresses that the caller chooses. What
//! is decommitted is free memory of that heap, so its pages serve other heaps as those of any heap do, after an event
//! of its stream; what is committed gets pages from the same sources as any request (`fill/slots.rs`).
//!
//! A range is a pool to everybody else: in statistics, in snapshots, and when it is released. That pool serves no
//! requests.
//!
//! The heap has one stream, that of the reservation. A commit in another stream makes that one wait for it, and a
//! decommit there makes the heap's stream wait for the other one: so the order of the heap's stream is the order of all
//! uses, as everywhere.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use warpool_driver::{DeviceId, DevicePtr, StreamId};

use super::PagedAllocator;
use super::address_space::Location;
use super::device::PagedDevice;
use super::elastic_table::Elastic;
use super::fill::{FillRequest, Slots, allocate_slots};
use super::free::Fences;
use super::ids::BlockId;
use super::page_sizes::PageSizes;
use super::pending::PendingFrees;
use super::pools::{PoolHeaps, Takeable};
use super::{reclaim, segments};
use crate::defect::Defect;
use crate::memory::elastic_range::{ElasticBlocks, ElasticChange, ElasticLayout, ElasticRange, ElasticRanges};
use crate::memory::pool_owner::PoolOwner as _;
use crate::memory::report::EntryDetails;
use crate::memory::stream_fence::order_outside_captures;
use crate::memory::{Action, MemPoolId, OomCause, PoolOptions, PoolUser, Request, SegmentKind, StackLevel};
use crate::{Error, Result, lock};

/// Why a commit did not succeed.
enum Failed {
    OutOfMemory(OomCause),
    Error(Error),
}

impl From<Error> for Failed {
    fn from(error: Error) -> Self {
        Self::Error(error)
    }
}

impl PagedDevice {
    fn elastic_of(&self, range: &ElasticRange) -> Result<Arc<Mutex<Elastic>>> {
        let known = lock(&self.elastic).get(&range.pool).map(Arc::clone);
        known.ok_or(Error::UnknownElastic { ptr: range.ptr })
    }

    /// Reserves addresses in the heap of a stream and pool.
    fn reserve_elastic(&self, stream: StreamId, pool: MemPoolId, layout: ElasticLayout) -> Result<Elastic> {
        let heap = self.add_heap(stream, pool, |heap| heap.unused_range(layout.bytes()).is_some())?;
        let mut table = lock(&self.pages);
        let known = self.heaps.get(heap).lock().unused_range(layout.bytes());
        let (in_heap, on_device, base) = match known {
            Some((in_heap, on_device, base, _)) => (in_heap, on_device, base),
            None => {
                let reserved = self.space.reserve(self.instance(), layout.bytes())?;
                let (base, bytes) = reserved.ok_or(Error::RequestTooLarge { bytes: layout.bytes() })?;
                let on_device = table.add_range(base, bytes, heap, SegmentKind::Large);
                let in_heap = self.heaps.get(heap).lock().add_range(SegmentKind::Large, on_device, base, bytes);
                self.space.assign(base, bytes, Location { heap, kind: SegmentKind::Large, range: in_heap });
                (in_heap, on_device, base)
            }
        };
        table.set_pool(heap, pool);
        self.heaps.get(heap).lock().set_elastic(in_heap, true);
        let page_bytes = u64::from(PageSizes::SLOTS_MAX) * table.slot_bytes;
        let range = ElasticRange { device: self.id, stream, pool, ptr: DevicePtr(base), layout, page_bytes };
        let blocks = ElasticBlocks::new(layout, table.slot_bytes);
        Ok(Elastic {
            range,
            slot_bytes: table.slot_bytes,
            heap,
            on_device,
            in_heap,
            blocks,
            slots: BTreeMap::new(),
            asleep: None,
            is_released: false,
        })
    }

    /// Fails unless a stream may order changes of elastic memory.
    fn expect_not_capturing(&self, stream: StreamId) -> Result<()> {
        if self.capture_status(stream)?.refuses_work() { Err(Error::ElasticInCapture { stream }) } else { Ok(()) }
    }

    /// Makes later work of a stream wait for what another one holds.
    fn order(&self, earlier: StreamId, later: StreamId) -> Result<()> {
        if earlier == later
            || Defect::ElasticIgnoresStreams.is_on()
            || order_outside_captures(self.instance(), earlier, later)?
        {
            return Ok(());
        }
        Err(Error::ElasticInCapture { stream: if self.is_capturing(later)? { later } else { earlier } })
    }

    fn commit(
        &self,
        elastic: &mut Elastic,
        stream: StreamId,
        blocks: Range<u64>,
        on_oom: bool,
        details: &EntryDetails,
    ) -> std::result::Result<(), Failed> {
        let change = elastic.blocks.commit(blocks);
        let mut outcome = Ok(());
        let mut gained = Vec::new();
        for slots in &change.slots {
            match self.fill_slots(elastic, slots, on_oom, details) {
                Ok(()) => gained.extend(slots.clone()),
                Err(failed) => {
                    outcome = Err(failed);
                    break;
                }
            }
        }
        let outcome = outcome.and_then(|()| match Defect::CommitIgnoresStream.is_on() {
            true => Ok(()),
            false => Ok(self.order(elastic.range.stream, stream)?),
        });
        if outcome.is_err() {
            elastic.blocks.undo(&change);
            if Defect::FailedCommitKeepsSlots.is_on() {
                return outcome;
            }
            self.free_slots(elastic, gained.into_iter(), Fences::Now, details);
        } else {
            self.report_committed(elastic, stream, &change);
        }
        outcome
    }

    /// Allocates neighbouring slots.
    fn fill_slots(
        &self,
        elastic: &mut Elastic,
        slots: &Range<u32>,
        on_oom: bool,
        details: &EntryDetails,
    ) -> std::result::Result<(), Failed> {
        let ElasticRange { stream, pool, .. } = elastic.range;
        let [start, end] = [slots.start, slots.end].map(|slot| elastic.addr(slot));
        let request = FillRequest {
            heap: elastic.heap,
            requested: end - start,
            stream,
            pool,
            capturing: self.is_capturing(stream)?,
            on_oom,
        };
        let before = elastic.slots.range(..slots.start).next_back().map(|(_, &block)| block);
        let wanted = Slots { range: elastic.on_device, range_in_heap: elastic.in_heap, start, end, before };
        self.using(elastic.heap);
        let allocated = allocate_slots(self, request, wanted, details)?.map_err(Failed::OutOfMemory)?;
        if !details.is_off() {
            let mut heap = self.heaps.get(elastic.heap).lock();
            for &block in &allocated {
                heap.set_stack(block, details.stack.clone());
                let (addr, bytes) = (heap.block(block).addr(), heap.block(block).bytes());
                self.record(Action::Alloc, addr, bytes, &heap, details);
            }
        }
        elastic.slots.extend(slots.clone().zip(allocated));
        Ok(())
    }

    fn free_slots(
        &self,
        elastic: &mut Elastic,
        slots: impl Iterator<Item = u32>,
        fences: Fences,
        details: &EntryDetails,
    ) {
        let blocks: Vec<BlockId> = slots.filter_map(|slot| elastic.slots.remove(&slot)).collect();
        if !blocks.is_empty() {
            self.free_known(elastic.heap, &blocks, fences, details);
        }
    }

    /// Reports to a driver that tracks suballocations which bytes may be used: in new slots only those of the blocks.
    fn report_committed(&self, elastic: &Elastic, stream: StreamId, change: &ElasticChange) {
        if !self.shared().tracks_suballocations {
            return;
        }
        for slots in &change.slots {
            let (start, end) = (elastic.addr(slots.start), elastic.addr(slots.end));
            self.driver().suballocation_freed(DevicePtr(start), end - start);
        }
        for piece in change.blocks.iter().flat_map(|blocks| elastic.range.layout.pieces(blocks)) {
            let ptr = elastic.range.ptr.offset(piece.start);
            self.driver().suballocated_in_place(ptr, piece.end - piece.start, stream);
        }
    }

    fn report_decommitted(&self, elastic: &Elastic, change: &ElasticChange) {
        if !self.shared().tracks_suballocations {
            return;
        }
        for piece in change.blocks.iter().flat_map(|blocks| elastic.range.layout.pieces(blocks)) {
            self.driver().suballocation_freed(elastic.range.ptr.offset(piece.start), piece.end - piece.start);
        }
    }

    /// Counts a commit that failed, and makes the report.
    fn elastic_shortage(
        &self,
        elastic: &Mutex<Elastic>,
        blocks: &Range<u64>,
        why: OomCause,
        details: &EntryDetails,
    ) -> Error {
        let (ElasticRange { stream, layout, .. }, heap) = {
            let elastic = lock(elastic);
            (elastic.range, elastic.heap)
        };
        let bytes = (blocks.end - blocks.start) * layout.rows * layout.block_bytes;
        Error::OutOfMemory(Box::new(self.shortage(&Request::new(self.id, stream, bytes), heap, why, false, details)))
    }
}

impl PagedAllocator {
    /// Commits blocks. No user code is called but what a trim calls.
    fn try_commit(
        &self,
        range: &ElasticRange,
        stream: StreamId,
        blocks: Range<u64>,
        though_asleep: bool,
        details: &EntryDetails,
    ) -> Result<()> {
        range.layout.check_blocks(&blocks)?;
        let device = self.device(range.device)?;
        let elastic = device.elastic_of(range)?;
        [stream, range.stream].into_iter().try_for_each(|stream| device.expect_not_capturing(stream))?;
        if device.has_pending() {
            PendingFrees::new(device, details).process()?;
        }
        let attempt = |on_oom| {
            let mut elastic = lock(&elastic);
            elastic.expect_usable(though_asleep)?;
            device.commit(&mut elastic, stream, blocks.clone(), on_oom, details)
        };
        let wait = |why: OomCause, is_last: bool| {
            let bytes = (blocks.end - blocks.start).saturating_mul(range.layout.rows * range.layout.block_bytes);
            device.wait_for_others((why, bytes), is_last, || match attempt(false) {
                Ok(()) => Ok(Ok(())),
                Err(Failed::OutOfMemory(why)) => Ok(Err(why)),
                Err(Failed::Error(error)) => Err(error),
            })
        };
        let mut outcome = attempt(false);
        if let Err(Failed::OutOfMemory(why)) = outcome {
            if wait(why, false)?.is_some() {
                return Ok(());
            }
            reclaim::wait_for_unknown_users(device)?;
            PendingFrees::new(device, details).wait()?;
            device.counts.retries.fetch_add(1, Ordering::Relaxed);
            segments::release(device, MemPoolId::DEFAULT, 0, details)?;
            outcome = attempt(true);
            if matches!(outcome, Err(Failed::OutOfMemory(_))) && device.release_tagged(details)? > 0 {
                outcome = attempt(true);
            }
        }
        if let Err(Failed::OutOfMemory(why)) = outcome
            && wait(why, true)?.is_some()
        {
            return Ok(());
        }
        outcome.map_err(|failed| match failed {
            Failed::Error(error) => error,
            Failed::OutOfMemory(why) => device.elastic_shortage(&elastic, &blocks, why, details),
        })
    }

    /// Decommits blocks. No user code is called.
    fn try_decommit(
        &self,
        range: &ElasticRange,
        stream: StreamId,
        blocks: Range<u64>,
        though_asleep: bool,
        details: &EntryDetails,
    ) -> Result<()> {
        range.layout.check_blocks(&blocks)?;
        let device = self.device(range.device)?;
        let elastic = device.elastic_of(range)?;
        [stream, range.stream].into_iter().try_for_each(|stream| device.expect_not_capturing(stream))?;
        let mut elastic = lock(&elastic);
        elastic.expect_usable(though_asleep)?;
        if !Defect::DecommitIgnoresStream.is_on() {
            device.order(stream, elastic.range.stream)?;
        }
        let change = elastic.blocks.decommit(blocks);
        device.report_decommitted(&elastic, &change);
        device.free_slots(&mut elastic, change.slots.into_iter().flatten(), Fences::Now, details);
        Ok(())
    }
}

impl ElasticRanges for PagedAllocator {
    fn reserve(&self, device: DeviceId, stream: StreamId, layout: ElasticLayout) -> Result<ElasticRange> {
        layout.check()?;
        let on_device = self.device(device)?;
        let pool = self.shared.pool_ids.next_user();
        lock(&on_device.pools).add(pool, PoolOptions::default(), PoolHeaps::elastic());
        match on_device.reserve_elastic(stream, pool, layout) {
            Ok(elastic) => {
                let range = elastic.range;
                lock(&on_device.elastic).insert(pool, Arc::new(Mutex::new(elastic)));
                Ok(range)
            }
            Err(error) => {
                self.end_use(device, pool, PoolUser::RAW)?;
                Err(error)
            }
        }
    }

    fn commit(&self, range: &ElasticRange, stream: StreamId, blocks: Range<u64>) -> Result<()> {
        let device = self.device(range.device)?;
        let details = device.entry_details(StackLevel::State);
        let outcome = self.try_commit(range, stream, blocks, false, &details);
        device.drop_removed();
        device.report();
        if let Err(Error::OutOfMemory(report)) = &outcome {
            device.observers().report_oom(report);
        }
        outcome
    }

    fn decommit(&self, range: &ElasticRange, stream: StreamId, blocks: Range<u64>) -> Result<()> {
        let device = self.device(range.device)?;
        let details = device.entry_details(StackLevel::All);
        let outcome = self.try_decommit(range, stream, blocks, false, &details);
        device.report();
        outcome
    }

    fn change_asleep(&self, range: &ElasticRange, stream: StreamId, blocks: Range<u64>, commit: bool) -> Result<()> {
        let change = if commit { Self::try_commit } else { Self::try_decommit };
        change(self, range, stream, blocks, true, &EntryDetails::default())
    }

    fn set_asleep(&self, range: &ElasticRange, tag: Option<&Arc<str>>) {
        if let Ok(elastic) = self.device(range.device).and_then(|device| device.elastic_of(range)) {
            lock(&elastic).asleep = tag.map(Arc::clone);
        }
    }

    fn committed(&self, range: &ElasticRange) -> u64 {
        let elastic = self.device(range.device).and_then(|device| device.elastic_of(range));
        elastic.map_or(0, |elastic| lock(&elastic).blocks.count())
    }

    fn committed_blocks(&self, range: &ElasticRange) -> Vec<Range<u64>> {
        let elastic = self.device(range.device).and_then(|device| device.elastic_of(range));
        elastic.map_or_else(|_| Vec::new(), |elastic| lock(&elastic).blocks.committed())
    }

    fn vacate(&self, range: &ElasticRange) -> Result<u64> {
        let device = self.device(range.device)?;
        device.elastic_of(range)?;
        let released = reclaim::release_all(device, range.pool, 0, &device.timed_details(StackLevel::All));
        device.report();
        released
    }

    fn is_committed(&self, range: &ElasticRange, mut blocks: Range<u64>) -> bool {
        let elastic = self.device(range.device).and_then(|device| device.elastic_of(range));
        range.layout.check_blocks(&blocks).is_ok()
            && elastic.is_ok_and(|elastic| {
                let elastic = lock(&elastic);
                blocks.all(|block| elastic.blocks.is_committed(block))
            })
    }

    fn release(&self, range: &ElasticRange) {
        let Ok(device) = self.device(range.device) else { return };
        let Some(elastic) = lock(&device.elastic).remove(&range.pool) else { return };
        let details = device.timed_details(StackLevel::All);
        let mut elastic = lock(&elastic);
        elastic.is_released = true;
        let change = elastic.blocks.decommit(0..range.layout.blocks);
        device.report_decommitted(&elastic, &change);
        device.free_slots(&mut elastic, change.slots.into_iter().flatten(), Fences::Later, &details);
        device.heaps.get(elastic.heap).lock().set_elastic(elastic.in_heap, false);
        // It fails only for a pool that does not exist.
        let _ = self.end_use(range.device, range.pool, PoolUser::RAW);
    }

    fn headroom(&self, device: DeviceId) -> Result<u64> {
        let device = self.device(device)?;
        let free = device.bytes_available()?;
        let table = lock(&device.pages);
        let room = device.limit().map_or(u64::MAX, |limit| limit.saturating_sub(table.bytes_limited()));
        let mut bytes = free.min(room) / table.slot_bytes * table.slot_bytes;
        bytes += table.spare_pages().map(|page| table.page_bytes(page)).sum::<u64>();
        for (_, cell) in device.heaps.iter() {
            let pool = cell.lock().pool;
            if matches!(lock(&device.pools).takeable(pool), Takeable::After(_)) {
                let mut heap = cell.lock();
                heap.merge_recent();
                bytes += table.free_pages(&heap).map(|page| table.page_bytes(page)).sum::<u64>();
            }
        }
        Ok(bytes)
    }
}
