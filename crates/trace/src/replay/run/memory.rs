//! The memory of a simulated device and of its allocator, estimated from what exists on them. A step of a plan adds
//! many objects only if its request is large, so the estimate is made every few hundred steps and before large
//! requests.

use warpool::memory::report::Stats;
use warpool::memory::{Settings, SizeRules};

use super::Run;
use super::restore;
use crate::budget::{Charge, Exceeded};
use crate::replay::plan::Step;
use crate::replay::{ReplayError, infer::InitialState};

/// The memory of an empty device, with its quarantine of freed addresses.
const DEVICE_BYTES: u64 = 24 << 20;
/// The memory of each object, with its share of the tables while these grow.
const STREAM_BYTES: u64 = 3 << 10;
const PAUSED_STREAM_BYTES: u64 = 4 << 10;
const POOL_BYTES: u64 = 3 << 10;
const SEGMENT_BYTES: u64 = 2 << 10;
const BLOCK_BYTES: u64 = 384;
const PENDING_BYTES: u64 = 2 << 10;
/// The memory for one mapped chunk of an expandable segment.
const CHUNK_BYTES: u64 = 768;
const CHUNK_SIZE_MIN: u64 = 2 << 20;

/// The maximum number of calls to restore an initial state, plus this many for each event and block of the recording.
const CALLS_MAX: u64 = 1 << 16;
const CALLS_EACH: u64 = 16;

/// Steps between two estimates.
const STEPS: u32 = 256;
/// Requests of at least this many bytes are counted before they are made.
const LARGE_REQUEST: u64 = 4 << 30;

/// The memory that a device takes out of the budget.
pub(super) struct DeviceMemory {
    charge: Charge,
    /// The part that does not depend on the steps.
    fixed: u64,
    /// The memory of the device.
    capacity: u64,
    may_map: bool,
    pending: u64,
    steps_left: u32,
}

/// Blocks of the initial state that were freed already.
fn pending_at_start(run: &Run<'_>) -> u64 {
    run.plan.initial_blocks.iter().filter(|block| block.paused.is_some()).count() as u64
}

impl DeviceMemory {
    /// For the device of a run, before it exists.
    pub fn new(run: &Run<'_>) -> Result<Self, Exceeded> {
        let plan = run.plan;
        let fixed = DEVICE_BYTES
            + plan.streams.len() as u64 * STREAM_BYTES
            + plan.paused_streams as u64 * PAUSED_STREAM_BYTES
            + plan.pools.len() as u64 * POOL_BYTES;
        let Settings { expandable_segments, .. } = *run.settings;
        let may_map = expandable_segments || !run.toggles.is_empty() || run.inference.initial.is_some();
        let pending = pending_at_start(run);
        let charge = Charge::of(run.budget, fixed)?;
        Ok(Self { charge, fixed, capacity: run.capacity, may_map, pending, steps_left: 0 })
    }

    /// Adds bytes that do not depend on the steps.
    pub fn add(&mut self, bytes: u64) -> Result<(), Exceeded> {
        self.fixed += bytes;
        self.charge.add(bytes)
    }

    /// Adds the memory of the initial state. Refuses a state that needs too many calls to restore.
    pub fn add_restored(&mut self, run: &Run<'_>) -> Result<(), ReplayError> {
        let Some(initial) = run.inference.initial.as_ref().filter(|initial| !initial.is_empty()) else {
            return Ok(());
        };
        let InitialState { heap, .. } = initial;
        let mapped = heap.bytes_reserved() / CHUNK_SIZE_MIN * CHUNK_BYTES;
        let blocks = heap.blocks().len() as u64 * BLOCK_BYTES + heap.segments().len() as u64 * SEGMENT_BYTES;
        let calls = restore::calls_to_restore(initial);
        if calls > CALLS_MAX + CALLS_EACH * (run.events.len() + heap.blocks().len()) as u64 {
            let gib = heap.bytes_reserved() >> 30;
            let reason = format!("{gib} GiB of blocks of at most 1 MiB were reserved before its first event");
            return Err(ReplayError::Implausible { reason });
        }
        self.charge.raise_to(self.fixed + mapped + blocks + calls * BLOCK_BYTES + self.pending * PENDING_BYTES);
        Ok(self.charge.budget().check()?)
    }

    /// All uses have completed, and the initial state is restored.
    pub fn begin_again(&mut self, run: &Run<'_>) {
        self.pending = pending_at_start(run);
    }

    /// The most bytes taken out of the budget at one time.
    pub fn bytes_taken(&self) -> u64 {
        self.charge.bytes()
    }

    /// Whether to count before this step.
    #[inline]
    pub fn is_due(&mut self, step: &Step) -> bool {
        match *step {
            Step::FreeInUse { .. } => self.pending += 1,
            Step::Complete { .. } => self.pending = self.pending.saturating_sub(1),
            Step::Alloc { bytes, .. } | Step::FailedAlloc { bytes, .. } if bytes >= LARGE_REQUEST => {
                self.steps_left = 0;
            }
            _ => {}
        }
        match self.steps_left.checked_sub(1) {
            Some(left) => {
                self.steps_left = left;
                false
            }
            None => true,
        }
    }

    /// Counts what the allocator has, and what the next steps may add.
    pub fn count(&mut self, stats: &Stats, step: &Step) -> Result<(), Exceeded> {
        self.steps_left = STEPS;
        let requested = match *step {
            Step::Alloc { bytes, .. } | Step::FailedAlloc { bytes, .. } => SizeRules::round_to_block(bytes),
            _ => 0,
        };
        let reserved = stats.reserved_bytes.all.current.saturating_add(requested).min(self.capacity);
        let chunks = if self.may_map { reserved / CHUNK_SIZE_MIN } else { 0 };
        // The statistics do not count free blocks of expandable segments; each follows a block in use, or an unmapped
        // range.
        let blocks = 2 * stats.active.all.current + stats.inactive_split.all.current + chunks + u64::from(STEPS) * 2;
        let segments = stats.segment.all.current + u64::from(STEPS);
        let bytes = (self.fixed)
            .saturating_add(chunks.saturating_mul(CHUNK_BYTES))
            .saturating_add(blocks.saturating_mul(BLOCK_BYTES))
            .saturating_add(segments.saturating_mul(SEGMENT_BYTES))
            .saturating_add(self.pending.saturating_mul(PENDING_BYTES));
        self.charge.raise_to(bytes);
        self.charge.budget().check()
    }
}
