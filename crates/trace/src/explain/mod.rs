//! Explains why a recorded program ran out of memory, or what it needed: who held memory, of which categories, where
//! the rest was, the reason, and which changes would have made it fit.
//!
//! ```no_run
//! use warpool_trace::explain::{ExplainOptions, explain};
//! use warpool_trace::{ReadOptions, read_file};
//!
//! let recording = read_file("oom.pickle", &ReadOptions { stacks: true, ..ReadOptions::default() })?;
//! for device in explain(&recording.snapshot, &ExplainOptions::default())? {
//!     println!("{}: {}", device.device, device.verdict.words());
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! `moment.rs` chooses the moment. For it, `parts.rs` finds where the device's memory was, `holders.rs` who held it,
//! `categories.rs` its categories, `periods.rs` whether it grew, and `verdict.rs` why it ran out. `fits.rs` replays
//! changes, and `advice.rs` makes the advice. The state at a moment comes from the recorded events alone
//! (`replay/state.rs`).

mod advice;
mod categories;
mod fits;
mod holders;
mod moment;
mod parts;
mod periods;
mod verdict;

use std::collections::BTreeMap;

use warpool::memory::report::{Action, DeviceAccount, SegmentInfo, Snapshot};

pub use crate::stacks::{CallSite, Frameworks};
pub use advice::{Advice, AdviceKind, Proof};
pub use categories::{AllocatedBlock, CategoryShare};
pub use fits::{Change, Fit};
pub use holders::{Holder, Holders};
pub use moment::{FailedRequest, Moment, MomentChoice, MomentKind, Peak, Peaks};
pub use parts::Parts;
pub use verdict::Verdict;

use crate::Stop;
use crate::bytes_text::text;
use crate::cards::{DeviceMemory, DeviceOrigin};
use crate::category::Categories;
use crate::replay::{
    AddressOrders, DeviceReplay, DeviceReplays, HeapState, InForce, Outcome, ReplayError, ReplayOptions,
    ReplayProgress, ReplayReport, RequestInfo, WhatIf, bytes_context, check_segments,
};
use categories::BlockCategories;
use holders::{CallSites, grown, holders};
use moment::{Survey, largest_free};
use periods::Growth;
use verdict::{Facts, Judgement, judge};

/// How to explain.
#[derive(Clone, Default)]
pub struct ExplainOptions<'a> {
    /// The memory of a device. If the program ran out on a device that may be this one, it is that device; else the
    /// question is whether the program would fit on it. `None` is the recorded device, as far as it is known.
    pub capacity: Option<u64>,
    /// Which moment.
    pub at: MomentChoice,
    /// Which code is not the program's own.
    pub frameworks: Frameworks,
    /// The recording is not of PyTorch, so PyTorch's settings are not suggested.
    pub not_of_pytorch: bool,
    /// Lists the allocated blocks of the moment one by one: see [`Moment::blocks`].
    pub lists_blocks: bool,
    /// Skips the changes that would have made it fit, since they take replays.
    pub skips_fits: bool,
    /// In how many address orders each change is replayed; `None` is 8.
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

/// The explanation of one device.
#[derive(Clone, Debug)]
pub struct Explanation {
    /// The device.
    pub device: u32,
    /// The device's memory. `None` if it is not known: then the parts add up to the known part.
    pub device_bytes_total: Option<u64>,
    /// Where that comes from.
    pub device_origin: DeviceOrigin,
    /// Whose its memory was when the recording was written, if the recording says so.
    pub account: Option<DeviceAccount>,
    /// The card, or those that it may be.
    pub device_name: Option<String>,
    /// Why the last failed request ran out of memory.
    pub verdict: Verdict,
    /// The numbers for the verdict, in sentences.
    pub evidence: Vec<String>,
    /// The requested moments: the out-of-memory events, at most the last sixteen, or else one.
    pub moments: Vec<Moment>,
    /// The peaks; `None` without a history.
    pub peaks: Option<Peaks>,
    /// How many events there are.
    pub events: u64,
    /// How many out-of-memory events there are.
    pub ooms: u64,
    /// Whether a replay reproduces the recording; `None` without a history.
    pub exact: Option<bool>,
    /// The conditions of the recorded program; `None` without a history.
    pub in_force: Option<InForce>,
    /// Whether the program fits on the device that was asked about, if that is another than the recorded one.
    pub on_device: Option<OnDevice>,
    /// Changes that were replayed: those that fit first, the smallest change first.
    pub fits: Vec<Fit>,
    /// What to do, the simplest first.
    pub advice: Vec<Advice>,
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

/// The recorded program on another device, by replays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OnDevice {
    /// The device's memory.
    pub bytes_total: u64,
    /// Over the address orders.
    pub orders: AddressOrders,
    /// The first event at which a request runs out of memory, in the worst order.
    pub oom_event: Option<u64>,
    /// The bytes of that request.
    pub oom_bytes: Option<u64>,
}

