//! Pinned host memory: [`HostAllocator`], with a cache in front of the driver.
//!
//! ```
//! use std::sync::Arc;
//! use warpool::Instance;
//! use warpool::driver::sim::{SimConfig, SimDriver};
//! use warpool::memory::PinnedSettings;
//! use warpool::memory::host::{HostAllocator, HostStats, HostTime};
//!
//! # fn main() -> warpool::Result<()> {
//! let instance = Instance::new(Arc::new(SimDriver::new(SimConfig::default())))?;
//! let stream = instance.device(0)?.pool_stream()?;
//! let pinned = HostAllocator::new(&instance, PinnedSettings::default());
//!
//! let block = pinned.allocate(3 << 20)?;
//! block.write(0, b"from the host")?;
//! block.record_use(&stream)?; // required whenever a copy or a kernel uses it
//! drop(block); // reused once the stream has completed that work
//!
//! stream.synchronize()?;
//! pinned.trim(0)?; // unpins what is cached
//! let stats: HostStats = pinned.stats();
//! let time: HostTime = stats.host_alloc_time;
//! assert_eq!((stats.allocated_bytes.current, time.count), (0, 1)); // pinned once
//! # pinned.close()?;
//! # Ok(())
//! # }
//! ```
//!
//! # The life of a block
//! 1. A request is rounded to its size class (`size_class.rs`), and a block taken from the calling thread's front cache
//!    (`front_cache.rs`): one uncontended lock.
//! 2. If the cache has none (`allocate.rs`): pending frees are processed (`reclaim.rs`). Then the thread's shard of the
//!    heap (`shard.rs`, `heap.rs`), the caches of other threads, and the other shards are searched; and once more after
//!    the blocks of all caches are merged.
//! 3. If the heap has none: a segment is pinned within the caps (`segments.rs`, `pin.rs`), and the block is split off
//!    it.
//! 4. A freed block that no stream used returns to the cache that it was taken from (`store.rs`). One that streams used
//!    waits for a fence in each (`reclaim.rs`); one that a capture used waits until the graph is dropped
//!    (`graph_pool.rs`).
//!
//! # Ownership
//! A block keeps the allocator's state alive, and the state refers to blocks: in caches, in the heap, in lists.
//! Dropping the last handle breaks the cycle by emptying the state. Nothing is unpinned then, since no destructor calls
//! the driver. Blocks of callers stay valid, and pinned memory stays pinned until the process ends.
//! [`HostAllocator::close`] unpins it.
//!
//! # Lock order
//! A graph's host pool and the shards of the heap are locked before a block's usage and the heap's ledger. All others
//! (a front cache, pending work, the history, settings) are taken last, and none is held during a driver call or while
//! a tracker runs. A thread that waits for a segment in transit holds only the ledger's lock, and releases it while it
//! waits.

mod allocate;
mod background;
mod block;
mod framework_graphs;
mod front_cache;
mod graph_pool;
mod heap;
mod history;
mod ledger;
mod limits;
mod pin;
mod reclaim;
mod register;
mod segments;
mod shard;
mod size_class;
mod snapshot;
mod stats;
mod store;

use std::fmt;
use std::sync::{Arc, Mutex};

use warpool_driver::{Driver, HostPtr};

pub use block::HostBlock;
pub use framework_graphs::HostGraphPool;
pub(crate) use graph_pool::CapturedHostPools;
pub use stats::{HostStats, HostTime};

use background::BackgroundThread;
use block::{IN_GRAPH_POOL, PinnedBlock, PinnedState};
use front_cache::FrontCaches;
use graph_pool::GraphHostPools;
use heap::Heap;
use history::{Details, HOST, HostHistory};
use limits::Limits;
use reclaim::PendingWork;

use super::report::StackIds;
use super::{HistoryOptions, Observers, PinnedSettings, Snapshot, StackLevel, Stat};
use crate::{Device, Error, Instance, Result, Stream, lock};

