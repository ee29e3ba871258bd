//! Infers what a recording does not contain from its events, before it is replayed: the state at its start, the pool of
//! each allocation, why memory was released, and the memory limit.

mod heap;
mod initial_state;
mod limit;
mod observe;
mod paged;
mod pools;
mod rules;
mod split_releases;
pub(super) mod toggles;

use warpool::memory::Settings;
use warpool::memory::report::{Action, TraceEntry};

pub(super) use heap::{RecordedHeap, RecordedSegment, SegmentId};
pub(super) use initial_state::InitialState;
pub(super) use limit::{LimitBounds, ReleaseCause, RetryBounds};
pub(super) use pools::{DEFAULT_POOL, InferredPools, PoolIndex, PoolOrigin};
pub(super) use rules::{MIB, RecordedRules};

use super::recording::DeviceRecording;
use crate::budget::{Budget, Charge, Exceeded, bytes_of};
use crate::bytes_text::text;
use limit::{ReleaseCauses, infer_causes};
use observe::{Observations, observe};

/// Which evidence in a recording is used.
#[derive(Clone, Copy, Debug)]
pub(super) struct InferOptions {
    /// A pause between two freed segments separates two releases. A slow driver causes pauses too.
    pub pauses_end_releases: bool,
    /// The choice of a block shows which segments were in one pool. If settings changed while the program ran, it may
    /// have had other reasons.
    pub choices_show_pools: bool,
}

/// What was inferred about the recording of one device.
#[derive(Debug)]
pub(super) struct Inference {
    /// The recorded settings, with an assumed order of free blocks.
    pub settings: Settings,
    /// The state before the first event; `None` if there was nothing.
    pub initial: Option<InitialState>,
    pub pools: InferredPools,
    /// The pool of each allocation; the default pool for those beyond the end.
    pub allocation_pools: Vec<PoolIndex>,
    /// Likewise of each failed request.
    pub failed_request_pools: Vec<PoolIndex>,
    /// Releases in the order of their events.
    pub releases: Vec<InferredRelease>,
    pub limit: Option<LimitBounds>,
    pub retries: RetryBounds,
    /// Events that do not match the state before them.
    pub mismatches: u64,
    /// Remarks for the reader.
    pub remarks: Vec<String>,
    /// The charge for the memory of all this.
    #[expect(dead_code, reason = "gives it back when it is dropped")]
    charge: Option<Charge>,
}

/// A release and why it happened.
#[derive(Debug)]
pub(super) struct InferredRelease {
    pub events: std::ops::Range<usize>,
    pub cause: ReleaseCause,
    /// The private pools of the released segments, ascending.
    pub private_pools: Vec<PoolIndex>,
}

impl Inference {
    /// Infers nothing: the history is complete, and everything is in the default pool.
    pub fn none(settings: Settings) -> Self {
        Self {
            settings,
            initial: None,
            pools: InferredPools::default_only(),
            allocation_pools: Vec::new(),
            failed_request_pools: Vec::new(),
            releases: Vec::new(),
            limit: None,
            retries: RetryBounds::default(),
            mismatches: 0,
            remarks: Vec::new(),
            charge: None,
        }
    }

    /// Infers all that the recording shows.
    pub fn new(
        recording: DeviceRecording<'_>,
        settings: Settings,
        options: InferOptions,
        budget: &Budget,
    ) -> Result<Self, Exceeded> {
        let rules = RecordedRules::new(&settings);
        let mut initial = initial_state(recording, &rules, options, budget)?;
        let mut observed = observe_corrected(recording, initial.as_mut(), &rules, options, budget)?;
        // The pools of segments, allocations and failed requests, and the releases with their causes.
        let pool_indices = observed.segments.len() + recording.events.len();
        let released: usize = observed.releases.iter().map(|release| release.segments.len() + 32).sum();
        let charge = Charge::of(budget, bytes_of::<PoolIndex>(3 * (pool_indices + released)))?;
        if !options.choices_show_pools {
            observed.conflicts.clear();
        }
        if !rules.releases_partially() {
            split_releases::split_releases(&mut observed);
        }
        let mut pools = InferredPools::infer(&observed, rules.releases_partially());
        let ReleaseCauses { causes, limit, retries, mut remarks } = infer_causes(&observed, &pools, &rules);
        let failed_request_pools = recorded_pools(recording.events, Action::Oom, &mut pools);
        let allocation_pools = match recording.survey.names_pools {
            true => recorded_pools(recording.events, Action::Alloc, &mut pools),
            false => pools.of_allocations(&observed),
        };
        let releases = observed.releases.iter().zip(causes).map(|(release, cause)| {
            let mut private_pools: Vec<PoolIndex> = release.segments.iter().map(|&id| pools.of_segment(id)).collect();
            private_pools.retain(|&pool| pool != DEFAULT_POOL);
            private_pools.sort_unstable();
            private_pools.dedup();
            InferredRelease { events: release.events.clone(), cause, private_pools }
        });
        let releases = releases.collect();
        if let Some(initial) = &initial {
            remark_on_initial_state(initial, &mut remarks);
        }
        // With settings that changed, blocks were split by other rules than are known here.
        let mismatches = if options.choices_show_pools { observed.mismatches } else { 0 };
        Ok(Self {
            settings,
            initial,
            pools,
            allocation_pools,
            failed_request_pools,
            releases,
            limit,
            retries,
            mismatches,
            remarks,
            charge: Some(charge),
        })
    }
}

