//! All that an allocator knows about one device, and the rules by which blocks are found, cut and joined.
//! Every method is one step under the device's lock. No driver calls here: memory comes and goes in `segment.rs` and `expandable.rs`.
//!
//! A *pool* has two *bins*, small and large. A bin has one *lane* per stream: its free blocks and unmapped addresses. A
//! *segment* belongs to one lane, for life, and its blocks with it. So a search never sees another stream's blocks.

use std::collections::BTreeMap;

use rustc_hash::FxHashMap;
use slotmap::{Key, KeyData, SlotMap, new_key_type};
use warpool_driver::{DeviceId, DevicePtr, PhysicalId, StreamId};

use super::block::{Block, BlockKey, Standing};
use super::capture::Deferred;
use super::expandable::Growing;
use super::free_set::{FreeKey, FreeSet, Place};
use super::pending::Pending;
use super::policy::Policy;
use super::pools::Pool;
use super::size;
use crate::memory::journal::{Cause, Journal};
use crate::memory::{Action, Allocation, MemPoolId, SegmentKind, Stack, Stats, Upstream};
use crate::{Error, Result};

new_key_type! {
    /// Names a segment.
    pub(super) struct SegmentKey;
    /// Names a lane.
    pub(super) struct LaneKey;
    /// Names a bin.
    pub(super) struct BinKey;
}

/// Memory obtained as one, or addresses reserved as one.
pub(super) struct Segment {
    pub(super) lane: LaneKey,
    /// Its lowest block.
    pub(super) first: BlockKey,
    /// When it was obtained, counted in segments.
    pub(super) registration: u64,
    pub(super) source: Source,
    /// Who asked for it.
    pub(super) stack: Option<Stack>,
}

/// Where a segment's memory came from, and goes back to.
pub(super) enum Source {
    /// The driver, in one piece.
    Plain,
    /// A pool's own source.
    Upstream(std::sync::Arc<dyn Upstream>),
    /// The driver, chunk by chunk, behind reserved addresses.
    Growing(Growing),
}

/// The free memory of one stream in one bin.
pub(super) struct Lane {
    pub(super) bin: BinKey,
    pub(super) stream: StreamId,
    /// The driver's handle of the stream, for snapshots.
    pub(super) stream_raw: u64,
    pub(super) free: FreeSet,
    pub(super) unmapped: BTreeMap<u64, BlockKey>,
    /// How many segments it has; without any, it goes.
    pub(super) segments: u32,
}

/// The small or the large half of a pool.
pub(super) struct Bin {
    pub(super) pool: MemPoolId,
    pub(super) kind: SegmentKind,
    /// Whether its segments come from a source of the pool's own.
    pub(super) has_upstream: bool,
    pub(super) no_split: bool,
    /// By stream, in their order.
    pub(super) lanes: Vec<(StreamId, LaneKey)>,
    /// How often it was searched; counted only where garbage is collected.
    pub(super) searches: u64,
}

impl Bin {
    pub(super) fn lane(&self, stream: StreamId) -> Option<LaneKey> {
        // Most programs have one stream, or a few.
        match self.lanes.as_slice() {
            [(only, lane)] => (*only == stream).then_some(*lane),
            lanes => lanes.binary_search_by_key(&stream, |&(stream, _)| stream).ok().map(|at| lanes[at].1),
        }
    }
}

/// A request, made out against the bins.
#[derive(Clone, Copy, Debug)]
pub(super) struct Want {
    pub(super) bin: BinKey,
    pub(super) pool: MemPoolId,
    pub(super) stream: StreamId,
    pub(super) kind: SegmentKind,
    /// What was asked for.
    pub(super) requested: u64,
    /// What it is rounded to.
    pub(super) size: u64,
    /// What a segment for it would take.
    pub(super) segment: u64,
    /// Whether segments that grow may serve it.
    pub(super) expandable: bool,
}

