//! Checkpoints of private pools: its allocated blocks are recorded, and restored later at their addresses.
//!
//! Restoring checks everything first and then changes all heaps of the pool in one step, under their locks together.
//! Streams that use what a restore frees are not forgotten: a block that no restored one overlaps waits for them, as
//! after any free. For the others the stream of the heap is ordered after them before the restore, so that all later
//! use of that memory is; and they use the restored block too.

use std::collections::BTreeSet;

use rustc_hash::FxHashMap;
use warpool_driver::{DeviceId, DevicePtr, StreamId};

use super::PagedAllocator;
use super::address_space::Location;
use super::device::{BlockRef, PagedDevice};
use super::free::Fences;
use super::heap::{Freed, Heap, Kept, State};
use super::pending::PendingFrees;
use super::spin_lock::SpinGuard;
use crate::memory::checkpoint::{BlockUses, PoolCheckpoint, Restored, SavedBlock, lent_block};
use crate::memory::report::EntryDetails;
use crate::memory::{Action, Allocation, MemPoolId, StackLevel, stream_fence};
use crate::unwind::OnUnwind;
use crate::{Error, Result, lock};

/// A stream that uses memory of a block to be restored, and the stream of its heap.
type Order = (StreamId, StreamId);

/// The heaps of a pool, locked, by number.
struct PoolHeaps<'a>(Vec<(u32, SpinGuard<'a, Heap>)>);

impl<'a> PoolHeaps<'a> {
    fn lock(device: &'a PagedDevice, pool: MemPoolId) -> Result<Self> {
        let mut numbers = {
            let pools = lock(&device.pools);
            let refuse = |why: &str| Err(Error::Checkpoint { pool, why: why.to_owned() });
            if pool.is_default() {
                return refuse("only private pools have checkpoints");
            }
            if pools.uses(pool)? == 0 {
                return refuse("the pool was released");
            }
            pools.sleeping.expect_awake(pool)?;
            pools.heaps(pool)?
        };
        // In one order. Nobody else locks two heaps at a time.
        numbers.sort_unstable();
        let heaps = numbers.into_iter().map(|number| (number, device.heaps.get(number).lock()));
        let heaps = Self(heaps.collect());
        if heaps.0.iter().any(|(_, heap)| heap.all_blocks().any(|(_, block)| block.state() == State::Pending)) {
            let why = "a freed block waits for streams that used it; synchronize with them first".to_owned();
            return Err(Error::Checkpoint { pool, why });
        }
        Ok(heaps)
    }

    fn orders(&self, checkpoint: &PoolCheckpoint) -> BTreeSet<Order> {
        let mut orders = BTreeSet::new();
        for (_, heap) in &self.0 {
            for (id, block) in heap.all_blocks().filter(|&(id, _)| !heap.is_held(id) && !heap.is_lent(id)) {
                if checkpoint.overlaps(block.addr(), block.addr() + block.bytes()) {
                    orders.extend(heap.streams_using(id).iter().map(|&user| (user, heap.stream)));
                }
            }
        }
        orders
    }

    /// Where every saved block is; `None` for one that a graph holds and that is as it was.
    fn places(&self, device: &PagedDevice, checkpoint: &PoolCheckpoint) -> Result<Vec<Option<(usize, Location)>>> {
        let refuse = |why: String| Error::Checkpoint { pool: checkpoint.pool, why };
        let gone =
            |saved: &SavedBlock| refuse(format!("could not find {:#x}: the memory was released since", saved.ptr));
        let place = |saved: &SavedBlock| {
            let at = device.space.locate(DevicePtr(saved.ptr)).ok_or_else(|| gone(saved))?;
            let index = self.0.iter().position(|(number, _)| *number == at.heap).ok_or_else(|| gone(saved))?;
            match self.0[index].1.room_at(at.kind, at.range, (saved.ptr, saved.end())) {
                Ok(None) => Ok(None),
                Ok(Some(true)) => Ok(Some((index, at))),
                Ok(Some(false)) => Err(gone(saved)),
                Err(Kept::Held(held)) => Err(refuse(format!(
                    "a graph owns the block at {held:#x}, where another was; reset the graph first"
                ))),
                Err(Kept::Lent(lent)) => Err(refuse(lent_block(lent))),
            }
        };
        checkpoint.blocks.iter().map(place).collect()
    }
}

/// Memory of a block that was freed while streams used it.
struct UsedRange {
    start: u64,
    end: u64,
    streams: Vec<StreamId>,
}

