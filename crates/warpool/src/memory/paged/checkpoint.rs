//! Checkpoints of private pools: all heaps of a pool are changed in one step, under their locks together.

use std::collections::BTreeSet;

use rustc_hash::FxHashMap;
use warpool_driver::{DeviceId, DevicePtr, StreamId};

use super::PagedAllocator;
use super::address_space::Location;
use super::device::{BlockRef, PagedDevice};
use super::free::Fences;
use super::heap::{Freed, Heap, Kept, State};
use super::ids::{BlockId, HeapId};
use super::pending::PendingFrees;
use crate::memory::checkpoint::{BlockUses, SavedBlock, StreamOrder, UsedRanges, refused_pending, restore_ordered};
use crate::memory::report::EntryDetails;
use crate::memory::{
    Action, Allocation, Checkpoints, DeviceAllocator as _, MemPoolId, PoolCheckpoint, Restored, StackLevel,
};
use crate::sync::spin_lock::SpinGuard;
use crate::unwind::OnUnwind;
use crate::{Result, lock};

/// The heaps of a pool, locked, by number.
struct PoolHeaps<'a>(Vec<(HeapId, SpinGuard<'a, Heap>)>);

impl<'a> PoolHeaps<'a> {
    fn lock(device: &'a PagedDevice, pool: MemPoolId) -> Result<Self> {
        let mut numbers = lock(&device.pools).checkpointed(pool)?.heaps();
        // In one order. Nobody else locks two heaps at a time.
        numbers.sort_unstable();
        let heaps = numbers.into_iter().map(|number| (number, device.heaps.get(number).lock()));
        let heaps = Self(heaps.collect());
        if heaps.0.iter().any(|(_, heap)| heap.all_blocks().any(|(_, block)| block.state() == State::Pending)) {
            return Err(refused_pending(pool));
        }
        Ok(heaps)
    }

    fn orders(&self, checkpoint: &PoolCheckpoint) -> BTreeSet<StreamOrder> {
        let mut orders = BTreeSet::new();
        for (_, heap) in &self.0 {
            for (id, block) in heap.all_blocks().filter(|&(id, _)| !heap.is_held(id) && !heap.is_lent(id)) {
                if checkpoint.overlaps(block.addr(), block.addr() + block.bytes()) {
                    orders.extend(StreamOrder::all(heap.stream, heap.streams_using(id), &[]));
                }
            }
        }
        orders
    }

    /// Where every saved block is; `None` for one that a graph holds and that is as it was.
    fn places(&self, device: &PagedDevice, checkpoint: &PoolCheckpoint) -> Result<Vec<Option<(usize, Location)>>> {
        let place = |saved: &SavedBlock| {
            let gone = || checkpoint.released_since(saved);
            let at = device.space.locate(DevicePtr(saved.ptr)).ok_or_else(gone)?;
            let index = self.0.iter().position(|(number, _)| *number == at.heap).ok_or_else(gone)?;
            match self.0[index].1.room_at(at.kind, at.range, (saved.ptr, saved.end())) {
                Ok(None) => Ok(None),
                Ok(Some(true)) => Ok(Some((index, at))),
                Ok(Some(false)) => Err(gone()),
                Err(Kept::Held(held)) => Err(checkpoint.held_block(held)),
                Err(Kept::Lent(lent)) => Err(checkpoint.lent_block(lent)),
            }
        };
        checkpoint.blocks.iter().map(place).collect()
    }
}

impl PagedDevice {
    fn checkpoint(&self, allocator: u64, pool: MemPoolId) -> Result<PoolCheckpoint> {
        lock(&self.pools).record_checkpoint(pool)?;
        let heaps = PoolHeaps::lock(self, pool)?;
        let mut blocks = Vec::new();
        for (_, heap) in &heaps.0 {
            let allocated = heap.all_blocks().filter(|(_, block)| block.state() == State::Allocated);
            let own = allocated.filter(|&(id, _)| !heap.is_lent(id));
            blocks.extend(own.map(|(id, block)| SavedBlock {
                ptr: block.addr(),
                size: block.bytes(),
                requested: block.requested(),
                uses: BlockUses { streams: heap.streams_using(id).to_vec(), in_capture: Vec::new() },
            }));
        }
        blocks.sort_by_key(|block| block.ptr);
        Ok(PoolCheckpoint { allocator, device: self.id, pool, blocks })
    }