/// Growth from iteration to iteration.
#[derive(Clone, Debug)]
pub struct GrowthReport {
    /// Iterations that were found.
    pub iterations: u64,
    /// Over how many of them it grew.
    pub iterations_grown: u64,
    /// By how much, in allocated bytes.
    pub bytes: u64,
    /// What stayed allocated, the largest first.
    pub holders: Vec<Holder>,
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
        let mut categories = Categories::new(device.events(), &snapshot.stacks, &snapshot.annotations);
        explanations.push(explain_device(snapshot, device, &mut categories, options)?);
    }
    for (device, segments) in segments {
        check_segments(device.unsigned_abs(), &segments)?;
        explanations.push(explain_segments(snapshot, device.unsigned_abs(), &segments, options));
    }
    explanations.sort_by_key(|explanation| explanation.device);
    Ok(explanations)
}

/// Whose memory of a device it was, if the recording says so.
fn account_of(snapshot: &Snapshot, device: u32) -> Option<&DeviceAccount> {
    snapshot.accounts.iter().find(|account| account.device == device)
}

/// A device without a history.
pub(crate) fn explain_segments(
    snapshot: &Snapshot,
    device: u32,
    segments: &[&SegmentInfo],
    options: &ExplainOptions<'_>,
) -> Explanation {
    let state = HeapState::of_snapshot(segments);
    let mut sites = CallSites::new(&snapshot.stacks, &options.frameworks, &[]);
    let mut categories = Categories::default();
    let mut categories = BlockCategories::new(&mut categories, &[], &snapshot.stacks);
    let outside = account_of(snapshot, device).map_or_else(bytes_context, DeviceAccount::outside);
    let parts = Parts::new(&state, None, options.capacity.unwrap_or(0), None, outside);
    let largest_free = largest_free(&state, None);
    let evidence = vec![format!(
        "when the snapshot was taken, {} were reserved, {} of them allocated, and the largest free block had {}",
        text(state.bytes_reserved),
        text(parts.live()),
        text(largest_free)
    )];
    let moment = Moment {
        kind: MomentKind::Event,
        event: None,
        time_us: None,
        bytes_requested: parts.allocated,
        bytes_allocated: parts.live(),
        bytes_reserved: state.bytes_reserved,
        request: None,
        parts,
        largest_free,
        holders: holders(&state, &mut sites, &mut categories, 0),
        categories: categories.shares(&state),
        blocks: if options.lists_blocks { categories.blocks(&state) } else { Vec::new() },
    };
    let total = options.capacity.map(|_| parts.total());
    let DeviceMemory { origin, name, .. } = total.map_or_else(DeviceMemory::default, DeviceMemory::given);
    let remark = "the snapshot has no history of this device: what led to it, and what would have fitted, cannot be \
                  told; call torch.cuda.memory._record_memory_history() before the program runs";
    Explanation {
        device,
        device_bytes_total: total,
        device_origin: origin,
        account: account_of(snapshot, device).cloned(),
        device_name: name,
        verdict: Verdict::Unknown,
        evidence,
        moments: vec![moment],
        peaks: None,
        events: 0,
        ooms: 0,
        exact: None,
        in_force: None,
        on_device: None,
        fits: Vec::new(),
        advice: Vec::new(),
        growth: None,
        remarks: vec![remark.to_owned()],
    }
}

