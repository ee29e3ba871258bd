//! An external allocator for tests: memory from the simulated device, every call logged, and every free compared with
//! its allocation.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, MutexGuard};

use warpool::Result;
use warpool::driver::{DeviceId, DevicePtr, Driver};
use warpool::memory::MemPoolId;
use warpool::memory::external::{BaseAllocation, FnAllocator, RawStream};

/// Size, device and stream of an allocation.
pub type Allocated = (u64, DeviceId, RawStream);

/// The allocator's state, shared with its closures.
pub struct LoggingAllocator {
    driver: Arc<dyn Driver>,
    log: Mutex<Vec<String>>,
    live: Mutex<BTreeMap<u64, Allocated>>,
    /// The bytes that it can allocate.
    pub capacity: AtomicU64,
    /// Whether the next call panics.
    pub panics: AtomicBool,
    /// Whether memory is not returned to the driver, whose free waits for the device, and so for paused streams.
    pub keeps_memory: AtomicBool,
}

impl LoggingAllocator {
    pub fn new(driver: Arc<dyn Driver>) -> Arc<Self> {
        Arc::new(Self {
            driver,
            log: Mutex::default(),
            live: Mutex::default(),
            capacity: AtomicU64::new(u64::MAX),
            panics: AtomicBool::new(false),
            keeps_memory: AtomicBool::new(false),
        })
    }

    /// As an external allocator without hooks.
    pub fn plain(self: &Arc<Self>) -> FnAllocator {
        let (allocates, frees) = (Arc::clone(self), Arc::clone(self));
        FnAllocator::new(
            move |bytes, device, stream| allocates.allocate(bytes, device, stream),
            move |ptr, bytes, device, stream| frees.free(ptr, bytes, device, stream),
        )
    }

    /// With every hook. It claims to handle recorded streams, and does nothing about them.
    pub fn with_hooks(self: &Arc<Self>) -> FnAllocator {
        let shared = || Arc::clone(self);
        let (init, reset, fraction, base, record) = (shared(), shared(), shared(), shared(), shared());
        let (begin, end, release) = (shared(), shared(), shared());
        let named = |hook: &'static str, shared: Arc<Self>| {
            move |device: DeviceId, pool: MemPoolId| shared.push(format!("{hook} {pool} on {device}"))
        };
        self.plain()
            .on_init(move |count| {
                init.push(format!("init {count}"));
                Ok(())
            })
            .on_reset(move || reset.push("reset".into()))
            .on_memory_fraction(move |value, device| fraction.push(format!("fraction {value} of {device}")))
            .on_base_allocation(move |ptr| {
                base.push(format!("base of {ptr}"));
                Some(BaseAllocation { ptr: DevicePtr(ptr.0 & !0xff), bytes: None })
            })
            .on_record_stream(move |ptr, stream| record.push(format!("{ptr} used by {}", stream.id)))
            .on_begin_pool(named("begin", begin))
            .on_end_pool(named("end", end))
            .on_release_pool(named("release", release))
    }

    fn push(&self, line: String) {
        assert!(!self.panics.swap(false, Ordering::SeqCst), "an injected panic");
        lock(&self.log).push(line);
    }

    /// The calls since the last call of this.
    pub fn take_log(&self) -> Vec<String> {
        std::mem::take(&mut lock(&self.log))
    }

    /// Its allocations, by address.
    pub fn live(&self) -> BTreeMap<u64, Allocated> {
        lock(&self.live).clone()
    }

    pub fn bytes_live(&self) -> u64 {
        lock(&self.live).values().map(|live| live.0).sum()
    }

    fn allocate(&self, bytes: u64, device: DeviceId, stream: RawStream) -> Result<Option<DevicePtr>> {
        self.push(format!("allocate {bytes}"));
        assert_eq!(self.driver.stream_handle(stream.id).unwrap().raw, stream.raw, "the stream's own handle");
        if self.bytes_live().saturating_add(bytes) > self.capacity.load(Ordering::SeqCst) {
            return Ok(None);
        }
        let allocated = self.driver.mem_alloc(device, bytes).ok();
        if let Some(ptr) = allocated {
            let before = lock(&self.live).insert(ptr.0, (bytes, device, stream));
            assert_eq!(before, None, "the driver returned {ptr} twice");
        }
        Ok(allocated)
    }

    fn free(&self, ptr: DevicePtr, bytes: u64, device: DeviceId, stream: RawStream) -> Result<()> {
        let removed = lock(&self.live).remove(&ptr.0);
        let (live_bytes, live_device, live_stream) = removed.expect("a live allocation");
        assert_eq!((bytes, device), (live_bytes, live_device), "as allocated");
        let destroyed = self.driver.stream_handle(live_stream.id).is_err();
        assert!(
            destroyed || stream == live_stream,
            "{ptr} was allocated for {live_stream:?} and is freed for {stream:?}"
        );
        if !self.keeps_memory.load(Ordering::SeqCst) {
            self.driver.mem_free(ptr)?;
        }
        self.push(format!("free {bytes}"));
        Ok(())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
