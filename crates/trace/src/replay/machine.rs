//! The simulated GPU that a recording is replayed on, with the allocator under test, the recorded streams and pools,
//! and our lanes. It does what it is told, one call at a time; what to do is in `plan.rs`, whether it went as recorded
//! in `check.rs`.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use warpool::driver::sim::{SimConfig, SimDriver, Timing};
use warpool::driver::{Call, DeviceId, Driver, StreamId, StreamOptions, Streams};
use warpool::memory::{
    Action, Allocation, CachingAllocator, DeviceAllocator, DriverPoolAllocator, MemPoolId, PoolOptions, Request,
    Settings,
};
use warpool::{Error, Instance, Result};

use super::lanes::Place;
use super::pools::{PoolIndex, PoolOrigin};

/// The device that everything is replayed on.
pub(super) const DEVICE: DeviceId = DeviceId(0);

/// Which allocator is replayed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AllocatorChoice {
    /// [`CachingAllocator`]: PyTorch's own.
    #[default]
    Caching,
    /// [`DriverPoolAllocator`]: the driver's async pool.
    DriverPool,
}

impl AllocatorChoice {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Caching, Self::DriverPool];

    /// Its name: `caching`, `driver-pool`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Caching => "caching",
            Self::DriverPool => "driver-pool",
        }
    }

    /// The one of that name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|choice| choice.name() == name)
    }
}

/// Something that an allocator did with the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Seen {
    pub action: Action,
    pub addr: u64,
    pub bytes: u64,
}

/// What was seen, shared with the allocator's tracker.
#[derive(Debug, Default)]
struct Log {
    entries: Mutex<Vec<Seen>>,
    count: AtomicUsize,
}

/// The counters that a report needs, at one moment.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counters {
    pub calls: u64,
    pub syncs: u64,
    pub time: Duration,
}

/// What a machine is put together from.
#[derive(Clone, Copy, Debug)]
pub(super) struct Parts<'a> {
    pub choice: AllocatorChoice,
    pub settings: &'a Settings,
    /// A limit beside those of the settings. The caching allocator gets it later, from its user.
    pub cap: Option<u64>,
    /// The memory of the device.
    pub capacity: u64,
    /// Recorded streams, ascending.
    pub streams: &'a [u64],
    pub lanes: usize,
    pub pools: &'a [PoolOrigin],
}

/// The machine.
pub(super) struct Machine {
    driver: Arc<SimDriver>,
    allocator: Arc<dyn DeviceAllocator>,
    /// The same, where it is the caching one.
    caching: Option<Arc<CachingAllocator>>,
    streams: Vec<StreamId>,
    lanes: Vec<LaneState>,
    pools: Vec<Option<MemPoolId>>,
    log: Arc<Log>,
}

struct LaneState {
    stream: StreamId,
    /// Blocks that were put on it.
    queued: u64,
}

impl Machine {
    pub fn new(parts: &Parts<'_>) -> Result<Self> {
        let &Parts { choice, settings, cap, capacity, streams, lanes, pools } = parts;
        // Nothing runs here but marks in lanes, which must not be let through because there are many.
        let mut config = SimConfig { queue_depth: usize::MAX, ..SimConfig::default() };
        config = config.with_timing(Timing::Model).with_capacity(capacity).without_suballocation_tracking();
        let driver = Arc::new(SimDriver::new(config));
        let instance = Instance::new(Arc::clone(&driver) as Arc<dyn Driver>)?;
        let (allocator, caching): (Arc<dyn DeviceAllocator>, _) = match choice {
            AllocatorChoice::Caching => {
                let caching = Arc::new(CachingAllocator::new(&instance, settings.clone()));
                (Arc::clone(&caching) as Arc<dyn DeviceAllocator>, Some(caching))
            }
            AllocatorChoice::DriverPool => {
                let settings = Settings { memory_cap_bytes: settings.memory_cap_bytes.or(cap), ..settings.clone() };
                (Arc::new(DriverPoolAllocator::with_settings(&instance, settings)), None)
            }
        };
        // In the recorded order, so that what is sorted by stream is sorted alike.
        let default = driver.stream_default(DEVICE)?;
        let created = streams.iter().map(|&stream| {
            if stream == 0 { Ok(default) } else { driver.stream_create(DEVICE, StreamOptions::default()) }
        });
        let streams = created.collect::<std::result::Result<_, _>>()?;
        let lanes = (0..lanes).map(|_| {
            let stream = driver.stream_create(DEVICE, StreamOptions::default())?;
            driver.pause_stream(stream)?;
            Ok(LaneState { stream, queued: 0 })
        });
        let lanes = lanes.collect::<Result<_>>()?;
        let pools = pools.iter().map(|&origin| make_pool(&*allocator, origin)).collect::<Result<_>>()?;
        let log = Arc::new(Log::default());
        let actions = [Action::SegmentAlloc, Action::SegmentFree, Action::SegmentMap, Action::SegmentUnmap];
        let shared = Arc::clone(&log);
        allocator.observers().attach_tracker(
            &actions,
            Arc::new(move |_, event| {
                let seen = Seen { action: event.action, addr: event.addr, bytes: event.size };
                shared.entries.lock().unwrap_or_else(PoisonError::into_inner).push(seen);
                shared.count.fetch_add(1, Ordering::Relaxed);
            }),
        );
        Ok(Self { driver, allocator, caching, streams, lanes, pools, log })
    }

