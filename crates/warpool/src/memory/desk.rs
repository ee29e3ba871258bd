//! What allocators without a cache of their own have for each device: the books under their lock, the share of memory
//! that is set, and what the history wants to know. Each step under the lock is one of `books.rs`; nobody is called
//! while it is held.

use std::sync::Mutex;

use warpool_driver::{DeviceId, DevicePtr, Driver, MemoryInfo, StreamId};

use super::books::Books;
use super::caching::share_of;
use super::history::StackNumbers;
use super::journal::{Cause, Recording};
use super::{
    Action, Allocation, HistoryOptions, MemPoolId, Observers, OomCause, OomReport, Request, Snapshot, SnapshotOptions,
    StackLevel, Stats,
};
use crate::{Device, Error, Result, lock};

pub(crate) struct Desk {
    pub(crate) device: DeviceId,
    pub(crate) bytes_total: u64,
    books: Mutex<Books>,
    fraction: Mutex<f64>,
    recording: Recording,
}

impl Desk {
    pub(crate) fn new(device: &Device, fraction: f64) -> Self {
        Self {
            device: device.id(),
            bytes_total: device.properties().bytes_total,
            books: Mutex::new(Books::new(device.id())),
            fraction: Mutex::new(fraction),
            recording: Recording::default(),
        }
    }

    /// One step under the lock; trackers are told afterwards, without it.
    pub(crate) fn with<R>(&self, observers: &Observers, step: impl FnOnce(&mut Books) -> R) -> R {
        let mut books = lock(&self.books);
        let result = step(&mut books);
        if books.journal.has_news() {
            let events = books.journal.take_news();
            drop(books);
            observers.track(self.device, &events);
        }
        result
    }

    pub(crate) fn find(&self, ptr: DevicePtr) -> Option<Allocation> {
        lock(&self.books).find(ptr)
    }

    /// Gathers what the history wants to know, before the lock is taken.
    pub(crate) fn cause(&self, level: StackLevel, observers: &Observers, driver: &dyn Driver) -> Cause {
        self.recording.cause(level, observers, driver).timed(driver)
    }

    /// The driver's handle of a stream, and its device; asked for once.
    pub(crate) fn raw_of(&self, stream: StreamId, driver: &dyn Driver) -> Result<(u64, DeviceId)> {
        let known = lock(&self.books).raw_of(stream);
        if let Some(raw) = known {
            return Ok(raw);
        }
        let handle = driver.stream_handle(stream)?;
        let raw = (handle.raw.0, handle.device);
        lock(&self.books).know_raw(stream, raw);
        Ok(raw)
    }

    pub(crate) fn fraction(&self) -> f64 {
        *lock(&self.fraction)
    }

    pub(crate) fn set_fraction(&self, fraction: f64) -> Result<()> {
        if !(0.0..=1.0).contains(&fraction) {
            return Err(Error::Fraction { fraction: fraction.to_string() });
        }
        *lock(&self.fraction) = fraction;
        Ok(())
    }

    /// The least of what the fraction and the cap allow.
    pub(crate) fn limit(&self, cap: Option<u64>) -> Option<u64> {
        let fraction = self.fraction();
        let by_fraction = (fraction < 1.0).then(|| share_of(self.bytes_total, fraction));
        [by_fraction, cap].into_iter().flatten().min()
    }

    pub(crate) fn record_history(&self, options: Option<&HistoryOptions>, observers: &Observers) {
        self.with(observers, |books| books.journal.history.set(options.cloned()));
        self.recording.set(options);
    }

    /// Adds the device to a snapshot. `rest` says how much its source holds beyond the blocks.
    pub(crate) fn add_to(
        &self,
        snapshot: &mut Snapshot,
        stacks: &mut StackNumbers,
        options: SnapshotOptions,
        rest: impl FnOnce(&Books) -> u64,
        observers: &Observers,
        cause: &Cause,
    ) {
        self.with(observers, |books| {
            let trace = if options.traces { books.journal.history.copy_to(snapshot, stacks) } else { Vec::new() };
            snapshot.traces.push(trace);
            let rest = if options.pool.is_none_or(MemPoolId::is_default) { rest(books) } else { 0 };
            let segments = books.segment_infos(options.pool, rest, snapshot, stacks);
            snapshot.segments.extend(segments);
            // Shows in the next snapshot only: this one was asked for before it.
            let active = books.stats.active_bytes.all.current;
            books.record(Action::Snapshot, 0, active, 0, MemPoolId::DEFAULT, cause);
        });
    }
}

/// A failure, as far as counters tell it.
pub(crate) struct Shortage<'a> {
    pub(crate) request: &'a Request,
    pub(crate) why: OomCause,
    /// What the source was, or would have been, asked for.
    pub(crate) bytes_segment: u64,
    pub(crate) memory: MemoryInfo,
    pub(crate) limit: Option<u64>,
    pub(crate) stats: &'a Stats,
    pub(crate) capturing: bool,
}

impl Shortage<'_> {
    pub(crate) fn report(&self) -> OomReport {
        let (reserved, active) = (self.stats.reserved_bytes.all.current, self.stats.active_bytes.all.current);
        let allocated = self.stats.allocated_bytes.all.current;
        OomReport {
            device: self.request.device,
            cause: self.why,
            bytes_requested: self.request.bytes,
            bytes_segment: self.bytes_segment,
            bytes_total: self.memory.bytes_total,
            bytes_free: self.memory.bytes_free,
            bytes_limit: self.limit,
            bytes_reserved: reserved,
            bytes_allocated: allocated,
            bytes_pending: active - allocated,
            bytes_private_free: 0,
            bytes_cached: reserved - active,
            // The source does not say how its free memory lies.
            blocks_cached: u64::from(reserved > active),
            bytes_largest_cached: reserved - active,
            // No setting of ours would place it otherwise.
            expandable_segments: true,
            capturing: self.capturing,
        }
    }
}
