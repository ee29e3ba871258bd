//! The memory of one device over the whole of a recording, as data for drawing: allocated and cached memory and
//! fragmentation at every moment, every allocation with its lifetime, every reserved range, and their call stacks.
//!
//! A *position* counts events: position 0 is before the first event, position `n` is after the first `n`. From a
//! [`Timeline`] the state at any position can be made without the recording: an [`Allocation`] exists from one position
//! to another, and so does a [`ReservedRange`]; reserved memory outside of allocations is free.
//!
//! ```no_run
//! use warpool_trace::timeline::{TimelineOptions, timelines};
//! use warpool_trace::{ReadOptions, read_file};
//!
//! let recording = read_file("train.pickle", &ReadOptions { stacks: true, ..ReadOptions::default() })?;
//! for timeline in timelines(&recording.snapshot, &TimelineOptions::default())? {
//!     println!("{} bytes at position {}", timeline.peak_live.live(), timeline.peak_live.position);
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! It is bounded, however long the recording: beyond [`TimelineOptions::allocations_max`] the smallest and shortest
//! allocations are left out, and beyond [`TimelineOptions::buckets_max`] positions are summarised ([`Level`]).

mod allocations;
mod levels;
mod ranges;
mod regions;
mod stacks;

use std::collections::BTreeMap;

use warpool::memory::report::{Action, SegmentInfo, Snapshot, StackId};

pub use allocations::Allocation;
pub use levels::{Bucket, Level, Sample};
pub use ranges::ReservedRange;
pub use regions::{ContextChange, Region};
pub use stacks::{StackNode, StackTree};

use crate::category::{Categories, Category};
use crate::explain::{ExplainOptions, Explanation, explain_device, explain_segments};
use crate::replay::{DeviceReplay, DeviceReplays, HeapState, ReplayError, ReplayOptions, Totals, check_segments};
use allocations::AllocationTable;
use levels::Levels;
use ranges::Ranges;

/// How much of a recording a [`Timeline`] keeps, and how it is explained.
#[derive(Clone)]
pub struct TimelineOptions<'a> {
    /// The most allocations; beyond that the largest and longest are kept.
    pub allocations_max: usize,
    /// The most buckets of the finest level.
    pub buckets_max: usize,
    /// How the moments are explained, with the memory limit and the progress.
    pub explain: ExplainOptions<'a>,
}

impl Default for TimelineOptions<'_> {
    fn default() -> Self {
        Self { allocations_max: 1 << 20, buckets_max: 1 << 20, explain: ExplainOptions::default() }
    }
}

/// The memory of one device over a recording.
#[derive(Clone, Debug)]
pub struct Timeline {
    /// The device.
    pub device: u32,
    /// How many events there are; 0 without a history.
    pub events: u64,
    /// Microseconds from the first event to the last.
    pub duration_us: u64,
    /// Allocated and cached memory and fragmentation over time; the finest level first, each further one eight times
    /// coarser.
    pub levels: Vec<Level>,
    /// The allocations, in the order of their events.
    pub allocations: Vec<Allocation>,
    /// How many were left out.
    pub allocations_left_out: u64,
    /// The reserved ranges, in the order of events.
    pub ranges: Vec<ReservedRange>,
    /// Events that stand out, in their order.
    pub marks: Vec<Mark>,
    /// Parts of the program with names, in the order of their starts.
    pub regions: Vec<Region>,
    /// How many were left out.
    pub regions_left_out: u64,
    /// Where the texts that the program sets for its events change.
    pub contexts: Vec<ContextChange>,
    /// Whether all changes are there.
    pub contexts_complete: bool,
    /// The sample with the most live memory; the first of them.
    pub peak_live: Sample,
    /// The sample with the most reserved memory, and of these the one with the most live memory.
    pub peak_reserved: Sample,
    /// Why it ran out, or what its peak was.
    pub explanation: Explanation,
}

