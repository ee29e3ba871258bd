//! The result of a replay, as plain data. The command makes tables and JSON from it.

use std::fmt;

use warpool::memory::settings::FreeBlockOrder;
use warpool::memory::{MemPoolId, OomReport};

use super::options::AllocatorChoice;
use crate::cards::DeviceOrigin;

/// The result of a replay. The numbers are those of the requested run; [`fidelity`](Self::fidelity) is about the run
/// with the recorded settings. Over several devices, peaks are sums over the devices.
#[derive(Clone, Debug, Default)]
pub struct ReplayReport {
    /// The device.
    pub device: u32,
    /// Events of the recording.
    pub events: u64,
    /// Allocations among them.
    pub allocations: u64,
    /// How the replay ended.
    pub outcome: Outcome,
    /// The largest sum of allocated bytes at one time, each allocation rounded to 512 bytes.
    pub peak_live_bytes: u64,
    /// The largest sum of bytes reserved from the driver at one time.
    pub peak_reserved_bytes: u64,
    /// How often memory was allocated or mapped from the driver.
    pub segments_allocated: u64,
    /// How often an allocation was retried after all cached memory had been released.
    pub retries: u64,
    /// Requests that ran out of memory.
    pub ooms: u64,
    /// Driver calls.
    pub driver_calls: u64,
    /// Driver calls that wait for the device: synchronizations, and `cuMemFree`.
    pub forced_syncs: u64,
    /// The time of the driver calls by the simulated device's cost model.
    pub driver_seconds_modelled: f64,
    /// The time from the recorded program's first event to its last; `None` if the events have no time stamps.
    pub recorded_seconds: Option<f64>,
    /// The second half of that time.
    pub steady: Option<Steady>,
    /// The time the replay took, with all runs that were needed to reproduce the recording.
    pub replay_seconds: f64,
    /// The part of it that the requested run took for its requests, without preparation and without other runs.
    pub run_seconds: f64,
    /// How far the recorded settings reproduce the recording.
    pub fidelity: Fidelity,
    /// What the recording does not contain and was inferred.
    pub inferred: Inferences,
    /// The conditions of the run, and how they differ from the recording.
    pub in_force: InForce,
    /// The result over several address orders; the other figures are those of the worst of them.
    pub orders: AddressOrders,
    /// The recorded program in the same address orders: recorded addresses up to the first segment that the what-if
    /// requested and the recording did not, then the same random ones. `None` where addresses were as recorded, or do
    /// not matter.
    pub control: Option<AddressOrders>,
    /// The program several times one after another on one device, if that was requested: what it needs in a longer run.
    /// Everything is freed between two rounds. It ends with the first round that could not be completed for lack of
    /// memory.
    pub rounds: Vec<Round>,
    /// Warnings about the result, such as a what-if on a recording that could not be reproduced.
    pub warnings: Vec<String>,
}

impl ReplayReport {
    /// The sum with the report of another device; the device, what is in force and the outcome are those of the first.
    pub(super) fn add(mut self, other: Self) -> Self {
        let fidelity = &mut self.fidelity;
        fidelity.checked &= other.fidelity.checked;
        fidelity.exact &= other.fidelity.exact;
        fidelity.addresses_equal += other.fidelity.addresses_equal;
        fidelity.addresses_total += other.fidelity.addresses_total;
        let peak = &mut fidelity.recorded_peak_reserved_bytes;
        *peak = peak.saturating_add(other.fidelity.recorded_peak_reserved_bytes);
        fidelity.recorded_segments_allocated += other.fidelity.recorded_segments_allocated;
        fidelity.first_difference = fidelity.first_difference.take().or(other.fidelity.first_difference);
        self.inferred.add(other.inferred);
        self.events += other.events;
        self.allocations += other.allocations;
        self.peak_live_bytes = self.peak_live_bytes.saturating_add(other.peak_live_bytes);
        self.peak_reserved_bytes = self.peak_reserved_bytes.saturating_add(other.peak_reserved_bytes);
        self.segments_allocated += other.segments_allocated;
        self.retries += other.retries;
        self.ooms += other.ooms;
        self.driver_calls += other.driver_calls;
        self.forced_syncs += other.forced_syncs;
        self.driver_seconds_modelled += other.driver_seconds_modelled;
        self.run_seconds += other.run_seconds;
        if let (Some(steady), Some(other)) = (&mut self.steady, other.steady) {
            steady.driver_calls += other.driver_calls;
            steady.driver_seconds_modelled += other.driver_seconds_modelled;
            steady.remap_seconds_modelled += other.remap_seconds_modelled;
            steady.bytes_remapped += other.bytes_remapped;
        }
        let both = self.rounds.iter().zip(other.rounds);
        self.rounds = both.map(|(&round, other)| round.add(other)).collect();
        if matches!(self.outcome, Outcome::Completed) {
            self.outcome = other.outcome;
        }
        self.warnings.extend(other.warnings);
        self
    }
}

