//! The moments of a recording that are worth explaining, by name: most allocated, most reserved, out of memory, or an
//! event that the reader names.

use warpool::memory::report::{Action, BlockState, TraceEntry};

use super::categories::{AllocatedBlock, CategoryShare};
use super::holders::Holders;
use super::parts::Parts;
use super::periods;
use crate::replay::{Checkpoints, DeviceReplay, HeapState, ReplayError, RequestInfo, Totals};

/// The kind of a moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MomentKind {
    /// The most was allocated, as `torch.cuda.max_memory_allocated()` counts it: with rounding. The first such moment.
    Allocated,
    /// The most was reserved, and of these moments the one with the most allocated.
    Reserved,
    /// A request ran out of memory.
    OutOfMemory,
    /// After an event that the reader named, or when the snapshot was taken if there is no history.
    Event,
}

impl MomentKind {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Allocated, Self::Reserved, Self::OutOfMemory, Self::Event];

    /// Its name: `allocated`, `reserved`, `oom`, `event`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Allocated => "allocated",
            Self::Reserved => "reserved",
            Self::OutOfMemory => "oom",
            Self::Event => "event",
        }
    }
}

/// Which moment to explain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MomentChoice {
    /// The last out-of-memory event, or else the most allocated.
    #[default]
    Usual,
    /// The most allocated.
    Allocated,
    /// The most reserved.
    Reserved,
    /// The last out-of-memory event.
    OutOfMemory,
    /// After an event, counted from 0.
    Event(u64),
    /// After the last event up to a time, in microseconds after the first.
    Time(u64),
}

/// The explanation of one moment. Requested bytes are those that the program requested, allocated bytes those of its
/// blocks (PyTorch's `allocated_bytes`), reserved bytes those that the allocator has from the driver.
#[derive(Clone, Debug)]
pub struct Moment {
    /// Its kind.
    pub kind: MomentKind,
    /// The event, counted from 0; the state is the one after it. `None` if the moment is before the first event, or
    /// there is no history.
    pub event: Option<u64>,
    /// Microseconds since the first event; `None` if the recording has no times.
    pub time_us: Option<i64>,
    /// Requested bytes of allocated blocks.
    pub bytes_requested: u64,
    /// Bytes of allocated blocks.
    pub bytes_allocated: u64,
    /// The reserved bytes.
    pub bytes_reserved: u64,
    /// The request that failed.
    pub request: Option<FailedRequest>,
    /// Where the device's memory was.
    pub parts: Parts,
    /// The largest free block that the request could have used; of all, if there is none.
    pub largest_free: u64,
    /// Who held it.
    pub holders: Holders,
    /// Its categories, in the order of [`Category::ALL`](crate::Category::ALL), without empty ones.
    pub categories: Vec<CategoryShare>,
    /// The allocated blocks by address, if they were requested.
    pub blocks: Vec<AllocatedBlock>,
}

/// A request that ran out of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FailedRequest {
    /// The requested bytes.
    pub bytes: u64,
    /// The bytes that would have been requested from the driver for it.
    pub bytes_segment: u64,
    /// The free memory of the device, if the recording contains it.
    pub device_free: Option<u64>,
    /// The stream.
    pub stream: u64,
}

/// The largest sum of one kind of bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Peak {
    /// The bytes.
    pub bytes: u64,
    /// The first event after which this was reached; `None` if it was before the first event.
    pub event: Option<u64>,
}

impl Peak {
    fn see(&mut self, bytes: u64, event: usize) {
        if bytes > self.bytes {
            *self = Self { bytes, event: Some(event as u64) };
        }
    }
}

/// The peaks of a history.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Peaks {
    /// The peak of requested bytes.
    pub requested: Peak,
    /// The peak of allocated bytes.
    pub allocated: Peak,
    /// The peak of reserved bytes.
    pub reserved: Peak,
}

/// The results of one pass over the history.
pub(super) struct Survey {
    pub peaks: Peaks,
    /// The most reserved, and of these moments the one with the most allocated.
    most_reserved: (u64, u64, Option<usize>),
    /// The events at which iterations begin.
    pub periods: Vec<usize>,
    /// The bytes allocated then.
    pub allocated_at_periods: Vec<u64>,
    pub ooms: Vec<usize>,
    has_times: bool,
}

