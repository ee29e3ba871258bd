//! The allocation table of one device: every block that is allocated or being freed, and the counters.
//!
//! Every block is a segment of its own. Each method is one step under the device's lock; nothing here calls the driver,
//! the source or an observer.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

use rustc_hash::{FxHashMap, FxHashSet};
use warpool_driver::{CaptureId, DeviceId, DevicePtr, StreamId};

use crate::memory::report::StackIds;
use crate::memory::report::{EntryDetails, HistoryRecorder, SharedHistory};
use crate::memory::stream_fence::StreamUses;
use crate::memory::{
    Action, Allocation, BlockInfo, BlockState, MemPoolId, SegmentInfo, SegmentKind, Snapshot, Stack, StackLevel, Stats,
};
use crate::{Error, Result};

use super::source::Reserved;

/// Requests up to this count as small, as in the caching allocator.
const SMALL_MAX: u64 = 1 << 20;

/// How many stream handles are cached: more than the streams of most programs, but bounded for programs that create a
/// stream per request.
const HANDLES_MAX: usize = 1024;

/// A block that is allocated or being freed.
#[derive(Clone, Debug)]
pub(super) struct TableEntry {
    /// Identifies the block. Never reused, unlike its address.
    pub(super) serial: u64,
    pub(super) ptr: DevicePtr,
    pub(super) bytes: u64,
    pub(super) requested: u64,
    pub(super) stream: StreamId,
    /// The driver's handle of the stream, for the source and for snapshots.
    pub(super) stream_raw: u64,
    pub(super) pool: MemPoolId,
    /// Other streams that used it.
    pub(super) uses: Vec<StreamId>,
    /// How many graphs hold it. It cannot be freed while one does.
    pub(super) holds: u32,
    /// The capture that allocated it, if any: its memory belongs to the graph.
    pub(super) capture: Option<CaptureId>,
    pub(super) stack: Option<Stack>,
}

impl TableEntry {
    fn kind(&self) -> SegmentKind {
        if self.bytes <= SMALL_MAX { SegmentKind::Small } else { SegmentKind::Large }
    }
}

/// A block that its owner has freed and that is not released to the source yet.
struct PendingFree {
    entry: TableEntry,
    /// The streams that it waits for, once fences are recorded for it.
    uses: Option<StreamUses>,
    /// Whether a thread is releasing it now.
    releasing: bool,
}

pub(super) struct AllocationTable {
    device: DeviceId,
    /// Allocated blocks by address.
    live: FxHashMap<u64, TableEntry>,
    /// Freed blocks by serial.
    pending: BTreeMap<u64, PendingFree>,
    /// Serials of pending blocks that no thread is releasing.
    idle: BTreeSet<u64>,
    /// The block that was tried last, if a pass tries only some of them.
    last_tried: Option<u64>,
    last_serial: u64,
    /// Bytes of requests in flight, before rounding. They count against the limit.
    in_flight_bytes: u64,
    /// Bytes of blocks that captures allocated.
    captured_bytes: u64,
    /// Driver handles and devices of streams; a cache, cleared when full.
    stream_handles: FxHashMap<StreamId, (u64, DeviceId)>,
    pub(super) stats: Stats,
    pub(super) recorder: HistoryRecorder,
}

impl AllocationTable {
    pub(super) fn new(device: DeviceId) -> Self {
        Self {
            device,
            live: FxHashMap::default(),
            pending: BTreeMap::new(),
            idle: BTreeSet::new(),
            last_tried: None,
            last_serial: 0,
            in_flight_bytes: 0,
            captured_bytes: 0,
            stream_handles: FxHashMap::default(),
            stats: Stats { max_split_size: -1, ..Stats::default() },
            recorder: HistoryRecorder::default(),
        }
    }

    /// Counts `bytes` as in flight, unless active and in-flight bytes would exceed `limit`. Returns whether it did.
    pub(super) fn reserve_quota(&mut self, bytes: u64, limit: Option<u64>) -> bool {
        let after = self.stats.requested_bytes.all.current.saturating_add(self.in_flight_bytes).saturating_add(bytes);
        let allowed = limit.is_none_or(|limit| after <= limit);
        if allowed {
            self.in_flight_bytes += bytes;
        }
        allowed
    }

    /// Ends a request in flight, whether it was served or not.
    pub(super) fn release_quota(&mut self, bytes: u64) {
        self.in_flight_bytes -= bytes;
    }

    pub(super) fn stream_handle(&self, stream: StreamId) -> Option<(u64, DeviceId)> {
        self.stream_handles.get(&stream).copied()
    }

    pub(super) fn cache_stream_handle(&mut self, stream: StreamId, handle: (u64, DeviceId)) {
        if self.stream_handles.len() >= HANDLES_MAX {
            self.stream_handles.clear();
        }
        self.stream_handles.insert(stream, handle);
    }

