//! Runs a plan on one simulated device, in one thread, and compares it with the recording.

mod compare;
mod device;
mod memory;
mod restore;
mod rounds;

use std::time::Duration;

use warpool::driver::DevicePtr;
use warpool::driver::platform::Instant;
use warpool::memory::raw::Allocation;
use warpool::memory::report::{Action, TraceEntry};
use warpool::memory::{DeviceAllocator as _, OomReport, Settings, SizeRules};
use warpool::{Error, Result};

use super::ReplayError;
use super::infer::{Inference, PoolIndex, RetryBounds};
use super::options::{AllocatorChoice, ReplayProgress};
use super::plan::{PausedUse, Plan, SegmentEvent, Step, StreamIndex};
use super::recording::allocates_segment;
use super::report::Difference;
use crate::budget::{Budget, bytes_of};
use compare::Comparison;
use device::{Counters, DEVICE, DeviceOptions, ReplayDevice, SegmentAction};
use memory::DeviceMemory;
use restore::Restore;

pub(super) use restore::calls_to_restore;

/// One run of a plan.
#[derive(Clone, Copy)]
pub(super) struct Run<'a> {
    pub device: u32,
    pub events: &'a [TraceEntry],
    /// When the second half of the recorded time begins.
    pub steady_from_us: Option<i64>,
    pub inference: &'a Inference,
    pub plan: &'a Plan,
    /// Whether the segments of the initial state are restored, or only the blocks that were in use.
    pub restores_segments: bool,
    pub allocator: AllocatorChoice,
    pub settings: &'a Settings,
    pub memory_limit: Option<u64>,
    pub capacity: u64,
    /// If the recording should be reproduced: memory comes from the driver at the recorded addresses, and everything is
    /// compared.
    pub expected: Option<Expected>,
    /// Before this step, memory comes at the recorded addresses as long as the recorded segments are requested.
    pub recorded_steps: usize,
    /// How the driver chooses other addresses; `None` is upwards.
    pub scatter: Option<Scatter>,
    /// The events before which `expandable_segments` changes.
    pub toggles: &'a [u32],
    pub budget: &'a Budget,
}

/// Addresses that are drawn from a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Scatter {
    pub seed: u64,
    pub low: u64,
    pub high: u64,
}

/// What a run is compared with, beside the events.
#[derive(Clone, Copy, Debug)]
pub(super) struct Expected {
    pub retries: RetryBounds,
    /// Whether the run ends at the first wrong address.
    pub stops_at_difference: bool,
}

#[derive(Clone, Debug, Default)]
pub(super) struct RunResult {
    pub addresses_equal: u64,
    pub first_difference: Option<Difference>,
    pub peak_live_bytes: u64,
    pub peak_reserved_bytes: u64,
    pub segments_allocated: u64,
    pub retries: u64,
    pub ooms: u64,
    pub driver_calls: u64,
    pub forced_syncs: u64,
    pub driver_seconds: f64,
    pub steady: SteadyResult,
    /// How long the steps took on this machine.
    pub run_time: Duration,
    /// The first request that ran out of memory: its event, and the allocator's report.
    pub out_of_memory: Option<(u64, Box<OomReport>)>,
    /// The initial state could not be restored; nothing was replayed.
    pub not_started: bool,
    /// Recorded failures that succeeded here.
    pub failures_avoided: u64,
    /// The memory that the run took on this machine, as estimated.
    pub bytes_taken: u64,
    /// The first step whose segments are not the recorded ones; `None` if all are.
    pub leaves_recorded_at: Option<usize>,
}

/// What a run did in the second half of the recorded time.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SteadyResult {
    pub driver_calls: u64,
    pub driver_seconds: f64,
    pub remap_seconds: f64,
    pub bytes_remapped: u64,
}

/// Called now and then during a run.
pub(super) type OnProgress<'a> = Option<&'a dyn Fn(ReplayProgress)>;

