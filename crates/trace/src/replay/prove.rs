//! Finds the interpretation of a recording that reproduces it. A recording does not contain the order of free blocks,
//! its pools, its memory limit or every change of settings; they are inferred, and confirmed by a replay in which every
//! address and every segment event is as recorded.

use warpool::driver::sim::SimDevice;
use warpool::memory::Settings;
use warpool::memory::report::Action;
use warpool::memory::settings::{Backend, FreeBlockOrder};

use super::ReplayError;
use super::infer::{
    InferOptions, Inference, LimitBounds, MIB, PoolOrigin, RecordedHeap, RecordedRules, has_pauses, toggles,
};
use super::options::AllocatorChoice;
use super::plan::Plan;
use super::recording::{DeviceRecording, is_device_free};
use super::report::{InferredLimit, ReplayReport};
use super::run::{Expected, OnProgress, Run, RunResult, calls_to_restore};
use crate::budget::{Budget, Exceeded};
use crate::cards::DeviceMemory;

/// What was inferred about a recording, and the plan made from it.
pub(super) struct Interpretation {
    pub inference: Inference,
    pub plan: Plan,
    /// The events before which `expandable_segments` changed; the settings have the value before the first.
    pub toggles: Vec<u32>,
    /// Remarks for the reader.
    pub remarks: Vec<String>,
}

impl Interpretation {
    /// Without anything inferred.
    pub fn simple(recording: DeviceRecording<'_>, settings: Settings, budget: &Budget) -> Result<Self, ReplayError> {
        Self::new(recording, Inference::none(settings), budget)
    }

    /// With all that can be inferred.
    fn inferred(
        recording: DeviceRecording<'_>,
        settings: Settings,
        options: InferOptions,
        budget: &Budget,
    ) -> Result<Self, ReplayError> {
        Self::new(recording, Inference::new(recording, settings, options, budget)?, budget)
    }

    fn new(recording: DeviceRecording<'_>, inference: Inference, budget: &Budget) -> Result<Self, ReplayError> {
        let plan = Plan::new(recording.events, &recording.survey.streams, &inference, budget)?;
        let mut remarks = inference.remarks.clone();
        remark_on_pools(&inference, &plan, &mut remarks);
        Ok(Self { inference, plan, toggles: Vec::new(), remarks })
    }

    /// The memory of the device for a replay: an H200's, unless the recording reserved more, or its expandable segments
    /// lie closer together than on such a device.
    pub fn capacity(&self, recording: DeviceRecording<'_>, budget: &Budget) -> Result<u64, Exceeded> {
        const CONTEXT: u64 = 1024 * MIB;
        let chunk = self.inference.settings.large_segment_bytes.max(1);
        let reserved = |total: u64| (total / 8).saturating_mul(9).checked_next_multiple_of(chunk).unwrap_or(u64::MAX);
        let least = self.plan.peak_reserved_bytes.saturating_add(CONTEXT).min(CAPACITY_MAX);
        let capacity = default_capacity().max(least);
        Ok(match self.expandable_segment_distance(recording, budget)? {
            Some(distance) if reserved(capacity) > distance => (distance / chunk * chunk / 9 * 8).max(least),
            _ => capacity,
        })
    }

    /// The least distance between the bases of two expandable segments.
    fn expandable_segment_distance(
        &self,
        recording: DeviceRecording<'_>,
        budget: &Budget,
    ) -> Result<Option<u64>, Exceeded> {
        let Inference { settings, initial, .. } = &self.inference;
        let is_expandable = settings.expandable_segments || recording.survey.maps_segments;
        if settings.backend == Backend::Paged || !is_expandable {
            return Ok(None);
        }
        let mut heap = match initial {
            Some(initial) => initial.heap.expandable_segments_only(),
            None => RecordedHeap::new(RecordedRules::new(settings), budget),
        };
        for event in recording.events {
            budget.check()?;
            match event.action {
                Action::SegmentMap => drop(heap.map(event.addr, event.size, event.stream, None)),
                Action::SegmentUnmap => drop(heap.unmap(event.addr, event.size)),
                _ => {}
            }
        }
        let expandable = heap.segments().iter().filter(|segment| segment.expandable);
        let mut bases: Vec<u64> = expandable.map(|segment| segment.base).collect();
        bases.sort_unstable();
        bases.dedup();
        Ok(bases.windows(2).map(|pair| pair[1] - pair[0]).min())
    }
}

/// The most memory of a simulated device, 1 PiB: sums of such sizes and of addresses do not overflow.
pub(super) const CAPACITY_MAX: u64 = 1 << 50;