    /// Adds an allocated block. Fills in its serial and stack.
    pub(super) fn insert(&mut self, mut entry: TableEntry, details: &EntryDetails) -> Allocation {
        self.last_serial += 1;
        entry.serial = self.last_serial;
        entry.stack.clone_from(&details.stack);
        if let Some(stale) = self.live.get(&entry.ptr.0) {
            // The old block's capture was discarded, and the source reuses the address.
            assert!(stale.capture.is_some(), "{} was allocated twice", entry.ptr);
            let stale = self.begin_free(entry.ptr, 0, true, details).expect("it is in the table");
            self.complete_free(stale.serial, details);
        }
        let allocation = self.allocation(&entry);
        let (kind, bytes, requested, pool) = (entry.kind(), entry.bytes, entry.requested, entry.pool);
        self.record_block(Action::SegmentAlloc, bytes, &entry, details);
        self.record_block(Action::Alloc, requested, &entry, details);
        if entry.capture.is_some() {
            self.captured_bytes += bytes;
        }
        self.live.insert(entry.ptr.0, entry);
        let stats = &mut self.stats;
        stats.num_device_alloc += 1;
        stats.segment.increase(kind, 1);
        stats.allocation.increase(kind, 1);
        stats.allocated_bytes.increase(kind, bytes);
        stats.active.increase(kind, 1);
        stats.active_bytes.increase(kind, bytes);
        stats.requested_bytes.increase(kind, requested);
        if !pool.is_default() {
            stats.reserved_bytes_by_private_pools.entry(pool).or_default().increase(kind, bytes);
        }
        allocation
    }

    pub(super) fn find(&self, ptr: DevicePtr) -> Option<Allocation> {
        self.live.get(&ptr.0).map(|entry| self.allocation(entry))
    }

    fn allocation(&self, entry: &TableEntry) -> Allocation {
        Allocation {
            ptr: entry.ptr,
            bytes: entry.bytes,
            bytes_requested: entry.requested,
            device: self.device,
            stream: entry.stream,
            slot: entry.serial,
            // Serials are never reused, so no generation is needed.
            generation: 0,
        }
    }

    /// Records that `stream` uses the block at `ptr`. Returns whether there is one.
    pub(super) fn record_use(&mut self, ptr: DevicePtr, stream: StreamId) -> bool {
        let Some(entry) = self.live.get_mut(&ptr.0) else { return false };
        if entry.stream != stream && !entry.uses.contains(&stream) {
            entry.uses.push(stream);
        }
        true
    }

    /// Records that a graph holds an allocation.
    pub(super) fn hold(&mut self, allocation: &Allocation) -> Result<()> {
        let ptr = allocation.ptr;
        self.live_mut(allocation).ok_or(Error::UnknownPointer { ptr })?.holds += 1;
        Ok(())
    }

    /// Records that a graph no longer holds an allocation.
    pub(super) fn end_hold(&mut self, allocation: &Allocation) {
        if let Some(entry) = self.live_mut(allocation) {
            entry.holds = entry.holds.saturating_sub(1);
        }
    }

    /// As [`begin_free`](Self::begin_free), for a free by the owner. Fails if a graph holds the block.
    pub(super) fn begin_free_of_owner(
        &mut self,
        ptr: DevicePtr,
        serial: u64,
        releasing: bool,
        details: &EntryDetails,
    ) -> Result<TableEntry> {
        if self.live.get(&ptr.0).is_some_and(|entry| entry.holds > 0) {
            return Err(Error::HeldByGraph { ptr });
        }
        self.begin_free(ptr, serial, releasing, details)
    }

    fn live_mut(&mut self, allocation: &Allocation) -> Option<&mut TableEntry> {
        self.live.get_mut(&allocation.ptr.0).filter(|entry| entry.serial == allocation.slot)
    }

    /// Records that `streams` use an allocation, if it still exists.
    pub(super) fn record_uses(&mut self, allocation: &Allocation, streams: &[StreamId]) {
        if let Some(entry) = self.live_mut(allocation) {
            let known: FxHashSet<StreamId> = entry.uses.iter().copied().chain([entry.stream]).collect();
            entry.uses.extend(streams.iter().filter(|stream| !known.contains(stream)));
        }
    }

