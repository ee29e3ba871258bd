//! The segments and blocks of the recorded allocator at chosen events, from the recorded events alone: addresses and
//! sizes are the recorded ones, whatever a replay does.

use std::ops::Range;
use std::rc::Rc;

use rustc_hash::FxHashMap;
use warpool::memory::report::{Action, BlockState, SegmentInfo, SegmentKind, StackId, TraceEntry};
use warpool::memory::{MemPoolId, SizeRules};

use super::ReplayError;
use super::device::DeviceReplay;
use super::infer::{DEFAULT_POOL, PoolIndex, RecordedHeap, RecordedRules, RecordedSegment, ReleaseCause, SegmentId};
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
    /// The number of its segment; `None` if it is in no known one.
    pub segment: Option<u32>,
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
    /// Bytes that could be returned to the driver.
    pub bytes_releasable: u64,
    pub blocks: Vec<StateBlock>,
}

/// A request, in the terms of [`HeapState`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RequestInfo {
    pub bytes: u64,
    /// The size of its block.
    pub bytes_rounded: u64,
    /// The bytes that were, or would have been, requested from the driver.
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
        for (number, segment) in segments.iter().enumerate() {
            let number = u32::try_from(number).ok();
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
                    segment: number,
                    event: None,
                    stack: block.stack,
                });
            }
            if !segment.blocks.iter().any(|block| block.state != BlockState::Inactive) {
                state.bytes_releasable = state.bytes_releasable.saturating_add(segment.total_size);
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
                    segment: number,
                    event,
                    stack,
                });
            }
        }
        state
    }
}

/// The bytes after an event, and what it changed.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Totals {
    pub event: usize,
    pub bytes_reserved: u64,
    /// Bytes of allocated blocks.
    pub bytes_allocated: u64,
    /// Requested bytes of allocated blocks.
    pub bytes_requested: u64,
    /// Bytes of pending free blocks.
    pub bytes_waiting: u64,
    /// Bytes that could be returned to the driver: segments without allocations, or whole chunks of expandable ones.
    pub bytes_releasable: u64,
    pub change: StateChange,
}

/// What an event changed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum StateChange {
    /// Nothing, or a change that contradicts the state before it.
    #[default]
    Nothing,
    /// A block was allocated.
    Allocated { addr: u64, bytes: u64, requested: u64, stack: Option<StackId> },
    /// A block was freed and is pending free.
    FreeRequested { addr: u64 },
    /// A block is free.
    Freed { addr: u64 },
    /// Memory was allocated or mapped from the driver.
    Reserved { addr: u64, bytes: u64, stream: u64, kind: SegmentKind, pool: PoolKey, segment: u32 },
    /// Memory was returned to the driver.
    Released { addr: u64, bytes: u64 },
}

impl<'r> DeviceReplay<'r> {
    /// A pass over the events, at its start.
    fn pass(&self) -> StatePass<'_, 'r> {
        let inference = self.inference();
        let rules = RecordedRules::new(&inference.settings);
        let heap = match &inference.initial {
            Some(initial) => initial.heap.clone(),
            None => RecordedHeap::new(rules, self.budget()),
        };
        let (strays, toggles) = (FxHashMap::default(), self.toggles());
        let mut pass = StatePass { replay: self, heap, toggles, strays, bytes: Bytes::default() };
        pass.heap.track_releasable();
        pass.count_start();
        pass
    }

    /// Passes over all events, and calls `on_event` after each. Where it returns `true`, a state near that event will
    /// be needed, and the result has a checkpoint near it.
    pub(crate) fn walk(&self, mut on_event: impl FnMut(&Totals) -> bool) -> Result<Checkpoints<'_, 'r>, ReplayError> {
        /// A copy takes as long as some events for each of its blocks.
        const EVENTS_MIN: usize = 1 << 16;
        const EVENTS_PER_BLOCK: usize = 16;
        let mut pass = self.pass();
        let mut charge = Charge::new(self.budget());
        let (mut last, mut kept) = (None, Vec::new());
        let mut next = 0;
        for (at, event) in self.events().iter().enumerate() {
            if at == next {
                last = Some(Rc::new((at, pass.clone())));
                next = at + EVENTS_MIN.max(EVENTS_PER_BLOCK * pass.heap.blocks().len());
            }
            let change = pass.apply(at, event);
            if on_event(&pass.totals(at, change)) {
                keep(&mut kept, last.as_ref());
            }
            if at % 1024 == 0 {
                charge.raise_to(128 * pass.strays.len() as u64);
                self.budget().check()?;
            }
        }
        self.budget().check()?;
        Ok(Checkpoints(kept))
    }

