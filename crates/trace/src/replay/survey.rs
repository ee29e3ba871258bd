//! One walk over a recording with a [`Ledger`]: where every allocation lay, what came from the driver and went back,
//! and which regions cannot have been in one pool. No conclusions here: `pools.rs` and `caps.rs` draw them.

use rustc_hash::FxHashSet;
use warpool::memory::{Action, MemPoolId, SegmentKind, TraceEntry};

use super::endings::is_small_first;
use super::ledger::{Ledger, Region, RegionId};
use super::model::Tape;
use super::sizes::Sizes;

/// No region: the recording does not fit itself there.
pub(super) const NOWHERE: RegionId = RegionId::MAX;

/// Memory was given back to the driver in one go.
#[derive(Clone, Debug)]
pub(super) struct Release {
    /// The first event of it, and the first behind it.
    pub events: std::ops::Range<usize>,
    /// What was given back, in order.
    pub regions: Vec<RegionId>,
    /// What could have been given back too.
    pub left: Vec<RegionId>,
    /// What was held before.
    pub bytes_before: u64,
    /// The request right behind it that needed new memory, or failed.
    pub next: Option<NextRequest>,
    /// Small ones came before large ones, as when a private pool ends.
    pub small_first: bool,
    /// It followed the event before within a millisecond.
    pub quick: bool,
}

/// A request that new memory was needed for.
#[derive(Clone, Debug)]
pub(super) struct NextRequest {
    /// What a limit is compared with.
    pub bytes_segment: u64,
    /// Regions that could have served it before the release.
    pub could_serve: Vec<RegionId>,
    /// Regions that could have served it after the release; it did not look.
    pub could_serve_after: Vec<RegionId>,
    /// Whether it failed all the same.
    pub failed: bool,
    /// Otherwise, its number among the allocations.
    pub number: usize,
}

/// Memory came from the driver.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fetch {
    /// What was held before.
    pub bytes_before: u64,
    /// What a limit is compared with.
    pub bytes_segment: u64,
    /// Whether garbage lay about: a large segment that nothing was in.
    pub garbage: bool,
}

/// A request that failed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Failure {
    /// What was held.
    pub bytes_held: u64,
    /// What a limit is compared with.
    pub bytes_segment: u64,
}

/// Two regions that cannot have been in one pool: the loser would have been chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rivalry {
    pub winner: RegionId,
    pub loser: RegionId,
    /// Whether the winner was new memory.
    pub fresh: bool,
    /// The block of the loser that would have been chosen.
    pub addr: u64,
    /// By how much it would have had to be smaller to be passed over.
    pub excess: u64,
}

/// What a walk found.
#[derive(Debug, Default)]
pub(super) struct Survey {
    /// The region of each allocation, in their order.
    pub alloc_regions: Vec<RegionId>,
    pub regions: Vec<Region>,
    pub rivalries: Vec<Rivalry>,
    pub releases: Vec<Release>,
    pub fetches: Vec<Fetch>,
    pub failures: Vec<Failure>,
    pub bytes_peak: u64,
    /// Events that do not fit what was known then.
    pub misfits: u64,
}

/// Walks over the events from the state that `ledger` has. The segments at the end tell pools.
pub(super) fn survey(tape: Tape<'_>, mut ledger: Ledger) -> Survey {
    let Tape { events, segments, .. } = tape;
    let mut found = Survey { bytes_peak: ledger.bytes(), ..Survey::default() };
    let mut rivalries = FxHashSet::default();
    let mut served_before = None;
    let mut at = 0;
    while at < events.len() {
        let event = &events[at];
        let fits = match event.action {
            Action::SegmentAlloc | Action::SegmentMap => {
                if at == 0 || !is_fetch(events[at - 1].action) {
                    found.note_fetch(events, at, &mut ledger, &mut rivalries);
                } else {
                    grow(&mut ledger, event);
                }
                found.bytes_peak = found.bytes_peak.max(ledger.bytes());
                true
            }
            Action::SegmentFree | Action::SegmentUnmap => {
                at = found.note_release(tape, at, &mut ledger, served_before.take());
                continue;
            }
            Action::Alloc => {
                let fresh = at > 0 && is_fetch(events[at - 1].action);
                let size = ledger.sizes().round(event.size);
                let rivals = if fresh { Vec::new() } else { ledger.rivals(event.stream, size, Some(event.addr)) };
                let region = ledger.take(event.addr, event.size);
                found.alloc_regions.push(region.unwrap_or(NOWHERE));
                if let Some(winner) = region {
                    found.note_rivals(&ledger, winner, false, size, &rivals, &mut rivalries);
                }
                region.is_some()
            }
            Action::FreeRequested => ledger.give_back(event.addr).is_some(),
            Action::FreeCompleted => {
                if served_before.is_none() && is_late(events, at) {
                    served_before = could_serve_before_wait(tape, at, &ledger);
                }
                ledger.release(event.addr).is_some()
            }
            Action::Oom => {
                let bytes_segment = ledger.sizes().segment(event.size);
                found.failures.push(Failure { bytes_held: ledger.bytes(), bytes_segment });
                true
            }
            Action::Snapshot | Action::Annotate => true,
        };
        found.misfits += u64::from(!fits);
        at += 1;
    }
    found.regions = ledger.regions().to_vec();
    for segment in segments {
        if let Some(piece) = ledger.pieces().get(&segment.address) {
            found.regions[piece.region as usize].pool = Some(segment.pool);
        }
    }
    found
}