    /// Frees what is allocated in the pool, and allocates what the checkpoint recorded. `None`, and nothing changes, if
    /// more streams use that memory than are `ordered`. Blocks that wait for streams are pushed to `pending`,
    /// and heaps whose streams may be destroyed from then on to `ended`.
    fn restore(
        &self,
        checkpoint: &PoolCheckpoint,
        ordered: &BTreeSet<StreamOrder>,
        (pending, ended): (&mut Vec<BlockRef>, &mut Vec<(HeapId, StreamId)>),
        details: &EntryDetails,
    ) -> Result<Option<Restored>> {
        let mut heaps = PoolHeaps::lock(self, checkpoint.pool)?;
        let places = heaps.places(self, checkpoint)?;
        if !heaps.orders(checkpoint).is_subset(ordered) {
            return Ok(None);
        }
        let (mut freed, mut used) = (Vec::new(), UsedRanges::default());
        for (number, heap) in &mut heaps.0 {
            let ends = heap.ends();
            let blocks = heap.all_blocks().filter(|(_, block)| block.state() == State::Allocated);
            let is_kept = |id: BlockId| heap.is_held(id) || heap.is_lent(id);
            let blocks: Vec<BlockId> = blocks.map(|(id, _)| id).filter(|&id| !is_kept(id)).collect();
            for id in blocks {
                let (start, bytes, requested) =
                    (heap.block(id).addr(), heap.block(id).bytes(), heap.block(id).requested());
                if checkpoint.overlaps(start, start + bytes) {
                    let streams = heap.take_uses(id);
                    used.push((start, start + bytes), BlockUses { streams, in_capture: Vec::new() });
                }
                freed.push(DevicePtr(start));
                let stack = heap.stack(id).cloned();
                let details = &*details.of_free(stack.as_ref());
                self.record(Action::FreeRequested, start, requested, heap, details);
                match heap.free(id) {
                    Freed::Completed => self.record(Action::FreeCompleted, start, requested, heap, details),
                    Freed::Pending => pending.push(BlockRef { heap: *number, block: id }),
                }
            }
            heap.merge_recent();
            ended.extend((heap.ends() != ends).then_some((*number, heap.stream)));
        }
        freed.sort_unstable();
        used.sort();
        let (mut allocated, mut anchors) = (Vec::new(), FxHashMap::default());
        for (saved, place) in checkpoint.blocks.iter().zip(places) {
            let Some((index, at)) = place else { continue };
            let (number, heap) = &mut heaps.0[index];
            let anchor = anchors.entry((*number, at.kind as usize, at.range)).or_insert(None);
            let id = heap.allocate_at(at.kind, at.range, (saved.ptr, saved.size), saved.requested, *anchor);
            *anchor = Some(id);
            heap.add_uses(id, &saved.uses.streams);
            used.of(saved).for_each(|range| heap.add_uses(id, &range.uses.streams));
            let slot = BlockRef { heap: *number, block: id }.pack();
            let allocation = heap.allocation(id, self.id, slot);
            heap.set_stack(id, details.stack.clone());
            self.record(Action::Alloc, saved.ptr, saved.requested, heap, details);
            self.report_allocated(&allocation);
            allocated.push(allocation);
        }
        Ok(Some(Restored { freed, allocated }))
    }
}

impl Checkpoints for PagedAllocator {
    fn checkpoint(&self, device: DeviceId, pool: MemPoolId) -> Result<PoolCheckpoint> {
        self.device_without_pending(device)?.checkpoint(self.shared.key, pool)
    }

    fn restore(&self, checkpoint: &PoolCheckpoint) -> Result<Restored> {
        checkpoint.expect_of(self.shared.key)?;
        let device = self.device_without_pending(checkpoint.device())?;
        let details = device.entry_details(StackLevel::State);
        let (mut pending, mut ended) = (Vec::new(), Vec::new());
        let restored = restore_ordered(
            &self.shared.instance,
            checkpoint.pool,
            || Ok(PoolHeaps::lock(device, checkpoint.pool)?.orders(checkpoint)),
            |ordered| device.restore(checkpoint, ordered, (&mut pending, &mut ended), &details),
        )?;
        let owner = PendingFrees::new(device, &details);
        let unwinds = OnUnwind::new(|| {
            restored.allocated.iter().for_each(|&allocation: &Allocation| self.free_later(allocation));
        });
        pending.into_iter().for_each(|key| owner.fence(key));
        ended.into_iter().for_each(|(number, stream)| device.end_of_stream(number, stream, Fences::Now, &details));
        device.report();
        unwinds.disarm();
        Ok(restored)
    }
}

impl PagedAllocator {
    /// The device, after pending frees have been processed.
    fn device_without_pending(&self, device: DeviceId) -> Result<&PagedDevice> {
        let device = self.device(device)?;
        let processed = PendingFrees::new(device, &device.entry_details(StackLevel::All)).process_all();
        device.report();
        processed?;
        Ok(device)
    }
}
