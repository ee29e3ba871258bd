//! Why a recorded program ran out of memory: who held memory, where the rest was, what the reason was, and what would
//! have fitted.
//!
//! ```no_run
//! use warpool_trace::explain::{ExplainOptions, explain};
//! use warpool_trace::{ReadOptions, read_file};
//!
//! let recording = read_file("oom.pickle", &ReadOptions { stacks: true, ..ReadOptions::default() })?;
//! for device in explain(&recording.snapshot, &ExplainOptions::default())? {
//!     println!("{}: {}", device.device, device.moment().verdict.words());
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! The moment is that of an out-of-memory event, or else of the peak. `parts.rs` says where the device's memory was
//! then, `holders.rs` who held it, `periods.rs` whether it grew, `verdict.rs` why it ran out, and `fits.rs` replays
//! changes. The state at the moment comes from the recorded events alone (`replay/state.rs`).

mod fits;
mod frames;
mod holders;
mod parts;
mod periods;
mod verdict;

use std::collections::BTreeMap;

use warpool::memory::{Action, BlockState, SegmentInfo, Snapshot};

pub use fits::{Change, Fit};
pub(crate) use frames::short_path;
pub use frames::{CallSite, Frameworks};
pub use holders::{Holder, Holders};
pub use parts::Parts;
pub use verdict::Verdict;

use crate::Stop;
use crate::bytes_text::text;
use crate::replay::{
    DeviceReplay, DeviceReplays, HeapState, InForce, ReplayError, ReplayOptions, ReplayProgress, RequestInfo, WhatIf,
    bytes_context, check_segments,
};
use holders::{CallSites, grown, holders};
use periods::Growth;
use verdict::{Facts, growth_text, judge};

/// How to explain.
#[derive(Clone, Default)]
pub struct ExplainOptions<'a> {
    /// The memory of the device, which a recording does not contain; `None` is an H200's, or more if more was used.
    pub capacity: Option<u64>,
    /// Which code is not the program's own.
    pub frameworks: Frameworks,
    /// Leaves out what would have fitted, which takes replays.
    pub skips_fits: bool,
    /// In how many orders of addresses each change is replayed; `None` is 8.
    pub address_orders: Option<u32>,
    /// How many threads replay; `None` is one for each core.
    pub threads: Option<usize>,
    /// The most memory that it may take: see [`ReplayOptions::memory_limit`].
    pub memory_limit: Option<u64>,
    /// Called now and then while the recording is replayed.
    pub progress: Option<&'a dyn Fn(ReplayProgress)>,
    /// Ends it early: see [`ReplayOptions::stop`].
    pub stop: Stop,
}

/// What is explained about one device.
#[derive(Clone, Debug)]
pub struct Explanation {
    /// The device.
    pub device: u32,
    /// The device's memory.
    pub device_bytes_total: u64,
    /// Whether that is an assumption.
    pub device_assumed: bool,
    /// The moments: the out-of-memory events, at most the last sixteen, or else one.
    pub moments: Vec<Moment>,
    /// How many out-of-memory events there are.
    pub ooms: u64,
    /// Whether a replay reproduces the recording; `None` without a history.
    pub exact: Option<bool>,
    /// The conditions of the recorded program; `None` without a history.
    pub in_force: Option<InForce>,
    /// What would have fitted: changes that were replayed.
    pub fits: Vec<Fit>,
    /// What grew from iteration to iteration, if anything did, by call stack or size.
    pub growth: Option<GrowthReport>,
    /// Remarks for the reader, in sentences.
    pub remarks: Vec<String>,
}

impl Explanation {
    /// The moment that counts: the last.
    ///
    /// # Panics
    /// Never: there is at least one.
    #[must_use]
    pub fn moment(&self) -> &Moment {
        self.moments.last().expect("there is at least one moment")
    }
}

/// Growth from iteration to iteration.
#[derive(Clone, Debug)]
pub struct GrowthReport {
    /// Iterations that were found.
    pub iterations: u64,
    /// Over how many of them it grew.
    pub iterations_grown: u64,
    /// By how much.
    pub bytes: u64,
    /// What stayed allocated, the largest first.
    pub holders: Vec<Holder>,
}

/// What a moment is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MomentKind {
    /// A request ran out of memory.
    OutOfMemory,
    /// The most memory was reserved, and of these moments the one with the most allocated.
    Peak,
    /// The snapshot was taken; it has no history.
    Snapshot,
}

