//! The segments and blocks of the recorded allocator at chosen events, as the events themselves tell them: addresses
//! and sizes are the recorded ones, whatever a replay does.

use rustc_hash::FxHashMap;
use warpool::memory::{Action, BlockState, MemPoolId, SegmentInfo, SegmentKind, SizeRules, StackId, TraceEntry};

use super::ReplayError;
use super::device::DeviceReplay;
use super::infer::{DEFAULT_POOL, PoolIndex, RecordedHeap, RecordedRules};
use crate::budget::Charge;

/// A block at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StateBlock {
    pub addr: u64,
    pub bytes: u64,
    pub requested: u64,
    pub state: BlockState,
    pub stream: u64,
    pub kind: SegmentKind,
    pub pool: PoolKey,
    /// The event of its allocation; `None` if that is not in the history.
    pub event: Option<u32>,
    pub stack: Option<StackId>,
}

/// Which pool a block is in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PoolKey(pub u32);

impl PoolKey {
    pub const DEFAULT: Self = Self(0);
}

/// All blocks at one moment, by address.
#[derive(Clone, Debug, Default)]
pub(crate) struct HeapState {
    pub bytes_reserved: u64,
    pub blocks: Vec<StateBlock>,
}

/// A request, in the terms of [`HeapState`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RequestInfo {
    pub bytes: u64,
    /// The size of its block.
    pub bytes_rounded: u64,
    /// What was, or would have been, requested from the driver.
    pub bytes_segment: u64,
    pub stream: u64,
    pub kind: SegmentKind,
    pub pool: PoolKey,
}

impl HeapState {
    /// The state when a snapshot was taken.
    pub fn of_snapshot(segments: &[&SegmentInfo]) -> Self {
        let mut state = Self::default();
        let mut pools: FxHashMap<MemPoolId, u32> = FxHashMap::default();
        pools.insert(MemPoolId::DEFAULT, 0);
        for segment in segments {
            let next = u32::try_from(pools.len()).expect("fewer than segments");
            let pool = PoolKey(*pools.entry(segment.pool).or_insert(next));
            state.bytes_reserved += segment.total_size;
            let mut listed = 0;
            for block in &segment.blocks {
                listed += block.size;
                state.blocks.push(StateBlock {
                    addr: block.address,
                    bytes: block.size,
                    requested: if block.state == BlockState::Inactive {
                        0
                    } else {
                        block.requested_size.min(block.size)
                    },
                    state: block.state,
                    stream: segment.stream,
                    kind: segment.kind,
                    pool,
                    event: None,
                    stack: block.stack,
                });
            }
            // A damaged snapshot may not list all of a segment: the rest is free.
            let rest = segment.total_size.saturating_sub(listed);
            if rest > 0 {
                let (state_of, stream, kind) = (BlockState::Inactive, segment.stream, segment.kind);
                let (requested, event, stack) = (0, None, None);
                let addr = segment.address + listed;
                state.blocks.push(StateBlock {
                    addr,
                    bytes: rest,
                    requested,
                    state: state_of,
                    stream,
                    kind,
                    pool,
                    event,
                    stack,
                });
            }
        }
        state
    }
}

/// The reserved and allocated bytes after every event, folded by a caller.
pub(crate) struct Totals {
    pub event: usize,
    pub bytes_reserved: u64,
    pub bytes_allocated: u64,
}

