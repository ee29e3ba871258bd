//! Drives an allocator through a plan, on one simulated device, in one thread. The inner loop is as short as the plan
//! allows.

use warpool::driver::DevicePtr;
use warpool::memory::{Action, Allocation, OomReport, Settings, TraceEntry};
use warpool::{Error, Result};

use super::check::Check;
use super::machine::{AllocatorChoice, Counters, DEVICE, Machine, Parts};
use super::plan::{Plan, SegmentEvent, Step};
use super::pools::Pools;
use super::report::{Difference, ReplayProgress};
use super::setup;
use super::sizes::round_to_block;
use super::start::Start;

/// One run: what to do, and how.
#[derive(Clone, Copy)]
pub(super) struct Run<'a> {
    pub device: u32,
    pub events: &'a [TraceEntry],
    pub plan: &'a Plan,
    pub start: Option<&'a Start>,
    /// Whether it begins with the recorded segments, or only with what was in use in them.
    pub starts_as_recorded: bool,
    pub pools: &'a Pools,
    pub choice: AllocatorChoice,
    pub settings: &'a Settings,
    pub cap: Option<u64>,
    pub capacity: u64,
    /// Whether it should come out as recorded: memory comes where the recording has it, and everything is compared.
    pub as_recorded: Option<Expected>,
    /// The events before which `expandable_segments` is switched.
    pub switches: &'a [u32],
    pub progress: Option<&'a dyn Fn(ReplayProgress)>,
}

/// What a run as recorded is compared with, beside the events.
#[derive(Clone, Copy, Debug)]
pub(super) struct Expected {
    /// At least and at most: a recording does not count them.
    pub retries: (u64, u64),
    /// Whether nothing beyond the first difference matters.
    pub stops_at_difference: bool,
}

/// What came of it.
#[derive(Debug, Default)]
pub(super) struct Ran {
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
    pub out_of_memory: Option<(u64, Box<OomReport>)>,
    /// The state that the recording began with could not be built; nothing was replayed.
    pub could_not_start: bool,
    /// Recorded failures that were none here.
    pub failures_met: u64,
}

impl Run<'_> {
    pub fn run(&self) -> Result<Ran> {
        let plan = self.plan;
        let mut machine = Machine::new(&Parts {
            choice: self.choice,
            settings: self.settings,
            cap: self.cap,
            capacity: self.capacity,
            streams: &plan.streams,
            lanes: plan.lanes,
            pools: &self.pools.origins,
        })?;
        let mut slots = vec![None; plan.slots];
        if let Some(start) = self.start.filter(|start| setup::is_needed(start)) {
            let scene = setup::Scene { start, plan, pools: self.pools, settings: self.settings };
            let built = if self.starts_as_recorded {
                scene.build(&mut machine, &mut slots)
            } else {
                scene.take_anywhere(&mut machine, &mut slots)
            };
            match built {
                Ok(()) => {}
                Err(error) if self.as_recorded.is_some() => {
                    let first_difference = Some(self.cannot_start(&error));
                    return Ok(Ran { first_difference, could_not_start: true, ..Ran::default() });
                }
                Err(Error::OutOfMemory(report)) => return does_not_fit(&machine, report),
                Err(error) => return Err(error),
            }
        }
        if let (Some(cap), Some(caching)) = (self.cap, machine.caching()) {
            // Not before: what the recording began with is built without it.
            caching.set_memory_cap(DEVICE, Some(cap))?;
        }
        machine.allocator().reset_peak_stats(DEVICE)?;
        machine.allocator().reset_accumulated_stats(DEVICE)?;
        machine.take_seen();
        let before = machine.counters();

        let live = slots.iter().flatten().map(|block: &Allocation| live_bytes(block.bytes_requested)).sum();
        let mut drive = Drive {
            run: self,
            machine,
            slots,
            check: Check::new(self.device, self.events),
            segments: &plan.segment_events,
            switches: self.switches,
            switch_at: self.switches.first().copied().unwrap_or(u32::MAX),
            live,
            ran: Ran { peak_live_bytes: live, ..Ran::default() },
        };
        drive.steps()?;
        drive.finish(before)
    }
}

/// What a request counts for: nothing is nothing.
fn live_bytes(requested: u64) -> u64 {
    if requested == 0 { 0 } else { round_to_block(requested) }
}

