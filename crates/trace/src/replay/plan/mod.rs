//! The calls of a replay: what the recorded program did, without what its allocator did. The segment events of the
//! recorded allocator are kept beside the steps, to compare with.
//!
//! Each free is matched here with the slot of its allocation, and each late completion with its use on a paused stream,
//! so that the replay itself needs no lookups.

mod paused_streams;

use std::collections::BTreeSet;

use rustc_hash::FxHashMap;
use warpool::memory::report::{Action, BlockState, TraceEntry};

pub(super) use paused_streams::PausedUse;

use super::ReplayError;
use super::infer::{DEFAULT_POOL, Inference, PoolIndex, PoolOrigin, ReleaseCause};
use super::recording::frees_segment;
use crate::budget::{Budget, Charge, Exceeded, bytes_of};

/// Events that are planned before their memory is counted.
const EVENTS_BETWEEN_COUNTS: usize = 64;

/// Where a replay keeps an allocation.
pub(super) type Slot = u32;

/// A recorded stream by its number in [`Plan::streams`].
pub(super) type StreamIndex = u16;

/// One call, with the event that it comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// A request, which got `addr`.
    Alloc { addr: u64, bytes: u64, event: u32, slot: Slot, stream: StreamIndex, pool: PoolIndex },
    /// A free that completes at once.
    Free { event: u32, slot: Slot },
    /// A free of a block that another stream still uses.
    FreeInUse { event: u32, slot: Slot, paused: PausedUse },
    /// That use completes. `awaited`: because the allocator waits for all events in a later step.
    Complete { event: u32, paused: PausedUse, awaited: bool },
    /// A request that failed.
    FailedAlloc { bytes: u64, event: u32, stream: StreamIndex, pool: PoolIndex },
    /// The program releases a private pool.
    ReleasePool { event: u32, pool: PoolIndex },
    /// The program releases the cached memory of a pool.
    Trim { event: u32, pool: PoolIndex },
}

impl Step {
    /// The event that it comes from.
    pub fn event(&self) -> u32 {
        match *self {
            Self::Alloc { event, .. }
            | Self::Free { event, .. }
            | Self::FreeInUse { event, .. }
            | Self::Complete { event, .. }
            | Self::FailedAlloc { event, .. }
            | Self::ReleasePool { event, .. }
            | Self::Trim { event, .. } => event,
        }
    }
}

/// A segment event of the recorded allocator during a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SegmentEvent {
    pub step: u32,
    pub event: u32,
}

/// A block that was in use before the first event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct InitialBlock {
    pub addr: u64,
    pub bytes: u64,
    pub requested: u64,
    pub slot: Slot,
    /// If it was freed already, the use that it waits for.
    pub paused: Option<PausedUse>,
}

/// The steps of a replay, and what they should result in.
#[derive(Debug, Default)]
pub(super) struct Plan {
    pub steps: Vec<Step>,
    pub segment_events: Vec<SegmentEvent>,
    /// Blocks of the initial state, by address.
    pub initial_blocks: Vec<InitialBlock>,
    /// Recorded streams, ascending.
    pub streams: Vec<u64>,
    /// The inferred pools, and a further one for each pool that was released and used again.
    pub pools: Vec<PoolOrigin>,
    pub slots: usize,
    pub paused_streams: usize,
    pub allocations: u64,
    pub failed_requests: u64,
    /// The largest sum of bytes that the recorded allocator reserved.
    pub peak_reserved_bytes: u64,
    /// How often it allocated or mapped memory from the driver.
    pub segments_allocated: u64,
    /// Frees without a matching allocation.
    pub unmatched_frees: u64,
    /// For the memory of all this.
    charge: Option<Charge>,
}

impl Plan {
    /// Makes the steps of the events, which are on these streams.
    pub fn new(
        events: &[TraceEntry],
        streams: &[u64],
        inference: &Inference,
        budget: &Budget,
    ) -> Result<Self, ReplayError> {
        let mut planner = Planner::new(events, streams, inference, budget)?;
        planner.plan_initial_blocks()?;
        let mut at = 0;
        while at < events.len() {
            // A few events add less than what is counted ahead.
            let end = events.len().min(at + EVENTS_BETWEEN_COUNTS);
            while at < end {
                at = planner.plan_event(at);
            }
            planner.count_memory();
            budget.check()?;
        }
        planner.finish()
    }
}

