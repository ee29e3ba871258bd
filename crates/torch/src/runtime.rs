//! The process-wide allocator and its operations in Rust types; `abi/` is the same in C types.
//!
//! It is created by the first call that needs it and never dropped: at process exit the driver may already be unloaded.
//! A failed start changes nothing and can be repeated.
//!
//! In a forked child the parent's runtime is not used, not even its locks, which other threads may have held: [`get`]
//! fails. If the parent had not begun to start a runtime, the child starts its own.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tracing_subscriber::filter::LevelFilter;
use warpool::memory::elastic::{ElasticLayout, ElasticMemory};
use warpool::memory::pools::Checkpoints;
use warpool::memory::raw::Request;
use warpool::memory::report::{PageStats, Snapshot, SnapshotOptions, Stats};
use warpool::memory::settings::{Backend, RecordSettings};
use warpool::memory::sleep::{Keep, SleepReport, TagInfo};
use warpool::memory::{BackgroundReclaim, DeviceAllocator, HostBlock, MemPoolId, Settings};
use warpool::{Device, Instance, Stream};
use warpool_driver::fork::{self, Origin};
use warpool_driver::{DeviceId, DevicePtr, Driver, ForeignStream, StreamId};

use crate::allocator::{self, NATIVE_OR_PAGED};
use crate::backend::{Annotations, Contexts, Direct, Filter, MappedBlock, PinnedMemory, Routing, Sharing};
use crate::captures::Captures;
use crate::elastic::ProcessElastic;
use crate::environment;
use crate::error::{Error, Result};
use crate::publish::{self, Published};
use crate::recorder::{Program, Recorder};
use crate::stacks::{self, Stacks};
use crate::streams::StreamTable;
use crate::tags::ProcessTags;
use crate::torch_pool::TorchPoolId;

/// A device allocator, with the stream handles, capture scopes and call stacks of its C callers.
#[derive(Debug)]
pub struct Runtime {
    /// The process that it works in.
    origin: Origin,
    instance: Instance,
    device_count: u32,
    allocator: Arc<dyn DeviceAllocator>,
    streams: StreamTable,
    captures: Captures,
    stacks: Arc<Stacks>,
    /// Pools that PyTorch's allocator class manages.
    pub(crate) routing: Routing,
    pub(crate) contexts: Arc<Contexts>,
    pub(crate) annotations: Annotations,
    pub(crate) direct: Direct,
    pub(crate) pinned: PinnedMemory,
    pub(crate) sharing: Sharing,
    tags: ProcessTags,
    elastic: ProcessElastic,
    /// Started if settings ask for it, and never stopped: it does nothing where they do not.
    reclaim: OnceLock<BackgroundReclaim>,
    /// Whether the program records a history.
    pub(crate) history_on: AtomicBool,
    pub(crate) recorder: Recorder,
}

static RUNTIME: OnceLock<Runtime> = OnceLock::new();

/// The runtime of the process; started now if it is not yet. [`Error::Forked`] if the process was forked since.
#[inline]
pub fn get() -> Result<&'static Runtime> {
    match RUNTIME.get() {
        Some(runtime) if !fork::is_child() => Ok(runtime),
        found => get_or_start(found, Backend::default()),
    }
}

/// As [`get`]; if it is started now, with this backend unless the settings name another.
pub fn start_with(backend: Backend) -> Result<&'static Runtime> {
    get_or_start(RUNTIME.get(), backend)
}

#[cold]
fn get_or_start(found: Option<&'static Runtime>, backend: Backend) -> Result<&'static Runtime> {
    match found {
        Some(runtime) if runtime.origin.is_here() => Ok(runtime),
        Some(_) => Err(Error::Forked),
        None => start(backend),
    }
}

/// The runtime of the process, if it is started; also one that was started before the process was forked.
#[must_use]
pub fn started() -> Option<&'static Runtime> {
    RUNTIME.get()
}