    /// First half of a free: the owner no longer has the block, which is now pending. With `releasing`, the calling
    /// thread releases it. Serial 0 means any block at that address.
    pub(super) fn begin_free(
        &mut self,
        ptr: DevicePtr,
        serial: u64,
        releasing: bool,
        details: &EntryDetails,
    ) -> Result<TableEntry> {
        let entry = match self.live.entry(ptr.0) {
            Entry::Occupied(found) if serial == 0 || found.get().serial == serial => found.remove(),
            _ => return Err(Error::UnknownPointer { ptr }),
        };
        self.stats.allocation.decrease(entry.kind(), 1);
        self.stats.allocated_bytes.decrease(entry.kind(), entry.bytes);
        self.record_block(Action::FreeRequested, entry.requested, &entry, &details.of_free(entry.stack.as_ref()));
        self.pending.insert(entry.serial, PendingFree { entry: entry.clone(), uses: None, releasing });
        if !releasing {
            self.idle.insert(entry.serial);
        }
        Ok(entry)
    }

    /// Whether freed blocks wait for a thread to release them.
    #[inline]
    pub(super) fn has_pending(&self) -> bool {
        !self.idle.is_empty()
    }

    /// Whether a freed block waits for a thread to release it.
    pub(super) fn is_idle(&self, serial: u64) -> bool {
        self.idle.contains(&serial)
    }

    /// How many freed blocks wait for a thread to release them, and which was tried last if there are more than
    /// `at_once`.
    pub(super) fn begin_pass(&self, at_once: usize) -> (usize, Option<u64>) {
        let count = self.idle.len();
        (count, self.last_tried.filter(|_| count > at_once))
    }

    /// Begins to release, on the calling thread, the first block after `last`, or the first of all if there is none.
    pub(super) fn begin_next_release(&mut self, last: Option<u64>) -> Option<TableEntry> {
        let after = last.and_then(|last| self.idle.range(last + 1..).next());
        let serial = *after.or_else(|| self.idle.first())?;
        self.last_tried = Some(serial);
        self.idle.remove(&serial);
        let pending = self.pending.get_mut(&serial).expect("what waits is pending");
        pending.releasing = true;
        Some(pending.entry.clone())
    }

    /// Ends a release that was not possible now: the block stays pending.
    pub(super) fn end_release(&mut self, serial: u64) {
        let pending = self.pending.get_mut(&serial).expect("a block that is being released is pending");
        assert!(pending.releasing, "block {serial} is not being released");
        pending.releasing = false;
        self.idle.insert(serial);
    }

    /// Ends a release because its thread unwinds. If the block is still pending, other threads may release it.
    pub(super) fn interrupt_release(&mut self, serial: u64) {
        if self.pending.get(&serial).is_some_and(|pending| pending.releasing) {
            self.end_release(serial);
        }
    }

    /// Whether [`begin_fences`](Self::begin_fences) was called for a freed block.
    pub(super) fn has_fences(&self, serial: u64) -> bool {
        self.pending.get(&serial).is_some_and(|pending| pending.uses.is_some())
    }

    /// Makes a freed block wait for `streams`.
    pub(super) fn begin_fences(&mut self, serial: u64, streams: Vec<StreamId>) {
        let pending = self.pending.get_mut(&serial).expect("a block that is being released is pending");
        pending.uses.insert(StreamUses::of(streams)).mark_freed();
    }

    /// The streams that a freed block waits for.
    pub(super) fn stream_uses(&mut self, serial: u64) -> &mut StreamUses {
        let uses = self.pending.get_mut(&serial).and_then(|pending| pending.uses.as_mut());
        uses.expect("a block with fences is pending")
    }

    /// Second half of a free: the block is released to the source, or is about to be.
    pub(super) fn complete_free(&mut self, serial: u64, details: &EntryDetails) {
        let pending = self.pending.remove(&serial).expect("a block that is being released is pending");
        assert!(pending.releasing, "block {serial} is not being released");
        let entry = pending.entry;
        let details = &details.of_free(entry.stack.as_ref());
        self.record_block(Action::FreeCompleted, entry.requested, &entry, details);
        self.record_block(Action::SegmentFree, entry.bytes, &entry, details);
        if entry.capture.is_some() {
            self.captured_bytes -= entry.bytes;
        }
        let (kind, stats) = (entry.kind(), &mut self.stats);
        stats.num_device_free += 1;
        stats.segment.decrease(kind, 1);
        stats.active.decrease(kind, 1);
        stats.active_bytes.decrease(kind, entry.bytes);
        stats.requested_bytes.decrease(kind, entry.requested);
        if let Some(reserved) = stats.reserved_bytes_by_private_pools.get_mut(&entry.pool) {
            reserved.decrease(kind, entry.bytes);
        }
    }

    /// The addresses of a pool's allocated blocks.
    pub(super) fn live_in(&self, pool: MemPoolId) -> Vec<DevicePtr> {
        self.live.values().filter(|entry| entry.pool == pool).map(|entry| entry.ptr).collect()
    }