impl Run<'_> {
    pub fn run(&self, progress: OnProgress<'_>) -> std::result::Result<RunResult, ReplayError> {
        let mut runner = match self.start(progress)? {
            Ok(runner) => runner,
            Err(not_started) => return Ok(*not_started),
        };
        let before = runner.device.counters();
        let start = Instant::now();
        runner.run_steps()?;
        runner.result.run_time = start.elapsed();
        Ok(runner.finish(before)?)
    }

    /// Makes the device and restores the initial state. If that fails, returns the result of the run.
    fn start<'r>(
        &'r self,
        progress: OnProgress<'r>,
    ) -> std::result::Result<std::result::Result<Runner<'r>, Box<RunResult>>, ReplayError> {
        let plan = self.plan;
        let mut memory = DeviceMemory::new(self)?;
        memory.add(bytes_of::<Option<Allocation>>(plan.slots))?;
        let mut device = ReplayDevice::new(&DeviceOptions {
            allocator: self.allocator,
            settings: self.settings,
            memory_limit: self.memory_limit,
            capacity: self.capacity,
            streams: &plan.streams,
            paused_streams: plan.paused_streams,
            pools: &plan.pools,
        })?;
        if let Some(Scatter { seed, low, high }) = self.scatter {
            device.driver().scatter_addresses(seed, DevicePtr(low)..DevicePtr(high));
        }
        let mut slots = vec![None; plan.slots];
        memory.add_restored(self)?;
        match self.restore(&mut device, &mut slots) {
            Ok(()) => {}
            Err(error) if self.expected.is_some() => {
                let first_difference = Some(self.not_restored(&error));
                return Ok(Err(Box::new(RunResult { first_difference, not_started: true, ..RunResult::default() })));
            }
            Err(Error::OutOfMemory(report)) => return Ok(Err(Box::new(out_of_memory_at_start(&device, report)?))),
            Err(error) => return Err(error.into()),
        }
        if let (Some(limit), Some(caching)) = (self.memory_limit, device.caching()) {
            // Only now: the initial state is restored without a limit.
            caching.set_memory_cap(DEVICE, Some(limit))?;
        }
        device.allocator().reset_peak_stats(DEVICE)?;
        device.allocator().reset_accumulated_stats(DEVICE)?;
        device.take_segment_actions();
        let live_bytes = live_bytes(&slots);
        Ok(Ok(Runner {
            run: self,
            progress,
            round: 0,
            rounds: 1,
            device,
            slots,
            comparison: Comparison::new(self.device, self.events),
            segment_events: &plan.segment_events,
            toggles: self.toggles,
            next_toggle: self.toggles.first().copied().unwrap_or(u32::MAX),
            live_bytes,
            result: RunResult {
                peak_live_bytes: live_bytes,
                leaves_recorded_at: (!self.starts_as_recorded()).then_some(0),
                ..RunResult::default()
            },
            asks_as_recorded: self.starts_as_recorded(),
            completed_late: Vec::new(),
            before_steady: None,
            memory,
        }))
    }

    fn restore(&self, device: &mut ReplayDevice, slots: &mut [Option<Allocation>]) -> Result<()> {
        let Some(initial) = self.inference.initial.as_ref().filter(|initial| !initial.is_empty()) else {
            return Ok(());
        };
        let restore = Restore { initial, inference: self.inference, plan: self.plan, settings: self.settings };
        if self.restores_segments { restore.exactly(device, slots) } else { restore.blocks_only(device, slots) }
    }

    /// Whether the initial state is the recorded one.
    fn starts_as_recorded(&self) -> bool {
        let has_initial = self.inference.initial.as_ref().is_some_and(|initial| !initial.is_empty());
        self.allocator == AllocatorChoice::Caching && (self.restores_segments || !has_initial)
    }

    /// The first step in the second half of the recorded time, or the number of steps.
    fn first_steady_step(&self) -> usize {
        let steps = &self.plan.steps;
        let Some(from_us) = self.steady_from_us else { return steps.len() };
        // Both are sorted, as far as that matters here.
        let event = self.events.partition_point(|event| event.time_us < from_us);
        steps.partition_point(|step| (step.event() as usize) < event)
    }

    fn not_restored(&self, error: &Error) -> Difference {
        Difference {
            device: self.device,
            event: Some(0),
            time_us: None,
            expected: "the state before the first event".to_owned(),
            got: format!("nothing, since that state could not be restored ({error})"),
        }
    }
}