/// Serializes starts: 0, or the id of the process in which a thread is starting. Not a mutex, which would stay locked
/// for ever in a child forked during a start, where the driver may be half open.
struct StartLock;

static STARTING: AtomicU64 = AtomicU64::new(0);

impl StartLock {
    fn acquire() -> Result<Self> {
        let own = 1 + u64::from(Origin::here().generation());
        loop {
            match STARTING.compare_exchange(0, own, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return Ok(Self),
                Err(holder) if holder != own => return Err(Error::Forked),
                Err(_) => std::thread::sleep(Duration::from_micros(50)),
            }
        }
    }
}

impl Drop for StartLock {
    fn drop(&mut self) {
        STARTING.store(0, Ordering::Release);
    }
}

fn start(backend: Backend) -> Result<&'static Runtime> {
    let _serialized = StartLock::acquire()?;
    if let Some(runtime) = RUNTIME.get() {
        return get_or_start(Some(runtime), backend);
    }
    // Fails if the process has a subscriber already; that one is kept.
    let log = tracing_subscriber::fmt().with_writer(std::io::stderr).with_max_level(LevelFilter::WARN);
    let _ = log.without_time().log_internal_errors(false).try_init();
    let how = environment::publish()?;
    let runtime = open(environment::driver()?, backend, environment::settings)?;
    runtime.recorder.set_rank(environment::rank());
    if let Some(folder) = environment::record_folder() {
        runtime.set_record_folder(&folder)?;
    }
    runtime.recorder.apply(&runtime, &runtime.settings().record, &RecordSettings::default())?;
    let runtime = RUNTIME.get_or_init(|| runtime);
    let published = Published {
        instance: &runtime.instance,
        allocator: &runtime.allocator,
        host: runtime.pinned.allocator(),
        tags: Arc::new(|| started().map(Runtime::tags).unwrap_or_default()),
    };
    publish::start(published, &how);
    Ok(runtime)
}

/// A runtime with the settings of `settings`, which is called with the backend to use if the settings name none. If a
/// GPU does not support that backend and the settings do not name it, the default is used.
fn open(driver: Arc<dyn Driver>, backend: Backend, settings: impl Fn(Backend) -> Result<Settings>) -> Result<Runtime> {
    let opened = Runtime::new(Arc::clone(&driver), settings(backend)?);
    let instead = settings(Backend::default())?;
    if instead.backend == backend || !matches!(opened, Err(Error::NoVirtualMemory)) {
        return opened;
    }
    tracing::warn!(
        "a GPU here has no virtual memory management, which backend:{} needs: backend:{} is used",
        backend.name(),
        instead.backend.name(),
    );
    Runtime::new(driver, instead)
}

/// Cached memory for work on `stream`, the hot path: nothing is created, waited for or recorded. `None`, without any
/// change, if the request needs more than that: use [`Runtime::allocate`] then.
#[inline]
pub(crate) fn allocate_cached(bytes: usize, device: i32, stream: ForeignStream) -> Option<DevicePtr> {
    let runtime = here()?;
    // A negative index becomes a device that does not exist.
    let device = DeviceId(device.cast_unsigned());
    // With several devices, a free uses the thread's last lookup to find the device.
    let stream = if stream == ForeignStream::NULL && device == DeviceId(0) && runtime.device_count == 1 {
        runtime.streams.first_default()?
    } else {
        runtime.streams.last_of_thread(device, stream)?
    };
    if runtime.routing.is_any_open() || runtime.direct.is_on() {
        return None;
    }
    runtime.allocator.allocate_cached(&Request::new(device, stream, bytes as u64))
}

/// Frees the block that starts at `ptr`, the hot path. `false`, without any change, if the free needs more than that:
/// use [`Runtime::free_block`] then.
#[inline]
pub(crate) fn free_cached(ptr: DevicePtr) -> bool {
    here().is_some_and(|runtime| {
        !runtime.direct.has_blocks() && runtime.allocator.free_cached(runtime.last_device(), ptr)
    })
}

