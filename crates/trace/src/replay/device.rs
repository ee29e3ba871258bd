//! The recording of one device with the interpretation that reproduces it. What-ifs are answered from here: the proof
//! is found once, and each what-if is one run, or one for each address order.

use warpool::driver::platform::Instant;
use warpool::memory::Settings;
use warpool::memory::report::{SegmentInfo, TraceEntry};

use super::ReplayError;
use super::conditions::{Conditions, RecordedConditions, bytes_context, is_same_device};
use super::infer::Inference;
use super::options::{ADDRESS_ORDERS, AllocatorChoice, ReplayOptions, WhatIf};
use super::orders::{OrderOptions, OrderResults, first_failure, fits, run_control, run_orders};
use super::prove::{CAPACITY_MAX, Proof, default_capacity, recorded_allocator};
use super::recording::{DeviceRecording, RecordedTime, Survey};
use super::report::{AddressOrders, InferredLimit, Outcome, ReplayReport, Steady};
use super::run::{OnProgress, Run, RunResult};
use crate::budget::Budget;
use crate::cards::DeviceMemory;
use crate::parallel::threads_available;

/// The recording of one device, replayed as recorded.
pub struct DeviceReplay<'a> {
    device: u32,
    events: &'a [TraceEntry],
    segments: Vec<&'a SegmentInfo>,
    survey: Survey,
    recorded_time: Option<RecordedTime>,
    /// The settings of the snapshot.
    settings: Settings,
    proof: Proof,
    /// The memory of the device on which the recording is reproduced.
    capacity: u64,
    /// The device that it was recorded on, as far as known.
    card: DeviceMemory,
    budget: Budget,
    proof_seconds: f64,
}

impl<'a> DeviceReplay<'a> {
    pub(super) fn new(
        device: u32,
        events: &'a [TraceEntry],
        segments: Vec<&'a SegmentInfo>,
        settings: &Settings,
        recorded_time: Option<RecordedTime>,
        progress: OnProgress<'_>,
        budget: &Budget,
    ) -> Result<Self, ReplayError> {
        let start = Instant::now();
        let survey = Survey::new(device, events, &segments)?;
        let steady_from_us = recorded_time.map(RecordedTime::midpoint_us);
        let recording = DeviceRecording { device, events, segments: &segments, survey: &survey, steady_from_us };
        let proof = Proof::find(recording, settings, progress, budget)?;
        let capacity = proof.interpretation.capacity(recording, budget)?;
        let card = proof.device_memory(recording);
        Ok(Self {
            card,
            device,
            events,
            recorded_time,
            settings: settings.clone(),
            proof,
            capacity,
            budget: budget.clone(),
            segments,
            survey,
            proof_seconds: start.elapsed().as_secs_f64(),
        })
    }

    /// Its number.
    #[must_use]
    pub fn device(&self) -> u32 {
        self.device
    }

    /// Whether the model reproduces the recording.
    #[must_use]
    pub fn is_exact(&self) -> bool {
        self.proof.is_exact() && self.proof.interpretation.plan.unmatched_frees == 0
    }

    /// How many what-ifs there is memory for at once, if each takes as much as the recorded program.
    pub(crate) fn runs_at_once(&self) -> usize {
        const BYTES_MIN: u64 = 32 << 20;
        let each = self.proof.result.as_ref().map_or(0, |result| result.bytes_taken);
        let each = each.saturating_mul(3).div_euclid(2).max(BYTES_MIN);
        usize::try_from(self.budget.left() / each).unwrap_or(usize::MAX).max(1)
    }

    /// The answer to a what-if. Of `options` the orders, the threads and the progress count.
    ///
    /// # Errors
    /// If its settings are invalid, it needs too much memory, or the allocator fails other than for lack of memory.
    pub fn report(&self, what_if: &WhatIf, options: &ReplayOptions<'_>) -> Result<ReplayReport, ReplayError> {
        let start = Instant::now();
        let conditions = Conditions::new(self.recorded_conditions(), what_if).map_err(ReplayError::Changes)?;
        let answer = self.answer(&conditions, options).map_err(|error| error.with_limit(&self.budget))?;
        let mut report = ReplayReport { device: self.device, ..ReplayReport::default() };
        self.proof.add_to(self.recording(), &mut report);
        report.recorded_seconds = self.recorded_time.map(RecordedTime::seconds);
        report.steady =
            report.recorded_seconds.map(|seconds| Steady { recorded_seconds: seconds / 2.0, ..Steady::default() });
        report.orders = answer.orders;
        if options.rounds > 1 {
            // In one address order: recorded addresses as far as they apply, then upwards.
            let run = self.run(&conditions, self.reproduced().is_some());
            let rounds = run.run_rounds(options.rounds, options.progress);
            report.rounds = rounds.map_err(|error| error.with_limit(&self.budget))?;
        }
        report.control = answer.control;
        self.add_result(answer.worst, &mut report);
        report.in_force = conditions.in_force;
        report.warnings.extend(conditions.warnings);
        warn(conditions.allocator, conditions.is_recorded, &mut report);
        report.replay_seconds = self.proof_seconds + start.elapsed().as_secs_f64();
        Ok(report)
    }

