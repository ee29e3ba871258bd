//! Workspaces of cuBLAS: device memory that the library uses, cached between calls.
//!
//! A workspace belongs to one handle and one stream: the calls on one stream are ordered, so they can share it, and no
//! other stream uses it. Stream order also protects its memory when it is freed: the work that uses the memory next
//! comes later in the same stream.
//!
//! Users of a workspace hold it by an [`Arc`], so that any thread can clear the cache at any time: its memory is freed
//! when the last user is done. No library calls here.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use warpool_driver::{BlasMath, CaptureId, DeviceId, DevicePtr, HandleId, Library, StreamId};

use super::precision;
use super::settings::{BlasSettings, default_bytes};
use crate::memory::{DeviceAllocator, DeviceBlock, HeldBlock, MemPoolId, Request, with_metadata};
use crate::{Error, Result, lock};

/// The metadata of workspaces in a history.
const METADATA: &str = "cuBLAS workspace";

/// The capture, handle and stream that a workspace is for.
pub(super) type WorkspaceKey = (Option<CaptureId>, HandleId, StreamId);

/// A block that one handle uses on one stream.
pub(super) struct Workspace {
    pub(super) key: WorkspaceKey,
    allocator: Arc<dyn DeviceAllocator>,
    /// `Some` until the drop.
    block: Option<HeldBlock>,
}

impl Workspace {
    pub(super) fn allocate(allocator: &Arc<dyn DeviceAllocator>, key: WorkspaceKey, request: Request) -> Result<Self> {
        let block = with_metadata(METADATA, || DeviceBlock::allocate(allocator, request).and_then(HeldBlock::new))?;
        let bytes = block.bytes_usable();
        allocator.observers().workspaces.change(request.device, |stat| stat.increase(bytes));
        Ok(Self { key, allocator: Arc::clone(allocator), block: Some(block) })
    }

    fn block(&self) -> &DeviceBlock {
        self.block.as_ref().expect("a workspace has its block until it is dropped")
    }

    pub(super) fn bytes(&self) -> u64 {
        self.block().bytes()
    }
}

impl Drop for Workspace {
    fn drop(&mut self) {
        let Some(block) = self.block.take() else { return };
        if self.allocator.instance().is_inherited() {
            return;
        }
        let (device, bytes) = (block.device_id(), block.bytes_usable());
        with_metadata(METADATA, || drop(block));
        self.allocator.observers().workspaces.change(device, |stat| stat.decrease(bytes));
    }
}

/// The workspaces that the work of a capture, and later its graph, uses.
#[derive(Default)]
pub(super) struct CapturedWorkspaces(pub(super) Vec<Arc<Workspace>>);

/// A workspace in use, and how much of it the library may use.
#[derive(Clone)]
pub(super) struct WorkspaceRef {
    /// `None` is no workspace.
    pub(super) workspace: Option<Arc<Workspace>>,
    pub(super) bytes: u64,
    /// Up to date until [`BlasState::epoch`] changes; [`WorkspaceRef::NEVER_CURRENT`] in a capture.
    pub(super) epoch: u64,
}

impl WorkspaceRef {
    /// An epoch that [`BlasState::epoch`] never has.
    pub(super) const NEVER_CURRENT: u64 = u64::MAX;

    pub(super) fn ptr(&self) -> DevicePtr {
        self.workspace.as_ref().map_or(DevicePtr(0), |workspace| workspace.block().ptr())
    }
}

/// The state that all handles of a [`Blas`](super::Blas) share: the settings, and the cached workspaces.
pub(super) struct BlasState {
    pub(super) allocator: Arc<dyn DeviceAllocator>,
    /// By device.
    default_bytes: Box<[u64]>,
    /// Set by [`set_bytes`](Self::set_bytes); [`UNSET`] if it is not set.
    bytes: AtomicU64,
    pub(super) lt_bytes: u64,
    pub(super) unified: bool,
    tf32: AtomicBool,
    deterministic: AtomicBool,
    /// Incremented when workspaces are cleared or their size is set: handles then look up theirs again.
    epoch: AtomicU64,
    cache: Mutex<WorkspaceCache>,
}

#[derive(Default)]
struct WorkspaceCache {
    workspaces: BTreeMap<(HandleId, StreamId), Arc<Workspace>>,
    closed: bool,
}

const UNSET: u64 = u64::MAX;

impl BlasState {
    pub(super) fn new(allocator: &Arc<dyn DeviceAllocator>, settings: &BlasSettings) -> Self {
        let bytes =
            |device: crate::Device| settings.workspace_bytes.unwrap_or_else(|| default_bytes(device.properties()));
        Self {
            allocator: Arc::clone(allocator),
            default_bytes: allocator.instance().devices().map(bytes).collect(),
            bytes: AtomicU64::new(UNSET),
            lt_bytes: settings.lt_workspace_bytes,
            unified: settings.unified_workspaces,
            tf32: AtomicBool::new(settings.tf32),
            deterministic: AtomicBool::new(settings.deterministic),
            epoch: AtomicU64::new(0),
            cache: Mutex::default(),
        }
    }