/// Cached pinned memory, as [`allocate_cached`].
#[inline]
pub(crate) fn allocate_pinned_cached(bytes: usize) -> Option<HostBlock> {
    here()?.pinned.allocate_cached(bytes as u64)
}

/// Frees pinned memory, the hot path. Returns it, without any change, if the free needs more than that.
#[inline]
pub(crate) fn free_pinned_cached(block: HostBlock) -> std::result::Result<(), HostBlock> {
    match here() {
        Some(runtime) => runtime.pinned.allocator().free_cached(block),
        None => Err(block),
    }
}

/// The runtime of the process, if it is started and was not before a fork.
#[inline]
fn here() -> Option<&'static Runtime> {
    RUNTIME.get().filter(|_| !fork::is_child())
}

/// The handle as a `cudaStream_t`.
fn raw_stream(stream: ForeignStream) -> *const c_void {
    std::ptr::without_provenance(stream.raw().0 as usize)
}

impl Runtime {
    /// A runtime over `driver`. Creates no context.
    pub fn new(driver: Arc<dyn Driver>, settings: Settings) -> Result<Self> {
        let origin = Origin::here();
        let instance = Instance::new(driver)?;
        let pinned = PinnedMemory::new(&instance, settings.pinned.clone());
        let allocator = allocator::create(&instance, settings)?;
        let runtime = Self {
            origin,
            device_count: instance.device_count(),
            instance,
            allocator,
            streams: StreamTable::new(),
            captures: Captures::default(),
            stacks: Arc::default(),
            routing: Routing::default(),
            contexts: Arc::default(),
            annotations: Annotations::default(),
            direct: Direct::default(),
            pinned,
            sharing: Sharing::default(),
            tags: ProcessTags::default(),
            elastic: ProcessElastic::default(),
            reclaim: OnceLock::new(),
            history_on: AtomicBool::new(false),
            recorder: Recorder::new(|| get().ok().map(|runtime| runtime as &dyn Program)),
        };
        runtime.start_reclaim();
        Ok(runtime)
    }

    /// Starts the thread that returns idle memory to the driver, if settings give it something to do.
    fn start_reclaim(&self) {
        if BackgroundReclaim::is_useful(&self.settings()) {
            self.reclaim.get_or_init(|| BackgroundReclaim::start(&self.allocator));
        }
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
        &*self.allocator
    }

    /// The device with that index.
    pub fn device(&self, index: i32) -> Result<Device> {
        let index = u32::try_from(index).map_err(|_| Error::NegativeDevice { device: index })?;
        Ok(self.instance.device(index)?)
    }

    /// Allocates memory for work on `stream`. 0 bytes give null.
    #[inline]
    pub fn malloc(&self, bytes: isize, device: i32, stream: ForeignStream) -> Result<DevicePtr> {
        let bytes = u64::try_from(bytes).map_err(|_| Error::NegativeSize { bytes })?;
        let device = self.device_id(device)?;
        if bytes == 0 {
            return Ok(DevicePtr(0));
        }
        let stream = self.streams.resolve(&self.instance, device, stream)?;
        if self.captures.has_unbound_scope() {
            self.bind_capture(device, stream)?;
        }
        Ok(self.allocator().allocate_raw(Request::new(device, stream, bytes))?.ptr)
    }

    #[cold]
    fn bind_capture(&self, device: DeviceId, stream: StreamId) -> Result<()> {
        self.captures.bind(self.allocator(), device, stream, |tag| {
            let device = self.instance.device(device.0)?;
            self.tags.make_graph_pool(self.allocator().pools()?, &device, tag)
        })
    }

