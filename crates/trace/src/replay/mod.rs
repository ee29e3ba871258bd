//! Replays recordings on the simulated GPU, with the real allocators.
//!
//! What the program did is taken from the recording and done again: requests, frees, streams, the moments at which
//! other streams were done. What its allocator did is not done but compared: with the recorded settings, and with
//! memory coming where it came then, every address and every segment must come out as recorded. That is what makes an
//! answer to a what-if worth something.
//!
//! ```no_run
//! use warpool::memory::Settings;
//! use warpool_trace::replay::{ReplayOptions, replay};
//!
//! let recording = warpool_trace::read_file("train.pickle", &Default::default())?;
//! let settings = Some(Settings::parse("expandable_segments:True")?);
//! let report = replay(&recording.snapshot, &ReplayOptions { settings, ..ReplayOptions::default() })?;
//! println!("{} bytes instead of {}", report.peak_reserved_bytes, report.fidelity.recorded_peak_reserved_bytes);
//! println!("proven on this recording: {}", report.fidelity.exact);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! How: `start.rs` finds where the recording began, `survey.rs` walks over it with a `ledger`, `endings.rs`, `pools.rs`
//! and `caps.rs` conclude what it does not say, `plan.rs` makes calls of it, `drive.rs` makes the calls on a
//! `machine.rs`, and `check.rs` compares. Where nothing else explains a difference, `switches.rs` looks for settings
//! that changed on the way.

mod caps;
mod check;
mod drive;
mod endings;
mod lanes;
mod ledger;
mod machine;
mod model;
mod plan;
mod pools;
mod report;
mod setup;
mod sizes;
mod start;
mod survey;
mod switches;

use std::collections::BTreeSet;
use std::time::Instant;

use warpool::driver::sim::SimDevice;
use warpool::memory::{Action, FreeBlockOrder, SegmentInfo, Settings, SettingsError, Snapshot};

pub use machine::AllocatorChoice;
pub use report::{Difference, Fidelity, Inferred, InferredCap, Outcome, ReplayProgress, ReplayReport};

use drive::{Expected, Ran, Run};
use model::{Model, Tape};
use pools::PoolOrigin;

/// How to replay. The default is as recorded.
#[derive(Clone, Default)]
pub struct ReplayOptions<'a> {
    /// Other settings than the recorded ones.
    pub settings: Option<Settings>,
    /// Which allocator.
    pub allocator: AllocatorChoice,
    /// The memory of the device, in bytes; an H200's if `None`, or more where the recording held more.
    pub capacity: Option<u64>,
    /// Called now and then with how far a run is. There are several runs where one does not tell all.
    pub progress: Option<&'a dyn Fn(ReplayProgress)>,
}

impl ReplayOptions<'_> {
    fn is_what_if(&self) -> bool {
        self.settings.is_some() || self.allocator != AllocatorChoice::default() || self.capacity.is_some()
    }
}