pub(crate) fn explain_device(
    snapshot: &Snapshot,
    replay: &DeviceReplay<'_>,
    categories: &mut Categories,
    options: &ExplainOptions<'_>,
) -> Result<Explanation, ReplayError> {
    let events = replay.events();
    let (survey, checkpoints) = Survey::new(replay)?;
    let growth = periods::growth(&survey.allocated_at_periods);
    let moments = survey.moments(options.at, events);
    let last_oom = survey.ooms.last().copied();
    // A state is the one before an event: that of an out-of-memory event, else the one after the moment's event.
    let before = |&(kind, event): &(MomentKind, Option<usize>)| match (kind, event) {
        (MomentKind::OutOfMemory, Some(event)) => event,
        (_, event) => event.map_or(0, |event| event + 1),
    };
    let mut wanted: Vec<usize> = moments.iter().map(before).collect();
    wanted.extend(last_oom);
    wanted.extend(growth.map(|growth| survey.periods[growth.last]));
    wanted.sort_unstable();
    wanted.dedup();
    let states = replay.states_before(&wanted, checkpoints)?;
    let state_at = |at: usize| &states[wanted.binary_search(&at).expect("it was asked for")];
    let growth = growth.filter(|growth| {
        is_kept(growth, &survey.periods, state_at(survey.periods[growth.last]))
            && are_iterations(growth, &survey.periods, categories)
    });

    let recorded = replay.report(&WhatIf::default(), &ReplayOptions::default())?;
    let device = Device::new(replay, options, last_oom.is_some());
    let mut naming = Naming {
        sites: CallSites::new(&snapshot.stacks, &options.frameworks, events),
        categories: BlockCategories::new(categories, events, &snapshot.stacks),
    };
    let explained: Vec<Moment> = moments
        .iter()
        .map(|moment| {
            let state = state_at(before(moment));
            explain_moment(replay, options, &survey, &device, *moment, state, &mut naming)
        })
        .collect();
    let judgement = match last_oom {
        Some(oom) => judge_oom(replay, &device, oom, state_at(oom), growth.as_ref(), survey.periods.len()),
        None => Judgement { verdict: Verdict::Fitted, ..Judgement::default() },
    };
    let growth = growth.map(|growth| GrowthReport {
        iterations: survey.periods.len() as u64,
        iterations_grown: (growth.last - growth.first) as u64,
        bytes: growth.bytes,
        holders: grown(
            state_at(survey.periods[growth.last]),
            &mut naming.sites,
            &mut naming.categories,
            survey.periods[growth.first],
        ),
    });
    let mut explanation = Explanation {
        device: replay.device(),
        device_bytes_total: device.memory.bytes_total,
        device_origin: device.memory.origin,
        account: account_of(snapshot, replay.device()).cloned(),
        device_name: device.memory.name.clone(),
        verdict: judgement.verdict,
        evidence: judgement.evidence.clone(),
        moments: explained,
        peaks: Some(survey.peaks),
        events: events.len() as u64,
        ooms: survey.ooms.len() as u64,
        exact: recorded.fidelity.checked.then_some(recorded.fidelity.exact),
        in_force: Some(recorded.in_force.clone()),
        on_device: None,
        fits: Vec::new(),
        advice: Vec::new(),
        growth,
        remarks: recorded.inferred.remarks.clone(),
    };
    remark_on_history(replay, &mut explanation);
    remark_on_device(&mut explanation);
    if options.at == MomentChoice::OutOfMemory && explanation.ooms == 0 {
        let remark = "nothing ran out of memory, so the moment is that of the most allocated memory";
        explanation.remarks.insert(0, remark.to_owned());
    }
    if !options.skips_fits {
        if let Some(bytes) = device.asked {
            explanation.on_device = Some(on_device(replay, bytes, options)?);
        }
        if fits::are_worth_trying(&explanation) {
            explanation.fits = fits::find(replay, options, device.asked, &recorded)?;
        }
    }
    explanation.advice = advice::advise(&explanation, &judgement, options);
    Ok(explanation)
}

/// Whether the growth is memory kept from earlier periods: at least half of it is older than the last period. If each
/// period merely needs more than the one before, as with larger and larger batches, all of it is younger.
fn is_kept(growth: &Growth, periods: &[usize], state: &HeapState) -> bool {
    let earlier = periods[growth.first]..periods[growth.last - 1];
    let kept = state.blocks.iter().filter(|block| block.event.is_some_and(|event| earlier.contains(&(event as usize))));
    kept.map(|block| block.requested).fold(0, u64::saturating_add) >= growth.bytes / 2
}

/// Whether the periods are iterations of the program: its modules are called in each of them. The layers of one model
/// are a repetition too, and a forward pass keeps what each of them computes.
fn are_iterations(growth: &Growth, periods: &[usize], categories: &Categories) -> bool {
    let calls = categories.module_calls_between(periods[growth.first], periods[growth.last]);
    calls.is_none_or(|calls| calls + 1 >= growth.last - growth.first)
}

/// The device of an explanation.
struct Device {
    /// The recorded device, as far as it is known.
    memory: DeviceMemory,
    /// Another device, if the question is whether the program fits on it.
    asked: Option<u64>,
}

impl Device {
    fn new(replay: &DeviceReplay<'_>, options: &ExplainOptions<'_>, ran_out: bool) -> Self {
        let card = replay.card();
        let Some(given) = options.capacity else { return Self { memory: card.clone(), asked: None } };
        let is_same = card.bytes_total.is_some_and(|total| total.abs_diff(given) <= total / 100);
        // A program that ran out of memory did so on a device of at least what it used.
        let may_be_recorded = ran_out && card.bytes_total.is_none() && given >= card.bytes_at_least;
        match is_same || may_be_recorded {
            true => Self { memory: DeviceMemory::given(given), asked: None },
            false => Self { memory: card.clone(), asked: Some(given) },
        }
    }
}

/// The tables that name and categorize blocks.
struct Naming<'a> {
    sites: CallSites<'a>,
    categories: BlockCategories<'a>,
}