    pub(super) fn record_oom(
        &mut self,
        bytes_free: u64,
        size: u64,
        stream_raw: u64,
        pool: MemPoolId,
        details: &EntryDetails,
    ) {
        self.stats.num_ooms += 1;
        self.recorder.record(Action::Oom, bytes_free, size, stream_raw, pool, details);
    }

    pub(super) fn active_bytes(&self) -> u64 {
        self.stats.active_bytes.all.current
    }

    /// Bytes of a private pool's blocks.
    pub(super) fn bytes_in(&self, pool: MemPoolId) -> u64 {
        self.stats.reserved_bytes_by_private_pools.get(&pool).map_or(0, |reserved| reserved.all.current)
    }

    /// The counters. `reserved` is the memory that the source holds; `None` if that is exactly the blocks. It is not
    /// known which kind of requests the source's unused memory served, so it counts as large.
    pub(super) fn stats(&self, reserved: Option<Reserved>) -> Stats {
        let mut stats = self.stats.clone();
        let Some(reserved) = reserved else {
            stats.reserved_bytes = stats.active_bytes;
            return stats;
        };
        let (current, small) = (self.reserved_bytes(reserved), stats.active_bytes.small_pool);
        let bytes = &mut stats.reserved_bytes;
        bytes.all.current = current;
        bytes.all.peak = reserved.peak.max(current);
        (bytes.small_pool.current, bytes.small_pool.peak) = (small.current, small.peak);
        bytes.large_pool.current = current - small.current;
        bytes.large_pool.peak = bytes.all.peak.saturating_sub(small.current);
        stats
    }

    /// The memory that the source holds beyond the blocks.
    pub(super) fn unused_bytes(&self, reserved: Option<Reserved>) -> u64 {
        reserved.map_or(0, |reserved| self.reserved_bytes(reserved) - self.active_bytes())
    }

    /// Includes the memory that captures allocated, which is in no pool. At least the active bytes: the pool may have
    /// grown since it was queried.
    fn reserved_bytes(&self, reserved: Reserved) -> u64 {
        (reserved.current + self.captured_bytes).max(self.active_bytes())
    }

    /// Adds the device's segments to a snapshot: the blocks of `only` (of all pools if `None`) by address, and `unused`
    /// bytes, whose address is unknown, as one free segment at 0. Returns the history, if it is wanted.
    pub(super) fn add_to(
        &mut self,
        snapshot: &mut Snapshot,
        stacks: &mut StackIds,
        (only, traces): (Option<MemPoolId>, bool),
        unused: u64,
        details: &EntryDetails,
    ) -> SharedHistory {
        let active = self.active_bytes();
        let history = self.recorder.share(traces, active, details);
        let segments = self.segment_infos(only, unused, snapshot, stacks);
        snapshot.segments.extend(segments);
        history
    }

    fn segment_infos(
        &self,
        only: Option<MemPoolId>,
        unused: u64,
        snapshot: &mut Snapshot,
        stacks: &mut StackIds,
    ) -> Vec<SegmentInfo> {
        let live = self.live.values().map(|entry| (entry, BlockState::ActiveAllocated));
        let pending = self.pending.values().map(|pending| (&pending.entry, BlockState::ActivePendingFree));
        let selected = |entry: &TableEntry| only.is_none_or(|pool| pool == entry.pool);
        let mut blocks: Vec<_> = live.chain(pending).filter(|(entry, _)| selected(entry)).collect();
        blocks.sort_by_key(|(entry, _)| entry.serial);
        let mut infos: Vec<SegmentInfo> = Vec::with_capacity(blocks.len() + 1);
        for (entry, state) in blocks {
            let stack = entry.stack.as_ref().map(|stack| stacks.id(snapshot, stack));
            let (address, size, requested_size) = (entry.ptr.0, entry.bytes, entry.requested);
            let mut info = SegmentInfo {
                stream: entry.stream_raw,
                pool: entry.pool,
                stack: stack.filter(|_| self.recorder.history.stack_level() >= StackLevel::Alloc),
                ..SegmentInfo::empty(self.device, address, entry.kind())
            };
            info.push(BlockInfo { address, size, requested_size, state, stack });
            infos.push(info);
        }
        if unused > 0 {
            let mut info = SegmentInfo::empty(self.device, 0, SegmentKind::Large);
            let state = BlockState::Inactive;
            info.push(BlockInfo { address: 0, size: unused, requested_size: 0, state, stack: None });
            infos.push(info);
        }
        infos.sort_by_key(|info| info.address);
        infos
    }

    fn record_block(&mut self, action: Action, size: u64, entry: &TableEntry, details: &EntryDetails) {
        self.recorder.record(action, entry.ptr.0, size, entry.stream_raw, entry.pool, details);
    }
}