    /// The math mode for the calling thread.
    pub(super) fn math(&self) -> BlasMath {
        let tf32 = self.tf32.load(Ordering::Relaxed) && !precision::is_tf32_forbidden();
        if tf32 { BlasMath::Tf32 } else { BlasMath::Default }
    }

    /// Whether the library may use atomic operations.
    pub(super) fn atomics(&self) -> bool {
        !self.deterministic.load(Ordering::Relaxed)
    }

    pub(super) fn tf32(&self) -> &AtomicBool {
        &self.tf32
    }

    pub(super) fn deterministic(&self) -> &AtomicBool {
        &self.deterministic
    }

    pub(super) fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Acquire)
    }

    fn next_epoch(&self) {
        self.epoch.fetch_add(1, Ordering::AcqRel);
    }

    /// The size of a workspace.
    pub(super) fn bytes(&self, library: Library, device: DeviceId) -> u64 {
        if library == Library::BlasLt {
            return self.lt_bytes;
        }
        match self.bytes.load(Ordering::Acquire) {
            UNSET => self.default_bytes[device.0 as usize],
            bytes => bytes,
        }
    }

    pub(super) fn set_bytes(&self, bytes: Option<u64>) {
        // One byte less than `UNSET` cannot be allocated either.
        let bytes = bytes.map_or(UNSET, |bytes| bytes.min(UNSET - 1));
        self.bytes.store(bytes, Ordering::Release);
        self.next_epoch();
    }

    /// The cached workspace of a handle and a stream; allocated if there is none, or only a smaller one.
    pub(super) fn get(
        &self,
        library: Library,
        handle: HandleId,
        stream: StreamId,
        device: DeviceId,
    ) -> Result<WorkspaceRef> {
        // The epoch is read first: after a later change the next caller looks up the workspace again.
        let epoch = self.epoch();
        let (key, bytes) = ((handle, stream), self.bytes(library, device));
        let closed = || Err(Error::HandlePoolClosed { library: library.name() });
        {
            let cache = lock(&self.cache);
            if cache.closed {
                return closed();
            }
            if bytes == 0 {
                return Ok(WorkspaceRef { workspace: None, bytes, epoch });
            }
            if let Some(cached) = cache.workspaces.get(&key).filter(|cached| cached.bytes() >= bytes) {
                return Ok(WorkspaceRef { workspace: Some(Arc::clone(cached)), bytes, epoch });
            }
        }
        // From the default pool, even if the thread is routed to another: the workspace outlives that scope. A smaller
        // one is dropped after the larger one was allocated, so that a failure leaves it in place.
        let request = Request::new(device, stream, bytes).in_pool(MemPoolId::DEFAULT);
        let workspace = Arc::new(Workspace::allocate(&self.allocator, (None, handle, stream), request)?);
        let mut cache = lock(&self.cache);
        if cache.closed {
            drop(cache);
            return closed();
        }
        let smaller = cache.workspaces.insert(key, Arc::clone(&workspace));
        drop(cache);
        drop(smaller);
        Ok(WorkspaceRef { workspace: Some(workspace), bytes, epoch })
    }

    /// Drops the cached workspaces that `which` selects by handle and stream, and returns how many. Those in use are
    /// freed when their users are done.
    pub(super) fn clear(&self, mut which: impl FnMut(HandleId, StreamId) -> bool) -> usize {
        if self.allocator.instance().is_inherited() {
            return 0;
        }
        let mut cache = lock(&self.cache);
        let mut cleared = Vec::new();
        cache.workspaces.retain(|&(handle, stream), workspace| {
            let selected = which(handle, stream);
            if selected {
                cleared.push(Arc::clone(workspace));
            }
            !selected
        });
        if !cleared.is_empty() {
            self.next_epoch();
        }
        drop(cache);
        // Dropped without the lock: trackers see the frees, and may fetch a handle.
        cleared.len()
    }

    /// Drops the cached workspaces of `device` that are not in use, whether or not their threads are alive.
    pub(super) fn clear_unused(&self, device: DeviceId) -> usize {
        let mut cache = lock(&self.cache);
        // Only the cache creates more references, so a workspace with one reference stays unused while the lock is
        // held. A handle with a weak reference sees the new epoch, or uses the workspace while it exists.
        let is_unused =
            |cached: &Arc<Workspace>| cached.block().device_id() == device && Arc::strong_count(cached) == 1;
        let unused: Vec<_> =
            cache.workspaces.iter().filter(|(_, cached)| is_unused(cached)).map(|(&key, _)| key).collect();
        let cleared: Vec<_> = unused.iter().filter_map(|key| cache.workspaces.remove(key)).collect();
        if !cleared.is_empty() {
            self.next_epoch();
        }
        drop(cache);
        cleared.len()
    }

    /// Drops all workspaces, and caches none from now on.
    pub(super) fn close(&self) {
        lock(&self.cache).closed = true;
        self.next_epoch();
        self.clear(|_, _| true);
    }
}