impl MomentKind {
    /// Its name: `oom`, `peak`, `snapshot`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::OutOfMemory => "oom",
            Self::Peak => "peak",
            Self::Snapshot => "snapshot",
        }
    }
}

/// What is explained about one moment.
#[derive(Clone, Debug)]
pub struct Moment {
    /// What it is.
    pub kind: MomentKind,
    /// The event, counted from 0; `None` without a history.
    pub event: Option<u64>,
    /// Microseconds since the first event.
    pub time_us: Option<i64>,
    /// The bytes of the request that failed, or of the last one before the peak.
    pub bytes_requested: Option<u64>,
    /// What was, or would have been, requested from the driver for it.
    pub bytes_segment: Option<u64>,
    /// What the device had free, if the recording says.
    pub device_free: Option<u64>,
    /// What was reserved.
    pub bytes_reserved: u64,
    /// Where the device's memory was.
    pub parts: Parts,
    /// The largest free block that the request could have used.
    pub largest_free: u64,
    /// Who held it.
    pub holders: Holders,
    /// Why it ran out.
    pub verdict: Verdict,
    /// The numbers behind the verdict, in sentences.
    pub evidence: Vec<String>,
}

/// Explains a recording, each device by itself.
///
/// # Errors
/// If it has neither events nor segments, or cannot be replayed.
pub fn explain(snapshot: &Snapshot, options: &ExplainOptions<'_>) -> Result<Vec<Explanation>, ReplayError> {
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
    let mut explanations = Vec::new();
    for device in replays.iter().flat_map(DeviceReplays::devices) {
        segments.remove(&i32::try_from(device.device()).unwrap_or(-1));
        explanations.push(explain_device(snapshot, device, options)?);
    }
    for (device, segments) in segments {
        check_segments(device.unsigned_abs(), &segments)?;
        explanations.push(explain_segments(snapshot, device.unsigned_abs(), &segments, options));
    }
    explanations.sort_by_key(|explanation| explanation.device);
    Ok(explanations)
}

/// A device without a history.
pub(crate) fn explain_segments(
    snapshot: &Snapshot,
    device: u32,
    segments: &[&SegmentInfo],
    options: &ExplainOptions<'_>,
) -> Explanation {
    let state = HeapState::of_snapshot(segments);
    let mut sites = CallSites::new(&snapshot.stacks, &options.frameworks);
    let total = options.capacity.unwrap_or_else(default_total).max(state.bytes_reserved);
    let parts = Parts::new(&state, None, total, None, bytes_context());
    let largest_free = largest_free(&state, None);
    let free = parts.free_large_enough;
    let evidence = vec![format!(
        "when the snapshot was taken, {} were reserved and {} of them free, the largest piece {}",
        text(state.bytes_reserved),
        text(free),
        text(largest_free)
    )];
    let moment = Moment {
        kind: MomentKind::Snapshot,
        event: None,
        time_us: None,
        bytes_requested: None,
        bytes_segment: None,
        device_free: None,
        bytes_reserved: state.bytes_reserved,
        parts,
        largest_free,
        holders: holders(&state, &mut sites, 0),
        verdict: Verdict::Unknown,
        evidence,
    };
    let mut explanation = explanation_of_snapshot(device, parts.total(), options.capacity.is_none(), moment);
    remark_on_capacity(options.capacity, &mut explanation);
    explanation
}

fn explanation_of_snapshot(device: u32, device_bytes_total: u64, device_assumed: bool, moment: Moment) -> Explanation {
    let remark = "the snapshot has no history of this device: what led to it, and what would have fitted, cannot be \
                  told; call torch.cuda.memory._record_memory_history() before the program runs";
    Explanation {
        device,
        device_bytes_total,
        device_assumed,
        moments: vec![moment],
        ooms: 0,
        exact: None,
        in_force: None,
        fits: Vec::new(),
        growth: None,
        remarks: vec![remark.to_owned()],
    }
}

fn default_total() -> u64 {
    warpool::driver::sim::SimDevice::h200().properties.bytes_total
}