/// Whether some segments were freed with a pause between them, so that it matters whether pauses separate releases.
pub(super) fn has_pauses(recording: DeviceRecording<'_>) -> bool {
    observe::has_pauses(recording.events)
}

/// The state before the first event, if the history starts late.
fn initial_state(
    recording: DeviceRecording<'_>,
    rules: &RecordedRules,
    options: InferOptions,
    budget: &Budget,
) -> Result<Option<InitialState>, Exceeded> {
    if !recording.has_segments() || recording.survey.is_complete {
        return Ok(None);
    }
    let initial = InitialState::reconstruct(recording, rules.clone(), budget)?;
    if initial.events_not_undone > 0 {
        // The history may still be complete, with segments in the snapshot that do not match it.
        let from_empty = observe(recording, RecordedHeap::new(rules.clone(), budget), options.pauses_end_releases)?;
        if from_empty.mismatches < initial.events_not_undone {
            return Ok(None);
        }
    }
    Ok(Some(initial))
}

/// Passes over the events. If a block of the initial state was not chosen although it fitted best, it must have been
/// smaller. Where that is possible, it is made smaller, and the pass starts again.
fn observe_corrected(
    recording: DeviceRecording<'_>,
    initial: Option<&mut InitialState>,
    rules: &RecordedRules,
    options: InferOptions,
    budget: &Budget,
) -> Result<Observations, Exceeded> {
    const PASSES_MAX: u32 = 16;
    let observe = |heap: RecordedHeap| observe(recording, heap, options.pauses_end_releases);
    let Some(initial) = initial else { return observe(RecordedHeap::new(rules.clone(), budget)) };
    for _ in 0..PASSES_MAX {
        let observed = observe(initial.heap.clone())?;
        let before = initial.blocks_extended;
        for conflict in &observed.conflicts {
            let extended = initial.heap.extend_block_before(conflict.addr, conflict.excess);
            initial.blocks_extended += u64::from(extended.is_some());
        }
        if initial.blocks_extended == before {
            return Ok(observed);
        }
    }
    observe(initial.heap.clone())
}

/// The pools that the events of that kind name.
fn recorded_pools(events: &[TraceEntry], action: Action, pools: &mut InferredPools) -> Vec<PoolIndex> {
    let events = events.iter().filter(|event| event.action == action);
    events.map(|event| event.pool.map_or(DEFAULT_POOL, |id| pools.recorded(id))).collect()
}

fn remark_on_initial_state(initial: &InitialState, remarks: &mut Vec<String>) {
    // A program that used the device before has at least one small segment.
    if initial.heap.bytes_reserved() > 2 * MIB || initial.bytes_unknown_origin > MIB {
        remarks.push(format!(
            "the history starts late: {} were already reserved, {} of them in use by allocations that are not in the \
             history; this state was reconstructed backward from the snapshot",
            text(initial.heap.bytes_reserved()),
            text(initial.bytes_unknown_origin)
        ));
    }
    if initial.blocks_extended > 0 {
        let count = initial.blocks_extended;
        remarks
            .push(format!("the sizes of {count} blocks from before the history were inferred from later allocations"));
    }
    if initial.events_not_undone > 0 {
        let count = initial.events_not_undone;
        remarks
            .push(format!("{count} events could not be undone: the segments of the snapshot do not match the history"));
    }
}
