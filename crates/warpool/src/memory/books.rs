//! The books of allocators that have no cache of their own: who has which block, what was given back and is not yet
//! where it came from, and the counters. One for each device. Every method is one step under the device's lock, and no
//! driver, plug or observer is called here.
//!
//! Every block is a segment of its own. What its source (the driver's pool, a plug) holds beyond the blocks is not
//! known here.

use std::collections::BTreeMap;

use rustc_hash::FxHashMap;
use warpool_driver::{CaptureId, DeviceId, DevicePtr, StreamId};

use crate::memory::history::StackNumbers;
use crate::memory::journal::{Cause, Journal};
use crate::memory::{
    Action, Allocation, BlockInfo, BlockState, MemPoolId, SegmentInfo, SegmentKind, Snapshot, Stack, Stats,
};
use crate::{Error, Result};

/// Requests up to this count as small, as in the caching allocator.
const SMALL_MAX: u64 = 1 << 20;

/// How many handles of streams are remembered: more than most programs have streams, and few enough for one that makes
/// a stream per request.
const RAWS_MAX: usize = 1024;

/// A block that somebody has, or had.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    /// Names it. Never comes again, unlike its address.
    pub(crate) number: u64,
    pub(crate) ptr: DevicePtr,
    pub(crate) bytes: u64,
    pub(crate) requested: u64,
    pub(crate) stream: StreamId,
    /// The driver's handle of the stream, for snapshots.
    pub(crate) stream_raw: u64,
    pub(crate) pool: MemPoolId,
    /// Other streams that used it.
    pub(crate) uses: Vec<StreamId>,
    /// The capture that allocated it, if one did: its memory is the graph's.
    pub(crate) capture: Option<CaptureId>,
    pub(crate) stack: Option<Stack>,
}

impl Entry {
    fn kind(&self) -> SegmentKind {
        if self.bytes <= SMALL_MAX { SegmentKind::Small } else { SegmentKind::Large }
    }

    /// All streams that may use it, its own first.
    pub(crate) fn streams(&self) -> impl Iterator<Item = StreamId> + '_ {
        std::iter::once(self.stream).chain(self.uses.iter().copied())
    }
}

/// A block on its way back.
struct Waiting {
    entry: Entry,
    /// Whether some thread is just giving it back.
    in_hand: bool,
}

/// All that is known about one device.
pub(crate) struct Books {
    device: DeviceId,
    /// Blocks that callers have, by address.
    live: FxHashMap<u64, Entry>,
    /// Blocks that callers gave back and their source does not have yet, by number.
    waiting: BTreeMap<u64, Waiting>,
    /// How many of them are in nobody's hand.
    idle: usize,
    last_number: u64,
    /// What requests under way have been promised, before rounding.
    promised: u64,
    /// Bytes of blocks that captures allocated.
    captured_bytes: u64,
    /// The driver's handles of streams, and their devices; not of all that ever were.
    raws: FxHashMap<StreamId, (u64, DeviceId)>,
    pub(crate) stats: Stats,
    pub(crate) journal: Journal,
}

impl Books {
    pub(crate) fn new(device: DeviceId) -> Self {
        Self {
            device,
            live: FxHashMap::default(),
            waiting: BTreeMap::new(),
            idle: 0,
            last_number: 0,
            promised: 0,
            captured_bytes: 0,
            raws: FxHashMap::default(),
            stats: Stats { max_split_size: -1, ..Stats::default() },
            journal: Journal::default(),
        }
    }

    /// Promises `bytes`, unless that and all that is active would be more than `limit`.
    pub(crate) fn promise(&mut self, bytes: u64, limit: Option<u64>) -> bool {
        let after = self.stats.requested_bytes.all.current.saturating_add(self.promised).saturating_add(bytes);
        let allowed = limit.is_none_or(|limit| after <= limit);
        if allowed {
            self.promised += bytes;
        }
        allowed
    }

    /// Takes a promise back, kept or not.
    pub(crate) fn settle_promise(&mut self, bytes: u64) {
        self.promised -= bytes;
    }

    pub(crate) fn raw_of(&self, stream: StreamId) -> Option<(u64, DeviceId)> {
        self.raws.get(&stream).copied()
    }