    /// The states before these events, which ascend; one beyond the last event is the state at the end.
    pub(crate) fn states_before(
        &self,
        moments: &[usize],
        from: Checkpoints<'_, 'r>,
    ) -> Result<Vec<HeapState>, ReplayError> {
        let Some(&first) = moments.first() else { return Ok(Vec::new()) };
        let nearest = from.0.into_iter().rev().find(|checkpoint| checkpoint.0 <= first);
        let (start, mut pass) = nearest.map_or_else(|| (0, self.pass()), Rc::unwrap_or_clone);
        let mut charge = Charge::new(self.budget());
        let mut states = Vec::with_capacity(moments.len());
        let mut moments = moments.iter().peekable();
        for (at, event) in self.events().iter().enumerate().skip(start) {
            while moments.next_if(|&&moment| moment == at).is_some() {
                states.push(pass.state());
            }
            if moments.peek().is_none() {
                break;
            }
            pass.apply(at, event);
            if at % 1024 == 0 {
                charge.raise_to(128 * pass.strays.len() as u64);
                self.budget().check()?;
            }
        }
        states.extend(moments.map(|_| pass.state()));
        self.add_stacks_of_survivors(&mut states);
        self.budget().check()?;
        Ok(states)
    }

    /// Blocks that are still allocated at the end are in the snapshot, with their stacks. Blocks from before the
    /// history have their stacks only there, and so do all blocks if the events have no stacks.
    fn add_stacks_of_survivors(&self, states: &mut [HeapState]) {
        let mut unknown = states.iter_mut().flat_map(|state| &mut state.blocks);
        let is_unknown = |block: &StateBlock| block.stack.is_none() && block.state == BlockState::ActiveAllocated;
        if !unknown.any(|block| is_unknown(block)) {
            return;
        }
        let mut live: FxHashMap<u64, u32> = FxHashMap::default();
        for (at, event) in (0_u32..).zip(self.events()) {
            match event.action {
                Action::Alloc => drop(live.insert(event.addr, at)),
                Action::FreeCompleted => drop(live.remove(&event.addr)),
                _ => {}
            }
        }
        let blocks = self.segments().iter().flat_map(|segment| &segment.blocks);
        let kept = blocks.filter(|block| block.state == BlockState::ActiveAllocated && block.stack.is_some());
        let survivors: FxHashMap<(u64, Option<u32>), Option<StackId>> =
            kept.map(|block| ((block.address, live.get(&block.address).copied()), block.stack)).collect();
        for block in states.iter_mut().flat_map(|state| &mut state.blocks).filter(|block| is_unknown(block)) {
            block.stack = survivors.get(&(block.addr, block.event)).copied().flatten();
        }
    }

    /// The bytes before the first event; its number is that of the first event.
    pub(crate) fn totals_at_start(&self) -> Totals {
        let pass = self.pass();
        pass.totals(0, StateChange::Nothing)
    }

    /// The state before the first event. Blocks that are still allocated at the end have their stacks.
    pub(crate) fn states_before_first(&self) -> Result<HeapState, ReplayError> {
        let mut states = self.states_before(&[0], Checkpoints::default())?;
        Ok(states.pop().unwrap_or_default())
    }