    /// Allocates memory for work on `stream`, from the pool whose filter accepts the stream. 0 bytes give null.
    #[inline]
    pub fn allocate(&self, bytes: u64, device: i32, stream: ForeignStream) -> Result<DevicePtr> {
        let device = self.device_id(device)?;
        if bytes == 0 {
            return Ok(DevicePtr(0));
        }
        self.routing.end_relaxed_mode(&**self.instance.driver())?;
        let id = self.streams.resolve(&self.instance, device, stream)?;
        let mut request = Request::new(device, id, bytes);
        if self.routing.is_any_open() {
            request.pool = self.routing.pool_for(&**self.instance.driver(), device, raw_stream(stream))?;
        } else if self.direct.is_on() {
            return self.direct.allocate(&**self.instance.driver(), device, bytes);
        }
        Ok(self.allocator.allocate_raw(request)?.ptr)
    }

    /// Allocates memory at an address, out of a free block that contains it.
    pub fn allocate_at(&self, bytes: u64, device: i32, stream: ForeignStream, ptr: DevicePtr) -> Result<()> {
        let device = self.device_id(device)?;
        let mut request = Request::new(device, self.streams.resolve(&self.instance, device, stream)?, bytes);
        request.pool = self.routing.pool_for(&**self.instance.driver(), device, raw_stream(stream))?;
        let allocated = self.allocator.allocate_at(request, ptr);
        allocator::optional(self.allocator(), "backend:native", allocated).map(drop)
    }

    /// Frees what [`allocate`](Self::allocate) returned; null is ignored.
    pub fn free_block(&self, ptr: DevicePtr) -> Result<()> {
        if self.direct.has_blocks() && self.direct.free(&**self.instance.driver(), ptr)? {
            return Ok(());
        }
        Ok(self.allocator.free_raw(ptr)?)
    }

    /// The device that the calling thread used last.
    #[inline]
    fn last_device(&self) -> DeviceId {
        // Not inlined: otherwise the address of the thread-local value would be looked up in every call.
        #[inline(never)]
        fn of_several() -> DeviceId {
            StreamTable::last_device()
        }
        if self.device_count == 1 { DeviceId(0) } else { of_several() }
    }

    /// Switches caching off or on. Off, every request is a driver call and appears in no statistics.
    pub fn set_caching(&self, on: bool) {
        if self.allocator.set_caching(on).is_err() {
            self.direct.set(!on);
        }
    }

    /// Records that `stream` of `device` uses the memory at `ptr`.
    pub fn record_use(&self, ptr: DevicePtr, device: i32, stream: ForeignStream) -> Result<()> {
        // The driver's free waits for all work.
        if ptr.is_null() || self.direct.has(ptr) {
            return Ok(());
        }
        let stream = self.streams.resolve(&self.instance, self.device_id(device)?, stream)?;
        Ok(self.allocator().record_use_raw(ptr, stream)?)
    }

    /// Says that `stream` of `device` is never destroyed.
    ///
    /// # Safety
    /// As for [`Stream::promise_to_keep`](warpool::Stream::promise_to_keep).
    pub unsafe fn keep_stream(&self, device: i32, stream: ForeignStream) -> Result<()> {
        let device = self.instance.device(self.device_id(device)?.0)?;
        // SAFETY: by this function's contract.
        unsafe { Stream::external(&device, stream)?.promise_to_keep() };
        Ok(())
    }

    /// Returns cached memory to the driver. For the default id, that of the default pool and of all released pools;
    /// otherwise that of released pools with this id. If `stream`, the caller's current stream, captures, the default
    /// pool is not trimmed.
    pub fn trim(&self, pool: TorchPoolId, device: i32, stream: ForeignStream) -> Result<()> {
        if pool != (TorchPoolId { graph: 0, user: 0 }) {
            for (device, pool) in self.routing.all_pools(pool) {
                self.allocator().trim(device, pool)?;
            }
            return Ok(());
        }
        let current = Stream::external(&self.device(device)?, stream)?;
        let _current = current.enter();
        for device in self.streams.devices() {
            self.allocator().trim(device, MemPoolId::DEFAULT)?;
        }
        Ok(())
    }

    /// Lets kernels on `device` access the memory on `owner`.
    pub fn enable_peer_access(&self, device: i32, owner: i32) -> Result<()> {
        let (device, owner) = (self.device_id(device)?, self.device_id(owner)?);
        Ok(self.allocator().enable_peer_access(device, owner)?)
    }