/// The live bytes of a request; an empty request gets no block.
fn live_size(requested: u64) -> u64 {
    if requested == 0 { 0 } else { SizeRules::round_to_block(requested) }
}

/// The live bytes of the blocks in use.
fn live_bytes(slots: &[Option<Allocation>]) -> u64 {
    slots.iter().flatten().map(|block| live_size(block.bytes_requested)).sum()
}

/// The result if the blocks in use at the first event do not fit.
fn out_of_memory_at_start(device: &ReplayDevice, report: Box<OomReport>) -> Result<RunResult> {
    let stats = device.allocator().stats(DEVICE)?;
    Ok(RunResult {
        peak_live_bytes: stats.allocated_bytes.all.peak,
        peak_reserved_bytes: stats.reserved_bytes.all.peak,
        ooms: stats.num_ooms.max(1),
        out_of_memory: Some((0, report)),
        ..RunResult::default()
    })
}

struct Runner<'a> {
    run: &'a Run<'a>,
    progress: OnProgress<'a>,
    /// Which run of the program this is, counted from 0, and of how many.
    round: u32,
    rounds: u32,
    device: ReplayDevice,
    slots: Vec<Option<Allocation>>,
    comparison: Comparison<'a>,
    /// The recorded segment events of the remaining steps.
    segment_events: &'a [SegmentEvent],
    /// The remaining changes of `expandable_segments`, and the event of the first.
    toggles: &'a [u32],
    next_toggle: u32,
    live_bytes: u64,
    result: RunResult,
    /// Whether the same segments as in the recording were requested so far, by actions and sizes.
    asks_as_recorded: bool,
    /// Uses that the recorded allocator waited for in the next step; this one may not wait for them.
    completed_late: Vec<PausedUse>,
    /// The counters at the first step of the second half.
    before_steady: Option<Counters>,
    memory: DeviceMemory,
}

/// Whether the run goes on.
enum Flow {
    Continue,
    Stop,
}

impl<'a> Runner<'a> {
    /// Makes the steps up to the one that stops the run, if any. Returns whether all were made.
    fn run_steps(&mut self) -> std::result::Result<bool, ReplayError> {
        const PROGRESS_STEPS: usize = 1 << 14;
        let steps = &self.run.plan.steps;
        let steady_start = self.run.first_steady_step();
        for (number, step) in steps.iter().enumerate() {
            if number == steady_start {
                self.device.restart_remap_counts();
                self.before_steady = Some(self.device.counters());
            }
            if number % PROGRESS_STEPS == 0 {
                self.report_progress(number, steps.len());
                if self.run.budget.is_stopped() {
                    return Err(ReplayError::Stopped);
                }
            }
            if self.memory.is_due(step) {
                let stats = self.device.allocator().stats(DEVICE)?;
                self.memory.count(&stats, step)?;
            }
            match self.run_step(number, step) {
                Ok(Flow::Continue) => {}
                Ok(Flow::Stop) => return Ok(false),
                // An inference was wrong. This counts as a difference, and another interpretation may be tried.
                Err(error) if self.run.expected.is_some() => {
                    self.comparison.differs(step.event(), "a call without an error", error);
                    return Ok(false);
                }
                Err(error) => return Err(error.into()),
            }
        }
        self.report_progress(steps.len(), steps.len());
        Ok(true)
    }