impl Survey {
    /// The first piece of memory of a request.
    fn note_fetch(
        &mut self,
        events: &[TraceEntry],
        at: usize,
        ledger: &mut Ledger,
        rivalries: &mut FxHashSet<(RegionId, RegionId)>,
    ) {
        let Some(request) = request_behind(events, at) else {
            grow(ledger, &events[at]);
            return;
        };
        let size = ledger.sizes().round(request.size);
        let garbage = ledger.sizes().settings().garbage_collection_threshold > 0.0 && {
            let is_garbage =
                |&id: &RegionId| ledger.region(id).kind == SegmentKind::Large && !ledger.region(id).expandable;
            ledger.releasable().iter().any(is_garbage)
        };
        let bytes_segment = ledger.sizes().segment(size);
        self.fetches.push(Fetch { bytes_before: ledger.bytes(), bytes_segment, garbage });
        // Behind a release nothing is searched for again, whatever it left.
        let searched = at == 0 || !is_return(events[at - 1].action);
        let rivals = if searched { ledger.rivals(request.stream, size, None) } else { Vec::new() };
        let winner = grow(ledger, &events[at]);
        self.note_rivals(ledger, winner, true, size, &rivals, rivalries);
    }

    /// Each pair once. Regions that are known to be in different pools are no rivals.
    fn note_rivals(
        &mut self,
        ledger: &Ledger,
        winner: RegionId,
        fresh: bool,
        size: u64,
        rivals: &[(u64, RegionId)],
        known: &mut FxHashSet<(RegionId, RegionId)>,
    ) {
        let pool = |id: RegionId| ledger.region(id).pool;
        for &(addr, loser) in rivals {
            let apart = pool(winner).zip(pool(loser)).is_some_and(|(one, other)| one != other);
            if !apart && known.insert((winner, loser)) {
                let excess = ledger.pieces().get(&addr).map_or(0, |piece| piece.bytes.saturating_sub(size) + 512);
                self.rivalries.push(Rivalry { winner, loser, fresh, addr, excess });
            }
        }
    }

    /// All that was given back in one go. Returns where to go on.
    fn note_release(
        &mut self,
        tape: Tape<'_>,
        first: usize,
        ledger: &mut Ledger,
        served_before: Option<Vec<RegionId>>,
    ) -> usize {
        let events = tape.events;
        let end = end_of_release(tape, first, ledger.sizes());
        let bytes_before = ledger.bytes();
        let request = request_after_release(events, end, ledger);
        let could_serve_before =
            request.map(|(stream, size, _)| served_before.unwrap_or_else(|| could_serve(ledger, stream, size)));
        let mut regions = Vec::new();
        for event in &events[first..end] {
            let region = match event.action {
                Action::SegmentFree => ledger.remove_segment(event.addr, event.size),
                Action::SegmentUnmap => ledger.unmap(event.addr, event.size),
                _ => {
                    self.misfits += u64::from(ledger.release(event.addr).is_none());
                    continue;
                }
            };
            match region {
                Some(region) => regions.push(region),
                None => self.misfits += 1,
            }
        }
        let next = request.map(|(stream, size, failed)| NextRequest {
            bytes_segment: ledger.sizes().segment(size),
            could_serve: could_serve_before.unwrap_or_default(),
            could_serve_after: could_serve(ledger, stream, size),
            failed,
            number: self.alloc_regions.len(),
        });
        let small_first = is_small_first(&regions, ledger.regions());
        self.releases.push(Release {
            events: first..end,
            regions,
            left: ledger.releasable(),
            bytes_before,
            next,
            small_first,
            quick: first > 0 && events[first].time_us - events[first - 1].time_us < 1000,
        });
        end
    }
}

