//! Replays recordings on the simulated GPU, with the real allocators.
//!
//! The requests of the recorded program are made again: allocations, frees, streams, and the events at which other
//! streams had passed. What its allocator did is not repeated but compared: with the recorded settings, and with
//! memory from the driver at the recorded addresses, every address and every segment must come out as recorded. This
//! proves the model on the recording before a what-if is answered with it.
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
//! How: `infer/` reconstructs the state at the first event and infers what the recording does not contain, `plan/`
//! makes steps of the events, `run/` performs the steps on a simulated device and compares, and `prove.rs` tries
//! interpretations until one reproduces the recording.

mod infer;
mod options;
mod plan;
mod program;
mod prove;
mod recording;
mod report;
mod run;

use std::collections::BTreeMap;
use std::time::Instant;

use warpool::memory::{BlockInfo, SegmentInfo, Settings, SettingsError, Snapshot, TraceEntry};

pub use options::{AllocatorChoice, ReplayOptions, ReplayProgress};
pub use program::Program;
pub use report::{Difference, Fidelity, Inferences, InferredLimit, Outcome, ReplayReport, Steady};

use crate::budget::{Budget, Exceeded, bytes_of};
use prove::{CAPACITY_MAX, Interpretation, Proof, default_capacity};
use recording::{DeviceRecording, RecordedTime, Survey};
use run::{Run, RunResult};

