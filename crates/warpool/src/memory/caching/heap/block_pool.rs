//! Block pools: the small or the large half of a memory pool, with the free blocks of each stream.

use std::collections::BTreeMap;

use warpool_driver::StreamId;

use super::free_list::FreeList;
use super::key::{BlockKey, BlockPoolKey, StreamBlocksKey};
use crate::memory::{MemPoolId, SegmentKind};

/// The small or the large half of a memory pool.
pub(crate) struct BlockPool {
    pub(super) pool: MemPoolId,
    pub(super) kind: SegmentKind,
    pub(super) has_upstream: bool,
    pub(super) no_split: bool,
    /// In the order of streams.
    pub(super) streams: Vec<(StreamId, StreamBlocksKey)>,
    /// How often it was searched; counted only where segments are garbage collected by age.
    pub(super) searches: u64,
}

impl BlockPool {
    #[inline]
    pub(crate) fn pool(&self) -> MemPoolId {
        self.pool
    }

    #[inline]
    pub(crate) fn kind(&self) -> SegmentKind {
        self.kind
    }

    /// Whether its segments come from the pool's upstream.
    #[inline]
    pub(crate) fn has_upstream(&self) -> bool {
        self.has_upstream
    }

    /// Whether it has no segments.
    pub(crate) fn is_empty(&self) -> bool {
        self.streams.is_empty()
    }

    #[inline]
    pub(super) fn of_stream(&self, stream: StreamId) -> Option<StreamBlocksKey> {
        // Most programs have one stream, or a few.
        match self.streams.as_slice() {
            [(only, key)] => (*only == stream).then_some(*key),
            streams => streams.binary_search_by_key(&stream, |&(stream, _)| stream).ok().map(|at| streams[at].1),
        }
    }
}

/// The blocks of one stream in one block pool. A search sees no other stream's blocks.
pub(crate) struct StreamBlocks {
    pub(super) block_pool: BlockPoolKey,
    pub(super) stream: StreamId,
    /// The driver's handle of the stream, for snapshots.
    pub(super) stream_raw: u64,
    pub(super) free: FreeList,
    /// Unmapped blocks by address.
    pub(super) unmapped: BTreeMap<u64, BlockKey>,
    /// How many segments it has; it is removed with the last.
    pub(super) segments: u32,
}

impl StreamBlocks {
    pub(super) fn new(block_pool: BlockPoolKey, stream: StreamId, stream_raw: u64) -> Self {
        Self { block_pool, stream, stream_raw, free: FreeList::default(), unmapped: BTreeMap::new(), segments: 0 }
    }

    #[inline]
    pub(crate) fn stream_raw(&self) -> u64 {
        self.stream_raw
    }

    #[inline]
    pub(crate) fn block_pool(&self) -> BlockPoolKey {
        self.block_pool
    }
}
