//! Block pools: the small or the large half of a memory pool, with the free blocks of each stream.

use std::collections::{BTreeMap, BTreeSet};

use warpool_driver::StreamId;

use super::free_list::FreeList;
use super::key::{BlockKey, BlockPoolKey, SegmentKey, StreamBlocksKey};
use crate::memory::{MemPoolId, SegmentKind};
use crate::steps;

/// The small or the large half of a memory pool.
pub(crate) struct BlockPool {
    pub(super) pool: MemPoolId,
    pub(super) kind: SegmentKind,
    pub(super) has_upstream: bool,
    pub(super) no_split: bool,
    pub(super) streams: PoolStreams,
    /// How often it was searched; counted only if garbage collection of old segments is enabled.
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
        self.streams.len() == 0
    }

    #[inline]
    pub(super) fn of_stream(&self, stream: StreamId) -> Option<StreamBlocksKey> {
        if crate::defect::Defect::SearchesOtherStreams.is_on() {
            return self.streams.get(stream).or_else(|| self.streams.keys().next());
        }
        self.streams.get(stream)
    }
}

/// The streams that have segments in a block pool, in order.
#[derive(Default)]
pub(super) struct PoolStreams {
    all: BTreeMap<StreamId, StreamBlocksKey>,
    /// The only stream, if there is exactly one, as in most programs.
    only: Option<(StreamId, StreamBlocksKey)>,
}

impl PoolStreams {
    #[inline]
    fn get(&self, stream: StreamId) -> Option<StreamBlocksKey> {
        match self.only {
            Some((only, key)) => (only == stream).then_some(key),
            None => self.all.get(&stream).copied(),
        }
    }

    pub(super) fn insert(&mut self, stream: StreamId, key: StreamBlocksKey) {
        self.all.insert(stream, key);
        self.find_only();
    }

    pub(super) fn remove(&mut self, stream: StreamId) {
        self.all.remove(&stream);
        self.find_only();
    }

    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    pub(super) fn keys(&self) -> impl Iterator<Item = StreamBlocksKey> + '_ {
        self.all.values().copied().inspect(|_| steps::count())
    }

    fn find_only(&mut self) {
        let first = self.all.first_key_value().map(|(&stream, &key)| (stream, key));
        self.only = first.filter(|_| self.all.len() == 1);
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
    /// Its segments; it is removed with the last.
    pub(super) segments: BTreeSet<SegmentKey>,
}

impl StreamBlocks {
    pub(super) fn new(block_pool: BlockPoolKey, stream: StreamId, stream_raw: u64) -> Self {
        Self {
            block_pool,
            stream,
            stream_raw,
            free: FreeList::default(),
            unmapped: BTreeMap::new(),
            segments: BTreeSet::new(),
        }
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