/// All that is known about one device.
pub(super) struct State {
    pub(super) device: DeviceId,
    pub(super) blocks: SlotMap<BlockKey, Block>,
    pub(super) segments: SlotMap<SegmentKey, Segment>,
    pub(super) lanes: SlotMap<LaneKey, Lane>,
    pub(super) bins: SlotMap<BinKey, Bin>,
    pub(super) pools: BTreeMap<MemPoolId, Pool>,
    /// The default pool's bins, small and large.
    pub(super) default_bins: [BinKey; 2],
    /// Blocks that callers have, by address.
    pub(super) live: FxHashMap<u64, BlockKey>,
    pub(super) pending: Pending,
    /// Blocks that destructors gave back and that still need marks in streams.
    pub(super) unmarked: Vec<BlockKey>,
    /// Blocks freed in captures.
    pub(super) deferred: Vec<Deferred>,
    pub(super) stats: Stats,
    pub(super) journal: Journal,
    pub(super) policy: Policy,
    /// Bytes held from the driver.
    pub(super) reserved: u64,
    /// Physical memory that could not be released, to be tried again.
    pub(super) orphans: Vec<PhysicalId>,
    /// Mappings of growths that failed and could not be undone, to be tried again. The books have those addresses as unmapped.
    pub(super) stuck: Vec<(DevicePtr, u64)>,
    next_registration: u64,
}

impl State {
    pub(super) fn new(device: DeviceId, policy: Policy) -> Self {
        let mut state = Self {
            device,
            blocks: SlotMap::with_key(),
            segments: SlotMap::with_key(),
            lanes: SlotMap::with_key(),
            bins: SlotMap::with_key(),
            pools: BTreeMap::new(),
            default_bins: [BinKey::null(); 2],
            live: FxHashMap::default(),
            pending: Pending::default(),
            unmarked: Vec::new(),
            deferred: Vec::new(),
            stats: Stats { max_split_size: policy.max_split_stat(), ..Stats::default() },
            journal: Journal::default(),
            policy,
            reserved: 0,
            orphans: Vec::new(),
            stuck: Vec::new(),
            next_registration: 0,
        };
        let pool = state.add_pool(MemPoolId::DEFAULT, None, false);
        state.default_bins = pool;
        state
    }

    /// Makes a request out. Fails if there is no such pool, or if nobody uses it any more.
    pub(super) fn want(&self, pool: MemPoolId, stream: StreamId, requested: u64) -> Result<Want> {
        let bins = self.bins_for_use(pool)?;
        Ok(self.want_of(bins, pool, stream, requested))
    }

    /// The bins of a pool that is in use.
    #[inline]
    pub(super) fn bins_for_use(&self, pool: MemPoolId) -> Result<[BinKey; 2]> {
        if pool.is_default() {
            return Ok(self.default_bins);
        }
        let entry = self.pool(pool)?;
        if entry.uses == 0 { Err(Error::PoolReleased { pool }) } else { Ok(entry.bins) }
    }

    #[inline]
    pub(super) fn want_of(&self, bins: [BinKey; 2], pool: MemPoolId, stream: StreamId, requested: u64) -> Want {
        let size = size::round(requested, self.policy.divisions(requested));
        let kind = size::kind(size);
        let bin = bins[kind as usize];
        Want {
            bin,
            pool,
            stream,
            kind,
            requested,
            size,
            segment: size::segment(size, self.policy.large_segment),
            expandable: self.policy.expandable && !self.bins[bin].has_upstream,
        }
    }

    /// Meets a request with a free block: the smallest that fits, by the rules; what is too much of it stays free.
    pub(super) fn take_cached(&mut self, want: &Want, cause: &Cause) -> Option<Allocation> {
        let counts_ages = self.policy.collects_garbage();
        let bin = &mut self.bins[want.bin];
        if counts_ages {
            bin.searches += 1;
        }
        let searches = bin.searches;
        let lane = bin.lane(want.stream)?;
        let (place, found) = self.best_fit(lane, want)?;
        if !self.should_split(found, want) {
            self.lanes[lane].free.remove_at(place);
            self.blocks[found].standing = Standing::Moving;
            return Some(self.hand_out(found, want, cause));
        }
        // It stays in the set, as what is left of it.
        let was_split = self.blocks[found].is_split();
        let given = self.cut_front(found, want.size);
        let (_, key) = self.free_place(found);
        self.blocks[found].born = searches;
        self.lanes[lane].free.lower_at(place, key);
        self.count_split(found, was_split, want);
        Some(self.mark_taken(given, want.requested, want.stream, cause))
    }

