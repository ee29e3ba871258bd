//! A recording as calls: what a program did, without what its allocator did about it. The latter is kept beside, to
//! compare with.
//!
//! Partners are found here, once: each free knows the slot of its allocation, each late completion its lane. The replay
//! itself then looks up nothing.

use rustc_hash::FxHashMap;
use warpool::memory::{Action, BlockState, TraceEntry};

use super::caps::Cause;
use super::lanes::{self, Place};
use super::pools::{DEFAULT, PoolIndex};
use super::start::Start;
use super::survey::{Release, is_return};

/// Where a replay keeps an allocation.
pub(super) type Slot = u32;

/// A stream by its place among the recorded ones, in ascending order.
pub(super) type StreamIndex = u16;

/// One call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// A request, and where it lay.
    Alloc { addr: u64, bytes: u64, event: u32, slot: Slot, stream: StreamIndex, pool: PoolIndex },
    /// Its owner gives it back.
    Free { event: u32, slot: Slot },
    /// The same, and another stream is still at work on it.
    FreeInUse { event: u32, slot: Slot, place: Place },
    /// It is done. `awaited`: because the allocator waited for everything, in a later step.
    Complete { event: u32, place: Place, awaited: bool },
    /// A request that failed.
    Fail { bytes: u64, event: u32, stream: StreamIndex, pool: PoolIndex },
    /// Nobody uses a pool any more.
    EndPool { event: u32, pool: PoolIndex },
    /// What is cached goes back to the driver.
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
            | Self::Fail { event, .. }
            | Self::EndPool { event, .. }
            | Self::Trim { event, .. } => event,
        }
    }
}

/// Something that the recorded allocator did with the driver during a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SegmentEvent {
    pub step: u32,
    pub event: u32,
}

/// A block that was in use before the first event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct EarlyBlock {
    pub addr: u64,
    pub bytes: u64,
    pub requested: u64,
    pub slot: Slot,
    /// Its owner had given it back already, and a lane is at work on it.
    pub place: Option<Place>,
}

/// What there is to do, and what should come of it.
#[derive(Debug, Default)]
pub(super) struct Plan {
    pub steps: Vec<Step>,
    pub segment_events: Vec<SegmentEvent>,
    /// Blocks of the starting state, by address.
    pub early: Vec<EarlyBlock>,
    /// Recorded streams, ascending.
    pub streams: Vec<u64>,
    pub slots: usize,
    pub lanes: usize,
    pub allocations: u64,
    pub failures: u64,
    /// The most that the recorded allocator held.
    pub bytes_peak: u64,
    /// How often it got memory from the driver.
    pub fetches: u64,
    /// Frees of what nobody is known to have had.
    pub unknown_frees: u64,
    /// Pools beyond the known ones: a pool that ended and was used again can only have been two.
    pub pools_added: usize,
}

/// What is known beside the events.
#[derive(Debug, Default)]
pub(super) struct Knowledge<'a> {
    pub start: Option<&'a Start>,
    /// By allocation; the default pool if there are none.
    pub alloc_pools: Vec<PoolIndex>,
    /// By failed request; likewise.
    pub fail_pools: Vec<PoolIndex>,
    pub releases: &'a [Release],
    pub causes: &'a [Cause],
    /// The pools of what each release gave back, other than the default pool.
    pub pools_released: Vec<Vec<PoolIndex>>,
    /// How many pools there are.
    pub pools: usize,
}

/// Makes a plan of the events.
pub(super) fn plan(events: &[TraceEntry], knowledge: &Knowledge<'_>) -> Plan {
    let mut planner = Planner::new(events, knowledge);
    planner.take_in_start();
    let mut at = 0;
    while at < events.len() {
        at = planner.take_in(at);
    }
    planner.finish()
}

struct Planner<'a> {
    events: &'a [TraceEntry],
    knowledge: &'a Knowledge<'a>,
    plan: Plan,
    stream_of: FxHashMap<u64, StreamIndex>,
    live: FxHashMap<u64, Slot>,
    slots_free: Vec<Slot>,
    /// Blocks that wait for a lane, by address: their number in `done`.
    waiting: FxHashMap<u64, u32>,
    /// When each block that waited was done.
    done: Vec<Option<u32>>,
    /// Segment events of the step to come.
    segments: Vec<u32>,
    bytes: u64,
    next_release: usize,
    /// Which pool stands for each: another, once it has ended.
    pool_now: FxHashMap<PoolIndex, PoolNow>,
}