pub(crate) fn explain_device(
    snapshot: &Snapshot,
    replay: &DeviceReplay<'_>,
    options: &ExplainOptions<'_>,
) -> Result<Explanation, ReplayError> {
    const MOMENTS_MAX: usize = 16;
    let events = replay.events();
    let periods = periods::find(events);
    // One pass for the peak and for what is allocated when each period begins.
    let mut peak = Peak::default();
    let mut bytes_at = Vec::with_capacity(periods.len());
    replay.states_before(&[], |totals| {
        peak.see(totals.event, totals.bytes_reserved, totals.bytes_allocated);
        if periods.get(bytes_at.len()) == Some(&totals.event) {
            bytes_at.push(totals.bytes_allocated);
        }
    })?;
    let growth = periods::growth(&bytes_at);
    let is_oom = |at: &usize| events[*at].action == Action::Oom;
    let all_ooms: Vec<usize> = (0..events.len()).filter(is_oom).collect();
    let ooms = &all_ooms[all_ooms.len().saturating_sub(MOMENTS_MAX)..];
    // States are those before an event: the peak is behind its event.
    let mut wanted: Vec<usize> = if ooms.is_empty() { vec![peak.event + 1] } else { ooms.to_vec() };
    let moments = wanted.clone();
    wanted.extend(growth.map(|growth| periods[growth.last]));
    wanted.sort_unstable();
    wanted.dedup();
    let states = replay.states_before(&wanted, |_| {})?;
    let state_at = |at: usize| &states[wanted.binary_search(&at).expect("it was asked for")];

    let mut sites = CallSites::new(&snapshot.stacks, &options.frameworks);
    let mut explained = Vec::new();
    for &at in &moments {
        let request = if ooms.is_empty() { last_request(replay, at) } else { replay.request_at(at) };
        let context = MomentContext { replay, options, growth: growth.as_ref(), periods: periods.len() };
        explained.push(explain_moment(&context, at, state_at(at), request, &mut sites));
    }
    let recorded = replay.report(&WhatIf::default(), &ReplayOptions::default())?;
    let total = explained.last().map_or(0, |moment| moment.parts.total());
    let growth = growth.map(|growth| GrowthReport {
        iterations: periods.len() as u64,
        iterations_grown: (growth.last - growth.first) as u64,
        bytes: growth.bytes,
        holders: grown(state_at(periods[growth.last]), &mut sites, periods[growth.first]),
    });
    let mut explanation = Explanation {
        device: replay.device(),
        device_bytes_total: total,
        device_assumed: options.capacity.is_none(),
        moments: explained,
        ooms: all_ooms.len() as u64,
        exact: recorded.fidelity.checked.then_some(recorded.fidelity.exact),
        in_force: Some(recorded.in_force.clone()),
        fits: Vec::new(),
        growth,
        remarks: recorded.inferred.remarks.clone(),
    };
    remark_on_device(&mut explanation);
    remark_on_capacity(options.capacity, &mut explanation);
    if !all_ooms.is_empty() && !options.skips_fits {
        explanation.fits = fits::find(replay, options, &recorded)?;
    }
    Ok(explanation)
}

/// The peak: the most reserved, and of these moments the one with the most allocated.
#[derive(Default)]
struct Peak {
    event: usize,
    reserved: u64,
    allocated: u64,
}

impl Peak {
    fn see(&mut self, event: usize, reserved: u64, allocated: u64) {
        if (reserved, allocated) > (self.reserved, self.allocated) {
            *self = Self { event, reserved, allocated };
        }
    }
}

/// The last request before an event.
fn last_request(replay: &DeviceReplay<'_>, before: usize) -> Option<RequestInfo> {
    let at = replay.events()[..before].iter().rposition(|event| event.action == Action::Alloc)?;
    replay.request_at(at)
}

struct MomentContext<'a, 'r> {
    replay: &'a DeviceReplay<'r>,
    options: &'a ExplainOptions<'a>,
    growth: Option<&'a Growth>,
    periods: usize,
}