    /// Opens a pool of PyTorch's for requests that the filter accepts. A new pool's memory carries the tag that the
    /// thread is in.
    pub(crate) fn open_pool(&self, device: i32, pool: TorchPoolId, filter: Filter) -> Result<()> {
        let device = self.device(device)?;
        self.routing.begin_with(self.allocator(), device.id(), pool, filter, |options| {
            self.tags.make_pool(self.allocator().pools()?, &device, options)
        })
    }

    /// Requests of the calling thread on the device carry a tag from here on. Returns the scope to end it with.
    pub fn begin_tag(&self, device: i32, tag: &str) -> Result<u64> {
        self.tags.begin(&self.allocator, self.pinned.allocator(), &self.device(device)?, tag)
    }

    /// Ends a scope of [`begin_tag`](Self::begin_tag).
    pub fn end_tag(&self, scope: u64) -> Result<()> {
        self.tags.end(scope)
    }

    /// Pins host memory for the contents of tags, ahead of their sleep; `None` is all tags.
    pub fn prepare_sleep(&self, tags: Option<&[&str]>) -> Result<u64> {
        self.tags.prepare(tags)
    }

    /// Puts the memory of tags to sleep, all or none; `None` is all tags.
    pub fn sleep(&self, tags: Option<&[&str]>, keep: Keep) -> Result<SleepReport> {
        self.tags.sleep(tags, keep)
    }

    /// Wakes the memory of tags, all or none; `None` is all tags.
    pub fn wake(&self, tags: Option<&[&str]>) -> Result<SleepReport> {
        self.tags.wake(tags)
    }

    /// Reserves elastic memory, of this tag, or else of the tag that the calling thread is in.
    pub fn reserve_elastic(
        &self,
        device: i32,
        stream: ForeignStream,
        layout: ElasticLayout,
        tag: Option<&str>,
    ) -> Result<DevicePtr> {
        let device = self.device(device)?;
        let stream = Stream::external(&device, stream)?;
        let of_thread = self.tags.current(device.id());
        let memory = match tag.or(of_thread.as_deref()) {
            None => Arc::new(ElasticMemory::new(&self.allocator, layout, &stream)?),
            Some(tag) => {
                // Without elastic memory there is nothing to tag.
                self.allocator.elastic()?;
                self.tags.tag(&self.allocator, self.pinned.allocator(), &device, tag)?.elastic(layout, &stream)?
            }
        };
        Ok(self.elastic.add(memory))
    }

    /// The elastic memory that begins at an address.
    pub fn elastic(&self, ptr: DevicePtr) -> Result<Arc<ElasticMemory>> {
        self.elastic.at(ptr)
    }

    /// The same, for a tensor that owns it from here on.
    pub(crate) fn elastic_for_tensor(&self, ptr: DevicePtr) -> Result<Arc<ElasticMemory>> {
        self.elastic.take_for_tensor(ptr)
    }

    /// A stream on the device of elastic memory.
    pub(crate) fn stream_of(&self, memory: &ElasticMemory, stream: ForeignStream) -> Result<Stream> {
        Ok(Stream::external(&self.instance.device(memory.device_id().0)?, stream)?)
    }

    /// Returns elastic memory and its addresses.
    pub fn release_elastic(&self, ptr: DevicePtr) -> Result<()> {
        self.elastic.release(ptr)
    }

    /// The same of memory that a tensor owned.
    pub(crate) fn release_tensor(&self, memory: Arc<ElasticMemory>) -> Result<()> {
        self.elastic.release_tensor(memory)
    }

    /// The bytes that could be committed on a device now.
    pub fn headroom(&self, device: i32) -> Result<u64> {
        Ok(warpool::memory::elastic::headroom(&self.allocator, &self.device(device)?)?)
    }

    /// Every tag on every device.
    #[must_use]
    pub fn tags(&self) -> Vec<TagInfo> {
        self.tags.info()
    }