impl DeviceReplay<'_> {
    /// The states before these events, which ascend; one beyond the last event is the state at the end. `on_event` is
    /// called after every event.
    pub(crate) fn states_before(
        &self,
        moments: &[usize],
        mut on_event: impl FnMut(&Totals),
    ) -> Result<Vec<HeapState>, ReplayError> {
        let inference = self.inference();
        let rules = RecordedRules::new(&inference.settings);
        let heap = match &inference.initial {
            Some(initial) => initial.heap.clone(),
            None => RecordedHeap::new(rules, self.budget()),
        };
        let (live, toggles) = (FxHashMap::default(), self.toggles());
        let mut pass = StatePass { replay: self, heap, toggles, live, stray: 0, bytes_allocated: 0 };
        pass.bytes_allocated = pass.allocated_at_start();
        let mut charge = Charge::new(self.budget());
        let mut states = Vec::with_capacity(moments.len());
        let mut moments = moments.iter().peekable();
        for (at, event) in self.events().iter().enumerate() {
            while moments.next_if(|&&moment| moment == at).is_some() {
                states.push(pass.state());
            }
            pass.apply(at, event);
            on_event(&Totals {
                event: at,
                bytes_reserved: pass.heap.bytes_reserved().saturating_add(pass.stray),
                bytes_allocated: pass.bytes_allocated,
            });
            if at % 1024 == 0 {
                charge.raise_to(64 * pass.live.len() as u64);
                self.budget().check()?;
            }
        }
        states.extend(moments.map(|_| pass.state()));
        let survivors = pass.survivors();
        for block in states.iter_mut().flat_map(|state| &mut state.blocks) {
            if block.event.is_none() && block.state == BlockState::ActiveAllocated {
                block.stack = survivors.get(&block.addr).copied().flatten();
            }
        }
        self.budget().check()?;
        Ok(states)
    }

    /// A request that was made at an event, of an allocation or of a failure.
    pub(crate) fn request_at(&self, at: usize) -> Option<RequestInfo> {
        let event = self.events().get(at)?;
        let inference = self.inference();
        let pools = match event.action {
            Action::Alloc => &inference.allocation_pools,
            Action::Oom => &inference.failed_request_pools,
            _ => return None,
        };
        let number = self.events()[..at].iter().filter(|other| other.action == event.action).count();
        let pool = pools.get(number).copied().unwrap_or(DEFAULT_POOL);
        let rules = RecordedRules::new(&inference.settings);
        let bytes_rounded = rules.sizes().round(event.size);
        Some(RequestInfo {
            bytes: event.size,
            bytes_rounded,
            bytes_segment: rules.sizes().segment(bytes_rounded),
            stream: event.stream,
            kind: SizeRules::kind(bytes_rounded),
            pool: PoolKey(pool),
        })
    }
}

struct StatePass<'a, 'r> {
    replay: &'a DeviceReplay<'r>,
    heap: RecordedHeap,
    /// The events from which on `expandable_segments` was another, of those that are left.
    toggles: &'a [u32],
    /// Allocated or pending blocks by address.
    live: FxHashMap<u64, Live>,
    /// Bytes of blocks that are in no known segment: logs without segments.
    stray: u64,
    bytes_allocated: u64,
}

#[derive(Clone, Copy)]
struct Live {
    event: u32,
    /// If it is in no known segment, what it is.
    stray: Option<StateBlock>,
}

impl StatePass<'_, '_> {
    fn allocated_at_start(&self) -> u64 {
        let blocks = self.heap.blocks().values().filter(|block| block.state == BlockState::ActiveAllocated);
        blocks.fold(0, |sum: u64, block| sum.saturating_add(block.bytes))
    }