#[derive(Clone, Copy)]
struct PoolNow {
    index: PoolIndex,
    ended: bool,
}

impl<'a> Planner<'a> {
    fn new(events: &'a [TraceEntry], knowledge: &'a Knowledge<'a>) -> Self {
        let early = knowledge.start.iter().flat_map(|start| start.ledger.regions().iter().map(|region| region.stream));
        let mut streams: Vec<u64> = vec![0];
        let mut last = 0;
        for stream in early.chain(events.iter().map(|event| event.stream)) {
            if stream != last {
                last = stream;
                if let Err(at) = streams.binary_search(&stream) {
                    streams.insert(at, stream);
                }
            }
        }
        let index = |at: usize| StreamIndex::try_from(at).expect("fewer than 65536 streams");
        let stream_of = streams.iter().enumerate().map(|(at, &stream)| (stream, index(at))).collect();
        let plan = Plan { steps: Vec::with_capacity(events.len() * 2 / 3 + 16), streams, ..Plan::default() };
        Self {
            events,
            knowledge,
            plan,
            stream_of,
            live: FxHashMap::default(),
            slots_free: Vec::new(),
            waiting: FxHashMap::default(),
            done: Vec::new(),
            segments: Vec::new(),
            bytes: 0,
            next_release: 0,
            pool_now: FxHashMap::default(),
        }
    }

    /// What was there before the first event.
    fn take_in_start(&mut self) {
        let Some(start) = self.knowledge.start else { return };
        self.bytes = start.ledger.bytes();
        self.plan.bytes_peak = self.bytes;
        for (&addr, piece) in start.ledger.pieces() {
            let place = match piece.state {
                BlockState::Inactive => continue,
                BlockState::ActiveAllocated => None,
                BlockState::ActivePendingFree => Some(self.wait_for_lane(addr)),
            };
            let slot = self.new_slot();
            if place.is_none() {
                self.live.insert(addr, slot);
            }
            self.plan.early.push(EarlyBlock { addr, bytes: piece.bytes, requested: piece.requested, slot, place });
        }
    }