/// A caching allocator of pinned host memory, for all devices of one [`Instance`]. Cheap to clone; clones share one
/// allocator.
///
/// Allocating and freeing a cached block takes two uncontended locks and no driver call. Requests up to 256 KiB are
/// rounded to size classes, which waste at most an eighth, larger ones to pages of 4 KiB. Blocks are split from
/// segments and merged again.
///
/// Dropping the last handle makes no driver call: pinned memory stays pinned. [`close`](Self::close) unpins it.
///
/// # Where it differs from PyTorch
/// - Sizes are not rounded to powers of two, and cached memory of one size serves requests of another.
/// - Fences are polled by stream: a busy stream delays only the blocks that it used.
/// - `allocations` and `allocated_bytes` count segments, which may have many blocks.
/// - `pinned_max_cached_size_mb` and `pinned_max_round_threshold_mb` are independent: one unpins blocks when they are
///   freed, the other keeps sizes exact.
/// - There are caps, with an error of their own ([`Error::PinnedCap`]), and a [`trim`](Self::trim) with a target.
#[derive(Clone)]
pub struct HostAllocator {
    handle: Arc<Handle>,
}

/// The state that handles share. It is dropped with the last of them; blocks may outlive it.
struct Handle {
    shared: Arc<Shared>,
}

/// The state that handles and blocks share.
struct Shared {
    instance: Instance,
    front: FrontCaches,
    limits: Limits,
    heap: Heap,
    pending: PendingWork,
    graph_pools: GraphHostPools,
    settings: Mutex<PinnedSettings>,
    background: BackgroundThread,
    history: HostHistory,
}

impl Shared {
    fn driver(&self) -> &dyn Driver {
        &**self.instance.driver()
    }

    #[inline]
    fn details(&self, level: StackLevel) -> Details {
        self.history.details(level, self.driver())
    }

    /// The allocated block that contains `ptr`.
    fn allocated_with(&self, ptr: HostPtr) -> Option<Arc<PinnedBlock>> {
        let found = self.heap.block_with(self.front.of_thread(), ptr.0);
        found.filter(|block| block.state() == PinnedState::Allocated)
    }

    /// Empties the state, so that only blocks of callers keep it alive. Makes no driver call.
    fn clear(&self) {
        drop(self.background.stop());
        drop(self.front.close());
        let fences = self.pending.with(|pending| pending.fences.close());
        let segments = self.heap.close();
        drop((fences, segments));
    }

    /// Blocks that are allocated, that a stream or a known graph may still use, or that are in a graph's pool.
    fn blocks_in_use(&self) -> usize {
        let in_use = |block: &PinnedBlock| match block.state() {
            PinnedState::Allocated => true,
            PinnedState::PendingFree => !lock(&block.usage).is_leaked(),
            PinnedState::Free => block.flags() & IN_GRAPH_POOL != 0,
            PinnedState::Merged => false,
        };
        self.heap.lock_all().blocks().filter(|block| in_use(block)).count()
    }
}

impl HostAllocator {
    /// An allocator for all devices of `instance`. Makes no driver call.
    #[must_use]
    pub fn new(instance: &Instance, settings: PinnedSettings) -> Self {
        let background = BackgroundThread::default();
        background.set_enabled(settings.use_background_threads);
        let front = FrontCaches::new();
        let shared = Shared {
            instance: instance.clone(),
            limits: Limits::of(&settings),
            heap: Heap::new(front.len()),
            front,
            pending: PendingWork::default(),
            graph_pools: GraphHostPools::default(),
            settings: Mutex::new(settings),
            background,
            history: HostHistory::default(),
        };
        Self { handle: Arc::new(Handle { shared: Arc::new(shared) }) }
    }

    #[inline]
    fn shared(&self) -> &Arc<Shared> {
        &self.handle.shared
    }

    /// The instance whose devices can use the memory.
    #[must_use]
    pub fn instance(&self) -> &Instance {
        &self.shared().instance
    }

    /// The current settings; the defaults in a forked child.
    #[must_use]
    pub fn settings(&self) -> PinnedSettings {
        if self.instance().is_inherited() {
            return PinnedSettings::default();
        }
        lock(&self.shared().settings).clone()
    }

    /// Replaces the settings. Cached memory stays, even above a lower cap, until room is needed. A reserved segment
    /// stays as it is, and there is never a second one; if only the new settings ask for one, the next request that
    /// finds nothing cached pins it.
    pub fn set_settings(&self, settings: PinnedSettings) {
        let shared = self.shared();
        if shared.instance.is_inherited() {
            return;
        }
        shared.background.set_enabled(settings.use_background_threads);
        let mut current = lock(&shared.settings);
        shared.limits.set(&current, &settings);
        *current = settings;
    }

    /// Pinned memory, aligned to 512 bytes, with undefined contents. It is pinned with the context of a device that has
    /// one. A request for 0 bytes returns an empty block.
    #[inline]
    pub fn allocate(&self, bytes: u64) -> Result<HostBlock> {
        self.shared().allocate(bytes, None)
    }