    /// The first address order in which a what-if does not fit; `None` if it fits in all of them. Like
    /// [`report`](Self::report) without the figures: starts with the order `tried_first`, and stops at the first order
    /// that fails.
    pub(crate) fn first_failure(
        &self,
        what_if: &WhatIf,
        orders: u32,
        tried_first: u32,
    ) -> Result<Option<u32>, ReplayError> {
        let conditions = Conditions::new(self.recorded_conditions(), what_if).map_err(ReplayError::Changes)?;
        let reproduced = self.reproduced();
        if let Some(result) = reproduced.filter(|_| conditions.is_recorded) {
            return Ok((!fits(result)).then_some(0));
        }
        let run = self.run(&conditions, reproduced.is_some());
        first_failure(&run, orders, tried_first).map_err(|error| error.with_limit(&self.budget))
    }

    /// A size near `bytes` that counts as another device than the recorded one. On the recorded device with a recorded
    /// limit, the result would depend on the limit and not on the size.
    pub(crate) fn other_capacity(&self, bytes: u64) -> u64 {
        match self.card.bytes_total {
            Some(total) if self.limit().is_some() && is_same_device(bytes, &self.card) => total - total / 1000 - 1,
            _ => bytes,
        }
    }

    /// The inferred part of the recording.
    pub(super) fn inference(&self) -> &Inference {
        &self.proof.interpretation.inference
    }

    /// The events before which `expandable_segments` changed.
    pub(super) fn toggles(&self) -> &[u32] {
        &self.proof.interpretation.toggles
    }

    /// The memory limit of the recorded program.
    pub(crate) fn limit(&self) -> Option<InferredLimit> {
        self.proof.limit()
    }

    /// The settings of the recorded program.
    #[must_use]
    pub fn recorded_settings(&self) -> &Settings {
        &self.settings
    }