/// What the program had when the recording began does not fit already.
fn does_not_fit(machine: &Machine, report: Box<OomReport>) -> Result<Ran> {
    let stats = machine.allocator().stats(DEVICE)?;
    Ok(Ran {
        peak_live_bytes: stats.allocated_bytes.all.peak,
        peak_reserved_bytes: stats.reserved_bytes.all.peak,
        ooms: stats.num_ooms.max(1),
        out_of_memory: Some((0, report)),
        ..Ran::default()
    })
}

impl Run<'_> {
    fn cannot_start(&self, error: &Error) -> Difference {
        Difference {
            device: self.device,
            event: Some(0),
            time_us: 0,
            expected: "a state to begin with".to_owned(),
            got: format!("none, because it could not be rebuilt ({error})"),
        }
    }
}

struct Drive<'a> {
    run: &'a Run<'a>,
    machine: Machine,
    slots: Vec<Option<Allocation>>,
    check: Check<'a>,
    /// The recorded segment events that are still to come.
    segments: &'a [SegmentEvent],
    /// The switches that are still to come, and the event of the first.
    switches: &'a [u32],
    switch_at: u32,
    live: u64,
    ran: Ran,
}

/// Whether to go on.
enum Next {
    Step,
    Stop,
}

impl<'a> Drive<'a> {
    fn steps(&mut self) -> Result<()> {
        const EVERY: usize = 1 << 14;
        let steps = &self.run.plan.steps;
        for (number, step) in steps.iter().enumerate() {
            if number % EVERY == 0 {
                self.report_progress(number, steps.len());
            }
            match self.step(number, step) {
                Ok(Next::Step) => {}
                Ok(Next::Stop) => return Ok(()),
                // What was concluded was wrong; that is a difference, and another conclusion may be tried.
                Err(error) if self.run.as_recorded.is_some() => {
                    self.check.differs(step.event(), "a call that succeeds", error);
                    return Ok(());
                }
                Err(error) => return Err(error),
            }
        }
        self.report_progress(steps.len(), steps.len());
        Ok(())
    }

    #[inline]
    fn step(&mut self, number: usize, step: &Step) -> Result<Next> {
        match *step {
            Step::Alloc { addr, bytes, event, slot, stream, pool } => {
                if event >= self.switch_at {
                    self.switch();
                }
                let recorded = self.recorded_segments(number);
                let result = if recorded.is_empty() {
                    self.machine.allocate(stream, pool, bytes)
                } else {
                    self.allocate_in_place(stream, pool, bytes, recorded)
                };
                self.look_at_segments(event, recorded);
                match result {
                    Ok(block) => {
                        self.live += live_bytes(bytes);
                        self.ran.peak_live_bytes = self.ran.peak_live_bytes.max(self.live);
                        self.check.address(event, addr, block.ptr.0);
                        self.slots[slot as usize] = Some(block);
                        if self.check.first.is_some() && self.stops_at_difference() {
                            return Ok(Next::Stop);
                        }
                    }
                    Err(Error::OutOfMemory(report)) => {
                        self.check.differs(event, format_args!("{bytes} bytes at {addr:#x}"), "out of memory");
                        self.ran.out_of_memory.get_or_insert((u64::from(event), report));
                        return Ok(Next::Stop);
                    }
                    Err(error) => return Err(error),
                }
            }
            Step::Free { slot, .. } => {
                if let Some(block) = self.slots[slot as usize].take() {
                    self.live -= live_bytes(block.bytes_requested);
                    self.machine.free(block)?;
                }
            }
            Step::FreeInUse { slot, place, .. } => {
                if let Some(block) = self.slots[slot as usize].take() {
                    self.live -= live_bytes(block.bytes_requested);
                    self.machine.free_in_use(block, place)?;
                }
            }
            Step::Complete { place, awaited, .. } => {
                // As recorded, the allocator itself is about to wait for it.
                if !awaited || self.run.as_recorded.is_none() {
                    self.machine.complete(place)?;
                }
            }
            Step::Fail { bytes, event, stream, pool } => {
                let recorded = self.recorded_segments(number);
                match self.machine.allocate(stream, pool, bytes) {
                    Ok(block) => {
                        self.check.differs(event, "out of memory", format_args!("{bytes} bytes at {:#x}", block.ptr.0));
                        self.ran.failures_met += 1;
                        // The recorded program went on without it.
                        self.machine.free(block)?;
                    }
                    Err(Error::OutOfMemory(report)) => {
                        self.ran.out_of_memory.get_or_insert((u64::from(event), report));
                    }
                    Err(error) => return Err(error),
                }
                self.look_at_segments(event, recorded);
            }
            Step::EndPool { pool, .. } => self.machine.end_pool(pool)?,
            Step::Trim { event, pool } => {
                let recorded = self.recorded_segments(number);
                self.machine.trim(pool)?;
                self.look_at_segments(event, recorded);
            }
        }
        Ok(Next::Step)
    }