    /// As [`allocate`](Self::allocate), on the hot path alone, for frameworks that call this on every allocation.
    /// `None`, without any change, if no cached block fits or other work is due.
    #[inline]
    #[must_use]
    pub fn allocate_cached(&self, bytes: u64) -> Option<HostBlock> {
        self.shared().allocate_cached(bytes, None)
    }

    /// Frees a block as [`HostBlock::free`] does, but faster if the block belongs to this allocator.
    #[inline]
    pub fn free(&self, block: HostBlock) -> Result<()> {
        match block.into_own(self.shared()) {
            Ok(own) => self.shared().free_own(own),
            Err(other) => other.free(),
        }
    }

    /// As [`free`](Self::free), on the hot path alone, like [`allocate_cached`](Self::allocate_cached). Returns the
    /// block, without any change, if it cannot be cached or other work is due.
    #[inline]
    pub fn free_cached(&self, block: HostBlock) -> std::result::Result<(), HostBlock> {
        let own = block.into_own(self.shared())?;
        self.shared().free_cached(own).map_err(HostBlock::new)
    }

    /// Pinned memory that counts against that device's cap. No context is created on it; all devices can use the
    /// memory.
    pub fn allocate_for(&self, bytes: u64, device: &Device) -> Result<HostBlock> {
        self.instance().expect_same(device.instance(), "the device")?;
        self.shared().allocate(bytes, Some(device.id()))
    }

    /// Pinned memory for work on a stream. If the stream is capturing, the block comes from the graph's host pool: a
    /// block that the capture uses stays there until the graph is gone, and one that is freed unused can serve the next
    /// request of the capture. The use itself still has to be [recorded](HostBlock::record_use).
    pub fn allocate_on(&self, bytes: u64, stream: &Stream) -> Result<HostBlock> {
        self.shared().allocate_on(bytes, stream)
    }

    /// Records that `stream` uses the block at `ptr`, as [`HostBlock::record_use`] does. Returns `false` if no block is
    /// allocated there.
    pub fn record_use_at(&self, ptr: HostPtr, stream: &Stream) -> Result<bool> {
        self.record_use_of(stream, |shared| shared.allocated_with(ptr).filter(|block| block.ptr() == ptr.0))
    }

    /// As [`record_use_at`](Self::record_use_at), for any address in the block.
    pub fn record_use_within(&self, ptr: HostPtr, stream: &Stream) -> Result<bool> {
        self.record_use_of(stream, |shared| shared.allocated_with(ptr))
    }

    fn record_use_of(&self, stream: &Stream, find: impl FnOnce(&Shared) -> Option<Arc<PinnedBlock>>) -> Result<bool> {
        self.instance().expect_same(stream.instance(), "the stream")?;
        self.instance().expect_own_process("record_use")?;
        match find(self.shared()) {
            Some(block) => Shared::record_use(&block, stream).map(|()| true),
            None => Ok(false),
        }
    }

    /// Reclaims freed blocks whose fences have passed. Requests that find nothing cached do this too.
    pub fn process_pending(&self) -> Result<()> {
        self.instance().expect_own_process("process_pending")?;
        self.shared().process_pending()
    }

    /// Unpins cached segments until at most `target_bytes` are pinned. Returns the unpinned bytes. Allocated and
    /// pending blocks and the reserved segment stay. Segments above `pinned_max_cached_size_mb` are always unpinned,
    /// and count. On real devices this waits for the devices' work.
    pub fn trim(&self, target_bytes: u64) -> Result<u64> {
        let shared = self.shared();
        shared.instance.expect_own_process("trim")?;
        shared.history.observers().run_trim_hooks(HOST);
        let mut unpinned = 0;
        let details = shared.details(StackLevel::Alloc);
        let mut outcome = shared.process_all(&mut unpinned, &details);
        let pinned = || shared.heap.bytes_pinned();
        if pinned() > target_bytes {
            shared.empty_front_caches();
            match shared.unpin_spare(pinned().saturating_sub(target_bytes), None, &details) {
                Ok(bytes) => unpinned += bytes,
                // This error takes precedence over one of an earlier step.
                Err(error) => outcome = Err(error),
            }
        }
        details.finish();
        outcome.map(|()| unpinned)
    }

    /// The statistics; all 0 in a forked child.
    #[must_use]
    pub fn stats(&self) -> HostStats {
        let mut stats = HostStats::default();
        if self.instance().is_inherited() {
            return stats;
        }
        self.shared().front.add_to(&mut stats);
        self.shared().heap.lock_all().add_to(&mut stats, self.instance().device_count());
        stats
    }

