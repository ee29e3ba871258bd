//! The streams that Warpool makes: shared ones, handed out in turn, and exclusive ones, leased.
//!
//! The two never mix: a leased stream is never one that is handed out in turn. All are non-blocking. Nothing
//! here destroys a stream that somebody was given, but for [`Instance::close`](crate::Instance::close), when nobody is left.
//!
//! Locks: each is a leaf, held for a few moves of ids, except while the shared streams of one priority are
//! made, when others that want the same ones wait for them.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};

use warpool_driver::{CaptureState, DeviceId, Driver, PriorityRange, StreamId, StreamOptions};

use crate::{Device, Result, Stream, lock};

/// How many streams of one device and priority are handed out in turn, as in PyTorch.
pub const STREAMS_PER_POOL: usize = 32;

/// The most priorities that pools are kept for, as in PyTorch.
pub const PRIORITIES_MAX: usize = 4;

/// All streams that were made for one device.
pub(crate) struct StreamShelf {
    device: DeviceId,
    range: OnceLock<PriorityRange>,
    rows: [Row; PRIORITIES_MAX],
}

/// The streams of one priority.
#[derive(Default)]
struct Row {
    /// Handed out in turn; made all at once at first use.
    shared: OnceLock<[StreamId; STREAMS_PER_POOL]>,
    turn: AtomicUsize,
    /// Held while the shared ones are made. Between attempts it holds only what could not even be destroyed.
    unfinished: Mutex<Vec<StreamId>>,
    /// Leased before and free again, the longest free first.
    returned: Mutex<VecDeque<StreamId>>,
}

impl StreamShelf {
    pub(crate) fn new(device: DeviceId) -> Self {
        Self { device, range: OnceLock::new(), rows: Default::default() }
    }

    /// The priorities that there are pools for: at most four, from the least urgent on.
    pub(crate) fn range(&self, driver: &dyn Driver) -> Result<PriorityRange> {
        if let Some(&range) = self.range.get() {
            return Ok(range);
        }
        let PriorityRange { least, greatest } = driver.stream_priority_range(self.device)?;
        let range = PriorityRange { least, greatest: greatest.max(least - (PRIORITIES_MAX as i32 - 1)) };
        Ok(*self.range.get_or_init(|| range))
    }

    /// The next stream in turn, at the priority nearest to `priority`.
    pub(crate) fn next(&self, driver: &dyn Driver, priority: i32) -> Result<StreamId> {
        let (index, options) = self.place(driver, priority)?;
        let row = &self.rows[index.0];
        let streams = match row.shared.get() {
            Some(streams) => streams,
            None => row.make_shared(driver, self.device, options)?,
        };
        Ok(streams[row.turn.fetch_add(1, Ordering::Relaxed) % STREAMS_PER_POOL])
    }

    /// A stream that nobody else has, at the priority nearest to `priority`, and the row that it must go back to.
    pub(crate) fn lease(&self, driver: &dyn Driver, priority: i32) -> Result<(StreamId, RowIndex)> {
        let (index, options) = self.place(driver, priority)?;
        let stream = match self.rows[index.0].take_returned(driver)? {
            Some(stream) => stream,
            None => driver.stream_create(self.device, options)?,
        };
        Ok((stream, index))
    }

    /// Takes a leased stream back. No driver call.
    pub(crate) fn unlease(&self, stream: StreamId, row: RowIndex) {
        lock(&self.rows[row.0].returned).push_back(stream);
    }

    /// Destroys every stream that was ever made here. The caller knows that nobody has one.
    pub(crate) fn destroy_all(&self, driver: &dyn Driver) -> Result<()> {
        let mut outcome = Ok(());
        for row in &self.rows {
            let shared = row.shared.get().into_iter().flatten().copied();
            let unfinished = std::mem::take(&mut *lock(&row.unfinished));
            let returned = std::mem::take(&mut *lock(&row.returned));
            for stream in shared.chain(unfinished).chain(returned) {
                outcome = outcome.and(driver.stream_destroy(stream));
            }
        }
        Ok(outcome?)
    }

    /// The row of the priority nearest to `priority`, and how its streams are made.
    fn place(&self, driver: &dyn Driver, priority: i32) -> Result<(RowIndex, StreamOptions)> {
        let range = self.range(driver)?;
        let priority = range.clamp(priority);
        Ok((RowIndex((range.least - priority) as usize), StreamOptions { non_blocking: true, priority }))
    }
}

/// Which row of the shelf a leased stream goes back to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowIndex(usize);

impl Row {
    /// Makes all shared streams, or none: on failure those already made are destroyed.
    fn make_shared(
        &self,
        driver: &dyn Driver,
        device: DeviceId,
        options: StreamOptions,
    ) -> Result<&[StreamId; STREAMS_PER_POOL]> {
        let mut made = lock(&self.unfinished);
        if let Some(streams) = self.shared.get() {
            return Ok(streams);
        }
        while made.len() < STREAMS_PER_POOL {
            match driver.stream_create(device, options) {
                Ok(stream) => made.push(stream),
                Err(error) => {
                    made.retain(|&stream| !destroyed(driver, stream));
                    return Err(error.into());
                }
            }
        }
        let streams = std::mem::take(&mut *made).try_into().expect("exactly as many were made");
        Ok(self.shared.get_or_init(|| streams))
    }

    /// The stream that was returned first and does not capture. Whoever left one capturing may still end that.
    fn take_returned(&self, driver: &dyn Driver) -> Result<Option<StreamId>> {
        // The driver is asked outside the lock, so that a lease can always be dropped, also from a host callback.
        let candidates = lock(&self.returned).len();
        for _ in 0..candidates {
            let Some(stream) = lock(&self.returned).pop_front() else { break };
            let state = driver.capture_state(stream);
            if state == Ok(CaptureState::None) {
                return Ok(Some(stream));
            }
            lock(&self.returned).push_back(stream);
            state?;
        }
        Ok(None)
    }
}

/// Destroys a stream that nobody was given; says so if that fails.
fn destroyed(driver: &dyn Driver, stream: StreamId) -> bool {
    driver
        .stream_destroy(stream)
        .inspect_err(|error| tracing::warn!(%stream, %error, "a stream could not be destroyed and is kept for later"))
        .is_ok()
}

impl Device {
    /// The priorities that pools are kept for. Lower is more urgent; PyTorch's `(0, -3)` on devices that know as many.
    pub fn priority_range(&self) -> Result<PriorityRange> {
        self.state().streams.range(self.driver())
    }

    /// The next shared stream, at the least urgent priority. After [`STREAMS_PER_POOL`] calls the same ones
    /// come again: use [`lease_stream`](Self::lease_stream) where sharing would hurt.
    pub fn pool_stream(&self) -> Result<Stream> {
        self.pool_stream_at(i32::MAX)
    }

    /// The next shared stream at `priority`, clamped into the [range](Self::priority_range).
    pub fn pool_stream_at(&self, priority: i32) -> Result<Stream> {
        Ok(Stream::known(self, self.state().streams.next(self.driver(), priority)?))
    }

    /// The next shared stream at the most urgent priority.
    pub fn high_priority_stream(&self) -> Result<Stream> {
        self.pool_stream_at(i32::MIN)
    }
}