    /// Takes in the event at `at`, with those that belong to it. Returns where to go on.
    fn take_in(&mut self, at: usize) -> usize {
        let event = &self.events[at];
        let number = u32::try_from(at).expect("fewer than 2^32 events");
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
                    self.plan.unknown_frees += 1;
                    return at + 1;
                };
                self.slots_free.push(slot);
                let at_once = self
                    .events
                    .get(at + 1)
                    .is_some_and(|next| next.action == Action::FreeCompleted && next.addr == event.addr);
                if at_once {
                    self.push(Step::Free { event: number, slot });
                    return at + 2;
                }
                let place = self.wait_for_lane(event.addr);
                self.push(Step::FreeInUse { event: number, slot, place });
            }
            Action::FreeCompleted => match self.waiting.remove(&event.addr) {
                Some(block) => {
                    let awaited = self.everything_is_awaited(at);
                    self.complete(number, block, awaited);
                }
                None => self.plan.unknown_frees += 1,
            },
            Action::SegmentAlloc | Action::SegmentMap => {
                self.bytes += event.size;
                self.plan.bytes_peak = self.plan.bytes_peak.max(self.bytes);
                self.plan.fetches += 1;
                self.segments.push(number);
            }
            Action::SegmentFree | Action::SegmentUnmap => return self.take_in_release(at),
            Action::Oom => {
                let stream = self.stream(event.stream);
                let pool = self.knowledge.fail_pools.get(self.plan.failures as usize).copied().unwrap_or(DEFAULT);
                let pool = if pool == DEFAULT { DEFAULT } else { self.usable(pool) };
                self.plan.failures += 1;
                self.push(Step::Fail { bytes: event.size, event: number, stream, pool });
            }
            Action::Snapshot | Action::Annotate => {}
        }
        at + 1
    }

    fn take_in_release(&mut self, at: usize) -> usize {
        let number = u32::try_from(at).expect("fewer than 2^32 events");
        let Some(release) = self.knowledge.releases.get(self.next_release).filter(|release| release.events.start == at)
        else {
            // Nothing was concluded: the allocator is left to itself.
            self.bytes = self.bytes.saturating_sub(self.events[at].size);
            self.segments.push(number);
            return at + 1;
        };
        let pools = &self.knowledge.pools_released[self.next_release];
        let cause = self.knowledge.causes[self.next_release];
        self.next_release += 1;
        for &pool in pools {
            let now = self.pool_now.entry(pool).or_insert(PoolNow { index: pool, ended: false });
            if !now.ended {
                now.ended = true;
                let pool = now.index;
                self.push(Step::EndPool { event: number, pool });
            }
        }
        for at in release.events.clone() {
            let event = &self.events[at];
            let number = u32::try_from(at).expect("fewer than 2^32 events");
            if is_return(event.action) {
                self.bytes = self.bytes.saturating_sub(event.size);
                self.segments.push(number);
            } else if let Some(block) = self.waiting.remove(&event.addr) {
                self.complete(number, block, matches!(cause, Cause::Retry | Cause::Trim));
            }
        }
        match cause {
            Cause::Retry | Cause::Collected => {}
            Cause::Trim => self.push(Step::Trim { event: number, pool: DEFAULT }),
            Cause::PoolEnded(pool) => {
                let pool = self.pool_now.get(&pool).map_or(pool, |now| now.index);
                self.push(Step::Trim { event: number, pool });
            }
        }
        release.events.end
    }

    /// Whether what completes at `at` completes because everything that was given back was waited for: before a request
    /// failed, and before everything cached was given back.
    fn everything_is_awaited(&self, at: usize) -> bool {
        let behind = at + self.events[at..].iter().take_while(|event| event.action == Action::FreeCompleted).count();
        let release = self.knowledge.releases.get(self.next_release).filter(|release| release.events.start == behind);
        match release {
            Some(_) => matches!(self.knowledge.causes[self.next_release], Cause::Retry | Cause::Trim),
            None => self.events.get(behind).is_some_and(|event| event.action == Action::Oom),
        }
    }

    fn finish(mut self) -> Plan {
        let (places, lanes) = lanes::assign(&self.done);
        self.plan.lanes = lanes;
        // Until here a place held the number of its block.
        let settle = |place: &mut Place| *place = places[place.turn as usize];
        self.plan.early.iter_mut().filter_map(|early| early.place.as_mut()).for_each(settle);
        if !places.is_empty() {
            for step in &mut self.plan.steps {
                if let Step::FreeInUse { place, .. } | Step::Complete { place, .. } = step {
                    settle(place);
                }
            }
        }
        self.plan
    }

    /// A block waits from now on. Its lane is known at the end.
    fn wait_for_lane(&mut self, addr: u64) -> Place {
        let block = u32::try_from(self.done.len()).expect("fewer than 2^32 blocks");
        self.waiting.insert(addr, block);
        self.done.push(None);
        Place { lane: 0, turn: block }
    }

    fn complete(&mut self, event: u32, block: u32, awaited: bool) {
        self.done[block as usize] = Some(event);
        self.push(Step::Complete { event, place: Place { lane: 0, turn: block }, awaited });
    }

    fn push(&mut self, step: Step) {
        let number = u32::try_from(self.plan.steps.len()).expect("fewer than 2^32 steps");
        let asks_driver = matches!(step, Step::Alloc { .. } | Step::Fail { .. } | Step::Trim { .. });
        if asks_driver && !self.segments.is_empty() {
            let segments = self.segments.drain(..).map(|event| SegmentEvent { step: number, event });
            self.plan.segment_events.extend(segments);
        }
        self.plan.steps.push(step);
    }

    fn new_slot(&mut self) -> Slot {
        self.slots_free.pop().unwrap_or_else(|| {
            self.plan.slots += 1;
            Slot::try_from(self.plan.slots - 1).expect("fewer than 2^32 slots")
        })
    }

    #[inline]
    fn pool_of_next_alloc(&mut self) -> PoolIndex {
        let at = usize::try_from(self.plan.allocations).expect("as many as events");
        match self.knowledge.alloc_pools.get(at) {
            None | Some(&DEFAULT) => DEFAULT,
            Some(&pool) => self.usable(pool),
        }
    }

    /// The pool that stands for another now; a new one, if that has ended.
    fn usable(&mut self, pool: PoolIndex) -> PoolIndex {
        match self.pool_now.get_mut(&pool) {
            None => pool,
            Some(now) if !now.ended => now.index,
            Some(now) => {
                let index = self.knowledge.pools + self.plan.pools_added;
                self.plan.pools_added += 1;
                *now = PoolNow { index: PoolIndex::try_from(index).expect("few pools"), ended: false };
                now.index
            }
        }
    }

    #[inline]
    fn stream(&self, stream: u64) -> StreamIndex {
        if stream == 0 { 0 } else { self.stream_of[&stream] }
    }
}
