//! Blocks: the owning handle [`HostBlock`], and [`PinnedBlock`] inside, which moves between owners and caches without a
//! heap allocation.
//!
//! The hot path reads only the block's flags, which are nonzero if it needs special treatment. The rest of its usage is
//! protected by the block's own lock, which is a leaf.

use std::fmt;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use warpool_driver::{DeviceId, HostPtr, StreamId};

use super::Shared;
use super::size_class::class_of_block;
use crate::memory::stream_fence::StreamUses;
use crate::memory::{MemPoolId, Stack};
use crate::{Error, Instance, Result, Stream, lock};

/// Streams or graphs used it: it cannot be reused at once.
pub(super) const USED: u8 = 1;
/// It was allocated from a graph's pool, and returns there.
pub(super) const IN_GRAPH_POOL: u8 = 2;
/// Its usage has a call stack.
pub(super) const HAS_STACK: u8 = 4;

/// The state of a pinned block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum PinnedState {
    /// In a cache, or about to be merged.
    Free,
    Allocated,
    /// Pending free: streams or graphs may still use it.
    PendingFree,
    /// Merged into the free ranges of the heap; the block no longer exists.
    Merged,
}

/// The allocator and shard that a new block belongs to.
#[derive(Clone, Copy)]
pub(super) struct BlockOwner<'a> {
    pub(super) shared: &'a Arc<Shared>,
    /// The shard of its segment.
    pub(super) shard: usize,
}

/// The reference to the allocator's state that the blocks of one shard share. Creating or dropping a block changes this
/// reference count, on cache lines that only threads of this shard write, and not the count of the state.
#[repr(align(128))]
pub(super) struct StateRef(Arc<Shared>);

impl StateRef {
    pub(super) fn new(shared: &Arc<Shared>) -> Arc<Self> {
        Arc::new(Self(Arc::clone(shared)))
    }
}

pub(super) struct PinnedBlock {
    /// Blocks keep the allocator's state alive. The state's references to blocks are dropped with the last handle.
    state_ref: Arc<StateRef>,
    ptr: u64,
    size: u64,
    /// Where its segment starts.
    segment: u64,
    /// The shard of its segment. Only a segment without blocks moves to another.
    shard: u32,
    device: DeviceId,
    /// Its size class, if its size is that of a class.
    class: Option<u8>,
    state: AtomicU8,
    flags: AtomicU8,
    /// The front cache that it was taken from or counted in.
    home: AtomicU32,
    requested: AtomicU64,
    pub(super) usage: Mutex<Usage>,
}

/// The usage of a block that its flags summarize.
#[derive(Default)]
pub(super) struct Usage {
    pub(super) streams: StreamUses,
    /// How many graph pools use it at every replay.
    pub(super) graphs: u32,
    /// Whether an unknown graph uses it; it is never reused then.
    pub(super) in_foreign_graph: bool,
    /// The graph pool that it was allocated from.
    pub(super) pool: Option<GraphPoolKey>,
    pub(super) stack: Option<Stack>,
}

/// Identifies a graph's pool by the address of the device allocator and the pool id. Graphs keep the allocator alive,
/// so the address is unique as long as the pool exists.
pub(super) type GraphPoolKey = (usize, DeviceId, MemPoolId);

impl Usage {
    /// Whether only an unknown graph may still use it.
    pub(super) fn is_leaked(&self) -> bool {
        self.in_foreign_graph && self.streams.is_clear() && self.graphs == 0
    }

    /// Whether the block is freed and nothing may still use it. Returns `true` to exactly one caller, which must
    /// reclaim it.
    pub(super) fn take_reclaimable(&mut self) -> bool {
        self.graphs == 0 && !self.in_foreign_graph && self.streams.take_reclaimable()
    }
}

