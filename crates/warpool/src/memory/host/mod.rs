//! Pinned host memory: [`HostAllocator`], with a cache in front of the driver.
//!
//! ```
//! use std::sync::Arc;
//! use warpool::Instance;
//! use warpool::driver::sim::{SimConfig, SimDriver};
//! use warpool::memory::{HostAllocator, PinnedSettings};
//!
//! # fn main() -> warpool::Result<()> {
//! let instance = Instance::new(Arc::new(SimDriver::new(SimConfig::default())))?;
//! let stream = instance.device(0)?.pool_stream()?;
//! let pinned = HostAllocator::new(&instance, PinnedSettings::default());
//!
//! let block = pinned.allocate(3 << 20)?;
//! block.write(0, b"from the host")?;
//! block.record_use(&stream)?; // say so whenever a copy or a kernel uses it
//! drop(block); // given out again when the stream has passed
//!
//! stream.synchronize()?;
//! pinned.trim(0)?; // what is cached goes back to the driver
//! assert_eq!(pinned.stats().allocated_bytes.current, 0);
//! # pinned.close()?;
//! # Ok(())
//! # }
//! ```
//!
//! # Life of one block
//! 1. A request is rounded to its class (`size.rs`), and taken from the calling thread's front cache (`shard.rs`): one
//!    lock that nobody else wants.
//! 2. If the cache has none (`calls.rs`): what waited for streams is looked after (`pending.rs`), the heap is searched
//!    (`heap.rs`), then once more with what all caches had.
//! 3. If that has none: a segment is pinned, within the caps (`grow.rs`, `pin.rs`), and the block cut from it.
//! 4. Given back unused, it returns to the cache that it came from. Used by streams, it waits for a mark in each
//!    (`pending.rs`); used in a capture, for the end of the graph (`capture.rs`).
//!
//! # Who keeps whom
//! A block keeps the allocator's books, and the books keep the blocks: in caches, in the heap, on lists. The circle is
//! cut when the last handle goes: it empties the books. Nothing is unpinned then, since no destructor calls the driver;
//! blocks that callers have stay good, and what was pinned stays so until the process ends. [`HostAllocator::close`]
//! gives it back by hand.
//!
//! # Locks, and their order
//! A graph's host pool and the heap come before a block's notes. All others (a front cache, what is pending, the
//! journal, settings) are leaves, and none is held over a driver call or a tracker. Whoever waits for a segment that
//! another thread gives back waits with the heap's lock alone, and lets it go meanwhile.

mod background;
mod block;
mod calls;
mod capture;
mod grow;
mod heap;
mod pending;
mod pin;
mod register;
mod shard;
mod size;
mod snapshot;
mod stats;

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};

use warpool_driver::{DeviceId, Driver, HostPtr};

pub use block::HostBlock;
pub(crate) use capture::GraphHostPool;
pub use stats::{HostStats, HostTime};

use background::Background;
use block::{BlockCell, POOLED, Standing};
use capture::GraphHostPools;
use heap::Heap;
use pending::Pending;
use shard::Shard;

use super::journal::{Journal, Recording};
use super::{HistoryOptions, Observers, PinnedSettings, Snapshot, StackLevel, Stat};
use crate::{Device, Error, Instance, Result, Stream, lock};

/// What trackers see as the device of pinned memory. Snapshots say -1.
const HOST: DeviceId = DeviceId(u32::MAX);

/// Pinned host memory, cached, for all devices of one [`Instance`]. Cheap to clone; clones are the same allocator.
///
/// Taking a cached block and giving it back costs two locks that nobody contends for, and no driver call. Requests up
/// to 256 KiB are rounded to size classes, which waste an eighth at most, larger ones to pages of 4 KiB; blocks are cut
/// from segments and joined again.
///
/// Dropping the last handle makes no driver call: what is pinned stays so. [`close`](Self::close) gives it back.
///
/// # Where it differs from PyTorch
/// - Sizes are not rounded to powers of two, and cached memory of one size serves requests of another.
/// - Marks are looked after stream by stream: one stream that is behind holds back only what it used.
/// - `allocations` and `allocated_bytes` count segments, which may have many blocks.
/// - `pinned_max_cached_size_mb` and `pinned_max_round_threshold_mb` are about different things: the one gives blocks
///   back when they are free, the other keeps sizes exact.
/// - There are caps, which are errors of their own kind ([`Error::PinnedCap`]), and a [`trim`](Self::trim) with a
///   target.
#[derive(Clone)]
pub struct HostAllocator {
    handle: Arc<Handle>,
}

