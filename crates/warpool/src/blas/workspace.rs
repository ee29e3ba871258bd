//! Memory for cuBLAS to work in, and who keeps it between products.
//!
//! A workspace belongs to one handle and one stream: products of one stream come one after the other, so they can share
//! it, and nobody else uses it. The same order protects its memory when it is given back: the next work that gets it
//! comes later in the same stream.
//!
//! Whoever uses a workspace holds it by an [`Arc`], so that it can be cleared at any time by anybody: it goes when its
//! last user is done. Here is no library call; blocks come and go by the allocator.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use warpool_driver::{BlasMath, CaptureId, DeviceId, DevicePtr, HandleId, Library, StreamId};

use super::precision;
use super::settings::{BlasSettings, default_bytes};
use crate::memory::{DeviceAllocator, DeviceBlock, MemPoolId, Request, with_metadata};
use crate::{Error, Result, lock};

/// What a history shows beside a workspace.
const MARK: &str = "cuBLAS workspace";

/// In which capture, by which handle, on which stream a workspace is used.
pub(super) type Whose = (Option<CaptureId>, HandleId, StreamId);

/// A block that one handle works with on one stream.
pub(super) struct Workspace {
    pub(super) whose: Whose,
    allocator: Arc<dyn DeviceAllocator>,
    /// There until the drop.
    block: Option<DeviceBlock>,
}

impl Workspace {
    /// Takes a block from `allocator`.
    pub(super) fn allocate(allocator: &Arc<dyn DeviceAllocator>, whose: Whose, request: Request) -> Result<Self> {
        let block = with_metadata(MARK, || DeviceBlock::allocate(allocator, request))?;
        let bytes = block.bytes_usable();
        allocator.observers().workspaces.change(request.device, |stat| stat.increase(bytes));
        Ok(Self { whose, allocator: Arc::clone(allocator), block: Some(block) })
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
        let (device, bytes) = (block.device_id(), block.bytes_usable());
        with_metadata(MARK, || drop(block));
        self.allocator.observers().workspaces.change(device, |stat| stat.decrease(bytes));
    }
}

/// A workspace in somebody's use, and how much of it counts.
#[derive(Clone)]
pub(super) struct Lent {
    /// `None` is none at all.
    pub(super) workspace: Option<Arc<Workspace>>,
    pub(super) bytes: u64,
    /// Good until the lender's next one; [`Lent::FOR_ONCE`] in a capture.
    pub(super) epoch: u64,
}

impl Lent {
    /// Never the lender's.
    pub(super) const FOR_ONCE: u64 = u64::MAX;

    pub(super) fn ptr(&self) -> DevicePtr {
        self.workspace.as_ref().map_or(DevicePtr(0), |workspace| workspace.block().ptr())
    }
}

/// What all handles of a [`Blas`](super::Blas) share: the switches, and the workspaces between products.
pub(super) struct Lender {
    pub(super) allocator: Arc<dyn DeviceAllocator>,
    /// By device.
    bytes_by_default: Box<[u64]>,
    /// What was set by call; [`UNSET`] is nothing.
    bytes_by_call: AtomicU64,
    pub(super) lt_bytes: u64,
    pub(super) unified: bool,
    tf32: AtomicBool,
    deterministic: AtomicBool,
    /// Counts what makes handles look again: workspaces that were cleared, sizes that were set.
    epoch: AtomicU64,
    shelf: Mutex<Shelf>,
}

/// What is kept, in the order of handles.
#[derive(Default)]
struct Shelf {
    kept: BTreeMap<(HandleId, StreamId), Arc<Workspace>>,
    closed: bool,
}

const UNSET: u64 = u64::MAX;

impl Lender {
    pub(super) fn new(allocator: &Arc<dyn DeviceAllocator>, settings: &BlasSettings) -> Self {
        let bytes =
            |device: crate::Device| settings.workspace_bytes.unwrap_or_else(|| default_bytes(device.properties()));
        Self {
            allocator: Arc::clone(allocator),
            bytes_by_default: allocator.instance().devices().map(bytes).collect(),
            bytes_by_call: AtomicU64::new(UNSET),
            lt_bytes: settings.lt_workspace_bytes,
            unified: settings.unified_workspaces,
            tf32: AtomicBool::new(settings.tf32),
            deterministic: AtomicBool::new(settings.deterministic),
            epoch: AtomicU64::new(0),
            shelf: Mutex::default(),
        }
    }