    /// The events at which the allocator released what it had cached, to retry a request.
    pub(crate) fn retries(&self) -> impl Iterator<Item = Range<usize>> {
        let releases = self.inference().releases.iter();
        releases.filter(|release| release.cause == ReleaseCause::Retry).map(|release| release.events.clone())
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

/// Passes at some events, ascending: states near them need no pass from the start.
#[derive(Default)]
pub(crate) struct Checkpoints<'a, 'r>(Vec<Rc<(usize, StatePass<'a, 'r>)>>);

/// Adds a checkpoint, unless it exists. If there are too many, the first ones are dropped, since peaks come late.
fn keep<'a, 'r>(kept: &mut Vec<Rc<(usize, StatePass<'a, 'r>)>>, checkpoint: Option<&Rc<(usize, StatePass<'a, 'r>)>>) {
    const KEPT_MAX: usize = 4;
    let Some(checkpoint) = checkpoint else { return };
    if kept.iter().any(|kept| kept.0 == checkpoint.0) {
        return;
    }
    if kept.len() == KEPT_MAX {
        kept.remove(1);
    }
    kept.push(Rc::clone(checkpoint));
}

#[derive(Clone)]
struct StatePass<'a, 'r> {
    replay: &'a DeviceReplay<'r>,
    heap: RecordedHeap,
    /// The remaining events at which `expandable_segments` changes.
    toggles: &'a [u32],
    /// Allocated or pending blocks that are in no known segment, by address: logs without segments.
    strays: FxHashMap<u64, StateBlock>,
    bytes: Bytes,
}

/// Running sums.
#[derive(Clone, Copy, Default)]
struct Bytes {
    allocated: u64,
    requested: u64,
    waiting: u64,
    /// Bytes of blocks that are in no known segment.
    stray: u64,
}

impl StatePass<'_, '_> {
    fn count_start(&mut self) {
        for block in self.heap.blocks().values() {
            let sums = &mut self.bytes;
            match block.state {
                BlockState::ActiveAllocated => {
                    sums.allocated = sums.allocated.saturating_add(block.bytes);
                    sums.requested = sums.requested.saturating_add(block.bytes_requested());
                }
                BlockState::ActivePendingFree => sums.waiting = sums.waiting.saturating_add(block.bytes),
                BlockState::Inactive => {}
            }
        }
    }

    fn totals(&self, event: usize, change: StateChange) -> Totals {
        Totals {
            event,
            bytes_reserved: self.heap.bytes_reserved().saturating_add(self.bytes.stray),
            bytes_allocated: self.bytes.allocated,
            bytes_requested: self.bytes.requested,
            bytes_waiting: self.bytes.waiting,
            bytes_releasable: self.heap.bytes_releasable(),
            change,
        }
    }

    fn apply(&mut self, at: usize, event: &TraceEntry) -> StateChange {
        let TraceEntry { addr, size, stream, pool, .. } = *event;
        match event.action {
            Action::SegmentAlloc => {
                let segment = self.heap.add_segment(addr, size, stream, pool);
                self.reserved(addr, size, segment)
            }
            Action::SegmentMap => {
                let segment = self.heap.map(addr, size, stream, pool);
                self.reserved(addr, size, segment)
            }
            Action::SegmentFree => released(self.heap.remove_segment(addr, size), addr, size),
            Action::SegmentUnmap => released(self.heap.unmap(addr, size), addr, size),
            Action::Alloc => {
                let number = u32::try_from(at).expect("fewer than 2^32 events");
                while let Some((_, rest)) = self.toggles.split_first().filter(|&(&first, _)| first <= number) {
                    self.heap.rules_mut().toggle_expandable_segments();
                    self.toggles = rest;
                }
                self.forget_stray(addr);
                let found = self.heap.alloc(addr, size, number);
                let found = found.or_else(|| self.heap.alloc_exactly(addr, size, number));
                let bytes = found.map_or_else(|| self.add_stray(event, number), |block| block.bytes);
                let requested = size.min(bytes);
                self.bytes.allocated = self.bytes.allocated.saturating_add(bytes);
                self.bytes.requested = self.bytes.requested.saturating_add(requested);
                StateChange::Allocated { addr, bytes, requested, stack: event.stack }
            }
            Action::FreeRequested => self.free_requested(addr),
            Action::FreeCompleted => self.free_completed(addr),
            Action::Snapshot | Action::Oom | Action::Annotate => StateChange::Nothing,
        }
    }

    fn free_requested(&mut self, addr: u64) -> StateChange {
        let stray = self.strays.get_mut(&addr).filter(|block| block.state == BlockState::ActiveAllocated);
        let (bytes, requested) = if let Some(block) = stray {
            block.state = BlockState::ActivePendingFree;
            (block.bytes, block.requested)
        } else if let Some(block) = self.heap.free_requested(addr) {
            (block.bytes, block.bytes_requested())
        } else {
            return StateChange::Nothing;
        };
        self.bytes.take_allocated(bytes, requested);
        self.bytes.waiting = self.bytes.waiting.saturating_add(bytes);
        StateChange::FreeRequested { addr }
    }

    fn free_completed(&mut self, addr: u64) -> StateChange {
        let was_stray = self.forget_stray(addr);
        let block = self.heap.free_completed(addr);
        if let Some(block) = block {
            self.count_freed(block.state, block.bytes, block.bytes_requested());
        }
        if was_stray || block.is_some() { StateChange::Freed { addr } } else { StateChange::Nothing }
    }

    /// A block is free: some logs have no event for the request.
    fn count_freed(&mut self, state: BlockState, bytes: u64, requested: u64) {
        match state {
            BlockState::ActiveAllocated => self.bytes.take_allocated(bytes, requested),
            BlockState::ActivePendingFree => self.bytes.waiting = self.bytes.waiting.saturating_sub(bytes),
            BlockState::Inactive => {}
        }
    }

    fn reserved(&self, addr: u64, bytes: u64, segment: SegmentId) -> StateChange {
        let RecordedSegment { stream, kind, pool, .. } = *self.heap.segment(segment);
        let pool = pool_key(self.replay.inference().pools.of_segment(segment), pool);
        StateChange::Reserved { addr, bytes, stream, kind, pool, segment }
    }

    /// Removes a block in no known segment. Returns whether there was one.
    fn forget_stray(&mut self, addr: u64) -> bool {
        // Few recordings have any.
        if self.strays.is_empty() {
            return false;
        }
        let Some(block) = self.strays.remove(&addr) else { return false };
        self.bytes.stray = self.bytes.stray.saturating_sub(block.bytes);
        self.count_freed(block.state, block.bytes, block.requested);
        true
    }

    /// Adds a block in no known segment. Returns its size.
    fn add_stray(&mut self, event: &TraceEntry, number: u32) -> u64 {
        let block = StateBlock {
            addr: event.addr,
            bytes: event.size,
            requested: event.size,
            state: BlockState::ActiveAllocated,
            stream: event.stream,
            kind: SizeRules::kind(event.size),
            pool: PoolKey::DEFAULT,
            segment: None,
            event: Some(number),
            stack: event.stack,
        };
        self.strays.insert(event.addr, block);
        self.bytes.stray = self.bytes.stray.saturating_add(block.bytes);
        block.bytes
    }

    fn state(&self) -> HeapState {
        let pools = &self.replay.inference().pools;
        let events = self.replay.events();
        let in_segments = self.heap.blocks().iter().map(|(addr, block)| {
            let segment = self.heap.segment(block.segment);
            let is_free = block.state == BlockState::Inactive;
            StateBlock {
                addr,
                bytes: block.bytes,
                requested: if is_free { 0 } else { block.bytes_requested() },
                state: block.state,
                stream: segment.stream,
                kind: segment.kind,
                pool: pool_key(pools.of_segment(block.segment), segment.pool),
                segment: Some(block.segment),
                event: block.event,
                stack: block.event.and_then(|event| events[event as usize].stack),
            }
        });
        let mut blocks: Vec<StateBlock> = in_segments.collect();
        let mut strays: Vec<StateBlock> = self.strays.values().copied().collect();
        strays.sort_unstable_by_key(|block| block.event);
        blocks.extend(strays);
        HeapState {
            bytes_reserved: self.heap.bytes_reserved().saturating_add(self.bytes.stray),
            bytes_releasable: self.heap.bytes_releasable(),
            blocks,
        }
    }
}

impl Bytes {
    fn take_allocated(&mut self, bytes: u64, requested: u64) {
        self.allocated = self.allocated.saturating_sub(bytes);
        self.requested = self.requested.saturating_sub(requested);
    }
}

fn released(segment: Option<SegmentId>, addr: u64, bytes: u64) -> StateChange {
    segment.map_or(StateChange::Nothing, |_| StateChange::Released { addr, bytes })
}

/// The pool of a segment: as inferred, or as the recording names it.
fn pool_key(inferred: PoolIndex, named: Option<MemPoolId>) -> PoolKey {
    match (inferred, named) {
        (DEFAULT_POOL, Some(pool)) if !pool.is_default() => PoolKey(u32::MAX),
        (inferred, _) => PoolKey(inferred),
    }
}
