//! The one allocator of the process, and what every call does with it, in Rust's terms. `abi/` is the same in C's.
//!
//! It is made by the first call that needs it and stays for ever: nothing is torn down while the process exits, when
//! the driver may be gone already. A start that failed changes nothing and can be tried again.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use tracing_subscriber::filter::LevelFilter;
use warpool::memory::{
    Backend, CachingAllocator, DeviceAllocator, DriverPoolAllocator, MemPoolId, PoolKeeper, Request, Settings,
    Snapshot, SnapshotOptions, Stats,
};
use warpool::{Device, Instance};
use warpool_driver::{DeviceId, DevicePtr, Driver, RawHandle};

use crate::captures::{Captures, TorchPool};
use crate::environment;
use crate::error::{Error, Result};
use crate::stacks::Stacks;
use crate::streams::Streams;

/// An allocator with what callers from C need around it.
#[derive(Debug)]
pub struct Runtime {
    instance: Instance,
    allocator: Allocator,
    streams: Streams,
    captures: Captures,
    pub(crate) stacks: Arc<Stacks>,
}

/// The allocator that the settings chose.
#[derive(Debug)]
enum Allocator {
    Caching(Box<CachingAllocator>),
    DriverPool(Box<DriverPoolAllocator>, Box<Settings>),
}

static RUNTIME: OnceLock<Runtime> = OnceLock::new();

/// The allocator of the process; made now, if nobody did before.
#[inline]
pub fn get() -> Result<&'static Runtime> {
    RUNTIME.get().map_or_else(start, Ok)
}

/// The allocator of the process, if it was made.
#[must_use]
pub fn started() -> Option<&'static Runtime> {
    RUNTIME.get()
}

#[cold]
fn start() -> Result<&'static Runtime> {
    static STARTING: Mutex<()> = Mutex::new(());
    let _alone = STARTING.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(runtime) = RUNTIME.get() {
        return Ok(runtime);
    }
    // Warnings must reach somebody. If whoever we are linked into logs by itself, that stays so.
    let log = tracing_subscriber::fmt().with_writer(std::io::stderr).with_max_level(LevelFilter::WARN);
    // Where there is no stderr, nothing is said about that either.
    let _ = log.without_time().log_internal_errors(false).try_init();
    let settings = environment::settings()?;
    let runtime = Runtime::new(environment::driver()?, settings)?;
    Ok(RUNTIME.get_or_init(|| runtime))
}

impl Runtime {
    /// An allocator over `driver`. Makes no context.
    pub fn new(driver: Arc<dyn Driver>, settings: Settings) -> Result<Self> {
        let instance = Instance::new(driver)?;
        let allocator = match settings.backend {
            Backend::Native => Allocator::Caching(Box::new(CachingAllocator::new(&instance, settings))),
            Backend::CudaMallocAsync => {
                let allocator = DriverPoolAllocator::with_settings(&instance, settings.clone());
                Allocator::DriverPool(Box::new(allocator), Box::new(settings))
            }
        };
        let (streams, captures, stacks) = (Streams::new(), Captures::default(), Arc::default());
        Ok(Self { instance, allocator, streams, captures, stacks })
    }

    /// The driver with its devices.
    #[must_use]
    pub fn instance(&self) -> &Instance {
        &self.instance
    }

    /// The allocator.
    #[must_use]
    #[inline]
    pub fn allocator(&self) -> &dyn DeviceAllocator {
        match &self.allocator {
            Allocator::Caching(allocator) => &**allocator,
            Allocator::DriverPool(allocator, _) => &**allocator,
        }
    }

    /// The device of that number.
    pub fn device(&self, number: i32) -> Result<Device> {
        let index = u32::try_from(number).map_err(|_| Error::NegativeDevice { device: number })?;
        Ok(self.instance.device(index)?)
    }

    /// Memory for work on a stream. 0 bytes are null.
    #[inline]
    pub fn malloc(&self, bytes: isize, device: i32, stream: RawHandle) -> Result<DevicePtr> {
        let bytes = u64::try_from(bytes).map_err(|_| Error::NegativeSize { bytes })?;
        let device = self.device_id(device)?;
        if bytes == 0 {
            return Ok(DevicePtr(0));
        }
        let stream = self.streams.resolve(&self.instance, device, stream)?;
        if self.captures.await_a_stream() {
            self.captures.bind(self, device, stream)?;
        }
        Ok(self.allocator().allocate_raw(Request::new(device, stream, bytes))?.ptr)
    }

    /// Takes memory back; null is nothing. The device says where to look first.
    #[inline]
    pub fn free(&self, ptr: DevicePtr, device: i32) -> Result<()> {
        match self.device_id(device) {
            Ok(device) => Ok(self.allocator().free_on(device, ptr)?),
            Err(_) => Ok(self.allocator().free_raw(ptr)?),
        }
    }

    /// Notes that a stream uses memory. PyTorch does not say whose stream it is; most likely that of the memory's
    /// device. The default streams of all devices have the same handle, so any of those that are in use may be meant.
    pub fn record_stream(&self, ptr: DevicePtr, stream: RawHandle) -> Result<()> {
        if ptr.is_null() {
            return Ok(());
        }
        let device = self.allocator().find(ptr)?.device;
        if Streams::is_default(stream) {
            for other in self.streams.devices().into_iter().filter(|&other| other != device) {
                self.allocator().record_use_raw(ptr, self.streams.resolve(&self.instance, other, stream)?)?;
            }
        }
        let stream = self.streams.resolve_anywhere(&self.instance, device, stream)?;
        Ok(self.allocator().record_use_raw(ptr, stream)?)
    }

