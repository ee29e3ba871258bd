//! The summary of one device of one recording: what a report over many ranks needs of it, in some kilobytes.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use warpool::memory::report::{Action, SegmentInfo, Snapshot, TraceEntry};

use super::identity::Identity;
use crate::category::{Categories, Category, CategoryBytes};
use crate::explain::{ExplainOptions, Explanation, Holder, MomentKind, Verdict, explain_device, explain_segments};
use crate::replay::{
    DeviceReplay, DeviceReplays, LimitOrigin, ReplayError, ReplayOptions, bytes_context, check_segments, has_times,
};

/// How many columns memory over time has.
pub const COLUMNS: usize = 96;

/// How many groups of holders are kept, the largest.
pub const HOLDERS_MAX: usize = 32;

/// One device of one recording, or why that recording cannot be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Summary {
    /// The file as it was given.
    pub file: String,
    /// Its place in the job.
    pub identity: Identity,
    /// The figures, or why there are none, in a sentence.
    pub figures: Result<Figures, String>,
}

/// What is told about a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Figures {
    /// Its number.
    pub device: u32,
    /// Whether the recording has other devices.
    pub has_others: bool,
    /// Why the last failed request ran out of memory.
    pub verdict: Verdict,
    /// The numbers for it, in sentences.
    pub evidence: Vec<String>,
    /// How many events and out-of-memory events there are.
    pub events: u64,
    /// How many requests ran out of memory.
    pub ooms: u64,
    /// When the last one did, in microseconds of the recording's clock (in PyTorch the time of day).
    pub oom_us: Option<i64>,
    /// The first event, by the same clock.
    pub start_us: Option<i64>,
    /// From the first event to the last.
    pub duration_us: Option<u64>,
    /// Whether a replay reproduces the recording; `None` without a history.
    pub exact: Option<bool>,
    /// The device's memory, if it is known.
    pub device_bytes_total: Option<u64>,
    /// The card, or those that it may be.
    pub device_name: Option<String>,
    /// What the allocator may reserve: of the device, within a limit. `None` if it is not known.
    pub bytes_available: Option<u64>,
    /// The kind of the moment that the following is about.
    pub moment: MomentKind,
    /// Its event.
    pub event: Option<u64>,
    /// Requested bytes of allocated blocks then.
    pub bytes_requested: u64,
    /// Allocated bytes, with rounding, then.
    pub bytes_allocated: u64,
    /// Reserved bytes then.
    pub bytes_reserved: u64,
    /// The request that ran out of memory then.
    pub request_bytes: Option<u64>,
    /// The requested bytes by category then.
    pub categories: CategoryBytes,
    /// Who held memory then: the largest [`HOLDERS_MAX`] groups.
    pub holders: Vec<Holder>,
    /// The most bytes that were ever allocated.
    pub peak_allocated: u64,
    /// The most bytes that were ever reserved.
    pub peak_reserved: u64,
    /// The most that was ever reserved and could not be released: allocated, rounding, waiting, and free between
    /// allocations. The program needs this much with this allocator.
    pub peak_needed: u64,
    /// Memory over time, in [`COLUMNS`] equal parts of the time (of the events, if there are no times); empty without a
    /// history.
    pub columns: Vec<Column>,
}

/// A part of the time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Column {
    /// The most allocated bytes in it.
    pub allocated: u64,
    /// The most reserved bytes in it.
    pub reserved: u64,
}

impl Summary {
    /// A recording that cannot be read.
    #[must_use]
    pub fn unreadable(file: &str, error: String) -> Self {
        Self { file: file.to_owned(), identity: Identity::of_path(file), figures: Err(error) }
    }
}

/// Summarizes a recording: a summary for each device. Nothing is replayed under other conditions, whatever the options
/// say.
///
/// # Errors
/// As [`explain`](crate::explain::explain).
pub fn summarize(snapshot: &Snapshot, file: &str, options: &ExplainOptions<'_>) -> Result<Vec<Summary>, ReplayError> {
    let options = ExplainOptions { skips_fits: true, ..options.clone() };
    let found = explain_and_summarize(snapshot, file, &options)?;
    Ok(found.into_iter().map(|(_, summary)| summary).collect())
}

/// Explains a recording as [`explain`](crate::explain::explain) does, and summarizes each explanation.
///
/// # Errors
/// Likewise.
pub fn explain_and_summarize(
    snapshot: &Snapshot,
    file: &str,
    options: &ExplainOptions<'_>,
) -> Result<Vec<(Explanation, Summary)>, ReplayError> {
    let mut segments: BTreeMap<i32, Vec<&SegmentInfo>> = BTreeMap::new();
    for segment in snapshot.segments.iter().filter(|segment| segment.device >= 0) {
        segments.entry(segment.device).or_default().push(segment);
    }
    let replay_options = ReplayOptions {
        memory_limit: options.memory_limit,
        progress: options.progress,
        stop: options.stop.clone(),
        ..ReplayOptions::default()
    };
    let replays = match DeviceReplays::new(snapshot, &replay_options) {
        Ok(replays) => Some(replays),
        Err(ReplayError::NoHistory) if !segments.is_empty() => None,
        Err(error) => return Err(error),
    };
    let mut found: Vec<(Explanation, Figures)> = Vec::new();
    for replay in replays.iter().flat_map(DeviceReplays::devices) {
        segments.remove(&i32::try_from(replay.device()).unwrap_or(-1));
        let mut categories = Categories::new(replay.events(), &snapshot.stacks, &snapshot.annotations);
        let explanation = explain_device(snapshot, replay, &mut categories, options)?;
        let figures = with_history(replay, of_explanation(&explanation, options.capacity))?;
        found.push((explanation, figures));
    }
    for (device, segments) in segments {
        let device = device.unsigned_abs();
        check_segments(device, &segments)?;
        let explanation = explain_segments(snapshot, device, &segments, options);
        let figures = of_explanation(&explanation, options.capacity);
        found.push((explanation, figures));
    }
    found.sort_by_key(|(explanation, _)| explanation.device);
    let has_others = found.len() > 1;
    let identity = Identity::of_metadata(snapshot).or(Identity::of_path(file));
    let summary = |figures: Figures| Summary {
        file: file.to_owned(),
        identity: identity.clone(),
        figures: Ok(Figures { has_others, ..figures }),
    };
    Ok(found.into_iter().map(|(explanation, figures)| (explanation, summary(figures))).collect())
}