    /// How another process can open the memory at `ptr`: a handle of the memory that contains it, and its offset there.
    pub fn share(&self, ptr: DevicePtr, torch_version: u8) -> Result<(Vec<u8>, usize)> {
        let parts = self.allocator().mapped_parts(ptr)?;
        if let Some(first) = parts.first() {
            let (parts_of, observers) = (allocator::parts_of(&self.allocator), self.allocator().observers());
            let block = MappedBlock { ptr, parts: &parts, torch_version, parts_of: &parts_of, observers };
            let handle = self.sharing.export_mapped(self.instance.driver(), &block)?;
            return Ok((handle, (ptr.0 - first.ptr.0) as usize));
        }
        let (base, _) = self.segment_of(ptr)?;
        Ok((Sharing::export_plain(&**self.instance.driver(), base)?, (ptr.0 - base.0) as usize))
    }

    /// Opens memory of another process; every call must be paired with one of [`close_shared`](Self::close_shared).
    pub fn open_shared(&self, device: i32, handle: &[u8]) -> Result<DevicePtr> {
        let (device, capturing) = (self.device_id(device)?, self.routing.is_any_open());
        self.sharing.open(&**self.instance.driver(), device, handle, capturing)
    }

    /// Ends a use of memory of another process.
    pub fn close_shared(&self, ptr: DevicePtr) -> Result<()> {
        self.sharing.close(&**self.instance.driver(), ptr, self.routing.is_any_open())
    }

    /// Writes a text into the history, with an allocated block.
    pub fn annotate(&self, ptr: DevicePtr, text: &str) -> Result<()> {
        allocator::optional(self.allocator(), NATIVE_OR_PAGED, self.allocator().annotate(ptr, text))
    }

    /// The checkpoints of the allocator's pools.
    pub fn checkpoints(&self) -> Result<&dyn Checkpoints> {
        allocator::optional(self.allocator(), NATIVE_OR_PAGED, self.allocator().checkpoints())
    }

    /// The state of every device, or of PyTorch's pool alone, with PyTorch's pool ids.
    pub fn snapshot_of(&self, pool: TorchPoolId, traces: bool) -> Result<Snapshot> {
        let is_default = pool == (TorchPoolId { graph: 0, user: 0 });
        let pools = if is_default { Vec::new() } else { self.routing.all_pools(pool) };
        let mut snapshot = self.allocator().snapshot(SnapshotOptions { pool: None, traces })?;
        if !is_default {
            snapshot.segments.retain(|segment| {
                u32::try_from(segment.device).is_ok_and(|device| pools.contains(&(DeviceId(device), segment.pool)))
            });
        }
        self.rename_pools(&mut snapshot);
        snapshot.annotations = self.annotations.all();
        self.tags.add_to(&mut snapshot);
        Ok(snapshot)
    }

    /// Frees memory; null is ignored, and an address that is not allocated is an error. The device is searched first.
    #[inline]
    pub fn free(&self, ptr: DevicePtr, device: i32) -> Result<()> {
        let freed = self.device_id(device).is_ok_and(|device| self.allocator().free_cached(device, ptr));
        if freed { Ok(()) } else { Ok(self.allocator().free_raw(ptr)?) }
    }

    /// Records that `stream` uses the memory at `ptr`. PyTorch does not pass the stream's device: the memory's device
    /// is tried first. The default streams of all devices have the same handle, so those of all devices in use are
    /// recorded.
    pub fn record_stream(&self, ptr: DevicePtr, stream: ForeignStream) -> Result<()> {
        if ptr.is_null() {
            return Ok(());
        }
        let device = self.allocator().find(ptr)?.device;
        if StreamTable::is_default(stream) {
            for other in self.streams.devices().into_iter().filter(|&other| other != device) {
                self.allocator().record_use_raw(ptr, self.streams.resolve(&self.instance, other, stream)?)?;
            }
        }
        let stream = self.streams.resolve_on_any_device(&self.instance, device, stream)?;
        Ok(self.allocator().record_use_raw(ptr, stream)?)
    }

