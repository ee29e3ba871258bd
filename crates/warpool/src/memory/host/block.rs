//! Blocks: [`HostBlock`], which its owner has, and the cell inside, which moves between owners and caches without being
//! made anew.
//!
//! What the hot path asks of a cell is one number: its `traits`, nonzero if anything about it is out of the ordinary.
//! Everything else about uses is behind the cell's own lock, which is a leaf.

use std::fmt;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

use warpool_driver::{DeviceId, HostPtr, StreamId};

use super::Shared;
use super::capture::GraphHostPool;
use crate::memory::Stack;
use crate::{Error, Instance, Result, Stream};

/// Streams or graphs used it: it cannot be given out again at once.
pub(super) const USED: u8 = 1;
/// It came from a graph's pool, and goes back there.
pub(super) const POOLED: u8 = 2;
/// A call stack is kept with it.
pub(super) const STACKED: u8 = 4;

/// Where a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Standing {
    /// In a cache, or about to be in the heap.
    Idle,
    /// With its owner.
    Taken,
    /// Given back, and streams or graphs may still use it.
    Waiting,
    /// Back in the heap: there is no such block any more.
    Gone,
}

/// A block, wherever it is.
pub(super) struct BlockCell {
    /// Blocks keep the allocator's books alive, not the other way round: those are cleared when the last handle goes.
    pub(super) shared: Arc<Shared>,
    pub(super) ptr: u64,
    pub(super) size: u64,
    /// Where its segment starts.
    pub(super) segment: u64,
    pub(super) device: DeviceId,
    standing: AtomicU8,
    traits: AtomicU8,
    /// The cache that it was taken from, or counted in.
    home: AtomicU32,
    /// What its owner asked for, or the last one did.
    requested: AtomicU64,
    pub(super) notes: Mutex<BlockNotes>,
}

/// What is out of the ordinary about a block.
#[derive(Default)]
pub(super) struct BlockNotes {
    /// Streams that used it and have no mark yet.
    pub(super) uses: Vec<Use>,
    /// Marks that have not passed, and those that are being put.
    pub(super) marks: u32,
    /// Pools of graphs that use it at every replay.
    pub(super) graphs: u32,
    /// A graph uses it that Warpool knows nothing of: it is never given out again.
    pub(super) lost: bool,
    /// Its owner gave it back.
    pub(super) given_back: bool,
    /// It is on the list of those that still need marks.
    pub(super) listed: bool,
    /// The pool that it came from.
    pub(super) pool: Weak<GraphHostPool>,
    pub(super) stack: Option<Stack>,
}

/// A stream that used a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Use {
    pub(super) stream: StreamId,
    pub(super) device: DeviceId,
}

impl Use {
    pub(super) fn of(stream: &Stream) -> Self {
        Self { stream: stream.id(), device: stream.device_id() }
    }
}

impl BlockNotes {
    pub(super) fn add_use(&mut self, new: Use) {
        if !self.uses.contains(&new) {
            self.uses.push(new);
        }
    }

    /// A use to put a mark for, of a block that was given back. It counts as a mark from here on.
    pub(super) fn take_use(&mut self) -> Option<Use> {
        if !self.given_back {
            // Somebody else did all of it, and it may have an owner again.
            return None;
        }
        let used = self.uses.pop()?;
        self.marks += 1;
        Some(used)
    }

    /// Uses that were taken and could not be marked.
    pub(super) fn put_uses_back(&mut self, left: &[Use]) {
        self.marks -= left.len() as u32;
        left.iter().for_each(|&used| self.add_use(used));
    }

    /// Whether nothing stands in the way but a graph that Warpool knows nothing of.
    pub(super) fn is_only_lost(&self) -> bool {
        self.lost && self.uses.is_empty() && self.marks == 0 && self.graphs == 0
    }

    /// Whether it was given back and nothing stands in the way any more. Says so once.
    pub(super) fn settle(&mut self) -> bool {
        let settled = self.given_back && self.uses.is_empty() && self.marks == 0 && self.graphs == 0 && !self.lost;
        if settled {
            self.given_back = false;
        }
        settled
    }
}

impl BlockCell {
    pub(super) fn new(shared: &Arc<Shared>, ptr: u64, size: u64, segment: u64, device: DeviceId) -> Self {
        Self {
            shared: Arc::clone(shared),
            ptr,
            size,
            segment,
            device,
            standing: AtomicU8::new(Standing::Idle as u8),
            traits: AtomicU8::new(0),
            home: AtomicU32::new(0),
            requested: AtomicU64::new(0),
            notes: Mutex::default(),
        }
    }

    /// It has an owner from here on.
    #[inline]
    pub(super) fn taken(&self, home: u32, bytes: u64) {
        self.home.store(home, Ordering::Relaxed);
        self.requested.store(bytes, Ordering::Relaxed);
        self.stand(Standing::Taken);
    }