/// Why nothing could be replayed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReplayError {
    /// There are no events.
    #[error(
        "the recording has no events of a device's memory; for PyTorch, call torch.cuda.memory._record_memory_history() before the program runs"
    )]
    NoHistory,
    /// It is about memory that no device has.
    #[error("the recording cannot be of a real program: {why}")]
    Implausible {
        /// What cannot be.
        why: String,
    },
    /// The recorded settings cannot be.
    #[error("the recorded settings cannot be: {0}")]
    Settings(#[from] SettingsError),
    /// The allocator failed, other than for lack of memory.
    #[error("the replay failed: {0}")]
    Allocator(#[from] warpool::Error),
}

/// Replays a recording: first as recorded, which proves the model, and then as `options` ask, if that is something
/// else.
///
/// # Errors
/// If there is nothing to replay, or the allocator fails other than for lack of memory, which is an outcome.
pub fn replay(snapshot: &Snapshot, options: &ReplayOptions<'_>) -> Result<ReplayReport, ReplayError> {
    let began = Instant::now();
    let settings = Settings::from_recorded(&snapshot.settings)?;
    let mut report = ReplayReport::default();
    let mut devices = 0;
    for (device, events) in snapshot.traces.iter().enumerate().filter(|(_, events)| !events.is_empty()) {
        let device = u32::try_from(device).expect("few devices");
        let is_here = |segment: &&SegmentInfo| u32::try_from(segment.device) == Ok(device);
        let segments: Vec<&SegmentInfo> = snapshot.segments.iter().filter(is_here).collect();
        // PyTorch 2.11 does not.
        let names_pools = events.iter().filter(|event| event.action == Action::Alloc).all(|event| event.pool.is_some());
        let pauses_tell = survey::has_pauses(events);
        let tape = Tape { device, events, segments: &segments, names_pools, pauses_tell, choices_tell: true };
        replay_device(tape, &settings, options, &mut report)?;
        devices += 1;
    }
    if devices == 0 {
        return Err(ReplayError::NoHistory);
    }
    if devices > 1 {
        report.inferred.notes.push(format!("{devices} devices were replayed one by one; peaks are the sums of theirs"));
    }
    let fidelity = &report.fidelity;
    if options.is_what_if() && !fidelity.exact {
        report.warnings.push(match (&fidelity.first_difference, fidelity.checked) {
            (Some(first), true) => {
                format!("the model is not proven on this recording ({first}): what-if figures are estimates")
            }
            _ => "the recording has nothing to prove the model with: what-if figures are estimates".to_owned(),
        });
    }
    if options.allocator == AllocatorChoice::DriverPool {
        // The proof is about the caching allocator; how the driver cuts its memory is not known.
        let text =
            "the driver's pool is simulated without fragmentation: what it holds is the least that a real one could";
        report.warnings.push(text.to_owned());
    }
    report.replay_seconds = began.elapsed().as_secs_f64();
    Ok(report)
}

fn replay_device(
    tape: Tape<'_>,
    settings: &Settings,
    options: &ReplayOptions<'_>,
    report: &mut ReplayReport,
) -> Result<(), ReplayError> {
    let usual = SimDevice::h200().properties.bytes_total;
    expect_plausible(tape)?;
    let mut proof =
        if tape.has_segments() { prove(tape, settings, usual, options)? } else { Proof::none(tape, settings) };
    proof.tell(tape, report);
    let could_start = proof.ran.as_ref().is_none_or(|ran| !ran.could_not_start);
    let checked = proof.ran.take().filter(|ran| !options.is_what_if() && !ran.could_not_start);

    let ran = match checked {
        Some(ran) => ran,
        None => {
            let Proof { model, cap, .. } = &proof;
            let settings = what_if_settings(options, &model.settings);
            let limited_otherwise = settings.memory_cap_bytes.is_some() || settings.per_process_memory_fraction < 1.0;
            let least = if options.capacity.is_some() { 0 } else { model.capacity(tape, usual) };
            let ran = Run {
                device: tape.device,
                events: tape.events,
                plan: &model.plan,
                start: model.start.as_ref(),
                // Other ways of getting memory would have led to other segments.
                starts_as_recorded: could_start && settings.expandable_segments == model.settings.expandable_segments,
                pools: &model.pools,
                choice: options.allocator,
                settings: &settings,
                cap: cap.filter(|_| !limited_otherwise),
                capacity: options.capacity.unwrap_or(least.max(usual)),
                as_recorded: None,
                switches: if options.settings.is_none() { &model.switches } else { &[] },
                progress: options.progress,
            };
            ran.run()?
        }
    };
    if ran.failures_met > 0 {
        report.inferred.notes.push(format!(
            "{} requests that failed in the recording are met; what the program would have done then is not known",
            ran.failures_met
        ));
    }
    report.events += tape.events.len() as u64;
    report.allocations += proof.model.plan.allocations;
    report.peak_live_bytes += ran.peak_live_bytes;
    report.peak_reserved_bytes += ran.peak_reserved_bytes;
    report.segments_allocated += ran.segments_allocated;
    report.retries += ran.retries;
    report.ooms += ran.ooms;
    report.driver_calls += ran.driver_calls;
    report.forced_syncs += ran.forced_syncs;
    report.driver_seconds_modelled += ran.driver_seconds;
    if let (Some((event, oom)), Outcome::Completed) = (ran.out_of_memory, &report.outcome) {
        report.outcome = Outcome::OutOfMemory { event, report: oom };
    }
    Ok(())
}

/// Refuses what would keep the replay busy for ever: damaged numbers, not programs.
fn expect_plausible(tape: Tape<'_>) -> Result<(), ReplayError> {
    const BYTES_MAX: u64 = 16 << 40;
    const STREAMS_MAX: usize = 65_535;
    let refuse = |why: String| Err(ReplayError::Implausible { why });
    let at_end: u64 = tape.segments.iter().fold(0, |sum, segment| sum.saturating_add(segment.total_size));
    let (mut held, mut peak) = (0_u64, at_end);
    let (mut streams, mut last) = (BTreeSet::new(), None);
    for event in tape.events {
        match event.action {
            Action::SegmentAlloc | Action::SegmentMap => held = held.saturating_add(event.size),
            Action::SegmentFree | Action::SegmentUnmap => held = held.saturating_sub(event.size),
            _ => {}
        }
        peak = peak.max(held);
        if last != Some(event.stream) {
            last = Some(event.stream);
            streams.insert(event.stream);
        }
    }
    if peak > BYTES_MAX {
        return refuse(format!("{peak} bytes were held at once"));
    }
    if streams.len() > STREAMS_MAX {
        return refuse(format!("it names {} streams", streams.len()));
    }
    Ok(())
}

/// The settings of a what-if: the order of free blocks is the recorded one unless the settings name it.
fn what_if_settings(options: &ReplayOptions<'_>, recorded: &Settings) -> Settings {
    let mut settings = options.settings.clone().unwrap_or_else(|| recorded.clone());
    if !settings.source.contains("free_block_order") {
        settings.free_block_order = recorded.free_block_order;
    }
    settings
}

/// A model, and what came of replaying the recording with it.
struct Proof {
    model: Model,
    cap: Option<u64>,
    /// `None` if there was nothing to compare with.
    ran: Option<Ran>,
}

impl Proof {
    /// Nothing to prove: logs without segments.
    fn none(tape: Tape<'_>, settings: &Settings) -> Self {
        Self { model: Model::simple(tape, settings.clone()), cap: None, ran: None }
    }

    fn is_exact(&self) -> bool {
        self.ran.as_ref().is_some_and(|ran| ran.first_difference.is_none())
    }

    fn addresses_equal(&self) -> u64 {
        self.ran.as_ref().map_or(0, |ran| ran.addresses_equal)
    }

    fn tell(&self, tape: Tape<'_>, report: &mut ReplayReport) {
        let Self { model, cap, ran } = self;
        let fidelity = &mut report.fidelity;
        let is_first = report.events == 0;
        let exact = self.is_exact() && model.plan.unknown_frees == 0;
        fidelity.checked = (is_first || fidelity.checked) && ran.is_some();
        fidelity.exact = (is_first || fidelity.exact) && exact;
        fidelity.addresses_equal += self.addresses_equal();
        fidelity.addresses_total += model.plan.allocations;
        fidelity.recorded_peak_reserved_bytes += model.plan.bytes_peak;
        fidelity.recorded_segments_allocated += model.plan.fetches;
        if fidelity.first_difference.is_none() {
            fidelity.first_difference = ran.as_ref().and_then(|ran| ran.first_difference.clone());
        }
        let inferred = &mut report.inferred;
        inferred.free_block_order = model.settings.free_block_order;
        if let (Some(bounds), Some(used)) = (&model.cap, *cap) {
            inferred.cap = Some(InferredCap { least: bounds.least, below: bounds.below, used });
        }
        for origin in &model.pools.origins {
            match origin {
                PoolOrigin::Recorded(id) if id.is_default() => {}
                PoolOrigin::Recorded(id) => inferred.pools_recorded.push(*id),
                PoolOrigin::Inferred => inferred.pools_inferred += 1,
            }
        }
        inferred.segments_inferred += model.pools.regions_inferred;
        inferred.segments_assumed += model.pools.regions_assumed;
        if let Some(start) = &model.start {
            inferred.bytes_unknown_origin += start.bytes_unknown_origin;
            inferred.bytes_reserved_at_start += start.ledger.bytes();
        }
        inferred.notes.extend(model.notes.iter().cloned());
        if model.plan.unknown_frees > 0 {
            let count = model.plan.unknown_frees;
            inferred.notes.push(format!(
                "{count} frees of device {} were of blocks that nobody is known to have had",
                tape.device
            ));
        }
    }
}

/// Looks for the reading of the recording that reproduces it: the plain one first, then everything that can be
/// concluded, in both orders of free blocks, with pauses that mean something and without, with the likely limits. Of
/// readings that all differ, that with the most addresses right.
fn prove(tape: Tape<'_>, settings: &Settings, usual: u64, options: &ReplayOptions<'_>) -> Result<Proof, ReplayError> {
    let orders = match tape.names_pools {
        // PyTorch named the pools in its history from the version on in which it also changed the order.
        true => [FreeBlockOrder::Registration, FreeBlockOrder::Address],
        false => [FreeBlockOrder::Address, FreeBlockOrder::Registration],
    };
    let ordered = |order| Settings { free_block_order: order, ..settings.clone() };
    let mut best: Option<Proof> = None;
    if tape.is_simple() {
        let proof = attempt(tape, Model::simple(tape, ordered(orders[0])), None, usual, options)?;
        if proof.is_exact() {
            return Ok(proof);
        }
        best = Some(proof);
    }
    let without_pauses = Tape { pauses_tell: false, ..tape };
    let tapes = if tape.pauses_tell { vec![tape, without_pauses] } else { vec![tape] };
    for (order, tape) in orders.into_iter().flat_map(|order| tapes.iter().map(move |&tape| (order, tape))) {
        let mut model = Some(Model::deep(tape, ordered(order)));
        let mut guess = 0;
        while let Some(tried) = model.take() {
            let cap = tried.cap.as_ref().and_then(|cap| cap.guesses.get(guess).copied());
            let proof = attempt(tape, tried, cap, usual, options)?;
            if proof.is_exact() {
                return Ok(proof);
            }
            guess += 1;
            if proof.model.cap.as_ref().is_some_and(|cap| guess < cap.guesses.len()) {
                model = Some(Model::deep(tape, ordered(order)));
            }
            if best.as_ref().is_none_or(|best| best.addresses_equal() < proof.addresses_equal()) {
                best = Some(proof);
            }
        }
    }
    let mut best = best.expect("at least one reading was tried");
    if switches::are_likely(tape.events, tape.segments, settings.expandable_segments) {
        let first = switches::first_value(tape.events).unwrap_or(settings.expandable_segments);
        for order in orders {
            let settings = Settings { expandable_segments: first, ..ordered(order) };
            let proof = attempt_switched(tape, settings, usual, options)?;
            if proof.is_exact() || best.addresses_equal() < proof.addresses_equal() {
                best = proof;
            }
            if best.is_exact() {
                break;
            }
        }
        best.model.notes.push(match (best.is_exact(), best.model.switches.len()) {
            (true, 0) => format!("expandable_segments was {first} throughout, and switched before the end"),
            (true, count) => format!("expandable_segments was switched {count} times; when was told by what followed"),
            (false, _) => "expandable_segments was switched while the program ran, and when is not known".to_owned(),
        });
    }
    Ok(best)
}

/// Looks for a reading in which `expandable_segments` was switched while the program ran, and began as in `settings`.
fn attempt_switched(
    tape: Tape<'_>,
    settings: Settings,
    usual: u64,
    options: &ReplayOptions<'_>,
) -> Result<Proof, ReplayError> {
    let tape = Tape { choices_tell: false, ..tape };
    let mut model = if tape.is_simple() { Model::simple(tape, settings) } else { Model::deep(tape, settings) };
    let guess = model.cap.as_ref().and_then(|cap| cap.guesses.first().copied());
    model.switches = switches::search(tape.events, |tried| {
        let run = as_recorded(tape, &model, guess, usual, options);
        let stopping = run.as_recorded.map(|expected| Expected { stops_at_difference: true, ..expected });
        let ran = Run { switches: tried, as_recorded: stopping, progress: None, ..run }.run()?;
        Ok::<_, ReplayError>(ran.first_difference.map(|first| first.event.map_or(tape.events.len(), index)))
    })?;
    attempt(tape, model, guess, usual, options)
}

fn index(event: u64) -> usize {
    usize::try_from(event).expect("a place in a list")
}

fn attempt(
    tape: Tape<'_>,
    model: Model,
    cap: Option<u64>,
    usual: u64,
    options: &ReplayOptions<'_>,
) -> Result<Proof, ReplayError> {
    let ran = as_recorded(tape, &model, cap, usual, options).run()?;
    Ok(Proof { model, cap, ran: Some(ran) })
}

fn as_recorded<'a>(
    tape: Tape<'a>,
    model: &'a Model,
    cap: Option<u64>,
    usual: u64,
    options: &ReplayOptions<'a>,
) -> Run<'a> {
    Run {
        device: tape.device,
        events: tape.events,
        plan: &model.plan,
        start: model.start.as_ref(),
        starts_as_recorded: true,
        pools: &model.pools,
        choice: AllocatorChoice::Caching,
        settings: &model.settings,
        cap,
        capacity: model.capacity(tape, usual),
        as_recorded: Some(Expected { retries: model.retries, stops_at_difference: false }),
        switches: &model.switches,
        progress: options.progress,
    }
}
