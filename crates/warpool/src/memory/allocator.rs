//! The trait [`DeviceAllocator`], which every device allocator implements.
//!
//! The trait uses addresses and ids, for C callers and replays; [`DeviceBlock`](super::DeviceBlock) is the owning
//! wrapper. The contract is documented only here, and one conformance suite tests every allocator against it.

use std::fmt;
use std::sync::Arc;

use warpool_driver::{DeviceId, DevicePtr, StreamId};

use super::elastic_range::ElasticRanges;
use super::{
    Allocation, Checkpoints, GraphKey, HistoryOptions, MappedPart, MemPoolId, Observers, PageStats, PrivatePools,
    Request, Settings, Snapshot, SnapshotOptions, Stats, Usage,
};
use crate::ledger::LedgerPages;
use crate::{Error, Instance, Result};

/// An allocator of device memory, for all devices of one [`Instance`].
///
/// A block is allocated for a stream. Once freed, it may be reused on the same stream immediately, because stream order
/// protects it. A block that other streams used as well ([`record_use_raw`](Self::record_use_raw)) is reused only after
/// their work is done.
///
/// What only some allocators can do fails with [`Error::Unsupported`] in the others: that is what the default methods
/// do, unless they say otherwise.
///
/// - Every method may be called from any thread at any time, even while a stream is capturing.
/// - A failed call has no visible effect except on statistics.
/// - Observers are called without any lock held, and may call the allocator.
///
/// # Safety
/// Typed buffers are built on the returned memory, and safe code writes to it. The implementation must guarantee:
/// - Until it is freed, an allocation is device memory of its [`Instance`] that starts at `ptr` and has at least the
///   requested size.
/// - Until it is freed and the work of its streams is done, no other allocation and no other memory of the program
///   overlaps it.
#[expect(unsafe_code, reason = "nothing can check what an implementation returns")]
pub unsafe trait DeviceAllocator: fmt::Debug + Send + Sync {
    /// The name that selects this allocator, such as `caching` or `driver-pool`.
    fn name(&self) -> &'static str;

    /// The instance whose memory it allocates.
    fn instance(&self) -> &Instance;

    /// Allocates memory. [`Error::OutOfMemory`] carries a report of the device's memory.
    fn allocate_raw(&self, request: Request) -> Result<Allocation>;

    /// Frees the allocation that starts at `ptr`; null is ignored.
    /// [`Error::UnknownPointer`] if there is none.
    fn free_raw(&self, ptr: DevicePtr) -> Result<()>;

    /// Allocates cached memory on the hot path alone, for frameworks that call this on every allocation. `None`,
    /// without any change, if more is needed, and by default: call [`allocate_raw`](Self::allocate_raw) then.
    #[must_use]
    fn allocate_cached(&self, request: &Request) -> Option<DevicePtr> {
        let _ = request;
        None
    }

    /// Frees the allocation that starts at `ptr` on `device` on the hot path alone. `false`, without any change, if
    /// there is none or more is needed, and by default: call [`free_raw`](Self::free_raw) then.
    fn free_cached(&self, device: DeviceId, ptr: DevicePtr) -> bool {
        let _ = (device, ptr);
        false
    }

    /// As [`allocate_raw`](Self::allocate_raw), but at `ptr`, out of a free block of the same stream and pool that
    /// contains the range. Makes no driver call.
    fn allocate_at(&self, request: Request, ptr: DevicePtr) -> Result<Allocation> {
        let _ = (request, ptr);
        unsupported(self.name(), "allocation at a given address")
    }

    /// Records that work on `stream` uses the allocation that starts at `ptr`. Its memory is then reused only after the
    /// work that the stream holds at the time of the free is done. Null, and the stream that the allocation was made
    /// for, are ignored.
    fn record_use_raw(&self, ptr: DevicePtr, stream: StreamId) -> Result<()>;

    /// The allocation that starts at `ptr`.
    fn find(&self, ptr: DevicePtr) -> Result<Allocation>;

    /// As [`free_raw`](Self::free_raw), for an allocation of this allocator that the caller owns.
    fn free(&self, allocation: Allocation) -> Result<()> {
        self.free_raw(allocation.ptr)
    }

    /// As [`free`](Self::free), for destructors: makes no driver call, and leaves any that are needed to a later call.
    fn free_later(&self, allocation: Allocation);

    /// As [`record_use_raw`](Self::record_use_raw), for an allocation that the caller owns.
    fn record_use(&self, allocation: Allocation, stream: StreamId) -> Result<()> {
        self.record_use_raw(allocation.ptr, stream)
    }