impl Timeline {
    /// Whether [`reduce`](Self::reduce) would leave anything out.
    #[must_use]
    pub fn can_reduce(&self) -> bool {
        !self.allocations.is_empty() || self.levels.first().is_some_and(|level| level.buckets.len() > 1)
    }

    /// Halves its size: leaves out the lighter half of the allocations, and makes the finest level twice as coarse.
    pub fn reduce(&mut self) {
        let kept = self.allocations.len() / 2;
        self.allocations_left_out += (self.allocations.len() - kept) as u64;
        allocations::keep_heaviest(&mut self.allocations, kept);
        self.allocations.sort_unstable_by_key(|allocation| (allocation.from, allocation.addr));
        levels::coarsen(&mut self.levels);
    }
}

/// An event that stands out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    /// The position after its event.
    pub position: u64,
    /// Its kind.
    pub kind: MarkKind,
    /// The bytes of the request, or the released bytes; 0 if that is not known.
    pub bytes: u64,
    /// The call stack of the request.
    pub stack: Option<StackId>,
}

/// The kind of a mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MarkKind {
    /// A request ran out of memory.
    OutOfMemory,
    /// The allocator released what it had cached, to retry a request. It is inferred: recordings do not contain it.
    Retry,
}

impl MarkKind {
    /// Its name: `oom`, `retry`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::OutOfMemory => "oom",
            Self::Retry => "retry",
        }
    }
}

/// The timelines of all devices of a recording, by number.
///
/// # Errors
/// If it has neither events nor segments, or cannot be replayed.
pub fn timelines(snapshot: &Snapshot, options: &TimelineOptions<'_>) -> Result<Vec<Timeline>, ReplayError> {
    let mut segments: BTreeMap<i32, Vec<&SegmentInfo>> = BTreeMap::new();
    for segment in snapshot.segments.iter().filter(|segment| segment.device >= 0) {
        segments.entry(segment.device).or_default().push(segment);
    }
    let ExplainOptions { memory_limit, progress, ref stop, .. } = options.explain;
    let replay_options = ReplayOptions { memory_limit, progress, stop: stop.clone(), ..ReplayOptions::default() };
    let replays = match DeviceReplays::new(snapshot, &replay_options) {
        Ok(replays) => Some(replays),
        Err(ReplayError::NoHistory) if !segments.is_empty() => None,
        Err(error) => return Err(error),
    };
    let mut found = Vec::new();
    for replay in replays.iter().flat_map(DeviceReplays::devices) {
        segments.remove(&i32::try_from(replay.device()).unwrap_or(-1));
        let mut categories = Categories::new(replay.events(), &snapshot.stacks, &snapshot.annotations);
        let explanation = explain_device(snapshot, replay, &mut categories, &options.explain)?;
        found.push(of_device(snapshot, replay, explanation, &mut categories, options)?);
    }
    for (device, segments) in segments {
        let device = device.unsigned_abs();
        check_segments(device, &segments)?;
        let explanation = explain_segments(snapshot, device, &segments, &options.explain);
        found.push(of_segments(snapshot, &segments, explanation, options));
    }
    found.sort_by_key(|timeline| timeline.device);
    Ok(found)
}

fn of_device(
    snapshot: &Snapshot,
    replay: &DeviceReplay<'_>,
    explanation: Explanation,
    categories: &mut Categories,
    options: &TimelineOptions<'_>,
) -> Result<Timeline, ReplayError> {
    let events = replay.events();
    let start = replay.states_before_first()?;
    let mut building = Building::new(snapshot, &start, events.len(), categories, options);
    let mut allocations = categories.all().iter();
    let first_us = events.first().map_or(0, |event| event.time_us);
    let mut time_us = 0;
    replay.walk(|totals| {
        // Events of several threads may be out of order.
        let since = events[totals.event].time_us.saturating_sub(first_us);
        time_us = u64::try_from(since).unwrap_or(0).max(time_us);
        let is_allocation = events[totals.event].action == Action::Alloc;
        let category = is_allocation.then(|| allocations.next()).flatten().map_or(Category::Unknown, |it| it.0);
        building.see(totals, category, time_us);
        false
    })?;
    let mut timeline = building.finish(explanation);
    timeline.marks = marks(replay);
    (timeline.regions, timeline.regions_left_out) = regions::regions(&snapshot.annotations, replay.device(), events);
    (timeline.contexts, timeline.contexts_complete) = regions::contexts(events);
    Ok(timeline)
}