    pub fn driver(&self) -> &SimDriver {
        &self.driver
    }

    pub fn allocator(&self) -> &dyn DeviceAllocator {
        &*self.allocator
    }

    pub fn caching(&self) -> Option<&CachingAllocator> {
        self.caching.as_deref()
    }

    #[inline]
    pub fn allocate(&self, stream: u16, pool: PoolIndex, bytes: u64) -> Result<Allocation> {
        self.allocator.allocate_raw(self.request(stream, pool, bytes))
    }

    #[inline]
    pub fn request(&self, stream: u16, pool: PoolIndex, bytes: u64) -> Request {
        Request {
            device: DEVICE,
            stream: self.streams[usize::from(stream)],
            bytes,
            pool: self.pools[usize::from(pool)],
        }
    }

    #[inline]
    pub fn free(&self, allocation: Allocation) -> Result<()> {
        self.allocator.free(allocation)
    }

    /// Frees what a lane is still at work on.
    pub fn free_in_use(&mut self, allocation: Allocation, place: Place) -> Result<()> {
        let lane = &mut self.lanes[usize::from(place.lane)];
        lane.queued += 1;
        self.allocator.record_use(allocation, lane.stream)?;
        self.allocator.free(allocation)
    }

    /// A block is done. It may be already, if somebody waited for it.
    pub fn complete(&mut self, place: Place) -> Result<()> {
        let lane = &self.lanes[usize::from(place.lane)];
        let through = lane.queued.saturating_sub(self.driver.paused_work(lane.stream)?);
        let turn = u64::from(place.turn);
        if through < turn {
            self.driver.run_paused(lane.stream, turn - through)?;
        }
        Ok(())
    }

    /// Gives back what a pool has cached. Allocators without pools of their own have one.
    pub fn trim(&self, pool: PoolIndex) -> Result<u64> {
        match self.pools[usize::from(pool)] {
            Some(pool) => self.allocator.trim(DEVICE, pool),
            None => Ok(0),
        }
    }

    /// The maker of a pool gives it up.
    pub fn end_pool(&self, pool: PoolIndex) -> Result<()> {
        match self.pools[usize::from(pool)].filter(|pool| !pool.is_default()) {
            Some(pool) => self.allocator.pools()?.release_pool(DEVICE, pool),
            None => Ok(()),
        }
    }

    /// How many segment events there were.
    #[inline]
    pub fn seen_count(&self) -> usize {
        self.log.count.load(Ordering::Relaxed)
    }

    /// All segment events since the last call.
    pub fn take_seen(&self) -> Vec<Seen> {
        self.log.count.store(0, Ordering::Relaxed);
        std::mem::take(&mut *self.log.entries.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub fn counters(&self) -> Counters {
        let waits = [Call::StreamSynchronize, Call::EventSynchronize, Call::DeviceSynchronize, Call::MemFree];
        Counters {
            calls: self.driver.calls_made(),
            syncs: waits.into_iter().map(|call| self.driver.call_count(call)).sum(),
            time: self.driver.time_in_calls(),
        }
    }
}

/// A pool of the allocator for a recorded one; `None` where it has no pools.
fn make_pool(allocator: &dyn DeviceAllocator, origin: PoolOrigin) -> Result<Option<MemPoolId>> {
    let of_graph = match origin {
        PoolOrigin::Recorded(MemPoolId::DEFAULT) => return Ok(Some(MemPoolId::DEFAULT)),
        PoolOrigin::Recorded(id) => id.graph > 0,
        PoolOrigin::Inferred => false,
    };
    match allocator.pools() {
        Ok(pools) if of_graph => pools.create_graph_pool(DEVICE).map(Some),
        Ok(pools) => pools.create_pool(DEVICE, PoolOptions::default()).map(Some),
        Err(Error::Unsupported { .. }) => Ok(Some(MemPoolId::DEFAULT)),
        Err(error) => Err(error),
    }
}