fn explain_moment(
    replay: &DeviceReplay<'_>,
    options: &ExplainOptions<'_>,
    survey: &Survey,
    device: &Device,
    (kind, event): (MomentKind, Option<usize>),
    state: &HeapState,
    naming: &mut Naming<'_>,
) -> Moment {
    let events = replay.events();
    let at = event.map_or(0, |event| event + 1);
    let request = event.filter(|_| kind == MomentKind::OutOfMemory).and_then(|event| replay.request_at(event));
    let device_free = event.filter(|_| request.is_some()).and_then(|event| device_free(events[event].addr));
    let parts = device_parts(state, request.as_ref(), device, device_free);
    Moment {
        kind,
        event: event.map(|event| event as u64),
        time_us: survey.time_us(events, event),
        bytes_requested: parts.allocated,
        bytes_allocated: parts.live(),
        // A recording that contradicts itself may have segments without blocks.
        bytes_reserved: parts.reserved(),
        request: request.map(|RequestInfo { bytes, bytes_segment, stream, .. }| FailedRequest {
            bytes,
            bytes_segment,
            device_free,
            stream,
        }),
        parts,
        largest_free: largest_free(state, request.as_ref()),
        holders: holders(state, &mut naming.sites, &mut naming.categories, at),
        categories: naming.categories.shares(state),
        blocks: if options.lists_blocks { naming.categories.blocks(state) } else { Vec::new() },
    }
}

/// The free memory of the device at an out-of-memory event. A number larger than any device is not a size.
fn device_free(bytes: u64) -> Option<u64> {
    Some(bytes).filter(|&bytes| bytes < 1 << 50)
}

fn device_parts(state: &HeapState, request: Option<&RequestInfo>, device: &Device, device_free: Option<u64>) -> Parts {
    // For an unknown device the parts are those that are known.
    Parts::new(state, request, device.memory.bytes_total.unwrap_or(0), device_free, bytes_context())
}

fn judge_oom(
    replay: &DeviceReplay<'_>,
    device: &Device,
    oom: usize,
    state: &HeapState,
    growth: Option<&Growth>,
    periods: usize,
) -> Judgement {
    let Some(request) = replay.request_at(oom) else { return Judgement::default() };
    let device_free = device_free(replay.events()[oom].addr);
    let parts = device_parts(state, Some(&request), device, device_free);
    judge(&Facts {
        parts: &parts,
        is_known: device.memory.bytes_total.is_some(),
        request: &request,
        device_free: device_free.unwrap_or(0),
        limit: replay.limit(),
        bytes_context: bytes_context(),
        growth,
        periods,
    })
}

/// The recorded settings on another device.
fn on_device(
    replay: &DeviceReplay<'_>,
    bytes_total: u64,
    options: &ExplainOptions<'_>,
) -> Result<OnDevice, ReplayError> {
    let replay_options = ReplayOptions {
        address_orders: Some(fits::orders(options)),
        threads: options.threads,
        without_control: true,
        ..ReplayOptions::default()
    };
    let what_if = WhatIf { capacity: Some(bytes_total), ..WhatIf::default() };
    let report: ReplayReport = replay.report(&what_if, &replay_options)?;
    let (oom_event, oom_bytes) = match &report.outcome {
        Outcome::Completed => (None, None),
        Outcome::OutOfMemory { event, report } => (Some(*event), Some(report.bytes_requested)),
    };
    Ok(OnDevice { bytes_total, orders: report.orders, oom_event, oom_bytes })
}

/// Adds remarks about a history that shows little.
fn remark_on_history(replay: &DeviceReplay<'_>, explanation: &mut Explanation) {
    const EVENTS_FEW: usize = 16;
    let count = replay.events().iter().filter(|event| !matches!(event.action, Action::Snapshot)).count();
    if count < EVENTS_FEW && explanation.ooms == 0 {
        let events = if count == 1 { "one event".to_owned() } else { format!("{count} events") };
        explanation.remarks.insert(
            0,
            format!(
                "the history has {events}: what happened before cannot be told, not even whether memory ran out; call \
                 torch.cuda.memory._record_memory_history() before the program runs"
            ),
        );
        explanation.verdict = Verdict::Unknown;
    }
}

/// Adds a remark if the device was full and its size is not known: then the use by others is not known either.
fn remark_on_device(explanation: &mut Explanation) {
    let moment = explanation.moment();
    let Some(FailedRequest { bytes_segment, device_free: Some(free), .. }) = moment.request else { return };
    if explanation.device_bytes_total.is_some() || free >= bytes_segment {
        return;
    }
    let had = text(moment.bytes_reserved.saturating_add(free));
    let remark = format!(
        "the device had {had} for this program; how much it has in all does not follow from the recording: say it with \
         --gpu or --capacity"
    );
    explanation.remarks.insert(0, remark);
}