impl Survey {
    /// Also returns checkpoints near the moments that it finds.
    pub fn new<'a, 'r>(replay: &'a DeviceReplay<'r>) -> Result<(Self, Checkpoints<'a, 'r>), ReplayError> {
        let events = replay.events();
        let periods = periods::find(events);
        let start = replay.totals_at_start();
        let peak = |bytes| Peak { bytes, event: None };
        let mut survey = Self {
            peaks: Peaks {
                requested: peak(start.bytes_requested),
                allocated: peak(start.bytes_allocated),
                reserved: peak(start.bytes_reserved),
            },
            most_reserved: (start.bytes_reserved, start.bytes_allocated, None),
            allocated_at_periods: Vec::with_capacity(periods.len()),
            periods,
            ooms: Vec::new(),
            has_times: has_times(events),
        };
        let checkpoints = replay.walk(|totals| survey.see(totals, events))?;
        Ok((survey, checkpoints))
    }

    /// Returns whether the state may be needed later.
    fn see(&mut self, totals: &Totals, events: &[TraceEntry]) -> bool {
        let Totals { event, bytes_requested, bytes_allocated, bytes_reserved, .. } = *totals;
        let before = (self.peaks.allocated.bytes, self.most_reserved);
        self.peaks.requested.see(bytes_requested, event);
        self.peaks.allocated.see(bytes_allocated, event);
        self.peaks.reserved.see(bytes_reserved, event);
        if (bytes_reserved, bytes_allocated) > (self.most_reserved.0, self.most_reserved.1) {
            self.most_reserved = (bytes_reserved, bytes_allocated, Some(event));
        }
        if self.periods.get(self.allocated_at_periods.len()) == Some(&event) {
            self.allocated_at_periods.push(bytes_allocated);
        }
        let is_oom = events[event].action == Action::Oom;
        if is_oom {
            self.ooms.push(event);
        }
        is_oom || before != (self.peaks.allocated.bytes, self.most_reserved)
    }

    /// The moments to explain, with their events. The last one is the one that counts.
    pub fn moments(&self, choice: MomentChoice, events: &[TraceEntry]) -> Vec<(MomentKind, Option<usize>)> {
        const MOMENTS_MAX: usize = 16;
        let allocated = || {
            let event = self.peaks.allocated.event.and_then(|event| usize::try_from(event).ok());
            vec![(MomentKind::Allocated, event)]
        };
        let last = events.len().checked_sub(1);
        match choice {
            MomentChoice::Usual | MomentChoice::OutOfMemory if !self.ooms.is_empty() => {
                let from = self.ooms.len().saturating_sub(MOMENTS_MAX);
                self.ooms[from..].iter().map(|&oom| (MomentKind::OutOfMemory, Some(oom))).collect()
            }
            MomentChoice::Usual | MomentChoice::Allocated | MomentChoice::OutOfMemory => allocated(),
            MomentChoice::Reserved => vec![(MomentKind::Reserved, self.most_reserved.2)],
            MomentChoice::Event(event) => {
                let event = usize::try_from(event).unwrap_or(usize::MAX);
                vec![(MomentKind::Event, last.map(|last| event.min(last)))]
            }
            MomentChoice::Time(time_us) => {
                let start = events.first().map_or(0, |event| event.time_us);
                let is_later = |event: &TraceEntry| event.time_us.abs_diff(start) > time_us && event.time_us > start;
                let later = events.iter().position(is_later).unwrap_or(events.len());
                vec![(MomentKind::Event, later.checked_sub(1))]
            }
        }
    }

    /// The time of an event after the first.
    pub fn time_us(&self, events: &[TraceEntry], event: Option<usize>) -> Option<i64> {
        let start = events.first()?.time_us;
        let event = events.get(event?)?;
        self.has_times.then(|| event.time_us.saturating_sub(start))
    }
}

/// Whether events have times: PyTorch before 2.1 and some logs have none.
pub(crate) fn has_times(events: &[TraceEntry]) -> bool {
    let first = events.first().map_or(0, |event| event.time_us);
    first != 0 || events.iter().any(|event| event.time_us != first)
}

/// The largest free block that a request could use; of all, if there is none.
pub(super) fn largest_free(state: &HeapState, request: Option<&RequestInfo>) -> u64 {
    let free = state.blocks.iter().filter(|block| block.state == BlockState::Inactive);
    let usable = free.filter(|block| {
        request.is_none_or(|request| {
            (request.pool, request.stream, request.kind) == (block.pool, block.stream, block.kind)
        })
    });
    usable.map(|block| block.bytes).max().unwrap_or(0)
}