impl PinnedBlock {
    pub(super) fn new(
        state_ref: &Arc<StateRef>,
        shard: usize,
        ptr: u64,
        size: u64,
        segment: u64,
        device: DeviceId,
    ) -> Self {
        Self {
            state_ref: Arc::clone(state_ref),
            ptr,
            size,
            segment,
            shard: shard as u32,
            device,
            class: class_of_block(size),
            state: AtomicU8::new(PinnedState::Free as u8),
            flags: AtomicU8::new(0),
            home: AtomicU32::new(0),
            requested: AtomicU64::new(0),
            usage: Mutex::default(),
        }
    }

    #[inline]
    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.state_ref.0
    }

    #[inline]
    pub(super) fn ptr(&self) -> u64 {
        self.ptr
    }

    #[inline]
    pub(super) fn size(&self) -> u64 {
        self.size
    }

    #[inline]
    pub(super) fn class(&self) -> Option<u8> {
        self.class
    }

    pub(super) fn segment(&self) -> u64 {
        self.segment
    }

    pub(super) fn shard(&self) -> usize {
        self.shard as usize
    }

    pub(super) fn device(&self) -> DeviceId {
        self.device
    }

    /// Marks it as allocated.
    #[inline]
    pub(super) fn set_allocated(&self, home: usize, bytes: u64) {
        self.home.store(home as u32, Ordering::Relaxed);
        self.requested.store(bytes, Ordering::Relaxed);
        self.set_state(PinnedState::Allocated);
    }

    #[inline]
    pub(super) fn home(&self) -> usize {
        self.home.load(Ordering::Relaxed) as usize
    }

    /// The requested size, or that of the last owner if it has none.
    #[inline]
    pub(super) fn requested(&self) -> u64 {
        self.requested.load(Ordering::Relaxed)
    }

    #[inline]
    pub(super) fn set_state(&self, state: PinnedState) {
        self.state.store(state as u8, Ordering::Relaxed);
    }

    pub(super) fn state(&self) -> PinnedState {
        match self.state.load(Ordering::Relaxed) {
            0 => PinnedState::Free,
            1 => PinnedState::Allocated,
            2 => PinnedState::PendingFree,
            _ => PinnedState::Merged,
        }
    }

    #[inline]
    pub(super) fn flags(&self) -> u8 {
        self.flags.load(Ordering::Acquire)
    }

    pub(super) fn set_flag(&self, flag: u8) {
        self.flags.fetch_or(flag, Ordering::AcqRel);
    }

    pub(super) fn clear_flags(&self, flags: u8) {
        self.flags.fetch_and(!flags, Ordering::AcqRel);
    }
}

/// Pinned host memory with one owner. Dropping it frees it without a driver call. Work that needs one (fences in
/// streams that used it, unpinning memory that is not to be kept) is left to the allocator's next call that makes
/// driver calls: a request that its thread's cache cannot serve, a `free` of memory that streams used,
/// [`process_pending`](super::HostAllocator::process_pending) or a trim. [`free`](Self::free) does it at once.
///
/// It keeps the driver alive, and its memory stays pinned when the allocator is gone.
pub struct HostBlock {
    /// `None` for an empty one.
    block: Option<Arc<PinnedBlock>>,
}

impl HostBlock {
    #[inline]
    pub(super) fn new(block: Arc<PinnedBlock>) -> Self {
        Self { block: Some(block) }
    }

    pub(super) fn empty() -> Self {
        Self { block: None }
    }

    /// Its address, for the host and for every device; null if it is empty.
    #[must_use]
    #[inline]
    pub fn ptr(&self) -> HostPtr {
        HostPtr(self.block.as_ref().map_or(0, |block| block.ptr))
    }