impl Inferences {
    fn add(&mut self, other: Self) {
        self.memory_limit = self.memory_limit.or(other.memory_limit);
        self.pools_recorded.extend(other.pools_recorded);
        self.pools_inferred += other.pools_inferred;
        self.segments_inferred += other.segments_inferred;
        self.segments_assumed += other.segments_assumed;
        self.bytes_unknown_origin += other.bytes_unknown_origin;
        self.bytes_reserved_at_start += other.bytes_reserved_at_start;
        self.remarks.extend(other.remarks);
    }
}

/// The conditions of a run, and how they differ from the recording.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InForce {
    /// The recorded settings, as a string: what differs from the defaults.
    pub settings_recorded: String,
    /// The settings, likewise, without those that the allocator does not have.
    pub settings: String,
    /// The settings that differ from the recorded ones.
    pub changes: Vec<SettingChange>,
    /// The allocator.
    pub allocator: AllocatorChoice,
    /// The allocator of the recorded program.
    pub allocator_recorded: AllocatorChoice,
    /// The memory of the device; `None` if it is not known.
    pub device_bytes_total: Option<u64>,
    /// Where that comes from.
    pub device_origin: DeviceOrigin,
    /// The card, or those that it may be: see [`DeviceMemory::name`](crate::cards::DeviceMemory::name).
    pub device_name: Option<String>,
    /// The memory of the simulated device. Where the recorded one is not known, it is large enough for the recording.
    pub device_bytes_simulated: u64,
    /// The bytes that the allocator may reserve: a known device less the context, within a limit; `None` without both.
    pub bytes_available: Option<u64>,
    /// The limit that is in force.
    pub memory_limit: Option<u64>,
    /// Where that limit comes from.
    pub limit_origin: LimitOrigin,
    /// The recorded limit, if it does not apply here.
    pub limit_lifted: Option<u64>,
}

/// Where a memory limit comes from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LimitOrigin {
    /// There is none.
    #[default]
    None,
    /// The recorded program had it, set by a call or by its settings.
    Recorded,
    /// The recorded device was full at this.
    RecordedDeviceFull,
    /// The settings of the what-if.
    Settings,
}

impl LimitOrigin {
    /// Its name: `none`, `recorded`, `recorded_device_full`, `settings`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Recorded => "recorded",
            Self::RecordedDeviceFull => "recorded_device_full",
            Self::Settings => "settings",
        }
    }
}

/// A setting that differs from the recorded one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SettingChange {
    /// Its key.
    pub key: &'static str,
    /// Its recorded value.
    pub recorded: String,
    /// Its value in the run.
    pub used: String,
}

/// The result of one program over several address orders. The driver chooses addresses, and PyTorch's allocator
/// chooses between free blocks of one size by address: a result that holds in one order need not hold in another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AddressOrders {
    /// In how many orders it was replayed; 1 where all addresses were as recorded, or do not matter.
    pub run: u32,
    /// In how many of them no request ran out of memory.
    pub fit: u32,
    /// The least of the peaks of reserved bytes.
    pub peak_reserved_bytes_least: u64,
    /// The largest of them.
    pub peak_reserved_bytes_most: u64,
    /// The least margin among the orders that fit: what the allocator may reserve, less its peak. `None` also if the
    /// device is not known.
    pub margin_bytes_least: Option<u64>,
}

impl AddressOrders {
    /// Whether no request runs out of memory in any order.
    #[must_use]
    pub const fn all_fit(&self) -> bool {
        self.fit == self.run
    }
}

/// The second half of the recorded time, in which most programs only repeat what they have done before: an allocator
/// should need the driver less than at the start. A replay that stops early has counted only up to that point.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Steady {
    /// Its length.
    pub recorded_seconds: f64,
    /// Driver calls.
    pub driver_calls: u64,
    /// The time of the driver calls by the simulated device's cost model.
    pub driver_seconds_modelled: f64,
    /// The part of it that went into remapping: mapping physical memory that was mapped before, setting access to these
    /// mappings, and unmapping the old ones. The first mapping of new memory is not remapping.
    pub remap_seconds_modelled: f64,
    /// Bytes that were remapped.
    pub bytes_remapped: u64,
}