    pub(crate) fn know_raw(&mut self, stream: StreamId, raw: (u64, DeviceId)) {
        if self.raws.len() >= RAWS_MAX {
            self.raws.clear();
        }
        self.raws.insert(stream, raw);
    }

    /// The books of a block that a caller gets. Its number is filled in.
    pub(crate) fn hand_out(&mut self, mut entry: Entry, cause: &Cause) -> Allocation {
        self.last_number += 1;
        entry.number = self.last_number;
        entry.stack.clone_from(&cause.stack);
        if let Some(lost) = self.live.get(&entry.ptr.0) {
            // Its capture came to nothing, and the source took the address back.
            assert!(lost.capture.is_some(), "{} was given out twice", entry.ptr);
            let lost = self.begin_free(entry.ptr, 0, true, cause).expect("it is in the book");
            self.complete_free(lost.number, cause);
        }
        let allocation = self.allocation(&entry);
        let (kind, bytes, requested, pool) = (entry.kind(), entry.bytes, entry.requested, entry.pool);
        self.record_block(Action::SegmentAlloc, bytes, &entry, cause);
        self.record_block(Action::Alloc, requested, &entry, cause);
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

    pub(crate) fn find(&self, ptr: DevicePtr) -> Option<Allocation> {
        self.live.get(&ptr.0).map(|entry| self.allocation(entry))
    }

    fn allocation(&self, entry: &Entry) -> Allocation {
        Allocation {
            ptr: entry.ptr,
            bytes: entry.bytes,
            bytes_requested: entry.requested,
            device: self.device,
            stream: entry.stream,
            slot: entry.number,
        }
    }

    /// Notes that `stream` uses what starts at `ptr`; whether anything does.
    pub(crate) fn add_use(&mut self, ptr: DevicePtr, stream: StreamId) -> bool {
        let Some(entry) = self.live.get_mut(&ptr.0) else { return false };
        if entry.stream != stream && !entry.uses.contains(&stream) {
            entry.uses.push(stream);
        }
        true
    }

    /// The caller's half of a free: it no longer has the block, which now waits, in the hand of the calling thread or
    /// in nobody's. A number of 0 stands for whatever starts there.
    pub(crate) fn begin_free(&mut self, ptr: DevicePtr, number: u64, in_hand: bool, cause: &Cause) -> Result<Entry> {
        let known = self.live.get(&ptr.0).is_some_and(|entry| number == 0 || entry.number == number);
        let entry = if known { self.live.remove(&ptr.0) } else { None };
        let entry = entry.ok_or(Error::UnknownPointer { ptr })?;
        self.stats.allocation.decrease(entry.kind(), 1);
        self.stats.allocated_bytes.decrease(entry.kind(), entry.bytes);
        self.record_block(Action::FreeRequested, entry.requested, &entry, cause);
        self.waiting.insert(entry.number, Waiting { entry: entry.clone(), in_hand });
        self.idle += usize::from(!in_hand);
        Ok(entry)
    }

    /// Whether something waits to be given back.
    pub(crate) fn has_chores(&self) -> bool {
        self.idle > 0
    }

    /// Takes a block that waits into hand, unless another thread has it, or has it done.
    pub(crate) fn take_in_hand(&mut self, number: u64) -> Option<Entry> {
        let waiting = self.waiting.get_mut(&number).filter(|waiting| !waiting.in_hand)?;
        waiting.in_hand = true;
        self.idle -= 1;
        Some(waiting.entry.clone())
    }

    /// All that wait in nobody's hand, oldest first.
    pub(crate) fn chores(&self) -> Vec<u64> {
        self.waiting.iter().filter(|(_, waiting)| !waiting.in_hand).map(|(&number, _)| number).collect()
    }

    /// Puts a block that could not be given back out of hand.
    pub(crate) fn put_out_of_hand(&mut self, number: u64) {
        let waiting = self.waiting.get_mut(&number).expect("whoever has it in hand puts it out");
        assert!(waiting.in_hand, "block {number} is in nobody's hand");
        waiting.in_hand = false;
        self.idle += 1;
    }

    /// The other half: its source has it back, or is about to.
    pub(crate) fn complete_free(&mut self, number: u64, cause: &Cause) {
        let Waiting { entry, in_hand } = self.waiting.remove(&number).expect("whoever has it in hand completes it");
        assert!(in_hand, "block {number} is in nobody's hand");
        self.record_block(Action::FreeCompleted, entry.requested, &entry, cause);
        self.record_block(Action::SegmentFree, entry.bytes, &entry, cause);
        if entry.capture.is_some() {
            self.captured_bytes -= entry.bytes;
        }
        let (kind, stats) = (entry.kind(), &mut self.stats);
        stats.num_device_free += 1;
        stats.segment.decrease(kind, 1);
        stats.active.decrease(kind, 1);
        stats.active_bytes.decrease(kind, entry.bytes);
        stats.requested_bytes.decrease(kind, entry.requested);
        if let Some(held) = stats.reserved_bytes_by_private_pools.get_mut(&entry.pool) {
            held.decrease(kind, entry.bytes);
        }
    }

    /// Bytes of blocks that captures allocated.
    pub(crate) fn captured_bytes(&self) -> u64 {
        self.captured_bytes
    }

    /// Where the blocks of a pool start that callers have, by address.
    pub(crate) fn live_in(&self, pool: MemPoolId) -> Vec<DevicePtr> {
        let mut live: Vec<_> = self.live.values().filter(|entry| entry.pool == pool).map(|entry| entry.ptr).collect();
        live.sort_unstable();
        live
    }

    /// Every block of `only` (of all pools without it) as a segment of its own, by address; and the `rest`, which is
    /// held beyond that and has no address that anybody knows, as an empty one at 0. So the sum of all is what is held.
    pub(crate) fn segment_infos(
        &self,
        only: Option<MemPoolId>,
        rest: u64,
        snapshot: &mut Snapshot,
        stacks: &mut StackNumbers,
    ) -> Vec<SegmentInfo> {
        let live = self.live.values().map(|entry| (entry, BlockState::ActiveAllocated));
        let waiting = self.waiting.values().map(|waiting| (&waiting.entry, BlockState::ActivePendingFree));
        let shown = |entry: &Entry| only.is_none_or(|pool| pool == entry.pool);
        let mut blocks: Vec<_> = live.chain(waiting).filter(|(entry, _)| shown(entry)).collect();
        blocks.sort_by_key(|(entry, _)| entry.number);
        let mut infos: Vec<SegmentInfo> = Vec::with_capacity(blocks.len() + 1);
        for (entry, state) in blocks {
            let stack = entry.stack.as_ref().map(|stack| stacks.number(snapshot, stack));
            let mut info = self.segment_info(entry.ptr.0, entry.bytes, entry.kind(), state);
            (info.stream, info.pool) = (entry.stream_raw, entry.pool);
            info.allocated_size = if state == BlockState::ActiveAllocated { entry.bytes } else { 0 };
            info.active_size = entry.bytes;
            info.requested_size = entry.requested;
            info.stack = stack;
            info.blocks[0].requested_size = entry.requested;
            info.blocks[0].stack = stack;
            infos.push(info);
        }
        if rest > 0 {
            infos.push(self.segment_info(0, rest, SegmentKind::Large, BlockState::Inactive));
        }
        infos.sort_by_key(|info| info.address);
        infos
    }

    fn segment_info(&self, address: u64, size: u64, kind: SegmentKind, state: BlockState) -> SegmentInfo {
        SegmentInfo {
            device: i32::try_from(self.device.0).unwrap_or(i32::MAX),
            address,
            total_size: size,
            allocated_size: 0,
            active_size: 0,
            requested_size: 0,
            stream: 0,
            kind,
            pool: MemPoolId::DEFAULT,
            is_expandable: false,
            stack: None,
            blocks: vec![BlockInfo { address, size, requested_size: 0, state, stack: None }],
        }
    }

    fn record_block(&mut self, action: Action, size: u64, entry: &Entry, cause: &Cause) {
        self.record(action, entry.ptr.0, size, entry.stream_raw, entry.pool, cause);
    }

    /// Writes down what happens, for the history and for trackers.
    pub(crate) fn record(&mut self, action: Action, addr: u64, size: u64, stream: u64, pool: MemPoolId, cause: &Cause) {
        self.journal.record(action, addr, size, stream, pool, cause);
    }
}
