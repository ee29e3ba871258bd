//! Checkpoints of private pools: its allocated blocks are recorded, and restored later at their addresses. This is what
//! all allocators have in common; each frees and allocates its own blocks.
//!
//! A restore checks everything first, and then makes all changes in one step. Use counts, and segments allocated since,
//! are not changed. Blocks that graphs hold, and blocks that serve requests of the default pool (`use_on_oom`), are not
//! freed, and the latter are not recorded.
//!
//! A restore takes account of the streams that use the blocks which it frees. A block that no restored one overlaps
//! waits for them, as after any other free. A restored block's own stream is ordered after them before the restore
//! ([`StreamOrder`]), and they use the restored block too ([`UsedRanges`]).

use std::collections::BTreeSet;

use warpool_driver::{DeviceId, DevicePtr, StreamId};

use super::{Allocation, MemPoolId, stream_fence};
use crate::capture::CaptureStatus;
use crate::{Error, Instance, Result};

/// Checkpoints of the private pools of an allocator.
pub trait Checkpoints: Send + Sync {
    /// Records the allocated blocks of a pool. Fails if the free of one of its blocks is pending, or if the pool is
    /// released.
    fn checkpoint(&self, device: DeviceId, pool: MemPoolId) -> Result<PoolCheckpoint>;

    /// Frees all allocated blocks of the pool, and allocates the recorded blocks again. Fails without any change if
    /// some of that memory was released since. Owners of blocks from before the call free nothing when they are
    /// dropped. Memory that other streams use waits for them, as after any free. The stream of a restored block waits
    /// for the streams that use its memory; these must not be capturing.
    fn restore(&self, checkpoint: &PoolCheckpoint) -> Result<Restored>;
}

/// The blocks of a pool that were allocated when the checkpoint was taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolCheckpoint {
    /// The allocator of the pool.
    pub(super) allocator: u64,
    pub(super) device: DeviceId,
    pub(super) pool: MemPoolId,
    /// By address.
    pub(super) blocks: Vec<SavedBlock>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SavedBlock {
    pub(super) ptr: u64,
    pub(super) size: u64,
    pub(super) requested: u64,
    pub(super) uses: BlockUses,
}

impl SavedBlock {
    pub(super) fn end(&self) -> u64 {
        self.ptr + self.size
    }
}

/// The streams other than its own that use a block.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct BlockUses {
    pub(super) streams: Vec<StreamId>,
    /// Streams that used it while they were capturing, if the allocator distinguishes them.
    pub(super) in_capture: Vec<StreamId>,
}

impl BlockUses {
    pub(super) fn is_empty(&self) -> bool {
        self.streams.is_empty() && self.in_capture.is_empty()
    }
}

impl PoolCheckpoint {
    pub(crate) const fn device(&self) -> DeviceId {
        self.device
    }

    /// Fails unless it was taken from that allocator.
    pub(crate) fn expect_of(&self, allocator: u64) -> Result<()> {
        if self.allocator == allocator { Ok(()) } else { Err(Error::ForeignAllocator { pool: self.pool }) }
    }

    /// The pool that it was taken from.
    #[must_use]
    pub const fn pool(&self) -> MemPoolId {
        self.pool
    }

    /// The addresses of its blocks, ascending.
    pub fn live(&self) -> impl ExactSizeIterator<Item = DevicePtr> + '_ {
        self.blocks.iter().map(|block| DevicePtr(block.ptr))
    }
}

/// The result of restoring a checkpoint. An address may be in both lists: its block is a new one then. Blocks that
/// graphs own, and blocks that serve requests of the default pool ([`use_on_oom`](super::PoolOptions::use_on_oom)), do
/// not change and are in neither list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Restored {
    /// Blocks that were allocated and are freed now: their owners must not use or free them any more.
    pub freed: Vec<DevicePtr>,
    /// Blocks that are allocated now, and belong to the caller.
    pub allocated: Vec<Allocation>,
}

impl PoolCheckpoint {
    /// Whether a saved block overlaps that range.
    pub(super) fn overlaps(&self, start: u64, end: u64) -> bool {
        let behind = self.blocks.partition_point(|block| block.end() <= start);
        self.blocks.get(behind).is_some_and(|block| block.ptr < end)
    }
}

