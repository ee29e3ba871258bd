//! The streams that Warpool creates: shared ones, returned in round-robin order, and exclusive ones, leased.
//!
//! A leased stream is never one of the shared ones. All are non-blocking. They are destroyed only by
//! [`Instance::close`](crate::Instance::close), when no stream is in use any more.
//!
//! Locks: each is a leaf, held only while ids are moved. The exception is the creation of the shared streams of one
//! priority, for which other users of that priority wait.

use std::collections::{BTreeSet, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};

use warpool_driver::{DeviceId, Driver, PriorityRange, StreamId, StreamOptions};

use super::device::Device;
use super::stream::Stream;
use crate::capture_status::CaptureStatus;
use crate::{Result, lock};

/// How many shared streams there are per device and priority, as in PyTorch.
pub const STREAMS_PER_POOL: usize = 32;

/// The maximum number of priorities that have pools, as in PyTorch.
pub const PRIORITIES_MAX: usize = 4;

/// All streams created for one device: one pool per priority.
pub(super) struct StreamPools {
    device: DeviceId,
    range: OnceLock<PriorityRange>,
    by_priority: [StreamPool; PRIORITIES_MAX],
    /// All streams that were ever leased. Their number is the highest number of simultaneous leases.
    leased: Mutex<BTreeSet<StreamId>>,
}

/// The streams of one priority.
#[derive(Default)]
struct StreamPool {
    /// Returned in round-robin order; created all at once at first use.
    shared: OnceLock<[StreamId; STREAMS_PER_POOL]>,
    next: AtomicUsize,
    /// Held while the shared streams are created. Between attempts it contains only streams whose destruction failed.
    unfinished: Mutex<Vec<StreamId>>,
    /// Streams that were leased and returned, the longest idle first.
    idle: Mutex<VecDeque<StreamId>>,
}

impl StreamPools {
    pub(super) fn new(device: DeviceId) -> Self {
        Self { device, range: OnceLock::new(), by_priority: Default::default(), leased: Mutex::default() }
    }

    /// The priorities that have pools: at most four, starting with the least urgent.
    fn range(&self, driver: &dyn Driver) -> Result<PriorityRange> {
        if let Some(&range) = self.range.get() {
            return Ok(range);
        }
        let PriorityRange { least, greatest } = driver.stream_priority_range(self.device)?;
        let range = PriorityRange { least, greatest: greatest.max(least - (PRIORITIES_MAX as i32 - 1)) };
        Ok(*self.range.get_or_init(|| range))
    }

    /// The next shared stream, at the priority nearest to `priority`.
    fn next(&self, driver: &dyn Driver, priority: i32) -> Result<StreamId> {
        let (index, options) = self.pool_of(driver, priority)?;
        let pool = &self.by_priority[index.0];
        let streams = match pool.shared.get() {
            Some(streams) => streams,
            None => pool.create_shared(driver, self.device, options)?,
        };
        Ok(streams[pool.next.fetch_add(1, Ordering::Relaxed) % STREAMS_PER_POOL])
    }

    /// A stream for exclusive use, at the priority nearest to `priority`, and the pool that it must be returned to.
    pub(super) fn lease(&self, driver: &dyn Driver, priority: i32) -> Result<(StreamId, PoolIndex)> {
        let (index, options) = self.pool_of(driver, priority)?;
        let stream = match self.by_priority[index.0].take_idle(driver)? {
            Some(stream) => stream,
            None => {
                let stream = driver.stream_create(self.device, options)?;
                lock(&self.leased).insert(stream);
                stream
            }
        };
        Ok((stream, index))
    }

    /// Whether the stream was created here: it is not destroyed while its [`Instance`](crate::Instance) lives.
    pub(super) fn contain(&self, stream: StreamId) -> bool {
        let mut shared = self.by_priority.iter().filter_map(|pool| pool.shared.get());
        shared.any(|streams| streams.contains(&stream)) || lock(&self.leased).contains(&stream)
    }

    /// Returns a leased stream. Makes no driver call.
    pub(super) fn end_lease(&self, stream: StreamId, pool: PoolIndex) {
        lock(&self.by_priority[pool.0].idle).push_back(stream);
    }