struct Planner<'a> {
    events: &'a [TraceEntry],
    inference: &'a Inference,
    plan: Plan,
    stream_of: FxHashMap<u64, StreamIndex>,
    live: FxHashMap<u64, Slot>,
    free_slots: Vec<Slot>,
    /// Blocks whose free is pending, by address: their number in `completed`.
    pending: FxHashMap<u64, u32>,
    /// The event at which each of these became free.
    completed: Vec<Option<u32>>,
    /// Segment events of the coming step.
    segment_events: Vec<u32>,
    bytes_reserved: u64,
    next_release: usize,
    /// The pool that is used in place of an inferred one, for those that were released.
    pool_in_use: FxHashMap<PoolIndex, PoolInUse>,
    /// The end of the completed frees in a row that were last looked at.
    completions_end: usize,
    charge: Charge,
}

#[derive(Clone, Copy)]
struct PoolInUse {
    index: PoolIndex,
    released: bool,
}

impl<'a> Planner<'a> {
    fn new(
        events: &'a [TraceEntry],
        streams: &[u64],
        inference: &'a Inference,
        budget: &Budget,
    ) -> Result<Self, Exceeded> {
        let initial = inference.initial.iter().flat_map(|initial| initial.heap.segments());
        let streams = initial.map(|segment| segment.stream).chain(streams.iter().copied()).chain([0]);
        let streams: Vec<u64> = streams.collect::<BTreeSet<u64>>().into_iter().collect();
        let index = |at: usize| StreamIndex::try_from(at).expect("fewer than 65536 streams");
        let stream_of = streams.iter().enumerate().map(|(at, &stream)| (stream, index(at))).collect();
        let mut charge = Charge::new(budget);
        let capacity = events.len() * 2 / 3 + 16;
        charge.add(bytes_of::<Step>(capacity) + 128 * streams.len() as u64)?;
        let steps = Vec::with_capacity(capacity);
        let plan = Plan { steps, streams, pools: inference.pools.origins().to_vec(), ..Plan::default() };
        Ok(Self {
            events,
            inference,
            plan,
            stream_of,
            live: FxHashMap::default(),
            free_slots: Vec::new(),
            pending: FxHashMap::default(),
            completed: Vec::new(),
            segment_events: Vec::new(),
            bytes_reserved: 0,
            next_release: 0,
            pool_in_use: FxHashMap::default(),
            completions_end: 0,
            charge,
        })
    }

    /// Counts the memory of the plan while it grows.
    #[inline]
    fn count_memory(&mut self) {
        const ENTRY: usize = 64;
        let plan = &self.plan;
        let steps = plan.steps.capacity() + plan.steps.capacity() / 2;
        let entries = self.live.len() + self.pending.len() + self.pool_in_use.len();
        let lists = plan.slots + self.completed.len() + self.segment_events.len() + plan.pools.len();
        let bytes = steps * size_of::<Step>()
            + entries * ENTRY
            + lists * 3 * size_of::<SegmentEvent>()
            + plan.segment_events.capacity() * 2 * size_of::<SegmentEvent>()
            + plan.initial_blocks.capacity() * 2 * size_of::<InitialBlock>()
            + plan.streams.len() * 128;
        self.charge.raise_to(bytes as u64);
    }

    fn plan_initial_blocks(&mut self) -> Result<(), Exceeded> {
        let Some(initial) = &self.inference.initial else { return Ok(()) };
        self.bytes_reserved = initial.heap.bytes_reserved();
        self.plan.peak_reserved_bytes = self.bytes_reserved;
        for (addr, block) in initial.heap.blocks().iter() {
            let paused = match block.state {
                BlockState::Inactive => continue,
                BlockState::ActiveAllocated => None,
                BlockState::ActivePendingFree => Some(self.begin_pending(addr)),
            };
            let slot = self.new_slot();
            if paused.is_none() {
                self.live.insert(addr, slot);
            }
            let (bytes, requested) = (block.bytes, block.requested);
            self.plan.initial_blocks.push(InitialBlock { addr, bytes, requested, slot, paused });
            self.count_memory();
            self.charge.budget().check()?;
        }
        Ok(())
    }