/// What handles share. It goes with the last of them, while blocks may live on.
struct Handle {
    shared: Arc<Shared>,
}

/// The books.
struct Shared {
    instance: Instance,
    shards: Box<[Shard]>,
    limits: Limits,
    heap: Mutex<Heap>,
    /// A segment that was on its way to the driver has arrived, or is back.
    moved: Condvar,
    pending: Mutex<Pending>,
    graph_pools: GraphHostPools,
    settings: Mutex<PinnedSettings>,
    background: Background,
    recording: Recording,
    journal: Mutex<Journal>,
    observers: Observers,
}

/// What the hot path asks of the settings.
struct Limits {
    /// Above it sizes are not rounded to classes.
    round_max: AtomicU64,
    /// Above it blocks are not kept.
    cached_max: AtomicU64,
    /// Whether the reserved segment is still to be made.
    wants_reserve: AtomicBool,
}

impl Limits {
    fn of(settings: &PinnedSettings) -> Self {
        let limits = Self {
            round_max: AtomicU64::new(0),
            cached_max: AtomicU64::new(0),
            wants_reserve: AtomicBool::new(settings.reserve_segment_bytes > 0),
        };
        limits.set(settings);
        limits
    }

    fn set(&self, settings: &PinnedSettings) {
        self.round_max.store(settings.max_round_threshold_bytes.unwrap_or(u64::MAX), Ordering::Relaxed);
        self.cached_max.store(settings.max_cached_bytes.unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    #[inline]
    fn round_max(&self) -> u64 {
        // What is not kept is not rounded either: nobody else will have it.
        self.round_max.load(Ordering::Relaxed).min(self.cached_max())
    }

    #[inline]
    fn cached_max(&self) -> u64 {
        self.cached_max.load(Ordering::Relaxed)
    }

    /// Whether the caller is to make the reserved segment; says so once.
    fn take_reserve(&self) -> bool {
        self.wants_reserve.load(Ordering::Relaxed) && self.wants_reserve.swap(false, Ordering::Relaxed)
    }
}

impl Shared {
    fn driver(&self) -> &dyn Driver {
        &**self.instance.driver()
    }

    /// Empties the books, so that nothing keeps them but blocks that somebody has. No driver call.
    fn let_go(&self) {
        drop(self.background.stop());
        for shard in &self.shards {
            let cells = lock(&shard.0).close();
            drop(cells);
        }
        let pending = lock(&self.pending).close();
        let segments = lock(&self.heap).close();
        drop((pending, segments));
    }

    /// Blocks that somebody has, that a stream or a graph may still use, or that lie in a graph's pool.
    fn blocks_in_use(&self) -> usize {
        let in_use = |cell: &BlockCell| match cell.standing() {
            Standing::Taken => true,
            Standing::Waiting => !lock(&cell.notes).is_only_lost(),
            Standing::Idle => cell.traits() & POOLED != 0,
            Standing::Gone => false,
        };
        lock(&self.heap).blocks().filter(|cell| in_use(cell)).count()
    }
}

impl HostAllocator {
    /// An allocator for all devices of `instance`. Makes no driver call.
    #[must_use]
    pub fn new(instance: &Instance, settings: PinnedSettings) -> Self {
        let background = Background::default();
        background.want(settings.use_background_threads);
        let shared = Shared {
            instance: instance.clone(),
            shards: shard::shards(),
            limits: Limits::of(&settings),
            heap: Mutex::default(),
            moved: Condvar::new(),
            pending: Mutex::default(),
            graph_pools: GraphHostPools::default(),
            settings: Mutex::new(settings),
            background,
            recording: Recording::default(),
            journal: Mutex::default(),
            observers: Observers::default(),
        };
        Self { handle: Arc::new(Handle { shared: Arc::new(shared) }) }
    }

    #[inline]
    fn shared(&self) -> &Arc<Shared> {
        &self.handle.shared
    }

    /// The `Instance` that it works for.
    #[must_use]
    pub fn instance(&self) -> &Instance {
        &self.shared().instance
    }

    /// The settings that are in force.
    #[must_use]
    pub fn settings(&self) -> PinnedSettings {
        lock(&self.shared().settings).clone()
    }

    /// Puts other settings in force. What is cached stays, also above a lower cap, until room is needed. A reserved
    /// segment stays as it is, and there is never a second one; one that was not asked for before is made at the next
    /// request that finds nothing cached.
    pub fn set_settings(&self, settings: PinnedSettings) {
        let shared = self.shared();
        shared.background.want(settings.use_background_threads);
        let mut current = lock(&shared.settings);
        shared.limits.set(&settings);
        match (current.reserve_segment_bytes, settings.reserve_segment_bytes) {
            (_, 0) => shared.limits.wants_reserve.store(false, Ordering::Relaxed),
            (0, _) => shared.limits.wants_reserve.store(true, Ordering::Relaxed),
            _ => {}
        }
        *current = settings;
    }

    /// Pinned memory, aligned to 512 bytes, pinned with a device that already has a context. Its contents are
    /// undefined. 0 bytes are an empty block.
    #[inline]
    pub fn allocate(&self, bytes: u64) -> Result<HostBlock> {
        self.shared().allocate(bytes, None)
    }

    /// The same, of memory that counts to that device's cap. Pinning makes no context there; all devices can use it.
    pub fn allocate_for(&self, bytes: u64, device: &Device) -> Result<HostBlock> {
        self.instance().expect_same(device.instance(), "the device")?;
        self.shared().allocate(bytes, Some(device.id()))
    }

    /// The same, for work on a stream. If that captures, the block comes from the graph's host pool: used, it stays
    /// there until the graph is gone; given back unused, it can serve the next request of the capture. The use itself
    /// still has to be [recorded](HostBlock::record_use).
    pub fn allocate_on(&self, bytes: u64, stream: &Stream) -> Result<HostBlock> {
        self.shared().allocate_on(bytes, stream)
    }

    /// Notes that `stream` uses the block that starts at `ptr`, as [`HostBlock::record_use`] does. False if nobody has
    /// such a block.
    pub fn record_use_at(&self, ptr: HostPtr, stream: &Stream) -> Result<bool> {
        self.instance().expect_same(stream.instance(), "the stream")?;
        let found = lock(&self.shared().heap).block_at(ptr.0).cloned();
        match found.filter(|cell| cell.standing() == Standing::Taken) {
            Some(cell) => Shared::record_use(&cell, stream).map(|()| true),
            None => Ok(false),
        }
    }

    /// Looks after what waits for streams, now: what has passed is free again.
    pub fn reap(&self) -> Result<()> {
        self.shared().look_after()
    }

    /// Gives cached segments back to the driver until at most `target_bytes` are pinned, and says how much it gave
    /// back. What somebody has, what waits, and the reserved segment stay. What is above `pinned_max_cached_size_mb`
    /// goes in any case, and counts. On real devices this waits for the work of the devices.
    pub fn trim(&self, target_bytes: u64) -> Result<u64> {
        let shared = self.shared();
        shared.observers.before_trim(HOST);
        let mut returned = 0;
        let looked_after = shared.look_after_all(&mut returned);
        let pinned = || lock(&shared.heap).bytes.current;
        if pinned() > target_bytes {
            shared.empty_shards();
            let cause = shared.cause(StackLevel::Alloc);
            returned += shared.return_spare(pinned().saturating_sub(target_bytes), None, &cause)?;
        }
        looked_after.map(|()| returned)
    }

    /// The counters.
    #[must_use]
    pub fn stats(&self) -> HostStats {
        let shared = self.shared();
        let mut stats = HostStats::default();
        let mut cached = 0;
        for shard in &shared.shards {
            let cache = lock(&shard.0);
            stats::sum(&mut stats.active_requests, cache.requests);
            stats::sum(&mut stats.active_bytes, cache.request_bytes);
            cached += cache.bytes();
        }
        let heap = lock(&shared.heap);
        stats.allocations = heap.count;
        stats.allocated_bytes = heap.bytes;
        stats.num_host_alloc = heap.pins;
        stats.num_host_free = heap.unpins;
        stats.host_alloc_time = heap.pin_time;
        stats.host_free_time = heap.unpin_time;
        stats.cached_bytes = cached + heap.bytes_free();
        stats.pinned_bytes_by_device = vec![0; shared.instance.device_count() as usize];
        for segment in heap.segments.values() {
            stats.pinned_bytes_by_device[segment.device.0 as usize] += segment.pinned.bytes;
        }
        stats
    }

    /// Makes every peak what is now.
    pub fn reset_peak_stats(&self) {
        self.each_stat(Stat::reset_peak);
    }

    /// Zeroes what was ever added and taken away, the plain counters and the times.
    pub fn reset_accumulated_stats(&self) {
        self.each_stat(Stat::reset_accumulated);
        let mut heap = lock(&self.shared().heap);
        (heap.pins, heap.unpins) = (0, 0);
        (heap.pin_time, heap.unpin_time) = (HostTime::default(), HostTime::default());
    }

    fn each_stat(&self, act: fn(&mut Stat)) {
        for shard in &self.shared().shards {
            let mut cache = lock(&shard.0);
            act(&mut cache.requests);
            act(&mut cache.request_bytes);
        }
        let mut heap = lock(&self.shared().heap);
        act(&mut heap.count);
        act(&mut heap.bytes);
    }

    /// Starts recording a history, or stops and forgets it.
    pub fn record_history(&self, options: Option<HistoryOptions>) {
        let shared = self.shared();
        let mut journal = lock(&shared.journal);
        shared.recording.set(options.as_ref());
        journal.history.set(options);
    }

    /// Who is told, and who helps: trackers, callbacks under memory pressure when a cap or the machine has no room, and
    /// hooks before a [`trim`](Self::trim). They see pinned memory as that of a device with the number [`u32::MAX`].
    /// Observers of failures are not called: their report is about a device's memory; what a cap refuses,
    /// [`Error::PinnedCap`] says.
    #[must_use]
    pub fn observers(&self) -> &Observers {
        &self.shared().observers
    }

    /// Adds what is pinned, and the history, to a snapshot.
    pub fn add_to(&self, snapshot: &mut Snapshot) {
        self.shared().add_to(snapshot);
    }

    /// Compares the books with each other. For tests; while other threads are at work the caches are not compared.
    ///
    /// # Panics
    /// If they disagree.
    pub fn check(&self) {
        let shared = self.shared();
        for shard in &shared.shards {
            lock(&shard.0).check();
        }
        lock(&shared.heap).check();
    }

    /// Gives everything back to the driver, behind all work that uses it.
    ///
    /// Nobody may have any of it any more: neither a clone of this handle, nor a block, nor a graph.
    /// [`Error::HostMemoryInUse`] otherwise, and nothing is given back. Of several driver calls that fail the first is
    /// reported, and the rest is still given back.
    ///
    /// The handle is gone either way. Where others are left, those go on working, and the last of them can be closed;
    /// if this was the last, what could not be given back stays pinned until the process ends.
    /// [`try_close`](Self::try_close) returns it.
    pub fn close(self) -> Result<()> {
        self.try_close().map_err(|(_, error)| error)
    }

    /// The same, but the handle comes back with the error: the allocator still works, and can be closed later.
    pub fn try_close(self) -> std::result::Result<(), (Self, Error)> {
        self.give_back_all().map_err(|error| (self, error))
    }

    fn give_back_all(&self) -> Result<()> {
        let shared = self.shared();
        // Only a handle makes handles: if this is the last one, it stays so.
        let handles = Arc::strong_count(&self.handle) - 1;
        if handles > 0 {
            return Err(Error::HostMemoryInUse { handles, blocks: shared.blocks_in_use() });
        }
        if let Some(thread) = shared.background.stop() {
            // It ends within a look; that it panicked would be a bug that it has told already.
            let _ = thread.join();
        }
        let cause = shared.cause(StackLevel::Alloc);
        shared.wait_for_marks(&cause)?;
        let mut blocks = shared.blocks_in_use();
        if blocks == 0 {
            shared.give_up_lost();
        }
        while blocks == 0 {
            shared.empty_shards();
            shared.return_everything(&cause)?;
            // Other threads that are just giving a block back, or a segment, may not be through yet.
            shared.wait_for_moves();
            let heap = lock(&shared.heap);
            if heap.count.current == 0 {
                return Ok(());
            }
            blocks = heap.blocks().count();
        }
        Err(Error::HostMemoryInUse { handles, blocks })
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.shared.let_go();
    }
}

impl fmt::Debug for HostAllocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostAllocator").field("gpu", self.instance()).finish_non_exhaustive()
    }
}