fn of_segments(
    snapshot: &Snapshot,
    segments: &[&SegmentInfo],
    explanation: Explanation,
    options: &TimelineOptions<'_>,
) -> Timeline {
    let start = HeapState::of_snapshot(segments);
    Building::new(snapshot, &start, 0, &mut Categories::default(), options).finish(explanation)
}

fn marks(replay: &DeviceReplay<'_>) -> Vec<Mark> {
    let events = replay.events();
    let ooms = (0..events.len()).filter(|&at| events[at].action == Action::Oom).map(|at| Mark {
        position: at as u64 + 1,
        kind: MarkKind::OutOfMemory,
        bytes: events[at].size,
        stack: events[at].stack,
    });
    let retries = replay.retries().map(|release| {
        let bytes = events[release.clone()].iter().fold(0, |sum: u64, event| sum.saturating_add(event.size));
        // The request after it, if it succeeded.
        let request = events.get(release.end..).into_iter().flatten().find(|event| event.action == Action::Alloc);
        let stack = request.and_then(|event| event.stack);
        Mark { position: release.start as u64, kind: MarkKind::Retry, bytes, stack }
    });
    let mut marks: Vec<Mark> = ooms.chain(retries).collect();
    marks.sort_by_key(|mark| mark.position);
    marks
}

/// A timeline while events are seen.
struct Building {
    events: u64,
    time_us: u64,
    levels: Levels,
    allocations: AllocationTable,
    ranges: Ranges,
    peak_live: Sample,
    peak_reserved: Sample,
}

impl Building {
    fn new(
        snapshot: &Snapshot,
        start: &HeapState,
        events: usize,
        categories: &mut Categories,
        options: &TimelineOptions<'_>,
    ) -> Self {
        let category_of = |stack| categories.by_stack(stack, &snapshot.stacks).0;
        let allocations = AllocationTable::new(start, category_of, options.allocations_max);
        let sample = Sample { categories: allocations.categories(), ..Sample::of_state(start) };
        let mut levels = Levels::new(events as u64 + 1, options.buckets_max);
        levels.push(sample);
        Self {
            events: events as u64,
            time_us: 0,
            levels,
            allocations,
            ranges: Ranges::new(start),
            peak_live: sample,
            peak_reserved: sample,
        }
    }

    fn see(&mut self, totals: &Totals, category: Category, time_us: u64) {
        let position = totals.event as u64 + 1;
        self.time_us = time_us;
        self.allocations.see(position, totals.change, category);
        let sample = Sample::of_totals(position, time_us, totals, self.allocations.categories());
        self.levels.push(sample);
        self.ranges.see(position, totals.change);
        if sample.live() > self.peak_live.live() {
            self.peak_live = sample;
        }
        if (sample.reserved, sample.live()) > (self.peak_reserved.reserved, self.peak_reserved.live()) {
            self.peak_reserved = sample;
        }
    }

    fn finish(self, explanation: Explanation) -> Timeline {
        let (allocations, allocations_left_out) = self.allocations.finish();
        Timeline {
            device: explanation.device,
            events: self.events,
            duration_us: self.time_us,
            levels: self.levels.finish(),
            allocations,
            allocations_left_out,
            ranges: self.ranges.finish(),
            marks: Vec::new(),
            regions: Vec::new(),
            regions_left_out: 0,
            contexts: Vec::new(),
            contexts_complete: true,
            peak_live: self.peak_live,
            peak_reserved: self.peak_reserved,
            explanation,
        }
    }
}
