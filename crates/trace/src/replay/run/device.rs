//! The simulated GPU of one run, with the allocator under test, the recorded streams and pools, and the paused streams.
//! It makes one call at a time. The plan determines the calls, and `compare.rs` compares the results with the
//! recording.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use warpool::driver::sim::{RemapCounts, SimConfig, SimDriver, Timing};
use warpool::driver::{Call, DeviceId, Driver, StreamId, StreamOptions, Streams};
use warpool::memory::pools::PoolOptions;
use warpool::memory::raw::{Allocation, Request};
use warpool::memory::report::Action;
use warpool::memory::{CachingAllocator, DeviceAllocator, DriverPoolAllocator, MemPoolId, PagedAllocator, Settings};
use warpool::{Error, Instance, Result};

use crate::replay::infer::{PoolIndex, PoolOrigin};
use crate::replay::options::AllocatorChoice;
use crate::replay::plan::{PausedUse, StreamIndex};

/// The device that everything is replayed on.
pub(super) const DEVICE: DeviceId = DeviceId(0);

/// What the allocator did with the driver: a segment event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SegmentAction {
    pub action: Action,
    pub addr: u64,
    pub bytes: u64,
}

/// Segment events, shared with the allocator's tracker.
#[derive(Debug, Default)]
struct SegmentLog {
    entries: Mutex<Vec<SegmentAction>>,
    count: AtomicUsize,
}

/// The counters that a report needs, at one moment.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counters {
    pub calls: u64,
    pub syncs: u64,
    pub time: Duration,
    /// Remapped since [`ReplayDevice::restart_remap_counts`].
    pub remaps: RemapCounts,
}

/// The parameters of a [`ReplayDevice`].
#[derive(Clone, Copy, Debug)]
pub(super) struct DeviceOptions<'a> {
    pub allocator: AllocatorChoice,
    pub settings: &'a Settings,
    /// A memory limit beside those of the settings, for allocators that take it only when they are made.
    pub memory_limit: Option<u64>,
    /// The memory of the device.
    pub capacity: u64,
    /// Recorded streams, ascending.
    pub streams: &'a [u64],
    pub paused_streams: usize,
    pub pools: &'a [PoolOrigin],
}

/// A simulated GPU with an allocator.
pub(super) struct ReplayDevice {
    driver: Arc<SimDriver>,
    allocator: Arc<dyn DeviceAllocator>,
    /// The same, if it is the caching allocator.
    caching: Option<Arc<CachingAllocator>>,
    streams: Vec<StreamId>,
    paused_streams: Vec<PausedStreamState>,
    pools: Vec<Option<MemPoolId>>,
    log: Arc<SegmentLog>,
}

struct PausedStreamState {
    stream: StreamId,
    /// Uses that were recorded on it.
    uses: u64,
}