    /// As [`record_use`](Self::record_use), for destructors: makes no driver call. The streams are distinct, and their
    /// work is not part of a capture.
    fn record_uses_later(&self, allocation: Allocation, streams: &[StreamId]) {
        for &stream in streams {
            // It fails only for an allocation that does not exist.
            let _ = self.record_use(allocation, stream);
        }
    }

    /// Writes `text` into the history, with the allocation that starts at `ptr`.
    fn annotate(&self, ptr: DevicePtr, text: &str) -> Result<()> {
        let _ = (ptr, text);
        unsupported(self.name(), "annotations of blocks")
    }

    /// The physical memory of the allocation that starts at `ptr`, in the order of the addresses. The first part may
    /// begin before it, and the last may end after it. They stay mapped as long as it is allocated. Empty if the
    /// allocator did not map its memory, as by default.
    fn mapped_parts(&self, ptr: DevicePtr) -> Result<Vec<MappedPart>> {
        let _ = ptr;
        Ok(Vec::new())
    }

    /// Whether memory may be mapped: then a copy between devices without peer access needs the driver's call for that.
    fn maps_memory(&self) -> bool {
        true
    }

    /// Lets kernels on `device` access this allocator's memory on `owner`, present and future. A second call changes
    /// nothing.
    fn enable_peer_access(&self, device: DeviceId, owner: DeviceId) -> Result<()> {
        let _ = (device, owner);
        unsupported(self.name(), "peer access")
    }

    /// Records that a graph owns the allocation. Freeing it fails with
    /// [`Error::HeldByGraph`] until every `hold` is matched by an
    /// [`end_hold`](Self::end_hold).
    #[doc(hidden)]
    fn hold(&self, allocation: Allocation, key: GraphKey) -> Result<()> {
        let _ = (allocation, key);
        Ok(())
    }

    /// Ends one [`hold`](Self::hold).
    #[doc(hidden)]
    fn end_hold(&self, allocation: Allocation, key: GraphKey) {
        let _ = (allocation, key);
    }

    /// Returns unused cached memory to the driver, and returns the number of bytes. For the default pool, this includes
    /// the memory of all released private pools. A private pool is trimmed only if it is released.
    fn trim(&self, device: DeviceId, pool: MemPoolId) -> Result<u64>;

    /// Returns a part of the memory to the driver that was not needed for [`idle_decay_ms`], and the number of bytes:
    /// 0 if it is too early for the next part, and by default. Waits for nothing. The paged allocator also does this in
    /// requests that need pages, so only a program that makes none for long has to call it:
    /// [`BackgroundReclaim`] is a thread that does.
    ///
    /// [`idle_decay_ms`]: crate::memory::Settings::idle_decay_ms
    /// [`BackgroundReclaim`]: crate::memory::BackgroundReclaim
    fn release_idle(&self, device: DeviceId) -> Result<u64> {
        let _ = device;
        Ok(0)
    }

    /// Divides the memory of the devices with other processes of the user, by [`Settings::share`]. `pages` has what
    /// they say of each other: [`SharedPages`](crate::share::SharedPages). The allocator then takes no memory that
    /// others hold or are guaranteed, waits for a bounded time for their idle pages before a request fails, and gives
    /// its own. An error, and nothing is shared, if another process cannot be understood or too much is guaranteed.
    ///
    /// Call it before the first request, and [`release_idle`](Self::release_idle) within
    /// [`reclaim_ms`](super::settings::ShareSettings::reclaim_ms) again and again, as
    /// [`BackgroundReclaim`](super::BackgroundReclaim) does. Allocators of one process are like processes, if their
    /// pages were published through clones of one [`PageDirectory`](crate::share::PageDirectory).
    fn share(&self, pages: &Arc<dyn LedgerPages>) -> Result<()> {
        let _ = pages;
        unsupported(self.name(), "several processes on one GPU; use backend:paged")
    }

    /// The largest request that could succeed without waiting or releasing anything: the larger of the device's free
    /// memory and the largest cached block.
    fn largest_available(&self, device: DeviceId) -> Result<u64>;

    /// Limits reserved memory to this fraction of the device's memory; 1 is no limit.
    /// [`Error::Fraction`] outside of [0, 1].
    fn set_memory_fraction(&self, device: DeviceId, fraction: f64) -> Result<()>;

    /// The fraction that is set.
    fn memory_fraction(&self, device: DeviceId) -> Result<f64>;

    /// Limits reserved memory to `bytes`, in addition to the fraction; `None` is no limit.
    fn set_memory_cap(&self, device: DeviceId, bytes: Option<u64>) -> Result<()> {
        let _ = (device, bytes);
        unsupported(self.name(), "a memory cap that changes at run time")
    }