    fn apply(&mut self, at: usize, event: &TraceEntry) {
        let TraceEntry { addr, size, stream, pool, .. } = *event;
        match event.action {
            Action::SegmentAlloc => drop(self.heap.add_segment(addr, size, stream, pool)),
            Action::SegmentMap => drop(self.heap.map(addr, size, stream, pool)),
            Action::SegmentFree => drop(self.heap.remove_segment(addr, size)),
            Action::SegmentUnmap => drop(self.heap.unmap(addr, size)),
            Action::Alloc => {
                let number = u32::try_from(at).expect("fewer than 2^32 events");
                while let Some((_, rest)) = self.toggles.split_first().filter(|&(&first, _)| first <= number) {
                    self.heap.rules_mut().toggle_expandable_segments();
                    self.toggles = rest;
                }
                let found = self.heap.alloc(addr, size).or_else(|| self.heap.alloc_exactly(addr, size));
                let stray = found.is_none().then(|| self.stray_block(event, number));
                if let Some(before) = self.live.insert(addr, Live { event: number, stray }) {
                    self.forget(before);
                }
                self.stray = self.stray.saturating_add(stray.map_or(0, |block| block.bytes));
                self.bytes_allocated = self.bytes_allocated.saturating_add(self.block_bytes(addr, stray));
            }
            Action::FreeRequested => {
                let stray = self.live.get_mut(&addr).and_then(|live| live.stray.as_mut());
                if let Some(block) = stray {
                    block.state = BlockState::ActivePendingFree;
                    self.bytes_allocated = self.bytes_allocated.saturating_sub(block.bytes);
                } else if self.heap.free_requested(addr).is_some() {
                    self.bytes_allocated = self.bytes_allocated.saturating_sub(self.block_bytes(addr, None));
                }
            }
            Action::FreeCompleted => {
                if let Some(live) = self.live.remove(&addr) {
                    self.forget(live);
                }
                self.heap.free_completed(addr);
            }
            Action::Snapshot | Action::Oom | Action::Annotate => {}
        }
    }

    fn forget(&mut self, live: Live) {
        self.stray = self.stray.saturating_sub(live.stray.map_or(0, |block| block.bytes));
    }

    fn block_bytes(&self, addr: u64, stray: Option<StateBlock>) -> u64 {
        match stray {
            Some(block) => block.bytes,
            None => self.heap.blocks().get(&addr).map_or(0, |block| block.bytes),
        }
    }

    fn stray_block(&self, event: &TraceEntry, number: u32) -> StateBlock {
        StateBlock {
            addr: event.addr,
            bytes: event.size,
            requested: event.size,
            state: BlockState::ActiveAllocated,
            stream: event.stream,
            kind: SizeRules::kind(event.size),
            pool: PoolKey::DEFAULT,
            event: Some(number),
            stack: event.stack,
        }
    }

    fn state(&self) -> HeapState {
        let pools = &self.replay.inference().pools;
        let events = self.replay.events();
        let in_segments = self.heap.blocks().iter().map(|(addr, block)| {
            let segment = self.heap.segment(block.segment);
            let is_free = block.state == BlockState::Inactive;
            let event = self.live.get(addr).filter(|_| !is_free).map(|live| live.event);
            StateBlock {
                addr: *addr,
                bytes: block.bytes,
                requested: if is_free { 0 } else { block.requested.min(block.bytes) },
                state: block.state,
                stream: segment.stream,
                kind: segment.kind,
                pool: pool_key(pools.of_segment(block.segment), segment.pool),
                event,
                stack: event.and_then(|event| events[event as usize].stack),
            }
        });
        let stray = self.live.values().filter_map(|live| live.stray);
        let mut blocks: Vec<StateBlock> = in_segments.collect();
        let mut stray: Vec<StateBlock> = stray.collect();
        stray.sort_unstable_by_key(|block| block.event);
        blocks.extend(stray);
        HeapState { bytes_reserved: self.heap.bytes_reserved().saturating_add(self.stray), blocks }
    }

    /// Blocks from before the history that are still allocated at its end: they are in the snapshot, with their stacks.
    fn survivors(&self) -> FxHashMap<u64, Option<StackId>> {
        let blocks = self.replay.segments().iter().flat_map(|segment| &segment.blocks);
        let old = blocks
            .filter(|block| block.state == BlockState::ActiveAllocated && !self.live.contains_key(&block.address));
        old.map(|block| (block.address, block.stack)).collect()
    }
}

/// The pool of a segment: as inferred, or as the recording names it.
fn pool_key(inferred: PoolIndex, named: Option<MemPoolId>) -> PoolKey {
    match (inferred, named) {
        (DEFAULT_POOL, Some(pool)) if !pool.is_default() => PoolKey(u32::MAX),
        (inferred, _) => PoolKey(inferred),
    }
}