    #[inline]
    fn run_step(&mut self, number: usize, step: &Step) -> Result<Flow> {
        match *step {
            Step::Alloc { addr, bytes, event, slot, stream, pool } => {
                if event >= self.next_toggle {
                    self.toggle_expandable_segments()?;
                }
                let recorded = self.recorded_segment_events(number);
                let result = if recorded.is_empty() || !self.places_as_recorded(number) {
                    self.device.allocate(stream, pool, bytes)
                } else {
                    self.allocate_at_recorded_address(stream, pool, bytes, recorded)
                };
                self.compare_segments(number, event, recorded)?;
                match result {
                    Ok(block) => {
                        self.live_bytes = self.live_bytes.saturating_add(live_size(bytes));
                        self.result.peak_live_bytes = self.result.peak_live_bytes.max(self.live_bytes);
                        self.comparison.address(event, addr, block.ptr.0);
                        self.slots[slot as usize] = Some(block);
                        if !self.comparison.is_exact() && self.stops_at_difference() {
                            return Ok(Flow::Stop);
                        }
                    }
                    Err(Error::OutOfMemory(report)) => {
                        let expected = format_args!("{bytes} bytes at {addr:#x}");
                        self.comparison.differs(event, expected, "out of memory");
                        self.result.out_of_memory.get_or_insert((u64::from(event), report));
                        return Ok(Flow::Stop);
                    }
                    Err(error) => return Err(error),
                }
            }
            Step::Free { slot, .. } => {
                if let Some(block) = self.slots[slot as usize].take() {
                    self.live_bytes = self.live_bytes.saturating_sub(live_size(block.bytes_requested));
                    self.device.free(block)?;
                }
            }
            Step::FreeInUse { slot, paused, .. } => {
                if let Some(block) = self.slots[slot as usize].take() {
                    self.live_bytes = self.live_bytes.saturating_sub(live_size(block.bytes_requested));
                    self.device.free_in_use(block, paused)?;
                }
            }
            Step::Complete { paused, awaited, .. } => {
                if !awaited {
                    self.device.complete(paused)?;
                } else if self.run.expected.is_none() {
                    // The recorded allocator waits for it in a later step.
                    self.completed_late.push(paused);
                }
            }
            Step::FailedAlloc { bytes, event, stream, pool } => {
                let recorded = self.recorded_segment_events(number);
                match self.device.allocate(stream, pool, bytes) {
                    Ok(block) => {
                        let got = format_args!("{bytes} bytes at {:#x}", block.ptr.0);
                        self.comparison.differs(event, "out of memory", got);
                        self.result.failures_avoided += 1;
                        // The recorded program went on without it.
                        self.device.free(block)?;
                    }
                    Err(Error::OutOfMemory(report)) => {
                        self.result.out_of_memory.get_or_insert((u64::from(event), report));
                    }
                    Err(error) => return Err(error),
                }
                self.compare_segments(number, event, recorded)?;
            }
            Step::ReleasePool { pool, .. } => self.device.release_pool(pool)?,
            Step::Trim { event, pool } => {
                let recorded = self.recorded_segment_events(number);
                self.device.trim(pool)?;
                self.compare_segments(number, event, recorded)?;
            }
        }
        Ok(Flow::Continue)
    }

    /// Changes the setting as the recorded program did.
    #[cold]
    fn toggle_expandable_segments(&mut self) -> Result<()> {
        if let (Some(caching), Some((_, rest))) = (self.device.caching(), self.toggles.split_first()) {
            let done = self.run.toggles.len() - rest.len();
            let expandable_segments = self.run.settings.expandable_segments != (done % 2 == 1);
            caching.set_settings(Settings { expandable_segments, ..self.run.settings.clone() })?;
            self.toggles = rest;
        }
        self.next_toggle = self.toggles.first().copied().unwrap_or(u32::MAX);
        Ok(())
    }

    fn stops_at_difference(&self) -> bool {
        self.run.expected.is_some_and(|expected| expected.stops_at_difference)
    }