/// The memory of an H200.
pub(super) fn default_capacity() -> u64 {
    SimDevice::h200().properties.bytes_total
}

/// An interpretation, and the result of replaying the recording with it.
pub(super) struct Proof {
    pub interpretation: Interpretation,
    pub memory_limit: Option<u64>,
    /// `None` if there is nothing to compare with.
    pub result: Option<RunResult>,
}

impl Proof {
    /// Finds the interpretation that reproduces the recording, or the one that comes closest.
    pub fn find(
        recording: DeviceRecording<'_>,
        settings: &Settings,
        progress: OnProgress<'_>,
        budget: &Budget,
    ) -> Result<Self, ReplayError> {
        if !recording.has_segments() {
            let interpretation = Interpretation::simple(recording, settings.clone(), budget)?;
            return Ok(Self { interpretation, memory_limit: None, result: None });
        }
        Search { recording, settings, progress, budget }.run()
    }

    /// Whether the recording was reproduced.
    pub fn is_exact(&self) -> bool {
        self.result.as_ref().is_some_and(|result| result.first_difference.is_none())
    }

    fn addresses_equal(&self) -> u64 {
        self.result.as_ref().map_or(0, |result| result.addresses_equal)
    }

    /// The memory limit of the recorded program.
    pub fn limit(&self) -> Option<InferredLimit> {
        let bounds = self.interpretation.inference.limit.as_ref()?;
        let &LimitBounds { at_least, below, device_full, device_had, .. } = bounds;
        Some(InferredLimit { at_least, below, used: self.memory_limit?, device_full, device_had })
    }

    /// The device, as inferred from its free memory at out-of-memory events. Logs of other allocators do not have it.
    pub fn device_memory(&self, recording: DeviceRecording<'_>) -> DeviceMemory {
        let initial = self.interpretation.inference.initial.as_ref();
        let mut reserved = initial.map_or(0, |initial| initial.heap.bytes_reserved());
        let mut usable = None;
        for event in recording.events {
            match event.action {
                Action::SegmentAlloc | Action::SegmentMap => reserved = reserved.saturating_add(event.size),
                Action::SegmentFree | Action::SegmentUnmap => reserved = reserved.saturating_sub(event.size),
                Action::Oom if recording.has_segments() && is_device_free(event.addr) => {
                    usable = usable.max(Some(reserved.saturating_add(event.addr)));
                }
                _ => {}
            }
        }
        DeviceMemory::inferred(usable, self.interpretation.plan.peak_reserved_bytes)
    }

    /// Adds what was found to a report.
    pub fn add_to(&self, recording: DeviceRecording<'_>, report: &mut ReplayReport) {
        let Interpretation { inference, plan, remarks, .. } = &self.interpretation;
        let fidelity = &mut report.fidelity;
        fidelity.checked = self.result.is_some();
        fidelity.exact = self.is_exact() && plan.unmatched_frees == 0;
        fidelity.addresses_equal = self.addresses_equal();
        fidelity.addresses_total = plan.allocations;
        fidelity.recorded_peak_reserved_bytes = plan.peak_reserved_bytes;
        fidelity.recorded_segments_allocated = plan.segments_allocated;
        fidelity.first_difference = self.result.as_ref().and_then(|result| result.first_difference.clone());
        let inferred = &mut report.inferred;
        inferred.free_block_order = inference.settings.free_block_order;
        inferred.memory_limit = self.limit();
        for origin in &plan.pools {
            match origin {
                PoolOrigin::Recorded(id) if id.is_default() => {}
                PoolOrigin::Recorded(id) => inferred.pools_recorded.push(*id),
                PoolOrigin::Inferred => inferred.pools_inferred += 1,
            }
        }
        inferred.segments_inferred += inference.pools.segments_inferred();
        inferred.segments_assumed += inference.pools.segments_assumed();
        if let Some(initial) = &inference.initial {
            inferred.bytes_unknown_origin += initial.bytes_unknown_origin;
            inferred.bytes_reserved_at_start += initial.heap.bytes_reserved();
        }
        inferred.remarks.extend(remarks.iter().cloned());
        if plan.unmatched_frees > 0 {
            let (count, device) = (plan.unmatched_frees, recording.device);
            inferred.remarks.push(format!("{count} frees on device {device} have no matching allocation"));
        }
    }
}

/// The search for an interpretation.
#[derive(Clone, Copy)]
struct Search<'a> {
    recording: DeviceRecording<'a>,
    /// The recorded settings.
    settings: &'a Settings,
    progress: OnProgress<'a>,
    budget: &'a Budget,
}