    /// Plans the event at `at` and those that belong to it. Returns the index of the next one.
    fn plan_event(&mut self, at: usize) -> usize {
        let event = &self.events[at];
        let number = event_number(at);
        match event.action {
            Action::Alloc => {
                let slot = self.new_slot();
                self.live.insert(event.addr, slot);
                let pool = self.pool_of_next_alloc();
                let stream = self.stream(event.stream);
                self.plan.allocations += 1;
                self.push(Step::Alloc { addr: event.addr, bytes: event.size, event: number, slot, stream, pool });
            }
            Action::FreeRequested => {
                let Some(slot) = self.live.remove(&event.addr) else {
                    self.plan.unmatched_frees += 1;
                    return at + 1;
                };
                self.free_slots.push(slot);
                let completes = |next: &TraceEntry| next.action == Action::FreeCompleted && next.addr == event.addr;
                if self.events.get(at + 1).is_some_and(completes) {
                    self.push(Step::Free { event: number, slot });
                    return at + 2;
                }
                let paused = self.begin_pending(event.addr);
                self.push(Step::FreeInUse { event: number, slot, paused });
            }
            Action::FreeCompleted => match self.pending.remove(&event.addr) {
                Some(block) => {
                    let awaited = self.is_awaited(at);
                    self.complete(number, block, awaited);
                }
                None => self.plan.unmatched_frees += 1,
            },
            Action::SegmentAlloc | Action::SegmentMap => {
                self.bytes_reserved = self.bytes_reserved.saturating_add(event.size);
                self.plan.peak_reserved_bytes = self.plan.peak_reserved_bytes.max(self.bytes_reserved);
                self.plan.segments_allocated += 1;
                self.segment_events.push(number);
            }
            Action::SegmentFree | Action::SegmentUnmap => return self.plan_release(at),
            Action::Oom => {
                let stream = self.stream(event.stream);
                let pool = self.pool_of_next_failed_request();
                self.plan.failed_requests += 1;
                self.push(Step::FailedAlloc { bytes: event.size, event: number, stream, pool });
            }
            Action::Snapshot | Action::Annotate => {}
        }
        at + 1
    }

    fn plan_release(&mut self, at: usize) -> usize {
        let number = event_number(at);
        let releases = &self.inference.releases;
        let Some(release) = releases.get(self.next_release).filter(|release| release.events.start == at) else {
            // Nothing was inferred about it: the replayed allocator may or may not release memory.
            self.bytes_reserved = self.bytes_reserved.saturating_sub(self.events[at].size);
            self.segment_events.push(number);
            return at + 1;
        };
        self.next_release += 1;
        for &pool in &release.private_pools {
            let in_use = self.pool_in_use.entry(pool).or_insert(PoolInUse { index: pool, released: false });
            if !in_use.released {
                in_use.released = true;
                let pool = in_use.index;
                self.push(Step::ReleasePool { event: number, pool });
            }
        }
        for at in release.events.clone() {
            let event = &self.events[at];
            let number = event_number(at);
            if frees_segment(event.action) {
                self.bytes_reserved = self.bytes_reserved.saturating_sub(event.size);
                self.segment_events.push(number);
            } else if let Some(block) = self.pending.remove(&event.addr) {
                self.complete(number, block, waits_for_all_events(release.cause));
            }
        }
        match release.cause {
            ReleaseCause::Retry | ReleaseCause::Partial => {}
            ReleaseCause::Trim => self.push(Step::Trim { event: number, pool: DEFAULT_POOL }),
            ReleaseCause::PoolReleased(pool) => {
                let pool = self.pool_in_use.get(&pool).map_or(pool, |in_use| in_use.index);
                self.push(Step::Trim { event: number, pool });
            }
        }
        release.events.end
    }

    /// Whether the free at `at` completes because the allocator waits for all events: before a request fails, and
    /// before everything cached is released.
    fn is_awaited(&mut self, at: usize) -> bool {
        if at >= self.completions_end {
            let completed = self.events[at..].iter().take_while(|event| event.action == Action::FreeCompleted);
            self.completions_end = at + completed.count();
        }
        let behind = self.completions_end;
        let releases = &self.inference.releases;
        match releases.get(self.next_release).filter(|release| release.events.start == behind) {
            Some(release) => waits_for_all_events(release.cause),
            None => self.events.get(behind).is_some_and(|event| event.action == Action::Oom),
        }
    }