/// One of several runs of the program on the same device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Round {
    /// The largest sum of allocated bytes in it, each allocation rounded to 512 bytes.
    pub peak_live_bytes: u64,
    /// The largest sum of bytes reserved from the driver in it.
    pub peak_reserved_bytes: u64,
    /// Requests that ran out of memory.
    pub ooms: u64,
}

impl Round {
    fn add(self, other: Self) -> Self {
        Self {
            peak_live_bytes: self.peak_live_bytes.saturating_add(other.peak_live_bytes),
            peak_reserved_bytes: self.peak_reserved_bytes.saturating_add(other.peak_reserved_bytes),
            ooms: self.ooms + other.ooms,
        }
    }
}

/// How a replay ended.
#[derive(Clone, Debug, Default)]
pub enum Outcome {
    /// All events were replayed, and no request ran out of memory.
    #[default]
    Completed,
    /// A request ran out of memory. If the recorded request did too, the replay went on after it.
    OutOfMemory {
        /// The event of the first such request, counted from 0.
        event: u64,
        /// The allocator's report.
        report: Box<OomReport>,
    },
}

impl Outcome {
    /// Its name: `completed` or `out_of_memory`.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Completed => "completed",
            Self::OutOfMemory { .. } => "out_of_memory",
        }
    }
}

/// How far a replay with the recorded settings reproduces the recording.
#[derive(Clone, Debug, Default)]
pub struct Fidelity {
    /// Whether there was anything to compare with. Logs without segments have nothing.
    pub checked: bool,
    /// Every address, every segment event, the peak, the retries and the failures are as recorded.
    pub exact: bool,
    /// Allocations that got their recorded address.
    pub addresses_equal: u64,
    /// All allocations.
    pub addresses_total: u64,
    /// The largest sum of bytes that the recorded program reserved at one time.
    pub recorded_peak_reserved_bytes: u64,
    /// How often it allocated or mapped memory from the driver.
    pub recorded_segments_allocated: u64,
    /// The first difference.
    pub first_difference: Option<Difference>,
}

/// Where a replay differs from the recording.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// The device.
    pub device: u32,
    /// The event, counted from 0; `None` if only the totals differ.
    pub event: Option<u64>,
    /// Microseconds since the first event; `None` if the events have no times.
    pub time_us: Option<i64>,
    /// What was recorded.
    pub expected: String,
    /// What the replay did.
    pub got: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.device > 0 {
            write!(f, "device {}, ", self.device)?;
        }
        match (self.event, self.time_us) {
            #[expect(clippy::cast_precision_loss, reason = "three decimals are shown")]
            (Some(event), Some(time_us)) => write!(f, "event {event} at {:.3} ms", time_us as f64 / 1000.0)?,
            (Some(event), None) => write!(f, "event {event}")?,
            (None, _) => f.write_str("in total")?,
        }
        write!(f, ": recorded {}, replayed {}", self.expected, self.got)
    }
}

/// What the recording does not contain and was inferred from its events.
#[derive(Clone, Debug, Default)]
pub struct Inferences {
    /// The memory limit of the recorded program.
    pub memory_limit: Option<InferredLimit>,
    /// Which of several free blocks of one size was used first.
    pub free_block_order: FreeBlockOrder,
    /// The private pools that the recording names.
    pub pools_recorded: Vec<MemPoolId>,
    /// Private pools that the recording does not name.
    pub pools_inferred: u64,
    /// Segments of unknown pool that were assigned to a private pool.
    pub segments_inferred: u64,
    /// Segments of unknown pool that were assumed to be in the default pool, since nothing contradicts it.
    pub segments_assumed: u64,
    /// Bytes in use at the first event whose allocation is not in the history.
    pub bytes_unknown_origin: u64,
    /// Bytes reserved from the driver at the first event.
    pub bytes_reserved_at_start: u64,
    /// Further remarks for the reader, in sentences.
    pub remarks: Vec<String>,
}

/// Bounds of a memory limit, and the value that was used. The limit of a full device is what it had for the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InferredLimit {
    /// The limit was at least this.
    pub at_least: u64,
    /// The limit was below this.
    pub below: u64,
    /// The limit of the replay.
    pub used: u64,
    /// Whether the device was full, rather than a limit set: it had less free than the failed request needed.
    pub device_full: bool,
    /// The memory that a full device had for the program at the failed requests, reserved plus free: the least and the
    /// most. They differ where others use it too.
    pub device_had: Option<(u64, u64)>,
}