    fn best_fit(&self, lane: LaneKey, want: &Want) -> Option<(Place, BlockKey)> {
        let mut candidates = self.lanes[lane].free.at_least(want.size);
        let mut found = candidates.next()?;
        if self.blocks[found.1].growing {
            if want.expandable {
                // The end of a segment counts as large as it can grow: what does not border on unmapped addresses is used first.
                for next in candidates {
                    if !self.blocks[found.1].growing || self.size_grown(next.1) >= self.size_grown(found.1) {
                        break;
                    }
                    found = next;
                }
            } else {
                found = candidates.find(|next| !self.blocks[next.1].growing)?;
            }
        }
        let (size, oversize) = (self.blocks[found.1].size, self.policy.max_split);
        let too_good = want.size < oversize && size >= oversize;
        let too_wide = want.size >= oversize && size >= want.size.saturating_add(self.policy.max_non_split_rounding);
        (!too_good && !too_wide).then_some(found)
    }

    /// Its size, with the unmapped addresses behind it.
    fn size_grown(&self, block: BlockKey) -> u64 {
        let block = &self.blocks[block];
        let behind = block.next.map(|next| &self.blocks[next]).filter(|next| next.standing == Standing::Unmapped);
        block.size + behind.map_or(0, |next| next.size)
    }

    /// Gives a block, which is in no set, to a caller; what is too much of it becomes a free block of its own.
    pub(super) fn hand_out(&mut self, found: BlockKey, want: &Want, cause: &Cause) -> Allocation {
        let was_split = self.blocks[found].is_split();
        let given = if self.should_split(found, want) {
            let given = self.cut_front(found, want.size);
            self.put_free(found);
            self.count_split(found, was_split, want);
            given
        } else {
            if was_split && !self.blocks[found].growing {
                self.stats.inactive_split_bytes.decrease(want.kind, self.blocks[found].size);
                self.stats.inactive_split.decrease(want.kind, 1);
            }
            found
        };
        self.mark_taken(given, want.requested, want.stream, cause)
    }

    /// The books of a free block of which a part was given out.
    fn count_split(&mut self, rest: BlockKey, was_split: bool, want: &Want) {
        if self.blocks[rest].growing {
            return;
        }
        if was_split {
            self.stats.inactive_split_bytes.decrease(want.kind, want.size);
        } else {
            self.stats.inactive_split_bytes.increase(want.kind, self.blocks[rest].size);
            self.stats.inactive_split.increase(want.kind, 1);
        }
    }

    /// The books of a block that a caller gets.
    pub(super) fn mark_taken(
        &mut self,
        given: BlockKey,
        requested: u64,
        stream: StreamId,
        cause: &Cause,
    ) -> Allocation {
        let keeps_stack = cause.stack.is_some();
        let block = &mut self.blocks[given];
        block.standing = Standing::Taken;
        block.requested = requested;
        if keeps_stack {
            block.extra().stack.clone_from(&cause.stack);
        }
        let (ptr, size, segment, kind) = (block.ptr, block.size, block.segment, block.kind);
        self.live.insert(ptr, given);
        self.record(Action::Alloc, ptr, requested, segment, cause);
        let stats = &mut self.stats;
        stats.allocation.increase(kind, 1);
        stats.allocated_bytes.increase(kind, size);
        stats.active.increase(kind, 1);
        stats.active_bytes.increase(kind, size);
        stats.requested_bytes.increase(kind, requested);
        if size >= self.policy.max_split {
            stats.oversize_allocations.increase(1);
        }
        Allocation {
            ptr: DevicePtr(ptr),
            bytes: size,
            bytes_requested: requested,
            device: self.device,
            stream,
            slot: given.data().as_ffi(),
        }
    }

    /// The caller's half of a free: it no longer has the block, which is no longer among the live ones. The block waits; whether for anything is the
    /// next question.
    pub(super) fn begin_free(&mut self, freed: BlockKey, cause: &Cause) {
        let block = &mut self.blocks[freed];
        assert!(block.standing == Standing::Taken, "a block that nobody has cannot be given back");
        block.standing = Standing::Waiting;
        let (ptr, size, requested, segment) = (block.ptr, block.size, block.requested, block.segment);
        let kind = block.kind;
        self.stats.allocation.decrease(kind, 1);
        self.stats.allocated_bytes.decrease(kind, size);
        if size >= self.policy.max_split {
            self.stats.oversize_allocations.decrease(1);
        }
        self.record(Action::FreeRequested, ptr, requested, segment, cause);
    }