/// Why a recording could not be replayed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReplayError {
    /// There are no events.
    #[error(
        "the recording has no device memory events; for PyTorch, call torch.cuda.memory._record_memory_history() \
         before the program runs"
    )]
    NoHistory,
    /// Its numbers are not those of a real program.
    #[error("the recording is not that of a real program: {reason}")]
    Implausible {
        /// What is implausible.
        reason: String,
    },
    /// Replaying needs more memory than allowed: see [`ReplayOptions::memory_limit`].
    #[error(
        "the replay needs more than {limit} bytes of memory: if you trust the recording, replay it with a higher \
         memory limit"
    )]
    MemoryLimit {
        /// The limit.
        limit: u64,
    },
    /// The recorded settings are invalid.
    #[error("the recorded settings are invalid: {0}")]
    Settings(#[from] SettingsError),
    /// The allocator failed, other than for lack of memory.
    #[error("the replay failed: {0}")]
    Allocator(#[from] warpool::Error),
}

impl From<Exceeded> for ReplayError {
    /// The limit is filled in at the end.
    fn from(Exceeded: Exceeded) -> Self {
        Self::MemoryLimit { limit: 0 }
    }
}

/// Replays a recording: first as recorded, which proves the model, and then as `options` say, if that differs.
///
/// # Errors
/// If there is nothing to replay, or the allocator fails other than for lack of memory, which is an outcome.
pub fn replay(snapshot: &Snapshot, options: &ReplayOptions<'_>) -> Result<ReplayReport, ReplayError> {
    let bytes = bytes_in_memory(snapshot);
    let budget = Budget::new(options.memory_limit);
    budget.set_bytes_needed(bytes);
    replay_within(snapshot, options, bytes, &budget).map_err(|error| match error {
        ReplayError::MemoryLimit { .. } => ReplayError::MemoryLimit { limit: budget.limit() },
        error => error,
    })
}

fn replay_within(
    snapshot: &Snapshot,
    options: &ReplayOptions<'_>,
    bytes: u64,
    budget: &Budget,
) -> Result<ReplayReport, ReplayError> {
    /// More than any machine has.
    const DEVICES_MAX: usize = 1024;
    let start = Instant::now();
    budget.take(bytes)?;
    let settings = Settings::from_recorded(&snapshot.settings)?;
    if settings.large_segment_bytes > CAPACITY_MAX {
        let reason = format!("its segments are of {} bytes", settings.large_segment_bytes);
        return Err(ReplayError::Implausible { reason });
    }
    let mut report = ReplayReport::default();
    let recorded_time = RecordedTime::of(&snapshot.traces);
    report.recorded_seconds = recorded_time.map(RecordedTime::seconds);
    let half = report.recorded_seconds.map(|seconds| seconds / 2.0);
    report.steady = half.map(|recorded_seconds| Steady { recorded_seconds, ..Steady::default() });
    let steady_from_us = recorded_time.map(RecordedTime::midpoint_us);
    let devices = snapshot.traces.iter().filter(|events| !events.is_empty()).count();
    match devices {
        0 => return Err(ReplayError::NoHistory),
        1..=DEVICES_MAX => {}
        _ => return Err(ReplayError::Implausible { reason: format!("it has events of {devices} devices") }),
    }
    let mut segments: BTreeMap<i32, Vec<&SegmentInfo>> = BTreeMap::new();
    for segment in &snapshot.segments {
        segments.entry(segment.device).or_default().push(segment);
    }
    for (device, events) in snapshot.traces.iter().enumerate().filter(|(_, events)| !events.is_empty()) {
        let Ok(number) = i32::try_from(device) else {
            return Err(ReplayError::Implausible { reason: format!("it has events of device {device}") });
        };
        let segments = segments.get(&number).map_or(&[][..], Vec::as_slice);
        let device = number.unsigned_abs();
        let survey = Survey::new(device, events, segments)?;
        let recording = DeviceRecording { device, events, segments, survey: &survey, steady_from_us };
        replay_device(recording, &settings, options, &mut report, budget)?;
    }
    if devices > 1 {
        let remark = format!("{devices} devices were replayed one after another; peaks are sums over the devices");
        report.inferred.remarks.push(remark);
    }
    warn(options, &mut report);
    report.replay_seconds = start.elapsed().as_secs_f64();
    Ok(report)
}

/// The memory of a snapshot's events and segments, which a replay needs.
fn bytes_in_memory(snapshot: &Snapshot) -> u64 {
    let entries: usize = snapshot.traces.iter().chain(&snapshot.host_traces).map(Vec::len).sum();
    let segments = snapshot.segments.len() + snapshot.host_segments.as_ref().map_or(0, Vec::len);
    let blocks: usize = snapshot.segments.iter().map(|segment| segment.blocks.len()).sum();
    bytes_of::<TraceEntry>(entries) + bytes_of::<SegmentInfo>(segments) + bytes_of::<BlockInfo>(blocks)
}

fn replay_device(
    recording: DeviceRecording<'_>,
    settings: &Settings,
    options: &ReplayOptions<'_>,
    report: &mut ReplayReport,
    budget: &Budget,
) -> Result<(), ReplayError> {
    let mut proof = Proof::find(recording, settings, options, budget)?;
    proof.add_to(recording, report);
    let could_start = proof.result.as_ref().is_none_or(|result| !result.not_started);
    let as_recorded = proof.result.take().filter(|result| !options.is_what_if() && !result.not_started);
    let result = match as_recorded {
        Some(result) => result,
        None => run_what_if(recording, &proof, options, could_start, budget)?,
    };
    add_result(recording, &proof.interpretation, result, report);
    Ok(())
}

/// Runs the plan with the settings, allocator and capacity of `options`.
fn run_what_if(
    recording: DeviceRecording<'_>,
    proof: &Proof,
    options: &ReplayOptions<'_>,
    could_start: bool,
    budget: &Budget,
) -> Result<RunResult, ReplayError> {
    let Interpretation { inference, plan, toggles, .. } = &proof.interpretation;
    let settings = what_if_settings(options, &inference.settings);
    let has_own_limit = settings.memory_cap_bytes.is_some() || settings.per_process_memory_fraction < 1.0;
    let capacity = match options.capacity {
        Some(capacity) => capacity.min(CAPACITY_MAX),
        None => proof.interpretation.capacity(recording, budget)?.max(default_capacity()),
    };
    let run = Run {
        device: recording.device,
        events: recording.events,
        steady_from_us: recording.steady_from_us,
        inference,
        plan,
        // Expandable segments in place of others, or others in place of them, would have led to other segments.
        restores_segments: could_start && settings.expandable_segments == inference.settings.expandable_segments,
        allocator: options.allocator,
        settings: &settings,
        memory_limit: proof.memory_limit.filter(|_| !has_own_limit),
        capacity,
        expected: None,
        toggles: if options.settings.is_none() { toggles } else { &[] },
        progress: options.progress,
        budget,
    };
    run.run()
}

/// The settings of a what-if, with the inferred order of free blocks unless the settings name one.
fn what_if_settings(options: &ReplayOptions<'_>, recorded: &Settings) -> Settings {
    let mut settings = options.settings.clone().unwrap_or_else(|| recorded.clone());
    if !settings.text.contains("free_block_order") {
        settings.free_block_order = recorded.free_block_order;
    }
    settings
}

/// Adds the result of one device to the report.
fn add_result(
    recording: DeviceRecording<'_>,
    interpretation: &Interpretation,
    result: RunResult,
    report: &mut ReplayReport,
) {
    if result.failures_avoided > 0 {
        report.inferred.remarks.push(format!(
            "{} requests that ran out of memory in the recording succeed here; what the program would have done then \
             is not known",
            result.failures_avoided
        ));
    }
    report.events += recording.events.len() as u64;
    report.allocations += interpretation.plan.allocations;
    report.peak_live_bytes = report.peak_live_bytes.saturating_add(result.peak_live_bytes);
    report.peak_reserved_bytes = report.peak_reserved_bytes.saturating_add(result.peak_reserved_bytes);
    report.segments_allocated += result.segments_allocated;
    report.retries += result.retries;
    report.ooms += result.ooms;
    report.driver_calls += result.driver_calls;
    report.forced_syncs += result.forced_syncs;
    report.driver_seconds_modelled += result.driver_seconds;
    report.run_seconds += result.run_time.as_secs_f64();
    if let Some(steady) = &mut report.steady {
        steady.driver_calls += result.steady.driver_calls;
        steady.driver_seconds_modelled += result.steady.driver_seconds;
        steady.remap_seconds_modelled += result.steady.remap_seconds;
        steady.bytes_remapped += result.steady.bytes_remapped;
    }
    if let (Some((event, oom)), Outcome::Completed) = (result.out_of_memory, &report.outcome) {
        report.outcome = Outcome::OutOfMemory { event, report: oom };
    }
}

fn warn(options: &ReplayOptions<'_>, report: &mut ReplayReport) {
    let fidelity = &report.fidelity;
    if options.is_what_if() && !fidelity.exact {
        report.warnings.push(match (&fidelity.first_difference, fidelity.checked) {
            (Some(first), true) => {
                format!("the model is not proven on this recording ({first}): what-if figures are estimates")
            }
            _ => "the recording has no segments to prove the model with: what-if figures are estimates".to_owned(),
        });
    }
    if options.allocator == AllocatorChoice::DriverPool {
        // What was proven is the model of the caching allocator.
        let text = "the driver's memory pool is simulated without fragmentation: its reserved bytes are a lower bound";
        report.warnings.push(text.to_owned());
    }
}