    /// The recorded segment events of this step.
    #[inline]
    fn recorded_segment_events(&mut self, number: usize) -> &'a [SegmentEvent] {
        let in_step = |segment: &&SegmentEvent| segment.step as usize == number;
        if self.segment_events.first().is_none_or(|segment| !in_step(&segment)) {
            return &[];
        }
        let count = self.segment_events.iter().take_while(in_step).count();
        let (here, rest) = self.segment_events.split_at(count);
        self.segment_events = rest;
        here
    }

    /// Makes a request for which the recorded allocator got memory from the driver: it comes at the recorded address.
    fn allocate_at_recorded_address(
        &self,
        stream: StreamIndex,
        pool: PoolIndex,
        bytes: u64,
        recorded: &[SegmentEvent],
    ) -> Result<Allocation> {
        let driver = self.device.driver();
        let events = recorded.iter().map(|segment| &self.run.events[segment.event as usize]);
        for event in events {
            let ptr = DevicePtr(event.addr);
            let placed = match event.action {
                Action::SegmentAlloc => driver.place_next_alloc(DEVICE, ptr),
                // Only the first mapping of a segment reserves addresses; for others the placement is cleared below.
                Action::SegmentMap => driver.place_next_reserve(ptr),
                _ => Ok(()),
            };
            // An address that is not possible shows in the comparison.
            if placed.is_err() || event.action == Action::SegmentMap {
                break;
            }
        }
        let outcome = self.device.allocate(stream, pool, bytes);
        driver.clear_placements();
        match outcome {
            // After a difference the address may be in use.
            Err(Error::Driver(_)) => self.device.allocate(stream, pool, bytes),
            outcome => outcome,
        }
    }

    /// Whether memory comes at the recorded addresses in this step.
    #[inline]
    fn places_as_recorded(&self, step: usize) -> bool {
        self.run.expected.is_some() || (self.asks_as_recorded && step < self.run.recorded_steps)
    }

    #[inline]
    fn compare_segments(&mut self, step: usize, event: u32, recorded: &[SegmentEvent]) -> Result<()> {
        if self.device.segment_action_count() > 0 || !recorded.is_empty() {
            let got = self.device.take_segment_actions();
            self.result.segments_allocated += got.iter().filter(|got| allocates_segment(got.action)).count() as u64;
            if self.run.expected.is_some() {
                self.comparison.segments(event, recorded.iter().map(|segment| segment.event), &got);
            } else if self.asks_as_recorded {
                self.note_segments(step, recorded, &got);
            }
        }
        if !self.completed_late.is_empty() {
            let late = std::mem::take(&mut self.completed_late);
            late.into_iter().try_for_each(|paused| self.device.complete(paused))?;
        }
        Ok(())
    }

    /// Notes the first step at which a what-if differs from the recording, in addresses or in segments.
    fn note_segments(&mut self, step: usize, recorded: &[SegmentEvent], got: &[SegmentAction]) {
        let events = || recorded.iter().map(|segment| &self.run.events[segment.event as usize]);
        let same_count = recorded.len() == got.len();
        let is_asked =
            |(event, got): (&TraceEntry, &SegmentAction)| event.action == got.action && event.size == got.bytes;
        self.asks_as_recorded = same_count && events().zip(got).all(is_asked);
        if !(self.asks_as_recorded && events().zip(got).all(|(event, got)| event.addr == got.addr)) {
            self.result.leaves_recorded_at.get_or_insert(step);
        }
    }

    fn finish(mut self, before: Counters) -> Result<RunResult> {
        let after = self.device.counters();
        let stats = self.device.allocator().stats(DEVICE)?;
        let mut result = self.result;
        result.peak_reserved_bytes = stats.reserved_bytes.all.peak;
        result.retries = stats.num_alloc_retries;
        result.ooms = stats.num_ooms;
        result.bytes_taken = self.memory.bytes_taken();
        result.driver_calls = after.calls - before.calls;
        result.forced_syncs = after.syncs - before.syncs;
        result.driver_seconds = (after.time - before.time).as_secs_f64();
        if let Some(before) = self.before_steady {
            result.steady = SteadyResult {
                driver_calls: after.calls - before.calls,
                driver_seconds: (after.time - before.time).as_secs_f64(),
                remap_seconds: after.remaps.time.as_secs_f64(),
                bytes_remapped: after.remaps.bytes,
            };
        }
        if let Some(Expected { retries, .. }) = self.run.expected {
            let plan = self.run.plan;
            self.comparison.total("bytes reserved at peak", plan.peak_reserved_bytes, result.peak_reserved_bytes);
            self.comparison.total("retries", result.retries.clamp(retries.least, retries.most), result.retries);
            self.comparison.total("failed requests", plan.failed_requests, result.ooms);
        }
        (result.addresses_equal, result.first_difference) = self.comparison.finish();
        Ok(result)
    }

    /// Reports progress in events of the recording, of which there are more than steps.
    fn report_progress(&self, step: usize, steps: usize) {
        if let Some(progress) = self.progress {
            let events = self.run.events.len() as u64;
            let done = if steps == 0 { events } else { events * step as u64 / steps as u64 };
            let (before, total) = (events * u64::from(self.round), events * u64::from(self.rounds));
            progress(ReplayProgress { done: before + done, total });
        }
    }
}