/// A stream that uses memory of a block to be restored, and the stream that the block is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct StreamOrder {
    user: StreamId,
    own: StreamId,
    /// Whether the stream used the memory while it was capturing.
    in_capture: bool,
}

impl StreamOrder {
    /// The orders for a block of `own` that is used by these streams.
    pub(super) fn all(
        own: StreamId,
        streams: &[StreamId],
        in_capture: &[StreamId],
    ) -> impl Iterator<Item = Self> + use<> {
        let order = |in_capture| move |&user: &StreamId| Self { user, own, in_capture };
        let orders: Vec<Self> = streams.iter().map(order(false)).chain(in_capture.iter().map(order(true))).collect();
        orders.into_iter()
    }

    /// Makes `own` wait for `user`. `false` if a capture forbids it.
    fn establish(&self, instance: &Instance) -> Result<bool> {
        if !self.in_capture {
            return stream_fence::order_outside_captures(instance, self.user, self.own);
        }
        // Uses in a capture were joined when the capture ended.
        let refuses = |stream| Result::Ok(CaptureStatus::of(&**instance.driver(), stream)?.refuses_work());
        Ok(!refuses(self.user)? && !refuses(self.own)?)
    }
}

/// Orders streams before a restore. `orders` returns those that are needed now; `restore` gets those that were
/// established, and returns `None`, without any change, if another thread has recorded a use meanwhile.
pub(super) fn restore_ordered(
    instance: &Instance,
    pool: MemPoolId,
    orders: impl Fn() -> Result<BTreeSet<StreamOrder>>,
    mut restore: impl FnMut(&BTreeSet<StreamOrder>) -> Result<Option<Restored>>,
) -> Result<Restored> {
    let mut established = BTreeSet::new();
    loop {
        for order in orders()? {
            if !established.contains(&order) && !order.establish(instance)? {
                let user = order.user;
                let why = "uses memory of a block to be restored, and a capture is under way; end it first";
                return Err(refused(pool, format!("{user} {why}")));
            }
            established.insert(order);
        }
        if let Some(restored) = restore(&established)? {
            return Ok(restored);
        }
    }
}

/// Memory of blocks that were freed while streams used it.
#[derive(Default)]
pub(super) struct UsedRanges(Vec<UsedRange>);

pub(super) struct UsedRange {
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) uses: BlockUses,
}

impl UsedRanges {
    pub(super) fn push(&mut self, (start, end): (u64, u64), uses: BlockUses) {
        if !uses.is_empty() {
            self.0.push(UsedRange { start, end, uses });
        }
    }

    pub(super) fn sort(&mut self) {
        self.0.sort_unstable_by_key(|range| range.start);
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &UsedRange> {
        self.0.iter()
    }

    /// Those that overlap a saved block. They must be sorted.
    pub(super) fn of(&self, saved: &SavedBlock) -> impl Iterator<Item = &UsedRange> {
        let (first, end) = (self.0.partition_point(|range| range.end <= saved.ptr), saved.end());
        self.0[first..].iter().take_while(move |range| range.start < end)
    }
}

/// Why there is no checkpoint, or why it cannot be restored.
pub(super) fn refused(pool: MemPoolId, why: impl Into<String>) -> Error {
    Error::Checkpoint { pool, why: why.into() }
}

impl PoolCheckpoint {
    pub(super) fn released_since(&self, saved: &SavedBlock) -> Error {
        refused(self.pool, format!("could not find {:#x}: the memory was released since", saved.ptr))
    }

    pub(super) fn held_block(&self, ptr: u64) -> Error {
        let what = "where another was; reset the graph first";
        refused(self.pool, format!("a graph owns the block at {ptr:#x}, {what}"))
    }

    pub(super) fn lent_block(&self, ptr: u64) -> Error {
        let what = "serves a request of the default pool, which ran out of memory; free it first";
        refused(self.pool, format!("the block at {ptr:#x} {what}"))
    }
}

/// A freed block of the pool waits for streams.
pub(super) fn refused_pending(pool: MemPoolId) -> Error {
    refused(pool, "a freed block waits for streams that used it; synchronize with them first")
}