    fn finish(mut self) -> Result<Plan, ReplayError> {
        self.charge.add(4 * bytes_of::<PausedUse>(self.completed.len()))?;
        let Some((uses, paused_streams)) = paused_streams::assign(&self.completed) else {
            let reason = "it has more than 65535 frees that complete out of order at one time".to_owned();
            return Err(ReplayError::Implausible { reason });
        };
        self.plan.paused_streams = paused_streams;
        // Until here `position` was the number of the block in `completed`.
        let assign = |paused: &mut PausedUse| *paused = uses[paused.position as usize];
        self.plan.initial_blocks.iter_mut().filter_map(|block| block.paused.as_mut()).for_each(assign);
        if !uses.is_empty() {
            for step in &mut self.plan.steps {
                if let Step::FreeInUse { paused, .. } | Step::Complete { paused, .. } = step {
                    assign(paused);
                }
            }
        }
        self.plan.charge = Some(self.charge);
        Ok(self.plan)
    }

    /// The free of a block is pending from now on. Its paused stream is assigned in `finish`.
    fn begin_pending(&mut self, addr: u64) -> PausedUse {
        let block = u32::try_from(self.completed.len()).expect("fewer than 2^32 blocks");
        self.pending.insert(addr, block);
        self.completed.push(None);
        PausedUse { stream: 0, position: block }
    }

    fn complete(&mut self, event: u32, block: u32, awaited: bool) {
        self.completed[block as usize] = Some(event);
        self.push(Step::Complete { event, paused: PausedUse { stream: 0, position: block }, awaited });
    }

    fn push(&mut self, step: Step) {
        let number = u32::try_from(self.plan.steps.len()).expect("fewer than 2^32 steps");
        let calls_driver = matches!(step, Step::Alloc { .. } | Step::FailedAlloc { .. } | Step::Trim { .. });
        if calls_driver && !self.segment_events.is_empty() {
            let events = self.segment_events.drain(..).map(|event| SegmentEvent { step: number, event });
            self.plan.segment_events.extend(events);
        }
        self.plan.steps.push(step);
    }

    fn new_slot(&mut self) -> Slot {
        self.free_slots.pop().unwrap_or_else(|| {
            self.plan.slots += 1;
            Slot::try_from(self.plan.slots - 1).expect("fewer than 2^32 slots")
        })
    }

    #[inline]
    fn pool_of_next_alloc(&mut self) -> PoolIndex {
        let at = usize::try_from(self.plan.allocations).expect("as many as events");
        match self.inference.allocation_pools.get(at) {
            None | Some(&DEFAULT_POOL) => DEFAULT_POOL,
            Some(&pool) => self.usable_pool(pool),
        }
    }

    fn pool_of_next_failed_request(&mut self) -> PoolIndex {
        let at = usize::try_from(self.plan.failed_requests).expect("as many as events");
        match self.inference.failed_request_pools.get(at) {
            None | Some(&DEFAULT_POOL) => DEFAULT_POOL,
            Some(&pool) => self.usable_pool(pool),
        }
    }

    /// The pool to use for an inferred one; a new one, if that was released. A pool that was released and used again
    /// must have been two pools.
    fn usable_pool(&mut self, pool: PoolIndex) -> PoolIndex {
        match self.pool_in_use.get_mut(&pool) {
            None => pool,
            Some(in_use) if !in_use.released => in_use.index,
            Some(in_use) => {
                let index = PoolIndex::try_from(self.plan.pools.len()).expect("fewer than events");
                self.plan.pools.push(PoolOrigin::Inferred);
                *in_use = PoolInUse { index, released: false };
                index
            }
        }
    }

    #[inline]
    fn stream(&self, stream: u64) -> StreamIndex {
        if stream == 0 { 0 } else { self.stream_of[&stream] }
    }
}

/// Whether the allocator waits for all events before it releases memory.
fn waits_for_all_events(cause: ReleaseCause) -> bool {
    matches!(cause, ReleaseCause::Retry | ReleaseCause::Trim)
}

fn event_number(at: usize) -> u32 {
    u32::try_from(at).expect("fewer than 2^32 events")
}
