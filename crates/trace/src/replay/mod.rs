//! Replays recordings on the simulated GPU, with the real allocators.
//!
//! The requests of the recorded program are made again: allocations, frees, streams, and the events at which other
//! streams had passed. The actions of its allocator are not replayed but compared: with the recorded settings, and with
//! memory from the driver at the recorded addresses, every address and every segment must be as recorded. This proves
//! the model on the recording before it answers a what-if.
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
//! A what-if gets the recorded addresses as long as it requests the recorded segments. If it needs other segments, it
//! is replayed in several address orders, and so is the recorded program as a control: see [`AddressOrders`].
//!
//! `infer/` reconstructs the state at the first event and infers what the recording does not contain. `plan/` makes
//! steps from the events. `run/` performs the steps on a simulated device and compares. `prove.rs` tries
//! interpretations until one reproduces the recording. `device.rs` answers what-ifs from there: `conditions.rs`
//! determines the conditions of each, `orders.rs` runs it in several address orders, `run/rounds.rs` several times one
//! after another.

mod conditions;
mod device;
mod infer;
mod options;
mod orders;
mod plan;
mod program;
mod prove;
mod recording;
mod report;
mod run;
mod state;

use std::collections::BTreeMap;

use warpool::driver::platform::Instant;
use warpool::memory::Settings;
use warpool::memory::report::{BlockInfo, SegmentInfo, Snapshot, TraceEntry};
use warpool::memory::settings::SettingsError;

pub use device::DeviceReplay;
pub use options::{ADDRESS_ORDERS, AllocatorChoice, ReplayOptions, ReplayProgress, WhatIf};
pub use program::Program;
pub use recording::has_times;
pub use report::{
    AddressOrders, Difference, Fidelity, InForce, Inferences, InferredLimit, LimitOrigin, Outcome, ReplayReport, Round,
    SettingChange, Steady,
};

use crate::budget::{Budget, Exceeded, bytes_of};
use prove::CAPACITY_MAX;
use recording::RecordedTime;

pub(crate) use conditions::bytes_context;
pub(crate) use recording::check_segments;
#[cfg(test)]
pub(crate) use state::PoolKey;
pub(crate) use state::{Checkpoints, HeapState, RequestInfo, StateBlock, StateChange, Totals};

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
    /// It was ended early: see [`ReplayOptions::stop`].
    #[error("the replay was stopped")]
    Stopped,
    /// The recorded settings are invalid.
    #[error("the recorded settings are invalid: {0}")]
    Settings(#[from] SettingsError),
    /// The changes of a what-if are invalid.
    #[error("the settings of the what-if are invalid: {0}")]
    Changes(SettingsError),
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

/// Replays a recording: first as recorded, which proves the model, and then as `options` say, if that differs. The
/// numbers of several devices are added up; [`replay_devices`] has those of each.
///
/// # Errors
/// If there is nothing to replay, or the allocator fails other than for lack of memory, which is an outcome.
pub fn replay(snapshot: &Snapshot, options: &ReplayOptions<'_>) -> Result<ReplayReport, ReplayError> {
    let start = Instant::now();
    let reports = replay_devices(snapshot, options)?;
    let devices = reports.len();
    let mut report = reports.into_iter().reduce(ReplayReport::add).ok_or(ReplayError::NoHistory)?;
    if devices > 1 {
        let remark = format!("{devices} devices were replayed one after another; peaks are sums over the devices");
        report.inferred.remarks.push(remark);
    }
    report.replay_seconds = start.elapsed().as_secs_f64();
    Ok(report)
}

/// Replays a recording as [`replay`] does, with a report for each device that has events.
///
/// # Errors
/// As [`replay`].
pub fn replay_devices(snapshot: &Snapshot, options: &ReplayOptions<'_>) -> Result<Vec<ReplayReport>, ReplayError> {
    let replays = DeviceReplays::new(snapshot, options)?;
    let what_if = options.what_if();
    replays.devices().iter().map(|device| device.report(&what_if, options)).collect()
}

/// The devices of a recording, each with the interpretation that reproduces it.
pub struct DeviceReplays<'a> {
    devices: Vec<DeviceReplay<'a>>,
}

impl<'a> DeviceReplays<'a> {
    /// Replays every device as recorded, which proves the model. Of `options` only the memory limit, the progress
    /// and the stop count; the stop ends what-ifs of these devices too.
    ///
    /// # Errors
    /// As [`replay`].
    pub fn new(snapshot: &'a Snapshot, options: &ReplayOptions<'_>) -> Result<Self, ReplayError> {
        let bytes = bytes_in_memory(snapshot);
        let budget = Budget::new(options.memory_limit).with_stop(&options.stop);
        budget.set_bytes_needed(bytes);
        let devices = budget.take(bytes).map_err(ReplayError::from);
        let devices = devices.and_then(|()| prove_devices(snapshot, options, &budget));
        Ok(Self { devices: devices.map_err(|error| error.with_limit(&budget))? })
    }

    /// Those that have events, by number.
    #[must_use]
    pub fn devices(&self) -> &[DeviceReplay<'a>] {
        &self.devices
    }
}

impl ReplayError {
    /// Fills in the limit.
    fn with_limit(self, budget: &Budget) -> Self {
        match self {
            Self::MemoryLimit { .. } => Self::MemoryLimit { limit: budget.limit() },
            error => error,
        }
    }
}

fn prove_devices<'a>(
    snapshot: &'a Snapshot,
    options: &ReplayOptions<'_>,
    budget: &Budget,
) -> Result<Vec<DeviceReplay<'a>>, ReplayError> {
    /// More than any machine has.
    const DEVICES_MAX: usize = 1024;
    let settings = Settings::from_recorded(&snapshot.settings)?;
    if settings.large_segment_bytes > CAPACITY_MAX {
        let reason = format!("its segments are of {} bytes", settings.large_segment_bytes);
        return Err(ReplayError::Implausible { reason });
    }
    let recorded_time = RecordedTime::of(&snapshot.traces);
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
    let mut replays = Vec::new();
    for (device, events) in snapshot.traces.iter().enumerate().filter(|(_, events)| !events.is_empty()) {
        let Ok(number) = i32::try_from(device) else {
            return Err(ReplayError::Implausible { reason: format!("it has events of device {device}") });
        };
        let segments = segments.remove(&number).unwrap_or_default();
        replays.push(DeviceReplay::new(
            number.unsigned_abs(),
            events,
            segments,
            &settings,
            recorded_time,
            options.progress,
            budget,
        )?);
    }
    Ok(replays)
}

/// The memory of a snapshot's events and segments, which a replay needs.
fn bytes_in_memory(snapshot: &Snapshot) -> u64 {
    let entries: usize = snapshot.traces.iter().chain(&snapshot.host_traces).map(Vec::len).sum();
    let segments = snapshot.segments.len() + snapshot.host_segments.as_ref().map_or(0, Vec::len);
    let blocks: usize = snapshot.segments.iter().map(|segment| segment.blocks.len()).sum();
    bytes_of::<TraceEntry>(entries) + bytes_of::<SegmentInfo>(segments) + bytes_of::<BlockInfo>(blocks)
}