/// What the explanation has. A device that was asked about is the device.
fn of_explanation(explanation: &Explanation, asked: Option<u64>) -> Figures {
    let moment = explanation.moment();
    let in_force = explanation.in_force.as_ref();
    let limit = in_force.filter(|it| it.limit_origin == LimitOrigin::Recorded).and_then(|it| it.memory_limit);
    let bytes_available = match asked {
        Some(total) => Some(total.saturating_sub(bytes_context()).min(limit.unwrap_or(u64::MAX))),
        None => in_force.and_then(|in_force| in_force.bytes_available),
    };
    let mut categories = CategoryBytes::default();
    for share in &moment.categories {
        categories[share.category.index()] = share.bytes;
    }
    let mut holders = moment.holders.groups.clone();
    // The largest are first already; of equals those that any machine would keep.
    holders.sort_by(|a, b| {
        (Reverse(a.bytes), &a.name, &a.line, &a.path).cmp(&(Reverse(b.bytes), &b.name, &b.line, &b.path))
    });
    holders.truncate(HOLDERS_MAX);
    let peaks = explanation.peaks;
    Figures {
        device: explanation.device,
        has_others: false,
        verdict: explanation.verdict,
        evidence: explanation.evidence.clone(),
        events: explanation.events,
        ooms: explanation.ooms,
        oom_us: None,
        start_us: None,
        duration_us: None,
        exact: explanation.exact,
        device_bytes_total: asked.or(explanation.device_bytes_total),
        device_name: explanation.device_name.clone(),
        bytes_available,
        moment: moment.kind,
        event: moment.event,
        bytes_requested: moment.bytes_requested,
        bytes_allocated: moment.bytes_allocated,
        bytes_reserved: moment.bytes_reserved,
        request_bytes: moment.request.map(|request| request.bytes),
        categories,
        holders,
        peak_allocated: peaks.map_or(moment.bytes_allocated, |peaks| peaks.allocated.bytes),
        peak_reserved: peaks.map_or(moment.bytes_reserved, |peaks| peaks.reserved.bytes),
        peak_needed: moment.bytes_allocated,
        columns: Vec::new(),
    }
}

/// Adds what one more pass over the history shows.
fn with_history(replay: &DeviceReplay<'_>, mut figures: Figures) -> Result<Figures, ReplayError> {
    let events = replay.events();
    let start = replay.totals_at_start();
    let clock = Clock::new(events);
    let mut columns: Vec<Column> = Vec::with_capacity(COLUMNS);
    let mut now = Column { allocated: start.bytes_allocated, reserved: start.bytes_reserved };
    let mut most = now;
    let mut needed = start.bytes_reserved.saturating_sub(start.bytes_releasable);
    replay.walk(|totals| {
        let at = clock.column(events, totals.event);
        while columns.len() < at {
            columns.push(most);
            most = now;
        }
        now = Column { allocated: totals.bytes_allocated, reserved: totals.bytes_reserved };
        most.allocated = most.allocated.max(now.allocated);
        most.reserved = most.reserved.max(now.reserved);
        needed = needed.max(totals.bytes_reserved.saturating_sub(totals.bytes_releasable));
        false
    })?;
    while columns.len() < COLUMNS {
        columns.push(most);
        most = now;
    }
    figures.columns = columns;
    figures.peak_needed = needed;
    let last_oom = events.iter().rev().find(|event| event.action == Action::Oom);
    figures.oom_us = last_oom.filter(|_| clock.has_times).map(|event| event.time_us);
    figures.start_us = clock.has_times.then_some(clock.start);
    figures.duration_us = clock.has_times.then_some(clock.duration);
    Ok(figures)
}

/// Which column an event is in.
struct Clock {
    has_times: bool,
    start: i64,
    duration: u64,
}

impl Clock {
    fn new(events: &[TraceEntry]) -> Self {
        let start = events.first().map_or(0, |event| event.time_us);
        // Events of several threads may be out of order.
        let last = events.iter().map(|event| event.time_us).max().unwrap_or(start);
        Self { has_times: has_times(events), start, duration: u64::try_from(last.saturating_sub(start)).unwrap_or(0) }
    }

    fn column(&self, events: &[TraceEntry], event: usize) -> usize {
        let (done, all) = match self.has_times {
            true => {
                let since = events[event].time_us.saturating_sub(self.start);
                (u64::try_from(since).unwrap_or(0).min(self.duration), self.duration)
            }
            false => (event as u64, events.len() as u64),
        };
        let column = u128::from(done) * COLUMNS as u128 / (u128::from(all) + 1);
        usize::try_from(column).unwrap_or(0).min(COLUMNS - 1)
    }
}

impl Figures {
    /// Whether a request ran out of memory.
    #[must_use]
    pub const fn ran_out(&self) -> bool {
        self.ooms > 0
    }

    /// The bytes of a category.
    #[must_use]
    pub fn bytes_of(&self, category: Category) -> u64 {
        self.categories[category.index()]
    }
}