/// Where a release that begins at `first` ends. Two that follow each other at once are told apart by their pools, as
/// far as those are named: the default pool comes first, and the end of a pool touches no other. Or else by their
/// order, since a pool gives back what it has in the order of its searches, and by the time between them: only the
/// first free of a release waits for the device. That a slow driver pauses too is why both are tried.
fn end_of_release(tape: Tape<'_>, first: usize, sizes: &Sizes) -> usize {
    let events = tape.events;
    let in_order = !sizes.gives_back_parts();
    let of_private = events[first].pool.is_some_and(|pool| !pool.is_default());
    let mut end = first + 1;
    for at in first + 1..events.len() {
        match events[at].action {
            Action::SegmentFree | Action::SegmentUnmap => {
                let paused = tape.pauses_tell && at > first + 1 && is_pause(&events[at - 1], &events[at]);
                let other = events[at].pool != events[end - 1].pool;
                let disordered = in_order && breaks_order(&events[end - 1], &events[at]);
                if paused || disordered || (other && (of_private || events[at].pool.is_some_and(MemPoolId::is_default)))
                {
                    break;
                }
                end = at + 1;
            }
            Action::FreeCompleted => {}
            _ => break,
        }
    }
    end
}

/// Whether some segments went back with a pause between them.
pub(super) fn has_pauses(events: &[TraceEntry]) -> bool {
    events.windows(2).any(|pair| pair.iter().all(|event| is_return(event.action)) && is_pause(&pair[0], &pair[1]))
}

/// Longer than a free usually takes, other than the first.
fn is_pause(one: &TraceEntry, next: &TraceEntry) -> bool {
    const PAUSE_US: i64 = 5_000;
    next.time_us - one.time_us > PAUSE_US
}

/// Whether two segments cannot have been given back by one pool in this order.
fn breaks_order(one: &TraceEntry, next: &TraceEntry) -> bool {
    let key = |event: &TraceEntry| (event.stream, event.size, event.addr);
    one.pool.is_none()
        && one.action == Action::SegmentFree
        && next.action == Action::SegmentFree
        && Sizes::kind_of_segment(one.size) == Sizes::kind_of_segment(next.size)
        && key(one) > key(next)
}

/// The request right behind a release that ends at `end`, if it failed or needed new memory: its stream, its size, and
/// whether it failed.
fn request_after_release(events: &[TraceEntry], end: usize, ledger: &Ledger) -> Option<(u64, u64, bool)> {
    let event = events.get(end)?;
    match event.action {
        Action::Oom => Some((event.stream, event.size, true)),
        action if is_fetch(action) => {
            request_behind(events, end).map(|request| (request.stream, ledger.sizes().round(request.size), false))
        }
        _ => None,
    }
}

/// Whether the free that completes at `at` was asked for long before.
fn is_late(events: &[TraceEntry], at: usize) -> bool {
    at == 0 || events[at - 1].action != Action::FreeRequested || events[at - 1].addr != events[at].addr
}

/// If frees complete from `at` on because somebody waits for everything before a release: which regions could have
/// served the request that it was for before that. What the wait frees comes too late for it.
fn could_serve_before_wait(tape: Tape<'_>, at: usize, ledger: &Ledger) -> Option<Vec<RegionId>> {
    let events = tape.events;
    let behind = at + events[at..].iter().take_while(|event| event.action == Action::FreeCompleted).count();
    if !events.get(behind).is_some_and(|event| is_return(event.action)) {
        return None;
    }
    let (stream, size, _) = request_after_release(events, end_of_release(tape, behind, ledger.sizes()), ledger)?;
    Some(could_serve(ledger, stream, size))
}

fn could_serve(ledger: &Ledger, stream: u64, size: u64) -> Vec<RegionId> {
    ledger.rivals(stream, size, None).into_iter().map(|(_, region)| region).collect()
}

/// The allocation that the memory which came at `at` was for.
fn request_behind(events: &[TraceEntry], at: usize) -> Option<&TraceEntry> {
    events[at..].iter().find(|event| !is_fetch(event.action)).filter(|event| event.action == Action::Alloc)
}

pub(super) fn is_fetch(action: Action) -> bool {
    matches!(action, Action::SegmentAlloc | Action::SegmentMap)
}

pub(super) fn is_return(action: Action) -> bool {
    matches!(action, Action::SegmentFree | Action::SegmentUnmap)
}

fn grow(ledger: &mut Ledger, event: &TraceEntry) -> RegionId {
    match event.action {
        Action::SegmentMap => ledger.map(event.addr, event.size, event.stream, event.pool),
        _ => ledger.add_segment(event.addr, event.size, event.stream, event.pool),
    }
}