fn explain_moment(
    context: &MomentContext<'_, '_>,
    at: usize,
    state: &HeapState,
    request: Option<RequestInfo>,
    sites: &mut CallSites<'_>,
) -> Moment {
    let MomentContext { replay, options, growth, periods } = *context;
    let events = replay.events();
    let oom = events.get(at).filter(|event| event.action == Action::Oom);
    // More than any device has is no size.
    let device_free = oom.map(|event| event.addr).filter(|&bytes| bytes < 1 << 50);
    let total = options.capacity.unwrap_or_else(|| replay.device_bytes_total());
    let parts = Parts::new(state, request.as_ref(), total, device_free, bytes_context());
    let largest_free = largest_free(state, request.as_ref());
    let (verdict, evidence) = match (&request, device_free) {
        (Some(request), _) if oom.is_some() => {
            let device_free = device_free.unwrap_or(0);
            let (limit, bytes_context) = (replay.limit(), bytes_context());
            judge(&Facts { parts: &parts, request, device_free, limit, bytes_context, growth, periods })
        }
        _ => (Verdict::Fitted, fitted_evidence(&parts, growth, periods)),
    };
    let event = if oom.is_some() { at } else { at.saturating_sub(1) };
    let start = events.first().map_or(0, |event| event.time_us);
    Moment {
        kind: if oom.is_some() { MomentKind::OutOfMemory } else { MomentKind::Peak },
        event: Some(event as u64),
        time_us: events.get(event).map(|event| event.time_us.saturating_sub(start)),
        bytes_requested: request.map(|request| request.bytes),
        bytes_segment: request.map(|request| request.bytes_segment),
        device_free,
        // A recording that contradicts itself may have segments without blocks.
        bytes_reserved: parts.reserved(),
        parts,
        largest_free,
        holders: holders(state, sites, at),
        verdict,
        evidence,
    }
}

fn fitted_evidence(parts: &Parts, growth: Option<&Growth>, periods: usize) -> Vec<String> {
    let reserved = parts.reserved();
    let live = parts.live();
    let mut evidence = vec![format!(
        "at the peak {} were reserved and {} of them allocated; {} of the device were left",
        text(reserved),
        text(live),
        text(parts.not_reserved)
    )];
    evidence.extend(growth.map(|growth| growth_text(growth, periods)));
    evidence
}

/// The largest free block that a request could use.
fn largest_free(state: &HeapState, request: Option<&RequestInfo>) -> u64 {
    let free = state.blocks.iter().filter(|block| block.state == BlockState::Inactive);
    let usable = free.filter(|block| {
        request.is_none_or(|request| {
            (request.pool, request.stream, request.kind) == (block.pool, block.stream, block.kind)
        })
    });
    usable.map(|block| block.bytes).max().unwrap_or(0)
}

/// A device that is said to be smaller than what was used of it.
fn remark_on_capacity(capacity: Option<u64>, explanation: &mut Explanation) {
    if let Some(capacity) = capacity.filter(|&capacity| capacity < explanation.device_bytes_total) {
        explanation.remarks.insert(
            0,
            format!(
                "more was used than a device of {} has, so it is explained as one of {}; `warpool replay --capacity` \
                 tells whether the program fits on a smaller one",
                text(capacity),
                text(explanation.device_bytes_total)
            ),
        );
    }
}

/// A full device whose size is only assumed may be a smaller one.
fn remark_on_device(explanation: &mut Explanation) {
    const GIB: u64 = 1 << 30;
    /// What common devices report, in MiB.
    const DEVICES: [(u64, &str); 12] = [
        (8_192, "8 GB"),
        (10_240, "10 GB"),
        (12_282, "12 GB"),
        (16_384, "16 GB"),
        (24_217, "24 GB"),
        (32_607, "32 GB"),
        (40_442, "40 GB"),
        (49_140, "48 GB"),
        (81_559, "80 GB"),
        (97_887, "96 GB"),
        (143_771, "141 GB"),
        (183_359, "180 GB"),
    ];
    let moment = explanation.moment();
    let Some(free) = moment.device_free else { return };
    if !explanation.device_assumed || free >= moment.bytes_segment.unwrap_or(0) || moment.parts.outside < 2 * GIB {
        return;
    }
    let used = moment.bytes_reserved.saturating_add(free);
    let smaller = DEVICES.into_iter().map(|(mib, name)| (mib << 20, name)).find(|&(bytes, _)| bytes >= used);
    let assumed = text(explanation.device_bytes_total);
    let remark = match smaller.filter(|&(bytes, _)| bytes < explanation.device_bytes_total) {
        Some((bytes, name)) => format!(
            "the recording does not say how large the device is; {assumed} are assumed, so {} would be used by others. \
             If it was a device of {name}, explain with --capacity {:.1}GiB",
            text(moment.parts.outside),
            bytes as f64 / GIB as f64
        ),
        None => format!("the recording does not say how large the device is; {assumed} are assumed: see --capacity"),
    };
    explanation.remarks.insert(0, remark);
}