impl ReplayDevice {
    pub fn new(options: &DeviceOptions<'_>) -> Result<Self> {
        // The only work is that of paused streams. It must not complete just because a queue is full.
        let mut config = SimConfig { queue_depth: usize::MAX, ..SimConfig::default() };
        config = config.with_timing(Timing::Model).with_capacity(options.capacity).without_suballocation_tracking();
        let driver = Arc::new(SimDriver::new(config));
        let instance = Instance::new(Arc::clone(&driver) as Arc<dyn Driver>)?;
        let settings = options.settings.clone();
        let (allocator, caching): (Arc<dyn DeviceAllocator>, _) = match options.allocator {
            AllocatorChoice::Caching => {
                let caching = Arc::new(CachingAllocator::new(&instance, settings));
                (Arc::clone(&caching) as Arc<dyn DeviceAllocator>, Some(caching))
            }
            AllocatorChoice::DriverPool => {
                let memory_cap_bytes = settings.memory_cap_bytes.or(options.memory_limit);
                let settings = Settings { memory_cap_bytes, ..settings };
                (Arc::new(DriverPoolAllocator::with_settings(&instance, settings)), None)
            }
            AllocatorChoice::Paged => {
                let memory_cap_bytes = settings.memory_cap_bytes.or(options.memory_limit);
                // Time does not pass as it did in the program.
                let settings = Settings { memory_cap_bytes, idle_decay_ms: None, ..settings };
                let paged = PagedAllocator::new(&instance, settings)?;
                paged.set_adoption(false);
                (Arc::new(paged), None)
            }
        };
        // In the recorded order, so that sorting by stream gives the same order.
        let default = driver.stream_default(DEVICE)?;
        let streams = options.streams.iter().map(|&stream| {
            if stream == 0 { Ok(default) } else { driver.stream_create(DEVICE, StreamOptions::default()) }
        });
        let streams = streams.collect::<std::result::Result<_, _>>()?;
        let paused_streams = (0..options.paused_streams).map(|_| {
            let stream = driver.stream_create(DEVICE, StreamOptions::default())?;
            driver.pause_stream(stream)?;
            Ok(PausedStreamState { stream, uses: 0 })
        });
        let paused_streams = paused_streams.collect::<Result<_>>()?;
        let pools = options.pools.iter().map(|&origin| create_pool(&*allocator, origin)).collect::<Result<_>>()?;
        let log = Arc::new(SegmentLog::default());
        let actions = [Action::SegmentAlloc, Action::SegmentFree, Action::SegmentMap, Action::SegmentUnmap];
        let shared = Arc::clone(&log);
        allocator.observers().attach_history_tracker(
            &actions,
            Arc::new(move |_, event| {
                let entry = SegmentAction { action: event.action, addr: event.addr, bytes: event.size };
                shared.entries.lock().unwrap_or_else(PoisonError::into_inner).push(entry);
                shared.count.fetch_add(1, Ordering::Relaxed);
            }),
        );
        Ok(Self { driver, allocator, caching, streams, paused_streams, pools, log })
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
    pub fn allocate(&self, stream: StreamIndex, pool: PoolIndex, bytes: u64) -> Result<Allocation> {
        self.allocator.allocate_raw(self.request(stream, pool, bytes))
    }

    #[inline]
    pub fn request(&self, stream: StreamIndex, pool: PoolIndex, bytes: u64) -> Request {
        let (stream, pool) = (self.streams[usize::from(stream)], self.pools[pool as usize]);
        Request { device: DEVICE, stream, bytes, pool }
    }

    #[inline]
    pub fn free(&self, allocation: Allocation) -> Result<()> {
        self.allocator.free(allocation)
    }

    /// Frees a block that a paused stream still uses.
    pub fn free_in_use(&mut self, allocation: Allocation, paused: PausedUse) -> Result<()> {
        let paused_stream = &mut self.paused_streams[usize::from(paused.stream)];
        paused_stream.uses += 1;
        self.allocator.record_use(allocation, paused_stream.stream)?;
        self.allocator.free(allocation)
    }

    /// Completes all uses and creates the pools again. All blocks must be free.
    pub fn begin_again(&mut self, pools: &[PoolOrigin]) -> Result<()> {
        for paused in &mut self.paused_streams {
            let work = self.driver.paused_work(paused.stream)?;
            self.driver.run_paused(paused.stream, work)?;
            paused.uses = 0;
        }
        for (pool, &origin) in self.pools.iter_mut().zip(pools) {
            if let Some(used) = pool.filter(|pool| !pool.is_default()) {
                match self.allocator.pools()?.release_pool(DEVICE, used) {
                    // The program has released it.
                    Ok(()) | Err(Error::PoolReleased { .. } | Error::UnknownPool { .. }) => {}
                    Err(error) => return Err(error),
                }
            }
            *pool = create_pool(&*self.allocator, origin)?;
        }
        Ok(())
    }

    /// Completes a use, unless a wait of the allocator has completed it already.
    pub fn complete(&mut self, paused: PausedUse) -> Result<()> {
        let paused_stream = &self.paused_streams[usize::from(paused.stream)];
        let completed = paused_stream.uses.saturating_sub(self.driver.paused_work(paused_stream.stream)?);
        let position = u64::from(paused.position);
        if completed < position {
            self.driver.run_paused(paused_stream.stream, position - completed)?;
        }
        Ok(())
    }

    /// Releases the cached memory of a pool. An allocator without pools uses the default pool for all.
    pub fn trim(&self, pool: PoolIndex) -> Result<u64> {
        match self.pools[pool as usize] {
            Some(pool) => self.allocator.trim(DEVICE, pool),
            None => Ok(0),
        }
    }

    pub fn release_pool(&self, pool: PoolIndex) -> Result<()> {
        match self.pools[pool as usize].filter(|pool| !pool.is_default()) {
            Some(pool) => self.allocator.pools()?.release_pool(DEVICE, pool),
            None => Ok(()),
        }
    }

    /// The number of segment events since the last [`take_segment_actions`](Self::take_segment_actions).
    #[inline]
    pub fn segment_action_count(&self) -> usize {
        self.log.count.load(Ordering::Relaxed)
    }

    /// All segment events since the last call.
    pub fn take_segment_actions(&self) -> Vec<SegmentAction> {
        self.log.count.store(0, Ordering::Relaxed);
        std::mem::take(&mut *self.log.entries.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub fn counters(&self) -> Counters {
        let waits = [Call::StreamSynchronize, Call::EventSynchronize, Call::DeviceSynchronize, Call::MemFree];
        Counters {
            calls: self.driver.calls_made(),
            syncs: waits.into_iter().map(|call| self.driver.call_count(call)).sum(),
            time: self.driver.time_in_calls(),
            remaps: self.driver.remap_counts(),
        }
    }

    pub fn restart_remap_counts(&self) {
        self.driver.restart_remap_counts();
    }
}

/// Creates a pool for a recorded one; the default pool, if the allocator has no others.
fn create_pool(allocator: &dyn DeviceAllocator, origin: PoolOrigin) -> Result<Option<MemPoolId>> {
    let is_graph_pool = match origin {
        PoolOrigin::Recorded(MemPoolId::DEFAULT) => return Ok(Some(MemPoolId::DEFAULT)),
        PoolOrigin::Recorded(id) => id.graph > 0,
        PoolOrigin::Inferred => false,
    };
    match allocator.pools() {
        Ok(pools) if is_graph_pool => pools.create_graph_pool(DEVICE).map(Some),
        Ok(pools) => pools.create_pool(DEVICE, PoolOptions::default()).map(Some),
        Err(Error::Unsupported { .. }) => Ok(Some(MemPoolId::DEFAULT)),
        Err(error) => Err(error),
    }
}