impl Search<'_> {
    /// Tries the simple interpretation first, then all that can be inferred: in both orders of free blocks, with and
    /// without pauses as evidence, with the likely limits, and at last with changes of `expandable_segments`. If none
    /// reproduces the recording, returns the one with the most equal addresses.
    fn run(&self) -> Result<Proof, ReplayError> {
        if self.settings.backend == Backend::Paged {
            return self.run_paged();
        }
        let mut best: Option<Proof> = None;
        if self.recording.survey.is_simple {
            let settings = self.ordered(self.orders()[0]);
            let proof = self.attempt(Interpretation::simple(self.recording, settings, self.budget)?, None)?;
            if proof.is_exact() {
                return Ok(proof);
            }
            best = Some(proof);
        }
        let pauses: &[bool] = if has_pauses(self.recording) { &[true, false] } else { &[false] };
        for (order, &pauses_end_releases) in
            self.orders().into_iter().flat_map(|order| pauses.iter().map(move |pauses| (order, pauses)))
        {
            let options = InferOptions { pauses_end_releases, choices_show_pools: true };
            let proof = self.attempt_limits(order, options, &mut best)?;
            if let Some(proof) = proof {
                return Ok(proof);
            }
        }
        let best = best.expect("at least one interpretation was tried");
        if toggles::are_likely(self.recording, self.settings.expandable_segments) {
            return self.attempt_toggles(best);
        }
        Ok(best)
    }

    /// The one interpretation of a recording of the paged allocator, with the likely limits in turn: the first that is
    /// exact, or else the one that comes closest.
    fn run_paged(&self) -> Result<Proof, ReplayError> {
        let (recording, settings) = (self.recording, self.settings.clone());
        if recording.survey.is_complete {
            let mut best: Option<Proof> = None;
            for number in 0.. {
                let inference = Inference::of_paged(recording, settings.clone(), self.budget)?;
                let limits = inference.limit.as_ref().map_or(&[][..], |limit| &limit.candidates);
                let (limit, is_last) = (limits.get(number).copied(), number + 1 >= limits.len());
                let proof = self.attempt(Interpretation::new(recording, inference, self.budget)?, limit)?;
                if proof.is_exact() {
                    return Ok(proof);
                }
                if best.as_ref().is_none_or(|best| best.addresses_equal() < proof.addresses_equal()) {
                    best = Some(proof);
                }
                if is_last {
                    break;
                }
            }
            return Ok(best.expect("at least one was tried"));
        }
        let options = InferOptions { pauses_end_releases: false, choices_show_pools: false };
        let mut interpretation = Interpretation::inferred(recording, settings, options, self.budget)?;
        let remark = "the history of the paged allocator does not begin with the program; only such ones are exact";
        interpretation.remarks.push(remark.to_owned());
        self.attempt(interpretation, None)
    }

    /// Tries the likely limits in turn. Returns the proof that is exact; keeps the best otherwise.
    fn attempt_limits(
        &self,
        order: FreeBlockOrder,
        options: InferOptions,
        best: &mut Option<Proof>,
    ) -> Result<Option<Proof>, ReplayError> {
        let mut number = 0;
        loop {
            let settings = self.ordered(order);
            let interpretation = Interpretation::inferred(self.recording, settings, options, self.budget)?;
            let limits = interpretation.inference.limit.as_ref().map_or(&[][..], |limit| &limit.candidates);
            let (limit, count) = (limits.get(number).copied(), limits.len());
            let proof = self.attempt(interpretation, limit)?;
            if proof.is_exact() {
                return Ok(Some(proof));
            }
            if best.as_ref().is_none_or(|best| best.addresses_equal() < proof.addresses_equal()) {
                *best = Some(proof);
            }
            number += 1;
            if number >= count {
                return Ok(None);
            }
        }
    }

    /// Tries interpretations in which `expandable_segments` changed while the program ran.
    fn attempt_toggles(&self, mut best: Proof) -> Result<Proof, ReplayError> {
        let first = toggles::first_value(self.recording.events).unwrap_or(self.settings.expandable_segments);
        for order in self.orders() {
            let settings = Settings { expandable_segments: first, ..self.ordered(order) };
            let proof = self.attempt_toggles_from(settings)?;
            if proof.is_exact() || best.addresses_equal() < proof.addresses_equal() {
                best = proof;
            }
            if best.is_exact() {
                break;
            }
        }
        let remark = match (best.is_exact(), best.interpretation.toggles.len()) {
            (true, 0) => format!("expandable_segments was {first} for all events, and changed before the snapshot"),
            (true, count) => format!(
                "expandable_segments changed {count} times while the program ran; the events were inferred from the \
                 allocations behind them"
            ),
            (false, _) => {
                "expandable_segments changed while the program ran; the events could not be inferred".to_owned()
            }
        };
        best.interpretation.remarks.push(remark);
        Ok(best)
    }

    /// Searches for changes of `expandable_segments`, which starts as in `settings`.
    fn attempt_toggles_from(&self, settings: Settings) -> Result<Proof, ReplayError> {
        let recording = self.recording;
        let options = InferOptions { pauses_end_releases: has_pauses(recording), choices_show_pools: false };
        let mut interpretation = match recording.survey.is_simple {
            true => Interpretation::simple(recording, settings, self.budget)?,
            false => Interpretation::inferred(recording, settings, options, self.budget)?,
        };
        let limit = interpretation.inference.limit.as_ref().and_then(|limit| limit.candidates.first().copied());
        let plan = &interpretation.plan;
        let to_restore = interpretation.inference.initial.as_ref().map_or(0, calls_to_restore);
        let to_start = 1_000 + 4 * (plan.streams.len() + plan.pools.len() + plan.slots);
        let to_start = to_start.saturating_add(usize::try_from(to_restore).unwrap_or(usize::MAX));
        interpretation.toggles = toggles::search(recording.events, to_start, |tried| {
            let run = self.run_as_recorded(&interpretation, limit)?;
            let expected = run.expected.map(|expected| Expected { stops_at_difference: true, ..expected });
            let result = Run { toggles: tried, expected, ..run }.run(None)?;
            let event = |event: u64| usize::try_from(event).expect("the index of an event");
            let end = recording.events.len();
            Ok::<_, ReplayError>(result.first_difference.map(|first| first.event.map_or(end, event)))
        })?;
        self.attempt(interpretation, limit)
    }

    fn attempt(&self, interpretation: Interpretation, memory_limit: Option<u64>) -> Result<Proof, ReplayError> {
        let result = self.run_as_recorded(&interpretation, memory_limit)?.run(self.progress)?;
        Ok(Proof { interpretation, memory_limit, result: Some(result) })
    }

    fn run_as_recorded<'r>(
        &'r self,
        interpretation: &'r Interpretation,
        memory_limit: Option<u64>,
    ) -> Result<Run<'r>, ReplayError> {
        let inference = &interpretation.inference;
        let allocator = recorded_allocator(&inference.settings);
        Ok(Run {
            device: self.recording.device,
            events: self.recording.events,
            steady_from_us: self.recording.steady_from_us,
            inference,
            plan: &interpretation.plan,
            restores_segments: allocator == AllocatorChoice::Caching,
            allocator,
            settings: &inference.settings,
            memory_limit,
            capacity: interpretation.capacity(self.recording, self.budget)?,
            expected: Some(Expected { retries: inference.retries, stops_at_difference: false }),
            recorded_steps: usize::MAX,
            scatter: None,
            toggles: &interpretation.toggles,
            budget: self.budget,
        })
    }

    /// The orders of free blocks, the likelier first. PyTorch names pools in its history since the version that changed
    /// the order.
    fn orders(&self) -> [FreeBlockOrder; 2] {
        match self.recording.survey.names_pools {
            true => [FreeBlockOrder::Registration, FreeBlockOrder::Address],
            false => [FreeBlockOrder::Address, FreeBlockOrder::Registration],
        }
    }

    fn ordered(&self, free_block_order: FreeBlockOrder) -> Settings {
        Settings { free_block_order, ..self.settings.clone() }
    }
}

/// The allocator that the recorded program used.
pub(super) fn recorded_allocator(settings: &Settings) -> AllocatorChoice {
    match settings.backend {
        Backend::Paged => AllocatorChoice::Paged,
        Backend::Native | Backend::CudaMallocAsync => AllocatorChoice::Caching,
    }
}

fn remark_on_pools(inference: &Inference, plan: &Plan, remarks: &mut Vec<String>) {
    let pools = &inference.pools;
    let inferred = plan.pools.iter().filter(|&&origin| origin == PoolOrigin::Inferred).count();
    if inferred > 0 {
        remarks.push(format!(
            "the recording does not name the pools of segments that were freed before the snapshot: {} segments were \
             inferred to be in {inferred} private pools, and {} were assumed to be in the default pool",
            pools.segments_inferred(),
            pools.segments_assumed()
        ));
    }
    if pools.conflicts_left() > 0 {
        let count = pools.conflicts_left();
        remarks
            .push(format!("{count} choices of the recorded allocator do not fit any assignment of segments to pools"));
    }
    if inference.mismatches > 0 {
        remarks.push(format!("{} events do not match the state before them", inference.mismatches));
    }
}
