//! Runs a program with an allocator on the simulated GPU.
//!
//! Work that other streams do on a freed block is work on a paused stream: it completes when the program says so, or
//! when the allocator waits for it, as in replays of recordings.

use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use warpool::driver::sim::{SimConfig, SimDriver, Timing};
use warpool::driver::{DeviceId, Driver, StreamId, StreamOptions, Streams};

use warpool::memory::raw::Allocation;
use warpool::memory::report::{Action, HistoryOptions, Snapshot, SnapshotOptions, Stack, StackLevel, Stats};
use warpool::memory::{CachingAllocator, DeviceAllocator, MemPoolId, OomReport, PagedAllocator, Settings};
use warpool::{Error, Instance, Result};

use super::{Request, Requests, Step};
use crate::replay::AllocatorChoice;
use crate::stop::Stop;

/// What a program runs with.
#[derive(Clone, Debug)]
pub struct Conditions {
    /// The allocator.
    pub allocator: AllocatorChoice,
    /// Its settings.
    pub settings: Settings,
    /// The memory of each device, with the context; `None` is more than any program needs.
    pub capacity: Option<u64>,
    /// What the context of the program and its modules take of it.
    pub bytes_context: u64,
}

/// How a run ended.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The allocator's statistics of each device at the end.
    pub stats: Vec<Stats>,
    /// The request that ran out of memory; the run ended there.
    pub out_of_memory: Option<OutOfMemory>,
}

/// A request that ran out of memory.
#[derive(Clone, Debug)]
pub struct OutOfMemory {
    /// The step.
    pub step: usize,
    /// What the allocator said.
    pub report: OomReport,
}

/// A run as a snapshot.
#[derive(Debug)]
pub struct Placed {
    /// How it ended.
    pub outcome: Outcome,
    /// The history and the state at the end.
    pub snapshot: Snapshot,
}

/// Ample memory: no program fills it, and the address ranges of expandable segments on it fit in the address space.
const AMPLE: u64 = 1 << 42;

impl Requests {
    /// Runs it. `None` if it was stopped.
    ///
    /// # Errors
    /// Those of the allocator, except that memory ran out.
    pub fn run(&self, conditions: &Conditions, stop: &Stop) -> Result<Option<Outcome>> {
        let mut device = Device::new(self, conditions)?;
        device.run(self, stop, |_| {})
    }

    /// Runs it, recording the history. `None` if it was stopped.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn place(&self, conditions: &Conditions, stop: &Stop) -> Result<Option<Placed>> {
        let mut device = Device::new(self, conditions)?;
        let clock = Arc::new(Clock::default());
        let stacks: Arc<[Stack]> = self.stacks.as_slice().into();
        let observers = device.allocator.observers();
        let now = Arc::clone(&clock);
        observers.set_stack_hook(Some(Arc::new(move || stacks.get(now.stack.load(Ordering::Relaxed)).cloned())));
        let (now, all) = (Arc::clone(&clock), Action::ALL);
        let tracker = observers.attach_history_tracker(&all, Arc::new(move |device, _| now.note(device)));
        let entries_max = self.steps.len().saturating_mul(8).saturating_add(1 << 16);
        let history = HistoryOptions { entries_max, stacks: StackLevel::Alloc, ..HistoryOptions::default() };
        device.allocator.record_history(Some(history))?;
        let outcome = device.run(self, stop, |step| {
            clock.time_us.store(step.time_us, Ordering::Relaxed);
            if let Request::Alloc { stack, .. } = step.request {
                clock.stack.store(stack as usize, Ordering::Relaxed);
            }
        })?;
        let Some(outcome) = outcome else { return Ok(None) };
        // The snapshot is an event itself.
        device.allocator.observers().detach(tracker);
        let mut snapshot = device.allocator.snapshot(SnapshotOptions::default())?;
        clock.set_times(&mut snapshot);
        number_streams(&mut snapshot, &device)?;
        Ok(Some(Placed { outcome, snapshot }))
    }
}

/// The time and stack of the step under way, and the times of all entries of the history.
#[derive(Debug, Default)]
struct Clock {
    time_us: AtomicI64,
    stack: AtomicUsize,
    entries: Mutex<Vec<Vec<i64>>>,
}

impl Clock {
    /// An entry is written now.
    fn note(&self, device: DeviceId) {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        let device = device.0 as usize;
        if entries.len() <= device {
            entries.resize(device + 1, Vec::new());
        }
        entries[device].push(self.time_us.load(Ordering::Relaxed));
    }

    /// Gives entries the program's times in place of the simulated driver's.
    fn set_times(&self, snapshot: &mut Snapshot) {
        let entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        for (device, trace) in snapshot.traces.iter_mut().enumerate() {
            let times = entries.get(device).map_or(&[][..], Vec::as_slice);
            assert_eq!(trace.len(), times.len(), "every entry of the history was seen by the tracker");
            for (entry, &time_us) in trace.iter_mut().zip(times) {
                entry.time_us = time_us;
            }
        }
    }
}

/// Streams get the program's numbers in place of the simulated driver's handles: 0 is each device's default stream.
fn number_streams(snapshot: &mut Snapshot, device: &Device) -> Result<()> {
    let mut handles = Vec::new();
    for streams in &device.streams {
        let of_device = streams.iter().map(|&stream| Ok(device.driver.stream_handle(stream)?.raw.0));
        handles.push(of_device.collect::<Result<Vec<_>>>()?);
    }
    let number = |owner: usize, stream: u64| {
        let found = handles.get(owner).and_then(|handles| handles.iter().position(|&handle| handle == stream));
        found.map_or(stream, |number| number as u64)
    };
    for (owner, trace) in snapshot.traces.iter_mut().enumerate() {
        trace.iter_mut().for_each(|entry| entry.stream = number(owner, entry.stream));
    }
    for segment in &mut snapshot.segments {
        segment.stream = number(usize::try_from(segment.device).unwrap_or(0), segment.stream);
    }
    Ok(())
}

