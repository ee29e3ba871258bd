//! [`ElasticVec`]: views are of committed blocks alone, and what leaves is waited for.

use std::sync::Arc;

use warpool::driver::{Copies as _, Pattern};
use warpool::graph::{CaptureOptions, Graph, GraphOptions};
use warpool::memory::{Allocate as _, DeviceAllocator as _, PagedAllocator, Settings};
use warpool::typed::BufferError;
use warpool::{ElasticVec, Error, Result, Stream};

use crate::fixture::Fixture;

/// Of a block: 2 MiB.
const LEN: usize = 1 << 19;

struct Elastic {
    gpu: Fixture,
    paged: Arc<PagedAllocator>,
}

impl Elastic {
    fn new() -> Result<Self> {
        let gpu = Fixture::new()?;
        let paged = Arc::new(PagedAllocator::new(&gpu.instance, Settings::default())?);
        Ok(Self { gpu, paged })
    }

    fn blocks(&self, blocks: usize, stream: &Stream) -> Result<ElasticVec<u32>> {
        Ok(ElasticVec::new(&self.paged, blocks, LEN, stream)?.with_label("kv"))
    }
}

#[test]
fn views_are_of_committed_blocks() -> Result<()> {
    let elastic = Elastic::new()?;
    let stream = elastic.gpu.stream()?;
    let mut cache = elastic.blocks(10, &stream)?;
    assert_eq!((cache.blocks(), cache.block_len(), cache.len(), cache.committed()), (10, LEN, 10 * LEN, 0));
    cache.commit(2..5, &stream)?;
    for block in 2..5 {
        stream.fill(cache.block_mut(block)?, block as u32)?;
    }
    assert_eq!(stream.to_vec(cache.slice(3 * LEN - 1..3 * LEN + 1)?)?, [2, 3]);
    let not_committed = |start, end| BufferError::NotCommitted { buffer: "elastic memory \"kv\"".into(), start, end };
    assert_eq!(cache.block(5).err(), Some(not_committed(5, 6).into()));
    assert_eq!(cache.slice_mut(4 * LEN..5 * LEN + 1).err(), Some(not_committed(4, 6).into()));
    assert_eq!(cache.slice(..).err(), Some(not_committed(0, 10).into()));
    assert!(cache.slice(5 * LEN..5 * LEN)?.is_empty(), "no element of it");
    assert_eq!(cache.block(10).err(), Some(Error::ElasticBlocks { start: 10, end: 11, blocks: 10 }));
    let range = cache.slice(4 * LEN..11 * LEN).err();
    assert!(matches!(range, Some(Error::Buffer(BufferError::Range { .. }))), "{range:?}");
    cache.decommit(0..4, &stream)?;
    assert!(cache.block(3).is_err() && cache.is_committed(4..5));
    assert_eq!(stream.to_vec(cache.block(4)?)?, vec![4; LEN]);
    stream.with_address(cache.block(4)?, |ptr| {
        assert_eq!(ptr, cache.ptr().offset(4 * LEN as u64 * 4));
        Ok(())
    })?;
    elastic.gpu.finish()
}

/// The stream of a decommit waits for all streams that use the blocks, and so do those that get their pages.
#[test]
fn blocks_leave_after_work_in_other_streams() -> Result<()> {
    let elastic = Elastic::new()?;
    let [home, worker, taker] = [elastic.gpu.stream()?, elastic.gpu.stream()?, elastic.gpu.stream()?];
    let mut cache = elastic.blocks(8, &home)?;
    cache.commit(0..8, &home)?;
    stream_fill(&home, &mut cache, 1)?;
    elastic.gpu.gpu.pause_stream(worker.id())?;
    stream_fill(&worker, &mut cache, 2)?;
    cache.decommit(4..8, &home)?;
    let taken = elastic.paged.allocate(8 << 20, &taker)?;
    // It has the pages of the blocks that left.
    assert_eq!(elastic.paged.page_stats(elastic.gpu.device.id())?.reserved_bytes, 16 << 20);
    elastic.gpu.gpu.fill(taken.ptr(), Pattern::U8(5), taken.bytes(), taker.id())?;
    elastic.gpu.gpu.resume_stream(worker.id())?;
    assert_eq!(home.to_vec(cache.block(3)?)?, vec![2; LEN]);
    // Committed in one stream, it is used in another one after that.
    cache.commit(4..8, &worker)?;
    stream_fill(&taker, &mut cache, 3)?;
    assert_eq!(home.to_vec(cache.block(7)?)?, vec![3; LEN]);
    elastic.gpu.finish()
}

fn stream_fill(stream: &Stream, cache: &mut ElasticVec<u32>, value: u32) -> Result<()> {
    stream.fill(cache.slice_mut(..)?, value)
}

#[test]
fn a_graph_keeps_the_blocks_that_it_captured() -> Result<()> {
    let elastic = Elastic::new()?;
    let stream = elastic.gpu.stream()?;
    let mut cache = elastic.blocks(4, &stream)?;
    cache.commit(0..2, &stream)?;
    let mut graph = Graph::new(&elastic.paged, &elastic.gpu.device, GraphOptions::default())?;
    graph.capture(&stream, CaptureOptions::default(), |capture| {
        let stream = capture.stream().clone();
        assert_eq!(cache.commit(2..3, &stream), Err(Error::ElasticInCapture { stream: stream.id() }));
        stream.fill(cache.block_mut(1)?, 7)
    })?;
    graph.replay(&stream)?;
    let refused = cache.decommit(1..2, &stream);
    assert!(matches!(refused, Err(Error::Buffer(BufferError::ElasticInGraph { .. }))), "{refused:?}");
    cache.commit(2..4, &stream)?;
    graph.replay(&stream)?;
    assert_eq!(stream.to_vec(cache.block(1)?)?, vec![7; LEN]);
    // The graph keeps it although its owner has gone.
    drop(cache);
    graph.replay(&stream)?;
    drop(graph);
    stream.synchronize()?;
    elastic.gpu.finish()
}