    /// How precise products of the calling thread are.
    pub(super) fn math(&self) -> BlasMath {
        let tf32 = self.tf32.load(Ordering::Relaxed) && !precision::is_tf32_forbidden();
        if tf32 { BlasMath::Tf32 } else { BlasMath::Default }
    }

    /// Whether products may use atomic operations.
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

    /// How large a workspace should be.
    pub(super) fn bytes(&self, library: Library, device: DeviceId) -> u64 {
        if library == Library::BlasLt {
            return self.lt_bytes;
        }
        match self.bytes_by_call.load(Ordering::Acquire) {
            UNSET => self.bytes_by_default[device.0 as usize],
            bytes => bytes,
        }
    }

    pub(super) fn set_bytes(&self, bytes: Option<u64>) {
        // One byte less than everything is as impossible to get.
        let bytes = bytes.map_or(UNSET, |bytes| bytes.min(UNSET - 1));
        self.bytes_by_call.store(bytes, Ordering::Release);
        self.next_epoch();
    }

    /// The workspace that is kept for a handle and a stream, made now if there is none, or a smaller one.
    pub(super) fn lend(&self, library: Library, handle: HandleId, stream: StreamId, device: DeviceId) -> Result<Lent> {
        // Read first: what changes after this makes the next caller look again.
        let epoch = self.epoch();
        let (key, bytes) = ((handle, stream), self.bytes(library, device));
        let closed = || Err(Error::HandlePoolClosed { library: library.name() });
        {
            let shelf = lock(&self.shelf);
            if shelf.closed {
                return closed();
            }
            if bytes == 0 {
                return Ok(Lent { workspace: None, bytes, epoch });
            }
            if let Some(kept) = shelf.kept.get(&key).filter(|kept| kept.bytes() >= bytes) {
                return Ok(Lent { workspace: Some(Arc::clone(kept)), bytes, epoch });
            }
        }
        // From the default pool, wherever the thread is routed to: it outlives the scope. The smaller one goes after
        // the larger one has come, so that a failure leaves it in place.
        let request = Request::new(device, stream, bytes).in_pool(MemPoolId::DEFAULT);
        let workspace = Arc::new(Workspace::allocate(&self.allocator, (None, handle, stream), request)?);
        let mut shelf = lock(&self.shelf);
        if shelf.closed {
            drop(shelf);
            return closed();
        }
        let smaller = shelf.kept.insert(key, Arc::clone(&workspace));
        drop(shelf);
        drop(smaller);
        Ok(Lent { workspace: Some(workspace), bytes, epoch })
    }

    /// Lets go of the workspaces that `which` chooses by handle and stream; how many. Those in use go when their users
    /// are done.
    pub(super) fn clear(&self, mut which: impl FnMut(HandleId, StreamId) -> bool) -> usize {
        let mut shelf = lock(&self.shelf);
        let mut gone = Vec::new();
        shelf.kept.retain(|&(handle, stream), kept| {
            let goes = which(handle, stream);
            if goes {
                gone.push(Arc::clone(kept));
            }
            !goes
        });
        if !gone.is_empty() {
            self.next_epoch();
        }
        drop(shelf);
        // Dropped without the lock: trackers are told of the blocks, and may ask for a handle.
        gone.len()
    }

    /// Lets go of the workspaces of `device` that nobody uses now, be their threads alive or not: the next fetch makes
    /// another.
    pub(super) fn clear_unused(&self, device: DeviceId) -> usize {
        let mut shelf = lock(&self.shelf);
        // Only the shelf gives out more, so one that it alone has stays unused while the lock is held. A handle that
        // remembers one finds it gone by the epoch, or uses it while it is there.
        let goes = |kept: &Arc<Workspace>| kept.block().device_id() == device && Arc::strong_count(kept) == 1;
        let unused: Vec<_> = shelf.kept.iter().filter(|(_, kept)| goes(kept)).map(|(&key, _)| key).collect();
        let gone: Vec<_> = unused.iter().filter_map(|key| shelf.kept.remove(key)).collect();
        if !gone.is_empty() {
            self.next_epoch();
        }
        drop(shelf);
        gone.len()
    }

    /// Keeps nothing from here on.
    pub(super) fn close(&self) {
        lock(&self.shelf).closed = true;
        self.next_epoch();
        self.clear(|_, _| true);
    }
}