    /// Start and size of the segment that contains `ptr`. Searches a snapshot: it is called rarely, to share memory
    /// between processes.
    pub fn segment_of(&self, ptr: DevicePtr) -> Result<(DevicePtr, u64)> {
        let snapshot = self.allocator().snapshot(SnapshotOptions { pool: None, traces: false })?;
        let contains = |start: u64, bytes: u64| (start..start.saturating_add(bytes)).contains(&ptr.0);
        let found = snapshot.segments.iter().find(|segment| contains(segment.address, segment.total_size));
        found
            .map(|segment| (DevicePtr(segment.address), segment.total_size))
            .ok_or_else(|| warpool::Error::UnknownPointer { ptr }.into())
    }

    /// Returns all cached memory to the driver. Devices that were never used are skipped: some drivers would create a
    /// context on them.
    pub fn empty_cache(&self) -> Result<()> {
        self.captures.close_finished(self.allocator())?;
        self.captures.suspend_unbound(self.allocator())?;
        for device in self.streams.devices() {
            self.allocator().trim(device, MemPoolId::DEFAULT)?;
        }
        Ok(())
    }

    /// Opens a capture scope: a capture whose memory comes from `pool` is about to begin. A new pool's memory carries
    /// the tag that the thread is in.
    pub fn begin_pool(&self, device: i32, pool: TorchPoolId) -> Result<()> {
        let device = self.device_id(device)?;
        self.captures.begin(self.allocator(), device, pool, self.tags.current(device));
        Ok(())
    }

    /// Closes the capture scope.
    pub fn end_pool(&self, device: i32, pool: TorchPoolId) -> Result<()> {
        self.captures.end(self.allocator(), self.device_id(device)?, pool)
    }

    /// Ends one use of the pool, added by [`begin_pool`](Self::begin_pool): a graph was destroyed.
    pub fn release_pool(&self, device: i32, pool: TorchPoolId) -> Result<()> {
        self.captures.release(self.allocator(), self.device_id(device)?, pool)
    }

    /// The number of open capture scopes.
    #[must_use]
    pub fn open_pools(&self) -> usize {
        self.captures.open_scopes()
    }

    /// The statistics of a device, with PyTorch's pool ids.
    pub fn stats(&self, device: i32) -> Result<Stats> {
        let device = self.device_id(device)?;
        let mut stats = self.allocator().stats(device)?;
        let by_pool = std::mem::take(&mut stats.reserved_bytes_by_private_pools);
        for (pool, reserved) in by_pool {
            // Two of our pools have the same PyTorch id if the id was used again while the released pool still has
            // blocks. Their numbers are added up.
            let id = self.torch_id(device, pool);
            let sum = stats.reserved_bytes_by_private_pools.entry(id).or_default();
            let pairs = [(&mut sum.all, reserved.all), (&mut sum.small_pool, reserved.small_pool)];
            for (sum, stat) in pairs.into_iter().chain([(&mut sum.large_pool, reserved.large_pool)]) {
                sum.current += stat.current;
                sum.peak += stat.peak;
                sum.allocated += stat.allocated;
                sum.freed += stat.freed;
            }
        }
        Ok(stats)
    }

    /// The statistics of a device's pages, with the paged allocator.
    pub fn page_stats(&self, device: i32) -> Result<PageStats> {
        let stats = self.allocator().page_stats(self.device_id(device)?);
        allocator::optional(self.allocator(), "backend:paged", stats)
    }

    /// The state of every device and the history, with PyTorch's pool ids.
    pub fn snapshot(&self) -> Result<Snapshot> {
        let mut snapshot = self.allocator().snapshot(SnapshotOptions::default())?;
        self.rename_pools(&mut snapshot);
        self.tags.add_to(&mut snapshot);
        self.recorder.python.expand(&mut snapshot);
        Ok(snapshot)
    }