    #[inline]
    pub(super) fn home(&self) -> u32 {
        self.home.load(Ordering::Relaxed)
    }

    #[inline]
    pub(super) fn requested(&self) -> u64 {
        self.requested.load(Ordering::Relaxed)
    }

    #[inline]
    pub(super) fn stand(&self, standing: Standing) {
        self.standing.store(standing as u8, Ordering::Relaxed);
    }

    pub(super) fn standing(&self) -> Standing {
        match self.standing.load(Ordering::Relaxed) {
            0 => Standing::Idle,
            1 => Standing::Taken,
            2 => Standing::Waiting,
            _ => Standing::Gone,
        }
    }

    #[inline]
    pub(super) fn traits(&self) -> u8 {
        self.traits.load(Ordering::Acquire)
    }

    pub(super) fn set_trait(&self, bit: u8) {
        self.traits.fetch_or(bit, Ordering::AcqRel);
    }

    pub(super) fn clear_trait(&self, bit: u8) {
        self.traits.fetch_and(!bit, Ordering::AcqRel);
    }
}

/// Pinned host memory with one owner. Dropping it gives it back without a driver call; what needs one (marks in streams
/// that used it, memory that is not to be kept) is left to the allocator's next call that makes any: a request that its
/// thread's cache cannot serve, a `free` of memory that streams used, a look ([`reap`](super::HostAllocator::reap)) or
/// a trim. [`free`](Self::free) does it at once.
///
/// It keeps the driver alive, and its memory stays pinned also when the allocator is gone.
pub struct HostBlock {
    /// `None` for an empty one.
    cell: Option<Arc<BlockCell>>,
}

impl HostBlock {
    #[inline]
    pub(super) fn new(cell: Arc<BlockCell>) -> Self {
        Self { cell: Some(cell) }
    }

    pub(super) fn empty() -> Self {
        Self { cell: None }
    }

    /// Where it starts, for the host and for every device; null if it is empty.
    #[must_use]
    pub fn ptr(&self) -> HostPtr {
        HostPtr(self.cell.as_ref().map_or(0, |cell| cell.ptr))
    }

    /// How much was asked for.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.cell.as_ref().map_or(0, |cell| cell.requested())
    }

    /// How much there is, after rounding.
    #[must_use]
    pub fn bytes_usable(&self) -> u64 {
        self.cell.as_ref().map_or(0, |cell| cell.size)
    }

    /// Notes that work in `stream` uses it: given back, it goes to its next owner only when what is in the stream by
    /// then has passed. If the stream captures, the graph needs the memory at every replay, and it goes to nobody
    /// before the graph is gone.
    ///
    /// A capture that began past Warpool makes a graph of which nothing is known: the block is never given out again
    /// then, and a warning says so.
    pub fn record_use(&self, stream: &Stream) -> Result<()> {
        match &self.cell {
            Some(cell) => Shared::record_use(cell, stream),
            None => Ok(()),
        }
    }

    /// Reads from it on the host, `offset` bytes from its start. Waits for nothing.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        let Some((shared, ptr)) = self.part(offset, into.len() as u64)? else { return Ok(()) };
        Ok(shared.driver().host_read(ptr, into)?)
    }

    /// Writes to it on the host, `offset` bytes from its start. Waits for nothing.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let Some((shared, ptr)) = self.part(offset, bytes.len() as u64)? else { return Ok(()) };
        Ok(shared.driver().host_write(ptr, bytes)?)
    }

    /// The address of a part that lies in it; `None` if that is empty.
    fn part(&self, offset: u64, bytes: u64) -> Result<Option<(&Shared, HostPtr)>> {
        let available = self.bytes();
        match (&self.cell, offset.checked_add(bytes)) {
            (_, Some(end)) if end <= available && bytes == 0 => Ok(None),
            (Some(cell), Some(end)) if end <= available => Ok(Some((&cell.shared, HostPtr(cell.ptr + offset)))),
            _ => Err(Error::HostBounds { offset, bytes, available }),
        }
    }

    /// Fails if it is not memory of `instance`; an empty one is anybody's.
    pub(crate) fn expect_of(&self, instance: &Instance) -> Result<()> {
        self.cell.as_ref().map_or(Ok(()), |cell| instance.expect_same(&cell.shared.instance, "the block"))
    }

    /// Gives it back at once, and says what went wrong if something did. It is given back either way.
    pub fn free(mut self) -> Result<()> {
        self.cell.take().map_or(Ok(()), Shared::free)
    }
}

impl Drop for HostBlock {
    #[inline]
    fn drop(&mut self) {
        if let Some(cell) = self.cell.take() {
            Shared::free_later(cell);
        }
    }
}

impl fmt::Debug for HostBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes pinned at {}", self.bytes(), self.ptr())
    }
}
