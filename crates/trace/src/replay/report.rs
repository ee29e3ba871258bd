//! What a replay tells: plain data. Tables and JSON are made of it elsewhere.

use std::fmt;

use warpool::memory::{FreeBlockOrder, MemPoolId, OomReport};

/// What came of a replay. Numbers are those of the run that was asked for; [`fidelity`](Self::fidelity) is about the
/// recorded settings.
#[derive(Clone, Debug, Default)]
pub struct ReplayReport {
    /// Events of the recording.
    pub events: u64,
    /// Allocations among them.
    pub allocations: u64,
    /// How it ended.
    pub outcome: Outcome,
    /// The most that callers had at once, after rounding to 512 bytes. Over several devices, the sum of theirs; so too
    /// the next.
    pub peak_live_bytes: u64,
    /// The most that was held from the driver at once.
    pub peak_reserved_bytes: u64,
    /// How often memory came from the driver.
    pub segments_allocated: u64,
    /// How often everything cached was given back to try once more.
    pub retries: u64,
    /// Requests that failed for lack of memory.
    pub ooms: u64,
    /// Calls of the driver.
    pub driver_calls: u64,
    /// Those of them that wait for the device: synchronizations, and plain frees.
    pub forced_syncs: u64,
    /// How long the calls would have taken on the device that the cost model describes.
    pub driver_seconds_modelled: f64,
    /// How long the replay took, with all that was tried to prove the model.
    pub replay_seconds: f64,
    /// Whether the model was proven on this recording.
    pub fidelity: Fidelity,
    /// What the recording does not say and was concluded.
    pub inferred: Inferred,
    /// What to keep in mind: such as a what-if on a model that was not proven.
    pub warnings: Vec<String>,
}

/// How a replay ended.
#[derive(Clone, Debug, Default)]
pub enum Outcome {
    /// At the end of the recording.
    #[default]
    Completed,
    /// A request failed for lack of memory. Where the recording has that failure too, the replay went on as the program
    /// did.
    OutOfMemory {
        /// The event of the request, counted from 0.
        event: u64,
        /// What stood in the way.
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

/// How the recorded settings reproduce the recording.
#[derive(Clone, Debug, Default)]
pub struct Fidelity {
    /// Whether there was anything to compare with. Logs without segments have nothing.
    pub checked: bool,
    /// Every address, every segment event, the peak, retries and failures are as recorded.
    pub exact: bool,
    /// Allocations that got their recorded address.
    pub addresses_equal: u64,
    /// All of them.
    pub addresses_total: u64,
    /// The most that the recorded program held from the driver.
    pub recorded_peak_reserved_bytes: u64,
    /// How often it got memory from the driver.
    pub recorded_segments_allocated: u64,
    /// What differed first.
    pub first_difference: Option<Difference>,
}

/// Where a replay left the recording.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// On which device.
    pub device: u32,
    /// At which event, counted from 0; `None` if it showed only in the sums.
    pub event: Option<u64>,
    /// When, in microseconds since the first event.
    pub time_us: i64,
    /// What was recorded.
    pub expected: String,
    /// What came instead.
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
            None => f.write_str("in all")?,
        }
        write!(f, ": recorded {}, replayed {}", self.expected, self.got)
    }
}

/// What was concluded.
#[derive(Clone, Debug, Default)]
pub struct Inferred {
    /// The limit that the recorded program ran under.
    pub cap: Option<InferredCap>,
    /// Which of two free blocks of one size came first.
    pub free_block_order: FreeBlockOrder,
    /// The private pools that the recording names.
    pub pools_recorded: Vec<MemPoolId>,
    /// Pools that must have been and are not named.
    pub pools_inferred: u64,
    /// Segments that were put into such a pool, or into a named one.
    pub segments_inferred: u64,
    /// Segments that were taken to be in the default pool, because nothing contradicts it.
    pub segments_assumed: u64,
    /// Bytes in use at the first event, whose allocation is not in the history.
    pub bytes_unknown_origin: u64,
    /// Bytes held from the driver at the first event.
    pub bytes_reserved_at_start: u64,
    /// Whatever else a reader should know, in sentences.
    pub notes: Vec<String>,
}

/// A limit, as far as a recording tells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InferredCap {
    /// It was at least this.
    pub least: u64,
    /// And below this.
    pub below: u64,
    /// What it was taken to be.
    pub used: u64,
}

/// How far a replay is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplayProgress {
    /// Events done, in this run.
    pub done: u64,
    /// Events in all.
    pub total: u64,
}