    /// Whether the program records a history. (The recorder has one without that.)
    pub(crate) fn is_history_on(&self) -> bool {
        self.history_on.load(Ordering::Relaxed)
    }

    /// The devices that were used so far.
    pub(crate) fn devices_in_use(&self) -> Vec<DeviceId> {
        self.streams.devices()
    }

    /// Replaces our pool ids by PyTorch's.
    fn rename_pools(&self, snapshot: &mut Snapshot) {
        let mut known = BTreeMap::new();
        let mut rename = |device: DeviceId, pool: &mut MemPoolId| {
            if !pool.is_default() {
                *pool = *known.entry((device, *pool)).or_insert_with(|| self.torch_id(device, *pool));
            }
        };
        for segment in &mut snapshot.segments {
            if let Ok(device) = u32::try_from(segment.device) {
                rename(DeviceId(device), &mut segment.pool);
            }
        }
        for (device, trace) in (0..).map(DeviceId).zip(&mut snapshot.traces) {
            trace.iter_mut().filter_map(|entry| entry.pool.as_mut()).for_each(|pool| rename(device, pool));
        }
    }

    /// PyTorch's id of a pool, or ours if it has none there.
    pub(crate) fn torch_id(&self, device: DeviceId, pool: MemPoolId) -> MemPoolId {
        let number = |number: u64| u32::try_from(number).unwrap_or(u32::MAX);
        match self.routing.torch_id(device, pool) {
            Some(TorchPoolId { graph, user }) => MemPoolId { graph: number(graph), user: number(user) },
            None => self.captures.torch_id(device, pool),
        }
    }

    /// The settings in effect.
    #[must_use]
    pub fn settings(&self) -> Settings {
        Settings::clone(&self.allocator().settings())
    }

    /// Applies a settings string on top of the settings in effect, including memory limits. On error nothing changes.
    pub fn set_settings(&self, string: &str) -> Result<()> {
        let before = self.settings().record;
        allocator::set_settings(self.allocator(), string)?;
        let settings = self.settings();
        self.pinned.allocator().set_settings(settings.pinned);
        if settings.share.enabled {
            // An invalid environment was an error of the start.
            publish::share(self.allocator(), &environment::publish().unwrap_or_default());
        }
        self.start_reclaim();
        self.recorder.apply(self, &settings.record, &before)
    }

    /// Replaces the function that collects call stacks. On return no other thread runs the previous one, unless it ran
    /// for longer than two seconds.
    pub(crate) fn set_stack_hook(&self, hook: Option<stacks::StackHook>) {
        self.stacks.set_hook(self.allocator().observers(), hook);
    }

    #[inline]
    pub(crate) fn device_id(&self, index: i32) -> Result<DeviceId> {
        match u32::try_from(index) {
            Ok(index) if index < self.device_count => Ok(DeviceId(index)),
            _ => self.device(index).map(|device| device.id()),
        }
    }
}

#[cfg(test)]
mod tests {
    use warpool_driver::sim::{SimConfig, SimDriver};

    use super::*;

    fn backend_of(virtual_memory: bool, named: &str) -> Result<Backend> {
        let mut config = SimConfig::default();
        config.devices[0].properties.virtual_memory = virtual_memory;
        let settings = |backend| {
            Settings::parse_for(backend, named).map_err(|source| Error::SettingsOf { variable: "WARPOOL_CONF", source })
        };
        let runtime = open(Arc::new(SimDriver::new(config)), Backend::Paged, settings)?;
        Ok(runtime.settings().backend)
    }

    #[test]
    fn a_backend_that_nobody_named_gives_way_where_it_cannot_be() {
        assert_eq!(backend_of(true, "").unwrap(), Backend::Paged);
        assert_eq!(backend_of(false, "").unwrap(), Backend::Native);
        assert_eq!(backend_of(false, "backend:native").unwrap(), Backend::Native);
        assert!(matches!(backend_of(false, "backend:paged"), Err(Error::NoVirtualMemory)));
    }
}