    /// The settings in effect; the defaults in a forked child.
    fn settings(&self) -> Arc<Settings>;

    /// Changes the settings. Cached memory stays. Memory fraction and cap keep their initial values, or those of the
    /// last call that set them.
    fn set_settings(&self, settings: Settings) -> Result<()> {
        let _ = settings;
        unsupported(self.name(), "settings that change at run time")
    }

    /// Turns caching off or on. While it is off, every request is a driver call and appears in no statistics. Memory is
    /// freed the way it was allocated.
    fn set_caching(&self, on: bool) -> Result<()> {
        let _ = on;
        unsupported(self.name(), "switching caching off")
    }

    /// The statistics of a device.
    fn stats(&self, device: DeviceId) -> Result<Stats>;

    /// Resets every peak to the current value.
    fn reset_peak_stats(&self, device: DeviceId) -> Result<()>;

    /// Resets the accumulated statistics to 0.
    fn reset_accumulated_stats(&self, device: DeviceId) -> Result<()>;

    /// How a device's memory is used. Changes nothing, makes no driver call, and appears in no history: for readers
    /// that come often. By default the statistics alone.
    fn usage(&self, device: DeviceId) -> Result<Usage> {
        Ok(Usage { stats: self.stats(device)?, ..Usage::default() })
    }

    /// What a device's pages are used for.
    fn page_stats(&self, device: DeviceId) -> Result<PageStats> {
        let _ = device;
        unsupported(self.name(), "statistics of pages")
    }

    /// The state of all devices as plain data.
    fn snapshot(&self, options: SnapshotOptions) -> Result<Snapshot>;

    /// Starts recording the history, or stops and clears it (`None`).
    fn record_history(&self, options: Option<HistoryOptions>) -> Result<()>;

    /// The observers of this allocator.
    fn observers(&self) -> &Observers;

    /// Its private pools; [`Error::Unsupported`] if it has none.
    fn pools(&self) -> Result<&dyn PrivatePools>;

    /// Its elastic memory.
    fn elastic(&self) -> Result<&dyn ElasticRanges> {
        unsupported(self.name(), "elastic memory; use backend:paged")
    }

    /// Checkpoints of its private pools.
    fn checkpoints(&self) -> Result<&dyn Checkpoints> {
        unsupported(self.name(), "checkpoints of pools")
    }
}

fn unsupported<T>(allocator: &'static str, what: &'static str) -> Result<T> {
    Err(Error::Unsupported { allocator, what })
}

/// An allocator in an [`Arc`]: `Arc<CachingAllocator>` or another concrete one, or `Arc<dyn DeviceAllocator>`. Whatever
/// needs device memory takes a reference to one.
///
/// ```
/// # use std::sync::Arc;
/// # use warpool::{DeviceVec, Instance, driver::sim::{SimConfig, SimDriver}};
/// # use warpool::graph::{Graph, GraphOptions};
/// # use warpool::memory::{Allocate, CachingAllocator, DeviceAllocator, Settings};
/// # fn main() -> warpool::Result<()> {
/// # let instance = Instance::new(Arc::new(SimDriver::new(SimConfig::default())))?;
/// # let device = instance.device(0)?;
/// # let stream = device.pool_stream()?;
/// let caching = Arc::new(CachingAllocator::new(&instance, Settings::default()));
/// let block = caching.allocate(1 << 20, &stream)?;
/// let values = DeviceVec::<f32>::uninit(&caching, 1000, &stream)?;
/// let graph = Graph::new(&caching, &device, GraphOptions::default())?;
///
/// let any: Arc<dyn DeviceAllocator> = caching;
/// let block = any.allocate(1 << 20, &stream)?;
/// let values = DeviceVec::<f32>::uninit(&any, 1000, &stream)?;
/// let graph = Graph::new(&any, &device, GraphOptions::default())?;
/// # Ok(())
/// # }
/// ```
pub trait SharedAllocator {
    /// Another handle of the allocator, whose type is erased.
    fn to_dyn(&self) -> Arc<dyn DeviceAllocator>;
}

impl SharedAllocator for Arc<dyn DeviceAllocator> {
    #[inline]
    fn to_dyn(&self) -> Arc<dyn DeviceAllocator> {
        Arc::clone(self)
    }
}

impl<A: DeviceAllocator + 'static> SharedAllocator for Arc<A> {
    #[inline]
    fn to_dyn(&self) -> Arc<dyn DeviceAllocator> {
        Arc::<A>::clone(self)
    }
}