impl PagedDevice {
    fn checkpoint(&self, allocator: u64, pool: MemPoolId) -> Result<PoolCheckpoint> {
        lock(&self.pools).record_checkpoint(pool);
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
        ordered: &BTreeSet<Order>,
        (pending, ended): (&mut Vec<BlockRef>, &mut Vec<(u32, StreamId)>),
        details: &EntryDetails,
    ) -> Result<Option<Restored>> {
        let mut heaps = PoolHeaps::lock(self, checkpoint.pool)?;
        let places = heaps.places(self, checkpoint)?;
        if !heaps.orders(checkpoint).is_subset(ordered) {
            return Ok(None);
        }
        let (mut freed, mut used) = (Vec::new(), Vec::new());
        for (number, heap) in &mut heaps.0 {
            let ends = heap.ends();
            let blocks = heap.all_blocks().filter(|(_, block)| block.state() == State::Allocated);
            let is_kept = |id: u32| heap.is_held(id) || heap.is_lent(id);
            let blocks: Vec<u32> = blocks.map(|(id, _)| id).filter(|&id| !is_kept(id)).collect();
            for id in blocks {
                let (start, bytes, requested) =
                    (heap.block(id).addr(), heap.block(id).bytes(), heap.block(id).requested());
                if checkpoint.overlaps(start, start + bytes) {
                    let streams = heap.take_uses(id);
                    if !streams.is_empty() {
                        used.push(UsedRange { start, end: start + bytes, streams });
                    }
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
        used.sort_unstable_by_key(|range| range.start);
        let (mut allocated, mut anchors) = (Vec::new(), FxHashMap::default());
        for (saved, place) in checkpoint.blocks.iter().zip(places) {
            let Some((index, at)) = place else { continue };
            let (number, heap) = &mut heaps.0[index];
            let anchor = anchors.entry((*number, at.kind as usize, at.range)).or_insert(None);
            let id = heap.allocate_at(at.kind, at.range, (saved.ptr, saved.size), saved.requested, *anchor);
            *anchor = Some(id);
            heap.add_uses(id, &saved.uses.streams);
            let first = used.partition_point(|range| range.end <= saved.ptr);
            for range in used[first..].iter().take_while(|range| range.start < saved.end()) {
                heap.add_uses(id, &range.streams);
            }
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

impl PagedAllocator {
    /// Records the allocated blocks of a pool. Fails if one of its blocks waits for streams, or if the pool is
    /// released.
    pub fn checkpoint(&self, device: DeviceId, pool: MemPoolId) -> Result<PoolCheckpoint> {
        self.device_without_pending(device)?.checkpoint(self.key, pool)
    }

    /// Frees what is allocated in the pool, and allocates again what the checkpoint recorded. Fails, and changes
    /// nothing, if some of that memory was released since. Blocks from before free nothing any more when they are
    /// dropped. Memory that other streams use waits for them, as after any free; a restored block's own stream waits
    /// for those that use its memory, which must not capture.
    pub fn restore(&self, checkpoint: &PoolCheckpoint) -> Result<Restored> {
        checkpoint.expect_of(self.key)?;
        let device = self.device_without_pending(checkpoint.device())?;
        let details = device.entry_details(StackLevel::State);
        let (mut ordered, mut pending, mut ended) = (BTreeSet::new(), Vec::new(), Vec::new());
        let restored = loop {
            let orders = PoolHeaps::lock(device, checkpoint.pool)?.orders(checkpoint);
            for order in orders.difference(&ordered) {
                self.order_streams(checkpoint.pool, *order)?;
            }
            ordered.extend(orders);
            // Another thread may have recorded a use meanwhile.
            if let Some(restored) = device.restore(checkpoint, &ordered, (&mut pending, &mut ended), &details)? {
                break restored;
            }
        };
        let owner = PendingFrees::new(device, &details);
        let unwinds = OnUnwind::new(|| {
            restored.allocated.iter().for_each(|&allocation: &Allocation| self.abandon(allocation));
        });
        pending.into_iter().for_each(|key| owner.fence(key));
        ended.into_iter().for_each(|(number, stream)| device.end_of_stream(number, stream, Fences::Now, &details));
        device.report();
        unwinds.disarm();
        Ok(restored)
    }

    fn abandon(&self, allocation: Allocation) {
        use crate::memory::DeviceAllocator as _;
        self.free_later(allocation);
    }

    /// Makes the stream of a heap wait for one that uses memory of a block to be restored.
    fn order_streams(&self, pool: MemPoolId, (user, own): Order) -> Result<()> {
        if stream_fence::order_outside_captures(&self.shared.instance, user, own)? {
            return Ok(());
        }
        let why = format!("{user} uses memory of a block to be restored, and a capture is under way; end it first");
        Err(Error::Checkpoint { pool, why })
    }

    /// The device, after pending frees have been processed.
    fn device_without_pending(&self, device: DeviceId) -> Result<&PagedDevice> {
        let device = self.device(device)?;
        let processed = PendingFrees::new(device, &device.entry_details(StackLevel::All)).process_all();
        device.report();
        processed?;
        Ok(device)
    }
}