    /// The requested size.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.block.as_ref().map_or(0, |block| block.requested())
    }

    /// The size after rounding.
    #[must_use]
    pub fn bytes_usable(&self) -> u64 {
        self.block.as_ref().map_or(0, |block| block.size)
    }

    /// The block as a plain pointer, for C callers; null if it is empty. [`from_raw`](Self::from_raw) takes it back,
    /// and until then it stays allocated.
    #[must_use]
    #[inline]
    pub fn into_raw(mut self) -> *const () {
        self.block.take().map_or(std::ptr::null(), |block| Arc::into_raw(block).cast())
    }

    /// The block that [`into_raw`](Self::into_raw) returned.
    ///
    /// # Safety
    /// `raw` must come from `into_raw`, and must not be used again.
    #[must_use]
    #[inline]
    #[expect(unsafe_code, reason = "a C caller owns it meanwhile")]
    pub unsafe fn from_raw(raw: *const ()) -> Self {
        if raw.is_null() {
            return Self::empty();
        }
        // SAFETY: it came from `Arc::into_raw` in `into_raw`, and by this function's contract has one user.
        Self::new(unsafe { Arc::from_raw(raw.cast()) })
    }

    /// Records that work in `stream` uses it: after its free it is reused only once the work that the stream holds at
    /// that time is done. If the stream is capturing, the graph uses the memory at every replay, and it is not reused
    /// before the graph is gone.
    ///
    /// A capture that was begun without Warpool creates a graph that Warpool does not know. The block is never reused
    /// then, and a warning is logged.
    pub fn record_use(&self, stream: &Stream) -> Result<()> {
        match &self.block {
            Some(block) => Shared::record_use(block, stream),
            None => Ok(()),
        }
    }

    /// Records that work in `streams` uses it. Makes no driver call.
    pub(crate) fn record_replays(&self, streams: &[StreamId]) {
        if let Some(block) = &self.block {
            lock(&block.usage).streams.add_all(streams.iter().copied());
            block.set_flag(USED);
        }
    }

    /// Reads on the host, starting at `offset`. Does not wait for anything.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        let Some((shared, ptr)) = self.range(offset, into.len() as u64)? else { return Ok(()) };
        Ok(shared.driver().host_read(ptr, into)?)
    }

    /// Writes on the host, starting at `offset`. Does not wait for anything.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let Some((shared, ptr)) = self.range(offset, bytes.len() as u64)? else { return Ok(()) };
        Ok(shared.driver().host_write(ptr, bytes)?)
    }

    /// The address of a range within the block; `None` if the range is empty.
    fn range(&self, offset: u64, bytes: u64) -> Result<Option<(&Shared, HostPtr)>> {
        let available = self.bytes();
        match (&self.block, offset.checked_add(bytes)) {
            (_, Some(end)) if end <= available && bytes == 0 => Ok(None),
            (Some(block), Some(end)) if end <= available => Ok(Some((block.shared(), HostPtr(block.ptr + offset)))),
            _ => Err(Error::HostBounds { offset, bytes, available }),
        }
    }

    /// Fails if it is not memory of `instance`. An empty block belongs to every instance.
    pub(crate) fn expect_of(&self, instance: &Instance) -> Result<()> {
        self.block.as_ref().map_or(Ok(()), |block| instance.expect_same(&block.shared().instance, "the block"))
    }

    /// The block, if it belongs to this allocator.
    #[inline]
    pub(super) fn into_own(mut self, shared: &Arc<Shared>) -> std::result::Result<Arc<PinnedBlock>, Self> {
        match self.block.take() {
            Some(block) if Arc::ptr_eq(block.shared(), shared) => Ok(block),
            block => Err(Self { block }),
        }
    }

    /// Frees it at once, with the necessary driver calls. It is freed even if one of them fails.
    pub fn free(mut self) -> Result<()> {
        self.block.take().map_or(Ok(()), Shared::free)
    }
}

impl Drop for HostBlock {
    #[inline]
    fn drop(&mut self) {
        // A separate function, so that dropping an empty block, as after `into_raw`, is only the test.
        if let Some(block) = self.block.take() {
            Shared::free_later(block);
        }
    }
}

impl fmt::Debug for HostBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes pinned at {}", self.bytes(), self.ptr())
    }
}