    /// The other half: nothing uses it any more, and it joins the free ones.
    pub(super) fn complete_free(&mut self, freed: BlockKey, cause: &Cause) {
        let block = &mut self.blocks[freed];
        assert!(block.standing == Standing::Waiting && block.marks == 0, "a block in use cannot become free");
        block.extra = None;
        let (ptr, size, requested, segment) = (block.ptr, block.size, block.requested, block.segment);
        let (growing, kind) = (block.growing, block.kind);
        self.record(Action::FreeCompleted, ptr, requested, segment, cause);
        let (merged, merged_bytes) = self.join_free(freed);
        self.stats.active.decrease(kind, 1);
        self.stats.active_bytes.decrease(kind, size);
        self.stats.requested_bytes.decrease(kind, requested);
        if !growing {
            let block = &self.blocks[freed];
            let (is_split, size) = (block.is_split(), block.size);
            self.change_inactive_split(kind, merged, merged_bytes, is_split.then_some(size));
        }
    }

    /// Of inactive blocks, some were joined into one, which counts itself if it is a part of its segment. One step in the counters, as
    /// the peaks show.
    fn change_inactive_split(&mut self, kind: SegmentKind, merged: u64, merged_bytes: u64, now: Option<u64>) {
        let stats = &mut self.stats;
        let (blocks_now, bytes_now) = now.map_or((0, 0), |bytes| (1, bytes));
        if blocks_now >= merged {
            stats.inactive_split.increase(kind, blocks_now - merged);
        } else {
            stats.inactive_split.decrease(kind, merged - blocks_now);
        }
        if bytes_now >= merged_bytes {
            stats.inactive_split_bytes.increase(kind, bytes_now - merged_bytes);
        } else {
            stats.inactive_split_bytes.decrease(kind, merged_bytes - bytes_now);
        }
    }

    fn should_split(&self, found: BlockKey, want: &Want) -> bool {
        if self.bins[want.bin].no_split {
            return false;
        }
        let rest = self.blocks[found].size - want.size;
        if want.kind == SegmentKind::Small || want.expandable {
            rest >= size::BLOCK_MIN
        } else {
            want.size < self.policy.max_split && rest > size::SMALL_MAX
        }
    }

    /// Cuts `size` bytes off the front of a block that is in no set, as a new block; the old one keeps the rest.
    pub(super) fn cut_front(&mut self, from: BlockKey, size: u64) -> BlockKey {
        let rest = &mut self.blocks[from];
        let mut front = Block::new(rest.ptr, size, rest.segment, rest.kind, rest.growing);
        front.prev = rest.prev;
        front.next = Some(from);
        rest.ptr += size;
        rest.size -= size;
        assert!(rest.size > 0, "nothing is left of a block that was cut");
        let (segment, prev) = (rest.segment, rest.prev);
        let front = self.blocks.insert(front);
        self.blocks[from].prev = Some(front);
        match prev {
            Some(prev) => self.blocks[prev].next = Some(front),
            None => self.segments[segment].first = front,
        }
        front
    }

    /// Makes a block in no set a free one, joined with the free blocks beside it. Says how many those were, and how much.
    fn join_free(&mut self, block: BlockKey) -> (u64, u64) {
        let is_free = |key: &BlockKey| self.blocks[*key].standing == Standing::Free;
        let (prev, next) = (self.blocks[block].prev.filter(is_free), self.blocks[block].next.filter(is_free));
        let ((Some(only), None) | (None, Some(only))) = (prev, next) else {
            let merged = self.merge_free_neighbours(block);
            self.put_free(block);
            return merged;
        };
        // The common case: the neighbour's place in the set is taken over.
        let (lane, before) = self.free_place(only);
        let bytes = self.absorb(block, only);
        let (_, now) = self.free_place(block);
        self.mark_free(block, lane);
        self.lanes[lane].free.raise(before, now, block);
        (1, bytes)
    }