    /// Destroys every stream that was created here. None may be in use.
    pub(super) fn destroy_all(&self, driver: &dyn Driver) -> Result<()> {
        let mut outcome = Ok(());
        for pool in &self.by_priority {
            let shared = pool.shared.get().into_iter().flatten().copied();
            let unfinished = std::mem::take(&mut *lock(&pool.unfinished));
            let idle = std::mem::take(&mut *lock(&pool.idle));
            for stream in shared.chain(unfinished).chain(idle) {
                outcome = outcome.and(driver.stream_destroy(stream));
            }
        }
        Ok(outcome?)
    }

    /// The pool of the priority nearest to `priority`, and how its streams are created.
    fn pool_of(&self, driver: &dyn Driver, priority: i32) -> Result<(PoolIndex, StreamOptions)> {
        let range = self.range(driver)?;
        let priority = range.clamp(priority);
        Ok((PoolIndex((range.least - priority) as usize), StreamOptions { non_blocking: true, priority }))
    }
}

/// Which pool a leased stream is returned to.
#[derive(Clone, Copy, Debug)]
pub(super) struct PoolIndex(usize);

impl StreamPool {
    /// Creates all shared streams, or none: on failure those already created are destroyed.
    fn create_shared(
        &self,
        driver: &dyn Driver,
        device: DeviceId,
        options: StreamOptions,
    ) -> Result<&[StreamId; STREAMS_PER_POOL]> {
        let mut created = lock(&self.unfinished);
        if let Some(streams) = self.shared.get() {
            return Ok(streams);
        }
        while created.len() < STREAMS_PER_POOL {
            match driver.stream_create(device, options) {
                Ok(stream) => created.push(stream),
                Err(error) => {
                    created.retain(|&stream| !try_destroy(driver, stream));
                    return Err(error.into());
                }
            }
        }
        let streams = std::mem::take(&mut *created).try_into().expect("exactly as many were created");
        Ok(self.shared.get_or_init(|| streams))
    }

    /// The longest idle stream that is not capturing: a stream may be returned before its capture has ended.
    fn take_idle(&self, driver: &dyn Driver) -> Result<Option<StreamId>> {
        // The driver is called without the lock, so that a lease can be dropped anywhere, even in a host callback.
        let candidates = lock(&self.idle).len();
        for _ in 0..candidates {
            let Some(stream) = lock(&self.idle).pop_front() else { break };
            let status = CaptureStatus::of_unblocked(driver, stream);
            if status == Ok(CaptureStatus::NotCapturing) {
                return Ok(Some(stream));
            }
            lock(&self.idle).push_back(stream);
            status?;
        }
        Ok(None)
    }
}

/// Destroys a stream that was never handed out; logs a failure.
fn try_destroy(driver: &dyn Driver, stream: StreamId) -> bool {
    driver
        .stream_destroy(stream)
        .inspect_err(|error| tracing::warn!(%stream, %error, "a stream could not be destroyed; it is kept for later"))
        .is_ok()
}

impl Device {
    /// The priorities that have pools. Lower is more urgent; PyTorch's `(0, -3)` on devices that have as many.
    pub fn priority_range(&self) -> Result<PriorityRange> {
        self.state().streams.range(self.driver())
    }

    /// The next shared stream, at the least urgent priority. After [`STREAMS_PER_POOL`] calls the same streams are
    /// returned again: use [`lease_stream`](Self::lease_stream) for one of your own.
    pub fn pool_stream(&self) -> Result<Stream> {
        self.pool_stream_at(i32::MAX)
    }

    /// The next shared stream at `priority`, clamped into the [range](Self::priority_range).
    pub fn pool_stream_at(&self, priority: i32) -> Result<Stream> {
        Ok(Stream::from_id(self, self.state().streams.next(self.driver(), priority)?))
    }

    /// The next shared stream at the most urgent priority.
    pub fn high_priority_stream(&self) -> Result<Stream> {
        self.pool_stream_at(i32::MIN)
    }
}