    /// The segment that an address lies in: where it starts and how long it is. Rarely asked (by who shares memory
    /// between processes), so nothing is kept for it.
    pub fn segment_of(&self, ptr: DevicePtr) -> Result<(DevicePtr, u64)> {
        let snapshot = self.allocator().snapshot(SnapshotOptions { pool: None, traces: false })?;
        let holds = |start: u64, bytes: u64| (start..start.saturating_add(bytes)).contains(&ptr.0);
        let found = snapshot.segments.iter().find(|segment| holds(segment.address, segment.total_size));
        found
            .map(|segment| (DevicePtr(segment.address), segment.total_size))
            .ok_or_else(|| warpool::Error::UnknownPointer { ptr }.into())
    }

    /// Gives all cached memory back. Devices that nobody used are left alone: asking some drivers about them would make
    /// a context.
    pub fn empty_cache(&self) -> Result<()> {
        self.captures.close_lost(self)?;
        self.captures.doubt_unbound(self)?;
        for device in self.streams.devices() {
            self.allocator().trim(device, MemPoolId::DEFAULT)?;
        }
        Ok(())
    }

    /// A capture is about to begin whose memory comes from `pool`.
    pub fn begin_pool(&self, device: i32, pool: TorchPool) -> Result<()> {
        self.captures.begin(self, self.device_id(device)?, pool);
        Ok(())
    }

    /// It is over.
    pub fn end_pool(&self, device: i32, pool: TorchPool) -> Result<()> {
        self.captures.end(self, self.device_id(device)?, pool)
    }

    /// A graph of the pool is gone: one use less, of those that each begin made.
    pub fn release_pool(&self, device: i32, pool: TorchPool) -> Result<()> {
        self.captures.release(self, self.device_id(device)?, pool)
    }

    /// How many scopes of pools are open.
    #[must_use]
    pub fn open_pools(&self) -> usize {
        self.captures.open_scopes()
    }

    /// The counters of a device, with pools by PyTorch's names.
    pub fn stats(&self, device: i32) -> Result<Stats> {
        let device = self.device_id(device)?;
        let mut stats = self.allocator().stats(device)?;
        let by_pool = std::mem::take(&mut stats.reserved_bytes_by_private_pools);
        for (pool, held) in by_pool {
            // A released pool that still has blocks, and one that got its name: PyTorch knows them as one.
            let named = stats.reserved_bytes_by_private_pools.entry(self.captures.name(device, pool)).or_default();
            let sums = [(&mut named.all, held.all), (&mut named.small_pool, held.small_pool)];
            for (sum, stat) in sums.into_iter().chain([(&mut named.large_pool, held.large_pool)]) {
                sum.current += stat.current;
                sum.peak += stat.peak;
                sum.allocated += stat.allocated;
                sum.freed += stat.freed;
            }
        }
        Ok(stats)
    }

    /// The state of every device, and the history, with pools by PyTorch's names.
    pub fn snapshot(&self) -> Result<Snapshot> {
        let mut snapshot = self.allocator().snapshot(SnapshotOptions::default())?;
        for segment in &mut snapshot.segments {
            if let Ok(device) = u32::try_from(segment.device) {
                segment.pool = self.captures.name(DeviceId(device), segment.pool);
            }
        }
        for (device, trace) in (0..).map(DeviceId).zip(&mut snapshot.traces) {
            for pool in trace.iter_mut().filter_map(|entry| entry.pool.as_mut()).filter(|pool| !pool.is_default()) {
                *pool = self.captures.name(device, *pool);
            }
        }
        Ok(snapshot)
    }

    /// The settings that are in force.
    #[must_use]
    pub fn settings(&self) -> Settings {
        match &self.allocator {
            Allocator::Caching(allocator) => Settings::clone(&allocator.settings()),
            Allocator::DriverPool(_, settings) => Settings::clone(settings),
        }
    }

    /// Puts a further settings string in force, on top of those that are; memory limits among them.
    pub fn set_settings(&self, string: &str) -> Result<()> {
        let Allocator::Caching(allocator) = &self.allocator else { return Err(Error::FixedSettings) };
        static CHANGING: Mutex<()> = Mutex::new(());
        let _alone = CHANGING.lock().unwrap_or_else(PoisonError::into_inner);
        let before = allocator.settings();
        let after = before.updated(string)?;
        let (fraction, cap) = (after.per_process_memory_fraction, after.memory_cap_bytes);
        for device in self.instance.devices() {
            #[expect(clippy::float_cmp, reason = "whether it is the very same number")]
            if fraction != before.per_process_memory_fraction {
                allocator.set_memory_fraction(device.id(), fraction)?;
            }
            if cap != before.memory_cap_bytes {
                allocator.set_memory_cap(device.id(), cap)?;
            }
        }
        allocator.set_settings(after);
        Ok(())
    }

    /// The private pools, if the allocator has any. The driver's own pools need none: what they give to a capture
    /// belongs to its graph.
    pub(crate) fn pools(&self) -> Option<&dyn PoolKeeper> {
        self.allocator().pools().ok()
    }

    /// Notes that PyTorch may have replayed graphs of a pool, on streams that it names to nobody.
    pub(crate) fn note_replays(&self, device: DeviceId, pool: MemPoolId) -> Result<()> {
        match &self.allocator {
            Allocator::Caching(allocator) => Ok(allocator.record_pool_use_anywhere(device, pool)?),
            Allocator::DriverPool(..) => Ok(()),
        }
    }

    #[inline]
    fn device_id(&self, number: i32) -> Result<DeviceId> {
        match u32::try_from(number) {
            Ok(index) if index < self.instance.device_count() => Ok(DeviceId(index)),
            _ => self.device(number).map(|device| device.id()),
        }
    }
}