    /// The books of a block that is in the free set of `lane` from now on.
    fn mark_free(&mut self, block: BlockKey, lane: LaneKey) {
        let searches = self.bins[self.lanes[lane].bin].searches;
        let entry = &mut self.blocks[block];
        entry.standing = Standing::Free;
        entry.born = searches;
    }

    /// Joins the free blocks beside `block` into it, and says how many and how much.
    pub(super) fn merge_free_neighbours(&mut self, block: BlockKey) -> (u64, u64) {
        let (mut count, mut bytes) = (0, 0);
        for neighbour in [self.blocks[block].prev, self.blocks[block].next].into_iter().flatten() {
            if self.blocks[neighbour].standing == Standing::Free {
                self.take_free(neighbour);
                count += 1;
                bytes += self.absorb(block, neighbour);
            }
        }
        (count, bytes)
    }

    /// Joins `other`, a neighbour that is in no set, into `block`. Returns its size.
    pub(super) fn absorb(&mut self, block: BlockKey, other: BlockKey) -> u64 {
        let other_block = self.blocks.remove(other).expect("neighbours are there");
        let segment = other_block.segment;
        if self.blocks[block].prev == Some(other) {
            let block_mut = &mut self.blocks[block];
            block_mut.ptr = other_block.ptr;
            block_mut.prev = other_block.prev;
            match other_block.prev {
                Some(prev) => self.blocks[prev].next = Some(block),
                None => self.segments[segment].first = block,
            }
        } else {
            assert!(self.blocks[block].next == Some(other), "only neighbours are joined");
            self.blocks[block].next = other_block.next;
            if let Some(next) = other_block.next {
                self.blocks[next].prev = Some(block);
            }
        }
        self.blocks[block].size += other_block.size;
        other_block.size
    }

    /// Puts a block into its lane's free set.
    pub(super) fn put_free(&mut self, block: BlockKey) {
        let (lane, key) = self.free_place(block);
        self.mark_free(block, lane);
        self.lanes[lane].free.insert(key, block);
    }

    /// Takes a block out of its lane's free set.
    pub(super) fn take_free(&mut self, block: BlockKey) {
        let (lane, key) = self.free_place(block);
        self.lanes[lane].free.remove(key);
        self.blocks[block].standing = Standing::Moving;
    }

    /// Where a free block stands in its lane.
    pub(super) fn free_place(&self, block: BlockKey) -> (LaneKey, FreeKey) {
        let block = &self.blocks[block];
        let segment = &self.segments[block.segment];
        let registration = if self.policy.by_registration { segment.registration } else { 0 };
        (segment.lane, FreeKey { size: block.size, registration, ptr: block.ptr })
    }

    /// Puts all free blocks in order anew, after the order has changed.
    pub(super) fn reorder_free(&mut self) {
        let lanes: Vec<LaneKey> = self.lanes.keys().collect();
        for lane in lanes {
            for block in self.lanes[lane].free.drain() {
                let (_, key) = self.free_place(block);
                self.lanes[lane].free.insert(key, block);
            }
        }
    }

    /// How many blocks that callers have, and how many segments, are too large to be split.
    pub(super) fn count_oversize(&self) -> (u64, u64) {
        let limit = self.policy.max_split;
        let is_oversize = |block: &&Block| block.standing == Standing::Taken && block.size >= limit;
        let blocks = self.blocks.values().filter(is_oversize).count();
        let is_whole = |segment: &&Segment| !matches!(segment.source, Source::Growing(_));
        let bytes = |segment: &Segment| self.chain(segment.first).map(|(_, block)| block.size).sum::<u64>();
        let segments = self.segments.values().filter(is_whole).filter(|segment| bytes(segment) >= limit).count();
        (blocks as u64, segments as u64)
    }

    /// Counts them anew, after the limit has changed: what is given back later is judged by the new one.
    pub(super) fn recount_oversize(&mut self) {
        let (blocks, segments) = self.count_oversize();
        for (stat, now) in
            [(&mut self.stats.oversize_allocations, blocks), (&mut self.stats.oversize_segments, segments)]
        {
            match now.checked_sub(stat.current) {
                Some(more) => stat.increase(more),
                None => stat.decrease(stat.current - now),
            }
        }
    }