/// The simulated GPUs of a run.
struct Device {
    driver: Arc<SimDriver>,
    allocator: Arc<dyn DeviceAllocator>,
    /// By device and by the program's number.
    streams: Vec<Vec<StreamId>>,
    /// Does the work that freed blocks wait for.
    paused: StreamId,
    blocks: Vec<Option<Allocation>>,
    /// Whether each block that was freed in use was allocated, the oldest first.
    pending: std::collections::VecDeque<bool>,
}

impl Device {
    fn new(program: &Requests, conditions: &Conditions) -> Result<Self> {
        let mut config = SimConfig { queue_depth: usize::MAX, ..SimConfig::default() }.with_devices(program.devices);
        config = config.with_timing(Timing::Model).with_capacity(conditions.capacity.unwrap_or(AMPLE));
        config.devices.iter_mut().for_each(|device| device.bytes_context = conditions.bytes_context);
        let driver = Arc::new(SimDriver::new(config.without_suballocation_tracking()));
        let instance = Instance::new(Arc::clone(&driver) as Arc<dyn Driver>)?;
        let settings = conditions.settings.clone();
        let allocator: Arc<dyn DeviceAllocator> = match conditions.allocator {
            AllocatorChoice::Caching => Arc::new(CachingAllocator::new(&instance, settings)),
            AllocatorChoice::Paged => {
                // Time does not pass as in the program.
                let paged = PagedAllocator::new(&instance, Settings { idle_decay_ms: None, ..settings })?;
                paged.set_adoption(false);
                Arc::new(paged)
            }
            AllocatorChoice::DriverPool => {
                Arc::new(warpool::memory::DriverPoolAllocator::with_settings(&instance, settings))
            }
        };
        let mut streams = Vec::new();
        for device in (0..program.devices).map(DeviceId) {
            let mut of_device = vec![driver.stream_default(device)?];
            for _ in 1..program.streams {
                of_device.push(driver.stream_create(device, StreamOptions::default())?);
            }
            streams.push(of_device);
        }
        let paused = driver.stream_create(DeviceId(0), StreamOptions::default())?;
        driver.pause_stream(paused)?;
        let blocks = vec![None; program.allocations as usize];
        Ok(Self { driver, allocator, streams, paused, blocks, pending: std::collections::VecDeque::new() })
    }

    /// Makes the requests up to one that runs out of memory. `None` if it was stopped.
    fn run(&mut self, program: &Requests, stop: &Stop, before: impl Fn(&Step)) -> Result<Option<Outcome>> {
        const STEPS_BETWEEN_LOOKS: usize = 1 << 12;
        let mut out_of_memory = None;
        for (number, step) in program.steps.iter().enumerate() {
            if number % STEPS_BETWEEN_LOOKS == 0 && stop.is_stopped() {
                return Ok(None);
            }
            before(step);
            match self.step(step.request) {
                Ok(()) => {}
                Err(Error::OutOfMemory(report)) => {
                    out_of_memory = Some(OutOfMemory { step: number, report: *report });
                    break;
                }
                Err(error) => return Err(error),
            }
        }
        let stats = (0..program.devices).map(|device| self.allocator.stats(DeviceId(device)));
        Ok(Some(Outcome { stats: stats.collect::<Result<_>>()?, out_of_memory }))
    }

    fn step(&mut self, request: Request) -> Result<()> {
        match request {
            Request::Alloc { id, bytes, device, stream, .. } => {
                let stream = self.streams[device as usize][stream as usize];
                let request =
                    warpool::memory::raw::Request::new(DeviceId(device), stream, bytes).in_pool(MemPoolId::DEFAULT);
                self.blocks[id as usize] = Some(self.allocator.allocate_raw(request)?);
                Ok(())
            }
            Request::Free { id, in_use } => {
                let Some(block) = self.blocks[id as usize].take() else { return Ok(()) };
                if in_use {
                    let counts = block.ptr.0 != 0;
                    if counts {
                        self.allocator.record_use(block, self.paused)?;
                    }
                    self.pending.push_back(counts);
                }
                self.allocator.free(block)
            }
            Request::Complete => {
                if self.pending.pop_front() == Some(true) {
                    // Nothing is left if the allocator has waited for it.
                    let done_by_wait = self.driver.paused_work(self.paused)? <= self.waiting();
                    if !done_by_wait {
                        self.driver.run_paused(self.paused, 1)?;
                    }
                }
                Ok(())
            }
            Request::Synchronize => {
                self.pending.clear();
                let work = self.driver.paused_work(self.paused)?;
                self.driver.run_paused(self.paused, work)?;
                Ok(())
            }
            Request::EmptyCache { device } => self.allocator.trim(DeviceId(device), MemPoolId::DEFAULT).map(drop),
            Request::Limit { device, millionths } => {
                self.allocator.set_memory_fraction(DeviceId(device), f64::from(millionths) / 1e6)
            }
        }
    }

    /// How many blocks still wait for their work, after the oldest was taken from the list.
    fn waiting(&self) -> u64 {
        self.pending.iter().filter(|&&counts| counts).count() as u64
    }
}