    /// Sets every peak to the current value.
    pub fn reset_peak_stats(&self) {
        if self.instance().is_inherited() {
            return;
        }
        self.shared().front.for_each_stat(Stat::reset_peak);
        self.shared().heap.for_each_stat(Stat::reset_peak);
    }

    /// Sets the accumulated counters and the times to zero.
    pub fn reset_accumulated_stats(&self) {
        if self.instance().is_inherited() {
            return;
        }
        self.shared().front.for_each_stat(Stat::reset_accumulated);
        self.shared().heap.reset_accumulated_stats();
    }

    /// Starts recording a history, or stops and clears it.
    pub fn record_history(&self, options: Option<HistoryOptions>) {
        if self.instance().is_inherited() {
            return;
        }
        self.shared().history.set(options);
    }

    /// The observers: trackers, pressure callbacks (called when a cap or the machine has no room), and hooks before a
    /// [`trim`](Self::trim). They see pinned memory as memory of the device number [`u32::MAX`]. Out-of-memory
    /// observers are not called: their report is about device memory.
    #[must_use]
    pub fn observers(&self) -> &Observers {
        self.shared().history.observers()
    }

    /// Adds the pinned segments and the history to a snapshot.
    pub fn add_to(&self, snapshot: &mut Snapshot) {
        if self.instance().is_inherited() {
            return;
        }
        let mut stacks = StackIds::of(snapshot);
        self.shared().history.add_to(snapshot, &mut stacks);
        snapshot::add_segments(&self.shared().heap.lock_all(), snapshot, &mut stacks);
    }

    /// Checks the invariants of the state. For tests. Checks nothing in a forked child.
    ///
    /// # Panics
    /// If an invariant does not hold.
    pub fn check(&self) {
        if self.instance().is_inherited() {
            return;
        }
        self.shared().front.check();
        self.shared().heap.lock_all().check();
    }

    /// How often a thread had to wait for a lock of the heap. For tests.
    #[doc(hidden)]
    #[must_use]
    pub fn heap_lock_waits(&self) -> u64 {
        self.shared().heap.waits()
    }

    /// Unpins everything, after all work that uses it is done.
    ///
    /// [`Error::HostMemoryInUse`] if there is another handle, an allocated block, or a graph that uses one; nothing is
    /// unpinned then. If a driver call fails, the rest is still unpinned, and the first error is returned.
    ///
    /// The handle is consumed either way. Other handles keep working, and the last of them can be closed; if this was
    /// the last, memory that could not be unpinned stays pinned until the process ends. [`try_close`](Self::try_close)
    /// returns the handle.
    pub fn close(self) -> Result<()> {
        self.try_close().map_err(|(_, error)| error)
    }

    /// As [`close`](Self::close), but returns the handle with the error. The allocator still works, and can be closed
    /// later.
    pub fn try_close(self) -> std::result::Result<(), (Self, Error)> {
        if let Err(error) = self.instance().expect_own_process("close") {
            return Err((self, error));
        }
        let details = self.shared().details(StackLevel::Alloc);
        let outcome = self.unpin_everything(&details);
        details.finish();
        outcome.map_err(|error| (self, error))
    }

    fn unpin_everything(&self, details: &Details) -> Result<()> {
        let shared = self.shared();
        // A handle is only created from another one, so the last one stays the last.
        let handles = Arc::strong_count(&self.handle) - 1;
        if handles > 0 {
            return Err(Error::HostMemoryInUse { handles, blocks: shared.blocks_in_use() });
        }
        if let Some(thread) = shared.background.stop() {
            // The thread ends after one more iteration. A panic in it was already reported.
            let _ = thread.join();
        }
        shared.wait_for_fences(details)?;
        let mut blocks = shared.blocks_in_use();
        if blocks == 0 {
            shared.merge_leaked();
        }
        while blocks == 0 {
            shared.empty_front_caches();
            shared.unpin_all(details)?;
            // Other threads may still be freeing a block or unpinning a segment.
            shared.heap.wait_for_transit();
            if shared.heap.is_empty() {
                return Ok(());
            }
            blocks = shared.heap.lock_all().blocks().count();
        }
        Err(Error::HostMemoryInUse { handles, blocks })
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if !self.shared.instance.is_inherited() {
            self.shared.clear();
        }
    }
}

impl fmt::Debug for HostAllocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostAllocator").field("instance", self.instance()).finish_non_exhaustive()
    }
}