    /// Adds a segment with one block, which is in no set yet.
    pub(super) fn add_segment(
        &mut self,
        lane: LaneKey,
        ptr: u64,
        bytes: u64,
        source: Source,
        cause: &Cause,
    ) -> BlockKey {
        let registration = self.next_registration;
        self.next_registration += 1;
        let growing = matches!(source, Source::Growing(_));
        self.lanes[lane].segments += 1;
        let stack = cause.stack.clone();
        let segment = self.segments.insert(Segment { lane, first: BlockKey::null(), registration, source, stack });
        let kind = self.bins[self.lanes[lane].bin].kind;
        let block = self.blocks.insert(Block::new(ptr, bytes, segment, kind, growing));
        self.segments[segment].first = block;
        block
    }

    /// Removes a segment that is one block in no set, and returns where it came from.
    pub(super) fn remove_segment(&mut self, block: BlockKey) -> Source {
        let block = self.blocks.remove(block).expect("the block is there");
        assert!(!block.is_split() && block.standing == Standing::Moving, "a segment in use cannot go");
        let segment = self.segments.remove(block.segment).expect("its segment is there");
        let lane = &mut self.lanes[segment.lane];
        lane.segments -= 1;
        if lane.segments == 0 {
            let lane = self.lanes.remove(segment.lane).expect("its lane is there");
            assert!(lane.free.is_empty() && lane.unmapped.is_empty(), "a lane without segments has blocks");
            self.bins[lane.bin].lanes.retain(|&(_, key)| key != segment.lane);
        }
        segment.source
    }

    /// The lane of a stream in a bin; a new one if it is the first.
    pub(super) fn lane_for(&mut self, bin: BinKey, stream: StreamId, stream_raw: u64) -> LaneKey {
        if let Some(lane) = self.bins[bin].lane(stream) {
            return lane;
        }
        let (free, unmapped) = (FreeSet::default(), BTreeMap::new());
        let lane = self.lanes.insert(Lane { bin, stream, stream_raw, free, unmapped, segments: 0 });
        let lanes = &mut self.bins[bin].lanes;
        let at = lanes.partition_point(|&(other, _)| other < stream);
        lanes.insert(at, (stream, lane));
        lane
    }

    /// The kind and stream of a segment.
    pub(super) fn place_of(&self, segment: SegmentKey) -> (SegmentKind, StreamId) {
        let lane = &self.lanes[self.segments[segment].lane];
        (self.bins[lane.bin].kind, lane.stream)
    }

    /// The bin of a segment.
    pub(super) fn bin_of(&self, segment: SegmentKey) -> &Bin {
        &self.bins[self.lanes[self.segments[segment].lane].bin]
    }

    /// What a caller has at that address.
    pub(super) fn live_at(&self, ptr: DevicePtr) -> Option<BlockKey> {
        self.live.get(&ptr.0).copied()
    }

    /// The block that an allocation is about, if its caller still has it.
    pub(super) fn live_block(&self, allocation: &Allocation) -> Option<BlockKey> {
        let key = BlockKey::from(KeyData::from_ffi(allocation.slot));
        let block = self.blocks.get(key)?;
        (block.standing == Standing::Taken && block.ptr == allocation.ptr.0).then_some(key)
    }

    /// A block as its caller knows it.
    pub(super) fn allocation(&self, key: BlockKey) -> Allocation {
        let block = &self.blocks[key];
        Allocation {
            ptr: DevicePtr(block.ptr),
            bytes: block.size,
            bytes_requested: block.requested,
            device: self.device,
            stream: self.place_of(block.segment).1,
            slot: key.data().as_ffi(),
        }
    }

    /// Writes into the history, and down for the trackers.
    pub(super) fn record(&mut self, action: Action, addr: u64, size: u64, segment: SegmentKey, cause: &Cause) {
        if !self.journal.is_open(cause) {
            return;
        }
        let lane = &self.lanes[self.segments[segment].lane];
        let (stream, pool) = (lane.stream_raw, self.bins[lane.bin].pool);
        self.record_at(action, addr, size, stream, pool, cause);
    }

    /// The same, where there is no segment.
    pub(super) fn record_at(
        &mut self,
        action: Action,
        addr: u64,
        size: u64,
        stream: u64,
        pool: MemPoolId,
        cause: &Cause,
    ) {
        self.journal.record(action, addr, size, stream, pool, cause);
    }
}