    /// As the recorded program did.
    #[cold]
    fn switch(&mut self) {
        if let (Some(caching), Some((_, rest))) = (self.machine.caching(), self.switches.split_first()) {
            let done = self.run.switches.len() - rest.len();
            let expandable_segments = self.run.settings.expandable_segments != (done % 2 == 1);
            caching.set_settings(Settings { expandable_segments, ..self.run.settings.clone() });
            self.switches = rest;
        }
        self.switch_at = self.switches.first().copied().unwrap_or(u32::MAX);
    }

    fn stops_at_difference(&self) -> bool {
        self.run.as_recorded.is_some_and(|expected| expected.stops_at_difference)
    }

    /// What the recorded allocator did with the driver in this step.
    #[inline]
    fn recorded_segments(&mut self, number: usize) -> &'a [SegmentEvent] {
        let is_here = |segment: &&SegmentEvent| segment.step as usize == number;
        if self.segments.first().is_none_or(|segment| !is_here(&segment)) {
            return &[];
        }
        let count = self.segments.iter().take_while(is_here).count();
        let (here, rest) = self.segments.split_at(count);
        self.segments = rest;
        here
    }

    /// A request for which the recorded allocator got memory: it comes where it came then.
    fn allocate_in_place(&self, stream: u16, pool: u16, bytes: u64, recorded: &[SegmentEvent]) -> Result<Allocation> {
        if self.run.as_recorded.is_none() {
            return self.machine.allocate(stream, pool, bytes);
        }
        let driver = self.machine.driver();
        let events = recorded.iter().map(|segment| &self.run.events[segment.event as usize]);
        for event in events {
            let ptr = DevicePtr(event.addr);
            let placed = match event.action {
                Action::SegmentAlloc => driver.place_next_alloc(DEVICE, ptr),
                // Only the first piece of a range is a reservation; for others the word is taken back.
                Action::SegmentMap => driver.place_next_reserve(ptr),
                _ => Ok(()),
            };
            // A place that cannot be is one that the recording cannot be believed for; the comparison will say so.
            if placed.is_err() {
                break;
            }
            if event.action == Action::SegmentMap {
                break;
            }
        }
        let outcome = self.machine.allocate(stream, pool, bytes);
        driver.clear_placements();
        match outcome {
            // After a difference something else may lie there.
            Err(Error::Driver(_)) => self.machine.allocate(stream, pool, bytes),
            outcome => outcome,
        }
    }

    #[inline]
    fn look_at_segments(&mut self, event: u32, recorded: &[SegmentEvent]) {
        if self.machine.seen_count() > 0 || !recorded.is_empty() {
            let seen = self.machine.take_seen();
            let is_fetch = |action| matches!(action, Action::SegmentAlloc | Action::SegmentMap);
            self.ran.segments_allocated += seen.iter().filter(|seen| is_fetch(seen.action)).count() as u64;
            if self.run.as_recorded.is_some() {
                self.check.segments(event, recorded.iter().map(|segment| segment.event), &seen);
            }
        }
    }

    fn finish(mut self, before: Counters) -> Result<Ran> {
        let after = self.machine.counters();
        let stats = self.machine.allocator().stats(DEVICE)?;
        let mut ran = self.ran;
        ran.peak_reserved_bytes = stats.reserved_bytes.all.peak;
        ran.retries = stats.num_alloc_retries;
        ran.ooms = stats.num_ooms;
        ran.driver_calls = after.calls - before.calls;
        ran.forced_syncs = after.syncs - before.syncs;
        ran.driver_seconds = (after.time - before.time).as_secs_f64();
        if let Some(expected) = self.run.as_recorded {
            self.check.sums("bytes held at most", self.run.plan.bytes_peak, ran.peak_reserved_bytes);
            let (least, most) = expected.retries;
            self.check.sums("retries", ran.retries.clamp(least, most), ran.retries);
            self.check.sums("failed requests", self.run.plan.failures, ran.ooms);
        }
        ran.addresses_equal = self.check.addresses_equal;
        ran.first_difference = self.check.first;
        Ok(ran)
    }

    /// In events of the recording, of which there are more than steps.
    fn report_progress(&self, step: usize, steps: usize) {
        if let Some(progress) = self.run.progress {
            let total = self.run.events.len() as u64;
            let done = if steps == 0 { total } else { total * step as u64 / steps as u64 };
            progress(ReplayProgress { done, total });
        }
    }
}
