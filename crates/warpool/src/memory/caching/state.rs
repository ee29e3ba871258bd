//! All that an allocator knows about one device: segments, lanes, pools, who has what. The rules are in `place.rs` and
//! `cut.rs`. Every method is one step under the device's lock. No driver calls here: memory comes and goes in
//! `segment.rs` and `expandable.rs`.
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
use super::free_set::FreeSet;
use super::policy::Policy;
use super::pools::Pool;
use crate::memory::journal::{Cause, Journal};
use crate::memory::stream_fence::StreamFences;
use crate::memory::{Action, Allocation, MemPoolId, SegmentKind, Stack, Stats, Upstream};

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
    /// What freed blocks wait for.
    pub(super) fences: StreamFences<BlockKey>,
    /// Blocks freed in captures.
    pub(super) deferred: Vec<Deferred>,
    pub(super) stats: Stats,
    pub(super) journal: Journal,
    pub(super) policy: Policy,
    /// Bytes held from the driver.
    pub(super) reserved: u64,
    /// Physical memory that could not be released, to be tried again.
    pub(super) orphans: Vec<PhysicalId>,
    /// Mappings of growths that failed and could not be undone, to be tried again. The books have those addresses as
    /// unmapped.
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
            fences: StreamFences::default(),
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

    /// How many blocks that callers have, and how many segments, are too large to be split.
    pub(super) fn count_oversize(&self) -> (u64, u64) {
        let limit = self.policy.sizes.max_split_bytes();
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