    pub(crate) fn events(&self) -> &'a [TraceEntry] {
        self.events
    }

    /// The segments in the snapshot.
    pub(crate) fn segments(&self) -> &[&'a SegmentInfo] {
        &self.segments
    }

    /// The budget of the replays.
    pub(super) fn budget(&self) -> &Budget {
        &self.budget
    }

    /// The device that it was recorded on, as inferred from the recording.
    #[must_use]
    pub fn card(&self) -> &DeviceMemory {
        &self.card
    }

    fn recording(&self) -> DeviceRecording<'_> {
        let steady_from_us = self.recorded_time.map(RecordedTime::midpoint_us);
        let Self { device, events, segments, survey, .. } = self;
        DeviceRecording { device: *device, events, segments, survey, steady_from_us }
    }

    fn recorded_conditions(&self) -> RecordedConditions<'_> {
        RecordedConditions {
            settings: &self.settings,
            settings_inferred: &self.proof.interpretation.inference.settings,
            limit: self.proof.limit(),
            device: &self.card,
            capacity: self.capacity_recorded(),
            capacity_of_ranges: self.capacity,
        }
    }

    /// The memory of the recorded device for what-ifs: that of its card, if known. If its context was smaller than the
    /// simulated one, the size is larger, so that the program has the same memory.
    fn capacity_recorded(&self) -> u64 {
        let Some(total) = self.card.bytes_total else { return self.capacity.max(default_capacity()) };
        let limit = self.proof.limit().map_or(0, |limit| limit.used);
        let used = limit.max(self.proof.interpretation.plan.peak_reserved_bytes);
        total.max(used.saturating_add(bytes_context())).min(CAPACITY_MAX)
    }

    fn answer(&self, conditions: &Conditions, options: &ReplayOptions<'_>) -> Result<Answer, ReplayError> {
        let available = conditions.in_force.bytes_available;
        let reproduced = self.reproduced();
        if let Some(result) = reproduced.filter(|_| conditions.is_recorded) {
            let peak = result.peak_reserved_bytes;
            let fit = u32::from(fits(result));
            let orders = AddressOrders {
                run: 1,
                fit,
                peak_reserved_bytes_least: peak,
                peak_reserved_bytes_most: peak,
                margin_bytes_least: available.filter(|_| fit == 1).map(|bytes| bytes.saturating_sub(peak)),
            };
            return Ok(Answer { worst: result.clone(), orders, control: None });
        }
        let order_options = OrderOptions {
            orders: options.address_orders.unwrap_or(ADDRESS_ORDERS).max(1),
            threads: options.threads.unwrap_or_else(threads_available),
        };
        let run = self.run(conditions, reproduced.is_some());
        let results = run_orders(&run, order_options, options.progress)?;
        let control = match (results.free_from_step, reproduced) {
            (Some(step), Some(_)) if !options.without_control => {
                Some(self.control(step, results.options, options.progress)?)
            }
            _ => None,
        };
        Ok(Answer { orders: results.summary(available), control, worst: results.into_worst() })
    }

    /// The run that reproduces the recording, if one could be started.
    fn reproduced(&self) -> Option<&RunResult> {
        self.proof.result.as_ref().filter(|result| !result.not_started)
    }

    /// The recorded program in several address orders, from a step on.
    fn control(
        &self,
        free_from_step: usize,
        options: OrderOptions,
        progress: OnProgress<'_>,
    ) -> Result<AddressOrders, ReplayError> {
        let recorded = Conditions::new(self.recorded_conditions(), &WhatIf::default());
        let recorded = recorded.map_err(ReplayError::Changes)?;
        let results: OrderResults = run_control(&self.run(&recorded, true), free_from_step, options, progress)?;
        Ok(results.summary(recorded.in_force.bytes_available))
    }

    /// The run under some conditions, with recorded addresses as far as they apply.
    fn run<'r>(&'r self, conditions: &'r Conditions, could_start: bool) -> Run<'r> {
        let interpretation = &self.proof.interpretation;
        let inference = &interpretation.inference;
        let Conditions { settings, allocator, capacity, memory_limit, .. } = conditions;
        Run {
            device: self.device,
            events: self.events,
            steady_from_us: self.recorded_time.map(RecordedTime::midpoint_us),
            inference,
            plan: &interpretation.plan,
            // With `expandable_segments` changed, the program would have had other segments.
            restores_segments: could_start
                && recorded_allocator(&inference.settings) == AllocatorChoice::Caching
                && settings.expandable_segments == inference.settings.expandable_segments,
            allocator: *allocator,
            settings,
            memory_limit: *memory_limit,
            capacity: *capacity,
            expected: None,
            recorded_steps: usize::MAX,
            scatter: None,
            toggles: if conditions.settings_are_recorded { &interpretation.toggles } else { &[] },
            budget: &self.budget,
        }
    }

    fn add_result(&self, result: RunResult, report: &mut ReplayReport) {
        if result.failures_avoided > 0 {
            report.inferred.remarks.push(format!(
                "{} requests that ran out of memory in the recording succeed here; what the program would have done \
                 then is not known",
                result.failures_avoided
            ));
        }
        report.events = self.events.len() as u64;
        report.allocations = self.proof.interpretation.plan.allocations;
        report.peak_live_bytes = result.peak_live_bytes;
        report.peak_reserved_bytes = result.peak_reserved_bytes;
        report.segments_allocated = result.segments_allocated;
        report.retries = result.retries;
        report.ooms = result.ooms;
        report.driver_calls = result.driver_calls;
        report.forced_syncs = result.forced_syncs;
        report.driver_seconds_modelled = result.driver_seconds;
        report.run_seconds = result.run_time.as_secs_f64();
        if let Some(steady) = &mut report.steady {
            steady.driver_calls = result.steady.driver_calls;
            steady.driver_seconds_modelled = result.steady.driver_seconds;
            steady.remap_seconds_modelled = result.steady.remap_seconds;
            steady.bytes_remapped = result.steady.bytes_remapped;
        }
        if let Some((event, oom)) = result.out_of_memory {
            report.outcome = Outcome::OutOfMemory { event, report: oom };
        }
    }
}

/// The answer to a what-if.
struct Answer {
    worst: RunResult,
    orders: AddressOrders,
    control: Option<AddressOrders>,
}

fn warn(allocator: AllocatorChoice, is_recorded: bool, report: &mut ReplayReport) {
    let fidelity = &report.fidelity;
    if !is_recorded && !fidelity.exact {
        report.warnings.push(match (&fidelity.first_difference, fidelity.checked) {
            (Some(first), true) => {
                format!("the model is not proven on this recording ({first}): what-if figures are estimates")
            }
            _ => "the recording has no segments to prove the model with: what-if figures are estimates".to_owned(),
        });
    }
    if allocator == AllocatorChoice::DriverPool {
        // Only the model of the caching allocator was proven.
        let text = "the driver's memory pool is simulated without fragmentation: its reserved bytes are a lower bound";
        report.warnings.push(text.to_owned());
    }
}
