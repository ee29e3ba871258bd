//! The result of a replay, as plain data. The command makes tables and JSON from it.

use std::fmt;

use warpool::memory::{FreeBlockOrder, MemPoolId, OomReport};

/// The result of a replay. The numbers are those of the requested run; [`fidelity`](Self::fidelity) is about the run
/// with the recorded settings. Over several devices, peaks are sums over the devices.
#[derive(Clone, Debug, Default)]
pub struct ReplayReport {
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
    /// The part of it in which the requested run made its requests: without preparation, and without other runs.
    pub run_seconds: f64,
    /// How far the recorded settings reproduce the recording.
    pub fidelity: Fidelity,
    /// What the recording does not contain and was inferred.
    pub inferred: Inferences,
    /// Warnings about the result, such as a what-if on a recording that could not be reproduced.
    pub warnings: Vec<String>,
}

/// The second half of the recorded time, in which most programs only repeat what they have done before: an allocator
/// should need the driver less than at the start. A replay that stops early has counted only until there.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Steady {
    /// Its length.
    pub recorded_seconds: f64,
    /// Driver calls.
    pub driver_calls: u64,
    /// The time of the driver calls by the simulated device's cost model.
    pub driver_seconds_modelled: f64,
    /// The part of it that went into remapping: mapping physical memory that was mapped before, setting access to
    /// these mappings, and unmapping the old ones. Mapping new memory for the first time is growth, not remapping.
    pub remap_seconds_modelled: f64,
    /// Bytes that were remapped.
    pub bytes_remapped: u64,
}

/// How a replay ended.
#[derive(Clone, Debug, Default)]
pub enum Outcome {
    /// All events were replayed, and no request ran out of memory.
    #[default]
    Completed,
    /// A request ran out of memory. If the recorded request did too, the replay went on behind it.
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
    /// Microseconds since the first event.
    pub time_us: i64,
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
        match self.event {
            #[expect(clippy::cast_precision_loss, reason = "three decimals are shown")]
            Some(event) => write!(f, "event {event} at {:.3} ms", self.time_us as f64 / 1000.0)?,
            None => f.write_str("in total")?,
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

/// Bounds of a memory limit, and the value that was used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InferredLimit {
    /// The limit was at least this.
    pub at_least: u64,
    /// The limit was below this.
    pub below: u64,
    /// The limit of the replay.
    pub used: u64,
}
